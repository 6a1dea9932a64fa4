"""LoRA on a model: apply, merge, unmerge, remove. The weights are frozen, factors are trained.

    ga.apply_lora(model, rank=8, alpha=16, targets=("w_q", "w_v"))    # before Arena, in place
    arena = ga.Arena(model)                 # holds the trainable tensors only
    ga.save_lora(model, "adapter")          # the files of `peft`: training/lora_files.py
    ga.merge_lora(model)                    # adds the products to the base weights
    ga.training.unmerge_lora(model)                  # restores the base weights, bit-identical

The layer is nn/lora.py. Which modules: `targets` get factors, modules in `also` are trained whole.

entrenar, whose LoRA training this follows, trains six tensors per block: A_q, B_q, A_v, B_v and two
norms, which are clipped together. Here `apply_lora(model, also=BLOCK_NORMS)` does that: a block of
the arena holds just those six, and an optimizer that clips block by block does the rest.
"""

import numbers
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from ..errors import ArgumentError, check_module
from ..nn import LoRALinear, check_settings, linear_features
from ..optim import Arena
from .models import uncompiled

# Of this package's Transformer; of Llama, Qwen, Mistral and others.
TARGETS = ("w_q", "w_v", "q_proj", "v_proj")
# Of the same models.
BLOCK_NORMS = ("input_norm", "post_attn_norm", "input_layernorm", "post_attention_layernorm")


# ---- the modules of a model ----------------------------------------------------------------------


def lora_layers(model: nn.Module) -> "dict[str, LoRALinear]":
    """name -> LoRA layer, in the order of the model."""
    modules = uncompiled(model).named_modules()
    return {name: part for name, part in modules if name and isinstance(part, LoRALinear)}


def require_lora_layers(model: nn.Module) -> "dict[str, LoRALinear]":
    """lora_layers of a model that has some.

    Raises:
        ArgumentError: for one without.
    """
    layers = lora_layers(model)
    if not layers:
        raise ArgumentError(
            f"{type(uncompiled(model)).__name__} has no LoRA layer; expected a model after "
            "apply_lora or load_lora"
        )
    return layers


def modules_trained_whole(model: nn.Module) -> "dict[str, nn.Module]":
    """name -> module that `also` named: all of it is trained, and saved with the factors."""
    # The mark is in the module itself, so that a copy of the model has it too.
    modules = uncompiled(model).named_modules()
    return {name: part for name, part in modules if part.__dict__.get("_trained_whole")}


def matches(module_name: str, pattern: str) -> bool:
    """PEFT's rule: `q_proj` matches every `...q_proj`, `0.q_proj` every `...0.q_proj`."""
    return module_name == pattern or module_name.endswith("." + pattern)


def _select(argument: str, modules: "dict[str, nn.Module]", patterns, default) -> dict:
    """name -> module, for the modules that match one of the patterns.

    Raises:
        ArgumentError: for a pattern that matches nothing. The patterns of `default` are for several
            models: there one match in all is enough.
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    selected = {
        name: part for name, part in modules.items() if any(matches(name, p) for p in patterns)
    }
    unmatched = [p for p in patterns if not any(matches(name, p) for name in selected)]
    if not unmatched or (selected and patterns == default):
        return selected

    def eligible(part):
        if argument == "targets":
            return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
        return next(part.parameters(recurse=False), None) is not None

    last_parts = [name.rpartition(".")[2] for name, part in modules.items() if eligible(part)]
    kind = "linear layers" if argument == "targets" else "modules with parameters"
    raise ArgumentError(
        f"{argument}: no module of the model is called {' or '.join(unmatched)}; expected names "
        f"among its {kind}: {', '.join(dict.fromkeys(last_parts)) or 'there are none'}"
    )


def _replace(model: nn.Module, replacements: "dict[int, nn.Module]"):
    """Replace each child by replacements[id(child)], under every parent that has it."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in replacements:
                parent._modules[key] = replacements[id(child)]


# ---- checks before anything changes --------------------------------------------------------------


def _check_not_in_arena(model: nn.Module):
    in_arena = Arena.parameters_held()
    for name, p in model.named_parameters():
        if id(p) in in_arena:
            raise ArgumentError(
                f"parameter {name} is in an Arena; apply_lora comes before Arena, which lays out "
                "what is trainable then: call arena.release() first and make a new Arena after"
            )


def _check_rank(rank, targets):
    for name, module in targets.items():
        smaller_side = min(linear_features(module, f"target {name}"))
        if rank > smaller_side:
            raise ArgumentError(
                f"rank is {rank}, more than {smaller_side}, the smaller side of target {name}: "
                "the product could hold no more"
            )


