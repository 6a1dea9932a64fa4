"""Charts of measured values: curves on logarithmic axes.

figures.curves({"fp32": [(1, 1e-8), (4, 2e-8)]}, "Error", "micro-batches", "relative error")
"""

import itertools
import math

from .drawing import (
    RUN_COLOURS,
    WIDTH,
    Figure,
    Ink,
    power_of_ten,
    spread,
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
