"""The meter: tokens per second, step and stage times, memory and loss, measured without a wait.

    meter = Meter("cuda", flops_per_token=2.1e9, peak_flops=peak_flops("cuda", torch.bfloat16))
    for batch in batches:
        meter.timer.start()
        loss = forward(batch);  meter.timer.mark("forward")
        loss.backward();        meter.timer.mark("backward")
        meter.timer.stop()
        # on a GPU the loss of a reading is a step or two old
        reading = meter.update(tokens=batch.numel(), loss=loss)
    # waits for the last step: the final numbers
    reading = meter.finish()

On a GPU the host runs ahead of the device, so the host's clock says little about the device. Each
step therefore records a CUDA event, a step counts once its event has completed, and scalars are
copied through pinned memory. On a CPU the clock is `time.perf_counter`.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from ..errors import ArgumentError

# Dense peak rates in FLOP/s from the makers' data sheets, without sparsity:
# (pattern in the device's name, bf16, fp16, fp32 without tensor cores).
_PEAKS: list[tuple[str, float | None, float, float]] = [
    (r"GB200", 2500e12, 2500e12, 80e12),
    (r"B200", 2250e12, 2250e12, 75e12),
    (r"H[12]00 NVL", 835e12, 835e12, 60e12),
    (r"GH200|H200", 989e12, 989e12, 67e12),
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


# Finished steps over which the rate is taken.
WINDOW = 20


def peak_flops(device, dtype=torch.bfloat16) -> float | None:
    """The device's dense peak in FLOP/s from its data sheet; None for a CPU or an unknown GPU.

    Args:
        device: a torch.device or its name.
        dtype: bf16 and fp16 mean the tensor cores with fp32 accumulation and no sparsity, fp32 the
            rate without TF32. Default: bf16.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _peak_of(torch.cuda.get_device_name(device), dtype)


def _peak_of(name: str, dtype) -> float | None:
    # Slower, faster, or a part of the GPU with the same first words.
    if re.search(r"\b(Laptop|MIG|Ti|SUPER|D)\b", name):
        return None
    for pattern, bf16, fp16, fp32 in _PEAKS:
        if re.search(rf"\b({pattern})\b", name):
            return {torch.bfloat16: bf16, torch.float16: fp16, torch.float32: fp32}.get(dtype)
    return None


@dataclass
class Reading:
    """What the meter knows after one more step.

    Attributes:
        step: steps that the meter was told of.
        tokens: tokens in these steps.
        seconds: since the meter was made, on the host's clock.
        tokens_per_s: over the last WINDOW finished steps; 0.0 until one has finished.
        step_ms: milliseconds, mean over the same steps, gaps between steps included.
        loss: the newest that has reached the host.
        loss_step: the step of that loss.
        val_loss: only in the reading of the step that measured it.
        norm: gradient norm before clipping, the newest that has reached the host.
        clipped_norm: the same after clipping.
        mfu: model FLOPs utilisation, achieved / peak, 0 to 1; None where it is not known.
        memory_bytes: GPU: peak allocated by torch; CPU: resident memory of the process (on Linux).
        stages: name -> milliseconds of each stage of the newest finished step.
    """

    step: int
    tokens: int
    seconds: float
    tokens_per_s: float
    step_ms: float
    loss: float | None = None
    loss_step: int | None = None
    val_loss: float | None = None
    norm: float | None = None
    clipped_norm: float | None = None
    mfu: float | None = None
    memory_bytes: int = 0
    stages: dict[str, float] = field(default_factory=dict)


