"""Results say what they measured and when that has changed. Scripts run; results have tables."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings

import pytest
import torch
from torch import nn

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.compiler import nvrtc
from gpuaccel.ops.clip import clip_kernel
from gpuaccel.training.models import Config, flops_per_token, preset

ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").rglob("*.json"))


@pytest.fixture(scope="module")
def fingerprints():
    spec = importlib.util.spec_from_file_location("fingerprints", BENCHMARKS / "fingerprints.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# ---- results and what they measured -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", RESULTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_result_says_what_it_measured(path, fingerprints):
    result = json.loads(path.read_text())
    facts = {"benchmark", "gpu", "driver", "torch", "nvrtc", "commit", "date", "results"}
    assert facts <= result.keys()
    assert result.keys() & {"fingerprints", "sources"}
    stale = fingerprints.staleness(result)
    if stale:
        warnings.warn(f"{path.name} was {stale}")


def has_nvrtc() -> bool:
    try:
        return bool(nvrtc.library())
    except ga.errors.BackendError:
        return False


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
FILES = {
    "benchmarks/probe.py": """
        import common
        import unused
        import gpuaccel as ga
        from helper import ROUNDS
        from gpuaccel.optim import clip_
        def measure():
            return [clip_(ga.Arena(), 1.0) for _ in range(ROUNDS)]
        def show_result(r):
            common.print(r)
        """,
    "benchmarks/common.py": "TABLE = 1",
    "benchmarks/helper.py": "ROUNDS = 3",
    "benchmarks/other.py": "import gpuaccel.other",
    "benchmarks/unused.py": "",
    "gpuaccel/__init__.py": "from . import other",
    "gpuaccel/public.py": "from .optim import Arena\nfrom .other import Other",
    "gpuaccel/other.py": "",
    "gpuaccel/optim/__init__.py": "from .arena import Arena\nfrom .clip import clip_, unclip_",
    "gpuaccel/optim/arena.py": "class Arena: pass",
    "gpuaccel/optim/clip.py": """
        from typing import TYPE_CHECKING
        from ..errors import Error
        from ..ops import scale
        if TYPE_CHECKING:
            from .arena import Arena
        def clip_(grads: Error, limit):
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
    "gpuaccel/errors.py": "class Error(Exception): pass",
    "kernels_cu/scale.cu": """
        #define THREADS 256
        __global__ void scale_v1(float* x, float factor, int n) { x[threadIdx.x] *= factor; }
        """,
    "kernels_cu/common.cuh": "typedef unsigned short bf16;",
    "kernels_cu/unused.cu": "__global__ void unused() {}",
}


@pytest.fixture
def probe(tmp_path, fingerprints):
    """A checkout with one benchmark, its result, and edit(path, old, new), which returns what
    changed."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    measured = fingerprints.fingerprints("probe", {"kernels_cu/scale.cu"}, tmp_path)
    result = {"benchmark": "probe", "date": "2026-11-23", "fingerprints": measured}

    def edit(path, old, new):
        text = (tmp_path / path).read_text()
        assert old in text
        (tmp_path / path).write_text(text.replace(old, new))
        return fingerprints.changed(result, tmp_path)

    return types.SimpleNamespace(root=tmp_path, result=result, edit=edit)


def test_the_measured_modules_are_derived_from_the_imports(probe):
    assert list(probe.result["fingerprints"]) == [
        "benchmarks/helper.py",
        "benchmarks/probe.py",
        "gpuaccel/ops/scale.py",
        "gpuaccel/optim/arena.py",
        "gpuaccel/optim/clip.py",
        "kernels_cu/common.cuh",
        "kernels_cu/scale.cu",
    ]


@pytest.mark.parametrize(
    "path, old, new",
    [
        ("gpuaccel/optim/clip.py", "    return", "    # why\n    return"),
        ("gpuaccel/optim/clip.py", "    return", "    '''One sentence.'''\n    return"),
        ("gpuaccel/optim/clip.py", "(grads: Error, limit):", "(grads, limit: float) -> 'Tensor':"),
        (
            "gpuaccel/optim/clip.py",
            "(grads, 1 / limit)",
            "(\n        grads,\n        (1/limit),\n    )",
        ),
        ("gpuaccel/ops/scale.py", "threads: int", "threads: 'int | None'"),
        ("gpuaccel/simt.py", "", "CHANGED = 1"),
        ("gpuaccel/optim/clip.py", "from ..errors import Error\n", ""),
        ("gpuaccel/optim/clip.py", "import TYPE_CHECKING", "import TYPE_CHECKING, Any"),
        ("gpuaccel/optim/clip.py", "    from .arena import Arena", "    from .arena import Other"),
        ("gpuaccel/optim/__init__.py", ", unclip_", ""),
        ("gpuaccel/public.py", "Other", "Others"),
        ("benchmarks/probe.py", "import unused\n", ""),
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


def test_a_stale_result_says_which_parts_changed(probe, fingerprints, monkeypatch):
    assert fingerprints.staleness(probe.result, probe.root) == ""
    probe.edit("gpuaccel/ops/scale.py", "256", "128")
    probe.edit("gpuaccel/optim/clip.py", "from ..ops import scale", "from .. import other as scale")
    probe.edit("kernels_cu/scale.cu", "*=", "+=")
    assert fingerprints.staleness(probe.result, probe.root) == (
        "measured on 2026-11-23, before changes to ops/scale.py, optim/clip.py, other.py, "
        "scale.cu: run make bench ONLY=probe"
    )
    monkeypatch.setattr(fingerprints, "MOST_NAMES", 3)
    assert "changes to ops/scale.py, optim/clip.py, 2 others: run" in fingerprints.staleness(
        probe.result, probe.root
    )


def test_the_kernels_in_use_are_those_that_were_made(fingerprints):
    before = fingerprints.kernels_in_use()
    kernel = ga.Kernel("richards", "richards_forward", DATA_T="float")
    (use,) = fingerprints.kernels_in_use() - before
    assert (use.file, use.name) == ("kernels_cu/richards.cu", "richards_forward") and kernel
    assert ("DATA_T", "float") in use.defines
    assert "kernels_cu/richards.cu" in fingerprints.fingerprints("clip", [use.file])


def test_an_older_result_is_stale_when_a_file_that_it_names_has_changed(tmp_path, fingerprints):
    changed = fingerprints.changed
    (tmp_path / "kernel.cu").write_text("one")
    result = {"source_patterns": ["*.cu"], "sources": {"kernel.cu": "7692c3ad3540bb80"}}
    assert changed(result, tmp_path) == []
    (tmp_path / "kernel.cu").write_text("two")
    (tmp_path / "new.cu").write_text("three")
    assert changed(result, tmp_path) == ["kernel.cu", "new.cu"]


@needs_nvrtc
@pytest.mark.parametrize(
    "edits, stale",
    [
        ({"x[threadIdx.x] *= factor": "unsigned i = threadIdx.x; x[i] *= factor"}, []),
        ({"other": "another"}, []),
        ({"y[0] = 1": "y[0] = 2"}, []),
        ({"*= factor": "+= factor"}, ["kernels_cu/scale.cu: scale_v1"]),
        ({"THREADS": "(THREADS / 2)"}, ["kernels_cu/scale.cu: scale_v1"]),
        ({"void scale_v1": "void scale_v2"}, ["kernels_cu/scale.cu: scale_v1"]),
    ],
    ids=[
        "the same another way",
        "a name",
        "another kernel",
        "an operator",
        "shared memory",
        "gone",
    ],
)
def test_a_kernel_ages_a_result_when_its_machine_code_changes(
    edits, stale, tmp_path, fingerprints, monkeypatch
):
    text = """
        extern "C" __global__ void scale_v1(float* x, float factor, int other) {
            __shared__ float sums[THREADS];
            x[threadIdx.x] *= factor;
            sums[threadIdx.x] = x[other];
            __syncthreads();
            x[0] += sums[THREADS - 1 - threadIdx.x];
        }
        extern "C" __global__ void fill(float* y) { y[0] = 1; }
        """
    path = tmp_path / "kernels_cu" / "scale.cu"
    path.parent.mkdir()
    path.write_text(text)
    use = fingerprints.KernelUse("kernels_cu/scale.cu", "scale_v1", (("THREADS", "64"),), ())
    result = {
        "benchmark": "none",
        "fingerprints": fingerprints.fingerprints("none", [use.file], tmp_path),
        "machine_code": fingerprints.machine_code([use], "sm_90", tmp_path),
    }
    result = json.loads(json.dumps(result))
    for old, new in edits.items():
        text = text.replace(old, new)
    path.write_text(text)
    assert fingerprints.changed(result, tmp_path) == stale
    # Another NVRTC makes other code of the same kernel: the tokens decide.
    monkeypatch.setattr(fingerprints, "nvrtc_version", lambda: "1.0")
    assert fingerprints.changed(result, tmp_path) == ["kernels_cu/scale.cu"]


# ---- the scripts on the CPU ---------------------------------------------------------------------

SMALL = Config(vocab=31, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=16)
FACTS = {"gpu": "A", "driver": "B", "torch": "C", "nvrtc": "D", "date": "E"}
CONDITIONS = "A, driver B, torch C"
needs_simt = pytest.mark.skipif(find_compiler()[0] is None, reason="no C++ compiler for simt")


def run_once(functions, *_):
    """In the place of timing.milliseconds."""
    for function in functions.values():
        function()
    return dict.fromkeys(functions, 1.0)


def host_times(run, calls):
    """In the place of timing.queued."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def run_captured(run, prepare=lambda: None):
    """In the place of timing.captured: a graph is the function itself."""
    prepare()
    run()
    return run


