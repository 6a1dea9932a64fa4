"""Host values of torch's own optimizers that a captured graph would keep."""

import contextlib
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import CaptureError
from .participant import Refreshable


def optimizer_key(opt: torch.optim.Optimizer) -> tuple:
    """The settings that an optimizer passes to its kernels by value: all that are no tensors.

    A Refreshable optimizer writes them to the device before each replay: then only the numbers of
    parameters count."""
    groups = opt.param_groups
    if isinstance(opt, Refreshable):
        return tuple(len(group["params"]) for group in groups)
    return tuple(
        (
            len(group["params"]),
            *((k, v) for k, v in group.items() if isinstance(v, (bool, int, float, str, tuple))),
        )
        for group in groups
    )


def frozen_number(opt: torch.optim.Optimizer) -> str | None:
    """The learning rate or step number on the host that a graph would freeze, in words.

    Args:
        opt: any.

    Returns:
        The problem and the way out; None without one.
    """
    if isinstance(opt, Refreshable):
        return None
    name = type(opt).__name__
    for g, group in enumerate(opt.param_groups):
        on_gpu = any(p.is_cuda for p in group["params"])
        if on_gpu and group.get("capturable") is False:
            return (
                f"{name} counts its steps on the host (capturable=False in group {g}), which a "
                "graph would not repeat. Instead: capturable=True and a learning rate on the "
                "device, or ga.AdamW"
            )
        lr = group.get("lr")
        if lr is None:
            continue
        if isinstance(lr, Tensor) and (lr.is_cuda or not on_gpu):
            continue
        kind = "a tensor on the CPU" if isinstance(lr, Tensor) else f"the number {lr}"
        return (
            f"the learning rate of {name}'s group {g} is {kind}, which a graph would keep for "
            f"ever, whatever a schedule says. Instead: lr=torch.tensor({float(lr)}, device=...), "
            "or ga.AdamW"
        )
    return None


@contextlib.contextmanager
def settings_stay(optimizers: Iterable[torch.optim.Optimizer]):
    """Context manager: CaptureError if the block changes settings of an optimizer on the host.

    A scheduler inside the step does so, or an optimizer that counts in its groups; a replay would
    not. The settings get their values back.
    """
    before = [(opt, group, _settings(group)) for opt in optimizers for group in opt.param_groups]
    yield
    problems = []
    for opt, group, settings in before:
        for name, value in settings.items():
            now = group[name]
            if isinstance(value, Tensor) and isinstance(now, Tensor):
                if not torch.equal(now, value):
                    problems.append(f"{name!r} of {type(opt).__name__}")
                    now.copy_(value)
            elif now != value:
                problems.append(f"{name!r} of {type(opt).__name__} from {value} to {now}")
                group[name] = value
    if problems:
        raise CaptureError(
            f"the step changes {', '.join(dict.fromkeys(problems))}, on the host: replays would "
            "keep the value of the capture. Instead: call scheduler.step() after the step"
        )


def _settings(group: dict) -> dict:
    """The settings of an optimizer's group. Tensors are copies."""
    kinds = (bool, int, float, str, tuple, Tensor)
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if isinstance(value, kinds)
    }


@contextlib.contextmanager
def no_other_steps(is_known: Callable[[Tensor], bool]):
    """Context manager: CaptureError if an optimizer of other tensors takes a step in the block.

    It is raised before weights change. Gradients of these tensors are dropped.

    Args:
        is_known: whether the step's state has a tensor.
    """
    thread = threading.get_ident()

    def check(opt, args, kwargs):
        if threading.get_ident() != thread:
            return
        others = [p for group in opt.param_groups for p in group["params"] if not is_known(p)]
        if others:
            # Drop gradients of the warm-up: the next step expects none.
            for p in others:
                p.grad = None
            raise CaptureError(
                f"the step calls step() of {type(opt).__name__} over weights of another model, "
                "which a warm-up would leave changed. Instead: call it between the steps"
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
