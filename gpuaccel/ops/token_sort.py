"""Which rows of a batch belong to which token: a stable sort, and the rows of each token in pieces of at most 32.

    >>> found = ga.find_segments(tokens, vocab=50257)      # on a GPU: launches alone, five here; nothing waits, may be captured
    >>> found.order                                        # (N, 2) int32: row and token, sorted by token, equal tokens by row
    >>> found.pieces                                       # (N,) int32: what begins at each place (see kernels_cu/segments.cu)

A token's rows are always added in the same order and cut from its own first row on: their sum depends on these rows alone.
Source: least-significant-digit radix sort as in Knuth, volume 3, 5.2.5; ranks within a warp as in Merrill and Grimshaw, 2011.
"""

import contextlib
import functools

import torch
from torch import Tensor

from ..backends import takes
from ..compiler.kernel import Kernel
from ..errors import ArgumentError

PIECE, THREADS, MOST = 32, 256, 2**31 - 1  # as in segments.cu; rows and tokens below 2^31
INVALID = -(2**31)  # added to a row whose token was out of range
TOKEN = {torch.int64: "long long", torch.int32: "int"}


class Segments:
    """order and pieces of one batch of n tokens out of `vocab`, views of one int32 buffer (which is what autograd keeps). left_out: the
    token whose rows count for nothing, -1: none."""

    __slots__ = ("buffer", "n", "vocab", "left_out")

    def __init__(self, buffer: Tensor, n: int, vocab: int, left_out: int = -1):
        self.buffer, self.n, self.vocab, self.left_out = buffer, n, vocab, left_out

    order = property(lambda self: self.buffer[: 2 * self.n].view(-1, 2))
    pieces = property(lambda self: self.buffer[2 * self.n : 3 * self.n])

    def runs(self) -> "list[tuple[int, Tensor]]":
        """(token, its rows in the order in which they are added) of every token that counts. Waits for the device."""
        pieces, (row, token) = self.pieces.tolist(), self.order.long().cpu().unbind(1)
        last = max(
            (i for i, kind in enumerate(pieces) if kind), default=None
        )  # what is left out comes last
        kept = 0 if last is None else last + (pieces[last] - 1) % PIECE + 1
        values, counts = torch.unique_consecutive(token[:kept], return_counts=True)
        return list(zip(values.tolist(), (row[:kept] & MOST).split(counts.tolist())))


# ---- reference ------------------------------------------------------------------------------------------------------


def reference_segments(tokens: Tensor, vocab: int, left_out: int = -1) -> Segments:
    """The definition, in torch, on any device. tokens: integers, any shape."""
    token = tokens.reshape(-1).long()
    valid = (token >= 0) & (token < vocab)
    token, row = torch.where(valid & (token == left_out), vocab, torch.where(valid, token, 0)).sort(
        stable=True
    )
    _, run, counts = torch.unique_consecutive(token, return_inverse=True, return_counts=True)
    rows, start = (
        counts[run],
        (counts.cumsum(0) - counts)[run],
    )  # of the run that each place belongs to
    nth = torch.arange(len(token), device=token.device) - start
    piece = (rows - nth).clamp(max=PIECE)
    kind = torch.where(rows <= PIECE, piece, torch.where(nth == 0, -rows, PIECE + piece))
    kind = torch.where((nth % PIECE == 0) & (token < vocab), kind, 0)
    pairs = torch.stack([torch.where(valid[row], row, row + INVALID), token], 1)
    return Segments(torch.cat([pairs.flatten(), kind]).int(), len(token), vocab, left_out)


# ---- launchers ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel(name: str, token: torch.dtype, bits: int, keys: int) -> Kernel:
    return Kernel(
        "segments", name, TOKEN_T=TOKEN[token], BITS=bits, KEYS=keys, THREADS=THREADS, PIECE=PIECE
    )


