#!/usr/bin/env python3
"""Layers of Qwen3.6-27B's shapes with random weights: quern on a GPU against Hugging Face transformers on the same GPU.

For each kind of layer (gdn, attention) a checkpoint of one, and one of four layers as the model has them (three gdn, one attention), in block FP8 and in BF16. transformers computes in float32 with
exactly the stored weights; its own bf16 is the yardstick, and, for FP8 matrix units, float32 with activations rounded as they take them. quern's logits come from `quern eval`, as prompt rows and
as decode rows. Exits with 1 where they are further off than --factor times the yardstick.
  compare_real_shapes.py --quern build/quern [--device cuda:0] [--folder /dev/shm/real-shapes] [--tokens 200] [--seed 1] [--json FILE]
Needs a GPU with 20 GB free, torch, safetensors and transformers with qwen3_5; writes at most 3.5 GB at a time, which it removes.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

import torch
import transformers
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import checkpoint

BLOCK = checkpoint.FP8_BLOCK
KINDS = {"gdn": ["linear_attention"], "attention": ["full_attention"], "both": ["linear_attention"] * 3 + ["full_attention"]}
VOCAB = 4096


def make_config(layer_types, scheme):
    geometry = checkpoint.Geometry(hidden=5120, intermediate=17408, layers=len(layer_types), heads=24, kv_heads=4, head_dim=256, gdn_key_heads=16, gdn_value_heads=48, gdn_head_dim=128,
                                   vocab=VOCAB, mrope_section=[11, 11, 10], lm_head=(0, 2048), qk_norm=(0, 512), a_log=(0, 64))
    config = checkpoint.make_config(geometry, scheme)
    config["text_config"].update(layer_types=layer_types, mtp_num_hidden_layers=0)
    return config


@torch.no_grad()
def fill(main, generator):
    """Weights of the sizes that trained ones have, exact in bf16."""
    for name, parameter in main.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        leaf = name.split(".")[-1]
        if name.endswith("linear_attn.norm.weight"):
            values = 1 + 0.1 * values
        elif leaf == "A_log":
            values = values.abs().clamp(max=2)
        elif leaf == "dt_bias":
            values = 0.5 * values - 2
        elif name.endswith("norm.weight"):
            values = 0.1 * values
        elif "conv1d" in name:
            values = 0.4 * values
        elif "embed_tokens" in name:
            values = 0.5 * values
        else:
            values = values * parameter.shape[-1] ** -0.5
        parameter.copy_(values.bfloat16().float())


@torch.no_grad()
def store(main, scheme, folder, config):
    """Writes the checkpoint; parameters become exactly what is stored."""
    tensors = {}
    for name, parameter in main.named_parameters():
        stored = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        if scheme != "fp8_block" or name.split(".")[-2] not in checkpoint.FP8_LEAVES:
            tensors[stored] = parameter.bfloat16().cpu()
            continue
        rows, columns = (n // BLOCK for n in parameter.shape)
        blocks = parameter.view(rows, BLOCK, columns, BLOCK)
        scale = (blocks.abs().amax((1, 3)) / 448.0).bfloat16()
        wide = scale.float()[:, None, :, None]
        codes = (blocks / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        parameter.copy_((codes.float() * wide).view_as(parameter))
        tensors[stored] = codes.view(parameter.shape).cpu()
        tensors[stored + "_scale_inv"] = scale.cpu()
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)


def round_activations(x):
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True) / 448.0
    codes = (groups / scale.where(scale > 0, 1.0)).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def emulated(main):
    """Layers with FP8 weights round what they are given; returns the hooks."""
    return [module.register_forward_pre_hook(lambda _, inputs: (round_activations(inputs[0]),))
            for name, module in main.named_modules() if name.split(".")[-1] in checkpoint.FP8_LEAVES]


@torch.no_grad()
def logits_of(main, tokens, positions):
    return main(input_ids=torch.tensor([tokens], device=main.device)).logits[0, positions].float().cpu()


def quern_logits(quern, device, folder, tokens, positions, arguments):
    with open(os.path.join(folder, "tokens.txt"), "w") as f:
        f.write(" ".join(map(str, tokens)))
    command = [quern, "eval", folder, "--device", device, "--tokens", os.path.join(folder, "tokens.txt"), "--logits-at", ",".join(map(str, positions)), "--max-model-len", "512", "--json"]
    done = subprocess.run(command + arguments, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command + arguments)}: {done.stderr}")
    kernels = [line.split("kernel: ")[1] for line in done.stderr.splitlines() if "kernel: " in line]
    result = json.loads(done.stdout)
    return torch.tensor([entry["logits"] for entry in result["logits"]]), kernels


def error(got, want):
    """Root mean square of the difference, of the values."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def compare(args, kind, scheme, results):
    folder, config = os.path.join(args.folder, f"{kind}-{scheme}"), make_config(KINDS[kind], scheme)
    torch.set_default_dtype(torch.float32)
    with torch.device("cuda"):
        main = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**dict(config["text_config"], dtype="float32"))).eval()
    generator = torch.Generator("cuda").manual_seed(args.seed)
    fill(main, generator)
    store(main, scheme, folder, config)
    tokens = torch.randint(0, VOCAB, (args.tokens,), generator=generator, device="cuda").tolist()
    positions = sorted({p for p in (0, 1, 2, 63, 64, 65, 127, 128, 191, args.tokens - 1) if p < args.tokens})
    exact = logits_of(main, tokens, positions)
    rounded = exact
    if scheme == "fp8_block":
        hooks = emulated(main)
        rounded = logits_of(main, tokens, positions)
        for hook in hooks:
            hook.remove()
    yardstick = error(logits_of(main.bfloat16(), tokens, positions), exact)
    del main
    torch.cuda.empty_cache()
    runs = [("default", []), ("16-bit activations", ["--activation-scheme", "none"])] if scheme == "fp8_block" else [("default", [])]
    for name, arguments in runs:
        for rows, chunk in (("prompt", []), ("decode", ["--chunk", "3"])):
            got, kernels = quern_logits(args.quern, args.device, folder, tokens, positions, arguments + chunk)
            quantises = scheme == "fp8_block" and name == "default" and any("cuda.sm90" in k and k.split()[0] in ("mlp_in", "gdn_in", "attn_in") for k in kernels)
            # Which way e4m3 rounds turns on the last bit of what it is given, and random layers carry that on: who rounds as well errs as much, not alike.
            bound = args.factor * (max(yardstick, error(rounded, exact)) if quantises else yardstick)
            e = error(got, exact)
            top = int((got.argmax(-1) == exact.argmax(-1)).sum())
            line = dict(layers=kind, scheme=scheme, activations=name, rows=rows, error=e, bound=bound, transformers_bf16=yardstick, transformers_rounding_activations=error(rounded, exact), from_those=error(got, rounded),
                        argmax_equal=f"{top}/{len(positions)}", worst_position=max(error(g, w) for g, w in zip(got, exact)))
            results.append(line)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True)
            if name == runs[0][0] and rows == "prompt":
                print("    " + "; ".join(" ".join(k.split()) for k in kernels), flush=True)
    shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quern", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--folder", default="/dev/shm/real-shapes")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--factor", type=float, default=1.5, help="of the yardstick, that an error may be")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--schemes", nargs="*", default=["fp8_block", "bf16"], choices=["fp8_block", "bf16"])
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    results, begin = [], time.time()
    for kind in args.kinds:
        for scheme in args.schemes:
            compare(args, kind, scheme, results)
    wrong = [r for r in results if not r["error"] <= r["bound"]]
    print(f"{len(results)} comparisons in {time.time() - begin:.0f} s, {len(wrong)} beyond their bound")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(results, f, indent=1)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
