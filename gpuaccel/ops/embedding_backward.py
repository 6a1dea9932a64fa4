"""The encoder, tokens -> wte[token] + wpe[position], and its deterministic backward.

    ga.ops.encoder_backward(dwte, dwpe, dout, tokens)  # adds into dwte (V, C) and dwpe (T, C)

The backward adds the rows of a token in the order of their positions, in pieces of 32 that begin
with the token's first row (ops/token_sort.py). The partial sums of a longer run are added by 16
warps in turn, then the warps' sums in order. So results are bit-identical from run to run, and a
token's gradient does not depend on the other tokens of the batch.

A token out of range is never used as an address: the forward gives NaN for it and counts it, and
row 0 of dwte becomes NaN, so that ga.AdamW skips the step (other optimizers see NaN).

On a CPU without backend simt torch adds in the same fixed order. Modules: nn/embedding.py.

Source: llm.c's encoder_backward, whose buckets are made by the CPU; here the device finds segments.
"""

import functools

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel
from ..errors import ArgumentError
from .accumulate import overlap, problem_of_sums
from .clip import readable
from .token_sort import (
    MAX_TOKENS,
    PIECE,
    TOKEN_DTYPES,
    Segments,
    check_tokens,
    find_segments,
    left_out_token,
)

THREADS, QUADS, COMBINE, SPAN = 128, 1, 16, 8  # as in encoder.cu


# ---- reference -----------------------------------------------------------------------------------


def reference_encoder(tokens: Tensor, wte: Tensor, wpe: Tensor | None = None) -> Tensor:
    """wte[token] + wpe[position]; NaN for a token out of range.

    Args:
        tokens: (..., T).
        wte: (V, C).
        wpe: (at least T, C), or None.

    Returns:
        (..., T, C).
    """
    valid = (tokens >= 0) & (tokens < len(wte))
    out = torch.where(valid[..., None], wte[torch.where(valid, tokens, 0)], torch.nan)
    return out if wpe is None else out + wpe[: tokens.shape[-1]]


