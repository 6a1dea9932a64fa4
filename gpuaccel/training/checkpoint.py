"""Checkpoints that can be trusted: one safetensors file, no pickle, verified by hash; resumed runs give the same bits.

    >>> save_checkpoint(checkpoint_path("runs", 200), model=model, optimizer=opt, batches=batches, step=200)
    >>> load_checkpoint(latest_checkpoint("runs"), model=model, optimizer=opt, batches=batches)
    {'step': 200, 'extra': None}

Requirements that led to this design:
* a process killed at any moment leaves the previous checkpoint: the file is written aside, synced, then renamed;
* a damaged or foreign file changes nothing: all of it is verified before the first tensor is copied;
* the arena's views survive a load: tensors are copied into, never replaced;
* any tool can read the weights: they are plain safetensors entries called `model.<name of the state dict>`.

What a file holds: tensors `model.*`, `optim.<parameter>.<key>`, `master.<parameter>` and `rng.*`; in the metadata the
format, the step, one sha256 per tensor, one over all of it, and as JSON the hyper-parameters, the scheduler, the data
position, the random state of Python and NumPy, and `extra`. A tensor with two names (tied weights) is stored twice.
"""

import collections
import hashlib
import json
import pathlib
import random
import re

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, GpuaccelError
from ..files import damage, digest, written_aside

FORMAT = "gpuaccel-checkpoint-1"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# How an optimizer computes, not what: a load keeps the choice that the optimizer was built with.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


# ---- writing aside --------------------------------------------------------------------------------------------------

# ---- Python values as JSON ------------------------------------------------------------------------------------------


def _pack(value, where):
    """A JSON value from which `_unpack` restores `value`: numbers, strings, lists, tuples, dicts, small tensors."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _pack(value.item(), where)
    if isinstance(value, list):
        return [_pack(item, where) for item in value]
    if isinstance(value, tuple):
        return {"!tuple": [_pack(item, where) for item in value]}
    if isinstance(value, dict):
        kind = "!counter" if isinstance(value, collections.Counter) else "!dict"
        return {
            kind: [
                [_pack(key, where), _pack(item, f"{where}[{key!r}]")] for key, item in value.items()
            ]
        }
    if isinstance(value, torch.Tensor) and value.dtype in DTYPES:
        return {"!tensor": [DTYPES[value.dtype], value.tolist()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which cannot be stored without pickle; "
        "expected numbers, strings, lists, tuples, dicts or tensors"
    )


def _unpack(value):
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "!tensor":
        return torch.tensor(
            content[1], dtype={name: dtype for dtype, name in DTYPES.items()}[content[0]]
        )
    if kind == "!tuple":
        return tuple(_unpack(item) for item in content)
    restored = {_unpack(key): _unpack(item) for key, item in content}
    return collections.Counter(restored) if kind == "!counter" else restored


# ---- what a run consists of -----------------------------------------------------------------------------------------


def _plain(model):
    """The module inside `torch.compile`'s wrapper, so that compiled and eager runs share checkpoints."""
    return getattr(model, "_orig_mod", model)


def _model_tensors(path, model):
    tensors = {}
    for name, value in _plain(model).state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: model.{name} is a {type(value).__name__}; expected a tensor"
            )
        tensors[f"model.{name}"] = value
    return tensors


def _master_tensors(arena):
    return (
        {f"master.{name}": tensor for name, tensor in arena.named_master().items()}
        if arena is not None
        else {}
    )


def _optimizer_groups(path, model, optimizer, arena):
    """Per parameter group, a dict name -> parameter. The arena's fp32 master, if any, goes by its parameter's name."""
    names = {id(parameter): name for name, parameter in _plain(model).named_parameters()}
    if arena is not None:
        pairs = zip(arena.parameter_names(), arena.parameters(), strict=True)
        names.update((id(parameter), name) for name, parameter in pairs)
    ranks = getattr(optimizer, "ranks", 1)
    if ranks > 1:
        raise CheckpointError(
            f"{path}: the optimizer's state is spread over {ranks} ranks, and only a share of it is "
            "here; expected the whole: `with step.gathered(): ...` on every rank"
        )
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{path}: the optimizer's group {index} holds a parameter of shape "
                    f"{list(parameter.shape)} that is not in the model; expected only those "
                    "that are, or arena= for the master weights of an arena"
                )
        groups.append({names[id(parameter)]: parameter for parameter in group["params"]})
    return groups


def _class_name(thing):
    return type(thing).__name__


def _describe(tensor):
    return [DTYPES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape)]


