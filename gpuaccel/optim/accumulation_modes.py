"""How a fresh gradient gets into an arena's fp32 sum: one class per mode of GradientAccumulator.

All have one interface: begin() at a backward's first gradient, add() when a gradient is ready,
end() when the backward is over, finish() before the sums are read, zero_grad() for sums that the
caller has dropped, and reset() when somebody else has written arena.grads. The fourth mode, fused,
has a file of its own: optim/fused_mode.py.
"""

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import zero_
from ..ops import CHUNK, MAX_TENSORS, accumulate_kernel, check_gradient, reference_accumulate
from .arena import Arena

# Fresh gradients are added when this many bytes wait: few launches, and little memory held.
MAX_PENDING_BYTES = 256 * 2**20

_pack_addresses = struct.Struct(f"{MAX_TENSORS}Q").pack

# The chunk table of a launch, and the first chunk of each tensor in it.
ChunkTable = tuple[Tensor, "list[int]"]


def add_to_arena(
    arena: Arena,
    first: int,
    last: int,
    grads: "list[Tensor | None]",
    table: "ChunkTable | None" = None,
    squares: bool = False,
):
    """arena.grads += grads for tensors [first, last): one launch per dtype and 256 tensors.

    Args:
        grads: contiguous fp32 or bf16 tensors on the arena's device; None: no gradient for that
            tensor.
        table: the chunks of some tensors only; None: those of the arena.
        squares: accumulate_v4 runs instead of accumulate_v3 and also writes the chunks' sums of
            squares to arena.squares.
    """
    chunk_table, first_chunk = table or (arena.chunk_table, arena.first_chunk)
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
                    _pack_addresses(*addresses, *[0] * (MAX_TENSORS - len(addresses))),
                    tensors=grads,
                )
    arena.squares.mark((i for i, g in enumerate(grads, first) if g is not None), squares)


def zero_sums(arena: Arena):
    """arena.grads = 0."""
    zero_(arena.grads)
    arena.grads_changed()


def bf16_parameters(arena: Arena) -> "list[tuple[int, Tensor, Tensor]]":
    """(index, parameter, fp32 master) of each bf16 parameter."""
    pairs = enumerate(zip(arena.params, arena.masters))
    return [(i, p, master) for i, (p, master) in pairs if master is not p]


class Window:
    """The state of the accumulation window.

    received: whether each tensor has received a gradient.
    exposed: whether its sum stands as `.grad` of its master, and after expose_bf16() also of its
        bf16 parameter.
    bf16: after expose_bf16() (index, bf16 parameter, its master) of each; before it empty."""

    def __init__(self, arena: Arena):
        self.arena = arena
        # Sums of an earlier accumulator that still stand as .grad are continued.
        self.received = [
            master.grad is view for master, view in zip(arena.masters, arena.grad_views)
        ]
        self.exposed = [*self.received]
        self.bf16: "list[tuple[int, Tensor, Tensor]]" = []

    def expose_bf16(self):
        """From now on the sums stand as `.grad` of bf16 parameters, too."""
        # None: `.grad` may have another dtype than the parameter.
        self.bf16 = bf16_parameters(self.arena)
        for i, p, _ in self.bf16:
            p.grad_dtype = None
            if self.exposed[i]:
                p.grad = self.arena.grad_views[i]

    def close(self):
        """End expose_bf16(): the sums stand as `.grad` of masters only.

        The parameters' grad_dtype stays None, with which `.grad` gets the parameter's dtype in a
        backward of torch's. Torch has no way back to the default, and with a dtype in its place
        gradients would keep that after module.float()."""
        self.merge()
        for i, p, _ in self.bf16:
            if p.grad is self.arena.grad_views[i]:
                p.grad = None
        self.bf16 = []

    def merge(self):
        """Take over what the caller did to `.grad` of a bf16 parameter, or of its master.

        Then both are the sum, or both are None. Another tensor in either place replaces the sum."""
        for i, p, master in self.bf16:
            view = self.arena.grad_views[i]
            hidden = self.received[i] and not self.exposed[i]
            if hidden or p.grad is view is master.grad:
                continue
            given = [g for g in (master.grad, p.grad) if g is not None and g is not view]
            if given:
                view.copy_(given[0])
                self.received[i] = self.exposed[i] = True
            p.grad = master.grad = view if given else None

    def reset(self, tensors: "Iterable[int] | None" = None):
        """These tensors (indices; None: all) have received no gradient.

        The sums and `.grad` are not touched."""
        if tensors is None:
            self.received = [False] * len(self.received)
            self.exposed = [False] * len(self.exposed)
            return
        for i in tensors:
            self.received[i] = False
            self.exposed[i] = False

    def expose(self):
        """Set the sums of the tensors that have received a gradient as `.grad`."""
        for i, p, _ in self.bf16:
            if self.received[i] and not self.exposed[i]:
                p.grad = self.arena.grad_views[i]
        for i, master in enumerate(self.arena.masters):
            if self.received[i] and not self.exposed[i]:
                master.grad = self.arena.grad_views[i]
                self.exposed[i] = True


