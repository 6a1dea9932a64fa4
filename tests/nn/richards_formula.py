"""The Richards curve, written out: what test_richards and test_poly_attention compare with."""

import math

import torch

from gpuaccel.nn.richards_glu import FIXED_VALUES, NAMES, POSITIVE


def exact(x, p):
    """The formula, as it stands in the module's first lines. p: the nine values."""
    nu, k, m, beta, T, a, c, s, b = p
    return a * (1 + beta * torch.exp(-k * nu * (s * x / T + b - m))) ** (-1 / nu) + c


def values_of(curve, theta):
    """The nine values from theta in float64: softplus, or between 0.1 and 10, or as it is."""
    learned, found = iter(theta), []
    for name, fixed in FIXED_VALUES.items():
        z = (
            next(learned)
            if name in curve.learn
            else torch.tensor(fixed, dtype=torch.float64, device=theta.device)
        )
        bounded = name == "T" and name in curve.learn and curve.kinds >> 8 & 3 == 3
        found.append(
            z
            if name not in curve.learn or name not in POSITIVE
            else 0.1 + 9.9 / (1 + torch.exp(-z))
            if bounded
            else torch.log(1 + torch.exp(z))
        )
    return found


def learn(curve, values):
    """Let a curve's theta be that of these values, where they are learned."""
    z = []
    for name, value in zip(NAMES, curve.values().tolist()):
        value = values.get(name, value)
        if name not in curve.learn:
            continue
        if name == "T" and curve.kinds >> 8 & 3 == 3:
            z.append(math.log((value - 0.1) / (10 - value)))
        else:
            z.append(math.log(math.expm1(value)) if name in POSITIVE else value)
    curve.theta.data.copy_(torch.tensor(z))


def close(mine, theirs, bound, what):
    mine, theirs = mine.detach().double().flatten(), theirs.detach().double().flatten()
    off = float((mine - theirs).norm() / theirs.norm().clamp(min=1e-4))
    assert off < bound, (
        f"{what}: off by {off:.3g} of the norm {theirs.norm():.3g};"
        f" largest difference {(mine - theirs).abs().max():.3g}"
    )
