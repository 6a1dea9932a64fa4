"""ga.AdamW is torch.optim.AdamW in everything a user sees; clipping, skipping, rounding, replay."""

import contextlib
import copy
import gc
import math
import re
import warnings
import weakref

import pytest
import torch
from helpers import (
    EVERYWHERE,
    INF,
    KERNELS,
    NAN,
    Blocks,
    bits,
    differ,
    exact_norm,
    filled,
    generator,
    no_waiting,
    same,
)
from optimizers import (
    CLOSE,
    Training,
    check_arena,
    compare,
    give,
    march,
    params_of,
    snapshot,
    states,
    twin,
    unchanged,
)
from torch import nn
from torch.optim import lr_scheduler

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.errors import ArgumentError, NonFiniteError
from gpuaccel.ops.rounding import reference_random_bits, reference_round
from gpuaccel.optim import state_layout, update_rule
from gpuaccel.optim.adamw import AdamW, reference_adamw
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.lion import Lion

Torchs = torch.optim.AdamW
# What follows from DeviceOptimizer, their base.
MAKES = [AdamW, Lion]
PARAMETERS = [("parameters", torch.float32), ("parameters", torch.bfloat16)]


def database():
    pytest.importorskip(
        "expecttest",
        reason="torch.testing._internal.common_optimizers needs expecttest, which is not installed",
    )
    from torch.testing._internal.common_optimizers import optim_db

    return next(info for info in optim_db if info.optim_cls is Torchs)


# ---- torch's database of optimizers --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    "implementation",
    [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}],
    ids=str,
)
def test_every_option_of_torchs_database(implementation, device):
    inputs = database().optim_inputs_func(device)
    assert len(inputs) >= 5
    for entry in inputs:
        kwargs = {**entry.kwargs, **implementation}
        foreach = kwargs.get("foreach") and not kwargs.get("capturable")
        if isinstance(kwargs.get("lr"), torch.Tensor) and foreach:
            continue  # torch refuses it; see the errors below
        ours = params_of(device)
        reference = twin(ours)
        torchs_kwargs = dict(kwargs)
        if device == "cpu":
            torchs_kwargs.pop("capturable", None)
        mine, theirs = AdamW(ours, **kwargs), Torchs(reference, **torchs_kwargs)
        march(mine, theirs, ours, reference)
        # torch's fused kernel takes 1 - beta2 in fp32: for 0.999 that is off by 1.3e-5
        bound = {"atol": 1e-7, "rtol": 2e-5 if kwargs.get("fused") else 1e-5}
        for key in theirs.state[reference[0]].keys() - {"step"}:
            compare(states(mine, key), states(theirs, key), f"{entry.desc}: {key}", **bound)
        assert [float(s) for s in states(mine, "step")] == [12.0] * len(ours)
        assert mine.defaults.keys() == theirs.defaults.keys()
        assert mine.param_groups[0].keys() == theirs.param_groups[0].keys()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_every_error_of_torchs_database(device):
    entries = database().optim_error_inputs_func(device, torch.float32)
    assert len(entries) >= (2 if device == "cuda" else 8)  # there only what concerns GPUs
    for entry in entries:
        bad = entry.optimizer_error_input
        params = bad.params if bad.params is not None else params_of(device)
        expected = pytest.raises(entry.error_type, match=entry.error_regex)
        if bad.kwargs.get("differentiable"):
            # Refused in our own words, whatever else is wrong with it.
            expected = pytest.raises(ArgumentError, match="differentiable is True")
        elif entry.error_type is UserWarning:
            expected = pytest.warns(UserWarning, match=entry.error_regex)
        with expected:
            AdamW(params, **bad.kwargs)


def test_it_is_one_of_torchs():
    mine = AdamW(params_of())
    assert isinstance(mine, Torchs) and isinstance(mine, torch.optim.Optimizer)
    assert repr(mine).startswith("AdamW (\nParameter Group 0")
    assert mine.clip_state is None and mine.last_skip() is None and mine.skipped == 0


# ---- torch's cases for one optimizer -------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_parameter_groups_with_their_own_numbers(device):
    ours = params_of(device)
    reference = twin(ours)

    def groups(ps):
        return [
            {"params": ps[:2], "lr": 0.01, "weight_decay": 0.5},
            {"params": ps[2:4], "betas": (0.5, 0.6), "eps": 1e-3},
            {"params": ps[4], "maximize": True, "amsgrad": True},
        ]

    mine, theirs = AdamW(groups(ours), lr=0.002), Torchs(groups(reference), lr=0.002)
    march(mine, theirs, ours[:5], reference[:5])
    mine.add_param_group({"params": ours[5], "lr": 0.1})
    theirs.add_param_group({"params": reference[5], "lr": 0.1})
    march(mine, theirs, ours, reference, 5, atol=5e-6)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_that_is_a_tensor(shape, device):
    for where in {"cpu", device}:
        # torch refuses a rate of shape (1,) for a weight of shape ().
        ours = params_of(device, ((10, 5), (5,), (4097,)))
        reference = twin(ours)
        capturable = {"capturable": where != "cpu"}
        rates = [torch.full(shape, 0.01, device=where) for _ in range(2)]
        mine = AdamW(ours, lr=rates[0], **capturable)
        theirs = Torchs(reference, lr=rates[1], foreach=False, **capturable)
        march(mine, theirs, ours, reference, 3)
        for rate in rates:
            rate.fill_(0.05)  # in place: the optimizer sees it
        march(mine, theirs, ours, reference, 3, seed=50, atol=5e-6)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_without_gradients_nothing_happens(device):
    ours = params_of(device)
    mine = AdamW(ours, max_norm=1.0, weight_decay=0.5)
    before = snapshot(mine)
    assert mine.step() is None
    unchanged(before, mine)
    assert not mine.state
    for p in ours:
        p.grad = torch.zeros_like(p)
    mine.step()
    give(0, ours)
    mine.step()
    mine.zero_grad()
    before = snapshot(mine)
    mine.step()  # nor the counts, nor the decay
    unchanged(before, mine)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("scope", [None, "global", "tensor"])
def test_gradients_that_come_and_go(scope, device):
    """Each tensor counts its own steps, as in torch."""
    ours = params_of(device)
    reference = twin(ours)
    kwargs = {} if scope is None else {"max_norm": 1.0, "scope": scope}
    mine, theirs = AdamW(ours, lr=0.01, **kwargs), Torchs(reference, lr=0.01)
    for k, without in enumerate([(0,), (0, 4), (), (1, 2, 3), (4, 5), (0, 1, 2, 3, 5), (), (4,)]):
        give(k, ours, reference, without=without)
        if scope is not None:
            clip_like(scope, reference, 1.0)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k} {kwargs}")
    assert list(map(float, states(mine, "step"))) == list(map(float, states(theirs, "step")))


