"""Gradient clipping that never asks the host: the norm, the decision and the factor stay on the device.

    >>> ga.clip_grad_norm_(model.parameters(), 1.0)            # as torch.nn.utils.clip_grad_norm_, returns the norm before clipping
    >>> found = ga.optim.clip_grads_(arena, 1.0, scope="block")      # one norm per transformer block; found.norm, found.clipped_norm, ...
    >>> found.name()                                           # waits, and tells which gradient was not finite, or None

With ga.AdamW(..., max_norm=1.0) none of this needs to be called: the optimizer takes the norm and multiplies by the scale itself.

What happens at the edges ("skip" is the default of an arena):

| case | entrenar's fused clip, which this follows | here |
|---|---|---|
| all gradients zero | norm 0, scale 1 | the same |
| norm + eps <= max_norm | scale 1, nothing written | the same |
| norm just above max_norm | scale in (1 - 1e-7, 1) counts as 1 | multiplied by exactly this scale |
| any NaN | scale 1, NaN goes on to the weights | propagate: every gradient of the group becomes NaN, as in torch; skip: nothing is written |
| any infinity | scale 0: finite gradients 0, infinity NaN | propagate: the same, as in torch; skip: nothing is written |
| squares overflow (|g| > 1.8e19) | norm infinite, scale 0 | norm and scale right (fp64 in our kernels; where torch computes: as torch, infinite, not finite) |
| squares underflow (|g| < 1e-23) | norm 0, scale 1 | norm right (likewise) |
| max_norm = 0 | 0, or NaN -> 1 for norm 0 | scale 0, as in torch |
| max_norm negative or NaN | flips signs | ArgumentError, nothing changed |
| max_norm infinite | scale 1 | the same; an infinite norm gives NaN (propagate), as in torch |
| no tensors, empty tensors | fails | norm 0; empty tensors count for nothing |
| a launch that fails | ignored, stale sums are used | BackendError |

Source: the three phases of entrenar's fused clip (ALB-078); torch.nn.utils.clip_grad_norm_ for semantics; eps as there.
"""

import math
import types
import warnings

import torch
from torch import Tensor

from ..errors import ArgumentError, NonFiniteError
from ..ops import (
    EPS,
    POLICIES,
    SCOPES,
    ClipState,
    check_choice,
    check_gradients,
    check_max_norm,
    dense,
    kernel_takes,
    launch_reduce,
    launch_scale,
    launch_squares,
    launches_for,
    new_state,
    reference_norms,
    reference_scale,
    unnamed,
)
from .accumulate import GradientAccumulator, finish_for
from .arena import Arena

# ---- public ---------------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    parameters_or_arena,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: "bool | None" = None,
    *,
    scope: str = "global",
    on_nonfinite: "str | None" = None,
    eps: float = EPS,
) -> Tensor:
    """Scale gradients in place so that their norm is at most max_norm; returns the norm before clipping, () fp32 on their device.

    A drop-in for torch.nn.utils.clip_grad_norm_, without a host synchronisation (except with error_if_nonfinite or "raise").
    parameters_or_arena: parameters (an iterable, or one; or pairs as of named_parameters()), whose `.grad` is clipped, or an Arena, whose
    `grads` are.
    max_norm: 0 or more. norm_type: 1, 2 and inf by our kernels, others by torch. foreach: as torch's, where torch computes.
    scope: "global" (one norm), "tensor" (one each), "block" (an arena's blocks: entrenar's per-layer clip); with the last two
    the result is (G,). on_nonfinite: "propagate" (torch's behaviour; default for parameters), "skip" (default for an arena: a group that is
    not finite stays as it is; ga.AdamW then leaves out the whole step) or "raise" (NonFiniteError names the tensor; waits). eps: added to
    the norm. Deviations from torch: the norm is fp32 (fp64 for fp64 gradients); finite gradients whose squares leave fp32 have their right
    norm; nothing is written when the scale is 1; a negative or NaN max_norm and sparse or complex gradients are an ArgumentError.
    torch's own code computes, with its precision, for fp64 gradients, other norms, tensor subclasses, several devices, and on the CPU."""
    return clip_grads_(
        parameters_or_arena,
        max_norm,
        norm_type,
        error_if_nonfinite,
        foreach,
        scope=scope,
        on_nonfinite=on_nonfinite,
        eps=eps,
    ).norm


