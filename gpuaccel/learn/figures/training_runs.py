"""The picture of training runs: tokens per second, loss, and the stages of a step.

run = Run("arena", RUN_COLOURS[0])
run.add(reading)                     # a Reading of the meter after each step
picture([run])                       # SVG
"""

import itertools
import math
import statistics
from typing import NamedTuple

from .drawing import (
    GREY,
    WIDTH,
    Ink,
    axis_number,
    milliseconds,
    nice_ticks,
    number,
    shorten,
    text_width,
)

STAGE_COLOURS = {
    "data": "#b3a57a",
    "forward": "#7fb3dd",
    "backward": "#4a7fb8",
    "accumulate": "#e9a13b",
    "clip": "#b58fc9",
    "optimizer": "#5bab8c",
    "other": GREY,
}
SPARE_COLOURS = ("#c98b8b", "#8fb06c", "#9c9cc9", "#c7a86b")
# points kept per run; beyond them every second one is dropped
KEEP = 2000


class Point(NamedTuple):
    """What is kept of one reading."""

    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    val_loss: float | None
    # how many tokens had been trained on at that loss: on a GPU it is a step or two old
    loss_tokens: float


class Run:
    """One line in the picture, and the newest reading.

    Args:
        name: of the run.
        colour: of its line, as in CSS.

    Attributes:
        last: the newest Reading; None before the first.
        state: "running", "done", "stopped" or "failed".
    """

    def __init__(self, name, colour):
        self.name = name
        self.colour = colour
        self.last = None
        self.points = []
        self.stages = {}  # ms of each stage, smoothed over recent steps
        self.val_loss = None
        self.state = "running"

    def add(self, reading):
        """Add the reading of one more step."""
        self.last = r = reading
        loss_tokens = r.tokens * (r.loss_step or r.step) / r.step
        point = Point(r.step, r.tokens, r.tokens_per_s, r.loss, r.val_loss, loss_tokens)
        self.points.append(point)
        if r.val_loss is not None:
            self.val_loss = r.val_loss
        if len(self.points) > KEEP:
            kept = enumerate(self.points)
            self.points = [p for i, p in kept if i % 2 == 0 or p.val_loss is not None]
        for name in {**self.stages, **r.stages}:
            ms = r.stages.get(name, 0.0)
            self.stages[name] = 0.8 * self.stages.get(name, ms) + 0.2 * ms

    @property
    def tokens_per_s(self) -> float:
        """The newest rate; of a run that has ended, the median over its second half."""
        if self.state == "running" and self.last is not None:
            return self.last.tokens_per_s
        rates = [p.tokens_per_s for p in self.points if p.tokens_per_s > 0]
        return statistics.median(rates[len(rates) // 2 :]) if rates else 0.0

    @property
    def loss(self):
        """The newest loss, or None."""
        return None if self.last is None else self.last.loss

    def __str__(self):
        if self.last is None:
            return f"{self.name}: no step finished"
        parts = [number(self.tokens_per_s, "tok/s")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.val_loss is not None:
            parts.append(f"held-out loss {self.val_loss:.3f}")
        ending = {"stopped": ", stopped", "failed": ", ended by an error"}.get(self.state, "")
        duration = f"{self.last.step} steps ({self.last.seconds:.1f} s)"
        return f"{self.name}: {', '.join(parts)} after {duration}{ending}"

    __repr__ = __str__


def picture(runs, title="") -> str:
    """The runs as SVG."""
    ink = Ink()
    if title:
        ink.text(0, 18, title, 15, weight=600)
    top = _draw_legend(ink, runs, 48.0 if title else 20.0) + 30
    bottom = top + 160
    has_loss = not runs or any(p.loss is not None for run in runs for p in run.points)
    rates = [[(p.step, p.tokens_per_s) for p in run.points if p.tokens_per_s > 0] for run in runs]
    _Panel(ink, (40, top, 382 if has_loss else WIDTH - 8, bottom), rates, from_zero=True).draw(
        runs, "Tokens per second", "steps"
    )
    if has_loss:
        _draw_losses(ink, (456, top, WIDTH - 8, bottom), runs)
    height = bottom + 26
    if any(run.stages for run in runs):
        height = _draw_stages(ink, runs, bottom + 40)
    return ink.svg(height + 4, "; ".join(map(str, runs)) or "no run yet")


def _draw_legend(ink, runs, y):
    """For each run its colour, name, rate, and times the first rate.

    Returns:
        Where it ends.
    """
    x = 0.0
    first_rate = runs[0].tokens_per_s if runs else 0
    for run in runs:
        name = shorten(run.name, 24)
        rate = number(run.tokens_per_s, "tok/s") if run.tokens_per_s else "starting"
        ratio = ""
        if run is not runs[0] and first_rate and run.tokens_per_s:
            ratio = f"{run.tokens_per_s / first_rate:.2f}× {shorten(runs[0].name, 16)}"
        name_width = text_width(name, 13) + 8
        rate_width = text_width(rate, 17) * 1.06 + 8
        width = 18 + name_width + rate_width + text_width(ratio, 12)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 26
        ink.dot(x + 6, y - 5, 5.5, run.colour)
        ink.text(x + 18, y, name, 13)
        ink.text(x + 18 + name_width, y, rate, 17, weight=650)
        ink.text(x + 18 + name_width + rate_width, y, ratio, 12, ink.soft)
        x += width + 26
    return y + 12


def _draw_losses(ink, box, runs):
    """The loss by tokens, and circles for the losses on text held out."""
    losses = [[(p.loss_tokens, p.loss) for p in run.points if _finite(p.loss)] for run in runs]
    held_out = [[(p.tokens, p.val_loss) for p in run.points if _finite(p.val_loss)] for run in runs]
    panel = _Panel(ink, box, losses, beside=itertools.chain(*held_out))
    panel.draw(runs, "Loss", "tokens")
    for run, points, circles in zip(runs, losses, held_out):
        for point in circles:
            ink.dot(*panel.place(*point), 3.6, "none", stroke=run.colour, stroke_width=1.8)
        if points and run.loss is not None and not math.isfinite(run.loss):
            x, _ = panel.place(*points[-1])
            anchor = "end" if x > (box[0] + box[2]) / 2 else "start"
            ink.text(x, box[1] + 10, "NaN from here", 11, run.colour, anchor, 600)
    if any(held_out):
        ink.text(box[2], box[1] - 14, "○ on text held out", 11, ink.soft, "end")


def _finite(value):
    return value is not None and math.isfinite(value)


class _Panel:
    """One chart.

    Args:
        box: left, top, right, bottom.
        lines: the points (x, y) of each.
        beside: points that its axes have to cover, too.
    """

    def __init__(self, ink, box, lines, from_zero=False, beside=()):
        self.ink = ink
        self.box = box
        self.lines = lines
        points = [*itertools.chain(*lines), *beside]
        values = [y for _, y in points] or [0.0, 1.0]
        self.ticks = nice_ticks(0.0 if from_zero else min(values), max(values))
        self.x_end = max((x for x, _ in points), default=0) or 1

    def place(self, x, y):
        """Where a value stands in the picture."""
        left, top, right, bottom = self.box
        low, high = self.ticks[0], self.ticks[-1]
        return (
            left + x / self.x_end * (right - left),
            bottom - (y - low) / (high - low) * (bottom - top),
        )

    def draw(self, runs, title, x_label):
        """The axes, and a line in the colour of each run."""
        ink = self.ink
        left, top, right, bottom = self.box
        ink.text(left - 38, top - 14, title, 12.5, weight=600)
        for tick in self.ticks:
            y = self.place(0, tick)[1]
            ink.line(left, y, right, y, opacity=0.9 if tick == self.ticks[0] else 0.45)
            words = f"{tick:.6g}" if abs(tick) < 1000 else axis_number(tick)
            ink.text(left - 8, y + 4, words, 11, ink.soft, "end")
        ink.text(left, bottom + 17, "0", 11, ink.soft)
        ink.text(right, bottom + 17, f"{number(self.x_end)} {x_label}", 11, ink.soft, "end")
        if not any(self.lines):
            middle = (left + right) / 2, (top + bottom) / 2
            ink.text(*middle, "waiting for the first step", 12, ink.soft, "middle")
        for run, points in zip(runs, self.lines):
            if points:
                places = [self.place(*point) for point in _thin(points)]
                ink.polyline(places, run.colour, 2.2)
                ink.dot(*places[-1], 3.4, run.colour)


def _draw_stages(ink, runs, top):
    """A stacked bar for each run, all on one scale of milliseconds.

    Returns:
        Where they end.
    """
    rows = [(run, _stages_and_gap(run)) for run in runs if run.stages]
    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    spare = itertools.cycle(SPARE_COLOURS)
    colours = {name: STAGE_COLOURS.get(name) or next(spare) for name in names}
    ink.text(0, top + 14, "Time of one step", 12.5, weight=600)
    x = WIDTH - sum(text_width(name, 11.5) + 32 for name in names) + 14
    for name in names:
        ink.rect(x, top + 5, 10, 10, colours[name], rx=2.5)
        ink.text(x + 15, top + 14, name, 11.5, ink.soft)
        x += text_width(name, 11.5) + 32
    # bold text is wider
    left = max(text_width(shorten(run.name, 18), 12) for run, _ in rows) * 1.15 + 16
    longest = max(sum(stages.values()) for _, stages in rows) or 1.0
    scale = (WIDTH - left - 70) / longest
    y = top + 28
    for run, stages in rows:
        ink.text(left - 12, y + 14.5, shorten(run.name, 18), 12, run.colour, "end", 600)
        x = left
        for name, ms in stages.items():
            width = ms * scale
            words = milliseconds(ms)
            title = f"{name}: {words}"
            ink.rect(x, y, max(width - 1.2, 0.4), 20, colours[name], rx=2, title=title)
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
    gap = run.last.step_ms - total
    if gap > 0.03 * total:
        stages["other"] = stages.get("other", 0.0) + gap
    return stages


def _thin(points, most=150):
    """At most `most` points: the means of equal stretches, and the last point."""
    size = max(len(points) / most, 1.0)
    stretches = [
        points[int(i * size) : int((i + 1) * size)] for i in range(int(len(points) / size))
    ]
    return [*(tuple(map(statistics.fmean, zip(*some))) for some in stretches), points[-1]]
