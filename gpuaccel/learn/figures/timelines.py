"""The picture of a timeline: spans of host and GPU on lanes, one scale for all runs.

figures.timeline({"item": timeline.tail(run)})  # where the host waits for the GPU
"""

import itertools

from ...measure import timeline as measured
from .drawing import (
    BLUE,
    GREEN,
    GREY,
    PINK,
    RED,
    RUN_COLOURS,
    WHITE,
    WIDTH,
    Figure,
    Ink,
    microseconds,
    plural,
    text_width,
)

# The name of a span -> (colour, opacity, words of the legend). Other names are kernels.
SPAN_STYLES = {
    "python": (GREY, 0.22, "all else on the host"),
    "operator": (BLUE, 0.7, "an operator of torch"),
    "launch": (BLUE, 1.0, "launches"),
    "copy": (PINK, 1.0, "copies"),
    "wait": (RED, 0.9, "waits for the GPU"),
    "read": (RED, 0.9, "reads a number"),
    "backward": (GREY, 0.55, "rest of backward"),
}
KERNEL_STYLE = (GREEN, 1.0, "kernels")
LEFT, RIGHT = 44, WIDTH - 8
LANE_HEIGHT = 24
# spans that a picture enlarges, and from how many of them on it does
ENLARGED = slice(1, 7)
MANY_STOPS = 8


def timeline(
    runs: "dict[str, list]", title: str = "What follows the last backward of one step"
) -> Figure:
    """The spans of several runs (measure.timeline.tail) on one scale: host above, GPU below.

    Of the first run that waits (or reads a number) again and again, a stretch is enlarged."""
    ink = Ink()
    summaries = []
    longest = longest_run(runs)
    ink.title(16, title)
    ink.legend(37, legend_of(runs))
    y = 62.0
    enlarged = False
    for (name, spans), colour in zip(runs.items(), itertools.cycle(RUN_COLOURS)):
        summary = _summary(spans)
        summaries.append(f"{name}: {summary}")
        ink.text(0, y, name, 12.5, colour, weight=600)
        ink.text(text_width(name, 12.5) + 14, y, summary, 12, ink.soft)
        top = y + 8
        y = draw_lanes(ink, spans, top, 0.0, longest)
        stops = [s for s in spans if s.name in ("wait", "read")]
        if len(stops) >= MANY_STOPS and not enlarged:
            enlarged = True
            # not the first one, which waits for backward
            some = stops[ENLARGED]
            first = some[0].start - 0.6 * (some[1].start - some[0].start)
            last = some[-1].stop
            draw_zoom(ink, first, last, longest, top, y, colour)
            y = draw_lanes(ink, spans, y + 19, first, last)
            ink.text(RIGHT, y + 11, f"enlarged: {microseconds(last - first)}", 11, ink.soft, "end")
            y += 14
        y += 20
    ink.time_axis(longest, LEFT, RIGHT, y)
    return Figure(ink, y + 16, f"{title}: " + "; ".join(summaries))


def _summary(spans):
    """How often the host waits, and how long all of it takes, in words."""
    counts = measured.facts(spans)
    if counts["gpu_busy"] is None:
        return f"{plural(counts['reads'], 'number')} read, {microseconds(counts['us'])}"
    waits = plural(counts["waits"], "wait")
    return f"{waits}, {microseconds(counts['us'])}, the GPU works {counts['gpu_busy']:.0%} of it"


def longest_run(runs) -> float:
    """When the last span of all runs ends, in microseconds."""
    return max((s.stop for spans in runs.values() for s in spans), default=0.0) or 1.0


def legend_of(runs):
    """The styles that these runs' spans have."""
    names = {s.name for spans in runs.values() for s in spans}
    styles = [style for name, style in SPAN_STYLES.items() if name in names]
    return styles + [KERNEL_STYLE] * any(name not in SPAN_STYLES for name in names)


def lanes_of(spans):
    """ "host" and "GPU", if there are spans of them."""
    return [lane for lane in ("host", "GPU") if any(s.lane == lane for s in spans)]


def draw_zoom(ink, first, last, longest, top, y, colour):
    """A frame around a stretch of a run's lanes, and lines to where it is drawn enlarged."""
    start = LEFT + first / longest * (RIGHT - LEFT)
    stop = LEFT + last / longest * (RIGHT - LEFT)
    width = max(stop - start, 1) + 2
    ink.rect(start - 1, top - 2, width, y - top, "none", rx=2, stroke=colour, stroke_width=1.4)
    for x, edge in ((start - 1, LEFT), (stop + 1, RIGHT)):
        ink.path(
            f"M{x:.1f} {y - 2:.1f}L{edge:.1f} {y + 17:.1f}",
            stroke=colour,
            stroke_width=1,
            opacity=0.5,
        )


def draw_lanes(ink, spans, y, first, last, kernel_names=True) -> float:
    """A run's lanes from `first` to `last` microseconds.

    Returns:
        Where they end.
    """
    for lane in lanes_of(spans):
        ink.text(LEFT - 10, y + 14, lane, 11, ink.soft, "end")
        some = [s for s in spans if s.lane == lane]
        _draw_lane(ink, some, y, first, last, kernel_names)
        y += LANE_HEIGHT
    return y


def _draw_lane(ink, spans, y, first, last, kernel_names):
    """One lane: a path for each colour. Stretches less than half a pixel apart become one."""
    height = 20
    scale = (RIGHT - LEFT) / (last - first)
    # style -> [start, stop] of its stretches, in pixels
    stretches = {style: [] for style in [*SPAN_STYLES.values(), KERNEL_STYLE]}
    # [name, start, stop] of kernels; neighbours of the same name are one
    kernels = []
    for s in spans:
        start = max(LEFT + (s.start - first) * scale, LEFT)
        stop = min(LEFT + (s.stop - first) * scale, RIGHT)
        if s.name not in SPAN_STYLES:
            if kernels and kernels[-1][0] == s.name and start - kernels[-1][2] < 2:
                kernels[-1][2] = stop
            else:
                kernels.append([s.name, start, stop])
        if stop <= LEFT or start >= RIGHT:
            continue
        boxes = stretches[SPAN_STYLES.get(s.name, KERNEL_STYLE)]
        if boxes and start - boxes[-1][1] < 0.5:
            boxes[-1][1] = max(boxes[-1][1], stop)
        else:
            boxes.append([start, stop])
    for (colour, opacity, _), boxes in stretches.items():
        path = ""
        for start, stop in boxes:
            width = max(stop - start, 0.7)
            path += f"M{start:.1f} {y}h{width:.1f}v{height}h{-width:.1f}z"
        if path:
            ink.path(path, colour, opacity=opacity)
    for name, start, stop in kernels if kernel_names else ():
        if stop - start > text_width(name, 10) + 6:
            ink.text((start + stop) / 2, y + height / 2 + 3.5, name, 10, WHITE, "middle", 600)
