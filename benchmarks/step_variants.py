"""One optimizer step in torch and in gpuaccel, for the benchmarks of whole steps.

A Task says what a step is of. Each variant of it is an object of a process of its own
(workers.Workers): it compiles when it is made, `alone()` captures it, `times()` measures it,
`groups()` traces it (traces.py).

torch: fp32 weights, bf16 autocast, model and loss compiled, foreach clip, AdamW (fused and
capturable, its learning rate on the device), all of it in one CUDA graph; gradients zeroed in place
or set to None, whichever is faster.
Ours: weights of the model's dtype in an arena (bf16: with fp32 masters), ga.AdamW, compiled,
TrainStep(replay="graph").
Both copy the batch in and hand the loss out in each step.

launched() measures the same without a graph: compiled steps that are launched from Python, whose
time the host may decide. The peer has bf16 weights, and gradients that are added in the fastest of
three ways (LaunchedPeer).
"""

import dataclasses
import functools
import importlib.util
import math
import time
import unittest.mock
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import DEVICE
from timing import OURS, back_to_back, captured, in_turns, queued, release, reset_peaks
from torch import nn
from traces import kernel_groups
from training import SETTINGS, captured_adamw, token_batch
from workers import Workers

from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.step import TrainStep, token_loss

# Steps of a turn.
CALLS = 4
LAUNCHED_CALLS = 10
BF16 = "torch, bf16 weights"
# How far first losses may be apart: fp32 weights, and bf16 copies of them.
SAME_LOSS = 0.05


def call(model, tokens):
    return model(tokens)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a step is of. Its functions are those of modules, so that processes can be given it.

    make: dtype -> the model, the same weights each time
    vocab: number of tokens
    rows, T: sequences of a micro-batch, and their length
    micro_batches: of a step
    logits: (model, tokens) -> logits"""

    make: Callable
    vocab: int
    rows: int
    T: int
    micro_batches: int = 4
    logits: Callable = call

    def batch(self) -> tuple:
        return token_batch(self.vocab, self.rows * self.micro_batches, self.T)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.micro_batches * self.T


def measured_alone(run, began: float) -> dict:
    """Peaks of memory, seconds since capturing began, and the median time of three steps."""
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    times = sorted(queued(run, 3))
    return {
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        "capture_s": seconds,
        "ms_alone": times[1],
    }


# ---- torch --------------------------------------------------------------------------------------


class Peer:
    """The whole step in torch.

    mode: of torch.compile"""

    # What alone() chooses from: how gradients are zeroed, in words -> whether they are set to None.
    CHOICES: dict = {"zeroed in place": False, "set to None": True}
    timer = staticmethod(queued)

    def __init__(self, task: Task, mode: str | None = None):
        self.task = task
        self.mode = mode
        model = task.make(torch.float32)
        self.parameters = self.trained(model)
        self.optimizer = captured_adamw(self.parameters)
        self.batch = task.batch()
        # What the graph reads.
        self.inputs, self.targets = (t.clone() for t in self.batch)
        self.loss = torch.zeros((), device=DEVICE)
        self.loss_fn = self.compiled_loss(model)
        self.accumulate()
        self.first_loss = float(self.loss)
        # Waiting for its turn, it holds its weights only.
        self.optimizer.zero_grad(set_to_none=True)
        release()

    def trained(self, model) -> list[torch.Tensor]:
        """What the optimizer updates."""
        return [p for p in model.parameters() if p.requires_grad]

    def compiled_loss(self, model):
        """(inputs, targets) of a micro-batch -> its part of the step's mean loss."""
        task = self.task

        def loss_fn(inputs, targets):
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = task.logits(model, inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                return loss / task.micro_batches

        return torch.compile(loss_fn, dynamic=False, mode=self.mode)

    def accumulate(self):
        """Forward and backward of all micro-batches."""
        self.loss.zero_()
        count = self.task.micro_batches
        for inputs, targets in zip(self.inputs.chunk(count), self.targets.chunk(count)):
            loss = self.loss_fn(inputs, targets)
            loss.backward()
            self.loss += loss.detach()
            self.gradients_ready()

    def gradients_ready(self):
        """Called behind the backward of each micro-batch."""

    def step(self, to_none: bool):
        if to_none:
            self.optimizer.zero_grad(set_to_none=True)
        self.accumulate()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        if not to_none:
            self.optimizer.zero_grad(set_to_none=False)

    def run(self):
        torch._foreach_copy_([self.inputs, self.targets], self.batch)
        self.replay()
        self.out = self.loss.clone()

    def alone(self) -> dict:
        """Capture with each of CHOICES, one at a time; keep the fastest one."""
        results = {name: self._capture(choice) for name, choice in self.CHOICES.items()}
        best = min(results, key=lambda name: results[name]["ms_alone"])
        if best != list(results)[-1]:
            self._capture(self.CHOICES[best])
        return {
            **results[best],
            "gradients": best,
            "variants_ms": {name: r["ms_alone"] for name, r in results.items()},
            "first_loss": self.first_loss,
        }

    def _capture(self, to_none: bool) -> dict:
        # Frees the graph before.
        self.replay = None
        self.optimizer.zero_grad(set_to_none=True)
        reset_peaks()
        began = time.perf_counter()
        if not to_none:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        self.replay = captured(lambda: self.step(to_none))
        return measured_alone(self.run, began)

    def times(self, calls: int) -> list[float]:
        return self.timer(self.run, calls)

    def groups(self) -> dict[str, float]:
        return kernel_groups(self.run)

    def end(self) -> dict:
        return {"last_loss": float(self.out)}


class Bf16Peer(Peer):
    """torch's step with bf16 weights and their fp32 masters, as FSDP2's mixed precision has them.

    Each micro-batch's gradients are bf16 and added in fp32, by one compiled function. The optimizer
    updates the masters, and one call rounds them to the weights. Autocast has the loss in fp32."""

    def trained(self, model):
        weights = super().trained(model)
        masters = [p.detach().clone() for p in weights]
        # In place: tied weights stay so.
        model.to(torch.bfloat16)
        self.weights = weights
        self.add = torch.compile(add_each, dynamic=False)
        return masters

    def gradients_ready(self):
        grads = [p.grad for p in self.weights]
        for p in self.weights:
            p.grad = None
        if self.parameters[0].grad is None:
            for master, grad in zip(self.parameters, grads):
                master.grad = grad.float()
        else:
            self.add([master.grad for master in self.parameters], grads)

    def step(self, to_none: bool):
        super().step(to_none)
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.parameters)


