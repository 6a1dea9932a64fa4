"""ga.AdamW: an optimizer whose every changing number lives on the device, with clipping inside: the host only launches.

    >>> opt = ga.AdamW(model.parameters(), lr=3e-4)                              # as torch.optim.AdamW, and is one
    >>> opt = ga.AdamW(ga.Arena(model), lr=3e-4, weight_decay=0.1, max_norm=1.0) # clips, updates and clears the sums in one pass
    >>> opt.step()
    >>> opt.clip_state.norm, opt.clip_state.clipped_norm, opt.skipped            # on the device; nothing waited
    >>> opt.last_skip()                                                          # waits: None, or which step and tensor were not finite

Over an arena the gradient sums are multiplied by the clip scale, used, and set to zero in one kernel, and bf16 weights are written in the
same pass from their fp32 masters. A user's own `p.grad` is read and never written. The kernels: ops/adamw.py; interface and state: torch's.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ..backends import backend, takes
from ..errors import ArgumentError, NonFiniteError
from ..nn.embedding import Embedding
from ..ops.adamw import (
    SETTINGS,
    Job,
    Jobs,
    launch_begin,
    launch_set,
    launch_update,
    reference_step,
    step_kernels,
)
from ..ops.clip import (
    KINDS,
    POLICIES,
    SCOPES,
    ClipState,
    check_choice,
    check_gradients,
    check_max_norm,
    clip_kernel,
    dense,
    kernel_takes,
    launch_reduce,
    launch_squares,
    launches_for,
    new_state,
    reference_norms,
    reference_scale,
    unnamed,
)
from .accumulate import GradientAccumulator
from .arena import Arena, own_storage
from .clip import arena_squares


@dataclass(slots=True)
class _Part:
    """A step's share of one device."""

    device: torch.device
    jobs: "list[Job]"
    ours: Jobs  # by our kernels
    rest: "list[Job]"  # by the reference
    clears: bool  # every gradient is an arena's sum ...
    whole: bool  # ... and the arena holds no other
    changed: "list[Tensor]"  # what our kernels write and autograd may know
    launches: tuple  # of squares_v2 over the gradients; (): our kernels do not take them


