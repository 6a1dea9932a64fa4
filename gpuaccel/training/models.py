"""Transformers small enough to read: a Llama with the nine tensors per block of the reference system, GPT-2, and one of polynomial attention.

    >>> model = ga.Transformer(ga.preset("tiny"))            # byte tokens, trains on two CPU cores
    >>> model = ga.GPT2(ga.preset("gpt2-124m"))              # or ga.preset(...).build() for each family
    >>> logits = model(tokens)                               # (B, T) int64 -> (B, T, V)
    >>> ga.generate(model, tokens, 100, seed=0)              # (B, T + 100)

Llama's block: x = x + Attention(input_norm(x)), then x = x + down(silu(gate(h)) * up(h)) with h = post_attn_norm(x). Attention is causal,
with rotary positions (Su et al., 2021) and grouped key/value heads (Ainslie et al., 2023). GPT-2's (Radford et al., 2019): positions are
learned (ga.Encoder), LayerNorm and biases, x = x + proj(Attention(qkv(ln_1(x)))), then x = x + down(gelu(up(ln_2(x)))), and the embedding is
the output layer too. Family "poly" has Llama's frame and blocks of x = x + PolyAttention(norm(x)), then x = RichardsGLU(x), whose residual is
inside; positions are in its attention. Shapes: B batch, T time, H hidden, V vocabulary.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn.embedding import Encoder
from ..nn.fused_linear import fused_linears, fused_swiglu
from ..nn.poly_attention import PolyAttention
from ..nn.richards_glu import RichardsGLU


@dataclass(frozen=True)
class Config:
    """Sizes of a model. head_dim defaults to hidden / heads, and heads * head_dim may differ from hidden. family: "llama", "gpt2" (always
    tied) or "poly"; the latter two have as many key/value heads as heads. degree, window: of polynomial attention."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    T: int  # longest sequence
    head_dim: "int | None" = None
    tied: bool = False  # one tensor for embedding and LM head
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    family: str = "llama"
    degree: int = 3
    window: "int | None" = None

    def __post_init__(self):
        if self.head_dim is None:
            if self.hidden % self.heads:
                raise ArgumentError(
                    f"hidden is {self.hidden}, not a multiple of heads = {self.heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads}, not a multiple of kv_heads = {self.kv_heads}"
            )
        if self.head_dim % 2 and self.family == "llama":
            raise ArgumentError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        if self.family not in ("llama", "gpt2", "poly"):
            raise ArgumentError(f"family is {self.family!r}; expected llama, gpt2 or poly")
        if self.family == "poly" and (
            self.kv_heads != self.heads or self.heads * self.head_dim != self.hidden
        ):
            raise ArgumentError(
                f"kv_heads is {self.kv_heads} and head_dim {self.head_dim}; polynomial attention has {self.heads} key/value heads, as many as "
                f"heads, of hidden / heads = {self.hidden / self.heads:g} channels"
            )
        if self.family == "gpt2" and (self.kv_heads != self.heads or not self.tied):
            raise ArgumentError(
                f"kv_heads is {self.kv_heads} and tied {self.tied}; GPT-2 has as many as heads, {self.heads}, and is tied"
            )

    def build(self) -> nn.Module:
        """A GPT2 or a Transformer of these sizes."""
        return (GPT2 if self.family == "gpt2" else Transformer)(self)


PRESETS = {
    "tiny": Config(vocab=256, hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, T=128),
    "llama-350m": Config(
        vocab=32768, hidden=1024, intermediate=4096, layers=24, heads=16, kv_heads=4, T=1024
    ),
    # GPT-2's 50,257 tokens, and 47 rows that fill up a multiple of 128: products are a good deal faster.
    "gpt2-124m": Config(
        vocab=50304,
        hidden=768,
        intermediate=3072,
        layers=12,
        heads=12,
        kv_heads=12,
        T=1024,
        tied=True,
        family="gpt2",
    ),
    "gpt2-xl": Config(
        vocab=50304,
        hidden=1600,
        intermediate=6400,
        layers=48,
        heads=25,
        kv_heads=25,
        T=1024,
        tied=True,
        family="gpt2",
    ),
    "poly-7m": Config(
        vocab=256, hidden=256, intermediate=768, layers=8, heads=8, kv_heads=8, T=512, family="poly"
    ),
}


