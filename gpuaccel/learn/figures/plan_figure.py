"""A predicted step on N GPUs: throughput of each GPU over N, and the backward that communicates.

    plan_figure.plan("64 GPUs", rates, 64, prediction, backward_ms=14.9, tail_ms=4.5)

`rates` and `prediction` are made by distributed/plan.py.
"""

import itertools

from ...distributed.plan import Prediction
from .drawing import (
    BLUE,
    GREEN,
    RED,
    RUN_COLOURS,
    WIDTH,
    Figure,
    Ink,
    milliseconds,
    spread,
)

LEFT, RIGHT = 64, WIDTH - 190
# The colour in which the pictures of several ranks draw what is sent.
SENT = RUN_COLOURS[5]
WAITING = RUN_COLOURS[1]
ROW = 5.0


def plan(
    title: str,
    rates: "dict[str, list[tuple[int, float]]]",
    gpus: int,
    prediction: Prediction,
    backward_ms: float,
    tail_ms: float,
) -> Figure:
    """Two panels: throughput over the number of GPUs, and the last micro-batch's backward.

    Args:
        title: a line above them.
        rates: how sums are made -> (GPUs, share of the throughput of one GPU that trains alone).
        gpus: the number that the second panel is about.
        prediction: of the step with so many GPUs.
        backward_ms: of a micro-batch that does not communicate.
        tail_ms: clipping and the update.
    """
    ink = Ink()
    ink.title(15, title)
    _rates(ink, rates, gpus, 46, 206)
    end = _last_backward(ink, prediction, backward_ms, tail_ms, 262)
    words = "; ".join(
        f"{name} {dict(points)[gpus]:.0%}" for name, points in rates.items() if gpus in dict(points)
    )
    return Figure(ink, end, f"{title}. Throughput of each GPU: {words}")


def _rates(ink, rates, gpus, top, bottom):
    counts = sorted({count for points in rates.values() for count, _ in points})

    def place(count, rate):
        across = counts.index(count) / max(len(counts) - 1, 1)
        return LEFT + across * (RIGHT - LEFT), bottom - rate * (bottom - top)

    ink.text(0, top - 12, "throughput of each GPU, in % of one that trains alone", 11.5, ink.soft)
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        y = place(counts[0], tick)[1]
        ink.line(LEFT, y, RIGHT, y, opacity=0.9 if tick in (0, 0.5) else 0.4)
        ink.text(LEFT - 8, y + 4, f"{tick:.0%}", 11, ink.soft, "end")
    for count in counts:
        x = place(count, 0)[0]
        weight = 600 if count == gpus else 400
        ink.text(x, bottom + 17, f"{count:,}", 11, ink.soft, "middle", weight)
    ink.text(RIGHT + 24, bottom + 17, "GPUs", 11.5, ink.soft)
    ends = []
    for (name, points), colour in zip(rates.items(), itertools.cycle(RUN_COLOURS)):
        places = [place(*point) for point in points]
        ink.polyline(places, colour, 2.2)
        for x, y in places:
            ink.dot(x, y, 2.6, colour)
        ends.append((name, colour, places[-1][1]))
    for (name, colour, _), y in zip(ends, spread([y for *_, y in ends], 16, top, bottom - 6)):
        ink.text(RIGHT + 10, y + 4, name, 12, colour, weight=600)
    if gpus in counts:
        x = place(gpus, 0)[0]
        ink.segment(x, top, x, bottom, ink.strong, 1.4, dash="4 4")


def _last_backward(ink, prediction, backward_ms, tail_ms, y):
    """The bars of one rank; returns where they end."""
    buckets = prediction.buckets
    backward = buckets[-1][0] if buckets else backward_ms
    end = backward + prediction.exposed_ms
    over_all = end + prediction.waiting_ms
    longest = (over_all + tail_ms) or 1.0

    def place(ms):
        return LEFT + ms / longest * (RIGHT - LEFT)

    def bar(start, stop, colour, opacity=1.0):
        if stop > start:
            ink.rect(place(start), y, place(stop) - place(start), 20, colour, opacity, rx=3)

    ink.text(0, y - 14, "backward, its buckets, and the update", 11.5, ink.soft)
    bar(0.0, backward, BLUE)
    bar(backward, end, RED)
    bar(end, over_all, WAITING)
    bar(over_all, longest, GREEN, 0.9)
    y += 26
    for complete, over in buckets:
        ink.rect(place(complete), y, max(place(min(over, backward)) - place(complete), 0), 4, SENT)
        if over > backward:
            start = max(complete, backward)
            ink.rect(place(start), y, max(place(over) - place(start), 1), 4, RED)
        y += ROW
    ink.time_axis(1e3 * longest, LEFT, RIGHT, y + 14)
    ink.legend(
        y + 44,
        [
            (
                BLUE,
                1.0,
                f"backward, {milliseconds(backward)}: {milliseconds(prediction.slowed_ms)} slower",
            ),
            (SENT, 1.0, "a bucket beside it"),
            (RED, 1.0, f"buckets after it, {milliseconds(prediction.exposed_ms)}"),
            (WAITING, 1.0, f"for the slowest rank, {milliseconds(prediction.waiting_ms)}"),
            (GREEN, 0.9, "update"),
        ],
    )
    return y + 52
