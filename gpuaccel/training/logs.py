"""Where the numbers of a run go: a file of JSON lines, or a function.

    ga.train(step, batches, 200, log="run.jsonl")
    ga.train(step, batches, 200, log=rows.append)

Each step gives a row, a dict of numbers. It is written once its values have arrived from the
device, in order, so that nothing waits for the device.
"""

import json
import math
import os
import pathlib
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO, Union

from torch import Tensor

from ..errors import ArgumentError, DataError
from ..files import written_aside
from ..measure import LateValue

# A path that ends in .jsonl, or a function of a row.
Log = Union[str, "os.PathLike[str]", Callable[[dict], Any]]


def check_log(log: Log | None):
    """ArgumentError for a `log` argument that is nothing to write to (see ga.train)."""
    is_path = isinstance(log, (str, os.PathLike)) and pathlib.Path(log).suffix == ".jsonl"
    if not (log is None or callable(log) or is_path):
        raise ArgumentError(
            f"log is {log!r}; expected a path that ends in .jsonl, or a function of a dict"
        )


class RunLog:
    """Writes the rows of one run; DataError for a file that cannot be written.

    resumed_step: what a file has up to this step is kept; a resumed run writes the rest again."""

    def __init__(self, log: Log, resumed_step: int = 0):
        self._pending: deque[dict] = deque()
        # LateValues that can be used again
        self._free: list[LateValue] = []
        self._file = None if callable(log) else _opened(log, resumed_step)
        self._write: Any = log
        if self._file is not None:
            file = self._file
            self._write = lambda row: file.write(json.dumps(row) + "\n")

    def add(self, row: dict):
        """Add one more step: "step", tensors with one element, numbers, dicts of numbers. What is
        None is left out."""
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
            self._write({**row, **values})

    def close(self):
        """Write what has arrived, and close the file."""
        try:
            self.flush()
        finally:
            if self._file:
                self._file.close()


def _opened(log, resumed_step: int) -> TextIO:
    """A file for a JSON object per step, with what it has up to `resumed_step`."""
    path = pathlib.Path(log).expanduser()
    try:
        text = path.read_text() if resumed_step and path.is_file() else ""
        # A run that was killed may have left half a line.
        lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= resumed_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as file:
            file.write("".join(kept).encode())
        return open(path, "a", buffering=1)
    except UnicodeDecodeError:
        raise DataError(f"log is {log}, which is no text; expected a log of this run") from None
    except OSError as error:
        raise DataError(f"log is {log}, which cannot be written: {error.strerror}") from None


def _step_of(line: str) -> float:
    """The step of a row; infinite for a line that is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
    return step if isinstance(step, int) else math.inf
