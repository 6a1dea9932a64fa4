"""Pictures of ranks draw what the package really does, and say it in text."""

import json
import re

import pytest
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


def test_what_a_dead_rank_lost_is_pale():
    figure = rank_figures.restarts([(1, 8, 1), (7, 12, None)], saved=[3, 6, 9])
    assert text_of(figure) == "start 1: steps 1 to 8, then rank 1 died; start 2: steps 7 to 12"
    assert (
        figure.drawn.count('opacity="0.35"') == 2
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
    (tmp_path / "ddp_2gpus_h200.json").write_text(
        json.dumps(
            {
                "gpu": "NVIDIA H200",
                "date": "2026-01-02",
                "results": {"2": {"ranks": 2, "groups": families}},
            }
        )
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
    (tmp_path / "ddp_2gpus_h200.json").write_text(
        json.dumps({"gpu": "NVIDIA H200", "date": "2026-01-02", "results": results})
    )
    lines = str(recorded.ddp()).split("\n")
    assert lines[0].endswith("T=1024; torch's fastest DDP: torch, captured") and lines[1].endswith(
        "  of torch's fastest DDP"
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
