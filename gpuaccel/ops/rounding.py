"""Stochastic rounding to bf16 and the random bits for it, in torch, as in kernels_cu/common.cuh.

    noise = reference_random_bits(seed, tensor=0, elements=x.numel(), step=1)
    reference_round(x, noise)                            # bf16, unbiased: E[result] = x

Source: Philox (Salmon et al., 2011).
"""

import torch
from torch import Tensor


def reference_random_bits(seed: int, tensor: int, elements: int, step: int) -> Tensor:
    """(elements,) int64: 32 random bits for each element of a tensor. Philox4x32-10.

    They depend on (seed, tensor, element, step) alone, on every machine."""
    mask = 0xFFFFFFFF
    groups = torch.arange(-(-elements // 4))
    x, y = groups & mask, groups >> 32
    z, w = torch.full_like(x, tensor), torch.full_like(x, step)
    low, high = seed & mask, seed >> 32 & mask
    for _ in range(10):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57  # wrap around at 64 bits, which keeps all of them
        x, y, z, w = (b >> 32 & mask) ^ y ^ low, b & mask, (a >> 32 & mask) ^ w ^ high, a & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    return torch.stack([x, y, z, w], 1).flatten()[:elements]


def reference_round(x: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bf16, rounded up with the probability of what is cut off.

    Args:
        x: fp32, any shape.
        noise: 16 random bits per element in an int64.
    """
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    up = (bits + (noise.reshape(x.shape) & 0xFFFF)) >> 16 << 16
    up = torch.where(up > 0x7FFFFFFF, up - (1 << 32), up).int().view(torch.float32)
    return torch.where(torch.isfinite(x), up, x).bfloat16()
