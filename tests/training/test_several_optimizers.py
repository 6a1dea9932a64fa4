"""Several optimizers over one arena: as torch's plain loop, launched, replayed and resumed."""

import collections
import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import generator
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, CheckpointError
from gpuaccel.training.micro import split

MAX_NORM = 0.5


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def optimizers_of(parameters, adamw=ga.AdamW):
    """Muon for the matrices, AdamW for the rest, and a schedule of each."""
    parameters = list(parameters)
    optimizers = [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02),
        adamw([p for p in parameters if p.dim() != 2], lr=0.01),
    ]
    decay = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.8) for opt in optimizers]
    return optimizers, decay


def loss_fn(model, micro):
    """The sum over the rows that count, and how many these are: a different number in each."""
    x, y = micro
    counts = x[:, 0] > 0
    losses = (model(x).float() - y).square().sum(1)
    return (losses * counts).sum(), counts.sum()


def batch(k):
    return (
        torch.randn(6, 8, generator=generator(k)),
        torch.randn(6, 4, generator=generator(100 + k)),
    )


def as_dtype(data, dtype):
    x, y = data
    return x.to(dtype), y


def step_of(model, **how):
    arena = ga.Arena(model)
    optimizers, schedulers = optimizers_of(arena.parameters())
    options = {"micro_batches": 3, "max_norm": MAX_NORM, **how}
    return ga.TrainStep(model, optimizers, loss_fn, scheduler=schedulers, **options)


def everything(step):
    """Weights, masters, and the state of each optimizer."""
    state = [
        value
        for opt in step.optimizers
        for p in (p for group in opt.param_groups for p in group["params"])
        for _, value in sorted(opt.state[p].items())
    ]
    return [t.clone() for t in (*step.model.parameters(), *step.arena.parameters(), *state)]


@pytest.mark.parametrize("backend", ["torch", "simt"])
@pytest.mark.parametrize("how", [{}, {"deterministic": True}, {"replay": "graph"}], ids=str)
def test_muon_and_adamw_train_as_in_torchs_plain_loop(how, backend):
    if "replay" in how and backend == "torch":
        pytest.skip("nothing is captured")
    model, plain = net(), net()
    theirs, decay = optimizers_of(plain.parameters(), torch.optim.AdamW)
    with ga.use_backend(backend), step_of(model, **how) as step:
        for k in range(4):
            x, y = batch(k)
            for part in zip(x.chunk(3), y.chunk(3)):
                loss_fn(plain, part)[0].backward()
            tokens = (x[:, 0] > 0).sum()
            for p in plain.parameters():
                p.grad /= tokens
            norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            for each in (*theirs, *decay):
                each.step()
            plain.zero_grad()
            out = step((x, y))
            assert norm > MAX_NORM, "the test clips"
            torch.testing.assert_close(out.norm, norm)
            torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
        assert step.replays == how.get("replay", "eager")
        if "replay" in how:
            assert step.reason == "a tape on the CPU (backend simt); Muon launched behind them"
        rates = [opt.param_groups[0]["lr"] for opt in step.optimizers]
        assert rates == pytest.approx([0.02 * 0.8**4, 0.01 * 0.8**4])


