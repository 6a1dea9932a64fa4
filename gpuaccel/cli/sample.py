"""`gpuaccel sample`: write text with a trained model."""

import pathlib

import torch

from ..backends import default_device
from ..errors import CheckpointError
from ..training import (
    BPETokenizer,
    ByteTokenizer,
    Config,
    generate,
    is_checkpoint,
    latest_checkpoint,
    load_checkpoint,
)
from ..training.checkpoint_file import DTYPE_NAMES, read_checkpoint
from .arguments import add_command, number, path
from .run_folder import MAX_SEED, default_folder, read_description


def add_parser(commands):
    """Add `gpuaccel sample`."""
    parser = add_command(commands, "sample", run, "write text with a trained model")
    parser.add_argument(
        "--checkpoint",
        type=path,
        default=default_folder("tiny"),
        metavar="PATH",
        help="a file, or a run's folder (runs/tiny)",
    )
    parser.add_argument(
        "--prompt", default="def ", metavar="TEXT", help='text to go on from ("def ")'
    )
    parser.add_argument(
        "--tokens",
        type=number(1, 1_000_000),
        default=300,
        metavar="N",
        help="how many to write (300)",
    )
    parser.add_argument(
        "--temperature",
        type=number(0, 1000, float),
        default=0.8,
        metavar="X",
        help="0 takes the likeliest token (0.8)",
    )
    parser.add_argument(
        "--seed",
        type=number(0, MAX_SEED),
        default=0,
        metavar="N",
        help="another seed writes another text (0)",
    )


def run(args) -> int:
    path = pathlib.Path(args.checkpoint).expanduser()
    is_run = path.is_dir() and not is_checkpoint(path)
    checkpoint = latest_checkpoint(path) if is_run else path
    if checkpoint is None or not checkpoint.exists():
        raise CheckpointError(
            f"{path} holds no checkpoint; "
            "expected step-*.safetensors, step-*.sharded, or the folder of a run"
        )
    description = read_description(checkpoint.with_name("run.json"))
    try:
        model = Config(**description["config"]).build()
        model.to(default_device(), _dtype_of(description, checkpoint))
    except (AttributeError, TypeError, ValueError, RuntimeError, StopIteration) as error:
        raise CheckpointError(
            f"{checkpoint.with_name('run.json')} describes no model: {error}; expected what "
            "`gpuaccel train` writes"
        ) from None
    load_checkpoint(checkpoint, model=model, restore_rng=False)
    tokenizer = BPETokenizer(description["bpe"]) if "bpe" in description else ByteTokenizer()
    print(sample_text(model, tokenizer, args.prompt, args.tokens, args.temperature, args.seed))
    return 0


def _dtype_of(description, checkpoint) -> torch.dtype:
    """Of a run's weights. Older runs do not say it, and their checkpoint is read."""
    if "dtype" in description:
        return getattr(torch, description["dtype"])
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    entries = read_checkpoint(checkpoint).entries
    return next(names[dtype] for name, (dtype, _) in entries.items() if name.startswith("model."))


def sample_text(model, tokenizer, prompt, count, temperature, seed) -> str:
    """The prompt and `count` tokens after it."""
    tokens = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))
    tokens = tokens[None].to(next(model.parameters()).device)
    return tokenizer.decode(generate(model, tokens, count, temperature=temperature, seed=seed)[0])
