"""TrainStep in mode "fused": AdamW leaves the sums that it has used, and the next step's first
product of each weight overwrites them."""

import math

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, same
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.optim import fused_mode
from gpuaccel.training.models import Config, Transformer

V, T = 61, 8
STEPS = 4


class Sometimes(nn.Module):
    """Layers that are used always, twice, only in long sequences, and never; a shared layer."""

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
    return Transformer(
        Config(
            vocab=V,
            hidden=64,
            intermediate=64,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=64,
            T=4 * T,
        )
    )


def adapted():
    """Frozen layers of one input are one product, with LoRA; the norms are trained whole."""
    model = ga.apply_lora(grouped(), rank=4, seed=0, also=ga.training.BLOCK_NORMS)
    for block in model.blocks:
        for layer in (block.w_q, block.w_v):
            nn.init.normal_(layer.lora_B.weight, std=0.1)
    return model


NETS = [Sometimes, tied, grouped, adapted]


def make(net, device, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = net().to(device, dtype)
    opt = ga.AdamW(ga.Arena(model), lr=1e-2, weight_decay=0.1, max_norm=0.5)
    return ga.TrainStep(model, opt, micro_batches=3, accumulate="fused", **options)


def batch(device, k, rows=6):
    random = torch.Generator().manual_seed(k)
    length = T if k % 2 else 2 * T
    tokens = torch.randint(V, (rows, length + 1), generator=random).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def weights(step):
    """Weights and the optimizer's state; a replay also has state of weights without a gradient."""
    return {"weights": step.arena.weights.clone(), "skipped": step.opt.skipped.clone()} | {
        f"{key} of {i}": t.clone()
        for i, p in enumerate(step.arena.masters)
        for key, t in step.opt.state[p].items()
        if step.opt.state[p]["step"] > 0
    }


def all_same(got, want):
    assert got.keys() == want.keys()
    for name, t in want.items():
        same(got[name], t, name)


def run(step, device, between=lambda step: None):
    norms = []
    with step:
        for k in range(STEPS):
            norms.append(step(batch(device, k)).norm.clone())
            between(step)
        return weights(step) | {f"norm {k}": norm for k, norm in enumerate(norms)}


def cleared(step):
    """The same step, whose AdamW clears the sums, and whose products add to zeros."""
    step.accumulator.leaves_sums = False
    return step


def poison(step):
    """As if the step had left NaN; only what is in the arena may be written."""
    for view in step.arena.grad_views:
        view.fill_(math.nan)
    step.arena.grads_changed()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_what_a_step_leaves_does_not_count_in_the_next_one(device, net, dtype):
    """NaN in its place changes nothing, so nothing reads it. Sums that are cleared and added to are
    those that are overwritten."""
    want = run(make(net, device, dtype), device)
    all_same(run(make(net, device, dtype), device, between=poison), want)
    if device != "cuda":
        # cuBLAS may choose other kernels for a product that does not add.
        all_same(run(cleared(make(net, device, dtype)), device), want)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("net", [Sometimes, tied])
def test_the_sum_of_a_small_weight_that_is_left_to_autograd_is_not_overwritten(
    device, net, monkeypatch
):
    """On a CPU products add the gradients of large weights only."""
    monkeypatch.setattr(fused_mode, "LEAST_ELEMENTS", V * 32)
    step = make(net, device)
    numels = [step.arena.segments[i].numel for i in step.accumulator.product_tensors]
    assert numels and set(numels) == {V * 32}
    got = run(step, device, between=poison)
    all_same(got, run(cleared(make(net, device)), device))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_replay_overwrites_whatever_was_left(device, net):
    options = {"deterministic": device == "cuda"}
    want = run(make(net, device, **options), device)
    graphed = make(net, device, replay=ga.training.Replay(policy="require"), **options)
    all_same(run(graphed, device, between=poison), want)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_adamw_writes_no_zeros(device):
    with make(Sometimes, device) as step:
        step(batch(device, 0))
        left = {s.name: v.any() for s, v in zip(step.arena.segments, step.arena.grad_views)}
    assert left["head.weight"] and left["norm.weight"] and not left["never.weight"]
    assert not step.arena.grads.any(), "close() clears what was left"


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_backward_of_ones_own_after_a_step_begins_at_zero(device, replay):
    with make(Sometimes, device, replay=replay) as step:
        for k in range(2):
            step(batch(device, k))
            poison(step)
        loss, _ = step.micro(batch(device, 5), 1, last=False)
        step.accumulator.finish()
        sums = step.arena.grads.clone()
        step.accumulator.zero_()
        step.micro(batch(device, 5), 1, last=False)
        step.accumulator.finish()
        assert sums.isfinite().all()
        same(sums, step.arena.grads, "the sums of one backward")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_batches_and_lists_of_micro_batches_take_turns(device):
    """Graphs of whole batches overwrite, those of one micro-batch add."""

    def data(k):
        micros = [batch(device, 10 * k + i, rows=2) for i in range(3)]
        return batch(device, k) if k % 2 else micros

    results = []
    for replay in ("eager", "graph"):
        with make(Sometimes, device, replay=replay, deterministic=device == "cuda") as step:
            for k in range(6):
                step(data(k))
                poison(step)
            results.append(weights(step))
    all_same(*results)


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_that_breaks_off_leaves_nothing(device, replay):
    broken = False

    def loss(model, micro):
        if broken and micro[0].shape[1] == 3:
            raise KeyError("broken off")
        return ga.token_loss(model, micro)

    def micros(length):
        return [batch(device, k, rows=2) for k in range(2)] + [
            tuple(t[:, :length] for t in batch(device, 2, rows=2))
        ]

    runs = []
    for breaks in (False, True):
        with make(Sometimes, device, loss_fn=loss, replay=replay) as step:
            step(micros(4))
            broken = breaks
            if breaks:
                with pytest.raises(KeyError, match="broken off"):
                    step(micros(3))
            broken = False
            step(micros(4))
            runs.append(weights(step))
    all_same(*runs)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_that_was_skipped_leaves_no_trace(device):
    """A NaN in the sums that were left, and in weights' gradients of every kind."""

    def loss(model, micro):
        tokens, targets, scale = micro
        total, count = ga.token_loss(model, (tokens, targets))
        return total * scale.sum(), count

    def with_scale(k, value):
        tokens, targets = batch(device, k)
        return tokens, targets, torch.full((len(tokens),), value, device=device)

    runs = []
    for values in ((1.0, 1.0), (1.0, math.nan, 1.0)):
        with make(Sometimes, device, loss_fn=loss) as step:
            for k, value in enumerate(values):
                step(with_scale(0 if k == 0 else 1, value))
            runs.append(weights(step))
    assert int(runs[1].pop("skipped")) == 1 and int(runs[0].pop("skipped")) == 0
    all_same(*runs)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_second_optimizer_step_and_zeros_as_gradients_after_a_step(device):
    with make(Sometimes, device) as step:
        step(batch(device, 0))
        before = step.arena.weights.clone()
        step.opt.step()
        same(step.arena.weights, before, "weights after a step without a gradient")
        step.micro(batch(device, 1), 1, last=False)
        step.opt.step()
        with pytest.raises(ArgumentError, match="used and cleared the sums"):
            step.opt.step()
        step.opt.zero_grad(set_to_none=False)
        grads = [p.grad for p in step.arena.parameters() if p.grad is not None]
        assert grads and not any(grad.any() for grad in grads)
