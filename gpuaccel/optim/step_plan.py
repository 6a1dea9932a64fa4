"""The plan of an optimizer's step: which tensors are updated by which launches.

Users may replace tensors between steps. So each step compares its `facts_of` with those of the last
one: which parameters have a gradient, the addresses of weights and state, the gradients' dtypes. If
they are equal, the last plan is used again. Otherwise everything is checked and a new plan is made.
The addresses of gradients are not among the facts: each step reads them.
"""

import itertools

import torch
from torch import Tensor

from ..backends import backend, takes
from ..compiler import KINDS
from ..ops.clip import dense, kernel_takes
from .state_layout import ParameterLayout, same_order
from .update_rule import Job, UpdateRule, begin_launches


def facts_of(param_groups, rule: UpdateRule, state: dict, buffers, grads, *options):
    """All that the plan of a step depends on, except for the addresses of gradients.

    buffers: other tensors that a step reads or writes. options: whatever else the plan depends on.
    Returns a tuple, to be compared; None where a tensor has no address."""
    flatten = itertools.chain.from_iterable
    params = [p for group in param_groups for p in group["params"]]
    given = [grad for grad in grads if grad is not None]
    states = flatten(map(dict.values, state.values()))
    try:
        return (
            backend().name,
            options,
            [(len(group["params"]), rule.macros_of(group)) for group in param_groups],
            [grad is None for grad in grads],
            list(map(id, state)),
            list(flatten(state.values())),
            list(map(Tensor.data_ptr, [*params, *buffers, *states])),
            list(map(Tensor.size, params)),
            list(map(Tensor.stride, [*params, *given])),
            [grad.dtype for grad in given],
            list(map(type, given)),
        )
    # A step that is a number, a sparse gradient, a tensor without memory.
    except (TypeError, RuntimeError):
        return None


class DevicePlan:
    """A step's share of one device, which holds while the facts are the same.

    Attributes:
        by_kernels, by_torch: the jobs, by who takes them.
        begins, updates: of by_kernels, for launch_begin and launch_update.
        measurable: whether our kernels take all gradients for the norm.
        changed: what our kernels write and autograd may know.
    """

    def __init__(self, device, jobs: list, rule, layout: ParameterLayout, stochastic: bool):
        self.device = device
        self.jobs = jobs
        self._reordered = [j for j in jobs if j.grad.is_neg() or not same_order(j.grad, j.weight)]
        self._reorder()
        kernels = takes(device)
        self.by_kernels: list[Job] = []
        self.by_torch: list[Job] = []
        for j in jobs:
            (self.by_kernels if kernels and _kernels_take(j) else self.by_torch).append(j)
        self.begins = begin_launches(self.by_kernels)
        self.updates = layout.launches(rule, self.by_kernels, stochastic) if self.begins else []
        self.measurable = kernel_takes([j.grad for j in jobs]) and all(dense(j.grad) for j in jobs)
        self.changed = [t for j in self.by_kernels for t in (j.weight, j.copy) if t is not None]

    def set_gradients(self, grads: list[Tensor | None]):
        """Set the gradients of the next step, of all tensors by number."""
        for j in self.jobs:
            j.grad = grads[j.number]
        self._reorder()

    def drop_gradients(self):
        """Drop the gradients, so that a plan that is kept for the next step holds none alive."""
        for j in self.jobs:
            j.grad = None

    def _reorder(self):
        """Kernels take gradients in the order of their weights."""
        for j in self._reordered:
            j.grad = torch.empty_like(j.weight, dtype=j.grad.dtype).copy_(j.grad)


def _kernels_take(job: Job) -> bool:
    tensors = job.weight, job.grad
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype in KINDS for t in tensors)
    same_dtype = all(t is None or t.dtype == job.weight.dtype for t in job.state)
    return plain and same_dtype and dense(job.weight)
