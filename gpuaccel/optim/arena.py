"""The arena: flat buffers with a module's trainable tensors, gradient sums and fp32 masters.

    arena = ga.Arena(model)        # the module's parameters become views, all else is unchanged
    arena.weights, arena.grads     # (N,) fp32 each
    arena.bf16_weights             # (N,) bf16; None for a module without bf16 parameters
    opt = torch.optim.AdamW(arena.parameters())
    arena.release()                # ordinary parameters again

The layout is that of optim/layout.py: every tensor begins at a multiple of CHUNK elements.

fp32 parameters live in `weights`. bf16 parameters live in `bf16_weights`, their fp32 masters in
`weights`: an optimizer updates the masters, and the bf16 copies follow after its step.

Gradients are fp32 sums in `grads`: a parameter's `.grad` is its slice (optim/gradients.py).

Each parameter has a storage of its own, which begins at its slice of the buffer and keeps the
buffer alive. Kernels see one buffer; torch.save, pickle, safetensors, accelerate and everything
else that compares storages see separate, ordinary tensors.

This module lays out and stores; it launches no kernel of this package.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ArgumentError, check_module, described
from ..ops import CHUNK
from .gradients import Gradients, Master
from .layout import lay_out, own_storage, trainable

log = logging.getLogger("gpuaccel")
_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()


def _check_parameters(module: nn.Module, named: list[tuple[str, nn.Parameter]]):
    """Raise ArgumentError, naming the parameter, if an arena cannot hold these parameters."""
    if not named:
        raise ArgumentError(
            f"{type(module).__name__} has no trainable parameter (requires_grad=True): there is "
            "nothing to lay out"
        )
    first_name, first = named[0]
    for name, p in named:
        problem = None
        if hasattr(p, "device_mesh"):
            problem = (
                "is a DTensor, of which each rank has a part; an arena holds whole parameters. "
                "Expected ga.Distributed(sharded=True) in the place of fully_shard"
            )
        elif p.layout != torch.strided:
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


class Arena:
    """Lay out the trainable parameters of `module`, fp32 or bf16, all on one device.

    A parameter that is frozen now and unfrozen later is not in the arena: make a new arena, which
    replaces the first. The module is saved, pickled and copied as without an arena.

    `.grad` of each parameter, also of a bf16 one, is a view of its sum in `grads`, in fp32. After
    zero_grad() it is None, and the next backward() begins a new sum.

    bf16 parameters follow their masters. In-place edits of a bf16 parameter (load_state_dict,
    `copy_`, nn.init) are detected, and copied to its master before the next step. Assigning
    `p.data = x` is detected; writing into it (`p.data.copy_(x)`, or by NumPy) is not: call
    adopt(everything=True) afterwards. Call publish() after an edit of a master.

    Blocks are the layers of the module's outermost ModuleLists and Sequentials. Other parameters
    that follow each other form one block.

    N is the number of elements, each tensor padded to a multiple of 4,096.

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
        module_parameters: the module's parameters, in the order of segments: the reverse of
            parameters().
        masters: of each parameter its fp32 master, or itself where it is fp32.
        gradients: the slices of `grads`; its collect() copies assigned gradients into them.
        segments: where each tensor lies, in the order of the arena (optim.Segment).
        blocks: the module's blocks, in the order of the arena. Each has a `name`, its tensors are
            segments[first:last].

    Raises:
        ArgumentError: with nothing changed and the parameter named, for a module without trainable
            parameters, and for one whose parameters are sparse, complex, fp16, fp64, on the meta
            device, on several devices, or overlap in memory; for what is no
            module, and for a decay or lr_scale that is no function.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LayerNorm(2))
        >>> arena = ga.Arena(model)
        >>> list(arena.named_parameters())
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> arena.weights.shape, arena.grads.dtype
        (torch.Size([16384]), torch.float32)
        >>> opt = torch.optim.AdamW(arena.parameter_groups(weight_decay=0.1), lr=1e-3)
        >>> arena.release()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        decay: Callable[[str, nn.Parameter], bool] | None = None,
        lr_scale: Callable[[str, nn.Parameter], float] | None = None,
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
        for other in self.all():
            if any(other.number_of(p) is not None for _, p in named):
                log.warning("a new Arena of %s takes the place of the first", type(module).__name__)
                other.release()
        self.module: nn.Module = module
        self.module_parameters = [p for _, p in reversed(named)]
        self.device: torch.device = self.module_parameters[0].device
        self.segments = segments
        self.blocks = blocks
        self.numel: int = blocks[-1].stop
        self._index = {id(p): i for i, p in enumerate(self.module_parameters)}
        self._allocate()
        # The open TrainStep of this arena, weakly.
        self._step: Callable[[], Any] = _nobody
        # Called by release(): functions that remove what was built on this arena.
        self.before_release: list[Callable[[], object]] = []
        if self._bf16_pairs:
            _follow_optimizers()
        _arenas.add(self)

    def _allocate(self) -> None:
        # Nothing of the module changes until all allocations have succeeded.
        self.weights = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
        self.grads = torch.zeros_like(self.weights)
        self.bf16_weights: Tensor | None = None
        if any(p.dtype == torch.bfloat16 for p in self.module_parameters):
            self.bf16_weights = torch.zeros_like(self.weights, dtype=torch.bfloat16)
        # The first chunk of each tensor; at the end the number of chunks.
        self.first_chunk = [s.offset // CHUNK for s in self.segments] + [self.numel // CHUNK]
        # Of each chunk: its tensor, how many of its elements are not padding, its index in the
        # tensor, its index in the arena.
        first = torch.tensor(self.first_chunk)
        tensor = torch.arange(len(self.segments)).repeat_interleave(first.diff())
        place = torch.arange(len(tensor))
        index = place - first[tensor]
        numel = torch.tensor([s.numel for s in self.segments])
        elements = (numel[tensor] - index * CHUNK).clamp(max=CHUNK)
        self.chunk_table = torch.stack([tensor, elements, index, place], 1).int().to(self.device)
        self.chunk_to_tensor = tensor.int().to(self.device)
        self.tensor_to_block = torch.tensor(
            [s.block for s in self.segments], dtype=torch.int32, device=self.device
        )
        self.gradients = Gradients(
            self.module_parameters, self.segments, self.grads, self.chunk_to_tensor, self.check
        )
        self.masters = [self._move_into_slices(i) for i in range(len(self.module_parameters))]
        # (bf16 parameter, its master).
        self._bf16_pairs = [
            (p, master)
            for p, master in zip(self.module_parameters, self.masters)
            if master is not p
        ]
        # (index, tensor) of all that lies in slices, and where.
        self._held = [
            (i, t)
            for i, (p, master) in enumerate(zip(self.module_parameters, self.masters))
            for t in ((p,) if master is p else (p, master))
        ]
        self._addresses = [t.data_ptr() for _, t in self._held]
        # (parameters of a submodule, name in it, index): where the module registers each parameter.
        self._registrations = [
            (part._parameters, key, self._index[id(p)])
            for part in self.module.modules()
            for key, p in part._parameters.items()
            if id(p) in self._index
        ]
        self.master_ids = {id(master) for master in self.masters}
        self.weights_current()

    @torch.no_grad()
    def _move_into_slices(self, i: int) -> nn.Parameter:
        """Move parameter i into its slice, keeping its values. Returns its master."""
        p, segment = self.module_parameters[i], self.segments[i]
        weight = own_storage(segment.of(self.weights))
        if p.dtype == torch.float32:
            p.data = weight.copy_(p)
            return p
        master = Master(weight.copy_(p))
        master.arena, master.number = weakref.ref(self), i
        assert self.bf16_weights is not None  # a parameter is not fp32
        p.data = own_storage(segment.of(self.bf16_weights)).copy_(p)
        return master

    def number_of(self, parameter: Tensor) -> int | None:
        """The index of the module's parameter in the arena, or None if the arena lacks it.

        Args:
            parameter: a parameter of the module; a master is none.
        """
        return self._index.get(id(parameter))

    @staticmethod
    def all() -> "list[Arena]":
        """All arenas that are not released."""
        return list(_arenas)

    @staticmethod
    def of(module: nn.Module) -> "Arena | None":
        """The arena that holds this module's trainable parameters, None when there is none.

        Args:
            module: that an arena was made of, or a wrapper of it, as of torch.compile or DDP. A
                part of it has none.
        """
        named = dict(module.named_parameters())
        ids = {id(p) for p in named.values()}
        trained = {id(p) for p in named.values() if p.requires_grad}
        holding = (a for a in _arenas if trained <= a._index.keys() <= ids)
        return next((a for a in _arenas if a.module is module), None) or next(holding, None)

    def __repr__(self):
        return (
            f"Arena({len(self.segments)} tensors in {len(self.blocks)} blocks, "
            f"{self.numel:,} elements on {self.device})"
        )

    # ---- for optimizers and checkpoints ----

    def parameters(self) -> list[nn.Parameter]:
        """Tensors for an optimizer, all fp32, in the module's registration order.

        Of a bf16 parameter it is the master, of an fp32 parameter the parameter itself."""
        self.adopt()
        return self.masters[::-1]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """name -> tensor of each of parameters(), in their order."""
        return dict(zip([s.name for s in reversed(self.segments)], self.parameters()))

    def named_master(self) -> dict[str, nn.Parameter]:
        """name -> fp32 master of each bf16 parameter; empty for an fp32 module.

        The masters have adopted edits of their parameters."""
        self.adopt()
        return {
            s.name: master
            for s, master, p in zip(self.segments, self.masters, self.module_parameters)
            if master is not p
        }

    def parameter_groups(self, weight_decay: float = 0.1, lr: float | None = None) -> list[dict]:
        """Parameter groups for any torch optimizer.

        Args:
            weight_decay: for the tensors whose segment has `decay`; 0 for the others.
            lr: one group per lr_scale, whose rate is lr * lr_scale. Without it lr_scale is
                ignored.

        Returns:
            A list of dicts with `params`, `weight_decay` and, where it is given, `lr`.
        """
        groups: dict[tuple[bool, float], dict] = {}
        for s, master in zip(reversed(self.segments), self.parameters()):
            group = groups.setdefault(
                (s.decay, s.lr_scale),
                {"params": [], "weight_decay": weight_decay if s.decay else 0.0},
            )
            group["params"].append(master)
            if lr is not None:
                group["lr"] = lr * s.lr_scale
        return list(groups.values())

    @property
    def step(self) -> Any:
        """The open TrainStep of this arena, or None. release() closes it."""
        return self._step()

    @step.setter
    def step(self, step: Any):
        self._step = _nobody if step is None else weakref.ref(step)

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
        if name == "grads":
            self.gradients.moved()
            return
        for i, view in self._held:
            if view.dtype == memory.dtype:
                view.data = own_storage(self.segments[i].of(memory))
        self._addresses = [t.data_ptr() for _, t in self._held]

    def check(self):
        """Copy parameters and masters that got other memory (`p.data = ...`) into their slices.

        Raises:
            ArgumentError: with nothing changed, for the first parameter that was replaced, or whose
                memory has another dtype, device or shape, or is that of another parameter; with the
                way out.
        """
        moved = self._moved()
        lost = [i for i, t in moved if self.released or not self._fits(t, i)]
        lost += [
            i
            for parameters, key, i in self._registrations
            if key not in parameters or parameters[key] is not self.module_parameters[i]
        ]
        if lost:
            raise ArgumentError(
                f"parameter {self.segments[lost[0]].name} is no longer a view of the arena "
                "(module.to(...), load_state_dict(assign=True) or .data = ... moved it): call "
                "arena.release() before, and make a new Arena after"
            )
        for i, t in moved:
            buffer = self.weights if t.dtype == torch.float32 else self.bf16_weights
            assert buffer is not None
            with torch.no_grad():
                t.data = own_storage(self.segments[i].of(buffer)).copy_(t)
        if any(t is self.module_parameters[i] for i, t in moved):
            self.adopt(everything=True)

    def _moved(self) -> list[tuple[int, nn.Parameter]]:
        """Parameters and masters that no longer lie where their slices are."""
        return [
            (i, t)
            for (i, t), address in zip(self._held, self._addresses)
            if t.data_ptr() != address and self.segments[i].numel
        ]

    def _fits(self, p: Tensor, i: int) -> bool:
        """True if the new memory of a parameter or master can be copied into its slice."""
        dtype = torch.float32 if p is self.masters[i] else torch.bfloat16
        if (p.dtype, p.device, p.layout) != (dtype, self.device, torch.strided):
            return False
        # Memory of another parameter: the two are tied, and separate slices would untie them.
        shared = any(
            0 <= p.data_ptr() - buffer.data_ptr() < buffer.nbytes
            for buffer in (self.weights, self.bf16_weights)
            if buffer is not None
        )
        return tuple(p.shape) == tuple(self.segments[i].shape) and not shared

    @torch.no_grad()
    def publish(self, optimizer: torch.optim.Optimizer | None = None):
        """Round the masters into the bf16 parameters.

        Runs by itself after a step of an optimizer over parameters().

        Args:
            optimizer: publish only its masters, as a backward that still runs may use the others.
                None: all.
        """
        if self.bf16_weights is None:
            return
        # An optimizer may write `p.data = ...`.
        if self._moved():
            self.check()
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
            # Where the master already rounds to the parameter it keeps its extra bits.
            master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
        if edited:
            self.weights_current()

    def weights_written(self):
        """Tell autograd that kernels or collectives wrote `weights` and `bf16_weights`.

        No parameter counts as edited by that."""
        masters = [master for _, master in self._bf16_pairs]
        torch.autograd.graph.increment_version([*self.module_parameters, *masters])
        self.weights_current()

    def weights_current(self):
        """Declare that bf16 parameters and masters agree: edits are counted from here on."""
        self._bf16_versions = [p._version for p, _ in self._bf16_pairs]

    @property
    def released(self) -> bool:
        """Whether release() was called; the parameters are then ordinary ones."""
        return self not in _arenas

    def release(self):
        """Make the module's parameters ordinary ones again.

        They keep the values and the gradients that they have now, in their own dtype. An open
        TrainStep is closed."""
        if self.step is not None:
            self.step.close()
        # close() of a TrainStep releases the arena that the TrainStep made.
        if self.released:
            return
        for close in [*self.before_release]:
            close()
        self.gradients.close()
        for p in self.module_parameters:
            p.data = p.data.clone()
        _arenas.discard(self)

    def __reduce__(self):
        raise ArgumentError(
            "an arena is neither copied nor pickled. Instead: copy the module, which must not hold "
            "its own arena, and make a new Arena of the copy"
        )


def _nobody() -> None:
    pass


# ---- optimizers of torch's over masters ----------------------------------------------------------


@functools.cache
def _follow_optimizers():
    """Adopt before, and publish after, every step of an optimizer over masters.

    An optimizer's own hooks may edit weights: _adopt() runs after its last pre-step hook, and
    _publish() before its first post-step hook. An optimizer of this package over the arena does
    both itself, in its step."""
    register_optimizer_step_pre_hook(_before_all)
    register_optimizer_step_post_hook(_behind_all)


def _arenas_of(optimizer) -> list[Arena]:
    """The arenas whose masters of bf16 parameters the optimizer updates."""
    arenas = [arena for arena in _arenas if arena.bf16_weights is not None]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]] if arenas else []
    return [arena for arena in arenas if not arena.master_ids.isdisjoint(held)]


