"""The command line, `gpuaccel train | sample | kernels | doctor`, and `ga.doctor()` for a notebook.

    $ gpuaccel doctor                                     # what runs here, and why; exit status 1 if something is wrong
    $ gpuaccel kernels --arch sm_90                       # registers, shared memory, spills; needs no GPU
    $ gpuaccel train --model tiny --steps 200             # real text, a progress bar, a checkpoint, a sample
    $ gpuaccel train --model tiny --steps 200 --resume    # continues, bit for bit, where a killed run stopped
    $ gpuaccel train --nproc 2                            # two ranks of this machine; torchrun ... -m gpuaccel train on several
    $ gpuaccel sample --prompt "def "

Exit status: 0 done, 1 an error that is yours to mend (one line on stderr), 2 wrong usage, 130 stopped with Ctrl-C
(after the step under way, with a checkpoint written).
"""

import argparse
import contextlib
import dataclasses
import functools
import html
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

from ..errors import ArgumentError, CheckpointError, GpuaccelError, RankError

OUT = "runs/{model}"
# What a preset trains with unless told otherwise: tokens, sequences per optimizer step, learning rate.
VAL_BATCHES = 8
RECIPES = {
    "tiny": ("byte", 8, 3e-3),
    "llama-350m": ("bpe", 16, 3e-4),
    "gpt2-124m": ("bpe", 16, 6e-4),
}


# ---- doctor ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doctor:
    """What runs here, and why. `facts` name -> value, in reading order; `problems` in words, empty when all is well."""

    facts: "dict[str, str | list | None]"
    problems: "list[str]"

    def rows(self):
        """(name, text) of every fact, then of every problem."""
        texts = {
            name: " ".join(value)
            if isinstance(value, list)
            else "none"
            if value is None
            else str(value)
            for name, value in self.facts.items()
        }
        return [*texts.items(), *(("problem", problem) for problem in self.problems)]

    def __str__(self):
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    __repr__ = __str__

    def _repr_html_(self):
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self.rows()
        )
        return f"<table>{cells}</table>"


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache_fact():
    """The cache folder and what is in it, in words; None when it cannot be written."""
    from ..backends import cache_dir

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = cache_dir()
    if folder is None:
        return None
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    kinds = Counter(path.relative_to(folder).parts[0] for path in files)
    held = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "empty"
    home, size = str(pathlib.Path.home()) + os.sep, sum(path.stat().st_size for path in files)
    return f"{str(folder).replace(home, '~' + os.sep, 1)} ({held}, {size / 1e6:.1f} MB)"


def doctor() -> Doctor:
    """Look at this machine: backend and reason, GPU, driver, NVRTC, cache, versions. Changes nothing, never raises.

    `print(ga.doctor())` is a table in text; as the last line of a notebook cell it is one in HTML."""
    import torch

    from .. import __version__
    from ..backends import backend, find_compiler, find_driver
    from ..compiler import nvrtc

    problems = []

    def attempt(look):
        try:
            return look()
        except GpuaccelError as error:
            problems.append(str(error))

    choice, library = attempt(backend), attempt(nvrtc.library)
    driver, (compiler, why) = find_driver()[0], find_compiler()
    if library is not None and choice is not None and choice.name == "cuda":
        attempt(lambda: nvrtc.check_driver(driver))
        attempt(lambda: nvrtc.check_arch(choice.arch))
    cache, built = _cache_fact(), torch.version.cuda
    if cache is None:
        problems.append(
            "the cache folder cannot be written, so kernels are compiled every time: set GPUACCEL_CACHE"
        )
    facts = {
        "gpuaccel": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (built {f'for CUDA {built}' if built else 'without CUDA'})",
        "backend": choice and choice.name,
        "reason": choice and choice.reason,
        "GPU policy": choice.policy if choice else os.environ.get("GPUACCEL_GPU", "auto"),
        "device": choice and choice.device,
        "architecture": choice and choice.arch,
        "driver": f"for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else None,
        "NVRTC": library and f"{library.version[0]}.{library.version[1]}",
        "NVRTC library": library
        and "/".join(
            pathlib.Path(library.path).parts[-4:]
        ),  # the tail says which wheel; no home folders
        "NVRTC writes": library and list(library.archs),
        "C++ compiler": f"{compiler} (runs kernels on the CPU)"
        if compiler
        else f"none: {why}; install g++ or clang++, or pip install ziglang",
        "cuda-core": _version("cuda-core"),
        "cuda-bindings": _version("cuda-bindings"),
        "cache": cache,
    }
    return Doctor(facts, problems)


