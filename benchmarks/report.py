"""Write the generated tables and charts of README.md and docs/ from benchmarks/results/*.json.

python benchmarks/report.py            # after a new measurement
python benchmarks/report.py --check    # fails where the pages show other results; changes nothing

Both name the results that are stale, and what has changed since they were measured.

A generated part stands between two markers, <!-- name: made by benchmarks/report.py --> and
<!-- /name -->. A table that has no result keeps its text. Results of several GPUs: the tables of
the first one are open, those of another one are folded below them; short tables have a column for
each.
"""

import contextlib
import dataclasses
import html
import json
import pathlib
import re
import sys
import textwrap

import common
from fingerprints import staleness

DOCS = common.ROOT / "docs"
PAGES = (
    common.ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "models.md",
)


# The GPU whose results load() returns where none is asked for; None: the newest result of any GPU.
_shown: "str | None" = None


@contextlib.contextmanager
def showing(gpu: "str | None"):
    """Tables that are made inside show the results of this GPU."""
    global _shown
    before, _shown = _shown, gpu
    try:
        yield
    finally:
        _shown = before


def load(name: str, gpu: "str | None" = None) -> "dict | None":
    """The newest result of a benchmark, None when there is none. Of several GPUs: ddp_2gpus, ...

    gpu: only of this one."""
    gpu = gpu or _shown
    results = [result for result in all_results(name) if gpu in (None, result["gpu"])]
    return max(results, key=lambda result: result["date"], default=None)


def all_results(pattern: str = "*") -> "list[dict]":
    paths = sorted(common.RESULTS.glob(f"*/{pattern}.json"))
    return [json.loads(path.read_text()) for path in paths]


def machines(*patterns: str) -> "list[str]":
    """The GPUs with results of these files, the one that was measured last first.

    A machine without a GPU is "none"."""
    last: "dict[str, str]" = {}
    for pattern in patterns:
        for result in all_results(pattern):
            last[result["gpu"]] = max(result["date"], last.get(result["gpu"], ""))
    return sorted(last, key=lambda gpu: (last[gpu], gpu), reverse=True)


