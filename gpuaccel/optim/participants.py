"""An arena and its accumulator in a captured step: the protocol of graphs/participant.py."""

from torch import Tensor, nn

from .accumulate import GradientAccumulator
from .arena import Arena


class ArenaParticipant:
    """Tells ga.GraphedStep what a step changes in an arena and in its open accumulator, if any."""

    def __init__(self, arena: Arena):
        self.arena = arena

    def graph_key(self):
        """The accumulator's mode; None without one."""
        accumulator = GradientAccumulator.of(self.arena)
        return accumulator and accumulator.mode

    def tensors_changed_by_step(self) -> "list[Tensor]":
        buffers = [self.arena.weights, self.arena.bf16_weights, self.arena.grads]
        return [buffer for buffer in buffers if buffer is not None]

    def prepare(self):
        self.arena.adopt()

    def refresh(self):
        """A replay reads the masters: they take over edits of bf16 parameters."""
        self.arena.adopt()

    def snapshot(self):
        arena, accumulator = self.arena, GradientAccumulator.of(self.arena)
        arena.adopt()
        gradients = [(master, master.grad) for master in arena.masters]
        window = accumulator and accumulator.window_state()

        def restore():
            arena.grads_changed()
            arena.weights_current()
            if accumulator is not None:
                accumulator.set_window_state(window)
            for master, grad in gradients:
                master.grad = grad

        return restore


def capture_participants(module: nn.Module) -> "list[ArenaParticipant]":
    """The arena made of this very module, as a participant; [] without one.

    Args:
        module: any module.
    """
    arena = Arena.of(module)
    return [] if arena is None else [ArenaParticipant(arena)]
