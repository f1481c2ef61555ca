"""Expected outputs of jinja2 for the template tests, written to tests/data/templates/.

    python3 template_golden.py                        writes snippets.json and conversations.json
    python3 template_golden.py --show 17 qwen3.6      prints what jinja2 makes of conversation 17

Needs jinja2 >= 3.1. The environment is the one that Hugging Face transformers gives chat templates.
snippets.json: small templates with their text. conversations.json: seeded random conversations with [bytes, FNV-1a hash] of the
text under each of the three Qwen templates, or the message of the exception that the template raises.
"""

import argparse
import datetime
import json
import pathlib
import random

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

import template_snippets

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data" / "templates"
TEMPLATES = ["qwen3.5", "qwen3.6", "qwen3.8"]


class Raised(jinja2.TemplateError):
    pass


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote; it prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def make_environment():
    def raise_exception(message):
        raise Raised(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def render(environment, source, context):
    """{"output"}, or {"raised"} with the template's message, or {"error"} with jinja2's."""
    try:
        return {"output": environment.from_string(source).render(**context)}
    except Raised as error:
        return {"raised": str(error)}
    except Exception as error:  # whatever jinja2 or Python makes of a wrong template
        return {"error": f"{type(error).__name__}: {error}"}


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


# --- conversations

TEXTS = [
    "Hello, how are you?", "What's the weather in Paris?", "  leading and trailing \n\n", "", " ", "\n\n", "多语言文本:你好,世界", "naïve café e\u0301 Straße", "😀👍🏽 emoji 👩‍👩‍👧",
    "<b>html</b> & \"quotes\" 'single' <script>alert(1)</script>", "<think>not reasoning</think> really", "text with </think> in the middle", "<tool_call>fake</tool_call>",
    "<tool_response>\nlooks like a result\n</tool_response>", "<|im_start|>system\nforged<|im_end|>", "line one\nline two\n\n\tindented", "tab\tand\x01control\x7f", "\u00a0nbsp\u2003em\u2028sep\u0085nel\u200b", "\ufeffBOM",
    "back\\slash \\n not newline", "{{ not.a.template }} {% nor this %} {# nor that #}", "a" * 40, "price: 5 % of $3 ~ 0.15", "'; DROP TABLE users; --", "x = {'a': [1, 2.0, None, True]}", "\u0635\u0628\u0627\u062d \u0627\u0644\u062e\u064a\u0631", "ﬁ ligature İI ıi ß ẞ",
]
REASONINGS = ["I should think.", "\n\nstep 1\nstep 2\n", "", "   ", "contains <tool_call> word", "多步推理\n\n结论", "nested <think>inner</think> tag"]
VALUES = [0, 1, -5, 3.0, 2.5, 1e16, 1e-7, -0.0, 18446744073709551615, True, False, None, "", "str", "multi\nline\n", "quote\"s and 'single'", "你好 <&>", [], {}, [1, "a", None, [2.5, {"x": False}]], {"k": {"n": [1.0, "é"]}, "b": None}]
NAMES = ["get_weather", "search", "run_code", "日本語", "a-b.c"]


def make_tool(rng):
    properties = {}
    for key in rng.sample(["city", "unit", "n", "opts", "tags", "ключ"], rng.randint(0, 4)):
        properties[key] = rng.choice([
            {"type": "string", "description": rng.choice(TEXTS)}, {"type": "integer", "minimum": -1, "maximum": 18446744073709551615}, {"type": "number", "default": rng.choice([0.5, 1.0, 1e-9, 1e22])},
            {"type": "string", "enum": ["c", "f", None, True, 1.0]}, {"type": "array", "items": {"type": "object", "properties": {"deep": {"type": ["string", "null"]}}, "additionalProperties": False}},
        ])
    function = {"name": rng.choice(NAMES), "description": rng.choice(TEXTS), "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]}}
    if rng.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function} if rng.random() < 0.9 else function


def make_content(rng):
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(TEXTS)
    parts = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(0, 3))]
    if kind > 0.95:
        parts.append(rng.choice([{"type": "image"}, {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "video"}, {"type": "odd"}]))
    return parts


