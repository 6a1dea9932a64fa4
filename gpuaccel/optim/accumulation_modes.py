"""How a fresh gradient gets into an arena's fp32 sum: one class per mode of GradientAccumulator.

All have one interface: begin() at a backward's first gradient, add() when one is ready, end() when the backward is over, finish()
before the sums are read, zero() when they are dropped. The fourth mode, fused, has a file of its own: optim/fused_mode.py.
"""

import itertools
import struct

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import zero_
from ..ops import CHUNK, MAX_TENSORS, accumulate_kernel, check_gradient, reference_accumulate
from .arena import Arena

# Bytes of fresh gradients that may wait for a launch: few launches, and little memory held.
MAX_PENDING_BYTES = 256 * 2**20

_ADDRESSES = struct.Struct(f"{MAX_TENSORS}Q").pack


def add_to_arena(
    arena: Arena,
    first: int,
    last: int,
    grads: "list[Tensor | None]",
    chunk_table=None,
    first_chunk=None,
    squares: bool = False,
):
    """arena.grads += grads for tensors [first, last): accumulate_v3, one launch per dtype and 256 tensors.

    grads: contiguous fp32 or bf16 tensors on the arena's device; None: that tensor got no gradient.
    chunk_table, first_chunk: the arena's, or a table with the chunks of some tensors only.
    squares: accumulate_v4, which also writes the chunks' sums of squares to arena.squares."""
    if chunk_table is None:
        chunk_table, first_chunk = arena.chunk_table, arena.first_chunk
    name = "accumulate_v4" if squares else "accumulate_v3"
    out = (arena.grads, arena.squares.values) if squares else (arena.grads,)
    for dtype in {g.dtype: None for g in grads if g is not None}:
        kernel = accumulate_kernel(name, dtype)
        for start in range(first, last, MAX_TENSORS):
            stop = min(start + MAX_TENSORS, last)
            addresses = [
                g.data_ptr() if g is not None and g.dtype == dtype else 0
                for g in grads[start - first : stop - first]
            ]
            chunks = first_chunk[stop] - first_chunk[start]
            if chunks > 0 and any(addresses):
                kernel[chunks, kernel.bound](
                    *out,
                    chunk_table,
                    first_chunk[start],
                    start,
                    _ADDRESSES(*addresses, *[0] * (MAX_TENSORS - len(addresses))),
                    tensors=grads,
                )
    arena.squares.mark((i for i, g in enumerate(grads, first) if g is not None), squares)


def zero_sums(arena: Arena):
    """arena.grads = 0."""
    zero_(arena.grads)
    arena.grads_changed()


class Window:
    """The accumulation window: which tensors have received a gradient, and which of these show their sum as `.grad`."""

    def __init__(self, arena: Arena):
        self.arena = arena
        # Sums that an earlier accumulator left, and that still stand as .grad, are continued.
        self.received = [
            master.grad is view for master, view in zip(arena.masters, arena.grad_views)
        ]
        self.exposed = [*self.received]

    def clear(self):
        """No tensor has received a gradient. The sums and `.grad` are not touched."""
        self.received = [False] * len(self.received)
        self.exposed = [False] * len(self.received)

    def forget(self, tensors):
        """These tensors (numbers) have received none."""
        for i in tensors:
            self.received[i] = False
            self.exposed[i] = False

    def expose(self):
        """The sums of tensors that have received a gradient stand as `.grad` of their master parameters."""
        for i, master in enumerate(self.arena.masters):
            if self.received[i] and not self.exposed[i]:
                master.grad = self.arena.grad_views[i]
                self.exposed[i] = True


class AccumulationMode:
    """What all modes share: whose window it is, and dropping sums."""

    # Are gradients received from hooks while backward runs?
    uses_hooks = True
    # Do the sums stand in arena.grads after every backward, to be exposed as .grad?
    exposes_after_backward = True

    def __init__(self, arena: Arena, window: Window):
        self.arena = arena
        self.window = window

    def begin(self):
        """The first gradient of a backward is coming: look at what happened to the exposed sums since the last one."""
        self.drop(self.reopen())

    def reopen(self) -> "list[int]":
        """Take over what the caller did to exposed sums, and hide them from autograd, which would add into them.
        Returns the tensors (numbers) whose sum the caller took away."""
        gone = []
        for i, (master, parameter) in enumerate(zip(self.arena.masters, self.arena.params)):
            if not self.window.exposed[i]:
                continue
            view = self.arena.grad_views[i]
            if master.grad is None:
                gone.append(i)
            elif master.grad is not view:
                # The caller has put another gradient there: it counts.
                view.copy_(master.grad)
            if self.hides(master, parameter):
                master.grad = None
                self.window.exposed[i] = False
        return gone

    def hides(self, master, parameter) -> bool:
        """Autograd adds into the `.grad` of the parameter itself; that of a bf16 parameter's master may stay."""
        return master is parameter

    def drop(self, tensors: "list[int]"):
        """The sums of these tensors are zero."""
        if tensors and len(tensors) == sum(self.window.received):
            zero_sums(self.arena)
        else:
            for i in tensors:
                self.arena.grad_views[i].zero_()
        self.window.forget(tensors)

    def add(self, i: int, grad: Tensor, squares: bool):
        """Autograd has computed a gradient of tensor i. squares: this is the window's last backward, and sums of squares are wanted."""

    def flush(self, squares: bool):
        """Add the gradients that wait for a launch."""

    def pending(self, i: int) -> bool:
        """Does a gradient of tensor i wait for a launch?"""
        return False

    def discard(self):
        """Forget the gradients that wait for a launch."""

    def end(self):
        """A backward is over."""

    def finish(self, squares: bool):
        """Bring the sums into arena.grads."""

    def zero(self):
        """The sums are zero, and gradients that wait for a launch are dropped."""
        zero_sums(self.arena)

    def cleared(self):
        """Somebody else has set arena.grads to zero."""

    def close(self):
        """Give back what the mode has put into the model."""


