"""The exercises of notebook 06: dealing batches to ranks, buckets, a sum in global order. As learn/exercises/puzzles.py keeps the others."""

import torch

from .puzzles import Exercise


def _whole(low, high, generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def _deal_cases(generator):
    for n, ranks in ((2, 2), (9, 2), (10, 4), (1, 1), (64, 8), (257, 3)):
        order = torch.randperm(n, generator=generator)
        rank = (
            ranks - 1 if n in (9, 10) else _whole(0, ranks, generator)
        )  # in these the last rank has none left at the end
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
    for nth, more in enumerate(sizes):
        blocks, size = blocks + 1, size + more
        if size >= least or nth == len(sizes) - 1:
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


def _in_turn(grads):
    total = torch.zeros_like(grads[0, 0])
    for micro in grads:
        for grad in micro:
            total = total + grad
    return total


def _ordered_cases(generator):
    for micros, ranks, n in ((1, 2, 1), (2, 2, 255), (3, 2, 1000), (4, 3, 257), (2, 8, 4096)):
        grads = torch.randn(micros, ranks, n, generator=generator) * 1e6
        grads[-1, -1] -= (
            grads.double().sum((0, 1)).float()
        )  # what is left is small, and which bits it has the order decides
        yield (
            f"{ranks} ranks, {micros} micro-batch{'es' * (micros > 1)}, {n:,} element{'s' * (n > 1)}",
            (grads,),
            _in_turn(grads).double(),
        )


_DEAL = """def deal(order, rank, ranks):
    mine = order[rank::ranks]
    longest = -(-len(order) // ranks)
    return torch.cat([mine, torch.full((longest - len(mine),), -1)])
"""
_BUCKETS = """def fill_buckets(sizes, least):
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
_ORDERED = """def ordered_sum(grads):
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
            "order: (n) int64, the numbers of n batches, shuffled. Return those of rank `rank` of `ranks`, dealt in turn: its own place, then every ranks-th."
            " All ranks get as many; one that has none left gets -1, and no batch goes to two. What is wrong: some ranks train on the same batch.",
            "def deal(order, rank, ranks):\n    each = -(-len(order) // ranks)          # rounded up\n    dealt = order.repeat(2)[:each * ranks]\n"
            "    return dealt[rank::ranks]\n",
            "order[rank::ranks] are its batches. At the end the last ranks may have one less than -(-len(order) // ranks): fill up with -1 instead of beginning"
            " again.",
            _DEAL,
            {
                "begins again at the end": _DEAL.replace(
                    "torch.full((longest - len(mine),), -1)", "order[:longest - len(mine)]"
                ),
                "a block for each rank": _DEAL.replace(
                    "order[rank::ranks]",
                    "order[rank * -(-len(order) // ranks):][:-(-len(order) // ranks)]",
                ),
                "drops the tail": "def deal(order, rank, ranks):\n    each = len(order) // ranks\n    return order[:each * ranks][rank::ranks]\n",
                "not as many": "def deal(order, rank, ranks):\n    return order[rank::ranks]\n",
                "one too many": _DEAL.replace("-(-len(order) // ranks)", "len(order) // ranks + 1"),
                "everything to everyone": "def deal(order, rank, ranks):\n    return order\n",
                "fills up with 0": _DEAL.replace("-1)", "0)"),
                "in its own order": _DEAL.replace(
                    "order[rank::ranks]", "order[rank::ranks].sort().values"
                ),
            },
            cases=_deal_cases,
        ),
        Exercise(
            "fill_buckets",
            "sizes: bytes of the blocks, in the order in which backward finishes them. Join neighbours: a bucket is closed as soon as it has `least` bytes; the"
            " last one may have less. Return how many blocks each bucket has, a tensor. What is wrong: the last blocks are never sent.",
            _BUCKETS.replace("    if blocks:\n        counts.append(blocks)\n", ""),
            "After the loop there may be blocks in a bucket that is not full. They have gradients too.",
            _BUCKETS,
            {
                "forgets the rest": _BUCKETS.replace(
                    "    if blocks:\n        counts.append(blocks)\n", ""
                ),
                "more than enough only": _BUCKETS.replace("size >= least", "size > least"),
                "closes before it is full": (
                    "def fill_buckets(sizes, least):\n    counts, blocks, size = [], 0, 0\n    for block in sizes:\n        if blocks and size + block > least:\n"
                    "            counts.append(blocks)\n            blocks = size = 0\n        blocks += 1\n        size += block\n"
                    "    return torch.tensor(counts + [blocks])\n"
                ),
                "the rest joins the last": _BUCKETS.replace(
                    "    if blocks:\n        counts.append(blocks)\n",
                    "    if blocks and counts:\n        counts[-1] += blocks\n    elif blocks:\n        counts.append(blocks)\n",
                ),
                "in the order of forward": _BUCKETS.replace("in sizes", "in reversed(sizes)"),
                "a bucket for each block": "def fill_buckets(sizes, least):\n    return torch.ones(len(sizes))\n",
                "all in one": "def fill_buckets(sizes, least):\n    return torch.tensor([len(sizes)])\n",
                "does not empty the bucket": _BUCKETS.replace(
                    "blocks = size = 0\n    if", "blocks = 0\n    if"
                ),
            },
            cases=_bucket_cases,
        ),
        Exercise(
            "ordered_sum",
            "grads: (M, ranks, n) fp32; grads[m, r] is the gradient of rank r's micro-batch m, number m * ranks + r of all. Return the sum that one process gets:"
            " beginning with zero, one after the other in global order, in fp32. What is wrong: each rank adds its own first.",
            "def ordered_sum(grads):\n    return grads.sum(0).sum(0)\n",
            "Two loops: micro-batches outside, ranks inside, and one running total. Any other order rounds otherwise; these gradients nearly cancel, so that"
            " you see it.",
            _ORDERED,
            {
                "each rank first": "def ordered_sum(grads):\n    return grads.sum(0).sum(0)\n",
                "each round first": (
                    "def ordered_sum(grads):\n    total = torch.zeros_like(grads[0, 0])\n    for micro in grads:\n        round = torch.zeros_like(total)\n"
                    "        for grad in micro:\n            round = round + grad\n        total = total + round\n    return total\n"
                ),
                "rank by rank": (
                    "def ordered_sum(grads):\n    total = torch.zeros_like(grads[0, 0])\n    for r in range(grads.shape[1]):\n"
                    "        for m in range(grads.shape[0]):\n            total = total + grads[m, r]\n    return total\n"
                ),
                "backwards": _ORDERED.replace(
                    "range(grads.shape[0])", "reversed(range(grads.shape[0]))"
                ),
                "last rank first": _ORDERED.replace(
                    "range(grads.shape[1])", "reversed(range(grads.shape[1]))"
                ),
                "in double": "def ordered_sum(grads):\n    return grads.double().sum((0, 1)).float()\n",
                "the mean of the ranks": _ORDERED.replace(
                    "return total", "return total / grads.shape[1]"
                ),
                "rank 0 only": _ORDERED.replace("range(grads.shape[1])", "range(1)"),
            },
            cases=_ordered_cases,
        ),
    ]
}
