"""A whole step and what is around it: data, models, the loop, checkpoints, LoRA."""

from .replay import Replay

__all__ = ["Replay"]
