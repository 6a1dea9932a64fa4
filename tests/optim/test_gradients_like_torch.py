"""What users do to gradients between backward() and step(), and after it: every mode as torch."""

import copy
import io
import pickle

import pytest
import torch
from helpers import differ
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.graphs.snapshot import preserved
from gpuaccel.optim.accumulate import MODES, GradientAccumulator
from gpuaccel.optim.arena import Arena

DTYPES = [torch.float32, torch.bfloat16]
OPTIMIZERS = ["SGD", "torch.AdamW", "ga.AdamW"]


class Net(nn.Module):
    """A layer that mode "fused" fuses, and a parameter that it does not."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            for p in self.parameters():
                # Exact in bf16.
                p.copy_(torch.randint(-8, 9, p.shape, generator=generator) / 8)

    def forward(self, x, weight):
        return (self.linear(x) * weight + self.scale * weight.sum()).sum()


def optimizer_of(name, parameters, arena=None):
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)
    if name == "ga.AdamW" and arena is not None:
        return ga.AdamW(arena, lr=0.25, weight_decay=0.1, on_nonfinite="propagate")
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.25)


class Run:
    """A module, its optimizer, and `params`, the tensors whose gradients are edited.

    through: whose these are, "arena" (what the optimizer updates) or "model"."""

    def __init__(self, optimizer, mode=None, dtype=torch.float32, through="arena"):
        self.model = Net().to(dtype)
        self.arena = None
        self.params = updated = list(self.model.parameters())
        if mode is not None:
            self.arena = Arena(self.model)
            updated = self.arena.parameters()
            self.accumulator = GradientAccumulator(self.arena, mode)
        if through == "arena":
            self.params = updated
        self.opt = optimizer_of(optimizer, updated, self.arena)
        # Only the optimizer's own zero_grad() knows of the sums that ga.AdamW has cleared.
        self.zero_grad = self.opt.zero_grad
        if through == "model" and optimizer != "ga.AdamW":
            self.zero_grad = self.model.zero_grad
        self.norm = None

    def act(self, action, k):
        """Action number k of a sequence. The same k has the same numbers in every run."""
        params = self.params
        if action == "backward":
            generator = torch.Generator().manual_seed(k)
            x = torch.randint(-2, 3, (2, 4), generator=generator).float()
            weight = torch.randint(-2, 3, (3,), generator=generator).float()
            dtype = self.model.scale.dtype
            self.model(x.to(dtype), weight.to(dtype)).backward()
        elif action == "clip":
            self.norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        elif action == "halve":
            for p in params:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        elif action == "replace":
            params[0].grad = torch.full_like(params[0], 3.0)
        elif action == "remove":
            params[1].grad = None
        elif action == "zero_grad":
            self.zero_grad()
        elif action == "model.zero_grad":
            self.model.zero_grad()
        elif action == "zero_grad in place":
            self.zero_grad(set_to_none=False)
        elif action == "step":
            self.opt.step()

    def close(self):
        if self.arena is not None:
            self.arena.release()


def compare(run, reference, what, bound, gradients=True):
    if reference.norm is not None:
        torch.testing.assert_close(run.norm.float(), reference.norm, rtol=bound, atol=bound)
    for i, (p, q) in enumerate(zip(run.params, reference.params, strict=True)):
        if gradients:
            assert (p.grad is None) == (q.grad is None), f"{what}: .grad {i} is {p.grad}"
            if q.grad is not None:
                grad = p.grad.float()
                assert torch.allclose(grad, q.grad, rtol=bound, atol=bound), (
                    f"{what}: .grad {i}: {differ(grad, q.grad)}"
                )
        weight = p.float()
        assert torch.allclose(weight, q, rtol=bound, atol=bound), (
            f"{what}: weight {i}: {differ(weight, q)}"
        )


def follow(actions, optimizer, mode, dtype, through="arena"):
    """Do the same with an arena and with plain parameters; compare after every action."""
    # A sum in bf16 is rounded after an edit; all others are exact up to the order of operations.
    bound = 0.05 if dtype == torch.bfloat16 else 1e-5
    run = Run(optimizer, mode, dtype, through)
    reference = Run("torch.AdamW" if optimizer == "ga.AdamW" else optimizer)
    try:
        for k, action in enumerate(actions):
            run.act(action, k)
            reference.act(action, k)
            cleared = optimizer == "ga.AdamW" and "step" in actions[: k + 1]
            compare(run, reference, f"{actions[: k + 1]}", bound, not cleared)
    finally:
        run.close()


BETWEEN = [
    ["backward", "zero_grad", "backward", "step"],
    ["backward", "zero_grad in place", "backward", "step"],
    ["backward", "zero_grad in place", "step"],
    ["backward", "zero_grad", "step"],
    ["backward", "backward", "zero_grad", "backward", "step"],
    ["backward", "backward", "zero_grad in place", "backward", "step"],
    ["backward", "backward", "zero_grad", "step"],
    ["backward", "clip", "step"],
    ["backward", "backward", "clip", "step"],
    ["backward", "clip", "backward", "clip", "step"],
    ["backward", "halve", "step"],
    ["backward", "halve", "backward", "step"],
    ["backward", "replace", "step"],
    ["backward", "replace", "backward", "step"],
    ["backward", "remove", "step"],
    ["backward", "remove", "backward", "step"],
    ["backward", "remove", "backward", "remove", "step"],
]
AFTER = [
    ["backward", "step", "zero_grad", "step"],
    ["backward", "step", "zero_grad in place", "step"],
    ["backward", "step", "zero_grad in place", "step", "zero_grad in place", "step"],
    ["backward", "step", "zero_grad in place", "backward", "step"],
    ["backward", "remove", "step", "zero_grad in place", "step"],
    ["backward", "step", "zero_grad in place", "zero_grad", "step"],
    ["backward", "zero_grad in place", "step", "zero_grad in place", "step"],
]


@pytest.mark.parametrize("actions", BETWEEN + AFTER, ids=", ".join)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_done_to_gradients_counts_as_in_torch(mode, dtype, optimizer, actions):
    follow(actions, optimizer, mode, dtype)


BY_THE_MODULE = [
    ["backward", "model.zero_grad", "backward", "step"],
    ["backward", "model.zero_grad", "step"],
    ["backward", "backward", "model.zero_grad", "clip", "backward", "clip", "step"],
    ["backward", "clip", "model.zero_grad", "backward", "backward", "step"],
]


@pytest.mark.parametrize("actions", BETWEEN + BY_THE_MODULE + AFTER, ids=", ".join)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_done_to_gradients_of_bf16_parameters_counts(mode, optimizer, actions):
    follow(actions, optimizer, mode, torch.bfloat16, through="model")


@pytest.mark.parametrize("mode", MODES)
def test_the_fp32_sum_is_the_gradient_of_a_bf16_parameter_and_of_its_master(mode):
    run = Run("SGD", mode, torch.bfloat16)
    for _ in range(2):
        run.act("backward", 0)
        for p, master, view in zip(run.arena.params, run.arena.masters, run.arena.grad_views):
            assert p.grad is view and master.grad is view
            assert p.dtype == torch.bfloat16
            assert p.grad.dtype == torch.float32
    run.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_fresh_gradient_of_a_bf16_parameter_stays_bf16(mode):
    """Also one that an operation with an fp32 tensor makes, as in torch."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    reference = weight.detach().clone().requires_grad_()
    x = torch.tensor([1.0009765625, 3.0, 1 / 3])
    arena = Arena(model)
    with GradientAccumulator(arena, mode):
        for p in (weight, reference):
            (p * x).sum().backward()
            (p * x.double()).sum().backward()
        torch.testing.assert_close(weight.grad, reference.grad.float(), rtol=2**-8, atol=0)
        exact = 2 * x.bfloat16().float()
        torch.testing.assert_close(
            weight.grad, exact, rtol=2**-8 if mode == "autograd" else 0, atol=0
        )


