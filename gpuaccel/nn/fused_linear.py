"""Linear layers whose weight gradient is added into an arena by the product that computes it.

transformers' Conv1D, a linear layer whose weight is (in, out), has a FusedConv1D: acc += x^T dy.

Several layers of one input are one product:

    q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)
    h = fused_swiglu(x, self.gate, self.up)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused_forward import FusedForward, Joint, adds_to_arena, fused_forward
from .gradient_slice import has_second_derivative
from .weight_gradient import add_or_return, as_rows, side_by_side


def _as_autocast(t: Tensor) -> Tensor:
    kind = t.device.type
    if not torch.is_autocast_enabled(kind):
        return t
    return t.to(torch.get_autocast_dtype(kind))


# ---- one layer -----------------------------------------------------------------------------------


class _LinearIntoArena(torch.autograd.Function):
    """y = x @ weight^T + bias. Backward adds the weight's gradient to `acc`.

    The weight's gradient is returned as None, unless autograd must see it.

    x, bias: cast for torch.autocast by the caller, so that second derivatives pass the cast.
        bias may be None.
    transposed: the weight is (in, out), and y = x @ weight + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, acc, transposed):
        ctx.acc = acc
        ctx.transposed = transposed
        cast = _as_autocast(weight)
        # The weight itself is for second derivatives: `cast` has no autograd graph to it.
        ctx.save_for_backward(x, cast, weight)
        y = F.linear(x, cast.t() if transposed else cast, bias)
        if not torch.compiler.is_compiling() and y._is_view():
            # torch forbids in-place changes of a view that a custom function returns.
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, cast, weight = ctx.saved_tensors
        # The weight's gradient is rows^T @ columns.
        rows, columns = (x, dy) if ctx.transposed else (dy, x)
        dw = None
        if not torch.compiler.is_compiling():
            edges = ctx.next_functions[1:2]
            (dw,) = add_or_return(ctx.acc, edges, rows, columns, [rows.shape[-1]])
        elif ctx.needs_input_grad[1]:
            torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, rows, columns)
        if has_second_derivative():
            cast = weight.to(cast.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.linear(dy, cast) if ctx.transposed else dy @ cast
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, None, None


def _into_arena(fused: FusedForward, x: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The layer's output; casts for torch.autocast as F.linear does."""
    x = _as_autocast(x)
    if bias is not None:
        bias = bias.to(x.dtype)
    shape = x.shape[:-1]
    if torch.compiler.is_compiling():
        # The rows are saved for backward. Of a permuted x, Inductor would keep two copies.
        x = as_rows(x)
    y = _LinearIntoArena.apply(x, fused.weight, bias, fused.grad, transposed)
    return y.view(*shape, y.shape[-1]) if torch.compiler.is_compiling() else y


class FusedLinear(FusedForward):
    """forward of an nn.Linear whose backward adds the weight's gradient into `grad`.

    x (..., in) -> (..., out).
    """

    layer: nn.Linear

    @staticmethod
    def supports(layer):
        return type(layer) is nn.Linear

    @staticmethod
    def forward(layer: nn.Linear, input: Tensor) -> Tensor:
        fused = adds_to_arena(layer)
        if fused is None or input.layout is not torch.strided:
            return F.linear(input, layer.weight, layer.bias)
        return _into_arena(fused, input, layer.bias, False)


class FusedConv1D(FusedForward):
    """forward of transformers' Conv1D whose backward adds the weight's gradient into `grad`.

    x (..., in) -> (..., out), y = x @ weight + bias with weight (in, out) and bias (out,).
    It is recognised by its class's name and package, and by the shapes of its parameters, so that
    transformers need not be imported.
    """

    @staticmethod
    def supports(layer):
        parts = [type(layer).__module__.split(".")[0], type(layer).__name__]
        shapes = {name: p.shape for name, p in layer.named_parameters(recurse=False)}
        return (
            parts == ["transformers", "Conv1D"]
            and shapes.keys() == {"weight", "bias"}
            and len(shapes["weight"]) == 2
            and shapes["bias"] == shapes["weight"][1:]
        )

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        fused = adds_to_arena(layer)
        if fused is None:
            return type(layer).forward(layer, x)
        return _into_arena(fused, x, layer.bias, True)


# ---- several layers of one input ----------------------------------------------------------------


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
            if has_second_derivative():
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
