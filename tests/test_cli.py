"""The command line as a person meets it: what is printed, the exit status, and a run that survives being killed."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import gpuaccel as ga
from gpuaccel.backend import backend
from gpuaccel.cli import Doctor, Progress, StopAfterStep, main
from gpuaccel.meter import Reading


def run(*words, **env):
    """(exit status, stdout, stderr) of `gpuaccel WORDS` in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "gpuaccel", *map(str, words)], capture_output=True, text=True,
                          env={**os.environ, **env}, timeout=120)
    return done.returncode, done.stdout, done.stderr


# ---- doctor ---------------------------------------------------------------------------------------------------------

def test_doctor_says_what_runs_and_why():
    found = ga.doctor()
    assert isinstance(found, Doctor) and found.facts["backend"] == backend().name
    text, page = str(found), found._repr_html_()
    for fact in ("backend", "reason", "GPU policy", "device", "architecture", "driver", "NVRTC", "cache", "torch"):
        assert fact in text and fact in page
    assert backend().reason in text and ga.__version__ in text


def test_doctor_escapes_what_it_shows_as_html():
    assert "&lt;b&gt;" in Doctor({"reason": "<b>"}, [])._repr_html_()


def test_doctor_as_json_and_without_a_gpu(tmp_path):
    status, out, _ = run("doctor", "--json", GPUACCEL_GPU="off", GPUACCEL_CACHE=str(tmp_path))
    facts = json.loads(out)
    assert status == 0 and facts["problems"] == []
    assert facts["backend"] == "torch" and "GPUACCEL_GPU=off" in facts["reason"] and facts["device"] == "CPU"


def test_doctor_finds_problems_without_stopping_at_the_first(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    status, out, err = run("doctor", GPUACCEL_BACKEND="abacus", GPUACCEL_NVRTC=str(tmp_path / "no.so"),
                           GPUACCEL_CACHE=str(blocked / "cache"))
    assert status == 1 and "Traceback" not in err
    problems = [line for line in out.splitlines() if line.startswith("problem")]
    assert len(problems) == 3, out
    assert "abacus" in out and "nvidia-cuda-nvrtc-cu12" in out and "GPUACCEL_CACHE" in out


# ---- kernels --------------------------------------------------------------------------------------------------------

def test_kernels_lists_every_kernel_with_its_registers(capsys):
    assert main(["kernels", "--arch", "sm_80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sm_80, NVRTC ")
    rows = {line.split()[1]: line.split() for line in lines[2:]}
    from gpuaccel.kernel import kernel_files, kernel_names
    assert set(rows) == {name for file in kernel_files() for name in kernel_names(file.read_text())}
    assert all(int(row[2]) > 0 for row in rows.values())


def test_kernels_of_one_topic_and_of_a_file_of_ones_own(tmp_path, capsys):
    assert main(["kernels", "accumulate", "-D", "GRAD_T=bf16"]) == 0
    assert "accumulate_v1" in capsys.readouterr().out
    mine = tmp_path / "mine.cu"
    mine.write_text('extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }')
    assert main(["kernels", str(mine)]) == 0
    assert "mine.cu" in (out := capsys.readouterr().out) and "twice" in out


@pytest.mark.parametrize("source, expected", [
    ('extern "C" __global__ void k(float* x) { x[0] = nothing; }', "mine.cu(1)"),
    ("int nothing_here;", "has no kernel"),
])
def test_kernels_that_do_not_compile_are_an_error_in_words(tmp_path, capsys, source, expected):
    (tmp_path / "mine.cu").write_text(source)
    assert main(["kernels", str(tmp_path / "mine.cu")]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("words, expected", [
    (["kernels", "nowhere"], "accumulate.cu"),
    (["kernels", "--arch", "sm_1"], "sm_1"),
    (["sample", "--checkpoint", "nowhere"], "nowhere holds no checkpoint"),
    (["train", "--text", "nowhere.txt", "--device", "cpu"], "nowhere.txt does not exist"),
])
def test_an_error_is_one_line_and_status_1(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("gpuaccel: ") and err.count("\n") == 1 and expected in err
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@pytest.mark.parametrize("words", [[], ["nothing"], ["train", "--steps", "0"], ["train", "--lr", "nan"],
                                   ["kernels", "-D", "x"]])
def test_wrong_usage_is_status_2(words, capsys):
    assert main(words) == 2
    assert "usage: gpuaccel" in capsys.readouterr().err


def test_help_and_version_are_status_0(capsys):
    assert main(["--help"]) == main(["train", "--help"]) == main(["--version"]) == 0
    assert ga.__version__ in capsys.readouterr().out


# ---- progress -------------------------------------------------------------------------------------------------------

class Terminal:
    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def reading(step):
    return Reading(step=step, tokens=step * 10, seconds=1.0, tokens_per_s=1234.0, step_ms=1.0, loss=2.5)


def test_progress_writes_one_line_over_and_over_on_a_terminal():
    terminal = Terminal(True)
    progress = Progress(40, stream=terminal)
    for step in range(1, 41):
        progress.show(step, reading(step))
    progress.close()
    assert terminal.text.count("\n") == 1 and terminal.text.count("\r") >= 2
    assert "step 40/40" in terminal.text and "loss 2.500" in terminal.text and "1,234 tokens/s" in terminal.text


def test_progress_is_a_line_every_ten_steps_elsewhere():
    terminal = Terminal(False)
    progress = Progress(25, stream=terminal)
    for step in range(1, 26):
        progress.show(step, reading(step))
    progress.close()
    assert [line.split()[1] for line in terminal.text.splitlines()] == ["10/25", "20/25", "25/25"]
    assert "\r" not in terminal.text


def test_ctrl_c_lets_the_step_finish_and_a_second_one_does_not():
    with StopAfterStep() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
