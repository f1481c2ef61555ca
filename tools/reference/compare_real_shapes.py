#!/usr/bin/env python3
"""Layers of Qwen3.6-27B's shapes with random weights: quern on a device against Hugging Face transformers, in every scheme that a checkpoint or an option can ask for.

Models of one layer each (gdn, attention), of one attention layer and the MTP head (mtp), and of four layers as the model has them (both), in BF16, block FP8, static FP8 and what --quantization fp8
makes of BF16, with FP8 and with 16-bit activations, with and without an FP8 cache, with rings of both types. Every model goes through `quern eval`, as prompt rows and as decode rows.

What quern is compared with is transformers in float32 with exactly the weights that quern has; where quern's kernels round more than their own sums (activations to e4m3 in groups of 128, keys and
values to an FP8 cache), transformers rounds there as well. The yardstick is transformers itself in bfloat16 with the same rounding: quern may be --factor times as far off. Where activations keep
16 bits, logits must also meet the bar of the reference checkpoints: rms 0.03, worst 0.25, the same argmax where the first two are further apart than 0.15.
  compare_real_shapes.py --quern build/quern [--device cuda:0] [--kinds gdn attention mtp] [--weights bf16 block static channel] [--tokens 200] [--seed 1] [--json FILE] [--table FILE]
Needs torch, safetensors, transformers with qwen3_5, 5 GB in --folder, which it removes again, and on a GPU 60 GB. Exits with 1 where something is further off.
"""
import argparse
import concurrent.futures
import copy
import dataclasses
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
from transformers.models.qwen3_5 import modeling_qwen3_5

import checkpoint
from make_second_reference import MtpHead

BLOCK = checkpoint.FP8_BLOCK
E4M3_MAX = 448.0
KINDS = {"gdn": ["linear_attention"], "attention": ["full_attention"], "mtp": ["full_attention"], "both": ["linear_attention"] * 3 + ["full_attention"]}
VOCAB = 4096
KV_SCALE = 0.03125  # of keys and values in static checkpoints; exact in bf16
# The op that each weight is part of, as quern names its kernels, and the kernels that round what FP8 weights are given.
OPS = {"attn_in": ("q_proj", "k_proj", "v_proj"), "gdn_in": ("in_proj_qkv", "in_proj_z"), "out_residual": ("o_proj", "out_proj"), "mlp_in": ("gate_proj", "up_proj"), "down_residual": ("down_proj",)}
ROUNDING_KERNELS = ("cuda.sm90", "cuda.mma.e4m3")
BAR = dict(rms=0.03, worst=0.25, gap=0.15)


@dataclasses.dataclass
class Case:
    name: str
    stored: str       # which checkpoint
    weights: str      # what quern multiplies: as stored, or "channel", made while loading
    arguments: list
    kv_scale: float = 0.0  # of an FP8 cache; 0: keys and values stay as they are


def cases_of(kind):
    sixteen = ["--activation-scheme", "none"]
    has_cache = kind != "gdn"
    cases = [Case("BF16", "bf16", "bf16", []),
             Case("block FP8, 16-bit activations", "block", "block", sixteen),
             Case("block FP8", "block", "block", [])]
    if has_cache and kind != "mtp":
        cases += [Case("BF16, FP8 cache", "bf16", "bf16", ["--kv-cache-dtype", "fp8"], 1.0),
                  Case("block FP8, FP8 cache, 16-bit activations", "block", "block", sixteen + ["--kv-cache-dtype", "fp8"], 1.0)]
    if kind == "gdn":
        cases += [Case("BF16, float32 ring", "bf16", "bf16", ["--gdn-ring-dtype", "float32"]),
                  Case("block FP8, float32 ring, 16-bit activations", "block", "block", sixteen + ["--gdn-ring-dtype", "float32"])]
    if kind != "mtp":  # static checkpoints have no MTP head
        cases += [Case("static FP8" + (" and its cache" if has_cache else ""), "static", "static", [], KV_SCALE if has_cache else 0.0),
                  Case("static FP8, 16-bit activations", "static", "static", sixteen + ["--kv-cache-dtype", "bfloat16"]),
                  Case("--quantization fp8", "bf16", "channel", ["--quantization", "fp8"]),
                  Case("--quantization fp8, 16-bit activations", "bf16", "channel", ["--quantization", "fp8"] + sixteen)]
    return cases


def leaf_of(name):
    return name.split(".")[-2]


def is_fp8(name, weights):
    """Whether a parameter is kept in FP8. Static checkpoints leave the Gated DeltaNet layers as they are."""
    return weights != "bf16" and leaf_of(name) in checkpoint.FP8_LEAVES and not (weights == "static" and "linear_attn" in name)


