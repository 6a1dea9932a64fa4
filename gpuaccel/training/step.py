"""One optimizer step as a composition of stages: launched one by one, or captured and replayed as one CUDA graph.

    >>> step = ga.TrainStep(model, loss_fn=ga.token_loss, micro_batches=4, accumulate="arena", max_norm=1.0)
    >>> out = step((inputs, targets))              # splits dim 0; out.loss, out.norm, out.tokens stay on the device
    >>> step = ga.TrainStep(model, opt, micro_batches=4, accumulate="fused", replay="graph")      # the same bits, one launch

Each stage is an argument, so that an experiment can switch exactly one thing. Between the first micro-batch and the weights
nothing waits for the host in the modes `arena` and `fused`, unless clip="item" asks for it. With replay="graph" the whole step is one
launch (graphs/graphed_step.py), with the same bits.
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import deterministic
from ..distributed.config import Distributed
from ..distributed.p2p import PeerToPeer
from ..distributed.reducer import Reducer
from ..errors import ArgumentError, CaptureError
from ..graphs.graphed_step import NEW_SHAPES, POLICIES, GraphedStep, untouched
from ..measure.meter import Meter
from ..nn.embedding import counts_of
from ..ops.clip import EPS, check_choice, reference_scale
from ..optim.accumulate import GradientAccumulator
from ..optim.adamw import AdamW
from ..optim.arena import Arena
from ..optim.device_optimizer import DeviceOptimizer
from .micro import is_split, rows_of, split

DIVISORS = ("tokens", "sequences", "micro_batches")
CLIPS = ("item", "torch", "fused")
REPLAYS = ("eager", "graph")
IGNORED = -100  # a target that does not count, as in torch's cross_entropy


def token_loss(model: nn.Module, micro) -> "tuple[Tensor, Tensor]":
    """(sum of cross-entropies in fp32, number of valid targets), both on the device.

    micro: (inputs, targets), each (B, T) int64; targets of -100 do not count."""
    inputs, targets = micro
    logits = model(inputs)
    if not isinstance(logits, Tensor):
        raise ArgumentError(
            f"the model returned {type(logits).__name__}; token_loss takes logits: expected a loss_fn of your own, as lambda model, micro: "
            "ga.token_loss(lambda tokens: model(tokens).logits, micro)"
        )
    total = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()


@dataclass
class StepOutput:
    """One step's results, one-element tensors on the device that the next step does not overwrite."""

    loss: Tensor  # mean per token (or of what loss_fn returned)
    tokens: "Tensor | None"  # valid tokens; None when loss_fn returned a mean
    norm: "Tensor | None"  # gradient norm before clipping; None when none was taken; one per group with a scope
    clipped_norm: "Tensor | None" = None  # after it
    scale: "Tensor | None" = None  # what the gradients were multiplied by
    finite: "Tensor | None" = None  # bool: is every gradient finite?


