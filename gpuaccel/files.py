"""Files that survive a crash: written aside and renamed, verified by a hash when they are read.

>>> with written_aside(path) as file:                  # path has its old content until the block is over
...     file.write(content)
>>> write_entry("cubin", key, content)                 # the cache folder; a full disk costs the cache, not the run
>>> read_entry("cubin", key)                           # None when it is not there, or damaged
"""

import contextlib
import hashlib
import json
import os
import pathlib
import threading

import torch

from .backends import cache_dir

KEPT_ENTRIES = (
    2000  # cached files (2-50 kB each) kept on disk per folder; the least recently written go first
)


def read_entry(folder: str, key: str) -> "bytes | None":
    """What the cache keeps under `key` in one of its folders; None when it is not there, or damaged."""
    root = cache_dir()
    try:
        digest, rest = (root / folder / key).read_bytes().split(b"\n", 1) if root else (b"", b"")
    except (OSError, ValueError):
        return None
    return rest if hashlib.sha256(rest).hexdigest().encode() == digest else None


def write_entry(folder: str, key: str, rest: bytes):
    """Keep `rest` under `key`. A full disk costs the cache, not the run."""
    root = cache_dir()
    if root is None:
        return
    path = root / folder / key
    aside = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(exist_ok=True)
        aside.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(aside, path)
        entries = list(os.scandir(path.parent))
        if len(entries) > KEPT_ENTRIES:
            for old in sorted(entries, key=lambda e: e.stat().st_mtime)[
                : len(entries) - KEPT_ENTRIES
            ]:
                os.unlink(old.path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()


@contextlib.contextmanager
def written_aside(path):
    """`with written_aside(path) as file:` writes to `<path>.tmp-<pid>`; at the end of the block that file is synced and
    renamed to `path`, and the folder synced. On any exception it is removed, and `path` is as it was."""
    path = pathlib.Path(path)
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if os.name != "nt":  # Windows has no handle for a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def digest(tensor):
    """sha256 of a tensor's bytes, and those bytes as a flat uint8 array on the host."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest(), data


def damage(path):
    """In words, why safetensors cannot read a file: the tensor at which it ends too early, if it has a header."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_size = int.from_bytes(file.read(8), "little")
            if size < 8 or header_size > size - 8:
                return f"its header should take {header_size} bytes, the file has {size}"
            header = json.loads(file.read(header_size))
        ends = sorted(
            (8 + header_size + entry["data_offsets"][1], name)
            for name, entry in header.items()
            if name != "__metadata__"
        )
        for end, name in ends:
            if end > size:
                return f"tensor {name} should end at byte {end}, the file has {size}"
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        pass  # the header says nothing useful either
    return "its header is damaged"
