"""The AdamW update: its definition in torch, and the launches of kernels_cu/adamw.cu. The optimizer itself: optim/adamw.py.

    >>> reference_adamw(weight, grad, m, v, None, step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)

Source: Loshchilov and Hutter, 2019 (decoupled weight decay); Philox (Salmon et al., 2011) for the bits of stochastic rounding.
"""

import functools
import itertools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler.kernel import Kernel
from .accumulate import CHUNK
from .clip import MAX_BLOCKS, ClipState

MAX_TENSORS, MAX_UPDATES, MAX_VALUES = 256, 60, 256
THREADS = {"adamw_v3": 128}  # of a block; others: 256
COEFFICIENTS, SETTINGS = 10, 8  # floats per tensor, doubles per parameter group
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VALUES = struct.Struct(f"{MAX_VALUES}d").pack
_STEPS = struct.Struct(f"{MAX_TENSORS}Q{MAX_TENSORS}i{MAX_TENSORS}H").pack
_UPDATES = struct.Struct(
    f"={6 * MAX_UPDATES}Q{MAX_UPDATES + 1}i{2 * MAX_UPDATES}i{2 * MAX_UPDATES}H4x"
).pack


# ---- reference ------------------------------------------------------------------------------------------------------


def reference_adamw(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    vmax: "Tensor | None",
    step,
    *,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    factor=1.0,
):
    """One AdamW step in place: weight, m, v (and vmax: AMSGrad) of one shape; any device; bf16 and fp16 are computed in fp32, rounded once.

    step: the number of this step, from 1; it, lr, betas and factor (of the gradient: clip scale, sign) are numbers or () tensors.
    Returns the new weight before it is rounded to the weight's dtype."""
    low = weight.dtype in (torch.bfloat16, torch.float16)
    w, g, new_m, new_v = (t.float() if low else t for t in (weight, grad, m, v))
    g = g.to(w.dtype) * factor
    w = w * (1 - lr * weight_decay)
    new_m = torch.lerp(new_m, g, 1 - beta1)
    new_v = (new_v * beta2).addcmul_(g, g, value=1 - beta2)
    second = new_v
    if vmax is not None:
        second = torch.maximum(vmax.to(new_v.dtype), new_v)
        vmax.copy_(second)
    correction = (1 - beta2**step) ** 0.5
    w = w - m_over(new_m, second, correction, eps) * (lr / (1 - beta1**step))
    m.copy_(new_m)
    v.copy_(new_v)
    weight.copy_(w)
    return w


def m_over(m, v, correction, eps):
    return m / (v.sqrt() / correction + eps)