@torch.no_grad()
def clip_grads_(
    parameters_or_arena,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: "bool | None" = None,
    *,
    scope: str = "global",
    on_nonfinite: "str | None" = None,
    eps: float = EPS,
) -> ClipState:
    """clip_grad_norm_ with everything it found: scale, both norms, whether all was finite, and which tensor was the first that was not."""
    arena = parameters_or_arena if isinstance(parameters_or_arena, Arena) else None
    max_norm, norm_type = check_max_norm(max_norm), float(norm_type)
    check_choice("scope", scope, SCOPES)
    policy = on_nonfinite or ("skip" if arena else "propagate")
    check_choice("on_nonfinite", policy, POLICIES)
    if scope == "block" and arena is None:
        raise ArgumentError("scope='block' needs an arena, which knows the blocks; got parameters")
    if arena is not None:
        grads, names = _arena_grads(arena), lambda: [s.name for s in arena.segments]
    else:
        grads, names = _grads_of(parameters_or_arena)
    if not grads:
        device = arena.device if arena else None
        verdict = torch.tensor([[1.0, 0.0, 0.0, 1.0]][: scope == "global"], device=device).reshape(
            -1, 4
        )
        return ClipState(
            verdict, torch.full((len(verdict),), -1, dtype=torch.int32, device=device), scope, names
        )
    ours = kernel_takes(grads)
    if not ours:
        check_gradients(grads, names)
    groups = (
        None
        if scope == "global"
        else [s.block for s in arena.segments]
        if scope == "block"
        else list(range(len(grads)))
    )
    found, scale = (_by_kernels if ours and norm_type in (1.0, 2.0, math.inf) else _by_torch)(
        grads, names, groups, scope, max_norm, norm_type, eps, policy, foreach, arena
    )
    if (error_if_nonfinite or policy == "raise") and not bool(found.finite.all()):
        raise NonFiniteError(
            f"The total norm of order {norm_type} for gradients of {found.name() or 'all tensors together'} is non-finite: "
            f"it is {found.norm.tolist()}. Nothing was clipped"
        )
    scale()
    return found


def _grads_of(parameters):
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    generator, parameters = isinstance(parameters, types.GeneratorType), list(parameters)
    if generator and not parameters:
        warnings.warn("`parameters` is an empty generator: there is nothing to clip", stacklevel=5)
    given = None
    if parameters and isinstance(parameters[0], tuple):
        given, parameters = [name for name, _ in parameters], [p for _, p in parameters]
    finish_for(parameters)

    def names():
        return [
            name for name, p in zip(given or unnamed(parameters), parameters) if p.grad is not None
        ]

    return [g for p in parameters if (g := p.grad) is not None], names


def _arena_grads(arena):
    arena.check()
    if (accumulator := GradientAccumulator.of(arena)) is not None:
        accumulator.finish()
    elsewhere = next(
        (
            s.name
            for s, p, owner, view in zip(
                arena.segments, arena.params, arena.masters, arena.grad_views
            )
            for t in {p, owner}
            if t.grad is not None and t.grad.data_ptr() != view.data_ptr() and t.grad.numel()
        ),
        None,
    )
    if elsewhere:
        raise ArgumentError(
            f"the gradient of {elsewhere} is not in the arena, whose sums would be clipped: make a ga.GradientAccumulator(arena) "
            "before backward(), or clip arena.parameters()"
        )
    return arena.grad_views


def _by_kernels(grads, names, groups, scope, max_norm, norm_type, eps, policy, foreach, arena):
    device, count = grads[0].device, 1 if groups is None else groups[-1] + 1
    found, limit = (
        new_state(count, device, scope, names),
        torch.full((1,), max_norm, dtype=torch.float64, device=device),
    )
    plain = all(map(Tensor.is_contiguous, grads))
    packed = (
        grads if plain else [g if dense(g) else g.contiguous() for g in grads]
    )  # an interleaved view is copied out, and back
    launches = launches_for(packed)
    if groups is None:
        group_of = None
    elif scope == "block":
        group_of = arena.tensor_to_block
    else:
        group_of = torch.arange(count, dtype=torch.int32, device=device)
    if arena is not None and norm_type == 2:
        arena.squares.update()
        partials, owners = arena.squares.values, arena.chunk_to_tensor
    else:
        rows = sum(chunks for _, chunks, _ in launches)
        partials, owners = (
            torch.empty(rows, dtype=torch.float64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
        launch_squares(packed, partials, owners, norm_type, launches)
    launch_reduce(found, partials, owners, group_of, len(partials), limit, eps, None, norm_type)

    def scale():
        launch_scale(packed, found, group_of, policy == "skip", launches)
        if not plain:
            for g, p in zip(grads, packed):
                if p is not g:
                    g.copy_(p)
        torch.autograd.graph.increment_version(grads)

    return found, scale


def _by_torch(grads, names, groups, scope, max_norm, norm_type, eps, policy, foreach, arena):
    norms, bad = reference_norms(
        grads, norm_type, groups, 1 if groups is None else groups[-1] + 1, foreach
    )
    scales, finite = reference_scale(norms, max_norm, eps), torch.isfinite(norms)
    verdicts = torch.stack([scales, norms, norms * scales, finite.to(norms.dtype)], 1)
    found = ClipState(
        verdicts if norms.dtype == torch.float64 else verdicts.float(), bad, scope, names
    )
    if policy == "skip":
        scales = torch.where(finite, scales, 1.0)

    def scale():
        for g in range(len(scales)):
            members = grads if groups is None else [t for t, of in zip(grads, groups) if of == g]
            for device in {t.device: None for t in members}:
                torch._foreach_mul_(
                    [t for t in members if t.device == device], scales[g].to(device)
                )

    return found, scale
