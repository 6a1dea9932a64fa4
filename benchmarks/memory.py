"""How much memory a benchmark may use on a GPU, and which model fits into it.

GPUACCEL_BENCH_GIB=15 tries a benchmark as on a GPU of 15 GiB: models are chosen for it, and each
process gets no more.

>>> [size for _, size in models_that_fit(70)]     # on a GPU of 80 GB
[None, 'llama-350m with 12 layers', ...]
"""

import os

LIMIT = "GPUACCEL_BENCH_GIB"
# Changes of llama-350m, the largest model first.
SIZES = (
    {},
    {"layers": 12},
    {"layers": 6},
    {"layers": 6, "vocab": 8192},
    {"layers": 3, "vocab": 8192},
    {"layers": 2, "vocab": 4096},
)
# What CUDA takes in some processes, in GiB, whatever the model.
CONTEXTS = 5.0


def available_GiB() -> float:
    """Of one GPU: what LIMIT says, or all that torch may allocate."""
    import torch

    if LIMIT in os.environ:
        return float(os.environ[LIMIT])
    total = torch.cuda.get_device_properties(0).total_memory
    return total * torch.cuda.get_per_process_memory_fraction() / 2**30


def obey_limit():
    """Let this process allocate no more than LIMIT says, if it says something."""
    if LIMIT not in os.environ:
        return
    # Not at the top: it takes seconds, and most of the time nothing is limited.
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        fraction = available_GiB() * 2**30 / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))


def models_that_fit(GiB: float, **changes) -> list:
    """(Config, what it is in words) of llama-350m and its smaller relatives that fit on the GPU.

    The words of llama-350m itself are None. The smallest model is always there.

    GiB: what all processes of the benchmark take together on one GPU with llama-350m
    changes: of every Config"""
    from gpuaccel.training.models import preset

    def parameters(config) -> int:
        # Of a block: q and o, k and v, and three of the MLP.
        attention = 2 * config.hidden**2 * (1 + config.kv_heads / config.heads)
        block = attention + 3 * config.hidden * config.intermediate
        return 2 * config.vocab * config.hidden + config.layers * block

    whole = parameters(preset("llama-350m", **changes))
    models = []
    for size in SIZES:
        config = preset("llama-350m", **{**size, **changes})
        share = parameters(config) / whole
        if not size:
            words, needed = None, GiB
        else:
            # Activations shrink less than weights.
            needed = CONTEXTS + 1.2 * share * (GiB - CONTEXTS)
            parts = [f"{size['layers']} layers"]
            parts += [f"{size['vocab']:,} tokens"] if "vocab" in size else []
            words = f"llama-350m with {' and '.join(parts)}"
        if needed <= available_GiB() or size is SIZES[-1]:
            models.append((config, words))
    return models
