#!/usr/bin/env python3
"""Writes tests/data/demo: heldout.txt (blocks of the test split, some of each source) and the evaluation's questions as JSON lines.

  make_eval_data.py corpus.jsonl.xz OUT_DIR
"""

import argparse
import json
import os

import batches
import questions

HELD_OUT_CHARS_PER_SOURCE = 15000
FILES = [("recall_256", 10), ("recall_1k", 10), ("recall_4k", 4), ("arithmetic", 40), ("tool_call", 12), ("tool_answer", 4), ("json", 12), ("list", 16), ("chat", 10)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("out_dir")
    args = parser.parse_args()
    corpus = batches.Corpus(args.corpus, "test")
    os.makedirs(args.out_dir, exist_ok=True)
    kept, parts = {}, []
    for source, text in zip(corpus.sources, corpus.texts):
        if kept.get(source, 0) + len(text) <= HELD_OUT_CHARS_PER_SOURCE + 2500:
            kept[source] = kept.get(source, 0) + len(text)
            parts.append(text)
    with open(os.path.join(args.out_dir, "heldout.txt"), "w", encoding="utf-8") as file:
        file.write("\n\n".join(parts) + "\n")
    for kind, count in FILES:
        with open(os.path.join(args.out_dir, f"{kind}.jsonl"), "w", encoding="utf-8") as file:
            for question in questions.questions(kind, count, corpus, seed=1):
                row = {"kind": question["kind"], "enable_thinking": question["thinking"], "prompt": question["prompt"], "expected": question["expected"]}
                if question["expected_calls"]:
                    row["expected_calls"] = [{"name": name, "arguments": arguments} for name, arguments in question["expected_calls"]]
                if question["tools"]:
                    row["tools"] = question["tools"]
                    row["messages"] = [{"role": m["role"], "content": m["content"]} for m in question["messages"] if m["role"] in ("system", "user")]
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
