"""Linear layers whose weight gradient is added into the accumulator by the product that computes
it.

cuBLAS computes acc += dy^T x in one call.

    fused = FusedLinear(layer, arena.grad_views[i])   # layer(x) adds its weight gradient there
    fused.remove()                                    # an ordinary nn.Linear again

A layer keeps its class, its parameters and its hooks: a FusedLinear takes the place of its
`forward`. optim/fused_mode.py makes and removes them. The product is an operation of torch.library
that mutates its argument, so that torch.compile can trace it, in backward too.

Only a backward() that accumulates into `.grad` adds to the arena. The gradient is autograd's, as
that of a plain layer, where torch.autograd.grad() returns it, with create_graph=True, and for a
weight that has got hooks. Under torch.func, in forward mode, and with another weight in the
parameter's place (torch.func.functional_call) the layer is a plain one.

transformers' Conv1D, a linear layer whose weight is (in, out), has a FusedConv1D: acc += x^T dy.

Several layers of one input can be one product:

    q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)

With rotary positions one kernel rotates what the product has written, in place, and one writes the
gradients of q, k and v side by side, where the product's backward reads them:

    q, k, v = fused_rotary(x, self.w_q, self.w_k, self.w_v, table)
"""

import enum
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..compiler import FLOAT_DTYPES
from ..errors import ArgumentError
from ..ops import reference_rotary_backward, rotate

_library = torch.library.Library("gpuaccel", "DEF")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)


class GradientUse(enum.Enum):
    """What the running backward does with the gradient of a weight."""

    UNUSED = enum.auto()  # nothing: it need not be computed
    ADDED = enum.auto()  # accumulates it, and only the sum is seen
    RETURNED = enum.auto()  # hands it to the caller, to a hook, or to a graph of its own


UNUSED, ADDED, RETURNED = GradientUse


class Rows(NamedTuple):
    """Rows of a slice that a product is written to.

    Attributes:
        start: the first row.
        stop: the row behind the last one.
        overwrite: what stands there is not of this accumulation window, and does not count.
    """

    start: int
    stop: int
    overwrite: bool


class GradientSlice(Protocol):
    """What is called before and after a product is added into a slice of an arena."""

    def with_hooks(self) -> "list[int]":
        """The weights of the slice (0, 1, ...) on which others have registered tensor hooks."""

    def before_product(self, added: "list[bool] | None") -> "list[Rows]":
        """Called before a product is added.

        Args:
            added: whether this backward adds the gradient of each tensor of the slice
                (GradientUse); None: not known yet.

        Returns:
            The rows that get a gradient.

        Raises:
            ArgumentError: where a gradient that is not known yet is one to be returned.
        """

    def after_product(self) -> None:
        """Called when the product has been added."""


# (address, elements) of a slice -> its GradientSlice. A compiled backward passes tensors only to
# the operations below.
_slices: "weakref.WeakValueDictionary[tuple[int, int], GradientSlice]" = (
    weakref.WeakValueDictionary()
)


def _key(acc: Tensor) -> "tuple[int, int]":
    return acc.data_ptr(), acc.numel()


def register_slice(acc: Tensor, target: GradientSlice):
    """Call `target` before and after each product that is added into `acc`. It is held weakly.

    Args:
        acc: (out, in) fp32, a slice of arena.grads.
        target: what is called.
    """
    _slices[_key(acc)] = target


def unregister_slice(acc: Tensor):
    """Undo register_slice().

    Args:
        acc: as for register_slice.
    """
    _slices.pop(_key(acc), None)


def rows_added(acc: Tensor, added: "list[bool] | None" = None) -> "list[Rows]":
    """GradientSlice.before_product of the slice `acc`; all rows where nobody is told.

    ArgumentError in a backward where `acc` is no slice of an open accumulator."""
    target = _slice_of(acc)
    return [Rows(0, len(acc), False)] if target is None else target.before_product(added)


