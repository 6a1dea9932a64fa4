"""Gradient clipping without a host synchronisation: norm, decision and scale stay on the device.

    ga.clip_grad_norm_(model.parameters(), 1.0)       # returns the norm before clipping
    state = ga.optim.clip_grads_(arena, 1.0, scope="block")     # one norm per transformer block
    state.norm, state.clipped_norm, state.scale
    state.name()               # waits; the first gradient that was not finite, or None

clip_grad_norm_ is a drop-in for torch.nn.utils.clip_grad_norm_. With ga.AdamW(..., max_norm=1.0)
neither needs to be called: the optimizer takes the norm and multiplies by the scale itself.

What happens at the edges ("skip" is the default of an arena):

| case | what happens |
|---|---|
| all gradients zero | norm 0, scale 1 |
| norm + eps <= max_norm | scale 1, nothing is written |
| norm just above max_norm | multiplied by exactly this scale, in (1 - 1e-7, 1) |
| any NaN | propagate: all NaN, as in torch; skip: as it was |
| any infinity | propagate: finite gradients 0, infinity NaN; skip: as it was |
| squares overflow (|g| > 1.8e19) | norm right; where torch computes, infinite: scale 0 |
| squares underflow (|g| < 1e-23) | norm right; where torch computes, 0 |
| max_norm = 0 | scale 0, as in torch |
| max_norm negative or NaN | ArgumentError, nothing changed |
| max_norm infinite | scale 1; an infinite norm gives NaN (propagate), as in torch |
| no tensors, empty tensors | norm 0; empty tensors count for nothing |
| a launch that fails | BackendError |

Source: the three phases of entrenar's fused clip (ALB-078); semantics and eps of
torch.nn.utils.clip_grad_norm_.
"""

import functools
import math
import types
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..errors import ArgumentError, NonFiniteError, check_choice, described
from ..ops.clip import (
    EPS,
    ClipState,
    OnNonfinite,
    Scope,
    check_gradients,
    check_max_norm,
    dense,
    kernel_takes,
    launch_reduce,
    launch_scale,
    launch_squares,
    launches_for,
    new_state,
    readable,
    reference_norms,
    reference_scale,
    unnamed,
)
from .arena import Arena, check_parameters_or_arena

# ---- public ----


def clip_grad_norm_(
    parameters_or_arena: Arena | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    scope: Scope = "global",
    on_nonfinite: OnNonfinite | None = None,
    eps: float = EPS,
) -> Tensor:
    """Scale gradients in place so that their norm is at most max_norm, and return the norm.

    A drop-in for `torch.nn.utils.clip_grad_norm_`, on a GPU faster than its foreach=True. It can
    also skip gradients that are not finite, or name their tensor. As with foreach=True the host
    does not wait (except with error_if_nonfinite or "raise").

    Deviations from torch: the norm is fp32 (fp64 for fp64 gradients), finite gradients whose
    squares overflow or underflow fp32 have a correct norm, and a scale of 1 writes nothing.

    torch's own code runs, with its precision, for fp64 gradients, norm_type other than 1, 2 and
    inf, tensor subclasses, several devices, and on the CPU.

    Args:
        parameters_or_arena: parameters, whose `.grad` is clipped: an iterable, or a single one. Or
            an Arena, whose `grads` are clipped.
        max_norm: 0 or more; infinity: nothing is clipped.
        norm_type: 1, 2 and inf are computed by kernels, others by torch. Default: 2.
        error_if_nonfinite: raise NonFiniteError where a norm is not finite, before anything is
            written. Waits for the device. Default: False.
        foreach: as torch's, where torch computes.
        scope: "global" (one norm, the default), "tensor" (one norm each) or "block" (one norm for
            each block of an arena).
        on_nonfinite: what happens to gradients whose norm is not finite. "propagate" (default for
            parameters): they are multiplied by the scale all the same, as in torch. "skip" (default
            for an arena): they stay as they are. A ga.AdamW over the arena then leaves out the
            step; other optimizers use them. "raise": NonFiniteError names the tensor; waits for the
            device.
        eps: added to the norm. Default: torch's 1e-6.

    Returns:
        The norm before clipping, fp32 (fp64 for fp64 gradients), on the gradients' device, () with
        scope "global", else (G,), one per tensor or block.

    Raises:
        ArgumentError: for a negative or NaN max_norm, for sparse or complex gradients, for an
            unknown scope or on_nonfinite, and for scope="block" without an arena.
        NonFiniteError: with error_if_nonfinite or on_nonfinite="raise"; nothing was written.

    Source:
        kernels_cu/clip.cu; `torch.nn.utils.clip_grad_norm_`.

    Example:
        >>> model = torch.nn.Linear(4, 2, device=ga.default_device())
        >>> model(torch.ones(3, 4, device=ga.default_device())).sum().backward()
        >>> norm = ga.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> print(f"norm {norm:.2f}, weight's now {model.weight.grad.norm():.2f}")
        norm 9.49, weight's now 0.89
    """
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
    parameters_or_arena: Arena | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    scope: Scope = "global",
    on_nonfinite: OnNonfinite | None = None,
    eps: float = EPS,
) -> ClipState:
    """`clip_grad_norm_` that returns all it computes, as a ClipState.

    That is the scale, the norm before and after clipping, whether all gradients were finite, and
    the first tensor that was not.

    Args:
        parameters_or_arena: as for `clip_grad_norm_`, as are all arguments.
        max_norm: 0 or more.
        norm_type: order of the norm.
        error_if_nonfinite: raise where a norm is not finite.
        foreach: as torch's, where torch computes.
        scope: "global", "tensor" or "block".
        on_nonfinite: "propagate", "skip" or "raise".
        eps: added to the norm.

    Returns:
        The ClipState, on the gradients' device.

    Raises:
        ArgumentError: as for `clip_grad_norm_`.
        NonFiniteError: as for `clip_grad_norm_`.
    """
    max_norm = check_max_norm(max_norm)
    norm_type = float(norm_type)
    check_choice("scope", scope, Scope)
    grads: list[Tensor]
    names: Callable[[], list[str]]
    groups: list[int] | None = None  # of each tensor; None: all are one group
    if isinstance(parameters_or_arena, Arena):
        arena = parameters_or_arena
        policy: OnNonfinite = on_nonfinite or "skip"
        check_choice("on_nonfinite", policy, OnNonfinite)
        arena.check()
        arena.gradients.collect()
        nothing = arena.grads[:0]
        grads = [
            nothing if p.grad is None else view
            for p, view in zip(arena.module_parameters, arena.gradients.views)
        ]
        names = functools.partial(list, [s.name for s in arena.segments])
        if scope == "block":
            groups = [s.block for s in arena.segments]
    else:
        arena = None
        policy = on_nonfinite or "propagate"
        check_choice("on_nonfinite", policy, OnNonfinite)
        if scope == "block":
            raise ArgumentError(
                "scope='block' needs an arena, which knows the blocks; got parameters"
            )
        grads, names = _grads_of(parameters_or_arena)
        if not grads:
            # Norm 0 and scale 1 for a global scope, else no groups.
            rows = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float32)[: scope == "global"]
            return ClipState(rows, torch.full(rows.shape[:1], -1).int(), scope, names)
    if scope == "tensor":
        groups = list(range(len(grads)))
    how = grads, names, groups, scope, max_norm, norm_type, eps, policy == "skip"
    by_kernels = kernel_takes(grads)
    if not by_kernels:
        check_gradients(grads, names)
    if by_kernels and norm_type in (1.0, 2.0, math.inf):
        state, scale = _by_kernels(*how, None if arena is None else arena.tensor_to_block)
    else:
        state, scale = _by_torch(*how, foreach)
    if (error_if_nonfinite or policy == "raise") and not bool(state.finite.all()):
        raise NonFiniteError(
            f"The total norm of order {norm_type} for gradients of "
            f"{state.name() or 'all tensors together'} is non-finite: it is "
            f"{state.norm.tolist()}. Nothing was clipped"
        )
    scale()
    return state


