"""Memory that processes of one machine share, in the place of GPUs' symmetric memory: a file without
a name that all of them map (Linux)."""

import os

import torch
import torch.distributed as dist


class FileMemory:
    """As p2p.SymmetricMemory, between CPUs."""

    def __init__(self, numel, dtypes, device):
        self.numel, self.dtypes = numel, dtypes
        self.buffers, self.paths, self.descriptors = {}, {}, []
        for name, dtype in dtypes.items():
            descriptor = os.memfd_create("gradients")
            self.descriptors.append(descriptor)
            os.posix_fallocate(descriptor, 0, max(1, numel * dtype.itemsize))
            self.paths[name] = f"/proc/{os.getpid()}/fd/{descriptor}"
            self.buffers[name] = self._map(name, self.paths[name])

    def _map(self, name, path):
        return torch.from_file(path, shared=True, size=self.numel, dtype=self.dtypes[name])

    def connect(self, group):
        self.group = group
        everyone = [self.paths] * dist.get_world_size(group)
        dist.all_gather_object(everyone, self.paths, group=group)
        self.mapped = [
            {name: self._map(name, path) for name, path in paths.items()} for paths in everyone
        ]

    def __del__(self):
        """What is mapped lives longer."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def of_rank(self, name, rank):
        return self.mapped[rank][name]

    def barrier(self, channel, milliseconds):
        dist.barrier(self.group)
