"""The evaluation's questions: generated tasks from seeds that training never uses, with prose from held-out blocks."""

import json
import re

import chat_format
import random
import tasks
from tasks.arithmetic import question_and_answer

SEED_BASE = 10**9


def questions(kind, count, corpus, thinking=None, seed=0):
    """[{"prompt", "expected", "kind", "thinking", "messages", "tools"}]; kinds: recall_256, recall_1k, recall_4k, arithmetic, list, json, chat,
    tool_call, tool_answer. `corpus` is a batches.Corpus of the test split."""
    out = []
    number = 0
    while len(out) < count:
        number += 1
        rng = random.Random(f"{SEED_BASE + seed} {kind} {number}")
        operation = None
        if kind.startswith("recall"):
            budget = {"recall_256": 250, "recall_1k": 1000, "recall_4k": 4000}[kind]
            conversation = tasks.recall(rng, budget, lambda n: corpus.window(rng, n), num_questions=1)
        elif kind == "arithmetic":
            operation, question, answer, reasoning = question_and_answer(rng, held_out=True)
            conversation = tasks.Conversation(kind, [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "reasoning": reasoning}],
                                              thinking=rng.random() < 0.5)
        elif kind in ("tool_call", "tool_answer"):
            conversation = tasks.tool_call(rng, stop_at_call=kind == "tool_call")
        else:
            conversation = {"list": tasks.list_task, "json": tasks.json_answer, "chat": tasks.chat}[kind](rng)
        if thinking is not None:
            conversation.thinking = thinking
        parts = chat_format.segments(conversation.messages, conversation.tools, conversation.thinking)
        out.append({"kind": conversation.kind if kind == "list" else f"arithmetic {operation}" if operation else kind,
                    "thinking": conversation.thinking, "prompt": "".join(text for text, _ in parts[:-1]),
                    "expected": chat_format.answer_text(conversation.messages[-1]),
                    "expected_calls": conversation.messages[-1].get("tool_calls"), "messages": conversation.messages, "tools": conversation.tools})
    return out


def content_of(question, generated):
    """The answer proper: what follows the reasoning, without the end of the turn."""
    if question["thinking"]:
        reasoning, found, generated = generated.partition("</think>")
        if not found:
            return ""
    return generated.replace("<|im_end|>", "").strip()


def parse_calls(text):
    """[(name, {argument: text})], or None when the text is not made of whole blocks."""
    calls = []
    for block in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S):
        head = re.fullmatch(r"<function=([^>]+)>\n(.*)</function>", block, re.S)
        if not head:
            return None
        calls.append((head[1], dict(re.findall(r"<parameter=([^>]+)>\n(.*?)\n</parameter>\n", head[2], re.S))))
    return calls if calls and re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.S).strip() == "" else None


def is_right(question, generated):
    content, expected = content_of(question, generated), question["expected"]
    if question["expected_calls"]:
        wanted = [(name, {k: v if isinstance(v, str) else chat_format.dumps(v) for k, v in arguments.items()})
                  for name, arguments in question["expected_calls"]]
        return parse_calls(content) == wanted
    if question["kind"] == "json":
        try:
            return json.loads(content) == json.loads(expected)
        except ValueError:
            return False
    if question["kind"].startswith("arithmetic"):
        numbers = re.findall(r"-?\d+", content)
        if question["kind"].endswith("<"):
            return content == expected
        return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", expected)[-1]
    return content == expected
