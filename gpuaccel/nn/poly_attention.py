"""Attention whose weights are a polynomial of the scores, with relative positions, a low-rank term and a gate for each head.

    >>> layer = ga.PolyAttention(256, 8, degree=3, window=None, max_positions=1024)
    >>> y = layer(x)                                           # (..., T, 256); causal; no residual inside

    s_ij = q_i . k_j / sqrt(d) + q_i . PE[i - j] + rho sum_m h_m(q_i) kbar_m(k_j)              phi = scale (a c^p + b), c = 8 tanh(s / 8)
    y_i = e_i sum_j phi_ij v_j over max(0, i - window + 1) <= j <= i             e = R_gate(alpha (x w_gate) + beta), for each head

Weights outside of the window are exactly 0; nothing is normalised, there is no softmax. R_q is the layer's `curve`, a sigmoid RichardsCurve, R_gate its
`gate`, one that learns nu, k, m and a bounded T. kbar and u are the means of r = min(d, clamp(round(sqrt(d)), 2, 16)) contiguous chunks of k_j and q_i
(the first d % r chunks one longer), h = u R_q(u), rho = 0.15 / sqrt(r). With A the (r, d) matrix that takes these means the low-rank term is a part of
the query: q~ = q / sqrt(d) + rho A^T h(A q), s_ij = q~_i . k_j + q_i . PE[i - j]. So the kernels know q~, and nothing of A.

Where e <= 1e-4 a head is skipped for a token: e is exactly 0 there, and no gradient goes through it. Memory is O(T): scores are computed
again in the backward. A CPU computes the T x T matrices (reference_poly_attention). Between the layer's products all is one operation, poly_layer:
q~ and e in one launch (poly_gate.cu), y times e in another; backward, dq, dk and dv are written into the one gradient that the product takes.

Source: RustGPT's PolyAttention, here with the forward's own gradients on the GPU (its GPU kernels were a softmax over one head).
"""

import functools
import math
import numbers
import struct

import torch
from torch import Tensor, nn

from ..backends import backend, takes
from ..compiler.kernel import Kernel, usable
from ..errors import ArgumentError
from .embedding import _differentiates_otherwise
from .richards_glu import (
    CURVE,
    GATE,
    MOST,
    SUMS,
    TYPES,
    RichardsCurve,
    _again,
    _back,
    _check_data,
    _empty,
    _finish,
    _gradients,
    _pack,
    _reference_curve,
    _save,
)
from .richards_glu import _kernel as _curve_kernel

LEAST_GATE, HIGHEST = 1e-4, 41  # 8^42 is finite in fp32
GROUPS = 32  # of (batch, head), whose gradients of PE are summed apart: the same on every machine
WIDTHS = range(16, 129, 16)  # of a head that v2 takes
ROWS, THREADS = (
    32,
    256,
)  # rows that a block of what stands around the attention takes, of one head; and its threads
_ROWS = struct.Struct("5i").pack
_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- reference ------------------------------------------------------------------------------------------------------


def reference_poly_attention(
    q_tilde: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int = 3,
    window: "int | None" = None,
) -> Tensor:
    """y_i = sum_j phi_ij v_j, in fp32 (fp64 where a tensor is); the definition. Differentiable in everything; T x T matrices.

    q_tilde, q, k, v: (B, T, H, d), pe: (at least T, d), coefficients: (3,) a, b, scale. Returns (B, T, H, d) in v's dtype."""
    tensors = (q_tilde, q, k, v, pe, coefficients)
    wide = torch.float64 if torch.float64 in {t.dtype for t in tensors} else torch.float32
    q_tilde, q, k, values, pe, coefficients = (t.to(wide) for t in tensors)
    T, (a, b, scale) = q.shape[1], coefficients.unbind()
    at = torch.arange(T, device=q.device)
    far = at[:, None] - at  # (T, T) i - j
    by_position = torch.einsum("bihd,rd->bhir", q, pe[:T])
    s = torch.einsum("bihd,bjhd->bhij", q_tilde, k) + by_position.gather(
        -1, far.clamp(min=0).expand_as(by_position)
    )
    phi = scale * (a * (8.0 * torch.tanh(s / 8.0)) ** degree + b)
    phi = torch.where((far >= 0) & (far < (window or T)), phi, 0.0)
    return torch.einsum("bhij,bjhd->bihd", phi, values).to(v.dtype)


