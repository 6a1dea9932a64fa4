"""What all ranks of a run have in common: the model, the weights at the start, the tensors that
take part, and, compared every so many steps, the bits of the weights.

    compare(config, arena, optimizers, settings)   # ArgumentError where a rank differs from rank 0
    broadcast_weights(config, arena)        # rank 0's weights, frozen parameters and buffers
    broadcast(config, buffers)              # rank 0's tensors, by one collective
    weight_hashes(arena)                    # (tensors,) int64: equal for bit-identical weights
"""

from dataclasses import fields
from itertools import zip_longest

import torch
from torch import Tensor

from ..errors import ArgumentError, RankError
from ..measure import LateValue
from ..ops import CHUNK
from ..optim import Arena, DeviceOptimizer
from . import collectives
from .config import Distributed

HASHED_AT_ONCE = 1 << 22  # elements: 32 MB for each temporary
MIXED = 0x1E3779B97F4A7C15  # odd, its bits look random

# Arguments of ga.Distributed that may differ.
OF_RANK = ("group", "timeout")
# Compared of optimizers of ours, beside those of their groups.
OF_OPTIMIZER = ("max_norm", "scope", "on_nonfinite", "stochastic_rounding", "seed")


# ---- the start -----------------------------------------------------------------------------------


def compare(config: Distributed, arena: Arena, optimizers: list, settings: dict[str, str]):
    """ArgumentError on every rank unless all have rank 0's model, optimizers and settings.

    It names the first difference."""
    kinds = ", ".join(type(opt).__name__ for opt in optimizers)
    rows = [("ranks", f"{config.world}"), ("the optimizer", kinds)]
    for field in fields(config):
        if field.init and field.name not in OF_RANK:
            rows.append((field.name, str(getattr(config, field.name))))
    rows += settings.items()
    for opt in optimizers:
        if isinstance(opt, DeviceOptimizer):
            rows += [(f"{name} of the optimizer", str(getattr(opt, name))) for name in OF_OPTIMIZER]
    for segment, p in zip(arena.segments, arena.module_parameters):
        rows.append(
            (
                segment.name,
                f"{_dtype(p)} {list(segment.shape)}, weight decay {segment.decay}, "
                f"learning rate x{segment.lr_scale:g}",
            )
        )
    for name, t in _not_trained(arena):
        rows.append((name, f"{_dtype(t)} {list(t.shape)}, not trained"))
    for g, group in enumerate(group for opt in optimizers for group in opt.param_groups):
        for key, value in sorted(group.items()):
            if key not in ("params", "param_names"):
                value = value.tolist() if isinstance(value, Tensor) else value
                rows.append((f"{key} of the optimizer's group {g}", f"{value}"))
    everyone = collectives.gather_objects(rows, config.group, config.world)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        expected, actual = next((a, b) for a, b in zip_longest(everyone[0], theirs) if a != b)
        if expected and actual and expected[0] == actual[0]:
            difference = f"{actual[0]} is {actual[1]} on rank {rank}, and {expected[1]} on rank 0"
        else:
            difference = (
                f"rank {rank} has {' '.join(actual) if actual else 'nothing'} where rank 0 has "
                f"{' '.join(expected) if expected else 'nothing'}"
            )
        raise ArgumentError(
            f"the ranks differ: {difference}. All have to train the same model in the same way"
        )


@torch.no_grad()
def broadcast_weights(config: Distributed, arena: Arena):
    """Every rank gets rank 0's weights, frozen parameters and buffers."""
    if config.world == 1:
        return
    arena.adopt()
    for t in [arena.weights, arena.bf16_weights, *(t for _, t in _not_trained(arena))]:
        if t is not None and t.numel():
            # One by one: several make a message as large as all of them.
            broadcast(config, [t])
    arena.weights_written()


@torch.no_grad()
def broadcast(config: Distributed, tensors: list[Tensor]):
    """Every rank gets rank 0's values, by one collective.

    Args:
        config: of the group.
        tensors: 1 or more, of any dtypes; of several a copy is sent.
    """
    tensors = [t.data for t in tensors]
    contiguous = [t.contiguous() for t in tensors]
    # gloo and NCCL do not know all dtypes.
    as_bytes = [t.view(-1).view(torch.uint8) for t in contiguous]
    message = torch.cat(as_bytes) if len(as_bytes) > 1 else as_bytes[0]
    collectives.broadcast(message, group_src=0, group=config.group)
    if config.rank == 0:
        return
    if len(as_bytes) > 1:
        torch._foreach_copy_(as_bytes, message.split([len(part) for part in as_bytes]))
    for t, received in zip(tensors, contiguous):
        if received is not t:
            t.copy_(received)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _not_trained(arena: Arena):
    """(name, tensor) of frozen parameters and buffers."""
    trained = {id(p) for p in arena.module_parameters}
    yield from ((name, p) for name, p in arena.module.named_parameters() if id(p) not in trained)
    yield from arena.module.named_buffers()


