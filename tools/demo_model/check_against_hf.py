#!/usr/bin/env python3
"""The model of model.py against Hugging Face's Qwen3_5ForCausalLM: same random weights, same logits, in fp32.

  check_against_hf.py [--time 200]
"""

import argparse

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import config
import model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(3)
    ours = model.Model(config.CONFIG, torch.float32)
    with torch.no_grad():
        for name, value in ours.checkpoint().items():
            if "norm" in name:
                value.add_(torch.randn_like(value) * 0.2)
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config.CONFIG)).float().eval()
    result = theirs.load_state_dict({k: v for k, v in ours.checkpoint().items() if not k.startswith("mtp.")}, strict=False)
    assert result.missing_keys in ([], ["lm_head.weight"]) and not result.unexpected_keys, result
    tokens = torch.randint(0, 8000, (2, args.time))
    padded = torch.nn.functional.pad(tokens, (0, -args.time % 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        chunked = model.chunk_major(padded)
        hidden = ours.hidden(chunked)
        got = model.time_major(ours.logits(hidden), len(chunked))[:, :args.time]
        ours.mtp_hidden(hidden, chunked)
    error = ((got - expected).norm() / expected.norm()).item()
    print(f"{sum(p.numel() for p in ours.parameters()):,} parameters, relative error of the logits {error:.1e}")
    assert error < 1e-4


if __name__ == "__main__":
    main()
