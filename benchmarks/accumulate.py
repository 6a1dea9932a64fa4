"""Gradient accumulation against torch: python benchmarks/accumulate.py

Needs a GPU and about a minute.

1. The addition alone: 470 M elements in 219 tensors (llama-350m with full key/value heads), against
   `torch._foreach_add_` and against the rate of a device-to-device copy in the same run.
2. What accumulation adds to one micro-batch's compiled forward and backward (llama-350m, bf16,
   batch 4, T = 1024), launched from Python and replayed from a CUDA graph, where the speed of the
   host does not count. Each mode has a process of its own; they compile side by side and are
   measured in turns.
3. The error of the sum after 4 and 16 micro-batches against the float64 sum of the same gradients.
4. Host time of a launch from Python.
"""

import dataclasses
import functools
import statistics

import torch
from common import DEVICE, record, show_table
from timing import captured, copy_rate, host_milliseconds, in_turns, milliseconds, queued, repeat
from training import build, token_batch
from workers import Workers

from gpuaccel.compiler.kernel import zero_
from gpuaccel.ops.accumulate import accumulate_kernel
from gpuaccel.optim.accumulate import MODES, GradientAccumulator
from gpuaccel.optim.accumulation_modes import add_to_arena
from gpuaccel.optim.arena import Arena
from gpuaccel.training.step import token_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# One micro-batch's forward and backward without accumulation.
NO_MODE = "none"


