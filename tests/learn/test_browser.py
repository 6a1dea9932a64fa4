"""A real click in a real JupyterLab: Stop ends a loop while its cell runs, and a picture stays."""

import json
import pathlib

import pytest
from helpers import FLAGS, find_chromium
from lab_server import HANG, IDLE, free_port, jupyterlab

pytestmark = pytest.mark.browser
ROOT = pathlib.Path(__file__).resolve().parents[2]
CELLS = [
    f"""import sys, time; sys.path.insert(0, {str(ROOT)!r})
from gpuaccel.learn import Live
def some(n):
    for i in range(1, n + 1):
        time.sleep(0.02)
        yield 1.0 + 1 / i
live = Live("A loop to stop")
live.run(some(100_000), name="one", steps=100_000)""",
    """one = live.runs["one"]
open("result.txt", "w").write(f"{one.state} {one.step}")
print("all " + "done")""",
]


@pytest.fixture
def lab(tmp_path):
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**empty, "id": f"c{i}", "source": cell} for i, cell in enumerate(CELLS)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "stop.ipynb").write_text(json.dumps(notebook))
    quiet = (
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    )
    with jupyterlab(tmp_path, free_port(), *quiet) as (base, token):
        yield f"{base}/lab/tree/stop.ipynb?reset&token={token}"


def test_stop_ends_a_running_loop(lab, tmp_path):
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    chromium = find_chromium() or pytest.skip("no chromium or chrome on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=HANG)
        page.wait_for_function(IDLE, timeout=HANG)
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        button = page.wait_for_selector("button:has-text('Stop')", timeout=HANG)
        drawn = page.locator(".jupyter-widgets svg[role=img]")
        before = drawn.get_attribute("aria-label", timeout=HANG)
        page.wait_for_function(
            (
                "before => document.querySelector('.jupyter-widgets "
                "svg[role=img]').getAttribute('aria-label') != before"
            ),
            arg=before,
            timeout=HANG,
        )  # the picture moves
        button.click()
        page.wait_for_selector(".jp-OutputArea-output:has-text('all done')", timeout=HANG)
        pictures = page.locator(".jp-OutputArea-output.jp-RenderedHTML svg[role=img]").count()
        left = page.locator("button:has-text('Stop')").count()
        browser.close()
    state, steps = (tmp_path / "result.txt").read_text().split()
    assert state == "stopped" and int(steps) < 100_000
    assert (pictures, left) == (1, 0), "the static picture takes the widgets' place"