@pytest.mark.parametrize("form", ["a batch", "a list"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launched_is_replayed(dtype, form):
    def run(replay):
        with ga.use_backend("simt"):
            model = net(dtype)
            with step_of(model, replay=replay, deterministic=True) as step:
                for k in range(3):
                    data = as_dtype(batch(k), dtype)
                    step([data, as_dtype(batch(9 + k), dtype)] if form == "a list" else data)
                assert step.replays == replay
                return everything(step)

    assert all(map(torch.equal, run("eager"), run("graph")))


def test_optimizers_that_all_fit_into_a_graph_are_one():
    """Nothing is launched behind it, and the weights are those of the launched step."""

    def run(replay):
        with ga.use_backend("simt"):
            model = net()
            matrices = [p for p in model.parameters() if p.dim() == 2]
            biases = [p for p in model.parameters() if p.dim() == 1]
            optimizers = [ga.optim.Lion(matrices, lr=0.01), ga.AdamW(biases, lr=0.01)]
            with ga.TrainStep(model, optimizers, loss_fn, max_norm=1.0, replay=replay) as step:
                for k in range(3):
                    step(batch(k))
                assert "launched" not in step.reason
                return everything(step)

    for got, want in zip(run("graph"), run("eager"), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_bit_identical(dtype, replay, tmp_path):
    def batches(first):
        return [as_dtype(batch(k), dtype) for k in range(first, 6)]

    def run(steps, first=0, resume=False):
        with step_of(net(dtype), replay=replay, deterministic=True) as step:
            readings = ga.train(step, batches(first), steps, checkpoint_dir=tmp_path, resume=resume)
            count = len(list(readings))
            return count, everything(step), [each.state_dict() for each in step.schedulers]

    with ga.use_backend("simt"):
        run(3)
        count, resumed, rates = run(6, first=3, resume=True)
        assert count == 3
        for path in tmp_path.iterdir():
            path.unlink()
        _, whole, expected_rates = run(6)
    assert all(map(torch.equal, resumed, whole)) and rates == expected_rates


def sgd_and_adamw(model):
    weight, bias = model.parameters()
    return [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias], lr=0.1)]


@pytest.mark.parametrize(
    "others, message",
    [
        (lambda m: sgd_and_adamw(m)[::-1], "state of SGD, Adam, expected Adam, SGD"),
        (lambda m: torch.optim.SGD(m.parameters()), "state of SGD, Adam, expected SGD"),
        (
            lambda m: [*sgd_and_adamw(m), torch.optim.SGD([nn.Parameter(torch.ones(1))])],
            "holds a parameter of shape",
        ),
        (
            lambda m: [torch.optim.SGD([m.bias], lr=0.1), torch.optim.Adam([m.weight], lr=0.1)],
            "its groups have .* the same ones in each",
        ),
    ],
)
def test_a_checkpoint_of_other_optimizers_is_refused_before_anything_changes(
    others, message, tmp_path
):
    model = nn.Linear(3, 2)
    path = ga.save_checkpoint(
        tmp_path / "a.safetensors", model=model, optimizer=sgd_and_adamw(model)
    )
    other = nn.Linear(3, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=message):
        ga.load_checkpoint(path, model=other, optimizer=others(other))
    assert all(map(torch.equal, before.values(), other.state_dict().values()))


def test_a_group_that_moved_to_another_optimizer_of_the_list_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    first, second, third = ([p] for p in model.parameters())

    def optimizers(split_at):
        groups = [{"params": p} for p in (first, second, third)]
        return [torch.optim.AdamW(groups[:split_at]), torch.optim.AdamW(groups[split_at:])]

    path = ga.save_checkpoint(tmp_path / "a.safetensors", model=model, optimizer=optimizers(1))
    ga.load_checkpoint(path, model=model, optimizer=optimizers(1))
    with pytest.raises(CheckpointError, match="the same ones in each"):
        ga.load_checkpoint(path, model=model, optimizer=optimizers(2))


def test_a_list_of_one_optimizer_is_one_optimizer(tmp_path):
    model = nn.Linear(3, 2)
    opt = ga.AdamW(model.parameters())
    path = tmp_path / "a.safetensors"
    ga.save_checkpoint(path, model=model, optimizer=[opt], scheduler=())
    ga.load_checkpoint(path, model=model, optimizer=opt)
    with ga.TrainStep(model, [ga.AdamW(ga.Arena(model), max_norm=1.0)]) as step:
        assert step.max_norm == 1.0, "it still clips inside its step"


# ---- tensors and their optimizers ----------------------------------------------------------------


def rest(model):
    return [p for p in model.parameters() if p is not model[2].weight]


@pytest.mark.parametrize(
    "opt, message",
    [
        (
            lambda m: torch.optim.SGD(rest(m)),
            "no optimizer holds 2.weight, which would not be trained (SGD)",
        ),
        (
            lambda m: [torch.optim.SGD(rest(m)[:1]), ga.AdamW(rest(m)[1:])],
            "no optimizer holds 2.weight, which would not be trained (SGD, AdamW)",
        ),
        (
            lambda m: [torch.optim.SGD(rest(m)), ga.AdamW(m[2].parameters())],
            "2.bias is in two optimizers, SGD and AdamW; expected each tensor in one of them",
        ),
        (
            lambda m: [torch.optim.SGD(m.parameters())] * 2,
            "is in two optimizers, SGD and SGD",
        ),
        (
            lambda m: [torch.optim.SGD(rest(m)), ga.AdamW([m[2].weight], max_norm=1.0)],
            "max_norm is 0.5 here and 1.0 in AdamW: gradients would be clipped twice",
        ),
        (
            lambda m: [torch.optim.SGD(rest(m)), torch.optim.SGD([nn.Parameter(torch.ones(3))])],
            "group 0 of the optimizer holds a tensor of shape (3,) that is not the model's",
        ),
        (
            lambda m: torch.optim.SGD(m.bfloat16().parameters()),
            "parameter 0.weight (torch.bfloat16); expected tensors of arena.parameters(), the fp32",
        ),
    ],
)
def test_each_trained_tensor_is_in_one_optimizer(opt, message):
    model = net()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ga.TrainStep(model, opt(model), max_norm=MAX_NORM)
    assert ga.Arena.of(model) is None


def test_a_frozen_tensor_needs_no_optimizer_until_it_is_trained():
    model = net()
    arena = ga.Arena(model)
    model[2].weight.requires_grad_(False)
    opt = torch.optim.SGD(rest(model), lr=0.1)
    with ga.TrainStep(model, opt, loss_fn) as step:
        step(batch(0))
        model[2].weight.requires_grad_(True)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ArgumentError, match="no optimizer holds 2.weight"):
            step(batch(1))
        assert all(map(torch.equal, before.values(), model.state_dict().values()))
        opt.add_param_group({"params": [model[2].weight]})
        step(batch(1))
        assert not torch.equal(before["2.weight"], model[2].weight)
    arena.release()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_step_takes_one_optimizer(one_rank):
    message = "sharded=True with Muon, AdamW: .*; expected one optimizer, a ga.AdamW over the arena"
    with pytest.raises(ArgumentError, match=message):
        step_of(net(), distributed=ga.Distributed(ordered=True, sharded=True))


