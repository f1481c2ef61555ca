"""The synthetic checkpoints of the reference programs: weights from an integer hash, block FP8, safetensors.

tests/support/reference_checkpoint.cpp is the C++ twin of this file and writes the same bytes, so that no weights are stored.
"""
import dataclasses
import json
import math
import os
import struct

import numpy as np

FP8_BLOCK = 128
FP8_LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "in_proj_z", "out_proj")
SCHEME_FOLDERS = {"bf16": "bf16", "fp8_block": "fp8-block"}  # key in expected.json -> folder of config.json


def fnv1a(data):
    h = 0xCBF29CE484222325
    for c in data:
        h = ((h ^ c) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def hash_integers(name, n):
    """n integers in [-127, 127]: splitmix64 started from the FNV-1a hash of `name`."""
    z = np.uint64(fnv1a(name.encode())) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(32)) % np.uint64(255)).astype(np.int64) - 127


@dataclasses.dataclass
class Geometry:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    vocab: int
    mrope_section: list
    # A weight is (x + offset) / denominator of its integer x: exact in bf16, for the denominator is a power of two.
    lm_head: tuple      # (offset, denominator)
    qk_norm: tuple
    a_log: tuple

    def is_full_attention(self, layer):
        return layer % 4 == 3

    @property
    def conv_channels(self):
        return (2 * self.gdn_key_heads + self.gdn_value_heads) * self.gdn_head_dim


def make_tensors(g):
    """name -> f64 array, every value exact in bf16."""
    t = {}

    def add(name, shape, affine):
        offset, denominator = affine
        t[name] = ((hash_integers(name, math.prod(shape)) + offset) / denominator).reshape(shape)

    def linear(name, rows, columns):
        add(name, (rows, columns), (0, 1024 if columns <= 512 else 2048))

    def norm(name):
        add(name, (g.hidden,), (0, 512))

    def attention(p):
        linear(p + "q_proj.weight", 2 * g.heads * g.head_dim, g.hidden)
        linear(p + "k_proj.weight", g.kv_heads * g.head_dim, g.hidden)
        linear(p + "v_proj.weight", g.kv_heads * g.head_dim, g.hidden)
        linear(p + "o_proj.weight", g.hidden, g.heads * g.head_dim)
        add(p + "q_norm.weight", (g.head_dim,), g.qk_norm)
        add(p + "k_norm.weight", (g.head_dim,), g.qk_norm)

    def gated_delta_net(p):
        values = g.gdn_value_heads * g.gdn_head_dim
        linear(p + "in_proj_qkv.weight", g.conv_channels, g.hidden)
        linear(p + "in_proj_z.weight", values, g.hidden)
        linear(p + "in_proj_b.weight", g.gdn_value_heads, g.hidden)
        linear(p + "in_proj_a.weight", g.gdn_value_heads, g.hidden)
        add(p + "conv1d.weight", (g.conv_channels, 1, 4), (0, 256))
        add(p + "A_log", (g.gdn_value_heads,), g.a_log)
        add(p + "dt_bias", (g.gdn_value_heads,), (0, 64))
        t[p + "norm.weight"] = 1 + (hash_integers(p + "norm.weight", g.gdn_head_dim) // 4) / 128
        linear(p + "out_proj.weight", g.hidden, values)

    def layer(p, full):
        norm(p + "input_layernorm.weight")
        norm(p + "post_attention_layernorm.weight")
        linear(p + "mlp.gate_proj.weight", g.intermediate, g.hidden)
        linear(p + "mlp.up_proj.weight", g.intermediate, g.hidden)
        linear(p + "mlp.down_proj.weight", g.hidden, g.intermediate)
        attention(p + "self_attn.") if full else gated_delta_net(p + "linear_attn.")

    add("lm_head.weight", (g.vocab, g.hidden), g.lm_head)
    add("model.language_model.embed_tokens.weight", (g.vocab, g.hidden), (0, 128))
    norm("model.language_model.norm.weight")
    for i in range(g.layers):
        layer(f"model.language_model.layers.{i}.", g.is_full_attention(i))
    linear("mtp.fc.weight", g.hidden, 2 * g.hidden)
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
        norm(name)
    layer("mtp.layers.0.", True)
    return t


def make_config(g, scheme):
    config = dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=False,
        text_config=dict(
            model_type="qwen3_5_text", dtype="bfloat16", hidden_size=g.hidden, intermediate_size=g.intermediate, num_hidden_layers=g.layers,
            layer_types=["full_attention" if g.is_full_attention(i) else "linear_attention" for i in range(g.layers)],
            full_attention_interval=4, num_attention_heads=g.heads, num_key_value_heads=g.kv_heads, head_dim=g.head_dim,
            attn_output_gate=True, attention_bias=False, linear_num_key_heads=g.gdn_key_heads, linear_num_value_heads=g.gdn_value_heads,
            linear_key_head_dim=g.gdn_head_dim, linear_value_head_dim=g.gdn_head_dim, linear_conv_kernel_dim=4,
            mamba_ssm_dtype="float32", rms_norm_eps=1e-6, hidden_act="silu", vocab_size=g.vocab, max_position_embeddings=4096,
            mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, partial_rotary_factor=0.25, tie_word_embeddings=False,
            eos_token_id=1, bos_token_id=0,
            rope_parameters=dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25, mrope_interleaved=True,
                                 mrope_section=g.mrope_section)))
    if scheme == "fp8_block":
        config["quantization_config"] = dict(
            quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[FP8_BLOCK, FP8_BLOCK],
            modules_to_not_convert=["lm_head", "mtp.fc"] + [f"model.language_model.layers.{i}.mlp.gate" for i in range(g.layers)])
    return config


