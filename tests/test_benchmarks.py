"""Benchmarks run at a tiny size and see what is wrong; pages and charts show their results."""

import collections
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
import xml.etree.ElementTree as xml

import pytest
import torch
from torch import nn

import gpuaccel as ga
from gpuaccel.backends import find_compiler
from gpuaccel.errors import CaptureError
from gpuaccel.training.models import Config, preset

ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").rglob("*.json"))
SMALL = Config(vocab=31, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=16)
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
        captured=run_captured,
        multiprocessors=lambda: 1,
        peak_MiB=lambda run: 2.0 + (run() is None),
        clock_MHz=lambda load: 1000.0 + (load() is not None),
    )
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    for name, value in {
        "synchronize": None,
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


def table(scripts, name: str, results: dict) -> dict:
    """The tables of these results, which have been written and read."""
    tables = scripts(name).tables(json.loads(json.dumps(results)))
    assert all(some.markdown() and some.text() for some in tables.values() if some.rows)
    return tables


def column(some, head: str) -> dict[str, str]:
    """First cell -> cell of a column."""
    return {row[0]: row[some.head.index(head)] for row in some.rows}


# ---- tables, pages and charts -------------------------------------------------------------------


def test_numbers_have_one_style(scripts):
    t = scripts("tables")
    values = (0, 0.119, 5.7, 94.09, 104.24, 1234.5)
    assert [t.number(v) for v in values] == ["0", "0.119", "5.70", "94.1", "104.2", "1,234"]
    assert [t.number(-0.5), t.ratio(1.138), t.share(0.976)] == ["-0.500", "1.14x", "98%"]


def test_a_table_has_the_columns_with_a_value_and_tables_stand_side_by_side(scripts):
    t = scripts("tables")
    columns = [t.Column("step", "name"), t.Column("ms", "ms", t.number), t.Column("MFU", "mfu")]
    first = t.Table(columns, [{"name": "a", "ms": 1.0}, {"name": "b|c", "ms": None}])
    assert first.markdown() == "| step | ms |\n|---|---|\n| a | 1.00 |\n| b\\|c |  |"
    assert first.text() == "step    ms\na     1.00\nb|c"
    second = t.Table(columns, [{"name": "d", "ms": 2.0, "mfu": "9"}, {"name": "a", "ms": 3.0}])
    both = t.side_by_side({"A": first, "B": second.only(["MFU"])})
    assert both.head == ["step", "A: ms", "B: MFU"]
    assert both.rows == [["a", "1.00", ""], ["b|c", "", ""], ["d", "", "9"]]
    with pytest.raises(
        ValueError, match=r"no columns \['tokens'\]; expected some of \['step', 'ms'"
    ):
        first.only(["tokens"])


def test_the_pages_show_the_stored_results(scripts):
    report = scripts("report")
    names = set()
    for path in report.PAGES:
        text = path.read_text()
        names |= {match["name"].split("/")[0] for match in report.PART.finditer(text)}
        assert len(report.PART.findall(text)) == text.count("made by benchmarks/report.py")
        assert report.filled(text) == text, f"{path.name}: run python benchmarks/report.py"
    assert {"step", "clip", "ddp_2gpus", "models", "faults", "ratios"} <= names


def test_a_page_without_its_result_says_which_is_missing(scripts, tmp_path):
    scripts("common", RESULTS=tmp_path)
    page = "<!-- step/steps h200: made by benchmarks/report.py -->\n<!-- /step/steps -->"
    with pytest.raises(FileNotFoundError, match="step/steps: no result h200/step.json"):
        scripts("report").filled(page)


def test_report_mends_a_page_and_writes_one_for_each_gpu(scripts, monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- cpu/cpu cpu: made by benchmarks/report.py -->\nold\n<!-- /cpu/cpu -->\n")
    common = scripts("common", ROOT=tmp_path)
    report = scripts("report", PAGES=(page,), BUILD=tmp_path / "build")
    # As where matplotlib is missing.
    monkeypatch.setitem(sys.modules, "charts", None)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    with pytest.raises(SystemExit, match="page.md show other results: run python"):
        report.main()
    monkeypatch.setattr(sys, "argv", ["report.py"])
    report.main()
    assert "| step, 1 thread |" in page.read_text() and "old" not in page.read_text()
    assert {p.stem for p in report.BUILD.iterdir()} == {p.name for p in common.RESULTS.glob("*/")}
    assert "no charts: " in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["h100_80gb_hbm3", "h200", "cpu"])
def test_every_stored_result_has_tables_and_says_when_it_was_measured(scripts, folder):
    page = scripts("report").everything(folder, {"a chart": "a.svg"})
    for path in (BENCHMARKS / "results" / folder).glob("*.json"):
        result = json.loads(path.read_text())
        facts = f"{result['date']}, commit {result['commit']}, torch {result['torch']}"
        part = page.split(f"\n## {path.stem}\n")[1].split("\n## ")[0]
        assert facts in part and "\n|---" in part, path


def test_the_charts_show_the_stored_results(scripts):
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `test`, is missing")
    report, charts = scripts("report"), scripts("charts")
    stored = ROOT / "docs" / "charts"
    drawn = charts.charts(report.PAGE_GPUS)
    assert {path.stem for path in stored.glob("*.svg")} == drawn.keys() == charts.CHARTS.keys()
    for name, figure in drawn.items():
        svg = xml.fromstring((stored / f"{name}.svg").read_text())
        there = {"".join(part.itertext()) for part in svg.iter() if part.tag.endswith("}text")}
        numbers = {text.get_text() for ax in figure.axes for text in ax.texts}
        assert len(numbers) > 5 and numbers <= there, f"{name}: run python benchmarks/report.py"


@pytest.mark.parametrize("path", [p for p in RESULTS if p.stem == "step"], ids=str)
def test_recorded_steps_are_within_their_limit(path):
    for T, r in json.loads(path.read_text())["results"].items():
        for name, row in (*r["rows"].items(), *r.get("launched", {}).items()):
            assert 0 < row["of_limit"] <= 1, f"T = {T}, {name}: {row['of_limit']}"


# ---- scripts at a tiny size ---------------------------------------------------------------------


@pytest.mark.slow
@needs_simt
def test_accumulate_clip_and_tail_run(on_simt):
    accumulate, clip, tail = on_simt("accumulate"), on_simt("clip"), on_simt("tail")
    addition = {"addition": accumulate.addition(SMALL), "launch_us": {"ours": 1.0}}
    made = table(on_simt, "accumulate", addition)
    assert (
        column(made["addition"], "against torch")["bfloat16: accumulate_v3, one launch"] == "1.00x"
    )
    config = dataclasses.replace(SMALL, T=8)
    results = {name: clip.large(dtype, config) for name, dtype in clip.DTYPES.items()}
    rows = table(on_simt, "clip", results)["clipping"]
    errors = {name: float(cell) for name, cell in column(rows, "error of the norm").items()}
    assert max(error for name, error in errors.items() if name != "bfloat16: torch foreach") < 1e-6
    results = {name: tail.tail(dtype, config) for name, dtype in clip.DTYPES.items()}
    assert max(r["apart_after_one"] for r in results.values()) < 1e-6
    assert table(on_simt, "tail", results)["tail"].rows


@pytest.mark.slow
@needs_simt
def test_step_runs(on_simt):
    on_simt("step_variants", CALLS={"replayed": 1, "launched": 1})
    on_simt("limits", COPIED=2**10)
    step, v = on_simt("step", B=1), on_simt("step_variants")
    r = step.measure(SMALL, 8, here=True)
    assert r["limit"]["ms"] == pytest.approx(sum(r["limit"]["parts"].values()))
    assert list(r["rows"]) == [v.PEER, v.BF16, v.OURS, v.EXACT]
    assert list(r["launched"]) == [v.PEER, v.BF16, v.OURS]
    for rows in (r["rows"], r["launched"]):
        fastest = min(rows[name]["ms"] for name in (v.PEER, v.BF16))
        assert all(row["times_torch"] == fastest / row["ms"] for row in rows.values())
        assert all(
            row["of_limit"] * row["ms"] == pytest.approx(r["limit"]["ms"]) for row in rows.values()
        )
    made = table(on_simt, "step", {"8": r})
    assert [row[0] for row in made["steps"].rows][-1] == "T=8, launched: ours"
    assert [row[0] for row in made["time"].rows][:3] == [
        "T=8: limit",
        "T=8: ours",
        "T=8: ours, deterministic",
    ]


TOKENS = dict(vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
TOKENS |= dict(intermediate_size=48, max_position_embeddings=16)
IMAGES = dict(num_labels=5, image_size=32)
# Model of transformers_step.py -> its sizes here.
TINY = {
    "Llama": dict(TOKENS, num_key_value_heads=1, use_cache=False),
    "GPT-2": dict(vocab_size=31, n_positions=16, n_embd=32, n_layer=1, n_head=2),
    "Qwen3": dict(TOKENS, num_key_value_heads=1, head_dim=16),
    "BERT": dict(TOKENS),
    "ViT": dict(TOKENS, **IMAGES, patch_size=8),
    "ConvNeXt": dict(IMAGES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "ResNet": dict(IMAGES, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]),
    "Llama-peft": dict(TOKENS, num_key_value_heads=1, use_cache=False),
}


@pytest.fixture
def of_transformers(on_simt):
    """(transformers_step with small models, step_variants)"""
    pytest.importorskip("peft", reason="peft and transformers, of the extra `test`, are missing")
    variants = on_simt("step_variants", CALLS={"replayed": 1, "launched": 1})
    module = on_simt("transformers_step")
    for name, model in module.MODELS.items():
        sizes = {**model.sizes, **TINY[name]}
        T = 16 if model.T else 0
        module.MODELS[name] = dataclasses.replace(model, rows=2, T=T, sizes=sizes)
    return module, variants


@pytest.mark.slow
@needs_simt
def test_transformers_step_runs(of_transformers, on_simt):
    module, _ = of_transformers
    results = {name: module.measure(name, here=True) for name in ("GPT-2", "ViT")}
    names = ["torch", "torch, bf16 weights", "ours"]
    assert all(list(r[kind]) == names for r in results.values() for kind in ("rows", "launched"))
    steps = table(on_simt, "transformers_step", results)["steps"]
    assert [row[0] for row in steps.rows][2::3] == [
        "GPT-2 0M, 2 x 16: ours",
        "ViT 0M, 2 images: ours",
        "GPT-2 0M, 2 x 16, launched: ours",
        "ViT 0M, 2 images, launched: ours",
    ]


@pytest.mark.slow
@needs_simt
@pytest.mark.parametrize("name", TINY)
def test_a_model_of_transformers_learns_alike_in_torch_and_ours(of_transformers, name):
    module, variants = of_transformers
    assert TINY.keys() == module.MODELS.keys()
    task = module.MODELS[name].step
    peer, ours = variants.Bf16Peer(task), variants.Ours(task, "launched")
    losses = [ours.first_loss], []
    for _ in range(4):
        ours.run()
        losses[0].append(float(ours.out.loss))
    for _ in range(5):
        peer.step(to_none=True)
        losses[1].append(float(peer.loss))
    # Autocast rounds elsewhere.
    within = 1e-2 if module.MODELS[name].kind in module.CONVOLUTIONS else 2e-3
    assert losses[0] == pytest.approx(losses[1], abs=within), losses
    replayed = variants.Ours(task)
    replayed.run()
    assert float(replayed.out.loss) == pytest.approx(losses[0][1], abs=1e-3)


@pytest.mark.slow
@needs_simt
def test_graphs_runs(on_simt):
    on_simt("step_variants", CALLS={"replayed": 1, "launched": 1})
    graphs = on_simt("graphs")
    host = graphs.host(SMALL, 1, 8)
    for row in host.values():
        # Not known of a CPU.
        row.update(launches=1, graph_launches=1, syncs=0)
    results = {"speed": graphs.speed(SMALL, ((1, 8),), here=True), "host": host}
    made = table(on_simt, "graphs", results)
    assert len(made["speed"].rows) == 7 and len(made["host"].rows) == 3
    assert not table(on_simt, "graphs", {"host": host})["speed"].rows


@pytest.mark.slow
@needs_simt
def test_models_runs_and_keeps_the_gpus_cells(scripts, monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="transformers, of the extra `test`, is missing")
    models = scripts("models")
    # As without a GPU, wherever this test runs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    results = models.measure(["llama"], steps=2)
    cells = results["llama"]
    assert [value["ran"] for value in cells.values()] == [
        "eager",
        "eager",
        "graph",
        None,
        None,
    ]
    assert all(value["equal"] for value in cells.values() if value["ran"]), cells
    assert cells["simt, replayed"]["equals_eager"]
    earlier = {"cuda, eager": {"ran": "eager", "weight": 7e-9, "equal": True}}
    earlier["torch, eager"] = {"ran": "eager", "weight": 9.0, "equal": False}
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"results": {"models": {"llama": earlier}, "columns": {}}}))
    before = models.tables(json.loads(path.read_text())["results"])["models"]
    assert column(before, "torch, launched") == {"`llama`": "**differs: 9e+00**"}
    after = models.tables(models.write(path, results, 2))
    assert column(after["models"], "cuda, launched") == {"`llama`": "7e-09"}
    assert column(after["models"], "cuda, replayed") == {"`llama`": "needs a GPU"}
    assert "differs" not in after["models"].markdown()
    assert column(after["columns"], "torch")["simt, launched"] == torch.__version__


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "mixtral", "bert", "t5", "vit", "resnet", "lstm"]
)
def test_models_makes_each_model(scripts, name):
    pytest.importorskip("transformers", reason="transformers, of the extra `test`, is missing")
    task = scripts("models").Task(name, steps=1)
    assert torch.isfinite(task.loss_fn(task.first, task.batches[0]))


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


