#!/usr/bin/env python3
"""The tiny reference: a 4-layer checkpoint (BF16 and block FP8) and the values that it must give.

The forward pass is plain Python in double precision, without rounding of activations and independent of any framework.
Writes tests/data/tiny-reference/{expected.json, bf16/config.json, fp8-block/config.json}; seconds.
  make_tiny_reference.py [--out FOLDER] [--checkpoints FOLDER]      (the second also writes the weights)
"""
import argparse
import json
import math
import operator
import os

import checkpoint

TINY = checkpoint.Geometry(hidden=160, intermediate=288, layers=4, heads=4, kv_heads=2, head_dim=32, gdn_key_heads=2, gdn_value_heads=6,
                           gdn_head_dim=16, vocab=320, mrope_section=[2, 1, 1], lm_head=(0, 1024), qk_norm=(0, 512), a_log=(0, 64))
H, I, L, NQ, NKV, D, V = TINY.hidden, TINY.intermediate, TINY.layers, TINY.heads, TINY.kv_heads, TINY.head_dim, TINY.vocab
NK, NV, DK, DV = TINY.gdn_key_heads, TINY.gdn_value_heads, TINY.gdn_head_dim, TINY.gdn_head_dim
QK, CH = NK * DK, TINY.conv_channels
EPS, THETA, ROT = 1e-6, 1e7, D // 4
NUM_TOKENS = 150
POSITIONS = (0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 149)

mul = operator.mul
dot = lambda a, b: sum(map(mul, a, b))
sig = lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
silu = lambda x: x * sig(x)
softplus = lambda x: x if x > 20 else math.log1p(math.exp(x))


