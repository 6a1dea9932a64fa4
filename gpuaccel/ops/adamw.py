"""The AdamW update: its definition in torch, torch's fused kernel, and the rule for the launches of
kernels_cu/adamw.cu.

    reference_adamw(weight, grad, m, v, None, step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8,
                    weight_decay=0.01)

The optimizer itself: optim/adamw.py. Source: Loshchilov and Hutter, 2019 (decoupled weight decay).
"""

import torch
from torch import Tensor

from .update_rule import UpdateRule


def reference_adamw(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    vmax: Tensor | None,
    step,
    *,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    factor=1.0,
):
    """One AdamW step in place: weight, m, v (and vmax: AMSGrad) of one shape, on any device.

    bf16 and fp16 are computed in fp32 and rounded once.

    Args:
        weight, grad, m, v: of one shape.
        vmax: the largest v so far, or None without AMSGrad.
        step: the number of this step, from 1, or a () tensor.
        lr, beta1, beta2: numbers or () tensors.
        eps, weight_decay: numbers.
        factor: what the gradient is multiplied by (clip scale, sign), a number or a () tensor.

    Returns:
        The new weight before it is rounded to the weight's dtype.
    """
    low = weight.dtype in (torch.bfloat16, torch.float16)
    w, g, new_m, new_v = (t.float() if low else t for t in (weight, grad, m, v))
    g = g.to(w.dtype) * factor
    w = w * (1 - lr * weight_decay)
    new_m = torch.lerp(new_m, g, 1 - beta1)
    new_v = (new_v * beta2).addcmul_(g, g, value=1 - beta2)
    second = new_v
    if vmax is not None:
        second = torch.maximum(vmax.to(new_v.dtype), new_v)
        vmax.copy_(second)
    correction = (1 - beta2**step) ** 0.5
    w = w - new_m / (second.sqrt() / correction + eps) * (lr / (1 - beta1**step))
    m.copy_(new_m)
    v.copy_(new_v)
    weight.copy_(w)
    return w


def fused_adamw(
    weights, grads, m, v, vmax, steps, *, lr, beta1, beta2, eps, weight_decay, maximize
):
    """reference_adamw of many tensors by torch's kernel for a CPU, in place; equal within rounding.

    Args:
        weights, grads, m, v: lists of dense tensors, all of one dtype.
        vmax: as many, or as many times None.
        steps: () fp32, the number of this step of each tensor.
        lr, beta1, beta2, eps, weight_decay: numbers.
        maximize: step along the gradients.

    Source:
        torch.optim.AdamW(fused=True).
    """
    amsgrad = vmax[0] is not None
    torch._fused_adamw_(
        weights,
        grads,
        m,
        v,
        vmax if amsgrad else [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
    )


ADAMW = UpdateRule(
    "adamw",
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    reference_adamw,
    fused_adamw,
    optional={"max_exp_avg_sq": "amsgrad"},
)
