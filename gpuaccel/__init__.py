"""gpuaccel: what happens to a gradient between `loss.backward()` and the new weight.

This file only hands names on. A function may share its module's name (ga.backend, ga.ledger): importing it here makes
the function the one that `ga.` finds.
"""
__version__ = "0.1.0"

from . import errors, nvrtc, simt  # noqa: F401
from .accumulate import MODES, GradientAccumulator, accumulate_, reference_accumulate
from .adamw import reference_adamw
from .arena import Arena
from .backend import backend, cache_dir, default_device, deterministic, use_backend
from .checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from .cli import doctor
from .clip import ClipState, clip_grad_norm_, clip_grads_
from .data import Batches, ByteTokenizer, load_text, make_dataset, shard, train_bpe, val_batches
from .distributed import Distributed
from .embedding import Embedding, Encoder, deterministic_embeddings
from .encoder import encoder_backward, reference_encoder, reference_encoder_backward
from .errors import ArgumentError, BackendError, CaptureError, CheckpointError, CompileError, DataError, GpuaccelError, KernelError, NonFiniteError, RankError
from .exercises import check, hint, solution
from .graphs import GraphedStep
from .kernel import Kernel, compile, kernel_names
from .launch import launch
from .ledger import Ledger, ledger
from .lora import BLOCK_NORMS, LoRALinear, apply_lora, load_lora, merge_lora, remove_lora, save_lora, unmerge_lora
from .magics import load_ipython_extension
from .meter import LateValue, Meter, Reading, StageTimer, peak_flops
from .models import GPT2, Config, Transformer, flops_per_token, generate, preset
from .optimizer import AdamW
from .poly_attention import PolyAttention, poly_attention, reference_poly_attention
from .richards import RichardsCurve, RichardsGLU
from .segments import Segments, find_segments
from .show import show
from .simt import checked
from .step import TrainStep, token_loss
from .train import evaluate, train, warmup_cosine
from .widgets import LiveThroughput

__all__ = [
    "MODES", "GradientAccumulator", "accumulate_", "reference_accumulate", "AdamW", "reference_adamw", "Arena", "backend", "cache_dir", "default_device",
    "deterministic", "GraphedStep", "CaptureError", "use_backend", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "doctor", "Batches", "ByteTokenizer", "load_text",
    "make_dataset", "shard", "train_bpe", "val_batches", "ArgumentError", "BackendError", "CheckpointError", "CompileError", "DataError",
    "GpuaccelError", "KernelError", "check", "checked", "hint", "solution", "show", "Kernel", "compile", "kernel_names", "Ledger", "ledger",
    "load_ipython_extension", "BLOCK_NORMS", "LoRALinear", "apply_lora", "load_lora", "merge_lora", "remove_lora", "save_lora",
    "unmerge_lora", "ClipState", "clip_grad_norm_", "clip_grads_", "NonFiniteError", "LateValue", "Meter", "Reading", "StageTimer", "peak_flops",
    "Config", "GPT2", "Transformer", "flops_per_token", "generate", "preset",
    "PolyAttention", "poly_attention", "reference_poly_attention", "RichardsCurve", "RichardsGLU", "Embedding", "Encoder", "Segments", "deterministic_embeddings", "encoder_backward", "find_segments", "reference_encoder", "reference_encoder_backward",
    "Distributed", "RankError", "launch", "TrainStep", "evaluate", "token_loss", "train", "warmup_cosine", "LiveThroughput",
]
