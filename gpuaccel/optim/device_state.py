"""What an optimizer has on a device beside weights and state: hyperparameters, counts, norms."""

import torch
from torch import Tensor

from ..errors import ArgumentError, NonFiniteError
from ..ops.clip import (
    Scope,
    launch_reduce,
    launch_squares,
    launches_for,
    new_state,
    reference_norms,
    reference_scale,
)
from .update_rule import launch_settings


def is_capturing() -> bool:
    """True if the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Norms:
    """The norms of an optimizer's gradients on one device. A captured step knows their addresses.

    Nothing is multiplied here: the update multiplies each gradient by its scale as it reads it.

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

        max_norm: (1,) fp64 on the device. squares: (sums of squares, tensor of each) where they are
        known already, or None. divisor: (1,) fp32, what gradients are divided by, or None."""
        if squares is None:
            # Sorted by tensor number, so that the first nonfinite tensor can be named.
            grads = [self.clip.values[:0]] * len(self.rows)
            for j in jobs:
                grads[j.number] = j.grad
            addresses = list(map(Tensor.data_ptr, grads))
            if addresses != self._addresses:
                self._addresses, self._launches = addresses, launches_for(grads)
            rows = sum(chunks for _, chunks, *_ in self._launches)
            device = self.clip.values.device
            partials = torch.empty(rows, dtype=torch.float64, device=device)
            chunk_to_tensor = torch.empty(rows, dtype=torch.int32, device=device)
            launch_squares(grads, partials, chunk_to_tensor, launches=self._launches)
        else:
            partials, chunk_to_tensor = squares
        launch_reduce(self.clip, partials, chunk_to_tensor, self.groups, max_norm, divisor=divisor)

    def take_by_torch(self, jobs, max_norm: float, divisor: Tensor | None):
        """The same by torch."""
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
        """NonFiniteError, with the tensor's name, where a norm is not finite. Waits."""
        if not bool(self.clip.finite.all()):
            raise NonFiniteError(
                f"the gradient of {self.clip.name() or 'all tensors together'} is not finite: "
                "nothing was changed"
            )


class DeviceState:
    """Memory of one optimizer on one device. A captured step knows these addresses.

    Args:
        device: where the parameters lie.

    Attributes:
        settings: fp64, the settings of each parameter group (the fields of `struct Settings`), then
            max_norm and the seed.
        record: (4,) int32: steps asked for, steps skipped, at the last skip: which step, and which
            tensor.
        norms: scope -> memory for norms.

    Raises:
        ArgumentError: inside of a capture.
    """

    def __init__(self, device: torch.device):
        if is_capturing():
            raise ArgumentError(
                "the optimizer has not taken a step yet, and a CUDA graph is being captured: "
                "call prepare() before"
            )
        self.device = device
        self.settings = torch.empty(0, dtype=torch.float64, device=device)
        self.record = torch.zeros(4, dtype=torch.int32, device=device)
        self._written: list[float] | None = None  # what `settings` holds
        self.norms: dict[str, Norms] = {}

    def write_settings(self, values: list[float | Tensor]):
        """Write what `settings` is to hold, numbers and one-element tensors, where it has changed.

        Never waits.

        Raises:
            ArgumentError: in a capture, which would keep a changed value for ever.
        """
        # A tensor on the device is copied there: it must not pass by the host.
        on_device = [
            (i, value)
            for i, value in enumerate(values)
            if isinstance(value, Tensor) and value.device.type != "cpu"
        ]
        for i, _ in on_device:
            values[i] = 0.0
        numbers = [float(value) for value in values]
        if numbers != self._written:
            if is_capturing():
                raise ArgumentError(
                    "a hyperparameter has changed since the last step, and a CUDA graph is being "
                    "captured, which would keep it for ever: call refresh() before the capture"
                )
            if len(self.settings) != len(numbers):
                self.settings = torch.empty(len(numbers), dtype=torch.float64, device=self.device)
                self.max_norm, self.seed = self.settings[-2:-1], self.settings[-1:]
            launch_settings(self.settings, numbers)
            self._written = numbers
        for i, value in on_device:
            self.settings[i : i + 1].copy_(value.view(1))
