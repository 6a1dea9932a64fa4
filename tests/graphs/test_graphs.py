"""A replayed step is an eager step: the same bits, no trace of the capture, and words where that cannot be.

On a GPU these are CUDA graphs; on the CPU, under backend simt, a tape stands in for them, and the same claims hold.
"""

import contextlib
import copy
import gc
import importlib
import json
import linecache
import math
import os
import random
import re
import shutil
import sys
import threading
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import CUDA, KERNELS, no_waiting
from torch import nn

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # nothing is downloaded: before transformers is imported

import gpuaccel as ga  # noqa: E402
from gpuaccel.errors import ArgumentError, CaptureError  # noqa: E402
from gpuaccel.graphs import capture, tape  # noqa: E402
from gpuaccel.optim.adamw import AdamW  # noqa: E402
from gpuaccel.optim.arena import Arena  # noqa: E402
from gpuaccel.training import Replay  # noqa: E402
from gpuaccel.training.loop import train, warmup_cosine  # noqa: E402
from gpuaccel.training.step import TrainStep, token_loss  # noqa: E402

V, HIDDEN, LR, LIMIT = 61, 32, 3e-2, 0.5


# ---- a model, its data, and two ways of training it -----------------------------------------------------------------


class Net(nn.Module):
    """Tokens (B, T) -> logits (B, T, V), with dropout in a ModuleList. rare: a weight that only more than 8 tokens use."""

    def __init__(self, tied=False, rare=False, norm=False, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(V, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(HIDDEN),
                nn.Linear(HIDDEN, 64),
                nn.GELU(),
                nn.Linear(64, HIDDEN),
                nn.Dropout(dropout),
            )
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else None
        self.head = nn.Linear(HIDDEN, V, bias=False)
        self.rare = nn.Parameter(torch.zeros(HIDDEN)) if rare else None
        self.register_buffer("size", torch.ones(HIDDEN))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x * self.size.to(x.dtype)
        if self.rare is not None and tokens.shape[1] > 8:
            x = x + self.rare
        for block in self.blocks:
            x = x + block(x)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.head(x)


def frozen():
    model = Net()
    model.embedding.weight.requires_grad_(False)
    return model


def side_by_side():
    """Its q, k and v are whole chunks of the arena: one product in mode "fused"."""
    return ga.Transformer(
        ga.preset(
            "tiny",
            vocab=V,
            layers=2,
            hidden=64,
            intermediate=64,
            heads=2,
            kv_heads=1,
            head_dim=64,
            T=16,
        )
    )


def llama(**changes):
    return ga.Transformer(
        ga.preset(
            "tiny",
            vocab=V,
            layers=2,
            hidden=HIDDEN,
            intermediate=64,
            heads=2,
            kv_heads=1,
            T=16,
            **changes,
        )
    )


def each(model, micro):
    x, y, weight = micro
    found = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="none").view(
        y.shape
    )
    return found * weight[:, None]  # a weight that is NaN arrives as data


def loss_fn(model, micro):
    return each(model, micro).sum(), (micro[1] != -100).sum()


def mean_loss(model, micro):
    return each(model, micro).mean()


def batches(device, n=8, rows=4, lengths=(8, 16), bad=(), seed=1):
    """(tokens, targets, weights of the sequences): lengths take turns, some targets do not count, a weight is NaN in batches `bad`."""
    generator, found = torch.Generator().manual_seed(seed), []
    for k in range(n):
        T = lengths[k % len(lengths)]
        x, y = (
            torch.randint(0, V, (rows, T), generator=generator),
            torch.randint(0, V, (rows, T), generator=generator),
        )
        y[0, : T // 2] = -100
        weight = torch.rand(rows, generator=generator) + 0.5
        if k in bad:
            weight[-1] = math.nan
        found.append(tuple(t.to(device) for t in (x, y, weight)))
    return found


def make(
    device,
    replay,
    *,
    net=Net,
    dtype=torch.float32,
    loss=loss_fn,
    opt=None,
    schedule=8,
    policy="require",
    new_shapes="capture",
    max_graphs=8,
    **options,
):
    """A step with everything that moves: schedule with a warm-up, clipping, dropout, decay."""
    torch.manual_seed(0)
    model = net().to(device, dtype)
    opt = AdamW(Arena(model), **{"lr": LR, "weight_decay": 0.1, "max_norm": LIMIT, **(opt or {})})
    if replay == "graph":
        replay = Replay(policy, new_shapes, max_graphs)
    step = TrainStep(
        model,
        opt,
        loss,
        replay=replay,
        scheduler=warmup_cosine(opt, 2, schedule) if schedule else None,
        **{"micro_batches": 2, "deterministic": device == "cuda", **options},
    )
    seed()
    return step


def seed():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)


def bits(t):
    return t.detach().reshape(-1).view(torch.uint8)


def same(got, want, what=""):
    """Equal bit by bit, except that one NaN is like another."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    )
    if want.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places"
        got, want = (t.nan_to_num(0, math.inf, -math.inf) for t in (got, want))
    if not torch.equal(bits(got), bits(want)):
        d = (got.double() - want.double()).abs()
        raise AssertionError(
            f"{what}: largest difference {d.max().item():.3g}, mean {d.mean().item():.3g}, in {(d > 0).sum()} of {d.numel()}"
        )


def drawn(device):
    """Where the random generators stand."""
    found = {
        "random": torch.tensor([hash(random.getstate())]),
        "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
        "numpy's place": torch.tensor(np.random.get_state()[2]),
        "torch": torch.get_rng_state(),
    }
    return found | ({"torch.cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def everything(model, opt, device):
    """Copies of all that a step may change: weights, masters, buffers, gradient sums, the optimizer's state, the generators."""
    arena = Arena.of(model)
    found = dict(model.state_dict(keep_vars=False))
    if arena is not None:
        found |= {f"master of {name}": t for name, t in arena.named_master().items()} | {
            "the sums": arena.grads
        }
    for g, group in enumerate(opt.param_groups):
        for i, p in enumerate(group["params"]):
            found |= {
                f"{key} of {g}.{i}": t
                for key, t in opt.state.get(p, {}).items()
                if isinstance(t, torch.Tensor)
            }
    if isinstance(opt, AdamW):
        found["skipped"] = opt.skipped.to(device)
    return {name: t.detach().clone() for name, t in (found | drawn(device)).items()}


def agree(got, want):
    """All of `want`. What `got` has beyond that (state of weights that eager has not touched yet) is zero."""
    for name, t in want.items():
        same(got[name], t, name)
    assert not any(t.any() for name, t in got.items() if name not in want), [
        name for name in got if name not in want
    ]


OUTPUTS = ("loss", "tokens", "norm", "clipped_norm", "scale", "finite")


def outputs_agree(outs, wanted):
    for k, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        for key in OUTPUTS:
            a, b = getattr(out, key), getattr(want, key)
            assert (a is None) == (b is None), f"step {k}: {key} is {a}, not {b}"
            if b is not None:
                same(a, b, f"{key} of step {k}")


def trained(step, data, device, between=None):
    """(outputs, everything afterwards, skips) of a step over batches; `between(k)` is called before each."""
    outs = []
    for k, batch in enumerate(data):
        if between:
            between(step, k)
        outs.append(step(batch))
    found = (
        everything(step.model, step.opt, device),
        step.count,
        getattr(step.opt, "last_skip", lambda: None)(),
    )
    step.close()
    return outs, *found


def compare(device, data, between=None, **how):
    """The same steps, eager and replayed, have the same bits. Returns eager's outputs."""
    wanted, left, count, skip = trained(make(device, "eager", **how), data, device, between)
    step = make(device, "graph", **how)
    outs, mine, mine_count, mine_skip = trained(step, data, device, between)
    assert step.replays == "graph", step.reason
    outputs_agree(outs, wanted)
    agree(mine, left)
    assert (mine_count, mine_skip) == (count, skip)
    return wanted


@pytest.fixture
def counts(monkeypatch):
    """.replays and .captures: how often a recording was replayed, how many were made."""
    found = types.SimpleNamespace(replays=0, captures=0)

    def count(kind, method, what):
        was = getattr(kind, method)

        def counted(*args):
            setattr(found, what, getattr(found, what) + 1)
            return was(*args)

        monkeypatch.setattr(kind, method, counted)

    for kind in (tape.Tape, capture.CudaRecording):
        count(kind, "replay", "replays")
    for kind in (capture.TapeRecorder, capture.CudaRecorder):
        count(kind, "record", "captures")
    return found


def small(device, norm=False, dropout=0.0):
    """An ordinary module over (B, 8) floats."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        *([nn.BatchNorm1d(16)] if norm else []),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 4),
    ).to(device)


def pairs(device, n=10, rows=(6,)):
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(
            torch.randn(rows[k % len(rows)], size, generator=generator).to(device)
            for size in (8, 4)
        )
        for k in range(n)
    ]


def plain_step(model, opt):
    """A training step as anybody writes it."""

    def fn(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return fn


def torchs(model, device):
    """torch.optim.AdamW as a graph needs it: every number that changes on the device."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(LR, device=device),
        fused=True,
        capturable=device == "cuda",
    )


# ---- 1. the same bits -----------------------------------------------------------------------------------------------

