"""The arena: every trainable tensor of a module, its fp32 gradient sum and its fp32 master are slices of flat buffers.

    >>> arena = ga.Arena(model)                   # the module's parameters become views; nothing else about it changes
    >>> arena.weights, arena.grads                # (N,) fp32 each; arena.bf16_weights (N,) where the module has bf16 parameters
    >>> opt = torch.optim.AdamW(arena.parameters())
    >>> print(arena.summary())
    >>> arena.release()                           # ordinary parameters again

Layout: tensors in reverse registration order (the order in which backward finishes), each padded to a multiple of CHUNK elements
with zeros. So a transformer block, a reduction bucket and a shard are contiguous ranges, and a chunk never crosses a tensor.
A block is an item of the module's outermost ModuleList or Sequential; what lies outside forms blocks of its own. Tied weights
appear once, frozen parameters not at all. fp32 parameters live in `weights`; bf16 parameters live in `bf16_weights`, their fp32
masters in `weights`: an optimizer updates the masters, and after its step the bf16 copies follow.

Each parameter has a storage of its own, which begins at its slice of the buffer and keeps the buffer alive. Kernels see one buffer;
torch.save, pickle, safetensors, accelerate and everything else that compares storages see separate, ordinary tensors.

This module lays out and stores; it launches none of our kernels. How gradients get here: optim/accumulate.py.
"""

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ArgumentError
from ..ops import CHUNK
from .squares import ChunkSquares

_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()


@dataclass(frozen=True)
class Segment:
    """One tensor's place. Offsets and counts are in elements."""

    name: str
    shape: torch.Size
    numel: int  # without padding
    offset: int  # multiple of CHUNK
    block: int  # index into arena.blocks
    decay: bool  # weight decay applies (matrices, not norms and biases)
    lr_scale: float  # multiplier of the learning rate
    embedding: bool  # the weight of an nn.Embedding that is not also an output layer

    @property
    def padded(self) -> int:
        return -(-self.numel // CHUNK) * CHUNK


@dataclass(frozen=True)
class Block:
    """A contiguous range of the arena: elements [start, stop), segments [first, last)."""

    name: str
    start: int
    stop: int
    first: int
    last: int


class Summary:
    """Bytes of the fp32 gradient accumulator: `block_bytes` (everything but embeddings), `embedding_bytes`, `padding_bytes`.

    `Summary(*lay_out(module))` needs no memory: the module may be on the meta device."""

    def __init__(self, segments: "list[Segment]", blocks: "list[Block]"):
        rows, numel = segments, blocks[-1].stop
        self.block_bytes = sum(4 * s.numel for s in rows if not s.embedding)
        self.embedding_bytes = sum(4 * s.numel for s in rows if s.embedding)
        self.padding_bytes = 4 * (numel - sum(s.numel for s in rows))
        self.total_bytes = 4 * numel
        self.tensors, self.blocks = len(rows), len(blocks)
        self.lines = [
            (b.name, b.last - b.first, 4 * sum(s.numel for s in rows[b.first : b.last]))
            for b in blocks
        ]

    def __str__(self):
        mib = 2.0**20
        head = (
            f"gradient accumulator (fp32): {self.total_bytes / mib:,.1f} MiB in {self.tensors} tensors, {self.blocks} blocks\n"
            f"  blocks, LM head and norms  {self.block_bytes / mib:10,.1f} MiB\n"
            f"  embedding                  {self.embedding_bytes / mib:10,.1f} MiB\n"
            f"  padding                    {self.padding_bytes / mib:10,.1f} MiB"
        )
        groups = []  # equal neighbours in one line: 24 blocks need not be 24 lines
        for name, tensors, size in self.lines:
            if groups and groups[-1][2:] == [tensors, size]:
                groups[-1][1] = name
            else:
                groups.append([name, name, tensors, size])
        body = [
            f"  {first if first == last else f'{first} .. {last}':40} {tensors:4} tensors {size / mib:10,.2f} MiB each"
            for first, last, tensors, size in groups
        ]
        return "\n".join([head, "in the order of the arena:", *body])

    __repr__ = __str__


def own_storage(piece: Tensor) -> Tensor:
    """The memory of `piece`, seen through a storage that begins and ends with it.

    piece: contiguous, any dtype and device. The result has its shape, shares its memory and keeps it alive, and has a version
    counter of its own. Who compares storages takes the two for different tensors; who writes to one writes to the other."""
    piece = piece.detach()
    if piece.numel() == 0:
        return torch.empty_like(piece)
    flat = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(piece.view(-1)))
    return flat.view(piece.shape)


