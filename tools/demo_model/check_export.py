#!/usr/bin/env python3
"""The shipped files in Hugging Face transformers and in model.py: equal logits, perplexity of heldout.txt, drafts on it; writes reference.json.

  check_export.py MODEL_DIR DATA_DIR [--windows N] [--threads N] [--out FILE]

Perplexity protocol: tokens of the whole file, nothing added; consecutive windows of 1024 tokens (the last one shorter), each from an empty
context and scored from its second token; exp of the mean negative log-likelihood over all scored tokens. Log-softmax in fp32.
"""

import argparse
import json
import math
import os
import time

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import config
import evaluate
import model as demo

WINDOW = 1024


@torch.no_grad()
def negative_log_likelihoods(logits_of, ids, num_windows):
    """Sums over windows -> (nats, tokens)."""
    nats, count = 0.0, 0
    for at in range(0, min(len(ids), num_windows * WINDOW), WINDOW):
        window = torch.tensor(ids[at:at + WINDOW])
        if len(window) < 2:
            break
        logits = logits_of(window[None])[0, :-1].float()
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return nats, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("data_dir")
    parser.add_argument("--windows", type=int, default=10**6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="reference.json, by default in DATA_DIR")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(os.path.join(args.model_dir, "tokenizer.json"))
    with open(os.path.join(args.data_dir, "heldout.txt"), encoding="utf-8") as file:
        ids = tokenizer.encode(file.read()).ids
    reference = {"window": WINDOW, "tokens": len(ids), "protocol": "consecutive windows of 1024 tokens, each scored from its second token"}

    theirs = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.float32).eval()
    ours = demo.Model(config.CONFIG, torch.float32)
    ours.load_checkpoint({k: v.float() for k, v in load_file(os.path.join(args.model_dir, "model.safetensors")).items()})
    runner = evaluate.Runner(ours, tokenizer, "cpu")
    sample = torch.tensor(ids[:256])[None]
    with torch.no_grad():
        expected = theirs(sample).logits
        got = demo.time_major(ours.logits(ours.hidden(demo.chunk_major(sample))), 4)
    error = ((got - expected).norm() / expected.norm()).item()
    print(f"logits, model.py against transformers, fp32: relative error {error:.1e}", flush=True)
    assert error < 1e-4
    reference["first_logits"] = {"tokens": ids[:16], "argmax_after_each": expected[0, :16].argmax(-1).tolist()}

    started = time.time()
    nats, count = negative_log_likelihoods(lambda x: theirs(x).logits, ids, args.windows)
    reference["scored_tokens"] = count
    reference["hf_float32"] = {"nll_per_token": nats / count, "perplexity": math.exp(nats / count)}
    print("float32", reference["hf_float32"], f"{time.time() - started:.0f} s", flush=True)
    _, _, agree, drafts = runner.text_scores(ids[:args.windows * WINDOW])
    reference["mtp_agreement_float32"] = {"agreeing": agree, "drafts": drafts, "share": agree / drafts}
    print("MTP", reference["mtp_agreement_float32"], flush=True)

    theirs = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=torch.bfloat16).eval()
    nats, count = negative_log_likelihoods(lambda x: theirs(x).logits, ids, args.windows)
    reference["hf_bfloat16"] = {"nll_per_token": nats / count, "perplexity": math.exp(nats / count)}
    print("bfloat16", reference["hf_bfloat16"], flush=True)
    with open(args.out or os.path.join(args.data_dir, "reference.json"), "w", encoding="utf-8") as file:
        json.dump(reference, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
