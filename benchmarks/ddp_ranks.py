"""What each rank does in benchmarks/ddp.py: make variants of a step, take steps, report.

>>> rank = Rank(0, Bench(preset("llama-350m")))                 # in each process of RankWorkers
>>> rank.make("DDP", Variant("torch", replayed=True, options={}))
>>> rank.times("DDP", 4, 3)                                     # ms of 3 steps of 4 micro-batches
"""

import contextlib
import functools
import hashlib
import time
from dataclasses import dataclass

import common  # noqa: F401 (finds gpuaccel)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp import first_weights, fully_sharded, local, mesh_of, synchronize
from timing import host_milliseconds, queued, release, repeat, reset_peaks
from torch.nn.parallel import DistributedDataParallel
from training import SETTINGS, build, captured_adamw, decay_groups, token_batch
from workers import TIMEOUT, Stuck

from gpuaccel.distributed.agreement import weight_hashes
from gpuaccel.distributed.config import Distributed
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.models import Config
from gpuaccel.training.step import TrainStep

# Steps before a first capture, and before later ones.
FIRST_WARM_UP, LATER_WARM_UP = 13, 3
# Replays that tell how gradients are zeroed faster.
TRIALS = 10
# Collectives alone, in one CUDA graph.
COLLECTIVES = 8
# How far a replayed step's weights may be from a launched one's, relative to their change.
REPLAY_ERROR = 0.05


@dataclass(frozen=True)
class Bench:
    """What all variants have in common.

    rows: sequences per micro-batch and GPU
    graph: replayed variants use a CUDA graph; not on CPUs (for tests)
    """

    config: Config
    rows: int = 4
    micro_batches: tuple = (4, 1)
    device: str = "cuda"
    compile: bool = True
    graph: bool = True


@dataclass(frozen=True)
class Variant:
    """One variant of a step, which is compiled.

    make: "torch", "FSDP2" (torch's, too) or "ours"
    replayed: from a CUDA graph; torch's can then be launched, too
    options: arguments of DDP or of ga.Distributed; None: no communication
    """

    make: str
    replayed: bool = False
    options: dict | None = None


class WithLoss(torch.nn.Module):
    """The model in bf16 autocast and its mean loss: DDP and torch.compile see all of forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def rank_batch(bench, rank) -> tuple:
    """(inputs, targets) for the most micro-batches; each rank has its own."""
    rows = bench.rows * max(bench.micro_batches)
    return token_batch(bench.config.vocab, rows, bench.config.T, 1 + rank, bench.device)


def step_times(run, calls: int, cuda: bool) -> list[float]:
    """Milliseconds of each of `calls` runs, queued back to back."""
    if cuda:
        return queued(run, calls)
    return [host_milliseconds(run) for _ in range(calls)]


# ---- torch --------------------------------------------------------------------------------------


class Peer:
    """The step in torch: fp32 weights, bf16 autocast, foreach clip, fused AdamW.

    DDP and FSDP2 (fsdp.py) synchronize gradients in the last micro-batch only."""

    def __init__(self, rank, bench, variant):
        self.bench = bench
        self.shards = variant.make == "FSDP2"
        compiled = bench.compile
        reduces = variant.options is not None
        if self.shards:
            self.module = fully_sharded(bench, compiled, mesh_of(bench.device, not reduces))
        else:
            self.module = WithLoss(build(bench.config, device=bench.device))
        self.parameters = list(self.module.parameters())
        # DDP's gradients stay in its buckets.
        self.in_buckets = reduces and not self.shards
        self.no_sync = contextlib.nullcontext
        if variant.replayed and bench.graph:
            self.optimizer = captured_adamw(self.parameters, bench.device)
        else:
            groups = decay_groups(self.parameters)
            self.optimizer = torch.optim.AdamW(groups, **SETTINGS, fused=True)
        if compiled and not self.shards:
            self.module.compile(dynamic=False)
        if self.in_buckets:
            self.module = DistributedDataParallel(
                self.module,
                device_ids=[rank] if bench.device == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                **variant.options,
            )
            self.no_sync = self.module.no_sync

    def step(self, batch, count: int):
        """Add gradients to those that are there, and update. Returns the sum of the losses."""
        total, micro_batches = 0.0, list(zip(*(t.chunk(count) for t in batch)))
        for index, (inputs, targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            if self.shards:
                synchronize(self.module, last)
            with contextlib.nullcontext() if last else self.no_sync():
                loss = self.module(inputs, targets) / count
                loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        return total

    def run(self, batch, count: int):
        self.loss = self.step(batch, count)
        self.optimizer.zero_grad(set_to_none=not self.in_buckets)

    def state(self) -> list[torch.Tensor]:
        """What a step changes on this rank: the weights, then the optimizer's state."""
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        return [local(t.detach()) for t in (*self.parameters, *moments)]

    def peak(self) -> int:
        """Most bytes allocated in a step, and while it is compiled."""
        return torch.cuda.max_memory_allocated()

    def hash(self) -> str:
        """Of all bits of this rank's weights: of each tensor their sum."""
        bits = [local(p.detach()).view(torch.int32) for p in self.parameters]
        return digest(torch.stack([each.sum(dtype=torch.int64) for each in bits]))

    def close(self):
        pass


