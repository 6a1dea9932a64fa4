"""Tables and charts of benchmarks/results: in the pages, and of each GPU that has results.

python benchmarks/report.py            # after a measurement
python benchmarks/report.py --check    # fails where the pages show other results; changes nothing

A page says between two markers which table it has, of which folders of benchmarks/results, and of
which columns, where it does not have all:

<!-- step/steps h100_80gb_hbm3 h200 [ms; against torch]: made by benchmarks/report.py -->
<!-- /step/steps -->

"step" is the file, "steps" a table of tables() in benchmarks/step.py. Tables of several GPUs stand
side by side. build/bench/<gpu>.md has every table and chart of a GPU; docs/charts has the charts of
PAGE_GPUS.
"""

import contextlib
import importlib
import json
import pathlib
import re
import sys

import common
from tables import Column, Table, ratio, side_by_side

DOCS = common.ROOT / "docs"
BUILD = common.ROOT / "build" / "bench"
PAGES = (
    common.ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "several-gpus.md",
    DOCS / "your-model.md",
)
# Their charts are in docs/charts.
PAGE_GPUS = ("h100_80gb_hbm3", "h200")
PART = re.compile(
    r"(<!-- (?P<name>[^\s:]+)(?P<gpus>(?: \w+)*)(?:\s+\[(?P<heads>[^]]+)\])?"
    r": made by benchmarks/report\.py -->\n).*?(<!-- /(?P=name) -->)",
    re.DOTALL,
)


# ---- results ------------------------------------------------------------------------------------


def load(name: str, folder: str = "") -> dict | None:
    """The result <folder>/<name>.json; None where there is none.

    folder: of a GPU, or its name; "" for models.json, which is of several machines"""
    path = common.RESULTS / (common.folder_of(folder) if folder else "") / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def folders() -> list[str]:
    return sorted(path.name for path in common.RESULTS.iterdir() if path.is_dir())


