"""The model of distributed/plan.py with the times that benchmarks/ddp.py has recorded.

    known = planning.calibrated()         # None where nothing is recorded
    known.workload, known.machine         # of llama-350m, on the recorded GPUs
    known.rows                            # each recorded step, and what the model says
    planning.plan_table(known.workload, known.machine, gpus=64)
    planning.explore(gpus=64)             # a picture; in a notebook with sliders

Of each run the step on one GPU and the collectives alone are measured, and are inputs. Two numbers
are fitted to rows of the run on two GPUs (FITTED). All other rows are predicted.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..distributed.failures import (
    FAILURES_PER_GPU_DAY,
    RESTART_S,
    STORAGE_GBS,
    CheckpointPlan,
    checkpoints,
)
from ..distributed.plan import (
    BACKWARD,
    BUCKET_SIZES,
    PASS_SLOW,
    Link,
    Machine,
    Workload,
    best_bucket,
    fit,
    predict,
    slowest_of,
)
from ..errors import ArgumentError
from ..notebook import notebook_shell
from ..training.models import Preset, preset
from . import recorded
from .figures import plan_figure
from .figures.drawing import Figure, Ink, Table, plural
from .figures.sliders import display_below_sliders

MODEL = "llama-350m"
# Of a message from GPU to GPU inside a machine, in us: as NCCL's src/graph/tuning.cc has it for
# the ring with NVLink. Assumed.
HOP_US = 3.4
# Bytes. Results whose collectives were launched from Python say nothing of smaller ones.
LEAST_LAUNCHED = 16 << 20
# One network card of 400 Gb/s for each GPU. Latency and time between messages are assumed.
NETWORK = Link(GBs=50.0, latency_us=10.0, message_us=2.0)
PER_MACHINE = 8
# How sums are made -> arguments of predict(). On one machine, hierarchical ones are those of
# peer-to-peer copies alone.
SUMS: "dict[str, dict]" = {
    "fp32, hierarchical": {"hierarchical": True},
    "fp32, NCCL": {"hierarchical": False},
    "bf16, NCCL": {"hierarchical": False, "dtype": torch.bfloat16},
}
HIERARCHICAL = "hierarchical, 2 machines"
# A variant of benchmarks/ddp.py -> its name in SUMS.
VARIANTS = {
    "all-reduce": "fp32, hierarchical",
    "all-reduce by NCCL": "fp32, NCCL",
    "all-reduce in bf16": "bf16, NCCL",
    HIERARCHICAL: "fp32, hierarchical",
}
# Rows on two GPUs that the model has seen: (variant, micro-batches) -> fitted to it. The spread is
# fitted to what a step of four micro-batches takes longer than one of one.
FITTED = {
    ("all-reduce", 4): "spread",
    ("all-reduce by NCCL", 1): "nccl_slow",
}
NEEDED = (*FITTED, ("all-reduce", 1))
RUNS = (2, 4)
# A checkpoint has bf16 weights, fp32 masters and AdamW's two moments.
CHECKPOINT_BYTES = 14


@dataclass(frozen=True)
class Row:
    """A recorded step and what the model says.

    Attributes:
        gpus: of the run.
        variant: of benchmarks/ddp.py.
        micro_batches: of the step.
        measured_ms: the recorded time.
        predicted_ms: the model's.
        fitted: the parameter that was fitted to this row, or "".
    """

    gpus: int
    variant: str
    micro_batches: int
    measured_ms: float
    predicted_ms: float
    fitted: str

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measured time."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class Calibration:
    """What the recorded runs say of a GPU.

    Attributes:
        label: in words, where and when they were recorded.
        gpu: name of it.
        workload: llama-350m with four micro-batches.
        machine: with links and fitted parameters.
        between: the link of two GPUs that exchange by NCCL's all-to-all, as two machines do.
        link_run: number of GPUs of the run that the link is from.
        rows: all recorded rows that the model describes.
    """

    label: str
    gpu: str
    workload: Workload
    machine: Machine
    between: Link
    link_run: int
    rows: "tuple[Row, ...]"


@functools.cache
def meta_model(name: Preset) -> nn.Module:
    """A preset's model without memory."""
    with torch.device("meta"):
        return preset(name).build()


