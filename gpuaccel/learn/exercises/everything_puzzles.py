"""The exercises of the last notebook: losses kept on the device, an update that can be captured."""

import torch

from ..figures.drawing import plural
from .exercises import Turns, normal, python_exercise


def _keep_loss_turns(generator):
    for length in (2, 5, 64):
        before = normal(length, generator) - 5.0
        exact, turns = before.double(), []
        for k in range(length):
            loss = torch.rand((), generator=generator) + 1.0
            exact = exact.clone()
            exact[k] = float(loss)
            turns.append(((None, None, loss), exact, f"count is {k}"))
        yield Turns(
            f"{length} losses",
            (before, torch.zeros((), dtype=torch.int64), torch.zeros(())),
            (),
            turns,
            result_index=0,
            counter=("count", 1),
        )


def _update_turns(generator):
    for n, micro_batches in ((1, 2), (255, 4), (1000, 8), (4097, 3)):
        lr = 0.3 + 0.5 * float(torch.rand((), generator=generator))
        weight = 2.0 + normal(n, generator).abs()
        max_norm = float(torch.rand((), generator=generator)) + 0.5
        exact, turns = weight.double(), []
        for what, times in (
            ("the norm is above max_norm", 3.0),
            ("the norm is below max_norm", 0.4),
            ("a gradient is NaN", torch.nan),
            ("a gradient is infinite", torch.inf),
            ("the norm is above max_norm", 20.0),
        ):
            grads = normal((micro_batches, n), generator)
            # all of one sign, so that the norm of their mean is that of the whole
            grads = grads.abs() + 0.1
            bad = not torch.isfinite(torch.tensor(times))
            size = max_norm / float(grads.mean(0).norm())
            grads = (grads * (size if bad else times * size)).bfloat16()
            if bad:
                grads[0, int(torch.randint(n, (), generator=generator))] = times
            mean = grads.double().mean(0)
            scale = min(1.0, max_norm / float(mean.norm()))
            exact = exact if bad else exact - lr * scale * mean
            turns.append(((None, grads), exact, what))
        yield Turns(
            f"{plural(n, 'weight')}, {micro_batches} micro-batches",
            (weight, torch.zeros(micro_batches, n, dtype=torch.bfloat16)),
            (lr, max_norm),
            turns,
            result_index=0,
        )


_WHERE = "weight.copy_(torch.where(norm.isfinite(), new, weight))"


EXERCISES = [
    python_exercise(
        "keep_loss",
        task=(
            "Write loss to place count of losses, and add 1 to count: both in place, in a step "
            "that is captured. losses: (n) fp32, count: () int64, 0 at first, loss: () fp32. "
            "Expected: two lines."
        ),
        params="losses, count, loss",
        stub="losses[count] = loss\ncount += 1",
        hint=(
            "losses[count] with a tensor of no dimension is one element, and to find it Python "
            "asks the device for count. A list of places stays on the device: count.view(1) is a "
            "list of one."
        ),
        solution="losses[count.view(1)] = loss\ncount += 1",
        wrong_answers={
            "asks the host": ("count.view(1)", "count"),
            "`int(count)` asks the device, too": ("count.view(1)", "int(count)"),
            "`.item()` asks the device, too": ("= loss", "= loss.item()"),
            "it writes the first place each time": ("count.view(1)", "0"),
            "every place is written": "losses.copy_(loss.expand_as(losses))\ncount += 1",
            "it counts before it writes": "count += 1\nlosses[count.view(1)] = loss",
            "`count` stays as it is": ("\ncount += 1", ""),
            "`count` is a new tensor: in place is count += 1": ("count += 1", "count = count + 1"),
            "adds to what was there": ("= loss", "+= loss"),
            "`losses` is a new tensor: write into the one that is given": (
                "losses[",
                "losses = losses.clone()\nlosses[",
            ),
            "the loss is rounded to 16 bits on the way": ("= loss", "= loss.bfloat16().float()"),
        },
        turns=_keep_loss_turns,
    ),
    python_exercise(
        "update",
        task=(
            "The end of a step, captured. grads: (M, n) bf16, the gradients of M micro-batches. "
            "Take their mean in fp32. Where its norm is above max_norm, scale it to max_norm. "
            "Change weight, (n) fp32, in place: weight -= lr * mean. Where the norm is not finite,"
            " weight stays as it is. Expected: five lines."
        ),
        params="weight, grads, lr, max_norm",
        stub="""
mean = grads.mean(0)
norm = mean.norm().item()
if norm > max_norm:
    mean *= max_norm / norm
weight -= lr * mean""",
        hint=(
            "grads.float() before the mean, norm without .item(). (max_norm / norm).clamp(max=1) "
            "is the scale, with and without clipping. NaN times 0 is NaN, so a NaN cannot be "
            "multiplied away: torch.where(norm.isfinite(), new, weight) chooses, and "
            "weight.copy_(...) writes in place."
        ),
        solution="""
mean = grads.float().mean(0)
norm = mean.norm()
scale = (max_norm / norm).clamp(max=1)
new = weight - lr * scale * mean
weight.copy_(torch.where(norm.isfinite(), new, weight))""",
        wrong_answers={
            "asks the host": ("mean.norm()", "torch.tensor(mean.norm().item())"),
            "`if` asks the device, too": (
                "(max_norm / norm).clamp(max=1)",
                "max_norm / norm if norm > max_norm else 1.0",
            ),
            "`if norm.isfinite()` asks the device, too": (
                _WHERE,
                "if norm.isfinite(): weight.copy_(new)",
            ),
            "the mean is taken in bf16, and rounded: grads.float() comes first": (
                "grads.float().mean(0)",
                "grads.mean(0).float()",
            ),
            "the sum, not the mean": ("mean(0)", "sum(0)"),
            "only the last micro-batch is used": ("grads.float().mean(0)", "grads[-1].float()"),
            "clips each micro-batch": (
                "grads.float().mean(0)",
                "grads.float()\n"
                "sizes = mean.norm(dim=1, keepdim=True)\n"
                "mean = (mean * (max_norm / sizes).clamp(max=1)).mean(0)",
            ),
            "never clips": ("(max_norm / norm).clamp(max=1)", "1.0"),
            "always scales": (".clamp(max=1)", ""),
            "`clamp(min=1)` is the wrong bound: the scale is at most 1": (
                "clamp(max=1)",
                "clamp(min=1)",
            ),
            "NaN passes": (_WHERE, "weight.copy_(new)"),
            "NaN times 0 is NaN: choose with torch.where": (
                _WHERE,
                "weight -= lr * scale * mean * norm.isfinite()",
            ),
            "NaN becomes 0": ("grads.float()", "grads.float().nan_to_num(0.0, 0.0, 0.0)"),
            "lets infinity pass": ("norm.isfinite()", "~norm.isnan()"),
            "`weight` is a new tensor: in place is weight.copy_(...)": (
                "weight.copy_(",
                "weight = (",
            ),
            "the step goes uphill: a plus in place of the minus": ("weight - lr", "weight + lr"),
        },
        turns=_update_turns,
    ),
]
