"""The norm of many tensors, the clip scale and the multiplication by it, on the device: definition in torch, and launches of kernels_cu/clip.cu.

What users call, and what happens at the edges: optim/clip.py.

Source: the three phases of entrenar's fused clip (ALB-078); torch.nn.utils.clip_grad_norm_ for semantics; eps as there.
"""

import functools
import itertools
import math
import struct

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..backends import takes
from ..compiler.kernel import Kernel
from ..errors import ArgumentError
from .accumulate import CHUNK, SQUARES_THREADS

SCOPES = ("global", "block", "tensor")
POLICIES = ("propagate", "skip", "raise")
EPS = 1e-6  # torch's
MAX_TENSORS, MAX_BLOCKS = 256, 2**20
SCALE_BLOCKS = 16384  # fewer than chunks: most often they find that there is nothing to do
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSORS = struct.Struct(f"{MAX_TENSORS}Q{MAX_TENSORS + 1}i{MAX_TENSORS}H{MAX_TENSORS}B4x").pack


class ClipState:
    """What one clipping found. Everything is a tensor on the device, one element, or with a scope one per group; nothing waits
    until it is read (`float(found.norm)`, `found.name()`).

    scale: factor of the gradients, fp32; norm, clipped_norm: before and after clipping, fp32; finite: bool; first_nonfinite: int32,
    the number of the first tensor (of those that have a gradient) with NaN or infinity, -1 without one."""

    __slots__ = ("verdicts", "bad", "scope", "names")

    def __init__(self, verdicts: Tensor, bad: Tensor, scope: str, names):
        self.verdicts, self.bad, self.scope, self.names = (
            verdicts,
            bad,
            scope,
            names,
        )  # (G, 4) fp32, (G,) int32; names: a function

    def _column(self, i):
        return self.verdicts[0, i] if self.scope == "global" else self.verdicts[:, i]

    scale = property(lambda self: self._column(0))
    norm = property(lambda self: self._column(1))
    clipped_norm = property(lambda self: self._column(2))
    finite = property(lambda self: self._column(3) != 0)
    first_nonfinite = property(lambda self: self.bad[0] if self.scope == "global" else self.bad)

    def name(self) -> "str | None":
        """The first tensor whose gradient is not finite, by name; None when all are. Waits for the device."""
        found = [i for i in self.bad.tolist() if i >= 0]
        return self.names()[found[0]] if found else None

    def clone(self) -> "ClipState":
        """A copy that the next step does not overwrite."""
        return ClipState(self.verdicts.clone(), self.bad.clone(), self.scope, self.names)

    def __repr__(self):
        return f"ClipState({self.scope}, {len(self.verdicts)} norm{'s' * (len(self.verdicts) > 1)} on {self.verdicts.device})"


def reference_norms(
    grads: "list[Tensor]",
    norm_type: float = 2.0,
    groups: "list[int] | None" = None,
    count: int = 1,
    foreach=None,
    numbers: "list[int] | None" = None,
) -> "tuple[Tensor, Tensor]":
    """(norm of each group (count,), its first tensor that is not finite (count,) int32 or -1), as torch computes them, any device and dtype.

    groups: the group of each tensor; None: one group. numbers: what the tensors are called, ascending; None: by their places."""
    device, norms, bad, none = grads[0].device, [], [], 2**31 - 1
    numbers = numbers or range(len(grads))
    for g in range(count):
        members = [
            i for i, t in enumerate(grads) if t.numel() and (groups is None or groups[i] == g)
        ]
        norms.append(
            get_total_norm([grads[i] for i in members], norm_type, foreach=foreach).to(device)
            if members
            else torch.zeros((), device=device)
        )
        wrong = [
            torch.where(torch.isfinite(grads[i]).all(), none, numbers[i]).to(device)
            for i in members
        ]
        first = torch.stack(wrong).min() if wrong else torch.full((), none, device=device)
        bad.append(torch.where(first < none, first, -1))
    return torch.stack(norms), torch.stack(bad).int()


def reference_scale(norms: Tensor, max_norm, eps: float = EPS) -> Tensor:
    """min(1, max_norm / (norm + eps)); NaN stays NaN."""
    return torch.clamp(max_norm / (norms + eps), max=1.0)


@functools.cache
def clip_kernel(name: str, norm_type: float) -> Kernel:
    return Kernel(
        "clip",
        name,
        CHUNK=CHUNK,
        THREADS=SQUARES_THREADS,
        MAX_TENSORS=MAX_TENSORS,
        NORM=0 if norm_type == math.inf else int(norm_type),
    )


def launches_for(tensors: "list[Tensor | None]") -> tuple:
    """Per launch: (number of its first tensor, its chunks, its struct). Chunks are counted without gaps over all launches."""
    try:
        return _packed(
            tuple(map(Tensor.data_ptr, tensors)),
            tuple(map(Tensor.numel, tensors)),
            tuple([KINDS[t.dtype] for t in tensors]),
        )
    except TypeError:  # there is a None among them
        return _packed(
            *zip(
                *[
                    (0, 0, 0) if t is None else (t.data_ptr(), t.numel(), KINDS[t.dtype])
                    for t in tensors
                ]
            )
        )


