"""Data-parallel steps against one GPU, torch's DDP and FSDP2: python benchmarks/ddp.py [part ...]

Needs 2 GPUs or more.

llama-350m, batch 4 per GPU, T = 1024, 4 micro-batches and 1, AdamW with decay of matrices, clipped
at 1.0. torch (ddp_ranks.py): fp32 weights, bf16 autocast, foreach clip, fused AdamW,
DistributedDataParallel with no_sync() in all micro-batches but the last; eager, compiled, and
compiled with the whole step captured in one CUDA graph, the model as one compiled graph or split at
DDP's buckets (DDPOptimizer); and FSDP2 as torchtitan sets it up (fsdp.py), each block compiled, no
reshard after forward, bf16 parameters and fp32 reduction, launched and captured in one CUDA graph.
Ours: bf16 weights with fp32 masters, launched from Python, and compiled and replayed as one CUDA
graph: all-reduce in fp32, by copy engines and by NCCL, in bf16, sharded (by copy engines, too),
ordered. Our tokens/s are also compared with those of torch's fastest row in the same run.

Each group of variants has its own base, the same step without communication: on one GPU while the
others rest (`one GPU`, the reference of the rates), and on all GPUs at once (`each for itself`:
what a step takes beyond that is communication that nothing hides). The variants of a group are
measured in turns. Times are those of steps that are queued back to back, of replayed ones once the
clocks have settled, and a step's time is that of its slowest rank. Variants that compile have
workers of their own, which compile side by side. A rank that does not answer for 60 s ends its
workers; what fails is named in the results, and the rest goes on.

Also: the bandwidth of collectives alone, memory per rank, and whether bits are equal: on all ranks,
replayed and launched, and (ordered) on N GPUs and one. Each number of GPUs has a result file of its
own, which also holds NCCL's settings in the environment (NCCL_*).
"""

import argparse
import json
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
from power import joined, measuring, reading
from tables import Column, Table, integer, number, ratio, share, show, tenths, yes_or_no
from workers import RankWorkers, WorkerError

from gpuaccel.training.models import Transformer

# ---- the variants -------------------------------------------------------------------------------

ONE, EACH = BASES = "one GPU", "each for itself"
COMPILED = "torch, compiled"
CAPTURED = "torch, captured"
SPLIT = "torch, captured, DDPOptimizer"
FSDP = "torch, compiled FSDP2"
CAPTURED_FSDP = "torch, captured FSDP2"
EAGER = "torch, eager"
OURS_EAGER = "ours, eager"
REPLAYED = "ours, replayed"


def torch_captured(**options) -> Variant:
    return Variant("torch", compiled=True, replayed=True, **options)


def fsdp_captured(**options) -> Variant:
    return Variant("FSDP2", compiled=True, replayed=True, **options)


def replayed(options=None, **more) -> Variant:
    return Variant("ours", compiled=True, replayed=True, options=options, **more)