def doctor_command(args):
    found = doctor()
    print(json.dumps({**found.facts, "problems": found.problems}, indent=2) if args.json else found)
    return 1 if found.problems else 0


# ---- kernels --------------------------------------------------------------------------------------------------------


def _kernels_of(file, defines):
    """Every kernel of a topic of kernels_cu ("accumulate"), or of a .cu file anywhere."""
    from ..compiler.kernel import Kernel, compile, kernel_names, kernel_root

    topic, path = pathlib.Path(file).name.removesuffix(".cu"), pathlib.Path(file)
    ours = kernel_root() / f"{topic}.cu"
    if not path.is_file() or path.resolve() == ours.resolve():
        names = (
            kernel_names(ours.read_text()) if ours.is_file() else [topic]
        )  # Kernel says which files there are
        return [Kernel(topic, name, **defines) for name in names]
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read as text: {error}") from None
    names = kernel_names(text)
    if not names:
        raise ArgumentError(f"{path} has no kernel; expected a function declared __global__ void")
    return [compile(text, name, filename=path.name, **defines) for name in names]


def kernels_command(args):
    from ..backends import backend
    from ..compiler import nvrtc
    from ..compiler.kernel import kernel_files

    arch = nvrtc.check_arch(args.arch or backend().arch or "sm_90")
    rows = []
    for file in [args.file] if args.file else [path.stem for path in kernel_files()]:
        for kernel in _kernels_of(file, dict(args.define)):
            cost = kernel.resources(arch)
            rows.append(
                (
                    kernel.filename,
                    kernel.name,
                    cost.registers,
                    cost.shared_bytes,
                    cost.stack_bytes,
                    cost.spill_store_bytes,
                    cost.spill_load_bytes,
                    cost.cubin_bytes,
                )
            )
    head = ("file", "kernel", "registers", "shared", "stack", "spill st", "spill ld", "cubin")
    print(f"{arch}, {nvrtc.library()}; registers per thread, the rest in bytes")
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print(
            "  ".join(
                f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}"
                for i, (cell, w) in enumerate(zip(row, widths))
            )
        )
    return 0


# ---- train and sample -----------------------------------------------------------------------------------------------


class Progress:
    """One line on stderr, written over at most ten times a second; without a terminal, a line every ten steps."""

    def __init__(self, total, done=0, quiet=False, stream=None):
        self.total, self.first, self.quiet, self.stream = total, done, quiet, stream or sys.stderr
        self.live = self.stream.isatty()
        self.began, self.shown, self.width = time.perf_counter(), 0.0, 0

    def show(self, step, reading):
        """Call once per step, with the meter's reading."""
        if self.quiet:
            return
        last, now = step == self.total, time.perf_counter()
        if not last and (now - self.shown < 0.1 if self.live else step % 10):
            return
        self.shown = now
        left = (now - self.began) / max(step - self.first, 1) * (self.total - step)
        parts = [f"step {step:>{len(str(self.total))}}/{self.total}"]
        if self.live:
            filled = round(24 * step / self.total)
            parts.append("[" + "#" * filled + "." * (24 - filled) + "]")
        parts += [f"loss {reading.loss:.3f}"] if reading.loss is not None else []
        parts += [f"{reading.tokens_per_s:,.0f} tokens/s"] if reading.tokens_per_s else []
        parts += [f"MFU {reading.mfu:.1%}"] if reading.mfu else []
        parts += [f"{int(left) // 60}:{int(left) % 60:02d} left"] if not last else []
        line = "  ".join(parts)
        self.stream.write(f"\r{line:<{self.width}}" if self.live else line + "\n")
        self.stream.flush()
        self.width = len(line)

    def close(self):
        """End the line, so that what follows starts on its own."""
        if self.live and self.width:
            self.stream.write("\n")
            self.width = 0


class StopAfterStep:
    """Inside the block, Ctrl-C sets `.asked` and lets the step under way finish; a second Ctrl-C stops at once."""

    asked = False

    def __enter__(self):
        try:
            self.before = signal.signal(signal.SIGINT, self._ask)
        except ValueError:  # only the main thread may; elsewhere Ctrl-C stays as it was
            self.before = None
        return self

    def _ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_):
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


# The options that decide a run's numbers, kept in <out>/run.json beside the checkpoints.
NUMBERS = ("model", "text", "batch", "seq", "micro_batches", "accumulate", "lr", "seed")


def _complete(args):
    """Fill in what was left out, from the preset's recipe. Returns the kind of tokens."""
    from ..training.models import preset

    tokens, batch, lr = RECIPES[args.model]
    args.batch, args.seq = args.batch or batch, args.seq or preset(args.model).T
    args.lr = lr if args.lr is None else args.lr
    args.out = pathlib.Path(args.out or OUT.format(model=args.model)).expanduser()
    args.metrics = args.metrics or args.out / "metrics.jsonl"
    return tokens


