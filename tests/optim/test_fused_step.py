"""A step on a CPU: torch's fused kernel and the definition give the same weights and state."""

import dataclasses
import itertools

import pytest
import torch
from optimizers import give, params_of

import gpuaccel as ga
from gpuaccel.optim.adamw import AdamW

SHAPES = ((7, 5), (3,), (), (0, 4), (2, 3, 4, 5), (64, 33))
BY_DEFINITION = dataclasses.replace(AdamW.rule, fused=None)


@pytest.fixture(autouse=True)
def in_torch():
    with ga.use_backend("torch"):
        yield


@pytest.fixture
def fused_tensors(monkeypatch):
    """How many tensors each call of torch's kernel has updated."""
    calls, plain = [], torch._fused_adamw_
    monkeypatch.setattr(
        torch,
        "_fused_adamw_",
        lambda p, *rest, **more: calls.append(len(p)) or plain(p, *rest, **more),
    )
    return calls


def parameters(dtype):
    params = params_of(shapes=SHAPES, dtype=dtype)
    params[0].data = params[0].data.t()
    params[4].data = params[4].data.contiguous(memory_format=torch.channels_last)
    return params


def give_contiguous(step, *sets):
    """Gradients of a step, two of them with other strides than their parameter; once without."""
    give(step, *sets, without=(1,) if step == 1 else ())
    for p in itertools.chain(*sets):
        p.grad = p.grad if p.grad is None else p.grad.contiguous()


def close(ours, theirs, dtype):
    # bf16 and fp16 states are rounded after each step.
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, 2e-2)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "scope": "tensor", "on_nonfinite": "skip"},
        {"lr": torch.tensor(0.02), "weight_decay": 0.3, "max_norm": 1e9},
        {"stochastic_rounding": True, "seed": 3},
    ],
    ids=str,
)
def test_torchs_kernel_and_the_definition_do_the_same(dtype, options, fused_tensors):
    ours, theirs = parameters(dtype), parameters(dtype)
    mine, definition = (AdamW(p, **{"lr": 0.01, **options}) for p in (ours, theirs))
    definition.rule = BY_DEFINITION
    for step in range(4):
        give_contiguous(step, ours, theirs)
        grads = [p.grad if p.grad is None else p.grad.clone() for p in ours]
        versions = [p._version for p in ours]
        mine.step(), definition.step()
        close(ours, theirs, dtype)
        for p, q in zip(ours, theirs):
            assert mine.state[p].keys() == definition.state[q].keys()
            close(mine.state[p].values(), definition.state[q].values(), dtype)
        for p, grad, version in zip(ours, grads, versions):
            if grad is not None:
                assert torch.equal(p.grad, grad), "step() has written a user's gradient"
                assert p.numel() == 0 or p._version > version, "autograd has not seen the update"
    rounds_once = dtype in (torch.bfloat16, torch.float16) and (
        options.get("max_norm") == 0.5 or "stochastic_rounding" in options
    )
    if not (rounds_once and options.get("scope") == "tensor"):
        # All but the empty one, and the one without a gradient in one of the steps.
        assert sum(fused_tensors) == (0 if rounds_once else 4 * (len(SHAPES) - 1) - 1)