def calibrated(gpu: "str | None" = None, numbers: "tuple[int, ...]" = RUNS) -> "Calibration | None":
    """The model's inputs from the recorded runs of benchmarks/ddp.py on two and four GPUs.

    Args:
        gpu: the kind of GPU; None: as recorded.recorded() chooses.
        numbers: of GPUs, whose runs are used; 2 is among them.

    Returns:
        None where no run on two GPUs is recorded, or it lacks a row that is needed.
    """
    pair = recorded.recorded("ddp_2gpus", gpu)
    gpu = pair.content.get("gpu")
    runs = {n: pair if n == 2 else recorded.recorded(f"ddp_{n}gpus", gpu) for n in numbers}
    inputs = {n: _inputs(run, n) for n, run in runs.items()}
    if inputs[2] is None or any(_ms(pair, 2, *row) is None for row in NEEDED):
        return None
    workload, machine = inputs[2]
    rate = recorded.recorded("clip", gpu).get("float32", "copy_GB_per_s")
    machine = dataclasses.replace(machine, memory_GBs=rate or machine.memory_GBs)
    machine = _fitted(machine, workload, {row: _ms(pair, 2, *row) for row in NEEDED})
    rows: "list[Row]" = []
    for n, known in inputs.items():
        if known is not None:
            # The links of each run are measured; what is fitted is the first run's.
            links = {name: getattr(known[1], name) for name in ("gpus", "link", "network")}
            machine = dataclasses.replace(machine, start_us=known[1].start_us, **links)
            rows += _rows(runs[n], n, known[0], machine)
    largest, between = machine.gpus, machine.network
    machine = dataclasses.replace(machine, gpus=PER_MACHINE, network=NETWORK)
    return Calibration(pair.label, str(gpu), workload, machine, between, largest, tuple(rows))


def predicted_rows(known: Calibration, gpus: int) -> "dict[str, dict[str, float]]":
    """What the model says of a run of benchmarks/ddp.py, before it is made.

    Args:
        known: of runs with fewer GPUs.
        gpus: of one machine.

    Returns:
        Variant -> micro-batches -> ms of a step.
    """
    machine = dataclasses.replace(known.machine, gpus=gpus, network=known.between)
    return {
        variant: {
            str(count): _step_ms(known.workload, machine, gpus, variant, count) for count in (4, 1)
        }
        for variant in VARIANTS
    }


def _rows(run, gpus, workload, machine) -> "list[Row]":
    """The recorded steps of a run, and what the model says of each."""
    rows = []
    for variant in VARIANTS:
        for count in (4, 1):
            measured = _ms(run, gpus, variant, count)
            if measured is not None:
                predicted = _step_ms(workload, machine, gpus, variant, count)
                fitted = FITTED.get((variant, count), "") if gpus == 2 else ""
                rows.append(Row(gpus, variant, count, measured, predicted, fitted))
    return rows


def _fitted(machine, workload, measured) -> Machine:
    """The machine with the parameters of FITTED. measured: row of NEEDED -> its ms on two GPUs."""
    more_ms = 3 * workload.micro_ms
    longer = measured["all-reduce", 4] - measured["all-reduce", 1] - more_ms
    machine = dataclasses.replace(machine, spread=max(0.0, longer / more_ms / slowest_of(2)))
    row = "all-reduce by NCCL", 1

    def predicted(nccl_slow):
        return _step_ms(workload, dataclasses.replace(machine, nccl_slow=nccl_slow), 2, *row)

    return dataclasses.replace(machine, nccl_slow=fit(predicted, measured[row]))


def _ms(run, gpus, variant, micro_batches) -> "float | None":
    return run.get(str(gpus), "groups", "ours, replayed", str(micro_batches), variant, "ms")