def _blocks_of(module: nn.Module) -> "dict[int, str]":
    """id of a parameter -> name of its block, for parameters inside the outermost ModuleLists and Sequentials."""
    found = {}

    def walk(part, prefix):
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            for name, item in part.named_children():
                for p in item.parameters():
                    found.setdefault(id(p), f"{prefix}{name}")
        else:
            for name, child in part.named_children():
                walk(child, f"{prefix}{name}.")

    walk(module, "")
    return found


def trainable(module: nn.Module) -> "list[tuple[str, nn.Parameter]]":
    """(name, parameter) of what an arena holds, in registration order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def lay_out(module: nn.Module, decay=None, lr_scale=None) -> "tuple[list[Segment], list[Block]]":
    """Where each trainable tensor of `module` goes. Reads names and shapes only; arguments as for Arena."""
    decay = decay or (lambda name, p: p.dim() >= 2)
    lr_scale = lr_scale or (lambda name, p: 1.0)
    inside = _blocks_of(module)
    tied = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    embeddings = {
        id(p)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for p in part.parameters()
        if tied.count(id(p)) == 1
    }
    segments, blocks, offset = [], [], 0
    for block, run in itertools.groupby(
        reversed(trainable(module)), key=lambda pair: inside.get(id(pair[1]))
    ):
        start, first = offset, len(segments)
        for name, p in run:
            segments.append(
                Segment(
                    name,
                    p.shape,
                    p.numel(),
                    offset,
                    len(blocks),
                    bool(decay(name, p)),
                    float(lr_scale(name, p)),
                    id(p) in embeddings,
                )
            )
            offset += segments[-1].padded
        ends = dict.fromkeys([segments[first].name, segments[-1].name])
        blocks.append(Block(block or " .. ".join(ends), start, offset, first, len(segments)))
    return segments, blocks


def _check(module, named):
    if not named:
        raise ArgumentError(
            f"{type(module).__name__} has no trainable parameter (requires_grad=True): there is nothing to lay out"
        )
    for name, p in named:
        problem = None
        if p.layout != torch.strided:
            problem = f"has layout {p.layout}; expected a dense tensor"
        elif p.dtype == torch.float16:
            problem = (
                "is float16; expected float32 or bfloat16. Use bfloat16 (same bytes, no loss scaling), or keep fp32 parameters "
                "under torch.autocast with a GradScaler"
            )
        elif p.dtype not in (torch.float32, torch.bfloat16):
            problem = f"is {p.dtype}; expected float32 or bfloat16"
        elif p.is_meta:
            problem = "is on the meta device; give it memory first (module.to_empty)"
        elif p.device != named[0][1].device:
            problem = f"is on {p.device}, {named[0][0]} on {named[0][1].device}; an arena lies on one device"
        elif any(id(p) in other._index for other in _arenas):
            problem = "is already in an arena; call release() on that one first"
        if problem:
            raise ArgumentError(f"parameter {name} {problem}")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and any(
            p.requires_grad for p in part.parameters()
        ):
            raise ArgumentError(
                f"{name or type(part).__name__} makes sparse gradients (sparse=True); the accumulator is dense"
            )
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in named
        if p.numel()
    )
    for (_, stop, one), (start, _, two) in zip(spans, spans[1:]):
        if start < stop:
            raise ArgumentError(
                f"parameters {one} and {two} overlap in memory; as slices of the arena they would no longer"
            )


class Arena:
    """Lay out the trainable parameters of `module`, fp32 or bf16, all on one device.

    decay: callable (name, parameter) -> bool, default: tensors of two and more dimensions; lr_scale: callable -> float, default 1.
    What is unfrozen later is not in it: release() and make a new one. The module is saved, pickled and copied as without an arena.
    bf16 parameters follow their masters. An edit in place of a bf16 parameter (load_state_dict, copy_, nn.init) is noticed by the
    tensor's version, and its master takes the new value before the next step. An edit through `.data` or NumPy is not: call
    adopt(everything=True) after it.
    Raises ArgumentError, and changes nothing, for a module without trainable parameters, or with sparse, complex, fp16, fp64,
    meta, overlapping or elsewhere-placed ones; the message names the parameter."""

    def __init__(self, module: nn.Module, *, decay=None, lr_scale=None):
        named = trainable(module)
        _check(module, named)
        segments, blocks = lay_out(module, decay, lr_scale)
        self._open(module, [p for _, p in reversed(named)], segments, blocks)

    def _open(self, module, params, segments, blocks, masters=None):
        """params, and masters if there are some already: in the order of the arena."""
        self.module = module
        self.device = params[0].device
        self.params = params
        self.segments = segments
        self.blocks = blocks
        self.numel = blocks[-1].stop
        self._index = {id(p): i for i, p in enumerate(params)}
        self._allocate(masters)
        # Functions that take down what was built on this arena.
        self.before_release: list = []
        # An arena that is dropped without release() takes its hooks along.
        self._stop_following = weakref.finalize(
            self, _remove_all, _follow_optimizers(self) if self._low else []
        )
        _arenas.add(self)

    def _allocate(self, masters):
        low = any(p.dtype == torch.bfloat16 for p in self.params)
        weights = torch.zeros(self.numel, device=self.device)
        grads = torch.zeros(self.numel, device=self.device)
        bf16 = torch.zeros(self.numel, dtype=torch.bfloat16, device=self.device) if low else None
        # Of each chunk: its tensor, how many elements of it, its number in the tensor, its number in the arena.
        chunks = torch.empty(self.numel // CHUNK, 4, dtype=torch.int32)
        # Of each tensor its first chunk; at the end the number of chunks.
        self.first_chunk = [s.offset // CHUNK for s in self.segments] + [self.numel // CHUNK]
        for i, s in enumerate(self.segments):
            nth = torch.arange(s.padded // CHUNK)
            chunks[self.first_chunk[i] : self.first_chunk[i + 1]] = torch.stack(
                [
                    torch.full_like(nth, i),
                    (s.numel - nth * CHUNK).clamp(max=CHUNK),
                    nth,
                    nth + self.first_chunk[i],
                ],
                1,
            )
        tensor_to_block = torch.tensor([s.block for s in self.segments], dtype=torch.int32)
        chunks, chunk_to_tensor, tensor_to_block = (
            t.to(self.device) for t in (chunks, chunks[:, 0].contiguous(), tensor_to_block)
        )
        # Everything that may fail has been allocated: from here on the module changes.
        self.weights = weights
        self.grads = grads
        self.bf16_weights = bf16
        self.chunk_table = chunks
        self.chunk_to_tensor = chunk_to_tensor
        self.tensor_to_block = tensor_to_block
        self.masters = [self._own(i, masters) for i in range(len(self.params))]
        self.grad_views = [self.slice(grads, i) for i in range(len(self.segments))]
        self.squares = ChunkSquares(grads, self.grad_views, self.first_chunk)
        self._places = [p.data_ptr() for p in self.params]
        self._homes = [
            (part._parameters, key, self._index[id(p)])
            for part in self.module.modules()
            for key, p in part._parameters.items()
            if id(p) in self._index
        ]
        self.master_ids = {id(master) for master in self.masters}
        self._low = [(p, master) for p, master in zip(self.params, self.masters) if master is not p]
        self.weights_current()

    @torch.no_grad()
    def _own(self, i, masters) -> nn.Parameter:
        """Parameter i moves into its slice, with its value; its fp32 master (itself, or its master), too."""
        p = self.params[i]
        weight = own_storage(self.slice(self.weights, i))
        if p.dtype == torch.float32:
            p.data = weight.copy_(p)
            return p
        if masters is None:
            master = nn.Parameter(weight.copy_(p))
        else:
            master = masters[i]
            master.data = weight.copy_(master)
        p.data = own_storage(self.slice(self.bf16_weights, i)).copy_(p)
        return master

    def slice(self, buffer: Tensor, i: int) -> Tensor:
        """Tensor i's part of a flat buffer (N,), in the tensor's shape."""
        s = self.segments[i]
        return buffer[s.offset : s.offset + s.numel].view(s.shape)

    def number_of(self, parameter) -> "int | None":
        """The number of a parameter of the module in the order of the arena; None: it is not in the arena."""
        return self._index.get(id(parameter))

    @staticmethod
    def parameters_held() -> "set[int]":
        """ids of all parameters that lie in some arena."""
        return {id(p) for arena in _arenas for p in arena.params}

    @staticmethod
    def of(module: nn.Module) -> "Arena | None":
        """The arena that holds this module's parameters, None when there is none."""
        return next((a for a in _arenas if a.module is module), None)

    def __repr__(self):
        return f"Arena({len(self.segments)} tensors in {len(self.blocks)} blocks, {self.numel:,} elements on {self.device})"

    # ---- what optimizers and checkpoints ask for ----

    def parameters(self) -> "list[nn.Parameter]":
        """Tensors for an optimizer, fp32, in the module's registration order: masters of bf16 parameters, the others themselves."""
        self.adopt()
        return self.masters[::-1]

    def parameter_names(self) -> "list[str]":
        """Their names, in the same order."""
        return [s.name for s in reversed(self.segments)]

    def named_parameters(self) -> "dict[str, nn.Parameter]":
        return dict(zip(self.parameter_names(), self.parameters()))

    def named_master(self) -> "dict[str, nn.Parameter]":
        """name -> fp32 master of each bf16 parameter, edits of the parameters adopted; empty for an fp32 module."""
        self.adopt()
        return {
            s.name: o for s, o, p in zip(self.segments, self.masters, self.params) if o is not p
        }

    def parameter_groups(
        self, weight_decay: float = 0.1, lr: "float | None" = None
    ) -> "list[dict]":
        """Parameter groups for any torch optimizer: weight decay where a segment says so; with `lr`, one group per lr_scale."""
        groups = {}
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

    def grads_changed(self):
        """arena.grads was written by something that torch does not count: sums of squares taken before are void."""
        self.squares.invalidate()

    def is_updated_by(self, optimizer) -> bool:
        """Does this optimizer hold some of parameters()?"""
        return any(
            id(p) in self.master_ids for group in optimizer.param_groups for p in group["params"]
        )

    @torch.no_grad()
    def move(self, name: str, home: Tensor):
        """One of `grads`, `weights` and `bf16_weights`, and all its views, lie in `home` from here on, (N,) of the same dtype and device, with the values that
        they have. Whoever has taken their addresses has the old ones: to be called before an accumulator is made. ArgumentError as for check()."""
        self.check()
        buffer = getattr(self, name)
        home.copy_(buffer)
        buffer.data = home
        views = {"grads": self.grad_views, "weights": self.masters, "bf16_weights": self.params}[
            name
        ]
        for i, view in enumerate(views):
            if view.dtype == home.dtype:
                part = self.slice(home, i)
                view.data = part if name == "grads" else own_storage(part)
        self._places = [p.data_ptr() for p in self.params]

    def check(self):
        """Raise ArgumentError, naming the parameter, when one no longer is a view of the arena."""
        moved = [
            s
            for p, place, s in zip(self.params, self._places, self.segments)
            if p.data_ptr() != place and s.numel
        ]
        moved += [
            self.segments[i]
            for registered, key, i in self._homes
            if registered.get(key) is not self.params[i]
        ]
        if moved:
            raise ArgumentError(
                f"parameter {moved[0].name} is no longer a view of the arena (module.to(...), load_state_dict(assign=True) or "
                ".data = ... moved it): call arena.release() before, and make a new Arena after"
            )

    @torch.no_grad()
    def publish(self):
        """bf16 parameters take their masters' rounded values. Runs by itself after a step of an optimizer over parameters()."""
        if self.bf16_weights is not None:
            self.bf16_weights.copy_(self.weights)
            self.weights_written()

    @torch.no_grad()
    def adopt(self, everything: bool = False):
        """Masters take the values of the bf16 parameters that were edited in place. Runs by itself before a step, a replay, a save.

        An edit is seen by the tensor's version. everything: look at all of them, after edits that have none (`.data`, NumPy). A master
        that already rounds to its parameter's value keeps its extra bits."""
        edited = [
            pair
            for pair, version in zip(self._low, self._versions)
            if everything or pair[0]._version != version
        ]
        for p, master in edited:
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
        if edited:
            self.weights_current()

    def weights_written(self):
        """`weights` and `bf16_weights` were written past torch, by kernels or collectives: autograd is told, and no parameter is
        taken for edited."""
        torch.autograd.graph.increment_version([*self.params, *(master for _, master in self._low)])
        self.weights_current()

    def weights_current(self):
        """The bf16 parameters are what their masters say: versions that they have now are no edits."""
        self._versions = [p._version for p, _ in self._low]

    def release(self):
        """Give the module ordinary parameters back, with the values (and presented gradients) they have now."""
        if self not in _arenas:
            return
        for close in [*self.before_release]:
            close()
        for p, view in zip(self.params, self.grad_views):
            p.data = p.data.clone()
            if p.grad is view:
                p.grad = view.clone()
        self._stop_following()
        _arenas.discard(self)

    def __getstate__(self):
        """What a copy or a pickle is made of: the module with its weights, the masters, the sums."""
        return {
            "module": self.module,
            "masters": self.masters,
            "grads": self.grads,
            "segments": self.segments,
            "blocks": self.blocks,
        }

    def __setstate__(self, state):
        params = dict(state["module"].named_parameters())
        self._open(
            state["module"],
            [params[s.name] for s in state["segments"]],
            state["segments"],
            state["blocks"],
            state["masters"],
        )
        self.grads.copy_(state["grads"])


def _follow_optimizers(arena):
    """Before the step of any optimizer over arena.parameters(), masters take over edits of bf16 parameters; after it, the bf16
    parameters take their masters' values (an optimizer with `publishes` has written them itself). Returns the hooks' handles."""
    weak = weakref.ref(arena)

    def adopt(optimizer, args, kwargs):
        arena = weak()
        if arena is not None and arena.is_updated_by(optimizer):
            arena.adopt()

    def publish(optimizer, args, kwargs):
        arena = weak()
        if arena is not None and not getattr(optimizer, "publishes", False):
            if arena.is_updated_by(optimizer):
                arena.publish()

    return [register_optimizer_step_pre_hook(adopt), register_optimizer_step_post_hook(publish)]


def _remove_all(handles):
    for handle in handles:
        handle.remove()
