"""Recorded results: the README shows them as they are, and those whose sources have changed are named."""
import importlib.util
import json
import pathlib
import sys
import warnings

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_the_readme_shows_the_recorded_results():
    text = (ROOT / "README.md").read_text()
    assert module("readme").filled(text) == text, "run python benchmarks/readme.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_result_says_what_it_measured(path):
    common, result = module("common"), json.loads(path.read_text())
    missing = {"gpu", "driver", "torch", "nvrtc", "commit", "date", "sources", "results"} - result.keys()
    assert not missing, f"{path.name} lacks {missing}"
    changed = common.stale(result)
    if changed:
        warnings.warn(f"{path.name} is stale, measured on {result['date']} before changes to {', '.join(changed)}: "
                      f"run python benchmarks/{result['benchmark']}.py on a GPU")


def test_a_changed_source_makes_a_result_stale(tmp_path, monkeypatch):
    common = module("common")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "kernel.cu").write_text("one")
    result = {"source_patterns": ["*.cu"], "sources": common.digests(["*.cu"])}
    assert common.stale(result) == []
    (tmp_path / "kernel.cu").write_text("two")
    (tmp_path / "new.cu").write_text("three")
    assert common.stale(result) == ["kernel.cu", "new.cu"]
