"""What `make lab` and Binder give JupyterLab: coloured cells, notebooks that can be saved and
opened again without a kernel, no question about news, one thread where there is no GPU."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from helpers import FLAGS, find_chromium
from lab_server import HANG, IDLE, free_port, jupyterlab

from gpuaccel.learn.figures import drawing

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAB = ROOT / "notebooks" / ".jupyterlab"
WIDGET = "application/vnd.jupyter.widget-view+json"
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


def server_config():
    path = LAB / "jupyter_server_config.py"
    spec = importlib.util.spec_from_file_location("gpuaccel_server_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output(**data):
    names = {"html": "text/html", "svg": "image/svg+xml", "text": "text/plain", "widget": WIDGET}
    data = {names[name]: content for name, content in data.items()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def notebook(*outputs):
    cell = {
        "cell_type": "code",
        "id": "a",
        "source": "%%cuda\nint x;",
        "metadata": {},
        "execution_count": 1,
        "outputs": list(outputs),
    }
    return {
        "cells": [cell],
        "metadata": {
            "widgets": {"state": {}},
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def outputs_with_widgets():
    """(outputs of a cell, those that are kept of them)."""
    picture = drawing.bundle(drawing.Ink().svg(30, "a picture"), "a picture")
    svg, words = picture["image/svg+xml"], picture["text/plain"]
    view = {"version_major": 2, "version_minor": 0, "model_id": "gone"}
    stream = {"output_type": "stream", "name": "stdout", "text": "words\n"}
    before = [
        output(widget=view, text="Run this cell"),
        output(widget=view),
        output(html=picture["text/html"], svg=svg, text=words),
        output(html="<b>of somebody else</b>", svg="<svg/>", text="x"),
        output(html="<table></table>", text="a table"),
        stream,
    ]
    after = [
        output(text="Run this cell"),
        output(svg=svg, text=words),
        output(html="<b>of somebody else</b>", svg="<svg/>", text="x"),
        output(html="<table></table>", text="a table"),
        stream,
    ]
    return before, after


def test_a_saved_notebook_keeps_no_widget_and_each_picture_once(tmp_path):
    """Written by the server's own file manager, with the configuration that `make lab` names."""
    loader = pytest.importorskip("traitlets.config.loader")
    filemanager = pytest.importorskip("jupyter_server.services.contents.filemanager")
    config = loader.PyFileConfigLoader("jupyter_server_config.py", str(LAB)).load_config()
    before, after = outputs_with_widgets()
    manager = filemanager.FileContentsManager(root_dir=str(tmp_path), config=config)
    content = notebook(*before)
    manager.save({"type": "notebook", "format": "json", "content": content}, "a.ipynb")
    saved = json.loads((tmp_path / "a.ipynb").read_text())
    # a file's texts are lists of lines
    for stored in saved["cells"][0]["outputs"]:
        for name, text in stored.get("data", {}).items():
            stored["data"][name] = "".join(text)
        if "text" in stored:
            stored["text"] = "".join(stored["text"])
    assert saved["cells"][0]["outputs"] == after
    assert "widgets" not in saved["metadata"]


def test_the_same_can_be_done_with_files(tmp_path):
    path = tmp_path / "a.ipynb"
    before, after = outputs_with_widgets()
    path.write_text(json.dumps(notebook(*before)))
    script = LAB / "jupyter_server_config.py"
    subprocess.run([sys.executable, str(script), str(path)], check=True)
    assert json.loads(path.read_text())["cells"][0]["outputs"] == after


def test_the_notebooks_of_this_checkout_are_stored_so():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        stored = json.loads(path.read_text())
        assert server_config().keep_static(json.loads(path.read_text())) == stored, (
            f"run python notebooks/.jupyterlab/jupyter_server_config.py {path.name}"
        )


