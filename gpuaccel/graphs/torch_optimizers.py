"""What a captured step has to know about torch's own optimizers."""

import torch
from torch import Tensor

from ..errors import CaptureError


def optimizer_key(opt: torch.optim.Optimizer) -> tuple:
    """The settings that any optimizer hands to its kernels by value."""
    return tuple(
        (len(group["params"]), group.get("maximize"), group.get("amsgrad"))
        for group in opt.param_groups
    )


def check_capturable(opt: torch.optim.Optimizer):
    """CaptureError for a learning rate or a step number on the host, which a graph would freeze."""
    name = type(opt).__name__
    for g, group in enumerate(opt.param_groups):
        on_gpu = any(p.is_cuda for p in group["params"])
        if on_gpu and group.get("capturable") is False:
            raise CaptureError(
                f"{name} counts its steps on the host (capturable=False in group {g}), which a "
                "graph would not repeat. Instead: capturable=True and a learning rate on the "
                "device, or ga.AdamW"
            )
        if "lr" not in group:
            continue
        lr = group["lr"]
        if isinstance(lr, Tensor) and (lr.is_cuda or not on_gpu):
            continue
        kind = "a tensor on the CPU" if isinstance(lr, Tensor) else f"the number {lr}"
        raise CaptureError(
            f"the learning rate of {name}'s group {g} is {kind}, which a graph would keep for "
            f"ever, whatever a schedule says. Instead: lr=torch.tensor({float(lr)}, device=...), "
            "or ga.AdamW"
        )
