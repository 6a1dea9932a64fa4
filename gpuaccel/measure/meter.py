"""The meter: tokens per second, step and stage times, memory and loss of a training loop, and the host never waits.

    meter = Meter("cuda", flops_per_token=2.1e9, peak_flops=peak_flops("cuda", torch.bfloat16))
    for batch in batches:
        meter.timer.start()
        loss = forward(batch);  meter.timer.mark("forward")
        loss.backward();        meter.timer.mark("backward")
        meter.timer.stop()
        reading = meter.update(tokens=batch.numel(), loss=loss)    # on a GPU the loss is a step or two old
    reading = meter.finish()                                       # waits for the last step: the final numbers

On a GPU the host runs ahead of the device, so a clock on the host measures nothing. Here each step leaves a CUDA
event behind, a step counts once its event has completed, and scalars come back through pinned memory. On a CPU the
clock is `time.perf_counter`.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import asdict, dataclass, field

import torch

from ..errors import ArgumentError

# Dense peak rates in FLOP/s from the makers' data sheets, without sparsity: (pattern in the device's name, bf16,
# fp16, fp32 without tensor cores).
_PEAKS = [
    (r"GB200", 2500e12, 2500e12, 80e12),
    (r"B200", 2250e12, 2250e12, 75e12),
    (r"GH200|H200", 989e12, 989e12, 67e12),
    (r"H100 NVL", 835e12, 835e12, 60e12),
    (r"H100 PCIe", 756e12, 756e12, 51e12),
    (r"H100|H800", 989e12, 989e12, 67e12),
    (r"H20", 148e12, 148e12, 44e12),
    (r"A100|A800", 312e12, 312e12, 19.5e12),
    (r"L40S", 362e12, 362e12, 91.6e12),
    (r"L40", 181e12, 181e12, 90.5e12),
    (r"L4", 121e12, 121e12, 30.3e12),
    (r"A40", 149.7e12, 149.7e12, 37.4e12),
    (r"A30", 165e12, 165e12, 10.3e12),
    (r"A10", 125e12, 125e12, 31.2e12),
    (r"RTX A6000", 154.8e12, 154.8e12, 38.7e12),
    (r"RTX 5090", 209.5e12, 209.5e12, 104.8e12),
    (r"RTX 4090", 165.2e12, 165.2e12, 82.6e12),
    (r"RTX 3090", 71e12, 71e12, 35.6e12),
    (r"V100", None, 125e12, 15.7e12),
    (r"T4", None, 65e12, 8.1e12),
]


def peak_flops(device, dtype=torch.bfloat16) -> float | None:
    """The device's dense peak in FLOP/s for `dtype` (bf16, fp16 or fp32) from its data sheet; None for a CPU or a GPU
    not in the table.

    Peaks of bf16 and fp16 are those of the tensor cores with fp32 accumulation and no sparsity; fp32 is the rate
    without TF32.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _peak_of(torch.cuda.get_device_name(device), dtype)


def _peak_of(name: str, dtype) -> float | None:
    column = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}.get(dtype)
    if column is None or "Laptop" in name:
        return None
    for row in _PEAKS:
        if re.search(rf"\b({row[0]})\b", name):
            return row[column]
    return None


@dataclass
class Reading:
    """What the meter knows after one more step. Times in seconds or milliseconds as the names say."""

    step: int  # steps handed to the meter so far
    tokens: int  # tokens in them
    seconds: float  # since the first step began, on the host's clock
    tokens_per_s: float  # over the last `window` finished steps; 0.0 until one has finished
    step_ms: float  # mean over the same steps, gaps between steps included
    loss: float | None = None  # the newest that has arrived ...
    loss_step: int | None = None  # ... and the step it belongs to
    val_loss: float | None = None  # only in the reading of the step that measured it
    norm: float | None = None  # gradient norm before clipping, newest that has arrived ...
    clipped_norm: float | None = None  # ... and after it
    norms: tuple = field(
        default=(), repr=False
    )  # the last that arrived: (steps ago, before, after or None), oldest first
    mfu: float | None = None  # model FLOPs utilisation: achieved / peak, 0..1
    memory_bytes: int = 0  # GPU: peak allocated by torch; CPU: resident memory of the process
    stages: dict[str, float] = field(
        default_factory=dict
    )  # ms of each stage of the newest finished step

    def as_dict(self) -> dict:
        """The fields as a plain dictionary (for a line of JSON), without `norms`, which repeats earlier steps."""
        return {name: value for name, value in asdict(self).items() if name != "norms"}


