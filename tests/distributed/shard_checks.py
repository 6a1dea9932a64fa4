"""What ranks run in test_sharded_checkpoints.py: they save, load, fail and die with a sharded
optimizer."""

import contextlib
import os
import signal
from unittest import mock

import rank_checks as checks
import torch
from helpers import FullDisk
from rank_workers import Rank
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpuaccel as ga
from gpuaccel import files
from gpuaccel.distributed.zero1 import ShardedLayout
from gpuaccel.training import checkpoint_file
from gpuaccel.training.checkpoint import checkpoint_path, latest_checkpoint
from gpuaccel.training.checkpoint_file import read_checkpoint

# In a step, over all ranks: of 1, 2, 3 and 4 ranks each has as many.
MICRO_BATCHES = 12


class Wide(checks.Net):
    """With two tensors of several chunks, which the boundaries between ranks cut."""

    def __init__(self, seed=0):
        super().__init__(seed=seed)
        self.up = nn.Linear(checks.WIDTH, 3000, bias=False)
        self.down = nn.Linear(3000, checks.WIDTH, bias=False)

    def forward(self, tokens):
        return super().forward(tokens) + self.head(
            self.down(self.up(self.embedding(tokens)).tanh())
        )


def make_step(rank, low=torch.float32, seed=0, net=Wide):
    """A step in ordered mode, sharded where there are several ranks."""
    config = ga.Distributed(group=rank.group, ordered=True, sharded=True, bucket_mb=0.1)
    return checks.make_step(
        net(seed=seed).to(low), micro_batches=MICRO_BATCHES // rank.ranks, distributed=config
    )


def take_steps(step, rank, ranks, first, last):
    for number in range(first, last):
        mine = range(rank, MICRO_BATCHES, ranks)
        step([checks.micro_batch(number * MICRO_BATCHES + m) for m in mine])


def parts(step):
    return dict(
        model=step.model, optimizer=step.optimizers, arena=step.arena, scheduler=step.schedulers
    )


def save(step, folder, count):
    path = checkpoint_path(folder, count, step.optimizers[0])
    return ga.save_checkpoint(path, step=count, **parts(step))


# ---- memory --------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """`most`: bytes of the memory, at once, that operations have allocated inside of the block."""

    def __init__(self):
        super().__init__()
        self.alive = []
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A tensor of a mapped file begins with a storage, which no operation has allocated.
        before = {
            (t.untyped_storage() if isinstance(t, torch.Tensor) else t)._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, (torch.Tensor, torch.UntypedStorage))
        }
        result = func(*args, **(kwargs or {}))
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in before:
                storage = t.untyped_storage()
                self.alive.append((StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self.alive))
        return result


@contextlib.contextmanager
def watched(step):
    """A note of the block, in which no shard is sent to other ranks: "allocated", Allocations.most,
    "largest", bytes of the largest tensor, "state", of this rank's share, and "counts", of its step
    counts."""
    note = {}
    error = AssertionError("a shard was gathered")
    with (
        mock.patch.object(ShardedLayout, "all_gather", side_effect=error),
        Allocations() as allocations,
    ):
        yield note
    note["allocated"] = allocations.most
    note["largest"] = max(4 * s.numel for s in step.arena.segments)
    note["counts"] = 4 * len(step.arena.segments)
    note["state"] = sum(4 * t.numel() for t in step.optimizers[0].layout.buffers.values())


# ---- saving and resuming -------------------------------------------------------------------------


def save_shares(rank: Rank, low, folder, seed=0):
    """Two steps, a sharded checkpoint, and a whole one by rank 0: the note of the first."""
    with make_step(rank, low, seed) as step:
        step.model.seen.copy_(torch.arange(3) + 10 * rank.rank)
        take_steps(step, rank.rank, rank.ranks, 0, 2)
        with watched(step) as note:
            save(step, folder, 2)
        with step.gathered():
            ga.save_checkpoint(f"{folder}/whole.safetensors", step=2, **parts(step))
        return note


def load_shares(rank: Rank, path):
    """The note of a load, into an optimizer without a state."""
    with make_step(rank, seed=3) as step:
        with watched(step) as note:
            ga.load_checkpoint(path, **parts(step))
        return note