def _slice_of(acc: Tensor) -> "GradientSlice | None":
    """Who is told of the products that are added into `acc`; None: nobody.

    ArgumentError in a backward where `acc` is no slice of an open accumulator."""
    target = _slices.get(_key(acc))
    if target is None and acc.numel() and torch._C._current_graph_task_id() != -1:
        raise ArgumentError(
            f"a fused gradient was given a tensor of {acc.numel():,} elements that is not a slice "
            "of an arena with an open accumulator: either it was closed between forward and "
            "backward, or a torch.compile backend other than inductor passed on a copy. Instead: "
            "close it after backward; compile with backend='inductor', which is the default, or "
            "accumulate in mode 'arena'"
        )
    return target


def _add_weight_gradient(
    acc: Tensor, dy: Tensor, x: Tensor, added: "list[bool] | None" = None
) -> None:
    """acc += dy^T @ x, summed in fp32.

    Args:
        acc: (out, in) fp32. dy: (..., out) and x: (..., in), fp32 or bf16. For a weight that is
            (in, out) x and dy change places.
        added: as for GradientSlice.before_product.
    """
    target = _slice_of(acc)
    # Before the product: the first gradient of an accumulation window may have to clear the slice.
    rows = [Rows(0, len(acc), False)] if target is None else target.before_product(added)
    dy = dy.flatten(0, -2) if dy.dim() > 1 else dy[None]
    x = x.flatten(0, -2) if x.dim() > 1 else x[None]
    for start, stop, overwrite in rows:
        if stop - start == len(acc):
            _add_product(acc, dy, x, 0 if overwrite else 1)
        else:
            _add_product(acc[start:stop], dy[:, start:stop], x, 0 if overwrite else 1)
    if target is not None:
        target.after_product()


def _add_product(acc: Tensor, dy: Tensor, x: Tensor, beta: int):
    """acc = beta * acc + dy^T @ x. With beta 0 nothing reads acc: a NaN in it is gone."""
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x, beta=beta)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=torch.float32, beta=beta, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float(), beta=beta)


def _fused_linears_backward(
    acc: Tensor,
    dys: "list[Tensor] | tuple[Tensor, ...]",
    x: Tensor,
    weight: Tensor,
    added: "list[bool] | None" = None,
) -> Tensor:
    """acc += dy^T @ x; returns the input's gradient dy @ weight.

    Args:
        dys: dy (..., out), whole or cut along its last dimension. An operation of its own, because
            torch.compile would generate a slow kernel for the concatenation.
    """
    dy = _side_by_side(dys)
    _add_weight_gradient(acc, dy, x, added)
    return dy @ weight