def reference_random_bits(seed: int, tensor: int, elements: int, step: int) -> Tensor:
    """(elements,) int64: 32 random bits for each element of a tensor, keyed on (seed, tensor, element, step). Philox4x32-10."""
    mask, groups = 0xFFFFFFFF, torch.arange(-(-elements // 4))
    x, y = groups & mask, groups >> 32
    z, w = torch.full_like(x, tensor), torch.full_like(x, step)
    low, high = seed & mask, seed >> 32 & mask
    for _ in range(10):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57  # wrap around at 64 bits, which keeps all of them
        x, y, z, w = (b >> 32 & mask) ^ y ^ low, b & mask, (a >> 32 & mask) ^ w ^ high, a & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    return torch.stack([x, y, z, w], 1).flatten()[:elements]


def reference_round(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16, rounded up with the probability of what is cut off; noise: 16 random bits per element in an int64."""
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    up = (bits + (noise.reshape(x.shape) & 0xFFFF)) >> 16 << 16
    up = torch.where(up > 0x7FFFFFFF, up - (1 << 32), up).int().view(torch.float32)
    return torch.where(torch.isfinite(x), up, x).bfloat16()


# ---- launchers ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel(name: str, *macros) -> Kernel:
    return Kernel("adamw", name, CHUNK=CHUNK, THREADS=THREADS.get(name, 256), **dict(macros))


def update_kernel(name: str, param, grad, amsgrad, stochastic) -> Kernel:
    return _kernel(
        name,
        ("PARAM_T", TYPES[param]),
        ("GRAD_T", TYPES[grad]),
        ("AMSGRAD", int(amsgrad)),
        ("STOCHASTIC", int(stochastic)),
    )


def step_kernels(
    param: torch.dtype, amsgrad: bool, stochastic: bool, arena: bool
) -> "list[Kernel]":
    """All kernels that a step over parameters of this dtype may launch."""
    grads = (torch.float32, torch.bfloat16) if arena else (param,)
    return [
        _kernel("adamw_begin"),
        *[update_kernel("adamw_v2", param, grad, amsgrad, stochastic) for grad in grads],
        *([update_kernel("adamw_v3", param, param, amsgrad, stochastic)] if arena else []),
    ]


@dataclass(slots=True)
class Job:
    """One tensor of one step."""

    number: int  # among the optimizer's tensors
    group: int
    weight: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    vmax: "Tensor | None"
    step: Tensor  # () fp32
    copy: "Tensor | None"  # bf16, where the rounded weight goes
    clear: bool  # the gradient is an arena's sum: set it to zero


class Jobs(list):
    """Jobs of a step, by number, and what was packed for them: the next step with the same tensors packs nothing."""

    steps = updates = None
    given = ()  # the same jobs in the order of the parameter groups


def launch_set(settings: Tensor, values: "list[float]"):
    """adamw_set: write numbers to the device, by value, 256 per launch."""
    for start in range(0, len(values), MAX_VALUES):
        part = values[start : start + MAX_VALUES]
        _kernel("adamw_set")[1, MAX_VALUES](
            settings[start:], len(part), _VALUES(*part, *[0.0] * (MAX_VALUES - len(part)))
        )


def _pack_steps(jobs):
    for start in range(0, len(jobs), MAX_TENSORS):
        part = jobs[start : start + MAX_TENSORS]
        rest = [0] * (MAX_TENSORS - len(part))
        yield (
            start,
            _STEPS(
                *[j.step.data_ptr() for j in part],
                *rest,
                *[j.number for j in part],
                *[-1] * len(rest),
                *[j.group for j in part],
                *rest,
            ),
        )


def _pack_updates(jobs, stochastic):
    """(kernel, grid, struct, jobs) per launch."""
    classes = {}
    for at, j in enumerate(jobs):
        if j.weight.numel():
            classes.setdefault((j.weight.dtype, j.grad.dtype, j.vmax is not None), []).append(
                (at, j)
            )
    for (param, grad, amsgrad), members in classes.items():
        kernel = update_kernel("adamw_v2", param, grad, amsgrad, stochastic)
        for start in range(0, len(members), MAX_UPDATES):
            part = members[start : start + MAX_UPDATES]
            rest, counts = [0] * (MAX_UPDATES - len(part)), [j.weight.numel() for _, j in part]
            first = [0, *itertools.accumulate([-(-n // CHUNK) for n in counts])]
            rows = zip(*[(j.weight, j.grad, j.m, j.v, j.vmax, j.copy) for _, j in part])
            addresses = [
                a
                for row in rows
                for a in [*[t.data_ptr() if t is not None else 0 for t in row], *rest]
            ]
            yield (
                kernel,
                min(first[-1], MAX_BLOCKS),
                _UPDATES(
                    *addresses,
                    *first,
                    *[first[-1]] * len(rest),
                    *[j.number for _, j in part],
                    *rest,
                    *[at for at, _ in part],
                    *rest,
                    *[(n - 1) % CHUNK + 1 for n in counts],
                    *rest,
                    *[j.clear for _, j in part],
                    *rest,
                ),
                [j for _, j in part],
            )


def launch_begin(
    jobs: Jobs,
    settings: Tensor,
    found: "ClipState | None",
    groups: "Tensor | None",
    skip: bool,
    divisor,
    found_inf,
    record: Tensor,
) -> Tensor:
    """adamw_begin: count the step, or skip it. Returns the coefficients, (tensors, 10) fp32."""
    coefficients = torch.empty(
        -(-len(jobs) // MAX_TENSORS) * MAX_TENSORS, COEFFICIENTS, device=settings.device
    )
    verdicts, bad, count = (
        (found.verdicts, found.bad, len(found.verdicts)) if found else (None, None, 0)
    )
    jobs.steps = jobs.steps or list(_pack_steps(jobs))
    for start, packed in jobs.steps:
        _kernel("adamw_begin")[1, MAX_TENSORS](
            coefficients[start:],
            settings,
            verdicts,
            bad,
            groups,
            count,
            int(skip),
            divisor,
            found_inf,
            record,
            int(start == 0),
            packed,
            tensors=[j.step for j in jobs[start : start + MAX_TENSORS]],
        )
    return coefficients


def arena_runs(jobs, arena):
    """(first chunk, last chunk, what to take from a tensor's number to find its coefficients, AMSGrad) of neighbours in the arena."""
    runs = []
    for at, j in enumerate(jobs):
        rows, ahead, amsgrad = (
            arena.first_chunk[j.number : j.number + 2],
            j.number - at,
            j.vmax is not None,
        )
        if runs and runs[-1][1:] == [rows[0], ahead, amsgrad]:
            runs[-1][1] = rows[1]
        elif rows[1] > rows[0]:
            runs.append([*rows, ahead, amsgrad])
    return runs


def launch_update(
    jobs: Jobs,
    coefficients: Tensor,
    seed: Tensor,
    stochastic: bool,
    arena=None,
    moments: "dict | None" = None,
):
    """adamw_v2: one launch per 60 tensors of the same dtypes; or, where all of them are the arena's, adamw_v3: one for all neighbours."""
    if jobs.updates is None or jobs.updates[0] != stochastic:
        lists, runs = (
            list(_pack_updates(jobs, stochastic)),
            arena_runs(jobs, arena) if arena else (),
        )
        jobs.updates = stochastic, lists, runs if 0 < len(runs) <= len(lists) else ()
    _, lists, runs = jobs.updates
    for first, last, ahead, amsgrad in runs:
        kernel = update_kernel("adamw_v3", torch.float32, torch.float32, amsgrad, stochastic)
        kernel[min(last - first, MAX_BLOCKS), kernel.bound](
            coefficients,
            seed,
            arena.weights,
            arena.grads,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments["max_exp_avg_sq"] if amsgrad else None,
            arena.bf16_weights,
            arena.chunk_table,
            first,
            last,
            ahead,
        )
    for kernel, grid, packed, part in () if runs else lists:
        kernel[grid, kernel.bound](
            coefficients,
            seed,
            packed,
            tensors=(t for j in part for t in (j.weight, j.grad, j.m, j.v, j.vmax, j.copy)),
        )


# ---- a step by the reference ----------------------------------------------------------------------------------------


def reference_step(
    jobs: "list[Job]",
    param_groups: "list[dict]",
    found: "ClipState | None",
    rows: "list[int]",
    skip: bool,
    divisor,
    found_inf,
    record: Tensor,
    count_it: bool,
    seed: "int | None",
):
    """What launch_begin and launch_update do, in torch: any dtype, one device. rows: of each job among the verdicts of `found`.

    On a CPU a skipped step is decided here; elsewhere nothing waits: torch.where keeps the old values."""
    device = jobs[0].weight.device
    keep = torch.zeros((), dtype=torch.bool, device=device)
    if found is not None and skip:
        keep |= ~found.finite.all()
    if found_inf is not None:
        keep |= (found_inf != 0).view(())
    if count_it:
        record[0] += 1
        record[1] += keep
        bad = found.bad if found is not None else record.new_full((1,), -1)
        first = torch.where(
            (bad >= 0).any(), bad.index_select(0, (bad >= 0).int().argmax().view(1))[0], -1
        )
        record[2:] = torch.where(keep, torch.stack([record[0], first]), record[2:])
    here = device.type == "cpu"
    if not (here and keep.tolist()):
        steps = torch.stack([j.step for j in jobs]) + 1
        for j, row, step in zip(jobs, rows, steps.tolist() if here else steps.double().unbind()):
            _reference_update(
                j,
                step,
                param_groups[j.group],
                None if found is None else found.verdicts[row, 0],
                divisor,
                None if here else keep,
                seed,
            )
    for j in jobs:
        if j.clear:
            j.grad.zero_()


def _reference_update(j, step, group, scale, divisor, keep, seed):
    factor = 1.0 if scale is None else scale
    if divisor is not None:
        factor = factor / divisor.view(())
    if group["maximize"]:
        factor = -factor
    targets = [t for t in (j.weight, j.m, j.v, j.vmax, j.step, j.copy) if t is not None]
    before = [t.clone() for t in targets] if keep is not None else ()
    j.step += 1
    lr, beta1, beta2, decay = (
        x.item() if isinstance(x, Tensor) and x.device.type == "cpu" else x
        for x in (group["lr"], *group["betas"], group["weight_decay"])
    )
    w = reference_adamw(
        j.weight,
        j.grad,
        j.m,
        j.v,
        j.vmax,
        step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=decay,
        factor=factor,
    )
    low = j.weight if j.copy is None else j.copy
    if seed is not None and low.dtype == torch.bfloat16:
        noise = (
            reference_random_bits(seed, j.number, w.numel(), int(j.step))
            .to(w.device)
            .as_strided(w.shape, j.weight.stride())
        )
        low.copy_(reference_round(w, noise))
    elif j.copy is not None:
        j.copy.copy_(w)
    for t, old in zip(targets, before):
        t.copy_(torch.where(keep, old, t))
