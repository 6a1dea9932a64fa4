"""The norm of many tensors, the clip scale, and multiplication by it, on the device.

This module has the definition in torch and the launches of kernels_cu/clip.cu. What users call, and
what happens at the edges, is in optim/clip.py.

Source: the three phases of entrenar's fused clip (ALB-078); torch.nn.utils.clip_grad_norm_ for the
semantics and for eps.
"""

import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..backends import find_driver, takes
from ..compiler import KINDS, Kernel, launch
from ..errors import ArgumentError, described
from .accumulate import CHUNK, SQUARES_THREADS

# What a norm is taken over.
Scope = Literal["global", "block", "tensor"]
# What a gradient that is not finite does.
OnNonfinite = Literal["propagate", "skip", "raise"]
EPS = 1e-6  # torch's
MAX_TENSORS = 256
# Tensors of a launch over more than MAX_TENSORS. Its parameters then have 30 KB, which CUDA 12.1
# allows. For small tensors a launch takes longer than its work, so fewer launches are faster.
MANY_TENSORS = 2048
MAX_BLOCKS = 2**20
SCALE_BLOCKS = 16384  # fewer than chunks: most often the scale is 1 and nothing is to be done
# struct Tensors of kernels_cu/clip.cu: tensors of a launch -> its packer.
_pack_tensors = {
    n: struct.Struct(f"{n}Q{n + 1}i{n}H{n}B4x").pack for n in (MAX_TENSORS, MANY_TENSORS)
}


def tensors_of_launch(count: int) -> int:
    """How many tensors a launch can have, of those over `count` tensors.

    Args:
        count: number of all tensors.
    """
    driver = find_driver()[0] if count > MAX_TENSORS else None
    allows_many = driver is None or driver >= 12010
    return MANY_TENSORS if count > MAX_TENSORS and allows_many else MAX_TENSORS


@dataclass(eq=False, repr=False, slots=True)
class ClipState:
    """The result of one clipping, as tensors on the device. Nothing waits until a value is read.

    With scope "global" each property is (), with another scope (groups,).

    Attributes:
        values: (groups, 4) fp32: scale, norm, clipped norm, finite.
        nonfinite_tensor: (groups,) int32, number of each group's first tensor that is not finite,
            -1 without one.
        scope: "global", "tensor" or "block".
        names: a function that returns the tensors' names.

    Example:
        >>> gradient = torch.full((4,), 3.0, device=ga.default_device())
        >>> parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        >>> parameter.grad = gradient
        >>> state = ga.optim.clip_grads_([parameter], max_norm=1.0)
        >>> float(state.norm), round(float(state.clipped_norm), 3), bool(state.finite), state.name()
        (6.0, 1.0, True, None)
    """

    values: Tensor
    nonfinite_tensor: Tensor
    scope: Scope
    names: Callable[[], Sequence[str]]

    def _column(self, i: int) -> Tensor:
        return self.values[0, i] if self.scope == "global" else self.values[:, i]

    @property
    def scale(self) -> Tensor:
        """What the gradients are multiplied by, fp32."""
        return self._column(0)

    @property
    def norm(self) -> Tensor:
        """The norm before clipping, fp32."""
        return self._column(1)

    @property
    def clipped_norm(self) -> Tensor:
        """The norm after clipping, fp32."""
        return self._column(2)

    @property
    def finite(self) -> Tensor:
        """Whether all gradients are finite, bool."""
        return self._column(3) != 0

    @property
    def first_nonfinite(self) -> Tensor:
        """Number of the first tensor, among those with a gradient, with NaN or infinity; int32, -1:
        none.
        """
        return self.nonfinite_tensor[0] if self.scope == "global" else self.nonfinite_tensor

    def name(self) -> str | None:
        """Name of the first tensor whose gradient is not finite, or None. Waits for the device."""
        numbers = [i for i in self.nonfinite_tensor.tolist() if i >= 0]
        return self.names()[numbers[0]] if numbers else None

    def clone(self) -> "ClipState":
        """A copy that the next step does not overwrite."""
        return ClipState(self.values.clone(), self.nonfinite_tensor.clone(), self.scope, self.names)

    def __repr__(self):
        count = len(self.values)
        return f"ClipState({self.scope}, {count} norm{'s' * (count > 1)} on {self.values.device})"


