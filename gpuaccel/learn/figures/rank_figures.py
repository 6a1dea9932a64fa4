"""Pictures of several ranks: batches, weights of tokens, overlap with backward, hashes, restarts.

    >>> rank_figures.shards(range(9), 2, seed=1)          # how ga.training.shard deals batches
    >>> rank_figures.weights([2, 6])                      # mean of means, and mean over all tokens
    >>> rank_figures.overlap({"buckets": [spans_of_rank_0, spans_of_rank_1]})
    >>> rank_figures.hashes(names, [hashes_of_rank_0, hashes_of_rank_1])
    >>> rank_figures.restarts([(1, 8, 1), (7, 12, None)], saved=[3, 6])

Each is a Figure.
"""

from ...distributed import sent_early
from ...training import shard
from .drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    RUN_COLOURS,
    WIDTH,
    Figure,
    Ink,
    microseconds,
    plural,
    text_width,
)

LEFT = 70
# the name of a computing span -> (colour, opacity, words of the legend)
_WORK = {
    "forward": (BLUE, 0.55, "forward"),
    "backward": (BLUE, 1.0, "backward"),
    "wait": (RED, 0.85, "waits for sums"),
    "optimizer": (GREEN, 0.9, "optimizer"),
}


def _colour(rank) -> str:
    return RUN_COLOURS[rank % len(RUN_COLOURS)]


# ---- batches and tokens -------------------------------------------------------------------------


def shards(batches, ranks: int, seed: "int | None" = None) -> Figure:
    """Batches, and how ga.training.shard deals them to the ranks in one epoch. For some 20 batches.

    batches: what names each. seed: of the order, as for ga.training.shard."""
    batches = list(batches)
    shares = [shard(list(enumerate(batches)), rank, ranks, seed=seed) for rank in range(ranks)]
    rank_of = {
        pair[0]: rank for rank, share in enumerate(shares) for pair in share if pair is not None
    }
    ink = Ink()
    width = min(60.0, (WIDTH - LEFT) / len(batches))
    ink.text(0, 28, "batches", 12.5, weight=600)
    for i, name in enumerate(batches):
        ink.box(LEFT + i * width, 10, width - 5, 26, _colour(rank_of[i]), name)
    for rank, share in enumerate(shares):
        y = 62 + 36 * rank
        colour = _colour(rank)
        ink.text(0, y + 18, f"rank {rank}", 12.5, colour, weight=600)
        for i, pair in enumerate(share):
            x = LEFT + i * width
            if pair is None:
                outline = dict(stroke=colour, stroke_width=1.2, dash="3 3")
                ink.rect(x, y + 1, width - 6, 24, "none", 0.8, rx=4, **outline)
            else:
                ink.box(x, y, width - 5, 26, colour, pair[1])
    steps = len(shares[0])
    y = 74 + 36 * ranks
    for step in range(steps):
        ink.text(LEFT + (step + 0.5) * width - 2.5, y, step + 1, 11, ink.soft, "middle")
    ink.text(0, y, "step", 11, ink.soft)
    words = f"{len(batches)} batches for {plural(ranks, 'rank')}, {steps} steps"
    idle = sum(pair is None for share in shares for pair in share)
    if idle:
        words += (
            f"; in the last one {idle} {'ranks have' if idle > 1 else 'rank has'} none (dashed)"
        )
    return Figure(ink, y + 8, words)


def weights(counts: "list[int]") -> Figure:
    """A box per token, as wide as its weight: in the mean of the ranks' means, and over all tokens.

    counts: tokens of each rank."""
    ink = Ink()
    left = 118
    total = sum(counts)
    ranks = sum(1 for count in counts if count)
    rows = (
        (8, "mean of means", lambda count: 1 / (ranks * count)),
        (66, "mean of all", lambda count: 1 / total),
    )
    for y, name, weight_of in rows:
        ink.text(0, y + 20, name, 12.5, weight=600)
        x = float(left)
        for rank, count in enumerate(counts):
            for _ in range(count):
                weight = weight_of(count)
                width = (WIDTH - left) * weight
                words = f"1/{round(1 / weight)}" if width > 22 else ""
                ink.box(x, y, max(width - 3, 0.5), 30, _colour(rank), words, size=11.5)
                x += width
    x = float(left)
    for rank, count in enumerate(counts):
        ink.text(x, 118, f"rank {rank}: {plural(count, 'token')}", 12, _colour(rank), weight=600)
        x += text_width(f"rank {rank}: {count} tokens", 12) + 24
    each = ", ".join(
        f"1/{ranks * count} each of rank {rank}'s {count}"
        for rank, count in enumerate(counts)
        if count
    )
    words = f"in the mean of means {each}; in the mean of all 1/{total} each"
    return Figure(ink, 126, f"What a token weighs: {words}")


# ---- what is sent when --------------------------------------------------------------------------