def test_a_hook_before_loading_may_make_a_misfit_fit():
    """torch's own example: a hook reorders a state dict by names. What it returns counts."""
    ours = params_of(shapes=((2, 3), (4,)))
    mine = AdamW(ours)
    give(0, ours)
    mine.step()
    state, swapped = mine.state_dict(), copy.deepcopy(mine.state_dict())
    swapped["state"] = {0: swapped["state"][1], 1: swapped["state"][0]}
    fresh = AdamW(twin(ours))
    fresh.register_load_state_dict_pre_hook(
        lambda opt, given_: {**given_, "state": {0: given_["state"][1], 1: given_["state"][0]}}
    )
    fresh.load_state_dict(swapped)
    for key in ("exp_avg", "exp_avg_sq"):
        for i, t in enumerate(states(fresh, key)):
            same(t, state["state"][i][key], key)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_weights_and_gradients_in_any_order_of_memory(device):
    """Transposed, channels last, gapped, odd addresses; gradients in the same and another order."""
    random = generator(0)
    shapes = [
        lambda: torch.randn(70, 65, generator=random).t(),
        lambda: torch.randn(2, 3, 4, 5, generator=random).to(memory_format=torch.channels_last),
        lambda: torch.randn(9, 8, generator=random)[:, 2:5],
        lambda: torch.randn(5003, generator=random)[3:],
        lambda: torch.randn(60, generator=random)[::2],
    ]
    bases = [make() for make in shapes]
    ours, around = [], []
    for base in bases:
        whole = torch.randn(base.untyped_storage().nbytes() // 4, generator=random).to(device)
        p = nn.Parameter(whole.as_strided(base.shape, base.stride(), base.storage_offset()))
        assert p.stride() == base.stride()
        ours.append(p)
        around.append(whole)
    reference = twin(ours)
    before = [whole.clone() for whole in around]
    mine = AdamW(ours, lr=0.01, max_norm=2.0, amsgrad=True)
    theirs = Torchs(reference, lr=0.01, amsgrad=True)
    for k in range(6):
        give(k, ours, reference)
        if k % 2:
            for p in ours:
                p.grad = p.grad.contiguous()
        if k == 4:
            for p in ours:
                p.grad = torch.zeros(*p.shape, 2, device=device)[..., 1].copy_(p.grad)
        kept = [p.grad.clone() for p in ours]
        nn.utils.clip_grad_norm_(reference, 2.0)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k}")
        for p, g in zip(ours, kept):
            assert torch.equal(p.grad, g), "a user's gradient was written"
    for p, whole, old in zip(ours, around, before):
        old.as_strided(p.shape, p.stride(), p.storage_offset()).copy_(p.detach())
        assert torch.equal(whole, old), (
            f"memory beside a weight of strides {p.stride()} was written"
        )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_as_torchs_fused(dtype, device):
    """Computed in fp32 and rounded once, states included.

    Nearly every element is bit-identical to torch's, nearly all others are neighbours."""
    ours = params_of(device, dtype=dtype)
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01), Torchs(reference, lr=0.01, fused=True)
    for k in range(10):
        give(k, ours, reference)
        mine.step(), theirs.step()
    step = torch.finfo(dtype).eps
    for key, mine_, theirs_ in (
        ("weight", ours, reference),
        *((k, states(mine, k), states(theirs, k)) for k in ("exp_avg", "exp_avg_sq")),
    ):
        for a, b in zip(mine_, theirs_):
            assert a.dtype == b.dtype == dtype
            far = (
                ((a - b).abs().float() > 8 * step * b.abs().float() + 1e-6).float().mean().item()
            )  # after a step near zero, say
            assert not far > (1e-3 if key == "weight" else 1e-2), (
                f"{key}: {differ(a, b)}"
            )  # (of no elements: nan)
            different = (a != b).float().mean().item() if a.numel() > 1000 else 0
            assert different < (0.02 if key == "weight" else 0.15), (
                f"{key}: {100 * different:.2g}% of the elements differ"
            )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_dtypes_side_by_side(device):
    """fp32, bf16, fp16 and fp64 in one optimizer, clipped together; fp64 in torch's precision."""
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
    )
    ours = [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(params_of(device), dtypes)]
    reference = [nn.Parameter(p.detach().double()) for p in ours]
    mine, theirs = AdamW(ours, lr=0.01, max_norm=5.0), Torchs(reference, lr=0.01)
    for k in range(6):
        give(k, ours)
        for p, q in zip(ours, reference):
            q.grad = p.grad.double()
        nn.utils.clip_grad_norm_(reference, 5.0)
        mine.step(), theirs.step()
    for p, q, dtype in zip(
        ours, reference, dtypes
    ):  # (where torch takes the norm, a bf16 tensor's has bf16's 8 bits)
        bound = max(20 * torch.finfo(dtype).eps, 2e-5)
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=bound, atol=bound)
        assert mine.state[p]["exp_avg"].dtype == dtype


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_prepare_allocates_all_that_a_step_writes_beside_the_weights(device):
    ours = params_of(device)
    opt = AdamW(ours, max_norm=1.0)

    def memory():
        tensors = [t for state in opt.state.values() for t in state.values()]
        return [t.data_ptr() for t in (*opt.tensors_changed_by_step(), *tensors)]

    assert memory() == []
    opt.prepare()
    before = memory()
    assert len(opt.tensors_changed_by_step()) == 1 and len(before) == 1 + 3 * len(ours)
    give(0, ours)
    opt.step()
    assert memory() == before


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_skip_for_the_first_of_all_tensors_names_it(device):
    ours = params_of(device)
    opt = AdamW(ours, max_norm=1.0)
    give(0, ours)
    ours[0].grad[0, 0] = NAN
    opt.step()
    name = "parameter 0 of shape (10, 5)"
    assert opt.last_skip() == {"step": 1, "tensor": name} and opt.clip_state.name() == name


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_step_is_another_version_of_the_weights(device):
    """A graph that saved a weight must not be run backward after the step."""
    w = nn.Parameter(torch.ones(4, device=device))
    loss = w.square().sum()
    w.grad = torch.ones_like(w)
    AdamW([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("kwargs", [{}, {"max_norm": 1.0}], ids=str)
def test_gradients_that_zero_grad_dropped_are_freed_and_so_is_a_dead_optimizer(kwargs, device):
    """Kept until the next step, they would double the memory of gradients during backward."""
    ours = params_of(device)
    mine = AdamW(ours, **kwargs)
    for k in range(3):
        give(k, ours)
        held = [weakref.ref(p.grad) for p in ours]
        mine.step()
        mine.zero_grad()
        gc.collect()
        assert not any(ref() is not None for ref in held), f"step {k}: still held"
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is None


def swap_weights(optimizer, params):
    for p in params:
        p.data = p.data.clone()


def swap_state(key):
    def swap(optimizer, params):
        for p in params:
            optimizer.state[p][key] = optimizer.state[p][key] * 2 + (1 if key == "step" else 0)

    return swap


def turn_on_amsgrad(optimizer, params):
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    for p in params:  # (torch does not make it by itself)
        optimizer.state[p].setdefault("max_exp_avg_sq", torch.zeros_like(p))


def split_groups(optimizer, params):
    (group,) = optimizer.param_groups
    optimizer.param_groups.append({**group, "params": group["params"][3:], "lr": 0.1})
    group["params"] = group["params"][:3]


CHANGES = [None, None, swap_weights, *map(swap_state, ("exp_avg", "exp_avg_sq", "step"))]
CHANGES += [turn_on_amsgrad, split_groups]
CHANGES += [lambda optimizer, params: optimizer.param_groups[0].update(maximize=True)]
CHANGES += [lambda optimizer, params: optimizer.state.clear(), None]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_what_lies_elsewhere_than_in_the_last_step_is_noticed(device):
    """New memory for a weight, a state; AMSGrad turned on; other groups."""
    ours = params_of(device)
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01, max_norm=3.0), Torchs(reference, lr=0.01)
    for k, change in enumerate(CHANGES):
        random = generator(k)
        # In the same memory, so that only the change can be noticed.
        for p, q in zip(ours, reference):
            g = torch.randn(p.shape, generator=random).to(device)
            for t in (p, q):
                t.grad = g.clone() if t.grad is None else t.grad.copy_(g)
        if change:
            change(mine, ours), change(theirs, reference)
        kept = [q.grad.clone() for q in reference]
        nn.utils.clip_grad_norm_(reference, 3.0)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k}, change {change}", atol=1e-5)
        for q, g in zip(reference, kept):
            q.grad.copy_(g)


