"""Recorded results: those whose sources have changed are named. The scripts run, and their results have tables."""

import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import sys
import textwrap
import threading
import time
import types
import warnings

import pytest
import torch

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.training.models import Config, preset

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# ---- results and what they measured -------------------------------------------------------------


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_a_result_says_what_it_measured(path):
    result = json.loads(path.read_text())
    facts = {"benchmark", "gpu", "driver", "torch", "nvrtc", "commit", "date", "results"}
    assert facts <= result.keys()
    assert result.keys() & {"fingerprints", "sources"}
    stale = module("fingerprints").staleness(result)
    if stale:
        warnings.warn(f"{path.name} was {stale}")


FILES = {
    "benchmarks/probe.py": """
        import common
        from helper import measure
        from gpuaccel.optim.clip import clip_
        def show_result(r):
            print(r)
        """,
    "benchmarks/common.py": "TABLE = 1",
    "benchmarks/helper.py": "ROUNDS = 3",
    "benchmarks/other.py": "import gpuaccel.other",
    "gpuaccel/__init__.py": "from . import other",
    "gpuaccel/other.py": "",
    "gpuaccel/optim/clip.py": """
        from ..ops import scale
        def clip_(grads, limit):
            return scale.scale_(grads, 1 / limit)
        """,
    "gpuaccel/ops/scale.py": """
        class Options:
            blocks: int
            threads: int = 256
        def scale_(x, factor):
            from ..simt import run
            return Kernel("scale", "scale_v1")(x, factor)
        """,
    "gpuaccel/simt.py": "",
    "kernels_cu/scale.cu": """
        #define THREADS 256
        __global__ void scale_v1(float* x, float factor, int n) { x[threadIdx.x] *= factor; }
        """,
    "kernels_cu/common.cuh": "typedef unsigned short bf16;",
    "kernels_cu/unused.cu": "__global__ void unused() {}",
}


@pytest.fixture
def probe(tmp_path):
    """A checkout with one benchmark, its result, and edit(path, old, new), which returns what is stale."""
    fingerprints = module("fingerprints")
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    result = {"benchmark": "probe", "fingerprints": fingerprints.fingerprints("probe", tmp_path)}
    result["date"] = "2026-11-23"

    def edit(path, old, new):
        text = (tmp_path / path).read_text()
        assert old in text
        (tmp_path / path).write_text(text.replace(old, new))
        return fingerprints.changed(result, tmp_path)

    return types.SimpleNamespace(root=tmp_path, result=result, edit=edit)


def test_the_measured_modules_and_kernels_are_derived_from_the_imports(probe):
    assert list(probe.result["fingerprints"]) == [
        "benchmarks/helper.py",
        "benchmarks/probe.py",
        "gpuaccel/ops/scale.py",
        "gpuaccel/optim/clip.py",
        "kernels_cu/common.cuh",
        "kernels_cu/scale.cu",
    ]


@pytest.mark.parametrize(
    "path, old, new",
    [
        ("gpuaccel/optim/clip.py", "    return", "    # why\n    return"),
        ("gpuaccel/optim/clip.py", "    return", "    '''One sentence.'''\n    return"),
        ("gpuaccel/optim/clip.py", "(grads, limit):", "(grads, limit: float) -> 'Tensor':"),
        (
            "gpuaccel/optim/clip.py",
            "(grads, 1 / limit)",
            "(\n        grads,\n        (1/limit),\n    )",
        ),
        ("gpuaccel/ops/scale.py", "threads: int", "threads: 'int | None'"),
        ("gpuaccel/simt.py", "", "CHANGED = 1"),
        ("benchmarks/probe.py", "print(r)", "print(len(r))"),
        ("benchmarks/common.py", "1", "2"),
        ("kernels_cu/scale.cu", "{ x", "{ // why\n /* and\nhow */ x"),
        (
            "kernels_cu/scale.cu",
            " { x[threadIdx.x] *= factor; }",
            "\n{\n    x[ threadIdx.x ]*=factor;\n}",
        ),
        ("kernels_cu/unused.cu", "{}", "{ ; }"),
    ],
)
def test_comments_docstrings_annotations_and_layout_do_not_age_a_result(probe, path, old, new):
    assert probe.edit(path, old, new) == []


@pytest.mark.parametrize(
    "path, old, new",
    [
        ("gpuaccel/optim/clip.py", "1 / limit", "2 / limit"),
        ("gpuaccel/ops/scale.py", "    blocks: int\n", ""),
        ("gpuaccel/ops/scale.py", "256", "128"),
        ("benchmarks/helper.py", "3", "4"),
        ("kernels_cu/scale.cu", "*=", "+="),
        ("kernels_cu/scale.cu", "THREADS 256", "THREADS 128"),
        ("kernels_cu/common.cuh", "short", "int"),
    ],
)
def test_a_changed_line_ages_a_result(probe, path, old, new):
    assert probe.edit(path, old, new) == [path]


