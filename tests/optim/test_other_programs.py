"""What other people's modules and wrappers do to an arena."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from helpers import generator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.optim import Products


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize("adding", ["autograd", "products"])
def test_ddp_averages_the_sums(adding, in_buckets, one_rank):
    """Three times the sum stands for the average of several ranks."""

    def tripled(state, bucket):
        future = torch.futures.Future()
        future.set_result(3 * bucket.buffer())
        return future

    def trained(adding):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        arena = ga.Arena(model) if adding else None
        products = Products(arena) if adding == "products" else None
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=in_buckets)
        wrapped.register_comm_hook(None, tripled)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for k in range(6):
            last = k % 3 == 2
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = wrapped(torch.randn(4, 8, generator=generator(k))).square().sum()
                if products is not None:
                    products.begin_backward()
                loss.backward()
            if last:
                opt.step(), opt.zero_grad()
        return list(model.parameters())

    for got, want in zip(trained(adding), trained(None)):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrap", [torch.compile, DistributedDataParallel, nn.Sequential])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrapper_of_a_model_has_the_arena_of_the_model(wrap, dtype, one_rank):
    """Its TrainStep trains as that of the model itself."""

    def trained(wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(dtype)
        arena = ga.Arena(model)
        opt = ga.AdamW(arena, lr=0.1)
        wrapped = wrap(model)
        assert ga.Arena.of(wrapped) is arena
        with ga.TrainStep(wrapped, opt, loss_fn=lambda m, x: model(x).square().mean()) as step:
            step(torch.ones(2, 4, dtype=dtype))
        return arena.weights.clone()

    assert torch.equal(trained(wrap), trained(lambda model: model))


def test_a_part_of_a_model_and_a_model_with_more_have_another_arena():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    arena = ga.Arena(model)
    assert ga.Arena.of(model[0]) is None
    assert ga.Arena.of(nn.Sequential(model, nn.Linear(2, 2))) is None
    assert not arena.released


def test_a_dtensor_is_named(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ArgumentError, match="parameter weight is a DTensor"):
        ga.Arena(model)


def test_no_parametrization_is_computed():
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return weight

    layer = nn.Linear(600, 600)
    parametrize.register_parametrization(layer, "weight", Counted())
    Counted.calls = 0
    Products(ga.Arena(nn.Sequential(layer, nn.Linear(600, 600)))).close()
    assert Counted.calls == 0


def test_a_weight_that_is_unfrozen_later_is_named_by_a_train_step():
    """Not by the arena: as in torch, somebody else may train it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    arena = ga.Arena(model)
    with ga.TrainStep(model, loss_fn=lambda m, x: m(x).sum()) as step:
        step(torch.ones(4, 8))
        # One that is in an arena may be frozen for a while, as in a GAN.
        model[1].bias.requires_grad_(False)
        step(torch.ones(4, 8))
        model.requires_grad_(True)
        before = model[1].weight.detach().clone()
        with pytest.raises(ArgumentError, match="parameter 0.weight is not in the arena"):
            step(torch.ones(4, 8))
        assert torch.equal(model[1].weight, before)
        second = ga.Arena(model[0])
        step(torch.ones(4, 8))
        assert not torch.equal(model[1].weight, before)
    model(torch.ones(4, 8)).sum().backward()
    assert all(arena.gradients.received()) and all(second.gradients.received())


@pytest.mark.parametrize("keep", [lambda arena: arena, Products], ids=["arena", "products"])
def test_a_module_that_keeps_its_own_arena_says_so_before_a_file_is_written(keep, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    arena = ga.Arena(model)
    model[0].kept = keep(arena)
    for make in (
        copy.deepcopy,
        pickle.dumps,
        torch.optim.swa_utils.AveragedModel,
        lambda m: torch.save(m, tmp_path / "model.pt"),
    ):
        with pytest.raises(ArgumentError, match="the module, which must not hold its own arena"):
            make(model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model[0].kept = None
    copy.deepcopy(model)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("optimizer", [ga.AdamW, torch.optim.AdamW])
def test_masters_under_the_names_of_a_model_are_what_torchs_checkpoints_need(optimizer, flat):
    """As in docs/checkpoints.md: torch asks a model for the names of the optimizer's tensors."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)

    def trained(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2))).bfloat16()
        arena = ga.Arena(model)
        opt = optimizer(arena if optimizer is ga.AdamW else arena.parameters(), lr=0.1)
        for k in range(steps):
            x = torch.randn(2, 4, generator=generator(k), dtype=torch.bfloat16)
            model(x).float().square().sum().backward()
            opt.step(), opt.zero_grad()
        masters = copy.deepcopy(model)
        for name, p in arena.named_parameters().items():
            part, _, last = name.rpartition(".")
            setattr(masters.get_submodule(part), last, p)
        return arena, opt, masters

    arena, opt, masters = trained(3)
    with pytest.raises(KeyError):
        dcp.get_optimizer_state_dict(arena.module, opt, options=options)
    state = copy.deepcopy(dcp.get_optimizer_state_dict(masters, opt, options=options))
    names = ".".join(map(str, state if flat else state["state"]))
    assert all(name in names for name in arena.named_parameters())
    other_arena, other, other_masters = trained(1)
    dcp.set_optimizer_state_dict(other_masters, other, state, options=options)
    for p, q in zip(arena.parameters(), other_arena.parameters()):
        assert opt.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(opt.state[p][key], other.state[q][key]) for key in opt.state[p])
