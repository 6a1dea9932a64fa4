"""What a step does with which tensors.

Each step looks at the tensors that the user may have exchanged since the last one: which parameters
have a gradient, where weights and state lie, of what kind the gradients are. While `facts_of` says
the same, the plan of the last step holds; otherwise everything is checked and a new plan is made.
The addresses of gradients are no facts: they are read in each step.
"""

import itertools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import backend, takes
from ..ops import KINDS, Job, Jobs, UpdateRule, dense, kernel_takes
from .state_layout import ParameterLayout, same_order


@dataclass(slots=True)
class Members:
    """All tensors of an optimizer, in the order of its parameter groups.

    Attributes:
        params: the parameters, over an arena the masters.
        weights: what the model computes with, whose `.grad` is the gradient: over an arena its
            parameters, else `params`.
        numbers: of each: over an arena its index there, else its place.
        param_groups: of the optimizer.
    """

    params: "list[Tensor]"
    weights: "list[Tensor]"
    numbers: "list[int]"
    param_groups: "list[dict]"

    @property
    def groups(self) -> "list[int]":
        """The number of each tensor's parameter group."""
        return [g for g, group in enumerate(self.param_groups) for _ in group["params"]]


def facts_of(members: Members, grads, rule: UpdateRule, state: dict, *options) -> "tuple | None":
    """What the plan of a step follows from, but for the addresses of gradients.

    Args:
        members: of the optimizer.
        grads: of each member, or None.
        rule: of the optimizer.
        state: of the optimizer.
        *options: whatever else the plan depends on; they are compared.

    Returns:
        Facts, to be compared; None where a tensor has no address.
    """
    params, weights, flatten = members.params, members.weights, itertools.chain.from_iterable
    given = [grad for grad in grads if grad is not None]
    states = flatten(map(dict.values, state.values()))
    copies = weights if weights is not params else ()
    try:
        return (
            backend().name,
            options,
            [(len(group["params"]), rule.macros_of(group)) for group in members.param_groups],
            [grad is None for grad in grads],
            list(map(id, state)),
            list(flatten(state.values())),
            list(map(Tensor.data_ptr, [*params, *copies, *states])),
            list(map(Tensor.size, params)),
            list(map(Tensor.stride, [*params, *given])),
            [grad.dtype for grad in given],
            list(map(type, given)),
        )
    # A step that is a number, a sparse gradient, a tensor without memory.
    except (TypeError, RuntimeError):
        return None


class DevicePlan:
    """A step's share of one device.

    Attributes:
        jobs: all of them.
        by_kernels, by_torch: these jobs, by who takes them.
        updates: of by_kernels, for launch_update.
        measurable: whether our kernels take all gradients for the norm.
        changed: what our kernels write and autograd may know.

    Args:
        device: of the jobs.
        jobs: by number.
        rule: of the optimizer.
        layout: of the state.
        stochastic: round bf16 weights stochastically.
    """

    def __init__(self, device, jobs: Jobs, rule, layout: ParameterLayout, stochastic: bool):
        self.device = device
        self.jobs = jobs
        kernels = takes(device)
        self.by_kernels = Jobs(j for j in jobs if kernels and _kernels_take(j))
        ids = set(map(id, self.by_kernels))
        self.by_torch = Jobs(j for j in jobs if id(j) not in ids)
        self.updates = layout.launches(rule, self.by_kernels, stochastic) if ids else []
        self.measurable = kernel_takes([j.grad for j in jobs]) and all(dense(j.grad) for j in jobs)
        self.changed = [t for j in self.by_kernels for t in (j.weight, j.copy) if t is not None]


class StepPlan:
    """What a step does, for as long as the facts are the same.

    Args:
        jobs: in the order of the gradients.
        rule, layout, stochastic: as for DevicePlan.
    """

    facts: "tuple | None" = None

    def __init__(self, jobs: "list[Job]", rule, layout: ParameterLayout, stochastic: bool):
        self._given = jobs
        self._reordered = [j for j in jobs if not _in_order(j)]
        self._reorder()
        ordered = sorted(jobs, key=operator.attrgetter("number"))
        self.parts = [
            DevicePlan(
                device,
                Jobs(j for j in ordered if j.weight.device == device),
                rule,
                layout,
                stochastic,
            )
            for device in {j.weight.device: None for j in ordered}
        ]

    def set_gradients(self, grads: "list[Tensor | None]"):
        """The gradients of this step.

        Args:
            grads: of all tensors, in the order of the parameter groups; None: of one without.
        """
        for j, grad in zip(self._given, [g for g in grads if g is not None]):
            j.grad = grad
        self._reorder()

    def drop_gradients(self):
        """What is kept for the next step must not keep gradients alive."""
        for j in self._given:
            j.grad = None

    def _reorder(self):
        """Our kernels take gradients in the order of their weights."""
        for j in self._reordered:
            j.grad = torch.empty_like(j.weight, dtype=j.grad.dtype).copy_(j.grad)


def _in_order(j: Job) -> bool:
    return same_order(j.grad, j.weight) and not j.grad.is_neg()


def _kernels_take(job: Job) -> bool:
    """Do our kernels take this tensor?"""
    tensors = job.weight, job.grad
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype in KINDS for t in tensors)
    same_dtype = all(t is None or t.dtype == job.weight.dtype for t in job.state)
    return plain and same_dtype and dense(job.weight)
