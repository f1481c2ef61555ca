"""quern-demo in PyTorch: parameters under their checkpoint names, the forward pass for training and evaluation.

Masters are fp32; every use rounds them to the compute dtype (bf16 for training), so that the exported bf16 file is what was trained.
Hidden states are chunk-major (see gdn.py) and flat, [n, 64, hidden] with n = chunks * batch. The token-wise parts are plain functions of
tensors, so that torch.compile sees each of them once for all layers; their shapes are equal at all sequence lengths of equal token count.
"""

import math

import torch
import torch.nn.functional as F

import gdn


class Compiled:
    """Functions that go through torch.compile when `enabled` is set."""

    enabled = False

    def __init__(self, function):
        self.plain, self.compiled = function, None

    def __call__(self, *args):
        if not Compiled.enabled:
            return self.plain(*args)
        if self.compiled is None:
            self.compiled = torch.compile(self.plain, dynamic=False)
        return self.compiled(*args)


def rms_norm_1p(x, weight, eps):
    """Zero-centred weight, rounded as it is stored; the product in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.to(x.dtype).float())).to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def mlp(x, norm, gate, up, down, eps):
    y = rms_norm_1p(x, norm, eps)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def causal_conv(x, before, weight):
    """Depthwise, 4 taps, then silu. x [n, 64, channels], before [n, 3, channels]: the columns in front; weight [channels, 1, 4]."""
    padded = torch.cat([before, x], 1).float()
    taps = weight.to(x.dtype).float()
    y = sum(padded[:, i:i + x.shape[1]] * taps[:, 0, i] for i in range(4))
    return F.silu(y.to(x.dtype))


def l2_normalise(x, scale=1.0):
    y = x.float()
    return (y * (torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) * scale)).to(x.dtype)


@Compiled
def gdn_project(x, norm, in_qkv, in_z, in_b, in_a, a_log, dt_bias, eps):
    u = rms_norm_1p(x, norm, eps)
    beta = linear(u, in_b).sigmoid().float()
    g = -a_log.to(x.dtype).float().exp() * F.softplus(linear(u, in_a).float() + dt_bias.to(x.dtype).float())
    return linear(u, in_qkv), linear(u, in_z), g, beta


@Compiled
def gdn_scores(qkv, before, conv, g, beta, key_heads, dk, heads, dv):
    q, k, v = causal_conv(qkv, before, conv).split([key_heads * dk, key_heads * dk, heads * dv], -1)
    q = l2_normalise(q.unflatten(-1, (key_heads, dk)), dk**-0.5)
    k = l2_normalise(k.unflatten(-1, (key_heads, dk)))
    strict, scores = gdn.chunk_scores(q, k, g, beta)
    return strict, scores, q, k, v.unflatten(-1, (heads, dv))


gdn_transitions = Compiled(gdn.chunk_transitions)


@Compiled
def gdn_finish(x, states, w, u, decayed_q, scores, z, norm, out, eps, mlp_norm, gate, up, down):
    o = gdn.chunk_outputs(states, w, u, decayed_q, scores)
    y = o.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    y = ((norm.to(x.dtype) * y).float() * F.silu(z.unflatten(-1, o.shape[-2:]).float())).to(x.dtype)
    x = x + linear(y.flatten(-2), out)
    return mlp(x, mlp_norm, gate, up, down, eps)


def rotate(x, cos, sin):
    """x [n, 64, heads, dim]; cos, sin [n, 64, 1, rotary / 2]; pairs are (i, i + rotary / 2)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@Compiled
def attention_project(x, norm, q_proj, k_proj, v_proj, q_norm, k_norm, cos, sin, eps, heads, kv_heads, dim):
    u = rms_norm_1p(x, norm, eps)
    q, gate = linear(u, q_proj).unflatten(-1, (heads, 2 * dim)).split(dim, -1)
    k = linear(u, k_proj).unflatten(-1, (kv_heads, dim))
    v = linear(u, v_proj).unflatten(-1, (kv_heads, dim))
    return rotate(rms_norm_1p(q, q_norm, eps), cos, sin), rotate(rms_norm_1p(k, k_norm, eps), cos, sin), v, gate.flatten(-2)


@Compiled
def attention_finish(x, o, gate, o_proj, eps, mlp_norm, gate_proj, up, down):
    x = x + linear(o.flatten(-2) * gate.sigmoid(), o_proj)
    return mlp(x, mlp_norm, gate_proj, up, down, eps)


@Compiled
def final_norm(x, weight, eps):
    return rms_norm_1p(x, weight, eps)


