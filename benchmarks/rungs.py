"""The ledger rows of every notebook, recorded: python benchmarks/rungs.py

Needs a GPU and less than two minutes. With several GPUs the last ladder has one more row.

For each notebook with a ledger, the variants that it compares, at the sizes that it uses on a GPU:
tokens/s (median of steps that are queued back to back) and what the host did in one step (ledger).
Beside these, whatever the notebook measures:

02: the largest difference of the weights after one step from those of the first variant.
03: whether eager and replayed steps are bit-identical, in deterministic mode.
04: whether two runs are bit-identical.
05: the largest difference of the logits from the same weights in float64.
07: whether two runs are bit-identical, and the largest difference of a loss from the first rung's.

`recorded.ledger("02")` shows the rows in a notebook.
"""

import contextlib
import copy
import statistics

import memory
import torch
from common import DEVICE, Clock, measuring_here, plain, write
from tables import Column, Table, integer, scientific, show, thousands, yes_or_no
from timing import queued, release
from training import build

from gpuaccel.backends import use_backend
from gpuaccel.distributed.config import Distributed
from gpuaccel.distributed.spawn import launch
from gpuaccel.measure.ledger import Row, ledger
from gpuaccel.nn.embedding import deterministic_embeddings
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.data import Batches, make_dataset
from gpuaccel.training.models import preset
from gpuaccel.training.step import TrainStep

# The model of 02, 04 and 07 on a GPU: 120 million weights.
LARGE = preset("llama-350m", vocab=256, layers=8)
SMALL = preset("tiny")
# Of 05: the sizes that both families have.
SHAPE = dict(layers=8, hidden=256, intermediate=768, heads=8, kv_heads=8, T=512)
# Sequences of a step, by notebook.
ROWS = {"02": 16, "03": 8, "04": 16, "05": 16, "07": 16}
# GiB of memory for so many.
GIB = 60
# Steps that are timed, of two runs that are compared, and of 07's losses.
CALLS = 6
STEPS = 3
LOSSES = 10

# What the ladder of 07 changes from rung to rung; each keeps the changes before it.
RUNGS = {
    "torch's optimizer": {},
    "fused clip": dict(clip="fused"),
    "one graph": dict(replay="graph"),
    "deterministic": dict(deterministic=True),
}


def text(T: int, rows: int, count: int = 1, rank: int = 0, ranks: int = 1) -> list:
    """Batches of the standard library's text, as bytes: they need a vocabulary of 256."""
    tokens = make_dataset(max_bytes=2_000_000).train
    batches = Batches(tokens, rows, T, rank=rank, ranks=ranks, device=DEVICE)
    return [next(batches) for _ in range(count)]


def adamw(arena: Arena, clip: str) -> torch.optim.Optimizer:
    """AdamW of a step that clips with torch's function ("torch") or inside ga.AdamW ("fused")."""
    if clip == "fused":
        return AdamW(arena, lr=3e-4, weight_decay=0.1)
    return torch.optim.AdamW(arena.parameter_groups(weight_decay=0.1), lr=3e-4, fused=True)


# ---- a row --------------------------------------------------------------------------------------


def counted(name: str, step: TrainStep, batch, **measured) -> dict:
    """Rate and ledger of a step; `measured` is kept beside them."""
    step(batch)
    ms = statistics.median(queued(lambda: step(batch), CALLS))
    with ledger(name) as row:
        step(batch)
    return {
        "tokens_per_s": batch[0].numel() / ms * 1e3,
        **counts(row),
        **measured,
    }


def counts(row: Row) -> dict:
    return {
        "launches": row.launches,
        "graph_launches": row.graph_launches,
        "syncs": row.syncs,
        "copies": {direction: list(copies) for direction, copies in (row.copies or {}).items()},
    }


def trained(step: TrainStep, batches) -> "tuple[torch.Tensor, torch.Tensor]":
    """The losses, and the weights after these steps."""
    losses = torch.stack([step(batch).loss for batch in batches])
    return losses, step.arena.weights.clone()


# ---- the notebooks ------------------------------------------------------------------------------


def clipping(config, rows: int) -> dict:
    """02: clipped by torch's function, or inside ga.AdamW."""
    (batch,) = text(config.T, rows)
    results = {}
    first = None
    for clip in ("torch", "fused"):
        model = build(config, torch.bfloat16)
        arena = Arena(model)
        optimizer = adamw(arena, clip)
        with TrainStep(model, optimizer, max_norm=1.0) as step:
            _, weights = trained(step, [batch])
            first = weights if first is None else first
            difference = float((weights - first).abs().max())
            results[clip] = counted(clip, step, batch, max_diff=difference)
        del model, arena, optimizer, step, weights
        release()
    return results


def replaying(config, rows: int) -> dict:
    """03: launched by Python, or replayed from one graph."""

    def make(replay: str, deterministic: bool) -> TrainStep:
        model = build(config)
        optimizer = AdamW(Arena(model), lr=3e-3, weight_decay=0.1, max_norm=1.0)
        options = dict(replay=replay, deterministic=deterministic)
        return TrainStep(model, optimizer, micro_batches=2, **options)

    batches = text(config.T, rows, STEPS)
    runs = [trained(make(replay, True), batches) for replay in ("eager", "graph")]
    identical = all(a.equal(b) for a, b in zip(*runs))
    results = {}
    for name, replay in (("eager", "eager"), ("replayed", "graph")):
        with make(replay, False) as step:
            results[name] = counted(name, step, batches[0], bit_equal=identical)
            results[name]["ran"] = step.replays
    return results


