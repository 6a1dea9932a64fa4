"""Measured here, or recorded elsewhere: timing on this GPU, and the runs kept in benchmarks/results.

>>> gpu_milliseconds(lambda: y.copy_(x))  # median device time
>>> run = recorded("accumulate")          # the newest result of benchmarks/accumulate.py
>>> run.label                             # "Recorded, not run here: NVIDIA H200, 2026-11-21, torch 2.11"
>>> run.get("addition", "elements")       # a value of the results; None where the file has none
"""

import json
import pathlib
import statistics

import torch

from ..measure.timeline import spans_of
from .figures import diagrams
from .figures.figures import Figure, Table, bars, timeline

ABSENT = "no recorded run in this checkout"


class Recorded:
    """One result file. `found`: is there one; `label`: what it is, in words; `get(*keys)`: a value, or None."""

    def __init__(self, benchmark: str, content: "dict | None"):
        self.benchmark, self.found, self.content = benchmark, content is not None, content or {}
        facts = [str(self.content[key]) for key in ("gpu", "date") if key in self.content]
        facts += [f"torch {self.content['torch']}"] if "torch" in self.content else []
        self.label = (
            f"Recorded, not run here: {', '.join(facts) or 'no facts about the machine'}"
            if self.found
            else f"{benchmark}: {ABSENT}"
        )

    def get(self, *keys):
        value = self.content.get("results")
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def __repr__(self):
        return self.label


def gpu_milliseconds(run, times: int = 20) -> float:
    """Median time of run() on the current CUDA stream, in ms, after three calls to warm up. Waits for the GPU."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def results_folder() -> pathlib.Path:
    """benchmarks/results of the checkout that this package is part of (it need not exist)."""
    return pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def recorded(benchmark: str) -> Recorded:
    """The newest result of benchmarks/<benchmark>.py; a damaged file counts as none."""
    contents = []
    for path in results_folder().glob(f"{benchmark}_*.json"):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            contents.append(content)
    return Recorded(benchmark, max(contents, key=lambda c: str(c.get("date", "")), default=None))


def addition(dtype: str = "float32") -> "Figure | Recorded":
    """The kernel ladder on the recorded GPU: shares of the rate at which that GPU copies. dtype: of the gradients."""
    run = recorded("accumulate")
    rows = [
        (name, r["of_copy_rate"], f"{r['of_copy_rate']:.0%}, {r['ms']:.2f} ms")
        for name, r in (run.get("addition", dtype) or {}).items()
        if isinstance(r, dict) and {"of_copy_rate", "ms"} <= r.keys()
    ]
    elements = run.get("addition", "elements") or 0
    title = f"{run.label}: {dtype} gradients, {elements / 1e6:,.0f} M elements"
    return bars(rows, title, (1.0, "the copy rate")) if rows else run


def training() -> "Table | Recorded":
    """Whole steps of llama-350m in the four ways of accumulating, on the recorded GPU."""
    run = recorded("train")
    rows = []
    for mode, r in (run.get() or {}).items():
        if isinstance(r, dict):
            ledger = r.get("ledger") or {}
            down = (ledger.get("copies") or {}).get("DtoH", [0, 0])[1]
            speeds = [r.get(f"tokens_per_s, {k}") for k in (1, 4, 16)]
            rows.append(
                [
                    mode,
                    *("-" if s is None else f"{s:,.0f}" for s in speeds),
                    ledger.get("launches", "-"),
                    ledger.get("syncs", "-"),
                    f"{down / 2**20:,.0f} MiB",
                ]
            )
    columns = (
        "accumulation",
        "tok/s, 1 micro-batch",
        "4",
        "16",
        "launches",
        "host waits",
        "GPU to host",
    )
    return (
        Table(
            columns,
            rows,
            f"{run.label}; llama-350m, one step of 4 micro-batches in the last three columns",
        )
        if rows
        else run
    )


def clipping(dtype: str = "float32") -> "Table | Recorded":
    """Every way of clipping a large model's gradients on the recorded GPU: time over and under the threshold, launches, waits."""
    run = recorded("clip")
    over, under, host = (run.get(dtype, what) or {} for what in ("over", "under", "host"))

    def ms(row):
        value = (row.get("launched") or {}).get("ms") if isinstance(row, dict) else None
        return "-" if value is None else f"{value:.2f} ms"

    rows = [
        [
            name,
            ms(row),
            ms(under.get(name)),
            *((host.get(name) or {}).get(key, "-") for key in ("launches", "syncs")),
        ]
        for name, row in over.items()
    ]
    columns = ("clip by", "over the threshold", "under it", "launches", "host waits")
    tensors, elements = run.get(dtype, "tensors") or 0, run.get(dtype, "elements") or 0
    return (
        Table(
            columns,
            rows,
            f"{run.label}; {tensors} {dtype} gradients, {elements / 1e6:,.0f} M elements",
        )
        if rows
        else run
    )


