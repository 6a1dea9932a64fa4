"""ga.GraphedStep captures anybody's step: what a graph keeps and reads anew, what is refused."""

import contextlib
import copy
import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import KERNELS, same
from replays import (
    HIDDEN,
    LIMIT,
    LR,
    Net,
    agree,
    batches,
    everything,
    follow_eager,
    healthy,
    loss_fn,
    make,
    momentum,
    pairs,
    plain_step,
    seed,
    small,
    torchs,
    unchanged,
)
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CaptureError
from gpuaccel.graphs import graphed_step
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.loop import warmup_cosine


@pytest.mark.parametrize("whose", ["ga.AdamW", "ga.AdamW over an arena", "torch.optim.AdamW"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_capture_alone_changes_nothing_at_all(device, whose):
    """Not even the generators that fn's Python draws from while it warms up, nor gradients that
    stood there."""
    model = small(device, norm=True, dropout=0.3)
    if whose.startswith("torch"):
        opt = torchs(model, device)
    else:
        over = Arena(model) if "arena" in whose else model.parameters()
        opt = AdamW(over, lr=LR, max_norm=LIMIT)
    fn, (x, y) = plain_step(model, opt), pairs(device, 1)[0]

    calls = itertools.count(1)

    def drawing(x, y):
        if next(calls) % (graphed_step.WARM_UPS + 1):
            random.random(), np.random.rand(), torch.rand(())
        opt.zero_grad()
        return fn(x, y)

    seed()
    F.mse_loss(model(x), y).backward()
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    with (
        unchanged(model, opt, device),
        ga.GraphedStep(drawing, [model, opt], policy="require") as step,
    ):
        for _ in range(2):
            step.capture(x, y)
            assert len(step) == 1
            for p, (grad, values) in zip(model.parameters(), grads):
                assert p.grad is grad
                same(p.grad, values, "a gradient that stood there")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_results_and_inputs_may_stand_in_any_tree(device):
    """Every dtype, empty and one-element tensors, any strides, numbers and None; keywords, dicts,
    lists."""

    def fn(first, *, rest, scale):
        a, (b, c) = first["a"], rest
        return {
            "sum": a + b.t(),
            "parts": (c > 0, [c.sum(), None, 3, "text"]),
            "low": a.bfloat16(),
            "none": a[:0],
            "whole": (c * scale).long(),
            "view": a.t(),
        }

    with ga.GraphedStep(fn, torch.zeros(1, device=device), policy="require") as step:
        kept = []
        for k in range(3):
            a, b, c = (
                torch.randn(3, 5, device=device),
                torch.randn(5, 3, device=device),
                torch.randn(1, device=device).expand(7),
            )
            got, want = (run({"a": a}, rest=[b.clone(), c], scale=2.5) for run in (step, fn))
            kept.append((got, want))
        for got, want in kept:
            assert set(got) == set(want) and got["parts"][1][1:] == [None, 3, "text"]
            for key in ("sum", "low", "none", "whole", "view"):
                same(got[key], want[key], key)
            same(got["parts"][0], want["parts"][0]), same(got["parts"][1][0], want["parts"][1][0])
        assert len(step) == 1
        x = torch.arange(15.0, device=device).view(5, 3)
        same(
            step({"a": x.t()}, rest=[x, torch.ones(7, device=device)], scale=2.5)["sum"],
            x.t() + x.t(),
            "an input with other strides",
        )
    with ga.GraphedStep(lambda: None, torch.zeros(1, device=device), policy="require") as step:
        assert step() is None


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_inputs_are_read_when_the_step_is_called(device):
    """They are copied into the graph's own memory, and stay the caller's."""
    x = torch.ones(4, device=device)
    with ga.GraphedStep(
        lambda x: x.mul_(3), torch.zeros(1, device=device), policy="require"
    ) as step:
        for k in range(3):
            x.fill_(k)
            assert torch.equal(step(x).cpu(), torch.full((4,), 3.0 * k)) and torch.equal(
                x.cpu(), torch.full((4,), float(k))
            )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_least_recently_used_graph_goes_and_is_captured_again(device, counts):
    total = torch.zeros((), device=device)

    def fn(x):
        total.add_(x.sum())
        return x * 2

    with ga.GraphedStep(fn, total, policy="require", max_graphs=2) as step:
        a, b, c = (torch.ones(n, device=device) for n in (1, 2, 3))
        want = 0
        for x, captures in (
            (a, 1),
            (b, 2),
            (a, 2),
            (c, 3),
            (a, 3),
            (b, 4),
            (c, 5),
            (b, 5),
        ):  # c takes b's place, b takes c's, c takes a's
            assert torch.equal(step(x), x * 2)
            want += len(x)
            assert (
                counts.captures == captures
                and len(step) == min(captures, 2)
                and total.item() == want
            )


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_makes_another_kind_of_step_is_captured_anew(device, counts):
    """dtype, a value that is no tensor, grad mode, autocast, and what `modes` says: each has a
    graph of its own, and the right results."""
    mode = "one"

    def fn(x, times=2, **rest):
        y = x @ x
        return y * times if torch.is_grad_enabled() else -y

    x = torch.randn(4, 4, device=device)
    want = x @ x
    with ga.GraphedStep(
        fn, torch.zeros(1, device=device), policy="require", modes=lambda: mode
    ) as step:
        same(step(x), want * 2), same(step(x), want * 2)
        assert counts.captures == 1
        same(step(x.double()), (x.double() @ x.double()) * 2)
        same(step(x, 3), want * 3)
        same(step(x, times=3), want * 3)
        assert counts.captures == 4
        with torch.no_grad():
            same(step(x), -want)
        assert counts.captures == 5
        mode = "two"
        same(step(x), want * 2)
        assert counts.captures == 6
        with torch.autocast(device, torch.bfloat16):
            same(step(x), (x @ x) * 2, "under autocast")
        assert counts.captures == 7
        mode = "one"
        same(step(x), want * 2)
        assert counts.captures == 7
        # 1 == 1.0 == True for Python, but not for torch.
        for times in (1, 1.0, True):
            same(step(x, times), want)
        assert counts.captures == 10


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_place_of_an_argument_that_is_no_tensor_belongs_to_the_key(device):
    ten = torch.full((2,), 10.0, device=device)
    with ga.GraphedStep(
        lambda a, b: b + 1 if a is None else a - 1, torch.zeros(1, device=device), policy="require"
    ) as step:
        results = [step(ten, None), step(None, ten), step(ten, None)]
        assert [r.tolist() for r in results] == [[9.0] * 2, [11.0] * 2, [9.0] * 2]


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_closed_step_says_so_and_closing_twice_is_fine(device):
    fn, x = (lambda x: x + 1), torch.ones(2, device=device)
    step = ga.GraphedStep(fn, torch.zeros(1, device=device), policy="require")
    kept = step(x)
    step.close(), step.close()
    for again in (step, step.capture):
        with pytest.raises(CaptureError, match="the step was closed"):
            again(x)
    with pytest.raises(CaptureError, match="the step was closed"):
        step.reset()
    assert torch.equal(kept, x + 1), "a result outlives the graph"
    assert len(step) == 0 and step.nodes() == []
    whole, (batch,) = make(device, "graph"), batches(device, n=1)
    whole(batch)
    whole.close(), whole.close()
    with pytest.raises(CaptureError, match="the step was closed"):
        whole(batch)
    with pytest.raises(CaptureError, match="the step was closed"):
        whole([batch])
    with ga.GraphedStep(fn, torch.zeros(1, device=device)) as unused:
        pass
    with pytest.raises(CaptureError, match="the step was closed"):
        unused(x)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_the_graph_can_be_looked_at(device):
    with ga.GraphedStep(
        lambda x: ((x + 1) * 2).exp(), torch.zeros(1, device=device), policy="require"
    ) as step:
        assert step.nodes() == []
        step(torch.ones(1000, device=device))
        names = step.nodes()
    # Three operations, and the copy of the result.
    assert len(names) >= 4 and all(isinstance(name, str) and name for name in names)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_graph_that_is_split_does_what_one_graph_does(device):
    """A value that the first half makes is read in the second, which may fail."""
    total, fails = torch.zeros((), device=device), [False]

    def fn(x):
        y = x * 2
        step.split()
        if fails[0]:
            raise ArithmeticError("in the second graph")
        total.add_(y.sum())
        step.split()
        return y + total

    with ga.GraphedStep(fn, total, policy="require") as step:
        for number in range(1, 4):
            x = torch.full((3,), float(number), device=device)
            after = 6.0 * sum(range(1, number + 1))
            assert step(x).tolist() == [2.0 * number + after] * 3
        assert total.item() == 36.0
        fails[0] = True
        with pytest.raises(ArithmeticError, match="in the second graph"):
            step(torch.ones(5, device=device))
        fails[0] = False
        assert step(torch.ones(5, device=device)).tolist() == [48.0] * 5
        assert len(step) == 2 and total.item() == 46.0


def another_dtype(model):
    model.size = model.size.double()


def moved(model):
    model.head.weight.data = model.head.weight.data.clone()


def replaced(model):
    model.blocks[1][3] = nn.Linear(64, HIDDEN).to(model.head.weight.device)


def one_more(model):
    model.extra = nn.Parameter(torch.zeros(3, device=model.head.weight.device))


def one_less(model):
    del model.blocks[0][1].bias
    model.blocks[0][1].bias = None


CHANGES = {
    "new parameter": (one_more, "extra"),
    "parameter gone": (one_less, r"blocks\.0\.1"),
    "replaced module": (replaced, r"blocks\.1\.3"),
    "moved weight": (moved, r"head\.weight has another address"),
    "dtype of a buffer": (another_dtype, r"size was torch\.float32.*is torch\.float64"),
    "module.double()": (
        lambda model: model.double(),
        r"((size|embedding\.weight) was torch\.float32.*is torch\.float64|no longer a view)",
    ),
    "module.to(other device)": (
        lambda model: model.to("cpu" if model.size.is_cuda else "meta"),
        r"(size|embedding\.weight) (has another address|was )",
    ),
}


def step_of_net(device):
    """A model that may be changed, ga.AdamW over its parameters, and a step."""
    torch.manual_seed(0)
    model = Net(dropout=0.0).to(device)
    opt = AdamW(model.parameters(), lr=LR)

    def fn(x, y, weight):
        loss = loss_fn(model, (x, y, weight))[0]
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return model, opt, fn


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_model_that_changed_after_the_capture_is_named_and_nothing_else_changes(device, change):
    """A graph would go on with memory that is no longer the model's."""
    alter, name = CHANGES[change]
    model, opt, fn = step_of_net(device)
    one, two = batches(device, n=2, lengths=(8,))
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        step(*one)
        alter(model)
        on_meta = model.size.is_meta
        with contextlib.nullcontext() if on_meta else unchanged(model, opt, device):
            with pytest.raises(CaptureError, match=f"{name}.*reset"):
                step(*two)


def test_of_several_modules_the_one_that_changed_is_named():
    one, two, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    with (
        ga.use_backend("simt"),
        ga.GraphedStep(lambda x: two(one(x)), [one, two], policy="require") as step,
    ):
        step(x)
        one.weight.data = one.weight.data.clone()
        with pytest.raises(CaptureError, match=r"^0\.weight has another address"):
            step(x)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_tensor_that_the_step_itself_replaces_is_named_before_the_first_step(device, kind):
    """Each replay would read the old one again: a counter would stand still. Eager counts; a graph
    needs add_()."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), device=device))
            self.weight = nn.Parameter(torch.ones((), device=device))

        def forward(self, x):
            if kind == "buffer":
                self.seen = self.seen + 1
            else:
                self.weight.data = self.weight.data * 2
            return x * self.weight + self.seen

    model = Counts()
    with ga.GraphedStep(lambda x: model(x).detach(), model, policy="require") as step:
        with pytest.raises(CaptureError, match="seen" if kind == "buffer" else "weight"):
            step(torch.ones(2, device=device))
        assert model.seen == 0 and model.weight == 1, "the warm-up has left a trace"


@pytest.mark.parametrize("rows", [(6,), (6, 3)], ids=["one shape", "two shapes"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_anybodys_step_with_torchs_optimizer_has_eagers_bits(device, rows):
    """Ten steps, a schedule that fills the learning rate's tensor, dropout, batch norm."""

    def build():
        model = small(device, norm=True, dropout=0.3)
        opt = torchs(model, device)
        return model, opt, plain_step(model, opt)

    def drive(step, model, opt):
        schedule = warmup_cosine(opt, 2, 10)
        losses = []
        for x, y in pairs(device, 10, rows):
            losses.append(step(x, y))
            schedule.step()
        return losses

    losses = follow_eager(device, build, drive)
    assert len({loss.item() for loss in losses}) == 10


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_learning_rate_that_is_a_number_is_an_error_that_says_so(device):
    x, y = pairs(device, 1)[0]
    cases = [
        (
            {"lr": 0.01, "capturable": device == "cuda"},
            "the learning rate of AdamW's group 0 is the number 0.01, which a graph would keep",
        )
    ]
    if device == "cuda":
        cases += [
            (
                {"lr": torch.tensor(0.01, device=device), "fused": True},
                "counts its steps on the host .capturable=False in group 0.",
            )
        ]
    for options, words in cases:
        model = small(device)
        opt = torch.optim.AdamW(model.parameters(), **options)
        fn = plain_step(model, opt)
        before = everything(model, opt, device)
        with ga.GraphedStep(fn, [model, opt], policy="require") as step:
            with pytest.raises(CaptureError, match=words) as info:
                step(x, y)
            assert "Instead:" in str(info.value) and "ga.AdamW" in str(info.value)
        agree(everything(model, opt, device), before)
        other = small(device)
        other_opt = torch.optim.AdamW(other.parameters(), **options)
        want = [plain_step(other, other_opt)(x, y) for _ in range(3)]
        with ga.GraphedStep(fn, [model, opt], policy="auto") as step:
            with pytest.warns(UserWarning, match="every step runs eagerly.*" + words):
                got = [step(x, y) for _ in range(3)]
            assert step.replays == "eager" and re.search(words, step.reason)
        for a, b in zip(got, want):
            same(a, b)


def another_rate(opt, device):
    opt.param_groups[0]["lr"] = torch.tensor(0.5, device=device)


def a_number(opt, device):
    opt.param_groups[0]["lr"] = 0.5


def loaded_state(opt, device):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


@pytest.mark.parametrize("change", [another_rate, a_number, loaded_state])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_replaces_a_tensor_of_torchs_optimizer_is_noticed(device, change):
    """The graph knows the old one by its address: a new one, or a number, would never be read."""
    model = small(device)
    opt, (x, y) = torchs(model, device), pairs(device, 1)[0]
    with ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step:
        step(x, y)
        change(opt, device)
        with pytest.raises(CaptureError, match="optimizer's group 0|learning rate"):
            step(x, y)
        if change is not a_number:
            step.reset()
            assert step(x, y).isfinite()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_state_of_unknown_beginning_is_an_error_before_the_first_step(device):
    """SGD's momentum starts from the first gradient, not from zero: it cannot be taken back. The
    warm-up leaves no trace all the same."""
    model, (x, y) = small(device, dropout=0.3), pairs(device, 1)[0]
    opt = momentum(model, device)
    seed()
    keys = everything(model, opt, device).keys()
    with (
        unchanged(model, opt, device),
        ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require") as step,
        pytest.raises(
            CaptureError, match="SGD makes its state in the first step.*take one step before"
        ),
    ):
        step(x, y)
    assert everything(model, opt, device).keys() == keys, "the warm-up has left its momentum"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_momentum_that_is_there_is_restored_after_the_warm_up(device):
    data, names = pairs(device, 5), []

    def build():
        model = small(device)
        opt = momentum(model, device)
        fn = plain_step(model, opt)
        fn(*data[0])
        return model, opt, fn

    def drive(step, model, opt):
        losses = [step(x, y) for x, y in data[1:]]
        names.extend(everything(model, opt, device))
        return losses

    follow_eager(device, build, drive)
    assert any(name.startswith("momentum_buffer") for name in names)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_that_a_step_leaves_are_those_of_its_own_kind_of_batch(device):
    """zero_grad() at the start, as many write it: after a replay `.grad` holds what eager's would,
    whichever graph was replayed."""
    models = []

    def build():
        model = small(device)
        opt = torchs(model, device)
        models.append(model)

        def fn(x, y):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        return model, opt, fn

    def drive(step, model, opt):
        grads = []
        for x, y in pairs(device, 6, rows=(6, 3)):
            step(x, y)
            grads += [p.grad.clone() for p in model.parameters()]
        return grads

    follow_eager(device, build, drive)
    assert all(p.grad is None for p in models[1].parameters()), "closed: their memory is gone"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_is_given_as_warm_up_runs_instead_of_fn(device):
    calls, value = [], torch.zeros((), device=device)

    def fn(x):
        calls.append("fn")
        return x + value

    x = torch.zeros(2, device=device)
    with ga.GraphedStep(
        fn, value, warm_up=lambda x: calls.append("warm-up"), policy="require"
    ) as step:
        step.capture(x)
        assert set(calls[:-1]) == {"warm-up"} and calls[-1] == "fn"
        for k in range(3):
            value.fill_(k)
            assert torch.equal(step(x).cpu(), torch.full((2,), float(k)))
    assert calls.count("fn") == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "maybe"}, "policy is 'maybe'; expected one of auto, require"),
        ({"max_graphs": 0}, "max_graphs is 0; expected a whole number of 1 or more"),
        ({"max_graphs": 1.5}, "max_graphs is 1.5"),
        ({"state": ["model"]}, "state holds a str; expected modules, optimizers and tensors"),
        (
            {"state": [torch.zeros(1), {}]},
            "state holds a dict; expected modules, optimizers and tensors",
        ),
    ],
)
def test_bad_arguments_of_a_graphed_step_are_refused_before_anything_runs(options, message):
    calls = []
    with ga.use_backend("simt"), pytest.raises(ArgumentError, match=message):
        ga.GraphedStep(lambda x: calls.append(x), **{"state": torch.zeros(1), **options})(
            torch.ones(1)
        )
    assert not calls