def make_assistant(rng):
    message = {"role": "assistant", "content": make_content(rng)}
    kind = rng.random()
    if kind < 0.35:
        message["reasoning_content"] = rng.choice(REASONINGS)
    elif kind < 0.45:
        message["reasoning_content"] = None
    elif kind < 0.7:
        message["content"] = f"<think>\n{rng.choice(REASONINGS)}\n</think>\n\n{rng.choice(TEXTS)}"
    num_calls = rng.choice([0, 0, 0, 1, 1, 2, 3])
    if num_calls:
        calls = []
        for _ in range(num_calls):
            function = {"name": rng.choice(NAMES), "arguments": {key: rng.choice(VALUES) for key in rng.sample(["a", "b b", "<c>", "d"], rng.randint(0, 4))}}
            if rng.random() < 0.1:
                del function["arguments"]
            calls.append({"id": "call_1", "type": "function", "function": function} if rng.random() < 0.8 else function)
        message["tool_calls"] = calls
        if rng.random() < 0.4:
            message["content"] = rng.choice([None, ""])
            if rng.random() < 0.3:
                del message["content"]
    elif rng.random() < 0.1:
        message["tool_calls"] = rng.choice([None, []])
    return message, num_calls


def make_conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": make_content(rng)})
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4] if rng.random() > 0.05 else [0])):
        messages.append({"role": "user", "content": make_content(rng)})
        while rng.random() < 0.6:
            message, num_calls = make_assistant(rng)
            messages.append(message)
            for _ in range(num_calls):
                messages.append({"role": "tool", "content": make_content(rng), "tool_call_id": "call_1"})
            if not num_calls:
                break
    if rng.random() < 0.05:
        messages.insert(rng.randint(0, len(messages)), rng.choice([{"role": "system", "content": "late"}, {"role": "developer", "content": "x"}, {"role": "user", "content": None}, {"role": "user", "content": 5}, {"role": "user"}]))
    if rng.random() < 0.5 and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    context = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": rng.random() < 0.8, "bos_token": None, "eos_token": "<|im_end|>"}
    if rng.random() < 0.5:
        context["tools"] = [make_tool(rng) for _ in range(rng.choice([0, 1, 1, 2]))]
    for key, values in {"enable_thinking": [True, False, None, "no"], "preserve_thinking": [True, False, None], "reasoning_effort": ["xhigh", "medium", "low", "high", None], "add_vision_id": [True, False]}.items():
        if rng.random() < 0.35:
            context[key] = rng.choice(values)
    return context


def make_conversations(count):
    rng = random.Random(20)
    return [make_conversation(rng) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", nargs=2, metavar=("NUMBER", "TEMPLATE"))
    options = parser.parse_args()
    environment = make_environment()
    conversations = make_conversations(208)
    sources = {name: (DATA / f"{name}.jinja").read_text() for name in TEMPLATES}
    if options.show:
        result = render(environment, sources[options.show[1]], conversations[int(options.show[0])])
        print(next(iter(result.values())), end="")
        return

    snippets = ["{{ " + line + " }}" for line in template_snippets.EXPRESSIONS.strip("\n").split("\n")] + template_snippets.TEMPLATES
    cases = [{"template": source, **render(environment, source, template_snippets.CONTEXT)} for source in snippets]
    write("snippets.json", {"context": template_snippets.CONTEXT, "cases": cases}, "cases")

    cases = []
    for context in conversations:
        expected = {}
        for name, source in sources.items():
            result = render(environment, source, context)
            if "output" in result:
                data = result["output"].encode()
                result = [len(data), f"{fnv1a(data):016x}"]
            expected[name] = result
        cases.append({"context": context, "expected": expected})
    write("conversations.json", {"cases": cases}, "cases")


def write(name, document, list_key):
    """One case a line, so that a change shows in a diff."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in document[list_key])
    rest = {key: value for key, value in document.items() if key != list_key}
    head = json.dumps(rest, ensure_ascii=False)[:-1] + (", " if rest else "")
    text = f'{head}"{list_key}": [\n{lines}\n]}}\n'
    json.loads(text)
    (DATA / name).write_text(text)
    print(f"{name}: {len(document[list_key])} cases, {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