def add_each(sums: list[torch.Tensor], terms: list[torch.Tensor]):
    torch._foreach_add_(sums, terms)


class LaunchedPeer(Bf16Peer):
    """The step of Bf16Peer, launched from Python: nothing is captured.

    CHOICES: what adds the bf16 gradients of the micro-batches."""

    COMPILED = "a compiled function, in fp32"
    BY_AUTOGRAD = "autograd, in bf16"
    INTO_FP32 = "autograd, in fp32"
    # The last one changes the weights' grad_dtype for good.
    CHOICES = {name: name for name in (COMPILED, BY_AUTOGRAD, INTO_FP32)}
    timer = staticmethod(back_to_back)
    added_by = COMPILED

    def accumulate(self):
        if self.added_by == self.COMPILED:
            return super().accumulate()
        for p in self.weights:
            p.grad = None
        super().accumulate()
        if self.added_by == self.BY_AUTOGRAD:
            torch._foreach_copy_(self.sums, [p.grad for p in self.weights])
        for master, total in zip(self.parameters, self.sums):
            master.grad = total

    def gradients_ready(self):
        if self.added_by == self.COMPILED:
            super().gradients_ready()
        elif self.added_by == self.INTO_FP32 and self.weights[0].grad is not self.sums[0]:
            # After the first micro-batch; autograd adds the others. While torch.compile traces, as
            # it has in __init__, such a `.grad` would break its graph.
            torch._foreach_copy_(self.sums, [p.grad for p in self.weights])
            for p, total in zip(self.weights, self.sums):
                p.grad = total

    def add_by(self, added_by: str):
        """Add gradients in this way from here on."""
        self.added_by = added_by
        self.sums = None
        self.optimizer.zero_grad()
        for p in self.weights:
            p.grad = None
            if added_by == self.INTO_FP32:
                p.grad_dtype = None
        if added_by != self.COMPILED:
            self.sums = [torch.empty_like(master) for master in self.parameters]

    def _capture(self, added_by: str) -> dict:
        self.add_by(added_by)
        reset_peaks()
        began = time.perf_counter()
        self.replay = functools.partial(self.step, to_none=True)
        self.run()
        return measured_alone(self.run, began)