def test_eight_graphs_are_held_unless_another_number_is_given():
    with ga.use_backend("simt"), ga.GraphedStep(lambda x: x + 1, torch.zeros(1)) as step:
        for n in range(1, 11):
            step(torch.ones(n))
        assert len(step) == 8 and (step.policy, step.replays) == ("auto", "graph")


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_bad_inputs_are_refused_before_anything_runs(device):
    calls, x = [], torch.ones(2, device=device)
    with ga.GraphedStep(lambda *args: calls.append(args), torch.zeros(1, device=device)) as step:
        with pytest.raises(
            ArgumentError, match="input 1 of shape .2,. requires a gradient.*detach"
        ):
            step(x, x.clone().requires_grad_())
        for thing in ({1, 2}, np.zeros(2)):
            with pytest.raises(
                ArgumentError,
                match="that are no tensors are part of a graph's key; expected hashable ones",
            ):
                step(x, thing)
    assert not calls and step.replays == "graph"


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_that_returns_an_object_is_refused(device):
    with ga.GraphedStep(
        lambda x: ga.training.step.StepOutput(x, None, None),
        torch.zeros(1, device=device),
        policy="require",
    ) as step:
        with pytest.raises(
            CaptureError,
            match="the step returns a StepOutput; expected tensors, in tuples, lists or dicts",
        ):
            step(torch.ones(2, device=device))
    healthy(device)


