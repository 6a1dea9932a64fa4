"""A cell of a notebook may run twice: what it makes takes the place of what it made before."""

import copy

import pytest
import torch
from helpers import EVERYWHERE
from torch import nn

import gpuaccel as ga


def model_of(dtype, device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(device, dtype)


def loss_fn(model, x):
    return model(x).square().mean()


CELLS = {
    "TrainStep": "step = ga.TrainStep(model, loss_fn=loss_fn, max_norm=1.0, replay=replay)",
    "TrainStep, optimizer": (
        "arena = ga.Arena(model)\n"
        "opt = ga.AdamW(arena, lr=1e-2)\n"
        "step = ga.TrainStep(model, opt, loss_fn, replay=replay)"
    ),
    "TrainStep, torch's optimizer": (
        "arena = ga.Arena(model)\n"
        "opt = torch.optim.SGD(arena.parameters(), lr=1e-2)\n"
        "step = ga.TrainStep(model, opt, loss_fn, max_norm=1.0)"
    ),
    "loop": (
        "arena = ga.Arena(model)\n"
        "opt = ga.AdamW(arena, lr=1e-2, max_norm=1.0)\n"
        "def step(x):\n"
        "    loss_fn(model, x).backward(); opt.step(); opt.zero_grad()"
    ),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_cell_that_runs_again_trains_on_from_the_same_weights(device, dtype, replay, cell):
    """As a cell that has run for the first time, on a model with these weights."""
    names = dict(ga=ga, torch=torch, loss_fn=loss_fn, replay=replay)
    if device == torch.device("cpu") and replay == "graph" and ga.backend().name == "torch":
        pytest.skip("nothing is captured")
    batch = torch.ones(3, 6, device=device, dtype=dtype)
    model, other = model_of(dtype, device), model_of(dtype, device)
    after_first = {}
    for module in (model, model, other):
        if module is other:
            other.load_state_dict(after_first)
        names["model"] = module
        exec(CELLS[cell], names)
        after_first = copy.deepcopy(model.state_dict())
        names["step"](batch)
    for p, q in zip(model.parameters(), other.parameters()):
        if dtype == torch.float32:
            assert torch.equal(p, q)
        else:
            # A TrainStep keeps the arena, whose fp32 masters have more bits than `other` was given.
            torch.testing.assert_close(p, q, rtol=2.0**-7, atol=0)


def test_the_first_of_two_steps_is_closed_and_the_arena_of_the_caller_stays(caplog):
    model = model_of(torch.float32, "cpu")
    first = ga.TrainStep(model, loss_fn=loss_fn)
    second = ga.TrainStep(model, loss_fn=loss_fn)
    with pytest.raises(ga.errors.ArgumentError, match="this TrainStep is closed"):
        first(torch.ones(2, 6))
    first.close()
    second(torch.ones(2, 6))
    assert not second.arena.released
    second.close()
    assert second.arena.released
    arena = ga.Arena(model)
    for _ in range(2):
        third = ga.TrainStep(model, loss_fn=loss_fn)
    third.close()
    assert not arena.released and arena.step is None
    assert [r.message for r in caplog.records] == [
        "a new TrainStep of Sequential closes the first"
    ] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_norm": 1.0, "max_norm_of_opt": 2.0}, "clipped twice"),
        ({"replay": "words"}, "replay"),
        ({"opt": torch.optim.SGD([nn.Parameter(torch.zeros(3))])}, "is not the model's"),
    ],
    ids=["max_norm", "replay", "opt"],
)
def test_a_refused_step_leaves_the_first_one_open(arguments, message):
    model = model_of(torch.float32, "cpu")
    with ga.TrainStep(model, loss_fn=loss_fn) as first:
        arguments = dict(arguments)
        max_norm = arguments.pop("max_norm_of_opt", None)
        if max_norm is not None:
            arguments["opt"] = ga.AdamW(first.arena, max_norm=max_norm)
        with pytest.raises(ga.errors.ArgumentError, match=message):
            ga.TrainStep(model, loss_fn=loss_fn, **arguments)
        assert first.arena.step is first
        first(torch.ones(2, 6))
