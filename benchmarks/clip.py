"""Gradient clipping against torch: python benchmarks/clip.py   (needs a GPU, takes about a minute)

1. 470 M elements in 219 tensors (llama-350m with full key/value heads), fp32 and bf16 gradients, over the threshold and under it: the
   ladder of kernels_cu/clip.cu and the public functions against `torch.nn.utils.clip_grad_norm_(foreach=True)`, launched from Python and
   replayed from a CUDA graph. Shares are of the rate of a device-to-device copy measured in the same run, on the bytes that must move:
   one read, and over the threshold a read and a write more. Before each call, and not counted, the gradients get their values back.
2. 1,000 tensors of 1,000 elements, launched from Python and replayed (4 MB: they stay in the L2 cache).
3. The error of the norm against float64.
4. What the host did: launches, and how often it waited (ledger).
"""

import statistics
import time

import common
import torch

from gpuaccel.measure import ledger
from gpuaccel.ops.clip import EPS, clip_kernel
from gpuaccel.optim.arena import Arena
from gpuaccel.optim.clip import clip_grad_norm_, clip_grads_
from gpuaccel.training.models import Transformer, preset

DEVICE, NEVER = "cuda", 1e9  # NEVER: a max_norm that nothing reaches
ITEM, V1, OURS, ARENA, KNOWN, TORCH = (
    ".item() per tensor",
    "squares_v1, reduce_v1, scale_v1",
    "ga.clip_grad_norm_",
    "ga.clip_grads_(arena)",
    "the same after accumulate_v4",
    "torch foreach",
)


def build(config, dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Transformer(config).to(dtype)


def copy_rate(elements: int) -> float:
    """GB/s of a device-to-device copy of fp32 elements, bytes read and bytes written counted."""
    source, target = torch.randn(elements, device=DEVICE), torch.empty(elements, device=DEVICE)
    return 8 * elements / common.milliseconds({"copy": lambda: target.copy_(source)})["copy"] / 1e6


def captured(run, prepare=lambda: None):
    """The replay of a CUDA graph of run(), captured in the state that prepare() leaves behind."""
    for _ in range(3):
        prepare()
        run()
    prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def in_turns(pairs: dict) -> "dict[str, float]":
    """Milliseconds of each run; before it, and not counted, its preparation. pairs: name -> (prepare, run)."""
    functions = {}
    for name, (prepare, run) in pairs.items():
        functions[f"before {name}"], functions[name] = prepare, run
    times = common.milliseconds(functions)
    return {name: times[name] for name in pairs}


def wall(run, calls: int = 50) -> float:
    """Milliseconds of one call by the host's clock, the device's work included: many calls, one wait at the end."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


# ---- the ladder's first rungs ---------------------------------------------------------------------------------------


def by_item(grads, max_norm):
    """Every tensor's norm goes to the host, which adds and decides."""
    norm = sum(g.norm().item() ** 2 for g in grads) ** 0.5
    if norm + EPS > max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + EPS))
    return norm


