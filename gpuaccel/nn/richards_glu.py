"""The Richards curve, a logistic curve with nine learned parameters, and the gated linear unit made of two of them.

    >>> curve = ga.RichardsCurve("tanh")                    # y = curve(x), any shape; learns nu, k, m, beta, T, s, b
    >>> ga.RichardsCurve(nu=0.5).values()                   # (9,) nu, k, m, beta, T, a, c, s, b
    >>> layer = ga.RichardsGLU(256, 1024)                   # x + (x1 R_a(x1) R_g(x2)) W_out, x1 and x2 the halves of x W_in

    u = V (s x / T + b)      sigma = (1 + beta exp(-k' (u - m)))^(-1 / nu)      R(x) = a sigma + c, for tanh a (2 sigma - 1) + c

V is 2 for tanh, else 1; k' is k nu with the birch tail (default but for tanh and gompertz), else k. nu, k, beta and T are positive: what is learned of
them is z, and the parameter softplus(z), at least 1e-6; a bounded T is 0.1 + 9.9 sigmoid(z) instead. gompertz begins at nu = beta = 0.01, close to
exp(-exp(-x)). Forward and backward are one kernel each, the parameters' gradients are summed in a fixed order and never leave the GPU. Further
derivatives, forward mode and torch.func's transforms go through torch's operations (not inside of torch.compile, which does not see them).

Source: F. J. Richards, 1959; RustGPT's RichardsCurve and RichardsGlu, with the gradients that belong to the forward (its GPU backward had
another activation's derivative and no residual), summed over all elements as autograd does (its CPU took means).
"""

import functools
import math
import numbers
import struct

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import takes
from ..compiler.kernel import Kernel, usable
from ..errors import ArgumentError
from .embedding import _differentiates_otherwise

NAMES = ("nu", "k", "m", "beta", "T", "a", "c", "s", "b")
POSITIVE = ("nu", "k", "beta", "T")
GATE = ("nu", "k", "m", "T")  # what the gate of a RichardsGLU learns
LEARNED = {
    "none": NAMES,
    "sigmoid": tuple(n for n in NAMES if n not in "ac"),
    "tanh": tuple(n for n in NAMES if n not in "ac"),
    "gompertz": tuple(n for n in NAMES if n not in "ac"),
}
DEFAULTS = dict(nu=1.0, k=1.0, m=0.0, beta=1.0, T=1.0, a=1.0, c=0.0, s=1.0, b=0.0)
FIXED, PLAIN, SOFTPLUS, BOUNDED = range(
    4
)  # how a parameter is learned; bounded: 0.1 + 9.9 sigmoid(z)
LEAST, MOST = 1e-6, torch.finfo(torch.float32).max
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
THREADS, SUMS, CURVE = 128, 5, 32  # of a block; CURVE: floats of what a forward leaves of one
_SETTING = struct.Struct("9f3i").pack
_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- reference ------------------------------------------------------------------------------------------------------


def reference_values(theta: Tensor, setting: "list[float]") -> Tensor:
    """The nine parameters: theta (learned ones, in the order of NAMES) turned into values, the fixed ones from the setting. Differentiable."""
    values, learned = [], iter(theta.unbind())
    for i, name in enumerate(NAMES):
        kind = int(setting[9]) >> 2 * i & 3
        z = (
            torch.as_tensor(setting[i], dtype=theta.dtype, device=theta.device)
            if kind == FIXED
            else next(learned)
        )
        value = (
            F.softplus(z)
            if kind == SOFTPLUS
            else 0.1 + 9.9 * torch.sigmoid(z)
            if kind == BOUNDED
            else z
        )
        values.append(value.clamp(min=LEAST) if name in POSITIVE else value)
    return torch.stack(values)


def reference_richards(x: Tensor, values: Tensor, tanh: bool = False, birch: bool = True) -> Tensor:
    """R(x) from the nine values, in their dtype; the definition. Differentiable in everything."""
    nu, k, m, beta, T, a, c, s, b = values.unbind()
    V = 2.0 if tanh else 1.0
    u = V * (s * x.to(values.dtype) / T + b)
    sigma = torch.exp(
        -F.softplus(torch.log(beta) - (k * nu if birch else k) * (u - m), threshold=30.0) / nu
    )
    return a * (2.0 * sigma - 1.0 if tanh else sigma) + c


