"""The addition of what several ranks have of one range (kernels_cu/peers.cu)."""

import functools

from torch import Tensor

from ..compiler import Kernel
from ..ops import CHUNK, SQUARES_THREADS


@functools.cache
def sum_kernel() -> Kernel:
    return Kernel("peers", "peers_sum", CHUNK=CHUNK, THREADS=SQUARES_THREADS)


def add_ranks(
    own: Tensor,  # (n,) fp32, whole chunks
    others: Tensor,  # (ranks - 1, at least n) fp32, rows 16-byte aligned; of one rank: anything
    rank: int,
    partials: Tensor,  # (at least n / CHUNK,) fp64: sums of squares of own's chunks
    nonfinite: Tensor,  # (ranks, rows) int32: 1 where a rank's chunk is not finite
    row: int,  # of nonfinite, of own's first chunk
):
    """own += others, in the order of the ranks."""
    if not len(own):
        return
    sum_kernel()[len(own) // CHUNK, SQUARES_THREADS](
        own,
        partials,
        nonfinite.view(-1)[row:],
        others,
        rank,
        len(nonfinite),
        nonfinite.shape[1],
        others.stride(0) // 4,
    )