def rank_of(d: int) -> int:
    """r = clamp(round(sqrt(d)), 2, 16): into how many chunks a head of width d is cut."""
    return min(max(round(math.sqrt(d)), 2), 16, d)


def chunks_of(d: int, device=None) -> Tensor:
    """(r, d) ones where a channel belongs to a chunk, else zeros; the first d % r chunks are one longer than the others."""
    r = rank_of(d)
    short, i = d // r, torch.arange(d, device=device)
    of = torch.where(i < d % r * (short + 1), i // (short + 1), (i - d % r) // short)
    return (of == torch.arange(r, device=device)[:, None]).float()


def reference_query(q: Tensor, chunks: Tensor, curve) -> Tensor:
    """q~ (..., d) of q: what multiplies the keys, in q's dtype. chunks: chunks_of(d); curve: R_q, or None for no low-rank term."""
    d = q.shape[-1]
    if curve is None:
        return q * (1.0 / math.sqrt(d))
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    chunks, over = chunks.to(q.dtype), chunks.to(wide).sum(1).reciprocal()
    u = (q @ chunks.t()).to(wide) * over
    h = u * curve(u) * (over * (0.15 / math.sqrt(len(over))))
    return q * (1.0 / math.sqrt(d)) + (h.to(q.dtype) @ chunks).to(q.dtype)


def _reference_layer(
    qkv, seen, pe, coefficients, alpha, beta, theta_gate, theta_query, settings, degree, window
):
    """What PolyAttention computes between its products: (out, e, q_tilde)."""
    q, k, v = qkv.unbind(2)
    curve = (
        None if theta_query is None else lambda u: _reference_curve(u, theta_query, settings[12:])
    )
    q_tilde = reference_query(q, chunks_of(q.shape[-1], q.device), curve)
    y = reference_poly_attention(q_tilde, q, k, v, pe, coefficients, degree, window)
    e = _reference_curve(
        alpha * seen.to(torch.promote_types(seen.dtype, torch.float32)) + beta,
        theta_gate,
        settings[:12],
    )
    e = torch.where(e > LEAST_GATE, e, 0.0)
    return (y * e.to(y.dtype).unsqueeze(-1)).flatten(-2), e, q_tilde


# ---- launchers ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel(
    name: str, dtype: torch.dtype, d: int, degree: int, version: int, stages: int
) -> Kernel:
    if version == 3:
        return Kernel(name.removesuffix("_v3"), name, HEAD=d, DEGREE=degree)
    return Kernel(
        "poly_attention",
        name,
        DATA_T=TYPES[dtype],
        HEAD=d,
        DEGREE=degree,
        VERSION=version,
        STAGES=stages,
    )


def shared_bytes(name: str, d: int, stages: int, version: int = 2) -> int:
    """Of a block of a v2 kernel: tiles of 64 rows in bf16; a wide head's own rows, which have no room in registers; ds by differences.

    v3: so many tiles, from a multiple of 1024 bytes on; the forward four each of K, V and PE."""
    if version == 3:
        return (12 if name == "poly_forward" else 26) * 64 * d * 2 + 1024
    tile, wide = 64 * (d + 8) * 2, d > 64
    if name == "poly_forward":
        return (3 * stages + 1 + 2 * wide) * tile
    return max(
        (3 * stages + 1 + (3 if wide or stages == 1 else 0)) * tile,
        (4 * stages + 1 + 2 * wide) * tile,
        (7 + 2 * stages) * tile + 64 * 72 * 2,
    )


def plan(name: str, q: Tensor) -> "tuple[int, int]":
    """(version, stages) of a kernel for heads like q's: v2 for bf16 on tensor cores, with loads ahead where two blocks have room on an SM for it.

    v3 is for heads of 64 on GPUs that have products of warpgroups (Hopper)."""
    d = q.shape[-1]
    if backend().name != "cuda" or q.dtype != torch.bfloat16 or d not in WIDTHS:
        return 1, 1
    return _plan(name, d, q.device.index)


@functools.cache
def _plan(name, d, index):
    gpu = torch.cuda.get_device_properties(index)
    if d == 64 and gpu.major == 9:
        return 3, 2
    one, two = (
        shared_bytes(name, d, stages) + 1024 for stages in (1, 2)
    )  # each block costs 1 KiB more
    if gpu.major < 8 or one > gpu.shared_memory_per_multiprocessor:
        return 1, 1
    return 2, 2 if 2 * two <= gpu.shared_memory_per_multiprocessor else 1