def test_no_picture_stands_in_a_cell_that_nbval_compares():
    """nbval also compares which kinds of data an output has, and a stored picture has no HTML."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if "nbval-check-output" in cell["metadata"].get("tags", ()):
                kinds = {kind for out in cell["outputs"] for kind in out.get("data", {})}
                assert "image/svg+xml" not in kinds, (path.name, cell["source"])


def test_jupyterlab_finds_the_extension_and_its_file():
    config = pytest.importorskip("jupyterlab_server.config")
    found = config.get_federated_extensions([str(LAB / "labextensions")])
    assert list(found) == ["gpuaccel-cells"]
    load = found["gpuaccel-cells"]["jupyterlab"]["_build"]["load"]
    assert (pathlib.Path(found["gpuaccel-cells"]["ext_path"]) / load).is_file()


def test_nobody_is_asked_about_news():
    settings = json.loads((LAB / "overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"


def test_cells_show_line_numbers_because_verdicts_name_lines():
    tracker = "@jupyterlab/notebook-extension:tracker"
    settings = json.loads((LAB / "overrides.json").read_text())[tracker]
    assert settings["codeCellConfig"]["lineNumbers"] is True
    lab = pytest.importorskip("jupyterlab")
    folder = pathlib.Path(lab.__file__).parent / "schemas" / "@jupyterlab" / "notebook-extension"
    schema = json.loads((folder / "tracker.json").read_text())["properties"]["codeCellConfig"]
    assert settings["codeCellConfig"].keys() == schema["default"].keys()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("backend, threads", [("cuda", "unset"), ("torch", "1")])
def test_make_lab_sets_one_thread_where_there_is_no_gpu(tmp_path, backend, threads):
    """`make lab` with a Python that says which backend there is, and what JupyterLab was given."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*jupyterlab*) echo "threads ${OMP_NUM_THREADS-unset}"; echo "config $JUPYTER_CONFIG_PATH"'
        '; echo "$@" ;;\n'
        f"*backend*) [ {backend} = cuda ] ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for given, expected in ((None, threads), ("4", "4")):
        made = subprocess.run(
            ["make", "--no-print-directory", "-s", f"VENV={tmp_path}", "lab"],
            cwd=ROOT,
            env=env | ({"OMP_NUM_THREADS": given} if given else {}),
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made
        assert f"threads {expected}\n" in made.stdout
        assert f"config {LAB}" in made.stdout
        assert (
            "--LabApp.extra_labextensions_path=notebooks/.jupyterlab/labextensions" in made.stdout
        )


@needs_bash
def test_binder_starts_notebooks_with_one_thread():
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = ["bash", str(ROOT / "binder" / "start"), "bash", "-c", "echo $OMP_NUM_THREADS"]
    assert subprocess.run(command, env=env, capture_output=True, text=True).stdout == "1\n"
    assert os.access(ROOT / "binder" / "start", os.X_OK)


@needs_bash
def test_binder_gives_jupyterlab_the_same_files(tmp_path):
    """binder/postBuild, with a pip and a Python that only name a prefix."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("pip", "exit 0"),
        ("python", f'[ "$1" = -c ] && echo {tmp_path} || exit 0'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(ROOT / "binder" / "postBuild")], cwd=ROOT, env=env, check=True)
    share = tmp_path / "share" / "jupyter"
    assert (share / "lab" / "settings" / "overrides.json").is_file()
    assert (share / "labextensions/gpuaccel-cells/static/remoteEntry.js").is_file()
    config = tmp_path / "etc" / "jupyter" / "jupyter_server_config.py"
    assert config.read_text() == (LAB / "jupyter_server_config.py").read_text()


# ---- in a browser -------------------------------------------------------------------------------

CELLS = [
    "%%cuda\n// a comment of C",
    "# a comment of Python\nx = 1",
    "import ipywidgets\nipywidgets.IntSlider()",
]
MIMES = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(c => c.model.mimeType)"""
SHOWN = """() => { const text = document.body.innerText;
    const count = selector => document.querySelectorAll(selector).length;
    return [text.includes('Error displaying widget'), count('.jp-Dialog'),
            count('.widget-slider')] }"""


@pytest.fixture
def address(tmp_path):
    """A JupyterLab with what `make lab` names, on a folder with an index and a notebook."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    book = notebook()
    book["cells"] = [{**empty, "id": f"c{i}", "source": cell} for i, cell in enumerate(CELLS)]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "a.ipynb").write_text(json.dumps(book))
    for name in ("README.md", "ladder.svg"):
        shutil.copy(ROOT / "notebooks" / name, tmp_path / "notebooks")
    shutil.copytree(LAB, tmp_path / "notebooks" / ".jupyterlab")
    port = free_port()
    made = subprocess.run(
        ["make", "-n", "lab", f"PORT={port}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    options = [word for word in made.stdout.split() if word.startswith("--LabApp")]
    assert len(options) == 3, made.stdout
    config = str(tmp_path / "notebooks" / ".jupyterlab")
    with jupyterlab(tmp_path, port, *options, JUPYTER_CONFIG_PATH=config) as server:
        yield server


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_cells_are_coloured_and_a_saved_notebook_opens_without_an_error(address, tmp_path):
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    chromium = find_chromium() or pytest.skip("no chromium or chrome on this machine")
    base, token = address
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        # the first page is the index, with its picture
        page.goto(f"{base}/?token={token}")
        ladder = page.wait_for_selector(".jp-RenderedMarkdown img", timeout=HANG)
        page.wait_for_function("image => image.naturalWidth > 0", arg=ladder, timeout=HANG)
        assert page.evaluate(SHOWN)[:2] == [False, 0]
        scheme = "image => getComputedStyle(image).colorScheme"
        assert ladder.evaluate(scheme) == "light"
        page.evaluate(
            "() => window.jupyterapp.commands.execute("
            "'apputils:change-theme', {theme: 'JupyterLab Dark'})"
        )
        page.wait_for_function(f"image => ({scheme})(image) === 'dark'", arg=ladder, timeout=HANG)
        book = f"{base}/lab/tree/notebooks/a.ipynb?reset&token={token}"
        page.goto(book)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=HANG)
        page.wait_for_function(IDLE, timeout=HANG)
        page.wait_for_function(
            f"() => ({MIMES})().includes('text/x-ipython')", timeout=HANG
        )  # the kernel has said that it speaks Python
        assert page.evaluate(MIMES) == ["text/x-c++src", "text/x-ipython", "text/x-ipython"]
        page.evaluate(
            "() => { const c = window.jupyterapp.shell.currentWidget.content;"
            "c.activeCellIndex = 2; window.jupyterapp.commands.execute('notebook:run-cell') }"
        )
        page.wait_for_selector(".widget-slider", timeout=HANG)
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        page.goto(book)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=HANG)
        page.wait_for_function(IDLE, timeout=HANG)
        shown = page.evaluate(SHOWN)
        browser.close()
    stored = json.loads((tmp_path / "notebooks" / "a.ipynb").read_text())
    assert "IntSlider" in str(stored["cells"][2]["outputs"]) and WIDGET not in str(stored)
    assert shown[0] is False and shown[2] == 0
