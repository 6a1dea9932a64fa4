"""gpuaccel: what happens to a gradient between `loss.backward()` and the new weight.

This file only hands names on; CONTRIBUTING.md says what is in which room (folder). What notebooks and the command line
need (`learn`, `cli`) is loaded when one of its names is first used.
"""

__version__ = "0.2.0"

import importlib
from typing import TYPE_CHECKING

from . import errors, simt  # noqa: F401
from .backends import backend, cache_dir, default_device, deterministic, use_backend
from .compiler import nvrtc  # noqa: F401
from .compiler.kernel import Kernel, compile, kernel_names
from .distributed.config import Distributed
from .distributed.spawn import launch
from .errors import (
    ArgumentError,
    BackendError,
    CaptureError,
    CheckpointError,
    CompileError,
    DataError,
    GpuaccelError,
    KernelError,
    NonFiniteError,
    RankError,
)
from .graphs.graphed_step import GraphedStep
from .measure import LateValue, Ledger, Meter, Reading, StageTimer, ledger, peak_flops
from .nn.embedding import Embedding, Encoder, deterministic_embeddings
from .nn.lora import LoRALinear
from .nn.poly_attention import PolyAttention, poly_attention, reference_poly_attention
from .nn.richards_glu import RichardsCurve, RichardsGLU
from .ops.accumulate import accumulate_, reference_accumulate
from .ops.adamw import reference_adamw
from .ops.clip import ClipState
from .ops.embedding_backward import encoder_backward, reference_encoder, reference_encoder_backward
from .ops.token_sort import Segments, find_segments
from .optim.accumulate import MODES, GradientAccumulator
from .optim.adamw import AdamW
from .optim.arena import Arena
from .optim.clip import clip_grad_norm_, clip_grads_
from .simt import checked
from .training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .training.data import (
    Batches,
    ByteTokenizer,
    load_text,
    make_dataset,
    shard,
    train_bpe,
    val_batches,
)
from .training.loop import evaluate, train, warmup_cosine
from .training.lora import BLOCK_NORMS, apply_lora, merge_lora, remove_lora, unmerge_lora
from .training.lora_files import load_lora, save_lora
from .training.models import GPT2, Config, Transformer, flops_per_token, generate, preset
from .training.step import TrainStep, token_loss

if TYPE_CHECKING:
    from .cli.doctor import doctor
    from .learn import LiveThroughput, check, hint, load_ipython_extension, show, solution

_LATER = {
    "doctor": "cli",
    "check": "learn",
    "hint": "learn",
    "solution": "learn",
    "load_ipython_extension": "learn",
    "show": "learn",
    "LiveThroughput": "learn",
}

__all__ = [
    "MODES",
    "GradientAccumulator",
    "accumulate_",
    "reference_accumulate",
    "AdamW",
    "reference_adamw",
    "Arena",
    "backend",
    "cache_dir",
    "default_device",
    "deterministic",
    "GraphedStep",
    "CaptureError",
    "use_backend",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "doctor",
    "Batches",
    "ByteTokenizer",
    "load_text",
    "make_dataset",
    "shard",
    "train_bpe",
    "val_batches",
    "ArgumentError",
    "BackendError",
    "CheckpointError",
    "CompileError",
    "DataError",
    "GpuaccelError",
    "KernelError",
    "check",
    "checked",
    "hint",
    "solution",
    "show",
    "Kernel",
    "compile",
    "kernel_names",
    "Ledger",
    "ledger",
    "load_ipython_extension",
    "BLOCK_NORMS",
    "LoRALinear",
    "apply_lora",
    "load_lora",
    "merge_lora",
    "remove_lora",
    "save_lora",
    "unmerge_lora",
    "ClipState",
    "clip_grad_norm_",
    "clip_grads_",
    "NonFiniteError",
    "LateValue",
    "Meter",
    "Reading",
    "StageTimer",
    "peak_flops",
    "Config",
    "GPT2",
    "Transformer",
    "flops_per_token",
    "generate",
    "preset",
    "PolyAttention",
    "poly_attention",
    "reference_poly_attention",
    "RichardsCurve",
    "RichardsGLU",
    "Embedding",
    "Encoder",
    "Segments",
    "deterministic_embeddings",
    "encoder_backward",
    "find_segments",
    "reference_encoder",
    "reference_encoder_backward",
    "Distributed",
    "RankError",
    "launch",
    "TrainStep",
    "evaluate",
    "token_loss",
    "train",
    "warmup_cosine",
    "LiveThroughput",
]


# Hidden from type checkers, to which it would say that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__():
    return sorted({*globals(), *__all__})