@pytest.mark.skipif(ga.backend().name == "cuda", reason="of the CPU's two backends")
def test_one_optimizer_under_two_backends():
    ours = params_of()
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01, max_norm=1.0), Torchs(reference, lr=0.01)
    for k in range(6):
        give(k, ours, reference)
        nn.utils.clip_grad_norm_(reference, 1.0)
        with ga.use_backend("simt" if k % 2 else "torch"):
            mine.step()
        theirs.step()
        compare(ours, reference, f"step {k}")


# ---- state dicts ---------------------------------------------------------------------------------

FLAGS = [
    {},
    {"foreach": True},
    {"fused": True},
    {"amsgrad": True},
    {"amsgrad": True, "fused": True},
]


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("flags", [*FLAGS, {"capturable": True}], ids=str)
@pytest.mark.parametrize(
    "first, second", [(AdamW, Torchs), (Torchs, AdamW), (AdamW, AdamW)], ids=str
)
def test_state_dicts_go_both_ways(first, second, flags, device):
    """Training continues as with one optimizer: bit-identically to ours, else within rounding."""
    if "capturable" in flags and device == "cpu" and Torchs in (first, second):
        pytest.skip("torch's capturable needs a GPU")
    ours = params_of(device)
    one = first(ours, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, **flags)
    for k in range(5):
        give(k, ours)
        one.step()
    others = twin(ours)
    two = second(others, lr=0.5)
    # torch's load_state_dict shares tensors; so does ours.
    saved = copy.deepcopy(one.state_dict())
    kept = copy.deepcopy(saved)
    two.load_state_dict(saved)
    assert two.param_groups[0]["lr"] == 0.01 and two.param_groups[0]["betas"] == (0.8, 0.95)
    for i, state in saved["state"].items():
        for key, value in state.items():
            want = torch.as_tensor(kept["state"][i][key])
            same(torch.as_tensor(value), want, "loading changed the dictionary")
    for k in range(5, 10):
        give(k, ours, others)
        one.step(), two.step()
        if first is second:
            for a, b in zip(ours, others):
                same(a.detach(), b.detach(), f"step {k}")
        compare(ours, others, f"step {k}")
    keys = [{i: sorted(s) for i, s in d["state"].items()} for d in (two.state_dict(), kept)]
    assert keys[0] == keys[1]


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_gpu_state_of_the_cpu_and_of_the_gpu(flags):
    """A run that began on the CPU goes on on a GPU, and back."""
    ours = params_of("cpu")
    one = AdamW(ours, lr=0.01, **flags)
    for k in range(3):
        give(k, ours)
        one.step()
    there = [nn.Parameter(p.detach().cuda()) for p in ours]
    two = AdamW(there, **flags)
    two.load_state_dict(one.state_dict())
    back = [nn.Parameter(p.detach().clone()) for p in ours]
    three = AdamW(back, **flags)
    three.load_state_dict(two.state_dict())
    for k in range(3, 6):
        give(k, ours, back)
        for p, q in zip(ours, there):
            q.grad = p.grad.cuda()
        one.step(), two.step(), three.step()
    compare([p.cpu() for p in there], ours)
    compare(back, ours)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["parameters", "arena"])
@pytest.mark.parametrize("make", MAKES)
def test_a_state_dict_that_does_not_fit_changes_nothing(make, what, device):
    run = Training(make, what, device, **({"amsgrad": True} if make is AdamW else {}))
    mine = run.opt
    run.step(0)
    good = copy.deepcopy(mine.state_dict())
    before = snapshot(mine)
    keys = mine.rule.state_keys
    cases = [
        (lambda s, key=key: s["state"][1].pop(key), f"state_dict: {key} of .* is missing")
        for key in ("step", *keys)
        if key != "max_exp_avg_sq"
    ]
    cases += [
        (
            lambda s, key=key: s["state"][1].update({key: torch.zeros(2, 2)}),
            rf"state_dict: {key} of .* has shape \(2, 2\); expected",
        )
        for key in keys
    ]
    # torch's own checks.
    cases += [
        (lambda s: s["param_groups"].append(s["param_groups"][0]), ""),
        (lambda s: s["param_groups"][0]["params"].pop(), ""),
    ]
    for change, message in cases:
        state = copy.deepcopy(good)
        change(state)
        with pytest.raises(ArgumentError if message else ValueError, match=message or None):
            mine.load_state_dict(state)
        unchanged(before, mine)
    mine.load_state_dict(good)
    unchanged(before, mine)
    run.close()


