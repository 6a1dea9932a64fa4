"""What a TrainStep returns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import reference_scale
from ..optim import DeviceOptimizer


@dataclass
class StepOutput:
    """The results of one step: one-element tensors on the device, not overwritten by the next.

    Attributes:
        loss: mean per token (or of what loss_fn returned), fp32.
        tokens: valid tokens; None when loss_fn returned a mean.
        norm: the gradient norm before clipping, one per group with a scope; None without clipping.
        clipped_norm: the norm after clipping.
        scale: what the gradients were multiplied by.
        finite: bool, whether every gradient is finite.
    """

    loss: Tensor
    tokens: Tensor | None
    norm: Tensor | None = None
    clipped_norm: Tensor | None = None
    scale: Tensor | None = None
    finite: Tensor | None = None


def clipped_here(norm: Tensor, max_norm: float) -> dict[str, Tensor]:
    """The fields of StepOutput about clipping, of torch.nn.utils.clip_grad_norm_."""
    scale = reference_scale(norm, max_norm)
    fields = {"norm": norm, "clipped_norm": norm * scale, "scale": scale}
    return {**fields, "finite": torch.isfinite(norm)}


def clipped_by(opt: DeviceOptimizer) -> dict[str, Tensor]:
    """The same of the latest step() of a ga.AdamW, as copies that stay valid."""
    if opt.clip_state is None:
        return {}
    state = opt.clip_state.clone()
    return {name: getattr(state, name) for name in ("norm", "clipped_norm", "scale", "finite")}
