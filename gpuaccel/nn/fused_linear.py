"""Linear layers whose weight gradient is added into an arena by the product that computes it.

cuBLAS computes acc += dy^T x in one call.

    fused = FusedLinear(layer, arena.gradients.views[i])   # layer(x) adds its weight gradient there
    fused.remove()                                    # an ordinary nn.Linear again

A layer keeps its class, its parameters and its hooks: a FusedLinear takes the place of its
`forward`. optim/products.py makes and removes them. The product is an operation of torch.library
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

Frozen layers of one input are one product, too, with LoRA (LoRALinear) around some of them or none:
y = x @ joint^T, and the thin product (x @ A^T) @ B^T adds into its columns of y.
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
from ..ops import (
    WeightGradient,
    add_lora_gradients_,
    reference_rotary_backward,
    reference_weight_gradient,
    rotate,
)
from .lora import LoRALinear

_library = torch.library.Library("gpuaccel", "DEF")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x, float alpha=1.0) -> ()")
_library.define(
    "add_lora_gradients_(Tensor(a!)[] accs, Tensor[] dys, Tensor[] xs, float[] alphas) -> ()"
)
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)
_library.define(
    "lora_linears(Tensor x, Tensor weight, Tensor u, Tensor[] bs, int[] starts, float[] scalings)"
    " -> Tensor"
)
_library.define(
    "lora_linears_backward(Tensor dy, Tensor weight, Tensor a, Tensor[] bs, int[] starts,"
    " float[] scalings) -> (Tensor, Tensor)"
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

    ArgumentError in a backward where `acc` is no slice that products add into."""
    target = _slice_of(acc)
    return [Rows(0, len(acc), False)] if target is None else target.before_product(added)


def _slice_of(acc: Tensor) -> "GradientSlice | None":
    """Who is told of the products that are added into `acc`; None: nobody.

    ArgumentError in a backward where `acc` is no slice that products add into."""
    target = _slices.get(_key(acc))
    if target is None and acc.numel() and torch._C._current_graph_task_id() != -1:
        raise ArgumentError(
            f"a weight-gradient product was given a tensor of {acc.numel():,} elements that is not "
            "a slice of an arena: either the TrainStep was closed between forward and backward, or "
            "a torch.compile backend other than inductor passed on a copy. Instead: close it after "
            "backward; compile with backend='inductor', which is the default"
        )
    return target


def _add_weight_gradient(
    acc: Tensor,
    dy: Tensor,
    x: Tensor,
    alpha: float = 1.0,
    added: "list[bool] | None" = None,
) -> None:
    """acc += alpha * dy^T @ x, summed in fp32.

    Args:
        acc: (out, in) fp32. dy: (..., out) and x: (..., in), fp32 or bf16. For a weight that is
            (in, out) x and dy change places.
        added: as for GradientSlice.before_product.
    """
    target = _slice_of(acc)
    for gradient in _announced(target, acc, dy, x, alpha, added):
        reference_weight_gradient(gradient)
    if target is not None:
        target.after_product()


def _announced(
    target: "GradientSlice | None",
    acc: Tensor,
    dy: Tensor,
    x: Tensor,
    alpha: float,
    added: "list[bool] | None",
) -> "list[WeightGradient]":
    """The products of _add_weight_gradient(), of which `target` has been told.

    It is told before they are added: the first gradient of an accumulation window may have to clear
    the slice."""
    rows = [Rows(0, len(acc), False)] if target is None else target.before_product(added)
    dy = dy.flatten(0, -2) if dy.dim() > 1 else dy[None]
    x = x.flatten(0, -2) if x.dim() > 1 else x[None]
    return [
        WeightGradient(acc, dy, x, alpha, overwrite)
        if stop - start == len(acc)
        else WeightGradient(acc[start:stop], dy[:, start:stop], x, alpha, overwrite)
        for start, stop, overwrite in rows
    ]


def _add_weight_gradients(
    accs: "list[Tensor]",
    dys: "list[Tensor]",
    xs: "list[Tensor]",
    alphas: "list[float]",
    added: "list[bool] | None" = None,
) -> None:
    """_add_weight_gradient() of each, those of LoRA's factors in one launch."""
    targets = [_slice_of(acc) for acc in accs]
    gradients = []
    for target, acc, dy, x, alpha in zip(targets, accs, dys, xs, alphas):
        gradients += _announced(target, acc, dy, x, alpha, added)
    add_lora_gradients_(gradients)
    # Once for a factor that two layers share, when both of its products are there.
    for target in dict.fromkeys(targets):
        if target is not None:
            target.after_product()


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
    _add_weight_gradient(acc, dy, x, added=added)
    return dy @ weight


