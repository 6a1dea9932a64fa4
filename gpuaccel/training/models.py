"""Transformers small enough to read: Llama, and one of polynomial attention.

    model = ga.preset("tiny").build()  # byte tokens, trains on two CPU cores
    logits = model(tokens)  # (B, T) int64 -> (B, T, V)
    ga.training.generate(model, tokens, 100, seed=0)  # (B, T + 100)

Family "llama", nine weight tensors per block: x = x + Attention(input_norm(x)), then
x = x + down(silu(gate(h)) * up(h)) with h = post_attn_norm(x). Attention is causal, with rotary
positions (Su et al., 2021) and grouped key/value heads (Ainslie et al., 2023).

Family "poly", the rest as Llama: x = x + PolyAttention(norm(x)), then x = RichardsGLU(x), whose
residual is inside. Positions are in its attention.

Shapes: B batch, T time, H hidden, V vocabulary.
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError, check_choice
from ..nn import PolyAttention, RichardsGLU, fused_linears, fused_swiglu

Family = Literal["llama", "poly"]
# Base of the rotary frequencies.
ROPE_THETA = 10_000.0
# Added to the variance of the norms.
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        vocab: number of tokens, V.
        hidden: channels, H.
        intermediate: width of the feed-forward layer.
        layers: number of blocks.
        heads: of the queries.
        kv_heads: of keys and values, a divisor of heads; family poly: as many as heads.
        T: longest sequence.
        head_dim: default: hidden / heads; heads * head_dim may differ from hidden.
        tied: one tensor for embedding and output layer.
        family: "llama" or "poly".

    Raises:
        ArgumentError: for sizes that do not fit each other.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    T: int
    head_dim: int = 0
    tied: bool = False
    family: Family = "llama"

    def __post_init__(self):
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ArgumentError(
                    f"hidden is {self.hidden}, not a multiple of heads = {self.heads}: give "
                    "head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads}, not a multiple of kv_heads = {self.kv_heads}"
            )
        if self.head_dim % 2 and self.family == "llama":
            raise ArgumentError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        check_choice("family", self.family, Family)
        if self.family == "poly" and self.kv_heads != self.heads:
            raise ArgumentError(
                f"kv_heads is {self.kv_heads}; family poly has {self.heads}, as many as heads"
            )
        if self.family == "poly" and self.heads * self.head_dim != self.hidden:
            raise ArgumentError(
                f"head_dim is {self.head_dim}; family poly has hidden / heads = "
                f"{self.hidden / self.heads:g}"
            )

    def build(self) -> "Transformer":
        """A Transformer of these sizes."""
        return Transformer(self)


Preset = Literal["tiny", "llama-350m", "poly-7m"]
PRESETS: dict[Preset, Config] = {
    "tiny": Config(vocab=256, hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, T=128),
    "llama-350m": Config(
        vocab=32768, hidden=1024, intermediate=4096, layers=24, heads=16, kv_heads=4, T=1024
    ),
    "poly-7m": Config(
        vocab=256, hidden=256, intermediate=768, layers=8, heads=8, kv_heads=8, T=512, family="poly"
    ),
}


def preset(name: Preset, **changes: Any) -> Config:
    """A configuration by its name, with some fields changed.

    Args:
        name: "tiny", "llama-350m" or "poly-7m".
        **changes: field of Config -> value.

    Returns:
        A Config; its build() makes the model.

    Raises:
        ArgumentError: for an unknown name, and for sizes that do not fit each other.

    Example:
        >>> config = ga.preset("tiny", layers=2)
        >>> config.layers, config.hidden, config.vocab
        (2, 128, 256)
        >>> sum(p.numel() for p in config.build().parameters())
        459392
    """
    check_choice("preset", name, Preset)
    return dataclasses.replace(PRESETS[name], **changes)


def rotary_table(T: int, head_dim: int, theta: float = ROPE_THETA) -> Tensor:
    """(2, T, head_dim) fp32: [cos, cos] and [-sin, sin] of each position's angles.

    The frequencies are theta^(-2 i / head_dim), in radians per position."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    cos = angle.cos()
    sin = angle.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x[i], x[i + head_dim/2]) by the angle of its position: it becomes
    (a cos - b sin, b cos + a sin). x: (B, heads, T, head_dim)."""
    cos, sin = table[:, : x.shape[-2]].to(x.dtype).unbind()
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Block(nn.Module):
    """A block of family "llama": nine weight tensors."""

    # Layers with the same input, in the order of registration.
    FUSED_LINEARS = (("w_q", "w_k", "w_v"), ("gate", "up"))

    def __init__(self, c: Config):
        super().__init__()
        self.heads = c.heads
        self.kv_heads = c.kv_heads
        self.head_dim = c.head_dim
        q_dim = c.heads * c.head_dim
        kv_dim = c.kv_heads * c.head_dim
        self.input_norm = nn.RMSNorm(c.hidden, eps=NORM_EPS)
        self.w_q = nn.Linear(c.hidden, q_dim, bias=False)
        self.w_k = nn.Linear(c.hidden, kv_dim, bias=False)
        self.w_v = nn.Linear(c.hidden, kv_dim, bias=False)
        self.w_o = nn.Linear(q_dim, c.hidden, bias=False)
        self.post_attn_norm = nn.RMSNorm(c.hidden, eps=NORM_EPS)
        self.gate = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H). rope: rotary_table of at least T positions."""
        h = self.input_norm(x)
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in fused_linears(h, self.w_q, self.w_k, self.w_v)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, rope),
            rotate(k, rope),
            v,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        x = x + self.w_o(y.transpose(1, 2).flatten(-2))
        return x + self.down(fused_swiglu(self.post_attn_norm(x), self.gate, self.up))