def _parameter_names(model: nn.Module) -> "dict[int, list[tuple[int, str]]]":
    """id of a parameter -> (id of its module, its name), several of them for a tied weight."""
    names = defaultdict(list)
    for module_name, part in model.named_modules():
        for name, p in part.named_parameters(module_name, recurse=False, remove_duplicate=False):
            names[id(p)].append((id(part), name))
    return names


def _check_target(name, module, names):
    linear_features(module, f"target {name}")
    weight_names = [weight_name for _, weight_name in names[id(module.weight)]]
    if len(weight_names) > 1:
        raise ArgumentError(
            f"target {name} has a tied weight, {' and '.join(weight_names)}: merging would change "
            "both. Leave it out"
        )


def _check_trained_whole(name, module, names, ids_inside):
    if next(module.parameters(), None) is None:
        raise ArgumentError(
            f"also: {name} is a {type(module).__name__} without parameters; there is nothing to "
            "train"
        )
    for p in module.parameters():
        outside = [p_name for holder, p_name in names[id(p)] if holder not in ids_inside]
        if outside:
            raise ArgumentError(
                f"also: {name} has a weight that is tied with {outside[0]}: name that module too, "
                "or neither"
            )
        if not p.is_floating_point():
            raise ArgumentError(
                f"also: {name} has a weight that is {p.dtype}; expected floating-point numbers, "
                "which can be trained"
            )


def make_layers(
    model: nn.Module,
    targets: "dict[str, nn.Module]",
    trained_whole: "dict[str, nn.Module]",
    rank: int,
    alpha: float,
    dropout: float,
    dtype: "torch.dtype | None",
    generator: "torch.Generator | None",
) -> "dict[str, LoRALinear]":
    """name -> LoRA layer for each target, not yet in the model.

    Raises:
        ArgumentError: where the arguments do not fit the model, which stays as it is.
    """
    _check_not_in_arena(model)
    check_settings(rank, alpha, dropout, dtype)
    names = _parameter_names(model)
    ids_inside = {id(part) for module in trained_whole.values() for part in module.modules()}
    for name, module in targets.items():
        _check_target(name, module, names)
        if id(module) in ids_inside:
            raise ArgumentError(
                f"{name} is named by both targets and also; expected one of the two"
            )
    for name, module in trained_whole.items():
        _check_trained_whole(name, module, names, ids_inside)
    return {
        name: LoRALinear(module, rank, alpha, dropout, dtype=dtype, generator=generator)
        for name, module in targets.items()
    }


def install_layers(
    model: nn.Module, layers: "dict[str, LoRALinear]", trained_whole: "dict[str, nn.Module]"
):
    """Freeze the model, put the layers around their base layers, and mark what is trained whole."""
    model.requires_grad_(False)
    _replace(model, {id(layer.base_layer): layer for layer in layers.values()})
    for module in trained_whole.values():
        module.requires_grad_(True)
        module.__dict__["_trained_whole"] = True


# ---- apply, merge, unmerge, remove ---------------------------------------------------------------