def _side_by_side(dys: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    """dy, of its parts."""
    return torch.cat(dys, -1) if len(dys) > 1 else dys[0]


def _lora_linears(
    x: Tensor,
    weight: Tensor,
    u: Tensor,
    bs: "list[Tensor]",
    starts: "list[int]",
    scalings: "list[float]",
) -> Tensor:
    """y = x @ weight^T, then y[..., start :][..., : out] += scaling * u_k @ b^T for each layer with
    LoRA.

    One operation, because torch.compile would copy y for each sum.

    Args:
        x: (..., in). weight: (sum of out, in), the frozen weights of the layers side by side.
        u: (..., sum of ranks), x @ A^T of each layer with LoRA, side by side.
        bs: B (out, rank) of each. starts: its layer's first column of y.
    """
    y = F.linear(x, weight)
    rows = y.view(-1, y.shape[-1])
    thin = u.reshape(-1, u.shape[-1]).split([b.shape[1] for b in bs], -1)
    for u_k, b, start, scaling in zip(thin, bs, starts, scalings):
        rows[:, start : start + len(b)].addmm_(u_k, b.t(), alpha=scaling)
    return y


def _lora_linears_backward(
    dy: Tensor,
    weight: Tensor,
    a: Tensor,
    bs: "list[Tensor]",
    starts: "list[int]",
    scalings: "list[float]",
) -> "tuple[Tensor, Tensor]":
    """(gradient of x, gradient of u) of _lora_linears() and u = x @ a^T.

    Args:
        dy: (..., sum of out). a: (sum of ranks, in), A of each layer with LoRA, side by side.
    """
    du = dy.new_empty(*dy.shape[:-1], len(a))
    rows = dy.reshape(-1, dy.shape[-1])
    thin = du.view(-1, len(a)).split([b.shape[1] for b in bs], -1)
    for du_k, b, start, scaling in zip(thin, bs, starts, scalings):
        du_k.addmm_(rows[:, start : start + len(b)], b, beta=0, alpha=scaling)
    dx = dy @ weight
    dx.view(-1, dx.shape[-1]).addmm_(du.view(-1, len(a)), a)
    return dx, du


for _name, _function in (
    ("add_weight_gradient_", _add_weight_gradient),
    ("add_lora_gradients_", _add_weight_gradients),
    ("fused_linears_backward_", _fused_linears_backward),
    ("lora_linears", _lora_linears),
    ("lora_linears_backward", _lora_linears_backward),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
torch.library.register_fake(
    "gpuaccel::add_weight_gradient_", lambda acc, dy, x, alpha=1.0: None, lib=_library
)
torch.library.register_fake(
    "gpuaccel::add_lora_gradients_", lambda accs, dys, xs, alphas: None, lib=_library
)
torch.library.register_fake(
    "gpuaccel::fused_linears_backward_",
    lambda acc, dys, x, weight: torch.empty_like(x),
    lib=_library,
)
torch.library.register_fake(
    "gpuaccel::lora_linears", lambda x, weight, *_: F.linear(x, weight), lib=_library
)
torch.library.register_fake(
    "gpuaccel::lora_linears_backward",
    lambda dy, weight, a, *_: (dy @ weight, dy.new_empty(*dy.shape[:-1], len(a))),
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


def _has_second_derivative() -> bool:
    """In a backward: does it run with create_graph=True?"""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _add_or_return(ctx, i: int, acc: Tensor, dy: Tensor, x: Tensor):
    """Add dy^T @ x into `acc`, or return it, as the running backward wants it.

    i: the weight's index among the inputs of ctx's function, from the side where only tensors
        stand."""
    if torch.compiler.is_compiling():
        if ctx.needs_input_grad[i]:
            torch.ops.gpuaccel.add_weight_gradient_(acc, dy, x)
        return None
    (use,) = gradient_uses(acc, [ctx.next_functions[i]])
    if use is ADDED:
        _add_weight_gradient(acc, dy, x, added=[True])
    return _weight_gradient(dy, x) if use is RETURNED else None


def _add_or_return_each(
    ctx, products: "list[tuple[Tensor, Tensor, float]]"
) -> "list[Tensor | None]":
    """Add alpha * dy^T @ x into ctx.accs for each weight, by one call, or return it.

    products: (dy, x, alpha) of each weight. The weights are the last inputs of ctx's function."""
    compiled = torch.compiler.is_compiling()
    grads: "list[Tensor | None]" = []
    added = []
    for i, (acc, (dy, x, alpha)) in enumerate(zip(ctx.accs, products), -len(products)):
        if compiled:
            use = ADDED if ctx.needs_input_grad[i] else UNUSED
        else:
            (use,) = gradient_uses(acc, [ctx.next_functions[i]])
        if use is ADDED:
            added.append((acc, dy, x, alpha))
        grads.append(alpha * _weight_gradient(dy, x) if use is RETURNED else None)
    if added:
        accs, dys, xs, alphas = map(list, zip(*added))
        if compiled:
            torch.ops.gpuaccel.add_lora_gradients_(accs, dys, xs, alphas)
        else:
            _add_weight_gradients(accs, dys, xs, alphas, [True])
    return grads


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
        dw = _add_or_return(ctx, 1, ctx.acc, rows, columns)
        if weight and _has_second_derivative():
            # `cast` does not lead back to the weight.
            cast = weight[0].to(cast.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = F.linear(dy, cast) if ctx.transposed else dy @ cast
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, None, None, None


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
    if _has_second_derivative():
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
        count = len(weights)
        dys = _rotated_back(dys, ctx.table)
        fresh: "list[Tensor | None]" = [None] * count
        if not any(ctx.needs_input_grad[5:]):
            dx = _side_by_side(dys) @ joint
        elif torch.compiler.is_compiling():
            dx = torch.ops.gpuaccel.fused_linears_backward_(ctx.acc, list(dys), x, joint)
        else:
            uses = gradient_uses(ctx.acc, ctx.next_functions[-count:])
            cut = dys if len(dys) == count else dys[0].split([len(w) for w in weights], -1)
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


class _FrozenLinears(torch.autograd.Function):
    """The outputs of several layers with frozen weights from one product, of which some have LoRA.

    joint, widths, table: as for _LinearsIntoArena, but the joint weights have no gradient.
    starts: the first column of each layer with LoRA in the joint output. scalings: of these layers.
    tensors: A and B of each of these layers, and before them their gradients' slices of the arena.
    """

    @staticmethod
    def forward(ctx, x, joint, widths, table, starts, scalings, *tensors):
        joint = _as_autocast(joint)
        ctx.table = table
        ctx.starts = starts
        ctx.scalings = scalings
        ctx.accs = tensors[: len(tensors) // 2]
        factors = tensors[len(tensors) // 2 :]
        if not factors:
            ctx.save_for_backward(joint)
            return _rotated_parts(F.linear(x, joint), widths, table)
        a, bs = _side_by_side_factors(factors, joint.dtype)
        u = F.linear(x, a)
        y = torch.ops.gpuaccel.lora_linears(x, joint, u, bs, starts, scalings)
        ctx.save_for_backward(joint, x, a, u, *factors)
        return _rotated_parts(y, widths, table)

    @staticmethod
    def backward(ctx, *dys):
        joint, *saved = ctx.saved_tensors
        dy = _side_by_side(_rotated_back(dys, ctx.table))
        if not saved:
            return dy @ joint, *[None] * 5
        x, a, u, *factors = saved
        if _has_second_derivative():
            # `a` and `u` do not lead back to x and the factors.
            a, bs = _side_by_side_factors(factors, joint.dtype)
            u = F.linear(x, a)
            dus = [
                scaling * dy[..., start : start + len(b)] @ b
                for b, start, scaling in zip(bs, ctx.starts, ctx.scalings)
            ]
            du = torch.cat(dus, -1)
            dx = dy @ joint + du @ a
        else:
            bs = [b.to(joint.dtype) for b in factors[1::2]]
            dx, du = torch.ops.gpuaccel.lora_linears_backward(
                dy, joint, a, bs, ctx.starts, ctx.scalings
            )
        ranks = [b.shape[1] for b in bs]
        products = []
        for k, (du_k, u_k) in enumerate(zip(du.split(ranks, -1), u.split(ranks, -1))):
            start = ctx.starts[k]
            dy_k = dy[..., start : start + len(bs[k])]
            products += [(du_k, x, 1.0), (dy_k, u_k, ctx.scalings[k])]
        grads = _add_or_return_each(ctx, products)
        return dx, *[None] * (5 + len(factors)), *grads


def _side_by_side_factors(factors, dtype: torch.dtype) -> "tuple[Tensor, list[Tensor]]":
    """(each A as one tensor, each B), of A and B in turn."""
    factors = [factor.to(dtype) for factor in factors]
    return torch.cat(factors[::2]), factors[1::2]


def fused_linears(x: Tensor, *layers: nn.Module) -> "tuple[Tensor, ...]":
    """(layer(x) for layer in layers), as one product where that is possible.

    It is possible while products add into the arena (optim/products.py), and the weights lie side
    by side in it, or all are frozen.

    Args:
        x: (..., in).
        *layers: nn.Linear or LoRALinear, all of the same input.

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
    if joint.grad is not None:
        weights = [layer.weight for layer in layers]
        return _LinearsIntoArena.apply(x, joint.weight, joint.grad, parts, table, *weights)[::-1]
    starts, scalings, accs, factors = [], [], [], []
    for k, layer in enumerate(layers):
        if isinstance(layer, LoRALinear):
            starts.append(sum(widths[:k]))
            scalings.append(layer.scaling)
            for factor in (layer.lora_A, layer.lora_B):
                accs.append(factor.gpuaccel_fused.grad)
                factors.append(factor.weight)
    tensors = [*accs, *factors]
    return _FrozenLinears.apply(x, joint.weight, parts, table, starts, scalings, *tensors)[::-1]


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
        w_q: nn.Linear or LoRALinear, in -> heads * head_dim.
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
        gate, up: nn.Linear or LoRALinear, (..., in) -> (..., out).
    """
    joint = _joint_of(gate, up) if torch.compiler.is_compiling() else None
    if joint is None or gate.out_features != up.out_features:
        return F.silu(gate(x)) * up(x)
    (y,) = _linears(_as_autocast(x), joint, (gate, up), whole=True)
    return _Swiglu.apply(y)


def _joint_of(*layers: nn.Module) -> "Joint | None":
    """The layers' weights as one tensor; None where they do not lie side by side, or have hooks."""
    joint: "Joint | None" = getattr(fused_forward(layers[0]), "joint", None)
    if joint is None or not _backward_may_add():
        return None
    for layer in layers:
        fused = fused_forward(layer)
        linear = layer
        if isinstance(layer, LoRALinear):
            linear = layer.base_layer
            if layer.merged or any(map(_has_hooks, layer.children())):
                return None
            if not all(map(adds_to_arena, (layer.lora_A, layer.lora_B))):
                return None
        if fused is None or linear.weight is not fused.weight or _has_hooks(layer):
            return None
        if joint.grad is None and fused.weight.requires_grad:
            return None
    return joint


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


# ---- in the place of a layer's forward -----------------------------------------------------------


class FusedForward:
    """Takes the place of a layer's `forward`; remove() restores it.

    Class, parameters, hooks and state of the layer stay.

    Two entries stand in the layer's __dict__: `forward`, a function bound to the layer, and
    `gpuaccel_fused`, this object. So torch.compile compiles layers of one class once. A copy of a
    layer (deepcopy, pickle) runs the forward of its class.

    Args:
        layer: a module whose `forward` is its class's.
        grad: fp32, of the weight's shape: a slice of arena.grads. None: the weight is frozen.
    """

    def __init__(self, layer: nn.Module, grad: "Tensor | None"):
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
    """Several layers of one input whose weights lie side by side, the last layer's first.

    Attributes:
        weight: (sum of out, in), of an arena, or of frozen layers.
        grad: the same range of arena.grads, fp32; None: the weights are frozen.
        kernels: whether our kernels run on its device. It is known before torch.compile asks.
    """

    weight: Tensor
    grad: "Tensor | None"
    kernels: bool


class FusedLinear(FusedForward):
    """forward of an nn.Linear whose backward adds the weight's gradient into `grad`.

    x (..., in) -> (..., out).
    """

    layer: nn.Linear
    joint: "Joint | None" = None

    @staticmethod
    def forward(layer: nn.Linear, input: Tensor) -> Tensor:
        fused = adds_to_arena(layer)
        if fused is None or input.layout is not torch.strided:
            return F.linear(input, layer.weight, layer.bias)
        return _into_arena(fused, input, layer.bias, False)


class FrozenLinear(FusedForward):
    """forward of a layer that is frozen, with LoRA or without, and part of a joint product.

    Called by itself, the layer runs the forward of its class.
    """

    joint: "Joint | None" = None

    @staticmethod
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return type(layer).forward(layer, *args, **kwargs)


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