def preset(name: str, **changes) -> Config:
    """The Config called "tiny", "llama-350m", "gpt2-124m", "gpt2-xl" or "poly-7m", with some fields changed."""
    if name not in PRESETS:
        raise ArgumentError(f"there is no preset {name!r}; presets: {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)


def rotary_table(T: int, head_dim: int, theta: float) -> Tensor:
    """(2, T, head_dim) fp32: the cosines of each position's angles, twice side by side; the sines likewise, the first ones negated."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + head_dim/2]) by its position's angle: (a cos - b sin, b cos + a sin). x: (B, heads, T, head_dim)."""
    cos, sin = table[:, : x.shape[-2]].to(x.dtype).unbind()
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Block(nn.Module):
    """One transformer block: nine weight tensors."""

    FUSED_LINEARS = (
        ("w_q", "w_k", "w_v"),
        ("gate", "up"),
    )  # layers of one input, in the order of registration

    def __init__(self, c: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.input_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.w_q = nn.Linear(c.hidden, q_dim, bias=False)
        self.w_k = nn.Linear(c.hidden, kv_dim, bias=False)
        self.w_v = nn.Linear(c.hidden, kv_dim, bias=False)
        self.w_o = nn.Linear(q_dim, c.hidden, bias=False)
        self.post_attn_norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.gate = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
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
        h = self.post_attn_norm(x)
        return x + self.down(fused_swiglu(h, self.gate, self.up))


class PolyBlock(nn.Module):
    """x = x + PolyAttention(norm(x)), then x = RichardsGLU(x), whose residual is inside."""

    def __init__(self, c: Config):
        super().__init__()
        self.norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.attention = PolyAttention(c.hidden, c.heads, c.degree, c.window, max_positions=c.T)
        self.glu = RichardsGLU(c.hidden, c.intermediate)

    def forward(self, x: Tensor, rope=None) -> Tensor:
        return self.glu(x + self.attention(self.norm(x)))


class Transformer(nn.Module):
    """Families llama and poly: tokens (B, T) int64 -> logits (B, T, V) in the weights' dtype. T up to config.T."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        llama = config.family == "llama"
        self.blocks = nn.ModuleList(
            (Block if llama else PolyBlock)(config) for _ in range(config.layers)
        )
        self.final_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.register_buffer(
            "rope",
            rotary_table(config.T, config.head_dim, config.rope_theta) if llama else None,
            persistent=False,
        )
        for name, p in self.named_parameters():
            if p.dim() == 2 and (
                llama or not name.startswith("blocks.")
            ):  # polynomial attention and RichardsGLU have begun by their own rules
                into_residual = name.endswith(("w_o.weight", "down.weight"))
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02
                )
        if config.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.config.T:
            raise ArgumentError(
                f"tokens have T = {tokens.shape[-1]}, the model was made for T up to {self.config.T}"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rope)
        return self.lm_head(self.final_norm(x))


class GPT2Block(nn.Module):
    """One block of GPT-2: twelve tensors."""

    def __init__(self, c: Config):
        super().__init__()
        self.head_dim, width = c.head_dim, c.heads * c.head_dim
        self.ln_1 = nn.LayerNorm(c.hidden, eps=c.norm_eps)
        self.qkv = nn.Linear(c.hidden, 3 * width)
        self.proj = nn.Linear(width, c.hidden)
        self.ln_2 = nn.LayerNorm(c.hidden, eps=c.norm_eps)
        self.up = nn.Linear(c.hidden, c.intermediate)
        self.down = nn.Linear(c.intermediate, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.ln_1(x)).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        )  # each (B, heads, T, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V) in the weights' dtype. T up to config.T."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.vocab, config.hidden, config.T)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        for name, p in self.blocks.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(
                    p,
                    std=0.02 / math.sqrt(2 * config.layers)
                    if name.endswith(("proj.weight", "down.weight"))
                    else 0.02,
                )
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.lm_head.weight = self.encoder.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))


def flops_per_token(config: Config, T: int) -> int:
    """Floating-point operations of forward and backward per token, for utilisation: 6 per weight of every matrix product, and
    12 * layers * q_dim * T for attention (the convention of PaLM, Chowdhery et al., 2022, appendix B; causality not discounted)."""
    c = config
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights = (
        c.layers
        * (
            c.hidden * (2 * q_dim + 2 * kv_dim)
            + (2 if c.family == "gpt2" else 3) * c.hidden * c.intermediate
        )
        + c.vocab * c.hidden
    )
    return 6 * weights + 12 * c.layers * q_dim * T


@torch.no_grad()
def generate(
    model: nn.Module, tokens: Tensor, n: int, *, temperature: float = 0.8, seed: int = 0
) -> Tensor:
    """Continue tokens (B, T) int64, T >= 1, by n sampled ones: (B, T + n). temperature 0 takes the likeliest token.

    Sampling has its own generator, so that the training's random numbers stay as they are."""
    generator = torch.Generator(tokens.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(n):
            logits = model(tokens[:, -model.config.T :])[:, -1].float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
            tokens = torch.cat([tokens, new], dim=1)
    finally:
        model.train(was_training)
    return tokens
