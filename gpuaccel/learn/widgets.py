"""The live view: tokens per second, loss and stages of a step, drawn while a cell trains.

    live = LiveThroughput("Where should gradients be added up?")
    live.run(train(step, batches, steps=200), name="host", steps=200)    # draws, with a Stop button
    live.run(train(other, batches, steps=200), name="arena", steps=200)  # one more line
    live.runs["arena"].tokens_per_s

The loop stops between two steps: by the button, by interrupting the kernel, or by its `steps` or
`seconds`. When it ends, a static picture and a line of text replace the view and stay in the saved
notebook. The view is made of ipywidgets, without JavaScript of our own.

A kernel handles comm messages, such as a click, between cells only. From 7.4 on ipykernel asks the
button's comm, in its channel thread and also while a cell runs, where a message belongs; the view
listens there. With an older ipykernel (Colab) there is no button.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from html import escape

from ..compiler import replaced_words
from ..errors import ArgumentError
from ..notebook import notebook_shell
from .figures.drawing import (
    RUN_COLOURS,
    WIDTH,
    bundle,
    in_page,
    live_bundle,
    memory_words,
    norm_words,
    number,
)
from .figures.training_runs import Run, picture

# seconds between two updates of the live view
PERIOD = 0.1


class LiveThroughput:
    """A live picture of one or several training runs. Displaying the object shows the static one.

    Outside a notebook it is at most one line of text a second, on stderr.

    Args:
        title: a line above the picture.

    Attributes:
        runs: name -> Run, in the order of their start.

    Example:
        >>> model = ga.preset("tiny", layers=1, hidden=32, T=16).build().to(ga.default_device())
        >>> tokens = torch.arange(1000) % 256
        >>> batches = ga.training.Batches(tokens, batch=4, T=16, device=ga.default_device())
        >>> live = ga.LiveThroughput("In one piece or in two?")
        >>> for name, pieces in (("one", 1), ("two", 2)):
        ...     with ga.TrainStep(model, micro_batches=pieces) as step:
        ...         live.run(ga.train(step, batches, steps=3), name)
        >>> [(name, run.last.step, run.state) for name, run in live.runs.items()]
        [('one', 3, 'done'), ('two', 3, 'done')]
    """

    def __init__(self, title: str = "Training"):
        self.title = title
        self.runs: dict[str, Run] = {}
        self._stop = threading.Event()

    def run(self, readings, name=None, seconds=None, steps=None):
        """Iterate over `readings` and draw them; an interrupt stops the loop after its step.

        Args:
            readings: Readings of a meter, e.g. from `ga.train`.
            name: of the run; a run of the same name is replaced. Default: "run 1", "run 2", ..., or
                "your settings_write" while that kernel of ours is replaced. Or a list of names, for
                runs at the same time: `readings` are then pairs (number of the run, Reading or
                None), as ga.launch makes them.
            seconds: when to stop if the readings do not end before; sets the progress bar. Default:
                none.
            steps: after how many steps to stop; sets the progress bar. Default: none.

        Raises:
            ArgumentError: for readings that cannot be iterated over, an empty list of names, and
                limits that are not positive.
        """
        if not hasattr(readings, "__iter__"):
            raise ArgumentError(
                f"readings is a {type(readings).__name__}, "
                "expected an iterable of Readings, such as ga.train(...)"
            )
        for argument, limit in (("seconds", seconds), ("steps", steps)):
            if limit is not None and limit <= 0:
                raise ArgumentError(f"{argument} is {limit}, expected a positive number")
        several = isinstance(name, (list, tuple))
        names = name if several else [name or replaced_words() or f"run {len(self.runs) + 1}"]
        if not names:
            raise ArgumentError(
                "name is an empty list, expected the name of a run, or one for each run of several"
            )
        runs = [self._add_run(name) for name in names]
        self._stop.clear()
        view = _make_view(self, runs[0], seconds, steps)
        first = threading.Event()
        threading.Thread(target=_say_that_it_starts, args=(view, first), daemon=True).start()
        state = "failed"
        try:
            with _interrupt_stops(self._stop):
                self._iterate(iter(readings), runs, view, first, seconds, steps, several)
                state = "stopped" if self.stopping else "done"
        finally:
            first.set()
            for run in runs:
                run.state = state
            view.finish()

    def _add_run(self, name) -> Run:
        """A run without readings, in a colour of its own, or that of the run it replaces."""
        used = {run.colour for key, run in self.runs.items() if key != name}
        free = [colour for colour in RUN_COLOURS if colour not in used] or RUN_COLOURS
        self.runs[name] = Run(name, self.runs[name].colour if name in self.runs else free[0])
        return self.runs[name]

    def _iterate(self, readings, runs, view, first, seconds, steps, several):
        """Draw until the readings end or a limit or the Stop button ends them."""
        start = last_update = time.monotonic()
        count = 0
        try:
            for item in readings:
                index, reading = item if several else (0, item)
                if reading is not None:
                    count += 1
                    runs[index].add(reading)
                now = time.monotonic()
                began = count > 0 and not first.is_set()
                if began:
                    first.set()
                if began or now - last_update >= view.period:
                    last_update = now
                    view.update()
                enough = steps and count >= steps * len(runs)
                if self.stopping or enough or (seconds and now - start >= seconds):
                    return
        finally:
            if hasattr(readings, "close"):
                # lets a generator clean up: its last checkpoint, its files
                readings.close()

    def stop(self):
        """Ask the running loop to stop after the running step. The Stop button calls this."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once the running loop has been asked to stop."""
        return self._stop.is_set()

    def __str__(self):
        lines = [str(run) for run in self.runs.values()]
        measured = [run for run in self.runs.values() if run.tokens_per_s]
        for run in measured[1:]:
            times = run.tokens_per_s / measured[0].tokens_per_s
            lines.append(f"{run.name} runs at {times:.2f} times the speed of {measured[0].name}")
        return "\n".join(lines) or f"{self.title}: no run yet"

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None):
        return bundle(picture(list(self.runs.values()), self.title), str(self))


