"""The outputs of several frozen linear layers from one product, of which some have LoRA.

y = x @ joint^T, and the thin product (x @ A^T) @ B^T adds into its columns of y.
"""

import torch
import torch.nn.functional as F

_library = torch.library.Library("gpuaccel", "FRAGMENT")
_library.define(
    "lora_linears(Tensor x, Tensor weight, Tensor u, Tensor[] bs, int[] starts, float[] scalings)"
    " -> Tensor"
)
_library.define(
    "lora_linears_backward(Tensor dy, Tensor weight, Tensor a, Tensor[] bs, int[] starts,"
    " float[] scalings) -> (Tensor, Tensor)"
)


def _lora_linears(x, weight, u, bs, starts, scalings):
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


def _lora_linears_backward(dy, weight, a, bs, starts, scalings):
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


for _name, _function, _fake in (
    ("lora_linears", _lora_linears, lambda x, weight, *_: F.linear(x, weight)),
    (
        "lora_linears_backward",
        _lora_linears_backward,
        lambda dy, weight, a, *_: (dy @ weight, dy.new_empty(*dy.shape[:-1], len(a))),
    ),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    torch.library.register_fake(f"gpuaccel::{_name}", _fake, lib=_library)

lora_linears = torch.ops.gpuaccel.lora_linears
lora_linears_backward = torch.ops.gpuaccel.lora_linears_backward
