"""Recorded results: the README shows them as they are, and those whose sources have changed are named."""
import importlib.util
import json
import pathlib
import sys
import warnings

import pytest

import gpuaccel as ga
from gpuaccel.backend import find_compiler
from gpuaccel.models import Config

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


def test_every_table_of_the_readme_has_a_result():
    readme, text = module("readme"), (ROOT / "README.md").read_text()
    assert [name for name in readme.TABLES if f"<!-- {name}: made by" in text and readme.load(name) is None] == []


@pytest.fixture
def on_cpu(monkeypatch):
    """clip.py and tail.py where there is no GPU: every function runs once, nothing is timed, a graph is the function itself."""
    common, clip = module("common"), module("clip")
    tail = module("tail")

    def once(functions, *_):
        for function in functions.values():
            function()
        return dict.fromkeys(functions, 1.0)

    def captured(run, prepare=lambda: None):
        prepare()
        run()
        return run
    monkeypatch.setattr(common, "milliseconds", once)
    monkeypatch.setattr(tail, "CAPTURABLE", {})
    for script in (clip, tail):
        monkeypatch.setattr(script, "DEVICE", "cpu")
        monkeypatch.setattr(script, "captured", captured)
        monkeypatch.setattr(script, "wall", lambda run, *_: once({"": run})[""])
    with ga.use_backend("simt"):
        yield clip, tail
    del sys.modules["clip"], sys.modules["tail"]


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmarks_of_clipping_and_of_the_tail_run(on_cpu):
    import torch
    clip, tail = on_cpu
    config = Config(vocab=31, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=8)
    found = clip.large(config, torch.float32)
    assert max(found["norm_error"].values()) < 1e-6
    assert clip.large(config, torch.bfloat16)["norm_error"][clip.OURS] < 1e-6
    assert clip.small(10, 10).keys() == tail.small(10, 10).keys()
    for dtype in (torch.float32, torch.bfloat16):
        assert tail.tail(config, dtype)["apart_after_one"] < 1e-6
    for rows in tail.drift(config, 3).values():
        assert max(m["max"] for m in rows.values()) < 1e-5
