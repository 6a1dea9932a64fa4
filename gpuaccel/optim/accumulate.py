"""Gradient accumulation: what backward yields is added into the arena's fp32 sum, in one of four ways.

    >>> ga.accumulate_(total, fresh)                       # one tensor: fp32 total += fp32 or bf16 fresh
    >>> arena = ga.Arena(model)
    >>> accumulator = ga.GradientAccumulator(arena, "arena")   # from now on every backward() adds into arena.grads
    >>> for micro in micro_batches:
    ...     loss(model, micro).backward()
    >>> opt.step(); opt.zero_grad()                        # any torch optimizer over arena.parameters()

The four ways (`MODES`), one after the other faster:
  host      each gradient is downloaded, added on the CPU, and the sum uploaded at the end (what the reference system did first)
  autograd  torch's own: `p.grad += fresh`, in the parameter's dtype (bf16 parameters: 256 + 1 = 256), moved to the arena at the end
  arena     a hook collects fresh gradients (fp32 or bf16); one launch adds many tensors into fp32
  fused     the weight-gradient product of every nn.Linear, and the row sums of every nn.Embedding without max_norm, are added into the arena by
            themselves; the rest (subclasses, weights with hooks) goes as in `arena`

Source: gradient accumulation on the GPU as in entrenar's ALB-091; mixed-precision sums as in Micikevicius et al., 2018.
"""

import functools
import itertools
import struct
import weakref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..backends import takes
from ..compiler.kernel import zero_
from ..errors import ArgumentError
from ..nn.fused_linear import FusedLinear, fused_classes, note_for, place, watchers
from ..ops.accumulate import (
    CHUNK,
    MAX_TENSORS,
    accumulate_kernel,
    check_gradient,
    reference_accumulate,
)
from .arena import Arena

MODES = ("host", "autograd", "arena", "fused")


COLLECTED = (
    256 * 2**20
)  # bytes of fresh gradients that may wait for a launch: few launches, little memory


_SOURCES = struct.Struct(f"{MAX_TENSORS}Q").pack
_accumulators: "weakref.WeakSet[GradientAccumulator]" = weakref.WeakSet()


# ---- reference ------------------------------------------------------------------------------------------------------

# ---- launchers ------------------------------------------------------------------------------------------------------


def launch_segments(
    arena: Arena,
    first: int,
    last: int,
    grads: "list[Tensor | None]",
    chunks=None,
    rows=None,
    squares: bool = False,
):
    """accumulate_v3: arena.grads += grads for segments [first, last), one launch per dtype and 256 tensors.

    grads: contiguous fp32 or bf16 tensors on the arena's device; None: that tensor got no gradient. chunks, rows: the arena's table,
    or one with the rows of some segments only. squares: accumulate_v4, which leaves sums of squares in arena.partials."""
    if chunks is None:
        chunks, rows = arena.chunks, arena.rows
    for dtype in {g.dtype: None for g in grads if g is not None}:
        kernel = accumulate_kernel("accumulate_v4" if squares else "accumulate_v3", dtype)
        out = (arena.grads, arena.partials) if squares else (arena.grads,)
        for start in range(first, last, MAX_TENSORS):
            stop = min(start + MAX_TENSORS, last)
            addresses = [
                g.data_ptr() if g is not None and g.dtype == dtype else 0
                for g in grads[start - first : stop - first]
            ]
            if rows[stop] > rows[start] and any(addresses):
                kernel[rows[stop] - rows[start], kernel.bound](
                    *out,
                    chunks,
                    rows[start],
                    start,
                    _SOURCES(*addresses, *[0] * (MAX_TENSORS - len(addresses))),
                    tensors=grads,
                )
    known = arena.squares_known()
    for i in range(first, last):
        if grads[i - first] is not None:
            known[i] = squares


# ---- public: one tensor ---------------------------------------------------------------------------------------------

# ---- public: every backward into the arena --------------------------------------------------------------------------


