"""A linear layer whose weight gradient is added into the accumulator by the product itself: cuBLAS computes acc += dy^T x in one call.

    >>> layer.__class__, layer.arena_grad = FusedLinear, arena.grad_views[i]      # what optim/accumulate.py does in mode "fused"

The product is an operation of torch.library that changes its argument, so that torch.compile traces it, also in backward.

    >>> q, k, v = fused_linears(x, self.w_q, self.w_k, self.w_v)       # layers of one input: one product, where their weights lie side by side
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError

_library = torch.library.Library("gpuaccel", "DEF")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
_library.define(
    "fused_linears_backward_(Tensor(a!) acc, Tensor[] dys, Tensor x, Tensor weight) -> Tensor"
)
watchers: "dict[tuple, object]" = {}  # place of an accumulator slice -> what note_for returns


def place(acc: Tensor) -> tuple:
    return acc.data_ptr(), acc.numel()


def rows_asked(acc: Tensor, wanted=None) -> "list[tuple[int, int]] | None":
    """Says that a gradient is about to be added into a slice of an arena; what note_for returns. ArgumentError where it is none."""
    note = watchers.get(place(acc))
    rows = note and note(wanted)
    if note is None and acc.numel() and torch._C._current_graph_task_id() != -1:
        raise ArgumentError(
            "a fused gradient was given another tensor than a slice of an arena with an open accumulator: either it was closed "
            "between forward and backward, or a torch.compile backend other than inductor handed on a copy"
        )
    return rows


def _add_weight_gradient(acc: Tensor, dy: Tensor, x: Tensor, wanted=None) -> None:
    """acc (out, in) fp32 += dy (..., out)^T @ x (..., in); fp32 sums and output also for bf16 factors. wanted: see note_for."""
    rows = rows_asked(acc, wanted)  # first: a new window may have to clear the slice
    dy, x = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (dy, x))
    if rows is None:
        _add_product(acc, dy, x)
    else:
        for start, stop in rows:
            _add_product(acc[start:stop], dy[:, start:stop], x)
    if note := watchers.get(place(acc)):
        note(None, True)


def _add_product(acc, dy, x):
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float())


def _fused_linears_backward(
    acc: Tensor, dys: "list[Tensor]", x: Tensor, weight: Tensor, wanted=None
) -> Tensor:
    """acc += dy^T @ x and the input's gradient dy @ weight, for dy (..., out) in parts, which torch.compile would join slowly."""
    dy = torch.cat(dys, -1)
    _add_weight_gradient(acc, dy, x, wanted)
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
                _add_weight_gradient(ctx.acc, dy, x, asked(ctx.next_functions[1:2]))
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
                ctx.acc, dys, x, joint, asked(ctx.next_functions[-len(dys) :])
            )
        else:
            dx = torch.cat(dys, -1) @ joint
        return dx, None, None, None, *[None] * len(dys)


def fused_linears(x: Tensor, *layers: nn.Module) -> "tuple[Tensor, ...]":
    """(layer(x) for layer in layers). x: (..., in). One product where an accumulator of mode "fused" has found their weights side by side."""
    joint = _joint(*layers)
    if joint is None:
        return tuple(layer(x) for layer in layers)
    back = layers[::-1]  # an arena lies in reverse order
    return _LinearsIntoArena.apply(
        x,
        joint,
        layers[0].joint_grad,
        [layer.out_features for layer in back],
        *[layer.weight for layer in back],
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
    joint = _joint(gate, up)
    if joint is None or gate.out_features != up.out_features or not torch.compiler.is_compiling():
        return F.silu(gate(x)) * up(x)
    return _SwigluIntoArena.apply(x, joint, gate.joint_grad, up.weight, gate.weight)


def _joint(*layers) -> "Tensor | None":
    """The weights of these layers as one, where an accumulator has found them side by side and nobody has hooks on a layer."""
    joint = getattr(layers[0], "joint_weight", None)
    return (
        None
        if joint is None
        or not torch.is_grad_enabled()
        or any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        else joint
    )


class FusedLinear(nn.Linear):
    """An nn.Linear whose weight gradient goes straight into an arena. GradientAccumulator makes and unmakes it in place.

    A copy (deepcopy, pickle) is a plain nn.Linear again."""

    arena_grad = None  # (out, in) fp32 slice of arena.grads
    joint_weight = joint_grad = (
        None  # the same of several layers side by side, at the first of them: fused_linears()
    )

    @staticmethod
    def refused(part: nn.Linear) -> None:
        """Every plain nn.Linear will do."""

    @classmethod
    def wear(cls, part: nn.Linear) -> nn.Linear:
        part.__class__ = cls
        return part

    @staticmethod
    def shed(part: "FusedLinear"):
        part.__class__ = nn.Linear

    def forward(self, x):
        if self.arena_grad is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        y = _LinearIntoArena.apply(x, self.weight, self.arena_grad)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def __reduce_ex__(self, protocol):  # deepcopy and pickle
        state = {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("arena_grad", "joint_weight", "joint_grad")
        }
        return nn.Linear.__new__, (nn.Linear,), state


fused_classes = {
    nn.Linear: FusedLinear
}  # what an accumulator of mode "fused" makes of a module's class, in place; nn/embedding.py adds to it


# ---- which product was asked for ----


def note_for(accumulator, *numbers):
    """Called before a product adds into the slices of these tensors: they get a gradient, though no hook of their own runs. Returns which
    rows of the product are asked for: None for all, or a list of (start, stop). wanted: a bool for each tensor; None: find out.
    added: called once more, the product has been added."""

    def note(wanted=None, added=False):
        living, task = accumulator(), torch._C._current_graph_task_id()
        if living is None or task == -1:
            return None
        if added:
            return living.added and living.added(numbers)
        wanted = [
            i
            for i, asked in zip(
                numbers, wanted or (_wanted(living.arena.params[i]) for i in numbers)
            )
            if asked
        ]
        if wanted and task != living._task:
            living._begin()
        known = living.arena.squares_known()
        for i in wanted:
            living.touched[i], known[i] = True, False
            living.uses[i] += 1
        if len(wanted) == len(numbers):
            return None
        ends = list(
            itertools.accumulate([0, *(living.arena.segments[i].shape[0] for i in numbers)])
        )
        return [(start, stop) for i, start, stop in zip(numbers, ends, ends[1:]) if i in wanted]

    return note


def _wanted(parameter) -> bool:
    """Will the running backward give this parameter a gradient? (Its node is asked for anew each time: one kept from elsewhere would
    carry its stream into a graph's capture.)"""
    return _runs(torch.autograd.graph.get_gradient_edge(parameter).node)


def asked(edges) -> "list[bool]":
    """The same of the nodes behind an autograd function's inputs. torch.autograd.grad() may have asked for some weights only."""
    return [node is not None and _runs(node) for node, _ in edges]


def _runs(node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() hands this leaf's gradient out: it was asked for
        return True
