"""Modules: embedding, richards_glu, poly_attention, lora, and linear layers whose weight gradient
is added straight into an arena (fused_linear, joint_linears)."""

from .embedding import (
    Embedding,
    Encoder,
    FusedEmbedding,
    deterministic_embeddings,
    invalid_tokens,
)
from .fused_forward import FusedForward, Joint, fused_forward, has_class_forward
from .fused_linear import FusedConv1D, FusedLinear
from .gradient_slice import GradientSlice, SlicePart
from .gradient_use import GradientUse, gradient_uses
from .joint_linears import FrozenLinear, fused_linears, fused_rotary, fused_swiglu
from .lora import LoRALinear, check_settings, frozen_state_dict, linear_features
from .poly_attention import PolyAttention, poly_attention, reference_poly_attention
from .richards_glu import (
    DEFAULTS,
    LEAST,
    NAMES,
    RichardsCurve,
    RichardsGLU,
    Variant,
    reference_richards,
)

__all__ = [
    "DEFAULTS",
    "Embedding",
    "Encoder",
    "FrozenLinear",
    "FusedConv1D",
    "FusedEmbedding",
    "FusedForward",
    "FusedLinear",
    "GradientSlice",
    "GradientUse",
    "Joint",
    "LEAST",
    "LoRALinear",
    "NAMES",
    "PolyAttention",
    "RichardsCurve",
    "RichardsGLU",
    "SlicePart",
    "Variant",
    "check_settings",
    "deterministic_embeddings",
    "frozen_state_dict",
    "fused_forward",
    "fused_linears",
    "fused_rotary",
    "fused_swiglu",
    "gradient_uses",
    "has_class_forward",
    "invalid_tokens",
    "linear_features",
    "poly_attention",
    "reference_poly_attention",
    "reference_richards",
]
