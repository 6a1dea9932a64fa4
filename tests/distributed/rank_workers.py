"""Rank processes that live for the whole test run, and run the checks they are given.

>>> workers = Workers(4)
>>> workers(rank_checks.start_equal, ranks=3)             # [True, True, True]
>>> workers.errors(rank_checks.drift, ranks=3, who=1)     # [("RankError", "after step ..."), ...]
"""

import contextlib
import datetime
import multiprocessing
import os
import pathlib
import tempfile
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

PATIENCE = 300  # seconds until a rank that waits for another gives up


@dataclass
class Rank:
    """Where a check runs: its first argument."""

    rank: int
    group: dist.ProcessGroup  # of the ranks that run the check
    alone: dist.ProcessGroup  # of this rank only
    ranks: int


@dataclass
class Answer:
    """Of one rank: what the check returned, or its error."""

    value: object = None
    error: tuple[str, str, str] | None = None  # type, message, traceback


class Workers:
    """`world` processes with a default group. Each check runs on the first `ranks` of them."""

    def __init__(self, world: int, backend: str = "gloo"):
        # Not fork: it cannot use a GPU, and the threads that torch.compile has started in this
        # process would be missing in the fork, which waits for them without end.
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(world):
            own, other = context.Pipe()
            path = pathlib.Path(self.folder.name, "store")
            process = context.Process(
                target=_serve, args=(rank, world, path, other, backend), daemon=True
            )
            process.start()
            self.connections.append(own)
            self.processes.append(process)

    def __call__(self, check, ranks: int, **options) -> list:
        """What each rank returned. An error of one is an AssertionError here."""
        answers = self._answers(check, ranks, options)
        for rank, answer in enumerate(answers):
            assert answer.error is None, f"rank {rank}: {answer.error[2]}"
        return [answer.value for answer in answers]

    def errors(self, check, ranks: int, **options) -> list:
        """(type, message) of the errors, which every rank raises."""
        answers = self._answers(check, ranks, options)
        errors = [answer.error[:2] for answer in answers if answer.error is not None]
        assert len(errors) == ranks, f"{ranks - len(errors)} of {ranks} ranks went on"
        return errors

    def _answers(self, check, ranks, options) -> list[Answer]:
        for connection in self.connections[:ranks]:
            connection.send((check, ranks, options))
        answers = []
        for rank, connection in enumerate(self.connections[:ranks]):
            assert connection.poll(2 * PATIENCE), (
                f"rank {rank} does not answer in {check.__name__}{options}"
            )
            answers.append(connection.recv())
        return answers

    def close(self):
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _serve(rank, world, path, connection, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, world + 1)}
    alone = [dist.new_group([r]) for r in range(world)][rank]
    # torch counts a process' groups; ranks with different counts cannot make groups of their own.
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    while (job := connection.recv()) is not None:
        check, ranks, options = job
        try:
            answer = Answer(check(Rank(rank, groups[ranks], alone, ranks), **options))
        except Exception as error:
            answer = Answer(error=(type(error).__name__, str(error), traceback.format_exc()))
        connection.send(answer)
    connection.close()
    # Without the clean-up of NCCL and gloo, which takes its time.
    os._exit(0)
