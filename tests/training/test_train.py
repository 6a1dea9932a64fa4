"""A step is what the plain loop does; a run that was stopped goes on bit-identically; the metrics
file has each step once."""

import copy
import dataclasses
import functools
import json
import shutil
import types
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYWHERE, differ
from torch import nn

from gpuaccel.backends import backend, use_backend
from gpuaccel.distributed.config import Distributed
from gpuaccel.errors import ArgumentError, CaptureError, CheckpointError, DataError
from gpuaccel.measure import Meter
from gpuaccel.nn import fused_forward
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.gradients import Gradients
from gpuaccel.training.data import Batches
from gpuaccel.training.loop import evaluate, train, warmup_cosine
from gpuaccel.training.models import Config, Transformer
from gpuaccel.training.replay import Replay
from gpuaccel.training.step import TrainStep, token_loss

# Autograd adds, or products.
ADDS = pytest.mark.parametrize("how", [{}, {"deterministic": True}], ids=["autograd", "products"])
CONFIG = Config(vocab=19, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, T=8)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Transformer(CONFIG)


def make_batches(seed=0, batch=4):
    tokens = torch.randint(0, 19, (4000,), generator=torch.Generator().manual_seed(5))
    return Batches(tokens, batch, 8, seed=seed)


def plain_loop(model, opt, batches, steps, micro_batches=1, max_norm=None, scheduler=None):
    """What TrainStep promises, written out."""
    losses, norms = [], []
    for _ in range(steps):
        inputs, targets = next(batches)
        opt.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches)):
            loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="sum")
            loss.backward()
            total += loss.item()
        for p in model.parameters():
            p.grad.mul_(1.0 / targets.numel())
        if max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        opt.step()
        if scheduler:
            scheduler.step()
        losses.append(total / targets.numel())
    return losses, norms


@pytest.mark.parametrize("micro_batches", [1, 4])
@ADDS
def test_a_step_equals_the_plain_torch_loop(how, micro_batches):
    """Scheduler and clipping included. One micro-batch: bit-identical. Several: sums in another
    order, so to rounding."""
    model, plain = make_model(), make_model()
    opt, ref = (
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
    )
    schedule, ref_schedule = warmup_cosine(opt, 2, 5), warmup_cosine(ref, 2, 5)
    batches, same = make_batches(), make_batches()
    losses, norms = plain_loop(plain, ref, same, 5, micro_batches, 0.5, ref_schedule)
    with TrainStep(
        model, opt, micro_batches=micro_batches, max_norm=0.5, scheduler=schedule, **how
    ) as step:
        for want_loss, want_norm in zip(losses, norms):
            out = step(next(batches))
            assert (
                abs(out.loss.item() - want_loss) < 1e-4
                and abs(out.norm.item() - want_norm) < 1e-3 * want_norm
            )
            assert out.tokens.item() == 32
    assert opt.param_groups[0]["lr"] == ref.param_groups[0]["lr"] and min(norms) > 0.5, (
        "clipping had nothing to do"
    )
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        if micro_batches == 1 and not how:
            assert torch.equal(p, q), f"{name}: {differ(p, q)}"
        else:
            assert torch.allclose(p, q, rtol=1e-3, atol=2e-4), f"{name}: {differ(p, q)}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_is_the_same_in_torch_and_inside_of_our_adamw(dtype):
    """There the divisor is folded in as well: norms, scales and weights agree to rounding."""
    runs = []
    for optimizer in (torch.optim.AdamW, AdamW):
        arena = Arena(make_model().to(dtype))
        opt = optimizer(arena.parameter_groups(), lr=3e-4)
        if optimizer is AdamW:
            opt = AdamW(arena, lr=3e-4, weight_decay=0.1)
        with TrainStep(arena.module, opt, micro_batches=3, max_norm=0.3) as step:
            outs = [step(batch) for batch, _ in zip(make_batches(), range(4))]
            runs.append((outs, [w.detach().clone() for w in arena.parameters()]))
    assert all(float(out.scale) < 1 for out in outs), "clipping had nothing to do"
    low = dtype == torch.bfloat16
    for out, want in zip(*[outs for outs, _ in runs]):
        for key in ("norm", "clipped_norm", "scale", "loss"):
            value = pytest.approx(float(getattr(want, key)), rel=1e-3 if low else 1e-5)
            assert float(getattr(out, key)) == value, key
    for p, q in zip(*[weights for _, weights in runs]):
        assert torch.allclose(p, q, rtol=0, atol=1e-4 if low else 2e-6), differ(p, q)


