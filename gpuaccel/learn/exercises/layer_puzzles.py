"""The exercises of shelf_activation and shelf_attention: backwards by hand, tiles of keys."""

import math

import torch
import torch.nn.functional as F

from .exercises import (
    INDEX,
    Case,
    Exercise,
    code,
    kernel_exercise,
    normal,
    unwritten,
    whole_number,
)

FAR = (1000, 4096)  # sizes that have some elements where an exp is infinite in fp32


def _between(low, high, generator) -> float:
    """A random number as a kernel gets it: rounded to fp32."""
    return float(low + (high - low) * torch.rand((), generator=generator, device=generator.device))


def _swish_case(n, generator):
    k = _between(0.5, 2.0, generator)
    # The slope is 0 at k x = -1.28: elements keep away from there, where digits cancel.
    u = torch.rand(n, generator=generator, device=generator.device)
    u = torch.where(torch.arange(n, device=u.device) % 3 == 0, -8.0 + 6.4 * u, -1.0 + 7.0 * u)
    if n in FAR:  # |k x| from 45 to 110: exp(-k x), or its square, is infinite for some
        u[3::8] = -45.0 - 65.0 * torch.rand(u[3::8].shape, generator=generator, device=u.device)
        u[7::8] = 45.0 + 65.0 * torch.rand(u[7::8].shape, generator=generator, device=u.device)
    x, dy = u / k, normal(n, generator)
    wide, s = x.double(), torch.sigmoid(k * x.double())
    expected = dy.double() * (s + k * wide * s * (1 - s))

    def known_results():
        rise = s * (1 - s)
        results = {
            "of `sigmoid_backward`: the slope of sigmoid(k x), not of x * sigmoid(k x)": k * rise,
            "without the factor k": s + wide * rise,
            "without the first term of the product rule": k * wide * rise,
            "without the second term of the product rule": s,
            "of the value, not of its slope": wide * s,
        }
        results = {what: dy.double() * slope for what, slope in results.items()}
        return {**results, "without the factor dy[i]": s + k * wide * rise}

    return Case(
        unwritten(n, generator),
        (dy, x),
        (k,),
        expected,
        "some |k x| above 88" if n in FAR else "",
        roundings=64,
        # A sigmoid is rounded as 1 is, for example as (1 + tanh(k x / 2)) / 2.
        least=8 * torch.finfo(dy.dtype).eps * dy.double().abs(),
        known_results=known_results,
    )


def _curve_case(n, generator):
    A, B, G, H = (
        _between(low, high, generator)
        for low, high in ((-2.0, 2.0), (0.5, 2.0), (0.5, 2.0), (0.2, 1.0))
    )
    over_nu = _between(0.002, 0.01, generator) if n in FAR else _between(0.4, 2.5, generator)
    x = normal(n, generator) * 3
    if n in FAR:
        x[::3] -= 250.0  # t above 88, and sigma still far from 0
    t = A - B * x.double()
    return Case(
        unwritten(n, generator),
        (x,),
        (A, B, over_nu, G, H),
        G * torch.exp(-over_nu * F.softplus(t, threshold=40.0)) + H,
        "some t above 88" if n in FAR else "",
        roundings=32,
    )


def _slope_cases(generator):
    for n in (1, 255, 256, 257, 1000, 4096):
        dh, x1, x2 = (normal(n, generator) * scale for scale in (1.0, 3.0, 2.0))
        s, g = torch.sigmoid(x1.double()), torch.sigmoid(x2.double())
        dx1 = dh.double() * g * (s + x1.double() * s * (1 - s))
        dx2 = dh.double() * x1.double() * s * g * (1 - g)
        yield f"{n:,}", (dh, x1, x2), torch.stack([dx1, dx2])


