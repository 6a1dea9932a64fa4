"""The exercises of notebook 03: a guarded step, a decaying learning rate, replays over batches."""

import math

import torch

from ...graphs import Tape
from .exercises import Exercise, Turns, code, normal


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
            f"{n:,}, loss below, above, at the limit, NaN, inf, below",
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
            f"{n:,}, steps = {steps}, count from 0 to {steps + 1}",
            tensors,
            (steps,),
            turns,
            result_index=0,
            counter=("count", 2),
        )


def _replay_over_cases(generator):
    for n, lengths in (
        (1, (1, 1)),
        (255, (255, 100, 255)),
        (1000, (1000,) * 4 + (1,)),
        (96, (7, 96)),
    ):
        weight, memory, tape = _weights(n, generator), torch.zeros(n), Tape()
        # not linear: one replay does not tell what the others would give
        result = tape.record(lambda: (memory * weight).tanh() + memory.sum())
        batches = [normal(length, generator) for length in lengths]
        expected = [
            (batch.double() * weight[: len(batch)].double()).tanh() + batch.double().sum()
            for batch in batches
        ]
        # detach() makes another tensor of the same memory: an answer that gives it other memory
        # does not move the graph's.
        yield (
            f"batches of {', '.join(map(str, lengths))}",
            (tape, memory.detach(), result.detach(), [batch.clone() for batch in batches]),
            torch.cat(expected),
        )


def _decay(lr):
    """An answer with this learning rate."""
    return (
        "def decay(weight, grad, count, steps):\n"
        f"    lr = {lr}\n"
        "    weight -= lr * grad\n"
        "    count += 1\n"
    )


# Lines of the answers to replay_over.
_CLEAR = "static.zero_()"
_FILL = "static[: len(batch)].copy_(batch)"
_REPLAY = "graph.replay()"
_KEEP = "results.append(out[: len(batch)].clone())"


def _over(*lines):
    """An answer with these lines in its loop."""
    body = "".join(f"        {line}\n" for line in lines)
    return (
        "def replay_over(graph, static, out, batches):\n"
        "    results = []\n"
        "    for batch in batches:\n"
        f"{body}"
        "    return torch.cat(results)\n"
    )


