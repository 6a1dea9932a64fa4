"""One step, one CUDA graph: captured once per kind of input, then launched whole, while every number that changes stays on the device.

    >>> step = ga.GraphedStep(fn, state=[model, opt])      # fn(inputs, targets): forward, backward, opt.step(); returns tensors
    >>> loss = step(inputs, targets)                       # the first call warms up, captures and replays; later ones replay
    >>> step.close()

Warming up leaves no trace in what `state` names, nor in the random generators. The results of a call are tensors of their own. A graph
knows tensors by their address: inputs are copied into its own, and a model that has moved is noticed. What Python does in fn (a number
passed by value, a print, a counter) happens at the capture only. On the CPU a tape stands in for the graph under backend `simt`;
under backend `torch` fn simply runs.
"""

import contextlib
import random
import sys
import warnings
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..backends import backend
from ..errors import ArgumentError, CaptureError
from ..nn.embedding import counts_of
from ..ops.accumulate import span
from ..ops.clip import check_choice
from ..optim.accumulate import GradientAccumulator
from ..optim.arena import Arena
from ..optim.device_optimizer import DeviceOptimizer
from .capture import recorder_for

POLICIES = ("auto", "require")
NEW_SHAPES = ("capture", "refuse")
WARM_UPS = 2  # the first compiles and loads, the second finds everything in place
_ALIGN = 16  # bytes


