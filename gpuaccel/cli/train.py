"""`gpuaccel train`: train a transformer on text, in one process or on several ranks."""

import contextlib
import dataclasses
import math
import os
import pathlib
import shlex
import sys
import threading
from typing import NamedTuple, get_args

import torch
from tqdm import tqdm

from ..backends import backend, default_device, default_dtype, use_backend
from ..distributed import Distributed, RankBackend, launch
from ..errors import ArgumentError, CheckpointError, RankError
from ..measure import Meter, peak_flops
from ..optim import AdamW, Arena
from ..training import (
    Batches,
    BPETokenizer,
    NamedTokenizer,
    ReplayMode,
    TrainStep,
    evaluate,
    flops_per_token,
    generate,
    latest_checkpoint,
    make_dataset,
    preset,
    train,
    val_batches,
    warmup_cosine,
)
from .arguments import add_command, number, path
from .run_folder import (
    MAX_SEED,
    METRICS_FILE,
    RUN_OPTIONS,
    check_run,
    lock_run,
    write_run,
)
from .signals import INTERRUPTED, StopAfterStep

VAL_BATCHES = 8
NEWEST = True  # --resume without a name


class Recipe(NamedTuple):
    """What a preset trains with unless told otherwise."""

    tokenizer: NamedTokenizer
    batch: int  # sequences per optimizer step
    lr: float


RECIPES = {
    "tiny": Recipe("byte", 8, 3e-3),
    "llama-350m": Recipe("bpe", 16, 3e-4),
}


def add_parser(commands):
    """Add `gpuaccel train`."""
    parser = add_command(
        commands, "train", run, "train a transformer on text; a killed run resumes bit for bit"
    )
    add = parser.add_argument

    def value(name, type, metavar, help, default=None):
        add(name, type=type, metavar=metavar, help=help, default=default)

    def choice(name, choices, default, help):
        add(name, choices=choices, default=default, help=help)

    def switch(name, help):
        add(name, action="store_true", help=help)

    choice("--model", RECIPES, "tiny", "preset; tiny, the default, trains on two CPU cores")
    value("--steps", number(1), "N", "steps in all, before a resume and after (200)", 200)
    text = "a text file, or a folder of *.txt, *.md, *.py (Python's standard library)"
    value("--text", path, "PATH", text)
    value("--batch", number(1), "N", "sequences per optimizer step (by preset)")
    value("--seq", number(1), "T", "tokens per sequence (by preset)")
    parts = "parts that a batch is divided into, over all ranks (1 each)"
    value("--micro-batches", number(1), "N", parts, 1)
    # A step of AdamW changes a weight by about the learning rate.
    value("--lr", number(0, 1, float), "X", "learning rate (by preset)")
    seed = "of the weights, the order of the text and the sample (0)"
    value("--seed", number(0, MAX_SEED), "N", seed, 0)
    value("--out", path, "DIR", "folder for checkpoints (runs/MODEL)")
    add(
        "--resume",
        type=path,
        nargs="?",
        const=NEWEST,
        metavar="CHECKPOINT",
        help="continue from this checkpoint in --out (by default the newest, if there is one)",
    )
    value("--val-every", number(1), "N", "steps between validation losses (50)", 50)
    value("--checkpoint-every", number(1), "N", "steps between checkpoints (50)", 50)
    switch("--no-progress", "no progress bar")
    switch("--compile", "torch.compile the model")
    replay = "graph: the whole step as one CUDA graph, bit-identical to eager (eager)"
    choice("--replay", get_args(ReplayMode), "eager", replay)
    switch("--deterministic", "every run is bit-identical, also on a GPU")
    ranks = "ranks on this machine, which share each batch: a GPU each, or CPUs (1)"
    value("--nproc", number(1, 256), "N", ranks)
    switch("--ordered", "ranks: bit-identical for any number of them (with equal --micro-batches)")
    switch(
        "--sharded",
        "ranks: each keeps its share of the optimizer's memory, and writes it to a checkpoint",
    )
    waits = "ranks: seconds that the others wait for one (--nproc: 60; torchrun: 600)"
    value("--timeout", number(1, 1_000_000, float), "S", waits)
    devices = ("auto", "cpu", "simt", "cuda")
    choice("--device", devices, "auto", "where to train; simt: on the CPU with our kernels (auto)")