class LigerPeer(Bf16Peer):
    """torch's step with bf16 weights, and Liger-Kernel's fused output layer and cross-entropy.

    For a model with `lm_head`, a bias-free linear layer. The loss is not inside torch.compile: it
    launches kernels of its own and cuBLAS's. Liger's RMSNorm is not used: see step.py."""

    # All logits at once, as the other variants have them. Liger's default is at most as many as the
    # hidden states have elements: less memory, and smaller, slower products.
    CHUNK = 2**20

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("liger_kernel") is not None

    def compiled_loss(self, model):
        head, model.lm_head = model.lm_head, nn.Identity()
        task, chunk = self.task, self.CHUNK

        def hidden_fn(inputs):
            with torch.autocast(DEVICE, torch.bfloat16):
                return model(inputs).flatten(0, 1).to(torch.bfloat16)

        hidden_fn = torch.compile(hidden_fn, dynamic=False, mode=self.mode)

        def loss_fn(inputs, targets):
            # The step's mean, so that nothing has to be scaled afterwards.
            count = targets.numel() * task.micro_batches
            return LigerLoss.apply(hidden_fn(inputs), head.weight, targets.flatten(), count, chunk)

        return loss_fn


class LigerLoss(torch.autograd.Function):
    """sum of cross-entropies / count, by Liger-Kernel's fused linear cross-entropy.

    Liger's forward reads the number of valid targets on the host, and its backward whether the
    gradient is 1; a CUDA graph can hold neither. Here the number is given, and a loss on which
    nobody computes has the gradient 1."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, count, chunk):
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        with unittest.mock.patch.object(torch.Tensor, "item", lambda tensor: count):
            loss, _, _, _, dhidden, dweight, _ = fused_linear_cross_entropy_forward(
                hidden,
                weight.to(hidden.dtype),
                targets,
                compute_gradients=True,
                weight_requires_grad=True,
                chunk_mem_const=chunk,
            )
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return *ctx.saved_tensors, None, None, None


class Attempt:
    """A variant that may not run: alone() then says why, as `left_out`; nothing else is asked."""

    def __init__(self, make, *args):
        self.variant = self.left_out = None
        try:
            self.variant = make(*args)
        except Exception as error:
            self.left_out = in_words(error)

    def alone(self) -> dict:
        if self.left_out is None:
            try:
                return self.variant.alone()
            except Exception as error:
                self.left_out = in_words(error)
        self.variant = None
        return {"left_out": self.left_out}

    def times(self, calls: int) -> list[float]:
        return self.variant.times(calls)

    def groups(self) -> dict[str, float]:
        return self.variant.groups()

    def end(self) -> dict:
        return self.variant.end()


def in_words(error: Exception) -> str:
    """The kind of an error, and its first line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


# ---- ours ---------------------------------------------------------------------------------------


