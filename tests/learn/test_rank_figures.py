"""Pictures of ranks draw what the package really does, and say it in text."""

import json
import re

import pytest
from helpers import write_result
from pictures import text_of

import gpuaccel as ga
from gpuaccel.learn import rank_figures, recorded
from gpuaccel.measure import Span


def boxes(figure, y):
    """(x, width) of the boxes at this height."""
    return [
        (float(x), float(wide))
        for x, wide in re.findall(rf'<rect x="([\d.]+)" y="{y}" width="([\d.]+)"', figure.drawn)
    ]


def names_at(figure, y):
    return re.findall(rf'y="{y:.1f}"[^>]*>([^<]*)<', figure.drawn)


@pytest.mark.parametrize(
    "count, ranks, missing",
    [
        (9, 2, "; in the last one 1 rank has none (dashed)"),
        (8, 2, ""),
        (9, 4, "; in the last one 3 ranks have none (dashed)"),
        (1, 1, ""),
    ],
)
def test_batches_are_drawn_as_they_are_dealt(count, ranks, missing):
    figure = rank_figures.shards(range(count), ranks, seed=5)
    steps = -(-count // ranks)
    assert (
        text_of(figure)
        == f"{count} batches for {ranks} rank{'s' * (ranks > 1)}, {steps} steps{missing}"
    )
    for rank in range(ranks):
        want = [
            str(b) for b in ga.training.shard(range(count), rank, ranks, seed=5) if b is not None
        ]
        assert names_at(figure, 62 + 36 * rank + 17) == want
    assert figure.drawn.count('stroke-dasharray="3 3"') == steps * ranks - count


def test_a_token_is_as_wide_as_its_weight():
    figure = rank_figures.weights([2, 6])
    assert text_of(figure) == (
        "What a token weighs: in the mean of means 1/4 each of rank 0's 2, 1/12 "
        "each of rank 1's 6; in the mean of all 1/8 each"
    )
    means, of_all = (boxes(figure, y) for y in (8, 66))
    assert len(means) == len(of_all) == 8 and {wide for _, wide in of_all} == {of_all[0][1]}
    assert (means[0][1] + 3) / (means[-1][1] + 3) == pytest.approx(3.0, rel=0.01)
    assert "rank 1's" not in text_of(
        rank_figures.weights([3, 0])
    )  # a rank without tokens has no mean


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


def test_buckets_on_their_way_are_drawn_and_counted():
    figure = rank_figures.overlap(
        {"late": [spans(False)] * 2, "early": [spans(True)] * 2}, title="A step"
    )
    assert text_of(figure) == (
        "A step. late: 0 of 2 buckets on the way before backward is over, 30 µs "
        "of waiting at most; early: 2 of 2 buckets on the way before backward is "
        "over, 30 µs of waiting at most"
    )
    assert (
        len(re.findall(r'height="7" rx="2"', figure.drawn)) == 8
        and len(re.findall(r'<path d="M', figure.drawn)) == 16
    )
    text_of(rank_figures.overlap({}))


def test_weights_that_differ_are_named_and_red():
    names = ["embedding.weight", "head.weight", "norm.weight"]
    assert (
        text_of(rank_figures.hashes(names, [[1, 2, 3]] * 3))
        == "3 tensors, 3 ranks: every hash is the same"
    )
    figure = rank_figures.hashes(names, [[1, 2, 3], [1, 9, 3]])
    assert (
        text_of(figure) == "3 tensors, 2 ranks: head.weight differs (red)"
        and figure.drawn.count(f'fill="{rank_figures.RED}"') == 1
    )
    assert "head.weight differs, and 1 more" in text_of(
        rank_figures.hashes(names, [[1, 2, 3], [1, -9, -4]])
    )


def test_a_step_of_two_ranks_ends_with_one_weight():
    figure = rank_figures.one_step([2.0, 4.0])
    assert text_of(figure) == (
        "2 ranks with gradients 2 and 4: after the all-reduce each has 6, and each has the "
        "weight 0.4"
    )
    assert figure.drawn.count(">1 - 0.1 x 6 = 0.4<") == 2
    assert "after the all-reduce each has -1.5" in text_of(rank_figures.one_step([0.5, 1.0, -3.0]))


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


def test_two_orders_of_addition_are_drawn_with_fp32_sums():
    figure = rank_figures.orders([[1e8, -1e8], [1.0, 1.0]])
    assert text_of(figure) == ("4 gradients of 2 ranks: added in global order 2, each rank first 0")
    sums = re.findall(r'y="54.0"[^>]*>([-\d,]+)<', figure.drawn)
    assert sums == ["100,000,000", "0", "1", "2"]
    sums = re.findall(r'y="124.0"[^>]*>([-\d,]+)<', figure.drawn)
    assert sums == ["100,000,000", "100,000,000", "-100,000,000", "-100,000,000"]
    assert "added in global order 7.5, each rank first 7.5" in text_of(
        rank_figures.orders([[1.0, 2.0, 4.5]])
    )


def test_heartbeats_name_the_ranks_that_others_wait_for():
    figure = rank_figures.heartbeats([4, 3])
    assert text_of(figure) == "collective 4: rank 0 waits, rank 1 has not reached it"
    assert names_at(figure, 8 + 18) == list("1234")
    assert names_at(figure, 46 + 18) == list("123")
    assert figure.drawn.count('stroke-dasharray="3 3"') == 1
    assert text_of(rank_figures.heartbeats([2, 5, 5, 4])) == (
        "collective 5: ranks 1, 2 wait, ranks 0, 3 have not reached it"
    )
    assert text_of(rank_figures.heartbeats([3, 3])) == "every rank has reached collective 3"


def test_what_a_dead_rank_lost_is_hollow():
    figure = rank_figures.restarts([(1, 8, 1), (7, 12, None)], saved=[3, 6, 9])
    assert text_of(figure) == "start 1: steps 1 to 8, then rank 1 died; start 2: steps 7 to 12"
    assert (
        figure.drawn.count('stroke-dasharray="3 3"') == 2
        and names_at(figure, 8 + 18) == list("12345678")
        and figure.drawn.count(">checkpoint<") == 3
    )
    assert text_of(rank_figures.restarts([(1, 300, None)], saved=[])) == "start 1: steps 1 to 300"


def test_the_recorded_ranks_are_labelled_and_without_a_recording_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    assert str(recorded.ddp()) == "ddp_2gpus: no recorded run in this checkout"

    def row(share, exposed):
        return {
            "ms": 100.0,
            "tokens_per_s_per_gpu": 1e5,
            "of_one_gpu": share,
            "exposed_ms": exposed,
        }

    families = {
        "ours, replayed": {
            "4": {
                "one GPU": row(1.0, 0.0),
                "each for itself": row(1.0, 0.0),
                "all-reduce": row(0.975, 1.25),
            },
            "1": {"all-reduce": row(0.9, 1.5)},
        },
        "torch, eager": {"4": {"DDP": row(0.79, 20.0)}},
    }
    write_result(
        tmp_path / "h200" / "ddp_2gpus.json",
        json.dumps(
            {
                "gpu": "NVIDIA H200",
                "date": "2026-01-02",
                "results": {"2": {"ranks": 2, "groups": families}},
            }
        ),
    )
    lines = str(recorded.ddp()).split("\n")
    assert lines[0] == (
        "Recorded, not run here: NVIDIA H200, 2026-01-02; llama-350m, batch 4 on each GPU, T=1024"
    )
    assert [re.split(r" {2,}", line) for line in lines[2:]] == [
        ["2 GPUs: ours, replayed, all-reduce", "100K, 97.5%", "100K, 90.0%", "1.2 ms"],
        ["2 GPUs: torch, eager, DDP", "100K, 79.0%", "-", "-"],
    ]

    families["torch, captured"] = {"4": {"DDP": row(0.94, 5.0)}}
    families["ours, replayed"]["4"]["all-reduce"]["times_torch"] = 1.25
    families["ours, replayed"]["1"]["all-reduce"]["times_torch"] = 1.3456
    results = {
        "2": {
            "ranks": 2,
            "groups": families,
            "fastest_torch": {"4": "torch, captured", "1": "torch, captured"},
        }
    }
    write_result(
        tmp_path / "h200" / "ddp_2gpus.json",
        json.dumps({"gpu": "NVIDIA H200", "date": "2026-01-02", "results": results}),
    )
    lines = str(recorded.ddp()).split("\n")
    assert lines[0].endswith("T=1024; torch's fastest: torch, captured") and lines[1].endswith(
        "  of torch's fastest"
    )
    assert [re.split(r" {2,}", line) for line in lines[2:]] == [
        [
            "2 GPUs: ours, replayed, all-reduce",
            "100K, 97.5%",
            "100K, 90.0%",
            "1.2 ms",
            "1.25x, 1.35x",
        ],
        ["2 GPUs: torch, eager, DDP", "100K, 79.0%", "-", "-", "-"],
        ["2 GPUs: torch, captured, DDP", "100K, 94.0%", "-", "5.0 ms", "-"],
    ]
