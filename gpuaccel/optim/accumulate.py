"""Gradient accumulation: what backward yields is added into the arena's fp32 sum, in one of four modes.

    >>> ga.ops.accumulate_(total, fresh)                       # one tensor: fp32 total += fp32 or bf16 fresh
    >>> arena = ga.Arena(model)
    >>> accumulator = ga.GradientAccumulator(arena, "arena")   # from now on every backward() adds into arena.grads
    >>> for micro in micro_batches:
    ...     loss(model, micro).backward()
    >>> opt.step(); opt.zero_grad()                            # any torch optimizer over arena.parameters()

The modes, each faster than the one before:
  host      each gradient is downloaded, added on the CPU, and the sum uploaded at the end
  autograd  torch's own: `p.grad += fresh`, in the parameter's dtype (bf16 parameters: 256 + 1 = 256), moved to the arena at the end
  arena     a hook collects fresh gradients (fp32 or bf16); one launch adds many tensors into fp32
  fused     the weight-gradient product of every nn.Linear, and the row sums of every nn.Embedding without max_norm, are added into
            the arena by themselves; the rest (subclasses, weights with hooks) goes as in `arena`

This file knows about hooks, backward passes and the accumulation window; where a gradient goes is the mode's:
accumulation_modes.py and fused_mode.py.

Source: gradient accumulation on the GPU as in entrenar's ALB-091; mixed-precision sums as in Micikevicius et al., 2018.
"""

import contextlib
import functools
import itertools
import weakref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ArgumentError
from ..ops import check_gradient
from .accumulation_modes import (
    AccumulationMode,
    ArenaMode,
    AutogradMode,
    HostMode,
    Window,
    zero_sums,
)
from .arena import Arena
from .fused_mode import FusedMode

MODES = ("host", "autograd", "arena", "fused")

_accumulators: "weakref.WeakSet[GradientAccumulator]" = weakref.WeakSet()


class BackwardListener:
    """Is told about gradients while a backward runs, in autograd's threads; a subclass overrides what it wants to know."""

    def keeps(self, i: int, grad: Tensor) -> bool:
        """A fresh gradient of tensor i. True: the listener keeps it, and it is not added to the sum."""
        return False

    def gradient_complete(self, i: int, pending: bool):
        """Backward has given tensor i all of its gradient. pending: part of it waits for a launch (GradientAccumulator.flush)."""

    def product_added(self, tensors: "dict[int, bool]"):
        """Mode "fused": a product has been added. tensors: number -> is it complete, if this backward goes as the one before?"""