class GraphedStep:
    """fn captured in CUDA graphs, one for each kind of input.

    fn(*args, **kwargs): a step over tensors, which may stand in tuples, lists and dicts; other arguments are part of a graph's key. It
    returns a tensor, a tree of tensors, or None. state: what fn changes: modules (parameters, buffers, gradients), optimizers, tensors.
    They are as before after the warm-up; an optimizer has all its state on the device afterwards. warm_up: what to run as warm-up instead
    of fn (same arguments); saved: what that changes, if less than state. Before each replay every
    ga.AdamW in state is refresh()ed. modes: a function whose (hashable) result is part of the key. policy: "auto" (when the first call cannot be captured,
    fn runs eagerly from then on, and a warning says why) or "require" (CaptureError). A later capture that fails is a CaptureError under
    both: a run does not change its ways. new_shapes: "capture" or "refuse" (CaptureError) what comes after the first kind of input.
    max_graphs: the least recently used one goes. All graphs share one pool of memory.

    Gradients that fn leaves in `.grad` lie in the graph's memory: the next step overwrites them, close() takes them away.
    `replay` is "graph" or "eager", `reason` says why. CaptureError, with nothing changed, when a module, parameter, buffer or optimizer state
    no longer lies where it lay at the capture: reset(). ArgumentError for an input that requires a gradient, or cannot be hashed."""

    def __init__(
        self,
        fn,
        state=(),
        *,
        warm_up=None,
        saved=None,
        modes=None,
        policy: str = "auto",
        new_shapes: str = "capture",
        max_graphs: int = 8,
        device=None,
    ):
        check_choice("policy", policy, POLICIES)
        check_choice("new_shapes", new_shapes, NEW_SHAPES)
        if not isinstance(max_graphs, int) or max_graphs < 1:
            raise ArgumentError(
                f"max_graphs is {max_graphs!r}; expected a whole number of 1 or more"
            )
        self.fn, self.policy, self.new_shapes, self.max_graphs = fn, policy, new_shapes, max_graphs
        self.state = (
            [state]
            if isinstance(state, (nn.Module, torch.optim.Optimizer, Tensor))
            else list(state)
        )
        wrong = next(
            (
                thing
                for thing in self.state
                if not isinstance(thing, (nn.Module, torch.optim.Optimizer, Tensor))
            ),
            None,
        )
        if wrong is not None:
            raise ArgumentError(
                f"state holds a {type(wrong).__name__}; expected modules, optimizers and tensors"
            )
        self._saved = self.state if saved is None else saved
        self._warm_up, self._modes = warm_up or fn, modes
        self._look()
        self._graphs, self._places, self.closed = OrderedDict(), None, False
        self.device = torch.device(device) if device is not None else _device_of(self.state)
        self._recorder = recorder_for(self.device, backend().name)
        self.replay = "graph" if self._recorder else "eager"
        self.reason = (
            {"cuda": f"CUDA graphs on {self.device}", "cpu": "a tape on the CPU (backend simt)"}[
                self.device.type
            ]
            if self._recorder
            else f"CUDA graphs need a CUDA device, and the step is on {self.device} ({backend()})"
        )
        self._why = self.reason
        if self._recorder is None and policy == "require":
            raise CaptureError(f"{self.reason}; expected one under policy 'require'")
        if self._recorder is None:
            self._say()

    def __call__(self, *args, **kwargs):
        """One step. Tensors may lie elsewhere: they are copied to the step's device, from pinned memory without a wait."""
        if self.closed:
            raise CaptureError("the step was closed: make a new one")
        found = self._find(args, kwargs) if self.replay == "graph" else None
        if found is None:
            if self._recorder is not None:  # fell back: inputs are where they would be
                args, kwargs = tree_map_only(
                    Tensor, lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
                )
            return self.fn(*args, **kwargs)
        self._refresh()
        found.fill(tree_leaves((args, kwargs)))
        found.recording.replay()
        return found.results()

    def capture(self, *args, **kwargs):
        """Capture for this kind of input now, if it is not captured yet, without taking a step."""
        if self.closed:
            raise CaptureError("the step was closed: make a new one")
        if self.replay == "graph":
            self._find(args, kwargs)

    def _find(self, args, kwargs) -> "_Graph | None":
        """The graph for these inputs, captured if need be; None: the first one cannot be captured, and the policy is to go on without."""
        if self._graphs:
            self._places.check()
        leaves, spec = tree_flatten((args, kwargs))
        for i, t in enumerate(leaves):
            if isinstance(t, Tensor) and t.requires_grad:
                raise ArgumentError(
                    f"input {i} of shape {tuple(t.shape)} requires a gradient; a captured step takes data: detach() it, or name it in state"
                )
        key = self._key(leaves, spec)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if self._graphs and self.new_shapes == "refuse":
            known = [shapes for *_, shapes in self._graphs]
            what = (
                "with these shapes, but in another mode (training, autocast, deterministic, frozen weights, standing gradients, settings)"
                if key[-1] in known
                else "; ".join(known)
            )
            raise CaptureError(
                f"this kind of input has no graph: {key[-1]}; captured are {what}, and new_shapes is 'refuse'"
            )
        try:
            found = self._capture(leaves, spec)
        except CaptureError as error:
            if self.policy == "require" or self._graphs:
                raise
            self.replay, self.reason = "eager", str(error)
            self._say()
            return None
        self._graphs[key] = found
        while len(self._graphs) > self.max_graphs:
            self._graphs.popitem(last=False)[1].close()
        return found

    def _say(self):
        warnings.warn(
            f"no CUDA graph, every step runs eagerly: {self.reason}", stacklevel=_outside()
        )

    def _key(self, leaves, spec):
        tensors = tuple((t.shape, t.dtype) for t in leaves if isinstance(t, Tensor))
        others = tuple((type(leaf), leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        kind = self.device.type
        mode = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            backend().name,
            self._modes and self._modes(),
            tuple(
                _settings_of(thing)
                for thing in self.state
                if isinstance(thing, torch.optim.Optimizer)
            ),
        )
        flags = tuple(
            [(m.training, m.__dict__.get("merged")) for m in self._modules]
        )  # merged: LoRA's factors are in the weight
        asked = tuple([(p.requires_grad, p.grad is None) for p in self._params])
        words = ", ".join(
            f"{'x'.join(map(str, shape)) or 'scalar'} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in tensors
        )
        key = (spec, others, tensors, mode, flags, asked, words)
        try:
            hash(key)
        except TypeError:
            raise ArgumentError(
                f"the arguments that are no tensors are part of a graph's key; expected hashable ones, got {[leaf for _, leaf in others]}"
            ) from None
        return key

    def _look(self):
        """Which modules and parameters there are. Told anew at each capture; in between check() notices when one is replaced."""
        self._modules = [
            m for top in self.state if isinstance(top, nn.Module) for m in top.modules()
        ]
        found = [p for m in self._modules for p in m._parameters.values() if p is not None]
        found += [
            p
            for opt in self.state
            if isinstance(opt, torch.optim.Optimizer)
            for group in opt.param_groups
            for p in group["params"]
        ]
        self._params = list(dict.fromkeys(found))

    def _refresh(self):
        for thing in self.state:
            if isinstance(thing, DeviceOptimizer):
                thing.refresh()
            elif isinstance(thing, nn.Module) and (arena := Arena.of(thing)):
                arena.adopt()

    def _capture(self, leaves, spec):
        inputs = [
            torch.empty_like(t, device=self.device).copy_(t) if isinstance(t, Tensor) else t
            for t in leaves
        ]
        args, kwargs = tree_unflatten(inputs, spec)
        for thing in self.state:
            _check_frozen(thing)
            if isinstance(thing, DeviceOptimizer):
                thing.prepare()
        stays = _Places([thing for thing in self.state if isinstance(thing, nn.Module)])
        with untouched(self._saved, self.device), _no_autocast_cache():
            for _ in range(WARM_UPS):
                self._recorder.run(lambda: self._warm_up(*args, **kwargs))
            stays.check(
                "the step itself puts another tensor in its place, and each replay would read the old one. Instead: write into it (copy_, add_)"
            )
        self._refresh()
        pack = []

        def whole():
            pack.append(_Pack(self.fn(*args, **kwargs), self.device))

        # Gradients that stand now are inputs as well: the graph has its own copies. (An arena's sums stay where they are.)
        sums = {
            id(view) for m in self._modules if (arena := Arena.of(m)) for view in arena.grad_views
        }
        params, before = self._params, [p.grad for p in self._params]
        standing, after = (
            [None if grad is None or id(grad) in sums else grad.clone() for grad in before],
            [],
        )
        try:
            for p, grad in zip(params, standing):
                if grad is not None:
                    p.grad = grad
            with (
                untouched(self.state, self.device)
                if self._recorder.executes
                else untouched((), "cpu"),
                _no_autocast_cache(),
            ):
                recording, _ = self._recorder.record(
                    lambda: (whole(), after.extend(p.grad for p in params))
                )
        finally:
            for p, grad in zip(params, before):
                p.grad = grad  # what the capture put there has no value before a replay
        self._look()
        self._places = _Places(self.state)
        grads = [
            (p, mine, left)
            for p, mine, left, grad in zip(params, standing, after, before)
            if mine is not None or left is not grad
        ]
        return _Graph(recording, inputs, pack[-1], grads)

    def reset(self):
        """Drop every graph: the next call captures anew. For a model that was changed on purpose."""
        self._drop()
        self._look()
        if self._recorder is not None:
            self.replay, self.reason = "graph", self._why

    def _drop(self):
        for found in self._graphs.values():
            found.close()
        self._graphs.clear()

    def graph(self) -> "tuple[list[str], list[tuple[int, int]]]":
        """(names of the nodes, edges) of the newest graph: kernels, copies and memsets, and who waits for whom. ([], []) without one."""
        return next(reversed(self._graphs.values())).recording.graph() if self._graphs else ([], [])

    def __len__(self):
        """Graphs held now."""
        return len(self._graphs)

    def __bool__(self):
        return True

    def close(self):
        """Wait for what was launched, and give graphs and memory back. Does nothing twice."""
        self._drop()
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


class _Graph:
    """One recording with its own inputs and results. grads: (parameter, its gradient as an input or None, the one that fn leaves)."""

    def __init__(self, recording, inputs, pack, grads):
        self.recording, self.inputs, self.pack, self.grads = recording, inputs, pack, grads

    @torch.no_grad()
    def fill(self, leaves):
        for p, mine, _ in self.grads:
            if mine is not None and p.grad is not mine:
                mine.copy_(p.grad)
        pairs = [
            (mine, given) for mine, given in zip(self.inputs, leaves) if isinstance(mine, Tensor)
        ]
        if pairs:
            torch._foreach_copy_(
                [mine for mine, _ in pairs], [given for _, given in pairs], non_blocking=True
            )

    def results(self):
        for p, _, left in self.grads:
            p.grad = left
        return self.pack.results()

    def close(self):
        for p, mine, left in self.grads:
            if left is not None and left is not mine and p.grad is left:
                p.grad = None  # its memory goes
        self.recording.close()


class _Pack:
    """A tree of results, copied side by side into one buffer, so that one copy after a replay makes them the caller's own."""

    def __init__(self, tree, device):
        self.leaves, self.spec = tree_flatten(tree)
        wrong = next(
            (
                leaf
                for leaf in self.leaves
                if not isinstance(leaf, (Tensor, type(None), int, float, str, bool))
            ),
            None,
        )
        if wrong is not None:
            raise CaptureError(
                f"the step returns a {type(wrong).__name__}; expected tensors, in tuples, lists or dicts"
            )
        tensors = [t.detach() if isinstance(t, Tensor) else None for t in self.leaves]
        ends, self.layout = 0, []
        for t in tensors:
            size = 0 if t is None else t.numel() * t.element_size()
            self.layout.append(None if t is None else (ends, size, t.dtype, t.shape))
            ends += -(-size // _ALIGN) * _ALIGN
        self.buffer = torch.empty(ends, dtype=torch.uint8, device=device)
        for t, view in zip(tensors, self._views(self.buffer)):
            if t is not None:
                view.copy_(t)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def _views(self, buffer):
        return [
            None
            if place is None
            else buffer[place[0] : place[0] + place[1]].view(place[2]).view(place[3])
            for place in self.layout
        ]

    def results(self):
        views = self._views(self.buffer.clone())
        return tree_unflatten(
            [leaf if view is None else view for view, leaf in zip(views, self.leaves)], self.spec
        )


class _Places:
    """Where everything lay that a graph knows by address. check(): is it there still?"""

    def __init__(self, state):
        self.modules = [
            (f"{prefix}.{name}".strip("."), m)
            for prefix, top in _named(state, nn.Module)
            for name, m in top.named_modules()
        ]
        self.optimizers = [opt for _, opt in _named(state, torch.optim.Optimizer)]
        self.then, self.names, self.children_names = (
            self._now(),
            list(self._names()),
            list(self._children_names()),
        )

    def _now(self):
        tensors = [t for *_, t in self._entries()]
        return list(zip(map(Tensor.data_ptr, tensors), [t.dtype for t in tensors])), [
            id(c) for _, m in self.modules for c in m._modules.values()
        ]

    def _entries(self):
        """(module's name, or group and number of an optimizer's parameter; what of it; the tensor)."""
        for name, m in self.modules:
            for kind in (m._parameters, m._buffers):
                yield from ((name, key, t) for key, t in kind.items() if t is not None)
        for opt in self.optimizers:
            for g, group in enumerate(opt.param_groups):
                yield from (
                    (g, key, value) for key, value in group.items() if isinstance(value, Tensor)
                )
                for i, p in enumerate(group["params"]):
                    yield (g, i), "", p
                    yield from (
                        ((g, i), key, t)
                        for key, t in opt.state.get(p, {}).items()
                        if isinstance(t, Tensor)
                    )

    def _names(self):
        for where, key, _ in self._entries():
            of = f"{key} of " if key else ""
            yield (
                f"{where}.{key}".strip(".")
                if isinstance(where, str)
                else f"{of}the optimizer's group {where}"
                if isinstance(where, int)
                else f"{of}parameter {where[1]} of the optimizer's group {where[0]}"
            )

    def _children_names(self):
        return (f"{name}.{key}".strip(".") for name, m in self.modules for key in m._modules)

    def check(
        self, what_then="the captured graph would use the old memory. Call reset() to capture anew"
    ):
        now = self._now()
        if now != self.then:
            raise CaptureError(f"{self._difference(*now)}: {what_then}")

    def _difference(self, tensors, children) -> str:
        for then, now, kind, they in (
            (
                self.children_names,
                list(self._children_names()),
                "module ",
                zip(self.then[1], children),
            ),
            (self.names, list(self._names()), "", zip(self.then[0], tensors)),
        ):
            if then != now:
                new, gone = (
                    [name for name in now if name not in then],
                    [name for name in then if name not in now],
                )
                return f"{kind}{(new or gone or now)[0]} {'was not there' if new else 'was there, and is no more,' if gone else 'stood elsewhere'} at the capture"
            for name, (one, two) in zip(now, they):
                if one != two:
                    change = (
                        f" was {one[1]} and is {two[1]}"
                        if not kind and one[1] != two[1]
                        else " is another one than at the capture"
                        if kind
                        else " lies elsewhere than at the capture"
                    )
                    return f"{kind}{name}{change}"


def _named(state, kind):
    return [
        (str(i) if sum(isinstance(t, kind) for t in state) > 1 else "", thing)
        for i, thing in enumerate(state)
        if isinstance(thing, kind)
    ]


def _device_of(state):
    for thing in state:
        if isinstance(thing, Tensor):
            return thing.device
        for t in (
            thing.parameters()
            if isinstance(thing, nn.Module)
            else (p for group in thing.param_groups for p in group["params"])
        ):
            return t.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _settings_of(opt) -> tuple:
    """What an optimizer hands to its kernels by value, beside the settings that ga.AdamW keeps on the device."""
    if isinstance(opt, DeviceOptimizer):
        return opt.graph_key()
    groups = tuple(
        (len(g["params"]), g.get("maximize"), g.get("amsgrad")) for g in opt.param_groups
    )
    return groups


@contextlib.contextmanager
def _no_autocast_cache():
    """A weight's copy that autocast keeps from before would not be made in the graph."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _check_frozen(thing):
    """CaptureError for an optimizer of torch's that a graph would freeze: with a learning rate or a step number on the host."""
    if not isinstance(thing, torch.optim.Optimizer) or isinstance(thing, DeviceOptimizer):
        return
    for g, group in enumerate(thing.param_groups):
        on_gpu = any(p.is_cuda for p in group["params"])
        if on_gpu and group.get("capturable") is False:
            raise CaptureError(
                f"{type(thing).__name__} counts its steps on the host (capturable=False in group {g}), which a graph would not repeat. "
                "Instead: capturable=True and a learning rate on the device, or ga.AdamW"
            )
        lr = group.get("lr", thing)
        if lr is not thing and (not isinstance(lr, Tensor) or on_gpu and not lr.is_cuda):
            where = "a tensor on the CPU" if isinstance(lr, Tensor) else f"the number {lr}"
            raise CaptureError(
                f"the learning rate of {type(thing).__name__}'s group {g} is {where}, which a graph would keep for ever, "
                f"whatever a schedule says. Instead: lr=torch.tensor({float(lr)}, device=...), or ga.AdamW"
            )


def _outside() -> int:
    """How many frames up the caller is who is not in this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpuaccel"):
        depth, frame = depth + 1, frame.f_back
    return depth


# ---- no trace -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def untouched(state, device):
    """What happens in the block leaves no trace in `state` (modules, optimizers, tensors), nor in the random generators.

    Costs a copy of all of it while the block runs."""
    seen = set()  # of what lies in several of them one copy is enough
    saved = [_save(thing, seen) for thing in state]
    cuda = torch.device(device).type == "cuda"
    drawn = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if cuda else None,
    )
    try:
        yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if cuda:
            torch.cuda.set_rng_state(drawn[3], device)
        with torch.no_grad():
            for restore in saved:
                restore()


def _save(thing, seen):
    """A function that brings a thing's values back, into the tensors that hold them now."""
    if isinstance(thing, Tensor):
        return _save_tensors([thing], seen)
    if isinstance(thing, torch.optim.Optimizer):
        return _save_optimizer(thing, seen)
    arena = Arena.of(thing)
    if arena:
        arena.adopt()
    accumulator = arena and GradientAccumulator.of(arena)
    buffers = (
        [t for t in (arena.weights, arena.bf16_weights, arena.grads) if t is not None]
        if arena
        else []
    )
    values = _save_tensors(
        [*buffers, *thing.parameters(), *thing.buffers(), *counts_of(thing)], seen
    )
    registered = [
        (entries, dict(entries)) for m in thing.modules() for entries in (m._parameters, m._buffers)
    ]
    homes = [(p, p.data) for p in thing.parameters()]
    params = list({*thing.parameters(), *(arena.masters if arena else ())})
    grads = [(p, p.grad) for p in params]
    grad_values = _save_tensors([grad for _, grad in grads if grad is not None], seen)
    flags = accumulator and (list(accumulator.touched), list(accumulator.presented))

    def restore():
        for entries, before in registered:
            entries.update(before)
        for p, home in homes:
            if p.data_ptr() != home.data_ptr():
                p.data = home
        values()
        grad_values()
        if arena:
            arena.grads_changed()
            arena.weights_current()
        if accumulator:
            accumulator.touched, accumulator.presented = map(list, flags)
        for p, grad in grads:
            p.grad = grad

    return restore


def _save_tensors(tensors, seen):
    saved = []
    for t in tensors:
        if t.numel() and not _inside(t, seen):
            saved.append((t.detach(), t.detach().clone()))
            if t.is_contiguous():
                seen.add(span(t))

    def restore():
        for t, value in saved:
            t.copy_(value)

    return restore


def _inside(t, spans) -> bool:
    """Does the memory of `t` lie in one of these spans?"""
    start, stop = span(t)
    return (start, stop) in spans or any(first <= start and stop <= last for first, last in spans)


def _save_optimizer(opt, seen):
    params = [p for group in opt.param_groups for p in group["params"]]
    there = {
        p: {key: t for key, t in opt.state.get(p, {}).items() if isinstance(t, Tensor)}
        for p in params
    }
    own = opt.tensors_changed_by_step() if isinstance(opt, DeviceOptimizer) else []
    values = _save_tensors([*own, *params, *(t for p in params for t in there[p].values())], seen)

    def restore():
        values()
        new = [
            t
            for p in params
            for key, t in opt.state.get(p, {}).items()
            if isinstance(t, Tensor) and key not in there[p]
        ]
        if new and not isinstance(opt, (DeviceOptimizer, torch.optim.Adam, torch.optim.AdamW)):
            for p in params:
                for key in [key for key in opt.state.get(p, {}) if key not in there[p]]:
                    del opt.state[p][key]
            raise CaptureError(
                f"{type(opt).__name__} makes its state in the first step, and what it starts from is not known: take one step before "
                "the capture"
            )
        for t in new:  # Adam's moments and step numbers start at zero
            t.zero_()

    return restore
