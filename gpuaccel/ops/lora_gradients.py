"""Gradients of LoRA's factors: several products dy^T @ x with a thin result, in one launch.

    ga.ops.add_lora_gradients_(
        [
            ga.ops.WeightGradient(dA, du, x),                # dA (rank, in)  += du^T @ x
            ga.ops.WeightGradient(dB, dy, u, alpha=scaling)  # dB (out, rank) += scaling * dy^T @ u
        ]
    )

The layer is y = x @ W^T + scaling * u @ B^T with u = x @ A^T, and du = scaling * dy @ B is the
gradient of u. One launch adds up to 8 of these products, with fp32 sums in a fixed order. cuBLAS
needs a launch for each, and with many tokens a second one that adds the parts of a split sum.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021).
"""

import collections
import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel, usable
from ..errors import ArgumentError

# Products of a launch.
MAX_PRODUCTS = 8
# The kernel keeps the sums of all ranks in registers.
MAX_RANK = 16
# Multiply-adds of a call. With more of them cuBLAS, on tensor cores, is faster in spite of its
# several launches. 4096 tokens of rank 16 and 8192 columns in all are 2^29 (bf16, H100).
MAX_MULTIPLY_ADDS = 2**29
# Columns of a thread block (TILE of lora.cu).
TILE = 32
# The kernel counts tokens, and those that it loads ahead, in an int.
MAX_TOKENS = 2**30
# struct Products of lora.cu, and the values of one product in it
_PRODUCTS = struct.Struct("<" + MAX_PRODUCTS * "3Q2q5if")
_VALUES = 11


class WeightGradient(NamedTuple):
    """acc += alpha * dy^T @ x, the gradient of the weight of y = x @ weight^T.

    Attributes:
        acc: (out, in) fp32, contiguous.
        dy: (N, out).
        x: (N, in), of dy's dtype.
        alpha: a number.
        overwrite: acc = alpha * dy^T @ x. Nothing reads acc: a NaN in it is gone.
    """

    acc: Tensor
    dy: Tensor
    x: Tensor
    alpha: float = 1.0
    overwrite: bool = False


# ---- reference -----------------------------------------------------------------------------------


def reference_weight_gradient(gradient: WeightGradient):
    """Add one product, of any shape, by torch.addmm, summed in fp32: the definition.

    Args:
        gradient: with an acc that torch can write.
    """
    acc, dy, x, alpha, overwrite = gradient
    factors = {"beta": 0 if overwrite else 1, "alpha": alpha}
    if dy.dtype == torch.float32:
        acc.addmm_(dy.t(), x, **factors)
    elif dy.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=torch.float32, out=acc, **factors)
    else:
        acc.addmm_(dy.t().float(), x.float(), **factors)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def lora_kernel(name: str, dtype: torch.dtype, ranks: int) -> Kernel:
    """A kernel of lora.cu.

    Args:
        name: of the kernel.
        dtype: of dy and x: fp32, bf16 or fp16.
        ranks: that it has registers for, 8 or 16.
    """
    return Kernel("lora", name, DATA_T=C_TYPES[dtype], RANKS=ranks, MAX_PRODUCTS=MAX_PRODUCTS)


def _kernel_of(gradients: "list[WeightGradient]") -> Kernel:
    """That of a launch of these products, which are of one dtype."""
    few = all(min(gradient.acc.shape) <= 8 for gradient in gradients)
    return lora_kernel("lora_gradients_v2", gradients[0].x.dtype, 8 if few else 16)


def _wide_and_thin(dy: Tensor, x: Tensor) -> "tuple[Tensor, Tensor]":
    return (dy, x) if x.shape[1] <= dy.shape[1] else (x, dy)


def _fits(gradient: WeightGradient) -> bool:
    """Whether the kernel reads and writes these tensors as they lie in memory."""
    acc, dy, x, _, _ = gradient
    dtype = x.dtype
    wide, thin = _wide_and_thin(dy, x)
    tokens, width = wide.shape
    rank = thin.shape[1]
    if not (0 < rank <= MAX_RANK and 0 < tokens <= MAX_TOKENS):
        return False
    if dtype not in FLOAT_DTYPES or dy.dtype != dtype:
        return False
    step, column_step = wide.stride()
    group = 16 // dtype.itemsize
    return (
        column_step == 1
        and width % group == 0
        and step % group == 0
        and wide.data_ptr() % 16 == 0
        and (rank == 1 or thin.stride(1) == 1)
        and acc.is_contiguous()
        and not (dy.is_neg() or x.is_neg() or acc.is_neg())
        and not (dy._is_zerotensor() or x._is_zerotensor())
    )


