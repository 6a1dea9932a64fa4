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
            (f"{i}.{name}".rstrip(".") if len(modules) > 1 else name, module)
            for i, top in enumerate(state)
            if isinstance(top, nn.Module)
            for name, module in top.named_modules()
        ]
        self._optimizers = [opt for opt in state if isinstance(opt, torch.optim.Optimizer)]
        self._places, self._names = self._places_now(), self._names_now()

    def check(self, consequence: str | None = None, added: str | None = None):
        """CaptureError when a tensor has another address or dtype, or a module was replaced.

        The message names it, and ends with `consequence`; with `added` where a tensor is new."""
        places = self._places_now()
        if places == self._places:
            return
        before = dict(zip(self._names, self._places))
        now = dict(zip(self._names_now(), places))
        new = [name for name in now if name not in before]
        if added and new:
            consequence = added
        consequence = consequence or (
            "the captured graph would use the old memory. Call reset() to capture anew"
        )
        raise CaptureError(f"{_difference(before, now, new)}: {consequence}")

    def _entries(self):
        """(holder, key, thing) of each module, then of each tensor.

        holder: a module's name, the index of an optimizer's group, or (group, index) of a parameter
        in it. key: "" for the parameter itself."""
        for name, module in self._modules:
            yield from ((name, key, child) for key, child in module._modules.items())
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

    def _places_now(self) -> list[tuple]:
        """(address, dtype) of a tensor, (id, None) of a module."""
        return [
            (t.data_ptr(), t.dtype) if isinstance(t, Tensor) else (id(t), None)
            for *_, t in self._entries()
        ]

    def _names_now(self) -> list[str]:
        return [
            _name(holder, key) if isinstance(thing, Tensor) else f"module {_name(holder, key)}"
            for holder, key, thing in self._entries()
        ]


def _name(holder, key: str) -> str:
    if isinstance(holder, str):
        return f"{holder}.{key}".strip(".")
    if isinstance(holder, int):
        return f"{key} of the optimizer's group {holder}"
    group, number = holder
    of = f"{key} of " if key else ""
    return f"{of}parameter {number} of the optimizer's group {group}"


def _difference(before: dict[str, tuple], now: dict[str, tuple], new: list[str]) -> str:
    if new:
        return f"{new[0]} did not exist at the capture"
    for name, (place, dtype) in before.items():
        if name not in now:
            return f"{name} existed at the capture and no longer does"
        if now[name][1] != dtype:
            return f"{name} was {dtype} and is {now[name][1]}"
        if now[name][0] != place:
            what = "has another address" if dtype else "is another one"
            return f"{name} {what} than at the capture"
    return "the order of modules and tensors has changed since the capture"
