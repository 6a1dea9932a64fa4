"""The exercises of notebook 05: deal batches to ranks, add in global order."""

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
            expected,
        )


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
