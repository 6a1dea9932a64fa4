"""Where the time of a replayed step of several GPUs goes: python benchmarks/ddp_traces.py

Needs 2 GPUs or more, and four minutes.

The steps of ddp.py that are whole CUDA graphs: torch's DDP, captured; and ours, all-reduce by copy
engines and by NCCL, and sharded; each group with the same step on one GPU, and on all GPUs for
itself. They are timed as there. Then the profiler records three steps of each on the first GPU, and
traces.py sorts their kernels into groups.
"""

import os

import memory
import torch
from common import measuring_here, plain, show_table, write
from ddp import BASES, CAPTURED, GIB, GROUPS, ONE, REPLAYED, Run, measure
from ddp_ranks import Bench

TRACED = {
    CAPTURED: (ONE, "DDP"),
    REPLAYED: (ONE, "all-reduce", "all-reduce by NCCL", "sharded"),
}


class TracedRun(Run):
    """A measurement that also traces each variant, whose row gets `groups` (traces.py)."""

    later = {}

    def race(self, group, names):
        super().race(group, names)
        for count, rows in self.results["groups"][group].items():
            for name, row in rows.items():
                variant = ONE if name in BASES else name
                workers, _ = self.groups[group][variant]
                key = group, variant
                answers = self.workers.ask(workers, "groups", key, int(count), name == ONE)
                row["groups"] = answers[0]


def traced(bench: Bench, ranks: int, groups: dict = GROUPS) -> dict:
    """The measurement, as ddp.measure() returns it. groups: as ddp.GROUPS."""
    some = {group: {name: groups[group][name] for name in names} for group, names in TRACED.items()}
    return measure(bench, ranks, (), parts=tuple(some), groups=some, kind=TracedRun)


def show(results: dict):
    head = "", "ms", "products", "attention", "rest", "tail", "communication", "exposed"
    for group, counts in results["groups"].items():
        for count, rows in counts.items():
            cells = [
                (name, row["ms"], *(f"{row['groups'][part]:.2f}" for part in head[2:]))
                for name, row in rows.items()
                if "groups" in row
            ]
            show_table(f"{group}, {count}", cells, head)


def main():
    os.environ["GPUACCEL_GPU"] = "require"
    ranks = torch.cuda.device_count()
    config, size = memory.models_that_fit(GIB)[0]
    with measuring_here():
        r = traced(Bench(config), ranks)
        r = plain({key: r[key] for key in ("ranks", "groups", "failed")})
        name = f"ddp_traces_{ranks}gpus"
        write(name, {str(ranks): r}, script="ddp_traces", size=size, gpus=ranks)
    show(r)


if __name__ == "__main__":
    main()