@contextlib.contextmanager
def _interrupt_stops(stop):
    """The first SIGINT sets `stop`, and raises KeyboardInterrupt at the end; a second one at once.

    Args:
        stop: an event.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = []

    def ask(*_):
        interrupted.append(True)
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if interrupted:
        raise KeyboardInterrupt


def _say_that_it_starts(view, first):
    """Update the view each second, until there is a first reading."""
    while not first.wait(1.0):
        view.update()


class _TextView:
    """Where there are no widgets: at most one line of text a second."""

    period = 1.0

    def __init__(self, live, run, seconds, steps, notebook):
        self.live = live
        self.run = run
        self.steps = steps
        self.notebook = notebook
        self.began = self.said = time.monotonic()

    def _print(self, words):
        print(words, file=sys.stdout if self.notebook else sys.stderr, flush=True)

    def update(self):
        now = time.monotonic()
        if self.run.last is not None:
            self._print(_status(self.run, None, self.steps, name=True))
        elif now - self.said >= 3.0 or self.said == self.began:
            self.said = now
            self._print(f"{self.run.name}: {_starting(now - self.began)}")

    def finish(self):
        if self.notebook:
            from IPython.display import display

            display(self.live)
        else:
            self._print(self.run)


class _WidgetView:
    """The widgets of one run: title, status, progress, Stop, picture."""

    period = PERIOD

    def __init__(self, live, run, seconds, steps):
        import ipywidgets as W
        from IPython.display import display

        self.live = live
        self.run = run
        self.seconds = seconds
        self.steps = steps
        self.head = W.HTML(layout=W.Layout(flex="1 1 auto", margin="0"))
        look = W.Layout(width="150px", height="10px", margin="0 14px 0 8px")
        self.progress = W.FloatProgress(value=0.0, min=0.0, max=1.0, layout=look)
        self.progress.style.bar_color = run.colour
        self.progress.layout.visibility = "visible" if seconds or steps else "hidden"
        self.button = W.Button(
            description="Stop",
            icon="stop",
            tooltip="Stop after the step that is running",
            layout=W.Layout(width="92px", margin="0"),
        )
        if not _listen_while_busy(self.button, live.stop):
            self.button.layout.display = "none"
        self.svg = W.HTML(layout=W.Layout(margin="4px 0 0 0"))
        row = W.HBox(
            [self.head, self.progress, self.button],
            layout=W.Layout(align_items="center", width="100%"),
        )
        look = W.Layout(max_width=f"{WIDTH + 12}px", padding="6px 4px", overflow="visible")
        self.box = W.VBox([row, self.svg], layout=look)
        self.began = time.monotonic()
        self.update()
        data = live_bundle(self.box, f"{live.title} (live)")
        self.handle = display(data, raw=True, display_id=True)

    def update(self):
        status = _status(self.run, self.seconds, self.steps)
        if self.run.last is None:
            status = _starting(time.monotonic() - self.began)
        if self.live.stopping:
            status = "stopping after this step"
        self.head.value = (
            '<div style="line-height:1.35">'
            f'<span style="font-size:15px;font-weight:600">{escape(self.live.title)}</span><br>'
            '<span style="font-size:12px;font-variant-numeric:tabular-nums;'
            'color:var(--jp-ui-font-color2,inherit)">'
            f"{escape(status)}</span></div>"
        )
        if self.run.last is not None:
            by_steps = self.run.last.step / self.steps if self.steps else 0.0
            by_time = self.run.last.seconds / self.seconds if self.seconds else 0.0
            self.progress.value = min(1.0, max(by_steps, by_time))
        self.svg.value = in_page(picture(list(self.live.runs.values())))

    def finish(self):
        """The static picture takes the widgets' place, in this cell and in the saved notebook."""
        self.handle.update(self.live._repr_mimebundle_(), raw=True)
        row = self.box.children[:1]
        for widget in (self.button, self.progress, self.head, self.svg, *row, self.box):
            widget.close()


