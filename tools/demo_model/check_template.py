#!/usr/bin/env python3
"""Holds chat_format.segments and models/quern-demo/chat_template.jinja equal over generated conversations.

  check_template.py [--count 500]
"""

import argparse
import json
import os
import random

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

import chat_format
import tasks

TEMPLATE = os.path.join(os.path.dirname(__file__), "../../models/quern-demo/chat_template.jinja")


def load_template(path=TEMPLATE):
    """As transformers builds it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    with open(path, encoding="utf-8") as file:
        return environment.from_string(file.read())


def openai_messages(messages):
    """Our messages as a client of the API writes them."""
    out = []
    for message in messages:
        entry = {"role": message["role"], "content": message["content"]}
        if message["role"] == "assistant":
            entry["reasoning_content"] = message.get("reasoning", "")
            if message.get("tool_calls"):
                entry["tool_calls"] = [
                    {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in message["tool_calls"]]
        out.append(entry)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    args = parser.parse_args()
    template = load_template()
    for seed in range(args.count):
        rng = random.Random(seed)
        make = rng.choice([tasks.arithmetic, tasks.chat, tasks.json_answer, tasks.list_task, tasks.tool_call, lambda r: tasks.recall(r, 400, lambda n: "Some prose.")])
        conversation = make(rng)
        parts = chat_format.segments(conversation.messages, conversation.tools, conversation.thinking)
        prompt = "".join(text for text, _ in parts[:-1])
        rendered = template.render(messages=openai_messages(conversation.messages[:-1]), tools=conversation.tools or None,
                                   add_generation_prompt=True, enable_thinking=conversation.thinking)
        assert rendered == prompt, f"seed {seed}\n--- template\n{rendered}\n--- chat_format\n{prompt}"
    print(f"{args.count} conversations render alike")


if __name__ == "__main__":
    main()