def reference_norms(
    grads: list[Tensor],
    norm_type: float = 2.0,
    groups: list[int] | None = None,
    count: int = 1,
    foreach=None,
    numbers: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of each group of tensors and its first tensor that is not finite, computed by torch.

    groups: the group of each tensor, of `count`; None: there is one. numbers: of the tensors,
    ascending; None: their places. Returns (count,), and (count,) int32 with -1 for none."""
    device = grads[0].device
    members: list[list[tuple[int, Tensor]]] = [[] for _ in range(count)]
    for t, number, group in zip(grads, numbers or range(len(grads)), groups or itertools.repeat(0)):
        if t.numel():
            members[group].append((number, t))
    norms = [
        get_total_norm([t for _, t in some], norm_type, foreach=foreach).to(device)
        if some
        else torch.zeros((), dtype=torch.float32, device=device)
        for some in members
    ]
    norm = norms[0].view(1) if count == 1 else torch.stack(norms)
    # A norm of order 0 or less may be finite where a tensor is not.
    if norm_type > 0 and readable(norm) and all(map(math.isfinite, norm.tolist())):
        return norm, torch.full((count,), -1, dtype=torch.int32)
    # Larger than any tensor's number.
    no_tensor = 2**31 - 1
    firsts = []
    for some in members:
        candidates = [torch.full((), no_tensor, device=device)]
        candidates += [
            torch.where(torch.isfinite(t).all(), no_tensor, number).to(device) for number, t in some
        ]
        firsts.append(torch.stack(candidates).min())
    first = torch.stack(firsts)
    return norm, torch.where(first < no_tensor, first, -1).int()


def readable(t: Tensor) -> bool:
    """True if the host can read these numbers without a wait: not on a GPU, nor in a recording."""
    return (
        t.is_cpu
        and type(t) is Tensor
        and not torch.compiler.is_compiling()
        and not launch.recorders
    )


def reference_scale(norms: Tensor, max_norm, eps: float = EPS) -> Tensor:
    """min(1, max_norm / (norm + eps)); NaN stays NaN.

    Args:
        norms: any shape.
        max_norm: a number or a tensor that broadcasts.
        eps: added to the norm.
    """
    return torch.clamp(max_norm / (norms + eps), max=1.0)


@functools.cache
def clip_kernel(name: str, norm_type: float, tensors: int = MAX_TENSORS) -> Kernel:
    """A kernel of clip.cu for the 1-norm, the 2-norm or the infinity norm.

    Args:
        name: of the kernel.
        norm_type: 1, 2 or infinity.
        tensors: that a launch can have, MAX_TENSORS or MANY_TENSORS.
    """
    return Kernel(
        "clip",
        name,
        CHUNK=CHUNK,
        THREADS=SQUARES_THREADS,
        MAX_TENSORS=tensors,
        NORM=0 if norm_type == math.inf else int(norm_type),
    )


def launches_for(tensors: Sequence[Tensor], most: int | None = None) -> tuple:
    """(first tensor's number, chunks, tensors that it can have, struct) of each launch."""
    return _packed(
        tuple(map(Tensor.data_ptr, tensors)),
        tuple(map(Tensor.numel, tensors)),
        tuple([KINDS[t.dtype] for t in tensors]),
        most or tensors_of_launch(len(tensors)),
    )


def _parts(addresses, counts, most: int):
    """(first tensor, end) of each launch.

    A launch has at most `most` tensors and each only once: blocks that scale the same elements
    would race."""
    start = 0
    in_launch: set[int] = set()
    for i, (address, count) in enumerate(zip(addresses, counts)):
        if i - start == most or (count and address in in_launch):
            yield start, i
            start = i
            in_launch = set()
        in_launch.add(address)
    if addresses:
        yield start, len(addresses)


@functools.lru_cache(64)
def _packed(addresses, counts, kinds, most):
    """Cached: gradients usually keep their addresses, and then nothing is packed again."""
    launches = []
    for start, stop in _parts(addresses, counts, most):
        part = slice(start, stop)
        sizes = counts[part]
        first_chunks = [0, *itertools.accumulate([-(-n // CHUNK) for n in sizes])]
        chunks = first_chunks[-1]
        rest = [0] * (most - len(sizes))
        packed = _pack_tensors[most](
            *addresses[part],
            *rest,
            *first_chunks,
            *[chunks] * len(rest),
            *[n and (n - 1) % CHUNK + 1 for n in sizes],
            *rest,
            *kinds[part],
            *rest,
        )
        launches.append((start, chunks, most, packed))
    return tuple(launches)


def launch_squares(
    tensors: Sequence[Tensor],
    partials: Tensor,
    chunk_to_tensor: Tensor | None = None,
    norm_type: float = 2.0,
    launches=None,
):
    """Launch squares_v2: a partial sum per chunk of the tensors.

    Args:
        tensors: fp32, bf16, fp16, dense, on one device; an empty one for none.
        partials: (chunks,) fp64.
        chunk_to_tensor: (chunks,) int32, the tensor of each chunk; None: not wanted.
        norm_type: 1, 2 or infinity.
        launches: launches_for(tensors), where it is known already.
    """
    row = 0
    for start, chunks, most, packed in launches or launches_for(tensors, MAX_TENSORS):
        if chunks:
            if row == 0:
                out = (partials, chunk_to_tensor)
            else:
                rest = None if chunk_to_tensor is None else chunk_to_tensor[row:]
                out = (partials[row:], rest)
            kernel = clip_kernel("squares_v2", norm_type, most)
            kernel[min(chunks, MAX_BLOCKS), SQUARES_THREADS](*out, start, packed, tensors=tensors)
            row += chunks


def launch_reduce(
    out: ClipState,
    partials: Tensor,
    chunk_to_tensor: Tensor,
    groups: Tensor | None,
    max_norm: Tensor,
    eps: float = EPS,
    divisor: Tensor | None = None,
    norm_type: float = 2.0,
):
    """Launch reduce_v2: norm, scale and first nonfinite tensor of each group, written into `out`.

    partials, chunk_to_tensor: (chunks,) from squares_v2. groups: (tensors,) int32, the group of
    each; None: there is one. max_norm: (1,) fp64 on the device. divisor: (1,) fp32, what the
    gradients are still to be divided by; None: 1."""
    clip_kernel("reduce_v2", norm_type)[len(out.values), 1024](
        out.values,
        out.nonfinite_tensor,
        partials,
        chunk_to_tensor,
        groups,
        len(partials),
        max_norm,
        float(eps),
        divisor,
    )


def launch_scale(
    tensors: list[Tensor], state: ClipState, groups: Tensor | None, skip: bool, launches=None
):
    """Launch scale_v2: multiply in place by each group's scale. skip: but not what is not finite.

    Tensors of a group with scale 1 are neither read nor written."""
    for start, chunks, most, packed in launches or launches_for(tensors):
        if chunks:
            clip_kernel("scale_v2", 2.0, most)[min(chunks, SCALE_BLOCKS), SQUARES_THREADS](
                state.values, groups, int(skip), start, packed, tensors=tensors
            )


def new_state(count: int, device, scope: Scope, names) -> ClipState:
    """An uninitialised ClipState of `count` groups."""
    return ClipState(
        torch.empty(count, 4, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        scope,
        names,
    )


def check_max_norm(max_norm) -> float:
    """max_norm as a float.

    Args:
        max_norm: a number of 0 or more, or a one-element tensor on the CPU.

    Raises:
        ArgumentError: for NaN, a negative number, or a tensor on a GPU.
    """
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise ArgumentError(
            f"max_norm is a tensor on {max_norm.device}, which the host would have to wait for;"
            " expected a number"
        )
    try:
        value = float(max_norm)
    except (TypeError, ValueError):
        given = repr(max_norm) if isinstance(max_norm, str) else described(max_norm)
        raise ArgumentError(f"max_norm is {given}; expected a number") from None
    if math.isnan(value) or value < 0:
        raise ArgumentError(
            f"max_norm is {value}; expected a number of 0 or more (infinity: no clipping)"
        )
    return value


def kernel_takes(grads: list[Tensor]) -> bool:
    """True for plain dense tensors of fp32, bf16 or fp16 on one device, of backend cuda or simt."""
    return (
        takes(grads[0].device)
        and set(map(type, grads)) == {Tensor}
        and {g.dtype for g in grads} <= KINDS.keys()
        and len(set(map(Tensor.get_device, grads))) == 1
        and all([g.layout is torch.strided for g in grads])
    )


def check_gradients(grads: list[Tensor], names):
    """ArgumentError for sparse and complex gradients. names: returns their names."""
    for i, g in enumerate(grads):
        sparse = g.layout != torch.strided
        if sparse or g.is_complex():
            problem = f"has layout {g.layout}" if sparse else f"is {g.dtype}"
            raise ArgumentError(
                f"the gradient of {names()[i]} {problem}; expected a dense, real tensor"
            )


def unnamed(parameters) -> list[str]:
    """Names for parameters that have none."""
    return [f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(parameters)]


def dense(t: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlaps, in whatever order.

    A negated view (Tensor.is_neg) does not: other numbers lie there."""
    if t.is_neg():
        return False
    if t.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(pair for pair in zip(t.stride(), t.shape) if pair[1] > 1):
        if stride != step:
            return False
        step *= size
    return True