def run(args) -> int:
    if args.nproc and "RANK" in os.environ:
        raise ArgumentError(
            f"--nproc {args.nproc} inside of a rank that torchrun (or another launcher) has "
            "started; expected one of the two"
        )
    _fill_in_defaults(args)
    several = args.nproc is not None and args.nproc > 1
    _micro_batches_per_rank(args, args.nproc if several else 1)
    # with torchrun rank 0 writes to the folder
    lock = lock_run(args.out) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()
    with lock:
        return _launch_ranks(args) if several else _train_rank(args)


def _launch_ranks(args) -> int:
    """Train on args.nproc processes of this machine."""
    process_group: RankBackend | None = {"auto": None, "cuda": "nccl"}.get(args.device, "gloo")
    checkpoint_before = latest_checkpoint(args.out)
    try:
        statuses = launch(
            _train_rank,
            args.nproc,
            (args,),
            backend=process_group,
            timeout=args.timeout or 60.0,
            start=600.0,
            after_step=True,
        )
    except KeyboardInterrupt:
        raise _stopped_at_once(args.out) from None
    except RankError as error:
        checkpoint = latest_checkpoint(args.out)
        if checkpoint is None or checkpoint == checkpoint_before:
            # an older checkpoint may be of a run that this one refused to write over
            raise
        hint = f"--resume continues from {checkpoint.name}"
        raise RankError(f"{error}; {hint}") from error
    return statuses[0]


def _train_rank(args) -> int:
    """Train in this process: one rank of several, or all there is."""
    name = {"auto": None, "cpu": "torch"}.get(args.device, args.device)
    with use_backend(name) if name else contextlib.nullcontext():
        return _train(args)


