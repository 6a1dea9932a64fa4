"""One checkpoint as a file, or as a folder with a file of each rank: safetensors without pickle,
verified by sha256 when it is read.

    write_file(path, tensors, step=200, state={"extra": pack(extra, "extra")})
    contents = read_checkpoint(path)
    contents.tensor("model.head.weight"), contents.step, contents.state["extra"]

The metadata of a safetensors file hold the format, the sha256 of the whole file, the step, and as
JSON the state: everything that is no tensor. Any tool that reads safetensors can read the tensors.

A folder has a shard of each rank, and a manifest: a file like that of one process, without
tensors, whose state also has the sha256 of each shard. A tensor lies whole in one shard, or as flat
ranges of its elements in several. torch's HuggingFaceStorageReader reads the shards, too.

safetensors reads the files and does not write them: its save_file takes all tensors at once, so
that a copy of everything on a GPU would lie in the host's memory. The writers of
torch.distributed.checkpoint do the same, or write a pickle; neither writes a checksum.
"""

import bisect
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..distributed import gather_objects
from ..errors import CheckpointError, GpuaccelError
from ..files import host_bytes, replace_folder, written_aside

FORMAT = "gpuaccel-checkpoint-3"
SHARD_FORMAT = "gpuaccel-checkpoint-shard-3"
MANIFEST = "manifest.safetensors"
# How a file begins whose sha256 is over itself, with zeros in the place of these 64 digits.
DIGEST = b'{"__metadata__":{"sha256":"'
DIGEST_PLACE = 8 + len(DIGEST)
NO_DIGEST = "0" * 64
# torch's name in a file's metadata for where each tensor's elements begin in the whole tensor.
TORCH_OFFSETS = "DCP_SHARDING_INFO"
# safetensors' names.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class FlatRange(NamedTuple):
    """Elements [first, first + len(data)) of a tensor of this shape, in C order; perhaps none."""

    data: Tensor
    first: int
    shape: torch.Size


