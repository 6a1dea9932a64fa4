"""What a right answer costs beside the solution: accesses of a traced run, operations of torch.

cost_of(simt.trace(kernel[4, 256], ...)).reads
remarks(mine, theirs)        # what an honest reader of the numbers would say
# ["one thread did all the work: it makes 1,200 accesses; no thread of the solution makes
# more than 2"]
"""

from dataclasses import dataclass

import numpy as np

from ...simt import ATOMIC, READ, Trace, groups

# An answer is told when it reads, or writes, this many times the bytes of the solution.
MORE = 1.5
# The same for the accesses of its busiest thread, and for operations of torch.
BUSIER = 4
MORE_OPERATIONS = 10
BYTES = "bytes read and written"


@dataclass(frozen=True)
class Cost:
    """Accesses of one launch; one of several elements, such as a float4, counts once."""

    # of global memory
    reads: int
    writes: int
    read_bytes: int
    written_bytes: int
    # of any memory
    atomics: int
    # of shared memory, of any kind
    shared: int
    # accesses of the thread that makes most, of any memory and kind
    busiest: int
    # threads that access anything, in the launch and in the block that has most of them
    threads: int
    threads_of_a_block: int


def cost_of(trace: Trace) -> Cost:
    """The cost of a traced launch."""
    events = trace.known()
    in_shared = np.array([t.space == "shared" for t in trace.tensors] or [False])[events["tensor"]]
    kinds, sizes = events["kind"][~in_shared], events["bytes"][~in_shared]
    is_write = (kinds != READ) & (kinds != ATOMIC)
    order, group = groups(events["block"], events["thread"])
    first = order[np.diff(group, prepend=-1) > 0]
    of_blocks = np.bincount(events["block"][first])
    return Cost(
        reads=int((kinds == READ).sum()),
        writes=int(is_write.sum()),
        read_bytes=int(sizes[kinds == READ].sum()),
        written_bytes=int(sizes[is_write].sum()),
        atomics=int((events["kind"] == ATOMIC).sum()),
        shared=int(in_shared.sum()),
        busiest=int(np.bincount(group).max(initial=0)),
        threads=len(first),
        threads_of_a_block=int(of_blocks.max(initial=0)),
    )


def table(mine: Cost, theirs: Cost) -> list[tuple[str, int, int]]:
    """(what is counted, this answer, the solution), without rows that are 0 for both."""
    rows = [
        ("reads", mine.reads, theirs.reads),
        ("writes", mine.writes, theirs.writes),
        (
            BYTES,
            mine.read_bytes + mine.written_bytes,
            theirs.read_bytes + theirs.written_bytes,
        ),
        ("atomic updates", mine.atomics, theirs.atomics),
        ("accesses to shared memory", mine.shared, theirs.shared),
        ("accesses at most by one thread", mine.busiest, theirs.busiest),
    ]
    return [row for row in rows if row[1] or row[2]]


def remarks(mine: Cost, theirs: Cost) -> list[str]:
    """Where a right answer does much more than the solution does, in words; often empty."""
    sentences = []
    limit = f"no thread of the solution makes more than {theirs.busiest:,}"
    accesses = mine.reads + mine.writes + mine.atomics + mine.shared
    their_accesses = theirs.reads + theirs.writes + theirs.atomics + theirs.shared
    # how many times the accesses of the solution a thread would make if all did the same
    share = max(accesses / max(their_accesses, 1), 1.0)
    if mine.threads == 1 < theirs.threads:
        words = f"one thread did all the work: it makes {mine.busiest:,} accesses"
    elif mine.threads_of_a_block == 1 < theirs.threads_of_a_block:
        words = (
            f"one thread of each block did all the work: it makes up to {mine.busiest:,} accesses"
        )
    elif mine.busiest >= BUSIER * share * theirs.busiest:
        words = f"its busiest thread makes {mine.busiest:,} accesses"
    else:
        words = ""
    if words:
        sentences.append(f"{words}; {limit}")
    for verb, what, count, their_count in (
        ("reads", "bytes", mine.read_bytes, theirs.read_bytes),
        ("writes", "bytes", mine.written_bytes, theirs.written_bytes),
        ("makes", "atomic updates", mine.atomics, theirs.atomics),
    ):
        if count and not their_count:
            sentences.append(f"it {verb} {count:,} {what}, the solution none")
        elif count >= MORE * their_count and count:
            times = f"{count / their_count:,.1f}".removesuffix(".0")
            sentences.append(
                f"it {verb} {times} times the {what} of the solution "
                f"({count:,} and {their_count:,})"
            )
    return sentences
