"""Data-parallel steps against the same steps on one GPU, and against torch's DDP: python benchmarks/ddp.py   (needs 2 GPUs or more)

llama-350m, batch 4 per GPU, T = 1024, 4 micro-batches and 1, AdamW with decay of matrices, clipped
at 1.0. The peer is written out in ddp_ranks.py: fp32 weights, bf16 autocast, foreach clip, fused
AdamW, DistributedDataParallel with no_sync() in all micro-batches but the last; eager, compiled, and
compiled with the whole step captured in one CUDA graph, the model as one compiled graph or split at
DDP's buckets (DDPOptimizer). Ours: bf16 weights with fp32 masters, launched
from Python (mode `arena`), and compiled and replayed as one CUDA graph (mode `fused`): all-reduce in
fp32, by copy engines (peers.py) and by NCCL, in bf16, sharded (copies, too), ordered, and other sizes
of buckets. Tokens/s of ours are also held against those of torch's fastest DDP in the same run.

Each family of ways has its own base, the same step without any word to other ranks: on one GPU while the others rest (`one GPU`, what the rates are
held against), and on all GPUs at once (`each for itself`: what a step takes beyond that is communication that nothing hides). Those of one family take
turns; times are those of steps that are queued one behind the other, of replayed ones once the clocks have settled, and a step's is that of its slowest
rank. Ways that compile have processes of their own (crews.py), which compile side by side. A rank that does not answer for 60 s ends its crew; what fails
is named in the results, and the rest goes on.

Also: the bandwidth of collectives alone, memory per rank, and whether bits are equal: on all ranks, replayed and launched, and (ordered) on N GPUs and one.
Each number of GPUs has a result file of its own. Settings of NCCL in
the environment (NCCL_*) are written down; those that steer its number of thread blocks (NCCL_MAX_CTAS) are worth a try.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time

import common
import torch
from crews import CrewError, Crews
from ddp_ranks import Bench, Rank, Way

from gpuaccel.training.models import Transformer, preset

ONE, EACH = "one GPU", "each for itself"
COMPILED, CAPTURED, EAGER = "torch, compiled", "torch, captured", "torch, eager"
SPLIT = "torch, captured, DDPOptimizer"
OURS_EAGER, REPLAYED = "ours, eager", "ours, replayed"
MAKING = 180.0  # seconds in which a way is made: compiling takes long (ranks look themselves whether the GPU hangs)
CALLS, ROUNDS = (
    3,
    {True: 3, False: 2},
)  # launched steps of a turn; turns, of replayed steps and of others
SETTLED = 32  # micro-batches of a turn of replayed steps, of which the first quarter is not counted
BUCKETS = (8, 128)  # MB, beside the default


def replayed(how=None, **more) -> Way:
    return Way("ours", compiled=True, replayed=True, accumulate="fused", how=how, **more)


# family -> way -> (its crew, itself). The first way is the base, which says nothing to other ranks.
FAMILIES = {
    COMPILED: {
        ONE: ("torch, compiled", Way("torch", compiled=True)),
        "DDP": ("torch, compiled DDP", Way("torch", compiled=True, how={})),
    },
    CAPTURED: {
        ONE: ("torch, captured", Way("torch", compiled=True, replayed=True)),
        "DDP": (
            "torch, captured DDP",
            Way("torch", compiled=True, replayed=True, how={"bucket_cap_mb": 100}),
        ),
    },
    SPLIT: {
        ONE: ("torch, split", Way("torch", compiled=True, replayed=True)),
        "DDP": (
            "torch, split DDP",
            Way(
                "torch", compiled=True, replayed=True, how={"bucket_cap_mb": 100}, optimize_ddp=True
            ),
        ),
    },
    EAGER: {ONE: ("eager", Way("torch")), "DDP": ("eager", Way("torch", how={}))},
    OURS_EAGER: {ONE: ("eager", Way("ours")), "all-reduce": ("eager", Way("ours", how={}))},
    REPLAYED: {
        ONE: ("replayed", replayed()),
        "all-reduce": ("replayed", replayed({"peer_to_peer": True})),
        "all-reduce by NCCL": ("replayed", replayed({"peer_to_peer": False})),
        "all-reduce in bf16": ("replayed", replayed({"dtype": torch.bfloat16})),
        "sharded": ("replayed, other sums", replayed({"sharded": True})),
        "ordered": ("replayed, other sums", replayed({"ordered": True})),
    },
}
PARTS = *FAMILIES, "bits", "bandwidth"
EARLY = (
    COMPILED,
    CAPTURED,
    REPLAYED,
)  # made at once, side by side; the others in their turn, so that all have memory enough
ROOM = 130 << 30  # bytes of a GPU's memory for EARLY; with less, REPLAYED waits for its turn, too


class Run:
    """One number of ranks, measured stage by stage. `results` always holds what is there so far."""

    def __init__(
        self,
        crews: Crews,
        bench: Bench,
        families: dict,
        home,
        began: float,
        limit: float = math.inf,
        early=EARLY,
    ):
        """home: the crew that stays to the end; early: families that are made at once."""
        self.early = early
        self.crews, self.bench, self.families, self.home, self.began, self.limit = (
            crews,
            bench,
            families,
            home,
            began,
            limit,
        )
        self.results = {
            "ranks": crews.ranks,
            "families": {},
            "made": {},
            "failed": {},
            "left_out": [],
        }

    def say(self, what):
        print(f"{time.perf_counter() - self.began:5.1f} s: {what}", flush=True)

    def over(self, name) -> bool:
        """Is there no time left to begin this part?"""
        over = time.perf_counter() - self.began > self.limit
        if over:
            self.results["left_out"].append(name)
            self.say(f"{name} is left out: more than {self.limit:g} s are over")
        return over

    def stage(self, name, function, *args):
        """One part of the whole: what goes wrong in it is written down, and the others go on."""
        try:
            function(*args)
            self.say(f"{name} is done")
        except (CrewError, AssertionError) as error:
            self.failed(name, error)

    def failed(self, name, error):
        self.results["failed"][name] = str(error)
        self.say(f"{name} failed: {error}")

    def meet(self, names):
        """All begin side by side."""
        for crew in names:
            self.crews.send(crew, "meet")
        for crew in names:
            self.stage(f"meeting of {crew}", self.crews.answers, crew, MAKING)

    # ---- speed ----

    def make(self, families: dict):
        """Asked one after the other, made side by side by different crews."""
        wanted = [
            (family, name, *of)
            for family, ways in families.items()
            for name, of in ways.items()
            if of[0] not in self.crews.stopped
        ]
        for family, name, crew, way in wanted:
            self.crews.send(crew, "make", (family, name), way)
        for family, name, crew, _ in wanted:
            self.stage(f"making of {family}: {name}", self._made, family, name, crew)

    def _made(self, family, name, crew):
        said = self.crews.answers(crew, MAKING)
        first = statistics.mean(
            one["first_loss"] for one in said
        )  # the same model and batches everywhere: fp32 weights, and bf16 copies of them
        apart = abs(first - self.results.setdefault("first_loss", first))
        assert apart < 0.05, (
            f"the first loss is {first}, and that of the first way {self.results['first_loss']}"
        )
        self.results["made"].setdefault(family, {})[name] = said

    def _ready(self, family, ways) -> dict:
        """Those that were made, and whose crew is still there."""
        return {
            name: of
            for name, of in ways.items()
            if name in self.results["made"].get(family, {}) and of[0] not in self.crews.stopped
        }

    def race(self, family, ways: dict):
        """Times of a family's ways, in turns."""
        replays = any(way.replayed for _, way in ways.values())
        ways = {name: crew for name, (crew, _) in self._ready(family, ways).items()}
        assert ONE in ways, f"{family} has no base"
        found = self.results["families"].setdefault(family, {})
        for count in self.bench.micro_batches:
            takers = {
                name: (
                    ways.get(name, ways[ONE]),
                    (family, ONE if name == EACH else name),
                    count,
                    name == ONE,
                )
                for name in dict.fromkeys((ONE, EACH, *ways))
            }
            times = self.turns(takers, replays)
            tokens = self.bench.rows * count * self.bench.config.T
            rows = found[str(count)] = {
                name: {
                    "ms": ms,
                    "tokens_per_s_per_gpu": tokens / ms * 1e3,
                    "of_one_gpu": times[ONE] / ms,
                    "exposed_ms": ms - times[EACH],
                }
                for name, ms in times.items()
            }
            self.say(
                f"{family}, {count}: "
                + ", ".join(
                    f"{name} {m['ms']:.2f} ms ({m['of_one_gpu']:.1%})" for name, m in rows.items()
                )
            )

    def turns(self, takers: dict, settle: bool) -> dict:
        """Median milliseconds of each, in turns (a, b, c, b, c, a, ...): none comes behind the same one each time, which may have left the GPU hot. takers:
        name -> (crew, way, micro-batches, on the first GPU alone?). One that fails is left out from then on. settle: turns of about a second, without
        their beginning: after a rest a GPU runs above its power limit for a while."""
        times = {name: [] for name in takers}
        for nth in range(ROUNDS[settle]):
            names = list(times)
            for name in names[nth % len(names) :] + names[: nth % len(names)]:
                crew, *way = takers[name]
                calls = max(CALLS, SETTLED // way[1]) if settle else CALLS
                try:
                    times[name] += self._slowest(
                        self.crews.ask(crew, "times", way[0], way[1], calls, way[2])
                    )[calls // 4 if settle else 0 :]
                except CrewError as error:
                    del times[name]
                    self.failed(f"times of {', '.join(way[0])}, {way[1]}", error)
        assert takers.keys() & {ONE, EACH} <= times.keys(), "the base has failed"
        return {name: statistics.median(some) for name, some in times.items()}

    @staticmethod
    def _slowest(answers):
        """Of each step the time of the rank that took longest."""
        return [max(step) for step in zip(*(some for some in answers if some))]

    def end(self, family, name, crew, way):
        """After all steps of a way: finite losses, and the same bits on all ranks."""
        said = self.crews.ask(crew, "last", (family, name))
        assert all(math.isfinite(loss) for _, loss, _ in said), f"last losses {said}"
        if way.how is not None:
            same = len({weights for weights, *_ in said}) == 1
            self.results.setdefault("equal_on_all_ranks", {}).setdefault(family, {})[name] = {
                "equal": same,
                "steps": said[0][2],
            }
            assert same, f"the ranks' weights are not the same bits: {said}"

    def family(self, family):
        """Measure, then give the memory back; the last family's ways are needed for buckets."""
        ways = self.families[family]
        if self.over(family):
            return
        if family not in self.early:
            self.make({family: ways})
        self.stage(family, self.race, family, ways)
        for name, of in self._ready(family, ways).items():
            self.stage(f"end of {family}: {name}", self.end, family, name, *of)
        order = list(self.families)
        later = {self.home} | {
            crew
            for other in order[order.index(family) + 1 :]
            for crew, _ in self.families[other].values()
        }
        for crew in {crew for crew, _ in ways.values()} - self.crews.stopped.keys():
            if crew not in later:
                self.crews.stop(crew)
            elif family != REPLAYED:
                self.stage(
                    f"end of {family}",
                    self.crews.ask,
                    crew,
                    "drop",
                    *((family, name) for name in ways),
                )

    def buckets(self, sizes):
        """Other sizes of buckets, the fewest micro-batches, each in turns with the default size."""
        ready, count = self._ready(REPLAYED, self.families[REPLAYED]), min(self.bench.micro_batches)
        default = REPLAYED, "all-reduce"
        assert default[1] in ready, "there is no default to compare with"
        self.crews.ask(
            self.home,
            "drop",
            *((REPLAYED, name) for name in self.families[REPLAYED] if name != default[1]),
        )
        for size in sizes:
            key = REPLAYED, f"buckets of {size:g} MB"
            self.crews.ask(
                self.home,
                "make",
                key,
                replayed({"bucket_mb": size}, counts=(count,)),
                seconds=MAKING,
            )
            times = self.turns(
                {which: (self.home, which, count, False) for which in (default, key)}, True
            )
            assert len(times) == 2, (
                f"no times of {'; '.join(name for _, name in {default, key} - times.keys())}"
            )
            self.results.setdefault("buckets", {})[f"{size:g}"] = {
                "ms": times[key],
                "default_ms": times[default],
                "times_default": times[default] / times[key],
            }
            self.crews.ask(self.home, "drop", key)

    # ---- the network, and bits ----

    def bandwidth(self):
        """GB/s as they cross a link of each GPU (bus bandwidth, as nccl-tests counts): a size's bytes times 2 (N - 1) / N over the time, for the halves
        of an all-reduce (N - 1) / N."""
        with torch.device("meta"):
            arena = 4 * sum(p.numel() for p in Transformer(self.bench.config).parameters())
        halves, ranks = ("all_reduce", "reduce_scatter", "all_gather"), self.crews.ranks
        sizes = {
            f"{size >> 20} MiB": (size, ("all_reduce",))
            for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
            if size < arena
        }
        sizes |= {
            "a bucket": (min(arena, 32 << 20), halves),
            "the arena in bf16": (arena // 2, ("all_reduce",)),
            "the arena": (arena, halves),
        }
        answers, rows = self.crews.ask(self.home, "bandwidth", sizes, 10), {}
        for name, (size, operations) in sizes.items():
            for operation in operations:
                ms = statistics.median(self._slowest([one[name][operation] for one in answers]))
                rows.setdefault(name, {"bytes": size})[operation] = {
                    "ms": ms,
                    "bus_GB_per_s": size
                    / ms
                    / 1e6
                    * (2 if operation == "all_reduce" else 1)
                    * (ranks - 1)
                    / ranks,
                }
        self.results["bandwidth"] = rows

    def bits(self):
        answers = self.crews.ask(self.home, "bits")
        alone = answers[0]["one GPU"]["eager"]
        found = {
            name: {
                "equal on all ranks": all(one[name] == answers[0][name] for one in answers),
                "replayed equal to launched": answers[0][name]["replayed"]
                == answers[0][name]["eager"],
            }
            for name in ("all-reduce", "ordered", "sharded")
        }
        found["ordered"]["equal to one GPU"] = answers[0]["ordered"]["eager"] == alone
        self.results["bits"] = {
            "steps": self.bench.bits_steps,
            "layers": self.bench.bits_layers,
            "ways": found,
            "losses": {name: some["eager"][1] for name, some in answers[0].items()},
        }

    # ---- all of it ----

    def all(self, buckets, parts):
        self.meet(self.crews.names)
        self.make(
            {family: self.families[family] for family in self.early if family in self.families}
        )
        for family in self.families:
            self.family(family)
        if buckets and REPLAYED in self.families and not self.over("buckets"):
            self.stage("buckets", self.buckets, buckets)
        self.stage("end of all ways", self.crews.ask, self.home, "clear")
        for name, part in {"bits": self.bits, "bandwidth": self.bandwidth}.items():
            if name in parts and not self.over(name):
                self.stage(name, part)

    def memory(self):
        """Of the fullest rank, in GiB; and what each keeps of the optimizer's state."""
        for family, ways in self.results["made"].items():
            for name, said in ways.items():
                self.results.setdefault("memory", {}).setdefault(family, {})[name] = {
                    key: max(one[key] for one in said)
                    for key in ("peak_GiB", "held_GiB", "optimizer_GiB")
                    if key in said[0]
                }

    def against_torch(self):
        """Tokens/s of our ways, against torch's fastest DDP of this run."""
        families = self.results["families"]
        for count in map(str, self.bench.micro_batches):
            rates = {
                family: found[count]["DDP"]["tokens_per_s_per_gpu"]
                for family, found in families.items()
                if "DDP" in found.get(count, {})
            }
            if not rates:
                continue
            fastest = max(rates, key=rates.get)
            self.results.setdefault("fastest_torch", {})[count] = fastest
            for family in families.keys() & {OURS_EAGER, REPLAYED}:
                for name, row in families[family].get(count, {}).items():
                    if name not in (ONE, EACH):
                        row["times_torch"] = row["tokens_per_s_per_gpu"] / rates[fastest]


def measure(
    bench: Bench,
    ranks: int,
    buckets=BUCKETS,
    limit: float = math.inf,
    parts=PARTS,
    keep=lambda results: None,
    families=FAMILIES,
    early=EARLY,
) -> dict:
    """Everything (or some parts) for one number of ranks. keep(results): called at the end, also where an error or a signal ends it."""
    began, home = time.perf_counter(), families[REPLAYED][ONE][0]
    families = {name: ways for name, ways in families.items() if name in parts}
    names = dict.fromkeys(
        [*(crew for ways in families.values() for crew, _ in ways.values()), home]
    )
    with Crews({name: (Rank, bench) for name in names}, ranks, bench.device) as crews:
        run = Run(crews, bench, families, home, began, limit, early)
        try:
            run.all(buckets, parts)
        finally:
            run.memory()
            run.against_torch()
            run.results["seconds"] = time.perf_counter() - began
            keep(run.results)
    return run.results


def show(r):
    for family, counts in r["families"].items():
        for count, rows in counts.items():
            lines = [
                (
                    name,
                    m["ms"],
                    f"{m['tokens_per_s_per_gpu'] / 1e3:,.1f}K",
                    f"{m['of_one_gpu']:.1%}",
                    m["exposed_ms"],
                    f"{m['times_torch']:.2f}x" if "times_torch" in m else "",
                    *(
                        f"{r.get('memory', {}).get(family, {}).get(name, {}).get(key, math.nan):.2f}"
                        for key in ("peak_GiB", "optimizer_GiB")
                    ),
                )
                for name, m in rows.items()
            ]
            print(
                f"\n{r['ranks']} GPUs, {family}, {count} micro-batch{'es' * (count != '1')}\n"
                + common.table(
                    lines,
                    (
                        "",
                        "ms",
                        "tokens/s/GPU",
                        "of one GPU",
                        "exposed ms",
                        "torch's DDP",
                        "peak GiB",
                        "optimizer GiB",
                    ),
                )
            )
    if "fastest_torch" in r:
        print(
            "\ntorch's fastest DDP: "
            + ", ".join(f"{family} ({count})" for count, family in r["fastest_torch"].items())
        )
    for name, m in r.get("buckets", {}).items():
        print(
            f"buckets of {name} MB: {m['ms']:.2f} ms, default {m['default_ms']:.2f} ms, {m['times_default']:.3f}x as fast as that"
        )
    rows = [
        (name, m["bytes"] / 2**20, operation, some["ms"], some["bus_GB_per_s"])
        for name, m in r.get("bandwidth", {}).items()
        for operation, some in m.items()
        if operation != "bytes"
    ]
    print("\n" + common.table(rows, ("", "MiB", "collective", "ms", "bus GB/s")))
    print(
        "\nbits:",
        json.dumps({"equal_on_all_ranks": r.get("equal_on_all_ranks"), **r.get("bits", {})}),
    )
    print("failed:", json.dumps(r["failed"], indent=1), "\nleft out:", r["left_out"])


def main():
    parser = argparse.ArgumentParser(
        description="Data-parallel steps against one GPU and against torch's DDP; see this file's first lines."
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"some of: {'; '.join(PARTS)}; or a word of theirs. Nothing is written then",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of ranks (default: 2, and 4 where there are so many)",
    )
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="WAY", help="ways to leave out, such as ordered"
    )
    parser.add_argument(
        "--buckets",
        type=float,
        nargs="*",
        default=list(BUCKETS),
        metavar="MB",
        help="sizes of buckets to try beside the default",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="after this time no further part is begun (for each number of ranks)",
    )
    args = parser.parse_args()
    unknown = [word for word in args.parts if not any(word in part for part in PARTS)]
    if unknown:
        parser.error(f"no part {'; '.join(unknown)}; expected some of: {'; '.join(PARTS)}")
    parts = [part for part in PARTS if not args.parts or any(word in part for word in args.parts)]
    there = torch.cuda.device_count()
    numbers = args.gpus or [n for n in (2, 4) if n <= there]
    if not numbers or max(numbers) > there or min(numbers) < 2:
        parser.error(
            f"this machine has {there} GPU{'s' * (there != 1)}; expected 2 or more, and no more ranks than GPUs"
        )
    room = torch.cuda.get_device_properties(0).total_memory >= ROOM
    early = EARLY if room else tuple(family for family in EARLY if family != REPLAYED)
    os.environ["GPUACCEL_GPU"] = (
        "require"  # a kernel that does not run here stops the benchmark; otherwise torch would take its place
    )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM: what was measured is written")
    )
    results = {}
    nccl = {
        "version": ".".join(map(str, torch.cuda.nccl.version())),
        **{k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")},
    }

    def keep(found):
        key = str(found["ranks"])
        results[key] = json.loads(json.dumps({**found, "nccl": nccl}))
        if not args.parts:
            path = common.write(f"ddp_{key}gpus", {key: results[key]}, script="ddp")
            print("\nwritten:", path.name, flush=True)

    for ranks in numbers:
        families = {
            family: {name: way for name, way in ways.items() if name not in args.without}
            for family, ways in FAMILIES.items()
        }
        show(
            measure(
                Bench(preset("llama-350m")),
                ranks,
                args.buckets,
                args.seconds,
                parts,
                keep,
                families,
                early,
            )
        )
    failed = {n: results[str(n)]["failed"] for n in numbers if results[str(n)]["failed"]}
    if failed:
        sys.exit(f"failed: {json.dumps(failed, indent=1)}")


if __name__ == "__main__":
    main()
