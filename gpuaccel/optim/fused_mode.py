"""Accumulation mode "fused": the product that computes a weight's gradient also adds it to the
arena.

A FusedLinear takes the place of the `forward` of every nn.Linear whose weight has no hooks, a
FusedConv1D that of every Conv1D of transformers, and a FusedEmbedding that of every nn.Embedding
(nn/). They call this module before and after each product. The other tensors go as in mode "arena",
and on a CPU where torch computes also the weights of fewer than LEAST_ELEMENTS.

Layers of one input (FUSED_LINEARS of their module) become one product: trained ones where the arena
has their weights side by side, frozen ones, with LoRA or without, whose weights are moved so.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..backends import takes
from ..compiler import zero_
from ..errors import ArgumentError
from ..nn import (
    FrozenLinear,
    FusedForward,
    FusedLinear,
    GradientUse,
    Joint,
    LoRALinear,
    Rows,
    fuse_embedding,
    fuse_linear,
    has_class_forward,
    parameter_use,
    register_slice,
    unregister_slice,
)
from ..ops import CHUNK
from .accumulation_modes import ArenaMode, Window, chunk_table_of
from .arena import Arena, own_storage

if TYPE_CHECKING:
    from .accumulate import BackwardListener

# On a CPU a product saves one pass over the weight's gradient, and costs some 70 us of Python.
LEAST_ELEMENTS = 2**18


def autograd_adds_faster(arena: Arena) -> bool:
    """Whether mode "autograd" gives the sums of the modes "arena" and "fused" in less time.

    It does on a CPU where torch computes and all weights are small and fp32: torch adds without a
    call of Python for each gradient.

    Args:
        arena: any arena.
    """
    least = _least_elements(arena)
    small = all(segment.numel < least for segment in arena.segments)
    return small and arena.bf16_weights is None


def _least_elements(arena: Arena) -> int:
    """Weights of fewer elements are left to autograd."""
    on_cpu = arena.device.type == "cpu" and not takes(arena.device)
    return LEAST_ELEMENTS if on_cpu else 0


class _ProductSlice:
    """A slice of arena.grads that products are added into (an nn.fused_linear.GradientSlice).

    Args:
        mode: what is told about the products.
        tensors: indices of the weights in the slice: one, or several side by side.
        grad: the slice.
    """

    def __init__(self, mode: "FusedMode", tensors: "list[int]", grad: Tensor):
        self.mode = mode
        self.tensors = tensors
        self.grad = grad
        # Each weight, and whether it has a master.
        arena = mode.arena
        pairs = [(arena.params[i], arena.masters[i]) for i in tensors]
        self._weights = [(p, master is not p) for p, master in pairs]
        # The first row of each weight; at the end the number of rows.
        rows = [len(arena.params[i]) for i in tensors]
        self._first_rows = [0, *itertools.accumulate(rows)]
        register_slice(grad, self)

    def with_hooks(self) -> "list[int]":
        """As GradientSlice says."""
        found = []
        for k, (weight, has_master) in enumerate(self._weights):
            hooks = weight._backward_hooks
            # The accumulator itself has one hook on each weight whose `.grad` it exposes.
            if hooks and len(hooks) > (not has_master or bool(self.mode.window.bf16)):
                found.append(k)
        return found

    def before_product(self, added: "list[bool] | None") -> "list[Rows]":
        """As GradientSlice says; neighbours are joined. Outside of backward no product counts."""
        first_rows = self._first_rows
        if torch._C._current_graph_task_id() == -1:
            # The version of arena.grads does not tell of a write through a storage of its own.
            self.mode.arena.squares.mark(self.tensors, False)
            return [Rows(0, first_rows[-1], False)]
        if added is None:
            added = self._added_when_compiled()
        adding = [i for i, is_added in zip(self.tensors, added) if is_added]
        overwritten = self.mode.product_begins(adding)
        rows: "list[Rows]" = []
        for i, start, stop in zip(self.tensors, first_rows, first_rows[1:]):
            if i not in adding:
                continue
            overwrite = i in overwritten
            if rows and rows[-1][1:] == (start, overwrite):
                start = rows.pop().start
            rows.append(Rows(start, stop, overwrite))
        return rows

    def _added_when_compiled(self) -> "list[bool]":
        """Whether the backward of a compiled layer, which returns no gradient, adds each one."""
        arena = self.mode.arena
        uses = [parameter_use(arena.params[i]) for i in self.tensors]
        with_hooks = self.with_hooks()
        for k, (i, use) in enumerate(zip(self.tensors, uses)):
            name = arena.segments[i].name
            if use is GradientUse.RETURNED:
                what = f"torch.autograd.grad() asks for the gradient of {name}"
            elif use is GradientUse.ADDED and k in with_hooks:
                what = f"{name} got a hook after its accumulator was made"
            else:
                continue
            raise ArgumentError(
                f"{what}, which a compiled layer adds to the arena and shows to nobody. Instead: "
                "do not compile it, register hooks before the accumulator is made, or accumulate "
                "in mode 'arena'"
            )
        return [use is GradientUse.ADDED for use in uses]

    def after_product(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.mode.product_added(self.tensors)

    def close(self):
        unregister_slice(self.grad)


class FusedMode(ArenaMode):
    """Accumulation by the products themselves; see this module's first lines.

    Args:
        open_backward: called before each product; acts before the first of a backward.
        listener: returns the BackwardListener of the running backward, or None.
    """

    def __init__(
        self,
        arena: Arena,
        window: Window,
        open_backward: "Callable[[], None]",
        listener: "Callable[[], BackwardListener | None]",
    ):
        super().__init__(arena, window)
        self._open_backward = open_backward
        self._listener = listener
        # Products added to each tensor in this backward, and in the one before.
        self.products_added = [0] * len(arena.segments)
        self.products_before = self.products_added
        # Tensors that get a gradient from a product and another from autograd (tied weights).
        self.also_from_autograd: "set[int]" = set()
        self._fused: "dict[nn.Module, FusedForward]" = {}
        self._slices: "list[_ProductSlice]" = []
        # Frozen weights that lie side by side -> their addresses.
        self._frozen: "dict[Tensor, int]" = {}
        index = {id(p): i for i, p in enumerate(arena.params)}
        least = _least_elements(arena)
        for layer in arena.module.modules():
            # Not the attribute, which a parametrization would compute.
            i = index.get(id(layer._parameters.get("weight")))
            if i is None or arena.segments[i].numel < least:
                continue
            # A weight with hooks needs its gradient from autograd.
            if not arena.params[i]._backward_hooks:
                fused = _fuse(layer, arena.grad_views[i])
                if fused is not None:
                    self._fused[layer] = fused
                    self._slices.append(_ProductSlice(self, [i], arena.grad_views[i]))
        self.product_tensors = {i for part in self._slices for i in part.tensors}
        for layer in arena.module.modules():
            for names in getattr(layer, "FUSED_LINEARS", ()):
                layers = [getattr(layer, name) for name in names]
                self._add_joint(layers, index)
                self._add_frozen_joint(layers)
        self._give_own_storage()
        self._others = chunk_table_of(arena, set(range(len(arena.segments))) - self.product_tensors)
        # The same chunks' indices in the arena.
        self._other_chunks = self._others[0][:, 3].long()
        self._overwrites = False

    def _add_joint(self, layers: "list[nn.Module]", index: "dict[int, int]"):
        """Make one product of several layers of one input (nn.fused_linear.fused_linears).

        Nothing changes where their weights do not lie side by side in the arena.

        Args:
            index: id of a parameter -> its index in the arena.
        """
        # The arena stores parameters last to first; `fused` has that order.
        fused: "list[FusedLinear]" = []
        for layer in reversed(layers):
            forward = self._fused.get(layer)
            if isinstance(forward, FusedLinear) and forward.layer.bias is None:
                fused.append(forward)
        linears = [forward.layer for forward in fused]
        if len(linears) < len(layers) or len({linear.weight.dtype for linear in linears}) > 1:
            return
        tensors = [index[id(linear.weight)] for linear in linears]
        segments = [self.arena.segments[i] for i in tensors]
        if any(a.offset + a.numel != b.offset for a, b in zip(segments, segments[1:])):
            return
        fp32 = linears[0].weight.dtype == torch.float32
        weights = self.arena.weights if fp32 else self.arena.bf16_weights
        assert weights is not None  # one of its parameters is bf16
        start = segments[0].offset
        stop = start + sum(s.numel for s in segments)
        grad = self.arena.grads[start:stop].view(-1, linears[0].in_features)
        joint = Joint(
            weight=weights[start:stop].view(-1, linears[0].in_features),
            grad=grad,
            kernels=takes(weights.device),
        )
        # fused_linears() looks at the first layer of forward, which is the last one here.
        fused[-1].joint = joint
        self._slices.append(_ProductSlice(self, tensors, grad))

    def _add_frozen_joint(self, layers: "list[nn.Module]"):
        """Make one product of several frozen layers of one input, with LoRA or without.

        Their weights are moved side by side, once, into memory that they keep after close().
        Nothing changes where one of them is trained, or its layer has a bias or dropout.
        """
        # The order of an arena.
        layers = layers[::-1]
        linears = [_frozen_linear(layer, self._fused) for layer in layers]
        weights = [linear.weight for linear in linears if linear is not None]
        kinds = {(weight.dtype, weight.device) for weight in weights}
        # Two weights in one memory stay in it, and a tied one where another group has it.
        addresses = {weight.data_ptr() for weight in weights if weight not in self._frozen}
        if len(addresses) < len(layers) or len(kinds) > 1:
            return
        joint = torch.cat([weight.detach() for weight in weights])
        for layer, weight, piece in zip(layers, weights, joint.split([len(w) for w in weights])):
            weight.data = own_storage(piece)
            self._frozen[weight] = weight.data_ptr()
            self._fused[layer] = first = FrozenLinear(layer, None)
        # As in _add_joint().
        first.joint = Joint(joint, None, takes(joint.device))

    def _give_own_storage(self):
        """Give the gradients of LoRA's factors in joint products storages of their own.

        One operation writes several of them. Where they share a storage, torch.compile's Inductor
        copies them before the operation and back behind it. A weight that several layers have gets
        one storage."""
        factors = {
            self._fused[factor].grad.data_ptr()
            for layer, fused in self._fused.items()
            if isinstance(fused, FrozenLinear) and isinstance(layer, LoRALinear)
            for factor in (layer.lora_A, layer.lora_B)
        }
        own: "dict[tuple, Tensor]" = {}
        for fused in self._fused.values():
            grad = fused.grad
            if grad is not None and grad.data_ptr() in factors:
                fused.grad = own.setdefault((grad.data_ptr(), grad.shape), own_storage(grad))

    # ---- while backward runs ----

    def begin(self):
        for weight, address in self._frozen.items():
            if weight.data_ptr() != address:
                raise ArgumentError(
                    "a frozen weight no longer lies where its layer's product reads it "
                    "(module.to(...) or .data = ... moved it): close the accumulator before, and "
                    "make a new one after"
                )
        super().begin()
        self.products_added = [0] * len(self.products_added)

    def end(self):
        self.products_before = self.products_added

    def add(self, i, grad, squares):
        if i in self.product_tensors:
            self.also_from_autograd.add(i)
            if self._overwrites and not self.window.received[i]:
                self._zero([i])
        super().add(i, grad, squares)

    def product_begins(self, tensors: "list[int]") -> "list[int]":
        """Called before a product is added to these tensors (indices).

        Returns:
            Those whose sum it overwrites.
        """
        if not tensors:
            return []
        self._open_backward()
        self.arena.squares.mark(tensors, False)
        overwritten = []
        for i in tensors:
            if self._overwrites and not self.window.received[i]:
                overwritten.append(i)
            self.window.received[i] = True
            self.products_added[i] += 1
        return overwritten

    def no_gradient(self, i):
        # Before the sum is sent to other ranks.
        if self._overwrites and i in self.product_tensors:
            self._zero([i])

    @contextlib.contextmanager
    def overwriting(self):
        grads = self.arena.grads
        if self.product_tensors:
            # In one launch, for they are many and small.
            grads.view(-1, CHUNK).index_fill_(0, self._other_chunks, 0.0)
        else:
            grads.zero_()
        self._overwrites = True
        try:
            yield
        finally:
            self._overwrites = False
        self._zero([i for i in self.product_tensors if not self.window.received[i]])

    def _zero(self, tensors: "list[int]"):
        for i in tensors:
            zero_(self.arena.grad_views[i])
        self.arena.squares.mark(tensors, False)

    def product_added(self, tensors: "list[int]"):
        """Called after a product has been added to these tensors (indices)."""
        listener = self._listener()
        if listener is not None:
            listener.product_added({i: self.is_last_product(i) for i in tensors})

    def is_last_product(self, i: int) -> bool:
        """Has tensor i received as many products as in the backward before, and nothing else?"""
        return 0 < self.products_added[i] == self.products_before[i] and (
            i not in self.also_from_autograd
        )

    def chunks_for(self, tensors):
        # A tied weight may have a gradient that waits for a launch.
        if self.product_tensors.intersection(tensors):
            return super().chunks_for(tensors)
        return self._others

    def close(self):
        for part in self._slices:
            part.close()
        for fused in self._fused.values():
            fused.remove()
        # Each part holds this mode, and these functions hold the accumulator, which holds it too:
        # without them the memory is freed with the last one who has it.
        self._slices = []
        self._open_backward = self._listener = lambda: None


def _fuse(layer: nn.Module, grad: Tensor) -> "FusedForward | None":
    """Put a FusedForward in the place of the layer's forward; None: the layer stays as it is."""
    if not has_class_forward(layer):
        return None
    return fuse_linear(layer, grad) or fuse_embedding(layer, grad)


def _frozen_linear(layer: nn.Module, fused: "dict[nn.Module, FusedForward]") -> "nn.Linear | None":
    """The nn.Linear that `layer` is, or that LoRA is around; None where it cannot be joined.

    Args:
        fused: layers whose weight gradient goes into the arena.
    """
    linear = layer
    if type(layer) is LoRALinear:
        linear = layer.base_layer
        factors = layer.lora_A, layer.lora_B
        if not isinstance(layer.lora_dropout, nn.Identity) or any(
            factor not in fused or factor.weight.dtype != layer.weight.dtype for factor in factors
        ):
            return None
    if (
        type(linear) is not nn.Linear
        or linear.bias is not None
        or linear.weight.requires_grad
        or not has_class_forward(linear)
        or not has_class_forward(layer)
    ):
        return None
    return linear
