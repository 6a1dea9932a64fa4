"""TrainStep(replay=...): the options, and the CUDA graphs of a step.

ga.TrainStep(model, opt, replay="graph")
ga.TrainStep(model, opt, replay=ga.training.Replay(policy="require"))
"""

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..distributed import Totals
from ..errors import CaptureError, check_choice
from ..graphs import (
    ForwardState,
    GraphedStep,
    Policy,
    check_options,
    frozen_number,
    preserved,
)
from ..ops import load_accumulate_each
from ..optim import Arena, DeviceOptimizer, GradientListener
from .micro import is_split
from .results import StepOutput

# A TrainStep, whose module imports this one.
Step = Any
# How a step runs.
ReplayMode = Literal["eager", "graph"]


@dataclass(frozen=True)
class Replay:
    """The whole step is captured in a CUDA graph and replayed with one launch.

    More about each: ga.GraphedStep.

    Attributes:
        policy: "auto" (if the first capture fails, all steps run eagerly, with a warning; a later
            one that fails is a CaptureError) or "require" (any that fails is a CaptureError).
        max_graphs: graphs held at once; the least recently used one is closed.
    """

    policy: Policy = "auto"
    max_graphs: int = 8

    def __post_init__(self):
        check_options(self.policy, self.max_graphs)


def replay_options(replay: ReplayMode | Replay) -> Replay | None:
    """The argument `replay` of TrainStep; None: eager."""
    if isinstance(replay, Replay):
        return replay
    check_choice("replay", replay, ReplayMode, ", or a ga.training.Replay")
    return Replay() if replay == "graph" else None