def _before_all(optimizer, args, kwargs):
    if getattr(optimizer, "arena", None) or not _arenas_of(optimizer):
        return None
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if _adopt not in before.values():
        optimizer.register_step_pre_hook(_adopt)
        handle = optimizer.register_step_post_hook(_publish)
        behind.move_to_end(handle.id, last=False)
    before.move_to_end(next(key for key, hook in before.items() if hook is _adopt))

    def with_current_weights(closure):
        def called():
            for arena in _arenas_of(optimizer):
                arena.adopt()
                arena.publish()
            return closure()

        return called if callable(closure) else closure

    # LBFGS calls its closure after each of its updates.
    own, *rest = args
    return (own, *map(with_current_weights, rest)), {
        name: with_current_weights(value) for name, value in kwargs.items()
    }


def _adopt(optimizer, args, kwargs):
    for arena in _arenas_of(optimizer):
        arena.check()
        arena.adopt()


def _publish(optimizer, args, kwargs):
    for arena in _arenas_of(optimizer):
        arena.publish(optimizer)


def _behind_all(optimizer, args, kwargs):
    if not {*optimizer._optimizer_step_post_hooks.values()} - {_publish}:
        return
    # Other hooks may have edited parameters or masters.
    for arena in _arenas_of(optimizer):
        arena.adopt()
        if not getattr(optimizer, "arena", None):
            arena.publish(optimizer)


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