@pytest.mark.slow
def test_cpu_runs(scripts):
    cpu = scripts("cpu", ROUNDS=1, ROWS=4, T=8)
    threads = torch.get_num_threads()
    try:
        with ga.use_backend("torch", "off"):
            results = {"1 thread": cpu.measure(1)}
    finally:
        torch.set_num_threads(threads)
    assert list(column(table(scripts, "cpu", results)["cpu"], "ours, ms")) == [
        "clipping and AdamW, 1 thread",
        "step, 1 thread",
    ]


# ---- whole steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group, names",
    [
        (
            "products",
            ["nvjet_sm90_tst_256x128", "cublasLt::splitKreduce_kernel<32>", "triton_tem_mm"],
        ),
        (
            "attention",
            ["cudnn_generated_fort_native_sdpa", "pytorch_flash::flash_bwd<cutlass::half>"],
        ),
        ("tail", ["adamw_v3", "at::native::multi_tensor_apply_kernel", "triton_for_fused_foreach"]),
        ("rest", ["at::native::reduce_kernel<512>", "triton_poi_fused_silu", "glu_backward"]),
        (
            "communication",
            ["Memcpy PtoP (Device -> Device)", "ncclDevKernel_AllReduce", "peers_sum"],
        ),
    ],
)
def test_a_kernel_is_in_the_group_of_its_work(scripts, group, names):
    assert {scripts("traces").group_of(name) for name in names} == {group}


