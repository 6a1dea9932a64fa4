"""The live view: tokens per second, loss, norms and stages of a step, drawn while a cell trains.

    live = LiveThroughput("Where should gradients be added up?")
    live.run(train(step, batches, steps=200), name="host", steps=200)    # draws, with a Stop button
    live.run(train(other, batches, steps=200), name="arena", steps=200)  # one more line
    live.runs["arena"].tokens_per_s

The loop runs in a thread and stops between two steps: by the button, by interrupting the kernel, or
by its `steps` or `seconds`. When it ends, a static picture and a line of text replace the view and
stay in the saved notebook. The view is made of ipywidgets, without JavaScript of our own.

A kernel handles comm messages, such as a click, between cells only. From 7.4 on ipykernel asks the
button's comm, in its channel thread and also while a cell runs, where a message belongs; the view
listens there. With an older ipykernel (Colab) `run` returns at once instead, the kernel stays free
to hear the click, and the next cell waits, before its first line, until the run has ended.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from html import escape

from ..compiler import replaced_words
from ..errors import ArgumentError
from ..notebook import notebook_shell
from .figures.drawing import RUN_COLOURS, WIDTH, bundle, memory_words, norm_words, number
from .figures.training_runs import Run, picture

# seconds between two updates of the live view
PERIOD = 0.1


class LiveThroughput:
    """A live picture of one or several training runs. Displaying the object shows the static one.

    Outside a notebook it is at most one line of text a second, on stderr.

    Args:
        title: a line above the picture.
        peak: tokens per second of a limit, a dashed line; None, the default: no line.
        norms: True adds a panel of the gradient's norm before and after clipping. Default: False.

    Attributes:
        runs: name -> Run, in the order of their start.

    Example:
        >>> model = ga.preset("tiny", layers=1, hidden=32, T=16).build().to(ga.default_device())
        >>> tokens = torch.arange(1000) % 256
        >>> batches = ga.training.Batches(tokens, batch=4, T=16, device=ga.default_device())
        >>> live = ga.LiveThroughput("In one piece or in two?")
        >>> for name, pieces in (("one", 1), ("two", 2)):
        ...     with ga.TrainStep(model, micro_batches=pieces) as step:
        ...         live.run(ga.train(step, batches, steps=3), name, wait=True)
        >>> [(name, run.last.step, run.state) for name, run in live.runs.items()]
        [('one', 3, 'done'), ('two', 3, 'done')]
    """

    def __init__(self, title: str = "Training", peak: float | None = None, norms: bool = False):
        self.title = title
        self.peak = peak
        self.norms = norms
        self.runs: dict[str, Run] = {}
        self._thread = None
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._view = None

    def run(self, readings, name=None, seconds=None, steps=None, wait=None):
        """Iterate over `readings` and draw them.

        The loop's error is raised here, or in `join()`. An interrupt stops the loop after the
        running
        step.

        Args:
            readings: Readings of a meter, e.g. from `ga.train`.
            name: of the run; a run of the same name is replaced. Default: default_name(). Or a list
                of names, for runs at the same time: `readings` are then pairs (number of the run,
                Reading or None), as ga.launch makes them.
            seconds: when to stop if the readings do not end before; sets the progress bar. Default:
                none.
            steps: after how many steps to stop; sets the progress bar. Default: none.
            wait: True waits for the end, so that the next cell can use the result. False returns at
                once, and `join()` waits. None waits, except in a kernel that hears no clicks while
                a cell runs: there the next cell waits (see the module's docstring).

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
        self.join()
        several = isinstance(name, (list, tuple))
        names = list(name) if several else [name or self.default_name()]
        if not names:
            raise ArgumentError(
                "name is an empty list, expected the name of a run, or one for each run of several"
            )
        readings = iter(readings) if several else _numbered(readings)
        runs = [self._add_run(name) for name in names]
        self._stop.clear()
        self._ended = threading.Event()
        self._view = _make_view(self, runs[0], seconds, steps)
        if wait is None:
            wait = self._view.hears_clicks
        self._view.alone = not wait
        context = contextvars.copy_context()
        work = _in_same_torch_state(lambda: self._loop(readings, runs, seconds, steps))
        self._thread = threading.Thread(
            target=context.run, args=(work,), name=f"gpuaccel-{names[0]}", daemon=True
        )
        self._thread.start()
        if wait:
            self.join()
        else:
            _next_cell_waits(self._ended, self.stop, self._view)

    def default_name(self) -> str:
        """The name of a run that got none: "run 1", "run 2", ...

        While a kernel of ours is replaced (`%%cuda --replace settings_write`) it is
        "your settings_write".
        """
        return replaced_words() or f"run {len(self.runs) + 1}"

    def _add_run(self, name) -> Run:
        """A run without readings, in a colour of its own, or that of the run it replaces."""
        used = {run.colour for key, run in self.runs.items() if key != name}
        free = [colour for colour in RUN_COLOURS if colour not in used] or RUN_COLOURS
        self.runs[name] = Run(name, self.runs[name].colour if name in self.runs else free[0])
        return self.runs[name]

    def _loop(self, readings, runs, seconds, steps):
        try:
            self._iterate(readings, runs, seconds, steps)
        finally:
            self._ended.set()

    def _iterate(self, readings, runs, seconds, steps):
        """Draw until the readings end or a limit or the Stop button ends them."""
        start = time.monotonic()
        last_update = start - PERIOD
        stopped = False
        error = None
        count = 0
        try:
            for number_of_run, reading in readings:
                if reading is not None:
                    count += 1
                    runs[number_of_run].add(reading)
                now = time.monotonic()
                if now - last_update >= self._view.period:
                    last_update = now
                    self._view.update()
                if self.stopping:
                    stopped = True
                    break
                if steps and count >= steps * len(runs):
                    break
                if seconds and now - start >= seconds:
                    break
        except BaseException as caught:
            # the cell that waits raises it
            error = caught
        try:
            if hasattr(readings, "close"):
                # lets a generator clean up: its last checkpoint, its files
                readings.close()
        except BaseException as caught:
            error = error or caught
        for run in runs:
            run.error = error
            run.state = "failed" if error else "stopped" if stopped else "done"
        if self._view.alone:
            self._view.finish()
            if error:
                names = ", ".join(run.name for run in runs)
                print(f"{names} ended by {type(error).__name__}: {error}", file=sys.stderr)

    def stop(self):
        """Ask the running loop to stop after the running step. The Stop button calls this."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once the running loop has been asked to stop."""
        return self._stop.is_set()

    def join(self):
        """Wait until the running loop, if any, has ended; raise the error that ended it."""
        # an event: Thread.join is not safe to interrupt before Python 3.13
        ended, view = self._ended, self._view
        if self._thread is None:
            return
        interrupt = None
        try:
            while not ended.wait(0.05):
                # Readings tell the view how long the first step takes only where there are some.
                if view.run.last is None and time.monotonic() - view.updated >= 1.0:
                    view.update()
        except KeyboardInterrupt as error:
            interrupt = error
            self.stop()
            # a second interrupt leaves without waiting for the step
            while not ended.wait(0.05):
                pass
        self._thread = None
        if not view.alone:
            view.finish()
        if interrupt is not None:
            raise interrupt
        if view.run.error is not None:
            raise view.run.error

    @property
    def running(self) -> bool:
        """True while a loop runs."""
        return self._thread is not None and not self._ended.is_set()

    def show_static(self):
        """Display the static picture and its line of text (text only outside a notebook)."""
        if notebook_shell() is None:
            print(self)
            return
        from IPython.display import display

        display(self)

    def __str__(self):
        lines = [str(run) for run in self.runs.values()]
        measured = [run for run in self.runs.values() if run.tokens_per_s]
        for run in measured[1:]:
            times = run.tokens_per_s / measured[0].tokens_per_s
            lines.append(f"{run.name} runs at {times:.2f} times the speed of {measured[0].name}")
        return "\n".join(lines) or f"{self.title}: no run yet"

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None):
        runs = list(self.runs.values())
        drawn = picture(runs, self.peak, themed=False, title=self.title, norms=self.norms)
        return bundle(drawn, str(self))


