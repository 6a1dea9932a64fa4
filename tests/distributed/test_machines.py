"""Several machines: network namespaces joined by a cable, each with its name, its address and its
own idea of who has which; gloo between them."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
from train_processes import (
    HANG,
    children_of,
    gpuaccel,
    kill,
    listens_at,
    losses,
    newest_step,
    wait_until,
)

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
NAMES = ("first-machine", "second-machine")
ADDRESSES = ("10.97.0.1", "10.97.0.2")


class Machines:
    """Two machines, and nothing else that they could reach. prefix[i]: what starts a command on
    machine i."""

    def __init__(self):
        # Processes that keep the namespaces alive.
        self.holders: list[subprocess.Popen] = []
        self.prefix: list[list[str]] = []

    def start(self, folder):
        """OSError where that is not permitted."""
        for number in range(2):
            self._make_namespaces(number)
        peer = self.holders[1].pid
        self.run(0, f"ip link add cable type veth peer name cable netns {peer}")
        for number, address in enumerate(ADDRESSES):
            hosts = folder / f"hosts-{number}"
            lines = ["127.0.0.1 localhost", f"{ADDRESSES[0]} {NAMES[0]}"]
            if number == 1:
                # A machine takes its own name for loopback, as Debian has it, unless the ranks meet
                # there.
                lines.append(f"127.0.1.1 {NAMES[1]}")
            hosts.write_text("\n".join(lines) + "\n")
            self.run(number, f"ip addr add {address}/24 dev cable")
            self.run(number, "ip link set cable up && ip link set lo up")
            self.run(number, f"mount --bind {hosts} /etc/hosts")

    def _make_namespaces(self, number):
        root = os.geteuid() == 0
        inside, new = [], ["unshare", "--net", "--uts", "--mount"]
        if not root and number == 0:
            new += ["--user", "--map-root-user"]
        elif not root:
            first = str(self.holders[0].pid)
            inside = ["nsenter", "-t", first, "-U", "--preserve-credentials"]
        hold = f"hostname {NAMES[number]} && echo ready && exec sleep 600"
        holder = subprocess.Popen(
            [*inside, *new, "sh", "-c", hold],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            raise OSError(holder.communicate()[1].strip())
        user = [] if root else ["-U", "--preserve-credentials"]
        self.prefix.append(["nsenter", "-t", str(holder.pid), *user, "-n", "-u", "-m"])

    def run(self, number, command):
        done = subprocess.run(
            [*self.prefix[number], "sh", "-c", command], text=True, capture_output=True
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    two = Machines()
    try:
        two.start(tmp_path_factory.mktemp("machines"))
        yield two
    except OSError as error:
        pytest.skip(f"needs network namespaces (unshare, nsenter, ip): {error}")
    finally:
        kill(*two.holders)


def command_of_the_page():
    """The one for several machines, without the arguments of gpuaccel train."""
    text = PAGE.replace("\\\n", " ")
    line = re.search(r"^torchrun (--nnodes 2 .* -m gpuaccel) train\b.*$", text, re.M)
    return [sys.executable, "-m", "torch.distributed.run", *shlex.split(line[1])]


@pytest.mark.slow
def test_two_machines_train_as_one_process_and_start_again_when_a_rank_is_killed(
    machines, one_process, tmp_path
):
    """The command of docs/several-gpus.md on each, with two ranks and --ordered: the losses of one
    process, bit for bit. When a rank of the second machine is killed, all ranks go on from the last
    checkpoint, though only one machine counts a restart. Ranks listen on the cable, whatever their
    machine's name says."""
    ranks = 2
    command = command_of_the_page()
    assert command[-2:] == ["-m", "gpuaccel"]
    assert "first-machine:29400" in command and "--max-restarts" in command
    launcher = [*command[:-2], "--monitor-interval", "0.1", *command[-2:]]
    launcher[launcher.index("--nproc-per-node") + 1] = str(ranks)
    folder = tmp_path / "run"
    options = [*one_process.options, "--resume", "--checkpoint-every", "2"]
    two = [gpuaccel(folder, *options, launcher=[*prefix, *launcher]) for prefix in machines.prefix]
    try:
        wait_until(lambda: newest_step(folder) >= 4, *two)
        killed, *others = children_of(two[1].pid)
        assert len(others) == ranks - 1
        addresses = listens_at(killed)
        os.kill(killed, signal.SIGKILL)
        outputs = [process.communicate(timeout=HANG) for process in two]
    finally:
        for process in two:
            for child in children_of(process.pid) if process.poll() is None else ():
                os.kill(child, signal.SIGKILL)
            process.kill()
    assert [process.returncode for process in two] == [0, 0], outputs
    assert addresses == {ADDRESSES[1]}
    assert sum(out.count("val loss") for out, _ in outputs) == 1
    assert losses(folder) == one_process.losses
