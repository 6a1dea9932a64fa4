"""Adapters on disk, in PEFT's format: adapter_model.safetensors and adapter_config.json.

    ga.save_lora(model, "adapter")       # `peft` reads it
    ga.load_lora(model, "adapter")       # also one that `peft` wrote

An adapter is the factors of each LoRA layer, and the modules that are trained whole beside them.
The metadata of the safetensors file also hold rank, alpha and a sha256 over the tensors. PEFT
ignores them; load_lora checks them where they are.
"""

import hashlib
import json
import pathlib
import re

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError
from ..files import damage, host_bytes, written_aside
from ..nn import LoRALinear
from .lora import (
    install_layers,
    lora_layers,
    make_layers,
    matches,
    modules_trained_whole,
    require_lora_layers,
)
from .models import uncompiled

# PEFT's names.
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."

# Settings of a PEFT adapter that change what it computes; any of them set is refused.
REFUSED_SETTINGS = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
)
# Values of init_lora_weights with which PEFT leaves the base weights as they were.
ALLOWED_INITS = (True, False, "gaussian", "orthogonal", "eva")


def _adapter_tensors(
    layers: "dict[str, LoRALinear]", trained_whole: "dict[str, nn.Module]"
) -> "dict[str, Tensor]":
    """PEFT's name -> tensor of the model, not copied: factors, and state dicts of whole modules."""
    tensors: "dict[str, Tensor]" = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A.weight
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B.weight
    for name, module in trained_whole.items():
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                tensors[f"{PREFIX}{name}.{key}"] = value
    return tensors


def _checksum(tensors: "dict[str, Tensor]") -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256 = hashlib.sha256(host_bytes(tensor)).hexdigest()
        facts = [name, str(tensor.dtype), list(tensor.shape), sha256]
        total.update(json.dumps(facts).encode())
    return total.hexdigest()


# ---- saving --------------------------------------------------------------------------------------


def _short_names(model: nn.Module, names, matches_pattern) -> "list[str]":
    """Patterns by which PEFT finds exactly these modules of the model, sorted.

    A module's last name component where it matches no other module, else its full name.

    Args:
        matches_pattern: PEFT's rule. For targets it is `matches`; modules_to_save match by the bare
            end of a name, so that "norm" also means input_layernorm.
    """
    inside_layers = tuple(f"{name}." for name in lora_layers(model))
    all_names = [
        name for name, _ in model.named_modules() if name and not name.startswith(inside_layers)
    ]
    patterns = set()
    for name in names:
        last_part = name.rpartition(".")[2]
        matched = [other for other in all_names if matches_pattern(other, last_part)]
        patterns.add(last_part if all(other in names for other in matched) else name)
    return sorted(patterns)


def _peft_config(model, layers, trained_whole, base_model, task_type) -> dict:
    """What adapter_config.json says."""
    layer = next(iter(layers.values()))
    auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
    }
    known_name = getattr(getattr(model, "config", None), "_name_or_path", None)
    linear = any(isinstance(layer.base_layer, nn.Linear) for layer in layers.values())
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "auto_mapping": None if task_type else auto_mapping,
        "base_model_name_or_path": base_model or known_name or None,
        "revision": None,
        "r": layer.rank,
        "lora_alpha": layer.alpha,
        "lora_dropout": getattr(layer.lora_dropout, "p", 0.0),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": _short_names(model, layers, matches),
        "modules_to_save": _short_names(model, trained_whole, str.endswith) or None,
        "fan_in_fan_out": not linear,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def save_lora(
    model: nn.Module,
    folder: "str | pathlib.Path",
    *,
    base_model: "str | None" = None,
    task_type: "str | None" = None,
) -> pathlib.Path:
    """Write the adapter of a model as PEFT does.

    Both files are written aside and renamed together. A merged model gives the same files. Copies
    from the device, hence synchronises.

    Args:
        model: after apply_lora or load_lora.
        folder: where adapter_model.safetensors and adapter_config.json are written.
        base_model: name of the base model, for PEFT; default what model.config says.
        task_type: PEFT's, such as "CAUSAL_LM".

    Returns:
        The folder, which is made if missing.

    Raises:
        ArgumentError: without LoRA.
        CheckpointError: where the folder cannot be written; files that were there are then
            untouched.

    Example:
        >>> model = ga.apply_lora(ga.preset("tiny", layers=1).build(), rank=4)
        >>> folder = ga.save_lora(model, "adapter")
        >>> sorted(path.name for path in folder.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    module = uncompiled(model)
    folder = pathlib.Path(folder).expanduser()
    layers = require_lora_layers(module)
    trained_whole = modules_trained_whole(module)
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in _adapter_tensors(layers, trained_whole).items()
    }
    config = _peft_config(module, layers, trained_whole, base_model, task_type)
    facts = {
        "r": config["r"],
        "lora_alpha": config["lora_alpha"],
        "sha256": _checksum(tensors),
    }
    metadata = {"format": "pt", "gpuaccel": json.dumps(facts)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            written_aside(folder / CONFIG) as config_file,
            written_aside(folder / WEIGHTS) as weights_file,
        ):
            config_file.write(json.dumps(config, indent=2, sort_keys=True).encode())
            weights_file.write(save(tensors, metadata=metadata))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror or error}); what was there before is "
            "untouched"
        ) from error
    return folder


# ---- reading and checking ------------------------------------------------------------------------


def _read_config(path: pathlib.Path) -> dict:
    """The configuration of an adapter of plain LoRA.

    Raises:
        CheckpointError: for any other.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); expected the configuration of an adapter"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(f"{path}: peft_type is {kind!r}; expected 'LORA'")
    if not isinstance(config.get("r"), int):
        raise CheckpointError(f"{path}: r is {config.get('r')!r}; expected a number")
    for key in ("lora_alpha", "lora_dropout"):
        if not isinstance(config.get(key), (int, float)):
            raise CheckpointError(f"{path}: {key} is {config.get(key)!r}; expected a number")
    problems = [f"{key} is {config[key]!r}" for key in REFUSED_SETTINGS if config.get(key)]
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r}")
    init = config.get("init_lora_weights", True)
    if init not in ALLOWED_INITS:
        problems.append(f"init_lora_weights is {init!r}, which changed the base weights")
    if problems:
        raise CheckpointError(
            f"{path}: {problems[0]}; expected plain LoRA, y = base(x) + lora_alpha / r * B A x"
        )
    return config


