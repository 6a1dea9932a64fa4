"""Layers whose weight-gradient product adds into the arena, in place of autograd.

    with_products = Products(arena)      # the arena's layers add by their products
    with_products.close()                # ordinary layers again

A FusedLinear takes the place of the `forward` of every nn.Linear whose weight has no hooks, a
FusedConv1D that of every Conv1D of transformers, and a FusedEmbedding that of every nn.Embedding
(nn/). The product writes `.grad` by the arena's rule: None is overwritten, a sum is added to.
Nothing is rounded between the product and the fp32 sum. The other tensors are autograd's.

Layers of one input (FUSED_LINEARS of their module) become one product: trained ones where the arena
has their weights side by side, frozen ones, with LoRA or without, whose weights are moved so.
"""

import itertools

import torch
from torch import Tensor, nn

from ..backends import takes
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
from .arena import Arena
from .layout import own_storage


class _ProductSlice:
    """A slice of arena.grads that products are added into (an nn.fused_linear.GradientSlice).

    Args:
        products: counts what is added.
        tensors: indices of the weights in the slice: one, or several side by side.
        grad: the slice.
    """

    def __init__(self, products: "Products", tensors: "list[int]", grad: Tensor):
        self.products = products
        self.arena = products.arena
        self.tensors = tensors
        self.grad = grad
        # The first row of each weight; at the end the number of rows.
        rows = [len(self.arena.params[i]) for i in tensors]
        self._first_rows = [0, *itertools.accumulate(rows)]
        register_slice(grad, self)

    def with_hooks(self) -> "list[int]":
        """As GradientSlice says."""
        return [k for k, i in enumerate(self.tensors) if _has_hooks(self.arena, i)]

    def before_product(self, added: "list[bool] | None") -> "list[Rows]":
        """As GradientSlice says; neighbours are joined. Outside of backward no product counts."""
        first_rows = self._first_rows
        if torch._C._current_graph_task_id() == -1:
            return [Rows(0, first_rows[-1], False)]
        if added is None:
            added = self._added_when_compiled()
        arena = self.arena
        rows: "list[Rows]" = []
        for i, adds, start, stop in zip(self.tensors, added, first_rows, first_rows[1:]):
            if not adds:
                continue
            overwrite = arena.gradients[i] is None
            arena.params[i].grad = arena.gradients.views[i]
            self.products.added[i] += 1
            if rows and rows[-1][1:] == (start, overwrite):
                start = rows.pop().start
            rows.append(Rows(start, stop, overwrite))
        return rows

    def _added_when_compiled(self) -> "list[bool]":
        """Whether the backward of a compiled layer, which returns no gradient, adds each one."""
        arena = self.arena
        uses = [parameter_use(arena.params[i]) for i in self.tensors]
        with_hooks = self.with_hooks()
        for k, (i, use) in enumerate(zip(self.tensors, uses)):
            name = arena.segments[i].name
            if use is GradientUse.RETURNED:
                what = f"torch.autograd.grad() asks for the gradient of {name}"
            elif use is GradientUse.ADDED and k in with_hooks:
                what = f"{name} got a hook after the TrainStep was made"
            else:
                continue
            raise ArgumentError(
                f"{what}, which a compiled layer adds to the arena and shows to nobody. Instead: "
                "do not compile it, or register hooks before the TrainStep is made"
            )
        return [use is GradientUse.ADDED for use in uses]

    def after_product(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.products.report(self.tensors)

    def close(self):
        unregister_slice(self.grad)


class Products:
    """The products of an arena's layers add into it, until close().

    Attributes:
        tensors: indices of the tensors whose gradient products add.

    Args:
        arena: whose layers are looked at.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        # Gives a slice that lost its memory (`p.grad.data = ...`) the address that layers know.
        arena.gradients.collect(graphs=False)
        # Products added to each tensor in this backward, and in the one before.
        self.added = [0] * len(arena.segments)
        self.added_before = self.added
        # The version of each gradient after its last product.
        self._versions = [0] * len(arena.segments)
        # Tensors to which autograd adds as well: a layer's weight that something else uses, too.
        self.also_from_autograd: "set[int]" = set()
        self._fused: "dict[nn.Module, FusedForward]" = {}
        self._slices: "list[_ProductSlice]" = []
        # Frozen weights that lie side by side -> their addresses.
        self._frozen: "dict[Tensor, int]" = {}
        index = {id(p): i for i, p in enumerate(arena.params)}
        for layer in arena.module.modules():
            # Not the attribute, which a parametrization would compute.
            i = index.get(id(layer._parameters.get("weight")))
            # A weight with hooks needs its gradient from autograd.
            if i is None or _has_hooks(arena, i):
                continue
            fused = _fuse(layer, arena.gradients.views[i])
            if fused is not None:
                self._fused[layer] = fused
                self._slices.append(_ProductSlice(self, [i], arena.gradients.views[i]))
        self.tensors = {i for part in self._slices for i in part.tensors}
        for layer in arena.module.modules():
            for names in getattr(layer, "FUSED_LINEARS", ()):
                layers = [getattr(layer, name) for name in names]
                self._add_joint(layers, index)
                self._add_frozen_joint(layers)
        arena.before_release.append(self.close)

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

    # ---- while backward runs ----

    def begin_backward(self):
        """Check what the next backward relies on, and count its products from zero.

        Raises:
            ArgumentError: for a frozen weight that has moved.
        """
        for weight, address in self._frozen.items():
            if weight.data_ptr() != address:
                raise ArgumentError(
                    "a frozen weight no longer lies where its layer's product reads it "
                    "(module.to(...) or .data = ... moved it): close the TrainStep before, and "
                    "make a new one after"
                )
        # As in __init__(): for each slice that has lost its memory since.
        self.arena.gradients.collect(graphs=False)
        self.added_before, self.added = self.added, [0] * len(self.added)

    def end_backward(self):
        """Note which tensors autograd has added to behind the products."""
        for i in self.tensors:
            if self.added[i] and self.arena.gradients.views[i]._version != self._versions[i]:
                self.also_from_autograd.add(i)

    def report(self, tensors: "list[int]"):
        """A product has been added to these tensors (indices)."""
        complete = {}
        for i in tensors:
            self._versions[i] = self.arena.gradients.views[i]._version
            same_number = 0 < self.added[i] == self.added_before[i]
            complete[i] = same_number and i not in self.also_from_autograd
        self.arena.gradients.product_added(complete)

    def close(self):
        """Run the layers' own forwards again."""
        for part in self._slices:
            part.close()
        for fused in self._fused.values():
            fused.remove()
        self._slices = []
        if self.close in self.arena.before_release:
            self.arena.before_release.remove(self.close)


def _has_hooks(arena: Arena, i: int) -> bool:
    """Whether a hook shows somebody this weight's gradient, or calls somebody when it is added."""
    return bool(arena.params[i]._backward_hooks) or arena.gradients.has_hooks(i)


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
