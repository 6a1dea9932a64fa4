"""Rotary positions (Su et al., 2021): of one tensor in torch, and in place in a joint product.

    table = ga.ops.rotary_table(1024, 64, 10_000.0)  # (2, 1024, 64)
    ga.ops.rotate(q, table)                          # (B, heads, T, 64), the definition
    ga.ops.rotary_(vkq, table, kv_heads)             # k and q of x @ [w_v, w_k, w_q]^T, in place
    ga.ops.rotary_backward(dv, dk, dq, table)        # the gradient of that product's output

A row of `vkq` has kv_heads heads of v, kv_heads of k, and the heads of q, because an arena holds
the weights of a block last to first. rotary_backward writes dv, dk and dq where the product's
backward reads them, so nothing is concatenated.

Each is one launch. With fp32 the values are bit-identical to those of rotate(); with 16 bits they
are rounded once, where rotate() rounds the table, each product and the sum.

nn.fused_rotary is made of these, and has gradients.
"""

import functools

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel, usable
from ..errors import ArgumentError

THREADS = 128
# Heads that a thread of version 2 takes.
HEADS = 4
_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- reference -----------------------------------------------------------------------------------


def rotary_table(T: int, head_dim: int, theta: float) -> Tensor:
    """(2, T, head_dim) fp32: [cos, cos] and [-sin, sin] of each position's angles.

    Args:
        T: number of positions.
        head_dim: width of a head, even.
        theta: base of the frequencies theta^(-2 i / head_dim), in radians per position.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    cos = angle.cos()
    sin = angle.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x[i], x[i + head_dim/2]) by the angle of its position.

    The pair becomes (a cos - b sin, b cos + a sin).

    Args:
        x: (B, heads, T, head_dim).
        table: rotary_table of at least T positions.
    """
    cos, sin = table[:, : x.shape[-2]].to(x.dtype).unbind()
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _rotated_heads(x: Tensor, table: Tensor, back: bool = False) -> Tensor:
    """rotate() of heads side by side, (B, T, n * head_dim), computed in fp32 and rounded once.

    back: by the negative angles.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    table = table.to(wide)
    if back:
        table = torch.stack([table[0], -table[1]])
    heads = x.unflatten(-1, (-1, table.shape[-1])).transpose(1, 2)
    return rotate(heads.to(wide), table).transpose(1, 2).flatten(-2).to(x.dtype)


def reference_rotary(vkq: Tensor, table: Tensor, kv_heads: int) -> Tensor:
    """vkq with its k and q rotated: what `rotary_` leaves. Differentiable.

    Args:
        vkq: (B, T, (2 * kv_heads + heads) * head_dim).
        table: (2, at least T, head_dim).
        kv_heads: heads of v, and of k.
    """
    first = kv_heads * table.shape[-1]
    return torch.cat([vkq[..., :first], _rotated_heads(vkq[..., first:], table)], -1)


def reference_rotary_backward(dv: Tensor, dk: Tensor, dq: Tensor, table: Tensor) -> Tensor:
    """The gradient of vkq. Differentiable.

    Args:
        dv, dk, dq: (B, T, heads * head_dim) of each.
        table: (2, at least T, head_dim).

    Returns:
        (B, T, sum of the widths).
    """
    return torch.cat([dv, _rotated_heads(torch.cat([dk, dq], -1), table, back=True)], -1)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def rotary_kernel(name: str, dtype: torch.dtype, table_dtype: torch.dtype) -> Kernel:
    """A kernel of rotary.cu.

    Args:
        name: of the kernel.
        dtype: of the data: fp32, bf16 or fp16.
        table_dtype: of the table, one of these too.
    """
    return Kernel(
        "rotary",
        name,
        DATA_T=C_TYPES[dtype],
        TABLE_T=C_TYPES[table_dtype],
        THREADS=THREADS,
        HEADS=HEADS,
    )


def _kernels_run(x: Tensor, table: Tensor) -> bool:
    """Do the kernels run on these tensors? Else torch computes."""
    return (
        takes(x.device)
        and x.dtype in FLOAT_DTYPES
        and table.dtype in FLOAT_DTYPES
        and x.numel() > 0
        and usable(
            x.device,
            *(
                rotary_kernel(name, x.dtype, table.dtype)
                for name in ("rotary_v1", "rotary_v2", "rotary_backward_v1", "rotary_backward_v2")
            ),
        )
    )


def _launch(name: str, tensors: "tuple[Tensor, ...]", table: Tensor, heads: int, *sizes: int):
    """Launch version 2 of a kernel where 16-byte accesses are possible, else version 1.

    Args:
        name: "rotary" or "rotary_backward".
        tensors: of one dtype, contiguous, (B, T, ...); the first one is written.
        heads: that the kernel writes in each row.
        *sizes: the kernel's last arguments, head_dim excepted.
    """
    out = tensors[0]
    T = out.shape[-2]
    rows = out.numel() // out.shape[-1]
    _, positions, head_dim = table.shape
    half = head_dim // 2
    wide = 16 // out.element_size()
    aligned = all(t.data_ptr() % 16 == 0 for t in (*tensors, table))
    if half % wide == 0 and aligned:
        threads = rows * -(-heads // HEADS) * (half // wide)
        name, count = f"{name}_v2", rows
    else:
        threads = rows * heads * half
        name, count = f"{name}_v1", threads
    rotary_kernel(name, out.dtype, table.dtype)[-(-threads // THREADS), THREADS](
        *tensors, table, count, T, positions, *sizes, head_dim
    )


# ---- the operations that torch.compile sees ------------------------------------------------------

_library.define("rotary_(Tensor(a!) vkq, Tensor table, int kv_heads) -> ()")
_library.define("rotary_backward(Tensor dv, Tensor dk, Tensor dq, Tensor table) -> Tensor")


def _rotary(vkq: Tensor, table: Tensor, kv_heads: int) -> None:
    if not _kernels_run(vkq, table):
        vkq.copy_(reference_rotary(vkq, table, kv_heads))
        return
    head_dim = table.shape[-1]
    first = kv_heads * head_dim
    heads = (vkq.shape[-1] - first) // head_dim
    _launch("rotary", (vkq,), table.contiguous(), heads, first, heads)
    if not vkq.is_inference():
        torch.autograd.graph.increment_version(vkq)


def _rotary_backward(dv: Tensor, dk: Tensor, dq: Tensor, table: Tensor) -> Tensor:
    if not _kernels_run(dq, table):
        return reference_rotary_backward(dv, dk, dq, table)
    out = _empty_gradient(dv, dk, dq, table)
    kv_heads, heads = (t.shape[-1] // table.shape[-1] for t in (dk, dq))
    tensors = (out, *(t.contiguous() for t in (dv, dk, dq)))
    _launch("rotary_backward", tensors, table.contiguous(), 2 * kv_heads + heads, kv_heads, heads)
    return out


def _empty_gradient(dv, dk, dq, table) -> Tensor:
    return dq.new_empty(*dq.shape[:-1], dv.shape[-1] + dk.shape[-1] + dq.shape[-1])


for _name, _function in (("rotary_", _rotary), ("rotary_backward", _rotary_backward)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
torch.library.register_fake("gpuaccel::rotary_", lambda vkq, table, kv_heads: None, lib=_library)
torch.library.register_fake("gpuaccel::rotary_backward", _empty_gradient, lib=_library)


# ---- public --------------------------------------------------------------------------------------


def rotary_(vkq: Tensor, table: Tensor, kv_heads: int) -> Tensor:
    """Rotate the keys and queries of a joint product's output, in place; its values stay.

    There is no gradient through it: nn.fused_rotary has one.

    Args:
        vkq: (B, T, (2 * kv_heads + heads) * head_dim), contiguous, fp32, bf16 or fp16: heads of v,
            of k and of q side by side. fp64 is computed in torch.
        table: (2, at least T, head_dim): ga.ops.rotary_table, in any of these dtypes.
        kv_heads: heads of v, and of k.

    Returns:
        vkq.

    Raises:
        ArgumentError: with nothing changed, for another dtype, device or shape, an odd head_dim, a
            width that is not made of such heads, a vkq that is not contiguous or requires grad.

    Source:
        kernels_cu/rotary.cu; Su et al., RoFormer (2021).

    Example:
        >>> vkq = torch.ones(1, 2, 4 * 8)  # two heads of q, one of k, one of v
        >>> table = ga.ops.rotary_table(2, 8, 10_000.0)
        >>> v, k, q = ga.ops.rotary_(vkq, table, 1).split([8, 8, 16], -1)
        >>> bool(v.eq(1).all()), bool(k[0, 0].eq(1).all()), bool(k[0, 1].eq(1).all())
        (True, True, False)
    """
    _check("vkq", vkq, table)
    head_dim = table.shape[-1]
    if type(kv_heads) is not int:
        raise ArgumentError(f"kv_heads is {kv_heads!r}; expected a whole number")
    if vkq.shape[-1] % head_dim or kv_heads < 1 or vkq.shape[-1] <= 2 * kv_heads * head_dim:
        raise ArgumentError(
            f"vkq has shape {tuple(vkq.shape)}; expected (B, T, (2 * {kv_heads} + heads) *"
            f" {head_dim}), heads of v, of k and of q"
        )
    if not vkq.is_contiguous():
        raise ArgumentError(
            f"vkq has shape {tuple(vkq.shape)} with strides {vkq.stride()}; expected a contiguous"
            " tensor, which is rotated in place"
        )
    if vkq.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("vkq requires grad; use ga.nn.fused_rotary, or torch.no_grad()")
    torch.ops.gpuaccel.rotary_(vkq, table, kv_heads)
    return vkq


def rotary_backward(dv: Tensor, dk: Tensor, dq: Tensor, table: Tensor) -> Tensor:
    """The gradient of a joint product's output, of those of v and of the rotated k and q.

    Args:
        dv, dk: (B, T, kv_heads * head_dim), fp32, bf16 or fp16. What torch's flash attention
            returns is not copied, transposed and flattened.
        dq: (B, T, heads * head_dim), of the same dtype.
        table: as for `rotary_`.

    Returns:
        (B, T, (2 * kv_heads + heads) * head_dim), contiguous, of dv, dk and dq side by side. dk and
        dq are rotated back.

    Raises:
        ArgumentError: for another dtype, device or shape.

    Source:
        kernels_cu/rotary.cu.

    Example:
        >>> dv, dk, dq = torch.randn(1, 2, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 16)
        >>> ga.ops.rotary_backward(dv, dk, dq, ga.ops.rotary_table(2, 8, 10_000.0)).shape
        torch.Size([1, 2, 32])
    """
    for name, t in (("dv", dv), ("dk", dk), ("dq", dq)):
        _check(name, t, table)
        if t.shape[:-1] != dq.shape[:-1] or t.shape[-1] % table.shape[-1] or t.dtype != dq.dtype:
            raise ArgumentError(
                f"{name} is {t.dtype} of shape {tuple(t.shape)}; expected {dq.dtype},"
                f" {(*dq.shape[:-1], f'heads * {table.shape[-1]}')}"
            )
    if dv.shape != dk.shape:
        raise ArgumentError(f"dv has shape {tuple(dv.shape)}; expected dk's, {tuple(dk.shape)}")
    return torch.ops.gpuaccel.rotary_backward(dv, dk, dq, table)


def _check(name: str, x: Tensor, table: Tensor):
    """ArgumentError where x and the table do not fit each other."""
    floats = (*FLOAT_DTYPES, torch.float64)
    for what, t in ((name, x), ("table", table)):
        if not isinstance(t, Tensor) or t.dtype not in floats or t.dim() != 3:
            got = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else type(t)
            raise ArgumentError(
                f"{what} is {got}; expected a torch.float32, torch.bfloat16 or torch.float16"
                " tensor of three dimensions"
            )
    if x.device != table.device:
        raise ArgumentError(f"{name} is on {x.device}, table on {table.device}")
    if table.shape[0] != 2 or table.shape[2] < 2 or table.shape[2] % 2:
        raise ArgumentError(
            f"table has shape {tuple(table.shape)}; expected (2, positions, head_dim), head_dim"
            " even"
        )
    if x.shape[1] > table.shape[1]:
        raise ArgumentError(
            f"{name} has {x.shape[1]} positions; expected up to {table.shape[1]}, as in the table"
        )
