"""RMSNorm with the addition to the residual stream in the same kernel, forward and backward.

    y, s = ga.ops.add_rms_norm(x, residual, weight, 1e-5)  # s = x + residual, y = rms_norm(s)
    y, s = ga.ops.add_rms_norm(x, None, weight, 1e-5)  # s is x

    rstd = 1 / sqrt(mean of s^2 + eps)
    y = s rstd weight

The sum s is rounded to the tensors' dtype; the norm of the rounded sum is computed in fp32 and
rounded once, as torch.nn.RMSNorm does. The backward adds the gradient that s itself has received
in fp32, and rounds once (torch's eager backward rounds the norm's gradient before it adds). A
frozen weight gets no gradient, and none is computed. Results of a row do not depend on other rows,
but for the weight's gradient; all of them are deterministic.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel, usable
from ..errors import ArgumentError

# Rows of the matrix that a thread block of the backward takes (ROWS of rms_norm.cu): MOST_ROWS, or
# FEW_ROWS where that would be FEW_BLOCKS thread blocks or fewer, too few for all SMs.
FEW_ROWS, MOST_ROWS = 8, 16
FEW_BLOCKS = 128
# A thread holds 4 groups of 16 bytes of a row, and a row has 512 threads at most.
MAX_ROW_BYTES = 512 * 4 * 16
_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- reference -----------------------------------------------------------------------------------


def reference_add_rms_norm(
    x: Tensor, residual: "Tensor | None", weight: Tensor, eps: float
) -> "tuple[Tensor, Tensor]":
    """(rms_norm(s), s) with s = x + residual, in torch's operations: the definition.

    Args:
        x, residual: (..., H) of one dtype; residual None: s is x.
        weight: (H,).
        eps: added to the mean of the squares.
    """
    s = x if residual is None else x + residual
    return F.rms_norm(s, weight.shape, weight, eps), s


def reference_backward(
    dy: Tensor, ds: "Tensor | None", s: Tensor, weight: Tensor, eps: float
) -> "tuple[Tensor, Tensor]":
    """Gradients of s and of weight, in torch's operations. Differentiable.

    Args:
        dy: (..., H), of the norm's output.
        ds: (..., H), that s has received otherwise; None: nothing.
        s: (..., H). weight: (H,).
        eps: as in the forward.
    """
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    upper, value = dy.to(wide), s.to(wide)
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    h = value * rstd
    g = upper * weight.to(wide)
    dx = rstd * (g - h * (g * h).mean(-1, keepdim=True))
    if ds is not None:
        dx = dx + ds.to(wide)
    dweight = (upper * h).reshape(-1, s.shape[-1]).sum(0)
    return dx.to(s.dtype), dweight.to(weight.dtype)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def rms_norm_kernel(
    name: str, dtype: torch.dtype, team: int, groups: int, whole: int, rows: int = MOST_ROWS
) -> Kernel:
    """A kernel of rms_norm.cu.

    Args:
        name: of the kernel.
        dtype: fp32, bf16 or fp16.
        team: threads of a row.
        groups: groups of 16 bytes that a thread takes of a row.
        whole: 1 if rows are made of aligned groups of 16 bytes.
        rows: of a block, in the backward.
    """
    return Kernel(
        "rms_norm",
        name,
        DATA_T=C_TYPES[dtype],
        TEAM=team,
        GROUPS=groups,
        WHOLE=whole,
        ROWS=rows,
    )


@functools.cache
def _team_and_groups(width: int, dtype: torch.dtype) -> "tuple[int, int]":
    """(threads of a row, groups of 16 bytes that each of them takes)."""
    groups = -(-width * dtype.itemsize // 16)
    team = 32
    while team * 4 < groups:
        team *= 2
    return team, -(-groups // team)


def _rows_of_block(rows: int) -> int:
    return FEW_ROWS if rows <= FEW_BLOCKS * MOST_ROWS else MOST_ROWS


def _kernel_for(name: str, width: int, *tensors: "Tensor | None", rows: int = MOST_ROWS) -> Kernel:
    there = [t for t in tensors if t is not None]
    dtype = there[0].dtype
    aligned = all(t.data_ptr() % 16 == 0 for t in there)
    whole = int(aligned and width * dtype.itemsize % 16 == 0)
    return rms_norm_kernel(name, dtype, *_team_and_groups(width, dtype), whole, rows)


def launch_forward(
    y: Tensor,
    s: "Tensor | None",
    rstd: Tensor,
    x: Tensor,
    residual: "Tensor | None",
    weight: Tensor,
    eps: float,
):
    """Launch rms_norm_forward_v3, which writes y, s and rstd.

    Args:
        y: (..., H), the norm.
        s: (..., H), the sum; None: there is no residual.
        rstd: (rows,) fp32.
        x, residual: (..., H), not empty. weight: (H,).
        eps: added to the mean of the squares.

    All are contiguous, and of one dtype but for rstd.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    kernel = _kernel_for("rms_norm_forward_v3", width, x, residual, weight, y, s)
    teams = kernel.bound // int(kernel.defines["TEAM"])
    kernel[-(-rows // teams), kernel.bound](y, s, rstd, x, residual, weight, eps, rows, width)


def launch_backward(
    dx: Tensor,
    dweight: "Tensor | None",
    dy: Tensor,
    ds: "Tensor | None",
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
):
    """Launch rms_norm_backward_v3, and rms_norm_weight_v3 where the weight's gradient is wanted.

    Args:
        dx: (..., H), written.
        dweight: (H,), written; None: it is not wanted.
        dy, ds, s: (..., H), not empty; ds None: s has received no gradient. weight: (H,).
        rstd: of the forward.

    All are contiguous, and of one dtype but for rstd.
    """
    width = s.shape[-1]
    rows = s.numel() // width
    of_block = _rows_of_block(rows)
    blocks = -(-rows // of_block)
    partials = None
    if dweight is not None:
        partials = torch.empty(blocks, width, dtype=torch.float32, device=s.device)
    kernel = _kernel_for("rms_norm_backward_v3", width, dy, ds, s, weight, dx, rows=of_block)
    kernel[blocks, kernel.bound](dx, partials, dy, ds, s, rstd, weight, rows, width)
    if dweight is not None:
        rms_norm_kernel("rms_norm_weight_v3", weight.dtype, 32, 4, 0)[-(-width // 32), 1024](
            dweight, partials, blocks, width
        )


# ---- the operations that torch.compile sees ------------------------------------------------------

# Both write into tensors that are given to them. torch 2.11's Inductor makes a text of the
# arguments of each operation that it meets for the first time (GraphLowering.call_function). The
# text of a tensor that an operation returned contains the texts of that operation's arguments. Each
# norm has two of them from the norm before, y and s: the text doubled with each, and compiling 24
# blocks did not end. The text of a tensor from torch.empty has no other in it.
_library.define(
    "add_rms_norm_out(Tensor(a!) y, Tensor(b!)? s, Tensor(c!) rstd, Tensor x, Tensor? residual, "
    "Tensor weight, float eps) -> ()"
)
_library.define(
    "rms_norm_backward_out(Tensor(a!) dx, Tensor(b!)? dweight, Tensor dy, Tensor? ds, Tensor s, "
    "Tensor weight, Tensor rstd, float eps) -> ()"
)


@functools.cache
def _kernels_of(dtype: torch.dtype, width: int) -> "list[Kernel]":
    """The kernels that norms of this width launch, on tensors that are aligned to 16 bytes."""
    whole = int(width * dtype.itemsize % 16 == 0)
    return [
        rms_norm_kernel("rms_norm_weight_v3", dtype, 32, 4, 0),
        *(
            rms_norm_kernel(name, dtype, *_team_and_groups(width, dtype), whole, rows)
            for name, rows in (
                ("rms_norm_forward_v3", MOST_ROWS),
                ("rms_norm_backward_v3", MOST_ROWS),
                ("rms_norm_backward_v3", FEW_ROWS),
            )
        ),
    ]


@torch.compiler.assume_constant_result
def rms_norm_runs(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Do the kernels run on rows of this width? Else torch computes.

    torch.compile decides when it traces. (In a compiled graph the operations decide again.)

    Args:
        device: of the tensors.
        dtype: of all of them.
        width: elements of a row.
    """
    return (
        takes(device)
        and dtype in FLOAT_DTYPES
        and 0 < width * dtype.itemsize <= MAX_ROW_BYTES
        and usable(device, *_kernels_of(dtype, width))
    )


def _kernels_run(x: Tensor, weight: Tensor) -> bool:
    return x.numel() > 0 and rms_norm_runs(x.device, x.dtype, weight.numel())


def _contiguous(t: "Tensor | None") -> "Tensor | None":
    return None if t is None else t.contiguous().resolve_neg()


def _forward(y, s, rstd, x, residual, weight, eps):
    if _kernels_run(x, weight):
        launch_forward(y, s, rstd, *map(_contiguous, (x, residual, weight)), eps)
        return
    norm, total = reference_add_rms_norm(x, residual, weight, eps)
    y.copy_(norm)
    # The backward may run the kernels.
    square = total.to(rstd.dtype).square().mean(-1)
    rstd.copy_(torch.rsqrt(square + eps).flatten())
    if s is not None:
        s.copy_(total)


def _backward(dx, dweight, dy, ds, s, weight, rstd, eps):
    if _kernels_run(s, weight):
        launch_backward(dx, dweight, *map(_contiguous, (dy, ds, s, weight)), rstd)
        return
    gradients = reference_backward(dy, ds, s, weight, eps)
    dx.copy_(gradients[0])
    if dweight is not None:
        dweight.copy_(gradients[1])


for _name, _function in (("add_rms_norm_out", _forward), ("rms_norm_backward_out", _backward)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"gpuaccel::{_name}", lambda *args: None, lib=_library)


def _empty(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def is_batch(*gradients: "Tensor | None") -> bool:
    """Whether one of a backward's gradients is a batch of vmap's, which no kernel takes.

    That is so with is_grads_batched=True. torch.compile has none.

    Args:
        *gradients: what the backward gets.
    """
    functorch = torch._C._functorch
    return not torch.compiler.is_compiling() and any(
        g is not None and (functorch.is_legacy_batchedtensor(g) or functorch.is_batchedtensor(g))
        for g in gradients
    )


class _AddRMSNorm(torch.autograd.Function):
    """(y, s). The gradient of the residual stream s is added by the norm's backward."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        # None for the gradient of an output that nobody uses, as s is behind the last norm.
        ctx.set_materialize_grads(False)
        y = _empty(x)
        s = None if residual is None else _empty(x)
        rstd = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
        compiled = torch.compiler.is_compiling()
        forward = torch.ops.gpuaccel.add_rms_norm_out if compiled else _forward
        forward(y, s, rstd, x, residual, weight, eps)
        ctx.eps = eps
        if s is None:
            ctx.save_for_backward(x, weight, rstd)
            return y, x.view_as(x)
        ctx.save_for_backward(s, weight, rstd)
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        s, weight, rstd = ctx.saved_tensors
        weight_needs_grad = ctx.needs_input_grad[2]
        compiled = torch.compiler.is_compiling()
        if dy is None:
            dx, dweight = ds, None
        elif not compiled and (torch.is_grad_enabled() or is_batch(dy, ds)):
            # With create_graph=True: it may be differentiated again.
            dx, dweight = reference_backward(dy, ds, s, weight, ctx.eps)
        else:
            dx = _empty(s)
            dweight = _empty(weight) if weight_needs_grad else None
            backward = torch.ops.gpuaccel.rms_norm_backward_out if compiled else _backward
            backward(dx, dweight, dy, ds, s, weight, rstd, ctx.eps)
        return (
            dx if ctx.needs_input_grad[0] else None,
            dx if ctx.needs_input_grad[1] else None,
            dweight if weight_needs_grad else None,
            None,
        )


# ---- public --------------------------------------------------------------------------------------


def add_rms_norm(
    x: Tensor, residual: "Tensor | None", weight: Tensor, eps: float
) -> "tuple[Tensor, Tensor]":
    """(rms_norm(s), s) with s = x + residual, in one kernel, and its backward in one.

    Where the kernels do not run (on a CPU, with fp64, in rows of more than 32 KiB), torch computes.
    torch.func's transforms and forward mode are not supported.

    Args:
        x, residual: (..., H), of one shape, dtype and device; residual None: s is x.
        weight: (H,), of their dtype.
        eps: added to the mean of the squares.

    Returns:
        The norm and the sum, (..., H). Use the returned s, not x, for what follows, so that one
        kernel adds both gradients.

    Raises:
        ArgumentError: for tensors that do not fit each other.

    Source:
        kernels_cu/rms_norm.cu; torch.nn.functional.rms_norm.

    Example:
        >>> x, residual = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
        >>> y, s = ga.ops.add_rms_norm(x, residual, torch.ones(8), 1e-5)
        >>> torch.equal(s, x + residual), y.shape
        (True, torch.Size([2, 4, 8]))
    """
    for name, t in (("residual", residual), ("weight", weight)):
        if t is not None and (t.dtype != x.dtype or t.device != x.device):
            raise ArgumentError(
                f"{name} is {t.dtype} on {t.device}, x {x.dtype} on {x.device}; expected one dtype "
                "and device"
            )
    if residual is not None and residual.shape != x.shape:
        raise ArgumentError(
            f"residual has shape {tuple(residual.shape)}; expected {tuple(x.shape)}, as x"
        )
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        raise ArgumentError(
            f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; expected (H,) and "
            "(..., H)"
        )
    if not rms_norm_runs(x.device, x.dtype, weight.numel()):
        return reference_add_rms_norm(x, residual, weight, eps)
    return _AddRMSNorm.apply(x, residual, weight, eps)