class AccumulationMode:
    """The interface of all modes, and what they share: exposed sums, and dropping sums."""

    # Whether hooks hand over gradients while backward runs.
    uses_hooks = True
    # Whether the sums are in arena.grads after every backward, to be exposed as .grad.
    exposes_after_backward = True

    def __init__(self, arena: Arena, window: Window):
        self.arena = arena
        self.window = window

    def begin(self):
        """Begin a backward, before its first gradient: drop sums that the caller has zeroed."""
        self.zero_grad(self.read_back())

    def read_back(self) -> "list[int]":
        """Take over what the caller did to exposed sums, and hide them from autograd.

        Autograd would add into an exposed sum.

        Returns:
            The tensors (indices) whose `.grad` the caller has set to None.
        """
        self.window.merge()
        removed = []
        for i, (master, parameter) in enumerate(zip(self.arena.masters, self.arena.params)):
            if not self.window.exposed[i]:
                continue
            view = self.arena.grad_views[i]
            if master.grad is None:
                removed.append(i)
            elif master.grad is not view:
                # The caller has set another gradient: it replaces the sum.
                view.copy_(master.grad)
                master.grad = view
            # Autograd adds into the parameter's `.grad`; that of a bf16 one's master may stay.
            if master is parameter or self.window.bf16:
                parameter.grad = None
                self.window.exposed[i] = False
        return removed

    def zero_grad(self, tensors: "list[int]"):
        """Set the sums of these tensors (indices) to zero: they have received no gradient."""
        if tensors and len(tensors) == sum(self.window.received):
            zero_sums(self.arena)
        else:
            for i in tensors:
                self.arena.grad_views[i].zero_()
        self.window.reset(tensors)

    def add(self, i: int, grad: Tensor, squares: bool):
        """Add a gradient of tensor i that autograd has computed, now or in a later launch.

        Args:
            squares: whether the launch also writes sums of squares: in the window's last backward.
        """

    def flush(self, squares: bool):
        """Add the gradients that wait for a launch."""

    def pending(self, i: int) -> bool:
        """Whether a gradient of tensor i waits for a launch."""
        return False

    def no_gradient(self, i: int):
        """Called when a backward has none for tensor i, which had none before in this window."""

    def overwriting(self) -> "contextlib.AbstractContextManager[None]":
        """As GradientAccumulator.overwriting(), which only FusedMode does."""
        return contextlib.nullcontext()

    def reset(self):
        """Drop all that is not in arena.grads: what stands there is the sum."""

    def end(self):
        """Called when a backward is over."""

    def finish(self, squares: bool):
        """Complete the sums in arena.grads."""

    def close(self):
        """Remove what the mode has put into the model."""


class AutogradMode(AccumulationMode):
    """Torch adds, `p.grad += fresh`, in the parameter's dtype; finish() moves it into the arena."""

    uses_hooks = False

    def begin(self):
        super().begin()
        # Torch adds to a bf16 sum.
        for i, p, master in bf16_parameters(self.arena):
            if self.window.exposed[i]:
                p.grad = self.arena.grad_views[i].to(p.dtype)
                master.grad = None
                self.window.exposed[i] = False

    def end(self):
        for i, p, _ in bf16_parameters(self.arena):
            # A backward inside of this one may have exposed the sum already.
            if p.grad is not None and not self.window.exposed[i]:
                self.arena.grad_views[i].copy_(p.grad.to(p.dtype))
                p.grad = None
                self.window.received[i] = True

    def read_back(self):
        self.window.merge()
        # The sums of fp32 parameters stay exposed: torch adds to them. Where .grad is not the sum,
        # zero_grad() has removed it, and autograd may have made a new gradient since.
        removed = []
        for i, (master, p) in enumerate(zip(self.arena.masters, self.arena.params)):
            view = self.arena.grad_views[i]
            if not self.window.exposed[i] or master.grad is view:
                continue
            if master is p or master.grad is None:
                removed.append(i)
            else:
                view.copy_(master.grad)
                master.grad = view
        return removed

    def finish(self, squares):
        self.zero_grad(self.read_back())
        fresh: "list[Tensor | None]" = [None] * len(self.arena.params)
        for i, p in enumerate(self.arena.params):
            if p.grad is not None and p.grad is not self.arena.grad_views[i]:
                check_gradient(self.arena.segments[i].name, p.grad, p.shape, p.device)
                fresh[i] = p.grad
                p.grad = None
                self.window.received[i] = True
        add_fresh(self.arena, fresh, squares)


