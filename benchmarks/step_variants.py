"""One optimizer step in torch and in gpuaccel, for the benchmarks of whole steps.

A Task says what a step is of. Each variant and kind of it is an object of a process of its own
(workers.Workers): it compiles when it is made. alone(kind) prepares a kind of step, times()
measures it, groups() traces it (traces.py). "replayed" steps are one CUDA graph; "launched" ones
are launched from Python, so that the host may decide their time.

torch: fp32 weights, bf16 autocast, model and loss compiled, foreach clip, AdamW (fused and
capturable, its learning rate on the device); gradients zeroed in place or set to None, whichever is
faster.
torch, bf16 weights: the same with bf16 weights, fp32 masters and fp32 sums, as FSDP2's mixed
precision has them. Launched, gradients are added in the fastest of three ways.
Ours: weights of the model's dtype in an arena (bf16: with fp32 masters), ga.AdamW, compiled.
Replayed steps copy the batch in, and all hand the loss out.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import DEVICE
from timing import OURS, back_to_back, captured, in_turns, queued, release, reset_peaks
from traces import kernel_groups
from training import SETTINGS, captured_adamw
from workers import Workers

from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training import Replay
from gpuaccel.training.step import TrainStep, token_loss

KINDS = REPLAYED, LAUNCHED = "replayed", "launched"
TIMERS = {REPLAYED: queued, LAUNCHED: back_to_back}
# Steps of a turn, and turns. The host's speed changes from second to second, so launched steps have
# many short turns.
CALLS = {REPLAYED: 4, LAUNCHED: 3}
TURNS = {REPLAYED: 3, LAUNCHED: 30}
PEER = "torch"
BF16 = "torch, bf16 weights"
EXACT = "ours, deterministic"
# How far first losses may be apart: fp32 weights, and bf16 copies of them.
SAME_LOSS = 0.05


def call(model, inputs):
    return model(inputs)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a step is of. Its functions are those of modules, so that processes can be given it.

    make: dtype -> the model, the same weights each time
    make_batch: () -> (inputs, targets) of a whole step
    logits: (model, inputs) -> logits
    micro_batches: of a step"""

    make: Callable
    make_batch: Callable
    logits: Callable = call
    micro_batches: int = 4


def measured_alone(run, began: float) -> dict:
    """Peaks of memory, seconds since preparing began, and the median time of three steps."""
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    times = sorted(queued(run, 3))
    return {
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        "capture_s": seconds,
        "ms_alone": times[1],
    }


class Variant:
    """What both have: kind is set by alone(), run() takes a step of it."""

    kind = REPLAYED

    def times(self, calls: int) -> list[float]:
        return TIMERS[self.kind](self.run, calls)

    def groups(self) -> dict[str, float]:
        return kernel_groups(self.run)


# ---- torch --------------------------------------------------------------------------------------


class Peer(Variant):
    """The whole step in torch."""

    # What alone() chooses from, in words. How gradients are zeroed: are they set to None?
    CHOICES: dict = dict.fromkeys(KINDS, {"zeroed in place": False, "set to None": True})

    def __init__(self, task: Task):
        began = time.perf_counter()
        self.task = task
        model = task.make(torch.float32)
        self.model_parameters = sum(p.numel() for p in model.parameters())
        self.parameters = self.trained(model)
        self.optimizer = captured_adamw(self.parameters)
        self.batch = task.make_batch()
        # What the graph reads.
        self.inputs, self.targets = (t.clone() for t in self.batch)
        self.loss = torch.zeros((), device=DEVICE)
        self.loss_fn = self.compiled_loss(model)
        self.accumulate()
        self.first_loss = float(self.loss)
        self.compile_s = time.perf_counter() - began
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
                loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
                return loss / task.micro_batches

        return torch.compile(loss_fn, dynamic=False)

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
        if self.kind == REPLAYED:
            torch._foreach_copy_([self.inputs, self.targets], self.batch)
        self.replay()
        self.out = self.loss.clone()

    def alone(self, kind: str) -> dict:
        """Prepare with each of CHOICES, one at a time; keep the fastest one."""
        self.kind = kind
        choices = self.CHOICES[kind]
        results = {name: self._prepare(choice) for name, choice in choices.items()}
        best = min(results, key=lambda name: results[name]["ms_alone"])
        if best != list(results)[-1]:
            self._prepare(choices[best])
        return {
            **results[best],
            "parameters": self.model_parameters,
            "gradients": best,
            "variants_ms": {name: r["ms_alone"] for name, r in results.items()},
            "first_loss": self.first_loss,
            "compile_s": self.compile_s,
        }

    def _prepare(self, to_none: bool) -> dict:
        # Frees the graph before.
        self.replay = None
        self.optimizer.zero_grad(set_to_none=True)
        reset_peaks()
        began = time.perf_counter()
        if not to_none:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        step = functools.partial(self.step, to_none)
        if self.kind == REPLAYED:
            self.replay = captured(step)
        else:
            self.replay = step
            self.run()
        return measured_alone(self.run, began)

    def end(self) -> dict:
        return {"last_loss": float(self.out)}