def test_ranks_take_several_optimizers(one_rank):
    def run(distributed):
        with step_of(net(), distributed=distributed) as step:
            for k in range(3):
                step(batch(k))
            return everything(step)

    for got, want in zip(run(ga.Distributed(ordered=True)), run(None), strict=True):
        torch.testing.assert_close(got, want)


# ---- batches -------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x mask")


@dataclasses.dataclass
class Item:
    x: torch.Tensor


def test_a_batch_may_be_nested_and_hold_what_has_no_rows():
    labels, table, scale = ["a", "b", "c"], np.arange(5), torch.tensor(2.0)
    nested = {
        "pair": Pair(torch.arange(6), {"m": torch.arange(12).view(6, 2)}),
        "rest": (3, None, "text", labels, table, scale, [], True),
    }
    micros = split(nested, 4)
    assert [len(micro["pair"].x) for micro in micros] == [2, 2, 1, 1]
    assert torch.equal(
        torch.cat([micro["pair"].mask["m"] for micro in micros]), nested["pair"][1]["m"]
    )
    for micro in micros:
        assert type(micro["pair"]) is Pair and micro["rest"][:3] == (3, None, "text")
        assert micro["rest"][3] == labels and micro["rest"][4] is table
        assert micro["rest"][5] is scale and micro["rest"][6:] == ([], True)


@pytest.mark.parametrize(
    "bad, message",
    [
        (
            (torch.ones(6), {"m": torch.ones(5)}),
            "agree in dim 0.*6 in batch[0], 5 in batch[1]['m']",
        ),
        ((torch.ones(6), Item(torch.ones(6))), "the batch holds an Item, whose tensors would not"),
        ((torch.ones(6), {torch.ones(6)}), "the batch holds a set, whose tensors would not"),
        (
            (3, torch.tensor(1.0)),
            "rows in dim 0 (torch.as_tensor makes one of an array); got a tuple",
        ),
        (torch.zeros(0, 2), "a batch of 0 rows has no micro-batch"),
    ],
)
def test_a_batch_that_cannot_be_split_is_named(bad, message):
    with pytest.raises(ArgumentError, match=re.escape(message).replace(re.escape(".*"), ".*")):
        split(bad, 2)


@pytest.mark.parametrize("replay", ["eager", "graph"])
def test_a_value_that_is_no_tensor_is_never_stale(replay):
    def scaled(model, micro):
        inputs, (kind, scale), weight = micro
        loss = F.mse_loss(model(inputs["x"]), torch.zeros(len(inputs["x"]), 4))
        return (loss if kind == "plain" else 10 * loss) * scale * weight

    with ga.use_backend("simt"), ga.TrainStep(net(), loss_fn=scaled, replay=replay) as step:
        step.optimizers[0].param_groups[0]["lr"] = step.optimizers[0].param_groups[1]["lr"] = 0.0
        x = {"x": torch.ones(4, 8)}

        def loss(kind, scale, weight=1.0):
            return float(step((x, (kind, scale), torch.tensor(weight))).loss)

        one = loss("plain", 1)
        assert loss("plain", 3) == pytest.approx(3 * one)
        assert loss("tenfold", 3) == pytest.approx(30 * one)
        assert loss("plain", 1, weight=7.0) == pytest.approx(7 * one)
        assert loss("plain", 1) == one
        if replay == "graph":
            assert len(step.graphs) == 3, "a value on the device needs no other graph"


def test_a_replayed_step_names_a_value_that_no_graph_can_keep():
    with ga.use_backend("simt"):
        with ga.TrainStep(net(), loss_fn=loss_fn, replay="graph") as step:
            with pytest.raises(ArgumentError, match="expected hashable ones, got ndarray"):
                step((*batch(0), np.ones(3)))
