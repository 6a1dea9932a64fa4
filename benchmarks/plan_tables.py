"""The generated parts of docs/planning.md, which report.py writes."""

import dataclasses
import json
import textwrap

from predict import PREDICTIONS
from report import load, newest_first, short

from gpuaccel.distributed.plan import BUCKET_SIZES, predict, slowest_of
from gpuaccel.learn import planning


def markdown(head, rows) -> str:
    """A table; cells are strings."""
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


PLANNED = (8, 64, 1024, 10_000)


def plan_inputs() -> str:
    """What the model of planning.md is given."""
    known = planning.inputs()
    lines = [
        paragraph(f"* **{kind}**: {words}.").replace("\n", "\n  ") for kind, words in known.sources
    ]
    return "\n".join(lines)


def plan_spread() -> str:
    """How much of the fitted spread is seen where ranks do not communicate."""
    known = planning.calibrated()
    steps = load("ddp_2gpus", known.gpu)["results"]["2"]["groups"]["ours, replayed"]["4"]
    behind = steps["each for itself"]["ms"] / steps["one GPU"]["ms"] - 1
    expected = slowest_of(2) * known.machine.spread
    clocks = []
    for n in planning.RUNS:
        if run := load(f"ddp_{n}gpus", known.gpu):
            rows = run["results"][str(n)]["groups"]["ours, replayed"]["4"]
            alone, together = (rows[k].get("SM_MHz") for k in ("each for itself", "all-reduce"))
            if alone and together:
                clocks.append(f"{1 - together / alone:.1%} lower on {n} GPUs")
    explained = "The rest is unexplained."
    if clocks:
        explained = (
            "A part of the rest is the clock. These GPUs run at their power limit, and in steps "
            f"that communicate their clock is {' and '.join(clocks)} than in steps that do not "
            "(4 micro-batches)."
        )
    return paragraph(
        "**This is the weakest part of the model.** `spread` is a standard deviation: with",
        f"{known.machine.spread:.1%} two ranks wait {expected:.1%} of a step. Two GPUs that train",
        f"independently, side by side, take {behind:.1%} longer than one that trains alone. So",
        f"only {behind:.1%} is seen to be waiting.",
        explained,
    )


def plan_errors() -> str:
    """Each recorded row of several GPUs and what the model says, for each kind of GPU."""
    return section(*(errors_of(planning.calibrated(gpu)) for gpu in newest_first("ddp_2gpus")))


def plan_foretold() -> str:
    """What predict.py has written before a run on more GPUs, beside what was measured then."""
    parts = []
    for path in sorted(PREDICTIONS.glob("*.json")):
        foretold = json.loads(path.read_text())
        measured = load("ddp_4gpus", foretold["gpu"])
        steps = measured["results"]["4"]["groups"]["ours, replayed"] if measured else {}
        rows, errors = [], []
        for variant, counts in foretold["ms"].items():
            for count, ms in counts.items():
                found = steps.get(count, {}).get(variant)
                if found:
                    errors.append(ms / found["ms"] - 1)
                name = f"{variant}, {count} micro-batch{'es' * (count != '1')}"
                then = (f"{found['ms']:.2f} ms", f"{errors[-1]:+.2%}") if found else ("failed", "")
                rows.append((name, f"{ms:.2f} ms", *then) if measured else (name, f"{ms:.2f} ms"))
        head = ("4 GPUs", "predicted", "measured", "off by")
        parts += [
            paragraph(
                f"{short(foretold['gpu'])}, written on {foretold['written']} from the run on two",
                "GPUs, before the four GPUs ran:" if measured else "GPUs:",
            ),
            markdown(head if measured else head[:2], rows),
            paragraph(
                f"{len(rows)} steps were predicted and {len(errors)} measured. Of these,",
                f"{beyond_two_percent(errors)}.",
            )
            if measured
            else "The benchmark has not measured four GPUs of this kind.",
        ]
    return section(*parts)


