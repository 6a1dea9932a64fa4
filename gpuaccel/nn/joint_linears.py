"""Several linear layers of one input as one product.

    q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)

With rotary positions one kernel rotates what the product has written, in place, and one writes the
gradients of q, k and v side by side, where the product's backward reads them:

    q, k, v = fused_rotary(x, self.w_q, self.w_k, self.w_v, table)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compiler import FLOAT_DTYPES
from ..errors import ArgumentError
from ..ops import reference_rotary_backward, rotate
from .fused_forward import Joint, fused_forward
from .gradient_slice import slice_of
from .gradient_use import RETURNED, backward_may_add, has_second_derivative
from .weight_gradient import add_product, side_by_side, weight_gradient


def _as_autocast(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast; x itself where that is off."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _rotated_parts(y: Tensor, widths: "list[int]", table: "Tensor | None"):
    """y, a joint product's output, cut; with a table its k and q are rotated in place before."""
    if table is not None:
        torch.ops.gpuaccel.rotary_(y, table, widths[0] // table.shape[-1])
    return y.split(widths, -1)


def _rotated_back(dys: "tuple[Tensor, ...]", table: "Tensor | None") -> "tuple[Tensor, ...]":
    """The gradients of the parts; with a table that of y, in one tensor."""
    if table is None:
        return dys
    dv, dk, dq = dys
    if has_second_derivative():
        return (reference_rotary_backward(dv, dk, dq, table),)
    return (torch.ops.gpuaccel.rotary_backward(dv, dk, dq, table),)


class _LinearsIntoArena(torch.autograd.Function):
    """The outputs of several layers from one product.

    joint: the layers' weights as the arena holds them, side by side. acc: their gradients,
    likewise. widths: the number of outputs of each layer; of all in one, where y stays whole.
    table: of rotary positions, where the layers are v, k and q; else None.
    weights: the same weights one by one, so that autograd knows whose gradients backward computes.
    """

    @staticmethod
    def forward(ctx, x, joint, acc, widths, table, *weights):
        joint = _as_autocast(joint)
        ctx.save_for_backward(x, joint, *weights)
        ctx.acc = acc
        ctx.table = table
        return _rotated_parts(F.linear(x, joint), widths, table)

    @staticmethod
    def backward(ctx, *dys):
        x, joint, *weights = ctx.saved_tensors
        grads: "list[Tensor | None]" = [None] * len(weights)
        dys = _rotated_back(dys, ctx.table)
        if not torch.compiler.is_compiling():
            target = slice_of(ctx.acc)
            uses = target.uses(ctx.next_functions[-len(weights) :])
            dy = side_by_side(dys)
            add_product(target, uses, dy, x)
            if RETURNED in uses:
                cut = zip(uses, dy.split([len(w) for w in weights], -1))
                grads = [weight_gradient(t, x) if use is RETURNED else None for use, t in cut]
            if torch.is_grad_enabled():
                # For a second derivative: `joint` does not lead back to the weights.
                joint = torch.cat(weights).to(joint.dtype)
            dx = dy @ joint
        elif any(ctx.needs_input_grad[5:]):
            dx = torch.ops.gpuaccel.fused_linears_backward_(ctx.acc, list(dys), x, joint)
        else:
            dx = side_by_side(dys) @ joint
        return dx, None, None, None, None, *grads


def fused_linears(x: Tensor, *layers: nn.Module) -> "tuple[Tensor, ...]":
    """(layer(x) for layer in layers), as one product where that is possible.

    It is possible while products add into the arena (optim/products.py), for layers that a module
    lists in this order in FUSED_LINEARS, and whose weights lie side by side in the arena.

    Args:
        x: (..., in).
        *layers: nn.Linear, all of the same input.

    Returns:
        The output of each layer.
    """
    joint = _joint_of(*layers)
    if joint is None:
        return tuple(layer(x) for layer in layers)
    return _linears(_as_autocast(x), joint, layers)


def _linears(
    x: Tensor, joint: "Joint", layers, table: "Tensor | None" = None, whole: bool = False
) -> "tuple[Tensor, ...]":
    """The output of each layer, of one product; with a table k and q are rotated.

    whole: the product's output in one tensor, that of the last layer first."""
    # An arena lies in reverse order.
    layers = layers[::-1]
    widths = [layer.out_features for layer in layers]
    parts = [sum(widths)] if whole else widths
    weights = [layer.weight for layer in layers]
    return _LinearsIntoArena.apply(x, joint.weight, joint.grad, parts, table, *weights)[::-1]


def fused_rotary(
    x: Tensor, w_q: nn.Module, w_k: nn.Module, w_v: nn.Module, table: Tensor
) -> "tuple[Tensor, Tensor, Tensor]":
    """Queries and keys with rotary positions, and values, for scaled_dot_product_attention.

    Where fused_linears() makes one product and our kernels run on x's device, the product's output
    is rotated in place, by one launch. q, k and v are views of it. Backward, one launch writes the
    gradient of that output. With 16 bits the rotated values are rounded once, elsewhere as rotate()
    does.

    Args:
        x: (B, T, in).
        w_q: nn.Linear, in -> heads * head_dim.
        w_k, w_v: likewise, in -> kv_heads * head_dim.
        table: (2, at least T, head_dim), ga.ops.rotary_table.

    Returns:
        q, (B, heads, T, head_dim), k and v, (B, kv_heads, T, head_dim). The last dimension is
        contiguous, the others are not.

    Raises:
        ArgumentError: for an x of other dimensions, or of more positions than the table has.
    """
    if x.dim() != 3 or x.shape[1] > table.shape[1]:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}; expected (B, T, in), T up to {table.shape[1]}, the "
            "positions of the table"
        )
    layers = w_q, w_k, w_v
    joint = _joint_of(*layers)
    in_place = False
    if joint is None:
        outputs = tuple(layer(x) for layer in layers)
    else:
        x = _as_autocast(x)
        in_place = (
            joint.kernels and x.dtype in FLOAT_DTYPES and w_k.out_features == w_v.out_features
        )
        outputs = _linears(x, joint, layers, table if in_place else None)
    q, k, v = (y.unflatten(-1, (-1, table.shape[-1])).transpose(1, 2) for y in outputs)
    return (q, k, v) if in_place else (rotate(q, table), rotate(k, table), v)