def one_of_a_chain(rank: Rank, step, folder, backend, low):
    """Go on from the newest checkpoint, take a step and save: whether what was loaded is what the
    checkpoint holds."""
    same = True
    with ga.use_backend(backend), make_step(rank, low, seed=step) as run:
        if step:
            newest = latest_checkpoint(folder)
            loaded = ga.load_checkpoint(newest, **parts(run))
            same = loaded["step"] == step and holds(run, read_checkpoint(newest))
        take_steps(run, rank.rank, rank.ranks, step, step + 1)
        save(run, folder, step + 1)
    return same


def holds(step, contents):
    """Whether a step's model and optimizer, gathered, are those of a checkpoint, bit for bit."""
    with step.gathered():
        named = {f"model.{name}": t for name, t in step.model.state_dict().items()}
        named |= {f"master.{name}": t for name, t in step.arena.named_master().items()}
        for name, p in step.arena.named_parameters().items():
            named |= {
                f"optim.{name}.{key}": t for key, t in step.optimizers[0].state.get(p, {}).items()
            }
        stored = {name for name in contents.entries if not name.startswith("rng.")}
        return named.keys() == stored and all(
            torch.equal(tensor, contents.tensor(name)) for name, tensor in named.items()
        )


def end_of_a_chain(rank: Rank, steps, folder, backend, low):
    """Whether the newest checkpoint holds what one process has that took all steps."""
    model = Wide().to(low)
    with ga.use_backend(backend), checks.make_step(model, micro_batches=MICRO_BATCHES) as step:
        take_steps(step, 0, 1, 0, steps)
        return holds(step, read_checkpoint(latest_checkpoint(folder)))


# ---- what must fail ------------------------------------------------------------------------------


def refuse_shares(rank: Rank, path):
    """What is said of a damaged checkpoint. AssertionError where something has changed."""
    with make_step(rank, seed=3) as step:
        take_steps(step, rank.rank, rank.ranks, 0, 1)
        before = [
            t.clone() for t in (step.arena.weights, *step.optimizers[0].layout.buffers.values())
        ]
        try:
            ga.load_checkpoint(path, **parts(step))
        except ga.errors.CheckpointError as error:
            after = (step.arena.weights, *step.optimizers[0].layout.buffers.values())
            assert all(map(torch.equal, before, after))
            return str(error)


def resume_damaged(rank: Rank, folder):
    """What ga.train says of a folder whose newest checkpoint is damaged."""
    with make_step(rank) as step:
        batches = checks.token_batches(rank.rank, rank.ranks)
        try:
            list(ga.train(step, batches, 9, checkpoint_dir=folder, resume=True))
        except ga.errors.CheckpointError as error:
            return str(error)


def full_disk_of_a_rank(rank: Rank, folder):
    """What is said where rank 1 cannot write, over a checkpoint that is there."""
    with make_step(rank) as step:
        save(step, folder, 1)
        take_steps(step, rank.rank, rank.ranks, 0, 1)
        disk = contextlib.nullcontext()
        if rank.rank == 1:
            full = lambda *args: FullDisk(open(*args))  # noqa: E731
            disk = mock.patch.object(files, "open", full, create=True)
        try:
            with disk:
                save(step, folder, 1)
        except ga.errors.CheckpointError as error:
            return str(error)


def train_and_die_in_a_save(folder, who=None, at=None, steps=6):
    """ga.train on ranks of ga.launch, sharded, with a checkpoint after every second step.

    Rank `who` is killed inside of the second one: at the at-th tensor that it writes, or before the
    renaming (at="rename")."""
    config = ga.Distributed(ordered=True, sharded=True, bucket_mb=0.1)
    left = at if isinstance(at, int) else 1
    module, name = checkpoint_file, "host_bytes"
    if at == "rename":
        name = "replace_folder"
    function = getattr(module, name)
    step = checks.make_step(Wide(), micro_batches=4 // config.world, distributed=config)

    def counted(*args):
        nonlocal left
        left -= step.count == 4
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    with step:
        if config.rank == who:
            setattr(module, name, counted)
        batches = checks.token_batches(config.rank, config.world)
        for _ in ga.train(
            step,
            batches,
            steps,
            checkpoint_dir=folder,
            checkpoint_every=2,
            log=f"{folder}/lines.jsonl",
            resume=True,
        ):
            pass