def apply_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    targets: "str | Iterable[str]" = TARGETS,
    *,
    also: "str | Iterable[str]" = (),
    dtype: "torch.dtype | None" = None,
    seed: "int | None" = None,
) -> nn.Module:
    """Freeze `model` and put a LoRALinear around each linear layer that `targets` names, in place.

    Args:
        model: an nn.Module without LoRA, whose parameters are in no Arena.
        rank: from 1 to the smaller side of each target.
        alpha: the product is scaled by alpha / rank.
        dropout: probability, of the factors' input, from torch's random numbers. Default: 0.
        targets: ends of module names, such as `q_proj` or `attn.c_attn`. Default: the query and
            value projections of Transformer and of Llama.
        also: names of modules that are trained whole beside the factors, and saved with them.
            BLOCK_NORMS names the two norms of each block.
        dtype: of the factors; default that of each base weight. In an Arena bf16 factors have fp32
            masters. torch.float32 beside a bf16 base is what PEFT does.
        seed: for the initial values of A; default torch's random numbers, on the CPU.

    Returns:
        The model; each layer keeps its mode (train or eval). An optimizer made before holds what is
        frozen now: make it after.

    Raises:
        ArgumentError: with nothing changed, for a name that matches nothing (of the default targets
            and of BLOCK_NORMS one match is enough), a target that is no linear layer or has a tied
            weight, a rank, alpha, dropout or seed out of range, a model that has LoRA, or
            parameters in an Arena.

    Source:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021); PEFT's LoRA.

    Example:
        >>> model = ga.apply_lora(ga.preset("tiny", layers=1).build(), rank=4)
        >>> [name for name, p in model.named_parameters() if p.requires_grad][:2]
        ['...w_q.lora_A.weight', '...w_q.lora_B.weight']
    """
    if seed is not None and not (isinstance(seed, numbers.Integral) and -(2**63) <= seed < 2**64):
        raise ArgumentError(f"seed is {seed!r}; expected a whole number of 64 bits, or None")
    generator = None if seed is None else torch.Generator().manual_seed(int(seed))
    check_module("model", model)
    module = uncompiled(model)
    if layers := lora_layers(module):
        raise ArgumentError(
            f"{next(iter(layers))} is a LoRA layer already; call remove_lora first, or load_lora "
            "for other factors"
        )
    modules = {name: part for name, part in module.named_modules() if name}
    target_modules = _select("targets", modules, targets, TARGETS)
    trained_whole = _select("also", modules, also, BLOCK_NORMS)
    if not target_modules:
        raise ArgumentError("targets is empty; expected at least one name of a linear layer")
    check_settings(rank, alpha, dropout, dtype)
    _check_rank(rank, target_modules)
    layers = make_layers(
        module, target_modules, trained_whole, rank, alpha, dropout, dtype, generator
    )
    install_layers(module, layers, trained_whole)
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Add alpha / rank * B A to every base weight, in fp32 and rounded once.

    A merged model runs the base layers alone; it refuses to train, because the factors would get no
    gradient. state_dict() still holds the frozen weights and the factors, and beside them the
    merged weights by the names of a model without LoRA, which from_pretrained after save_pretrained
    loads. Until unmerge_lora, a copy of each target's weight is kept on its device.

    Args:
        model: after apply_lora or load_lora.

    Returns:
        The model, changed in place.

    Raises:
        ArgumentError: with nothing changed, without LoRA, when merged already, and for a subclass
            of nn.Linear with a forward of its own.

    Example:
        >>> model = ga.apply_lora(ga.preset("tiny", layers=1).build(), rank=4).eval()
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> before = model(tokens)
        >>> torch.allclose(before, ga.merge_lora(model)(tokens))
        True
    """
    _merge(require_lora_layers(model))
    return model


def _merge(layers: "dict[str, LoRALinear]"):
    """Merge all of the layers, or none."""
    for name, layer in layers.items():
        if problem := layer.why_not_merge():
            raise ArgumentError(f"{name} {problem}")
    try:
        for layer in layers.values():
            layer.merge()
    # Out of memory, an interrupt: a half-merged model must not remain.
    except BaseException:
        for layer in layers.values():
            if layer.merged:
                layer.unmerge()
        raise


def unmerge_lora(model: nn.Module) -> nn.Module:
    """Restore every base weight as it was before merge_lora, bit-identical.

    Args:
        model: after merge_lora.

    Returns:
        The model, changed in place.

    Raises:
        ArgumentError: and changes nothing, without LoRA or when not merged.
    """
    layers = require_lora_layers(model)
    if not_merged := [name for name, layer in layers.items() if not layer.merged]:
        raise ArgumentError(f"{not_merged[0]} is not merged; expected a model after merge_lora")
    for layer in layers.values():
        layer.unmerge()
    return model


def remove_lora(model: nn.Module, *, merge: "bool | None" = None) -> nn.Module:
    """Replace the LoRA layers by their plain base layers.

    Modules that `also` named keep their trained values. What requires a gradient stays as it is:
    model.requires_grad_(True) makes everything trainable again.

    Args:
        model: with LoRA.
        merge: True: with the merged weights. False: with the frozen ones. None: with those that the
            model computes with now, the merged ones after merge_lora.

    Returns:
        The model, changed in place.

    Raises:
        ArgumentError: and changes nothing, without LoRA, while parameters are in an Arena, or where
            a layer that is not merged yet cannot be (merge_lora).
    """
    module = uncompiled(model)
    layers = require_lora_layers(module)
    if not Arena.parameters_held().isdisjoint(map(id, module.parameters())):
        raise ArgumentError(
            f"parameters of {type(module).__name__} are in an Arena; call arena.release() before "
            "remove_lora"
        )
    if merge:
        _merge({name: layer for name, layer in layers.items() if not layer.merged})
    elif merge is not None:
        for layer in layers.values():
            if layer.merged:
                layer.unmerge()
    _replace(module, {id(layer): layer.base_layer for layer in layers.values()})
    for part in modules_trained_whole(module).values():
        del part.__dict__["_trained_whole"]
    return model
