"""Arena, products, clipping, optimizer and TrainStep in combinations that users make and that once
went wrong."""

import contextlib
import gc
import weakref

import pytest
import torch
from helpers import EVERYWHERE, KERNELS, products_add
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, NonFiniteError
from gpuaccel.nn import fused_forward
from gpuaccel.optim import update_rule
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import TrainStep

# Who adds gradients into the arena.
ADDS = {"autograd": contextlib.nullcontext, "products": products_add}


def linear(device, dtype=torch.float32):
    layer = nn.Linear(2, 1, bias=False).to(device, dtype)
    nn.init.ones_(layer.weight)
    return layer


def ones(device, dtype=torch.float32):
    return torch.ones(1, 2, device=device, dtype=dtype)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_knows_the_bf16_parameters_of_an_arena(device, set_to_none):
    layer = linear(device, torch.bfloat16)
    opt, norms = AdamW(Arena(layer), lr=0.0, max_norm=1e9), []
    for _ in range(3):
        layer(ones(device, torch.bfloat16)).sum().backward()
        opt.step()
        norms.append(float(opt.clip_state.norm))
        opt.zero_grad(set_to_none)
    assert norms == [norms[0]] * 3 and norms[0] == pytest.approx(2**0.5, rel=1e-3), (
        "gradients of earlier steps were added"
    )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("adds", ADDS)
def test_clipping_parameters_whose_sums_are_in_an_arena(device, adds):
    for dtype in (torch.float32, torch.bfloat16):
        layer = linear(device, dtype)
        with ADDS[adds](arena := Arena(layer)):
            layer(100 * ones(device, dtype)).sum().backward()
            assert float(ga.clip_grad_norm_(layer.parameters(), 1.0)) == pytest.approx(100 * 2**0.5)
            assert float(arena.parameters()[0].grad.norm()) == pytest.approx(1.0, rel=1e-5)
            assert float(ga.clip_grad_norm_(arena.parameters(), 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("adds", ADDS)
def test_a_replaced_gradient_counts_once(device, adds):
    layer = linear(device)
    opt, norms = AdamW(Arena(layer), lr=0.0, max_norm=1e9), []
    with ADDS[adds](opt.arena):
        for _ in range(3):
            layer(ones(device)).sum().backward()
            layer.weight.grad = given = layer.weight.grad.clone()
            opt.step()
            norms.append(float(opt.clip_state.norm))
            opt.zero_grad(set_to_none=False)
            assert float(given.norm()) == pytest.approx(2**0.5), "the user's own tensor was written"
    assert norms == pytest.approx([2**0.5] * 3)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_adds_to_what_products_have_added(device, dtype):
    layer = linear(device, dtype)
    opt = AdamW(Arena(layer), lr=0.0, max_norm=1e9)
    with products_add(opt.arena):
        layer(ones(device, dtype)).sum().backward()
    layer(3 * ones(device, dtype)).sum().backward()
    opt.step()
    assert float(opt.clip_state.norm) == pytest.approx(4 * 2**0.5, rel=1e-2)


@pytest.mark.parametrize("how", [{}, {"deterministic": True}], ids=ADDS)
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
    """By our kernels or torch's fused AdamW, not tensor by tensor."""
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


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_state_that_moved_or_does_not_fit_is_noticed(device):
    p = nn.Parameter(torch.ones(5000, device=device))
    twin = nn.Parameter(torch.ones(5000, device=device))
    mine, theirs = AdamW([p], lr=0.1), torch.optim.AdamW([twin], lr=0.1)
    for k in range(3):
        for q in (p, twin):
            q.grad = torch.full_like(q, k + 1.0) if q.grad is None else q.grad.fill_(k + 1.0)
        if k == 1:
            for opt in (mine, theirs):
                for state in opt.state.values():
                    for value in state.values():
                        value.data = value.data.clone()
        mine.step(), theirs.step()
        torch.testing.assert_close(p, twin)
        assert float(mine.state[p]["step"]) == k + 1
    p.data, p.grad = torch.ones(50_000, device=device), None
    p.grad = torch.ones_like(p)
    with pytest.raises(
        ArgumentError, match=r"exp_avg of parameter 0 .* has shape \(5000,\); expected \(50000,\)"
    ):
        mine.step()
    assert bool((p == 1).all())
    new = nn.Parameter(torch.ones(7, device=device))  # a parameter may be put in another's place
    mine.param_groups[0]["params"][0] = new
    new.grad = torch.ones_like(new)
    mine.step()
    assert float(mine.state[new]["step"]) == 1 and bool((new < 1).all())


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_loaded_state_goes_where_a_captured_step_reads_it(device):
    p = nn.Parameter(torch.ones(9, device=device))
    p.grad = torch.ones_like(p)
    opt = AdamW([p])
    opt.step()
    kept = {key: t.data_ptr() for key, t in opt.state[p].items()}
    other = torch.optim.AdamW([twin := nn.Parameter(torch.ones(9, device=device))])
    for _ in range(3):
        twin.grad = torch.ones_like(twin)
        other.step()
    opt.load_state_dict(other.state_dict())
    assert {key: t.data_ptr() for key, t in opt.state[p].items()} == kept and float(
        opt.state[p]["step"]
    ) == 3


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


def test_clipping_calls_a_parameter_by_its_own_number_or_name():
    p = [nn.Parameter(torch.ones(n)) for n in (4, 5, 6)]
    p[1].grad, p[2].grad = torch.ones(5), torch.full((6,), float("inf"))
    with pytest.raises(NonFiniteError, match=r"parameter 2 of shape \(6,\)"):
        ga.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert ga.optim.clip_grads_(zip("abc", p), 1.0, on_nonfinite="skip").name() == "c"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_stochastic_rounding_of_weights_in_another_order_has_the_references_bits(device):
    got = []
    for where in ("torch", None):
        with ga.use_backend(where) if where else ga.use_backend(ga.backend().name):
            p = nn.Parameter(
                torch.linspace(0.5, 1.5, 288, device=device)
                .view(8, 4, 3, 3)
                .bfloat16()
                .to(memory_format=torch.channels_last)
            )
            p.grad = torch.ones_like(p)
            AdamW([p], lr=1e-4, stochastic_rounding=True, seed=3).step()
            got.append(p.detach().float().cpu())
    # torch and our kernel round their fp32 results differently now and then, but not their random
    # bits.
    assert (got[0] != got[1]).float().mean() < 0.01


def test_an_optimizer_over_parameters_that_clips_by_itself_is_heard():
    plain = linear("cpu")
    with TrainStep(plain, AdamW(plain.parameters(), max_norm=0.1), lambda m, x: m(x).sum()) as step:
        assert float(step(ones("cpu")).clipped_norm) == pytest.approx(0.1, rel=1e-4)


def test_a_weight_with_tensor_hooks_is_left_to_autograd():
    model = nn.Sequential(linear("cpu"), nn.Linear(1, 1))
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    with products_add(Arena(model)):
        assert [fused_forward(part) is not None for part in model] == [False, True]
        model(ones("cpu")).sum().backward()
        assert len(seen) == 1 and torch.equal(model[0].weight.grad, 2 * seen[0])


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


@pytest.mark.slow
def test_an_arena_that_is_gone_leaves_no_hook():
    counts = []
    for _ in range(4):
        model = linear("cpu", torch.bfloat16)
        arena = Arena(model)
        del model, arena
        gc.collect()
        counts.append(len(_global_optimizer_pre_hooks))
    assert counts[3] == counts[1]


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
