"""Accumulation mode "fused": the product that computes a weight's gradient adds it into the arena by itself.

Every nn.Linear whose weight has no hooks is reached through a FusedLinear in the place of its `forward`, every nn.Embedding through
a FusedEmbedding (nn/). A product says when it is about to be added, and when it has been. The other tensors go as in mode "arena".
"""

import itertools

import torch

from ..nn import (
    FusedLinear,
    Joint,
    fuse_embedding,
    has_class_forward,
    parameter_needed,
    register_slice,
    unregister_slice,
)
from .accumulation_modes import ArenaMode, chunk_table_of


class _ProductSlice:
    """A slice of arena.grads that products are added into: one weight, or several side by side (nn.fused_linear.GradientSlice)."""

    def __init__(self, mode: "FusedMode", tensors: "list[int]", grad):
        self.mode = mode
        self.tensors = tensors
        self.grad = grad
        register_slice(grad, self)

    def before_product(self, needed):
        if torch._C._current_graph_task_id() == -1:
            return None
        params, segments = self.mode.arena.params, self.mode.arena.segments
        if needed is None:
            needed = [parameter_needed(params[i]) for i in self.tensors]
        adding = [i for i, is_needed in zip(self.tensors, needed) if is_needed]
        self.mode.product_begins(adding)
        if len(adding) == len(self.tensors):
            return None
        ends = list(itertools.accumulate([0, *(segments[i].shape[0] for i in self.tensors)]))
        return [
            (start, stop) for i, start, stop in zip(self.tensors, ends, ends[1:]) if i in adding
        ]

    def after_product(self):
        if torch._C._current_graph_task_id() != -1:
            self.mode.product_added(self.tensors)

    def close(self):
        unregister_slice(self.grad)


class FusedMode(ArenaMode):
    """See this module's first lines. open_backward: called before the first product of a backward. listener: a function that
    returns the BackwardListener of the running backward, or None."""

    def __init__(self, arena, window, open_backward, listener):
        super().__init__(arena, window)
        self._open_backward = open_backward
        self._listener = listener
        # Products added to each tensor in this backward, and in the one before.
        self.products_added = self.products_before = [0] * len(arena.segments)
        # Tensors of products that got a gradient from autograd, too (a tied weight).
        self.also_from_autograd: "set[int]" = set()
        self._fused = {}
        self._slices = []
        index = {id(p): i for i, p in enumerate(arena.params)}
        for layer in arena.module.modules():
            # Hooks of a weight expect a gradient, which a product hands to nobody.
            i = index.get(id(getattr(layer, "weight", None)))
            if i is not None and not arena.params[i]._backward_hooks:
                fused = _fuse(layer, arena.grad_views[i])
                if fused is not None:
                    self._fused[layer] = fused
                    self._slices.append(_ProductSlice(self, [i], arena.grad_views[i]))
        self.product_tensors = {i for part in self._slices for i in part.tensors}
        for layer in arena.module.modules():
            for names in getattr(layer, "FUSED_LINEARS", ()):
                self._join([getattr(layer, name) for name in names], index)
        self._others = chunk_table_of(arena, set(range(len(arena.segments))) - self.product_tensors)

    def _join(self, layers, index):
        """Layers of one input whose weights lie side by side become one product (nn.fused_linear.fused_linears)."""
        fused = [self._fused.get(layer) for layer in layers]
        if not all(isinstance(f, FusedLinear) and f.layer.bias is None for f in fused):
            return
        if len({layer.weight.dtype for layer in layers}) > 1:
            return
        # In the order of the arena.
        tensors = [index[id(layer.weight)] for layer in reversed(layers)]
        segments = [self.arena.segments[i] for i in tensors]
        if any(a.offset + a.numel != b.offset for a, b in zip(segments, segments[1:])):
            return
        fp32 = layers[0].weight.dtype == torch.float32
        weights = self.arena.weights if fp32 else self.arena.bf16_weights
        start = segments[0].offset
        stop = start + sum(s.numel for s in segments)
        fused[0].joint = Joint(
            *(
                buffer[start:stop].view(-1, layers[0].in_features)
                for buffer in (weights, self.arena.grads)
            )
        )
        self._slices.append(_ProductSlice(self, tensors, fused[0].joint.grad))

    # ---- while backward runs ----

    def begin(self):
        super().begin()
        self.products_added = [0] * len(self.products_added)

    def end(self):
        self.products_before = self.products_added

    def add(self, i, grad, squares):
        super().add(i, grad, squares)
        if i in self.product_tensors:
            self.also_from_autograd.add(i)

    def product_begins(self, tensors: "list[int]"):
        """A product is about to be added to these tensors."""
        if not tensors:
            return
        self._open_backward()
        self.arena.squares.mark(tensors, False)
        for i in tensors:
            self.window.received[i] = True
            self.products_added[i] += 1

    def product_added(self, tensors: "list[int]"):
        listener = self._listener()
        if listener is not None:
            listener.product_added({i: self.is_last_product(i) for i in tensors})

    def is_last_product(self, i) -> bool:
        """Has tensor i received as many products as in the backward before, and nothing beside them?"""
        return 0 < self.products_added[i] == self.products_before[i] and (
            i not in self.also_from_autograd
        )

    def chunks_for(self, tensors):
        # A tied weight may also get a gradient that waits for a launch.
        if self.product_tensors.intersection(tensors):
            return super().chunks_for(tensors)
        return self._others

    def close(self):
        for part in self._slices:
            part.close()
        for fused in self._fused.values():
            fused.remove()


def _fuse(layer, grad):
    """What takes the place of the layer's forward; None: the layer stays as it is."""
    if not has_class_forward(layer):
        return None
    if type(layer) is torch.nn.Linear:
        return FusedLinear(layer, grad)
    return fuse_embedding(layer, grad)