@pytest.mark.parametrize("mode", MODES)
def test_after_close_a_bf16_model_is_ordinary(mode):
    run, reference = Run("SGD", mode, torch.bfloat16), Run("SGD", dtype=torch.bfloat16)
    run.act("backward", 0)
    run.close()
    assert all(p.grad is None for p in run.model.parameters())
    for dtype in (torch.bfloat16, torch.float32):
        for one in (run, reference):
            one.model.to(dtype)
            one.model.zero_grad()
            one.act("backward", 1)
        for p, q in zip(run.model.parameters(), reference.model.parameters()):
            assert p.grad.dtype == dtype
            assert torch.equal(p.grad, q.grad)
    arena = Arena(run.model)
    with GradientAccumulator(arena, mode):
        run.act("backward", 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_bf16_model_with_exposed_sums_is_copied_and_pickled(mode):
    run = Run("SGD", mode, torch.bfloat16, "model")
    run.act("backward", 0)
    saved = io.BytesIO()
    torch.save(run.model.state_dict(), saved)
    saved.seek(0)
    loaded = Net().to(torch.bfloat16)
    loaded.load_state_dict(torch.load(saved))
    copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model)), loaded]
    for model in copies:
        for p, q in zip(model.parameters(), run.params):
            assert torch.equal(p, q)
            assert p.grad is None
        model(torch.ones(2, 4).bfloat16(), torch.ones(3).bfloat16()).backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert all(p.grad is not None for p in run.params)
    run.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_second_accumulator_continues_the_sums_of_bf16_parameters(mode):
    run, reference = Run("SGD", mode, torch.bfloat16, "model"), Run("SGD")
    run.act("backward", 0), reference.act("backward", 0)
    run.accumulator.close()
    run.accumulator = GradientAccumulator(run.arena, mode)
    compare(run, reference, "continued", 1e-5)
    for k, action in enumerate(["backward", "clip", "step"], 1):
        run.act(action, k), reference.act(action, k)
    compare(run, reference, "continued", 0.05)
    run.close()


def allowed(actions, optimizer):
    """Without what ga.AdamW refuses, or documents to be cleared: steps that use sums again."""
    if optimizer != "ga.AdamW":
        return actions
    result, cleared = [], False
    for action in actions:
        if cleared and "zero_grad" not in action:
            result.append("zero_grad")
        result.append(action)
        cleared = action == "step"
    return result