CASES = {
    "arena": {},
    "fused": {"accumulate": "fused"},
    "autograd": {"accumulate": "autograd"},
    "bf16": {"dtype": torch.bfloat16},
    "bf16, fused": {"dtype": torch.bfloat16, "accumulate": "fused"},
    "fused, q k v together": {"net": side_by_side, "accumulate": "fused"},
    "bf16, q k v together": {"net": side_by_side, "accumulate": "fused", "dtype": torch.bfloat16},
    "grouped attention": {"net": llama},
    "tied attention": {"net": lambda: llama(tied=True), "accumulate": "fused"},
    "sequences": {"divide": "sequences"},
    "micro_batches": {"divide": "micro_batches"},
    "tokens": {"divide": "tokens", "accumulate": "fused"},
    "a mean": {"loss": mean_loss},
    "a mean, three": {"loss": mean_loss, "micro_batches": 3, "accumulate": "fused"},
    "scope block": {"opt": {"scope": "block"}},
    "scope tensor": {"opt": {"scope": "tensor"}, "accumulate": "fused"},
    "bf16, scope block": {"opt": {"scope": "block"}, "dtype": torch.bfloat16},
    "unequal micro-batches": {"micro_batches": 3},
    "one micro-batch": {"micro_batches": 1},
    "frozen": {"net": frozen},
    "frozen, fused": {"net": frozen, "accumulate": "fused"},
    "rare weight": {"net": lambda: Net(rare=True)},
    "rare weight, fused": {"net": lambda: Net(rare=True), "accumulate": "fused"},
    "tied": {"net": lambda: Net(tied=True)},
    "tied, fused": {"net": lambda: Net(tied=True), "accumulate": "fused"},
    "batch norm": {"net": lambda: Net(norm=True)},
    "amsgrad, maximize": {"opt": {"amsgrad": True, "maximize": True}},
    "stochastic rounding": {
        "dtype": torch.bfloat16,
        "opt": {"stochastic_rounding": True, "seed": 5},
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_replayed_run_has_the_bits_of_an_eager_one(device, case, counts):
    """Losses, norms, tokens, verdicts, weights, moments, skips, generators: with dropout, a schedule, clipping, a NaN, two lengths in turn."""
    data = batches(device, bad=(3,))
    how = CASES[case]
    wanted = compare(device, data, **how)
    assert counts.replays == len(data) and counts.captures == 2, counts
    # What was compared was a run in which all of it happened.
    assert [bool(out.finite.all()) for out in wanted] == [k != 3 for k in range(8)] and len(
        {out.loss.item() for out in wanted}
    ) == 8
    assert all((out.scale < 1).any() for out in wanted if out.finite.all()), (
        "clipping had nothing to do"
    )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_case_side_by_side_is_one_product(device):
    step = make(device, "graph", **CASES["fused, q k v together"])
    assert step.model.blocks[0].w_q.forward.__self__.joint is not None
    step.close()


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_rare_weight_moves_only_where_it_got_a_gradient(device, accumulate):
    """Eager leaves a weight alone, decay included, in a step that gave it no gradient: so does the graph of such a step."""
    step = make(device, "graph", net=lambda: Net(rare=True), accumulate=accumulate, schedule=None)
    with torch.no_grad():
        step.model.rare.fill_(1.0)
    seen = []
    for batch in batches(device, n=4):
        step(batch)
        seen.append(step.model.rare.detach().clone())
    assert seen[0].eq(1).all() and torch.equal(seen[2], seen[1]), "it moved in a batch of 8 tokens"
    assert not torch.equal(seen[1], seen[0]) and not torch.equal(seen[3], seen[2]), (
        "it did not move in a batch of 16 tokens"
    )
    step.close()


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_autocast_is_replayed_with_eagers_bits(device, accumulate):
    compare(device, batches(device, n=6, bad=(3,)), autocast=torch.bfloat16, accumulate=accumulate)


@pytest.mark.parametrize(
    "accumulate, how",
    [
        ("arena", "whole"),
        ("fused", "whole"),
        ("autograd", "whole"),
        ("arena", "list"),
        ("fused", "list"),
    ],
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_torchs_optimizer_and_torchs_clipping_are_replayed_with_eagers_bits(
    device, accumulate, how
):
    found = {}
    for replay in ("eager", "graph"):
        torch.manual_seed(0)
        model = Net().to(device)
        arena = Arena(model)
        opt = torchs(model, device)
        step = TrainStep(
            model,
            opt,
            loss_fn,
            micro_batches=2,
            accumulate=accumulate,
            max_norm=LIMIT,
            replay=replay,
            deterministic=device == "cuda",
            scheduler=warmup_cosine(opt, 2, 6),
        )
        assert step.clip == "torch" and Arena.of(model) is arena
        seed()
        found[replay] = trained(
            step, batches(device, n=6) if how == "whole" else lists(device), device
        )
        assert step.replays == replay
    outputs_agree(found["graph"][0], found["eager"][0])
    agree(found["graph"][1], found["eager"][1])
    assert all(out.scale < 1 for out in found["eager"][0])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_dropout_draws_anew_in_each_replay(device):
    """The same batch again: another mask, eager's mask."""
    (batch,) = batches(device, n=1)
    wanted = compare(device, [batch] * 4, opt={"lr": 0.0, "max_norm": None}, schedule=None)
    assert len({out.loss.item() for out in wanted}) == 4


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_replayed_run_warns_of_nothing(device):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(make(device, "graph"), batches(device, n=4), device)
    assert not said, [str(w.message) for w in said]


# ---- 2. lists of micro-batches --------------------------------------------------------------------------------------


def lists(device, kinds=((2, 8), (2, 16)), bad=()):
    """Steps of 3, 1, 2, 4, 1, 3 micro-batches of two kinds, in no order that repeats."""
    found, at = [], 0
    for k, many in enumerate((3, 1, 2, 4, 1, 3)):
        micros = []
        for _ in range(many):
            rows, T = kinds[(at * at // 3) % len(kinds)]
            micros += batches(
                device, n=1, rows=rows, lengths=(T,), seed=100 + at, bad=(0,) if k in bad else ()
            )
            at += 1
        found.append(micros)
    return found


LISTS = {
    "arena": {},
    "fused": {"accumulate": "fused"},
    "bf16": {"dtype": torch.bfloat16},
    "together": {"net": side_by_side, "accumulate": "fused"},
    "sequences": {"divide": "sequences"},
    "micro_batches": {"divide": "micro_batches"},
    "a mean": {"loss": mean_loss},
    "rare": {"net": lambda: Net(rare=True)},
    "batch norm": {"net": lambda: Net(norm=True)},
    "scope block": {"opt": {"scope": "block"}},
}


@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_list_of_micro_batches_gives_eagers_bits_in_one_launch_each_and_a_tail(
    device, case, counts
):
    data = lists(device, bad=(3,))
    wanted = compare(device, data, **LISTS[case])
    assert counts.replays == sum(len(micros) + 1 for micros in data)
    assert [bool(out.finite.all()) for out in wanted] == [k != 3 for k in range(6)]


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_kind_that_is_new_in_the_middle_of_a_list_leaves_the_sums_right(device, accumulate):
    def micro(T, at):
        return batches(device, n=1, rows=2, lengths=(T,), seed=at)[0]

    steps = [
        [micro(8, 0), micro(8, 1)],
        [micro(8, 2), micro(16, 3), micro(8, 4), micro(12, 5)],
        [micro(12, 6), micro(8, 7)],
    ]
    compare(device, steps, accumulate=accumulate)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_list_with_more_kinds_than_max_graphs_leaves_the_sums_right(device):
    """A graph that has to go in the middle of a list is captured again there: its warm-up must not take the sums so far."""

    def micro(T, at):
        return batches(device, n=1, rows=2, lengths=(T,), seed=at)[0]

    compare(
        device,
        [[micro(8, 0), micro(16, 1), micro(8, 2)], [micro(16, 3), micro(8, 4)]],
        max_graphs=1,
    )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_lists_and_whole_batches_may_take_turns(device):
    whole, split = batches(device, n=4), lists(device)
    compare(device, [whole[0], split[1], whole[1], split[2], whole[2], split[0]])


@pytest.mark.parametrize("accumulate", ["autograd", "host"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_list_with_gradients_outside_of_the_arena_is_a_capture_error_that_changes_nothing(
    device, accumulate
):
    step = make(device, "graph", accumulate=accumulate)
    before = everything(step.model, step.opt, device)
    with pytest.raises(
        CaptureError,
        match=f"a list of micro-batches .* accumulate='{accumulate}' .* expected 'arena' or 'fused'",
    ):
        step(lists(device)[1])
    agree(everything(step.model, step.opt, device), before)
    assert step.count == 0
    step.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_list_that_breaks_off_drops_its_sums(device):
    """An error at the last micro-batch: the next step is as if the list had never been."""
    broken = False

    def loss(model, micro):
        if broken and micro[0].shape[1] == 16:
            raise KeyError("broken off")
        return loss_fn(model, micro)

    data = lists(device)
    want, left, *_ = trained(
        make(device, "eager", net=lambda: Net(dropout=0.0), loss=loss, schedule=None),
        [data[0], data[1]],
        device,
    )
    step = make(
        device, "graph", net=lambda: Net(dropout=0.0), loss=loss, schedule=None, policy="auto"
    )
    short, (new,) = (
        batches(device, n=2, rows=2, lengths=(8,)),
        batches(device, n=1, rows=3, lengths=(16,)),
    )
    outs = [step(data[0])]
    broken = True
    with pytest.raises(KeyError, match="broken off"):
        step([*short, new])
    assert not step.arena.grads.any() and step.count == 1
    broken = False
    outs.append(step(data[1]))
    outputs_agree(outs, want)
    step.close()


# ---- 3. no trace, 4. the first call is a step -----------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["arena", "fused", "autograd"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_first_call_leaves_what_eagers_first_step_leaves(device, accumulate):
    """Weights, moments, batch norm's statistics and its counter, every generator, skips and counts: warm-up and capture are in none."""
    (batch,) = batches(device, n=1)
    start = everything(
        (step := make(device, "eager", net=lambda: Net(norm=True))).model, step.opt, device
    )
    _, left, count, _ = trained(step, [batch], device)
    step = make(device, "graph", net=lambda: Net(norm=True), accumulate=accumulate)
    step(batch)
    got = everything(step.model, step.opt, device)
    agree(got, left)
    assert (
        step.count == count == 1 and step.opt.skipped == 0 and got["norm.num_batches_tracked"] == 2
    )  # one per micro-batch
    assert not torch.equal(got["head.weight"], start["head.weight"]) and not torch.equal(
        got["norm.running_mean"], start["norm.running_mean"]
    )
    step.close()


@pytest.mark.parametrize("whose", ["ga.AdamW", "ga.AdamW over an arena", "torch.optim.AdamW"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_capture_alone_changes_nothing_at_all(device, whose):
    """Not even the generators that fn's Python draws from, nor gradients that stood there."""
    model = small(device, norm=True, dropout=0.3)
    opt = (
        torchs(model, device)
        if whose.startswith("torch")
        else AdamW(Arena(model) if "arena" in whose else model.parameters(), lr=LR, max_norm=LIMIT)
    )
    fn, (x, y) = plain_step(model, opt), pairs(device, 1)[0]

    def drawing(x, y):
        random.random(), np.random.rand(), torch.rand(())
        opt.zero_grad()
        return fn(x, y)

    seed()
    F.mse_loss(model(x), y).backward()
    before, grads = (
        everything(model, opt, device),
        [(p.grad, p.grad.clone()) for p in model.parameters()],
    )
    with ga.GraphedStep(drawing, [model, opt], policy="require") as step:
        step.capture(x, y)
        assert len(step) == 1
        agree(everything(model, opt, device), before)
        for p, (grad, values) in zip(model.parameters(), grads):
            assert p.grad is grad
            same(p.grad, values, "a gradient that stood there")
        step.capture(x, y)
        assert len(step) == 1
    agree(everything(model, opt, device), before)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_that_stand_are_state_that_a_step_adds_to(device):
    model, other = small(device), small(device)
    data = pairs(device, 3)

    def adding(model):
        def fn(x, y):
            F.mse_loss(model(x), y).backward()

        return fn

    for m in (model, other):
        for p in m.parameters():
            p.grad = torch.ones_like(p)
    with ga.GraphedStep(adding(model), model, policy="require") as step:
        for x, y in data:
            assert step(x, y) is None
            adding(other)(x, y)
            for p, q in zip(model.parameters(), other.parameters()):
                same(p.grad, q.grad, "gradient")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_captured_step_is_taken_once(device):
    """Not three times (warm-ups), not never (a capture runs nothing)."""
    total, made = torch.zeros(3, device=device), []

    def fn(x):
        made.append(None)
        total.add_(x)
        return total * 2

    with ga.GraphedStep(fn, total, policy="require") as step:
        for k in range(1, 4):
            out = step(torch.ones(3, device=device))
            assert out.tolist() == [2.0 * k] * 3 and total.tolist() == [k] * 3
    assert len(made) == 3, "Python's work is done in two warm-ups and the capture"


# ---- 5. what is handed out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("how", ["whole", "list"])
def test_outputs_are_tensors_of_their_own(device, how):
    """Five steps' outputs, kept: all different, and each as it was when it came."""
    data = batches(device, n=5, lengths=(8,))
    step = make(device, "graph")
    outs, values = [], []
    for batch in data:
        outs.append(step([batch] if how == "list" else batch))
        values.append({key: getattr(outs[-1], key).clone() for key in OUTPUTS})
    for key in OUTPUTS:
        assert len({getattr(out, key).data_ptr() for out in outs}) == 5, f"{key} shares its memory"
        for out, value in zip(outs, values):
            same(getattr(out, key), value[key], key)
    assert (
        len({out.loss.item() for out in outs}) == 5 and len({out.norm.item() for out in outs}) == 5
    )
    assert not outs[0].loss.requires_grad and outs[0].loss.device == step.arena.device
    outs[0].loss.fill_(7), outs[1].norm.fill_(7)  # whoever writes to them disturbs nobody
    want, *_ = trained(
        make(device, "eager"), [[b] for b in data] if how == "list" else data, device
    )
    same(outs[4].loss, want[4].loss), same(outs[4].norm, want[4].norm)
    step.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_results_and_inputs_may_stand_in_any_tree(device):
    """Every dtype, empty and one-element tensors, any strides, numbers and None; keywords, dicts, lists."""

    def fn(first, *, rest, scale):
        a, (b, c) = first["a"], rest
        return {
            "sum": a + b.t(),
            "parts": (c > 0, [c.sum(), None, 3, "text"]),
            "low": a.bfloat16(),
            "none": a[:0],
            "whole": (c * scale).long(),
            "view": a.t(),
        }

    with ga.GraphedStep(fn, torch.zeros(1, device=device), policy="require") as step:
        kept = []
        for k in range(3):
            a, b, c = (
                torch.randn(3, 5, device=device),
                torch.randn(5, 3, device=device),
                torch.randn(1, device=device).expand(7),
            )
            got, want = (run({"a": a}, rest=[b.clone(), c], scale=2.5) for run in (step, fn))
            kept.append((got, want))
        for got, want in kept:
            assert set(got) == set(want) and got["parts"][1][1:] == [None, 3, "text"]
            for key in ("sum", "low", "none", "whole", "view"):
                same(got[key], want[key], key)
            same(got["parts"][0], want["parts"][0]), same(got["parts"][1][0], want["parts"][1][0])
        assert len(step) == 1
        x = torch.arange(15.0, device=device).view(5, 3)
        same(
            step({"a": x.t()}, rest=[x, torch.ones(7, device=device)], scale=2.5)["sum"],
            x.t() + x.t(),
            "an input with other strides",
        )
    with ga.GraphedStep(lambda: None, torch.zeros(1, device=device), policy="require") as step:
        assert step() is None


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_inputs_are_read_when_the_step_is_called(device):
    """They are copied into the graph's own memory, and stay the caller's."""
    x = torch.ones(4, device=device)
    with ga.GraphedStep(
        lambda x: x.mul_(3), torch.zeros(1, device=device), policy="require"
    ) as step:
        for k in range(3):
            x.fill_(k)
            assert torch.equal(step(x).cpu(), torch.full((4,), 3.0 * k)) and torch.equal(
                x.cpu(), torch.full((4,), float(k))
            )
        if device == "cuda":
            assert torch.equal(
                step(torch.full((4,), 5.0).pin_memory()).cpu(), torch.full((4,), 15.0)
            )


# ---- 6. kinds of input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_least_recently_used_graph_goes_and_is_captured_again(device, counts):
    total = torch.zeros((), device=device)

    def fn(x):
        total.add_(x.sum())
        return x * 2

    with ga.GraphedStep(fn, total, policy="require", max_graphs=2) as step:
        a, b, c = (torch.ones(n, device=device) for n in (1, 2, 3))
        want = 0
        for x, captures in (
            (a, 1),
            (b, 2),
            (a, 2),
            (c, 3),
            (a, 3),
            (b, 4),
            (c, 5),
            (b, 5),
        ):  # c takes b's place, b takes c's, c takes a's
            assert torch.equal(step(x), x * 2)
            want += len(x)
            assert (
                counts.captures == captures
                and len(step) == min(captures, 2)
                and total.item() == want
            )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_three_lengths_in_two_graphs_have_eagers_bits(device, counts):
    compare(device, batches(device, n=7, lengths=(8, 16, 12)), max_graphs=2)
    assert counts.captures == 7, "each of the three came when the two others were there"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_new_shape_is_refused_in_words_where_that_was_asked_for(device):
    step = make(device, "graph", new_shapes="refuse")
    short, long = batches(device, n=2)
    step(short)
    before = everything(step.model, step.opt, device)
    with pytest.raises(
        CaptureError,
        match=r"4x16 int64.*captured are 4x8 int64, 4x8 int64, 4 float32.*new_shapes is 'refuse'",
    ):
        step(long)
    agree(everything(step.model, step.opt, device), before)
    assert step.count == 1
    step(short)
    step.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_makes_another_kind_of_step_is_captured_anew(device, counts):
    """dtype, a value that is no tensor, grad mode, autocast, and what `modes` says: each has a graph of its own, and the right results."""
    mode = "one"

    def fn(x, times=2, **rest):
        y = x @ x
        return y * times if torch.is_grad_enabled() else -y

    x = torch.randn(4, 4, device=device)
    want = x @ x
    with ga.GraphedStep(
        fn, torch.zeros(1, device=device), policy="require", modes=lambda: mode
    ) as step:
        same(step(x), want * 2), same(step(x), want * 2)
        assert counts.captures == 1
        same(step(x.double()), (x.double() @ x.double()) * 2)
        same(step(x, 3), want * 3)
        same(step(x, times=3), want * 3)
        assert counts.captures == 4
        with torch.no_grad():
            same(step(x), -want)
        assert counts.captures == 5
        mode = "two"
        same(step(x), want * 2)
        assert counts.captures == 6
        with torch.autocast(device, torch.bfloat16):
            same(step(x), (x @ x) * 2, "under autocast")
        assert counts.captures == 7
        mode = "one"
        same(step(x), want * 2)
        assert counts.captures == 7


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_numbers_of_two_types_are_two_kinds(device):
    """2 == 2.0 == True + 1 for Python, but not for torch."""
    x = torch.arange(4, device=device)
    with ga.GraphedStep(
        lambda x, by: x * by, torch.zeros(1, device=device), policy="require"
    ) as step:
        for by in (1, 1.0, True, 1):
            same(step(x, by), x * by, f"times {by!r}")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_closed_step_says_so_and_closing_twice_is_fine(device):
    fn, x = (lambda x: x + 1), torch.ones(2, device=device)
    step = ga.GraphedStep(fn, torch.zeros(1, device=device), policy="require")
    kept = step(x)
    step.close(), step.close()
    for again in (step, step.capture):
        with pytest.raises(CaptureError, match="the step was closed"):
            again(x)
    assert torch.equal(kept, x + 1), "a result outlives the graph"
    assert len(step) == 0 and step.graph() == ([], [])
    whole, (batch,) = make(device, "graph"), batches(device, n=1)
    whole(batch)
    whole.close(), whole.close()
    with pytest.raises(CaptureError, match="the step was closed"):
        whole(batch)
    with pytest.raises(CaptureError, match="the step was closed"):
        whole([batch])
    with ga.GraphedStep(fn, torch.zeros(1, device=device)) as unused:
        pass
    with pytest.raises(CaptureError, match="the step was closed"):
        unused(x)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_reset_captures_anew_and_changes_nothing_else(device, counts):
    model, other = small(device, dropout=0.3), small(device, dropout=0.3)
    opt, same_opt = AdamW(model.parameters(), lr=LR), AdamW(other.parameters(), lr=LR)
    fn, eager, data = plain_step(model, opt), plain_step(other, same_opt), pairs(device, 6)
    seed()
    want = [eager(x, y) for x, y in data]
    seed()
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        for k, (x, y) in enumerate(data):
            if k == 3:
                step.reset()
                assert len(step) == 0
            same(step(x, y), want[k], f"loss {k}")
        assert counts.captures == 2
    agree(everything(model, opt, device), everything(other, same_opt, device))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_graph_can_be_looked_at(device):
    with ga.GraphedStep(
        lambda x: ((x + 1) * 2).exp(), torch.zeros(1, device=device), policy="require"
    ) as step:
        assert step.graph() == ([], [])
        step(torch.ones(1000, device=device))
        names, edges = step.graph()
    assert len(names) >= 4 and all(
        isinstance(name, str) and name for name in names
    )  # three operations, and the copy of the result
    assert edges == [(i, i + 1) for i in range(len(names) - 1)], "each waits for the one before"


# ---- 7. the model or the optimizer has changed ----------------------------------------------------------------------


def another_dtype(model):
    model.size = model.size.double()


def moved(model):
    model.head.weight.data = model.head.weight.data.clone()


def replaced(model):
    model.blocks[1][3] = nn.Linear(64, HIDDEN).to(model.head.weight.device)


def one_more(model):
    model.extra = nn.Parameter(torch.zeros(3, device=model.head.weight.device))


def one_less(model):
    del model.blocks[0][1].bias
    model.blocks[0][1].bias = None


CHANGES = {
    "new parameter": (one_more, "extra"),
    "parameter gone": (one_less, r"blocks\.0\.1"),
    "replaced module": (replaced, r"blocks\.1\.3"),
    "moved weight": (moved, r"head\.weight has another address"),
    "dtype of a buffer": (another_dtype, r"size was torch\.float32.*is torch\.float64"),
    "module.double()": (
        lambda model: model.double(),
        r"(size|embedding\.weight) was torch\.float32.*is torch\.float64",
    ),
    "module.to(other device)": (
        lambda model: model.to("cpu" if model.size.is_cuda else "meta"),
        r"(size|embedding\.weight) (has another address|was )",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_model_that_changed_after_the_capture_is_named_and_nothing_else_changes(device, change):
    """A graph would go on with memory that is no longer the model's."""
    alter, name = CHANGES[change]
    torch.manual_seed(0)
    model = Net(dropout=0.0).to(device)
    opt = AdamW(model.parameters(), lr=LR)

    def fn(x, y, weight):
        loss = loss_fn(model, (x, y, weight))[0]
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    one, two = batches(device, n=2, lengths=(8,))
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        step(*one)
        alter(model)
        before = None if "meta" in str(model.size.device) else everything(model, opt, device)
        with pytest.raises(CaptureError, match=f"{name}.*reset"):
            step(*two)
        if before is not None:
            agree(everything(model, opt, device), before)


@pytest.mark.parametrize("change", ["moved weight", "dtype of a buffer", "replaced module"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_train_step_notices_it_too(device, change):
    alter, name = CHANGES[change]
    step = make(device, "graph")
    one, two = batches(device, n=2, lengths=(8,))
    step(one)
    alter(step.model)
    before = everything(step.model, step.opt, device)
    with pytest.raises(CaptureError, match=name):
        step(two)
    agree(everything(step.model, step.opt, device), before)
    assert step.count == 1
    step.close()


@pytest.mark.parametrize("change", ["moved weight", "dtype of a buffer"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_after_reset_the_changed_model_is_captured(device, change):
    alter, _ = CHANGES[change]
    runs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = Net(dropout=0.0).to(device)
        opt = AdamW(model.parameters(), lr=LR)

        def fn(x, y, weight, model=model, opt=opt):
            loss = loss_fn(model, (x, y, weight))[0]
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step,
            ga.deterministic() if device == "cuda" else contextlib.nullcontext(),
        ):
            one, two, three = batches(device, n=3, lengths=(8,))
            losses = [step(*one)]
            alter(model)
            if graphed:
                step.reset()
            losses += [step(*two), step(*three)]
        runs.append((losses, everything(model, opt, device)))
    for a, b in zip(runs[1][0], runs[0][0]):
        same(a, b, "loss")
    agree(runs[1][1], runs[0][1])


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_tensor_that_the_step_itself_replaces_is_named_before_the_first_step(device, kind):
    """Each replay would read the old one again: a counter would stand still. Eager counts; a graph needs add_()."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), device=device))
            self.weight = nn.Parameter(torch.ones((), device=device))

        def forward(self, x):
            if kind == "buffer":
                self.seen = self.seen + 1
            else:
                self.weight.data = self.weight.data * 2
            return x * self.weight + self.seen

    model = Counts()
    with ga.GraphedStep(lambda x: model(x).detach(), model, policy="require") as step:
        with pytest.raises(CaptureError, match="seen" if kind == "buffer" else "weight"):
            step(torch.ones(2, device=device))
        assert model.seen == 0 and model.weight == 1, "the warm-up has left a trace"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_eval_and_frozen_weights_are_other_kinds_of_step(device, counts):
    def between(step, k):
        step.model.train(k not in (2, 3))
        step.model.head.weight.requires_grad_(k < 6)
        step.model.blocks[0][1].weight.requires_grad_(k < 6)

    wanted = compare(device, batches(device, n=8, lengths=(8,)), between)
    assert counts.captures == 3, (
        "training, eval, frozen; back in training the first one is there still"
    )
    assert len({out.loss.item() for out in wanted}) == 8


def set_rate(opt, k):
    opt.param_groups[0]["lr"] = LR / (k + 1)


def set_betas(opt, k):
    opt.param_groups[-1]["betas"] = (0.9 - 0.1 * k, 0.999)


def set_eps(opt, k):
    opt.param_groups[0]["eps"] = 10.0 ** -(8 - k)


def set_decay(opt, k):
    opt.param_groups[0]["weight_decay"] = 0.1 * k


def set_limit(opt, k):
    opt.max_norm = LIMIT / (k + 1)


def set_no_limit(opt, k):
    opt.max_norm = LIMIT if k < 2 else None


def set_sign(opt, k):
    for group in opt.param_groups:
        group["maximize"] = k % 2 == 1


@pytest.mark.parametrize(
    "change", [set_rate, set_betas, set_eps, set_decay, set_limit, set_no_limit, set_sign]
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_setting_changed_by_hand_takes_effect_in_the_next_replay(device, change):
    data = batches(device, n=5, lengths=(8,))
    compare(device, data, lambda step, k: change(step.opt, k), schedule=None)
    runs = [
        trained(make(device, "graph", schedule=None), data, device, between)[1]
        for between in (None, lambda step, k: change(step.opt, k))
    ]
    assert not torch.equal(runs[0]["head.weight"], runs[1]["head.weight"]), (
        "the change makes no difference: nothing was tested"
    )


def half_the_loss(model, micro):
    total, tokens = loss_fn(model, micro)
    return total / 2, tokens


@pytest.mark.parametrize(
    "name, values",
    [
        ("micro_batches", [2, 4, 1, 2]),
        ("divide", ["tokens", "sequences", "micro_batches", "tokens"]),
        ("autocast", [None, torch.bfloat16, None, None]),
        ("loss_fn", [loss_fn, half_the_loss, loss_fn, loss_fn]),
    ],
)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_stage_of_the_step_changed_by_hand_takes_effect(device, name, values):
    wanted = compare(
        device,
        batches(device, n=4, lengths=(8,)),
        lambda step, k: setattr(step, name, values[k]),
        opt={"max_norm": None},
    )
    plain, *_ = trained(
        make(device, "eager", opt={"max_norm": None}), batches(device, n=4, lengths=(8,)), device
    )
    assert wanted[1].norm != plain[1].norm, "the change makes no difference: nothing was tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_load_state_dict_between_replays_takes_effect(device, dtype, counts):
    """Back to an earlier state, with another rate in it; the graph is the same, because the state is loaded into its memory."""
    kept = {}

    def between(step, k):
        if k == 2:
            kept["state"] = copy.deepcopy(step.opt.state_dict())
            kept["state"]["param_groups"][0]["lr"] = LR / 7
        if k == 4:
            step.opt.load_state_dict(kept["state"])
            assert step.opt.param_groups[0]["lr"] == LR / 7

    compare(device, batches(device, n=7, lengths=(8,)), between, schedule=None, dtype=dtype)
    assert counts.captures == 1
    kept.clear()
    with_load, without = (
        trained(
            make(device, "graph", schedule=None, dtype=dtype),
            batches(device, n=7, lengths=(8,)),
            device,
            how,
        )[1]
        for how in (between, None)
    )
    assert not torch.equal(with_load["head.weight"], without["head.weight"])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_models_load_state_dict_between_replays_takes_effect(device, counts):
    torch.manual_seed(9)
    other = {
        name: torch.randn_like(t.float()).to(t.dtype) * 0.1
        for name, t in Net().state_dict().items()
    }

    def between(step, k):
        if k == 2:
            step.model.load_state_dict(other)

    for dtype in (torch.float32, torch.bfloat16):
        compare(device, batches(device, n=4, lengths=(8,)), between, dtype=dtype)
    assert counts.captures == 2


def file_run(folder, replay, steps, device, stop_at=None, resume=False, dtype=torch.float32):
    """train() with checkpoints and metrics. Returns (losses as the readings tell them, weights)."""
    step = make(device, replay, dtype=dtype, loss=token_loss, schedule=8)
    tokens = torch.randint(0, V, (2000,), generator=torch.Generator().manual_seed(5))

    class OnDevice(ga.Batches):
        def __next__(self):
            return tuple(t.to(device) for t in super().__next__())

    for reading in train(
        step,
        OnDevice(tokens, 4, 8, seed=0),
        steps,
        metrics=folder / "run.jsonl",
        checkpoint_dir=folder / "checkpoints",
        resume=resume,
    ):
        if reading.step == stop_at:
            break
    found = everything(step.model, step.opt, device)
    assert step.replays == replay
    step.close()
    return (folder / "run.jsonl").read_text(), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_run_saved_under_replay_goes_on_in_eager_with_the_same_bits_and_back(
    device, dtype, tmp_path
):
    """train(): the metrics' losses, the weights, and dropout's generator, whoever began and whoever ended."""

    def losses(text):
        return re.findall(r'"step": (\d+), "loss": ([^,]+)', text)

    lines, want = file_run(tmp_path / "eager", "eager", 8, device, dtype=dtype)
    assert len(losses(lines)) == 8
    for first, then in (("graph", "graph"), ("graph", "eager"), ("eager", "graph")):
        folder = tmp_path / f"{first} {then}"
        file_run(folder, first, 8, device, stop_at=4, dtype=dtype)
        seed()
        more, got = file_run(folder, then, 8, device, resume=True, dtype=dtype)
        assert losses(more) == losses(lines), f"{first}, then {then}"
        agree(got, want)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_checkpoint_loaded_between_replays_brings_the_same_steps_again(device, tmp_path, counts):
    data, step = batches(device, n=6, lengths=(8,)), make(device, "graph")
    state = {
        "model": step.model,
        "optimizer": step.opt,
        "arena": step.arena,
        "scheduler": step.scheduler,
    }
    for batch in data[:2]:
        step(batch)
    ga.save_checkpoint(tmp_path / "at-2.safetensors", step=2, **state)
    once = [step(batch) for batch in data[2:]]
    after = everything(step.model, step.opt, device)
    ga.load_checkpoint(tmp_path / "at-2.safetensors", **state)
    outputs_agree([step(batch) for batch in data[2:]], once)
    agree(everything(step.model, step.opt, device), after)
    assert counts.captures == 1
    step.close()


# ---- 8. anybody's step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(6,), (6, 3)], ids=["one shape", "two shapes"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_anybodys_step_with_torchs_optimizer_has_eagers_bits(device, rows):
    """Ten steps, a schedule that fills the learning rate's tensor, dropout, batch norm."""
    data, runs = pairs(device, 10, rows), []
    for graphed in (False, True):
        model = small(device, norm=True, dropout=0.3)
        opt = torchs(model, device)
        schedule = warmup_cosine(opt, 2, 10)
        fn = plain_step(model, opt)
        seed()
        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            losses = []
            for x, y in data:
                losses.append(step(x, y))
                schedule.step()
        runs.append((losses, everything(model, opt, device)))
    for k, (a, b) in enumerate(zip(runs[1][0], runs[0][0])):
        same(a, b, f"loss {k}")
    agree(runs[1][1], runs[0][1])
    assert len({loss.item() for loss in runs[0][0]}) == 10


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_learning_rate_that_is_a_number_is_an_error_that_says_so(device):
    x, y = pairs(device, 1)[0]
    cases = [
        (
            {"lr": 0.01, "capturable": device == "cuda"},
            "the learning rate of AdamW's group 0 is the number 0.01, which a graph would keep",
        )
    ]
    if device == "cuda":
        cases += [
            (
                {"lr": torch.tensor(0.01, device=device), "fused": True},
                "counts its steps on the host .capturable=False in group 0.",
            )
        ]
    for options, words in cases:
        model = small(device)
        opt = torch.optim.AdamW(model.parameters(), **options)
        fn = plain_step(model, opt)
        before = everything(model, opt, device)
        with ga.GraphedStep(fn, [model, opt], policy="require") as step:
            with pytest.raises(CaptureError, match=words) as info:
                step(x, y)
            assert "Instead:" in str(info.value) and "ga.AdamW" in str(info.value)
        agree(everything(model, opt, device), before)
        other = small(device)
        other_opt = torch.optim.AdamW(other.parameters(), **options)
        want = [plain_step(other, other_opt)(x, y) for _ in range(3)]
        with ga.GraphedStep(fn, [model, opt], policy="auto") as step:
            with pytest.warns(UserWarning, match="every step runs eagerly.*" + words):
                got = [step(x, y) for _ in range(3)]
            assert step.replay == "eager" and re.search(words, step.reason)
        for a, b in zip(got, want):
            same(a, b)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("to", [0.5, "tensor"])
def test_a_learning_rate_put_in_anothers_place_is_noticed(device, to):
    """The graph knows the old tensor by its address: a new one (or a number) would never be read."""
    model = small(device)
    opt, (x, y) = torchs(model, device), pairs(device, 1)[0]
    with ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step:
        step(x, y)
        opt.param_groups[0]["lr"] = torch.tensor(0.5, device=device) if to == "tensor" else to
        with pytest.raises(CaptureError, match="learning rate|lr"):
            step(x, y)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_state_that_torchs_optimizer_loads_elsewhere_is_noticed(device):
    model = small(device)
    opt, (x, y) = torchs(model, device), pairs(device, 1)[0]
    with ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step:
        step(x, y)
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        with pytest.raises(
            CaptureError,
            match="of (parameter 0 of )?the optimizer's group 0 has another address.*reset",
        ):
            step(x, y)
        step.reset()
        assert step(x, y).isfinite()


def momentum(model, device):
    return torch.optim.SGD(
        model.parameters(), lr=torch.tensor(LR, device=device), momentum=0.9, fused=True
    )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_state_of_unknown_beginning_is_an_error_before_the_first_step(device):
    """SGD's momentum starts from the first gradient, not from zero: it cannot be taken back. The warm-up leaves no trace all the same."""
    model, (x, y) = small(device, dropout=0.3), pairs(device, 1)[0]
    opt = momentum(model, device)
    fn = plain_step(model, opt)
    seed()
    before = everything(model, opt, device)
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        with pytest.raises(
            CaptureError, match="SGD makes its state in the first step.*take one step before"
        ):
            step(x, y)
    after = everything(model, opt, device)
    assert after.keys() == before.keys(), "momentum of the warm-up was left behind"
    agree(after, before)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_falling_back_with_momentum_trains_as_eager(device):
    data, runs = pairs(device, 4), []
    for graphed in (False, True):
        model = small(device, dropout=0.3)
        opt = momentum(model, device)
        fn = plain_step(model, opt)
        seed()
        if graphed:
            with (
                ga.GraphedStep(fn, [model, opt], policy="auto") as step,
                pytest.warns(UserWarning, match="SGD makes its state"),
            ):
                losses = [step(x, y) for x, y in data]
            assert step.replay == "eager"
        else:
            losses = [fn(x, y) for x, y in data]
        runs.append((losses, everything(model, opt, device)))
    for a, b in zip(runs[1][0], runs[0][0]):
        same(a, b, "loss")
    agree(runs[1][1], runs[0][1])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_momentum_that_is_there_is_restored_after_the_warm_up(device):
    data, runs = pairs(device, 5), []
    for graphed in (False, True):
        model = small(device)
        opt = momentum(model, device)
        fn = plain_step(model, opt)
        losses = [fn(*data[0]).detach()]  # one step in eager
        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            losses += [step(x, y) for x, y in data[1:]]
        runs.append((losses, everything(model, opt, device)))
    for a, b in zip(runs[1][0], runs[0][0]):
        same(a, b, "loss")
    agree(runs[1][1], runs[0][1])
    assert any(name.startswith("momentum_buffer") for name in runs[0][1])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_that_a_step_leaves_are_those_of_its_own_kind_of_batch(device):
    """zero_grad() at the start, as many write it: after a replay `.grad` holds what eager's would, whichever graph was replayed."""
    runs = []
    for graphed in (False, True):
        model = small(device)
        opt = torchs(model, device)

        def fn(x, y):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            runs.append([])
            for x, y in pairs(device, 6, rows=(6, 3)):
                step(x, y)
                runs[-1].append([p.grad.clone() for p in model.parameters()])
        if graphed:
            assert all(p.grad is None for p in model.parameters()), "closed: their memory is gone"
    for k, (mine, eager) in enumerate(zip(runs[1], runs[0])):
        for one, two in zip(mine, eager):
            same(one, two, f"gradient after step {k}")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_number_passed_by_value_stays_as_it_was_at_the_capture(device):
    """p.add_(grad, alpha=-lr): the schedule goes on, the graph does not hear of it. The same rate as a tensor is read each time."""
    x, y = pairs(device, 1)[0]

    def run(rates, graphed, on_device=False):
        model = small(device)
        now = torch.zeros((), device=device)

        def fn(x, y):
            loss = F.mse_loss(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, grad in zip(model.parameters(), grads):
                    p.sub_(grad * now) if on_device else p.add_(grad, alpha=-rate)
            return loss

        with (
            ga.GraphedStep(fn, model, policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            for rate in rates:
                now.fill_(rate)
                step(x, y)
        return model[0].weight.detach().clone()

    schedule, constant = [0.5, 0.1, 0.02], [0.5] * 3
    assert torch.equal(run(schedule, True), run(constant, False)) and not torch.equal(
        run(schedule, True), run(schedule, False)
    )
    assert torch.equal(run(schedule, True, on_device=True), run(schedule, False, on_device=True))


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_is_given_as_warm_up_runs_instead_of_fn(device):
    calls, value = [], torch.zeros((), device=device)

    def fn(x):
        calls.append("fn")
        return x + value

    x = torch.zeros(2, device=device)
    with ga.GraphedStep(
        fn, value, warm_up=lambda x: calls.append("warm-up"), policy="require"
    ) as step:
        step.capture(x)
        assert set(calls[:-1]) == {"warm-up"} and calls[-1] == "fn"
        for k in range(3):
            value.fill_(k)
            assert torch.equal(step(x).cpu(), torch.full((2,), float(k)))
    assert calls.count("fn") == 1


# ---- 9. why it failed -----------------------------------------------------------------------------------------------
# The line at fault is the one after `def`.


def reads_a_value(t):
    t.sum().item()


def decides(t):
    if t.sum() > 0:
        pass


def prints(t):
    print(t)


def looks_for_nonzeros(t):
    t.nonzero()


def selects_by_a_mask(t):
    t[t > 0].sum()


def brings_it_to_the_host(t):
    t.cpu()


def waits(t):
    torch.cuda.synchronize()


def makes_a_constant(t):
    torch.tensor(3.0, device="cuda")


def allocates_elsewhere(t):
    MEMORY.append(sys.modules["cuda.bindings.runtime"].cudaMalloc(1024))


def allocates_after_a_helper(t):
    MEMORY.append(runtime().cudaMalloc(1024))


def runtime():
    return importlib.import_module("cuda.bindings.runtime")


MEMORY, VALUE, SHAPE = [], "keep the number on the device|ga.LateValue", "keep the shape fixed"
ANYWHERE = [
    (reads_a_value, VALUE),
    (decides, VALUE),
    (prints, VALUE),
    (looks_for_nonzeros, SHAPE),
    (selects_by_a_mask, SHAPE),
]
ON_A_GPU = [
    *ANYWHERE,
    (brings_it_to_the_host, "hand it in as an input"),
    (waits, "take the wait out of the step"),
    (makes_a_constant, "make the tensor on the device before the step"),
]


def faults(device, cases):
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [
        pytest.param(device, *case, id=f"{device}-{case[0].__name__}", marks=marks)
        for case in cases
    ]


FAULTS = faults("simt", ANYWHERE) + faults("cuda", ON_A_GPU)
ALLOCATIONS = faults(
    "cuda",
    [
        (fault, "allocate it before the first step")
        for fault in (allocates_elsewhere, allocates_after_a_helper)
    ],
)
# (An allocation in a hook runs in a thread of autograd's, which a capture of another thread does not mind.)


def names_the_line(info, fault, instead):
    """The error is about the line after `def`, and says what to do."""
    error, line = info.value, fault.__code__.co_firstlineno + 1
    assert (error.file, error.line) == (__file__, line), str(error)
    assert linecache.getline(__file__, line).strip() in str(
        error
    ) and f"test_graphs.py:{line}" in str(error)
    assert re.search(f"Instead: .*({instead})", str(error)), str(error)


def healthy(device):
    """After a capture that failed: dropout draws, memory comes from where it should, and another capture works."""
    ones = torch.ones(1000, device=device)
    one, two = F.dropout(ones, 0.5), F.dropout(ones, 0.5)
    assert 300 < (one == 0).sum().item() < 700 and not torch.equal(one, two)
    assert not tape.kernel.recorders
    if device == "cuda":
        new = torch.empty(5 << 20, dtype=torch.uint8, device=device)
        home = [
            s
            for s in torch.cuda.memory_snapshot()
            if s["address"] <= new.data_ptr() < s["address"] + s["total_size"]
        ]
        assert [tuple(s["segment_pool_id"]) for s in home] == [(0, 0)], (
            "memory still comes from the pool of the capture that failed"
        )
        while MEMORY:
            status, address = MEMORY.pop()
            if not int(status):
                runtime().cudaFree(address)
    with ga.GraphedStep(
        lambda x: F.dropout(x, 0.5), torch.zeros(1, device=device), policy="require"
    ) as step:
        assert not torch.equal(step(ones), step(ones))


@pytest.mark.parametrize("where", ["forward", "hook"])
@pytest.mark.parametrize("device, fault, instead", FAULTS, indirect=["device"])
def test_what_cannot_be_captured_is_named_with_its_line(device, fault, instead, where):
    if device == "cpu" and fault is prints and where == "hook":
        pytest.skip("on the CPU print() in a hook asks nothing of torch that a tape could see")
    fails_in_words(device, fault, instead, where)


@pytest.mark.parametrize("device, fault, instead", ALLOCATIONS, indirect=["device"])
def test_gpu_an_allocation_outside_of_the_pool_is_named_with_its_line(device, fault, instead):
    """CUDA only says, later, that the capture is invalid."""
    runtime()
    fails_in_words(device, fault, instead, "forward")


def fails_in_words(device, fault, instead, where):
    model = small(device, dropout=0.3)
    opt = AdamW(model.parameters(), lr=LR, max_norm=LIMIT)

    def fn(x, y):
        out = model(x)
        fault(out) if where == "forward" else out.register_hook(fault)
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    seed()
    x, y = pairs(device, 1)[0]
    before = everything(model, opt, device)
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        with pytest.raises(CaptureError) as info:
            step(x, y)
        names_the_line(info, fault, instead)
        agree(everything(model, opt, device), before)
        assert all(p.grad is None for p in model.parameters()) and len(step) == 0
    healthy(device)


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device, fault, instead", [*FAULTS, *ALLOCATIONS], indirect=["device"])
def test_what_cannot_be_captured_in_a_loss_fn_is_named_and_the_step_is_as_before(
    device, fault, instead, accumulate
):
    """Weights, sums, moments and generators; and once the line is gone the step is eager's first step."""
    broken = True
    if device == "cuda":
        runtime()

    def loss(model, micro):
        total, tokens = loss_fn(model, micro)
        if broken:
            fault(total[None])
        return total, tokens

    (batch,) = batches(device, n=1)
    _, want, *_ = trained(make(device, "eager", accumulate=accumulate), [batch], device)
    step = make(device, "graph", loss=loss, accumulate=accumulate)
    before = everything(step.model, step.opt, device)
    with pytest.raises(CaptureError) as info:
        step(batch)
    names_the_line(info, fault, instead)
    agree(everything(step.model, step.opt, device), before)
    assert step.count == 0 and not step.arena.grads.any() and not any(step.accumulator.received)
    with pytest.raises(CaptureError) as info:
        step([batch, batch])
    names_the_line(info, fault, instead)
    agree(everything(step.model, step.opt, device), before)
    broken = False
    step(batch)
    agree(everything(step.model, step.opt, device), want)
    step.close()
    healthy(device)


@pytest.mark.parametrize("nth", [0, 2], ids=["in the warm-up", "in the capture"])
@pytest.mark.parametrize("policy", ["auto", "require"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_users_own_error_arrives_as_it_is(device, policy, nth):
    """It is not about graphs: eager would raise it as well. Nothing falls back, nothing has changed."""
    model = small(device, norm=True, dropout=0.3)
    opt = AdamW(model.parameters(), lr=LR, max_norm=LIMIT)
    inner, calls, broken = plain_step(model, opt), [], True

    def fn(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        calls.append(None)
        if broken and len(calls) > nth:
            raise ValueError("my own")
        opt.zero_grad()
        return inner(x, y)

    seed()
    x, y = pairs(device, 1)[0]
    before = everything(model, opt, device)
    with ga.GraphedStep(fn, [model, opt], policy=policy) as step:
        with pytest.raises(ValueError, match="^my own$"):
            step(x, y)
        assert step.replay == "graph" and len(step) == 0
        agree(everything(model, opt, device), before)
        assert all(p.grad is None for p in model.parameters())
        broken = False
        step(x, y)
        assert len(step) == 1
    healthy(device)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_users_own_error_in_a_loss_fn_arrives_as_it_is(device):
    calls, broken = [], True

    def loss(model, micro):
        total, tokens = loss_fn(model, micro)
        calls.append(None)
        if broken and len(calls) == 6:  # the second micro-batch of the third run: the capture
            raise ValueError("my own")
        return total, tokens

    (batch,) = batches(device, n=1)
    _, want, *_ = trained(make(device, "eager"), [batch], device)
    step = make(device, "graph", loss=loss, policy="auto")
    before = everything(step.model, step.opt, device)
    with pytest.raises(ValueError, match="^my own$"):
        step(batch)
    agree(everything(step.model, step.opt, device), before)
    assert step.replays == "graph" and step.count == 0 and not step.arena.grads.any()
    broken = False
    step(batch)
    agree(everything(step.model, step.opt, device), want)
    step.close()
    healthy(device)


# ---- 10. falling back -----------------------------------------------------------------------------------------------


def takes_a_value(model, micro):
    total, tokens = loss_fn(model, micro)
    return total, tokens + 0 * int(total.isnan().any().item())


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_policy_auto_goes_on_in_eager_with_one_warning_and_eagers_bits(device, how, counts):
    data = batches(device, n=4, bad=(2,)) if how == "whole" else lists(device)[:4]
    wanted, left, *_ = trained(make(device, "eager"), data, device)
    step = make(device, "graph", loss=takes_a_value, policy="auto")
    line = takes_a_value.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning) as said:
        outs, mine, *_ = trained(step, data, device)
    texts = [str(w.message) for w in said]
    assert len(said) == 1 and re.search(
        rf"every step runs eagerly: test_graphs\.py:{line}: .*item\(\)", texts[0]
    ), texts
    assert said[0].filename == __file__, "the warning points at our own code"
    assert (
        step.replays == "eager"
        and f"test_graphs.py:{line}" in step.reason
        and counts.replays <= (how == "list")
    )
    outputs_agree(outs, wanted)
    agree(mine, left)


@pytest.mark.parametrize("policy", ["auto", "require"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_later_kind_that_cannot_be_captured_raises_under_both_policies(device, policy):
    """A run does not change its ways; the kinds that are there go on."""

    def loss(model, micro):
        return (takes_a_value if micro[0].shape[1] > 8 else loss_fn)(model, micro)

    short, long, again = batches(device, n=3)
    wanted, left, *_ = trained(make(device, "eager"), [short, again], device)
    step = make(device, "graph", loss=loss, policy=policy)
    outs = [step(short)]
    before = everything(step.model, step.opt, device)
    with pytest.raises(CaptureError, match=r"item\(\)"):
        step(long)
    agree(everything(step.model, step.opt, device), before)
    assert step.replays == "graph" and step.count == 1
    outs.append(step(again))
    assert step.replays == "graph"
    outputs_agree(outs[:1], wanted[:1])
    same(outs[1].loss, wanted[1].loss, "the loss after the failure")
    agree(everything(step.model, step.opt, device), left)
    step.close()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_without_anything_that_records_every_step_runs_eagerly_and_says_why(device):
    model = small(device)
    opt = AdamW(model.parameters(), lr=LR)
    fn, (x, y) = plain_step(model, opt), pairs(device, 1)[0]
    with pytest.warns(UserWarning, match="every step runs eagerly: CUDA graphs need a CUDA device"):
        step = ga.GraphedStep(fn, [model, opt])
    assert (
        step.replay == "eager"
        and "CUDA graphs need a CUDA device, and the step is on cpu" in step.reason
    )
    assert step(x, y).requires_grad and len(step) == 0
    step.capture(x, y)
    step.close()
    with pytest.raises(CaptureError, match="CUDA graphs need a CUDA device.*policy 'require'"):
        ga.GraphedStep(fn, [model, opt], policy="require")
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        step = make(device, "graph", policy="auto")
    assert step.replays == "eager" and "CUDA graphs need a CUDA device" in step.reason
    outs, left, *_ = trained(step, batches(device, n=3), device)
    wanted, want, *_ = trained(make(device, "eager"), batches(device, n=3), device)
    outputs_agree(outs, wanted)
    agree(left, want)
    with pytest.raises(CaptureError, match="policy 'require'"):
        make(device, "graph", policy="require")
    plain = make(device, "eager")
    assert plain.replays == "eager" and plain.reason == "replay is 'eager'"
    plain.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_accumulation_on_the_host_is_replayed_only_where_the_host_is_the_device(device):
    data = batches(device, n=4, bad=(2,))
    if device == "cpu":
        compare(device, data, accumulate="host")
        return
    wanted, left, *_ = trained(make(device, "eager", accumulate="host"), data, device)
    step = make(device, "graph", accumulate="host", policy="auto")
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        outs, mine, *_ = trained(step, data, device)
    outputs_agree(outs, wanted)
    agree(mine, left)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_clipping_that_asks_the_host_goes_on_in_eager(device):
    found = {}
    for replay in ("eager", "graph"):
        torch.manual_seed(0)
        model = Net().to(device)
        step = TrainStep(
            model,
            torchs(model, device),
            loss_fn,
            clip="item",
            max_norm=LIMIT,
            replay=replay,
            deterministic=device == "cuda",
        )
        seed()
        with (
            pytest.warns(UserWarning, match="every step runs eagerly: .*the host would wait")
            if replay == "graph"
            else contextlib.nullcontext()
        ):
            found[replay] = trained(step, batches(device, n=3), device)
        assert step.replays == "eager"
    outputs_agree(found["graph"][0], found["eager"][0])
    agree(found["graph"][1], found["eager"][1])


# ---- 11. bad arguments ----------------------------------------------------------------------------------------------


def test_an_unknown_replay_is_refused_and_the_model_stays_ordinary():
    model = llama()
    with pytest.raises(ArgumentError, match="replay is 'tape'; expected one of eager, graph, or"):
        TrainStep(model, replay="tape")
    assert Arena.of(model) is None
    with pytest.raises(ArgumentError, match="policy is 'maybe'"):
        Replay(policy="maybe")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "maybe"}, "policy is 'maybe'; expected one of auto, require"),
        ({"new_shapes": "ignore"}, "new_shapes is 'ignore'"),
        ({"max_graphs": 0}, "max_graphs is 0; expected a whole number of 1 or more"),
        ({"max_graphs": 1.5}, "max_graphs is 1.5"),
        ({"state": ["model"]}, "state holds a str; expected modules, optimizers and tensors"),
        (
            {"state": [torch.zeros(1), {}]},
            "state holds a dict; expected modules, optimizers and tensors",
        ),
    ],
)
def test_bad_arguments_of_a_graphed_step_are_refused_before_anything_runs(options, message):
    calls = []
    with ga.use_backend("simt"), pytest.raises(ArgumentError, match=message):
        ga.GraphedStep(lambda x: calls.append(x), **{"state": torch.zeros(1), **options})(
            torch.ones(1)
        )
    assert not calls


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_bad_inputs_are_refused_before_anything_runs(device):
    calls, x = [], torch.ones(2, device=device)
    with ga.GraphedStep(lambda *args: calls.append(args), torch.zeros(1, device=device)) as step:
        with pytest.raises(
            ArgumentError, match="input 1 of shape .2,. requires a gradient.*detach"
        ):
            step(x, x.clone().requires_grad_())
        for thing in ({1, 2}, np.zeros(2)):
            with pytest.raises(
                ArgumentError,
                match="the arguments that are no tensors are part of a graph's key; expected hashable ones",
            ):
                step(x, thing)
    assert not calls and step.replay == "graph"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_that_returns_an_object_is_refused(device):
    with ga.GraphedStep(
        lambda x: ga.training.step.StepOutput(x, None, None),
        torch.zeros(1, device=device),
        policy="require",
    ) as step:
        with pytest.raises(
            CaptureError,
            match="the step returns a StepOutput; expected tensors, in tuples, lists or dicts",
        ):
            step(torch.ones(2, device=device))
    healthy(device)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_batch_that_cannot_be_split_is_refused_before_anything_is_captured(device, counts):
    step = make(device, "graph")
    x, y, weight = batches(device, n=1)[0]
    before = everything(step.model, step.opt, device)
    for batch in ((x[:1], y[:1], weight[:1]), (x, y[:2], weight), "text", []):
        with pytest.raises(ArgumentError):
            step(batch)
    agree(everything(step.model, step.opt, device), before)
    assert counts.captures == 0 and step.count == 0
    step.close()


# ---- adapters, and models of others ---------------------------------------------------------------------------------


def adapted():
    model = llama()
    torch.manual_seed(1)
    ga.apply_lora(model, rank=4)
    return model


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_lora_is_replayed_with_eagers_bits(device, accumulate):
    compare(device, batches(device, n=6, bad=(3,)), net=adapted, accumulate=accumulate)


def theirs(kind, **changes):
    """A model of transformers, from its config; GPT-2 with dropout in all its places."""

    def build():
        transformers = pytest.importorskip(
            "transformers", reason="transformers, of the extra `test`, is not installed"
        )
        if kind == "llama":
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=V,
                    hidden_size=HIDDEN,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=32,
                    bos_token_id=0,
                    eos_token_id=1,
                    **changes,
                )
            ).train()
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=V,
                n_positions=32,
                n_embd=HIDDEN,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.1,
                embd_pdrop=0.1,
                attn_pdrop=0.1,
                bos_token_id=0,
                eos_token_id=1,
                **changes,
            )
        ).train()

    return build


def their_loss(model, micro):
    x, y, weight = micro
    found = F.cross_entropy(
        model(input_ids=x).logits.float().flatten(0, 1), y.flatten(), reduction="none"
    ).view(y.shape)
    return (found * weight[:, None]).sum(), (y != -100).sum()


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_model_of_transformers_is_replayed_with_eagers_bits(device, kind, accumulate, counts):
    """On a GPU they ask whether they are being captured, and then mask in another way: see the next test."""
    wanted = compare(
        device,
        batches(device, n=6, bad=(3,)),
        net=theirs(kind),
        loss=their_loss,
        accumulate=accumulate,
    )
    assert counts.replays == 6 and len({out.loss.item() for out in wanted}) == 6


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_model_of_transformers_as_it_comes_replays_alike_twice_and_follows_eager(
    device, kind, accumulate
):
    data = batches(device, n=6)
    wanted, *_ = trained(
        make(device, "eager", net=theirs(kind), loss=their_loss, accumulate=accumulate),
        data,
        device,
    )
    first, one, *_ = trained(
        make(device, "graph", net=theirs(kind), loss=their_loss, accumulate=accumulate),
        data,
        device,
    )
    second, two, *_ = trained(
        make(device, "graph", net=theirs(kind), loss=their_loss, accumulate=accumulate),
        data,
        device,
    )
    outputs_agree(second, first)
    agree(two, one)
    losses = [(a.loss.item(), b.loss.item()) for a, b in zip(first, wanted)]
    assert all(abs(a - b) < 0.1 for a, b in losses), losses


# ---- compiled parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_compiled_function_on_a_tape_is_run_as_written(device):
    """torch.compile steps aside where operations are watched: the tape has all of them."""
    weight = torch.ones(4, 4)
    compiled = torch.compile(lambda x: (x @ weight).sin() + x, backend="aot_eager")
    with ga.GraphedStep(lambda x: compiled(x), weight, policy="require") as step:
        for _ in range(3):
            x = torch.randn(4, 4)
            same(step(x), (x @ weight).sin() + x)


def compiler_or_skip():
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("torch.compile on a GPU (triton) needs a C compiler, and there is none")


@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_compiled_model_is_replayed_with_the_bits_of_its_eager_launches(
    device, compiled, dtype, accumulate
):
    compiler_or_skip()

    def net():
        torch._dynamo.reset()  # both runs compile the same things in the same order
        model = side_by_side()
        for block in model.blocks if compiled == "blocks" else ():
            block.compile(dynamic=False)
        return model

    compare(
        device,
        batches(device, n=6, bad=(3,)),
        net=net,
        dtype=dtype,
        accumulate=accumulate,
        compile=compiled == "whole",
    )
    torch._dynamo.reset()


# ---- 12. on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_a_replayed_step_never_waits_and_is_one_launch(device, accumulate, how):
    """Under a schedule, with two lengths in turn; a list of K micro-batches is K + 1 launches."""
    data = batches(device, n=8) if how == "whole" else lists(device) + lists(device)[:2]
    step = make(device, "graph", accumulate=accumulate)
    for batch in data:
        step(batch)  # captures every kind
    with no_waiting():
        kept = [step(batch) for batch in data[:5]]
    with ga.ledger("warm up"):
        step(data[0])
    for batch in data[:5]:
        with ga.ledger("replay") as row:
            kept.append(step(batch))
        assert (row.syncs, row.graph_launches) == (0, 1 if how == "whole" else len(batch) + 1), row
        assert not row.bytes("DtoH") and not row.bytes("HtoD"), row.copies
    assert all(out.loss.isfinite() for out in kept)
    step.close()


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_inputs_from_pinned_memory_are_copied_without_a_wait(device):
    data = [tuple(t.pin_memory() for t in batch) for batch in batches("cpu", n=4, lengths=(8,))]
    wanted, *_ = trained(
        make(device, "eager"), [tuple(t.cuda() for t in batch) for batch in data], device
    )
    step = make(device, "graph")
    outs = [step(data[0])]
    with no_waiting():
        outs += [step(batch) for batch in data[1:]]
    torch.cuda.synchronize()
    outputs_agree(outs, wanted)
    step.close()


def held():
    """(allocated, reserved) bytes, once everything that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_three_hundred_replays_do_not_grow_memory(device, how):
    data = batches(device, n=4) if how == "whole" else lists(device)
    step = make(device, "graph")
    for batch in data * 3:
        out = step(batch)
    before = held()
    for k in range(300):
        out = step(data[k % len(data)])
    after = held()
    assert after[0] <= before[0] and after[1] <= before[1], (
        f"{before} bytes allocated and reserved before, {after} after 300 replays"
    )
    assert out.loss.isfinite()
    step.close()


@pytest.mark.parametrize("kind", ["GraphedStep", "TrainStep", "TrainStep that fails"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_twenty_captures_and_closes_do_not_leak(device, kind):
    data = batches(device, n=2, rows=64)

    def once():
        if kind == "GraphedStep":
            model = small(device, dropout=0.3)
            opt = AdamW(model.parameters(), lr=LR)
            with ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step:
                for x, y in pairs(device, 2, rows=(512, 1024)):
                    step(x, y)
            return
        step = make(
            device,
            "graph",
            net=lambda: Net(norm=True),
            loss=takes_a_value if kind.endswith("fails") else loss_fn,
        )
        with pytest.raises(CaptureError) if kind.endswith("fails") else contextlib.nullcontext():
            for batch in data:
                step(batch)
        step.close()

    for _ in range(3):
        once()
    before = held()
    for _ in range(20):
        once()
    after = held()
    assert all(b - a < 8 << 20 for a, b in zip(before, after)), (
        f"{before} bytes allocated and reserved before, {after} after 20 captures"
    )


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_other_threads_may_use_the_gpu_during_a_capture(device):
    """A loader pins memory and copies, all the time while ten kinds of input are captured."""
    stop, errors, rounds = threading.Event(), [], [0]

    def load():
        try:
            while not stop.is_set():
                there = torch.full((1 << 14,), 3.0).pin_memory().to(device, non_blocking=True)
                torch.empty(1 << 20, device=device).fill_(1.0)
                assert there.sum().item() == 3.0 * (1 << 14)
                rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    model = small(device)
    opt = AdamW(model.parameters(), lr=LR)
    loader = threading.Thread(target=load)
    loader.start()
    try:
        with ga.GraphedStep(
            plain_step(model, opt), [model, opt], policy="require", max_graphs=10
        ) as step:
            before = rounds[0]
            for x, y in pairs(device, 10, rows=range(1, 11)):
                assert step(x, y).isfinite()
            assert len(step) == 10 and rounds[0] > before, "the other thread did nothing meanwhile"
    finally:
        stop.set()
        loader.join()
    assert not errors, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", ["arena", "fused"])
@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_two_deterministic_runs_have_the_same_bits_eager_and_replayed(
    device, accumulate, dtype
):
    """With attention long enough for torch's fast backward, which differs from run to run by itself."""

    def net():
        return ga.Transformer(
            ga.preset(
                "tiny",
                vocab=V,
                layers=2,
                hidden=128,
                intermediate=256,
                heads=2,
                kv_heads=1,
                head_dim=64,
                T=64,
            )
        )

    data = batches(device, n=6, rows=8, lengths=(64, 32), bad=(3,))
    how = {"net": net, "dtype": dtype, "accumulate": accumulate}
    wanted = compare(device, data, **how)
    outs, left, *_ = trained(make(device, "graph", **how), data, device)
    outputs_agree(outs, wanted)
    agree(left, trained(make(device, "eager", **how), data, device)[1])


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_eager_work_between_replays_disturbs_nothing(device):
    """The pool is the graphs' own: evaluation, allocations and frees between replays leave their memory alone."""

    def between(step, k):
        junk = [torch.full((1 << 18,), math.nan, device=device) for _ in range(20)]
        step.model.eval()
        with torch.no_grad():
            step.model(torch.zeros(2, 8, dtype=torch.int64, device=device))
        step.model.train()
        del junk

    compare(device, batches(device, n=6, lengths=(8, 16, 12)), between)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_gpu_replays_on_another_stream_have_eagers_bits(device):
    data = batches(device, n=4)
    wanted, left, *_ = trained(make(device, "eager"), data, device)
    step = make(device, "graph")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outs = [step(batch) for batch in data]
    torch.cuda.current_stream().wait_stream(stream)
    outputs_agree(outs, wanted)
    agree(everything(step.model, step.opt, device), left)
    step.close()


# ---- what stands outside of the step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("tidy", ["set to None", "kept at zero", "never"])
def test_gradients_that_stand_before_a_step_count_as_in_eager(device, tidy):
    """Those of an earlier backward are added to, as eager does; those that somebody adds between two replays too."""
    runs, (x, y) = [], pairs(device, 1)[0]
    for graphed in (False, True):
        model = small(device)
        opt = AdamW(model.parameters(), lr=LR)

        def fn(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            if tidy != "never":
                opt.zero_grad(set_to_none=tidy == "set to None")
            return loss.detach()

        F.mse_loss(model(-x), y).backward()
        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            losses = []
            for k in range(6):
                if k in (3, 5):
                    F.mse_loss(model(2 * x), y).backward()
                losses.append(step(x[:4] if k % 2 else x, y[:4] if k % 2 else y))
            runs.append((losses, everything(model, opt, device)))
    for one, two in zip(runs[1][0], runs[0][0]):
        same(one, two, "loss")
    agree(runs[1][1], runs[0][1])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_an_autocast_around_the_step_does_not_freeze_the_weights(device):
    """Its cache keeps copies of weights: one that the warm-up made would never be made again."""
    runs, (x, y) = [], pairs(device, 1)[0]
    for graphed in (False, True):
        model = small(device)
        opt = torchs(model, device)
        fn = plain_step(model, opt)
        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            losses = []
            for _ in range(4):
                with torch.autocast(x.device.type, torch.bfloat16):
                    losses.append(step(x, y).detach())
            runs.append(losses)
    for one, two in zip(*runs[::-1]):
        same(one, two, "loss")
    assert len({loss.item() for loss in runs[0]}) == 4


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize(
    "setting, value", [("max_norm", 1e-3), ("on_nonfinite", "skip"), ("scope", "tensor")]
)
def test_a_setting_of_the_optimizer_changed_by_hand_takes_effect_in_a_graphed_step(
    device, setting, value
):
    runs, data = [], pairs(device, 6)
    for graphed in (False, True):
        model = small(device)
        opt = AdamW(model.parameters(), lr=LR, max_norm=None if setting == "max_norm" else LIMIT)
        fn, found = plain_step(model, opt), []
        with (
            ga.GraphedStep(fn, [model, opt], policy="require")
            if graphed
            else contextlib.nullcontext(fn) as step
        ):
            for k, (x, y) in enumerate(data):
                if k in (2, 3):
                    setattr(opt, setting, value)
                step(x * math.nan if k == 3 and setting == "on_nonfinite" else x, y)
                found.append(opt.clip_state and opt.clip_state.norm.clone())
                if k == 3:
                    setattr(
                        opt,
                        setting,
                        {"max_norm": None, "on_nonfinite": "propagate", "scope": "global"}[setting],
                    )
            runs.append((found, everything(model, opt, device)))
    for k, (one, two) in enumerate(zip(runs[1][0], runs[0][0])):
        if two is not None:
            same(one, two, f"norm of step {k}")
    agree(runs[1][1], runs[0][1])


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_lora_merged_between_replays_is_not_counted_twice(device):
    model = adapted().to(device).eval()
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)  # a fresh B is zero, and merging it would change nothing
    x = torch.randint(0, V, (2, 8), device=device)
    with torch.no_grad(), ga.GraphedStep(lambda x: model(x), model, policy="require") as step:
        base, one = llama().to(device)(x), step(x)
        ga.merge_lora(model)
        two = step(x)
        want = model(x)
        assert len(step) == 2 and torch.allclose(two, want) and torch.allclose(one, want, atol=1e-3)
        assert not torch.allclose(model.eval()(x), base, atol=1e-2), "the factors say nothing"
        ga.unmerge_lora(model)
        assert torch.allclose(step(x), one) and len(step) == 2, "the first graph is found again"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_an_input_that_comes_to_require_a_gradient_is_refused_and_the_graph_stays_as_it_was(device):
    weight, x = torch.ones(2, device=device), torch.ones(2, device=device)
    with ga.GraphedStep(lambda x: x * weight, weight, policy="require") as step:
        step(x)
        with pytest.raises(ArgumentError, match="requires a gradient"):
            step(x.clone().requires_grad_())
        assert not step(x).requires_grad


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_reset_after_a_fall_back_captures_again(device):
    limit = [True]

    def fn(x):
        return x + (x.sum().item() if limit[0] else 1)

    x = torch.ones(2, device=device)
    step = ga.GraphedStep(fn, torch.zeros(1, device=device))
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        assert step(x.cpu()).device == x.device
    limit[0] = False
    assert step.replay == "eager"
    step.reset()
    assert torch.equal(step(x), x + 1) and step.replay == "graph" and len(step) == 1
    step.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_was_captured_ahead_is_what_a_deterministic_step_replays(device):
    step, (batch,) = (
        make(device, "graph", deterministic=True, new_shapes="refuse"),
        batches(device, n=1),
    )
    step.capture(batch)
    step(batch)
    assert len(step.graphs) == 1
    step.opt.max_norm = None
    with pytest.raises(CaptureError, match="in another mode"):
        step(batch)
    step.close()


@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_a_loop_over_lists_of_micro_batches_counts_their_tokens(replay, tmp_path):
    with ga.use_backend("simt"):
        step, data = make("cpu", replay), batches("cpu", n=3)
        lists = [[batch] * (k + 1) for k, batch in enumerate(data)]
        readings = list(ga.train(step, lists, 3, metrics=tmp_path / "m.jsonl"))
        each = [sum(micro[0].numel() for micro in micros) for micros in lists]
        assert readings[-1].tokens == sum(each)
        rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert [row["tokens"] for row in rows] == [each[0], each[0] + each[1], sum(each)]
        step.close()
