"""Replacements of a layer's forward whose backward adds the weight's gradient into an arena.

    fused = FusedLinear(layer, sums)   # layer(x) adds its weight's gradient to `sums`
    fused.remove()                     # an ordinary nn.Linear again

A layer keeps its class, its parameters and its hooks. optim/products.py replaces and restores
forwards.

Only a backward() that accumulates into `.grad` adds to the arena. Autograd returns the gradient, as
for a plain layer, for torch.autograd.grad(), with create_graph=True, and for a weight with hooks.
Under torch.func (functional_call included) and in forward mode the layer is a plain one.
"""

import types
from typing import Any, NamedTuple

from torch import Tensor, nn

from .gradient_slice import backward_may_add


class Joint(NamedTuple):
    """Several layers of one input whose weights lie side by side, the last layer's first.

    Attributes:
        weight: (sum of out, in), of an arena.
        grad: the same range of arena.grads, fp32.
        layers: in the order of fused_linears().
    """

    weight: Tensor
    grad: Tensor
    layers: tuple[nn.Module, ...]


class FusedForward:
    """Replaces a layer's `forward`; remove() restores it.

    The layer's __dict__ gets two entries: `forward`, a function bound to the layer, and
    `gpuaccel_fused`, this object. With bound functions torch.compile compiles layers of one class
    once. A copy of a layer (deepcopy, pickle) runs the forward of its class.

    Attributes:
        joint: the product of this layer and others; None if there is none, or another layer has it.

    Args:
        layer: a module whose `forward` is its class's.
        grad: fp32, of the weight's shape, the tensor of a GradientSlice.
    """

    joint: Joint | None = None

    def __init__(self, layer: nn.Module, grad: Tensor):
        self.layer = layer
        self.grad = grad
        self.weight = layer.weight
        vars(layer)["gpuaccel_fused"] = self
        vars(layer)["forward"] = types.MethodType(type(self).forward, layer)

    @staticmethod
    def supports(layer: nn.Module) -> bool:
        """Whether this can take the place of the layer's forward."""
        raise NotImplementedError

    @staticmethod
    def forward(layer: Any, x: Tensor) -> Tensor:
        raise NotImplementedError

    def remove(self):
        """Run the layer's own forward again, also where others have wrapped this one since."""
        entries = vars(self.layer)
        if entries.get("gpuaccel_fused") is self:
            del entries["gpuaccel_fused"]
        if getattr(entries.get("forward"), "__func__", None) is type(self).forward:
            del entries["forward"]

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        # Pickled as None. (`forward` is pickled as getattr(layer, "forward"), the class's.)
        return type(None), ()


def fused_forward(layer: nn.Module) -> FusedForward | None:
    """The FusedForward that replaces the layer's forward, or None.

    Args:
        layer: any module.
    """
    return getattr(layer, "gpuaccel_fused", None)


def adds_to_arena(layer: nn.Module) -> FusedForward | None:
    """The layer's FusedForward if its backward may add into the arena; None: it is a plain layer.

    Also while another tensor replaces the weight (torch.func.functional_call)."""
    fused = fused_forward(layer)
    if fused is None or layer.weight is not fused.weight or not backward_may_add():
        return None
    return fused


def has_class_forward(layer: nn.Module) -> bool:
    """True if the layer runs the forward of its class, not a replacement.

    Args:
        layer: any module.
    """
    function = getattr(vars(layer).get("forward"), "__func__", None)
    if "forward" not in vars(layer) or function is type(layer).forward:
        return True
    # A copy of a layer with a FusedForward has its function, but is a plain layer.
    ours = {cls.forward for cls in FusedForward.__subclasses__()}
    return fused_forward(layer) is None and function in ours
