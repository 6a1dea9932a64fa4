"""The training loop around a step: readings, validation, a schedule, a log, checkpoints.

    for reading in ga.train(step, batches, steps=200, log="run.jsonl"):
        print(reading.tokens_per_s, reading.loss)

The loop waits for the device in validation, checkpoints and the last step only. The losses that it
yields are those that have arrived, from a few steps before.
"""

import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import CheckpointError
from ..measure import Meter, Reading
from .checkpoint import (
    checkpoint_path,
    is_whole,
    latest_checkpoint,
    load_checkpoint,
    older_whole_checkpoints,
    prune_checkpoints,
    save_checkpoint,
)
from .logs import Log, RunLog, check_log
from .micro import is_split, with_dicts
from .models import eval_mode
from .step import TrainStep, token_loss

log_of_package = logging.getLogger("gpuaccel")
# Steps that the host may be ahead of the device. Few, so that readings are fresh.
AHEAD = 2


def warmup_cosine(
    opt: torch.optim.Optimizer, warmup: int, steps: int, floor: float = 0.1
) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning-rate scheduler: linear warm-up, then a cosine.

    Args:
        opt: whose learning rate is scheduled.
        warmup: steps until the learning rate of `opt` is reached; the first one is above zero
            already.
        steps: where the cosine ends.
        floor: what the cosine ends at, as a fraction of the learning rate. Default: 0.1.
    """

    def factor(i):
        if i < warmup:
            return (i + 1) / warmup
        progress = min(1.0, (i - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(opt, factor)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable, loss_fn: Callable = token_loss) -> float:
    """Mean loss per token over `batches`, without gradients, in eval mode.

    The mode before is restored.

    Waits for the device once, at the end.

    Args:
        model: any module.
        batches: a finite iterable of what loss_fn takes, on the model's device. With several ranks:
            this rank's.
        loss_fn: as a TrainStep's: (model, batch) -> (sum of losses, number of tokens), or a mean,
            and then each batch counts alike. Default: token_loss.

    Returns:
        A float, the mean of this rank's batches; in nats per token with token_loss.
    """
    total: Any = 0.0
    tokens: Any = 0
    with eval_mode(model):
        for batch in batches:
            result = loss_fn(model, batch)
            loss, count = result if isinstance(result, tuple) else (result, 1)
            total = total + loss.double()
            tokens = tokens + count
    return float(total / tokens)


class _Checkpoints:
    """Saves and resumes one run's checkpoints, on one rank or on all ranks at once."""

    def __init__(self, step: TrainStep, batches, folder, keep: int):
        self.step = step
        self.folder = folder
        self.keep = keep
        self.saved_step = -1
        self.kind = type(batches).__name__
        self.state: dict[str, Any] = dict(
            model=step.model,
            optimizer=step.optimizers,
            arena=step.arena,
            scheduler=step.schedulers,
            batches=batches if hasattr(batches, "state_dict") else None,
        )

    def resume(self, path: str | pathlib.Path | bool):
        """Go on from this checkpoint. True: from the newest one, if there is one."""
        if isinstance(path, bool):
            checkpoint = latest_checkpoint(self.folder) if path and self.folder else None
        else:
            checkpoint = pathlib.Path(path).expanduser()
        if checkpoint is not None:
            self._load(checkpoint)
            if self.state["batches"] is None:
                log_of_package.warning(
                    "resumed after step %d: a %s has no state_dict(), so the batches begin with "
                    "its first one again; ga.training.Batches and torchdata's StatefulDataLoader "
                    "continue where they were",
                    self.step.count,
                    self.kind,
                )
        self.saved_step = self.step.count

    def _load(self, path: pathlib.Path):
        try:
            self.step.count = load_checkpoint(path, **self.state)["step"]
        except CheckpointError as error:
            if is_whole(path):
                # It belongs to something else, as the older ones do.
                raise
            older = older_whole_checkpoints(path)
            names = ", ".join(other.name for other in older) or "none"
            raise CheckpointError(f"{error}; older ones that are whole: {names}", older) from error

    def save(self):
        """Write a checkpoint, unless this step has one. Every rank calls it after the same step."""
        if not self.folder or self.saved_step == self.step.count:
            return
        reducer = self.step.reducer
        path = checkpoint_path(self.folder, self.step.count, self.step.optimizers)
        save_checkpoint(path, step=self.step.count, **self.state)
        if reducer is None or reducer.rank == 0:
            prune_checkpoints(path, self.keep)
        self.saved_step = self.step.count


