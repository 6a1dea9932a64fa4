"""gpuaccel: what happens to a gradient between `loss.backward()` and the new weight.

    >>> import gpuaccel as ga
    >>> step = ga.TrainStep(model, replay="graph", max_norm=1.0)
    >>> out = step((inputs, targets))

The names here are those that people type; everything else is in its room, as
`ga.ops.encoder_backward`, `ga.optim.Lion` and `ga.errors.KernelError` are. CONTRIBUTING.md says
what is in which room. What notebooks and the command line need (`ga.learn`, `ga.cli`) is loaded
when one of its names is first used.
"""

__version__ = "0.2.0"

import importlib
from typing import TYPE_CHECKING

# The rooms, as ga.<room>.
from . import (  # noqa: F401
    backends,
    compiler,
    distributed,
    errors,
    graphs,
    measure,
    nn,
    ops,
    optim,
    simt,
    training,
)
from .backends import backend, default_device, deterministic, use_backend
from .compiler import Kernel, compile
from .distributed import Distributed, launch
from .errors import GpuaccelError
from .graphs import GraphedStep
from .measure import Meter, ledger
from .nn import Embedding, PolyAttention, RichardsGLU, deterministic_embeddings
from .optim import AdamW, Arena, GradientAccumulator, clip_grad_norm_
from .simt import checked
from .training import (
    Batches,
    TrainStep,
    Transformer,
    apply_lora,
    load_checkpoint,
    load_lora,
    make_dataset,
    merge_lora,
    preset,
    save_checkpoint,
    save_lora,
    token_loss,
    train,
)

if TYPE_CHECKING:
    from . import cli, learn  # noqa: F401
    from .cli.doctor import doctor
    from .learn import LiveThroughput, check, hint, load_ipython_extension, show, solution

# name -> the room that is loaded when it is first used; a room is one itself.
_LAZY = {
    "cli": "cli",
    "doctor": "cli",
    "learn": "learn",
    "LiveThroughput": "learn",
    "check": "learn",
    "hint": "learn",
    "load_ipython_extension": "learn",
    "show": "learn",
    "solution": "learn",
}

__all__ = [
    "AdamW",
    "Arena",
    "Batches",
    "Distributed",
    "Embedding",
    "GpuaccelError",
    "GradientAccumulator",
    "GraphedStep",
    "Kernel",
    "LiveThroughput",
    "Meter",
    "PolyAttention",
    "RichardsGLU",
    "TrainStep",
    "Transformer",
    "apply_lora",
    "backend",
    "check",
    "checked",
    "clip_grad_norm_",
    "compile",
    "default_device",
    "deterministic",
    "deterministic_embeddings",
    "doctor",
    "hint",
    "launch",
    "ledger",
    "load_checkpoint",
    "load_ipython_extension",
    "load_lora",
    "make_dataset",
    "merge_lora",
    "preset",
    "save_checkpoint",
    "save_lora",
    "show",
    "solution",
    "token_loss",
    "train",
    "use_backend",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        room = importlib.import_module(f".{_LAZY[name]}", __name__)
        value = room if name == _LAZY[name] else getattr(room, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_LAZY})
