"""ga.Embedding and ga.nn.Encoder, and the operations of torch.library that they are made of.

    ga.deterministic_embeddings(model)           # replaces every nn.Embedding, in place
    encoder = ga.nn.Encoder(50257, 768, 1024)    # encoder(tokens): (B, T) -> (B, T, 768)
    encoder.wte.invalid_tokens()                 # None, or the tokens out of range, counted

What they compute, and in which order: ops/embedding_backward.py. A second stream computes the
segments while the forward kernel runs. Tokens on the host are checked before anything is done.
Under torch.func and forward-mode differentiation torch's own embedding runs.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import takes
from ..compiler import FLOAT_DTYPES
from ..errors import ArgumentError, check_module
from ..ops import (
    MAX_TOKENS,
    Segments,
    add_gradients,
    check_range,
    check_tokens,
    launch_forward,
    launch_segments,
    left_out_token,
    range_on_host,
    reference_encoder,
    reference_segments,
)
from .fused_forward import FusedForward, adds_to_arena, fused_forward, has_class_forward
from .gradient_slice import (
    RETURNED,
    GradientSlice,
    GradientUse,
    differentiates_otherwise,
    slice_of,
)

_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- the operations that autograd and torch.compile see ----

_library.define(
    "encoder_forward(Tensor tokens, Tensor wte, Tensor? wpe, Tensor(a!) invalid, int left_out, "
    "bool segments) -> (Tensor, Tensor)"
)
_library.define(
    "encoder_backward_(Tensor(a!) sums, Tensor dout, Tensor? segments, bool into_arena) -> ()"
)


@functools.cache
def _beside(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def _forward(tokens, wte, wpe, invalid, left_out, segments):
    """(output, segments as (3 N,) int32 or an empty tensor)."""
    if not (takes(wte.device) and wte.dtype in FLOAT_DTYPES and tokens.numel() and wte.shape[1]):
        return _forward_by_torch(tokens, wte, wpe, invalid, left_out, segments)
    tokens = tokens.contiguous()
    wte = wte.contiguous().resolve_neg()
    if wpe is not None:
        wpe = wpe.contiguous().resolve_neg()
    if not segments:
        out = launch_forward(tokens, wte, wpe, invalid)
        return out, torch.empty(0, dtype=torch.int32, device=tokens.device)
    side = _beside(wte.device.index) if wte.is_cuda else None
    token_segments, scratch = launch_segments(tokens.view(-1), len(wte), left_out, side)
    try:
        return launch_forward(tokens, wte, wpe, invalid), token_segments.buffer
    finally:
        # Before the segments are read, or the memory of `scratch` is reused.
        if side is not None:
            torch.cuda.current_stream(wte.device).wait_stream(side)
        del scratch


def _forward_by_torch(tokens, wte, wpe, invalid, left_out, segments):
    low, high = range_on_host(tokens) or (-1, -1)
    on_host = low >= 0 and high < len(wte)
    buffer = torch.empty(0, dtype=torch.int32, device=tokens.device)
    if segments:
        buffer = reference_segments(tokens, len(wte), left_out).buffer
    if on_host:
        out = F.embedding(tokens, wte)
        return out if wpe is None else out + wpe[: tokens.shape[-1]], buffer
    _count_invalid(tokens, len(wte), invalid)
    return reference_encoder(tokens, wte, wpe), buffer


def _count_invalid(tokens, vocab, invalid):
    """The counter that encoder_forward writes, computed by torch."""
    flat = tokens.reshape(-1).long()
    if len(flat):
        out_of_range = (flat < 0) | (flat >= vocab)
        row = out_of_range.long().argmax()
        T = tokens.shape[-1] if tokens.dim() else 1
        example = torch.stack([row << 32 | T, flat[row]])
        is_first = out_of_range.any() & (invalid[0] == 0)
        example = torch.where(is_first, example, invalid[1:])
        invalid.copy_(torch.cat([invalid[:1] + out_of_range.sum(), example]))


def _backward(sums, dout, segments, into_arena):
    """Add the gradient of wte to sums, or of wpe if there are no segments."""
    if into_arena:
        target = slice_of(sums)
        _add_to_slice(target, target.uses(), dout, segments)
    else:
        _add_rows(sums, dout, segments)


def _add_to_slice(target: GradientSlice, uses: list[GradientUse], dout, segments):
    for acc, _, overwrite in target.begin(uses):
        if overwrite:
            # Most rows get no gradient.
            acc.zero_()
        _add_rows(acc, dout.contiguous(), segments)
    # No end(): it reports gradients while backward still runs, and an embedding comes last.


def _add_rows(sums, dout, segments):
    if not dout.numel():
        return
    if segments is None:
        add_gradients(None, sums, dout, None)
    else:
        token_segments = Segments(segments, dout.numel() // dout.shape[-1], len(sums))
        add_gradients(sums, None, dout, token_segments)


for _name, _function in (("encoder_forward", _forward), ("encoder_backward_", _backward)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
torch.library.register_fake(
    "gpuaccel::encoder_forward",
    lambda tokens, wte, wpe, invalid, left_out, segments: (
        wte.new_empty(*tokens.shape, wte.shape[1]),
        tokens.new_empty(3 * tokens.numel() if segments else 0, dtype=torch.int32),
    ),
    lib=_library,
)
torch.library.register_fake("gpuaccel::encoder_backward_", lambda *args: None, lib=_library)


class _Encode(torch.autograd.Function):
    """wte[tokens] + wpe. Backward adds into an arena's sums, or returns fresh gradients."""

    @staticmethod
    def forward(ctx, tokens, wte, wpe, sums, invalid, left_out):
        out, segments = torch.ops.gpuaccel.encoder_forward(
            tokens, wte, wpe, invalid, left_out, ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(segments)
        ctx.sums = sums
        ctx.weights = [None if w is None else (w.shape, w.dtype) for w in (wte, wpe)]
        return out

    @staticmethod
    def backward(ctx, dout):
        (segments,) = ctx.saved_tensors
        fresh = [None, None]
        for i, sums in enumerate(ctx.sums):
            if not ctx.needs_input_grad[1 + i]:
                continue
            weight_segments = None if i else segments
            uses = [RETURNED]
            if sums is not None and torch.compiler.is_compiling():
                torch.ops.gpuaccel.encoder_backward_(sums, dout.contiguous(), weight_segments, True)
                continue
            if sums is not None:
                target = slice_of(sums)
                uses = target.uses(ctx.next_functions[1 + i : 2 + i])
                _add_to_slice(target, uses, dout, weight_segments)
            if RETURNED in uses:
                fresh[i] = _RowSums.apply(dout, weight_segments, *ctx.weights[i])
        return None, *fresh, None, None, None


class _RowSums(torch.autograd.Function):
    """A fresh gradient of wte, or of wpe if there are no segments.

    Its derivative is a look-up, as in torch."""

    @staticmethod
    def forward(ctx, dout, segments, shape, dtype):
        sums = dout.new_zeros(shape, dtype=dtype)
        torch.ops.gpuaccel.encoder_backward_(sums, dout.contiguous(), segments, False)
        ctx.save_for_backward(segments)
        ctx.shape, ctx.dtype = dout.shape, dout.dtype
        return sums

    @staticmethod
    def backward(ctx, grad):
        (segments,) = ctx.saved_tensors
        if segments is None:
            return grad[: ctx.shape[-2]].expand(ctx.shape).to(ctx.dtype), None, None, None
        # The rows in the order of addition, negative if out of range, and their tokens.
        row, token = segments[: 2 * (len(segments) // 3)].view(-1, 2).long().unbind(1)
        kept = token < len(grad)
        rows = torch.where(kept[:, None], grad[torch.where(kept, token, 0)], 0.0)
        derivative = rows.new_zeros(rows.shape).index_copy(0, row & MAX_TOKENS, rows)
        return derivative.view(ctx.shape).to(ctx.dtype), None, None, None


def _none_seen(device) -> Tensor:
    """A zeroed counter of invalid tokens for encoder_forward, (3,) int64.

    Its elements: number of tokens out of range, row << 32 | T of one of them, and that token."""
    with torch.inference_mode(False):
        return torch.zeros(3, dtype=torch.int64, device=device)


def encode(tokens: Tensor, wte: nn.Embedding, wpe: nn.Embedding | None = None) -> Tensor:
    """wte.weight[tokens], and with wpe + wpe.weight[position]. tokens: (..., T) int64 or int32."""
    check_tokens(tokens, len(wte.weight))
    if tokens.device != wte.weight.device:
        raise ArgumentError(
            f"tokens are on {tokens.device}, wte on {wte.weight.device}; expected one device"
        )
    check_options(wte)
    left_out = left_out_token(wte.padding_idx, len(wte.weight))
    if differentiates_otherwise():
        out = F.embedding(tokens, wte.weight, wte.padding_idx)
        return out if wpe is None else out + wpe.weight[: tokens.shape[-1]]
    check_range(tokens, len(wte.weight))
    weights = wte.weight, None if wpe is None else wpe.weight
    # An nn.Embedding gets here by its FusedEmbedding.
    counter: Any = wte if isinstance(wte, Embedding) else fused_forward(wte)
    invalid = counter.invalid
    if invalid is None:
        invalid = _none_seen(tokens.device)
        # A dry run on fake or meta tensors counts nothing.
        if not tokens.is_meta:
            counter.invalid = invalid
    if not torch.is_grad_enabled() or not any(w is not None and w.requires_grad for w in weights):
        return torch.ops.gpuaccel.encoder_forward(tokens, *weights, invalid, left_out, False)[0]
    sums = _grad_of(wte), None if wpe is None else _grad_of(wpe)
    return _Encode.apply(tokens, *weights, sums, invalid, left_out)


def _grad_of(layer: nn.Embedding) -> Tensor | None:
    """The slice to which the weight's gradient is added, or None if it is returned to autograd."""
    fused = adds_to_arena(layer)
    return None if fused is None else fused.grad


class _Counts:
    """Counts tokens out of range, in a tensor that is no buffer; takes part in captured steps."""

    # None: made on the meta device.
    invalid: Tensor | None

    def graph_key(self):
        """A captured step keeps no host value of this object."""
        return None

    def tensors_changed_by_step(self) -> list[Tensor]:
        """The counter, which forward writes."""
        return [] if self.invalid is None else [self.invalid]


class FusedEmbedding(_Counts, FusedForward):
    """forward of an nn.Embedding or Embedding; backward adds the gradient into `grad`.

    Args:
        layer: that is supported.
        grad: fp32, of the weight's shape, the tensor of a GradientSlice.
    """

    def __init__(self, layer: nn.Embedding, grad: Tensor):
        super().__init__(layer, grad)
        self.invalid = None if isinstance(layer, Embedding) else _none_seen(grad.device)

    @staticmethod
    def supports(layer):
        return type(layer) in (nn.Embedding, Embedding) and not refused_options(layer)

    @staticmethod
    def forward(layer: nn.Embedding, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """As the forward of the layer's class, whose argument has another name in each."""
        if fused_forward(layer) is None:
            return type(layer).forward(layer, *args, **kwargs)
        (tokens,) = (*args, *kwargs.values())
        return encode(tokens, layer)


def check_options(layer: nn.Embedding):
    """ArgumentError for the options of nn.Embedding that this module does not support."""
    if what := refused_options(layer):
        raise ArgumentError(f"{what}; keep torch.nn.Embedding for it")


def refused_options(layer: nn.Embedding) -> str | None:
    """The option of nn.Embedding that this module does not support, in words."""
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm}: here the weight is not changed in forward"
    if layer.sparse:
        return "sparse=True: here the gradient is dense"
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq=True: here a token's gradient is the sum of its rows"
    return None


# ---- public: modules ----


class Embedding(_Counts, nn.Embedding):
    """nn.Embedding with a deterministic gradient, which can be added straight into an arena.

    A drop-in: same arguments, attributes and state_dict. torch.jit, torch.fx and nested tensors are
    not supported. A token out of range is an error on the CPU; on a GPU it is counted
    (invalid_tokens), and its row of the output is NaN.

    Args:
        *args: num_embeddings, embedding_dim, padding_idx, ... as nn.Embedding's.
        **kwargs: as nn.Embedding's; no max_norm, sparse or scale_grad_by_freq.

    Raises:
        ArgumentError: for one of these.

    Source:
        kernels_cu/encoder.cu; torch.nn.Embedding; llm.c, encoder_backward.

    Example:
        >>> layer = ga.Embedding(10, 4, device=ga.default_device())
        >>> tokens = torch.tensor([[1, 2, 1]], device=ga.default_device())
        >>> layer(tokens).sum().backward()
        >>> layer.weight.grad[:4, 0].tolist()
        [0.0, 2.0, 1.0, 0.0]
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._start_counting()

    def _start_counting(self):
        check_options(self)
        # Not a buffer: DistributedDataParallel would broadcast rank 0's counter.
        self.invalid = None if self.weight.is_meta else _none_seen(self.weight.device)

    @classmethod
    def sharing(cls, layer: nn.Embedding) -> "Embedding":
        """An Embedding that shares the parameter, the options and the hooks of `layer`.

        Args:
            layer: an nn.Embedding.
        """
        embedding = cls.__new__(cls)
        vars(embedding).update(vars(layer))
        embedding._start_counting()
        return embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """weight[tokens].

        Args:
            tokens: int64 or int32, any shape.

        Returns:
            The shape of tokens with the embedding's dimension behind it, in the weight's dtype.

        Raises:
            ArgumentError: on the CPU for a token outside of 0 .. num_embeddings - 1, for another
                dtype, and for max_norm, sparse and scale_grad_by_freq, where they were set since.
        """
        return encode(tokens, self)

    def invalid_tokens(self) -> dict | None:
        """The tokens out of range so far; None: there were none. Waits for the device.

        "count": how many; "token": one of the first batch that had any; "position": its (row,
        column) in that batch."""
        return _invalid_in_words(self.invalid)

    def _apply(self, fn, recurse=True):
        # module.to(...), to_empty(): the counts move too, and are never uninitialised memory.
        super()._apply(fn, recurse)
        if self.weight.is_meta:
            self.invalid = None
        elif self.invalid is None or self.invalid.device != self.weight.device:
            seen = _none_seen(self.weight.device)
            self.invalid = seen if self.invalid is None else seen.copy_(self.invalid)
        return self


def _invalid_in_words(counter: Tensor | None) -> dict | None:
    """The value of Embedding.invalid_tokens for this counter."""
    count, where, token = (0, 0, 0) if counter is None else counter.tolist()
    row, T = where >> 32, max(where & 0xFFFFFFFF, 1)
    if not count:
        return None
    return {"count": count, "token": token, "position": (row // T, row % T)}


class Encoder(nn.Module):
    """tokens (..., T) -> wte[token] + wpe[position], (..., T, dim); T up to `positions`.

    wte, wpe: Embedding modules of (vocab, dim) and (positions, dim), initialised with std 0.02 as
    GPT-2's. They hold the weights and are not called: hooks on them do not run.

    Args:
        vocab: rows of wte, V.
        dim: channels, C.
        positions: rows of wpe, the longest sequence.
        device: of the weights; default: torch's.
        dtype: of the weights; default: torch's.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        positions: int,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.wte = Embedding(vocab, dim, device=device, dtype=dtype)
        self.wpe = Embedding(positions, dim, device=device, dtype=dtype)
        for part in (self.wte, self.wpe):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens, len(self.wte.weight))
        if not tokens.dim() or tokens.shape[-1] > len(self.wpe.weight):
            raise ArgumentError(
                f"tokens have shape {tuple(tokens.shape)}; expected (..., T) with T up to "
                f"{len(self.wpe.weight)}, the rows of wpe"
            )
        if self.wte.weight.dtype != self.wpe.weight.dtype:
            raise ArgumentError(
                f"wpe is {self.wpe.weight.dtype}, wte {self.wte.weight.dtype}; expected one dtype"
            )
        return encode(tokens, self.wte, self.wpe)

    def extra_repr(self):
        return (
            f"{self.wte.num_embeddings} tokens, {self.wpe.num_embeddings} positions, "
            f"{self.wte.embedding_dim} channels"
        )


def invalid_tokens(model: nn.Module) -> dict[str, dict]:
    """name -> Embedding.invalid_tokens() of each embedding that has any. Waits for the device.

    Args:
        model: any module.
    """
    reports = {
        name: _invalid_in_words(counter.invalid)
        for name, layer in model.named_modules()
        for counter in (fused_forward(layer), layer)
        if isinstance(counter, _Counts)
    }
    return {name: report for name, report in reports.items() if report}


def deterministic_embeddings(model: nn.Module) -> list[str]:
    """Replace every nn.Embedding inside `model` by a ga.Embedding, in place.

    Weights, hooks, ties and state_dict stay. Subclasses with a forward of their own stay as they
    are, with a warning.

    Args:
        model: an nn.Module that contains embeddings.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ArgumentError: with nothing changed, for a layer with max_norm, sparse or
            scale_grad_by_freq, for a model that is an nn.Embedding itself, and while a TrainStep
            has replaced its forward.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
        >>> ga.deterministic_embeddings(model)
        ['0']
        >>> isinstance(model[0], ga.Embedding)
        True
    """
    check_module("model", model)
    plain = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Embedding}
    for name, layer in plain.items():
        if not name:
            raise ArgumentError("the model is an nn.Embedding itself; make a ga.Embedding instead")
        if what := refused_options(layer):
            raise ArgumentError(f"{name} has {what}; expected a plain nn.Embedding")
        if fused_forward(layer) is not None:
            raise ArgumentError(f"{name} is at work in a TrainStep; call its close() first")
    others = [
        f"{name} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding)
        and (type(layer) not in (nn.Embedding, Embedding) or not has_class_forward(layer))
        and fused_forward(layer) is None
    ]
    if others:
        warnings.warn(
            f"left as they are, because they have a forward of their own: {', '.join(others)}",
            stacklevel=2,
        )
    # A layer that is registered several times stays one layer.
    made = {layer: Embedding.sharing(layer) for layer in plain.values() if has_class_forward(layer)}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if layer in made:
            model.set_submodule(name, made[layer])
    return [name for name, layer in plain.items() if layer in made]
