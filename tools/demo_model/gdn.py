"""Gated DeltaNet: the recurrence, and the chunked form that trains.

Per head, with state S [dk, dv]:  S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q.

The chunked form works on chunks of 64 tokens and holds the chunk index first ("chunk-major": [chunks, batch, 64, ...]), so that the one
sequential part, S' = M S + B from chunk to chunk, runs over contiguous slices.
"""

import torch

CHUNK = 64


def recurrence(q, k, v, g, beta):
    """q, k [batch, time, heads, dk], v [batch, time, heads, dv], g, beta [batch, time, heads]; q and k as they enter the state
    (normalised, q scaled). Returns o [batch, time, heads, dv]."""
    batch, time, heads, dv = v.shape
    state = v.new_zeros(batch, heads, q.shape[-1], dv)
    out = []
    for t in range(time):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def _inverse_of_unit_lower(lower):
    """(I + L)^-1 for strictly lower L [..., 64, 64], fp32. The 16-wide diagonal blocks N are nilpotent:
    (I + N)^-1 = (I - N)(I + N^2)(I + N^4)(I + N^8); blocks are then joined in pairs."""
    n, width = lower.reshape(-1, CHUNK, CHUNK), 16
    power = -torch.stack([n[:, i:i + width, i:i + width] for i in range(0, CHUNK, width)], 1).reshape(-1, width, width)
    inverse = power + torch.eye(width, device=n.device)
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    inverse = inverse.view(len(n), CHUNK // width, width, width)
    while width < CHUNK:
        joined = inverse.new_zeros(len(n), inverse.shape[1] // 2, 2 * width, 2 * width)
        for i in range(joined.shape[1]):
            first, second = inverse[:, 2 * i], inverse[:, 2 * i + 1]
            row = 2 * i * width
            below = n[:, row + width:row + 2 * width, row:row + width]
            joined[:, i, :width, :width] = first
            joined[:, i, width:, width:] = second
            joined[:, i, width:, :width] = -(second @ below @ first)
        inverse, width = joined, 2 * width
    return inverse.reshape(lower.shape)


class InverseOfUnitLower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lower):
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False  # powers of N cancel: full fp32 here
        inverse = _inverse_of_unit_lower(lower)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed)


class ChunkScan(torch.autograd.Function):
    """S[0] = 0, S[c + 1] = M[c] S[c] + B[c].  M [chunks, n, dk, dk], B [chunks, n, dk, dv], fp32 -> the states S[0 .. chunks - 1]."""

    @staticmethod
    def forward(ctx, m, b):
        states = torch.empty_like(b)
        states[0].zero_()
        for c in range(len(b) - 1):
            torch.baddbmm(b[c], m[c], states[c], out=states[c + 1])
        ctx.save_for_backward(m, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        m, states = ctx.saved_tensors
        grad_b = torch.empty_like(grad)  # the gradient of S[c + 1]
        grad_b[-1].zero_()
        for c in range(len(grad) - 1, 0, -1):
            torch.baddbmm(grad[c], m[c].transpose(1, 2), grad_b[c], out=grad_b[c - 1])
        grad_m = grad_b.flatten(0, 1) @ states.flatten(0, 1).transpose(1, 2)
        return grad_m.view_as(m), grad_b


def _head_major(x):  # [n, 64, heads, ...] -> [n, heads, 64, ...]
    return x.transpose(1, 2)


def chunk_scores(q, k, g, beta):
    """q, k [n, 64, key heads, dk], n = chunks * batch; g, beta fp32 [n, 64, heads]. Returns the strictly lower matrix to invert, fp32
    [n, heads, 64, 64], and the decayed scores q k^T in q's dtype."""
    repeat = g.shape[-1] // k.shape[-2]
    q, k = _head_major(q), _head_major(k)
    g, beta = _head_major(g), _head_major(beta)
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    kk = (k @ k.transpose(-1, -2)).float().repeat_interleave(repeat, 1)
    strict = (beta[..., None] * kk * decay).masked_fill(~lower.tril(-1), 0.0)
    scores = ((q @ k.transpose(-1, -2)).float().repeat_interleave(repeat, 1) * decay).to(q.dtype)
    return strict, scores


def chunk_transitions(inverse, q, k, v, g, beta):
    """What each chunk can know alone: (m, b) for the scan, fp32 [n, heads, dk, ..], and (w, u, decayed_q) for chunk_outputs."""
    dk, dtype = k.shape[-1], v.dtype
    repeat = v.shape[-2] // k.shape[-2]
    q, k, v = _head_major(q).repeat_interleave(repeat, 1), _head_major(k).repeat_interleave(repeat, 1), _head_major(v)
    g, beta = _head_major(g), _head_major(beta)
    total = g.cumsum(-1)
    inverse = inverse.to(dtype)
    u = inverse @ (v * beta[..., None]).to(dtype)
    w = inverse @ (k * (beta * total.exp())[..., None]).to(dtype)
    last = total[..., -1:]
    decayed_k = (k * (last - total).exp()[..., None]).to(dtype).transpose(-1, -2)
    identity = torch.eye(dk, device=v.device)
    m = last.exp()[..., None] * identity - (decayed_k @ w).float()
    b = (decayed_k @ u).float()
    decayed_q = (q * total.exp()[..., None]).to(dtype)
    return m, b, w, u, decayed_q


def scan(m, b, chunks):
    """The states at the chunks' beginnings, [n, heads, dk, dv]."""
    split = lambda x: x.view(chunks, -1, *x.shape[-2:])
    return ChunkScan.apply(split(m), split(b)).view_as(b)


def chunk_outputs(states, w, u, decayed_q, scores):
    """o [n, 64, heads, dv] from the states at the chunks' beginnings."""
    states = states.to(u.dtype)
    return (decayed_q @ states + scores @ (u - w @ states)).transpose(1, 2)


def chunked(q, k, v, g, beta):
    """The same as recurrence() for chunk-major inputs; q, k may have fewer heads than v."""
    chunks, batch = v.shape[:2]
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    strict, scores = chunk_scores(q, k, g, beta)
    m, b, *rest = chunk_transitions(InverseOfUnitLower.apply(strict), q, k, v, g, beta)
    return chunk_outputs(scan(m, b, chunks), *rest, scores).unflatten(0, (chunks, batch))
