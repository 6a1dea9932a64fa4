"""A picture of several ranks: an all-reduce in a ring.

rank_figures.ring([[1, 2, 3], [10, 20, 30], [100, 200, 300]])
"""

from .drawing import (
    GREY,
    RUN_COLOURS,
    WIDTH,
    Figure,
    Ink,
    plural,
)

LEFT = 70
# What ranks send to each other, and sums over all ranks; the first five ranks have other colours.
SENT = RUN_COLOURS[5]


def _colour(rank) -> str:
    return RUN_COLOURS[rank % len(RUN_COLOURS)]


def _arrow(ink, x1, y1, x2, y2, colour, width=1.6):
    """A straight line with a head at its end. It points to the right."""
    ink.segment(x1, y1, x2, y2, colour, width)
    ink.path(
        f"M{x2 - 5:.1f} {y2 - 4:.1f}L{x2:.1f} {y2:.1f}L{x2 - 5:.1f} {y2 + 4:.1f}",
        "none",
        colour,
        width,
    )


def ring(values: list[list[float]]) -> Figure:
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
