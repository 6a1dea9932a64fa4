"""Where an optimizer's state lies in memory, and how a step updates weights and state there.

A DeviceOptimizer has one layout at a time, `opt.layout`:

| layout | state of a parameter | update |
|---|---|---|
| ParameterLayout | a tensor of its own, like the parameter | one launch per 60 tensors |
| ArenaLayout | a slice of one flat buffer per state key | one launch for neighbours |
| distributed/zero1.py: ShardedLayout | this rank's part of that | the same, then all-gather |

A layout's memory is the optimizer's own, and stays where it is: captured steps know it. State that
comes from elsewhere (a state_dict, another optimizer, the user's hands) is copied into it by
place_states. So a step of one optimizer never writes what another one holds.
"""

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops.clip import dense
from .device_state import is_capturing
from .layout import own_storage
from .update_rule import Job, UpdateRule, arena_launches, list_launches


class ParameterLayout:
    """Each state tensor has the device, shape, dtype and order in memory of its parameter.

    In all layouts "step", the count of a parameter's steps, is () fp32 on its device."""

    ranks = 1  # over which the state is spread

    def __init__(self):
        # Parameter -> key -> memory of its state.
        self._memory: dict[Tensor, dict[str, Tensor]] = {}

    # ---- memory. `key`: name of the state; `p`: its parameter; `i`: the parameter's number ----

    def fits(self, t: Tensor, p: Tensor, i: int) -> bool:
        """True if `t` can be a state of this parameter, in whatever memory."""
        return t.shape == p.shape

    def existing(self, key: str, p: Tensor, i: int) -> Tensor | None:
        """The memory of one state tensor; None if it has none yet, or p has moved since."""
        t = self._memory.get(p, {}).get(key)
        if t is None or t.device != p.device or key != "step" and not self._is_place(t, key, p, i):
            return None
        return t

    def allocate(self, key: str, p: Tensor, i: int) -> Tensor:
        """The memory of one state tensor, made when it is first needed, with any values."""
        t = self.existing(key, p, i)
        if t is None:
            if key == "step":
                t = torch.zeros((), dtype=torch.float32, device=p.device)
            else:
                t = self._new(key, p, i)
            self._memory.setdefault(p, {})[key] = t
        return t

    def fill(self, t: Tensor, value: Tensor, p: Tensor, i: int):
        """Copy a value that fits into a state tensor of this layout."""
        t.copy_(value)

    def _is_place(self, t: Tensor, key: str, p: Tensor, i: int) -> bool:
        # The state of a weight with gaps has none.
        ordered = same_order(t, p) or not dense(p)
        return t.dtype == p.dtype and t.shape == p.shape and ordered

    def _new(self, key: str, p: Tensor, i: int) -> Tensor:
        return torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)

    # ---- the update ----

    def launches(self, rule: UpdateRule, jobs: list[Job], stochastic: bool) -> list[tuple]:
        """For launch_update."""
        return list_launches(rule, jobs, stochastic)

    def local(self, jobs: list[Job], seed: int | None) -> list[Job]:
        """What torch_step updates of these: this rank's part."""
        return jobs

    def after_update(self):
        """Called after a device's update, by kernels or by torch."""


class ArenaLayout(ParameterLayout):
    """State tensors are slices of flat buffers with the arena's layout.

    Args:
        buffers: state key -> (N,) fp32; those that are missing are made when they are needed.
    """

    def __init__(self, arena, buffers: dict[str, Tensor] | None = None):
        super().__init__()
        self.arena = arena
        self.buffers = {} if buffers is None else buffers

    def _is_place(self, t, key, p, i):
        offset = self.arena.segments[i].offset
        return not t.numel() or t.data_ptr() == self.buffers[key].data_ptr() + 4 * offset

    def _new(self, key, p, i):
        if key not in self.buffers:
            self.buffers[key] = torch.zeros_like(self.arena.weights)
        return own_storage(self.arena.segments[i].of(self.buffers[key]))

    def launches(self, rule, jobs, stochastic):
        lists, arena = list_launches(rule, jobs, stochastic), self.arena
        # A gradient in another order than its weight's has been copied.
        if any(j.grad.data_ptr() != arena.gradients.views[j.number].data_ptr() for j in jobs):
            return lists
        whole = [(0, arena.numel, 0)]
        runs = arena_launches(rule, jobs, stochastic, arena, self.buffers, whole)
        return runs if 0 < len(runs) <= len(lists) else lists


@torch.no_grad()
def place_states(layout: ParameterLayout, state: dict, members, names):
    """Copy state into the layout's memory; missing state becomes zero.

    members: (parameter, number, keys of its state) of each parameter.

    Raises:
        ArgumentError: with nothing changed, for a state of another shape, and in a capture.
    """
    # State that lies elsewhere, or is missing (None).
    elsewhere = []
    for p, i, keys in members:
        for key in ("step", *keys):
            value = state.get(p, {}).get(key)
            if value is None or value is not layout.existing(key, p, i):
                elsewhere.append((p, i, key, value))
    for p, i, key, value in elsewhere:
        if value is not None and key != "step" and not layout.fits(value, p, i):
            raise ArgumentError(
                f"{key} of {names()[i]} has shape {tuple(value.shape)}; expected {tuple(p.shape)}"
            )
    if elsewhere and is_capturing():
        raise ArgumentError(
            f"{names()[elsewhere[0][1]]} has no state on the device yet, and a CUDA graph is being "
            "captured: take one step before the capture, or call prepare()"
        )
    places = [layout.allocate(key, p, i) for p, i, key, _ in elsewhere]
    for (p, i, key, value), place in zip(elsewhere, places):
        if value is None:
            place.zero_()
        elif key == "step":
            place.copy_(torch.as_tensor(value).view(()))
        else:
            layout.fill(place, value, p, i)
        state.setdefault(p, {})[key] = place


def same_order(t: Tensor, like: Tensor) -> bool:
    """True if two tensors of one shape have their elements in the same order in memory."""
    return t.is_contiguous() and like.is_contiguous() or t.stride() == like.stride()
