"""Pictures of several ranks: who gets which batch, what a token weighs, what is sent while backward runs, whose weights are equal, who died when.

    >>> rank_figures.shards(range(9), 2, seed=1)              # how ga.shard deals batches
    >>> rank_figures.weights([2, 6])                          # a token's weight in a mean of means, and in the mean
    >>> rank_figures.overlap({"buckets": [exchange.watch(step, batch), ...]})      # spans of each rank
    >>> rank_figures.hashes(names, [hashes_of_rank_0, hashes_of_rank_1])              # of weight_hashes
    >>> rank_figures.restarts([(1, 8, 1), (7, 12, None)], saved=[3, 6])               # (first step, last step, who died then)

Each is a figures.Figure.
"""

from ...distributed.trace import sent_early
from ...training.data import shard
from .figures import BLUE, GREEN, GREY, ORANGE, RED, Figure, _title
from .picture import RUN_COLOURS, WIDTH, _Ink, _text_width, _time_axis, microseconds

LEFT = 70
_WORK = {
    "forward": (BLUE, 0.55, "forward"),
    "backward": (BLUE, 1.0, "backward"),
    "wait": (RED, 0.85, "waits for sums"),
    "optimizer": (GREEN, 0.9, "optimizer"),
}


def _colour(rank) -> str:
    return RUN_COLOURS[rank % len(RUN_COLOURS)]


def _box(ink, x, y, wide, high, colour, words="", opacity=1.0, size=12):
    ink.out.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="4" fill="{colour}" opacity="{opacity:g}"/>'
    )
    if words != "":
        size *= min(1.0, (wide - 4) / max(_text_width(words, size), 1))
        ink.text(x + wide / 2, y + high / 2 + 4, words, f"{size:.1f}", "#ffffff", "middle", 600)


def _dashed(ink, x, y, wide, high, colour):
    ink.out.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="4" fill="none" stroke="{colour}" stroke-width="1.2" '
        'stroke-dasharray="3 3" opacity="0.8"/>'
    )


# ---- batches and tokens -------------------------------------------------------------------------


def shards(batches, ranks: int, seed: "int | None" = None) -> Figure:
    """A list of batches (what names them), and how ga.shard deals it to the ranks in one epoch. For some 20 batches."""
    batches = list(batches)
    shares = [shard(list(enumerate(batches)), rank, ranks, seed=seed) for rank in range(ranks)]
    owner = {
        pair[0]: rank for rank, share in enumerate(shares) for pair in share if pair is not None
    }
    ink, wide = _Ink(themed=False), min(60.0, (WIDTH - LEFT) / len(batches))
    ink.text(0, 28, "batches", 12.5, weight=600)
    for place, name in enumerate(batches):
        _box(ink, LEFT + place * wide, 10, wide - 5, 26, _colour(owner[place]), name)
    for rank, share in enumerate(shares):
        y = 62 + 36 * rank
        ink.text(0, y + 18, f"rank {rank}", 12.5, _colour(rank), weight=600)
        for nth, pair in enumerate(share):
            if pair is None:
                _dashed(ink, LEFT + nth * wide, y + 1, wide - 6, 24, _colour(rank))
            else:
                _box(ink, LEFT + nth * wide, y, wide - 5, 26, _colour(rank), pair[1])
    missing = sum(pair is None for share in shares for pair in share)
    for nth in range(len(shares[0])):
        ink.text(LEFT + (nth + 0.5) * wide - 2.5, 74 + 36 * ranks, nth + 1, 11, ink.soft, "middle")
    ink.text(0, 74 + 36 * ranks, "step", 11, ink.soft)
    told = f"{len(batches)} batches for {ranks} rank{'s' * (ranks > 1)}, {len(shares[0])} steps" + (
        f"; in the last one {missing} rank{'s have' if missing > 1 else ' has'} none (dashed)"
        if missing
        else ""
    )
    return Figure(ink, 82 + 36 * ranks, told)


