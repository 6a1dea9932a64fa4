"""The command line: its output, its exit status, and a run that survives a kill."""

import dataclasses
import errno
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import gpuaccel as ga
from gpuaccel import training
from gpuaccel.backends import backend
from gpuaccel.cli import Doctor, main
from gpuaccel.cli.run_folder import lock_run
from gpuaccel.cli.signals import StopAfterStep
from gpuaccel.cli.train import RECIPES, Recipe, progress_bar, show_progress
from gpuaccel.compiler import kernel_files, kernel_names
from gpuaccel.measure import Reading
from gpuaccel.training import models


def run(*words, **env):
    """(exit status, stdout, stderr) of `gpuaccel WORDS` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuaccel", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


# ---- doctor -------------------------------------------------------------------------------------


def test_doctor_says_what_runs_and_why():
    found = ga.doctor()
    assert isinstance(found, Doctor) and found.facts["backend"] == backend().name
    text, page = str(found), found._repr_html_()
    for fact in ("backend", "reason", "GPU policy", "device", "architecture", "driver", "NVRTC"):
        assert fact in text and fact in page
    assert "cache" in text and "torch" in text
    assert backend().reason in text and ga.__version__ in text


def test_doctor_escapes_what_it_shows_as_html():
    assert "&lt;b&gt;" in Doctor({"reason": "<b>"}, [])._repr_html_()


@pytest.mark.slow
def test_doctor_as_json_and_without_a_gpu(tmp_path):
    status, out, _ = run("doctor", "--json", GPUACCEL_GPU="off", GPUACCEL_CACHE=str(tmp_path))
    facts = json.loads(out)
    assert status == 0 and facts["problems"] == []
    assert (
        facts["backend"] == "torch"
        and "GPUACCEL_GPU=off" in facts["reason"]
        and facts["device"] == "CPU"
    )


@pytest.mark.slow
def test_doctor_finds_problems_without_stopping_at_the_first(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    status, out, err = run(
        "doctor",
        GPUACCEL_BACKEND="abacus",
        GPUACCEL_NVRTC=str(tmp_path / "no.so"),
        GPUACCEL_CACHE=str(blocked / "cache"),
    )
    assert status == 1 and "Traceback" not in err
    problems = [line for line in out.splitlines() if line.startswith("problem")]
    assert len(problems) == 3, out
    assert "abacus" in out and "nvidia-cuda-nvrtc-cu12" in out and "GPUACCEL_CACHE" in out


# ---- kernels ------------------------------------------------------------------------------------


def test_kernels_lists_every_kernel_with_its_registers(capsys, monkeypatch):
    files = [path for path in kernel_files() if path.stem in ("accumulate", "clip")]
    # what else is in kernels_cu takes long to compile
    monkeypatch.setattr(sys.modules["gpuaccel.cli.kernels"], "kernel_files", lambda: files)
    assert main(["kernels", "--arch", "sm_80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sm_80, NVRTC ")
    rows = {line.split()[1]: line.split() for line in lines[2:]}
    assert set(rows) == {name for file in files for name in kernel_names(file.read_text())}
    assert all(int(row[2]) > 0 for row in rows.values())


def test_kernels_of_one_topic_and_of_a_file_of_ones_own(tmp_path, capsys):
    assert main(["kernels", "accumulate"]) == 0
    assert "accumulate_v1" in capsys.readouterr().out
    mine = tmp_path / "mine.cu"
    mine.write_text('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
    assert main(["kernels", str(mine)]) == 0
    assert "mine.cu" in (out := capsys.readouterr().out) and "twice" in out


@pytest.mark.parametrize(
    "source, expected",
    [
        ('extern "C" __global__ void k(float* x) { x[0] = nothing; }', "mine.cu(1)"),
        ("int nothing_here;", "has no kernel"),
    ],
)
def test_kernels_that_do_not_compile_are_an_error_in_words(tmp_path, capsys, source, expected):
    (tmp_path / "mine.cu").write_text(source)
    assert main(["kernels", str(tmp_path / "mine.cu")]) == 1
    assert expected in capsys.readouterr().err


SMALL = ["--text", "text", "--seq", "8", "--batch", "2", "--device", "cpu", "--steps", "1"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["kernels", "nowhere"], "accumulate.cu"),
        (["kernels", "--arch", "sm_1"], "sm_1"),
        (["train", "--text", "nowhere.txt", "--device", "cpu"], "nowhere.txt does not exist"),
        (["train", "--text", "empty", "--device", "cpu"], "empty is empty; expected a file"),
        (["train", "--text", "folder", "--device", "cpu"], "folder holds no text; expected"),
        (["train", "--out", "empty"], "--out is empty, which is a file; expected a folder"),
        (["train", "--out", "empty/run"], "--out is empty/run, which cannot be written"),
        (["train", *SMALL, "--batch", "100000"], "--batch is 100000, and the text has 13 sequenc"),
        (["train", *SMALL, "--batch", "100000"], "; expected 1 to 13"),
        (
            ["train", *SMALL, "--out", "taken"],
            "log is taken/metrics.jsonl, which cannot be written: Is a directory",
        ),
        (["train", *SMALL, "--resume", "x"], "--resume is x; expected a checkpoint in runs/tiny"),
        (["train", "--text", "x" * 5000], "File name too long"),
        (["kernels", "folder"], "folder"),
    ],
)
def test_an_error_is_one_line_and_status_1(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "text").write_text("0123456789" * 12)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("gpuaccel: ") and expected in err[-1]
    # the command that is refused last has said what it trains
    assert len(err) == (3 if "taken" in words else 1), err
    if "taken" not in words:
        assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "required: command"),
        (["docter"], "command: invalid choice: 'docter' (choose from "),
        (["train", "--model", "tinny"], "--model: invalid choice: 'tinny' (choose from "),
        (["train", "--steps", "0"], "--steps: is '0'; expected a whole number of at least 1"),
        (["train", "--steps", "ten"], "--steps: is 'ten'; expected a whole number of at least 1"),
        (["train", "--batch", "1.5"], "--batch: is '1.5'; expected a whole number of at least 1"),
        (["train", "--lr", "nan"], "--lr: is 'nan'; expected a number from 0 to 1"),
        (["train", "--lr", "-1"], "--lr: is '-1'; expected a number from 0 to 1"),
        (["train", "--seed", "9" * 20], f"expected a whole number from 0 to {2**63 - 1}"),
        (["train", "--nproc", "1000000"], "expected a whole number from 1 to 256"),
        (["train", "--timeout", "1e300"], "expected a number from 1 to 1000000"),
        (["train", "--out", ""], "--out: is ''; expected a path"),
        (["train", "--resume="], "--resume: is ''; expected a path"),
        (["train", "--resume", "a\0b"], "--resume: is 'a\\x00b'; expected a path"),
        (["kernels", ""], "file: is ''; expected a path"),
    ],
)
def test_wrong_usage_is_status_2(words, expected, capsys):
    """After the usage one sentence names the option, its value and what was expected."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: gpuaccel") and expected in err.splitlines()[-1]


