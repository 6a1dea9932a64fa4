"""Pictures of ranks draw what the package really does, and say it in text."""

import re

import pytest
from pictures import text_of

from gpuaccel.learn import rank_figures
from gpuaccel.measure import Span


def boxes(figure, y):
    """(x, width) of the boxes at this height."""
    return [
        (float(x), float(wide))
        for x, wide in re.findall(rf'<rect x="([\d.]+)" y="{y}" width="([\d.]+)"', figure.drawn)
    ]


def names_at(figure, y):
    return re.findall(rf'y="{y:.1f}"[^>]*>([^<]*)<', figure.drawn)


def spans(early):
    start = 60.0 if early else 110.0
    return [
        Span("computes", "forward", 0, 30),
        Span("computes", "backward", 30, 100),
        Span("sends", "bucket 0", start, start + 25),
        Span("sends", "bucket 1", start + 20, start + 45),
        Span("computes", "wait", 120, 150),
        Span("computes", "optimizer", 150, 160),
    ]


def numbers_in(figure):
    """The numbers in the boxes of a ring, column by column: {(x, y): number}."""
    found = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"[^>]*font-weight="600"[^>]*>(\d+)<', figure.drawn
    )
    return {(float(x), float(y)): int(number) for x, y, number in found}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_ends_with_the_sums_on_every_rank(ranks):
    values = [[10**rank * (piece + 1) for piece in range(ranks)] for rank in range(ranks)]
    figure = rank_figures.ring(values)
    rounds = 2 * (ranks - 1)
    sums = [sum(column) for column in zip(*values)]
    assert text_of(figure) == (
        f"{ranks} ranks, {rounds} rounds: first pieces are added, then sums are copied; at the end "
        f"each rank has {sums}"
    )
    numbers = numbers_in(figure)
    assert len(numbers) == ranks * ranks * (rounds + 1)
    for rank, y in enumerate(sorted({y for _, y in numbers})):
        row = [numbers[place] for place in sorted(place for place in numbers if place[1] == y)]
        assert row[:ranks] == values[rank] and row[-ranks:] == sums
    # one arrow and one outline for each rank and round
    assert figure.drawn.count("<line") == ranks * rounds
    assert figure.drawn.count('fill="none" stroke=') - ranks * rounds == ranks * rounds


def test_a_ring_sends_one_piece_to_the_next_rank_in_each_round():
    columns = rank_figures._ring_rounds([[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    assert [heading for heading, _, _ in columns] == ["start", "add", "add", "copy", "copy"]
    for (_, before, _), (_, after, moves) in zip(columns, columns[1:]):
        receivers = {receiver: piece for _, (receiver, piece) in moves}
        assert [(sender + 1) % 3 for sender, _ in moves] == list(receivers) and len(receivers) == 3
        for rank in range(3):
            changed = [piece for piece in range(3) if before[rank][piece] != after[rank][piece]]
            assert changed == [receivers[rank]]