BUCKET = {"bucket_cap_mb": 100}
# group -> variant -> (its workers, itself). The first variant is the base, without communication.
GROUPS = {
    COMPILED: {
        ONE: ("torch, compiled", Variant("torch", compiled=True)),
        "DDP": ("torch, compiled DDP", Variant("torch", compiled=True, options={})),
    },
    CAPTURED: {
        ONE: ("torch, captured", torch_captured()),
        "DDP": ("torch, captured DDP", torch_captured(options=BUCKET)),
    },
    SPLIT: {
        ONE: ("torch, split", torch_captured()),
        "DDP": ("torch, split DDP", torch_captured(options=BUCKET, optimize_ddp=True)),
    },
    FSDP: {
        ONE: ("torch, FSDP2 alone", Variant("FSDP2", compiled=True)),
        "FSDP2": ("torch, FSDP2", Variant("FSDP2", compiled=True, options={})),
    },
    CAPTURED_FSDP: {
        ONE: ("torch, captured FSDP2 alone", fsdp_captured()),
        "FSDP2": ("torch, captured FSDP2", fsdp_captured(options={})),
    },
    EAGER: {
        ONE: ("eager", Variant("torch")),
        "DDP": ("eager", Variant("torch", options={})),
    },
    OURS_EAGER: {
        ONE: ("eager", Variant("ours")),
        "all-reduce": ("eager", Variant("ours", options={})),
    },
    REPLAYED: {
        ONE: ("replayed", replayed()),
        "all-reduce": ("replayed", replayed({"peer_to_peer": True})),
        "all-reduce by NCCL": ("replayed", replayed({"peer_to_peer": False})),
        "all-reduce in bf16": ("replayed", replayed({"dtype": torch.bfloat16})),
        "sharded": ("replayed, other sums", replayed({"sharded": True})),
        "ordered": ("replayed, other sums", replayed({"ordered": True})),
    },
}
# Made and measured against the base when the others of their group are gone: 80 GB of memory are
# too few for all of them at once.
LATER = {REPLAYED: ("all-reduce in bf16", "sharded", "ordered")}
PARTS = *GROUPS, "bits", "bandwidth"
# In this order: what matters most is there if something stops the run.
ORDER = COMPILED, CAPTURED, REPLAYED, CAPTURED_FSDP, SPLIT, FSDP, EAGER, OURS_EAGER
# Groups that are made at once, side by side. Others are made when it is their turn, to save memory.
MADE_FIRST = (COMPILED, CAPTURED)
# GiB of a GPU's memory, with less than which the model is smaller.
GIB = 70
# Seconds in which a variant is made: compiling takes long. Ranks notice a hanging GPU themselves.
MAKING = 180.0
# Launched steps of a turn.
CALLS = 3
# replayed? -> turns
ROUNDS = {True: 3, False: 2}
# Micro-batches of a turn of replayed steps; the first quarter does not count.
SETTLED = 32
# How far first losses may be apart: fp32 weights, and bf16 copies of them.
SAME_LOSS = 0.05


# ---- how they are measured ----------------------------------------------------------------------