class _Swiglu(torch.autograd.Function):
    """silu(gate) * up of [up, gate], the output of a joint product.

    Backward computes the gradients of `up` and `gate` side by side in one tensor."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        up, gate = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dh):
        (y,) = ctx.saved_tensors
        up, gate = y.unflatten(-1, (2, -1)).unsqueeze(-2).unbind(-3)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        is_up = torch.arange(2, device=y.device)[:, None] == 0
        # Not a cat: torch.compile would evaluate both halves for each element behind masks.
        derivative = torch.where(is_up, silu, up * (sigmoid + silu * (1 - sigmoid)))
        return (derivative * dh.unsqueeze(-2)).flatten(-2)


def fused_swiglu(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x), under torch.compile as one product where fused_linears() could.

    Args:
        x: (..., in). torch.compile makes one kernel of what follows the product.
        gate, up: nn.Linear, (..., in) -> (..., out).
    """
    joint = _joint_of(gate, up) if torch.compiler.is_compiling() else None
    if joint is None or gate.out_features != up.out_features:
        return F.silu(gate(x)) * up(x)
    (y,) = _linears(_as_autocast(x), joint, (gate, up), whole=True)
    return _Swiglu.apply(y)


def _joint_of(*layers: nn.Module) -> "Joint | None":
    """The layers' weights as one tensor; None where each layer has to be called by itself.

    That is so without a joint of these layers in this order, without gradients, under torch.func,
    for a weight that was replaced, and for hooks."""
    first = fused_forward(layers[0])
    joint = None if first is None else first.joint
    if joint is None or not backward_may_add():
        return None
    if len(layers) != len(joint.layers) or any(a is not b for a, b in zip(layers, joint.layers)):
        return None
    for layer in layers:
        fused = fused_forward(layer)
        if fused is None or layer.weight is not fused.weight:
            return None
        if layer._forward_hooks or layer._forward_pre_hooks:
            return None
    return joint
