"""What an optimizer has on a device beside weights and state: hyperparameters and counts."""

import torch
from torch import Tensor

from ..errors import ArgumentError
from .clipping import Norms
from .update_rule import launch_settings


def is_capturing() -> bool:
    """True if the current stream is being captured in a CUDA graph."""
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
        """Write the settings to the device, if the host has changed them. No synchronisation.

        Args:
            values: what `settings` is to hold: numbers and one-element tensors.

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
