"""A tape: a CUDA graph's counterpart on the CPU. It records a function's operations, and replays
them without the function's Python code.

    tape = Tape()
    loss = tape.record(lambda: step(batch))      # runs it, and keeps each operation
    tape.replay()                                # the same operations on the same memory

After a replay `loss` holds the new value. As in a graph, tensors are known by their memory and
numbers by their value: a learning rate that was a Python number stays what it was, and Python's own
work (prints, counters, schedules) is not repeated. Operations are recorded where torch dispatches
them, launches of our kernels where backend `simt` runs them. A tape is not fast: it is for
learning, and for testing without a GPU what a replay does.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compiler import launch
from ..errors import CaptureError

# Operations that give the host a value.
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero"}
# Operations that make memory without a value.
ALLOCATIONS = ("aten::empty", "aten::new_empty")
_HOST_WOULD_WAIT = "the host would wait for a value of the device"


class _RefuseReads(TorchFunctionMode):
    """Refuse reads that pass values to the host without torch's dispatcher.

    Inactive during backward: autograd runs hooks without this mode."""

    READS = (Tensor.__repr__, Tensor.__format__, Tensor.tolist, Tensor.numpy, Tensor.__array__)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.READS:
            raise CaptureError(_HOST_WOULD_WAIT)
        return func(*args, **(kwargs or {}))


class _RecordedGenerator:
    """torch.random's generator while a tape records. Its calls bypass the dispatcher.

    get_rng_state(), set_rng_state() and manual_seed() become steps of this thread's tape, so that
    recomputation in a checkpoint draws the same numbers as its first forward. Inside an operation
    there is no tape."""

    def __getattr__(self, name):
        method = getattr(torch.default_generator, name)

        def call(*args):
            result = method(*args)
            results = [result if isinstance(result, Tensor) else None]
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Tape):
                    mode.add_step(name, method, args, {}, results)
            return result

        return call


@dataclass
class TapeStep:
    """One operation: call(*args, **kwargs). Its tensors are aliases of the function's."""

    name: str
    call: Any
    args: tuple
    kwargs: dict
    # Of each result: the tensor, or None where the operation has made no new memory.
    results: list[Tensor | None]
    # Whether gradients were on: some operations return less without (nn.LSTM its workspace).
    grad_enabled: bool


class Tape(TorchDispatchMode):
    """Operations in the order in which they ran: record() once, replay() as often as wanted."""

    def __init__(self):
        super().__init__()
        self.steps: list[TapeStep] = []
        # The thread that called record().
        self._thread: int | None = None

    def record(self, fn):
        """Run a function and record its operations in this thread, backward on CPUs included.

        Args:
            fn: a function without arguments.

        Returns:
            fn()'s result.

        Raises:
            CaptureError: where fn needs a value on the host, a shape that depends on values, or a
                tensor without memory of its own (a sparse one).
        """
        self._thread = threading.get_ident()
        torch_random: Any = torch.random
        generator = torch_random.default_generator
        torch_random.default_generator = _RecordedGenerator()
        self._hear_launches(True)
        try:
            with _RefuseReads(), self:
                return fn()
        finally:
            self._hear_launches(False)
            torch_random.default_generator = generator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if name in READS:
            raise CaptureError(_HOST_WOULD_WAIT)
        short_name = name.split("::")[1]
        if _shape_depends_on_values(func, name, args, kwargs, self.steps):
            raise CaptureError(
                f"the shape that {short_name} returns depends on values, which the host would "
                "have to wait for"
            )
        result = self._call_unrecorded(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            # unsqueeze_() and the like write no memory. Later steps have aliases of the new shape.
            return result
        if name == "aten::lift_fresh":
            # A tensor made from Python values: its memory is restored at each replay.
            value = result.clone()
            self.add_step("constant", lambda: value, (), {}, [result])
            return result
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = [
            t if isinstance(t, Tensor) and _storage(t) not in given else None
            for t in tree_leaves(result)
        ]
        # Views write nothing and make no memory: their aliases are in the steps that use them.
        does_something = func._schema.is_mutable or any(t is not None for t in results)
        if does_something and not name.startswith(ALLOCATIONS):
            self.add_step(short_name, func, args, kwargs, results)
        return result

    def _call_unrecorded(self, func, args, kwargs):
        """Call an operation as one step: launches inside it are not recorded."""
        hears = self._launched in launch.recorders
        if hears:
            self._hear_launches(False)
        try:
            return func(*args, **kwargs)
        finally:
            if hears:
                self._hear_launches(True)

    def _hear_launches(self, hear: bool):
        """Add or remove the launch listener, which hears the launches of all threads.

        The list is replaced, not changed: another thread may be iterating over it."""
        others = [recorder for recorder in launch.recorders if recorder != self._launched]
        launch.recorders = [*others, self._launched] if hear else others

    def _launched(self, launch, args, tensors):
        if threading.get_ident() == self._thread:
            self.add_step(launch.kernel.name, launch.on_cpu, (args, tensors), {}, [])

    def add_step(self, name: str, call, args: tuple, kwargs: dict, results: list):
        """Append a step, with aliases of its tensors: they keep the shapes of this moment."""
        args, kwargs, results = tree_map_only(Tensor, _alias, (args, kwargs, results))
        self.steps.append(TapeStep(name, call, args, kwargs, results, torch.is_grad_enabled()))

    def replay(self):
        """Run the recorded operations again, on the same memory."""
        # The operations were recorded below autograd, and are replayed there.
        with torch._C._AutoDispatchBelowAutograd():
            for step in self.steps:
                with torch.set_grad_enabled(step.grad_enabled):
                    new_results = tree_leaves(step.call(*step.args, **step.kwargs))
                for mine, new in zip(step.results, new_results):
                    if mine is not None and mine.data_ptr() != new.data_ptr():
                        mine.copy_(new)

    def nodes(self) -> list[str]:
        """The names of the operations, in the order in which they ran."""
        return [step.name for step in self.steps]

    def close(self):
        """Give the memory of all results back."""
        self.steps.clear()


def _shape_depends_on_values(func, name: str, args, kwargs, steps) -> bool:
    """True if the host needs values to know the result's shape."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = args[1]
        if all(t is None or t.dtype not in (torch.bool, torch.uint8) for t in indices):
            return False
        accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        if name == "aten::index" or accumulate or args[2].numel() != 1:
            return True
        # Only x[mask] = one value of the host is a masked fill on a GPU.
        constants = [t for step in steps if step.name == "constant" for t in step.results]
        return _storage(args[2]) not in map(_storage, constants)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags


def _alias(t: Tensor) -> Tensor:
    alias = t.detach()
    # Some operations behave differently with requires_grad.
    return alias.requires_grad_() if t.requires_grad else alias


def _storage(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        raise CaptureError(
            f"a tensor of layout {t.layout} has no memory of its own by which a tape could know it"
        ) from None
