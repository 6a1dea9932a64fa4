"""Operations on plain tensors.

Each module holds the definition in torch, the launches of its file in kernels_cu, and the public
function.
"""

from .accumulate import (
    CHUNK,
    SQUARES_THREADS,
    accumulate_,
    accumulate_each_,
    accumulate_kernel,
    load_accumulate_each,
    span,
)
from .clip import (
    MAX_TENSORS,
    ClipState,
    check_max_norm,
    clip_kernel,
    launch_squares,
    reference_scale,
    tensors_of_launch,
)
from .embedding_backward import (
    add_gradients,
    check_range,
    encoder_backward,
    encoder_kernel,
    launch_forward,
    range_on_host,
    reference_encoder,
)
from .rounding import reference_round
from .token_sort import (
    MAX_TOKENS,
    Segments,
    check_tokens,
    find_segments,
    launch_segments,
    left_out_token,
    reference_segments,
)

__all__ = [
    "CHUNK",
    "ClipState",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "SQUARES_THREADS",
    "Segments",
    "accumulate_",
    "accumulate_each_",
    "accumulate_kernel",
    "add_gradients",
    "check_max_norm",
    "check_range",
    "check_tokens",
    "clip_kernel",
    "encoder_backward",
    "encoder_kernel",
    "find_segments",
    "launch_forward",
    "launch_segments",
    "launch_squares",
    "left_out_token",
    "load_accumulate_each",
    "range_on_host",
    "reference_encoder",
    "reference_round",
    "reference_scale",
    "reference_segments",
    "span",
    "tensors_of_launch",
]
