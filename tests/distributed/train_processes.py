"""`gpuaccel train` as a process, and what can be seen of it from outside."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import psutil

# Seconds until a process or an event counts as hanging. Nothing is judged by them.
HANG = 600


def gpuaccel(
    folder, *options, launcher=(sys.executable, "-m", "gpuaccel"), session=False, **environment
):
    """Start `gpuaccel train --out folder` on the CPU, with a text beside the folder.

    session: whether in a process group of its own."""
    text = folder.parent / "text.txt"
    if not text.exists():
        text.write_text("The gradient of a sum is the sum of the gradients. " * 200)
    words = "--batch 4 --micro-batches 4 --seq 16 --no-progress --device cpu".split()
    return subprocess.Popen(
        [*launcher, "train", "--text", str(text), "--out", str(folder), *words, *options],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=session,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def losses(folder) -> list[float]:
    """Of each step that the run has logged."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def newest_step(folder) -> int:
    """Of the checkpoints in a folder; -1: there is none."""
    numbers = [int(path.stem.split("-")[1]) for path in folder.glob("step-*.safetensors")]
    return max(numbers, default=-1)


def wait_until(condition, *processes):
    """AssertionError, with what it said, when one of the processes ends before."""
    until = time.monotonic() + HANG
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def kill(*processes):
    for process in processes:
        process.kill()
        process.communicate()


def running(pids) -> list[int]:
    """Those that have not ended. One that has, and that nobody has waited for, is a zombie."""
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def outlive(pids, seconds=60) -> list[int]:
    """Those that have not ended of themselves within so many seconds; they are killed."""
    until = time.monotonic() + seconds
    while running(pids) and time.monotonic() < until:
        time.sleep(0.02)
    left = running(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def children_of(pid) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def launched_ranks(pid) -> list[int]:
    """The processes of the ranks that a process has started by ga.launch, in their order: children
    of the server that forks them."""
    return sorted(rank for child in children_of(pid) for rank in children_of(child))


def session_of(pid) -> list[int]:
    """The processes of a session that have not ended."""
    members = []
    for other in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(other) == pid:
                members.append(other)
    return running(members)


def listens_at(pid) -> set[str]:
    """The addresses at which a process listens; "::" for any of IPv6."""
    addresses, sockets = set(), set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        if link.is_symlink():
            sockets.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
    for version in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{version}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == "0A" and fields[9] in sockets:
                own = socket.inet_ntoa(bytes.fromhex(local[:8])[::-1])
                addresses.add(own if version == "tcp" else "::")
    return addresses


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
