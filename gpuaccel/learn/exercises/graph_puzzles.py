"""The exercises of notebook 03: a guarded step, a decaying learning rate, replays over batches."""

import math

import torch

from ...graphs import Tape
from .exercises import Exercise, Turns, code, normal


def _guarded_turns(generator):
    for n in (1, 255, 1000, 4096):
        limit = float(torch.rand((), generator=generator)) + 2.0
        turns = []
        for loss in (limit - 1, limit + 1, limit, math.nan, math.inf, limit / 2):
            weight, grad = normal(n, generator), normal(n, generator)
            if not math.isfinite(loss):
                grad[int(torch.randint(n, (), generator=generator))] = loss
            loss = torch.tensor(loss)  # limit as fp32, too: the two must agree on what is equal
            steps = bool(loss <= torch.tensor(limit))
            turns.append(
                (
                    (weight, grad, loss),
                    weight.double() - 0.1 * grad.double() if steps else weight.double(),
                )
            )
        yield Turns(
            f"{n:,}, loss below, above, NaN, ...",
            (torch.zeros(n), torch.zeros(n), torch.zeros(())),
            (float(torch.tensor(limit)),),
            turns,
        )


def _decay_turns(generator):
    for n, steps in ((1, 1), (255, 4), (1000, 10), (4097, 7)):
        first = normal(n, generator)
        exact, turns = first.double(), []
        for k in range(steps + 2):
            grad = normal(n, generator)
            exact = exact - 0.1 * max(0.0, 1 - k / steps) * grad.double()
            turns.append(((None, grad, None), exact))
        tensors = first, torch.zeros(n), torch.zeros((), dtype=torch.int64)
        yield Turns(
            f"{n:,}, {steps} step{'s' * (steps > 1)} and two more",
            tensors,
            (steps,),
            turns,
            result_index=0,
        )


def _replay_over_cases(generator):
    for n, count in ((1, 2), (255, 3), (1000, 5), (4096, 2)):
        weight, memory, tape = normal(n, generator), torch.zeros(n), Tape()
        result = tape.record(lambda: memory * weight + memory.mean())
        batches = [normal(n, generator) for _ in range(count)]
        expected = torch.stack(
            [batch.double() * weight.double() + batch.double().mean() for batch in batches]
        )
        # detach() makes another tensor of the same memory: an answer that gives it other memory
        # does not move the graph's.
        yield (
            f"{count} batches of {n:,}",
            (tape, memory.detach(), result.detach(), [batch.clone() for batch in batches]),
            expected,
        )


def _decay(lr):
    """An answer with this learning rate."""
    return (
        "def decay(weight, grad, count, steps):\n"
        f"    lr = {lr}\n"
        "    weight -= lr * grad\n"
        "    count += 1\n"
    )


def _over(*lines):
    """An answer with these lines in its loop."""
    body = "".join(f"        {line}\n" for line in lines)
    return (
        "def replay_over(graph, static, out, batches):\n"
        "    results = []\n"
        "    for batch in batches:\n"
        f"{body}"
        "    return torch.stack(results)\n"
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
                "A graph has no if: compute both and choose. torch.where(condition, a, b) takes"
                " a where the condition holds; NaN <= limit is false. Do not multiply by 0: NaN"
                " times 0 is NaN."
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
                "A learning rate that falls under replay: 0.1 in the first step, then linearly "
                "to 0 in step number `steps`, and 0 from there on. Change weight in place by "
                "-lr * grad. count: () int64 on the device, 0 at first; nobody else counts. "
                "Expected: three lines."
            ),
            stub=code(
                """
                def decay(weight, grad, count, steps):
                    lr = 0.1 * max(0.0, 1 - int(count) / steps)
                    weight -= lr * grad
                    count += 1
                """
            ),
            hint=(
                "Leave out int(): 1 - count / steps is a tensor on the device, computed anew in"
                " each replay. What max does for numbers, .clamp(min=0) does for tensors."
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
                "graph reads the memory of static and writes that of out. For each batch: give "
                "it to the graph, graph.replay(), keep the result. Return the results stacked, "
                "(batches, n). Expected: change two lines."
            ),
            stub=code(
                """
                def replay_over(graph, static, out, batches):
                    results = []
                    for batch in batches:
                        static = batch               # wrong: a name, not the memory
                        graph.replay()
                        results.append(out)          # wrong: the same memory every time
                    return torch.stack(results)
                """
            ),
            hint=(
                "static.copy_(batch) fills the memory that the graph knows. The next replay "
                "writes over out: keep out.clone()."
            ),
            solution=code(
                """
                def replay_over(graph, static, out, batches):
                    results = []
                    for batch in batches:
                        static.copy_(batch)
                        graph.replay()
                        results.append(out.clone())
                    return torch.stack(results)
                """
            ),
            wrong_answers={
                "a name, and the same memory": _over(
                    "static = batch", "graph.replay()", "results.append(out)"
                ),
                "gives a name": _over(
                    "static = batch", "graph.replay()", "results.append(out.clone())"
                ),
                "gives other memory": _over(
                    "static.data = batch", "graph.replay()", "results.append(out.clone())"
                ),
                "keeps the buffer": _over(
                    "static.copy_(batch)", "graph.replay()", "results.append(out)"
                ),
                "replays before it fills": _over(
                    "graph.replay()", "static.copy_(batch)", "results.append(out.clone())"
                ),
                "keeps before it replays": _over(
                    "static.copy_(batch)", "results.append(out.clone())", "graph.replay()"
                ),
                "adds": _over("static += batch", "graph.replay()", "results.append(out.clone())"),
            },
            cases=_replay_over_cases,
            on_device=True,
        ),
    ]
}
