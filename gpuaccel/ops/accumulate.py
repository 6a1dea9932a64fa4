"""Gradient accumulation: acc += grad, summed in fp32.

    ga.ops.accumulate_(total, grad)  # fp32 total += fp32 or bf16 grad

accumulate_each_ adds many tensors at once, as an arena does behind a backward (optim/gradients.py).

Source: gradient accumulation on the GPU as in entrenar's ALB-091; mixed-precision sums as in
Micikevicius et al., 2018.
"""

import functools
import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, Kernel
from ..errors import ArgumentError

# Elements per chunk of an arena. The kernels are compiled with it.
CHUNK = 4096
THREADS = 512
# Tensors of a launch of accumulate_v3, whose arguments have 4 KB.
MAX_TENSORS = 180
# struct Additions of kernels_cu/accumulate.cu: addresses, and what depends on the sizes alone.
ADDRESSES = struct.Struct(f"{2 * MAX_TENSORS}Q")
SIZES = struct.Struct(f"{MAX_TENSORS + 1}i{MAX_TENSORS}H4x")
# Threads of clip.cu and peers.cu, whose sums of squares are bit-identical.
SQUARES_THREADS = 256
GRAD_DTYPES = (torch.float32, torch.bfloat16)


def reference_accumulate(acc: Tensor, grad: Tensor) -> Tensor:
    """acc += grad in acc's dtype, rounded once per element: the definition of accumulation."""
    return acc.add_(grad)


@functools.cache
def accumulate_kernel(name: str, dtype: torch.dtype) -> Kernel:
    """A kernel of accumulate.cu for gradients of this dtype.

    Args:
        name: of the kernel.
        dtype: fp32 or bf16.
    """
    return Kernel(
        "accumulate",
        name,
        GRAD_T=C_TYPES[dtype],
        CHUNK=CHUNK,
        THREADS=THREADS,
        MAX_TENSORS=MAX_TENSORS,
    )


