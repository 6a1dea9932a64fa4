"""A whole optimizer step against the best that torch alone can do: python benchmarks/step.py

Needs a GPU with 80 GB and six minutes.

llama-350m, batch 4, 4 micro-batches, T = 1024 and T = 256, AdamW with decay of matrices, clipped at
1.0. What both sides are given is in step_variants.py. The peers in torch:

torch: fp32 weights under bf16 autocast, torch.compile as it is.
torch, bf16 weights: bf16 weights with fp32 masters and fp32 sums, as FSDP2's mixed precision.
torch, Liger-Kernel: bf16 weights as above, and Liger-Kernel's fused linear cross-entropy, where
liger_kernel is installed. Its RMSNorm is not used: torch 2.11 cannot tell what a compiled call of
it (0.8.5) writes, so it copies all inputs of each; torch.compile fuses torch's own norms.

mode="max-autotune-no-cudagraphs" of torch.compile, which tries Triton's products beside cuBLAS's,
is not here: on an H100 it compiled for 295 s, and its step was no faster. Bf16Peer's `mode` is for
those who want to try.

Ours: bf16 weights with fp32 masters; the same with deterministic=True. Ratios are against the
fastest peer of the same T.

With T = 1024 also steps that are launched from Python, ours and torch's with bf16 weights.

Each variant has a process of its own. Those of one T, first of the shorter one, compile side by
side. Then each is captured alone, which gives its peak of allocated memory from warm-up to replay.
They are measured in turns, and end. Times are those of steps that are queued back to back, as in a
training loop. At the end of each T its limit is measured (limits.py), and then launched steps, by
the host's clock over some steps and one synchronization.
"""

import functools

import torch
from common import DEVICE, Clock, record
from limits import Limit
from step_variants import (
    BF16,
    Attempt,
    Bf16Peer,
    LigerPeer,
    Ours,
    Peer,
    Task,
    fastest,
    launched,
    measured,
)
from tables import Column, Table, number, ratio, share, tenths, thousands
from timing import OURS
from training import build
from workers import Workers

from gpuaccel.measure import peak_flops
from gpuaccel.training.models import flops_per_token

# Sequences of a micro-batch.
B = 4
LENGTHS = (1024, 256)
PEER = "torch"
LIGER = "torch, Liger-Kernel"
EXACT = "ours, deterministic"
LIMIT = "limit"
VARIANTS = (PEER, BF16, LIGER, OURS, EXACT)


def task(config, T: int) -> Task:
    return Task(functools.partial(build, config), config.vocab, B, T)


def measure(config, lengths=LENGTHS, here=False) -> dict:
    """T -> variant -> measurement; beside them "limits": T -> the limit of a step, "left_out":
    T -> variant -> why it has no row, and "launched": the longest T -> variant -> measurement."""
    clock = Clock()
    results, limits, left_out = {}, {}, {}
    for T in sorted(lengths):
        with Workers(variants(config, T), here) as made:
            made.ready()
            clock.say(f"T = {T}: compiled")
            workers = {(name, T): made for name in VARIANTS if (name, T) in made.names}
            rows, left_out[str(T)] = measured(workers, task(config, T).tokens, clock)
            for name in rows:
                made.close((name, T))
            limits[str(T)] = made.ask((LIMIT, T), "measure")
            clock.say(f"T = {T}: the limit is {limits[str(T)]['ms']:.2f} ms")
        results[str(T)] = with_shares(rows, config, T, limits[str(T)])
    T = max(lengths)
    rows = launched(task(config, T), clock, here)
    from_python = {str(T): with_shares(rows, config, T, limits[str(T)])}
    # As they were asked for.
    rows = {str(T): results[str(T)] for T in lengths}
    return {**rows, "limits": limits, "left_out": left_out, "launched": from_python}


def variants(config, T: int) -> dict:
    """(variant, T) -> how it is made, and its limit, for Workers."""
    what = task(config, T)
    made = {
        PEER: (Peer, what),
        BF16: (Bf16Peer, what),
        OURS: (Ours, what),
        EXACT: (Ours, what, True),
        LIMIT: (Limit, config, what.rows, T, what.micro_batches),
    }
    if LigerPeer.available():
        made[LIGER] = (Attempt, LigerPeer, what)
    return {(name, T): how for name, how in made.items()}


def with_shares(rows: dict, config, T: int, limit: dict) -> dict:
    """The rows with the share of the limit and of the GPU's peak that each reaches."""
    peak = peak_flops(DEVICE, torch.bfloat16)
    for row in rows.values():
        done = row["tokens_per_s"] * flops_per_token(config, T)
        row["mfu"] = done / peak if peak else None
        row["of_limit"] = limit["ms"] / row["ms"]
    return rows


def lengths_of(results: dict) -> dict:
    """T -> rows of the results, without what stands beside them."""
    return {T: rows for T, rows in results.items() if T.isdecimal()}


# ---- tables of whole steps ----------------------------------------------------------------------

STEP = [
    Column("step", "step"),
    Column("ms", "ms", number),
    Column("tokens/s", "tokens_per_s", thousands),
    Column("against torch", "times_torch", ratio),
    Column("of the limit", "of_limit", share),
    Column("MFU", "mfu", share),
    Column("peak GiB", "peak_GiB", tenths),
    Column("left out", "left_out"),
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


def step_tables(steps: dict, limits: dict, left_out=()) -> dict[str, Table]:
    """ "steps", and "time": the limit, ours and the fastest torch in groups of kernels (traces.py).

    steps: label -> variant -> measurement. limits: label -> limit. left_out: further rows."""
    rows, parts = [], []
    for label, variants in steps.items():
        rows += [{"step": f"{label}: {name}", **m} for name, m in variants.items()]
        if label in limits:
            limit = {"step": f"{label}: limit", **limits[label]["parts"], "ms": limits[label]["ms"]}
            parts.append({**limit, "rest": limit["bytes"]})
        for name in (*(n for n in variants if not n.startswith("torch")), fastest_torch(variants)):
            if groups := variants[name].get("groups"):
                between = variants[name]["ms"] - sum(groups[part] for part in COMPUTING)
                row = {"step": f"{label}: {name}", "ms": variants[name]["ms"], "between": between}
                parts.append({**groups, **row})
    return {"steps": Table(STEP, [*rows, *left_out]), "time": Table(WHERE, parts)}


def fastest_torch(variants: dict) -> str:
    return fastest({name: m["ms"] for name, m in variants.items()})


def tables(results: dict) -> dict[str, Table]:
    steps = {f"T={T}": rows for T, rows in lengths_of(results).items()}
    steps |= {f"T={T}, launched": rows for T, rows in results.get("launched", {}).items()}
    left_out = [
        {"step": f"T={T}: {name}", "left_out": reason}
        for T, reasons in results.get("left_out", {}).items()
        for name, reason in reasons.items()
    ]
    limits = {f"T={T}": limit for T, limit in results["limits"].items()}
    return step_tables(steps, limits, left_out)


def main():
    record("step", measure, tables, GiB=70)


if __name__ == "__main__":
    main()
