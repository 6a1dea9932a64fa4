"""A gated linear unit of two Richards curves: logistic curves with learned parameters.

    layer = ga.RichardsGLU(256, 1024)
    y = layer(x)  # x + (x1 R_a(x1) R_g(x2)) W_out, x1 and x2 the halves of x W_in
    layer.activation.values()  # (9,) nu, k, m, beta, T, a, c, s, b

    u = s x / T + b      sigma = (1 + beta exp(-k nu (u - m)))^(-1 / nu)      R(x) = a sigma + c

nu, k, beta and T are positive: what is learned is z, and the parameter is softplus(z), at least
1e-6; a bounded T is 0.1 + 9.9 sigmoid(z) instead.

Forward and backward are one kernel each. The parameters' gradients are summed in a fixed order and
never leave the GPU. Higher derivatives, forward mode and torch.func's transforms run in torch's
operations (but not inside torch.compile, which does not see them).

Source: F. J. Richards, 1959; RustGPT's RichardsCurve and RichardsGlu, with the gradients that
belong to the forward (its GPU backward had another activation's derivative and no residual), summed
over all elements as autograd does (its CPU took means).
"""

import functools
import math
import numbers

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import takes
from ..compiler import C_TYPES, FLOAT_DTYPES, Kernel, usable
from ..errors import ArgumentError
from .operation import define

# The parameters, and what they are where they are not learned.
FIXED_VALUES = dict(nu=1.0, k=1.0, m=0.0, beta=1.0, T=1.0, a=1.0, c=0.0, s=1.0, b=0.0)
NAMES = tuple(FIXED_VALUES)
POSITIVE = ("nu", "k", "beta", "T")
# Learned by a curve between 0 and 1; by the gate of a RichardsGLU.
SIGMOID = ("nu", "k", "m", "beta", "T", "s", "b")
GATE = ("nu", "k", "m", "T")
# How a parameter is learned: not at all, as it is, as softplus(z), as 0.1 + 9.9 sigmoid(z). The
# `kinds` of a curve have two bits for each.
FIXED, PLAIN, SOFTPLUS, BOUNDED = range(4)
LEAST = 1e-6
# Threads of a block; sums per curve of a backward (richards.cuh).
THREADS = 128
SUMS = 5


# ---- reference -----------------------------------------------------------------------------------


def reference_values(theta: Tensor, kinds: int) -> Tensor:
    """The nine parameters, (9,). Differentiable.

    Args:
        theta: what is learned, in the order of NAMES.
    """
    values = []
    learned = iter(theta.unbind())
    for i, (name, fixed) in enumerate(FIXED_VALUES.items()):
        kind = kinds >> 2 * i & 3
        value = theta.new_full((), fixed) if kind == FIXED else next(learned)
        if kind == SOFTPLUS:
            value = F.softplus(value)
        elif kind == BOUNDED:
            value = 0.1 + 9.9 * torch.sigmoid(value)
        values.append(value.clamp(min=LEAST) if name in POSITIVE else value)
    return torch.stack(values)


def reference_richards(x: Tensor, values: Tensor) -> Tensor:
    """R(x), the definition, computed in the values' dtype. Differentiable in x and the values.

    Args:
        x: any shape.
        values: (9,) in the order of NAMES.
    """
    nu, k, m, beta, T, a, c, s, b = values.unbind()
    u = s * x.to(values.dtype) / T + b
    return a * torch.exp(-F.softplus(torch.log(beta) - k * nu * (u - m), threshold=30.0) / nu) + c


def reference_curve(x: Tensor, theta: Tensor, kinds: int) -> Tensor:
    """R(x) from what is learned, in fp32 (fp64 where a tensor is)."""
    wide = torch.float64 if torch.float64 in (x.dtype, theta.dtype) else torch.float32
    return reference_richards(x.to(wide), reference_values(theta.to(wide), kinds))


