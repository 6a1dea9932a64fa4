"""How ranks find each other, and what one says that waits for another."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import rank_checks as checks
import torch
import torch.distributed as dist
from train_processes import HANG, free_port, kill, rank_environment

import gpuaccel as ga
from gpuaccel.distributed import collectives, heartbeat
from gpuaccel.distributed.heartbeat import Heartbeats
from gpuaccel.distributed.rendezvous import interface_to, loopback, store_of_this_start

# ---- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("RANK", ""),
        ("RANK", "-1"),
        ("RANK", "1"),
        ("RANK", "9" * 5000),
        ("WORLD_SIZE", "1.0"),
        ("LOCAL_RANK", "first"),
        ("MASTER_PORT", "abc"),
        ("MASTER_ADDR", ""),
    ],
)
def test_an_environment_that_is_not_torchruns_is_shown(name, value, monkeypatch):
    for key, text in {**rank_environment(0, 1, 29500), name: value}.items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ga.errors.ArgumentError, match="expected them as torchrun sets") as error:
        ga.Distributed()
    assert f"{name}={value[:99]}" in str(error.value)


@pytest.mark.parametrize("rank", [1, 0])
def test_an_address_where_nobody_answers_or_somebody_else_does(monkeypatch, rank):
    """Rank 1 finds nobody, rank 0 a port that is taken: within the time limit, in words."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if rank == 0:
            other.listen()
        for key, value in rank_environment(rank, 2, other.getsockname()[1]).items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
        message = f"rank {rank} of 2 found no other rank at 127.0.0.1:"
        with pytest.raises(ga.errors.RankError, match=message):
            ga.Distributed(timeout=1)
        assert not dist.is_initialized()


def test_an_address_is_reached_through_an_interface_or_it_is_not_known():
    assert interface_to("127.0.0.1") == interface_to("localhost") == loopback()
    assert interface_to("nowhere.invalid") is None


@pytest.mark.slow
def test_the_ranks_of_one_start_share_keys_that_earlier_starts_do_not_know():
    """torchrun keeps its store over restarts: what rank 1 of the first start left there is no rank
    1 of the second."""
    shared = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(ranks, limit):
        """rank -> its store, or what its OSError says."""
        results = {}

        def run(rank):
            client = dist.TCPStore(
                "127.0.0.1", shared.port, is_master=False, timeout=timedelta(seconds=limit)
            )
            try:
                results[rank] = store_of_this_start(client, rank, 3, limit)
                results[rank].add("ranks", 1)
            except OSError as error:
                results[rank] = str(error)

        threads = [threading.Timer(0.1 * turn, run, (rank,)) for turn, rank in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    for ranks in ((2, 1, 0), (0, 2, 1)):
        assert [store.add("ranks", 0) for store in start(ranks, HANG).values()] == [3] * 3
    assert start((0, 2), 1.0)[0] == "rank 1 did not answer"
    assert start((1, 2), 1.0) == {1: "rank 0 did not answer", 2: "rank 0 did not answer"}


# ---- heartbeats ----------------------------------------------------------------------------------


def test_the_ranks_that_are_behind_are_others_with_fewer_heartbeats(monkeypatch):
    store, of_rank = dist.HashStore(), {}
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for rank, count in ((0, 3), (1, 3), (2, 2)):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        of_rank[rank] = Heartbeats(store)
        for _ in range(count):
            of_rank[rank].increment()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert of_rank[0].ranks_behind() == [2, 3]
    of_rank[0].store = SimpleNamespace(add=lambda *_: time.sleep(5) or 0)
    assert of_rank[0].ranks_behind(limit=0.1) is None


@pytest.mark.parametrize(
    "behind, message",
    [
        ([1], "has waited 0.2 s for rank 1: it has stopped"),
        (None, "for the machine with the ranks' store, which does not answer"),
        ([], None),
    ],
)
def test_a_rank_that_waits_says_for_whom_and_goes_on_if_nobody_is_behind(
    behind, message, monkeypatch, capsys
):
    """Until the group is another one, or there is none."""
    heartbeats = Heartbeats(dist.HashStore())
    heartbeats.count = 3
    for where, name, value in (
        (heartbeat, "group_heartbeats", heartbeats),
        (heartbeat, "SLACK", 0.1),
        (heartbeats, "ranks_behind", lambda: behind),
        (dist, "is_initialized", lambda: True),
        (dist, "get_rank", lambda: 0),
        (dist, "get_world_size", lambda: 2),
        (os, "_exit", sys.exit),
    ):
        monkeypatch.setattr(where, name, value)
    if message is None:
        threading.Timer(0.5, lambda: setattr(heartbeat, "group_heartbeats", None)).start()
    with pytest.raises(SystemExit) if message else contextlib.nullcontext():
        heartbeats.watch(0.2)
    assert (message or "") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, options",
    [
        ("cpu", {}),
        ("cpu", {"watched": False}),
        pytest.param("cuda", {"peer_to_peer": True}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"peer_to_peer": False}, marks=pytest.mark.gpu),
    ],
)
def test_a_rank_that_waits_in_silence_ends_in_words(device, options):
    """Where it is watched no call returns with an error: on GPUs the collectives are in a graph,
    and on CPUs gloo would wait for ten minutes. gloo's own error gets the rank's name, too."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    seconds, port = (6.0 if device == "cuda" else 3.0), free_port()
    code = (
        "import rank_checks; "
        f"rank_checks.hangs_in_the_third_step({device!r}, {seconds}, **{options!r})"
    )
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            **rank_environment(rank, 2, port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", code]
        folder = pathlib.Path(__file__).parent
        ranks.append(
            subprocess.Popen(
                command, cwd=folder, text=True, stderr=subprocess.PIPE, env=environment
            )
        )
    try:
        said = ranks[0].communicate(timeout=HANG)[1]
        expected = f"gpuaccel: rank 0 of 2 has waited {seconds:g} s for rank 1: it has stopped"
        if not options.get("watched", True):
            expected = "rank 0 of 2 cannot reach rank 1 of 2 in step 3: it has stopped"
        assert ranks[0].returncode == 1 and expected in said, said
        assert ranks[1].poll() is None
    finally:
        kill(*ranks)


# ---- errors of collectives -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, expected",
    [
        (RuntimeError, dist.DistBackendError),
        (dist.DistNetworkError, dist.DistNetworkError),
        (torch.OutOfMemoryError, torch.OutOfMemoryError),
        (ValueError, ValueError),
    ],
)
def test_gloos_error_for_a_lost_rank_becomes_a_dist_error(kind, expected):
    """gloo raises a plain RuntimeError. Other errors keep their type."""

    @collectives.raises_dist_error
    def wait():
        raise kind("Connection reset by peer")

    with pytest.raises(expected, match="Connection reset by peer") as caught:
        wait()
    assert caught.type is expected


def test_an_error_of_loss_fn_is_no_lost_rank():
    """Whatever it says."""

    def loss_fn(model, micro):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

    config = ga.Distributed(ordered=True)
    with checks.make_step(checks.Net(), loss_fn=loss_fn, distributed=config) as step:
        with pytest.raises(RuntimeError) as caught:
            step([checks.micro_batch(0), checks.micro_batch(1)])
    assert caught.type is RuntimeError
