"""Four places where the gradients of micro-batches can be added up, and a step that takes one.

    step = PlainStep(model, opt, on_the_host, micro_batches=4)
    for reading in ga.train(step, batches, steps=10):
        ...

Code of lessons, to be read: ga.TrainStep chooses by itself. A place is a function of an arena and
of the losses of the micro-batches, an iterator that makes the next one when it is asked for it. It
leaves the sums in arena.grads. torch.autograd.grad returns fresh gradients, in the dtype of the
weights, and touches no `.grad`.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import takes
from ..measure import Meter
from ..nn import accumulate_product
from ..ops import (
    MAX_TENSORS,
    accumulate_kernel,
    reference_scale,
)
from ..optim import Arena
from ..training import StepOutput, token_loss

Place = Callable[[Arena, Iterator[Tensor]], None]


def on_the_host(arena: Arena, losses: Iterator[Tensor]):
    """Copy each gradient to the CPU's memory, and add it there; copy the sums back."""
    sums = torch.zeros(arena.numel)
    for loss in losses:
        for i, grad in enumerate(torch.autograd.grad(loss, arena.params)):
            arena.slice(sums, i).add_(grad.cpu())
    arena.grads.copy_(sums)


def by_autograd(arena: Arena, losses: Iterator[Tensor]):
    """Add as PyTorch does: tensor by tensor, in the dtype of the weights."""
    sums = torch.autograd.grad(next(losses), arena.params)
    for loss in losses:
        for total, grad in zip(sums, torch.autograd.grad(loss, arena.params)):
            total += grad
    torch._foreach_copy_(arena.gradients.views, sums)


def in_the_arena(arena: Arena, losses: Iterator[Tensor]):
    """Add into the arena's fp32 buffer: one launch of accumulate_v3 adds many tensors."""
    arena.grads.zero_()
    for loss in losses:
        add_all(arena, torch.autograd.grad(loss, arena.params))


def by_the_product(arena: Arena, losses: Iterator[Tensor]):
    """The product that computes a weight's gradient adds it at once; others as in_the_arena."""
    arena.grads.zero_()
    with adding_linears(arena):
        for loss in losses:
            add_all(arena, torch.autograd.grad(loss, arena.params, allow_unused=True))


def by_backward(arena: Arena, losses: Iterator[Tensor]):
    """What a loop of one's own does over an arena: torch adds into `.grad`, the fp32 slice."""
    for loss in losses:
        loss.backward()


PLACES: "dict[str, Place]" = {
    "host": on_the_host,
    "autograd": by_autograd,
    "arena": in_the_arena,
    "fused": by_the_product,
}


# ---- what two of them use ------------------------------------------------------------------------


def add_all(arena: Arena, grads: "Sequence[Tensor | None]"):
    """arena.grads += grads, by accumulate_v3: a launch takes up to 256 tensors of one dtype.

    Args:
        grads: fp32 or bf16, one for each tensor of the arena; None: no gradient.
    """
    if not takes(arena.device):
        for view, grad in zip(arena.gradients.views, grads):
            if grad is not None:
                view += grad
        return
    grads = [grad if grad is None else grad.contiguous() for grad in grads]
    for dtype in {grad.dtype for grad in grads if grad is not None}:
        kernel = accumulate_kernel("accumulate_v3", dtype)
        for first in range(0, len(grads), MAX_TENSORS):
            last = min(first + MAX_TENSORS, len(grads))
            addresses = [0] * MAX_TENSORS
            for i, grad in enumerate(grads[first:last]):
                if grad is not None and grad.dtype == dtype:
                    addresses[i] = grad.data_ptr()
            row = arena.first_chunk[first]
            kernel[arena.first_chunk[last] - row, kernel.bound](
                arena.grads,
                arena.chunk_table,
                row,
                first,
                struct.pack(f"{MAX_TENSORS}Q", *addresses),
                tensors=grads,
            )


class AddingLinear(torch.autograd.Function):
    """x @ weight.T. Its backward adds the weight's gradient to `total`, and returns none."""

    @staticmethod
    def forward(ctx, x, weight, total):
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        accumulate_product(ctx.total, dy, x)  # total += dy.T @ x
        return dy @ weight, None, None