class StepGraphs:
    """The CUDA graphs of a TrainStep. Called with a batch it takes one step.

    A batch needs one graph for each kind of batch: the whole step. A list of micro-batches, whose
    length may change from step to step, needs one graph for each kind of micro-batch, which adds
    to totals on the device, and one for the update behind the last of them.

    Args:
        ours: the optimizer is a ga.AdamW over the arena. Then a warm-up needs no update, because
            the optimizer allocates its state in prepare(). An optimizer of torch's allocates it in
            a step.

    Attributes:
        captured: the optimizers whose step a graph holds.
        launched: the others, which read numbers on the host: they take their step behind a replay.
    """

    def __init__(self, step: Step, ours: bool, options: Replay):
        self._step = weakref.ref(step)
        self.ours = ours
        self._options = options
        self.launched = [opt for opt in step.optimizers if _reads_on_host(opt, step.arena)]
        self.captured = [opt for opt in step.optimizers if opt not in self.launched]
        # A capture may launch it first, and cannot load it.
        load_accumulate_each(step.arena.device)
        self.batch_graphs = self._make_batch_graphs(step)
        # Made by the first list of micro-batches.
        self.list_graphs: "ListGraphs | None" = None

    @property
    def step(self) -> Step:
        """Whose graphs these are. It has them, and a second strong reference would be a cycle."""
        return _alive(self._step)

    @property
    def options(self) -> dict:
        """Of each GraphedStep."""
        return {"modes": self._mode, **asdict(self._options)}

    def _make_batch_graphs(self, step: Step) -> GraphedStep:
        self.loss_module = _loss_module_of(step)
        return GraphedStep(
            self._captured_step,
            [*_modules_of(step), *self.captured],
            warm_up=self._warm_up_batch if self.ours else None,
            saved=self.forward_state if self.ours else None,
            **self.options,
        )

    def forward_state(self) -> list[ForwardState]:
        """All that a warm-up without an update changes: its gradients are dropped."""
        return [ForwardState(module) for module in _modules_of(self.step)]

    def __call__(self, batch) -> StepOutput:
        self._check()
        if is_split(batch):
            return self._replay_list(batch)
        self._before_batch(batch)
        return self.with_launched(*self.batch_graphs(batch))

    def capture(self, batch):
        """Capture for this kind of batch, and take no step."""
        self.check_hooks()
        self._check()
        self._before_batch(batch)
        self.batch_graphs.capture(batch)

    def _before_batch(self, batch):
        # An ArgumentError before anything is captured.
        self.step._split(batch)
        if self.loss_module is not _loss_module_of(self.step):
            self.batch_graphs.close()
            self.batch_graphs = self._make_batch_graphs(self.step)
        self._agree(lambda: self._warm_up_batch(_copied(batch)))

    def split(self):
        """What follows in a captured step has parallel branches: see GraphedStep.split."""
        self.batch_graphs.split()

    def _captured_step(self, batch) -> tuple[dict, int]:
        """Captured: the whole step, but for the launched optimizers."""
        step = self.step
        with step._accumulation_window():
            totals = step._accumulate(step._split(batch), step.reducer)
            # A forward may write into weights (max_norm of nn.Embedding): a replay shows the
            # launched optimizers no version by which they would know.
            step.arena.adopt()
            return _captured_update(step, totals, self.captured)

    def with_launched(self, output: dict, received: int) -> StepOutput:
        """Behind a replay: the launched optimizers take their step with its gradients.

        Args:
            output: fields of the step's StepOutput.
            received: which tensors have a gradient, a bit for each.
        """
        if self.launched:
            step = self.step
            with step._accumulation_window():
                step.arena.gradients.set(_flags(received, len(step.arena.module_parameters)))
                for opt in self.launched:
                    opt.step()
        return StepOutput(**output)

    def check_hooks(self):
        """CaptureError for a hook that a replay would not call: eager steps refuse it as well."""
        arena = self.step.arena
        for i, segment in enumerate(arena.segments):
            if arena.gradients.has_hooks(i):
                raise CaptureError(
                    f"{segment.name} has a hook of register_post_accumulate_grad_hook(), which a "
                    "replay would not call. Instead: remove it, or use replay='eager'"
                )

    def _check(self):
        """CaptureError for a closed step, and for gradients of a backward outside of the step.

        Eager adds to them, a replay may not."""
        if self.batch_graphs.closed:
            raise CaptureError("the step was closed: make a new one")
        # A graph knows where the weights lie.
        self.step.arena.check()
        if any(self.step.arena.gradients.received()):
            raise CaptureError(
                "gradients stand from a backward outside of this step, and a replay would not "
                "always add them: call optimizer.zero_grad() before, or use replay='eager'"
            )

    # ---- all of them ----

    @property
    def all(self) -> list[GraphedStep]:
        if self.list_graphs is None:
            return [self.batch_graphs]
        return [self.batch_graphs, self.list_graphs.micro_graphs, self.list_graphs.update_graphs]

    @property
    def replays(self) -> str:
        """ "graph", or "eager" when one of them cannot be captured."""
        return "graph" if all(graphs.replays == "graph" for graphs in self.all) else "eager"

    @property
    def reason(self) -> str:
        reasons = [graphs.reason for graphs in self.all if graphs.replays == "eager"]
        if reasons or not self.launched:
            return [*reasons, self.batch_graphs.reason][0]
        names = ", ".join(type(opt).__name__ for opt in self.launched)
        return f"{self.batch_graphs.reason}; {names} launched behind them"

    def reset(self):
        for graphs in self.all:
            graphs.reset()

    def close(self):
        for graphs in self.all:
            graphs.close()

    def _mode(self):
        """What a graph keeps by value, beside shapes and the optimizer's settings."""
        step = self.step
        max_norm = None if self.ours else step.max_norm
        loss_fn = step.loss_fn
        if not isinstance(loss_fn, Hashable):
            loss_fn = _Identity(loss_fn)
        return step.micro_batches, step.autocast, loss_fn, max_norm

    def _agree(self, warm_up):
        """Before the first capture the ranks agree on the tensors that get a gradient.

        A captured step cannot ask. warm_up: returns for each tensor whether it gets one here."""
        reducer = self.step.reducer
        if reducer is not None and reducer.used.taking_part is None:
            with preserved(self.forward_state(), self.step.arena.device):
                reducer.used.find(warm_up())

    def _warm_up_batch(self, batch) -> list[bool]:
        with self.step._accumulation_window():
            self.step._accumulate(self.step._split(batch), reducer=None)
            return self.step.arena.gradients.received()

    # ---- a list of micro-batches ----

    def _replay_list(self, micros) -> StepOutput:
        self._check_list()
        # Whether the loss counts tokens decides what the totals are.
        if self.list_graphs is None or self.list_graphs.loss_fn is not self.step.loss_fn:
            if self.list_graphs is not None:
                self.list_graphs.close()
            self.list_graphs = ListGraphs(self, micros)
        graphs = self.list_graphs
        self._agree(lambda: graphs.warm_up_micro(_copied(micros[0]), len(micros)))
        return self.with_launched(*graphs(micros))

    def _check_list(self):
        step = self.step
        if step.reducer is not None and step.reducer.config.ordered:
            raise CaptureError(
                "a list of micro-batches is replayed one by one, which ordered mode does not; "
                "expected one batch, or replay='eager'"
            )


