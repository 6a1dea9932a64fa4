"""The picture of training runs: loss, and on a GPU tokens per second and the stages of a step.

run = Run("arena", RUN_COLOURS[0])
run.add(loss)                        # or a Reading of the meter, after each step
picture([run])                       # SVG
"""

import itertools
import math
import numbers
import statistics
from typing import NamedTuple

import torch

from ...errors import ArgumentError
from ...measure import Reading
from .drawing import GREY, WIDTH, Ink, axis_number, milliseconds, nice_ticks, number, text_width

STAGE_COLOURS = {
    "data": "#b3a57a",
    "zero": "#9c9cc9",
    "replay": "#8fb06c",
    "forward": "#7fb3dd",
    "backward": "#4a7fb8",
    "accumulate": "#e9a13b",
    "clip": "#b58fc9",
    "optimizer": "#5bab8c",
    "other": GREY,
}
# points kept per run; beyond them every second one is dropped
KEEP = 2000


class Point(NamedTuple):
    """What is kept of one step."""

    step: int
    loss: object  # a float, None, or a tensor that has not been read yet
    tokens_per_s: float = 0.0
    val_loss: float | None = None


class Run:
    """One line in the picture.

    Args:
        name: of the run.
        colour: of its line, as in CSS.
        steps: how many there will be, if that is known.
        speed: keep the speeds of Readings.

    Attributes:
        step: the newest; 0 before the first.
        state: "running", "done", "stopped" or "failed".
    """

    def __init__(self, name, colour, steps=None, speed=False):
        self.name = name
        self.colour = colour
        self.steps = steps
        self.speed = speed
        self.step = 0
        self.points = []
        self.stages = {}  # ms of each stage, smoothed over recent steps
        self.step_ms = 0.0
        self.state = "running"

    def add(self, item):
        """Add one more step: its loss, or its Reading."""
        if isinstance(item, Reading):
            self.step = item.step
            rate = item.tokens_per_s if self.speed else 0.0
            self.points.append(Point(item.loss_step or item.step, item.loss, rate, item.val_loss))
            if self.speed:
                self.step_ms = item.step_ms
                for name in {**self.stages, **item.stages}:
                    ms = item.stages.get(name, 0.0)
                    self.stages[name] = 0.8 * self.stages.get(name, ms) + 0.2 * ms
        else:
            loss = _checked_loss(item, self.step + 1)
            self.step += 1
            self.points.append(Point(self.step, loss))
        if len(self.points) > KEEP:
            kept = enumerate(self.points)
            self.points = [p for i, p in kept if i % 2 == 0 or p.val_loss is not None]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of the steps that are kept. Waits once for those still on the device."""
        for i, p in enumerate(self.points):
            if isinstance(p.loss, torch.Tensor):
                self.points[i] = p._replace(loss=float(p.loss))
        return [(p.step, p.loss) for p in self.points if p.loss is not None]

    @property
    def loss(self) -> float | None:
        """The mean of the last fiftieth of the losses, so that noise does not decide; or None."""
        losses = [loss for _, loss in self.losses]
        return statistics.fmean(losses[-1 - len(losses) // 50 :]) if losses else None

    @property
    def tokens_per_s(self) -> float:
        """The newest rate; of a run that has ended, the median over its second half."""
        rates = [p.tokens_per_s for p in self.points if p.tokens_per_s > 0]
        if not rates or self.state == "running":
            return rates[-1] if rates else 0.0
        return statistics.median(rates[len(rates) // 2 :])

    @property
    def numbers(self) -> str:
        """Speed and loss in words."""
        parts = [number(self.tokens_per_s, "tok/s")] if self.tokens_per_s else []
        if self.loss is not None:
            size = abs(self.loss)
            words = number(self.loss) if 1000 <= size < math.inf else f"{self.loss:.2f}"
            words = f"{self.loss:.1g}" if size < 0.1 else words.replace("nan", "NaN")
            parts.append(f"loss {words}")
        return ", ".join(parts)

    def __str__(self):
        if not self.step:
            return f"{self.name}: no step finished"
        ending = {"stopped": ", stopped", "failed": ", ended by an error"}.get(self.state, "")
        return f"{self.name}: {self.numbers} after {self.step} steps{ending}"

    __repr__ = __str__


def _checked_loss(item, step):
    """A float, or a copy on the device, to be read when it is drawn: the loop waits for nothing."""
    if isinstance(item, torch.Tensor) and item.numel() == 1:
        return item.detach().clone()
    if isinstance(item, numbers.Real):
        return float(item)
    what = type(item).__name__
    what += f" of shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else ""
    raise ArgumentError(
        f"step {step} gave a {what}, expected its loss (a number or a tensor of one element) or a "
        "Reading of ga.train"
    )


def picture(runs, title="") -> str:
    """The runs as SVG."""
    ink = Ink()
    if title:
        ink.text(0, 18, title, 15, weight=600)
    top = _draw_legend(ink, runs, 46.0 if title else 20.0) + 34
    bottom = top + 180
    rates = [[(p.step, p.tokens_per_s) for p in run.points if p.tokens_per_s] for run in runs]
    left = 46
    if any(rates):
        panel = _Panel(ink, (left, top, 382, bottom), runs, rates, from_zero=True)
        panel.draw("Tokens per second")
        left = 462
    _draw_losses(ink, (left, top, WIDTH - 8, bottom), runs)
    height = bottom + 26
    if any(run.stages for run in runs):
        height = _draw_stages(ink, runs, bottom + 40)
    return ink.svg(height + 4, "; ".join(map(str, runs)) or "no run yet")


def _draw_legend(ink, runs, y):
    """For each run its colour, name, speed and loss. Returns where it ends."""
    x = 0.0
    for run in runs:
        words = f"{run.name}: {run.numbers or 'starting'}"
        width = 18 + text_width(words, 13)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 24
        ink.dot(x + 6, y - 5, 5.5, run.colour)
        ink.text(x + 18, y, words, 13)
        x += width + 16
    return y


def _draw_losses(ink, box, runs):
    """The loss by steps, and circles for the losses on text held out."""
    losses = [[point for point in run.losses if math.isfinite(point[1])] for run in runs]
    held_out = [
        [(p.step, p.val_loss) for p in run.points if p.val_loss and math.isfinite(p.val_loss)]
        for run in runs
    ]
    panel = _Panel(ink, box, runs, losses, beside=itertools.chain(*held_out))
    panel.draw("Loss")
    for run, points, circles in zip(runs, losses, held_out):
        for point in circles:
            ink.dot(*panel.place(*point), 3.6, "none", stroke=run.colour, stroke_width=1.8)
        if points and not math.isfinite(last := run.losses[-1][1]):
            x, _ = panel.place(*points[-1])
            anchor = "end" if x > (box[0] + box[2]) / 2 else "start"
            words = f"{'NaN' if math.isnan(last) else '∞'} from here"
            ink.text(x, box[1] - 2, words, 11, run.colour, anchor, 600)
    if any(held_out):
        ink.text(box[2], box[1] - 14, "○ on text held out", 11, ink.soft, "end")


class _Panel:
    """One chart. Where the largest value is many times the smallest, its scale is logarithmic.

    Args:
        box: left, top, right, bottom.
        lines: the points (step, y) of each run.
        beside: points that its axes have to cover, too.
    """

    def __init__(self, ink, box, runs, lines, from_zero=False, beside=()):
        self.ink, self.box, self.runs, self.lines = ink, box, runs, lines
        points = [*itertools.chain(*lines), *beside]
        low, high = (f((y for _, y in points), default=d) for f, d in ((min, 0.0), (max, 1.0)))
        self.scale = math.log if not from_zero and 0 < 8 * low < high else float
        self.ticks = (
            _log_ticks(low, high)
            if self.scale is math.log
            else nice_ticks(0.0 if from_zero else low, high)
        )
        planned = [run.steps for run in runs if run.steps and run.state == "running"]
        self.x_end = max([x for x, _ in points] + planned, default=0) or 1

    def place(self, x, y):
        """Where a value stands in the picture."""
        left, top, right, bottom = self.box
        low, high, y = map(self.scale, (self.ticks[0], self.ticks[-1], y))
        return (
            left + x / self.x_end * (right - left),
            bottom - (y - low) / (high - low) * (bottom - top),
        )

    def draw(self, title):
        """The axes, and in the colour of each run a line of means, with each value pale behind."""
        ink = self.ink
        left, top, right, bottom = self.box
        ink.text(left - 44, top - 14, title, 12.5, weight=600)
        for tick in self.ticks:
            y = self.place(0, tick)[1]
            ink.line(left, y, right, y, opacity=0.9 if tick == self.ticks[0] else 0.45)
            words = f"{tick:.6g}" if abs(tick) < 1000 else axis_number(tick)
            ink.text(left - 8, y + 4, words, 11, ink.soft, "end")
        ink.text(left, bottom + 17, "0", 11, ink.soft)
        ink.text(right, bottom + 17, f"{axis_number(self.x_end)} steps", 11, ink.soft, "end")
        if not any(self.lines):
            middle = (left + right) / 2, (top + bottom) / 2
            ink.text(*middle, "waiting for the first step", 12, ink.soft, "middle")
        size = 1 + max(map(len, self.lines), default=0) // 50
        for i, (run, points) in enumerate(zip(self.runs, self.lines)):
            if points:
                # An earlier line is wider, so that it shows beside a later one that is equal.
                equal = sum(self._are_equal(points, later) for later in self.lines[i + 1 :])
                if size > 1 and not equal:
                    each = _means(points, 1 + len(points) // 300)
                    ink.polyline(itertools.starmap(self.place, each), run.colour, 1, opacity=0.3)
                means = [self.place(*point) for point in _means(points, size)]
                ink.polyline(means, run.colour, 2.2 + 4 * equal)
                ink.dot(*means[-1], 3.4, run.colour)

    def _are_equal(self, points, others):
        """Whether two lines cannot be told apart in the picture."""
        pairs = [(self.place(*p)[1], self.place(*q)[1]) for p, q in zip(points, others)]
        return len(pairs) > 5 and all(abs(p - q) < 2 for p, q in pairs)


def _log_ticks(low, high):
    """Values that cover [low, high]: powers of ten; in a short range 2 and 5 times those, too."""
    first, last = math.log10(low) - 1e-9, math.log10(high) + 1e-9
    powers = range(math.floor(first), math.ceil(last) + 1)
    ticks = [f * 10.0**p for p in powers for f in ((1, 2, 5) if high < 100 * low else (1,))]
    below, above = max(t for t in ticks if t <= low), min(t for t in ticks if t >= high)
    return [tick for tick in ticks if below <= tick <= above]


def _draw_stages(ink, runs, top):
    """A stacked bar for each run, all on one scale of milliseconds. Returns where they end."""
    rows = [(run, _stages_and_gap(run)) for run in runs if run.stages]
    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    ink.text(0, top + 14, "Time of one step", 12.5, weight=600)
    x = WIDTH - sum(text_width(name, 11.5) + 32 for name in names) + 14
    for name in names:
        ink.rect(x, top + 5, 10, 10, STAGE_COLOURS.get(name, GREY), rx=2.5)
        ink.text(x + 15, top + 14, name, 11.5, ink.soft)
        x += text_width(name, 11.5) + 32
    # bold text is wider
    left = max(text_width(run.name, 12) for run, _ in rows) * 1.15 + 16
    longest = max(sum(stages.values()) for _, stages in rows) or 1.0
    scale = (WIDTH - left - 70) / longest
    y = top + 28
    for run, stages in rows:
        ink.text(left - 12, y + 14.5, run.name, 12, run.colour, "end", 600)
        x = left
        for name, ms in stages.items():
            width = ms * scale
            words = milliseconds(ms)
            title = f"{name}: {words}"
            colour = STAGE_COLOURS.get(name, GREY)
            ink.rect(x, y, max(width - 1.2, 0.4), 20, colour, rx=2, title=title)
            if width > text_width(words, 11) + 12:
                ink.text(x + width / 2, y + 14.2, words, 11, "#14181d", "middle")
            x += width
        ink.text(x + 8, y + 14.5, milliseconds(sum(stages.values())), 12, ink.strong, weight=600)
        y += 27
    return y


def _stages_and_gap(run):
    """The stages, and `other`: the rest of the step's time, where it is more than 3 percent."""
    stages = dict(run.stages)
    total = sum(stages.values())
    gap = run.step_ms - total
    if gap > 0.03 * total:
        stages["other"] = stages.get("other", 0.0) + gap
    return stages


def _means(points, size):
    """The means of stretches of `size` points; what is left over belongs to the last one."""
    cuts = [*range(0, max(len(points) - size, 0) + 1, size), len(points)]
    return [tuple(map(statistics.fmean, zip(*points[a:b]))) for a, b in itertools.pairwise(cuts)]
