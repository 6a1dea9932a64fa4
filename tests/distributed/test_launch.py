"""ga.launch: how functions, results and readings travel, and what is said of a rank that fails.

Where nothing depends on how the processes start, functions go by value: the server that forks the
processes has imported everything.
"""

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import rank_checks as checks
import torch
import torch.distributed as dist
from train_processes import HANG, outlive, session_of, wait_until

import gpuaccel as ga
from gpuaccel.distributed import spawn


def by_value(function, ranks, *args, **options):
    """ga.launch of a function that cannot be pickled, as a notebook's."""
    return ga.launch(lambda: function(*args), ranks, **options)


# ---- how a function gets there, and its result back ----------------------------------------------


def test_launched_ranks_train_alike():
    (first, *one), (second, *other) = by_value(checks.steps_with, 2, checks.nothing, 0)
    assert (first, second) == (0, 1) and one == other and one[0] == 2


def test_a_generator_function_yields_what_rank_0_yields_while_it_runs():
    def train(steps):
        for step in range(steps):
            total = torch.tensor([dist.get_rank() + step])
            dist.all_reduce(total)
            yield total.item()
        return dist.get_rank()

    yielded = ga.launch(train, 2, (3,), backend="gloo")
    assert [next(yielded) for _ in range(3)] == [1, 3, 5]
    with pytest.raises(StopIteration) as end:
        next(yielded)
    assert end.value.value == [0, 1]

    def fails():
        yield 7
        raise ValueError(f"rank {dist.get_rank()} has had enough")

    yielded = ga.launch(fails, 1, backend="gloo")
    assert next(yielded) == 7
    with pytest.raises(ga.errors.RankError, match="rank 0 has had enough"):
        next(yielded)

    others = multiprocessing.active_children()
    endless = ga.launch(train, 2, (10**9,), backend="gloo")
    next(endless)
    processes = [p for p in multiprocessing.active_children() if p not in others]
    assert len(processes) == 2
    endless.close()
    assert not any(process.is_alive() for process in processes)


def test_launch_says_what_it_needs(monkeypatch):
    for ranks in (0, "2", True, 1.5):
        with pytest.raises(ga.errors.ArgumentError, match=f"ranks is {ranks!r}; expected a whole"):
            ga.launch(checks.nothing, ranks)
    with pytest.raises(ga.errors.ArgumentError, match="args is 5; expected a tuple"):
        ga.launch(checks.nothing, 2, 5)
    for seconds in (-1, 0, float("nan"), float("inf"), "a"):
        with pytest.raises(ga.errors.ArgumentError, match=f"timeout is {seconds!r}; expected"):
            ga.launch(checks.nothing, 1, timeout=seconds)
    with pytest.raises(
        ga.errors.ArgumentError, match="backend is 'mpi'; expected one of nccl, gloo"
    ):
        ga.launch(checks.nothing, 2, backend="mpi")
    if torch.cuda.device_count() < 64:
        message = "64 ranks with backend 'nccl' need a GPU each, and this machine has"
        with pytest.raises(ga.errors.ArgumentError, match=message):
            ga.launch(checks.nothing, 64, backend="nccl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        with pytest.raises(ga.errors.ArgumentError, match="on Windows expected WSL"):
            ga.launch(checks.nothing, 2)


def test_what_a_function_refers_to_goes_with_it_or_is_an_error():
    """And so does what it returns."""
    factor, lock = 5, threading.Lock()

    def work(x):
        return dist.get_rank(), x * factor

    assert ga.launch(work, 2, (3,), backend="gloo") == [(0, 15), (1, 15)]
    message = "<lambda> or its args cannot be handed to new processes: .*lock"
    with pytest.raises(ga.errors.ArgumentError, match=message):
        ga.launch(lambda: lock, 2, backend="gloo")
    with pytest.raises(ga.errors.RankError, match="what the function returned cannot be sent back"):
        ga.launch(lambda: threading.Lock(), 1)


def test_classes_of_a_notebook_come_back_as_themselves():
    """And a rank has the variables that its parent has now, not when the server was started."""

    class Answer:
        def __init__(self, variable):
            self.variable = variable

    def work(name):
        return Answer(os.environ.get(name))

    name = "GPUACCEL_TEST_LAUNCH"
    assert ga.launch(lambda: work(name), 1)[0].variable is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "5")
        (answer,) = ga.launch(lambda: work(name), 1)
    assert type(answer) is Answer and answer.variable == "5"