def launch_tensor(acc: Tensor, grad: Tensor):
    """Launch accumulate_v2 where 16-byte accesses are possible, else accumulate_v1."""
    n = acc.numel()
    aligned = acc.data_ptr() % 16 == 0 and grad.data_ptr() % (4 * grad.element_size()) == 0
    if n % 4 == 0 and aligned:
        accumulate_kernel("accumulate_v2", grad.dtype)[min(-(-n // 1024), 4096), 256](acc, grad, n)
    else:
        accumulate_kernel("accumulate_v1", grad.dtype)[-(-n // 256), 256](acc, grad, n)


def accumulate_(acc: Tensor, grad: Tensor) -> Tensor:
    """acc += grad, summed in fp32, in place.

    On a GPU this is one kernel launch; on the CPU torch adds (with backend simt, the kernel runs
    there too). The result is bit-identical to `acc.add_(grad)`.

    Args:
        acc: fp32, any shape, contiguous.
        grad: fp32 or bf16, acc's shape and device, any strides.

    Returns:
        acc.

    Raises:
        ArgumentError: and changes nothing, for another dtype, shape or device, for a sparse or
            complex gradient, and for a destination that is not contiguous, overlaps the gradient,
            or is a negated view (Tensor.is_neg).
    """
    if not isinstance(acc, Tensor) or acc.layout != torch.strided:
        got = acc.layout if isinstance(acc, Tensor) else type(acc).__name__
        raise ArgumentError(f"acc is {got}; expected a dense torch tensor")
    check_gradient("grad", grad, acc.shape, acc.device)
    if acc.dtype != torch.float32:
        raise ArgumentError(
            f"acc is {acc.dtype}; expected torch.float32: in a shorter dtype small gradients get"
            " lost (in bfloat16 256 + 1 = 256)"
        )
    if problem := problem_of_sums("acc", acc):
        raise ArgumentError(problem)
    if overlap(acc, grad):
        raise ArgumentError("acc and grad overlap in memory; expected two tensors of their own")
    if acc.numel() == 0:
        return acc
    if takes(acc.device):
        launch_tensor(acc, grad.contiguous().resolve_neg())
        torch.autograd.graph.increment_version(acc)
        return acc
    return reference_accumulate(acc, grad)


def accumulate_each_(accs: list[Tensor], grads: list[Tensor]):
    """acc += grad for each pair, in one launch for up to MAX_TENSORS of them.

    The result is bit-identical to `acc.add_(grad)`. Nothing is checked.

    Args:
        accs: 1 or more, fp32, dense, without overlap.
        grads: fp32 or bf16, of the same shapes, on the same device.
    """
    if not takes(accs[0].device):
        torch._foreach_add_(accs, grads)
        return
    for dtype in GRAD_DTYPES:
        chosen = [grad.dtype == dtype for grad in grads]
        if any(chosen):
            _launch_each(
                dtype,
                list(itertools.compress(accs, chosen)),
                list(itertools.compress(grads, chosen)),
            )
    torch.autograd.graph.increment_version(accs)


def load_accumulate_each(device: torch.device):
    """Load its kernels, before a capture launches them.

    Args:
        device: any; only a GPU's kernels are loaded.
    """
    if device.type == "cuda" and takes(device):
        for dtype in GRAD_DTYPES:
            accumulate_kernel("accumulate_v3", dtype).load(device.index)


def _launch_each(dtype: torch.dtype, accs: list[Tensor], grads: list[Tensor]):
    kernel = accumulate_kernel("accumulate_v3", dtype)
    strides = list(map(Tensor.stride, accs))
    # A kernel adds the elements in the order in which they lie in memory.
    if any(map(Tensor.is_neg, grads)) or strides != list(map(Tensor.stride, grads)):
        grads = [
            g
            if g.stride() == a.stride() and not g.is_neg()
            else torch.empty_like(a, dtype=dtype).copy_(g)
            for a, g in zip(accs, grads)
        ]
    launches = packed_additions(
        list(map(Tensor.data_ptr, accs)),
        list(map(Tensor.data_ptr, grads)),
        list(map(Tensor.numel, accs)),
    )
    for chunks, packed in launches:
        if chunks:
            kernel[chunks, THREADS](packed, tensors=[*accs, *grads])


def packed_additions(
    accs: Sequence[int], grads: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, bytes]]:
    """(chunks, struct Additions) of each launch of accumulate_v3.

    Args:
        accs: addresses of the sums.
        grads: of what is added to each.
        counts: elements of each.
    """
    launches = []
    for start in range(0, len(counts), MAX_TENSORS):
        part = slice(start, start + MAX_TENSORS)
        chunks, sizes = _packed_sizes(tuple(counts[part]))
        rest = [0] * (MAX_TENSORS - len(counts[part]))
        addresses = ADDRESSES.pack(*accs[part], *rest, *grads[part], *rest)
        launches.append((chunks, addresses + sizes))
    return launches


@functools.lru_cache(64)
def _packed_sizes(counts: tuple[int, ...]) -> tuple[int, bytes]:
    """(chunks, what struct Additions says of the sizes) of one launch."""
    first_chunks = [0, *itertools.accumulate(-(-n // CHUNK) for n in counts)]
    rest = MAX_TENSORS - len(counts)
    last_elements = [(n - 1) % CHUNK + 1 for n in counts]
    packed = SIZES.pack(*first_chunks, *[first_chunks[-1]] * rest, *last_elements, *[0] * rest)
    return first_chunks[-1], packed


def check_gradient(name: str, grad: Tensor, shape, device):
    """ArgumentError unless it is a dense fp32 or bf16 tensor of this shape and device."""
    problem = None
    if not isinstance(grad, Tensor):
        problem = f"is a {type(grad).__name__}; expected a torch tensor"
    elif grad.layout != torch.strided:
        problem = (
            f"has layout {grad.layout}; expected a dense gradient (nn.Embedding(sparse=False))"
        )
    elif grad.dtype not in GRAD_DTYPES:
        problem = f"is {grad.dtype}; expected torch.float32 or torch.bfloat16"
    elif grad.shape != shape:
        problem = f"has shape {tuple(grad.shape)}; expected {tuple(shape)}"
    elif grad.device != device:
        problem = f"is on {grad.device}; expected {device}"
    if problem:
        raise ArgumentError(f"gradient {name} {problem}")


def problem_of_sums(name: str, sums: Tensor) -> str | None:
    """Why nothing can be added into a tensor in place, or None."""
    if not sums.is_contiguous():
        return (
            f"{name} has shape {tuple(sums.shape)} with strides {sums.stride()};"
            " expected a contiguous tensor, which is added into"
        )
    if sums.is_neg():
        return f"{name} is a view of numbers that torch negates; expected a plain buffer"
    if sums.requires_grad and torch.is_grad_enabled():
        return f"{name} requires grad; add into a plain buffer, or under torch.no_grad()"
    return None


def span(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of `t` and of the byte behind its last one.

    Args:
        t: any tensor.
    """
    elements = sum((n - 1) * step for n, step in zip(t.shape, t.stride())) + 1
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if the memory spans of two tensors overlap. Interleaved views count as overlapping."""
    # Tensors on the meta device have no memory.
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device or a.is_meta:
        return False
    (a_start, a_end), (b_start, b_end) = span(a), span(b)
    return a_start < b_end and b_start < a_end