def _grads_of(parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], Callable[[], list]]:
    """The gradients that are not None, and a function that returns their names."""
    check_parameters_or_arena("parameters", parameters)
    members = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if isinstance(parameters, types.GeneratorType) and not members:
        warnings.warn("`parameters` is an empty generator: there is nothing to clip", stacklevel=5)
    for member in members:
        if not isinstance(member, Tensor):
            raise ArgumentError(f"parameters holds {described(member)}; expected tensors")

    def names():
        return [name for name, p in zip(unnamed(members), members) if p.grad is not None]

    return [g for p in members if (g := p.grad) is not None], names


def _by_kernels(grads, names, groups, scope, max_norm, norm_type, eps, skip, tensor_to_block):
    """(the clip state, a function that scales the gradients). groups: of each tensor, or None."""
    device = grads[0].device
    count = 1 if groups is None else groups[-1] + 1
    state = new_state(count, device, scope, names)
    limit = torch.full((1,), max_norm, dtype=torch.float64, device=device)
    # A view with gaps between its elements is copied into a dense tensor, and back.
    packed = grads
    if not all(map(Tensor.is_contiguous, grads)):
        packed = [g if dense(g) else g.contiguous() for g in grads]
    launches = launches_for(packed)
    group_of = None
    if scope == "block":
        group_of = tensor_to_block
    elif groups is not None:
        group_of = torch.arange(count, dtype=torch.int32, device=device)
    chunks = sum(chunks for _, chunks, *_ in launches)
    partials = torch.empty(chunks, dtype=torch.float64, device=device)
    chunk_to_tensor = torch.empty(chunks, dtype=torch.int32, device=device)
    launch_squares(packed, partials, chunk_to_tensor, norm_type, launches)
    launch_reduce(state, partials, chunk_to_tensor, group_of, limit, eps, None, norm_type)

    def scale():
        launch_scale(packed, state, group_of, skip, launches)
        if packed is not grads:
            for g, p in zip(grads, packed):
                if p is not g:
                    g.copy_(p)
        torch.autograd.graph.increment_version(grads)

    return state, scale


def _by_torch(grads, names, groups, scope, max_norm, norm_type, eps, skip, foreach):
    """The same in torch."""
    count = 1 if groups is None else groups[-1] + 1
    norms, nonfinite_tensor = reference_norms(grads, norm_type, groups, count, foreach)
    scales = reference_scale(norms, max_norm, eps)
    finite = torch.isfinite(norms)
    rows = torch.stack([scales, norms, norms * scales, finite.to(norms.dtype)], 1)
    if norms.dtype != torch.float64:
        rows = rows.float()
    state = ClipState(rows, nonfinite_tensor, scope, names)
    if skip:
        scales = torch.where(finite, scales, 1.0)

    def scale():
        factors = scales.tolist() if readable(scales) else [None] * count
        for group in range(count):
            if factors[group] == 1:
                continue
            members = grads
            if groups is not None:
                members = [t for t, number in zip(grads, groups) if number == group]
            # On a CPU the lists below take as long as the products of a small model.
            if len(set(map(Tensor.get_device, members))) == 1:
                torch._foreach_mul_(members, scales[group].to(members[0].device))
                continue
            for device in {t.device: None for t in members}:
                here = [t for t in members if t.device == device]
                torch._foreach_mul_(here, scales[group].to(device))

    return state, scale
