"""LoRA: the base weights stay frozen, each chosen linear layer learns a product of two thin factors beside them.

    >>> ga.apply_lora(model, rank=8, alpha=16, targets=("w_q", "w_v"))       # before Arena; model is changed in place and returned
    >>> arena = ga.Arena(model)                                              # holds the trainable tensors only
    >>> ga.save_lora(model, "adapter"); ga.load_lora(model, "adapter")       # the files that `peft` writes and reads
    >>> ga.merge_lora(model); ga.unmerge_lora(model)                         # into the base weights, and back to the same bits

y = base(x) + B(A(dropout(x)) * alpha / rank), with A (rank, in) and B (out, rank), B zero at first (Hu et al., 2021). Names, start
values and files are PEFT's. The factors are plain nn.Linear layers: hooks, arenas, fused products and torch.compile see nothing new.

entrenar, whose LoRA training this follows, trains six tensors per layer: A_q, B_q, A_v, B_v and two norms, which are clipped together. Here:
`apply_lora(model, also=BLOCK_NORMS)`, and a block of the arena holds just those six; an optimizer that clips block by block does the rest.
Any number of targets is as good: `targets=("w_q", "w_k", "w_v", "w_o", "gate", "up", "down")` makes fourteen tensors per block.
"""

import hashlib
import json
import math
import pathlib
import re
from collections import defaultdict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import ArgumentError, CheckpointError
from ..files import damage, digest, written_aside
from ..optim.arena import Arena

