#!/usr/bin/env python3
"""The documents of bench_grammar's schemas through xgrammar, for comparison: compile time, and time of a mask, in
seconds of this thread's CPU time.

  pip install xgrammar transformers
  python3 tools/bench_grammar/peer_xgrammar.py MODEL_DIR [TOKENS]
The vocabulary is padded as bench_grammar pads it (joined pairs of tokens), though not with the same pairs."""
import importlib.metadata
import json
import pathlib
import random
import re
import sys
import time

import xgrammar
from tokenizers import Tokenizer


def byte_table():
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    chars, n = {}, 0
    for b in range(256):
        if b in keep:
            chars[chr(b)] = b
        else:
            chars[chr(256 + n)] = b
            n += 1
    return chars


def main():
    folder = pathlib.Path(sys.argv[1])
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 248077
    data = json.loads((folder / "tokenizer.json").read_text())
    table = byte_table()
    vocab = [b""] * (max(max(data["model"]["vocab"].values()), max(t["id"] for t in data["added_tokens"])) + 1)
    for token, i in data["model"]["vocab"].items():
        vocab[i] = bytes(table[c] for c in token)
    own = len(vocab)
    r, known = random.Random(1), set(vocab)
    while len(vocab) < wanted:
        joined = vocab[r.randrange(own)] + vocab[r.randrange(own)]
        if 0 < len(joined) <= 12 and joined not in known:
            known.add(joined)
            vocab.append(joined)
    info = xgrammar.TokenizerInfo(vocab, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(vocab), stop_token_ids=[t["id"] for t in data["added_tokens"] if t["content"] == "<|im_end|>"])
    source = (pathlib.Path(__file__).parent / "main.cpp").read_text()
    cases = re.findall(r'\{"([\w ]+)", (?:R"\((.*?)\)"|nullptr),\s*R"\((.*?)\)"\}', source, re.S)

    print(f"xgrammar {importlib.metadata.version('xgrammar')}, {len(vocab)} tokens")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bitmask = xgrammar.allocate_token_bitmask(1, len(vocab))
    for name, schema, document in cases:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        begin = time.thread_time()
        try:
            grammar = compiler.compile_json_schema(schema, any_whitespace=True) if schema else compiler.compile_builtin_json_grammar()
        except Exception as error:  # what it does not support
            print(f"{name}: {str(error)[:100]}")
            continue
        compile_ms = (time.thread_time() - begin) * 1000
        ids = tokenizer.encode(document).ids
        times, refused = [], False
        for _ in range(20):
            matcher = xgrammar.GrammarMatcher(grammar)
            for i in ids:
                begin = time.thread_time()
                matcher.fill_next_token_bitmask(bitmask)
                times.append((time.thread_time() - begin) * 1e6)
                if not matcher.accept_token(i):
                    refused = True
                    break
        times.sort()
        print(f"{name:<18} compile {compile_ms:8.1f} ms   mask {sum(times) / len(times):7.1f} us, p99 {times[len(times) * 99 // 100]:7.1f} us, max {times[-1]:7.1f} us" + ("   (it refused the document)" if refused else ""))


main()
