"""Gradient accumulation of one tensor: acc += grad, the sum in fp32. The four ways in which backward() does it: optim/accumulate.py.

    >>> ga.accumulate_(total, fresh)                       # fp32 total += fp32 or bf16 fresh

Source: gradient accumulation on the GPU as in entrenar's ALB-091; mixed-precision sums as in Micikevicius et al., 2018.
"""

import functools

import torch
from torch import Tensor

from ..backends import takes
from ..compiler.kernel import Kernel
from ..errors import ArgumentError

CHUNK = 4096  # elements of an arena that one row of its table stands for; the kernels are compiled with the same number
THREADS, MAX_TENSORS = 512, 256
SQUARES_THREADS = 256  # of accumulate_v4; as in clip.cu, so that partial sums have the same bits
MACRO = {torch.float32: "float", torch.bfloat16: "bf16"}


def reference_accumulate(acc: Tensor, grad: Tensor) -> Tensor:
    """acc += grad in acc's dtype, one rounding per element. Any shape, dtype and device; the definition of accumulation."""
    return acc.add_(grad)


@functools.cache
def accumulate_kernel(name: str, dtype: torch.dtype) -> Kernel:
    threads = SQUARES_THREADS if name == "accumulate_v4" else THREADS
    return Kernel(
        "accumulate",
        name,
        GRAD_T=MACRO[dtype],
        CHUNK=CHUNK,
        THREADS=threads,
        MAX_TENSORS=MAX_TENSORS,
    )


def launch_tensor(acc: Tensor, grad: Tensor):
    """accumulate_v2 where 16-byte accesses are possible, accumulate_v1 elsewhere. Same shape, contiguous, one device."""
    n = acc.numel()
    wide = (
        n % 4 == 0 and acc.data_ptr() % 16 == 0 and grad.data_ptr() % (4 * grad.element_size()) == 0
    )
    if wide:
        accumulate_kernel("accumulate_v2", grad.dtype)[min(-(-n // 1024), 4096), 256](acc, grad, n)
    else:
        accumulate_kernel("accumulate_v1", grad.dtype)[-(-n // 256), 256](acc, grad, n)


def accumulate_(acc: Tensor, grad: Tensor) -> Tensor:
    """acc += grad, the sum in fp32. Returns acc.

    acc: fp32, any shape, contiguous; grad: fp32 or bf16, same shape and device, any strides.
    On a GPU one launch of our kernel; on the CPU torch adds (with backend simt, our kernel as well). Bit-equal to `acc.add_(grad)`.
    Raises ArgumentError, and changes nothing, for another dtype, shape or device, a sparse or complex gradient, and for a
    destination that is not contiguous or overlaps the gradient."""
    if not isinstance(acc, Tensor) or acc.layout != torch.strided:
        raise ArgumentError(
            f"acc is {acc.layout if isinstance(acc, Tensor) else type(acc).__name__}; expected a dense torch tensor"
        )
    check_gradient("grad", grad, acc.shape, acc.device)
    if acc.dtype != torch.float32:
        raise ArgumentError(
            f"acc is {acc.dtype}; the sum is kept in torch.float32, or small gradients get lost (in bfloat16 256 + 1 = 256)"
        )
    if not acc.is_contiguous():
        raise ArgumentError(
            f"acc has shape {tuple(acc.shape)} with strides {acc.stride()}; expected a contiguous destination"
        )
    if acc.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "acc requires grad; accumulate into a plain buffer, or under torch.no_grad()"
        )
    if overlap(acc, grad):
        raise ArgumentError("acc and grad overlap in memory; expected two tensors of their own")
    if acc.numel() == 0:
        return acc
    if takes(acc.device):
        launch_tensor(acc, grad.contiguous())
        torch.autograd.graph.increment_version(acc)
        return acc
    return reference_accumulate(acc, grad)


def check_gradient(name: str, grad: Tensor, shape, device):
    """Raise ArgumentError unless `grad` is a dense fp32 or bf16 tensor of this shape on this device."""
    problem = None
    if not isinstance(grad, Tensor):
        problem = f"is a {type(grad).__name__}; expected a torch tensor"
    elif grad.layout != torch.strided:
        problem = (
            f"has layout {grad.layout}; expected a dense gradient (nn.Embedding(sparse=False))"
        )
    elif grad.dtype not in MACRO:
        problem = f"is {grad.dtype}; expected torch.float32 or torch.bfloat16"
    elif grad.shape != shape:
        problem = f"has shape {tuple(grad.shape)}; expected {tuple(shape)}"
    elif grad.device != device:
        problem = f"is on {grad.device}; expected {device}"
    if problem:
        raise ArgumentError(f"gradient {name} {problem}")


def span(t: Tensor) -> "tuple[int, int]":
    """Addresses of the first byte of `t` and of the one behind its last."""
    reach = sum((n - 1) * step for n, step in zip(t.shape, t.stride())) + 1
    return t.data_ptr(), t.data_ptr() + reach * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Do the memory spans of two tensors meet? (Spans, not elements: interleaved views count as overlapping.)"""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1
