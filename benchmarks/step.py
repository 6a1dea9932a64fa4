"""A whole optimizer step against the best that torch alone can do: python benchmarks/step.py

Needs a GPU with 80 GB and four minutes. Parts: 1024, 256 (T).

llama-350m, batch 4, 4 micro-batches, AdamW with decay of matrices, clipped at 1.0. What both sides
are given is in step_variants.py. Steps replayed from a CUDA graph, and the same compiled and
launched from Python; ours also with deterministic=True. Ratios are against the fastest peer of the
same T and kind.

Each variant has a process of its own. Those of one T compile side by side. Then each is prepared
alone, which gives its peak of allocated memory. They are measured in turns. Times are those of
steps that are queued back to back, as in a training loop; launched ones by the host's clock over
some steps and one synchronization. At the end of each T the limit of its step is measured
(limits.py).

mode="max-autotune-no-cudagraphs" of torch.compile, which tries Triton's products beside cuBLAS's,
is not here: on an H100 it compiled for 295 s, and its step was no faster.
"""

import functools

import torch
from common import DEVICE, Clock, record
from limits import Limit
from step_variants import EXACT, KINDS, LAUNCHED, REPLAYED, Ours, Task, fastest, makers, measured
from tables import Column, Table, number, ratio, share, tenths, thousands
from timing import OURS
from training import build, token_batch
from workers import Workers

from gpuaccel.measure import peak_flops
from gpuaccel.training.models import flops_per_token

# Sequences of a micro-batch.
B = 4
LENGTHS = (1024, 256)
LIMIT = ("limit", "", "")


def task(config, T: int) -> Task:
    make_batch = functools.partial(token_batch, config.vocab, B * Task.micro_batches, T)
    return Task(functools.partial(build, config), make_batch)


def measure(config, T: int, here=False) -> dict:
    """ "rows" and "launched": variant -> measurement; "limit"."""
    clock, what = Clock(), task(config, T)
    variants = {
        **makers(what),
        (EXACT, REPLAYED, ""): (Ours, what, REPLAYED, True),
        LIMIT: (Limit, config, B, T, what.micro_batches),
    }
    with Workers(variants, here) as workers:
        workers.ready()
        clock.say(f"T = {T}: compiled")
        kinds = {kind: measured(workers, kind, clock, groups=True) for kind in KINDS}
        workers.close(*(key for key in workers.names if key != LIMIT))
        limit = workers.ask(LIMIT, "measure")
    peak = peak_flops(DEVICE, torch.bfloat16)
    for rows in kinds.values():
        for row in rows.values():
            row["tokens_per_s"] = B * what.micro_batches * T / row["ms"] * 1e3
            done = row["tokens_per_s"] * flops_per_token(config, T)
            row["mfu"] = done / peak if peak else None
            row["of_limit"] = limit["ms"] / row["ms"]
    return {"rows": kinds[REPLAYED], "launched": kinds[LAUNCHED], "limit": limit}


# ---- tables of whole steps ----------------------------------------------------------------------

STEP = [
    Column("step", "step"),
    Column("ms", "ms", number),
    Column("tokens/s", "tokens_per_s", thousands),
    Column("against torch", "times_torch", ratio),
    Column("of the limit", "of_limit", share),
    Column("MFU", "mfu", share),
    Column("peak GiB", "peak_GiB", tenths),
    Column("compile s", "compile_s", number),
    Column("capture s", "capture_s", tenths),
]
# The parts of a limit that are other kernels have the name "bytes" (limits.py).
WHERE = [
    Column("ms in", "step"),
    Column("products", "products", tenths),
    Column("attention", "attention", tenths),
    Column("other kernels", "rest", tenths),
    Column("tail", "tail", tenths),
    Column("between them", "between", tenths),
    Column("sum", "ms", tenths),
]
COMPUTING = "products", "attention", "rest", "tail"


def steps_table(steps: dict) -> Table:
    """steps: label -> variant -> measurement."""
    rows = [
        {"step": f"{label}: {name}", **m}
        for label, variants in steps.items()
        for name, m in variants.items()
    ]
    return Table(STEP, rows)


def time_table(steps: dict, limits: dict) -> Table:
    """The limit, ours and the fastest torch in groups of kernels (traces.py).

    limits: label -> limit"""
    parts = []
    for label, variants in steps.items():
        if label in limits:
            limit = {"step": f"{label}: limit", **limits[label]["parts"], "ms": limits[label]["ms"]}
            parts.append({**limit, "rest": limit["bytes"]})
        peer = fastest({name: m["ms"] for name, m in variants.items()})
        for name in (*(n for n in variants if n.startswith(OURS)), peer):
            groups, ms = variants[name]["groups"], variants[name]["ms"]
            between = ms - sum(groups[part] for part in COMPUTING)
            parts.append({**groups, "step": f"{label}: {name}", "ms": ms, "between": between})
    return Table(WHERE, parts)


def tables(results: dict) -> dict[str, Table]:
    """ "steps", and "time": where it goes."""
    kinds = {"": "rows", ", launched": "launched"}
    steps = {
        f"T={T}{words}": r[kind]
        for words, kind in kinds.items()
        for T, r in results.items()
        if kind in r
    }
    limits = {f"T={T}": r["limit"] for T, r in results.items()}
    return {"steps": steps_table(steps), "time": time_table(steps, limits)}


def main():
    record(
        "step", {str(T): lambda config, T=T: measure(config, T) for T in LENGTHS}, tables, GiB=70
    )


if __name__ == "__main__":
    main()
