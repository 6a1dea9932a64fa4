"""The encoder, tokens -> wte[token] + wpe[position], with a backward that adds in a fixed order and straight into the sums.

    >>> ga.encoder_backward(dwte, dwpe, dout, tokens)           # adds into dwte (V, C) and dwpe (T, C), fp32, bf16 or fp16

The rows of a token are added as ops/token_sort.py finds them: in the order of their positions, in pieces of 32 that begin with the token's first
row; the pieces of a longer run by eight warps in turn, then the warps' sums in order. So two runs have the same bits, and a token's gradient
does not depend on what else is in the batch.

A token out of range is never used as an address: forward gives NaN for it and counts it, and row 0 of dwte becomes NaN, so that ga.AdamW skips
the step (other optimizers see NaN). On a CPU without backend simt the fixed order is kept in torch, slower than torch's own sums. Modules: nn/embedding.py.
Source: llm.c's encoder_backward (buckets made by the CPU), here with segments found on the device.
"""

import functools
import struct

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import kernel
from ..compiler.kernel import Kernel
from ..errors import ArgumentError
from .accumulate import overlap
from .rounding import reference_random_bits, reference_round
from .token_sort import MOST, PIECE, TOKEN, Segments, check_tokens, find_segments, left_out_token

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
THREADS, QUADS, COMBINE, SPAN = 128, 1, 16, 8  # as in encoder.cu
NO_ROUNDING = (0, 0, 0, 0)  # seed, address added to the step, step, micro-batch
_ROUNDING = struct.Struct("QQii").pack


# ---- reference ------------------------------------------------------------------------------------------------------


def reference_encoder(tokens: Tensor, wte: Tensor, wpe: "Tensor | None" = None) -> Tensor:
    """wte[token] + wpe[position], NaN for a token out of range. tokens: (..., T); wte: (V, C); wpe: (at least T, C)."""
    valid = (tokens >= 0) & (tokens < len(wte))
    out = torch.where(valid[..., None], wte[torch.where(valid, tokens, 0)], torch.nan)
    return out if wpe is None else out + wpe[: tokens.shape[-1]]


