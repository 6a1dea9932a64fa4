"""A step captured once and replayed: graphed_step; capture (CUDA graphs) and tape (on the CPU).

captured_graph, snapshot and addresses are the parts of graphed_step; participant is the
protocol by which the parts of a step tell it what a graph must know.
"""

from .capture import TapeRecorder
from .graphed_step import GraphedStep, Policy, check_options
from .snapshot import ForwardState, preserved
from .torch_optimizers import frozen_number

__all__ = [
    "ForwardState",
    "GraphedStep",
    "Policy",
    "TapeRecorder",
    "check_options",
    "frozen_number",
    "preserved",
]
