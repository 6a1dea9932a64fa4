"""What each rank does in benchmarks/ddp.py: makes the ways of taking a step, takes steps, and says what it saw.

>>> rank = Rank(0, Bench(preset("llama-350m")))             # in each process of a crew (crews.py)
>>> rank.make("DDP", Way("torch", compiled=True, how={}))   # a model, an optimizer, a step with each number of micro-batches
>>> rank.times("DDP", 4, 3)                                 # milliseconds of 3 steps with 4 micro-batches
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import time
from dataclasses import dataclass

import common  # noqa: F401 (finds gpuaccel)
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from crews import SECONDS, Stuck
from torch.nn.parallel import DistributedDataParallel
from workers import queued

from gpuaccel.distributed.agreement import weight_hashes
from gpuaccel.distributed.collectives import all_gather, reduce_scatter
from gpuaccel.distributed.config import Distributed
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import Config, Transformer
from gpuaccel.training.step import TrainStep

SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARM_UP, AGAIN = 13, 3  # steps before a first capture, and before later ones
TRIALS = 10  # replays that tell which way to zero gradients is faster
APART = 0.05  # a replayed step's weights from a launched one's, of their change


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
    """One way of taking steps. make: "torch" or "ours"; how: arguments of DDP or of ga.Distributed;
    None: no word to the other ranks."""

    make: str
    compiled: bool = False
    replayed: bool = False
    accumulate: str = "arena"
    how: "dict | None" = None
    optimize_ddp: bool = False  # torch.compile splits the model at DDP's buckets (DDPOptimizer)
    counts: tuple = ()  # numbers of micro-batches; (): all of the benchmark's


class WithLoss(torch.nn.Module):
    """The model in bf16 autocast and its mean loss: DDP and torch.compile see all of forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def build(bench, config=None):
    torch.manual_seed(0)
    with torch.device(bench.device):
        return Transformer(config or bench.config)


def random_batch(bench, rank) -> tuple:
    """(inputs, targets) for the most micro-batches, the rank's own."""
    size = bench.rows * max(bench.micro_batches), bench.config.T + 1
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(0, bench.config.vocab, size, generator=generator).to(bench.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timed(run, calls: int, cuda: bool) -> "list[float]":
    """Milliseconds of each of some runs, one behind the other."""
    if cuda:
        return queued(run, calls)
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return times


class Peer:
    """The step in torch: fp32 weights, bf16 autocast, foreach clip, fused AdamW; DDP, synchronised
    in the last micro-batch only."""

    def __init__(self, rank, bench, way):
        self.bench, self.reduces, module = bench, way.how is not None, WithLoss(build(bench))
        self.parameters = list(module.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2]},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        settings = dict(SETTINGS)
        if way.replayed and bench.graph:
            lr = torch.tensor(SETTINGS["lr"], device=bench.device)
            settings |= {"lr": lr, "capturable": True}
        self.opt = torch.optim.AdamW(groups, **settings, fused=True)
        if way.compiled and bench.compile:
            module.compile(dynamic=False)
        self.module = module
        if self.reduces:
            device_ids = [rank] if bench.device == "cuda" else None
            self.module = DistributedDataParallel(
                module,
                device_ids=device_ids,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                **way.how,
            )
        self.quiet = self.module.no_sync if self.reduces else contextlib.nullcontext

    def step(self, batch, count: int):
        """Gradients are added to those that are there. The sum of the losses."""
        total, parts = 0.0, list(zip(*(t.chunk(count) for t in batch)))
        for nth, (inputs, targets) in enumerate(parts):
            with self.quiet() if nth < len(parts) - 1 else contextlib.nullcontext():
                loss = self.module(inputs, targets) / count
                loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.opt.step()
        return total

    def run(self, batch, count: int):
        self.loss = self.step(batch, count)
        self.opt.zero_grad(set_to_none=not self.reduces)  # DDP's gradients stay in its buckets

    def state(self) -> "list[torch.Tensor]":
        """Everything that a step changes."""
        kept = [t for state in self.opt.state.values() for t in state.values()]
        return [*(p.detach() for p in self.parameters), *kept]

    def peak(self) -> int:
        """Most bytes allocated in a step, and while it is compiled."""
        return torch.cuda.max_memory_allocated()

    def hash(self) -> str:
        """Of all weights' bits: sums, each element's bits times an odd number of its own."""
        sums = []
        for p in self.parameters:
            bits = p.detach().flatten().view(torch.int32).long()
            sums.append(bits.mul_(torch.arange(1, 2 * len(bits), 2, device=p.device)).sum())
        return _digest(torch.stack(sums))

    def close(self):
        pass


