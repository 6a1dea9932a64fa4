"""What is asked of autograd: in forward, by whom; in a running backward, for which gradients.

torch has no public functions that answer this. Its private ones stand here, and nowhere else in
this folder.
"""

import enum
from collections.abc import Iterable

import torch
from torch.autograd import forward_ad


def differentiates_otherwise() -> bool:
    """True if a transform of torch.func or forward-mode differentiation is active."""
    # The conditions that are mostly false come first: each call costs time on a slow CPU.
    return (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ) and not torch.compiler.is_compiling()


def backward_may_add() -> bool:
    """True if gradients are enabled, and only backward() can ask for them."""
    return torch.is_grad_enabled() and not differentiates_otherwise()


def in_backward() -> bool:
    """True if autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def has_second_derivative() -> bool:
    """True if the running backward has create_graph=True."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class GradientUse(enum.Enum):
    """What the running backward does with the gradient of a weight."""

    UNUSED = enum.auto()  # nothing: it need not be computed
    ADDED = enum.auto()  # accumulates it, and only the sum is seen
    RETURNED = enum.auto()  # hands it to the caller, to a hook, or to a graph of its own


UNUSED, ADDED, RETURNED = GradientUse


def gradient_uses(edges: Iterable[tuple]) -> list[GradientUse]:
    """What the running backward does with the gradient of each weight, hooks apart.

    Args:
        edges: to the weights: (node, ...) of an autograd function's next_functions, or of
            torch.autograd.graph.get_gradient_edge().
    """
    return [UNUSED if edge[0] is None else _node_use(edge[0]) for edge in edges]


def _node_use(node) -> GradientUse:
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch.autograd.grad() returns this leaf's gradient to its caller.
        return RETURNED
    return ADDED if runs else UNUSED