@pytest.mark.slow
def test_every_rank_gets_tensors_of_its_own():
    t, model = torch.zeros(2), torch.nn.Linear(1, 1)
    before = model.weight.item()
    for rank, (got, weight) in enumerate(ga.launch(checks.adds_to_what_it_gets, 2, (t, model))):
        assert got.tolist() == [rank + 1.0] * 2 and weight.item() == pytest.approx(before + 1)
        assert weight.requires_grad
    assert t.tolist() == [0.0, 0.0] and model.weight.item() == before


@pytest.mark.slow
def test_a_rank_may_have_processes_of_its_own():
    batches = ga.launch(checks.loads_with_a_worker, 2)
    assert batches == [[[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 7.0]]]


@pytest.mark.slow
def test_a_result_that_cannot_be_unpickled_names_its_rank():
    message = "what rank [01] returned cannot be unpickled: TypeError"
    with pytest.raises(ga.errors.RankError, match=message):
        ga.launch(checks.returns_what_cannot_be_unpickled, 2)


# ---- a rank that fails ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble, message",
    [
        (checks.raises, "rank 1 raised ValueError: no more data. All ranks were stopped"),
        (checks.killed, "rank 1 was killed by SIGKILL in step 4"),
        (checks.leaves, "rank 1 ended with status 3 in step 4"),
        (
            checks.hangs,
            r"rank 1 hangs: another rank has waited for it in a collective for 5 s; "
            r"rank 1 is in step 4, in hangs \(rank_checks\.py, line \d+\)\. All ranks",
        ),
    ],
)
def test_trouble_on_one_rank_stops_all_and_names_it(trouble, message):
    """Five seconds, in which a rank that is well finishes a backward on a busy machine too."""
    with pytest.raises(ga.errors.RankError, match=message):
        by_value(checks.steps_with, 2, trouble, 1, timeout=5.0, start=HANG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, group, place",
    [
        ("sleeps", "all", "in sleeps_or"),
        ("loops", "of two", "in sleeps_or"),
        ("stops", "all", "stopped, by"),
    ],
)
def test_a_rank_that_does_not_reach_a_collective_is_named(how, group, place):
    """Of torch's, without a TrainStep, also in a group of its own: within `timeout`. Rank 2 is well
    and waits, or has returned."""
    message = f"^rank 1 hangs: another .* in a collective for 3 s; rank 1 is {place}"
    with pytest.raises(ga.errors.RankError, match=message) as error:
        by_value(checks.sleeps_or_loops, 3, how, group, timeout=3.0, start=HANG)
    stack = "".join(getattr(error.value, "__notes__", []))
    assert how == "stops" or "_run_rank" in stack


def test_ranks_compute_as_long_as_they_like_while_none_waits():
    assert by_value(checks.computes, 2, 3.0, timeout=2.0) == [0, 1]


