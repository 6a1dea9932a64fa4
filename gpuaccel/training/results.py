"""What a TrainStep returns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import reference_scale
from ..optim import DeviceOptimizer


@dataclass
class StepOutput:
    """The results of one step: tensors on the device, not overwritten by the next step.

    Attributes:
        loss: () fp32, mean per token (or of what loss_fn returned).
        tokens: () valid tokens, in the dtype in which loss_fn counts them; None when it returned a
            mean.
        norm: fp32, the gradient norm before clipping: (), or with scope "block" or "tensor" (G,),
            one per block or tensor. None without clipping, as the next three.
        clipped_norm: of the same shape, the norm after clipping.
        scale: of the same shape, what the gradients were multiplied by.
        finite: of the same shape, bool, whether every gradient is finite.
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