def _starting(seconds):
    """What the view says before the first step has ended."""
    if seconds < 1:
        return "starting"
    return f"first step, {seconds:.0f} s: it may compile kernels or capture a graph"


def _status(run, seconds, steps, name=False):
    """One line: where the run is, and what it uses. name: begin with the run's name and rate."""
    last = run.last
    if last is None:
        return "starting"
    parts = [run.name] if name else []
    parts.append(f"step {last.step}" + (f" of {steps}" if steps else ""))
    parts.append(f"{last.seconds:.0f} of {seconds:.0f} s" if seconds else f"{last.seconds:.0f} s")
    if name:
        parts.append(number(last.tokens_per_s, "tok/s"))
    if last.loss is not None:
        parts.append(f"loss {last.loss:.2f}".replace("nan", "NaN"))
    if last.norm is not None:
        parts.append(f"norm {norm_words(last.norm, last.clipped_norm)}")
    if last.memory_bytes:
        parts.append(f"{memory_words(last.memory_bytes)} memory")
    if last.mfu:
        parts.append(f"{last.mfu:.0%} of the GPU's peak")
    return "  ·  ".join(parts)


def _make_view(live, run, seconds, steps):
    if notebook_shell() is None:
        return _TextView(live, run, seconds, steps, notebook=False)
    try:
        return _WidgetView(live, run, seconds, steps)
    except ImportError:
        return _TextView(live, run, seconds, steps, notebook=True)


def _listen_while_busy(button, clicked) -> bool:
    """Call clicked() for the button's clicks while a cell runs, in the kernel's channel thread.

    False where the kernel has no such hook (ipykernel before 7.4)."""
    comm = getattr(button, "comm", None)
    route = getattr(comm, "_reply_subshell_for", None)
    if comm is None or route is None:
        return False

    def heard(data, default):
        content = data.get("content") if isinstance(data, dict) else None
        if isinstance(content, dict) and content.get("event") == "click":
            clicked()
        return route(data, default)

    comm._reply_subshell_for = heard
    return True
