"""The arena: flat buffers with a module's trainable tensors, gradient sums and fp32 masters.

    arena = ga.Arena(model)        # the module's parameters become views, all else is unchanged
    arena.weights, arena.grads     # (N,) fp32 each
    arena.bf16_weights             # (N,) bf16; None for a module without bf16 parameters
    opt = torch.optim.AdamW(arena.parameters())
    print(arena.summary())
    arena.release()                # ordinary parameters again

Layout: tensors stand in reverse registration order, which is the order in which backward computes
their gradients. Each is padded with zeros to a multiple of CHUNK elements. So a transformer block,
a reduction bucket and a shard are contiguous ranges, and a chunk never crosses a tensor. A block is
an item of the module's outermost ModuleList or Sequential; parameters outside of these form blocks
of their own. Tied weights appear once, frozen parameters not at all.

fp32 parameters live in `weights`. bf16 parameters live in `bf16_weights`, their fp32 masters in
`weights`: an optimizer updates the masters, and the bf16 copies follow after its step.

Gradients follow one rule, and nothing else remembers them:

| a parameter's `.grad` is | then |
|---|---|
| the arena's slice | it is the sum so far: torch adds to it in place, in fp32 |
| another tensor, or has got other memory | that is the whole sum; it is copied into the slice |
| None | there is no gradient; the slice is stale, and the next write overwrites it |

A fresh gradient is another tensor, which autograd makes where `.grad` is None. At the end of its
backward, or when many bytes wait, all of them are copied into their slices by one call.

Each parameter has a storage of its own, which begins at its slice of the buffer and keeps the
buffer alive. Kernels see one buffer; torch.save, pickle, safetensors, accelerate and everything
else that compares storages see separate, ordinary tensors.

This module lays out and stores; it launches no kernel of this package.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ArgumentError, check_module, described
from ..ops import CHUNK, check_gradient

# Fresh gradients are copied into their slices when this many bytes wait.
MAX_FRESH_BYTES = 256 * 2**20

# Hooks of arenas that are gone: removed when an arena is made or released.
_abandoned_hooks: list = []
_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()


@dataclass(frozen=True)
class Segment:
    """One tensor's range of the arena. Offsets and counts are in elements.

    Attributes:
        name: of the parameter in the module.
        shape: of the tensor.
        numel: elements without padding.
        offset: of the first element, a multiple of CHUNK.
        block: index into arena.blocks.
        decay: whether weight decay applies (matrices, not norms and biases).
        lr_scale: multiplier of the learning rate.
        embedding: whether it is the weight of an nn.Embedding that is not also an output layer.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    block: int
    decay: bool
    lr_scale: float
    embedding: bool

    @property
    def padded(self) -> int:
        """Elements with padding, a multiple of CHUNK."""
        return -(-self.numel // CHUNK) * CHUNK


@dataclass(frozen=True)
class Block:
    """A contiguous range of the arena, of one block of the module.

    Attributes:
        name: of the block in the module, or of its first and last parameter.
        start: the block's first element.
        stop: the element behind its last one.
        first: index of its first segment.
        last: the index behind that of its last segment.
    """

    name: str
    start: int
    stop: int
    first: int
    last: int


class Summary:
    """Bytes of the fp32 gradient accumulator; `print` shows them by block.

    `Summary(*lay_out(module))` needs no memory: the module may be on the meta device.

    Args:
        segments: of the arena, in its order.
        blocks: of the arena, in its order.

    Attributes:
        block_bytes: of everything but embeddings.
        embedding_bytes: of embeddings.
        padding_bytes: of the padding between tensors.
        total_bytes: of the whole accumulator.
    """

    def __init__(self, segments: "list[Segment]", blocks: "list[Block]"):
        numel = blocks[-1].stop
        self.block_bytes = sum(4 * s.numel for s in segments if not s.embedding)
        self.embedding_bytes = sum(4 * s.numel for s in segments if s.embedding)
        self.padding_bytes = 4 * (numel - sum(s.numel for s in segments))
        self.total_bytes = 4 * numel
        self.tensors = len(segments)
        self.blocks = len(blocks)
        # Of each block: name, number of tensors, bytes.
        self.lines = [
            (b.name, b.last - b.first, 4 * sum(s.numel for s in segments[b.first : b.last]))
            for b in blocks
        ]

    def __str__(self):
        mib = 2.0**20
        lines = [
            f"gradient accumulator (fp32): {self.total_bytes / mib:,.1f} MiB "
            f"in {self.tensors} tensors, {self.blocks} blocks",
            f"  blocks, LM head and norms  {self.block_bytes / mib:10,.1f} MiB",
            f"  embedding                  {self.embedding_bytes / mib:10,.1f} MiB",
            f"  padding                    {self.padding_bytes / mib:10,.1f} MiB",
            "in the order of the arena:",
        ]
        # Neighbouring blocks of equal size share a line: 24 blocks need not be 24 lines.
        for (tensors, size), group in itertools.groupby(self.lines, key=lambda line: line[1:]):
            names = [name for name, *_ in group]
            name = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"  {name:40} {tensors:4} tensors {size / mib:10,.2f} MiB each")
        return "\n".join(lines)

    __repr__ = __str__