def _slope_mistake(arguments, result) -> str:
    """Which known mistake the result has, or ""."""
    dh, x1, x2 = (tensor.double() for tensor in arguments)
    s, g = torch.sigmoid(x1), torch.sigmoid(x2)
    value, slope = x1 * s, s + x1 * s * (1 - s)
    theirs = value + 0.75 * x1
    dx2 = dh * value * g * (1 - g)
    known = {
        "with mistakes 1 and 2, as the cell began": dh * value * g * theirs,
        "with mistake 1, without mistake 2": dh * g * theirs,
        "with mistake 2, without mistake 1": dh * value * g * slope,
        "without the first term of the product rule": dh * g * (slope - s),
        "without the second term of the product rule": dh * g * s,
        "without the gate in dx1": dh * slope,
        "without dh in dx1": g * slope,
    }
    results = {what: torch.stack([dx1, dx2]) for what, dx1 in known.items()}
    results["with dx1 and dx2 in the other order"] = torch.stack([dx2, dh * g * slope])
    for what, wrong in results.items():
        allowed = 1e-5 * float(wrong.abs().max())
        if result.shape == wrong.shape and result.device == wrong.device:
            if bool(((result.double() - wrong).abs() <= allowed).all()):
                return f"this is the result {what}"
    return ""


def _soft_clip(s):
    return 8.0 * torch.tanh(s / 8.0)


def _poly_row_case(n, generator):
    # A query's scores all have its own sign, and values are positive: no sum loses digits.
    d, window = (
        (1, 2) if n > 100_000 else (whole_number(3, 7, generator), whole_number(5, 40, generator))
    )
    degree = 5 if n == 256 else 1 + 2 * whole_number(0, 3, generator)
    scale = _between(0.5, 1.0, generator) * 4.0 ** (
        1 - degree
    )  # results of a few units, whatever the degree
    q, k = (torch.rand(n, d, generator=generator, device=generator.device) + 0.2 for _ in range(2))
    v = torch.rand(n, generator=generator, device=generator.device) + 0.2
    q *= 3.0 * torch.randn(n, 1, generator=generator, device=generator.device).sign()
    q, k = q.contiguous(), (k * 3.0).contiguous()

    def result(keys=range(window), root=math.sqrt(d), clip=_soft_clip, scale=scale, degree=degree):
        y = torch.zeros(n, dtype=torch.float64, device=q.device)
        for back in keys:  # the key that stands so far before the query
            if back < n:
                s = (q[back:].double() * k[: n - back].double()).sum(1) / root
                y[back:] += scale * clip(s) ** degree * v[: n - back].double()
        return y

    def known_results():
        return {
            "without the division by the square root of d": result(root=1.0),
            "without `scale`": result(scale=1.0),
            "without the soft clip": result(clip=lambda s: s),
            "with the third power, whatever the degree": result(degree=3),
            "with one key too many: the query itself is one of the `window`": result(
                range(window + 1)
            ),
            "with one key too few: the window has `window` keys": result(range(window - 1)),
            "without the query's own key": result(range(1, window)),
            # The larger sizes would take too long.
            **(
                {"with every key before the query, whatever the window": result(range(n))}
                if n <= 1000
                else {}
            ),
        }

    return Case(
        unwritten(n, generator),
        (q.flatten(), k.flatten(), v),
        (d, window, degree, scale),
        result(),
        f"d = {d}, window {window}, degree {degree}",
        roundings=64,
        known_results=known_results,
    )


