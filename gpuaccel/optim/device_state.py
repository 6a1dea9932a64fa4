"""What an optimizer has on a device beside weights and state: hyperparameters, counts, norms."""

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops import (
    ClipState,
    launch_reduce,
    launch_settings,
    launch_squares,
    new_state,
    reference_norms,
    reference_scale,
)


def is_capturing() -> bool:
    """Is the current stream captured in a CUDA graph?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class DeviceState:
    """Memory of one optimizer on one device. A captured step knows these addresses.

    Args:
        device: where the parameters lie.

    Attributes:
        settings: fp64, the settings of each parameter group (the fields of `struct Settings`), then
            max_norm and the seed.
        record: (4,) int32: steps asked for, steps skipped, at the last skip: which step, and which
            tensor.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.settings = torch.empty(0, dtype=torch.float64, device=device)
        self.record = torch.zeros(4, dtype=torch.int32, device=device)
        self.written: "list[float] | None" = None  # what `settings` holds
        self.clip_states: "dict[str, tuple[ClipState, Tensor | None]]" = {}  # by scope

    # ---- hyperparameters ----

    def write_settings(self, values: "list[float]"):
        """Write the settings to the device, if the host has changed them. No synchronisation.

        Args:
            values: what `settings` is to hold.

        Raises:
            ArgumentError: in a capture, which would keep a changed value for ever.
        """
        if values == self.written:
            return
        if is_capturing():
            raise ArgumentError(
                "a hyperparameter has changed since the last step, and a CUDA graph is being "
                "captured, which would keep it for ever: call refresh() before the capture"
            )
        if len(self.settings) != len(values):
            self.settings = torch.empty(len(values), dtype=torch.float64, device=self.device)
            self.max_norm, self.seed = self.settings[-2:-1], self.settings[-1:]
        launch_settings(self.settings, values)
        self.written = values

    # ---- norms ----

    def clip_state(
        self, scope: str, rows: int, names, group_of
    ) -> "tuple[ClipState, Tensor | None]":
        """(norms of this scope, per tensor its row of them or None: there is one row).

        Args:
            scope: "global", "tensor" or "block".
            rows: number of norms.
            names: a function that returns the tensors' names, for messages.
            group_of: a function that makes the second result, once.

        Raises:
            ArgumentError: in a capture, before the first norm.
        """
        clip, groups = self.clip_states.get(scope, (None, None))
        if clip is None or len(clip.values) != rows:
            if is_capturing():
                raise ArgumentError(
                    "the optimizer has not taken a norm yet, and a CUDA graph is being captured: "
                    "take one step before, or call prepare()"
                )
            clip, groups = new_state(rows, self.device, scope, names), group_of()
            self.clip_states[scope] = clip, groups
        return clip, groups

    def take_norm(self, clip, groups, grads, launches, squares, divisor):
        """Norms and scales of the gradients into `clip`, by our kernels.

        Args:
            clip: where the norms go.
            groups: (tensors,) int32, the row of each tensor in clip; None: there is one row.
            grads: the gradients; None: a tensor without one.
            launches: of squares_v2 over `grads`.
            squares: in place of them (sums of squares, tensor of each); None: not known.
            divisor: (1,) fp32, what gradients are divided by, or None.
        """
        if squares is not None:
            partials, chunk_to_tensor = squares
        else:
            rows = sum(chunks for _, chunks, *_ in launches)
            partials = torch.empty(rows, dtype=torch.float64, device=self.device)
            chunk_to_tensor = torch.empty(rows, dtype=torch.int32, device=self.device)
            launch_squares(grads, partials, chunk_to_tensor, launches=launches)
        launch_reduce(
            clip, partials, chunk_to_tensor, groups, len(partials), self.max_norm, divisor=divisor
        )

    def take_norm_by_torch(self, clip, grads, rows, numbers, max_norm, divisor):
        """The same in torch.

        Args:
            clip: where the norms go.
            grads: the gradients.
            rows: of each gradient in `clip`.
            numbers: of the gradients' tensors.
            max_norm: a number.
            divisor: (1,) fp32, or None.
        """
        # A norm of fp16 may be too large for fp16.
        grads = [g.float() if g.dtype == torch.float16 else g for g in grads]
        norms, nonfinite_tensor = reference_norms(
            grads, 2.0, rows, len(clip.values), numbers=numbers
        )
        norms = norms if divisor is None else norms / divisor.view(())
        scales = reference_scale(norms, max_norm)
        finite = torch.isfinite(norms).to(norms.dtype)
        clip.values.copy_(torch.stack([scales, norms, norms * scales, finite], 1))
        clip.nonfinite_tensor.copy_(nonfinite_tensor)
