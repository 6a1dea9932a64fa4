"""Whether this is a notebook, which cell a line is in, and a line shown during long work."""

import contextlib
import logging
import multiprocessing
import sys
from html import escape


def notebook_shell():
    """The IPython shell of a notebook's kernel; None anywhere else."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


def cell_of(file: str) -> str | None:
    """The name of the cell, as IPython counts them, whose code has this file name: "In[12]".

    None for a file, and outside of IPython. A cell's code has a made-up file name
    (".../ipykernel_417/2869.py", "<ipython-input-12-...>"), and only IPython knows the number."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    # Both names are IPython's, from version 8 on.
    describe = getattr(getattr(shell, "compile", None), "format_code_name", None)
    kind, name = (describe(file) if describe is not None else None) or ("", "")
    return name if kind == "Cell" else None


@contextlib.contextmanager
def notice(text: str):
    """Show a line in the notebook's cell during the block.

    The line is a widget, which tests of notebooks do not compare. Outside of notebooks, and in
    processes that one has forked, it is a line of the log (logger "gpuaccel").
    """
    widget = None
    # A fork shares the kernel, but not the cell.
    if notebook_shell() is not None and multiprocessing.parent_process() is None:
        with contextlib.suppress(ImportError):
            import ipywidgets
            from IPython.display import display

            color = "var(--jp-ui-font-color2,inherit)"
            widget = ipywidgets.HTML(f'<span style="color:{color}">{escape(text)} ...</span>')
            view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
            handle = display(
                {"application/vnd.jupyter.widget-view+json": view}, raw=True, display_id=True
            )
    if widget is None:
        logging.getLogger("gpuaccel").warning("%s", text)
    try:
        yield
    finally:
        if widget is not None:
            handle.update({}, raw=True)
            widget.close()
