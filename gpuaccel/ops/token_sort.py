"""Which rows of a batch belong to which token: a stable sort, cut into pieces of at most 32 rows.

    segments = ga.ops.find_segments(tokens, vocab=50257)
    segments.order  # (N, 2) int32: row and token, sorted by token, equal tokens by row
    segments.pieces  # (N,) int32: what begins at each place (see kernels_cu/segments.cu)

On a GPU this is a few kernel launches, five for this vocabulary; nothing waits for the host, and
the call may be captured. A token's rows are always added in the same order, in pieces that begin
with the token's own first row, so their sum depends on these rows alone.

Source: least-significant-digit radix sort as in Knuth, volume 3, 5.2.5; ranks within a warp as in
Merrill and Grimshaw, 2011.
"""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import C_TYPES, Kernel
from ..errors import ArgumentError

PIECE, THREADS = 32, 256  # as in segments.cu
MAX_TOKENS = 2**31 - 1  # rows and tokens are numbers below it
INVALID = -(2**31)  # added to a row whose token was out of range
TOKEN_DTYPES = (torch.int64, torch.int32)


@dataclass(eq=False)
class Segments:
    """order and pieces of one batch of n tokens out of `vocab`.

    Both are views of one int32 buffer, which is what autograd keeps.

    Attributes:
        buffer: (3 n,) int32: order, then pieces.
        n: tokens in the batch.
        vocab: number of different tokens.
        left_out: the token whose rows count for nothing; -1: none.
    """

    buffer: Tensor
    n: int
    vocab: int
    left_out: int = -1

    order = property(lambda self: self.buffer[: 2 * self.n].view(-1, 2))
    pieces = property(lambda self: self.buffer[2 * self.n : 3 * self.n])


# ---- reference -----------------------------------------------------------------------------------


