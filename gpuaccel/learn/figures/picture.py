"""The picture of one or several runs: tokens per second, loss, gradient norms, and the time of one step, as SVG.

run = Run("arena", RUN_COLOURS[0])
run.add(reading)                     # a meter.Reading after each step
picture([run])                       # inline SVG in the page's colours, light or dark
picture([run], themed=False)         # an image of its own, in colours that suit both
"""

from __future__ import annotations

import math
import statistics
from html import escape

# Colours that stay apart for colour-blind eyes (after Okabe and Ito) and are readable on white and on black.
RUN_COLOURS = (
    "#2f86d1",
    "#e08214",
    "#1b9e77",
    "#c5629f",
    "#d95f3b",
    "#8a7fd0",
    "#a08a2c",
    "#5aa9c9",
)
STAGE_COLOURS = {
    "data": "#b3a57a",
    "forward": "#7fb3dd",
    "backward": "#4a7fb8",
    "accumulate": "#e9a13b",
    "clip": "#b58fc9",
    "optimizer": "#5bab8c",
    "other": "#8d949e",
}
SPARE_COLOURS = ("#c98b8b", "#8fb06c", "#9c9cc9", "#c7a86b")
WIDTH = 800
KEEP = 2000  # points kept per run: every second one is dropped beyond


