"""The protocols by which the parts of a step tell ga.GraphedStep what a captured graph must know.

A CUDA graph repeats work on the device. What the host does (a changed learning rate, a flag, an
allocation) is not in it. An object in `state` (a module inside a module, an optimizer) whose step
involves the host implements one of these protocols, as ga.AdamW and ga.Embedding do, and
optim/participants.py for an arena. Parameters, buffers, gradients and the state of a torch
optimizer need none: GraphedStep knows them by torch's own interfaces.
"""

from collections.abc import Callable, Hashable
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from ..errors import CaptureError
from ..nn import fused_forward
from ..optim import Arena, capture_participants


@runtime_checkable
class CaptureParticipant(Protocol):
    """An object in `state` whose step involves the host."""

    def graph_key(self) -> Hashable:
        """The host values that a captured graph keeps. A call with another key captures anew."""

    def tensors_changed_by_step(self) -> list[Tensor]:
        """What a step writes beside those, to be restored after a warm-up."""


@runtime_checkable
class Refreshable(Protocol):
    """A participant with values on the device that come from the host, as a learning rate does."""

    def prepare(self) -> None:
        """Before a warm-up: allocate memory and compile kernels, which no capture may do."""

    def refresh(self) -> None:
        """Copy changed host values to the device memory that the graph reads; never waits.

        Called before a capture and before each replay."""


@runtime_checkable
class HasHostState(Protocol):
    """A participant whose step changes state on the host."""

    def snapshot(self) -> Callable[[], None]:
        """Save the host state before a warm-up. The function returned restores it."""


def participants_of(state) -> list[CaptureParticipant]:
    """The participants among `state` (modules, optimizers, tensors) and the modules inside it."""
    participants: list[CaptureParticipant] = []
    for member in state:
        if isinstance(member, nn.Module):
            for module in member.modules():
                participants += capture_participants(module)
            participants += _layers_of(member)
        elif isinstance(member, CaptureParticipant):
            participants.append(member)
    return participants


class OtherSums:
    """Which weights have gradients in arenas that are not part of a step; check() compares.

    Args:
        participants: of the step.
    """

    def __init__(self, participants: list[CaptureParticipant]):
        mine = [getattr(participant, "arena", None) for participant in participants]
        self._before = [
            (arena, arena.gradients.received())
            for arena in Arena.all()
            if all(arena is not other for other in mine)
        ]

    def check(self):
        """CaptureError where a backward has added to one of them."""
        for arena, before in self._before:
            for segment, had, has in zip(arena.segments, before, arena.gradients.received()):
                if has and not had:
                    raise CaptureError(
                        f"the step's backward also reaches {segment.name} of another arena, whose "
                        "`.grad` a replay would not set. Instead: requires_grad_(False) on that "
                        "model while the step runs"
                    )


def buffers_of(module: nn.Module) -> list[Tensor]:
    """What forward may change: buffers, and tensors that layers count in, as ga.Embedding does.

    Args:
        module: any module.
    """
    counters = [t for layer in _layers_of(module) for t in layer.tensors_changed_by_step()]
    return [*module.buffers(), *counters]


def _layers_of(module: nn.Module) -> list[CaptureParticipant]:
    """Modules that take part in captures, and objects that replace a module's forward."""
    layers: list[CaptureParticipant] = []
    for part in module.modules():
        for layer in (part, fused_forward(part)):
            if isinstance(layer, CaptureParticipant):
                layers.append(layer)
    return layers
