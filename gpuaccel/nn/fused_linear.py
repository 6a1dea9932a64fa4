"""A linear layer whose weight gradient is added into the accumulator by the product itself: cuBLAS computes acc += dy^T x in one call.

    >>> fused = FusedLinear(layer, arena.grad_views[i])   # layer(x) now adds its weight gradient there
    >>> fused.remove()                                    # an ordinary nn.Linear again

A layer keeps its class, its parameters and its hooks: a FusedLinear takes the place of its `forward`. optim/fused_mode.py makes
and removes them. The product is an operation of torch.library that changes its argument, so that torch.compile traces it, also in
backward.

    >>> q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)   # layers of one input: one product
"""

import types
import weakref
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError

_library = torch.library.Library("gpuaccel", "DEF")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)


class GradientSlice(Protocol):
    """Whoever owns the slice of an arena that a product is added into."""

    def before_product(self, needed: "list[bool] | None") -> "list[tuple[int, int]] | None":
        """A product is about to be added. needed: for each tensor of the slice, whether this backward computes its gradient; None:
        find out. Returns the rows to add, as (start, stop); None: all of them."""

    def after_product(self) -> None:
        """The product has been added."""


# (address, elements) of a slice -> its owner. A compiled backward hands the operations below a tensor and nothing else.
_slices: "weakref.WeakValueDictionary[tuple[int, int], GradientSlice]" = (
    weakref.WeakValueDictionary()
)


def _key(acc: Tensor) -> "tuple[int, int]":
    return acc.data_ptr(), acc.numel()


def register_slice(acc: Tensor, owner: GradientSlice):
    """From now on `owner` is asked before a product is added into `acc`. It is held weakly."""
    _slices[_key(acc)] = owner


def unregister_slice(acc: Tensor):
    _slices.pop(_key(acc), None)


def registered_slices() -> "set[tuple[int, int]]":
    """(address, elements) of every slice that products may be added into."""
    return set(_slices)


def rows_needed(acc: Tensor, needed: "list[bool] | None" = None) -> "list[tuple[int, int]] | None":
    """What GradientSlice.before_product returns. ArgumentError where `acc` is no slice of an open accumulator."""
    owner = _slices.get(_key(acc))
    if owner is not None:
        return owner.before_product(needed)
    if acc.numel() and torch._C._current_graph_task_id() != -1:
        raise ArgumentError(
            "a fused gradient was given another tensor than a slice of an arena with an open accumulator: either it was closed "
            "between forward and backward, or a torch.compile backend other than inductor handed on a copy"
        )
    return None


def _add_weight_gradient(acc: Tensor, dy: Tensor, x: Tensor, needed=None) -> None:
    """acc (out, in) fp32 += dy (..., out)^T @ x (..., in); fp32 sums and output also for bf16 factors. needed: see GradientSlice."""
    # First: the first gradient of an accumulation window may have to clear the slice.
    rows = rows_needed(acc, needed)
    dy, x = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (dy, x))
    if rows is None:
        _add_product(acc, dy, x)
    else:
        for start, stop in rows:
            _add_product(acc[start:stop], dy[:, start:stop], x)
    owner = _slices.get(_key(acc))
    if owner is not None:
        owner.after_product()


def _add_product(acc, dy, x):
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float())


def _fused_linears_backward(
    acc: Tensor, dys: "list[Tensor]", x: Tensor, weight: Tensor, needed=None
) -> Tensor:
    """acc += dy^T @ x and the input's gradient dy @ weight, for dy (..., out) in parts, which torch.compile would join slowly."""
    dy = torch.cat(dys, -1)
    _add_weight_gradient(acc, dy, x, needed)
    return dy @ weight


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


def _as_autocast(*tensors):
    """The tensors in the dtype in which torch.autocast has products computed, where it is on."""
    kind = tensors[0].device.type
    return (
        [t.to(torch.get_autocast_dtype(kind)) for t in tensors]
        if torch.is_autocast_enabled(kind)
        else tensors
    )


class _LinearIntoArena(torch.autograd.Function):
    """y = x @ weight^T, whose backward adds the weight's gradient into `acc` and hands none to autograd."""

    @staticmethod
    def forward(ctx, x, weight, acc):
        x, weight = _as_autocast(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.acc = acc
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            if torch.compiler.is_compiling():
                torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, dy, x)
            else:
                _add_weight_gradient(ctx.acc, dy, x, nodes_needed(ctx.next_functions[1:2]))
        return (dy @ weight if ctx.needs_input_grad[0] else None), None, None


class _LinearsIntoArena(torch.autograd.Function):
    """The outputs of several layers: one product with `joint`, their weights as the arena has them, side by side; `acc` likewise."""

    @staticmethod
    def forward(
        ctx, x, joint, acc, widths, *weights
    ):  # the weights stand here so that autograd knows whose gradients these are
        x, joint = _as_autocast(x, joint)
        ctx.save_for_backward(x, joint)
        ctx.acc, ctx.widths = acc, widths
        return F.linear(x, joint).split(widths, -1)

    @staticmethod
    def backward(ctx, *dys):
        x, joint = ctx.saved_tensors
        if any(ctx.needs_input_grad[4:]) and torch.compiler.is_compiling():
            dx = torch.ops.gpuaccel.fused_linears_backward_(ctx.acc, list(dys), x, joint)
        elif any(ctx.needs_input_grad[4:]):
            dx = _fused_linears_backward(
                ctx.acc, dys, x, joint, nodes_needed(ctx.next_functions[-len(dys) :])
            )
        else:
            dx = torch.cat(dys, -1) @ joint
        return dx, None, None, None, *[None] * len(dys)