def _optimizer_state(groups, optimizer):
    """(tensors, JSON description) of an optimizer: everything in `optimizer.state` and `optimizer.param_groups`."""
    tensors, state = (
        {},
        {"class": _class_name(optimizer), "groups": [], "parameters": {}, "values": {}},
    )
    for group, members in zip(optimizer.param_groups, groups):
        options = {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        state["groups"].append(
            {"names": list(members), "options": _pack(options, "the optimizer's parameter group")}
        )
        for name, parameter in members.items():
            state["parameters"][name] = _describe(parameter)
            values = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optim.{name}.{key}"] = value
                    values[key] = {"!stored": f"optim.{name}.{key}"}
                else:
                    values[key] = _pack(value, f"optim.{name}.{key}")
            state["values"][name] = values
    return tensors, state


def _random_tensors():
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def random_state() -> torch.Tensor:
    """(bytes,) uint8 on the CPU: torch's generator of the CPU, then that of the GPU where one is in use."""
    return torch.cat(list(_random_tensors().values()))


def _random_values():
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
    }


# ---- saving ---------------------------------------------------------------------------------------------------------


def _seal(entries, digests, metadata):
    """sha256 over all that a file says: format, step, state, and name, dtype, shape and digest of each tensor."""
    whole = hashlib.sha256(
        json.dumps([metadata["format"], metadata["step"], metadata["state"]]).encode()
    )
    for name in sorted(digests):
        whole.update(json.dumps([name, *entries[name], digests[name]]).encode())
    return whole.hexdigest()


def _header(entries, offsets, metadata, digests):
    sealed = dict(metadata, digests=json.dumps(digests), sha256=_seal(entries, digests, metadata))
    header = {"__metadata__": sealed}
    header.update(
        (name, {"dtype": dtype, "shape": shape, "data_offsets": offsets[name]})
        for name, (dtype, shape) in entries.items()
    )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _write(path, tensors, metadata):
    """One pass, with one tensor at a time on the host; the header goes last, over a blank of its own length."""
    tensors = dict(
        sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    )  # each one aligned
    entries, offsets, end = {}, {}, 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
                f"expected a dense tensor with data, of one of {', '.join(DTYPES.values())}"
            )
        entries[name] = _describe(tensor)
        offsets[name] = [end, end + tensor.numel() * tensor.element_size()]
        end = offsets[name][1]
    digests = {name: "0" * 64 for name in tensors}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as file:
            file.write(bytes(len(_header(entries, offsets, metadata, digests))))
            for name, tensor in tensors.items():
                digests[name], data = digest(tensor)
                file.write(data)
            file.seek(0)
            file.write(_header(entries, offsets, metadata, digests))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); "
            "what was there before is untouched"
        ) from error


def save_checkpoint(
    path,
    *,
    model,
    optimizer=None,
    arena=None,
    scheduler=None,
    batches=None,
    step=0,
    extra=None,
    ranks=(),
) -> pathlib.Path:
    """Write one checkpoint and return its path; missing folders are made.

    model: nn.Module, its `state_dict` is stored; optimizer: any torch optimizer whose state is tensors and numbers per
    parameter; arena: gives the names of the optimizer's parameters, and the fp32 master weights if there are any;
    scheduler, batches: anything with a `state_dict()` of plain values; step: optimizer steps done; extra: plain values
    of your own (numbers, strings, lists, tuples, dicts, small tensors); ranks: random_state() of each rank of a data-parallel run.

    CheckpointError: a value that cannot be stored without pickle, a read-only folder, a full disk. The file that was at
    `path`, if any, is then untouched, and nothing is left beside it. Copies from the device, hence synchronises."""
    path = pathlib.Path(path).expanduser()
    tensors = {
        **_model_tensors(path, model),
        **_master_tensors(arena),
        **_random_tensors(),
        **{f"rng.rank{rank}": state for rank, state in enumerate(ranks)},
    }
    state = {"random": _pack(_random_values(), "the random state"), "extra": _pack(extra, "extra")}
    if optimizer is not None:
        more, state["optimizer"] = _optimizer_state(
            _optimizer_groups(path, model, optimizer, arena), optimizer
        )
        tensors.update(more)
    if scheduler is not None:
        state["scheduler"] = {
            "class": _class_name(scheduler),
            "values": _pack(scheduler.state_dict(), "the scheduler"),
        }
    if batches is not None:
        state["batches"] = {"values": _pack(batches.state_dict(), "the data position")}
    _write(path, tensors, {"format": FORMAT, "step": str(int(step)), "state": json.dumps(state)})
    return path


# ---- verifying ------------------------------------------------------------------------------------------------------


