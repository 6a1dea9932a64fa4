"""Checkpoints that can be trusted: safetensors without pickle; a resumed run is bit-identical.

    path = checkpoint_path("runs", 200)
    save_checkpoint(path, model=model, optimizer=opt, batches=batches, step=200)
    load_checkpoint(latest_checkpoint("runs"), model=model, optimizer=opt, batches=batches)
    # {'step': 200, 'extra': None}

Requirements that led to this design:
* a process killed at any moment leaves the previous checkpoint: the file is written aside, synced,
  then renamed;
* a damaged or foreign file changes nothing: its digests, and whether it fits, are checked before
  the first tensor is copied;
* the arena's views survive a load: tensors are copied into, never replaced;
* any tool can read the weights: they are safetensors entries `model.<name in the state dict>`.

A checkpoint holds tensors `model.*`, `optim.<parameter>.<key>`, `master.<parameter>` and, of each
rank's generators of torch, `rng.rank<number>`; and as JSON the hyper-parameters, the scheduler, the
data position, the random state of Python and NumPy, and `extra`. A tensor with two names (tied
weights) is stored twice. The format is checkpoint_file.py.

It is one file, or, where an optimizer's state is spread over ranks, a folder into which each of
them writes its share. Either is loaded by one process and by any number of ranks, and none of them
holds more of the state than it trains with, and one tensor.
"""

import copy
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, GpuaccelError
from ..files import host_bytes, remove_folder
from ..optim import Arena
from .checkpoint_file import (
    Contents,
    FlatRange,
    Ranks,
    Stored,
    describe,
    pack,
    read_checkpoint,
    refusing,
    write_file,
    write_folder,
)
from .models import uncompiled

# How an optimizer computes, not what: a load keeps the choice that the optimizer was built with.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


# ---- what a run consists of ----------------------------------------------------------------------


def _class_name(thing) -> str:
    return type(thing).__name__


def _model_tensors(path, model) -> dict[str, Tensor]:
    tensors = {}
    for name, value in uncompiled(model).state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: model.{name} is a {_class_name(value)}; expected a tensor"
            )
        tensors[f"model.{name}"] = value
    return tensors


def _master_tensors(arena) -> dict[str, Any]:
    masters = {} if arena is None else arena.named_master()
    return {f"master.{name}": tensor for name, tensor in masters.items()}


def as_list(value) -> list:
    """An argument that may be one thing, several in a list or tuple, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _class_names(things) -> str:
    return ", ".join(_class_name(thing) for thing in things)


def _shares_of(optimizers: list) -> "_Shares | None":
    """None: the whole state is here."""
    spread = [opt for opt in optimizers if getattr(opt, "ranks", 1) > 1]
    return _Shares(*spread) if spread else None


def _with_groups(optimizers: list) -> list[tuple[int, torch.optim.Optimizer, dict]]:
    """(index of its optimizer, optimizer, group) of each parameter group."""
    return [(k, opt, group) for k, opt in enumerate(optimizers) for group in opt.param_groups]


def _optimizer_groups(path, model, optimizers, arena) -> list[dict[str, Tensor]]:
    """Per parameter group of all optimizers, name -> parameter.

    An fp32 master has the name of its parameter."""
    names = {id(parameter): name for name, parameter in uncompiled(model).named_parameters()}
    if arena is not None:
        names.update((id(p), name) for name, p in arena.named_parameters().items())
    groups: list[dict[str, Tensor]] = []
    for _, optimizer, group in _with_groups(optimizers):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{path}: group {len(groups)} of {_class_names(optimizers)} holds a parameter "
                    f"of shape {list(parameter.shape)} that is not in the model; expected only "
                    "those that are, or arena= for the master weights of an arena"
                )
        groups.append({names[id(parameter)]: parameter for parameter in group["params"]})
    return groups


def _group_options(group: dict) -> dict:
    """The hyper-parameters of a group; one that is a tensor of one element as a number."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }


def _optimizer_state(groups, optimizers) -> tuple[dict[str, Any], dict]:
    """(tensors, JSON) of all that is in `state` and `param_groups` of all optimizers.

    Of a state that is spread over ranks the tensors are FlatRanges."""
    tensors: dict[str, Any] = {}
    shares = _shares_of(optimizers)
    state: dict = {"class": _class_names(optimizers), "groups": [], "values": {}}
    for (k, optimizer, group), members in zip(_with_groups(optimizers), groups):
        options = pack(_group_options(group), "the optimizer's parameter group")
        index = {"optimizer": k} if k else {}
        state["groups"].append({"names": list(members), "options": options, **index})
        for name, parameter in members.items():
            values = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                stored_name = f"optim.{name}.{key}"
                if isinstance(value, Tensor):
                    if shares is not None and key in shares.keys:
                        value = shares.range_of(parameter, value)
                    tensors[stored_name] = value
                    value = Stored(stored_name)
                values[key] = pack(value, stored_name)
            state["values"][name] = values
    return tensors, state


def _check_batches(batches):
    if batches is not None and not hasattr(batches, "state_dict"):
        raise ArgumentError(
            f"batches is a {_class_name(batches)}, whose position in the data cannot be saved; "
            "expected an object with state_dict() and load_state_dict(), such as "
            "ga.training.Batches or torchdata's StatefulDataLoader"
        )


# ---- the ranks of a run --------------------------------------------------------------------------


def _ranks_of(model, arena) -> Ranks:
    """Those of the model's TrainStep where it has a ga.Distributed, else of torch.distributed's
    default group."""
    arena = arena or Arena.of(uncompiled(model))
    step = None if arena is None else arena.step
    if step is not None and step.distributed is not None:
        return Ranks(step.distributed.rank, step.distributed.world, step.distributed.group)
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


# ---- a state that is spread over ranks ---------------------------------------------------------


class _Shares:
    """This rank's part of an optimizer's state that is spread over ranks."""

    def __init__(self, optimizer):
        self.layout = optimizer.layout
        self.ranks = Ranks(self.layout.rank, self.layout.ranks, self.layout.group)
        # The state that is spread; a step count is on every rank.
        self.keys = optimizer.rule.state_keys
        self.numbers = {id(p): i for i, p in enumerate(self.layout.arena.masters)}

    def range_of(self, tensor: Tensor, state: Tensor | None = None):
        """What this rank saves of a parameter of the optimizer, or of a state of it."""
        first, last, place = self.layout.saved(self.numbers[id(tensor)])
        if state is None:
            data = tensor.detach().reshape(-1)[first:last]
        else:
            data = state[place : place + last - first]
        return FlatRange(data, first, tensor.shape) if tensor.numel() else data.view(tensor.shape)

    def restore(self, parameter, current: dict, key: str, name: str, contents: Contents):
        """Copy what is here of the tensor `name` to its place."""
        number = self.numbers[id(parameter)]
        if key not in current:
            current[key] = self.layout.allocate(key, parameter, number).zero_()
        for first, last, place in self.layout.held(number):
            current[key][place : place + last - first] = contents.elements(name, first, last)


# ---- random state --------------------------------------------------------------------------------


