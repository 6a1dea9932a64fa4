"""The loop around a step: readings, validation, a schedule, metrics, checkpoints.

    >>> for reading in ga.train(step, batches, steps=200, metrics="run.jsonl"):
    ...     print(reading.tokens_per_s, reading.loss)

Nothing in it waits for the device but validation, checkpoints and the last step; what the host sees of a step it sees late.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections import deque

import torch
from torch import Tensor, nn

from ..errors import DataError
from ..measure import LateValue, Meter
from . import checkpoint as checkpoints
from .micro import is_split
from .step import TrainStep, token_loss

AHEAD = 2  # steps that the host may be ahead of the device: a Stop is heard, and readings are fresh


def warmup_cosine(opt, warmup: int, steps: int, floor: float = 0.1):
    """A torch scheduler: linear warm-up over `warmup` steps (the first one is already above zero), then a cosine to floor * lr."""

    def factor(i):
        if i < warmup:
            return (i + 1) / warmup
        return floor + (1 - floor) * 0.5 * (
            1 + math.cos(math.pi * min(1.0, (i - warmup) / max(1, steps - warmup)))
        )

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
            if resumed_at and self.path.is_file():  # lines after the checkpoint will be made again
                for line in self.path.read_text().splitlines():
                    with contextlib.suppress(ValueError, KeyError):
                        if json.loads(line)["step"] <= resumed_at:
                            kept.append(line + "\n")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with checkpoints.written_aside(self.path) as file:
                file.write("".join(kept).encode())
            self.file = open(self.path, "a", buffering=1)
        except OSError as error:
            raise DataError(
                f"the metrics file {self.path} cannot be written: {error.strerror}"
            ) from None

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


def train(
    step: TrainStep,
    batches,
    steps: int,
    *,
    val=None,
    val_every: int = 0,
    metrics=None,
    checkpoint_dir=None,
    checkpoint_every: int = 0,
    keep: int = 3,
    resume: bool = False,
    extra: "dict | None" = None,
):
    """Take optimizer steps until `steps` have been taken in all; yields a meter.Reading after each.

    batches: an iterator of batches (data.Batches can be resumed). val: list of batches, evaluated every `val_every` steps and at the
    end. metrics: path of a JSON-lines file. checkpoint_dir: a checkpoint every `checkpoint_every` steps, at the end, and when the
    loop is left between two steps (Stop, break); the newest `keep` stay. An error or a Ctrl-C inside a step writes none: the data has
    moved on, the weights may not have. resume: go on from the newest checkpoint there, bit-identically;
    without one, from the beginning. extra: JSON kept in each checkpoint.

    With several ranks each calls it with the same arguments and its own batches, and leaves it after the same step; a rank that leaves it early
    writes no checkpoint, unless all were asked to stop (Reducer.asked_to_stop()). Rank 0 writes metrics and
    checkpoints; all of them read these, so that the folder has to be one that they share, and the run may go on with another number of ranks.
    A checkpoint keeps torch's generators of each rank; Python's and numpy's are rank 0's."""
    first = step.reducer is None or step.reducer.rank == 0
    state = dict(
        model=step.model,
        optimizer=step.opt,
        arena=step.arena,
        scheduler=step.scheduler,
        batches=batches if hasattr(batches, "state_dict") else None,
    )
    if resume and checkpoint_dir and (last := checkpoints.latest_checkpoint(checkpoint_dir)):
        with step.gathered():
            step.count = checkpoints.load_checkpoint(
                last, **state, rank=step.reducer.rank if step.reducer else 0
            )["step"]
    saved = step.count if resume else -1

    def save():
        nonlocal saved
        if checkpoint_dir and saved != step.count:
            ranks = (
                step.reducer.gather(checkpoints.random_state()) if step.reducer is not None else ()
            )
            with step.gathered():
                if first:
                    checkpoints.save_checkpoint(
                        checkpoints.checkpoint_path(checkpoint_dir, step.count),
                        step=step.count,
                        extra=extra,
                        ranks=ranks,
                        **state,
                    )
                    checkpoints.prune_checkpoints(checkpoint_dir, keep)
            if step.reducer is not None:
                step.reducer.barrier()  # nobody looks for a checkpoint that is not there yet
            saved = step.count

    meter = step.meter = step.meter or Meter(step.arena.device)
    lines = Metrics(metrics, step.count) if metrics and first else None
    whole, seen, done = True, None, False  # no step is half done; tokens of all steps
    try:
        for batch in batches if step.count < steps else ():
            whole, lr = False, step.opt.param_groups[0]["lr"]
            out = step(batch)
            whole = True
            done = step.count >= steps
            val_loss = (
                evaluate(step.model, val)
                if val and (done or val_every and step.count % val_every == 0)
                else None
            )
            tokens = _tokens_in(batch) * (
                1 if step.reducer is None else step.reducer.world
            )  # the host knows its own; the others have as many
            while (
                meter.queued() >= AHEAD
            ):  # a replay takes the host no time: asked again and again, never waited for
                time.sleep(1e-4)
            norms = [
                None if n is None else torch.linalg.vector_norm(n) if n.dim() else n
                for n in (out.norm, out.clipped_norm)
            ]
            reading = meter.update(tokens, out.loss, norms[0], val_loss, norms[1])
            if done:
                reading = dataclasses.replace(
                    meter.finish(), val_loss=val_loss
                )  # the last one waits, and knows its own loss
            before = step.count - reading.step  # steps of an earlier run, when resumed
            reading = dataclasses.replace(
                reading, step=step.count, loss_step=reading.loss_step and reading.loss_step + before
            )
            if lines:
                seen = tokens * step.count if seen is None else seen + tokens
                row = {
                    "step": step.count,
                    "lr": lr,
                    "tokens": seen,
                    "tokens_per_s": round(reading.tokens_per_s, 1),
                }
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
        together = (
            step.reducer is None or step.reducer.world == 1 or done or step.reducer.asked_to_stop()
        )  # else others may not come along
        if whole and together:
            save()


def _tokens_in(batch) -> int:
    """Tokens of a batch as the host knows them: elements of its first tensor."""
    if batch is None:  # a rank that has none left
        return 0
    if is_split(batch):
        return sum(map(_tokens_in, batch))
    first = (
        batch
        if isinstance(batch, Tensor)
        else next(iter(batch.values() if isinstance(batch, dict) else batch))
    )
    return first.numel()
