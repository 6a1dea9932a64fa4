"""State is saved before a warm-up and restored after it: a capture leaves no trace.

with preserved([model, opt], "cuda"):
    step(batch)                      # trained, and as if it had not been
"""

import contextlib
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..ops import span
from .participant import HasHostState, participants_of


@contextlib.contextmanager
def preserved(state, device):
    """After the block, `state` and the random generators are as before it.

    Costs a copy of all of it while the block runs.

    Args:
        state: modules (parameters, buffers, gradients), optimizers, tensors.
        device: whose random generator is restored, beside the CPU's.

    Raises:
        CaptureError: after the block for an optimizer that made state in it whose initial value is
            not known.
    """
    participants = participants_of(state)
    # First: a snapshot may bring tensors up to date, and these values are what is copied.
    restore_host = [p.snapshot() for p in participants if isinstance(p, HasHostState)]
    restore_host.append(_snapshot_generators(device))
    copies = TensorCopies()
    for participant in participants:
        copies.add(participant.tensors_changed_by_step())
    restore_structure, restore_optimizers = [], []
    for member in state:
        if isinstance(member, Tensor):
            copies.add([member])
        elif isinstance(member, nn.Module):
            restore_structure.append(_snapshot_module(member, copies))
        else:
            restore_optimizers.append(_snapshot_optimizer(member, copies))
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in restore_structure:
                restore()
            copies.restore()
            for restore in [*restore_host, *restore_optimizers]:
                restore()


class TensorCopies:
    """Copies of tensors; memory that several tensors share is copied once."""

    def __init__(self):
        self._copies: "list[tuple[Tensor, Tensor]]" = []
        self._spans = MemorySpans()

    def add(self, tensors):
        for t in tensors:
            if t.numel() and t not in self._spans:
                self._copies.append((t.detach(), t.detach().clone()))
                self._spans.add(t)

    def restore(self):
        for t, value in self._copies:
            t.copy_(value)


class MemorySpans:
    """The memory of some tensors. `t in spans`: does all of t's memory lie in one of them?"""

    def __init__(self, tensors=()):
        self._spans = set()
        for t in tensors:
            self.add(t)

    def add(self, t: Tensor):
        if t.is_contiguous():
            self._spans.add(span(t))

    def __contains__(self, t: Tensor) -> bool:
        start, stop = span(t)
        if (start, stop) in self._spans:
            return True
        return any(first <= start and stop <= last for first, last in self._spans)


def _snapshot_generators(device) -> "Callable[[], None]":
    """Save the states of the random generators of Python, NumPy and torch."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.device(device).type == "cuda"
    gpu = torch.cuda.get_rng_state(device) if on_gpu else None

    def restore():
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if on_gpu:
            torch.cuda.set_rng_state(gpu, device)

    return restore


def _snapshot_module(module: nn.Module, copies: TensorCopies) -> "Callable[[], None]":
    """Save parameters, buffers and gradients: values in `copies`, which tensors they are here."""
    registered = [
        (entries, dict(entries))
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
    ]
    data = [(p, p.data) for p in module.parameters()]
    gradients = [(p, p.grad) for p in module.parameters()]
    copies.add([*module.parameters(), *module.buffers()])
    copies.add([grad for _, grad in gradients if grad is not None])

    def restore():
        for entries, before in registered:
            entries.update(before)
        for p, tensor in data:
            if p.data_ptr() != tensor.data_ptr():
                p.data = tensor
        for p, grad in gradients:
            p.grad = grad

    return restore


def _snapshot_optimizer(opt: torch.optim.Optimizer, copies: TensorCopies) -> "Callable[[], None]":
    """Save an optimizer's parameters, their gradients, and its state tensors."""
    params = [p for group in opt.param_groups for p in group["params"]]
    gradients = [(p, p.grad) for p in params]
    existing = {p: set(opt.state.get(p, ())) for p in params}
    state = [t for p in params for t in opt.state.get(p, {}).values()]
    copies.add([*params, *(t for t in state if isinstance(t, Tensor))])
    copies.add([grad for _, grad in gradients if grad is not None])

    def restore():
        for p, grad in gradients:
            p.grad = grad
        new = [(p, key) for p in params for key in opt.state.get(p, ()) if key not in existing[p]]
        tensors = [opt.state[p][key] for p, key in new if isinstance(opt.state[p][key], Tensor)]
        if isinstance(opt, (torch.optim.Adam, torch.optim.AdamW)):
            for t in tensors:
                # Adam's moments and step numbers start at zero.
                t.zero_()
        elif tensors:
            for p, key in new:
                del opt.state[p][key]
            raise CaptureError(
                f"{type(opt).__name__} makes its state in the first step, and the initial value "
                "of that state is not known: take one step before the capture"
            )

    return restore