def random_state() -> Tensor:
    """(bytes,) uint8 on the CPU: torch's CPU generator, then the GPU's where one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _python_random_state() -> dict:
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}


def _restore_random_states(contents: Contents, rank: int):
    """Of Python's and NumPy's generators, and of a rank's own of torch.

    A rank that the checkpoint does not know keeps its own of torch."""
    values = contents.state["random"]
    random.setstate(values["python"])
    np.random.set_state(values["numpy"])
    if f"rng.rank{rank}" in contents:
        state = contents.tensor(f"rng.rank{rank}")
        cpu, cuda = state.tensor_split([len(torch.get_rng_state())])
        torch.set_rng_state(cpu.clone())
        if len(cuda) and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda.clone())


# ---- saving --------------------------------------------------------------------------------------


def save_checkpoint(
    path: str | pathlib.Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    arena: Arena | None = None,
    scheduler: Any = None,
    batches: Any = None,
    step: int = 0,
    extra: Any = None,
) -> pathlib.Path:
    """Write one checkpoint, a safetensors file; missing folders are made.

    With several ranks every rank calls this, with the same arguments. Rank 0 writes the file, with
    the state of torch's generators of each rank, and no rank returns before it is there. The ranks
    are those of the model's TrainStep, else of torch.distributed's default group. With an optimizer
    whose state is spread over ranks the checkpoint is a folder, into which each rank writes its
    share; inside of step.gathered() it is a file.

    Copies from the device, hence synchronises.

    Args:
        path: of the file, or of the folder.
        model: its `state_dict` is stored; several ranks: with rank 0's buffers.
        optimizer: any torch optimizer whose state is tensors and numbers per parameter, or a list
            of them, such as step.optimizers. Default: none.
        arena: over which the optimizer was made, such as step.arena. It names the optimizer's
            parameters, and has the fp32 masters of bf16 ones. Without it an optimizer that holds
            masters is a CheckpointError. Default: none.
        scheduler: anything with a `state_dict()` of plain values, or a list. Default: none.
        batches: anything with a `state_dict()` of plain values, such as ga.training.Batches or
            torchdata's StatefulDataLoader; a DataLoader has none. Default: none.
        step: optimizer steps done. Default: 0.
        extra: plain values of your own (numbers, strings, lists, tuples, dicts, small tensors).

    Returns:
        The path.

    Raises:
        ArgumentError: for `batches` without a state_dict().
        CheckpointError: for a value that cannot be stored without pickle, a read-only folder, a
            full disk; on every rank, if one rank fails. What was at `path`, if anything, is then
            untouched, and nothing is left beside it.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = ga.AdamW(model.parameters())
        >>> path = ga.save_checkpoint("run/first.safetensors", model=model, optimizer=opt, step=100)
        >>> path.name
        'first.safetensors'
    """
    path = pathlib.Path(path).expanduser()
    optimizers, schedulers = as_list(optimizer), as_list(scheduler)
    shares = _shares_of(optimizers)
    ranks = _ranks_of(model, arena) if shares is None else shares.ranks
    tensors: dict[str, Any] = {}
    state: dict = {}

    def prepare():
        contents = _contents(path, model, optimizers, arena, schedulers, batches, extra)
        tensors.update(contents[0])
        state.update(contents[1])
        return str(path), random_state()

    paths, random_states = zip(*ranks.each(prepare))
    if len(set(paths)) > 1:
        raise CheckpointError(
            f"the ranks save to {' and '.join(sorted(set(paths)))}; expected one path, at which "
            "rank 0 writes"
        )
    tensors.update((f"rng.rank{r}", of_rank) for r, of_rank in enumerate(random_states))
    if shares is None:
        ranks.each(lambda: None if ranks.rank else write_file(path, tensors, step, state))
        return path
    tensors.update((name, shares.range_of(t)) for name, t in _master_tensors(arena).items())
    # Not buffers, which are each rank's own.
    parameters = dict(uncompiled(model).named_parameters(remove_duplicate=False))
    alike = {f"model.{name}" for name in parameters}
    alike |= {name for name in tensors if name.startswith("optim.")}
    write_folder(path, tensors, alike, step, state, ranks)
    return path


def _contents(
    path, model, optimizers, arena, schedulers, batches, extra
) -> tuple[dict[str, Any], dict]:
    """(tensors, JSON) of a checkpoint. The tensors are not copied."""
    _check_batches(batches)
    tensors = {**_model_tensors(path, model), **_master_tensors(arena)}
    state = {
        "random": pack(_python_random_state(), "the random state"),
        "extra": pack(extra, "extra"),
    }
    if optimizers:
        groups = _optimizer_groups(path, model, optimizers, arena)
        optimizer_tensors, state["optimizer"] = _optimizer_state(groups, optimizers)
        tensors.update(optimizer_tensors)
    if schedulers:
        values = [each.state_dict() for each in schedulers]
        state["scheduler"] = {
            "class": _class_names(schedulers),
            "values": pack(values if values[1:] else values[0], "the scheduler"),
        }
    if batches is not None:
        state["batches"] = {"values": pack(batches.state_dict(), "the data position")}
    return tensors, state


# ---- what is checked on load ---------------------------------------------------------------------


def _in_words(description) -> str:
    return f"{description[0]} {description[1]}" if description else "nothing"


def _check_tensors(path, contents: Contents, prefix: str, tensors: dict[str, Tensor], what: str):
    """CheckpointError unless the file's tensors whose names begin with `prefix` are like these."""
    stored = {name: entry for name, entry in contents.entries.items() if name.startswith(prefix)}
    expected = {name: describe(tensor) for name, tensor in tensors.items()}
    names = [name for name in {**expected, **stored} if stored.get(name) != expected.get(name)]
    if names:
        name = names[0]
        raise CheckpointError(
            f"{path} does not fit this {what}: {name} is {_in_words(stored.get(name))} "
            f"in the file, expected {_in_words(expected.get(name))}"
            + (f" (and {len(names) - 1} more differ)" if names[1:] else "")
        )


