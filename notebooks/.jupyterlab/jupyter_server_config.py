"""What a notebook's file keeps of its outputs: `make lab` lets the server load this.

    python notebooks/.jupyterlab/jupyter_server_config.py notebooks/*.ipynb     # the same for files

A widget lives in its kernel. Without that kernel, JupyterLab shows "Error displaying widget" in its
place, so that a file keeps the text beside it only. A picture is kept as an image and in words: its
copy as HTML, which has the theme's colours, is made again when the cell runs.
"""

import json
import pathlib
import sys

WIDGET = "application/vnd.jupyter.widget-view+json"
# The class of the package's pictures (gpuaccel/learn/figures/drawing.py).
PICTURE = "gpuaccel-ink"


def keep_static(content: dict) -> dict:
    """Change a notebook's content (nbformat 4) so that it can be shown without a kernel."""
    for cell in content.get("cells", []):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if "image/svg+xml" in data and PICTURE in "".join(data.get("text/html", "")):
                del data["text/html"]
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if o.get("data", True)]
    content.get("metadata", {}).pop("widgets", None)
    return content


def before_saving(model, **_):
    """The server's hook: `model` is a file that is about to be written."""
    if model["type"] == "notebook" and model.get("content"):
        keep_static(model["content"])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        kept = keep_static(json.loads(path.read_text()))
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
elif "get_config" in globals():
    c = get_config()  # noqa: F821
    c.FileContentsManager.pre_save_hook = before_saving
