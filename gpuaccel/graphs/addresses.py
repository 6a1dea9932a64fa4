"""Check that no tensor of a captured graph has moved: a graph knows tensors by their address."""

import torch
from torch import Tensor, nn

from ..errors import CaptureError


class Addresses:
    """The addresses and dtypes of all tensors in `state`, and which modules it is made of.

    Args:
        state: modules and optimizers; other members are ignored.
    """

    def __init__(self, state):
        modules = [member for member in state if isinstance(member, nn.Module)]
        self._modules = [
            (_joined(str(i) if len(modules) > 1 else "", name), module)
            for i, top in enumerate(state)
            if isinstance(top, nn.Module)
            for name, module in top.named_modules()
        ]
        self._optimizers = [opt for opt in state if isinstance(opt, torch.optim.Optimizer)]
        self._tensors, self._children = self._tensors_now(), self._children_now()
        self._tensor_names, self._child_names = self._names_now(), self._child_names_now()

    def check(self, consequence: str | None = None, added: str | None = None):
        """CaptureError when a tensor has another address or dtype, or a module was replaced.

        The message names it, and ends with `consequence`; with `added` where a tensor is new."""
        tensors, children = self._tensors_now(), self._children_now()
        if tensors == self._tensors and children == self._children:
            return
        if added and set(self._names_now()) - set(self._tensor_names):
            consequence = added
        consequence = consequence or (
            "the captured graph would use the old memory. Call reset() to capture anew"
        )
        raise CaptureError(f"{self._difference(tensors, children)}: {consequence}")

    def _entries(self):
        """(holder, key, tensor) of each tensor.

        holder: a module's name, the index of an optimizer's group, or (group, index) of a parameter
        in it. key: "" for the parameter itself."""
        for name, module in self._modules:
            for registered in (module._parameters, module._buffers):
                yield from ((name, key, t) for key, t in registered.items() if t is not None)
        for opt in self._optimizers:
            for g, group in enumerate(opt.param_groups):
                yield from ((g, key, t) for key, t in group.items() if isinstance(t, Tensor))
                for i, p in enumerate(group["params"]):
                    yield (g, i), "", p
                    state = opt.state.get(p, {}).items()
                    yield from (((g, i), key, t) for key, t in state if isinstance(t, Tensor))

    def _tensors_now(self) -> list[tuple[int, torch.dtype]]:
        return [(t.data_ptr(), t.dtype) for *_, t in self._entries()]

    def _children_now(self) -> list[int]:
        return [id(child) for _, module in self._modules for child in module._modules.values()]

    # ---- the words ----

    def _names_now(self) -> list[str]:
        return [_tensor_name(holder, key) for holder, key, _ in self._entries()]

    def _child_names_now(self) -> list[str]:
        return [
            _joined(name, key) for name, module in self._modules for key in module._modules.keys()
        ]

    def _difference(self, tensors, children) -> str:
        child_names, tensor_names = self._child_names_now(), self._names_now()
        if child_names != self._child_names:
            return f"module {_name_difference(self._child_names, child_names)}"
        for name, before, now in zip(child_names, self._children, children):
            if before != now:
                return f"module {name} is another one than at the capture"
        if tensor_names != self._tensor_names:
            return _name_difference(self._tensor_names, tensor_names)
        for name, before, now in zip(tensor_names, self._tensors, tensors):
            if before[1] != now[1]:
                return f"{name} was {before[1]} and is {now[1]}"
            if before != now:
                return f"{name} has another address than at the capture"
        raise AssertionError("no difference")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")


def _tensor_name(holder, key: str) -> str:
    if isinstance(holder, str):
        return _joined(holder, key)
    if isinstance(holder, int):
        return f"{key} of the optimizer's group {holder}"
    group, number = holder
    of = f"{key} of " if key else ""
    return f"{of}parameter {number} of the optimizer's group {group}"


def _name_difference(before: list[str], now: list[str]) -> str:
    """The first name that was added, removed or moved."""
    added = [name for name in now if name not in before]
    removed = [name for name in before if name not in now]
    if added:
        return f"{added[0]} did not exist at the capture"
    if removed:
        return f"{removed[0]} existed at the capture and no longer does"
    name = next(new for old, new in zip(before, now) if old != new)
    return f"{name} was in another place at the capture"
