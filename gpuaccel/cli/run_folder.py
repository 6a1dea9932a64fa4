"""The folder of a run: checkpoints, metrics, and run.json, which says what the run is.

`gpuaccel train` writes it and refuses to resume another run; `gpuaccel sample` reads it."""

import json

from ..errors import CheckpointError
from ..files import written_aside
from ..training import latest_checkpoint

# The options that decide a run's numbers: a resumed run must have the same.
RUN_OPTIONS = ("model", "text", "batch", "seq", "micro_batches", "accumulate", "lr", "seed")


def default_folder(model: str) -> str:
    """Where a run of this preset is written unless --out says otherwise."""
    return f"runs/{model}"


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


def open_run(folder, description, resume, write=True):
    """Make a run's folder, or check that a resumed run is the one that the folder holds.

    description: what run.json keeps, RUN_OPTIONS among it. write: False on ranks that only check.
    Raises CheckpointError for a run that would be started over or resumed as another one."""
    run_file = folder / "run.json"
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None and not resume:
        raise CheckpointError(
            f"{folder} already holds a run ({checkpoint.name}): --resume goes on with it, "
            "--out takes another folder"
        )
    if checkpoint is not None:
        previous = read_description(run_file)
        changed = [
            f"--{name.replace('_', '-')} was {previous.get(name)}, now {description[name]}"
            for name in RUN_OPTIONS
            if previous.get(name) != description[name]
        ]
        if changed:
            raise CheckpointError(
                f"{folder} holds another run and cannot be resumed like this: {'; '.join(changed)}"
            )
    if not write:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_aside(run_file) as file:
            file.write(json.dumps(description, indent=1).encode())
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror}): --out takes another folder"
        ) from error