@pytest.fixture
def scripts(monkeypatch):
    """load(name, **values): a module of benchmarks/ where there is no GPU, with other constants.

    Nothing is compiled or timed by a device; memory and clock rate are made up. A replay is that of
    a tape (gpuaccel.graphs.tape), or the function itself where torch would capture it."""
    before = dict(os.environ)
    forget_scripts()
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name, **values):
        loaded = importlib.import_module(name)
        for key, value in values.items():
            assert hasattr(loaded, key), f"{name}.{key}"
            setattr(loaded, key, value)
        return loaded

    load("common", DEVICE="cpu")
    load(
        "timing",
        milliseconds=run_once,
        queued=host_times,
        separately=host_times,
        captured=run_captured,
        wall=lambda run, *_: run_once({"": run})[""],
        multiprocessors=lambda: 1,
        peak_MiB=lambda run: 2.0 + (run() is None),
        clock_MHz=lambda load: 1000.0 + (load() is not None),
    )
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for name, value in {
        "synchronize": None,
        "mem_get_info": (0, 0),
        "set_sync_debug_mode": None,
        "max_memory_allocated": 2**30,
        "max_memory_reserved": 2**30,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    yield load
    forget_scripts()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture
def on_simt(scripts):
    """The same, where kernels run on the CPU."""
    with ga.use_backend("simt"):
        yield scripts


def forget_scripts():
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def table_of(scripts, monkeypatch, name: str, results: dict) -> str:
    """The report's table of these results, which have been written and read."""
    report = scripts("report")
    result = {**FACTS, "results": json.loads(json.dumps(results))}
    monkeypatch.setattr(report, "load", lambda *_: result)
    table = getattr(report, f"{name}_table")()
    assert CONDITIONS in table
    return table


@needs_simt
def test_accumulate_runs_and_has_a_table(on_simt, monkeypatch):
    accumulate = on_simt("accumulate")
    results = accumulate.measure(SMALL)
    accumulate.show(results)
    assert table_of(on_simt, monkeypatch, "accumulate", results).count("(goal ") == 4


@needs_simt
def test_one_launch_adds_as_torch_does(on_simt):
    accumulate = on_simt("accumulate")
    arena = ga.Arena(nn.ModuleList(nn.Linear(3, 2) for _ in range(accumulate.MAX_TENSORS)))
    grads = [torch.randn(s.shape).bfloat16() for s in arena.segments]
    for _ in range(2):
        accumulate.add_at_once(arena, grads)
    assert all(
        torch.equal(v, 2 * g.float()) for v, g in zip(arena.gradients.views, grads, strict=True)
    )


@pytest.mark.slow
@needs_simt
def test_rungs_runs_and_a_notebook_shows_its_rows(on_simt, monkeypatch, tmp_path):
    sizes = dict(hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, head_dim=8, T=16)
    small = Config(vocab=256, **sizes)
    rungs = on_simt("rungs", CALLS=1, STEPS=2, LOSSES=2, SMALL=small)
    results = rungs.measure(small, small, sizes, dict.fromkeys(rungs.ROWS, 4))
    rungs.show(results)
    names = {notebook: list(result["rows"]) for notebook, result in results.items()}
    assert names == {
        "02": ["torch", "fused"],
        "03": ["eager", "replayed"],
        "04": ["torch", "torch deterministic", "ours"],
        "05": ["softmax", "in torch", "gpuaccel"],
        "07": list(rungs.RUNGS),
    }
    rows = [row for result in results.values() for row in result["rows"].values()]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    # A CPU adds in one order, so each run is bit-identical; bf16 sums differ in rounding.
    assert all(row.get("bit_equal", True) for row in rows)
    assert all(row.get("max_diff", 0) < 0.1 for row in rows)
    assert results["03"]["rows"]["replayed"]["ran"] == "graph"
    assert [row["ran"] for row in results["07"]["rows"].values()] == ["eager"] * 2 + ["graph"] * 2

    # Written as main() writes it, and shown as a notebook shows it.
    monkeypatch.setattr(on_simt("common"), "RESULTS", tmp_path)
    monkeypatch.setattr(ga.learn.recorded, "results_folder", lambda: tmp_path)
    path = on_simt("common").write("rungs", results)
    assert path == tmp_path / "cpu" / "rungs.json"
    for notebook, expected in names.items():
        shown = str(ga.learn.recorded.ledger(notebook))
        assert shown.startswith("Recorded, not run here: none")
        assert all(name in shown for name in expected)


@pytest.mark.slow
@needs_simt
def test_models_runs_keeps_the_gpus_cells_and_has_a_table(scripts, monkeypatch, tmp_path):
    """One model; and a cell that is wrong is said to be wrong."""
    pytest.importorskip("transformers", reason="transformers, of the extra `test`, is missing")
    models, report = scripts("models"), scripts("report")
    # As without a GPU, wherever this test runs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    results = models.measure(["llama"], steps=2)
    cells = results["llama"]
    ran = [value["ran"] for value in cells.values()]
    assert ran == ["eager", None, "eager", "graph", None, None]
    assert all(value["equal"] for value in cells.values() if value["ran"]), cells
    assert cells["simt, replayed"]["equals_eager"]
    models.show(results)

    # The file of an older run on a GPU, which has modes.
    fused = json.loads(json.dumps(cells))
    for column in ("torch, replayed", "cuda, eager", "cuda, replayed"):
        fused[column] = {"ran": "graph", "weight": 7e-9, "equal": True}
    fused["torch, eager"] = {"ran": "eager", "weight": 9.0, "equal": False}
    earlier = {"llama": {"host": {}, "fused": fused}}
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"results": earlier, "columns": {}}))
    models.write(path, results, 2)
    written = json.loads(path.read_text())
    table = report.models_table(written)
    assert table.count(" 7e-09 |") == 3 and "needs a GPU" not in table
    assert "differs" not in table and f"CPU, torch {torch.__version__}, transformers" in table
    assert "**differs: 9e+00**" in report.models_table(written | {"results": earlier})


@pytest.mark.parametrize("spoil", ["a weight", "a loss"])
def test_models_sees_a_step_that_differs_from_plain_torch(scripts, spoil):
    models = scripts("models")
    task = models.Task("lstm", steps=2)
    losses, state = models.plain(task, "cpu")
    right = models.compared(models.plain(task, "cpu"), (losses, state))
    assert right == {"loss": 0.0, "weight": 0.0, "equal": True}
    other = {name: t.clone() for name, t in state.items()}
    if spoil == "a weight":
        other["head.bias"][0] += 1e-2 * models.LR
    wrong = [losses[0], losses[1] * (1 + 1e-4)] if spoil == "a loss" else losses
    assert not models.compared((wrong, other), (losses, state))["equal"]


@needs_simt
def test_clip_and_tail_run(on_simt):
    clip, tail = on_simt("clip"), on_simt("tail")
    config = dataclasses.replace(SMALL, T=8)
    errors = clip.large(config, torch.float32)["norm_error"]
    assert max(errors.values()) < 1e-6
    errors = clip.large(config, torch.bfloat16)["norm_error"]
    assert errors[clip.OURS] < 1e-6
    assert clip.small(10, 10).keys() == tail.small(10, 10).keys()
    for dtype in (torch.float32, torch.bfloat16):
        assert tail.tail(config, dtype)["apart_after_one"] < 1e-6
    for rows in tail.drift(config, 3).values():
        assert max(m["max"] for m in rows.values()) < 1e-5


# ---- whole steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, group",
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("triton_tem_fused_mm_3", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
        (
            "void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits, cutlass::half>",
            "attention",
        ),
        ("adamw_v3", "tail"),
        ("accumulate_v4", "tail"),
        ("reduce_v2", "tail"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMeta",
            "tail",
        ),
        ("triton_for_fused__foreach_add_0", "tail"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>", "rest"),
        ("triton_poi_fused__unsafe_view_mul_silu_6", "rest"),
        ("rotary_backward_v2", "rest"),
        ("Memcpy DtoD (Device -> Device)", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "communication",
        ),
        ("peers_sum", "communication"),
    ],
)
def test_a_kernel_is_in_the_group_of_its_work(scripts, name, group):
    assert scripts("traces").group_of(name) == group


def test_a_trace_leaves_out_the_first_run_and_what_is_behind_the_last(scripts, monkeypatch):
    traces, runs = scripts("traces"), []

    @contextlib.contextmanager
    def profiled(caller):
        events = []
        yield events
        kinds = {"cat": "user_annotation", "name": traces.REGION}, {"cat": "gpu_user_annotation"}
        events += [{**kinds[1], "name": traces.REGION, "ts": 0.0, "dur": 9.0}]
        events += [{**kinds[0], "ts": 10.0, "dur": 20.0}]
        for name, ts in (("first", 5.0), ("a", 12.0), ("b", 29.0), ("behind", 31.0)):
            events.append({"cat": "kernel", "name": name, "ts": ts, "dur": 1.0})
        events.append({"cat": "cpu_op", "name": "aten::add", "ts": 13.0, "dur": 1.0})

    monkeypatch.setattr(traces, "profiled", profiled)
    found = traces.kernels_of(lambda: runs.append(1), 2)
    assert [event["name"] for event in found] == ["a", "b"] and len(runs) == 3


def test_time_counts_once_and_communication_is_exposed_where_nothing_runs_beside_it(scripts):
    events = [
        {"name": "nvjet_a", "ts": 0.0, "dur": 1000.0},
        {"name": "nccl_b", "ts": 500.0, "dur": 1500.0},
        {"name": "peers_sum", "ts": 1800.0, "dur": 400.0},
        # From 900 to 1,000 us beside a product.
        {"name": "rotary_backward_v2", "ts": 900.0, "dur": 200.0},
        {"name": "rotary_backward_v2", "ts": 1600.0, "dur": 100.0},
    ]
    assert scripts("traces").in_groups(events, 2) == {
        "products": 0.5,
        "attention": 0.0,
        "rest": 0.1,
        "tail": 0.0,
        # From 500 to 2,200 us.
        "communication": 0.85,
        "exposed": 0.5,
    }


@pytest.mark.slow
@needs_simt
def test_step_runs_and_has_a_table(on_simt, monkeypatch):
    on_simt("step_variants", CALLS=1)
    on_simt("limits", COPIED=2**10)
    step = on_simt("step", B=1)

    class Liger(step.Bf16Peer):
        """In the place of LigerPeer, which needs a GPU; it does not compile for one length."""

        def __init__(self, task):
            if task.T == 16:
                raise RuntimeError("no kernel\nof many")
            super().__init__(task)

        @staticmethod
        def available():
            return True

    monkeypatch.setattr(step, "LigerPeer", Liger)
    results = step.measure(SMALL, (16, 8), here=True)
    assert results["left_out"] == {"8": {}, "16": {step.LIGER: "RuntimeError: no kernel"}}
    step.show(results)
    for T, limit in results["limits"].items():
        assert limit["ms"] == pytest.approx(sum(limit["parts"].values()))
        assert all(ms > 0 for ms in limit["parts"].values())
        for row in results[T].values():
            assert row["of_limit"] * row["ms"] == pytest.approx(limit["ms"])
    expected = [step.PEER, step.BF16, step.LIGER, step.OURS, step.EXACT]
    assert list(results["launched"]["16"]) == [step.BF16, step.OURS]
    results = {
        "limits": dict(zip(("256", "1024"), results["limits"].values())),
        **dict(zip(("1024", "256"), step.lengths_of(results).values())),
        "left_out": {"1024": {step.LIGER: "did not compile in 9 s"}, "256": {}},
        "launched": {"1024": results["launched"]["16"]},
    }
    assert list(results["256"]) == expected
    assert list(results["1024"]) == [name for name in expected if name != step.LIGER]
    for rows in step.lengths_of(results).values():
        assert max(r["times_torch"] for name, r in rows.items() if name[:5] == "torch") == 1.0
        fastest = min(r["ms"] for name, r in rows.items() if name[:5] == "torch")
        assert all(r["times_torch"] == fastest / r["ms"] for r in rows.values())
        for row in rows.values():
            # Not known of a CPU.
            row["mfu"] = 0.5
    table = table_of(on_simt, monkeypatch, "step", results)
    # Of each length: the limit, two of ours, and the fastest torch. Launched: ours and torch.
    assert table.count("\n| T = ") == 9 + 2 + 2 * 4 + 2 and table.count("(goal ") == 8 + 2
    del results["launched"]
    older = table_of(on_simt, monkeypatch, "step", results)
    assert older.count("\n| T = ") == 9 + 2 * 4 and "launched:" not in older
    assert "| of the limit |" in table and "| between them |" in table
    assert "T = 1024: no row for *torch, Liger-Kernel*, which did not compile in 9 s." in table
    # What each was given, once.
    assert table.count("\n* *") == 5