class Run:
    """The measurement of one number of ranks, stage by stage.

    `results` always holds what has been measured so far.

    home: the workers that stay to the end
    """

    def __init__(
        self,
        workers: RankWorkers,
        bench: Bench,
        groups: dict,
        home,
        clock: Clock | None = None,
    ):
        self.workers = workers
        self.bench = bench
        self.groups = groups
        self.home = home
        self.clock = clock or Clock()
        self.results = {
            "ranks": workers.ranks,
            "groups": {},
            "made": {},
            "failed": {},
        }

    def stage(self, name, function, *args):
        """One part of the measurement. A failure is recorded, and the others go on."""
        try:
            function(*args)
            self.clock.say(f"{name} is done")
        except (WorkerError, AssertionError) as error:
            self.failed(name, error)

    def failed(self, name, error):
        # Without the traceback, which names folders of this machine.
        self.results["failed"][name] = error_sentence(str(error))
        self.clock.say(f"{name} failed: {error}")

    def meet(self, names):
        """All workers begin, side by side."""
        for name in names:
            self.workers.send(name, "meet")
        for name in names:
            self.stage(f"meeting of {name}", self.workers.answers, name, MAKING)

    # ---- speed ----

    def make(self, groups: dict):
        """Make all variants of these groups; different workers do so side by side."""
        pending = [
            (group, name, workers, variant)
            for group, variants in groups.items()
            for name, (workers, variant) in variants.items()
            if workers not in self.workers.stopped
        ]
        for group, name, workers, variant in pending:
            self.workers.send(workers, "make", (group, name), variant)
        for group, name, workers, _ in pending:
            what = f"making of {group}: {name}"
            self.stage(what, self._made, group, name, workers)
            if what in self.results["failed"]:
                reason = self.results["failed"][what]
                self.results.setdefault("why_not", {}).setdefault(group, {})[name] = reason

    def _made(self, group, name, workers):
        """The same model and batches everywhere: the first losses agree."""
        answers = self.workers.answers(workers, MAKING)
        loss = statistics.mean(answer["first_loss"] for answer in answers)
        expected = self.results.setdefault("first_loss", loss)
        assert abs(loss - expected) < SAME_LOSS, (
            f"the first loss is {loss}, and that of the first variant {expected}"
        )
        self.results["made"].setdefault(group, {})[name] = answers

    def _ready(self, group, names=None) -> dict:
        """name -> workers of the variants that were made and whose workers are still there.

        names: of these; None: of the whole group"""
        made = self.results["made"].get(group, {})
        return {
            name: workers
            for name, (workers, _) in self.groups[group].items()
            if name in made and workers not in self.workers.stopped
            if names is None or name in names
        }

    def race(self, group, names):
        """Times of these variants of a group and of its base, in turns.

        A later race of a group has rows of its own for the base ("one GPU, again"), with which its
        variants are compared."""
        replays = any(variant.replayed for _, variant in self.groups[group].values())
        ready = self._ready(group, (ONE, *names))
        assert ONE in ready, f"{group} has no base"
        results = self.results["groups"].setdefault(group, {})
        for count in self.bench.micro_batches:
            timers = {
                ONE: (ready[ONE], (group, ONE), count, True),
                EACH: (ready[ONE], (group, ONE), count, False),
            }
            for name, workers in ready.items():
                if name != ONE:
                    timers[name] = (workers, (group, name), count, False)
            times = self.turns(timers, replays)
            tokens = self.bench.rows * count * self.bench.config.T
            rows = {
                name: {
                    "ms": ms,
                    "tokens_per_s_per_gpu": tokens / ms * 1e3,
                    "of_one_gpu": times[ONE] / ms,
                    "exposed_ms": ms - times[EACH],
                    **self.clock_and_power(group, name, count),
                }
                for name, ms in times.items()
            }
            there = results.setdefault(str(count), {})
            for name, row in rows.items():
                there[f"{name}, again" if name in there else name] = row
            texts = (f"{name} {m['ms']:.2f} ms ({m['of_one_gpu']:.1%})" for name, m in rows.items())
            self.clock.say(f"{group}, {count}: {', '.join(texts)}")

    def clock_and_power(self, group, name, count) -> dict:
        """Medians of the GPUs that computed, while this variant was measured; {} without a GPU."""
        gpus = 1 if name == ONE else self.workers.ranks
        medians = reading(joined(group, name, count), gpus) or {}
        return {key: medians[key] for key in ("W", "SM_MHz") if medians.get(key) is not None}

    def turns(self, timers: dict, settle: bool) -> dict:
        """Median milliseconds of each, in turns (a, b, c, b, c, a, ...).

        No variant always follows the same one, which may have left the GPU hot. One that fails is
        left out from then on.

        timers: name -> (workers, key of the variant, micro-batches, on the first GPU alone?)
        settle: turns of about a second, whose beginning does not count: after a rest a GPU runs
            above its power limit for a while"""
        times = {name: [] for name in timers}
        for turn in range(ROUNDS[settle]):
            names = list(times)
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                workers, key, count, alone = timers[name]
                calls = max(CALLS, SETTLED // count) if settle else CALLS
                try:
                    with measuring(key[0], name, count):
                        answers = self.workers.ask(workers, "times", key, count, calls, alone)
                except WorkerError as error:
                    del times[name]
                    self.failed(f"times of {', '.join(key)}, {count}", error)
                    continue
                times[name] += slowest(answers)[calls // 4 if settle else 0 :]
        assert timers.keys() & {ONE, EACH} <= times.keys(), "the base has failed"
        return {name: statistics.median(values) for name, values in times.items()}

    def end(self, group, name):
        """After all steps of a variant: finite losses, and the same bits on all ranks."""
        workers, variant = self.groups[group][name]
        answers = self.workers.ask(workers, "last", (group, name))
        assert all(math.isfinite(loss) for _, loss, _ in answers), f"last losses {answers}"
        # A rank of FSDP2 has weights of its own.
        if variant.options is not None and variant.make != "FSDP2":
            equal = len({weights for weights, *_ in answers}) == 1
            checks = self.results.setdefault("equal_on_all_ranks", {}).setdefault(group, {})
            checks[name] = {"equal": equal, "steps": answers[0][2]}
            assert equal, f"the ranks' weights are not bit-identical: {answers}"

    def group(self, group):
        """Measure a group, then free its memory."""
        variants = self.groups[group]
        later = [name for name in LATER.get(group, ()) if name in variants]
        first = [name for name in variants if name not in later]
        if group not in MADE_FIRST:
            self.make({group: {name: variants[name] for name in first}})
        self._race_and_end(group, first)
        if later:
            self._drop(group, [name for name in first if name != ONE])
            self.make({group: {name: variants[name] for name in later}})
            self._race_and_end(group, later)
        order = list(self.groups)
        needed = {self.home}
        for other in order[order.index(group) + 1 :]:
            needed |= {workers for workers, _ in self.groups[other].values()}
        for workers in {workers for workers, _ in variants.values()} - self.workers.stopped.keys():
            if workers not in needed:
                self.workers.stop(workers)
        self._drop(group, variants)

    def _race_and_end(self, group, names):
        self.stage(group, self.race, group, names)
        for name in self._ready(group, names):
            self.stage(f"end of {group}: {name}", self.end, group, name)

    def _drop(self, group, names):
        """Free the memory of these variants."""
        for workers in {
            self.groups[group][name][0] for name in names
        } - self.workers.stopped.keys():
            keys = ((group, name) for name in names)
            self.stage(f"end of {group}", self.workers.ask, workers, "drop", *keys)

    # ---- the network, and bits ----

    def bandwidth(self):
        """Bus bandwidth in GB/s, as nccl-tests count it: what crosses a link of each GPU.

        A size's bytes times 2 (N - 1) / N over the time; for the halves of an all-reduce,
        (N - 1) / N; for the all-to-all of two, 1 / 2."""
        with torch.device("meta"):
            model = Transformer(self.bench.config)
        arena = 4 * sum(p.numel() for p in model.parameters())
        halves, ranks = ("all_reduce", "reduce_scatter", "all_gather"), self.workers.ranks
        pairs = ("all_to_all",) if ranks % 2 == 0 else ()
        sizes = {
            f"{size >> 20} MiB": (size, ("all_reduce", *pairs))
            for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
            if size < arena
        }
        sizes["a bucket"] = (min(arena, 32 << 20), (*halves, *pairs))
        sizes["the arena in bf16"] = (arena // 2, ("all_reduce",))
        sizes["the arena"] = (arena, halves)
        answers = self.workers.ask(self.home, "bandwidth", sizes, 5)
        rows = {}
        for name, (size, operations) in sizes.items():
            rows[name] = {"bytes": size}
            for operation in operations:
                times = slowest([answer[name][operation] for answer in answers])
                ms = statistics.median(times)
                passes = 2 if operation == "all_reduce" else 1
                others = 2 if operation == "all_to_all" else ranks
                rate = size / ms / 1e6 * passes * (others - 1) / others
                rows[name][operation] = {"ms": ms, "bus_GB_per_s": rate}
        self.results["bandwidth"] = rows

    def bits(self):
        answers = self.workers.ask(self.home, "bits")
        first = answers[0]
        checks = {
            name: {
                "equal on all ranks": all(answer[name] == first[name] for answer in answers),
                "replayed equal to launched": first[name]["replayed"] == first[name]["eager"],
            }
            for name in ("all-reduce", "ordered", "sharded")
        }
        alone = first["one GPU"]["eager"]
        checks["ordered"]["equal to one GPU"] = first["ordered"]["eager"] == alone
        self.results["bits"] = {
            "steps": self.bench.bits_steps,
            "layers": self.bench.bits_layers,
            "variants": checks,
            "losses": {name: launches["eager"][1] for name, launches in first.items()},
        }

    # ---- all of it ----

    def all(self, parts):
        self.meet(self.workers.names)
        self.make({group: self.groups[group] for group in MADE_FIRST if group in self.groups})
        for group in self.groups:
            self.group(group)
        self.stage("end of all variants", self.workers.ask, self.home, "clear")
        for name, part in {"bits": self.bits, "bandwidth": self.bandwidth}.items():
            if name in parts:
                self.stage(name, part)

    def memory(self):
        """Of the rank with the most, in GiB: memory, and the optimizer's state."""
        for group, variants in self.results["made"].items():
            rows = self.results.setdefault("memory", {}).setdefault(group, {})
            for name, answers in variants.items():
                rows[name] = {
                    key: max(answer[key] for answer in answers)
                    for key in ("peak_GiB", "held_GiB", "optimizer_GiB")
                    if key in answers[0]
                }

    def against_torch(self):
        """Tokens/s of our variants over those of torch's fastest row of this run, DDP or FSDP2."""
        groups = self.results["groups"]
        for count in map(str, self.bench.micro_batches):
            rates = {
                group: row["tokens_per_s_per_gpu"]
                for group, counts in groups.items()
                for name, row in counts.get(count, {}).items()
                if name in ("DDP", "FSDP2")
            }
            if not rates:
                continue
            fastest = max(rates, key=rates.get)
            self.results.setdefault("fastest_torch", {})[count] = fastest
            for group in groups.keys() & {OURS_EAGER, REPLAYED}:
                for name, row in groups[group].get(count, {}).items():
                    if not name.startswith(BASES):
                        row["times_torch"] = row["tokens_per_s_per_gpu"] / rates[fastest]


def error_sentence(text: str) -> str:
    """The last error that a report names, without its traceback."""
    errors = re.findall(
        r"^(?:[\w.]+: |rank \d+ )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", text, re.M
    )
    return errors[-1] if errors else text.strip().splitlines()[-1]


def slowest(answers) -> list[float]:
    """Of each step the time of the rank that took longest. Ranks that rested answer []."""
    return [max(step) for step in zip(*(times for times in answers if times))]


def measure(
    bench: Bench,
    ranks: int,
    parts=PARTS,
    keep=lambda results: None,
    groups=GROUPS,
) -> dict:
    """Everything (or some parts) for one number of ranks.

    keep(results): called at the end, also where an error or a signal ends the measurement"""
    clock, home = Clock(), groups[REPLAYED][ONE][0]
    groups = {group: dict(groups[group]) for group in ORDER if group in parts and group in groups}
    names = [workers for variants in groups.values() for workers, _ in variants.values()]
    sets = {name: (Rank, bench) for name in dict.fromkeys([*names, home])}
    with RankWorkers(sets, ranks, bench.device) as workers:
        run = Run(workers, bench, groups, home, clock)
        try:
            run.all(parts)
        finally:
            run.memory()
            run.against_torch()
            measured = run.results["groups"]
            run.results["groups"] = {part: measured[part] for part in PARTS if part in measured}
            run.results["seconds"] = clock.seconds
            keep(run.results)
    return run.results


# ---- tables -------------------------------------------------------------------------------------

STEPS = [
    Column("step", "step"),
    Column("4: ms", "4 ms", number),
    Column("4: of one GPU", "4 of_one_gpu", share),
    Column("4: exposed ms", "4 exposed_ms", tenths),
    Column("4: against torch", "4 times_torch", ratio),
    Column("1: ms", "1 ms", number),
    Column("1: of one GPU", "1 of_one_gpu", share),
    Column("1: exposed ms", "1 exposed_ms", tenths),
    Column("1: against torch", "1 times_torch", ratio),
    Column("peak GiB", "peak_GiB", tenths),
    Column("optimizer GiB", "optimizer_GiB", number),
    Column("failed", "why_not"),
]


def tables(results: dict) -> dict[str, Table]:
    """ "replayed" and "launched": steps with 4 micro-batches and with 1; "one GPU": the same steps
    without communication. "bits", "collectives", "failed"."""
    made = {}
    for r in results.values():
        rows = step_rows(r)
        bits = [Column("bit-identical", "what"), Column("", "equal", yes_or_no)]
        failed = [{"what": what, "why": why} for what, why in r["failed"].items()]
        made |= {
            "replayed": Table(STEPS, [row for row in rows if row["replayed"] and not row["alone"]]),
            "launched": Table(STEPS, [row for row in rows if not row["replayed"] | row["alone"]]),
            "one GPU": Table(STEPS, [row for row in rows if row["alone"]]),
            "bits": Table(bits, bit_rows(r)),
            "collectives": collectives_table(r),
            "failed": Table([Column("what", "what"), Column("why", "why")], failed),
        }
    return {name: table for name, table in made.items() if table.rows}


def step_rows(r: dict) -> list[dict]:
    """A row for each variant; its values are named by micro-batches: "4 ms", "1 ms"."""
    rows = []
    for group, counts in r["groups"].items():
        replayed = any(variant.replayed for _, variant in GROUPS[group].values())
        memory, why_not = r.get("memory", {}).get(group, {}), r.get("why_not", {}).get(group, {})
        for name in dict.fromkeys([*(n for some in counts.values() for n in some), *why_not]):
            # A result may be older than the list of variants.
            known = name in GROUPS[group] or name.startswith(ONE)
            if name.startswith(EACH) or not known:
                continue
            row = {"step": f"{group}: {name}", **memory.get(name, {}), "why_not": why_not.get(name)}
            row |= {"replayed": replayed, "alone": name.startswith(ONE)}
            for micro_batches, measured in counts.items():
                row |= {f"{micro_batches} {key}": m for key, m in measured.get(name, {}).items()}
            rows.append(row)
    return rows


def bit_rows(r: dict) -> list[dict]:
    rows = []
    if "bits" in r:
        after = f"after {r['bits']['steps']} deterministic steps"
        for name, checks in r["bits"]["variants"].items():
            for what, equal in checks.items():
                rows.append({"what": f"{name}: {what}, {after}", "equal": equal})
    for group, some in r.get("equal_on_all_ranks", {}).items():
        for name, m in some.items():
            if name not in GROUPS[group]:
                continue
            what = f"{group}, {name}: equal on all ranks, after {m['steps']} steps"
            rows.append({"what": what, "equal": m["equal"]})
    return rows


def collectives_table(r: dict) -> Table:
    """Each alone, in GB/s of bus bandwidth."""
    rows = [
        {"size": name, "MiB": m["bytes"] // 2**20}
        | {op: values["bus_GB_per_s"] for op, values in m.items() if op != "bytes"}
        for name, m in r.get("bandwidth", {}).items()
    ]
    operations = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    columns = [Column("GB/s", "size"), Column("MiB", "MiB", integer)]
    return Table([*columns, *(Column(f"`{op}`", op, number) for op in operations)], rows)


# ---- the script ---------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The command line: parts are names of PARTS, gpus are numbers of ranks."""
    parser = argparse.ArgumentParser(
        description="Data-parallel steps against one GPU and against torch's DDP and FSDP2."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {'; '.join(PARTS)}; or a word of theirs; then nothing is written",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of ranks (default: 2, and 4 where there are so many)",
    )
    args = parser.parse_args()
    unknown = [word for word in args.parts if not any(word in part for part in PARTS)]
    if unknown:
        parser.error(f"no part {'; '.join(unknown)}; expected some of: {'; '.join(PARTS)}")
    args.write = not args.parts
    args.parts = [p for p in PARTS if not args.parts or any(word in p for word in args.parts)]
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

    def stop(*_):
        # `timeout` sends it to the process and to its group.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit("stopped by SIGTERM: what was measured is written")

    signal.signal(signal.SIGTERM, stop)
    nccl = {"version": ".".join(map(str, torch.cuda.nccl.version()))}
    nccl |= {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")}
    results = {}

    def keep(result):
        key = str(result["ranks"])
        results[key] = plain({**result, "nccl": nccl})
        if args.write:
            write(f"ddp_{key}gpus", {key: results[key]}, script="ddp", size=size, gpus=int(key))

    config, size = memory.models_that_fit(GIB)[0]
    with measuring_here():
        for ranks in args.gpus:
            bench = Bench(config)
            measure(bench, ranks, args.parts, keep)
            show(tables({str(ranks): results[str(ranks)]}))
    failed = {n: r["failed"] for n, r in results.items() if r["failed"]}
    if failed:
        sys.exit(f"failed: {json.dumps(failed, indent=1)}")


if __name__ == "__main__":
    main()