def test_a_stale_result_says_which_parts_changed(probe):
    fingerprints = module("fingerprints")
    assert fingerprints.staleness(probe.result, probe.root) == ""
    probe.edit("gpuaccel/ops/scale.py", "256", "128")
    probe.edit("gpuaccel/optim/clip.py", "from ..ops import scale", "from .. import other as scale")
    assert fingerprints.staleness(probe.result, probe.root) == (
        "measured on 2026-11-23, before changes to ops/scale.py, optim/clip.py, other.py, "
        "common.cuh, scale.cu: run python benchmarks/probe.py on a GPU"
    )


def test_an_older_result_is_stale_when_a_file_that_it_names_has_changed(tmp_path):
    changed = module("fingerprints").changed
    (tmp_path / "kernel.cu").write_text("one")
    result = {"source_patterns": ["*.cu"], "sources": {"kernel.cu": "7692c3ad3540bb80"}}
    assert changed(result, tmp_path) == []
    (tmp_path / "kernel.cu").write_text("two")
    (tmp_path / "new.cu").write_text("three")
    assert changed(result, tmp_path) == ["kernel.cu", "new.cu"]


# ---- the scripts --------------------------------------------------------------------------------


def once(functions, *_):
    """In the place of common.milliseconds."""
    for function in functions.values():
        function()
    return dict.fromkeys(functions, 1.0)


@pytest.fixture
def on_cpu(monkeypatch):
    """clip.py and tail.py where there is no GPU: every function runs once, nothing is timed, a graph is the function itself."""
    common, clip = module("common"), module("clip")
    tail = module("tail")

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


