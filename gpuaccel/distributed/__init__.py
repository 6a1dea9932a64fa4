"""Several ranks: how they find each other, sum their gradients and fail.

config (ga.Distributed), collectives (torch.distributed's, with one kind of error), rendezvous and
heartbeat (the group, and who is behind), spawn (ga.launch), agreement (what all ranks have in
common), buckets, reducer (buckets while backward runs), ordered (micro-batches in
global order), light_gradients (gradients of compiled backwards), p2p (all-reduce by peer-to-peer
copies), zero1 (sharded optimizer state), nonfinite (whose gradient is not
finite), plan (a step on N GPUs, predicted)."""

from .collectives import gather_objects
from .config import Distributed
from .ordered import OrderedReducer
from .reducer import Reducer, Totals
from .spawn import RankBackend, launch

__all__ = [
    "Distributed",
    "OrderedReducer",
    "RankBackend",
    "Reducer",
    "Totals",
    "launch",
    "gather_objects",
]