def _poly_values_case(n, generator):
    # A key's scores all have its own sign, and dy is positive: no sum loses digits.
    window = 2 if n > 100_000 else whole_number(3, 40, generator)
    scale = _between(0.02, 0.05, generator)
    q, k, dy = (torch.rand(n, generator=generator, device=generator.device) + 0.2 for _ in range(3))
    q *= 3.0
    k *= 3.0 * torch.randn(n, generator=generator, device=generator.device).sign()

    def result(queries=range(window), clip=_soft_clip, scale=scale, degree=3):
        dv = torch.zeros(n, dtype=torch.float64, device=q.device)
        for ahead in queries:  # the query that stands so far behind the key, or before it
            at = slice(max(0, -ahead), n - max(0, ahead))  # the keys for which it is there
            of = slice(at.start + ahead, at.stop + ahead)
            if at.start < at.stop:
                s = q[of].double() * k[at].double()
                dv[at] += scale * clip(s) ** degree * dy[of].double()
        return dv

    def known_results():
        return {
            "of the keys that query j sees, not of the queries that see key j": result(
                range(1 - window, 1)
            ),
            "without `scale`": result(scale=1.0),
            "without the soft clip": result(clip=lambda s: s),
            "with one query too many": result(range(window + 1)),
            "with one query too few": result(range(window - 1)),
            "without query j itself": result(range(1, window)),
            # The larger sizes would take too long.
            **(
                {"with every query from j on, whatever the window": result(range(n))}
                if n <= 1000
                else {}
            ),
            "with c * c, not c * c * c": result(degree=2),
        }

    return Case(
        unwritten(n, generator),
        (q, k, dy),
        (window, scale),
        result(),
        f"window {window}",
        roundings=64,
        known_results=known_results,
    )


_SWISH = (
    INDEX
    + """if (i >= n) return;
float s = 1.0f / (1.0f + expf(-k * x[i]));
dx[i] = dy[i] * (s + k * x[i] * s * (1.0f - s));"""
)


def _slope(dx1="dh * g * (s + x1 * s * (1 - s))", dx2="dh * value * g * (1 - g)", order=""):
    order = order or "dx1, dx2"
    return (
        "def glu_slope(dh, x1, x2):\n"
        "    s, g = torch.sigmoid(x1), torch.sigmoid(x2)\n"
        "    value = x1 * s\n"
        f"    dx1 = {dx1}\n"
        f"    dx2 = {dx2}\n"
        f"    return torch.stack([{order}])\n"
    )


_ONE_THREAD = "if (blockIdx.x > 0 || threadIdx.x > 0) return;\n"
_THEIRS = "dh * value * g * (value + 0.75 * x1)"


_CURVE = (
    INDEX
    + """if (i >= n) return;
float t = A - B * x[i];
float L = fmaxf(t, 0.0f) + log1pf(expf(-fabsf(t)));
y[i] = G * expf(-over_nu * L) + H;"""
)


_ROW = (
    INDEX
    + """if (i >= n) return;
float sum = 0.0f;
for (int j = max(0, i - window + 1); j <= i; j++) {
    float s = 0.0f, weight = scale;
    for (int m = 0; m < d; m++) s += q[i * d + m] * k[j * d + m];
    float c = 8.0f * tanhf(s / sqrtf((float)d) / 8.0f);
    for (int p = 0; p < degree; p++) weight *= c;
    sum += weight * v[j];
}
y[i] = sum;"""
)


_CLIP = "8.0f * tanhf(s / sqrtf((float)d) / 8.0f)"


_VALUES = """int j = blockIdx.x * blockDim.x + threadIdx.x;
if (j >= n) return;
float sum = 0.0f;
for (int i = j; i < min(j + window, n); i++) {
    float c = 8.0f * tanhf(q[i] * k[j] / 8.0f);
    sum += scale * c * c * c * dy[i];
}
dv[j] = sum;"""


