"""Power, clock and temperature of the GPUs while a benchmark measures.

One `nvidia-smi` beside the benchmark writes a line for each GPU every 50 ms. measuring() marks the
time of a measurement, in any process; workers hand their marks over when they are closed. A reading
is the median of the lines of that time.

>>> with Sampler():
...     with measuring():
...         run()
...     reading()
{'W': 655.0, 'limit_W': 700.0, 'SM_MHz': 1755.0, 'C': 61.0, 'samples': 8}

nvidia-smi and not NVML: it needs no package.
"""

import contextlib
import datetime
import os
import re
import statistics
import subprocess
import threading
import time

FIELDS = ("timestamp", "power.draw.instant", "power.limit", "clocks.sm", "temperature.gpu")
NAMES = ("W", "limit_W", "SM_MHz", "C")
# Milliseconds between two lines; seconds to wait for the last one.
EVERY = 50
LATE = 2.0

# (began, ended) of each measurement of this process and of its closed workers, by time.time().
SPANS: list[tuple] = []
# Samplers that run; the last one is read.
_running: "list[Sampler]" = []


@contextlib.contextmanager
def measuring():
    """Mark the time inside as a measurement."""
    began = time.time()
    try:
        yield
    finally:
        SPANS.append((began, time.time()))


class Sampler:
    """While it is open, nvidia-smi writes what the GPUs do. Without one there are no readings."""

    def __init__(self, command: list[str] | None = None):
        self._command = command or nvidia_smi()
        self._process = None
        self._lock = threading.Lock()
        # (seconds by time.time(), values by NAMES, GPU)
        self._samples: list[tuple] = []

    def __enter__(self):
        _running.append(self)
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        _running.remove(self)
        if self._process is not None:
            self._process.terminate()
            self._thread.join()
            self._process.wait()

    def _read(self):
        for line in self._process.stdout:
            if sample := parsed(line):
                with self._lock:
                    self._samples.append(sample)

    def samples(self, spans, gpus) -> list:
        """The samples of these GPUs in these spans of time."""
        end = max((ended for _, ended in spans), default=0.0)
        deadline = time.monotonic() + LATE
        while time.monotonic() < deadline and self._process and self._process.poll() is None:
            with self._lock:
                if self._samples and self._samples[-1][0] > end:
                    break
            time.sleep(EVERY / 1e3)
        with self._lock:
            return [
                sample
                for sample in self._samples
                if sample[2] in gpus and any(a <= sample[0] <= b for a, b in spans)
            ]


def reading(gpus: int = 1) -> dict | None:
    """Medians during all measurements; None where nothing was read.

    gpus: how many GPUs measured"""
    if not _running:
        return None
    samples = _running[-1].samples(SPANS, visible_gpus()[:gpus])
    if not samples:
        return None
    medians = {}
    for key, values in zip(NAMES, zip(*(values for _, values, _ in samples))):
        known = [value for value in values if value is not None]
        medians[key] = statistics.median(known) if known else None
    return {**medians, "samples": len(samples)}


def visible_gpus() -> list[int]:
    """nvidia-smi's numbers of the GPUs that CUDA sees here, in CUDA's order."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d+(,\d+)*", chosen):
        return [int(number) for number in chosen.split(",")]
    return list(range(64))


def parsed(line: str) -> tuple | None:
    """A line of nvidia-smi as a sample; None for another line."""
    when, *values = (cell.strip() for cell in line.split(","))
    try:
        seconds = datetime.datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        *medians, gpu = (number(value) for value in values)
    except ValueError:
        return None
    return (seconds, medians, gpu) if len(medians) == len(NAMES) else None


def number(text: str) -> float | None:
    """None for what a GPU does not tell: "[N/A]"."""
    return None if text.startswith("[") else float(text)


def nvidia_smi() -> list[str]:
    fields = ",".join((*FIELDS, "index"))
    return [
        "nvidia-smi",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={EVERY}",
    ]
