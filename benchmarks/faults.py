"""Faults as figures: kills of training runs, damaged checkpoints, and command lines at random.

    python benchmarks/faults.py                  # all of it, minutes on two CPU cores; needs no GPU
    python benchmarks/faults.py --only calls     # one part; the other parts of the result stay

* Kills: two ranks train on the CPU. A rank or the process that launched them is killed at a random
  moment, also at a random point of a write of a checkpoint, or the file size is limited, as on a
  full disk. After one to three faults the run is resumed to its end. Every loss and every tensor of
  the last checkpoint, is compared bit for bit with those of a run that nothing stopped.
* Corruptions of a checkpoint: each has to be refused with a CheckpointError that leaves the model,
  the optimizer and the data position as they were, or to load what the whole file holds.
* Calls of `gpuaccel`, drawn by hypothesis from a grammar of options, values and files: exit status
  0, 1 or 2, one sentence for an error, no traceback, no hang. Left out is what takes long: presets
  other than tiny, --compile, --device simt.

Processes are forked, so that torch is imported once; the script needs Linux or macOS.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import json
import multiprocessing
import os
import pathlib
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from fingerprints import ROOT, fingerprints

sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402

from gpuaccel.cli.main import main as command_line  # noqa: E402
from gpuaccel.compiler import nvrtc  # noqa: E402
from gpuaccel.distributed.config import Distributed  # noqa: E402
from gpuaccel.distributed.spawn import launch  # noqa: E402
from gpuaccel.errors import CheckpointError, GpuaccelError  # noqa: E402
from gpuaccel.optim.adamw import AdamW  # noqa: E402
from gpuaccel.optim.arena import Arena  # noqa: E402
from gpuaccel.training.checkpoint import (  # noqa: E402
    is_whole,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gpuaccel.training.checkpoint_file import read_file  # noqa: E402
from gpuaccel.training.data import Batches  # noqa: E402
from gpuaccel.training.loop import train, warmup_cosine  # noqa: E402
from gpuaccel.training.models import Config  # noqa: E402
from gpuaccel.training.step import TrainStep  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "cpu" / "faults.json"
HANG = 120.0  # seconds after which a process counts as hanging
RANKS = 2
STEPS = 20
CHECKPOINT_EVERY = 2
PAUSE = 0.02  # seconds between two steps, so that a moment at random is in any phase of a run
CONFIG = Config(vocab=64, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=8)
FORK = multiprocessing.get_context("fork")


# ---- a run with two ranks ------------------------------------------------------------------------


def make_run(rank=0, ranks=1):
    """(model, optimizer, arena, scheduler, batches) of a small transformer."""
    torch.manual_seed(0)
    model = CONFIG.build()
    arena = Arena(model)
    opt = AdamW(arena, lr=1e-2, max_norm=1.0)
    tokens = torch.randint(0, CONFIG.vocab, (2000,), generator=torch.Generator().manual_seed(1))
    batches = Batches(tokens, 4 // ranks, 8, rank=rank, ranks=ranks, micro_batches=2)
    return model, opt, arena, warmup_cosine(opt, 2, STEPS), batches


def train_here():
    """A run after three steps in this process. What torch imports late is then there for forks."""
    model, opt, arena, scheduler, batches = make_run()
    with TrainStep(model, opt, micro_batches=2, scheduler=scheduler) as step:
        for _ in range(3):
            step(next(batches))
    return model, opt, arena, scheduler, batches


def train_rank(folder, fault):
    """A rank's part of a run: from the newest checkpoint to the end. fault(rank) arms a fault."""
    config = Distributed(ordered=True)
    (folder / f"rank-{config.rank}.pid").write_text(str(os.getpid()))
    model, opt, _, scheduler, batches = make_run(config.rank, config.world)
    step = TrainStep(model, opt, micro_batches=2, distributed=config, scheduler=scheduler)
    fault(config.rank)
    readings = train(
        step,
        batches,
        STEPS,
        checkpoint_dir=folder,
        checkpoint_every=CHECKPOINT_EVERY,
        log=folder / "metrics.jsonl",
        resume=True,
    )
    for _ in readings:
        time.sleep(PAUSE)


