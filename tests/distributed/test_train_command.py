"""`gpuaccel train` with several ranks, started by itself and by torchrun."""

import contextlib
import os
import pathlib
import random
import signal
import sys

import pytest
import safetensors.torch
import torch
from train_processes import (
    HANG,
    children_of,
    free_port,
    gpuaccel,
    launched_ranks,
    listens_at,
    losses,
    newest_step,
    outlive,
    wait_until,
)


@pytest.mark.slow
def test_the_command_line_trains_with_ranks_and_resumes(one_process, tmp_path, interruptible):
    """--nproc 2 with a sharded optimizer, stopped by Ctrl-C after some step, then torchrun without
    to the end: the losses of one process, bit for bit (--ordered)."""
    folder = tmp_path / "run"
    first = gpuaccel(folder, *one_process.options, "--nproc", "2", "--sharded")
    wait_until(lambda: len(losses(folder)) >= 3, first)
    first.send_signal(signal.SIGINT)
    out, said = first.communicate(timeout=HANG)
    assert first.returncode == 130, (out, said)
    assert "checkpoint written; --resume continues" in said
    done = len(losses(folder))
    assert 3 <= done < len(one_process.losses)
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 "
        f"--master-port {free_port()} --max-restarts 1 --monitor-interval 0.1 -m gpuaccel"
    )
    resumed = (*one_process.options, "--resume", "--checkpoint-every", "2")
    rest = gpuaccel(folder, *resumed, launcher=torchrun.split())
    wait_until(lambda: newest_step(folder) > done + 1, rest)
    ranks = children_of(rest.pid)
    assert all(listens_at(rank) == {"127.0.0.1"} for rank in ranks)
    # torchrun starts all of them again, from the last checkpoint.
    os.kill(random.choice(ranks), signal.SIGKILL)
    out, said = rest.communicate(timeout=HANG)
    assert rest.returncode == 0 and out.count("val loss") == 1, said
    assert losses(folder) == one_process.losses


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["parent", "all"])
def test_sigterm_stops_all_ranks_after_the_same_step(tmp_path, whom):
    """Sent to the parent, or to all of its processes, as a service manager does."""
    folder = tmp_path / "run"
    process = gpuaccel(folder, "--nproc", "2", "--steps", "100000")
    wait_until(lambda: len(losses(folder)) >= 3, process)
    ranks = launched_ranks(process.pid)
    process.send_signal(signal.SIGTERM)
    if whom == "all":
        for rank in [*children_of(process.pid), *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGTERM)
    _, said = process.communicate(timeout=HANG)
    done = newest_step(folder)
    assert process.returncode == 128 + signal.SIGTERM, said
    stopped = f"gpuaccel: stopped after step {done}, checkpoint written; --resume continues"
    assert said.splitlines()[-1] == stopped and len(losses(folder)) == done
    assert not outlive(ranks)


@pytest.mark.slow
def test_ctrl_c_while_the_server_of_the_ranks_imports_torch_is_one_line(tmp_path, interruptible):
    """A terminal sends it to every process."""
    process = gpuaccel(tmp_path / "run", "--nproc", "2", session=True)

    def imports_torch():
        maps = [pathlib.Path(f"/proc/{child}/maps") for child in children_of(process.pid)]
        return any("libtorch" in path.read_text() for path in maps)

    wait_until(imports_torch, process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 130, said
    assert said.count("gpuaccel: stopped") == 1 and "Traceback" not in said, said


GPU_RUN = "--device cuda --replay graph --deterministic --steps 2000 --checkpoint-every 100"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, options",
    [
        (2, "--steps 60 --checkpoint-every 5"),
        pytest.param(2, GPU_RUN, marks=pytest.mark.gpu),
        pytest.param(4, GPU_RUN, marks=pytest.mark.gpu),
    ],
)
def test_a_rank_that_is_killed_or_hangs_is_named_and_the_run_goes_on_bit_for_bit(
    tmp_path, ranks, options
):
    if "cuda" in options and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, and this machine has {torch.cuda.device_count()}")
    options = [*options.split(), "--nproc", str(ranks), "--timeout", "6", "--resume"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    _, said = gpuaccel(whole, *options).communicate(timeout=HANG)
    assert newest_step(whole) == len(losses(whole)) and "eagerly" not in said, said
    for sent, words in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "hangs")):
        done = newest_step(folder)
        process = gpuaccel(folder, *options)
        wait_until(lambda: newest_step(folder) > done, process)
        processes = launched_ranks(process.pid)
        os.kill(processes[ranks - 1], sent)
        _, said = process.communicate(timeout=HANG)
        assert process.returncode == 1 and f"rank {ranks - 1} {words}" in said, said
        assert not outlive(processes)
        assert newest_step(folder) < newest_step(whole)
    _, said = gpuaccel(folder, *options).communicate(timeout=HANG)
    assert losses(folder) == losses(whole), said
    last = f"step-{newest_step(whole):08}.safetensors"
    one, other = (safetensors.torch.load_file(path / last) for path in (folder, whole))
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different