# ---- schedulers ----------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    # Turns beta1 as well.
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=11),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, device):
    ours = params_of(device, ((5, 3), (4,)))
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.02), Torchs(reference, lr=0.02)
    one, two, rates = SCHEDULERS[name](mine), SCHEDULERS[name](theirs), set()
    with warnings.catch_warnings():
        # One says that it did not see the steps.
        warnings.simplefilter("error")
        for k in range(10):
            give(k, ours, reference)
            mine.step(), theirs.step()
            for scheduler in (one, two):
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            compare(ours, reference, f"{name}, step {k}", atol=5e-6)
            numbers = [[(g["lr"], g["betas"]) for g in o.param_groups] for o in (mine, theirs)]
            assert numbers[0] == numbers[1]
            rates.add(mine.param_groups[0]["lr"])
    assert len(rates) > 1, "the rate never changed"


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("what, dtype", [("arena", torch.bfloat16), *PARAMETERS])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_any_grid_and_any_pieces_give_the_same_bits(
    make, stochastic, what, dtype, device, monkeypatch
):
    """Of an arena in one launch, or, where tensors got no gradient, in several; version 2 as 3."""
    how = {"lr": 0.01, "max_norm": 1.0, "stochastic_rounding": stochastic, "seed": 3}
    how |= {"amsgrad": True} if make is AdamW else {}

    def run(without=()):
        run = Training(make, what, device, dtype, **how)
        for k in range(3):
            run.backward(k)
            for i in without:
                (run.arena.module_parameters if run.arena else run.params)[i].grad = None
            run.opt.step()
        tensors = snapshot(run.opt, *run.watched)
        run.close()
        return tensors

    for without in ((), (2, 5)):
        first = run(without)
        for blocks, lists in ((2**20, True), (1, False), (3, False), (7, False)):
            with monkeypatch.context() as patch:
                patch.setattr(update_rule, "MAX_BLOCKS", blocks)
                if lists:
                    patch.setattr(state_layout, "arena_launches", lambda *args: [])
                for got, want in zip(run(without), first, strict=True):
                    same(got, want, f"without {without}, {blocks} blocks, {lists=}")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_more_tensors_than_a_launch_takes(device):
    """520 tensors: three launches of adamw_begin, nine of adamw_v2.

    Each gets its own group's numbers and its own count."""
    ours = params_of(device, tuple((1 + i % 9,) for i in range(520)))
    reference = twin(ours)

    def groups(ps):
        return [
            {"params": ps[i::40], "lr": 0.001 * (i + 1), "weight_decay": 0.01 * i}
            for i in range(40)
        ]

    mine, theirs = AdamW(groups(ours), max_norm=10.0), Torchs(groups(reference))
    for k, without in enumerate(((), range(0, 520, 3), range(100, 500))):
        give(k, ours, reference, without=without)
        nn.utils.clip_grad_norm_(reference, 10.0)
        mine.step(), theirs.step()
        compare(ours, reference, f"step {k}")


# ---- an arena ------------------------------------------------------------------------------------


SCALED = {
    "decay": lambda name, p: p.dim() >= 2 and not name.startswith("blocks.0"),
    "lr_scale": lambda name, p: 3.0 if name.startswith("blocks.1") else 0.5,
}


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    "how, rates", [({}, {0.01}), (SCALED, {0.005, 0.03})], ids=["plain", "scaled"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "mixed"])
def test_an_arena_as_torch_over_its_parameter_groups(dtype, how, rates, device):
    """Gradients are used and never written: sums, one that is missing, one of the user's own."""
    models = [Blocks(dtype=torch.float32 if dtype == "mixed" else dtype) for _ in "ab"]
    if dtype == "mixed":  # the middle block in bf16, the others in fp32
        for m in models:
            m.blocks[1].to(torch.bfloat16)
    a1, a2 = arenas = [Arena(m.to(device), **how) for m in models]
    mine = AdamW(a1, lr=0.01, weight_decay=0.3, max_norm=1.0)
    theirs = Torchs(a2.parameter_groups(0.3, 0.01), lr=0.01)
    assert {g["lr"] for g in mine.param_groups} == rates
    assert {g["weight_decay"] for g in mine.param_groups} == {0.0, 0.3}
    for k in range(5):
        for micro in range(2):
            grads = filled(models[0], 10 * k + micro)
            if k in (2, 3):
                grads[5] = None
            for m in models:
                m(grads).backward()
        if k == 3:
            for a in arenas:
                a.masters[4].grad = torch.full_like(a.masters[4], 3.0)
        kept = [None if p.grad is None else p.grad.clone() for p in a1.module_parameters]
        nn.utils.clip_grad_norm_(a2.parameters(), 1.0)
        mine.step(), theirs.step()
        for p, grad in zip(a1.module_parameters, kept):
            assert (p.grad is None) == (grad is None)
            if grad is not None:
                same(p.grad, grad, "a gradient was written")
        mine.zero_grad(), theirs.zero_grad()
        compare(a1.masters, a2.masters, f"step {k}")
        check_arena(a1)
        assert torch.equal(models[0].blocks[1][0], a1.module_parameters[4])
    assert mine.skipped == 0 and mine.last_skip() is None and mine.clip_state.finite
    a1.release(), a2.release()


# ---- clipping inside -----------------------------------------------------------------------------


