"""Where the tensors of a module lie in an arena's flat buffers.

    segments, blocks = lay_out(module)     # names and shapes only; nothing is allocated

Tensors stand in reverse registration order, which is the order in which backward computes their
gradients. Each is padded with zeros to a multiple of CHUNK elements. So a transformer block, a
reduction bucket and a shard are contiguous ranges, and a chunk never crosses a tensor. A block is
an item of the module's outermost ModuleList or Sequential; parameters outside of these form blocks
of their own. Tied weights appear once, frozen parameters not at all.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops import CHUNK


@dataclass(frozen=True)
class Segment:
    """One tensor's range of the arena. Offsets and counts are in elements.

    Attributes:
        name: of the parameter in the module.
        shape: of the tensor.
        stride: of the tensor: contiguous, or channels_last where the parameter is so.
        numel: elements without padding.
        offset: of the first element, a multiple of CHUNK.
        block: index into arena.blocks.
        decay: whether weight decay applies (matrices, not norms and biases).
        lr_scale: multiplier of the learning rate.
        embedding: whether it is the weight of an nn.Embedding that is not also an output layer.
    """

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    numel: int
    offset: int
    block: int
    decay: bool
    lr_scale: float
    embedding: bool

    @property
    def padded(self) -> int:
        """Elements with padding, a multiple of CHUNK."""
        return -(-self.numel // CHUNK) * CHUNK

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor's part of a flat buffer.

        Args:
            buffer: (N,), one of the arena's buffers or one like them.

        Returns:
            A view of the buffer in the tensor's shape and strides, without the padding.
        """
        flat = buffer[self.offset : self.offset + self.numel]
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Block:
    """A contiguous range of the arena, of one block of the module.

    Attributes:
        name: of the block in the module, or of its first and last parameter.
        start: the block's first element.
        stop: the element behind its last one.
        first: index of its first segment.
        last: the index behind that of its last segment.
    """

    name: str
    start: int
    stop: int
    first: int
    last: int


def own_storage(piece: Tensor) -> Tensor:
    """The memory of `piece`, seen through a storage that begins and ends with it.

    Args:
        piece: contiguous or channels_last, any dtype and device.

    Returns:
        A tensor of its shape and strides, with a version counter of its own. It shares the memory
        of `piece` and keeps it alive: a write to one is a write to the other. Code that compares
        storages takes the two for different tensors.
    """
    piece = piece.detach()
    if piece.numel() == 0:
        return torch.empty_like(piece)
    flat = piece.as_strided((piece.numel(),), (1,))
    flat = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))
    return flat.as_strided(piece.shape, piece.stride())


def _block_names(module: nn.Module) -> dict[int, str]:
    """id of each parameter in the outermost ModuleLists and Sequentials -> name of its layer."""
    names: dict[int, str] = {}

    def walk(part: nn.Module, prefix: str):
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            for name, item in part.named_children():
                for p in item.parameters():
                    names.setdefault(id(p), f"{prefix}{name}")
        else:
            for name, child in part.named_children():
                walk(child, f"{prefix}{name}.")

    walk(module, "")
    return names


def _stride(p: Tensor) -> tuple[int, ...]:
    """channels_last weights keep their memory format; all others become contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    keeps = p.dim() in formats and p.is_contiguous(memory_format=formats[p.dim()])
    return p.stride() if keeps else torch.empty(p.shape, device="meta").stride()


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of each tensor that an arena holds, in registration order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def lay_out(
    module: nn.Module,
    decay: Callable[[str, nn.Parameter], bool] | None = None,
    lr_scale: Callable[[str, nn.Parameter], float] | None = None,
) -> tuple[list[Segment], list[Block]]:
    """The range of each trainable tensor of `module` in an arena.

    Reads names and shapes only. The arguments are those of Arena."""
    decay = decay or (lambda name, p: p.dim() >= 2)
    lr_scale = lr_scale or (lambda name, p: 1.0)
    block_names = _block_names(module)
    # A tied weight is in this list once per name.
    ids = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    embeddings = {
        id(p)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for p in part.parameters()
        if ids.count(id(p)) == 1
    }
    segments: list[Segment] = []
    blocks: list[Block] = []
    offset = 0
    for block_name, members in itertools.groupby(
        reversed(trainable(module)), key=lambda pair: block_names.get(id(pair[1]))
    ):
        start = offset
        first = len(segments)
        for name, p in members:
            segment = Segment(
                name=name,
                shape=p.shape,
                stride=_stride(p),
                numel=p.numel(),
                offset=offset,
                block=len(blocks),
                decay=bool(decay(name, p)),
                lr_scale=float(lr_scale(name, p)),
                embedding=id(p) in embeddings,
            )
            segments.append(segment)
            offset += segment.padded
        if block_name is None:
            ends = dict.fromkeys([segments[first].name, segments[-1].name])
            block_name = " .. ".join(ends)
        blocks.append(Block(block_name, start, offset, first, len(segments)))
    return segments, blocks
