"""What other people's modules and wrappers do to an arena and its accumulator."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import gpuaccel as ga
from gpuaccel.errors import ArgumentError


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["host", "autograd", "arena", "fused"])
def test_ddp_is_refused_where_it_would_average_nothing(mode, one_rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    with ga.GradientAccumulator(ga.Arena(model), mode) as accumulator:
        wrapped = DistributedDataParallel(model)
        loss = wrapped(x).square().sum()
        if mode == "autograd":
            loss.backward()
            accumulator.finish()
            torch.testing.assert_close(model[0].weight.grad, expected)
        else:
            with pytest.raises(ArgumentError, match="DistributedDataParallel averages each grad"):
                loss.backward()


@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_a_process_group_without_ddp_changes_nothing(mode, one_rank):
    model = nn.Linear(8, 8)
    other = DistributedDataParallel(nn.Linear(2, 2))
    with ga.GradientAccumulator(ga.Arena(model), mode) as accumulator:
        model(torch.ones(4, 8)).sum().backward()
        accumulator.finish()
        assert (model.weight.grad == 4).all()
    assert other.module.weight.grad is None


@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_making_an_accumulator_computes_no_parametrization(mode):
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return weight

    layer = nn.Linear(600, 600)
    parametrize.register_parametrization(layer, "weight", Counted())
    Counted.calls = 0
    with ga.GradientAccumulator(ga.Arena(nn.Sequential(layer, nn.Linear(600, 600))), mode):
        assert Counted.calls == 0


@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_a_weight_that_is_unfrozen_later_is_named(mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    with ga.GradientAccumulator(ga.Arena(model), mode):
        model(torch.ones(4, 8)).sum().backward()
        # One that is in an arena may be frozen for a while, as in a GAN.
        model[1].bias.requires_grad_(False)
        model(torch.ones(4, 8)).sum().backward()
        model.requires_grad_(True)
        named = "parameter 0.weight is not in the arena"
        with pytest.warns(UserWarning, match=named):
            model(torch.ones(4, 8)).sum().backward()
        # As in torch: somebody else may train it.
        assert (model[0].weight.grad != 0).any()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(4, 8)).sum().backward()
    model[0].requires_grad_(False)
    step = ga.TrainStep(model, loss_fn=lambda m, x: m(x).sum(), accumulate=mode)
    step(torch.ones(4, 8))
    model.requires_grad_(True)
    before = model[1].weight.detach().clone()
    with pytest.raises(ArgumentError, match=named):
        step(torch.ones(4, 8))
    assert torch.equal(model[1].weight, before)


def test_a_weight_in_an_arena_of_its_own_may_be_unfrozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    with ga.GradientAccumulator(ga.Arena(model)):
        model[0].requires_grad_(True)
        with ga.GradientAccumulator(ga.Arena(model[0])) as second:
            model(torch.ones(4, 8)).sum().backward()
            assert all(second.received)


@pytest.mark.parametrize("attribute", ["arena", "accumulator"])
def test_a_module_that_keeps_its_own_arena_says_so_before_a_file_is_written(attribute, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    arena = ga.Arena(model)
    model[0].kept = ga.GradientAccumulator(arena) if attribute == "accumulator" else arena
    for make in (
        copy.deepcopy,
        pickle.dumps,
        torch.optim.swa_utils.AveragedModel,
        lambda m: torch.save(m, tmp_path / "model.pt"),
    ):
        with pytest.raises(ArgumentError, match="keeps its own arena as 0.kept"):
            make(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model[0].kept = None
    copy.deepcopy(model)