class Bf16Peer(Peer):
    """torch's step with bf16 weights and their fp32 masters.

    Each micro-batch's gradients are bf16 and added in fp32, by one compiled function; in launched
    steps maybe by autograd. The optimizer updates the masters, and one call rounds them to the
    weights. Autocast has the loss in fp32."""

    COMPILED = "a compiled function, in fp32"
    BY_AUTOGRAD = "autograd, in bf16"
    INTO_FP32 = "autograd, in fp32"
    # The last one changes the weights' grad_dtype for good.
    CHOICES = {
        **Peer.CHOICES,
        LAUNCHED: {name: name for name in (COMPILED, BY_AUTOGRAD, INTO_FP32)},
    }
    added_by = COMPILED

    def trained(self, model):
        weights = super().trained(model)
        masters = [p.detach().clone() for p in weights]
        # In place: tied weights stay so.
        model.to(torch.bfloat16)
        self.weights = weights
        self.add = torch.compile(add_each, dynamic=False)
        return masters

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
            grads = [p.grad for p in self.weights]
            for p in self.weights:
                p.grad = None
            if self.parameters[0].grad is None:
                for master, grad in zip(self.parameters, grads):
                    master.grad = grad.float()
            else:
                self.add([master.grad for master in self.parameters], grads)
        elif self.added_by == self.INTO_FP32 and self.weights[0].grad is not self.sums[0]:
            # After the first micro-batch; autograd adds the others. While torch.compile traces, as
            # it has in __init__, such a `.grad` would break its graph.
            torch._foreach_copy_(self.sums, [p.grad for p in self.weights])
            for p, total in zip(self.weights, self.sums):
                p.grad = total

    def step(self, to_none: bool):
        super().step(to_none)
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.parameters)

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

    def _prepare(self, choice) -> dict:
        if self.kind == LAUNCHED:
            self.replay = None
            self.add_by(choice)
            choice = True
        return super()._prepare(choice)


def add_each(sums: list[torch.Tensor], terms: list[torch.Tensor]):
    torch._foreach_add_(sums, terms)


# ---- ours ---------------------------------------------------------------------------------------


class Ours(Variant):
    """The whole step in gpuaccel. kind: of step that it is compiled for."""

    def __init__(self, task: Task, kind: str = REPLAYED, deterministic: bool = False):
        began = time.perf_counter()
        model = task.make(torch.bfloat16)

        def loss_fn(model, micro):
            return token_loss(lambda inputs: task.logits(model, inputs), micro)

        self.kind = kind
        self.optimizer = AdamW(Arena(model), **SETTINGS, max_norm=1.0)
        self.step = TrainStep(
            model,
            self.optimizer,
            token_loss if task.logits is call else loss_fn,
            micro_batches=task.micro_batches,
            compile=True,
            replay=Replay(policy="require") if kind == REPLAYED else "eager",
            deterministic=deterministic,
        )
        self.batch = task.make_batch()
        self.steps = 0
        # Compiles, and takes a step.
        self.run()
        self.first_loss = float(self.out.loss)
        self.compile_s = time.perf_counter() - began
        release()

    def run(self):
        self.out = self.step(self.batch)
        self.steps += 1

    def alone(self, kind: str) -> dict:
        assert kind == self.kind, f"compiled for {self.kind} steps, asked for {kind} ones"
        self.step.reset()
        reset_peaks()
        began = time.perf_counter()
        # Warms up, captures, replays.
        self.run()
        alone = measured_alone(self.run, began)
        return {**alone, "first_loss": self.first_loss, "compile_s": self.compile_s}

    def end(self) -> dict:
        steps = float(self.optimizer.state[self.step.arena.masters[0]]["step"])
        skipped = int(self.optimizer.skipped)
        assert steps == self.steps and skipped == 0, (
            f"the optimizer took {steps} steps and skipped {skipped}; expected {self.steps} and 0"
        )
        return {"last_loss": float(self.out.loss)}


# ---- both ---------------------------------------------------------------------------------------


def makers(task: Task, label="") -> dict:
    """(variant, kind, label) -> how it is made, for Workers.

    Each kind of step has a process of its own: once a process has been traced, its launches take
    longer."""
    return {
        (name, kind, label): (make, task, *args)
        for kind in KINDS
        for name, make, *args in ((PEER, Peer), (BF16, Bf16Peer), (OURS, Ours, kind))
    }


def measured(workers: Workers, kind: str, clock, label="", groups: bool = False) -> dict:
    """Variant -> measurement of one kind of step, in turns. Ratios are against the fastest peer.

    groups: also where the time goes"""
    keys = {key[0]: key for key in workers.names if key[1:] == (kind, label)}
    alone = {}
    for name, key in keys.items():
        alone[name] = workers.ask(key, "alone", kind)
        clock.say(f"{name}, {kind}, alone: {alone[name]['ms_alone']:.2f} ms")
    timers = workers.timers(keys.values(), CALLS[kind])
    times = in_turns({name: timers[key] for name, key in keys.items()}, TURNS[kind])
    peer = fastest(times)
    rows = {}
    for name, ms in times.items():
        rows[name] = {
            "ms": ms,
            "times_torch": times[peer] / ms,
            "memory": alone[name]["peak_GiB"] / alone[peer]["peak_GiB"],
            **alone[name],
            **workers.ask(keys[name], "end"),
        }
        if groups:
            rows[name]["groups"] = workers.ask(keys[name], "groups")
    first_losses = [r["first_loss"] for r in rows.values()]
    last_losses = [r["last_loss"] for r in rows.values()]
    difference = max(first_losses) - min(first_losses)
    assert difference < SAME_LOSS and all(map(math.isfinite, last_losses)), (
        f"first losses {first_losses}, last losses {last_losses}; "
        f"expected first ones within {SAME_LOSS:g} and finite last ones"
    )
    return rows


def fastest(times: dict) -> str:
    """The peer with the least time. times: variant -> milliseconds; peers begin with "torch"."""
    return min((name for name in times if name.startswith("torch")), key=times.get)
