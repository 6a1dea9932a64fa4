"""What each rank does in benchmarks/ddp.py: makes the ways of taking a step, takes steps, and says what it saw.

    >>> rank = Rank(0, Bench(preset("llama-350m")))             # in each process of a crew (crews.py)
    >>> rank.make("DDP", Way("torch", compiled=True, how={}))   # a model, an optimizer, a step with each number of micro-batches
    >>> rank.times("DDP", 4, 3)                                 # milliseconds of 3 steps with 4 micro-batches
"""
import contextlib
import dataclasses
import gc
import hashlib
import time
from dataclasses import dataclass

import common  # noqa: F401 (finds gpuaccel)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from crews import SECONDS, Stuck
from torch.nn.parallel import DistributedDataParallel
from workers import queued

from gpuaccel.arena import Arena
from gpuaccel.distributed import Distributed, all_gather, reduce_scatter, weight_hashes
from gpuaccel.models import Config, Transformer
from gpuaccel.optimizer import AdamW
from gpuaccel.step import TrainStep

SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Bench:
    """What all ways have in common. rows: sequences per micro-batch and GPU; graph: is "replayed" a CUDA graph? (Not on CPUs, for tests.)"""
    config: Config
    rows: int = 4
    micro_batches: tuple = (4, 1)
    device: str = "cuda"
    compile: bool = True
    graph: bool = True
    bits_layers: int = 4
    bits_steps: int = 4


@dataclass(frozen=True)
class Way:
    """One way of taking steps. make: "torch" or "ours"; how: arguments of ga.Distributed, {} for DDP; None: no word to the other ranks."""
    make: str
    compiled: bool = False
    replayed: bool = False
    accumulate: str = "arena"
    how: "dict | None" = None
    counts: tuple = ()                              # numbers of micro-batches; (): all of the benchmark's


