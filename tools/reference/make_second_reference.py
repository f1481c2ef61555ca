#!/usr/bin/env python3
"""The second reference: 8 layers with the head geometry that fast kernels are written for, and what Hugging Face transformers makes of it.

Writes tests/data/second-reference/{expected.json, expected-w8a8.json, bf16/config.json, fp8-block/config.json}.
  make_second_reference.py [--out FOLDER] [--checkpoints FOLDER]      (the second also writes the weights)
  make_second_reference.py --distances        prints, and writes nothing: transformers against itself, bf16 and token by token
  make_second_reference.py --w8a8             writes expected-w8a8.json alone
  make_second_reference.py --check-tiny       prints, and writes nothing: transformers in float32 against tests/data/tiny-reference
"""
import argparse
import json
import os
import platform

import numpy as np
import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

import checkpoint
from make_tiny_reference import TINY

SECOND = checkpoint.Geometry(hidden=256, intermediate=768, layers=8, heads=6, kv_heads=1, head_dim=256, gdn_key_heads=2, gdn_value_heads=6,
                             gdn_head_dim=128, vocab=8192, mrope_section=[11, 11, 10], lm_head=(0, 2048), qk_norm=(128, 256),
                             a_log=(-128, 64))
NUM_TOKENS = 200
POSITIONS = (0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 149, 199)
LOGIT_IDS = sorted({*range(256), *range(0, SECOND.vocab, 32)})
NUM_GREEDY = 16
DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "data")


class MtpHead(torch.nn.Module):
    """Drafts from (embedding of token t+1, final hidden state of token t), on transformers' own decoder layer; embedding first."""

    def __init__(self, main):
        super().__init__()
        config = main.config
        attention = config.layer_types.index("full_attention")  # the layer's kind; its index has no other effect without a cache
        norm = lambda: Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = norm(), norm(), norm()
        self.main = [main]  # a list: its parameters are not ours

    def forward(self, next_tokens, hidden, first_position):
        """next_tokens [T], hidden [T, H] -> (hidden of the head [T, H], logits [T, V])"""
        main = self.main[0]
        embedding = main.model.embed_tokens(next_tokens[None])
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden[None])], -1))
        n = x.shape[1]
        positions = torch.arange(first_position, first_position + n)[None]
        causal = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        rope = main.model.rotary_emb(x, positions[None].expand(3, 1, n))
        h = self.norm(self.layers[0](x, position_embeddings=rope, attention_mask=causal))
        return h[0], main.lm_head(h)[0]


def load(g, tensors):
    text = dict(checkpoint.make_config(g, "bf16")["text_config"], dtype="float32")
    main = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text)).eval()
    weights = {name: torch.from_numpy(np.ascontiguousarray(w, np.float32)) for name, w in tensors.items()}
    for name, w in weights.items():
        assert np.array_equal(w.numpy().astype(np.float64), tensors[name]), f"{name} is not exact in float32"
    main.load_state_dict({n.replace("model.language_model.", "model."): w for n, w in weights.items() if not n.startswith("mtp.")})
    mtp = MtpHead(main).eval()
    mtp.load_state_dict({n.removeprefix("mtp."): w for n, w in weights.items() if n.startswith("mtp.")})
    return main, mtp


