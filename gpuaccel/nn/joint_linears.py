"""Several linear layers of one input as one product.

q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)
h = fused_swiglu(x, self.gate, self.up)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused_forward import Joint, adds_to_arena, fused_forward
from .weight_gradient import add_or_return, side_by_side


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _LinearsIntoArena(torch.autograd.Function):
    """The outputs of several layers from one product.

    joint, acc: the layers' weights and their gradients, each adjacent in the arena.
    widths: number of outputs of each layer, or their sum if y stays in one tensor.
    weights: the same weights one by one, so that autograd knows whose gradients backward computes.
    """

    @staticmethod
    def forward(ctx, x, joint, acc, widths, *weights):
        joint = _as_autocast(joint)
        ctx.save_for_backward(x, joint, *weights)
        ctx.acc = acc
        return F.linear(x, joint).split(widths, -1)

    @staticmethod
    def backward(ctx, *dys):
        x, joint, *weights = ctx.saved_tensors
        grads: list[Tensor | None] = [None] * len(weights)
        if not torch.compiler.is_compiling():
            dy, edges = side_by_side(dys), ctx.next_functions[-len(weights) :]
            grads = add_or_return(ctx.acc, edges, dy, x, [len(w) for w in weights])
            if torch.is_grad_enabled():
                # A second derivative needs the weights: `joint` has no autograd graph to them.
                joint = torch.cat(weights).to(joint.dtype)
            dx = dy @ joint
        elif any(ctx.needs_input_grad[4:]):
            dx = torch.ops.gpuaccel.fused_linears_backward_(ctx.acc, list(dys), x, joint)
        else:
            dx = side_by_side(dys) @ joint
        return dx, None, None, None, *grads


def fused_linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
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
    return _outputs(x, joint, layers)


def _outputs(x: Tensor, joint: Joint, layers, whole: bool = False) -> tuple[Tensor, ...]:
    """The layers' outputs from one product; whole: in one tensor, the last layer's first."""
    # An arena stores parameters last to first.
    weights = [layer.weight for layer in reversed(layers)]
    widths = [len(weight) for weight in weights]
    if whole:
        widths = [sum(widths)]
    args = _as_autocast(x), joint.weight, joint.grad, widths
    return _LinearsIntoArena.apply(*args, *weights)[::-1]


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
    (y,) = _outputs(x, joint, (gate, up), whole=True)
    return _Swiglu.apply(y)


def _joint_of(*layers: nn.Module) -> Joint | None:
    """The layers' weights as one tensor, or None if each layer must be called by itself.

    Layers are called one by one if they have no joint weight in this order, or without gradients,
    under torch.func, after a weight was replaced, and with hooks."""
    first = fused_forward(layers[0])
    joint = None if first is None else first.joint
    if joint is None:
        return None
    if len(layers) != len(joint.layers) or any(a is not b for a, b in zip(layers, joint.layers)):
        return None
    for layer in layers:
        if adds_to_arena(layer) is None or layer._forward_hooks or layer._forward_pre_hooks:
            return None
    return joint
