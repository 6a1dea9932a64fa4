"""gpuaccel: what happens to a gradient between `loss.backward()` and the new weight.

    >>> import gpuaccel as ga
    >>> model = torch.nn.Linear(4, 2)
    >>> step = ga.TrainStep(model, loss_fn=lambda model, x: model(x).square().mean(), max_norm=1.0)
    >>> out = step(torch.ones(8, 4))
    >>> out.loss.requires_grad, bool(out.finite)
    (False, True)

The names here are those that people type; everything else is in its room, as
`ga.ops.encoder_backward`, `ga.optim.Lion` and `ga.errors.KernelError` are. CONTRIBUTING.md says
what is in which room.

`import gpuaccel` loads nothing else, torch neither: that happens when a name is first used. So the
command line can handle Ctrl-C before it takes the seconds that torch needs.
"""

__version__ = "0.3.0"

import importlib
import sys
from typing import TYPE_CHECKING

ROOMS = (
    "backends",
    "cli",
    "compiler",
    "distributed",
    "errors",
    "graphs",
    "learn",
    "measure",
    "nn",
    "ops",
    "optim",
    "simt",
    "training",
)

if TYPE_CHECKING:
    from . import (  # noqa: F401
        backends,
        cli,
        compiler,
        distributed,
        errors,
        graphs,
        learn,
        measure,
        nn,
        ops,
        optim,
        simt,
        training,
    )
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:

    def __getattr__(name):
        if name in ROOMS:
            return importlib.import_module(f".{name}", __name__)
        message = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("__") and name != "__all__":
            raise AttributeError(message)
        public = importlib.import_module(".public", __name__)
        if name not in public.__all__ and name != "__all__":
            if name in globals():
                # A module beside the rooms, which is loaded now.
                return globals()[name]
            message += importlib.import_module(".errors", __name__).suggestion(name, __dir__())
            # With `obj` and without `name` the interpreter adds no suggestion of its own, which
            # Jupyter does not show.
            raise AttributeError(message, obj=sys.modules[__name__])
        value = getattr(public, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__"), *ROOMS})
