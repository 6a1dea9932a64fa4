"""What an optimizer's launches need to know of its formula, and the launches themselves.

    LION = UpdateRule("lion", ("exp_avg",), reference_lion)    # kernels_cu/lion.cu, and torch's

The rest is read from the CUDA C text: `struct Settings` names the hyperparameters that the host
writes to the device, `struct Coefficients` says how much memory a tensor's coefficients take.
kernels_cu/optimizer.cuh says what such a file holds. The optimizers: optim/device_optimizer.py.
"""

import functools
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..compiler import C_TYPES, Kernel, Launch, kernel_root
from ..ops.accumulate import CHUNK
from ..ops.clip import MAX_BLOCKS, ClipState, dense
from ..ops.rounding import reference_random_bits, reference_round
from ..source import struct_fields

MAX_TENSORS = 256
MAX_UPDATES = 60
MAX_VALUES = 256
# Tensors of one call of UpdateRule.fused. Scaled gradients are copies, of so many at most.
MAX_FUSED = 32
LOW = (torch.bfloat16, torch.float16)
# Threads of a block. An arena's kernel has more registers per thread.
THREADS = {"v3": 128}
VALUES = struct.Struct(f"{MAX_VALUES}d")
STEPS = struct.Struct(f"{MAX_TENSORS}Q{MAX_TENSORS}i{MAX_TENSORS}H")


@functools.cache
def settings_kernel() -> Kernel:
    return Kernel("settings", "settings_write", MAX_VALUES=MAX_VALUES)