class GradientAccumulator:
    """From its making until close(), every backward() of the arena's module adds into `arena.grads`, in the given mode.

    After each backward (`host` and `autograd`: after finish(), which also runs before the step of any optimizer over
    arena.parameters()) the sums stand as `.grad` of arena.parameters(); a parameter that got no gradient has `.grad` None, as in
    torch. `optimizer.zero_grad()` or zero_() opens the next window. With bf16 parameters zero through the optimizer or zero_(),
    because module.zero_grad() does not know their fp32 masters; to abandon a window before finish() in `host` and `autograd`, zero
    with zero_(). A backward that raises drops its window's sum: it is partial. A GradScaler looks at `.grad` before the optimizer's step:
    in `host` and `autograd` call finish() before it. A weight that had tensor hooks when this was made stays out of `fused`.
    No host synchronisation and no download in `arena` and `fused`.

    Raises ArgumentError for an unknown mode or an arena that has an accumulator already."""

    def __init__(self, arena: Arena, mode: str = "arena"):
        if mode not in MODES:
            raise ArgumentError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")
        if GradientAccumulator.of(arena) is not None:
            raise ArgumentError(
                "this arena has a GradientAccumulator already; call close() on that one first"
            )
        arena.check()
        self.arena, self.mode = arena, mode
        self.host = torch.zeros(arena.numel) if mode == "host" else None
        self.final = False  # the next backward is the window's last: take squares on the way
        self.arrived = (
            None  # called with a tensor's number once a backward has given all of its gradient
        )
        self.added = None  # called with tensors' numbers after a fused product was added to them
        self.apart: "dict[int, list[Tensor]] | None" = (
            None  # tensors whose gradients are put here instead of being added
        )
        self.uses = self.usual = [0] * len(
            arena.segments
        )  # products added to each tensor: in this backward, in the one before
        self.elsewhere = set()  # tensors of fused products that got a gradient from autograd, too
        self._task, self._handles, self._fused, self._dressed, self._products, self._table = (
            None,
            [],
            [],
            [],
            set(),
            (None, None),
        )
        self._running = {}  # id of a backward -> weak reference that dies with it
        self._forget()
        # Sums that an earlier accumulator has left and that still stand as .grad are gone on with; others are not.
        self.touched = [owner.grad is view for owner, view in zip(arena.masters, arena.grad_views)]
        self.presented = [*self.touched]
        if not any(self.touched):
            _zero_sums(arena)
        else:
            for view in itertools.compress(arena.grad_views, [not kept for kept in self.touched]):
                view.zero_()
        hooked = {
            i for i, p in enumerate(arena.params) if p._backward_hooks
        }  # they expect a gradient, which a fused product hands to nobody
        if mode != "autograd":
            for i, p in enumerate(arena.params):
                if (
                    arena.masters[i] is p
                ):  # its .grad may be presented: hide it before autograd looks
                    self._handles.append(p.register_hook(self._before))
                self._handles.append(p.register_post_accumulate_grad_hook(self._after(i)))
        if mode == "fused":
            self._fuse(hooked)
        arena.before_release.append(self.close)
        _accumulators.add(self)

    def _forget(self):
        """No gradient is collected, none was seen in this window. The sums are not touched."""
        count = len(self.arena.segments)
        self.fresh: "list[Tensor | None]" = [None] * count  # collected, not yet added
        self.collected = 0  # bytes of them
        self.touched = [False] * count  # got a gradient in this window
        self.presented = [False] * count  # .grad shows the sum
        self._running.clear()

    def _fuse(self, hooked):
        index = {id(p): i for i, p in enumerate(self.arena.params)}
        for part in self.arena.module.modules():
            cls = fused_classes.get(type(part))
            i = index.get(id(part.weight)) if cls and not cls.refused(part) else None
            if i is not None and i not in hooked:
                if type(part) is not cls:
                    self._dressed.append(cls.wear(part))
                part.arena_grad = self.arena.grad_views[i]
                watchers[place(part.arena_grad)] = note_for(weakref.ref(self), i)
                self._fused.append(part)
        for part in self.arena.module.modules():
            for names in getattr(part, "FUSED_LINEARS", ()):
                self._join([getattr(part, name) for name in names], index)
        # The products need no launch: the table for the rest has only the rest's rows, so that no thread block starts in vain.
        self._products = {index[id(part.weight)] for part in self._fused}
        rest = [i for i in range(len(self.arena.segments)) if i not in self._products]
        counts = [0] + [
            s.padded // CHUNK if i not in self._products else 0
            for i, s in enumerate(self.arena.segments)
        ]
        self._table = (
            self.arena.chunks[
                torch.isin(self.arena.chunks[:, 0].cpu(), torch.tensor(rest)).to(self.arena.device)
            ],
            list(itertools.accumulate(counts)),
        )

    def _join(self, layers, index):
        """Layers of one input whose weights lie side by side become one product (fused_linear.together)."""
        if not all(type(layer) is FusedLinear and layer.bias is None for layer in layers):
            return
        numbers = [
            index[id(layer.weight)] for layer in reversed(layers)
        ]  # in the order of the arena
        parts = [self.arena.segments[i] for i in numbers]
        if (
            any(one.offset + one.numel != two.offset for one, two in zip(parts, parts[1:]))
            or len({layer.weight.dtype for layer in layers}) > 1
        ):
            return
        start, size, wide = parts[0].offset, sum(s.numel for s in parts), layers[0].in_features
        weights = (
            self.arena.weights
            if layers[0].weight.dtype == torch.float32
            else self.arena.bf16_weights
        )
        first = layers[0]
        first.joint_weight, first.joint_grad = (
            buffer[start : start + size].view(-1, wide) for buffer in (weights, self.arena.grads)
        )
        watchers[place(first.joint_grad)] = note_for(weakref.ref(self), *numbers)

    # ---- hooks, all run by autograd's threads ----

    def _before(self, grad):
        if torch._C._current_graph_task_id() != self._task:
            self._begin()

    def _after(self, i):
        def hook(p):
            if torch._C._current_graph_task_id() != self._task:
                self._begin()
            grad = p.grad
            if grad is not None:  # else the fused product took it, or it was undefined
                if (
                    grad is not self.arena.grad_views[i]
                ):  # else autograd has added it in place already
                    check_gradient(self.arena.segments[i].name, grad, p.shape, p.device)
                    p.grad = None
                    if self.apart is not None and i in self.apart:
                        self.apart[i].append(grad)
                    else:
                        self._collect(i, grad)
                    if i in self._products:
                        self.elsewhere.add(i)
                self.touched[i] = True
            if self.arrived is not None:
                self.arrived(i)

        return hook

    def _begin(self):
        """The first gradient of a backward: look at what happened to the presented sums since the last one."""
        self._drop_broken()
        self._flush()  # of the backward around this one (reentrant checkpointing)
        self._task = task = torch._C._current_graph_task_id()
        self.uses = [0] * len(self.touched)
        self.arena.check()
        self._reopen()
        end = functools.partial(self._end, task)
        self._running[task] = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @torch.no_grad()
    def _reopen(self):
        """Look at what happened to the presented sums: zeroed, replaced by the caller, or kept."""
        gone, shown = [], any(self.presented)
        for i, owner in enumerate(self.arena.masters):
            if not self.presented[i]:
                continue
            grad, view = owner.grad, self.arena.grad_views[i]
            if grad is None or self.mode == "autograd" and grad is not view:
                gone.append(i)  # zero_grad() was called; autograd may have made a new one since
            elif grad is not view:
                view.copy_(grad)  # the caller has put another gradient there: it counts
            if self.mode == "host" or self.mode != "autograd" and owner is self.arena.params[i]:
                owner.grad = None
                self.presented[i] = False
        self._drop(gone)
        if self.mode == "host" and shown:
            self.host.copy_(self.arena.grads)

    def _drop(self, gone):
        """Forget the sums of tensors whose presented gradient was taken away."""
        if gone and len(gone) == sum(self.touched):
            _zero_sums(self.arena)
        else:
            for i in gone:
                self.arena.grad_views[i].zero_()
        for i in gone:
            self.touched[i] = self.presented[i] = False
            if self.host is not None:
                s = self.arena.segments[i]
                self.host[s.offset : s.offset + s.numel] = 0

    @torch.no_grad()
    def _drop_broken(self):
        """If a backward never came to its end, it raised: what it left is partial, and so is the window's sum."""
        if any(end() is None for end in self._running.values()):
            self._clear()
            for p, owner in zip(self.arena.params, self.arena.masters):
                if owner is not p:
                    owner.grad = None

    def _clear(self):
        _zero_sums(self.arena)
        if self.host is not None:
            self.host.zero_()
        self._forget()

    def _end(self, task):
        self._running.pop(task, None)
        self._task, self.usual = None, self.uses
        self._flush()
        if self.mode != "host":
            self._present()

    def _collect(self, i, grad):
        if self.mode == "host":
            s = self.arena.segments[i]
            self.host[s.offset : s.offset + s.numel] += grad.detach().to("cpu").flatten()
            return
        if self.fresh[i] is not None:
            self._flush()
        self.fresh[i] = grad
        self.collected += grad.numel() * grad.element_size()
        if self.collected >= COLLECTED:
            self._flush()

    @torch.no_grad()
    def _flush(self):
        """Add what has been collected."""
        got = [i for i, grad in enumerate(self.fresh) if grad is not None]
        if not got:
            return
        first, last = got[0], got[-1] + 1
        grads, self.fresh[first:last] = self.fresh[first:last], [None] * (last - first)
        self.collected = 0
        if takes(self.arena.device):
            table = (
                (None, None) if self._products.intersection(got) else self._table
            )  # a tied weight may come from elsewhere too
            launch_segments(
                self.arena,
                first,
                last,
                [g if g is None else g.contiguous() for g in grads],
                *table,
                squares=self.final,
            )
        else:
            for i in got:
                reference_accumulate(self.arena.grad_views[i], grads[i - first])

    flush = _flush

    def _present(self):
        for i, owner in enumerate(self.arena.masters):
            if self.touched[i] and not self.presented[i]:
                owner.grad = self.arena.grad_views[i]
                self.presented[i] = True

    # ---- called from the training loop ----

    @torch.no_grad()
    def finish(self):
        """Bring the window's sum into arena.grads and present it. Does nothing twice; needed by hand only without an optimizer."""
        self._drop_broken()
        if self.mode == "host" and any(self.touched) and not any(self.presented):
            self.arena.grads.copy_(self.host)
        elif self.mode == "autograd":
            self._reopen()
            for i, p in enumerate(self.arena.params):
                if p.grad is not None and p.grad is not self.arena.grad_views[i]:
                    grad, p.grad, self.touched[i] = p.grad, None, True
                    check_gradient(self.arena.segments[i].name, grad, p.shape, p.device)
                    self._collect(i, grad)
            self._flush()
        self._drop(
            [
                i
                for i, owner in enumerate(self.arena.masters)
                if self.presented[i] and owner.grad is None
            ]
        )
        self._present()

    @torch.no_grad()
    def zero_(self, cleared=None):
        """Open a new window: the sum is zero (one device memset), no parameter has a gradient.

        cleared: numbers of the tensors whose sums someone else has set to zero (ga.AdamW, while it read them): no memset then."""
        if cleared is None:
            self._clear()
        else:
            for i, touched in enumerate(self.touched):
                if touched and i not in cleared:
                    self.arena.grad_views[i].zero_()
            if self.host is not None:
                self.host.zero_()
            self._forget()
        for p, owner in zip(self.arena.params, self.arena.masters):
            p.grad = owner.grad = None

    @property
    def bits(self) -> int:
        """A bit for each tensor that got a gradient in this window."""
        return sum(1 << i for i, touched in enumerate(self.touched) if touched)

    received_mask = bits

    def detach(self) -> int:
        """Leave the sums, and forget that there are any: a bit for each tensor that got a gradient. No parameter has one; a graph ends here."""
        bits = self.bits
        self._forget()
        for p, owner in zip(self.arena.params, self.arena.masters):
            p.grad = owner.grad = None
        return bits

    def restore(self, bits: int):
        """Go on with the sums that detach() left."""
        self.touched = [bool(bits >> i & 1) for i in range(len(self.touched))]
        self._present()

    @torch.no_grad()
    def scale_(self, factor):
        """arena.grads *= factor; a number or a one-element tensor on the arena's device (which costs no synchronisation)."""
        self.arena.grads.mul_(factor)

    def close(self):
        """Take the hooks down; the module's gradients go where torch puts them. The arena stays."""
        if self not in _accumulators:
            return
        self._flush()
        for handle in self._handles:
            handle.remove()
        for part in self._fused:
            watchers.pop(place(part.arena_grad), None)
            if "joint_grad" in vars(part):
                watchers.pop(place(part.joint_grad), None)
                del part.joint_grad, part.joint_weight
            del part.arena_grad
        for part in self._dressed:
            part.shed(part)
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


