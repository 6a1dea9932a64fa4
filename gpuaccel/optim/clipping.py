"""Clipping inside of an optimizer's step: what a norm is taken over, the norms, and the scales.

Nothing is multiplied here: the update multiplies each gradient by its scale as it reads it. The
formula and its kernels: ops/clip.py. Clipping as a call of its own: optim/clip.py.
"""

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..ops.clip import (
    Scope,
    launch_reduce,
    launch_squares,
    launches_for,
    new_state,
    reference_norms,
    reference_scale,
)


class Norms:
    """The norms of an optimizer's gradients on one device. A captured step knows their addresses.

    Args:
        device: where the gradients lie.
        scope: "global", "tensor" or "block".
        tensors: number of the optimizer's tensors.
        arena: theirs, or None.

    Attributes:
        clip: the norms and scales of the latest step.
        rows: of each tensor in `clip`.
        groups: (tensors,) int32, the same on the device; None: there is one row.
    """

    def __init__(self, device: torch.device, scope: Scope, tensors: int, arena):
        self.rows = {
            "global": lambda: [0] * tensors,
            "tensor": lambda: list(range(tensors)),
            "block": lambda: [s.block for s in arena.segments],
        }[scope]()
        self.clip = new_state(max(self.rows) + 1, device, scope, lambda: ())
        self.groups: Tensor | None = None
        if scope != "global":
            self.groups = torch.tensor(self.rows, dtype=torch.int32, device=device)
        # Where the gradients of the latest step lie, and the launches of squares_v2 over them.
        self._addresses: list[int] = []
        self._launches: tuple = ()

    def take(self, jobs, max_norm: Tensor, squares, divisor: Tensor | None):
        """Norms and scales of the gradients into `clip`, by our kernels.

        Args:
            jobs: whose gradients the kernels take.
            max_norm: (1,) fp64 on the device.
            squares: (sums of squares, tensor of each) where they are known already, or None.
            divisor: (1,) fp32, what gradients are divided by, or None.
        """
        if squares is None:
            # Sorted by tensor number, so that the first nonfinite tensor can be named.
            grads: list[Tensor | None] = [None] * len(self.rows)
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

    def take_by_torch(self, jobs, max_norm: float, divisor: Tensor | None):
        """Norms and scales of the gradients into `clip`, by torch.

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
            [self.rows[j.number] for j in jobs],
            len(self.clip.values),
            numbers=[j.number for j in jobs],
        )
        norms = norms if divisor is None else norms / divisor.view(())
        scales = reference_scale(norms, max_norm)
        finite = torch.isfinite(norms).to(norms.dtype)
        self.clip.values.copy_(torch.stack([scales, norms, norms * scales, finite], 1))
        self.clip.nonfinite_tensor.copy_(nonfinite_tensor)

    def check_finite(self):
        """Raise for a nonfinite norm. Waits for the device.

        Raises:
            NonFiniteError: where a norm is not finite; it names the tensor.
        """
        if not bool(self.clip.finite.all()):
            raise NonFiniteError(
                f"the gradient of {self.clip.name() or 'all tensors together'} is not finite: "
                "nothing was changed"
            )