def _inputs(run, gpus) -> "tuple[Workload, Machine] | None":
    """The step on one GPU and the links of a run."""
    short, long = (_ms(run, gpus, "one GPU", count) for count in (1, 4))
    points, pairs = (_collectives(run, gpus, name) for name in ("all_reduce", "all_to_all"))
    if not pairs:
        # Newer results, which have these, are of CUDA graphs.
        points = [(size, ms) for size, ms in points if size >= LEAST_LAUNCHED]
    if short is None or long is None or len(points) < 2:
        return None
    micro = (long - short) / 3
    workload = Workload.of(meta_model(MODEL), MODEL, micro, short - micro, 4)
    # A hop's latency is in what a collective costs beside its bytes.
    fixed, slope = line(points)
    link = Link(2 * (gpus - 1) / gpus / slope / 1e6, HOP_US)
    start = max(0.0, 1e3 * fixed - 2 * (gpus - 1) * HOP_US)
    network = link
    if pairs:
        # Half of the bytes stay where they are.
        fixed, slope = line(pairs)
        network = Link(1 / 2 / slope / 1e6, max(0.0, 1e3 * fixed - start))
    return workload, Machine(gpus=gpus, link=link, network=network, start_us=start)


def _collectives(run, gpus, operation) -> "list[tuple[float, float]]":
    """(bytes, ms) of a collective alone."""
    sizes = run.get(str(gpus), "bandwidth") or {}
    return [(m["bytes"], m[operation]["ms"]) for m in sizes.values() if operation in m]


def line(points: "list[tuple[float, float]]") -> "tuple[float, float]":
    """The line y = a + b x whose relative errors have the least sum of squares: (a, b).

    Args:
        points: (x, y), y above 0, two or more different x.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    over = sum(w * (px - x) * (py - y) for w, (px, py) in zip(weights, points))
    slope = over / sum(w * (px - x) ** 2 for w, (px, _) in zip(weights, points))
    return y - slope * x, slope


def _step_ms(workload, machine, gpus, variant, micro_batches) -> float:
    workload = dataclasses.replace(workload, micro_batches=micro_batches)
    return predict(
        workload, placed(machine, gpus, variant), gpus, **SUMS[VARIANTS[variant]]
    ).step_ms


def placed(machine: Machine, gpus: int, variant: str) -> Machine:
    """The machine as a variant of benchmarks/ddp.py takes it.

    Args:
        machine: with all GPUs of the run; its network is what connects two of them.
        gpus: of the run.
        variant: its name.
    """
    if variant != HIERARCHICAL:
        return machine
    # Half of the GPUs count as another machine.
    return dataclasses.replace(machine, gpus=gpus // 2)


# ---- what is asked ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What a prediction is made from.

    Attributes:
        workload: the model and its step on one GPU.
        machine: the links.
        sources: (measured, fitted, entered or assumed, which numbers) in words.
    """

    workload: Workload
    machine: Machine
    sources: "tuple[tuple[str, str], ...]"