@pytest.mark.parametrize(
    "heartbeats, steps, stopped, limit, place",
    [
        ([3, 2], [2, 1], [], 5, r"in step 2, in work \(train\.py, line 7\)\. All"),
        ([2, 0], [0, 0], [], 9, r"in work \(train\.py, line 7\)\. All"),
        ([3, 3], [2, 2], [1], 5, "in step 3, stopped, by SIGSTOP"),
        ([3, 3], [2, 2], [], None, None),
    ],
)
def test_heartbeats_tell_who_hangs(heartbeats, steps, stopped, limit, place, monkeypatch):
    """Where GPUs wait for each other in a graph, no call of a waiting rank returns. 5 seconds are
    the limit, 9 until the first step is over; after 12 both ranks return."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    seconds, wait = itertools.count(), multiprocessing.connection.wait

    def clock():
        now = next(seconds)
        for rank, (_, sending) in enumerate(pipes if now == 12 else ()):
            sending.send_bytes(pickle.dumps(("returned", f"result {rank}")))
        return now

    monkeypatch.setattr(spawn, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(multiprocessing.connection, "wait", lambda each, timeout: wait(each, 0))
    stack = ['  File "/home/train.py", line 7 in work', '  File "/home/train.py", line 9 in main']
    monkeypatch.setattr(spawn, "stack_of", lambda pid, path: [] if pid in stopped else stack)
    monkeypatch.setattr(spawn, "is_stopped", lambda pid: pid in stopped)
    job = spawn.Job({}, b"", 2, "gloo", "", 5.0, 9.0, {}, steps, heartbeats, None)
    watch = spawn.RankWatch(job)
    watch.connections = [receiving for receiving, _ in pipes]
    watch.processes = [SimpleNamespace(pid=rank) for rank in range(2)]
    if place is None:
        with pytest.raises(StopIteration) as end:
            next(watch.wait())
        assert end.value.value == ["result 0", "result 1"]
        return
    message = f"^rank 1 hangs: another .* in a collective for {limit} s; rank 1 is {place}"
    with pytest.raises(ga.errors.RankError, match=message) as error:
        next(watch.wait())
    assert next(seconds) == limit + 2
    (note,) = error.value.__notes__
    assert note.splitlines()[1:] == ([] if stopped else stack)


def test_an_aborted_rank_and_one_that_it_may_have_waited_for_are_named():
    """So NCCL ends a process whose collective is not over in time."""
    message = (
        r"rank 0 was killed by SIGABRT; rank 1 is in hangs \(rank_checks\.py, line \d+\)\. All"
    )
    with pytest.raises(ga.errors.RankError, match=message):
        by_value(checks.aborts_beside_one_that_hangs, 3)


def test_a_rank_that_returned_before_a_collective_is_named():
    message = "rank 1 has returned, and rank 0 waits for it. Every rank makes"
    with pytest.raises(ga.errors.RankError, match=message):
        by_value(checks.sleeps_or_loops, 2, "returns", "all")


@pytest.mark.slow
def test_an_error_is_told_though_the_step_is_closed_behind_it():
    with pytest.raises(ga.errors.RankError, match="rank 1 raised ValueError: bad sample"):
        by_value(checks.raises_in_the_third_step, 2, [1], timeout=HANG)


@pytest.mark.slow
def test_moments_stay_when_all_ranks_have_caught_the_error():
    one, other = by_value(checks.raises_in_the_third_step, 2, [0, 1], timeout=HANG)
    assert one == other > 0


@pytest.mark.slow
def test_a_rank_outside_of_the_group_that_trains_does_not_hang():
    work = checks.evaluates_beside_a_group_that_trains
    results = ga.launch(work, 3, (9.0,), timeout=6.0, start=6.0)
    assert results == ["trained", "trained", "evaluated"]


@pytest.mark.slow
def test_ranks_stop_after_the_same_step_of_a_second_train_step():
    most = 3000
    # A process in the background of a shell ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        steps = ga.launch(checks.trains_twice, 2, (most,), after_step=True, timeout=HANG)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps[0] == steps[1] < most


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble, step",
    [((checks.hangs, checks.nothing), ""), ((checks.nothing, checks.hangs), "in step 1, ")],
)
def test_a_rank_that_hangs_before_its_first_step_is_over_is_named(trouble, step):
    """Kernels may be compiled until then: it has a limit of its own."""
    message = f"rank 1 hangs: another .* in a collective for 8 s; rank 1 is {step}in hangs"
    with pytest.raises(ga.errors.RankError, match=message):
        work = checks.trouble_until_its_first_step_is_over
        by_value(work, 2, *trouble, timeout=3.0, start=8.0)


@pytest.mark.slow
def test_a_rank_may_be_slow_until_its_first_step_is_over():
    """Slower than `timeout`: before it makes its TrainStep, and in its first backward."""
    slow = functools.partial(time.sleep, 3.0)
    work = checks.trouble_until_its_first_step_is_over
    assert by_value(work, 2, slow, slow, timeout=2.0) == [0, 1]


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_a_rank_that_returned_while_another_waits_for_it_is_named(broadcast_buffers, tmp_path):
    """By ga.launch, at the first collective of a step or behind its backward. The rank that waits
    knows only that a connection was closed."""
    path = tmp_path / "error of rank 0"
    message = (
        r"rank 1 has returned, after 2 steps, and rank 0 waits for it in step 3\..*step\(None\)"
    )
    with pytest.raises(ga.errors.RankError, match=message):
        by_value(checks.fewer_steps, 2, path, broadcast_buffers)
    assert path.read_text().startswith("rank 0 of 2 cannot reach another one in step 3: ")


@pytest.mark.slow
def test_an_error_between_two_steps_does_not_wait_for_the_others(tmp_path):
    """Neither the loop's last checkpoint nor the closing of a sharded optimizer, which would take
    all ranks."""
    with pytest.raises(ga.errors.RankError, match="rank 1 raised ValueError: no more data"):
        by_value(checks.fails_between_steps, 2, str(tmp_path), timeout=HANG)
    assert ga.training.latest_checkpoint(tmp_path).name == "step-00000002.sharded"


# ---- a parent that ends --------------------------------------------------------------------------

STARTS = """
import os, sys, time
import torch.distributed as dist
import gpuaccel as ga