@ADDS
def test_a_step_with_nan_is_left_out_and_named(how):
    model, batches = make_model(), make_batches()
    good = [next(batches) for _ in range(3)]

    def loss_fn(module, micro):
        total, tokens = token_loss(module, micro)
        return total * poison, tokens

    how = how | {"loss_fn": loss_fn, "max_norm": 1.0, "micro_batches": 2}
    with TrainStep(model, **how) as step:
        poison = 1.0
        step(good[0])
        before = {name: t.clone() for name, t in model.state_dict().items()}
        poison = float("nan")
        out = step(good[1])
        assert (
            not out.finite
            and step.optimizers[0].skipped == 1
            and step.optimizers[0].last_skip()["step"] == 2
        )
        assert step.optimizers[0].last_skip()["tensor"] in before
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        poison = 1.0
        assert step(good[2]).finite and step.optimizers[0].skipped == 1
        after = {name: t.clone() for name, t in model.state_dict().items()}
    with TrainStep(twin := make_model(), **how) as step:
        for batch in (good[0], good[2]):
            step(batch)
        assert all(torch.equal(t, after[name]) for name, t in twin.state_dict().items()), (
            "the next step was not as if nothing had been"
        )


def test_norms_of_blocks_reach_the_meter_as_one():
    arena = Arena(make_model())
    step = TrainStep(arena.module, AdamW(arena, max_norm=1e-3, scope="block"))
    readings = list(train(step, make_batches(), 2))
    out = step(next(make_batches()))
    assert out.norm.shape == (len(arena.blocks),) and bool((out.clipped_norm <= 1e-3).all())
    assert (
        readings[-1].norm
        > readings[-1].clipped_norm
        == pytest.approx(1e-3 * len(arena.blocks) ** 0.5, rel=1e-2)
    )
    step.close()


def test_without_max_norm_nothing_is_clipped():
    model = make_model()
    with TrainStep(model, torch.optim.SGD(model.parameters())) as step:
        assert step(next(make_batches())).norm is None
    with TrainStep(model) as step:
        out = step(next(make_batches()))
        assert (
            out.scale == 1
            and out.norm == out.clipped_norm
            and out.finite
            and out.loss.numel() == 1
            and not out.loss.requires_grad
            and step.count == 1
        )


def test_a_default_optimizer_decays_matrices_only():
    with TrainStep(make_model()) as step:
        assert isinstance(step.optimizers[0], torch.optim.AdamW)
        decays = {
            (g["weight_decay"], p.dim() >= 2)
            for g in step.optimizers[0].param_groups
            for p in g["params"]
        }
        assert decays == {(0.1, True), (0.0, False)}


@ADDS
def test_a_loss_fn_that_returns_a_mean_is_averaged_over_micro_batches(how):
    def mean_loss(model, micro):
        return F.cross_entropy(model(micro["x"]).flatten(0, 1), micro["y"].flatten())

    model, plain = make_model(), make_model()
    x, y = next(make_batches(batch=8))
    mean_loss(plain, {"x": x, "y": y}).backward()
    want = plain.lm_head.weight.detach() - plain.lm_head.weight.grad
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    with TrainStep(model, opt, mean_loss, micro_batches=4, **how) as step:
        out = step({"x": x, "y": y})
        assert (
            out.tokens is None
            and abs(out.loss.item() - mean_loss(plain, {"x": x, "y": y}).item()) < 1e-5
        )
        assert torch.allclose(model.lm_head.weight, want, atol=1e-6), differ(
            model.lm_head.weight, want
        )