def launch_lora_gradients(gradients: "list[WeightGradient]"):
    """Launch lora_gradients_v2, once for up to 8 products.

    Args:
        gradients: that the kernel fits, of one dtype, on one device. No two have the same acc.
    """
    kernel = _kernel_of(gradients)
    for start in range(0, len(gradients), MAX_PRODUCTS):
        _launch(kernel, gradients[start : start + MAX_PRODUCTS])
    torch.autograd.graph.increment_version([gradient.acc for gradient in gradients])


def _launch(kernel: Kernel, gradients: "list[WeightGradient]"):
    values: "list[float]" = []
    tiles = 0
    for acc, dy, x, alpha, overwrite in gradients:
        wide, thin = _wide_and_thin(dy, x)
        width = wide.shape[1]
        values += [
            wide.data_ptr(),
            thin.data_ptr(),
            acc.data_ptr(),
            wide.stride(0),
            thin.stride(0),
            width,
            thin.shape[1],
            tiles,
            thin is dy,
            overwrite,
            alpha,
        ]
        tiles += -(-width // TILE)
    values += [0] * (MAX_PRODUCTS * _VALUES - len(values))
    first = gradients[0].x
    arguments = _PRODUCTS.pack(*values), len(gradients), len(first)
    launch = kernel[tiles, kernel.bound]
    if not first.is_cuda:
        launch(*arguments, tensors=[_memory(t) for g in gradients for t in g[:3]])
    elif first.get_device() == torch.cuda.current_device():
        launch(*arguments)
    else:
        # No argument is a tensor, so the launch goes to the current GPU.
        with torch.cuda.device(first.device):
            launch(*arguments)


def _memory(t: Tensor) -> Tensor:
    """The elements from a matrix's first one to its last one, those between its rows included."""
    rows, columns = t.shape
    span = (rows - 1) * t.stride(0) + (columns - 1) * t.stride(1) + 1
    return t.as_strided((span,), (1,))


# ---- public --------------------------------------------------------------------------------------


def add_lora_gradients_(gradients: "list[WeightGradient]"):
    """Add products dy^T @ x to fp32 sums, all those with a thin result in one launch.

    The kernel takes products of ranks up to 16 (the smaller side of acc), in fp32, bf16 or fp16,
    whose wide matrix has rows of aligned groups of 16 bytes; a column slice of a matrix is not
    copied. torch.addmm adds the others, and all of them where they are many multiply-adds. Sums are
    fp32; those of the kernel are deterministic. An acc that several products have gets them one
    after the other, by torch.addmm. Other accs must not overlap.

    Args:
        gradients: on one device, of the same N; none: nothing happens.

    Raises:
        ArgumentError: with nothing changed, for shapes or devices that do not fit each other, and
            for an acc that is not fp32.

    Source:
        kernels_cu/lora.cu; Hu et al., LoRA (2021).

    Example:
        >>> x, dy, u = torch.randn(5, 8), torch.randn(5, 12), torch.randn(5, 2)
        >>> dB = torch.ones(12, 2)
        >>> ga.ops.add_lora_gradients_([ga.ops.WeightGradient(dB, dy, u, alpha=0.5)])
        >>> torch.allclose(dB, 1 + 0.5 * dy.T @ u, atol=1e-6)
        True
    """
    if not gradients:
        return
    rows = gradients[0].x.shape[:1]
    device = gradients[0].acc.device
    for acc, dy, x, _, _ in gradients:
        same_rows = dy.shape[:-1] == rows == x.shape[:-1]
        if not same_rows or acc.shape != (dy.shape[-1], x.shape[-1]):
            raise ArgumentError(
                f"acc has shape {tuple(acc.shape)}, dy {tuple(dy.shape)} and x {tuple(x.shape)}; "
                "expected (out, in), (N, out) and (N, in), with the same N for all products"
            )
        if acc.dtype != torch.float32 or not device == acc.device == dy.device == x.device:
            raise ArgumentError(
                f"acc is {acc.dtype} on {acc.device}, dy on {dy.device} and x on {x.device}; "
                f"expected a torch.float32 acc, and all on {device}"
            )
    counts = collections.Counter([gradient.acc.data_ptr() for gradient in gradients])
    by_dtype: "dict[torch.dtype, list[WeightGradient]]" = {}
    multiply_adds = sum(gradient.acc.numel() * len(gradient.x) for gradient in gradients)
    on_kernels = takes(device) and multiply_adds <= MAX_MULTIPLY_ADDS
    for gradient in gradients:
        if on_kernels and counts[gradient.acc.data_ptr()] == 1 and _fits(gradient):
            by_dtype.setdefault(gradient.x.dtype, []).append(gradient)
        else:
            reference_weight_gradient(gradient)
    for some in by_dtype.values():
        if usable(device, _kernel_of(some)):
            launch_lora_gradients(some)
        else:
            for gradient in some:
                reference_weight_gradient(gradient)
