"""Inputs on which a kernel that stands in the place of one of ours is compared with the definition.

A case runs public operations on random data and returns what they computed. Run with the backend
`torch` it returns the definition's result, with `simt` or `cuda` that of the kernels. `CASES` says
which cases launch a kernel: all kernels that a training step launches are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backends import backend
from ..compiler import Kernel
from ..nn import PolyAttention, RichardsGLU
from ..ops import (
    CHUNK,
    SQUARES_THREADS,
    accumulate_,
    accumulate_each_,
    add_gradients,
    find_segments,
    launch_forward,
    reference_encoder,
)
from ..optim import AdamW, Arena, Lion, clip_grad_norm_, clip_grads_
from ..training import TrainStep


class Results(dict[str, Tensor]):
    """Tensors that an operation computes, by name.

    Attributes:
        before: what those held that it adds to.
    """

    def __init__(self, results=()):
        super().__init__(results)
        self.before: dict[str, Tensor] = {}


@dataclass(frozen=True)
class Case:
    """One way to launch a kernel.

    run(n, device, generator, dtypes): results for about n elements, with parameters, gradients or
        inputs in each of these dtypes. It draws the same data for the same state of the generator,
        which is the CPU's.

    Attributes:
        roundings: by how many roundings of fp32 a result may differ from the definition's; 0: not
            at all.
        stored_roundings: how many further ones of the result's own dtype, where that is not fp32.
        on_cpu: whether the launched kernel runs on the CPU.
    """

    run: Callable[[int, torch.device, torch.Generator, Sequence[torch.dtype]], Results]
    roundings: int
    stored_roundings: int = 1
    on_cpu: bool = True


class _Normal:
    """Normally distributed tensors, drawn on the CPU and moved to a device."""

    def __init__(self, device, generator):
        self.device = device
        self.generator = generator

    def __call__(self, *shape, dtype=torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def integers(self, low, high, *shape) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


def _sizes(n) -> list[int]:
    """Of some tensors: one of n elements, and around a chunk."""
    return [n, 3, CHUNK, n // 2 + 1]


# ---- accumulation, clipping, optimizers ----------------------------------------------------------


def _accumulate(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    results = Results()
    for dtype in dtypes:
        # The vectorised kernel takes a multiple of four, the other one any number.
        for size in (n, 4 * n):
            total = 100 * normal(size)
            name = f"sum of {size:,} elements, gradient in {dtype}"
            results.before[name] = total.clone()
            accumulate_(total, normal(size, dtype=dtype))
            results[name] = total
        totals = [100 * normal(size) for size in (n, 7, 4 * n)]
        names = [f"sum of {len(t):,} elements, beside others, gradient in {dtype}" for t in totals]
        results.before |= dict(zip(names, [t.clone() for t in totals]))
        accumulate_each_(totals, [normal(len(t), dtype=dtype) for t in totals])
        for name, total in zip(names, totals):
            results[name] = total
    return results


class _Parameters(nn.Module):
    """Parameters of some sizes. loss(data): its gradient is a row of `data`.

    Args:
        with_unused: one in their middle gets no gradient.
    """

    def __init__(self, normal, sizes, with_unused=False):
        super().__init__()
        first, *rest = [nn.Parameter(normal(size)) for size in sizes]
        self.first = first
        if with_unused:
            self.unused = nn.Parameter(normal(5))
        self.members = nn.ParameterList(rest)

    def loss(self, data) -> Tensor:
        used = [self.first, *self.members]
        rows = data.sum(0).split([p.numel() for p in used])
        return sum((p.float() * row).sum() for p, row in zip(used, rows))


def _flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _state(opt, params, words) -> dict[str, Tensor]:
    """The optimizer's state of these parameters."""
    states = [opt.state[p] for p in params if opt.state.get(p)]
    return {f"{key}, {words}": _flat(state[key] for state in states) for key in states[0]}


