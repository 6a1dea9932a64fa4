"""ga.optim.Lion: the sign of an interpolated momentum, with half of AdamW's state.

    opt = ga.optim.Lion(ga.Arena(model), lr=1e-4, weight_decay=1.0, max_norm=1.0)
    step = ga.TrainStep(model, opt, replay="graph")

Its authors use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times
larger. A file like this one and kernels_cu/lion.cu are all that an optimizer needs.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .device_optimizer import DeviceOptimizer
from .update_rule import UpdateRule


def reference_lion(
    weight: Tensor, grad: Tensor, m: Tensor, step, *, lr, beta1, beta2, weight_decay, factor=1.0
) -> Tensor:
    """One Lion step in place, of tensors of one shape on any device. step: not used.

    bf16 and fp16 are computed in fp32 and rounded once. factor: what the gradient is multiplied by
    (clip scale, sign). Returns the new weight before it is rounded to the weight's dtype."""
    low = weight.dtype in (torch.bfloat16, torch.float16)
    w, g, momentum = (t.float() if low else t for t in (weight, grad, m))
    g = g.to(w.dtype) * factor
    u = torch.lerp(momentum, g, 1 - beta1)
    sign = torch.where(u.isnan(), u, u.sign())  # torch's sign of NaN is 0
    w = w * (1 - lr * weight_decay) - sign * lr
    m.copy_(torch.lerp(momentum, g, 1 - beta2))
    weight.copy_(w)
    return w


class Lion(DeviceOptimizer):
    """Lion: w = w (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g).

    Then m = beta2 m + (1 - beta2) g; `state[p]["exp_avg"]` is m.

    Args:
        params_or_arena: as for torch's optimizers, or an Arena.
        lr: learning rate, 0 or more, a number or a one-element tensor.
        betas: (of the update, of the momentum m), from 0 to below 1.
        weight_decay: 0 or more. Over an arena only tensors of two or more dimensions decay, unless
            Arena(decay=...) says otherwise.
        maximize: as torch's.
        **options: max_norm, scope, on_nonfinite, stochastic_rounding, seed: as AdamW's.

    Raises:
        ValueError: for a number out of its range, as torch's optimizers do.
        ArgumentError: for an lr of several elements, and as AdamW does.

    Source:
        kernels_cu/lion.cu; Chen et al., Symbolic Discovery of Optimization Algorithms (2023).
    """

    rule = UpdateRule("lion", ("exp_avg",), reference_lion)

    def __init__(
        self,
        params_or_arena,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ):
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ArgumentError(f"lr has shape {tuple(lr.shape)}; expected one element")
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for i, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        super().__init__(
            params_or_arena, {"defaults": defaults}, lr=lr, weight_decay=weight_decay, **options
        )
