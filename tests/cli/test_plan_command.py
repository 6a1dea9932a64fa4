"""gpuaccel plan: what it prints, and what it refuses."""

import re

import pytest

from gpuaccel.cli import main
from gpuaccel.distributed.plan import predict
from gpuaccel.learn import planning, recorded


def run(capsys, *words):
    status = main(["plan", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def numbers(out):
    """Name of the sums -> milliseconds of a step, as printed."""
    return {
        name: float(ms) for name, ms in re.findall(r"^((?:fp32|bf16), \S+) +([\d.]+) ms", out, re.M)
    }


def test_it_prints_the_predictions_and_where_its_numbers_are_from(capsys):
    status, out, _ = run(capsys, "--gpus", 64, "--per-machine", 8)
    assert status == 0 and "64 GPUs, 8 machines: predicted, not measured" in out
    known = planning.inputs()
    steps = {
        name: predict(known.workload, known.machine, 64, **options).step_ms
        for name, options in planning.SUMS.items()
    }
    assert numbers(out) == {name: pytest.approx(ms, abs=0.06) for name, ms in steps.items()}
    for words in ("measured: ", "fitted to rows on two GPUs: ", "assumed: ", "failures of a rank"):
        assert words in out
    assert "entered: " not in out


def test_more_gpus_take_longer_and_one_machine_has_no_network(capsys):
    few, many = (numbers(run(capsys, "--gpus", n)[1]) for n in (8, 1024))
    assert few["fp32, peer-to-peer"] < many["fp32, hierarchical"]
    slow = numbers(run(capsys, "--gpus", 8, "--network-GBs", 0.1)[1])
    assert slow == few


def test_a_model_that_was_not_measured_needs_its_step(capsys):
    status, _, err = run(capsys, "--gpus", 8, "--model", "gpt2-124m")
    assert status == 1 and "--step-ms" in err and err.count("\n") == 1
    status, out, _ = run(capsys, "--gpus", 8, "--model", "gpt2-124m", "--step-ms", 41)
    assert status == 0 and "one GPU alone: 41.0 ms" in out and "entered: " in out


def test_without_recorded_runs_step_and_link_are_entered(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    status, _, err = run(capsys, "--gpus", 16)
    assert status == 1 and "--step-ms" in err
    status, _, err = run(capsys, "--gpus", 16, "--step-ms", 90)
    assert status == 1 and "--link-GBs" in err
    status, out, _ = run(capsys, "--gpus", 16, "--step-ms", 90, "--link-GBs", 300)
    assert status == 0 and "measured: " not in out and "fitted" not in out


@pytest.mark.parametrize(
    "words, expected",
    [
        (("--gpus", 12), "multiple of the 8"),
        (("--gpus", 8, "--model", "big"), "preset is 'big'"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, words, expected):
    status, _, err = run(capsys, *words)
    assert status == 1 and expected in err and err.count("\n") == 1


def test_wrong_usage(capsys):
    assert run(capsys)[0] == 2
    assert run(capsys, "--gpus", 0)[0] == 2
    assert run(capsys, "--gpus", 8, "--step-ms", -1)[0] == 2
