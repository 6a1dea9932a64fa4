"""Attention whose weights are a polynomial of the scores, with relative positions and head gates.

    layer = ga.PolyAttention(256, 8, degree=3, window=None, max_positions=1024)
    y = layer(x)  # (..., T, 256); causal; no residual inside

    s_ij = q_i . k_j / sqrt(d) + q_i . PE[i - j] + rho sum_m h_m(q_i) kbar_m(k_j)
    phi_ij = scale (a c^p + b), c = 8 tanh(s_ij / 8)
    y_i = e_i sum_j phi_ij v_j over max(0, i - window + 1) <= j <= i
    e = R_gate(alpha (x w_gate) + beta), for each head

Weights outside of the window are exactly 0. Nothing is normalised; there is no softmax. R_q is the
layer's `curve`, which learns all but a and c. R_gate is its `gate`, of nu, k, m and a bounded T.

The low-rank term: kbar and u are the means of r = min(d, clamp(round(sqrt(d)), 2, 16)) contiguous
chunks of k_j and q_i (the first d % r chunks one longer), h = u R_q(u), rho = 0.15 / sqrt(r). With
A the (r, d) matrix that takes these means, the term is a part of the query: q~ = q / sqrt(d) + rho
A^T h(A q), and s_ij = q~_i . k_j + q_i . PE[i - j]. So the attention's kernels take q~.

Where e <= 1e-4 a head is skipped for a token: e is exactly 0, and no gradient flows through it.
Memory is O(T), because the backward computes the scores again. On a CPU torch computes the T x T
matrices (reference_poly_attention).

All that PolyAttention computes between its linear layers is one operation, poly_layer: q~ and e in
one launch (poly_gate.cu), y times e in another. In the backward dq, dk and dv are written into one
tensor, the gradient that the linear layer takes.

Source: RustGPT's PolyAttention, here with the forward's own gradients on the GPU (its GPU kernels
were a softmax over one head).
"""

import functools
import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..backends import backend, takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel, usable
from ..errors import ArgumentError
from .operation import define
from .richards_glu import (
    GATE,
    SIGMOID,
    SUMS,
    RichardsCurve,
    check_input,
    curve_kernel,
    finish_curves,
    in_fp32,
    is_size,
    reference_curve,
)

LEAST_GATE = 1e-4
HIGHEST_DEGREE = 41  # 8^42 is finite in fp32
# Groups of (batch, head) whose gradients of PE are summed separately, the same on every machine.
GROUPS = 32
WIDTHS = range(16, 129, 16)  # widths of a head that v2 takes
# Of the kernels of poly_gate.cu: rows of one head that a block takes, and its threads.
ROWS = 32
THREADS = 256
_ROWS = struct.Struct("5i").pack


# ---- reference -----------------------------------------------------------------------------------


def reference_poly_attention(
    q_tilde: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int = 3,
    window: int | None = None,
) -> Tensor:
    """y_i = sum_j phi_ij v_j, the definition, with T x T matrices. Differentiable in all tensors.

    Computed in fp32, in fp64 where a tensor is.

    Args:
        q_tilde, q, k, v: (B, T, H, d).
        pe: (at least T, d).
        coefficients: (3,) a, b, scale.
        degree: p, odd.
        window: how many positions a token sees, itself included; None: all before it.

    Returns:
        (B, T, H, d) in v's dtype.
    """
    tensors = (q_tilde, q, k, v, pe, coefficients)
    wide = torch.float64 if torch.float64 in {t.dtype for t in tensors} else torch.float32
    q_tilde, q, k, values, pe, coefficients = (t.to(wide) for t in tensors)
    T, (a, b, scale) = q.shape[1], coefficients.unbind()
    position = torch.arange(T, device=q.device)
    distance = position[:, None] - position  # (T, T) i - j
    by_distance = torch.einsum("bihd,rd->bhir", q, pe[:T])
    by_key = torch.einsum("bihd,bjhd->bhij", q_tilde, k)
    s = by_key + by_distance.gather(-1, distance.clamp(min=0).expand_as(by_distance))
    phi = scale * (a * (8.0 * torch.tanh(s / 8.0)) ** degree + b)
    phi = torch.where((distance >= 0) & (distance < (window or T)), phi, 0.0)
    return torch.einsum("bhij,bjhd->bihd", phi, values).to(v.dtype)