def reference_encoder_backward(
    dwte: "Tensor | None",
    dwpe: "Tensor | None",
    dout: Tensor,
    segments: Segments,
    *,
    by_count: bool = False,
    rounding=None,
):
    """The sums in the kernels' order, in torch: fp32 (fp64 where a tensor is), any device; the kernels give the same bits.

    dout: (..., T, C). by_count: divide by the number of rows. rounding: (seed, step, micro-batch) for bf16; None: to the nearest."""
    wide = (
        torch.float64
        if torch.float64 in {t.dtype for t in (dwte, dwpe, dout) if t is not None}
        else torch.float32
    )
    grad = dout.reshape(-1, dout.shape[-1]).to(wide)
    if dwte is not None and segments.n:
        row, token = segments.order.long().unbind(1)
        grad_of = torch.where(
            (row < 0)[:, None], torch.nan, grad[row & MOST]
        )  # as they will be added
        head = segments.pieces.nonzero()[:, 0]
        kind = segments.pieces[head].long()
        rows = torch.where(kind < 0, PIECE, torch.where(kind > PIECE, kind - PIECE, kind))
        sums = _in_order(grad_of, head, rows, 1)
        runs = ((kind > 0) & (kind <= PIECE) | (kind < 0)).nonzero()[
            :, 0
        ]  # the first piece of each run
        length = kind[runs].abs()
        count = -(-length // PIECE)
        total = sums[runs]
        long = (count > 1).nonzero()[:, 0]
        if len(long):
            warps = [
                _in_order(
                    sums,
                    (runs[long] + w).clamp(max=len(sums) - 1),
                    (-(-(count[long] - w) // COMBINE)).clamp(min=1),
                    COMBINE,
                )
                for w in range(COMBINE)
            ]
            combined = warps[0]
            for w in range(1, COMBINE):
                combined = torch.where((count[long] > w)[:, None], combined + warps[w], combined)
            total[long] = combined
        if by_count:
            total = total / length[:, None]
        _add(dwte, token[head[runs]], total, rounding, 0)
    if dwpe is not None and dout.numel():
        T = dout.shape[-2]
        grad = grad.view(-1, T, grad.shape[-1])
        total = grad[0]
        for more in grad[1:]:
            total = total + more
        _add(dwpe, torch.arange(T, device=dwpe.device), total, rounding, 1)


def _in_order(rows: Tensor, start: Tensor, count: Tensor, step: int) -> Tensor:
    """rows[start] + rows[start + step] + ..., `count` of them each, one after the other. count: 1 and more."""
    count, order = count.sort(descending=True)  # those that go on stand in front
    start, total = start[order], rows[start[order]]
    live = (
        (
            count[None]
            > torch.arange(1, int(count[0]) if len(count) else 1, device=count.device)[:, None]
        )
        .sum(1)
        .tolist()
    )
    for r, many in enumerate(live, 1):
        total[:many] += rows[start[:many] + r * step]
    return torch.empty_like(total).index_copy_(0, order, total)


def _add(sums, at, total, rounding, which):
    value = sums[at].to(total.dtype) + total
    if rounding is not None and sums.dtype == torch.bfloat16:
        seed, step, micro = rounding
        C, group = sums.shape[1], -(-sums.shape[1] // 4) * 4
        noise = (
            reference_random_bits(seed, 2**31 + 2 * micro + which, len(sums) * group, int(step))
            .view(-1, group)[:, :C]
            .to(sums.device)
        )
        sums[at] = reference_round(value, noise[at])
    else:
        sums[at] = value.to(sums.dtype)


def reference_buckets(tokens: Tensor, C: int, lane: int) -> "tuple[Tensor, Tensor]":
    """llm.c's buckets, made on the CPU: (buckets (n, 4) int32: first item, how many, token, channel group; items int32: rows).

    lane: channels per lane, 16 bytes of dout. One bucket for each token and group of 32 * lane channels, the fullest first; equally full ones by
    token and group (llm.c leaves that to an unstable sort)."""
    groups = -(-C // (32 * lane))
    token, row = tokens.reshape(-1).cpu().long().sort(stable=True)
    values, counts = torch.unique_consecutive(token, return_counts=True)
    fullest = counts.argsort(stable=True, descending=True)
    start = (counts.cumsum(0) - counts)[fullest]
    columns = [t.repeat_interleave(groups) for t in (start, counts[fullest], values[fullest])]
    return torch.stack([*columns, torch.arange(groups).repeat(len(values))], 1).int(), row.int()


# ---- launchers ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel(name: str, **macros) -> Kernel:
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
    """Can rows of C elements be read four at a time?"""
    return int(
        C % 4 == 0
        and all(t.data_ptr() % (4 * t.element_size()) == 0 for t in tensors if t is not None)
    )


def launch_forward(tokens: Tensor, wte: Tensor, wpe: "Tensor | None", invalid: Tensor) -> Tensor:
    """encoder_forward. tokens, wte, wpe: contiguous, not empty; wte and wpe of one dtype."""
    (V, C), rows = wte.shape, tokens.numel()
    out = torch.empty(*tokens.shape, C, dtype=wte.dtype, device=wte.device)
    run = _kernel(
        "encoder_forward",
        TOKEN_T=TOKEN[tokens.dtype],
        PARAM_T=TYPES[wte.dtype],
        WHOLE=_whole(C, wte, wpe),
    )
    run[-(-rows // (THREADS // 32)), THREADS](
        out, tokens, wte, wpe, invalid, rows, tokens.shape[-1] if tokens.dim() else 1, C, V
    )
    return out


def launch_backward(
    dwte: "Tensor | None",
    dwpe: "Tensor | None",
    dout: Tensor,
    segments: Segments,
    by_count: bool = False,
    rounding=None,
):
    """encoder_backward_v3 and encoder_combine_v3 for dwte, encoder_wpe for dwpe. All contiguous, dout (rows, C) or (B, T, C), not empty.

    rounding: (seed, step, micro-batch) for bf16 sums; the step a number or a one-element int32 tensor on the device."""
    C = dout.shape[-1]
    seed, step, micro = rounding or (0, 0, 0)
    later = step if isinstance(step, Tensor) else None
    packed = _ROUNDING(
        seed, later.data_ptr() if later is not None else 0, 0 if later is not None else step, micro
    )
    macros = lambda sums: dict(
        GRAD_T=TYPES[dout.dtype],
        ACC_T=TYPES[sums.dtype],
        WHOLE=_whole(C, sums, dout),
        STOCHASTIC=int(rounding is not None and sums.dtype == torch.bfloat16),
        BY_COUNT=int(by_count),
    )
    if dwte is not None:
        n, windows = segments.n, -(-segments.n // PIECE)
        partials = torch.empty(2 * windows, -(-C // 4) * 4, device=dout.device)
        _kernel("encoder_backward_v3", **macros(dwte))[
            (-(-windows // (THREADS // 32)), -(-C // (128 * QUADS))), THREADS
        ](dwte, partials, dout, segments.order, segments.pieces, n, C, packed, tensors=[later])
        _kernel("encoder_combine_v3", **macros(dwte))[
            (-(-windows // SPAN), -(-C // 128)), 32 * COMBINE
        ](dwte, partials, segments.order, segments.pieces, n, C, packed, tensors=[later])
    if dwpe is not None:
        T = dout.shape[-2]
        _kernel("encoder_wpe", **macros(dwpe))[-(-T * -(-C // 4) // THREADS), THREADS](
            dwpe, dout, dout.numel() // (T * C), T, C, packed, tensors=[later]
        )


def launch_atomic(dwte: Tensor, dwpe: Tensor, dout: Tensor, tokens: Tensor):
    """encoder_backward_v1: to be seen, not used. dwte, dwpe: fp32; everything contiguous; dout (B, T, C)."""
    C = dout.shape[-1]
    _kernel("encoder_backward_v1", TOKEN_T=TOKEN[tokens.dtype], GRAD_T=TYPES[dout.dtype])[
        -(-dout.numel() // 256), 256
    ](dwte, dwpe, dout, tokens, tokens.numel(), tokens.shape[-1], C, len(dwte))


def launch_buckets(dwte: Tensor, dout: Tensor, buckets: Tensor, items: Tensor):
    """encoder_backward_v2 over buckets that have been copied to the device. C is a multiple of 16 bytes of dout."""
    _kernel("encoder_backward_v2", GRAD_T=TYPES[dout.dtype], ACC_T=TYPES[dwte.dtype])[
        len(buckets), 256
    ](dwte, dout, buckets, items, dout.shape[-1], _ROUNDING(*NO_ROUNDING))


# ---- public: the gradients ------------------------------------------------------------------------------------------


@torch._disable_dynamo  # lazily, where torch.compiler.disable would import half of torch
def encoder_backward(
    dwte: "Tensor | None",
    dwpe: "Tensor | None",
    dout: Tensor,
    tokens: Tensor,
    *,
    segments: "Segments | None" = None,
    padding_idx: "int | None" = None,
    scale_grad_by_freq: bool = False,
    seed: "int | None" = None,
    step=0,
    micro_batch: int = 0,
):
    """Add the gradients of wte and wpe into dwte and dwpe. No host synchronisation where the tokens are on a GPU; may be captured.

    tokens: (..., T) int64 or int32; dout: (..., T, C) fp32, bf16 or fp16, any strides; dwte: (V, C) and dwpe: (at least T, C), contiguous,
    fp32, bf16 or fp16, either may be None. segments: ga.find_segments(tokens, V, padding_idx), where they are known already.
    seed: bf16 sums are rounded stochastically, keyed on (seed, element, step, micro_batch); None: to the nearest. step: a number, or an int32
    tensor of one element on the device, which a captured call reads anew. padding_idx, scale_grad_by_freq: as nn.Embedding's.
    Raises ArgumentError, with nothing changed, for a wrong dtype, shape or device, sums that are not contiguous or require grad, segments of
    another number of tokens, vocabulary or padding_idx, and on the CPU for a token out of range; on a GPU such a token makes row 0 of dwte NaN."""
    problem = _problem(dwte, dwpe, dout, tokens) or _problem_of_noise(
        seed, step, micro_batch, tokens
    )
    if problem:
        raise ArgumentError(problem)
    if dwte is not None:
        check_tokens(tokens, len(dwte))
        check_range(tokens, len(dwte))
        what = [(tokens.numel(), len(dwte), left_out_token(padding_idx, len(dwte)))]
        segments = segments or find_segments(tokens, len(dwte), padding_idx)
        what += [(segments.n, segments.vocab, segments.left_out)]
        if what[0] != what[1]:
            expected, got = (
                "{} tokens out of {}, {} left out".format(*numbers) for numbers in what
            )
            raise ArgumentError(
                f"segments are of {got} (-1: none); expected those of these {expected}"
            )
    if dout.numel():
        add_gradients(
            dwte,
            dwpe,
            dout,
            segments,
            scale_grad_by_freq,
            None if seed is None else (seed, step, micro_batch),
        )


def _problem(dwte, dwpe, dout, tokens) -> "str | None":
    given = {"dwte": dwte, "dwpe": dwpe, "dout": dout, "tokens": tokens}
    for name, t in given.items():
        if t is None and name in ("dwte", "dwpe"):
            continue
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            return f"{name} is {t.layout if isinstance(t, Tensor) else type(t).__name__}; expected a dense torch tensor"
        if name != "tokens" and t.dtype not in TYPES and t.dtype != torch.float64:
            return f"{name} is {t.dtype}; expected torch.float32, torch.bfloat16 or torch.float16"
    if tokens.dtype not in TOKEN:
        return f"tokens are {tokens.dtype}; expected a torch.int64 or torch.int32 tensor"
    if not tokens.dim() and dwpe is not None:
        return "tokens have shape (); expected (..., T), whose last dimension counts positions"
    for name, t in given.items():
        if t is not None and t.device != tokens.device:
            return f"{name} is on {t.device}, tokens on {tokens.device}; expected one device"
    if dout.dim() < 1 or dout.shape[:-1] != tokens.shape:
        return f"dout has shape {tuple(dout.shape)}; expected {(*tokens.shape, 'C')}, that of tokens and the channels"
    for name, t, least in (
        ("dwte", dwte, 1),
        ("dwpe", dwpe, tokens.shape[-1] if tokens.dim() else 1),
    ):
        if t is None:
            continue
        if t.dim() != 2 or t.shape[1] != dout.shape[-1] or len(t) < least:
            return f"{name} has shape {tuple(t.shape)}; expected ({'V' if name == 'dwte' else f'at least {least}'}, {dout.shape[-1]})"
        if not t.is_contiguous():
            return f"{name} has shape {tuple(t.shape)} with strides {t.stride()}; expected a contiguous tensor, which is added into"
        if t.requires_grad and torch.is_grad_enabled():
            return f"{name} requires grad; add into a plain buffer, or under torch.no_grad()"
    if dwte is not None and dwpe is not None and overlap(dwte, dwpe):
        return "dwte and dwpe overlap in memory; expected two tensors of their own"
    return None


def _problem_of_noise(seed, step, micro_batch, tokens) -> "str | None":
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        return f"seed is {seed!r}; expected a whole number from 0 to 2^64 - 1"
    if isinstance(step, Tensor):
        if step.dtype != torch.int32 or step.numel() != 1 or step.device != tokens.device:
            return f"step is {step.dtype} of shape {tuple(step.shape)} on {step.device}; expected one torch.int32 on {tokens.device}, or a number"
    elif not (isinstance(step, int) and 0 <= step < 2**31):
        return f"step is {step!r}; expected a whole number from 0 to 2^31 - 1, or an int32 tensor"
    if not (isinstance(micro_batch, int) and 0 <= micro_batch < 2**30):
        return f"micro_batch is {micro_batch!r}; expected a whole number from 0 to 2^30 - 1"
    return None


def check_range(tokens: Tensor, vocab: int):
    """Where the host can see the tokens: ArgumentError for the first one outside of 0 .. vocab - 1, with its position."""
    if (
        not tokens.is_cpu
        or type(tokens) is not Tensor
        or not tokens.numel()
        or torch.compiler.is_compiling()
        or kernel.recorders
    ):
        return  # not there to be looked at: in a GPU's memory, without memory, or in a recording
    wrong = (tokens < 0) | (tokens >= vocab)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"token {int(tokens[tuple(at)])} at {tuple(at)} of tokens {tuple(tokens.shape)} is out of range; expected 0 to {vocab - 1}"
        )


@torch.no_grad()
def add_gradients(dwte, dwpe, dout, segments, by_count, rounding):
    if takes(dout.device) and all(t is None or t.dtype in TYPES for t in (dwte, dwpe, dout)):
        launch_backward(dwte, dwpe, dout.contiguous(), segments, by_count, rounding)
        torch.autograd.graph.increment_version([t for t in (dwte, dwpe) if t is not None])
    else:
        reference_encoder_backward(dwte, dwpe, dout, segments, by_count=by_count, rounding=rounding)
