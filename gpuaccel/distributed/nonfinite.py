"""Which rank and which tensor brought a gradient that is NaN or infinite.

    search = NonFiniteSearch(config, arena)
    search.probe(bucket)                    # before this rank's gradients are added to others'
    message = search.message()              # one all-reduce adds the messages of all ranks
    search.record(message)                  # the sum, on every rank
    search.last()                         # waits: None, or {"rank": 2, "tensor": "head.weight"}

A probe is a number per chunk that is not finite where the rank's gradient is not: a float64 sum of
its elements or of their squares.
"""

import torch
from torch import Tensor

from ..backends import takes
from ..ops import CHUNK, launch_squares
from ..optim import Arena
from .buckets import Bucket
from .config import Distributed
from .p2p import PeerToPeer


class NonFiniteSearch:
    """This rank's part of the search. Without `config.find_nonfinite_rank` probe() does nothing.

    Args:
        config: of the group.
        arena: of the model.
        p2p: a PeerToPeer, whose kernel looks at the gradients of all ranks; None: each rank probes
            its own.
    """

    def __init__(self, config: Distributed, arena: Arena, p2p: PeerToPeer | None):
        device = arena.device
        self.arena = arena
        self.enabled = config.find_nonfinite_rank
        self.rank, self.world = config.rank, config.world
        # The tensor that a probe belongs to.
        self.tensor_of_row = arena.chunk_to_tensor.long()
        rows = len(self.tensor_of_row)
        # (rows,) float64, and (ranks, rows), not 0 where a rank's gradient is not finite.
        self.probes = torch.zeros(rows, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(1, rows, dtype=torch.bool, device=device)
        # Whether self.nonfinite is of all ranks, or of this one.
        self.sees_all = p2p is not None
        if p2p is not None:
            self.probes, self.nonfinite = p2p.probes, p2p.nonfinite
        # Of each rank: 1 + its first tensor that was not finite, 0 for none.
        self.rank_tensors = torch.zeros(self.world, dtype=torch.int64, device=device)

    def probe(self, bucket: Bucket):
        """Probe this rank's gradients of a bucket."""
        if not self.enabled:
            return
        part = self.arena.grads[bucket.start : bucket.stop]
        probes = self.probes[bucket.start // CHUNK : bucket.stop // CHUNK]
        if takes(self.arena.device):
            launch_squares([part], probes)
        else:
            torch.sum(part.view(-1, CHUNK), 1, dtype=torch.float64, out=probes)

    def collect(self):
        """Between the micro-batches of ordered mode: remember what the probes have found."""
        own = self.rank if self.sees_all else 0
        self.nonfinite[own] |= ~torch.isfinite(self.probes)

    def message(self) -> Tensor:
        """(rows * ranks,) float64: 1 + the first tensor of each rank that was not finite, or 0.

        Each rank writes where the others have zeros, so that a sum over all ranks has everything:
        its own column of the only row, or, where it sees all ranks, the row that has its number."""
        self.collect()
        none = len(self.arena.segments)
        first = torch.where(self.nonfinite != 0, self.tensor_of_row, none).amin(1)
        rows = len(self.nonfinite)
        message = torch.zeros(rows, self.world, dtype=torch.float64, device=self.arena.device)
        mine = message[self.rank] if self.sees_all else message[:, self.rank]
        mine.copy_(torch.where(first < none, first + 1, 0))
        self.nonfinite.zero_()
        return message.view(-1)

    def record(self, messages: Tensor):
        """Keep the first tensor of each rank that the messages name.

        Args:
            messages: message() of all ranks, added up or one behind the other.
        """
        none = len(self.arena.segments) + 1
        tensors = messages.reshape(-1, self.world)
        tensors = torch.where(tensors > 0, tensors.long(), none).amin(0) % none
        self.rank_tensors.copy_(torch.where((tensors > 0).any(), tensors, self.rank_tensors))

    def forget(self):
        """The step was given up."""
        self.nonfinite.zero_()

    def last(self) -> dict | None:
        """{"rank", "tensor"}: the first tensor of the newest non-finite gradient. Waits."""
        pairs = [(number - 1, r) for r, number in enumerate(self.rank_tensors.tolist()) if number]
        if not pairs:
            return None
        tensor, rank = min(pairs)
        return {"rank": rank, "tensor": self.arena.segments[tensor].name}
