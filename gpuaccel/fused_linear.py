"""A linear layer whose weight gradient is added into the accumulator by the product itself: cuBLAS computes acc += dy^T x in one call.

    >>> layer.__class__, layer.arena_grad = FusedLinear, arena.grad_views[i]      # what accumulate.py does in mode "fused"

The product is an operation of torch.library that changes its argument, so that torch.compile traces it, also in backward.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ArgumentError

_library = torch.library.Library("gpuaccel", "DEF")
_library.define("add_weight_gradient_(Tensor(a!) acc, Tensor dy, Tensor x) -> ()")
watchers: "dict[int, object]" = {}        # address of an accumulator slice -> called before a product is added


def _add_weight_gradient(acc: Tensor, dy: Tensor, x: Tensor) -> None:
    """acc (out, in) fp32 += dy (..., out)^T @ x (..., in); fp32 sums and output also for bf16 factors."""
    note = watchers.get(acc.data_ptr())                        # first: a new window may have to clear the slice
    if note is not None and not note():
        return                                                  # torch.autograd.grad() did not ask for this weight
    if note is None and acc.numel() and torch._C._current_graph_task_id() != -1:
        raise ArgumentError("the fused product got another tensor than a slice of an arena with an open accumulator: either it was closed "
                            "between forward and backward, or a torch.compile backend other than inductor handed on a copy")
    dy, x = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (dy, x))
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=torch.float32, out=acc)
    else:
        acc.addmm_(dy.t().float(), x.float())


_library.impl("add_weight_gradient_", _add_weight_gradient, "CPU")
_library.impl("add_weight_gradient_", _add_weight_gradient, "CUDA")
torch.library.register_fake("gpuaccel::add_weight_gradient_", lambda acc, dy, x: None, lib=_library)


class _LinearIntoArena(torch.autograd.Function):
    """y = x @ weight^T, whose backward adds the weight's gradient into `acc` and hands none to autograd."""

    @staticmethod
    def forward(ctx, x, weight, acc):
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.acc = acc
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            torch.ops.gpuaccel.add_weight_gradient_(ctx.acc, dy, x)
        return (dy @ weight if ctx.needs_input_grad[0] else None), None, None


class FusedLinear(nn.Linear):
    """An nn.Linear whose weight gradient goes straight into an arena. GradientAccumulator makes and unmakes it in place.

    A copy (deepcopy, pickle) is a plain nn.Linear again."""

    arena_grad = None                      # (out, in) fp32 slice of arena.grads

    def forward(self, x):
        if self.arena_grad is None or not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        y = _LinearIntoArena.apply(x, self.weight, self.arena_grad)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def __reduce_ex__(self, protocol):     # deepcopy and pickle
        state = {k: v for k, v in self.__dict__.items() if k != "arena_grad"}
        return nn.Linear.__new__, (nn.Linear,), state