def rank_of(d: int) -> int:
    """Number of chunks that a head of width d is cut into: clamp(round(sqrt(d)), 2, 16)."""
    return min(max(round(math.sqrt(d)), 2), 16, d)


def chunks_of(d: int, device=None) -> Tensor:
    """(r, d): 1 where a channel belongs to a chunk, else 0. The first d % r chunks are longer."""
    r = rank_of(d)
    short = d // r
    i = torch.arange(d, device=device)
    chunk = torch.where(i < d % r * (short + 1), i // (short + 1), (i - d % r) // short)
    return (chunk == torch.arange(r, device=device)[:, None]).float()


def reference_query(q: Tensor, curve: Callable[[Tensor], Tensor]) -> Tensor:
    """q~ of q, which multiplies the keys: (..., d), in q's dtype.

    Args:
        curve: R_q.
    """
    d = q.shape[-1]
    chunks = chunks_of(d, q.device)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    chunks, inverse_size = chunks.to(q.dtype), chunks.to(wide).sum(1).reciprocal()
    u = (q @ chunks.t()).to(wide) * inverse_size
    h = u * curve(u) * (inverse_size * (0.15 / math.sqrt(len(chunks))))
    return q * (1.0 / math.sqrt(d)) + (h.to(q.dtype) @ chunks).to(q.dtype)


def _reference(
    qkv, seen, pe, coefficients, alpha, beta, theta_gate, theta_query, gate, query, degree, window
):
    """PolyAttention between its linear layers, by torch: (out, e, q_tilde)."""
    q, k, v = qkv.unbind(2)
    q_tilde = reference_query(q, lambda u: reference_curve(u, theta_query, query))
    y = reference_poly_attention(q_tilde, q, k, v, pe, coefficients, degree, window)
    seen = seen.to(torch.promote_types(seen.dtype, torch.float32))
    e = reference_curve(alpha * seen + beta, theta_gate, gate)
    e = torch.where(e > LEAST_GATE, e, 0.0)
    out = (y * e.to(y.dtype).unsqueeze(-1)).flatten(-2).contiguous()
    return out, e.float(), q_tilde.contiguous()


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def attention_kernel(
    name: str, dtype: torch.dtype, d: int, degree: int, version: int, stages: int
) -> Kernel:
    """A kernel of poly_attention.cu, or with version 3 of poly_forward.cu or poly_backward.cu.

    Args:
        d: width of a head. stages: 2: the next tiles are loaded while these are computed.
    """
    if version == 3:
        return Kernel(name.removesuffix("_v3"), name, HEAD=d, DEGREE=degree)
    return Kernel(
        "poly_attention",
        name,
        DATA_T=C_TYPES[dtype],
        HEAD=d,
        DEGREE=degree,
        VERSION=version,
        STAGES=stages,
    )


def shared_bytes(name: str, d: int, stages: int, version: int = 2) -> int:
    """Bytes of dynamic shared memory that a block of v2 or v3 takes.

    v2: tiles of 64 rows in bf16; for a wide head the block's own rows, for which there are too few
    registers; for dPE also ds by differences.
    v3: tiles from a multiple of 1024 bytes on; the forward has four each of K, V and PE."""
    if version == 3:
        return (12 if name == "poly_forward" else 26) * 64 * d * 2 + 1024
    tile = 64 * (d + 8) * 2
    wide = d > 64
    if name == "poly_forward":
        return (3 * stages + 1 + 2 * wide) * tile
    return max(
        (3 * stages + 1 + (3 if wide or stages == 1 else 0)) * tile,
        (4 * stages + 1 + 2 * wide) * tile,
        (7 + 2 * stages) * tile + 64 * 72 * 2,
    )


def plan(name: str, q: Tensor) -> tuple[int, int]:
    """(version, stages) of a kernel for heads like q's.

    v1: any dtype, width and GPU. v2: bf16 on tensor cores, with two stages where two blocks fit on
    an SM. v3: bf16 heads of 64 on Hopper, which has wgmma."""
    d = q.shape[-1]
    if backend().name != "cuda" or q.dtype != torch.bfloat16 or d not in WIDTHS:
        return 1, 1
    return _plan(name, d, q.device.index)


@functools.cache
def _plan(name, d, index):
    gpu = torch.cuda.get_device_properties(index)
    if d == 64 and gpu.major == 9:
        return 3, 2
    # Each block takes 1 KiB more than it asks for.
    one_stage, two_stages = (shared_bytes(name, d, stages) + 1024 for stages in (1, 2))
    if gpu.major < 8 or one_stage > gpu.shared_memory_per_multiprocessor:
        return 1, 1
    return 2, 2 if 2 * two_stages <= gpu.shared_memory_per_multiprocessor else 1


def _aligned(t: Tensor) -> Tensor:
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _prepared(q_tilde, qkv, window):
    """Arguments of every launch: memory of q~, q, k, v; T, H, window, and the struct Rows.

    q, k and v are rows of qkv, 3 H d elements apart, as their gradients are."""
    _, T, _, H, d = qkv.shape
    flat = _aligned(qkv).view(-1)
    memories = _aligned(q_tilde), *(flat[i * H * d :] for i in range(3))
    return memories, T, H, min(window, T), _ROWS(H * d, *[3 * H * d] * 4)


def _launch(name, qkv, degree, config, grid, outputs, inputs):
    """Launch a kernel. config: (version, stages)."""
    version, stages = config
    d = qkv.shape[-1]
    kernel = attention_kernel(f"{name}_v{version}", qkv.dtype, d, degree, *config)
    if version == 1:
        shape = (grid, 256)
    else:
        shape = (grid, 128 * (version - 1), shared_bytes(name, d, stages, version))
    kernel[shape](*outputs, *inputs)


def backward_blocks(version: int, T: int, window: int, heads: int, groups: int) -> int:
    """Thread blocks of poly_backward_v2 or _v3.

    One for 64 (v3: 128) queries (dq) and one for as many keys (dk, dv) of each of `heads` = B * H
    heads; one for 64 differences (v3: two diagonals of tiles) of each of `groups` groups (dPE)."""
    if version == 2:
        diagonals = -(-window // 64)
        rows = -(-T // 64)
    else:
        diagonals = min((window + 62) // 64, (T - 1) // 64) // 2 + 1
        rows = -(-T // 128)
    return diagonals * groups + 2 * rows * heads


def launch_forward(
    q_tilde: Tensor,
    qkv: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int,
    window: int,
    config=None,
    gate: Tensor | None = None,
) -> Tensor:
    """Launch poly_forward.

    Args:
        q_tilde: (B, T, H, d).
        qkv: (B, T, 3, H, d).
        pe: (at least T, d).
        coefficients: (3,) fp32, contiguous.
        config: (version, stages); None: plan().
        gate: (B, T, H) fp32, contiguous, what y is multiplied by; None: 1.

    Returns:
        Y, (B, T, H, d).
    """
    memories, T, H, window, rows = _prepared(q_tilde, qkv, window)
    config = config or plan("poly_forward", qkv)
    y = torch.empty_like(memories[0])
    blocks = -(-T // (32, 64, 128)[config[0] - 1]) * len(qkv) * H
    inputs = (*memories, _aligned(pe), coefficients, gate, T, H, window, rows)
    _launch("poly_forward", qkv, degree, config, blocks, (y,), inputs)
    return y


def launch_backward(
    dy: Tensor,
    q_tilde: Tensor,
    qkv: Tensor,
    pe: Tensor,
    coefficients: Tensor,
    degree: int,
    window: int,
    config=None,
) -> tuple[Tensor, ...]:
    """Launch the backward, then poly_finish.

    The backward is poly_backward_q, _kv and _pe with version 1, else poly_backward.

    Args:
        dy: (B, T, H, d). The other tensors and config: as in launch_forward.

    Returns:
        dq_tilde, dqkv, dpe, dcoefficients.
    """
    memories, T, H, window, rows = _prepared(q_tilde, qkv, window)
    d, heads = qkv.shape[-1], len(qkv) * H
    sizes = (T, H, window)
    pe = _aligned(pe)
    inputs = (_aligned(dy), *memories, pe, coefficients)
    dq_tilde = torch.empty_like(memories[0])
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = (dqkv.view(-1)[i * H * d :] for i in range(3))
    config = config or plan("poly_backward", qkv)
    version = config[0]
    groups = min(heads, GROUPS)
    side = 32 if version == 1 else 64
    tiles = -(-T // side) * heads
    diagonals = -(-window // side)
    halves = 2 if version == 3 else 1  # v3 has each row of dPE in two parts
    new = functools.partial(torch.empty, dtype=torch.float32, device=qkv.device)
    sums, partial = new(tiles, 2), new(halves * groups, diagonals * side, d)
    # (kernel, grid, outputs, numbers behind the inputs)
    parts: list[tuple]
    if version == 1:
        parts = [
            ("poly_backward_q", tiles, (dq_tilde, dq, sums), (*sizes, rows)),
            ("poly_backward_kv", tiles, (dk, dv), (*sizes, rows)),
            ("poly_backward_pe", (diagonals, groups), (partial,), (T, H, heads, window, rows)),
        ]
    else:
        blocks = backward_blocks(version, T, window, heads, groups)
        gradients = (dq_tilde, dq, dk, dv, sums, partial)
        parts = [("poly_backward", blocks, gradients, (*sizes, heads, groups, rows))]
    for name, grid, outputs, numbers in parts:
        _launch(name, qkv, degree, config, grid, outputs, (*inputs, *numbers))
    dpe, dcoefficients = torch.empty_like(pe), torch.empty_like(coefficients)
    finish = attention_kernel("poly_finish", qkv.dtype, d, degree, min(version, 2), config[1])
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
    return dq_tilde, dqkv, dpe, dcoefficients


# ---- launchers of the layer: all between its linear layers ----
#
# Arguments, in the order of the operation's inputs:
#   qkv                        (B, T, 3, H, d)
#   seen                       (B, T, H), contiguous: x w_gate
#   pe                         (at least T, d)
#   coefficients, alpha, beta  (3,), (H,), (H,), fp32
#   theta_gate, theta_query    what the curves learn, fp32
#   gate, query                the `kinds` of both curves
#   degree, window

GATE_KERNELS = ("poly_query_gate", "poly_gate_backward", "poly_query_backward")


@functools.cache
def gate_kernel(name: str, dtype: torch.dtype, d: int) -> Kernel:
    """A kernel of poly_gate.cu. WHOLE: a thread takes aligned groups of 16 bytes."""
    r = rank_of(d)
    wide = 16 // dtype.itemsize
    whole = d % wide == 0 if name == "poly_gate_backward" else d % (r * wide) == 0
    return Kernel(
        "poly_gate",
        name,
        options=("-ftz=true",),
        DATA_T=C_TYPES[dtype],
        WHOLE=int(whole),
        THREADS=THREADS,
        ROWS=ROWS,
        HEAD=d,
        RANK=r,
    )


def launch_layer(
    qkv, seen, pe, coefficients, alpha, beta, theta_gate, theta_query, gate, query, degree, window
) -> tuple[Tensor, ...]:
    """Launch poly_query_gate and poly_forward.

    Returns:
        Out (B, T, H d), and for the backward e (B, T, H) and q_tilde (B, T, H, d).
    """
    qkv = _aligned(qkv)
    B, T, _, H, d = qkv.shape
    coefficients, alpha, beta, *thetas = in_fp32(coefficients, alpha, beta, theta_gate, theta_query)
    e = torch.empty(B, T, H, dtype=torch.float32, device=qkv.device)
    q_tilde = torch.empty(B, T, H, d, dtype=qkv.dtype, device=qkv.device)
    gate_kernel("poly_query_gate", qkv.dtype, d)[-(-B * T // ROWS) * H, THREADS](
        q_tilde,
        e,
        qkv,
        seen.contiguous(),
        alpha,
        beta,
        *thetas,
        gate,
        query,
        B * T,
        H,
        3 * H * d,
    )
    y = launch_forward(q_tilde, qkv, pe, coefficients, degree, window, gate=e)
    return y.view(B, T, H * d), e, q_tilde


def launch_layer_backward(
    dout,
    qkv,
    seen,
    pe,
    coefficients,
    alpha,
    beta,
    theta_gate,
    theta_query,
    out,
    e,
    q_tilde,
    gate,
    query,
    degree,
    window,
) -> tuple[Tensor, ...]:
    """Launch poly_gate_backward, the attention's backward, poly_query_backward, richards_finish.

    Args:
        dout: (B, T, H d). out, e, q_tilde: from launch_layer.

    Returns:
        The gradients of the tensors from qkv to theta_query.
    """
    qkv, seen = _aligned(qkv), seen.contiguous()
    B, T, _, H, d = qkv.shape
    coefficients, alpha, beta, *thetas = in_fp32(coefficients, alpha, beta, theta_gate, theta_query)
    curves = (*thetas, gate, query)
    blocks = -(-B * T // ROWS) * H
    dy, dseen, dalpha, dbeta = map(torch.empty_like, (q_tilde, seen, alpha, beta))
    sums = torch.empty(blocks, 2 * SUMS, dtype=torch.float32, device=qkv.device)
    by_head = torch.empty(blocks, 2, dtype=torch.float32, device=qkv.device)
    gate_kernel("poly_gate_backward", qkv.dtype, d)[blocks, THREADS](
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
        *curves,
        B * T,
        H,
    )
    dq_tilde, dqkv, dpe, dcoefficients = launch_backward(
        dy, q_tilde, qkv, pe, coefficients, degree, window
    )
    gate_kernel("poly_query_backward", qkv.dtype, d)[blocks, THREADS](
        dqkv, sums, dalpha, dbeta, dq_tilde, qkv, by_head, *curves, B * T, H, 3 * H * d, 3 * H * d
    )
    dthetas = finish_curves(sums, thetas, (gate, query))
    return dqkv, dseen, dpe, dcoefficients, dalpha, dbeta, *dthetas


# ---- the operations that autograd and torch.compile see ------------------------------------------


def attention_kernels(q, degree) -> list[Kernel]:
    """All kernels but poly_finish that the attention launches for tensors like q."""
    config = plan("poly_backward", q)
    parts = ("_q", "_kv", "_pe") if config[0] == 1 else ("",)
    names = [("poly_forward", *plan("poly_forward", q))]
    names += [(f"poly_backward{part}", *config) for part in parts]
    return [
        attention_kernel(f"{name}_v{version}", q.dtype, q.shape[-1], degree, version, stages)
        for name, version, stages in names
    ]


def _can_run(qkv, seen, pe, *others) -> bool:
    *parameters, _, _, degree, _ = others
    return (
        takes(qkv.device)
        and qkv.dtype in FLOAT_DTYPES
        and qkv.numel() > 0
        and seen.dtype == pe.dtype == qkv.dtype
        and all(p.dtype != torch.float64 for p in parameters)
        and usable(
            qkv.device,
            *attention_kernels(qkv, degree),
            curve_kernel("richards_finish"),
            *(gate_kernel(name, qkv.dtype, qkv.shape[-1]) for name in GATE_KERNELS),
        )
    )


def _fake(qkv, seen, *_):
    B, T, _, H, d = qkv.shape
    return (
        qkv.new_empty(B, T, H * d),
        seen.new_empty(B, T, H, dtype=torch.float32),
        qkv.new_empty(B, T, H, d),
    )


_poly_layer = define(
    "poly_layer",
    "qkv seen pe coefficients alpha beta theta_gate theta_query",
    "int gate, int query, int degree, int window",
    reference=_reference,
    can_run=_can_run,
    launch=launch_layer,
    launch_backward=launch_layer_backward,
    fake=_fake,
    outputs=3,
    keeps_result=True,
)


# ---- public --------------------------------------------------------------------------------------


class PolyAttention(nn.Module):
    """Causal attention without softmax; a score s weighs scale (a c^p + b), with c = 8 tanh(s / 8).

    No residual inside, no biases.

    Args:
        dim: last dimension of x, (..., T, dim).
        heads: a divisor of dim.
        degree: p, odd, from 1 to 41.
        window: how many positions a token sees, itself included; None, the default: all before it.
        max_positions: the largest T.
        device: of the parameters; default: torch's.
        dtype: of the parameters w_qkv, pe and w_out; default: torch's.

    Attributes:
        w_qkv: (3 dim, dim), three projections as one matrix; its rows are q, k, v, each by heads.
        pe: (max_positions + 1, d), N(0, 0.02), shared by the heads; d is dim / heads.
        coefficients: a, b and scale, (3,) fp32, which begin at 1, 0 and
            1 / sqrt(max_positions + 1).
        alpha: (heads,) fp32, the factor of the output's gate.
        beta: (heads,) fp32, added in the output's gate.

    Raises:
        ArgumentError: for a dim that heads does not divide, an even degree, and sizes below 1.

    Source:
        kernels_cu/poly_attention.cu.

    Example:
        >>> layer = ga.PolyAttention(32, heads=4, degree=3, max_positions=16)
        >>> y = layer(torch.randn(2, 16, 32))
        >>> y.shape
        torch.Size([2, 16, 32])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        degree: int = 3,
        window: int | None = None,
        max_positions: int = 1024,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not (is_size(dim) and is_size(heads)) or dim % heads:
            raise ArgumentError(
                f"dim is {dim!r} and heads {heads!r}; expected a dim that is a multiple of heads"
            )
        if not is_size(max_positions):
            raise ArgumentError(f"max_positions is {max_positions!r}; expected 1 or more")
        if type(degree) is not int or not 1 <= degree <= HIGHEST_DEGREE or degree % 2 == 0:
            raise ArgumentError(
                f"degree is {degree!r}; expected an odd number from 1 to {HIGHEST_DEGREE}"
            )
        if window is not None and (type(window) is not int or window < 1):
            raise ArgumentError(
                f"window is {window!r}; expected None, or a whole number of 1 or more"
            )
        d = dim // heads
        self.dim = dim
        self.heads = heads
        self.window = window
        self.max_positions = max_positions
        self.degree = degree
        self.w_qkv = nn.Linear(dim, 3 * dim, bias=False, device=device, dtype=dtype)
        self.w_gate = nn.Linear(dim, heads, bias=False, device=device, dtype=dtype)
        self.w_out = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)
        self.pe = nn.Parameter(0.02 * torch.randn(max_positions + 1, d, device=device, dtype=dtype))
        scale = 1.0 / math.sqrt(max_positions + 1)
        initial = torch.tensor([1.0, 0.0, scale], dtype=torch.float32, device=device)
        self.coefficients = nn.Parameter(initial)
        self.alpha = nn.Parameter(torch.ones(heads, device=device))
        self.beta = nn.Parameter(torch.zeros(heads, device=device))
        self.curve = RichardsCurve(SIGMOID, device=device)
        self.gate = RichardsCurve(GATE, bounded=True, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the positions before each one, itself included.

        Args:
            x: (..., T, dim), in w_qkv's dtype or under autocast, T up to max_positions.

        Returns:
            (..., T, dim).

        Raises:
            ArgumentError: for another last dimension and for too many positions.
        """
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != self.dim:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"x is {got}; expected a tensor (..., T, {self.dim})")
        check_input(x, self.gate.theta, "w_qkv", self.w_qkv)
        T = x.shape[-2]
        if T > self.max_positions:
            raise ArgumentError(
                f"x has {T} positions; expected at most max_positions, {self.max_positions}"
            )
        qkv = self.w_qkv(x).view(math.prod(x.shape[:-2]), T, 3, self.heads, self.dim // self.heads)
        seen = self.w_gate(x).reshape(*qkv.shape[:2], self.heads)
        out = _poly_layer(
            qkv,
            seen,
            self.pe.to(qkv.dtype),
            self.coefficients,
            self.alpha,
            self.beta,
            self.gate.theta,
            self.curve.theta,
            self.gate.kinds,
            self.curve.kinds,
            self.degree,
            self.window or max(T, 1),
        )
        return self.w_out(out.reshape(x.shape))

    def extra_repr(self):
        return (
            f"{self.dim}, heads={self.heads}, degree={self.degree}, window={self.window},"
            f" max_positions={self.max_positions}"
        )
