"""The names that people type, as `gpuaccel.<name>`; each from its room.

`gpuaccel/__init__.py` loads this module when one of them is first used. What notebooks and the
command line need is loaded later still, when one of its names is first used."""

import importlib
from typing import TYPE_CHECKING

from .backends import backend, default_device, default_dtype, deterministic, use_backend
from .compiler import Kernel, compile
from .distributed import Distributed, launch
from .errors import GpuaccelError
from .graphs import GraphedStep
from .measure import ledger
from .nn import Embedding, PolyAttention, RichardsGLU, deterministic_embeddings
from .optim import AdamW, Arena, clip_grad_norm_
from .simt import checked
from .training import (
    TrainStep,
    load_checkpoint,
    preset,
    save_checkpoint,
    token_loss,
    train,
)

if TYPE_CHECKING:
    from .cli.doctor import doctor
    from .learn import Live, check, load_ipython_extension, replaced, show

__all__ = [
    "AdamW",
    "Arena",
    "Distributed",
    "Embedding",
    "GpuaccelError",
    "GraphedStep",
    "Kernel",
    "Live",
    "PolyAttention",
    "RichardsGLU",
    "TrainStep",
    "backend",
    "check",
    "checked",
    "clip_grad_norm_",
    "compile",
    "default_device",
    "default_dtype",
    "deterministic",
    "deterministic_embeddings",
    "doctor",
    "launch",
    "ledger",
    "load_checkpoint",
    "load_ipython_extension",
    "preset",
    "replaced",
    "save_checkpoint",
    "show",
    "token_loss",
    "train",
    "use_backend",
]

# name -> the room that is loaded when it is first used
_LAZY = {
    "doctor": "cli",
    "Live": "learn",
    "check": "learn",
    "load_ipython_extension": "learn",
    "replaced": "learn",
    "show": "learn",
}

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __package__), name)
        globals()[name] = value
        return value
