"""Products dy^T @ x that add weight gradients into slices of an arena, for backward.

cuBLAS computes acc += dy^T x in one call. Each product is an operation of torch.library that
mutates its argument, so that torch.compile can trace a backward that calls it.

An eager backward asks what is done with a gradient, and adds or returns it. A compiled one was
traced before that is known: its operations ask when they run, and can only add.
"""

import torch
from torch import Tensor

from .gradient_slice import GradientSlice, slice_of
from .gradient_use import RETURNED, GradientUse

_library = torch.library.Library("gpuaccel", "FRAGMENT")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)


# ---- the operations: what a compiled backward calls ----------------------------------------------


def _add_weight_gradient(acc, dy, x):
    """acc += dy^T @ x, summed in fp32.

    Args:
        acc: (out, in) fp32.
        dy: (..., out), fp32 or bf16. For an (in, out) weight, x and dy change places.
        x: (..., in), fp32 or bf16.
    """
    target = slice_of(acc)
    add_product(target, target.uses(), dy, x)


def _fused_linears_backward(acc, dys, x, weight):
    """acc += dy^T @ x; returns the input's gradient dy @ weight.

    One operation, because torch.compile would generate a slow kernel for the concatenation.

    Args:
        dys: dy (..., out), whole or split along its last dimension.
    """
    dy = side_by_side(dys)
    _add_weight_gradient(acc, dy, x)
    return dy @ weight


for _name, _function, _fake in (
    ("add_weight_gradient_", _add_weight_gradient, lambda acc, dy, x: None),
    (
        "fused_linears_backward_",
        _fused_linears_backward,
        lambda acc, dys, x, weight: torch.empty_like(x),
    ),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"gpuaccel::{_name}", _fake, lib=_library)


# ---- their additions, which an eager backward calls ----------------------------------------------


def add_product(target: GradientSlice, uses: list[GradientUse], dy: Tensor, x: Tensor):
    """Add dy^T @ x into a slice, for the weights whose gradient is added.

    Args:
        target: (out, in).
        uses: of its weights.
        dy: (..., out).
        x: (..., in).
    """
    for acc, columns, overwrite in target.begin(uses):
        accumulate_product(acc, dy if columns is None else dy[..., columns], x, overwrite)
    target.end(uses)


def accumulate_product(acc: Tensor, dy: Tensor, x: Tensor, overwrite: bool = False):
    """acc += dy^T @ x, summed in fp32: the gradient of the weight of y = x @ weight^T.

    Args:
        acc: (out, in) fp32.
        dy: (..., out).
        x: (..., in), of dy's dtype.
        overwrite: acc = dy^T @ x. Nothing reads acc: a NaN in it is gone.
    """
    dy, x = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (dy, x))
    beta = 0 if overwrite else 1
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x, beta=beta)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, beta=beta, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float(), beta=beta)


# ---- for the backward of autograd functions ------------------------------------------------------


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T @ x, of operations that can be differentiated and vmapped.

    Args:
        dy: (..., out).
        x: (..., in).
    """
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def side_by_side(dys: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """dy, of its parts.

    Args:
        dys: (..., some of its columns) each.
    """
    return torch.cat(dys, -1) if len(dys) > 1 else dys[0]


def add_or_return(ctx, i: int, acc: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """Add dy^T @ x into `acc`, or return it, as the running backward wants it.

    Args:
        ctx: of the autograd function.
        i: the weight's index among its inputs, from the side where only tensors stand.
        acc: the tensor of the weight's slice.
        dy, x: as for add_product().
    """
    if torch.compiler.is_compiling():
        if ctx.needs_input_grad[i]:
            torch.ops.gpuaccel.add_weight_gradient_(acc, dy, x)
        return None
    target = slice_of(acc)
    uses = target.uses([ctx.next_functions[i]])
    add_product(target, uses, dy, x)
    return weight_gradient(dy, x) if uses[0] is RETURNED else None
