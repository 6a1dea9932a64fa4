"""Charts of measured values: curves on logarithmic axes, bars, gradient norms.

figures.curves({"fp32": [(1, 1e-8), (4, 2e-8)]}, "Error", "micro-batches", "relative error")
figures.norms({"block 0": (3.2, 1.0)}, 1.0)     # before and after clipping
"""

import itertools
import math

from .drawing import (
    RED,
    RUN_COLOURS,
    WIDTH,
    Figure,
    Ink,
    norm_words,
    power_of_ten,
    spread,
    text_width,
)


def curves(
    lines: "dict[str, list[tuple[float, float]]]", title: str, x_label: str, y_label: str
) -> Figure:
    """Lines of (x, y) on logarithmic axes; points of 0 are left out."""
    ink = Ink()
    points = [(x, y) for line in lines.values() for x, y in line if x > 0 and y > 0]
    if not points:
        ink.text(0, 20, f"{title}: nothing to draw, every value is 0", 12)
        return Figure(ink, 30, f"{title}: every value is 0")
    # the axes, in powers of ten
    x0 = math.log10(min(x for x, _ in points))
    x1 = max(math.log10(max(x for x, _ in points)), x0 + 0.1)
    y0 = math.floor(math.log10(min(y for _, y in points)))
    y1 = max(math.ceil(math.log10(max(y for _, y in points))), y0 + 1)
    left, top, right, bottom = 56, 46, WIDTH - 150, 226

    def place(x, y):
        across = (math.log10(x) - x0) / (x1 - x0)
        up = (math.log10(y) - y0) / (y1 - y0)
        return left + across * (right - left), bottom - up * (bottom - top)

    ink.text(0, 16, title, 13, weight=600)
    ink.text(0, 34, y_label, 11.5, ink.soft)
    for power in range(y0, y1 + 1, max(1, (y1 - y0) // 5)):
        y = place(10**x0, 10.0**power)[1]
        ink.line(left, y, right, y, opacity=0.5)
        ink.text(left - 8, y + 4, power_of_ten(power), 11, ink.soft, "end")
    all_x = sorted({x for x, _ in points})
    for x in all_x[:: max(1, len(all_x) // 9)]:
        ink.text(place(x, 10.0**y0)[0], bottom + 17, f"{x:g}", 11, ink.soft, "middle")
    ink.text(right + 24, bottom + 17, x_label, 11.5, ink.soft)
    ends = []
    for (name, line), colour in zip(lines.items(), itertools.cycle(RUN_COLOURS)):
        places = [place(x, y) for x, y in line if x > 0 and y > 0]
        if places:
            ink.polyline(places, colour, 2.2)
            for x, y in places:
                ink.dot(x, y, 3, colour)
            ends.append((name, colour, places[-1][1]))
    for (name, colour, _), y in zip(ends, spread([y for _, _, y in ends], 16, top, bottom)):
        ink.text(right + 14, y + 4, name, 12, colour, weight=600)
    last = {name: line[-1] for name, line in lines.items() if line}
    if len({x for x, _ in last.values()}) == 1:
        words = f"at {all_x[-1]:g} {x_label} " + ", ".join(
            f"{k} {y:.2g}" for k, (_, y) in last.items()
        )
    else:
        words = ", ".join(f"{k} {y:.2g} at {x:g} {x_label}" for k, (x, y) in last.items())
    return Figure(ink, bottom + 26, f"{title}: {words}")


def bars(
    rows: "list[tuple[str, float, str]]", title: str, limit: "tuple[float, str] | None" = None
) -> Figure:
    """Horizontal bars on one scale.

    Args:
        rows: (name, value, words behind the bar).
        limit: (value, words) of a dashed line.
    """
    ink = Ink()
    values = [value for _, value, _ in rows]
    highest = max(values + [limit[0] if limit else 0]) or 1.0
    left = max(text_width(name, 12) for name, _, _ in rows) + 16
    scale = (WIDTH - left - 150) / highest
    y = 34
    ink.title(15, title)
    for i, (name, value, words) in enumerate(rows):
        ink.text(left - 10, y + 15, name, 12, anchor="end")
        ink.rect(left, y, max(value * scale, 1), 21, RUN_COLOURS[i % len(RUN_COLOURS)], rx=3)
        x = left + value * scale + 8
        if limit:
            limit_x = left + limit[0] * scale
            if x - 6 < limit_x < x + text_width(words, 12):
                x = limit_x + 8
        ink.text(x, y + 15, words, 12, weight=600)
        y += 28
    if limit:
        limit_x = left + limit[0] * scale
        ink.line(limit_x, 26, limit_x, y - 2, 1.6, "4 4")
        ink.text(limit_x, y + 12, limit[1], 11.5, ink.soft, "middle")
        y += 16
    summary = ", ".join(f"{name} {words}" for name, _, words in rows)
    return Figure(ink, y + 6, f"{title}: {summary}")


def norms(
    rows: "dict[str, tuple[float, float]]",
    limit: "float | None" = None,
    title: str = "Gradient norm",
) -> Figure:
    """Gradient norms as bars: pale before clipping, solid after it.

    Args:
        rows: name -> (norm before, norm after). limit: max_norm, a dashed line.
    """
    ink = Ink()
    finite = [before for before, _ in rows.values() if math.isfinite(before)]
    highest = max(finite + [limit or 0]) or 1.0
    left = max(text_width(name, 12) for name in rows) + 16
    scale = (WIDTH - left - 110) / highest
    y = 36
    ink.title(15, title)
    for i, (name, (before, after)) in enumerate(rows.items()):
        colour = RUN_COLOURS[i % len(RUN_COLOURS)] if math.isfinite(before) else RED
        ink.text(left - 10, y + 15, name, 12, anchor="end")
        for value, opacity in ((before, 0.3), (after, 1.0)):
            if math.isfinite(value):
                ink.rect(left, y, max(value * scale, 1), 21, colour, opacity, rx=3)
        end = left + (before * scale if math.isfinite(before) else 0)
        ink.text(end + 8, y + 15, norm_words(before, after), 12, weight=600)
        y += 27
    if limit is not None:
        x = left + limit * scale
        ink.segment(x, 28, x, y, ink.strong, 1.4, dash="4 4")
        ink.text(x, y + 13, f"max_norm {limit:g}", 11.5, ink.soft, "middle")
        y += 16
    summary = ", ".join(f"{name} {norm_words(*pair)}" for name, pair in rows.items())
    return Figure(ink, y + 6, f"{title}: {summary}")