def train(
    step: TrainStep,
    batches: Iterable,
    steps: int,
    *,
    val: list | None = None,
    val_every: int = 0,
    log: Log | None = None,
    checkpoint_dir: str | pathlib.Path | None = None,
    checkpoint_every: int = 0,
    keep: int = 3,
    resume: bool | str | pathlib.Path = False,
) -> Generator[Reading, None, None]:
    """Take optimizer steps until `steps` have been taken in all, with a reading after each.

    With several ranks each calls it with the same arguments and its own batches, and leaves it
    after the same step. A rank that leaves earlier writes no checkpoint, unless all were asked to
    stop (step.reducer.asked_to_stop()), or the batches of all ranks have one length and have ended.
    Rank 0 writes logs and checkpoints; of a sharded optimizer each rank writes its share. All ranks
    read the checkpoints, so the folder has to be shared; a run can be resumed with another number
    of ranks, sharded or not. A checkpoint holds torch's generators of each rank, and Python's and
    NumPy's of rank 0.

    Args:
        step: the TrainStep; its meter is used, or one is made.
        batches: an iterable of batches. It is resumed where it was if it has a state_dict(), as
            ga.training.Batches and torchdata's StatefulDataLoader; on resume others start at
            their first batch, with a warning. If they end before `steps`, training ends.
        steps: optimizer steps in all, those of an earlier run that is resumed included.
        val: batches that are evaluated every `val_every` steps and at the end, with the step's
            loss_fn. Default: none.
        val_every: steps between two evaluations; 0, the default: only at the end.
        log: where the numbers of each step go: a function, which is called with a dict, or a path
            that ends in .jsonl, for a line of JSON per step. They are written once they have
            arrived from the device. A resumed run continues its file. Default: nowhere.
        checkpoint_dir: folder for a checkpoint every `checkpoint_every` steps, at the end, and when
            the loop is left between two steps (by a Stop button, by break). An error or a Ctrl-C
            inside a step, or where the next batch is made, writes none: the data have moved on,
            the weights perhaps not. Default: none.
        checkpoint_every: steps between two checkpoints; 0, the default: only at the end.
        keep: how many of the newest checkpoints stay.
        resume: continue from the newest checkpoint there, bit-identically as load_checkpoint says;
            without one, begin. A path: continue from this checkpoint. One that is damaged is a
            CheckpointError, whose `older` lists the intact ones.

    Yields:
        A Reading after each step, without a wait for the device; the last one waits for it.

    Raises:
        CheckpointError: for a checkpoint that cannot be written, or resumed from.

    Example:
        >>> model = ga.preset("tiny", layers=1, hidden=32).build().to(ga.default_device())
        >>> tokens = torch.arange(2000) % 256
        >>> batches = ga.training.Batches(tokens, batch=4, T=32, device=ga.default_device())
        >>> with ga.TrainStep(model, max_norm=1.0) as step:
        ...     readings = list(ga.train(step, batches, steps=5))
        >>> readings[-1].step, readings[-1].tokens, readings[-1].loss < 6.0
        (5, 640, True)
    """
    check_log(log)
    checkpoints = _Checkpoints(step, batches, checkpoint_dir, keep)
    if resume:
        checkpoints.resume(resume)
    reducer = step.reducer
    world = 1 if reducer is None else reducer.world
    # Only the last checkpoint needs it.
    end_together = bool(checkpoint_dir) and world > 1 and _equally_long(batches, reducer)
    meter = step.meter = step.meter or Meter(step.arena.device)
    rows = None
    # Where no step is left to take the rows stay as they are.
    if log is not None and step.count < steps and (reducer is None or reducer.rank == 0):
        rows = RunLog(log, step.count)
    val = list(val or ())
    # Are the data as far as the weights?
    between_steps = False
    total_tokens = None
    done = exhausted = False
    try:
        for batch in batches if step.count < steps else ():
            lr = step.optimizers[0].param_groups[0]["lr"]
            # A scheduler writes into a learning rate on the device.
            lr = lr.clone() if isinstance(lr, Tensor) else lr
            out = step(batch)
            between_steps = True
            done = step.count >= steps
            val_loss = None
            if val and (done or (val_every and step.count % val_every == 0)):
                on = step.autocast is not None
                with torch.autocast(step.arena.device.type, step.autocast, enabled=on):
                    val_loss = evaluate(step.model, val, step.loss_fn)
            # The host knows the tokens of its own batch; other ranks have as many.
            tokens = _tokens_in(batch) * world
            # A replay takes the host no time. Polling keeps it from running far ahead.
            while meter.queued() >= AHEAD:
                time.sleep(1e-4)
            norm = _total_norm(out.norm)
            clipped_norm = _total_norm(out.clipped_norm)
            reading = meter.update(tokens, out.loss, norm, val_loss, clipped_norm)
            if done:
                # The last reading waits for its own loss.
                reading = dataclasses.replace(meter.finish(), val_loss=val_loss)
            reading = _count_from(reading, step.count)
            if rows:
                total_tokens = (
                    tokens * step.count if total_tokens is None else total_tokens + tokens
                )
                rows.add(
                    {
                        "step": step.count,
                        "loss": out.loss,
                        "val_loss": val_loss,
                        # as the step used it, before its scheduler
                        "lr": lr,
                        "norm": norm,
                        "clipped_norm": clipped_norm,
                        "tokens": total_tokens,
                        "tokens_per_s": round(reading.tokens_per_s, 1),
                        "seconds": round(reading.seconds, 3),
                        "step_ms": round(reading.step_ms, 3),
                        "mfu": reading.mfu,
                        "memory_bytes": reading.memory_bytes,
                        "stages": reading.stages or None,
                    }
                )
            if checkpoint_every and step.count % checkpoint_every == 0:
                checkpoints.save()
            yield reading
            if done:
                break
            between_steps = False
        else:
            between_steps = exhausted = True
    finally:
        if step.arena.device.type == "cuda":
            torch.cuda.synchronize(step.arena.device)
        try:
            if rows:
                rows.close()
        finally:
            # A checkpoint needs every rank: one that leaves alone must not wait for the others.
            all_ranks_leave = (
                reducer is None
                or world == 1
                or done
                or (exhausted and end_together)
                or reducer.asked_to_stop()
            )
            if all_ranks_leave and between_steps:
                checkpoints.save()


def _equally_long(batches: Iterable, reducer) -> bool:
    """Whether the batches of all ranks have a length, and the same. Collective."""
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError:
        length = -1
    reducer.heartbeat(0)
    lengths = reducer.gather(length)
    return lengths[0] >= 0 and len(set(lengths)) == 1


def _total_norm(norm: Tensor | None) -> Tensor | None:
    """One norm of all gradients; with a scope, an optimizer gives one norm per group."""
    return torch.linalg.vector_norm(norm) if norm is not None and norm.dim() else norm


def _count_from(reading: Reading, count: int) -> Reading:
    """A reading whose steps count those of an earlier run, too. count: steps taken in all."""
    earlier = count - reading.step
    loss_step = reading.loss_step and reading.loss_step + earlier
    return dataclasses.replace(reading, step=count, loss_step=loss_step)


def _tokens_in(batch) -> int:
    """Tokens of a batch as the host knows them: elements of its first tensor."""
    # A rank that has no batch left takes part in the step without one.
    if batch is None:
        return 0
    if is_split(batch):
        return sum(map(_tokens_in, batch))
    leaves = tree_leaves(with_dicts(batch))
    return next((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), 0)
