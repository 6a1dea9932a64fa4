"""What cannot be captured is named with its line, and nothing has changed."""

import copy
import importlib
import linecache
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import KERNELS
from replays import (
    LIMIT,
    LR,
    agree,
    batches,
    everything,
    healthy,
    lists,
    loss_fn,
    make,
    outputs_agree,
    pairs,
    plain_step,
    seed,
    small,
    takes_a_value,
    trained,
    unchanged,
)
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import CaptureError
from gpuaccel.optim.adamw import AdamW


def reads_a_value(t):
    t.sum().item()


def decides(t):
    if t.sum() > 0:
        pass


def prints(t):
    print(t)


def looks_for_nonzeros(t):
    t.nonzero()


def selects_by_a_mask(t):
    t[t > 0].sum()


def brings_it_to_the_host(t):
    t.cpu()


def waits(t):
    torch.cuda.synchronize()


def makes_a_constant(t):
    torch.tensor(3.0, device="cuda")


def allocates_elsewhere(t):
    MEMORY.append(sys.modules["cuda.bindings.runtime"].cudaMalloc(1024))


def allocates_after_a_helper(t):
    MEMORY.append(runtime().cudaMalloc(1024))


def runtime():
    return importlib.import_module("cuda.bindings.runtime")


# Allocated by a test, behind torch's back.
MEMORY = []
VALUE = "keep the number on the device|ga.measure.LateValue"
SHAPE = "keep the shape fixed"


ANYWHERE = [
    (reads_a_value, VALUE),
    (decides, VALUE),
    (prints, VALUE),
    (looks_for_nonzeros, SHAPE),
    (selects_by_a_mask, SHAPE),
]


def selects_beside_a_number(t):
    if t[t > float(0)].sum() is None:
        print("a mask in a line with words that may mean a wait")


def adds_where_a_mask_is(t):
    t.clone().index_put_((t > 0,), t.new_ones(()), accumulate=True)


def makes_it_sparse(t):
    t.detach().to_sparse()


# A tape knows what has happened; a driver does not say, and the line's words decide.
ON_A_TAPE = [
    *ANYWHERE,
    (selects_beside_a_number, SHAPE),
    (adds_where_a_mask_is, SHAPE),
    (makes_it_sparse, "leave it out of the step"),
]


ON_A_GPU = [
    *ANYWHERE,
    (brings_it_to_the_host, "hand it in as an input"),
    (waits, "take the wait out of the step"),
    (makes_a_constant, "make the tensor on the device before the step"),
]


def faults(device, cases):
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [
        pytest.param(device, *case, id=f"{device}-{case[0].__name__}", marks=marks)
        for case in cases
    ]


FAULTS = faults("simt", ON_A_TAPE) + faults("cuda", ON_A_GPU)


ALLOCATIONS = faults(
    "cuda",
    [
        (fault, "allocate it before the first step")
        for fault in (allocates_elsewhere, allocates_after_a_helper)
    ],
)


def names_the_line(info, fault, instead):
    """The error is about the line after `def`, and says what to do."""
    error, line = info.value, fault.__code__.co_firstlineno + 1
    assert (error.file, error.line) == (__file__, line), str(error)
    assert linecache.getline(__file__, line).strip() in str(error)
    assert f"test_capture_failures.py:{line}" in str(error)
    assert re.search(f"Instead: .*({instead})", str(error)), str(error)


@pytest.mark.parametrize("where", ["forward", "hook"])
@pytest.mark.parametrize("device, fault, instead", FAULTS, indirect=["device"])
def test_what_cannot_be_captured_is_named_with_its_line(device, fault, instead, where):
    if device == "cpu" and fault is prints and where == "hook":
        pytest.skip("on the CPU print() in a hook asks nothing of torch that a tape could see")
    fails_in_words(device, fault, instead, where)


@pytest.mark.parametrize("device, fault, instead", ALLOCATIONS, indirect=["device"])
def test_gpu_an_allocation_outside_of_the_pool_is_named_with_its_line(device, fault, instead):
    """CUDA only says, later, that the capture is invalid."""
    runtime()
    fails_in_words(device, fault, instead, "forward")


@pytest.fixture(autouse=True)
def free_memory():
    """Give back what a test has allocated behind torch's back."""
    yield
    while MEMORY:
        status, address = MEMORY.pop()
        if not int(status):
            runtime().cudaFree(address)


def first_step(device):
    """What eager's first step leaves."""
    (batch,) = batches(device, n=1)
    _, left, *_ = trained(make(device, "eager"), [batch], device)
    return left