def _check_tied(path, contents: Contents, weights: dict[str, Tensor]):
    """Weights that are one tensor in the model have one value in the file."""
    first_names: dict[tuple, str] = {}
    for name, tensor in weights.items():
        if not tensor.numel():
            continue
        memory = (tensor.data_ptr(), *tensor.shape, *tensor.stride())
        first = first_names.setdefault(memory, name)
        # Bytes, because NaN is not equal to itself.
        values = (host_bytes(contents.tensor(n)) for n in (first, name))
        if first != name and not np.array_equal(*values):
            raise CheckpointError(
                f"{path} does not fit this model: {name} and {first} are one tensor here, "
                "but differ in the file"
            )


def _check_class(path, stored: dict, things: list):
    if stored["class"] != _class_names(things):
        raise CheckpointError(
            f"{path} holds the state of {stored['class']}, expected {_class_names(things)}"
        )


def _check_optimizers(path, stored: dict, optimizers, groups):
    _check_class(path, stored, optimizers)
    # Their shapes are those of the model's tensors, and of the arena's.
    # Index of the optimizer, and names, of each group.
    stored_groups = [(g.get("optimizer", 0), sorted(g["names"])) for g in stored["groups"]]
    with_groups = _with_groups(optimizers)
    if stored_groups != [(k, sorted(names)) for (k, *_), names in zip(with_groups, groups)]:
        raise CheckpointError(
            f"{path} does not fit this optimizer: its groups have "
            f"{[len(names) for _, names in stored_groups]} parameters, expected "
            f"{list(map(len, groups))}, the same ones in each"
        )


# ---- loading -------------------------------------------------------------------------------------


def _restore_parameter_state(parameter, group, current: dict, values: dict, contents, shares):
    """The optimizer's state of one parameter: a tensor that is there is copied into.

    A new tensor goes to its parameter's device, except a step count, which torch keeps on the CPU
    unless the optimizer is capturable or fused. shares: None, or a _Shares."""
    for key in current.keys() - values.keys():
        del current[key]
    for key, value in values.items():
        if not isinstance(value, Stored):
            current[key] = value
            continue
        name, old = value.name, current.get(key)
        if shares is not None and key in shares.keys:
            shares.restore(parameter, current, key, name, contents)
        elif isinstance(old, Tensor) and describe(old) == contents.entries[name]:
            old.copy_(contents.tensor(name))
        elif key == "step" and not (group.get("capturable") or group.get("fused")):
            current[key] = contents.tensor(name).clone()
        else:
            current[key] = contents.tensor(name).to(parameter.device, copy=True)


