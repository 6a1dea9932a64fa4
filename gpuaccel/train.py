"""One optimizer step as a composition of stages, and the loop around it.

    >>> step = ga.TrainStep(model, loss_fn=ga.token_loss, micro_batches=4, accumulate="arena", max_norm=1.0)
    >>> out = step((inputs, targets))              # splits dim 0; out.loss, out.norm, out.tokens stay on the device
    >>> for reading in ga.train(step, batches, steps=200, metrics="run.jsonl"):
    ...     print(reading.tokens_per_s, reading.loss)

Each stage is an argument, so that an experiment can switch exactly one thing. Between the first micro-batch and the weights
nothing waits for the host in the modes `arena` and `fused`, unless clip="item" asks for it.
"""
import contextlib
import dataclasses
import json
import math
import pathlib
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checkpoint as checkpoints
from .accumulate import GradientAccumulator
from .optimizer import AdamW
from .arena import Arena
from .clip import EPS, check_choice, reference_scale
from .errors import ArgumentError, DataError
from .meter import LateValue, Meter

DIVISORS = ("tokens", "sequences", "micro_batches")
CLIPS = ("item", "torch", "fused")
IGNORED = -100                   # a target that does not count, as in torch's cross_entropy


def token_loss(model: nn.Module, micro) -> "tuple[Tensor, Tensor]":
    """(sum of cross-entropies in fp32, number of valid targets), both on the device.

    micro: (inputs, targets), each (B, T) int64; targets of -100 do not count."""
    inputs, targets = micro
    logits = model(inputs)
    total = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


@dataclass
class StepOutput:
    """One step's results, one-element tensors on the device that the next step does not overwrite."""
    loss: Tensor               # mean per token (or of what loss_fn returned)
    tokens: "Tensor | None"    # valid tokens; None when loss_fn returned a mean
    norm: "Tensor | None"      # gradient norm before clipping; None when none was taken; one per group with a scope
    clipped_norm: "Tensor | None" = None       # after it
    scale: "Tensor | None" = None              # what the gradients were multiplied by
    finite: "Tensor | None" = None             # bool: is every gradient finite?