# ---- the tensors that take part ------------------------------------------------------------------


class UsedTensors:
    """The tensors that got a gradient on any rank. All ranks update exactly these.

    Args:
        every_step: find them again in each step; on a GPU the host waits for that. Otherwise the
            first step decides: later one of these tensors without a gradient has a zero one, and
            another tensor that gets one is an ArgumentError.
    """

    def __init__(self, config: Distributed, arena: Arena, every_step: bool):
        self.config = config
        self.arena = arena
        self.every_step = every_step
        # Whether each tensor takes part; None: not known yet.
        self.taking_part: list[bool] | None = None

    def find(self, mine: list[bool]):
        """Before the first step. mine: whether each tensor gets a gradient on this rank."""
        self.taking_part = self._union(mine)

    def expose(self):
        """After backward: `.grad` of every tensor that takes part is its sum, on every rank."""
        mine = self.arena.gradients.received()
        known = self.taking_part
        if known is None or self.every_step:
            known = self.taking_part = self._union(mine)
        for segment, is_mine, is_known in zip(self.arena.segments, mine, known):
            if is_mine and not is_known:
                raise ArgumentError(
                    f"rank {self.config.rank}: {segment.name} got a gradient, and in the first "
                    "step it got none on any rank. The first step decides which tensors take part, "
                    "so that later steps need not wait. Instead: ga.Distributed(find_unused=True)"
                )
        self.arena.gradients.set(known)

    def _union(self, mine: list[bool]) -> list[bool]:
        """Whether it is true on any rank. Waits for the device."""
        device = self.arena.device
        if self.config.world == 1:
            return mine
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "find_unused=True finds the tensors that get a gradient in every step, which a "
                "CUDA graph cannot wait for; expected replay='eager', or find_unused=False"
            )
        bits = torch.tensor(mine, dtype=torch.int32, device=device)
        collectives.all_reduce(bits, op=torch.distributed.ReduceOp.MAX, group=self.config.group)
        return [bool(bit) for bit in bits.tolist()]


# ---- the weights' bits ---------------------------------------------------------------------------


def weight_hashes(arena: Arena, masters: bool = True) -> Tensor:
    """A hash of the bits of each tensor's weights, equal on every device. No host synchronisation.

    Args:
        masters: include `arena.weights`: fp32 parameters, and the fp32 masters of bf16 parameters.

    Returns:
        (tensors,) int64 on the arena's device.
    """
    hashes = torch.zeros(len(arena.segments), dtype=torch.int64, device=arena.device)
    buffers = [(arena.weights, torch.int32)] if masters else []
    if arena.bf16_weights is not None:
        buffers.append((arena.bf16_weights, torch.int16))
    for buffer, integer in buffers:
        for start in range(0, arena.numel, HASHED_AT_ONCE):
            bits = buffer[start : start + HASHED_AT_ONCE].view(integer).long()
            # Odd: no product with the difference of two elements is 0, modulo 2**64.
            factors = torch.arange(start, start + len(bits), device=arena.device) * MIXED
            bits *= factors ^ factors >> 31 | 1
            first = start // CHUNK
            tensors = arena.chunk_to_tensor[first : first + len(bits) // CHUNK].long()
            hashes.index_add_(0, tensors, bits.view(-1, CHUNK).sum(1))
    return hashes


class WeightCheck:
    """Compares the weights' bits over all ranks every `config.check_every` steps.

    On a GPU the result arrives in a later step, so that the host does not wait."""

    def __init__(self, config: Distributed, arena: Arena, masters: bool):
        self.config = config
        self.arena = arena
        self.masters = masters
        self.result = LateValue()  # 0: all equal; else 1 + rank * tensors + tensor

    def after_step(self, step: int):
        """RankError when a comparison whose result has arrived found a difference."""
        if self.config.world == 1 or not self.config.check_every:
            return
        if step % self.config.check_every == 0:
            mine = weight_hashes(self.arena, self.masters)
            everyone = mine.new_empty(self.config.world, len(mine))
            collectives.all_gather(everyone.view(-1), mine, group=self.config.group)
            differs = (everyone != everyone[0]).flatten()
            number = torch.arange(1, len(differs) + 1, device=differs.device)
            self.result.put(torch.where(differs, number, 1 << 24).min() % (1 << 24), step)
        result = self.result.get()
        if result:
            rank, tensor = divmod(int(result) - 1, len(self.arena.segments))
            raise RankError(
                f"after step {self.result.tag} the weights of rank {rank} are not those of rank 0: "
                f"{self.arena.segments[tensor].name} is the first tensor that differs. Something "
                "outside of the step has changed it, or the ranks do not compute alike"
            )