EXERCISES = {
    e.name: e
    for e in [
        Exercise(
            "guarded",
            task=(
                "One step that can be captured: return weight - 0.1 * grad where loss is at "
                "most limit, else weight as it is (also when the loss is NaN). weight, grad: "
                "(n) fp32, loss: () fp32, limit: a number. Expected: one line."
            ),
            stub=code(
                """
                def guarded(weight, grad, loss, limit):
                    if not loss.item() <= limit:
                        return weight.clone()
                    return weight - 0.1 * grad
                """
            ),
            hint=(
                "A graph has no `if`: both outcomes are computed, and the device chooses one."
                " torch.where(condition, a, b) chooses. Which of loss <= limit and loss > limit"
                " is right for NaN? Both are false. And NaN times 0 is NaN."
            ),
            solution=code(
                """
                def guarded(weight, grad, loss, limit):
                    return torch.where(loss <= limit, weight - 0.1 * grad, weight)
                """
            ),
            wrong_answers={
                "asks the host": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        if not loss.item() <= limit:
                            return weight.clone()
                        return weight - 0.1 * grad
                    """
                ),
                "asks in other words": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return weight - 0.1 * grad if loss <= limit else weight.clone()
                    """
                ),
                "picks by a mask": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        out = weight.clone()
                        chosen = (loss <= limit).expand_as(out)
                        out[chosen] -= 0.1 * grad[chosen]
                        return out
                    """
                ),
                "NaN passes": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return torch.where(loss > limit, weight, weight - 0.1 * grad)
                    """
                ),
                "multiplies by 0 or 1": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return weight - 0.1 * grad * (loss <= limit)
                    """
                ),
                "the wrong way round": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return torch.where(loss <= limit, weight, weight - 0.1 * grad)
                    """
                ),
                "skips at the limit": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return torch.where(loss < limit, weight - 0.1 * grad, weight)
                    """
                ),
                "catches the error": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        try:
                            if not loss.item() <= limit:
                                return weight.clone()
                        except Exception:
                            pass
                        return weight - 0.1 * grad
                    """
                ),
                "adds into the weight of before": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        weight -= torch.where(loss <= limit, 0.1 * grad, weight)
                        return weight
                    """
                ),
                "never skips": code(
                    """
                    def guarded(weight, grad, loss, limit):
                        return weight - 0.1 * grad
                    """
                ),
            },
            turns=_guarded_turns,
        ),
        Exercise(
            "decay",
            task=(
                "A learning rate that falls under replay: 0.1 in the first step, where count is 0; "
                "then on a straight line to 0 where count is `steps`; and 0 from there on. Change "
                "weight in place by -lr * grad. count: () int64 on the device, 0 at first, one "
                "more in each step; nobody else counts. Expected: three lines."
            ),
            stub=code(
                """
                def decay(weight, grad, count, steps):
                    lr = 0.1
                    weight -= lr * grad
                    count += 1
                """
            ),
            hint=(
                "The line is 0.1 * (1 - count / steps)."
                " Arithmetic with count gives a tensor, which each replay computes anew;"
                " int(count) would ask the device for a number. And max() decides on the host:"
                " what does the same to a tensor, on the device?"
            ),
            solution=code(
                """
                def decay(weight, grad, count, steps):
                    lr = 0.1 * (1 - count / steps).clamp(min=0)
                    weight -= lr * grad
                    count += 1
                """
            ),
            wrong_answers={
                "a number": _decay("0.1 * max(0.0, 1 - int(count) / steps)"),
                "frozen": _decay("0.1"),
                "counts in Python": code(
                    """
                    def decay(weight, grad, count, steps, calls=[0]):
                        weight -= 0.1 * max(0.0, 1 - calls[0] / steps) * grad
                        calls[0] += 1
                        count += 1
                    """
                ),
                "adds": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace("-=", "+="),
                "whole numbers": _decay("0.1 * (1 - count // steps).clamp(min=0)"),
                "below zero": _decay("0.1 * (1 - count / steps)"),
                "one step late": _decay("0.1 * (1 - (count - 1) / steps).clamp(min=0, max=1)"),
                "counts first": code(
                    """
                    def decay(weight, grad, count, steps):
                        count += 1
                        weight -= 0.1 * (1 - count / steps).clamp(min=0) * grad
                    """
                ),
                "does not count": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "    count += 1\n", ""
                ),
                "counts another tensor": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "count += 1", "count = count + 1"
                ),
                "a new weight": _decay("0.1 * (1 - count / steps).clamp(min=0)").replace(
                    "weight -= lr * grad", "weight = weight - lr * grad"
                ),
            },
            turns=_decay_turns,
        ),
        Exercise(
            "replay_over",
            task=(
                "graph reads the memory of static, n numbers, and writes that of out, n numbers; "
                "each of them depends on all of static. A batch has n numbers or fewer; what is "
                "missing counts as 0. For each batch: replay, keep the len(batch) first results. "
                "Return all of them in one tensor. Expected: four lines in the loop."
            ),
            stub=code(
                """
                def replay_over(graph, static, out, batches):
                    results = []
                    for batch in batches:
                        graph.replay()
                        results.append(out)
                    return torch.cat(results)
                """
            ),
            hint=(
                "Three questions. What stands in static from the batch before, behind the end of "
                "a shorter one? How do the numbers of a batch get into memory that exists "
                "already? And what happens to a result that was kept, when the next replay "
                "writes to out?"
            ),
            solution=code(
                """
                def replay_over(graph, static, out, batches):
                    results = []
                    for batch in batches:
                        static.zero_()
                        static[: len(batch)].copy_(batch)
                        graph.replay()
                        results.append(out[: len(batch)].clone())
                    return torch.cat(results)
                """
            ),
            wrong_answers={
                "replays only": _over(_REPLAY, _KEEP),
                "gives a name": _over("static = batch", _REPLAY, _KEEP),
                "gives other memory": _over(
                    "static.data = torch.nn.functional.pad(batch, (0, len(static) - len(batch)))",
                    _REPLAY,
                    _KEEP,
                ),
                "leaves the batch before": _over(_FILL, _REPLAY, _KEEP),
                "keeps the memory of out": _over(
                    _CLEAR, _FILL, _REPLAY, "results.append(out[: len(batch)])"
                ),
                "keeps all n": _over(_CLEAR, _FILL, _REPLAY, "results.append(out.clone())"),
                "replays before it fills": _over(_REPLAY, _CLEAR, _FILL, _KEEP),
                "keeps before it replays": _over(_CLEAR, _FILL, _KEEP, _REPLAY),
                "fills before it clears": _over(_FILL, _CLEAR, _REPLAY, _KEEP),
                "adds": _over("static[: len(batch)] += batch", _REPLAY, _KEEP),
                "one short": _over(
                    _CLEAR,
                    "static[: len(batch) - 1].copy_(batch[:-1])",
                    _REPLAY,
                    _KEEP,
                ),
                "goes through the host": _over(
                    _CLEAR,
                    "for i in range(len(batch)): static[i] = batch[i].item()",
                    _REPLAY,
                    _KEEP,
                ),
                "replays once, multiplies in Python": code(
                    """
                    def replay_over(graph, static, out, batches):
                        static.fill_(1.0)
                        graph.replay()
                        weight = out - len(static)
                        return torch.cat([b * weight[: len(b)] + b.sum() for b in batches])
                    """
                ),
                "skips short batches": _over(
                    "if len(batch) < len(static): continue",
                    "static.copy_(batch)",
                    _REPLAY,
                    _KEEP,
                ),
            },
            cases=_replay_over_cases,
            on_device=True,
        ),
    ]
}
