"""The picture of training runs: tokens per second, loss, gradient norms, and the stages of a step.

run = Run("arena", RUN_COLOURS[0])
run.add(reading)                     # a Reading of the meter after each step
picture([run])                       # inline SVG in the page's colours, light or dark
picture([run], themed=False)         # an image of its own, in colours that suit both
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
    spread,
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
# how much wider bold text is, at most
BOLD = 1.15
# points kept per run; beyond them every second one is dropped
KEEP = 2000
# letters of a name at the end of its line
NAME_AT_END = 16


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
        error: what ended it, or None.
    """

    def __init__(self, name, colour):
        self.name = name
        self.colour = colour
        self.last = None  # the newest Reading
        self.points = []
        self.norms = {}  # step -> (gradient norm before clipping, after it or None)
        self.stages = {}  # ms of each stage, smoothed over recent steps
        self.val_loss = None
        self.state = "running"
        self.error = None
        self._count = 0
        self._halvings = 0

    def add(self, reading):
        """Add the reading of one more step."""
        self.last = reading
        if reading.val_loss is not None:
            self.val_loss = reading.val_loss
        self._count += 1
        if self._count % (1 << self._halvings) == 0 or reading.val_loss is not None:
            delay = reading.step - (reading.loss_step or reading.step)
            self.points.append(
                Point(
                    reading.step,
                    reading.tokens,
                    reading.tokens_per_s,
                    reading.loss,
                    reading.val_loss,
                    reading.tokens * (1 - delay / max(self._count, delay, 1)),
                )
            )
        if len(self.points) > KEEP:
            self.points = [
                p for i, p in enumerate(self.points) if i % 2 == 0 or p.val_loss is not None
            ]
            self._halvings += 1
        for steps_ago, before, after in reading.norms:
            self.norms[reading.step - steps_ago] = (before, after)
        if len(self.norms) > KEEP:
            self.norms = _thin_norms(self.norms)
        for name in {**self.stages, **reading.stages}:
            ms = reading.stages.get(name, 0.0)
            previous = self.stages.get(name, ms)
            self.stages[name] = ms if name not in self.stages else 0.8 * previous + 0.2 * ms

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


def picture(runs, peak=None, themed=True, title="", norms=False) -> str:
    """The runs as SVG.

    Args:
        peak: tokens per second of a limit, a dashed line, or None.
        themed: in the page's colours (to be put into a page), else in colours that suit light and
            dark.
        norms: a panel for the gradient's norm, before and after clipping.
    """
    ink = Ink(themed)
    if title:
        ink.text(0, 18, title, 15, weight=600)
    top = _draw_legend(ink, runs, 48.0 if title else 20.0) + 30
    bottom = top + 160
    has_loss = not runs or any(p.loss is not None for run in runs for p in run.points)
    # The names at the ends of the lines are bold.
    widest = max((text_width(shorten(run.name, NAME_AT_END), 11.5) for run in runs), default=0)
    margin = max(74, widest * BOLD + 12) if len(runs) > 1 else 8
    middle = 416 if has_loss else WIDTH + 30
    _draw_rates(ink, (40, top, middle - 34 - margin, bottom), runs, peak)
    if has_loss:
        _draw_losses(ink, (middle + 40, top, WIDTH - margin, bottom), runs)
    if norms:
        _draw_norms(ink, (40, bottom + 62, WIDTH - margin, bottom + 162), runs)
        bottom += 168
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
        if ratio:
            ink.text(x + 18 + name_width + rate_width, y, ratio, 12, ink.soft)
        x += width + 26
    return y + 12


def _draw_rates(ink, box, runs, peak):
    """Tokens per second by step."""
    lines = [
        (run, [(p.step, p.tokens_per_s) for p in run.points if p.tokens_per_s > 0], [])
        for run in runs
    ]
    highest = max((y for _, points, _ in lines for _, y in points), default=1.0)
    reference = (peak, f"limit {number(peak, 'tok/s')}") if peak else None
    panel = _Panel(ink, box, lines, 0.0, max(highest, peak or 0) * 1.04)
    panel.axes("Tokens per second", "steps", reference)
    panel.lines(runs)


