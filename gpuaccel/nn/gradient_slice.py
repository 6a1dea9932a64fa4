"""Slices of an arena's gradients that products add into, and what is asked of autograd meanwhile.

A layer keeps the slice's tensor. The tensor's storage, which it shares with no other slice, leads
to the GradientSlice: a compiled backward passes tensors only, and other tensor objects than the
layer's, but of the same storage.

torch has no public functions that say, in a forward, by whom gradients may be asked for, and in a
running backward, for which. Its private ones stand here, and nowhere else in this folder.
"""

import enum
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ArgumentError

# ---- what is asked of autograd -------------------------------------------------------------------


def differentiates_otherwise() -> bool:
    """True if a transform of torch.func or forward-mode differentiation is active."""
    # The conditions that are mostly false come first: each call costs time on a slow CPU.
    return (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ) and not torch.compiler.is_compiling()


def backward_may_add() -> bool:
    """True if gradients are enabled, and only backward() can ask for them."""
    return torch.is_grad_enabled() and not differentiates_otherwise()


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


# ---- slices --------------------------------------------------------------------------------------


class GradientSlice:
    """The gradient sums of one weight, or of several side by side, into which products add.

    A product calls uses(), begin(), adds to each part, and calls end(). An arena's slices are of a
    subclass (optim/products.py). This class replaces one whose TrainStep was closed between forward
    and backward: gradients go to autograd.

    Args:
        acc: (rows, in) fp32, with a storage that belongs to no other slice. It is what layers
            pass to the operations, and leads to this object, which it does not keep alive.
    """

    def __init__(self, acc: Tensor):
        self.acc = acc
        vars(acc.untyped_storage())["gpuaccel_slice"] = weakref.ref(self)

    def uses(self, edges: Iterable[tuple] | None = None) -> list[GradientUse]:
        """What the running backward does with the gradient of each weight of the slice.

        Args:
            edges: to the weights, as for gradient_uses(). None: the layer is compiled.

        Raises:
            ArgumentError: for a gradient that a compiled layer would have to return.
        """
        if edges is not None:
            return [UNUSED if use is UNUSED else RETURNED for use in gradient_uses(edges)]
        # Autograd runs a backward in this thread: the operation was not called directly.
        if torch._C._current_graph_task_id() != -1:
            raise ArgumentError(
                f"a weight-gradient product was given a tensor of shape {tuple(self.acc.shape)} "
                "that is not a slice of an arena: either the TrainStep was closed between forward "
                "and backward, or a torch.compile backend other than inductor passed on a copy. "
                "Instead: close it after backward; compile with backend='inductor', which is the "
                "default"
            )
        return [ADDED]

    def begin(self, uses: list[GradientUse]) -> list[tuple[Tensor, slice | None, bool]]:
        """What a product is written to: the whole slice, or the part of each weight that is ADDED.

        Args:
            uses: of uses().

        Returns:
            For each part: where it is added, (rows, in) fp32; the columns of dy that these rows are
            for, None for all; whether its content is of an earlier accumulation window, and is
            overwritten.
        """
        return [(self.acc, None, False)] if ADDED in uses else []

    def end(self, uses: list[GradientUse]):
        """Called after the product of begin() has been added.

        Args:
            uses: of uses().
        """


def slice_of(acc: Tensor) -> GradientSlice:
    """The GradientSlice of a tensor's storage; a new one, of no arena, if that is gone."""
    reference = getattr(acc.untyped_storage(), "gpuaccel_slice", None)
    target = None if reference is None else reference()
    return GradientSlice(acc) if target is None else target
