"""The exercises of notebook 05: the sum of a ring of ranks, a sum in global order."""

import torch

from .exercises import Exercise, code


def _ring(tensors):
    """pass_on of rank 0. The ranks run the same answer, so where this rank passes on the tensor of
    rank r, the rank before passes on that of rank r - 1."""

    def pass_on(tensor):
        for r, known in enumerate(tensors):
            if tensor.shape == known.shape and torch.equal(tensor, known):
                return tensors[r - 1].clone()
        raise ValueError(
            "pass_on got a tensor that is no rank's; expected `mine`, or what was received last"
        )

    return pass_on


def _ring_cases(generator):
    for ranks, n in ((2, 4), (3, 1000), (1, 16), (4, 257), (8, 64)):
        # whole numbers: their sum is exact in each order
        tensors = torch.randint(-1000, 1000, (ranks, n), generator=generator).float()
        label = f"{ranks} rank{'s' * (ranks > 1)}, {n:,} elements"
        yield label, (tensors[0].clone(), ranks, _ring(tensors)), tensors.double().sum(0)


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


_RING = """\
def ring_sum(mine, ranks, pass_on):
    total, passing = mine.clone(), mine
    for _ in range(ranks - 1):
        passing = pass_on(passing)
        total += passing
    return total
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
            "ring_sum",
            task=(
                "mine: (n) fp32, this rank's tensor. pass_on(tensor) sends a tensor to the next of "
                "`ranks` ranks, and returns the one that the rank before has sent. Return the sum "
                "of the tensors of all ranks."
            ),
            stub=code(
                """
                def ring_sum(mine, ranks, pass_on):
                    total = mine.clone()
                    # your lines
                    return total
                """
            ),
            hint=(
                "ranks - 1 rounds. In each of them received = pass_on(what was received last), "
                "which is `mine` in the first round; add it to the total."
            ),
            solution=_RING,
            wrong_answers={
                "one round": _RING.replace("range(ranks - 1)", "range(1)"),
                "a round too many": _RING.replace("range(ranks - 1)", "range(ranks)"),
                "a round too few": _RING.replace("range(ranks - 1)", "range(ranks - 2)"),
                "passes on its own each time": _RING.replace("pass_on(passing)", "pass_on(mine)"),
                "passes on the sum": _RING.replace("pass_on(passing)", "pass_on(total)"),
                "without its own": _RING.replace("mine.clone(), mine", "0 * mine, mine"),
                "keeps the last": _RING.replace("total += passing", "total = passing"),
                "the mean": _RING.replace("return total", "return total / ranks"),
            },
            cases=_ring_cases,
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