def launch_ranks(folder, fault):
    """The process that launches the ranks. Its exit status is 0 when they have finished."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        # A lambda is handed to the ranks by a fork.
        launch(lambda: train_rank(folder, fault), RANKS, timeout=HANG / 2)
    except GpuaccelError:
        os._exit(1)
    os._exit(0)


def run_once(folder, fault) -> dict:
    """Run until the end or a fault: exit status, and seconds by which ranks have outlived it."""
    process = FORK.Process(target=launch_ranks, args=(folder, fault))
    process.start()
    process.join(HANG)
    hung = process.is_alive()
    if hung:
        process.kill()
        process.join()
    ended = time.monotonic()
    pids = [int(path.read_text() or 0) for path in folder.glob("rank-*.pid")]
    while running(pids) and time.monotonic() - ended < HANG:
        time.sleep(0.01)
    outlived = time.monotonic() - ended
    for pid in running(pids):
        os.kill(pid, signal.SIGKILL)
    for path in folder.glob("rank-*.pid"):
        path.unlink()
    return {"status": process.exitcode, "hung": hung, "outlived": outlived}


def running(pids) -> "list[int]":
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def losses(folder) -> "list[tuple[int, float]]":
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


# ---- faults --------------------------------------------------------------------------------------


def no_fault(rank):
    pass


def kill_rank_later(rank, whom, seconds):
    """SIGKILL of a rank, some time after it has begun."""
    if rank == whom:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def kill_parent_later(rank, sent, seconds):
    """A signal for the process that launched the ranks."""
    if rank == 0:
        threading.Timer(seconds, os.kill, (multiprocessing.parent_process().pid, sent)).start()


def kill_in_a_write(rank, parent, count):
    """SIGKILL at the count-th point of writing checkpoints: before or after the data of a file, a
    sync, the rename. parent: of the process that launched the ranks, else of the one that writes.

    A parent's ranks go on for a moment, so the write may end or not."""
    if rank:
        return
    left = count
    victim = multiprocessing.parent_process().pid if parent else os.getpid()

    def counted(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if not left:
                os.kill(victim, signal.SIGKILL)
            result = function(*args, **kwargs)
            left -= 1
            if not left:
                os.kill(victim, signal.SIGKILL)
            return result

        return call

    module = sys.modules["gpuaccel.training.checkpoint_file"]
    module.digest = counted(module.digest)
    os.fsync = counted(os.fsync)
    os.replace = counted(os.replace)


def limit_file_size(rank, limit):
    """Writing beyond `limit` bytes of a file fails, as on a full disk."""
    if rank == 0:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def draw_fault(chance, seconds, size):
    """(kind in words, fault). seconds: of a run; size: of a checkpoint, in bytes."""
    kind = chance.choice(["rank", "parent", "write", "write", "disk"])
    if kind == "rank":
        whom = chance.randrange(RANKS)
        return "a rank", functools.partial(
            kill_rank_later, whom=whom, seconds=seconds * chance.random()
        )
    if kind == "parent":
        sent = chance.choice([signal.SIGKILL, signal.SIGTERM])
        return "the parent", functools.partial(
            kill_parent_later, sent=sent, seconds=seconds * chance.random()
        )
    if kind == "write":
        parent = chance.random() < 0.3
        fault = functools.partial(kill_in_a_write, parent=parent, count=chance.randrange(1, 400))
        return f"{'the parent' if parent else 'a rank'} in a write of a checkpoint", fault
    # The metrics stay below a quarter of a checkpoint.
    limit = chance.randrange(size // 4, size)
    return "a full disk", functools.partial(limit_file_size, limit=limit)


def measure_kills(count: int, seed: int, say=print) -> dict:
    """`count` faults that stopped a run, one to three per run."""
    chance = random.Random(seed)
    kinds: collections.Counter = collections.Counter()
    result = {"faults": 0, "runs": 0, "hangs": 0, "damaged_checkpoints": 0}
    result |= {"losses_compared": 0, "losses_different": 0, "tensors_different": 0}
    outlived = 0.0
    with tempfile.TemporaryDirectory() as root:
        whole = pathlib.Path(root, "whole")
        whole.mkdir()
        began = time.monotonic()
        assert run_once(whole, no_fault)["status"] == 0, "a run without faults has failed"
        seconds = time.monotonic() - began
        last = latest_checkpoint(whole)
        expected = losses(whole)
        digests = read_file(last).digests
        while result["faults"] < count:
            folder = pathlib.Path(root, f"run-{result['runs']}")
            folder.mkdir()
            for _ in range(chance.randint(1, 3)):
                kind, fault = draw_fault(chance, seconds, last.stat().st_size)
                end = run_once(folder, fault)
                outlived = max(outlived, end["outlived"])
                result["hangs"] += end["hung"]
                newest = latest_checkpoint(folder)
                result["damaged_checkpoints"] += newest is not None and not is_whole(newest)
                if end["status"] == 0:
                    # The run was over before.
                    break
                kinds[kind] += 1
                result["faults"] += 1
            end = run_once(folder, no_fault)
            result["hangs"] += end["hung"]
            own = losses(folder) if end["status"] == 0 else []
            result["losses_compared"] += len(expected)
            pairs = dict(own)
            result["losses_different"] += sum(pairs.get(step) != loss for step, loss in expected)
            if end["status"] == 0:
                own_digests = read_file(latest_checkpoint(folder)).digests
            else:
                own_digests = {}
            result["tensors_different"] += sum(
                own_digests.get(name) != value for name, value in digests.items()
            )
            result["runs"] += 1
            shutil.rmtree(folder)
            if result["runs"] % 10 == 0:
                say(f"{result['faults']} faults in {result['runs']} runs")
    result["kinds"] = dict(sorted(kinds.items()))
    result["seconds_ranks_outlived_their_parent"] = round(outlived, 2)
    return result


# ---- corruptions of a checkpoint -----------------------------------------------------------------


def flip_bits(chance, data):
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def flip_in_header(chance, data):
    """The header is the smaller part of a file, and the one that is parsed."""
    data = bytearray(data)
    size = 8 + int.from_bytes(data[:8], "little")
    data[chance.randrange(size)] = chance.randrange(256)
    return bytes(data)


def truncate(chance, data):
    return data[: chance.randrange(len(data))]


def swap_blocks(chance, data):
    size = chance.choice([1, 8, 64, 512])
    first, second = sorted(chance.randrange(len(data) - size) for _ in range(2))
    data = bytearray(data)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    return bytes(data)


def zero_block(chance, data):
    start = chance.randrange(len(data))
    size = min(chance.choice([1, 64, 4096]), len(data) - start)
    return data[:start] + bytes(size) + data[start + size :]


def append_bytes(chance, data):
    return data + chance.randbytes(chance.randrange(1, 100))


def remove_file(chance, data):
    """None: there is no file, or a folder has its name."""
    return None


CORRUPTIONS = {
    "bits flipped": flip_bits,
    "bytes of the header changed": flip_in_header,
    "truncated": truncate,
    "blocks swapped": swap_blocks,
    "a block of zeros": zero_block,
    "bytes appended": append_bytes,
    "no file": remove_file,
}


def measure_corruptions(count: int, seed: int, say=print) -> dict:
    chance = random.Random(seed)
    model, opt, arena, scheduler, batches = train_here()
    parts = dict(model=model, optimizer=opt, arena=arena, scheduler=scheduler, batches=batches)

    def state():
        """All that a load changes, in bytes."""
        optimizer = [value for values in opt.state.values() for value in values.values()]
        tensors = [*model.state_dict().values(), *optimizer, torch.get_rng_state()]
        return [tensor.numpy().tobytes() for tensor in tensors], batches.state_dict()

    result = {"corruptions": 0, "refused": 0, "loaded_alike": 0, "wrong": 0}
    kinds: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root, "step-00000003.safetensors")
        save_checkpoint(path, step=3, **parts)
        data = path.read_bytes()
        load_checkpoint(path, **parts)
        whole = state()
        for index in range(count):
            name = chance.choice(list(CORRUPTIONS))
            corrupted = CORRUPTIONS[name](chance, data)
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            if corrupted is not None:
                path.write_bytes(corrupted)
            elif chance.random() < 0.5:
                path.mkdir()
            with torch.no_grad():
                arena.weights.fill_(index + 1)
            before = state()
            outcome = "wrong"
            try:
                load_checkpoint(path, **parts)
                if state() == whole:
                    outcome = "loaded_alike"
            except CheckpointError as error:
                if state() == before and path.name in str(error):
                    outcome = "refused"
            except Exception:
                say(f"{name}: {traceback.format_exc()}")
            result[outcome] += 1
            result["corruptions"] += 1
            kinds[name] += 1
    result["kinds"] = dict(sorted(kinds.items()))
    return result


# ---- command lines -------------------------------------------------------------------------------


def call(words, folder) -> dict:
    """Run `gpuaccel WORDS` in a fork: its status, what it said, and whether it hung."""

    def run():
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # OpenMP's threads do not survive a fork.
        torch.set_num_threads(1)
        sys.argv = ["gpuaccel", *words]
        try:
            status = command_line(words)
        except BaseException:
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    process = FORK.Process(target=run)
    process.start()
    process.join(HANG)
    hung = process.is_alive()
    if hung:
        process.kill()
        process.join()
    said = (folder / "output").read_text(errors="replace")
    return {"status": process.exitcode, "hung": hung, "said": said}


def prepare_files(folder):
    """What the grammar's values name."""
    (folder / "text").write_text("The gradient of a sum is the sum of the gradients. " * 40)
    (folder / "short").write_text("x")
    (folder / "empty").touch()
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    kernel = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    (folder / "own.cu").write_text(kernel)
    (folder / "wrong.cu").write_text(kernel.replace("2;", "nothing;"))
    words = "train --text text --seq 8 --batch 2 --steps 2 --device cpu --no-progress --out run"
    end = call([*words.split(), "--checkpoint-every", "1"], folder)
    assert end["status"] == 0, end["said"]
    for name in ("damaged", "other"):
        shutil.copytree(folder / "run", folder / name)
    newest = latest_checkpoint(folder / "damaged")
    newest.write_bytes(newest.read_bytes()[:-1])
    (folder / "other" / "run.json").write_text('{"config": {"vocab": "many"}}')


def grammar():
    """A hypothesis strategy of argument lists."""
    from hypothesis import strategies as st

    odd = ["0", "-1", "1.5", "nan", "inf", "1e30", "", "x", "--", "-1e999", "0x10", "１", "1_0"]
    huge = "9" * 20
    files = ["text", "short", "empty", "bytes", "folder", "nowhere", "", ".", "/", "x" * 300]
    runs = ["run", "damaged", "other", "new", "new/deep", "empty", "empty/x", "", "folder"]

    def option(name, good, bad=()):
        values = st.one_of(st.sampled_from(good), st.sampled_from([*good, *bad, *odd]))
        return values.map(lambda value: [name, value])

    def options(*strategies):
        return st.lists(st.one_of(*strategies), max_size=5).map(lambda parts: sum(parts, []))

    small = ["--text", "text", "--seq", "8", "--batch", "2", "--steps", "2", "--no-progress"]
    numbers = [
        # A run of many steps takes its time: it is no hang.
        option("--steps", ["1", "2", "3"]),
        option("--batch", ["1", "2", "4", "143"], [huge, "100000"]),
        option("--seq", ["1", "8", "16"], [huge, "100000"]),
        option("--micro-batches", ["1", "2"], [huge]),
        option("--lr", ["0", "1e-3", "1", "1e-300"], [huge]),
        option("--seed", ["0", "7", str(2**63 - 1)], [huge]),
        option("--val-every", ["1", huge]),
        option("--checkpoint-every", ["1", huge]),
        option("--timeout", ["1", "60"], [huge]),
    ]
    others = [
        option("--model", ["tiny"]),
        option("--text", ["text"], files),
        option("--out", runs),
        option("--replay", ["eager", "graph"]),
        option("--device", ["cpu", "auto", "cuda"]),
        option("--nproc", ["1"], ["3", huge]),
        st.sampled_from([["--resume"], ["--resume", "step-00000001.safetensors"]]),
        st.sampled_from([["--resume", "nothing"], ["--resume", ""], ["--nproc", "2"]]),
        st.sampled_from([["--deterministic"], ["--ordered"], ["--sharded"], ["--unknown"]]),
    ]
    end = ["--device", "cpu"]
    training = options(*numbers, *others).map(lambda words: ["train", *small, *words, *end])
    kernels = st.tuples(
        st.sampled_from(["accumulate", "clip", "own.cu", "wrong.cu", *files[1:]]),
        options(
            option("--arch", ["sm_80", "sm_90"], ["sm_1", "sm_" + huge, "90"]),
            option("-D", ["GRAD_T=bf16", "A=1"], ["A", "=", "1=2", "A=@", "a b=c"]),
        ),
    ).map(lambda pair: ["kernels", pair[0], *pair[1]])
    rest = st.lists(
        st.sampled_from(["doctor", "--json", "--help", "--version", "train", "nothing"]),
        max_size=3,
    ).filter(lambda words: "train" not in words or "--help" in words)
    return st.one_of(training, training, training, kernels, rest)


def is_well(end) -> bool:
    """Whether a call ended as it should: with a documented status, and with words for an error."""
    if end["hung"] or end["status"] not in (0, 1, 2) or "Traceback" in end["said"]:
        return False
    lines = end["said"].strip().splitlines()
    if end["status"] == 2:
        return "error: " in lines[-1]
    # doctor's status 1 stands for the problems in its table.
    return end["status"] == 0 or any(line.startswith(("gpuaccel: ", "problem")) for line in lines)


def measure_calls(count: int, seed: int, say=print) -> dict:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    result = {"calls": 0, "hangs": 0, "tracebacks": 0, "without_a_sentence": 0}
    statuses: collections.Counter = collections.Counter()
    commands: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        folder = pathlib.Path(root)
        prepare_files(folder)

        @with_seed(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(words=grammar())
        def check(words):
            end = call(words, folder)
            result["calls"] += 1
            statuses[str(end["status"])] += 1
            commands[words[0] if words and words[0].isalpha() else "none"] += 1
            if not is_well(end):
                result["hangs"] += end["hung"]
                result["tracebacks"] += "Traceback" in end["said"]
                result["without_a_sentence"] += 1
                say(f"{words}: status {end['status']}\n{end['said'][-3000:]}")

        check()
    result["statuses"] = dict(sorted(statuses.items()))
    result["commands"] = dict(sorted(commands.items()))
    return result


# ---- the result ----------------------------------------------------------------------------------

PARTS = {"kills": measure_kills, "corruptions": measure_corruptions, "calls": measure_calls}


def environment() -> dict:
    """Versions, commit and date; no name of a machine."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": "none: CPU",
        "driver": None,
        "system": platform.system(),
        "torch": torch.__version__,
        "nvrtc": ".".join(map(str, nvrtc.library().version)),
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def show_sentences(results: dict) -> "list[str]":
    """The figures in words, for docs/several-gpus.md."""
    kills, damage, calls = results["kills"], results["corruptions"], results["calls"]
    lost = kills["losses_different"] + kills["tensors_different"]
    return [
        f"{kills['faults']} faults in {kills['runs']} runs of two ranks: {kills['hangs']} hangs, "
        f"{kills['damaged_checkpoints']} damaged checkpoints, and {lost} differences in "
        f"{kills['losses_compared']:,} losses and the last checkpoints.",
        f"{damage['corruptions']:,} corruptions of a checkpoint: {damage['refused']} refused, "
        f"{damage['loaded_alike']} harmless, {damage['wrong']} wrong.",
        f"{calls['calls']} calls of the command line: {calls['tracebacks']} tracebacks, "
        f"{calls['hangs']} hangs, {calls['without_a_sentence']} errors without a sentence.",
    ]


def measure(counts: "dict[str, int]", seed: int = 0, say=print) -> dict:
    """part -> its figures. counts: part -> how many faults."""
    torch.set_num_threads(1)
    train_here()
    results = {}
    for part, count in counts.items():
        began = time.monotonic()
        results[part] = PARTS[part](count, seed, say)
        results[part]["seconds"] = round(time.monotonic() - began)
        say(f"{part}: {results[part]}")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    counts = {part: getattr(args, part) for part in PARTS if args.only in (None, part)}
    results = json.loads(RESULT.read_text())["results"] if RESULT.is_file() else {}
    results |= measure(counts, args.seed)
    facts = {"benchmark": "faults", **environment(), "fingerprints": fingerprints("faults", ())}
    RESULT.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    if results.keys() == PARTS.keys():
        print("\n".join(show_sentences(results)))


if __name__ == "__main__":
    main()