def weights(counts: "list[int]") -> Figure:
    """counts: tokens of each rank. A box per token, as wide as its weight: in the mean of the ranks' means, and in the mean over all tokens."""
    ink, total, ranks, left = _Ink(themed=False), sum(counts), sum(1 for n in counts if n), 118
    room = WIDTH - left
    for y, name, weight in (
        (8, "mean of means", lambda n: 1 / (ranks * n)),
        (66, "mean of all", lambda n: 1 / total),
    ):
        ink.text(0, y + 20, name, 12.5, weight=600)
        x = float(left)
        for rank, n in enumerate(counts):
            for _ in range(n):
                wide = room * weight(n)
                _box(
                    ink,
                    x,
                    y,
                    max(wide - 3, 0.5),
                    30,
                    _colour(rank),
                    f"1/{round(1 / weight(n))}" if wide > 22 else "",
                    size=11.5,
                )
                x += wide
    x = float(left)
    for rank, n in enumerate(counts):
        ink.text(x, 118, f"rank {rank}: {n} token{'s' * (n != 1)}", 12, _colour(rank), weight=600)
        x += _text_width(f"rank {rank}: {n} tokens", 12) + 24
    per = ", ".join(
        f"1/{ranks * n} each of rank {rank}'s {n}" for rank, n in enumerate(counts) if n
    )
    return Figure(
        ink,
        126,
        f"What a token weighs: in the mean of means {per}; in the mean of all 1/{total} each",
    )


# ---- what is sent when --------------------------------------------------------------------------


def overlap(
    runs: "dict[str, list]",
    title: str = "One step: what each rank computes, and what is on its way",
) -> Figure:
    """runs: name -> for each rank its spans (exchange.watch). All on one scale; a rank's two lanes below each other, buckets in rows where they overlap."""
    ink, right, y, words = _Ink(themed=False), WIDTH - 8, 58.0, []
    longest = max(
        (s.stop for ranks in runs.values() for spans in ranks for s in spans), default=1.0
    )
    _title(ink, 16, title)
    x = 0.0
    for colour, opacity, meaning in (*_WORK.values(), (ORANGE, 1.0, "a bucket on its way")):
        ink.out.append(
            f'<rect x="{x:.1f}" y="27" width="10" height="10" rx="2.5" fill="{colour}" opacity="{opacity}"/>'
        )
        ink.text(x + 15, 36, meaning, 11.5, ink.soft)
        x += _text_width(meaning, 11.5) * 0.92 + 34

    def at(us):
        return LEFT + us / longest * (right - LEFT)

    for name, ranks in runs.items():
        early, count = min(map(sent_early, ranks)), sum(s.lane == "sends" for s in ranks[0])
        waits = max(sum(s.stop - s.start for s in spans if s.name == "wait") for spans in ranks)
        told = (
            f"{early} of {count} bucket{'s' * (count != 1)} on the way before backward is over"
            + (f", {microseconds(waits)} of waiting at most" if waits else "")
        )
        words.append(f"{name}: {told}")
        ink.text(0, y, name, 12.5, weight=600)
        ink.text(_text_width(name, 12.5) + 14, y, told, 12, ink.soft)
        y += 10
        for rank, spans in enumerate(ranks):
            ink.text(LEFT - 10, y + 13, f"rank {rank}", 11, _colour(rank), "end", 600)
            for s in spans:
                if s.lane == "computes" and s.name in _WORK:
                    ink.out.append(
                        f'<path d="M{at(s.start):.1f} {y}h{max(at(s.stop) - at(s.start) - 0.5, 0.7):.1f}v18h'
                        f'{-max(at(s.stop) - at(s.start) - 0.5, 0.7):.1f}z" fill="{_WORK[s.name][0]}" opacity="{_WORK[s.name][1]}"/>'
                    )
            y += 21
            rows = []  # where the last bucket of each row ends
            for s in (s for s in spans if s.lane == "sends"):
                row = next((r for r, end in enumerate(rows) if end <= at(s.start)), len(rows))
                rows[row : row + 1] = [at(s.stop)]
                wide = max(at(s.stop) - at(s.start), 1.5)
                ink.out.append(
                    f'<rect x="{at(s.start):.1f}" y="{y + 9 * row:.1f}" width="{wide:.1f}" height="7" rx="2" fill="{ORANGE}"/>'
                )
            y += 9 * max(len(rows), 1) + 7
        y += 18
    _time_axis(ink, longest, LEFT, right, y)
    return Figure(ink, y + 14, f"{title}. " + "; ".join(words))


