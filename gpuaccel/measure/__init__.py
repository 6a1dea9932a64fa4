"""What a step costs, and what the host did meanwhile.

`Meter` measures a training loop while it runs and never waits for the GPU. `ledger` counts the
launches, synchronisations and copies of a block of code."""

from .ledger import Ledger, Row, ledger
from .meter import (
    LateValue,
    Meter,
    Reading,
    StageTimer,
    free_gpu_memory,
    peak_flops,
    resident_bytes,
)

__all__ = [
    "LateValue",
    "Ledger",
    "Meter",
    "Reading",
    "Row",
    "StageTimer",
    "free_gpu_memory",
    "ledger",
    "peak_flops",
    "resident_bytes",
]
