"""A whole step and what is around it: step, replay (its CUDA graphs), results, micro (batches in
pieces), loop, checkpoint, data, models, lora."""

from .replay import Replay

__all__ = ["Replay"]