class AutogradMode(AccumulationMode):
    """Torch adds, `p.grad += fresh`, in the parameter's dtype; finish() moves the result into the arena."""

    uses_hooks = False

    def reopen(self):
        # The sums stay exposed: torch adds to them. Where .grad is another tensor, zero_grad() took the sum away, and autograd
        # may have made a new gradient since.
        return [
            i
            for i, master in enumerate(self.arena.masters)
            if self.window.exposed[i] and master.grad is not self.arena.grad_views[i]
        ]

    def finish(self, squares):
        self.drop(self.reopen())
        fresh: "list[Tensor | None]" = [None] * len(self.arena.params)
        for i, p in enumerate(self.arena.params):
            if p.grad is not None and p.grad is not self.arena.grad_views[i]:
                check_gradient(self.arena.segments[i].name, p.grad, p.shape, p.device)
                fresh[i] = p.grad
                p.grad = None
                self.window.received[i] = True
        add_fresh(self.arena, fresh, squares)


class HostMode(AccumulationMode):
    """Each gradient is downloaded and added on the CPU; finish() uploads the sum. The slowest mode, kept to measure it."""

    exposes_after_backward = False

    def __init__(self, arena: Arena, window: Window):
        super().__init__(arena, window)
        self.sums = torch.zeros(arena.numel)

    def hides(self, master, parameter) -> bool:
        return True

    def begin(self):
        exposed = any(self.window.exposed)
        super().begin()
        if exposed:
            self.sums.copy_(self.arena.grads)

    def add(self, i, grad, squares):
        self._slice(i).add_(grad.detach().to("cpu").flatten())

    def _slice(self, i) -> Tensor:
        segment = self.arena.segments[i]
        return self.sums[segment.offset : segment.offset + segment.numel]

    def drop(self, tensors):
        super().drop(tensors)
        for i in tensors:
            self._slice(i).zero_()

    def finish(self, squares):
        if any(self.window.received) and not any(self.window.exposed):
            self.arena.grads.copy_(self.sums)

    def zero(self):
        super().zero()
        self.sums.zero_()

    def cleared(self):
        self.sums.zero_()


class ArenaMode(AccumulationMode):
    """Fresh gradients, fp32 or bf16, wait until there are enough; then one launch adds them all into fp32."""

    def __init__(self, arena: Arena, window: Window):
        super().__init__(arena, window)
        self.discard()

    def discard(self):
        self.fresh: "list[Tensor | None]" = [None] * len(self.arena.segments)
        self.pending_bytes = 0

    def pending(self, i):
        return self.fresh[i] is not None

    def add(self, i, grad, squares):
        if self.fresh[i] is not None:
            self.flush(squares)
        self.fresh[i] = grad
        self.pending_bytes += grad.numel() * grad.element_size()
        if self.pending_bytes >= MAX_PENDING_BYTES:
            self.flush(squares)

    def chunks_for(self, tensors) -> tuple:
        """(chunk_table, first_chunk) for a launch that adds gradients of these tensors."""
        return self.arena.chunk_table, self.arena.first_chunk

    def flush(self, squares):
        if any(grad is not None for grad in self.fresh):
            fresh = self.fresh
            self.discard()
            add_fresh(self.arena, fresh, squares, self.chunks_for)

    def zero(self):
        super().zero()
        self.discard()

    def cleared(self):
        self.discard()


@torch.no_grad()
def add_fresh(arena, fresh: "list[Tensor | None]", squares: bool, chunks_for=None):
    """arena.grads += fresh, by our kernel where it runs, else by its reference. fresh: one entry per tensor of the arena."""
    got = [i for i, grad in enumerate(fresh) if grad is not None]
    if not got:
        return
    if not takes(arena.device):
        for i in got:
            reference_accumulate(arena.grad_views[i], fresh[i])
        return
    first, last = got[0], got[-1] + 1
    grads = [g if g is None else g.contiguous() for g in fresh[first:last]]
    table = chunks_for(got) if chunks_for is not None else (None, None)
    add_to_arena(arena, first, last, grads, *table, squares=squares)


def chunk_table_of(arena: Arena, tensors) -> tuple:
    """(chunk_table, first_chunk) with the chunks of these tensors only, so that no thread block starts in vain."""
    tensors = set(tensors)
    counts = [
        segment.padded // CHUNK if i in tensors else 0 for i, segment in enumerate(arena.segments)
    ]
    wanted = torch.tensor(sorted(tensors), device=arena.device)
    rows = torch.isin(arena.chunk_table[:, 0], wanted)
    return arena.chunk_table[rows], [0, *itertools.accumulate(counts)]