@Compiled
def mtp_input(embedding, hidden, norm_e, norm_h, fc, eps):
    return linear(torch.cat([rms_norm_1p(embedding, norm_e, eps), rms_norm_1p(hidden, norm_h, eps)], -1), fc)


class Model(torch.nn.Module):
    def __init__(self, config, dtype=torch.bfloat16):
        super().__init__()
        self.config, self.dtype = config, dtype
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        nk, nv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        dk, dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        channels = 2 * nk * dk + nv * dv
        out_scale = 1 / math.sqrt(2 * config["num_hidden_layers"])
        self.names = {}

        def add(name, value):
            self.names[name] = name.replace(".", "/")
            self.register_parameter(self.names[name], torch.nn.Parameter(value))

        def matrix(name, rows, columns, scale=1.0):
            add(name, torch.randn(rows, columns) * (0.5 * scale / math.sqrt(columns)))

        def add_mlp_and_norms(prefix):
            add(prefix + "input_layernorm.weight", torch.zeros(hidden))
            add(prefix + "post_attention_layernorm.weight", torch.zeros(hidden))
            matrix(prefix + "mlp.gate_proj.weight", inner, hidden)
            matrix(prefix + "mlp.up_proj.weight", inner, hidden)
            matrix(prefix + "mlp.down_proj.weight", hidden, inner, out_scale)

        def add_attention(prefix):
            matrix(prefix + "self_attn.q_proj.weight", heads * 2 * dim, hidden)
            matrix(prefix + "self_attn.k_proj.weight", kv * dim, hidden)
            matrix(prefix + "self_attn.v_proj.weight", kv * dim, hidden)
            matrix(prefix + "self_attn.o_proj.weight", hidden, heads * dim, out_scale)
            add(prefix + "self_attn.q_norm.weight", torch.zeros(dim))
            add(prefix + "self_attn.k_norm.weight", torch.zeros(dim))

        def add_gdn(prefix):
            prefix += "linear_attn."
            matrix(prefix + "in_proj_qkv.weight", channels, hidden)
            matrix(prefix + "in_proj_z.weight", nv * dv, hidden)
            matrix(prefix + "in_proj_b.weight", nv, hidden)
            matrix(prefix + "in_proj_a.weight", nv, hidden)
            add(prefix + "conv1d.weight", torch.randn(channels, 1, 4) * 0.3)
            add(prefix + "A_log", torch.empty(nv).uniform_(1, 16).log())
            step = torch.exp(torch.empty(nv).uniform_(math.log(1e-3), math.log(1e-1)))
            add(prefix + "dt_bias", step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
            add(prefix + "norm.weight", torch.ones(dv))
            matrix(prefix + "out_proj.weight", hidden, nv * dv, out_scale)

        add("model.embed_tokens.weight", torch.randn(config["vocab_size"], hidden) * 0.02)
        for i, kind in enumerate(config["layer_types"]):
            prefix = f"model.layers.{i}."
            add_mlp_and_norms(prefix)
            (add_gdn if kind == "linear_attention" else add_attention)(prefix)
        add("model.norm.weight", torch.zeros(hidden))
        matrix("mtp.fc.weight", hidden, 2 * hidden)
        add_mlp_and_norms("mtp.layers.0.")
        add_attention("mtp.layers.0.")
        for name in ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
            add(name, torch.zeros(hidden))
        self.tables = {}

    def tensor(self, name):
        return getattr(self, self.names[name])

    def rotary_tables(self, chunks, batch, device):
        """cos and sin, rounded to the compute dtype, [n, 64, 1, 32]."""
        if (chunks, batch) not in self.tables:
            rope = self.config["rope_parameters"]
            width = int(self.config["head_dim"] * rope["partial_rotary_factor"])
            frequency = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
            angle = torch.arange(chunks * gdn.CHUNK, dtype=torch.float32, device=device)[:, None] * frequency
            angle = angle.view(chunks, 1, gdn.CHUNK, 1, width // 2).expand(-1, batch, -1, -1, -1).flatten(0, 1)
            if len(self.tables) > 8:
                self.tables.clear()
            self.tables[chunks, batch] = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        return self.tables[chunks, batch]

    def embed(self, tokens):
        return F.embedding(tokens, self.tensor("model.embed_tokens.weight").to(self.dtype))

    def attention_layer(self, x, prefix, chunks):
        c, t = self.config, lambda name: self.tensor(prefix + name)
        batch = len(x) // chunks
        cos, sin = self.rotary_tables(chunks, batch, x.device)
        q, k, v, gate = attention_project(
            x, t("input_layernorm.weight"), t("self_attn.q_proj.weight"), t("self_attn.k_proj.weight"), t("self_attn.v_proj.weight"),
            t("self_attn.q_norm.weight"), t("self_attn.k_norm.weight"), cos, sin, c["rms_norm_eps"], c["num_attention_heads"],
            c["num_key_value_heads"], c["head_dim"])
        q, k, v = (y.unflatten(0, (chunks, batch)).permute(1, 3, 0, 2, 4).flatten(2, 3) for y in (q, k, v))  # [batch, heads, time, dim]
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.unflatten(2, (chunks, gdn.CHUNK)).permute(2, 0, 3, 1, 4).flatten(0, 1)
        return attention_finish(x, o, gate, t("self_attn.o_proj.weight"), c["rms_norm_eps"], t("post_attention_layernorm.weight"),
                                t("mlp.gate_proj.weight"), t("mlp.up_proj.weight"), t("mlp.down_proj.weight"))

    def gdn_layer(self, x, prefix, chunks):
        c, t = self.config, lambda name: self.tensor(prefix + name)
        g = lambda name: self.tensor(prefix + "linear_attn." + name)
        qkv, z, decay, beta = gdn_project(
            x, t("input_layernorm.weight"), g("in_proj_qkv.weight"), g("in_proj_z.weight"), g("in_proj_b.weight"), g("in_proj_a.weight"),
            g("A_log"), g("dt_bias"), c["rms_norm_eps"])
        batch = len(x) // chunks
        before = torch.cat([torch.zeros_like(qkv[:batch, -3:]), qkv[:-batch, -3:]])
        strict, scores, q, k, v = gdn_scores(
            qkv, before, g("conv1d.weight"), decay, beta, c["linear_num_key_heads"], c["linear_key_head_dim"], c["linear_num_value_heads"],
            c["linear_value_head_dim"])
        m, b, w, u, decayed_q = gdn_transitions(gdn.InverseOfUnitLower.apply(strict), q, k, v, decay, beta)
        return gdn_finish(x, gdn.scan(m, b, chunks), w, u, decayed_q, scores, z, g("norm.weight"), g("out_proj.weight"), c["rms_norm_eps"],
                          t("post_attention_layernorm.weight"), t("mlp.gate_proj.weight"), t("mlp.up_proj.weight"), t("mlp.down_proj.weight"))

    def hidden(self, tokens):
        """tokens, chunk-major [chunks, batch, 64] -> final hidden states [n, 64, hidden]."""
        chunks = len(tokens)
        x = self.embed(tokens.flatten(0, 1))
        for i, kind in enumerate(self.config["layer_types"]):
            x = (self.gdn_layer if kind == "linear_attention" else self.attention_layer)(x, f"model.layers.{i}.", chunks)
        return final_norm(x, self.tensor("model.norm.weight"), self.config["rms_norm_eps"])

    def mtp_hidden(self, hidden, next_tokens):
        """The pairs (h_t, x_{t+1}) -> hidden states that predict x_{t+2}. hidden as hidden() returns it, next_tokens as its argument."""
        x = mtp_input(self.embed(next_tokens.flatten(0, 1)), hidden, self.tensor("mtp.pre_fc_norm_embedding.weight"), self.tensor("mtp.pre_fc_norm_hidden.weight"),
                      self.tensor("mtp.fc.weight"), self.config["rms_norm_eps"])
        x = self.attention_layer(x, "mtp.layers.0.", len(next_tokens))
        return final_norm(x, self.tensor("mtp.norm.weight"), self.config["rms_norm_eps"])

    def logits(self, hidden):
        return linear(hidden, self.tensor("model.embed_tokens.weight"))

    def checkpoint(self):
        """{checkpoint name: fp32 tensor}."""
        return {name: getattr(self, key).detach() for name, key in self.names.items()}

    def load_checkpoint(self, tensors):
        with torch.no_grad():
            for name, key in self.names.items():
                getattr(self, key).copy_(tensors[name])


def chunk_major(x):
    """[batch, time, ...] -> [chunks, batch, 64, ...]; time is a multiple of 64."""
    return x.unflatten(1, (-1, gdn.CHUNK)).transpose(0, 1).contiguous()


def time_major(x, chunks):
    """[n, 64, ...] -> [batch, time, ...]."""
    return x.unflatten(0, (chunks, -1)).transpose(0, 1).flatten(1, 2)
