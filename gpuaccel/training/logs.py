"""Where the numbers of a run go: JSON lines, CSV, TensorBoard, Weights & Biases, a function.

    ga.train(step, batches, 200, log=["run.csv", "tensorboard:runs/a", print])

Each step gives a row, a dict of numbers. It is written once its values have arrived from the
device, in order, so that nothing waits for the device.
"""

import contextlib
import csv
import importlib.util
import io
import json
import os
import pathlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Union

from torch import Tensor

from ..errors import ArgumentError, DataError
from ..files import written_aside
from ..measure import LateValue

# A path, "tensorboard:FOLDER", "wandb:PROJECT", or a function of a row.
Place = Union[str, "os.PathLike[str]", Callable[[dict], Any]]

# What `gpuaccel train` calls the file in its folder.
METRICS_FILE = "metrics.jsonl"
EXPECTED = (
    "expected a path that ends in .jsonl or .csv, tensorboard:FOLDER, wandb:PROJECT, or a function"
)
# The columns of a CSV file; what a run does not measure stays empty.
COLUMNS = (
    "step",
    "loss",
    "val_loss",
    "lr",
    "norm",
    "clipped_norm",
    "tokens",
    "tokens_per_s",
    "seconds",
    "step_ms",
    "mfu",
    "memory_bytes",
)


def check_log(log: "Place | Sequence[Place] | None") -> "list[Place]":
    """The places of a `log` argument as a list.

    Args:
        log: one place or several (see ga.train). Default: none.

    Returns:
        The places, in their order.

    Raises:
        ArgumentError: for another argument, and for a library that is not installed.
    """
    if log is None:
        return []
    places: list = list(log) if isinstance(log, (list, tuple)) else [log]
    for place in places:
        kind = _kind(place)
        if kind not in _SINKS:
            raise ArgumentError(f"log is {place!r}; {EXPECTED}")
        if kind in ("tensorboard", "wandb") and not importlib.util.find_spec(kind):
            raise ArgumentError(
                f"log is {place!r}, and {kind} is not installed: pip install 'gpuaccel[{kind}]'"
            )
    return places


def _kind(place) -> str:
    """The kind of a place, a key of _SINKS; another word for what is none."""
    if callable(place):
        return "function"
    if not isinstance(place, (str, os.PathLike)):
        return ""
    library, _, name = str(place).partition(":")
    return library if name and library in _SINKS else pathlib.Path(place).suffix