class Captured(Peer):
    """The peer's whole step as one CUDA graph for each number of micro-batches.

    torch's notes on CUDA graphs ask of DDP that it is made on the stream that captures, and takes
    at least 11 synchronized steps there. Its buckets stay the same after that, and it times no step
    before the hundredth. Capture is "thread_local", so that NCCL's watchdog may query its events.
    torch.compile splits the model at DDP's buckets, and each bucket is reduced when its part's
    backward has ended. Gradients are zeroed in place or set to None, whichever is faster. At the
    end weights and optimizer are reset: the first run() is the first step."""

    def __init__(self, rank, bench, variant):
        self.graphs = {}
        self.warm_up = FIRST_WARM_UP
        self.most = 0
        self.stream = pool = None
        capturing = contextlib.nullcontext()
        if bench.graph:
            self.stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self.stream.wait_stream(torch.cuda.current_stream())
            capturing = torch.cuda.stream(self.stream)
        counts = bench.micro_batches
        with capturing:
            super().__init__(rank, bench, variant)
            # What the graphs read.
            self.batch = rank_batch(bench, rank)
            self.to_none = self._none_is_faster(min(counts))
            for count in counts:
                self.graphs[count] = self._record(count, self.to_none, pool)
                if bench.graph:
                    self.most = max(self.most, torch.cuda.max_memory_allocated())
                self._check(count)
            self._reset()
        if bench.graph:
            torch.cuda.synchronize()

    def launched(self, count: int, to_none: bool):
        """A step of the static batch, launched from Python.

        Gradients are zeroed at its beginning: the graphs share them, and none relies on what
        another one leaves."""
        self.optimizer.zero_grad(set_to_none=to_none)
        return self.step([t[: self.bench.rows * count] for t in self.batch], count)

    def run(self, batch, count: int):
        torch._foreach_copy_([t[: len(batch[0])] for t in self.batch], list(batch))
        self.graphs[count].replay()
        self.loss = self.graphs[count].total.clone()

    def launch(self, batch, count: int):
        """The same step, launched from Python."""
        torch._foreach_copy_([t[: len(batch[0])] for t in self.batch], list(batch))
        if self.stream is None:
            self.loss = self.launched(count, self.to_none)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.loss = self.launched(count, self.to_none)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _none_is_faster(self, count) -> bool:
        """Whether setting gradients to None is faster than zeroing them. All ranks agree.

        The least of several times counts: other workers may compile on the same GPU."""
        times = []
        for to_none in (False, True):
            graph = self._record(count, to_none)
            times.append(min(step_times(graph.replay, TRIALS, self.bench.graph)))
            graph.close()
            self.optimizer.zero_grad(set_to_none=True)
        slowest = torch.tensor(times, device=self.bench.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        zeroed, none = slowest.tolist()
        return none < zeroed

    def _record(self, count, to_none, pool=None) -> "Recording":
        if self.bench.graph:
            reset_peaks()
        for _ in range(self.warm_up):
            self.launched(count, to_none)
        self.warm_up = LATER_WARM_UP
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

        error = distance(launched) / distance(before[: len(weights)])
        errors = torch.stack([error, (graph.total - loss).abs()])
        # A check that fails does so on all ranks.
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        error, loss_error = errors.tolist()
        assert error < REPLAY_ERROR and loss_error < REPLAY_ERROR, (
            f"{count} micro-batches: replayed and launched, a step changes the weights differently "
            f"by {error:.1e} of the change and the loss by {loss_error:.1e}; "
            f"expected < {REPLAY_ERROR:g}"
        )

    def _reset(self):
        """The first weights and an optimizer without a step, in the same memory."""
        state = self.state()
        if self.shards:
            first = first_weights(self.bench, self.parameters)
        else:
            model = build(self.bench.config, device=self.bench.device)
            first = [p.detach() for p in model.parameters()]
        torch._foreach_copy_(state[: len(first)], first)
        torch._foreach_zero_(state[len(first) :])
        if self.to_none:
            self.optimizer.zero_grad(set_to_none=True)

    def peak(self) -> int:
        """Without the memory of the checks and of the slower kind of zeroing."""
        return self.most

    def close(self):
        """Graphs end before their process group, which would wait for them."""
        for graph in self.graphs.values():
            graph.close()


class Recording:
    """launch() as a CUDA graph that `stream` captures: replay() takes the step, total is its loss.

    stream None (on CPUs, for tests): replay() launches."""

    def __init__(self, launch, stream, pool):
        self.launch = launch
        self.graph = None
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


# ---- gpuaccel -----------------------------------------------------------------------------------


class Ours:
    """The step in gpuaccel: bf16 weights with fp32 masters, ga.AdamW."""

    def __init__(self, rank, bench, variant):
        model = build(bench.config, torch.bfloat16, bench.device)
        self.optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        graph = variant.replayed and bench.graph
        reduces = variant.options is not None
        self.step = TrainStep(
            model,
            self.optimizer,
            micro_batches=max(bench.micro_batches),
            compile=bench.compile,
            replay=Replay(policy="require") if graph else "eager",
            distributed=(
                Distributed(broadcast_buffers=False, **variant.options) if reduces else None
            ),
        )
        assert not reduces or self.step.reducer is not None or dist.get_world_size() == 1

    def run(self, batch, count: int):
        self.step.micro_batches = count
        self.loss = self.step(batch).loss

    launch = run

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def hash(self) -> str:
        """Of all weights' bits; sharded, each rank has its own masters, and they do not count."""
        sharded = self.step.reducer is not None and self.step.reducer.sharded
        return digest(weight_hashes(self.step.arena, masters=not sharded))

    def close(self):
        self.step.close(alone=True)


# ---- a rank -------------------------------------------------------------------------------------


class Rank:
    """One rank: variants by name, each made, asked for times, and dropped."""

    def __init__(self, rank, bench: Bench):
        self.rank = rank
        self.ranks = dist.get_world_size()
        self.bench = bench
        self.cuda = bench.device == "cuda"
        self.variants = {}
        batch = rank_batch(bench, rank)
        self.batches = {
            count: tuple(t[: bench.rows * count] for t in batch) for count in bench.micro_batches
        }

    def meet(self):
        """A first collective, which initializes NCCL."""
        one = torch.ones(1, device=self.bench.device)
        dist.all_reduce(one)
        return int(one)

    def make(self, name, variant: Variant) -> dict:
        """Make a variant and take a step with each number of micro-batches, which compiles and
        captures it. Memory is in GiB, above what was there."""
        before, began = self._bytes_after_release(), time.perf_counter()
        if variant.make == "ours":
            make = Ours
        else:
            make = Captured if variant.replayed else Peer
        made = self.variants[name] = make(self.rank, self.bench, variant)
        first_loss = None
        for count in self.bench.micro_batches:
            made.run(self.batches[count], count)
            self._finish()
            first_loss = float(made.loss) if first_loss is None else first_loss
        moments = [
            t
            for state in made.optimizer.state.values()
            for key, t in state.items()
            if key != "step"
        ]
        result = {
            "seconds": time.perf_counter() - began,
            "first_loss": first_loss,
            "optimizer_GiB": sum(local(t).nbytes for t in moments) / 2**30,
        }
        if self.cuda:
            result["peak_GiB"] = (made.peak() - before) / 2**30
            result["held_GiB"] = (torch.cuda.memory_allocated() - before) / 2**30
            # Other workers make their variants on the same GPU.
            torch.cuda.empty_cache()
        return result

    def _finish(self, timeout: float = TIMEOUT):
        """Wait for the GPU. Raises Stuck after `timeout` seconds.

        Nothing else ends a collective that hangs in a graph."""
        if self.cuda:
            event, deadline = torch.cuda.Event(), time.monotonic() + timeout
            event.record()
            while not event.query():
                if time.monotonic() > deadline:
                    raise Stuck(f"the GPU has not finished a step for {timeout:g} s")
                time.sleep(1e-3)

    def _bytes_after_release(self) -> int:
        """Give unused memory back and forget the peak. Returns the bytes allocated now."""
        if not self.cuda:
            return 0
        reset_peaks()
        return torch.cuda.memory_allocated()

    def times(
        self, name, count: int, calls: int, alone: bool = False, launched: bool = False
    ) -> list[float]:
        """Milliseconds of steps that are queued back to back; launched: of one of them, by the
        host's clock.

        alone: on the first GPU, while the others rest"""
        if alone and self.rank:
            return []
        if not launched:
            run = functools.partial(self.variants[name].run, self.batches[count], count)
            return step_times(run, calls, self.cuda)

        launch = functools.partial(self.variants[name].launch, self.batches[count], count)

        def many():
            repeat(launch, calls)
            self._finish()

        # The first one is not counted: a new shape may be compiled.
        launch()
        self._finish()
        return [host_milliseconds(many) / calls]

    def last(self, name) -> list:
        """[hash of the weights' bits, last loss]."""
        made = self.variants[name]
        return [made.hash(), float(made.loss)]

    def drop(self, *names):
        """Close these variants, as far as they are there."""
        for name in self.variants.keys() & set(names):
            self.variants.pop(name).close()
        if self.cuda:
            release()

    def clear(self):
        self.drop(*self.variants)

    def bandwidth(self, sizes: dict) -> dict:
        """name -> milliseconds of some all-reduces. Each is the mean of COLLECTIVES, which on a GPU
        are one CUDA graph, as in a replayed step: the host's speed does not count.

        sizes: name -> bytes"""
        buffer = torch.zeros(max(sizes.values()) // 4, device=self.bench.device)
        return {name: self._all_reduces(buffer[: size // 4]) for name, size in sizes.items()}

    def _all_reduces(self, t) -> list[float]:
        run = functools.partial(dist.all_reduce, t)
        # The first one connects the ranks.
        run()
        several = functools.partial(repeat, run, COLLECTIVES)
        recording = Recording(several, torch.cuda.Stream() if self.cuda else None, None)
        times = step_times(recording.replay, 5, self.cuda)
        recording.close()
        return [ms / COLLECTIVES for ms in times]


def digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(str(numbers.tolist()).encode()).hexdigest()[:16]
