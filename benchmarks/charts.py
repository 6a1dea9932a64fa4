"""The charts of the benchmarks, by matplotlib; report.py writes them.

A chart has a panel for each GPU. It is an SVG with text as text, a transparent ground and grey ink,
so that it is readable on a light and on a dark page. Blue is ours and orange torch's: two colours
that colour-blind readers tell apart.
"""

import pathlib

import matplotlib
from matplotlib.figure import Figure
from report import gpu_of, load, ratio_rows

OURS, TORCH = "#3a87d0", "#e0861a"
INK = "#808080"
# Inches: of a chart's width, of a bar's height, of titles and axes.
WIDTH, BAR, REST = 9.0, 0.22, 1.0
STYLE = {
    "svg.fonttype": "none",
    # The same file from the same numbers.
    "svg.hashsalt": "gpuaccel",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def bars(title: str, panels: dict, line: str, names: tuple = (), form="{:.2f}x") -> Figure:
    """Horizontal bars, a panel for each GPU.

    panels: GPU -> label -> values; the first is ours. A value may be None.
    line: what a value of 1 is, in words. names: of the values, for the legend"""
    labels = list(dict.fromkeys(label for rows in panels.values() for label in rows))
    count = max(len(values) for rows in panels.values() for values in rows.values())
    height = REST + BAR * len(labels) * (count + 0.5)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.suptitle(title, fontweight="bold", fontsize=11)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        most = max(v for rows in panels.values() for vs in rows.values() for v in vs if v)
        # Room for the numbers, in a column of their own.
        end = max(most, 1) * 1.25
        for ax, (gpu, rows) in zip(axes, panels.items(), strict=True):
            thickness = 0.8 / count
            for i, (name, colour) in enumerate(zip(names or [""], (OURS, TORCH))):
                values = [(rows.get(label) or ())[i : i + 1] for label in labels]
                there = [(y, v[0]) for y, v in enumerate(values) if v and v[0] is not None]
                places = [y + (i - (count - 1) / 2) * thickness for y, _ in there]
                drawn = ax.barh(places, [v for _, v in there], thickness * 0.9, color=colour)
                drawn.set_label(name)
                for place, (_, v) in zip(places, there):
                    ax.text(end, place, form.format(v), ha="right", va="center", fontsize=8)
            ax.axvline(1, color=INK, linewidth=1, linestyle="--")
            ax.set_title(gpu, fontsize=10)
            ax.set_xlim(0, end)
            ax.set_xlabel(f"1 = {line}")
        axes[0].set_yticks(range(len(labels)), [label.replace("`", "") for label in labels])
        axes[0].invert_yaxis()
        if names:
            figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
            figure.legends[0].get_frame().set_alpha(0)
    return figure


# ---- what is drawn ------------------------------------------------------------------------------


def ratios(folder: str) -> dict:
    """The README's table."""
    return {row["what"]: (row["ratio"],) for row in ratio_rows(folder)}


def copy_rate(folder: str) -> dict:
    """Shares of the rate of a plain copy, for the bytes that must move: ours, and torch's."""
    rows = {}
    for dtype in ("float32", "bfloat16"):
        if result := load("accumulate", folder):
            m = result["results"]["addition"][dtype]
            rows[f"adding gradients, {dtype}"] = (
                m["accumulate_v3, one launch"]["of_copy_rate"],
                m["torch._foreach_add_"]["of_copy_rate"],
            )
        if result := load("clip", folder):
            m = result["results"][dtype]["over"]
            rows[f"clipping, {dtype}"] = tuple(
                m[name]["replayed"]["of_copy_rate"]
                for name in ("ga.clip_grad_norm_", "torch foreach")
            )
        if result := load("tail", folder):
            m = result["results"][dtype]["replayed"]
            rows[f"clip and AdamW, {dtype}"] = tuple(
                m[name]["of_copy_rate"] for name in ("ours", "torch, fused AdamW")
            )
    if result := load("encoder", folder):
        for tokens, m in result["results"]["backward"].items():
            if isinstance(m, dict):
                rows[f"embedding gradient, {tokens}"] = tuple(
                    m["variants"][name]["of_copy_rate"]
                    for name in ("ours, segments known", m["best_atomics"])
                )
    return rows


def several(folder: str) -> dict:
    """The rate of each of several GPUs, as a share of ours on one: ours, and torch's fastest."""
    rows = {}
    for n in ("2", "4", "8"):
        if result := load(f"ddp_{n}gpus", folder):
            r = result["results"][n]
            for count, words in (("4", "4 micro-batches"), ("1", "1 micro-batch")):
                if m := r["groups"].get("ours, replayed", {}).get(count, {}).get("all-reduce"):
                    torch = m["of_one_gpu"] / m["times_torch"] if "times_torch" in m else None
                    rows[f"{n} GPUs, {words}"] = (m["of_one_gpu"], torch)
    return rows


PAIR = ("ours", "torch's fastest")
# File name -> (title, rows of a GPU, what 1 is, names of the values, how they are written).
CHARTS = {
    "ratios": ("How many times as fast as torch", ratios, "equally fast", (), "{:.2f}x"),
    "copy_rate": ("Share of the copy rate", copy_rate, "a plain copy", PAIR, "{:.0%}"),
    "several": ("Rate of each GPU", several, "ours on one GPU", PAIR, "{:.0%}"),
}


def charts(folders) -> dict[str, Figure]:
    """File name -> chart of these GPUs; one without a value is left out."""
    made = {}
    for name, (title, rows, line, names, form) in CHARTS.items():
        panels = {gpu_of(folder): some for folder in folders if (some := rows(folder))}
        if panels:
            made[name] = bars(title, panels, line, names, form)
    return made


def write(target: pathlib.Path, folders) -> dict[str, str]:
    """Title -> file name of each chart, written to a folder."""
    written = {}
    for name, figure in charts(folders).items():
        with matplotlib.rc_context(STYLE):
            figure.savefig(target / f"{name}.svg", transparent=True, metadata={"Date": None})
        written[CHARTS[name][0]] = f"{name}.svg"
    return written
