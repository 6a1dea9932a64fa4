"""One linear layer whose weight gradient is added into an arena by the product that computes it.

transformers' Conv1D, a linear layer whose weight is (in, out), has a FusedConv1D: acc += x^T dy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused_forward import FusedForward, adds_to_arena
from .gradient_use import has_second_derivative
from .weight_gradient import add_or_return, as_rows


class _LinearIntoArena(torch.autograd.Function):
    """y = x @ weight^T + bias. Backward adds the weight's gradient to `acc`.

    The weight's gradient is returned as None, unless autograd must see it.

    x, bias: cast for torch.autocast by the caller, so that second derivatives pass the cast.
        bias may be None.
    dtype: the weight's dtype under torch.autocast; None if that is off.
    transposed: the weight is (in, out), and y = x @ weight + bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, acc, dtype, transposed):
        ctx.acc = acc
        ctx.transposed = transposed
        if dtype is None:
            cast = weight
            ctx.save_for_backward(x, weight)
        else:
            cast = weight.to(dtype)
            # The weight itself is for second derivatives.
            ctx.save_for_backward(x, cast, weight)
        y = F.linear(x, cast.t() if transposed else cast, bias)
        if not torch.compiler.is_compiling() and y._is_view():
            # torch forbids in-place changes of a view that a custom function returns.
            y = torch.ops.aten._unsafe_view(y, y.shape)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, cast, *weight = ctx.saved_tensors
        # The weight's gradient is rows^T @ columns.
        rows, columns = (x, dy) if ctx.transposed else (dy, x)
        dw = None
        if not torch.compiler.is_compiling():
            edges = ctx.next_functions[1:2]
            (dw,) = add_or_return(ctx.acc, edges, rows, columns, [rows.shape[-1]])
        elif ctx.needs_input_grad[1]:
            torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, rows, columns)
        if weight and has_second_derivative():
            # The saved `cast` has no autograd graph to the weight.
            cast = weight[0].to(cast.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.linear(dy, cast) if ctx.transposed else dy @ cast
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, None, None, None


def _into_arena(fused: FusedForward, x: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The layer's output; casts for torch.autocast as F.linear does."""
    kind, dtype = x.device.type, None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x = x.to(dtype)
    if bias is not None:
        bias = bias.to(x.dtype)
    shape = x.shape[:-1]
    if torch.compiler.is_compiling():
        # The rows are saved for backward. Of a permuted x, Inductor would keep two copies.
        x = as_rows(x)
    y = _LinearIntoArena.apply(x, fused.weight, bias, fused.grad, dtype, transposed)
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