def _restore_optimizers(contents: Contents, optimizers, groups):
    shares = _shares_of(optimizers)
    stored = contents.state["optimizer"]
    for saved, (_, optimizer, group), members in zip(
        stored["groups"], _with_groups(optimizers), groups
    ):
        for key, value in saved["options"].items():
            if key in IMPLEMENTATION:
                continue
            if isinstance(group.get(key), Tensor):
                # In place: a captured graph reads it there.
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value
        for name, parameter in members.items():
            values = stored["values"][name]
            if values:
                current = optimizer.state[parameter]
                _restore_parameter_state(parameter, group, current, values, contents, shares)
            else:
                optimizer.state.pop(parameter, None)


def _load_state_dicts(path, given: list[tuple[Any, Any]]):
    """Restore all (thing, its state_dict); where one of them refuses its state, none.

    Only they themselves can tell whether a state is theirs, and they may find out late."""
    before = [copy.deepcopy(thing.state_dict()) for thing, _ in given]
    try:
        for thing, values in given:
            thing.load_state_dict(values)
    except Exception as error:
        refused = _class_name(thing)
        for (thing, _), values in zip(given, before):
            thing.load_state_dict(values)
        words = error if isinstance(error, GpuaccelError) else repr(error)
        raise CheckpointError(f"{path} does not fit this {refused}: {words}") from error


@torch.no_grad()
def load_checkpoint(
    path: str | pathlib.Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    arena: Arena | None = None,
    scheduler: Any = None,
    batches: Any = None,
    restore_rng: bool = True,
) -> dict[str, Any]:
    """Continue from a checkpoint that save_checkpoint wrote.

    With several ranks every rank calls this. Only what is given is restored:
    `load_checkpoint(path, model=model, restore_rng=False)` reads the weights alone. The count of a
    TrainStep is not set: `step.count = load_checkpoint(...)["step"]`.

    The run continues bit-identically with the same kinds of objects, on the same kind of machine:
    on a GPU with TrainStep(deterministic=True), on a CPU with as many torch threads. Tensors are
    copied in place; the optimizer's `foreach`, `fused`, `capturable` and `differentiable` stay as
    they are.

    Args:
        path: of the file, or of the folder.
        model: its tensors are overwritten.
        optimizer, arena, scheduler, batches: as for save_checkpoint.
        restore_rng: restore the random state: Python's and NumPy's of rank 0, torch's of this rank.
            A rank that the file does not know keeps its own. Default: True.

    Returns:
        A dict of "step", an int, and "extra", what save_checkpoint was given.

    Raises:
        ArgumentError: for `batches` without a state_dict().
        CheckpointError: with nothing changed, for no such file; one that is not safetensors, is
            truncated or altered; names, shapes or dtypes other than the
            model's, the optimizer's or the arena's; another number or kind of optimizers or
            schedulers; something that the file lacks.

    Example:
        >>> model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> path = ga.save_checkpoint("run/step7.safetensors", model=model, step=7)
        >>> ga.load_checkpoint(path, model=other)["step"]
        7
        >>> torch.equal(model.weight, other.weight)
        True
    """
    path = pathlib.Path(path).expanduser()
    _check_batches(batches)
    optimizers, schedulers = as_list(optimizer), as_list(scheduler)
    shares = _shares_of(optimizers)
    contents = read_checkpoint(path, Ranks() if shares is None else shares.ranks)
    state = contents.state
    weights = _model_tensors(path, model)
    masters = _master_tensors(arena)
    groups: list[dict[str, Tensor]] = []

    given = {"optimizer": optimizers, "scheduler": schedulers, "batches": as_list(batches)}
    with refusing(path):
        _check_tensors(path, contents, "model.", weights, "model")
        if arena is not None:
            _check_tensors(path, contents, "master.", masters, "arena")
        _check_tied(path, contents, weights)
        for name, things in given.items():
            if things and name not in state:
                raise CheckpointError(
                    f"{path} holds no {name} state, expected that of a {_class_names(things)}"
                )
        if optimizers:
            groups = _optimizer_groups(path, model, optimizers, arena)
            _check_optimizers(path, state["optimizer"], optimizers, groups)
        with_state: list[tuple[Any, Any]] = []
        if batches is not None:
            with_state.append((batches, state["batches"]["values"]))
        if schedulers:
            _check_class(path, state["scheduler"], schedulers)
            values = state["scheduler"]["values"]
            # One scheduler's state is no list.
            with_state += zip(schedulers, values if schedulers[1:] else [values], strict=True)
    _load_state_dicts(path, with_state)

    # All of it fits.
    uncompiled(model).load_state_dict(
        {name.removeprefix("model."): contents.tensor(name) for name in weights}
    )
    for name, tensor in masters.items():
        tensor.copy_(contents.tensor(name))
    if arena is not None:
        arena.weights_current()
    if optimizers:
        _restore_optimizers(contents, optimizers, groups)
    if restore_rng:
        _restore_random_states(contents, _ranks_of(model, arena).rank)
    return {"step": contents.step, "extra": state["extra"]}