def _reference(x, theta_a, theta_g, kinds_a, kinds_g):
    x1, x2 = x.chunk(2, -1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    activation = reference_curve(x1, theta_a, kinds_a)
    gate = reference_curve(x2, theta_g, kinds_g)
    h = (x1.to(wide) * activation * gate).to(x.dtype)
    return (h.contiguous(),)


# ---- launchers -----------------------------------------------------------------------------------


@functools.cache
def curve_kernel(name: str, dtype: torch.dtype = torch.float32, whole: int = 0) -> Kernel:
    """A kernel of richards.cu. whole: 1 if rows are made of aligned groups of 16 bytes."""
    # -ftz: results below 2^-126 are 0, else every exp2 and log2 takes four instructions more.
    return Kernel(
        "richards",
        name,
        options=("-ftz=true",),
        DATA_T=C_TYPES[dtype],
        WHOLE=whole,
        THREADS=THREADS,
        GROUPS=_groups(name, dtype),
    )


def _groups(name, dtype) -> int:
    """Number of 16-byte groups per thread."""
    return 4 * dtype.itemsize if name.endswith("backward") else 8


def in_fp32(*parameters):
    return [p.detach().float().contiguous() for p in parameters]


def finish_curves(sums, thetas, kinds) -> list[Tensor]:
    """Launch richards_finish.

    Args:
        sums: (blocks, 2 SUMS) of a backward. thetas, kinds: of two curves.

    Returns:
        Dtheta of each curve.
    """
    dthetas = [torch.empty_like(theta) for theta in thetas]
    curve_kernel("richards_finish")[2, 1024](*dthetas, sums, *thetas, *kinds, len(sums))
    return dthetas


def _kernel_and_blocks(name: str, x: Tensor, *others: Tensor) -> tuple[Kernel, int]:
    """glu_forward or glu_backward for rows of x (..., 2 hidden), and its thread blocks."""
    row = x.shape[-1] // 2 * x.itemsize  # bytes
    aligned = all(t.data_ptr() % 16 == 0 for t in (x, *others))
    groups = x.numel() // x.shape[-1] * -(-row // 16)
    kernel = curve_kernel(name, x.dtype, int(row % 16 == 0 and aligned))
    return kernel, -(-groups // (THREADS * _groups(name, x.dtype)))


def launch_forward(x: Tensor, theta_a, theta_g, kinds_a: int, kinds_g: int) -> tuple[Tensor]:
    """Launch glu_forward.

    Args:
        x: (..., 2 hidden), not empty.

    Returns:
        H, (..., hidden).
    """
    x, thetas = x.contiguous(), in_fp32(theta_a, theta_g)
    *rows, width = x.shape
    h = x.new_empty(*rows, width // 2)
    kernel, blocks = _kernel_and_blocks("glu_forward", x, h)
    kernel[blocks, THREADS](h, x, *thetas, kinds_a, kinds_g, math.prod(rows), width // 2)
    return (h,)


def launch_backward(
    dh: Tensor, x: Tensor, theta_a, theta_g, kinds_a: int, kinds_g: int
) -> tuple[Tensor, ...]:
    """Launch glu_backward and richards_finish.

    Returns:
        Dx, and dtheta of each curve.
    """
    dh, x, thetas = dh.contiguous(), x.contiguous(), in_fp32(theta_a, theta_g)
    *rows, width = x.shape
    dx = torch.empty_like(x)
    kernel, blocks = _kernel_and_blocks("glu_backward", x, dh, dx)
    sums = torch.empty(blocks, 2 * SUMS, dtype=torch.float32, device=x.device)
    kinds = kinds_a, kinds_g
    kernel[blocks, THREADS](dx, sums, dh, x, *thetas, *kinds, math.prod(rows), width // 2)
    return dx, *finish_curves(sums, thetas, kinds)


# ---- the operation that autograd and torch.compile see -------------------------------------------


@functools.cache
def richards_kernels(dtype) -> list[Kernel]:
    """All kernels that a GLU of this dtype may launch."""
    return [curve_kernel("richards_finish")] + [
        curve_kernel(name, dtype, whole)
        for name in ("glu_forward", "glu_backward")
        for whole in (0, 1)
    ]


def _kernels_run(x, theta_a, theta_g, *kinds) -> bool:
    return (
        takes(x.device)
        and x.dtype in FLOAT_DTYPES
        and x.numel() > 0
        and torch.float64 not in (theta_a.dtype, theta_g.dtype)
        and usable(x.device, *richards_kernels(x.dtype))
    )


_richards_glu = define(
    "richards_glu",
    "x theta_a theta_g",
    "int kinds_a, int kinds_g",
    reference=_reference,
    can_run=_kernels_run,
    launch=launch_forward,
    launch_backward=launch_backward,
    fake=lambda x, *_: (x.new_empty(*x.shape[:-1], x.shape[-1] // 2),),
    outputs=1,
)


# ---- public --------------------------------------------------------------------------------------


def is_size(value) -> bool:
    """True for an integer of 1 or more."""
    return isinstance(value, numbers.Integral) and int(value) >= 1


class RichardsCurve(nn.Module):
    """What a Richards curve learns, R(x) = a sigma + c.

    The one nn.Parameter is `theta`, what is learned (z of a positive parameter) in the order of
    values(). A state_dict has theta only, so it belongs to a curve made with the same arguments.

    Args:
        learn: names of the learned parameters; the others keep FIXED_VALUES.
        bounded: T stays between 0.1 and 10.
        T: where T begins.
        device: of theta; default: torch's.

    Attributes:
        kinds: how each parameter is learned, two bits for each.
    """

    def __init__(self, learn=NAMES, *, bounded: bool = False, T: float = 1.0, device=None):
        super().__init__()
        self.learn = learn
        self.kinds = 0
        theta = []
        for i, (name, value) in enumerate({**FIXED_VALUES, "T": T}.items()):
            if name not in learn:
                kind = FIXED
            elif name == "T" and bounded:
                kind = BOUNDED
                theta.append(math.log((value - 0.1) / (10.0 - value)))
            elif name in POSITIVE:
                kind = SOFTPLUS
                theta.append(value + math.log(-math.expm1(-value)))
            else:
                kind = PLAIN
                theta.append(value)
            self.kinds |= kind << 2 * i
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float32, device=device))

    def values(self) -> Tensor:
        """The parameters nu, k, m, beta, T, a, c, s, b, (9,). Differentiable."""
        return reference_values(self.theta, self.kinds)

    def extra_repr(self):
        return f"learns {', '.join(self.learn)}"


class RichardsGLU(nn.Module):
    """x + w_out(x1 R_a(x1) R_g(x2)), x1 and x2 the halves of w_in(x). The residual is inside.

    Args:
        dim: last dimension of x, (..., dim), 1 or more.
        hidden: width of x1 and x2, 1 or more.
        device: of the parameters; default: torch's.
        dtype: of w_in and w_out; default: torch's.

    Attributes:
        w_in: (2 hidden, dim), both projections as one matrix, no bias, N(0, sqrt(2 / fan_in)).
        w_out: (dim, hidden), no bias, N(0, sqrt(2 / fan_in)).
        activation: R_a, a RichardsCurve that learns all nine parameters.
        gate: R_g, a sigmoid that learns nu, k, m and a bounded T, which begins at exp(0.1 N(0, 1)).

    Raises:
        ArgumentError: for sizes below 1.

    Source:
        kernels_cu/richards.cu.

    Example:
        >>> layer = ga.RichardsGLU(dim=16, hidden=32)
        >>> x = torch.randn(2, 8, 16)
        >>> layer(x).shape == x.shape
        True
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not (is_size(dim) and is_size(hidden)):
            raise ArgumentError(
                f"dim is {dim!r} and hidden {hidden!r}; expected whole numbers of 1 or more"
            )
        self.dim = dim
        self.hidden = hidden
        self.w_in = nn.Linear(dim, 2 * hidden, bias=False, device=device, dtype=dtype)
        self.w_out = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)
        for layer in (self.w_in, self.w_out):
            nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features))
        self.activation = RichardsCurve(device=device)
        T = min(max(math.exp(0.1 * float(torch.randn((), device="cpu"))), 0.2), 5.0)
        self.gate = RichardsCurve(GATE, bounded=True, T=T, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, with the residual.

        Args:
            x: (..., dim), in the weights' dtype or under autocast.

        Returns:
            (..., dim).

        Raises:
            ArgumentError: for another last dimension or dtype.
        """
        check_input(x, self.activation.theta, "w_in", self.w_in)
        if x.shape[-1:] != (self.dim,):
            raise ArgumentError(f"x has shape {tuple(x.shape)}; expected (..., {self.dim})")
        a, g = self.activation, self.gate
        return x + self.w_out(_richards_glu(self.w_in(x), a.theta, g.theta, a.kinds, g.kinds))


def check_input(x, theta, name="", layer=None):
    """ArgumentError unless x goes with a curve's parameters and, in errors `name`, layer.weight."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"x is {got}; expected a floating-point tensor")
    if x.device != theta.device:
        raise ArgumentError(
            f"x is on {x.device}, the curve's parameters on {theta.device}; expected one device"
        )
    weight = getattr(layer, "weight", None)  # of a quantised layer it may be anything
    if (
        isinstance(weight, Tensor)
        and weight.is_floating_point()
        and x.dtype != weight.dtype
        and not x.is_meta
        and not torch.is_autocast_enabled(x.device.type)
    ):
        raise ArgumentError(
            f"x is {x.dtype}; expected {weight.dtype}, as {name}.weight is (or torch.autocast)"
        )
