"""Arena, products, clipping, optimizer and TrainStep in combinations that users make and that once
went wrong."""

import gc
import weakref

import pytest
import torch
from helpers import EVERYWHERE, products_add
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import NonFiniteError
from gpuaccel.optim import update_rule
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep


def linear(device, dtype=torch.float32):
    layer = nn.Linear(2, 1, bias=False).to(device, dtype)
    nn.init.ones_(layer.weight)
    return layer


def ones(device, dtype=torch.float32):
    return torch.ones(1, 2, device=device, dtype=dtype)


@pytest.mark.parametrize("how", [{}, {"deterministic": True}], ids=["autograd", "products"])
def test_a_step_adds_in_fp32_to_what_a_backward_outside_of_it_has_left(how):
    """In bf16 256 + 1 = 256."""
    layer = linear("cpu", torch.bfloat16)
    arena, seen = Arena(layer), []
    opt = torch.optim.SGD(arena.parameters(), lr=0.0)
    opt.register_step_pre_hook(lambda *_: seen.append(layer.weight.grad.tolist()))
    with TrainStep(layer, opt, lambda model, x: model(x).float().sum(), **how) as step:
        (256 * layer(ones("cpu", torch.bfloat16)).float()).sum().backward()
        step(ones("cpu", torch.bfloat16))
    assert seen == [[[257.0, 257.0]]]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_fp32_masters_are_updated_as_plain_parameters(device, monkeypatch):
    """By our kernels or torch's fused AdamW, not by the definition."""
    monkeypatch.setattr(update_rule, "_reference_update", None)
    layer = linear(device, torch.bfloat16)
    opt = AdamW(Arena(layer), lr=0.1)
    layer(ones(device, torch.bfloat16)).sum().backward()
    opt.step()
    assert not layer.weight.eq(1).any()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_the_norm_is_of_what_the_optimizer_updates(device):
    module = nn.Linear(3, 2).to(device)
    arena = Arena(module)
    opt = AdamW(arena, max_norm=1e9)
    module(torch.ones(1, 3, device=device)).sum().backward()
    del opt.param_groups[1]  # the bias
    want = float(module.weight.grad.norm())
    opt.step()
    assert float(opt.clip_state.norm) == pytest.approx(want)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_hook_before_the_step_may_write_in_ways_that_torch_does_not_count(device):
    layer = linear(device)

    def loss_fn(module, x):
        return module(x).sum()

    with TrainStep(layer, loss_fn=loss_fn, max_norm=1.0) as step:
        step.optimizers[0].register_step_pre_hook(
            lambda *_: [layer.weight.grad.data.mul_(100)] and None
        )
        out = step(ones(device))
        assert float(out.norm) == pytest.approx(100 * 2**0.5) and float(
            out.clipped_norm
        ) == pytest.approx(1.0, rel=1e-4)


def test_a_step_without_a_norm_reports_none_and_one_that_raises_keeps_no_gradient():
    p = nn.Parameter(torch.ones(3))
    opt = AdamW([p], max_norm=1.0, on_nonfinite="propagate")
    p.grad = torch.ones(3)
    opt.step()
    assert opt.clip_state is not None
    opt.max_norm = None
    opt.step()
    assert opt.clip_state is None
    opt.on_nonfinite, p.grad = "raise", torch.full((3,), float("nan"))
    with pytest.raises(NonFiniteError):
        opt.step()
    gone, p.grad = weakref.ref(p.grad), None
    gc.collect()
    assert gone() is None


def test_an_optimizer_over_parameters_that_clips_by_itself_is_heard():
    plain = linear("cpu")
    with TrainStep(plain, AdamW(plain.parameters(), max_norm=0.1), lambda m, x: m(x).sum()) as step:
        assert float(step(ones("cpu")).clipped_norm) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("optimizer", [AdamW, ga.optim.Lion, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{}, {"deterministic": True}, {"replay": "graph"}], ids=str)
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_closed_step_leaves_its_memory_at_once(device, how, optimizer):
    """Also where Python does not look for cycles."""
    ours = optimizer is not torch.optim.AdamW
    if "replay" in how and not (ours and ga.backend().name != "torch"):
        pytest.skip("nothing is captured")
    model = linear(device, torch.bfloat16)
    arena = Arena(model)
    opt = optimizer(arena if ours else arena.parameters(), lr=1e-2)
    refs = [weakref.ref(arena), weakref.ref(model)]
    gc.collect()
    gc.disable()
    try:
        with TrainStep(model, opt, lambda model, x: model(x).mean(), max_norm=1.0, **how) as step:
            for _ in range(2):
                step(ones(device, torch.bfloat16))
        del model, arena, opt, step
        assert [ref() is None for ref in refs] == [True, True]
    finally:
        gc.enable()


def losses_of_lbfgs(dtype, with_arena):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    x = torch.randn(6, 4).to(dtype)
    losses = []
    arena = Arena(model) if with_arena else model
    opt = torch.optim.LBFGS(arena.parameters(), lr=0.1, max_iter=4)

    def closure():
        opt.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    opt.step(closure)
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closure_that_is_called_several_times_sees_the_new_weights(dtype):
    want = losses_of_lbfgs(dtype, with_arena=False)
    assert len(want) == 4 and want[3] < want[0]
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    assert losses_of_lbfgs(dtype, with_arena=True) == pytest.approx(want, abs=bound)


def test_fused_layers_take_what_the_layers_take():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3, bias=False))
    table = torch.eye(4).to_sparse()
    with products_add(Arena(model)):
        y = model[1](input=model[0](input=torch.tensor([1, 1])))
        y.sum().backward()
        model[1](table).sum().backward()
        sums = model[1].weight.grad.clone()
        rows = model[0].weight.detach()[1]
    assert torch.allclose(sums, (2 * rows + 1).expand(3, 4))
