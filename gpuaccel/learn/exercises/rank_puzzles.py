"""The exercises of notebook 05: the sum of a ring of ranks, a sum in global order."""

import torch

from .exercises import python_exercise


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
    # `mine` is back after ranks rounds, and an equal tensor earlier
    equal = torch.ones(3, 5)
    yield "3 ranks, equal tensors", (equal[0].clone(), 3, _ring(equal)), equal.double().sum(0)


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


EXERCISES = [
    python_exercise(
        "ring_sum",
        task=(
            "mine: (n) fp32, this rank's tensor. pass_on(tensor) sends a tensor to the next of "
            "`ranks` ranks, and returns the one that the rank before has sent. Return the sum of "
            "the tensors of all ranks."
        ),
        params="mine, ranks, pass_on",
        stub="total = mine.clone()\n# your lines\nreturn total",
        hint=(
            "In each round received = pass_on(what was received last), which is `mine` in the "
            "first round; add it to the total. In round `ranks` your own tensor would come back: "
            "stop before."
        ),
        solution="""
total, passing = mine.clone(), mine
for _ in range(ranks - 1):
    passing = pass_on(passing)
    total += passing
return total""",
        wrong_answers={
            "it makes one round, for any number of ranks": ("range(ranks - 1)", "range(1)"),
            "a round too many: ranks - 1 of them bring all other tensors": (
                "range(ranks - 1)",
                "range(ranks)",
            ),
            "a round too few": ("range(ranks - 1)", "range(ranks - 2)"),
            "passes on its own each time": ("pass_on(passing)", "pass_on(mine)"),
            "passes on the sum": ("pass_on(passing)", "pass_on(total)"),
            "without the rank's own tensor": ("mine.clone(), mine", "0 * mine, mine"),
            "it keeps the last tensor only": ("total += passing", "total = passing"),
            "that is the mean, not the sum": ("return total", "return total / ranks"),
        },
        cases=_ring_cases,
    ),
    python_exercise(
        "ordered_sum",
        task=(
            "grads: (M, ranks, n) fp32; grads[m, r] is the gradient of rank r's micro-batch m, "
            "number m * ranks + r of all. Return the sum that one process gets: beginning with "
            "zero, one after the other in global order, in fp32. What is wrong: each rank adds its"
            " own first."
        ),
        params="grads",
        stub="return grads.sum(0).sum(0)",
        hint=(
            "Two loops: micro-batches outside, ranks inside, and one running total. Another order "
            "rounds differently. The gradients of the check nearly cancel, so that the difference "
            "is large."
        ),
        solution="""
total = torch.zeros_like(grads[0, 0])
for m in range(grads.shape[0]):
    for r in range(grads.shape[1]):
        total = total + grads[m, r]
return total""",
        wrong_answers={
            "each rank first": "return grads.sum(0).sum(0)",
            "each round first": """
total = torch.zeros_like(grads[0, 0])
for micro in grads:
    total = total + sum(micro)
return total""",
            "rank by rank": """
total = torch.zeros_like(grads[0, 0])
for grad in grads.transpose(0, 1).flatten(0, 1):
    total = total + grad
return total""",
            "backwards: the last micro-batch first": (
                "range(grads.shape[0])",
                "reversed(range(grads.shape[0]))",
            ),
            "last rank first": ("range(grads.shape[1])", "reversed(range(grads.shape[1]))"),
            "summed in double, not in fp32": "return grads.double().sum((0, 1)).float()",
            "the mean of the ranks": ("return total", "return total / grads.shape[1]"),
            "rank 0 only": ("range(grads.shape[1])", "range(1)"),
        },
        cases=_ordered_cases,
    ),
]
