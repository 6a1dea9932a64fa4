"""Modules: embedding, richards_glu, poly_attention, lora, and linear layers whose weight gradient
is added straight into an arena (fused_linear)."""

from .embedding import Embedding, Encoder, deterministic_embeddings, fuse_embedding, invalid_tokens
from .fused_linear import (
    FrozenLinear,
    FusedForward,
    FusedLinear,
    GradientUse,
    Joint,
    Rows,
    fuse_linear,
    fused_forward,
    fused_linears,
    fused_rotary,
    fused_swiglu,
    has_class_forward,
    parameter_use,
    register_slice,
    unregister_slice,
)
from .lora import LoRALinear, check_settings, frozen_state_dict, linear_features
from .poly_attention import PolyAttention, poly_attention, reference_poly_attention
from .richards_glu import DEFAULTS, LEAST, NAMES, RichardsCurve, RichardsGLU, reference_richards

__all__ = [
    "DEFAULTS",
    "Embedding",
    "Encoder",
    "FrozenLinear",
    "FusedForward",
    "FusedLinear",
    "GradientUse",
    "Joint",
    "LEAST",
    "LoRALinear",
    "NAMES",
    "PolyAttention",
    "RichardsCurve",
    "RichardsGLU",
    "Rows",
    "check_settings",
    "deterministic_embeddings",
    "frozen_state_dict",
    "fuse_embedding",
    "fuse_linear",
    "fused_forward",
    "fused_linears",
    "fused_rotary",
    "fused_swiglu",
    "has_class_forward",
    "invalid_tokens",
    "linear_features",
    "parameter_use",
    "poly_attention",
    "reference_poly_attention",
    "reference_richards",
    "register_slice",
    "unregister_slice",
]