def inputs(
    model: str = MODEL,
    per_machine: int = PER_MACHINE,
    micro_batches: int = 4,
    step_ms: "float | None" = None,
    link_GBs: "float | None" = None,
    network_GBs: "float | None" = None,
) -> Inputs:
    """The inputs of a prediction: recorded ones, and in their place those that are entered.

    Args:
        model: a preset.
        per_machine: GPUs of a machine.
        micro_batches: of a step.
        step_ms: of one GPU that trains alone; None: as recorded.
        link_GBs: between the GPUs of a machine; None: as recorded.
        network_GBs: of each GPU to other machines; None: NETWORK.

    Raises:
        ArgumentError: for what is neither recorded nor entered, and for values that cannot be.
    """
    if micro_batches < 1:
        raise ArgumentError(f"micro_batches is {micro_batches}; expected 1 or more")
    module, known = meta_model(model), calibrated()
    machine = known.machine if known else Machine(link=Link(latency_us=HOP_US))
    measured, entered = [], []
    if step_ms is not None:
        micro_ms = step_ms / micro_batches
        workload = Workload.of(module, model, micro_ms, micro_batches=micro_batches)
        entered.append(f"the step on one GPU, {step_ms:g} ms, as {micro_batches} micro-batches")
    elif known and model == MODEL:
        workload = dataclasses.replace(known.workload, micro_batches=micro_batches)
        measured.append(
            f"the step on one GPU, {workload.micro_ms:.1f} ms for each micro-batch and "
            f"{workload.tail_ms:.1f} ms for the rest"
        )
    else:
        where = f"only {MODEL} has a recorded step" if known else recorded.ABSENT
        raise ArgumentError(
            f"the time of a step of {model} on one GPU is not known ({where}); expected step_ms "
            "(--step-ms): the milliseconds that ga.TrainStep takes on one GPU"
        )
    if link_GBs is not None:
        entered.append(f"the link between the GPUs of a machine, {link_GBs:g} GB/s")
        if known:
            measured.append(f"{machine.start_us:.0f} us for each collective")
        machine = dataclasses.replace(machine, link=dataclasses.replace(machine.link, GBs=link_GBs))
    elif known:
        measured.append(
            f"the link, {machine.link.GBs:.0f} GB/s and {machine.start_us:.0f} us for each "
            f"collective (NCCL on {known.link_run} GPUs)"
        )
    else:
        raise ArgumentError(
            f"the link between the GPUs of a machine is not known ({recorded.ABSENT}); expected "
            "link_GBs (--link-GBs): gigabytes per second"
        )
    if known:
        measured.append(f"a pass over GPU memory, {machine.memory_GBs:.0f} GB/s")
    network = NETWORK
    assumed = [
        f"latencies of {network.latency_us:g} us between machines and {HOP_US:g} us inside, "
        f"{network.message_us:g} us between messages to different machines"
    ]
    if network_GBs is None:
        assumed.insert(0, f"the network of each GPU, {network.GBs:g} GB/s")
    else:
        network = dataclasses.replace(network, GBs=network_GBs)
        entered.append(f"the network of each GPU, {network_GBs:g} GB/s")
    machine = dataclasses.replace(machine, gpus=per_machine, network=network)
    fitted = (
        f"backward is slowed by {machine.nccl_slow:.0%} while NCCL runs, the ranks' times have a "
        f"standard deviation of {machine.spread:.1%}"
    )
    if known is None:
        assumed.append("sending slows nothing, ranks are equally fast, memory costs nothing")
    assumed.append(
        f"backward has {1 / (1 + PASS_SLOW):.0%} of its speed beside a pass over GPU memory; "
        f"{1e3 * FAILURES_PER_GPU_DAY:.2f} failures of 1,000 GPUs in a day, {RESTART_S / 60:g} "
        f"minutes for a restart, checkpoints written at {STORAGE_GBS:g} GB/s by all ranks together"
    )
    sources = []
    if measured and known:
        sources.append(("measured", f"{'; '.join(measured)}. {known.label}"))
    if known:
        sources.append(("fitted to rows on two GPUs", fitted))
    if entered:
        sources.append(("entered", "; ".join(entered)))
    sources.append(("assumed", "; ".join(assumed)))
    return Inputs(workload, machine, tuple(sources))


def checkpoint_plan(workload: Workload, gpus: int) -> CheckpointPlan:
    """Failures and checkpoints of a workload, with the assumed rates."""
    return checkpoints(gpus, CHECKPOINT_BYTES * workload.numel)


def plan_table(workload: Workload, machine: Machine, gpus: int) -> Table:
    """A row for each way to make the sums.

    Args:
        workload: the model and its step on one GPU.
        machine: the links.
        gpus: of all machines.
    """
    columns = ("sums", "step", "rate", "slowed", "exposed", "waiting", "best bucket")
    rows = []
    for name, options in SUMS.items():
        if gpus <= machine.gpus:
            name = name.replace("hierarchical", "peer-to-peer")
        p = predict(workload, machine, gpus, **options)
        size, best = best_bucket(workload, machine, gpus, **options)
        numbers = (f"{ms:.1f} ms" for ms in (p.slowed_ms, p.exposed_ms, p.waiting_ms))
        bucket = f"{size} MB: {best.step_ms:.1f} ms"
        rows.append((name, f"{p.step_ms:.1f} ms", f"{p.rate:.1%}", *numbers, bucket))
    return Table(columns, rows)


# ---- with sliders -------------------------------------------------------------------------------

