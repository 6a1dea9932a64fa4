"""What the GPU does in a step: its kernels in groups, from the profiler's records.

>>> kernel_groups(step.run)
{'products': 55.1, 'attention': 14.3, 'rest': 12.9, 'tail': 4.1, 'communication': 0.0,
 'exposed': 0.0}

Milliseconds of one step. The groups are those of a step's limit (limits.py): products, attention,
the tail (sums of gradients, norm, clipping, optimizer, bf16 copies of weights), and all other
kernels. Where several run at once, only the first of them in this order counts: products,
attention, rest, tail, communication. `exposed` is the time in which communication runs and nothing
else; `communication` is all of its time. The time of a step without the profiler, less the other
groups and `exposed`, is between its kernels.
"""

import re

import torch
from torch.profiler import record_function

from gpuaccel.measure.profiler import profiled

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
REST, COMMUNICATION = "rest", "communication"
# What a name holds. The first group that matches has the kernel.
GROUPS = {
    # NCCL's kernels, copies (in a step all large ones are between GPUs), and our sums of what has
    # been copied from other GPUs.
    COMMUNICATION: r"nccl|^memcpy|peers_",
    # cuDNN's and flash attention's; before products, because some are made of CUTLASS.
    "attention": r"cudnn|flash|fmha|attention",
    # cuBLAS's, and Triton's where torch.compile has taken them.
    "products": r"nvjet|gemm|cutlass|xmma|splitK|triton_tem_|triton_mm",
    # Ours, torch's foreach and fused kernels, and those that torch.compile makes of foreach calls.
    "tail": r"accumulate_|adamw_|squares_|reduce_v\d|scale_v\d|multi_tensor_apply|triton_for_",
}
# Steps in a trace.
STEPS = 3
REGION = "steps of a benchmark"


def group_of(name: str) -> str:
    """The group of a kernel or a copy."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return REST


def kernels_of(run, steps: int = 1) -> list[dict]:
    """The profiler's records of the GPU's kernels, copies and memsets in so many runs.

    One more run before them is not counted: in it, communication waits until the profilers of the
    other ranks have started."""
    with profiled("benchmark") as events:
        run()
        synchronize()
        with record_function(REGION):
            for _ in range(steps):
                run()
            synchronize()
    region = next(e for e in events if e["name"] == REGION and e.get("cat") == "user_annotation")
    start, stop = region["ts"], region["ts"] + region["dur"]
    return [e for e in events if e.get("cat") in GPU_WORK and start <= e["ts"] <= stop]


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernel_groups(run) -> dict[str, float]:
    """Group -> milliseconds of one run."""
    return in_groups(kernels_of(run, STEPS), STEPS)


def busy_ms(run) -> float | None:
    """Milliseconds of one run in which the GPU works; None where it did nothing."""
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in kernels_of(run)]
    return covered(spans) / 1e3 if spans else None


def in_groups(events: list[dict], steps: int) -> dict[str, float]:
    """Group -> milliseconds of one of so many steps. events: with name, and ts and dur in us."""
    spans: dict[str, list[tuple[float, float]]] = {
        group: [] for group in ("products", "attention", REST, "tail", COMMUNICATION)
    }
    for event in events:
        spans[group_of(event["name"])].append((event["ts"], event["ts"] + event["dur"]))
    us, counted, before = {}, [], 0.0
    for group, its in spans.items():
        counted += its
        total = covered(counted)
        us[group] = total - before
        before = total
    us["exposed"] = us[COMMUNICATION]
    us[COMMUNICATION] = covered(spans[COMMUNICATION])
    return {group: value / 1e3 / steps for group, value in us.items()}


def covered(spans) -> float:
    """How long at least one of these spans, (start, stop), is. Each instant counts once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