def split(batch, parts: int) -> list:
    """`batch` (tensor, or tuple, list or dict of tensors) in `parts` pieces along dim 0, sizes differing by one at most.

    Raises ArgumentError when the tensors disagree in dim 0, or there are fewer rows than pieces."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or batch.shape[0] < parts:
            raise ArgumentError(f"a batch of shape {tuple(batch.shape)} cannot be split into {parts} micro-batches along dim 0")
        return list(torch.tensor_split(batch, parts))
    if not isinstance(batch, (tuple, list, dict)) or not batch:
        raise ArgumentError(f"a batch is a tensor or a tuple, list or dict of tensors; got {type(batch).__name__}")
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    rows = {key: len(t) if isinstance(t, Tensor) and t.dim() else None for key, t in items}
    if len(set(rows.values())) > 1 or None in rows.values():
        raise ArgumentError(f"the tensors of a batch must agree in dim 0, the number of sequences; got {rows}")
    columns = [split(t, parts) for t in (batch.values() if isinstance(batch, dict) else batch)]
    if isinstance(batch, dict):
        return [dict(zip(batch, row)) for row in zip(*columns)]
    return [type(batch)(row) for row in zip(*columns)]


class TrainStep:
    """One optimizer step over `micro_batches` pieces of a batch.

    model: any nn.Module with fp32 or bf16 parameters on one device. opt: a torch optimizer over arena.parameters() (for an fp32
    model: model.parameters()), or ga.AdamW over the arena; default: AdamW, lr 3e-4, decay 0.1 on matrices. loss_fn(model, micro)
    returns (sum of losses, number of tokens), or a mean. accumulate: "host", "autograd", "arena" or "fused" (accumulate.py).
    divide: what the summed gradient is divided by: "tokens" (default where loss_fn counts them: unequal micro-batches then give the
    full batch's gradient), "sequences" (rows of the batch), or "micro_batches" (the mean of the micro-batches' means).
    max_norm: clip the global gradient norm, as torch.nn.utils.clip_grad_norm_; with ga.AdamW over the arena, that optimizer's max_norm.
    clip: "item" (a norm per tensor to the host, which decides: it waits for each), "torch" (torch.nn.utils.clip_grad_norm_), or "fused"
    (inside ga.AdamW: no pass over memory of its own; default with that optimizer, or without any). compile: torch.compile loss_fn.
    autocast: a dtype for torch.autocast. scheduler: a torch learning-rate scheduler, stepped after each step. meter: gets the stage times.

    The arena is made here unless the module is in one already. close() gives back an ordinary module.
    Raises ArgumentError for an optimizer that holds other tensors than the arena's, an unknown mode or divisor, two different max_norms."""

    def __init__(self, model: nn.Module, opt=None, loss_fn=token_loss, *, micro_batches: int = 1, accumulate: str = "arena",
                 clip: "str | None" = None, divide: "str | None" = None, max_norm: "float | None" = None, compile: bool = False, autocast: "torch.dtype | None" = None,
                 scheduler=None, meter: "Meter | None" = None):
        if micro_batches < 1:
            raise ArgumentError(f"micro_batches is {micro_batches}; expected 1 or more")
        for name, value, choices in (("divide", divide, DIVISORS), ("clip", clip, CLIPS)):
            if value is not None:
                check_choice(name, value, choices)
        if max_norm is not None and not max_norm > 0:
            raise ArgumentError(f"max_norm is {max_norm}; expected a positive number, or None for no clipping")
        there = Arena.of(model)
        arena = there or Arena(model)
        try:
            if opt is None and clip in (None, "fused"):
                opt = AdamW(arena, lr=3e-4, weight_decay=0.1)
            elif opt is None:
                opt = torch.optim.AdamW(arena.parameter_groups(weight_decay=0.1), lr=3e-4, fused=arena.device.type == "cuda")
            _check_optimizer(opt, arena)
            ours = isinstance(opt, AdamW) and opt.arena is arena
            clip = clip or ("fused" if ours else "torch")
            _check_clip(clip, opt, ours, max_norm)
            self.accumulator = GradientAccumulator(arena, accumulate)
        except BaseException:
            if there is None:
                arena.release()
            raise
        self.model, self.opt, self.arena, self.scheduler = model, opt, arena, scheduler
        self.loss_fn = torch.compile(loss_fn, dynamic=False) if compile else loss_fn
        if clip == "fused" and max_norm is not None:
            opt.max_norm = max_norm
        self.clip, self._max_norm = clip, max_norm
        self.micro_batches, self.divide, self.autocast, self.meter = micro_batches, divide, autocast, meter
        self.count = 0                      # optimizer steps taken
        self.accumulator.zero_()

    def __call__(self, batch) -> StepOutput:
        """Run one step. batch: tensor, or tuple, list or dict of tensors, on the model's device, rows in dim 0.

        When loss_fn or backward raises, the gradients are dropped and the weights stay as they were."""
        micros = split(batch, self.micro_batches)
        timer = self.meter.timer if self.meter else None
        mark = timer.mark if timer else lambda stage: None
        if timer:
            timer.start()
        try:
            loss, tokens, divisor = self._accumulate(micros, mark)
            found = self._update(divisor, mark)
        except BaseException:
            self.accumulator.zero_()
            raise
        if any(self.accumulator.touched):           # otherwise ga.AdamW has opened the next window already
            self.accumulator.zero_()
        mark("zero")
        if self.scheduler is not None:
            self.scheduler.step()
        if timer:
            timer.stop()
        self.count += 1
        return StepOutput(loss, tokens, *found)

    @property
    def max_norm(self) -> "float | None":
        return self.opt.max_norm if self.clip == "fused" else self._max_norm

    def _update(self, divisor, mark):
        """From the sums to the weights. Returns norm, clipped norm, scale, finite, or ()."""
        if self.clip == "fused":
            self.opt.grad_scale = divisor
            try:
                self.opt.step()
            finally:
                self.opt.grad_scale = None
            mark("optimizer")
            return _found_by(self.opt)
        found = None,
        if divisor is not None:
            self.accumulator.scale_(1.0 / divisor)
        if self.max_norm is not None:
            norm = (_clip_by_item if self.clip == "item" else nn.utils.clip_grad_norm_)(self.arena.parameters(), self.max_norm)
            scale = reference_scale(norm, self.max_norm)
            found = norm, norm * scale, scale, torch.isfinite(norm)
            mark("clip")
        self.opt.step()
        mark("optimizer")
        return found if self.max_norm is not None or not isinstance(self.opt, AdamW) else _found_by(self.opt)

    def _accumulate(self, micros, mark):
        """Forward and backward of every micro-batch; afterwards the sum is in the arena. Returns (loss, tokens, what to divide the sum by)."""
        losses, tokens, rows, divisor = None, None, 0, None
        for nth, micro in enumerate(micros):
            context = torch.autocast(self.arena.device.type, self.autocast) if self.autocast else contextlib.nullcontext()
            with context:
                result = self.loss_fn(self.model, micro)
            loss, count = result if isinstance(result, tuple) else (result, None)
            if count is None and self.divide in ("tokens", "sequences"):
                raise ArgumentError(f"divide={self.divide!r} needs a loss_fn that returns (sum of losses, tokens); it returned only a mean")
            if not (isinstance(loss, Tensor) and loss.numel() == 1):
                raise ArgumentError(f"loss_fn returned {type(loss).__name__}; expected a one-element tensor, or (that, tokens)")
            if count is None:
                loss = loss / len(micros)
            else:
                count = count if isinstance(count, Tensor) else torch.full((), count, device=loss.device)
                tokens = count if tokens is None else tokens + count
            objective = loss / count.clamp(min=1) / len(micros) if self.divide == "micro_batches" and count is not None else loss
            mark("forward")
            self.accumulator.final = self.clip == "fused" and nth == len(micros) - 1
            try:
                objective.backward()
            finally:
                self.accumulator.final = False
            mark("backward")
            losses = loss.detach() if losses is None else losses + loss.detach()
            rows += _rows(micro)
        self.accumulator.finish()
        with torch.no_grad():
            if tokens is not None:
                if self.divide in (None, "tokens"):
                    divisor = tokens.clamp(min=1)
                elif self.divide == "sequences":
                    divisor = torch.full((), float(rows), device=self.arena.device)
                losses = losses / tokens.clamp(min=1)
        mark("accumulate")
        return losses, tokens, divisor

    def close(self):
        """Take the hooks down and give the module ordinary parameters back."""
        self.arena.release()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def _rows(micro) -> int:
    first = micro if isinstance(micro, Tensor) else next(iter(micro.values() if isinstance(micro, dict) else micro))
    return first.shape[0]


