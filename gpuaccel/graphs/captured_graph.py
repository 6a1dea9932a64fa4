"""One captured graph with its static inputs, its results, and the gradients that it leaves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import CaptureError

# Bytes. Each result in the buffer begins at a multiple of it.
_ALIGNMENT = 16


class ResultBuffer:
    """A tree of tensors, copied one behind the other into one buffer: one copy hands them out.

    Made inside the capture: the copies into the buffer are part of the graph. After a replay
    results() copies the buffer, and the caller's tensors are views of that copy.

    Raises:
        CaptureError: for a tree that holds anything but tensors, numbers, strings and None.
    """

    def __init__(self, tree, device):
        leaves, self._spec = tree_flatten(tree)
        # (bytes, dtype, shape) of a tensor; others do not change from replay to replay.
        self._entries: list[Any] = []
        end = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._entries.append((slice(end, end + leaf.nbytes), leaf.dtype, leaf.shape))
                end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
            elif isinstance(leaf, (type(None), int, float, str)):
                self._entries.append(leaf)
            else:
                raise CaptureError(
                    f"the step returns a {type(leaf).__name__}; expected tensors, in tuples, "
                    "lists or dicts"
                )
        self._buffer = torch.empty(end, dtype=torch.uint8, device=device)
        for leaf, view in zip(leaves, self._leaves(self._buffer)):
            if isinstance(leaf, Tensor):
                view.copy_(leaf.detach())

    def _leaves(self, buffer) -> list:
        return [
            buffer[entry[0]].view(entry[1]).view(entry[2]) if isinstance(entry, tuple) else entry
            for entry in self._entries
        ]

    def results(self):
        """The tree with the newest values, in memory of its own."""
        return tree_unflatten(self._leaves(self._buffer.clone()), self._spec)


@dataclass
class GraphGradient:
    """`.grad` of one parameter, as a graph knows it."""

    parameter: nn.Parameter
    # The graph's own copy of `.grad` before the step; None if it was None.
    before: Tensor | None
    # `.grad` after the step, in the graph's memory.
    after: Tensor | None


@dataclass
class CapturedGraph:
    """One captured step, with the memory that its inputs and results lie in.

    Attributes:
        recording: what capture.py made.
        inputs: leaves of the arguments; their tensors are static inputs, which each replay reads.
        results: made in the capture.
    """

    recording: Any
    inputs: list
    results: ResultBuffer
    gradients: list[GraphGradient]

    def replay(self, leaves: list):
        """Copy the arguments into the static inputs, replay, return the results; never waits."""
        self._copy_in(leaves)
        self.recording.replay()
        for gradient in self.gradients:
            gradient.parameter.grad = gradient.after
        return self.results.results()

    @torch.no_grad()
    def _copy_in(self, leaves):
        for gradient in self.gradients:
            static, current = gradient.before, gradient.parameter.grad
            if static is not None and current is not static:
                static.copy_(current)
        pairs = [(mine, new) for mine, new in zip(self.inputs, leaves) if isinstance(mine, Tensor)]
        if pairs:
            static, new = zip(*pairs)
            torch._foreach_copy_(static, new, non_blocking=True)

    def close(self, keep_gradients: bool = False):
        """Free the graph's memory. A `.grad` in it is dropped, or copied out of it."""
        for gradient in self.gradients:
            p, after = gradient.parameter, gradient.after
            if after is not None and after is not gradient.before and p.grad is after:
                p.grad = after.clone() if keep_gradients else None
        self.recording.close()
