"""RichardsGLU and PolyAttention in torch's operations: the peers of dispatch.py.

>>> peer = in_torch(copy.deepcopy(layer))            # the same parameters, the same function
"""

import torch
import torch.nn.functional as F
from torch import nn

from gpuaccel.nn.poly_attention import LEAST_GATE, PolyAttention, reference_query
from gpuaccel.nn.richards_glu import (
    RichardsCurve,
    RichardsGLU,
    reference_richards,
    reference_values,
)


class TorchCurve(nn.Module):
    """R(x) of a RichardsCurve. folded: with the line in x evaluated once, as our kernel does."""

    def __init__(self, curve: RichardsCurve, folded: bool = True):
        super().__init__()
        self.theta = curve.theta
        self.kinds = curve.kinds
        self.folded = folded

    def wide(self, x):
        """R(x) in fp32 (fp64)."""
        theta = self.theta.to(torch.promote_types(x.dtype, torch.float32))
        values = reference_values(theta, self.kinds)
        if not self.folded:
            return reference_richards(x.to(theta.dtype), values)
        nu, k, m, beta, T, a, c, s, b = values.unbind()
        k = k * nu
        line = torch.log(beta) - k * (b - m) - k * (s / T) * x.to(theta.dtype)
        sigma = torch.exp(F.softplus(line, threshold=30.0) * (-1.0 / nu))
        return a * sigma + c

    def forward(self, x):
        return self.wide(x).to(x.dtype)


class TorchGate(nn.Module):
    """x1 R_a(x1) R_g(x2) of (N, 2 hidden)."""

    def __init__(self, activation: TorchCurve, gate: TorchCurve):
        super().__init__()
        self.activation = activation
        self.gate = gate

    def forward(self, x):
        x1, x2 = x.chunk(2, -1)
        return (x1 * self.activation.wide(x1) * self.gate.wide(x2)).to(x.dtype)


class TorchGLU(nn.Module):
    """A RichardsGLU."""

    def __init__(self, glu: RichardsGLU):
        super().__init__()
        self.w_in = glu.w_in
        self.w_out = glu.w_out
        self.glu = TorchGate(TorchCurve(glu.activation), TorchCurve(glu.gate))

    def forward(self, x):
        return x + self.w_out(self.glu(self.w_in(x)))


def torch_attention(q_tilde, q, k, v, pe, coefficients, degree=3, window=None):
    """The core of PolyAttention, products and elements in the tensors' own dtype.

    Tensors and result are (B, T, H, d) as in reference_poly_attention. The columns of q PE^T are
    differences of positions, the farthest first. A column of zeros in front and another row length
    shift each row by one more."""
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q_tilde, q, k, v = (t.transpose(1, 2) for t in (q_tilde, q, k, v))
        by_difference = q @ pe[:T].flip(0).t()
        shifted = F.pad(by_difference, (1, 0)).reshape(*q.shape[:2], T + 1, T)[:, :, 1:]
        scores = 8.0 * torch.tanh((q_tilde @ k.transpose(-1, -2) + shifted) / 8.0)
        a, b, scale = coefficients.unbind()
        position = torch.arange(T, device=q.device)
        difference = position[:, None] - position
        visible = (difference >= 0) & (difference < (window or T))
        phi = torch.where(visible, scale * (a * scores**degree + b), 0.0)
        return (phi.to(v.dtype) @ v).transpose(1, 2)


class TorchAttention(nn.Module):
    """A PolyAttention. Its query is in torch's operations already, with our curve replaced."""

    def __init__(self, attention: PolyAttention):
        super().__init__()
        self.heads = attention.heads
        self.attention = attention
        attention.curve = TorchCurve(attention.curve)
        attention.gate = TorchCurve(attention.gate)

    @property
    def pe(self):
        return self.attention.pe

    def forward(self, x):
        inner = self.attention
        q, k, v = inner.w_qkv(x).view(*x.shape[:-1], 3, self.heads, -1).unbind(-3)
        pe = inner.pe.to(q.dtype)
        q_tilde = reference_query(q, inner.curve)
        y = torch_attention(q_tilde, q, k, v, pe, inner.coefficients, inner.degree, inner.window)
        seen = inner.w_gate(x)
        seen = seen.to(torch.promote_types(seen.dtype, torch.float32))
        e = inner.gate(inner.alpha * seen + inner.beta)
        kept = torch.where(e > LEAST_GATE, e, 0.0).to(y.dtype)
        return inner.w_out((y * kept.unsqueeze(-1)).flatten(-2))


IN_TORCH = {RichardsGLU: TorchGLU, PolyAttention: TorchAttention}


def in_torch(module: nn.Module) -> nn.Module:
    """The module with torch's operations for our layers, on the same parameters.

    Layers inside of a module are replaced in place."""
    if type(module) in IN_TORCH:
        return IN_TORCH[type(module)](module)
    for name, child in module.named_children():
        setattr(module, name, in_torch(child))
    return module
