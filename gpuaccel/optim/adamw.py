"""ga.AdamW: torch.optim.AdamW by our kernels, with clipping inside.

    >>> opt = ga.AdamW(model.parameters(), lr=3e-4)              # as torch.optim.AdamW, and is one
    >>> opt = ga.AdamW(ga.Arena(model), lr=3e-4, weight_decay=0.1, max_norm=1.0)
    >>> opt.step()                        # clips, updates and clears the sums in one pass
    >>> opt.clip_state.norm, opt.clip_state.clipped_norm, opt.skipped    # on the device, no wait
    >>> opt.last_skip()                   # waits: None, or which step and tensor were not finite

How a step works: optim/device_optimizer.py. The formula: ops/adamw.py.
"""

import torch

from ..errors import ArgumentError
from ..ops import ADAMW
from .device_optimizer import DeviceOptimizer


class AdamW(DeviceOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW by our kernels: its arguments, parameter groups, schedulers and state_dict.

    These are flat arguments, not one object for clipping and one for rounding: people type
    `max_norm=1.0`, and each of the five works by itself.
    The rounding is that of torch's fused=True. The state_dict over an arena fits
    torch.optim.AdamW(arena.parameter_groups(weight_decay)).

    Args:
        params_or_arena: as torch's, or an Arena.
        lr, betas, eps, weight_decay, amsgrad: as torch's. Over an arena only matrices decay (its
            segments say so: Arena(decay=...)).
        max_norm, scope, on_nonfinite, stochastic_rounding, seed: see DeviceOptimizer.
        torch_options: maximize, foreach, capturable, differentiable and fused, as torch's. foreach,
            capturable and fused are accepted and kept; every step is fused and can be captured.

    Raises:
        ArgumentError: for differentiable=True, and for complex and sparse tensors.
    """

    rule = ADAMW

    def __init__(
        self,
        params_or_arena,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_norm: "float | None" = None,
        scope: str = "global",
        on_nonfinite: "str | None" = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **torch_options,
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