def overlap(
    runs: "dict[str, list]",
    title: str = "One step: what each rank computes, and what is on its way",
) -> Figure:
    """What each rank computes and sends, on one scale; buckets in rows where they overlap.

    runs: name -> the spans of each rank (distributed.trace.watch)."""
    ink = Ink()
    right = WIDTH - 8
    y = 58.0
    summaries = []
    longest = max(
        (s.stop for ranks in runs.values() for spans in ranks for s in spans), default=1.0
    )
    ink.title(16, title)
    ink.legend(36, [*_WORK.values(), (ORANGE, 1.0, "a bucket on its way")])

    def place(us):
        return LEFT + us / longest * (right - LEFT)

    for name, ranks in runs.items():
        summary = _overlap_summary(ranks)
        summaries.append(f"{name}: {summary}")
        ink.text(0, y, name, 12.5, weight=600)
        ink.text(text_width(name, 12.5) + 14, y, summary, 12, ink.soft)
        y += 10
        for rank, spans in enumerate(ranks):
            ink.text(LEFT - 10, y + 13, f"rank {rank}", 11, _colour(rank), "end", 600)
            for s in spans:
                if s.lane == "computes" and s.name in _WORK:
                    colour, opacity, _ = _WORK[s.name]
                    width = max(place(s.stop) - place(s.start) - 0.5, 0.7)
                    path = f"M{place(s.start):.1f} {y}h{width:.1f}v18h{-width:.1f}z"
                    ink.path(path, colour, opacity=opacity)
            y += 21
            # where the last bucket of each row ends
            row_ends: "list[float]" = []
            for s in (s for s in spans if s.lane == "sends"):
                start, stop = place(s.start), place(s.stop)
                free = (r for r, end in enumerate(row_ends) if end <= start)
                row = next(free, len(row_ends))
                row_ends[row : row + 1] = [stop]
                ink.rect(start, y + 9 * row, max(stop - start, 1.5), 7, ORANGE, rx=2)
            y += 9 * max(len(row_ends), 1) + 7
        y += 18
    ink.time_axis(longest, LEFT, right, y)
    return Figure(ink, y + 14, f"{title}. " + "; ".join(summaries))


def _overlap_summary(ranks):
    """How many buckets overlap with backward, and how long a rank waits, in words."""
    early = min(map(sent_early, ranks))
    buckets = sum(s.lane == "sends" for s in ranks[0])
    words = f"{early} of {plural(buckets, 'bucket')} on the way before backward is over"
    waits = max(sum(s.stop - s.start for s in spans if s.name == "wait") for spans in ranks)
    return words + (f", {microseconds(waits)} of waiting at most" if waits else "")


# ---- weights, and restarts ----------------------------------------------------------------------


def hashes(names: "list[str]", ranks: "list[list[int]]") -> Figure:
    """A hash of each tensor on each rank; where one differs from rank 0's it is red.

    names: of the tensors.
    ranks: for each rank, the hashes (distributed.agreement.weight_hashes)."""
    ink = Ink()
    width = (WIDTH - LEFT) / max(len(names), 1)
    different = [i for i, column in enumerate(zip(*ranks)) if len(set(column)) > 1]
    for rank, row in enumerate(ranks):
        y = 8 + 34 * rank
        ink.text(0, y + 19, f"rank {rank}", 12.5, _colour(rank), weight=600)
        for i, value in enumerate(row):
            if value != ranks[0][i]:
                colour = RED
            elif i in different:
                colour = GREY
            else:
                colour = RUN_COLOURS[value % len(RUN_COLOURS)]
            words = f"{value & 0xFFFF:04x}" if width >= 34 else ""
            ink.box(LEFT + i * width, y, max(width - 2, 1), 28, colour, words, size=11)
    y = 26 + 34 * len(ranks)
    result = "every hash is the same"
    if different:
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        result = f"{names[different[0]]} differs{more} (red)"
    words = f"{len(names)} tensors, {len(ranks)} ranks: {result}"
    ink.text(LEFT, y, words, 12, ink.soft)
    return Figure(ink, y + 8, words)


def restarts(attempts: "list[tuple]", saved: "list[int]") -> Figure:
    """The steps of each start of a job in which ranks died; steps that were lost are pale.

    attempts: (first step, last step that was done, the rank that died then or None) of each start.
    saved: steps with a checkpoint."""
    ink = Ink()
    width = min(48.0, (WIDTH - LEFT - 80) / max(stop for _, stop, _ in attempts))
    for i, (first, stop, dead_rank) in enumerate(attempts):
        y = 8 + 38 * i
        ink.text(0, y + 19, f"start {i + 1}", 12.5, weight=600)
        kept = stop
        if dead_rank is not None:
            kept = max([step for step in saved if step <= stop], default=0)
        for step in range(first, stop + 1):
            x = LEFT + (step - 1) * width
            ink.box(x, y, width - 4, 28, _colour(i), step, 1.0 if step <= kept else 0.35)
        if dead_rank is not None:
            x = LEFT + stop * width + 5
            ink.path(f"M{x:.1f} {y + 8}l12 12m0 -12l-12 12", stroke=RED, stroke_width=3)
            ink.text(x + 20, y + 19, f"rank {dead_rank} dies", 12, RED, weight=600)
    y = 8 + 38 * len(attempts)
    for step in saved:
        x = LEFT + step * width - 2
        ink.line(x, 2, x, y, 1.5, "4 3")
        ink.text(x, y + 12, "checkpoint", min(11, width * 0.3 + 3), ink.soft, "middle")
    words = []
    for i, (first, stop, dead_rank) in enumerate(attempts, 1):
        died = "" if dead_rank is None else f", then rank {dead_rank} died"
        words.append(f"start {i}: steps {first} to {stop}{died}")
    return Figure(ink, y + 20, "; ".join(words))
