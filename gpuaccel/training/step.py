"""One optimizer step: accumulate the gradients of some micro-batches, clip, update.

    step = ga.TrainStep(model, loss_fn=ga.token_loss, micro_batches=4, max_norm=1.0)
    out = step((inputs, targets))
    out.loss, out.norm, out.tokens        # on the device

Nothing waits for the device between the first micro-batch and the new weights, but for an
optimizer with on_nonfinite="raise". With replay="graph" the whole step is one launch
(training/replay.py), in deterministic mode bit-identical to the eager step, if the model runs the
same kernels in both.

How a step runs, in the order of the methods below:

    _eager_step        the step, operation by operation
        _split         the batch into micro-batches
        _accumulate    the gradients of all micro-batches into the arena
            _micro     forward and backward of one micro-batch
        _update        all-reduce, clip, optimizer
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import cublas_workspace
from ..backends import deterministic as deterministic_mode
from ..distributed import Distributed, OrderedReducer, Reducer, Totals
from ..errors import ArgumentError, check_module
from ..graphs import GraphedStep
from ..measure import Meter
from ..ops import check_max_norm
from ..optim import AdamW, Arena, DeviceOptimizer, Products
from .checkpoint import as_list
from .micro import split, with_dicts
from .replay import Replay, ReplayMode, StepGraphs, replay_options
from .results import StepOutput, clipped_by, clipped_here
from .step_checks import (
    check_clip,
    check_kinds,
    check_optimizer_kinds,
    check_tensors,
    warn_of_ranks_alone,
)

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from typing_extensions import Self

log = logging.getLogger("gpuaccel")
# A target that does not count, as in torch's cross_entropy.
IGNORED = -100


def token_loss(model: nn.Module, micro: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of a micro-batch, and the number of its valid targets.

    Args:
        model: inputs -> logits (..., classes). Tokens (B, T) give (B, T, V), images (N, classes).
        micro: (inputs, targets); targets (...) int64, of which -100 does not count. The classes are
            the last dimension: logits (N, C, H, W) of a segmentation do not fit.

    Returns:
        Two () tensors on the device, the sum in fp32 and the number in int64.

    Raises:
        ArgumentError: for a model that does not return a tensor, or one of another shape.

    Source:
        torch.nn.functional.cross_entropy.

    Example:
        >>> model = ga.preset("tiny", layers=1).build()
        >>> tokens = torch.arange(9).expand(2, 9)
        >>> total, count = ga.token_loss(model, (tokens[:, :-1], tokens[:, 1:]))
        >>> int(count), bool(total > 0)
        (16, True)
    """
    inputs, targets = micro
    logits = model(inputs)
    if not isinstance(logits, Tensor):
        raise ArgumentError(
            f"the model returned {type(logits).__name__}; token_loss takes logits: expected a "
            "loss_fn of your own, as lambda model, micro: "
            "ga.token_loss(lambda tokens: model(tokens).logits, micro)"
        )
    if logits.shape[:-1].numel() != targets.numel():
        raise ArgumentError(
            f"the model returned {tuple(logits.shape)} for targets of {tuple(targets.shape)}; "
            "token_loss, the default loss, expected logits of the targets' shape and one dimension "
            "more. For another loss pass loss_fn, a function of the model and a micro-batch"
        )
    logits, targets = logits.float().flatten(0, -2), targets.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def _no_mark(stage: str):
    """The end of a stage, where no meter records it."""