def fails_in_words(device, fault, instead, where):
    model = small(device, dropout=0.3)
    opt = AdamW(model.parameters(), lr=LR, max_norm=LIMIT)

    def fn(x, y):
        out = model(x)
        fault(out) if where == "forward" else out.register_hook(fault)
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    seed()
    x, y = pairs(device, 1)[0]
    with ga.GraphedStep(fn, [model, opt], policy="require") as step:
        with unchanged(model, opt, device), pytest.raises(CaptureError) as info:
            step(x, y)
        names_the_line(info, fault, instead)
        assert all(p.grad is None for p in model.parameters()) and len(step) == 0
    healthy(device)


@pytest.mark.parametrize("device, fault, instead", [*FAULTS, *ALLOCATIONS], indirect=["device"])
def test_what_cannot_be_captured_in_a_loss_fn_is_named_and_the_step_is_as_before(
    device, fault, instead
):
    """Weights, sums, moments and generators; and once the line is gone the step is eager's first
    step."""
    broken = True
    if device == "cuda":
        runtime()

    def loss(model, micro):
        total, tokens = loss_fn(model, micro)
        if broken:
            fault(total[None])
        return total, tokens

    (batch,) = batches(device, n=1)
    want = first_step(device)
    with make(device, "graph", loss=loss) as step:
        for attempt in (batch, [batch, batch]):
            with (
                unchanged(step.model, step.optimizers[0], device),
                pytest.raises(CaptureError) as info,
            ):
                step(attempt)
            names_the_line(info, fault, instead)
            assert step.count == 0 and not any(step.arena.gradients.received())
        broken = False
        step(batch)
        agree(everything(step.model, step.optimizers[0], device), want)
    healthy(device)