class TrainStep:
    """One optimizer step over `micro_batches` pieces of a batch.

    model: any nn.Module with fp32 or bf16 parameters on one device. opt: a torch optimizer over arena.parameters() (for an fp32
    model: model.parameters()), or ga.AdamW over the arena; default: AdamW, lr 3e-4, decay 0.1 on matrices. loss_fn(model, micro)
    returns (sum of losses, number of tokens), or a mean. accumulate: "host", "autograd", "arena" or "fused" (optim/accumulate.py).
    divide: what the summed gradient is divided by: "tokens" (default where loss_fn counts them: unequal micro-batches then give the
    full batch's gradient), "sequences" (rows of the batch), or "micro_batches" (the mean of the micro-batches' means).
    max_norm: clip the global gradient norm, as torch.nn.utils.clip_grad_norm_; with ga.AdamW over the arena, that optimizer's max_norm.
    clip: "item" (a norm per tensor to the host, which decides: it waits for each), "torch" (torch.nn.utils.clip_grad_norm_), or "fused"
    (inside ga.AdamW: no pass over memory of its own; default with that optimizer, or without any). compile: torch.compile loss_fn.
    autocast: a dtype for torch.autocast. scheduler: a torch learning-rate scheduler, stepped after each step. meter: gets the stage times.
    replay: "eager", or "graph": the whole step is captured in a CUDA graph per kind of batch and replayed, one launch; a batch that
    is a list of micro-batches is replayed one by one, plus a tail. policy, new_shapes, max_graphs: see GraphedStep. `replays` says which it
    is, and `reason` why. deterministic: two runs have the same bits (ga.deterministic() around each step).
    distributed: a ga.Distributed; each rank makes the same step and calls it as often, with batches of its own. Loss, tokens and divisor are then
    those of all ranks.

    The arena is made here unless the module is in one already. close() gives back an ordinary module.
    Raises ArgumentError for an optimizer that holds other tensors than the arena's, an unknown mode or divisor, two different max_norms."""

    def __init__(
        self,
        model: nn.Module,
        opt=None,
        loss_fn=token_loss,
        *,
        micro_batches: int = 1,
        accumulate: str = "arena",
        clip: "str | None" = None,
        divide: "str | None" = None,
        max_norm: "float | None" = None,
        compile: bool = False,
        autocast: "torch.dtype | None" = None,
        scheduler=None,
        meter: "Meter | None" = None,
        replay: str = "eager",
        policy: str = "auto",
        new_shapes: str = "capture",
        max_graphs: int = 8,
        deterministic: bool = False,
        distributed: "Distributed | None" = None,
    ):
        if micro_batches < 1:
            raise ArgumentError(f"micro_batches is {micro_batches}; expected 1 or more")
        for name, value, choices in (
            ("divide", divide, DIVISORS),
            ("clip", clip, CLIPS),
            ("replay", replay, REPLAYS),
            ("policy", policy, POLICIES),
            ("new_shapes", new_shapes, NEW_SHAPES),
        ):
            if value is not None:
                check_choice(name, value, choices)
        if max_norm is not None and not max_norm > 0:
            raise ArgumentError(
                f"max_norm is {max_norm}; expected a positive number, or None for no clipping"
            )
        arena = (there := Arena.of(model)) or Arena(model)
        try:
            if opt is None and clip in (None, "fused"):
                opt = AdamW(arena, lr=3e-4, weight_decay=0.1)
            elif opt is None:
                opt = torch.optim.AdamW(
                    arena.parameter_groups(weight_decay=0.1),
                    lr=3e-4,
                    fused=arena.device.type == "cuda",
                )
            _check_optimizer(opt, arena)
            ours = isinstance(opt, DeviceOptimizer) and opt.arena is arena
            clip = clip or ("fused" if ours else "torch")
            _check_clip(clip, opt, ours, max_norm)
            peers = (
                PeerToPeer.of(distributed, arena)
                if distributed is not None and distributed.works
                else None
            )  # before addresses are taken
            self.accumulator = GradientAccumulator(arena, accumulate)
            self.model, self.opt, self.arena, self.scheduler = model, opt, arena, scheduler
            self.reducer = None
            if distributed is not None and distributed.works:
                self.reducer = self._join(
                    distributed,
                    peers,
                    clip,
                    bool(compile),
                    {
                        "accumulate": accumulate,
                        "divide": str(divide),
                        "max_norm": str(max_norm),
                        "replay": replay,
                        "micro_batches": str(micro_batches) if distributed.ordered else "any",
                    },
                )
            self._graphs = (
                _StepGraphs(self, ours, policy=policy, new_shapes=new_shapes, max_graphs=max_graphs)
                if replay == "graph"
                else None
            )
        except BaseException:
            if "accumulator" in vars(self):
                self.accumulator.close()
            if there is None:
                arena.release()
            raise
        self.loss_fn = torch.compile(loss_fn, dynamic=False) if compile else loss_fn
        if clip == "fused" and max_norm is not None:
            opt.max_norm = max_norm
        self.clip, self._max_norm = clip, max_norm
        self.micro_batches, self.divide, self.autocast, self.meter, self.deterministic = (
            micro_batches,
            divide,
            autocast,
            meter,
            deterministic,
        )
        self.count = 0  # optimizer steps taken
        self.accumulator.zero_()

    def __call__(self, batch) -> StepOutput:
        """Run one step. batch: tensor, or tuple, list or dict of tensors, on the model's device, rows in dim 0. With several ranks None: this one
        has no batch left, and the others have.

        When loss_fn or backward raises, the gradients are dropped and the weights stay as they were."""
        timer = self.meter.timer if self.meter else None
        if timer:
            timer.start()
        with deterministic() if self.deterministic else contextlib.nullcontext():
            if self.replays == "graph":
                found = self._graphs(batch)
                if self.reducer is not None and self.replays == "graph":
                    self.reducer.beat()
                if timer:
                    timer.mark("replay")
            else:
                found = self.whole(batch, timer.mark if timer else None)
        if self.scheduler is not None:
            self.scheduler.step()
        if timer:
            timer.stop()
        if self.reducer is not None:
            self.reducer.check()
        self.count += 1
        return StepOutput(*found)

    def whole(self, batch, mark=None):
        """The step itself, launched one by one: (loss, tokens, norm, clipped norm, scale, finite)."""
        mark = mark or _no_mark
        with self.window():
            loss, tokens, divisor = self._accumulate(self.split(batch), mark)
            found = self._update(divisor, mark)
        mark("zero")
        return loss, tokens, *found

    @contextlib.contextmanager
    def window(self):
        """Afterwards the next window is open; with an error in between the gradients are dropped."""
        try:
            yield
        except BaseException as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.accumulator.detach()  # nothing was executed, and nothing can be now
            else:
                self.accumulator.zero_()
            if self.reducer is not None:
                self.reducer.abandon(error)
            raise
        if any(self.accumulator.touched):  # otherwise ga.AdamW has opened the next window already
            self.accumulator.zero_()

    @property
    def replays(self) -> str:
        """ "graph" or "eager": what a step really does."""
        return self._graphs.replay if self._graphs else "eager"

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self._graphs.reason if self._graphs else "replay is 'eager'"

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
        found = (None,)
        if divisor is not None:
            self.accumulator.scale_(1.0 / divisor)
        if self.max_norm is not None:
            norm = (_clip_by_item if self.clip == "item" else nn.utils.clip_grad_norm_)(
                self.arena.parameters(), self.max_norm
            )
            scale = reference_scale(norm, self.max_norm)
            found = norm, norm * scale, scale, torch.isfinite(norm)
            mark("clip")
        self.opt.step()
        mark("optimizer")
        return (
            found
            if self.max_norm is not None or not isinstance(self.opt, DeviceOptimizer)
            else _found_by(self.opt)
        )

    def _accumulate(self, micros, mark, alone: bool = False):
        """Forward and backward of every micro-batch; afterwards the sum is in the arena. Returns (loss, tokens, what to divide the sum by).

        alone: of this rank only, with no word to the others (a warm-up)."""
        losses, tokens, ranks = None, None, None if alone else self.reducer
        if ranks is not None:
            ranks.look_before()
        ordered = ranks is not None and ranks.how.ordered
        for nth, micro in enumerate(micros):
            last = nth == len(micros) - 1
            with ranks.listening() if ranks is not None and last else contextlib.nullcontext():
                loss, count = self.micro(micro, len(micros), last and not ordered, mark)
            if ordered:
                ranks.round(loss, count, rows_of(micro), 1)
            losses = loss if losses is None else losses + loss
            tokens = count if tokens is None else tokens + count
        for _ in range(self.micro_batches - len(micros) if ordered else 0):
            ranks.round(None, None, 0, 0)  # the other ranks may have more
        self.accumulator.finish()
        found = self.mean(losses, tokens, float(sum(map(rows_of, micros))), len(micros), ranks)
        mark("accumulate")
        return found

    def micro(self, micro, parts: int, last: bool, mark) -> "tuple[Tensor, Tensor | None]":
        """Forward and backward of one of `parts` micro-batches. Returns its loss in fp32 and its tokens; None: loss_fn returned a mean."""
        with (
            torch.autocast(self.arena.device.type, self.autocast)
            if self.autocast
            else contextlib.nullcontext()
        ):
            result = self.loss_fn(self.model, micro)
        loss, count = result if isinstance(result, tuple) else (result, None)
        if count is None and self.divide in ("tokens", "sequences"):
            raise ArgumentError(
                f"divide={self.divide!r} needs a loss_fn that returns (sum of losses, tokens); it returned only a mean"
            )
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise ArgumentError(
                f"loss_fn returned {type(loss).__name__}; expected a one-element tensor, or (that, tokens)"
            )
        if self.reducer is not None:
            parts = 1  # divided last, by what all ranks have
        if count is None:
            loss = loss / parts
        elif not isinstance(count, Tensor):
            count = torch.full((), count, device=loss.device)
        objective = (
            loss / count.clamp(min=1) / parts
            if self.divide == "micro_batches" and count is not None
            else loss
        )
        mark("forward")
        self.accumulator.final = self.clip == "fused" and last
        try:
            objective.backward()
        finally:
            self.accumulator.final = False
        mark("backward")
        return loss.detach().float(), count

    @torch.no_grad()
    def mean(self, losses, tokens, rows, micros=None, ranks: "Reducer | None" = None) -> tuple:
        """(loss, tokens, what to divide the gradient by: a one-element tensor or None) of sums over micro-batches. rows, micros: number or tensor.
        With `ranks` the gradients of all ranks are added here."""
        if ranks is not None:
            losses, tokens, rows, micros = ranks.reduce(losses, tokens, rows, micros)
            micros = micros.clamp(min=1)
        if tokens is None:
            return (losses, None, None) if ranks is None else (losses / micros, None, micros)
        divisor = None if ranks is None else micros  # divide="micro_batches"
        if self.divide in (None, "tokens"):
            divisor = tokens.clamp(min=1)
        elif self.divide == "sequences":
            divisor = (
                rows if isinstance(rows, Tensor) else torch.full((), rows, device=self.arena.device)
            )
        return losses / tokens.clamp(min=1), tokens, divisor

    def split(self, batch) -> list:
        """This rank's micro-batches."""
        if batch is None and self.reducer is not None:
            return []
        try:
            micros = split(batch, self.micro_batches)
        except ArgumentError as error:
            raise ArgumentError(
                f"{error}{'; a rank that has nothing left calls step(None)' if self.reducer is not None else ''}"
            ) from None
        if (
            self.reducer is not None
            and self.reducer.how.ordered
            and len(micros) > self.micro_batches
        ):
            raise ArgumentError(
                f"{len(micros)} micro-batches in ordered mode; expected at most micro_batches={self.micro_batches}, on every rank"
            )
        return micros

    def _join(self, distributed, peers, clip, compiled: bool, settings) -> Reducer:
        """Compare the models of all ranks, and take over rank 0's weights."""
        replay = settings["replay"]
        if distributed.sharded and clip != "fused":
            raise ArgumentError(
                f"sharded=True with clip={clip!r}: a rank has its share of the gradient only; expected ga.AdamW over the arena, which clips "
                "by itself (clip='fused')"
            )
        if replay == "graph" and distributed.backend != "nccl":
            raise ArgumentError(
                f"replay='graph' needs collectives that a CUDA graph can hold, those of NCCL; the group's are {distributed.backend}'s: "
                "expected replay='eager'"
            )
        return Reducer(
            distributed,
            self.arena,
            self.accumulator,
            self.opt,
            settings | {"compile": str(compiled)},
            compiled,
            peers,
        )

    def gathered(self):
        """A context, to be entered on every rank: inside it the optimizer's state is whole, to be saved or loaded."""
        return (
            self.opt.gathered()
            if self.reducer is not None and self.reducer.sharded
            else contextlib.nullcontext()
        )

    @property
    def graphs(self) -> "GraphedStep | None":
        """The graphs of whole steps: len(), graph(); None when replay is "eager"."""
        return self._graphs and self._graphs.whole

    def capture(self, batch):
        """Capture for this kind of (whole) batch now, without taking a step."""
        if self._graphs:
            with deterministic() if self.deterministic else contextlib.nullcontext():
                self._graphs.whole.capture(batch)

    def reset(self):
        """Drop every graph: the next step captures anew. For a model that was changed on purpose."""
        for graphs in self._graphs.all if self._graphs else ():
            graphs.reset()

    def close(self, alone: bool = False):
        """Give the graphs back, take the hooks down and give the module ordinary parameters back. alone: with several ranks and a sharded optimizer, do not
        wait for the others, which would bring its state together; it is gone then. (So does a `with` block that an error leaves.)"""
        if self._graphs:
            self._graphs.close()
        if self.reducer is not None:
            self.reducer.close(alone)
        self.arena.release()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        self.close(alone=kind is not None)


