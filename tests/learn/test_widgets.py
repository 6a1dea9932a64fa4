"""The live view: what it draws, how it stops, and what it leaves in a saved notebook."""

import _thread
import pathlib
import re
import sys
import threading
import time
import xml.dom.minidom

import pytest

from gpuaccel.errors import ArgumentError
from gpuaccel.learn import LiveThroughput
from gpuaccel.learn.figures import training_runs
from gpuaccel.learn.figures.drawing import (
    memory_words,
    milliseconds,
    nice_ticks,
    norm_words,
    number,
)
from gpuaccel.learn.figures.training_runs import KEEP, Run, picture
from gpuaccel.learn.widgets import _listen_while_busy, _status
from gpuaccel.measure import Reading

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = {"text/html", "image/svg+xml", "text/plain"}  # what is displayed of one


def readings(count, rate=10_000.0, pause=0.0, fail_at=None, closed=None):
    began = time.time()
    try:
        for step in range(1, count + 1):
            time.sleep(pause)
            if step == fail_at:
                raise FloatingPointError("the loss is not a number")
            yield Reading(
                step,
                step * 512,
                time.time() - began,
                rate,
                51.2,
                loss=4.0 / step + 1,
                memory_bytes=3 << 30,
                val_loss=2.0 if step == 5 else None,
                stages={"forward": 16.0, "backward": 30.0, "accumulate": 2.0},
            )
    finally:
        if closed is not None:
            closed.append(True)


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_numbers_carry_units_and_three_digits():
    assert [
        number(v) for v in (0, 7, 7.25, 12.34, 987, 999.96, 12_345, 999_960, 1.5e6, 3.2e12)
    ] == ["0", "7", "7.25", "12.3", "987", "1.00K", "12.3K", "1.00M", "1.50M", "3.20T"]
    assert number(12_345, "tok/s") == "12.3K tok/s"
    assert [milliseconds(v) for v in (0.412, 3.21, 41.26, 141.2, 1234)] == [
        "0.41 ms",
        "3.2 ms",
        "41.3 ms",
        "141 ms",
        "1.2 s",
    ]


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0, 87_234.5), (2.2, 5.6), (3.0, 3.0), (-1e-9, 1e-9), (0.0, 0.0)]
)
def test_ticks_cover_the_range_with_few_round_values(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8


def test_a_run_is_drawn_with_its_numbers_and_stages():
    live = LiveThroughput("Where is the time?")
    live.run(readings(40), name="a <b>")
    live.run(readings(40, rate=25_000.0), name="second")
    svg = picture(list(live.runs.values()), "Where is the time?")
    xml.dom.minidom.parseString(svg.encode())
    words = texts(svg)
    for expected in (
        "Where is the time?",
        "10.0K tok/s",
        "25.0K tok/s",
        "2.50× a &lt;b&gt;",
        "Loss",
        "40 steps",
        "20.5K tokens",
        "30.0 ms",
        "51.2 ms",
        "accumulate",
        "other",
        "○ on text held out",
    ):
        assert expected in words, (expected, words)
    assert "<script" not in svg and len(svg) < 30_000
    assert "second runs at 2.50 times the speed of a <b>" in str(live)
    assert set(live._repr_mimebundle_()) == PICTURE


@pytest.mark.parametrize("some", [[], [Run("new", "#123456")]])
def test_nothing_to_draw_is_still_a_picture(some):
    svg = picture(some)
    xml.dom.minidom.parseString(svg.encode())
    assert "waiting for the first step" in texts(svg)


def test_not_a_number_is_left_out_of_the_picture():
    run = Run("nan", "#123456")
    for step in range(1, 5):
        loss = float("nan") if step > 2 else 1.0
        run.add(Reading(step, step, 0.1 * step, 10.0, 1.0, loss=loss, val_loss=float("inf")))
    assert "nan" not in re.sub(r"aria-label=\"[^\"]*\"|>[^<]*<", "", picture([run]))
    assert "NaN from here" in texts(picture([run]))


def test_a_long_run_keeps_a_bounded_number_of_points():
    run = Run("long", "#123456")
    for step in range(1, 20_001):
        run.add(Reading(step, step, step / 10, 100.0, 1.0))
    assert KEEP / 4 < len(run.points) <= KEEP and run.points[-1][0] > 19_900


def test_memory_is_said_in_the_unit_it_is_divided_by():
    sizes = (0, 2**20, 2**30 - 1, 2**30, 3 * 2**29)
    assert [*map(memory_words, sizes)] == ["0 MiB", "1 MiB", "1.0 GiB", "1.0 GiB", "1.5 GiB"]


def test_a_stage_that_is_called_other_keeps_its_time():
    run = Run("a", "#123456")
    run.add(Reading(1, 1, 1.0, 1.0, step_ms=100.0, stages={"forward": 40.0, "other": 20.0}))
    assert training_runs._stages_and_gap(run) == {"forward": 40.0, "other": 60.0}


def test_the_numbers_of_an_axis_are_those_of_its_lines():
    run = Run("a", "#123456")
    for step in range(1, 11):
        run.add(Reading(step, 100 * step, 0.1 * step, 1000.0, 100.0, loss=4 - step / 10))
    words = re.findall(r'"end"[^>]*>([\d.K]+)<', picture([run]))
    assert words[-5:] == ["3", "3.25", "3.5", "3.75", "4"]


def test_the_norm_is_in_the_status_line_before_and_after():
    assert [
        norm_words(*pair)
        for pair in (
            (3.21, 1.0),
            (0.5, 0.5),
            (0.5, None),
            (12345.0, 1.0),
            (float("nan"),) * 2,
            (float("inf"), 0.0),
            (1050.0, 1000.0),
        )
    ] == ["3.2 → 1", "0.5", "0.5", "12.3K → 1", "NaN", "∞ → 0", "1.05K → 1K"]
    run = Run("clipped", "#123456")
    run.add(Reading(3, 3, 1.0, 1.0, 1.0, norm=3.21, clipped_norm=1.0))
    assert "norm 3.2 → 1" in _status(run, None, 3)
    run.add(Reading(4, 4, 1.0, 1.0, 1.0, loss=float("nan")))
    assert "loss NaN" in _status(run, None, 4) and "norm" not in _status(run, None, 4)


def test_steps_and_seconds_end_a_run_and_generators_are_closed(capsys):
    closed, began = [], time.time()
    live = LiveThroughput()
    live.run(readings(10_000, closed=closed), name="steps", steps=7)
    live.run(readings(10_000, pause=0.01, closed=closed), name="seconds", seconds=0.3)
    assert closed == [True, True]
    assert live.runs["steps"].last.step == 7 and live.runs["steps"].state == "done"
    assert 1 <= live.runs["seconds"].last.step < 10_000 and live.runs["seconds"].state == "done"
    assert live.runs["steps"].val_loss == 2.0 and live.runs["steps"].tokens_per_s == 10_000
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4 + time.time() - began, "one line a second, and a last one"
    assert "10.0K tok/s" in lines[0] and "loss" in lines[0], lines


def test_a_first_step_that_takes_long_is_not_silent(capsys):
    def slow():
        time.sleep(1.6)
        yield from readings(3)

    live = LiveThroughput()
    live.run(slow(), name="slow")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("slow: first step, 1 s") and "first step" not in lines[1], lines
    live.run(readings(3))
    assert list(live.runs) == ["slow", "run 2"]


def test_errors_of_the_loop_reach_the_cell():
    live = LiveThroughput()
    with pytest.raises(FloatingPointError, match="not a number"):
        live.run(readings(10, fail_at=4), name="bad")
    assert live.runs["bad"].state == "failed" and live.runs["bad"].last.step == 3
    live.run(readings(3), name="bad")
    assert live.runs["bad"].state == "done"


def test_stop_ends_the_loop_after_its_step():
    live, closed = LiveThroughput(), []

    def stopped_in_step_3():
        for reading in readings(10_000, closed=closed):
            if reading.step == 3:
                live.stop()
            yield reading

    live.run(stopped_in_step_3(), name="stopped")
    run = live.runs["stopped"]
    assert (run.state, run.last.step, closed) == ("stopped", 3, [True])
    assert "stopped" in str(live)


def test_an_interrupt_stops_the_loop_and_the_cell(interruptible):
    live, closed, begun = LiveThroughput(), [], threading.Event()

    def interrupt():
        begun.wait(600)
        _thread.interrupt_main()

    def noted():
        for reading in readings(10_000, pause=0.005, closed=closed):
            begun.set()
            yield reading

    finger = threading.Thread(target=interrupt)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        live.run(noted(), name="interrupted")
    finger.join()
    assert closed == [True] and live.runs["interrupted"].state == "stopped"


def test_bad_arguments_change_nothing():
    live = LiveThroughput()
    for wrong in (dict(readings=3), dict(readings=[], steps=0), dict(readings=[], seconds=-1)):
        with pytest.raises(ArgumentError):
            live.run(**wrong)
    assert live.runs == {} and "no run yet" in str(live)
    live.run([], name="empty")
    assert "no step finished" in str(live)


def test_clicks_are_heard_where_the_kernel_routes_messages():
    class Comm:
        def _reply_subshell_for(self, data, default):
            return default

    class Button:
        comm = Comm()

    clicks, button = [], Button()
    assert _listen_while_busy(button, lambda: clicks.append(1))
    route = button.comm._reply_subshell_for
    assert route(
        {"method": "custom", "content": {"event": "click"}}, "main"
    ) == "main" and clicks == [1]
    assert (
        route({"method": "update"}, "main") == "main"
        and route(None, None) is None
        and clicks == [1]
    )
    button.comm = object()
    assert not _listen_while_busy(button, lambda: None)


@pytest.mark.slow
def test_a_notebook_runs_in_order_and_keeps_a_static_picture(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipywidgets")
    cells = [
        "import sys, time; sys.path.insert(0, %r)\nfrom gpuaccel.measure import Reading\n"
        "from gpuaccel.learn import LiveThroughput\nlive = LiveThroughput('A picture')\n"
        "def some(n):\n    for i in range(1, n + 1):\n        time.sleep(0.02)\n"
        "        stages = {'forward': 19.0}\n"
        "        yield Reading(i, i * 100, i / 50, 5000.0, 20.0, loss=1.0, stages=stages)"
        % str(ROOT),
        "live.run(some(30), name='one', steps=30)",
        "print(live.runs['one'].last.step)",
        "def slow():\n    time.sleep(2.5)\n    yield from some(2)\nlive.run(slow(), name='three')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for cell in (1, 3):
        assert [set(o.data) for o in outputs[cell]] == [PICTURE], outputs[cell]
    assert "5.00K tok/s" in outputs[1][0].data["image/svg+xml"]
    assert "one: 5.00K tok/s" in outputs[1][0].data["text/plain"]
    assert outputs[2][0].text == "30\n"


def test_without_ipywidgets_a_notebook_gets_text(monkeypatch, capsys):
    from gpuaccel.learn import widgets

    shell = type("Shell", (), {"kernel": object(), "events": None})()
    monkeypatch.setattr(widgets, "notebook_shell", lambda: shell)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr("IPython.display.display", print)
    LiveThroughput().run(readings(5), name="plain")
    out = capsys.readouterr().out.splitlines()
    assert "plain" in out[0] and "tok/s" in out[0] and out[-1].startswith("plain: 10.0K tok/s")
