"""What a step costs, and what the host did meanwhile.

`Meter` measures a training loop while it runs and never waits for the GPU. `ledger` counts the
launches, synchronisations and copies of a block of code; `timeline` keeps when each of them was.
The rest reads the records of torch.profiler for other rooms."""

from . import timeline
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
from .profiler import profiler_sees_gpu, quiet_profiler, trace_events
from .timeline import Span

__all__ = [
    "LateValue",
    "Ledger",
    "Meter",
    "Reading",
    "Row",
    "Span",
    "StageTimer",
    "free_gpu_memory",
    "ledger",
    "peak_flops",
    "profiler_sees_gpu",
    "quiet_profiler",
    "resident_bytes",
    "timeline",
    "trace_events",
]