@contextlib.contextmanager
def adding_linears(arena: Arena) -> Iterator[None]:
    """Every nn.Linear without a bias is an AddingLinear, up to the end of the block."""
    totals = {id(p): view for p, view in zip(arena.params, arena.gradients.views)}
    layers = [
        layer
        for layer in arena.module.modules()
        if type(layer) is nn.Linear and layer.bias is None and id(layer.weight) in totals
    ]
    for layer in layers:
        layer.forward = _forward(layer, totals[id(layer.weight)])
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Module, total: Tensor):
    return lambda x: AddingLinear.apply(x, layer.weight, total)


# ---- a step --------------------------------------------------------------------------------------


def clip_by_item(parameters: "list[nn.Parameter]", max_norm: float) -> float:
    """Clipping as it is often written: the host reads the norm of each tensor, and decides."""
    norm = sum(p.grad.norm().item() ** 2 for p in parameters) ** 0.5  # type: ignore[union-attr]
    if norm > max_norm:
        for p in parameters:
            p.grad *= max_norm / norm
    return norm


class PlainStep:
    """A training step without choices: micro-batches, sum, clip, update. ga.train takes it.

    Args:
        model: a module with an arena, from tokens to logits.
        opt: an optimizer over arena.parameters().
        place: where gradients are added, a function of this module. Default: by_backward.
        micro_batches: pieces of a batch.
        max_norm: limit of the gradient norm. Default: no clipping.
        clip: function of (parameters, max_norm) that returns the norm before clipping.

    Attributes:
        arena: of the model.
        count: steps taken.
    """

    # What ga.train asks a ga.TrainStep for.
    meter: "Meter | None" = None
    autocast = reducer = None
    schedulers = ()
    loss_fn = staticmethod(token_loss)

    def __init__(
        self,
        model: nn.Module,
        opt: torch.optim.Optimizer,
        place: Place = by_backward,
        *,
        micro_batches: int = 1,
        max_norm: "float | None" = None,
        clip: "Callable[..., Tensor | float]" = nn.utils.clip_grad_norm_,
    ):
        arena = Arena.of(model)
        assert arena is not None, "expected a model with an arena: ga.Arena(model)"
        self.arena: Arena = arena
        self.model = model
        self.optimizers = [opt]
        self.place = place
        self.micro_batches = micro_batches
        self.max_norm = max_norm
        self.clip = clip
        self.count = 0

    def __call__(self, batch: "tuple[Tensor, Tensor]") -> StepOutput:
        """Take one step.

        Args:
            batch: (inputs, targets), each (B, T).
        """
        timer = (self.meter or Meter(self.arena.device)).timer
        timer.start()
        losses: "list[Tensor]" = []
        counts: "list[Tensor]" = []

        def next_losses():
            for micro in zip(*(part.tensor_split(self.micro_batches) for part in batch)):
                loss, tokens = token_loss(self.model, micro)
                losses.append(loss.detach())
                counts.append(tokens)
                timer.mark("forward")
                yield loss
                timer.mark("backward")

        self.place(self.arena, next_losses())
        loss, tokens = torch.stack(losses).sum(), torch.stack(counts).sum()
        self.arena.grads /= tokens
        for p, view in zip(self.arena.params, self.arena.gradients.views):
            p.grad = view
        timer.mark("accumulate")
        norm = clipped_norm = None
        if self.max_norm is not None:
            number = self.clip(self.arena.parameters(), self.max_norm)
            norm = torch.as_tensor(number, dtype=torch.float32, device=self.arena.device)
            clipped_norm = norm * reference_scale(norm, self.max_norm)
            timer.mark("clip")
        (opt,) = self.optimizers
        opt.step()
        timer.mark("optimizer")
        opt.zero_grad()
        timer.stop()
        self.count += 1
        return StepOutput(loss / tokens, tokens, norm, clipped_norm)

    def close(self):
        """Nothing to undo. A ga.TrainStep has something, so that both can be used alike."""

    def __enter__(self) -> "PlainStep":
        return self

    def __exit__(self, *error):
        self.close()
