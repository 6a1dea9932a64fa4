"""Products dy^T @ x that add weight gradients into slices of an arena, for backward.

cuBLAS computes acc += dy^T x in one call. Each product is an operation of torch.library that
mutates its argument, so that torch.compile can trace a backward that calls it.

An eager backward asks what is done with a gradient, and adds or returns it. A compiled one was
traced before that is known: its operations ask when they run, and can only add.
"""

import torch
from torch import Tensor

from ..ops import WeightGradient, add_lora_gradients_, reference_weight_gradient
from .gradient_slice import GradientSlice, slice_of
from .gradient_use import ADDED, RETURNED, GradientUse

_library = torch.library.Library("gpuaccel", "FRAGMENT")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x, float alpha=1.0) -> ()")
_library.define(
    "add_lora_gradients_(Tensor(a!)[] accs, Tensor[] dys, Tensor[] xs, float[] alphas) -> ()"
)
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)


# ---- the operations: what a compiled backward calls ----------------------------------------------


def _add_weight_gradient(acc, dy, x, alpha=1.0):
    """acc += alpha * dy^T @ x, summed in fp32.

    Args:
        acc: (out, in) fp32. dy: (..., out) and x: (..., in), fp32 or bf16. For a weight that is
            (in, out) x and dy change places.
    """
    target = slice_of(acc)
    add_product(target, target.uses(), dy, x, alpha)


def _add_lora_gradients(accs, dys, xs, alphas):
    """_add_weight_gradient() of each, those of LoRA's factors in one launch."""
    targets = [slice_of(acc) for acc in accs]
    _add_products([(t, t.uses(), *rest) for t, *rest in zip(targets, dys, xs, alphas)])


def _fused_linears_backward(acc, dys, x, weight):
    """acc += dy^T @ x; returns the input's gradient dy @ weight.

    Args:
        dys: dy (..., out), whole or cut along its last dimension. An operation of its own, because
            torch.compile would generate a slow kernel for the concatenation.
    """
    dy = side_by_side(dys)
    _add_weight_gradient(acc, dy, x)
    return dy @ weight


for _name, _function, _fake in (
    ("add_weight_gradient_", _add_weight_gradient, lambda acc, dy, x, alpha=1.0: None),
    ("add_lora_gradients_", _add_lora_gradients, lambda accs, dys, xs, alphas: None),
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


def _begin(target: GradientSlice, uses: "list[GradientUse]", dy, x, alpha):
    """The product, in a piece for each part of the slice, which knows of it from here on."""
    pieces = []
    for acc, columns, overwrite in target.begin(uses):
        part = dy if columns is None else dy[..., columns]
        part, rows = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (part, x))
        pieces.append(WeightGradient(acc, part, rows, alpha, overwrite))
    return pieces


def add_product(
    target: GradientSlice, uses: "list[GradientUse]", dy: Tensor, x: Tensor, alpha: float = 1.0
):
    """Add alpha * dy^T @ x into a slice, for the weights whose gradient is added.

    Args:
        target: (out, in).
        uses: of its weights.
        dy: (..., out).
        x: (..., in).
        alpha: a factor.
    """
    for piece in _begin(target, uses, dy, x, alpha):
        reference_weight_gradient(piece)
    target.end(uses)


def _add_products(arguments: "list[tuple]"):
    """add_product() of each, those of LoRA's factors in one launch. Each slice has one weight."""
    add_lora_gradients_([piece for each in arguments for piece in _begin(*each)])
    # Once for a factor that two layers share, when both of its products are there.
    for target, uses in {target: uses for target, uses, *_ in arguments}.items():
        target.end(uses)


# ---- for the backward of autograd functions ------------------------------------------------------


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T @ x, of operations that can be differentiated and vmapped.

    Args:
        dy: (..., out).
        x: (..., in).
    """
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def side_by_side(dys: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    """dy, of its parts.

    Args:
        dys: (..., some of its columns) each.
    """
    return torch.cat(dys, -1) if len(dys) > 1 else dys[0]


def add_or_return(ctx, i: int, acc: Tensor, dy: Tensor, x: Tensor) -> "Tensor | None":
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


def add_or_return_each(
    ctx, accs: "tuple[Tensor, ...]", products: "list[tuple[Tensor, Tensor, float]]"
) -> "list[Tensor | None]":
    """add_or_return() of alpha * dy^T @ x for each weight. All that are added are one call.

    Args:
        ctx: of the autograd function, whose last inputs are the weights.
        accs: the tensors of their slices.
        products: (dy, x, alpha) of each weight.
    """
    count = len(products)
    if torch.compiler.is_compiling():
        needed = zip(ctx.needs_input_grad[-count:], accs, products)
        arguments = [(acc, *product) for needs, acc, product in needed if needs]
        if arguments:
            torch.ops.gpuaccel.add_lora_gradients_(*map(list, zip(*arguments)))
        return [None] * count
    grads: "list[Tensor | None]" = []
    added = []
    for edge, acc, (dy, x, alpha) in zip(ctx.next_functions[-count:], accs, products):
        target = slice_of(acc)
        uses = target.uses([edge])
        if uses[0] is ADDED:
            added.append((target, uses, dy, x, alpha))
        grads.append(alpha * weight_gradient(dy, x) if uses[0] is RETURNED else None)
    _add_products(added)
    return grads
