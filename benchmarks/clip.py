"""Gradient clipping against torch: python benchmarks/clip.py

Needs a GPU and about a minute.

1. 470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 and bf16 gradients,
   with a norm over the threshold and under it: the ladder of kernels_cu/clip.cu and the public
   functions against `torch.nn.utils.clip_grad_norm_(foreach=True)`, launched from Python and
   replayed from a CUDA graph. Shares are of the rate of a device-to-device copy in the same run,
   for the bytes that must move: one read, and over the threshold one more read and a write. Before
   each call, and not counted, the gradients are restored.
2. The error of the norm against float64.
3. The host's launches and waits (ledger).
"""

import dataclasses
import functools

import torch
from common import DEVICE, record
from tables import Column, Table, integer, number, ratio, scientific, share
from timing import captured, copy_rate, milliseconds_after
from training import build

from gpuaccel.measure import ledger
from gpuaccel.ops.clip import EPS, clip_kernel
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.clip import clip_grad_norm_, clip_grads_

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A max_norm that no gradient reaches.
NO_LIMIT = 1e9
ITEM = ".item() per tensor"
V1 = "squares_v1, reduce_v1, scale_v1"
OURS = "ga.clip_grad_norm_"
ARENA = "ga.optim.clip_grads_(arena)"
TORCH = "torch foreach"


# ---- the first versions -------------------------------------------------------------------------


def clip_by_item(grads, max_norm):
    """Download every tensor's norm; the host adds them and decides."""
    norm = sum(g.norm().item() ** 2 for g in grads) ** 0.5
    if norm + EPS > max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + EPS))
    return norm


def clip_by_v1(grads, partials, state, max_norm):
    """Launch squares_v1 and scale_v1 once for every tensor."""
    squares = clip_kernel("squares_v1", 2.0)
    reduce = clip_kernel("reduce_v1", 2.0)
    scale = clip_kernel("scale_v1", 2.0)
    rows = 0
    for g in grads:
        blocks = min(256, -(-g.numel() // 1024))
        squares[blocks, 256](partials[rows:], g, g.numel())
        rows += blocks
    reduce[1, 1](state, partials, rows, max_norm)
    for g in grads:
        scale[-(-g.numel() // 256), 256](g, state, g.numel())
    return state[1]


# ---- a whole model's gradients ------------------------------------------------------------------


def variants_of(parameters, values, config, dtype) -> tuple[dict, Arena | None]:
    """(name -> (restore the gradients, clip them to a limit and return the norm), the arena)."""
    grads = [p.grad for p in parameters]

    def restore():
        torch._foreach_copy_(grads, values)

    def clip_by_torch(limit):
        return torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)

    public = {
        TORCH: (restore, clip_by_torch),
        OURS: (restore, lambda limit: clip_grad_norm_(parameters, limit)),
    }
    if dtype != torch.float32:
        return public, None
    arena = Arena(build(config, dtype))
    arena.gradients.set([True] * len(arena.module_parameters))
    partials = torch.empty(256 * len(grads), device=DEVICE)
    state = torch.empty(2, device=DEVICE)

    def restore_arena():
        # An arena holds the parameters in reverse order.
        torch._foreach_copy_(arena.gradients.views, values[::-1])

    variants = {
        ITEM: (restore, lambda limit: clip_by_item(grads, limit)),
        V1: (restore, lambda limit: clip_by_v1(grads, partials, state, limit)),
        **public,
        ARENA: (restore_arena, lambda limit: clip_grads_(arena, limit).norm),
    }
    return variants, arena


def large(dtype, config) -> dict:
    """Every variant on a whole model's gradients, over the threshold and under it."""
    config = dataclasses.replace(config, kv_heads=config.heads)
    parameters = list(build(config, dtype).parameters())
    values = [
        torch.randn(p.shape, device=DEVICE).mul_(10.0 ** -(i % 4)).to(dtype)
        for i, p in enumerate(parameters)
    ]
    for p, value in zip(parameters, values):
        p.grad = value.clone()
    elements = sum(p.numel() for p in parameters)
    exact = float(sum(v.double().square().sum() for v in values)) ** 0.5
    rate = copy_rate(elements)
    variants, arena = variants_of(parameters, values, config, dtype)
    results = {
        "elements": elements,
        "tensors": len(parameters),
        "copy_GB_per_s": rate,
        "norm_error": {},
        "host": {},
    }
    for name, (prepare, clip) in variants.items():
        prepare()
        results["norm_error"][name] = abs(float(clip(NO_LIMIT)) / exact - 1)
    for case, limit in (("over", exact / 2), ("under", NO_LIMIT)):
        runs = {
            name: (prepare, lambda clip=clip: clip(limit))
            for name, (prepare, clip) in variants.items()
        }
        # A wait for the device cannot be captured.
        replays = {
            name: (prepare, captured(run, prepare))
            for name, (prepare, run) in runs.items()
            if name != ITEM
        }
        results[case] = {name: {} for name in variants}
        for kind, pairs in (("launched", runs), ("replayed", replays)):
            times = milliseconds_after(pairs)
            for name, ms in times.items():
                # A read for the norm; over the threshold a read and a write more.
                moved = (3 if case == "over" else 1) * dtype.itemsize * elements
                results[case][name][kind] = {
                    "ms": ms,
                    "of_copy_rate": moved / ms / 1e6 / rate,
                    "times_torch": times[TORCH] / ms,
                }
    for name, (prepare, clip) in variants.items():
        prepare()
        with ledger(name) as row:
            clip(exact / 2)
        results["host"][name] = {"launches": row.launches, "syncs": row.syncs}
    if arena is not None:
        arena.release()
    return results


# ---- the script ---------------------------------------------------------------------------------


PARTS = {name: functools.partial(large, dtype) for name, dtype in DTYPES.items()}


def tables(results: dict) -> dict[str, Table]:
    columns = [
        Column("gradients, by", "by"),
        Column("over: ms", "over_ms", number),
        Column("over: of copy rate", "over_share", share),
        Column("over: against torch", "over_ratio", ratio),
        Column("under: ms", "under_ms", number),
        Column("under: of copy rate", "under_share", share),
        Column("under: against torch", "under_ratio", ratio),
        Column("over, launched: ms", "launched_ms", number),
        Column("host waits", "syncs", integer),
        Column("error of the norm", "error", scientific),
    ]
    rows = []
    for dtype in filter(results.get, DTYPES):
        r = results[dtype]
        for name in r["over"]:
            row = {"by": f"{dtype}: {name}", "syncs": r["host"][name]["syncs"]}
            row["error"] = r["norm_error"][name]
            row["launched_ms"] = r["over"][name]["launched"]["ms"]
            for case in ("over", "under"):
                # A wait for the device cannot be captured.
                m = r[case][name].get("replayed", {})
                row[f"{case}_ms"] = m.get("ms")
                row[f"{case}_share"] = m.get("of_copy_rate")
                row[f"{case}_ratio"] = m.get("times_torch")
            rows.append(row)
    return {"clipping": Table(columns, rows)}


def main():
    record("clip", PARTS, tables, GiB=20)


if __name__ == "__main__":
    main()