@torch.no_grad()
def run(main, mtp, tokens, num_greedy):
    """Everything that the reference records, as tensors; the cache's conv window is its last three columns."""
    ids = torch.tensor(tokens)
    residuals = []
    hooks = [layer.register_forward_hook(lambda _, __, output: residuals.append(output[0])) for layer in main.model.layers]
    output = main.model(input_ids=ids[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    hidden = output.last_hidden_state[0]
    logits = main.lm_head(hidden)
    gdn = output.cache.layers[0]
    state = gdn.recurrent_states[0][0].clone()        # [value heads, dk, dv]
    window = gdn.conv_states[0][0][:, -3:].clone()    # [channels, 3]

    # Pairs (x_j, h_{j-1}) at position j, then one more with the draft and the head's own hidden state.
    last = len(tokens) - 1
    head_hidden, head_logits = mtp(ids[1:], hidden[:-1], 1)
    draft = int(head_logits[-1].argmax())
    chained = torch.cat([ids[1:], torch.tensor([draft])]), torch.cat([hidden[:-1], head_hidden[-1:]])
    chained_logits = mtp(*chained, 1)[1][-1]

    cache, row, greedy = output.cache, logits[-1], []  # token by token: transformers' recurrent form
    for _ in range(num_greedy):
        greedy.append((int(row.argmax()), row.float()))
        row = main(input_ids=torch.tensor([[greedy[-1][0]]]), cache=cache, use_cache=True).logits[0, -1]
    return dict(residuals=residuals, hidden=hidden, logits=logits, state=state, window=window, position=last, draft=draft,
                mtp_logits=head_logits[-1], chained_logits=chained_logits, greedy=greedy)


def numbers(x):
    return [float("%.7g" % v) for v in x.double().tolist()]


def top2(row):
    best = row.float().topk(2)
    return int(best.indices[0]), float("%.6g" % (best.values[0] - best.values[1]))


def summary(row):
    argmax, gap = top2(row)
    return dict(logits=numbers(row[LOGIT_IDS]), argmax=argmax, top2_gap=gap, logsumexp=numbers(row.double().logsumexp(0)[None])[0])


def record(r):
    best = [top2(row) for row in r["logits"]]
    s, j = r["state"], SECOND.gdn_value_heads - 1
    chained = summary(r["chained_logits"])
    return dict(
        positions={str(p): dict(residual_head=[numbers(x[p, :8]) for x in r["residuals"]], final_hidden_head=numbers(r["hidden"][p, :8]),
                                **summary(r["logits"][p])) for p in POSITIONS},
        argmax=[a for a, _ in best], top2_gap=[g for _, g in best],
        greedy=dict(tokens=[t for t, _ in r["greedy"]], top2_gap=[top2(row)[1] for _, row in r["greedy"]]),
        mtp=dict(position=r["position"], **summary(r["mtp_logits"]), draft=r["draft"], **{"chained_" + k: v for k, v in chained.items()}),
        state_after_all_tokens={
            "layer0_S_sum_per_head": numbers(s.double().sum((1, 2))), "layer0_S_norm_per_head": numbers(s.double().square().sum((1, 2)).sqrt()),
            "layer0_S_head0_v0": numbers(s[0, :, 0]), f"layer0_S_head{j}_v{s.shape[2] - 1}": numbers(s[j, :, -1]),
            "layer0_conv_head": [numbers(r["window"][:4, c]) for c in range(3)]})


def schemes(g):
    """(key, name -> f64 weights): the stored values exactly, so fp8_block is weight-only (W8A16) with unrounded activations."""
    tensors = checkpoint.make_tensors(g)
    return (("bf16", tensors), ("fp8_block", checkpoint.quantise(tensors)[1]))


def hash_tokens(n, vocab):
    x = checkpoint.hash_integers("tokens", 2 * n)
    return ((255 * x[0::2] + x[1::2]) % vocab).tolist()


def round_activations(x):
    """x after quantisation to e4m3 in groups of 128 of a row with the scale max / 448, as FP8 matrix units take it."""
    groups = x.float().unflatten(-1, (-1, checkpoint.FP8_BLOCK))
    scale = groups.abs().amax(-1, keepdim=True) / 448.0
    codes = (groups / scale.where(scale > 0, 1.0)).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def emulate_w8a8(main):
    """Layers with FP8 weights round what they are given."""
    for name, module in main.model.layers.named_modules():
        if name.split(".")[-1] in checkpoint.FP8_LEAVES:
            module.register_forward_pre_hook(lambda _, inputs: (round_activations(inputs[0]),))
    return main


@torch.no_grad()
def logits_of(main, tokens):
    return main(input_ids=torch.tensor([tokens])).logits[0]


def write_w8a8(out):
    tokens = hash_tokens(NUM_TOKENS, SECOND.vocab)
    logits = logits_of(emulate_w8a8(load(SECOND, dict(schemes(SECOND))["fp8_block"])[0]), tokens)
    expected = dict(
        about="Made by tools/reference/make_second_reference.py: logits of fp8_block in float32, where layers with FP8 weights take activations rounded to e4m3 in groups of 128 of a "
              "row, scale = max / 448. Tokens and logit ids are those of expected.json.",
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__),
        positions={str(p): summary(logits[p]) for p in POSITIONS})
    with open(os.path.join(out, "expected-w8a8.json"), "w") as f:
        json.dump(expected, f, separators=(",", ":"))


def write_reference(out, checkpoints):
    write_w8a8(out)
    checkpoint.write_configs(out, SECOND)
    if checkpoints:
        checkpoint.write_checkpoints(checkpoints, SECOND, checkpoint.make_tensors(SECOND))
        for folder in checkpoint.SCHEME_FOLDERS.values():
            with open(os.path.join(checkpoints, folder, "model.safetensors"), "rb") as f:
                print(f"{folder}/model.safetensors  fnv1a {checkpoint.fnv1a(f.read()):#018x}")
    tokens = hash_tokens(NUM_TOKENS, SECOND.vocab)
    expected = dict(
        about="Made by tools/reference/make_second_reference.py from Hugging Face transformers, float32 weights and activations; cos and sin are "
              "float32 too (transformers rounds them to bf16 only in a bf16 model). fp8_block uses exactly dequantised weights and unquantised "
              "activations (W8A16). Everything under positions, argmax, mtp and state comes from one chunked prefill; greedy from single steps.",
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__),
        tokens=tokens, logit_ids=LOGIT_IDS)
    for key, tensors in schemes(SECOND):
        result = record(run(*load(SECOND, tensors), tokens, NUM_GREEDY))
        expected[key] = result
        gaps = sorted(result["top2_gap"])
        print(f"{key}: top-2 gaps: smallest {gaps[0]:.4f}, median {gaps[len(gaps) // 2]:.3f}; {len(set(result['argmax']))} different argmaxes; "
              f"greedy {result['greedy']}")
    with open(os.path.join(out, "expected.json"), "w") as f:
        json.dump(expected, f, separators=(",", ":"))


