"""Gradient accumulation against torch: python benchmarks/accumulate.py   (needs a GPU, takes about a minute)

1. The addition alone: 470 M elements in 219 tensors (llama-350m with full key/value heads), against `torch._foreach_add_` and
   against the rate of a device-to-device copy measured in the same run.
2. What accumulating adds to one micro-batch's compiled forward and backward (llama-350m, bf16, batch 4, T = 1024), launched from
   Python and replayed from a CUDA graph (which takes the speed of the host out of the comparison). Each mode compiles in a process of its own,
   all of them side by side; then they take turns.
3. The error of the sum after 4 and 16 micro-batches against the float64 sum of the same gradients.
4. Host time of a launch from Python.
"""

import functools
import statistics
import time

import common
import torch
from workers import Workers, in_turns, queued

from gpuaccel.compiler.kernel import zero_
from gpuaccel.ops.accumulate import accumulate_kernel
from gpuaccel.optim.accumulate import MODES, GradientAccumulator
from gpuaccel.optim.accumulation_modes import add_to_arena
from gpuaccel.optim.arena import Arena
from gpuaccel.training.models import Transformer, preset
from gpuaccel.training.step import token_loss


def model(dtype, **changes):
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Transformer(preset("llama-350m", **changes)).to(dtype)


def addition() -> dict:
    """Milliseconds and shares of the copy rate for 470 M elements."""
    arena = Arena(model(torch.float32, kv_heads=16))
    elements, tensors = sum(s.numel for s in arena.segments), len(arena.segments)
    source, target = torch.randn(elements, device="cuda"), torch.empty(elements, device="cuda")
    found = {"elements": elements, "tensors": tensors}
    copy = common.milliseconds({"copy": functools.partial(target.copy_, source)})["copy"]
    rate = found["copy_GB_per_s"] = 8 * elements / copy / 1e6
    del source, target
    for dtype, moved in ((torch.float32, 12), (torch.bfloat16, 10)):
        grads = [torch.randn(s.shape, device="cuda").to(dtype) for s in arena.segments]

        def by_block():
            for block in arena.blocks:
                add_to_arena(arena, block.first, block.last, grads[block.first : block.last])

        def ladder(name):
            for view, grad in zip(arena.grad_views, grads):
                n = view.numel()
                blocks = -(-n // 256) if name == "accumulate_v1" else min(-(-n // 1024), 4096)
                accumulate_kernel(name, dtype)[blocks, 256](view, grad, n)

        times = common.milliseconds(
            {
                "torch._foreach_add_": lambda: torch._foreach_add_(arena.grad_views, grads),
                "accumulate_v1, per tensor": lambda: ladder("accumulate_v1"),
                "accumulate_v2, per tensor": lambda: ladder("accumulate_v2"),
                "accumulate_v3, per block": by_block,
                "accumulate_v3, one launch": lambda: add_to_arena(arena, 0, tensors, grads),
            }
        )
        peer = times["torch._foreach_add_"]
        found[str(dtype).removeprefix("torch.")] = {
            name: {
                "ms": ms,
                "of_copy_rate": moved * elements / ms / 1e6 / rate,
                "times_foreach": peer / ms,
            }
            for name, ms in times.items()
        }
    found["zero"] = common.milliseconds(
        {"memset": lambda: zero_(arena.grads), "torch zero_": lambda: arena.grads.zero_()}
    )
    arena.release()
    return found


class Micro:
    """One micro-batch's compiled forward and backward, in one mode or ("none") without accumulation; in a process of its own."""

    def __init__(self, mode: str):
        module = model(torch.bfloat16)
        tokens = torch.randint(0, 32768, (4, 1025), device="cuda")
        micro, loss = (
            (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
            torch.compile(token_loss, dynamic=False),
        )
        self.accumulator = None if mode == "none" else GradientAccumulator(Arena(module), mode)

        def run():
            if self.accumulator is None:
                for p in module.parameters():
                    p.grad = None
            loss(module, micro)[0].backward()

        self.runs = {"launched": run}
        for _ in range(1 if mode == "host" else 3):
            run()
        torch.cuda.synchronize()
        if mode != "host":  # downloads cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            self.runs["replayed"] = graph.replay

    def times(self, kind: str, calls: int) -> "list[float]":
        return queued(self.runs[kind], calls)


def micro_batch(workers: Workers) -> dict:
    """Milliseconds of forward and backward without accumulation and in each mode. All but `host`, which takes many times as long, in turns."""
    launched, replayed = (
        in_turns(
            {
                name: lambda name=name: workers.ask(name, "times", kind, calls)
                for name in workers.names
                if name != "host"
            }
        )
        for kind, calls in (("launched", 5), ("replayed", 10))
    )
    launched["host"] = in_turns({"host": lambda: workers.ask("host", "times", "launched", 2)}, 1)[
        "host"
    ]
    return {
        kind: {name: {"ms": ms, "added": ms / times["none"] - 1} for name, ms in times.items()}
        for kind, times in (("launched", launched), ("replayed", replayed))
    }


def errors() -> dict:
    """Norm-relative error of the accumulated gradient against the float64 sum of the same micro-gradients, worst tensor."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for count in (4, 16):
            generator = torch.Generator("cuda").manual_seed(1)
            micros = [
                torch.randint(0, 32768, (2, 257), device="cuda", generator=generator)
                for _ in range(count)
            ]
            small = dict(layers=2)
            reference = model(dtype, **small)
            exact = [
                torch.zeros(p.shape, dtype=torch.float64, device="cuda")
                for p in reference.parameters()
            ]
            for tokens in micros:
                reference.zero_grad()
                token_loss(reference, (tokens[:, :-1], tokens[:, 1:]))[0].backward()
                for total, p in zip(exact, reference.parameters()):
                    total += p.grad.double()
            for mode in MODES:
                arena = Arena(model(dtype, **small))
                with GradientAccumulator(arena, mode) as accumulator:
                    for tokens in micros:
                        token_loss(arena.module, (tokens[:, :-1], tokens[:, 1:]))[0].backward()
                    accumulator.finish()
                    worst = max(
                        float((p.grad.double() - total).norm() / total.norm())
                        for p, total in zip(arena.parameters(), exact)
                    )
                found[f"{str(dtype).removeprefix('torch.')}, {count} micro-batches, {mode}"] = worst
                arena.release()
    return found


def launch_microseconds() -> dict:
    """Median host time of one call, argument checks included, queue never full."""
    acc, grad = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    launch = accumulate_kernel("accumulate_v1", torch.float32)[4, 256]
    samples = {
        "gpuaccel, 3 arguments": lambda: launch(acc, grad, 1024),
        "torch add_": lambda: acc.add_(grad),
    }
    found = {}
    for name, call in samples.items():
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100 * 1e6)
        found[name] = statistics.median(times)
    return found


def main():
    with Workers({mode: (Micro, mode) for mode in ("none", *MODES)}) as workers:
        results = {"errors": errors()}  # while the others compile: nothing here is timed
        workers.ready()
        results.update(
            addition=addition(), launch_us=launch_microseconds(), micro_batch=micro_batch(workers)
        )
    for dtype in ("float32", "bfloat16"):
        rows = [
            (name, r["ms"], r["of_copy_rate"], r["times_foreach"])
            for name, r in results["addition"][dtype].items()
        ]
        print(
            f"\nadd {dtype} gradients into fp32\n"
            + common.table(rows, ("", "ms", "of copy rate", "x foreach"))
        )
    for kind, rows in results["micro_batch"].items():
        print(
            f"\nmicro-batch, {kind}\n"
            + common.table(
                [(n, r["ms"], f"{r['added']:+.1%}") for n, r in rows.items()], ("", "ms", "added")
            )
        )
    print(
        "\nerror against float64\n"
        + common.table(
            [(n, f"{e:.2e}") for n, e in results["errors"].items()], ("", "worst tensor")
        )
    )
    print("\nlaunch from Python\n" + common.table(list(results["launch_us"].items()), ("", "us")))
    print("\nwritten:", common.write("accumulate", results).name)


if __name__ == "__main__":
    main()