def test_time_counts_once_and_communication_is_exposed_where_nothing_runs_beside_it(scripts):
    events = [
        {"name": "nvjet_a", "ts": 0.0, "dur": 1000.0},
        {"name": "nccl_b", "ts": 500.0, "dur": 1500.0},
        {"name": "peers_sum", "ts": 1800.0, "dur": 400.0},
        # From 900 to 1,000 us beside a product.
        {"name": "glu_backward", "ts": 900.0, "dur": 200.0},
        {"name": "glu_backward", "ts": 1600.0, "dur": 100.0},
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


def test_variants_that_compute_different_losses_are_refused(scripts):
    variants = scripts("step_variants")
    losses = {"torch": 10.6, "torch, right": 10.61, "ours": 10.6}

    class Workers:
        names = [(name, "replayed", "") for name in losses]

        def ask(self, key, what, *_):
            alone = {"first_loss": losses[key[0]], "peak_GiB": 1.0, "ms_alone": 1.0}
            return {"alone": alone, "end": {"last_loss": 1.0}}[what]

        def timers(self, keys, calls):
            return {key: lambda: [1.0] for key in keys}

    clock = types.SimpleNamespace(say=lambda words: None)
    assert list(variants.measured(Workers(), "replayed", clock)) == list(losses)
    losses["ours"] = 10.4
    with pytest.raises(AssertionError, match="first losses"):
        variants.measured(Workers(), "replayed", clock)


@pytest.mark.slow
@needs_simt
def test_the_peers_with_bf16_weights_learn_as_the_one_in_fp32(on_simt):
    variants, step = on_simt("step_variants"), on_simt("step", B=2)
    falls = []
    masters = []
    bf16 = variants.Bf16Peer
    for make, *added_by in (
        (variants.Peer,),
        (bf16,),
        (bf16, bf16.COMPILED),
        (bf16, bf16.INTO_FP32),
        (bf16, bf16.BY_AUTOGRAD),
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
    assert sum(part.flops(8) for part in layers) == 6 * 8 * sum(w.numel() for w in linears)


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
    assert sum(limits.tail_bytes_per_parameter().values()) == 4 + 4 * 4 + 3 * 4 + 2


# ---- power, memory and sizes --------------------------------------------------------------------

# In the place of nvidia-smi: GPU 0 at 600 W, or 500 W while the file exists; GPU 1 tells little.
NVIDIA_SMI = """
import datetime, pathlib, sys, time
while True:
    now = datetime.datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    watts = 500 if pathlib.Path(sys.argv[1]).exists() else 600
    print(f"{now}, {watts}.25, 700.00, 1755, 61, 0")
    print(f"{now}, [N/A], [N/A], 100, 30, 1", flush=True)
    time.sleep(0.01)
"""


def test_power_and_clock_are_read_while_a_variant_is_measured(scripts, tmp_path, monkeypatch):
    power, timing = scripts("power"), scripts("timing")
    slower = tmp_path / "slower"

    def torch_():
        time.sleep(0.3)
        return [2.0]

    def ours():
        slower.unlink(missing_ok=True)
        time.sleep(0.3)
        return [1.0]

    command = [sys.executable, "-c", NVIDIA_SMI, str(slower)]
    slower.touch()
    with power.Sampler(command) as sampler:
        deadline = time.monotonic() + 60
        while not sampler.samples([(0, time.time())], [0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        timing.in_turns({"torch": torch_}, 2)
        # A line from before the change may fall into the first 20 ms.
        assert power.reading()["W"] == 500.25
        power.SPANS.clear()
        timing.in_turns({"ours": ours}, 2)
        reading = power.reading()
        assert reading["W"] == 600.25 and reading["limit_W"] == 700 and reading["SM_MHz"] == 1755
        assert power.reading(gpus=2)["samples"] >= 2 * reading["samples"] - 2
        # Another process has GPU 0.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert power.reading()["W"] is None and power.reading()["SM_MHz"] == 100
    assert power.reading() is None
    # Where there is no nvidia-smi.
    with power.Sampler(["no-such-program"]):
        assert power.reading() is None


def test_the_model_fits_into_the_memory_that_is_there(scripts, monkeypatch):
    memory = scripts("memory")
    sizes = []
    for GiB in (15, 40, 70):
        monkeypatch.setenv(memory.LIMIT, str(GiB))
        config, size = memory.models_that_fit(70, T=256)[0]
        sizes.append((config.T, config.layers, config.vocab, size))
    assert sizes == [
        (256, 2, 4096, "llama-350m with 2 layers and 4,096 tokens"),
        (256, 6, 32768, "llama-350m with 6 layers"),
        (256, 24, 32768, None),
    ]
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = types.SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    memory.obey_limit()
    monkeypatch.delenv(memory.LIMIT)
    memory.obey_limit()
    assert limits == [70 / 80]


@pytest.fixture
def recorded(scripts, monkeypatch, tmp_path):
    """(common, the result file of "clip", tables of its parts)"""
    common, t = scripts("common", RESULTS=tmp_path), scripts("tables")
    monkeypatch.setattr(sys, "argv", ["clip.py"])

    def tables(results):
        return {"parts": t.Table([t.Column("part", "part")], [{"part": name} for name in results])}

    return common, tmp_path / "cpu" / "clip.json", tables


def test_a_benchmark_that_runs_out_of_memory_takes_a_smaller_model(recorded, scripts, monkeypatch):
    (common, path, tables), memory = recorded, scripts("memory")
    monkeypatch.setenv(memory.LIMIT, "1000")
    layers = []

    def measure(config):
        layers.append(config.layers)
        if config.layers > 6:
            raise RuntimeError("'ours' failed: torch.OutOfMemoryError: CUDA out of memory. Tried")
        return {"layers": config.layers}

    common.record("clip", {"one": measure}, tables, GiB=70)
    result = json.loads(path.read_text())
    assert layers == [24, 12, 6] and result["results"] == {"one": {"layers": 6}}
    assert result["size"] == "llama-350m with 6 layers" and "missing" not in result
    facts = {"benchmark", "gpu", "driver", "torch", "nvrtc", "python", "commit", "date", "power"}
    assert facts <= result.keys()


def test_a_stopped_or_failing_benchmark_keeps_the_parts_that_it_has(recorded, monkeypatch):
    common, path, tables = recorded
    read = lambda: json.loads(path.read_text())

    def stop():
        raise KeyboardInterrupt

    def fail():
        raise RuntimeError("first losses differ")

    parts = {"one": lambda: 1, "two": fail, "three": lambda: {"3": 3}, "four": stop}
    with pytest.raises(KeyboardInterrupt):
        common.record("clip", parts, tables)
    assert read()["results"] == {"one": 1, "three": {"3": 3}}
    assert read()["missing"] == ["two", "four"]
    # The same commit: other parts stay.
    monkeypatch.setattr(sys, "argv", ["clip.py", "--only", "two"])
    with pytest.raises(SystemExit, match="failed: two"):
        common.record("clip", parts, tables)
    common.record("clip", {**parts, "two": lambda: 2}, tables)
    assert list(read()["results"].items()) == [("one", 1), ("two", 2), ("three", {"3": 3})]
    monkeypatch.setattr(common, "commit", lambda: "another")
    common.record("clip", {**parts, "two": lambda: 2}, tables)
    assert read()["results"] == {"two": 2}
    monkeypatch.setattr(sys, "argv", ["clip.py", "--only", "five"])
    with pytest.raises(SystemExit):
        common.record("clip", parts, tables)


# ---- run.py -------------------------------------------------------------------------------------

NOWHERE = {"gpu": "none", "gpus": 0, "commit": "c0ffee"}
ONE_GPU = {"gpu": "NVIDIA H200", "gpus": 1, "commit": "c0ffee"}


def test_run_names_every_benchmark_and_leaves_out_in_words_what_cannot_run(
    scripts, monkeypatch, tmp_path
):
    scripts("common", RESULTS=tmp_path)
    run = scripts("run", RESULTS=tmp_path)
    with_tables = {p.stem for p in BENCHMARKS.glob("*.py") if "\ndef tables(" in p.read_text()}
    assert with_tables == set(run.ALL)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    todo, left_out = run.chosen([], False, NOWHERE)
    assert todo == ["cpu", "faults"]
    assert left_out["step"] == "needs a GPU; this machine has none"
    assert left_out["models"].startswith("needs transformers")
    todo, left_out = run.chosen([], False, ONE_GPU)
    assert left_out["ddp"] == "needs 2 GPUs; this machine has 1"
    assert left_out["faults"] == 'measures a CPU: make bench ONLY="faults"'
    assert set(todo) == run.ALL.keys() - left_out.keys()
    assert run.chosen(["faults", "clip"], False, ONE_GPU) == (["faults", "clip"], {})


def test_run_goes_on_where_it_was_interrupted(scripts, tmp_path):
    common = scripts("common", RESULTS=tmp_path)
    run = scripts("run", RESULTS=tmp_path)
    common.save(tmp_path / "h200" / "clip.json", {"gpu": "NVIDIA H200", "commit": "c0ffee"})
    todo, left_out = run.chosen([], False, ONE_GPU)
    assert "clip" not in todo and left_out["clip"] == "has a result of this commit"
    for names, again, here in (
        ([], True, {}),
        (["clip"], False, {}),
        ([], False, {"gpu": "NVIDIA A100"}),
        ([], False, {"commit": "0ther"}),
    ):
        assert "clip" in run.chosen(names, again, ONE_GPU | here)[0]
    common.save(
        tmp_path / "h200" / "clip.json",
        {"gpu": "NVIDIA H200", "commit": "c0ffee", "missing": ["bfloat16"]},
    )
    assert "clip" in run.chosen([], False, ONE_GPU)[0]
    # Code was edited: the same name, and maybe another code.
    common.save(tmp_path / "h200" / "clip.json", {"gpu": "NVIDIA H200", "commit": "c0ffee+"})
    assert "clip" in run.chosen([], False, ONE_GPU | {"commit": "c0ffee+"})[0]
    # Each number of GPUs has a file.
    four = {**ONE_GPU, "gpus": 4}
    assert [p.name for p in run.result_paths("ddp", four)] == ["ddp_2gpus.json", "ddp_4gpus.json"]


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


# ---- encoder.py and dispatch.py -----------------------------------------------------------------


@pytest.fixture
def encoder(on_simt):
    sizes = {"VOCAB": 300, "T": 16, "TEXT_BYTES": 20_000, "ALL_CHANNELS": 2**12, "CHANNELS": 8}
    return on_simt("encoder", **sizes)


@pytest.mark.slow
@needs_simt
def test_encoder_runs(encoder, scripts):
    results = {
        "backward": encoder.backward(48, 8, 2**10),
        "grid": encoder.grid((8,), (48,), (300,)),
    }
    assert [results["backward"][name]["differ"] for name in encoder.DISTRIBUTIONS] == [0] * 4
    made = table(scripts, "encoder", results)
    assert column(made["gradient"], "against atomics") == dict.fromkeys(
        encoder.DISTRIBUTIONS, "1.00x"
    )
    assert made["grid"].head == ["tokens", "C=8"]


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
    }

    def wrong(sums, *rest):
        right(sums, *rest)
        runs.append(spoil(sums))

    monkeypatch.setattr(encoder, "encoder_backward", wrong)
    for name, spoil in spoils.items():
        runs.clear()
        result = encoder.case(tokens, dout, dout.float(), 300)
        seen = {
            "error": result["error"][encoder.IN_LINE] > encoder.ROUNDING,
            "differ": result["differ"] == 1,
            "stray": result["stray"] == 1,
        }
        assert [what for what, is_seen in seen.items() if is_seen] == [name], result
        assert result["times_dense"] == 1.0
    spoil = lambda sums: bool(sums[0, 0])
    with pytest.raises(CaptureError, match="wait for a value"):
        encoder.case(tokens, dout, dout.float(), 300)
    spoil = spoils["stray"]
    with pytest.raises(AssertionError, match=r"\d of 4 cases have wrong sums"):
        encoder.grid((16,), (48,), (300,))


@pytest.fixture
def dispatch(on_simt):
    on_simt("step_variants", CALLS={"replayed": 1, "launched": 1})
    return on_simt("dispatch", HEADS=2, HEAD=16, T=20, COPIED=2**10, CHECKED=4)


@pytest.mark.slow
@needs_simt
def test_dispatch_runs(dispatch, scripts):
    sizes = {"vocab": 31, "hidden": 32, "intermediate": 48, "layers": 1, "heads": 2, "kv_heads": 2}
    curves = {dtype: (dtype, 6, 24) for dtype in ("bfloat16", "float32")}
    attention = {"batch 1": (1, None), "batch 2, window 9": (2, 9)}
    config = preset("poly-7m", **sizes, head_dim=16, T=12)
    results = {
        "curves": dispatch.cases(dispatch.Pointwise, curves, here=True),
        "attention": dispatch.cases(dispatch.Attention, attention, here=True),
        "steps": dispatch.steps(config, (2,), here=True),
    }
    glu = results["curves"]["bfloat16"]
    special, moved = 6 * 24 * 6 / 16e9 * 1e3, 3 * 24 * 6 * 2 / glu["copy_GB_per_s"] / 1e6
    assert glu["forward"]["of_limit"] == pytest.approx(max(special, moved))
    assert glu["forward"]["times_torch"] == 1.0
    made = table(scripts, "dispatch", results)
    assert {name: len(some.rows) for name, some in made.items()} == {
        "curves": 2,
        "attention": 2,
        "steps": 1,
    }
    assert len(made["steps"].head) == 5


# ---- faults.py ----------------------------------------------------------------------------------

FAULTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import faults
results = faults.measure({"kills": 1, "corruptions": 20}, 5, lambda text: None)
faults.show(faults.tables(results))
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
def test_faults_runs():
    """In a process of its own, because it forks."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    kills, damage = results["kills"], results["corruptions"]
    assert kills["faults"] >= 1 and sum(kills["kinds"].values()) == kills["faults"]
    assert kills["losses_compared"] == 20 * kills["runs"] and kills["losses_different"] == 0
    assert damage["refused"] + damage["loaded_alike"] == damage["corruptions"] == 20
    assert "losses and tensors that differ      0" in done.stdout


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


# ---- workers.py ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_worker_is_a_process_and_its_errors_come_through(scripts):
    workers, timing = scripts("workers"), scripts("timing")
    variants = {"one": (collections.Counter, "aab"), "two": (collections.Counter, "abb")}
    with workers.Workers(variants) as some:
        some.ready()
        assert timing.in_turns(some.timers([]), 2) == {}
        assert [some.ask(name, "most_common", 1) for name in some.names] == [[("a", 2)], [("b", 2)]]
        some.close("one")
        assert some.names == ["two"]
        message = "'two' failed in its process:(.|\n)*AttributeError"
        with pytest.raises(workers.WorkerError, match=message):
            some.ask("two", "nothing")
    with (
        pytest.raises(workers.WorkerError, match="'gone' has died"),
        workers.Workers({"gone": (os._exit, 1)}) as some,
    ):
        some.ready()


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
    return scripts("ddp", CALLS=1, ROUNDS=1, SETTLED=4, HOME="all")


@pytest.fixture
def variants(ddp):
    """The variants without what only GPUs have, all of them in the same workers."""

    def on_cpu(variant):
        options = variant.options and {
            key: value for key, value in variant.options.items() if key != "peer_to_peer"
        }
        return dataclasses.replace(variant, options=options)

    return {key: ("all", on_cpu(variant)) for key, (_, variant) in ddp.VARIANTS.items()}


@pytest.mark.slow
def test_ddp_runs(ddp, variants, scripts):
    config = dataclasses.replace(SMALL, hidden=64, intermediate=128, layers=2)
    off = dict(device="cpu", compile=False, graph=False)
    bench = scripts("ddp_ranks").Bench(config, rows=2, micro_batches=(4, 1), **off)
    kept = []
    r = ddp.measure(bench, 2, keep=lambda r: kept.append(list(r["stages"])), variants=variants)
    assert kept[-1] == list(ddp.STAGES) and [] in kept and r["failed"] == {}
    groups = (ddp.CAPTURED, ddp.CAPTURED_FSDP, ddp.REPLAYED, ddp.COMPILED, ddp.FSDP)
    assert r["groups"].keys() == {*groups, ddp.OURS_COMPILED}
    for mine, peers in (
        (ddp.REPLAYED, {ddp.CAPTURED: "DDP", ddp.CAPTURED_FSDP: "FSDP2"}),
        (ddp.OURS_COMPILED, {ddp.COMPILED: "DDP", ddp.FSDP: "FSDP2"}),
    ):
        for count in ("4", "1"):
            rates = [r["groups"][g][count][n]["tokens_per_s_per_gpu"] for g, n in peers.items()]
            row = r["groups"][mine][count]["all-reduce"]
            assert row["times_torch"] == row["tokens_per_s_per_gpu"] / max(rates)
    memory = {name: m["optimizer_GiB"] for name, m in r["memory"][ddp.REPLAYED].items()}
    fsdp = r["memory"][ddp.CAPTURED_FSDP]["FSDP2"]["optimizer_GiB"]
    assert fsdp == pytest.approx(memory["one GPU"] / 2, rel=0.05)
    assert memory["all-reduce"] > memory["sharded"] > 0
    made = table(scripts, "ddp", {"2": r})
    assert [len(made[name].rows) for name in ("replayed", "launched", "one GPU")] == [7, 3, 2]
    shares = column(made["replayed"], "4: of one GPU")
    assert shares.keys() == {
        "torch, replayed: DDP",
        "torch, replayed: FSDP2",
        *(f"{group}: {n}" for group, n in variants if group == ddp.REPLAYED and n != ddp.ONE),
    }
    # All are of ours on one GPU.
    ours, ddps = (r["groups"][g]["4"][n] for g, n in ((ddp.REPLAYED, "all-reduce"), ddp.DDP_KEY))
    expected = ours["of_one_gpu"] * ours["ms"] / ddps["ms"]
    assert shares["torch, replayed: DDP"] == f"{expected:.0%}"


class ScriptedWorkers:
    """In the place of RankWorkers: two ranks that have made and finished a step each.

    failing: keys of variants whose times are an error"""

    ranks, names = 2, ["all"]

    def __init__(self, ddp, error, failing=()):
        self.error, self.failing, self.stopped, self.pending = error, failing, {}, []
        self.ddp = ddp

    def send(self, name, method, *args):
        self.pending.append(getattr(self, method, lambda *_: [None, None])(*args))

    def answers(self, name, timeout=None):
        answer = self.pending.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, name, method, *args, timeout=None):
        self.send(name, method, *args)
        return self.answers(name)

    def make(self, key, variant):
        loss = 9.0 if key == self.ddp.FSDP_KEY else 3.0
        return [{"first_loss": loss, "optimizer_GiB": 1.0 + rank} for rank in range(2)]

    def times(self, key, count, calls, alone, launched):
        if key in self.failing:
            return self.error
        ms = (10.0,) if alone else (15.0, 14.0)
        return [[one * count] * calls for one in ms] + [[]] * alone

    def last(self, key):
        return [["one", 2.0], ["other" if key[1] == "ordered" else "one", 2.0]]


def test_ddp_takes_the_slowest_rank_and_says_what_failed(ddp, variants, scripts):
    error = scripts("workers").WorkerError("rank 1 has not answered for 60 s")
    bench = scripts("ddp_ranks").Bench(dataclasses.replace(SMALL, T=10), rows=3, device="cpu")
    workers = ScriptedWorkers(ddp, error, {(ddp.REPLAYED, "sharded")})
    run = ddp.Run(workers, bench, variants)
    run.all(("core", "launched", "more"))
    r = run.results
    row = r["groups"][ddp.REPLAYED]["4"]["all-reduce"]
    # Of the slowest rank; on one GPU it is 40 ms.
    expected = {"ms": 60.0, "tokens_per_s_per_gpu": 2000.0, "times_torch": 1.0}
    assert {key: row[key] for key in expected} == expected
    assert row["of_one_gpu"] == pytest.approx(2 / 3)
    assert r["groups"][ddp.REPLAYED]["4"].keys() >= {"one GPU", "one GPU, again", "ordered"}
    assert r["memory"][ddp.REPLAYED]["ordered"] == {"optimizer_GiB": 2.0}
    assert len(table(scripts, "ddp", {"2": r})["failed"].rows) == 4
    failed = r["failed"]
    assert failed.pop(f"times of {ddp.REPLAYED}, sharded, 1") == str(error)
    assert failed.pop(f"times of {ddp.REPLAYED}, sharded, 4") == str(error)
    what = f"making of {ddp.CAPTURED_FSDP}: FSDP2"
    assert failed.pop(what).startswith("the first loss is 9.0")
    message = failed.pop(f"end of {ddp.REPLAYED}: ordered")
    assert message.startswith("the ranks' weights are not bit-identical") and not failed


@pytest.mark.slow
@pytest.mark.parametrize("make, options", [("torch", {"bucket_cap_mb": 100}), ("FSDP2", {})])
def test_torchs_captured_step_is_checked_and_begins_with_the_first_weights(
    scripts, tmp_path, monkeypatch, make, options
):
    ranks, store = scripts("ddp_ranks"), f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        config = dataclasses.replace(SMALL, intermediate=32)
        bench = ranks.Bench(config, rows=2, device="cpu", compile=False, graph=False)
        variant = ranks.Variant(make, replayed=True, options=options)
        captured = ranks.Captured(0, bench, variant)
        launched = ranks.Peer(0, bench, dataclasses.replace(variant, replayed=False))
        batch = ranks.rank_batch(bench, 1)
        for count in (4, 1, 4):
            for step in (captured, launched):
                step.run([t[: 2 * count] for t in batch], count)
            assert float(captured.loss) == float(launched.loss)
            assert captured.hash() == launched.hash()
        captured.launch([t[:2] for t in batch], 1)
        launched.run([t[:2] for t in batch], 1)
        assert captured.hash() == launched.hash()
        right = ranks.Recording.replay
        monkeypatch.setattr(ranks, "TRIALS", 1)
        # Two steps in the place of one.
        monkeypatch.setattr(ranks.Recording, "replay", lambda self: (right(self), right(self)))
        message = "4 micro-batches: replayed and launched, a step changes the weights differently"
        with pytest.raises(AssertionError, match=message):
            ranks.Captured(0, bench, variant)
    finally:
        torch.distributed.destroy_process_group()
