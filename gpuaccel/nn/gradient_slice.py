"""Slices of an arena's gradients that products add into, and how a product finds its slice.

A layer keeps the slice's tensor. The tensor's storage, which it shares with no other slice, leads
to the GradientSlice: a compiled backward passes tensors only, and other tensor objects than the
layer's, but of the same storage.
"""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ..errors import ArgumentError
from .gradient_use import ADDED, RETURNED, UNUSED, GradientUse, gradient_uses, in_backward


class SlicePart(NamedTuple):
    """The part of a slice that one product is written to.

    Attributes:
        acc: fp32, (rows, in).
        columns: of dy that the rows are for; None: all.
        overwrite: the content is of an earlier accumulation window, and is overwritten.
    """

    acc: Tensor
    columns: slice | None
    overwrite: bool


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
        if in_backward():
            raise ArgumentError(
                f"a weight-gradient product was given a tensor of shape {tuple(self.acc.shape)} "
                "that is not a slice of an arena: either the TrainStep was closed between forward "
                "and backward, or a torch.compile backend other than inductor passed on a copy. "
                "Instead: close it after backward; compile with backend='inductor', which is the "
                "default"
            )
        # The operation was called directly.
        return [ADDED]

    def begin(self, uses: list[GradientUse]) -> list[SlicePart]:
        """What a product writes: the whole slice, or the part of each weight that is ADDED."""
        return [SlicePart(self.acc, None, False)] if ADDED in uses else []

    def end(self, uses: list[GradientUse]):
        """Called after the product of begin() has been added."""


def slice_of(acc: Tensor) -> GradientSlice:
    """The GradientSlice of a tensor's storage; a new one, of no arena, if that is gone."""
    reference = getattr(acc.untyped_storage(), "gpuaccel_slice", None)
    target = None if reference is None else reference()
    return GradientSlice(acc) if target is None else target
