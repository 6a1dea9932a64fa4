"""An nn.RMSNorm of the residual stream, in one kernel with the addition before it.

    h, x = fused_add_norm(x, attention_output, self.post_attn_norm)  # x + attention_output, normed

The module stays an nn.RMSNorm: its parameter, its name and its hooks are as without.
"""

import torch
from torch import Tensor, nn

from ..ops import add_rms_norm, rms_norm_runs
from .fused_forward import has_class_forward
from .gradient_use import differentiates_otherwise


def fused_add_norm(
    x: Tensor, residual: "Tensor | None", norm: nn.Module
) -> "tuple[Tensor, Tensor]":
    """(norm(s), s) with s = x + residual, as one kernel where that is possible.

    It is possible where our kernels run, for an nn.RMSNorm over the last dimension without hooks,
    in tensors of one dtype. Otherwise, under torch.autocast, torch.func and in forward mode, torch
    adds and the module is called.

    Args:
        x, residual: (..., H); residual None: s is x.
        norm: nn.RMSNorm(H).

    Returns:
        The norm and the sum, (..., H). Use the returned s, not x, for what follows.
    """
    if type(norm) is nn.RMSNorm and norm.eps is not None and _one_kernel(x, residual, norm):
        return add_rms_norm(x, residual, norm.weight, norm.eps)
    s = x if residual is None else x + residual
    return norm(s), s


def _one_kernel(x, residual, norm) -> bool:
    weight = norm.weight
    return (
        weight is not None
        and rms_norm_runs(x.device, x.dtype, weight.numel())
        # Subclasses of tensors (DTensor, FakeTensor) have operations of their own.
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and weight.dtype == x.dtype
        and weight.device == x.device
        and x.shape[-1:] == weight.shape
        and (residual is None or _alike(x, residual))
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and not (norm._backward_hooks or norm._backward_pre_hooks)
        and has_class_forward(norm)
        and not torch.is_autocast_enabled(x.device.type)
        and not differentiates_otherwise()
    )


def _alike(x, residual) -> bool:
    return (
        type(residual) is Tensor
        and residual.shape == x.shape
        and residual.dtype == x.dtype
        and residual.device == x.device
    )
