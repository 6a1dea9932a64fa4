"""Data-parallel training: several processes ("ranks") with one model each, whose gradients are added up while backward still runs.

    >>> step = ga.TrainStep(model, opt, micro_batches=4, distributed=ga.Distributed())      # in each rank; `torchrun --nproc-per-node 2 train.py`
    >>> out = step(batch)                          # this rank's batch, or None: it has none left; out.loss is the mean over all ranks
    >>> step.ranks.last_nonfinite()                # waits: which rank and tensor brought a gradient that is not finite, or None

The collectives are torch.distributed's (NCCL on GPUs, gloo on CPUs; the GPUs of one machine copy instead: peers.py), over buckets: contiguous ranges of
the arena, whole blocks, in the order in which backward finishes. In the last micro-batch's backward a bucket is sent as soon as its gradients are in, on a
stream of its own; nothing waits for the host. Sums are added, not means: they are divided once, by the tokens of all ranks, so that uneven batches give
the gradient that one process would have had.

Two orders of summation:
  all-reduce  (default) fast; each rank gets the same bits, but how many ranks there are, and what the library does, decides which
  ordered     every micro-batch's gradient is added in global order (micro-batch m of rank r is number m * ranks + r): N ranks with M micro-batches
              give the bits of one rank with N * M. Costs an all-to-all per micro-batch, and memory for one more arena

Source: Li et al., PyTorch Distributed (2020), for buckets; contract C-DDP-001 of entrenar's trainer for what must hold.
"""
import atexit
import datetime
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from .arena import CHUNK, Arena
from .errors import ArgumentError, RankError

DTYPES = (torch.float32, torch.bfloat16)
# One tensor for all ranks; the names are torch 2.13's, which warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
on_beat = None                   # called by beat(); launch.py watches it
last_step = lambda: 0            # the step (of this process, from 1) after which all ranks are asked to stop; 0: none  # noqa: E731
came = 0                         # how often this rank has come to what it does with the others
store = None                     # of a group of gloo's that was made here: where the ranks met, and say how often they came
PIECE = 1 << 22                  # elements that are hashed at once: 32 MB of memory in between


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the arena that is sent at once: elements [start, stop), segments [first, last)."""
    start: int
    stop: int
    first: int
    last: int


def buckets_of(arena: Arena, least_bytes: float) -> "list[Bucket]":
    """Neighbouring blocks of an arena, joined until they have `least_bytes` of fp32; the last one may have less. Blocks are never cut."""
    found, start, first = [], 0, 0
    for block in arena.blocks:
        if 4 * (block.stop - start) >= least_bytes or block.stop == arena.numel:
            found.append(Bucket(start, block.stop, first, block.last))
            start, first = block.stop, block.last
    return [b for b in found if b.stop > b.start] or found[-1:]


def check_alike(mine: "list[tuple[str, str]]", group, world: int):
    """ArgumentError on every rank, naming the first entry (name, value) in which one differs from rank 0."""
    everyone = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            one, two = next((a, b) for a, b in zip_longest(everyone[0], theirs) if a != b)
            if one and two and one[0] == two[0]:
                what = f"{one[0]} is {two[1]} on rank {rank}, and {one[1]} on rank 0"
            else:
                what = f"rank {rank} has {' '.join(two) if two else 'nothing'} where rank 0 has {' '.join(one) if one else 'nothing'}"
            raise ArgumentError(f"the ranks differ: {what}. All have to train the same model in the same way")


def compare(how: "Distributed", arena: Arena, opt, settings: dict):
    """ArgumentError on every rank unless all have the same model, the same optimizer and the same way of working as rank 0."""
    rows = [(s.name, f"{str(p.dtype).removeprefix('torch.')} {list(s.shape)}, weight decay {s.decay}, learning rate x{s.lr_scale:g}")
            for s, p in zip(arena.segments, arena.params)]
    rows += [(name, f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}, not trained") for name, t in _not_trained(arena)]
    rows += [(f"{key} of the optimizer's group {g}", f"{value.tolist() if isinstance(value, Tensor) else value}")
             for g, group in enumerate(opt.param_groups) for key, value in sorted(group.items()) if key not in ("params", "param_names")]
    names = "dtype", "ordered", "sharded", "bucket_mb", "find_unused", "check_every", "blame", "peer_copies"
    choices = [(name, str(getattr(how, name))) for name in names]
    check_alike([("ranks", f"{how.world}"), ("the optimizer", type(opt).__name__), *choices, *settings.items(), *rows], how.group, how.world)


@torch.no_grad()
def broadcast(how: "Distributed", arena: Arena):
    """Every rank gets rank 0's weights, frozen parameters and buffers."""
    if how.world == 1:
        return
    own = arena.weights, arena.bf16_weights
    for t in [*own, *(t.data for _, t in _not_trained(arena))]:
        if t is not None and t.numel():
            home = t if t.is_contiguous() else t.contiguous()
            dist.broadcast(home, group_src=0, group=how.group)
            if home is not t:
                t.copy_(home)
    for t in own:
        if t is not None:
            torch.autograd.graph.increment_version(t)