def _numbered(readings):
    """The readings of one run as pairs (0, Reading)."""
    iterator = iter(readings)
    try:
        for reading in iterator:
            yield 0, reading
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


class _TextView:
    """Where there are no widgets: at most one line of text a second."""

    period = 1.0
    hears_clicks = True
    # whether the thread itself finishes the view, because no cell waits for it
    alone = False

    def __init__(self, live, run, seconds, steps, notebook):
        self.live = live
        self.run = run
        self.steps = steps
        self.notebook = notebook
        self.began = self.said = self.updated = time.monotonic()

    def _print(self, words):
        print(words, file=sys.stdout if self.notebook else sys.stderr, flush=True)

    def update(self):
        self.updated = time.monotonic()
        if self.run.last is not None:
            self._print(_status(self.run, None, self.steps, name=True))
        elif self.updated - self.said >= 3.0 or self.said == self.began:
            self.said = self.updated
            self._print(f"{self.run.name}: {_starting(self.updated - self.began)}")

    def finish(self):
        if self.notebook:
            self.live.show_static()
        else:
            self._print(self.run)


class _WidgetView:
    """The widgets of one run: title, status, progress, Stop, picture."""

    period = PERIOD
    alone = False

    def __init__(self, live, run, seconds, steps):
        import ipywidgets as W
        from IPython.display import display

        self.live = live
        self.run = run
        self.seconds = seconds
        self.steps = steps
        self.head = W.HTML(layout=W.Layout(flex="1 1 auto", margin="0"))
        self.progress = W.FloatProgress(
            value=0.0,
            min=0.0,
            max=1.0,
            layout=W.Layout(width="150px", height="10px", margin="0 14px 0 8px"),
        )
        self.progress.style.bar_color = run.colour
        self.progress.layout.visibility = "visible" if seconds or steps else "hidden"
        self.button = W.Button(
            description="Stop",
            icon="stop",
            tooltip="Stop after the step that is running",
            layout=W.Layout(width="92px", margin="0"),
        )
        self.svg = W.HTML(layout=W.Layout(margin="4px 0 0 0"))
        row = W.HBox(
            [self.head, self.progress, self.button],
            layout=W.Layout(align_items="center", width="100%"),
        )
        self.box = W.VBox(
            [row, self.svg],
            layout=W.Layout(max_width=f"{WIDTH + 12}px", padding="6px 4px", overflow="visible"),
        )
        self.began = time.monotonic()
        self.button.on_click(self._clicked)
        self.hears_clicks = _listen_while_busy(self.button, self._clicked)
        self.update()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        bundle = {
            "application/vnd.jupyter.widget-view+json": view,
            "text/plain": f"{live.title} (live)",
        }
        self.handle = display(bundle, raw=True, display_id=True)

    def _clicked(self, *_):
        self.live.stop()

    def _say(self, status):
        self.head.value = (
            '<div style="line-height:1.35">'
            f'<span style="font-size:15px;font-weight:600">{escape(self.live.title)}</span><br>'
            '<span style="font-size:12px;font-variant-numeric:tabular-nums;'
            'color:var(--jp-ui-font-color2,inherit)">'
            f"{escape(status)}</span></div>"
        )

    def update(self):
        self.updated = time.monotonic()
        runs = list(self.live.runs.values())
        status = _status(self.run, self.seconds, self.steps)
        if self.run.last is None:
            status = _starting(self.updated - self.began)
        if self.live.stopping:
            status = "stopping after this step"
        self._say(status)
        if self.run.last is not None:
            by_steps = self.run.last.step / self.steps if self.steps else 0.0
            by_time = self.run.last.seconds / self.seconds if self.seconds else 0.0
            self.progress.value = min(1.0, max(by_steps, by_time))
        self.svg.value = picture(runs, self.live.peak, norms=self.live.norms)

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


def _next_cell_waits(ended, stop, view):
    """Let the next cell begin when the loop has ended (an interrupt stops the loop first)."""
    shell = notebook_shell()
    if shell is None:
        return

    def wait(*_):
        shell.events.unregister("pre_run_cell", wait)
        try:
            while not ended.wait(0.05):
                pass
        except KeyboardInterrupt:
            stop()
            ended.wait()
            raise
        finally:
            if isinstance(view, _WidgetView):
                # again, from a cell: tools that run notebooks ignore threads
                view.finish()

    shell.events.register("pre_run_cell", wait)


def _in_same_torch_state(work):
    """work, run with the caller's CUDA device, stream and gradient mode.

    Torch keeps them for each thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return work
    grad = torch.is_grad_enabled()
    stream = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()

    def run():
        with torch.set_grad_enabled(grad):
            if stream is None:
                return work()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return work()

    return run
