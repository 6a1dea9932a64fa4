"""One captured graph with its static inputs, its results, and the gradients that it leaves."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .results import ResultBuffer


@dataclass
class GraphGradient:
    """`.grad` of one parameter, as a graph knows it."""

    parameter: nn.Parameter
    # The graph's own copy of `.grad` before the step; None if it was None.
    before: Tensor | None
    # `.grad` after the step, in the graph's memory.
    after: Tensor | None


class CapturedGraph:
    """One captured step, with the memory that its inputs and results lie in.

    Args:
        recording: what capture.py made.
        inputs: leaves of the arguments; their tensors are static inputs, which each replay reads.
        results: made in the capture.
    """

    def __init__(
        self, recording, inputs: list, results: ResultBuffer, gradients: list[GraphGradient]
    ):
        self.recording = recording
        self.inputs = inputs
        self.results = results
        self.gradients = gradients

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
