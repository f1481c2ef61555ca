"""The prompt format of models/quern-demo/chat_template.jinja, written in Python so that millions of conversations render quickly.
check_template.py holds the two equal."""

import json

TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call one, answer with nothing but blocks of this form, one for each call:\n\n"
    "<tool_call>\n<function=NAME>\n<parameter=PARAMETER>\nvalue\n</parameter>\n</function>\n</tool_call>\n\n"
    "Give every required parameter. Without a fitting function, answer in plain words.")


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def tool_calls_text(calls):
    """`calls`: a list of (name, {argument: value})."""
    blocks = []
    for name, arguments in calls:
        lines = [f"<tool_call>\n<function={name}>\n"]
        for key, value in arguments.items():
            lines.append(f"<parameter={key}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n")
        lines.append("</function>\n</tool_call>")
        blocks.append("".join(lines))
    return "\n".join(blocks)


def answer_text(message):
    """What follows the reasoning in an assistant's message."""
    calls = message.get("tool_calls")
    content = message.get("content") or ""
    if not calls:
        return content
    return (content + "\n\n" if content else "") + tool_calls_text(calls)


def segments(messages, tools=None, thinking=True):
    """A whole conversation as [(text, is_answer)]. Its last message is the assistant's, and the prompt that leads to it is all
    that stands before the last answer segment. Messages: {"role", "content", "reasoning", "tool_calls": [(name, arguments)]}."""
    parts, pending = [], []

    def answer(text):
        parts.append(("".join(pending), False))
        pending.clear()
        parts.append((text, True))

    first = 0
    system = ""
    if messages[0]["role"] == "system":
        system, first = messages[0]["content"], 1
    if tools:
        listed = "".join("\n" + dumps(tool) for tool in tools)
        pending.append("<|im_start|>system\n" + TOOLS_HEAD + listed + TOOLS_TAIL + ("\n\n" + system if system else "") + "<|im_end|>\n")
    elif first:
        pending.append("<|im_start|>system\n" + system + "<|im_end|>\n")
    last_query = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i in range(first, len(messages)):
        message = messages[i]
        role = message["role"]
        if role == "user":
            pending.append(f"<|im_start|>user\n{message['content']}<|im_end|>\n")
        elif role == "tool":
            if messages[i - 1]["role"] != "tool":
                pending.append("<|im_start|>user")
            pending.append(f"\n<tool_response>\n{message['content']}\n</tool_response>")
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                pending.append("<|im_end|>\n")
        elif i + 1 < len(messages):
            pending.append("<|im_start|>assistant\n")
            if i > last_query:
                pending.append("<think>\n" + message.get("reasoning", "") + "\n</think>\n\n")
            answer(answer_text(message) + "<|im_end|>")
            pending.append("\n")
        else:
            if thinking:
                pending.append("<|im_start|>assistant\n<think>\n")
                answer(message["reasoning"] + "\n</think>\n\n" + answer_text(message) + "<|im_end|>")
            else:
                pending.append("<|im_start|>assistant\n<think>\n\n</think>\n\n")
                answer(answer_text(message) + "<|im_end|>")
    return parts