def tail(dtype: str = "float32", kind: str = "replayed") -> "Figure | Recorded":
    """Accumulate, clip, AdamW and zero of a large model on the recorded GPU, ours and torch's, as bars of milliseconds."""
    run = recorded("tail")
    rows = [
        (name, r["ms"], f"{r['ms']:.2f} ms")
        for name, r in (run.get(dtype, kind) or {}).items()
        if isinstance(r, dict) and "ms" in r
    ]
    elements = run.get(dtype, "elements") or 0
    return (
        bars(rows, f"{run.label}: the tail, {elements / 1e6:,.0f} M {dtype} weights")
        if rows
        else run
    )


# What dispatch() shows of the results: name, keys down to the milliseconds by way, one of their phases.
_DISPATCHED = [
    *(
        (
            f"RichardsGLU between its products, {phase}",
            ("curves", "bfloat16, 16,384 x 4,096", "glu"),
            phase,
        )
        for phase in ("forward", "backward")
    ),
    *(
        (f"PolyAttention, T=2048, {part}", ("attention", "batch 4", key), None)
        for part, key in (("kernels", "core"), ("layer", "layer"))
    ),
    *(
        (f"poly-7m, batch 32, {part}", ("layers", "batch 32", key), None)
        for part, key in (("RichardsGLU",) * 2, ("PolyAttention",) * 2, ("whole step", "step"))
    ),
]


def dispatch() -> "Table | Recorded":
    """RichardsGLU, PolyAttention and whole steps on the recorded GPU: our time, and how many times that the other ways take (torch.compile: the
    fastest of several)."""
    run, rows = recorded("dispatch"), []
    for name, keys, phase in _DISPATCHED:
        ways = {
            way: ms.get(phase) if phase and isinstance(ms, dict) else ms
            for way, ms in (run.get(*keys, "ms") or {}).items()
        }
        ours = ways.get("ours")
        if ours:
            compiled = min(
                (ms for way, ms in ways.items() if way.startswith("torch.compile") and ms),
                default=None,
            )
            others = (ways.get("torch"), compiled, ways.get("CPU"))
            rows.append(
                [
                    name,
                    f"{ours:,.3f} ms",
                    *(
                        "-"
                        if ms is None
                        else f"{ms / ours:,.1f}x"
                        if ms < 100 * ours
                        else f"{ms / ours:,.0f}x"
                        for ms in others
                    ),
                ]
            )
    return (
        Table(
            ("", "gpuaccel", "torch", "torch.compile", "all CPU cores"),
            rows,
            f"{run.label}; the others: how many times ours",
        )
        if rows
        else run
    )


def waiting(here: "dict[str, list] | None" = None) -> "Figure | Recorded":
    """The timeline of three ways of clipping on the recorded GPU; without a recording that of `here`, spans of this machine."""
    run = recorded("timeline")
    spans = {
        name: spans_of(r["spans"])
        for name, r in (run.get("tails") or {}).items()
        if isinstance(r, dict) and isinstance(r.get("spans"), list)
    }
    if spans:
        return timeline(spans, f"{run.label}: {run.get('what') or 'one step'}")
    return (
        timeline(here, "Here, on the CPU: what follows the last backward of one step")
        if here
        else run
    )


def launches() -> "Figure | Recorded":
    """A whole step on the recorded GPU, launched from Python and replayed: host and GPU, and a stretch enlarged."""
    run = recorded("graphs")
    spans = {
        name: spans_of(lines)
        for name, lines in (run.get("timeline") or {}).items()
        if isinstance(lines, list) and lines
    }
    return diagrams.launches(spans, f"{run.label}: a step of a small model") if spans else run


def graph() -> "Figure | Recorded":
    """The graph of a small model's step, as CUDA's own debug dump on the recorded GPU has it."""
    run = recorded("graphs")
    names, edges = run.get("graph", "names"), run.get("graph", "edges")
    return (
        diagrams.graph(names, edges, f"{run.label}: a step of a small model")
        if names and isinstance(edges, list)
        else run
    )


def replaying() -> "Table | Recorded":
    """Steps of a large model on the recorded GPU, launched and replayed: tokens per second, and how many times plain torch's."""
    run = recorded("graphs")
    speed = {
        shape: ways for shape, ways in (run.get("speed") or {}).items() if isinstance(ways, dict)
    }
    columns = list(
        dict.fromkeys(
            way
            for ways in speed.values()
            for way, r in ways.items()
            if isinstance(r, dict) and "tokens_per_s" in r
        )
    )

    def cell(r):
        return (
            "-"
            if "tokens_per_s" not in r
            else f"{r['tokens_per_s']:,.0f}"
            + (f", {r['times_plain']:.2f}x" if "times_plain" in r else "")
        )

    rows = [
        [shape, *(cell(ways.get(way) or {}) for way in columns)] for shape, ways in speed.items()
    ]
    return (
        Table(
            ("batch x T", *columns),
            rows,
            f"{run.label}; llama-350m, tokens per second, one micro-batch per step",
        )
        if columns
        else run
    )


