"""An arena in a captured step: the protocol of graphs/participant.py."""

from torch import Tensor, nn

from .arena import Arena


class ArenaParticipant:
    """Tells ga.GraphedStep what a step changes in an arena."""

    def __init__(self, arena: Arena):
        self.arena = arena

    def graph_key(self):
        """Which weights are trained, which have a gradient (that decides what is added to), and the
        tensor hooks, whose operations are captured with the backward."""
        return tuple(
            [
                (p.requires_grad, p.grad is None, *(p._backward_hooks or ()))
                for p in self.arena.module_parameters
            ]
        )

    def tensors_changed_by_step(self) -> list[Tensor]:
        buffers = [self.arena.weights, self.arena.bf16_weights, self.arena.grads]
        return [buffer for buffer in buffers if buffer is not None]

    def prepare(self):
        self.arena.check()
        self.arena.adopt()

    def refresh(self):
        """A replay reads the masters: they take over edits of bf16 parameters."""
        self.arena.adopt()

    def snapshot(self):
        arena = self.arena
        arena.adopt()
        gradients = [p.grad for p in arena.module_parameters]

        def restore():
            arena.weights_current()
            for p, grad in zip(arena.module_parameters, gradients):
                p.grad = grad

        return restore


def capture_participants(module: nn.Module) -> list[ArenaParticipant]:
    """The arena made of this very module, as a participant; [] without one.

    Args:
        module: any module.
    """
    arena = Arena.of(module)
    return [] if arena is None else [ArenaParticipant(arena)]