def embeddings(config, rows: int) -> dict:
    """04: the cost of the same result every time."""
    batches = text(config.T, rows, STEPS)

    def make(variant: str) -> TrainStep:
        model = build(config, torch.bfloat16)
        if variant == "ours":
            deterministic_embeddings(model)
        optimizer = AdamW(Arena(model), lr=3e-4, max_norm=1.0)
        return TrainStep(model, optimizer, deterministic=variant != "torch")

    results = {}
    for variant in ("torch", "torch deterministic", "ours"):
        weights = []
        for _ in range(2):
            with make(variant) as step:
                weights.append(trained(step, batches)[1])
        with make(variant) as step:
            identical = weights[0].equal(weights[1])
            results[variant] = counted(variant, step, batches[0], bit_equal=identical)
        del step, weights
        release()
    return results


def layers(shape: dict, rows: int) -> dict:
    """05: softmax, or a polynomial; by definition, or by kernels of its own."""
    results = {}
    for name, family in (("softmax", "tiny"), ("in torch", "poly-7m"), ("gpuaccel", "poly-7m")):
        with use_backend("torch") if name == "in torch" else contextlib.nullcontext():
            config = preset(family, **shape)
            model = build(config, torch.bfloat16)
            (batch,) = text(config.T, rows)
            with torch.no_grad():
                exact = copy.deepcopy(model).double()(batch[0][:2])
                difference = float((model(batch[0][:2]) - exact).abs().max())
            optimizer = AdamW(Arena(model), lr=1e-3, max_norm=1.0)
            with TrainStep(model, optimizer) as step:
                results[name] = counted(name, step, batch, max_diff=difference)
    return results


def ladder_step(config, options: dict, distributed: "Distributed | None" = None) -> TrainStep:
    """A step of the ladder. options: all that its rung and those below it have changed."""
    options = {"clip": "torch", **options}
    model = build(config, torch.bfloat16)
    if options.get("deterministic"):
        deterministic_embeddings(model)
    arena = Arena(model)
    optimizer = adamw(arena, options.pop("clip"))
    return TrainStep(
        model, optimizer, micro_batches=4, max_norm=1.0, distributed=distributed, **options
    )


def ladder(config, rows: int, ranks: int = 1) -> dict:
    """07: one model on every rung. ranks: of the last row, which is left out with one."""
    batches = text(config.T, rows, LOSSES)
    results = {}
    options = {}
    first = None
    for name, change in RUNGS.items():
        options.update(change)
        with ladder_step(config, options) as step:
            losses, weights = trained(step, batches)
        with ladder_step(config, options) as step:
            again = trained(step, batches)
            identical = losses.equal(again[0]) and weights.equal(again[1])
            first = losses if first is None else first
            difference = float((losses - first).abs().max())
            results[name] = counted(
                name, step, batches[0], bit_equal=identical, max_diff=difference
            )
            results[name]["ran"] = step.replays
        del step, weights, again
        release()
    if ranks > 1:
        results[f"{ranks} ranks"] = launch(on_a_rank, ranks, (config, options, rows))[0]
    return results


def on_a_rank(config, options: dict, rows: int) -> dict:
    """The row of one rank of several; tokens per second are those of all ranks together."""
    distributed = Distributed()
    if distributed.backend != "nccl":
        options = {**options, "replay": "eager"}
    with ladder_step(config, options, distributed) as step:
        world = step.reducer.world
        (batch,) = text(config.T, rows, rank=step.reducer.rank, ranks=world)
        row = counted(f"{world} ranks", step, batch)
        row["tokens_per_s"] *= world
        row["ran"] = step.replays
    return row


# ---- the script ---------------------------------------------------------------------------------


def described(config, rows: int) -> str:
    """Model and batch in words."""
    model = config.build()
    weights = sum(p.numel() for p in model.parameters())
    return f"{weights / 1e6:.3g} million weights, {rows} sequences of {config.T} tokens in a step"


def measure(large=LARGE, small=SMALL, shape=SHAPE, rows=ROWS, ranks: int = 1) -> dict:
    clock = Clock()
    parts = {
        "02": (clipping, large, "bf16 weights"),
        "03": (replaying, small, "fp32 weights, 2 micro-batches"),
        "04": (embeddings, large, "bf16 weights"),
        "05": (layers, shape, "bf16 weights"),
        "07": (ladder, large, "bf16 weights, 4 micro-batches"),
    }
    results = {}
    for notebook, (part, sizes, details) in parts.items():
        options = {"ranks": ranks} if part is ladder else {}
        config = preset("poly-7m", **sizes) if part is layers else sizes
        what = f"{described(config, rows[notebook])}; {details}"
        results[notebook] = {"what": what, "rows": part(sizes, rows[notebook], **options)}
        release()
        clock.say(f"{notebook}: {', '.join(results[notebook]['rows'])}")
    return results


def tables(results: dict) -> "dict[str, Table]":
    columns = [
        Column("training", "name"),
        Column("tokens/s", "tokens_per_s", thousands),
        Column("launches", "launches", integer),
        Column("graph launches", "graph_launches", integer),
        Column("host waits", "syncs", integer),
        Column("difference", "max_diff", scientific),
        Column("bit-identical", "bit_equal", yes_or_no),
    ]
    return {
        f"{notebook}: {result['what']}": Table(
            columns, [{"name": name, **m} for name, m in result["rows"].items()]
        )
        for notebook, result in results.items()
    }


def main():
    rows, size = ROWS, None
    if memory.available_GiB() < GIB:
        # Four micro-batches need four.
        rows = {notebook: max(4, count // 8) for notebook, count in ROWS.items()}
        size = "an eighth of the sequences, at least four"
    with measuring_here():
        results = measure(rows=rows, ranks=torch.cuda.device_count())
        write("rungs", results, size=size)
        show(tables(plain(results)))


if __name__ == "__main__":
    main()
