"""The live view: the loss of each step, drawn while a cell trains.

    live = ga.Live("loss")
    live.run(train(net, saxpy), "saxpy", steps=200)    # draws, with a Stop button
    live.run(train(other, mine), "mine", steps=200)    # one more line
    live.runs["mine"].losses

`train` is a generator of your own: a training loop that says `yield loss` after each step. The loop
stops between two steps: by the button, or by interrupting the kernel. When it ends, a static
picture and a line of text replace the view and stay in the saved notebook. The view is made of
ipywidgets, without JavaScript of our own.

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

from ..backends import default_device
from ..errors import ArgumentError
from ..notebook import notebook_shell
from .figures.drawing import RUN_COLOURS, WIDTH, bundle, in_page, live_bundle
from .figures.training_runs import Run, picture

# seconds between two updates of the live view
PERIOD = 0.1


class Live:
    """A live picture of one or several training runs. Displaying the object shows the static one.

    Without a GPU it shows loss and step, and no speed. Outside a notebook it is at most one line of
    text a second, on stderr.

    Args:
        title: a line above the picture.

    Attributes:
        runs: name -> Run, in the order of their start. `runs[name].losses` are (step, loss).

    Example:
        >>> w = torch.tensor(4.0)
        >>> def train(lr, steps=3):
        ...     for _ in range(steps):
        ...         loss = (w * w).item()
        ...         w.sub_(lr * 2 * w)
        ...         yield loss
        >>> live = ga.Live("w squared")
        >>> live.run(train(0.25), "saxpy", steps=3)
        >>> live.runs["saxpy"].losses
        [(1, 16.0), (2, 4.0), (3, 1.0)]
    """

    def __init__(self, title: str = "Training"):
        self.title = title
        self.runs: dict[str, Run] = {}
        self._stop = threading.Event()
        self._shown = (None, None)  # the cell of the newest view, and its display

    def run(self, losses, name: str, steps: int | None = None):
        """Iterate over `losses` and draw them; an interrupt stops the loop after its step.

        Args:
            losses: for each step its loss, a number or a tensor of one element, or a Reading of
                `ga.train`, which on a GPU has the speed, too. Most often a generator. A tensor is
                copied on its device and read when it is drawn, so no step waits for it.
            name: of the run; a run of the same name is replaced.
            steps: how many there will be, for the axis and the progress bar. Default: not known.

        Returns:
            What the generator returned; None where it was stopped.

        Raises:
            ArgumentError: for losses that cannot be iterated over, for items that are no loss, and
                steps that are not positive.
        """
        if not hasattr(losses, "__iter__"):
            raise ArgumentError(
                f"losses is a {type(losses).__name__}, expected an iterable, such as a generator "
                "that yields the loss of each step, or ga.train(...)"
            )
        if steps is not None and steps <= 0:
            raise ArgumentError(f"steps is {steps}, expected a positive number")
        used = {run.colour for key, run in self.runs.items() if key != name}
        free = [colour for colour in RUN_COLOURS if colour not in used] or RUN_COLOURS
        colour = self.runs[name].colour if name in self.runs else free[0]
        self.runs[name] = run = Run(name, colour, steps, default_device().type == "cuda")
        self._stop.clear()
        view = _make_view(self, run)
        first = threading.Event()
        threading.Thread(target=_say_that_it_starts, args=(view, first), daemon=True).start()
        run_state = "failed"
        try:
            with _interrupt_stops(self._stop):
                returned = self._iterate(iter(losses), run, view, first)
                run_state = "stopped" if self.stopping else "done"
                return returned
        finally:
            first.set()
            run.state = run_state
            view.finish()

    def _iterate(self, losses, run, view, first):
        """Draw until the losses end or the Stop button ends them."""
        last_update = time.monotonic()
        try:
            while not self.stopping:
                try:
                    run.add(next(losses))
                except StopIteration as end:
                    return end.value
                now = time.monotonic()
                if not first.is_set() or now - last_update >= view.period:
                    first.set()
                    last_update = now
                    view.update()
        finally:
            if hasattr(losses, "close"):
                # lets a generator clean up: its last checkpoint, its files
                losses.close()

    def stop(self):
        """Ask the running loop to stop after the running step. The Stop button calls this."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True once the running loop has been asked to stop."""
        return self._stop.is_set()

    def __str__(self):
        return "\n".join(map(str, self.runs.values())) or f"{self.title}: no run yet"

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

    def __init__(self, live, run, notebook):
        self.live = live
        self.run = run
        self.notebook = notebook
        self.began = self.said = time.monotonic()

    def _print(self, words):
        print(words, file=sys.stdout if self.notebook else sys.stderr, flush=True)

    def update(self):
        now = time.monotonic()
        if self.run.step:
            self._print(f"{self.run.name}: {_status(self.run)}")
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

    def __init__(self, live, run):
        import ipywidgets as W
        from IPython.display import display

        self.live = live
        self.run = run
        self.head = W.HTML(layout=W.Layout(flex="1 1 auto", margin="0"))
        look = W.Layout(width="150px", height="10px", margin="0 14px 0 8px")
        self.progress = W.FloatProgress(value=0.0, min=0.0, max=1.0, layout=look)
        self.progress.style.bar_color = run.colour
        self.progress.layout.visibility = "visible" if run.steps else "hidden"
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
        # The runs of one cell are one picture.
        cell = notebook_shell().execution_count
        if live._shown[0] == cell:
            live._shown[1].update(data, raw=True)
        else:
            live._shown = cell, display(data, raw=True, display_id=True)

    def update(self):
        starting = _starting(time.monotonic() - self.began)
        status = f"{self.run.name}: {_status(self.run) if self.run.step else starting}"
        if self.live.stopping:
            status = "stopping after this step"
        self.head.value = (
            '<div style="line-height:1.35">'
            f'<span style="font-size:15px;font-weight:600">{escape(self.live.title)}</span><br>'
            '<span style="font-size:12px;font-variant-numeric:tabular-nums;'
            'color:var(--jp-ui-font-color2,inherit)">'
            f"{escape(status)}</span></div>"
        )
        if self.run.steps:
            self.progress.value = min(1.0, self.run.step / self.run.steps)
        self.svg.value = in_page(picture(list(self.live.runs.values())))

    def finish(self):
        """The static picture takes the widgets' place, in this cell and in the saved notebook."""
        self.live._shown[1].update(self.live._repr_mimebundle_(), raw=True)
        row = self.box.children[:1]
        for widget in (self.button, self.progress, self.head, self.svg, *row, self.box):
            widget.close()


def _starting(seconds):
    """What the view says before the first step has ended."""
    if seconds < 1:
        return "starting"
    return f"first step, {seconds:.0f} s: it may compile kernels or capture a graph"


def _status(run):
    of_all = f" of {run.steps}" if run.steps else ""
    return f"step {run.step}{of_all}, {run.numbers}"


def _make_view(live, run):
    if notebook_shell() is None:
        return _TextView(live, run, notebook=False)
    try:
        return _WidgetView(live, run)
    except ImportError:
        return _TextView(live, run, notebook=True)


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
