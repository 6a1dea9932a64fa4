"""Memory that all ranks of one machine can read: of GPUs by torch's symmetric memory, of processes
on a CPU by a file without a name that all of them map (Linux).

    memory = shared_memory(numel, {"grads": torch.float32}, device)      # may fail on one rank
    memory.connect(group)                   # collective; may fail on one rank
    memory.connected()                      # when it has failed on none
    memory.buffers["grads"]                 # this rank's
    memory.of_rank("grads", 1)              # rank 1's
    memory.barrier(0, 1000)                 # the ranks have reached this; on a GPU, its stream has
"""

import os
import uuid
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives


class SharedMemory(Protocol):
    """Buffers of equal length on each rank. `buffers`: name -> this rank's."""

    buffers: "dict[str, Tensor]"

    def connect(self, group: "dist.ProcessGroup | None"):
        """Map the other ranks' buffers. Every rank of the group calls it."""

    def connected(self):
        """All ranks have connected."""

    def of_rank(self, name: str, rank: int) -> Tensor:
        """A rank's buffer, as a tensor of this rank's device."""

    def barrier(self, channel: int, milliseconds: int):
        """Wait for the other ranks; on a GPU the current stream does."""


class SymmetricMemory:
    """SharedMemory of GPUs. A rank that waits longer than a barrier's limit ends with a CUDA error.

    Args:
        numel: elements of each buffer.
        dtypes: name -> dtype.
        device: of this rank.
    """

    def __init__(self, numel: int, dtypes: "dict[str, torch.dtype]", device: torch.device):
        import torch.distributed._symmetric_memory as symmetric

        self.buffers = {
            name: symmetric.empty(numel, dtype=dtype, device=device)
            for name, dtype in dtypes.items()
        }

    def connect(self, group):
        import torch.distributed._symmetric_memory as symmetric

        group = group if group is not None else dist.group.WORLD
        # ga.Distributed has made the default group where there was none.
        assert group is not None
        self.handles = {
            name: symmetric.rendezvous(own, group) for name, own in self.buffers.items()
        }

    def connected(self):
        pass

    def of_rank(self, name, rank):
        own = self.buffers[name]
        return self.handles[name].get_buffer(rank, own.shape, own.dtype)

    def barrier(self, channel, milliseconds):
        next(iter(self.handles.values())).barrier(channel, milliseconds)


class FileMemory:
    """SharedMemory of processes on a CPU. The arguments are those of SymmetricMemory.

    The other ranks open a file by its descriptor, so that nothing is left behind, however a rank
    ends. OSError where that is not possible."""

    def __init__(self, numel: int, dtypes: "dict[str, torch.dtype]", device: torch.device):
        if not hasattr(os, "memfd_create"):
            raise OSError("processes share memory on Linux only")
        self.numel, self.dtypes = numel, dtypes
        self.buffers = {}
        # name -> (what the file is called, its path for all processes of this machine)
        self.files: "dict[str, tuple[str, str]]" = {}
        self.descriptors: "list[int]" = []
        for name, dtype in dtypes.items():
            # Another process may have the number that this one has, in another namespace.
            title = f"gpuaccel-{uuid.uuid4().hex}"
            descriptor = os.memfd_create(title)
            self.descriptors.append(descriptor)
            # No memory is an error here, and no signal at a later write.
            os.posix_fallocate(descriptor, 0, max(1, numel * dtype.itemsize))
            self.files[name] = title, f"/proc/{os.getpid()}/fd/{descriptor}"
            self.buffers[name] = self._map(name, *self.files[name])

    def _map(self, name: str, title: str, path: str) -> Tensor:
        if title not in os.readlink(path):
            raise OSError(f"{path} is not the other rank's: these processes see others' numbers")
        return torch.from_file(path, shared=True, size=self.numel, dtype=self.dtypes[name])

    def connect(self, group):
        self.group = group
        everyone = [self.files] * dist.get_world_size(group)
        collectives.gather_objects(everyone, self.files, group=group)
        self.mapped = [
            {name: self._map(name, *file) for name, file in files.items()} for files in everyone
        ]

    def connected(self):
        """The memory lives as long as it is mapped."""
        self._close()

    def _close(self):
        while self.descriptors:
            os.close(self.descriptors.pop())

    __del__ = _close

    def of_rank(self, name, rank):
        return self.mapped[rank][name]

    def barrier(self, channel, milliseconds):
        collectives.barrier(self.group)


def shared_memory(
    numel: int, dtypes: "dict[str, torch.dtype]", device: torch.device
) -> SharedMemory:
    """The kind that a device has; the arguments are those of SymmetricMemory."""
    kind = SymmetricMemory if device.type == "cuda" else FileMemory
    return kind(numel, dtypes, device)