def short(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3 -> H100; no GPU -> CPU."""
    name, *limit = gpu.removeprefix("NVIDIA ").split(", ")
    return "CPU" if gpu.startswith("none") else ", ".join([name.split(" ")[0], *limit])


def gpu_of(folder: str) -> str:
    """The short name of the GPU whose results a folder has."""
    path = next((common.RESULTS / folder).glob("*.json"))
    return short(json.loads(path.read_text())["gpu"])


def tables_of(result: dict) -> dict[str, Table]:
    return importlib.import_module(result["benchmark"]).tables(result["results"])


def conditions(result: dict) -> str:
    """When, with what and under which load a result was measured."""
    words = [short(result["gpu"]), result["date"], f"commit {result['commit']}"]
    words.append(f"torch {result['torch']}, NVRTC {result['nvrtc']}, driver {result['driver']}")
    power = result.get("power") or {}
    if power.get("W"):
        words.append(f"{power['W']:.0f} W, {power['SM_MHz']:,.0f} MHz")
    return ", ".join([*words, *filter(None, [result.get("size")])])


# ---- tables over all benchmarks -----------------------------------------------------------------


def ratio_rows(folder: str) -> list[dict]:
    """What, against what, and how many times as fast, on one GPU: the README's table."""
    rows = []

    def add(name, what, against, value):
        result = load(name, folder)
        # A file whose measurement was stopped has some parts.
        with contextlib.suppress(KeyError):
            if result and (measured := value(result["results"])):
                rows.append({"what": what, "against": against, "ratio": measured})

    replayed, launched = ("rows", "replayed"), ("launched", "launched")
    models = (load("transformers_step", folder) or {"results": {}})["results"]
    # Also the worst launched step.
    times = {m: r["launched"]["ours"]["times_torch"] for m, r in models.items() if "launched" in r}
    steps = [("Llama", replayed), ("Llama", launched)]
    if times:
        steps.append((min(times, key=lambda model: times[model]), launched))
    for model, (kind, words) in dict.fromkeys(steps):
        if model not in models:
            continue
        what = f"one step of transformers' {sized(model, models[model])}, {words}"
        add(
            "transformers_step",
            what,
            f"torch's fastest {words} step",
            lambda r: r[model][kind]["ours"]["times_torch"],
        )
        if (model, words) == ("Llama", "replayed"):
            add(
                "transformers_step",
                f"{what} (torch launched)",
                "torch's fastest launched step",
                # times_torch is the fastest peer's time over ours.
                lambda r: (
                    r["Llama"]["launched"]["ours"]["times_torch"]
                    * r["Llama"]["launched"]["ours"]["ms"]
                    / r["Llama"]["rows"]["ours"]["ms"]
                ),
            )
    for T in ("1024", "256"):
        add(
            "step",
            f"one step of `llama-350m`, T = {T}, replayed",
            "torch's fastest replayed step",
            lambda r: r[T]["rows"]["ours"]["times_torch"],
        )
    add(
        "step",
        "one step of `llama-350m`, T = 1024, deterministic",
        "torch's fastest step, not deterministic",
        lambda r: r["1024"]["rows"]["ours, deterministic"]["times_torch"],
    )
    add(
        "tail",
        "clip and AdamW, over an arena",
        "foreach clip, fused AdamW",
        lambda r: r["float32"]["replayed"]["ours"]["times_torch"],
    )
    add(
        "clip",
        "`ga.clip_grad_norm_`, norm over the threshold",
        "torch's, `foreach=True`",
        lambda r: r["float32"]["over"]["ga.clip_grad_norm_"]["replayed"]["times_torch"],
    )
    add(
        "encoder",
        "embedding gradient, 65,536 tokens (Zipf), 768 channels",
        "atomic `index_add_`",
        lambda r: r["backward"]["Zipf"]["variants"]["ours, segments in line"]["times_atomics"],
    )
    add(
        "encoder",
        "embedding gradient, 4,096 tokens, worst case",
        "atomic `index_add_`",
        lambda r: min(c["times_atomics"] for c in r["grid"] if c["tokens"] == 4096),
    )
    return rows


def sized(model: str, result: dict) -> str:
    """A model of transformers with the number of its parameters: Llama 250M."""
    return f"{model} {result['parameters'] / 1e6:.0f}M"


def ratios_table(*gpus: str) -> Table:
    """ratio_rows() of several GPUs."""
    rows: dict[str, dict] = {}
    # The GPU that has most rows says their order.
    for folder in sorted(gpus, key=lambda folder: -len(ratio_rows(folder))):
        for row in ratio_rows(folder):
            rows.setdefault(row["what"], dict(row))[folder] = row["ratio"]
    columns = [Column("what", "what"), Column("against", "against")]
    columns += [Column(gpu_of(folder), folder, ratio) for folder in gpus]
    return Table(columns, list(rows.values()))


# Tables of steps -> what they are of, in words.
STEPS = {
    "transformers_step/steps": "transformers' ",
    "step/steps": "`llama-350m`, ",
    "graphs/speed": "`llama-350m`, one micro-batch of ",
    "ddp_2gpus/replayed": "two GPUs, ",
    "ddp_2gpus/launched": "two GPUs, launched, ",
    "ddp_4gpus/replayed": "four GPUs, ",
    "cpu/cpu": "",
}


def slower_table(*gpus: str) -> Table:
    """The steps of ours that are slower than torch's."""
    rows: dict[str, dict] = {}
    for folder in gpus:
        for name, words in STEPS.items():
            file, _, table_name = name.partition("/")
            if (result := load(file, folder)) is None:
                continue
            table = tables_of(result)[table_name]
            # "4: against torch": of 4 micro-batches.
            counts = [re.fullmatch(r"(?:(\d): )?against .*torch", head) for head in table.head]
            for label, *cells in table.rows:
                for cell, count in zip(cells, counts[1:], strict=True):
                    is_ours = "ours" in label or file == "cpu"
                    if count and cell and is_ours and float(cell.removesuffix("x")) < 1:
                        what = words + label.replace("ours, ", "").replace(": ours", "")
                        if count[1]:
                            what += f", {count[1]} micro-batch{'es' * (count[1] != '1')}"
                        rows.setdefault(what, {"what": what})[folder] = cell
    columns = [Column("step", "what"), *(Column(gpu_of(folder), folder) for folder in gpus)]
    return Table(columns, list(rows.values()))


def models_table(*gpus: str) -> Table:
    """Steps of models of transformers, ours against torch's fastest, replayed and launched."""
    columns, rows = [Column("model", "model")], {}
    for folder in gpus:
        results = (load("transformers_step", folder) or {"results": {}})["results"]
        for kind, words in (("rows", "replayed"), ("launched", "launched")):
            columns.append(Column(f"{gpu_of(folder)}: {words}", folder + kind, ratio))
            for name, r in results.items():
                label = sized(name, r)
                row = rows.setdefault(label, {"model": label})
                row[folder + kind] = r.get(kind, {}).get("ours", {}).get("times_torch")
    return Table(columns, list(rows.values()))


def results_table(*gpus: str) -> Table:
    """How fresh the results are: commit and date, and what they were measured with."""
    groups: dict[tuple, list[str]] = {}
    for folder in gpus:
        for path in sorted((common.RESULTS / folder).glob("*.json")):
            r = json.loads(path.read_text())
            key = short(r["gpu"]), r["date"], r["commit"], r["torch"]
            groups.setdefault(key, []).append(path.stem)
    keys = ("GPU", "date", "commit", "torch")
    rows = [dict(zip(keys, key), results=", ".join(names)) for key, names in groups.items()]
    return Table([*(Column(key, key) for key in keys), Column("results", "results")], rows)


OVER_ALL = {
    "ratios": ratios_table,
    "slower": slower_table,
    "models_of_others": models_table,
    "results": results_table,
}


# ---- pages --------------------------------------------------------------------------------------


def part(name: str, gpus: list[str], heads: list[str] | None = None) -> str:
    """What belongs between two markers."""
    if name in OVER_ALL:
        return OVER_ALL[name](*gpus).markdown()
    file, _, table = name.partition("/")
    made = {}
    for folder in gpus or [""]:
        result = load(file, folder)
        if result is None:
            raise FileNotFoundError(f"{name}: no result {folder}/{file}.json")
        tables = tables_of(result)
        if table not in tables:
            raise KeyError(f"{name}: {file} has the tables {', '.join(tables)}")
        made[short(result["gpu"])] = tables[table].only(heads) if heads else tables[table]
    first, *others = made.values()
    return (side_by_side(made) if others else first).markdown()


def filled(text: str) -> str:
    """A page with its generated parts made anew."""

    def replace(match) -> str:
        heads = match["heads"] and re.split(r";\s+", match["heads"])
        return f"{match[1]}{part(match['name'], match['gpus'].split(), heads)}\n{match[5]}"

    return PART.sub(replace, text)


def everything(folder: str, charts: dict[str, str]) -> str:
    """A page with all tables of a GPU. charts: title -> path of the picture."""
    pieces = [f"# Benchmarks: {gpu_of(folder)}"]
    if (ratios := ratios_table(folder)).rows:
        pieces.append(ratios.markdown())
    pieces += [f"![{title}]({path})" for title, path in charts.items()]
    for path in sorted((common.RESULTS / folder).glob("*.json")):
        result = json.loads(path.read_text())
        pieces += [f"## {path.stem}", f"*{conditions(result)}.*"]
        for name, table in tables_of(result).items():
            pieces += [f"**{name}**", table.markdown()] if table.rows else []
    return "\n\n".join(filter(None, pieces)) + "\n"


def write_charts(target: pathlib.Path, gpus) -> dict[str, str]:
    """Title -> file name of each chart of these GPUs; {} without matplotlib."""
    try:
        import charts
    except ModuleNotFoundError as error:
        print(f"no charts: {error}; pip install -e '.[test]'")
        return {}
    target.mkdir(parents=True, exist_ok=True)
    return charts.write(target, gpus)


def main():
    changed = {
        path: text for path in PAGES if (text := filled(path.read_text())) != path.read_text()
    }
    if "--check" in sys.argv:
        names = ", ".join(sorted(path.name for path in changed))
        sys.exit(changed and f"{names} show other results: run python benchmarks/report.py" or None)
    for path, text in changed.items():
        path.write_text(text)
    write_charts(DOCS / "charts", PAGE_GPUS)
    BUILD.mkdir(parents=True, exist_ok=True)
    for folder in folders():
        drawn = write_charts(BUILD / folder, [folder])
        links = {title: f"{folder}/{name}" for title, name in drawn.items()}
        page = BUILD / f"{folder}.md"
        page.write_text(everything(folder, links))
        print(page.relative_to(common.ROOT))


if __name__ == "__main__":
    # charts.py imports this module by its name.
    sys.modules["report"] = sys.modules["__main__"]
    main()