def number(value, unit="") -> str:
    """Three digits that count, and a unit: 12.3K tok/s, 1.24M, 987."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale * 0.9995:
            value, suffix = value / scale, letter
            break
    else:
        suffix = ""
    whole = abs(value) >= 99.95 or (not suffix and value == int(value))
    text = f"{value:.{0 if whole else 1 if abs(value) >= 9.995 else 2}f}"
    return f"{text}{suffix}{' ' + unit if unit else ''}"


def microseconds(us: float) -> str:
    """A time in words: "41 µs", above a millisecond "3.2 ms"."""
    return f"{us:.0f} µs" if us < 950 else milliseconds(us / 1e3)


def milliseconds(ms) -> str:
    """A duration in words: 0.41 ms, 12.4 ms, 141 ms, 1.2 s."""
    if ms >= 999.5:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:.0f} ms" if ms >= 99.5 else f"{ms:.1f} ms" if ms >= 0.95 else f"{ms:.2f} ms"


def gigabytes(count) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


class Run:
    """One line in the picture. `readings` is the last Reading; `tokens_per_s` is the median over the second half of
    the run."""

    def __init__(self, name, colour):
        self.name, self.colour = name, colour
        self.last = None  # the newest meter.Reading
        self.points = []  # (step, tokens, tokens/s, loss or None, val_loss or None, tokens at that loss)
        self.norms = {}  # step -> (gradient norm before clipping, after it or None)
        self.stages = {}  # ms by stage, smoothed over recent steps
        self.val_loss = None
        self.state = "running"  # running | done | stopped | failed
        self.error = None
        self._every = self._count = 0

    def add(self, reading):
        self.last = reading
        if reading.val_loss is not None:
            self.val_loss = reading.val_loss
        self._count += 1
        late = reading.step - (
            reading.loss_step or reading.step
        )  # on a GPU the loss is that many steps old
        seen_at = reading.tokens * (1 - late / max(self._count, late, 1))
        if self._count % (1 << self._every) == 0 or reading.val_loss is not None:
            self.points.append(
                (
                    reading.step,
                    reading.tokens,
                    reading.tokens_per_s,
                    reading.loss,
                    reading.val_loss,
                    seen_at,
                )
            )
        if len(self.points) > KEEP:
            self.points = [p for i, p in enumerate(self.points) if i % 2 == 0 or p[4] is not None]
            self._every += 1
        self.norms.update(
            (reading.step - ago, (before, after)) for ago, before, after in reading.norms
        )
        if len(self.norms) > KEEP:
            self.norms = _thin_norms(self.norms)
        for name in {**self.stages, **reading.stages}:
            now = reading.stages.get(name, 0.0)
            self.stages[name] = (
                now if name not in self.stages else 0.8 * self.stages[name] + 0.2 * now
            )

    @property
    def tokens_per_s(self) -> float:
        rates = [p[2] for p in self.points if p[2] > 0]
        if self.state == "running" and self.last is not None:
            return self.last.tokens_per_s
        return statistics.median(rates[len(rates) // 2 :]) if rates else 0.0

    @property
    def loss(self):
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
        return f"{self.name}: {', '.join(parts)} after {self.last.step} steps ({self.last.seconds:.1f} s){ending}"

    __repr__ = __str__


class _Ink:
    """Text and lines in the theme's colours (inline in a page), or in mid-tones that are readable on white and on
    black (a picture of its own)."""

    def __init__(self, themed):
        self.themed, self.out = themed, []
        self.strong = "var(--jp-ui-font-color1, currentColor)" if themed else "#7d838c"
        self.soft = "var(--jp-ui-font-color2, currentColor)" if themed else "#868c95"
        self.hair = (
            "var(--jp-border-color2, rgba(128,128,128,.3))" if themed else "rgb(140,146,155)"
        )
        self.font = (
            "var(--jp-ui-font-family, system-ui, sans-serif)"
            if themed
            else "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
        )

    def paint(self, **colours):
        if self.themed:
            return 'style="' + ";".join(f"{k}:{v}" for k, v in colours.items()) + '"'
        return " ".join(f'{k}="{v}"' for k, v in colours.items())

    def text(self, x, y, words, size=12, colour=None, anchor="start", weight=400):
        self.out.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" {self.paint(fill=colour or self.strong)}>{escape(str(words))}</text>'
        )

    def line(self, x1, y1, x2, y2, width=1.0, dash="", opacity=1.0):
        dashes = f'stroke-dasharray="{dash}"' if dash else ""
        opacity = opacity if self.themed else 0.6 * opacity
        self.out.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="{width}" '
            f'opacity="{opacity:.2f}" {self.paint(stroke=self.hair)} {dashes}/>'
        )

    def dot(self, x, y, radius, look):
        self.out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {look}/>')

    def svg(self, height, label):
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img" aria-label="{escape(label, quote=True)}" '
            'style="max-width:100%;height:auto;font-variant-numeric:tabular-nums" '
            f'font-family="{escape(self.font)}">' + "".join(self.out) + "</svg>"
        )


def _text_width(words, size=12):
    return sum(0.3 if c in "il.,:'| " else 0.92 if c in "mwMW" else 0.63 for c in str(words)) * size


def _nice_ticks(low, high, count=4):
    """Round values that cover [low, high]: 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _thin(points, most=150):
    """At most `most` points: the mean of equal stretches."""
    if len(points) <= most:
        return points
    size = len(points) / most
    chunks = [
        points[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(most)
    ]
    return [(sum(p[0] for p in c) / len(c), sum(p[1] for p in c) / len(c)) for c in chunks[:-1]] + [
        points[-1]
    ]


def _thin_norms(norms):
    """Of every two steps the one with the larger norm: a spike is never lost. NaN and infinity count as largest."""

    def size(step):
        return norms[step][0] if math.isfinite(norms[step][0]) else math.inf

    steps = sorted(norms)
    return {
        step: norms[step] for step in (max(pair, key=size) for pair in zip(steps[::2], steps[1::2]))
    } | {steps[-1]: norms[steps[-1]]}


def _smooth(points):
    """The mean over a stretch of a twentieth of the points, centred, so that it neither lags nor leads."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    reach, last, out = len(points) // 40, len(points) - 1, []
    for i, (x, _) in enumerate(points):
        k = min(reach, i, last - i)
        out.append((x, (sums[i + k + 1] - sums[i - k]) / (2 * k + 1)))
    return out


def _spread(wanted, gap, low, high):
    """Label positions near the wanted ones, at least `gap` apart, inside [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    y = low - gap
    for i in order:
        y = placed[i] = max(wanted[i], y + gap)
    over = max(0.0, y - high)
    ceiling = high + gap
    for i in reversed(order):
        placed[i] = ceiling = min(placed[i] - (over if placed[i] > high else 0), ceiling - gap)
    return placed


def _panel(
    ink,
    box,
    title,
    x_label,
    lines,
    low,
    high,
    show_low,
    labels,
    dots=(),
    reference=None,
    broken=(),
    reach=0,
):
    """One chart. lines: [(run, [(x, y)], faint [(x, y)])]; dots: [(run, x, y)]; reference: (y, words) for a dashed
    line; broken: runs that have no number any more where their line ends; reach: where the x axis ends at least."""
    left, top, right, bottom = box
    ink.text(left - 38, top - 14, title, 12.5, weight=600)
    everything = [p for _, points, _ in lines for p in points]
    ticks = _nice_ticks(low, high)
    low, high = (ticks[0] if show_low else low), ticks[-1]
    x_max = max([p[0] for p in everything] + [reach]) or 1
    x_min = 0 if x_max > 1 else x_max - 1

    def at(x, y):
        y = min(max(y, low), high)
        return left + (x - x_min) / (x_max - x_min) * (right - left), bottom - (y - low) / (
            high - low
        ) * (bottom - top)

    for tick in ticks:
        if tick < low - 1e-12:
            continue
        y = at(0, tick)[1]
        ink.line(left, y, right, y, opacity=0.9 if tick == ticks[0] else 0.45)
        step = ticks[1] - ticks[0]
        decimals = max(0, -math.floor(math.log10(step)))
        words = (
            number(tick).replace(".00", "").replace(".0", "")
            if step >= 1
            else f"{tick:.{decimals}f}"
        )
        ink.text(left - 8, y + 4, words, 11, ink.soft, "end")
    ink.text(left, bottom + 17, "0" if x_min == 0 else "", 11, ink.soft)
    ink.text(right, bottom + 17, f"{number(x_max)} {x_label}", 11, ink.soft, "end")
    if reference:
        y = at(0, reference[0])[1]
        ink.line(left, y, right, y, 1.2, "4 4")
        ink.text(right, y - 5, reference[1], 11, ink.soft, "end")
    if not everything:
        ink.text(
            (left + right) / 2,
            (top + bottom) / 2,
            "waiting for the first step",
            12,
            ink.soft,
            "middle",
        )
    ends = []
    for run, points, faint in lines:
        for some, width, opacity in ((faint, 1, 0.28), (points, 2.2, 1)):
            if len(some) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in _thin(some)))
                ink.out.append(
                    f'<polyline points="{path}" fill="none" stroke="{run.colour}" stroke-width="{width}" '
                    f'stroke-linejoin="round" stroke-linecap="round" opacity="{opacity}"/>'
                )
        if points:
            x, y = at(*points[-1])
            ink.dot(x, y, 3.4, f'fill="{run.colour}"')
            if run in broken:
                ink.out.append(
                    f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="{run.colour}" stroke-width="1.2" '
                    'stroke-dasharray="3 3"/>'
                )
                before = x + 6 + _text_width("NaN from here", 11) > right  # no room behind the line
                ink.text(
                    x - 6 if before else x + 6,
                    top + 10,
                    "NaN from here",
                    11,
                    run.colour,
                    "end" if before else "start",
                    600,
                )
            elif x > right - 6:  # a label in the margin belongs to a line that reaches it
                ends.append((run, x, y))
    for run, x, y in dots:
        x, y = at(x, y)
        ink.dot(x, y, 3.6, f'fill="none" stroke="{run.colour}" stroke-width="1.8"')
    if labels:
        for (run, x, _), y in zip(ends, _spread([y for _, _, y in ends], 14, top + 2, bottom - 2)):
            ink.text(x + 8, y + 4, _short(run.name, 11), 11.5, run.colour, weight=600)


