"""The gradients of an arena: `.grad` is their only state.

| a parameter's `.grad` is | then |
|---|---|
| the arena's slice | it is the sum so far: torch adds to it in place, in fp32 |
| another tensor, or has got other memory | that is the whole sum; it is copied into the slice |
| None | there is no gradient; the slice is stale, and the next write overwrites it |

A fresh gradient is another tensor, which autograd makes where `.grad` is None. At the end of its
backward, or when many bytes wait, all of them are copied into their slices by one call, collect().
The master of a bf16 parameter shows the parameter's `.grad` as its own.

A TrainStep puts the sums aside while its micro-batches run: `.grad` is None, and autograd makes
every gradient anew. collect() then adds up to 180 of them to their sums by one launch.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..ops.accumulate import GRAD_DTYPES, accumulate_each_, check_gradient
from .layout import Segment, own_storage

# Fresh gradients are copied into their slices when this many bytes wait.
MAX_FRESH_BYTES = 256 * 2**20


class GradientListener:
    """Told about gradients while a backward runs, by autograd's threads: `arena.listener`."""

    def gradient_complete(self, i: int):
        """Backward has computed all of tensor i's gradient, which may still wait for
        Arena.collect()."""

    def product_added(self, tensors: dict[int, bool]):
        """A product has added its gradient (optim/products.py).

        Args:
            tensors: index of each tensor of the product -> whether its gradient is complete,
                provided that this backward runs as many products as the one before.
        """


