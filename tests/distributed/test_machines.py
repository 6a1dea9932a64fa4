"""Several machines: network namespaces joined by a cable, each with its name, its address and its own idea of who has which; gloo between them."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import rank_checks as checks

from gpuaccel.distributed.rendezvous import interface_to, loopback

HANG = checks.HANG
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
ADDRESS = "10.97.0."


class Machines:
    """Two machines, "first-machine" and "second-machine", and nothing else that they could reach. here[i]: what starts a command on machine i."""

    def __init__(self, folder):
        user, self.held, self.here = os.geteuid() != 0, [], []
        for nth, name in enumerate(("first-machine", "second-machine")):
            new = [
                "unshare",
                *["--user", "--map-root-user"] * (user and nth == 0),
                "--net",
                "--uts",
                "--mount",
            ]
            inside = (
                ["nsenter", "-t", str(self.held[0].pid), "-U", "--preserve-credentials"]
                if user and nth
                else []
            )
            self.held.append(
                subprocess.Popen(
                    [*inside, *new, "sh", "-c", f"hostname {name} && echo there && exec sleep 600"],
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            if self.held[nth].stdout.readline() != "there\n":
                raise OSError(self.held[nth].communicate()[1].strip())
            self.here.append(
                [
                    "nsenter",
                    "-t",
                    str(self.held[nth].pid),
                    *["-U", "--preserve-credentials"] * user,
                    "-n",
                    "-u",
                    "-m",
                ]
            )
        self.run(0, f"ip link add cable type veth peer name cable netns {self.held[1].pid}")
        for nth, name in enumerate(("first-machine", "second-machine")):
            hosts = (
                folder / f"hosts-{nth}"
            )  # each takes its own name for loopback, as Debian has it, but for the meeting point
            hosts.write_text(
                f"127.0.0.1 localhost\n{ADDRESS}1 first-machine\n"
                + "127.0.1.1 second-machine\n" * nth
            )
            self.run(
                nth,
                f"ip addr add {ADDRESS}{nth + 1}/24 dev cable && ip link set cable up && ip link set lo up && mount --bind {hosts} /etc/hosts",
            )

    def run(self, nth, command):
        done = subprocess.run(
            [*self.here[nth], "sh", "-c", command], text=True, capture_output=True
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")

    def close(self):
        for one in self.held:
            one.kill()
            one.communicate()


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    found = object.__new__(Machines)
    try:
        found.__init__(tmp_path_factory.mktemp("machines"))
    except OSError as error:
        found.close()
        pytest.skip(f"needs network namespaces (unshare, nsenter, ip): {error}")
    yield found
    found.close()


def test_an_address_is_reached_through_an_interface_or_it_is_not_known():
    assert (
        interface_to("127.0.0.1"),
        interface_to("localhost"),
        interface_to("nowhere.invalid"),
    ) == (loopback(), loopback(), None)


def command_of_the_page():
    """The one for several machines, as words, without what gpuaccel train is told."""
    line = re.search(
        r"^(torchrun --nnodes 2 .* -m gpuaccel) train\b.*$", PAGE.replace("\\\n", " "), re.M
    )
    return tuple(
        shlex.split(line[1].replace("torchrun", f"{sys.executable} -m torch.distributed.run"))
    )


def test_two_machines_train_as_one_process_and_start_again_when_a_rank_is_killed(
    machines, tmp_path
):
    """The command of docs/several-gpus.md on each: the losses of one process, bit for bit (--ordered). Killed on the second machine: all ranks go on from the last
    checkpoint, though only one machine counts a restart. Reducer listen on the cable, whatever their machine's name says."""
    options = ("--ordered", "--steps", "20", "--resume", "--checkpoint-every", "2")
    whole = checks.gpuaccel(tmp_path / "a", *options)
    launcher = command_of_the_page()
    assert (
        launcher[-2:] == ("-m", "gpuaccel")
        and "first-machine:29400" in launcher
        and "--max-restarts" in launcher
    )
    two = [
        checks.gpuaccel(
            tmp_path / "b",
            *options,
            launcher=(*here, *launcher[:-2], "--monitor-interval", "0.1", *launcher[-2:]),
        )
        for here in machines.here
    ]
    until = time.monotonic() + HANG
    try:
        while not any(
            checks.step_of(path) >= 4 for path in (tmp_path / "b").glob("step-*.safetensors")
        ):
            assert all(one.poll() is None for one in two) and time.monotonic() < until, [
                one.communicate() for one in two if one.poll() is not None
            ]
            time.sleep(0.05)
        (rank,) = checks.children_of(two[1].pid)
        listened = checks.listens_at(rank)
        os.kill(rank, signal.SIGKILL)
        said = [one.communicate(timeout=HANG) for one in two]
    finally:
        for one in two:
            for left in checks.children_of(one.pid) if one.poll() is None else ():
                os.kill(left, signal.SIGKILL)
            one.kill()
    assert [one.returncode for one in two] == [0, 0] and whole.wait(HANG) == 0, said
    assert listened == {f"{ADDRESS}2"}
    assert sum(out.count("val loss") for out, _ in said) == 1
    assert (
        checks.lines_of(tmp_path / "b") == checks.lines_of(tmp_path / "a")
        and len(checks.lines_of(tmp_path / "a")) == 20
    )
