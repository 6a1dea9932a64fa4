"""The exercises of notebook 03: a guarded step, a decaying learning rate."""

import math

import torch

from ..figures.drawing import plural
from .exercises import Turns, normal, python_exercise


def _weights(n, generator):
    """Weights so far from 0 that no difference is lost in a subtraction."""
    return 2.0 + normal(n, generator).abs()


def _guarded_turns(generator):
    for n in (1, 255, 1000, 4096):
        limit = float(torch.rand((), generator=generator)) + 2.0
        turns = []
        for loss, what in (
            (limit - 1, "below the limit"),
            (limit + 1, "above the limit"),
            (limit, "at the limit"),
            (math.nan, "NaN"),
            (math.inf, "inf"),
            (limit / 2, "below the limit"),
        ):
            weight, grad = _weights(n, generator), normal(n, generator)
            if not math.isfinite(loss):
                grad[int(torch.randint(n, (), generator=generator))] = loss
            loss = torch.tensor(loss)  # limit as fp32, too: the two must agree on what is equal
            steps = bool(loss <= torch.tensor(limit))
            turns.append(
                (
                    (weight, grad, loss),
                    weight.double() - 0.1 * grad.double() if steps else weight.double(),
                    f"the loss is {what}",
                )
            )
        yield Turns(
            f"{plural(n, 'weight')}; losses below, above and at the limit, NaN, inf",
            (torch.zeros(n), torch.zeros(n), torch.zeros(())),
            (float(torch.tensor(limit)),),
            turns,
        )


def _decay_turns(generator):
    for n, steps in ((1, 1), (255, 4), (1000, 10), (4097, 7)):
        first = _weights(n, generator)
        exact, turns = first.double(), []
        for k in range(steps + 2):
            grad = normal(n, generator)
            lr = 0.1 * max(0.0, 1 - k / steps)
            exact = exact - lr * grad.double()
            turns.append(((None, grad, None), exact, f"count is {k}, the learning rate {lr:.3g}"))
        tensors = first, torch.zeros(n), torch.zeros((), dtype=torch.int64)
        yield Turns(
            f"{plural(n, 'weight')}, steps = {steps}",
            tensors,
            (steps,),
            turns,
            result_index=0,
            counter=("count", 2),
        )


EXERCISES = [
    python_exercise(
        "guarded",
        task=(
            "One step that can be captured: return weight - 0.1 * grad where loss is at most "
            "limit, else weight as it is (also when the loss is NaN). weight, grad: (n) fp32, "
            "loss: () fp32, limit: a number. Expected: one line."
        ),
        params="weight, grad, loss, limit",
        stub="if not loss.item() <= limit:\n    return weight.clone()\nreturn weight - 0.1 * grad",
        hint=(
            "A graph has no `if`: both outcomes are computed, and the device chooses one. "
            "torch.where(condition, a, b) chooses. With NaN both loss <= limit and loss > limit "
            "are false, so it takes b: which condition has weight as its b? A product with 0 or 1 "
            "does not choose, because NaN times 0 is NaN."
        ),
        solution="return torch.where(loss <= limit, weight - 0.1 * grad, weight)",
        wrong_answers={
            "asks the host": ("loss <=", "torch.tensor(loss.item()) <="),
            "`if` asks the device, too": "return weight - 0.1 * grad if loss <= limit else weight",
            "picks by a mask": """
out = weight.clone()
chosen = (loss <= limit).expand_as(out)
out[chosen] -= 0.1 * grad[chosen]
return out""",
            "NaN passes": "return torch.where(loss > limit, weight, weight - 0.1 * grad)",
            "NaN times 0 is NaN: choose with torch.where": (
                "return weight - 0.1 * grad * (loss <= limit)"
            ),
            "the wrong way round": "return torch.where(loss <= limit, weight, weight - 0.1 * grad)",
            "a loss at the limit is skipped: ask `<=`": ("<=", "<"),
            "catches the error": """
try:
    if not loss.item() <= limit:
        return weight.clone()
except Exception:
    pass
return weight - 0.1 * grad""",
            "adds into the weight of before": (
                "return torch",
                "weight -= torch",
                "weight - 0.1 * grad, weight)",
                "0.1 * grad, weight)\nreturn weight",
            ),
            "never skips": "return weight - 0.1 * grad",
        },
        turns=_guarded_turns,
    ),
    python_exercise(
        "decay",
        task=(
            "A learning rate that falls under replay: 0.1 in the first step, where count is 0; "
            "then on a straight line to 0 where count is `steps`; and 0 from there on. Change "
            "weight in place by -lr * grad. count: () int64 on the device, 0 at first, one more in"
            " each step; nobody else counts. Expected: three lines."
        ),
        params="weight, grad, count, steps",
        stub="lr = 0.1\nweight -= lr * grad\ncount += 1",
        hint=(
            "count / steps, without .item(), is a tensor, which each replay computes anew. After "
            "`steps` steps 1 - count / steps is negative: which method of a tensor keeps it at 0 "
            "or above? max() would decide on the host."
        ),
        solution="""
lr = 0.1 * (1 - count / steps).clamp(min=0)
weight -= lr * grad
count += 1""",
        wrong_answers={
            "`max` and `int(count)` ask the device: use `.clamp(min=0)`": (
                "(1 - count / steps).clamp(min=0)",
                "max(0.0, 1 - int(count) / steps)",
            ),
            "the learning rate stays 0.1": (" * (1 - count / steps).clamp(min=0)", ""),
            "the step goes uphill: a plus in place of the minus": ("-=", "+="),
            "count // steps is a whole number": ("count / steps", "count // steps"),
            "the learning rate falls below zero": (".clamp(min=0)", ""),
            "one step late": (
                "count / steps).clamp(min=0)",
                "(count - 1) / steps).clamp(min=0, max=1)",
            ),
            "it counts before it computes the learning rate": (
                "lr = ",
                "count += 1\nlr = ",
                "* grad\ncount += 1",
                "* grad",
            ),
            "`count` stays as it is": ("\ncount += 1", ""),
            "`count` is a new tensor: in place is count += 1": ("count += 1", "count = count + 1"),
            "`weight` is a new tensor: in place is weight -= ...": (
                "weight -= lr",
                "weight = weight - lr",
            ),
        },
        turns=_decay_turns,
    ),
]
