"""Gradient accumulation: backward adds gradients into the arena's fp32 sum, in one of four modes.

    ga.ops.accumulate_(total, fresh)              # one tensor: fp32 total += fp32 or bf16 fresh
    arena = ga.Arena(model)
    accumulator = ga.GradientAccumulator(arena, "arena")
    for micro in micro_batches:                   # every backward() adds into arena.grads
        loss(model, micro).backward()
    opt.step(); opt.zero_grad()                   # any torch optimizer over arena.parameters()

The modes, each faster than the one before:
  host      downloads each gradient, adds it on the CPU, and uploads the sum
  autograd  torch's own `p.grad += fresh`, in the parameter's dtype (in bf16 256 + 1 = 256); the
            result is moved into the arena
  arena     a hook collects fresh gradients, fp32 or bf16; one launch adds many tensors into fp32
  fused     the weight-gradient product of an nn.Linear, and the row sums of an nn.Embedding without
            max_norm, write straight into the arena; other tensors (of subclasses, weights with
            hooks, and small weights on a CPU) go as in `arena`

This file knows about hooks, backward passes and the accumulation window. Where a gradient goes is
the mode's: accumulation_modes.py and fused_mode.py.

Source: gradient accumulation on the GPU as in entrenar's ALB-091; mixed-precision sums as in
Micikevicius et al., 2018.
"""

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ArgumentError
from ..ops import GRAD_DTYPES, check_choice, check_gradient
from .accumulation_modes import (
    AccumulationMode,
    ArenaMode,
    AutogradMode,
    HostMode,
    Window,
    zero_sums,
)
from .arena import Arena, abandon, check_arena
from .fused_mode import FusedMode

if TYPE_CHECKING:
    from typing_extensions import Self

MODES = ("host", "autograd", "arena", "fused")

_accumulators: "weakref.WeakSet[GradientAccumulator]" = weakref.WeakSet()


class BackwardListener:
    """Callbacks about gradients, called by autograd's threads while a backward runs.

    A subclass overrides those that it needs."""

    def keeps(self, i: int, grad: Tensor) -> bool:
        """Called with a fresh gradient of tensor i.

        Returns:
            Whether the listener keeps it; then it is not added to the sum.
        """
        return False

    def gradient_complete(self, i: int, pending: bool):
        """Called when backward has computed all of tensor i's gradient.

        Args:
            pending: part of it waits for a launch (GradientAccumulator.flush).
        """

    def product_added(self, tensors: "dict[int, bool]"):
        """Called in mode "fused" when a product has been added.

        Args:
            tensors: index of each tensor of the product -> whether its gradient is complete,
                provided that this backward runs as many products as the one before.
        """