def short(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 -> H100; no GPU -> CPU."""
    name, *limit = gpu.removeprefix("NVIDIA ").split(", ")
    return "CPU" if gpu.startswith("none") else ", ".join([name.split(" ")[0], *limit])


# ---- markdown -----------------------------------------------------------------------------------


def markdown(head, rows) -> str:
    """A table; cells are strings."""
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of {len(row)} cells under {len(head)} headings: {row}")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def paragraph(*sentences) -> str:
    """Sentences, wrapped."""
    return textwrap.fill(
        " ".join(filter(None, sentences)), 110, break_long_words=False, break_on_hyphens=False
    )


def section(*parts) -> str:
    """Paragraphs and tables, with an empty line between them."""
    return "\n\n".join(filter(None, parts))


def conditions(result) -> str:
    """Where and when a result was measured, the GPU's medians meanwhile, and a smaller size."""
    gpu = "Without a GPU" if result["gpu"] == "none" else result["gpu"]
    words = f"{gpu}, {versions(result)}"
    if result.get("power"):
        words += f"; {power_words(result['power'], limit=True)}"
    # More variants than these are in the result file only.
    variants = result.get("power_by_variant") or {}
    if 1 < len(variants) <= 10:
        each = (f"{name}: {power_words(power)}" for name, power in variants.items())
        words += f". By variant: {'; '.join(each)}"
    if result.get("size"):
        words += f". Smaller than the text says, to fit into the memory: {result['size']}"
    return paragraph(f"*{words}.*")


def versions(result) -> str:
    """Driver, versions and date of a result."""
    driver = "" if result["gpu"] == "none" else f"driver {result['driver']}, "
    return f"{driver}torch {result['torch']}, NVRTC {result['nvrtc']}, {result['date']}"


def power_words(power: dict, limit: bool = False) -> str:
    """690 of 700 W, 1,755 MHz; what a GPU does not tell is left out."""
    of_limit = f" of {power['limit_W']:.0f}" if limit and power["limit_W"] else ""
    return ", ".join(
        f"{power[key]:,.0f}{more}"
        for key, more in (("W", f"{of_limit} W"), ("SM_MHz", " MHz"))
        if power[key]
    )


def against_goal(value, goal, reached) -> str:
    """A measured value beside its goal."""
    return f"{value} (goal {goal}{'' if reached else ': missed'})"


def at_least(value, goal, form="{:.2f}x", goal_form="{:g}x") -> str:
    text = form.format(value)
    if value < goal and text == form.format(goal):
        # One more digit shows what is missing.
        text = form.replace(".2f", ".3f").format(value)
    return against_goal(text, goal_form.format(goal), value >= goal)


def yes_or_no(value) -> str:
    return "yes" if value else "no"


# ---- one training step --------------------------------------------------------------------------


GIVEN = {
    "torch": "`torch.compile`, bf16 autocast over fp32 weights, foreach clipping, AdamW `fused` "
    "and `capturable` with its learning rate on the device, one CUDA graph, not deterministic.",
    "torch, bf16 weights": "the same with bf16 weights, fp32 masters and fp32 sums of gradients, "
    "as FSDP2's mixed precision has them.",
    "torch, Liger-Kernel": "*torch, bf16 weights* with Liger-Kernel's fused linear cross-entropy.",
    "ours": 'bf16 weights with fp32 masters, `compile=True`, `replay="graph"`.',
    "ours, deterministic": "the same with `deterministic=True`.",
    "torch, peft": "`get_peft_model`, fp32 factors beside bf16 weights, bf16 autocast, "
    "`torch.compile`, foreach clipping, AdamW `fused` and `capturable`, one CUDA graph.",
    "ours, LoRA": "`ga.apply_lora`, bf16 factors with fp32 masters, `compile=True`, "
    '`replay="graph"`.',
}


def given(names) -> str:
    """What each variant was given, as a list."""
    items = [f"*{name}*: {GIVEN[name]}" for name in names if name in GIVEN]
    return "\n".join("* " + paragraph(item).replace("\n", "\n  ") for item in items)


def fastest_torch(rows: dict) -> str:
    """The variant in torch with the least time."""
    return min((name for name in rows if name.startswith("torch")), key=lambda n: rows[n]["ms"])


def step_cells(rows: dict, goals: dict, label: str) -> "list[tuple]":
    """Rows of a table of steps. goals: variant -> times the fastest torch."""
    cells = []
    for name, m in rows.items():
        ratio, memory = f"{m['times_torch']:.2f}x", f"{m['peak_GiB']:.1f} GiB"
        if name in goals:
            ratio = at_least(m["times_torch"], goals[name])
            share = f"{m['memory']:.2f}x"
            memory += f", {against_goal(share, '1.05x at most', m['memory'] <= 1.05)}"
        cells.append(
            (
                f"{label}: {name}",
                f"{m['ms']:.1f} ms",
                f"{m['tokens_per_s'] / 1e3:,.1f}K",
                ratio,
                f"{m['of_limit']:.0%}" if m.get("of_limit") else "",
                f"{m['mfu']:.0%}" if m.get("mfu") else "",
                memory,
            )
        )
    return cells


STEP_HEAD = (
    "step",
    "time",
    "tokens/s",
    "against the fastest torch",
    "of the limit",
    "MFU",
    "peak memory",
)


def step_markdown(cells: "list[tuple]") -> str:
    """A table of step_cells, without columns that are empty."""
    kept = [i for i in range(len(STEP_HEAD)) if any(row[i] for row in cells)]
    return markdown([STEP_HEAD[i] for i in kept], [[row[i] for i in kept] for row in cells])


LAUNCHED = (
    "*Launched*: the steps of *torch, bf16 weights* and *ours*, compiled and launched from Python, "
    "by the host's clock. In torch's the gradients of micro-batches are added by autograd, in bf16 "
    "or in fp32, or by a compiled function, whichever is fastest."
)


def longest_first(lengths) -> "list[str]":
    return sorted(lengths, key=int, reverse=True)


def by_length(results: dict) -> "tuple[dict, dict]":
    """(T = ... -> variant -> measurement, T = ... -> limit) of results of several lengths."""
    limits = results.get("limits", {})
    lengths = longest_first(limits)
    return {f"T = {T}": results[T] for T in lengths}, {f"T = {T}": limits[T] for T in lengths}


def at_the_limit(results: dict) -> str:
    """How much faster than the fastest torch a step at the limit would be, in words."""
    ratios = []
    for T in longest_first(results["limits"]):
        rows = results[T]
        ratio = rows[fastest_torch(rows)]["ms"] / results["limits"][T]["ms"]
        ratios.append(f"{ratio:.2f}x (T = {T})")
    return f"A step at the limit would be {' and '.join(ratios)} as fast as the fastest torch."


# Of traces.kernel_groups, without communication.
COMPUTING = "products", "attention", "rest", "tail"
GROUPS_HEAD = (
    "where the time goes",
    "products",
    "attention",
    "other kernels",
    "tail",
    "between them",
    "sum",
)


def limit_cells(label: str, limit: dict) -> "tuple[str, ...]":
    """The row of a step's limit."""
    parts = limit["parts"]
    return (
        f"{label}: limit",
        f"{parts['products']:.1f} ms ({limit['TFLOP_per_s']:.0f} TFLOP/s)",
        f"{parts['attention']:.1f} ms ({limit['attention']})",
        f"{parts['bytes']:.1f} ms ({sum(limit['bytes'].values()) / 1e9:.1f} GB)",
        f"{parts['tail']:.1f} ms ({limit['tail_bytes'] / 1e9:.1f} GB)",
        "none",
        f"{limit['ms']:.1f} ms",
    )


def groups_cells(label: str, rows: dict, names) -> "list[tuple[str, ...]]":
    """A row for each of these variants that was traced."""
    cells = []
    for name in names:
        groups, ms = rows[name].get("groups"), rows[name]["ms"]
        if groups:
            parts = [groups[part] for part in COMPUTING]
            times = *parts, ms - sum(parts), ms
            cells.append((f"{label}: {name}", *(f"{time:.1f} ms" for time in times)))
    return cells


def where_the_time_goes(steps: "dict[str, dict]", limits: "dict[str, dict]") -> str:
    """The limit, the fastest torch and ours, in groups of kernels.

    steps: label -> variant -> measurement. limits: label -> its limit, where there is one."""
    cells = []
    for label, rows in steps.items():
        if label in limits:
            cells.append(limit_cells(label, limits[label]))
        ours = [name for name in rows if not name.startswith("torch")]
        cells += groups_cells(label, rows, (*ours, fastest_torch(rows)))
    return markdown(GROUPS_HEAD, cells) if limits else ""


def left_out(reasons: dict) -> str:
    """A sentence for each variant that has no row. reasons: T -> variant -> why."""
    lengths_of: "dict[tuple, list]" = {}
    for T in longest_first(reasons):
        for name_and_reason in reasons[T].items():
            lengths_of.setdefault(name_and_reason, []).append(T)
    return paragraph(
        *(
            f"T = {' and '.join(lengths)}: no row for *{name}*"
            + (f", which {reason}." if reason.startswith("did") else f" ({reason}).")
            for (name, reason), lengths in lengths_of.items()
        )
    )


def step_table() -> str:
    result = load("step")
    r = result["results"]
    goals = {
        "1024": {"ours": 1.18, "ours, deterministic": 1.0},
        "256": {"ours": 1.40, "ours, deterministic": 1.2},
    }
    rows = [row for T in goals for row in step_cells(r[T], goals[T], f"T = {T}")]
    steps, limits = by_length(r)
    # Older results have none.
    launched = {f"T = {T}, launched": some for T, some in r.get("launched", {}).items()}
    for label, some in launched.items():
        rows += step_cells(some, {"ours": 1.0}, label)
    return section(
        paragraph(
            "One optimizer step of `llama-350m`: batch 4, 4 micro-batches, AdamW, clipped at",
            "1.0. All rows are compiled, and replayed as one CUDA graph unless they say *launched*",
            "(`benchmarks/step.py`, `benchmarks/step_variants.py`). What each was given:",
        ),
        given(dict.fromkeys(name for T in goals for name in r[T])),
        paragraph(LAUNCHED) if launched else "",
        step_markdown(rows),
        where_the_time_goes(steps | launched, limits),
        paragraph(at_the_limit(r)) if "limits" in r else "",
        left_out(r.get("left_out", {})),
        conditions(result),
    )


def transformers_step_table() -> str:
    result = load("transformers_step")
    cells, steps, limits = [], {}, {}
    for name, r in result["results"].items():
        label = f"{name}, {r['batch']} x {r['T']}"
        cells += step_cells(r["rows"], {"ours": 1.12}, label)
        steps[label] = r["rows"]
        if "limit" in r:
            limits[label] = r["limit"]
        if "launched" in r:
            label += ", launched"
            cells += step_cells(r["launched"], {"ours": 1.0}, label)
            steps[label] = r["launched"]
    return section(
        paragraph(
            "One optimizer step of models of transformers, made from configs: `LlamaForCausalLM`",
            "with the sizes of `llama-350m`, and `GPT2LMHeadModel` with those of `gpt2-124m`",
            "without dropout; 4 micro-batches, AdamW, clipped at 1.0",
            "(`benchmarks/transformers_step.py`). What each was given:",
        ),
        given(("torch", "torch, bf16 weights", "ours")),
        paragraph(LAUNCHED) if any(label.endswith("launched") for label in steps) else "",
        step_markdown(cells),
        where_the_time_goes(steps, limits),
        conditions(result),
    )


def lora_table() -> str:
    result = load("lora")
    r = result["results"]
    lengths = ("1024", "256")
    rows = [row for T in lengths for row in step_cells(r[T], {"ours": 1.2}, f"T = {T}")]
    return section(
        paragraph(
            "One optimizer step of `llama-350m` with frozen bf16 weights and LoRA of rank 16 on",
            "queries and values: batch 4, 4 micro-batches, AdamW, clipped at 1.0",
            "(`benchmarks/lora.py`). What each was given:",
        ),
        given(("torch, peft", "ours, LoRA")).replace("*ours, LoRA*", "*ours*"),
        step_markdown(rows),
        where_the_time_goes(*by_length(r)),
        paragraph("The factors' own products are not in the limit.", at_the_limit(r)),
        conditions(result),
    )


# ---- CUDA graphs --------------------------------------------------------------------------------


def graphs_table() -> str:
    result = load("graphs")
    r = result["results"]
    goals = {"4 x 1024": 1.25, "4 x 256": 3, "1 x 128": 6}
    names = {
        "plain torch": "plain torch, eager",
        "ours, eager": "ours, eager",
        "ours, replayed": "ours, replayed",
        "ours, replayed, compiled": "ours, compiled and replayed",
    }
    rows = []
    for name, label in names.items():
        cells = []
        for shape, goal in goals.items():
            m = r["speed"][shape][name]
            goal = {"plain torch": None, "ours, eager": 1}.get(name, goal)
            ratio = at_least(m["times_plain"], goal) if goal else f"{m['times_plain']:.2f}x"
            busy = f", GPU busy {m['gpu_busy']:.0%}" if "gpu_busy" in m else ""
            cells.append(f"{m['ms']:.1f} ms, {ratio}{busy}")
        rows.append((label, *cells))
    host, expected = [], {"replay": 1, "a list of 3 micro-batches, replayed": 4}
    for name, m in r["ledger"].items():
        graph_launches, waits = f"{m['graph_launches']:,}", f"{m['syncs']:,}"
        if name in expected:
            good = m["graph_launches"] == expected[name]
            graph_launches = against_goal(graph_launches, expected[name], good)
            waits = against_goal(waits, 0, m["syncs"] == 0)
        downloaded = f"{m['copies'].get('DtoH', [0, 0])[1]:,} bytes"
        host.append((name, f"{m['launches']:,}", graph_launches, waits, downloaded))
    return section(
        paragraph(
            "One step of `llama-350m` with one micro-batch, against plain torch: fp32 weights,",
            "bf16 autocast, autograd, foreach clipping, fused AdamW, nothing compiled.",
        ),
        markdown(("step", *(f"batch {shape.replace(' x ', ', T = ')}" for shape in goals)), rows),
        paragraph(f"What the host did in one of these steps ({r['what'].split(', ', 1)[1]}):"),
        markdown(("step", "kernel launches", "graph launches", "host waits", "downloaded"), host),
        graphs_checks(r),
        conditions(result),
    )


def graphs_checks(r) -> str:
    """Equality, seconds and memory."""
    bits = r["bits"]
    million = f"{bits['weights'] / 1e6:.0f} M"
    rows = []
    for pair, m in bits["exact"].items():
        value = f"{m['losses']} of {bits['steps']} losses, {m['weights']:,} of {million} weights"
        rows.append(
            (
                f"different bits, deterministic: {pair.replace(', ', ' against ')}",
                against_goal(value, 0, not any(m.values())),
            )
        )
    apart = bits["free"]["apart"]
    value = ", ".join(f"{a:.1e}" for a in apart.values())
    what = f"eager against replay, not deterministic: losses at steps {', '.join(apart)} differ by"
    rows.append((what, against_goal(value, "0.1", max(apart.values()) <= 0.1)))
    for name, s in r["capture_s"].items():
        rows.append(
            (
                f"first step with warm-up and capture: {name}",
                against_goal(f"{s:.1f} s", "10 s", s < 10),
            )
        )
    for name, m in r["memory"].items():
        size, what = name.split(", ")
        grown = max(0, m["allocated"], m["reserved"], m["device"]) / 2**20
        rows.append(
            (
                f"memory growth: {m['count']:,} {what} ({size})",
                against_goal(f"{grown:.3g} MiB", 0, grown == 0),
            )
        )
    return section(
        paragraph(
            f"Checks over {bits['steps']} steps with a cosine schedule, dropout, clipping (in",
            f"{bits['clipped']} steps), a NaN gradient ({bits['skipped']} step skipped) and two",
            "alternating sequence lengths:",
        ),
        markdown(("check", "measured"), rows),
    )


# ---- the embedding's gradient -------------------------------------------------------------------


def encoder_table() -> str:
    result = load("encoder")
    r = result["results"]
    kinds = {name: d for name, d in r["backward"].items() if isinstance(d, dict)}
    rows = []
    for name, d in kinds.items():
        variants, goals, atomics = d["variants"], d["goals"], d["best_atomics"]
        known, inline = variants["ours, segments known"], variants["ours, segments in line"]
        share = known["of_copy_rate"].get("replayed", known["of_copy_rate"]["launched"])
        ratios = [
            at_least(m[f"times_{peer}"], goal, "{:.1f}x")
            for m, peer, goal in (
                (known, "dense", goals["dense"]),
                (known, "atomics", goals["atomics"]),
                (inline, "dense", goals["in_line"]),
                (inline, "atomics", 1),
            )
        ]
        rows.append(
            (
                name,
                f"{encoder_ms(known)}, {share:.0%}",
                *ratios[:2],
                encoder_ms(inline),
                *ratios[2:],
                encoder_ms(variants["embedding_dense_backward"]),
                f"{encoder_ms(variants[atomics])}, {atomics.split(', ')[1]}",
                encoder_ms(variants["index_add_ deterministic, fp32"]),
            )
        )
    head = (
        "tokens",
        "ours, segments known",
        "against dense",
        "against atomics",
        "ours, segments in line",
        "against dense",
        "against atomics",
        "dense",
        "atomics",
        "`index_add_`, deterministic",
    )
    size = "{tokens:,} tokens of {vocab:,}, {C} channels".format(**r["backward"])
    return section(
        paragraph(
            f"The gradient of the token embedding ({size}, bf16) is added into fp32 sums,",
            "replayed from a CUDA graph. *Segments known*: the tokens are grouped already; *in",
            "line*: grouping them is part of the time. The percentage is of the copy rate, for",
            "the bytes that must move: the gradient read once, and those rows of the sums that",
            "have a token read and written. torch: `embedding_dense_backward`, which fills a",
            "fresh bf16 table (*dense*); `index_add_` with atomics, fp32 or bf16, whichever is",
            "faster (*atomics*); and its deterministic form.",
        ),
        markdown(head, rows),
        encoder_low(kinds),
        encoder_rungs(kinds),
        encoder_grid(r["grid"]),
        encoder_positions(r),
        encoder_step(r["step"]),
        conditions(result),
    )


def encoder_ms(m) -> str:
    ms = m["ms"]
    if "replayed" in ms:
        return f"{ms['replayed']:.3f} ms"
    return f"{ms['launched']:.3f} ms (launched: it cannot be captured)"


def encoder_low(kinds) -> str:
    """Sums in bf16, as the peers' tables are."""
    names = ("ours, segments known, bf16 sums", "embedding_dense_backward", "index_add_, bf16")
    rows = []
    for name, d in kinds.items():
        ours, dense, atomics = (d["variants"][variant]["ms"]["replayed"] for variant in names)
        rows.append(
            (
                name,
                at_least(dense / ours, d["goals"]["dense"], "{:.1f}x"),
                at_least(atomics / ours, d["goals"]["atomics"], "{:.1f}x"),
            )
        )
    return section(
        paragraph("With sums in bf16 and segments known:"),
        markdown(("tokens", "against dense, bf16", "against atomic `index_add_`, bf16"), rows),
    )


def encoder_rungs(kinds) -> str:
    """What differs between runs, and the first versions of the kernel."""
    atomics = "index_add_, fp32"
    ours = ("ours, segments in line", "ours, segments in line, bf16 sums")
    first = next(iter(kinds.values()))["variants"]
    rows = []
    for name, d in kinds.items():
        variants = d["variants"]
        differ = sum(variants[variant]["differ"] for variant in ours)
        rows.append(
            (
                name,
                against_goal(f"{differ:,}", 0, differ == 0),
                f"{variants[atomics]['differ']:,}",
                encoder_ms(variants["encoder_backward_v1"]),
                encoder_ms(variants["encoder_backward_v2"]),
                f"{d['buckets_ms']:.1f} ms",
            )
        )
    return section(
        paragraph(
            f"Sums that differ between runs: ours, fp32 and bf16, in {first[ours[0]]['runs']}",
            "runs (launched, replayed, and on another stream); atomic `index_add_` into fp32 in",
            f"{first[atomics]['runs']} runs. And the first two versions of our kernel:",
        ),
        markdown(
            (
                "tokens",
                "ours: sums that differ",
                "atomics: sums that differ",
                "`encoder_backward_v1` (atomics)",
                "`encoder_backward_v2` (buckets)",
                "the CPU's time for its buckets",
            ),
            rows,
        ),
    )


def encoder_grid(cases) -> str:
    """The least ratio of each size, and the errors of all cases."""
    kinds, counts, widths, vocabs = (
        list(dict.fromkeys(c[key] for c in cases))
        for key in ("distribution", "tokens", "C", "vocab")
    )
    rows = []
    for count in counts:
        cells = []
        for C in widths:
            here = [c for c in cases if (c["tokens"], c["C"]) == (count, C)]
            dense, atomics = (min(c[key] for c in here) for key in ("times_dense", "times_atomics"))
            ratio = at_least(atomics, 1) if count > counts[0] else f"{atomics:.2f}x"
            cells.append(f"{ratio}, {dense:.2f}x")
        rows.append((f"{count:,} tokens", *cells))
    ours, atomics = (
        max(c["error"][variant] for c in cases)
        for variant in ("ours, segments in line", "index_add_, fp32")
    )
    return section(
        paragraph(
            f"Segments in line: the least ratio over {len(kinds)} kinds of tokens and",
            f"{len(vocabs)} vocabularies ({', '.join(f'{v:,}' for v in vocabs)}). The first",
            "number is against atomic `index_add_` into fp32, the second against",
            "`embedding_dense_backward`.",
        ),
        markdown(("", *(f"C = {C}" for C in widths)), rows),
        paragraph(
            f"In all {len(cases)} cases the sums are within {ours:.0e} of float64, relative to",
            f"the sum of the absolute values (atomics: {atomics:.0e}), and bit-identical in three",
            "runs.",
        ),
    )


def encoder_positions(r) -> str:
    """The gradient of the positions, and grouping tokens."""
    positions = [
        (f"C = {C}", encoder_ms(m["ours"]), f"{m['ours']['times_torch']:.1f}x")
        for C, m in r["positions"].items()
        if isinstance(m, dict)
    ]
    segments = []
    for m in r["segments"]:
        ms = encoder_ms({"ms": {kind: some["ours"] for kind, some in m["ms"].items()}})
        segments.append(
            (f"{m['tokens']:,} tokens of {m['vocab']:,}", ms, f"{m['times_torch']:.1f}x")
        )
    return section(
        paragraph("The gradient of the position embedding:"),
        markdown(("", "ours", "against `add_(dout.sum(0))`"), positions),
        paragraph("Grouping tokens into segments:"),
        markdown(("", "ours", "against `torch.sort(stable=True)`"), segments),
    )


def encoder_step(step) -> str:
    """A whole step of GPT-2."""
    rows = []
    for name, m in step["variants"].items():
        ratio = f"{m['times_torch']:.3f}x"
        rows.append(
            (
                name,
                f"{m['ms']:.2f} ms",
                at_least(m["times_torch"], 1, "{:.3f}x") if name == "ours" else ratio,
            )
        )
    twice = step["twice"]
    equal = against_goal(
        "equal" if twice["weights_equal"] else "not equal", "equal", twice["weights_equal"]
    )
    return section(
        paragraph(
            f"One step of GPT-2 124M ({step['rows']} x {step['T']} tokens, bf16 autocast,",
            "replayed):",
        ),
        markdown(("embeddings", "time", "against torch's"), rows),
        paragraph(
            f"The weights ({twice['weights'] / 1e6:.0f} M) after {twice['steps']} deterministic",
            f"steps, trained twice: {equal}.",
        ),
    )


# ---- fused layers -------------------------------------------------------------------------------


def dispatch_table() -> str:
    result = load("dispatch")
    r = result["results"]
    rows = []
    for case, kinds in r["curves"].items():
        for kind, m in kinds.items():
            cells = []
            for direction in ("forward", "backward"):
                compiled = m["times"][m["best_compiled"]][direction]
                eager = min(m["times"][name][direction] for name in ("torch", "torch, folded"))
                share, floors = m["of_floor"][direction], m["floors_ms"][direction]
                reached = against_goal(f"{share:.0%}", "85%", share >= 0.85)
                limit = f"the bound ({max(floors, key=floors.get)})"
                cells += [
                    f"{m['ms']['ours'][direction]:.3f} ms, {reached} of {limit}",
                    f"{at_least(compiled, 1.2)}, {eager:.1f}x",
                ]
            rows.append((f"{case}: {'gated unit' if kind == 'glu' else 'one curve'}", *cells))
    measured = [m for kinds in r["curves"].values() for m in kinds.values()]
    clocks = [m["clock_MHz"] for m in measured]
    rates = [m["copy_GB_per_s"] / 1e3 for m in measured]
    return section(
        paragraph(
            "The pointwise part of `RichardsGLU`. The bound is the longer of two times: the",
            f"bytes at the copy rate of the same run ({min(rates):.2f} to {max(rates):.2f} TB/s),",
            "and the special functions (powers, logarithms, reciprocals) at 16 per clock and",
            f"multiprocessor ({min(clocks):,.0f} to {max(clocks):,.0f} MHz under load). The",
            "ratios are against the faster of two formulations in torch, compiled and eager.",
        ),
        markdown(
            (
                "elements",
                "forward",
                "against compiled, eager",
                "backward",
                "against compiled, eager",
            ),
            rows,
        ),
        attention_table(r["attention"]),
        layers_table(r["layers"]),
        conditions(result),
    )


def attention_table(r) -> str:
    """Polynomial attention, its time and its memory."""
    goals = {"torch": 4, "torch.compile": 2}
    rows = []
    for what in ("core", "layer"):
        for case, measured in r.items():
            m = measured[what]
            ratios = [at_least(m["times"][name], goal) for name, goal in goals.items()]
            memory = " / ".join(f"{m['peak_MiB'][name]:,.0f}" for name in ("ours", *goals))
            rows.append(
                (
                    f"{what}, {case}",
                    f"{m['ms']['ours']:.2f} ms",
                    *ratios,
                    f"{m['times']['ours, v1']:.1f}x",
                    f"{memory} MiB",
                )
            )
    long = next(measured["long"] for measured in r.values() if "long" in measured)
    growth = long["grows"]["ours"]
    flash = next(
        ratio
        for measured in r.values()
        for name, ratio in measured["core"]["times"].items()
        if "flash" in name
    )
    worst = max(max(measured["errors"]["ours"].values()) for measured in r.values())
    return section(
        paragraph(
            "`PolyAttention`, forward and backward: T = 2,048, 16 heads of 64, bf16, on tensor",
            "cores. Compared with the same in torch, with T x T matrices in bf16, eager and",
            "compiled, and with our plain kernels (v1). Memory is the peak of ours, torch's, and",
            "torch's compiled.",
        ),
        markdown(
            ("", "time", "against eager torch", "against compiled", "against v1", "memory"), rows
        ),
        paragraph(
            f"From T = {long['T'][0]:,} to {long['T'][1]:,} our memory grows by",
            against_goal(f"{growth:.2f}x", "2.2x at most", growth <= 2.2)
            + f", torch's by {long['grows']['torch']:.1f}x.",
            f"No result or gradient is farther from float64 than {worst:.1e} (by norm, on the",
            "same inputs), and two runs are bit-identical. Flash attention computes another",
            f"function, softmax without relative positions; it takes {flash:.2f} of the core's",
            "time (batch 1).",
        ),
    )


def layers_table(r) -> str:
    """GPU against CPU and torch: layers and whole steps."""
    rows = []
    for case, parts in r.items():
        for part, m in parts.items() if isinstance(parts, dict) else ():
            cpu = f"{m['times']['CPU']:,.0f}x"
            if (case, part) == ("batch 32", "step"):
                cpu = against_goal(cpu, "8x", m["times"]["CPU"] >= 8)
            compiled = f"{m['times']['torch.compile']:.1f}x"
            if part == "step":
                compiled += f", replayed {m['times']['torch.compile, replayed']:.1f}x"
            rows.append(
                (
                    f"{case}: {'whole step' if part == 'step' else f'`{part}`'}",
                    f"{m['ms']['ours']:.2f} ms",
                    f"{m['ms']['CPU']:,.0f} ms",
                    cpu,
                    f"{m['times']['torch']:.1f}x",
                    compiled,
                )
            )
    return section(
        paragraph(
            "Layers of `poly-7m` (forward and backward) and whole training steps, T = 512. Ours:",
            "bf16, replayed. torch: the same model in torch's operations on the CPU",
            f"({r['cores']} cores of {r['cpu']}, fp32) and on the same GPU. Steps in eager mode",
            "and compiled steps are launched from Python, unless the cell says replayed.",
        ),
        markdown(
            ("", "ours", "CPU", "against the CPU", "against eager torch", "against compiled"), rows
        ),
    )


# ---- several GPUs -------------------------------------------------------------------------------


def ddp_table() -> str:
    results = {n: result for n in ("2", "4", "8") if (result := load(f"ddp_{n}gpus"))}
    parts = []
    for n, result in results.items():
        r = result["results"][n]
        parts += [
            f"**{n} GPUs**",
            ddp_rows(r, int(n)),
            ddp_peer(r, int(n)),
            ddp_traces(n),
            ddp_bits(r),
            ddp_facts(r),
            conditions(result),
        ]
    return section(*parts)


def ddp_rows(r, n: int) -> str:
    """Every variant, on one GPU and on n."""
    goals = {"4": {2: 0.98, 4: 0.97}.get(n), "1": {2: 0.96, 4: 0.94}.get(n)}
    counts = list(dict.fromkeys(count for measured in r["groups"].values() for count in measured))
    rows = []
    for group, measured in r["groups"].items():
        names = dict.fromkeys(name for some in measured.values() for name in some)
        memory = r.get("memory", {}).get(group, {})
        for name in names:
            if name.startswith("each for itself"):
                continue
            cells = []
            for count in counts:
                m = measured.get(count, {}).get(name)
                if m is None:
                    cells.append("not measured")
                elif name.startswith("one GPU"):
                    cells.append(
                        f"{m['ms']:.1f} ms, {m['tokens_per_s_per_gpu'] / 1e3:,.1f}K tokens/s"
                    )
                else:
                    share, goal = f"{m['of_one_gpu']:.1%}", goals.get(count)
                    if name == "all-reduce" and goal:
                        share = against_goal(share, f"{goal:.0%}", m["of_one_gpu"] >= goal)
                    if name == "sharded" and "all-reduce" in measured[count]:
                        most = measured[count]["all-reduce"]["ms"]
                        share = against_goal(
                            share, f"all-reduce's {most:.1f} ms at most", m["ms"] <= most
                        )
                    ratio = f", {m['times_torch']:.2f}x" if "times_torch" in m else ""
                    cells.append(f"{m['ms']:.1f} ms, {share}, {m['exposed_ms']:+.1f} ms{ratio}")
            kept = memory.get(name, {})
            optimizer = f"{kept['optimizer_GiB']:.2f} GiB" if kept else ""
            if name == "sharded" and kept and "one GPU" in memory:
                share = kept["optimizer_GiB"] * n / memory["one GPU"]["optimizer_GiB"]
                optimizer = against_goal(optimizer, f"1/{n} and 1% at most", share <= 1.01)
            peak = f"{kept['peak_GiB']:.1f} GiB" if "peak_GiB" in kept else ""
            rows.append((f"{group}: {name}", *cells, peak, optimizer))
    for group, reasons in r.get("why_not", {}).items():
        for name, reason in reasons.items():
            sentence = html.escape(reason.split(". ")[0], quote=False).replace("|", "\\|")
            rows.append((f"{group}: {name}", *[f"failed: {sentence}"] * len(counts), "", ""))
    heads = (f"{count} micro-batch{'es' * (count != '1')}" for count in counts)
    return markdown(("", *heads, "peak memory", "optimizer's state"), rows)


def fastest_ddp(r, count: str) -> "tuple[str, dict] | None":
    """(name, measurement) of the fastest torch variant on several GPUs, or None."""
    peers = {
        f"{group}: {name}": m
        for group, measured in r["groups"].items()
        for name, m in measured.get(count, {}).items()
        if group.startswith("torch") and name not in ("one GPU", "each for itself")
    }
    return min(peers.items(), key=lambda item: item[1]["ms"]) if peers else None


def ddp_ours(r, count: str) -> "dict | None":
    return r["groups"].get("ours, replayed", {}).get(count, {}).get("all-reduce")


def ddp_peer(r, n: int) -> str:
    """Our replayed step against the fastest one of torch, DDP or FSDP2."""
    sentences = []
    for count, micro_batches in (("4", "4 micro-batches"), ("1", "1 micro-batch")):
        peer, ours = fastest_ddp(r, count), ddp_ours(r, count)
        if peer and ours:
            name, m = peer
            sentences.append(
                f'With {micro_batches} the fastest of torch is "{name}" ({m["ms"]:.1f} ms); '
                f"ours, replayed, is {m['ms'] / ours['ms']:.2f}x as fast ({ours['ms']:.1f} ms)."
            )
            if not captured_measured(r, count):
                sentences.append(
                    "That one is launched from Python, which limits it here; DDP captured in a "
                    "CUDA graph, a stronger peer, was not measured in this run."
                )
    return paragraph(*sentences)


def captured_measured(r, count: str) -> bool:
    """Whether a torch step on several GPUs was measured in a CUDA graph."""
    groups = (m[count] for group, m in r["groups"].items() if "captured" in group and count in m)
    return any(names.keys() & {"DDP", "FSDP2"} for names in groups)


def ddp_traces(n: str) -> str:
    """Where the time of replayed steps goes on the first of n GPUs."""
    result = load(f"ddp_traces_{n}gpus")
    if result is None:
        return ""
    rows = []
    for group, counts in result["results"][n]["groups"].items():
        for count, variants in counts.items():
            for name, m in variants.items():
                if "groups" not in m:
                    continue
                groups = m["groups"]
                parts = [groups[part] for part in (*COMPUTING, "exposed")]
                communication = f"{groups['communication']:.1f}, exposed {groups['exposed']:.1f}"
                rows.append(
                    (
                        f"{group}: {name}; {count}",
                        *(f"{ms:.1f}" for ms in parts[:-1]),
                        communication if groups["communication"] >= 0.05 else "none",
                        f"{m['ms'] - sum(parts):.1f}",
                        f"{m['ms']:.1f} ms",
                    )
                )
    head = "step; micro-batches", *GROUPS_HEAD[1:5], "communication", *GROUPS_HEAD[5:]
    return section(
        paragraph(
            "Where the time of a replayed step goes on the first GPU, in ms, in a run of its own",
            "(`benchmarks/ddp_traces.py`):",
        ),
        markdown(head, rows),
        conditions(result),
    )


def ddp_bits(r) -> str:
    """Which weights are bit-identical."""
    checks = []
    if "bits" in r:
        b = r["bits"]
        after = f"{b['steps']} deterministic steps of {b['layers']} layers"
        for name, equals in b["variants"].items():
            checks += [(what, after, equal, name) for what, equal in equals.items()]
    for group, some in r.get("equal_on_all_ranks", {}).items():
        for name, m in some.items():
            after = f"{m['steps']} steps"
            checks.append(("equal on all ranks", after, m["equal"], f"{group}: {name}"))
    alike: "dict[tuple, list[str]]" = {}
    for *what, name in checks:
        alike.setdefault(tuple(what), []).append(name)
    rows = [
        (f"{what}, {after}", "; ".join(names), against_goal(yes_or_no(equal), "yes", equal))
        for (what, after, equal), names in alike.items()
    ]
    return markdown(("bit-identical weights", "", ""), rows) if rows else ""


def ddp_facts(r) -> str:
    """Bucket sizes, collectives alone, NCCL's version, and what is missing."""
    parts = []
    if r.get("buckets"):
        default = next(iter(r["buckets"].values()))["default_ms"]
        sizes = [
            (f"{size} MB", f"{m['ms']:.2f} ms", f"{m['times_default']:.3f}x")
            for size, m in r["buckets"].items()
        ]
        parts += [
            paragraph(
                f"Buckets of another size than 32 MB (replayed, 1 micro-batch, {default:.2f} ms):"
            ),
            markdown(("bucket", "time", "against 32 MB"), sizes),
            paragraph(
                "32 MB was measured again beside each. A bucket takes whole blocks, of 50 MB here,",
                "so 8 MB makes the same buckets, and its difference is noise.",
            )
            if "8" in r["buckets"]
            else "",
        ]
    if "bandwidth" in r:
        names = list(
            dict.fromkeys(op for m in r["bandwidth"].values() for op in m if op != "bytes")
        )
        rows = []
        for what, m in r["bandwidth"].items():
            size = f"{m['bytes'] / 2**20:,.0f} MiB"
            rates = (f"{m[op]['bus_GB_per_s']:.0f}" if op in m else "" for op in names)
            rows.append((f"{what} ({size})" if "arena" in what else size, *rates))
        parts += [
            paragraph("Collectives alone, in GB/s of bus bandwidth:"),
            markdown(("", *(f"`{op}`" for op in names)), rows),
        ]
    if "nccl" in r:
        settings = ", ".join(
            f"`{key}={value}`" for key, value in r["nccl"].items() if key != "version"
        )
        parts.append(
            paragraph(f"NCCL {r['nccl']['version']}{' with ' + settings if settings else ''}.")
        )
    missing = [*r["failed"], *r["left_out"]]
    parts.append(paragraph(f"Failed or left out: {'; '.join(missing)}." if missing else ""))
    return section(*parts)


# ---- single operations --------------------------------------------------------------------------


def accumulate_table() -> str:
    result = load("accumulate")
    r = result["results"]
    names = (
        "torch._foreach_add_",
        "accumulate_v1, per tensor",
        "accumulate_v2, per tensor",
        "accumulate_v3, one launch",
    )
    rows = []
    for dtype, goal in (("float32", 1.07), ("bfloat16", 1.5)):
        for name in names:
            m = r["addition"][dtype][name]
            best = name.endswith("one launch")
            ratio, share = f"{m['times_foreach']:.2f}x", f"{m['of_copy_rate']:.0%}"
            if best:
                ratio = at_least(m["times_foreach"], goal)
            if best and dtype == "float32":
                share = against_goal(share, "94%", m["of_copy_rate"] >= 0.94)
            rows.append((f"{dtype}: {name}", f"{m['ms']:.2f} ms", share, ratio))
    launch = r["launch_us"]
    ours = launch["gpuaccel, 3 arguments"]
    return section(
        paragraph(
            f"Adding {r['addition']['elements'] / 1e6:.0f} M fresh gradients",
            f"({r['addition']['tensors']} tensors) to the fp32 sum:",
        ),
        markdown(("gradients, by", "time", "of the copy rate", "against `_foreach_add_`"), rows),
        paragraph("What one launch from Python costs the host, checks included:"),
        markdown(
            ("launch", "microseconds"),
            [
                ("ours, 3 arguments", against_goal(f"{ours:.1f}", 8, ours <= 8)),
                ("torch's `add_`, same host", f"{launch['torch add_']:.1f}"),
            ],
        ),
        conditions(result),
    )


def clip_table() -> str:
    result = load("clip")
    r = result["results"]
    torch, ours, goals = "torch foreach", "ga.clip_grad_norm_", {"over": 1.38, "under": 4}
    rows = []
    for dtype in ("float32", "bfloat16"):
        for name in r[dtype]["over"]:
            # Of an older result.
            if name.endswith("after accumulate_v4"):
                continue
            row = [f"{dtype}: {name}"]
            for case in ("over", "under"):
                m = r[dtype][case][name].get("replayed")
                if m is None:
                    row.append("cannot be captured")
                else:
                    goal = goals[case] if dtype == "float32" and name == ours else None
                    ratio = at_least(m["times_torch"], goal) if goal else f"{m['times_torch']:.2f}x"
                    row.append(f"{m['ms']:.3g} ms, {m['of_copy_rate']:.0%}, {ratio}")
                row.append(f"{r[dtype][case][name]['launched']['ms']:.3g} ms")
            rows.append((*row, str(r[dtype]["host"][name]["syncs"])))
    errors = [
        (dtype, f"{r[dtype]['norm_error'][ours]:.0e}", f"{r[dtype]['norm_error'][torch]:.0e}")
        for dtype in ("float32", "bfloat16")
    ]
    return section(
        paragraph(
            f"Clipping {r['float32']['elements'] / 1e6:.0f} M gradients",
            f"({r['float32']['tensors']} tensors), with a norm over the threshold and under it.",
            "Replayed from a CUDA graph: time, share of the copy rate for the bytes that must",
            "move, and ratio against `torch.nn.utils.clip_grad_norm_(foreach=True)`. From",
            "Python: behind other work of the GPU.",
        ),
        markdown(
            (
                "gradients, by",
                "over: replayed",
                "from Python",
                "under: replayed",
                "from Python",
                "host waits",
            ),
            rows,
        ),
        clip_bound(r),
        paragraph("1,000 tensors of 1,000 elements:"),
        small_rows(r["small"], torch, ours, 2),
        paragraph("The error of the norm against float64:"),
        markdown(("gradients", "ours", "torch"), errors),
        conditions(result),
    )


def clip_bound(r) -> str:
    """What the goals ask for, against what the copy rate of the same run allows."""
    f, rate = r["float32"], r["float32"]["copy_GB_per_s"]
    bound = {case: size * f["elements"] / rate / 1e6 for case, size in (("over", 12), ("under", 4))}
    best = {case: f[case]["torch foreach"]["replayed"]["ms"] / ms for case, ms in bound.items()}
    return paragraph(
        f"At the copy rate of this run ({rate / 1e3:.2f} TB/s) reading twice and writing once",
        "takes",
        f"{bound['over']:.2f} ms, which would be {best['over']:.2f}x; one read takes",
        f"{bound['under']:.2f} ms,",
        f"which would be {best['under']:.2f}x. The goals were set beside a slower run of torch's",
        "(1.93 ms).",
    )


def small_rows(small, torch, ours, goal=None) -> str:
    """Many small tensors."""

    def cell(m, with_goal):
        ratio = f"{m['times_torch']:.1f}x"
        if with_goal and goal:
            ratio = at_least(m["times_torch"], goal, "{:.1f}x")
        return f"{m['ms']:.3g} ms, {ratio}"

    rows = [
        (name, *(cell(small[kind][name], name == ours) for kind in ("wall", "replayed")))
        for name in (torch, ours)
    ]
    return markdown(("by", "from Python, by the host's clock", "replayed"), rows)


def tail_rows(measured: dict) -> dict:
    """Variant -> measurement. Other rows of an older result also add gradients."""
    old = ", sums there already"
    rows = {name.removesuffix(old): m for name, m in measured.items() if name.endswith(old)}
    return rows or measured


def tail_table() -> str:
    result = load("tail")
    r = result["results"]
    dtypes = ("float32", "bfloat16")
    rows = []
    for dtype in dtypes:
        launched = tail_rows(r[dtype]["launched"])
        for name, m in tail_rows(r[dtype]["replayed"]).items():
            share = f"{m['of_copy_rate']:.0%}"
            if dtype == "float32" and name == "ours":
                share = against_goal(share, "93%", m["of_copy_rate"] >= 0.93)
            times = f"{m['ms']:.2f} ms", f"{launched[name]['ms']:.2f} ms"
            ratio = f"{m['times_torch']:.2f}x"
            rows.append((f"{dtype}: {name}", times[0], share, ratio, times[1]))
    stages = dict.fromkeys(
        name for dtype in dtypes for name in r[dtype]["stages"] if "accumulate" not in name
    )
    alone = [
        (
            f"`{name}`",
            *(
                f"{r[dtype]['stages'][name]:.3g} ms" if name in r[dtype]["stages"] else ""
                for dtype in dtypes
            ),
        )
        for name in stages
    ]
    drift, exact = (
        r["drift"]["same gradients, from foreach"],
        r["drift"]["same gradients, from float64"],
    )
    farthest = against_goal(
        f"{drift['ours']['max']:.1e}",
        f"at most twice torch's {drift['fused']['max']:.1e}",
        drift["ours"]["max"] <= 2 * drift["fused"]["max"],
    )
    return section(
        paragraph(
            "The tail of a step: clip at 1.0 and AdamW, for",
            f"{r['float32']['elements'] / 1e6:.0f} M parameters ({r['float32']['tensors']}",
            "tensors; bfloat16: with fp32 masters). Replayed from a CUDA graph, and launched",
            "from Python behind other work. The share is of the copy rate for the bytes that must",
            "move.",
        ),
        markdown(
            ("weights, by", "replayed", "of the copy rate", "against torch's best", "from Python"),
            rows,
        ),
        paragraph("Our kernels, each alone:"),
        markdown(("kernel", *dtypes), alone),
        paragraph("Clipping and AdamW of 1,000 tensors of 1,000 elements:"),
        small_rows(r["small"], "torch", "ours"),
        paragraph(
            "After 100 steps with the same gradients, the largest difference of a weight from",
            f"torch's foreach AdamW is {farthest}. From AdamW in float64 ours differ by",
            f"{exact['ours']['rms']:.1e} (root mean square), torch's by",
            f"{exact['foreach']['rms']:.1e}.",
        ),
        conditions(result),
    )


# ---- without a GPU -------------------------------------------------------------------------------


def cpu_table() -> str:
    """Clipping with AdamW, and whole steps, beside torch's own."""
    result = load("cpu")
    r = result["results"]
    rows = []
    for threads, measured in r["rows"].items():
        for what, times in measured.items():
            # Steps of an older result have other names.
            if ms := times.get("ours"):
                rows.append(
                    (
                        f"{what}, {threads} thread{'s' * (threads != '1')}",
                        f"{times['torch']:.1f} ms",
                        f"{ms:.1f} ms",
                        at_least(times["torch"] / ms, 0.95),
                    )
                )
    return section(
        paragraph(
            f"Clipping and AdamW of all parameters, and whole steps ({r['model']}). torch:",
            "foreach clipping, fused AdamW, gradients that add up in `.grad`",
            f"(`benchmarks/cpu.py`). On {r['cores']} cores of {r['processor']}.",
        ),
        markdown(("what", "torch", "ours", "against torch"), rows),
        conditions(result),
    )


# ---- over all benchmarks ------------------------------------------------------------------------

TABLES = {
    "step": step_table,
    "transformers_step": transformers_step_table,
    "lora": lora_table,
    "graphs": graphs_table,
    "ddp": ddp_table,
    "dispatch": dispatch_table,
    "encoder": encoder_table,
    "accumulate": accumulate_table,
    "clip": clip_table,
    "tail": tail_table,
    "cpu": cpu_table,
}
# The files of a table, where they are not named as the table.
FILES = {"ddp": ("ddp_2gpus", "ddp_4gpus", "ddp_8gpus")}
TITLES = {
    "step": "One training step",
    "transformers_step": "Models of transformers",
    "lora": "LoRA",
    "graphs": "CUDA graphs",
    "ddp": "Several GPUs",
    "dispatch": "Fused layers",
    "encoder": "Embedding gradient",
    "accumulate": "Adding gradients",
    "clip": "Clipping",
    "tail": "Tail of a step",
    "cpu": "Without a GPU",
}


def gpus_of(name: str) -> "list[str]":
    """The GPUs that have a result for this table, in the order of the page."""
    return machines(*FILES.get(name, (name,)))


def table(name: str) -> str:
    """A table of every GPU that has a result: that of the first one, and the others folded."""
    parts = []
    for index, gpu in enumerate(gpus_of(name)):
        with showing(gpu):
            text = TABLES[name]()
        summary = f"<details>\n<summary>The same on {short(gpu)}</summary>"
        parts += [text] if index == 0 else [summary, text, "</details>"]
    return section(*parts)


def missed_in(text: str) -> "list[tuple[str, str]]":
    """(what, value and goal) of every goal that a section says was missed."""
    missed, head, part = [], None, ""
    for line in text.split("\n"):
        if not line.startswith("|"):
            head = None
            if line.startswith("**"):
                part = line.strip("*") + ", "
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if head is None:
            head = cells
            continue
        for title, cell in zip(head, cells):
            if ": missed)" in cell:
                what = part + cells[0].replace("`", "")
                # What follows has no goal of its own.
                shown = cell[: cell.rindex(": missed)")] + ": missed)"
                missed.append((f"{what}; {title}" if title else what, shown))
    sentences = (" ".join(block.split()) for block in text.split("\n\n") if block[:1] != "|")
    return missed + [("", words) for words in sentences if ": missed)" in words]


def missed_table() -> str:
    """Every goal that was missed, found in the tables themselves."""
    rows = []
    for name, make in TABLES.items():
        link = f"[{TITLES[name]}](#{TITLES[name].lower().replace(' ', '-')})"
        gpus = gpus_of(name)
        # what -> GPU -> value and goal
        missed: "dict[str, dict[str, str]]" = {}
        for gpu in gpus:
            with showing(gpu):
                for what, cell in missed_in(make()):
                    missed.setdefault(what, {})[gpu] = cell
        for what, cells in missed.items():
            measured = [f"{short(gpu)}: {cell}" for gpu, cell in cells.items()]
            rows.append((link, what, "; ".join(measured) if len(gpus) > 1 else cells[gpus[0]]))
    if not rows:
        return "Every goal is reached."
    return markdown(("benchmark", "what", "measured (goal)"), rows)


@dataclasses.dataclass
class Claim:
    """One line of the README's table: a value beside its strongest peer."""

    what: str
    against: str
    value: float
    result: dict
    # Times faster than the peer; else a share.
    against_peer: bool = True

    @property
    def words(self) -> str:
        return f"{self.value:.2f}x" if self.against_peer else f"{self.value:.3f}x"


def claims(gpu: "str | None" = None) -> "list[Claim]":
    """One for each claim that has a result, against its strongest peer. gpu: only of this one."""
    made = []

    def claim(name, what, against, value):
        if result := load(name, gpu):
            made.append(Claim(what, against, value(result["results"]), result))

    if result := load("step", gpu):
        peers = {T: fastest_torch(result["results"][T]) for T in ("1024", "256")}
    claim(
        "step",
        "one step of `llama-350m`, T = 1024",
        result and peers["1024"],
        lambda r: r["1024"]["ours"]["times_torch"],
    )
    claim(
        "step",
        "the same, T = 256",
        result and peers["256"],
        lambda r: r["256"]["ours"]["times_torch"],
    )
    claim(
        "step",
        "T = 1024, bit-identical in every run",
        "torch, not deterministic",
        lambda r: r["1024"]["ours, deterministic"]["times_torch"],
    )
    if result := load("transformers_step", gpu):
        peer = fastest_torch(result["results"]["Llama"]["rows"])
    claim(
        "transformers_step",
        "one step of transformers' Llama, T = 1024",
        result and peer,
        lambda r: r["Llama"]["rows"]["ours"]["times_torch"],
    )
    if result := load("ddp_2gpus", gpu):
        made.append(ddp_headline(result))
    claim(
        "tail",
        "clip and AdamW",
        "torch: foreach clip, fused AdamW",
        lambda r: tail_rows(r["float32"]["replayed"])["ours"]["times_torch"],
    )
    claim(
        "clip",
        "`ga.clip_grad_norm_`, norm over the threshold",
        "torch's, `foreach=True`",
        lambda r: r["float32"]["over"]["ga.clip_grad_norm_"]["replayed"]["times_torch"],
    )
    claim(
        "encoder",
        "embedding gradient, 65,536 tokens",
        "atomic `index_add_`",
        lambda r: r["backward"]["Zipf"]["variants"]["ours, segments in line"]["times_atomics"],
    )
    claim(
        "encoder",
        "the same, 4,096 tokens, worst case measured",
        "atomic `index_add_`",
        lambda r: min(c["times_atomics"] for c in r["grid"] if c["tokens"] == 4096),
    )
    return made


def ratios_table() -> str:
    """The README's table: the claims of the GPU on which a whole step was measured last."""
    some = claims(machines("step")[0])
    rows = [(claim.what, claim.against, claim.words) for claim in some]
    lines = dict.fromkeys(f"*{c.result['gpu']}, {versions(c.result)}.*" for c in some)
    return section(markdown(("what", "against", "speed"), rows), *lines)


def charts_part() -> str:
    """The charts that there are, as images."""
    import charts

    images = []
    for name, svg in charts.charts().items():
        words = html.unescape(re.search(r'aria-label="([^":,]*)', svg)[1])
        images.append(f"![{words}](charts/{name})")
    return section(*images)


def ddp_headline(result) -> Claim:
    """Two GPUs: against torch's fastest step if one in a CUDA graph was measured too, else the
    share of one GPU's rate."""
    r = result["results"]["2"]
    ours, peer = ddp_ours(r, "4"), fastest_ddp(r, "4")
    if peer and captured_measured(r, "4"):
        ratio, what = peer[1]["ms"] / ours["ms"], "`llama-350m` on two GPUs, T = 1024"
        kind = "FSDP2" if "FSDP2" in peer[0] else "DDP"
        how = "in a CUDA graph" if "captured" in peer[0] else "compiled"
        return Claim(what, f"torch: {kind} {how}", ratio, result)
    what = "rate of each of two GPUs"
    return Claim(what, "ours on one GPU", ours["of_one_gpu"], result, against_peer=False)


# ---- models of others ---------------------------------------------------------------------------


def models_table(result: "dict | None" = None) -> str:
    """Models and backends against plain torch; a number points to why a cell is not so."""
    result = result or json.loads((common.RESULTS / "models.json").read_text())
    notes: "list[str]" = []
    rows = []
    # An older result has several modes of accumulation; the products of `fused` add, as today.
    models = {model: cells.get("fused", cells) for model, cells in result["results"].items()}
    for model, cells in models.items():
        rows.append((f"`{model}`", *(models_cell(value, notes) for value in cells.values())))
    columns = next(iter(models.values()))
    tolerances = result["tolerances"]
    return section(
        paragraph(
            f"{result['steps']} steps of {result['micro_batches']} micro-batches with clipping",
            "and AdamW, in `ga.TrainStep` and in plain torch with the same weights and batches",
            "(`benchmarks/models.py`). A cell is the largest difference of a weight at the end,",
            f"in learning rates; up to {tolerances['weight']:g}, and up to",
            f"{tolerances['loss']:g} of each loss, counts as equal. *=*: replayed, and with",
            "`deterministic=True` bit-identical to eager steps.",
        ),
        markdown(("model", *columns), rows),
        "\n".join(
            paragraph(f"{i}. {note}").replace("\n", "\n   ") for i, note in enumerate(notes, 1)
        ),
        models_conditions(result["columns"]),
    )


def models_cell(value: dict, notes: "list[str]") -> str:
    """One cell. A reason is added to `notes` unless it is there already."""
    if value["ran"] is None and value["reason"].startswith("needs "):
        return value["reason"]
    mark = ""
    if "reason" in value:
        # Without what to do instead, which is for the author of the model.
        reason = value["reason"].split(" Instead: ")[0]
        if reason not in notes:
            notes.append(reason)
        mark = f" ({notes.index(reason) + 1})"
    if value["ran"] is None:
        return f"does not run{mark}"
    words = f"{value['weight']:.0e}"
    if not value["equal"]:
        words = f"**differs: {words}**"
    if value.get("equals_eager"):
        words += " ="
    return words + (f", eager{mark}" if mark else "")


def models_conditions(columns: dict) -> str:
    """Where each column was measured; columns of one machine share a line."""
    groups: "dict[str, list[str]]" = {}
    for column, c in columns.items():
        words = f"{c['on']}, torch {c['torch']}, transformers {c['transformers']}, {c['date']}"
        groups.setdefault(words, []).append(column)
    return "\n\n".join(
        paragraph(f"*{'; '.join(names)}: {words}.*") for words, names in groups.items()
    )


PARTS = {
    **TABLES,
    "charts": charts_part,
    "missed": missed_table,
    "ratios": ratios_table,
    "models": models_table,
}


def filled(text: str) -> str:
    """A page with its generated parts made anew; a table without a result stays as it is."""
    for name, make in PARTS.items():
        part = re.search(
            rf"(<!-- {name}: made by benchmarks/report.py -->\n).*?(<!-- /{name} -->)",
            text,
            re.DOTALL,
        )
        if part and (name not in TABLES or gpus_of(name)):
            made = table(name) if name in TABLES else make()
            text = f"{text[: part.end(1)]}{made}\n{text[part.start(2) :]}"
    return text


def print_stale_results():
    """Name the results that are older than what they measured."""
    for path in sorted(common.RESULTS.rglob("*.json")):
        stale = staleness(json.loads(path.read_text()))
        if stale:
            print(f"{path.relative_to(common.RESULTS)} was {stale}")


def generated() -> "dict[pathlib.Path, str]":
    """Each page with its parts made anew, and each chart."""
    import charts

    pages = {path: filled(path.read_text()) for path in PAGES}
    return {**pages, **{charts.FOLDER / name: svg for name, svg in charts.charts().items()}}


def outdated() -> "dict[pathlib.Path, str | None]":
    """The files that show other results, with what they should hold; None: should not be there."""
    import charts

    files = generated()
    changed = {
        path: text for path, text in files.items() if not path.exists() or path.read_text() != text
    }
    return {**changed, **dict.fromkeys(set(charts.FOLDER.glob("*.svg")) - set(files))}


def main():
    changed = outdated()
    print_stale_results()
    if "--check" not in sys.argv:
        for path, text in changed.items():
            path.parent.mkdir(exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
    elif changed:
        names = ", ".join(sorted(path.name for path in changed))
        sys.exit(f"{names} do not show benchmarks/results: run python benchmarks/report.py")


if __name__ == "__main__":
    # charts.py imports this module by its name.
    sys.modules["report"] = sys.modules["__main__"]
    main()
