"""The exercises of the last notebook: the end of a step in launches, losses kept on the device."""

import math

import torch

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
    for n in (256, 2304):
        lr = 0.3 + 0.5 * float(torch.rand((), generator=generator))
        # so large that a step changes bf16 weights, too
        max_norm = n**0.5 * (0.5 + float(torch.rand((), generator=generator)))
        weight = 2.0 + normal(n, generator).abs()
        exact, turns = weight.double(), []
        for what, times in (
            ("the norm is above max_norm", 3.0),
            ("the norm is below max_norm", 0.8),
            ("a gradient is NaN", torch.nan),
            ("a gradient is infinite", torch.inf),
            ("the norm is above max_norm", 20.0),
        ):
            grad = normal(n, generator)
            grad *= max_norm / grad.norm()
            if math.isfinite(times):
                grad *= times
                exact = exact - lr * min(1.0, 1 / times) * grad.double()
            else:
                grad[int(torch.randint(n, (), generator=generator))] = times
            turns.append(((None, grad), exact, what))
        numbers = torch.full((n // 256,), torch.nan), torch.full((1,), torch.nan)
        tensors = weight, torch.zeros(n), weight.bfloat16(), *numbers
        for index, of in ((0, "w"), (2, "bf16_weights")):
            yield Turns(
                f"{of} ({n:,} weights)",
                tensors,
                (lr, max_norm),
                turns,
                result_index=index,
                may_change=(0, 2, 3, 4),
            )


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
            "The end of a step, captured, with the kernels of notebook 02. Change w in place by "
            "lr times the gradients g, which are scaled to max_norm where their norm is larger, "
            "and write the new weights to bf16_weights, too. Where the norm is not finite, nothing "
            "changes. w, g: (n) fp32, bf16_weights: (n) bf16, sums: (n / 256) fp32, scale: (1) "
            "fp32. n is a multiple of 256. Expected: three more lines."
        ),
        params="w, g, bf16_weights, sums, scale, lr, max_norm",
        stub="n, blocks = len(w), len(sums)\nsquares[blocks, 256](sums, g, n)\n# your lines",
        hint=(
            "clip_scale(scale, sums, max_norm, n) adds n sums: one for each block. It is one "
            "thread's work, so one block is enough. clipped_step(w, grad, scale, lr, n) needs a "
            "thread for each weight. Then bf16_weights.copy_(...) rounds the new weights."
        ),
        solution="""
n, blocks = len(w), len(sums)
squares[blocks, 256](sums, g, n)
clip_scale[1, 32](scale, sums, max_norm, blocks)
clipped_step[blocks, 256](w, g, scale, lr, n)
bf16_weights.copy_(w)""",
        wrong_answers={
            "`bf16_weights` stay as they were: in place is bf16_weights.copy_(...)": (
                "bf16_weights.copy_(w)",
                "bf16_weights = w.bfloat16()",
            ),
            "`bf16_weights` get the weights of before the step": (
                "clipped_step[",
                "bf16_weights.copy_(w)\nclipped_step[",
                "n)\nbf16_weights.copy_(w)",
                "n)",
            ),
            "`bf16_weights` are stepped by themselves, and roundings add up: copy `w`": (
                "bf16_weights.copy_(w)",
                "before = bf16_weights.float()\n"
                "clipped_step[blocks, 256](before, g, scale, lr, n)\n"
                "bf16_weights.copy_(before)",
            ),
            "asks the host": (
                "clipped_step[",
                "if not scale.item() > 0: return\nclipped_step[",
            ),
            "`clip_scale` comes before `squares`, and reads the sums of the step before": (
                "squares[blocks, 256](sums, g, n)\n",
                "",
                "blocks)\n",
                "blocks)\nsquares[blocks, 256](sums, g, n)\n",
            ),
            "`clip_scale` adds `n` sums, and there are `blocks` of them": (
                "max_norm, blocks)",
                "max_norm, n)",
            ),
            "`clip_scale` adds the first sum only": ("max_norm, blocks)", "max_norm, 1)"),
            "the norm of the weights, not of the gradients": ("(sums, g, n)", "(sums, w, n)"),
            "one block of `clipped_step` is 256 weights: the grid has `blocks` of them": (
                "clipped_step[blocks, 256]",
                "clipped_step[1, 256]",
            ),
            "the gradients are scaled twice": (
                "clipped_step[",
                "g.mul_(scale)\nclipped_step[",
            ),
            "`lr` and `max_norm` have changed places": (
                "sums, max_norm,",
                "sums, lr,",
                "scale, lr,",
                "scale, max_norm,",
            ),
            "NaN times 0 is NaN: `clipped_step` decides, in each thread": (
                "clipped_step[blocks, 256](w, g, scale, lr, n)",
                "w -= lr * scale * g",
            ),
        },
        turns=_update_turns,
        launches=("squares", "clip_scale", "clipped_step"),
    ),
]