class Ranks(NamedTuple):
    """This rank's number, and the ranks that save or load together."""

    rank: int = 0
    world: int = 1
    group: Any = None

    def each(self, action: Callable) -> list:
        """What `action()` returns on each rank. An error of one rank is one on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        words = error and (str(error) or repr(error))
        everyone = gather_objects((result, words), self.group, self.world)
        if error is not None:
            raise error
        for rank, (_, words) in enumerate(everyone):
            if words:
                raise CheckpointError(f"rank {rank}: {words}")
        return [value for value, _ in everyone]


class Contents:
    """What a verified checkpoint holds."""

    def __init__(self, step: int, state: dict):
        self.step = step
        # Everything that is no tensor.
        self.state = state
        # Name -> [dtype, shape] of each tensor.
        self.entries: dict[str, list] = {}
        # Of each tensor, in order: (first element, (n,) elements), a view of the mapped file.
        self._ranges: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, name: str, tensor: Tensor, first: int = 0):
        """Add a whole tensor, or the range of it that begins with element `first`."""
        self.entries.setdefault(name, describe(tensor))
        ranges = self._ranges.setdefault(name, [])
        bisect.insort(ranges, (first, tensor.reshape(-1)), key=lambda r: r[0])

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def elements(self, name: str, first: int, last: int) -> Tensor:
        """(last - first,) elements of a tensor in C order; read only, it may be the mapped file."""
        parts = [
            data[max(first - start, 0) : last - start]
            for start, data in self._ranges[name]
            if start < last and start + len(data) > first
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor; read only, it may be the mapped file."""
        parts = [data for _, data in self._ranges[name]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(self.entries[name][1])


def describe(tensor: Tensor, shape: torch.Size | None = None) -> list:
    """[dtype, shape], such as ["F32", [16, 8]]: equal for tensors that fit each other."""
    shape = tensor.shape if shape is None else shape
    return [DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(shape)]


# ---- Python values as JSON -----------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Stands in the state for a value that is a tensor of the checkpoint, of this name."""

    name: str


def pack(value, name: str):
    """A JSON value from which `unpack` restores `value`: numbers, strings, lists, tuples, dicts,
    small tensors, nested. `name` stands in the CheckpointError for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), name)
    if isinstance(value, list):
        return [pack(item, name) for item in value]
    if isinstance(value, tuple):
        return {"!tuple": [pack(item, name) for item in value]}
    if isinstance(value, dict):
        kind = "!counter" if isinstance(value, collections.Counter) else "!dict"
        items = [[pack(key, name), pack(item, f"{name}[{key!r}]")] for key, item in value.items()]
        return {kind: items}
    if isinstance(value, Stored):
        return {"!stored": value.name}
    if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
        return {"!tensor": [DTYPE_NAMES[value.dtype], value.tolist()]}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be stored without pickle; "
        "expected numbers, strings, lists, tuples, dicts or tensors"
    )


RESTORE: dict[str, Callable] = {
    "!tuple": tuple,
    "!dict": dict,
    "!counter": lambda items: collections.Counter(dict(items)),
    "!stored": Stored,
    "!tensor": lambda content: torch.tensor(content[1], dtype=DTYPES[content[0]]),
}


def unpack(value: dict):
    """The value from which `pack` made this: an object_hook of json.loads."""
    kind = next(iter(value), "")
    return RESTORE[kind](value[kind]) if kind in RESTORE else value


@contextlib.contextmanager
def refusing(path: pathlib.Path):
    """An error that values of an unexpected kind cause in the block becomes a CheckpointError.

    For code that changes nothing. The values of a file whose digest fits are those of another
    version, or of something else that writes such files."""
    try:
        yield
    except GpuaccelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        # RecursionError is a RuntimeError.
        words = str(e) if isinstance(e, ValueError) else repr(e)
        raise CheckpointError(
            f"{path} is damaged: its content is not what save_checkpoint writes ({words})"
        ) from e


# ---- writing -------------------------------------------------------------------------------------


def _write(path: pathlib.Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Write a safetensors file aside and rename it to `path`; returns its sha256.

    One pass, with one tensor at a time on the host. The sha256 in the header is written last."""
    # Largest elements first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict = {"__metadata__": {"sha256": NO_DIGEST, **metadata}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
                f"expected a dense tensor with data, of one of {', '.join(DTYPE_NAMES.values())}"
            )
        dtype, shape = describe(tensor)
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with written_aside(path) as file:

        def put(data):
            total.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little") + text)
        for name in names:
            put(host_bytes(tensors[name]))
        file.seek(DIGEST_PLACE)
        file.write(total.hexdigest().encode())
    return total.hexdigest()


@contextlib.contextmanager
def _explained(path: pathlib.Path):
    """An error of the disk in the block becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); "
            "what was there before is untouched"
        ) from error


def _metadata(step: int, state: dict) -> dict[str, str]:
    return {"format": FORMAT, "step": str(int(step)), "state": json.dumps(state)}


def write_file(path: pathlib.Path, tensors: dict[str, Tensor], step: int, state: dict):
    """Write a checkpoint aside and rename it to `path`; missing folders are made.

    After a CheckpointError what was at `path` is untouched."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, tensors, _metadata(step, state))


def shard_name(rank: int, ranks: int) -> str:
    """The file of a rank."""
    return f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _write_shard(path: pathlib.Path, tensors: dict[str, Tensor | FlatRange]) -> str:
    offsets = {
        name: {"saved_offsets": [t.first] if isinstance(t, FlatRange) else [0] * t.dim()}
        for name, t in tensors.items()
    }
    metadata = {"format": SHARD_FORMAT, TORCH_OFFSETS: json.dumps(offsets)}
    return _write(path, {name: t.data for name, t in tensors.items()}, metadata)