def _read_run(path):
    """What a run.json says."""
    try:
        description = json.loads(path.read_text())
        description["config"]
        return description
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}, which `gpuaccel train` writes for a run, cannot be read: {error!r}"
        ) from None


def _open_run(args, description, writes=True):
    """Make or check a run's folder: a new run does not start over an old one, a resumed one has to be the same run."""
    from ..files import written_aside
    from ..training.checkpoint import latest_checkpoint

    kept, last = args.out / "run.json", latest_checkpoint(args.out)
    if last is not None and not args.resume:
        raise CheckpointError(
            f"{args.out} already holds a run ({last.name}): --resume goes on with it, --out takes another folder"
        )
    if last is not None:
        before = _read_run(kept)
        changed = [
            f"--{name.replace('_', '-')} was {before.get(name)}, now {description[name]}"
            for name in NUMBERS
            if before.get(name) != description[name]
        ]
        if changed:
            raise CheckpointError(
                f"{args.out} holds another run and cannot be resumed like this: {'; '.join(changed)}"
            )
    if not writes:
        return
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with written_aside(kept) as file:
            file.write(json.dumps(description, indent=1).encode())
    except OSError as error:
        raise CheckpointError(
            f"{args.out} cannot be written ({error.strerror}): --out takes another folder"
        ) from error


def train_command(args):
    if args.nproc and "RANK" in os.environ:
        raise ArgumentError(
            f"--nproc {args.nproc} inside of a rank that torchrun (or another launcher) has started; expected one of the two"
        )
    if (args.nproc or 1) > 1:
        from ..distributed.spawn import launch
        from ..training.checkpoint import latest_checkpoint

        kind = {"auto": None, "cuda": "nccl"}.get(args.device, "gloo")
        before = _complete(args) and latest_checkpoint(args.out)
        try:
            return launch(
                _train_rank,
                args.nproc,
                (args,),
                backend=kind,
                timeout=args.timeout or 60.0,
                start=600.0,
                after_step=True,
            )[0]
        except RankError as error:
            last = latest_checkpoint(args.out)
            raise RankError(
                f"{error}; --resume goes on from {last.name}" if last != before else str(error)
            ) from error
    return _train_rank(args)


def _train_rank(args):
    from ..backends import use_backend

    backend = {"auto": None, "cpu": "torch"}.get(args.device, args.device)
    with use_backend(backend) if backend else contextlib.nullcontext():
        return _train(args)