@dataclass(slots=True)
class _Work:
    """An optimizer's buffers on one device."""

    settings: Tensor  # (8 per parameter group, then max_norm and seed) fp64, read by the kernels
    record: Tensor  # (4,) int32: steps asked for, steps skipped, at the last skip: which, and which tensor
    written: "list[float] | None" = None  # what the host has last written to settings
    found: "ClipState | None" = None
    group_of: "Tensor | None" = None
    kept: dict = field(
        default_factory=dict
    )  # scope -> (found, group_of): a captured step knows their addresses


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW (arguments, parameter groups, schedulers, state_dict in both directions) by our kernels; clips on request.

    params_or_arena: as torch's, or an Arena: then masters, bf16 copies and gradient sums are the arena's, weight decay and learning rate
    follow its segments, and step() clears the sums of its GradientAccumulator (`.grad` is None after it; without one zero_grad() as
    usual, which knows bf16 parameters too). state_dict fits torch.optim.AdamW(arena.parameter_groups(weight_decay)). Parameters: fp32, bf16, fp16 (m and v in the same
    dtype, computed in fp32; torch's rounding of fused=True); fp64 and others by the reference, in torch.
    max_norm: clip to this norm inside the step, over `scope` "global", "tensor" or (arena) "block"; may be changed between steps.
    weight_decay: over an arena of matrices only (its segments say so: Arena(decay=...)).
    on_nonfinite: "propagate" (default without an arena), "skip" (default with one: weights, moments and step counts of all tensors stay,
    whichever is not finite; the skip is counted in `skipped`, last_skip() names the tensor) or "raise" (NonFiniteError before anything
    changes; waits).
    stochastic_rounding: of bf16 weights, keyed on (seed, tensor, element as it lies in memory, step). seed: 0 to 2^53 - 1.
    grad_scale, found_inf: attributes that torch.amp.GradScaler sets; gradients are divided by the one, the step is skipped by the other.
    maximize, amsgrad: as torch's. foreach, capturable, fused: accepted and kept; every step is fused and can be captured, after one
    step (or prepare()) outside. refresh() brings a changed learning rate to a captured step.
    Deviations from torch: no complex, sparse or differentiable optimization (ArgumentError); with max_norm or "skip" one device only."""

    publishes = property(
        lambda self: self.arena is not None
    )  # optim/arena.py: the bf16 copies are written here
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params_or_arena,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_norm: "float | None" = None,
        scope: str = "global",
        on_nonfinite: "str | None" = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
        foreach: "bool | None" = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: "bool | None" = None,
    ):
        arena = params_or_arena if isinstance(params_or_arena, Arena) else None
        self.arena, self.scope, self.stochastic_rounding, self.seed = (
            arena,
            scope,
            stochastic_rounding,
            seed,
        )
        self.on_nonfinite, self.max_norm = (
            on_nonfinite or ("skip" if arena else "propagate"),
            max_norm,
        )
        check_choice("scope", scope, SCOPES)
        check_choice("on_nonfinite", self.on_nonfinite, POLICIES)
        self._limit()
        if scope == "block" and arena is None:
            raise ArgumentError(
                "scope='block' needs an arena, which knows the blocks; got parameters"
            )
        if differentiable:
            raise ArgumentError(
                "differentiable is True: our kernels are not; use torch.optim.AdamW for it"
            )
        if not isinstance(seed, int) or not 0 <= seed < 2**53:
            raise ArgumentError(f"seed is {seed!r}; expected a whole number from 0 to 2^53 - 1")
        if arena is not None:
            arena.check()
            params_or_arena = arena.parameter_groups(
                weight_decay, lr if any(s.lr_scale != 1 for s in arena.segments) else None
            )
        self._numbers, self._plan, self._work, self._moments, self._measured = (
            None,
            None,
            {},
            {},
            False,
        )
        self.explain_skip = None  # called by last_skip() with the tensor's number; what it returns is added (distributed/config.py: the rank)
        super().__init__(
            params_or_arena,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    # ---- what the host may ask ----

    @property
    def clip_state(self) -> "ClipState | None":
        """What the latest step's clipping found (ClipState, overwritten by the next step); None when it took no norm."""
        return (
            next(
                (
                    work.kept[self.scope][0]
                    for work in self._work.values()
                    if self.scope in work.kept
                ),
                None,
            )
            if self._measured
            else None
        )

    @property
    def skipped(self) -> Tensor:
        """() int32 on the device, which counts on: steps that were not taken because a gradient was not finite."""
        return next(
            (work.record[1] for work in self._work.values()), torch.zeros((), dtype=torch.int32)
        )

    def last_skip(self) -> "dict | None":
        """{"step": which call of step(), "tensor": name of its first gradient that was not finite}, or None; over an arena also "invalid_tokens":
        of each ga.Embedding that has seen a token out of range; of several ranks "rank", which brought it. Waits for the device."""
        for work in self._work.values():
            asked, skipped, step, tensor = work.record.tolist()
            if skipped:
                seen = {
                    name: part.invalid_tokens()
                    for name, part in (self.arena.module.named_modules() if self.arena else ())
                    if isinstance(part, Embedding)
                }
                seen = {name: found for name, found in seen.items() if found}
                more = self.explain_skip(tensor) if self.explain_skip is not None else {}
                return {
                    "step": step,
                    "tensor": self.names()[tensor] if tensor >= 0 else None,
                    **more,
                    **({"invalid_tokens": seen} if seen else {}),
                }
        return None

    def names(self) -> "list[str]":
        """The name of each tensor, in the order of their numbers (an arena's order, else that of the groups)."""
        if self.arena is not None:
            return [s.name for s in self.arena.segments]
        params = [p for group in self.param_groups for p in group["params"]]
        named = [name for group in self.param_groups for name in group.get("param_names", ())]
        return named if len(named) == len(params) else unnamed(params)

    # ---- for captured steps ----

    def graph_key(self) -> tuple:
        """What a captured step keeps by value: a step with another key needs another capture. Hashable."""
        groups = tuple((len(g["params"]), g["maximize"], g["amsgrad"]) for g in self.param_groups)
        has_limit = self.max_norm is not None
        return (*groups, self.on_nonfinite, self.scope, self.stochastic_rounding, has_limit)

    def tensors_changed_by_step(self) -> "list[Tensor]":
        """What step() writes on the device beside parameters and state: counts of steps and skips."""
        return [work.record for work in self._work.values()]

    # ---- the step ----

    def zero_grad(self, set_to_none: bool = True):
        """As torch's; over an arena also the gradients of bf16 parameters, which step() reads where there is no accumulator."""
        super().zero_grad(set_to_none)
        for p in self.arena.params if self.arena is not None else ():
            if p.grad is not None:
                if set_to_none:
                    p.grad = None
                else:
                    p.grad.zero_()

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns the closure's loss, if any. No host synchronisation (except on_nonfinite="raise").

        ArgumentError, with nothing changed: a sparse gradient, a state that does not fit, a capture before the first step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        accumulator = self.arena and GradientAccumulator.of(self.arena)
        if accumulator is not None:
            accumulator.finish()
        if self.arena is not None and (self._optimizer_step_pre_hooks or _foreign_step_hooks()):
            self.arena.grads_changed()  # a hook may have written to gradients in a way that torch does not count
        parts = self._parts(accumulator)
        self._measured = bool(parts) and self._measures()
        try:
            for part in parts:
                self._step_on(part)
            cleared = {j.number for part in parts for j in part.jobs if j.clear}
            if cleared:
                self.arena.grads_changed()
                for i in cleared:
                    self.arena.masters[i].grad = None
            if accumulator is not None and parts:
                accumulator.zero_(cleared)
            if self.arena is not None:
                self.arena.weights_current()
        finally:  # what is kept for the next step must not keep gradients alive
            for part in parts:
                for j in part.jobs:
                    j.grad = j.grad if j.clear else None
        return loss

    def _step_on(self, part):
        work = self._work_on(part.device)
        divisor, found_inf = (self._amp(name, part.device) for name in ("grad_scale", "found_inf"))
        found = self._measure(work, part, divisor) if self._measures() else None
        if self.on_nonfinite == "raise" and not bool(found.finite.all()):
            raise NonFiniteError(
                f"the gradient of {found.name() or 'all tensors together'} is not finite: nothing was changed"
            )
        skip = self.on_nonfinite == "skip"
        if part.ours:
            self._refresh(work)
            coefficients = launch_begin(
                part.ours,
                work.settings,
                found,
                work.group_of,
                skip,
                divisor,
                found_inf,
                work.record,
            )
            self._launch_update(part, coefficients, work.settings[-1:])
            torch.autograd.graph.increment_version(part.changed)
        if part.rest:
            rows = [self._verdict_of(j) for j in part.rest]
            self._reference_step(
                part.rest,
                self.param_groups,
                found,
                rows,
                skip,
                divisor,
                found_inf,
                work.record,
                not part.ours,
                self.seed if self.stochastic_rounding else None,
            )

    def _launch_update(self, part, coefficients, seed):
        launch_update(
            part.ours,
            coefficients,
            seed,
            self.stochastic_rounding,
            self.arena if part.clears else None,
            self._moments,
        )

    _reference_step = staticmethod(reference_step)

    def _parts(self, accumulator) -> "list[_Part]":
        """What each device has to do. Worked out anew when a gradient, a weight or a state lies elsewhere than in the last step."""
        key, grads = self._key(accumulator)
        if key is not None and self._plan is not None and self._plan[0] == key:
            for j, grad in zip(self._plan[1], grads):
                j.grad = grad
        else:
            jobs, self._plan = self._jobs(), None
            parts = []
            for device in {j.weight.device: None for j in jobs}:
                mine = [j for j in jobs if j.weight.device == device]
                ours = Jobs(
                    j
                    for j in mine
                    if takes(device)
                    and j.m.dtype == j.weight.dtype
                    and dense(j.weight)
                    and all(
                        type(t) in (Tensor, torch.nn.Parameter) and t.dtype in KINDS
                        for t in (j.weight, j.grad)
                    )
                )
                ids = {id(j) for j in ours}
                grads = [None] * len(self._numbers)  # by number, so that what is found can be named
                for j in mine:
                    grads[j.number] = j.grad
                measurable = kernel_takes([j.grad for j in mine]) and all(
                    dense(j.grad) for j in mine
                )
                clears = all(j.clear for j in mine)
                whole = clears and self._is_all(mine, accumulator)
                parts.append(
                    _Part(
                        device,
                        mine,
                        ours,
                        [j for j in mine if id(j) not in ids],
                        clears,
                        whole,
                        [t for j in ours for t in (j.weight, j.copy) if t is not None],
                        launches_for(grads) if measurable else (),
                    )
                )
            self._plan = self._key(accumulator)[0], jobs.given, parts
        return self._plan[2]

    def _is_all(self, jobs, accumulator) -> bool:
        """Are the sums of these tensors all that the arena holds? Where an accumulator is at work, those of the optimizer's other
        tensors are zero."""
        mine = {j.number for j in jobs} | (
            {self._number_of(p) for group in self.param_groups for p in group["params"]}
            if accumulator
            else set()
        )
        return all(i in mine or s.numel == 0 for i, s in enumerate(self.arena.segments))

    def _key(self, accumulator) -> "tuple[tuple | None, list[Tensor]]":
        """(where everything lies that a step touches, None when only a close look can tell; the gradients)."""
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        lows = ()
        if self.arena is not None and self.arena.bf16_weights is not None:
            if self._numbers is None or any(id(p) not in self._numbers for p in params):
                return None, []
            lows = [self.arena.params[self._number_of(p)] for p in params]
            grads = [low.grad if grad is None else grad for grad, low in zip(grads, lows)]
        given = [g for g in grads if g is not None]
        try:
            if not (
                all(map(Tensor.is_contiguous, given)) and all(map(Tensor.is_contiguous, params))
            ):
                return None, given
            return (
                [g is None for g in grads],
                list(map(Tensor.data_ptr, given)),
                [g.dtype for g in given],
                list(map(id, params)),
                list(map(Tensor.data_ptr, params)),
                list(map(Tensor.numel, params)),
                list(map(Tensor.data_ptr, lows)),
                [
                    tuple(map(Tensor.data_ptr, self.state[p].values())) if p in self.state else ()
                    for p in params
                ],
                [(len(group["params"]), group["amsgrad"]) for group in self.param_groups],
                backend().name,
                accumulator is None,
            ), given
        except (
            RuntimeError,
            TypeError,
        ):  # a sparse tensor has no address, a step that is a number neither
            return None, given

    # ---- what a step needs ----

    def _limit(self) -> float:
        return float("inf") if self.max_norm is None else check_max_norm(self.max_norm)

    def _measures(self) -> bool:
        """Is a norm taken at all? For clipping, and to see whether everything is finite."""
        return self.max_norm is not None or self.on_nonfinite != "propagate"

    def _measure(self, work, part, divisor) -> ClipState:
        """Norm, scale and first tensor that is not finite."""
        arena, device, jobs = self.arena, part.device, part.jobs
        self._make_verdicts(work)
        grads = [j.grad for j in jobs]
        if part.launches:
            self._refresh(work)
            if part.whole:
                arena_squares(arena)
                partials, owners = arena.partials, arena.chunk_to_tensor
            else:
                rows = sum(chunks for _, chunks, _ in part.launches)
                partials, owners = (
                    torch.empty(rows, dtype=torch.float64, device=device),
                    torch.empty(rows, dtype=torch.int32, device=device),
                )
                launch_squares(grads, partials, owners, launches=part.launches)
            launch_reduce(
                work.found,
                partials,
                owners,
                work.group_of,
                len(partials),
                work.settings[-2:-1],
                divisor=divisor,
            )
            return work.found
        norms, bad = reference_norms(
            grads,
            2.0,
            [self._verdict_of(j) for j in jobs],
            len(work.found.verdicts),
            numbers=[j.number for j in jobs],
        )
        norms = norms if divisor is None else norms / divisor.view(())
        scales = reference_scale(norms, self._limit())
        work.found.verdicts.copy_(
            torch.stack([scales, norms, norms * scales, torch.isfinite(norms).to(norms.dtype)], 1)
        )
        work.found.bad.copy_(bad)
        return work.found

    def _verdict_of(self, job) -> int:
        """The row of the verdicts that a tensor falls under."""
        return {
            "global": 0,
            "tensor": job.number,
            "block": self.arena and self.arena.segments[job.number].block,
        }[self.scope]

    def _make_verdicts(self, work):
        numbers = len(self._numbers)
        count = {
            "global": 1,
            "block": len(self.arena.blocks) if self.arena else 0,
            "tensor": numbers,
        }[self.scope]
        work.found, work.group_of = work.kept.get(self.scope, (None, None))
        if work.found is None or len(work.found.verdicts) != count:
            if _capturing():
                raise ArgumentError(
                    "the optimizer has not taken a norm yet, and a CUDA graph is being captured: take one step before, or call prepare()"
                )
            device = work.settings.device
            work.found = new_state(count, device, self.scope, self.names)
            work.group_of = (
                None
                if self.scope == "global"
                else self.arena.tensor_to_block
                if self.scope == "block"
                else torch.arange(numbers, dtype=torch.int32, device=device)
            )
            work.kept[self.scope] = work.found, work.group_of

    def _jobs(self) -> Jobs:
        """What this step updates, everything checked; nothing has changed when it raises."""
        arena, self._numbers = self.arena, None
        if arena is not None:
            arena.check()
        found = []  # (group, parameter, number, gradient, bf16 copy)
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                i, grad, copy = self._number_of(p), p.grad, None
                if arena is not None and arena.params[i] is not p:
                    copy = arena.params[i]
                    grad = copy.grad if grad is None else grad
                if grad is not None:
                    found.append((g, p, i, grad, copy))
        check_gradients(
            [grad for *_, grad, _ in found], lambda: [self.names()[i] for _, _, i, _, _ in found]
        )
        devices = {p.device: None for _, p, *_ in found}
        if len(devices) > 1 and self._measures():
            raise ArgumentError(
                f"parameters lie on {', '.join(map(str, devices))}: max_norm and on_nonfinite={self.on_nonfinite!r} need one device; "
                "clip with ga.clip_grad_norm_ instead"
            )
        self._limit()
        self._make_states([(g, p, i) for g, p, i, _, _ in found])
        jobs = []
        for g, p, i, grad, copy in found:
            state, amsgrad = self.state[p], self.param_groups[g]["amsgrad"]
            clear = arena is not None and (
                grad is arena.grad_views[i]
                or grad.numel() > 0
                and grad.data_ptr() == arena.grad_views[i].data_ptr()
            )
            if not _same_order(grad, p):
                grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
            jobs.append(
                Job(
                    i,
                    g,
                    p,
                    grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["max_exp_avg_sq"] if amsgrad else None,
                    state["step"],
                    copy,
                    clear,
                )
            )
        found = Jobs(sorted(jobs, key=lambda j: j.number))
        found.given = jobs
        return found

    def _number_of(self, p) -> int:
        if self._numbers is None:
            params = (
                self.arena.masters
                if self.arena is not None
                else [p for group in self.param_groups for p in group["params"]]
            )
            self._numbers = {id(p): i for i, p in enumerate(params)}
        if id(p) not in self._numbers:
            raise ArgumentError(
                f"a parameter of shape {tuple(p.shape)} is not in the optimizer's arena, whose tensors alone it updates; for another "
                "set of parameters: arena.release(), then a new Arena and a new optimizer"
            )
        return self._numbers[id(p)]

    def _make_states(self, members):
        """State where there is none; state that was loaded comes to its place (an arena's buffers, the parameter's device and order)."""
        keys = {True: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), False: ("exp_avg", "exp_avg_sq")}
        new, moved = [], []
        for g, p, i in members:
            state, wanted = self.state[p], keys[bool(self.param_groups[g]["amsgrad"])]
            if any(key not in state for key in wanted) or "step" not in state:
                new.append((p, i, wanted))
            elif wrong := next((key for key in wanted if not self._fits(state[key], p, i)), None):
                raise ArgumentError(
                    f"{wrong} of {self.names()[i]} has shape {tuple(state[wrong].shape)}; expected {tuple(p.shape)}"
                )
            elif state["step"].device != p.device or any(
                not self._in_place(key, state[key], p, i) for key in wanted
            ):
                moved.append((p, i, wanted))
        if (new or moved) and _capturing():
            raise ArgumentError(
                f"{self.names()[(new or moved)[0][1]]} has no state on the device yet, and a CUDA graph is being captured: take one "
                "step before the capture, or call prepare()"
            )
        for (p, i, wanted), step in zip(new, _zeros_by_device([p for p, _, _ in new])):
            state = self.state[p]
            state.setdefault("step", step)
            for key in wanted:
                if key not in state:
                    state[key] = self._home(key, p, i).zero_()
        for p, i, wanted in moved:
            state = self.state[p]
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(p.device)
            for key in wanted:
                if not self._in_place(key, state[key], p, i):
                    state[key] = self._bring_home(key, p, i, state[key])

    _fits = staticmethod(
        lambda t, p, i: t.shape == p.shape
    )  # is it the state of this tensor? distributed/zero1.py has another answer
    _bring_home = lambda self, key, p, i, t: self._home(key, p, i).copy_(t)

    def _home(self, key, p, i) -> Tensor:
        """Memory for one tensor's state: in an arena a slice of one flat buffer per kind."""
        if self.arena is None:
            return torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)
        if key not in self._moments:
            self._moments[key] = torch.zeros_like(self.arena.weights)
        return own_storage(self.arena._slice(self._moments[key], self.arena.segments[i]))

    def _in_place(self, key, t, p, i) -> bool:
        if self.arena is None:
            return t.device == p.device and _same_order(t, p)
        return key in self._moments and (
            t.numel() == 0
            or t.data_ptr() == self._moments[key].data_ptr() + 4 * self.arena.segments[i].offset
        )

    def prepare(self):
        """Allocate all state and settings now, so that the very first step can be captured in a CUDA graph."""
        members = [
            (g, p, self._number_of(p))
            for g, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
        self._make_states(members)
        for device in {p.device: None for _, p, _ in members}:
            work = self._work_on(device)
            if self._measures():
                self._make_verdicts(work)
            if device.type == "cuda" and takes(
                device
            ):  # compiled and loaded: neither can be done in a capture
                kernels = [clip_kernel(name, 2.0) for name in ("squares_v2", "reduce_v2")] + [
                    kernel
                    for g, p, _ in members
                    if p.dtype in KINDS
                    for kernel in step_kernels(
                        p.dtype,
                        self.param_groups[g]["amsgrad"],
                        self.stochastic_rounding,
                        self.arena is not None,
                    )
                ]
                for kernel in kernels:
                    kernel.load(device.index)
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        """Bring hyperparameters that the host has changed (learning rate, max_norm, ...) to the device. step() does so by itself; a captured
        step cannot: call this before its replay. No synchronisation."""
        for device, work in self._work.items():
            if takes(device):
                self._refresh(work)

    def _refresh(self, work):
        rows, late = [], []
        for g, group in enumerate(self.param_groups):
            values = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
            for k, value in enumerate(values):
                if (
                    isinstance(value, Tensor) and value.device.type != "cpu"
                ):  # on the device already: it must not pass by the host
                    late.append((SETTINGS * g + k, value))
                    values[k] = 0.0
            rows += [*map(float, values), -1.0 if group["maximize"] else 1.0, 0.0, 0.0]
        rows += [self._limit(), float(self.seed)]
        if rows != work.written:
            if _capturing():
                raise ArgumentError(
                    "a hyperparameter has changed since the last step, and a CUDA graph is being captured, which would keep it for "
                    "ever: call refresh() before the capture"
                )
            if len(work.settings) != len(rows):
                work.settings = torch.empty(
                    len(rows), dtype=torch.float64, device=work.settings.device
                )
            launch_set(work.settings, rows)
            work.written = rows
        for at, value in late:
            work.settings[at : at + 1].copy_(value.view(1))

    def _work_on(self, device) -> "_Work":
        if device not in self._work:
            if _capturing():
                raise ArgumentError(
                    "the optimizer has not taken a step yet, and a CUDA graph is being captured: call prepare() before"
                )
            self._work[device] = _Work(
                torch.empty(0, dtype=torch.float64, device=device),
                torch.zeros(4, dtype=torch.int32, device=device),
            )
        return self._work[device]

    def _amp(self, name, device) -> "Tensor | None":
        """grad_scale or found_inf, as GradScaler sets them: () fp32 on the device; None when there is none."""
        value = getattr(self, name, None)
        return (
            value
            if value is None
            else torch.as_tensor(value).to(device, torch.float32, non_blocking=True).view(1)
        )

    # ---- torch's own bookkeeping ----

    def add_param_group(self, param_group: dict):
        """As torch's. ArgumentError for a complex parameter, and, over an arena, for one that is not the arena's."""
        super().add_param_group(param_group)
        try:
            for i, p in enumerate(self.param_groups[-1]["params"]):
                if p.is_complex():
                    raise ArgumentError(
                        f"parameter {i} of shape {tuple(p.shape)} is {p.dtype}: complex weights are not supported; use "
                        "torch.optim.AdamW, or torch.view_as_real(parameter)"
                    )
                if self.arena is not None:
                    self._number_of(p)
        except ArgumentError:
            del self.param_groups[-1]
            raise
        self._numbers = None

    @torch._disable_dynamo
    def state_dict(self) -> dict:
        """As torch's; over an arena, the state of a bf16 parameter also holds `master`, its fp32 value, so that a run which
        loads the model's and the optimizer's state goes on bit for bit. torch.optim.AdamW loads it and ignores the masters."""
        state = super().state_dict()
        masters = self._masters()
        for mine, packed in zip(self.param_groups, state["param_groups"]):
            for p, i in zip(mine["params"], packed["params"]):
                if id(p) in masters and i in state["state"]:
                    state["state"][i] = {**state["state"][i], "master": p.detach()}
        return state

    def _masters(self) -> "set[int]":
        """ids of the parameters that are masters of bf16 ones, with what was written into these."""
        return set() if self.arena is None else {id(p) for p in self.arena.named_master().values()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """As torch's, of this optimizer or of torch.optim.AdamW. ArgumentError, with nothing changed, for a state of another shape.

        A master in it counts if it rounds to the bf16 weight that the model has now: load the model first."""
        stored = {i: dict(state) for i, state in state_dict["state"].items()}
        masters = {i: state.pop("master") for i, state in stored.items() if "master" in state}
        mine = [p for group in self.param_groups for p in group["params"]]
        theirs = [i for group in state_dict["param_groups"] for i in group["params"]]
        pairs = (
            [(p, masters[i]) for p, i in zip(mine, theirs) if i in masters]
            if self._masters()
            else []
        )
        for p, master in pairs:
            if master.shape != p.shape:
                raise ArgumentError(
                    f"state_dict: master of {self.names()[self._number_of(p)]} has shape {tuple(master.shape)}; "
                    f"expected {tuple(p.shape)}"
                )
        self._load({**state_dict, "state": stored})
        for p, master in pairs:
            weight = self.arena.params[self._number_of(p)].float()
            master = master.to(p.device)
            # Rounding, stochastic too, moves a value by less than one unit in the last place of bf16.
            if ((master - weight).abs() <= weight.abs() * 2.0**-7 + 1e-40).all():
                p.copy_(master)
        if pairs:
            self.arena.weights_current()

    def _load(self, state_dict):
        # Last: after hooks that repair a dict.
        check = self.register_load_state_dict_pre_hook(AdamW._check_state)
        before = {p: dict(state) for p, state in self.state.items()}
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()
        # Into the tensors that are there: a captured step knows their addresses.
        for p, state in self.state.items():
            for key, mine in before.get(p, {}).items():
                if (
                    isinstance(mine, Tensor)
                    and isinstance(state.get(key), Tensor)
                    and mine.shape == state[key].shape
                ):
                    state[key] = mine.copy_(state[key])
        self._make_states(
            [
                (g, p, self._number_of(p))
                for g, group in enumerate(self.param_groups)
                for p in group["params"]
                if self.state.get(p)
            ]
        )

    def _check_state(self, state_dict):
        mine, theirs = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if self.arena is not None and mine != theirs:
            raise ArgumentError(
                f"state_dict has parameter groups of {theirs} tensors; expected {mine}, those of arena.parameter_groups(weight_decay)"
            )
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"]):
            for p, i in zip(mine["params"], theirs["params"]):
                state = state_dict["state"].get(i, {})
                for key in (
                    ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")[
                        : 4 if "max_exp_avg_sq" in state else 3
                    ]
                    if state
                    else ()
                ):
                    if state.get(key) is None or key != "step" and state[key].shape != p.shape:
                        problem = (
                            "is missing"
                            if state.get(key) is None
                            else f"has shape {tuple(state[key].shape)}; expected {tuple(p.shape)}"
                        )
                        raise ArgumentError(
                            f"state_dict: {key} of {self.names()[self._number_of(p)]} {problem}"
                        )

    def __getstate__(self):  # copies and pickles: what belongs to a device is made again
        mine = {
            name: self.__dict__[name]
            for name in (
                "arena",
                "scope",
                "stochastic_rounding",
                "seed",
                "on_nonfinite",
                "max_norm",
            )
        }
        return {
            **mine,
            **super().__getstate__(),
            "_numbers": None,
            "_plan": None,
            "_measured": False,
            "_work": {},
            "_moments": {},
            "explain_skip": None,
        }


def _foreign_step_hooks() -> bool:
    """Are there hooks before every optimizer's step that are not this package's?"""
    return any(
        not hook.__module__.startswith("gpuaccel.") for hook in _global_optimizer_pre_hooks.values()
    )


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _same_order(t: Tensor, like: Tensor) -> bool:
    """Do the elements of two tensors of one shape lie in memory in the same order?"""
    return t.is_contiguous() and like.is_contiguous() or t.stride() == like.stride()


def _zeros_by_device(params) -> "list[Tensor]":
    """A () fp32 zero per parameter, on its device and in a storage of its own, with one launch per device."""
    zeros = {
        device: map(own_storage, torch.zeros(len(params), device=device))
        for device in {p.device: None for p in params}
    }
    return [next(zeros[p.device]) for p in params]