def fused_linears(x: Tensor, *layers: nn.Module) -> "tuple[Tensor, ...]":
    """(layer(x) for layer in layers). x: (..., in). One product where an accumulator of mode "fused" has found their weights side by side."""
    joint = _joint_of(*layers)
    if joint is None:
        return tuple(layer(x) for layer in layers)
    # An arena lies in reverse order.
    reverse = layers[::-1]
    return _LinearsIntoArena.apply(
        x,
        joint.weight,
        joint.grad,
        [layer.out_features for layer in reverse],
        *[layer.weight for layer in reverse],
    )[::-1]


class _SwigluIntoArena(torch.autograd.Function):
    """silu(gate) * up with [up, gate] = x @ joint^T: both gradients are computed in their place side by side."""

    @staticmethod
    def forward(ctx, x, joint, acc, *weights):
        x, joint = _as_autocast(x, joint)
        y = F.linear(x, joint)
        ctx.save_for_backward(x, joint, y)
        ctx.acc = acc
        up, gate = y.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, dh):
        x, joint, y = ctx.saved_tensors
        up, gate = y.unflatten(-1, (2, -1)).unsqueeze(-2).unbind(-3)
        share = torch.sigmoid(gate)
        silu, is_up = gate * share, torch.arange(2, device=y.device)[:, None] == 0
        # Not a cat: torch.compile would evaluate both halves for each element behind masks.
        dy = (
            torch.where(is_up, silu, up * (share + silu * (1 - share))) * dh.unsqueeze(-2)
        ).flatten(-2)
        if any(ctx.needs_input_grad[3:]):
            torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, dy, x)
        return (
            (dy @ joint if ctx.needs_input_grad[0] else None),
            None,
            None,
            *[None] * len(ctx.needs_input_grad[3:]),
        )


def fused_swiglu(x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
    """silu(gate(x)) * up(x). x: (..., in). One product as in fused_linears(), where torch.compile makes one kernel of what follows it."""
    joint = _joint_of(gate, up)
    if joint is None or gate.out_features != up.out_features or not torch.compiler.is_compiling():
        return F.silu(gate(x)) * up(x)
    return _SwigluIntoArena.apply(x, joint.weight, joint.grad, up.weight, gate.weight)


def _joint_of(*layers) -> "Joint | None":
    """The layers' weights as one tensor, where they lie side by side and nobody has hooks on a layer."""
    fused = fused_forward(layers[0])
    if not isinstance(fused, FusedLinear) or fused.joint is None or not torch.is_grad_enabled():
        return None
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return None
    return fused.joint


# ---- in the place of a layer's forward ------------------------------------------------------------------------------


class FusedForward:
    """Takes the place of one layer's `forward`; remove() gives it back. Class, parameters, hooks and
    state of the layer stay.

    layer: a module whose `forward` is its class's.
    grad: fp32, of the weight's shape: a slice of arena.grads.

    Two entries stand in the layer's __dict__: `forward`, a function bound to the layer, and
    `gpuaccel_fused`, this object. torch.compile then compiles layers of one class once. A copy of the
    layer (deepcopy, pickle) runs the forward of its class."""

    def __init__(self, layer: nn.Module, grad: Tensor):
        self.layer = layer
        self.grad: "Tensor | None" = grad
        vars(layer)["gpuaccel_fused"] = self
        vars(layer)["forward"] = types.MethodType(type(self).forward, layer)

    @staticmethod
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError

    def remove(self):
        """The layer's own forward runs again, also where others have wrapped this one meanwhile."""
        self.grad = None
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
    """What has taken the place of the layer's forward; None: nothing of ours."""
    return getattr(layer, "gpuaccel_fused", None)


def has_class_forward(layer: nn.Module) -> bool:
    """Does the layer run the forward of its class, or has somebody replaced it?"""
    function = getattr(vars(layer).get("forward"), "__func__", None)
    if "forward" not in vars(layer) or function is type(layer).forward:
        return True
    # A copy of a layer with a FusedForward.
    return fused_forward(layer) is None and "gpuaccel_fused" in vars(layer)


class Joint(NamedTuple):
    """Several layers of one input whose weights lie side by side in an arena."""

    weight: Tensor  # (sum of out, in)
    grad: Tensor  # the same range of arena.grads, fp32


class FusedLinear(FusedForward):
    """forward of an nn.Linear: x (..., in) -> (..., out). Its backward adds the weight's gradient into `grad`."""

    joint: "Joint | None" = None

    @staticmethod
    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        fused = fused_forward(layer)
        if fused is None or not torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        y = _LinearIntoArena.apply(x, layer.weight, fused.grad)
        return y if layer.bias is None else y + layer.bias.to(y.dtype)


# ---- which gradients the running backward computes ------------------------------------------------------------------


def parameter_needed(parameter: nn.Parameter) -> bool:
    """Will the running backward compute this parameter's gradient? (Its node is looked up anew each time: one kept from elsewhere
    would carry its stream into a graph's capture.)"""
    return _node_runs(torch.autograd.graph.get_gradient_edge(parameter).node)


def nodes_needed(edges) -> "list[bool]":
    """The same of the nodes behind an autograd function's inputs. torch.autograd.grad() may ask for some weights only."""
    return [node is not None and _node_runs(node) for node, _ in edges]


def _node_runs(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad() hands this leaf's gradient to its caller.
        return True