def reference_encoder_backward(
    dwte: Tensor | None, dwpe: Tensor | None, dout: Tensor, segments: Segments
):
    """Add the gradients into dwte and dwpe in torch, bit-identical to the kernels.

    As add_gradients(), for any device and dtype: sums are in fp32, in fp64 where a tensor is."""
    dtypes = {t.dtype for t in (dwte, dwpe, dout) if t is not None}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    grad = dout.reshape(-1, dout.shape[-1]).to(wide)
    if dwte is not None and segments.pieces.any():
        row, token = segments.order.long().unbind(1)
        head = segments.pieces.nonzero()[:, 0]
        kind = segments.pieces[head].long()
        is_first = kind <= PIECE
        rows = torch.where(kind < 0, PIECE, torch.where(is_first, kind, kind - PIECE))
        # Rows that are left out come after the last piece; those of tokens out of range are NaN.
        row = row[: int(rows.sum())]
        sorted_grad = torch.where((row < 0)[:, None], torch.nan, grad[row & MAX_TOKENS])
        of_piece = _sums(sorted_grad, rows)
        # 16 warps take the pieces of a run in turn, as in encoder_combine_v3.
        run = is_first.cumsum(0) - 1
        index = torch.arange(len(run), device=run.device) - is_first.nonzero()[run, 0]
        warp, order = (COMBINE * run + index % COMBINE).sort(stable=True)
        warp, pieces = warp.unique_consecutive(return_counts=True)
        of_warp = _sums(of_piece[order], pieces)
        total = _sums(of_warp, (warp // COMBINE).unique_consecutive(return_counts=True)[1])
        _add(dwte, token[head[is_first]], total)
    if dwpe is not None and dout.numel():
        T = dout.shape[-2]
        grad = grad.view(-1, T, grad.shape[-1])
        total = grad[0]
        for more in grad[1:]:
            total = total + more
        _add(dwpe, torch.arange(T, device=dwpe.device), total)


def _sums(rows: Tensor, counts: Tensor) -> Tensor:
    """The sum of the first counts[0] rows, of the next counts[1], ..., each added in order."""
    return torch.segment_reduce(rows, "sum", lengths=counts, initial=-0.0)


def _add(sums, index, total):
    sums[index] = (sums[index].to(total.dtype) + total).to(sums.dtype)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def encoder_kernel(name: str, **macros) -> Kernel:
    """A kernel of encoder.cu.

    Args:
        name: of the kernel.
        **macros: its types and options.
    """
    return Kernel(
        "encoder",
        name,
        THREADS=THREADS,
        PIECE=PIECE,
        QUADS=QUADS,
        COMBINE=COMBINE,
        SPAN=SPAN,
        **macros,
    )


def _whole(C, *tensors) -> int:
    """1 if rows of C elements can be read four at a time, else 0."""
    aligned = all(t.data_ptr() % (4 * t.element_size()) == 0 for t in tensors if t is not None)
    return int(C % 4 == 0 and aligned)


def launch_forward(tokens: Tensor, wte: Tensor, wpe: Tensor | None, invalid: Tensor) -> Tensor:
    """Launch encoder_forward.

    Args:
        tokens, wte, wpe: contiguous, not empty; wte and wpe of one dtype.
        invalid: (3,) int64, to count tokens out of range (encoder.cu).

    Returns:
        (..., T, C).
    """
    (V, C), rows = wte.shape, tokens.numel()
    out = torch.empty(*tokens.shape, C, dtype=wte.dtype, device=wte.device)
    run = encoder_kernel(
        "encoder_forward",
        TOKEN_T=C_TYPES[tokens.dtype],
        PARAM_T=C_TYPES[wte.dtype],
        WHOLE=_whole(C, wte, wpe),
    )
    run[-(-rows // (THREADS // 32)), THREADS](
        out, tokens, wte, wpe, invalid, rows, tokens.shape[-1] if tokens.dim() else 1, C, V
    )
    return out


def launch_backward(dwte: Tensor | None, dwpe: Tensor | None, dout: Tensor, segments: Segments):
    """Launch encoder_backward_v3 and encoder_combine_v3 for dwte, encoder_wpe for dwpe.

    dout: (rows, C) or (B, T, C), not empty. All tensors are contiguous."""
    C = dout.shape[-1]
    macros = lambda sums: dict(
        GRAD_T=C_TYPES[dout.dtype],
        ACC_T=C_TYPES[sums.dtype],
        WHOLE=_whole(C, sums, dout),
    )
    if dwte is not None:
        n, places = segments.n, -(-segments.n // PIECE)  # a warp takes 32 places of the order
        partials = torch.empty(2 * places, -(-C // 4) * 4, dtype=torch.float32, device=dout.device)
        grid = (-(-places // (THREADS // 32)), -(-C // (128 * QUADS)))
        places_of = segments.order, segments.pieces, n, C
        encoder_kernel("encoder_backward_v3", **macros(dwte))[grid, THREADS](
            dwte, partials, dout, *places_of
        )
        grid = (-(-places // SPAN), -(-C // 128))
        encoder_kernel("encoder_combine_v3", **macros(dwte))[grid, 32 * COMBINE](
            dwte, partials, *places_of
        )
    if dwpe is not None:
        T = dout.shape[-2]
        encoder_kernel("encoder_wpe", **macros(dwpe))[-(-T * -(-C // 4) // THREADS), THREADS](
            dwpe, dout, dout.numel() // (T * C), T, C
        )


# ---- public: the gradients -----------------------------------------------------------------------


# torch._disable_dynamo is lazy; torch.compiler.disable would import half of torch.
@torch._disable_dynamo
def encoder_backward(
    dwte: Tensor | None,
    dwpe: Tensor | None,
    dout: Tensor,
    tokens: Tensor,
    *,
    segments: Segments | None = None,
    padding_idx: int | None = None,
):
    """Add the gradients of wte and wpe into dwte and dwpe.

    There is no host synchronisation where the tokens are on a GPU; the call may be captured.

    Args:
        dwte, dwpe: (V, C) and (at least T, C), contiguous, fp32, bf16 or fp16; either may be None.
        dout: (..., T, C), fp32, bf16 or fp16, any strides.
        tokens: (..., T), int64 or int32.
        segments: ga.ops.find_segments(tokens, V, padding_idx), where they are known already.
        padding_idx: as nn.Embedding's.

    Raises:
        ArgumentError: with nothing changed, for a wrong dtype, shape or device, sums that are not
            contiguous, require grad or are a negated view (Tensor.is_neg), segments of another
            number of tokens, vocabulary or padding_idx, and on the CPU for a token out of range;
            on a GPU such a token makes row 0 of dwte NaN.
    """
    if problem := _problem(dwte, dwpe, dout, tokens):
        raise ArgumentError(problem)
    if dwte is not None:
        check_tokens(tokens, len(dwte))
        check_range(tokens, len(dwte))
        expected = (tokens.numel(), len(dwte), left_out_token(padding_idx, len(dwte)))
        segments = segments or find_segments(tokens, len(dwte), padding_idx)
        got = (segments.n, segments.vocab, segments.left_out)
        if got != expected:
            words = "{} tokens out of {}, {} left out"
            raise ArgumentError(
                f"segments are of {words.format(*got)} (-1: none);"
                f" expected those of these {words.format(*expected)}"
            )
    if dout.numel():
        add_gradients(dwte, dwpe, dout, segments)


def _problem(dwte, dwpe, dout, tokens) -> str | None:
    """Which argument does not fit the others, or None."""
    tensors = {"dwte": dwte, "dwpe": dwpe, "dout": dout, "tokens": tokens}
    for name, t in tensors.items():
        if t is None and name in ("dwte", "dwpe"):
            continue
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            got = t.layout if isinstance(t, Tensor) else type(t).__name__
            return f"{name} is {got}; expected a dense torch tensor"
        if name != "tokens" and t.dtype not in (*FLOAT_DTYPES, torch.float64):
            return f"{name} is {t.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
    if tokens.dtype not in TOKEN_DTYPES:
        return f"tokens are {tokens.dtype}; expected a torch.int64 or torch.int32 tensor"
    if not tokens.dim() and dwpe is not None:
        return "tokens have shape (); expected (..., T), whose last dimension counts positions"
    for name, t in tensors.items():
        if t is not None and t.device != tokens.device:
            return f"{name} is on {t.device}, tokens on {tokens.device}; expected one device"
    if dout.dim() < 1 or dout.shape[:-1] != tokens.shape:
        return (
            f"dout has shape {tuple(dout.shape)};"
            f" expected {(*tokens.shape, 'C')}, that of tokens and the channels"
        )
    positions = tokens.shape[-1] if tokens.dim() else 1
    for name, t, least in (("dwte", dwte, 1), ("dwpe", dwpe, positions)):
        if t is None:
            continue
        if t.dim() != 2 or t.shape[1] != dout.shape[-1] or len(t) < least:
            rows = "V" if name == "dwte" else f"at least {least}"
            return f"{name} has shape {tuple(t.shape)}; expected ({rows}, {dout.shape[-1]})"
        if problem := problem_of_sums(name, t):
            return problem
    if dwte is not None and dwpe is not None and overlap(dwte, dwpe):
        return "dwte and dwpe overlap in memory; expected two tensors of their own"
    return None


def range_on_host(tokens: Tensor) -> tuple[int, int] | None:
    """The lowest and the highest token, or None without tokens that the host can read.

    It cannot read tokens on a GPU, without memory (meta, fake), or in a recording.

    Args:
        tokens: integers, any shape.
    """
    if not tokens.numel() or not readable(tokens):
        return None
    low, high = torch.aminmax(tokens)
    return int(low), int(high)


def check_range(tokens: Tensor, vocab: int):
    """Refuse tokens outside of 0 .. vocab - 1, where the host can see them (range_on_host).

    Args:
        tokens: integers, any shape.
        vocab: number of different tokens.

    Raises:
        ArgumentError: for the first such token, with its position.
    """
    seen = range_on_host(tokens)
    if seen is not None and (seen[0] < 0 or seen[1] >= vocab):
        invalid = (tokens < 0) | (tokens >= vocab)
        index = tuple(invalid.nonzero()[0].tolist())
        raise ArgumentError(
            f"token {int(tokens[index])} at {index} of tokens {tuple(tokens.shape)}"
            f" is out of range; expected 0 to {vocab - 1}"
        )


@torch.no_grad()
def add_gradients(dwte, dwpe, dout, segments):
    """encoder_backward without its checks: by the kernels where they can run, else in torch.

    Args:
        dwte, dwpe, dout: as for encoder_backward.
        segments: of the batch.
    """
    tensors = (dwte, dwpe, dout)
    if takes(dout.device) and all(t is None or t.dtype in FLOAT_DTYPES for t in tensors):
        launch_backward(dwte, dwpe, dout.contiguous().resolve_neg(), segments)
        torch.autograd.graph.increment_version([t for t in (dwte, dwpe) if t is not None])
    else:
        reference_encoder_backward(dwte, dwpe, dout, segments)
