"""ga.Embedding and ga.Encoder: the encoder as modules, and the operations of torch.library that they are made of.

    >>> ga.deterministic_embeddings(model)                      # every nn.Embedding of a model of yours, in place
    >>> encoder = ga.Encoder(50257, 768, 1024)                  # encoder(tokens): (B, T) -> (B, T, 768)
    >>> encoder.wte.invalid_tokens()                            # None, or how many tokens were out of range, and one's place

What they compute, and in which order: ops/embedding_backward.py. Segments are found beside the forward kernel, on a second stream. Tokens on the host are looked at
before anything is done. Under torch.func and forward-mode differentiation torch's own embedding runs.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import takes
from ..errors import ArgumentError
from ..ops.embedding_backward import (
    TYPES,
    add_gradients,
    check_range,
    launch_forward,
    reference_encoder,
)
from ..ops.token_sort import MOST, Segments, check_tokens, launch_segments, reference_segments
from .fused_linear import asked, fused_classes, rows_asked

_library = torch.library.Library("gpuaccel", "FRAGMENT")


# ---- the operations that autograd and torch.compile see -------------------------------------------------------------

_library.define(
    "encoder_forward(Tensor tokens, Tensor wte, Tensor? wpe, Tensor(a!) invalid, int left_out, bool segments) -> (Tensor, Tensor)"
)
_library.define(
    "encoder_backward_(Tensor(a!) sums, Tensor dout, Tensor? segments, bool by_count, bool into_arena) -> ()"
)


@functools.cache
def _beside(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def _forward(tokens, wte, wpe, invalid, left_out, segments):
    """(output, segments as (3 N,) int32 or an empty tensor)."""
    if not (takes(wte.device) and wte.dtype in TYPES and tokens.numel() and wte.shape[1]):
        _count_invalid(tokens, len(wte), invalid)
        found = (
            reference_segments(tokens, len(wte), left_out).buffer
            if segments
            else torch.empty(0, dtype=torch.int32, device=tokens.device)
        )
        return reference_encoder(tokens, wte, wpe), found
    tokens, wte, wpe = (
        tokens.contiguous(),
        wte.contiguous(),
        wpe if wpe is None else wpe.contiguous(),
    )
    if not segments:
        return launch_forward(tokens, wte, wpe, invalid), torch.empty(
            0, dtype=torch.int32, device=tokens.device
        )
    side = _beside(wte.device.index) if wte.is_cuda else None
    found, scratch = launch_segments(tokens.view(-1), len(wte), left_out, side)
    try:
        return launch_forward(tokens, wte, wpe, invalid), found.buffer
    finally:
        if side is not None:  # before anybody uses what it writes, or gets the memory of `scratch`
            torch.cuda.current_stream(wte.device).wait_stream(side)
        del scratch


def _count_invalid(tokens, vocab, invalid):
    """What encoder_forward leaves there, in torch."""
    flat = tokens.reshape(-1).long()
    if len(flat):
        wrong = (flat < 0) | (flat >= vocab)
        at = wrong.long().argmax()
        one = torch.stack([at << 32 | (tokens.shape[-1] if tokens.dim() else 1), flat[at]])
        one = torch.where(wrong.any() & (invalid[0] == 0), one, invalid[1:])
        invalid.copy_(torch.cat([invalid[:1] + wrong.sum(), one]))


def _backward(sums, dout, segments, by_count, into_arena, wanted=None):
    """sums += the gradient: that of wte, or without segments that of wpe."""
    if (
        into_arena and rows_asked(sums, wanted) is not None or not dout.numel()
    ):  # asked first: a new window may have to clear the slice
        return
    found = (
        None if segments is None else Segments(segments, dout.numel() // dout.shape[-1], len(sums))
    )
    add_gradients(*((None, sums) if found is None else (sums, None)), dout, found, by_count, None)


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
    """wte[tokens] + wpe, whose backward adds into the sums of an arena, or hands fresh gradients to autograd."""

    @staticmethod
    def forward(ctx, tokens, wte, wpe, sums, invalid, left_out, by_count):
        out, segments = torch.ops.gpuaccel.encoder_forward(
            tokens, wte, wpe, invalid, left_out, ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(segments)
        ctx.sums, ctx.by_count, ctx.weights = (
            sums,
            by_count,
            [None if w is None else (w.shape, w.dtype) for w in (wte, wpe)],
        )
        return out

    @staticmethod
    def backward(ctx, dout):
        (segments,) = ctx.saved_tensors
        fresh = [None, None]
        for i, sums in enumerate(ctx.sums):
            if ctx.needs_input_grad[1 + i]:
                found = None if i else segments
                if sums is None:
                    fresh[i] = _RowSums.apply(dout, found, *ctx.weights[i], ctx.by_count)
                elif torch.compiler.is_compiling():
                    torch.ops.gpuaccel.encoder_backward_(
                        sums, dout.contiguous(), found, ctx.by_count, True
                    )
                else:
                    _backward(
                        sums,
                        dout.contiguous(),
                        found,
                        ctx.by_count,
                        True,
                        asked(ctx.next_functions[1 + i : 2 + i]),
                    )
        return None, *fresh, None, None, None, None


class _RowSums(torch.autograd.Function):
    """A fresh gradient of wte, or without segments of wpe; what a second derivative goes back through is a look-up (as torch's, also by count)."""

    @staticmethod
    def forward(ctx, dout, segments, shape, dtype, by_count):
        sums = dout.new_zeros(shape, dtype=dtype)
        torch.ops.gpuaccel.encoder_backward_(sums, dout.contiguous(), segments, by_count, False)
        ctx.save_for_backward(segments)
        ctx.shape, ctx.dtype = dout.shape, dout.dtype
        return sums

    @staticmethod
    def backward(ctx, grad):
        (segments,) = ctx.saved_tensors
        if segments is None:
            return grad[: ctx.shape[-2]].expand(ctx.shape).to(ctx.dtype), None, None, None, None
        row, token = segments[: 2 * (len(segments) // 3)].view(-1, 2).long().unbind(1)
        kept = token < len(grad)
        rows = torch.where(kept[:, None], grad[torch.where(kept, token, 0)], 0.0)
        return (
            rows.new_zeros(rows.shape)
            .index_copy(0, row & MOST, rows)
            .view(ctx.shape)
            .to(ctx.dtype),
            None,
            None,
            None,
            None,
        )


def _none_seen(device) -> Tensor:
    """(3,) int64 for encoder_forward: how many tokens were out of range; of one of them row << 32 | T, and the token."""
    with torch.inference_mode(False):
        return torch.zeros(3, dtype=torch.int64, device=device)


def _differentiates_otherwise() -> bool:
    """torch.func's transforms, or forward-mode differentiation, which know torch's operations only."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


def encode(tokens: Tensor, wte: "Embedding", wpe: "Embedding | None" = None) -> Tensor:
    """wte.weight[tokens], and with wpe + wpe.weight[position]. tokens: (..., T) int64 or int32."""
    check_tokens(tokens, len(wte.weight))
    if tokens.device != wte.weight.device:
        raise ArgumentError(
            f"tokens are on {tokens.device}, wte on {wte.weight.device}; expected one device"
        )
    if _differentiates_otherwise():
        out = F.embedding(
            tokens, wte.weight, wte.padding_idx, scale_grad_by_freq=wte.scale_grad_by_freq
        )
        return out if wpe is None else out + wpe.weight[: tokens.shape[-1]]
    check_range(tokens, len(wte.weight))
    weights = wte.weight, None if wpe is None else wpe.weight
    if wte.invalid is None:  # made on the meta device
        wte.invalid = _none_seen(tokens.device)
    left_out = -1 if wte.padding_idx is None else wte.padding_idx
    if not torch.is_grad_enabled() or not any(w is not None and w.requires_grad for w in weights):
        return torch.ops.gpuaccel.encoder_forward(tokens, *weights, wte.invalid, left_out, False)[0]
    sums = wte.arena_grad, None if wpe is None else wpe.arena_grad
    return _Encode.apply(tokens, *weights, sums, wte.invalid, left_out, wte.scale_grad_by_freq)


# ---- public: modules ------------------------------------------------------------------------------------------------


class Embedding(nn.Embedding):
    """A drop-in for nn.Embedding (same arguments and state_dict) whose gradient has the same bits in every run, and goes straight into an arena.

    tokens: any shape, int64 or int32. max_norm and sparse are refused (ArgumentError); torch.jit, torch.fx and nested tensors do not know it. A token
    out of range: see this module's first lines, and invalid_tokens()."""

    arena_grad = (
        None  # (V, C) fp32 slice of arena.grads, while an accumulator of mode "fused" is at work
    )
    stays = False  # False: a plain nn.Embedding that an accumulator has made one of these until it is closed

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wear(self)
        self.stays = True

    @staticmethod
    def refused(part: nn.Embedding) -> "str | None":
        """What of this module an embedding here does not do, in words."""
        if part.max_norm is not None or part.sparse:
            return f"{f'max_norm={part.max_norm}' if part.max_norm is not None else 'sparse=True'}: the weight is not changed in forward and its gradient is dense here"
        return None

    @classmethod
    def wear(cls, part: nn.Embedding) -> nn.Embedding:
        """Make a plain nn.Embedding one of these, in place: its parameter, hooks and state stay. ArgumentError for what is refused."""
        if what := cls.refused(part):
            raise ArgumentError(f"{what}; keep torch.nn.Embedding for it")
        part.__class__ = cls
        # No buffer: the ranks of a data-parallel module would all get the first one's.
        part.invalid = None if part.weight.is_meta else _none_seen(part.weight.device)
        return part

    @staticmethod
    def shed(part: "Embedding"):
        """The way back to a plain nn.Embedding."""
        if not part.stays:
            del part.invalid
            part.__class__ = nn.Embedding

    def forward(self, tokens: Tensor) -> Tensor:
        return encode(tokens, self)

    def invalid_tokens(self, reset: bool = False) -> "dict | None":
        """{"count": tokens out of range so far, "token": one of the first batch that had any, "position": (row, column) of it there}, or None.
        reset: count anew from here on. Waits for the device."""
        count, where, token = (0, 0, 0) if self.invalid is None else self.invalid.tolist()
        if reset and self.invalid is not None:
            self.invalid.zero_()
        row, T = where >> 32, max(where & 0xFFFFFFFF, 1)
        return {"count": count, "token": token, "position": (row // T, row % T)} if count else None

    # ---- for captured steps: graphs/participant.py ----

    def graph_key(self):
        """A captured step keeps no host value of this module."""
        return None

    def tensors_changed_by_step(self) -> "list[Tensor]":
        """forward counts tokens that are out of range, in a tensor that is no buffer."""
        return [] if self.invalid is None else [self.invalid]

    def _apply(
        self, fn, recurse=True
    ):  # module.to(...), to_empty(): what was counted comes along, and is never memory without a value
        super()._apply(fn, recurse)
        if self.weight.is_meta:
            self.invalid = None
        elif self.invalid is None or self.invalid.device != self.weight.device:
            seen = _none_seen(self.weight.device)
            self.invalid = seen if self.invalid is None else seen.copy_(self.invalid)
        return self

    def __getstate__(self):  # a copy or pickle is not the arena's
        return {key: value for key, value in self.__dict__.items() if key != "arena_grad"}

    def __reduce_ex__(self, protocol):
        if self.stays:
            return super().__reduce_ex__(protocol)
        state = {key: value for key, value in self.__getstate__().items() if key != "invalid"}
        return nn.Embedding.__new__, (nn.Embedding,), state


fused_classes.update({nn.Embedding: Embedding, Embedding: Embedding})


class Encoder(nn.Module):
    """tokens (..., T) -> wte[token] + wpe[position], (..., T, dim); T up to `positions`. One kernel forward, beside the segments'.

    wte, wpe: Embedding modules of (vocab, dim) and (positions, dim), initialised with std 0.02 as GPT-2's. They hold the weights and are not
    called: hooks on them do not run."""

    def __init__(self, vocab: int, dim: int, positions: int, *, device=None, dtype=None):
        super().__init__()
        self.wte = Embedding(vocab, dim, device=device, dtype=dtype)
        self.wpe = Embedding(positions, dim, device=device, dtype=dtype)
        for part in (self.wte, self.wpe):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens(tokens, len(self.wte.weight))
        if not tokens.dim() or tokens.shape[-1] > len(self.wpe.weight):
            raise ArgumentError(
                f"tokens have shape {tuple(tokens.shape)}; expected (..., T) with T up to {len(self.wpe.weight)}, the rows of wpe"
            )
        if self.wte.weight.dtype != self.wpe.weight.dtype:
            raise ArgumentError(
                f"wpe is {self.wpe.weight.dtype}, wte {self.wte.weight.dtype}; expected one dtype"
            )
        return encode(tokens, self.wte, self.wpe)

    def extra_repr(self):
        return f"{self.wte.num_embeddings} tokens, {self.wpe.num_embeddings} positions, {self.wte.embedding_dim} channels"


def deterministic_embeddings(model: nn.Module) -> "list[str]":
    """Make every nn.Embedding of `model` a ga.Embedding, in place and for good. Returns their names; weights, hooks, ties and state_dict stay.

    ArgumentError, with nothing changed, for one with max_norm or sparse=True; subclasses with a forward of their own stay as they are, with a warning."""
    found = [(name, part) for name, part in model.named_modules() if type(part) is nn.Embedding]
    for name, part in found:
        if what := Embedding.refused(part):
            raise ArgumentError(f"{name or 'the model'} has {what}; expected a plain nn.Embedding")
    for part in model.modules():
        if (
            type(part) is Embedding
        ):  # an open accumulator may have made it one, and would take it back
            part.stays = True
    own = [
        f"{name} ({type(part).__name__})"
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and type(part) not in fused_classes
    ]
    if own:
        warnings.warn(
            f"left as they are, because they are classes of their own: {', '.join(own)}",
            stacklevel=2,
        )
    for _, part in found:
        Embedding.wear(part).stays = True
    return [name for name, _ in found]