ACTIONS = ["backward", "backward", "clip", "halve", "replace", "remove", "zero_grad"]
ACTIONS += ["zero_grad in place", "step", "step"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=8))
def test_any_sequence_of_actions_ends_where_torch_ends(mode, dtype, optimizer, actions):
    follow(allowed(["backward", *actions], optimizer), optimizer, mode, dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=8))
def test_any_sequence_through_bf16_parameters_ends_where_torch_ends(mode, optimizer, actions):
    actions = allowed(["backward", *actions], optimizer)
    follow(actions, optimizer, mode, torch.bfloat16, through="model")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", [[], ["clip"], ["model.zero_grad"]])
def test_a_second_step_without_a_backward_is_refused_before_anything_changes(mode, between):
    run = Run("ga.AdamW", mode)
    for k, action in enumerate(["backward", "step", *between]):
        run.act(action, k)
    weights = run.arena.weights.clone()
    with pytest.raises(ArgumentError, match="no gradient: the step before it has used and cleared"):
        run.opt.step()
    assert torch.equal(run.arena.weights, weights)
    run.opt.zero_grad()
    run.opt.step()
    assert torch.equal(run.arena.weights, weights)
    run.close()


# ---- a backward that raises ----------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("on purpose")


def backward_that_raises(run):
    """The gradients of `scale` and of linear.bias are there when it raises, that of the weight
    not."""
    model = run.model
    x = torch.ones(2, 4, dtype=model.scale.dtype)
    h = nn.functional.linear(x, Raises.apply(model.linear.weight), model.linear.bias)
    with pytest.raises(ZeroDivisionError):
        (h + model.scale).sum().backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_raises_drops_the_windows_sum_at_once(mode, dtype, before, optimizer):
    run, reference = Run(optimizer, mode, dtype), Run("torch.AdamW")
    if optimizer == "SGD":
        reference.opt = optimizer_of("SGD", reference.params)
    for k in range(before):
        run.act("backward", k)
    backward_that_raises(run)
    if (mode, dtype) == ("autograd", torch.float32):
        # As torch keeps it.
        for k in range(before):
            reference.act("backward", k)
        backward_that_raises(reference)
        assert reference.model.scale.grad is not None
        compare(run, reference, "raised", 1e-5)
        run.opt.zero_grad(), reference.opt.zero_grad()
    else:
        assert all(p.grad is None for p in [*run.params, *run.model.parameters()])
        run.act("clip", 0)
        assert run.norm == 0
    run.opt.step(), reference.opt.step()
    for k, action in enumerate(["backward", "backward", "step"]):
        run.act(action, k), reference.act(action, k)
    compare(run, reference, "after it", 0.05 if dtype == torch.bfloat16 else 1e-5, gradients=False)
    run.close()


@pytest.mark.parametrize("mode", ["host", "arena", "fused"])
def test_gradients_set_after_a_backward_that_raised_are_kept(mode):
    run = Run("SGD", mode)
    backward_that_raises(run)
    run.act("replace", 0)
    weight = run.params[0].detach().clone()
    run.act("step", 1)
    assert torch.equal(run.params[0], weight - 0.25 * 3.0)
    run.close()


@pytest.mark.parametrize("mode", MODES)
def test_exposed_after_finish_leaves_the_same_sums(mode):
    run, reference = Run("SGD"), Run("SGD")
    arena = Arena(run.model)
    with pytest.raises(ArgumentError, match="'never'; expected.*backward.*finish"):
        GradientAccumulator(arena, mode, exposed_after="never")
    with GradientAccumulator(arena, mode, exposed_after="finish") as accumulator:
        for action in ["backward", "zero_grad", "backward", "backward"]:
            run.act(action, 0), reference.act(action, 0)
        if mode == "host":
            # No gradient was exposed, so that zero_grad() had none to drop.
            reference.act("backward", 0)
            assert all(p.grad is None for p in run.params) and not arena.grads.any()
        accumulator.finish()
        compare(run, reference, mode, 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_exposed_after_finish_costs_bf16_parameters_nothing(mode):
    run = Run("SGD", dtype=torch.bfloat16)
    arena = Arena(run.model)
    with GradientAccumulator(arena, mode, exposed_after="finish") as accumulator:
        run.act("backward", 0)
        accumulator.finish()
        for p, master, view in zip(arena.params, arena.masters, arena.grad_views):
            assert p.grad is None and not p._backward_hooks
            assert p.grad_dtype == torch.bfloat16
            assert master.grad is view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["arena", "fused"])
def test_a_warm_up_that_raises_leaves_the_windows_sum(mode, dtype):
    run, reference = Run("SGD", mode, dtype), Run("SGD")
    run.act("backward", 0), reference.act("backward", 0)
    with preserved([run.model], "cpu"):
        backward_that_raises(run)
    for k, action in enumerate(["backward", "step"], 1):
        run.act(action, k), reference.act(action, k)
    compare(run, reference, mode, 1e-5)
    run.close()
