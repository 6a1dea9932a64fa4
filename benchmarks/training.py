"""Models, batches and optimizers that the benchmarks of whole steps have in common."""

import torch
from common import DEVICE

SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
# Options of torch's optimizers for steps in a CUDA graph: the step count is on the device.
CAPTURABLE = {"capturable": DEVICE == "cuda"}


def build(config, dtype=torch.float32, device=DEVICE) -> torch.nn.Module:
    """The model of a Config, the same weights each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return config.build().to(dtype)


def token_batch(vocab: int, rows: int, T: int, seed: int = 1, device=DEVICE) -> tuple:
    """(inputs, targets): uniform random tokens, (rows, T) int64 each."""
    generator = torch.Generator().manual_seed(seed)
    return inputs_and_targets(torch.randint(vocab, (rows, T + 1), generator=generator).to(device))


def inputs_and_targets(tokens: torch.Tensor) -> tuple:
    """(rows, T + 1) tokens without the last of each row, and without the first."""
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def decay_groups(parameters) -> list[dict]:
    """Parameter groups with weight decay for matrices only, as an arena has them."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def captured_adamw(parameters, device=DEVICE) -> torch.optim.AdamW:
    """torch's fused AdamW for a CUDA graph, with the learning rate on the device."""
    settings = {**SETTINGS, "lr": torch.tensor(SETTINGS["lr"], device=device)}
    return torch.optim.AdamW(decay_groups(parameters), **settings, fused=True, **CAPTURABLE)