class PolyBlock(nn.Module):
    """A block of family "poly": x = x + PolyAttention(norm(x)), then x = RichardsGLU(x)."""

    def __init__(self, c: Config):
        super().__init__()
        self.norm = nn.RMSNorm(c.hidden, eps=NORM_EPS)
        self.attention = PolyAttention(c.hidden, c.heads, max_positions=c.T)
        self.glu = RichardsGLU(c.hidden, c.intermediate)

    def forward(self, x: Tensor, rope=None) -> Tensor:
        return self.glu(x + self.attention(self.norm(x)))


class Transformer(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, V) in the weights' dtype.

    Args:
        config: sizes and family.

    Source:
        Llama (Touvron et al., 2023); for family poly kernels_cu/richards.cu and
        poly_attention.cu.

    Example:
        >>> model = ga.training.Transformer(ga.preset("tiny", layers=1))
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        llama = config.family == "llama"
        block = Block if llama else PolyBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.hidden, eps=NORM_EPS)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        rope = rotary_table(config.T, config.head_dim) if llama else None
        self.register_buffer("rope", rope, persistent=False)
        for name, p in self.named_parameters():
            # Polynomial attention and RichardsGLU initialise their weights themselves.
            if p.dim() == 2 and (llama or not name.startswith("blocks.")):
                # GPT-2's: smaller where the product is added to the residual stream.
                into_residual = name.endswith(("w_o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.layers) ** (0.5 * into_residual))
        if config.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position.

        Args:
            tokens: (B, T) int64, T up to config.T.

        Returns:
            (B, T, V), in the weights' dtype.

        Raises:
            ArgumentError: for T above config.T.
        """
        if tokens.shape[-1] > self.config.T:
            raise ArgumentError(
                f"tokens have T = {tokens.shape[-1]}, the model was made for T up to "
                f"{self.config.T}"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.lm_head(self.final_norm(x))


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper: names are the same, compiled or not."""
    return getattr(model, "_orig_mod", model)


def flops_per_token(config: Config, T: int) -> int:
    """Floating-point operations of forward and backward per token, for model FLOPs utilisation.

    6 per weight of every matrix product, and 12 * layers * q_dim * T for attention: the convention
    of PaLM (Chowdhery et al., 2022, appendix B), in which a causal mask saves nothing.

    Args:
        config: of the model.
        T: tokens per sequence.
    """
    c = config
    q_dim = c.heads * c.head_dim
    kv_dim = c.kv_heads * c.head_dim
    attention = c.hidden * (2 * q_dim + 2 * kv_dim)
    weights = c.layers * (attention + 3 * c.hidden * c.intermediate) + c.vocab * c.hidden
    return 6 * weights + 12 * c.layers * q_dim * T


@torch.no_grad()
def generate(
    model: nn.Module, tokens: Tensor, n: int, *, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """Continue tokens by sampled ones.

    Args:
        model: a Transformer; it sees the last config.T tokens.
        tokens: (B, T) int64, T >= 1.
        n: how many to add.
        temperature: of the softmax; 0 takes the likeliest token. One below 1e-4 counts as 1e-4, so
            that no quotient overflows. Default: 0.8.
        seed: of a generator of its own, so that torch's random numbers stay as they are.

    Returns:
        (B, T + n) int64.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    config: Any = model.config
    with eval_mode(model):
        for _ in range(n):
            logits = model(tokens[:, -config.T :])[:, -1].float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                scaled = logits / max(temperature, 1e-4)
                new = torch.multinomial(F.softmax(scaled, -1), 1, generator=generator)
            tokens = torch.cat([tokens, new], dim=1)
    return tokens


@contextlib.contextmanager
def eval_mode(model: nn.Module):
    """In the block the model is in eval mode; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
