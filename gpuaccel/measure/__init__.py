"""What a step costs, and what the host did meanwhile.

`Meter` measures a training loop while it runs and never waits for the GPU. `ledger` counts the
launches, synchronisations and copies of a block of code."""

from .ledger import Ledger, Row, ledger
from .meter import LateValue, Meter, Reading, peak_flops

__all__ = [
    "LateValue",
    "Ledger",
    "Meter",
    "Reading",
    "Row",
    "ledger",
    "peak_flops",
]