def _step(optimizer):
    """A case: two training steps over an arena, three micro-batches each, clipped.

    A third one has a NaN in its gradient, and is skipped."""

    def run(n, device, generator, dtypes) -> Results:
        normal = _Normal(device, generator)
        results = Results()
        for dtype, with_unused in [*((dtype, False) for dtype in dtypes), (torch.float32, True)]:
            model = _Parameters(normal, _sizes(n), with_unused).to(device, dtype)
            arena = Arena(model)
            opt = optimizer(arena, lr=0.03, weight_decay=0.1, max_norm=1.0)
            data = [normal(3, sum(_sizes(n))) for _ in range(3)]
            data[2][1, 0] = float("nan")

            def loss(model, micro):
                return model.loss(micro), torch.tensor(1.0, device=device)

            words = f"parameters in {dtype}{', one without a gradient' if with_unused else ''}"
            with TrainStep(model, opt, loss, micro_batches=3) as step:
                # a step's norm lies where the next one's does
                norms = [_flat([step(batch).norm]) for batch in data]
                results[f"norm of each step, {words}"] = _flat(norms)
                words += ", after 2 steps and one with a NaN"
                results[f"steps skipped, {words}"] = opt.skipped.clone()
                results[f"weights, {words}"] = _flat(arena.module_parameters)
                results[f"fp32 weights, {words}"] = _flat(arena.masters)
                results |= _state(opt, arena.masters, words)
        return results

    return run


def _optimizer(optimizer, *options):
    """A case: two steps over a list of parameters, for each of some options."""

    def run(n, device, generator, dtypes) -> Results:
        normal = _Normal(device, generator)
        results = Results()
        for option in options:
            for dtype in dtypes:
                params = [nn.Parameter(normal(size, dtype=dtype)) for size in _sizes(n)]
                opt = optimizer(params, lr=0.03, weight_decay=0.1, **option)
                for _ in range(2):
                    _set_gradients(params, normal)
                    opt.step()
                words = f"parameters in {', '.join([str(dtype), *option])}, after 2 steps"
                results |= {f"weights, {words}": _flat(params), **_state(opt, params, words)}
        return results

    return run


def _set_gradients(params, normal) -> list[Tensor]:
    """Give each parameter a new gradient, and return them."""
    grads = [normal(p.numel(), dtype=p.dtype) for p in params]
    for p, grad in zip(params, grads):
        p.grad = grad
    return grads


def _clip(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    results = Results()
    for dtype in dtypes:
        params = [nn.Parameter(torch.zeros(size, device=device, dtype=dtype)) for size in _sizes(n)]
        for limit in (0.5, 1e6):
            words = f"gradients in {dtype}, limit {limit:g}"
            grads = _set_gradients(params, normal)
            results[f"norm of {words}"] = clip_grad_norm_(params, limit)
            results[words] = _flat(grads)
        grads = _set_gradients(params, normal)
        grads[2][1] = float("nan")
        state = clip_grads_(params, 0.5, on_nonfinite="skip", scope="tensor")
        words = f"each tensor in {dtype}, one with NaN"
        results |= {f"norm of {words}": state.norm, f"scale of {words}": state.scale}
        results |= {f"gradients of {words}": _flat(grads)}
        results |= {f"first of {words}": state.first_nonfinite}
        # Norm and limit are as small as the eps that is added to the norm.
        params[1].grad = torch.full_like(params[1], 1e-6)
        results[f"scale near eps in {dtype}"] = clip_grads_(params[1:2], 1e-6).scale.view(1)
    return results


def _clip_many(n, device, generator, dtypes) -> Results:
    """More sums than reduce_v2 has threads; a NaN that the last warp of 1,024 threads reads."""
    normal = _Normal(device, generator)
    params = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(1100)]
    grads = _set_gradients(params, normal)
    norm = clip_grad_norm_(params, 0.5)
    last = grads[-1].clone()
    grads[999][0] = float("nan")
    first = clip_grads_(params[:1000], 0.5, on_nonfinite="skip").first_nonfinite.view(1)
    words = "gradients of 1,100 tensors"
    return Results({f"norm of {words}": norm, f"last of {words}": last, "first with NaN": first})