def segment_kernels(tokens: Tensor, vocab: int) -> "list[Kernel]":
    """The kernels of a sort of these tokens: count, scatter, pieces."""
    passes = -(-vocab.bit_length() // 9)
    bits, keys = 8 if vocab.bit_length() <= 8 * passes else 9, 4 if tokens.numel() <= 2**17 else 16
    return [
        _kernel(f"segments_{name}", tokens.dtype, bits, keys)
        for name in ("count", "scatter", "pieces")
    ]


def launch_segments(
    tokens: Tensor, vocab: int, left_out: int = -1, stream=None
) -> "tuple[Segments, Tensor]":
    """segments_count and segments_scatter for each digit, then segments_pieces. tokens: contiguous, 1 to 2^31 - 1 of them.

    stream: a torch.cuda.Stream to launch on beside the current one, which has to wait for it before it uses the result or lets go of the
    second value, the memory that the sort works in."""
    n = tokens.numel()
    count, scatter, pieces = segment_kernels(tokens, vocab)
    bits, blocks = int(count.defines["BITS"]), -(-n // (THREADS * int(count.defines["KEYS"])))
    found, scratch = (
        torch.empty(size, dtype=torch.int32, device=tokens.device)
        for size in (3 * n, 2 * n + (blocks << bits))
    )
    found, spare, counts = (
        Segments(found, n, vocab, left_out),
        scratch[: 2 * n].view(-1, 2),
        scratch[2 * n :],
    )
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        shifts, pairs = range(0, vocab.bit_length(), bits), None
        for i, shift in enumerate(shifts):
            to = (
                spare if (len(shifts) - i) % 2 == 0 else found.order
            )  # the last pass writes the result
            count[blocks, THREADS](counts, tokens, pairs, n, vocab, left_out, shift)
            scatter[blocks, THREADS](to, counts, tokens, pairs, n, vocab, left_out, shift)
            pairs = to
        pieces[-(-n // 256), 256](found.pieces, found.order, n, vocab)
    return found, scratch


# ---- public ---------------------------------------------------------------------------------------------------------


@torch._disable_dynamo  # lazily, where torch.compiler.disable would import half of torch
def find_segments(tokens: Tensor, vocab: int, padding_idx: "int | None" = None) -> Segments:
    """The segments of `tokens` (int64 or int32, any shape, fewer than 2^31), for encoder_backward. Rows of padding_idx (negative: counted from
    the end, as nn.Embedding does) are left out.

    A token outside of 0 .. vocab - 1 counts as token 0, its row marked (sign bit). ArgumentError for another dtype, size or padding_idx."""
    check_tokens(tokens, vocab)
    left_out = left_out_token(padding_idx, vocab)
    if takes(tokens.device) and tokens.numel():
        return launch_segments(tokens.contiguous().view(-1), vocab, left_out)[0]
    return reference_segments(tokens, vocab, left_out)


def left_out_token(padding_idx: "int | None", vocab: int) -> int:
    """padding_idx as the kernels know it: 0 .. vocab - 1, or -1 for none."""
    if padding_idx is None:
        return -1
    if not isinstance(padding_idx, int) or not -vocab <= padding_idx < vocab:
        raise ArgumentError(
            f"padding_idx is {padding_idx!r}; expected None, or a number from {-vocab} to {vocab - 1}"
        )
    return padding_idx % vocab


def check_tokens(tokens: Tensor, vocab: int):
    """Raise ArgumentError unless these are token numbers that the kernels can sort; what they are is not looked at."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in TOKEN:
        raise ArgumentError(
            f"tokens are {tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__}; expected a torch.int64 or torch.int32 tensor"
        )
    if tokens.numel() > MOST:
        raise ArgumentError(f"there are {tokens.numel():,} tokens; expected fewer than 2^31")
    if not 0 < vocab < MOST:
        raise ArgumentError(f"the vocabulary has {vocab:,} tokens; expected 1 to 2^31 - 2")