class Gradients:
    """The gradient sums of an arena's parameters: `arena.gradients`.

    Args:
        params: of the arena, in its order. Until close() a hook of each sees its gradients.
        segments: where each of them lies.
        buffer: (N,) fp32, the sums.
        chunk_to_tensor: (chunks,) int32, the tensor of each chunk.
        check: called where a gradient does not fit its parameter: an ArgumentError of it comes
            first. Held weakly.

    Attributes:
        views: of each tensor its slice of the buffer, in its shape. That of a tensor whose `.grad`
            is None is stale. place() puts another tensor there.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        segments: list[Segment],
        buffer: Tensor,
        chunk_to_tensor: Tensor,
        check: Callable[[], None],
    ):
        self.params = params
        self.segments = segments
        self.buffer = buffer
        self.chunk_to_tensor = chunk_to_tensor
        self._check = weakref.WeakMethod(check)
        # Each has a storage and a version of its own. Where the gradients that one operation writes
        # share a storage, torch.compile's Inductor copies them before it and back after it.
        self.views = [own_storage(s.of(buffer)) for s in segments]
        # Of each view, whose own may be replaced by `p.grad.data = ...`.
        self._memory = [view.detach() for view in self.views]
        self._addresses = [view.data_ptr() for view in self.views]
        # Sums of squares that a reduction has left; the versions of the gradients then, and which
        # tensors had one.
        self._squares: tuple[Tensor, list[int], list[bool]] | None = None
        # Told about gradients while a backward runs.
        self._listeners: list[GradientListener] = []
        # Whether `.grad` is None although the slice holds a sum.
        self._aside = [False] * len(params)
        # Inside of aside(): collect() leaves every `.grad` None.
        self._hiding = False
        # The backward, by autograd's number, whose fresh gradients are collected at its end.
        self._collecting = -1
        self._fresh_bytes = 0
        weak = weakref.ref(self)
        self._hooks = [
            _gradient_hook(weak, i, self._addresses, self._listeners) for i in range(len(params))
        ]
        self._handles: list[Any] = []
        self._closed = False
        for p in params:
            if p.dtype != torch.float32:
                # None: `.grad` may have another dtype than the parameter.
                p.grad_dtype = None
        self._follow()
        # The parameters may outlive their arena.
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def close(self):
        """Make every `.grad` a tensor of its own, in its parameter's dtype."""
        self._closed = True
        remove_all(self._handles)
        for i, p in enumerate(self.params):
            # grad_dtype stays None: a dtype would be refused after module.to(another dtype).
            if p.grad is not None:
                p.grad = p.grad.to(p.dtype, copy=self._is_slice(i, p.grad))

    def moved(self):
        """The buffer has other memory: the slices follow it."""
        for s, view in zip(self.segments, self.views):
            view.data = own_storage(s.of(self.buffer))
        self._memory = [view.detach() for view in self.views]
        self._addresses[:] = [view.data_ptr() for view in self.views]

    @property
    def _following(self) -> bool:
        """Whether the hooks are registered. Handles stay while they are not."""
        hooks = self.params[0]._post_accumulate_grad_hooks
        return bool(self._handles) and self._handles[0].id in hooks

    def _follow(self):
        """Register _gradient_hook on every tensor."""
        if self._closed or self._following:
            return
        if self._handles:
            for p, handle, hook in zip(self.params, self._handles, self._hooks):
                # As registering does, in a tenth of its time.
                p._post_accumulate_grad_hooks[handle.id] = hook
            return
        for p, hook in zip(self.params, self._hooks):
            # A frozen parameter takes no hook.
            trained = p.requires_grad
            p.requires_grad_(True)
            self._handles.append(p.register_post_accumulate_grad_hook(hook))
            p.requires_grad_(trained)

    def has_hooks(self, i: int) -> bool:
        """True if tensor i has a post-accumulate hook that is not the arena's."""
        own = {self._handles[i].id} if self._handles else set()
        return not own.issuperset(self.params[i]._post_accumulate_grad_hooks or ())

    @contextlib.contextmanager
    def collected_by_hand(self):
        """Context manager: the caller calls collect() after each backward.

        Python is then not called for each gradient."""
        remove_all(self._handles)
        try:
            yield
        finally:
            self._follow()

    def _collect_later(self, grad: Tensor):
        """Queue a gradient that is not a slice.

        The queue is collected at the end of backward, or earlier when it holds many bytes."""
        if grad.requires_grad:
            # With create_graph=True `.grad` keeps its graph until a step uses it.
            return
        task = torch._C._current_graph_task_id()
        if task != self._collecting:
            self._collecting = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.collect(graphs=False))
        self._fresh_bytes += grad.numel() * grad.element_size()
        if self._fresh_bytes >= MAX_FRESH_BYTES:
            self.collect(graphs=False)

    @contextlib.contextmanager
    def listening(self, listener: GradientListener | None):
        """Context manager: `listener` is told of gradients while backward runs; None: no one."""
        if listener is None:
            yield
            return
        by_hand = not self._following
        if by_hand:
            self._follow()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            if by_hand:
                remove_all(self._handles)

    def product_added(self, tensors: dict[int, bool]):
        """Notify the listeners that a product was added: see GradientListener."""
        for listener in self._listeners:
            listener.product_added(tensors)

    def _is_slice(self, i: int, grad: Tensor) -> bool:
        """True if `grad` is tensor i's slice. Empty and sparse gradients never are."""
        view = self.views[i]
        try:
            in_place = grad.data_ptr() == self._addresses[i] != 0
        except RuntimeError:
            return False
        # A transposed view of the slice is another gradient.
        return in_place and (grad is view or grad.stride() == view.stride())

    @torch.no_grad()
    def collect(self, first: int = 0, last: int | None = None, graphs: bool = True):
        """Copy every `.grad` that is not the arena's slice into it, and make the slice `.grad`.

        A gradient whose sum is aside is added to it instead; inside of aside() `.grad` becomes
        None. Runs by itself at the end of a backward, before a step of an optimizer of this
        package, and where an fp32 master's `.grad` is read. graphs: also of those with an autograd
        graph of their own (create_graph=True), which they lose.

        Raises:
            ArgumentError: for a `.grad` of another shape, device or kind than the parameter's.
        """
        self._fresh_bytes = 0
        indices, moved = [], []
        copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        start = self.buffer.data_ptr()
        slices = range(start, start + 4 * len(self.buffer))
        rows = zip(self.params[first:last], self.views[first:last], self._addresses[first:last])
        # The usual cases first: each call costs time on a slow CPU.
        for i, (p, view, address) in enumerate(rows, first):
            grad = p.grad
            if self._aside[i]:
                if grad is None:
                    continue
                # Autograd has made it.
                fresh = grad.dtype in GRAD_DTYPES and grad.layout is torch.strided
                if fresh and grad is not view and grad.shape == view.shape and graphs:
                    indices.append(i)
                    added[0].append(view)
                    added[1].append(grad)
                    continue
            if view.data_ptr() != address:
                # `p.grad.data = ...` has given the view other memory.
                moved.append(i)
            elif grad is view and not self._hiding:
                continue
            if grad is None:
                continue
            if self._is_slice(i, grad):
                if self._hiding:
                    indices.append(i)
                continue
            if grad.requires_grad and not graphs:
                continue
            try:
                check_gradient(
                    self.segments[i].name, grad, self.segments[i].shape, self.buffer.device
                )
            except ArgumentError:
                # A parameter that left the arena is the cause: its error comes first.
                check = self._check()
                if check is not None:
                    check()
                raise
            indices.append(i)
            views, given = added if self._aside[i] else copied
            views.append(view)
            # A slice of another tensor is overwritten below: `p.grad, q.grad = q.grad, p.grad`.
            given.append(grad.clone() if grad.data_ptr() in slices else grad.detach())
        for i in moved:
            self.views[i].data = self._memory[i]
        if copied[0]:
            torch._foreach_copy_(*copied)
        if added[0]:
            accumulate_each_(*added)
        for i in indices:
            self.params[i].grad = None if self._hiding else self.views[i]
            self._aside[i] = self._hiding

    def __getitem__(self, i: int) -> Tensor | None:
        """Tensor i's sum so far, in its slice, or None without a gradient."""
        grad = self.params[i].grad
        if grad is None:
            return self.views[i] if self._aside[i] else None
        if self._is_slice(i, grad):
            return grad
        # Collect the others first: this slice may be the `.grad` of one of them.
        self.collect(graphs=False)
        self.collect(i, i + 1)
        return self.views[i] if self._aside[i] else self.params[i].grad

    def received(self) -> list[bool]:
        """For each tensor, whether it has a gradient."""
        return [aside or p.grad is not None for p, aside in zip(self.params, self._aside)]

    def clear(self):
        """Set every `.grad` to None. Nothing is written: the slices are stale."""
        for p in self.params:
            p.grad = None
        self._aside = [False] * len(self.params)
        self._squares = None

    @torch.no_grad()
    def set(self, received: Iterable[bool]):
        """Make the slices `.grad` of the tensors that have received a gradient, None of others."""
        for p, view, has_one in zip(self.params, self.views, received):
            p.grad = view if has_one else None
        self._aside = [False] * len(self.params)

    @contextlib.contextmanager
    def aside(self):
        """Context manager: every `.grad` is None at first, and the sum again behind the block, with
        the gradients that the block has made. Inside of another one, all are None behind it."""
        before, self._hiding = self._hiding, True
        try:
            if not before:
                self.collect()
            yield
            self.collect()
        finally:
            self._hiding = before
            if not before:
                self._show([i for i, aside in enumerate(self._aside) if aside])

    def _show(self, indices: Iterable[int]):
        for i in indices:
            self.params[i].grad = self.views[i]
            self._aside[i] = False

    def show_hooked(self):
        """Show the sums of tensors with hooks that run when they are accumulated, as autograd
        does."""
        self._show(
            [
                i
                for i, p in enumerate(self.params)
                if self._aside[i] and p._post_accumulate_grad_hooks and self.has_hooks(i)
            ]
        )

    def is_stale(self, i: int) -> bool:
        """True if tensor i's slice has no sum, so that the next addition overwrites it."""
        return self[i] is None

    def place(self, views: dict[int, Tensor]) -> dict[int, Tensor]:
        """Use other memory, fp32, for the sums of some tensors. The caller copies the values.

        Returns the views that were replaced; place() restores them."""
        before = {i: self.views[i] for i in views}
        for i, view in views.items():
            self.views[i] = view
            self._memory[i] = view.detach()
            self._addresses[i] = view.data_ptr()
            if self.params[i].grad is not None:
                self.params[i].grad = view
        return before

    def keep_squares(self, squares: Tensor):
        """Keep the chunks' sums of squares, fp64, for the next norm, until a gradient changes."""
        self._squares = squares, self._versions(), self.received()

    def kept_squares(self) -> tuple[Tensor, Tensor] | None:
        """(sums of squares, tensor of each) of keep_squares(); None: a gradient has changed."""
        if self._squares is None:
            return None
        squares, versions, received = self._squares
        # Tensors without a gradient here may have got one from other ranks: their squares are
        # in the sums as well. Only a gradient that is gone invalidates them.
        gone = any(then and not now for then, now in zip(received, self.received()))
        return None if gone or versions != self._versions() else (squares, self.chunk_to_tensor)

    def _versions(self) -> list[int]:
        return [view._version for view in (self.buffer, *self.views)]

    @torch.no_grad()
    def zero_stale(self, first: int = 0, last: int | None = None):
        """Write zeros to the slices of tensors without a gradient: before a sum over ranks."""
        received = self.received()
        stale = [
            view
            for view, has_one in zip(self.views[first:last], received[first:last])
            if not has_one
        ]
        if stale:
            torch._foreach_zero_(stale)