def _read_tensors(path: pathlib.Path) -> "tuple[dict[str, Tensor], dict]":
    """(tensors, rank, alpha and sha256 if save_lora wrote the file) of a safetensors file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; expected an adapter written by save_lora or peft "
            "(adapter_model.bin is pickle, and is not read)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return tensors, dict(json.loads(metadata.get("gpuaccel", "{}")))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {damage(path)} ({error})"
        ) from error


def _read_adapter(folder: pathlib.Path) -> "tuple[dict, dict[str, Tensor]]":
    """(config, tensors) of an adapter, verified by what save_lora noted in it, if anything."""
    path = folder / WEIGHTS
    tensors, facts = _read_tensors(path)
    config = _read_config(folder / CONFIG)
    if not facts:
        return config, tensors
    for key in ("r", "lora_alpha"):
        if facts.get(key) != config[key]:
            raise CheckpointError(
                f"{path} was written with {key} = {facts.get(key)}, but {folder / CONFIG} says "
                f"{config[key]}: these files do not belong together"
            )
    checksum = _checksum(tensors)
    if facts.get("sha256") != checksum:
        raise CheckpointError(
            f"{path} is damaged: its tensors have sha256 {checksum}, expected {facts.get('sha256')}"
        )
    return config, tensors


def _modules_of_adapter(
    path, config, tensors, model
) -> "tuple[dict[str, nn.Module], dict[str, nn.Module]]":
    """(targets, modules trained whole) of a model without LoRA, as an adapter needs them.

    Targets are what the file has factors for: the patterns of its configuration might match more
    modules in this model."""
    factor = re.compile(re.escape(PREFIX) + r"(.+)\.(?:lora_[AB]|base_layer)\.(?:weight|bias)")
    factor_matches = {name: factor.fullmatch(name) for name in tensors}
    targets = dict.fromkeys(match[1] for match in factor_matches.values() if match)
    others = [name for name, match in factor_matches.items() if not match]
    modules = dict(model.named_modules())
    patterns = tuple(config.get("modules_to_save") or ())
    trained_whole = {
        name: part
        for name, part in modules.items()
        if name.endswith(patterns) and part.state_dict()
    }
    prefixes = tuple(f"{PREFIX}{name}." for name in trained_whole)
    unexpected = [name for name in others if not name.startswith(prefixes)]
    if unexpected or not targets:
        raise CheckpointError(
            f"{path} holds {unexpected[0] if unexpected else 'no factors'}; expected "
            f"{PREFIX}<module>.lora_A.weight and .lora_B.weight, and weights of modules that "
            f"modules_to_save names ({', '.join(patterns) or 'none'}) and the model has"
        )
    if absent := [name for name in targets if name not in modules]:
        raise CheckpointError(
            f"{path} does not fit this model: it has factors for {absent[0]}, which is no module "
            "here"
        )
    return {name: modules[name] for name in targets}, trained_whole


def _check_tensors(path, tensors: "dict[str, Tensor]", expected: "dict[str, Tensor]"):
    """Raise CheckpointError unless the file holds exactly these names, shapes and dtypes."""
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    if missing or unknown:
        raise CheckpointError(
            f"{path} does not fit this model: it lacks {missing[:2] or 'nothing'} ({len(missing)} "
            f"in all) and holds {unknown[:2] or 'nothing'} ({len(unknown)}) that the model does "
            "not have"
        )
    first_names: "dict[int, str]" = {}
    for name, parameter in expected.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            hint = ". (Loaded into a model without LoRA, factors take the file's dtype.)"
            raise CheckpointError(
                f"{path} does not fit this model: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"expected {parameter.dtype} {tuple(parameter.shape)}"
                + (hint if tensor.dtype != parameter.dtype else "")
            )
        first = first_names.setdefault(id(parameter), name)
        if first != name and not torch.equal(tensors[first], tensor):
            raise CheckpointError(
                f"{path} does not fit this model: {first} and {name} are one tensor here (tied), "
                "the file has two values"
            )


# ---- loading -------------------------------------------------------------------------------------


def load_lora(model: nn.Module, folder: "str | pathlib.Path") -> nn.Module:
    """Load an adapter that save_lora or `peft` wrote.

    A model without LoRA gets the layers that the file describes, in the file's dtype (PEFT keeps
    fp32 factors beside a bf16 base). In a model with LoRA the modules, rank, alpha, shapes and
    dtypes must be the file's. Values are copied in place: parameters stay views of their arena, and
    the fp32 masters of bf16 parameters follow. Dropout of existing layers and the optimizer's
    moments stay.

    Everything is verified before the first value is copied.

    Args:
        model: with LoRA, or without.
        folder: that holds adapter_model.safetensors and adapter_config.json.

    Returns:
        The model, changed in place.

    Raises:
        CheckpointError: with nothing changed, naming the file, for a damaged or foreign file, one
            that does not fit, or an adapter that is not plain LoRA.
        ArgumentError: for a merged model.

    Example:
        >>> config = ga.preset("tiny", layers=1)
        >>> folder = ga.save_lora(ga.apply_lora(config.build(), rank=4), "adapter")
        >>> model = ga.load_lora(config.build(), folder)
        >>> sum(p.requires_grad for p in model.parameters())  # A and B of w_q and of w_v
        4
    """
    module = uncompiled(model)
    folder = pathlib.Path(folder).expanduser()
    path = folder / WEIGHTS
    layers = lora_layers(module)
    if any(layer.merged for layer in layers.values()):
        raise ArgumentError(
            "the model's LoRA is merged: its weights hold the old factors. Call unmerge_lora "
            "before load_lora"
        )
    config, tensors = _read_adapter(folder)
    install = not layers
    if install:
        # PEFT allows ranks above a layer's smaller side; but none that the file does not have.
        for name, tensor in tensors.items():
            if name.endswith(".lora_A.weight") and tensor.shape[:1] != (config["r"],):
                raise CheckpointError(
                    f"{path} does not fit {folder / CONFIG}: {name} has shape "
                    f"{tuple(tensor.shape)}, expected {config['r']} rows, as r is"
                )
        targets, trained_whole = _modules_of_adapter(path, config, tensors, module)
        dtype = next((t.dtype for name, t in tensors.items() if ".lora_" in name), None)
        # A generator of its own: torch's random numbers stay as they are.
        generator = torch.Generator().manual_seed(0)
        settings = (config["r"], config["lora_alpha"], config["lora_dropout"])
        try:
            layers = make_layers(module, targets, trained_whole, *settings, dtype, generator)
        except ArgumentError as error:
            raise CheckpointError(f"{path} does not fit this model: {error}") from error
    else:
        trained_whole = modules_trained_whole(module)
        layer = next(iter(layers.values()))
        for key, value in (("r", layer.rank), ("lora_alpha", layer.alpha)):
            if config[key] != value:
                raise CheckpointError(
                    f"{folder / CONFIG}: {key} is {config[key]}, expected {value}, as in this "
                    "model's LoRA"
                )
    parameters = _adapter_tensors(layers, trained_whole)
    # PEFT also stores the frozen weight of an output layer that is a target.
    for name, layer in layers.items():
        for key, p in layer.base_layer.named_parameters():
            stored_name = f"{PREFIX}{name}.base_layer.{key}"
            if stored_name in tensors:
                parameters[stored_name] = p
    _check_tensors(path, tensors, parameters)
    if install:
        install_layers(module, layers, trained_whole)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model