class _Events:
    """CUDA events that are used again once they have been read."""

    def __init__(self, device, timing=True):
        self.device, self.timing, self.free = device, timing, []

    def record(self):
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=self.timing)
        event.record(torch.cuda.current_stream(self.device))
        return event


class StageTimer:
    """Where the time of a step goes: `start()`, `mark(name)` at the end of each stage, `stop()`.

    Stages with the same name add up within a step (micro-batches). On a GPU the marks are CUDA events on the current
    stream and nothing waits: `poll()` returns the stages of the newest step that has finished by now, in ms, or None
    before the first. A step that began and never stopped (an exception) is forgotten at the next `start()`.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self._pool = _Events(self.device) if self.device.type == "cuda" else None
        self._open = None  # list of (name, event or time) of the step now running
        self._pending = deque()  # steps that stopped, but may still run on the GPU
        self._newest = None

    def _now(self):
        return self._pool.record() if self._pool else time.perf_counter()

    def start(self):
        """A step begins."""
        if self._open and self._pool:
            self._pool.free += [event for _, event in self._open]
        self._open = [("", self._now())]

    def mark(self, name: str):
        """The stage `name` ends here; it began at the previous mark, or at `start()`."""
        if self._open is None:
            raise ArgumentError(f"mark({name!r}) outside a step: call start() first")
        self._open.append((name, self._now()))

    def stop(self):
        """The step ends. What came after the last mark belongs to no stage."""
        if self._open is None:
            raise ArgumentError("stop() outside a step: call start() first")
        self._pending.append(self._open)
        self._open = None
        self._collect()

    def poll(self) -> dict | None:
        """Milliseconds by stage of the newest finished step; None if none has finished. Never waits."""
        self._collect()
        return None if self._newest is None else dict(self._newest)

    def _collect(self):
        while self._pending and (self._pool is None or self._pending[0][-1][1].query()):
            marks = self._pending.popleft()
            stages = {}
            for (_, begin), (name, end) in zip(marks, marks[1:]):
                ms = begin.elapsed_time(end) if self._pool else (end - begin) * 1e3
                stages[name] = stages.get(name, 0.0) + ms
            self._newest = stages
            if self._pool:
                self._pool.free += [event for _, event in marks]


class LateValue:
    """A device scalar that reaches the host without the host waiting for it.

        late.put(loss, tag=step)      # queues a copy into pinned memory, and an event behind it
        late.get()                    # the newest that has arrived, or None; late.tag says which
        late.history                  # (tag, value) of the last 64 that arrived: none is lost when several come at once

    On a CPU it arrives at once. One element of any dtype; values come back as Python floats (from a GPU: rounded to
    fp32).
    """

    def __init__(self):
        self.tag = None
        self._value = None
        self.history = deque(maxlen=64)
        self._pending = deque()  # (tag, pinned tensor, event)
        self._free = []  # (pinned tensor, event) to use again

    def put(self, value, tag=None):
        """Takes a tensor with one element (any device), or a number."""
        if not isinstance(value, torch.Tensor):
            return self._arrived(float(value), tag)
        if value.numel() != 1:
            raise ArgumentError(
                f"expected a tensor with one element, got shape {tuple(value.shape)}"
            )
        value = value.detach()
        if value.device.type != "cuda":
            return self._arrived(float(value), tag)
        if not self._free:
            self._free.append(
                (torch.empty((), dtype=torch.float32, pin_memory=True), torch.cuda.Event())
            )
        pinned, event = self._free.pop()
        pinned.copy_(value.reshape(()).float(), non_blocking=True)
        event.record(torch.cuda.current_stream(value.device))
        self._pending.append((tag, pinned, event))

    def get(self) -> float | None:
        """The newest value that has arrived. Never waits."""
        while self._pending and self._pending[0][2].query():
            tag, pinned, event = self._pending.popleft()
            self._arrived(float(pinned), tag)
            self._free.append((pinned, event))
        return self._value

    def _arrived(self, value, tag):
        self._value, self.tag = value, tag
        self.history.append((tag, value))


class Meter:
    """Measures a training loop: call `update` once after each optimizer step, with the tokens it trained on.

    device: where the model is. flops_per_token: of forward and backward, for the utilisation (about 6 x parameters);
    peak_flops: FLOP/s. window: over how many finished steps the rate is taken. `update` never waits for the device;
    `finish` does, once, at the end.
    """

    def __init__(self, device="cpu", flops_per_token=None, peak_flops=None, window=20):
        if window < 1:
            raise ArgumentError(f"window must be at least 1 step, got {window}")
        self.device = torch.device(device)
        self.timer = StageTimer(self.device)
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._pool = _Events(self.device) if self.device.type == "cuda" else None
        self._finished = deque(
            maxlen=window + 1
        )  # (seconds on the device, tokens so far), finished steps
        self._pending = deque()  # (event, tokens so far)
        self._last_event = None
        self._loss, self._norm, self._clipped = LateValue(), LateValue(), LateValue()
        self._step = self._tokens = 0
        self._memory, self._memory_at = 0, -1.0
        self.start()

    def start(self):
        """The clock starts here: at construction, and again if you call it just before the first step, to leave
        preparation out."""
        if self._step:
            raise ArgumentError(f"start() after {self._step} steps: make a new Meter instead")
        self._began = time.perf_counter()
        if self._pool:
            if self._last_event is not None:
                self._pool.free.append(self._last_event)
            self._last_event = self._pool.record()
        self._finished.clear()
        self._finished.append((0.0, 0))

    def update(
        self, tokens: int, loss=None, norm=None, val_loss=None, clipped_norm=None
    ) -> Reading:
        """One more step is queued. tokens: how many it trained on, a number the host knows; loss, norm (of the
        gradient, before clipping) and clipped_norm: one-element tensors or None."""
        if isinstance(tokens, torch.Tensor) and tokens.device.type == "cuda":
            raise ArgumentError(
                "tokens is a tensor on the GPU: reading it would make the host wait; pass an int"
            )
        self._step += 1
        self._tokens += int(tokens)
        if self._pool:
            self._pending.append((self._pool.record(), self._tokens))
        else:
            self._finished.append((time.perf_counter() - self._began, self._tokens))
        if loss is not None:
            self._loss.put(loss, tag=self._step)
        if norm is not None:
            self._norm.put(norm, tag=self._step)
        if clipped_norm is not None:
            self._clipped.put(clipped_norm, tag=self._step)
        return self.reading(val_loss)

    def queued(self) -> int:
        """Steps handed to the meter that the device has not finished. Never waits."""
        while self._pending and self._pending[0][0].query():
            event, tokens = self._pending.popleft()
            seconds = self._finished[-1][0] + self._last_event.elapsed_time(event) / 1e3
            self._finished.append((seconds, tokens))
            self._pool.free.append(self._last_event)
            self._last_event = event
        return len(self._pending)

    def reading(self, val_loss=None) -> Reading:
        """The newest numbers, without a new step. Never waits."""
        self.queued()
        (t0, n0), (t1, n1) = self._finished[0], self._finished[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        known = self.flops_per_token and self.peak_flops and rate
        mfu = rate * self.flops_per_token / self.peak_flops if known else None
        step_ms = (t1 - t0) / (len(self._finished) - 1) * 1e3 if t1 > t0 else 0.0
        loss, norm, clipped = (
            self._loss.get(),
            self._norm.get(),
            self._clipped.get(),
        )  # before .tag, which says whose it is
        after = dict(self._clipped.history)
        norms = tuple(
            (self._step - tag, before, after.get(tag)) for tag, before in self._norm.history
        )
        return Reading(
            step=self._step,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._began,
            tokens_per_s=rate,
            step_ms=step_ms,
            loss=loss,
            loss_step=self._loss.tag,
            val_loss=None if val_loss is None else float(val_loss),
            norm=norm,
            clipped_norm=clipped,
            norms=norms,
            mfu=mfu,
            memory_bytes=self._memory_now(),
            stages=self.timer.poll() or {},
        )

    def finish(self) -> Reading:
        """Waits until the device has done every step, and returns the final numbers: the one place where the meter
        synchronises."""
        if self._pool:
            torch.cuda.synchronize(self.device)
        return self.reading()

    def _memory_now(self) -> int:
        now = time.perf_counter()
        if (
            now - self._memory_at > 0.2
        ):  # slow to read (about 0.1 ms): five times a second is enough
            self._memory_at = now
            self._memory = (
                torch.cuda.max_memory_allocated(self.device) if self._pool else _resident_bytes()
            )
        return self._memory


def _resident_bytes() -> int:
    """Resident memory of this process in bytes: now on Linux, the peak so far elsewhere, 0 where it cannot be told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    except ImportError:
        return 0
