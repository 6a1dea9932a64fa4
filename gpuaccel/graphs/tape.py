"""A CUDA graph's stand-in on the CPU: what a function does is written down once, then done again without its Python.

    >>> tape = Tape()
    >>> loss = tape.record(lambda: step(batch))      # runs it, and keeps every operation with its tensors and numbers
    >>> tape.replay()                                # the same operations on the same memory; `loss` holds the new value

As in a graph, tensors are known by their memory and numbers by their value: a learning rate that was a Python number stays what it was,
and Python's own work (prints, counters, schedules) is not repeated. Operations are seen where torch dispatches them, launches of our
kernels where backend `simt` runs them. Not for speed: to learn, and to test without a GPU what a replay does.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..compiler import kernel
from ..errors import CaptureError

READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::allclose",
    "aten::is_nonzero",
}  # the host gets to know a value
FRESH = ("aten::empty", "aten::new_empty")  # memory without a value


class _Reads(TorchFunctionMode):
    """What hands values to the host past torch's dispatcher; not seen inside of backward, whose hooks run without it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (
            Tensor.__repr__,
            Tensor.__format__,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.__array__,
        ):
            raise CaptureError("the host would wait for a value of the device")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Operations in the order in which they ran. record() once, replay() as often as wanted, close() to let the memory go."""

    def __init__(self):
        super().__init__()
        self.steps = []  # (name, what to call, its arguments, the tensors that it makes)

    def record(self, fn):
        """fn()'s result. CaptureError where fn needs a value on the host, or a shape that depends on values."""
        kernel.recorders.append(self._launched)
        try:
            with _Reads(), self:
                return fn()
        finally:
            kernel.recorders.remove(self._launched)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in READS:
            raise CaptureError("the host would wait for a value of the device")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureError(
                f"the shape that {name.split('::')[1]} returns depends on values, which the host would have to wait for"
            )
        kwargs = kwargs or {}
        before = (
            kernel.recorders.pop() if self._launched in kernel.recorders else None
        )  # an operation made of launches is one step
        try:
            result = func(*args, **kwargs)
        finally:
            if before is not None:
                kernel.recorders.append(before)
        if name == "aten::lift_fresh":  # a value that Python brought: each replay begins with it
            value = result.clone()
            self.steps.append(("constant", lambda: value, ((), {}), [result]))
            return result
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        made = [
            t if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given else None
            for t in tree_leaves(result)
        ]
        if not name.startswith(FRESH) and (
            func._schema.is_mutable or any(t is not None for t in made)
        ):
            self.steps.append((name.split("::")[1], func, (args, kwargs), made))
        return result

    def _launched(self, launch, args, tensors):
        self.steps.append((launch.kernel.name, launch.on_cpu, ((args, tensors), {}), []))

    @torch.no_grad()
    def replay(self):
        for _, call, (args, kwargs), made in self.steps:
            result = call(*args, **kwargs)
            for mine, new in zip(made, tree_leaves(result)):
                if mine is not None and mine.data_ptr() != new.data_ptr():
                    mine.copy_(new)

    def graph(self) -> "tuple[list[str], list[tuple[int, int]]]":
        """(names of the steps, edges): an edge leads from the last step that wrote a memory to the next that uses it."""
        region_of = _regions(
            t for _, _, given, made in self.steps for t in tree_leaves((given, made))
        )
        writer, edges = {}, []
        for i, (_, call, (args, kwargs), made) in enumerate(self.steps):
            used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            places = {region_of[t.untyped_storage().data_ptr()] for t in used}
            edges += sorted({(writer[place], i) for place in places if place in writer})
            schema = getattr(call, "_schema", None)
            for t in made:
                if t is not None:
                    writer[region_of[t.untyped_storage().data_ptr()]] = i
            if schema is None or schema.is_mutable:
                writer.update(dict.fromkeys(places, i))
        return [name for name, *_ in self.steps], edges

    def close(self):
        self.steps.clear()


def _regions(leaves) -> "dict[int, int]":
    """Address of each tensor's storage -> a number that storages share if their memory overlaps, as those of an arena's tensors do
    with the arena's buffers."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in leaves
        if isinstance(t, Tensor)
    }
    regions, end, previous = {}, -1, None
    for start in sorted(storages):
        regions[start] = len(regions) if start >= end else regions[previous]
        end, previous = max(end, start + storages[start]), start
    return regions