class HostMode(AccumulationMode):
    """Each gradient is downloaded and added on the CPU; the sum is uploaded.

    The slowest mode, kept to measure it."""

    def __init__(self, arena: Arena, window: Window):
        super().__init__(arena, window)
        self.sums = torch.zeros(arena.numel, dtype=torch.float32)
        # Whether arena.grads has the sums, and perhaps what the caller did to them.
        self.uploaded = True

    def begin(self):
        super().begin()
        if self.uploaded and any(self.window.received):
            self.sums.copy_(self.arena.grads)
        self.uploaded = False

    def add(self, i, grad, squares):
        self._slice(i).add_(grad.detach().to("cpu").flatten())

    def _slice(self, i) -> Tensor:
        segment = self.arena.segments[i]
        return self.sums[segment.offset : segment.offset + segment.numel]

    def zero_grad(self, tensors):
        super().zero_grad(tensors)
        for i in tensors:
            self._slice(i).zero_()

    def reset(self):
        self.sums.zero_()
        self.uploaded = True

    def end(self):
        if self.exposes_after_backward:
            self.finish(squares=False)

    def finish(self, squares):
        if not self.uploaded:
            self.arena.grads.copy_(self.sums)
            self.uploaded = True


class ArenaMode(AccumulationMode):
    """Fresh gradients, fp32 or bf16, wait until there are enough; one launch adds all into fp32.

    Where no kernels run none waits: torch adds it while it is in the CPU's cache."""

    def __init__(self, arena: Arena, window: Window):
        super().__init__(arena, window)
        self.adds_at_once = False
        self.reset()

    def begin(self):
        super().begin()
        self.adds_at_once = not takes(self.arena.device)

    def reset(self):
        self.fresh: "list[Tensor | None]" = [None] * len(self.arena.segments)
        self.pending_bytes = 0

    def pending(self, i):
        return self.fresh[i] is not None

    def add(self, i, grad, squares):
        if self.adds_at_once:
            reference_accumulate(self.arena.grad_views[i], grad)
            return
        if self.fresh[i] is not None:
            self.flush(squares)
        self.fresh[i] = grad
        self.pending_bytes += grad.numel() * grad.element_size()
        if self.pending_bytes >= MAX_PENDING_BYTES:
            self.flush(squares)

    def chunks_for(self, tensors: "list[int]") -> ChunkTable:
        """The chunk table of a launch that adds gradients of these tensors."""
        return self.arena.chunk_table, self.arena.first_chunk

    def flush(self, squares):
        if any(grad is not None for grad in self.fresh):
            fresh = self.fresh
            self.reset()
            add_fresh(self.arena, fresh, squares, self.chunks_for)


@torch.no_grad()
def add_fresh(
    arena: Arena,
    fresh: "list[Tensor | None]",
    squares: bool,
    chunks_for: "Callable[[list[int]], ChunkTable] | None" = None,
):
    """arena.grads += fresh, by a kernel where kernels run on the arena's device, else in torch.

    Args:
        fresh: one entry per tensor of the arena; None: no gradient.
        squares: as for add_to_arena.
        chunks_for: returns the chunk table for the tensors (indices) that have a gradient.
    """
    tensors = [i for i, grad in enumerate(fresh) if grad is not None]
    if not tensors:
        return
    if not takes(arena.device):
        for view, grad in zip(arena.grad_views, fresh):
            if grad is not None:
                reference_accumulate(view, grad)
        return
    first = tensors[0]
    last = tensors[-1] + 1
    grads = [g if g is None else g.contiguous() for g in fresh[first:last]]
    table = None if chunks_for is None else chunks_for(tensors)
    add_to_arena(arena, first, last, grads, table, squares)


def chunk_table_of(arena: Arena, tensors: "Iterable[int]") -> ChunkTable:
    """The chunk table of these tensors only, so that no thread block starts without work."""
    members = set(tensors)
    counts = [
        segment.padded // CHUNK if i in members else 0 for i, segment in enumerate(arena.segments)
    ]
    rows = torch.isin(arena.chunk_table[:, 0], torch.tensor(sorted(members), device=arena.device))
    return arena.chunk_table[rows], [0, *itertools.accumulate(counts)]