class Captured(Peer):
    """The peer's whole step as one CUDA graph for each number of micro-batches.

    What torch's notes on CUDA graphs ask of DDP: it is made on the stream that captures, and takes
    more than 11 synchronised steps there. Its buckets stay after that, and it times no step before
    the hundredth. Capture is "thread_local", so that NCCL's watchdog may look at its events.
    With optimize_ddp the model is compiled in as many graphs as DDP has buckets, and each bucket goes
    when its graph's backward is over; without, the model is one graph. Gradients are zeroed in place or set to
    None, whichever is faster. In the end all begins anew: the first run() is the first step."""

    def __init__(self, rank, bench, way):
        self.graphs, self.warm_up, self.apart, self.most = {}, WARM_UP, 0.0, 0
        self.stream = pool = None
        capturing = contextlib.nullcontext()
        if bench.graph:
            self.stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            capturing = torch.cuda.stream(self.stream)
        counts = way.counts or bench.micro_batches
        with capturing, torch._dynamo.config.patch(optimize_ddp=way.optimize_ddp):
            super().__init__(rank, bench, way)
            self.batch = random_batch(bench, rank)  # what the graphs read
            self.to_none = self._faster(min(counts))
            for count in counts:
                self.graphs[count] = self._record(count, self.to_none, pool)
                if bench.graph:
                    self.most = max(self.most, torch.cuda.max_memory_allocated())
                self._check(count)
            self._begin_anew()
        if bench.graph:
            torch.cuda.synchronize()

    def launched(self, count: int, to_none: bool):
        """A step of the static batch, launched from Python. Gradients are zeroed at its beginning:
        the graphs share them, and none relies on what another one leaves."""
        self.opt.zero_grad(set_to_none=to_none)
        return self.step([t[: self.bench.rows * count] for t in self.batch], count)

    def run(self, batch, count: int):
        torch._foreach_copy_([t[: len(batch[0])] for t in self.batch], list(batch))
        self.graphs[count].replay()
        self.loss = self.graphs[count].total.clone()

    def _faster(self, count) -> bool:
        """Is it faster to set gradients to None than to zero them? All ranks agree. The least of some
        times: other crews may compile on the same GPU."""
        times = []
        for to_none in (False, True):
            graph = self._record(count, to_none)
            times.append(min(timed(graph.replay, TRIALS, self.bench.graph)))
            graph.close()
            self.opt.zero_grad(set_to_none=True)
        slowest = torch.tensor(times, device=self.bench.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        zeroed, none = slowest.tolist()
        return none < zeroed

    def _record(self, count, to_none, pool=None) -> "Recording":
        if self.bench.graph:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(self.warm_up):
            self.launched(count, to_none)
        self.warm_up = AGAIN
        return Recording(functools.partial(self.launched, count, to_none), self.stream, pool)

    def _check(self, count):
        """A replay changes the weights as the same step does that is launched from Python."""
        graph, state = self.graphs[count], self.state()
        weights, before = state[: len(self.parameters)], [t.clone() for t in state]
        loss = self.launched(count, self.to_none)
        launched = [t.clone() for t in weights]
        torch._foreach_copy_(state, before)
        graph.replay()

        def distance(others):
            return torch.stack(torch._foreach_norm(torch._foreach_sub(weights, others))).norm()

        apart, changed = distance(launched), distance(before[: len(weights)])
        worst = torch.stack([apart / changed, (graph.total - loss).abs()])
        dist.all_reduce(worst, dist.ReduceOp.MAX)  # what fails does so on all ranks
        apart, loss_apart = worst.tolist()
        self.apart = max(self.apart, apart)
        assert apart < APART and loss_apart < APART, (
            f"{count} micro-batches: replayed and launched, a step changes the weights differently "
            f"by {apart:.1e} of the change and the loss by {loss_apart:.1e}; expected < {APART:g}"
        )

    def _begin_anew(self):
        """The first weights and an optimizer without a step, in the same memory."""
        state = self.state()
        first = [p.detach() for p in build(self.bench).parameters()]
        torch._foreach_copy_(state[: len(first)], first)
        torch._foreach_zero_(state[len(first) :])
        if self.to_none:
            self.opt.zero_grad(set_to_none=True)

    def peak(self) -> int:
        """Without what the checks and the slower way of zeroing have taken."""
        return self.most

    def close(self):
        """Graphs end before their process group, which would wait for them."""
        for graph in self.graphs.values():
            graph.close()


class Recording:
    """launch() as a CUDA graph that stream captures: replay() takes the step, total is its loss.

    stream None (on CPUs, for tests): replay() launches."""

    def __init__(self, launch, stream, pool):
        self.launch, self.graph = launch, None
        if stream is not None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self.total = launch()

    def replay(self):
        if self.graph is None:
            self.total = self.launch()
        else:
            self.graph.replay()

    def close(self):
        self.total = None
        if self.graph is not None:
            self.graph.reset()


class Ours:
    """The step in gpuaccel: bf16 weights with fp32 masters, ga.AdamW."""

    def __init__(self, rank, bench, way):
        model = build(bench).bfloat16()
        self.opt = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        graph = way.replayed and bench.graph
        self.step = TrainStep(
            model,
            self.opt,
            micro_batches=max(bench.micro_batches),
            accumulate=way.accumulate,
            compile=way.compiled and bench.compile,
            replay=Replay(policy="require") if graph else "eager",
            distributed=None if way.how is None else Distributed(**way.how),
        )
        assert way.how is None or self.step.reducer is not None or dist.get_world_size() == 1

    def run(self, batch, count: int):
        self.step.micro_batches = count
        self.loss = self.step(batch).loss

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def hash(self) -> str:
        return _hash(self.step)

    def close(self):
        self.step.close(alone=True)


class Rank:
    """A rank's life: ways by name, each made, asked for times, and dropped."""

    def __init__(self, rank, bench: Bench):
        self.rank, self.bench, self.ranks, self.ways = rank, bench, dist.get_world_size(), {}
        self.taken = {}
        self.cuda = bench.device == "cuda"
        batch = random_batch(bench, rank)
        self.batches = {
            count: tuple(t[: bench.rows * count] for t in batch) for count in bench.micro_batches
        }

    def meet(self):
        """A first word to all: what NCCL does when it begins is over."""
        one = torch.ones(1, device=self.bench.device)
        dist.all_reduce(one)
        return int(one)

    def make(self, name, way: Way) -> dict:
        """Takes a step with each number of micro-batches: what is compiled or captured is so afterwards. Memory in GiB, above what was there."""
        before, began = self._fresh(), time.perf_counter()
        make = Ours if way.make == "ours" else Captured if way.replayed else Peer
        made = self.ways[name] = make(self.rank, self.bench, way)
        self.taken[name], first = 0, None
        for count in way.counts or self.bench.micro_batches:
            self._take(name, count)
            self._finish()
            first = float(made.loss) if first is None else first
        moments = [
            t for state in made.opt.state.values() for key, t in state.items() if key != "step"
        ]
        found = {
            "seconds": time.perf_counter() - began,
            "first_loss": first,
            "optimizer_GiB": sum(t.nbytes for t in moments) / 2**30,
        }
        if self.cuda:
            found |= {
                "peak_GiB": (made.peak() - before) / 2**30,
                "held_GiB": (torch.cuda.memory_allocated() - before) / 2**30,
                "reserved_GiB": torch.cuda.memory_reserved() / 2**30,
            }
            torch.cuda.empty_cache()  # other crews make theirs on the same GPU
        if isinstance(made, Captured):
            found |= {
                "replay_apart": made.apart,
                "gradients": "set to None" if made.to_none else "zeroed in place",
            }
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
        return timed(lambda: self._take(name, count), calls, self.cuda)

    def last(self, name) -> list:
        """[hash of the weights' bits, last loss, steps taken]."""
        made = self.ways[name]
        return [made.hash(), float(made.loss), self.taken[name]]

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
        big = torch.zeros(
            max(size for size, _ in sizes.values()) // 4 // self.ranks * self.ranks,
            dtype=dtype,
            device=self.bench.device,
        )
        for name, (size, operations) in sizes.items():
            t = big[: size // 4 // self.ranks * self.ranks]
            part = t[self.rank * len(t) // self.ranks : (self.rank + 1) * len(t) // self.ranks]
            runs = {
                "all_reduce": lambda: dist.all_reduce(t),
                "reduce_scatter": lambda: reduce_scatter(part, t),
                "all_gather": lambda: all_gather(t, part if self.cuda else part.clone()),
            }
            found[name] = {
                operation: timed(runs[operation], calls, self.cuda) for operation in operations
            }
        return found

    # ---- bits ----

    def bits(self) -> dict:
        """A few deterministic steps of a shallower model. How the ranks add -> how they launch -> [hash of the weights, losses]."""
        found = {}
        for name, how in (
            ("all-reduce", {}),
            ("ordered", {"ordered": True}),
            ("sharded", {"sharded": True}),
            ("one GPU", None),
        ):
            found[name] = {
                launch: self._trained(how, launch == "replayed")
                for launch in (("eager", "replayed") if how is not None else ("eager",))
            }
        return found

    def _trained(self, how, replayed) -> list:
        """how None: this rank alone takes all micro-batches, in global order: number m of rank r is m * ranks + r."""
        bench, micros, losses = self.bench, 2, []
        config = dataclasses.replace(
            bench.config, layers=min(bench.bits_layers, bench.config.layers)
        )
        model = build(bench, config).bfloat16()
        opt = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        graph = replayed and bench.graph
        step = TrainStep(
            model,
            opt,
            micro_batches=micros * (1 if how is not None else self.ranks),
            replay=Replay(policy="require") if graph else "eager",
            deterministic=True,
            distributed=None if how is None else Distributed(**how),
        )
        for nth in range(bench.bits_steps):
            tokens = torch.randint(
                0,
                config.vocab,
                (micros, self.ranks, bench.rows, config.T + 1),
                generator=torch.Generator().manual_seed(nth),
            )
            mine = (
                (tokens[:, self.rank] if how is not None else tokens)
                .reshape(-1, config.T + 1)
                .to(bench.device)
            )
            losses.append(float(step((mine[:, :-1].contiguous(), mine[:, 1:].contiguous())).loss))
        found = [_hash(step), losses]
        step.close(alone=True)
        del step, opt, model
        self._fresh()
        return found


def _hash(step: TrainStep) -> str:
    """Of all weights' bits; with shares without the masters, of which each rank has its own."""
    shared = step.reducer is not None and step.reducer.sharded
    return _digest(weight_hashes(step.arena, masters=not shared))


def _digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(str(numbers.tolist()).encode()).hexdigest()[:16]
