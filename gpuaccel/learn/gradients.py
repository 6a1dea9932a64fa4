"""The gradient that a step hands to the optimizer, and rates of the kernels that add it.

step_gradient(batch, in_the_arena, micro_batches=4)   # a flat fp32 tensor
addition_here()                                       # bars, measured on this GPU
"""

import torch

from ..backends import default_device, deterministic
from ..compiler import Kernel
from ..optim import Arena
from ..training import Divide, TrainStep, Transformer, preset
from .figures import Figure, bars
from .places import Place, PlainStep
from .recorded import gpu_milliseconds


class _KeepGradient(torch.optim.Optimizer):
    """An optimizer that changes no weight, and keeps the gradients of its last step."""

    def __init__(self, arena: Arena):
        super().__init__(arena.parameters(), {})
        self.arena = arena
        self.kept: "torch.Tensor | None" = None

    @torch.no_grad()
    def step(self, closure=None):
        self.kept = self.arena.grads.clone()


def step_gradient(
    batch, place: "Place | None" = None, micro_batches: int = 1, divide: Divide = "tokens"
) -> torch.Tensor:
    """The gradient of one step of the tiny model, in the order of its arena: fp32, flat.

    The model's weights are the same in each call, and so are all bits of the result.

    Args:
        batch: (inputs, targets), as ga.Batches gives them
        place: where micro-batches are added up; default: where ga.TrainStep adds them
        micro_batches: as in ga.TrainStep
        divide: as in ga.TrainStep; a place is divided by tokens
    """
    torch.manual_seed(0)
    model = Transformer(preset("tiny")).to(default_device())
    arena = Arena(model)
    optimizer = _KeepGradient(arena)
    step: "TrainStep | PlainStep"
    if place is None:
        step = TrainStep(model, optimizer, micro_batches=micro_batches, divide=divide)
    else:
        step = PlainStep(model, optimizer, place, micro_batches=micro_batches)
    with deterministic(), step:
        step(batch)
    arena.release()
    assert optimizer.kept is not None
    return optimizer.kept


def addition_here(elements: int = 2**26) -> Figure:
    """The rates of accumulate_v1 and accumulate_v2 on this GPU, beside that of torch's copy.

    Args:
        elements: bf16 gradients added into an fp32 sum
    """
    acc = torch.zeros(elements, device="cuda")
    grad = torch.ones(elements, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(acc)
    v1 = Kernel("accumulate", "accumulate_v1", GRAD_T="bf16")
    v2 = Kernel("accumulate", "accumulate_v2", GRAD_T="bf16")
    runs = (
        ("torch copy", 8, lambda: other.copy_(acc)),
        ("accumulate_v1", 10, lambda: v1[-(-elements // 256), 256](acc, grad, elements)),
        ("accumulate_v2", 10, lambda: v2[4096, 256](acc, grad, elements)),
    )
    rows = []
    for name, bytes_per_element, run in runs:
        rate = bytes_per_element * elements / gpu_milliseconds(run) / 1e6
        rows.append((name, rate, f"{rate:,.0f} GB/s"))
    return bars(rows, f"Bytes moved per second on this GPU, {elements:,} elements")
