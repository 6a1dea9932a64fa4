"""State is saved before a warm-up and restored after it: a capture leaves no trace.

with preserved([model, opt], "cuda"):
    step(batch)                      # trained, and as if it had not been
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..ops import span
from .participant import HasHostState, buffers_of, participants_of

# What torch.optim.Adam and AdamW keep for each parameter. All of it begins at zero.
ADAM_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
# Times the bytes of the trained weights.
MOST_FROZEN = 4


@dataclass(frozen=True)
class ForwardState:
    """The state that forward and backward of a module change, except trained weights and gradients.

    Replaces the module in `state` if the block does not train it, and its caller drops gradients.

    Attributes:
        module: any module.
    """

    module: nn.Module


@contextlib.contextmanager
def preserved(state, device):
    """Context manager: restore `state` and the random generators after the block.

    Keeps a copy of all of it while the block runs.

    Args:
        state: modules (parameters, buffers, gradients), optimizers, tensors.
        device: whose random generator is restored, beside the CPU's.

    Raises:
        CaptureError: after the block, with all restored that can be, for an optimizer that made
            state in it whose initial value is not known or that counts on the host, and for a
            forward that wrote into trained weights. Not where the block raised.
    """
    participants = participants_of(state)
    # Before the copies: a participant's snapshot() may update tensors.
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
        elif isinstance(member, ForwardState):
            restore_structure.append(_snapshot_forward(member.module, copies))
        else:
            restore_optimizers.append(_snapshot_optimizer(member, copies))
    restores = [*restore_structure, copies.restore, *restore_host, *restore_optimizers]
    try:
        yield
    except BaseException:
        _restored(restores)
        raise
    errors = _restored(restores)
    if errors:
        raise errors[0]


@torch.no_grad()
def _restored(restores: list[Callable[[], None]]) -> list[CaptureError]:
    """Call all of them; return what cannot be restored."""
    errors = []
    for restore in restores:
        try:
            restore()
        except CaptureError as error:
            errors.append(error)
    return errors


class TensorCopies:
    """Copies of tensors; memory that several tensors share is copied once."""

    def __init__(self):
        self._copies: list[tuple[Tensor, Tensor]] = []
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
    """The memory of some tensors. `t in spans` is true if all of t's memory is in one of them."""

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


def _snapshot_generators(device) -> Callable[[], None]:
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


def host_generators(modules: list[nn.Module], device) -> dict[str, object]:
    """Name -> state of the host's random generators, whose numbers a graph would freeze.

    torch's CPU generators are included if the device is a GPU; a tape repeats their operations.

    Args:
        modules: whose attributes are looked at, for generators of their own.
        device: where the step runs.
    """
    numpy: Any = np.random.get_state()
    states: dict[str, object] = {
        "Python's random": random.getstate(),
        "np.random": (numpy[1].tobytes(), *numpy[2:]),
    }
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        states["torch's generator of the CPU"] = torch.get_rng_state().tolist()
    for module in modules:
        for name, value in vars(module).items():
            key = f"{type(module).__name__}.{name}"
            if isinstance(value, random.Random):
                states[key] = value.getstate()
            elif isinstance(value, np.random.Generator):
                states[key] = repr(value.bit_generator.state)
            elif isinstance(value, torch.Generator) and on_gpu and value.device.type == "cpu":
                states[key] = value.get_state().tolist()
    return states


def _snapshot_module(module: nn.Module, copies: TensorCopies) -> Callable[[], None]:
    """Save parameters, buffers and gradients: their values go to `copies`."""
    restore_registered = _snapshot_registered(module)
    gradients = [(p, p.grad) for p in module.parameters()]
    copies.add([*module.parameters(), *module.buffers()])
    copies.add([grad for _, grad in gradients if grad is not None])

    def restore():
        restore_registered()
        for p, grad in gradients:
            p.grad = grad

    return restore


def _snapshot_registered(module: nn.Module) -> Callable[[], None]:
    """Save which tensors are registered as parameters and buffers."""
    registered = [
        (entries, dict(entries.items()))
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
    ]
    data = [(p, p.data) for p in module.parameters()]

    def restore():
        for entries, before in registered:
            # A ScriptModule's entries are not a dict.
            for key, tensor in before.items():
                if key not in entries or entries[key] is not tensor:
                    entries[key] = tensor
        for p, tensor in data:
            if p.data_ptr() != tensor.data_ptr():
                p.data = tensor

    return restore


def _snapshot_forward(module: nn.Module, copies: TensorCopies) -> Callable[[], None]:
    """Save what a forward may change: registered tensors and the values of buffers.

    Frozen weights are saved as well if they are as small as a momentum encoder's. Those of a base
    model under adapters would take too much memory."""
    restore_registered = _snapshot_registered(module)
    trained: list[tuple[str, Tensor, int]] = []
    frozen: list[tuple[str, Tensor, int]] = []
    for name, p in module.named_parameters():
        (trained if p.requires_grad else frozen).append((name, p, p._version))
    copies.add(buffers_of(module))
    if _bytes(frozen) <= MOST_FROZEN * _bytes(trained):
        copies.add(p for _, p, _ in frozen)
        frozen = []

    def restore():
        restore_registered()
        for name, p, version in [*trained, *frozen]:
            if p._version != version:
                raise CaptureError(
                    f"forward writes into the weight {name}, and so would each warm-up. Instead: "
                    "write into it between the steps"
                )

    return restore


def _bytes(named: list[tuple[str, Tensor, int]]) -> int:
    return sum(p.nbytes for _, p, _ in named)


def _snapshot_optimizer(opt: torch.optim.Optimizer, copies: TensorCopies) -> Callable[[], None]:
    params = [p for group in opt.param_groups for p in group["params"]]
    gradients = [(p, p.grad) for p in params]
    existing = {p: dict(opt.state.get(p, {})) for p in params}
    state = [t for values in existing.values() for t in values.values()]
    copies.add([*params, *(t for t in state if isinstance(t, Tensor))])
    copies.add([grad for _, grad in gradients if grad is not None])

    def restore():
        for p, grad in gradients:
            p.grad = grad
        now = [(p, key, value) for p in params for key, value in opt.state.get(p, {}).items()]
        counted = [
            key
            for p, key, value in now
            if not isinstance(value, Tensor) and value is not existing[p].get(key, value)
        ]
        for p, values in existing.items():
            if values:
                opt.state[p].update(values)
        new = [(p, key, value) for p, key, value in now if key not in existing[p]]
        adam = isinstance(opt, (torch.optim.Adam, torch.optim.AdamW))
        if adam and all(isinstance(t, Tensor) and key in ADAM_STATE for _, key, t in new):
            for *_, t in new:
                t.zero_()
            new = []
        for p, key, _ in new:
            del opt.state[p][key]
        name = type(opt).__name__
        if counted:
            raise CaptureError(
                f"{name} changes {counted[0]!r} of its state on the host, which a graph would not "
                "repeat. Instead: a tensor on the device, or ga.AdamW"
            )
        if new:
            raise CaptureError(
                f"{name} makes its state in the first step, and the initial value of that state is "
                "not known: take one step before the capture"
            )

    return restore