@pytest.mark.parametrize("device", ["simt"], indirect=True)
def test_a_compiled_function_on_a_tape_is_run_as_written(device):
    """torch.compile steps aside where operations are watched: the tape has all of them."""
    weight = torch.ones(4, 4)
    compiled = torch.compile(lambda x: (x @ weight).sin() + x, backend="aot_eager")
    with ga.GraphedStep(lambda x: compiled(x), weight, policy="require") as step:
        for _ in range(3):
            x = torch.randn(4, 4)
            same(step(x), (x @ weight).sin() + x)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("tidy", ["set to None", "kept at zero", "never"])
def test_gradients_that_stand_before_a_step_count_as_in_eager(device, tidy):
    """Those of an earlier backward are added to, as eager does; those that somebody adds between
    two replays too."""
    x, y = pairs(device, 1)[0]

    def build():
        model = small(device)
        opt = AdamW(model.parameters(), lr=LR)

        def fn(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            if tidy != "never":
                opt.zero_grad(set_to_none=tidy == "set to None")
            return loss.detach()

        F.mse_loss(model(-x), y).backward()
        return model, opt, fn

    def drive(step, model, opt):
        losses = []
        for k in range(6):
            if k in (3, 5):
                F.mse_loss(model(2 * x), y).backward()
            losses.append(step(x[:4] if k % 2 else x, y[:4] if k % 2 else y))
        return losses

    follow_eager(device, build, drive)


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_an_autocast_around_the_step_does_not_freeze_the_weights(device):
    """Its cache keeps copies of weights: one that the warm-up made would never be made again."""
    x, y = pairs(device, 1)[0]

    def build():
        model = small(device)
        opt = torchs(model, device)
        return model, opt, plain_step(model, opt)

    def drive(step, model, opt):
        losses = []
        for _ in range(4):
            with torch.autocast(x.device.type, torch.bfloat16):
                losses.append(step(x, y).detach())
        return losses

    losses = follow_eager(device, build, drive)
    assert len({loss.item() for loss in losses}) == 4


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_what_an_optimizer_does_about_nan_changed_by_hand_takes_effect(device):
    def build():
        model = small(device)
        opt = AdamW(model.parameters(), lr=LR, max_norm=LIMIT)
        return model, opt, plain_step(model, opt)

    def drive(step, model, opt):
        norms = []
        for k, (x, y) in enumerate(pairs(device, 6)):
            opt.on_nonfinite = "skip" if k in (2, 3) else "propagate"
            step(x * math.nan if k == 3 else x, y)
            norms.append(opt.clip_state.norm.clone())
        return norms

    follow_eager(device, build, drive)


@pytest.mark.parametrize("max_graphs", [1, 2])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_gradients_outlive_the_graph_that_has_to_go_for_another_one(device, max_graphs):
    """They are added up over calls with inputs of two shapes."""
    sums = []
    for graphed in (False, True):
        layer = nn.Linear(3, 1, bias=False, device=device)

        def fn(x, layer=layer):
            layer(x).sum().backward()

        options = {"policy": "require", "max_graphs": max_graphs}
        step = ga.GraphedStep(fn, layer, **options) if graphed else fn
        for rows in (2, 5, 2, 2, 5):
            step(torch.ones(rows, 3, device=device))
        sums.append(layer.weight.grad.tolist())
    assert sums == [[[16.0, 16.0, 16.0]]] * 2


class Drops(nn.Module):
    """Drops its second layer when a generator of the host says so."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = random.Random(1)
        self.numpys = np.random.default_rng(1)
        self.torchs = torch.Generator().manual_seed(1)
        self.draw = draw

    def forward(self, x):
        h = self.first(x)
        return h if self.draw(self) < 0.5 else h + self.second(h)


DRAWS = {
    "Python's random": lambda m: random.random(),
    "np.random": lambda m: np.random.uniform(),
    "Drops.own": lambda m: m.own.random(),
    "Drops.numpys": lambda m: m.numpys.random(),
}
# On a tape torch's operations draw anew, and a value that the host reads is refused before.
DRAWS_BESIDE_A_GPU = {
    "torch's generator of the CPU": lambda m: torch.rand([]).item(),
    "Drops.torchs": lambda m: torch.rand([], generator=m.torchs).item(),
}


@pytest.mark.parametrize("name", [*DRAWS, *DRAWS_BESIDE_A_GPU])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_step_that_draws_on_the_host_is_named_and_launched(device, name):
    """Its weights are then those of a loop of one's own."""
    if name in DRAWS_BESIDE_A_GPU and ga.backend().name != "cuda":
        pytest.skip("on a CPU the host's generator is the device's")
    draw = (DRAWS | DRAWS_BESIDE_A_GPU)[name]
    weights = []
    for policy in (None, "auto"):
        torch.manual_seed(0)
        model = Drops(draw).to(device)
        opt = AdamW(model.parameters(), lr=LR)
        step = plain_step(model, opt)
        graphed = None
        if policy is not None:
            graphed = step = ga.GraphedStep(step, [model, opt], policy=policy)
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
        model.own.seed(1), model.torchs.manual_seed(1)
        model.numpys = np.random.default_rng(1)
        x = torch.ones(2, 4, device=device)
        if graphed is not None:
            with pytest.warns(UserWarning, match=f"draws from {name}, on the host"):
                step(x, x)
            assert graphed.replays == "eager" and name in graphed.reason
        else:
            step(x, x)
        for _ in range(5):
            step(x, x)
        weights.append([p.detach().clone() for p in model.parameters()])
    with pytest.raises(CaptureError, match=f"draws from {name}, on the host"):
        model = Drops(draw).to(device)
        opt = AdamW(model.parameters(), lr=LR)
        ga.GraphedStep(plain_step(model, opt), [model, opt], policy="require")(x, x)
    if name in ("Python's random", "np.random", "torch's generator of the CPU"):
        for p, q in zip(*weights):
            assert torch.equal(p, q)