class Ours:
    """The whole step in gpuaccel.

    dtype: of the model"""

    replay: str | Replay = Replay(policy="require")
    timer = staticmethod(queued)

    def __init__(self, task: Task, deterministic: bool = False, dtype=torch.bfloat16):
        model = task.make(dtype)

        def loss_fn(model, micro):
            return token_loss(lambda tokens: task.logits(model, tokens), micro)

        self.optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        self.step = TrainStep(
            model,
            self.optimizer,
            token_loss if task.logits is call else loss_fn,
            micro_batches=task.micro_batches,
            compile=True,
            replay=self.replay,
            deterministic=deterministic,
        )
        self.batch = task.batch()
        self.steps = 0
        # Compiles, and takes a step.
        self.run()
        self.first_loss = float(self.out.loss)
        release()

    def run(self):
        self.out = self.step(self.batch)
        self.steps += 1

    def alone(self) -> dict:
        self.step.reset()
        reset_peaks()
        began = time.perf_counter()
        # Warms up, captures, replays.
        self.run()
        return {**measured_alone(self.run, began), "first_loss": self.first_loss}

    def times(self, calls: int) -> list[float]:
        return self.timer(self.run, calls)

    def groups(self) -> dict[str, float]:
        return kernel_groups(self.run)

    def end(self) -> dict:
        steps = float(self.optimizer.state[self.step.arena.masters[0]]["step"])
        skipped = int(self.optimizer.skipped)
        assert steps == self.steps and skipped == 0, (
            f"the optimizer took {steps} steps and skipped {skipped}; expected {self.steps} and 0"
        )
        return {"last_loss": float(self.out.loss)}


class LaunchedOurs(Ours):
    """The same, launched from Python."""

    replay = "eager"
    timer = staticmethod(back_to_back)


# ---- both ---------------------------------------------------------------------------------------


def launched(task: Task, clock, here: bool = False) -> dict:
    """Variant -> measurement of compiled steps that are launched from Python."""
    made = {BF16: (LaunchedPeer, task), OURS: (LaunchedOurs, task)}
    with Workers({(name, "launched"): how for name, how in made.items()}, here) as workers:
        workers.ready()
        clock.say("launched steps: compiled")
        keys = dict.fromkeys(workers.names, workers)
        return measured(keys, task.tokens, clock, LAUNCHED_CALLS)[0]


def measured(
    workers: dict[object, Workers], tokens: int, clock, calls: int | None = None
) -> tuple[dict, dict]:
    """(variant -> measurement, variant -> why it was left out), measured in turns.

    Peers have names that begin with "torch"; ratios are against the fastest one. A peer whose first
    loss is not the first peer's is left out. What is left out is closed.

    workers: (variant, more) -> the Workers that have it
    tokens: of a step
    calls: steps of a turn, CALLS by default"""
    alone, left_out = {}, {}
    for key, some in workers.items():
        result = some.ask(key, "alone")
        clock.say(f"{', '.join(map(str, key))}, alone: {result}")
        reason = result.get("left_out") or other_loss(key[0], result, alone)
        if reason:
            left_out[key[0]] = reason
            some.close(key)
        else:
            alone[key] = result
    timers = {key: workers[key].timers([key], calls or CALLS)[key] for key in alone}
    times = in_turns(timers)
    peer = fastest({key[0]: ms for key, ms in times.items()})
    rows = {}
    for key, ms in times.items():
        rows[key[0]] = {
            "ms": ms,
            "tokens_per_s": tokens / ms * 1e3,
            **alone[key],
            "groups": workers[key].ask(key, "groups"),
            **workers[key].ask(key, "end"),
        }
    for row in rows.values():
        row["times_torch"] = rows[peer]["ms"] / row["ms"]
        row["memory"] = row["peak_GiB"] / rows[peer]["peak_GiB"]
    first_losses = [r["first_loss"] for r in rows.values()]
    last_losses = [r["last_loss"] for r in rows.values()]
    difference = max(first_losses) - min(first_losses)
    assert difference < SAME_LOSS and all(map(math.isfinite, last_losses)), (
        f"first losses {first_losses}, last losses {last_losses}; "
        f"expected first ones within {SAME_LOSS:g} and finite last ones"
    )
    return rows, left_out


def other_loss(name: str, result: dict, alone: dict) -> str | None:
    """Why a peer computes something else than the first one; None: it does not, or is no peer."""
    first = next(iter(alone.values()), result)["first_loss"]
    if not name.startswith("torch") or abs(result["first_loss"] - first) < SAME_LOSS:
        return None
    return (
        f"did not compute the same: its first loss is {result['first_loss']:.3f}, not {first:.3f}"
    )


def fastest(times: dict) -> str:
    """The peer with the least time. times: variant -> milliseconds; peers begin with "torch"."""
    return min((name for name in times if name.startswith("torch")), key=times.get)