class RunLog:
    """The places that the rows of one run go to.

    Args:
        places: as check_log() returns them.
        resumed_step: what a file has up to this step is kept; a resumed run writes the rest again.

    Raises:
        DataError: for a place that cannot be written.
    """

    def __init__(self, places: "list[Place]", resumed_step: int = 0):
        self._pending: "deque[dict]" = deque()
        # LateValues that can be used again
        self._free: "list[LateValue]" = []
        self._sinks: list = []
        try:
            for place in places:
                self._sinks.append(_SINKS[_kind(place)](place, resumed_step))
        except BaseException:
            self.close()
            raise

    def add(self, row: dict):
        """Add one more step.

        Args:
            row: has "step"; tensors with one element, numbers, dicts of numbers; what is None is
                left out.
        """
        self._pending.append(
            {
                name: self._late(value, row["step"]) if isinstance(value, Tensor) else value
                for name, value in row.items()
                if value is not None
            }
        )
        self.flush()

    def _late(self, value: Tensor, step: int) -> LateValue:
        late = self._free.pop() if self._free else LateValue()
        late.put(value, tag=step)
        return late

    def flush(self):
        """Write the rows whose values have arrived. Never waits."""
        while self._pending:
            row = self._pending[0]
            late = {name: value for name, value in row.items() if isinstance(value, LateValue)}
            # get() first: it moves on .tag
            values = {name: value.get() for name, value in late.items()}
            if any(value.tag != row["step"] for value in late.values()):
                return
            self._pending.popleft()
            self._free += late.values()
            for sink in self._sinks:
                sink.write({**row, **values})

    def close(self):
        """Write what has arrived, and close every place."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
            self.flush()


def _scalars(row: dict) -> dict:
    """The numbers of a row behind its step; those of a dict as "stages/forward"."""
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{part}": number for part, number in value.items()})
        elif name != "step":
            flat[name] = value
    return flat


class _File:
    """A text file with a line per step."""

    header = ""

    def __init__(self, path, resumed_step):
        # A link stays one.
        self.path = pathlib.Path(path).expanduser().resolve()
        self.file: "io.TextIOBase | None" = None
        try:
            if self.path.is_dir():
                raise DataError(f"log is {path}, a folder; expected a file")
            text = self.path.read_text() if resumed_step and self.path.is_file() else ""
            # A run that was killed may have left half a line.
            rows = self.read(text[: text.rfind("\n") + 1])
            self.kept = [self.line(row) for row in rows if row["step"] <= resumed_step]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "a").close()
            if not resumed_step:
                self._begin()
        except UnicodeDecodeError:
            raise DataError(
                f"log is {path}, which is no text; expected a log of this run"
            ) from None
        except OSError as error:
            raise DataError(f"log is {path}, which cannot be written: {error.strerror}") from None

    def _begin(self):
        """Drop the rows that are made again. A resumed run does it before its first row: until then
        nothing has taken their place."""
        with written_aside(self.path) as file:
            file.write("".join([self.header, *self.kept]).encode())
        self.file = open(self.path, "a", buffering=1)

    def write(self, row):
        if self.file is None:
            self._begin()
        self.file.write(self.line(row))

    def close(self):
        if self.file is not None:
            self.file.close()


class _JSONLines(_File):
    @staticmethod
    def read(text) -> "list[dict]":
        return read_json_lines(text)

    @staticmethod
    def line(row) -> str:
        return json.dumps(row) + "\n"


class _CSV(_File):
    header = ",".join(COLUMNS) + "\n"

    @staticmethod
    def read(text) -> "list[dict]":
        return read_csv(text)

    @staticmethod
    def line(row) -> str:
        out = io.StringIO()
        csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n").writerow(row)
        return out.getvalue()


def read_json_lines(text: str) -> "list[dict]":
    """The rows of JSON lines.

    Args:
        text: of a .jsonl file that `log` wrote.

    Returns:
        One dict of numbers per step. Lines that are no JSON are left out.
    """
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def read_csv(text: str) -> "list[dict]":
    """The rows of a CSV file with a header.

    Args:
        text: of a .csv file that `log` wrote.

    Returns:
        One dict of numbers per step; empty cells are left out.
    """
    rows = []
    for cells in csv.DictReader(io.StringIO(text)):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row: dict = {
                name: int(cell) if cell.isdecimal() else float(cell)
                for name, cell in cells.items()
                if cell
            }
            row["step"] = int(cells["step"])
            rows.append(row)
    return rows


class _TensorBoard:
    def __init__(self, place, resumed_step):
        from torch.utils.tensorboard import SummaryWriter

        folder = str(place).partition(":")[2]
        # Events of steps that a resumed run takes again are hidden.
        purge = resumed_step + 1 if resumed_step else None
        try:
            self.writer = SummaryWriter(folder, purge_step=purge)
        except OSError as error:
            raise DataError(f"log is {place}, which cannot be written: {error.strerror}") from None

    def write(self, row):
        for name, number in _scalars(row).items():
            self.writer.add_scalar(name, number, row["step"])

    def close(self):
        self.writer.close()


class _Wandb:
    """The run that wandb.init() has begun, or a new one: offline, unless WANDB_MODE is set."""

    def __init__(self, place, resumed_step):
        import wandb

        project = str(place).partition(":")[2]
        self.own = None
        if wandb.run is None:
            mode: Any = os.environ.get("WANDB_MODE", "offline")
            try:
                self.own = wandb.init(project=project, mode=mode)
            except wandb.Error as error:
                raise DataError(f"log is {place}, which wandb refuses: {error}") from None
        self.run = self.own or wandb.run

    def write(self, row):
        self.run.log(_scalars(row), step=row["step"])

    def close(self):
        if self.own:
            self.own.finish()


class _Function:
    def __init__(self, function, resumed_step):
        self.write = function

    def close(self):
        pass


_SINKS: "dict[str, Callable]" = {
    ".jsonl": _JSONLines,
    ".csv": _CSV,
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "function": _Function,
}
