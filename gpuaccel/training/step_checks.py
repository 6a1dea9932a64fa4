"""What TrainStep refuses, before anything changes: arguments, and optimizers over other tensors."""

import logging
import numbers
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..distributed import Distributed
from ..errors import ArgumentError, described
from ..optim import Arena, DeviceOptimizer

log = logging.getLogger("gpuaccel")


def check_optimizer_kinds(opt, optimizers: list):
    """ArgumentError unless the argument `opt` is None, an optimizer or a list of them."""
    expected = "expected an optimizer, a list of optimizers, or None"
    if opt is not None and not optimizers:
        raise ArgumentError(f"opt is an empty {type(opt).__name__}; {expected}")
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            hint = ""
            if callable(each) and not isinstance(each, type):
                hint = ". A loss has a name: ga.TrainStep(model, loss_fn=...)"
            verb = "is" if each is opt else "holds"
            raise ArgumentError(f"opt {verb} {described(each)}; {expected}{hint}")
        if isinstance(each, torch.optim.LBFGS):
            raise ArgumentError(
                "opt is LBFGS, which calls the loss several times in a step; expected an optimizer "
                "whose step() takes no closure"
            )


def check_kinds(loss_fn, micro_batches, autocast, schedulers, distributed):
    """ArgumentError, naming the argument, where a TrainStep cannot use a value of this kind."""
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ArgumentError(
                "scheduler is ReduceLROnPlateau, which needs a metric in each step; expected one "
                "whose step() takes none, or call it yourself after the step"
            )
        if not callable(getattr(scheduler, "step", None)):
            raise ArgumentError(
                f"scheduler is {described(scheduler)}; expected a learning-rate scheduler, a list "
                "of them, or None"
            )
    loss_of_outputs = isinstance(loss_fn, nn.modules.loss._Loss)
    if loss_of_outputs or getattr(loss_fn, "__module__", "") == F.__name__:
        name = type(loss_fn).__name__ if loss_of_outputs else loss_fn.__name__
        raise ArgumentError(
            f"loss_fn is {name}, which takes outputs and targets; expected a function of (model, "
            "micro): lambda model, micro: criterion(model(micro[0]), micro[1])"
        )
    if not callable(loss_fn):
        raise ArgumentError(
            f"loss_fn is {described(loss_fn)}; expected a function of (model, micro)"
        )
    if not isinstance(micro_batches, numbers.Integral) or micro_batches < 1:
        raise ArgumentError(
            f"micro_batches is {micro_batches!r}; expected a whole number of 1 or more"
        )
    if not isinstance(autocast, (torch.dtype, type(None))):
        raise ArgumentError(
            f"autocast is {autocast!r}; expected a dtype, such as torch.bfloat16, or None"
        )
    if autocast == torch.float16:
        raise ArgumentError(
            "autocast is torch.float16: float16 needs a scaled loss: a loop of your own with "
            "torch.amp.GradScaler, or bfloat16"
        )
    if not isinstance(distributed, (Distributed, type(None))):
        raise ArgumentError(
            f"distributed is {described(distributed)}; expected a ga.Distributed, or None"
        )


def warn_of_ranks_alone(model: nn.Module):
    """One warning where this is one of several ranks, and nothing sums their gradients."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.getenv("WORLD_SIZE") or 1)
    if ranks < 2 or any(
        isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()
    ):
        return
    log.warning(
        "this TrainStep is that of one of %d ranks and sums no gradients over them, so that their "
        "models differ from the first step on: expected distributed=ga.Distributed()",
        ranks,
    )


def check_clip(optimizers, clipping_opt: DeviceOptimizer | None, max_norm: float | None):
    """ArgumentError where gradients would be clipped twice: here and by an optimizer."""
    for opt in optimizers:
        if not isinstance(opt, DeviceOptimizer) or opt.max_norm is None or max_norm is None:
            continue
        if clipping_opt is None or max_norm != opt.max_norm:
            raise ArgumentError(
                f"max_norm is {max_norm} here and {opt.max_norm} in {type(opt).__name__}: "
                "gradients would be clipped twice; give it once"
            )


def check_tensors(optimizers, arena: Arena) -> list[nn.Parameter]:
    """ArgumentError unless each trained parameter of the module is in an arena, and each of this
    arena in one optimizer, and in one only.

    Returns:
        The other parameters, which are frozen.
    """
    arenas = Arena.all()
    frozen = []
    for name, p in arena.module.named_parameters():
        if all(each.number_of(p) is None for each in arenas):
            if p.requires_grad:
                raise ArgumentError(
                    f"parameter {name} is not in the arena, which would not train it; it was added "
                    "or unfrozen after the arena was made: call arena.release(), and make a new "
                    "Arena"
                )
            frozen.append(p)
    names = {id(p): name for name, p in arena.module.named_parameters()}
    # id of a tensor -> index of its optimizer.
    holders: dict[int, int] = {}
    for k, opt in enumerate(optimizers):
        for g, group in enumerate(opt.param_groups):
            for p in group["params"]:
                if id(p) in arena.master_ids:
                    if holders.setdefault(id(p), k) != k:
                        name = next(n for n, m in arena.named_parameters().items() if m is p)
                        both = type(optimizers[holders[id(p)]]).__name__, type(opt).__name__
                        raise ArgumentError(
                            f"{name} is in two optimizers, {both[0]} and {both[1]}; expected each "
                            "tensor in one of them"
                        )
                    continue
                if not p.requires_grad:
                    continue
                if id(p) in names:
                    tensor = f"parameter {names[id(p)]} ({p.dtype})"
                else:
                    tensor = f"a tensor of shape {tuple(p.shape)} that is not the model's"
                raise ArgumentError(
                    f"group {g} of the optimizer holds {tensor}; expected tensors of "
                    "arena.parameters(), the fp32 masters: arena = ga.Arena(model); "
                    "opt = torch.optim.AdamW(arena.parameters())"
                )
    for segment, p, master in zip(arena.segments, arena.module_parameters, arena.masters):
        if id(master) in holders:
            continue
        if p.requires_grad:
            kinds = ", ".join(type(opt).__name__ for opt in optimizers)
            raise ArgumentError(
                f"no optimizer holds {segment.name}, which would not be trained ({kinds}); "
                "expected all of arena.parameters(), or requires_grad_(False)"
            )
        frozen.append(p)
    return frozen
