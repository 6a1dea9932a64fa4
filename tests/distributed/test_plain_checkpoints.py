"""Checkpoints of several ranks whose optimizer is not sharded: one file, written by rank 0."""

import os

import pytest
import rank_checks as checks


def test_a_loop_of_ones_own_goes_on_bit_for_bit_on_every_rank(workers, tmp_path):
    """Ranks draw other dropout masks, and each goes on with its own generator."""
    results = workers(checks.plain_save_and_resume, 4, folder=str(tmp_path))
    steps, same, same_mean, draws = zip(*results)
    assert steps == (1,) * 4 and same == (True,) * 4
    assert same_mean == (True, False, False, False), "buffers are those of rank 0"
    assert len(set(map(tuple, draws))) == 4, "the ranks have one generator"
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    "how, message",
    [
        ("disk", "cannot be written"),
        ("extra", "extra"),
        ("paths", "expected one path, at which rank 0 writes"),
    ],
)
def test_an_error_of_one_rank_is_one_of_all(workers, how, message, tmp_path):
    errors = workers.errors(checks.plain_save_that_fails, 4, folder=str(tmp_path), how=how)
    assert [kind for kind, _ in errors] == ["CheckpointError"] * 4
    assert all(message in words for _, words in errors), errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_that_sums_nothing_over_its_ranks_warns_once(workers, wrapped):
    for warnings in workers(checks.step_without_distributed, 4, wrapped=wrapped):
        assert len(warnings) == (0 if wrapped else 1), warnings
        assert wrapped or "distributed=ga.Distributed()" in warnings[0]