def norm_words(before, after) -> str:
    """A gradient's norm before and after clipping: 3.2 → 1.0; one number where they are the same."""

    def digits(x):
        return (
            "NaN"
            if math.isnan(x)
            else "∞"
            if math.isinf(x)
            else f"{x:.2g}"
            if x < 100
            else number(x).replace(".0", "")
        )

    return (
        digits(before)
        if after is None or digits(after) == digits(before)
        else f"{digits(before)} → {digits(after)}"
    )


def _norm_panel(ink, box, runs):
    """Norms by step, logarithmic: thin before clipping, thick after it; a cross where one was not finite."""
    left, top, right, bottom = box
    ink.text(left - 38, top - 14, "Gradient norm", 12.5, weight=600)
    finite = [
        n
        for run in runs
        for pair in run.norms.values()
        for n in pair
        if n is not None and math.isfinite(n) and n > 0
    ]
    steps = [step for run in runs for step in run.norms]
    if not finite:
        ink.text(
            (left + right) / 2,
            (top + bottom) / 2,
            "waiting for the first norm",
            12,
            ink.soft,
            "middle",
        )
        return
    low, high, first, last = min(finite), max(finite), min(steps), max(max(steps), min(steps) + 1)
    marks = [
        m * 10.0**p
        for p in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        for m in (1, 2, 5)
    ]
    if high > 30 * low:
        powers = marks[::3]
        marks = powers[:: max(1, len([m for m in powers if low < m < high]) // 4)]
    low = max([m for m in marks if m <= low * 1.001] or [low])
    high = min([m for m in marks if m >= high * 0.999] or [high])

    def at(step, norm):
        share = (math.log(norm) - math.log(low)) / (math.log(high) - math.log(low) or 1.0)
        return left + (step - first) / (last - first) * (right - left), bottom - min(
            max(share, 0.0), 1.0
        ) * (bottom - top)

    for mark in marks:
        if low * 0.999 <= mark <= high * 1.001:
            y = at(first, mark)[1]
            ink.line(left, y, right, y, opacity=0.9 if mark == low else 0.45)
            ink.text(
                left - 8,
                y + 4,
                f"{mark:g}" if mark < 1e3 else number(mark).replace(".00", "").replace(".0", ""),
                11,
                ink.soft,
                "end",
            )
    ink.text(left, bottom + 17, first, 11, ink.soft)
    ink.text(right, bottom + 17, f"{number(last)} steps", 11, ink.soft, "end")
    odd, x = False, right
    for nth, run in enumerate(runs):
        for which, width, opacity in ((0, 1.2, 0.75), (1, 2.4, 1.0)):
            pieces, piece = [], []
            for step in sorted(
                run.norms
            ):  # a line ends where a norm is not finite, and begins again after it
                norm = run.norms[step][which]
                if norm is not None and math.isfinite(norm) and norm > 0:
                    piece.append(at(step, norm))
                elif piece:
                    pieces, piece = pieces + [piece], []
            for piece in [*pieces, piece]:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
                if len(piece) > 1:
                    ink.out.append(
                        f'<polyline points="{path}" fill="none" stroke="{run.colour}" stroke-width="{width}" '
                        f'stroke-linejoin="round" stroke-linecap="round" opacity="{opacity}"/>'
                    )
                elif piece:
                    ink.dot(*piece[0], width, f'fill="{run.colour}" opacity="{opacity}"')
        crosses = [
            at(step, high)[0]
            for step, (before, _) in run.norms.items()
            if not math.isfinite(before)
        ]
        shown = [
            x
            for i, x in enumerate(sorted(crosses))
            if i == 0 or i == len(crosses) - 1 or i % (len(crosses) // 60 + 1) == 0
        ]
        crossed = "".join(f"M{x - 3.5:.1f} {top + 2 + nth % 4 * 11}l7 7m0-7l-7 7" for x in shown)
        if shown:
            odd = True
            ink.out.append(
                f'<path d="{crossed}" stroke="{run.colour}" stroke-width="2" stroke-linecap="round" fill="none"/>'
            )
    for words in (["× not finite"] if odd else []) + ["thick after", "thin before clipping,"]:
        ink.text(x, top - 14, words, 11, ink.soft, "end")
        x -= _text_width(words, 11) * 0.88 + (16 if words[0] == "×" else 4)


def _short(name, most):
    return name if len(name) <= most else name[: most - 1] + "…"


def _legend(ink, runs, y):
    """One entry for each run: colour, name, rate, and how many times the first run's rate. Returns the height used."""
    x = 0.0
    first = runs[0].tokens_per_s if runs else 0
    for run in runs:
        rate = number(run.tokens_per_s, "tok/s") if run.tokens_per_s else "starting"
        ratio = ""
        if run is not runs[0] and first and run.tokens_per_s:
            ratio = f"{run.tokens_per_s / first:.2f}× {_short(runs[0].name, 16)}"
        name = _short(run.name, 24)
        widths = (
            _text_width(name, 13) + 8,
            _text_width(rate, 17) * 1.06 + 8,
            _text_width(ratio, 12),
        )
        if x and x + 18 + sum(widths) > WIDTH:
            x, y = 0.0, y + 26
        ink.dot(x + 6, y - 5, 5.5, f'fill="{run.colour}"')
        ink.text(x + 18, y, name, 13)
        ink.text(x + 18 + widths[0], y, rate, 17, weight=650)
        if ratio:
            ink.text(x + 18 + widths[0] + widths[1], y, ratio, 12, ink.soft)
        x += 18 + sum(widths) + 26
    return y + 12


def _stage_bars(ink, runs, top):
    """Stacked bars, one for each run, all on the same scale of milliseconds. Returns the height used."""
    rows = [(run, _with_gap(run)) for run in runs if run.stages]
    if not rows:
        return top
    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    spare = iter(SPARE_COLOURS * 4)
    colours = {name: STAGE_COLOURS.get(name) or next(spare) for name in names}
    ink.text(0, top + 14, "Time of one step", 12.5, weight=600)
    x = WIDTH - sum(_text_width(n, 11.5) + 32 for n in names) + 14
    for name in names:
        ink.out.append(
            f'<rect x="{x:.1f}" y="{top + 5:.1f}" width="10" height="10" rx="2.5" fill="{colours[name]}"/>'
        )
        ink.text(x + 15, top + 14, name, 11.5, ink.soft)
        x += _text_width(name, 11.5) + 32
    left = min(150.0, max(_text_width(_short(run.name, 18), 12) for run, _ in rows) + 16)
    longest = max(sum(stages.values()) for _, stages in rows) or 1.0
    scale = (WIDTH - left - 70) / longest
    y = top + 28
    for run, stages in rows:
        ink.text(left - 12, y + 14.5, _short(run.name, 18), 12, run.colour, "end", 600)
        x = left
        for name, ms in stages.items():
            width = ms * scale
            ink.out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 1.2, 0.4):.1f}" height="20" rx="2" '
                f'fill="{colours[name]}"><title>{escape(name)}: {milliseconds(ms)}</title></rect>'
            )
            if width > _text_width(milliseconds(ms), 11) + 12:
                ink.text(x + width / 2, y + 14.2, milliseconds(ms), 11, "#14181d", "middle")
            x += width
        ink.text(x + 8, y + 14.5, milliseconds(sum(stages.values())), 12, ink.strong, weight=600)
        y += 27
    return y


