"""Faults at random: kills of training runs, and damaged checkpoints.

    python benchmarks/faults.py                  # both, minutes on two CPU cores; needs no GPU
    python benchmarks/faults.py --only kills     # one part; the other part of the result stays

* Kills: two ranks train on the CPU. A rank or the process that launched them is killed at a random
  moment, also at a random point of a write of a checkpoint, or the file size is limited, as on a
  full disk. After one to three faults the run is resumed to its end. Every loss and every tensor of
  the last checkpoint, is compared bit for bit with those of a run that nothing stopped.
* Corruptions of a checkpoint: each has to be refused with a CheckpointError that leaves the model,
  the optimizer and the data position as they were, or to load what the whole file holds.

Processes are forked, so that torch is imported once; the script needs Linux or macOS.
"""

import argparse
import collections
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback

import common
import psutil
import torch
from tables import Column, Table, integer, show

from gpuaccel.distributed.config import Distributed
from gpuaccel.distributed.spawn import launch
from gpuaccel.errors import CheckpointError, GpuaccelError
from gpuaccel.optim.adamw import AdamW
from gpuaccel.optim.arena import Arena
from gpuaccel.training.checkpoint import (
    is_whole,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from gpuaccel.training.checkpoint_file import read_checkpoint
from gpuaccel.training.data import Batches
from gpuaccel.training.loop import train, warmup_cosine
from gpuaccel.training.models import Config
from gpuaccel.training.step import TrainStep

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


def running(pids) -> list[int]:
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def losses(folder) -> list[tuple[int, float]]:
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
    module.host_bytes = counted(module.host_bytes)
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


def tensors_of(path) -> dict[str, torch.Tensor]:
    contents = read_checkpoint(path)
    return {name: contents.tensor(name) for name in contents.entries}


def measure_kills(number: int, seed: int, say=print) -> dict:
    """`number` faults that stopped a run, one to three per run."""
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
        tensors = tensors_of(last)
        while result["faults"] < number:
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
            own_tensors = tensors_of(latest_checkpoint(folder)) if end["status"] == 0 else {}
            result["tensors_different"] += sum(
                name not in own_tensors or not torch.equal(own_tensors[name], value)
                for name, value in tensors.items()
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


def measure_corruptions(number: int, seed: int, say=print) -> dict:
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
        for index in range(number):
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


# ---- the result ----------------------------------------------------------------------------------

PARTS = {"kills": measure_kills, "corruptions": measure_corruptions}


def tables(results: dict) -> dict[str, Table]:
    """ "kills" and "corruptions": what was counted, and how often it happened."""
    kills, damage = results.get("kills"), results.get("corruptions")
    made = {}
    if kills:
        different = kills["losses_different"] + kills["tensors_different"]
        made["kills"] = {
            "faults": kills["faults"],
            "runs of two ranks": kills["runs"],
            "hangs": kills["hangs"],
            "damaged checkpoints": kills["damaged_checkpoints"],
            "losses compared": kills["losses_compared"],
            "losses and tensors that differ": different,
        }
    if damage:
        made["corruptions"] = {
            "corruptions of a checkpoint": damage["corruptions"],
            "refused, nothing changed": damage["refused"],
            "harmless": damage["loaded_alike"],
            "wrong": damage["wrong"],
        }
    columns = [Column("what", "what"), Column("count", "count", integer)]
    return {
        name: Table(columns, [{"what": what, "count": value} for what, value in rows.items()])
        for name, rows in made.items()
    }


def measure(counts: dict[str, int], seed: int = 0, say=print) -> dict:
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args()
    counts = {part: getattr(args, part) for part in PARTS if args.only in (None, part)}
    # Processes train on the CPU, wherever this runs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    path = common.RESULTS / "cpu" / "faults.json"
    results = json.loads(path.read_text())["results"] if path.is_file() else {}
    results |= measure(counts, args.seed)
    common.save(path, {"benchmark": "faults", **common.environment(), "results": results})
    show(tables(results))


if __name__ == "__main__":
    main()