def _reference_curve(x, theta, setting):
    wide = torch.float64 if torch.float64 in (x.dtype, theta.dtype) else torch.float32
    return reference_richards(
        x.to(wide), reference_values(theta.to(wide), setting), setting[10] != 0, setting[11] != 0
    )


def _reference_glu(x, theta_a, theta_g, setting_a, setting_g):
    x1, x2 = x.chunk(2, -1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x1.to(wide)
        * _reference_curve(x1, theta_a, setting_a)
        * _reference_curve(x2, theta_g, setting_g)
    ).to(x.dtype)


def _gradients(function, grad, *inputs):
    """Of function(*inputs), by autograd."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*inputs), inputs, grad, materialize_grads=True)


def _again(function, grad, tensors) -> "list[Tensor | None]":
    """Inside a backward that is to be differentiated itself: the gradients of function(*tensors), by autograd; None for a tensor that is None."""
    # Views: what one tensor owes to another is followed by the backward around this one.
    given = [
        t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
        for t in tensors
    ]
    found = iter(
        torch.autograd.grad(
            function(*given),
            [t for t in given if t is not None],
            grad,
            create_graph=True,
            materialize_grads=True,
        )
    )
    return [None if t is None else next(found) for t in given]


# ---- launchers ------------------------------------------------------------------------------------------------------


@functools.cache
def _kernel(name: str, dtype: torch.dtype = torch.float32, whole: int = 0) -> Kernel:
    # Numbers below 2^-126 count as 0: with them every power and logarithm of 2 takes four instructions more.
    return Kernel(
        "richards",
        name,
        options=("-ftz=true",),
        DATA_T=TYPES[dtype],
        WHOLE=whole,
        THREADS=THREADS,
        GROUPS=_groups(name, dtype),
    )


def _groups(name, dtype) -> int:
    """Of 16 bytes, that a thread takes."""
    return 4 * dtype.itemsize if name.endswith("backward") else 8


def _pack(*settings) -> bytes:
    both = [*settings, settings[0]][:2]  # the struct has room for two
    return b"".join(_SETTING(*s[:9], *map(int, s[9:])) for s in both)


def _whole(width, *tensors) -> int:
    return int(
        width * tensors[0].element_size() % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    )


def _finish(sums, curves, thetas, settings) -> "list[Tensor]":
    found = [torch.empty_like(theta) for theta in thetas]
    _kernel("richards_finish")[len(thetas), 1024](
        found[0], found[-1], sums, curves, len(sums), _pack(*settings)
    )
    return found


def _chunks(name, rows, width, dtype) -> int:
    """Thread blocks for a matrix, whose rows are taken in groups of 16 bytes."""
    return -(-rows * -(-width * dtype.itemsize // 16) // (THREADS * _groups(name, dtype)))


def launch_forward(x: Tensor, theta: Tensor, setting) -> "tuple[Tensor, Tensor]":
    """richards_forward. x contiguous and not empty, theta fp32. Returns y and what the backward needs of the curve."""
    curves, y = torch.empty(1, CURVE, device=x.device), torch.empty_like(x)
    _kernel("richards_forward", x.dtype, _whole(x.numel(), x, y))[
        _chunks("forward", 1, x.numel(), x.dtype), THREADS
    ](y, curves, x, theta, _pack(setting), x.numel())
    return y, curves


def launch_backward(
    dy: Tensor, x: Tensor, theta: Tensor, curves: Tensor, setting
) -> "tuple[Tensor, Tensor]":
    """richards_backward and richards_finish. Returns dx and dtheta."""
    dx, sums = (
        torch.empty_like(x),
        torch.empty(_chunks("backward", 1, x.numel(), x.dtype), SUMS, device=x.device),
    )
    _kernel("richards_backward", x.dtype, _whole(x.numel(), x, dy, dx))[len(sums), THREADS](
        dx, sums, dy, x, curves, x.numel()
    )
    return dx, *_finish(sums, curves, [theta], [setting])


def launch_glu_forward(x: Tensor, thetas, settings) -> "tuple[Tensor, Tensor]":
    """glu_forward. x (N, 2 hidden) contiguous and not empty. Returns h (N, hidden) and what the backward needs of the curves."""
    N, hidden = x.shape[0], x.shape[1] // 2
    curves, h = (
        torch.empty(2, CURVE, device=x.device),
        torch.empty(N, hidden, dtype=x.dtype, device=x.device),
    )
    _kernel("glu_forward", x.dtype, _whole(hidden, x, h))[
        _chunks("forward", N, hidden, x.dtype), THREADS
    ](h, curves, x, *thetas, _pack(*settings), N, hidden)
    return h, curves


def launch_glu_backward(
    dh: Tensor, x: Tensor, thetas, curves: Tensor, settings
) -> "tuple[Tensor, Tensor, Tensor]":
    """glu_backward and richards_finish. Returns dx, and dtheta of both curves."""
    N, hidden = dh.shape
    dx, sums = (
        torch.empty_like(x),
        torch.empty(_chunks("backward", N, hidden, x.dtype), 2 * SUMS, device=x.device),
    )
    _kernel("glu_backward", x.dtype, _whole(hidden, x, dh, dx))[len(sums), THREADS](
        dx, sums, dh, x, curves, N, hidden
    )
    return dx, *_finish(sums, curves, thetas, settings)


# ---- the operations that autograd and torch.compile see -------------------------------------------------------------

_library.define("richards(Tensor x, Tensor theta, float[] setting) -> (Tensor, Tensor)")
_library.define(
    "richards_backward(Tensor dy, Tensor x, Tensor theta, Tensor curve, float[] setting) -> (Tensor, Tensor)"
)
_library.define(
    "richards_glu(Tensor x, Tensor theta_a, Tensor theta_g, float[] setting_a, float[] setting_g) -> (Tensor, Tensor)"
)
_library.define(
    "richards_glu_backward(Tensor dh, Tensor x, Tensor theta_a, Tensor theta_g, Tensor curves, float[] setting_a, float[] setting_g) "
    "-> (Tensor, Tensor, Tensor)"
)


@functools.cache
def _all(dtype) -> "list[Kernel]":
    return [_kernel("richards_finish")] + [
        _kernel(name, dtype, whole)
        for name in ("richards_forward", "richards_backward", "glu_forward", "glu_backward")
        for whole in (0, 1)
    ]


def _ours(x, *thetas) -> bool:
    return (
        takes(x.device)
        and x.dtype in TYPES
        and x.numel() > 0
        and all(theta.dtype != torch.float64 for theta in thetas)
        and usable(x.device, *_all(x.dtype))
    )


def _in_fp32(*thetas):
    return [theta.detach().float().contiguous() for theta in thetas]


def _forward(x, theta, setting):
    if not _ours(x, theta):
        return _reference_curve(x, theta, setting).to(x.dtype), x.new_zeros(
            1, CURVE, dtype=torch.float32
        )
    return launch_forward(x.contiguous(), *_in_fp32(theta), setting)


def _backward(dy, x, theta, curve, setting):
    if not _ours(x, theta):
        return _gradients(
            lambda x, theta: _reference_curve(x, theta, setting).to(x.dtype), dy, x, theta
        )
    dx, dtheta = launch_backward(dy.contiguous(), x.contiguous(), *_in_fp32(theta), curve, setting)
    return dx, dtheta.to(theta.dtype)


def _glu_forward(x, theta_a, theta_g, setting_a, setting_g):
    if not _ours(x, theta_a, theta_g):
        return _reference_glu(x, theta_a, theta_g, setting_a, setting_g), x.new_zeros(
            2, CURVE, dtype=torch.float32
        )
    h, curves = launch_glu_forward(
        x.reshape(-1, x.shape[-1]).contiguous(), _in_fp32(theta_a, theta_g), (setting_a, setting_g)
    )
    return h.view(*x.shape[:-1], -1), curves


def _glu_backward(dh, x, theta_a, theta_g, curves, setting_a, setting_g):
    if not _ours(x, theta_a, theta_g):
        return _gradients(
            lambda *inputs: _reference_glu(*inputs, setting_a, setting_g), dh, x, theta_a, theta_g
        )
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    dx, *dthetas = launch_glu_backward(
        dh.reshape(len(flat), -1).contiguous(),
        flat,
        _in_fp32(theta_a, theta_g),
        curves,
        (setting_a, setting_g),
    )
    return dx.view(x.shape), *(d.to(theta.dtype) for d, theta in zip(dthetas, (theta_a, theta_g)))


for _name, _function in (
    ("richards", _forward),
    ("richards_backward", _backward),
    ("richards_glu", _glu_forward),
    ("richards_glu_backward", _glu_backward),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")


def _empty(t):
    return torch.empty_like(t, memory_format=torch.contiguous_format)


torch.library.register_fake(
    "gpuaccel::richards",
    lambda x, theta, s: (_empty(x), x.new_empty(1, CURVE, dtype=torch.float32)),
    lib=_library,
)
torch.library.register_fake(
    "gpuaccel::richards_backward",
    lambda dy, x, theta, curve, s: (_empty(x), _empty(theta)),
    lib=_library,
)
torch.library.register_fake(
    "gpuaccel::richards_glu",
    lambda x, a, g, sa, sg: (
        x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
        x.new_empty(2, CURVE, dtype=torch.float32),
    ),
    lib=_library,
)
torch.library.register_fake(
    "gpuaccel::richards_glu_backward",
    lambda dh, x, a, g, c, sa, sg: (_empty(x), _empty(a), _empty(g)),
    lib=_library,
)


def _save(ctx, inputs, output):
    """Tensors, then what a forward has made of them for its backward; numbers."""
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    ctx.tensors, ctx.numbers = len(tensors), inputs[len(tensors) :]
    ctx.save_for_backward(*tensors, *(output[1:] if isinstance(output, tuple) else ()))


def _back(operation, function):
    """operation: what gives the gradients of function(*tensors, *numbers)."""

    def backward(ctx, dy, *_):
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _again(
                lambda *tensors: function(*tensors, *ctx.numbers), dy, saved[: ctx.tensors]
            )
        else:
            grads = operation(dy, *saved, *ctx.numbers)
        return *grads, *[None] * len(ctx.numbers)

    return backward


torch.library.register_autograd(
    "gpuaccel::richards",
    _back(
        lambda *args: torch.ops.gpuaccel.richards_backward(*args),
        lambda x, theta, setting: _reference_curve(x, theta, setting).to(x.dtype),
    ),
    setup_context=_save,
    lib=_library,
)
torch.library.register_autograd(
    "gpuaccel::richards_glu",
    _back(lambda *args: torch.ops.gpuaccel.richards_glu_backward(*args), _reference_glu),
    setup_context=_save,
    lib=_library,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class RichardsCurve(nn.Module):
    """y = R(x), element by element, in x's dtype. One parameter, `theta`: what is learned (z of a positive one), in the order of values().

    variant: "none", "sigmoid", "tanh" or "gompertz". learn: names of parameters (see values()); default: all nine, without a and c for a named variant.
    birch: the tail (default: but for tanh and gompertz). bounded: T stays between 0.1 and 10. values: the nine at the beginning, nu=0.5, ...
    A state_dict has theta only: it belongs to a curve made with the same arguments. x: fp32, bf16, fp16 (fp64 in torch).
    ArgumentError for an unknown variant or name, a value that is not finite in fp32, or not positive where it must be."""

    def __init__(
        self,
        variant: str = "none",
        *,
        learn=None,
        birch: "bool | None" = None,
        bounded: bool = False,
        device=None,
        **values,
    ):
        super().__init__()
        if variant not in LEARNED:
            raise ArgumentError(f"variant is {variant!r}; expected one of {', '.join(LEARNED)}")
        learn = (
            LEARNED[variant]
            if learn is None
            else (learn,)
            if isinstance(learn, str)
            else tuple(learn)
        )
        for name in (*learn, *values):
            if name not in NAMES or learn.count(name) > 1:
                raise ArgumentError(
                    f"{name!r} is {'there twice' if name in NAMES else 'no parameter of the curve'}; expected some of {', '.join(NAMES)}"
                )
        start = DEFAULTS | (dict(nu=0.01, beta=0.01) if variant == "gompertz" else {}) | values
        for name, value in start.items():
            if (
                not isinstance(value, numbers.Real)
                or not abs(value) <= MOST
                or name in POSITIVE
                and value < LEAST
            ):
                raise ArgumentError(
                    f"{name} is {value}; expected {f'at least {LEAST}' if name in POSITIVE else 'a finite number'}"
                )
        if bounded and not 0.1 < start["T"] < 10.0:
            raise ArgumentError(
                f"T is {start['T']}; expected a number between 0.1 and 10, where it is bounded"
            )
        self.variant, self.learn, self.birch = (
            variant,
            learn,
            variant not in ("tanh", "gompertz") if birch is None else birch,
        )
        kinds, theta = 0, []
        for i, name in enumerate(NAMES):
            kind = (
                FIXED
                if name not in learn
                else BOUNDED
                if name == "T" and bounded
                else SOFTPLUS
                if name in POSITIVE
                else PLAIN
            )
            kinds |= kind << 2 * i
            p = start[name]
            if kind != FIXED:
                theta.append(
                    p + math.log(-math.expm1(-p))
                    if kind == SOFTPLUS
                    else math.log((p - 0.1) / (10.0 - p))
                    if kind == BOUNDED
                    else p
                )
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float32, device=device))
        self.setting = [
            *(float(start[name]) for name in NAMES),
            float(kinds),
            float(variant == "tanh"),
            float(self.birch),
        ]

    def values(self) -> Tensor:
        """(9,) the parameters: nu, k, m, beta, T, a, c, s, b."""
        return reference_values(self.theta, self.setting)

    def forward(self, x: Tensor) -> Tensor:
        _check_data(x, self.theta)
        if _differentiates_otherwise():
            return _reference_curve(x, self.theta, self.setting).to(x.dtype)
        return torch.ops.gpuaccel.richards(x, self.theta, self.setting)[0]

    def extra_repr(self):
        return f"{self.variant}, learns {', '.join(self.learn) or 'nothing'}{', birch tail' if self.birch else ''}"


class RichardsGLU(nn.Module):
    """x + w_out(x1 R_a(x1) R_g(x2)), x1 and x2 the halves of w_in(x): the residual is inside. x: (..., dim).

    w_in: (2 hidden, dim), both projections as one product; w_out: (dim, hidden); no biases; both N(0, sqrt(2 / fan_in)). activation: a
    RichardsCurve that learns all nine parameters; gate: a sigmoid that learns nu, k, m and T; T begins at exp(0.1 N(0, 1)) and is bounded.
    x: in the weights' dtype, or under autocast. ArgumentError for sizes below 1, and for another last dimension or dtype."""

    def __init__(self, dim: int, hidden: int, *, device=None, dtype=None):
        super().__init__()
        if not all(isinstance(size, numbers.Integral) and size >= 1 for size in (dim, hidden)):
            raise ArgumentError(
                f"dim is {dim!r} and hidden {hidden!r}; expected whole numbers of 1 or more"
            )
        self.dim, self.hidden = dim, hidden
        self.w_in = nn.Linear(dim, 2 * hidden, bias=False, device=device, dtype=dtype)
        self.w_out = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)
        for layer in (self.w_in, self.w_out):
            nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features))
        self.activation = RichardsCurve(device=device)
        T = min(max(math.exp(0.1 * float(torch.randn((), device="cpu"))), 0.2), 5.0)
        self.gate = RichardsCurve("sigmoid", learn=GATE, bounded=True, T=T, device=device)

    def forward(self, x: Tensor) -> Tensor:
        _check_data(x, self.activation.theta, "w_in", self.w_in)
        if x.shape[-1:] != (self.dim,):
            raise ArgumentError(f"x has shape {tuple(x.shape)}; expected (..., {self.dim})")
        given = (
            self.w_in(x),
            self.activation.theta,
            self.gate.theta,
            self.activation.setting,
            self.gate.setting,
        )
        return x + self.w_out(
            _reference_glu(*given)
            if _differentiates_otherwise()
            else torch.ops.gpuaccel.richards_glu(*given)[0]
        )


def _check_data(x, theta, name="", layer=None):
    """x is a tensor that goes with a curve's parameters, and first into a product with layer.weight."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ArgumentError(
            f"x is {x.dtype if isinstance(x, Tensor) else type(x).__name__}; expected a floating-point tensor"
        )
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
