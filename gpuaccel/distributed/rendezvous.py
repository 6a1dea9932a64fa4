"""How the ranks of a run find each other, and notice that one does not come: torchrun's environment, the store where they meet, who is behind.

>>> init_from_environment(600.0)              # torch.distributed's default group, as torchrun describes it
>>> beat(1)                                   # this rank comes to what it does with all others
>>> missing()                                 # a collective does not end: the ranks that have not come to it
"""

import atexit
import datetime
import os
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

on_beat = None  # called by beat(); distributed/spawn.py watches it
last_step = lambda: (
    0
)  # the step (of this process, from 1) after which all ranks are asked to stop; 0: none  # noqa: E731
came = 0  # how often this rank has come to what it does with the others
store = None  # of a group that was made here: where the ranks met, and say how often they came
_asking = None  # the thread of missing()
SLACK = 10.0  # seconds that what cannot name a rank waits longer than what can


def init_from_environment(timeout: float):
    """As torchrun describes the group; each rank takes the GPU of its local number."""
    absent = [
        name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if absent:
        raise ArgumentError(
            f"RANK is set, and {' and '.join(absent)} not; expected all of them, as torchrun sets them, or none for one process"
        )
    if not 0 <= int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
        raise ArgumentError(
            f"RANK is {os.environ['RANK']} and WORLD_SIZE {os.environ['WORLD_SIZE']}; expected a rank from 0 on, below it"
        )
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if nccl:
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise ArgumentError(
                f"rank {os.environ['RANK']} is number {local} on this machine, which has {gpus} GPU{'s' * (gpus > 1)}: start at most "
                f"{gpus} rank{'s' * (gpus > 1)} here, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on CPUs with gloo"
            )
        torch.cuda.set_device(local)
    address, world = os.environ.get("MASTER_ADDR", ""), os.environ.get("WORLD_SIZE")
    interface = interface_to(address)
    if interface is not None and not nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif (
        interface == loopback() and os.environ.get("LOCAL_WORLD_SIZE") == world
    ):  # elsewhere NCCL knows better
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    global came, store
    try:
        place, rank, size = next(
            dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))
        )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            place = _corner(place, rank, size, timeout)
        limit = datetime.timedelta(seconds=timeout + SLACK * nccl)
        dist.init_process_group(
            "nccl" if nccl else "gloo", store=place, rank=rank, world_size=size, timeout=limit
        )
        store, came = dist.PrefixStore("came", place), 0
        if nccl:
            threading.Thread(target=watch, args=(store, timeout), daemon=True).start()
        else:
            atexit.register(_leave)
    except (RuntimeError, ValueError, OSError) as error:
        listens = (
            ""
            if nccl
            else f"; this machine listens on {os.environ.get('GLOO_SOCKET_IFNAME') or 'the address of its name'} (GLOO_SOCKET_IFNAME: elsewhere)"
        )
        raise RankError(
            f"rank {os.environ['RANK']} of {world} found no common start at {address}:{os.environ.get('MASTER_PORT')} within {timeout:g} s: "
            f"{str(error).splitlines()[0]}{listens}"
        ) from error


def _leave():
    """At the process's end. A thread of gloo's may be about to let go of the last collective's tensors, for which it needs the interpreter; one that is
    ending would abort the process. Meanwhile it may have it."""
    time.sleep(0.1)


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_to(address: str) -> "str | None":
    """The network interface through which an address is reached from here, its own interface if it is this machine's; None: not known."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, 9))  # UDP: nothing is sent, the system only finds its way
        own = one.getsockname()[0]
        return (
            loopback()
            if own.startswith("127.")
            else next(
                (
                    name
                    for name, found in psutil.net_if_addrs().items()
                    if any(a.address == own for a in found)
                ),
                None,
            )
        )
    return None


def _corner(shared, rank, world, timeout):
    """Of a store that torchrun keeps over restarts, with the addresses of ranks that are gone, a part that only the ranks of this start know.

    Which restart it is cannot be asked: torchrun counts them on each machine, and not those that another machine began. So each rank brings a word
    of its own, and takes the one of rank 0 that answers to it."""
    word = uuid.uuid4().hex
    if rank:
        shared.set(f"rank {rank} is", word)
        try:
            first = shared.get(f"to {word}").decode()  # waits
        except dist.DistStoreError:
            raise OSError("rank 0 did not come") from None
        shared.set(f"rank {rank} heard {first}", "")
        return dist.PrefixStore(first, shared)
    missing, until = set(range(1, world)), time.monotonic() + timeout
    while missing:
        for other in [r for r in missing if shared.check([f"rank {r} is"])]:
            shared.set(
                f"to {shared.get(f'rank {other} is').decode()}", word
            )  # it may have been an earlier start's: asked again
            if shared.check([f"rank {other} heard {word}"]):
                missing.remove(other)
        if missing and time.monotonic() > until:
            raise OSError(f"{ranks_in_words(missing)} did not come")
        time.sleep(0.02 if missing else 0)
    return dist.PrefixStore(word, shared)


def ranks_in_words(ranks) -> str:
    """rank 3; ranks 1 and 3."""
    *few, last = map(str, sorted(ranks))
    return f"ranks {', '.join(few)} and {last}" if few else f"rank {last}"


def beat(steps: int, everyone: bool = True):
    """This rank comes to what it does with the others; with it `steps` steps have come to the end of their backward. everyone: do all ranks do that?"""
    global came
    if on_beat is not None:
        on_beat(steps)
    if not everyone:
        return
    came += 1
    if store is not None:
        with suppress(dist.DistError):
            store.set(f"rank {dist.get_rank()} came", str(came))  # sent, not waited for


def missing() -> "list[int] | None":
    """After a collective has timed out: the other ranks that have not come to it. None: where the ranks met nobody answers; [] where it cannot be known."""
    global _asking
    place, found = store, []
    if place is None:
        return []

    def ask():
        with suppress(RuntimeError, ValueError):  # its machine has ended, or the group has
            rank, world = dist.get_rank(), dist.get_world_size()
            counts = {
                r: int(place.get(f"rank {r} came")) if place.check([f"rank {r} came"]) else 0
                for r in range(world)
                if r != rank
            }
            found.extend(r for r, count in counts.items() if count < came)

    if _asking is None or not _asking.is_alive():  # what is frozen is asked once
        _asking = threading.Thread(target=ask, daemon=True)
        _asking.start()
    _asking.join(2.0)
    return None if _asking.is_alive() else found


def watch(place, seconds: float):
    """Ends this process, in words, when it has waited so long for ranks that do not come to where the group of this store is. In a thread of its own: where
    GPUs wait for each other no call comes back with an error, and nothing but this has a time limit for NCCL's kernels in a CUDA graph."""
    nap, seen, waited = min(1.0, seconds / 4), came, 0.0
    while True:
        began = time.monotonic()
        time.sleep(nap)
        if store is not place or not dist.is_initialized():
            return
        waited += min(
            time.monotonic() - began, 2 * nap
        )  # a job that was stopped as a whole has not waited
        if came != seen:
            seen, waited = came, 0.0
        if not came or waited < seconds:
            continue
        gone = missing()
        if gone or gone is None and waited > seconds + SLACK:
            whom = (
                ranks_in_words(gone)
                if gone
                else "the one where the ranks met, which does not answer"
            )
            print(
                f"gpuaccel: rank {dist.get_rank()} of {dist.get_world_size()} has waited {seconds:g} s for {whom}: it has stopped (what it said is in its "
                "own output), hangs, or the network is down",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # the thread that waits hears nothing
