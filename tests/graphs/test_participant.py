"""The protocol by which the parts of a captured step tell ga.GraphedStep what a graph must know."""

import contextlib

import pytest
import torch
from helpers import KERNELS, products_add, same
from replays import follow_eager, pairs, small
from torch import nn

import gpuaccel as ga
from gpuaccel.graphs.participant import (
    CaptureParticipant,
    HasHostState,
    Refreshable,
    buffers_of,
    participants_of,
)


class Counter(nn.Module):
    """x + offset, with everything that a graph cannot see: a number on the host that decides, one
    that is copied to the device, a tensor that is no buffer, a list on the host."""

    def __init__(self, device):
        super().__init__()
        self.times = 1
        self.offset = 0.0
        self.calls = []
        # In a list: neither a parameter nor a buffer.
        self.tensors = [torch.zeros((), device=device), torch.zeros((), device=device)]
        self.called = []

    def forward(self, x):
        offset, seen = self.tensors
        seen += 1
        self.calls.append("forward")
        return x * self.times + offset

    def graph_key(self):
        return self.times

    def tensors_changed_by_step(self):
        return self.tensors[1:]

    def prepare(self):
        self.called.append("prepare")

    def refresh(self):
        self.called.append("refresh")
        self.tensors[0].fill_(self.offset)

    def snapshot(self):
        calls = [*self.calls]

        def restore():
            self.calls = calls

        return restore


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_an_object_of_ones_own_takes_part(device, counts):
    model = nn.Sequential(Counter(device))
    counter, x = model[0], torch.ones(3, device=device)
    with ga.GraphedStep(lambda x: model(x), model, policy="require") as step:
        step.capture(x)
        assert counter.called == ["prepare", "refresh"]
        assert counter.tensors[1] == 0, "the warm-up has left a trace"
        for k in range(3):
            counter.offset = float(k)
            same(step(x), x + k, "refresh() before each replay")
        assert counter.tensors[1] == 3 and counts.captures == 1
        counter.times = 5
        same(step(x), 5 * x + 2, "another graph_key()")
        assert counts.captures == 2
        counter.times = 1
        same(step(x), x + 2, "the first graph again")
        assert counts.captures == 2
    # A tape executes what it records: on it a capture restores the host's state as a warm-up does.
    assert len(counter.calls) == (2 if device == "cuda" else 0)


def test_the_packages_own_participants():
    model = nn.Sequential(ga.Embedding(5, 8), nn.Embedding(5, 8), nn.Linear(8, 8))
    arena = ga.Arena(model)
    opt = ga.AdamW(arena)
    with products_add(arena):
        participants = participants_of([model, opt, torch.zeros(1)])
        names = [type(each).__name__ for each in participants]
        expected = {"ArenaParticipant", "Embedding", "AdamW"}
        assert expected <= set(names), names
        assert all(isinstance(each, CaptureParticipant) for each in participants)
        for name, protocol in (
            ("AdamW", Refreshable),
            ("ArenaParticipant", Refreshable),
            ("ArenaParticipant", HasHostState),
        ):
            assert isinstance(participants[names.index(name)], protocol), name
    assert [t.data_ptr() for t in buffers_of(model)] == [model[0].invalid.data_ptr()]
    assert participants_of([nn.Linear(2, 2), torch.optim.SGD(model.parameters())]) == []


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("adds", [contextlib.nullcontext, products_add])
def test_a_replay_clips_the_gradients_of_bf16_parameters(device, adds, counts):
    """A loop of one's own: clip and zero_grad() through the module."""
    added = contextlib.ExitStack()

    def build():
        added.close()
        model = small(device).bfloat16()
        arena = ga.Arena(model)
        opt = ga.AdamW(arena, lr=0.1)
        added.enter_context(adds(arena))

        def step(x):
            model.zero_grad()
            for part in x.chunk(2):
                model(part).float().square().sum().backward()
            norm = ga.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            return norm

        return model, opt, step

    def drive(step, model, opt):
        norms = []
        for x, _ in pairs(device, 4):
            norms.append(step(x.bfloat16()))
            for p, master in zip(opt.arena.module_parameters, opt.arena.masters):
                assert master.grad is p.grad and p.grad.dtype == torch.float32
        return norms

    assert min(follow_eager(device, build, drive)) > 0.5 and counts.replays == 4
    added.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_a_warm_up_writes_into_a_bf16_parameter_is_no_edit_of_it(device):
    """Its master may have another value than it rounds to, as with stochastic rounding."""
    model = nn.Linear(3, 2, bias=False).to(device, torch.bfloat16)
    arena = ga.Arena(model)
    with torch.no_grad():
        arena.weights.add_(1.0)
    before = arena.weights.clone()

    def fn(x):
        with torch.no_grad():
            model.weight.mul_(2)
        return model(x)

    with ga.GraphedStep(fn, model, policy="require") as step:
        step.capture(torch.ones(1, 3, device=device, dtype=torch.bfloat16))
    same(arena.weights, before)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_of_an_optimizer_over_an_arena_belongs_to_its_module(device):
    """`state` names the module alone: the masters that the optimizer updates are in its arena."""
    weights, x = [], torch.ones(1, 3, device=device, dtype=torch.bfloat16)
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device, torch.bfloat16)
        arena = ga.Arena(model)
        opt = torch.optim.SGD(arena.parameters(), lr=0.1)

        def fn(x, model=model, opt=opt):
            model(x).float().square().sum().backward()
            opt.step()
            opt.zero_grad()

        step = ga.GraphedStep(fn, model, policy="require") if graphed else fn
        for _ in range(3):
            step(x)
        weights.append(arena.weights.clone())
    same(*weights)
