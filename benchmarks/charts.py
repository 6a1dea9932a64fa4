"""The charts of docs/benchmarks.md, from benchmarks/results; report.py writes them to docs/charts.

One chart of each kind for each GPU that has results: how many times faster than the strongest peer,
how close to the copy rate, how much of one GPU's rate is left on several, and the trainings of the
notebooks. A chart is an SVG that is readable on a light and on a dark page.
"""

import common
import report

from gpuaccel.learn.figures.drawing import BLUE, GREEN, GREY, ORANGE, RED, WIDTH, Ink

FOLDER = common.ROOT / "docs" / "charts"
# Where the bars begin and end, and the height of one.
LEFT, RIGHT, BAR = 390, WIDTH, 16


def bars(title: str, rows, axis: str, unit: float = 1.0, legend=()) -> str:
    """Horizontal bars under a title.

    rows: (words, [(value, words, colour)]), one group of bars each.
    axis: what the line at `unit` is, in words.
    legend: (colour, opacity, words)."""
    ink = Ink()
    ink.title(14, title)
    y = 34
    if legend:
        ink.legend(y + 2, legend)
        y += 22
    longest = max(max(value for value, _, _ in group) for _, group in rows) * 1.02
    scale = (RIGHT - LEFT) / max(longest, unit)
    line, top = LEFT + unit * scale, y + 14
    at_the_edge = line > WIDTH - 40
    ink.text(line, y + 6, axis, 11, ink.soft, "end" if at_the_edge else "middle")
    y = top + 8
    for words, group in rows:
        middle = y + len(group) * BAR / 2 + 4
        ink.text(LEFT - 106, middle, words, 12, anchor="end")
        for value, number, colour in group:
            ink.rect(LEFT, y + 1, max(value * scale, 1.0), BAR - 3, colour, rx=2)
            ink.text(LEFT - 10, y + BAR - 4.5, number, 11.5, anchor="end", weight=600)
            y += BAR
        y += 9
    ink.segment(line, top, line, y, ink.soft, 1.2, "3 3")
    spoken = "; ".join(f"{words}: {', '.join(n for _, n, _ in group)}" for words, group in rows)
    return ink.svg(y + 8, f"{title}. {spoken}")


def ratios(gpu: str) -> "str | None":
    """Each claim of the README against its strongest peer."""
    rows = [
        (c.what.replace("`", ""), [(c.value, f"{c.value:.2f}x", BLUE if c.value >= 1 else RED)])
        for c in report.claims(gpu)
        if c.against_peer
    ]
    return rows and bars(
        f"How many times faster than the strongest peer, {gpu}", rows, "equally fast"
    )


def floor(gpu: str) -> "str | None":
    """The least time that the bytes allow, at the copy rate of the same run, as a share."""
    rows = []

    def add(words, ours, torch):
        shares = [
            (share, f"{share:.0%}", colour) for share, colour in ((ours, BLUE), (torch, ORANGE))
        ]
        rows.append((words, shares))

    if result := report.load("accumulate", gpu):
        for dtype, m in dtypes_of(result["results"]["addition"]):
            ours, torch = m["accumulate_v3, one launch"], m["torch._foreach_add_"]
            add(f"adding gradients, {dtype}", ours["of_copy_rate"], torch["of_copy_rate"])
    if result := report.load("clip", gpu):
        for dtype, m in dtypes_of(result["results"]):
            ours, torch = (
                m["over"][name]["replayed"] for name in ("ga.clip_grad_norm_", "torch foreach")
            )
            add(
                f"clipping, norm over the limit, {dtype}",
                ours["of_copy_rate"],
                torch["of_copy_rate"],
            )
    if result := report.load("tail", gpu):
        for dtype, m in dtypes_of(result["results"]):
            measured = report.tail_rows(m["replayed"])
            ours, torch = measured["ours"], measured[report.fastest_torch(measured)]
            add(f"clip and AdamW, {dtype}", ours["of_copy_rate"], torch["of_copy_rate"])
    if result := report.load("encoder", gpu):
        for tokens, m in result["results"]["backward"].items():
            if isinstance(m, dict):
                ours, torch = (
                    m["variants"][name]["of_copy_rate"]["replayed"]
                    for name in ("ours, segments known", m["best_atomics"])
                )
                add(f"embedding gradient, {tokens}", ours, torch)
    legend = [(BLUE, None, "ours"), (ORANGE, None, "torch's fastest")]
    return rows and bars(
        f"Share of the floor: the copy rate for the bytes that must move, {gpu}",
        rows,
        "copy rate",
        legend=legend,
    )


def dtypes_of(results):
    return [(dtype, results[dtype]) for dtype in ("float32", "bfloat16")]


def several(gpu: str) -> "str | None":
    """The rate of each of several GPUs as a share of one GPU's, with 4 micro-batches and with 1."""
    rows = []
    for n in ("2", "4", "8"):
        if not (result := report.load(f"ddp_{n}gpus", gpu)):
            continue
        r = result["results"][n]
        for count, words in (("4", "4 micro-batches"), ("1", "1 micro-batch")):
            ours, peer = report.ddp_ours(r, count), report.fastest_ddp(r, count)
            group = []
            if ours:
                group.append((ours["of_one_gpu"], f"{ours['of_one_gpu']:.1%}", BLUE))
            # Beside a step launched from Python a replayed one would be compared with the host.
            if ours and peer and "captured" in peer[0]:
                share = ours["of_one_gpu"] * ours["ms"] / peer[1]["ms"]
                group.append((share, f"{share:.1%}", ORANGE))
            if group:
                rows.append((f"{n} GPUs, {words}", group))
    legend = [
        (BLUE, None, "ours, replayed"),
        (ORANGE, None, "torch's fastest, DDP or FSDP2, in a CUDA graph"),
    ]
    return rows and bars(
        f"Rate of each GPU, as a share of ours on one GPU, {gpu}", rows, "one GPU", legend=legend
    )


def rungs(gpu: str) -> "str | None":
    """The trainings of the notebooks, one after the other."""
    result = report.load("rungs", gpu)
    if not result:
        return None
    rows = []
    for notebook, m in result["results"].items():
        first = next(iter(m["rows"].values()))["tokens_per_s"]
        for i, (name, row) in enumerate(m["rows"].items()):
            rate = row["tokens_per_s"]
            number = f"{rate / first:.2f}x  {rate / 1e3:,.0f}K"
            rows.append(
                (f"{notebook}: {name}", [(rate / first, number, GREY if i == 0 else GREEN)])
            )
    return bars(
        f"The trainings of the notebooks: tokens/s against each one's first row, {gpu}",
        rows,
        "first row",
    )


KINDS = {"ratios": ratios, "floor": floor, "several": several, "rungs": rungs}


def charts() -> "dict[str, str]":
    """File name -> SVG, for all kinds and GPUs."""
    gpus = [gpu for gpu in report.machines("*") if not gpu.startswith("none")]
    drawn = {}
    for kind, draw in KINDS.items():
        for gpu in gpus:
            if svg := draw(gpu):
                drawn[f"{kind}-{gpu.lower().replace(' ', '-')}.svg"] = svg + "\n"
    return drawn
