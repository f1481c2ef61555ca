#!/usr/bin/env python3
"""Chunked GDN against the recurrence: values and gradients, fp32 against double precision."""

import torch

import gdn


def chunk_major(x):
    batch, time = x.shape[:2]
    return x.reshape(batch, time // gdn.CHUNK, gdn.CHUNK, *x.shape[2:]).transpose(0, 1)


def main():
    torch.manual_seed(1)
    batch, time, key_heads, heads, dk, dv = 2, 192, 2, 6, 16, 8
    q, k = torch.randn(batch, time, key_heads, dk), torch.randn(batch, time, key_heads, dk)
    k[:, 70:90] = k[:, 70:71]  # equal keys in a row are the hard case of the inverse
    q, k = q / q.norm(dim=-1, keepdim=True) * dk**-0.5, k / k.norm(dim=-1, keepdim=True)
    v, g, beta = torch.randn(batch, time, heads, dv), -torch.rand(batch, time, heads) * 0.3, torch.rand(batch, time, heads)
    inputs = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    repeat = heads // key_heads
    expected = gdn.recurrence(inputs[0].repeat_interleave(repeat, 2), inputs[1].repeat_interleave(repeat, 2), *inputs[2:])
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    for dtype, bound in ((torch.float32, 2e-5),):
        typed = [x.detach().to(dtype).requires_grad_() for x in inputs]
        got = gdn.chunked(*[chunk_major(x) for x in typed])
        grads = torch.autograd.grad((got * chunk_major(weights).to(dtype)).sum(), typed)
        for name, a, b in [("o", got, chunk_major(expected))] + [(f"d{n}", a, b) for n, a, b in zip("qkvgb", grads, expected_grads)]:
            error = ((a.double() - b).norm() / b.norm()).item()
            print(f"{name}: relative error {error:.1e}")
            assert error < bound


if __name__ == "__main__":
    main()
