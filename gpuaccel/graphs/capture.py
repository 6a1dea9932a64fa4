"""Recorders capture a function: in a CUDA graph on a GPU, on a tape (graphs/tape.py) on the CPU.

    recorder = CudaRecorder("cuda")
    recorder.run(fn)                           # a warm-up: executed, on the capture stream
    recording, out = recorder.record(fn)       # a capture: nothing is executed
    recording.replay()

record() repairs torch after a capture that failed, and raises a CaptureError that names the line of
Python at fault (graphs/failure.py).
"""

import contextlib
import functools
import gc
import pathlib
import re
import sys
import tempfile
import threading
import warnings

import torch

from ..errors import CaptureError
from .failure import explained, is_users_file, line_of_error, line_of_frame, only_noticed_later
from .graph_dump import node_names
from .memsets import memsets_to_kernels
from .tape import Tape


@functools.cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """One per process: cuBLAS keeps a workspace for each stream that it has run on."""
    return torch.cuda.Stream(index)


class CudaRecorder:
    """Captures the CUDA graphs of one device.

    All of them use one memory pool, so that they share memory: they must not be replayed
    concurrently."""

    # Whether record() executes what it records.
    executes = False

    def __init__(self, device):
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", index)
        self.stream = _capture_stream(index)
        self.pool = None
        # Graphs of the recording in progress; the last one captures.
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Recordings that are not closed.
        self.open_recordings = 0

    def run(self, fn):
        """fn(), executed on the capture stream: a warm-up."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            result = fn()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result

    def record(self, fn):
        """Capture fn and return (recording, fn()'s result). Nothing is executed.

        Raises CaptureError if fn cannot be captured. fn's own errors are raised unchanged."""
        try:
            return self._record(fn)
        except CaptureError:
            raise
        except RuntimeError as error:
            # An error of torch, CUDA or this package. CUDA may report an invalid capture only at
            # its end: then a second capture finds the line at fault.
            location = None
            if not only_noticed_later(error):
                location = line_of_error(error)
            if location is None:
                location = self._find_line(fn) or line_of_error(error)
            raise explained(error, location) from error

    def _record(self, fn):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if not self.open_recordings:
            self.pool = torch.cuda.graph_pool_handle()
        graphs = self._graphs = []
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self._begin()
            ended = False
            collects = gc.isenabled()
            # Python's garbage collector may free CUDA objects, which can invalidate a capture.
            gc.disable()
            try:
                result = fn()
                graphs[-1].capture_end()
                ended = True
            finally:
                self._graphs = []
                if collects:
                    gc.enable()
                if not ended:
                    self._repair(graphs[-1])
            for graph in graphs:
                memsets_to_kernels(graph.raw_cuda_graph(), self.device)
                graph.instantiate()
        self.open_recordings += 1
        return CudaRecording(graphs, self), result

    def _begin(self):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # thread_local: other threads (a loader that pins memory, a live view) may use CUDA.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def split(self):
        """Capture the rest of the recorded function in a second graph. The function calls this.

        replay() launches the second graph after the first. In a graph with parallel branches every
        kernel starts about 0.3 us later, including those before the branches. So work with
        branches gets a graph of its own."""
        if self._graphs:
            self._graphs[-1].capture_end()
            self._begin()

    def _repair(self, graph):
        """End a capture that failed, so that torch can allocate and synchronize again."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
            # The capture was valid, and Python code raised: capture_end() has cleaned up.
            return
        # capture_end() raised before it cleaned up. Without these calls allocations would still go
        # to the graph's pool, and the random generator would stay in capture mode.
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                end(self.device.index, self.pool)
        # Only the end of a capture resets the generator, so an empty one is made.
        empty = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            # torch warns that the graph is empty.
            warnings.simplefilter("ignore")
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()

    def _find_line(self, fn) -> tuple[str, int] | None:
        """(file, line) that invalidated the capture, found by tracing the lines of a second one."""
        from cuda.bindings import driver

        invalidated = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        last = None
        lines: list[tuple[str, int] | None] = []

        # Called for each line: the first time that the capture is invalid, `last` is at fault.
        def trace(frame, event, arg):
            nonlocal last
            if lines:
                return None
            if driver.cuStreamIsCapturing(self.stream.cuda_stream)[1] == invalidated:
                lines.append(last)
                return None
            last = line_of_frame(frame.f_back if event == "return" else frame) or last
            return trace

        before, threads_before = sys.gettrace(), threading.gettrace()
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.suppress(Exception),
            torch.autograd.detect_anomaly(check_nan=False),
        ):
            warnings.simplefilter("always")
            sys.settrace(trace)
            # Backward runs hooks and autograd.Functions in other threads.
            threading.settrace(trace)
            try:
                self._record(fn)[0].close()
            finally:
                sys.settrace(before)
                threading.settrace(threads_before)
        if lines and lines[0]:
            return lines[0]
        # A backward operation has no line of the user's. detect_anomaly() warns with forward's.
        messages = [str(warning.message) for warning in caught]
        forward = [message for message in messages if "Traceback of forward call" in message]
        places = re.findall(r'File "([^"]+)", line (\d+)', forward[0]) if forward else []
        for file, line in reversed(places):
            if is_users_file(file):
                return file, int(line)
        return None


class CudaRecording:
    """A captured function: one graph, or several if the function called split()."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], recorder: CudaRecorder):
        self._graphs = graphs
        self._recorder = recorder

    def replay(self):
        """Launch it on the current stream, without a wait for the device."""
        for graph in self._graphs:
            graph.replay()

    def nodes(self) -> list[str]:
        """The names of the graphs' nodes, in an order that they can run in."""
        return [name for graph in self._graphs for name in _nodes_of(graph)]

    def close(self):
        """Wait for what was launched, then free the graph's memory."""
        torch.cuda.synchronize(self._recorder.device)
        for graph in self._graphs:
            graph.reset()
        self._recorder.open_recordings -= 1


def _nodes_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder, "graph.dot")
        graph.debug_dump(str(path))
        return node_names(path.read_text(errors="replace"))


class TapeRecorder:
    """A CudaRecorder's interface on the CPU, for backend simt: records a Tape."""

    executes = True

    def run(self, fn):
        return fn()

    def split(self):
        """A tape has no branches."""

    def record(self, fn):
        """As CudaRecorder.record, but fn is executed."""
        tape = Tape()
        try:
            return tape, tape.record(fn)
        except CaptureError as error:
            raise explained(error, line_of_error(error)) from error


def recorder_for(device, backend_name: str) -> CudaRecorder | TapeRecorder | None:
    """The recorder for a device under a backend ("cuda", "simt", "torch").

    None where nothing can be recorded."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return CudaRecorder(device)
    return TapeRecorder() if backend_name == "simt" else None
