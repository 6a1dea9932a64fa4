"""The exercises of notebook 06: deal batches to ranks, fill buckets, add in global order."""

import torch

from .exercises import Exercise, code, whole_number


def _deal_cases(generator):
    for n, ranks in ((2, 2), (9, 2), (10, 4), (1, 1), (64, 8), (257, 3)):
        order = torch.randperm(n, generator=generator)
        # in these two the last rank has none left at the end
        rank = ranks - 1 if n in (9, 10) else whole_number(0, ranks, generator)
        expected = torch.full((-(-n // ranks),), -1)
        mine = order[rank::ranks]
        expected[: len(mine)] = mine
        yield (
            f"{n} batch{'es' * (n > 1)}, rank {rank} of {ranks}",
            (order, rank, ranks),
            expected.double(),
        )


def _blocks_per_bucket(sizes, least):
    counts, blocks, size = [], 0, 0
    for i, block in enumerate(sizes):
        blocks += 1
        size += block
        if size >= least or i == len(sizes) - 1:
            counts.append(blocks)
            blocks = size = 0
    return torch.tensor(counts)


def _bucket_cases(generator):
    some = torch.randint(1, 60, (40,), generator=generator).tolist()
    for label, sizes, least in (
        ("one small block", [3], 10),
        ("each exactly enough", [10, 10, 10], 10),
        ("two make one", [5, 5, 5, 5], 10),
        ("a large one behind a small one", [2, 90, 2, 2], 10),
        ("little is left", [12, 30, 4, 3], 10),
        ("40 blocks", some, 100),
        ("40 blocks, all in one", some, 10_000),
    ):
        yield label, (sizes, least), _blocks_per_bucket(sizes, least).double()


def _blocks_lost(arguments, result):
    """How many blocks a wrong answer has in all buckets, where these are not all blocks."""
    there = len(arguments[0])
    count = result.sum().item()
    if count == there:
        return ""
    return f"its buckets have {count:g} block{'s' * (count != 1)}, but there are {there}"


def _in_turn(grads):
    total = torch.zeros_like(grads[0, 0])
    for micro in grads:
        for grad in micro:
            total = total + grad
    return total


def _ordered_cases(generator):
    for micros, ranks, n in ((1, 2, 1), (2, 2, 255), (3, 2, 1000), (4, 3, 257), (2, 8, 4096)):
        grads = torch.randn(micros, ranks, n, generator=generator) * 1e6
        if micros > 1:
            # the sum is small, and the order of the additions decides its bits
            grads[-1, -1] -= grads.double().sum((0, 1)).float()
        batches = f"{micros} micro-batch{'es' * (micros > 1)}"
        label = f"{ranks} ranks, {batches}, {n:,} element{'s' * (n > 1)}"
        yield label, (grads,), _in_turn(grads).double()


# roundings, of the largest gradient, by which a sum in another order may differ
_ROUNDINGS = 16


def _only_rounded(arguments, result):
    """Whether a wrong sum differs only by roundings, in words."""
    (grads,) = arguments
    right = _in_turn(grads)
    if result.shape != right.shape or result.dtype != right.dtype:
        return ""
    allowed = _ROUNDINGS * torch.finfo(torch.float32).eps * float(grads.abs().max())
    if bool(((result.double() - right.double()).abs() <= allowed).all()):
        return "the difference is as small as a rounding: another order?"
    return ""


_DEAL = """\
def deal(order, rank, ranks):
    mine = order[rank::ranks]
    longest = -(-len(order) // ranks)
    return torch.cat([mine, torch.full((longest - len(mine),), -1)])
"""


_BUCKETS = """\
def fill_buckets(sizes, least):
    counts, blocks, size = [], 0, 0
    for block in sizes:
        blocks += 1
        size += block
        if size >= least:
            counts.append(blocks)
            blocks = size = 0
    if blocks:
        counts.append(blocks)
    return torch.tensor(counts)
"""


_ORDERED = """\
def ordered_sum(grads):
    total = torch.zeros_like(grads[0, 0])
    for m in range(grads.shape[0]):
        for r in range(grads.shape[1]):
            total = total + grads[m, r]
    return total
"""


EXERCISES = {
    e.name: e
    for e in [
        Exercise(
            "deal",
            task=(
                "order: (n) int64, the numbers of n batches, shuffled. Return those of rank "
                "`rank` of `ranks`, dealt in turn: its own place, then every ranks-th. All "
                "ranks get as many; one that has none left gets -1, and no batch goes to two. "
                "What is wrong: some ranks train on the same batch."
            ),
            stub=code(
                """
                def deal(order, rank, ranks):
                    length = -(-len(order) // ranks)        # len(order) / ranks, rounded up
                    twice = torch.cat([order, order])
                    return twice[:length * ranks][rank::ranks]
                """
            ),
            hint=(
                "order[rank::ranks] are its batches. The last ranks may have one batch less than "
                "the others: add -1 there, with torch.cat and torch.full."
            ),
            solution=_DEAL,
            wrong_answers={
                "begins again at the end": _DEAL.replace(
                    "torch.full((longest - len(mine),), -1)", "order[:longest - len(mine)]"
                ),
                "a block for each rank": _DEAL.replace(
                    "order[rank::ranks]",
                    "order[rank * -(-len(order) // ranks):][:-(-len(order) // ranks)]",
                ),
                "drops the tail": code(
                    """
                    def deal(order, rank, ranks):
                        each = len(order) // ranks
                        return order[:each * ranks][rank::ranks]
                    """
                ),
                "not as many": code(
                    """
                    def deal(order, rank, ranks):
                        return order[rank::ranks]
                    """
                ),
                "one too many": _DEAL.replace("-(-len(order) // ranks)", "len(order) // ranks + 1"),
                "everything to everyone": code(
                    """
                    def deal(order, rank, ranks):
                        return order
                    """
                ),
                "fills up with 0": _DEAL.replace("-1)", "0)"),
                "in its own order": _DEAL.replace(
                    "order[rank::ranks]", "order[rank::ranks].sort().values"
                ),
            },
            cases=_deal_cases,
        ),
        Exercise(
            "fill_buckets",
            task=(
                "sizes: bytes of the blocks, in the order in which backward finishes them. Join"
                " neighbours: a bucket is closed as soon as it has `least` bytes; the last one "
                "may have less. Return how many blocks each bucket has, a tensor."
            ),
            stub=code(
                """
                def fill_buckets(sizes, least):
                    counts = []
                    for size in sizes:
                        counts.append(1)                     # yours: when is a bucket closed?
                    return torch.tensor(counts)
                """
            ),
            hint=(
                "Keep two numbers: the blocks and the bytes of the bucket that is open. When the "
                "loop is over, a bucket may still be open. Its blocks have gradients too."
            ),
            solution=_BUCKETS,
            wrong_answers={
                "forgets the rest": _BUCKETS.replace(
                    "    if blocks:\n        counts.append(blocks)\n", ""
                ),
                "more than enough only": _BUCKETS.replace("size >= least", "size > least"),
                "closes before it is full": code(
                    """
                    def fill_buckets(sizes, least):
                        counts, blocks, size = [], 0, 0
                        for block in sizes:
                            if blocks and size + block > least:
                                counts.append(blocks)
                                blocks = size = 0
                            blocks += 1
                            size += block
                        return torch.tensor(counts + [blocks])
                    """
                ),
                "the rest joins the last": _BUCKETS.replace(
                    "    if blocks:\n        counts.append(blocks)\n",
                    (
                        "    if blocks and counts:\n"
                        "        counts[-1] += blocks\n"
                        "    elif blocks:\n"
                        "        counts.append(blocks)\n"
                    ),
                ),
                "in the order of forward": _BUCKETS.replace("in sizes", "in reversed(sizes)"),
                "a bucket for each block": code(
                    """
                    def fill_buckets(sizes, least):
                        return torch.ones(len(sizes))
                    """
                ),
                "all in one": code(
                    """
                    def fill_buckets(sizes, least):
                        return torch.tensor([len(sizes)])
                    """
                ),
                "does not empty the bucket": _BUCKETS.replace(
                    "blocks = size = 0\n    if", "blocks = 0\n    if"
                ),
            },
            cases=_bucket_cases,
            explain=_blocks_lost,
        ),
        Exercise(
            "ordered_sum",
            task=(
                "grads: (M, ranks, n) fp32; grads[m, r] is the gradient of rank r's micro-batch"
                " m, number m * ranks + r of all. Return the sum that one process gets: "
                "beginning with zero, one after the other in global order, in fp32. What is "
                "wrong: each rank adds its own first."
            ),
            stub=code(
                """
                def ordered_sum(grads):
                    return grads.sum(0).sum(0)
                """
            ),
            hint=(
                "Two loops: micro-batches outside, ranks inside, and one running total. Another "
                "order rounds differently. The gradients of the check nearly cancel, so that the "
                "difference is large."
            ),
            solution=_ORDERED,
            wrong_answers={
                "each rank first": code(
                    """
                    def ordered_sum(grads):
                        return grads.sum(0).sum(0)
                    """
                ),
                "each round first": code(
                    """
                    def ordered_sum(grads):
                        total = torch.zeros_like(grads[0, 0])
                        for micro in grads:
                            round = torch.zeros_like(total)
                            for grad in micro:
                                round = round + grad
                            total = total + round
                        return total
                    """
                ),
                "rank by rank": code(
                    """
                    def ordered_sum(grads):
                        total = torch.zeros_like(grads[0, 0])
                        for r in range(grads.shape[1]):
                            for m in range(grads.shape[0]):
                                total = total + grads[m, r]
                        return total
                    """
                ),
                "backwards": _ORDERED.replace(
                    "range(grads.shape[0])", "reversed(range(grads.shape[0]))"
                ),
                "last rank first": _ORDERED.replace(
                    "range(grads.shape[1])", "reversed(range(grads.shape[1]))"
                ),
                "in double": code(
                    """
                    def ordered_sum(grads):
                        return grads.double().sum((0, 1)).float()
                    """
                ),
                "the mean of the ranks": _ORDERED.replace(
                    "return total", "return total / grads.shape[1]"
                ),
                "rank 0 only": _ORDERED.replace("range(grads.shape[1])", "range(1)"),
            },
            cases=_ordered_cases,
            explain=_only_rounded,
        ),
    ]
}