class Model:
    def __init__(self, t):
        self.w = {}
        for n, w in t.items():
            self.w[n] = w.tolist() if w.ndim <= 2 else w.reshape(-1).tolist()

    def lin(self, n, x):
        return [dot(r, x) for r in self.w[n]]

    def rms(self, n, x):
        s = 1 / math.sqrt(dot(x, x) / len(x) + EPS)
        return [a * s * (1 + b) for a, b in zip(x, self.w[n])]

    def rope(self, x, pos):
        h, y = ROT // 2, list(x)
        for i in range(h):
            a = pos * THETA ** (-2 * i / ROT)
            c, s = math.cos(a), math.sin(a)
            y[i], y[i + h] = x[i] * c - x[i + h] * s, x[i + h] * c + x[i] * s
        return y

    def attn(self, p, u, pos, cache):
        qg = self.lin(p + "q_proj.weight", u)
        k = self.lin(p + "k_proj.weight", u)
        v = self.lin(p + "v_proj.weight", u)
        cache.append(([self.rope(self.rms(p + "k_norm.weight", k[h * D:h * D + D]), pos) for h in range(NKV)],
                      [v[h * D:h * D + D] for h in range(NKV)]))
        out = []
        for h in range(NQ):
            q = self.rope(self.rms(p + "q_norm.weight", qg[h * 2 * D:h * 2 * D + D]), pos)
            gate = qg[h * 2 * D + D:(h + 1) * 2 * D]
            kv = h // (NQ // NKV)
            sc = [dot(q, c[0][kv]) / math.sqrt(D) for c in cache]
            m = max(sc)
            e = [math.exp(x - m) for x in sc]
            z = sum(e)
            o = [0.0] * D
            for w, c in zip(e, cache):
                for i, x in enumerate(c[1][kv]):
                    o[i] += w * x
            out += [x / z * sig(g) for x, g in zip(o, gate)]
        return self.lin(p + "o_proj.weight", out)

    def gdn(self, p, u, st):
        raw = self.lin(p + "in_proj_qkv.weight", u)
        z = self.lin(p + "in_proj_z.weight", u)
        b = self.lin(p + "in_proj_b.weight", u)
        a = self.lin(p + "in_proj_a.weight", u)
        win = st["conv"] + [raw]
        st["conv"] = win[1:]
        cw = self.w[p + "conv1d.weight"]
        y = [silu(sum(cw[c * 4 + i] * win[i][c] for i in range(4))) for c in range(CH)]
        unit = lambda x: [v / math.sqrt(dot(x, x) + 1e-6) for v in x]
        q = [[v / math.sqrt(DK) for v in unit(y[h * DK:(h + 1) * DK])] for h in range(NK)]
        k = [unit(y[QK + h * DK:QK + (h + 1) * DK]) for h in range(NK)]
        out = []
        for j in range(NV):
            kk, qq, S = k[j // (NV // NK)], q[j // (NV // NK)], st["S"][j]       # S[v][k]
            v = y[2 * QK + j * DV:2 * QK + (j + 1) * DV]
            dec = math.exp(-math.exp(self.w[p + "A_log"][j]) * softplus(a[j] + self.w[p + "dt_bias"][j]))
            beta = sig(b[j])
            o = []
            for i in range(DV):
                row = [x * dec for x in S[i]]
                d = beta * (v[i] - dot(row, kk))
                row = [x + d * y2 for x, y2 in zip(row, kk)]
                S[i] = row
                o.append(dot(row, qq))
            s = 1 / math.sqrt(dot(o, o) / DV + EPS)
            out += [x * s * w * silu(g) for x, w, g in zip(o, self.w[p + "norm.weight"], z[j * DV:(j + 1) * DV])]
        return self.lin(p + "out_proj.weight", out)

    def mlp(self, p, u):
        return self.lin(p + "down_proj.weight", [silu(g) * x for g, x in zip(self.lin(p + "gate_proj.weight", u), self.lin(p + "up_proj.weight", u))])

    def layer(self, p, full, x, pos, st):
        u = self.rms(p + "input_layernorm.weight", x)
        m = self.attn(p + "self_attn.", u, pos, st) if full else self.gdn(p + "linear_attn.", u, st)
        x = [a + b for a, b in zip(x, m)]
        m = self.mlp(p + "mlp.", self.rms(p + "post_attention_layernorm.weight", x))
        return [a + b for a, b in zip(x, m)]

    def run(self, toks, keep):
        P = "model.language_model."
        st = [[] if l % 4 == 3 else dict(conv=[[0.0] * CH] * 3, S=[[[0.0] * DK for _ in range(DV)] for _ in range(NV)]) for l in range(L)]
        mst, out, hid = [], {}, []
        for pos, t in enumerate(toks):
            x = list(self.w[P + "embed_tokens.weight"][t])
            tr = []
            for l in range(L):
                x = self.layer(f"{P}layers.{l}.", l % 4 == 3, x, pos, st[l])
                tr.append(x)
            h = self.rms(P + "norm.weight", x)
            hid.append(h)
            if pos in keep:
                out[pos] = dict(residual_head=[r[:8] for r in tr], final_hidden_head=h[:8], logits=self.lin("lm_head.weight", h))
        # MTP over the pairs (embedding of token i+1, final hidden i), position id i
        for i in range(len(toks) - 1):
            e = self.rms("mtp.pre_fc_norm_embedding.weight", self.w[P + "embed_tokens.weight"][toks[i + 1]])
            u = self.lin("mtp.fc.weight", e + self.rms("mtp.pre_fc_norm_hidden.weight", hid[i]))
            u = self.layer("mtp.layers.0.", True, u, i, mst)
            hp = self.rms("mtp.norm.weight", u)
        last = len(toks) - 2
        mtp = dict(position=last, logits=self.lin("lm_head.weight", hp))
        d = max(range(V), key=mtp["logits"].__getitem__)          # chain one more draft: token d, hidden hp, position last+1
        e = self.rms("mtp.pre_fc_norm_embedding.weight", self.w[P + "embed_tokens.weight"][d])
        u = self.lin("mtp.fc.weight", e + self.rms("mtp.pre_fc_norm_hidden.weight", hp))
        u = self.layer("mtp.layers.0.", True, u, last + 1, mst)
        mtp.update(draft=d, chained_logits=self.lin("lm_head.weight", self.rms("mtp.norm.weight", u)))
        s0 = st[0]
        state = dict(layer0_S_sum_per_head=[sum(map(sum, S)) for S in s0["S"]], layer0_S_head0_v0=s0["S"][0][0], layer0_S_head5_v15=s0["S"][5][15],
                     layer0_conv_head=[c[:4] for c in s0["conv"]])
        return out, mtp, state


def rounded(o):
    if isinstance(o, dict):
        return {k: rounded(v) for k, v in o.items()}
    if isinstance(o, list):
        return [rounded(v) for v in o]
    return float("%.9g" % o) if isinstance(o, float) else o


def main():
    default = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "data", "tiny-reference")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=default, help="folder of expected.json and the two config.json")
    parser.add_argument("--checkpoints", help="folder for the two checkpoints")
    args = parser.parse_args()

    tensors = checkpoint.make_tensors(TINY)
    tokens = [x % V for x in checkpoint.hash_integers("tokens", NUM_TOKENS).tolist()]
    checkpoint.write_configs(args.out, TINY)
    if args.checkpoints:
        checkpoint.write_checkpoints(args.checkpoints, TINY, tensors)
    expected = dict(about="Expected values, double precision, no activation rounding. fp8_block uses exactly dequantised weights "
                          "and unquantised activations (W8A16).", tokens=tokens)
    for key, weights in (("bf16", tensors), ("fp8_block", checkpoint.quantise(tensors)[1])):
        out, mtp, state = Model(weights).run(tokens, POSITIONS)
        expected[key] = rounded(dict(positions={str(k): v for k, v in out.items()}, mtp=mtp, state_after_all_tokens=state))
    with open(os.path.join(args.out, "expected.json"), "w") as f:
        json.dump(expected, f)


if __name__ == "__main__":
    main()
