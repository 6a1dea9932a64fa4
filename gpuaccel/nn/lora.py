"""A linear layer with LoRA: its weight is frozen, and a product of two thin matrices is trained.

    layer = LoRALinear(nn.Linear(64, 32), rank=8, alpha=16)
    y = layer(x)          # base(x) + B(A(x)) * alpha / rank
    layer.merge()         # adds the product to the base weight
    layer.unmerge()       # restores the base weight, bit-identical

A is (rank, in) and B is (out, rank); B is zero at first (Hu et al., 2021). Names and initial values
are those of PEFT. A and B are plain nn.Linear layers, so hooks, arenas, fused weight gradients and
torch.compile treat them like any other layer. training/lora.py puts these layers into a model.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import ArgumentError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LoRALinear(nn.Module):
    """y = base(x) + lora_B(lora_A(dropout(x)) * alpha / rank), x (..., in) and y (..., out).

    y has the dtype of base(x). A is drawn on the CPU in fp32, uniform in +-1/sqrt(in)
    (`kaiming_uniform_` with a = sqrt(5)), and then converted, so a seed gives the same values on
    every device. B is zero.

    Args:
        base: nn.Linear, or transformers' Conv1D, whose weight is (in, out).
        rank: rows of A and columns of B.
        alpha: the product is scaled by alpha / rank.
        dropout: probability, for the input of A.
        dtype: of A and B; default that of the base weight.
        generator: random numbers for A; default torch's.

    Raises:
        ArgumentError: for any other base layer, and a rank, alpha, dropout or dtype out of range.
    """

    frozen_weight: "Tensor | None"  # the base weight as it was before merge()

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
        self.in_features, self.out_features = linear_features(base)
        check_settings(rank, alpha, dropout, dtype)
        self.rank = rank
        self.alpha = alpha
        self.scaling = alpha / rank
        self.frozen_weight = None
        self.base_layer = base
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        weight = self.weight
        a = torch.empty(rank, self.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        b = torch.zeros(self.out_features, rank)
        self.lora_A = _linear(a.to(weight.device, dtype or weight.dtype))
        self.lora_B = _linear(b.to(weight.device, dtype or weight.dtype))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise ArgumentError(
                    "a merged LoRA layer was called in training mode: its factors would get no "
                    "gradient. Call unmerge_lora before training, or use the merged weights in "
                    "model.eval() or under torch.no_grad()"
                )
            return y
        # Factors may be fp32 beside a bf16 base.
        if x.dtype != self.lora_A.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.lora_A.weight.dtype)
        # A's output is scaled, not B's: it has rank columns, far fewer than y.
        return (y + self.lora_B(self.lora_A(self.lora_dropout(x)) * self.scaling)).to(y.dtype)

    @property
    def merged(self) -> bool:
        """Whether the base weight holds the product now."""
        return self.frozen_weight is not None

    @property
    def weight(self) -> Tensor:
        """The base layer's weight. It is registered once, as base_layer.weight."""
        return self.base_layer.get_parameter("weight")

    @property
    def bias(self) -> "Tensor | None":
        """The base layer's bias."""
        return self.base_layer.bias  # type: ignore[return-value]

    def why_not_merge(self) -> "str | None":
        """Why merge() would refuse, in words; None: it would not."""
        if self.merged:
            return (
                "is merged already; merging again would count its factors twice. Call unmerge_lora "
                "first"
            )
        base = type(self.base_layer)
        if issubclass(base, nn.Linear) and base.forward is not nn.Linear.forward:
            return (
                f"is around a {base.__module__}.{base.__name__}, which has a forward of its own: "
                "the product added to its weight might not be what the factors compute"
            )
        return None

    @torch.no_grad()
    def merge(self):
        """Add alpha / rank * B A to the base weight.

        Computed in fp32 (in fp64 for an fp64 base) and rounded once to the weight's dtype.

        Raises:
            ArgumentError: and changes nothing, when merged already, and for a subclass of nn.Linear
                with a forward of its own.
        """
        if problem := self.why_not_merge():
            raise ArgumentError(f"the LoRA layer {problem}")
        weight = self.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        product = (self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)).mul_(self.scaling)
        if not isinstance(self.base_layer, nn.Linear):
            product = product.t()
        total = (product + weight).to(weight.dtype)
        # Before the copy, so that unmerge() undoes a copy that was interrupted.
        self.frozen_weight = weight.detach().clone()
        weight.copy_(total)

    @torch.no_grad()
    def unmerge(self):
        """Restore the base weight as it was before merge(), bit-identical.

        Raises:
            ArgumentError: and changes nothing, when not merged.
        """
        if self.frozen_weight is None:
            raise ArgumentError("the LoRA layer is not merged; expected one after merge()")
        self.weight.copy_(self.frozen_weight)
        self.frozen_weight = None

    # ---- for captured steps: graphs/participant.py ----

    def graph_key(self) -> bool:
        """A graph captured while merged leaves the factors out, another one does not."""
        return self.merged

    def tensors_changed_by_step(self) -> "list[Tensor]":
        """Parameters only, which a captured step knows."""
        return []

    def state_dict(self, *args, **kwargs):
        """As of any module, with the frozen weight also when merged.

        With the merged weight the factors beside it would count twice. A merged layer adds `weight`
        and `bias`, the names that the base layer has without LoRA: a plain model that loads the
        dict (save_pretrained, from_pretrained) gets the merged weight."""
        state = super().state_dict(*args, **kwargs)
        if self.merged:
            prefix = kwargs.get("prefix", "")
            state[prefix + "weight"] = state[prefix + "base_layer.weight"]
            state[prefix + "base_layer.weight"] = self.frozen_weight
            if self.bias is not None:
                # Some formats refuse two names of one memory.
                state[prefix + "bias"] = self.bias.detach().clone()
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # A state dict holds the frozen weight and the factors.
        if self.merged:
            self.unmerge()
        if prefix + "base_layer.weight" in state_dict:
            state_dict.pop(prefix + "weight", None)
            state_dict.pop(prefix + "bias", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}" + (", merged" if self.merged else "")


