"""Pictures of where rows go draw what the kernels really do, and say it in text."""

import json
import re

import pytest
import torch
from helpers import write_result
from pictures import text_of

import gpuaccel as ga
from gpuaccel.learn import recorded, token_figures

WORDS = "the cat and the dog and the bird".split()


def colours(figure, pattern):
    return re.findall(pattern, figure.drawn)


def test_rows_that_meet_are_counted_and_drawn():
    figure = token_figures.meeting(WORDS)
    assert (
        text_of(figure) == "8 rows of dout go to 5 rows of dwte; 'the' gets 3 of them"
        and figure.drawn.count("<path") == 8
    )


def test_rows_are_counted_and_land_in_their_places_in_order():
    figure = token_figures.counting(WORDS)
    assert text_of(figure) == (
        "counted: and: 2 rows; bird: 1 row; cat: 1 row; dog: 1 row; the: 3 rows; "
        "rows in their places: 2, 5, 7, 1, 4, 0, 3, 6"
    )
    assert re.findall(r">place (\d)<", figure.drawn) == ["0", "2", "3", "4", "5"]
    assert re.findall(r">row (\d)<", figure.drawn) == list("25714036")
    same = token_figures.counting(["a"] * 16)
    assert text_of(same).startswith("counted: a: 16 rows") and ">place 0<" in same.drawn


def test_the_sorted_order_is_stable_and_shows_what_begins_where():
    figure = token_figures.segments(WORDS)
    assert text_of(figure).startswith("5 runs")
    rows = re.findall(r'y="148.0"[^>]*>(\d+)<', figure.drawn)
    pieces = re.findall(r'y="182.0"[^>]*>(-?\d+)<', figure.drawn)
    found = ga.ops.find_segments(torch.tensor([4, 2, 0, 4, 3, 0, 4, 1]), 5)
    assert rows == [str(row) for row in found.order[:, 0].tolist()] and pieces == [
        str(kind) for kind in found.pieces.tolist()
    ]


@pytest.mark.parametrize(
    "lengths, count, meet", [([256], 8, 8), ([1, 33, 32, 64], 6, 4), ([5, 5], 2, 0), ([], 0, 0)]
)
def test_pieces_are_those_of_the_segments(lengths, count, meet):
    tokens = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
    )
    figure = token_figures.pieces({"some": ga.ops.find_segments(tokens, max(len(lengths), 1))})
    assert (
        f"{sum(lengths)} rows, {len(lengths)} run{'s' * (len(lengths) != 1)}, {count} pieces"
        in text_of(figure)
    )
    assert (
        len(colours(figure, r'height="22"')) == count
        and len(colours(figure, r'<path d="M[^"]*C')) == meet
    )


def test_bits_that_differ_are_counted_and_red():
    figure = token_figures.bits({"one": 1.0, "two": 1.0 + 2**-23})
    assert "1 bit differs (red)" in text_of(figure) and figure.drawn.count(token_figures.RED) == 2
    assert "every bit is the same" in text_of(token_figures.bits({"one": 0.1, "two": 0.1}))
    assert "bits differ" in text_of(token_figures.bits({"a": 1.0, "b": float("nan")}))


def test_two_runs_are_compared_step_by_step_and_no_difference_is_no_difference():
    run = torch.tensor([5.0, 4.0, 3.0])
    figure = token_figures.twice(
        {"atomics": (run, run + torch.tensor([0.0, 0.0, 0.25])), "ours": (run, run)}
    )
    assert (
        text_of(figure)
        == "Two runs with the same seed: atomics differ by 0.2 at most; ours differ in no step"
    )
    text_of(token_figures.twice({"ours": (run, run)}))
    text_of(token_figures.twice({"one step": (run[:1], run[:1])}))
    text_of(token_figures.twice({"NaN": (run, torch.tensor([5.0, float("nan"), float("nan")]))}))


def test_random_bits_carry_where_the_sum_of_the_lower_halves_is_65536_or_more():
    figure = token_figures.carry(256.25, [50_000, 57_343, 57_344])
    assert text_of(figure) == (
        "256.25, lower half 8,192: with 50,000, which does not carry, 256; "
        "with 57,343, which does not carry, 256; with 57,344, which carries, 258"
    )
    # 16 bits and the words are red where it carries
    assert figure.drawn.count(token_figures.RED) == 17
    assert "8,192 + 57,344 = 65,536: carries 1" in figure.drawn
    exact = text_of(token_figures.carry(258.0, [65_535]))
    assert exact == "258, lower half 0: with 65,535, which does not carry, 258"


def test_draws_are_counted_and_their_mean_is_given():
    words = text_of(token_figures.draws([256.0] * 7 + [258.0], 256.25, 256.0))
    assert words == (
        "Rounded at random: 256 7 times, 258 1 times; mean 256.25, exact 256.25, to the nearest 256"
    )
    text_of(token_figures.draws(torch.tensor([1.0]), 1.0))


def test_the_recorded_encoder_is_labelled_and_without_a_recording_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    assert str(recorded.encoder()) == "encoder: no recorded run in this checkout"
    ways = {
        "ours, segments in line": {"ms": {"replayed": 0.092, "launched": 0.2}, "differ": 0},
        "index_add_, fp32": {"ms": {"launched": 0.42}, "differ": 1234},
        "index_add_, bf16": {"ms": {"replayed": 0.1}},
    }
    found = {
        "tokens": 65536,
        "C": 768,
        "Zipf": {"variants": ways, "buckets_ms": 8.4},
        "all the same": {"variants": {"index_add_, fp32": {"ms": {"replayed": 1.46}}}},
    }
    write_result(
        tmp_path / "h200" / "encoder.json",
        json.dumps({"gpu": "NVIDIA H200", "date": "2026-01-02", "results": {"backward": found}}),
    )
    lines = str(recorded.encoder()).split("\n")
    assert lines[0] == (
        "Recorded, not run here: NVIDIA H200, 2026-01-02; 65,536 tokens, 768 "
        "channels in bf16, sums in fp32"
    )
    assert [re.split(r" {2,}", line) for line in lines[2:]] == [
        ["ours, segments in line", "0.092 ms", "-", "0"],
        ["index_add_, fp32", "0.420 ms", "1.460 ms", "1,234"],
        ["making the buckets, CPU", "8.4 ms", "-"],
    ]