def clip_like(scope, params, max_norm, blocks=()):
    """torch's norm of each group, clipped by it."""
    groups = {
        "global": [params],
        "tensor": [[p] for p in params if p.grad is not None],
        "block": [params[b.first : b.last] for b in blocks],
    }[scope]
    norms = [nn.utils.clip_grad_norm_(group, max_norm) for group in groups]
    return norms[0] if scope == "global" else torch.stack([n.to(norms[-1].device) for n in norms])


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["arena", "parameters"])
def test_clipping_inside_is_clipping_before(what, device):
    """Three steps above the threshold, with a threshold that changes, and one below."""
    for scope in ("global", "tensor", "block")[: 3 if what == "arena" else 2]:
        run = Training(AdamW, what, device, lr=0.01, max_norm=1.0, scope=scope)
        mine = run.opt
        reference = {id(p): q for p, q in zip(run.params, twin(run.params))}
        groups = [
            {**group, "params": [reference[id(p)] for p in group["params"]]}
            for group in mine.param_groups
        ]
        theirs, others = Torchs(groups, lr=0.01), list(reference.values())
        blocks = run.arena.blocks if what == "arena" else ()
        for k, (size, max_norm) in enumerate(
            ((1.0, 1.0), (5.0, 1.0), (1.0, 0.0), (1.0, 2.0), (1e-4, 2.0), (1.0, INF))
        ):
            mine.max_norm = max_norm
            give(k, run.params, others, size=size)
            want = clip_like(scope, others, max_norm, blocks)
            mine.step(), theirs.step()
            torch.testing.assert_close(mine.clip_state.norm, want, rtol=1e-5, atol=1e-7)
            scale, clipped = mine.clip_state.scale, mine.clip_state.clipped_norm
            if size < 1e-3 or max_norm == INF:
                assert (scale == 1).all()
            else:
                assert (scale < 1).any()
            torch.testing.assert_close(clipped, want * scale, rtol=1e-6, atol=1e-8)
            compare(run.params, others, f"step {k}, {scope}", atol=5e-6)
        run.close()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scope, value", [("global", NAN), ("global", INF), ("tensor", NAN), ("block", NAN)]
)
@pytest.mark.parametrize("what", ["parameters", "arena"])
@pytest.mark.parametrize("make", MAKES)
def test_a_step_with_a_bad_gradient_is_skipped_counted_and_named(
    make, what, scope, value, dtype, device
):
    """Weights, moments, counts and copies stay; the next step is as if none was skipped."""
    if what == "parameters" and scope == "block":
        return
    max_norm = None if scope == "block" else 1.0
    kwargs = {"lr": 0.01, "on_nonfinite": "skip", "scope": scope, "max_norm": max_norm}
    mine, other = (Training(make, what, device, dtype, **kwargs) for _ in range(2))
    opt = mine.opt
    assert opt.last_skip() is None
    for k in range(2):
        mine.step(k), other.step(k)
    for n in (1, 2):
        mine.backward(77, bad=value)
        before = snapshot(opt, *mine.watched)
        opt.step()
        unchanged(before, opt, *mine.watched)
        assert opt.skipped == n and opt.skipped.dtype == torch.int32
        assert opt.last_skip() == {"step": 2 + n, "tensor": mine.bad_name}
        assert not opt.clip_state.finite.all() and opt.clip_state.name() == mine.bad_name
    for k in range(2, 4):
        mine.step(k), other.step(k)
    for a, b in zip(snapshot(opt), snapshot(other.opt), strict=True):
        assert torch.equal(a, b), "a skipped step left something behind"
    assert opt.skipped == 2 and opt.last_skip()["step"] == 4 and other.opt.skipped == 0
    mine.close(), other.close()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["parameters", "arena"])
def test_raise_names_the_tensor_and_changes_nothing(what, device):
    run = Training(AdamW, what, device, lr=0.01, on_nonfinite="raise")
    mine = run.opt
    run.step(0)
    run.backward(77, bad=NAN)
    watched = [*run.watched, *run.gradients()]
    before = snapshot(mine, *watched)
    message = rf"the gradient of {re.escape(run.bad_name)} is not finite: nothing was changed"
    with pytest.raises(NonFiniteError, match=message):
        mine.step()
    unchanged(before, mine, *watched)
    mine.zero_grad()
    run.step(1)
    assert float(states(mine, "step")[0]) == 2
    run.close()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_propagate_is_what_torch_does(max_norm, device):
    kwargs = {"lr": 0.01, "max_norm": max_norm, "on_nonfinite": "propagate"}
    run = Training(AdamW, "parameters", device, **kwargs)
    mine, ours = run.opt, run.params
    reference = twin(ours)
    theirs = Torchs(reference, lr=0.01)
    for value in (NAN, INF):
        run.backward(77, bad=value)
        for p, q in zip(ours, reference):
            q.grad = p.grad.clone()
        if max_norm:
            nn.utils.clip_grad_norm_(reference, max_norm)
        mine.step(), theirs.step()
        compare(ours, reference, f"{value}", equal_nan=True)
    assert mine.skipped == 0 and mine.last_skip() is None and any(p.isnan().any() for p in ours)


@pytest.mark.parametrize("arena_first", [True, False])
def test_an_optimizer_that_leaves_out_the_masters_warns_once(arena_first, caplog):
    model = nn.Linear(3, 3).bfloat16()
    mine = AdamW(model.parameters())
    arena = Arena(model)
    if arena_first:
        mine = AdamW(arena)
    for _ in range(2):
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        mine.step()
        mine.zero_grad()
    said = [r.message for r in caplog.records if "fp32 masters" in r.message]
    assert len(said) == (0 if arena_first else 1), said


