"""The live view: what it draws, how it stops, and what it leaves in a saved notebook."""

import _thread
import pathlib
import re
import sys
import threading
import time
import xml.dom.minidom

import pytest
import torch

from gpuaccel.errors import ArgumentError
from gpuaccel.learn import Live, widgets
from gpuaccel.learn.figures import training_runs
from gpuaccel.learn.figures.drawing import milliseconds, nice_ticks, number
from gpuaccel.learn.figures.training_runs import KEEP, Run, picture
from gpuaccel.learn.widgets import _listen_while_busy
from gpuaccel.measure import Reading

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = {"text/html", "image/svg+xml", "text/plain"}  # what is displayed of one


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(widgets, "default_device", lambda: torch.device("cuda"))


def losses(count, pause=0.0, fail_at=None, closed=None):
    """A learner's loop."""
    try:
        for step in range(1, count + 1):
            time.sleep(pause)
            if step == fail_at:
                raise FloatingPointError("the loss is not a number")
            yield 4.0 / step + 1
        return "trained"
    finally:
        if closed is not None:
            closed.append(True)


def readings(count, rate=10_000.0):
    for step in range(1, count + 1):
        yield Reading(
            step,
            step * 512,
            0.1 * step,
            rate,
            51.2,
            loss=4.0 / step + 1,
            val_loss=2.0 if step == 5 else None,
            stages={"forward": 16.0, "backward": 30.0, "accumulate": 2.0},
        )


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


def test_on_a_gpu_readings_are_drawn_with_speed_and_stages(on_gpu):
    live = Live("Where is the time?")
    live.run(readings(40), "a <b>")
    live.run(readings(40, rate=25_000.0), "second")
    svg = picture(list(live.runs.values()), "Where is the time?")
    xml.dom.minidom.parseString(svg.encode())
    words = texts(svg)
    for expected in (
        "Where is the time?",
        "a &lt;b&gt;: 10.0K tok/s, loss 1.10",
        "second: 25.0K tok/s, loss 1.10",
        "Tokens per second",
        "Loss",
        "40 steps",
        "30.0 ms",
        "51.2 ms",
        "accumulate",
        "other",
        "○ on text held out",
    ):
        assert expected in words, (expected, words)
    assert "<script" not in svg and len(svg) < 30_000
    assert str(live).splitlines()[1] == "second: 25.0K tok/s, loss 1.10 after 40 steps"
    assert set(live._repr_mimebundle_()) == PICTURE


@pytest.mark.parametrize("kind", [losses, readings])
def test_without_a_gpu_there_is_loss_and_no_speed(kind, monkeypatch, capsys):
    monkeypatch.setattr(widgets, "default_device", lambda: torch.device("cpu"))
    live = Live("Does it learn?")
    live.run(kind(40), "first", steps=40)
    live.run(kind(40), "second", steps=40)
    shown = capsys.readouterr().err + str(live) + str(live._repr_mimebundle_())
    assert "loss 1.10" in shown and "step 1 of 40" in shown
    assert not re.search(r"tok/s|okens per|times|×|\d ?m?s\b(?! *teps)|forward|memory", shown)


def test_a_loss_is_a_number_or_a_tensor_of_one_element():
    live = Live()
    weight = torch.tensor([3.0], requires_grad=True)

    def in_place():
        total = torch.zeros(())
        for _ in range(3):
            total += 1
            yield total
        yield weight * 2
        yield 7
        return "the network"

    assert live.run(in_place(), "mixed") == "the network"
    assert live.runs["mixed"].losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 6.0), (5, 7.0)]
    for wrong, what in (
        (torch.zeros(2, 3), r"step 2 gave a Tensor of shape \(2, 3\)"),
        (None, "step 2 gave a NoneType"),
    ):
        with pytest.raises(ArgumentError, match=what):
            live.run([1.0, wrong], "wrong")


def test_a_loss_that_explodes_is_drawn_by_powers_and_equal_lines_show_beside_each_other():
    explodes, calm = Run("explodes", "#123456"), Run("calm", "#654321")
    for step in range(20):
        explodes.add(2.0**step)
        calm.add(2.0)
    words = texts(picture([explodes, calm]))
    assert {"1", "10", "1K", "100K"} <= set(words)
    assert 'stroke-width="6.2"' not in picture([explodes, calm])
    assert 'stroke-width="6.2"' in picture([calm, calm])


@pytest.mark.parametrize("some", [[], [Run("new", "#123456")]])
def test_nothing_to_draw_is_still_a_picture(some):
    svg = picture(some)
    xml.dom.minidom.parseString(svg.encode())
    assert "waiting for the first step" in texts(svg)


