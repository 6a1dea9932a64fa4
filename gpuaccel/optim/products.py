"""Layers whose weight-gradient product adds into the arena, in place of autograd.

    with_products = Products(arena)      # the arena's layers add by their products
    with_products.close()                # ordinary layers again

A TrainStep uses them with replay="graph", where the calls of products cost the host nothing, and
with deterministic=True, so that launched steps are bit-identical to replayed ones.

FusedLinear replaces the `forward` of every nn.Linear whose weight has no hooks, FusedConv1D that of
every Conv1D of transformers, and FusedEmbedding that of every nn.Embedding (nn/). Subclasses, and
layers with a forward of their own, are left alone. The product writes `.grad` by the arena's rule:
None is overwritten, a sum is added to. Nothing is rounded between the product and the fp32 sum.
Autograd computes all other gradients.

Layers with one input (FUSED_LINEARS of their module) become one product if their weights are
adjacent in the arena.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version

from ..errors import ArgumentError
from ..nn import (
    FusedConv1D,
    FusedEmbedding,
    FusedForward,
    FusedLinear,
    GradientSlice,
    GradientUse,
    Joint,
    gradient_uses,
    has_class_forward,
)
from .arena import Arena
from .layout import own_storage

ADDED, RETURNED = GradientUse.ADDED, GradientUse.RETURNED
# Replacements of a layer's forward.
KINDS: tuple[type[FusedForward], ...] = FusedLinear, FusedConv1D, FusedEmbedding


class _ProductSlice(GradientSlice):
    """A slice of arena.grads to which matrix products add.

    Layers hold it as `acc`, a separate tensor. The arena's own view may be exposed as `.grad`, and
    whoever sees it may replace its memory.

    Args:
        products: is notified of each addition.
        tensors: indices of the slice's weights, in the arena's order.
    """

    def __init__(self, products: "Products", tensors: tuple[int, ...]):
        self.products = products
        self.arena = products.arena
        self.tensors = tensors
        segments = [self.arena.segments[i] for i in tensors]
        stops = list(itertools.accumulate(s.shape[0] for s in segments))
        # The columns of dy that belong to each weight; None: all.
        self._columns: list[slice | None] = [None]
        if len(tensors) > 1:
            self._columns = [slice(*ends) for ends in zip([0, *stops], stops)]
        first, last = segments[0], segments[-1]
        acc = self.arena.grads[first.offset : last.offset + last.numel]
        super().__init__(own_storage(acc.view(stops[-1], *first.shape[1:])))

    def uses(self, edges=None):
        if edges is None:
            return self._uses_when_compiled()
        with_graph = torch.is_grad_enabled()
        return [
            RETURNED if use is ADDED and (with_graph or _has_hooks(self.arena, i)) else use
            for i, use in zip(self.tensors, gradient_uses(edges))
        ]

    def _uses_when_compiled(self) -> list[GradientUse]:
        arena = self.arena
        uses = gradient_uses([get_gradient_edge(arena.module_parameters[i]) for i in self.tensors])
        for i, use in zip(self.tensors, uses):
            name = arena.segments[i].name
            if use is RETURNED:
                what = f"torch.autograd.grad() asks for the gradient of {name}"
            elif use is ADDED and _has_hooks(arena, i):
                what = f"{name} got a hook after the TrainStep was made"
            else:
                continue
            raise ArgumentError(
                f"{what}, which a compiled layer adds to the arena and shows to nobody. Instead: "
                "do not compile it, or register hooks before the TrainStep is made"
            )
        return uses

    def begin(self, uses):
        arena = self.arena
        # Tensor -> whether this product overwrites its sum. The first of an accumulation window
        # does, so that no kernel has to zero it.
        overwrite = {}
        for i, use in zip(self.tensors, uses):
            if use is ADDED:
                overwrite[i] = arena.gradients.is_stale(i)
                arena.module_parameters[i].grad = arena.gradients.views[i]
                self.products.added[i] += 1
        # One product writes adjacent slices, if all are written and in the same way. Otherwise each
        # weight has a product with its own columns of dy.
        if len(self.tensors) == len(overwrite) > 1 and len({*overwrite.values()}) == 1:
            # The product writes `acc`, which shares memory but no version with the views.
            increment_version([arena.gradients.views[i] for i in self.tensors])
            return [(self.acc, None, overwrite[self.tensors[0]])]
        return [
            (arena.gradients.views[i], columns, overwrite[i])
            for i, columns in zip(self.tensors, self._columns)
            if i in overwrite
        ]

    def end(self, uses):
        self.products.report([i for i, use in zip(self.tensors, uses) if use is ADDED])


class Products:
    """The products of an arena's layers add into it, until close().

    Attributes:
        tensors: indices of the tensors whose gradient products add.

    Args:
        arena: whose layers are looked at.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        # Products added to each tensor in this backward, and in the one before.
        self.added = [0] * len(arena.segments)
        self.added_before = self.added
        # The version of each gradient after its last product.
        self._versions = [0] * len(arena.segments)
        # Tensors to which autograd adds as well: a layer's weight that something else uses, too.
        self.also_from_autograd: set[int] = set()
        self.tensors: set[int] = set()
        self._fused: dict[nn.Module, FusedForward] = {}
        # Layers hold `acc`, which does not keep its slice alive.
        self._slices: dict[tuple[int, ...], _ProductSlice] = {}
        for layer in arena.module.modules():
            # Not the attribute, which a parametrization would compute.
            weight = dict(layer.named_parameters(recurse=False)).get("weight")
            i = None if weight is None else arena.number_of(weight)
            kind = next((kind for kind in KINDS if kind.supports(layer)), None)
            # A weight with hooks needs its gradient from autograd.
            if i is None or kind is None or not has_class_forward(layer) or _has_hooks(arena, i):
                continue
            self._fused[layer] = kind(layer, self._acc((i,)))
            self.tensors.add(i)
        for layer in arena.module.modules():
            for names in getattr(layer, "FUSED_LINEARS", ()):
                self._add_joint([getattr(layer, name) for name in names])
        arena.before_release.append(self.close)

    def _acc(self, tensors: tuple[int, ...]) -> Tensor:
        """`acc` of the slice with these weights. Layers that share a weight share it."""
        if tensors not in self._slices:
            self._slices[tensors] = _ProductSlice(self, tensors)
        return self._slices[tensors].acc

    def _add_joint(self, layers: list[nn.Module]):
        """Compute several layers with one input by one product (nn.fused_linears).

        Has no effect unless their weights are adjacent in the arena.
        """
        # The arena stores parameters last to first; `linears` has that order.
        linears: list[Any] = [
            layer
            for layer in reversed(layers)
            if isinstance(layer, nn.Linear) and layer in self._fused and layer.bias is None
        ]
        if len(linears) < len(layers) or len({linear.weight.dtype for linear in linears}) > 1:
            return
        numbers = [self.arena.number_of(linear.weight) for linear in linears]
        # None of them is None: a layer in `_fused` has its weight in the arena.
        tensors = tuple(i for i in numbers if i is not None)
        segments = [self.arena.segments[i] for i in tensors]
        if any(a.offset + a.numel != b.offset for a, b in zip(segments, segments[1:])):
            return
        fp32 = linears[0].weight.dtype == torch.float32
        weights = self.arena.weights if fp32 else self.arena.bf16_weights
        assert weights is not None  # one of its parameters is bf16
        grad = self._acc(tensors)
        start = segments[0].offset
        weight = weights[start : start + grad.numel()].view_as(grad)
        # fused_linears() looks at the first layer of forward, which is the last one here.
        self._fused[layers[0]].joint = Joint(weight, grad, tuple(layers))

    # ---- while backward runs ----

    def begin_backward(self):
        """Count the products of the next backward from zero."""
        self.added_before, self.added = self.added, [0] * len(self.added)

    def end_backward(self):
        """Find tensors whose gradient autograd changed after the last product."""
        for i in self.tensors:
            if self.added[i] and self.arena.gradients.views[i]._version != self._versions[i]:
                self.also_from_autograd.add(i)

    def report(self, tensors: list[int]):
        """Report that a product was added to these tensors (indices)."""
        complete = {}
        for i in tensors:
            self._versions[i] = self.arena.gradients.views[i]._version
            same_number = 0 < self.added[i] == self.added_before[i]
            # A slice is complete after as many products as in the last backward, unless autograd
            # adds to it as well, at a time that is not known here.
            complete[i] = same_number and i not in self.also_from_autograd
        self.arena.gradients.product_added(complete)

    def close(self):
        """Restore the layers' own forwards."""
        for fused in self._fused.values():
            fused.remove()
        self._slices.clear()
        if self.close in self.arena.before_release:
            self.arena.before_release.remove(self.close)


def _has_hooks(arena: Arena, i: int) -> bool:
    """True if a hook reads this weight's gradient or runs when it is accumulated."""
    return bool(arena.module_parameters[i]._backward_hooks) or arena.gradients.has_hooks(i)