# ---- the rule ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """One optimizer's formula, in CUDA C and in torch.

    Attributes:
        file: kernels_cu/<file>.cu, with the kernels <file>_begin, <file>_v2 and <file>_v3.
        state_keys: names of a parameter's state tensors, in the order of the kernels' pointers.
        reference: the definition in torch, in place: `reference(weight, grad, *state, step, *, lr,
            ..., factor)`, by the names of `struct Settings`; returns the new weight before it is
            rounded.
        fused: the same for tensors of one dtype on a CPU, by a kernel of torch's: `fused(weights,
            grads, *state, steps, *, lr, ..., maximize)`. None: torch has none.
        optional: state key -> option of a parameter group without which the group has no such
            state. The kernels know the option as a macro in capitals, 0 or 1.
    """

    file: str
    state_keys: tuple[str, ...]
    reference: Callable[..., Tensor]
    fused: Callable[..., None] | None = None
    optional: dict[str, str] = field(default_factory=dict)

    def keys_of(self, group: dict) -> list[str]:
        """Names of the state tensors that a parameter of this group has.

        Args:
            group: a parameter group of the optimizer.
        """
        return [
            key for key in self.state_keys if key not in self.optional or group[self.optional[key]]
        ]

    def macros_of(self, group: dict) -> tuple:
        """(macro, 0 or 1) for each option.

        Args:
            group: a parameter group of the optimizer.
        """
        options = dict.fromkeys(self.optional.values())
        return tuple((option.upper(), int(bool(group[option]))) for option in options)

    @functools.cached_property
    def _source(self) -> str:
        return (kernel_root() / f"{self.file}.cu").read_text()

    @functools.cached_property
    def settings(self) -> list[str]:
        """Names of the numbers that the kernels read for each parameter group."""
        return struct_fields(self._source, "Settings")

    @functools.cached_property
    def coefficients(self) -> int:
        """fp32 numbers that a tensor has in one step."""
        return len(struct_fields(self._source, "Coefficients"))

    def values_of(self, group: dict) -> list:
        """A group's settings, numbers or one-element tensors, in the order of `settings`.

        Args:
            group: a parameter group of the optimizer.
        """
        known = {**group, "direction": -1.0 if group["maximize"] else 1.0}
        if "betas" in group:
            known["beta1"], known["beta2"] = group["betas"]
        return [known[name] for name in self.settings]

    # ---- kernels ----

    @functools.cache
    def kernel(self, version: str, *macros) -> Kernel:
        """The kernel <file>_<version>.

        Args:
            version: "begin", "v2" or "v3".
            *macros: (name, value) of each.
        """
        return Kernel(
            self.file,
            f"{self.file}_{version}",
            THREADS=THREADS.get(version, 256),
            CHUNK=CHUNK,
            MAX_TENSORS=MAX_TENSORS,
            MAX_UPDATES=MAX_UPDATES,
            **dict(macros),
        )

    @functools.cached_property
    def begin(self) -> Launch:
        return self.kernel("begin")[1, MAX_TENSORS]

    def update_kernel(self, version: str, param, grad, macros: tuple, stochastic: bool) -> Kernel:
        """The kernel that updates weights: from a list of tensors (v2), or from flat buffers (v3).

        Args:
            version: "v2" or "v3".
            param: dtype of the parameters.
            grad: dtype of the gradients.
            macros: of macros_of().
            stochastic: round bf16 weights stochastically.
        """
        types = ("PARAM_T", C_TYPES[param]), ("GRAD_T", C_TYPES[grad])
        return self.kernel(version, *types, *macros, ("STOCHASTIC", int(stochastic)))

    def step_kernels(self, param, macros: tuple, stochastic: bool, arena: bool) -> list[Kernel]:
        """All kernels that a step over parameters of this dtype may launch.

        Args:
            param: dtype of the parameters.
            macros: of macros_of().
            stochastic: round bf16 weights stochastically.
            arena: whether they lie in an arena.
        """
        grads = (torch.float32, torch.bfloat16) if arena else (param,)
        kernels = [self.update_kernel("v2", param, grad, macros, stochastic) for grad in grads]
        if arena:
            fp32 = torch.float32
            kernels.append(self.update_kernel("v3", fp32, fp32, macros, stochastic))
        return [self.kernel("begin"), *kernels]

    @functools.cached_property
    def update_struct(self) -> struct.Struct:
        """`UpdateList<state tensors>` of kernels_cu/optimizer.cuh."""
        tables = 3 + len(self.state_keys)
        n = MAX_UPDATES
        layout = f"={tables * n}Q{n + 1}i{2 * n}i{n}H"
        return struct.Struct(f"{layout}{-struct.calcsize(layout) % 8}x")


# ---- the tensors of a step -----------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """One tensor of one step.

    Attributes:
        number: of the tensor, among the optimizer's.
        group: number of its parameter group.
        weight: what is updated: a parameter, or a master.
        grad: its gradient, or its slice of the arena's sums.
        state: the state tensors, in the order of state_keys; None: not in this group.
        step: () fp32, the tensor's count of steps.
        copy: bf16, where the rounded weight goes, or None.
        macros: of the group's options.
        row: among the rows of the clip state; 0 where no norm is taken.
    """

    number: int
    group: int
    weight: Tensor
    grad: Tensor
    state: tuple[Tensor | None, ...]
    step: Tensor
    copy: Tensor | None
    macros: tuple
    row: int = 0


@dataclass(slots=True)
class StepInputs:
    """What all tensors of a step on one device depend on.

    Attributes:
        clip: norms and scales; None: no norm was taken.
        groups: (tensors,) int32, the row of each tensor in clip; None: there is one row.
        skip: leave out the step where a norm is not finite.
        divisor: (1,) fp32, of the gradients, or None.
        found_inf: (1,) fp32, of torch.amp.GradScaler: not 0: leave out the step; or None.
        record: (4,) int32: steps asked for, skipped; at the last skip: which step, tensor.
    """

    clip: ClipState | None
    groups: Tensor | None
    skip: bool
    divisor: Tensor | None
    found_inf: Tensor | None
    record: Tensor


# ---- launchers -----------------------------------------------------------------------------------


def launch_settings(settings: Tensor, values: list[float]):
    """Write numbers to the device, fp64, by settings_write: by value, 256 per launch."""
    for start in range(0, len(values), MAX_VALUES):
        part = values[start : start + MAX_VALUES]
        packed = VALUES.pack(*part, *[0.0] * (MAX_VALUES - len(part)))
        settings_kernel()[1, MAX_VALUES](settings[start:], len(part), packed)


def begin_launches(jobs: list[Job]) -> list[tuple[bytes, list[Tensor]]]:
    """(struct Steps, counts) of each launch of <file>_begin: for launch_begin."""
    launches = []
    for start in range(0, len(jobs), MAX_TENSORS):
        part = jobs[start : start + MAX_TENSORS]
        rest = [0] * (MAX_TENSORS - len(part))
        addresses = [*[j.step.data_ptr() for j in part], *rest]
        numbers = [*[j.number for j in part], *[-1] * len(rest)]
        packed = STEPS.pack(*addresses, *numbers, *[j.group for j in part], *rest)
        launches.append((packed, [j.step for j in part]))
    return launches


def list_launches(rule: UpdateRule, jobs: list[Job], stochastic: bool) -> list[tuple]:
    """For launch_update: <file>_v2 over any tensors, a launch per 60 of the same dtypes.

    Gradients may lie elsewhere when it launches them."""
    # Jobs of one kernel, each with its place among the coefficients.
    classes: dict[tuple, list[tuple[int, Job]]] = {}
    launches = []
    for place, j in enumerate(jobs):
        if j.weight.numel():
            key = j.weight.dtype, j.grad.dtype, j.macros
            classes.setdefault(key, []).append((place, j))
    for (param, grad, macros), members in classes.items():
        kernel = rule.update_kernel("v2", param, grad, macros, stochastic)
        for start in range(0, len(members), MAX_UPDATES):
            part = members[start : start + MAX_UPDATES]
            rest = [0] * (MAX_UPDATES - len(part))
            counts = [j.weight.numel() for _, j in part]
            first = [0, *itertools.accumulate([-(-n // CHUNK) for n in counts])]
            addresses = []
            for row in zip(*[(j.weight, None, *j.state, j.copy) for _, j in part]):
                addresses += [*[0 if t is None else t.data_ptr() for t in row], *rest]
            packed = bytearray(rule.update_struct.size)
            rule.update_struct.pack_into(
                packed,
                0,
                *addresses,
                *first,
                *[first[-1]] * len(rest),
                *[j.number for _, j in part],
                *rest,
                *[place for place, _ in part],
                *rest,
                *[(n - 1) % CHUNK + 1 for n in counts],
                *rest,
            )
            launch = kernel[min(first[-1], MAX_BLOCKS), kernel.bound]
            launches.append((launch, (packed,), [j for _, j in part]))
    return launches


def arena_launches(
    rule: UpdateRule, jobs: list[Job], stochastic: bool, arena, buffers: dict[str, Tensor], pieces
) -> list[tuple]:
    """For launch_update: <file>_v3 over flat buffers, a launch per run of neighbours and piece.

    Args:
        jobs: of this step, all over the arena.
        buffers: state key -> fp32.
        pieces: (start, stop, local) of each range of the arena that is updated, whole chunks. Its
            state begins at element `local` of the buffers.
    """
    launches = []
    for first, last, offset, job in _runs(jobs, arena):
        kernel = rule.update_kernel("v3", torch.float32, torch.float32, job.macros, stochastic)
        for start, stop, local in pieces:
            begin, end = max(start, first * CHUNK), min(stop, last * CHUNK)
            if end <= begin:
                continue
            here, there = slice(begin, end), slice(begin - start + local, end - start + local)
            copy = arena.bf16_weights
            arguments = (
                arena.weights[here],
                arena.grads[here],
                *[
                    None if t is None else buffers[key][there]
                    for key, t in zip(rule.state_keys, job.state)
                ],
                None if copy is None else copy[here],
                arena.chunk_table[begin // CHUNK : end // CHUNK],
                0,
                (end - begin) // CHUNK,
                offset,
            )
            blocks = min((end - begin) // CHUNK, MAX_BLOCKS)
            launches.append((kernel[blocks, kernel.bound], arguments, ()))
    return launches


def _runs(jobs: list[Job], arena) -> list[tuple[int, int, int, Job]]:
    """Adjacent tensors with the same options: (first chunk, last chunk, offset, a job).

    The coefficients of tensor i are at i - offset."""
    runs: list[tuple[int, int, int, Job]] = []
    for place, j in enumerate(jobs):
        first, last = arena.first_chunk[j.number : j.number + 2]
        offset = j.number - place
        if runs:
            start, stop, known, job = runs[-1]
            if (stop, known, job.macros) == (first, offset, j.macros):
                runs[-1] = start, last, offset, job
                continue
        if last > first:
            runs.append((first, last, offset, j))
    return runs


def launch_begin(rule: UpdateRule, launches: list, settings: Tensor, inputs: StepInputs) -> Tensor:
    """<file>_begin: count the step, or skip it.

    launches: of begin_launches(). settings: the groups' numbers on the device, fp64. Returns the
    coefficients, (tensors, rule.coefficients) fp32."""
    rows = len(launches) * MAX_TENSORS
    coefficients = torch.empty(rows, rule.coefficients, dtype=torch.float32, device=settings.device)
    clip = inputs.clip
    for n, (packed, steps) in enumerate(launches):
        rule.begin(
            coefficients[n * MAX_TENSORS :],
            settings,
            None if clip is None else clip.values,
            None if clip is None else clip.nonfinite_tensor,
            inputs.groups,
            0 if clip is None else len(clip.values),
            int(inputs.skip),
            inputs.divisor,
            inputs.found_inf,
            inputs.record,
            int(n == 0),
            packed,
            tensors=steps,
        )
    return coefficients


def launch_update(launches: list[tuple], coefficients: Tensor, seed: Tensor):
    """Launch what list_launches() or arena_launches() prepared. seed: (1,) fp64 on the device."""
    for launch, arguments, jobs in launches:
        if jobs:
            (packed,) = arguments
            # The second table of the struct.
            addresses = [j.grad.data_ptr() for j in jobs]
            struct.pack_into(f"={len(jobs)}Q", packed, 8 * MAX_UPDATES, *addresses)
            arguments = (bytes(packed),)
        tensors = (t for j in jobs for t in (j.weight, j.grad, *j.state, j.copy))
        launch(coefficients, seed, *arguments, tensors=tensors)


# ---- a step in torch -----------------------------------------------------------------------------


def torch_step(
    rule: UpdateRule,
    jobs: list[Job],
    param_groups: list[dict],
    inputs: StepInputs,
    count_it: bool,
    seed: int | None,
):
    """What launch_begin and launch_update do, in torch: any dtype, one device.

    On a CPU a skipped step is decided here, and rule.fused updates the tensors that it takes. The
    reference updates the others; elsewhere torch.where keeps the old values, without a wait.

    Args:
        jobs: of this step.
        count_it: this call counts the step in `inputs.record`.
        seed: of stochastic rounding; None: to the nearest.
    """
    device = jobs[0].weight.device
    clip = inputs.clip
    record = inputs.record
    keep = torch.zeros((), dtype=torch.bool, device=device)
    if clip is not None and inputs.skip:
        keep |= ~clip.finite.all()
    if inputs.found_inf is not None:
        keep |= (inputs.found_inf != 0).view(())
    on_host = device.type == "cpu"
    skipped = on_host and keep.tolist()
    if count_it:
        record[0] += 1
        if skipped or not on_host:
            record[1] += keep
            numbers = record.new_full((1,), -1) if clip is None else clip.nonfinite_tensor
            first = numbers.index_select(0, (numbers >= 0).int().argmax().view(1))[0]
            first = torch.where((numbers >= 0).any(), first, -1)
            record[2:] = torch.where(keep, torch.stack([record[0], first]), record[2:])
    if skipped:
        return
    # What the gradients of each row are multiplied by.
    factors = (
        torch.ones(1, dtype=torch.float32, device=device) if clip is None else clip.values[:, 0]
    )
    if inputs.divisor is not None:
        factors = factors / inputs.divisor
    each = factors.tolist() if on_host else factors
    settings = [_settings_of(rule, group) for group in param_groups]
    fused: dict[tuple, list[Job]] = {}
    for j in jobs:
        if on_host and _fused_takes(rule, j, bool(each[j.row] != 1) or seed is not None):
            fused.setdefault((j.group, j.row, j.weight.dtype), []).append(j)
        else:
            values: dict[str, Any] = settings[j.group]
            _reference_update(rule, j, factors[j.row], seed, None if on_host else keep, **values)
    for (group, row, _), alike in fused.items():
        for start in range(0, len(alike), MAX_FUSED):
            some = alike[start : start + MAX_FUSED]
            _fused_update(rule, some, each[row], seed, **settings[group])


def _settings_of(rule: UpdateRule, group: dict) -> dict:
    """Name -> setting of a group; a CPU tensor becomes a number."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value
        for name, value in zip(rule.settings, rule.values_of(group))
    }


def _fused_takes(rule: UpdateRule, j: Job, scaled: bool) -> bool:
    """The reference rounds bf16 and fp16 once; rule.fused cannot if their gradients are scaled, or
    weights are rounded stochastically."""
    if rule.fused is None or scaled and j.weight.dtype in LOW:
        return False
    tensors = [j.weight, j.grad, *[t for t in j.state if t is not None]]
    plain = all([t.dtype == j.weight.dtype and type(t) in (Tensor, Parameter) for t in tensors])
    return plain and j.weight.numel() > 0 and dense(j.weight)


def _fused_update(rule, jobs, factor, seed, direction, **numbers):
    weights, grads, steps = zip(*[(j.weight, j.grad, j.step) for j in jobs])
    torch._foreach_add_(steps, 1)
    if factor != 1:
        grads = torch._foreach_mul(grads, factor)
    state = zip(*[j.state for j in jobs])
    rule.fused(weights, grads, *state, steps, **numbers, maximize=direction < 0)
    # Autograd does not see that the kernel writes them.
    torch.autograd.graph.increment_version(weights)
    for j in jobs:
        _round(j, j.weight, seed)


def _reference_update(rule, j, factor, seed, keep, direction, **numbers):
    targets = [t for t in (j.weight, *j.state, j.step, j.copy) if t is not None]
    before = [t.clone() for t in targets] if keep is not None else ()
    j.step += 1
    step = j.step.item() if keep is None else j.step.double()
    w = rule.reference(j.weight, j.grad, *j.state, step, **numbers, factor=factor * direction)
    _round(j, w, seed)
    for t, old in zip(targets, before):
        t.copy_(torch.where(keep, old, t))


def _round(j: Job, w: Tensor, seed: int | None):
    """Round the new weight `w` into the bf16 copy, and with a seed into a bf16 weight."""
    low = j.weight if j.copy is None else j.copy
    if seed is not None and low.dtype == torch.bfloat16:
        noise = reference_random_bits(seed, j.number, w.numel(), int(j.step))
        noise = noise.to(w.device)
        # One number for each place in memory, or, with gaps between them, for each element.
        noise = (
            noise.as_strided(w.shape, j.weight.stride()) if dense(j.weight) else noise.view(w.shape)
        )
        low.copy_(reference_round(w, noise))
    elif j.copy is not None:
        j.copy.copy_(w)