def _clip_by_item(parameters, max_norm) -> Tensor:
    """How it is often written: the norm of each tensor goes to the host, which adds, decides and multiplies. It waits once per tensor."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(grad.norm().item() ** 2 for grad in grads))
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + EPS))
    return torch.tensor(norm, device=parameters[0].device)


def _found_by(opt: AdamW) -> tuple:
    """Norm, clipped norm, scale, finite: copies that the next step does not overwrite."""
    state = opt.clip_state and opt.clip_state.clone()
    return (state.norm, state.clipped_norm, state.scale, state.finite) if state else (None,)


def _check_clip(clip, opt, ours, max_norm):
    if clip == "fused" and not ours:
        raise ArgumentError(f"clip='fused' is done by ga.AdamW(arena); the optimizer is {type(opt).__name__}"
                            f"{' over parameters' if isinstance(opt, AdamW) else ''}")
    if isinstance(opt, AdamW) and opt.max_norm is not None and (clip == "item" or max_norm is not None and (clip != "fused" or opt.max_norm != max_norm)
                                                                or ours and clip == "torch"):
        raise ArgumentError(f"max_norm is {max_norm} here and {opt.max_norm} in the optimizer: gradients would be clipped twice; give it once")


def _check_optimizer(opt, arena):
    owners = arena._owner_ids
    names = {id(p): name for name, p in arena.module.named_parameters()}
    for g, group in enumerate(opt.param_groups):
        for p in group["params"]:
            if id(p) not in owners and p.requires_grad:
                what = f"parameter {names[id(p)]} ({p.dtype})" if id(p) in names else f"a tensor of shape {tuple(p.shape)} that is not the model's"
                raise ArgumentError(f"group {g} of the optimizer holds {what}; expected tensors of arena.parameters(), the fp32 masters: "
                                    "arena = ga.Arena(model); opt = torch.optim.AdamW(arena.parameters())")


def warmup_cosine(opt, warmup: int, steps: int, floor: float = 0.1):
    """A torch scheduler: linear warm-up over `warmup` steps (the first one is already above zero), then a cosine to floor * lr."""
    def factor(i):
        if i < warmup:
            return (i + 1) / warmup
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (i - warmup) / max(1, steps - warmup))))
    return torch.optim.lr_scheduler.LambdaLR(opt, factor)


@torch.no_grad()
def evaluate(model: nn.Module, batches, loss_fn=token_loss) -> float:
    """Mean loss per token over `batches`, without gradients, in eval mode. Waits for the device once, at the end."""
    was_training, total, tokens = model.training, 0.0, 0
    model.eval()
    try:
        for batch in batches:
            loss, count = loss_fn(model, batch)
            total, tokens = total + loss.double(), tokens + count
    finally:
        model.train(was_training)
    return float(total / tokens)


class Metrics:
    """A JSON line per step: step, loss, norm, lr, tokens, tokens_per_s, val_loss. A line is written once its loss has arrived."""

    def __init__(self, path, resumed_at: int = 0):
        self.path, self.waiting = pathlib.Path(path), deque()
        try:
            kept = []
            if resumed_at and self.path.is_file():          # lines after the checkpoint will be made again
                for line in self.path.read_text().splitlines():
                    with contextlib.suppress(ValueError, KeyError):
                        if json.loads(line)["step"] <= resumed_at:
                            kept.append(line + "\n")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with checkpoints.written_aside(self.path) as file:
                file.write("".join(kept).encode())
            self.file = open(self.path, "a", buffering=1)
        except OSError as error:
            raise DataError(f"the metrics file {self.path} cannot be written: {error.strerror}") from None

    def add(self, row: dict, loss: Tensor):
        late = LateValue()
        late.put(loss)
        self.waiting.append((row, late))
        self.flush()

    def flush(self):
        while self.waiting and (loss := self.waiting[0][1].get()) is not None:
            row, _ = self.waiting.popleft()
            self.file.write(json.dumps({"step": row.pop("step"), "loss": loss, **row}) + "\n")

    def close(self):
        self.flush()
        self.file.close()


def train(step: TrainStep, batches, steps: int, *, val=None, val_every: int = 0, metrics=None, checkpoint_dir=None,
          checkpoint_every: int = 0, keep: int = 3, resume: bool = False, extra: "dict | None" = None):
    """Take optimizer steps until `steps` have been taken in all; yields a meter.Reading after each.

    batches: an iterator of batches (data.Batches can be resumed). val: list of batches, evaluated every `val_every` steps and at the
    end. metrics: path of a JSON-lines file. checkpoint_dir: a checkpoint every `checkpoint_every` steps, at the end, and when the
    loop is left between two steps (Stop, break); the newest `keep` stay. An error or a Ctrl-C inside a step writes none: the data has
    moved on, the weights may not have. resume: go on from the newest checkpoint there, bit-identically;
    without one, from the beginning. extra: JSON kept in each checkpoint."""
    state = dict(model=step.model, optimizer=step.opt, arena=step.arena, scheduler=step.scheduler,
                 batches=batches if hasattr(batches, "state_dict") else None)
    if resume and checkpoint_dir and (last := checkpoints.latest_checkpoint(checkpoint_dir)):
        step.count = checkpoints.load_checkpoint(last, **state)["step"]
    saved = step.count if resume else -1

    def save():
        nonlocal saved
        if checkpoint_dir and saved != step.count:
            checkpoints.save_checkpoint(checkpoints.checkpoint_path(checkpoint_dir, step.count), step=step.count, extra=extra, **state)
            checkpoints.prune_checkpoints(checkpoint_dir, keep)
            saved = step.count

    meter = step.meter = step.meter or Meter(step.arena.device)
    lines = Metrics(metrics, step.count) if metrics else None
    whole = True                                    # no step is half done
    try:
        for batch in batches if step.count < steps else ():
            whole, lr = False, step.opt.param_groups[0]["lr"]
            out = step(batch)
            whole = True
            done = step.count >= steps
            val_loss = evaluate(step.model, val) if val and (done or val_every and step.count % val_every == 0) else None
            tokens = _tokens_in(batch)
            norms = [None if n is None else torch.linalg.vector_norm(n) if n.dim() else n for n in (out.norm, out.clipped_norm)]
            reading = meter.update(tokens, out.loss, norms[0], val_loss, norms[1])
            if done:
                reading = dataclasses.replace(meter.finish(), val_loss=val_loss)     # the last one waits, and knows its own loss
            before = step.count - reading.step                                       # steps of an earlier run, when resumed
            reading = dataclasses.replace(reading, step=step.count, loss_step=reading.loss_step and reading.loss_step + before)
            if lines:
                row = {"step": step.count, "lr": lr, "tokens": tokens * step.count, "tokens_per_s": round(reading.tokens_per_s, 1)}
                lines.add(row if val_loss is None else {**row, "val_loss": val_loss}, out.loss)
            if checkpoint_every and step.count % checkpoint_every == 0:
                save()
            yield reading
            if done:
                break
    finally:
        if step.arena.device.type == "cuda":
            torch.cuda.synchronize(step.arena.device)
        if lines:
            lines.close()
        if whole:
            save()


def _tokens_in(batch) -> int:
    """Tokens of a batch as the host knows them: elements of its first tensor."""
    first = batch if isinstance(batch, Tensor) else next(iter(batch.values() if isinstance(batch, dict) else batch))
    return first.numel()
