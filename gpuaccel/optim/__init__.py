"""Flat storage (layout, arena), the rule of gradients (gradients), products that add into it
(products), clipping over it (clip), and the optimizers (adamw, lion)."""

from .adamw import AdamW
from .arena import Arena
from .clip import clip_grad_norm_, clip_grads_
from .device_optimizer import DeviceOptimizer
from .gradients import GradientListener
from .layout import Segment, own_storage
from .lion import Lion
from .participants import capture_participants
from .products import Products
from .state_layout import ParameterLayout

__all__ = [
    "AdamW",
    "Arena",
    "DeviceOptimizer",
    "GradientListener",
    "Lion",
    "ParameterLayout",
    "Products",
    "Segment",
    "capture_participants",
    "clip_grad_norm_",
    "clip_grads_",
    "own_storage",
]
