"""Is this a notebook? And a line for who waits in one."""

import contextlib
import logging
import multiprocessing
import sys
from html import escape


def notebook_shell():
    """The IPython shell if it belongs to a notebook kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


@contextlib.contextmanager
def notice(text: str):
    """A line in the cell while something takes long, and gone afterwards; outside notebooks a line of the log (logger "gpuaccel").

    It is a widget, which is never compared when a notebook is tested."""
    shown = None
    with contextlib.suppress(ImportError):
        if (
            notebook_shell() is not None and multiprocessing.parent_process() is None
        ):  # a forked rank has the kernel, and not its line
            import ipywidgets
            from IPython.display import display

            shown = ipywidgets.HTML(
                f'<span style="color:var(--jp-ui-font-color2,inherit)">{escape(text)} ...</span>'
            )
            view = {"version_major": 2, "version_minor": 0, "model_id": shown.model_id}
            handle = display(
                {"application/vnd.jupyter.widget-view+json": view}, raw=True, display_id=True
            )
    if shown is None:
        logging.getLogger("gpuaccel").warning("%s", text)
    try:
        yield
    finally:
        if shown is not None:
            handle.update({}, raw=True)
            shown.close()
