"""Files that survive a crash: written beside their place and renamed, and read with a checksum.

with written_aside(path) as file:           # path keeps its old content until the block ends
    file.write(content)
from_cache("cubin", key, make, load)        # load(content), which make() returned at some time
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import warnings

import torch

from .backends import cache_dir, may_be_loaded

# Files, most of them of 2 to 50 kB, that the cache keeps per folder. The oldest are removed first.
KEPT_ENTRIES = 2000
# A symbolic link is not followed, and a pipe does not block. Windows has neither flag.
IN_PLACE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def from_cache(folder: str, key: str, make, load):
    """load(content) of an entry; one that is missing or that `load` refuses is made anew.

    Args:
        folder, key: the entry's place in the cache
        make: function that returns the content
        load: function of the content; any exception refuses it
    """
    content = read_entry(folder, key)
    if content is not None:
        # Whatever is wrong with an old entry, a new one replaces it.
        with contextlib.suppress(Exception):
            return load(content)
    content = make()
    write_entry(folder, key, content)
    return load(content)


def read_entry(folder: str, key: str) -> bytes | None:
    """The content of `key` in a folder of the cache.

    None if it is missing or damaged, or if another user can have written it.
    """
    root = cache_dir()
    if root is None:
        return None
    opener = lambda path, flags: os.open(path, flags | IN_PLACE)
    try:
        with open(root / folder / key, "rb", opener=opener) as file:
            # Of the open file: the one under this name may be another one by now.
            if not may_be_loaded(os.fstat(file.fileno())):
                return None
            checksum, content = file.read().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return content if hashlib.sha256(content).hexdigest().encode() == checksum else None


def write_entry(folder: str, key: str, content: bytes):
    """Keep `content` under `key`. Where that fails (a full disk), a warning says so."""
    root = cache_dir()
    if root is None:
        return
    place = root / folder
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        # Its mode is 0600 whatever the umask is.
        handle, aside = tempfile.mkstemp(prefix=".", dir=place)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n")
                file.write(content)
            os.replace(aside, place / key)
        except OSError:
            os.unlink(aside)
            raise
    except OSError as error:
        warnings.warn(
            f"{place} cannot be written ({error.strerror}); the work will be repeated next time",
            stacklevel=4,
        )
        return
    # Another process may remove the same ones.
    with contextlib.suppress(OSError):
        entries = list(os.scandir(place))
        if len(entries) > KEPT_ENTRIES:
            entries.sort(key=lambda entry: entry.stat().st_mtime)
            for old in entries[: len(entries) - KEPT_ENTRIES]:
                os.unlink(old.path)


@contextlib.contextmanager
def written_aside(path):
    """Open a file that replaces `path` at the end of the block.

    The block writes to `<path>.tmp-<pid>`. At its end that file and the folder are synced, and the
    file is renamed. After an exception the file is removed, and `path` is as it was.
    """
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
    _sync_folder(path.parent)


def _sync_folder(path):
    # Windows has no handle for a folder.
    if os.name != "nt":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_folder(aside, path):
    """Rename a folder to `path`, in the place of the folder that may be there.

    A process that is killed in between leaves the old one as `<path>.tmp-0`."""
    aside, path = pathlib.Path(aside), pathlib.Path(path)
    old = _moved_aside(path) if path.is_dir() else None
    os.replace(aside, path)
    _sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove_folder(path):
    """Delete a folder, which is there as a whole or not at all if the process is killed."""
    shutil.rmtree(_moved_aside(pathlib.Path(path)), ignore_errors=True)


def _moved_aside(path):
    old = path.with_name(f"{path.name}.tmp-0")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(path, old)
    return old


def host_bytes(tensor):
    """A tensor's bytes as a flat uint8 array on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
