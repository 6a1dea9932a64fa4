"""The exercises of notebook 05: a Richards curve, a GLU's gradient, polynomial attention."""

import math

import torch
import torch.nn.functional as F

from .exercises import INDEX, Case, Exercise, kernel_exercise, normal, unwritten, whole_number

FAR = (1000, 4096)  # sizes that have some elements where exp(t) is infinite


def _between(low, high, generator) -> float:
    """A random number as a kernel gets it: rounded to fp32."""
    return float(low + (high - low) * torch.rand((), generator=generator, device=generator.device))


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
        A, B, over_nu, G, H = (
            _between(low, high, generator)
            for low, high in ((-1.0, 1.0), (0.5, 2.0), (0.4, 2.5), (0.5, 2.0), (-0.5, 0.5))
        )
        x, dy = normal(n, generator) * 3, normal(n, generator)
        if n in FAR:
            over_nu, x[::3] = 0.005, x[::3] - 250.0
        wide = x.double().requires_grad_()
        y = wide + wide * (G * torch.exp(-over_nu * F.softplus(A - B * wide, threshold=40.0)) + H)
        (expected,) = torch.autograd.grad(y, wide, dy.double())
        yield (
            f"{n:,}" + (", some t above 88" if n in FAR else ""),
            (dy, x, A, B, over_nu, G, H),
            expected,
        )


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
    expected = torch.zeros(n, dtype=torch.float64, device=q.device)
    for back in range(min(window, n)):  # the key that stands so far before the query
        s = (q[back:].double() * k[: n - back].double()).sum(1) / math.sqrt(d)
        expected[back:] += scale * (8.0 * torch.tanh(s / 8.0)) ** degree * v[: n - back].double()
    return Case(
        unwritten(n, generator),
        (q.flatten(), k.flatten(), v),
        (d, window, degree, scale),
        expected,
        f"{d} channel{'s' * (d > 1)}, window {window}, degree {degree}",
        roundings=64,
    )


def _slope(
    result="dy * (1 + G * sigma + H + x * G * over_nu * B * sigma * r)",
    log="torch.nn.functional.softplus(t)",
    r="torch.sigmoid(t)",
):
    return (
        "def glu_slope(dy, x, A, B, over_nu, G, H):\n    t = A - B * x\n"
        f"    sigma = torch.exp(-over_nu * {log})\n    r = {r}\n    return {result}\n"
    )


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
    for (int c = 0; c < d; c++) s += q[i * d + c] * k[j * d + c];
    float clipped = 8.0f * tanhf(s / sqrtf((float)d) / 8.0f);
    for (int p = 0; p < degree; p++) weight *= clipped;
    sum += weight * v[j];
}
y[i] = sum;"""
)


_CLIP = "8.0f * tanhf(s / sqrtf((float)d) / 8.0f)"


EXERCISES = {
    e.name: e
    for e in [
        kernel_exercise(
            "curve",
            task=(
                "y[i] = G * sigma + H with sigma = (1 + exp(t))^(-over_nu) = exp(-over_nu * L),"
                " t = A - B * x[i], L = ln(1 + exp(t)); right for every t, also where exp(t) is"
                " infinite. One thread per element. Expected: four lines."
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
            stub=INDEX + "// your lines",
            hint=(
                "Above t = 88 exp(t) is infinite in fp32. But ln(1 + exp(t)) = t + ln(1 + "
                "exp(-t)): take max(t, 0) out of the logarithm, and what is left is exp(-|t|), "
                "at most 1. fmaxf, fabsf, expf, log1pf."
            ),
            solution=_CURVE,
            wrong_answers={
                "no guard": _CURVE.replace("if (i >= n) return;\n", ""),
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
            data=_curve_case,
        ),
        Exercise(
            "glu_slope",
            task=(
                "The backward of y = x + x * R(x), R(x) = G * sigma + H, sigma = exp(-over_nu *"
                " ln(1 + exp(t))), t = A - B * x. Return dx, given dy: tensors of any size; the"
                " other arguments are numbers. By hand, without autograd; right where exp(t) is"
                " infinite. What is wrong: the last line."
            ),
            stub=_slope("dy * (x * (G * sigma + H) + 0.75 * x)"),
            hint=(
                "Three terms: y's first x gives 1; the product gives R(x) and x R'(x). R' = G *"
                " dsigma/dx, and dsigma/dx = sigma * (-over_nu) * r * (-B), because the "
                "derivative of ln(1 + exp(t)) is r = exp(t) / (1 + exp(t)) = sigmoid(t)."
            ),
            solution=_slope(),
            wrong_answers={
                "the reference system's": _slope("dy * (x * (G * sigma + H) + 0.75 * x)"),
                "no residual": _slope("dy * (G * sigma + H + x * G * over_nu * B * sigma * r)"),
                "the slope of R alone": _slope("dy * (1 + G * over_nu * B * sigma * r)"),
                "forgets x R'": _slope("dy * (1 + G * sigma + H)"),
                "a logistic's slope": _slope(
                    "dy * (1 + G * sigma + H + x * G * B * sigma * (1 - sigma))"
                ),
                "forgets 1 / nu": _slope("dy * (1 + G * sigma + H + x * G * B * sigma * r)"),
                "the sign of B": _slope(
                    "dy * (1 + G * sigma + H - x * G * over_nu * B * sigma * r)"
                ),
                "forgets H": _slope("dy * (1 + G * sigma + x * G * over_nu * B * sigma * r)"),
                "forgets dy": _slope("1 + G * sigma + H + x * G * over_nu * B * sigma * r"),
                "infinite": _slope(log="torch.log(1 + torch.exp(t))"),
                "infinite over infinite": _slope(r="torch.exp(t) / (1 + torch.exp(t))"),
            },
            cases=_slope_cases,
        ),
        kernel_exercise(
            "poly_row",
            task=(
                "One head of causal polynomial attention, one thread per query: y[i] = sum over"
                " max(0, i - window + 1) <= j <= i of phi * v[j], phi = scale * c^degree, c = 8"
                " tanh(s / 8), s = q_i . k_j / sqrt(d). q, k: (n, d); v: (n). Expected: eight "
                "lines, no softmax."
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
            stub=INDEX + "// your lines",
            hint=(
                "Channel c of query i is q[i * d + c]. Two loops inside of the loop over j: one"
                " adds up the score, one multiplies degree times. The loop begins at max(0, i -"
                " window + 1): in front of position 0 there is nothing."
            ),
            solution=_ROW,
            wrong_answers={
                "no guard": _ROW.replace("if (i >= n) return;\n", ""),
                "sees the next": _ROW.replace("j <= i;", "j <= min(i + 1, n - 1);"),
                "begins in front of 0": _ROW.replace("max(0, i - window + 1)", "i - window + 1"),
                "not itself": _ROW.replace("j <= i;", "j < i;"),
                "a window too wide": _ROW.replace("i - window + 1", "i - window"),
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
                    "sum += weight * v[j];", "sum += expf(clipped) * v[j];"
                ),
                "rows and channels swapped": _ROW.replace("k[j * d + c]", "k[c * (n / d) + j / d]"),
            },
            data=_poly_row_case,
        ),
    ]
}