def write_folder(
    path: pathlib.Path,
    tensors: dict[str, Tensor | FlatRange],
    alike: set[str],
    step: int,
    state: dict,
    ranks: Ranks,
):
    """Write a checkpoint with all ranks, into a folder that takes the place of `path`. Collective.

    Each writes its ranges, and its part of the whole tensors that all have alike. The other whole
    tensors are rank 0's. An error is one on all ranks, and leaves what was at `path` untouched.

    Args:
        tensors: of this rank; names in the same order on all.
        alike: names of tensors that are equal on all ranks."""
    mine: dict[str, Tensor | FlatRange] = {}
    sizes = [0] * ranks.world
    for name, t in tensors.items():
        if isinstance(t, FlatRange):
            is_mine = len(t.data) > 0
        else:
            writer = sizes.index(min(sizes)) if name in alike else 0
            sizes[writer] += t.nbytes
            is_mine = writer == ranks.rank
        if is_mine:
            mine[name] = t
    shapes = {n: describe(t.data, t.shape) for n, t in tensors.items() if isinstance(t, FlatRange)}
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")

    def begin():
        with _explained(path):
            if ranks.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        return aside.name

    def write():
        name = shard_name(ranks.rank, ranks.world)
        with _explained(path):
            return name, _write_shard(path.with_name(folder) / name, mine)

    def finish():
        with _explained(path):
            if ranks.rank == 0:
                everything = {**state, "files": files, "shapes": shapes}
                _write(aside / MANIFEST, {}, _metadata(step, everything))
                replace_folder(aside, path)

    try:
        folder = ranks.each(begin)[0]
        files = dict(ranks.each(write))
        ranks.each(finish)
    finally:
        # Left where an error has ended it.
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


# ---- reading -------------------------------------------------------------------------------------


def _open(path: pathlib.Path, expected: str = FORMAT) -> tuple[dict[str, Tensor], dict]:
    """(tensors, metadata) of a file of the format `expected`, not yet verified."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; expected a checkpoint written by save_checkpoint"
        )
    if path.suffix in (".pt", ".pth") or zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a safetensors file; read .pt files by torch.load")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: it is truncated or damaged ({error})"
        ) from error
    if metadata.get("format") != expected:
        hint = ""
        if metadata.get("format") == SHARD_FORMAT:
            hint = f": it is one of several shards; give the folder, {path.parent}"
        raise CheckpointError(
            f"{path} is a safetensors file, but not a checkpoint of this version: its format is "
            f"{metadata.get('format')!r}, expected {expected!r}{hint}"
        )
    return tensors, metadata


def _verify(path: pathlib.Path, metadata: dict[str, str]):
    """Read all of a file; CheckpointError where its sha256 is not the one in its metadata."""
    data = np.memmap(path, mode="r").data
    total = hashlib.sha256(data[:DIGEST_PLACE])
    total.update(NO_DIGEST.encode())
    total.update(data[DIGEST_PLACE + len(NO_DIGEST) :])
    sha256, expected = total.hexdigest(), metadata.get("sha256")
    if sha256 != expected:
        raise CheckpointError(f"{path} is damaged: it has sha256 {sha256}, expected {expected}")


def _read_file(path: pathlib.Path) -> Contents:
    tensors, metadata = _open(path)
    with refusing(path):
        _verify(path, metadata)
        state = json.loads(metadata["state"], object_hook=unpack)
        contents = Contents(int(metadata["step"]), state)
        for name, tensor in tensors.items():
            contents.add(name, tensor)
    return contents


def _verify_shard(path: pathlib.Path, sha256: str):
    """Read all of a shard; CheckpointError unless it is the one that the manifest means."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is damaged: shard {path.name} is missing")
    _, metadata = _open(path, SHARD_FORMAT)
    _verify(path, metadata)
    if metadata["sha256"] != sha256:
        raise CheckpointError(
            f"{path} is of another checkpoint: it has sha256 {metadata['sha256']}, "
            f"expected {sha256}"
        )


def read_checkpoint(path: pathlib.Path, ranks: Ranks = Ranks()) -> Contents:
    """Everything in a checkpoint, verified: CheckpointError for one that is damaged, or is none.

    ranks: those that read a folder together, a collective: each verifies a part of the files."""
    if not path.is_dir():
        return _read_file(path)
    read: list[Contents] = []

    def verify():
        with refusing(path):
            contents = _read_file(path / MANIFEST)
            contents.entries.update(contents.state.pop("shapes"))
            files = contents.state["files"]
            for name in sorted(files)[ranks.rank :: ranks.world]:
                _verify_shard(path / name, files[name])
            read.append(contents)

    ranks.each(verify)
    (contents,) = read
    files = contents.state.pop("files")
    with refusing(path):
        for name in files:
            tensors, metadata = _open(path / name, SHARD_FORMAT)
            offsets = json.loads(metadata[TORCH_OFFSETS])
            for key, tensor in tensors.items():
                contents.add(key, tensor, next(iter(offsets[key]["saved_offsets"]), 0))
    return contents
