"""torch's dtypes as kernels know them: the C type for a macro, the number for a table of tensors.

Kernel("accumulate", "accumulate_v1", GRAD_T=C_TYPES[torch.bfloat16])  # GRAD_T="bf16"
"""

import torch

C_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "long long",
    torch.int32: "int",
}

# What kernels compute with, and its number in a launch over tensors of several dtypes (clip.cu).
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT_DTYPES = tuple(KINDS)