# ---- loss scales and divisors --------------------------------------------------------------------


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_as_with_torchs_fused(unscale, max_norm, device):
    """Scale, overflow, back off, grow: weights, scales and skipped steps are torch's.

    With max_norm torch needs unscale_ to clip."""
    ours = params_of(device)
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01, max_norm=max_norm), Torchs(reference, lr=0.01, fused=True)
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for k in range(10):
        for scaler, optimizer, params, peer in (
            (scalers[0], mine, ours, False),
            (scalers[1], theirs, reference, True),
        ):
            optimizer.zero_grad()
            random = generator(k)
            loss = sum(
                (p * torch.randn(p.shape, generator=random).to(device)).sum() for p in params
            )
            scaler.scale(loss).backward()
            if k in (4, 5):
                params[4].grad[7] = INF if k == 4 else NAN
            if unscale or peer and max_norm:
                scaler.unscale_(optimizer)
            if peer and max_norm:
                nn.utils.clip_grad_norm_(params, max_norm)
            kept = [p.grad.clone() for p in params]
            scaler.step(optimizer)
            if not peer:
                for p, g in zip(params, kept):
                    same(p.grad, g, "a user's gradient was written")
            scaler.update()
        compare(ours, reference, f"step {k}")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert (
        [float(s) for s in states(mine, "step")]
        == [float(s) for s in states(theirs, "step")]
        == [8.0] * len(ours)
    )
    assert mine.skipped == 2 and mine.last_skip()["step"] == 6
    # Only a norm looks for the tensor.
    assert (mine.last_skip()["tensor"] is None) == (max_norm is None)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("what", ["parameters", "arena"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_divisor_scales_gradients_and_norms(shape, what, device):
    run, other = (Training(AdamW, what, device, lr=0.01, max_norm=3.0) for _ in range(2))
    for k, divisor in enumerate((8.0, 0.25, 1.0, 1000.0)):
        run.backward(k), other.backward(k)
        run.opt.grad_scale = torch.full(shape, divisor, device=device)
        norm = exact_norm(other.gradients()) / divisor
        with torch.no_grad():
            for grad in other.gradients():
                grad.div_(divisor)
        for one in (run.opt, other.opt):
            one.step()
            assert one.clip_state.norm.item() == pytest.approx(norm, rel=1e-5)
            one.zero_grad()
        compare(run.params, other.params, f"divisor {divisor}")
    run.close(), other.close()


# ---- stochastic rounding -------------------------------------------------------------------------

PHILOX = """
extern "C" __global__ void philox(
    unsigned* out, const long long* key, const long long* counters, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long long* c = counters + 4 * i;
    uint4 counter = make_uint4((unsigned)c[0], (unsigned)c[1], (unsigned)c[2], (unsigned)c[3]);
    uint4 r = random_bits((unsigned long long)key[i], counter);
    out[4 * i] = r.x; out[4 * i + 1] = r.y; out[4 * i + 2] = r.z; out[4 * i + 3] = r.w;
}
"""


def philox(keys, counters, device):
    out = torch.zeros(4 * len(keys), dtype=torch.int32, device=device)
    key = torch.tensor(keys, device=device)
    counter = torch.tensor(counters, device=device).flatten()
    kernel = ga.compile(PHILOX.replace("unsigned* out", "int* out").replace("= r.", "= (int)r."))
    kernel[-(-len(keys) // 64), 64](out, key, counter, len(keys))
    return (out.long() & 0xFFFFFFFF).view(-1, 4).cpu()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_philox_gives_the_answers_of_its_authors(device):
    """The known-answer vectors of philox4x32-10 in Random123; kernel and reference agree."""
    ones = 0xFFFFFFFF
    got = philox(
        [0, -1, 0x299F31D0A4093822],
        [[0] * 4, [ones] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]],
        device,
    )
    assert [[f"{x:08x}" for x in row] for row in got.tolist()] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]
    for seed, tensor, step in (
        (0, 0, 0),
        (2**53 - 1, 5, 1),
        (2**32, 2**31 - 1, 2**24),
        (12345, 1, 10**6),
    ):
        want = philox([seed] * 5, [[i, 0, tensor, step] for i in range(5)], device)
        assert torch.equal(reference_random_bits(seed, tensor, 20, step), want.flatten())
        assert torch.equal(reference_random_bits(seed, tensor, 17, step), want.flatten()[:17])


def test_reference_round_by_hand():
    one, above = torch.tensor(1.0), torch.tensor(1.0 + 2**-7)
    x = one + 2**-9  # a quarter of the way to the next bf16
    up = [
        reference_round(x, torch.tensor(n)).item()
        for n in (0, 0xBFFF, 0xC000, 0xFFFF, 0xABC0000, 0xABCFFFF)
    ]
    assert up == [1, 1, above, above, 1, above]
    for value in (INF, -INF, 0.0, -0.0, 1.0, -3.5):
        for n in (0, 0xFFFF):
            got = reference_round(torch.tensor(value), torch.tensor(n))
            same(got, torch.tensor(value).bfloat16(), f"{value} is a bf16 already")
    assert reference_round(torch.tensor([NAN, -NAN]), torch.tensor([0xFFFF, 0])).isnan().all()
    largest = torch.tensor(torch.finfo(torch.float32).max)
    assert reference_round(largest, torch.tensor(0xFFFF)) == INF
    assert reference_round(largest, torch.tensor(0)) == torch.finfo(torch.bfloat16).max
    x = torch.randn(10_000, generator=generator(0))
    for n in (0, 0x8000, 0xFFFF):
        got = reference_round(x, torch.full_like(x, n, dtype=torch.long)).float()
        assert ((got - x).abs() <= x.abs() * 2**-7).all()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("make", MAKES)
def test_bf16_copies_are_rounded_by_the_reference_bits(make, device):
    """Master, seed, number of the tensor, element and step give the bits of the copy."""
    model = Blocks(dtype=torch.bfloat16).to(device)
    arena, seed = Arena(model), 2**53 - 7
    mine = make(arena, lr=0.1, stochastic_rounding=True, seed=seed)
    for k in range(1, 4):
        grads = filled(model, k)
        grads[5 if k == 2 else 6] = None  # who else takes part does not matter
        mine.zero_grad()
        model(grads).backward()
        mine.step()
        for i, s in enumerate(arena.segments):
            if grads[6 - i] is None or not s.numel:
                continue
            master = arena.masters[i].detach().cpu()
            step = int(mine.state[arena.masters[i]]["step"])
            want = reference_round(master, reference_random_bits(seed, i, s.numel, step))
            same(arena.module_parameters[i].detach().cpu(), want, f"step {k}, {s.name}")
            if s.numel > 100:
                assert not torch.equal(want, master.bfloat16()), (
                    "some were rounded to the other side"
                )
    arena.release()


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_bf16_weights_are_rounded_by_the_reference_bits(device):
    """No master keeps the unrounded weight: the definition in float64 stands in for it.

    Elements whose rounding it leaves in doubt are left out."""
    ours = params_of(device, dtype=torch.bfloat16)
    mine = AdamW(ours, lr=0.1, stochastic_rounding=True, seed=5)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    for k in range(1, 4):
        give(k, ours)
        start = []
        for p in ours:
            moments = [mine.state[p].get(key, p * 0) for key in ("exp_avg", "exp_avg_sq")]
            start.append([t.detach().double().cpu() for t in (p, p.grad, *moments)])
        mine.step()
        for i, (p, state) in enumerate(zip(ours, start)):
            slack = 4e-7 * (state[0].abs() + 0.1)
            exact = reference_adamw(*state, None, k, **numbers)
            noise = reference_random_bits(5, i, p.numel(), k)
            near = [reference_round((exact + e * slack).float(), noise) for e in (0, -1, 1)]
            sure = (near[0] == near[1]) & (near[0] == near[2])
            assert p.numel() < 100 or sure.float().mean() > 0.99
            got = p.detach().cpu()
            assert torch.equal(got[sure], near[0][sure]), (
                f"step {k}, tensor {i}: {differ(got[sure], near[0][sure])}"
            )


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_nan_and_infinity_survive_rounding(device):
    w = nn.Parameter(torch.tensor([NAN, INF, -INF, 1.0], device=device).bfloat16())
    w.grad = torch.zeros_like(w)
    AdamW([w], stochastic_rounding=True, weight_decay=0.0).step()
    same(w.detach(), torch.tensor([NAN, INF, -INF, 1.0], device=device).bfloat16())


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stochastic_rounding_concerns_bf16_alone(dtype, device):
    def run(**how):
        ours = params_of(device, dtype=dtype)
        mine = AdamW(ours, lr=0.1, **how)
        give(0, ours)
        mine.step()
        return ours[4].detach()

    same(run(stochastic_rounding=True), run())


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"scope": "layer"}, "scope is 'layer'"),
        ({"scope": "block"}, "scope='block' needs an arena"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**53}, "seed is 9007199254740992"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ArgumentError, match=message):
        AdamW(params_of(), **kwargs)


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_bad_tensors(device):
    sparse = nn.Embedding(5, 3, sparse=True).to(device)
    good = nn.Parameter(torch.ones(3, device=device))
    mine = AdamW([good, sparse.weight])
    sparse(torch.tensor([1], device=device)).sum().backward()
    good.grad = torch.ones_like(good)
    before = snapshot(mine, good.grad)
    with pytest.raises(
        ArgumentError,
        match=r"the gradient of parameter 1 of shape \(5, 3\) has layout torch.sparse_coo",
    ):
        mine.step()
    unchanged(before, mine, good.grad)
    assert not mine.state
    with pytest.raises(
        ArgumentError,
        match="parameter 1 of shape .* is torch.complex64: complex weights are not supported",
    ):
        AdamW([good, nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [good]}, {"params": [good]}])
    mine.max_norm = -1.0
    sparse.weight.grad = None
    with pytest.raises(ArgumentError, match="max_norm is -1.0"):
        mine.step()
    unchanged(before, mine, good.grad)
    with pytest.raises(ArgumentError, match="complex"):
        mine.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))]}
        )
    assert len(mine.param_groups) == 1