def _read(path):
    """(tensors, metadata, digests) of a verified file. The tensors may be views of the mapped file: read only."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; expected a checkpoint written by save_checkpoint"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = (
                file.metadata() or {},
                {name: file.get_tensor(name) for name in file.keys()},
            )
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {damage(path)} ({error})"
        ) from error
    missing = {"format", "step", "state", "digests", "sha256"} - metadata.keys()
    if missing or metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a checkpoint of this version: its format is "
            f"{metadata.get('format')!r}, expected {FORMAT!r}"
            + (f"; {', '.join(sorted(missing))} is missing" if missing else "")
        )
    try:
        digests = dict(json.loads(metadata["digests"]))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: its list of digests cannot be read ({error})"
        ) from error
    for name in sorted(tensors.keys() | digests.keys()):
        if name not in tensors or name not in digests:
            raise CheckpointError(
                f"{path} is damaged: tensor {name} is missing from its "
                f"{'tensors' if name in digests else 'digests'}"
            )
        found = digest(tensors[name])[0]
        if found != digests[name]:
            raise CheckpointError(
                f"{path} is damaged: tensor {name} has sha256 {found}, expected {digests[name]}"
            )
    entries = {name: _describe(tensor) for name, tensor in tensors.items()}
    found = _seal(entries, digests, metadata)
    if found != metadata["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its names, shapes and state have sha256 {found}, "
            f"expected {metadata['sha256']}"
        )
    return tensors, metadata, digests


def _words(description):
    return f"{description[0]} {description[1]}" if description else "nothing"


def _compare(path, found, wanted, kind):
    """CheckpointError naming the first of the differences between two dicts name -> [dtype, shape]."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if names:
        raise CheckpointError(
            f"{path} does not fit this {kind}: {names[0]} is {_words(found.get(names[0]))} "
            f"in the file, expected {_words(wanted.get(names[0]))}"
            + (f" (and {len(names) - 1} more differ)" if names[1:] else "")
        )


def _compare_optimizer(path, stored, optimizer, groups, tensors):
    if stored["class"] != _class_name(optimizer):
        raise CheckpointError(
            f"{path} holds the state of {stored['class']}, expected {_class_name(optimizer)}"
        )
    wanted = {
        name: _describe(parameter) for members in groups for name, parameter in members.items()
    }
    _compare(path, stored["parameters"], wanted, "optimizer")
    found, wanted = (
        [group["names"] for group in stored["groups"]],
        [list(members) for members in groups],
    )
    if [sorted(names) for names in found] != [sorted(names) for names in wanted]:
        raise CheckpointError(
            f"{path} does not fit this optimizer: its groups have {[len(names) for names in found]} "
            f"parameters, expected {[len(names) for names in wanted]}, the same ones in each"
        )
    for members in groups:
        for name, parameter in members.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                kept = stored["values"][name].get(key)
                if isinstance(value, torch.Tensor) and isinstance(kept, dict) and "!stored" in kept:
                    full = kept["!stored"]
                    _compare(
                        path,
                        {full: _describe(tensors[full])},
                        {full: _describe(value)},
                        "optimizer",
                    )


# ---- loading --------------------------------------------------------------------------------------------------------


