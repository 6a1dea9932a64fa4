"""While `gpuaccel train` runs: a line of progress on stderr."""

import sys
import time


class Progress:
    """One line on stderr, rewritten at most ten times a second; without a terminal, a line every
    ten steps.

    total: steps of the whole run. done: those that were done before. quiet: write nothing."""

    def __init__(self, total, done=0, quiet=False, stream=None):
        self.total = total
        self.first = done
        self.quiet = quiet
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.start_time = time.perf_counter()
        self.last_written = 0.0
        self.width = 0

    def show(self, step, reading):
        """Call once per step, with the meter's reading."""
        if self.quiet:
            return
        is_last = step == self.total
        now = time.perf_counter()
        too_soon = now - self.last_written < 0.1 if self.live else step % 10
        if too_soon and not is_last:
            return
        self.last_written = now
        parts = [f"step {step:>{len(str(self.total))}}/{self.total}"]
        if self.live:
            filled = round(24 * step / self.total)
            parts.append("[" + "#" * filled + "." * (24 - filled) + "]")
        if reading.loss is not None:
            parts.append(f"loss {reading.loss:.3f}")
        if reading.tokens_per_s:
            parts.append(f"{reading.tokens_per_s:,.0f} tokens/s")
        if reading.mfu:
            parts.append(f"MFU {reading.mfu:.1%}")
        if not is_last:
            seconds_per_step = (now - self.start_time) / max(step - self.first, 1)
            seconds_left = int(seconds_per_step * (self.total - step))
            parts.append(f"{seconds_left // 60}:{seconds_left % 60:02d} left")
        line = "  ".join(parts)
        self.stream.write(f"\r{line:<{self.width}}" if self.live else line + "\n")
        self.stream.flush()
        self.width = len(line)

    def close(self):
        """End the line, so that the next output starts on its own."""
        if self.live and self.width:
            self.stream.write("\n")
            self.width = 0
