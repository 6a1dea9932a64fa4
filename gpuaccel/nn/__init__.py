"""Modules: embedding, richards_glu, poly_attention, and linear layers whose weight gradient
is added straight into an arena (fused_linear)."""

from .embedding import (
    Embedding,
    Encoder,
    FusedEmbedding,
    deterministic_embeddings,
    invalid_tokens,
)
from .fused_forward import FusedForward, Joint, fused_forward, has_class_forward
from .fused_linear import FusedConv1D, FusedLinear, fused_linears, fused_swiglu
from .gradient_slice import GradientSlice, GradientUse, gradient_uses
from .poly_attention import PolyAttention
from .richards_glu import RichardsGLU

__all__ = [
    "Embedding",
    "Encoder",
    "FusedConv1D",
    "FusedEmbedding",
    "FusedForward",
    "FusedLinear",
    "GradientSlice",
    "GradientUse",
    "Joint",
    "PolyAttention",
    "RichardsGLU",
    "deterministic_embeddings",
    "fused_forward",
    "fused_linears",
    "fused_swiglu",
    "gradient_uses",
    "has_class_forward",
    "invalid_tokens",
]
