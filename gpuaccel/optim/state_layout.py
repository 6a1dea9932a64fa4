"""Where an optimizer's state lies in memory, and how a step updates weights and state there.

A DeviceOptimizer has one layout at a time, `opt.layout`:

| layout | state of a parameter | update |
|---|---|---|
| ParameterLayout | a tensor of its own, like the parameter | one launch per 60 tensors |
| ArenaLayout | a slice of one flat buffer per state key | one launch for neighbours |
| distributed/zero1.py: ShardedLayout | this rank's part of that | the same, then all-gather |
"""

import torch
from torch import Tensor

from ..ops import (
    Jobs,
    StepInputs,
    UpdateRule,
    arena_launch,
    arena_runs,
    list_launches,
    torch_step,
)
from .layout import own_storage


class ParameterLayout:
    """Each state tensor has the device, shape, dtype and order in memory of its parameter."""

    ranks = 1  # over which the state is spread

    # ---- memory. `key`: name of the state; `p`: its parameter; `i`: the parameter's number ----

    def fits(self, t: Tensor, p: Tensor, i: int) -> bool:
        """Is `t` a state of this parameter, wherever it lies?"""
        return t.shape == p.shape

    def is_in_place(self, key: str, t: Tensor, p: Tensor, i: int) -> bool:
        """Does `t`, which fits, lie where this layout has it?"""
        return t.device == p.device and same_order(t, p)

    def allocate(self, key: str, p: Tensor, i: int) -> Tensor:
        """Memory for one state tensor, with any values."""
        return torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)

    def adopt(self, key: str, t: Tensor, p: Tensor, i: int) -> Tensor:
        """The values of `t`, which fits, in the memory of this layout."""
        return self.allocate(key, p, i).copy_(t)

    # ---- the update ----

    def launches(self, rule: UpdateRule, jobs: Jobs, stochastic: bool) -> "list[tuple]":
        """For launch_update."""
        return list_launches(rule, jobs, stochastic)

    def torch_step(
        self,
        rule: UpdateRule,
        jobs: Jobs,
        param_groups: "list[dict]",
        inputs: StepInputs,
        rows: "list[int]",
        count_it: bool,
        seed: "int | None",
    ):
        """The same in torch; arguments: ops/update_rule.py."""
        torch_step(rule, jobs, param_groups, inputs, rows, count_it, seed)

    def after_update(self):
        """Runs after the update of a device, in either way."""


class ArenaLayout(ParameterLayout):
    """State tensors are slices of flat buffers with the arena's layout.

    Args:
        buffers: state key -> (N,) fp32; those that are missing are made when they are needed.
    """

    def __init__(self, arena, buffers: "dict[str, Tensor] | None" = None):
        self.arena = arena
        self.buffers = {} if buffers is None else buffers

    def is_in_place(self, key, t, p, i):
        if t.numel() == 0:
            return key in self.buffers
        offset = self.arena.segments[i].offset
        return key in self.buffers and t.data_ptr() == self.buffers[key].data_ptr() + 4 * offset

    def allocate(self, key, p, i):
        if key not in self.buffers:
            self.buffers[key] = torch.zeros_like(self.arena.weights)
        return own_storage(self.arena.slice(self.buffers[key], i))

    def launches(self, rule, jobs, stochastic):
        lists = list_launches(rule, jobs, stochastic)
        arena = self.arena
        # A gradient in another order than its weight's has been copied.
        views = [arena.gradients.views[j.number] for j in jobs]
        in_order = all(j.grad.data_ptr() == view.data_ptr() for j, view in zip(jobs, views))
        runs = arena_runs(jobs, arena) if in_order else []
        if not 0 < len(runs) <= len(lists):
            return lists
        return [
            arena_launch(
                rule,
                job,
                stochastic,
                arena.weights,
                arena.grads,
                self.buffers,
                arena.bf16_weights,
                arena.chunk_table,
                first,
                last,
                offset,
            )
            for first, last, offset, job in runs
        ]


def same_order(t: Tensor, like: Tensor) -> bool:
    """Do the elements of two tensors of one shape lie in memory in the same order?"""
    return t.is_contiguous() and like.is_contiguous() or t.stride() == like.stride()
