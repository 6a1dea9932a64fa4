"""A training step captured once in a CUDA graph, then replayed with one launch.

    step = ga.GraphedStep(fn, state=[model, opt])
    loss = step(inputs, targets)
    step.close()

fn(inputs, targets) is a whole step: forward, backward, opt.step(). The first call warms up,
captures and replays; a later one replays. There is one graph for each kind of input.

What a capture means for fn:
  * Its tensors keep their addresses. Inputs are copied into static inputs, results are copied
    out, and a parameter that has moved since the capture is an error.
  * Numbers that change live on the device. A number passed by value stays as it was.
  * What Python does in fn (a print, a counter) happens at the capture only.
  * The warm-up leaves no trace in `state` and in the random generators.

On the CPU a tape (graphs/tape.py) stands in for the graph under backend `simt`; under backend
`torch` fn runs eagerly.
"""

import contextlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..backends import backend
from ..compiler import replacements
from ..errors import ArgumentError, CaptureError, check_choice, described
from .addresses import Addresses
from .capture import recorder_for
from .captured_graph import CapturedGraph, GraphGradient, ResultBuffer
from .participant import OtherSums, Refreshable, participants_of
from .snapshot import ForwardState, MemorySpans, host_generators, preserved
from .torch_optimizers import frozen_number, no_other_steps, optimizer_key, settings_stay

if TYPE_CHECKING:
    from typing_extensions import Self

# What a step changes.
StateMember = nn.Module | torch.optim.Optimizer | Tensor
# Of the captured function: parameters and result.
P = ParamSpec("P")
R = TypeVar("R")

Policy = Literal["auto", "require"]
# The first warm-up compiles and loads, the second finds everything in place.
WARM_UPS = 2


def check_options(policy: Policy, max_graphs: int):
    """Refuse options that GraphedStep does not have.

    Args:
        policy: "auto" or "require".
        max_graphs: 1 or more.

    Raises:
        ArgumentError: for any other value.
    """
    check_choice("policy", policy, Policy)
    if not isinstance(max_graphs, int) or max_graphs < 1:
        raise ArgumentError(f"max_graphs is {max_graphs!r}; expected a whole number of 1 or more")