class Counting(torch.optim.SGD):
    """It counts its steps in its groups, on the host."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


@pytest.mark.parametrize(
    "make_optimizer, schedules, words",
    [
        (lambda w: AdamW([w], lr=0.5), True, "'lr' of AdamW from 0.5 to 0.25,"),
        (lambda w: torch.optim.SGD([w], lr=torch.tensor(0.5)), True, "'lr' of SGD,"),
        (lambda w: Counting([{"params": [w], "count": 3}], torch.tensor(0.5)), False, "'count' of"),
    ],
    ids=["a number", "a tensor", "it counts"],
)
def test_settings_that_the_step_changes_on_the_host_are_refused(make_optimizer, schedules, words):
    """A scheduler inside of the step, for example. The settings are as before."""
    weight = nn.Parameter(torch.ones(4))
    opt = make_optimizer(weight)
    halves = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.5**k) if schedules else None
    before = [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in opt.param_groups
    ]

    def step(x):
        (weight * x).sum().backward()
        opt.step()
        opt.zero_grad()
        if halves:
            halves.step()

    with ga.use_backend("simt"):
        with pytest.raises(
            CaptureError, match=f"{words}.* call scheduler.step\\(\\) after the step"
        ):
            ga.GraphedStep(step, [weight, opt], policy="require")(torch.ones(4))
        now = [{name: group[name] for name in was} for group, was in zip(opt.param_groups, before)]
        assert now == before and torch.equal(weight, torch.ones(4))
        with pytest.warns(UserWarning, match=words.partition(" from")[0]):
            launched = ga.GraphedStep(step, [weight, opt])
            launched(torch.ones(4))
    assert launched.replays == "eager" and not torch.equal(weight, torch.ones(4))


@pytest.mark.parametrize("nth", [0, 2], ids=["in the warm-up", "in the capture"])
@pytest.mark.parametrize("policy", ["auto", "require"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_users_own_error_arrives_as_it_is(device, policy, nth):
    """It is not about graphs: eager would raise it as well. Nothing falls back or has changed."""
    model = small(device, norm=True, dropout=0.3)
    opt = AdamW(model.parameters(), lr=LR, max_norm=LIMIT)
    inner, calls, broken = plain_step(model, opt), [], True

    def fn(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        calls.append(None)
        if broken and len(calls) > nth:
            raise ValueError("my own")
        opt.zero_grad()
        return inner(x, y)

    seed()
    x, y = pairs(device, 1)[0]
    with ga.GraphedStep(fn, [model, opt], policy=policy) as step:
        with (
            unchanged(model, opt, device),
            pytest.raises(ValueError, match="^my own$"),
        ):
            step(x, y)
        assert step.replays == "graph" and len(step) == 0
        assert all(p.grad is None for p in model.parameters())
        broken = False
        step(x, y)
        assert len(step) == 1
    healthy(device)


@pytest.mark.parametrize("how", ["whole", "list"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_policy_auto_goes_on_in_eager_with_one_warning_and_eagers_bits(device, how, counts):
    data = batches(device, n=4, bad=(2,)) if how == "whole" else lists(device)[:4]
    wanted, left, *_ = trained(make(device, "eager"), data, device)
    step = make(device, "graph", loss=takes_a_value, policy="auto")
    line = takes_a_value.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning) as said:
        outs, mine, *_ = trained(step, data, device)
    texts = [str(w.message) for w in said]
    assert len(said) == 1 and re.search(
        rf"every step runs eagerly: replays\.py:{line}: .*item\(\)", texts[0]
    ), texts
    assert said[0].filename == trained.__code__.co_filename, "it points at our own code"
    assert (
        step.replays == "eager"
        and f"replays.py:{line}" in step.reason
        and counts.replays <= (how == "list")
    )
    outputs_agree(outs, wanted)
    agree(mine, left)


@pytest.mark.parametrize("policy", ["auto", "require"])
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_a_later_kind_that_cannot_be_captured_raises_under_both_policies(device, policy):
    """A run does not turn from replayed to eager; the kinds that are there go on."""

    def loss(model, micro):
        return (takes_a_value if micro[0].shape[1] > 8 else loss_fn)(model, micro)

    short, long, again = batches(device, n=3)
    wanted, left, *_ = trained(make(device, "eager"), [short, again], device)
    with make(device, "graph", loss=loss, policy=policy) as step:
        outs = [step(short)]
        with (
            unchanged(step.model, step.optimizers[0], device),
            pytest.raises(CaptureError, match=r"item\(\)"),
        ):
            step(long)
        assert step.replays == "graph" and step.count == 1
        outs.append(step(again))
        assert step.replays == "graph"
        outputs_agree(outs, wanted)
        agree(everything(step.model, step.optimizers[0], device), left)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_without_anything_that_records_every_step_runs_eagerly_and_says_why(device):
    model = small(device)
    opt = AdamW(model.parameters(), lr=LR)
    fn, (x, y) = plain_step(model, opt), pairs(device, 1)[0]
    with pytest.warns(UserWarning, match="every step runs eagerly: CUDA graphs need a CUDA device"):
        step = ga.GraphedStep(fn, [model, opt])
    assert (
        step.replays == "eager"
        and "CUDA graphs need a CUDA device, and the step is on cpu" in step.reason
    )
    assert step(x, y).requires_grad and len(step) == 0
    step.capture(x, y)
    step.close()
    with pytest.raises(CaptureError, match="CUDA graphs need a CUDA device.*policy 'require'"):
        ga.GraphedStep(fn, [model, opt], policy="require")
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        step = make(device, "graph", policy="auto")
    assert step.replays == "eager" and "CUDA graphs need a CUDA device" in step.reason
    outs, left, *_ = trained(step, batches(device, n=3), device)
    wanted, want, *_ = trained(make(device, "eager"), batches(device, n=3), device)
    outputs_agree(outs, wanted)
    agree(left, want)
    with pytest.raises(CaptureError, match="policy 'require'"):
        make(device, "graph", policy="require")
    plain = make(device, "eager")
    assert plain.replays == "eager" and plain.reason == "replay is 'eager'"
    plain.close()


@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_reset_after_a_fall_back_captures_again(device):
    limit = [True]

    def fn(x):
        return x + (x.sum().item() if limit[0] else 1)

    x = torch.ones(2, device=device)
    step = ga.GraphedStep(fn, torch.zeros(1, device=device))
    with pytest.warns(UserWarning, match="every step runs eagerly"):
        assert step(x.cpu()).device == x.device
    limit[0] = False
    assert step.replays == "eager"
    step.reset()
    assert torch.equal(step(x), x + 1) and step.replays == "graph" and len(step) == 1
    step.close()


CELL = """
import torch
import gpuaccel as ga

def impatient(x):
    total = x.sum()
    if total.item() > 1:
        return total
    return x

ga.GraphedStep(impatient, torch.zeros(1), policy="require")(torch.ones(2))
"""


@pytest.mark.parametrize("above, line", [("", 6), ("%timeit -n1 -r1 1\n", 7)])
def test_in_a_notebook_the_cell_and_its_line_are_named(above, line):
    """A cell's file name, .../ipykernel_417/2869.py, tells a reader nothing."""
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    existed = interactive.initialized()
    shell = interactive.instance()
    try:
        with ga.use_backend("simt"):
            shell.run_cell("1 + 1", store_history=True)
            cell = shell.execution_count
            result = shell.run_cell(above + CELL.lstrip(), store_history=True)
    finally:
        if not existed:
            interactive.clear_instance()
    error = result.error_in_exec
    assert isinstance(error, CaptureError), error
    where = f"In[{cell}], line {line}: `if total.item() > 1:` cannot be captured"
    assert str(error).startswith(where), error
    assert error.line == line