@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_an_arena_that_does_not_fit(device):
    model = Blocks().to(device)
    arena = Arena(model)
    mine = AdamW(arena)
    model(filled(model)).backward()
    mine.step()
    with pytest.raises(ArgumentError, match="is not in the optimizer's arena"):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(2, device=device))]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        mine.add_param_group({"params": [arena.parameters()[0]]})
    assert len(mine.param_groups) == 2
    model.double()
    before = snapshot(mine, arena.weights)
    with pytest.raises(ArgumentError, match="is no longer a view of the arena"):
        mine.step()
    unchanged(before, mine, arena.weights)
    with pytest.raises(ArgumentError, match="is no longer a view of the arena"):
        AdamW(arena)
    arena.release()


@pytest.mark.gpu
def test_gpu_several_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    ours = [nn.Parameter(torch.ones(5000, device=f"cuda:{i}")) for i in (0, 1)]
    reference = twin(ours)
    mine, theirs = AdamW(ours, lr=0.01), Torchs(reference, lr=0.01)
    for k in range(3):
        give(k, ours, reference)
        mine.step(), theirs.step()
        for p, q in zip(ours, reference):
            torch.testing.assert_close(p, q, **CLOSE)
    for kwargs in ({"max_norm": 1.0}, {"on_nonfinite": "skip"}):
        other = AdamW(ours, **kwargs)
        before = [p.detach().clone() for p in ours]
        with pytest.raises(
            ArgumentError, match="parameters lie on cuda:0, cuda:1: .* need one device"
        ):
            other.step()
        assert all(torch.equal(p, b) for p, b in zip(ours, before))
    alone = nn.Parameter(torch.ones(3, device="cuda:1"))
    alone.grad = torch.ones_like(alone)
    one = AdamW([alone], max_norm=1.0)
    one.step()
    assert one.clip_state.norm.device.index == 1 and alone.lt(1).all()


# ---- nothing waits, everything replays -----------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["skip", "propagate"])
@pytest.mark.parametrize("what", ["arena", "bf16 arena", "parameters"])
def test_gpu_nothing_waits_also_when_the_rate_changes(what, policy):
    dtype = torch.bfloat16 if "bf16" in what else torch.float32
    model = Blocks(dtype=dtype).cuda()
    arena = Arena(model) if "arena" in what else None
    mine = AdamW(
        arena or model.parameters(),
        lr=0.01,
        max_norm=1.0,
        on_nonfinite=policy,
        stochastic_rounding=True,
    )
    scheduler = lr_scheduler.OneCycleLR(mine, 0.1, total_steps=20)
    grads = [filled(model, k) for k in range(3)]
    grads[1][2][0, 0] = NAN if policy == "skip" else 1.0
    for k in range(6):
        with no_waiting() if k > 0 else contextlib.nullcontext():
            model(grads[k % 3]).backward()
            mine.step()
            mine.zero_grad()
            scheduler.step()
            mine.clip_state.norm, mine.skipped
    assert mine.skipped == (2 if policy == "skip" else 0)
    if arena:
        arena.release()
    rate = torch.tensor(
        0.01, device="cuda"
    )  # a rate on the device does not come to the host either
    other = AdamW(params_of("cuda"), lr=rate, capturable=True, max_norm=1.0)
    for k in range(3):
        give(k, other.param_groups[0]["params"])
        with no_waiting() if k > 0 else contextlib.nullcontext():
            other.step()


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize(
    "what",
    [
        "fp64",
        "a gradient with gaps",
        "a gradient in another order",
        "fp16 beside bf16",
        "some without a gradient",
    ],
)
def test_gpu_what_torch_computes_does_not_wait_either(what, scope):
    ours = params_of("cuda", ((40, 50), (5000,), (7,)))
    if what == "fp64":
        ours[1] = nn.Parameter(ours[1].detach().double())
    elif what == "fp16 beside bf16":
        ours = [
            nn.Parameter(p.detach().to(dtype))
            for p, dtype in zip(ours, (torch.float16, torch.bfloat16, torch.float32))
        ]
    for p in ours:
        p.grad = torch.randn_like(p)
    if what == "a gradient with gaps":
        ours[0].grad = torch.randn(40, 60, device="cuda")[:, :50]
    elif what == "a gradient in another order":
        ours[0].grad = torch.randn(50, 40, device="cuda").t()
    elif what == "some without a gradient":
        ours[2].grad = None
    for policy in ("skip", "propagate"):
        mine = AdamW(ours, max_norm=1.0, on_nonfinite=policy, scope=scope)
        mine.step()
        with no_waiting():
            mine.step()
        assert mine.skipped == 0


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_gpu_eager_steps_between_capture_and_replay(scope):
    """What a capture has allocated holds nothing until the replay: eager steps must not use it."""
    how = {"lr": 0.01, "max_norm": 0.5, "scope": scope}
    ours, others = params_of("cuda"), params_of("cuda")
    for p in (*ours, *others):
        p.grad = torch.ones_like(p)
    mine, eager = AdamW(ours, **how), AdamW(others, **how)
    AdamW(params_of("cuda"), **how).step()
    warm = twin(ours)
    for p in warm:
        p.grad = torch.ones_like(p)
    AdamW(warm, **how).step()  # compiles and loads
    mine.prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    for turn in ("eager", "replay", "eager", "replay"):
        mine.step() if turn == "eager" else graph.replay()
        eager.step()
        torch.cuda.synchronize()
        for p, q in zip(ours, others):
            same(p.detach(), q.detach(), turn)