def work():
    open(f"{sys.argv[1]}/{dist.get_rank()}", "w")
    time.sleep(600)

if __name__ == "__main__":
    print("now", flush=True)
    ga.launch(work, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seed", ["they run", *range(int(os.environ.get("GPUACCEL_KILLS", 2)))])
def test_nothing_is_left_of_a_launch_whose_parent_is_killed(tmp_path, sent, seed):
    """When the ranks run, and at any moment: while the server imports torch, while the ranks find
    each other, or later. More: GPUACCEL_KILLS=30 python -m pytest tests/distributed/test_launch.py
    -k nothing_is_left"""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    parent.stdout.readline()
    if seed == "they run":
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), parent)
    else:
        time.sleep(7 * random.Random(seed).random())
    parent.send_signal(sent)
    parent.wait(HANG)
    assert not outlive(session_of(parent.pid), 30)
    # A rank that was about to start has not been there yet.
    assert not outlive(session_of(parent.pid), 30)
    parent.communicate()


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("import os, gpuaccel as ga\nga.launch(os.getpid, 2)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=HANG
    )
    message = "raised ArgumentError: ga.launch was called by a rank that imports this script"
    assert done.returncode == 1 and message in done.stderr


@pytest.mark.slow
def test_ranks_that_return_at_once_wait_until_all_have_met():
    """One that leaves earlier closes a connection that another one still makes."""
    for _ in range(40):
        assert by_value(os.getenv, 2, "RANK", backend="gloo") == ["0", "1"]


@pytest.mark.slow
def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    script = "import gpuaccel as ga; print(ga.launch(lambda: 7, 2))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.stdout.strip() == "[7, 7]", done.stderr


# ---- torch.compile in a rank ---------------------------------------------------------------------

COMPILED = """
import torch
import gpuaccel as ga

@torch.compile
def before(x):
    return x.sin() + 1

def after(x):
    return x.cos() * 3 + x

before(torch.ones(70))
print(ga.launch(lambda: float(torch.compile(after)(torch.zeros(90)).sum()), 2))
"""


@pytest.mark.slow
def test_a_rank_compiles_after_its_parent_has(tmp_path):
    """The threads in which the parent ran the C++ compiler are not in a fork."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "GPUACCEL_GPU": "off"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[270.0,", "270.0]"]