@pytest.mark.parametrize("failing", ["the compilation", "the end", "the capture"])
def test_a_step_that_cannot_be_made_leaves_nothing_behind(failing, monkeypatch):
    """The caller's arena stays; products and hooks go, the optimizer's settings are as before."""
    model = make_model()
    arena = Arena(model)
    opt = AdamW(arena)
    hooks = [len(p._post_accumulate_grad_hooks) for p in arena.module_parameters]
    options = {"max_norm": 0.5, "deterministic": True}

    def fails(*args, **kwargs):
        raise MemoryError("no more")

    if failing == "the compilation":
        monkeypatch.setattr(torch, "compile", fails)
        options |= {"compile": True, "distributed": Distributed(ordered=True)}
    elif failing == "the end":
        monkeypatch.setattr(Gradients, "clear", fails)
        options |= {"distributed": Distributed(ordered=True)}
    else:
        options |= {"replay": Replay(policy="require")}
    with use_backend("torch"), pytest.raises((MemoryError, CaptureError)):
        TrainStep(model, opt, **options)
    assert Arena.of(model) is arena and not arena.before_release
    assert opt.max_norm is None and opt.explain_skip is None
    assert not any(map(fused_forward, model.modules()))
    assert [len(p._post_accumulate_grad_hooks) for p in arena.module_parameters] == hooks
    monkeypatch.undo()
    with TrainStep(model, opt) as step:
        assert step(next(make_batches())).loss.isfinite()


