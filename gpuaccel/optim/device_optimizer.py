"""The base of gpuaccel's optimizers: what changes lives on the device, clipping is inside the step.

    class SignSGD(DeviceOptimizer):                # kernels_cu/sign_sgd.cu holds its kernels
        rule = UpdateRule("sign_sgd", (), reference_sign_sgd)
        def __init__(self, params_or_arena, lr=1e-3, *, maximize=False, **options):
            groups = {"lr": lr, "maximize": maximize}
            super().__init__(params_or_arena, {"defaults": groups}, lr=lr, **options)

A step launches kernels and waits for nothing. Over an arena one kernel multiplies the gradients by
the clip scale and uses them, and writes bf16 weights from their fp32 masters in the same pass.
`p.grad` is read; over an arena it becomes the arena's slice, and otherwise it stays.

The formula and its launches: optim/update_rule.py. Where the state lies: optim/state_layout.py.
"""

import contextlib
import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ..backends import takes
from ..compiler import KINDS
from ..errors import ArgumentError, check_choice
from ..nn import invalid_tokens
from ..ops.clip import (
    ClipState,
    OnNonfinite,
    Scope,
    check_gradients,
    check_max_norm,
    clip_kernel,
    tensors_of_launch,
)
from .arena import Arena, check_parameters_or_arena
from .device_state import DeviceState, Norms, is_capturing
from .members import Members, fitted
from .state_layout import ArenaLayout, ParameterLayout, place_states
from .step_plan import DevicePlan, facts_of
from .update_rule import Job, StepInputs, UpdateRule, launch_begin, launch_update, torch_step