# For sliders: GPUs, of a machine, MB, and GB/s of each GPU's network.
GPUS = (*(2**k for k in range(14)), 10_000)
MACHINES = (1, 2, 4, 8)
NETWORKS = (1.0, 3.0, 6.0, 12.5, 25.0, 50.0, 100.0)
CHOICES: "dict[str, tuple]" = {
    "gpus": GPUS,
    "per_machine": MACHINES,
    "bucket_mb": BUCKET_SIZES,
    "network_GBs": NETWORKS,
}
WORDS = {
    "gpus": "GPUs",
    "per_machine": "of each machine",
    "bucket_mb": "bucket, MB",
    "network_GBs": "network, GB/s",
}


class explore:
    """A predicted step of llama-350m, over the number of GPUs; in a notebook with sliders.

    The picture stays in the saved notebook. Where nothing is recorded it is a sentence.

    Args:
        gpus: whose last backward is drawn: a power of two up to 8,192, or 10,000.
        per_machine: 1, 2, 4 or 8 GPUs.
        bucket_mb: smallest size of a bucket: a power of two from 1 to 256.
        network_GBs: of each GPU to other machines; one of NETWORKS.
        micro_batches: of a step.

    Raises:
        ArgumentError: for a value that its slider has not.
    """

    def __init__(
        self,
        gpus: int = 64,
        per_machine: int = PER_MACHINE,
        bucket_mb: int = 32,
        network_GBs: float = NETWORK.GBs,
        micro_batches: int = 1,
    ):
        self.values: "dict[str, Any]" = {
            "gpus": gpus,
            "per_machine": per_machine,
            "bucket_mb": bucket_mb,
            "network_GBs": network_GBs,
        }
        self.micro_batches = micro_batches
        for name, choices in CHOICES.items():
            if self.values[name] not in choices:
                raise ArgumentError(f"{name} is {self.values[name]}; expected one of {choices}")
        self.known = calibrated()

    def picture(self) -> Figure:
        """With the present values."""
        if self.known is None:
            words = f"the times of a step: {recorded.ABSENT}"
            ink = Ink()
            ink.text(0, 16, words)
            return Figure(ink, 24, words)
        v = self.values
        workload = dataclasses.replace(self.known.workload, micro_batches=self.micro_batches)
        network = dataclasses.replace(NETWORK, GBs=v["network_GBs"])
        machine = dataclasses.replace(self.known.machine, gpus=v["per_machine"], network=network)
        rates = {}
        for name, options in SUMS.items():
            points = [
                predict(workload, machine, n, bucket_mb=v["bucket_mb"], **options) for n in GPUS
            ]
            rates[name] = [(p.gpus, p.rate) for p in points]
        p = predict(workload, machine, v["gpus"], bucket_mb=v["bucket_mb"])
        title = (
            f"Predicted: {workload.name} on {plural(p.gpus, 'GPU')}, "
            f"{p.step_ms:.1f} ms for each step, {p.rate:.0%} of one GPU's throughput"
        )
        backward_ms = BACKWARD * workload.micro_ms
        return plan_figure.plan(title, rates, p.gpus, p, backward_ms, workload.tail_ms)

    def __repr__(self):
        return repr(self.picture())

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture()._repr_mimebundle_()

    def _ipython_display_(self):
        sliders = self._sliders() if notebook_shell() is not None else None
        self._handle = display_below_sliders(
            self, sliders, "Run this cell to choose GPUs, buckets and the network with sliders."
        )

    def _sliders(self):
        """A box of sliders; None without ipywidgets or without a recorded run."""
        try:
            import ipywidgets as W
        except ImportError:
            return None
        if self.known is None:
            return None
        sliders = {
            name: W.SelectionSlider(
                options=[(f"{value:,g}", value) for value in choices],
                value=self.values[name],
                description=WORDS[name],
                continuous_update=False,
                layout=W.Layout(width="380px"),
                style={"description_width": "130px"},
            )
            for name, choices in CHOICES.items()
        }

        def redraw(_):
            self.values = {name: slider.value for name, slider in sliders.items()}
            self._handle.update(self._repr_mimebundle_(), raw=True)

        for slider in sliders.values():
            slider.observe(redraw, "value")
        return W.HBox(list(sliders.values()), layout=W.Layout(flex_flow="row wrap"))