def test_help_and_version_are_status_0(capsys):
    assert main(["--help"]) == main(["train", "--help"]) == main(["--version"]) == 0
    assert ga.__version__ in capsys.readouterr().out


# ---- progress -----------------------------------------------------------------------------------


def written(live, steps, monkeypatch, done=0, quiet=False):
    """What the progress of a run writes to stderr. live: to a terminal."""
    stream = io.StringIO()
    stream.isatty = lambda: live
    monkeypatch.setattr(sys, "stderr", stream)
    bar = progress_bar(steps, done, quiet)
    for step in range(done + 1, steps + 1):
        numbers = dict(tokens=step * 10, seconds=1.0, tokens_per_s=1234.0, step_ms=1.0)
        show_progress(bar, Reading(step=step, loss=2.5, **numbers))
    bar.close()
    return stream.getvalue()


def test_progress_writes_one_line_over_and_over_on_a_terminal(monkeypatch):
    text = written(True, 40, monkeypatch)
    assert text.count("\n") == 1 and text.count("\r") >= 2
    last = text.rpartition("\r")[2]
    assert last.startswith("step 40/40") and "loss 2.500, 1,234 tokens/s" in last


def test_progress_is_a_line_every_ten_steps_elsewhere(monkeypatch):
    lines = written(False, 25, monkeypatch, done=3).splitlines()
    assert [line.split()[1] for line in lines] == ["10/25,", "20/25,", "25/25,"]
    assert all(re.search(r"loss 2.500, 1,234 tokens/s, \d\d:\d\d left$", line) for line in lines)
    assert written(False, 25, monkeypatch, quiet=True) == ""