def distance(name, got, want):
    d = (got.double() - want.double())
    print(f"  {name:22} rms {d.square().mean().sqrt():.3g}  worst {d.abs().max():.3g}  (rms of the values {want.double().square().mean().sqrt():.3g})")


@torch.no_grad()
def logits_token_by_token(main, tokens):
    cache, rows = None, []
    for token in tokens:
        output = main(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.logits[0, -1])
    return torch.stack(rows)


def print_distances():
    tokens = hash_tokens(NUM_TOKENS, SECOND.vocab)
    for key, tensors in schemes(SECOND):
        main, mtp = load(SECOND, tensors)
        exact = run(main, mtp, tokens, 0)
        print(f"{key}: float32, token by token against one prefill")
        distance("logits", logits_token_by_token(main, tokens), exact["logits"])
        if key == "fp8_block":
            print("fp8_block: weights rounded to bf16 after dequantisation, as a bf16 model must hold them")
        rounded = run(main.bfloat16(), mtp.bfloat16(), tokens, 0)
        print(f"{key}: bf16 against float32")
        for i, (a, b) in enumerate(zip(rounded["residuals"], exact["residuals"])):
            distance(f"residual after layer {i}", a, b)
        for name in ("hidden", "logits", "state", "mtp_logits"):
            distance(name, rounded[name], exact[name])
        best = [top2(row) for row in exact["logits"]]
        wrong = [gap for row, (token, gap) in zip(rounded["logits"], best) if int(row.argmax()) != token]
        if key == "fp8_block":
            emulated = logits_of(emulate_w8a8(load(SECOND, tensors)[0]), tokens)
            print("fp8_block with rounded activations (W8A8), float32 against the same without, and bf16 against float32")
            distance("logits", emulated, exact["logits"])
            distance("logits", logits_of(emulate_w8a8(load(SECOND, tensors)[0].bfloat16()), tokens), emulated)
        print(f"  argmax differs at {len(wrong)} of {len(best)} positions, largest top-2 gap among them {max(wrong, default=0)}")


def check_tiny():
    with open(os.path.join(DATA, "tiny-reference", "expected.json")) as f:
        expected = json.load(f)
    for key, tensors in schemes(TINY):
        r, want = run(*load(TINY, tensors), expected["tokens"], 0), expected[key]
        mtp, state = want["mtp"], want["state_after_all_tokens"]
        worst = lambda got, values: float((got.double() - torch.tensor(values, dtype=torch.float64)).abs().max())
        at = {int(p): v for p, v in want["positions"].items()}
        print(f"{key}: transformers {transformers.__version__} in float32 against tiny-reference, largest differences:",
              f"logits {max(worst(r['logits'][p], v['logits']) for p, v in at.items()):.2e},",
              f"residuals {max(worst(x[p, :8], v['residual_head'][i]) for p, v in at.items() for i, x in enumerate(r['residuals'])):.2e},",
              f"state sums {worst(r['state'].double().sum((1, 2)), state['layer0_S_sum_per_head']):.2e},",
              f"conv {worst(r['window'][:4].T, state['layer0_conv_head']):.2e},",
              f"mtp logits {worst(r['mtp_logits'], mtp['logits']):.2e}, chained {worst(r['chained_logits'], mtp['chained_logits']):.2e};",
              f"draft {'equal' if r['draft'] == mtp['draft'] else 'DIFFERS'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(DATA, "second-reference"), help="folder of expected.json and the two config.json")
    parser.add_argument("--checkpoints", help="folder for the two checkpoints")
    parser.add_argument("--distances", action="store_true")
    parser.add_argument("--check-tiny", action="store_true")
    parser.add_argument("--w8a8", action="store_true", help="writes expected-w8a8.json alone")
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.distances:
        print_distances()
    elif args.check_tiny:
        check_tiny()
    elif args.w8a8:
        write_w8a8(args.out)
    else:
        write_reference(args.out, args.checkpoints)


if __name__ == "__main__":
    main()