TARGETS = (
    "w_q",
    "w_v",
    "q_proj",
    "v_proj",
)  # this package's Transformer; Llama, Qwen, Mistral, ...
BLOCK_NORMS = (
    "input_norm",
    "post_attn_norm",
    "input_layernorm",
    "post_attention_layernorm",
)  # of the same models
WEIGHTS, CONFIG, PREFIX = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "base_model.model.",
)  # PEFT's
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Settings of a PEFT adapter that change what it computes; any of them set is refused.
REFUSED = (
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
STARTS = (
    True,
    False,
    "gaussian",
    "orthogonal",
    "eva",
)  # init_lora_weights that leave the base weights as they were


# ---- the layer ------------------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = base(x) + lora_B(lora_A(dropout(x)) * alpha / rank). x: (..., in) -> (..., out), in the dtype of base(x).

    base: nn.Linear, or transformers' Conv1D, whose weight is (in, out). lora_A: nn.Linear with weight (rank, in), uniform in
    +-1/sqrt(in) (PEFT's kaiming_uniform_ with a = sqrt(5)), drawn on the CPU in fp32, so that a seed gives the same factors on every
    device and in every dtype, but for rounding; lora_B: weight (out, rank), zeros. dtype: of the factors; default the base weight's.
    `merged` says whether the base weight holds the product now. apply_lora makes these layers and freezes the base."""

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        *,
        dtype: "torch.dtype | None" = None,
        generator: "torch.Generator | None" = None,
    ):
        super().__init__()
        self.in_features, self.out_features = _features(base)
        self.rank, self.alpha, self.scaling = rank, alpha, alpha / rank
        self.merged, self._frozen = False, None
        self.base_layer = base
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        a = nn.init.kaiming_uniform_(
            torch.empty(rank, self.in_features), a=math.sqrt(5), generator=generator
        )
        home = {"device": base.weight.device, "dtype": dtype or base.weight.dtype}
        self.lora_A = _linear(a.to(**home))
        self.lora_B = _linear(torch.zeros(self.out_features, rank, **home))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise ArgumentError(
                    "a merged LoRA layer was called in training mode: its factors would get no gradient. Call unmerge_lora "
                    "before training, or model.eval() or torch.no_grad() to use the merged weights"
                )
            return y
        if x.dtype != self.lora_A.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.lora_A.weight.dtype)  # fp32 factors beside a bf16 base
        # The scale goes on the product that is rank wide: much less to read and write than y.
        return (y + self.lora_B(self.lora_A(self.lora_dropout(x)) * self.scaling)).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for code that looks for it here. Registered once, as base_layer.weight."""
        return self.base_layer.weight

    @property
    def bias(self) -> "Tensor | None":
        """The base layer's bias."""
        return self.base_layer.bias

    @torch.no_grad()
    def merge(self):
        """Base weight += alpha / rank * B A, computed in fp32 (fp64 for an fp64 base) and rounded once."""
        weight = self.base_layer.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = (self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)).mul_(self.scaling)
        product = product if isinstance(self.base_layer, nn.Linear) else product.t()
        total = (product + weight).to(weight.dtype)  # product is wide: so is the sum
        self._frozen = weight.detach().clone()
        self.merged = True  # before the copy: an interrupt after it can be undone
        weight.copy_(total)

    @torch.no_grad()
    def unmerge(self):
        """Base weight: the bits it had before merge()."""
        self.base_layer.weight.copy_(self._frozen)
        self.merged, self._frozen = False, None

    # ---- for captured steps: graphs/participant.py ----

    def graph_key(self) -> bool:
        """A graph captured while merged leaves the factors out, another one does not."""
        return self.merged

    def tensors_changed_by_step(self) -> "list[Tensor]":
        """Parameters only, which a captured step knows."""
        return []

    def state_dict(self, *args, **kwargs):
        """As of any module. While merged it still holds the frozen weight: with the factors beside it, any other would count twice."""
        state = super().state_dict(*args, **kwargs)
        if self.merged:
            state[kwargs.get("prefix", "") + "base_layer.weight"] = self._frozen
        return state

    def _load_from_state_dict(self, *args):
        if self.merged:  # what comes is frozen weights and factors
            self.unmerge()
        super()._load_from_state_dict(*args)

    def extra_repr(self):
        return f"rank={self.rank}, alpha={self.alpha}" + (", merged" if self.merged else "")


def _linear(weight: Tensor) -> nn.Linear:
    """An nn.Linear without bias around `weight` (out, in); made on the meta device, so that no random number is drawn in vain."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


def _features(base: nn.Module, name: str = "base") -> "tuple[int, int]":
    """(in, out) of a layer that LoRA can wrap. Raises ArgumentError, saying what else it is, for others."""
    weight, kind = (
        base._parameters.get("weight"),
        f"{name} is a {type(base).__module__}.{type(base).__name__}",
    )
    conv1d = type(base).__name__ == "Conv1D" and hasattr(
        base, "nf"
    )  # told by its looks: transformers is not imported here
    if not (isinstance(base, nn.Linear) or conv1d):
        raise ArgumentError(f"{kind}; expected an nn.Linear, or transformers' Conv1D")
    if isinstance(base, NonDynamicallyQuantizableLinear):
        raise ArgumentError(
            f"{kind}: nn.MultiheadAttention reads its weight without calling it; factors beside it would do nothing"
        )
    if (
        weight is None
        or nn.parameter.is_lazy(weight)
        or weight.dim() != 2
        or weight.dtype not in FLOATS
    ):
        raise ArgumentError(
            f"{kind} whose weight is {getattr(weight, 'dtype', 'computed, not a parameter')}; expected an ordinary "
            "matrix of floating-point numbers, initialised and not quantised"
        )
    rows, columns = weight.shape
    return (rows, columns) if conv1d else (columns, rows)


# ---- finding modules ------------------------------------------------------------------------------------------------


def _plain(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper: names and files are the same, compiled or not."""
    return getattr(model, "_orig_mod", model)


def _called(path: str, name: str) -> bool:
    """Does a target name this module? `q_proj` names every `...q_proj`, `0.q_proj` every `...0.q_proj` (PEFT's rule)."""
    return path == name or path.endswith("." + name)


def _layers(model: nn.Module, needed: bool = True) -> "dict[str, LoRALinear]":
    layers = {
        path: part
        for path, part in _plain(model).named_modules()
        if path and isinstance(part, LoRALinear)
    }
    if needed and not layers:
        raise ArgumentError(
            f"{type(_plain(model)).__name__} has no LoRA layer; expected a model after apply_lora or load_lora"
        )
    return layers


def _also(model: nn.Module) -> "dict[str, nn.Module]":
    """The modules that stay trainable beside the factors: apply_lora has marked them. (A mark goes with a module that is copied.)"""
    return {
        path: part
        for path, part in _plain(model).named_modules()
        if part.__dict__.get("_saved_with_lora")
    }


def _select(argument: str, modules: "dict[str, nn.Module]", names, known) -> "dict[str, nn.Module]":
    """The modules that `names` name. Each must name one, but for the sets this package offers, which are for several models."""
    names = (names,) if isinstance(names, str) else tuple(names)
    found = {
        path: part for path, part in modules.items() if any(_called(path, name) for name in names)
    }
    missing = [name for name in names if not any(_called(path, name) for path in found)]
    if missing and (not found or names != known):
        linear = argument == "targets"
        ends = dict.fromkeys(
            path.rpartition(".")[2]
            for path, part in modules.items()
            if (
                isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
                if linear
                else part._parameters
            )
        )
        raise ArgumentError(
            f"{argument}: no module of the model is called {' or '.join(missing)}; expected names among its "
            f"{'linear layers' if linear else 'modules with parameters'}: {', '.join(ends) or 'there are none'}"
        )
    return found


# ---- applying -------------------------------------------------------------------------------------------------------


def _prepare(model, chosen, kept, rank, alpha, dropout, dtype, generator):
    """path -> LoRALinear to put in, for the modules `chosen`, with those in `kept` trainable. Checks everything, changes nothing."""
    held = Arena.parameters_held()
    for name, p in model.named_parameters():
        if id(p) in held:
            raise ArgumentError(
                f"parameter {name} is in an Arena; apply_lora comes before Arena, which lays out what is trainable then: "
                "call arena.release() first and make a new Arena after"
            )
    if not isinstance(rank, int) or rank < 1:
        raise ArgumentError(f"rank is {rank!r}; expected a whole number of 1 or more")
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ArgumentError(f"alpha is {alpha!r}; expected a positive number")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ArgumentError(
            f"dropout is {dropout!r}; expected a probability from 0 up to, but not including, 1"
        )
    if dtype is not None and dtype not in FLOATS:
        raise ArgumentError(
            f"dtype is {dtype}; expected one of {', '.join(map(str, FLOATS))}, or None for that of each base weight"
        )
    holders, inside = (
        defaultdict(list),
        {id(part) for module in kept.values() for part in module.modules()},
    )
    for path, part in model.named_modules():
        for key, p in part._parameters.items():
            holders[id(p)].append((id(part), f"{path}.{key}"))
    for path, part in chosen.items():
        if rank > (least := min(_features(part, f"target {path}"))):
            raise ArgumentError(
                f"rank is {rank}, more than {least}, the smaller side of target {path}: the product could hold no more"
            )
        if id(part) in inside:
            raise ArgumentError(
                f"{path} is named by both targets and also; expected one of the two"
            )
        names = [name for _, name in holders[id(part.weight)]]
        if len(names) > 1:
            raise ArgumentError(
                f"target {path} has a tied weight, {' and '.join(names)}: merging would change both. Leave it out"
            )
    for path, part in kept.items():
        if next(part.parameters(), None) is None:
            raise ArgumentError(
                f"also: {path} is a {type(part).__name__} without parameters; there is nothing to train"
            )
        for p in part.parameters():
            outside = [name for holder, name in holders[id(p)] if holder not in inside]
            if outside:
                raise ArgumentError(
                    f"also: {path} has a weight that is tied with {outside[0]}: name that module too, or neither"
                )
            if not p.is_floating_point():
                raise ArgumentError(
                    f"also: {path} has a weight that is {p.dtype}; expected floating-point numbers, which can be trained"
                )
    return {
        path: LoRALinear(part, rank, alpha, dropout, dtype=dtype, generator=generator)
        for path, part in chosen.items()
    }


def _replace(model: nn.Module, swap: "dict[int, nn.Module]"):
    """Put swap[id(child)] in the place of each such child, under every parent that has it."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in swap:
                parent._modules[key] = swap[id(child)]


def _install(model, new, kept):
    model.requires_grad_(False)
    _replace(model, {id(layer.base_layer): layer for layer in new.values()})
    for part in kept.values():
        part.requires_grad_(True)
        part._saved_with_lora = True


def apply_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets=TARGETS,
    *,
    also=(),
    dtype: "torch.dtype | None" = None,
    seed: "int | None" = None,
) -> nn.Module:
    """Freeze every parameter of `model` and put a LoRALinear around each linear layer that `targets` names. Returns model.

    rank: from 1 to the smaller side of each target; alpha: the product counts alpha / rank; dropout: of the factors' input, from
    torch's random numbers. targets: ends of module names (`q_proj`, `attn.c_attn`). also: names of modules that stay trainable
    beside the factors and are saved with them; BLOCK_NORMS for the reference system's two norms per layer. dtype: of the factors;
    default each base weight's: bf16 factors get fp32 masters in an Arena. torch.float32 over a bf16 base is what PEFT does.
    seed: for the start values of A; default torch's random numbers, on the CPU.

    A layer keeps its mode (train or eval). Optimizers made before hold what is frozen now: make them after.
    Raises ArgumentError, and changes nothing, for a name that matches nothing (the two sets this module offers need one match in all),
    a target that is no linear layer or whose weight is tied, a rank, alpha or dropout out of range, LoRA applied already, or a
    model whose parameters are in an Arena."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    plain = _plain(model)
    modules = {path: part for path, part in plain.named_modules() if path}
    if applied := _layers(plain, needed=False):
        raise ArgumentError(
            f"{next(iter(applied))} is a LoRA layer already; call remove_lora first, or load_lora for other factors"
        )
    chosen, kept = (
        _select("targets", modules, targets, TARGETS),
        _select("also", modules, also, BLOCK_NORMS),
    )
    if not chosen:
        raise ArgumentError("targets is empty; expected at least one name of a linear layer")
    _install(plain, _prepare(plain, chosen, kept, rank, alpha, dropout, dtype, generator), kept)
    return model


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_lora(model: nn.Module) -> nn.Module:
    """Add alpha / rank * B A to every base weight, in place, in fp32 and rounded once. Returns model.

    Forward then uses the base layers alone; in training mode with gradients on it raises ArgumentError, because the factors would get
    none. A copy of each frozen weight is kept on its device until unmerge_lora: merging costs the memory of the targets' weights once
    more. state_dict() goes on showing the frozen weights. Raises ArgumentError, and changes nothing, without LoRA or when merged."""
    layers = _layers(model)
    if merged := [path for path, layer in layers.items() if layer.merged]:
        raise ArgumentError(
            f"{merged[0]} is merged already; merging again would count its factors twice. Call unmerge_lora first"
        )
    try:
        for layer in layers.values():
            layer.merge()
    except BaseException:  # out of memory, an interrupt: no half-merged model
        for layer in (layer for layer in layers.values() if layer.merged):
            layer.unmerge()
        raise
    return model


def unmerge_lora(model: nn.Module) -> nn.Module:
    """Give every base weight the bits back that it had before merge_lora. Returns model.

    Raises ArgumentError, and changes nothing, without LoRA or when not merged."""
    layers = _layers(model)
    if plain := [path for path, layer in layers.items() if not layer.merged]:
        raise ArgumentError(f"{plain[0]} is not merged; expected a model after merge_lora")
    for layer in layers.values():
        layer.unmerge()
    return model


def remove_lora(model: nn.Module, *, merge: bool = False) -> nn.Module:
    """Take the LoRA layers out again: plain linear layers, with the frozen weights, or with merge=True the merged ones. Returns model.

    What `also` named keeps its trained values. What is trainable stays as it is: model.requires_grad_(True) thaws the rest.
    Raises ArgumentError, and changes nothing, without LoRA, or while the factors are in an Arena."""
    layers, plain = _layers(model), _plain(model)
    if not Arena.parameters_held().isdisjoint(map(id, plain.parameters())):
        raise ArgumentError(
            f"parameters of {type(plain).__name__} are in an Arena; call arena.release() before remove_lora"
        )
    if layers[min(layers)].merged != merge:
        merge_lora(model) if merge else unmerge_lora(model)
    marked = _also(plain)
    _replace(plain, {id(layer): layer.base_layer for layer in layers.values()})
    for part in marked.values():
        del part._saved_with_lora
    return model


# ---- files ----------------------------------------------------------------------------------------------------------


def _tensors(layers: "dict[str, LoRALinear]", kept: "dict[str, nn.Module]") -> "dict[str, Tensor]":
    """PEFT's name -> tensor, itself and not a copy: the factors, and all that the kept modules' state dicts hold."""
    found = {
        f"{PREFIX}{path}.{key}.weight": getattr(layer, key).weight
        for path, layer in layers.items()
        for key in ("lora_A", "lora_B")
    }
    for path, part in kept.items():
        found.update(
            (f"{PREFIX}{path}.{key}", t)
            for key, t in part.state_dict(keep_vars=True).items()
            if isinstance(t, Tensor)
        )
    return found


def _short(model: nn.Module, paths, matches) -> "list[str]":
    """Names by which PEFT finds exactly these modules: last components where they match no other module, else whole paths.

    PEFT matches targets at dots, and modules_to_save anywhere: there "norm" also means input_layernorm."""
    inner = tuple(f"{path}." for path in _layers(model, needed=False))
    everything = [path for path, _ in model.named_modules() if path and not path.startswith(inner)]
    chosen = set()
    for path in paths:
        end = path.rpartition(".")[2]
        chosen.add(
            end if all(other in paths for other in everything if matches(other, end)) else path
        )
    return sorted(chosen)


def _seal(tensors: "dict[str, Tensor]") -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(
            json.dumps(
                [
                    name,
                    str(tensors[name].dtype),
                    list(tensors[name].shape),
                    digest(tensors[name])[0],
                ]
            ).encode()
        )
    return whole.hexdigest()


def save_lora(
    model: nn.Module, folder, *, base_model: "str | None" = None, task_type: "str | None" = None
) -> pathlib.Path:
    """Write the factors, and the modules that `also` named, as PEFT does: adapter_model.safetensors and adapter_config.json.

    folder: made if missing; base_model: name of the base model, for PEFT, default what model.config says; task_type: PEFT's, such as
    "CAUSAL_LM". The safetensors metadata also hold rank, alpha and a sha256, which load_lora checks where they are. Both files are
    written aside and renamed together. Merged or not makes no difference. Copies from the device, hence synchronises. Returns folder.
    Raises ArgumentError without LoRA, CheckpointError where the folder cannot be written; the files that were there are then untouched."""
    layers, plain, folder = _layers(model), _plain(model), pathlib.Path(folder).expanduser()
    first, kept = layers[min(layers)], _also(model)
    tensors = {
        name: t.detach().to("cpu", copy=True).contiguous()
        for name, t in _tensors(layers, kept).items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "auto_mapping": None
        if task_type
        else {"base_model_class": type(plain).__name__, "parent_library": type(plain).__module__},
        "base_model_name_or_path": base_model
        or getattr(getattr(plain, "config", None), "_name_or_path", None)
        or None,
        "revision": None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": getattr(first.lora_dropout, "p", 0.0),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": _short(plain, layers, _called),
        "modules_to_save": _short(plain, kept, str.endswith) or None,
        "fan_in_fan_out": not any(
            isinstance(layer.base_layer, nn.Linear) for layer in layers.values()
        ),
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    facts = {"r": first.rank, "lora_alpha": first.alpha, "sha256": _seal(tensors)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written_aside(folder / CONFIG) as words, written_aside(folder / WEIGHTS) as numbers:
            words.write(json.dumps(config, indent=2, sort_keys=True).encode())
            numbers.write(save(tensors, metadata={"format": "pt", "gpuaccel": json.dumps(facts)}))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error.strerror or error}); what was there before is untouched"
        ) from error
    return folder


