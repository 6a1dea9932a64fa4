"""The model of a step on N GPUs: closed forms, recorded steps, and the
numbers of docs/planning.md."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import math
import pathlib
import random
import re
import statistics

import pytest
import torch

import gpuaccel as ga
from gpuaccel.distributed.buckets import join_blocks
from gpuaccel.distributed.plan import (
    Link,
    Machine,
    Stage,
    Workload,
    all_reduce_ms,
    overlap,
    predict,
    slowest_of,
)
from gpuaccel.errors import ArgumentError
from gpuaccel.optim.layout import Block


def workload(sizes=(4_000_000,), micro_ms=30.0, tail_ms=5.0, micro_batches=1, work=None):
    """Blocks of so many elements, each with an equal share of backward."""
    ends = [0, *itertools.accumulate(sizes)]
    blocks = [Block(f"b{i}", ends[i], ends[i + 1], i, i + 1) for i in range(len(sizes))]
    work = work or [1 / len(sizes)] * len(sizes)
    return Workload(tuple(blocks), tuple(work), micro_ms, tail_ms, micro_batches)


@functools.cache
def meta(name, **changes):
    with torch.device("meta"):
        return ga.preset(name, **changes).build()


# ---- the simulation -----------------------------------------------------------------------------


LINK, NETWORK = Stage("link", 5.0), Stage("network", 5.0)
BACK_AND_FORTH = [Stage("link", 1.0), Stage("network", 4.0), Stage("link", 1.0)]


@pytest.mark.parametrize(
    "work, stages, sent",
    [
        # A lane serves one bucket at a time.
        ([1.0] * 3, [[LINK]] * 3, [(1.0, 6.0), (2.0, 11.0), (3.0, 16.0)]),
        # Two lanes are a pipeline: a bucket leaves every 5 ms.
        ([1.0] * 3, [[LINK, NETWORK]] * 3, [(1.0, 11.0), (2.0, 16.0), (3.0, 21.0)]),
        # A lane that is used twice takes first what comes first.
        ([1.0] * 2, [BACK_AND_FORTH] * 2, [(1.0, 7.0), (2.0, 11.0)]),
        # 2 of the 6 ms of backward are done at double time: 4 ms beside the stage.
        ([1.0, 6.0], [[Stage("link", 4.0, 1.0)], []], [(1.0, 5.0), (9.0, 9.0)]),
        ([1.0, 6.0], [[Stage("memory", 4.0, 3.0)], []], [(1.0, 5.0), (10.0, 10.0)]),
        # Two stages at once add up.
        (
            [1.0, 0.0, 3.0],
            [[Stage("a", 3.0, 1.0)], [Stage("b", 2.0, 1.0)], []],
            [(1.0, 4.0), (1.0, 3.0), (1 + 2 + 1 + 11 / 6,) * 2],
        ),
        ([0.0, 0.0], [[], []], [(0.0, 0.0), (0.0, 0.0)]),
    ],
)
def test_what_is_sent_beside_backward(work, stages, sent):
    assert [*map(pytest.approx, sent)] == overlap(work, stages)


# ---- a step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_copies_by_hand(gpus):
    """One bucket, complete at the end of backward: its other parts in, an addition that reads all
    and writes one, the other parts out; the totals behind."""
    machine = Machine(gpus=8, link=Link(GBs=100), memory_GBs=1000)
    p = predict(workload((40_960_000,)), machine, gpus, bucket_mb=1)
    part = 4 * 40_960_000 / gpus / 1e6
    totals = all_reduce_ms(8 * 10_000, machine, gpus)
    copied = 2 * (gpus - 1) * part / 100
    assert p.exposed_ms == pytest.approx(copied + (gpus + 1) * part / 1000 + totals)
    assert p.slowed_ms == 0 and p.step_ms == pytest.approx(35 + p.exposed_ms)


def test_ring_and_tree_by_hand():
    network = Link(GBs=10, latency_us=100)
    machine = Machine(gpus=8, link=Link(GBs=1000, latency_us=1), network=network, start_us=50)
    ring = 50e-3 + 2 * 15 / 16 * 80e6 / (8 * 10e6) + (30 - 2) * 1e-3 + 2 * 0.1
    assert all_reduce_ms(80e6, machine, 16) == pytest.approx(ring)
    tree = 50e-3 + 2 * 80e6 / (8 * 10e6) + 14e-3 + 2 * math.log2(128) * 0.1
    assert all_reduce_ms(80e6, machine, 1024) == pytest.approx(tree)
    # A machine with one GPU has no link to use.
    alone = dataclasses.replace(machine, gpus=1)
    assert all_reduce_ms(80e6, alone, 2) == pytest.approx(50e-3 + 8 + 0.2)


def test_bf16_sends_half_and_pays_for_rounding():
    machine = Machine(link=Link(GBs=100))
    sizes = (40_960_000,)
    fp32 = predict(workload(sizes), machine, 8, False)
    bf16 = predict(workload(sizes), machine, 8, False, torch.bfloat16)
    assert bf16.exposed_ms == pytest.approx(fp32.exposed_ms / 2, rel=1e-4)
    slow_memory = dataclasses.replace(machine, memory_GBs=1000)
    more = [
        predict(workload(sizes), slow_memory, 8, False, dtype).exposed_ms - p.exposed_ms
        for dtype, p in ((torch.float32, fp32), (torch.bfloat16, bf16))
    ]
    # Read once for the search and once for the norm; rounding and restoring: 6 bytes each.
    assert more == pytest.approx([8 * 0.04096, 20 * 0.04096])


def test_the_slowest_of_many_is_the_mean_of_the_largest_normal_number():
    assert slowest_of(1) == pytest.approx(0, abs=1e-9)
    assert slowest_of(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-5)
    assert slowest_of(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-5)
    generator = random.Random(0)
    largest = [max(generator.gauss(0, 1) for _ in range(64)) for _ in range(4000)]
    assert slowest_of(64) == pytest.approx(statistics.mean(largest), abs=0.03)
    p = predict(workload(micro_batches=4), Machine(spread=0.02), 2)
    assert p.waiting_ms == pytest.approx(2.5 * slowest_of(2)) and p.step_ms == 125 + p.waiting_ms


# ---- the workload -------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mb", [0.1, 1, 1e6])
def test_buckets_are_those_of_the_arena(bucket_mb):
    arena = ga.Arena(ga.preset("tiny", layers=2).build())
    real = [b.stop - b.start for b in join_blocks(arena.blocks, bucket_mb * 1e6)]
    sizes, times = zip(*Workload.of(meta("tiny", layers=2), 3.0).buckets(bucket_mb))
    assert list(sizes) == real and sum(sizes) == arena.numel
    assert sum(times) == pytest.approx(2.0)
    arena.release()


def test_what_cannot_be_is_refused():
    for wrong in (
        lambda: Link(GBs=0),
        lambda: Link(latency_us=-1),
        lambda: Machine(gpus=0),
        lambda: Machine(nccl_slow=-0.1),
        lambda: Machine(memory_GBs=0),
        lambda: workload(micro_ms=0),
        lambda: workload(micro_batches=0),
        lambda: predict(workload(), Machine(), 0),
        lambda: predict(workload(), Machine(), 12),
        lambda: predict(workload(), Machine(), 8, False, torch.float16),
    ):
        with pytest.raises(ArgumentError, match="expected"):
            wrong()


# ---- recorded steps -----------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planning.md"
FOLDERS = {"H200": "h200", "H100": "h100_80gb_hbm3"}
# A variant of benchmarks/ddp.py -> arguments of predict().
VARIANTS = {
    "all-reduce": {},
    "all-reduce by NCCL": {"peer_to_peer": False},
    "all-reduce in bf16": {"peer_to_peer": False, "dtype": torch.bfloat16},
}


spec = importlib.util.spec_from_file_location("calibration", ROOT / "benchmarks" / "calibration.py")
calibration = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calibration)


def recorded(gpu, benchmark):
    path = ROOT / "benchmarks" / "results" / FOLDERS[gpu] / f"{benchmark}.json"
    return json.loads(path.read_text())["results"]


@functools.cache
def known(gpu):
    """(workload, machine) of the run on two GPUs."""
    memory_GBs = recorded(gpu, "clip")["float32"]["copy_GB_per_s"]
    return calibration.calibrated(meta("llama-350m"), recorded(gpu, "ddp_2gpus")["2"], memory_GBs)


def step_ms(known, gpus, variant, micro_batches):
    workload, machine = known
    workload = dataclasses.replace(workload, micro_batches=int(micro_batches))
    machine = dataclasses.replace(machine, gpus=gpus)
    return predict(workload, machine, gpus, **VARIANTS[variant]).step_ms


@functools.cache
def errors_on_four(gpu):
    """(variant, micro-batches) -> how far the prediction from two GPUs is off, as a share."""
    steps = recorded(gpu, "ddp_4gpus")["4"]["groups"]["ours, replayed"]
    return {
        (variant, count): step_ms(known(gpu), 4, variant, count) / steps[count][variant]["ms"] - 1
        for variant in VARIANTS
        for count in ("4", "1")
    }


# ---- the page -----------------------------------------------------------------------------------


def test_the_examples_of_the_page_print_what_stands_below_them():
    space = {}
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(pairs) == 3
    for code, printed in pairs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), space)
        assert out.getvalue() == printed


def test_the_machine_of_the_page_is_the_one_that_was_measured():
    workload, machine = known("H200")
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    code = " ".join(re.sub("#.*", "", code).split())
    assert f"micro_ms={workload.micro_ms:.1f}, tail_ms={workload.tail_ms:.1f}" in code
    assert f"link=Link(GBs={machine.link.GBs:.0f}, latency_us={calibration.HOP_US})" in code
    assert f"start_us={machine.start_us:.0f}, memory_GBs={machine.memory_GBs:.0f}" in code
    assert f"nccl_slow={machine.nccl_slow:.2f}, spread={machine.spread:.2f}" in code


def test_the_page_says_how_far_off_the_model_is():
    text = " ".join(PAGE.read_text().split())
    errors = {gpu: errors_on_four(gpu) for gpu in FOLDERS}
    assert max(abs(error) for of_gpu in errors.values() for error in of_gpu.values()) < 0.06
    for variant in VARIANTS:
        cells = [f"{errors[gpu][variant, count]:+.1%}" for gpu in FOLDERS for count in ("4", "1")]
        assert f"| {' | '.join([variant, *cells])} |" in text
