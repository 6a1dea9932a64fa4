"""The base of gpuaccel's optimizers: what changes lives on the device, clipping is inside the step.

    class SignSGD(DeviceOptimizer):                # kernels_cu/sign_sgd.cu holds its kernels
        rule = UpdateRule("sign_sgd", (), reference_sign_sgd)
        def __init__(self, params_or_arena, lr=1e-3, *, maximize=False, **options):
            groups = {"lr": lr, "maximize": maximize}
            super().__init__(params_or_arena, {"defaults": groups}, lr=lr, **options)

A step launches kernels and waits for nothing. Over an arena one kernel multiplies the gradients by
the clip scale and uses them, and writes bf16 weights from their fp32 masters in the same pass.
`p.grad` is read and never written.

The formula and its launches: ops/update_rule.py. Where the state lies: optim/state_layout.py.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import backend, takes
from ..errors import ArgumentError, NonFiniteError
from ..nn import invalid_tokens
from ..ops import (
    KINDS,
    POLICIES,
    SCOPES,
    ClipState,
    Job,
    Jobs,
    StepInputs,
    UpdateRule,
    check_choice,
    check_gradients,
    check_max_norm,
    clip_kernel,
    dense,
    kernel_takes,
    launch_begin,
    launch_update,
    launches_for,
    tensors_of_launch,
    unnamed,
)
from .arena import Arena, check_parameters_or_arena
from .device_state import DeviceState, is_capturing
from .layout import own_storage
from .state_layout import ArenaLayout, ParameterLayout, same_order


@dataclass(slots=True)
class _Part:
    """A step's share of one device."""

    device: torch.device
    jobs: "list[Job]"
    by_kernels: Jobs
    by_torch: Jobs
    changed: "list[Tensor]"  # what our kernels write and autograd may know
    squares: tuple  # launches of squares_v2 over the gradients; (): our kernels do not take them


@dataclass(slots=True)
class _Plan:
    """What a step does, kept for the next one."""

    key: "tuple | None"  # the addresses for which it holds; None: for none
    jobs: "list[Job]"  # in the order of the parameter groups
    parts: "list[_Part]"


class DeviceOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose update rule is a kernel of ours. A subclass sets `rule`.

    torch.amp.GradScaler sets the attributes grad_scale, by which gradients are divided, and
    found_inf, which skips the step. Every step can be captured in a CUDA graph after one step, or
    prepare(), outside of it; refresh() brings a changed learning rate to a captured step.

    Args:
        params_or_arena: as torch's, or an Arena: then masters, bf16 copies and gradient sums are
            the arena's, and weight decay and learning rate follow its segments. Parameters: fp32,
            bf16, fp16 (state in the same dtype, computed in fp32); others by the reference, in
            torch.
        arguments: keyword arguments of the next class's __init__ (torch.optim.Optimizer:
            `defaults`).
        lr: learning rate, for the parameter groups that an arena makes.
        weight_decay: for the parameter groups that an arena makes.
        max_norm: clip to this norm inside the step; None: no clipping. May be changed between
            steps.
        scope: what a norm is taken over: "global", "tensor" or, with an arena, "block".
        on_nonfinite: what happens when a gradient is not finite. "propagate" (default without an
            arena): the update uses it. "skip" (default with one): weights, state and step counts of
            all tensors stay; the skip is counted in `skipped`, last_skip() names the tensor.
            "raise": NonFiniteError before anything changes; waits for the device.
        stochastic_rounding: of bf16 weights, keyed on (seed, tensor, element in memory order,
            step).
        seed: 0 to 2^53 - 1.

    Raises:
        ArgumentError: for complex and sparse tensors, with max_norm or "skip" for several devices,
            for scope="block" without an arena, and for a seed out of range.
    """

    rule: UpdateRule
    # A one-element tensor: step() divides the gradients by it (TrainStep: by the tokens).
    gradient_divisor: "Tensor | None" = None
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params_or_arena,
        arguments: dict,
        *,
        lr,
        weight_decay: float = 0.0,
        max_norm: "float | None" = None,
        scope: str = "global",
        on_nonfinite: "str | None" = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ):
        check_parameters_or_arena("params", params_or_arena)
        arena = params_or_arena if isinstance(params_or_arena, Arena) else None
        self.arena = arena
        self.max_norm = max_norm
        self.scope = scope
        self.on_nonfinite = on_nonfinite or ("skip" if arena else "propagate")
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        check_choice("scope", scope, SCOPES)
        check_choice("on_nonfinite", self.on_nonfinite, POLICIES)
        self._limit()
        if scope == "block" and arena is None:
            raise ArgumentError(
                "scope='block' needs an arena, which knows the blocks; got parameters"
            )
        if not isinstance(seed, int) or not 0 <= seed < 2**53:
            raise ArgumentError(f"seed is {seed!r}; expected a whole number from 0 to 2^53 - 1")
        if arena is not None:
            arena.check()
            own_rates = any(s.lr_scale != 1 for s in arena.segments)
            params_or_arena = arena.parameter_groups(weight_decay, lr if own_rates else None)
        self._forget_devices()
        super().__init__(params_or_arena, **arguments)

    def _forget_devices(self):
        """No state has a place yet, nothing is on a device."""
        self.layout = ParameterLayout() if self.arena is None else ArenaLayout(self.arena)
        # Called by last_skip() with the tensor's number; what it returns is added.
        self.explain_skip = None
        # id of a parameter -> its number; empty: to be made.
        self._numbers: "dict[int, int]" = {}
        self._plan: "_Plan | None" = None
        self._devices: "dict[torch.device, DeviceState]" = {}
        self._took_norm = False

    @property
    def ranks(self) -> int:
        """Over how many ranks the state is spread; 1: it is whole here."""
        return self.layout.ranks

    @property
    def publishes(self) -> bool:
        """Whether step() writes the arena's bf16 weights, so that no hook has to."""
        return self.arena is not None

    # ---- what the host may ask ----

    @property
    def clip_state(self) -> "ClipState | None":
        """Norms and scales of the latest step; None: it took no norm. The next overwrites them."""
        if self._took_norm:
            for state in self._devices.values():
                if self.scope in state.clip_states:
                    return state.clip_states[self.scope][0]
        return None

    @property
    def skipped(self) -> Tensor:
        """() int32 on the device: steps skipped so far because a gradient was not finite."""
        for state in self._devices.values():
            return state.record[1]
        return torch.zeros((), dtype=torch.int32)

    def last_skip(self) -> "dict | None":
        """What is known of the latest skipped step; None without one. Waits for the device.

        "step": which call of step(). "tensor": name of its first gradient that was not finite.
        "invalid_tokens", over an arena: of each ga.Embedding that has seen a token out of range.
        "rank", of several ranks: the rank whose gradient it was."""
        for state in self._devices.values():
            _, skipped, step, tensor = state.record.tolist()
            if not skipped:
                continue
            invalid = invalid_tokens(self.arena.module) if self.arena else {}
            skip = {"step": step, "tensor": self.names()[tensor] if tensor >= 0 else None}
            if self.explain_skip is not None:
                skip.update(self.explain_skip(tensor))
            if invalid:
                skip["invalid_tokens"] = invalid
            return skip
        return None

    def names(self) -> "list[str]":
        """The name of each tensor, by number: in the arena's order, else in that of the groups."""
        return _tensor_names(self.arena, self.param_groups)

    def _params(self) -> "list[Tensor]":
        return [p for group in self.param_groups for p in group["params"]]

    # ---- for captured steps ----

    def graph_key(self) -> tuple:
        """What a captured step keeps by value: another key needs another capture. Hashable."""
        rule = self.rule
        groups = [(len(g["params"]), g["maximize"], rule.macros_of(g)) for g in self.param_groups]
        has_limit = self.max_norm is not None
        return (*groups, self.on_nonfinite, self.scope, self.stochastic_rounding, has_limit)

    def tensors_changed_by_step(self) -> "list[Tensor]":
        """What step() writes beside parameters and state: counts of steps and skips."""
        return [state.record for state in self._devices.values()]

    def prepare(self):
        """Allocate all state and settings now, so that the first step can be captured already."""
        members = [member for member in self._members() if member[1].requires_grad]
        self._make_states(members)
        for device in {p.device: None for _, p, _ in members}:
            state = self.device_state(device)
            if self._takes_norm():
                self._clip_state_on(state)
            # Compiled and loaded: neither can be done in a capture.
            if device.type == "cuda" and takes(device):
                most = tensors_of_launch(len(self._numbers))
                kernels = [clip_kernel("squares_v2", 2.0, most), clip_kernel("reduce_v2", 2.0)]
                for dtype, macros in {
                    (p.dtype, self.rule.macros_of(self.param_groups[g]))
                    for g, p, _ in members
                    if p.dtype in KINDS
                }:
                    kernels += self.rule.step_kernels(
                        dtype, macros, self.stochastic_rounding, self.arena is not None
                    )
                for kernel in kernels:
                    kernel.load(device.index)
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        """Write hyperparameters that the host has changed (lr, max_norm, ...) to the device.

        step() does so by itself. A captured step cannot: call this before its replay. No wait."""
        for device, state in self._devices.items():
            if takes(device):
                self._write_settings(state)

    def _write_settings(self, state: DeviceState):
        numbers: "list[float]" = []
        on_device: "list[tuple[int, Tensor]]" = []
        for group in self.param_groups:
            for value in self.rule.values_of(group):
                # A tensor on the device is copied there: it must not pass by the host.
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    on_device.append((len(numbers), value))
                    value = 0.0
                numbers.append(float(value))
        state.write_settings([*numbers, self._limit(), float(self.seed)])
        for i, value in on_device:
            state.settings[i : i + 1].copy_(value.view(1))

    # ---- the step ----

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """Take one step. Only on_nonfinite="raise" waits for the device.

        Args:
            closure: as torch's: it computes the loss again, and returns it.

        Returns:
            The closure's loss, if any.

        Raises:
            ArgumentError: with nothing changed, for a sparse gradient, a state that does not fit, a
                capture before the first step.
            NonFiniteError: with on_nonfinite="raise"; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.arena is not None:
            self.arena.gradients.collect()
        parts = self._parts()
        self._took_norm = bool(parts) and self._takes_norm()
        try:
            for part in parts:
                self._step_on(part)
            if self.arena is not None:
                self.arena.weights_current()
        finally:
            # What is kept for the next step must not keep gradients alive.
            if self.arena is None:
                for part in parts:
                    for j in part.jobs:
                        j.grad = None
        return loss

    def _step_on(self, part: _Part):
        state = self.device_state(part.device)
        divisor = self._divisor(part.device)
        clip = groups = None
        if self._takes_norm():
            clip, groups = self._clip_state_on(state)
            self._take_norm(state, part, clip, groups, divisor)
            if self.on_nonfinite == "raise" and not bool(clip.finite.all()):
                raise NonFiniteError(
                    f"the gradient of {clip.name() or 'all tensors together'} is not finite: "
                    "nothing was changed"
                )
        skip, found_inf = self.on_nonfinite == "skip", self._amp_tensor("found_inf", part.device)
        inputs = StepInputs(clip, groups, skip, divisor, found_inf, state.record)
        jobs, stochastic = part.by_kernels, self.stochastic_rounding
        if jobs:
            self._write_settings(state)
            if jobs.updates is None or jobs.stochastic != stochastic:
                jobs.updates = self.layout.launches(self.rule, jobs, stochastic)
                jobs.stochastic = stochastic
            coefficients = launch_begin(self.rule, jobs, state.settings, inputs)
            launch_update(jobs.updates, coefficients, state.seed)
        if part.by_torch:
            self.layout.torch_step(
                self.rule,
                part.by_torch,
                self.param_groups,
                inputs,
                [self._clip_row(j) for j in part.by_torch],
                not jobs,
                self.seed if stochastic else None,
            )
        self.layout.after_update()
        if jobs:
            torch.autograd.graph.increment_version(part.changed)

    # ---- the plan ----

    def _parts(self) -> "list[_Part]":
        """What each device has to do.

        Planned anew when a gradient, a weight or a state has moved since the last step."""
        key, grads = self._key()
        plan = self._plan
        if key is not None and plan is not None and plan.key == key:
            for j, grad in zip(plan.jobs, grads):
                j.grad = grad
            return plan.parts
        self._plan = None
        jobs = self.jobs()
        parts = [self._part(device, jobs) for device in {j.weight.device: None for j in jobs}]
        self._plan = _Plan(self._key()[0], jobs.given, parts)
        return parts

    def _part(self, device, jobs) -> _Part:
        jobs = [j for j in jobs if j.weight.device == device]
        by_kernels = Jobs(j for j in jobs if takes(device) and _kernels_take(j))
        ids = {id(j) for j in by_kernels}
        by_torch = Jobs(j for j in jobs if id(j) not in ids)
        # By number, so that the first tensor that is not finite can be named.
        grads = [None] * len(self._numbers)
        for j in jobs:
            grads[j.number] = j.grad
        measurable = kernel_takes([j.grad for j in jobs]) and all(dense(j.grad) for j in jobs)
        return _Part(
            device,
            jobs,
            by_kernels,
            by_torch,
            [t for j in by_kernels for t in (j.weight, j.copy) if t is not None],
            launches_for(grads) if measurable else (),
        )

    def _key(self) -> "tuple[tuple | None, list[Tensor]]":
        """(what tells one step's tensors from another's, the gradients).

        That is addresses, where kernels run or in an arena; otherwise the tensors themselves. The
        first is None when it does not tell what to do."""
        params, arena = self._params(), self.arena
        if arena is None:
            grads = [p.grad for p in params]
        elif self._numbers.keys() >= set(map(id, params)):
            # Without the detour over a master.
            grads = [arena.params[self._numbers[id(p)]].grad for p in params]
        else:
            return None, []
        given = [g for g in grads if g is not None]
        options = self.rule.options
        by_address = arena is not None or backend().name != "torch"
        identity: "Callable[[Tensor], int]" = Tensor.data_ptr if by_address else id
        try:
            if not (
                all(map(Tensor.is_contiguous, given)) and all(map(Tensor.is_contiguous, params))
            ):
                return None, given
            return (
                [g is None for g in grads],
                list(map(Tensor.data_ptr, given)) if by_address else (),
                [g.dtype for g in given],
                list(map(id, params)),
                list(map(identity, params)),
                [p.shape for p in params],
                [] if arena is None else list(map(Tensor.data_ptr, arena.params)),
                [
                    tuple(map(identity, state.values())) if state else ()
                    for state in map(self.state.get, params)
                ],
                [
                    (len(group["params"]), *[group[option] for option in options])
                    for group in self.param_groups
                ],
                backend().name,
            ), given
        # A sparse tensor has no address, a step that is a number neither.
        except (RuntimeError, TypeError):
            return None, given

    def jobs(self) -> Jobs:
        """What this step updates, everything checked; nothing has changed when it raises.

        Raises:
            ArgumentError: for several devices, with max_norm or on_nonfinite="skip".
        """
        arena = self.arena
        self._numbers = {}
        if arena is not None:
            arena.check()
        updates = []  # (group, parameter, number, gradient, bf16 copy)
        for g, p, i in self._members():
            if p.grad is not None:
                copy = None
                if arena is not None and arena.params[i] is not p:
                    copy = arena.params[i]
                updates.append((g, p, i, p.grad, copy))
        check_gradients(
            [grad for *_, grad, _ in updates],
            lambda: [self.names()[i] for _, _, i, _, _ in updates],
        )
        devices = {p.device: None for _, p, *_ in updates}
        if len(devices) > 1 and self._takes_norm():
            raise ArgumentError(
                f"parameters lie on {', '.join(map(str, devices))}: max_norm and "
                f"on_nonfinite={self.on_nonfinite!r} need one device; clip with "
                "ga.clip_grad_norm_ instead"
            )
        self._limit()
        self._make_states([(g, p, i) for g, p, i, _, _ in updates])
        given = [self._job(*update) for update in updates]
        jobs = Jobs(sorted(given, key=lambda j: j.number))
        jobs.given = given
        return jobs

    def _job(self, g, p, i, grad, copy) -> Job:
        group, state = self.param_groups[g], self.state[p]
        if not same_order(grad, p):
            grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
        keys = self.rule.keys_of(group)
        tensors = tuple(state[key] if key in keys else None for key in self.rule.state_keys)
        macros = self.rule.macros_of(group)
        # A master is a Parameter of a class of its own.
        weight = p if self.arena is None else p.detach()
        return Job(i, g, weight, grad, tensors, state["step"], copy, macros)

    def _members(self) -> "list[tuple[int, Tensor, int]]":
        """(group, parameter, number) of each parameter."""
        return [
            (g, p, self._number_of(p))
            for g, group in enumerate(self.param_groups)
            for p in group["params"]
        ]

    def _number_of(self, p) -> int:
        if not self._numbers:
            params = self.arena.masters if self.arena is not None else self._params()
            self._numbers = {id(p): i for i, p in enumerate(params)}
        if id(p) not in self._numbers:
            raise ArgumentError(
                f"a parameter of shape {tuple(p.shape)} is not in the optimizer's arena, whose "
                "tensors alone it updates; for another set of parameters: arena.release(), then a "
                "new Arena and a new optimizer"
            )
        return self._numbers[id(p)]

    # ---- the norm ----

    def _limit(self) -> float:
        return float("inf") if self.max_norm is None else check_max_norm(self.max_norm)

    def _takes_norm(self) -> bool:
        """Is a norm taken at all? For clipping, and to see whether everything is finite."""
        return self.max_norm is not None or self.on_nonfinite != "propagate"

    def _take_norm(self, state, part, clip, groups, divisor):
        """Norms, scales and the first tensor that is not finite, into `clip`."""
        grads = [j.grad for j in part.jobs]
        if part.squares:
            self._write_settings(state)
            squares = None
            # Those of the whole arena, which a reduction may have left.
            if self.arena is not None and self._numbers.keys() == set(map(id, self._params())):
                squares = self.arena.gradients.kept_squares()
            state.take_norm(clip, groups, grads, part.squares, squares, divisor)
        else:
            rows = [self._clip_row(j) for j in part.jobs]
            numbers = [j.number for j in part.jobs]
            state.take_norm_by_torch(clip, grads, rows, numbers, self._limit(), divisor)

    def _clip_row(self, job) -> int:
        """The row of the clip state that a tensor belongs to."""
        if self.scope == "global":
            return 0
        if self.scope == "tensor":
            return job.number
        # __init__ refuses scope="block" without one.
        assert self.arena is not None
        return self.arena.segments[job.number].block

    def _clip_state_on(self, state: DeviceState) -> "tuple[ClipState, Tensor | None]":
        tensors = len(self._numbers)
        rows = {
            "global": 1,
            "tensor": tensors,
            "block": len(self.arena.blocks) if self.arena else 0,
        }

        def group_of():
            if self.scope == "global":
                return None
            if self.scope == "block":
                return self.arena.tensor_to_block
            return torch.arange(tensors, dtype=torch.int32, device=state.device)

        # Not self.names: the norms would hold the optimizer, which holds them, and its memory would
        # stay until Python looks for cycles.
        names = functools.partial(_tensor_names, self.arena, self.param_groups)
        clip, groups = state.clip_state(self.scope, rows[self.scope], names, group_of)
        # load_state_dict() has new groups.
        clip.names = names
        return clip, groups

    def device_state(self, device: torch.device) -> DeviceState:
        """Settings, counts and norms on this device.

        Args:
            device: where parameters lie.

        Raises:
            ArgumentError: inside of a capture before the first step.
        """
        if device not in self._devices:
            if is_capturing():
                raise ArgumentError(
                    "the optimizer has not taken a step yet, and a CUDA graph is being captured: "
                    "call prepare() before"
                )
            self._devices[device] = DeviceState(device)
        return self._devices[device]

    def _divisor(self, device) -> "Tensor | None":
        """(1) fp32: what gradients are divided by, gradient_divisor times grad_scale; or None."""
        divisor = self._amp_tensor("gradient_divisor", device)
        grad_scale = self._amp_tensor("grad_scale", device)
        if divisor is None or grad_scale is None:
            return divisor if grad_scale is None else grad_scale
        return divisor * grad_scale

    def _amp_tensor(self, name, device) -> "Tensor | None":
        """An attribute that holds one number (gradient_divisor, grad_scale, found_inf).

        Returns:
            (1) fp32 on the device; None where it is not set.
        """
        value = getattr(self, name, None)
        if value is None:
            return None
        return torch.as_tensor(value).to(device, torch.float32, non_blocking=True).view(1)

    # ---- state ----

    def _make_states(self, members):
        """State where there is none; state that was loaded goes to its place in the layout."""
        layout = self.layout
        new, moved = [], []
        for g, p, i in members:
            state, keys = self.state[p], self.rule.keys_of(self.param_groups[g])
            if any(key not in state for key in keys) or "step" not in state:
                new.append((p, i, keys))
                continue
            misfit = next((key for key in keys if not layout.fits(state[key], p, i)), None)
            if misfit is not None:
                raise ArgumentError(
                    f"{misfit} of {self.names()[i]} has shape {tuple(state[misfit].shape)}; "
                    f"expected {tuple(p.shape)}"
                )
            if state["step"].device != p.device or any(
                not layout.is_in_place(key, state[key], p, i) for key in keys
            ):
                moved.append((p, i, keys))
        if (new or moved) and is_capturing():
            raise ArgumentError(
                f"{self.names()[(new or moved)[0][1]]} has no state on the device yet, and a CUDA "
                "graph is being captured: take one step before the capture, or call prepare()"
            )
        for (p, i, keys), step in zip(new, _zeros_by_device([p for p, _, _ in new])):
            state = self.state[p]
            state.setdefault("step", step)
            for key in keys:
                if key not in state:
                    state[key] = layout.allocate(key, p, i).zero_()
        for p, i, keys in moved:
            state = self.state[p]
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(p.device)
            for key in keys:
                if not layout.is_in_place(key, state[key], p, i):
                    state[key] = layout.adopt(key, state[key], p, i)

    def _move_states(self):
        """What state there is goes to its place in the layout."""
        self._make_states([member for member in self._members() if self.state.get(member[1])])

    # ---- state spread over ranks ----

    def shard(self, layout):
        """Keep this rank's share of the state from here on.

        state_dict() then has this share only; gathered() makes it whole for a while. A whole state
        can be loaded at any time.

        Args:
            layout: a ShardedLayout: which share.
        """
        self.layout = layout
        self._plan = None
        self._move_states()

    def unshard(self, discard: bool = False):
        """Keep the whole state again. Collective: on every rank.

        The masters of bf16 weights are whole, too.

        Args:
            discard: the other ranks do not call this. The state is lost, and starts anew; a master
                that another rank has updated takes the value of its bf16 weight.
        """
        if self.layout.ranks == 1:
            return
        if discard:
            # Only the state over an arena is sharded.
            assert self.arena is not None
            self.state.clear()
            self.arena.adopt(everything=True)
            self.layout = ArenaLayout(self.arena)
        else:
            self._gather()
        self._plan = None
        self._move_states()

    @contextlib.contextmanager
    def gathered(self):
        """Inside the block the state is whole, to be saved or loaded.

        Afterwards this rank has its share again.
        Collective: entered on every rank. Needs memory for the whole state. The masters of bf16
        weights are whole, too. Where the state is not spread over ranks, nothing happens."""
        sharded = self.layout
        if sharded.ranks == 1:
            yield self
            return
        self._gather()
        try:
            yield self
        finally:
            self.layout = sharded
            self._plan = None
            self._move_states()

    def _gather(self):
        """An ArenaLayout with the whole state takes the place of the sharded one; masters too."""
        self.layout.gather_masters()
        self.layout = ArenaLayout(self.arena, self.layout.gather_state())
        for _, p, i in self._members():
            state = self.state.get(p, {})
            for key in self.layout.buffers:
                if key in state:
                    state[key] = self.layout.allocate(key, p, i)

    # ---- torch's own bookkeeping ----

    def add_param_group(self, param_group: dict):
        """Add a parameter group, as torch's.

        Args:
            param_group: as torch's.

        Raises:
            ArgumentError: for a complex parameter, or one that is not the arena's.
        """
        super().add_param_group(param_group)
        try:
            for i, p in enumerate(self.param_groups[-1]["params"]):
                if p.is_complex():
                    raise ArgumentError(
                        f"parameter {i} of shape {tuple(p.shape)} is {p.dtype}: complex weights "
                        "are not supported; use an optimizer of torch's, or "
                        "torch.view_as_real(parameter)"
                    )
                if self.arena is not None:
                    self._number_of(p)
        except ArgumentError:
            del self.param_groups[-1]
            raise
        self._numbers = {}

    @torch._disable_dynamo
    def state_dict(self) -> dict:
        """As torch's. For a bf16 parameter of an arena it also holds `master`, its fp32 value.

        So a run that loads the model's and the optimizer's state goes on bit for bit; optimizers of
        torch's load it and ignore the masters."""
        packed = super().state_dict()
        masters = self._bf16_masters()
        for mine, stored in zip(self.param_groups, packed["param_groups"]):
            for p, i in zip(mine["params"], stored["params"]):
                if id(p) in masters and i in packed["state"]:
                    packed["state"][i] = {**packed["state"][i], "master": p.detach()}
        return packed

    def _bf16_masters(self) -> "set[int]":
        """ids of the masters of bf16 parameters, which have adopted edits of these."""
        return set() if self.arena is None else {id(p) for p in self.arena.named_master().values()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """Load a state, as torch's.

        A master in it counts if it rounds to the bf16 weight that the model has now: load the model
        first.

        Args:
            state_dict: of this class, or of the torch optimizer with the same rule.

        Raises:
            ArgumentError: with nothing changed, for a state of another shape.
        """
        stored = {i: dict(state) for i, state in state_dict["state"].items()}
        masters = {i: state.pop("master") for i, state in stored.items() if "master" in state}
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        arena = self.arena
        pairs = []
        if self._bf16_masters():
            pairs = [(p, masters[i]) for p, i in zip(self._params(), numbers) if i in masters]
        for p, master in pairs:
            if master.shape != p.shape:
                raise ArgumentError(
                    f"state_dict: master of {self.names()[self._number_of(p)]} has shape "
                    f"{tuple(master.shape)}; expected {tuple(p.shape)}"
                )
        self._load({**state_dict, "state": stored})
        if arena is None or not pairs:
            return
        for p, master in pairs:
            weight = arena.params[self._number_of(p)].float()
            master = master.to(p.device)
            # Rounding, stochastic too, moves a value by less than a unit in the last place of bf16.
            if ((master - weight).abs() <= weight.abs() * 2.0**-7 + 1e-40).all():
                p.copy_(master)
        arena.weights_current()

    def _load(self, state_dict):
        # Last: after hooks that repair a dict.
        check = self.register_load_state_dict_pre_hook(DeviceOptimizer._check_state)
        before = {p: dict(state) for p, state in self.state.items()}
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()
        # Into the tensors that are there: a captured step knows their addresses. The dict may hold
        # some of them in other places.
        ours = {id(t) for state in before.values() for t in state.values()}
        copies = []
        for p, state in self.state.items():
            for key, mine in before.get(p, {}).items():
                loaded = state.get(key)
                both = isinstance(mine, Tensor) and isinstance(loaded, Tensor)
                if both and mine.shape == loaded.shape:
                    copies.append((mine, loaded.clone() if id(loaded) in ours else loaded))
                    state[key] = mine
        for mine, loaded in copies:
            mine.copy_(loaded)
        self._move_states()

    def _check_state(self, state_dict):
        mine = [len(group["params"]) for group in self.param_groups]
        stored = [len(group["params"]) for group in state_dict["param_groups"]]
        if self.arena is not None and mine != stored:
            raise ArgumentError(
                f"state_dict has parameter groups of {stored} tensors; expected {mine}, those of "
                "arena.parameter_groups(weight_decay)"
            )
        optional = self.rule.optional
        for group, stored in zip(self.param_groups, state_dict["param_groups"]):
            for p, i in zip(group["params"], stored["params"]):
                state = state_dict["state"].get(i)
                if not state:
                    continue
                for key in ("step", *self.rule.state_keys):
                    if key in optional and key not in state:
                        continue
                    value = state.get(key)
                    if value is None:
                        problem = "is missing"
                    elif key != "step" and value.shape != p.shape:
                        problem = f"has shape {tuple(value.shape)}; expected {tuple(p.shape)}"
                    else:
                        continue
                    raise ArgumentError(
                        f"state_dict: {key} of {self.names()[self._number_of(p)]} {problem}"
                    )

    def __getstate__(self):
        """Copies and pickles: what belongs to a device is made again."""
        if self.layout.ranks > 1:
            raise TypeError(
                "a sharded optimizer cannot be copied or pickled: close its TrainStep before"
            )
        names = ("arena", "max_norm", "scope", "on_nonfinite", "stochastic_rounding", "seed")
        return {**{name: getattr(self, name) for name in names}, **super().__getstate__()}

    def __setstate__(self, state):
        super().__setstate__(state)
        # torch's load_state_dict comes here too, without the attributes.
        if "arena" in state:
            self._forget_devices()


def _kernels_take(job: Job) -> bool:
    """Do our kernels take this tensor?"""
    tensors = job.weight, job.grad
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype in KINDS for t in tensors)
    same_dtype = all(t is None or t.dtype == job.weight.dtype for t in job.state)
    return plain and same_dtype and dense(job.weight)


def _zeros_by_device(params) -> "list[Tensor]":
    """A () fp32 zero per parameter, on its device, in its own storage; one launch per device."""
    zeros = {
        device: map(own_storage, torch.zeros(len(params), dtype=torch.float32, device=device))
        for device in {p.device: None for p in params}
    }
    return [next(zeros[p.device]) for p in params]


def _tensor_names(arena: "Arena | None", param_groups: "list[dict]") -> "list[str]":
    """The name of each tensor: in the arena's order, else in that of the groups."""
    if arena is not None:
        return [s.name for s in arena.segments]
    params = [p for group in param_groups for p in group["params"]]
    named = [name for group in param_groups for name in group.get("param_names", ())]
    return named if len(named) == len(params) else unnamed(params)