def bf16_bits(x):
    """f64 array -> uint16 bit patterns, by way of f32, to nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_values():
    codes = np.arange(127)  # 0 .. 448, increasing; code 127 is NaN
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = e4m3_values()


def e4m3_encode(x):
    """To nearest, ties to the even code, saturating. The midpoints of neighbours are exact."""
    a = np.minimum(np.abs(x), 448.0)
    midpoints = (E4M3[:-1] + E4M3[1:]) / 2
    down, up = np.searchsorted(midpoints, a, "left"), np.searchsorted(midpoints, a, "right")
    code = np.where(down % 2 == 0, down, up)  # the two differ at a tie only
    return (code | np.where(x < 0, 128, 0)).astype(np.uint8)


def quantise(tensors):
    """Block FP8. Returns (stored: name -> (dtype, shape, bytes), dequantised: name -> f64 array)."""
    stored, dequantised = {}, {}
    for name, w in tensors.items():
        if name.split(".")[-2] not in FP8_LEAVES:
            stored[name] = ("BF16", w.shape, bf16_bits(w).tobytes())
            dequantised[name] = w
            continue
        blocks = tuple(-(-n // FP8_BLOCK) for n in w.shape)
        scale = np.empty(blocks, np.uint16)
        for i, j in np.ndindex(*blocks):
            block = w[i * FP8_BLOCK:(i + 1) * FP8_BLOCK, j * FP8_BLOCK:(j + 1) * FP8_BLOCK]
            scale[i, j] = bf16_bits(np.abs(block).max() / 448.0)
        s = bf16_values(scale).repeat(FP8_BLOCK, 0).repeat(FP8_BLOCK, 1)[:w.shape[0], :w.shape[1]]
        codes = e4m3_encode(w / s)
        stored[name] = ("F8_E4M3", w.shape, codes.tobytes())
        stored[name + "_scale_inv"] = ("BF16", blocks, scale.tobytes())
        dequantised[name] = np.where(codes & 128, -1.0, 1.0) * E4M3[codes & 127] * s
    return stored, dequantised


def stored_bf16(tensors):
    return {name: ("BF16", w.shape, bf16_bits(w).tobytes()) for name, w in tensors.items()}


def write_safetensors(path, stored):
    header, offset = {}, 0
    for name in sorted(stored):
        dtype, shape, data = stored[name]
        header[name] = dict(dtype=dtype, shape=list(shape), data_offsets=[offset, offset + len(data)])
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(stored):
            f.write(stored[name][2])


def write_configs(folder, g):
    for scheme, name in SCHEME_FOLDERS.items():
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        with open(os.path.join(folder, name, "config.json"), "w") as f:
            json.dump(make_config(g, scheme), f, indent=1)


def write_checkpoints(folder, g, tensors):
    """folder/{bf16,fp8-block}/{config.json,model.safetensors}"""
    write_configs(folder, g)
    write_safetensors(os.path.join(folder, "bf16", "model.safetensors"), stored_bf16(tensors))
    write_safetensors(os.path.join(folder, "fp8-block", "model.safetensors"), quantise(tensors)[0])
