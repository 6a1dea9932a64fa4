"""ga.train(log=...): the same numbers in every place, none twice after a resume, and no wait."""

import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from torch import nn

import gpuaccel as ga
from gpuaccel.errors import ArgumentError, DataError
from gpuaccel.measure import LateValue
from gpuaccel.training import RunLog, check_log, read_csv, read_json_lines


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


def events(folder):
    """name -> [(step, value)] of the TensorBoard files in a folder, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = accumulator.EventAccumulator(str(folder))
    loaded.Reload()
    names = loaded.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in loaded.Scalars(name)] for name in names}


def test_every_place_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard", reason="of the extra `tensorboard`")
    rows = []
    board = tmp_path / "board"
    places = [tmp_path / "a.jsonl", str(tmp_path / "a.csv"), f"tensorboard:{board}", rows.append]
    readings = train(places, val=[next(batches())], val_every=2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["loss"] == readings[-1].loss and rows[-1]["norm"] == readings[-1].norm
    assert rows[-1]["clipped_norm"] <= 1.0 + 1e-6 and rows[-1]["lr"] > 0
    assert [row["tokens"] for row in rows] == [16, 32, 48, 64, 80]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 5]
    assert read_json_lines((tmp_path / "a.jsonl").read_text()) == rows
    written = read_csv((tmp_path / "a.csv").read_text())
    assert written == [{n: v for n, v in row.items() if n != "stages"} for row in rows]
    seen = events(board)
    for name in ("loss", "norm", "lr", "tokens_per_s", "val_loss"):
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert [step for step, _ in seen[name]] == [step for step, _ in expected]
        assert [v for _, v in seen[name]] == pytest.approx([v for _, v in expected]), name
    stages = {f"stages/{name}" for row in rows for name in row.get("stages", {})}
    assert stages <= seen.keys()


@pytest.mark.parametrize("suffix, read", [(".jsonl", read_json_lines), (".csv", read_csv)])
def test_a_file_goes_on_after_the_checkpoint_and_a_torn_line_is_made_again(tmp_path, suffix, read):
    path = tmp_path / f"run{suffix}"
    log = RunLog([path])
    for step in (1, 2, 3):
        log.add({"step": step, "loss": torch.tensor(1 / step), "lr": 0.5})
    log.close()
    path.write_text(path.read_text() + path.read_text().splitlines()[-1][:-1].replace("3", "4", 1))
    log = RunLog([path], resumed_step=2)
    log.add({"step": 3, "loss": torch.tensor(9.0), "lr": 0.5})
    log.close()
    rows = read(path.read_text())
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    RunLog([path]).close()
    assert read(path.read_text()) == [], "a new run begins its file"


def test_a_resumed_run_hides_the_events_that_it_makes_again(tmp_path):
    pytest.importorskip("tensorboard", reason="of the extra `tensorboard`")
    place = f"tensorboard:{tmp_path}"
    for first, loss, resumed in ((1, 1.0, 0), (3, 2.0, 2)):
        log = RunLog([place], resumed_step=resumed)
        for step in range(first, first + 4):
            log.add({"step": step, "loss": loss})
        log.close()
    assert events(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), *((step, 2.0) for step in (3, 4, 5, 6))]


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
    log = RunLog([rows.append])
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
    rows = []
    log = RunLog([rows.append, tmp_path / "a.csv", tmp_path / "a.jsonl"])
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
    assert [(row["step"], row["loss"], row["norm"]) for row in rows] == [
        (step, float(step), float(step)) for step in range(1, 6)
    ]


@pytest.mark.parametrize("log", ["run.txt", "run", "tensorboard", "wandb:", 3, ["a.csv", None]])
def test_a_place_that_is_none_is_refused_before_anything_changes(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with model_and_step() as step:
        before = [p.clone() for p in step.model.parameters()]
        with pytest.raises(ArgumentError, match="log is .*; expected a path that ends in .jsonl"):
            next(ga.train(step, batches(), 3, log=log))
        assert all(map(torch.equal, before, step.model.parameters()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ArgumentError, match=rf"not installed: pip install 'gpuaccel\[{library}\]'"):
        check_log([print, f"{library}:x"])


def test_a_place_that_cannot_be_written_closes_the_others(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="log is .*file/a.csv, which cannot be written"):
        train([tmp_path / "b.csv", tmp_path / "file" / "a.csv"])


WANDB = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_logs
rows = []
test_logs.train(["wandb:lesson", rows.append])
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_wandb_writes_a_run_without_a_network(tmp_path):
    """Offline, in a process that has no network where the system allows that."""
    pytest.importorskip("wandb", reason="of the extra `wandb`")
    command = [sys.executable, "-c", WANDB, os.path.dirname(__file__)]
    unshare = ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") and not subprocess.run([*unshare, "true"]).returncode:
        command = [*unshare, "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh", *command]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    seen = wandb_history(file)
    assert [row["_step"] for row in seen] == [row["step"] for row in rows]
    assert [row["loss"] for row in seen] == [row["loss"] for row in rows]


def wandb_history(file):
    """The rows of a run's file: records in the blocks of LevelDB's log format, behind a header."""
    from wandb.proto import wandb_internal_pb2

    data, position, rows, parts = file.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            rows += [row] if row else []
    return rows