@pytest.fixture
def on_cpu_too(monkeypatch):
    """step.py, graphs.py and timeline.py where there is no GPU: in this process, not compiled, by the host's clock. A graph is a tape; torch's graph
    is the function itself."""
    scripts = step, graphs, timeline = [module(name) for name in ("step", "graphs", "timeline")]

    def queued(run, calls):
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        return times

    def captured(run):
        run()
        return run

    for script in scripts:
        monkeypatch.setattr(script, "DEVICE", "cpu")
    for script in (step, graphs):
        monkeypatch.setattr(script, "queued", queued)
    for name, value in {
        "captured": captured,
        "CAPTURABLE": {},
        "B": 1,
        "CALLS": 1,
        "fresh_peaks": lambda: None,
        "peaks": lambda: {"peak_GiB": 1.0, "reserved_GiB": 1.0},
    }.items():
        monkeypatch.setattr(step, name, value)
    for name, value in {"STEPS": 10, "POISONED": 4, "CALLS": 1}.items():
        monkeypatch.setattr(graphs, name, value)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for name, value in {
        "synchronize": None,
        "mem_get_info": (0, 0),
        "set_sync_debug_mode": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    before = dict(os.environ)
    with ga.use_backend("simt"):
        yield scripts
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name in ("step", "graphs", "timeline", "workers"):
        del sys.modules[name]


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmarks_of_steps_and_graphs_run_and_have_tables(on_cpu_too, monkeypatch):
    step, graphs, timeline = on_cpu_too
    config = Config(vocab=31, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=16)
    found = step.measure(config, (16, 8), here=True)
    results = {"step": {T: rows for T, rows in zip(("1024", "256"), found.values())}}
    for rows in results["step"].values():
        assert rows.keys() == {step.PEER, step.OURS, step.EXACT}
        for row in rows.values():
            row["mfu"] = 0.5  # not known of a CPU
    r = results["graphs"] = graphs.measure(
        config, config, config, ((2, 16), (2, 8), (1, 8)), (8, 6), 1, ((3, 3), 2), here=True
    )
    assert r["bits"]["exact"] == {
        "eager, replay": {"losses": 0, "weights": 0},
        "replay, replay": {"losses": 0, "weights": 0},
    }
    assert r["bits"]["graphs"] == 2 and r["bits"]["skipped"] == 1 and r["bits"]["clipped"] > 5
    assert (
        r["graph"]["names"]
        and max(map(max, r["graph"]["edges"])) < len(r["graph"]["names"])
        and all(r["timeline"].values())
    )
    r["speed"] = dict(zip(("4 x 1024", "4 x 256", "1 x 128"), r["speed"].values()))
    for row in r["ledger"].values():
        row.update(launches=1, graph_launches=1, syncs=0)  # nor this
    report = module("report")
    facts = {"gpu": "A", "driver": "B", "torch": "C", "nvrtc": "D", "date": "E"}
    monkeypatch.setattr(
        report, "load", lambda name: {**facts, "results": json.loads(json.dumps(results[name]))}
    )
    table = report.step_table()
    assert (
        table.count("\n| T = ") == 6
        and table.count("(goal ") == 8
        and "A, driver B, torch C" in table
    )
    table = report.graphs_table()
    assert (
        table.count("\n| ours") == 3
        and "1 (goal 4: missed)" in table
        and "0 of 10 losses, 0 of 0 M weights (goal 0)" in table
    )
    assert timeline.measure(config, 2, compile=False, here=True).keys() == set(timeline.CLIPS)


@pytest.fixture
def encoder_on_cpu(on_cpu_too, monkeypatch):
    """encoder.py likewise: a replay is a tape's, and every way runs once, untimed."""
    common, clip, timing, encoder = (
        module(name) for name in ("common", "clip", "timing", "encoder")
    )
    monkeypatch.setattr(common, "milliseconds", once)
    for script in (clip, timing):
        monkeypatch.setattr(script, "DEVICE", "cpu")
    for name, value in {
        "DEVICE": "cpu",
        "queued": on_cpu_too[0].queued,
        "VOCAB": 300,
        "T": 16,
        "TEXT_BYTES": 20_000,
        "WHOLE": 2**12,
        "CHANNELS": 8,
        "CALLS": 1,
    }.items():
        monkeypatch.setattr(encoder, name, value)
    yield encoder
    for name in ("clip", "timing", "encoder"):
        del sys.modules[name]


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmark_of_the_encoder_runs_and_has_a_table(encoder_on_cpu, monkeypatch):
    encoder = encoder_on_cpu
    results = {
        "backward": encoder.backward(96, 16, 2**10),
        "grid": encoder.grid((16,), (48, 96), (256, 300)),
        "positions": encoder.positions(2, 16, (16,), 2**10),
        "segments": encoder.segments((48, 96), (256, 300)),
    }
    kinds = {name: results["backward"][name] for name in encoder.DISTRIBUTIONS}
    for d in kinds.values():
        assert [m["runs"] for m in d["ways"].values()].count(100) == 2 and {
            m["differ"] for m in d["ways"].values()
        } == {0}
        assert not any(m["cannot_be_captured"] for m in d["ways"].values())
    assert len(results["grid"]) == 16 and {c["channels_checked"] for c in results["grid"]} == {
        16,
        8,
    }
    config = preset(
        "gpt2-124m",
        vocab=31,
        hidden=16,
        intermediate=32,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=8,
        T=16,
    )
    results["step"] = encoder.step(config, 2, 3, here=True)
    assert results["step"]["twice"]["weights_equal"] and results["step"]["twice"]["losses_equal"]
    lasts = [row["last_loss"] for row in results["step"]["ways"].values()]
    assert max(lasts) - min(lasts) < 1e-3, f"the three ways train differently: {lasts}"
    results = json.loads(json.dumps(results))
    for name, (_, show) in encoder.PARTS.items():
        show(results[name])
    report = module("report")
    monkeypatch.setattr(
        report,
        "load",
        lambda name: {
            "gpu": "A",
            "driver": "B",
            "torch": "C",
            "nvrtc": "D",
            "date": "E",
            "results": results,
        },
    )
    table = report.encoder_table()
    assert table.count("\n|---") == 7 and table.count("\n| ") == 7 + 3 * 4 + 2 + 1 + 4 + 3
    assert table.count("(goal ") == 4 * 4 + 4 * 2 + 4 + 1 + 2 and "A, driver B, torch C" in table


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmark_of_the_encoder_sees_wrong_sums_and_what_cannot_be_captured(
    encoder_on_cpu, monkeypatch
):
    encoder, right, runs = encoder_on_cpu, encoder_on_cpu.encoder_backward, []
    tokens, dout = encoder.tokens_of(encoder.ZIPF, 48, 300), encoder.gradients(48, 16)
    used, unused = int(tokens[0, 0]), (set(range(300)) - set(tokens.flatten().tolist())).pop()
    spoils = {
        "error": lambda sums: sums[used, 4].add_(1e-3),
        "differ": lambda sums: sums[used, 15].mul_(1 + 2e-7 * (len(runs) == 2)),
        "stray": lambda sums: sums[unused, 3].add_(1e-6),
        "captured": lambda sums: bool(sums[0, 0]),
    }

    def wrong(sums, *rest):
        right(sums, *rest)
        runs.append(spoil(sums))

    monkeypatch.setattr(encoder, "encoder_backward", wrong)
    for name, spoil in spoils.items():
        runs.clear()
        found = encoder.case(tokens, dout, dout.float(), 300)
        seen = {
            "error": found["error"][encoder.IN_LINE] > encoder.ROUNDING,
            "differ": found["differ"] == 1,
            "stray": found["stray"] == 1,
            "captured": "wait for a value"
            in str(found.get("cannot_be_captured", {}).get(encoder.IN_LINE)),
        }
        assert [what for what, shown in seen.items() if shown] == [name] and found[
            "times_dense"
        ] == 1.0, found
    spoil = spoils["stray"]
    with pytest.raises(AssertionError, match=r"\d of 4 cases have wrong sums"):
        encoder.grid((16,), (48,), (300,))


def test_each_worker_is_a_process_and_its_errors_come_through():
    workers = module("workers")
    with workers.Workers(
        {"one": (collections.Counter, "aab"), "two": (collections.Counter, "abb")}
    ) as some:
        some.ready()
        assert workers.in_turns(
            {
                name: lambda name=name: [some.ask(name, "total") + i for i in range(3)]
                for name in some.names
            },
            2,
        ) == {"one": 4, "two": 4}
        assert [some.ask(name, "most_common", 1) for name in some.names] == [[("a", 2)], [("b", 2)]]
        some.close("one")
        assert some.names == ["two"]
        with pytest.raises(RuntimeError, match="'two' failed in its process:(.|\n)*AttributeError"):
            some.ask("two", "nothing")
    with (
        pytest.raises(RuntimeError, match="'gone' has died"),
        workers.Workers({"gone": (os._exit, 1)}) as some,
    ):
        some.ready()


@pytest.fixture
def dispatch_on_cpu(on_cpu_too, monkeypatch):
    """dispatch.py likewise: tiny sizes, every way runs once; memory, clock and multiprocessors are made up."""
    common, clip = module("common"), module("clip")
    scripts = timing, torch_layers, layers, dispatch = [
        module(name) for name in ("timing", "torch_layers", "dispatch_layers", "dispatch")
    ]

    monkeypatch.setattr(common, "milliseconds", once)
    for script in (clip, *scripts):
        monkeypatch.setattr(script, "DEVICE", "cpu")
    for name, value in {
        "HEADS": 2,
        "HEAD": 16,
        "T": 20,
        "LONG": 24,
        "COPIED": 2**10,
        "CHUNK": 64,
        "multiprocessors": lambda: 1,
        "peak_MiB": lambda run: 2.0 + (run() is None),
        "clock_MHz": lambda load: 1000.0 + (load() is not None),
    }.items():
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(torch_layers, "CAPTURABLE", {})
    monkeypatch.setattr(layers, "queued", on_cpu_too[0].queued)
    monkeypatch.setattr(layers, "CALLS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    before = torch.get_num_threads()
    yield dispatch
    torch.set_num_threads(before)
    for name in ("clip", "timing", "torch_layers", "dispatch_layers", "dispatch"):
        del sys.modules[name]


DISPATCH = {
    "curves": {"bf16": ("bfloat16", 6, 24, True)},
    "attention": {"batch 1": (1, None, True), "batch 2, window 9": (2, 9, False)},
    "layers": {
        "batch 32": (
            2,
            preset(
                "poly-7m",
                vocab=31,
                hidden=32,
                intermediate=48,
                layers=1,
                heads=2,
                kv_heads=2,
                head_dim=16,
                T=20,
            ),
        )
    },
}


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmark_of_dispatch_runs_and_has_a_table(dispatch_on_cpu, monkeypatch):
    dispatch = dispatch_on_cpu
    results = dispatch.measure(
        list(dispatch.PARTS),
        DISPATCH,
        here=True,
        done=lambda part, result: dispatch.PARTS[part][1](result),
    )
    for m in results["curves"]["bf16"].values():
        assert (
            m["ms"].keys()
            == m["errors"].keys()
            == {
                dispatch.OURS,
                dispatch.EAGER,
                dispatch.FOLDED,
                dispatch.COMPILED,
                dispatch.COMPILED_FOLDED,
            }
        )
        assert not m["cannot_be_captured"] and m["times"][dispatch.EAGER] == {
            "forward": 1.0,
            "backward": 0.0,
        }
    glu = results["curves"]["bf16"]["glu"]
    assert glu["floors_ms"]["forward"]["special"] == pytest.approx(6 * 24 * 6 / 16e9 * 1e3) and glu[
        "of_floor"
    ]["backward"] == pytest.approx(5 * 24 * 6 * 2 / glu["copy_GB_per_s"] / 1e6)
    for case, m in results["attention"].items():
        assert (
            not m["core"]["cannot_be_captured"]
            and not m["layer"]["cannot_be_captured"]
            and m["differ"] == 0
        )
        assert (
            (dispatch.FLASH in m["core"]["times"])
            == (dispatch.GATHERED in m["core"]["times"])
            == ("long" in m)
            == (case == "batch 1")
        )
    assert (
        results["layers"]["batch 32"].keys() == {"RichardsGLU", "PolyAttention", "step"}
        and results["layers"]["cores"] == 1
    )
    losses = results["layers"]["batch 32"]["step"]["first_loss"].values()
    assert max(losses) - min(losses) < 0.02, f"ours and torch's do not begin alike: {losses}"
    report = module("report")
    monkeypatch.setattr(
        report,
        "load",
        lambda name: {
            "gpu": "A",
            "driver": "B",
            "torch": "C",
            "nvrtc": "D",
            "date": "E",
            "results": results,
        },
    )
    table = report.dispatch_table()
    assert (
        table.count("\n| ") == 3 + 2 + 4 + 3
        and table.count("(goal ") == 2 * 4 + 4 * 2 + 1 + 1
        and "A, driver B, torch C" in table
    )


@pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")
def test_the_benchmark_of_dispatch_sees_wrong_values_and_goes_on(dispatch_on_cpu, monkeypatch):
    dispatch, right, calls = dispatch_on_cpu, dispatch_on_cpu.poly_attention, []
    cases = {"attention": {"batch 1": (1, None, False), "batch 2": (2, None, False)}}
    for spoil, said in (
        (lambda y: y * 1.02, "ours is farther from float64"),
        (lambda y: y * (1 + 0.006 * (len(calls) == 2)), r"two runs of ours differ in \d+"),
    ):
        calls.clear()
        monkeypatch.setattr(
            dispatch,
            "poly_attention",
            lambda *args: (
                calls.append(1),
                spoil(right(*args)) if len(args[0]) == 1 else right(*args),
            )[1],
        )
        done = []
        with pytest.raises(RuntimeError, match=f"^attention, batch 1: {said}") as error:
            dispatch.measure(
                ["attention"], cases, here=True, done=lambda part, result: done.append(list(result))
            )
        assert done == [["batch 2"]] and "batch 2" not in str(error.value)
    backward, curves = dispatch.launch_glu_backward, dispatch.Pointwise("float32", 6, 24, False)
    for which in range(3):
        monkeypatch.setattr(
            dispatch,
            "launch_glu_backward",
            lambda *args: [g * (1 + 2e-3 * (i == which)) for i, g in enumerate(backward(*args))],
        )
        with pytest.raises(AssertionError, match=f"'{'dtheta' if which else 'dx'}'"):
            curves.measure()


def test_the_benchmark_of_dispatch_counts_what_the_kernels_header_counts(dispatch_on_cpu):
    header, moved, special = (
        (ROOT / "kernels_cu" / "richards.cu").read_text().split("#ifndef")[0],
        dispatch_on_cpu.MOVED,
        dispatch_on_cpu.SPECIAL,
    )
    found = re.search(
        r"forward (\d) reads and a write, backward (\d) reads and\W+(\d) writes.*Special functions: forward (\d+), backward (\d+)",
        header,
        re.S,
    )
    assert found and list(map(int, found.groups())) == [
        moved["glu"]["forward"] - 1,
        moved["glu"]["backward"] - 2,
        2,
        *special["glu"].values(),
    ], header
    assert re.search(r"costs four special functions per element.*forward three", header) and list(
        special["curve"].values()
    ) == [3, 4], header


@pytest.fixture
def ddp_on_cpu(monkeypatch):
    """ddp.py on two gloo ranks: one crew for all families, nothing compiled or captured, one step in each turn."""
    common, workers, crews, ranks = (
        module(name) for name in ("common", "workers", "crews", "ddp_ranks")
    )
    ddp = module("ddp")
    monkeypatch.setattr(ddp, "CALLS", 1)
    monkeypatch.setattr(ddp, "ROUNDS", {True: 1, False: 1})
    monkeypatch.setattr(ddp, "SETTLED", 4)
    plain = lambda way: dataclasses.replace(
        way, how=way.how and {k: v for k, v in way.how.items() if k != "peer_to_peer"}
    )  # for GPUs
    yield (
        ddp,
        ranks,
        {
            family: {name: ("all", plain(way)) for name, (_, way) in ways.items()}
            for family, ways in ddp.FAMILIES.items()
        },
    )
    for name in ("workers", "crews", "ddp_ranks", "ddp"):
        del sys.modules[name]


def test_the_benchmark_of_several_ranks_runs_and_has_a_table(ddp_on_cpu, monkeypatch):
    ddp, ranks, families = ddp_on_cpu
    config = Config(vocab=31, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=2, T=16)
    bench = ranks.Bench(
        config,
        rows=2,
        micro_batches=(4, 1),
        device="cpu",
        compile=False,
        graph=False,
        bits_layers=1,
        bits_steps=2,
    )
    kept = []
    r = ddp.measure(bench, 2, (0.001,), keep=kept.append, families=families)
    assert (
        kept == [r]
        and r["failed"] == {}
        and r["left_out"] == []
        and r["families"].keys() == families.keys()
    )
    for family, found in r["families"].items():
        assert {count: rows.keys() for count, rows in found.items()} == dict.fromkeys(
            "41", {*families[family], ddp.EACH}
        )
    assert {yes for way in r["bits"]["ways"].values() for yes in way.values()} == {
        True
    } and "equal to one GPU" in r["bits"]["ways"]["ordered"]
    equal = [m for some in r["equal_on_all_ranks"].values() for m in some.values()]
    assert all(m["equal"] for m in equal)
    assert sorted(m["steps"] for m in equal) == [
        *[4] * 3,
        *[7] * 7,
    ]  # turns of replayed steps are longer
    captured = r["made"][ddp.CAPTURED]["DDP"]
    assert all(
        one["replay_apart"] < ranks.APART and one["gradients"] in ("set to None", "zeroed in place")
        for one in captured
    )
    torchs = [family for family in families if "DDP" in families[family]]
    assert torchs == [ddp.COMPILED, ddp.CAPTURED, ddp.SPLIT, ddp.EAGER]
    fastest = {}
    for count in "41":
        rates = {
            family: r["families"][family][count]["DDP"]["tokens_per_s_per_gpu"] for family in torchs
        }
        fastest[count] = max(rates, key=rates.get)
    assert r["fastest_torch"] == fastest
    memory = {name: m["optimizer_GiB"] for name, m in r["memory"][ddp.REPLAYED].items()}
    assert memory["all-reduce"] == memory[ddp.ONE] > memory["sharded"] > 0 and r["bandwidth"][
        "the arena"
    ].keys() == {"bytes", *("all_reduce", "reduce_scatter", "all_gather")}
    r = json.loads(json.dumps(r))
    ddp.show(r)
    report = module("report")
    result = {
        "gpu": "A",
        "driver": "B",
        "torch": "C",
        "nvrtc": "D",
        "date": "E",
        "results": {"2": {**r, "failed": {"bits": "why"}, "nccl": {"version": "9", "NCCL_X": "1"}}},
    }
    monkeypatch.setattr(report, "load", {"ddp_2gpus": result}.get)
    table = report.ddp_table()
    assert table.count("\n|---") == 4 and table.count("\n| ") == 4 + 16 + (7 + 10) + 1 + 3
    assert table.count("(goal ") == 2 * 2 + 2 + 1 + 7 + 10 and "A, driver B, torch C" in table
    assert len(re.findall(r" ms, \d+\.\d\dx \|", table)) == 2 * 6
    for count, micro_batches in (("4", "4 micro-batches"), ("1", "1 micro-batch")):
        words = f'With {micro_batches} the fastest torch DDP is "{fastest[count]}: DDP"'
        assert words in " ".join(table.split())
    assert "NCCL 9 with `NCCL_X=1`.\n\nFailed or left out: bits." in table


def test_a_crew_that_hangs_or_dies_is_named_and_the_others_go_on(monkeypatch):
    crews = module("crews")
    with crews.Crews({"numbers": (range, 2), "locks": (threading.Semaphore,)}, 2, "cpu") as some:
        assert some.ask("numbers", "index", 1) == [1, 0]  # of range(0, 2) and range(1, 2)
        with pytest.raises(
            crews.CrewError,
            match=r"numbers: rank \d raised(.|\n)*ValueError: 5 is not in range(.|\n)*rank \d raised",
        ):
            some.ask("numbers", "index", 5)
        with pytest.raises(crews.CrewError, match="^locks: rank 0 has not answered for 0.5 s$"):
            some.ask("locks", "acquire", seconds=0.5)  # of no permit, and of one
        assert some.names == ["numbers"] and some.ask("numbers", "count", 0) == [1, 0]
        with pytest.raises(
            crews.CrewError, match="numbers: rank 1 raised(.|\n)*ValueError: 0 is not in range"
        ):
            some.ask("numbers", "index", 0)
        for name in ("numbers", "locks"):
            with pytest.raises(crews.CrewError, match=name):
                some.ask(name, "count", 0)
        assert some.names == []
    with (
        crews.Crews({"gone": (os._exit,)}, 1, "cpu") as some,
        pytest.raises(crews.CrewError, match="gone: rank 0 has died"),
    ):
        some.ask("gone", "anything")
    del sys.modules["crews"]


class Scripted:
    """In the place of Crews: two ranks that answer what a test says, method -> function of the arguments; an exception is raised."""

    ranks = 2

    def __init__(self, **answers):
        self.replies, self.said, self.stopped, self.names = (
            answers,
            collections.defaultdict(list),
            {},
            ["all"],
        )

    def send(self, crew, method, *args):
        self.said[crew].append(
            self.replies[method](*args) if method in self.replies else [None, None]
        )

    def answers(self, crew, seconds=None):
        found = self.said[crew].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, crew, method, *args, seconds=None):
        self.send(crew, method, *args)
        return self.answers(crew)

    def stop(self, crew):
        self.stopped[crew] = "it was closed"


def test_the_benchmark_of_several_ranks_takes_the_slowest_rank_and_says_what_failed(ddp_on_cpu):
    ddp, ranks, families = ddp_on_cpu
    bench = ranks.Bench(
        Config(vocab=31, hidden=16, intermediate=32, layers=2, heads=2, kv_heads=2, T=10),
        rows=3,
        device="cpu",
    )
    error, asked = sys.modules["crews"].CrewError("rank 1 has not answered for 60 s"), set()

    def make(key, way):
        loss = 9.0 if key == (ddp.EAGER, "DDP") else 3.0
        return [
            {"first_loss": loss, "optimizer_GiB": 1.0},
            {"first_loss": loss + 0.01, "optimizer_GiB": 2.0},
        ]

    def times(key, count, calls, alone):
        if key[1] == "sharded" and count == 1:
            return error
        replays = key[0] in (ddp.CAPTURED, ddp.SPLIT, ddp.REPLAYED)
        before = [99.0] * (calls // 4) if replays else []  # not settled yet
        asked.add((replays, count, calls))
        slow = 18.75 if key == (ddp.CAPTURED, "DDP") else 20.0 if key[1] == "DDP" else 15.0
        ms = (10.0,) if alone else (11.0, 12.0) if key[1] == ddp.ONE else (slow, 14.0)
        return [before + [one * count] * (calls - len(before)) for one in ms] + [[]] * alone

    def last(key):
        return [["one", 2.0, 8], ["other" if key == (ddp.REPLAYED, "ordered") else "one", 2.0, 8]]

    run = ddp.Run(
        Scripted(make=make, times=times, last=last), bench, families, "all", time.perf_counter()
    )
    run.all((), ddp.PARTS[:-2])
    run.memory()
    run.against_torch()
    r = run.results
    assert r["fastest_torch"] == {"4": ddp.CAPTURED, "1": ddp.CAPTURED}
    assert r["families"][ddp.CAPTURED]["4"]["DDP"].keys() == {
        "ms",
        "tokens_per_s_per_gpu",
        "of_one_gpu",
        "exposed_ms",
    }
    assert (
        "times_torch" not in r["families"][ddp.REPLAYED]["4"][ddp.ONE]
        and r["families"][ddp.OURS_EAGER]["1"]["all-reduce"]["times_torch"] == 1.25
    )
    assert r["families"][ddp.REPLAYED]["4"]["all-reduce"] == {
        "ms": 60.0,
        "tokens_per_s_per_gpu": 2000.0,
        "of_one_gpu": pytest.approx(2 / 3),
        "exposed_ms": 12.0,
        "times_torch": 1.25,
    }
    assert (
        asked == {(True, 4, 1), (True, 1, 4), (False, 4, 1), (False, 1, 1)}
        and r["families"][ddp.REPLAYED]["1"]["all-reduce"]["ms"] == 15.0
    )
    assert r["families"][ddp.REPLAYED]["1"].keys() == {
        ddp.ONE,
        ddp.EACH,
        "all-reduce",
        "all-reduce by NCCL",
        "all-reduce in bf16",
        "ordered",
    }
    assert r["families"][ddp.EAGER]["4"].keys() == {ddp.ONE, ddp.EACH} and r["memory"][
        ddp.REPLAYED
    ]["ordered"] == {"optimizer_GiB": 2.0}
    assert r["failed"].pop(f"times of {ddp.REPLAYED}, sharded, 1") == str(error)
    assert r["failed"].pop(f"making of {ddp.EAGER}: DDP").startswith("the first loss is 9.0")
    assert (
        r["failed"]
        .pop(f"end of {ddp.REPLAYED}: ordered")
        .startswith("the ranks' weights are not the same bits")
        and not r["failed"]
    )
    assert (
        not r["equal_on_all_ranks"][ddp.REPLAYED]["ordered"]["equal"]
        and r["equal_on_all_ranks"][ddp.REPLAYED]["sharded"]["equal"]
    )

    del r["families"][ddp.CAPTURED]["4"]["DDP"]  # had it failed
    run.against_torch()
    assert r["fastest_torch"] == {"4": ddp.COMPILED, "1": ddp.CAPTURED}
    assert r["families"][ddp.REPLAYED]["4"]["all-reduce"]["times_torch"] == pytest.approx(4 / 3)

    late = ddp.Run(Scripted(make=make), bench, families, "all", time.perf_counter() - 9, limit=5)
    late.all((1,), ddp.PARTS)
    assert (
        late.results["left_out"] == [*families, "buckets", "bits", "bandwidth"]
        and not late.results["failed"]
    )


@pytest.fixture
def one_rank(ddp_on_cpu, tmp_path):
    """ddp_ranks.py in this process, which is the only rank."""
    _, ranks, _ = ddp_on_cpu
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield ranks
    torch.distributed.destroy_process_group()


SMALL = {
    "config": Config(vocab=31, hidden=16, intermediate=32, layers=1, heads=2, kv_heads=2, T=16),
    "rows": 2,
    "device": "cpu",
    "compile": False,
}


@pytest.mark.parametrize("how", [None, {"bucket_cap_mb": 100}], ids=["one GPU", "DDP"])
def test_torchs_captured_step_is_checked_and_begins_with_the_first_weights(
    one_rank, monkeypatch, how
):
    bench = one_rank.Bench(**SMALL, graph=False)
    captured, launched = (
        one_rank.Way("torch", replayed=replayed, how=how) for replayed in (True, False)
    )
    batch = one_rank.random_batch(bench, 1)
    steps = one_rank.Captured(0, bench, captured), one_rank.Peer(0, bench, launched)
    for count in (4, 1, 4):
        for step in steps:
            step.run([t[: 2 * count] for t in batch], count)
        assert float(steps[0].loss) == float(steps[1].loss) and steps[0].hash() == steps[1].hash()
    right = one_rank.Recording.replay
    spoils = {
        "two steps": lambda self: (right(self), right(self)),
        "another loss": lambda self: (right(self), self.total.add_(1)),
    }
    monkeypatch.setattr(one_rank, "TRIALS", 1)
    for replay in spoils.values():
        monkeypatch.setattr(one_rank.Recording, "replay", replay)
        with pytest.raises(
            AssertionError,
            match="4 micro-batches: replayed and launched, a step changes the weights differently",
        ):
            one_rank.Captured(0, bench, captured)


class Side:
    """In the place of torch.cuda.Stream."""

    def wait_stream(self, other):
        pass


def test_torchs_ddp_is_captured_on_the_stream_it_was_made_on_after_its_warm_up(
    one_rank, monkeypatch
):
    events, streams = [], [None]

    @contextlib.contextmanager
    def stream(other):
        streams.append(other)
        yield
        streams.pop()

    @contextlib.contextmanager
    def graph(_, pool, stream, capture_error_mode):
        assert stream is streams[-1] and capture_error_mode == "thread_local"
        events.append(f"capture into {pool}")
        yield

    def noted(what, function):
        def called(*args, **more):
            assert isinstance(streams[-1], Side), f"{what} not on the stream that captures"
            events.append(what)
            return function(*args, **more)

        return called

    fakes = {
        "Stream": Side,
        "stream": stream,
        "graph": graph,
        "graph_pool_handle": lambda: "shared",
        "current_stream": lambda: None,
        "CUDAGraph": lambda: types.SimpleNamespace(
            replay=lambda: None, reset=lambda: events.append("reset")
        ),
        "max_memory_allocated": lambda: 7,
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(one_rank, "queued", lambda run, calls: [1.0] * calls)
    monkeypatch.setattr(
        one_rank, "DistributedDataParallel", noted("DDP", one_rank.DistributedDataParallel)
    )
    monkeypatch.setattr(one_rank.Peer, "step", noted("step", one_rank.Peer.step))
    monkeypatch.setattr(one_rank.Captured, "_check", lambda self, count: events.append("check"))
    made = one_rank.Captured(
        0, one_rank.Bench(**SMALL), one_rank.Way("torch", replayed=True, how={"bucket_cap_mb": 100})
    )
    made.close()
    later = ["step"] * 3
    assert events == [
        "DDP",
        *["step"] * 13,
        "capture into None",
        "step",
        "reset",
        *later,
        "capture into None",
        "step",
        "reset",
        *later,
        "capture into shared",
        "step",
        "check",
        *later,
        "capture into shared",
        "step",
        "check",
        "reset",
        "reset",
    ]


def test_bits_that_differ_are_told_apart(ddp_on_cpu):
    ddp, ranks, families = ddp_on_cpu

    def bits(other):
        def answers():
            same = {
                name: {"eager": ["a", [1.0]], "replayed": ["a", [1.0]]}
                for name in ("all-reduce", "ordered", "sharded", "one GPU")
            }
            first, second = json.loads(json.dumps(same)), json.loads(json.dumps(same))
            (second if other == "rank" else first)["ordered"]["replayed"][0] = (
                "b" if other in ("rank", "replay") else "a"
            )
            if other == "one":
                first["one GPU"]["eager"][1] = [1.5]
            return [first, second]

        run = ddp.Run(Scripted(bits=answers), ranks.Bench(None), families, "all", 0.0)
        run.bits()
        return [what for what, yes in run.results["bits"]["ways"]["ordered"].items() if not yes]

    assert (
        bits("") == []
        and bits("one") == ["equal to one GPU"]
        and bits("rank") == ["equal on all ranks"]
    )
    assert bits("replay") == ["equal on all ranks", "replayed equal to launched"]


def test_a_rank_sees_that_its_gpu_hangs(ddp_on_cpu, monkeypatch):
    _, ranks, _ = ddp_on_cpu
    done = iter([False, False, True, *[False] * 10**6])
    monkeypatch.setattr(
        torch.cuda,
        "Event",
        lambda: types.SimpleNamespace(record=lambda: None, query=lambda: next(done)),
    )
    rank = types.SimpleNamespace(cuda=True)
    ranks.Rank._finish(rank)
    with pytest.raises(ranks.Stuck, match="the GPU has not finished a step for 0.05 s"):
        ranks.Rank._finish(rank, 0.05)
