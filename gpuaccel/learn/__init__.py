"""What only notebooks need: live views, pictures, exercises, the %%cuda magic.

Nothing else imports this room: `import gpuaccel` loads a part of it when one of its names is first
used. ipywidgets and IPython are imported where a view is displayed, and only there."""

from .access_view import AccessView, show
from .exercises import BLOCK, EXERCISES, check, exercise
from .magics import load_ipython_extension
from .replacement import Verdict, replaced, restore
from .widgets import Live
from .words import words

__all__ = [
    "BLOCK",
    "EXERCISES",
    "AccessView",
    "Live",
    "Verdict",
    "check",
    "exercise",
    "load_ipython_extension",
    "replaced",
    "restore",
    "show",
    "words",
]