def _not_trained(arena):
    """(name, tensor) of frozen parameters and buffers."""
    trained = {id(p) for p in arena.params}
    yield from ((name, p) for name, p in arena.module.named_parameters() if id(p) not in trained)
    yield from arena.module.named_buffers()


def weight_hashes(arena: Arena, masters: bool = True) -> Tensor:
    """(S,) int64 on the arena's device, a hash of the bits of each tensor's weights. No wait; the same on every device.

    masters: with the fp32 masters of bf16 weights, and what else is fp32."""
    found = torch.zeros(len(arena.segments), dtype=torch.int64, device=arena.device)
    column = _odd(CHUNK, 0x9E3779B97F4A7C15, arena.device)
    for buffer, kind in ((arena.weights if masters else None, torch.int32), (arena.bf16_weights, torch.int16)):
        for start in range(0, 0 if buffer is None else arena.numel, PIECE):
            piece = buffer[start:start + PIECE].view(kind).view(-1, CHUNK).long()
            first = start // CHUNK
            rows = (piece * column).sum(1) * _odd(len(piece), 0xBF58476D1CE4E5B9, arena.device, first)
            found.index_add_(0, arena.row_tensor[first:first + len(piece)].long(), rows ^ rows >> 29)
    return found


def _odd(count, factor, device, first=0) -> Tensor:
    """(count,) odd int64 numbers, all different: multiples of an odd factor, which wrap around."""
    factor -= 1 << 64 if factor >= 1 << 63 else 0
    return (torch.arange(first, first + count, device=device) * 2 + 1) * factor


class Distributed:
    """How the ranks of a TrainStep work together. Every rank makes one, with the same arguments.

    group: a process group; default: torch.distributed's, which is made from torchrun's environment if there is none yet (NCCL where torch sees a
    GPU, else gloo); without that environment this process is the only rank. dtype: of the sums on their way, torch.float32 or torch.bfloat16 (half
    the bytes; each rank rounds its sum once, and so does each addition). ordered: see this module's first lines. sharded: each rank keeps and updates
    its share of the moments (ga.AdamW over the arena; sharded.py: ZeRO stage 1). bucket_mb: megabytes of fp32 that are worth sending. find_unused: which tensors got a gradient on any rank is found out in every step (on a GPU it waits for it); False: in
    the first step, and from then on one of these without a gradient has a zero one, and another that gets one is an ArgumentError; None: True
    where nothing waits, on CPUs.
    check_every: steps between two comparisons of all weights' bits over all ranks (0: none); on a GPU they are heard of late, without a wait:
    RankError. blame: find out which rank brought a gradient that is not finite (in mode "fused" one more read, beside backward; with peer copies it costs
    nothing). peer_copies: GPUs of one machine add up fp32 sums by copies from memory to memory instead of NCCL's kernels (peers.py); None: where that can
    be done; True: ArgumentError where it cannot; False: NCCL.
    timeout: seconds that a group made here waits for another rank, at its start and in every collective: then RankError, which on CPUs names the rank.
    Copies wait as long, and then end with a CUDA error.
    With gloo such a group listens where MASTER_ADDR is reached from here: on loopback if that is this machine by itself (GLOO_SOCKET_IFNAME: elsewhere).

    A tensor that counts is one of the arena. Frozen parameters and buffers are rank 0's, from the start on; what forward does to buffers later stays
    each rank's own."""

    def __init__(self, *, group=None, dtype: torch.dtype = torch.float32, ordered: bool = False, sharded: bool = False, bucket_mb: float = 32.0,
                 find_unused: "bool | None" = None, check_every: int = 0, blame: bool = True, peer_copies: "bool | None" = None, timeout: float = 600.0):
        if dtype not in DTYPES:
            raise ArgumentError(f"dtype is {dtype}; sums are sent as torch.float32 or torch.bfloat16")
        if ordered and dtype != torch.float32:
            raise ArgumentError(f"dtype is {dtype}; in ordered mode every addition is fp32: expected torch.float32")
        if not bucket_mb > 0:
            raise ArgumentError(f"bucket_mb is {bucket_mb}; expected a positive number of megabytes")
        if check_every < 0:
            raise ArgumentError(f"check_every is {check_every}; expected 0 (never) or a number of steps")
        if group is None and not dist.is_initialized() and "RANK" in os.environ:
            _init_from_environment(timeout)
        self.group, self.dtype, self.ordered, self.sharded, self.bucket_mb = group, dtype, ordered, sharded, bucket_mb
        self.find_unused, self.check_every, self.blame, self.peer_copies, self.timeout = find_unused, check_every, blame, peer_copies, timeout
        there = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(group), dist.get_world_size(group)) if there else (0, 1)
        if self.rank < 0:
            raise ArgumentError("this process is not a member of the group it was given")
        self.backend = str(dist.get_backend(group)) if there else "none"

    @property
    def works(self) -> bool:
        """Is there anything to do? One rank needs no reduction; in ordered mode it adds as many would."""
        return self.world > 1 or self.ordered

    def __repr__(self):
        how = "ordered" if self.ordered else f"all-reduce in {str(self.dtype).removeprefix('torch.')}"
        return f"Distributed(rank {self.rank} of {self.world}, {self.backend}, {how}{', sharded' * self.sharded})"