def reference_segments(tokens: Tensor, vocab: int, left_out: int = -1) -> Segments:
    """The definition of find_segments, in torch.

    Args:
        tokens: integers, any shape and device.
        vocab: number of different tokens.
        left_out: the token whose rows count for nothing; -1: none.
    """
    token = tokens.reshape(-1).long()
    valid = (token >= 0) & (token < vocab)
    key = torch.where(valid, torch.where(token == left_out, vocab, token), 0)
    token, row = key.sort(stable=True)
    _, rows = torch.unique_consecutive(token, return_counts=True)
    head = rows.cumsum(0) - rows
    if len(token) and token[-1] == vocab:
        head, rows = head[:-1], rows[:-1]
    # Of each piece: its run, and its index in the run.
    count = -(-rows // PIECE)
    run = torch.arange(len(rows), device=token.device).repeat_interleave(count)
    index = torch.arange(len(run), device=token.device) - (count.cumsum(0) - count)[run]
    rest = rows[run] - PIECE * index
    first = torch.where(rest > PIECE, -rest, rest)
    kind = torch.where(index == 0, first, PIECE + rest.clamp(max=PIECE))
    pieces = torch.zeros_like(token).index_copy_(0, head[run] + PIECE * index, kind)
    row = torch.where(valid[row], row, row + INVALID)
    buffer = torch.cat([torch.stack([row, token], 1).flatten(), pieces]).int()
    return Segments(buffer, len(token), vocab, left_out)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def sort_kernel(name: str, dtype: torch.dtype, bits: int, keys: int) -> Kernel:
    """A kernel of segments.cu for tokens of `dtype`: `bits` per digit, `keys` tokens per thread."""
    return Kernel(
        "segments",
        name,
        TOKEN_T=C_TYPES[dtype],
        BITS=bits,
        KEYS=keys,
        THREADS=THREADS,
        PIECE=PIECE,
    )


def segment_kernels(tokens: Tensor, vocab: int) -> list[Kernel]:
    """The kernels of a sort of these tokens: count, scatter, pieces."""
    passes = -(-vocab.bit_length() // 9)
    bits = 8 if vocab.bit_length() <= 8 * passes else 9
    keys = 4 if tokens.numel() <= 2**17 else 16
    return [
        sort_kernel(f"segments_{name}", tokens.dtype, bits, keys)
        for name in ("count", "scatter", "pieces")
    ]


def launch_segments(
    tokens: Tensor, vocab: int, left_out: int = -1, stream=None
) -> tuple[Segments, Tensor]:
    """Launch segments_count and segments_scatter for each digit, then segments_pieces.

    Args:
        tokens: contiguous, 1 to 2^31 - 1 of them.
        vocab: number of different tokens.
        left_out: the token whose rows count for nothing; -1: none.
        stream: a torch.cuda.Stream to launch on beside the current one; None: the current stream.

    Returns:
        The segments and the memory that the sort works in. The current stream has to wait for
        `stream` before it uses the former or frees the latter.
    """
    n = tokens.numel()
    count, scatter, pieces = segment_kernels(tokens, vocab)
    bits = int(count.defines["BITS"])
    blocks = -(-n // (THREADS * int(count.defines["KEYS"])))
    buffer, scratch = (
        torch.empty(size, dtype=torch.int32, device=tokens.device)
        for size in (3 * n, 2 * n + (blocks << bits))
    )
    segments = Segments(buffer, n, vocab, left_out)
    spare = scratch[: 2 * n].view(-1, 2)
    counts = scratch[2 * n :]
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        shifts = range(0, vocab.bit_length(), bits)
        pairs = None
        for i, shift in enumerate(shifts):
            # In turn, so that the last pass writes the result.
            out = spare if (len(shifts) - i) % 2 == 0 else segments.order
            count[blocks, THREADS](counts, tokens, pairs, n, vocab, left_out, shift)
            scatter[blocks, THREADS](out, counts, tokens, pairs, n, vocab, left_out, shift)
            pairs = out
        pieces[-(-n // 256), 256](segments.pieces, segments.order, n, vocab)
    return segments, scratch


# ---- public --------------------------------------------------------------------------------------


# torch._disable_dynamo is lazy; torch.compiler.disable would import half of torch.
@torch._disable_dynamo
def find_segments(tokens: Tensor, vocab: int, padding_idx: int | None = None) -> Segments:
    """The segments of a batch of tokens, for encoder_backward.

    Args:
        tokens: int64 or int32, any shape, fewer than 2^31. A token outside of 0 .. vocab - 1 counts
            as token 0, its row marked by the sign bit.
        vocab: number of different tokens.
        padding_idx: token whose rows are left out; negative: counted from the end, as in
            nn.Embedding.

    Raises:
        ArgumentError: for another dtype, size or padding_idx, and on the meta device.
    """
    check_tokens(tokens, vocab)
    left_out = left_out_token(padding_idx, vocab)
    if tokens.is_meta:
        raise ArgumentError("tokens are on meta, where they have no values to sort")
    if takes(tokens.device) and tokens.numel():
        return launch_segments(tokens.contiguous().view(-1), vocab, left_out)[0]
    return reference_segments(tokens, vocab, left_out)


def left_out_token(padding_idx: int | None, vocab: int) -> int:
    """padding_idx as the kernels know it: 0 .. vocab - 1, or -1 for none.

    Args:
        padding_idx: as nn.Embedding's; negative ones count from the end.
        vocab: number of tokens.

    Raises:
        ArgumentError: for one that is no token's number.
    """
    if padding_idx is None:
        return -1
    if not isinstance(padding_idx, int) or not -vocab <= padding_idx < vocab:
        raise ArgumentError(
            f"padding_idx is {padding_idx!r};"
            f" expected None, or a number from {-vocab} to {vocab - 1}"
        )
    return padding_idx % vocab


def check_tokens(tokens: Tensor, vocab: int):
    """Refuse tokens that the kernels cannot sort; their values are not read.

    Args:
        tokens: int64 or int32, any shape, fewer than 2^31.
        vocab: 1 to 2^31 - 2.

    Raises:
        ArgumentError: for another dtype or number.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in TOKEN_DTYPES:
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError(f"tokens are {got}; expected a torch.int64 or torch.int32 tensor")
    if tokens.numel() > MAX_TOKENS:
        raise ArgumentError(f"there are {tokens.numel():,} tokens; expected fewer than 2^31")
    if not 0 < vocab < MAX_TOKENS:
        raise ArgumentError(f"the vocabulary has {vocab:,} tokens; expected 1 to 2^31 - 2")
