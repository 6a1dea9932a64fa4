"""One checkpoint as a file, or as a folder of shards that the ranks of a run have written:
safetensors without pickle, verified by sha256 when it is read.

    write_file(path, tensors, step=200, state={"extra": pack(extra, "extra")})
    contents = read_checkpoint(path)
    contents.tensor("model.head.weight"), contents.step, contents.state["extra"]

The metadata of a safetensors file hold the format, the step, the sha256 of the whole file, and as
JSON the state: everything that is no tensor. Any tool that reads safetensors can read the tensors.

A folder has a file per rank, and manifest.json with the step, the state, and the sha256 of each
file. A tensor lies whole in one file, or as flat ranges of its elements in several. The files also
have the metadata by which torch.distributed.checkpoint.HuggingFaceStorageReader reads them. The
folder is written by checkpoint_shards.py.

safetensors reads the files and does not write them: its save_file takes all tensors at once, so
that a copy of everything on a GPU would lie in the host's memory.
"""

import bisect
import collections
import contextlib
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, GpuaccelError
from ..files import host_bytes, written_aside

FORMAT = "gpuaccel-checkpoint-2"
SHARDS_FORMAT = "gpuaccel-sharded-checkpoint-2"
MANIFEST = "manifest.json"
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


class Contents:
    """What a verified checkpoint holds."""

    def __init__(self, step: int, state: dict, shapes: dict[str, list] | None = None):
        self.step = step
        # Everything that is no tensor.
        self.state = state
        # Name -> [dtype, shape] of each tensor; `shapes` are those that are stored as flat ranges.
        self.entries: dict[str, list] = dict(shapes or {})
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


def describe(tensor: Tensor) -> list:
    """[dtype, shape], such as ["F32", [16, 8]]: equal for tensors that fit each other."""
    return [DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]


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


def write_file(path: pathlib.Path, tensors: dict[str, Tensor], step: int, state: dict):
    """Write a checkpoint aside and rename it to `path`; missing folders are made.

    After a CheckpointError what was at `path` is untouched."""
    metadata = {"format": FORMAT, "step": str(int(step)), "state": json.dumps(state)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, tensors, metadata)
    except OSError as error:
        raise cannot_be_written(path, error) from error


def cannot_be_written(path: pathlib.Path, error: OSError, who: str = "") -> CheckpointError:
    """For an error of the disk. who: the rank, in front of its error."""
    return CheckpointError(
        f"{path} cannot be written ({who}{error.strerror or error}); "
        "what was there before is untouched"
    )


# ---- writing shards ------------------------------------------------------------------------------


def shard_name(rank: int, ranks: int) -> str:
    """The file of a rank."""
    return f"shard-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def write_shard(path: pathlib.Path, tensors: dict[str, Tensor], firsts: dict[str, int]) -> str:
    """Write one rank's file of a folder; returns its sha256, for the manifest.

    tensors: whole ones, and flat ranges. firsts: of each range its first element in the whole."""
    offsets = {
        name: {"saved_offsets": [firsts[name]] if name in firsts else [0] * tensor.dim()}
        for name, tensor in tensors.items()
    }
    return _write(path, tensors, {"format": SHARDS_FORMAT, TORCH_OFFSETS: json.dumps(offsets)})


def write_manifest(
    folder: pathlib.Path,
    files: dict[str, str],
    step: int,
    state: dict,
    shapes: dict[str, list],
):
    """Write what a folder of shards consists of: the last file of it.

    files: name -> what write_shard returned. shapes: [dtype, shape] of each tensor in ranges."""
    manifest = {
        "format": SHARDS_FORMAT,
        "step": int(step),
        "files": files,
        "shapes": shapes,
        "state": state,
    }
    manifest["sha256"] = _manifest_sha256(manifest)
    with written_aside(folder / MANIFEST) as file:
        file.write(json.dumps(manifest).encode())


def _manifest_sha256(manifest: dict) -> str:
    """Over all but itself."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def _read_safetensors(path: pathlib.Path, expected: str) -> tuple[dict[str, Tensor], dict]:
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
        if metadata.get("format") == SHARDS_FORMAT:
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


def read_file(path: pathlib.Path) -> Contents:
    """Everything in a file, verified."""
    tensors, metadata = _read_safetensors(path, FORMAT)
    with refusing(path):
        _verify(path, metadata)
        state = json.loads(metadata["state"], object_hook=unpack)
        contents = Contents(int(metadata["step"]), state)
        for name, tensor in tensors.items():
            contents.add(name, tensor)
    return contents


# ---- reading shards ------------------------------------------------------------------------------


def _read_manifest(folder: pathlib.Path) -> dict:
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        expected = manifest["sha256"]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint written by "
            "save_checkpoint"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be read ({error})") from error
    sha256 = _manifest_sha256(manifest)
    if sha256 != expected:
        raise CheckpointError(f"{path} is damaged: it has sha256 {sha256}, expected {expected}")
    if manifest.get("format") != SHARDS_FORMAT:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this version: its format is "
            f"{manifest.get('format')!r}, expected {SHARDS_FORMAT!r}"
        )
    return json.loads(text, object_hook=unpack)


def _check_files(folder: pathlib.Path, files: dict[str, str]):
    """The folder has the shards of its manifest, and no other."""
    present = {path.name for path in folder.glob("*.safetensors")}
    for name in sorted(present - files.keys()):
        raise CheckpointError(f"{folder} is damaged: {name} does not belong to it")
    for name in sorted(files.keys() - present):
        raise CheckpointError(f"{folder} is damaged: shard {name} is missing")


def _verify_shard(path: pathlib.Path, sha256: str):
    """Read all of a shard; CheckpointError unless it is the one that the manifest means."""
    _, metadata = _read_safetensors(path, SHARDS_FORMAT)
    _verify(path, metadata)
    if metadata["sha256"] != sha256:
        raise CheckpointError(
            f"{path} is of another checkpoint: it has sha256 {metadata['sha256']}, "
            f"expected {sha256}"
        )


def read_folder(
    folder: pathlib.Path,
    rank: int = 0,
    ranks: int = 1,
    gather: Callable[[str], list[str]] = lambda text: [text],
) -> Contents:
    """Everything in a folder of shards, verified. Of several ranks all raise what one finds.

    rank, ranks: of a group that reads it together: each rank verifies every ranks-th file.
    gather: with several ranks, a collective: a text of each of them."""
    problem = ""
    manifest: dict = {}
    try:
        with refusing(folder):
            manifest = _read_manifest(folder)
            files = manifest["files"]
            _check_files(folder, files)
            for name in sorted(files)[rank::ranks]:
                with refusing(folder / name):
                    _verify_shard(folder / name, files[name])
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in gather(problem) if text]
    if problems:
        raise CheckpointError(problems[0])
    contents = Contents(manifest["step"], manifest["state"], manifest["shapes"])
    with refusing(folder):
        for name in sorted(manifest["files"]):
            tensors, metadata = _read_safetensors(folder / name, SHARDS_FORMAT)
            offsets = json.loads(metadata[TORCH_OFFSETS])
            for key, tensor in tensors.items():
                is_range = key in manifest["shapes"]
                contents.add(key, tensor, offsets[key]["saved_offsets"][0] if is_range else 0)
    return contents


def read_checkpoint(path: pathlib.Path, *group) -> Contents:
    """Everything in a checkpoint, verified: CheckpointError for one that is damaged, or is none.

    path: of a file, or of a folder of shards. group: rank, ranks and gather of read_folder."""
    return read_folder(path, *group) if path.is_dir() else read_file(path)