class ListGraphs:
    """The graphs of a list of micro-batches, and the totals on the device that they add to.

    Args:
        micros: the first list; it shows whether loss_fn counts tokens.
    """

    def __init__(self, graphs: StepGraphs, micros):
        step = graphs.step
        self._step = weakref.ref(step)
        self._captured = graphs.captured
        self.loss_fn = step.loss_fn
        device = step.arena.device
        # Of loss_fn's count of tokens; None: it returns means.
        self._token_dtype: torch.dtype | None = None
        with preserved(graphs.forward_state(), device):
            self.warm_up_micro(_copied(micros[0]), len(micros))
        self.loss = torch.zeros((), dtype=torch.float32, device=device)
        self.tokens = torch.zeros((), dtype=self._token_dtype or torch.int64, device=device)
        self.micro_batches = torch.zeros((), dtype=torch.float32, device=device)
        self._totals: list[Tensor] = [self.loss, self.tokens, self.micro_batches]
        self.micro_graphs = GraphedStep(
            self._add_micro,
            [*_modules_of(step), *self._totals],
            warm_up=self.warm_up_micro,
            saved=graphs.forward_state,
            **graphs.options,
        )
        self.update_graphs = GraphedStep(
            self._update,
            [step.model, *self._captured, *self._totals],
            warm_up=self._warm_up_update if graphs.ours else None,
            saved=list if graphs.ours else None,
            **graphs.options,
        )

    @property
    def step(self) -> Step:
        return _alive(self._step)

    def __call__(self, micros) -> tuple[dict, int]:
        step = self.step
        # No graph of this step may push out another one of it.
        self.micro_graphs.max_graphs = max(self.micro_graphs.max_graphs, len(micros))
        # The number of micro-batches belongs to a graph's key only where each loss is divided by
        # it before backward.
        count = len(micros) if self._token_dtype is None else 0
        received = 0
        try:
            # All captures come before the first sum.
            for micro in micros:
                self.micro_graphs.capture(micro, count)
            if step.reducer is not None:
                step.reducer.begin_step()
            # The graphs of micro-batches add.
            step.arena.grads.zero_()
            for micro in micros:
                received |= self.micro_graphs(micro, count)
            return self.update_graphs(received)
        except BaseException:
            self._zero_totals()
            step.arena.gradients.clear()
            raise

    def close(self):
        self.micro_graphs.close()
        self.update_graphs.close()

    def warm_up_micro(self, micro, count: int) -> list[bool]:
        with self.step._accumulation_window():
            _, tokens = self.step._micro(micro, count or 1)
            self._token_dtype = None if tokens is None else tokens.dtype
            return self.step.arena.gradients.received()

    def _add_micro(self, micro, count: int) -> int:
        """Captured: one micro-batch, added to the sums.

        Returns:
            Which tensors got a gradient, a bit for each.
        """
        arena = self.step.arena
        tensors = TensorsOfBackward()
        arena.gradients.set([True] * len(arena.module_parameters))
        with arena.gradients.listening(tensors):
            loss, tokens = self.step._micro(micro, count or 1)
        self.loss += loss
        self.micro_batches += 1
        if tokens is not None:
            self.tokens += tokens
        arena.gradients.clear()
        return _bits(i in tensors.indices for i in range(len(arena.module_parameters)))

    def _warm_up_update(self, received: int):
        totals = Totals(self.loss, self.tokens, self.micro_batches)
        self.step._mean_loss(totals)
        self.step._divisor(totals)

    def _update(self, received: int) -> tuple[dict, int]:
        """Captured: the update, with the gradients of the tensors `received`."""
        step = self.step
        tokens = None if self._token_dtype is None else self.tokens.clone()
        totals = Totals(self.loss.clone(), tokens, self.micro_batches)
        step.arena.gradients.set(_flags(received, len(step.arena.module_parameters)))
        with step._accumulation_window():
            result = _captured_update(step, totals, self._captured)
        self._zero_totals()
        return result

    def _zero_totals(self):
        for total in self._totals:
            total.zero_()


def _reads_on_host(opt: torch.optim.Optimizer, arena: Arena) -> bool:
    """Whether a graph cannot hold the optimizer's step."""
    # Masters without their arena are updated by torch's operations, which read norms on a CPU.
    alone = isinstance(opt, DeviceOptimizer) and opt.arena is None and arena.device.type == "cpu"
    return (alone and arena.bf16_weights is not None) or frozen_number(opt) is not None


def _captured_update(step: Step, totals: Totals, captured) -> tuple[dict, int]:
    """The update by the captured optimizers.

    Returns:
        The fields of a StepOutput, and which tensors have a gradient, a bit for each.
    """
    output = step._update(totals, optimizers=captured)
    return vars(output), _bits(step.arena.gradients.received())


def _bits(flags: Iterable[bool]) -> int:
    """A whole number with a bit for each flag, the first one the lowest."""
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def _flags(bits: int, count: int) -> list[bool]:
    """The flags from which _bits() made a number."""
    return [bits >> i & 1 == 1 for i in range(count)]


class TensorsOfBackward(GradientListener):
    """The indices of the tensors that a backward reaches."""

    def __init__(self):
        self.indices: set[int] = set()

    def gradient_complete(self, i):
        self.indices.add(i)


class _Identity:
    """In a graph's key, for an object that cannot be hashed: equal to that of the same object only.

    It keeps the object alive, whose id is nobody else's therefore."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _loss_module_of(step: Step) -> nn.Module | None:
    """step.loss_fn where it is a module, whose buffers a step may change."""
    return step.loss_fn if isinstance(step.loss_fn, nn.Module) else None


def _modules_of(step: Step) -> list[nn.Module]:
    """The modules that run in a step."""
    loss = _loss_module_of(step)
    return [step.model] if loss is None else [step.model, loss]


def _copied(batch):
    """A batch in memory of its own: a warm-up may write into it."""
    return tree_map_only(Tensor, torch.clone, batch)


def _alive(reference: weakref.ref[Step]) -> Step:
    step = reference()
    if step is None:
        raise CaptureError("the TrainStep of these graphs is gone: keep it, and call it")
    return step