def _fill_group(group, options):
    """Hyper-parameters: what is a tensor is filled in place (a captured graph reads it there), the rest is replaced."""
    for key, value in options.items():
        if key in IMPLEMENTATION and key in group:
            continue
        if isinstance(group.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _fill_state(parameter, group, current, values, tensors):
    """One parameter's state: a tensor that is there is copied into; a new one goes to its parameter's device, except a
    step count, which torch keeps on the host unless the optimizer is capturable or fused."""
    for key in current.keys() - values.keys():
        del current[key]
    for key, value in values.items():
        if not (isinstance(value, dict) and "!stored" in value):
            current[key] = _unpack(value)
            continue
        tensor = tensors[value["!stored"]]
        if isinstance(current.get(key), torch.Tensor):
            current[key].copy_(tensor)
        elif key == "step" and not (group.get("capturable") or group.get("fused")):
            current[key] = tensor.clone()
        else:
            current[key] = tensor.to(parameter.device, copy=True)


@torch.no_grad()
def load_checkpoint(
    path,
    *,
    model,
    optimizer=None,
    arena=None,
    scheduler=None,
    batches=None,
    restore_rng=True,
    rank: int = 0,
) -> dict:
    """Continue from a checkpoint; returns {"step": int, "extra": what was given to save_checkpoint}.

    Only what is passed is restored: `load_checkpoint(path, model=model, restore_rng=False)` reads the weights alone.
    With the same kinds of objects as at the save, on the same kind of machine (and, on a CPU, with as many torch
    threads: the order of sums depends on them), the run continues bit for bit. Tensors are copied in place; the
    optimizer's `foreach`, `fused`, `capturable` and `differentiable` stay as it was built. rank: whose torch generators are restored,
    of a data-parallel run; one that the file does not know keeps its own.

    CheckpointError, with nothing changed: no such file; not safetensors; truncated or altered (the tensor is named);
    names, shapes or dtypes other than the model's, the optimizer's or the arena's; something that the file lacks."""
    path = pathlib.Path(path).expanduser()
    tensors, metadata, digests = _read(path)
    state = json.loads(metadata["state"])

    def part(prefix):
        return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def described(some):
        return {name: _describe(tensor) for name, tensor in some.items()}

    weights, masters = _model_tensors(path, model), _master_tensors(arena)
    _compare(path, described(part("model.")), described(weights), "model")
    if arena is not None:
        _compare(path, described(part("master.")), described(masters), "arena")
    first = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), *tensor.shape, *tensor.stride())
        tied = first.setdefault(place, name) if tensor.numel() else name
        if digests[tied] != digests[name]:
            raise CheckpointError(
                f"{path} does not fit this model: {name} and {tied} are one tensor here, "
                "but differ in the file"
            )
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler), ("batches", batches)):
        if given is not None and name not in state:
            raise CheckpointError(
                f"{path} holds no {name} state, expected that of a {_class_name(given)}"
            )
    if optimizer is not None:
        groups = _optimizer_groups(path, model, optimizer, arena)
        _compare_optimizer(path, state["optimizer"], optimizer, groups, tensors)
    if scheduler is not None and state["scheduler"]["class"] != _class_name(scheduler):
        raise CheckpointError(
            f"{path} holds the state of {state['scheduler']['class']}, "
            f"expected {_class_name(scheduler)}"
        )
    if restore_rng:
        _compare(
            path,
            described(part("rng.cpu")),
            {"rng.cpu": _describe(torch.get_rng_state())},
            "version of torch",
        )

    # All of it fits. The data position goes first: only `batches` itself can tell whether it belongs to the same text.
    if batches is not None:
        try:
            batches.load_state_dict(_unpack(state["batches"]["values"]))
        except GpuaccelError as error:
            raise CheckpointError(f"{path} does not fit these batches: {error}") from error
    _plain(model).load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in part("model.").items()}
    )
    for name, tensor in masters.items():
        tensor.copy_(tensors[name])
    if arena is not None:
        arena.weights_current()
    if optimizer is not None:
        stored = state["optimizer"]
        for group, kept, members in zip(optimizer.param_groups, stored["groups"], groups):
            _fill_group(group, _unpack(kept["options"]))
            for name, parameter in members.items():
                if stored["values"][name]:
                    _fill_state(
                        parameter,
                        group,
                        optimizer.state[parameter],
                        stored["values"][name],
                        tensors,
                    )
                else:
                    optimizer.state.pop(parameter, None)
    if scheduler is not None:
        scheduler.load_state_dict(_unpack(state["scheduler"]["values"]))
    if restore_rng:
        values = _unpack(state["random"])
        random.setstate(values["python"])
        np.random.set_state(values["numpy"])
        own = tensors["rng.cpu"], tensors.get("rng.cuda", tensors["rng.cpu"][:0])
        if rank:
            own = tensors.get(f"rng.rank{rank}", random_state()).tensor_split([len(own[0])])
        torch.set_rng_state(own[0].clone())
        if len(own[1]) and torch.cuda.is_available():
            torch.cuda.set_rng_state(own[1].clone())
    return {"step": int(metadata["step"]), "extra": _unpack(state["extra"])}


# ---- a folder of checkpoints ----------------------------------------------------------------------------------------


def checkpoint_path(folder, step) -> pathlib.Path:
    """`<folder>/step-00000200.safetensors`: the name that `latest_checkpoint` and `prune_checkpoints` look for."""
    return pathlib.Path(folder).expanduser() / f"step-{int(step):08d}.safetensors"


def _checkpoints(folder, ending=""):
    """[(step, path)], oldest first."""
    folder = pathlib.Path(folder).expanduser()
    files = folder.iterdir() if folder.is_dir() else ()
    matches = [
        (re.fullmatch(r"step-(\d{8,})\.safetensors" + ending, file.name), file) for file in files
    ]
    return sorted((int(match[1]), file) for match, file in matches if match)


def latest_checkpoint(folder) -> "pathlib.Path | None":
    """The checkpoint with the highest step in a folder; None without one. Unfinished files are ignored."""
    found = _checkpoints(folder)
    return found[-1][1] if found else None


def prune_checkpoints(folder, keep=3) -> "list[pathlib.Path]":
    """Delete all but the `keep` newest checkpoints, and unfinished files that killed runs left up to the newest step.
    Returns the paths that are gone."""
    if keep < 1:
        raise CheckpointError(f"{folder}: keep is {keep}, expected at least 1")
    found = _checkpoints(folder)
    unfinished = [
        path for step, path in _checkpoints(folder, r"\.tmp-\d+") if found and step <= found[-1][0]
    ]
    gone = [path for _, path in found[:-keep]] + unfinished
    for path in gone:
        path.unlink(missing_ok=True)
    return gone