def graph_setup(what, seed=0, **kwargs):
    """(optimizer, tensors that take the gradients, weights to compare)."""
    if what == "parameters":
        ours = params_of("cuda", seed=seed)
        for p in ours:
            p.grad = torch.zeros_like(p)
        return AdamW(ours, **kwargs), [p.grad for p in ours], ours
    model = Blocks(dtype=torch.bfloat16 if "bf16" in what else torch.float32).cuda()
    arena = Arena(model)
    arena.gradients.set([True] * len(arena.module_parameters))
    return (
        AdamW(arena, **kwargs),
        arena.gradients.views,
        [arena.weights, *([arena.bf16_weights] if "bf16" in what else [])],
    )


def refill(targets, k, bad=False):
    random = generator(500 + k)
    for t in targets:
        t.copy_(torch.randn(t.shape, generator=random).cuda())
    if bad:
        targets[4].view(-1)[0] = NAN


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("what", ["parameters", "arena", "bf16 arena"])
def test_gpu_a_captured_step_replays_as_eager(what, prepared):
    """Other gradients, rates, max_norm, one bad step: every weight is bit-identical to eager's."""
    how = {
        "lr": 0.01,
        "max_norm": 1.0,
        "on_nonfinite": "skip",
        "stochastic_rounding": True,
        "amsgrad": True,
    }
    (mine, targets, weights) = graph_setup(what, **how)
    (eager, targets2, weights2) = graph_setup(what, **how)

    if prepared:
        mine.prepare()
        warm, t, _ = graph_setup(
            what, **how
        )  # the kernels are compiled and loaded by another optimizer's step
        refill(t, 99)
        warm.step()
    else:
        for optimizer, t in ((mine, targets), (eager, targets2)):
            refill(t, 0)
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    before = [bits(w) for w in weights]
    assert all(torch.equal(bits(w), b) for w, b in zip(weights, before)), (
        "a capture computes nothing"
    )
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in (mine, eager)]
    for k in range(1, 7):
        for optimizer, t in ((mine, targets), (eager, targets2)):
            refill(t, k, bad=k == 3)
            optimizer.max_norm = 0.1 if k == 4 else 1.0
        mine.refresh()
        graph.replay()
        eager.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scheduler in schedulers:
                scheduler.step()
        torch.cuda.synchronize()
        for a, b in zip(weights, weights2):
            same(a.detach(), b.detach(), f"{what}, replay {k}")
        assert mine.clip_state.norm.item() == eager.clip_state.norm.item() or k == 3
    taken = 5 + (0 if prepared else 1)
    assert all(float(s) == taken for s in states(mine, "step")) and mine.skipped == 1
    assert (
        mine.last_skip()
        == {"step": taken - 2, "tensor": eager.last_skip()["tensor"]}
        == eager.last_skip()
    )


@pytest.mark.gpu
def test_gpu_a_capture_before_the_first_step_is_refused():
    ours = params_of("cuda")
    mine = AdamW(ours, max_norm=1.0)
    give(0, ours)
    before = [p.detach().clone() for p in ours]
    torch.zeros(1, device="cuda")
    with pytest.raises(
        ArgumentError,
        match="a CUDA graph is being captured: take one step before the capture, or call prepare()",
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mine.step()
    torch.cuda.synchronize()
    assert all(torch.equal(p, b) for p, b in zip(ours, before)) and not any(
        "exp_avg" in s for s in mine.state.values()
    )
    mine.step()
    mine.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        ArgumentError, match="a hyperparameter has changed since the last step.*call refresh"
    ):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mine.step()
    torch.cuda.synchronize()
    mine.refresh()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine.step()
    graph.replay()
    torch.cuda.synchronize()
    assert float(mine.state[ours[0]]["step"]) == 2


# ---- what a user may do between two steps --------------------------------------------------------

NO_COMPILER = pytest.mark.skipif(find_compiler()[0] is None, reason="needs a C++ compiler")
SIMT = pytest.param("simt", marks=NO_COMPILER)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["torch", SIMT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_is_not_that_of_counts_and_arenas(backend, dtype):
    """A bf16 count would stop at 256."""
    ours = params_of(dtype=torch.float32)
    reference = twin(ours)
    model = nn.Linear(4, 4, dtype=torch.float32)
    with ga.use_backend(backend), default_dtype(dtype):
        arena = Arena(model)
        assert arena.weights.dtype == arena.grads.dtype == model.weight.dtype == torch.float32
        mine, theirs = AdamW(ours, lr=0.1), Torchs(reference, lr=0.1)
        for k in range(4):
            give(k, ours, reference)
            for params in (ours, reference):
                ga.clip_grad_norm_(params, 1.0)
            mine.step(), theirs.step()
        compare(ours, reference)
        for p in ours:
            step = mine.state[p]["step"]
            assert step.dtype == torch.float32 and step == 4


def test_a_tensor_that_was_added_after_a_load_is_named():
    p, q = (nn.Parameter(torch.ones(3)) for _ in "pq")
    optimizer = ga.AdamW([p], on_nonfinite="raise")
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.add_param_group({"params": [q]})
    q.grad = torch.full((3,), math.nan)
    with pytest.raises(ga.errors.NonFiniteError, match="the gradient of parameter 1 of shape"):
        optimizer.step()


def test_weights_with_gaps_are_rounded_stochastically():
    p = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16)[:, ::2])
    optimizer = ga.AdamW([p], lr=1e-3, stochastic_rounding=True)
    for _ in range(3):
        p.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        optimizer.step()
    assert optimizer.state[p]["step"] == 3 and (p < 1).any()


def test_finite_gradients_in_fp16_are_no_reason_to_skip():
    p = nn.Parameter(torch.ones(400, dtype=torch.float16))
    with ga.use_backend("torch"):
        optimizer = ga.AdamW([p], max_norm=1.0, on_nonfinite="skip")
        p.grad = torch.full((400,), 6e4, dtype=torch.float16)
        optimizer.step()
        assert optimizer.skipped == 0 and float(optimizer.clip_state.norm) == pytest.approx(1.2e6)


@pytest.mark.parametrize("backend", ["torch", SIMT])
def test_a_weight_of_another_shape_does_not_get_the_moments_of_the_old_one(backend):
    p = nn.Parameter(torch.zeros(2, 5))
    with ga.use_backend(backend):
        optimizer = ga.AdamW([p], lr=0.1)
        p.grad = torch.arange(10.0).view(2, 5)
        optimizer.step()
        p.data, p.grad = p.data.t().contiguous(), None
        p.grad = torch.ones(5, 2)
        before = p.detach().clone()
        with pytest.raises(ga.errors.ArgumentError, match="exp_avg"):
            optimizer.step()
        assert torch.equal(before, p)