@pytest.mark.parametrize("ours", [True, False])
def test_a_max_norm_of_zero_scales_every_gradient_to_zero(ours):
    """As torch.nn.utils.clip_grad_norm_: a way to hold the weights, decay apart."""
    model = make_model()
    arena = Arena(model)
    if ours:
        opt = AdamW(arena, lr=0.1, weight_decay=0.0)
    else:
        opt = torch.optim.SGD(arena.parameters(), lr=0.1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with TrainStep(model, opt, max_norm=0) as step:
        out = step(next(make_batches()))
    assert out.norm > 0 and out.scale == 0 and out.clipped_norm == 0 and out.finite
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_loss_fn_that_returns_no_number_is_refused():
    model = make_model()
    with TrainStep(model, loss_fn=lambda m, micro: m(micro[0])) as step:
        with pytest.raises(
            ArgumentError, match="loss_fn returned Tensor; expected a one-element tensor"
        ):
            step(next(make_batches()))
        assert step.count == 0 and not any(step.arena.gradients.received())


def test_close_gives_an_ordinary_module_back():
    model = make_model()
    with TrainStep(model, deterministic=True) as step:
        step(next(make_batches()))
    assert Arena.of(model) is None and all(p.grad is None for p in model.parameters())
    token_loss(model, next(make_batches()))[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_close_leaves_an_arena_that_the_caller_made():
    model = make_model()
    arena = Arena(model)
    opt = AdamW(arena)
    for deterministic in (True, False):
        with TrainStep(model, opt, deterministic=deterministic) as step:
            step(next(make_batches()))
        assert Arena.of(model) is arena and not any(map(fused_forward, model.modules()))
        arena.check()
    assert opt.state[arena.parameters()[0]]["step"] == 2
    arena.release()
    assert Arena.of(model) is None


def test_targets_that_do_not_count_are_left_out():
    model = make_model()
    x, y = next(make_batches())
    y = y.clone()
    y[:, 3:] = -100
    total, tokens = token_loss(model, (x, y))
    want = F.cross_entropy(model(x)[:, :3].flatten(0, 1), y[:, :3].flatten(), reduction="sum")
    assert tokens.item() == 12 and torch.allclose(total, want)
    with TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step:
        out = step((x, torch.full_like(y, -100)))  # nothing to learn: no NaN
        assert out.loss.item() == 0 and all(p.isfinite().all() for p in model.parameters())


def test_warmup_then_cosine():
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = warmup_cosine(opt, 4, 12, floor=0.1), []
    for _ in range(15):
        rates.append(opt.param_groups[0]["lr"])
        opt.step(), schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:12] == sorted(rates[4:12], reverse=True) and abs(rates[8] - 0.55) < 1e-9
    assert [round(r, 9) for r in rates[12:]] == [0.1] * 3


def test_evaluate_is_the_mean_per_token_and_leaves_the_mode():
    model = make_model()
    a, b = next(make_batches()), next(make_batches(batch=2))
    b[1][:, 2:] = -100
    sums = [token_loss(model, batch) for batch in (a, b)]
    want = (sums[0][0] + sums[1][0]).item() / (32 + 4)
    model.train()
    assert abs(evaluate(model, [a, b]) - want) < 1e-5 and model.training


def test_evaluate_takes_a_mean_and_leaves_modules_in_the_mode_that_they_are_in():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[1].eval()
    batches = [torch.ones(3, 2), torch.zeros(3, 2)]
    mean = evaluate(model, batches, lambda model, x: model(x).sum())
    with torch.no_grad():
        want = sum(model[1](model[0](x)).sum().item() for x in batches) / 2
    assert mean == pytest.approx(want, abs=1e-6)
    assert [m.training for m in model] == [True, False, True] and model.training
    assert model[1].num_batches_tracked == 0


def test_train_validates_with_the_loss_of_the_step():
    """A mean of outputs that are no logits, over a generator of batches, evaluated twice."""
    x, y = torch.ones(4, 2), torch.zeros(4, 1)

    def loss(model, micro):
        return (model(micro[0]) - micro[1]).square().mean()

    model = nn.Linear(2, 1)
    with TrainStep(model, loss_fn=loss) as step:
        val = (batch for batch in [(x, y)])
        readings = list(train(step, [(x, y)] * 2, 2, val=val, val_every=1))
        assert readings[-1].val_loss == pytest.approx(loss(model, (x, y)).item())
        assert readings[0].val_loss > readings[1].val_loss


def test_autocast_and_meter_are_stages_of_a_step():
    model = make_model()
    meter = Meter("cpu")
    with TrainStep(model, autocast=torch.bfloat16, meter=meter, max_norm=1.0) as step:
        seen = []
        step.loss_fn = lambda m, micro: (
            seen.append(torch.is_autocast_enabled("cpu")) or token_loss(m, micro)
        )
        step(next(make_batches()))
        assert seen == [True] and all(p.dtype == torch.float32 for p in model.parameters())
        assert {"forward", "backward", "accumulate", "optimizer", "zero"} == set(
            meter.timer.poll()
        )  # clipping is in the optimizer
    opt = torch.optim.SGD(model.parameters())
    with TrainStep(model, opt, meter=meter, max_norm=1.0) as step:
        step(next(make_batches()))
        assert "clip" in meter.timer.poll()


# ---- the loop around it ----


def run(
    folder, steps, deterministic=False, resume=False, stop_at=None, dtype=torch.float32, every=3
):
    """A run with everything that has a state: Adam, scheduler, data position, dropout's random
    numbers. Returns losses, weights."""
    torch.manual_seed(1)
    model = make_model().to(dtype)
    arena = Arena(model)
    opt = torch.optim.AdamW(arena.parameter_groups(), lr=1e-2)

    def loss_fn(m, micro):
        total, tokens = token_loss(m, micro)
        return total * (1 + 0.1 * torch.rand(())), tokens  # draws from the global generator

    losses = []
    with TrainStep(
        model,
        opt,
        loss_fn,
        micro_batches=2,
        deterministic=deterministic,
        max_norm=1.0,
        scheduler=warmup_cosine(opt, 2, 9),
    ) as step:
        for reading in train(
            step,
            make_batches(),
            steps,
            log=folder / "run.jsonl",
            checkpoint_dir=folder / "checkpoints",
            checkpoint_every=every,
            resume=resume,
        ):
            losses.append(reading.step)
            if reading.step == stop_at:
                break
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, weights


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, dtype, killed):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    steps, want = run(whole, 9, killed, dtype=dtype)
    assert steps == list(range(1, 10))
    assert run(stopped, 9, killed, stop_at=4, dtype=dtype)[0] == [1, 2, 3, 4]
    newest = max((stopped / "checkpoints").iterdir())
    if killed:  # the checkpoint of the break is not there
        newest.unlink()
    steps, got = run(stopped, 9, killed, resume=True, dtype=dtype)
    assert steps == list(range(4 if killed else 5, 10))
    for name in want:
        assert torch.equal(got[name], want[name]), (
            f"{name}: {differ(got[name].float(), want[name].float())}"
        )
    lines, reference = (
        [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
        for folder in (stopped, whole)
    )
    assert [row["step"] for row in lines] == list(range(1, 10)), (
        "a step is missing from the metrics, or is there twice"
    )
    same = [row["loss"] for row in lines] == [row["loss"] for row in reference]
    assert same, "a loss after the resume has other bits"
    assert all({"lr", "tokens", "tokens_per_s"} <= set(row) for row in lines) and [
        row["lr"] for row in lines
    ] == [row["lr"] for row in reference]


def test_an_error_where_a_batch_is_made_writes_no_checkpoint(tmp_path):
    """The data have moved on, and the weights have not."""

    def batches():
        yield from [torch.ones(2, 2)] * 3
        raise OSError("no more")

    def loss(model, x):
        return model(x).mean()

    with TrainStep(nn.Linear(2, 1), loss_fn=loss) as step:
        with pytest.raises(OSError, match="no more"):
            list(train(step, batches(), 9, checkpoint_dir=tmp_path, checkpoint_every=2))
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000002.safetensors"]
        # Batches that end are no error.
        assert len(list(train(step, [torch.ones(2, 2)], 9, checkpoint_dir=tmp_path))) == 1
        assert (tmp_path / "step-00000004.safetensors").exists()


def test_resume_without_a_checkpoint_begins_and_after_the_end_does_nothing(tmp_path):
    assert run(tmp_path, 3, resume=True)[0] == [1, 2, 3]
    assert run(tmp_path, 3, resume=True)[0] == []
    assert run(tmp_path, 4, resume=True)[0] == [4]


def test_batches_without_a_position_begin_again_with_a_warning(tmp_path, caplog):
    for batches, warnings in ((list(islice(make_batches(), 4)), 1), (make_batches(), 0)):
        for steps in (1, 2):
            with TrainStep(make_model()) as step:
                folder = tmp_path / type(batches).__name__
                list(train(step, batches, steps, checkpoint_dir=folder, resume=True))
        assert sum("a list has no state_dict()" in r.message for r in caplog.records) == warnings
        caplog.clear()


def test_a_damaged_checkpoint_is_an_error_that_has_the_older_whole_ones(tmp_path):
    """They are not taken in silence; resume=path does."""
    run(tmp_path, 9)
    newest, middle, oldest = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    for damaged in (newest, middle):
        damaged.write_bytes(damaged.read_bytes()[:-1])
    message = f"{newest.name} cannot be read.*older ones that are whole: {oldest.name}"
    with pytest.raises(CheckpointError, match=message) as error:
        run(tmp_path, 10, resume=True)
    assert error.value.older == [oldest]
    assert run(tmp_path, 10, resume=oldest)[0] == list(range(4, 11))
    with pytest.raises(CheckpointError, match="elsewhere is not a file.*are whole: none"):
        run(tmp_path, 10, resume=tmp_path / "elsewhere")


def test_a_checkpoint_of_another_model_has_no_others_to_offer(tmp_path, monkeypatch):
    run(tmp_path, 6)
    wider = dataclasses.replace(CONFIG, intermediate=32)
    monkeypatch.setitem(make_model.__globals__, "CONFIG", wider)
    with pytest.raises(CheckpointError, match="does not fit this model") as error:
        run(tmp_path, 7, resume=True)
    assert error.value.older == [] and "whole" not in str(error.value)


def test_a_run_reports_validation_and_keeps_the_newest_checkpoints(tmp_path):
    model = make_model()
    val = [next(make_batches(seed=9))]
    with TrainStep(model) as step:
        readings = list(
            train(
                step,
                make_batches(),
                5,
                val=val,
                val_every=2,
                log=tmp_path / "deep" / "run.jsonl",
                checkpoint_dir=tmp_path / "c",
                checkpoint_every=1,
                keep=2,
            )
        )
        assert abs(evaluate(model, val) - readings[-1].val_loss) < 1e-9
    assert [r.step for r in readings] == [1, 2, 3, 4, 5] and readings[-1].tokens == 5 * 32
    rows = [json.loads(line) for line in (tmp_path / "deep" / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 5]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "step-00000004.safetensors",
        "step-00000005.safetensors",
    ]


def test_a_metrics_file_that_cannot_be_written_is_an_error_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with TrainStep(make_model()) as step:
        with pytest.raises(DataError, match="log is .*run.jsonl, which cannot be written"):
            next(iter(train(step, make_batches(), 1, log=tmp_path / "file" / "run.jsonl")))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["the loss", "the model", "its blocks"])