# ---- weights, and restarts ----------------------------------------------------------------------


def hashes(names: "list[str]", ranks: "list[list[int]]") -> Figure:
    """names of the tensors; for each rank a hash of each (distributed/agreement.py: weight_hashes). A column is red where the ranks differ."""
    ink, wide = _Ink(themed=False), (WIDTH - LEFT) / max(len(names), 1)
    wrong = [nth for nth, column in enumerate(zip(*ranks)) if len(set(column)) > 1]
    for rank, row in enumerate(ranks):
        y = 8 + 34 * rank
        ink.text(0, y + 19, f"rank {rank}", 12.5, _colour(rank), weight=600)
        for nth, value in enumerate(row):
            own = value != ranks[0][nth]
            colour = (
                RED if own else RUN_COLOURS[value % len(RUN_COLOURS)] if nth not in wrong else GREY
            )
            _box(
                ink,
                LEFT + nth * wide,
                y,
                max(wide - 2, 1),
                28,
                colour,
                f"{value & 0xFFFF:04x}" if wide >= 34 else "",
                size=11,
            )
    y = 26 + 34 * len(ranks)
    told = f"{len(names)} tensors, {len(ranks)} ranks: " + (
        f"{names[wrong[0]]} differs"
        + (f", and {len(wrong) - 1} more" if wrong[1:] else "")
        + " (red)"
        if wrong
        else "every hash is the same"
    )
    ink.text(LEFT, y, told, 12, ink.soft)
    return Figure(ink, y + 8, told)


def restarts(attempts: "list[tuple]", saved: "list[int]") -> Figure:
    """attempts: (first step, last step that was done, the rank that died then or None) of each start; saved: steps with a checkpoint."""
    ink, last = _Ink(themed=False), max(stop for _, stop, _ in attempts)
    wide = min(48.0, (WIDTH - LEFT - 80) / last)
    for nth, (first, stop, died) in enumerate(attempts):
        y = 8 + 38 * nth
        ink.text(0, y + 19, f"start {nth + 1}", 12.5, weight=600)
        lost = max([s for s in saved if s <= stop], default=0) if died is not None else stop
        for step in range(first, stop + 1):
            _box(
                ink,
                LEFT + (step - 1) * wide,
                y,
                wide - 4,
                28,
                _colour(nth),
                step,
                1.0 if step <= lost else 0.35,
            )
        if died is not None:
            x = LEFT + stop * wide + 5
            ink.out.append(
                f'<path d="M{x:.1f} {y + 8}l12 12m0 -12l-12 12" stroke="{RED}" stroke-width="3" fill="none"/>'
            )
            ink.text(x + 20, y + 19, f"rank {died} dies", 12, RED, weight=600)
    y = 8 + 38 * len(attempts)
    for step in saved:
        x = LEFT + step * wide - 2
        ink.line(x, 2, x, y, 1.5, "4 3")
        ink.text(x, y + 12, "checkpoint", min(11, wide * 0.3 + 3), ink.soft, "middle")
    told = "; ".join(
        f"start {n}: steps {first} to {stop}"
        + (f", then rank {died} died" if died is not None else "")
        for n, (first, stop, died) in enumerate(attempts, 1)
    )
    return Figure(ink, y + 20, told)