def _draw_losses(ink, box, runs):
    """The loss by tokens, smoothed, and the losses on text held out."""
    lines = []
    values = []
    for run in runs:
        points = [(p.loss_tokens, p.loss) for p in run.points if _finite(p.loss)]
        lines.append((run, _smooth(points), points if len(runs) == 1 else []))
        values += [y for _, y in points]
    held_out = [
        (run, p.tokens, p.val_loss) for run in runs for p in run.points if _finite(p.val_loss)
    ]
    values += [y for _, _, y in held_out]
    losses_end = [p.loss_tokens for run in runs for p in run.points if p.loss is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    panel = _Panel(ink, box, lines, low, high, x_end=max(losses_end, default=0))
    panel.axes("Loss", "tokens")
    broken = [run for run in runs if run.loss is not None and not math.isfinite(run.loss)]
    panel.lines(runs, broken, held_out)
    if held_out:
        _, top, right, _ = box
        ink.text(right, top - 14, "○ on text held out", 11, ink.soft, "end")


def _finite(value):
    return value is not None and math.isfinite(value)


class _Panel:
    """One chart.

    Args:
        box: left, top, right, bottom. series: (run, points (x, y), faint points) for each line.
        low, high: what the y axis covers at least. x_end: where the x axis ends at least.
    """

    def __init__(self, ink, box, series, low, high, x_end=0):
        self.ink = ink
        self.box = box
        self.series = series
        self.ticks = nice_ticks(low, high)
        x_max = max([x for _, points, _ in series for x, _ in points] + [x_end]) or 1
        self.x_range = (0 if x_max > 1 else x_max - 1, x_max)

    def place(self, x, y):
        """Where a value stands in the picture."""
        left, top, right, bottom = self.box
        x_min, x_max = self.x_range
        low, high = self.ticks[0], self.ticks[-1]
        across = (x - x_min) / (x_max - x_min)
        up = (min(max(y, low), high) - low) / (high - low)
        return left + across * (right - left), bottom - up * (bottom - top)

    def axes(self, title, x_label, reference=None):
        """The axes. reference: (y, words) of a dashed line."""
        ink = self.ink
        left, top, right, bottom = self.box
        x_min, x_max = self.x_range
        ink.text(left - 38, top - 14, title, 12.5, weight=600)
        step = self.ticks[1] - self.ticks[0]
        decimals = max(0, -math.floor(math.log10(step)))
        # A step of 0.25 needs one more than 0.2.
        decimals += abs(round(step, decimals) - step) > 1e-6 * step
        for tick in self.ticks:
            y = self.place(0, tick)[1]
            ink.line(left, y, right, y, opacity=0.9 if tick == self.ticks[0] else 0.45)
            words = axis_number(tick) if step >= 1 else f"{tick:.{decimals}f}"
            ink.text(left - 8, y + 4, words, 11, ink.soft, "end")
        ink.text(left, bottom + 17, "0" if x_min == 0 else "", 11, ink.soft)
        ink.text(right, bottom + 17, f"{number(x_max)} {x_label}", 11, ink.soft, "end")
        if reference:
            y = self.place(0, reference[0])[1]
            ink.line(left, y, right, y, 1.2, "4 4")
            ink.text(right, y - 5, reference[1], 11, ink.soft, "end")
        if not any(points for _, points, _ in self.series):
            x, y = (left + right) / 2, (top + bottom) / 2
            ink.text(x, y, "waiting for the first step", 12, ink.soft, "middle")

    def lines(self, runs, broken=(), dots=()):
        """The lines, each with its run's name where there are several.

        Args:
            broken: runs whose loss is not a number where their line ends. dots: (run, x, y).
        """
        ink = self.ink
        _, top, right, bottom = self.box
        ends = []
        for run, points, faint in self.series:
            for some, width, opacity in ((faint, 1, 0.28), (points, 2.2, 1)):
                if len(some) > 1:
                    places = [self.place(*p) for p in _thin(some)]
                    ink.polyline(places, run.colour, width, opacity, stroke_linecap="round")
            if not points:
                continue
            x, y = self.place(*points[-1])
            ink.dot(x, y, 3.4, run.colour)
            if run in broken:
                ink.segment(x, top, x, y, run.colour, 1.2, dash="3 3")
                # left of the line where there is no room behind it
                before = x + 6 + text_width("NaN from here", 11) > right
                anchor, shift = ("end", -6) if before else ("start", 6)
                ink.text(x + shift, top + 10, "NaN from here", 11, run.colour, anchor, 600)
            elif x > right - 6:
                # only a line that reaches the margin has its name there
                ends.append((run, x, y))
        for run, x, y in dots:
            x, y = self.place(x, y)
            ink.dot(x, y, 3.6, "none", stroke=run.colour, stroke_width=1.8)
        if len(runs) > 1:
            heights = spread([y for _, _, y in ends], 14, top + 2, bottom - 2)
            for (run, x, _), y in zip(ends, heights):
                ink.text(x + 8, y + 4, shorten(run.name, NAME_AT_END), 11.5, run.colour, weight=600)


def _draw_norms(ink, box, runs):
    """Norms by step, logarithmic: thin before clipping, thick after it, × if not finite."""
    left, top, right, bottom = box
    ink.text(left - 38, top - 14, "Gradient norm", 12.5, weight=600)
    norms = [norm for run in runs for pair in run.norms.values() for norm in pair]
    norms = [norm for norm in norms if _finite(norm) and norm > 0]
    steps = [step for run in runs for step in run.norms]
    if not norms:
        x, y = (left + right) / 2, (top + bottom) / 2
        ink.text(x, y, "waiting for the first norm", 12, ink.soft, "middle")
        return
    first, last = min(steps), max(max(steps), min(steps) + 1)
    marks, low, high = _norm_axis(min(norms), max(norms))

    def place(step, norm):
        across = (step - first) / (last - first)
        up = (math.log(norm) - math.log(low)) / (math.log(high) - math.log(low) or 1.0)
        up = min(max(up, 0.0), 1.0)
        return left + across * (right - left), bottom - up * (bottom - top)

    for mark in marks:
        if low * 0.999 <= mark <= high * 1.001:
            y = place(first, mark)[1]
            ink.line(left, y, right, y, opacity=0.9 if mark == low else 0.45)
            words = f"{mark:g}" if mark < 1e3 else axis_number(mark)
            ink.text(left - 8, y + 4, words, 11, ink.soft, "end")
    ink.text(left, bottom + 17, first, 11, ink.soft)
    ink.text(right, bottom + 17, f"{number(last)} steps", 11, ink.soft, "end")
    has_crosses = False
    for i, run in enumerate(runs):
        for which, width, opacity in ((0, 1.2, 0.75), (1, 2.4, 1.0)):
            for piece in _finite_pieces(run.norms, which):
                places = [place(step, norm) for step, norm in piece]
                if len(places) > 1:
                    ink.polyline(places, run.colour, width, opacity, stroke_linecap="round")
                else:
                    ink.dot(*places[0], width, run.colour, opacity=opacity)
        broken = sorted(
            step for step, (before, _) in run.norms.items() if not math.isfinite(before)
        )
        if broken:
            has_crosses = True
            # at most some 60 of them, the first and the last always
            some = broken[:: len(broken) // 60 + 1]
            if some[-1] != broken[-1]:
                some.append(broken[-1])
            y = top + 2 + i % 4 * 11
            path = "".join(f"M{place(step, high)[0] - 3.5:.1f} {y}l7 7m0-7l-7 7" for step in some)
            ink.path(path, stroke=run.colour, stroke_width=2, stroke_linecap="round")
    x = right
    if has_crosses:
        ink.text(x, top - 14, "× not finite", 11, ink.soft, "end")
        x -= text_width("× not finite", 11) * 0.88 + 16
    for words in ("thick after", "thin before clipping,"):
        ink.text(x, top - 14, words, 11, ink.soft, "end")
        x -= text_width(words, 11) * 0.88 + 4


def _norm_axis(low, high):
    """(marks at 1, 2 and 5 times powers of ten, the axis' lower end, its upper end)."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    if high > 30 * low:
        tens = marks[::3]
        marks = tens[:: max(1, len([m for m in tens if low < m < high]) // 4)]
    low = max([m for m in marks if m <= low * 1.001] or [low])
    high = min([m for m in marks if m >= high * 0.999] or [high])
    return marks, low, high


def _finite_pieces(norms, which):
    """Stretches of (step, norm) in which the norm is finite.

    Args:
        which: 0 for the norm before clipping, 1 after it.
    """
    pieces = [[]]
    for step in sorted(norms):
        norm = norms[step][which]
        if _finite(norm) and norm > 0:
            pieces[-1].append((step, norm))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _draw_stages(ink, runs, top):
    """A stacked bar for each run, all on one scale of milliseconds.

    Returns:
        Where they end.
    """
    rows = [(run, _stages_and_gap(run)) for run in runs if run.stages]
    if not rows:
        return top
    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    spare = itertools.cycle(SPARE_COLOURS)
    colours = {name: STAGE_COLOURS.get(name) or next(spare) for name in names}
    ink.text(0, top + 14, "Time of one step", 12.5, weight=600)
    x = WIDTH - sum(text_width(name, 11.5) + 32 for name in names) + 14
    for name in names:
        ink.rect(x, top + 5, 10, 10, colours[name], rx=2.5)
        ink.text(x + 15, top + 14, name, 11.5, ink.soft)
        x += text_width(name, 11.5) + 32
    left = max(text_width(shorten(run.name, 18), 12) for run, _ in rows) * BOLD + 16
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
    gap = (run.last.step_ms if run.last else 0) - total
    if gap > 0.03 * total:
        stages["other"] = stages.get("other", 0.0) + gap
    return stages


def _thin(points, most=150):
    """At most `most` points: the means of equal stretches, and the last point."""
    if len(points) <= most:
        return points
    size = len(points) / most
    means = []
    for i in range(most - 1):
        some = points[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))]
        means.append((sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)))
    return means + [points[-1]]


def _thin_norms(norms):
    """Of every two steps the one with the larger norm, so that no spike is lost.

    NaN and infinity count as largest."""

    def size(step):
        return norms[step][0] if math.isfinite(norms[step][0]) else math.inf

    steps = sorted(norms)
    kept = [max(pair, key=size) for pair in zip(steps[::2], steps[1::2])]
    return {step: norms[step] for step in [*kept, steps[-1]]}


def _smooth(points):
    """The mean over a twentieth of the points around each, so that it neither lags nor leads."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    reach, last = len(points) // 40, len(points) - 1
    smoothed = []
    for i, (x, _) in enumerate(points):
        k = min(reach, i, last - i)
        smoothed.append((x, (sums[i + k + 1] - sums[i - k]) / (2 * k + 1)))
    return smoothed