def _side_by_side(dys: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    """dy, of its parts."""
    return torch.cat(dys, -1) if len(dys) > 1 else dys[0]


for _name, _function in (
    ("add_weight_gradient_", _add_weight_gradient),
    ("fused_linears_backward_", _fused_linears_backward),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
torch.library.register_fake("gpuaccel::add_weight_gradient_", lambda acc, dy, x: None, lib=_library)
torch.library.register_fake(
    "gpuaccel::fused_linears_backward_",
    lambda acc, dys, x, weight: torch.empty_like(x),
    lib=_library,
)


def _as_autocast(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast; x itself where that is off."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T @ x, of operations that can be differentiated and vmapped."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _LinearIntoArena(torch.autograd.Function):
    """y = x @ weight^T + bias. Backward adds the weight's gradient into `acc`, and returns None for
    it unless it is one to be returned.

    x, bias: as torch.autocast wants them. The casts are outside, where a second derivative leads
        through. bias: None: there is none.
    dtype: that torch.autocast wants the weight in; None: it is off.
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
        return F.linear(x, cast.t() if transposed else cast, bias)

    @staticmethod
    def backward(ctx, dy):
        x, cast, *weight = ctx.saved_tensors
        # The weight's gradient is rows^T @ columns.
        rows, columns = (x, dy) if ctx.transposed else (dy, x)
        dw = None
        if torch.compiler.is_compiling():
            if ctx.needs_input_grad[1]:
                torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, rows, columns)
        else:
            (use,) = gradient_uses(ctx.acc, ctx.next_functions[1:2])
            if use is ADDED:
                _add_weight_gradient(ctx.acc, rows, columns, [True])
            elif use is RETURNED:
                dw = _weight_gradient(rows, columns)
            if weight and torch.is_grad_enabled():
                # `cast` does not lead back to the weight.
                cast = weight[0].to(cast.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.linear(dy, cast) if ctx.transposed else dy @ cast
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, None, None, None


class _LinearsIntoArena(torch.autograd.Function):
    """The outputs of several layers from one product.

    joint: the layers' weights as the arena holds them, side by side. acc: their gradients,
    likewise. widths: the number of outputs of each layer.
    table: of rotary positions, where the layers are v, k and q; else None.
    weights: the same weights one by one, so that autograd knows whose gradients backward computes.
    """

    @staticmethod
    def forward(ctx, x, joint, acc, widths, table, *weights):
        joint = _as_autocast(joint)
        ctx.save_for_backward(x, joint, *weights)
        ctx.acc = acc
        ctx.widths = widths
        ctx.table = table
        y = F.linear(x, joint)
        if table is not None:
            torch.ops.gpuaccel.rotary_(y, table, widths[0] // table.shape[-1])
        return y.split(widths, -1)

    @staticmethod
    def backward(ctx, *dys):
        x, joint, *weights = ctx.saved_tensors
        count = len(dys)
        if ctx.table is not None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                # For a second derivative.
                dys = (reference_rotary_backward(*dys, ctx.table),)
            else:
                dys = (torch.ops.gpuaccel.rotary_backward(*dys, ctx.table),)
        fresh: "list[Tensor | None]" = [None] * count
        if not any(ctx.needs_input_grad[5:]):
            dx = _side_by_side(dys) @ joint
        elif torch.compiler.is_compiling():
            dx = torch.ops.gpuaccel.fused_linears_backward_(ctx.acc, list(dys), x, joint)
        else:
            uses = gradient_uses(ctx.acc, ctx.next_functions[-count:])
            cut = dys if len(dys) == count else dys[0].split(ctx.widths, -1)
            for i, (use, dy) in enumerate(zip(uses, cut)):
                if use is RETURNED:
                    fresh[i] = _weight_gradient(dy, x)
            added = [use is ADDED for use in uses]
            if any(added):
                dx = _fused_linears_backward(ctx.acc, dys, x, joint, added)
            else:
                if torch.is_grad_enabled():
                    # For a second derivative: `joint` does not lead back to the weights.
                    joint = torch.cat(weights).to(joint.dtype)
                dx = _side_by_side(dys) @ joint
        return dx, None, None, None, None, *fresh


def fused_linears(x: Tensor, *layers: nn.Module) -> "tuple[Tensor, ...]":
    """(layer(x) for layer in layers), as one product where that is possible.

    It is possible while an accumulator of mode "fused" is open, and the weights lie side by side in
    its arena.

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


def _linears(x: Tensor, joint: "Joint", layers, table: "Tensor | None" = None):
    """The output of each layer, of one product; with a table k and q are rotated."""
    # An arena lies in reverse order.
    layers = layers[::-1]
    widths = [layer.out_features for layer in layers]
    weights = [layer.weight for layer in layers]
    return _LinearsIntoArena.apply(x, joint.weight, joint.grad, widths, table, *weights)[::-1]


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
        w_k, w_v: nn.Linear, in -> kv_heads * head_dim.
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


class _SwigluIntoArena(torch.autograd.Function):
    """silu(gate) * up with [up, gate] = x @ joint^T.

    Backward computes the gradients of `up` and `gate` side by side in one tensor."""

    @staticmethod
    def forward(ctx, x, joint, acc, *weights):
        joint = _as_autocast(joint)
        y = F.linear(x, joint)
        ctx.save_for_backward(x, joint, y)
        ctx.acc = acc
        up, gate = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dh):
        x, joint, y = ctx.saved_tensors
        up, gate = y.unflatten(-1, (2, -1)).unsqueeze(-2).unbind(-3)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        is_up = torch.arange(2, device=y.device)[:, None] == 0
        # Not a cat: torch.compile would evaluate both halves for each element behind masks.
        derivative = torch.where(is_up, silu, up * (sigmoid + silu * (1 - sigmoid)))
        dy = (derivative * dh.unsqueeze(-2)).flatten(-2)
        weights_need_grad = ctx.needs_input_grad[3:]
        if any(weights_need_grad):
            torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, dy, x)
        dx = dy @ joint if ctx.needs_input_grad[0] else None
        return dx, None, None, *[None] * len(weights_need_grad)


def fused_swiglu(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x), under torch.compile as one product where fused_linears() could.

    Args:
        x: (..., in). torch.compile makes one kernel of what follows the product.
        gate, up: nn.Linear, (..., in) -> (..., out).
    """
    joint = _joint_of(gate, up) if torch.compiler.is_compiling() else None
    if joint is None or gate.out_features != up.out_features:
        return F.silu(gate(x)) * up(x)
    return _SwigluIntoArena.apply(_as_autocast(x), joint.weight, joint.grad, up.weight, gate.weight)


def _joint_of(*layers: nn.Module) -> "Joint | None":
    """The layers' weights as one tensor; None where they do not lie side by side, or have hooks."""
    first = fused_forward(layers[0])
    if not isinstance(first, FusedLinear) or first.joint is None or not _backward_may_add():
        return None
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks:
            return None
        fused = fused_forward(layer)
        if fused is None or layer.weight is not fused.weight:
            return None
    return first.joint


# ---- in the place of a layer's forward -----------------------------------------------------------


class FusedForward:
    """Takes the place of a layer's `forward`; remove() restores it.

    Class, parameters, hooks and state of the layer stay.

    Two entries stand in the layer's __dict__: `forward`, a function bound to the layer, and
    `gpuaccel_fused`, this object. So torch.compile compiles layers of one class once. A copy of a
    layer (deepcopy, pickle) runs the forward of its class.

    Args:
        layer: a module whose `forward` is its class's.
        grad: fp32, of the weight's shape: a slice of arena.grads.
    """

    def __init__(self, layer: nn.Module, grad: Tensor):
        self.layer = layer
        self.grad = grad
        self.weight = layer.weight
        vars(layer)["gpuaccel_fused"] = self
        vars(layer)["forward"] = types.MethodType(type(self).forward, layer)

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def remove(self):
        """Run the layer's own forward again, also where others have wrapped this one since."""
        entries = vars(self.layer)
        if entries.get("gpuaccel_fused") is self:
            del entries["gpuaccel_fused"]
        if getattr(entries.get("forward"), "__func__", None) is type(self).forward:
            del entries["forward"]

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        # None. (`forward` is pickled as getattr(layer, "forward"): that of the class.)
        return type(None), ()


def fused_forward(layer: nn.Module) -> "FusedForward | None":
    """What has taken the place of the layer's forward; None: nothing of ours.

    Args:
        layer: any module.
    """
    return getattr(layer, "gpuaccel_fused", None)


def differentiates_otherwise() -> bool:
    """Is a transform of torch.func, or forward-mode differentiation, active?"""
    # What is most often false comes first: each call counts on a slow host.
    return (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ) and not torch.compiler.is_compiling()


def _backward_may_add() -> bool:
    """Are there gradients, and does nothing but backward() ask for them?"""
    return torch.is_grad_enabled() and not differentiates_otherwise()


def adds_to_arena(layer: nn.Module) -> "FusedForward | None":
    """The layer's FusedForward where its backward may add into the arena; None: a plain layer.

    It is plain without gradients, under torch.func and in forward mode, and while another tensor
    stands in the weight's place (torch.func.functional_call)."""
    fused = fused_forward(layer)
    if fused is None or layer.weight is not fused.weight or not _backward_may_add():
        return None
    return fused


def has_class_forward(layer: nn.Module) -> bool:
    """Whether the layer runs the forward of its class, which nobody has replaced.

    Args:
        layer: any module.
    """
    function = getattr(vars(layer).get("forward"), "__func__", None)
    if "forward" not in vars(layer) or function is type(layer).forward:
        return True
    # A copy of a layer with a FusedForward, which is none itself, has the function still.
    ours = {cls.forward for cls in FusedForward.__subclasses__()}
    return fused_forward(layer) is None and function in ours


class Joint(NamedTuple):
    """Several layers of one input whose weights lie side by side in an arena.

    Attributes:
        weight: (sum of out, in).
        grad: the same range of arena.grads, fp32.
        kernels: whether our kernels run on its device. It is known before torch.compile asks.
    """

    weight: Tensor
    grad: Tensor
    kernels: bool


class FusedLinear(FusedForward):
    """forward of an nn.Linear whose backward adds the weight's gradient into `grad`.

    x (..., in) -> (..., out).
    """

    layer: nn.Linear
    joint: "Joint | None" = None

    @staticmethod
    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        fused = adds_to_arena(layer)
        if fused is None:
            return F.linear(x, layer.weight, layer.bias)
        return _into_arena(fused, x, layer.bias, False)


class FusedConv1D(FusedForward):
    """forward of transformers' Conv1D whose backward adds the weight's gradient into `grad`.

    x (..., in) -> (..., out), y = x @ weight + bias with weight (in, out) and bias (out,).
    """

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        fused = adds_to_arena(layer)
        if fused is None:
            return type(layer).forward(layer, x)
        return _into_arena(fused, x, layer.bias, True)


def _into_arena(fused: FusedForward, x: Tensor, bias: "Tensor | None", transposed: bool) -> Tensor:
    """The layer's output; torch.autocast as F.linear has it."""
    kind, dtype = x.device.type, None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x = x.to(dtype)
    if bias is not None:
        bias = bias.to(x.dtype)
    return _LinearIntoArena.apply(x, fused.weight, bias, fused.grad, dtype, transposed)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether the layer is transformers' Conv1D.

    It is recognised by its class's name and package, and by the shapes of its parameters, so that
    transformers need not be imported.

    Args:
        layer: any module.
    """
    if type(layer).__name__ != "Conv1D" or type(layer).__module__.split(".")[0] != "transformers":
        return False
    parameters = dict(layer.named_parameters(recurse=False))
    weight, bias = (parameters.get(name) for name in ("weight", "bias"))
    return (
        len(parameters) == 2
        and weight is not None
        and bias is not None
        and weight.dim() == 2
        and bias.shape == weight.shape[1:]
    )


def fuse_linear(layer: nn.Module, grad: Tensor) -> "FusedForward | None":
    """Add the weight's gradient into `grad` from now on.

    Args:
        layer: any module.
        grad: fp32, of the weight's shape: a slice of arena.grads.

    Returns:
        What removes it again; None, with nothing changed, for a layer that is neither nn.Linear nor
        transformers' Conv1D.
    """
    if type(layer) is nn.Linear:
        return FusedLinear(layer, grad)
    return FusedConv1D(layer, grad) if is_conv1d(layer) else None


# ---- what the running backward does with gradients -----------------------------------------------


def parameter_use(parameter: nn.Parameter) -> GradientUse:
    """What the running backward does with this parameter's gradient, hooks apart.

    Args:
        parameter: of a layer in the running backward.
    """
    # The node is looked up anew each time: one made outside of a capture would bring its stream in.
    return _node_use(torch.autograd.graph.get_gradient_edge(parameter).node)


def gradient_uses(acc: Tensor, edges: "Iterable[tuple[Any, int]]") -> "list[GradientUse]":
    """What the running backward does with the gradient of each weight of the slice `acc`.

    Args:
        edges: to the weights, of the next_functions of an autograd function; in the slice's order.
    """
    uses = [UNUSED if node is None else _node_use(node) for node, _ in edges]
    # Gradients are enabled in a backward with create_graph=True.
    if torch.is_grad_enabled():
        return [RETURNED if use is ADDED else use for use in uses]
    target = _slices.get(_key(acc))
    if target is not None:
        for i in target.with_hooks():
            if uses[i] is ADDED:
                uses[i] = RETURNED
    return uses


def _node_use(node) -> GradientUse:
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad() returns this leaf's gradient to its caller.
        return RETURNED
    return ADDED if runs else UNUSED