def own_storage(piece: Tensor) -> Tensor:
    """The memory of `piece`, seen through a storage that begins and ends with it.

    Args:
        piece: contiguous, any dtype and device.

    Returns:
        A tensor of its shape, with a version counter of its own. It shares the memory of `piece`
        and keeps it alive: a write to one is a write to the other. Code that compares storages
        takes the two for different tensors.
    """
    piece = piece.detach()
    if piece.numel() == 0:
        return torch.empty_like(piece)
    flat = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(piece.view(-1)))
    return flat.view(piece.shape)


def _block_names(module: nn.Module) -> "dict[int, str]":
    """id of a parameter inside the outermost ModuleLists and Sequentials -> name of its block."""
    names: "dict[int, str]" = {}

    def walk(part: nn.Module, prefix: str):
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            for name, item in part.named_children():
                for p in item.parameters():
                    names.setdefault(id(p), f"{prefix}{name}")
        else:
            for name, child in part.named_children():
                walk(child, f"{prefix}{name}.")

    walk(module, "")
    return names


def trainable(module: nn.Module) -> "list[tuple[str, nn.Parameter]]":
    """(name, parameter) of each tensor that an arena holds, in registration order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def lay_out(
    module: nn.Module,
    decay: "Callable[[str, nn.Parameter], bool] | None" = None,
    lr_scale: "Callable[[str, nn.Parameter], float] | None" = None,
) -> "tuple[list[Segment], list[Block]]":
    """The range of each trainable tensor of `module` in an arena.

    Reads names and shapes only. The arguments are those of Arena."""
    decay = decay or (lambda name, p: p.dim() >= 2)
    lr_scale = lr_scale or (lambda name, p: 1.0)
    block_names = _block_names(module)
    # A tied weight stands in this list once per name.
    ids = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    embeddings = {
        id(p)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for p in part.parameters()
        if ids.count(id(p)) == 1
    }
    segments: "list[Segment]" = []
    blocks: "list[Block]" = []
    offset = 0
    for block_name, members in itertools.groupby(
        reversed(trainable(module)), key=lambda pair: block_names.get(id(pair[1]))
    ):
        start = offset
        first = len(segments)
        for name, p in members:
            segment = Segment(
                name=name,
                shape=p.shape,
                numel=p.numel(),
                offset=offset,
                block=len(blocks),
                decay=bool(decay(name, p)),
                lr_scale=float(lr_scale(name, p)),
                embedding=id(p) in embeddings,
            )
            segments.append(segment)
            offset += segment.padded
        if block_name is None:
            ends = dict.fromkeys([segments[first].name, segments[-1].name])
            block_name = " .. ".join(ends)
        blocks.append(Block(block_name, start, offset, first, len(segments)))
    return segments, blocks


def _check_parameters(module: nn.Module, named: "list[tuple[str, nn.Parameter]]"):
    """ArgumentError, naming the parameter, where an arena cannot hold these parameters."""
    if not named:
        raise ArgumentError(
            f"{type(module).__name__} has no trainable parameter (requires_grad=True): there is "
            "nothing to lay out"
        )
    first_name, first = named[0]
    for name, p in named:
        problem = None
        if p.layout != torch.strided:
            problem = f"has layout {p.layout}; expected a dense tensor"
        elif p.dtype == torch.float16:
            problem = (
                "is float16; expected float32 or bfloat16. Use bfloat16 (same bytes, no loss "
                "scaling), or keep fp32 parameters under torch.autocast with a GradScaler"
            )
        elif p.dtype not in (torch.float32, torch.bfloat16):
            problem = f"is {p.dtype}; expected float32 or bfloat16"
        elif p.is_meta:
            problem = "is on the meta device; give it memory first (module.to_empty)"
        elif p.device != first.device:
            problem = (
                f"is on {p.device}, {first_name} on {first.device}; an arena lies on one device"
            )
        elif any(id(p) in other._index for other in _arenas):
            problem = "is already in an arena; call release() on that one first"
        if problem:
            raise ArgumentError(f"parameter {name} {problem}")
    for name, part in module.named_modules():
        is_sparse = getattr(part, "sparse", False) is True
        if is_sparse and any(p.requires_grad for p in part.parameters()):
            raise ArgumentError(
                f"{name or type(part).__name__} makes sparse gradients (sparse=True); the "
                "accumulator is dense"
            )
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in named
        if p.numel()
    )
    for (_, stop, name), (start, _, next_name) in zip(spans, spans[1:]):
        if start < stop:
            raise ArgumentError(
                f"parameters {name} and {next_name} overlap in memory; as slices of the arena they "
                "would no longer"
            )


_TENSOR_GRAD: Any = Tensor.grad


class Master(nn.Parameter):
    """The fp32 master of a bf16 parameter. Its `.grad` is the parameter's: both have one sum."""

    # None in a copy, until its arena has it.
    parameter: "nn.Parameter | None" = None
    arena: "Callable[[], Arena | None]" = staticmethod(lambda: None)
    number: int

    @property
    def grad(self) -> "Tensor | None":
        """The sum, in the arena's slice."""
        if self.parameter is None:
            return _TENSOR_GRAD.__get__(self)
        arena = self.arena()
        return self.parameter.grad if arena is None else arena.gradient(self.number)

    @grad.setter
    def grad(self, value: "Tensor | None"):
        if self.parameter is None:
            _TENSOR_GRAD.__set__(self, value)
        else:
            self.parameter.grad = value

    @grad.deleter
    def grad(self):
        self.grad = None

    def __reduce_ex__(self, protocol):
        # The arena that is pickled with it says whose master it is.
        return _restored_master, (self.data, self.requires_grad)


