"""RichardsGLU, PolyAttention and a training step in torch's own operations: what ours is measured against in dispatch.py.

>>> peer = in_torch(copy.deepcopy(layer))                 # the same parameters, the same function
>>> run = TorchStep(config, batch, compiled=True)         # run() takes a step; run.replayed() is the same as a CUDA graph
"""

import torch
import torch.nn.functional as F
from torch import nn

from gpuaccel.backends import backend
from gpuaccel.graphs.capture import recorder_for
from gpuaccel.nn.poly_attention import LEAST_GATE, PolyAttention
from gpuaccel.nn.richards_glu import (
    RichardsCurve,
    RichardsGLU,
    reference_richards,
    reference_values,
)
from gpuaccel.training.step import token_loss

DEVICE, CAPTURABLE = "cuda", {"capturable": True}
EAGER, FOLDED, COMPILED, COMPILED_FOLDED = (
    "torch",
    "torch, folded",
    "torch.compile",
    "torch.compile, folded",
)


class TorchCurve(RichardsCurve):
    """R(x) in torch's operations; in_torch() makes one of ours."""

    folded = True

    def wide(self, x):
        """R(x) in fp32 (fp64)."""
        theta = self.theta.to(torch.promote_types(x.dtype, torch.float32))
        values = reference_values(theta, [*self.fixed.unbind(), self.kinds])
        if not self.folded:
            return reference_richards(x.to(theta.dtype), values, self.tanh, self.birch)
        nu, k, m, beta, T_, a, c, s, b = values.unbind()
        V, k = 2.0 if self.tanh else 1.0, k * nu if self.birch else k
        line = torch.log(beta) - k * (V * b - m) - k * (V * s / T_) * x.to(theta.dtype)
        return a * V * torch.exp(F.softplus(line, threshold=30.0) * (-1.0 / nu)) + (
            c - a if self.tanh else c
        )

    def forward(self, x):
        return self.wide(x).to(x.dtype)


class Gated(nn.Module):
    """x1 R_a(x1) R_g(x2) of (N, 2 hidden), curves in torch."""

    def __init__(self, activation, gate):
        super().__init__()
        self.activation, self.gate = activation, gate

    def forward(self, x):
        x1, x2 = x.chunk(2, -1)
        return (x1 * self.activation.wide(x1) * self.gate.wide(x2)).to(x.dtype)


class TorchGLU(RichardsGLU):
    def forward(self, x):
        return x + self.w_out(Gated.forward(self, self.w_in(x)))


def torch_attention(q_tilde, q, k, v, pe, coefficients, degree=3, window=None):
    """The core in torch, products and elements in the tensors' own dtype: (B, T, H, d) as in reference_poly_attention.

    q PE^T has the differences as columns, the farthest first; a column of zeros in front and other borders of rows shift each row by one more."""
    T = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q_tilde, q, k, v = (t.transpose(1, 2) for t in (q_tilde, q, k, v))
        by_difference = q @ pe[:T].flip(0).t()
        shifted = F.pad(by_difference, (1, 0)).reshape(*q.shape[:2], T + 1, T)[:, :, 1:]
        c = 8.0 * torch.tanh((q_tilde @ k.transpose(-1, -2) + shifted) / 8.0)
        a, b, scale = coefficients.unbind()
        at = torch.arange(T, device=q.device)
        far = at[:, None] - at
        phi = torch.where((far >= 0) & (far < (window or T)), scale * (a * c**degree + b), 0.0)
        return (phi.to(v.dtype) @ v).transpose(1, 2)


class TorchAttention(PolyAttention):
    def forward(self, x):
        q, k, v = self.w_qkv(x).view(*x.shape[:-1], 3, self.heads, -1).unbind(-3)
        y = torch_attention(
            self.query(q), q, k, v, self.pe.to(q.dtype), self.coefficients, self.degree, self.window
        )
        seen = self.w_gate(x)
        e = self.gate(
            self.alpha * seen.to(torch.promote_types(seen.dtype, torch.float32)) + self.beta
        )
        return self.w_out(
            (y * torch.where(e > LEAST_GATE, e, 0.0).to(y.dtype).unsqueeze(-1)).flatten(-2)
        )


def in_torch(module: nn.Module) -> nn.Module:
    """Our layers in it become torch's, in place, with the same parameters."""
    for part in list(module.modules()):
        if type(part) is RichardsCurve:
            # On the device: a number of Python's would be copied there, which cannot be captured.
            part.register_buffer(
                "fixed", torch.tensor(part.setting[:9], device=part.theta.device), persistent=False
            )
            part.kinds, part.tanh = int(part.setting[9]), part.setting[10] != 0
        part.__class__ = {
            RichardsCurve: TorchCurve,
            RichardsGLU: TorchGLU,
            PolyAttention: TorchAttention,
        }.get(type(part), type(part))
    return module


class TorchStep:
    """The whole step in torch: fp32 weights, bf16 autocast, foreach clip, fused AdamW."""

    def __init__(self, config, batch, compiled: bool):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = in_torch(config.build())
        for block in self.model.blocks if compiled else ():
            block.compile(dynamic=False)
        self.batch, self.parameters, self.loss = (
            batch,
            list(self.model.parameters()),
            torch.zeros((), device=DEVICE),
        )
        matrices, others = (
            [p for p in self.parameters if (p.dim() >= 2) == matrix] for matrix in (True, False)
        )
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.opt = torch.optim.AdamW(
            groups,
            lr=torch.tensor(3e-4, device=DEVICE),
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
            **CAPTURABLE,
        )

    def __call__(self):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            total, count = token_loss(self.model, self.batch)
        loss = total / count
        loss.backward()
        self.loss.copy_(loss.detach())
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.opt.step()

    def replayed(self):
        """The same as a CUDA graph."""
        self.opt.zero_grad(set_to_none=True)
        self.recorder = recorder_for(DEVICE, backend().name)
        for _ in range(3):
            self.recorder.run(self)
        self.recording = self.recorder.record(self)[0]
        return self.recording.replay
