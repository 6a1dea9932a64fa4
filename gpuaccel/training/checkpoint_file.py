"""One checkpoint as a file: safetensors without pickle, verified by sha256 when it is read.

    write_file(path, tensors, step=200, state={"extra": pack(extra, "extra")})
    contents = read_file(path)
    contents.tensors, contents.step, unpack(contents.state["extra"])

The metadata of the safetensors file hold the format, the step, one sha256 per tensor, one over all
of it, and as JSON the state: everything that is no tensor. Any tool that reads safetensors can read
the tensors.
"""

import collections
import hashlib
import json
import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..files import damage, digest, written_aside

FORMAT = "gpuaccel-checkpoint-1"
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


@dataclass(frozen=True)
class Contents:
    """What a verified file holds."""

    tensors: "dict[str, Tensor]"  # may be views of the mapped file: read only
    digests: "dict[str, str]"  # sha256 of each tensor's bytes
    step: int
    state: dict  # JSON; `unpack` restores the values that `pack` made


def describe(tensor: Tensor) -> list:
    """[dtype, shape], such as ["F32", [16, 8]]: equal for tensors that fit each other."""
    return [DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]


# ---- Python values as JSON -----------------------------------------------------------------------


def pack(value, name: str):
    """A JSON value from which `unpack` restores `value`.

    Args:
        value: numbers, strings, lists, tuples, dicts, small tensors, nested.
        name: what to call it in the CheckpointError that is raised for anything else.
    """
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
    if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
        return {"!tensor": [DTYPE_NAMES[value.dtype], value.tolist()]}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which cannot be stored without pickle; "
        "expected numbers, strings, lists, tuples, dicts or tensors"
    )


def unpack(value):
    """The value from which `pack` made this."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "!tensor":
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return torch.tensor(content[1], dtype=dtypes[content[0]])
    if kind == "!tuple":
        return tuple(unpack(item) for item in content)
    items = {unpack(key): unpack(item) for key, item in content}
    return collections.Counter(items) if kind == "!counter" else items


# ---- writing -------------------------------------------------------------------------------------


def _checksum(entries, digests, metadata) -> str:
    """sha256 over all that a file says.

    That is format, step and state, and name, dtype, shape and digest of each tensor."""
    facts = [metadata["format"], metadata["step"], metadata["state"]]
    total = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(digests):
        total.update(json.dumps([name, *entries[name], digests[name]]).encode())
    return total.hexdigest()


def _header(entries, offsets, metadata, digests) -> bytes:
    """The beginning of a safetensors file: the header's length in 8 bytes, then the header."""
    sums = {"digests": json.dumps(digests), "sha256": _checksum(entries, digests, metadata)}
    header: dict = {"__metadata__": {**metadata, **sums}}
    for name, (dtype, shape) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: pathlib.Path, tensors: "dict[str, Tensor]", step: int, state: dict):
    """Write a file aside and rename it to `path`; missing folders are made.

    One pass, with one tensor at a time on the host. The header holds the digests, so it is written
    last, over zeros of its own length.

    Raises:
        CheckpointError: for a tensor that safetensors cannot hold, and for any error of the disk;
            what was at `path` is then untouched.
    """
    metadata = {"format": FORMAT, "step": str(int(step)), "state": json.dumps(state)}
    # Largest elements first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = {}
    offsets = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
                f"expected a dense tensor with data, of one of {', '.join(DTYPE_NAMES.values())}"
            )
        entries[name] = describe(tensor)
        start = end
        end = end + tensor.numel() * tensor.element_size()
        offsets[name] = [start, end]
    digests = {name: "0" * 64 for name in names}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as file:
            file.write(bytes(len(_header(entries, offsets, metadata, digests))))
            for name in names:
                digests[name], data = digest(tensors[name])
                file.write(data)
            file.seek(0)
            file.write(_header(entries, offsets, metadata, digests))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); "
            "what was there before is untouched"
        ) from error


# ---- reading -------------------------------------------------------------------------------------


def _read_safetensors(path: pathlib.Path) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """(tensors, metadata) of a file of this format, not yet verified."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; expected a checkpoint written by save_checkpoint"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {damage(path)} ({error})"
        ) from error
    missing = {"format", "step", "state", "digests", "sha256"} - metadata.keys()
    if missing or metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a checkpoint of this version: its format is "
            f"{metadata.get('format')!r}, expected {FORMAT!r}"
            + (f"; {', '.join(sorted(missing))} is missing" if missing else "")
        )
    return tensors, metadata


def read_file(path: pathlib.Path) -> Contents:
    """Everything in a file, verified.

    Raises:
        CheckpointError: for no such file, one that is not a checkpoint, and one that is damaged;
            the error names the tensor.
    """
    tensors, metadata = _read_safetensors(path)
    try:
        digests = dict(json.loads(metadata["digests"]))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: its list of digests cannot be read ({error})"
        ) from error
    for name in sorted(tensors.keys() | digests.keys()):
        if name not in tensors or name not in digests:
            raise CheckpointError(
                f"{path} is damaged: tensor {name} is missing from its "
                f"{'tensors' if name in digests else 'digests'}"
            )
        sha256 = digest(tensors[name])[0]
        if sha256 != digests[name]:
            raise CheckpointError(
                f"{path} is damaged: tensor {name} has sha256 {sha256}, expected {digests[name]}"
            )
    entries = {name: describe(tensor) for name, tensor in tensors.items()}
    sha256 = _checksum(entries, digests, metadata)
    if sha256 != metadata["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its names, shapes and state have sha256 {sha256}, "
            f"expected {metadata['sha256']}"
        )
    return Contents(tensors, digests, int(metadata["step"]), json.loads(metadata["state"]))
