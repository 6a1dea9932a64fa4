"""What the GPU does in a step: its kernels in groups, from the profiler's records.

>>> kernel_groups(step.run)
{'products': 55.1, 'attention': 14.3, 'rest': 12.9, 'tail': 4.1}

Milliseconds of one step. The groups are those of a step's limit (limits.py): products, attention,
the tail (sums of gradients, norm, clipping, optimizer, bf16 copies of weights), and all other
kernels and copies. What a step takes longer without the profiler is between its kernels.
"""

import re

import torch

from gpuaccel.measure.profiler import profiled

# What a name holds. The first group that matches has the kernel.
GROUPS = {
    # cuDNN's and flash attention's; before products, because some are made of CUTLASS.
    "attention": r"cudnn|flash|fmha|attention",
    # cuBLAS's, and Triton's where torch.compile has taken them.
    "products": r"nvjet|gemm|cutlass|xmma|splitK|triton_tem_|triton_mm",
    # Ours, torch's foreach and fused kernels, and those that torch.compile makes of foreach calls.
    "tail": r"accumulate_|adamw_|squares_|reduce_v\d|scale_v\d|multi_tensor_apply|triton_for_",
}
REST = "rest"
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
# Steps in a trace.
STEPS = 3


def group_of(name: str) -> str:
    """The group of a kernel or a copy."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return REST


def kernels_of(run, steps: int = 1) -> "list[dict]":
    """The profiler's records of the GPU's kernels, copies and memsets in so many runs."""
    with profiled("benchmark") as events:
        for _ in range(steps):
            run()
    return [event for event in events if event.get("cat") in GPU_WORK]


def kernel_groups(run) -> "dict[str, float]":
    """Group -> milliseconds of one run."""
    groups = dict.fromkeys(("products", "attention", REST, "tail"), 0.0)
    for event in kernels_of(run, STEPS):
        groups[group_of(event["name"])] += event["dur"] / 1e3 / STEPS
    return groups