@ADDS
def test_a_compiled_step_has_one_graph_for_each_shape_and_no_break(how, compiled, monkeypatch):
    """Of bf16 weights, also for a shape that is new while gradients stand, which are fp32."""
    counters, model = torch._dynamo.utils.counters, make_model().bfloat16()
    compiler = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset(), counters.clear()
    parts = {"the loss": [], "the model": [model], "its blocks": model.blocks}[compiled]
    for part in parts:
        part.compile(dynamic=False, backend="eager")
    lengths = [(8, 8), (8, 6, 8), (6, 8), (5, 6), (8, 5)]
    with TrainStep(model, compile=not len(parts), max_norm=1.0, **how) as step:
        for micros in lengths:
            step([tuple(t[:, :T] for t in next(make_batches())) for T in micros])
    torch._dynamo.reset()
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 3


@pytest.mark.gpu
@ADDS
def test_gpu_compiled_step_follows_the_eager_one(how):
    """bf16 weights, fp32 masters, torch.compile over the loss: the losses stay together."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("torch.compile on a GPU (triton) needs a C compiler, and there is none")
    torch._dynamo.reset()
    losses = {}
    for compiled in (False, True):
        model = make_model().to("cuda", torch.bfloat16)
        with TrainStep(model, micro_batches=2, compile=compiled, max_norm=1.0, **how) as step:
            batches = make_batches()
            losses[compiled] = [
                step(tuple(t.cuda() for t in next(batches))).loss.item() for _ in range(4)
            ]
    assert all(abs(a - b) < 0.05 for a, b in zip(losses[False], losses[True])), losses


def test_a_model_that_returns_no_tensor_says_what_to_do_instead():
    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return types.SimpleNamespace(logits=self.layer(x))

    batch, model = (torch.randn(2, 4), torch.zeros(2, dtype=torch.long)), Output()
    with (
        TrainStep(model) as step,
        pytest.raises(
            ArgumentError, match="the model returned SimpleNamespace; token_loss takes logits"
        ),
    ):
        step(batch)
    with TrainStep(
        model, loss_fn=lambda model, micro: token_loss(lambda x: model(x).logits, micro)
    ) as step:
        assert step(batch).loss.isfinite()


@pytest.mark.parametrize("replay", ["eager", "graph"])
@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("device", EVERYWHERE, indirect=True)
def test_a_last_short_batch_has_fewer_micro_batches(device, means, replay):
    """Batches of 8, 3 and 1 rows, 4 micro-batches: the steps of a loop over whole batches."""
    if replay == "graph" and backend().name == "torch":
        pytest.skip("nothing is captured")

    def loss_fn(model, x):
        loss = model(x).square()
        return loss.mean() if means else (loss.sum(), loss.numel())

    torch.manual_seed(0)
    model = nn.Linear(6, 1).to(device)
    other = copy.deepcopy(model)
    arena = Arena(model)
    opt = torch.optim.AdamW(other.parameters(), lr=0.1)
    batches = torch.randn(12, 6, device=device).split([8, 3, 1])
    ours = AdamW(arena.parameters(), lr=0.1)
    with TrainStep(model, ours, loss_fn, micro_batches=4, replay=replay) as step:
        for x in batches:
            loss = other(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            torch.testing.assert_close(step(x).loss, loss.detach())
        assert step.replays == replay
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q)