def _linear(weight: Tensor) -> nn.Linear:
    """An nn.Linear without bias around `weight` (out, in)."""
    # On the meta device nothing is initialised, so no random numbers are drawn.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


def frozen_state_dict(module: nn.Module) -> "dict[str, Tensor]":
    """module.state_dict(), without the merged weights that merged LoRA layers add to it.

    Args:
        module: any module.
    """
    state = module.state_dict()
    for name, layer in module.named_modules():
        if isinstance(layer, LoRALinear) and layer.merged:
            prefix = name + "." if name else ""
            state.pop(prefix + "weight")
            state.pop(prefix + "bias", None)
    return state


def check_settings(rank, alpha, dropout, dtype):
    """Refuse what a LoRALinear cannot be made with.

    Args:
        rank, alpha, dropout, dtype: as LoRALinear's.

    Raises:
        ArgumentError: for the first that is out of range.
    """
    if type(rank) is not int or rank < 1:
        raise ArgumentError(f"rank is {rank!r}; expected a whole number of 1 or more")
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ArgumentError(f"alpha is {alpha!r}; expected a positive number")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ArgumentError(
            f"dropout is {dropout!r}; expected a probability from 0 up to, but not including, 1"
        )
    if dtype is not None and dtype not in FLOATS:
        raise ArgumentError(
            f"dtype is {dtype}; expected one of {', '.join(map(str, FLOATS))}, or None for that of "
            "each base weight"
        )


def linear_features(base: nn.Module, name: str = "base") -> "tuple[int, int]":
    """(in, out) of a layer to which LoRA can be applied.

    Args:
        base: any module.
        name: what error messages call the layer.

    Raises:
        ArgumentError: for any other module, saying what it is.
    """
    described = f"{name} is a {type(base).__module__}.{type(base).__name__}"
    # Recognised by its attributes, because transformers is not imported here.
    conv1d = type(base).__name__ == "Conv1D" and hasattr(base, "nf")
    if not isinstance(base, nn.Linear) and not conv1d:
        raise ArgumentError(f"{described}; expected an nn.Linear, or transformers' Conv1D")
    if isinstance(base, NonDynamicallyQuantizableLinear):
        raise ArgumentError(
            f"{described}: nn.MultiheadAttention reads its weight without calling it, so LoRA "
            "would have no effect"
        )
    weight = dict(base.named_parameters(recurse=False)).get("weight")
    if weight is None:
        raise ArgumentError(
            f"{described} whose weight is computed, not a parameter; expected an ordinary matrix"
        )
    if nn.parameter.is_lazy(weight) or weight.dim() != 2 or weight.dtype not in FLOATS:
        raise ArgumentError(
            f"{described} whose weight is {weight.dtype}; expected an ordinary matrix of "
            "floating-point numbers, initialised and not quantised"
        )
    rows, columns = weight.shape
    return (rows, columns) if conv1d else (columns, rows)
