"""Runs from their files, on a page of their own: what the live meter shows of runs of a notebook.

runs = read_runs(["runs/a", "runs/b", "c.csv"])
pathlib.Path("compare.html").write_text(page(runs))
"""

import json
import pathlib
from collections import Counter
from html import escape

from ..errors import DataError
from ..measure import Reading
from ..training import METRICS_FILE, read_csv, read_json_lines
from .figures.drawing import RUN_COLOURS, number
from .figures.training_runs import Run, picture

EXPECTED = "expected a folder of `gpuaccel train`, or a .jsonl or .csv file of ga.train(log=...)"
READERS = {".jsonl": read_json_lines, ".csv": read_csv}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
"""


def read_runs(paths) -> "list[tuple[Run, dict]]":
    """(run, its options) of each path: a folder of `gpuaccel train`, or a file of train(log=...).

    options: what run.json says; {} for a file. Raises DataError for what is no run."""
    paths = [pathlib.Path(path) for path in paths]
    compared = []
    for i, (path, name) in enumerate(zip(paths, _names(paths))):
        run = Run(name, RUN_COLOURS[i % len(RUN_COLOURS)])
        for reading in _readings(_rows(path)):
            run.add(reading)
        if run.last is None:
            raise DataError(f"{path} holds no step of a run; {EXPECTED}")
        run.state = "done"
        compared.append((run, _options(path)))
    return compared


def _names(paths) -> "list[str]":
    """The last part of each path, or the whole of it where others end in the same."""
    names = [path.stem if path.suffix in READERS else path.resolve().name for path in paths]
    counts = Counter(names)
    return [name if counts[name] == 1 else str(path) for name, path in zip(names, paths)]


def _rows(path) -> "list[dict]":
    if not path.exists():
        raise DataError(f"{path} does not exist; {EXPECTED}")
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.exists():
        raise DataError(f"{path} holds no {METRICS_FILE}; {EXPECTED}")
    if file.suffix not in READERS:
        raise DataError(f"{path} has another ending; {EXPECTED}")
    try:
        return READERS[file.suffix](file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _options(path) -> dict:
    """What decides a run's numbers, as run.json beside its metrics says."""
    try:
        options = json.loads((path / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(options, dict):
        return {}
    return {name: value for name, value in options.items() if name not in ("config", "bpe")}


def _readings(rows):
    """The rows as the meter's readings. A resumed run's clock goes on."""
    earlier = previous = 0.0
    for row in rows:
        seconds = row.get("seconds") or 0.0
        if seconds < previous:
            earlier += previous
        previous = seconds
        norm, clipped = row.get("norm"), row.get("clipped_norm")
        yield Reading(
            step=row["step"],
            tokens=int(row.get("tokens") or 0),
            seconds=earlier + seconds,
            tokens_per_s=row.get("tokens_per_s") or 0.0,
            step_ms=row.get("step_ms") or 0.0,
            loss=row.get("loss"),
            loss_step=row["step"],
            val_loss=row.get("val_loss"),
            norms=() if norm is None else ((0, norm, clipped),),
            stages=row.get("stages") or {},
        )


def page(compared) -> str:
    """What read_runs() returned as one HTML page, light or dark as the browser prefers."""
    runs = [run for run, _ in compared]
    title = " · ".join(run.name for run in runs)
    drawn = picture(runs, norms=any(run.norms for run in runs))
    rows = "".join(
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>\n"
        for tag, row in zip(["th"] + ["td"] * len(compared), _table(compared))
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"<h1>{escape(title)}</h1>\n<div>{drawn}</div>\n<div><table>\n{rows}</table></div>\n"
    )


def _table(compared) -> "list[list[str]]":
    """The header, and a row for each run; the options are those that differ."""
    first = compared[0][0]
    names = dict.fromkeys(name for _, options in compared for name in options)
    differ = [name for name in names if len({str(o.get(name)) for _, o in compared if o}) > 1]
    head = ["run", "tokens per second", f"× {first.name}", "loss", "held-out loss"]
    table = [[*head, "steps", "seconds", *differ]]
    for run, options in compared:
        rate = run.tokens_per_s
        speed = f"{rate / first.tokens_per_s:.2f}" if rate and first.tokens_per_s else ""
        losses = ["" if loss is None else f"{loss:.3f}" for loss in (run.loss, run.val_loss)]
        more = [str(options.get(name, "")) for name in differ]
        steps, seconds = str(run.last.step), f"{run.last.seconds:.1f}"
        table.append([run.name, number(rate), speed, *losses, steps, seconds, *more])
    return table