def test_not_a_number_is_left_out_of_the_picture():
    run = Run("nan", "#123456")
    for step in range(1, 5):
        run.add(float("nan") if step > 2 else 1.0)
    assert "nan" not in re.sub(r"aria-label=\"[^\"]*\"|>[^<]*<", "", picture([run]))
    assert "NaN from here" in texts(picture([run]))


def test_a_long_run_keeps_a_bounded_number_of_points():
    run = Run("long", "#123456")
    for step in range(1, 20_001):
        run.add(1.0)
    assert KEEP / 4 < len(run.points) <= KEEP and run.points[-1][0] > 19_900
    assert "20K steps" in texts(picture([run]))


def test_a_stage_that_is_called_other_keeps_its_time():
    run = Run("a", "#123456", speed=True)
    run.add(Reading(1, 1, 1.0, 1.0, step_ms=100.0, stages={"forward": 40.0, "other": 20.0}))
    assert training_runs._stages_and_gap(run) == {"forward": 40.0, "other": 60.0}


def test_the_numbers_of_an_axis_are_those_of_its_lines():
    run = Run("a", "#123456")
    for step in range(1, 11):
        run.add(4 - step / 10)
    words = re.findall(r'"end"[^>]*>([\d.K]+)<', picture([run]))
    assert words[-5:] == ["3", "3.25", "3.5", "3.75", "4"]


def test_what_is_printed_outside_of_a_notebook(capsys):
    closed, live = [], Live()
    assert live.run(losses(30, pause=0.05, closed=closed), "loop", steps=30) == "trained"
    assert closed == [True] and live.runs["loop"].state == "done"
    first, *_, last = lines = capsys.readouterr().err.splitlines()
    assert (first, last) == ("loop: step 1 of 30, loss 5.00", "loop: loss 1.13 after 30 steps")
    assert len(lines) <= 4, "one line a second, and a last one"


def test_a_first_step_that_takes_long_is_not_silent(capsys):
    def slow():
        time.sleep(1.6)
        yield from losses(3)

    live = Live()
    live.run(slow(), name="slow")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("slow: first step, 1 s") and "first step" not in lines[1], lines


def test_errors_of_the_loop_reach_the_cell():
    live = Live()
    with pytest.raises(FloatingPointError, match="not a number"):
        live.run(losses(10, fail_at=4), name="bad")
    assert live.runs["bad"].state == "failed" and live.runs["bad"].step == 3
    live.run(losses(3), name="bad")
    assert live.runs["bad"].state == "done"


def test_stop_ends_the_loop_after_its_step():
    live, closed = Live(), []

    def stopped_in_step_3():
        for step, loss in enumerate(losses(10_000, closed=closed), 1):
            if step == 3:
                live.stop()
            yield loss

    assert live.run(stopped_in_step_3(), name="stopped") is None
    run = live.runs["stopped"]
    assert (run.state, run.step, closed) == ("stopped", 3, [True])
    assert "stopped" in str(live)


def test_an_interrupt_stops_the_loop_and_the_cell(interruptible):
    live, closed, begun = Live(), [], threading.Event()

    def interrupt():
        begun.wait(600)
        _thread.interrupt_main()

    def noted():
        for loss in losses(10_000, pause=0.005, closed=closed):
            begun.set()
            yield loss

    finger = threading.Thread(target=interrupt)
    finger.start()
    with pytest.raises(KeyboardInterrupt):
        live.run(noted(), name="interrupted")
    finger.join()
    assert closed == [True] and live.runs["interrupted"].state == "stopped"


def test_bad_arguments_change_nothing():
    live = Live()
    for wrong in (dict(losses=3), dict(losses=[], steps=0)):
        with pytest.raises(ArgumentError):
            live.run(**wrong, name="wrong")
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
        "import sys, time; sys.path.insert(0, %r)\n"
        "from gpuaccel.learn import Live\nlive = Live('A picture')\n"
        "def some(n):\n    for i in range(n):\n        time.sleep(0.02)\n        yield 1.5"
        % str(ROOT),
        "live.run(some(5), name='before')\nlive.run(some(30), name='one', steps=30)",
        "print(live.runs['one'].step)",
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
    assert "loss 1.50" in outputs[1][0].data["image/svg+xml"]
    words = ["before: loss 1.50 after 5 steps", "one: loss 1.50 after 30 steps"]
    assert outputs[1][0].data["text/plain"].splitlines() == words, "one picture for both"
    assert outputs[2][0].text == "30\n"


def test_without_ipywidgets_a_notebook_gets_text(monkeypatch, capsys):
    shell = type("Shell", (), {"kernel": object(), "events": None})()
    monkeypatch.setattr(widgets, "notebook_shell", lambda: shell)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr("IPython.display.display", print)
    Live().run(losses(5), name="plain")
    assert capsys.readouterr().out.splitlines() == [
        "plain: step 1, loss 5.00",
        "plain: loss 1.80 after 5 steps",
    ]
