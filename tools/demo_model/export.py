#!/usr/bin/env python3
"""Writes a trained checkpoint as model.safetensors (BF16) with its config.json and generation_config.json.

  export.py checkpoint.pt OUT_DIR
"""

import argparse
import json
import os

import torch
from safetensors.torch import save_file

import config


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("out_dir")
    args = parser.parse_args()
    tensors = torch.load(args.checkpoint, map_location="cpu")["model"]
    os.makedirs(args.out_dir, exist_ok=True)
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}, os.path.join(args.out_dir, "model.safetensors"),
              metadata={"format": "pt"})
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/quern-demo/tokenizer_config.json"), encoding="utf-8") as file:
        ids = {entry["content"]: int(number) for number, entry in json.load(file)["added_tokens_decoder"].items()}
    end_of_text, im_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    generation = {"bos_token_id": end_of_text, "do_sample": True, "eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text, "temperature": 0.6,
                  "top_k": 20, "top_p": 0.9}
    described = dict(config.CONFIG, bos_token_id=end_of_text, eos_token_id=im_end, pad_token_id=end_of_text)
    for name, value in (("config.json", described), ("generation_config.json", generation)):
        with open(os.path.join(args.out_dir, name), "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
