"""The exercises of the last notebook: losses kept on the device, an update that can be captured."""

import torch

from ..figures.drawing import plural
from .exercises import Exercise, Turns, code, normal


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


def _keep(*lines):
    """An answer to keep_loss with these lines."""
    return "def keep_loss(losses, count, loss):\n" + "".join(f"    {line}\n" for line in lines)


_UPDATE = code(
    """
    def update(weight, grads, lr, max_norm):
        mean = grads.float().mean(0)
        norm = mean.norm()
        scale = (max_norm / norm).clamp(max=1)
        new = weight - lr * scale * mean
        weight.copy_(torch.where(norm.isfinite(), new, weight))
    """
)
_SCALE = "    scale = (max_norm / norm).clamp(max=1)\n"
_WHERE = "weight.copy_(torch.where(norm.isfinite(), new, weight))"


EXERCISES = {
    e.name: e
    for e in [
        Exercise(
            "keep_loss",
            task=(
                "Write loss to place count of losses, and add 1 to count: both in place, in a "
                "step that is captured. losses: (n) fp32, count: () int64, 0 at first, "
                "loss: () fp32. Expected: two lines."
            ),
            stub=_keep("losses[count] = loss", "count += 1"),
            hint=(
                "losses[count] with a tensor of no dimension is one element, and to find it Python "
                "asks the device for count. A list of places stays on the device: "
                "count.view(1) is a list of one."
            ),
            solution=_keep("losses[count.view(1)] = loss", "count += 1"),
            wrong_answers={
                "asks the host": _keep("losses[count] = loss", "count += 1"),
                "asks in other words": _keep("losses[int(count)] = loss", "count += 1"),
                "counts in Python": (
                    "def keep_loss(losses, count, loss, calls=[0]):\n"
                    "    losses[calls[0]] = loss\n"
                    "    calls[0] += 1\n"
                    "    count += 1\n"
                ),
                "keeps a number": _keep("losses[count.view(1)] = loss.item()", "count += 1"),
                "the first place": _keep("losses[0] = loss", "count += 1"),
                "every place": _keep("losses.copy_(loss.expand_as(losses))", "count += 1"),
                "counts first": _keep("count += 1", "losses[count.view(1)] = loss"),
                "does not count": _keep("losses[count.view(1)] = loss"),
                "counts another tensor": _keep("losses[count.view(1)] = loss", "count = count + 1"),
                "adds to what was there": _keep("losses[count.view(1)] += loss", "count += 1"),
                "another table": _keep(
                    "losses = losses.clone()", "losses[count.view(1)] = loss", "count += 1"
                ),
                "a rounded loss": _keep(
                    "losses[count.view(1)] = loss.bfloat16().float()", "count += 1"
                ),
            },
            turns=_keep_loss_turns,
        ),
        Exercise(
            "update",
            task=(
                "The end of a step, captured. grads: (M, n) bf16, the gradients of M micro-batches."
                " Take their mean in fp32. Where its norm is above max_norm, scale it to max_norm. "
                "Change weight, (n) fp32, in place: weight -= lr * mean. Where the norm is not "
                "finite, weight stays as it is. Expected: five lines."
            ),
            stub=code(
                """
                def update(weight, grads, lr, max_norm):
                    mean = grads.mean(0)
                    norm = mean.norm().item()
                    if norm > max_norm:
                        mean *= max_norm / norm
                    weight -= lr * mean
                """
            ),
            hint=(
                "grads.float() before the mean, norm without .item(). "
                "(max_norm / norm).clamp(max=1) is the scale, with and without clipping. NaN times "
                "0 is NaN, so a NaN cannot be multiplied away: torch.where(norm.isfinite(), new, "
                "weight) chooses, and weight.copy_(...) writes in place."
            ),
            solution=_UPDATE,
            wrong_answers={
                "asks the host": _UPDATE.replace("norm()", "norm().item()", 1)
                .replace("(max_norm / norm).clamp(max=1)", "min(1.0, max_norm / norm)")
                .replace("norm.isfinite()", "torch.tensor(norm).isfinite()"),
                "asks in other words": _UPDATE.replace(
                    _SCALE, "    scale = max_norm / norm if norm > max_norm else 1.0\n"
                ),
                "skips with if": _UPDATE.replace(_WHERE, "if norm.isfinite(): weight.copy_(new)"),
                "a mean in bf16": _UPDATE.replace("grads.float().mean(0)", "grads.mean(0).float()"),
                "the sum": _UPDATE.replace("mean(0)", "sum(0)"),
                "the last micro-batch": _UPDATE.replace(
                    "grads.float().mean(0)", "grads[-1].float()"
                ),
                "clips each micro-batch": _UPDATE.replace(
                    "mean = grads.float().mean(0)",
                    "each = grads.float()\n"
                    "    sizes = each.norm(dim=1, keepdim=True)\n"
                    "    mean = (each * (max_norm / sizes).clamp(max=1)).mean(0)",
                ),
                "never clips": _UPDATE.replace(_SCALE, "    scale = 1.0\n"),
                "always scales": _UPDATE.replace(".clamp(max=1)", ""),
                "the wrong bound": _UPDATE.replace("clamp(max=1)", "clamp(min=1)"),
                "NaN passes": _UPDATE.replace(_WHERE, "weight.copy_(new)"),
                "multiplies by 0 or 1": _UPDATE.replace(
                    _WHERE, "weight -= lr * scale * mean * norm.isfinite()"
                ),
                "NaN becomes 0": _UPDATE.replace(
                    "grads.float()", "grads.float().nan_to_num(0.0, 0.0, 0.0)"
                ),
                "lets infinity pass": _UPDATE.replace("norm.isfinite()", "~norm.isnan()"),
                "a new weight": _UPDATE.replace(
                    _WHERE, "weight = torch.where(norm.isfinite(), new, weight)"
                ),
                "uphill": _UPDATE.replace("weight - lr", "weight + lr"),
            },
            turns=_update_turns,
        ),
    ]
}