class WithLoss(torch.nn.Module):
    """The model and its mean loss, so that DDP and torch.compile see all of forward and backward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def build(bench, config=None):
    torch.manual_seed(0)
    with torch.device(bench.device):
        return Transformer(config or bench.config)


class Peer:
    """The step in torch: fp32 weights, bf16 autocast, foreach clip, fused AdamW; DDP, synchronised in the last micro-batch only."""

    def __init__(self, rank, bench, way):
        self.bench, self.reduces, module = bench, way.how is not None, WithLoss(build(bench))
        self.parameters = list(module.parameters())
        groups = [{"params": [p for p in self.parameters if p.dim() >= 2]}, {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0}]
        self.opt = torch.optim.AdamW(groups, **SETTINGS, fused=True)
        self.module = module
        if self.reduces:
            self.module = DistributedDataParallel(module, device_ids=[rank] if bench.device == "cuda" else None, gradient_as_bucket_view=True,
                                                  broadcast_buffers=False, **way.how)
        self.call = torch.compile(self.module, dynamic=False) if way.compiled and bench.compile else self.module
        self.quiet = self.module.no_sync if self.reduces else contextlib.nullcontext

    def run(self, batch, count: int):
        total, parts = 0.0, list(zip(*(t.chunk(count) for t in batch)))
        for nth, (inputs, targets) in enumerate(parts):
            with self.quiet() if nth < len(parts) - 1 else contextlib.nullcontext():
                with torch.autocast(self.bench.device, torch.bfloat16):
                    loss = self.call(inputs, targets) / count
                loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.opt.step()
        self.opt.zero_grad(set_to_none=not self.reduces)     # DDP's gradients stay in its buckets
        self.loss = total

    def close(self):
        pass


class Ours:
    """The step in gpuaccel: bf16 weights with fp32 masters, ga.AdamW."""

    def __init__(self, rank, bench, way):
        model = build(bench).bfloat16()
        self.opt = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        graph = way.replayed and bench.graph
        self.step = TrainStep(model, self.opt, micro_batches=max(bench.micro_batches), accumulate=way.accumulate, compile=way.compiled and bench.compile,
                              replay="graph" if graph else "eager", policy="require" if graph else "auto",
                              distributed=None if way.how is None else Distributed(**way.how))
        assert way.how is None or self.step.ranks is not None or dist.get_world_size() == 1

    def run(self, batch, count: int):
        self.step.micro_batches = count
        self.loss = self.step(batch).loss

    def close(self):
        self.step.close(alone=True)


class Rank:
    """A rank's life: ways by name, each made, asked for times, and dropped."""

    def __init__(self, rank, bench: Bench):
        self.rank, self.bench, self.ranks, self.ways = rank, bench, dist.get_world_size(), {}
        self.taken = {}
        self.cuda = bench.device == "cuda"
        most = bench.rows * max(bench.micro_batches)
        tokens = torch.randint(0, bench.config.vocab, (most, bench.config.T + 1), generator=torch.Generator().manual_seed(1 + rank)).to(bench.device)
        self.batches = {count: (tokens[:bench.rows * count, :-1].contiguous(), tokens[:bench.rows * count, 1:].contiguous()) for count in bench.micro_batches}

    def meet(self):
        """A first word to all: what NCCL does when it begins is over."""
        one = torch.ones(1, device=self.bench.device)
        dist.all_reduce(one)
        return int(one)

    def make(self, name, way: Way) -> dict:
        """Takes a step with each number of micro-batches: what is compiled or captured is so afterwards. Memory in GiB, above what was there."""
        before, began = self._fresh(), time.perf_counter()
        made = self.ways[name] = (Peer if way.make == "torch" else Ours)(self.rank, self.bench, way)
        self.taken[name], first = 0, None
        for count in way.counts or self.bench.micro_batches:
            self._take(name, count)
            self._finish()
            first = float(made.loss) if first is None else first
        moments = [t for state in made.opt.state.values() for key, t in state.items() if key != "step"]
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in moments}
        found = {"seconds": time.perf_counter() - began, "first_loss": first, "optimizer_GiB": sum(kept.values()) / 2**30}
        if self.cuda:
            found |= {"peak_GiB": (torch.cuda.max_memory_allocated() - before) / 2**30, "held_GiB": (torch.cuda.memory_allocated() - before) / 2**30,
                      "reserved_GiB": torch.cuda.memory_reserved() / 2**30}
        return found

    def _finish(self, seconds: float = SECONDS):
        """Wait for the GPU. Stuck where it does not finish: nothing else ends a collective that hangs in a graph."""
        if self.cuda:
            event, until = torch.cuda.Event(), time.monotonic() + seconds
            event.record()
            while not event.query():
                if time.monotonic() > until:
                    raise Stuck(f"the GPU has not finished a step for {seconds:g} s")
                time.sleep(1e-3)

    def _fresh(self) -> int:
        """Give back what nothing uses, forget the peak. Bytes that are allocated now."""
        if not self.cuda:
            return 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _take(self, name, count):
        self.ways[name].run(self.batches[count], count)
        self.taken[name] += 1

    def times(self, name, count: int, calls: int, alone: bool = False) -> "list[float]":
        """Milliseconds of steps that are queued one behind the other. alone: on the first GPU, the others have a rest."""
        if alone and self.rank:
            return []
        return self._queued(lambda: self._take(name, count), calls)

    def _queued(self, run, calls):
        if self.cuda:
            return queued(run, calls)
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        return times

    def last(self, name) -> list:
        """[hash of the weights' bits (None: torch's), last loss, steps taken]."""
        made = self.ways[name]
        return [_hashes(made.step) if isinstance(made, Ours) else None, float(made.loss), self.taken[name]]

    def drop(self, *names):
        """Those of them that are there."""
        for name in self.ways.keys() & set(names):
            self.ways.pop(name).close()
        self._fresh()

    def clear(self):
        self.drop(*self.ways)

    # ---- the network alone ----

    def bandwidth(self, sizes: dict, calls: int) -> dict:
        """name -> operation -> milliseconds of each of some collectives of that many bytes, one behind the other.

        sizes: name -> (bytes, operations)."""
        dtype, found = torch.float32, {}
        big = torch.zeros(max(size for size, _ in sizes.values()) // 4 // self.ranks * self.ranks, dtype=dtype, device=self.bench.device)
        for name, (size, operations) in sizes.items():
            t = big[:size // 4 // self.ranks * self.ranks]
            part = t[self.rank * len(t) // self.ranks:(self.rank + 1) * len(t) // self.ranks]
            runs = {"all_reduce": lambda: dist.all_reduce(t), "reduce_scatter": lambda: reduce_scatter(part, t),
                    "all_gather": lambda: all_gather(t, part if self.cuda else part.clone())}
            found[name] = {operation: self._queued(runs[operation], calls) for operation in operations}
        return found

    # ---- bits ----

    def bits(self) -> dict:
        """A few deterministic steps of a shallower model. How the ranks add -> how they launch -> [hash of the weights, losses]."""
        found = {}
        for name, how in (("all-reduce", {}), ("ordered", {"ordered": True}), ("sharded", {"sharded": True}), ("one GPU", None)):
            found[name] = {launch: self._trained(how, launch == "replayed") for launch in (("eager", "replayed") if how is not None else ("eager",))}
        return found

    def _trained(self, how, replayed) -> list:
        """how None: this rank alone takes all micro-batches, in global order: number m of rank r is m * ranks + r."""
        bench, micros, losses = self.bench, 2, []
        config = dataclasses.replace(bench.config, layers=min(bench.bits_layers, bench.config.layers))
        model = build(bench, config).bfloat16()
        opt = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        graph = replayed and bench.graph
        step = TrainStep(model, opt, micro_batches=micros * (1 if how is not None else self.ranks), replay="graph" if graph else "eager",
                         policy="require" if graph else "auto", deterministic=True, distributed=None if how is None else Distributed(**how))
        for nth in range(bench.bits_steps):
            tokens = torch.randint(0, config.vocab, (micros, self.ranks, bench.rows, config.T + 1), generator=torch.Generator().manual_seed(nth))
            mine = (tokens[:, self.rank] if how is not None else tokens).reshape(-1, config.T + 1).to(bench.device)
            losses.append(float(step((mine[:, :-1].contiguous(), mine[:, 1:].contiguous())).loss))
        found = [_hashes(step), losses]
        step.close(alone=True)
        del step, opt, model
        self._fresh()
        return found


def _hashes(step: TrainStep) -> str:
    """Of all weights' bits; with shares without the masters, of which each rank has its own."""
    shared = step.ranks is not None and step.ranks.sharded
    return hashlib.sha256(str(weight_hashes(step.arena, masters=not shared).tolist()).encode()).hexdigest()[:16]
