"""A whole step and what is around it: data, models, the loop, checkpoints."""

from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .data import (
    Batches,
    BPETokenizer,
    ByteTokenizer,
    NamedTokenizer,
    make_dataset,
    shard,
    val_batches,
)
from .loop import evaluate, train, warmup_cosine
from .models import Config, Transformer, flops_per_token, generate, preset
from .replay import Replay, ReplayMode
from .results import StepOutput
from .step import TrainStep, token_loss

__all__ = [
    "BPETokenizer",
    "Batches",
    "ByteTokenizer",
    "Config",
    "NamedTokenizer",
    "Replay",
    "ReplayMode",
    "StepOutput",
    "TrainStep",
    "Transformer",
    "evaluate",
    "flops_per_token",
    "generate",
    "latest_checkpoint",
    "load_checkpoint",
    "make_dataset",
    "preset",
    "save_checkpoint",
    "shard",
    "token_loss",
    "train",
    "val_batches",
    "warmup_cosine",
]
