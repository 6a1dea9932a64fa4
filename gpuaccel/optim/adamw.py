"""ga.AdamW: torch.optim.AdamW by our kernels, with clipping inside.

    opt = ga.AdamW(model.parameters(), lr=3e-4)              # as torch.optim.AdamW, and is one
    opt = ga.AdamW(ga.Arena(model), lr=3e-4, weight_decay=0.1, max_norm=1.0)
    opt.step()                        # clips, updates and clears the sums in one pass
    opt.clip_state.norm, opt.clip_state.clipped_norm, opt.skipped    # on the device, no wait
    opt.last_skip()                   # waits: None, or which step and tensor were not finite

How a step works: optim/device_optimizer.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops.clip import OnNonfinite, Scope
from .arena import Arena
from .device_optimizer import DeviceOptimizer
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
    """One AdamW step in place, of tensors of one shape on any device. step: from 1.

    bf16 and fp16 are computed in fp32 and rounded once. vmax: the largest v so far, or None without
    AMSGrad. factor: what the gradient is multiplied by (clip scale, sign). Numbers may be ()
    tensors. Returns the new weight before it is rounded to the weight's dtype."""
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
    """reference_adamw of dense tensors of one dtype, by torch's kernel for a CPU.

    Equal within rounding. steps: () fp32, counted already."""
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


class AdamW(DeviceOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW by our kernels: its arguments, parameter groups, schedulers and state_dict.

    Without max_norm, results on a CPU are bit-identical to torch's fused=True; on a GPU the last
    digits may differ. The moments of a state_dict over an arena load into
    torch.optim.AdamW(arena.parameter_groups(weight_decay)).

    Args:
        params_or_arena: parameters or parameter groups, as torch's, fp32, bf16, fp16 or fp64; or an
            Arena.
        lr: learning rate, 0 or more; a number or a one-element tensor.
        betas: decay of the moments, each from 0 to below 1, as torch's.
        eps: added to the denominator, 0 or more.
        weight_decay: 0 or more, decoupled as torch's. Over an arena only tensors of two or more
            dimensions decay, unless Arena(decay=...) says otherwise.
        amsgrad: divide by the largest second moment so far, as torch's.
        max_norm: clip the gradients to this norm inside the step; None: no clipping.
        scope: what a norm is taken over: "global", "tensor" or, with an arena, "block".
        on_nonfinite: what a gradient with NaN or infinity does: "skip" the step (default with an
            arena or a max_norm), "propagate" (default otherwise) or "raise".
        stochastic_rounding: round new bf16 weights up or down by chance, keyed on seed, tensor,
            element and step.
        seed: of the stochastic rounding, 0 to 2^53 - 1.
        **torch_options: maximize, foreach, capturable, differentiable and fused, as torch's.
            foreach, capturable and fused are accepted and kept; every step is fused and can be
            captured.

    Attributes:
        clip_state: the ClipState of the latest step, which the next one overwrites; None: it took
            no norm.
        skipped: () int32 on the device, the number of skipped steps. last_skip() names the tensor.

    Raises:
        ArgumentError: for differentiable=True, for complex and sparse tensors, for scope="block"
            without an arena, and for an unknown option.
        ValueError: for lr, betas, eps or weight_decay out of range, as torch's.
        NonFiniteError: in step() with on_nonfinite="raise"; nothing has changed.

    Source:
        kernels_cu/adamw.cu; torch.optim.AdamW; Loshchilov and Hutter, Decoupled Weight Decay
        Regularization (2019).

    Example:
        >>> model = torch.nn.Linear(4, 2, device=ga.default_device())
        >>> opt = ga.AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
        >>> model(torch.ones(3, 4, device=ga.default_device())).sum().backward()
        >>> opt.step()
        >>> print(f"norm {opt.clip_state.norm:.2f}, clipped to {opt.clip_state.clipped_norm:.2f}")
        norm 9.49, clipped to 1.00
    """

    rule = UpdateRule(
        "adamw",
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        reference_adamw,
        fused_adamw,
        optional={"max_exp_avg_sq": "amsgrad"},
    )

    def __init__(
        self,
        params_or_arena: Arena | Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_norm: float | None = None,
        scope: Scope = "global",
        on_nonfinite: OnNonfinite | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **torch_options: bool | None,
    ):
        if torch_options.get("differentiable"):
            raise ArgumentError(
                "differentiable is True: our kernels are not; use torch.optim.AdamW for it"
            )
        arguments = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params_or_arena,
            {**arguments, "amsgrad": amsgrad, **torch_options},
            lr=lr,
            weight_decay=weight_decay,
            max_norm=max_norm,
            scope=scope,
            on_nonfinite=on_nonfinite,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )
