"""ga.train(log=...): a row of numbers per step, none twice after a resume, and no wait."""

import json
import pathlib

import pytest
import torch
from test_readme import ROOT
from test_readme import blocks as page_blocks
from test_readme import names as page_names
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError
from gpuaccel.measure import LateValue
from gpuaccel.training.logs import RunLog

PAGE = ROOT / "docs" / "logging.md"


def model_and_step():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    return ga.TrainStep(model, max_norm=1.0)


def batches():
    generator = torch.Generator().manual_seed(2)
    while True:
        tokens = torch.randint(16, (2, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train(log, steps=5, **more):
    with model_and_step() as step:
        return list(ga.train(step, batches(), steps, log=log, **more))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_and_a_file_get_the_same_numbers(tmp_path):
    rows = []
    readings = train(rows.append, val=[next(batches())], val_every=2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["loss"] == readings[-1].loss and rows[-1]["norm"] == readings[-1].norm
    assert rows[-1]["clipped_norm"] <= 1.0 + 1e-6 and rows[-1]["lr"] > 0
    assert [row["tokens"] for row in rows] == [16, 32, 48, 64, 80]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 5]
    train(tmp_path / "a.jsonl", val=[next(batches())], val_every=2)
    written = rows_of(tmp_path / "a.jsonl")
    assert [row.keys() for row in written] == [row.keys() for row in rows]
    for name in ("step", "loss", "norm", "lr", "tokens", "val_loss"):
        assert [row.get(name) for row in written] == [row.get(name) for row in rows], name


def test_a_file_goes_on_after_the_checkpoint_and_a_torn_line_is_made_again(tmp_path):
    path = tmp_path / "run.jsonl"
    log = RunLog(path)
    for step in (1, 2, 3):
        log.add({"step": step, "loss": torch.tensor(1 / step), "lr": 0.5})
    log.close()
    path.write_text(path.read_text() + 'no JSON\n[3]\n{"step": "2"}\n{"step": 4, "lo')
    log = RunLog(path, resumed_step=2)
    log.add({"step": 3, "loss": torch.tensor(9.0), "lr": 0.5})
    log.close()
    assert [(row["step"], row["loss"]) for row in rows_of(path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    RunLog(path).close()
    assert rows_of(path) == [], "a new run begins its file"


def test_a_row_waits_for_its_values_and_the_run_does_not(monkeypatch):
    made = []

    class Late(LateValue):
        """A value that arrives when it is told to, in place of a copy from a GPU."""

        def __init__(self):
            super().__init__()
            self.value = None
            made.append(self)

        def put(self, value, tag):
            self.queued = (float(value), tag)

        def get(self):
            return self.value

        def arrive(self):
            self.value, self.tag = self.queued

    monkeypatch.setattr("gpuaccel.training.logs.LateValue", Late)
    rows = []
    log = RunLog(rows.append)
    for step in (1, 2):
        log.add({"step": step, "loss": torch.tensor(float(step)), "norm": torch.tensor(5.0)})
    assert rows == []
    made[0].arrive()
    made[2].arrive()
    made[3].arrive()
    log.flush()
    assert rows == [], "the norm of step 1 has not arrived, and rows keep their order"
    made[1].arrive()
    log.flush()
    assert [(row["step"], row["loss"], row["norm"]) for row in rows] == [(1, 1.0, 5.0), (2, 2.0, 5)]
    log.add({"step": 3, "loss": torch.tensor(3.0)})
    assert len(made) == 4, "a value that was written is used again"
    assert len(rows) == 2, "its old value is not that of step 3"


@pytest.mark.gpu
def test_logging_does_not_wait_for_the_gpu(tmp_path):
    path = tmp_path / "a.jsonl"
    log = RunLog(path)
    x = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 6):
            for _ in range(20):
                x = (x @ x).mul_(0.0).add_(step)
            log.add({"step": step, "loss": x[0, 0], "norm": x[1, 1]})
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    torch.cuda.synchronize()
    log.close()
    assert [(row["step"], row["loss"], row["norm"]) for row in rows_of(path)] == [
        (step, float(step), float(step)) for step in range(1, 6)
    ]


@pytest.mark.parametrize("log", ["run.csv", "run", "tensorboard:runs", 3, ["a.jsonl", print]])
def test_a_place_that_is_none_is_refused_before_anything_changes(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with model_and_step() as step:
        before = [p.clone() for p in step.model.parameters()]
        with pytest.raises(
            ArgumentError, match="log is .*; expected a path that ends in .jsonl, or a func"
        ):
            next(ga.train(step, batches(), 3, log=log))
        assert all(map(torch.equal, before, step.model.parameters()))
    assert not list(tmp_path.iterdir())


# ---- docs/logging.md ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page's examples leave behind, and the folder that they ran in."""
    pytest.importorskip("tensorboard", reason="of the extra `test`")
    pytest.importorskip("wandb", reason="of the extra `test`")
    folder, space = tmp_path_factory.mktemp("page"), page_names()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in page_blocks(PAGE):
            # A run that is finished shows no summary.
            code = code.replace("run.finish()\n", "")
            exec(compile(code, str(PAGE), "exec"), space)
        yield folder, space
        space["run"].finish()


@pytest.mark.slow
def test_tensorboard_reads_what_the_page_writes(page):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, space = page
    events = accumulator.EventAccumulator(str(folder / "runs" / "a"))
    events.Reload()
    rows = rows_of(folder / "run.jsonl")
    assert [row["step"] for row in rows] == [3, 4]
    for name in ("loss", "norm", "lr", "tokens_per_s"):
        read = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in read] == [1, 2, 3, 4]
        assert [value for _, value in read[2:]] == pytest.approx([row[name] for row in rows]), name
    assert set(rows[-1]["stages"]) <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_wandb_keeps_what_the_page_writes(page):
    _, space = page
    # A step is written when a later one begins.
    space["run"].log({}, step=7)
    summary = space["run"].summary
    assert summary["step"] == 6 and summary["loss"] == pytest.approx(space["reading"].loss)
    assert summary["stages"]["forward"] > 0
    # Another process writes the file, below the folder in which this one first used wandb.
    space["run"].finish()
    assert list(pathlib.Path(space["run"].dir).parent.glob("*.wandb"))
