"""Pictures are well-formed and say in text what they show; recorded runs are labelled, absent ones do no harm."""

import json
import xml.etree.ElementTree as xml

import pytest
import torch

import gpuaccel as ga
from gpuaccel import figures, recorded


def text_of(figure):
    bundle = figure._repr_mimebundle_()
    xml.fromstring(bundle["image/svg+xml"])
    assert bundle["text/plain"] == repr(figure)
    return bundle["text/plain"]


@pytest.mark.parametrize("n, block, per_thread, spare", [(21, 8, 1, 3), (16, 8, 1, 0), (21, 4, 4, 2), (1, 1, 1, 0)])
def test_threads_counts_the_spare_ones(n, block, per_thread, spare):
    words = text_of(figures.threads(n, block, per_thread))
    assert f"{n} elements" in words and (f"{spare} to spare" in words) == (spare > 0)


def test_bits_of_257_lose_their_last_one_in_bf16():
    assert "01000011100000001" in text_of(figures.bits(257.0))
    assert "lost" in figures.bits(257.0).drawn and "lost" not in figures.bits(256.0).drawn


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(3, 5),
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)),
        ga.Transformer(ga.preset("tiny", layers=1)),
    ],
)
def test_any_arena_can_be_drawn(module):
    arena = ga.Arena(module)
    assert f"{len(arena.segments)} tensors in {len(arena.blocks)} blocks" in text_of(figures.arena(arena))


def test_curves_leave_zeros_out_and_say_so_when_nothing_is_left():
    assert "b 0.5" in text_of(figures.curves({"a": [(1, 0.0), (2, 1e-9)], "b": [(1, 0.1), (2, 0.5)]}, "t", "x", "y"))
    assert "every value is 0" in text_of(figures.curves({"a": [(1, 0.0)]}, "t", "x", "y"))


def test_source_is_the_file_s_own_text_with_its_lines():
    shown = figures.source("accumulate", "accumulate_v1", GRAD_T="bf16")
    assert shown.text.startswith('extern "C" __global__ void accumulate_v1(') and shown.text.endswith("}")
    assert "registers" in shown.title and "<span" in shown._repr_html_()
    with pytest.raises(ga.CompileError, match="no kernel 'accumulate_v9'"):
        figures.source("accumulate", "accumulate_v9")


RESULT = {
    "gpu": "NVIDIA H200",
    "date": "2026-01-02",
    "torch": "2.11.0",
    "results": {
        "addition": {
            "elements": 10**6,
            "float32": {"v1": {"ms": 2.0, "of_copy_rate": 0.5, "times_foreach": 1.0}, "other": 3},
        }
    },
}


def test_recorded_runs_say_that_they_are_recorded_with_gpu_and_date(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    (tmp_path / "accumulate_h200.json").write_text(json.dumps(RESULT))
    (tmp_path / "accumulate_old.json").write_text(json.dumps({**RESULT, "date": "2025-01-01"}))
    (tmp_path / "accumulate_damaged.json").write_text("{")
    words = text_of(recorded.addition("float32"))
    assert words.startswith("Recorded, not run here: NVIDIA H200, 2026-01-02") and "50%" in words
    (tmp_path / "train_h200.json").write_text(
        json.dumps({**RESULT, "results": {"arena": {"tokens_per_s, 4": 1e5}, "note": 1}})
    )
    table = recorded.training()
    assert "NVIDIA H200" in str(table) and "100,000" in str(table) and "<table" in table._repr_html_()


def test_without_a_recorded_run_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "results_folder", lambda: tmp_path)
    assert "no recorded run in this checkout" in str(recorded.addition()) and "no recorded run in this checkout" in str(
        recorded.training()
    )
    assert recorded.recorded("accumulate").get("addition", "elements") is None