def addition(config) -> dict:
    """Milliseconds and shares of the copy rate for a whole model's gradients."""
    arena = Arena(build(config))
    tensors = len(arena.segments)
    elements = sum(segment.numel for segment in arena.segments)
    rate = copy_rate(elements)
    results = {"elements": elements, "tensors": tensors, "copy_GB_per_s": rate}
    for name, dtype in DTYPES.items():
        grads = [torch.randn(segment.shape, device=DEVICE).to(dtype) for segment in arena.segments]

        def by_block():
            for block in arena.blocks:
                add_to_arena(arena, block.first, block.last, grads[block.first : block.last])

        def by_tensor(kernel):
            launch = accumulate_kernel(kernel, dtype)
            for view, grad in zip(arena.grad_views, grads):
                n = view.numel()
                blocks = -(-n // 256) if kernel == "accumulate_v1" else min(-(-n // 1024), 4096)
                launch[blocks, 256](view, grad, n)

        times = milliseconds(
            {
                "torch._foreach_add_": lambda: torch._foreach_add_(arena.grad_views, grads),
                "accumulate_v1, per tensor": lambda: by_tensor("accumulate_v1"),
                "accumulate_v2, per tensor": lambda: by_tensor("accumulate_v2"),
                "accumulate_v3, per block": by_block,
                "accumulate_v3, one launch": lambda: add_to_arena(arena, 0, tensors, grads),
            }
        )
        # Per element: the gradient is read; its sum is read and written.
        moved = dtype.itemsize + 8
        results[name] = {
            variant: {
                "ms": ms,
                "of_copy_rate": moved * elements / ms / 1e6 / rate,
                "times_foreach": times["torch._foreach_add_"] / ms,
            }
            for variant, ms in times.items()
        }
    results["zero"] = milliseconds(
        {"memset": lambda: zero_(arena.grads), "torch zero_": lambda: arena.grads.zero_()}
    )
    arena.release()
    return results


class MicroBatch:
    """One micro-batch's compiled forward and backward, in one mode or without accumulation."""

    def __init__(self, mode: str, config):
        model = build(config, torch.bfloat16)
        batch = token_batch(config.vocab, 4, config.T)
        loss = torch.compile(token_loss, dynamic=False)
        self.accumulator = None if mode == NO_MODE else GradientAccumulator(Arena(model), mode)

        def run():
            if self.accumulator is None:
                for p in model.parameters():
                    p.grad = None
            loss(model, batch)[0].backward()

        run()
        self.runs = {"launched": run}
        # Mode "host" downloads gradients, which cannot be captured.
        if mode != "host":
            self.runs["replayed"] = captured(run)

    def times(self, kind: str, calls: int) -> "list[float]":
        return queued(self.runs[kind], calls)


def micro_batch(workers: Workers) -> dict:
    """Milliseconds of forward and backward without accumulation and in each mode.

    They take turns, except `host`, which takes many times as long."""
    others = [mode for mode in workers.names if mode != "host"]
    launched = in_turns(workers.timers(others, "launched", 5))
    launched |= in_turns(workers.timers(["host"], "launched", 2), 1)
    replayed = in_turns(workers.timers(others, "replayed", 10))
    return {
        kind: {mode: {"ms": ms, "added": ms / times[NO_MODE] - 1} for mode, ms in times.items()}
        for kind, times in (("launched", launched), ("replayed", replayed))
    }


def errors(config, T: int = 256) -> dict:
    """Error of the accumulated gradient against the float64 sum of the same gradients.

    It is relative to the norm; the worst tensor counts."""
    results = {}
    for dtype_name, dtype in DTYPES.items():
        for count in (4, 16):
            batches = [token_batch(config.vocab, 2, T, seed) for seed in range(count)]
            exact = exact_sums(build(config, dtype), batches)
            for mode in MODES:
                arena = Arena(build(config, dtype))
                with GradientAccumulator(arena, mode) as accumulator:
                    for batch in batches:
                        token_loss(arena.module, batch)[0].backward()
                    accumulator.finish()
                    results[f"{dtype_name}, {count} micro-batches, {mode}"] = max(
                        float((p.grad.double() - total).norm() / total.norm())
                        for p, total in zip(arena.parameters(), exact)
                    )
                arena.release()
    return results


def exact_sums(model, batches) -> "list[torch.Tensor]":
    """The sum of each parameter's gradients, added in float64."""
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for batch in batches:
        model.zero_grad()
        token_loss(model, batch)[0].backward()
        for total, p in zip(sums, model.parameters()):
            total += p.grad.double()
    return sums


def launch_microseconds() -> dict:
    """Median host time of one call, argument checks included; the queue is never full."""
    total, grad = torch.zeros(1024, device=DEVICE), torch.ones(1024, device=DEVICE)
    launch = accumulate_kernel("accumulate_v1", torch.float32)[4, 256]
    calls = {
        "gpuaccel, 3 arguments": lambda: launch(total, grad, 1024),
        "torch add_": lambda: total.add_(grad),
    }
    results = {}
    for name, call in calls.items():
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            times.append(host_milliseconds(functools.partial(repeat, call, 100)) / 100 * 1e3)
        results[name] = statistics.median(times)
    return results


def measure(config, here: bool = False) -> dict:
    variants = {mode: (MicroBatch, mode, config) for mode in (NO_MODE, *MODES)}
    with Workers(variants, here) as workers:
        # While the workers compile: nothing here is timed.
        results = {"errors": errors(dataclasses.replace(config, layers=2), config.T // 4)}
        workers.ready()
        results["addition"] = addition(dataclasses.replace(config, kv_heads=config.heads))
        results["launch_us"] = launch_microseconds()
        results["micro_batch"] = micro_batch(workers)
    return results


def show(results: dict):
    for dtype in DTYPES:
        rows = [
            (name, r["ms"], r["of_copy_rate"], r["times_foreach"])
            for name, r in results["addition"][dtype].items()
        ]
        head = ("", "ms", "of copy rate", "x foreach")
        show_table(f"add {dtype} gradients into fp32", rows, head)
    for kind, modes in results["micro_batch"].items():
        rows = [(mode, r["ms"], f"{r['added']:+.1%}") for mode, r in modes.items()]
        show_table(f"micro-batch, {kind}", rows, ("", "ms", "added"))
    rows = [(name, f"{error:.2e}") for name, error in results["errors"].items()]
    show_table("error against float64", rows, ("", "worst tensor"))
    show_table("launch from Python", list(results["launch_us"].items()), ("", "us"))


def main():
    record("accumulate", measure, show, GiB=70)


if __name__ == "__main__":
    main()
