"""A program that uses gpuaccel gets types from it: mypy knows what the public names are."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import traceback

import pytest
import torch

import gpuaccel as ga

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What mypy must say about a line stands in the comment at its end.
CLIENT = """
import torch
import gpuaccel as ga

model = torch.nn.Linear(2, 2)
arena = ga.Arena(model)
opt = ga.AdamW(arena, lr=1e-3, max_norm=1.0)
step = ga.TrainStep(model, opt)
reveal_type(arena)  # Revealed type is "gpuaccel.optim.arena.Arena"
reveal_type(arena.weights)  # Revealed type is "torch._tensor.Tensor"
reveal_type(arena.grads)  # Revealed type is "torch._tensor.Tensor"
reveal_type(arena.masters)  # Revealed type is "list[torch.nn.parameter.Parameter]"
reveal_type(arena.segments)  # Revealed type is "list[gpuaccel.optim.layout.Segment]"
reveal_type(arena.parameters())  # Revealed type is "list[torch.nn.parameter.Parameter]"
reveal_type(opt)  # Revealed type is "gpuaccel.optim.adamw.AdamW"
reveal_type(opt.clip_state)  # Revealed type is "gpuaccel.ops.clip.ClipState | None"
reveal_type(step(torch.zeros(1)).loss)  # Revealed type is "torch._tensor.Tensor"
reveal_type(ga.clip_grad_norm_(model.parameters(), 1.0))  # Revealed type is "torch._tensor.Tensor"
reveal_type(next(ga.train(step, [], 10)))  # Revealed type is "gpuaccel.measure.meter.Reading"
reveal_type(ga.doctor())  # Revealed type is "gpuaccel.cli.doctor.Doctor"
with ga.TrainStep(model, max_norm=1.0) as step:
    output = step(batch := torch.zeros(4, 2))
    reveal_type(output)  # Revealed type is "gpuaccel.training.results.StepOutput"
    reveal_type(output.tokens)  # Revealed type is "torch._tensor.Tensor | None"
    reveal_type(step.arena)  # Revealed type is "gpuaccel.optim.arena.Arena"
    reveal_type(step.optimizers[0])  # Revealed type is "torch.optim.optimizer.Optimizer"
    reveal_type(step.max_norm)  # Revealed type is "float | None"

def loss_of(x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()

with ga.GraphedStep(loss_of, [model]) as graphed:
    reveal_type(graphed(batch))  # Revealed type is "torch._tensor.Tensor"
    graphed()  # Missing positional argument "x" in call to "__call__" of "GraphedStep"
ga.TrainStep()  # Missing positional argument "model" in call to "TrainStep"
ga.Arena()  # Missing positional argument "module" in call to "Arena"
ga.AdamWW  # Module has no attribute "AdamWW"; maybe "AdamW"?
"""

# Calls with a misspelt word -> the word that was meant.
MISSPELT = {
    'ga.AdamW(arena, scope="globl")': "global",
    'ga.AdamW(arena, on_nonfinite="skp")': "skip",
    'ga.clip_grad_norm_(arena, 1.0, scope="tensors")': "tensor",
    'ga.optim.clip_grads_(arena, 1.0, on_nonfinite="raises")': "raise",
    'ga.TrainStep(model, replay="graphs")': "graph",
    'ga.training.Replay(policy="required")': "require",
    'ga.GraphedStep(print, model, policy="Auto")': "auto",
    'ga.use_backend("sim")': "simt",
    'ga.use_backend("torch", policy="requires")': "require",
    'ga.launch(print, backend="glo")': "gloo",
    'ga.preset("tinny")': "tiny",
    'ga.training.Config(8, 8, 8, 1, 1, 1, 8, family="lama")': "llama",
    'ga.training.make_dataset(tokenizer="bytes")': "byte",
}


@pytest.mark.parametrize("call", MISSPELT)
def test_a_misspelt_word_is_refused_and_its_right_spelling_named(call):
    model = torch.nn.Linear(2, 2)
    names = {"ga": ga, "model": model, "arena": ga.Arena(model)}
    with pytest.raises(ga.GpuaccelError) as caught:
        eval(call, names)
    wrong = re.findall(r'"(\w+)"', call)[-1]
    assert f" is {wrong!r}; expected " in str(caught.value)
    assert str(caught.value).endswith(f"; did you mean {MISSPELT[call]!r}?")


@pytest.mark.parametrize(
    "call, meant",
    [
        ("ga.AdamWW", "AdamW"),
        ("ga.trainstep", "TrainStep"),
        ("ga.optimm", "optim"),
        ('ga.check("revers", None)', "reverse"),
        ('ga.Kernel("clipp", "squares_v2")', "clip.cu"),
        ('ga.Kernel("clip", "square_v2")', "squares_v2"),
    ],
)
def test_a_misspelt_name_is_suggested(call, meant):
    """In the message, which notebooks show: once, so without what the interpreter would add."""
    with pytest.raises((AttributeError, ga.GpuaccelError)) as caught:
        eval(call, {"ga": ga})
    text = "".join(traceback.format_exception_only(caught.value))
    assert text.count(f"did you mean {meant!r}?") == text.lower().count("did you mean") == 1


@pytest.mark.slow
def test_mypy_finds_every_misspelt_word(tmp_path):
    head = "import torch\nimport gpuaccel as ga\nmodel = torch.nn.Linear(2, 2)\n"
    client = head + "arena = ga.Arena(model)\n" + "\n".join(MISSPELT)
    messages, output = mypy_messages(client, tmp_path)
    lines = {number: line for number, line in enumerate(client.splitlines(), 1) if line in MISSPELT}
    assert messages.keys() == lines.keys(), output
    for number, line in lines.items():
        wrong = re.findall(r'"(\w+)"', line)[-1]
        assert f"Literal['{wrong}']" in messages[number] or wrong in messages[number]
        assert f"'{MISSPELT[line]}'" in messages[number], messages[number]


@pytest.mark.slow
def test_a_program_that_uses_the_package_gets_its_types(tmp_path):
    """mypy says what the client's comments say, and nothing else."""
    messages, output = mypy_messages(CLIENT, tmp_path)
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(CLIENT.splitlines(), 1)
        if "  # " in line
    }
    assert messages == expected, output


def mypy_messages(client, folder):
    """Line -> what mypy says of it; and mypy's whole output."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy, of the extra `test`, is not installed")
    (folder / "client.py").write_text(client)
    options = ["--config-file", ROOT / "pyproject.toml"]
    # The cache is that of `make check`: mypy reads torch once.
    options += ["--cache-dir", ROOT / ".mypy_cache"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "client.py"],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    message = re.compile(r"client\.py:(\d+): \w+: (.*?)(?:  \[[\w-]+\])?")
    matches = [message.fullmatch(line) for line in result.stdout.splitlines()]
    messages = {int(match[1]): match[2] for match in matches if match}
    return messages, result.stdout + result.stderr