def _clip_by_item(parameters, max_norm) -> Tensor:
    """How it is often written: the norm of each tensor goes to the host, which adds, decides and multiplies. It waits once per tensor."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(grad.norm().item() ** 2 for grad in grads))
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + EPS))
    return torch.tensor(norm, device=parameters[0].device)


def _found_by(opt: DeviceOptimizer) -> tuple:
    """Norm, clipped norm, scale, finite: copies that the next step does not overwrite."""
    state = opt.clip_state and opt.clip_state.clone()
    return (state.norm, state.clipped_norm, state.scale, state.finite) if state else (None,)


def _check_clip(clip, opt, ours, max_norm):
    if clip == "fused" and not ours:
        raise ArgumentError(
            f"clip='fused' is done by ga.AdamW(arena); the optimizer is {type(opt).__name__}"
            f"{' over parameters' if isinstance(opt, DeviceOptimizer) else ''}"
        )
    if (
        isinstance(opt, DeviceOptimizer)
        and opt.max_norm is not None
        and (
            clip == "item"
            or max_norm is not None
            and (clip != "fused" or opt.max_norm != max_norm)
            or ours
            and clip == "torch"
        )
    ):
        raise ArgumentError(
            f"max_norm is {max_norm} here and {opt.max_norm} in the optimizer: gradients would be clipped twice; give it once"
        )


def _check_optimizer(opt, arena):
    owners = arena.master_ids
    names = {id(p): name for name, p in arena.module.named_parameters()}
    for g, group in enumerate(opt.param_groups):
        for p in group["params"]:
            if id(p) not in owners and p.requires_grad:
                what = (
                    f"parameter {names[id(p)]} ({p.dtype})"
                    if id(p) in names
                    else f"a tensor of shape {tuple(p.shape)} that is not the model's"
                )
                raise ArgumentError(
                    f"group {g} of the optimizer holds {what}; expected tensors of arena.parameters(), the fp32 masters: "
                    "arena = ga.Arena(model); opt = torch.optim.AdamW(arena.parameters())"
                )


class _StepGraphs:
    """A TrainStep's graphs: one per kind of batch for whole steps; for lists of micro-batches one per kind of these, and a tail."""

    def __init__(self, step: TrainStep, ours: bool, **options):
        self.step, self.counts = (
            step,
            None,
        )  # counts: dtype of the tokens; False: loss_fn returns means
        self.loss, self.rows, self.parts = (
            torch.zeros((), device=step.arena.device) for _ in range(3)
        )
        self.sums = self.loss, self.rows, self.parts  # and self.tokens, once their dtype is known
        self._state, self._options = [step.model, step.opt], dict(modes=self._modes, **options)
        self._buffers = [
            *step.model.buffers(),
            *counts_of(step.model),
        ]  # all that forward and backward change: the sums are dropped
        # Our optimizer prepares itself; torch's make their state in a step, which is taken back.
        self._ours = ours
        self.whole = GraphedStep(
            step.whole,
            self._state,
            warm_up=self._warm_up if ours else None,
            saved=self._buffers if ours else None,
            **self._options,
        )

    @functools.cached_property
    def micro(self) -> GraphedStep:
        return GraphedStep(
            self._micro,
            [self.step.model, *self.sums],
            warm_up=self._warm_up_micro,
            saved=self._buffers,
            **self._options,
        )

    @functools.cached_property
    def tail(self) -> GraphedStep:
        return GraphedStep(
            self._tail,
            [*self._state, *self.sums],
            warm_up=self._warm_up_tail if self._ours else None,
            saved=[] if self._ours else None,
            **self._options,
        )

    @property
    def all(self) -> "list[GraphedStep]":
        return [vars(self)[name] for name in ("whole", "micro", "tail") if name in vars(self)]

    @property
    def replay(self) -> str:
        return "graph" if all(graphs.replay == "graph" for graphs in self.all) else "eager"

    @property
    def reason(self) -> str:
        return next(
            (graphs.reason for graphs in self.all if graphs.replay == "eager"), self.whole.reason
        )

    def __call__(self, batch):
        if self.whole.closed:
            raise CaptureError("the step was closed: make a new one")
        if not is_split(batch):
            self.step.split(batch)  # an ArgumentError before anything is captured
            self._settle(lambda: self._warm_up(batch))
            return self.whole(batch)
        accumulator, touched = self.step.accumulator, 0
        if self.step.reducer is not None and self.step.reducer.how.ordered:
            raise CaptureError(
                "a list of micro-batches is replayed one by one, which ordered mode does not; expected one batch, or replay='eager'"
            )
        if accumulator.mode in ("host", "autograd"):
            raise CaptureError(
                f"a list of micro-batches is replayed one by one, and accumulate={accumulator.mode!r} keeps gradients between them where "
                "a graph does not; expected 'arena' or 'fused', or one batch"
            )
        if (
            self.counts is None
        ):  # does loss_fn return a mean? Then the number of micro-batches is part of a graph
            with untouched(self._buffers, self.step.arena.device):
                self._warm_up_micro(batch[0], len(batch))
            self.tokens = torch.zeros(
                (), dtype=self.counts or torch.int64, device=self.step.arena.device
            )
            self.sums = self.loss, self.tokens, self.rows, self.parts
        self._settle(lambda: self._warm_up_micro(batch[0], len(batch)))
        self.micro.max_graphs = max(
            self.micro.max_graphs, len(batch)
        )  # none of this step's may be pushed out by another
        parts = len(batch) if self.step.divide == "micro_batches" or self.counts is False else 0
        try:
            for micro in batch:
                self.micro.capture(micro, parts)  # all of them before the first sum
            for micro in batch:
                touched |= self.micro(micro, parts)
            return self.tail(touched)
        except BaseException:
            for total in self.sums:
                total.zero_()
            accumulator.zero_()
            raise

    def _settle(self, warm_up):
        """Before the first capture the ranks agree on the tensors that get a gradient: a capture cannot ask."""
        ranks = self.step.reducer
        if ranks is not None and ranks.agreed is None:
            with untouched(self._buffers, self.step.arena.device):
                ranks.settle(self._bits_of(warm_up))

    def _bits_of(self, warm_up) -> int:
        """Which tensors a warm-up gives a gradient, as bits."""
        self.bits = 0
        warm_up()
        return self.bits

    def _modes(self):
        """What a graph keeps as it was at its capture, beside shapes and the optimizer's settings."""
        step = self.step
        return (
            step.micro_batches,
            step.divide,
            step.autocast,
            step.clip,
            step.loss_fn,
            None if step.clip == "fused" else step.max_norm,
        )

    def _warm_up(self, batch):
        with self.step.window():
            self.step._accumulate(self.step.split(batch), _no_mark, alone=True)
            self.bits = self.step.accumulator.bits

    def _warm_up_micro(self, micro, parts):
        with self.step.window():
            _, count = self.step.micro(micro, parts or 1, False, _no_mark)
            self.counts, self.bits = (
                False if count is None else count.dtype,
                self.step.accumulator.bits,
            )

    def _micro(self, micro, parts):
        """Adds to the sums. Returns which tensors got a gradient, as bits."""
        loss, count = self.step.micro(micro, parts or 1, False, _no_mark)
        self.loss += loss
        self.rows += rows_of(micro)
        self.parts += 1
        if count is not None:
            self.tokens += count
        return self.step.accumulator.detach()

    def _warm_up_tail(self, touched):
        self.step.mean(self.loss, self.tokens, self.rows)

    def _tail(self, touched):
        self.step.accumulator.restore(touched)
        with self.step.window():
            loss, tokens, divisor = self.step.mean(
                self.loss,
                self.tokens.clone() if self.counts else None,
                self.rows,
                self.parts,
                self.step.reducer,
            )
            found = self.step._update(divisor, _no_mark)
        results = loss.clone(), tokens, *found
        for total in self.sums:
            total.zero_()
        return results

    def close(self):
        for graphs in self.all:
            graphs.close()


def _no_mark(stage):
    pass
