"""Products dy^T @ x that add weight gradients into slices of an arena, for backward.

cuBLAS computes acc += dy^T x in one call. Each product is an operation of torch.library that
mutates its argument, so that torch.compile can trace a backward that calls it.

An eager backward asks what is done with a gradient, and adds or returns it. A compiled one was
traced before that is known: its operations ask when they run, and can only add.

Everywhere acc is (out, in) fp32, dy (..., out) and x (..., in), of one dtype.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .gradient_slice import RETURNED, GradientSlice, GradientUse, slice_of

_library = torch.library.Library("gpuaccel", "FRAGMENT")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)


def _add_weight_gradient(acc, dy, x):
    target = slice_of(acc)
    _add(target, target.uses(), dy, x)


def _fused_linears_backward(acc, dys, x, weight):
    """As _add_weight_gradient; returns dy @ weight.

    One operation, because torch.compile would generate a slow kernel for the concatenation."""
    dy = side_by_side(dys)
    _add_weight_gradient(acc, dy, x)
    return dy @ weight


for _name, _function, _fake in (
    ("add_weight_gradient_", _add_weight_gradient, lambda acc, dy, x: None),
    (
        "fused_linears_backward_",
        _fused_linears_backward,
        lambda acc, dys, x, weight: x.new_empty(x.shape),
    ),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"gpuaccel::{_name}", _fake, lib=_library)


def _add(target: GradientSlice, uses: list[GradientUse], dy: Tensor, x: Tensor):
    """Add dy^T @ x into a slice, for the weights whose gradient is added."""
    for acc, columns, overwrite in target.begin(uses):
        accumulate_product(acc, dy if columns is None else dy[..., columns], x, overwrite)
    target.end(uses)


def accumulate_product(acc: Tensor, dy: Tensor, x: Tensor, overwrite: bool = False):
    """acc += dy^T @ x, summed in fp32. overwrite: nothing reads acc, and a NaN in it is gone."""
    dy, x = as_rows(dy), as_rows(x)
    beta = 0 if overwrite else 1
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x, beta=beta)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, beta=beta, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float(), beta=beta)


def as_rows(t: Tensor) -> Tensor:
    """(..., n) as (rows, n): a view where the strides allow it."""
    return t.flatten(0, -2) if t.dim() > 1 else t[None]


def side_by_side(dys: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """dy, of parts that have some of its columns each."""
    return torch.cat(dys, -1) if len(dys) > 1 else dys[0]


def add_or_return(
    acc: Tensor, edges: Iterable[tuple], dy: Tensor, x: Tensor, widths: list[int]
) -> list[Tensor | None]:
    """Add dy^T @ x into `acc`, or return it, as the running backward wants it of each weight.

    Args:
        acc: the tensor of the weights' slice.
        edges: to the weights, as for gradient_uses().
        widths: number of outputs of each weight.
    """
    target = slice_of(acc)
    uses = target.uses(edges)
    _add(target, uses, dy, x)
    if RETURNED not in uses:
        return [None] * len(uses)
    # Of operations that can be differentiated and vmapped.
    rows = x.reshape(-1, x.shape[-1])
    return [
        part.reshape(-1, part.shape[-1]).t() @ rows if use is RETURNED else None
        for use, part in zip(uses, dy.split(widths, -1))
    ]