def remove_all(handles: list):
    for handle in handles:
        handle.remove()


def _gradient_hook(weak: weakref.ref[Gradients], i: int, addresses, listeners):
    """Make the hook that runs after each tensor's gradient is accumulated.

    It runs once per tensor and backward, so each line costs time on a slow CPU."""

    def ready(p: Tensor):
        grad = p.grad
        if grad is not None:
            try:
                in_place = grad.data_ptr() == addresses[i]
            except RuntimeError:
                # A sparse gradient, which collect() refuses.
                in_place = False
            gradients = None if in_place else weak()
            if gradients is not None:
                gradients._collect_later(grad)
        for listener in listeners:
            listener.gradient_complete(i)

    return ready


_TENSOR_GRAD: Any = Tensor.grad


class Master(nn.Parameter):
    """The fp32 master of a bf16 parameter. Its `.grad` is the parameter's: both have one sum."""

    # Weak reference to the arena that holds this master. None in a copy, until its arena is built.
    arena: Callable[[], Any] | None = None
    number: int

    @property
    def grad(self) -> Tensor | None:
        """The sum, in the arena's slice."""
        if self.arena is None:
            return _TENSOR_GRAD.__get__(self)
        return self._arena().gradients[self.number]

    @grad.setter
    def grad(self, value: Tensor | None):
        if self.arena is None:
            _TENSOR_GRAD.__set__(self, value)
        else:
            self._arena().module_parameters[self.number].grad = value

    @grad.deleter
    def grad(self):
        self.grad = None

    def _arena(self):
        assert self.arena is not None
        arena = self.arena()
        if arena is None or arena.released:
            raise ArgumentError(
                f"the arena of an fp32 master of shape {tuple(self.shape)} was released or "
                "garbage-collected, and the optimizer that holds it would train nothing: keep the "
                "arena in a variable, and after arena.release() make a new optimizer"
            )
        return arena

    def __reduce_ex__(self, protocol):
        # Unpickling the arena sets `arena` and `number` again.
        return _restored_master, (self.data, self.requires_grad)


def _restored_master(data: Tensor, requires_grad: bool) -> Master:
    return Master(data, requires_grad)
