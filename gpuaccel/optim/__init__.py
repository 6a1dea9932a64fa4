"""Flat storage (arena), what backward adds to it (accumulate), clipping over it (clip), and the
optimizers (adamw, lion)."""

from .accumulate import MODES, BackwardListener, GradientAccumulator, open_accumulators
from .adamw import AdamW
from .arena import Arena, own_storage
from .clip import clip_grad_norm_, clip_grads_
from .device_optimizer import DeviceOptimizer
from .fused_mode import autograd_adds_faster
from .lion import Lion
from .participants import capture_participants
from .state_layout import ParameterLayout

__all__ = [
    "AdamW",
    "Arena",
    "BackwardListener",
    "DeviceOptimizer",
    "GradientAccumulator",
    "Lion",
    "MODES",
    "ParameterLayout",
    "autograd_adds_faster",
    "capture_participants",
    "clip_grad_norm_",
    "clip_grads_",
    "open_accumulators",
    "own_storage",
]
