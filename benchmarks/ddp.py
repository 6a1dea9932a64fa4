"""Data-parallel steps against one GPU, torch's DDP and FSDP2: python benchmarks/ddp.py

Needs 2 GPUs or more, and about three minutes for each number of ranks. Stages: core, launched,
more, bandwidth; `--only core launched` takes about 130 seconds on two H100s.

llama-350m, batch 4 per GPU, T = 1024, 4 micro-batches and 1, AdamW with decay of matrices, clipped
at 1.0. All steps are compiled, and replayed from one CUDA graph or launched from Python. torch
(ddp_ranks.py): DistributedDataParallel with no_sync() in all micro-batches but the last, fp32
weights, bf16 autocast, foreach clip, fused AdamW, the model split at DDP's buckets (DDPOptimizer);
and FSDP2 as torchtitan sets it up (fsdp.py), each block compiled, no reshard after forward, bf16
parameters and fp32 reduction. Ours: bf16 weights with fp32 masters; all-reduce in fp32, by copy
engines and by NCCL, in bf16, sharded (by copy engines, too), ordered.

core: `one GPU`, the reference of the rates, a step without communication on one GPU while the
others rest; DDP, FSDP2, all-reduce and sharded, replayed.
launched: DDP, FSDP2 and all-reduce.
more: all-reduce by NCCL and in bf16, ordered.
bandwidth: all-reduces alone.
The weights of all ranks are compared bit by bit at the end of each stage.

The variants of a stage are measured in turns. Times are those of steps that are queued back to
back, of replayed ones once the clocks have settled, and a step's time is that of its slowest rank.
Variants that compile side by side have workers of their own. A rank that does not answer for 60 s
ends its workers; what fails is named in the results, and the rest goes on. Each number of GPUs has
a result file of its own, which is written after each stage, and also holds NCCL's settings in the
environment (NCCL_*).
"""

import argparse
import math
import os
import re
import signal
import statistics
import sys

import memory
import torch
from common import Clock, measuring_here, plain, write
from ddp_ranks import Bench, Rank, Variant
from power import measuring
from tables import Column, Table, integer, number, ratio, share, show, tenths
from workers import RankWorkers, WorkerError

from gpuaccel.training.models import Transformer

# ---- the variants -------------------------------------------------------------------------------

ONE = "one GPU"
CAPTURED = "torch, captured"
CAPTURED_FSDP = "torch, captured FSDP2"
REPLAYED = "ours, replayed"
COMPILED = "torch, compiled"
FSDP = "torch, compiled FSDP2"
OURS_COMPILED = "ours, compiled"
DDP_KEY, FSDP_KEY = (CAPTURED, "DDP"), (CAPTURED_FSDP, "FSDP2")
LAUNCHED_KEY = (OURS_COMPILED, "all-reduce")
BASE = (REPLAYED, ONE)


def ours(**options) -> Variant:
    return Variant("ours", replayed=True, options=options)


# (group, name) -> (its workers, itself)
VARIANTS = {
    DDP_KEY: ("DDP", Variant("torch", replayed=True, options={"bucket_cap_mb": 100})),
    FSDP_KEY: ("FSDP2", Variant("FSDP2", replayed=True, options={})),
    BASE: ("ours", Variant("ours", replayed=True)),
    (REPLAYED, "all-reduce"): ("ours", ours(peer_to_peer=True)),
    (REPLAYED, "sharded"): ("ours, other sums", ours(sharded=True)),
    (REPLAYED, "all-reduce by NCCL"): ("ours", ours(peer_to_peer=False)),
    (REPLAYED, "all-reduce in bf16"): ("ours", ours(dtype=torch.bfloat16)),
    (REPLAYED, "ordered"): ("ours, other sums", ours(ordered=True)),
    LAUNCHED_KEY: ("ours, launched", Variant("ours", options={})),
}
CORE = (DDP_KEY, FSDP_KEY, BASE, (REPLAYED, "all-reduce"), (REPLAYED, "sharded"))
MORE = (
    BASE,
    *((REPLAYED, name) for name in ("all-reduce by NCCL", "all-reduce in bf16", "ordered")),
)
# torch's steps are launched by the workers that have captured them, under other names.
LAUNCHED = {DDP_KEY: (COMPILED, "DDP"), FSDP_KEY: (FSDP, "FSDP2"), LAUNCHED_KEY: LAUNCHED_KEY}
# The workers that stay to the end.
HOME = "ours"
# GiB of a GPU's memory, with less than which the model is smaller.
GIB = 70
# Seconds in which a variant is made: compiling takes long. Ranks notice a hanging GPU themselves.
MAKING = 180.0
# Turns, and launched steps of one.
ROUNDS, CALLS = 2, 4
# Micro-batches of a turn of replayed steps; the first quarter does not count.
SETTLED = 32
# How far first losses may be apart: fp32 weights, and bf16 copies of them.
SAME_LOSS = 0.05


