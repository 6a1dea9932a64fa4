"""`gpuaccel compare`: a page that compares runs from their files."""

import pathlib

from .arguments import add_command, path


def add_parser(commands):
    """Add `gpuaccel compare`."""
    parser = add_command(
        commands, "compare", run, "compare runs from their files, on a page for a browser"
    )
    add = parser.add_argument
    help = "a folder of `train`, or a .jsonl or .csv file"
    add("runs", type=path, nargs="+", metavar="run", help=help)
    add("--out", type=path, default="compare.html", metavar="FILE", help="the page (compare.html)")


def run(args) -> int:
    from ..learn import comparison

    compared = comparison.read_runs(args.runs)
    out = pathlib.Path(args.out)
    out.write_text(comparison.page(compared), encoding="utf-8")
    runs = [run for run, _ in compared]
    print(*runs, sep="\n")
    for run in runs[1:]:
        if run.tokens_per_s and runs[0].tokens_per_s:
            times = run.tokens_per_s / runs[0].tokens_per_s
            print(f"{run.name} runs at {times:.2f} times the speed of {runs[0].name}")
    print(f"written: {out}")
    return 0
