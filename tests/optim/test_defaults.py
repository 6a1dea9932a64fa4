"""Default values are torch's; those of our own arguments are written here once more."""

import inspect

import pytest
import torch

import gpuaccel as ga

OPTIONS = dict(max_norm=None, scope="global", on_nonfinite=None, stochastic_rounding=False, seed=0)


def defaults_of(function):
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    "ours, theirs, count",
    [
        (ga.AdamW, torch.optim.AdamW, 5),
        (ga.clip_grad_norm_, torch.nn.utils.clip_grad_norm_, 4),
        (ga.optim.clip_grads_, torch.nn.utils.clip_grad_norm_, 3),
    ],
)
def test_defaults_are_torchs(ours, theirs, count):
    mine, torchs = defaults_of(ours), defaults_of(theirs)
    shared = mine.keys() & torchs.keys()
    assert len(shared) >= count and {mine[name] == torchs[name] for name in shared} == {True}


@pytest.mark.parametrize(
    "function, expected",
    [
        (ga.AdamW, OPTIONS),
        (ga.optim.DeviceOptimizer, {**OPTIONS, "weight_decay": 0.0}),
        (ga.optim.Lion, dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False)),
        (ga.clip_grad_norm_, dict(scope="global", on_nonfinite=None, eps=1e-6)),
        (ga.optim.clip_grads_, dict(scope="global", on_nonfinite=None, eps=1e-6)),
        (ga.Arena.parameter_groups, dict(weight_decay=0.1, lr=None)),
        (ga.Arena.adopt, dict(everything=False)),
    ],
)
def test_defaults_of_our_own(function, expected):
    defaults = defaults_of(function)
    assert {name: defaults[name] for name in expected} == expected