# ---- a folder of checkpoints ---------------------------------------------------------------------


def checkpoint_path(
    folder: str | pathlib.Path,
    step: int,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> pathlib.Path:
    """`<folder>/step-00000200.safetensors`: a name that `latest_checkpoint` looks for.

    optimizer: one, or a list. Where its state is spread over ranks, the checkpoint is a folder,
    `step-00000200.sharded`."""
    ending = ".safetensors" if _shares_of(as_list(optimizer)) is None else ".sharded"
    return pathlib.Path(folder).expanduser() / f"step-{int(step):08d}{ending}"


def _checkpoints(folder, ending="") -> list[tuple[int, pathlib.Path]]:
    """[(step, path)], oldest first."""
    folder = pathlib.Path(folder).expanduser()
    files = folder.iterdir() if folder.is_dir() else ()
    pattern = re.compile(r"step-(\d{8,})\.(?:safetensors|sharded)" + ending)
    matches = [(pattern.fullmatch(file.name), file) for file in files]
    return sorted((int(match[1]), file) for match, file in matches if match)


def latest_checkpoint(folder: str | pathlib.Path) -> pathlib.Path | None:
    """The checkpoint with the highest step in a folder; None without one.

    Unfinished files are ignored.

    Args:
        folder: of checkpoints that `train` wrote.
    """
    checkpoints = _checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


def is_whole(path: pathlib.Path) -> bool:
    """Whether a path is a checkpoint that is not damaged. Reads all of it."""
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def older_whole_checkpoints(path: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoints beside this one that are older and not damaged, the newest first."""
    older = [other for _, other in _checkpoints(path.parent) if other.name < path.name]
    return [other for other in reversed(older) if is_whole(other)]


def prune_checkpoints(saved: pathlib.Path, keep: int = 3) -> list[pathlib.Path]:
    """Delete all but the `keep` newest checkpoints up to `saved`, which was written now.

    Also another one of its step, which a run with another number of ranks has left, and what killed
    runs left unfinished up to it. Checkpoints of later steps are of another run, or of one that
    went on from an older checkpoint: they stay, and do not count. Returns the paths that are gone.
    """
    folder = saved.parent
    if keep < 1:
        raise CheckpointError(f"{folder}: keep is {keep}, expected at least 1")
    checkpoints = _checkpoints(folder)
    last = next(step for step, path in checkpoints if path == saved)
    gone = [path for step, path in checkpoints if step == last and path != saved]
    gone += [path for step, path in checkpoints if step <= last and path not in gone][:-keep]
    gone += [path for step, path in _checkpoints(folder, r"\.tmp-\d+") if step <= last]
    for path in gone:
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
    return gone
