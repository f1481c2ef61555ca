#!/usr/bin/env python3
"""Trains the byte-level BPE of quern-demo on a part of the corpus and on generated conversations, and writes tokenizer.json and
tokenizer_config.json. Same construction as Qwen3.5's: NFC, its split pattern (single digits), byte alphabet, no prefix space.

  train_tokenizer.py corpus.jsonl.xz OUT_DIR
"""

import argparse
import json
import lzma
import os
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import chat_format
import tasks

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BASE_TOKENS = 8100
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KEPT = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def training_texts(corpus, one_in):
    rng = random.Random(1)
    with lzma.open(corpus, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number % one_in == 0:
                record = json.loads(line)
                if record["split"] == "train":
                    yield record["text"]
    makers = [tasks.arithmetic, tasks.chat, tasks.json_answer, tasks.list_task, tasks.tool_call, lambda r: tasks.recall(r, 600, lambda n: "")]
    for _ in range(4000):
        conversation = rng.choice(makers)(rng)
        text = "".join(part for part, _ in chat_format.segments(conversation.messages, conversation.tools, conversation.thinking))
        for token in SPECIAL + KEPT:
            text = text.replace(token, "\n")
        yield text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("out_dir")
    parser.add_argument("--one-in", type=int, default=4, help="take one block in N of the corpus")
    args = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False, special_tokens=[],
        max_token_length=24)
    tokenizer.train_from_iterator(training_texts(args.corpus, args.one_in), trainer)
    assert tokenizer.get_vocab_size() == BASE_TOKENS
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in KEPT])

    os.makedirs(args.out_dir, exist_ok=True)
    tokenizer.save(os.path.join(args.out_dir, "tokenizer.json"))
    config = {
        "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
        "model_max_length": 8192, "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                                                "special": token in SPECIAL} for token in SPECIAL + KEPT},
    }
    with open(os.path.join(args.out_dir, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2, ensure_ascii=False)
        file.write("\n")


if __name__ == "__main__":
    main()