class GradientAccumulator:
    """From its making until close(), every backward() of the arena's module adds into `arena.grads`, in the given mode.

    After each backward (`host` and `autograd`: after finish(), which also runs before the step of any optimizer over
    arena.parameters()) the sums stand as `.grad` of arena.parameters(); a parameter that got no gradient has `.grad` None, as in
    torch. `optimizer.zero_grad()` or zero_() opens the next accumulation window. With bf16 parameters zero through the optimizer
    or zero_(), because module.zero_grad() does not know their fp32 masters; to abandon a window before finish() in `host` and
    `autograd`, zero with zero_(). A backward that raises drops its window's sum: it is partial. A GradScaler looks at `.grad`
    before the optimizer's step: in `host` and `autograd` call finish() before it. A weight that had tensor hooks when this was
    made stays out of `fused`. No host synchronisation and no download in `arena` and `fused`.

    Raises ArgumentError for an unknown mode or an arena that has an accumulator already."""

    def __init__(self, arena: Arena, mode: str = "arena"):
        if mode not in MODES:
            raise ArgumentError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
        if GradientAccumulator.of(arena) is not None:
            raise ArgumentError(
                "this arena has a GradientAccumulator already; call close() on that one first"
            )
        arena.check()
        self.arena = arena
        self.mode = arena_mode = mode
        self._window = Window(arena)
        self._squares = False
        self._listener: "BackwardListener | None" = None
        # The backward that runs now (autograd's number for it); weak references to callbacks that die with their backward.
        self._backward: "int | None" = None
        self._running: "dict[int, weakref.ref]" = {}
        if not any(self._window.received):
            zero_sums(arena)
        else:
            kept = self._window.received
            for view in itertools.compress(arena.grad_views, [not k for k in kept]):
                view.zero_()
        self._mode: AccumulationMode
        if arena_mode == "fused":
            self._mode = FusedMode(arena, self._window, self._open_backward, lambda: self._listener)
        else:
            modes = {"host": HostMode, "autograd": AutogradMode, "arena": ArenaMode}
            self._mode = modes[arena_mode](arena, self._window)
        self._handles: list = []
        if self._mode.uses_hooks:
            self._hook_parameters()
        if mode in ("host", "autograd"):
            self._handles.append(_finish_before_steps(self))
        arena.before_release.append(self.close)
        _accumulators.add(self)

    # ---- hooks, run by autograd's threads ----

    def _hook_parameters(self):
        for i, p in enumerate(self.arena.params):
            if self.arena.masters[i] is p:
                # Its .grad may be exposed: hide it before autograd looks.
                self._handles.append(p.register_hook(lambda grad: self._open_backward()))
            self._handles.append(
                p.register_post_accumulate_grad_hook(functools.partial(self._gradient_ready, i))
            )

    def _gradient_ready(self, i, p):
        """Autograd has accumulated into p.grad, or has nothing for it."""
        self._open_backward()
        grad, listener = p.grad, self._listener
        # None: a fused product took it, or it was undefined.
        if grad is not None:
            # Else autograd has added it in place already.
            if grad is not self.arena.grad_views[i]:
                check_gradient(self.arena.segments[i].name, grad, p.shape, p.device)
                p.grad = None
                if listener is None or not listener.keeps(i, grad):
                    self._mode.add(i, grad, self._squares)
            self._window.received[i] = True
        if listener is not None:
            listener.gradient_complete(i, self._mode.pending(i))

    def _open_backward(self):
        """Called for every gradient; acts at a backward's first."""
        task = torch._C._current_graph_task_id()
        if task == self._backward:
            return
        self._drop_partial()
        # What the backward around this one has collected (reentrant checkpointing).
        self.flush()
        self._backward = task
        self.arena.check()
        with torch.no_grad():
            self._mode.begin()
        end = functools.partial(self._end_backward, task)
        self._running[task] = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, task):
        self._running.pop(task, None)
        self._backward = None
        self._mode.end()
        self.flush()
        if self._mode.exposes_after_backward:
            self._window.expose()

    @torch.no_grad()
    def _drop_partial(self):
        """If a backward never came to its end, it raised: what it left is partial, and so is the window's sum."""
        if any(end() is None for end in self._running.values()):
            self._zero_sums()
            for p, master in zip(self.arena.params, self.arena.masters):
                if master is not p:
                    master.grad = None

    def _zero_sums(self):
        self._mode.zero()
        self._window.clear()
        self._running.clear()

    # ---- called from the training loop ----

    @property
    def received(self) -> "list[bool]":
        """Of each tensor of the arena: has it received a gradient in this window?"""
        return self._window.received

    @property
    def received_mask(self) -> int:
        """The same as bits: bit i for tensor i."""
        return sum(1 << i for i, received in enumerate(self.received) if received)

    @property
    def product_tensors(self) -> "set[int]":
        """Tensors (numbers) whose gradient fused products add; empty in other modes."""
        return getattr(self._mode, "product_tensors", set())

    @contextlib.contextmanager
    def last_backward(self, squares: bool = False, listener: "BackwardListener | None" = None):
        """Around the window's last backward. squares: the last addition also writes the sums of squares for the norm.
        listener: is told about gradients while backward runs."""
        self._squares = squares
        self._listener = listener
        try:
            yield
        finally:
            self._squares = False
            self._listener = None

    @torch.no_grad()
    def flush(self):
        """Add the gradients that wait for a launch."""
        self._mode.flush(self._squares)

    @torch.no_grad()
    def finish(self):
        """Bring the window's sum into arena.grads and expose it. Does nothing twice; needed by hand only without an optimizer."""
        self._drop_partial()
        self._mode.finish(self._squares)
        taken_away = [
            i
            for i, master in enumerate(self.arena.masters)
            if self._window.exposed[i] and master.grad is None
        ]
        self._mode.drop(taken_away)
        self._window.expose()

    @torch.no_grad()
    def zero_(self, cleared=None):
        """Open a new window: the sum is zero (one device memset), no parameter has a gradient.

        cleared: numbers of the tensors whose sums someone else has set to zero (ga.AdamW, while it read them): no memset then."""
        if cleared is None:
            self._zero_sums()
        else:
            for i, received in enumerate(self.received):
                if received and i not in cleared:
                    self.arena.grad_views[i].zero_()
            self._mode.cleared()
            self._window.clear()
            self._running.clear()
        self._hide()

    def _hide(self):
        for p, master in zip(self.arena.params, self.arena.masters):
            p.grad = master.grad = None

    def detach(self) -> int:
        """Leave the sums where they are and forget that there are any, so that a captured graph can end here. Returns received_mask."""
        mask = self.received_mask
        self._mode.discard()
        self._window.clear()
        self._running.clear()
        self._hide()
        return mask

    def restore(self, mask: int):
        """Go on with the sums that detach() left. mask: the tensors that have received a gradient."""
        self._window.received = [bool(mask >> i & 1) for i in range(len(self.received))]
        self._window.expose()

    def window_state(self) -> tuple:
        """Which tensors have received a gradient, and which show their sum as `.grad`: for set_window_state()."""
        return [*self._window.received], [*self._window.exposed]

    def set_window_state(self, state: tuple):
        """Bring back what window_state() returned; the sums and `.grad` are the caller's business."""
        received, exposed = state
        self._window.received = [*received]
        self._window.exposed = [*exposed]

    @torch.no_grad()
    def scale_(self, factor):
        """arena.grads *= factor; a number or a one-element tensor on the arena's device (which costs no synchronisation)."""
        self.arena.grads.mul_(factor)

    def close(self):
        """Remove the hooks; the module's gradients go where torch puts them. The arena stays."""
        if self not in _accumulators:
            return
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._mode.close()
        self.arena.before_release.remove(self.close)
        _accumulators.discard(self)

    @staticmethod
    def of(arena: Arena) -> "GradientAccumulator | None":
        """The open accumulator of an arena, None when there is none."""
        return next((a for a in _accumulators if a.arena is arena), None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __repr__(self):
        return f"GradientAccumulator({self.mode!r}, {self.arena!r})"


def _finish_before_steps(accumulator):
    """Before the step of any optimizer over arena.parameters(), finish(). Returns the hook's handle."""
    weak = weakref.ref(accumulator)

    def hook(optimizer, args, kwargs):
        accumulator = weak()
        if accumulator is not None and accumulator.arena.is_updated_by(optimizer):
            accumulator.finish()

    return register_optimizer_step_pre_hook(hook)


def finish_for(parameters):
    """Before these parameters' gradients are read: sums that are not yet in place are brought there. ArgumentError where they cannot
    be seen at all: the sums of bf16 parameters are those of their fp32 masters."""
    ids = {id(p) for p in parameters}
    for accumulator in list(_accumulators):
        arena = accumulator.arena
        if ids & arena.master_ids:
            accumulator.finish()
        for i, (p, master) in enumerate(zip(arena.params, arena.masters)):
            if id(p) in ids and master is not p and p.grad is None and accumulator.received[i]:
                raise ArgumentError(
                    f"the gradient of {arena.segments[i].name} is the sum of its fp32 master: expected the arena, or "
                    "arena.parameters(), instead of the module's bf16 parameters"
                )