@functools.lru_cache(64)
def _packed(addresses, counts, kinds):
    """Gradients often lie where they lay in the last step: then nothing is packed again."""
    found = []
    for start in range(0, len(addresses), MAX_TENSORS):
        part = slice(start, start + MAX_TENSORS)
        here = counts[part]
        first, rest = (
            [0, *itertools.accumulate([-(-n // CHUNK) for n in here])],
            [0] * (MAX_TENSORS - len(here)),
        )
        found.append(
            (
                start,
                first[-1],
                _TENSORS(
                    *addresses[part],
                    *rest,
                    *first,
                    *[first[-1]] * len(rest),
                    *[n and (n - 1) % CHUNK + 1 for n in here],
                    *rest,
                    *kinds[part],
                    *rest,
                ),
            )
        )
    return tuple(found)


def launch_squares(
    tensors: "list[Tensor | None]",
    partials: Tensor,
    owners: "Tensor | None" = None,
    norm_type: float = 2.0,
    launches=None,
):
    """squares_v2: a partial sum per chunk of the tensors (fp32, bf16, fp16, dense, on one device; None: no tensor)."""
    kernel, row = clip_kernel("squares_v2", norm_type), 0
    for start, chunks, packed in launches or launches_for(tensors):
        if chunks:
            out = (
                (partials, owners)
                if row == 0
                else (partials[row:], None if owners is None else owners[row:])
            )
            kernel[min(chunks, MAX_BLOCKS), SQUARES_THREADS](*out, start, packed, tensors=tensors)
            row += chunks


def launch_reduce(
    out: ClipState,
    partials: Tensor,
    owners: Tensor,
    groups: "Tensor | None",
    rows: int,
    max_norm: Tensor,
    eps: float = EPS,
    divisor: "Tensor | None" = None,
    norm_type: float = 2.0,
):
    """reduce_v2: norm, scale and first tensor that is not finite of each group, into `out`. max_norm: (1) fp64 on the device."""
    clip_kernel("reduce_v2", norm_type)[len(out.verdicts), 1024](
        out.verdicts, out.bad, partials, owners, groups, rows, max_norm, float(eps), divisor
    )


def launch_scale(
    tensors: "list[Tensor]", found: ClipState, groups: "Tensor | None", skip: bool, launches=None
):
    """scale_v2: multiply in place by each group's scale; what has scale 1 is neither read nor written."""
    for start, chunks, packed in launches or launches_for(tensors):
        if chunks:
            clip_kernel("scale_v2", 2.0)[min(chunks, SCALE_BLOCKS), SQUARES_THREADS](
                found.verdicts, groups, int(skip), start, packed, tensors=tensors
            )


def new_state(count: int, device, scope: str, names) -> ClipState:
    return ClipState(
        torch.empty(count, 4, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        scope,
        names,
    )


def check_max_norm(max_norm) -> float:
    """The number, or ArgumentError: a negative one would turn gradients around, and NaN destroy them."""
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise ArgumentError(
            f"max_norm is a tensor on {max_norm.device}, which the host would have to wait for; expected a number"
        )
    try:
        value = float(max_norm)
    except (TypeError, ValueError):
        raise ArgumentError(f"max_norm is {max_norm!r}; expected a number") from None
    if math.isnan(value) or value < 0:
        raise ArgumentError(
            f"max_norm is {value}; expected a number of 0 or more (infinity: no clipping)"
        )
    return value


def check_choice(name: str, value, choices):
    if value not in choices:
        raise ArgumentError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


def kernel_takes(grads: "list[Tensor]") -> bool:
    """Do our kernels take these gradients: one device with a backend of ours, plain tensors of fp32, bf16 or fp16?"""
    return (
        takes(grads[0].device)
        and set(map(type, grads)) == {Tensor}
        and {g.dtype for g in grads} <= KINDS.keys()
        and len(set(map(Tensor.get_device, grads))) == 1
        and all([g.layout is torch.strided for g in grads])
    )


def check_gradients(grads: "list[Tensor]", names):
    """ArgumentError, naming the tensor, for a sparse or complex gradient."""
    for i, g in enumerate(grads):
        if g.layout != torch.strided or g.is_complex():
            what = f"has layout {g.layout}" if g.layout != torch.strided else f"is {g.dtype}"
            raise ArgumentError(
                f"the gradient of {names()[i]} {what}; expected a dense, real tensor"
            )


def unnamed(parameters) -> "list[str]":
    """What parameters are called that have no names."""
    return [f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(parameters)]


def dense(t: Tensor) -> bool:
    """Does the tensor fill its memory without gaps or overlaps (in whatever order)?"""
    if t.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape) if size > 1
    ):
        if stride != step:
            return False
        step *= size
    return True