def test_a_peer_that_computes_something_else_is_left_out(scripts):
    variants = scripts("step_variants")
    losses = {"torch": 10.6, "torch, wrong": 10.4, "torch, right": 10.61, "ours": 10.6}
    closed = []

    class Workers:
        def ask(self, key, what):
            results = {"alone": {"first_loss": losses[key[0]], "peak_GiB": 1.0}}
            return {**results, "groups": {}, "end": {"last_loss": 1.0}}[what]

        def timers(self, keys, calls):
            return {key: lambda: [1.0] for key in keys}

        def close(self, key):
            closed.append(key)

    workers = dict.fromkeys(((name, 256) for name in losses), Workers())
    clock = types.SimpleNamespace(say=lambda words: None)
    rows, left_out = variants.measured(workers, 1, clock)
    assert list(rows) == ["torch", "torch, right", "ours"] and closed == [("torch, wrong", 256)]
    assert left_out == {
        "torch, wrong": "did not compute the same: its first loss is 10.400, not 10.600"
    }
    # Ours has to be right.
    losses["ours"] = 10.4
    with pytest.raises(AssertionError, match="first losses"):
        variants.measured(workers, 1, clock)


@pytest.mark.slow
@needs_simt
def test_the_peers_with_bf16_weights_learn_as_the_one_in_fp32(on_simt):
    variants, step = on_simt("step_variants"), on_simt("step", B=2)
    falls = []
    masters = []
    launched = variants.LaunchedPeer
    for make, *added_by in (
        (variants.Peer,),
        (variants.Bf16Peer,),
        (launched, launched.COMPILED),
        (launched, launched.INTO_FP32),
        (launched, launched.BY_AUTOGRAD),
    ):
        peer, losses = make(step.task(SMALL, 16)), []
        for name in added_by:
            peer.add_by(name)
        for _ in range(40):
            peer.step(to_none=True)
            losses.append(float(peer.loss))
        falls.append(losses[0] - losses[-1])
        masters.append(torch.cat([p.detach().flatten() for p in peer.parameters]))
    assert falls[0] > 0.02 and falls == pytest.approx([falls[0]] * 5, rel=0.1)
    for weight, master in zip(peer.weights, peer.parameters, strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.bfloat16())
    # Launched or captured, the sums are the same. Where `.grad` is fp32, some gradients are too.
    assert torch.equal(masters[1], masters[2])
    assert all(torch.allclose(masters[1], other, atol=2e-3) for other in masters[3:])


@pytest.mark.slow
@needs_simt
def test_transformers_step_runs_and_has_a_table(on_simt, monkeypatch):
    pytest.importorskip("transformers", reason="transformers, of the extra `test`, is missing")
    on_simt("step_variants", CALLS=1)
    on_simt("limits", COPIED=2**10)
    module = on_simt("transformers_step")
    gpt2 = dataclasses.replace(SMALL, family="gpt2", tied=True)
    results = module.measure({"Llama": (SMALL, 1), "GPT-2": (gpt2, 2)}, 16, here=True)
    module.show(results)
    assert {name: (r["batch"], list(r["rows"])) for name, r in results.items()} == {
        "Llama": (1, ["torch", "torch, bf16 weights", "ours"]),
        "GPT-2": (2, ["torch", "torch, bf16 weights", "ours"]),
    }
    table = table_of(on_simt, monkeypatch, "transformers_step", results)
    assert table.count("(goal ") == 8 and "| GPT-2, 2 x 16: ours |" in table
    assert "| GPT-2, 2 x 16, launched: ours |" in table
    shares = {
        name: [row.get("of_limit") for row in r["rows"].values()] for name, r in results.items()
    }
    limit = results["Llama"]["limit"]["ms"]
    assert shares["Llama"] == [limit / row["ms"] for row in results["Llama"]["rows"].values()]
    assert shares["GPT-2"] == [None] * 3 and f"| none | {limit:.1f} ms |" in table


@pytest.mark.slow
@needs_simt
def test_lora_runs_and_has_a_table(on_simt, monkeypatch):
    pytest.importorskip("peft", reason="peft, of the extra `test`, is missing")
    on_simt("step_variants", CALLS=1)
    on_simt("limits", COPIED=2**10)
    lora = on_simt("lora", RANK=4, B=1)
    made = {make: make(SMALL, torch.bfloat16) for make in (lora.with_peft, lora.with_ours)}
    trained = [
        [tuple(p.shape) for p in model.parameters() if p.requires_grad] for model in made.values()
    ]
    assert trained[0] == trained[1] == [(4, 16), (16, 4)] * 2
    results = lora.measure(SMALL, (16, 8), here=True)
    lora.show(results)
    results = {
        "limits": dict(zip(("1024", "256"), results["limits"].values())),
        **dict(zip(("1024", "256"), lora.lengths_of(results).values())),
    }
    for rows in lora.lengths_of(results).values():
        assert list(rows) == [lora.PEER, lora.OURS]
        first = [row["first_loss"] for row in rows.values()]
        assert abs(first[0] - first[1]) < 0.02, f"first losses {first}"
    table = table_of(on_simt, monkeypatch, "lora", results)
    assert table.count("(goal ") == 4 and "x as fast" not in table
    words = " ".join(table.split())
    assert re.search(r"would be [\d.]+x \(T = 1024\) and [\d.]+x \(T = 256\) as fast", words)


LLAMA = Config(
    vocab=31, hidden=16, intermediate=24, layers=3, heads=4, kv_heads=2, head_dim=6, T=16
)


@pytest.mark.parametrize(
    "config", [LLAMA, dataclasses.replace(LLAMA, tied=True), preset("llama-350m")], ids=str
)
def test_the_limit_counts_the_models_weights_and_floating_point_operations(scripts, config):
    limits = scripts("limits")
    with torch.device("meta"):
        model = config.build()
    assert limits.parameters_of(config) == sum(p.numel() for p in model.parameters())
    layers = limits.products_of(config)
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is nn.Linear}
    assert set(", ".join(part.name for part in layers).split(", ")) == names
    linears = [m.weight for m in model.modules() if type(m) is nn.Linear]
    assert sum(p.ins * sum(p.outs) * p.count for p in layers) == sum(w.numel() for w in linears)
    for tokens, T in ((8, 8), (32, 16)):
        done = sum(part.flops(tokens) for part in layers)
        done += limits.attention_flops(config, tokens, T)
        assert done == flops_per_token(config, T) * tokens
    # Forward and the inputs' gradients, but for the input of the first layer's w_q, w_k and w_v.
    frozen = limits.products_of(config, trained=False)
    first = 2 * 8 * config.hidden * sum(frozen[0].outs)
    assert 3 * (sum(part.flops(8) for part in frozen) + first) == 2 * sum(
        part.flops(8) for part in layers
    )


def test_the_limit_counts_bytes_as_a_reader_would(scripts):
    """Elements of bf16 tensors, one by one, of a model with one layer."""
    limits = scripts("limits")
    c = dataclasses.replace(LLAMA, layers=1)
    x, q, k, g, logits = (8 * width for width in (16, 4 * 6, 2 * 6, 24, 31))
    bytes_moved = limits.bytes_of_micro_batch(c, 8)
    rows = bytes_moved.pop("embedding, backward") - 2 * x
    # fp32 rows, read and written: at most one for each token.
    assert 0 < rows <= 8 * (16 * 8) and rows % (16 * 8) == 0
    assert {what: size // 2 for what, size in bytes_moved.items()} == {
        # row -> x, norm(x)
        "embedding, forward": 3 * x,
        # x, attention's or the MLP's output -> x, norm(x)
        "residual and norm, forward": 2 * (4 * x),
        # final norm: dh, x -> dx; the other two: dh, x, dx -> dx
        "residual and norm, backward": 3 * x + 2 * (4 * x),
        # q, k -> q, k; dq, dk -> dq, dk
        "rotation": 4 * (q + k),
        # gate, up -> h
        "swiglu, forward": 3 * g,
        # dh, gate, up -> dgate, dup
        "swiglu, backward": 5 * g,
        # logits -> dlogits
        "cross-entropy": 2 * logits,
    }
    frozen = limits.bytes_of_micro_batch(c, 8, trained=False)
    assert frozen["embedding, backward"] == 0
    assert frozen["residual and norm, backward"] == 2 * (3 * x + 4 * x)
    assert sum(limits.tail_bytes_per_parameter().values()) == 4 + 4 * 4 + 3 * 4 + 2