def _init_from_environment(timeout):
    """As torchrun describes the group; each rank takes the GPU of its local number."""
    absent = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ArgumentError(f"RANK is set, and {' and '.join(absent)} not; expected all of them, as torchrun sets them, or none for one process")
    if not 0 <= int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
        raise ArgumentError(f"RANK is {os.environ['RANK']} and WORLD_SIZE {os.environ['WORLD_SIZE']}; expected a rank from 0 on, below it")
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if nccl:
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise ArgumentError(f"rank {os.environ['RANK']} is number {local} on this machine, which has {gpus} GPU{'s' * (gpus > 1)}: start at most "
                                f"{gpus} rank{'s' * (gpus > 1)} here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on CPUs with gloo")
        torch.cuda.set_device(local)
    address, world = os.environ.get("MASTER_ADDR", ""), os.environ.get("WORLD_SIZE")
    interface = interface_to(address)
    if interface is not None and not nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif interface == loopback() and os.environ.get("LOCAL_WORLD_SIZE") == world:          # elsewhere NCCL knows better
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    global store
    try:
        limit = datetime.timedelta(seconds=timeout)
        place, rank, size = next(dist.rendezvous("env://", timeout=limit))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            place = _corner(place, rank, size, timeout)
        dist.init_process_group("nccl" if nccl else "gloo", store=place, rank=rank, world_size=size, timeout=limit)
        store = None if nccl else dist.PrefixStore("came", place)
        if not nccl:
            atexit.register(_leave)
    except (RuntimeError, ValueError, OSError) as error:
        listens = "" if nccl else f"; this machine listens on {os.environ.get('GLOO_SOCKET_IFNAME') or 'the address of its name'} (GLOO_SOCKET_IFNAME: elsewhere)"
        raise RankError(f"rank {os.environ['RANK']} of {world} found no common start at {address}:{os.environ.get('MASTER_PORT')} within {timeout:g} s: "
                        f"{str(error).splitlines()[0]}{listens}") from error


def _leave():
    """At the process's end. A thread of gloo's may be about to let go of the last collective's tensors, for which it needs the interpreter; one that is
    ending would abort the process. Meanwhile it may have it."""
    time.sleep(0.1)


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_to(address: str) -> "str | None":
    """The network interface through which an address is reached from here, its own interface if it is this machine's; None: not known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, 9))                              # UDP: nothing is sent, the system only finds its way
        own = one.getsockname()[0]
        return loopback() if own.startswith("127.") else next((name for name, found in psutil.net_if_addrs().items() if any(a.address == own for a in found)), None)
    return None


def _corner(shared, rank, world, timeout):
    """Of a store that torchrun keeps over restarts, with the addresses of ranks that are gone, a part that only the ranks of this start know.

    Which restart it is cannot be asked: torchrun counts them on each machine, and not those that another machine began. So each rank brings a word
    of its own, and takes the one of rank 0 that answers to it."""
    word = uuid.uuid4().hex
    if rank:
        shared.set(f"rank {rank} is", word)
        try:
            first = shared.get(f"to {word}").decode()          # waits
        except dist.DistStoreError:
            raise OSError("rank 0 did not come") from None
        shared.set(f"rank {rank} heard {first}", "")
        return dist.PrefixStore(first, shared)
    missing, until = set(range(1, world)), time.monotonic() + timeout
    while missing:
        for other in [r for r in missing if shared.check([f"rank {r} is"])]:
            shared.set(f"to {shared.get(f'rank {other} is').decode()}", word)         # it may have been an earlier start's: asked again
            if shared.check([f"rank {other} heard {word}"]):
                missing.remove(other)
        if missing and time.monotonic() > until:
            raise OSError(f"{ranks_in_words(missing)} did not come")
        time.sleep(0.02 if missing else 0)
    return dist.PrefixStore(word, shared)


def ranks_in_words(ranks) -> str:
    """rank 3; ranks 1 and 3."""
    *few, last = map(str, sorted(ranks))
    return f"ranks {', '.join(few)} and {last}" if few else f"rank {last}"


def beat(steps: int):
    """This rank comes to what it does with all others; with it `steps` steps have come to the end of their backward."""
    global came
    came += 1
    if on_beat is not None:
        on_beat(steps)
    if store is not None:
        with suppress(dist.DistError):
            store.set(f"rank {dist.get_rank()} came", str(came))      # sent, not waited for


def missing() -> "list[int]":
    """After a collective has timed out: the ranks that have not come to it. [] where it cannot be known."""
    found = []

    def ask():
        with suppress(dist.DistError):
            counts = [int(store.get(f"rank {r} came")) if store.check([f"rank {r} came"]) else 0 for r in range(dist.get_world_size())]
            found.extend(r for r, count in enumerate(counts) if count < came)
    if store is not None:
        asking = threading.Thread(target=ask, daemon=True)     # the store's machine may be what is gone: then there is no answer
        asking.start()
        asking.join(2.0)
    return found