def _train(args):
    import torch

    from ..backends import backend, default_device
    from ..distributed.config import Distributed
    from ..measure.meter import Meter, peak_flops
    from ..optim.adamw import AdamW
    from ..optim.arena import Arena
    from ..training.data import Batches, make_dataset, val_batches
    from ..training.loop import evaluate, train, warmup_cosine
    from ..training.models import flops_per_token, preset
    from ..training.step import TrainStep

    # Of the ranks that torchrun or --nproc has started, or this process alone.
    how = Distributed(ordered=args.ordered, sharded=args.sharded, timeout=args.timeout or 600.0)
    tokens, device, ranks, first_rank = _complete(args), default_device(), how.world, how.rank == 0
    if args.micro_batches > args.batch:
        raise ArgumentError(
            f"--micro-batches is {args.micro_batches}, more than the {args.batch} sequences of --batch"
        )
    parts = args.micro_batches if args.micro_batches > 1 else ranks  # over all ranks
    if ranks > 1 and (parts % ranks or args.batch % parts):
        raise ArgumentError(
            f"--batch {args.batch} in --micro-batches {parts} cannot be divided among {ranks} ranks; expected a multiple of the ranks as "
            "--micro-batches, and a multiple of that as --batch"
        )
    parts, batch = parts // ranks, args.batch // ranks  # of a rank
    data = make_dataset(args.text, tokens)
    # A text too small for all of a preset's tokens gets a model of those there are: every one it writes can be read.
    config = preset(args.model, T=max(args.seq, preset(args.model).T), vocab=data.vocab_size)
    batches = Batches(
        data.train,
        batch,
        args.seq,
        seed=args.seed,
        device=device,
        rank=how.rank,
        ranks=ranks,
        micro_batches=parts if ranks > 1 else 1,
    )
    val = val_batches(data.val, args.batch, args.seq, limit=VAL_BATCHES, device=device)
    description = {name: getattr(args, name) for name in NUMBERS} | {
        "config": dataclasses.asdict(config)
    }
    if tokens == "bpe":
        description["bpe"] = data.tokenizer.to_json()
    _open_run(args, description, first_rank)

    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if device.type == "cuda" and args.model != "tiny" else torch.float32
    model = config.build().to(device, dtype)
    arena = Arena(model)
    opt = AdamW(arena, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    meter = Meter(device, flops_per_token(config, args.seq), peak_flops(device, dtype))
    step = TrainStep(
        model,
        opt,
        micro_batches=parts,
        accumulate=args.accumulate,
        compile=args.compile,
        meter=meter,
        distributed=how,
        scheduler=warmup_cosine(opt, max(1, args.steps // 10), args.steps),
        replay=args.replay,
        deterministic=args.deterministic,
    )
    if first_rank:
        print(
            f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters in {dtype}, {backend()}\n"
            + f"{how}\n" * (ranks > 1)
            + f"{len(data.train):,} tokens of {data.source}; checkpoints and metrics in {args.out}",
            file=sys.stderr,
        )

    progress, first, val_loss, reading = None, None, None, None
    with (
        StopAfterStep() as stop,
        contextlib.closing(
            train(
                step,
                batches,
                args.steps,
                val=val,
                val_every=args.val_every,
                metrics=args.metrics,
                checkpoint_dir=args.out,
                checkpoint_every=args.checkpoint_every,
                resume=args.resume,
            )
        ) as readings,
    ):
        for reading in readings:
            progress = progress or Progress(
                args.steps, reading.step - 1, args.no_progress or not first_rank
            )
            first = reading.loss if first is None else first
            val_loss = val_loss if reading.val_loss is None else reading.val_loss
            progress.show(reading.step, reading)
            if (
                stop.asked
                and ranks == 1
                or step.reducer is not None
                and step.reducer.asked_to_stop()
            ):
                stop.asked = True
                break
    if progress:
        progress.close()
    if stop.asked and step.count < args.steps:
        if not first_rank:
            return 130
        print(
            f"gpuaccel: stopped after step {step.count}, checkpoint written; --resume goes on",
            file=sys.stderr,
        )
        return 130
    if not first_rank:
        return 0
    last = meter.finish()
    if reading is None:
        print(f"{args.out} already is at step {step.count}: nothing to do, unless --steps is more")
        val_loss = evaluate(model, val)
    else:
        print(
            f"train loss {first:.3f} -> {last.loss:.3f}   {last.tokens:,} tokens in {last.seconds:.1f} s",
            end="   ",
        )
    print(f"val loss {val_loss:.3f}")
    print(_sample(model, data.tokenizer, "def ", 200, 0.8, args.seed))
    return 0


def _sample(model, tokenizer, prompt, count, temperature, seed):
    """The prompt and `count` tokens after it, as text."""
    import torch

    from ..training.models import generate

    start = torch.from_numpy(tokenizer.encode(prompt or "\n").astype("int64"))[None].to(
        next(model.parameters()).device
    )
    return tokenizer.decode(generate(model, start, count, temperature=temperature, seed=seed)[0])


def sample_command(args):
    from ..backends import default_device
    from ..training.checkpoint import latest_checkpoint, load_checkpoint
    from ..training.data import BPETokenizer, ByteTokenizer
    from ..training.models import Config

    path = pathlib.Path(args.checkpoint).expanduser()
    found = latest_checkpoint(path) if path.is_dir() else path
    if found is None or not found.is_file():
        raise CheckpointError(
            f"{path} holds no checkpoint; expected a file step-*.safetensors, or the folder of a run"
        )
    description = _read_run(found.with_name("run.json"))
    model = Config(**description["config"]).build().to(default_device())
    load_checkpoint(found, model=model, restore_rng=False)
    tokenizer = BPETokenizer(description["bpe"]) if "bpe" in description else ByteTokenizer()
    print(_sample(model, tokenizer, args.prompt, args.tokens, args.temperature, args.seed))
    return 0


# ---- the command line -----------------------------------------------------------------------------------------------


def _at_least(least, kind=int):
    def parse(text):
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"is {text}, expected at least {least}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def _macro(text):
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"is {text!r}, expected NAME=VALUE such as GRAD_T=bf16")
    return name, value


def _parser():
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="gpuaccel", description="Train on real text, and look at what runs and why."
    )
    parser.add_argument("--version", action="version", version=f"gpuaccel {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name, run, words):
        made = commands.add_parser(
            name,
            help=words,
            description=words[0].upper() + words[1:] + ".",
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        )
        made.set_defaults(run=run)
        return made

    add = command(
        "train", train_command, "train a transformer on text; a killed run resumes bit for bit"
    ).add_argument
    add(
        "--model",
        choices=RECIPES,
        default="tiny",
        help="preset; tiny, the default, trains on two CPU cores",
    )
    add(
        "--steps",
        type=_at_least(1),
        default=200,
        metavar="N",
        help="steps in all, before a resume and after (200)",
    )
    add(
        "--text",
        metavar="PATH",
        help="a text file, or a folder of *.txt, *.md, *.py (Python's standard library)",
    )
    add("--batch", type=_at_least(1), metavar="N", help="sequences per optimizer step (by preset)")
    add("--seq", type=_at_least(1), metavar="T", help="tokens per sequence (by preset)")
    add(
        "--micro-batches",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="parts that a batch is divided into, over all ranks (1 each)",
    )
    add(
        "--accumulate",
        choices=("host", "autograd", "arena", "fused"),
        default="arena",
        help="how gradients are added up (arena)",
    )
    add("--lr", type=_at_least(0, float), metavar="X", help="learning rate (by preset)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the weights, the order of the text and the sample (0)",
    )
    add("--out", metavar="DIR", help="folder for checkpoints (runs/MODEL)")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --out, if there is one",
    )
    add("--metrics", metavar="FILE", help="JSON lines, one per step (metrics.jsonl in --out)")
    add(
        "--val-every",
        type=_at_least(1),
        default=50,
        metavar="N",
        help="steps between validation losses (50)",
    )
    add(
        "--checkpoint-every",
        type=_at_least(1),
        default=50,
        metavar="N",
        help="steps between checkpoints (50)",
    )
    add("--no-progress", action="store_true", help="no progress bar")
    add("--compile", action="store_true", help="torch.compile the model")
    add(
        "--replay",
        choices=("eager", "graph"),
        default="eager",
        help="graph: the whole step as one CUDA graph, the same bits (eager)",
    )
    add("--deterministic", action="store_true", help="the same bits in every run, also on a GPU")
    add(
        "--nproc",
        type=_at_least(1),
        metavar="N",
        help="ranks on this machine, which share each batch: a GPU each, or CPUs (1)",
    )
    add(
        "--ordered",
        action="store_true",
        help="ranks: the same bits for any number of them (with equal --micro-batches)",
    )
    add(
        "--sharded",
        action="store_true",
        help="ranks: each keeps its share of the optimizer's memory",
    )
    add(
        "--timeout",
        type=_at_least(1, float),
        metavar="S",
        help="ranks: seconds that the others wait for one (--nproc: 60; torchrun: 600)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "simt", "cuda"),
        default="auto",
        help="where to train; simt: on the CPU with our kernels (auto)",
    )

    add = command("sample", sample_command, "write text with a trained model").add_argument
    add(
        "--checkpoint",
        default=OUT.format(model="tiny"),
        metavar="PATH",
        help="a file, or a run's folder (runs/tiny)",
    )
    add("--prompt", default="def ", metavar="TEXT", help='text to go on from ("def ")')
    add("--tokens", type=_at_least(1), default=300, metavar="N", help="how many to write (300)")
    add(
        "--temperature",
        type=_at_least(0, float),
        default=0.8,
        metavar="X",
        help="0 takes the likeliest token (0.8)",
    )
    add("--seed", type=int, default=0, metavar="N", help="another seed writes another text (0)")

    add = command(
        "kernels", kernels_command, "compile every kernel and show what it costs; needs no GPU"
    ).add_argument
    add(
        "file",
        nargs="?",
        help="a topic of kernels_cu such as accumulate, or a .cu file (default: all of kernels_cu)",
    )
    add("--arch", help="architecture such as sm_90 (default: this GPU's, else sm_90)")
    add(
        "-D",
        dest="define",
        type=_macro,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="GRAD_T=bf16, say",
    )

    add = command(
        "doctor", doctor_command, "show what runs here, and why; status 1 if something is wrong"
    ).add_argument
    add("--json", action="store_true", help="as JSON")
    return parser


def main(argv=None) -> int:
    """Run one command line (default: sys.argv) and return its exit status."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said what it had to say
        return stop.code or 0
    if hasattr(sys.stdout, "reconfigure"):  # a sample may hold characters that the terminal has not
        sys.stdout.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"gpuaccel: {message}", file=sys.stderr)
        try:
            return args.run(args)
        except GpuaccelError as error:
            print(f"gpuaccel: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("gpuaccel: stopped", file=sys.stderr)
            return 130
        except BrokenPipeError:  # `gpuaccel kernels | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
