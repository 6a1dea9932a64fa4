"""Pictures of several ranks: a step, an all-reduce, batches, weights of tokens, overlap with
backward, orders of addition, hashes, heartbeats, restarts.

    rank_figures.one_step([2.0, 4.0])                 # from batches to equal weights
    rank_figures.ring([[1, 2, 3], [10, 20, 30], [100, 200, 300]])     # an all-reduce
    rank_figures.shards(range(9), 2, seed=1)          # how ga.training.shard deals batches
    rank_figures.weights([2, 6])                      # mean of means, and mean over all tokens
    rank_figures.overlap({"buckets": [spans_of_rank_0, spans_of_rank_1]})
    rank_figures.orders([[1e8, -1e8], [1.0, 1.0]])    # one process; each rank first
    rank_figures.hashes(names, [hashes_of_rank_0, hashes_of_rank_1])
    rank_figures.heartbeats([4, 3])                   # who has not reached the collective
    rank_figures.restarts([(1, 8, 1), (7, 12, None)], saved=[3, 6])

Each is a Figure.
"""

import torch

from ...distributed import sent_early
from ...training import shard
from .drawing import (
    BLUE,
    GREEN,
    GREY,
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
# What ranks send to each other, and sums over all ranks; the first five ranks have other colours.
SENT = RUN_COLOURS[5]
# the name of a computing span -> (colour, opacity, words of the legend)
_WORK = {
    "forward": (BLUE, 0.55, "forward"),
    "backward": (BLUE, 1.0, "backward"),
    "wait": (RED, 0.85, "waits for sums"),
    "optimizer": (GREEN, 0.9, "optimizer"),
}


def _colour(rank) -> str:
    return RUN_COLOURS[rank % len(RUN_COLOURS)]


# ---- one step, one collective -------------------------------------------------------------------


def one_step(gradients: "list[float]", weight: float = 1.0, lr: float = 0.1) -> Figure:
    """One step of several ranks with one weight: each rank's gradient, their sum, the new weight.

    Args:
        gradients: what backward finds on each rank.
        weight, lr: the weight before the step, and the learning rate; the update is plain SGD.
    """
    ink = Ink()
    total = sum(gradients)
    new_weight = weight - lr * total
    height = 46 * len(gradients)
    for x, words in (
        (LEFT, "its batch"),
        (190, "forward, backward"),
        (350, "its gradient"),
        (462, "all-reduce"),
        (580, "the sum"),
        (680, "its weight"),
    ):
        ink.text(x, 14, words, 13, ink.soft)
    ink.box(466, 26, 62, height - 10, SENT, "add", size=14)
    for rank, gradient in enumerate(gradients):
        y = 26 + 46 * rank
        colour = _colour(rank)
        ink.text(0, y + 23, f"rank {rank}", 14.5, colour, weight=600)
        ink.box(LEFT, y, 92, 36, colour, f"batch {rank}", size=14)
        ink.box(190, y, 124, 36, colour, f"weight {weight:g}", size=14)
        ink.box(350, y, 76, 36, colour, f"{gradient:g}", size=14)
        ink.box(580, y, 62, 36, SENT, f"{total:g}", size=14)
        ink.box(
            680, y, 118, 36, GREEN, f"{weight:g} - {lr:g} x {total:g} = {new_weight:g}", size=12
        )
        for start, stop in ((162, 190), (314, 350), (426, 466), (528, 580), (642, 680)):
            _arrow(ink, start + 4, y + 18, stop - 4, y + 18, GREY)
    found = " and ".join(f"{gradient:g}" for gradient in gradients)
    words = (
        f"{plural(len(gradients), 'rank')} with gradients {found}: after the all-reduce each has "
        f"{total:g}, and each has the weight {new_weight:g}"
    )
    return Figure(ink, 30 + height, words)


def _arrow(ink, x1, y1, x2, y2, colour, width=1.6):
    """A straight line with a head at its end. It points to the right."""
    ink.segment(x1, y1, x2, y2, colour, width)
    ink.path(
        f"M{x2 - 5:.1f} {y2 - 4:.1f}L{x2:.1f} {y2:.1f}L{x2 - 5:.1f} {y2 + 4:.1f}",
        "none",
        colour,
        width,
    )


def ring(values: "list[list[float]]") -> Figure:
    """An all-reduce in a ring, round by round: in each one a rank sends one piece to the next rank.

    Args:
        values: for each rank its pieces, as many as there are ranks; for 4 ranks at most.
    """
    ink = Ink()
    ranks = len(values)
    columns = _ring_rounds(values)
    gap = 44.0
    wide = ((WIDTH - LEFT) - gap * (len(columns) - 1)) / len(columns)
    cell = wide / ranks

    def corner(column, rank, piece=0):
        return LEFT + column * (wide + gap) + piece * cell, 34.0 + 48 * rank

    for c, (heading, pieces, moves) in enumerate(columns):
        x, _ = corner(c, 0)
        ink.text(x + wide / 2, 14, heading, 13.5, anchor="middle", weight=600)
        for rank in range(ranks):
            for piece in range(ranks):
                x, y = corner(c, rank, piece)
                is_sum = pieces[rank][piece] == sum(row[piece] for row in values)
                colour = SENT if is_sum else _colour(rank)
                ink.box(x, y, cell - 5, 30, colour, f"{pieces[rank][piece]:g}", size=13)
                if any(move == (rank, piece) for _, move in moves):
                    outline = dict(stroke=GREY, stroke_width=1.6)
                    ink.rect(x - 2, y - 2, cell - 1, 34, "none", rx=5, **outline)
        for sender, (receiver, piece) in moves:
            x, y = corner(c - 1, sender)
            stop, stop_y = corner(c, receiver)
            _arrow(ink, x + wide + 1, y + 15, stop - 6, stop_y + 15, SENT)
    for rank in range(ranks):
        ink.text(0, corner(0, rank)[1] + 19, f"rank {rank}", 14.5, _colour(rank), weight=600)
    y = 34 + 48 * ranks
    ink.legend(y + 8, [(SENT, 1.0, "a sum over all ranks; outlined: just received")])
    rounds = len(columns) - 1
    words = (
        f"{plural(ranks, 'rank')}, {plural(rounds, 'round')}: first pieces are added, then sums "
        f"are copied; at the end each rank has {_listed(columns[-1][1][0])}"
    )
    return Figure(ink, y + 16, words)


def _ring_rounds(values):
    """(heading, each rank's pieces, [(sender, (receiver, piece))]): the start, then each round.

    In the first half of the rounds the receiver adds what it gets, in the second half it copies."""
    ranks = len(values)
    pieces = [list(row) for row in values]
    columns = [("start", [list(row) for row in pieces], [])]
    for number in range(2 * (ranks - 1)):
        adds = number < ranks - 1
        before = [list(row) for row in pieces]
        moves = []
        for sender in range(ranks):
            receiver = (sender + 1) % ranks
            piece = (sender - number) % ranks
            sent = before[sender][piece]
            pieces[receiver][piece] = before[receiver][piece] + sent if adds else sent
            moves.append((sender, (receiver, piece)))
        columns.append(("add" if adds else "copy", [list(row) for row in pieces], moves))
    return columns


def _listed(numbers):
    return "[" + ", ".join(f"{number:g}" for number in numbers) + "]"


# ---- batches and tokens -------------------------------------------------------------------------


def shards(batches, ranks: int, seed: "int | None" = None) -> Figure:
    """Batches, and how ga.training.shard deals them to the ranks in one epoch. For some 20 batches.

    Args:
        batches: what names each. seed: of the order, as for ga.training.shard.
    """
    batches = list(batches)
    shares = [shard(list(enumerate(batches)), rank, ranks, seed=seed) for rank in range(ranks)]
    rank_of = {
        pair[0]: rank for rank, share in enumerate(shares) for pair in share if pair is not None
    }
    ink = Ink()
    width = min(60.0, (WIDTH - LEFT) / len(batches))
    ink.text(0, 28, "batches", 14.5, weight=600)
    for i, name in enumerate(batches):
        ink.box(LEFT + i * width, 10, width - 5, 26, _colour(rank_of[i]), name, size=14)
    for rank, share in enumerate(shares):
        y = 62 + 36 * rank
        colour = _colour(rank)
        ink.text(0, y + 18, f"rank {rank}", 14.5, colour, weight=600)
        for i, pair in enumerate(share):
            x = LEFT + i * width
            if pair is None:
                outline = dict(stroke=colour, stroke_width=1.2, dash="3 3")
                ink.rect(x, y + 1, width - 6, 24, "none", 0.8, rx=4, **outline)
            else:
                ink.box(x, y, width - 5, 26, colour, pair[1], size=14)
    steps = len(shares[0])
    y = 74 + 36 * ranks
    for step in range(steps):
        ink.text(LEFT + (step + 0.5) * width - 2.5, y, step + 1, 13, ink.soft, "middle")
    ink.text(0, y, "step", 13, ink.soft)
    words = f"{len(batches)} batches for {plural(ranks, 'rank')}, {steps} steps"
    idle = sum(pair is None for share in shares for pair in share)
    if idle:
        words += (
            f"; in the last one {idle} {'ranks have' if idle > 1 else 'rank has'} none (dashed)"
        )
    return Figure(ink, y + 8, words)


def weights(counts: "list[int]") -> Figure:
    """A box per token, as wide as its weight: in the mean of the ranks' means, and over all tokens.

    Args:
        counts: tokens of each rank.
    """
    ink = Ink()
    left = 128
    total = sum(counts)
    ranks = sum(1 for count in counts if count)
    rows = (
        (8, "mean of means", lambda count: 1 / (ranks * count)),
        (66, "mean of all", lambda count: 1 / total),
    )
    for y, name, weight_of in rows:
        ink.text(0, y + 20, name, 14.5, weight=600)
        x = float(left)
        for rank, count in enumerate(counts):
            for _ in range(count):
                weight = weight_of(count)
                width = (WIDTH - left) * weight
                words = f"1/{round(1 / weight)}" if width > 22 else ""
                ink.box(x, y, max(width - 3, 0.5), 30, _colour(rank), words, size=13)
                x += width
    x = float(left)
    for rank, count in enumerate(counts):
        ink.text(x, 118, f"rank {rank}: {plural(count, 'token')}", 13.5, _colour(rank), weight=600)
        x += text_width(f"rank {rank}: {count} tokens", 14) + 24
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

    Args:
        runs: name -> the spans of each rank (distributed.trace.watch).
    """
    ink = Ink()
    right = WIDTH - 8
    y = 58.0
    summaries = []
    longest = max(
        (s.stop for ranks in runs.values() for spans in ranks for s in spans), default=1.0
    )
    ink.title(16, title)
    ink.legend(36, [*_WORK.values(), (SENT, 1.0, "a bucket on its way")])

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
                ink.rect(start, y + 9 * row, max(stop - start, 1.5), 7, SENT, rx=2)
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


# ---- the order of additions ---------------------------------------------------------------------


def orders(grads: "list[list[float]]") -> Figure:
    """The same gradients added in two orders in fp32, with each sum so far below its box.

    Args:
        grads: grads[m][r] is the gradient of rank r's micro-batch m; 8 of them at most.
    """
    ink = Ink()
    ranks = len(grads[0])
    in_order = [(rank, value) for row in grads for rank, value in enumerate(row)]
    by_rank = [[(rank, row[rank]) for row in grads] for rank in range(ranks)]
    width = min(118.0, (WIDTH - 162) / (len(in_order) + 1))

    def draw(y, name, groups, sums):
        """Boxes of each group with its running sum; returns x behind the last one."""
        ink.text(0, y + 18, name, 14.5, weight=600)
        x = 142.0
        for group, totals in zip(groups, sums):
            for (rank, value), total in zip(group, totals):
                ink.box(x, y, width - 6, 28, _colour(rank), _exactly(value), size=14)
                ink.text(x + (width - 6) / 2, y + 46, _exactly(total), 13, ink.soft, "middle")
                x += width
            x += 14
        ink.text(0, y + 46, "sum so far", 13, ink.soft)
        return x

    one = _running(value for _, value in in_order)
    x = draw(8, "global order", [in_order], [one])
    partial = [_running(value for _, value in group) for group in by_rank]
    all_reduced = _running(totals[-1] for totals in partial)[-1]
    x = max(x, draw(78, "each rank first", by_rank, partial))
    for y, total in ((8, one[-1]), (78, all_reduced)):
        ink.box(x, y, width - 6, 28, SENT, _exactly(total), size=14)
        ink.text(x + (width - 6) / 2, y + 46, "the result", 13, ink.soft, "middle")
    words = (
        f"{plural(len(in_order), 'gradient')} of {plural(ranks, 'rank')}: added in global order "
        f"{_exactly(one[-1])}, each rank first {_exactly(all_reduced)}"
    )
    return Figure(ink, 136, words)


def _running(values) -> "list[float]":
    """The sums so far, each rounded to fp32."""
    total = torch.zeros(())
    sums = []
    for value in values:
        total = total + value
        sums.append(total.item())
    return sums


def _exactly(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


# ---- weights, and restarts ----------------------------------------------------------------------


def hashes(names: "list[str]", ranks: "list[list[int]]") -> Figure:
    """A hash of each tensor on each rank; where one differs from rank 0's it is red.

    Args:
        names: of the tensors.
        ranks: for each rank, the hashes (distributed.agreement.weight_hashes).
    """
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


def heartbeats(counts: "list[int]") -> Figure:
    """The heartbeats of each rank: a box for each collective that it has reached.

    Args:
        counts: heartbeats of each rank. Those with the most wait for the others; 12 at most.
    """
    ink = Ink()
    most = max(counts)
    waiting = [rank for rank, count in enumerate(counts) if count == most]
    behind = [rank for rank, count in enumerate(counts) if count < most]
    for rank, count in enumerate(counts):
        y = 8 + 38 * rank
        ink.text(0, y + 19, f"rank {rank}", 14.5, _colour(rank), weight=600)
        for number in range(1, most + 1):
            x = LEFT + 52.0 * (number - 1)
            if number <= count:
                colour = SENT if behind and number == most else _colour(rank)
                ink.box(x, y, 46, 28, colour, number, size=14)
            else:
                ink.rect(x, y + 1, 45, 26, "none", rx=4, stroke=RED, stroke_width=1.4, dash="3 3")
        state = "waits" if behind and count == most else "has not reached it" if behind else ""
        ink.text(LEFT + 52.0 * most + 8, y + 19, state, 13.5, RED if count < most else ink.soft)
    words = f"every rank has reached collective {most}"
    if behind:
        verb = "has" if len(behind) == 1 else "have"
        words = (
            f"collective {most}: {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}, "
            f"{_ranks(behind)} {verb} not reached it"
        )
    return Figure(ink, 8 + 38 * len(counts), words)


def _ranks(numbers):
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def restarts(attempts: "list[tuple]", saved: "list[int]") -> Figure:
    """The steps of each start of a job in which ranks died; steps that were lost are hollow.

    Args:
        attempts: (first step, last step that was done, the rank that died then or None) of each
            start.
        saved: steps with a checkpoint.
    """
    ink = Ink()
    width = min(48.0, (WIDTH - LEFT - 80) / max(stop for _, stop, _ in attempts))
    for i, (first, stop, dead_rank) in enumerate(attempts):
        y = 8 + 38 * i
        ink.text(0, y + 19, f"start {i + 1}", 14.5, weight=600)
        kept = stop
        if dead_rank is not None:
            kept = max([step for step in saved if step <= stop], default=0)
        for step in range(first, stop + 1):
            x = LEFT + (step - 1) * width
            if step <= kept:
                ink.box(x, y, width - 4, 28, BLUE, step, size=14)
            else:
                outline = dict(stroke=BLUE, stroke_width=1.2, dash="3 3")
                ink.rect(x, y + 1, width - 5, 26, "none", rx=4, **outline)
                ink.text(x + width / 2 - 2, y + 18, step, min(14, width * 0.4), BLUE, "middle", 600)
        if dead_rank is not None:
            x = LEFT + stop * width + 5
            ink.path(f"M{x:.1f} {y + 8}l12 12m0 -12l-12 12", stroke=RED, stroke_width=3)
            ink.text(x + 20, y + 19, f"rank {dead_rank} dies", 13.5, RED, weight=600)
    y = 8 + 38 * len(attempts)
    for step in saved:
        x = LEFT + step * width - 2
        row = next((i for i, (first, stop, _) in enumerate(attempts) if first <= step <= stop), 0)
        ink.line(x, 4 + 38 * row, x, y, 1.5, "4 3")
        ink.text(x, y + 12, "checkpoint", min(13, width * 0.3 + 3), ink.soft, "middle")
    words = []
    for i, (first, stop, dead_rank) in enumerate(attempts, 1):
        died = "" if dead_rank is None else f", then rank {dead_rank} died"
        words.append(f"start {i}: steps {first} to {stop}{died}")
    return Figure(ink, y + 20, "; ".join(words))