def test_ctrl_c_lets_the_step_finish_and_a_second_one_does_not(interruptible):
    with StopAfterStep() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- train --------------------------------------------------------------------------------------

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(400))
STEPS = 40


class Run:
    """`gpuaccel train` on a small text, in a process of its own."""

    def __init__(self, folder):
        self.out = folder / "run"
        (folder / "text.py").write_text(TEXT)
        words = ["--text", folder / "text.py", "--out", self.out, "--device", "cpu"]
        words += ["--steps", STEPS, "--batch", 4, "--seq", 24, "--micro-batches", 2, "--seed", 3]
        words += ["--val-every", 20, "--checkpoint-every", 7]
        self.words = ["train", *map(str, words)]
        self.process = None

    def start(self, *more):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuaccel", *self.words, *more],
            text=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self

    def lines(self):
        path = self.out / "metrics.jsonl"
        return (
            path.read_text().splitlines()[:-1] if path.is_file() else []
        )  # the last one may be half written

    def stop(self, sent, after):
        """Send a signal once `after` steps are in the metrics file."""
        until = time.monotonic() + 600
        while (
            len(self.lines()) < after and self.process.poll() is None and time.monotonic() < until
        ):
            time.sleep(0.005)
        self.process.send_signal(sent)
        return self.end()

    def end(self):
        out, err = self.process.communicate(timeout=600)
        return self.process.returncode, out, err

    def losses(self):
        rows = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [
            (row["step"], row["loss"], row["lr"], row["tokens"], row.get("val_loss"))
            for row in rows
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stops."""
    run = Run(tmp_path_factory.mktemp("whole")).start()
    status, out, err = run.end()
    assert status == 0, err
    return run, out, err


@pytest.mark.slow
def test_train_prints_losses_and_a_sample(whole):
    run, out, err = whole
    losses = run.losses()
    assert [row[0] for row in losses] == list(range(1, STEPS + 1))
    assert losses[0][1] > 5 and losses[-1][1] < 0.8 * losses[0][1]
    assert (
        f"train loss {losses[0][1]:.3f} -> {losses[-1][1]:.3f}" in out
        and f"val loss {losses[-1][4]:.3f}" in out
    )
    assert "def " in out.splitlines()[1]
    assert f"step {STEPS}/{STEPS}" in err and "\r" not in err and "Traceback" not in err
    kept = sorted(path.name for path in run.out.glob("step-*.safetensors"))
    assert kept[-1] == f"step-{STEPS:08d}.safetensors" and len(kept) == 3


@pytest.mark.slow
def test_killed_and_interrupted_it_resumes_bit_for_bit(whole, tmp_path, interruptible):
    uninterrupted, expected_out, _ = whole
    run = Run(tmp_path).start()
    status, _, err = run.stop(signal.SIGKILL, 10)
    assert status == -signal.SIGKILL, err

    run.start("--resume")
    status, _, err = run.stop(signal.SIGINT, 24)
    assert status == 130 and "Traceback" not in err, err
    stopped = len(run.losses())
    assert 24 <= stopped < STEPS and f"stopped after step {stopped}" in err
    assert (run.out / f"step-{stopped:08d}.safetensors").is_file()

    status, out, err = run.start("--resume").end()
    assert status == 0, err
    assert run.losses() == uninterrupted.losses()
    assert out.splitlines()[1:] == expected_out.splitlines()[1:], "another sample"
    name = f"step-{STEPS:08d}.safetensors"
    expected, weights = load_file(uninterrupted.out / name), load_file(run.out / name)
    assert expected.keys() == weights.keys()
    assert all(expected[key].equal(weights[key]) for key in expected)


def test_a_folder_has_one_writer(tmp_path, capsys):
    """Also one that is there already. A refused command leaves no folder behind."""
    run = Run(tmp_path)
    for exists in (False, True):
        if exists:
            run.out.mkdir()
        with lock_run(run.out):
            assert main(run.words) == 1
            held = "to which another process is writing; expected a folder that no other run"
            assert held in capsys.readouterr().err
            assert list(run.out.iterdir()) == []
        assert run.out.exists() == exists


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_last_whole_one_offered(whole, tmp_path, capsys):
    run = Run(tmp_path)
    text = whole[0].words[whole[0].words.index("--text") + 1]
    run.words[run.words.index("--text") + 1] = text
    shutil.copytree(whole[0].out, run.out)
    newest, *older = sorted(run.out.glob("step-*"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-100])
    content = older[0].read_bytes()
    assert main([*run.words, "--resume"]) == 1
    said = capsys.readouterr().err
    assert newest.name in said
    assert f"older ones that are whole: {older[0].name}, {older[1].name}" in said
    command = said.strip().partition("To lose only what came after it: ")[2]
    program, *words = shlex.split(command)
    assert program == "gpuaccel" and words == [*run.words, "--resume", older[0].name]
    assert main(words) == 0
    assert run.losses() == whole[0].losses() and older[0].read_bytes() == content
    assert load_file(newest).keys() == load_file(older[0]).keys()


@pytest.mark.slow
def test_more_steps_than_before_change_the_learning_rate_and_are_said(whole, tmp_path, capsys):
    run = Run(tmp_path)
    text = whole[0].words[whole[0].words.index("--text") + 1]
    run.words[run.words.index("--text") + 1] = text
    shutil.copytree(whole[0].out, run.out)
    assert main([*run.words, "--resume", "--steps", str(STEPS + 3)]) == 0
    said = capsys.readouterr().err
    assert f"--steps was {STEPS}, now {STEPS + 3}: from step {STEPS + 2} the learning rate" in said
    rates = [row[2] for row in run.losses()]
    assert rates[STEPS + 1] > rates[STEPS]


def test_a_run_that_ends_with_nan_says_so_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "tiny", Recipe("byte", 2, 3e38))
    (tmp_path / "text").write_text(TEXT)
    words = ["--text", tmp_path / "text", "--out", tmp_path / "run", "--steps", 3, "--seq", 8]
    assert main(["train", "--device", "cpu", "--no-progress", *map(str, words)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch("gpuaccel: .*(nan|not finite).*; expected a smaller --lr", said), said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_of_a_large_model_takes_the_default_dtype(dtype, tmp_path, monkeypatch, capsys):
    """And not bf16 wherever there is a GPU."""

    def small(name, **changes):
        return models.preset("tiny", layers=1, hidden=32, **changes)

    module = sys.modules["gpuaccel.cli.train"]
    monkeypatch.setattr(module, "preset", small)
    monkeypatch.setattr(module, "default_dtype", lambda: dtype)
    monkeypatch.setitem(RECIPES, "llama-350m", Recipe("byte", 2, 3e-3))
    (tmp_path / "text").write_text(TEXT)
    words = ["--text", tmp_path / "text", "--out", tmp_path / "run", "--steps", 2, "--seq", 8]
    words = ["--model", "llama-350m", "--device", "cpu", "--no-progress", *map(str, words)]
    assert main(["train", *words]) == 0
    assert f"parameters in {dtype}," in capsys.readouterr().err
    weights = load_file(next((tmp_path / "run").glob("**/*.safetensors")))
    assert dtype in {t.dtype for name, t in weights.items() if name.startswith("model.")}
    description = json.loads((tmp_path / "run" / "run.json").read_text())
    assert description["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.slow
def test_sigterm_saves_as_ctrl_c_does(tmp_path):
    run = Run(tmp_path).start("--no-progress")
    status, _, err = run.stop(signal.SIGTERM, 3)
    stopped = len(run.losses())
    said = f"gpuaccel: stopped after step {stopped}, checkpoint written; --resume continues"
    assert status == 128 + signal.SIGTERM and err.splitlines()[-1] == said, err
    assert (run.out / f"step-{stopped:08d}.safetensors").is_file()


def stopped_in_the_last_checkpoint(save, words, monkeypatch):
    """The exit status of a run that is stopped after its third step, with a last checkpoint that
    `save` writes."""
    train_module, loop = sys.modules["gpuaccel.cli.train"], sys.modules["gpuaccel.training.loop"]
    show, written = train_module.show_progress, loop.save_checkpoint

    def stop(bar, reading):
        if reading.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        show(bar, reading)

    monkeypatch.setattr(train_module, "show_progress", stop)
    monkeypatch.setattr(
        loop,
        "save_checkpoint",
        lambda path, step, **rest: (save if step == 3 else written)(path, step=step, **rest),
    )
    return main([*words, "--steps", "9"])


@pytest.fixture
def new_run(tmp_path):
    """The words of a run that has not been made."""
    (tmp_path / "text").write_text(TEXT)
    words = ["train", "--text", tmp_path / "text", "--out", tmp_path / "run", "--seq", 8]
    return [*map(str, words), "--batch", "2", "--no-progress", "--device", "cpu"]


@pytest.mark.parametrize("every, newest", [("9", None), ("2", "step-00000002.safetensors")])
def test_a_second_ctrl_c_in_the_last_checkpoint_says_which_one_there_is(
    every, newest, new_run, tmp_path, monkeypatch, capsys, interruptible
):
    def save(path, **rest):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    words = [*new_run, "--checkpoint-every", every]
    assert stopped_in_the_last_checkpoint(save, words, monkeypatch) == 130
    run = tmp_path / "run"
    there = (
        f"the newest checkpoint in {run} is {newest}" if newest else f"{run} holds no checkpoint"
    )
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"gpuaccel: stopped at once; {there}"
    assert "checkpoint written" not in captured.err and captured.out == ""
    assert [path.name for path in run.glob("step-*")] == ([newest] if newest else [])


def test_an_error_in_the_last_checkpoint_of_a_stopped_run_is_said(
    new_run, monkeypatch, capsys, interruptible
):
    def save(path, **rest):
        raise ga.errors.CheckpointError(f"{path} cannot be written (No space left on device)")

    assert stopped_in_the_last_checkpoint(save, new_run, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "step-00000003.safetensors cannot be written (No space" in said.splitlines()[-1]
    assert "checkpoint written" not in said


def test_a_log_whose_disk_is_full_costs_no_checkpoint(
    new_run, tmp_path, monkeypatch, capsys, interruptible
):
    def close(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.modules["gpuaccel.training.loop"].RunLog, "close", close)
    assert main([*new_run, "--steps", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("No space left on device")
    assert (tmp_path / "run" / "step-00000002.safetensors").exists()


def test_ranks_that_are_stopped_at_once_leave_the_checkpoint_that_is_named(
    tmp_path, monkeypatch, capsys
):
    def launch(*_, **__):
        (tmp_path / "step-00000004.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["gpuaccel.cli.train"], "launch", launch)
    assert main(["train", "--nproc", "2", "--out", str(tmp_path)]) == 130
    said = f"stopped at once; the newest checkpoint in {tmp_path} is step-00000004.safetensors"
    assert capsys.readouterr().err == f"gpuaccel: {said}\n"


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("seconds", [0, 0.2, 0.5, 1.0])
def test_ctrl_c_while_torch_is_imported_is_one_line(seconds, tmp_path, interruptible):
    process = Run(tmp_path).start().process
    maps = pathlib.Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        assert process.poll() is None
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130 and err == "gpuaccel: stopped\n"


@pytest.mark.parametrize(
    "there, written, hint",
    [
        ((), (3,), "; --resume continues from step-00000003.safetensors"),
        ((2,), (3,), "; --resume continues from step-00000003.safetensors"),
        ((), (), ""),
        ((2,), (), ""),
    ],
)
def test_an_error_of_ranks_names_the_checkpoint_to_resume_from(
    there, written, hint, tmp_path, monkeypatch, capsys
):
    """Only one of this run: an earlier run's may be one that it refused to write over."""

    def write(steps):
        for step in steps:
            (tmp_path / f"step-{step:08d}.safetensors").touch()

    def launch(*_, **__):
        write(written)
        raise ga.errors.RankError("rank 1 was killed by SIGKILL in step 4")

    write(there)
    monkeypatch.setattr(sys.modules["gpuaccel.cli.train"], "launch", launch)
    assert main(["train", "--nproc", "2", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"gpuaccel: rank 1 was killed by SIGKILL in step 4{hint}\n"


@pytest.mark.slow
def test_a_finished_run_is_neither_repeated_nor_written_over(whole, capsys):
    words = whole[0].words
    before = sorted(path.stat().st_mtime_ns for path in whole[0].out.glob("*.safetensors"))
    assert main(words) == 1
    assert "--resume continues it" in capsys.readouterr().err
    assert main([*words, "--resume", "--lr", "0.5"]) == 1
    assert "--lr was 0.003, now 0.5" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == sorted(path.stat().st_mtime_ns for path in whole[0].out.glob("*.safetensors"))


def rows_of(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def short_run(new_run):
    """The words of a run of six steps with a checkpoint after every two, which has been made."""
    words = [*new_run, "--checkpoint-every", "2"]
    assert main([*words, "--steps", "6"]) == 0
    return words


@pytest.mark.slow
def test_a_resume_that_takes_no_step_changes_nothing(short_run, tmp_path, capsys):
    """The rows of an older checkpoint are dropped when they are made again."""
    folder = tmp_path / "run"
    older = ["--resume", "step-00000004.safetensors"]
    assert main([*short_run, *older, "--steps", "3"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert rows_of(folder / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "run.json").read_text())["steps"] == 6
    assert main([*short_run, *older, "--steps", "8"]) == 0
    assert "--steps was 6, now 8" in capsys.readouterr().err
    assert rows_of(folder / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_a_resume_that_fails_leaves_run_json_as_it_was(short_run, tmp_path, capsys):
    folder = tmp_path / "run"
    description = (folder / "run.json").read_bytes()
    words = [*short_run, "--steps", "80", "--resume"]
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes()
    metrics.write_bytes(b"\xff\xfe")
    assert main(words) == 1
    assert "metrics.jsonl, which is no text" in capsys.readouterr().err
    metrics.write_bytes(rows)
    newest = folder / "step-00000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert main(words) == 1
    said = capsys.readouterr().err
    assert newest.name in said and "--steps was" not in said
    assert (folder / "run.json").read_bytes() == description
    assert main([*short_run, "--steps", "7", "--resume", "step-00000004.safetensors"]) == 0
    assert "--steps was 6, now 7: from step 6 the" in capsys.readouterr().err
    assert json.loads((folder / "run.json").read_text())["steps"] == 7


@pytest.mark.slow
def test_resume_takes_the_checkpoint_that_it_names(short_run, tmp_path, capsys):
    folder = tmp_path / "run"
    first = folder / "step-00000004.safetensors"
    other = tmp_path / "other" / first.name
    assert main([*short_run, "--steps", "6", "--resume", str(other)]) == 1
    assert f"--resume is {other}; expected a checkpoint in {folder}" in capsys.readouterr().err
    first.rename(folder / "best.safetensors")
    resumed = ["--resume", str(folder / "best.safetensors")]
    assert main([*short_run, "--steps", "7", *resumed]) == 0
    assert rows_of(folder / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7]


def test_a_home_that_nobody_has_is_one_line(capsys):
    assert main(["train", "--out", "~nobody-of-this-name/run"]) == 1
    said = capsys.readouterr().err
    assert said == "gpuaccel: a path begins with ~ and no such user is known\n"


@pytest.mark.slow
def test_another_text_of_the_same_length_is_not_gone_on_with(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvw " * 200)
    words = ["train", "--text", str(text), "--out", str(tmp_path / "run"), "--seq", "16"]
    words += ["--batch", "2", "--no-progress", "--device", "cpu"]
    assert main([*words, "--steps", "1"]) == 0
    text.write_text("zyxwvutsrqponmlkjihgfed " * 200)
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.safetensors"))
    assert main([*words, "--steps", "2", "--resume"]) == 1
    assert "it was taken on another text" in capsys.readouterr().err
    assert before == sorted(
        path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.safetensors")
    )
    text.write_text("abcdefghijklmnopqrstuvw " * 200)
    assert main([*words, "--steps", "2", "--resume"]) == 0


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_the_folder_of_a_run_is_enough_to_write_its_sample(
    tokenizer, tmp_path, monkeypatch, capsys
):
    """With run.json and the checkpoint alone, and then from another prompt."""
    small = dataclasses.replace(
        models.PRESETS["tiny"], hidden=32, intermediate=32, layers=1, heads=2, head_dim=16
    )
    monkeypatch.setitem(models.PRESETS, "tiny", small)
    monkeypatch.setitem(RECIPES, "tiny", Recipe(tokenizer, 2, 3e-3))
    (tmp_path / "text.py").write_text(TEXT)
    words = ["--text", tmp_path / "text.py", "--out", tmp_path / "run", "--device", "cpu"]
    words += ["--steps", 2, "--seq", 8, "--seed", 5]
    assert main(["train", "--no-progress", *map(str, words)]) == 0
    losses, printed = capsys.readouterr().out.split("\n", 1)
    assert "train loss" in losses and printed.startswith("def ")

    description = json.loads((tmp_path / "run" / "run.json").read_text())
    model = training.Config(**description["config"]).build()
    model.to(getattr(torch, description["dtype"]))
    ga.load_checkpoint(training.latest_checkpoint(tmp_path / "run"), model=model)
    bpe = description.get("bpe")
    assert (bpe is None) == (tokenizer == "byte")
    reader = training.BPETokenizer(bpe) if bpe else training.ByteTokenizer()

    def text_after(prompt):
        tokens = torch.from_numpy(reader.encode(prompt).astype("int64"))[None]
        return reader.decode(training.generate(model, tokens, 200, seed=5)[0])

    assert text_after("def ") + "\n" == printed
    assert text_after("def f7(x):").startswith("def f7(x):")


@pytest.mark.slow
def test_200_steps_on_the_default_text_bring_the_loss_below_3(tmp_path):
    status, out, err = run(
        "train", "--model", "tiny", "--steps", "200", "--device", "cpu", "--out", tmp_path / "run"
    )
    assert status == 0, err
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert 5.3 < rows[0]["loss"] < 5.7 and rows[-1]["val_loss"] < 3.0
    assert sum(row["loss"] for row in rows[-10:]) / 10 < 3.0
    assert "def " in out