def errors_of(known) -> str:
    """plan_errors() of one kind of GPU."""
    rows = [
        (
            f"{row.gpus} GPUs, {row.variant}, {row.micro_batches} micro-batch"
            + ("es" if row.micro_batches > 1 else ""),
            f"{row.measured_ms:.2f} ms",
            f"{row.predicted_ms:.2f} ms",
            off_by(row),
        )
        for row in known.rows
    ]
    errors = [abs(row.error) for row in known.rows if not row.fitted]
    return section(
        f"**{short(known.gpu)}**",
        markdown(("step", "measured", "model", "off by"), rows),
        paragraph(
            f"Of the {len(errors)} rows that are not fitted, {beyond_two_percent(errors)}; the",
            f"largest error is {max(errors):.2%}. *{known.label}.*",
        ),
    )


def off_by(row) -> str:
    """How far the model is from a row, and what was fitted to it."""
    if not row.fitted:
        return f"{row.error:+.2%}"
    rest = f"{row.error:+.2%}, " if abs(row.error) >= 5e-5 else ""
    return f"{rest}fitted: `{row.fitted}`"


def beyond_two_percent(errors) -> str:
    """How many errors are above 2%, in words."""
    count = sum(abs(error) > 0.02 for error in errors)
    return f"{count or 'none'} {'is' if count == 1 else 'are'} off by more than 2%"


def plan_scales() -> str:
    """Predicted scaling efficiency on many GPUs, and what a step consists of."""
    known = planning.inputs()
    parts = []
    for count in (1, 4):
        workload = dataclasses.replace(known.workload, micro_batches=count)
        rows = [
            (name, *(f"{predict(workload, known.machine, n, **options).rate:.0%}" for n in PLANNED))
            for name, options in planning.SUMS.items()
        ]
        title = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        parts.append(markdown((f"efficiency, {title}", *(f"{n:,} GPUs" for n in PLANNED)), rows))
    workload = dataclasses.replace(known.workload, micro_batches=1)
    head = ("GPUs", "step of one GPU", "+ slowed", "+ exposed", "+ waiting", "= step")
    for name in ("fp32, NCCL", "fp32, hierarchical"):
        rows = []
        for n in PLANNED:
            p = predict(workload, known.machine, n, **planning.SUMS[name])
            parts_ms = (workload.step_ms, p.slowed_ms, p.exposed_ms, p.waiting_ms, p.step_ms)
            rows.append((f"{n:,}", *(f"{ms:.1f} ms" for ms in parts_ms)))
        parts.append(f"What a step of one micro-batch consists of, {name}:")
        parts.append(markdown(head, rows))
    return section(*parts)


def plan_buckets() -> str:
    """Predicted steps of one micro-batch with buckets of 1 to 256 MB; equal ones share a row."""
    known = planning.inputs(micro_batches=1)
    sizes: "dict[int, list[int]]" = {}
    for size in BUCKET_SIZES:
        sizes.setdefault(len(known.workload.buckets(size)), []).append(size)
    rows = []
    for count, same in sizes.items():
        steps = [
            predict(known.workload, known.machine, gpus, bucket_mb=same[0], **options).step_ms
            for options in planning.SUMS.values()
            for gpus in (64, 1024)
        ]
        span = f"{same[0]} MB" if len(same) == 1 else f"{same[0]} to {same[-1]} MB"
        rows.append((span, str(count), *(f"{ms:.1f} ms" for ms in steps)))
    head = [f"{name}, {gpus:,}" for name in planning.SUMS for gpus in (64, 1024)]
    return markdown(("bucket_mb", "buckets", *head), rows)


def plan_failures() -> str:
    """Failures and checkpoints of many GPUs."""
    workload = planning.inputs().workload
    rows = []
    for gpus in PLANNED:
        c = planning.checkpoint_plan(workload, gpus)
        every = f"{c.interval_s / 60:.0f} minutes"
        rows.append((f"{gpus:,}", f"{c.failures_per_day:.3g}", every, f"{c.lost:.2%}"))
    return markdown(("GPUs", "failures in a day", "a checkpoint every", "time lost"), rows)


PARTS = {
    "plan-inputs": plan_inputs,
    "plan-spread": plan_spread,
    "plan-foretold": plan_foretold,
    "plan-errors": plan_errors,
    "plan-scales": plan_scales,
    "plan-buckets": plan_buckets,
    "plan-failures": plan_failures,
}
