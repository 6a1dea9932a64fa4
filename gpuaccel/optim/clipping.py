"""Clipping inside of an optimizer's step: what a norm is taken over, the norms, and the scales.

Nothing is multiplied here: the update multiplies each gradient by its scale as it reads it. The
formula and its kernels: ops/clip.py. Clipping as a call of its own: optim/clip.py.
"""

import torch
from torch import Tensor

from ..errors import ArgumentError, NonFiniteError
from ..ops import (
    POLICIES,
    SCOPES,
    check_choice,
    check_max_norm,
    launch_reduce,
    launch_squares,
    launches_for,
    new_state,
    reference_norms,
    reference_scale,
)


def check_clipping(max_norm, scope: str, on_nonfinite: str, arena):
    """Refuse arguments of an optimizer that clips.

    Args:
        max_norm: a number or None.
        scope: "global", "tensor" or, with an arena, "block".
        on_nonfinite: "propagate", "skip" or "raise".
        arena: of the optimizer, or None.

    Raises:
        ArgumentError: it names the argument, its value and what is expected.
    """
    check_choice("scope", scope, SCOPES)
    check_choice("on_nonfinite", on_nonfinite, POLICIES)
    limit_of(max_norm)
    if scope == "block" and arena is None:
        raise ArgumentError("scope='block' needs an arena, which knows the blocks; got parameters")


def limit_of(max_norm) -> float:
    """max_norm as a number, infinity for None.

    Args:
        max_norm: a number or None.

    Raises:
        ArgumentError: as for check_max_norm.
    """
    return float("inf") if max_norm is None else check_max_norm(max_norm)


def row_of(scope: str, number: int, arena) -> int:
    """The row of the clip state that a tensor belongs to.

    Args:
        scope: "global", "tensor" or "block".
        number: of the tensor.
        arena: of the optimizer; None is possible where the scope is not "block".
    """
    if scope == "block":
        return arena.segments[number].block
    return number if scope == "tensor" else 0


class Norms:
    """The norms of an optimizer's gradients on one device. A captured step knows their addresses.

    Args:
        device: where the gradients lie.
        scope: "global", "tensor" or "block".
        tensors: number of the optimizer's tensors.
        arena: theirs, or None.

    Attributes:
        clip: the norms and scales of the latest step.
        groups: (tensors,) int32, the row of each tensor in `clip`; None: there is one row.
    """

    def __init__(self, device: torch.device, scope: str, tensors: int, arena):
        self._tensors = tensors
        rows = tensors if scope == "tensor" else len(arena.blocks) if scope == "block" else 1
        self.clip = new_state(rows, device, scope, lambda: ())
        self.groups: "Tensor | None" = None
        if scope == "block":
            self.groups = arena.tensor_to_block
        elif scope == "tensor":
            self.groups = torch.arange(tensors, dtype=torch.int32, device=device)
        # Where the gradients of the latest step lie, and the launches of squares_v2 over them.
        self._addresses: "list[int]" = []
        self._launches: tuple = ()

    def take(self, jobs, max_norm: Tensor, squares, divisor: "Tensor | None"):
        """Norms and scales of the gradients into `clip`, by our kernels.

        Args:
            jobs: whose gradients the kernels take.
            max_norm: (1,) fp64 on the device.
            squares: (sums of squares, tensor of each) where they are known already, or None.
            divisor: (1,) fp32, what gradients are divided by, or None.
        """
        if squares is None:
            # By number, so that the first tensor that is not finite can be named.
            grads: "list[Tensor | None]" = [None] * self._tensors
            for j in jobs:
                grads[j.number] = j.grad
            addresses = [0 if g is None else g.data_ptr() for g in grads]
            if addresses != self._addresses:
                self._addresses, self._launches = addresses, launches_for(grads)
            rows = sum(chunks for _, chunks, *_ in self._launches)
            device = self.clip.values.device
            partials = torch.empty(rows, dtype=torch.float64, device=device)
            chunk_to_tensor = torch.empty(rows, dtype=torch.int32, device=device)
            launch_squares(grads, partials, chunk_to_tensor, launches=self._launches)
        else:
            partials, chunk_to_tensor = squares
        rows = len(partials)
        launch_reduce(
            self.clip, partials, chunk_to_tensor, self.groups, rows, max_norm, divisor=divisor
        )

    def take_by_torch(self, jobs, max_norm: float, divisor: "Tensor | None"):
        """The same in torch.

        Args:
            jobs: with gradients.
            max_norm: a number.
            divisor: (1,) fp32, or None.
        """
        # A norm of fp16 may be too large for fp16.
        grads = [j.grad.float() if j.grad.dtype == torch.float16 else j.grad for j in jobs]
        norms, nonfinite_tensor = reference_norms(
            grads,
            2.0,
            [j.row for j in jobs],
            len(self.clip.values),
            numbers=[j.number for j in jobs],
        )
        norms = norms if divisor is None else norms / divisor.view(())
        scales = reference_scale(norms, max_norm)
        finite = torch.isfinite(norms).to(norms.dtype)
        self.clip.values.copy_(torch.stack([scales, norms, norms * scales, finite], 1))
        self.clip.nonfinite_tensor.copy_(nonfinite_tensor)

    def check_finite(self):
        """Waits for the device.

        Raises:
            NonFiniteError: where a norm is not finite; it names the tensor.
        """
        if not bool(self.clip.finite.all()):
            raise NonFiniteError(
                f"the gradient of {self.clip.name() or 'all tensors together'} is not finite: "
                "nothing was changed"
            )