# ---- how they are measured ----------------------------------------------------------------------


class Run:
    """The measurement of one number of ranks, stage by stage.

    `results` always holds what has been measured so far; keep(results) is called when there is
    more.
    """

    def __init__(
        self, workers: RankWorkers, bench: Bench, variants=VARIANTS, keep=lambda results: None
    ):
        self.workers = workers
        self.bench = bench
        self.variants = variants
        self.keep = keep
        self.clock = Clock()
        self.made: set = set()
        self.results = {"ranks": workers.ranks, "groups": {}, "failed": {}, "stages": {}}

    def part(self, name, function, *args):
        """One part of the measurement. A failure is recorded, and the others go on."""
        try:
            function(*args)
        except (WorkerError, AssertionError) as error:
            # Without the traceback, which names folders of this machine.
            self.results["failed"][name] = error_sentence(str(error))
            self.clock.say(f"{name} failed: {error}")

    def meet(self):
        """All workers begin, side by side."""
        names = self.workers.names
        for name in names:
            self.workers.send(name, "meet")
        for name in names:
            self.part(f"meeting of {name}", self.workers.answers, name, MAKING)

    # ---- speed ----

    def make(self, keys):
        """Make variants that are not there; different workers do so side by side."""
        pending = [
            key
            for key in keys
            if key not in self.made and self.variants[key][0] not in self.workers.stopped
        ]
        for key in pending:
            workers, variant = self.variants[key]
            self.workers.send(workers, "make", key, variant)
        for key in pending:
            self.part(f"making of {': '.join(key)}", self._made, key)
        self.clock.say(f"made: {', '.join(map(str, pending))}")

    def _made(self, key):
        """The same model and batches everywhere: the first losses agree."""
        group, name = key
        answers = self.workers.answers(self.variants[key][0], MAKING)
        loss = statistics.mean(answer["first_loss"] for answer in answers)
        expected = self.results.setdefault("first_loss", loss)
        assert abs(loss - expected) < SAME_LOSS, (
            f"the first loss is {loss}, and that of the first variant {expected}"
        )
        # Of the rank with the most: GiB, and seconds.
        self.results.setdefault("memory", {}).setdefault(group, {})[name] = {
            what: max(answer[what] for answer in answers)
            for what in ("peak_GiB", "held_GiB", "optimizer_GiB", "seconds")
            if what in answers[0]
        }
        self.made.add(key)

    def race(self, keys, launched: bool = False):
        """Times of these variants, in turns. A base that is measured again has a row of its own,
        and the variants beside it are compared with that one."""
        keys = [
            key
            for key in keys
            if key in self.made and self.variants[key][0] not in self.workers.stopped
        ]
        for count in self.bench.micro_batches:
            times = self.turns(keys, count, launched)
            for key, ms in times.items():
                group, name = LAUNCHED[key] if launched else key
                rows = self.results["groups"].setdefault(group, {}).setdefault(str(count), {})
                tokens = self.bench.rows * count * self.bench.config.T
                row = {"ms": ms, "tokens_per_s_per_gpu": tokens / ms * 1e3}
                if BASE in times and group == REPLAYED:
                    row["of_one_gpu"] = times[BASE] / ms
                rows[f"{name}, again" if key == BASE and name in rows else name] = row
            self.against_torch()
            self.keep(self.results)
            self.clock.say(f"{count} micro-batches: {times}")
        for key in keys:
            self.part(f"end of {': '.join(key)}", self.end, key)

    def turns(self, keys, count: int, launched: bool) -> dict:
        """Median milliseconds of each, in turns (a, b, c, b, c, a, ...).

        No variant always follows the same one, which may have left the GPU hot. One that fails is
        left out from then on. Turns of replayed steps take about a second, and their beginning does
        not count: after a rest a GPU runs above its power limit for a while."""
        times = {key: [] for key in keys}
        calls = CALLS if launched else max(CALLS, SETTLED // count)
        for turn in range(ROUNDS):
            names = list(times)
            start = turn % max(1, len(names))
            for key in names[start:] + names[:start]:
                workers = self.variants[key][0]
                try:
                    with measuring():
                        answers = self.workers.ask(
                            workers, "times", key, count, calls, key == BASE, launched
                        )
                except WorkerError as error:
                    del times[key]
                    what = f"times of {', '.join(key)}, {count}"
                    self.results["failed"][what] = error_sentence(str(error))
                    continue
                times[key] += slowest(answers)[0 if launched else calls // 4 :]
        return {key: statistics.median(values) for key, values in times.items()}

    def end(self, key):
        """After all steps of a variant: finite losses, and the same bits on all ranks."""
        workers, variant = self.variants[key]
        answers = self.workers.ask(workers, "last", key)
        assert all(math.isfinite(loss) for _, loss in answers), f"last losses {answers}"
        # A rank of FSDP2 has weights of its own.
        equal = len({weights for weights, _ in answers}) == 1
        assert equal or variant.options is None or variant.make == "FSDP2", (
            f"the ranks' weights are not bit-identical: {answers}"
        )

    def drop(self, keys):
        """Free the memory of these variants."""
        for key in self.made & set(keys):
            workers = self.variants[key][0]
            if workers not in self.workers.stopped:
                self.part(f"end of {': '.join(key)}", self.workers.ask, workers, "drop", key)
            self.made.remove(key)

    # 80 GB of memory are too few for all variants at once.

    def core(self):
        self.make(CORE)
        self.race(CORE)
        self.drop([(REPLAYED, "all-reduce"), (REPLAYED, "sharded")])

    def launched(self):
        self.make(LAUNCHED)
        self.race(LAUNCHED, launched=True)
        self.drop([LAUNCHED_KEY])

    def more(self):
        self.drop([DDP_KEY, FSDP_KEY])
        self.make(MORE)
        self.race(MORE)
        self.drop(MORE)

    def bandwidth(self):
        """Bus bandwidth of all-reduces alone in GB/s, as nccl-tests count it: what crosses a link
        of each GPU, a size's bytes times 2 (N - 1) / N over the time."""
        with torch.device("meta"):
            model = Transformer(self.bench.config)
        arena = 4 * sum(p.numel() for p in model.parameters())
        sizes = {f"{MiB} MiB": MiB << 20 for MiB in (16, 32, 64, 256) if MiB << 20 < arena}
        sizes |= {"the arena in bf16": arena // 2, "the arena": arena}
        answers = self.workers.ask(HOME, "bandwidth", sizes)
        rows = self.results["bandwidth"] = {}
        for name, size in sizes.items():
            ms = statistics.median(slowest([answer[name] for answer in answers]))
            rate = size / ms / 1e6 * 2 * (1 - 1 / self.workers.ranks)
            rows[name] = {"bytes": size, "all_reduce": {"ms": ms, "bus_GB_per_s": rate}}

    # ---- all of it ----

    def all(self, stages):
        self.meet()
        for name in stages:
            self.part(name, getattr(self, name))
            self.results["stages"][name] = self.clock.seconds
            self.clock.say(f"{name} is done")
            self.keep(self.results)
        self.part("end of all variants", self.workers.ask, HOME, "clear")

    def against_torch(self):
        """Tokens/s of our variants over those of torch's fastest row of this run and kind."""
        groups = self.results["groups"]
        kinds = {REPLAYED: (CAPTURED, CAPTURED_FSDP), OURS_COMPILED: (COMPILED, FSDP)}
        for group, peers in kinds.items():
            for count, rows in groups.get(group, {}).items():
                rates = [
                    row["tokens_per_s_per_gpu"]
                    for peer in peers
                    for row in groups.get(peer, {}).get(count, {}).values()
                ]
                for name, row in rows.items():
                    if rates and not name.startswith(ONE):
                        row["times_torch"] = row["tokens_per_s_per_gpu"] / max(rates)


STAGES = ("core", "launched", "more", "bandwidth")


def error_sentence(text: str) -> str:
    """The last error that a report names, without its traceback."""
    errors = re.findall(
        r"^(?:[\w.]+: |rank \d+ )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", text, re.M
    )
    return errors[-1] if errors else text.strip().splitlines()[-1]


def slowest(answers) -> list[float]:
    """Of each step the time of the rank that took longest. Ranks that rested answer []."""
    return [max(step) for step in zip(*(times for times in answers if times))]


def measure(bench: Bench, ranks: int, stages=STAGES, keep=lambda results: None, variants=VARIANTS):
    """The results of one number of ranks. keep(results): called whenever there is more."""
    sets = {workers: (Rank, bench) for workers, _ in variants.values()}
    with RankWorkers(sets, ranks, bench.device) as workers:
        run = Run(workers, bench, variants, keep)
        run.all(stages)
    return run.results


# ---- tables -------------------------------------------------------------------------------------

STEPS = [
    Column("step", "step"),
    Column("4: ms", "4 ms", number),
    Column("4: of one GPU", "4 of_one_gpu", share),
    Column("4: against torch", "4 times_torch", ratio),
    Column("1: ms", "1 ms", number),
    Column("1: of one GPU", "1 of_one_gpu", share),
    Column("1: against torch", "1 times_torch", ratio),
    Column("peak GiB", "peak_GiB", tenths),
    Column("optimizer GiB", "optimizer_GiB", number),
]


def tables(results: dict) -> dict[str, Table]:
    """ "replayed" and "launched": steps with 4 micro-batches and with 1; "one GPU": the same steps
    without communication. "collectives": all-reduces alone. "failed"."""
    made = {}
    for r in results.values():
        rows = step_rows(r)
        failed = [{"what": what, "why": why} for what, why in r["failed"].items()]
        made |= {
            "replayed": Table(STEPS, [row for row in rows if row["replayed"] and not row["alone"]]),
            "launched": Table(STEPS, [row for row in rows if not row["replayed"] | row["alone"]]),
            "one GPU": Table(STEPS, [row for row in rows if row["alone"]]),
            "collectives": collectives_table(r),
            "failed": Table([Column("what", "what"), Column("why", "why")], failed),
        }
    return made


def step_rows(r: dict) -> list[dict]:
    """A row for each variant; its values are named by micro-batches: "4 ms", "1 ms"."""
    rows = []
    for group, counts in r["groups"].items():
        replayed = "captured" in group or "replayed" in group
        memory = r.get("memory", {}).get(group, {})
        for name in dict.fromkeys(name for rows in counts.values() for name in rows):
            words = group.replace("captured", "replayed").removesuffix(" FSDP2")
            row = {"step": f"{words}: {name}", **memory.get(name, {})}
            row |= {"replayed": replayed, "alone": name.startswith(ONE)}
            for micro_batches, measured in counts.items():
                m = dict(measured.get(name, {}))
                ours = r["groups"].get(REPLAYED, {}).get(micro_batches, {}).get("all-reduce", {})
                if replayed and m and group != REPLAYED and "of_one_gpu" in ours:
                    # All shares are of ours on one GPU.
                    m["of_one_gpu"] = ours["of_one_gpu"] * ours["ms"] / m["ms"]
                row |= {f"{micro_batches} {key}": value for key, value in m.items()}
            rows.append(row)
    return rows


def collectives_table(r: dict) -> Table:
    rows = [
        {"size": name, "MiB": m["bytes"] // 2**20, **m["all_reduce"]}
        for name, m in r.get("bandwidth", {}).items()
    ]
    columns = [Column("all-reduce of", "size"), Column("MiB", "MiB", integer)]
    return Table([*columns, Column("GB/s", "bus_GB_per_s", number)], rows)


# ---- the script ---------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Data-parallel steps against one GPU and against torch's DDP and FSDP2."
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE")
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="numbers of ranks: 2 4")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    args.gpus = args.gpus or [n for n in (2, 4) if n <= gpus]
    if not args.gpus or max(args.gpus) > gpus or min(args.gpus) < 2:
        parser.error(
            f"this machine has {gpus} GPU{'s' * (gpus != 1)}; "
            "expected 2 or more, and no more ranks than GPUs"
        )
    return args


def main():
    args = arguments()
    # A kernel that does not run here stops the benchmark; otherwise torch would take its place.
    os.environ["GPUACCEL_GPU"] = "require"
    # `timeout` ends the ranks, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    nccl = {"version": ".".join(map(str, torch.cuda.nccl.version()))}
    nccl |= {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")}
    config, size = memory.models_that_fit(GIB)[0]
    failed = {}
    with measuring_here():
        for ranks in args.gpus:

            def keep(results, ranks=ranks):
                missing = [stage for stage in STAGES if stage not in results["stages"]]
                write(
                    f"ddp_{ranks}gpus",
                    plain({str(ranks): {**results, "nccl": nccl}}),
                    script="ddp",
                    gpus=ranks,
                    size=size,
                    missing=missing,
                )

            stages = [stage for stage in STAGES if stage in args.only]
            results = measure(Bench(config), ranks, stages, keep)
            show(tables({str(ranks): plain(results)}))
            failed |= results["failed"]
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