EXERCISES = {
    e.name: e
    for e in [
        kernel_exercise(
            "swish_backward",
            task=(
                "The backward of y = x * sigmoid(k x), by hand: dx[i] for every i below n, from "
                "dy, x and k, also where exp(-k x) is infinite in fp32 (k x below -88). x appears "
                "twice in y, so the slope has two terms. One thread per element. Expected: three "
                "lines."
            ),
            params=("float* dx", "const float* dy", "const float* x", "float k", "int n"),
            stub="// your lines",
            hint=(
                "Call s = sigmoid(k x). The product rule: the slope of x * s is 1 * s plus x "
                "times the slope of s. You have seen the slope of s in sigmoid_backward."
            ),
            solution=_SWISH,
            wrong_answers={
                "no guard": _SWISH.replace("if (i >= n) return;\n", ""),
                "one too many": _SWISH.replace("i >= n", "i > n"),
                "one too few": _SWISH.replace("i >= n", "i >= n - 1"),
                "adds to dx": _SWISH.replace("dx[i] =", "dx[i] +="),
                "the value, not its slope": _SWISH.replace(
                    "(s + k * x[i] * s * (1.0f - s))", "x[i] * s"
                ),
                "0.75 x": _SWISH.replace(
                    "(s + k * x[i] * s * (1.0f - s))", "(x[i] * s + 0.75f * x[i])"
                ),
                "forgets the first x": _SWISH.replace("(s + k", "(k"),
                "the slope of the sigmoid": _SWISH.replace("(s + k * x[i] * s", "(k * s"),
                "forgets the second x": _SWISH.replace("(s + k * x[i] * s * (1.0f - s))", "s"),
                "forgets k": _SWISH.replace("(s + k * x[i]", "(s + x[i]"),
                "forgets dy": _SWISH.replace("dy[i] * ", ""),
                "a square": _SWISH.replace("s * (1.0f - s)", "(1.0f - s * s)"),
                "infinite by infinite": INDEX
                + """if (i >= n) return;
float e = expf(-k * x[i]);
dx[i] = dy[i] * (1.0f / (1.0f + e) + k * x[i] * e / ((1.0f + e) * (1.0f + e)));""",
                "infinite by infinite, on the right": INDEX
                + """if (i >= n) return;
float s = expf(k * x[i]) / (1.0f + expf(k * x[i]));
dx[i] = dy[i] * (s + k * x[i] * s * (1.0f - s));""",
                "from the other end": _SWISH.replace("dx[i] =", "dx[n - 1 - i] ="),
            },
            cheats={
                "one thread": _ONE_THREAD
                + """for (int i = 0; i < n; i++) {
    float s = 1.0f / (1.0f + expf(-k * x[i]));
    dx[i] = dy[i] * (s + k * x[i] * s * (1.0f - s));
}""",
            },
            data=_swish_case,
        ),
        Exercise(
            "glu_slope",
            task=(
                "The backward of h = x1 * sigmoid(x1) * sigmoid(x2): dx1 and dx2 from dh, as one "
                "tensor of shape (2, n). By hand, without autograd. The line of dx1 is wrong."
            ),
            stub=_slope(_THEIRS),
            hint=(
                "For dx1 the gate g is a constant factor; what is left, x1 * s, is the function "
                "of swish_backward with k = 1. The slope of a product is not the product."
            ),
            solution=_slope(),
            wrong_answers={
                "the system's": _slope(_THEIRS),
                "0.75 in a right place": _slope("dh * g * (value + 0.75 * x1)"),
                "value once too often": _slope("dh * value * g * (s + x1 * s * (1 - s))"),
                "forgets the gate": _slope("dh * (s + x1 * s * (1 - s))"),
                "forgets the first x1": _slope("dh * g * x1 * s * (1 - s)"),
                "forgets the second x1": _slope("dh * g * s"),
                "the gate's slope": _slope("dh * g * (1 - g) * (s + x1 * s * (1 - s))"),
                "forgets dh": _slope("g * (s + x1 * s * (1 - s))"),
                "forgets the value": _slope(dx2="dh * g * (1 - g)"),
                "another order": _slope(order="dx2, dx1"),
            },
            cheats={
                "autograd": code(
                    """
                    def glu_slope(dh, x1, x2):
                        x1, x2 = x1.clone().requires_grad_(), x2.clone().requires_grad_()
                        (x1 * x1.sigmoid() * x2.sigmoid()).backward(dh)
                        return torch.stack([x1.grad, x2.grad])
                    """
                ),
            },
            cases=_slope_cases,
            explain=_slope_mistake,
        ),
        kernel_exercise(
            "curve",
            task=(
                "y[i] = G * exp(-over_nu * L) + H with L = ln(1 + exp(t)) and t = A - B * x[i]; "
                "right for every t, also where exp(t) is infinite. One thread per element. "
                "Expected: four lines."
            ),
            params=(
                "float* y",
                "const float* x",
                "float A",
                "float B",
                "float over_nu",
                "float G",
                "float H",
                "int n",
            ),
            stub="// your lines",
            hint=(
                "Above t = 88 exp(t) is infinite in fp32. But ln(1 + exp(t)) = t + ln(1 + "
                "exp(-t)): take max(t, 0) out of the logarithm, and what is left is exp(-|t|), "
                "at most 1. fmaxf, fabsf, expf, log1pf."
            ),
            solution=_CURVE,
            wrong_answers={
                "no guard": _CURVE.replace("if (i >= n) return;\n", ""),
                "one too many": _CURVE.replace("i >= n", "i > n"),
                "adds to y": _CURVE.replace("y[i] =", "y[i] +="),
                "infinite": _CURVE.replace(
                    "fmaxf(t, 0.0f) + log1pf(expf(-fabsf(t)))", "log1pf(expf(t))"
                ),
                "infinite, as a power": INDEX
                + "if (i < n) y[i] = G * powf(1.0f + expf(A - B * x[i]), -over_nu) + H;",
                "clamped": _CURVE.replace("A - B * x[i];", "fminf(A - B * x[i], 88.0f);"),
                "the other way up": _CURVE.replace("A - B * x[i]", "A + B * x[i]"),
                "a logistic": _CURVE.replace("-over_nu * L", "-L"),
                "nu, not 1 / nu": _CURVE.replace("-over_nu * L", "-L / over_nu"),
                "forgets H": _CURVE.replace(" + H", ""),
                "through bf16": _CURVE.replace(
                    "G * expf(-over_nu * L) + H", "as_float(as_bf16(G * expf(-over_nu * L) + H))"
                ),
            },
            cheats={
                "one thread": _ONE_THREAD
                + """for (int i = 0; i < n; i++) {
    float t = A - B * x[i];
    y[i] = G * expf(-over_nu * (fmaxf(t, 0.0f) + log1pf(expf(-fabsf(t))))) + H;
}""",
            },
            data=_curve_case,
        ),
        kernel_exercise(
            "poly_row",
            task=(
                "Polynomial attention with a window and any odd degree, one thread per query: "
                "y[i] = sum over the last `window` positions j, i itself included, of "
                "scale * c^degree * v[j], c = 8 tanh(s / 8), s = q_i . k_j / sqrt(d). "
                "q, k: (n, d); v: (n). Expected: ten lines, of which you have seen six."
            ),
            params=(
                "float* y",
                "const float* q",
                "const float* k",
                "const float* v",
                "int d",
                "int window",
                "int degree",
                "float scale",
                "int n",
            ),
            stub="// your lines",
            hint=(
                "With a window of 1 a query sees itself alone: which j is first then? And in "
                "front of position 0 there is nothing. A power of a whole degree is a loop that "
                "multiplies."
            ),
            solution=_ROW,
            wrong_answers={
                "no guard": _ROW.replace("if (i >= n) return;\n", ""),
                "one too many": _ROW.replace("i >= n", "i > n"),
                "adds to y": _ROW.replace("y[i] = sum", "y[i] += sum"),
                "sees the next": _ROW.replace("j <= i;", "j <= min(i + 1, n - 1);"),
                "begins in front of 0": _ROW.replace("max(0, i - window + 1)", "i - window + 1"),
                "not itself": _ROW.replace("j <= i;", "j < i;"),
                "a window too wide": _ROW.replace("i - window + 1", "i - window"),
                "no window": _ROW.replace("max(0, i - window + 1)", "0"),
                "four, whatever the window": _ROW.replace("i - window + 1", "i - 3"),
                "no soft clip": _ROW.replace(_CLIP, "s / sqrtf((float)d)"),
                "a hard clip": _ROW.replace(
                    _CLIP, "fminf(fmaxf(s / sqrtf((float)d), -8.0f), 8.0f)"
                ),
                "no square root of d": _ROW.replace("s / sqrtf((float)d)", "s"),
                "loses the sign": _ROW.replace("= 8.0f * tanhf(", "= 8.0f * fabsf(tanhf(").replace(
                    "/ 8.0f);", "/ 8.0f));"
                ),
                "always the third power": _ROW.replace("p < degree", "p < 3"),
                "a softmax's weight": _ROW.replace(
                    "sum += weight * v[j];", "sum += expf(c) * v[j];"
                ),
                "rows and channels swapped": _ROW.replace("k[j * d + m]", "k[m * (n / d) + j / d]"),
            },
            cheats={
                "goes through the keys that it does not see": _ROW.replace(
                    "int j = max(0, i - window + 1);", "int j = max(0, i - 3 * window);"
                ).replace("sum += weight * v[j];", "sum += j > i - window ? weight * v[j] : 0.0f;"),
            },
            data=_poly_row_case,
        ),
        kernel_exercise(
            "poly_values",
            task=(
                "The gradient of the values, one thread per key: dv[j] = sum over the queries i "
                "that see key j of scale * c^3 * dy[i], c = 8 tanh(q[i] * k[j] / 8). Query i sees "
                "the keys max(0, i - window + 1) to i. Expected: seven lines, no atomics."
            ),
            params=(
                "float* dv",
                "const float* q",
                "const float* k",
                "const float* dy",
                "int window",
                "float scale",
                "int n",
            ),
            stub="// your lines",
            hint=(
                "Turn the sentence round: query i sees key j where i - window + 1 <= j <= i. "
                "Which i are these, for one j? The last of them must not be behind the end."
            ),
            solution=_VALUES,
            wrong_answers={
                "no guard": _VALUES.replace("if (j >= n) return;\n", ""),
                "one too many": _VALUES.replace("j >= n", "j > n"),
                "adds to dv": _VALUES.replace("dv[j] = sum", "dv[j] += sum"),
                "behind the end": _VALUES.replace("i < min(j + window, n)", "i < j + window"),
                "the keys that query j sees": _VALUES.replace(
                    "int i = j; i < min(j + window, n)",
                    "int i = max(0, j - window + 1); i <= j",
                ),
                "not itself": _VALUES.replace("int i = j;", "int i = j + 1;"),
                "a window too wide": _VALUES.replace("min(j + window,", "min(j + window + 1,"),
                "no window": _VALUES.replace("min(j + window, n)", "n"),
                "its own dy": _VALUES.replace("dy[i]", "dy[j]"),
                "queries and keys swapped": _VALUES.replace("q[i] * k[j]", "q[j] * k[i]"),
                "no soft clip": _VALUES.replace("8.0f * tanhf(q[i] * k[j] / 8.0f)", "q[i] * k[j]"),
                "a square": _VALUES.replace("c * c * c", "c * c"),
                "from each query, with atomics": """int i = blockIdx.x * blockDim.x + threadIdx.x;
if (i >= n) return;
for (int j = max(0, i - window + 1); j <= i; j++) {
    float c = 8.0f * tanhf(q[i] * k[j] / 8.0f);
    atomicAdd(&dv[j], scale * c * c * c * dy[i]);
}""",
            },
            cheats={
                "one thread": _ONE_THREAD
                + """for (int j = 0; j < n; j++) {
    float sum = 0.0f;
    for (int i = j; i < min(j + window, n); i++) {
        float c = 8.0f * tanhf(q[i] * k[j] / 8.0f);
        sum += scale * c * c * c * dy[i];
    }
    dv[j] = sum;
}""",
            },
            data=_poly_values_case,
        ),
    ]
}
