"""Muon for the layers' matrices, AdamW for everything else. Both keep weights without outliers, which FP8 likes."""

import torch


def orthogonalise(g):
    """Newton-Schulz iteration towards the nearest orthogonal matrix, bf16. g [n, rows, columns]."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Matrices of one shape are stacked and treated together."""

    def __init__(self, parameters, weight_decay=0.1, momentum=0.95):
        shapes = {}
        for p in parameters:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in shapes.items()]
        self.weight_decay, self.momentum = weight_decay, momentum

    @torch.no_grad()
    def step(self, rate):
        for parameters, average in self.groups:
            grad = torch.stack([p.grad for p in parameters])
            average.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(average, self.momentum))
            rows, columns = update.shape[-2:]
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)

    def state(self):
        return [average for _, average in self.groups]

    def load_state(self, averages):
        for (_, average), loaded in zip(self.groups, averages):
            average.copy_(loaded)


def split_parameters(model):
    """(names for Muon, names for AdamW with weight decay, names for AdamW without)."""
    muon, decayed, plain = [], [], []
    for name, p in ((name, model.tensor(name)) for name in model.names):
        if p.dim() == 2 and min(p.shape) >= 64 and "embed" not in name:
            muon.append(name)
        elif p.dim() >= 2:
            decayed.append(name)
        else:
            plain.append(name)
    return muon, decayed, plain
