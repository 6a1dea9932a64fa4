"""The live view: tokens per second, loss, norms, and where a step's time goes, drawn while the cell trains.

    live = LiveThroughput("Where should gradients be added up?")
    live.run(train(step, batches, steps=200), name="host", steps=200)      # a picture moves, a button stops it
    live.run(train(other, batches, steps=200), name="arena", steps=200)    # the same picture, one more line
    live.runs["arena"].tokens_per_s

The loop runs in a thread and stops between two steps: by the button, by interrupting the kernel, or by its `steps` or
`seconds`. When it ends, the view is replaced by a static picture and a line of text, which stay in the saved
notebook. ipywidgets only, no JavaScript of our own.

How a click reaches a kernel that is busy: it does not, in general; the kernel handles comm messages between cells.
ipykernel from 7.4 on asks the button's comm, in its channel thread and also while a cell runs, where a message
belongs, and there we listen. With an older kernel (Colab) `run` returns at once instead, the kernel stays free to
hear the click, and the next cell waits, before its first line, until the run has ended.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from html import escape

from ..errors import ArgumentError
from ..notebook import notebook_shell
from .figures.picture import RUN_COLOURS, WIDTH, Run, gigabytes, norm_words, number, picture

PERIOD = 0.1  # seconds between two updates of the live view


class LiveThroughput:
    """A live picture of one or several training runs.

    title: a line above the picture. peak: tokens per second of a limit worth a dashed line, or None. norms: True adds a
    panel of the gradient's norm, before and after clipping, from readings that have it.
    `runs` maps each run's name to its Run. Displaying the object shows the static picture.
    """

    def __init__(self, title="Training", peak=None, norms=False):
        self.title, self.peak, self.norms = title, peak, norms
        self.runs = {}
        self._thread = None
        self._stop, self._ended = threading.Event(), threading.Event()
        self._view = None

    def run(self, readings, name=None, seconds=None, steps=None, wait=None):
        """Iterates over `readings` (meter.Reading objects, e.g. from `ga.train`) and draws them. A run of the same
        name is replaced. name: of the run; or a list of names, of runs at the same time: then `readings` are pairs (number
        of the run, Reading; None: no news), as ga.launch has them.

        seconds, steps: where to stop, if the readings do not end before (and what the progress bar measures). wait:
        True waits for the end, so that the next cell can use the result; False returns at once, `join()` waits. By
        default it waits, except in a kernel that hears no clicks while a cell runs: there the next cell waits (see
        the module's text). Errors of the loop are raised here, or by `join()`. Interrupting stops the loop after the
        step it is in.
        """
        if not hasattr(readings, "__iter__"):
            raise ArgumentError(
                f"readings is a {type(readings).__name__}, "
                "expected an iterable of Readings, such as ga.train(...)"
            )
        for what, limit in (("seconds", seconds), ("steps", steps)):
            if limit is not None and limit <= 0:
                raise ArgumentError(f"{what} is {limit}, expected a positive number")
        self.join()
        together = isinstance(name, (list, tuple))
        names = list(name) if together else [name or f"run {len(self.runs) + 1}"]
        if not names:
            raise ArgumentError(
                "name is an empty list, expected the name of a run, or one for each run of several"
            )
        runs = [self._new(one) for one in names]
        self._stop.clear()
        self._ended = threading.Event()
        self._view = _make_view(self, runs[0], seconds, steps)
        if wait is None:
            wait = self._view.hears_clicks
        self._view.alone = not wait
        context = contextvars.copy_context()
        work = _in_same_torch_state(lambda: self._loop(readings, runs, together, seconds, steps))
        self._thread = threading.Thread(
            target=context.run, args=(work,), name=f"gpuaccel-{names[0]}", daemon=True
        )
        self._thread.start()
        if wait:
            self.join()
        else:
            _next_cell_waits(self._ended, self.stop, self._view)

    def _new(self, name) -> Run:
        """A run without readings, in a colour of its own, or that of the run it replaces."""
        taken = {run.colour for key, run in self.runs.items() if key != name}
        free = [colour for colour in RUN_COLOURS if colour not in taken] or RUN_COLOURS
        self.runs[name] = Run(name, self.runs[name].colour if name in self.runs else free[0])
        return self.runs[name]

    def _loop(self, readings, runs, together, seconds, steps):
        try:
            self._iterate(readings, runs, together, seconds, steps)
        finally:
            self._ended.set()

    def _iterate(self, readings, runs, together, seconds, steps):
        began = shown = time.monotonic()
        shown -= PERIOD
        iterator, stopped, failed = iter(readings), False, None
        try:
            count = 0
            for reading in iterator:
                which, reading = reading if together else (0, reading)
                if reading is not None:
                    count += 1
                    runs[which].add(reading)
                now = time.monotonic()
                if now - shown >= self._view.period:
                    shown = now
                    self._view.update()
                if self._stop.is_set():
                    stopped = True
                    break
                if (steps and count >= steps * len(runs)) or (seconds and now - began >= seconds):
                    break
        except BaseException as error:  # carried to the cell that waits
            failed = error
        try:
            if hasattr(iterator, "close"):
                iterator.close()  # lets a generator clean up: its last checkpoint, its files
        except BaseException as error:
            failed = failed or error
        for run in runs:
            run.error, run.state = failed, "failed" if failed else "stopped" if stopped else "done"
        if self._view.alone:
            self._view.finish()
            if failed:
                print(
                    f"{', '.join(run.name for run in runs)} ended by {type(failed).__name__}: {failed}",
                    file=sys.stderr,
                )

    def stop(self):
        """Asks the running loop to stop after the step it is in. The Stop button calls this."""
        self._stop.set()

    def join(self):
        """Waits until the running loop, if any, has ended; raises the error that ended it."""
        ended, view = (
            self._ended,
            self._view,
        )  # an event: Thread.join is not safe to interrupt before Python 3.13
        if self._thread is None:
            return
        interrupt = None
        try:
            while not ended.wait(0.05):
                pass
        except KeyboardInterrupt as error:
            interrupt = error
            self.stop()
            while not ended.wait(0.05):  # a second interrupt leaves without waiting for the step
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
        """Displays the static picture and its line of text (text only outside a notebook)."""
        if notebook_shell() is None:
            print(self)
            return
        from IPython.display import display

        display(self)

    def __str__(self):
        lines = [str(run) for run in self.runs.values()]
        done = [run for run in self.runs.values() if run.tokens_per_s]
        lines += [
            f"{run.name} runs at {run.tokens_per_s / done[0].tokens_per_s:.2f} times the speed of {done[0].name}"
            for run in done[1:]
        ]
        return "\n".join(lines) or f"{self.title}: no run yet"

    __repr__ = __str__

    def _repr_mimebundle_(self, include=None, exclude=None):
        drawn = picture(
            list(self.runs.values()), self.peak, themed=False, title=self.title, norms=self.norms
        )
        return {"image/svg+xml": drawn, "text/plain": str(self)}


class _TextView:
    """Where there are no widgets: at most one line of text a second."""

    period, hears_clicks = 1.0, True
    alone = False  # whether the thread itself finishes the view, because nobody waits for it

    def __init__(self, live, run, seconds, steps, notebook):
        self.live, self.run, self.steps, self.notebook = live, run, steps, notebook

    def _print(self, words):
        print(words, file=sys.stdout if self.notebook else sys.stderr, flush=True)

    def update(self):
        self._print(_status(self.run, None, self.steps, name=True))

    def finish(self):
        self.live.show_static() if self.notebook else self._print(self.run)


class _WidgetView:
    """The widgets of one run: title, status, progress, Stop, picture."""

    period = PERIOD
    alone = False  # as above

    def __init__(self, live, run, seconds, steps):
        import ipywidgets as W
        from IPython.display import display

        self.live, self.run, self.seconds, self.steps = live, run, seconds, steps
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

    def update(self):
        runs = list(self.live.runs.values())
        stopping = self.live._stop.is_set()
        status = (
            "stopping after this step" if stopping else _status(self.run, self.seconds, self.steps)
        )
        self.head.value = (
            '<div style="line-height:1.35">'
            f'<span style="font-size:15px;font-weight:600">{escape(self.live.title)}</span><br>'
            '<span style="font-size:12px;font-variant-numeric:tabular-nums;color:var(--jp-ui-font-color2,inherit)">'
            f"{escape(status)}</span></div>"
        )
        if self.run.last is not None:
            done = [self.run.last.step / self.steps] if self.steps else []
            done += [self.run.last.seconds / self.seconds] if self.seconds else []
            self.progress.value = min(1.0, max(done, default=0.0))
        self.svg.value = picture(runs, self.live.peak, norms=self.live.norms)

    def finish(self):
        """The static picture takes the widgets' place, in this cell and in the saved notebook."""
        self.handle.update(self.live._repr_mimebundle_(), raw=True)
        for widget in (
            self.button,
            self.progress,
            self.head,
            self.svg,
            *self.box.children[:1],
            self.box,
        ):
            widget.close()


def _status(run, seconds, steps, name=False):
    """One calm line: where the run is, and what it uses."""
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
        parts.append(f"{gigabytes(last.memory_bytes)} memory")
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
    """Hears the button's clicks in the kernel's channel thread; False where the kernel has no such hook (ipykernel
    before 7.4)."""
    comm = getattr(button, "comm", None)
    route = getattr(comm, "_reply_subshell_for", None)
    if route is None:
        return False

    def heard(data, default):
        content = data.get("content") if isinstance(data, dict) else None
        if isinstance(content, dict) and content.get("event") == "click":
            clicked()
        return route(data, default)

    comm._reply_subshell_for = heard
    return True


def _next_cell_waits(ended, stop, view):
    """The next cell begins when the loop has ended (an interrupt stops the loop first)."""
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
                view.finish()  # again, from a cell: tools that run notebooks ignore threads

    shell.events.register("pre_run_cell", wait)


def _in_same_torch_state(work):
    """Torch keeps the current device, stream and gradient mode for each thread: hand the caller's on to the loop's."""
    torch = sys.modules.get("torch")
    if torch is None:
        return work
    grad = torch.is_grad_enabled()
    stream = (
        torch.cuda.current_stream()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else None
    )

    def run():
        with torch.set_grad_enabled(grad):
            if stream is None:
                return work()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return work()

    return run