def _peers(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    chunks = n // CHUNK + 1
    own = normal(chunks * CHUNK)
    others = normal(2, chunks * CHUNK)
    # Rank 1 of 3: the order of the sum is 0, 1, 2.
    nonfinite = torch.zeros(3, chunks, dtype=torch.int32, device=device)
    if backend().name == "torch":
        total = others[0] + own + others[1]
        squares = total.double().square().view(chunks, CHUNK).sum(1)
    else:
        total = own
        squares = torch.empty(chunks, dtype=torch.float64, device=device)
        kernel = Kernel("peers", "peers_sum", CHUNK=CHUNK, THREADS=SQUARES_THREADS)
        row = others.stride(0) // 4
        kernel[chunks, SQUARES_THREADS](own, squares, nonfinite, others, 1, 3, chunks, row)
    return Results(
        {"sum of three ranks": total, "squares": squares.float(), "not finite": nonfinite}
    )


# ---- embeddings ----------------------------------------------------------------------------------


def _embedding(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    results = Results()
    positions = min(n, 50)
    # Rows of 8 channels can be read four at a time, rows of 6 or 130 cannot; 130 are more than a
    # block takes.
    odd = 6 if n > 10_000 else 130
    for dtype in dtypes:
        for channels in (8, odd) if dtype == torch.float32 else (8,):
            wte = normal(7, channels, dtype=dtype)
            wpe = normal(positions, channels, dtype=dtype)
            # From -1 to 7: the first and the last one are out of range.
            with_invalid = normal.integers(-1, 8, n // positions + 1, positions)
            valid = with_invalid.clamp(0, 6)
            words = f"{dtype}, {channels} channels, {valid.numel():,} tokens"
            for tokens, kind in ((with_invalid, ", some out of range"), (valid, "")):
                invalid = torch.zeros(3, dtype=torch.int64, device=device)
                if backend().name == "torch":
                    out = reference_encoder(tokens, wte, wpe)
                    invalid[0] = ((tokens < 0) | (tokens > 6)).sum()
                else:
                    out = launch_forward(tokens, wte, wpe, invalid)
                results[f"forward, {words}{kind}"] = out
                results[f"number of tokens out of range, {words}{kind}"] = invalid[:1]
                dwte = normal(7, channels)
                dwpe = normal(positions, channels)
                sums = {f"dwte, {words}{kind}": dwte, f"dwpe, {words}{kind}": dwpe}
                results.before |= {name: total.clone() for name, total in sums.items()}
                dout = normal(*tokens.shape, channels, dtype=dtype)
                add_gradients(dwte, dwpe, dout, find_segments(tokens, 7))
                results |= sums
    return results


def _sort(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    results = Results()
    for vocab in (5, 700, 70_000):
        # One token is out of range, the first one of the vocabulary is left out.
        tokens = normal.integers(0, vocab, n)
        tokens[n // 2] = vocab
        segments = find_segments(tokens, vocab, padding_idx=0)
        results[f"order of {n:,} tokens, vocabulary of {vocab:,}"] = segments.order
        results[f"pieces of {n:,} tokens, vocabulary of {vocab:,}"] = segments.pieces
    return results


# ---- learned layers ------------------------------------------------------------------------------


def _glu(n, device, generator, dtypes) -> Results:
    normal = _Normal(device, generator)
    results = Results()
    with torch.random.fork_rng(devices=[]):
        # The gate draws its temperature.
        torch.default_generator.manual_seed(0)
        layer = RichardsGLU(8, 8).to(device)
    a, g = layer.activation, layer.gate
    a.theta.data += 0.1 * normal(len(a.theta))
    for dtype in dtypes:
        for hidden in (8, 5) if dtype == torch.float32 else (8,):
            x = normal(n // hidden + 1, 2 * hidden, dtype=dtype).requires_grad_()
            h = torch.ops.gpuaccel.richards_glu(x, a.theta, g.theta, a.kinds, g.kinds)
            inputs = [x, a.theta, g.theta]
            dx, dtheta_a, dtheta_g = torch.autograd.grad(h, inputs, normal(*h.shape, dtype=dtype))
            words = f"{x.shape[0]:,} x {hidden} in {dtype}"
            results |= {f"h, {words}": h.detach(), f"dx, {words}": dx}
            results |= {f"dtheta, {words}": dtheta_a, f"dtheta of the gate, {words}": dtheta_g}
    return results


def _attention(width, dtype):
    """A case: forward and backward of PolyAttention with two heads of this width and dtype."""

    def run(n, device, generator, dtypes) -> Results:
        normal = _Normal(device, generator)
        results = Results()
        T = max(2, min(n // 16, 150))
        # Each degree is compiled for itself, which takes seconds.
        for degree, window in ((3, 20),) if n < 1000 else ((1, None), (3, 20)):
            layer = PolyAttention(2 * width, 2, degree, window, max_positions=T).to(device, dtype)
            for name, p in layer.named_parameters():
                # The curves' parameters and the coefficients keep the values that they begin with.
                if name == "pe" or name.endswith("weight"):
                    p.data.copy_(normal(*p.shape) / p.shape[-1] ** 0.5)
            x = normal(2, T, 2 * width, dtype=dtype).requires_grad_()
            y = layer(x)
            inputs = [x, *layer.parameters()]
            gradients = torch.autograd.grad(y, inputs, normal(*y.shape, dtype=dtype))
            names = ["x", *(name for name, _ in layer.named_parameters())]
            words = f"{T} tokens, heads of {width} in {dtype}, degree {degree}, window {window}"
            results[f"y, {words}"] = y.detach()
            results |= {f"gradient of {k}, {words}": g for k, g in zip(names, gradients)}
        return results

    return run


# ---- which case launches which kernel ------------------------------------------------------------

_STEP = Case(_step(AdamW), roundings=16)
_LION = Case(_step(Lion), roundings=16)
_LISTS = Case(_optimizer(AdamW, {}, {"amsgrad": True}, {"maximize": True}), roundings=16)
_LION_LISTS = Case(_optimizer(Lion, {}, {"maximize": True}), roundings=16)
_CLIP = Case(_clip, roundings=16)
_CLIP_MANY = Case(_clip_many, roundings=16)
_ADD = Case(_accumulate, roundings=1)
_EMBEDDING = Case(_embedding, roundings=64)
_SORT = Case(_sort, roundings=0)
_GLU = Case(_glu, roundings=256, stored_roundings=4)
_HEADS = Case(_attention(16, torch.float32), roundings=2048)
_HEADS_64 = Case(_attention(64, torch.bfloat16), roundings=2048, stored_roundings=8, on_cpu=False)
_HEADS_128 = Case(_attention(128, torch.bfloat16), roundings=2048, stored_roundings=8, on_cpu=False)

# name of a kernel -> the cases that launch it
CASES: dict[str, tuple[Case, ...]] = {
    "accumulate_v1": (_ADD,),
    "accumulate_v2": (_ADD,),
    "accumulate_v3": (_ADD,),
    "squares_v2": (_CLIP, _STEP),
    "reduce_v2": (_CLIP, _CLIP_MANY, _STEP),
    "scale_v2": (_CLIP,),
    "settings_write": (_STEP, _LISTS),
    "adamw_begin": (_STEP, _LISTS),
    "adamw_v2": (_LISTS,),
    "adamw_v3": (_STEP,),
    "lion_begin": (_LION, _LION_LISTS),
    "lion_v2": (_LION_LISTS,),
    "lion_v3": (_LION,),
    "peers_sum": (Case(_peers, roundings=4),),
    "encoder_forward": (_EMBEDDING,),
    "encoder_backward_v3": (_EMBEDDING,),
    "encoder_combine_v3": (_EMBEDDING,),
    "encoder_wpe": (_EMBEDDING,),
    "segments_count": (_SORT,),
    "segments_scatter": (_SORT,),
    "segments_pieces": (_SORT,),
    "richards_finish": (_GLU,),
    "glu_forward": (_GLU,),
    "glu_backward": (_GLU,),
    "poly_query_gate": (_HEADS,),
    "poly_gate_backward": (_HEADS,),
    "poly_query_backward": (_HEADS,),
    "poly_finish": (_HEADS,),
    "poly_forward_v1": (_HEADS,),
    "poly_backward_q_v1": (_HEADS,),
    "poly_backward_kv_v1": (_HEADS,),
    "poly_backward_pe_v1": (_HEADS,),
    "poly_forward_v2": (_HEADS_128,),
    "poly_backward_v2": (_HEADS_128,),
    "poly_forward_v3": (_HEADS_64,),
    "poly_backward_v3": (_HEADS_64,),
}
