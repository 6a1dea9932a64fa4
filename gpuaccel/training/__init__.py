"""A whole step and what is around it: data, models, the loop, checkpoints, LoRA."""

from .checkpoint import is_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from .data import (
    Batches,
    BPETokenizer,
    ByteTokenizer,
    NamedTokenizer,
    load_text,
    make_dataset,
    shard,
    train_bpe,
    val_batches,
)
from .loop import evaluate, train, warmup_cosine, warmup_cosine_factor
from .lora import BLOCK_NORMS, apply_lora, merge_lora, remove_lora, unmerge_lora
from .lora_files import load_lora, save_lora
from .models import GPT2, Config, Transformer, flops_per_token, generate, preset
from .replay import Replay, ReplayMode
from .results import StepOutput
from .step import Divide, TrainStep, token_loss

__all__ = [
    "BLOCK_NORMS",
    "BPETokenizer",
    "Batches",
    "ByteTokenizer",
    "Config",
    "Divide",
    "GPT2",
    "NamedTokenizer",
    "Replay",
    "ReplayMode",
    "StepOutput",
    "TrainStep",
    "Transformer",
    "apply_lora",
    "evaluate",
    "flops_per_token",
    "generate",
    "is_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "load_lora",
    "load_text",
    "make_dataset",
    "merge_lora",
    "preset",
    "remove_lora",
    "save_checkpoint",
    "save_lora",
    "shard",
    "token_loss",
    "train",
    "train_bpe",
    "unmerge_lora",
    "val_batches",
    "warmup_cosine",
    "warmup_cosine_factor",
]