def test_a_product_of_the_limit_takes_the_weights_of_one_layer_after_another(scripts):
    limits = scripts("limits")
    run = limits.in_turn(torch.sum, torch.eye(3).cumsum(0))
    assert [run().item() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_the_products_of_the_limit_are_those_of_a_layer(scripts):
    limits = scripts("limits")
    layers = limits.Products("w_q, w_k, w_v", 2, 16, (24, 12, 12))
    runs = limits.product_runs(layers, 8)
    assert {widths for widths, _ in runs} == {48, 24, 12} and len(runs) == 3 * 4
    y, dx = runs[24, "forward"](), runs[24, "input"]()
    assert y.shape == (8, 24) and dx.shape == (8, 16)
    total = torch.full((12, 16), float("nan"))
    dy, x = torch.randn(8, 12).bfloat16(), torch.randn(8, 16).bfloat16()
    limits.add_product(total, dy, x, 0)
    once = total.clone()
    limits.add_product(total, dy, x, 1)
    assert torch.allclose(once, dy.float().t() @ x.float()) and torch.allclose(total, 2 * once)
    frozen = dataclasses.replace(layers, trained=False)
    assert {what for _, what in limits.product_runs(frozen, 8)} == {"forward", "input"}


@pytest.mark.parametrize("path", [p for p in RESULTS if p.stem == "step"], ids=str)
def test_no_recorded_step_is_faster_than_its_limit(path):
    results = json.loads(path.read_text())["results"]
    for T in results.get("limits", {}):
        for name, row in results[T].items():
            assert 0 < row["of_limit"] <= 1, f"T = {T}, {name}: {row['of_limit']}"


def test_the_headline_of_a_step_names_the_fastest_peer(scripts, monkeypatch):
    report = scripts("report")

    def row(ms):
        return {"ms": ms, "times_torch": 90.0 / ms}

    rows = {"torch": row(100.0), "torch, Liger-Kernel": row(90.0), "ours": row(75.0)}
    rows["ours, deterministic"] = row(80.0)
    result = {**FACTS, "results": {"1024": rows, "256": rows}}
    monkeypatch.setattr(report, "load", lambda name, gpu=None: result if name == "step" else None)
    first, *_ = report.claims()
    assert first.value == 1.2 and first.against == "torch, Liger-Kernel"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that sends a signal")
def test_a_peer_that_does_not_compile_in_time_says_so(scripts):
    variants = scripts("step_variants")
    began, processes = time.monotonic(), []

    def compiling():
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        while time.monotonic() < began + 20:
            # As torch.compile, which goes on when a kernel fails.
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    slow = variants.Attempt(0.1, compiling)
    assert time.monotonic() < began + 10
    assert slow.alone() == {"left_out": "did not compile in 0.1 s"}
    # Nor does a process that it has started outlive it.
    assert processes[0].wait(timeout=10) != 0
    wrong = variants.Attempt(5.0, lambda: types.SimpleNamespace(alone=lambda: 1 / 0))
    assert wrong.alone() == {"left_out": "ZeroDivisionError: division by zero"}
    right = variants.Attempt(5.0, lambda: types.SimpleNamespace(alone=dict, times=range))
    assert right.alone() == {} and right.times(2) == range(2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
@needs_simt
def test_graphs_and_timeline_run_and_have_a_table(on_simt, monkeypatch):
    graphs, timeline = on_simt("graphs", STEPS=10, NAN_STEP=4, CALLS=1), on_simt("timeline")
    shapes, counts = ((2, 16), (2, 8), (1, 8)), ((3, 3), 2)
    r = graphs.measure(SMALL, SMALL, SMALL, shapes, (8, 6), 1, counts, here=True)
    graphs.show(r)
    assert r["bits"]["exact"] == {
        "eager, replay": {"losses": 0, "weights": 0},
        "replay, replay": {"losses": 0, "weights": 0},
    }
    assert r["bits"]["graphs"] == 2 and r["bits"]["skipped"] == 1 and r["bits"]["clipped"] > 5
    assert 0 <= max(map(max, r["graph"]["edges"])) < len(r["graph"]["names"])
    assert all(r["timeline"].values())
    r["speed"] = dict(zip(("4 x 1024", "4 x 256", "1 x 128"), r["speed"].values()))
    for row in r["ledger"].values():
        # Not known of a CPU.
        row.update(launches=1, graph_launches=1, syncs=0)
    table = table_of(on_simt, monkeypatch, "graphs", r)
    assert table.count("\n| ours") == 3 and "1 (goal 4: missed)" in table
    assert "0 of 10 losses, 0 of 0 M weights (goal 0)" in table
    result = timeline.measure(SMALL, 2, compile=False, here=True)
    timeline.show(result)
    assert result["tails"].keys() == set(timeline.CLIPS)


# ---- power, memory and sizes --------------------------------------------------------------------

# In the place of nvidia-smi: GPU 0 at 600 W, or 500 W while the file exists; GPU 1 tells little.
NVIDIA_SMI = """
import datetime, pathlib, sys, time
while True:
    now = datetime.datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    watts = 500 if pathlib.Path(sys.argv[1]).exists() else 600
    print(f"{now}, {watts}.25, 700.00, 1755, 61, 2048, 0")
    print(f"{now}, [N/A], [N/A], 100, 30, 4096, 1", flush=True)
    time.sleep(0.01)
"""


def test_power_and_clock_are_read_while_a_variant_is_measured(scripts, tmp_path, monkeypatch):
    power, timing = scripts("power"), scripts("timing")
    slower = tmp_path / "slower"

    def torch_():
        slower.touch()
        time.sleep(0.3)
        return [2.0]

    def ours():
        slower.unlink()
        time.sleep(0.3)
        return [1.0]

    command = [sys.executable, "-c", NVIDIA_SMI, str(slower)]
    slower.touch()
    with power.Sampler(command):
        deadline = time.monotonic() + 60
        while power.most_GiB() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        timing.in_turns({("torch", 256): torch_, "ours": ours}, 2, "T")
        readings = power.readings()
        assert readings.keys() == {"T, torch, 256", "T, ours"}
        # A line from before the change may fall into the first 20 ms.
        assert readings["T, torch, 256"]["W"] == 500.25 and readings["T, ours"]["W"] == 600.25
        assert readings["T, ours"]["limit_W"] == 700 and readings["T, ours"]["SM_MHz"] == 1755
        both = power.reading(gpus=2)
        assert both["samples"] >= 2 * min(r["samples"] for r in readings.values())
        assert power.most_GiB() == 4.0
        # Another process has GPU 1.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert power.most_GiB() == 2.0
    assert power.reading() is None and power.most_GiB() is None
    # Where there is no nvidia-smi.
    with power.Sampler(["no-such-program"]):
        assert power.readings() == {} and power.reading() is None


def test_the_model_fits_into_the_memory_that_is_there(scripts, monkeypatch):
    memory = scripts("memory")
    monkeypatch.delenv(memory.LIMIT, raising=False)
    gpu = types.SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
    assert memory.available_GiB() == 40
    sizes = []
    for GiB in (15, 24, 40, 69, 70):
        monkeypatch.setenv(memory.LIMIT, str(GiB))
        config, size = memory.models_that_fit(70, T=256)[0]
        assert config.T == 256
        sizes.append((config.layers, config.vocab, size))
    assert sizes == [
        (2, 4096, "llama-350m with 2 layers and 4,096 tokens"),
        (3, 8192, "llama-350m with 3 layers and 8,192 tokens"),
        (6, 32768, "llama-350m with 6 layers"),
        (12, 32768, "llama-350m with 12 layers"),
        (24, 32768, None),
    ]

    limits = []
    # Nothing is limited where there is no GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory.obey_limit()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    memory.obey_limit()
    monkeypatch.setenv(memory.LIMIT, "20")
    memory.obey_limit()
    monkeypatch.delenv(memory.LIMIT)
    memory.obey_limit()
    assert limits == [70 / 80, 20 / 80]


@pytest.mark.slow
def test_a_benchmark_that_runs_out_of_memory_takes_a_smaller_model(scripts, monkeypatch, tmp_path):
    common, memory = scripts("common", RESULTS=tmp_path), scripts("memory")
    monkeypatch.setenv(memory.LIMIT, "1000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    layers, shown = [], []

    def measure(config):
        layers.append(config.layers)
        if config.layers > 6:
            raise RuntimeError("'ours' failed: torch.OutOfMemoryError: CUDA out of memory. Tried")
        return {"layers": config.layers}

    common.record("clip", measure, shown.append, GiB=70)
    result = json.loads((tmp_path / "cpu" / "clip.json").read_text())
    assert layers == [24, 12, 6] and shown == [{"layers": 6}] == [result["results"]]
    assert result["size"] == "llama-350m with 6 layers" and result["power_by_variant"] == {}

    def wrong(config):
        layers.append(config.layers)
        raise RuntimeError("first losses differ")

    layers.clear()
    with pytest.raises(RuntimeError, match="differ"):
        common.record("clip", wrong, shown.append, GiB=70)
    assert layers == [24]
    full = lambda config: (_ for _ in ()).throw(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        common.record("clip", full, shown.append, GiB=70)


@pytest.mark.parametrize("GiB, smaller", [(15, True), (79, False)])
def test_benchmarks_of_parts_have_sizes_for_small_gpus(GiB, smaller, scripts, monkeypatch):
    monkeypatch.setenv(scripts("memory").LIMIT, str(GiB))
    dispatch, encoder = scripts("dispatch"), scripts("encoder")
    cases, size = dispatch.cases_that_fit()
    assert cases.keys() == dispatch.CASES.keys()
    assert (cases != dispatch.CASES) == (size is not None) == smaller
    arguments, size = encoder.sizes_that_fit()
    assert arguments.keys() <= encoder.PARTS.keys() and (size is not None) == smaller
    for name, values in arguments.items():
        inspect.signature(encoder.PARTS[name][0]).bind(**values)


def test_workers_start_when_they_are_asked_where_memory_is_scarce(scripts):
    workers = scripts("workers")
    variants = {"one": (collections.Counter, "aab"), "two": (os._exit, 1)}
    with workers.Workers(variants, at_once=False) as some:
        some.ready()
        assert some.names == ["one", "two"] and some.ask("one", "total") == 3
        some.close("one", "two")
        assert some.names == []


# ---- run.py -------------------------------------------------------------------------------------

NOWHERE = {"gpu": "none", "gpus": 0, "commit": "c0ffee"}
ONE_GPU = {"gpu": "NVIDIA H200", "gpus": 1, "commit": "c0ffee"}


def test_run_names_every_benchmark(scripts):
    """A script that records a result has its line in run.ALL."""
    run = scripts("run")
    recording = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if re.search(r"\b(record|write)\(.*|RESULT\.write_text", path.read_text())
        and "def main" in path.read_text()
    }
    assert recording - {"run", "report", "versions"} == set(run.ALL)


def test_run_leaves_out_in_words_what_cannot_run(scripts, monkeypatch, tmp_path):
    scripts("common", RESULTS=tmp_path)
    run = scripts("run", RESULTS=tmp_path)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    todo, left_out = run.chosen([], False, NOWHERE)
    assert todo == ["cpu", "faults"]
    assert left_out["step"] == "needs a GPU; this machine has none"
    assert left_out["ddp"] == "needs 2 GPUs; this machine has none"
    assert left_out["models"].startswith("needs transformers")
    todo, left_out = run.chosen([], False, ONE_GPU)
    assert left_out["ddp"] == "needs 2 GPUs; this machine has 1"
    assert left_out["faults"] == 'measures a CPU: make bench ONLY="faults"'
    absent = {name for name, needs in run.ALL.items() if needs.modules}
    assert absent == {"lora", "models", "transformers_step"}
    assert set(todo) == run.ALL.keys() - {"cpu", "ddp", "ddp_traces", "faults", *absent}
    assert run.chosen(["faults", "clip"], False, ONE_GPU) == (["faults", "clip"], {})
    minutes = sum(run.ALL[name].seconds for name in (*todo, *absent)) / 60
    # As the documentation says.
    assert 25 <= minutes <= 30


def test_run_goes_on_where_it_was_interrupted(scripts, monkeypatch, tmp_path):
    common = scripts("common", RESULTS=tmp_path)
    run, prints = scripts("run", RESULTS=tmp_path), scripts("fingerprints")

    def is_left(**facts):
        content = {"gpu": "NVIDIA H200", "commit": "c0ffee", "benchmark": "clip", "date": "today"}
        content |= {"fingerprints": prints.fingerprints("clip", ())} | facts
        common.save(tmp_path / "h200" / "clip.json", content)
        return "clip" in run.chosen([], False, ONE_GPU)[0]

    assert "clip" in run.chosen([], False, ONE_GPU)[0]
    assert not is_left()
    assert run.chosen([], False, ONE_GPU)[1]["clip"] == "has a result of this commit"
    assert "clip" in run.chosen([], True, ONE_GPU)[0]
    assert run.chosen(["clip"], False, ONE_GPU)[0] == ["clip"]
    assert "clip" in run.chosen([], False, {**ONE_GPU, "gpu": "NVIDIA A100"})[0]
    assert is_left(commit="0ther")
    assert is_left(fingerprints={"benchmarks/clip.py": "0"})
    # Each number of GPUs has a file.
    two = {**ONE_GPU, "gpus": 2}
    assert [p.name for p in run.result_paths("ddp", two)] == ["ddp_2gpus.json"]
    assert [p.name for p in run.result_paths("ddp", {**two, "gpus": 4})][1:] == ["ddp_4gpus.json"]


def test_run_goes_on_after_a_failure_and_says_so(scripts, monkeypatch, tmp_path, capsys):
    for name, text in {
        "good": "print('fine')",
        "bad": "raise SystemExit('no such kernel')",
        "last": "print('fine, too')",
        "report": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    run = scripts("run", BENCHMARKS=tmp_path, ROOT=tmp_path, LOGS=tmp_path / "logs")
    run.ALL = {name: run.Benchmark(1, 0) for name in ("good", "bad", "last")}
    monkeypatch.setattr(run, "machine", lambda: NOWHERE)
    monkeypatch.setattr(run, "is_done", lambda *_: False)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert run.main() == 1
        out, err = capsys.readouterr()
        assert "failed: bad (exit status 1, logs/bad.log)" in out and "no such kernel" in err
        assert (tmp_path / "logs" / "last.log").read_text() == "fine, too\n"
        assert "bad (2 of 3); then last" in err
        run.ALL.pop("bad")
        assert run.main() == 0
        run.ALL["last"] = run.Benchmark(1, 1)
        assert run.main() == 0
        monkeypatch.setattr(sys, "argv", ["run.py", "last"])
        assert run.main() == 1
        assert "left out: last needs a GPU; this machine has none" in capsys.readouterr()[0]
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_run_ends_what_it_has_started_when_it_is_stopped(scripts, tmp_path):
    """The script's own processes, too."""
    child = "import time, sys; print('alive', flush=True); time.sleep(60)"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (tmp_path / "slow.py").write_text(text)
    run = scripts("run", BENCHMARKS=tmp_path, ROOT=tmp_path)
    log, groups = tmp_path / "slow.log", []
    popen = subprocess.Popen

    def started(*args, **more):
        process = popen(*args, **more)
        groups.append(process.pid)
        return process

    def stop_once_alive():
        if "alive" in log.read_text():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run.subprocess, "Popen", started)
        run.run_script("slow", log, stop_once_alive)
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(groups[0], 0)
            time.sleep(0.1)


# ---- report.py ----------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(scripts, tmp_path):
    """report.py with the results of clip.py and step.py on two GPUs; those of the second miss."""
    common, report = scripts("common", RESULTS=tmp_path), scripts("report")
    power = {"W": 689.7, "limit_W": 700.0, "SM_MHz": 1755.0, "C": 60.0, "samples": 9}
    for gpu, ratio in (("NVIDIA H200", 1.2), ("NVIDIA H100 80GB HBM3", 1.1)):
        row = {"ms": 9.0, "times_torch": ratio, "peak_GiB": 9.0, "memory": 1.0, "mfu": 0.4}
        row["tokens_per_s"] = 1e5
        rows = {"torch": row, "ours": row, "ours, deterministic": row}
        result = {**FACTS, "gpu": gpu, "results": {"1024": rows, "256": rows}}
        if gpu == "NVIDIA H200":
            result |= {"power": power, "power_by_variant": {"torch": power, "ours": power}}
            common.save(tmp_path / "h200" / "clip.json", result)
        else:
            result |= {"size": "llama-350m with 6 layers", "date": "2000-01-01"}
        common.save(tmp_path / common.folder_of(gpu) / "step.json", result)
    report.TABLES = {"step": report.step_table}
    return report


def test_the_tables_of_another_gpu_are_folded(two_gpus):
    # The one that was measured last first.
    assert two_gpus.machines("*") == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    table = two_gpus.table("step")
    first, second = table.split("<details>\n<summary>The same on H100</summary>\n\n")
    assert "*NVIDIA H200, driver B" in first and "H100" not in first
    assert "*NVIDIA H100 80GB HBM3, driver B" in second and second.endswith("\n\n</details>")
    words = " ".join(first.split())
    assert "E; 690 of 700 W, 1,755 MHz. By variant: torch: 690 W, 1,755 MHz; ours: 690 W," in words
    assert "to fit into the memory: llama-350m with 6 layers" in " ".join(second.split())
    page = "<!-- step: made by benchmarks/report.py -->\nold\n<!-- /step -->\n"
    assert two_gpus.filled(page) == page.replace("old", table)


def test_the_readme_has_the_gpu_measured_last_and_missed_goals_are_those_of_all(
    two_gpus, monkeypatch
):
    claim = two_gpus.Claim
    made = {
        gpu: [claim("a step", "torch", ratio, {**FACTS, "gpu": gpu})]
        for gpu, ratio in (("NVIDIA H200", 1.2), ("NVIDIA H100 80GB HBM3", 1.1))
    }
    monkeypatch.setattr(two_gpus, "claims", made.get)
    lines = two_gpus.ratios_table().split("\n")
    assert lines[0] == "| what | against | speed |"
    assert lines[2:] == [
        "| a step | torch | 1.20x |",
        "",
        f"*NVIDIA H200, {two_gpus.versions(FACTS)}.*",
    ]
    missed = two_gpus.missed_table()
    # One reaches its goal, and both miss it.
    assert re.search(r"\| T = 1024: ours; [^|]* \| H100: 1.10x \(goal \S+: missed\) \|", missed)
    assert re.search(r"\| H200: 1.20x \(goal \S+: missed\); H100: 1.10x \(goal", missed)
    assert two_gpus.short("none") == "CPU"
    assert two_gpus.short("NVIDIA H100 PCIe, limited to 15 GiB") == "H100, limited to 15 GiB"


@pytest.mark.slow
def test_cpu_runs_and_has_a_table(scripts, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cpu = scripts("cpu", ROUNDS=1, ROWS=4, T=8, THREADS=(1,))
    threads = torch.get_num_threads()
    try:
        with ga.use_backend("torch", "off"):
            results = cpu.measure()
    finally:
        torch.set_num_threads(threads)
    cpu.show(results)
    report = scripts("report")
    results = json.loads(json.dumps(results))
    monkeypatch.setattr(report, "load", lambda *_: {**FACTS, "gpu": "none", "results": results})
    table = report.cpu_table()
    assert table.count("(goal 0.95x") == 2
    assert "*Without a GPU, torch C" in table and results["processor"] in " ".join(table.split())


# ---- encoder.py ---------------------------------------------------------------------------------


@pytest.fixture
def encoder(on_simt):
    sizes = {"VOCAB": 300, "T": 16, "TEXT_BYTES": 20_000, "ALL_CHANNELS": 2**12, "CHANNELS": 8}
    return on_simt("encoder", **sizes, CALLS=1)


@pytest.mark.slow
@needs_simt
def test_encoder_runs_and_has_a_table(encoder, scripts, monkeypatch):
    results = {
        "backward": encoder.backward(96, 16, 2**10),
        "grid": encoder.grid((16,), (48, 96), (256, 300)),
        "positions": encoder.positions(2, 16, (16,), 2**10),
        "segments": encoder.segments((48, 96), (256, 300)),
    }
    for name in encoder.DISTRIBUTIONS:
        variants = results["backward"][name]["variants"].values()
        assert [m["runs"] for m in variants].count(100) == 2
        assert {m["differ"] for m in variants} == {0}
        assert not any(m["cannot_be_captured"] for m in variants)
    assert len(results["grid"]) == 16
    assert {c["channels_checked"] for c in results["grid"]} == {16, 8}
    sizes = {"vocab": 31, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "kv_heads": 2}
    config = preset("gpt2-124m", **sizes, head_dim=8, T=16)
    r = results["step"] = encoder.step(config, 2, 3, here=True)
    assert r["twice"]["weights_equal"] and r["twice"]["losses_equal"]
    losses = [row["last_loss"] for row in r["variants"].values()]
    assert max(losses) - min(losses) < 1e-3, f"the three variants train differently: {losses}"
    results = json.loads(json.dumps(results))
    for name, (_, show) in encoder.PARTS.items():
        show(results[name])
    table = table_of(scripts, monkeypatch, "encoder", results)
    assert table.count("\n|---") == 7 and table.count("\n| ") == 7 + 3 * 4 + 2 + 1 + 4 + 3
    assert table.count("(goal ") == 4 * 4 + 4 * 2 + 4 + 1 + 2


@needs_simt
def test_encoder_sees_wrong_sums_and_what_cannot_be_captured(encoder, monkeypatch):
    right, runs = encoder.encoder_backward, []
    tokens, dout = encoder.tokens_of(encoder.ZIPF, 48, 300), encoder.random_dout(48, 16)
    used = int(tokens[0, 0])
    unused = (set(range(300)) - set(tokens.flatten().tolist())).pop()
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
        result = encoder.case(tokens, dout, dout.float(), 300)
        reason = str(result.get("cannot_be_captured", {}).get(encoder.IN_LINE))
        seen = {
            "error": result["error"][encoder.IN_LINE] > encoder.ROUNDING,
            "differ": result["differ"] == 1,
            "stray": result["stray"] == 1,
            "captured": "wait for a value" in reason,
        }
        assert [what for what, is_seen in seen.items() if is_seen] == [name], result
        assert result["times_dense"] == 1.0
    spoil = spoils["stray"]
    with pytest.raises(AssertionError, match=r"\d of 4 cases have wrong sums"):
        encoder.grid((16,), (48,), (300,))


# ---- dispatch.py --------------------------------------------------------------------------------


@pytest.fixture
def dispatch(on_simt, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    threads = torch.get_num_threads()
    on_simt("dispatch_layers", CALLS=1)
    yield on_simt("dispatch", HEADS=2, HEAD=16, T=20, LONG=24, COPIED=2**10, CHUNK=64)
    torch.set_num_threads(threads)


def dispatch_cases():
    sizes = {"vocab": 31, "hidden": 32, "intermediate": 48, "layers": 1, "heads": 2, "kv_heads": 2}
    config = preset("poly-7m", **sizes, head_dim=16, T=20)
    return {
        "curves": {"bf16": ("bfloat16", 6, 24, True)},
        "attention": {"batch 1": (1, None, True), "batch 2, window 9": (2, 9, False)},
        "layers": {"batch 32": (2, config)},
    }


@pytest.mark.slow
@needs_simt
def test_dispatch_runs_and_has_a_table(dispatch, scripts, monkeypatch):
    shown = []

    def show(part, result):
        dispatch.PARTS[part][1](result)
        shown.append(part)

    results = dispatch.measure(list(dispatch.PARTS), dispatch_cases(), here=True, done=show)
    assert shown == ["curves", "attention", "layers"]
    peers = {dispatch.EAGER, dispatch.FOLDED, dispatch.COMPILED, dispatch.COMPILED_FOLDED}
    for m in results["curves"]["bf16"].values():
        assert m["ms"].keys() == m["errors"].keys() == {dispatch.OURS, *peers}
        assert not m["cannot_be_captured"]
        assert m["times"][dispatch.EAGER] == {"forward": 1.0, "backward": 0.0}
    glu, special = results["curves"]["bf16"]["glu"], 6 * 24 * 6 / 16e9 * 1e3
    rate = glu["copy_GB_per_s"]
    assert glu["floors_ms"]["forward"]["special"] == pytest.approx(special)
    assert glu["of_floor"]["backward"] == pytest.approx(5 * 24 * 6 * 2 / rate / 1e6)
    for case, m in results["attention"].items():
        assert not m["core"]["cannot_be_captured"] and not m["layer"]["cannot_be_captured"]
        assert m["differ"] == 0
        extras = dispatch.FLASH in m["core"]["times"], dispatch.GATHERED in m["core"]["times"]
        assert {*extras, "long" in m} == {case == "batch 1"}
    layers = results["layers"]
    assert layers["batch 32"].keys() == {"RichardsGLU", "PolyAttention", "step"}
    assert layers["cores"] == 1
    losses = layers["batch 32"]["step"]["first_loss"].values()
    assert max(losses) - min(losses) < 0.02, f"ours and torch's begin differently: {losses}"
    table = table_of(scripts, monkeypatch, "dispatch", results)
    assert table.count("\n| ") == 3 + 2 + 4 + 3 and table.count("(goal ") == 2 * 4 + 4 * 2 + 1 + 1


@needs_simt
@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda y, calls: y * 1.02, "ours is farther from float64"),
        (lambda y, calls: y * (1 + 0.006 * (calls == 2)), r"two runs of ours differ in \d+"),
    ],
    ids=["wrong", "different"],
)
def test_dispatch_names_a_wrong_case_and_goes_on(dispatch, monkeypatch, spoil, message):
    right, calls, done = dispatch.poly_attention, [], []

    def spoiled(*args):
        calls.append(1)
        y = right(*args)
        return spoil(y, len(calls)) if len(args[0]) == 1 else y

    monkeypatch.setattr(dispatch, "poly_attention", spoiled)
    cases = {"attention": {"batch 1": (1, None, False), "batch 2": (2, None, False)}}
    keep = lambda part, result: done.append(list(result))
    with pytest.raises(RuntimeError, match=f"^attention, batch 1: {message}") as error:
        dispatch.measure(["attention"], cases, here=True, done=keep)
    assert done == [["batch 2"]] and "batch 2" not in str(error.value)


@needs_simt
def test_dispatch_sees_wrong_gradients_of_the_gated_unit(dispatch, monkeypatch):
    backward, curves = dispatch.launch_glu_backward, dispatch.Pointwise("float32", 6, 24, False)
    for index, name in enumerate(("dx", "dtheta", "dtheta")):

        def wrong(*args):
            return [g * (1 + 2e-3 * (i == index)) for i, g in enumerate(backward(*args))]

        monkeypatch.setattr(dispatch, "launch_glu_backward", wrong)
        with pytest.raises(AssertionError, match=f"'{name}'"):
            curves.measure()


def test_dispatch_counts_what_the_kernels_header_counts(scripts):
    dispatch = scripts("dispatch")
    moved, special = dispatch.MOVED["glu"], dispatch.SPECIAL
    header = (ROOT / "kernels_cu" / "richards.cu").read_text().split("#ifndef")[0]
    words = " ".join(header.replace("//", " ").split())
    glu = re.search(
        r"forward (\d) reads and a write, backward (\d) reads and (\d) writes.*"
        r"Special functions: forward (\d+), backward (\d+)",
        words,
    )
    assert glu, header
    expected = [moved["forward"] - 1, moved["backward"] - 2, 2, *special["glu"].values()]
    assert list(map(int, glu.groups())) == expected
    assert re.search(r"costs four special functions per element.*forward three", words), header
    assert special["curve"] == {"forward": 3, "backward": 4}


# ---- faults.py ----------------------------------------------------------------------------------

FAULTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import faults
results = faults.measure({"kills": 1, "corruptions": 20, "calls": 4}, 5, lambda text: None)
print(json.dumps([results, faults.show_sentences(results)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_faults_runs_and_says_its_figures_in_words():
    """In a process of its own, because it forks."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results, sentences = json.loads(done.stdout.splitlines()[-1])
    kills, damage, calls = results["kills"], results["corruptions"], results["calls"]
    assert kills["faults"] >= 1 and sum(kills["kinds"].values()) == kills["faults"]
    assert kills["losses_compared"] == 20 * kills["runs"] and kills["losses_different"] == 0
    assert damage["refused"] + damage["loaded_alike"] == damage["corruptions"] == 20
    assert calls["calls"] == 4 and calls["without_a_sentence"] == 0
    assert len(sentences) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_faults_counts_a_load_that_changes_something_before_it_refuses(scripts):
    faults = scripts("faults")
    load = faults.load_checkpoint

    def hasty(path, *, arena, **others):
        arena.weights.zero_()
        return load(path, arena=arena, **others)

    faults.load_checkpoint = hasty
    results = faults.measure_corruptions(5, 0)
    assert results["wrong"] == 5 and results["refused"] == 0


@pytest.mark.parametrize(
    "status, hung, said, well",
    [
        (0, False, "", True),
        (1, False, "gpuaccel: no such file\n", True),
        (1, False, "", False),
        (1, False, "Traceback (most recent call last):\ngpuaccel: x", False),
        (2, False, "usage: gpuaccel\ngpuaccel: error: --x", True),
        (2, False, "usage: gpuaccel", False),
        (70, False, "gpuaccel: x", False),
        (0, True, "", False),
    ],
)
def test_faults_knows_a_call_that_ended_well(status, hung, said, well, scripts):
    end = {"status": status, "hung": hung, "said": said}
    assert scripts("faults").is_well(end) == well


def test_the_page_has_the_figures_of_faults(scripts):
    result = json.loads((BENCHMARKS / "results" / "cpu" / "faults.json").read_text())
    page = " ".join((ROOT / "docs" / "several-gpus.md").read_text().split())
    for sentence in scripts("faults").show_sentences(result["results"]):
        assert sentence in page


# ---- workers.py ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_worker_is_a_process_and_its_errors_come_through(scripts):
    workers, timing = scripts("workers"), scripts("timing")
    variants = {"one": (collections.Counter, "aab"), "two": (collections.Counter, "abb")}
    with workers.Workers(variants) as some:
        some.ready()
        timers = {name: lambda name=name: [some.ask(name, "total")] for name in some.names}
        assert timing.in_turns(timers, 2) == {"one": 3, "two": 3}
        assert [some.ask(name, "most_common", 1) for name in some.names] == [[("a", 2)], [("b", 2)]]
        some.close("one")
        assert some.names == ["two"]
        message = "'two' failed in its process:(.|\n)*AttributeError"
        with pytest.raises(workers.WorkerError, match=message):
            some.ask("two", "nothing")
    assert workers.KERNELS_USED == set()
    with workers.Workers({"clip": (clip_kernel, "squares_v1", 2.0)}) as some:
        some.ready()
    (use,) = workers.KERNELS_USED
    assert (use.file, use.name) == ("kernels_cu/clip.cu", "squares_v1")
    with (
        pytest.raises(workers.WorkerError, match="'gone' has died"),
        workers.Workers({"gone": (os._exit, 1)}) as some,
    ):
        some.ready()


def test_workers_can_be_asked_by_several_threads_before_they_are_ready(scripts):
    workers = scripts("workers")
    variants = {"one": (collections.Counter, "aab"), "two": (collections.Counter, "abb")}
    with workers.Workers(variants) as some, concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(some.ask, name, "total") for name in variants]
        assert [answer.result(timeout=120) for answer in asked] == [3, 3]


@pytest.mark.slow
def test_rank_workers_that_hang_or_die_are_named_and_the_others_go_on(scripts):
    workers = scripts("workers")
    sets = {"numbers": (range, 2), "locks": (threading.Semaphore,)}
    with workers.RankWorkers(sets, 2, "cpu") as some:
        # Of range(0, 2) and range(1, 2).
        assert some.ask("numbers", "index", 1) == [1, 0]
        message = (
            r"numbers: rank \d raised(.|\n)*ValueError: 5 is not in range(.|\n)*rank \d raised"
        )
        with pytest.raises(workers.WorkerError, match=message):
            some.ask("numbers", "index", 5)
        # Rank 0 has a semaphore without a permit, rank 1 one with a permit.
        with pytest.raises(workers.WorkerError, match="^locks: rank 0 has not answered for 0.5 s$"):
            some.ask("locks", "acquire", timeout=0.5)
        assert some.names == ["numbers"] and some.ask("numbers", "count", 0) == [1, 0]
        message = "numbers: rank 1 raised(.|\n)*ValueError: 0 is not in range"
        with pytest.raises(workers.WorkerError, match=message):
            some.ask("numbers", "index", 0)
        for name in ("numbers", "locks"):
            with pytest.raises(workers.WorkerError, match=name):
                some.ask(name, "count", 0)
        assert some.names == []
    with (
        workers.RankWorkers({"gone": (os._exit,)}, 1, "cpu") as some,
        pytest.raises(workers.WorkerError, match="gone: rank 0 has died"),
    ):
        some.ask("gone", "anything")


# ---- ddp.py -------------------------------------------------------------------------------------


@pytest.fixture
def ddp(scripts):
    """ddp.py, with one step in each turn."""
    return scripts("ddp", CALLS=1, ROUNDS={True: 1, False: 1}, SETTLED=4)


@pytest.fixture
def groups(ddp):
    """The variants without what only GPUs have, all of them in the same workers."""

    def on_cpu(variant):
        options = variant.options and {
            key: value for key, value in variant.options.items() if key != "peer_to_peer"
        }
        return dataclasses.replace(variant, options=options)

    return {
        group: {name: ("all", on_cpu(variant)) for name, (_, variant) in variants.items()}
        for group, variants in ddp.GROUPS.items()
    }


@pytest.mark.slow
def test_ddp_runs_and_has_a_table(ddp, groups, scripts, monkeypatch):
    ranks = scripts("ddp_ranks")
    config = dataclasses.replace(SMALL, hidden=64, intermediate=128, layers=2)
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
    r = ddp.measure(bench, 2, (0.001,), keep=kept.append, groups=groups)
    assert kept == [r] and r["failed"] == {} and r["left_out"] == []
    assert r["groups"].keys() == groups.keys()
    for group, counts in r["groups"].items():
        names = {*groups[group], ddp.EACH} - {ddp.HIERARCHICAL}
        if group in ddp.LATER:
            names |= {f"{name}, again" for name in ddp.BASES}
        assert {count: rows.keys() for count, rows in counts.items()} == {"4": names, "1": names}
    checks = r["bits"]["variants"]
    assert all(equal for variant in checks.values() for equal in variant.values())
    assert "equal to one GPU" in checks["ordered"]
    equal = [m for variants in r["equal_on_all_ranks"].values() for m in variants.values()]
    assert all(m["equal"] for m in equal)
    # Turns of replayed steps are longer.
    assert sorted(m["steps"] for m in equal) == [4] * 3 + [7] * 7
    for answer in r["made"][ddp.CAPTURED]["DDP"]:
        assert answer["replay_apart"] < ranks.REPLAY_ERROR
        assert answer["gradients"] in ("set to None", "zeroed in place")
    torch_groups = [group for group in groups if "DDP" in groups[group]]
    assert torch_groups == [ddp.COMPILED, ddp.CAPTURED, ddp.SPLIT, ddp.EAGER]
    for count, fastest in r["fastest_torch"].items():
        peers = {group: r["groups"][group][count]["DDP"] for group in torch_groups}
        peers |= {g: r["groups"][g][count]["FSDP2"] for g in (ddp.FSDP, ddp.CAPTURED_FSDP)}
        assert fastest == max(peers, key=lambda group: peers[group]["tokens_per_s_per_gpu"])
    # bf16 parameters beside bf16 autocast, and half of the optimizer's state on each of two ranks.
    (loss,), (expected,) = (
        {answer["first_loss"] for answer in r["made"][group][name][:1]}
        for group, name in ((ddp.FSDP, "FSDP2"), (ddp.COMPILED, "DDP"))
    )
    assert abs(loss - expected) < 1e-2
    for group in (ddp.FSDP, ddp.CAPTURED_FSDP):
        kept = {name: m["optimizer_GiB"] for name, m in r["memory"][group].items()}
        assert kept["FSDP2"] == pytest.approx(kept[ddp.ONE] / 2, rel=0.05)
    memory = {name: m["optimizer_GiB"] for name, m in r["memory"][ddp.REPLAYED].items()}
    assert memory["all-reduce"] == memory[ddp.ONE] > memory["sharded"] > 0
    operations = {"all_reduce", "reduce_scatter", "all_gather"}
    assert r["bandwidth"]["the arena"].keys() == {"bytes", *operations}
    bucket = r["bandwidth"]["a bucket"]
    assert bucket.keys() == {"bytes", *operations, "all_to_all"}
    rate = bucket["bytes"] / 2 / bucket["all_to_all"]["ms"] / 1e6
    assert bucket["all_to_all"]["bus_GB_per_s"] == pytest.approx(rate)
    ddp.show(r)
    hierarchical = {name: groups[ddp.REPLAYED][name] for name in (ddp.ONE, ddp.HIERARCHICAL)}
    four = ddp.measure(
        dataclasses.replace(bench, micro_batches=(1,)),
        4,
        (),
        parts=(ddp.REPLAYED,),
        groups={ddp.REPLAYED: hierarchical},
    )
    assert four["failed"] == {}
    assert four["groups"][ddp.REPLAYED]["1"].keys() == {ddp.ONE, ddp.EACH, ddp.HIERARCHICAL}
    assert four["equal_on_all_ranks"][ddp.REPLAYED][ddp.HIERARCHICAL]["equal"]

    report = scripts("report")
    r = json.loads(json.dumps(r))
    r["why_not"] = {"torch, captured": {"other": "RuntimeError: a | b"}}
    r |= {"failed": {"bits": "why"}, "nccl": {"version": "9", "NCCL_X": "1"}}
    result = {**FACTS, "results": {"2": r}}
    monkeypatch.setattr(report, "load", {"ddp_2gpus": result}.get)
    table = report.ddp_table()
    # Bits: three checks of deterministic steps, and each number of steps.
    bits = 3 + len({m["steps"] for m in equal})
    assert table.count("\n|---") == 4 and table.count("\n| ") == 4 + 22 + bits + 1 + 3
    assert table.count("(goal ") == 2 * 2 + 2 + 1 + bits and CONDITIONS in table
    assert len(re.findall(r" ms, \d+\.\d\dx \|", table)) == 2 * 6
    words = " ".join(table.split())
    for count, micro_batches in (("4", "4 micro-batches"), ("1", "1 micro-batch")):
        fastest = r["fastest_torch"][count]
        name = "FSDP2" if "FSDP2" in fastest else "DDP"
        assert f'With {micro_batches} the fastest of torch is "{fastest}: {name}"' in words
    assert table.count(r"failed: RuntimeError: a \| b") == 2
    assert "NCCL 9 with `NCCL_X=1`.\n\nFailed or left out: bits." in table


@pytest.mark.slow
def test_ddp_traces_runs_and_has_a_table(ddp, groups, scripts, monkeypatch):
    ranks, traces = scripts("ddp_ranks"), scripts("ddp_traces")
    bench = ranks.Bench(
        dataclasses.replace(SMALL, hidden=64, intermediate=128),
        rows=2,
        micro_batches=(4, 1),
        device="cpu",
        compile=False,
        graph=False,
    )
    r = traces.traced(bench, 2, groups)
    assert r["failed"] == {} and r["left_out"] == []
    for group, names in traces.TRACED.items():
        for count in ("4", "1"):
            rows = r["groups"][group][count]
            assert list(rows) == [ddp.ONE, ddp.EACH, *names[1:]]
            # Nothing runs on a GPU here.
            assert all(set(row["groups"].values()) == {0.0} for row in rows.values())
    traces.show(r)
    row = r["groups"][ddp.REPLAYED]["4"]["sharded"]
    row["ms"] = 10.0
    row["groups"] |= {"products": 5.0, "tail": 1.5, "communication": 4.0, "exposed": 1.0}
    report = scripts("report")
    result = {**FACTS, "results": {"2": json.loads(json.dumps(r))}}
    monkeypatch.setattr(report, "load", {"ddp_traces_2gpus": result}.get)
    table = report.ddp_traces("2")
    expected = "sharded; 4 | 5.0 | 0.0 | 0.0 | 1.5 | 4.0, exposed 1.0 | 2.5 | 10.0 ms |"
    assert expected in table and table.count("\n| ") == 1 + 2 * (3 + 5) and CONDITIONS in table
    assert report.ddp_traces("4") == ""


class ScriptedWorkers:
    """In the place of RankWorkers: two ranks with the answers of a test.

    replies: method -> function of its arguments; an exception that it returns is raised"""

    ranks = 2

    def __init__(self, **replies):
        self.replies = replies
        self.pending = collections.defaultdict(list)
        self.stopped = {}
        self.names = ["all"]

    def send(self, name, method, *args):
        reply = self.replies.get(method, lambda *_: [None, None])
        self.pending[name].append(reply(*args))

    def answers(self, name, timeout=None):
        answer = self.pending[name].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, name, method, *args, timeout=None):
        self.send(name, method, *args)
        return self.answers(name)

    def stop(self, name):
        self.stopped[name] = "it was closed"


def making(key, variant):
    """Both ranks' answers to make()."""
    loss = 9.0 if key == ("torch, eager", "DDP") else 3.0
    return [
        {"first_loss": loss, "optimizer_GiB": 1.0, "kernels": []},
        {"first_loss": loss + 0.01, "optimizer_GiB": 2.0, "kernels": []},
    ]


@pytest.fixture
def bench(scripts):
    config = dataclasses.replace(SMALL, intermediate=32, layers=2, T=10)
    return scripts("ddp_ranks").Bench(config, rows=3, device="cpu")


def test_ddp_takes_the_slowest_rank_and_says_what_failed(ddp, groups, bench, scripts):
    error = scripts("workers").WorkerError("rank 1 has not answered for 60 s")
    timed = set()

    def times(key, count, calls, alone):
        group, name = key
        if name == "sharded" and count == 1:
            return error
        replays = group in (ddp.CAPTURED, ddp.SPLIT, ddp.CAPTURED_FSDP, ddp.REPLAYED)
        timed.add((replays, count, calls))
        # The clocks have not settled in the first quarter.
        unsettled = [99.0] * (calls // 4) if replays else []
        if alone:
            ms = (10.0,)
        elif name == ddp.ONE:
            ms = (11.0, 12.0)
        elif name in ("DDP", "FSDP2"):
            ms = (18.75 if group == ddp.CAPTURED else 20.0, 14.0)
        else:
            ms = (15.0, 14.0)
        answers = [unsettled + [one * count] * (calls - len(unsettled)) for one in ms]
        return answers + [[]] * alone

    def last(key):
        other = "other" if key == (ddp.REPLAYED, "ordered") else "one"
        return [["one", 2.0, 8], [other, 2.0, 8]]

    workers = ScriptedWorkers(make=making, times=times, last=last)
    run = ddp.Run(workers, bench, groups, "all")
    run.all((), ddp.PARTS[:-2])
    run.memory()
    run.against_torch()
    r = run.results
    captured, replayed = r["groups"][ddp.CAPTURED], r["groups"][ddp.REPLAYED]
    assert r["fastest_torch"] == {"4": ddp.CAPTURED, "1": ddp.CAPTURED}
    keys = {"ms", "tokens_per_s_per_gpu", "of_one_gpu", "exposed_ms"}
    assert captured["4"]["DDP"].keys() == replayed["4"][ddp.ONE].keys() == keys
    assert r["groups"][ddp.OURS_EAGER]["1"]["all-reduce"]["times_torch"] == 1.25
    assert replayed["4"]["all-reduce"] == {
        "ms": 60.0,
        "tokens_per_s_per_gpu": 2000.0,
        "of_one_gpu": pytest.approx(2 / 3),
        "exposed_ms": 12.0,
        "times_torch": 1.25,
    }
    assert timed == {(True, 4, 1), (True, 1, 4), (False, 4, 1), (False, 1, 1)}
    assert replayed["1"]["all-reduce"]["ms"] == 15.0
    again = {f"{name}, again" for name in ddp.BASES}
    assert replayed["1"].keys() == {ddp.EACH, *groups[ddp.REPLAYED], *again} - {"sharded"}
    assert r["groups"][ddp.EAGER]["4"].keys() == {ddp.ONE, ddp.EACH}
    assert r["memory"][ddp.REPLAYED]["ordered"] == {"optimizer_GiB": 2.0}
    failed = r["failed"]
    assert failed.pop(f"times of {ddp.REPLAYED}, sharded, 1") == str(error)
    assert failed.pop(f"making of {ddp.EAGER}: DDP").startswith("the first loss is 9.0")
    message = failed.pop(f"end of {ddp.REPLAYED}: ordered")
    assert message.startswith("the ranks' weights are not bit-identical") and not failed
    equal = r["equal_on_all_ranks"][ddp.REPLAYED]
    assert not equal["ordered"]["equal"] and equal["sharded"]["equal"]

    # As if it had failed.
    del captured["4"]["DDP"]
    run.against_torch()
    assert r["fastest_torch"] == {"4": ddp.COMPILED, "1": ddp.CAPTURED}
    assert replayed["4"]["all-reduce"]["times_torch"] == pytest.approx(4 / 3)


def test_ddp_leaves_out_what_has_no_time_left(ddp, groups, bench):
    run = ddp.Run(ScriptedWorkers(make=making), bench, groups, "all", limit=-1)
    run.all((1,), ddp.PARTS)
    assert run.results["left_out"] == [*groups, "bits", "bandwidth"]
    assert not run.results["failed"]


def test_ddp_measures_its_own_rows_early_and_shows_them_last(ddp):
    """What a limit of time cuts off are the steps launched from Python."""
    assert sorted(ddp.ORDER) == sorted(ddp.GROUPS)
    assert ddp.ORDER[-2:] == (ddp.EAGER, ddp.OURS_EAGER) and ddp.ORDER[2] == ddp.REPLAYED
    assert list(ddp.GROUPS)[-1] == ddp.REPLAYED


def test_ddp_makes_some_variants_when_the_others_memory_is_free(ddp, groups, bench):
    """And compares them with the base as it is then, whose first times stay in the results."""
    there, most = set(), []
    base = iter([20.0, 21.0, 10.0, 11.0])

    def make(key, variant):
        there.add(key)
        most.append({name for group, name in there if group == ddp.REPLAYED})
        return making(key, variant)

    def times(key, count, calls, alone):
        assert key in there
        ms = next(base) if alone else 25.0
        return [[ms] * calls, [] if alone else [ms] * calls]

    def drop(*keys):
        there.difference_update(keys)
        return [None, None]

    last = [["one", 2.0, 8]] * 2
    workers = ScriptedWorkers(make=make, times=times, drop=drop, last=lambda key: last)
    run = ddp.Run(workers, bench, {ddp.REPLAYED: groups[ddp.REPLAYED]}, "all")
    run.all((), (ddp.REPLAYED,))
    later = set(ddp.LATER[ddp.REPLAYED])
    assert most[3] == groups[ddp.REPLAYED].keys() - later and most[-1] == {ddp.ONE, *later}
    for count, (first, second) in {"4": (20, 10), "1": (21, 11)}.items():
        rows = run.results["groups"][ddp.REPLAYED][count]
        again = {f"{name}, again" for name in ddp.BASES}
        assert rows.keys() == {ddp.EACH, *groups[ddp.REPLAYED], *again}
        assert rows[ddp.ONE]["ms"] == first and rows[f"{ddp.ONE}, again"]["ms"] == second
        assert rows["all-reduce"]["of_one_gpu"] == first / 25
        assert rows["sharded"]["of_one_gpu"] == second / 25
    assert not there and not run.results["failed"]


def test_ddp_writes_what_it_has_when_the_signal_comes_twice(scripts, monkeypatch):
    """As from `timeout`: to the process, and to the processes of its group."""
    ddp, kept = scripts("ddp"), []

    def measure(bench, ranks, *options):
        keep = options[3]
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            keep({"ranks": ranks, "failed": {}})

    arguments = types.SimpleNamespace(
        gpus=[2], buckets=[], seconds=1.0, parts=[], without=[], write=True
    )
    monkeypatch.setattr(ddp, "arguments", lambda: arguments)
    monkeypatch.setattr(ddp, "measure", measure)
    monkeypatch.setattr(ddp, "measuring_here", contextlib.nullcontext)
    models = scripts("memory")
    monkeypatch.setattr(models, "models_that_fit", lambda GiB: [(preset("tiny"), None)])
    monkeypatch.setattr(ddp, "write", lambda name, results, **more: kept.append((name, results)))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("GPUACCEL_GPU", "auto")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="stopped by SIGTERM"):
            ddp.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    ((name, results),) = kept
    assert name == "ddp_2gpus" and results["2"]["ranks"] == 2


@pytest.mark.parametrize(
    "spoil, unequal",
    [
        (lambda first, second: None, []),
        (lambda first, second: first["one GPU"].update(eager=["a", [1.5]]), ["equal to one GPU"]),
        (lambda first, second: second["ordered"].update(replayed=["b"]), ["equal on all ranks"]),
        (
            lambda first, second: first["ordered"].update(replayed=["b"]),
            ["equal on all ranks", "replayed equal to launched"],
        ),
    ],
    ids=["equal", "one GPU", "another rank", "replay"],
)
def test_ddp_says_which_bits_differ(ddp, groups, bench, spoil, unequal):
    names = ("all-reduce", "ordered", "sharded", "one GPU")
    answers = [
        {name: {"eager": ["a", [1.0]], "replayed": ["a", [1.0]]} for name in names} for _ in "12"
    ]
    spoil(*answers)
    run = ddp.Run(ScriptedWorkers(bits=lambda: answers), bench, groups, "all")
    run.bits()
    checks = run.results["bits"]["variants"]["ordered"]
    assert [what for what, equal in checks.items() if not equal] == unequal


def test_the_row_of_a_peer_that_cannot_be_captured_has_the_errors_sentence(
    ddp, groups, bench, scripts
):
    sentence = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    error = scripts("workers").WorkerError(
        f"all: rank 0 failed:\nTraceback (most recent call last):\n  x()\n{sentence}\nA hint."
    )

    def make(key, variant):
        return error if key == (ddp.CAPTURED_FSDP, "FSDP2") else making(key, variant)

    run = ddp.Run(ScriptedWorkers(make=make), bench, groups, "all")
    run.make({ddp.CAPTURED_FSDP: groups[ddp.CAPTURED_FSDP]})
    assert run.results["why_not"] == {ddp.CAPTURED_FSDP: {"FSDP2": sentence}}
    assert run.results["failed"].keys() == {f"making of {ddp.CAPTURED_FSDP}: FSDP2"}
    assert ddp.error_sentence("one\nrank 1 has not answered") == "rank 1 has not answered"


# ---- ddp_ranks.py -------------------------------------------------------------------------------


@pytest.fixture
def one_rank(scripts, tmp_path):
    """ddp_ranks.py in this process, which is the only rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield scripts("ddp_ranks")
    torch.distributed.destroy_process_group()


def small_bench(ranks, **options):
    config = dataclasses.replace(SMALL, intermediate=32)
    return ranks.Bench(config, rows=2, device="cpu", compile=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, options",
    [("torch", None), ("torch", {"bucket_cap_mb": 100}), ("FSDP2", {})],
    ids=["one GPU", "DDP", "FSDP2"],
)
def test_torchs_captured_step_is_checked_and_begins_with_the_first_weights(
    one_rank, monkeypatch, make, options
):
    bench = small_bench(one_rank, graph=False)
    variant = one_rank.Variant(make, replayed=True, options=options)
    captured = one_rank.Captured(0, bench, variant)
    launched = one_rank.Peer(0, bench, dataclasses.replace(variant, replayed=False))
    batch = one_rank.rank_batch(bench, 1)
    for count in (4, 1, 4):
        for step in (captured, launched):
            step.run([t[: 2 * count] for t in batch], count)
        assert float(captured.loss) == float(launched.loss)
        assert captured.hash() == launched.hash()
    right = one_rank.Recording.replay
    spoils = (
        # Two steps.
        lambda self: (right(self), right(self)),
        # Another loss.
        lambda self: (right(self), self.total.add_(1)),
    )
    monkeypatch.setattr(one_rank, "TRIALS", 1)
    message = "4 micro-batches: replayed and launched, a step changes the weights differently"
    for replay in spoils:
        monkeypatch.setattr(one_rank.Recording, "replay", replay)
        with pytest.raises(AssertionError, match=message):
            one_rank.Captured(0, bench, variant)


class SideStream:
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
            assert isinstance(streams[-1], SideStream), f"{what} not on the stream that captures"
            events.append(what)
            return function(*args, **more)

        return called

    fake_graph = types.SimpleNamespace(replay=lambda: None, reset=lambda: events.append("reset"))
    for name, fake in {
        "Stream": SideStream,
        "stream": stream,
        "graph": graph,
        "graph_pool_handle": lambda: "shared",
        "current_stream": lambda: None,
        "CUDAGraph": lambda: fake_graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    made_by_torch = one_rank.DistributedDataParallel
    monkeypatch.setattr(one_rank, "DistributedDataParallel", noted("DDP", made_by_torch))
    monkeypatch.setattr(one_rank.Peer, "step", noted("step", one_rank.Peer.step))
    monkeypatch.setattr(one_rank.Captured, "_check", lambda self, count: events.append("check"))
    variant = one_rank.Variant("torch", replayed=True, options={"bucket_cap_mb": 100})
    one_rank.Captured(0, small_bench(one_rank), variant).close()
    warm_up = ["step"] * 3
    trial = ["capture into None", "step", "reset"]
    final = ["capture into shared", "step", "check"]
    expected = ["DDP", *["step"] * 13, *trial, *warm_up, *trial]
    assert events == [*expected, *warm_up, *final, *warm_up, *final, "reset", "reset"]


def test_a_rank_sees_that_its_gpu_hangs(scripts, monkeypatch):
    ranks = scripts("ddp_ranks")
    done = itertools.chain([False, False, True], itertools.repeat(False))
    event = types.SimpleNamespace(record=lambda: None, query=lambda: next(done))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    rank = types.SimpleNamespace(cuda=True)
    ranks.Rank._finish(rank)
    with pytest.raises(scripts("workers").Stuck, match="not finished a step for 0.05 s"):
        ranks.Rank._finish(rank, 0.05)


@pytest.mark.slow
@needs_simt
def test_versions_compares_a_version_with_itself(on_simt, monkeypatch):
    monkeypatch.setattr(ga, "preset", lambda name: SMALL)
    versions = on_simt(
        "versions",
        ROUNDS=1,
        CALLS=1,
        LAUNCHES=2,
        STEPS=2,
        B=1,
        LONG=16,
        SHORT=8,
        BITS_T=16,
    )
    results = versions.measure(str(versions.ROOT), here=True)
    assert len(results["ratios"]) == 8 and all(r > 0 for r in results["ratios"].values())
    assert len(results["bits"]) == 3 and all(results["bits"].values())
    # A version that is not in the folder is not measured in silence.
    with pytest.raises(AssertionError, match="expected"):
        versions.Version(str(versions.ROOT / "tests"), "tiny", "tiny")
