"""The kernels that add gradients, against torch: python benchmarks/accumulate.py

Needs a GPU and less than half a minute.

1. 470 M elements in 219 tensors (llama-350m with full key/value heads): the ladder of
   kernels_cu/accumulate.cu against `torch._foreach_add_` and against the rate of a device-to-device
   copy in the same run.
2. Host time of a launch from Python.
"""

import dataclasses
import functools
import statistics

import torch
from common import DEVICE, record
from tables import Column, Table, number, ratio, share
from timing import copy_rate, host_milliseconds, milliseconds, repeat
from training import build

from gpuaccel.ops.accumulate import accumulate_each_, accumulate_kernel
from gpuaccel.optim.arena import Arena

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_by_tensor(arena: Arena, kernel: str, grads):
    """One launch per tensor."""
    launch = accumulate_kernel(kernel, grads[0].dtype)
    for view, grad in zip(arena.gradients.views, grads):
        n = view.numel()
        blocks = -(-n // 256) if kernel == "accumulate_v1" else min(-(-n // 1024), 4096)
        launch[blocks, 256](view, grad, n)


def addition(config) -> dict:
    """Milliseconds and shares of the copy rate for a whole model's gradients."""
    arena = Arena(build(dataclasses.replace(config, kv_heads=config.heads)))
    elements = sum(segment.numel for segment in arena.segments)
    rate = copy_rate(elements)
    results = {"elements": elements, "tensors": len(arena.segments), "copy_GB_per_s": rate}
    for name, dtype in DTYPES.items():
        grads = [torch.randn(segment.shape, device=DEVICE).to(dtype) for segment in arena.segments]
        times = milliseconds(
            {
                "torch._foreach_add_": lambda: torch._foreach_add_(arena.gradients.views, grads),
                "accumulate_v1, per tensor": lambda: add_by_tensor(arena, "accumulate_v1", grads),
                "accumulate_v2, per tensor": lambda: add_by_tensor(arena, "accumulate_v2", grads),
                "accumulate_v3, one launch": lambda: accumulate_each_(arena.gradients.views, grads),
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
    arena.release()
    return results


def launch_microseconds(_config=None) -> dict:
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


PARTS = {"addition": addition, "launch_us": launch_microseconds}


def tables(results: dict) -> dict[str, Table]:
    rows = [
        {"by": f"{dtype}: {name}", **m}
        for dtype in DTYPES
        for name, m in results.get("addition", {}).get(dtype, {}).items()
    ]
    addition = [
        Column("gradients, by", "by"),
        Column("ms", "ms", number),
        Column("of copy rate", "of_copy_rate", share),
        Column("against torch", "times_foreach", ratio),
    ]
    launches = [{"call": name, "us": us} for name, us in results.get("launch_us", {}).items()]
    launch = [Column("launch from Python", "call"), Column("us", "us", number)]
    return {"addition": Table(addition, rows), "launch": Table(launch, launches)}


def main():
    record("accumulate", PARTS, tables, GiB=15)


if __name__ == "__main__":
    main()
