"""A layer's function as one operation of torch.library, which torch.compile and captures see whole.

The kernels compute it where they can. Elsewhere, for double backwards and under torch.func torch's
operations do: the reference.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .gradient_slice import differentiates_otherwise

_library = torch.library.Library("gpuaccel", "FRAGMENT")


def define(
    name: str,
    tensors: str,
    numbers: str,
    *,
    reference: Callable[..., tuple],
    can_run: Callable[..., bool],
    launch: Callable[..., tuple],
    launch_backward: Callable[..., tuple],
    fake: Callable[..., tuple],
    outputs: int,
    keeps_result: bool = False,
) -> Callable[..., Tensor]:
    """Define the operations `name` and `name`_backward; return the differentiable function.

    Args:
        tensors: names of the inputs that have a gradient.
        numbers: the inputs behind them, as in a schema.
        reference: (*tensors, *numbers) -> the result, and what the backward needs beside it.
        can_run: of the same arguments: whether kernels take them.
        launch: as reference, by kernels.
        launch_backward: (grad, *tensors, *outputs, *numbers) -> the gradient of each tensor.
        fake: as reference, for tensors without values.
        outputs: number of tensors that reference returns.
        keeps_result: the backward gets the result too, as the first of the outputs.
    """
    names = [f"Tensor {t}" for t in tensors.split()]
    n, first = len(names), 0 if keeps_result else 1
    kept = [f"Tensor kept{i}" for i in range(first, outputs)]

    def schema(name, inputs, results):
        return f"{name}({', '.join([*inputs, numbers])}) -> ({', '.join(['Tensor'] * results)})"

    def whole(results):
        # A schema with one output has no tuple.
        return results[0] if outputs == 1 else results

    def forward(*args):
        return whole((launch if can_run(*args) else reference)(*args))

    def backward(grad, *args):
        inputs, others = args[:n], args[n + len(kept) :]
        if can_run(*inputs, *others):
            grads = launch_backward(grad, *args)
        else:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in inputs]
                result = reference(*leaves, *others)[0]
                grads = torch.autograd.grad(result, leaves, grad, materialize_grads=True)
        return tuple(g.to(t.dtype).contiguous() for g, t in zip(grads, inputs))

    def fake_backward(grad, *args):
        return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in args[:n])

    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:n], *(output[first:] if outputs > 1 else ()))
        ctx.numbers = inputs[n:]

    def differentiate(ctx, grad, *_):
        none = [None] * len(ctx.numbers)
        if grad is None:
            return *[None] * n, *none
        # Read once: under checkpointing each read computes them again.
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *getattr(torch.ops.gpuaccel, f"{name}_backward")(
                grad, *saved, *ctx.numbers
            ), *none
        # A double backward. Views, so that it follows how one tensor depends on another.
        views = [
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in saved[:n]
        ]
        result = reference(*views, *ctx.numbers)[0]
        options = {"create_graph": True, "materialize_grads": True}
        return *torch.autograd.grad(result, views, grad, **options), *none

    for operation, computes, faked, inputs, results in (
        (name, forward, lambda *args: whole(fake(*args)), names, outputs),
        (f"{name}_backward", backward, fake_backward, ["Tensor grad", *names, *kept], n),
    ):
        _library.define(schema(operation, inputs, results))
        _library.impl(operation, computes, "CPU")
        _library.impl(operation, computes, "CUDA")
        torch.library.register_fake(f"gpuaccel::{operation}", faked, lib=_library)
    torch.library.register_autograd(
        f"gpuaccel::{name}", differentiate, setup_context=setup_context, lib=_library
    )

    def function(*args):
        if differentiates_otherwise():
            return reference(*args)[0]
        result = getattr(torch.ops.gpuaccel, name)(*args)
        return result if outputs == 1 else result[0]

    return function
