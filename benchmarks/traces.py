"""What the GPU's time goes to in a step: its kernels in groups, read from the profiler's records.

>>> kernel_groups(step.run, steps=3)
{'products': 55.1, 'attention': 14.3, 'tail': 4.1, 'rest': 12.9, 'kernels': 1932.0}

The groups are those of limits.py: products; attention; the tail (norm, clipping, optimizer, bf16
copies of the weights); and the rest, every other kernel and copy. All but `kernels`, their number,
are milliseconds of one step. Tracing stretches the gaps between the kernels of a CUDA graph, so gaps
are no group here: they are the time of a step without the profiler, less its groups.
"""

import re

import torch

from gpuaccel.measure.profiler import profiled

# What a kernel's name begins with or holds. The first group that matches has it.
GROUPS = {
    # cuDNN's and flash attention's kernels; before products, as cuDNN's have "sdpa" beside "sm90".
    "attention": r"cudnn|flash|fmha|attention",
    # cuBLAS's and cuBLASLt's, and Triton's where torch.compile has chosen them.
    "products": r"nvjet|gemm|cutlass|xmma|splitK|cublas|triton_tem_|triton_mm",
    # Ours, torch's foreach and fused ones, and those that torch.compile makes of foreach calls.
    "tail": r"adamw_|squares_|reduce_v\d|scale_v\d|multi_tensor_apply|triton_for_fused",
}
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def group_of(name: str) -> str:
    for group, pattern in GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return "rest"


def kernels_of(run, steps: int = 1) -> "list[dict]":
    """The profiler's records of the GPU's kernels and copies in so many runs, in order of time."""
    torch.cuda.synchronize()
    with profiled("benchmark") as events:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    return sorted((e for e in events if e.get("cat") in GPU_WORK), key=lambda e: e["ts"])


def kernel_groups(run, steps: int = 3) -> "dict[str, float]":
    """Group -> milliseconds of one run; "kernels": their number in one run."""
    found = kernels_of(run, steps)
    groups = {group: 0.0 for group in (*GROUPS, "rest")}
    for event in found:
        groups[group_of(event["name"])] += event["dur"] / 1e3 / steps
    return {**groups, "kernels": len(found) / steps}