class GradientAccumulator:
    """Add the gradients of each backward() of the arena's module into `arena.grads`, until close().

    After each backward the sums stand as `.grad` of arena.parameters(), and the fp32 sum of a bf16
    parameter also as its own `.grad` (its grad_dtype is None from here on). What is done to these
    counts, as in torch: zero_grad(), clipping, an edit in place, another tensor, None. A parameter
    that got no gradient has `.grad` None. finish() runs before the step of a ga optimizer over the
    arena, and in `host`, in `autograd` and with bf16 parameters of any optimizer over
    arena.parameters(). `arena` and `fused` download no gradient and never synchronise with the
    host.

    `optimizer.zero_grad()`, module.zero_grad() or zero_() opens the next accumulation window. A
    bf16 parameter and its master have one sum, but None in one place reaches the other at the next
    backward, finish() or step.

    A backward that raises drops its window's sum, which would be partial: every `.grad` is None at
    once. Only fp32 parameters in `autograd` keep it, as torch does.

    In `fused`, a weight that has tensor hooks when the accumulator is made is added as in `arena`.

    Args:
        arena: an arena without an accumulator.
        mode: how a fresh gradient gets into the sum: "host", "autograd", "arena" or "fused" (this
            module's first lines). Default: "arena", one launch for many tensors.
        exposed_after: "backward" or "finish". "finish" is for a caller that ends its windows with
            finish() itself, and saves the modes `host` and `autograd` a pass over memory per
            backward: before finish() their sums do not stand as `.grad`. In all modes the `.grad`
            of bf16 parameters is None then, and only their masters' is the sum.

    Raises:
        ArgumentError: for an unknown mode and for an arena that has an accumulator already.

    Source:
        kernels_cu/accumulate.cu.

    Example:
        >>> model = torch.nn.Linear(4, 2, device=ga.default_device())
        >>> with ga.GradientAccumulator(ga.Arena(model)) as accumulator:
        ...     for micro_batch in torch.ones(3, 8, 4, device=ga.default_device()):
        ...         model(micro_batch).sum().backward()
        ...     accumulator.finish()
        ...     print(model.bias.grad.tolist())
        [24.0, 24.0]
    """

    def __init__(self, arena: Arena, mode: str = "arena", *, exposed_after: str = "backward"):
        if mode not in MODES:
            raise ArgumentError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
        check_choice("exposed_after", exposed_after, ("backward", "finish"))
        if GradientAccumulator.of(arena) is not None:
            raise ArgumentError(
                "this arena has a GradientAccumulator already; call close() on that one first"
            )
        check_arena("arena", arena, ": ga.GradientAccumulator(ga.Arena(model))")
        arena.check()
        arena.check_trainable()
        self.arena = arena
        self.mode = mode
        self._window = Window(arena)
        self._squares = False
        self._listener: "BackwardListener | None" = None
        # The backward that runs now, by autograd's number.
        self._backward: "int | None" = None
        # Indices of the tensors whose sums the latest step has used and cleared; none, once
        # zero_grad() or zero_() was called.
        self.cleared_by_step: "frozenset[int]" = frozenset()
        # The number of each backward that has begun -> a weak reference to its callback, which
        # autograd drops when the backward raises.
        self._running: "dict[int, weakref.ref]" = {}
        self._frozen = arena.frozen()
        # Whether a weight that was unfrozen since was warned of.
        self._warned = False
        # Whether a process group was there when DistributedDataParallel was looked for.
        self._looked_for_ddp = False
        # A backward has raised: the sums are partial, and hidden.
        self._partial = False
        # Whether a ga optimizer leaves the sums that it has used, instead of clearing them. The
        # next window begins with overwriting(), or clears them. For a TrainStep in mode "fused".
        self.leaves_sums = False
        # Sums that a step has left stand where this window expects zeros.
        self._has_left_sums = False
        if not any(self._window.received):
            zero_sums(arena)
        else:
            for view, received in zip(arena.grad_views, self._window.received):
                if not received:
                    view.zero_()
        self._mode: AccumulationMode
        if mode == "fused":
            self._mode = FusedMode(arena, self._window, self._open_backward, lambda: self._listener)
        else:
            modes = {"host": HostMode, "autograd": AutogradMode, "arena": ArenaMode}
            self._mode = modes[mode](arena, self._window)
        if mode in ("host", "autograd"):
            self._mode.exposes_after_backward = exposed_after == "backward"
        self._handles: list = []
        if exposed_after == "backward":
            self._window.expose_bf16()
        if self._mode.uses_hooks:
            self._hook_parameters()
        else:
            # Torch exposes the sums of fp32 parameters by itself.
            for _, p, _ in self._window.bf16:
                self._handles.append(p.register_hook(self._gradient_begins))
        if mode in ("host", "autograd") or self._window.bf16:
            handle = _finish_before_steps(self)
            self._handles.append(handle)
            weakref.finalize(self, abandon, [handle])
        arena.before_release.append(self.close)
        _accumulators.add(self)

    def check_frozen(self):
        """Find a weight that was unfrozen since, which this accumulator knows nothing of.

        Raises:
            ArgumentError: for the first one that is in no arena.
        """
        if any(p.requires_grad for _, p in self._frozen):
            self.arena.check_frozen(self._frozen)

    # ---- hooks, run by autograd's threads ----

    def _hook_parameters(self):
        for i, p in enumerate(self.arena.params):
            if self.arena.masters[i] is p or self._window.bf16:
                # Its .grad may be exposed: hide it before autograd looks.
                self._handles.append(p.register_hook(self._gradient_begins))
            self._handles.append(
                p.register_post_accumulate_grad_hook(functools.partial(self._gradient_ready, i))
            )

    # Both run once per tensor and backward: each call counts on a slow host.

    def _gradient_begins(self, grad):
        """Autograd is about to accumulate this gradient."""
        if torch._C._current_graph_task_id() != self._backward:
            self._open_backward()

    def _gradient_ready(self, i, p):
        """Autograd has accumulated into p.grad, or has nothing for it."""
        if torch._C._current_graph_task_id() != self._backward:
            self._open_backward()
        grad = p.grad
        listener = self._listener
        # None: a fused product has added it, or it is undefined.
        if grad is not None:
            # p.grad is the sum itself where autograd has added in place.
            if grad is not self.arena.grad_views[i]:
                # Torch does this by itself where grad_dtype is not None.
                if self._window.bf16 and grad.dtype != p.dtype:
                    grad = grad.to(p.dtype)
                # Autograd has seen to shape and device.
                if grad.dtype not in GRAD_DTYPES or grad.layout is not torch.strided:
                    check_gradient(self.arena.segments[i].name, grad, p.shape, p.device)
                p.grad = None
                if grad.requires_grad:
                    raise ArgumentError(
                        f"the gradient of {self.arena.segments[i].name} has a graph of its own "
                        "(create_graph=True), which a sum in the arena does not keep. Instead: "
                        "torch.autograd.grad(loss, parameters, create_graph=True), or mode "
                        "'autograd'"
                    )
                if listener is None or not listener.keeps(i, grad):
                    self._mode.add(i, grad, self._squares)
            self._window.received[i] = True
        elif not self._window.received[i]:
            self._mode.no_gradient(i)
        if listener is not None:
            listener.gradient_complete(i, self._mode.pending(i))

    def _open_backward(self):
        """Begin a backward, at its first gradient."""
        task = torch._C._current_graph_task_id()
        if task == self._backward:
            return
        if not self._warned:
            try:
                self.check_frozen()
            except ArgumentError as error:
                # Somebody else may train it, by its `.grad`.
                warnings.warn(str(error), stacklevel=2)
                self._warned = True
        if not self._looked_for_ddp and self.mode != "autograd" and dist.is_initialized():
            check_no_ddp(self.arena.module)
            self._looked_for_ddp = True
        self._zero_if_partial()
        self.clear_left_sums()
        # Gradients that the backward around this one has collected (reentrant checkpointing).
        self.flush()
        self._backward = task
        self.arena.check()
        with torch.no_grad():
            self._mode.begin()
        end = functools.partial(self._end_backward, task)
        self._running[task] = weakref.ref(end, self._backward_raised)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, task):
        self._running.pop(task, None)
        self._backward = None
        self._mode.end()
        self.flush()
        if self._mode.exposes_after_backward:
            self._window.expose()

    def _backward_raised(self, end: "weakref.ref | None" = None):
        """Hide the window's sum, which is partial. Launches nothing: any thread may call this."""
        self._partial = True
        self._running.clear()
        self._window.reset()
        self._hide_sums()

    @torch.no_grad()
    def _zero_if_partial(self):
        """Zero the window's sum if a backward has raised: the sum is partial."""
        # Outside of a backward none is running: autograd is about to drop the callback.
        if self._running and torch._C._current_graph_task_id() == -1:
            self._backward_raised()
        if self._partial:
            zero_sums(self.arena)
            self._reset()

    def _reset(self, cleared: "Collection[int]" = ()):
        """Forget all of the window but the sums in arena.grads. cleared: see cleared_by_step."""
        self._mode.reset()
        self._window.reset()
        self._running.clear()
        self._partial = False
        self.cleared_by_step = frozenset(cleared)

    # ---- called from the training loop ----

    @property
    def received(self) -> "list[bool]":
        """Whether each tensor of the arena has received a gradient in this window."""
        return self._window.received

    @property
    def received_mask(self) -> int:
        """The same as bits: bit i for tensor i."""
        return sum(1 << i for i, received in enumerate(self.received) if received)

    @property
    def product_tensors(self) -> "set[int]":
        """Indices of the tensors whose gradient fused products add; empty in other modes."""
        return self._mode.product_tensors if isinstance(self._mode, FusedMode) else set()

    @contextlib.contextmanager
    def last_backward(self, squares: bool = False, listener: "BackwardListener | None" = None):
        """Context manager around the window's last backward.

        Args:
            squares: whether the last accumulation kernel also writes the chunks' sums of squares,
                of which the norm is made.
            listener: its methods are called while backward runs.

        Returns:
            A context manager.
        """
        self._squares = squares
        self._listener = listener
        try:
            yield
        finally:
            self._squares = False
            self._listener = None

    @contextlib.contextmanager
    def overwriting(self):
        """Context manager around all backwards of a window; does nothing unless leaves_sums.

        The first product of each weight overwrites what the window before has left, which is
        neither cleared nor read. At the end the sum of a weight without a gradient is zero. What is
        launched does not depend on the windows before: a captured graph may follow any of them.

        Returns:
            A context manager.
        """
        if not self.leaves_sums or any(self.received):
            yield
            return
        self._has_left_sums = False
        try:
            with self._mode.overwriting():
                yield
        except BaseException:
            self._has_left_sums = True
            raise

    @torch.no_grad()
    def clear_left_sums(self):
        """Zero the sums that a step has left, before anything adds to them or reads them."""
        if self._has_left_sums:
            zero_sums(self.arena)
            self._has_left_sums = False

    def sums_left(self):
        """Tell that a step has left its sums: a replay runs the kernels of a step, not Python."""
        self._has_left_sums = self.leaves_sums

    @torch.no_grad()
    def flush(self):
        """Add the gradients that wait for a launch."""
        self._mode.flush(self._squares)

    @torch.no_grad()
    def finish(self):
        """Complete the window's sum in arena.grads and expose it as `.grad`.

        A second call changes nothing."""
        self._zero_if_partial()
        self.clear_left_sums()
        self._window.merge()
        self._mode.finish(self._squares)
        removed = [
            i
            for i, master in enumerate(self.arena.masters)
            if self._window.exposed[i] and master.grad is None
        ]
        self._mode.zero_grad(removed)
        self._window.expose()

    @torch.no_grad()
    def zero_(self, cleared: "Collection[int] | None" = None):
        """Open a new window: the sum is zero (one device memset), no parameter has a gradient.

        Args:
            cleared: indices of the tensors whose sums are zero already (ga.AdamW clears them while
                it reads them), or are left; the memset is left out.
        """
        if cleared is None:
            zero_sums(self.arena)
        else:
            for i, received in enumerate(self.received):
                if received and i not in cleared:
                    self.arena.grad_views[i].zero_()
        self._reset(cleared or ())
        self._hide_sums()
        self._has_left_sums = cleared is not None and self.leaves_sums

    def end_step(self, expose: bool):
        """Empty cleared_by_step.

        Args:
            expose: before that its tensors get their sums, which are zero, as `.grad`.
        """
        if expose and self.cleared_by_step:
            self.clear_left_sums()
            for i in self.cleared_by_step:
                self._window.received[i] = True
            self._window.expose()
        self.cleared_by_step = frozenset()

    def _hide_sums(self):
        for p, master in zip(self.arena.params, self.arena.masters):
            p.grad = master.grad = None

    def detach(self) -> int:
        """Close the window but leave the sums in arena.grads: a captured graph can end here.

        Returns:
            received_mask, for restore().
        """
        mask = self.received_mask
        self._reset()
        self._hide_sums()
        return mask

    def restore(self, mask: int):
        """Continue the window that detach() closed.

        Args:
            mask: what detach() returned.
        """
        self._window.received = [bool(mask >> i & 1) for i in range(len(self.received))]
        self._window.expose()

    def window_state(self) -> "tuple[list[bool], list[bool], frozenset[int], bool]":
        """The state of the window, for set_window_state().

        Returns:
            Which tensors have received a gradient, which have their sum exposed as `.grad`,
            cleared_by_step, and whether a step has left its sums.
        """
        window = self._window
        return [*window.received], [*window.exposed], self.cleared_by_step, self._has_left_sums

    def set_window_state(self, state: "tuple[list[bool], list[bool], frozenset[int], bool]"):
        """Set what window_state() returned. The sums and `.grad` are left to the caller.

        Args:
            state: what window_state() returned.
        """
        received, exposed, cleared, self._has_left_sums = state
        self._reset(cleared)
        self._window.received = [*received]
        self._window.exposed = [*exposed]

    @torch.no_grad()
    def scale_(self, factor: "float | Tensor"):
        """Complete the sums, and multiply them by a factor, without a synchronisation.

        Args:
            factor: a number, or a one-element tensor on the arena's device.
        """
        self.finish()
        self.arena.grads.mul_(factor)

    def close(self):
        """Remove the hooks; backward fills `.grad` as in torch again. The arena stays."""
        if self not in _accumulators:
            return
        self._zero_if_partial()
        self.flush()
        self.clear_left_sums()
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            self._window.close()
        self._mode.close()
        self.arena.before_release.remove(self.close)
        _accumulators.discard(self)

    @staticmethod
    def of(arena: Arena) -> "GradientAccumulator | None":
        """The open accumulator of an arena, None when there is none.

        Args:
            arena: any arena.
        """
        return next((a for a in _accumulators if a.arena is arena), None)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __repr__(self):
        return f"GradientAccumulator({self.mode!r}, {self.arena!r})"