def make_config(kind, stored):
    geometry = checkpoint.Geometry(hidden=5120, intermediate=17408, layers=len(KINDS[kind]), heads=24, kv_heads=4, head_dim=256, gdn_key_heads=16, gdn_value_heads=48, gdn_head_dim=128,
                                   vocab=VOCAB, mrope_section=[11, 11, 10], lm_head=(0, 2048), qk_norm=(0, 512), a_log=(0, 64))
    config = checkpoint.make_config(geometry, {"block": "fp8_block"}.get(stored, "bf16"))
    config["text_config"].update(layer_types=KINDS[kind], mtp_num_hidden_layers=int(kind == "mtp"))
    if stored == "static":
        float8 = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
        config["quantization_config"] = dict(quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head", "re:.*linear_attn.*"], kv_cache_scheme=float8,
                                             config_groups=dict(group_0=dict(targets=["Linear"], weights=float8, input_activations=float8)))
    return config


class Model(torch.nn.Module):
    """A model's layers, and its MTP head where the kind has one."""

    def __init__(self, kind):
        super().__init__()
        config = Qwen3_5TextConfig(**dict(make_config(kind, "bf16")["text_config"], dtype="float32"))
        config._attn_implementation = "eager"
        self.main = Qwen3_5ForCausalLM(config).eval()
        self.mtp = MtpHead(self.main).eval() if kind == "mtp" else None

    @torch.no_grad()
    def fill(self, generator):
        """Weights of the sizes that trained ones have, exact in bf16."""
        for name, parameter in self.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            leaf = name.split(".")[-1]
            if name.endswith("linear_attn.norm.weight"):
                values = 1 + 0.1 * values
            elif leaf == "A_log":
                values = values.abs().clamp(max=2)
            elif leaf == "dt_bias":
                values = 0.5 * values - 2
            elif "norm" in leaf_of(name):
                values = 0.1 * values
            elif "conv1d" in name:
                values = 0.4 * values
            elif "embed_tokens" in name:
                values = 0.5 * values
            else:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(values.bfloat16().float())

    @torch.no_grad()
    def quantise(self, weights):
        """Parameters become what `weights` makes of them. Returns the codes and the scale of each that is FP8."""
        stored = {}
        for name, parameter in self.named_parameters():
            if not is_fp8(name, weights):
                continue
            if weights == "block":
                rows, columns = (n // BLOCK for n in parameter.shape)
                groups, axes = parameter.view(rows, BLOCK, columns, BLOCK), (1, 3)
            else:
                groups, axes = parameter, (0, 1) if weights == "static" else (1,)
            scale = groups.abs().amax(axes, keepdim=True) / E4M3_MAX
            if weights != "channel":
                scale = scale.bfloat16().float()
            codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            parameter.copy_((codes.float() * scale).view_as(parameter))
            stored[name] = codes.view(parameter.shape), scale.squeeze().bfloat16().reshape(scale.shape[0::2] if weights == "block" else (-1,))
        return stored

    @torch.no_grad()
    def store(self, weights, codes, folder, config):
        """Writes the checkpoint."""
        tensors = {}
        for name, parameter in self.named_parameters():
            name_stored = name.removeprefix("main.").replace("model.", "model.language_model.", 1) if name.startswith("main.model.") else name.removeprefix("main.")
            if name not in codes:
                tensors[name_stored] = parameter.bfloat16().cpu()
                continue
            tensors[name_stored], scale = codes[name][0].cpu(), codes[name][1].cpu()
            tensors[name_stored + ("_scale_inv" if weights == "block" else "_scale")] = scale
            if weights == "static":
                module = name_stored.removesuffix(".weight")
                tensors[module + ".input_scale"] = torch.tensor([0.0625], dtype=torch.bfloat16)
                if leaf_of(name) in ("k_proj", "v_proj"):
                    tensors[f"{module.rsplit('.', 1)[0]}.{leaf_of(name)[0]}_scale"] = torch.tensor([KV_SCALE], dtype=torch.bfloat16)
        os.makedirs(folder, exist_ok=True)
        save_file(tensors, os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f)

    @torch.no_grad()
    def logits(self, tokens, positions, draft):
        """At `positions`; then those of the MTP head's draft after the last token, and of the one that follows `draft`."""
        device = self.main.device
        ids = torch.tensor(tokens, device=device)
        hidden = self.main.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        rows = [self.main.lm_head(hidden[positions])]
        if self.mtp is not None:
            head_hidden, head_logits = self.mtp(ids[1:], hidden[:-1], 1)
            chained = torch.cat([ids[1:], torch.tensor([draft], device=device)]), torch.cat([hidden[:-1], head_hidden[-1:]])
            rows += [head_logits[-1:], self.mtp(*chained, 1)[1][-1:]]
        return torch.cat(rows).float().cpu()


def rounded(x, scale):
    """To multiples of `scale` that e4m3 has."""
    return ((x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def rounded_in_groups(x):
    groups = x.float().unflatten(-1, (-1, BLOCK))
    return rounded(groups, (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-30)).flatten(-2).to(x.dtype)


class Rounding:
    """transformers rounds where quern does: what weights of the named leaves are given, keys and values."""

    def __init__(self, model, weights, leaves, kv_scale):
        self.model, self.weights, self.leaves, self.kv_scale = model, weights, leaves, kv_scale

    def __enter__(self):
        self.hooks = [module.register_forward_pre_hook(lambda _, inputs: (rounded_in_groups(inputs[0]),)) for name, module in self.model.named_modules()
                      if is_fp8(name + ".weight", self.weights) and name.split(".")[-1] in self.leaves]
        plain = self.plain = modeling_qwen3_5.eager_attention_forward
        if self.kv_scale:
            modeling_qwen3_5.eager_attention_forward = lambda module, query, key, value, *rest, **named: plain(module, query, rounded(key, self.kv_scale), rounded(value, self.kv_scale), *rest, **named)
        return self

    def __exit__(self, *_):
        modeling_qwen3_5.eager_attention_forward = self.plain
        for hook in self.hooks:
            hook.remove()


def run_quern(args, kind, case, folder, positions, rows):
    command = [args.quern, "eval", folder, "--device", args.device, "--tokens", os.path.join(args.folder, "tokens.txt"), "--logits-at", ",".join(map(str, positions)), "--max-model-len", "512", "--json"]
    command += case.arguments + (["--chunk", "3"] if rows == "decode" else []) + (["--mtp"] if kind == "mtp" else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    kernels = dict(line.split("kernel: ")[1].split()[:2] for line in done.stderr.splitlines() if "kernel: " in line)
    result = json.loads(done.stdout)
    drafts = result.get("drafts", [])
    return torch.tensor([entry["logits"] for entry in result["logits"] + drafts]), drafts[0]["draft"] if drafts else None, kernels


def error(got, want):
    """Root mean square of the difference, of the values."""
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def meets_bar(got, want):
    difference = (got - want).abs()
    best = want.topk(2, -1)
    decided = best.values[:, 0] - best.values[:, 1] > BAR["gap"]
    return float(difference.square().mean().sqrt()) <= BAR["rms"] and float(difference.max()) <= BAR["worst"] and bool((got.argmax(-1) == best.indices[:, 0])[decided].all())


def rounding_leaves(kernels):
    """The weights whose inputs these kernels round where they are FP8."""
    return tuple(leaf for op, leaves in OPS.items() for leaf in leaves if kernels.get(op, "").startswith(ROUNDING_KERNELS))


def judge(args, kind, case, rows, got, kernels, rounds, exact, emulated, yardstick):
    e = error(got, emulated)
    near = e <= args.factor * yardstick
    bar = meets_bar(got, emulated)
    return dict(layers=kind, scheme=case.name, rows=rows, rounds_activations=rounds, error=e, allowed=args.factor * yardstick, worst=float((got - emulated).abs().max()),
                argmax_equal=f"{int((got.argmax(-1) == emulated.argmax(-1)).sum())}/{len(got)}", bar="met" if bar else "missed", from_exact=error(got, exact), emulation_from_exact=error(emulated, exact),
                kernels=kernels, passed=near and (bar or rounds))


def report(args, what):
    print(f"{what} after {time.time() - args.begin:.0f} s", flush=True)


def compare(args, kind, tokens, positions, pool):
    """Stores the checkpoints of a kind and starts quern on them; returns what is to be done once it has answered."""
    cases, models, running = [case for case in cases_of(kind) if case.weights in args.weights], {}, []
    models["bf16"] = Model(kind)
    models["bf16"].fill(torch.Generator(args.torch_device).manual_seed(args.seed))
    for weights in dict.fromkeys(case.weights for case in cases):
        model = models.setdefault(weights, copy.deepcopy(models["bf16"]))
        codes = model.quantise(weights)
        if weights != "channel":
            model.store(weights, codes, os.path.join(args.folder, f"{kind}-{weights}"), make_config(kind, weights))
        elif not os.path.isdir(os.path.join(args.folder, f"{kind}-bf16")):
            models["bf16"].store("bf16", {}, os.path.join(args.folder, f"{kind}-bf16"), make_config(kind, "bf16"))
        for case in cases:
            if case.weights != weights:
                continue
            for rows in ("prompt", "decode"):
                running.append((case, rows, pool.submit(run_quern, args, kind, case, os.path.join(args.folder, f"{kind}-{case.stored}"), positions, rows)))

    report(args, f"{kind} stored")

    def finish():
        for weights, model in models.items():
            mine = [(case, rows, *future.result()) for case, rows, future in running if case.weights == weights]
            report(args, f"{kind} in {weights} answered by quern")

            def logits_of_all():
                """Per case and rows: without any rounding, and with quern's."""
                known, result = {}, []
                for case, rows, _, draft, kernels in mine:
                    leaves = rounding_leaves(kernels)
                    for key in ((), 0.0, draft), (leaves, case.kv_scale, draft):
                        if key not in known:
                            with Rounding(model, weights, key[0], key[1]):
                                known[key] = model.logits(tokens, positions, draft)
                    result.append((known[(), 0.0, draft], known[leaves, case.kv_scale, draft]))
                return result

            in_float = logits_of_all()
            model.bfloat16()
            for (case, rows, got, _, kernels), (exact, emulated), (_, in_bf16) in zip(mine, in_float, logits_of_all()):
                rounds = any(is_fp8(name, weights) and leaf_of(name) in rounding_leaves(kernels) for name, _ in model.named_parameters())
                yield judge(args, kind, case, rows, got, kernels, rounds, exact, emulated, error(in_bf16, emulated))

    return finish


def as_table(results):
    lines = ["| layers | scheme | rows | error | allowed | worst logit | same argmax | reference bar | distance from unrounded: quern, transformers |", "|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        bar = r["bar"] if not r["rounds_activations"] else "-"
        lines.append(f"| {r['layers']} | {r['scheme']} | {r['rows']} | {r['error']:.4f} | {r['allowed']:.4f} | {r['worst']:.3f} | {r['argmax_equal']} | {bar} | {r['from_exact']:.4f}, {r['emulation_from_exact']:.4f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quern", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--torch-device", default="cuda" if torch.cuda.is_available() else "cpu", help="where transformers computes")
    parser.add_argument("--folder", default="/dev/shm/real-shapes")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--factor", type=float, default=1.5, help="of the yardstick, that an error may be")
    parser.add_argument("--kinds", nargs="*", default=["gdn", "attention", "mtp"], choices=list(KINDS))
    parser.add_argument("--weights", nargs="*", default=["bf16", "block", "static", "channel"], choices=["bf16", "block", "static", "channel"], help="as quern multiplies them; of channel, those of bf16 are stored")
    parser.add_argument("--processes", type=int, default=12, help="of quern at once")
    parser.add_argument("--json")
    parser.add_argument("--table", help="the same as a table of Markdown")
    args = parser.parse_args()
    args.begin = time.time()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(args.torch_device)
    where = torch.cuda.get_device_name() if args.torch_device == "cuda" else "cpu"
    print(f"transformers {transformers.__version__}, torch {torch.__version__} on {where}")
    results = []
    generator = torch.Generator(args.torch_device).manual_seed(args.seed)
    tokens = torch.randint(0, VOCAB, (args.tokens,), generator=generator).tolist()
    positions = sorted({p for p in (0, 1, 2, 63, 64, 65, 127, 128, 191, args.tokens - 1) if p < args.tokens})
    os.makedirs(args.folder, exist_ok=True)
    try:
        with open(os.path.join(args.folder, "tokens.txt"), "w") as f:
            f.write(" ".join(map(str, tokens)))
        with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
            for finish in [compare(args, kind, tokens, positions, pool) for kind in args.kinds]:
                for line in finish():
                    results.append(line)
                    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items() if k != "kernels"), flush=True)
    finally:
        shutil.rmtree(args.folder)
    kernels = {f"{op} {name}" for r in results for op, name in r["kernels"].items()}
    wrong = [r for r in results if not r["passed"]]
    print("kernels: " + ", ".join(sorted(kernels)))
    print(f"{len(results)} comparisons in {time.time() - args.begin:.0f} s, {len(wrong)} further off than they may be")
    for path, text in (args.json, json.dumps(results, indent=1) + "\n"), (args.table, as_table(results)):
        if path:
            with open(path, "w") as f:
                f.write(text)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