def _with_gap(run):
    """The stages, and `other` for what the step's time holds beyond them, where it is more than 3 percent."""
    stages, total = dict(run.stages), sum(run.stages.values())
    gap = (run.last.step_ms if run.last else 0) - total
    if gap > 0.03 * total:
        stages["other"] = gap
    return stages


def picture(runs, peak=None, themed=True, title="", norms=False) -> str:
    """The runs as SVG. themed: in the page's colours (to be put into a page); otherwise in colours that suit light
    and dark (an image). norms: a panel for the gradient's norm, before and after clipping."""
    ink = _Ink(themed)
    if title:
        ink.text(0, 18, title, 15, weight=600)
    top = _legend(ink, runs, 48.0 if title else 20.0) + 30
    bottom = top + 160
    has_loss = not runs or any(p[3] is not None for run in runs for p in run.points)
    labels = len(runs) > 1
    margin = 74 if labels else 8
    middle = 416 if has_loss else WIDTH + 30
    rates = [(run, [(p[0], p[2]) for p in run.points if p[2] > 0], []) for run in runs]
    top_rate = max((y for _, points, _ in rates for _, y in points), default=1.0)
    reference = (peak, f"limit {number(peak, 'tok/s')}") if peak else None
    _panel(
        ink,
        (40, top, middle - 34 - margin, bottom),
        "Tokens per second",
        "steps",
        rates,
        0.0,
        max(top_rate, peak or 0) * 1.04,
        True,
        labels,
        reference=reference,
    )
    if has_loss:
        raw = [
            (run, [(p[5], p[3]) for p in run.points if p[3] is not None and math.isfinite(p[3])])
            for run in runs
        ]
        losses = [(run, _smooth(points), points if len(runs) == 1 else []) for run, points in raw]
        dots = [
            (run, p[1], p[4])
            for run in runs
            for p in run.points
            if p[4] is not None and math.isfinite(p[4])
        ]
        values = sorted([y for _, points in raw for _, y in points] + [d[2] for d in dots])
        low, high = (values[0], values[-1]) if values else (0.0, 1.0)
        _panel(
            ink,
            (middle + 40, top, WIDTH - margin, bottom),
            "Loss",
            "tokens",
            losses,
            low,
            high,
            True,
            labels,
            dots,
            broken=[run for run in runs if run.loss is not None and not math.isfinite(run.loss)],
            reach=max((p[5] for run in runs for p in run.points if p[3] is not None), default=0),
        )
        if dots:
            ink.text(WIDTH - margin, top - 14, "○ on text held out", 11, ink.soft, "end")
    if norms:
        _norm_panel(ink, (40, bottom + 62, WIDTH - margin, bottom + 162), runs)
        bottom += 168
    height = _stage_bars(ink, runs, bottom + 40) if any(run.stages for run in runs) else bottom + 26
    return ink.svg(height + 4, "; ".join(map(str, runs)) or "no run yet")


def _time_axis(ink, longest, left, right, y):
    """From 0 to `longest` microseconds, in ms, between two places; what stands above it ends at y - 10."""
    ink.line(left, y - 10, right, y - 10)
    for t in _nice_ticks(0.0, longest / 1e3, 5):
        if t * 1e3 <= longest:
            x = left + t * 1e3 / longest * (right - left)
            ink.line(x, y - 10, x, y - 5)
            ink.text(
                x,
                y + 8,
                f"{t:g} ms" if t else "0",
                11,
                ink.soft,
                "start" if not t else "end" if x > right - 20 else "middle",
            )