def _aligned(t: Tensor) -> Tensor:
    """Contiguous, and at an address from which v2 can load 16 bytes."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _rows(t: Tensor) -> "tuple[Tensor, int]":
    """A tensor (B, T, H, d) as the kernels take it: memory that begins with its first row, and elements from one row (of all heads) to the next."""
    B, T, H, d = t.shape
    stride = t.stride(1) if T > 1 else t.stride(0) if B > 1 else H * d
    fits = (
        t.stride(3) == 1
        and (H == 1 or t.stride(2) == d)
        and (B == 1 or t.stride(0) == T * stride)
        and stride >= H * d
    )
    if not fits or t.data_ptr() % 16 or stride * t.element_size() % 16:
        t, stride = _aligned(t), H * d
    return t.as_strided((((B * T) - 1) * stride + H * d,), (1,)), stride


def _prepared(q_tilde, q, k, v, window, of_grads=0):
    """What all launches take: (memories of q~, q, k, v), T, H, window, and the struct Rows."""
    T, H = q.shape[1:3]
    memories, strides = zip(*map(_rows, (q_tilde, q, k, v)))
    return memories, T, H, min(window, T), _ROWS(*strides, of_grads)


def _launch(name, q, degree, how, grid, before, args):
    version, stages = how
    kernel = _kernel(f"{name}_v{version}", q.dtype, q.shape[-1], degree, *how)
    kernel[
        (grid, 256)
        if version == 1
        else (grid, 128 * (version - 1), shared_bytes(name, q.shape[-1], stages, version))
    ](*before, *args)


def backward_blocks(version: int, T: int, window: int, heads: int, groups: int) -> int:
    """Of v2 or v3: of 64 or 128 queries (dq) and keys (dk and dv) of each of B * H heads, of 64 differences or two diagonals of tiles (dPE) of each group of heads."""
    diagonals = (
        -(-window // 64) if version == 2 else min((window + 62) // 64, (T - 1) // 64) // 2 + 1
    )
    rows = -(-T // (64 if version == 2 else 128))
    return diagonals * groups + 2 * rows * heads


def launch_forward(
    q_tilde: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int,
    window: int,
    how=None,
    gate: "Tensor | None" = None,
) -> Tensor:
    """poly_forward. q_tilde, q, k, v: (B, T, H, d); pe: (at least T, d); coefficients: (3,) fp32, contiguous. Returns y (B, T, H, d).

    how: (version, stages); default: plan(). gate: (B, T, H) fp32, contiguous: what y is multiplied by."""
    B, T, H, d = q.shape
    memories, *numbers, rows = _prepared(q_tilde, q, k, v, window)
    y, how = torch.empty(B, T, H, d, dtype=q.dtype, device=q.device), how or plan("poly_forward", q)
    pe = _aligned(pe)
    _launch(
        "poly_forward",
        q,
        degree,
        how,
        -(-T // (32, 64, 128)[how[0] - 1]) * B * H,
        (y,),
        (*memories, pe, coefficients, gate, *numbers, rows),
    )
    return y


def launch_backward(
    dy: Tensor,
    q_tilde: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int,
    window: int,
    how=None,
    into: "Tensor | None" = None,
) -> "tuple[Tensor, ...]":
    """poly_backward_q, _kv and _pe, then what adds up their parts. dy: (B, T, H, d). Returns dq_tilde, dq, dk, dv, dpe, dcoefficients.

    into: (B, T, 3, H, d), contiguous, of which dq, dk and dv become parts; default: three tensors."""
    B, T, H, d = q.shape
    memories, *numbers, rows = _prepared(
        q_tilde, q, k, v, window, H * d * (1 if into is None else 3)
    )
    pe, window = _aligned(pe), numbers[-1]
    given = (_aligned(dy), *memories, pe, coefficients)
    dq_tilde, *three = (
        torch.empty(B, T, H, d, dtype=q.dtype, device=q.device)
        for _ in range(4 if into is None else 1)
    )
    dq, dk, dv = three if into is None else (into.view(-1)[i * H * d :] for i in range(3))
    how, groups = how or plan("poly_backward", q), min(B * H, GROUPS)
    side = 32 if how[0] == 1 else 64
    tiles, diagonals = -(-T // side) * B * H, -(-window // side)
    halves = 2 if how[0] == 3 else 1  # v3 has each row of dPE in two parts
    sums, partial = (
        torch.empty(tiles, 2, device=q.device),
        torch.empty(halves * groups, diagonals * side, d, device=q.device),
    )
    if how[0] == 1:
        _launch(
            "poly_backward_q", q, degree, how, tiles, (dq_tilde, dq, sums), (*given, *numbers, rows)
        )
        _launch("poly_backward_kv", q, degree, how, tiles, (dk, dv), (*given, *numbers, rows))
        _launch(
            "poly_backward_pe",
            q,
            degree,
            how,
            (diagonals, groups),
            (partial,),
            (*given, *numbers[:2], B * H, window, rows),
        )
    else:
        blocks = backward_blocks(how[0], T, window, B * H, groups)
        _launch(
            "poly_backward",
            q,
            degree,
            how,
            blocks,
            (dq_tilde, dq, dk, dv, sums, partial),
            (*given, *numbers, B * H, groups, rows),
        )
    dpe, dcoefficients = torch.empty_like(pe), torch.empty_like(coefficients)
    finish = _kernel("poly_finish", q.dtype, d, degree, min(how[0], 2), how[1])
    finish[1 - (-dpe.numel() // 256), 256](
        dpe,
        dcoefficients,
        partial,
        sums,
        coefficients,
        len(pe),
        partial.shape[1],
        len(partial),
        tiles,
    )
    return dq_tilde, *((dq, dk, dv) if into is None else into.unbind(2)), dpe, dcoefficients


# ---- launchers of the layer: all between its products ---------------------------------------------------------------
# In the order of the operation's inputs: qkv (B, T, 3, H, d); seen (B, T, H), contiguous; pe; in fp32 coefficients, alpha and beta (H,), theta_gate and
# theta_query (None: no low-rank term); settings of both curves, one behind the other; degree; window.

AROUND = ("poly_query_gate", "poly_gate_backward", "poly_query_backward")


@functools.cache
def _around(name: str, dtype: torch.dtype, d: int, low_rank: bool) -> Kernel:
    """One of AROUND. WHOLE: what a thread takes is made of aligned 16 bytes."""
    r, wide = rank_of(d), 16 // dtype.itemsize
    whole = d % wide == 0 if name == "poly_gate_backward" else d % (r * wide) == 0
    return Kernel(
        "poly_gate",
        name,
        options=("-ftz=true",),
        DATA_T=TYPES[dtype],
        WHOLE=int(whole),
        THREADS=THREADS,
        ROWS=ROWS,
        HEAD=d,
        RANK=r,
        LOW_RANK=int(low_rank),
    )


def _curves(theta_gate, theta_query, settings):
    """thetas and settings of the layer's curves, the gate's first."""
    return [t for t in (theta_gate, theta_query) if t is not None], [settings[:12], settings[12:]][
        : 1 if theta_query is None else 2
    ]


def launch_layer(
    qkv, seen, pe, coefficients, alpha, beta, theta_gate, theta_query, settings, degree, window
) -> "tuple[Tensor, ...]":
    """poly_query_gate and poly_forward. Returns out (B, T, H d), e (B, T, H), q_tilde (B, T, H, d) and the curves."""
    q, k, v = qkv.unbind(2)
    B, T, H, d = q.shape
    (thetas, settings), (memory, stride) = _curves(theta_gate, theta_query, settings), _rows(q)
    curves = torch.empty(len(thetas), CURVE, device=q.device)
    e, q_tilde = (
        torch.empty(B, T, H, device=q.device),
        torch.empty(B, T, H, d, dtype=q.dtype, device=q.device),
    )
    _around("poly_query_gate", q.dtype, d, theta_query is not None)[-(-B * T // ROWS) * H, THREADS](
        q_tilde,
        e,
        curves,
        memory,
        seen,
        alpha,
        beta,
        thetas[0],
        thetas[-1],
        _pack(*settings),
        B * T,
        H,
        stride,
    )
    return (
        launch_forward(q_tilde, q, k, v, pe, coefficients, degree, window, gate=e).view(
            B, T, H * d
        ),
        e,
        q_tilde,
        curves,
    )


def launch_layer_backward(
    dout,
    out,
    e,
    q_tilde,
    curves,
    qkv,
    seen,
    pe,
    coefficients,
    alpha,
    beta,
    theta_gate,
    theta_query,
    settings,
    degree,
    window,
) -> "list[Tensor]":
    """poly_gate_backward, poly_backward, poly_query_backward, richards_finish. dout: (B, T, H d). Returns the gradients of all inputs that have one."""
    q, k, v = qkv.unbind(2)
    B, T, H, d = q.shape
    thetas, settings = _curves(theta_gate, theta_query, settings)
    blocks, how, (memory, stride) = (
        -(-B * T // ROWS) * H,
        (q.dtype, d, theta_query is not None),
        _rows(q),
    )
    dqkv = torch.empty(qkv.shape, dtype=q.dtype, device=q.device)
    dy, dseen, dalpha, dbeta = map(torch.empty_like, (q_tilde, seen, alpha, beta))
    sums, by_head = (
        torch.empty(blocks, len(thetas) * SUMS, device=q.device),
        torch.empty(blocks, 2, device=q.device),
    )
    _around("poly_gate_backward", *how)[blocks, THREADS](
        dy,
        dseen,
        sums,
        by_head,
        _aligned(dout),
        _aligned(out),
        e,
        seen,
        alpha,
        beta,
        curves,
        B * T,
        H,
    )
    dq_tilde, *_, dpe, dcoefficients = launch_backward(
        dy, q_tilde, q, k, v, pe, coefficients, degree, window, into=dqkv
    )
    _around("poly_query_backward", *how)[blocks, THREADS](
        dqkv, sums, dalpha, dbeta, dq_tilde, memory, by_head, curves, B * T, H, stride, 3 * H * d
    )
    return [
        dqkv,
        dseen,
        dpe,
        dcoefficients,
        dalpha,
        dbeta,
        *_finish(sums, curves, thetas, settings),
    ]


# ---- the operations that autograd and torch.compile see -------------------------------------------------------------

_SIX = "Tensor q_tilde, Tensor q, Tensor k, Tensor v, Tensor pe, Tensor coefficients, int degree, int window"
_library.define(f"poly_attention({_SIX}) -> Tensor")
_library.define(
    f"poly_attention_backward(Tensor dy, {_SIX}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LAYER = (
    "Tensor qkv, Tensor seen, Tensor pe, Tensor coefficients, Tensor alpha, Tensor beta, Tensor theta_gate, Tensor? theta_query, float[] settings, "
    "int degree, int window"
)
_library.define(f"poly_layer({_LAYER}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"poly_layer_backward(Tensor dout, Tensor out, Tensor e, Tensor q_tilde, Tensor curves, {_LAYER}) -> ({', '.join(['Tensor'] * 8)})"
)


def _all(q, degree) -> "list[Kernel]":
    back = plan("poly_backward", q)
    names = [("poly_forward", *plan("poly_forward", q))]
    names += [
        (f"poly_backward{part}", *back)
        for part in (("_q", "_kv", "_pe") if back[0] == 1 else ("",))
    ]
    return [
        _kernel(f"{name}_v{version}", q.dtype, q.shape[-1], degree, version, stages)
        for name, version, stages in names
    ]


def _ours(q, coefficients, degree) -> bool:
    return (
        takes(q.device)
        and q.dtype in TYPES
        and q.numel() > 0
        and coefficients.dtype != torch.float64
        and usable(q.device, *_all(q, degree))
    )


def _layer_ours(qkv, seen, pe, *parameters, degree) -> bool:
    q, d = qkv[:, :, 0], qkv.shape[-1]
    if (
        not _ours(q, parameters[0], degree)
        or not seen.dtype == pe.dtype == q.dtype
        or any(p is not None and p.dtype == torch.float64 for p in parameters)
    ):
        return False
    return usable(
        q.device,
        _curve_kernel("richards_finish"),
        *(_around(name, q.dtype, d, parameters[-1] is not None) for name in AROUND),
    )


def _in_fp32(parameters):
    return [p if p is None else p.detach().float().contiguous() for p in parameters]


def _forward(q_tilde, q, k, v, pe, coefficients, degree, window):
    if not _ours(q, coefficients, degree):
        return reference_poly_attention(
            q_tilde, q, k, v, pe, coefficients, degree, window
        ).contiguous()
    return launch_forward(q_tilde, q, k, v, pe, coefficients.float().contiguous(), degree, window)


def _backward(dy, q_tilde, q, k, v, pe, coefficients, degree, window):
    if not _ours(q, coefficients, degree):
        found = _gradients(
            lambda *inputs: reference_poly_attention(*inputs, degree, window),
            dy,
            q_tilde,
            q,
            k,
            v,
            pe,
            coefficients,
        )
        return tuple(g.contiguous() for g in found)
    *grads, dcoefficients = launch_backward(
        dy, q_tilde, q, k, v, pe, coefficients.float().contiguous(), degree, window
    )
    return *grads, dcoefficients.to(coefficients.dtype)


def _layer_forward(qkv, seen, pe, *others):
    *parameters, settings, degree, window = others
    if not _layer_ours(qkv, seen, pe, *parameters, degree=degree):
        out, e, q_tilde = _reference_layer(qkv, seen, pe, *others)
        return (
            out.contiguous(),
            e.float(),
            q_tilde.contiguous(),
            qkv.new_zeros(1 if parameters[-1] is None else 2, CURVE, dtype=torch.float32),
        )
    return launch_layer(qkv, seen.contiguous(), pe, *_in_fp32(parameters), settings, degree, window)


def _layer_backward(dout, out, e, q_tilde, curves, qkv, seen, pe, *others):
    *parameters, settings, degree, window = others
    given = [t for t in (qkv, seen, pe, *parameters) if t is not None]
    if _layer_ours(qkv, seen, pe, *parameters, degree=degree):
        found = launch_layer_backward(
            dout,
            out,
            e,
            q_tilde,
            curves,
            qkv,
            seen.contiguous(),
            pe,
            *_in_fp32(parameters),
            settings,
            degree,
            window,
        )
    else:
        none = () if parameters[-1] is not None else (None,)
        found = _gradients(
            lambda *inputs: _reference_layer(*inputs, *none, settings, degree, window)[0],
            dout,
            *given,
        )
    found = [g.to(t.dtype).contiguous() for g, t in zip(found, given)]
    return *found, *[qkv.new_empty(0)] * (8 - len(found))


for _name, _function in (
    ("poly_attention", _forward),
    ("poly_attention_backward", _backward),
    ("poly_layer", _layer_forward),
    ("poly_layer_backward", _layer_backward),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
torch.library.register_fake(
    "gpuaccel::poly_attention", lambda qt, q, k, v, pe, co, degree, window: _empty(v), lib=_library
)
torch.library.register_fake(
    "gpuaccel::poly_attention_backward",
    lambda dy, qt, q, k, v, pe, co, *_: tuple(map(_empty, (qt, q, k, v, pe, co))),
    lib=_library,
)


def _layer_fake(qkv, seen, pe, coefficients, alpha, beta, theta_gate, theta_query, *_):
    B, T, _, H, d = qkv.shape
    return (
        qkv.new_empty(B, T, H * d),
        seen.new_empty(B, T, H, dtype=torch.float32),
        qkv.new_empty(B, T, H, d),
        qkv.new_empty(1 if theta_query is None else 2, CURVE, dtype=torch.float32),
    )


torch.library.register_fake("gpuaccel::poly_layer", _layer_fake, lib=_library)
torch.library.register_fake(
    "gpuaccel::poly_layer_backward",
    lambda dout, out, e, qt, curves, *inputs: tuple(
        qt.new_empty(0) if t is None else _empty(t) for t in inputs[:8]
    ),
    lib=_library,
)


torch.library.register_autograd(
    "gpuaccel::poly_attention",
    _back(
        lambda *args: torch.ops.gpuaccel.poly_attention_backward(*args), reference_poly_attention
    ),
    setup_context=_save,
    lib=_library,
)


def _save_layer(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # of e, q_tilde and the curves, which have none
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.numbers = inputs[8:]


def _layer_grads(ctx, dout, *_):
    if dout is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # asked for once: a checkpoint computes them for it
    if torch.is_grad_enabled():
        return (
            *_again(lambda *tensors: _reference_layer(*tensors, *ctx.numbers)[0], dout, saved[4:]),
            None,
            None,
            None,
        )
    *found, of_query = torch.ops.gpuaccel.poly_layer_backward(dout, *saved, *ctx.numbers)
    return *found, None if saved[-1] is None else of_query, None, None, None


torch.library.register_autograd(
    "gpuaccel::poly_layer", _layer_grads, setup_context=_save_layer, lib=_library
)


# ---- public ---------------------------------------------------------------------------------------------------------


def poly_attention(
    q_tilde: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int = 3,
    window: "int | None" = None,
) -> Tensor:
    """The core of PolyAttention, y_i = sum_j phi_ij v_j. Differentiable in all tensors.

    q_tilde (the query of products with keys), q (of relative positions), k, v: (B, T, H, d), fp32, bf16 or fp16 (fp64 in torch), best as views of
    one product; pe: (at least T, d) in their dtype; coefficients: (3,) a, b, scale. ArgumentError for what does not fit."""
    shape = tuple(q.shape)
    if len(shape) != 4:
        raise ArgumentError(f"q has shape {shape}; expected (B, T, H, d)")
    for name, t in (("q_tilde", q_tilde), ("k", k), ("v", v), ("pe", pe)):
        if name != "pe" and tuple(t.shape) != shape:
            raise ArgumentError(f"{name} has shape {tuple(t.shape)}; expected {shape}, as q")
        if t.dtype != q.dtype or t.device != q.device:
            raise ArgumentError(
                f"{name} is {t.dtype} on {t.device}; expected {q.dtype} on {q.device}, as q"
            )
    if pe.dim() != 2 or pe.shape[1] != shape[3] or pe.shape[0] < shape[1]:
        raise ArgumentError(
            f"pe has shape {tuple(pe.shape)}; expected at least {shape[1]} positions of width {shape[3]}, as q has"
        )
    if (
        coefficients.shape != (3,)
        or coefficients.device != q.device
        or not coefficients.is_floating_point()
    ):
        raise ArgumentError(
            f"coefficients is {coefficients.dtype} of shape {tuple(coefficients.shape)} on {coefficients.device}; "
            f"expected a, b and scale, (3,), on {q.device}"
        )
    _check_numbers(degree, window)
    function = (
        reference_poly_attention
        if _differentiates_otherwise()
        else torch.ops.gpuaccel.poly_attention
    )
    return function(q_tilde, q, k, v, pe, coefficients, degree, window or max(shape[1], 1))


def _check_numbers(degree, window):
    if type(degree) is not int or not 1 <= degree <= HIGHEST or degree % 2 == 0:
        raise ArgumentError(f"degree is {degree!r}; expected an odd number from 1 to {HIGHEST}")
    if window is not None and (type(window) is not int or window < 1):
        raise ArgumentError(f"window is {window!r}; expected None, or a whole number of 1 or more")


class PolyAttention(nn.Module):
    """Causal polynomial attention, see the top of this module. x: (..., T, dim), T up to max_positions. No residual inside, no biases.

    degree: p, odd. window: how many positions a token sees, itself included; None: all. low_rank: with the term in chunk means. a, b, scale: where the
    coefficients begin (scale: 1 / sqrt(max_positions + 1)). w_qkv: (3 dim, dim), three projections as one product; pe: (max_positions + 1, d),
    N(0, 0.02), shared by the heads; alpha, beta, coefficients in fp32, as made. w_qkv's rows are q, k, v, each by heads. x: in w_qkv's dtype, or autocast.
    adaptive_degree: begins at degree 1, and adapt_degree() raises it, up to `degree`. ArgumentError for what does not fit."""

    def __init__(
        self,
        dim: int,
        heads: int,
        degree: int = 3,
        window: "int | None" = None,
        max_positions: int = 1024,
        *,
        low_rank: bool = True,
        adaptive_degree: bool = False,
        a: float = 1.0,
        b: float = 0.0,
        scale: "float | None" = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if (
            not all(isinstance(size, numbers.Integral) and size >= 1 for size in (dim, heads))
            or dim % heads
        ):
            raise ArgumentError(
                f"dim is {dim!r} and heads {heads!r}; expected a dim that is a multiple of heads"
            )
        if not isinstance(max_positions, numbers.Integral) or max_positions < 1:
            raise ArgumentError(f"max_positions is {max_positions!r}; expected 1 or more")
        _check_numbers(degree, window)
        scale = 1.0 / math.sqrt(max_positions + 1) if scale is None else scale
        for name, value in (("a", a), ("b", b), ("scale", scale)):
            if not isinstance(value, numbers.Real) or not abs(value) <= MOST:
                raise ArgumentError(f"{name} is {value}; expected a finite number")
        d, self.dim, self.heads, self.window, self.max_positions, self.low_rank = (
            dim // heads,
            dim,
            heads,
            window,
            max_positions,
            low_rank,
        )
        self.highest, self.degree, self.adaptive, self.best, self.waited = (
            degree,
            1 if adaptive_degree else degree,
            adaptive_degree,
            math.inf,
            0,
        )
        self.register_buffer("adapted", self._adapted().to(device) if adaptive_degree else None)
        self.w_qkv = nn.Linear(dim, 3 * dim, bias=False, device=device, dtype=dtype)
        self.w_gate = nn.Linear(dim, heads, bias=False, device=device, dtype=dtype)
        self.w_out = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)
        self.pe = nn.Parameter(0.02 * torch.randn(max_positions + 1, d, device=device, dtype=dtype))
        self.coefficients = nn.Parameter(
            torch.tensor([a, b, scale], dtype=torch.float32, device=device)
        )
        self.alpha = nn.Parameter(torch.ones(heads, device=device))
        self.beta = nn.Parameter(torch.zeros(heads, device=device))
        self.curve = RichardsCurve("sigmoid", device=device) if low_rank else None
        self.register_buffer("chunks", chunks_of(d, device) if low_rank else None, persistent=False)
        self.gate = RichardsCurve("sigmoid", learn=GATE, bounded=True, device=device)

    def query(self, q: Tensor) -> Tensor:
        """q~ (..., d) of q, in torch's operations: see reference_query."""
        return reference_query(q, self.chunks, self.curve)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != self.dim:
            raise ArgumentError(
                f"x is {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}; expected a tensor (..., T, {self.dim})"
            )
        _check_data(x, self.gate.theta, "w_qkv", self.w_qkv)
        T = x.shape[-2]
        if T > self.max_positions:
            raise ArgumentError(
                f"x has {T} positions; expected at most max_positions, {self.max_positions}"
            )
        qkv = self.w_qkv(x).view(math.prod(x.shape[:-2]), T, 3, self.heads, self.dim // self.heads)
        seen = self.w_gate(x).reshape(*qkv.shape[:2], self.heads)
        theta, setting = (self.curve.theta, self.curve.setting) if self.low_rank else (None, [])
        function = (
            _reference_layer if _differentiates_otherwise() else torch.ops.gpuaccel.poly_layer
        )
        out = function(
            qkv,
            seen,
            self.pe.to(qkv.dtype),
            self.coefficients,
            self.alpha,
            self.beta,
            self.gate.theta,
            theta,
            self.gate.setting + setting,
            self.degree,
            self.window or max(T, 1),
        )[0]
        return self.w_out(out.reshape(x.shape))

    def set_degree(self, degree: int):
        """Another degree, from the next forward on. A step that a graph holds goes on with the old one: capture it again."""
        _check_numbers(degree, None)
        self.degree = degree
        if self.adaptive:
            self.adapted.copy_(self._adapted())

    def _adapted(self) -> Tensor:
        """What a state_dict, a checkpoint keeps: (3,) int64, the degree, calls waited, the bits of the best loss in fp64."""
        return torch.tensor(
            [self.degree, self.waited, *struct.unpack("q", struct.pack("d", self.best))]
        )

    def _load_from_state_dict(self, state, prefix, *args):
        if (
            self.adaptive
            and not (kept := state.setdefault(f"{prefix}adapted", self._adapted())).is_meta
        ):  # older ones have none
            degree, waited, bits = kept.tolist()
            _check_numbers(degree, None)
            self.degree, self.waited, (self.best,) = (
                degree,
                waited,
                struct.unpack("d", struct.pack("q", bits)),
            )
        super()._load_from_state_dict(state, prefix, *args)

    def adapt_degree(self, loss: float, patience: int = 100, gain: float = 0.01) -> int:
        """With adaptive_degree: told the loss after each step, or every so often, this raises the degree by 2, up to the one that was asked for, where the
        loss has not fallen by `gain` of itself within `patience` calls. Returns the degree.
        Of RustGPT's rule only its frame is known (it begins at 1, goes in odd steps up to 7, rests after a change); when to go up is ours."""
        if not self.adaptive:
            raise ArgumentError(
                "this layer's degree is fixed; expected one made with adaptive_degree=True"
            )
        self.waited += 1
        if loss < self.best * (1.0 - gain) if math.isfinite(self.best) else math.isfinite(loss):
            self.best, self.waited = loss, 0
        elif self.waited >= patience and self.degree < self.highest:
            self.degree, self.waited = self.degree + 2, 0
        self.adapted.copy_(self._adapted())
        return self.degree

    def extra_repr(self):
        return f"{self.dim}, heads={self.heads}, degree={self.degree}, window={self.window}, max_positions={self.max_positions}"
