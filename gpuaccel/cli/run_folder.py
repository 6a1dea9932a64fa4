"""The folder of a run: checkpoints, metrics, and run.json, which says what the run is.

`gpuaccel train` writes it and refuses to resume another run. A lock keeps two commands from writing
to one folder."""

import contextlib
import json
import os
import pathlib

try:
    import fcntl
except ImportError:
    # Windows has none: there nothing is locked.
    fcntl = None  # type: ignore[assignment]

from ..errors import CheckpointError
from ..files import written_aside
from ..training import latest_checkpoint

# The numbers of each step.
METRICS_FILE = "metrics.jsonl"
# torch's generators take more, but the number of an epoch is added.
MAX_SEED = 2**63 - 1
# The options that decide a run's numbers: a resumed run must have the same.
RUN_OPTIONS = ("model", "text", "batch", "seq", "micro_batches", "lr", "seed")


@contextlib.contextmanager
def lock_run(folder: pathlib.Path):
    """In the block this process alone writes to a run's folder.

    The operating system holds the lock, and releases it when the process ends, however it does. A
    folder that is made for it is removed, unless something was written there.
    Raises CheckpointError where another process writes there, or the folder cannot be made."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--out is {folder}, which is a file; expected a folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise CheckpointError(
            f"--out is {folder}, which cannot be written ({error.strerror}); expected a folder "
            "that can"
        ) from error
    try:
        if handle is not None:
            _lock(handle, folder)
        yield
    finally:
        if handle is not None:
            os.close(handle)
        for empty in made:
            with contextlib.suppress(OSError):
                empty.rmdir()


def _lock(handle: int, folder: pathlib.Path):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"--out is {folder}, to which another process is writing; expected a folder that no "
            "other run uses: wait until that one has ended, or take another folder"
        ) from None
    except OSError:
        # A file system without locks.
        pass


def read_description(path):
    """The contents of a run.json."""
    try:
        description = json.loads(path.read_text())
        description["config"]
        return description
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}, which `gpuaccel train` writes for a run, cannot be read: {error!r}"
        ) from None


def check_run(folder, description, resume: bool) -> dict:
    """Check that a resumed run is the one that a folder holds, and that a new one finds none there.

    description: what run.json keeps, RUN_OPTIONS among it.
    Returns the description that the folder has, {} for a new run.
    Raises CheckpointError for a run that would be started over or resumed as another one."""
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return {}
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a run ({checkpoint.name}): --resume continues it; "
            "for a new run give another folder to --out"
        )
    previous = read_description(folder / "run.json")
    changed = [
        f"--{name.replace('_', '-')} was {previous.get(name)}, now {description[name]}"
        for name in RUN_OPTIONS
        if previous.get(name) != description[name]
    ]
    if changed:
        raise CheckpointError(
            f"{folder} holds another run and cannot be resumed like this: {'; '.join(changed)}"
        )
    return previous


def write_run(folder, description):
    """Write a run's run.json; missing folders are made. CheckpointError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_aside(folder / "run.json") as file:
            file.write(json.dumps(description, indent=1).encode())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror}): --out takes another folder"
        ) from error