def check_no_ddp(module: nn.Module):
    """Refuse a module inside of torch's DistributedDataParallel, which reads each `.grad` while
    backward runs, when the accumulator has taken it away.

    Raises:
        ArgumentError: where there is one. All objects of the process are looked at.
    """
    parts = set(module.modules())
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and not parts.isdisjoint(each.modules()):
            raise ArgumentError(
                "DistributedDataParallel averages each gradient while backward runs, and this "
                "accumulator takes it away before. Expected mode 'autograd', or "
                "ga.TrainStep(model, ..., distributed=ga.Distributed()) in its place"
            )


def open_accumulators() -> "list[GradientAccumulator]":
    """All that are open, of whatever arena."""
    return list(_accumulators)


def _finish_before_steps(accumulator: GradientAccumulator):
    """Call finish() before every step of an optimizer over arena.parameters().

    Returns:
        The hook's handle. The hook holds the accumulator weakly.
    """
    weak = weakref.ref(accumulator)

    def hook(optimizer, args, kwargs):
        accumulator = weak()
        if accumulator is not None and accumulator.arena.is_updated_by(optimizer):
            accumulator.finish()

    return register_optimizer_step_pre_hook(hook)


def finish_for(parameters: "Iterable[Tensor]"):
    """Call finish() where these parameters' gradients depend on it, before they are read.

    ArgumentError for bf16 parameters whose sums stand as `.grad` of their fp32 masters only
    (exposed_after="finish")."""
    if not _accumulators:
        return
    ids = {id(p) for p in parameters}
    for accumulator in list(_accumulators):
        arena = accumulator.arena
        # Without bf16 weights the parameters are the masters.
        low = arena.bf16_weights is not None and any(id(p) in ids for p in arena.params)
        if not low and ids.isdisjoint(arena.master_ids):
            continue
        accumulator.finish()
        for i, (p, master) in enumerate(zip(arena.params, arena.masters)):
            if id(p) in ids and master is not p and p.grad is None and accumulator.received[i]:
                raise ArgumentError(
                    f"the gradient of {arena.segments[i].name} is the sum of its fp32 master: "
                    "expected the arena, or arena.parameters(), instead of the module's bf16 "
                    "parameters"
                )