def _read_config(path: pathlib.Path) -> dict:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); expected the configuration of an adapter"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(f"{path}: peft_type is {kind!r}; expected 'LORA'")
    for key, kind in (("r", int), ("lora_alpha", (int, float)), ("lora_dropout", (int, float))):
        if not isinstance(config.get(key), kind):
            raise CheckpointError(f"{path}: {key} is {config.get(key)!r}; expected a number")
    problems = [f"{key} is {config[key]!r}" for key in REFUSED if config.get(key)]
    problems += [f"bias is {config['bias']!r}"] if config.get("bias", "none") != "none" else []
    start = config.get("init_lora_weights", True)
    problems += (
        [f"init_lora_weights is {start!r}, which changed the base weights"]
        if start not in STARTS
        else []
    )
    if problems:
        raise CheckpointError(
            f"{path}: {problems[0]}; expected plain LoRA, y = base(x) + lora_alpha / r * B A x"
        )
    return config


def _read(folder: pathlib.Path) -> "tuple[pathlib.Path, dict, dict[str, Tensor]]":
    """(path of the weights, config, tensors) of an adapter whose own marks, if it has them, agree."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a file; expected an adapter written by save_lora or peft (adapter_model.bin is pickle, and "
            "is not read)"
        )
    config = _read_config(folder / CONFIG)
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = (
                file.metadata() or {},
                {name: file.get_tensor(name) for name in file.keys()},
            )
        facts = dict(json.loads(metadata.get("gpuaccel", "{}")))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {damage(path)} ({error})"
        ) from error
    for key in ("r", "lora_alpha"):
        if facts and facts.get(key) != config[key]:
            raise CheckpointError(
                f"{path} was written with {key} = {facts.get(key)}, but {folder / CONFIG} says {config[key]}: "
                "these files do not belong together"
            )
    if facts and facts.get("sha256") != (found := _seal(tensors)):
        raise CheckpointError(
            f"{path} is damaged: its tensors have sha256 {found}, expected {facts.get('sha256')}"
        )
    return path, config, tensors


def _modules_in(
    path, config, tensors, model
) -> "tuple[dict[str, nn.Module], dict[str, nn.Module]]":
    """(targets, kept modules) of a file: what its factors name (patterns might match more in this model), what modules_to_save names."""
    pattern = re.escape(PREFIX) + r"(.+)\.(?:lora_[AB]|base_layer)\.(?:weight|bias)"
    matches = {name: re.fullmatch(pattern, name) for name in tensors}
    targets, rest = (
        dict.fromkeys(match[1] for match in matches.values() if match),
        [name for name in tensors if not matches[name]],
    )
    modules, ends = dict(model.named_modules()), tuple(config.get("modules_to_save") or ())
    kept = {
        name: part for name, part in modules.items() if name.endswith(ends) and part.state_dict()
    }
    strange = [key for key in rest if not any(key.startswith(f"{PREFIX}{name}.") for name in kept)]
    if strange or not targets:
        raise CheckpointError(
            f"{path} holds {strange[0] if strange else 'no factors'}; expected {PREFIX}<module>.lora_A.weight and .lora_B"
            f".weight, and weights of modules that modules_to_save names ({', '.join(ends) or 'none'}) and the model has"
        )
    if absent := [name for name in targets if name not in modules]:
        raise CheckpointError(
            f"{path} does not fit this model: it has factors for {absent[0]}, which is no module here"
        )
    return {name: modules[name] for name in targets}, kept


def _fit(path, tensors, expected):
    """Raise CheckpointError unless the file holds exactly these names, with these shapes and dtypes."""
    missing, unknown = (
        [n for n in expected if n not in tensors],
        [n for n in tensors if n not in expected],
    )
    if missing or unknown:
        raise CheckpointError(
            f"{path} does not fit this model: it lacks {missing[:2] or 'nothing'} ({len(missing)} in all) and holds "
            f"{unknown[:2] or 'nothing'} ({len(unknown)}) that the model has not"
        )
    values = {}
    for name, here in expected.items():
        found = tensors[name]
        if found.shape != here.shape or found.dtype != here.dtype:
            hint = (
                ""
                if found.dtype == here.dtype
                else ". (Loaded into a model without LoRA, factors take the file's dtype.)"
            )
            raise CheckpointError(
                f"{path} does not fit this model: {name} is {found.dtype} {tuple(found.shape)}, expected {here.dtype} "
                f"{tuple(here.shape)}{hint}"
            )
        first = values.setdefault(id(here), name)
        if first != name and not torch.equal(tensors[first], found):
            raise CheckpointError(
                f"{path} does not fit this model: {first} and {name} are one tensor here (tied), the file has two values"
            )


def load_lora(model: nn.Module, folder) -> nn.Module:
    """Load an adapter that save_lora or `peft` wrote. Returns model.

    A model without LoRA gets it, as the file says and in the file's dtype (PEFT keeps fp32 factors beside a bf16 base). In a model with
    LoRA the modules, rank, alpha, shapes and dtypes must be the file's, and values are copied in place: parameters stay views of their
    arena, and the fp32 masters of bf16 ones follow. The optimizer's moments stay; dropout of an existing LoRA stays.

    Everything is verified before the first value is copied. Raises CheckpointError, naming the file, and changes nothing, for a damaged
    or foreign file, one that does not fit, or a kind of adapter other than plain LoRA; ArgumentError for a merged model."""
    plain, folder = _plain(model), pathlib.Path(folder).expanduser()
    layers = _layers(plain, needed=False)
    if any(layer.merged for layer in layers.values()):
        raise ArgumentError(
            "the model's LoRA is merged: its weights hold the old factors. Call unmerge_lora before load_lora"
        )
    path, config, tensors = _read(folder)
    new = {}  # what has to be put in first
    if layers:
        first, kept = layers[min(layers)], _also(plain)
        for key, here in (("r", first.rank), ("lora_alpha", first.alpha)):
            if config[key] != here:
                raise CheckpointError(
                    f"{folder / CONFIG}: {key} is {config[key]}, expected {here}, as in this model's LoRA"
                )
    else:
        chosen, kept = _modules_in(path, config, tensors, plain)
        dtype = next((t.dtype for name, t in tensors.items() if ".lora_" in name), None)
        try:
            new = layers = _prepare(
                plain,
                chosen,
                kept,
                config["r"],
                config["lora_alpha"],
                config["lora_dropout"],
                dtype,
                torch.Generator().manual_seed(0),
            )  # torch's own random numbers stay where they are
        except ArgumentError as error:
            raise CheckpointError(f"{path} does not fit this model: {error}") from error
    expected = _tensors(
        layers, kept
    )  # and the frozen weight of a head, which PEFT stores where it is a target
    expected.update(
        (name, p)
        for path, layer in layers.items()
        for key, p in layer.base_layer.named_parameters()
        if (name := f"{PREFIX}{path}.base_layer.{key}") in tensors
    )
    _fit(path, tensors, expected)
    if new:
        _install(plain, new, kept)
    with torch.no_grad():
        for name, here in expected.items():
            here.copy_(tensors[name])
    return model