class GraphedStep(Generic[P, R]):
    """A function captured in CUDA graphs, one for each kind of input, and replayed.

    A kind is the shapes and dtypes of the tensors among the arguments, and the values of the
    others. Tensors are copied in, and results are copied out: no later call writes them.

    Python numbers that fn reads, other than its arguments, keep their values of the capture; those
    of ga.AdamW, ga.optim.Lion and the layers of this package may change. Gradients that fn leaves
    in `.grad` lie in the graph's memory: the next step overwrites them, close() takes them away.

    Args:
        fn: called with tensors, which may stand in tuples, lists and dicts; other arguments become
            part of a graph's key. Returns a tensor, a tree of tensors, or None.
        state: what fn changes: modules (parameters, buffers, gradients), optimizers, tensors. A
            module or optimizer brings its arena along. The warm-up leaves them as they were; an
            optimizer has its state on the device after it. The step runs where the first tensor in
            it lies.
        warm_up: a function that is run instead of fn as warm-up, with the same arguments. Default:
            fn.
        saved: a function that returns what the warm-up changes, where that is less than state.
            Default: state.
        modes: a function without arguments; its hashable result is part of the key. Default: none.
        policy: what happens when the first call cannot be captured. "auto": fn runs eagerly from
            then on, with one warning that says why. "require": CaptureError. A later capture that
            fails is a CaptureError under both: a run never turns from replayed to eager half-way.
        max_graphs: graphs held at once; the least recently used one is closed. All share one memory
            pool.

    Attributes:
        replays: "graph" or "eager", how calls run.
        reason: why, in words.

    Raises:
        CaptureError: with nothing changed, when a module, parameter, buffer or optimizer state has
            another address than at the capture (call reset()), where the first capture fails with
            policy "require", or a later one, and after close().
        ArgumentError: for a fn, state or option of another kind, and for an input that requires a
            gradient, or that is neither a tensor nor hashable.

    Source:
        torch.cuda.CUDAGraph. On a CPU: with backend simt a tape of torch operations, with backend
        torch fn runs eagerly.

    Example:
        >>> weight = torch.ones(2, device=ga.default_device())
        >>> def update(gradient):
        ...     weight.sub_(gradient, alpha=0.1)
        ...     return weight.sum()
        >>> with ga.GraphedStep(update, state=[weight]) as step:  # without a GPU: no graph
        ...     for gradient in torch.ones(3, 2):
        ...         total = step(gradient)
        ...     print(f"{total:.2f}")
        1.40
    """

    def __init__(
        self,
        fn: Callable[P, R],
        state: StateMember | Iterable[StateMember] = (),
        *,
        warm_up: Callable[..., object] | None = None,
        saved: Callable[[], Iterable[StateMember | ForwardState]] | None = None,
        modes: Callable[[], Hashable] | None = None,
        policy: Policy = "auto",
        max_graphs: int = 8,
    ):
        check_options(policy, max_graphs)
        kinds = (nn.Module, torch.optim.Optimizer, Tensor)
        expected = "expected modules, optimizers and tensors"
        if not callable(fn):
            raise ArgumentError(f"fn is {described(fn)}; expected a function")
        if not isinstance(state, (*kinds, Iterable)):
            raise ArgumentError(f"state is {described(state)}; {expected}")
        self.state = [state] if isinstance(state, kinds) else list(state)
        for member in self.state:
            if not isinstance(member, kinds):
                raise ArgumentError(f"state holds {described(member)}; {expected}")
        self.fn = fn
        self.policy = policy
        self.max_graphs = max_graphs
        self.closed = False
        self._saved = saved
        self._warm_up_fn = warm_up or fn
        self._modes = modes
        self._graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._addresses = Addresses(())
        self._list_members()
        self.device = _device_of(self.state)
        # A CudaRecorder or TapeRecorder; None: nothing can be recorded here.
        self._recorder: Any = recorder_for(self.device, backend().name)
        if self._recorder is None:
            self.replays = "eager"
            self.reason = (
                f"CUDA graphs need a CUDA device, and the step is on {self.device} ({backend()})"
            )
            if policy == "require":
                raise CaptureError(f"{self.reason}; expected one under policy 'require'")
            self._warn_eager()
        else:
            self._replay_graphs()

    # ---- a call ----

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Take one step: replay the graph for these inputs, which the first such call captures.

        Tensors on other devices are copied, from pinned memory without a wait.

        Args:
            *args: as fn's.
            **kwargs: as fn's.

        Returns:
            What fn returned, in memory that no later replay writes.

        Raises:
            ArgumentError: for an input that requires a gradient, and for one that is neither a
                tensor nor hashable.
            CaptureError: see GraphedStep.
        """
        graph = self._graph_for(args, kwargs)
        if graph is not None:
            self._refresh()
            return graph.replay(tree_leaves((args, kwargs)))
        if self._recorder is not None:
            # The capture failed: run fn eagerly, with its inputs on the graph's device.
            args, kwargs = tree_map_only(
                Tensor, lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
            )
        return self.fn(*args, **kwargs)

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Capture for this kind of input, unless it is captured already. Takes no step.

        Args:
            *args: as fn's.
            **kwargs: as fn's.
        """
        self._graph_for(args, kwargs)

    def _graph_for(self, args, kwargs) -> CapturedGraph | None:
        """The graph for these inputs, captured if needed; None if fn runs eagerly."""
        if self.closed:
            _closed()
        if self.replays == "eager":
            return None
        if recorder_for(self.device, backend().name) is None:
            raise CaptureError(
                f"this step replays {self.reason}, and the backend is {backend().name} now; "
                "expected a call under the backend that it was made under"
            )
        if self._graphs:
            self._check_addresses()
        else:
            self._list_members()
        leaves, structure = tree_flatten((args, kwargs))
        for i, t in enumerate(leaves):
            if isinstance(t, Tensor) and t.requires_grad:
                raise ArgumentError(
                    f"input {i} of shape {tuple(t.shape)} requires a gradient; a captured step "
                    "takes data: detach() it, or name it in state"
                )
        key = self._key(leaves, structure)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        try:
            graph = self._capture(leaves, structure)
        except CaptureError as error:
            if self.policy == "require" or self._graphs:
                raise
            self.replays, self.reason = "eager", str(error)
            self._warn_eager()
            return None
        self._graphs[key] = graph
        while len(self._graphs) > self.max_graphs:
            _, oldest = self._graphs.popitem(last=False)
            # The new graph may add to gradients that the oldest one has left.
            oldest.close(keep_gradients=True)
        return graph

    def _check_addresses(self):
        try:
            self._addresses.check()
        except CaptureError:
            # An arena copies memory that was assigned to its parameters into its own.
            arenas = {getattr(participant, "arena", None) for participant in self._participants}
            with contextlib.suppress(ArgumentError):
                for arena in arenas - {None}:
                    arena.check()
            self._addresses.check()

    def _key(self, leaves, structure) -> Hashable:
        """What makes one kind of call: each key has a graph of its own."""
        # With their places: fn(x, None) is not fn(None, x).
        constants = tuple(
            (i, type(leaf), leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)
        )
        tensors = tuple((t.shape, t.dtype) for t in leaves if isinstance(t, Tensor))
        kind = self.device.type
        # What a graph keeps by value, beside the arguments.
        mode = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.are_deterministic_algorithms_enabled(),
            *fp32_precisions(),
            backend().name,
            replacements(),
            self._modes and self._modes(),
            tuple([optimizer_key(opt) for opt in self._optimizers]),
            tuple([participant.graph_key() for participant in self._participants]),
            tuple([module.training for module in self._modules]),
            tuple([(p.requires_grad, p.grad is None) for p in self._params]),
        )
        key = structure, constants, tensors, mode
        try:
            hash(key)
        except TypeError:
            raise ArgumentError(
                "the arguments that are no tensors are part of a graph's key; expected hashable "
                f"ones, got {', '.join(sorted({kind.__name__ for _, kind, _ in constants}))}"
            ) from None
        return key

    # ---- a capture ----

    def _capture(self, leaves, structure) -> CapturedGraph:
        for opt in self._optimizers:
            problem = frozen_number(opt)
            if problem is not None:
                raise CaptureError(problem)
        for participant in self._participants:
            if isinstance(participant, Refreshable):
                participant.prepare()
        inputs = [
            torch.empty_like(t, device=self.device).copy_(t) if isinstance(t, Tensor) else t
            for t in leaves
        ]
        args, kwargs = tree_unflatten(inputs, structure)
        self._warm_up(args, kwargs)
        self._refresh()
        graph = self._record(inputs, args, kwargs)
        # fn may have made modules and parameters when it first ran.
        self._list_members()
        self._addresses = Addresses(self.state)
        return graph

    def _warm_up(self, args, kwargs):
        """Run the step until it allocates and compiles nothing more."""
        addresses = Addresses([member for member in self.state if isinstance(member, nn.Module)])
        saved = self.state if self._saved is None else list(self._saved())
        others = OtherSums(self._participants)
        mine = MemorySpans(t for p in self._participants for t in p.tensors_changed_by_step())
        ids = set(map(id, [*self._params, *self.state]))

        def is_known(p: Tensor) -> bool:
            return id(p) in ids or p in mine

        with preserved(saved, self.device), _no_autocast_cache(), no_other_steps(is_known):
            for _ in range(WARM_UPS):
                with settings_stay(self._optimizers):
                    self._recorder.run(lambda: self._warm_up_fn(*args, **kwargs))
            addresses.check(
                "the step itself puts another tensor in its place, and each replay would read the "
                "old one. Instead: write into it (copy_, add_)",
                "the step makes it when it first runs, and a warm-up takes it away again. Instead: "
                "call the model once before",
            )
        others.check()

    def _record(self, inputs, args, kwargs) -> CapturedGraph:
        params, current = self._params, [p.grad for p in self._params]
        # A `.grad` that exists before the step is an input as well: the graph reads its own copy of
        # it. Sums in the memory of a participant (an arena) have a fixed address and need none.
        fixed = MemorySpans(t for p in self._participants for t in p.tensors_changed_by_step())
        before = [None if g is None or g in fixed else g.clone() for g in current]
        after: list[Tensor | None] = []
        results: list[ResultBuffer] = []

        def step():
            results.append(ResultBuffer(self.fn(*args, **kwargs), self.device))
            after[:] = [p.grad for p in params]

        # A tape executes what it records; a CUDA graph does not.
        changed = self.state if self._recorder.executes else ()
        try:
            for p, grad in zip(params, before):
                if grad is not None:
                    p.grad = grad
            with preserved(changed, self.device), _no_autocast_cache():
                generators = host_generators(self._modules, self.device)
                recording, _ = self._recorder.record(step)
                drawn = host_generators(self._modules, self.device)
        finally:
            # Gradients made by the capture have no values before the first replay.
            for p, grad in zip(params, current):
                p.grad = grad
        for name, drawn_from in drawn.items():
            if drawn_from != generators.get(name, drawn_from):
                recording.close()
                raise CaptureError(
                    f"the step draws from {name}, on the host: each replay would use the numbers "
                    "of the capture again. Instead: draw on the device (torch.rand(..., "
                    "device=...)), or launch the step"
                )
        gradients = [
            GraphGradient(p, static, left)
            for p, static, left, grad in zip(params, before, after, current)
            if static is not None or left is not grad
        ]
        return CapturedGraph(recording, inputs, results[-1], gradients)

    def _refresh(self):
        for participant in self._participants:
            if isinstance(participant, Refreshable):
                participant.refresh()

    def _list_members(self):
        """List the members of `state`. Addresses notices changes between captures."""
        tops = [member for member in self.state if isinstance(member, nn.Module)]
        self._modules = [module for top in tops for module in top.modules()]
        self._optimizers = [
            member for member in self.state if isinstance(member, torch.optim.Optimizer)
        ]
        params = [p for m in self._modules for p in m._parameters.values() if p is not None]
        for opt in self._optimizers:
            params += [p for group in opt.param_groups for p in group["params"]]
        self._params = list(dict.fromkeys(params))
        self._participants = participants_of(self.state)

    # ---- the graphs that there are ----

    def _replay_graphs(self):
        self.replays = "graph"
        if self.device.type == "cuda":
            self.reason = f"CUDA graphs on {self.device}"
        else:
            self.reason = "a tape on the CPU (backend simt)"

    def _warn_eager(self):
        warnings.warn(
            f"no CUDA graph, every step runs eagerly: {self.reason}", stacklevel=_callers_depth()
        )

    def reset(self):
        """Close every graph: the next call captures again. Call it after changing the model."""
        if self.closed:
            _closed()
        self._close_graphs()
        if self._recorder is not None:
            self._replay_graphs()

    def _close_graphs(self):
        while self._graphs:
            _, graph = self._graphs.popitem(last=False)
            graph.close()

    def split(self):
        """Capture the rest of fn in a second CUDA graph. fn calls this.

        A replay launches the second graph after the first. Has no effect outside of a capture. For
        an fn that uses several streams at its end: in a graph with parallel branches every kernel
        starts about 0.3 us later, including those before the branches."""
        if self._recorder is not None:
            self._recorder.split()

    def nodes(self) -> list[str]:
        """The names of the newest graph's nodes (kernels, copies, memsets); [] without one.

        They stand in an order that they can run in."""
        if not self._graphs:
            return []
        return next(reversed(self._graphs.values())).recording.nodes()

    def __len__(self):
        """Graphs held now."""
        return len(self._graphs)

    def __bool__(self):
        return True

    def close(self):
        """Wait for what was launched, and give graphs and memory back. May be called twice."""
        self.closed = True
        self._close_graphs()
        # These functions may refer to this object. Dropping them breaks the reference cycle, so
        # that models and optimizers are freed with their last user.
        self.fn = self._warm_up_fn = self._modes = _closed
        self.state, self._saved = [], None
        self._list_members()
        self._addresses = Addresses(())

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def fp32_precisions() -> tuple:
    """The precision settings of fp32 products.

    Reads the newer names: the older ones raise after the newer ones were set."""
    # torch's type annotations lack conv and rnn.
    cudnn: Any = torch.backends.cudnn
    kinds = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    return tuple(kind.fp32_precision for kind in kinds)


def _closed(*_, **__) -> Any:
    """Replaces the functions of a closed step."""
    raise CaptureError("the step was closed: make a new one")


def _device_of(state) -> torch.device:
    for member in state:
        if isinstance(member, Tensor):
            return member.device
        if isinstance(member, nn.Module):
            params = list(member.parameters())
        else:
            params = [p for group in member.param_groups for p in group["params"]]
        if params:
            return params[0].device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def _no_autocast_cache():
    """Disable autocast's cache: a replay would not refresh a cast made before the capture."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def _callers_depth() -> int:
    """Number of frames up to the first caller outside of this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpuaccel"):
        depth, frame = depth + 1, frame.f_back
    return depth
