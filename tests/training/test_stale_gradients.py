"""A slice of an arena whose `.grad` is None is stale: nothing reads it, the next write overwrites
it."""

import math

import pytest
import torch
from helpers import EVERYWHERE, same
from torch import nn

import gpuaccel as ga
from gpuaccel.training.models import Config, Transformer

V, T = 61, 8


class Sometimes(nn.Module):
    """Layers that are used always, twice, only in long sequences, and never."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(V, 32)
        self.positions = nn.Embedding(4 * T, 32)
        self.norm = nn.LayerNorm(32)
        self.twice = nn.Linear(32, 32)
        self.long = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.twice(self.norm(x))
        if tokens.shape[1] > T:
            x = x + self.long(x)
        return self.head(x + self.twice(x).tanh())


def tied():
    return Sometimes(tied=True)


def grouped():
    """Of q, k and v, and of gate and up, the products are one."""
    sizes = dict(hidden=64, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=64)
    return Transformer(Config(vocab=V, T=4 * T, **sizes))


def batch(device, k, rows=6):
    random = torch.Generator().manual_seed(k)
    length = T if k % 2 else 2 * T
    tokens = torch.randint(V, (rows, length + 1), generator=random).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(net, device, dtype, left, **options):
    """Weights, state and norms of a run; after each step `left` stands in every slice."""
    torch.manual_seed(0)
    model = net().to(device, dtype)
    arena = ga.Arena(model)
    opt = ga.AdamW(arena, lr=1e-2, weight_decay=0.1, max_norm=0.5)
    results = {}
    with ga.TrainStep(model, opt, micro_batches=3, **options) as step:
        for k in range(6):
            micros = [batch(device, 10 * k + i, rows=2) for i in range(3)]
            results[f"norm {k}"] = step(micros if k in (2, 3) else batch(device, k)).norm.clone()
            assert not any(arena.gradients.received())
            for view in arena.gradients.views:
                view.fill_(left)
    results["weights"] = arena.weights.clone()
    for name, p in arena.named_parameters().items():
        if opt.state[p] and opt.state[p]["step"] > 0:
            results |= {f"{key} of {name}": t.clone() for key, t in opt.state[p].items()}
    return results


VARIANTS = {
    "launched": {},
    "deterministic": {"deterministic": True},
    "replayed": {"deterministic": True, "replay": ga.training.Replay(policy="require")},
}


@pytest.mark.slow
@pytest.mark.parametrize("net", [Sometimes, tied, grouped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_nan_in_stale_slices_changes_nothing(device, net, dtype):
    for variant, options in VARIANTS.items():
        if variant == "replayed" and ga.backend().name == "torch":
            continue
        with ga.deterministic():
            want = run(net, device, dtype, 0.0, **options)
            got = run(net, device, dtype, math.nan, **options)
        assert got.keys() == want.keys() and got["weights"].isfinite().all()
        for name, t in want.items():
            same(got[name], t, f"{variant}: {name}")