def _restored_master(data: Tensor, requires_grad: bool) -> Master:
    return Master(data, requires_grad)


class GradientListener:
    """Told about gradients while a backward runs, by autograd's threads: `arena.listener`."""

    def gradient_complete(self, i: int):
        """Backward has computed all of tensor i's gradient, which may still wait for
        Arena.collect()."""

    def product_added(self, tensors: "dict[int, bool]"):
        """A product has added its gradient (optim/products.py).

        Args:
            tensors: index of each tensor of the product -> whether its gradient is complete,
                provided that this backward runs as many products as the one before.
        """


class Arena:
    """Lay out the trainable parameters of `module`, fp32 or bf16, all on one device.

    A parameter that is unfrozen later is not in the arena: release() and make a new one. The module
    is saved, pickled and copied as without an arena.

    bf16 parameters follow their masters. An edit in place of a bf16 parameter (load_state_dict,
    `copy_`, nn.init) is noticed by the tensor's version, and its master takes the new value before
    the next step. An edit through `.data` or NumPy is not: call adopt(everything=True) after it.

    Args:
        module: an nn.Module whose trainable parameters are fp32 or bf16, dense, on one device.
        decay: function of (name, parameter) -> bool: whether weight decay applies. Default: to
            tensors of two and more dimensions.
        lr_scale: function of (name, parameter) -> float, the multiplier of the learning rate.
            Default: 1 for all.

    Attributes:
        weights: (N,) fp32, the fp32 parameters and the fp32 masters of bf16 parameters.
        grads: (N,) fp32, the sums of the gradients.
        bf16_weights: (N,) bf16, the bf16 parameters; None for a module without any.
        params: the module's parameters, in the order of the arena.
        masters: of each parameter its fp32 master, or itself where it is fp32.
        grad_views: the slices of `grads`, in the tensors' shapes. That of a tensor whose `.grad` is
            None is stale.
        segments: where each tensor lies (Segment).
        blocks: the ranges of the module's blocks (Block).

    Raises:
        ArgumentError: with nothing changed and the parameter named, for a module without trainable
            parameters, and for one whose parameters are sparse, complex, fp16, fp64, on the meta
            device, on several devices, in another arena, or overlap in memory; for what is no
            module, and for a decay or lr_scale that is no function.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LayerNorm(2))
        >>> arena = ga.Arena(model)
        >>> arena.parameter_names()
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> arena.weights.shape, arena.grads.dtype
        (torch.Size([16384]), torch.float32)
        >>> opt = torch.optim.AdamW(arena.parameter_groups(weight_decay=0.1), lr=1e-3)
        >>> arena.release()
    """

    weights: Tensor
    grads: Tensor
    bf16_weights: "Tensor | None"
    params: "list[nn.Parameter]"
    masters: "list[nn.Parameter]"
    grad_views: "list[Tensor]"
    segments: "list[Segment]"
    blocks: "list[Block]"

    def __init__(
        self,
        module: nn.Module,
        *,
        decay: "Callable[[str, nn.Parameter], bool] | None" = None,
        lr_scale: "Callable[[str, nn.Parameter], float] | None" = None,
    ):
        check_module("module", module, ", not its parameters: ga.Arena(model)")
        for name, function in (("decay", decay), ("lr_scale", lr_scale)):
            if function is not None and not callable(function):
                raise ArgumentError(
                    f"{name} is {described(function)}; expected a function of (name, parameter), "
                    "or None"
                )
        named = trainable(module)
        _check_parameters(module, named)
        segments, blocks = lay_out(module, decay, lr_scale)
        self._build(module, [p for _, p in reversed(named)], segments, blocks)

    def _build(self, module, params, segments, blocks, masters=None):
        """Allocate the buffers, move the parameters into them, and follow optimizer steps.

        params, and masters where a copy or a pickle has some: in the order of the arena."""
        self.module: nn.Module = module
        self.device: torch.device = params[0].device
        self.params = params
        self.segments = segments
        self.blocks = blocks
        self.numel: int = blocks[-1].stop
        self._index = {id(p): i for i, p in enumerate(params)}
        self._allocate(masters)
        # Told about gradients while a backward runs.
        self._listeners: "list[GradientListener]" = []
        # The backward, by autograd's number, whose fresh gradients are collected at its end.
        self._collecting = -1
        self._fresh_bytes = 0
        self._handles: "list[Any]" = []
        for p in params:
            if p.dtype != torch.float32:
                # None: `.grad` may have another dtype than the parameter.
                p.grad_dtype = None
        # The TrainStep whose arena this is, if it has one.
        self._user: "Callable[[], object]" = _nobody
        # Called by release(): functions that remove what was built on this arena.
        self.before_release: "list[Callable[[], object]]" = []
        hooks = _follow_optimizers(self) if self._bf16_pairs else []
        # An arena that is garbage-collected without release() leaves its hooks to the next arena:
        # they cannot be removed at that moment, for torch may be calling them.
        self._hooks = weakref.finalize(self, abandon, hooks)
        _remove(_abandoned_hooks)
        _arenas.add(self)
        self._follow_gradients()

    def _allocate(self, masters: "list[nn.Parameter] | None"):
        has_bf16 = any(p.dtype == torch.bfloat16 for p in self.params)
        weights = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        grads = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        bf16_weights = None
        if has_bf16:
            bf16_weights = torch.zeros(self.numel, dtype=torch.bfloat16, device=self.device)
        # The first chunk of each tensor; at the end the number of chunks.
        self.first_chunk = [s.offset // CHUNK for s in self.segments] + [self.numel // CHUNK]
        # Of each chunk: its tensor, how many of its elements are not padding, its index in the
        # tensor, its index in the arena.
        chunks = torch.empty(self.numel // CHUNK, 4, dtype=torch.int32)
        for i, s in enumerate(self.segments):
            index = torch.arange(s.padded // CHUNK)
            columns = [
                torch.full_like(index, i),
                (s.numel - index * CHUNK).clamp(max=CHUNK),
                index,
                index + self.first_chunk[i],
            ]
            chunks[self.first_chunk[i] : self.first_chunk[i + 1]] = torch.stack(columns, 1)
        tensor_to_block = torch.tensor([s.block for s in self.segments], dtype=torch.int32)
        chunk_table = chunks.to(self.device)
        chunk_to_tensor = chunks[:, 0].contiguous().to(self.device)
        tensor_to_block = tensor_to_block.to(self.device)
        # Everything that may fail has been allocated: from here on the module changes.
        self.weights = weights
        self.grads = grads
        self.bf16_weights = bf16_weights
        self.chunk_table = chunk_table
        self.chunk_to_tensor = chunk_to_tensor
        self.tensor_to_block = tensor_to_block
        self.masters = [self._move_into_slices(i, masters) for i in range(len(self.params))]
        # Each has a storage and a version of its own. Where the gradients that one operation writes
        # share a storage, torch.compile's Inductor copies them before it and back after it.
        self.grad_views = [own_storage(self.slice(grads, i)) for i in range(len(self.segments))]
        self._grad_addresses = [view.data_ptr() for view in self.grad_views]
        # Sums of squares that a reduction has left, and the versions of the gradients then.
        self._squares: "tuple[Tensor, list[int]] | None" = None
        self._addresses = [p.data_ptr() for p in self.params]
        # (parameters of a submodule, name in it, index): where the module registers each parameter.
        self._registrations = [
            (part._parameters, key, self._index[id(p)])
            for part in self.module.modules()
            for key, p in part._parameters.items()
            if id(p) in self._index
        ]
        self.master_ids = {id(master) for master in self.masters}
        # (bf16 parameter, its master).
        self._bf16_pairs = [
            (p, master) for p, master in zip(self.params, self.masters) if master is not p
        ]
        self.weights_current()

    @torch.no_grad()
    def _move_into_slices(self, i: int, masters: "list[nn.Parameter] | None") -> nn.Parameter:
        """Move parameter i and its master into their slices, with their values.

        Returns:
            The master, which is masters[i] where there is one, the parameter itself where it is
            fp32.
        """
        p = self.params[i]
        weight = own_storage(self.slice(self.weights, i))
        if p.dtype == torch.float32:
            p.data = weight.copy_(p)
            return p
        if masters is None:
            master = Master(weight.copy_(p))
        else:
            master = masters[i]  # type: ignore[assignment]
            master.data = weight.copy_(master)
        master.parameter, master.arena, master.number = p, weakref.ref(self), i
        assert self.bf16_weights is not None  # a parameter is not fp32
        p.data = own_storage(self.slice(self.bf16_weights, i)).copy_(p)
        return master

    def slice(self, buffer: Tensor, i: int) -> Tensor:
        """Tensor i's part of a flat buffer (N,), in the tensor's shape.

        Args:
            buffer: (N,), one of the arena's buffers or one like them.
            i: index of the tensor in `segments`.

        Returns:
            A view of the buffer in the tensor's shape, without the padding.
        """
        s = self.segments[i]
        return buffer[s.offset : s.offset + s.numel].view(s.shape)

    def number_of(self, parameter: Tensor) -> "int | None":
        """The index of a parameter of the module in the arena; None: it is not in the arena.

        Args:
            parameter: a parameter of the module; a master is none.
        """
        return self._index.get(id(parameter))

    @staticmethod
    def parameters_held() -> "set[int]":
        """ids of all parameters that lie in some arena."""
        return {id(p) for arena in _arenas for p in arena.params}

    @staticmethod
    def all() -> "list[Arena]":
        """All arenas that are not released."""
        return list(_arenas)

    @staticmethod
    def of(module: nn.Module) -> "Arena | None":
        """The arena that holds this module's parameters, None when there is none.

        Args:
            module: the very module that an arena was made of; a part of it has none.
        """
        return next((a for a in _arenas if a.module is module), None)

    def __repr__(self):
        return (
            f"Arena({len(self.segments)} tensors in {len(self.blocks)} blocks, "
            f"{self.numel:,} elements on {self.device})"
        )

    # ---- for optimizers and checkpoints ----

    def parameters(self) -> "list[nn.Parameter]":
        """Tensors for an optimizer, all fp32, in the module's registration order.

        Of a bf16 parameter it is the master, of an fp32 parameter the parameter itself."""
        self.adopt()
        return self.masters[::-1]

    def parameter_names(self) -> "list[str]":
        """Their names, in the same order."""
        return [s.name for s in reversed(self.segments)]

    def named_parameters(self) -> "dict[str, nn.Parameter]":
        """name -> tensor of each of parameters(), in their order."""
        return dict(zip(self.parameter_names(), self.parameters()))

    def named_master(self) -> "dict[str, nn.Parameter]":
        """name -> fp32 master of each bf16 parameter; empty for an fp32 module.

        The masters have adopted edits of their parameters."""
        self.adopt()
        return {
            s.name: master
            for s, master, p in zip(self.segments, self.masters, self.params)
            if master is not p
        }

    def parameter_groups(
        self, weight_decay: float = 0.1, lr: "float | None" = None
    ) -> "list[dict]":
        """Parameter groups for any torch optimizer.

        Args:
            weight_decay: for the tensors whose segment has `decay`; 0 for the others.
            lr: with it there is one group per lr_scale, whose rate is lr * lr_scale.

        Returns:
            A list of dicts with `params`, `weight_decay` and, where it is given, `lr`.
        """
        groups: "dict[tuple[bool, float], dict]" = {}
        for s, master in zip(reversed(self.segments), self.parameters()):
            group = groups.setdefault(
                (s.decay, s.lr_scale),
                {"params": [], "weight_decay": weight_decay if s.decay else 0.0},
            )
            group["params"].append(master)
            if lr is not None:
                group["lr"] = lr * s.lr_scale
        return list(groups.values())

    def summary(self) -> Summary:
        """Bytes of the accumulator, before padding and with it; `print` it."""
        return Summary(self.segments, self.blocks)

    # ---- gradients ----

    def _follow_gradients(self):
        """Call a hook after each gradient of a backward: see _gradient_hook."""
        if self not in _arenas or self._handles:
            return
        weak = weakref.ref(self)
        for i, p in enumerate(self.params):
            hook = _gradient_hook(weak, i, self._grad_addresses, self._listeners)
            # A frozen parameter takes no hook.
            with self._trainable(p):
                self._handles.append(p.register_post_accumulate_grad_hook(hook))

    @staticmethod
    @contextlib.contextmanager
    def _trainable(p: nn.Parameter):
        trained = p.requires_grad
        p.requires_grad_(True)
        yield
        p.requires_grad_(trained)

    def _remove_hooks(self):
        while self._handles:
            self._handles.pop().remove()

    def has_hooks(self, i: int) -> bool:
        """Whether somebody else has registered a post-accumulate hook on tensor i.

        Args:
            i: index of the tensor in `segments`.
        """
        own = {handle.id for handle in self._handles[i : i + 1]}
        return not own.issuperset(self.params[i]._post_accumulate_grad_hooks or ())

    @contextlib.contextmanager
    def collected_by_hand(self):
        """Context manager: the caller calls collect() after each backward.

        Python is then not called for each gradient.

        Returns:
            A context manager.
        """
        self._remove_hooks()
        try:
            yield
        finally:
            self._follow_gradients()

    def claim(self, user) -> "Callable[[], None]":
        """Let one object alone run the steps of this arena: a TrainStep.

        Args:
            user: this object, which is held weakly.

        Returns:
            A function that ends it.

        Raises:
            ArgumentError: while another one does.
        """
        if self._user() is not None:
            raise ArgumentError(
                "a TrainStep of this model is open already; call close() on that one first"
            )
        self._user = weakref.ref(user)

        def end():
            self._user = _nobody

        return end

    def _collect_later(self, grad: Tensor):
        """Collect a gradient that is not a slice: at the end of the backward, or when many bytes
        wait."""
        if grad.requires_grad:
            # With create_graph=True `.grad` keeps its graph until a step uses it.
            return
        task = torch._C._current_graph_task_id()
        if task != self._collecting:
            self._collecting = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.collect(graphs=False))
        self._fresh_bytes += grad.numel() * grad.element_size()
        if self._fresh_bytes >= MAX_FRESH_BYTES:
            self.collect(graphs=False)

    @contextlib.contextmanager
    def listening(self, listener: "GradientListener | None"):
        """Context manager around a backward of which `listener` is told; None: nobody.

        Args:
            listener: its methods are called while backward runs.
        """
        if listener is None:
            yield
            return
        by_hand = not self._handles
        if by_hand:
            self._follow_gradients()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            if by_hand:
                self._remove_hooks()

    def product_added(self, tensors: "dict[int, bool]"):
        """Tell the listeners that a product has added: see GradientListener.

        Args:
            tensors: as there.
        """
        for listener in self._listeners:
            listener.product_added(tensors)

    def _is_slice(self, i: int, grad: Tensor) -> bool:
        """Whether a `.grad` is tensor i's slice. No empty tensor is, and no sparse one."""
        view = self.grad_views[i]
        try:
            in_place = grad.data_ptr() == self._grad_addresses[i] != 0
        except RuntimeError:
            return False
        # Not a transposed view of it.
        return in_place and (grad is view or grad.stride() == view.stride())

    @torch.no_grad()
    def collect(self, first: int = 0, last: "int | None" = None, graphs: bool = True):
        """Copy every `.grad` that is not the arena's slice into it, and make the slice `.grad`.

        Runs by itself at the end of a backward, before a step of an optimizer of this package, and
        where an fp32 master's `.grad` is read.

        Args:
            first, last: of the tensors [first, last) only. Default: of all.
            graphs: also those with an autograd graph of their own (create_graph=True), which they
                lose.

        Raises:
            ArgumentError: for a `.grad` of another shape, device or kind than the parameter's.
        """
        self._fresh_bytes = 0
        indices, given = [], []
        last = len(self.params) if last is None else last
        start = self.grads.data_ptr()
        slices = range(start, start + 4 * self.numel)
        for i in range(first, last):
            grad = self.params[i].grad
            if grad is None or self._is_slice(i, grad):
                continue
            if grad.requires_grad and not graphs:
                continue
            try:
                check_gradient(self.segments[i].name, grad, self.segments[i].shape, self.device)
            except ArgumentError:
                # That of a parameter which has left the arena: then this is what to say.
                self.check()
                raise
            indices.append(i)
            # Another tensor's slice will be overwritten: `p.grad, q.grad = q.grad, p.grad`.
            given.append(grad.clone() if grad.data_ptr() in slices else grad.detach())
        for i in range(first, last):
            # `p.grad.data = ...` has given the view other memory.
            if self.grad_views[i].data_ptr() != self._grad_addresses[i]:
                self.grad_views[i].data = own_storage(self.slice(self.grads, i))
        if not indices:
            return
        views = [self.grad_views[i] for i in indices]
        torch._foreach_copy_(views, given)
        for i in indices:
            self.params[i].grad = self.grad_views[i]

    def gradient(self, i: int) -> "Tensor | None":
        """Tensor i's sum so far, in its slice; None: it has no gradient.

        Args:
            i: index of the tensor in `segments`.
        """
        grad = self.params[i].grad
        if grad is None or self._is_slice(i, grad):
            return grad
        # First all others: this slice may be the gradient of one of them.
        self.collect(graphs=False)
        self.collect(i, i + 1)
        return self.params[i].grad

    def has_gradient(self) -> "list[bool]":
        """Whether each tensor has a gradient."""
        return [p.grad is not None for p in self.params]

    def clear_gradients(self):
        """Set every `.grad` to None. Nothing is written: the slices are stale."""
        for p in self.params:
            p.grad = None
        self._squares = None

    @torch.no_grad()
    def set_gradients(self, received: "Iterable[bool]"):
        """Make the slices `.grad` of the tensors that have received a gradient, None of others.

        Args:
            received: of each tensor.
        """
        for p, view, has_gradient in zip(self.params, self.grad_views, received):
            p.grad = view if has_gradient else None

    def place_gradients(self, views: "dict[int, Tensor]") -> "dict[int, Tensor]":
        """Let the sums of some tensors lie elsewhere; their values are the caller's business.

        Args:
            views: index of a tensor -> fp32, of its shape: in place of its slice of `grads`.

        Returns:
            The views that had their places, for the way back.
        """
        before = {i: self.grad_views[i] for i in views}
        for i, view in views.items():
            self.grad_views[i] = view
            self._grad_addresses[i] = view.data_ptr()
            if self.params[i].grad is not None:
                self.params[i].grad = view
        return before

    def keep_squares(self, squares: Tensor):
        """Keep the chunks' sums of squares of `grads` for the next norm, until a gradient changes.

        Args:
            squares: (chunks,) fp64.
        """
        self._squares = squares, self._grad_versions()

    def kept_squares(self) -> "tuple[Tensor, Tensor] | None":
        """(sums of squares, tensor of each) of keep_squares(); None: a gradient has changed."""
        if self._squares is None or self._squares[1] != self._grad_versions():
            return None
        return self._squares[0], self.chunk_to_tensor

    def _grad_versions(self) -> "list[int]":
        return [view._version for view in (self.grads, *self.grad_views)]

    @torch.no_grad()
    def zero_stale(self, first: int = 0, last: "int | None" = None):
        """Write zeros to the slices of tensors without a gradient: before a sum over ranks.

        Args:
            first, last: of the tensors [first, last) only. Default: of all.
        """
        stale = [
            view
            for p, view in zip(self.params[first:last], self.grad_views[first:last])
            if p.grad is None
        ]
        if stale:
            torch._foreach_zero_(stale)

    def is_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer holds some of parameters().

        Args:
            optimizer: any torch optimizer.
        """
        return any(
            id(p) in self.master_ids for group in optimizer.param_groups for p in group["params"]
        )

    @torch.no_grad()
    def move(self, name: str, memory: Tensor):
        """Move a buffer and all its views into other memory, with their values.

        Call it before layers add into the arena, which know its address (optim/products.py).

        Args:
            name: `grads`, `weights` or `bf16_weights`.
            memory: (N,) of the buffer's dtype and device.

        Raises:
            ArgumentError: as for check(), and while layers add into the arena.
        """
        self.check()
        if self.before_release:
            raise ArgumentError(
                f"{name} cannot move while a TrainStep uses it, which has its address: close the "
                "TrainStep before"
            )
        buffer = getattr(self, name)
        memory.copy_(buffer)
        buffer.data = memory
        views: "dict[str, Sequence[Tensor]]" = {
            "grads": self.grad_views,
            "weights": self.masters,
            "bf16_weights": self.params,
        }
        for i, view in enumerate(views[name]):
            if view.dtype == memory.dtype:
                part = self.slice(memory, i)
                view.data = own_storage(part)
        self._addresses = [p.data_ptr() for p in self.params]
        self._grad_addresses[:] = [view.data_ptr() for view in self.grad_views]

    def check(self):
        """Find parameters that no longer are views of the arena.

        Raises:
            ArgumentError: for the first one, with its name and the way out.
        """
        moved = [
            s
            for p, address, s in zip(self.params, self._addresses, self.segments)
            if p.data_ptr() != address and s.numel
        ]
        moved += [
            self.segments[i]
            for parameters, key, i in self._registrations
            if parameters.get(key) is not self.params[i]
        ]
        if moved:
            raise ArgumentError(
                f"parameter {moved[0].name} is no longer a view of the arena (module.to(...), "
                "load_state_dict(assign=True) or .data = ... moved it): call arena.release() "
                "before, and make a new Arena after"
            )

    def check_trainable(self):
        """Find trainable parameters of the module that are not in the arena.

        Raises:
            ArgumentError: for the first one, with its name and the way out.
        """
        in_arena = set(map(id, self.params))
        for name, p in self.module.named_parameters():
            if p.requires_grad and id(p) not in in_arena:
                raise _not_trained(name)

    def frozen(self) -> "list[tuple[str, Tensor]]":
        """(name, parameter) of those of the module that are in no arena."""
        return [(name, p) for name, p in self.module.named_parameters() if not _in_an_arena(p)]

    @staticmethod
    def check_frozen(parameters: "list[tuple[str, Tensor]]"):
        """Find one that was unfrozen since.

        Args:
            parameters: what frozen() returned.

        Raises:
            ArgumentError: for the first one that is in no arena now either.
        """
        for name, p in parameters:
            if p.requires_grad and not _in_an_arena(p):
                raise _not_trained(name)

    @torch.no_grad()
    def publish(self, optimizer: "torch.optim.Optimizer | None" = None):
        """Round the masters into the bf16 parameters.

        Runs by itself after a step of an optimizer over parameters().

        Args:
            optimizer: only its masters: the others may be in use by a backward that still runs.
        """
        if self.bf16_weights is None:
            return
        pairs = self._bf16_pairs
        if optimizer is not None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            pairs = [pair for pair in pairs if id(pair[1]) in held]
        if len(pairs) == len(self._bf16_pairs):
            self.bf16_weights.copy_(self.weights)
            self.weights_written()
        elif pairs:
            params, masters = zip(*pairs)
            torch._foreach_copy_(params, masters)
            self.weights_current()

    @torch.no_grad()
    def adopt(self, everything: bool = False):
        """Copy bf16 parameters that were edited in place into their masters.

        Runs by itself before a step, a replay and a save. A master that already rounds to its
        parameter's value stays as it is, with its extra bits.

        Args:
            everything: all parameters, not only those whose version has changed: for edits that
                have no version (`.data`, NumPy).
        """
        edited = [
            pair
            for pair, version in zip(self._bf16_pairs, self._bf16_versions)
            if everything or pair[0]._version != version
        ]
        for p, master in edited:
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
        if edited:
            self.weights_current()

    def weights_written(self):
        """Tell autograd that kernels or collectives wrote `weights` and `bf16_weights`.

        No parameter counts as edited by that."""
        masters = [master for _, master in self._bf16_pairs]
        torch.autograd.graph.increment_version([*self.params, *masters])
        self.weights_current()

    def weights_current(self):
        """Declare that bf16 parameters and masters agree: edits are counted from here on."""
        self._bf16_versions = [p._version for p, _ in self._bf16_pairs]

    def release(self):
        """Make the module's parameters ordinary ones again.

        They keep the values and the gradients that they have now, in their own dtype."""
        if self not in _arenas:
            return
        for close in [*self.before_release]:
            close()
        self._remove_hooks()
        for p, address in zip(self.params, self._grad_addresses):
            p.data = p.data.clone()
            if p.grad is not None and p.grad.data_ptr() == address:
                p.grad = p.grad.to(p.dtype, copy=True)
        self._hooks()
        _remove(_abandoned_hooks)
        _arenas.discard(self)

    def __getstate__(self):
        """The state of a copy or a pickle: the module with its weights, the masters, the sums."""
        for name, part in self.module.named_modules():
            for key, value in vars(part).items():
                if value is self or getattr(value, "arena", None) is self:
                    raise ArgumentError(
                        f"the module keeps its own arena as {f'{name}.{key}'.strip('.')}, and "
                        "neither a copy nor a pickle can be made of such a circle: keep it outside "
                        "of the module"
                    )
        self.collect()
        return {
            "module": self.module,
            "masters": self.masters,
            "grads": self.grads,
            "received": self.has_gradient(),
            "segments": self.segments,
            "blocks": self.blocks,
        }

    def __setstate__(self, state):
        params = dict(state["module"].named_parameters())
        self._build(
            state["module"],
            [params[s.name] for s in state["segments"]],
            state["segments"],
            state["blocks"],
            state["masters"],
        )
        self.grads.copy_(state["grads"])
        self.set_gradients(state["received"])


def _gradient_hook(weak: "weakref.ref[Arena]", i: int, addresses, listeners):
    """Runs once per tensor and backward, after autograd's addition or a product: each line counts
    on a slow host."""

    def ready(p: Tensor):
        grad = p.grad
        if grad is not None:
            try:
                in_place = grad.data_ptr() == addresses[i]
            except RuntimeError:
                # A sparse gradient, which collect() refuses.
                in_place = False
            arena = None if in_place else weak()
            if arena is not None:
                arena._collect_later(grad)
        for listener in listeners:
            listener.gradient_complete(i)

    return ready


def _nobody() -> None:
    pass


def _in_an_arena(p: Tensor) -> bool:
    return any(id(p) in arena._index for arena in _arenas)


def _not_trained(name: str) -> ArgumentError:
    return ArgumentError(
        f"parameter {name} is not in the arena, which would not train it; it was added or unfrozen "
        "after the arena was made: call arena.release(), and make a new Arena"
    )


def _follow_optimizers(arena):
    """Adopt before, and publish after, every step of an optimizer over arena.parameters().

    An optimizer with the attribute `publishes` writes the bf16 parameters itself.

    Returns:
        The hooks' handles. The hooks hold the arena weakly.
    """
    weak = weakref.ref(arena)

    def adopt(optimizer, args, kwargs):
        arena = weak()
        if arena is None or not arena.is_updated_by(optimizer):
            return None
        arena.adopt()
        if getattr(optimizer, "publishes", False):
            return None
        # LBFGS calls its closure after each of its updates.
        own, *rest = args
        return (own, *map(with_current_weights, rest)), {
            name: with_current_weights(value) for name, value in kwargs.items()
        }

    def with_current_weights(closure):
        def called():
            arena = weak()
            if arena is not None:
                arena.adopt()
                arena.publish()
            return closure()

        return called if callable(closure) else closure

    def publish(optimizer, args, kwargs):
        arena = weak()
        if arena is not None and not getattr(optimizer, "publishes", False):
            if arena.is_updated_by(optimizer):
                arena.publish(optimizer)

    return [register_optimizer_step_pre_hook(adopt), register_optimizer_step_post_hook(publish)]


def abandon(handles: list):
    """Remove hooks of what is gone when the next arena is made or released."""
    _abandoned_hooks.extend(handles)


def _remove(handles: list):
    while handles:
        handles.pop().remove()


def check_arena(name: str, value, hint: str = ""):
    """ArgumentError unless the argument `name` is an Arena. hint: ends the message."""
    if not isinstance(value, Arena):
        raise ArgumentError(f"{name} is {described(value)}; expected an arena{hint}")


def check_parameters_or_arena(name: str, value):
    """ArgumentError unless the argument `name` is an Arena or can be iterated over as parameters.

    A container of parameters (nn.ParameterList) is one; any other module is not."""
    if isinstance(value, Arena):
        return
    is_module = isinstance(value, nn.Module) and not isinstance(value, nn.ParameterList)
    if is_module or not isinstance(value, Iterable):
        raise ArgumentError(
            f"{name} is {described(value)}; expected parameters or an arena: model.parameters(), "
            "or ga.Arena(model)"
        )
