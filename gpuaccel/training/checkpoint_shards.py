"""A checkpoint that the ranks of a sharded run write together: torch.distributed.checkpoint, into
files of ours.

    # on every rank
    save_shards(path, {"model.head.weight": weight, "optim.head.weight.exp_avg": FlatRange(...)},
                step=200, state=state, group=None)

torch plans: tensors that are whole on several ranks are divided among these by size, and that all
ranges together make up each tensor is checked before anything is written. Each rank then writes
its file, one tensor at a time, into a folder beside `path`; no rank receives another one's tensors.
When all have, rank 0 writes the manifest and renames the folder. An error of one rank is an error
of all.

torch's own writers were not taken. FileSystemWriter's `.metadata` is a pickle.
HuggingFaceStorageWriter writes safetensors, but it has a second copy of a rank's whole share in
memory, and writes neither a checksum nor a list of files: where the last shard of a tensor is
missing, its reader takes the tensor for a shorter one. The files are of its format all the same, so
that HuggingFaceStorageReader reads them.
"""

import os
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..distributed import raises_dist_error
from ..errors import CheckpointError
from ..files import replace_folder
from .checkpoint_file import (
    DTYPE_NAMES,
    cannot_be_written,
    shard_name,
    write_manifest,
    write_shard,
)


@dataclass(frozen=True)
class FlatRange:
    """Elements [first, first + len(data)) of a tensor, in C order. Without any this rank has none.

    The methods are torch.distributed.checkpoint's protocol for what is a part of a tensor.

    Attributes:
        data: (n,).
        first: the first element in the whole tensor.
        shape: of the whole tensor.
    """

    data: Tensor
    first: int
    shape: torch.Size

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        if not len(self.data):
            return []
        first, size = torch.Size([self.first]), torch.Size([len(self.data)])
        whole = torch.Size([self.shape.numel()])
        properties = TensorProperties.create_from_tensor(self.data)
        chunk = ChunkStorageMetadata(offsets=first, sizes=size)
        return [
            WriteItem(
                index=MetadataIndex(name, first),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole),
            )
        ]


# What a rank's own part raises arrives as a CheckpointException; other errors are collectives'.
_save = raises_dist_error(dcp.save)


class _Planner(dcp.DefaultSavePlanner):
    """torch's, which also knows the data of a FlatRange."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex):
        value = self.state_dict[index.fqn]
        return value.data if isinstance(value, FlatRange) else value


class _Writer(dcp.StorageWriter):
    """Writes a file per rank into a folder beside `path`, which rank 0 renames at the end."""

    def __init__(self, path: pathlib.Path, values: dict[str, Tensor | FlatRange], step, state):
        self.path = path
        self.step = step
        self.state = state
        self.shapes = {
            name: [DTYPE_NAMES.get(value.data.dtype), list(value.shape)]
            for name, value in values.items()
            if isinstance(value, FlatRange)
        }
        # Of rank 0, while it is there.
        self.aside: pathlib.Path | None = None

    def reset(self, checkpoint_id=None):
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        aside = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        self.aside = aside
        names = [shard_name(rank, len(plans)) for rank in range(len(plans))]
        return [replace(plan, storage_data=(aside.name, name)) for plan, name in zip(plans, names)]

    def write_data(self, plan, planner) -> Future:
        aside, name = plan.storage_data
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        firsts = {
            item.index.fqn: item.index.offset[0]
            for item in plan.items
            if item.index.fqn in self.shapes
        }
        file = self.path.with_name(aside) / name
        sha256 = write_shard(file, tensors, firsts)
        done: Future = Future()
        # A WriteResult has room for a size and for what a writer wants to say.
        done.set_result([WriteResult(MetadataIndex(name), file.stat().st_size, sha256)])
        return done

    def finish(self, metadata, results):
        assert self.aside is not None
        files = {r.index.fqn: r.storage_data for of in results for r in of}
        write_manifest(self.aside, files, self.step, self.state, self.shapes)
        replace_folder(self.aside, self.path)
        self.aside = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


def save_shards(
    path: pathlib.Path,
    values: Mapping[str, Tensor | FlatRange],
    step: int,
    state: dict,
    group: dist.ProcessGroup | None,
):
    """Write one checkpoint with all ranks of a group. Collective: on every rank.

    values: what this rank has: whole tensors, and ranges. The same name is the same tensor on all
    ranks. state: rank 0's is written. A CheckpointError, for any error of one rank, is one on all,
    and what was at `path` is then untouched; DistError where another rank is lost."""
    writer = _Writer(path, dict(values), step, state)
    try:
        _save(dict(values), storage_writer=writer, planner=_Planner(), process_group=group)
    except dcp.api.CheckpointException as error:
        raise _checkpoint_error(path, error) from error
    finally:
        if writer.aside is not None:
            shutil.rmtree(writer.aside, ignore_errors=True)


def _checkpoint_error(path, error: dcp.api.CheckpointException) -> BaseException:
    """The first rank's error in its own words."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, CheckpointError):
        return cause
    if isinstance(cause, OSError):
        return cannot_be_written(path, cause, f"rank {rank}: ")
    return CheckpointError(f"{path} cannot be written (rank {rank}: {cause!r})")
