"""Buckets, as DistributedDataParallel's: ranges of the arena that one collective reduces."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ops import CHUNK
from ..optim.layout import Block


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the arena, which are segments [first, last)."""

    start: int
    stop: int
    first: int
    last: int


def join_blocks(blocks: Sequence[Block], bucket_bytes: float) -> list[Bucket]:
    """Neighbouring blocks of an arena, joined until they have `bucket_bytes` of fp32.

    The last bucket may have less. A block is never cut."""
    buckets = []
    start, first = 0, 0
    for block in blocks:
        if 4 * (block.stop - start) >= bucket_bytes or block.stop == blocks[-1].stop:
            buckets.append(Bucket(start, block.stop, first, block.last))
            start, first = block.stop, block.last
    return [b for b in buckets if b.stop > b.start] or buckets[-1:]


def equal_ranges(start: int, stop: int, world: int) -> list[tuple[int, int]]:
    """[start, stop) of the arena as one range per rank, as equal as whole chunks allow."""
    chunks = (stop - start) // CHUNK
    ends = [start + chunks * r // world * CHUNK for r in range(world + 1)]
    return list(zip(ends, ends[1:]))
