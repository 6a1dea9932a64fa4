"""How the ranks of a run find each other: torchrun's environment, the network interface, the store.

init_from_environment(600.0)     # torch.distributed's default group, as torchrun describes it
"""

import atexit
import datetime
import os
import re
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist

from ..errors import ArgumentError, RankError
from . import heartbeat
from .heartbeat import SLACK, Heartbeats, ranks_in_words

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_from_environment(timeout: float):
    """Make the default group that torchrun's environment describes. Each rank takes the GPU of its
    local number.

    Args:
        timeout: seconds for the ranks to find each other, and for every collective.

    Raises:
        ArgumentError: for an environment that is not torchrun's, RankError where the ranks do not
            find each other in time.
    """
    _check_environment()
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if nccl:
        _take_gpu()
    address = os.environ["MASTER_ADDR"]
    world_size = os.environ["WORLD_SIZE"]
    interface = interface_to(address)
    if interface is not None and not nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif interface == loopback() and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
        # One machine. With several NCCL chooses better.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        _init_group(nccl, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        listens = ""
        if not nccl:
            name = os.environ.get("GLOO_SOCKET_IFNAME") or "the address of its name"
            listens = f"; this machine listens on {name} (GLOO_SOCKET_IFNAME: elsewhere)"
        raise RankError(
            f"rank {os.environ['RANK']} of {world_size} found no other rank at "
            f"{address}:{os.environ['MASTER_PORT']} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}{listens}"
        ) from error


def _check_environment():
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    numbers = [value for name, value in values.items() if name != "MASTER_ADDR"]
    numbers.append(os.environ.get("LOCAL_RANK", "0"))
    right = values["MASTER_ADDR"] and all(re.fullmatch("[0-9]{1,9}", text) for text in numbers)
    if not right or int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        shown = ", ".join(f"{name}={os.environ.get(name)}" for name in (*VARIABLES, "LOCAL_RANK"))
        raise ArgumentError(
            f"{shown[:500]}; expected them as torchrun sets them, with RANK < WORLD_SIZE, or no "
            "RANK for one process"
        )


def _take_gpu():
    local = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if local >= gpus:
        plural = "s" * (gpus > 1)
        raise ArgumentError(
            f"rank {os.environ['RANK']} is number {local} on this machine, which has {gpus} "
            f"GPU{plural}: start at most {gpus} rank{plural} here, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) to train on CPUs with gloo"
        )
    torch.cuda.set_device(local)


def _init_group(nccl: bool, timeout: float):
    store, rank, world_size = next(
        dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))
    )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = store_of_this_start(store, rank, world_size, timeout)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout + SLACK * nccl),
    )
    heartbeat.group_heartbeats = heartbeats = Heartbeats(store)
    if nccl:
        threading.Thread(target=heartbeats.watch, args=(timeout,), daemon=True).start()
    else:
        atexit.register(_let_gloo_finish)


def _let_gloo_finish():
    """Give gloo's threads a moment with the interpreter at the end of the process.

    One may be about to release the last collective's tensors, for which it needs the interpreter;
    an interpreter that is shutting down would abort the process."""
    time.sleep(0.1)


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_to(address: str) -> str | None:
    """The network interface through which an address is reached; for an address of this machine
    the interface that has it. None: not known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        # UDP: connect() only looks up the route, nothing is sent.
        udp.connect((address, 9))
        own = udp.getsockname()[0]
        if own.startswith("127."):
            return loopback()
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.address == own for a in addresses):
                return name
    return None


def store_of_this_start(shared, rank: int, world_size: int, timeout: float):
    """The part of torchrun's store that only the ranks of this start use.

    torchrun keeps its store when it restarts the ranks, with the addresses of those that are gone,
    and no rank knows which restart it is: torchrun counts them on each machine, without those that
    another machine began. So each rank writes a random word, rank 0 answers to each word with its
    own, and that word is the prefix of the keys.
    OSError: a rank did not answer within `timeout` seconds."""
    word = uuid.uuid4().hex
    if rank:
        shared.set(f"rank {rank} is", word)
        try:
            prefix = shared.get(f"to {word}").decode()  # waits
        except dist.DistStoreError:
            raise OSError("rank 0 did not answer") from None
        shared.set(f"rank {rank} heard {prefix}", "")
        return dist.PrefixStore(prefix, shared)
    waiting_for = set(range(1, world_size))
    until = time.monotonic() + timeout
    while waiting_for:
        for other in [r for r in waiting_for if shared.check([f"rank {r} is"])]:
            # The word may be an earlier start's: it is read again until its rank has confirmed.
            shared.set(f"to {shared.get(f'rank {other} is').decode()}", word)
            if shared.check([f"rank {other} heard {word}"]):
                waiting_for.remove(other)
        if waiting_for and time.monotonic() > until:
            raise OSError(f"{ranks_in_words(waiting_for)} did not answer")
        time.sleep(0.02 if waiting_for else 0)
    return dist.PrefixStore(word, shared)