def by_v1(grads, partials, verdict, max_norm):
    """A launch of squares_v1 and one of scale_v1 for every tensor."""
    squares, reduce, scale = (
        clip_kernel(name, 2.0) for name in ("squares_v1", "reduce_v1", "scale_v1")
    )
    rows = 0
    for g in grads:
        blocks = min(256, -(-g.numel() // 1024))
        squares[blocks, 256](partials[rows:], g, g.numel())
        rows += blocks
    reduce[1, 1](verdict, partials, rows, max_norm)
    for g in grads:
        scale[-(-g.numel() // 256), 256](g, verdict, g.numel())
    return verdict[1]


# ---- what is measured -----------------------------------------------------------------------------------------------


def large(config, dtype) -> dict:
    """Every way of clipping a whole model's gradients, over the threshold and under it."""
    parameters = list(build(config, dtype).parameters())
    values = [
        torch.randn(p.shape, device=DEVICE).mul_(10.0 ** -(i % 4)).to(dtype)
        for i, p in enumerate(parameters)
    ]
    for p, value in zip(parameters, values):
        p.grad = value.clone()
    grads, elements, size = (
        [p.grad for p in parameters],
        sum(p.numel() for p in parameters),
        dtype.itemsize,
    )
    exact, rate = float(sum(v.double().square().sum() for v in values)) ** 0.5, copy_rate(elements)

    def restore():
        torch._foreach_copy_(grads, values)

    ways = {
        TORCH: (
            restore,
            lambda limit: torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True),
        ),
        OURS: (restore, lambda limit: clip_grad_norm_(parameters, limit)),
    }
    if dtype == torch.float32:
        arena, partials, verdict = (
            Arena(build(config, dtype)),
            torch.empty(256 * len(grads), device=DEVICE),
            torch.empty(2, device=DEVICE),
        )

        def restore_arena():
            torch._foreach_copy_(arena.grad_views, values[::-1])

        def restore_known():
            restore_arena()
            arena.squares.update()  # what accumulate_v4 would have left behind

        ways = {
            ITEM: (restore, lambda limit: by_item(grads, limit)),
            V1: (restore, lambda limit: by_v1(grads, partials, verdict, limit)),
            **ways,
            ARENA: (restore_arena, lambda limit: clip_grads_(arena, limit).norm),
            KNOWN: (restore_known, lambda limit: clip_grads_(arena, limit).norm),
        }
    found = {
        "elements": elements,
        "tensors": len(grads),
        "copy_GB_per_s": rate,
        "norm_error": {},
        "host": {},
    }
    for name, (prepare, clip) in ways.items():
        prepare()
        found["norm_error"][name] = abs(float(clip(NEVER)) / exact - 1)
    for case, limit in (("over", exact / 2), ("under", NEVER)):
        runs = {
            name: (prepare, lambda clip=clip: clip(limit)) for name, (prepare, clip) in ways.items()
        }
        replays = {
            name: (prepare, captured(run, prepare))
            for name, (prepare, run) in runs.items()
            if name != ITEM
        }  # a wait cannot be captured
        found[case] = {name: {} for name in ways}
        for kind, pairs in (("launched", runs), ("replayed", replays)):
            times = in_turns(pairs)
            for name, ms in times.items():
                passes = (case == "over") * 2 + (
                    name != KNOWN
                )  # over: a read and a write; the norm: a read, unless it is known
                share = passes * size * elements / ms / 1e6 / rate if passes else None
                found[case][name][kind] = {
                    "ms": ms,
                    "of_copy_rate": share,
                    "times_torch": times[TORCH] / ms,
                }
    for name, (prepare, clip) in ways.items():
        prepare()
        with ledger(name) as row:
            clip(exact / 2)
        found["host"][name] = {"launches": row.launches, "syncs": row.syncs}
    if dtype == torch.float32:
        arena.release()
    return found


def small(count: int = 1000, size: int = 1000) -> dict:
    """Many small tensors: the work is in the launches."""
    parameters = [torch.nn.Parameter(torch.zeros(size, device=DEVICE)) for _ in range(count)]
    values = [torch.randn(size, device=DEVICE) for _ in parameters]
    for p, value in zip(parameters, values):
        p.grad = value.clone()
    grads, limit = [p.grad for p in parameters], (count * size) ** 0.5 / 2
    runs = {
        TORCH: lambda: torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True),
        OURS: lambda: clip_grad_norm_(parameters, limit),
    }

    def restore():
        torch._foreach_copy_(grads, values)

    times = {
        "launched": in_turns({name: (restore, run) for name, run in runs.items()}),
        "wall": {name: wall(run) for name, run in runs.items()},
        "replayed": in_turns({name: (restore, captured(run)) for name, run in runs.items()}),
    }
    return {
        kind: {name: {"ms": ms, "times_torch": rows[TORCH] / ms} for name, ms in rows.items()}
        for kind, rows in times.items()
    }


def main():
    config = preset("llama-350m", kv_heads=16)
    results = {
        "float32": large(config, torch.float32),
        "bfloat16": large(config, torch.bfloat16),
        "small": small(),
    }
    for dtype in ("float32", "bfloat16"):
        r = results[dtype]
        for case in ("over", "under"):
            rows = [
                (name, kind, m["ms"], f"{m['of_copy_rate'] or 0:.0%}", m["times_torch"])
                for name, kinds in r[case].items()
                for kind, m in kinds.items()
            ]
            print(
                f"\n{dtype} gradients, {case} the threshold\n"
                + common.table(rows, ("", "", "ms", "of copy rate", "x torch"))
            )
        rows = [
            (name, f"{error:.1e}", r["host"][name]["launches"], r["host"][name]["syncs"])
            for name, error in r["norm_error"].items()
        ]
        print(
            f"\n{dtype} gradients\n"
            + common.table(rows, ("", "error of the norm", "launches", "host waits"))
        )
    rows = [
        (name, kind, m["ms"], m["times_torch"])
        for kind, names in results["small"].items()
        for name, m in names.items()
    ]
    print("\nmany small tensors\n" + common.table(rows, ("", "", "ms", "x torch")))
    print("\nwritten:", common.write("clip", results).name)


if __name__ == "__main__":
    main()