log = logging.getLogger("gpuaccel")


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
        on_nonfinite: what happens when a gradient is not finite. "skip" (default over an arena and
            with max_norm): weights, state and step counts of all tensors stay; the skip is counted
            in `skipped`, last_skip() names the tensor. "propagate" (default otherwise, where no
            norm is taken): the update uses it, as torch's.
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
    gradient_divisor: Tensor | None = None
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params_or_arena,
        arguments: dict,
        *,
        lr,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        scope: Scope = "global",
        on_nonfinite: OnNonfinite | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ):
        check_parameters_or_arena("params", params_or_arena)
        arena = params_or_arena if isinstance(params_or_arena, Arena) else None
        self.arena = arena
        self.max_norm = max_norm
        self.scope = scope
        self.on_nonfinite: OnNonfinite = on_nonfinite or (
            "propagate" if arena is None and max_norm is None else "skip"
        )
        self.stochastic_rounding = stochastic_rounding
        self.seed = seed
        check_choice("scope", scope, Scope)
        check_choice("on_nonfinite", self.on_nonfinite, OnNonfinite)
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
        self._begin()
        super().__init__(params_or_arena, **arguments)

    def _begin(self):
        arena = self.arena
        self.layout = ParameterLayout() if arena is None else ArenaLayout(arena)
        # Called by last_skip() with the tensor's number; what it returns is added.
        self.explain_skip = None
        self._members = Members(arena)
        # What the latest step has seen, and what it did with it on each device.
        self._plan: tuple[tuple | None, list[DevicePlan]] = (None, [])
        self._took_norm = False
        self._devices: dict[torch.device, DeviceState] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks that share the state; 1 if it is not sharded."""
        return self.layout.ranks

    # ---- what the host may ask ----

    @property
    def clip_state(self) -> ClipState | None:
        """Norms and scales of the latest step; None: it took no norm. The next overwrites them."""
        for state in self._devices.values():
            if self._took_norm and self.scope in state.norms:
                return state.norms[self.scope].clip
        return None

    @property
    def skipped(self) -> Tensor:
        """() int32 on the device: steps skipped so far because a gradient was not finite."""
        for state in self._devices.values():
            return state.record[1]
        return torch.zeros((), dtype=torch.int32)

    def last_skip(self) -> dict | None:
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

    def names(self) -> list[str]:
        """The name of each tensor, by number: in the arena's order, else in that of the groups."""
        return self._members.names(self.param_groups)

    # ---- for captured steps ----

    def graph_key(self) -> tuple:
        """What a captured step keeps by value: another key needs another capture. Hashable."""
        rule = self.rule
        groups = [(len(g["params"]), g["maximize"], rule.macros_of(g)) for g in self.param_groups]
        has_limit = self.max_norm is not None
        return (*groups, self.on_nonfinite, self.scope, self.stochastic_rounding, has_limit)

    def tensors_changed_by_step(self) -> list[Tensor]:
        """What step() writes beside parameters and state: counts of steps and skips."""
        return [state.record for state in self._devices.values()]

    def prepare(self):
        """Allocate all state and settings now, so that the first step can be captured already."""
        members = [
            member for member in self._members.rows(self.param_groups) if member[1].requires_grad
        ]
        self._place_states(members)
        kinds: dict[torch.device, set] = {}
        for g, p, _ in members:
            macros = self.rule.macros_of(self.param_groups[g])
            kinds.setdefault(p.device, set()).add((p.dtype, macros))
        for device, pairs in kinds.items():
            self._device_state(device)
            if self._takes_norm():
                self._norms(device)
            # Compiled and loaded: neither can be done in a capture.
            if device.type == "cuda" and takes(device):
                most = tensors_of_launch(self._members.count(self.param_groups))
                kernels = [clip_kernel("squares_v2", 2.0, most), clip_kernel("reduce_v2", 2.0)]
                for dtype, macros in pairs:
                    if dtype in KINDS:
                        kernels += self.rule.step_kernels(
                            dtype, macros, self.stochastic_rounding, self.arena is not None
                        )
                for kernel in kernels:
                    kernel.load(device.index)
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        """Write hyperparameters that the host has changed (lr, max_norm, ...) to the device.

        step() does so by itself. A captured step cannot: call this before its replay. Never
        waits."""
        values = [value for group in self.param_groups for value in self.rule.values_of(group)]
        for device, state in self._devices.items():
            if takes(device):
                state.write_settings([*values, self._limit(), float(self.seed)])

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
            self.arena.adopt()
            self.arena.gradients.collect()
        parts = self._parts()
        self._took_norm = bool(parts) and self._takes_norm()
        try:
            for part in parts:
                self._step_on(part)
            if self.arena is not None:
                self.arena.weights_current()
        finally:
            if self.arena is None:
                for part in parts:
                    part.drop_gradients()
        return loss

    def _step_on(self, part: DevicePlan):
        state = self._device_state(part.device)
        if part.by_kernels or part.measurable:
            self.refresh()
        names = "gradient_divisor", "grad_scale"
        divisors = [d for d in (_one_number(self, n, part.device) for n in names) if d is not None]
        divisor = functools.reduce(torch.mul, divisors) if divisors else None
        norms = None
        if self._takes_norm():
            norms = self._norms(part.device)
            if part.measurable:
                # Sums of squares that a reduction of the whole arena may have computed.
                squares = None if self.arena is None else self.arena.gradients.kept_squares()
                held = sum(len(group["params"]) for group in self.param_groups)
                squares = squares if held == len(norms.rows) else None
                norms.take(part.jobs, state.max_norm, squares, divisor)
            else:
                norms.take_by_torch(part.jobs, self._limit(), divisor)
            if self.on_nonfinite == "raise":
                norms.check_finite()
        inputs = StepInputs(
            None if norms is None else norms.clip,
            None if norms is None else norms.groups,
            self.on_nonfinite == "skip",
            divisor,
            _one_number(self, "found_inf", part.device),
            state.record,
        )
        if part.by_kernels:
            coefficients = launch_begin(self.rule, part.begins, state.settings, inputs)
            launch_update(part.updates, coefficients, state.seed)
        if part.by_torch:
            seed = self.seed if self.stochastic_rounding else None
            jobs = self.layout.local(part.by_torch, seed)
            torch_step(self.rule, jobs, self.param_groups, inputs, not part.by_kernels, seed)
        self.layout.after_update()
        if part.by_kernels:
            torch.autograd.graph.increment_version(part.changed)

    def _parts(self) -> list[DevicePlan]:
        """The plans of this step; those of the last step if its gradients are the same."""
        tensors = self._members.gradient_holders(self.param_groups)
        grads: list[Any] = [p.grad for p in tensors]
        facts, parts = self._plan
        if facts is not None and facts == self._facts(grads):
            for part in parts:
                part.set_gradients(grads)
            return parts
        self._plan = None, []
        jobs = self._jobs()
        parts = [
            DevicePlan(
                device,
                [j for j in jobs if j.weight.device == device],
                self.rule,
                self.layout,
                self.stochastic_rounding,
            )
            for device in {j.weight.device: None for j in jobs}
        ]
        self._plan = self._facts(grads), parts
        return parts

    def _facts(self, grads) -> tuple | None:
        arena = self.arena
        buffers = () if arena is None else [*arena.module_parameters, arena.grads]
        options = self.layout, self.scope, self.stochastic_rounding, self._takes_norm()
        return facts_of(self.param_groups, self.rule, self.state, buffers, grads, *options)

    def _jobs(self) -> list[Job]:
        """What this step updates, by number, checked; nothing has changed when it raises."""
        arena, rule = self.arena, self.rule
        if arena is not None:
            arena.check()
        members = [
            member for member in self._members.rows(self.param_groups) if member[1].grad is not None
        ]
        grads: dict[int, Any] = {i: p.grad for _, p, i in members}
        check_gradients([*grads.values()], lambda: [self.names()[i] for i in grads])
        devices = {p.device: None for _, p, _ in members}
        if len(devices) > 1 and self._takes_norm():
            raise ArgumentError(
                f"parameters lie on {', '.join(map(str, devices))}: max_norm and "
                f"on_nonfinite={self.on_nonfinite!r} need one device; clip with "
                "ga.clip_grad_norm_ instead"
            )
        self._limit()
        self._warn_of_masters(members)
        self._place_states(members)
        rows = [0] * self._members.count(self.param_groups)
        if devices and self._takes_norm():
            rows = self._norms(next(iter(devices))).rows
        jobs = []
        options = [(rule.keys_of(group), rule.macros_of(group)) for group in self.param_groups]
        for g, p, i in members:
            (keys, macros), state = options[g], self.state[p]
            tensors = tuple(state[key] if key in keys else None for key in rule.state_keys)
            copy = (
                None
                if arena is None or arena.module_parameters[i] is p
                else arena.module_parameters[i]
            )
            # Not a master itself, which is a Parameter of a class of its own.
            jobs.append(
                Job(i, g, p.detach(), grads[i], tensors, state["step"], copy, macros, rows[i])
            )
        jobs.sort(key=lambda j: j.number)
        return jobs

    def _warn_of_masters(self, members):
        """Before the first update of bf16 weights whose fp32 masters would be left out."""
        if self.arena is not None:
            return
        new = [p for _, p, _ in members if p.dtype == torch.bfloat16 and not self.state.get(p)]
        held = {id(p) for arena in Arena.all() for p in arena.module_parameters} if new else ()
        if any(id(p) in held for p in new):
            kind = type(self).__name__
            log.warning(
                "this %s holds bf16 weights of an arena, and trains without their fp32 masters: "
                "expected the arena first, then %s(arena)",
                kind,
                kind,
            )

    def _takes_norm(self) -> bool:
        """True if the step needs a norm, for clipping or to find nonfinite gradients."""
        return self.max_norm is not None or self.on_nonfinite != "propagate"

    def _limit(self) -> float:
        return float("inf") if self.max_norm is None else check_max_norm(self.max_norm)

    def _norms(self, device: torch.device) -> Norms:
        norms_of = self._device_state(device).norms
        norms, count = norms_of.get(self.scope), self._members.count(self.param_groups)
        if norms is None or len(norms.rows) != count:
            if is_capturing():
                raise ArgumentError(
                    "the optimizer has not taken a norm yet, and a CUDA graph is being captured: "
                    "take one step before, or call prepare()"
                )
            norms = norms_of[self.scope] = Norms(device, self.scope, count, self.arena)
        # Not self.names: the norms would hold the optimizer, which holds them, and its memory would
        # stay until Python looks for cycles.
        norms.clip.names = functools.partial(self._members.names, self.param_groups)
        return norms

    def _device_state(self, device: torch.device) -> DeviceState:
        if device not in self._devices:
            self._devices[device] = DeviceState(device)
        return self._devices[device]

    def _place_states(self, members=None):
        """Move the state of these members, by default of all that have state, to its layout."""
        if members is None:
            members = [
                member
                for member in self._members.rows(self.param_groups)
                if self.state.get(member[1])
            ]
        keys = [self.rule.keys_of(group) for group in self.param_groups]
        place_states(self.layout, self.state, [(p, i, keys[g]) for g, p, i in members], self.names)

    # ---- state spread over ranks ----

    def shard(self, layout):
        """Keep this rank's share of the state from here on.

        From then on state_dict() raises, except inside gathered(). A whole state can be loaded at
        any time.

        Args:
            layout: a ShardedLayout: which share.
        """
        self.layout = layout
        self._place_states()

    def unshard(self, discard: bool = False):
        """Keep the whole state again. Collective: on every rank.

        The masters of bf16 weights are whole, too.

        Args:
            discard: not a collective. The state is lost and starts anew; a master that another
                rank has updated takes the value of its bf16 weight.
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
        self._place_states()

    @contextlib.contextmanager
    def gathered(self):
        """Context manager: all-gather the state, so that it can be saved or loaded.

        Afterwards each rank has its share again. Collective: enter it on every rank. Needs memory
        for the whole state. The masters of bf16 weights are gathered as well. Has no effect if the
        state is not sharded."""
        sharded = self.layout
        if sharded.ranks == 1:
            yield self
            return
        self._gather()
        try:
            yield self
        finally:
            self.layout = sharded
            self._place_states()

    def _gather(self):
        """Replace the sharded layout by an ArenaLayout with the whole state, masters included."""
        self.layout.gather_masters()
        self.layout = ArenaLayout(self.arena, self.layout.gather_state())
        for _, p, i in self._members.rows(self.param_groups):
            state = self.state.get(p, {})
            for key in state.keys() & self.layout.buffers.keys():
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
                    self._members.number_of(p)
        except ArgumentError:
            del self.param_groups[-1]
            raise

    def state_dict(self) -> dict:
        """As torch's; over an arena with `param_names`, and `master`, the fp32 values of bf16 ones.

        A run that loads the model's and the optimizer's state resumes bit-identically. torch's
        optimizers load it and ignore the masters. They share its tensors, which are the state's
        own: load a copy.deepcopy of the dict.

        Raises:
            ArgumentError: of a sharded optimizer outside gathered(): this rank has only its share.
        """
        if self.layout.ranks > 1:
            raise ArgumentError(
                "state_dict() of a sharded optimizer: this rank has 1 share of "
                f"{self.layout.ranks}; expected it inside `with step.gathered():` on every rank, "
                "or ga.save_checkpoint"
            )
        packed = super().state_dict()
        if self.arena is None:
            return packed
        # They adopt edits of bf16 parameters.
        masters = {id(p) for p in self.arena.named_master().values()}
        names_by_group = self._members.names_by_group(self.param_groups)
        for mine, stored, names in zip(self.param_groups, packed["param_groups"], names_by_group):
            stored["param_names"] = names
            for p, i in zip(mine["params"], stored["params"]):
                if id(p) in masters and i in packed["state"]:
                    packed["state"][i] = {**packed["state"][i], "master": p.detach()}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """Load a state, as torch's. The values are copied.

        Where both sides name their tensors (over an arena, or given as named_parameters()), they
        are matched by name, and those that the dict lacks begin anew. A master in it counts if it
        rounds to the bf16 weight that the model has now: load the model first.

        Args:
            state_dict: of this class, or of the torch optimizer with the same rule.

        Raises:
            ArgumentError: with nothing changed, for a state of another shape.
        """
        # Last: after hooks that repair a dict.
        fit = self.register_load_state_dict_pre_hook(
            lambda _, given: fitted(given, self.param_groups, self._members, self.rule)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            fit.remove()
        params = [p for group in self.param_groups for p in group["params"] if p in self.state]
        masters = {p: self.state[p].pop("master", None) for p in params}
        self._place_states()
        arena = self.arena
        if arena is None:
            return
        for group in self.param_groups:
            group.pop("param_names", None)
        bf16 = {id(p) for p in arena.named_master().values()}
        for p, master in masters.items():
            if master is None or id(p) not in bf16:
                continue
            weight = arena.module_parameters[self._members.number_of(p)].float()
            # Rounding, stochastic too, moves a value by less than a unit in the last place of bf16.
            if ((master - weight).abs() <= weight.abs() * 2.0**-7 + 1e-40).all():
                p.copy_(master)
        arena.weights_current()

    def __getstate__(self):
        """Copies and pickles: what belongs to a device is made again."""
        if self.arena is not None:
            raise ArgumentError(
                "an optimizer over an arena is neither copied nor pickled. Instead: copy its "
                "state_dict(), and load it into a new one"
            )
        names = ("arena", "max_norm", "scope", "on_nonfinite", "stochastic_rounding", "seed")
        return {**{name: getattr(self, name) for name in names}, **super().__getstate__()}

    def __setstate__(self, state):
        super().__setstate__(state)
        # torch's load_state_dict calls this as well, without the attributes.
        if "arena" in state:
            self._begin()


def _one_number(optimizer: DeviceOptimizer, name: str, device: torch.device) -> Tensor | None:
    """The value of gradient_divisor, grad_scale or found_inf.

    Returns:
        (1) fp32 on the device; None if the attribute is not set.
    """
    value = getattr(optimizer, name, None)
    if value is None:
        return None
    return torch.as_tensor(value).to(device, torch.float32, non_blocking=True).view(1)
