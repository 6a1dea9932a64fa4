"""The encoder's first two backwards, for benchmarks and tests.

The package itself uses only encoder_backward_v3. Version 1 adds with atomics, so its result differs
from run to run; version 2 needs buckets that the CPU makes.

    buckets, items = reference_buckets(tokens, C, lane=8)
    launch_buckets(dwte, dout, buckets.cuda(), items.cuda())

Source: llm.c's encoder_backward.
"""

import torch
from torch import Tensor

from ..compiler import C_TYPES
from ..ops import encoder_kernel


def reference_buckets(tokens: Tensor, C: int, lane: int) -> tuple[Tensor, Tensor]:
    """llm.c's buckets, made on the CPU: one for each token and group of 32 * lane channels.

    Args:
        tokens: integers, any shape.
        C: channels.
        lane: channels per lane, 16 bytes of dout.

    Returns:
        Buckets and items, both int32. A row of buckets, (n, 4), has first item, number of items,
        token, channel group; items are the rows of all buckets. The fullest bucket stands first;
        equally full ones are ordered by token and group (llm.c leaves that order to an unstable
        sort).
    """
    groups = -(-C // (32 * lane))
    token, row = tokens.reshape(-1).cpu().long().sort(stable=True)
    values, counts = torch.unique_consecutive(token, return_counts=True)
    fullest = counts.argsort(stable=True, descending=True)
    start = (counts.cumsum(0) - counts)[fullest]
    columns = [t.repeat_interleave(groups) for t in (start, counts[fullest], values[fullest])]
    columns.append(torch.arange(groups).repeat(len(values)))
    return torch.stack(columns, 1).int(), row.int()


def launch_atomic(dwte: Tensor, dwpe: Tensor, dout: Tensor, tokens: Tensor):
    """Launch encoder_backward_v1.

    Args:
        dwte, dwpe: (V, C) and (T, C), fp32. dout: (B, T, C). tokens: (B, T). All contiguous.
    """
    macros = dict(TOKEN_T=C_TYPES[tokens.dtype], GRAD_T=C_TYPES[dout.dtype])
    C = dout.shape[-1]
    encoder_kernel("encoder_backward_v1", **macros)[-(-dout.numel() // 256), 256](
        dwte, dwpe, dout, tokens, tokens.numel(), tokens.shape[-1], C, len(dwte)
    )


def launch_buckets(dwte: Tensor, dout: Tensor, buckets: Tensor, items: Tensor):
    """Launch encoder_backward_v2 over buckets that have been copied to the device.

    Args:
        dwte: (V, C), fp32, bf16 or fp16. dout: (rows, C), C channels a multiple of 16 bytes.
    """
    macros = dict(GRAD_T=C_TYPES[dout.dtype], ACC_T=C_TYPES[dwte.dtype])
    encoder_kernel("encoder_backward_v2", **macros)[len(buckets), 256](
        dwte, dout, buckets, items, dout.shape[-1]
    )