def _train(args) -> int:
    # the ranks that torchrun or --nproc has started, or this process alone
    distributed = Distributed(
        ordered=args.ordered, sharded=args.sharded, timeout=args.timeout or 600.0
    )
    ranks = distributed.world
    is_first_rank = distributed.rank == 0
    device = default_device()
    micro_batches = _micro_batches_per_rank(args, ranks)

    tokenizer_kind = RECIPES[args.model].tokenizer
    data = make_dataset(args.text, tokenizer_kind)
    # A text with fewer tokens than the preset gets a smaller vocabulary: the model then writes only
    # tokens that can be decoded.
    config = preset(args.model, T=max(args.seq, preset(args.model).T), vocab=data.vocab_size)
    batches = Batches(
        data.train,
        args.batch // ranks,
        args.seq,
        seed=args.seed,
        device=device,
        rank=distributed.rank,
        ranks=ranks,
        micro_batches=micro_batches if ranks > 1 else 1,
    )
    if args.batch > batches.sequences:
        raise ArgumentError(
            f"--batch is {args.batch}, and the text has {batches.sequences} sequences of "
            f"{args.seq} tokens; expected 1 to {batches.sequences}"
        )
    val = val_batches(data.val, args.batch, args.seq, limit=VAL_BATCHES, device=device)
    dtype = torch.float32 if args.model == "tiny" else default_dtype()
    description = {name: getattr(args, name) for name in RUN_OPTIONS}
    description["dtype"] = str(dtype).removeprefix("torch.")
    description["steps"] = args.steps
    description["config"] = dataclasses.asdict(config)
    if isinstance(data.tokenizer, BPETokenizer):
        description["bpe"] = data.tokenizer.to_json()
    checkpoint = _checkpoint_to_resume(args)
    previous = check_run(args.out, description, args.resume is not None)
    if is_first_rank and checkpoint is None:
        write_run(args.out, description)

    torch.manual_seed(args.seed)
    model = config.build().to(device, dtype)
    optimizer = AdamW(Arena(model), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    meter = Meter(device, flops_per_token(config, args.seq), peak_flops(device, dtype))
    step = TrainStep(
        model,
        optimizer,
        micro_batches=micro_batches,
        compile=args.compile,
        meter=meter,
        distributed=distributed,
        scheduler=warmup_cosine(optimizer, max(1, args.steps // 10), args.steps),
        replay=args.replay,
        deterministic=args.deterministic,
    )
    if is_first_rank:
        parameters = sum(p.numel() for p in model.parameters())
        print(
            f"{args.model}: {parameters:,} parameters in {dtype}, {backend()}\n"
            + (f"{distributed}\n" if ranks > 1 else "")
            + f"{len(data.train):,} tokens of {data.source}; "
            f"checkpoints and metrics in {args.out}",
            file=sys.stderr,
        )

    def after_first_step(done):
        # A resume that fails leaves run.json as it was.
        if is_first_rank and checkpoint is not None:
            before = previous.get("steps")
            if before not in (None, args.steps):
                print(
                    f"gpuaccel: --steps was {before}, now {args.steps}: from step {done + 2} the "
                    f"learning rate is that of a run of {args.steps} steps",
                    file=sys.stderr,
                )
            write_run(args.out, description)

    try:
        result = _run_steps(
            args, step, batches, val, ranks, is_first_rank, checkpoint, after_first_step
        )
        return _report(args, step, result, val, data.tokenizer) if is_first_rank else result.status
    except KeyboardInterrupt:
        raise _stopped_at_once(args.out) from None
    except CheckpointError as error:
        if not error.older:
            raise
        # The last --resume counts.
        words = [word for word in args.words if args.resume != NEWEST or word != "--resume"]
        command = shlex.join([*words, "--resume", error.older[0].name])
        raise CheckpointError(f"{error}. To lose only what came after it: {command}") from error


def _report(args, step, result: "_Steps", val, tokenizer) -> int:
    """Say how a run has ended, with a sample; returns its exit status."""
    if result.status:
        print(
            f"gpuaccel: stopped after step {step.count}, checkpoint written; --resume continues",
            file=sys.stderr,
        )
        return result.status
    final = step.meter.finish()
    if result.steps_done:
        val_loss = result.val_loss
        print(
            f"train loss {result.first_loss:.3f} -> {final.loss:.3f}   "
            f"{final.tokens:,} tokens in {final.seconds:.1f} s",
            end="   ",
        )
    else:
        print(f"{args.out} already is at step {step.count}: nothing to do, unless --steps is more")
        val_loss = evaluate(step.model, val)
    print(f"val loss {val_loss:.3f}")
    problem = _describe_nonfinite(final.loss, val_loss, step.optimizers[0])
    if problem:
        print(f"gpuaccel: {problem}; expected a smaller --lr", file=sys.stderr)
        return 1
    print(_sample(step.model, tokenizer, args.seed))
    return 0


def _sample(model, tokenizer, seed) -> str:
    """200 tokens that the model writes after "def "."""
    tokens = torch.from_numpy(tokenizer.encode("def ").astype("int64"))[None]
    tokens = tokens.to(next(model.parameters()).device)
    return tokenizer.decode(generate(model, tokens, 200, seed=seed)[0])


def _describe_nonfinite(loss, val_loss, optimizer) -> str | None:
    """What of a run's end is not finite, in words. None: all of it is."""
    for name, value in (("loss", loss), ("validation loss", val_loss)):
        if value is not None and not math.isfinite(value):
            return f"the last {name} is {value}"
    skip = optimizer.last_skip()
    if skip is None:
        return None
    return (
        f"{int(optimizer.skipped)} steps were skipped because a gradient was not finite, the last "
        f"in step {skip['step']}, of {skip['tensor'] or 'the norm'}"
    )


def _checkpoint_to_resume(args) -> pathlib.Path | None:
    """The checkpoint that --resume names, or the newest one; None to begin."""
    if args.resume is None:
        return None
    newest = latest_checkpoint(args.out)
    if args.resume == NEWEST:
        return newest
    given = pathlib.Path(args.resume).expanduser()
    for candidate in (args.out / given, given):
        is_here = candidate.exists() and candidate.parent.resolve() == args.out.resolve()
        if is_here and candidate.suffix in (".safetensors", ".sharded"):
            return candidate
    raise ArgumentError(
        f"--resume is {args.resume}; expected a checkpoint in {args.out}"
        + (f", such as {newest.name}" if newest else ", which has none")
    )


def _stopped_at_once(out: pathlib.Path) -> KeyboardInterrupt:
    """For a run that did not end after a step with a checkpoint: which one there is."""
    newest = latest_checkpoint(out)
    if newest is None:
        return KeyboardInterrupt(f"stopped at once; {out} holds no checkpoint")
    return KeyboardInterrupt(f"stopped at once; the newest checkpoint in {out} is {newest.name}")


def _fill_in_defaults(args):
    """Replace options that were left out by the preset's."""
    recipe = RECIPES[args.model]
    args.batch = args.batch or recipe.batch
    args.seq = args.seq or preset(args.model).T
    args.lr = recipe.lr if args.lr is None else args.lr
    args.out = pathlib.Path(args.out or f"runs/{args.model}").expanduser()


def _micro_batches_per_rank(args, ranks) -> int:
    """How many parts each rank divides its share of a batch into."""
    if args.micro_batches > args.batch:
        raise ArgumentError(
            f"--micro-batches is {args.micro_batches}, more than the {args.batch} sequences of "
            "--batch"
        )
    total = args.micro_batches if args.micro_batches > 1 else ranks
    if ranks > 1 and (total % ranks or args.batch % total):
        raise ArgumentError(
            f"--batch {args.batch} in --micro-batches {total} cannot be divided among {ranks} "
            "ranks; expected a multiple of the ranks as --micro-batches, and a multiple of that as "
            "--batch"
        )
    return total // ranks


@dataclasses.dataclass
class _Steps:
    """What the training loop did."""

    steps_done: int = 0
    first_loss: float | None = None
    val_loss: float | None = None  # the last one
    # the exit status of a run that was stopped before its last step; 0: it was not
    status: int = 0


def _run_steps(
    args, step, batches, val, ranks, is_first_rank, checkpoint, after_first_step
) -> _Steps:
    """Go on from a checkpoint, if there is one, and train until args.steps, or until the run was
    asked to stop.

    after_first_step: called with the number of steps before that one."""
    result = _Steps()
    bar = None
    readings = train(
        step,
        batches,
        args.steps,
        val=val,
        val_every=args.val_every,
        log=args.out / METRICS_FILE,
        checkpoint_dir=args.out,
        checkpoint_every=args.checkpoint_every,
        resume=checkpoint or False,
    )
    # What is closed here writes the last checkpoint, whose errors Python's collector would drop.
    with StopAfterStep(launched=args.nproc is not None) as stop, contextlib.closing(readings):
        for reading in readings:
            if bar is None:
                after_first_step(reading.step - 1)
                quiet = args.no_progress or not is_first_rank
                bar = progress_bar(args.steps, reading.step - 1, quiet)
            result.steps_done += 1
            if result.first_loss is None:
                result.first_loss = reading.loss
            if reading.val_loss is not None:
                result.val_loss = reading.val_loss
            show_progress(bar, reading)
            # several ranks stop in the same step: the one in which all of them know of it
            if ranks == 1 and stop.requested:
                break
            if step.reducer is not None and step.reducer.asked_to_stop():
                result.status = INTERRUPTED
                break
    if bar is not None:
        bar.close()
    if stop.requested:
        result.status = stop.status
    if step.count >= args.steps:
        result.status = 0
    return result


def progress_bar(steps, done=0, quiet=False) -> tqdm:
    """The progress on stderr of a run of `steps` steps, `done` of them before; see show_progress.

    On a terminal it is a bar. Elsewhere tqdm writes nothing by itself."""
    # tqdm's own lock takes a semaphore of the system, which ranks that end at once would leave
    tqdm.set_lock(threading.RLock())
    live = sys.stderr.isatty()
    return tqdm(
        total=steps,
        initial=done,
        disable=quiet,
        delay=0 if live else math.inf,
        bar_format="step {n_fmt}/{total_fmt}"
        + (" {bar:24}" if live else "")
        + "{postfix}, {remaining} left",
    )


def show_progress(bar: tqdm, reading):
    """One more step: the bar moves, and without a terminal every tenth step writes a line."""
    parts = []
    if reading.loss is not None:
        parts.append(f"loss {reading.loss:.3f}")
    if reading.tokens_per_s:
        parts.append(f"{reading.tokens_per_s:,.0f} tokens/s")
    if reading.mfu:
        parts.append(f"MFU {reading.mfu:.1%}")
    bar.set_postfix_str(", ".join(parts), refresh=False)
    bar.update()
    is_line = bar.n % 10 == 0 or bar.n == bar.total
    if is_line and not bar.disable and not sys.stderr.isatty():
        print(bar, file=sys.stderr, flush=True)