def _recorded(device) -> torch.cuda.Event:
    """An event on the current stream, recorded now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class StageTimer:
    """Where the time of a step goes: `start()`, `mark(name)` at the end of each stage, `stop()`.

    Stages with the same name add up within a step (micro-batches). On a GPU the marks are CUDA
    events on the current stream and nothing waits: `poll()` returns the stages of the newest
    finished step. A step that began and never stopped (an exception) is forgotten at the next
    `start()`.

    Args:
        device: where the stages run, a torch.device or its name.
    """

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self._on_gpu = self.device.type == "cuda"
        # (name, event or time) of each mark of the running step
        self._open = None
        # the marks of steps that stopped, but may still run on the GPU
        self._pending = deque()
        self._newest = None

    def _now(self):
        return _recorded(self.device) if self._on_gpu else time.perf_counter()

    def start(self):
        """A step begins."""
        self._open = [("", self._now())]

    def mark(self, name: str):
        """The stage `name` ends here; it began at the previous mark, or at `start()`.

        Args:
            name: of the stage.

        Raises:
            ArgumentError: outside a step.
        """
        if self._open is None:
            raise ArgumentError(f"mark({name!r}) outside a step: call start() first")
        self._open.append((name, self._now()))

    def stop(self):
        """The step ends. Time after the last mark belongs to no stage.

        Raises:
            ArgumentError: outside a step.
        """
        if self._open is None:
            raise ArgumentError("stop() outside a step: call start() first")
        self._pending.append(self._open)
        self._open = None
        self._collect()

    def poll(self) -> dict | None:
        """Milliseconds of each stage of the newest finished step, or None. Never waits."""
        self._collect()
        return None if self._newest is None else dict(self._newest)

    def _collect(self):
        while self._pending and (not self._on_gpu or self._pending[0][-1][1].query()):
            marks = self._pending.popleft()
            stages = {}
            for (_, begin), (name, end) in zip(marks, marks[1:]):
                ms = begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3
                stages[name] = stages.get(name, 0.0) + ms
            self._newest = stages


class LateValue:
    """A device scalar that is copied to the host without a wait.

    In a loop::

        late.put(loss, tag=step)      # queues a copy into pinned memory, and an event behind it
        late.get()                    # the newest value whose copy is done, or None
        late.tag                      # the tag of that value

    On a CPU there is no delay. The scalar may have any dtype; values are Python floats (from a GPU:
    rounded to fp32).
    """

    def __init__(self):
        self.tag = None
        self._value = None
        # (tag, pinned tensor, event) of copies under way
        self._pending = deque()

    def put(self, value, tag=None):
        """Queue a value: a tensor with one element (any device), or a number.

        Args:
            value: a tensor with one element, any device and dtype, or a number.
            tag: comes back with the value.

        Raises:
            ArgumentError: for a tensor of several elements.
        """
        if not isinstance(value, torch.Tensor):
            return self._store(float(value), tag)
        if value.numel() != 1:
            raise ArgumentError(
                f"expected a tensor with one element, got shape {tuple(value.shape)}"
            )
        value = value.detach()
        if value.device.type != "cuda":
            return self._store(float(value), tag)
        # torch keeps freed pinned memory for the next one.
        pinned = torch.empty((), dtype=torch.float32, pin_memory=True)
        pinned.copy_(value.reshape(()).float(), non_blocking=True)
        self._pending.append((tag, pinned, _recorded(value.device)))

    def get(self) -> float | None:
        """The newest value whose copy is done, or None. Never waits."""
        while self._pending and self._pending[0][2].query():
            tag, pinned, _ = self._pending.popleft()
            self._store(float(pinned), tag)
        return self._value

    def _store(self, value, tag):
        self._value = value
        self.tag = tag


class Meter:
    """Measure a training loop: call `update` once after each optimizer step, with its tokens.

    `update` never waits for the device; `finish` does, once, at the end.

    Args:
        device: where the model is, a torch.device or its name. Default: "cpu".
        flops_per_token: floating-point operations of forward and backward, for the utilisation
            (about 6 x parameters; ga.training.flops_per_token). Default: no utilisation.
        peak_flops: of the device, FLOP/s; see ga.measure.peak_flops. Default: no utilisation.

    Attributes:
        timer: a StageTimer, whose stages are in each reading.

    Example:
        >>> meter = ga.measure.Meter(device=ga.default_device())
        >>> for loss in torch.tensor([4.0, 3.0, 2.0], device=ga.default_device()):
        ...     reading = meter.update(tokens=1024, loss=loss)  # after each step; nothing waits
        >>> reading = meter.finish()
        >>> reading.step, reading.tokens, reading.loss
        (3, 3072, 2.0)
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ):
        self.device = torch.device(device)
        self.timer = StageTimer(self.device)
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._on_gpu = self.device.type == "cuda"
        # (seconds on the device, tokens so far) after each finished step
        self._finished: deque[tuple[float, int]] = deque([(0.0, 0)], WINDOW + 1)
        # (event, tokens so far) of steps that the device may not have finished
        self._pending: deque[tuple[torch.cuda.Event, int]] = deque()
        self._last_event = _recorded(self.device) if self._on_gpu else None
        self._loss = LateValue()
        self._norm = LateValue()
        self._clipped = LateValue()
        self._step = 0
        self._tokens = 0
        self._memory = 0
        self._memory_time = -1.0
        self._start_time = time.perf_counter()

    def update(
        self, tokens: int, loss=None, norm=None, val_loss=None, clipped_norm=None
    ) -> Reading:
        """One more step is queued.

        Args:
            tokens: how many it trained on, a number that the host knows.
            loss: one-element tensor or None.
            norm: of the gradients before clipping, one-element tensor or None.
            val_loss: of a validation after this step, a number, or None.
            clipped_norm: of the gradients after clipping, one-element tensor or None.

        Returns:
            The newest numbers, without waiting.

        Raises:
            ArgumentError: for a number of tokens that is a tensor on a GPU, and for a loss or norm
                of several elements.
        """
        if isinstance(tokens, torch.Tensor) and tokens.device.type == "cuda":
            raise ArgumentError(
                "tokens is a tensor on the GPU: reading it would make the host wait; pass an int"
            )
        self._step += 1
        self._tokens += int(tokens)
        if self._on_gpu:
            self._pending.append((_recorded(self.device), self._tokens))
        else:
            self._finished.append((time.perf_counter() - self._start_time, self._tokens))
        if loss is not None:
            self._loss.put(loss, tag=self._step)
        if norm is not None:
            self._norm.put(norm, tag=self._step)
        if clipped_norm is not None:
            self._clipped.put(clipped_norm, tag=self._step)
        return self._reading(val_loss)

    def queued(self) -> int:
        """How many steps the device has not finished. Never waits."""
        while self._pending and self._pending[0][0].query():
            assert self._last_event is not None
            event, tokens = self._pending.popleft()
            seconds = self._finished[-1][0] + self._last_event.elapsed_time(event) / 1e3
            self._finished.append((seconds, tokens))
            self._last_event = event
        return len(self._pending)

    def _reading(self, val_loss: float | None = None) -> Reading:
        self.queued()
        (t0, n0), (t1, n1) = self._finished[0], self._finished[-1]
        rate = (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0
        mfu = None
        if self.flops_per_token and self.peak_flops and rate:
            mfu = rate * self.flops_per_token / self.peak_flops
        step_ms = (t1 - t0) / (len(self._finished) - 1) * 1e3 if t1 > t0 else 0.0
        # get() first: it moves on .tag, which is read below
        loss = self._loss.get()
        return Reading(
            step=self._step,
            tokens=self._tokens,
            seconds=time.perf_counter() - self._start_time,
            tokens_per_s=rate,
            step_ms=step_ms,
            loss=loss,
            loss_step=self._loss.tag,
            val_loss=None if val_loss is None else float(val_loss),
            norm=self._norm.get(),
            clipped_norm=self._clipped.get(),
            mfu=mfu,
            memory_bytes=self._memory_now(),
            stages=self.timer.poll() or {},
        )

    def finish(self) -> Reading:
        """Wait until the device has done every step, and return the final numbers.

        The meter synchronises nowhere else."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        return self._reading()

    def _memory_now(self) -> int:
        now = time.perf_counter()
        # slow to read (about 0.1 ms): five times a second is enough
        if now - self._memory_time > 0.2:
            self._memory_time = now
            if self._on_gpu:
                self._memory = torch.cuda.max_memory_allocated(self.device)
            else:
                self._memory = _resident_bytes()
        return self._memory


def _resident_bytes() -> int:
    """Resident memory of this process, on Linux; elsewhere 0."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