def replay_ledger() -> "Table | Recorded":
    """What the host did in one step on the recorded GPU: eager, replayed, and replayed with a list of micro-batches."""
    run = recorded("graphs")
    found, keys = run.get("ledger") or {}, ("launches", "graph_launches", "syncs")
    rows = [
        [name, *(r.get(key, "-") for key in keys)]
        for name, r in found.items()
        if isinstance(r, dict)
    ]
    columns = ("one step", "kernel launches", "graph launches", "host waits")
    return Table(columns, rows, f"{run.label}; {run.get('what') or 'one step'}") if rows else run


def encoder() -> "Table | Recorded":
    """The embedding's backward on the recorded GPU: every way and every kind of tokens, and how many sums differ between runs."""
    run = recorded("encoder")
    found = run.get("backward") or {}
    kinds = {
        kind: r
        for kind, r in found.items()
        if isinstance(r, dict) and isinstance(r.get("variants"), dict)
    }

    def ms(row):
        times = row.get("ms") or {}
        value = times.get("replayed", times.get("launched"))
        return "-" if value is None else f"{value:.3f} ms"

    ways = list(
        dict.fromkeys(way for r in kinds.values() for way in r["variants"] if "bf16" not in way)
    )
    rows = [
        [
            way,
            *(ms(r["variants"].get(way) or {}) for r in kinds.values()),
            f"{max((r['variants'].get(way) or {}).get('differ') or 0 for r in kinds.values()):,}",
        ]
        for way in ways
    ]
    rows += (
        [
            [
                "making the buckets, CPU",
                *(
                    f"{r['buckets_ms']:.1f} ms" if "buckets_ms" in r else "-"
                    for r in kinds.values()
                ),
                "",
            ]
        ]
        if rows
        else []
    )
    size = (
        f"{found.get('tokens') or 0:,} tokens, {found.get('C') or 0} channels in bf16, sums in fp32"
    )
    return (
        Table(("", *kinds, "sums that differ, at most"), rows, f"{run.label}; {size}")
        if rows
        else run
    )


def ddp(gpus: int = 2) -> "Table | Recorded":
    """Data-parallel steps of a large model on so many recorded GPUs, with 4 micro-batches and with 1.

    The tokens/s of each GPU and their share of one GPU's rate; of steps replayed from a CUDA graph also
    the time that communication adds (of others it cannot be told from the host's noise). Where the
    recording has torch's fastest DDP, the caption names it and the last column compares with it."""
    run, counts, rows, fastest = recorded(f"ddp_{gpus}gpus"), ("4", "1"), [], {}

    def rate(row):
        if "of_one_gpu" not in row:
            return "-"
        return f"{row['tokens_per_s_per_gpu'] / 1e3:,.0f}K, {row['of_one_gpu']:.1%}"

    for ranks, result in (run.get() or {}).items():
        if not isinstance(result, dict):
            continue
        fastest.update(dict.fromkeys((result.get("fastest_torch") or {}).values()))
        for family, by_count in (result.get("groups") or {}).items():
            by_count = {count: ways for count, ways in by_count.items() if isinstance(ways, dict)}
            names = dict.fromkeys(
                name
                for ways in by_count.values()
                for name, row in ways.items()
                if isinstance(row, dict) and "exposed_ms" in row
            )
            graph = "replayed" in family or "captured" in family
            for name in names:
                if name in ("one GPU", "each for itself"):
                    continue
                both = [(by_count.get(count) or {}).get(name) or {} for count in counts]
                exposed = (
                    f"{both[0]['exposed_ms']:.1f} ms" if graph and "exposed_ms" in both[0] else "-"
                )
                times = [f"{row['times_torch']:.2f}x" for row in both if "times_torch" in row]
                compared = ", ".join(times) or "-"
                rows.append(
                    [f"{ranks} GPUs: {family}, {name}", *map(rate, both), exposed, compared]
                )
    columns = [
        "tokens/s of each GPU, and of one alone",
        "4 micro-batches",
        "1 micro-batch",
        "communication that nothing hides",
        "of torch's fastest DDP",
    ]
    caption = f"{run.label}; llama-350m, batch 4 on each GPU, T=1024"
    if fastest:
        caption += f"; torch's fastest DDP: {', '.join(fastest)}"
    else:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(columns, rows, caption) if rows else run