class TrainStep:
    """One optimizer step over the micro-batches of a batch.

    The arena is made here unless the module has one. close() closes what was made here: an arena
    of the caller's stays. The constructor sets every `.grad` to None. After a backward() of yours
    between two steps a launched step adds those gradients to its own, and a replayed step raises
    CaptureError. A second TrainStep of a model closes the first. Use the step as a context manager
    or call close(): otherwise the arena's memory is freed only at the next garbage collection.

    Args:
        model: an nn.Module with fp32 or bf16 parameters on one device.
        opt: ga.AdamW or ga.optim.Lion over the arena, or any optimizer over arena.parameters() (for
            an fp32 model: model.parameters()), or a list of optimizers that together hold each of
            these tensors once. Default: ga.AdamW, lr 3e-4, decay 0.1 on tensors of two or more
            dimensions.
        loss_fn: function of (model, micro) that returns (sum of losses, number of tokens): the
            summed gradient is divided once, by all tokens, so that unequal micro-batches give the
            full batch's gradient. Or it returns a mean: the step takes the mean of the
            micro-batches' means. Default: token_loss.
        micro_batches: number of pieces, at least 1, into which torch.tensor_split divides a batch
            along dim 0; fewer where it has fewer rows. Default: 1.
        max_norm: limit of the global gradient norm, 0 or more, as in
            `torch.nn.utils.clip_grad_norm_`; None: that of the optimizer, if it has one. A
            ga.AdamW over the arena clips inside its step: this sets its max_norm. Before
            several optimizers the norm is taken once, over all gradients.
        compile: torch.compile loss_fn. Default: False.
        autocast: a dtype for torch.autocast, such as torch.bfloat16. Default: none.
        scheduler: a torch learning-rate scheduler, or a list of them, stepped after each step.
            Default: none.
        meter: gets the time of each stage. Default: none.
        replay: "eager"; "graph": the step is captured in a CUDA graph for each kind of batch, and
            replayed with one launch; or a ga.training.Replay, "graph" with options. If the first
            capture fails, the step is launched; a later one that fails is a CaptureError. A batch
            that is a list of micro-batches is replayed one by one. An optimizer of torch's whose
            learning rate is a number, which a graph would freeze, is launched after the replay.
            `replays` says which it is, `reason` why.
        deterministic: two runs are bit-identical (ga.deterministic() around each step), and a
            launched step is bit-identical to a replayed one, if the model runs the same kernels in
            both.
        distributed: a ga.Distributed. Each rank makes the same step and calls it as often, with
            batches of its own. Loss, tokens and divisor are then those of all ranks.

    Attributes:
        optimizers: a list, of one optimizer too.
        schedulers: a list.
        arena: the Arena of the model.
        reducer: of several ranks; `reducer.last_nonfinite()` names the rank and the tensor of the
            last NaN or infinity. None for one rank, except in ordered mode.
        count: optimizer steps that this process has taken, an int, from which ga.train counts.
            load_checkpoint does not set it: set it to the loaded step.

    Raises:
        ArgumentError: with nothing changed, for an optimizer that holds other tensors than the
            arena's, a trained tensor that no optimizer holds or two of them, an unknown mode, an
            argument of another kind, two different max_norms, and replay="graph" with collectives
            that a CUDA graph cannot hold, such as gloo's.
        CaptureError: in a call, where the first capture fails with policy "require", where a later
            one fails, and for gradients of a backward() between two replayed steps.

    Example:
        >>> model = ga.preset("tiny", layers=1).build().to(ga.default_device())
        >>> tokens = torch.arange(33, device=ga.default_device()).expand(8, 33)
        >>> with ga.TrainStep(model, micro_batches=4, max_norm=1.0) as step:
        ...     out = step((tokens[:, :-1], tokens[:, 1:]))
        >>> print(f"{out.tokens} tokens, norm clipped to {out.clipped_norm:.2f}")
        256 tokens, norm clipped to 1.00
    """

    def __init__(
        self,
        model: nn.Module,
        opt: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss_fn: Callable[..., Tensor | tuple[Tensor, Tensor | int]] = token_loss,
        *,
        micro_batches: int = 1,
        max_norm: float | None = None,
        compile: bool = False,
        autocast: torch.dtype | None = None,
        scheduler: "LRScheduler | Sequence[LRScheduler] | None" = None,
        meter: Meter | None = None,
        replay: ReplayMode | Replay = "eager",
        deterministic: bool = False,
        distributed: Distributed | None = None,
    ):
        check_module("model", model)
        optimizers, schedulers = as_list(opt), as_list(scheduler)
        check_optimizer_kinds(opt, optimizers)
        check_kinds(loss_fn, micro_batches, autocast, schedulers, distributed)
        if max_norm is not None:
            max_norm = check_max_norm(max_norm)
        options = replay_options(replay)
        if distributed is None:
            warn_of_ranks_alone(model)

        self.model = model
        self.loss_fn = loss_fn
        self.micro_batches = micro_batches
        self.autocast = autocast
        self.schedulers = schedulers
        self.meter = meter
        self.deterministic = deterministic
        # Of the ranks that train this model together; None: of one process.
        self.distributed = distributed
        # Optimizer steps taken.
        self.count = 0
        self._max_norm = max_norm
        # Layers whose products add; None: autograd adds.
        self.products: Products | None = None
        # None: one rank alone.
        self.reducer: Reducer | None = None
        # None: every step is eager.
        self._graphs: StepGraphs | None = None
        self._closed = False
        # What is made here, each with what undoes it: close() goes through it backwards.
        self._cleanup = contextlib.ExitStack()
        self._closes_alone = True
        try:
            arena = Arena.of(model)
            self._owns_arena = arena is None
            arena = arena or Arena(model)
            self._cleanup.callback(self._release_own_arena)
            self.arena: Arena = arena
            arena.check()
            self.optimizers: list[torch.optim.Optimizer] = (
                optimizers if opt is not None else [AdamW(arena, lr=3e-4, weight_decay=0.1)]
            )
            # What is not trained.
            self._frozen = check_tensors(self.optimizers, arena)
            # The optimizer that clips by itself; None: clipping is done here.
            self._clipping_opt: DeviceOptimizer | None = None
            first, *others = self.optimizers
            if isinstance(first, DeviceOptimizer) and first.arena is arena and not others:
                self._clipping_opt = first
            check_clip(self.optimizers, self._clipping_opt, max_norm)
            self._claim_arena()
            adds = options is not None or deterministic
            if distributed is not None and distributed.needs_reducer:
                settings = {
                    "max_norm": str(max_norm),
                    "replay": "eager" if options is None else "graph",
                    "micro_batches": str(micro_batches) if distributed.ordered else "any",
                    "compile": str(bool(compile)),
                    "autocast": str(self.autocast),
                    "deterministic": str(self.deterministic),
                }
                self._make_reducer(distributed, settings, adds, bool(compile))
            elif adds:
                self._add_products()
            if compile:
                self.loss_fn = torch.compile(loss_fn, dynamic=False)
            if options is not None:
                self._graphs = StepGraphs(self, self._clipping_opt is not None, options)
                self._cleanup.callback(self._graphs.close)
            arena.gradients.clear()
        except BaseException:
            self._cleanup.close()
            raise
        if self._clipping_opt is not None and max_norm is not None:
            self._clipping_opt.max_norm = max_norm
        if deterministic:
            with cublas_workspace():
                # torch reads the variable here, so that products before the first step do no harm.
                pass

    def _claim_arena(self):
        """Close the step that the arena has, and take its place."""
        first = self.arena.step
        if first is not None:
            log.warning("a new TrainStep of %s closes the first", type(self.model).__name__)
            self._owns_arena, first._owns_arena = first._owns_arena, False
            first.close()
        self.arena.step = self
        self._cleanup.callback(setattr, self.arena, "step", None)

    def _release_own_arena(self):
        if self._owns_arena:
            self.arena.release()

    def _make_reducer(self, distributed: Distributed, settings: dict, adds: bool, compiled: bool):
        """Compare the models of all ranks, and take over rank 0's weights."""
        unheld = any(self.arena.number_of(p) is not None for p in self._frozen)
        if distributed.sharded and (self._clipping_opt is None or unheld):
            kinds = ", ".join(type(opt).__name__ for opt in self.optimizers)
            raise ArgumentError(
                f"sharded=True with {kinds}: a rank has its share of the gradient only; expected "
                "one optimizer, a ga.AdamW over the arena and all of its tensors"
            )
        if settings["replay"] == "graph" and distributed.backend != "nccl":
            raise ArgumentError(
                "replay='graph' needs collectives that a CUDA graph can hold, those of NCCL; the "
                f"group's are {distributed.backend}'s: expected replay='eager'"
            )
        # Moves the arena's buffers: before layers know their addresses.
        kind = OrderedReducer if distributed.ordered else Reducer
        self.reducer = reducer = kind(distributed, self.arena, self.optimizers, settings)
        self._cleanup.callback(lambda: reducer.close(self._closes_alone))
        if adds:
            self._add_products()
        # Told while a compiled backward runs.
        if compiled and self.products is not None:
            reducer.follow(self.products)

    def _add_products(self):
        """Captured, an addition by a product costs the host nothing, and nothing is rounded between
        the product and the sum."""
        self.products = Products(self.arena)
        self._cleanup.callback(self.products.close)

    # ---- a step ----

    def __call__(self, batch) -> StepOutput:
        """Take one step.

        When loss_fn or backward raises, the gradients are dropped and the weights stay.

        Args:
            batch: a tensor, or tensors in nested tuples, lists and dicts (also other mappings), on
                the model's device, with rows in dim 0. [x, y], two tensors as a DataLoader makes
                them, is one batch. A list whose elements are all tuples, lists or dicts is a list
                of micro-batches. So is what a DataLoader makes of samples that are pairs of dicts:
                pass tuple(batch). What has no rows (numbers, strings, None, () tensors, NumPy
                arrays) goes to each micro-batch. With replay="graph" what is no tensor must be
                hashable, and each new value is captured. With several ranks None: this one has no
                batch left, and the others have.

        Returns:
            A StepOutput. Nothing waits for the device until a value is read.

        Raises:
            ArgumentError: for a batch whose tensors differ in dim 0 or have no rows, for a loss
                that is not one element, for a weight that was unfrozen since, and after close().
            CaptureError: for a capture that fails, except the first one with policy "auto", after
                which steps are launched; for a replayed step that does not match its graph any
                more; with replay="graph" also for a weight with a hook of
                `register_post_accumulate_grad_hook`, which a replay would not call.
            RankError: where another rank is lost, or its weights differ.
        """
        if self._closed and self.replays != "graph":
            raise ArgumentError("this TrainStep is closed; make a new one to continue training")
        if any(p.requires_grad for p in self._frozen):
            self._frozen = check_tensors(self.optimizers, self.arena)
        if self._graphs is not None:
            self._graphs.check_hooks()
        batch = with_dicts(batch)
        timer: Any = self.meter.timer if self.meter else None
        mark = timer.mark if timer else _no_mark
        if timer:
            timer.start()
        with deterministic_mode() if self.deterministic else contextlib.nullcontext():
            if self._graphs is not None and self._graphs.replays == "graph":
                output = self._graphs(batch)
                if self.reducer is not None and self.replays == "graph":
                    self.reducer.heartbeat()
                mark("replay")
            else:
                output = self._eager_step(batch, mark)
        for scheduler in self.schedulers:
            scheduler.step()
        if timer:
            timer.stop()
        if self.reducer is not None:
            self.reducer.after_step()
        self.count += 1
        return output

    def _eager_step(self, batch, mark=_no_mark) -> StepOutput:
        """The step, operation by operation. A graph captures the same calls.

        mark: called with the name of each stage at its end."""
        with self._accumulation_window():
            totals = self._accumulate(self._split(batch), self.reducer, mark)
            output = self._update(totals, mark)
        mark("zero")
        return output

    @contextlib.contextmanager
    def _accumulation_window(self):
        """Ends without gradients, for the next step. So does an error."""
        try:
            yield
        except BaseException as error:
            self.arena.gradients.clear()
            if self.reducer is not None:
                self.reducer.abort_step(error)
            raise
        self.arena.gradients.clear()

    def _split(self, batch) -> list:
        """This rank's micro-batches: a list of what loss_fn gets as `micro`."""
        if self.reducer is None:
            return split(batch, self.micro_batches)
        if batch is None:
            return []
        micros = split(batch, self.micro_batches)
        if self.reducer.config.ordered and len(micros) > self.micro_batches:
            raise ArgumentError(
                f"{len(micros)} micro-batches in ordered mode; expected at most "
                f"micro_batches={self.micro_batches}, on every rank"
            )
        return micros

    def _accumulate(self, micros, reducer: Reducer | None, mark=_no_mark) -> Totals:
        """Forward and backward of every micro-batch; afterwards `.grad` is the sum.

        reducer: None in a warm-up, which this rank runs by itself."""
        totals = Totals()
        ordered = reducer if isinstance(reducer, OrderedReducer) else None
        if reducer is not None:
            reducer.begin_step()
        gradients = self.arena.gradients
        with gradients.collected_by_hand(), gradients.aside():
            for i, micro in enumerate(micros):
                # Starts to all-reduce while the last backward runs.
                is_last = i == len(micros) - 1
                loss, tokens = self._micro(micro, len(micros), mark, reducer if is_last else None)
                totals.add(loss, tokens)
                if ordered is not None:
                    ordered.add_micro_batch(Totals(loss, tokens, 1))
        if ordered is not None:
            # The other ranks may have more micro-batches.
            for _ in range(self.micro_batches - len(micros)):
                ordered.add_micro_batch(Totals())
        return totals

    def _micro(
        self, micro, parts: int, mark=_no_mark, reducer: Reducer | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of one of `parts` micro-batches: its loss in fp32, and its tokens.

        reducer: of the last backward, which sends the sums while it runs."""
        gradients = self.arena.gradients
        # Dynamo may trace in any forward: an fp32 `.grad` of a bf16 weight would break its graph.
        # And many gradients are added by one launch.
        with gradients.aside():
            loss, tokens = self._forward(micro)
            if self.reducer is not None:
                # The gradient is divided in _update(), by the micro-batches of all ranks.
                parts = 1
            if tokens is None:
                loss = loss / parts
            mark("forward")
            listener = reducer.listener() if reducer is not None else None
            if listener is not None and self._graphs is not None:
                # Buckets will be sent beside this backward, on other streams.
                self._graphs.split()
            if self.products is not None:
                self.products.begin_backward()
            gradients.show_hooked()
            with gradients.listening(listener):
                loss.backward()
            if self.products is not None:
                self.products.end_backward()
        mark("backward")
        return loss.detach().float(), tokens

    def _forward(self, micro) -> tuple[Tensor, Tensor | None]:
        """What loss_fn returns, checked: a loss, and its tokens as a tensor or None."""
        device = self.arena.device
        autocast = torch.autocast(device.type, self.autocast) if self.autocast else None
        with autocast or contextlib.nullcontext():
            result = self.loss_fn(self.model, micro)
        loss, tokens = result if isinstance(result, tuple) else (result, None)
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise ArgumentError(
                f"loss_fn returned {type(loss).__name__}; expected a one-element tensor, or "
                "(that, tokens)"
            )
        if isinstance(tokens, Tensor):
            if tokens.numel() != 1:
                raise ArgumentError(
                    f"loss_fn counted tokens in a tensor of shape {tuple(tokens.shape)}; expected "
                    "one number"
                )
            tokens = tokens.reshape(()) if tokens.dim() else tokens
        elif tokens is not None:
            tokens = torch.full((), tokens, device=loss.device)
        return loss.reshape(()) if loss.dim() else loss, tokens

    def _update(
        self,
        totals: Totals,
        mark=_no_mark,
        optimizers: list[torch.optim.Optimizer] | None = None,
    ) -> StepOutput:
        """From the sums of this rank's micro-batches to the new weights.

        optimizers: those that take a step. Default: all."""
        if self.reducer is not None:
            totals = self.reducer.reduce(totals)
        mean_loss = self._mean_loss(totals)
        divisor = self._divisor(totals)
        mark("accumulate")
        clip = self._clip_and_step(
            divisor, mark, self.optimizers if optimizers is None else optimizers
        )
        tokens = totals.tokens
        if self.reducer is not None:
            tokens = self.reducer.as_counted(tokens)
        return StepOutput(mean_loss, tokens, **clip)

    @torch.no_grad()
    def _mean_loss(self, totals: Totals) -> Tensor:
        """The mean loss per token; where loss_fn returns means, their mean."""
        # A rank alone has a micro-batch, and reduce() returns a tensor.
        assert totals.loss is not None
        if totals.tokens is not None:
            return (totals.loss / totals.tokens.clamp(min=1)).float()
        if self.reducer is None:
            return totals.loss
        return (totals.loss / totals.micro_batches).float()

    @torch.no_grad()
    def _divisor(self, totals: Totals) -> Tensor | None:
        """What to divide the summed gradient by; None: each loss was divided before backward."""
        if totals.tokens is not None:
            return totals.tokens.clamp(min=1)
        if self.reducer is None:
            return None
        # reduce() returns a tensor.
        assert isinstance(totals.micro_batches, Tensor)
        return totals.micro_batches

    def _clip_and_step(self, divisor: Tensor | None, mark, optimizers) -> dict[str, Tensor]:
        opt = self._clipping_opt
        if opt is not None:
            opt.gradient_divisor = divisor
            try:
                opt.step()
            finally:
                opt.gradient_divisor = None
            mark("optimizer")
            return clipped_by(opt)
        if divisor is not None:
            grads = [p.grad for p in self.arena.module_parameters if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, 1.0 / divisor)
        result = {}
        if self.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.arena.parameters(), self.max_norm)
            result = clipped_here(norm, self.max_norm)
            mark("clip")
        for optimizer in optimizers:
            optimizer.step()
        mark("optimizer")
        first, *others = self.optimizers
        if self.max_norm is None and isinstance(first, DeviceOptimizer) and not others:
            # A ga.AdamW over parameters, which may have clipped by itself.
            return clipped_by(first)
        return result

    # ---- state and control ----

    @property
    def max_norm(self) -> float | None:
        """The limit of the gradient norm, or None without clipping."""
        return self._max_norm if self._clipping_opt is None else self._clipping_opt.max_norm

    @property
    def replays(self) -> str:
        """How the next step runs, "graph" or "eager"."""
        return self._graphs.replays if self._graphs else "eager"

    @property
    def reason(self) -> str:
        """Why `replays` is what it is, in words."""
        return self._graphs.reason if self._graphs else "replay is 'eager'"

    @property
    def graphs(self) -> GraphedStep | None:
        """The graphs of whole batches; None when replay is "eager"."""
        return self._graphs.batch_graphs if self._graphs else None

    def capture(self, batch):
        """Capture for this kind of (whole) batch now, without taking a step.

        Args:
            batch: as for a call.
        """
        if self._graphs:
            with deterministic_mode() if self.deterministic else contextlib.nullcontext():
                self._graphs.capture(with_dicts(batch))

    def reset(self):
        """Close every graph: the next step captures anew. For a model changed on purpose."""
        if self._graphs:
            self._graphs.reset()

    def gathered(self):
        """A context in which a sharded optimizer's state is whole, to be saved or loaded.

        Enter it on every rank.

        Returns:
            A context manager.
        """
        if self.reducer is not None and self.reducer.sharded:
            # A sharded optimizer clips by itself: see _make_reducer.
            assert self._clipping_opt is not None
            return self._clipping_opt.gathered()
        return contextlib.nullcontext()

    def close(self, alone: bool = False):
        """Close the graphs, restore the layers; release the arena if it was made here.

        Args:
            alone: with several ranks and a sharded optimizer, do not wait for the other ranks to
                gather its state; it is lost. A `with` block left by an error does so, too.
        """
        self._closes_alone = alone
        self._closed = True
        self._cleanup.close()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind, *error) -> None:
        self.close(alone=kind is not None)