def _zero_sums(arena):
    zero_(arena.grads)
    arena.grads_changed()


def finish_for(parameters):
    """Before these parameters' gradients are read: sums that are not yet in place are brought there. ArgumentError where they cannot be
    seen at all: the sums of bf16 parameters are those of their fp32 masters."""
    for accumulator in list(_accumulators):
        ids = {id(p) for p in parameters}
        if ids & accumulator.arena.master_ids:
            accumulator.finish()
        for i, (p, owner) in enumerate(zip(accumulator.arena.params, accumulator.arena.masters)):
            if id(p) in ids and owner is not p and p.grad is None and accumulator.touched[i]:
                raise ArgumentError(
                    f"the gradient of {accumulator.arena.segments[i].name} is the sum of its fp32 master: expected the arena, or "
                    "arena.parameters(), instead of the module's bf16 parameters"
                )


def _finish_before_step(optimizer, *_):
    """Before any optimizer's step: sums that are not yet in place (host, autograd) are brought there."""
    for accumulator in list(_accumulators):
        ids = accumulator.arena.master_ids
        if accumulator.mode in ("host", "autograd") and any(
            id(p) in ids for g in optimizer.param_groups for p in g["params"]
        ):
            accumulator.finish()


register_optimizer_step_pre_hook(_finish_before_step)
