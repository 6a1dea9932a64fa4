"""README.md and docs/: examples run, numbers are the recorded ones, links lead somewhere."""

import ast
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest
import torch
import torch.nn.functional as F
from helpers import forget_accelerator

import gpuaccel as ga
from gpuaccel.backends import find_compiler

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
MODEL = ga.training.Config(vocab=31, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, T=8)
NO_COMPILER = "the page runs kernels on the CPU; no C++ compiler for that"


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path):
    """The Python of a page, block by block; not a complete script, which is another test's."""
    found = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [code for code in found if "__main__" not in code]


def names():
    """What a page leaves to its reader: a model of tokens, a loss that is a mean, and batches."""
    torch.manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab, (2, 4, 9))
    return {
        "model": ga.training.Transformer(MODEL),
        "criterion": lambda logits, targets: F.cross_entropy(
            logits.flatten(0, 1), targets.flatten()
        ),
        "data": [(batch[:, :-1], batch[:, 1:]) for batch in tokens],
    }


def run(path, code, space):
    exec(compile(code, name_of(path), "exec"), space)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that a page may write to, with the checkout's benchmarks; torch.compile, which is
    slow, hands its function back."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    yield
    forget_accelerator()


# ---- the examples -------------------------------------------------------------------------------


def with_examples():
    for path in PAGES:
        if blocks(path):
            # These train four models in 5 s, and start another program.
            marks = [pytest.mark.slow] if path.stem in ("trainer", "logging") else []
            yield pytest.param(path, marks=marks, id=name_of(path))


@pytest.mark.parametrize("path", [*with_examples()])
@pytest.mark.filterwarnings("ignore:.*eager:UserWarning")
@pytest.mark.skipif(find_compiler()[0] is None, reason=NO_COMPILER)
def test_the_examples_run_in_order_and_each_may_run_twice(path, here):
    """As the cells of one notebook."""
    space = names()
    for code in blocks(path):
        run(path, code, space)
        run(path, code, space)


def test_the_pages_have_examples():
    assert {name_of(path): len(blocks(path)) for path in PAGES if blocks(path)} == {
        "README.md": 3,
        "docs/checkpoints.md": 6,
        "docs/graphs.md": 2,
        "docs/install.md": 1,
        "docs/kernels.md": 7,
        "docs/logging.md": 5,
        "docs/planning.md": 4,
        "docs/trainer.md": 3,
        "docs/your-model.md": 9,
    }


def example(path, word):
    code, *others = [code for code in blocks(path) if word in code]
    assert not others, f"{name_of(path)} has several examples with {word}"
    return code


def norm_of_the_batch(space):
    """The gradient norm of the first batch in one piece, by torch."""
    inputs, targets = space["data"][0]
    loss = space["criterion"](space["model"](inputs), targets)
    grads = torch.autograd.grad(loss, list(space["model"].parameters()))
    return float(torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads])))


def test_the_norm_of_micro_batches_is_that_of_the_batch():
    """With 4 micro-batches as printed, and with 1; without the division it is 4 times too large."""
    path = ROOT / "docs" / "your-model.md"
    code = example(path, "loss.backward()")
    one = code.replace("micro_batches = 4", "micro_batches = 1")
    undivided = code.replace(" / micro_batches", "")
    assert len({code, one, undivided}) == 3
    for variant, times in ((code, 1), (one, 1), (undivided, 4)):
        space = {**names(), "torch": torch, "ga": ga}
        space["data"] = space["data"][:1]
        expected = norm_of_the_batch(space)
        run(path, variant, space)
        assert float(space["opt"].clip_state.norm) == pytest.approx(times * expected, rel=1e-4)
        assert float(space["opt"].clip_state.clipped_norm) <= 1.0 + 1e-5
        assert not any(p.grad is not None for p in space["model"].parameters())


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "your-model.md"], ids=name_of)
def test_the_optimizer_and_the_clipping_are_torchs(path):
    code, spaces = example(path, "ga.clip_grad_norm_"), []
    theirs = code.replace("ga.AdamW", "torch.optim.AdamW")
    theirs = theirs.replace("ga.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_")
    assert theirs != code
    for variant in (code, theirs):
        spaces.append(names())
        run(path, variant, spaces[-1])
    ours, torchs = spaces
    assert float(ours["norm"]) == pytest.approx(float(torchs["norm"]), rel=1e-5)
    for p, q in zip(ours["model"].parameters(), torchs["model"].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


TRAINER = {
    "Trainer": {
        "ga.AdamW": "torch.optim.AdamW",
        '"eps": args.adam_epsilon': '"eps": args.adam_epsilon, "fused": True',
    },
    "accelerate": {
        "arena = ga.Arena(model)": "vectors = [p for p in model.parameters() if p.dim() < 2]",
        "opt = ga.AdamW(arena, lr=1e-3": (
            "matrices = [p for p in model.parameters() if p.dim() > 1]\n"
            "groups = [{'params': matrices}, {'params': vectors, 'weight_decay': 0.0}]\n"
            "opt = torch.optim.AdamW(groups, fused=True, lr=1e-3"
        ),
    },
}


@pytest.mark.parametrize("loop", [pytest.param("Trainer", marks=pytest.mark.slow), "accelerate"])
def test_the_page_about_trainer_trains_what_torchs_optimizer_trains(loop, here):
    path, spaces = ROOT / "docs" / "trainer.md", []
    code = example(path, {"Trainer": "TrainingArguments(", "accelerate": "Accelerator("}[loop])
    # Limits that act. Trainer clips, as the page says below the script.
    page = code.replace('"max_norm": 1.0', '"max_norm": 0.1')
    code = code.replace("max_grad_norm=0,", "max_grad_norm=0.1,").replace(', "max_norm": 1.0', "")
    code = theirs = code.replace(", 1.0)", ", 0.1)")
    for ours, torchs in TRAINER[loop].items():
        assert ours in theirs
        theirs = theirs.replace(ours, torchs)
    for variant in (code, theirs):
        spaces.append(names())
        run(path, variant, spaces[-1])
    ours, torchs = spaces
    for p, q in zip(ours["model"].parameters(), torchs["model"].parameters(), strict=True):
        if p.is_cuda:
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(p, q)
    if loop == "Trainer":
        # The optimizer clips.
        spaces.append(names())
        run(path, page, spaces[-1])
        for p, q in zip(spaces[-1]["model"].parameters(), torchs["model"].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert float(spaces[-1]["trainer"].optimizer.optimizer.clip_state.norm) > 0.2
        logs = [space["trainer"].state.log_history for space in spaces]
        losses, *others = ([row["loss"] for row in rows if "loss" in row] for rows in logs)
        for other in others:
            assert other == pytest.approx(losses)


@pytest.mark.skipif(find_compiler()[0] is None, reason=NO_COMPILER)
def test_the_kernel_of_the_readme_reads_every_second_element():
    code = example(README, "every_second")
    space = {"torch": torch, "ga": ga}
    run(README, code + "\nshown = ga.show(every_second[1, 32], y, x, 32)\n", space)
    assert torch.equal(space["y"], space["x"][::2])
    table = str(space["shown"])
    assert "50%" in table and "100%" in table, table


@pytest.mark.skipif(find_compiler()[0] is None, reason=NO_COMPILER)
def test_the_race_of_the_readme_is_the_one_that_comes():
    kernel, report = re.findall(
        r"^```(?:cuda)?\n((?:%%cuda|add_rows).*?)```", README.read_text(), re.M | re.S
    )
    tokens = torch.tensor([2, 0, 1, 2, 3, 2, 1, 0], dtype=torch.int32)
    add_rows = ga.compile(kernel.replace("%%cuda", ""))
    with ga.use_backend("simt"), pytest.raises(ga.errors.KernelError) as error:
        add_rows[1, 32](torch.zeros(4, 4), torch.ones(8, 4), tokens, 8, 4)
    assert str(error.value).replace("<source>", "cell").startswith(report.rstrip())


@pytest.mark.skipif(find_compiler()[0] is None, reason=NO_COMPILER)
def test_the_error_of_the_page_about_kernels_is_the_one_that_comes(capsys, here):
    path, space = ROOT / "docs" / "kernels.md", {}
    for code in blocks(path):
        run(path, code, space)
    promised = re.search(r"# (thread 232 .*?) \.\.\.", "".join(blocks(path)))[1]
    assert promised in capsys.readouterr().out
    assert torch.equal(space["x"], torch.ones(1000)), "with an error no tensor is changed"
    assert space["y"][:4].tolist() == [0.25, 1.0, 2.0, 3.0]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks and one GPU")
def test_the_script_for_several_ranks_runs(tmp_path):
    """Both ranks print the mean loss of both, near that of random weights; a run that is resumed
    after its first epoch, or within the second one, continues bit for bit."""
    text = (ROOT / "docs" / "several-gpus.md").read_text()
    (code,) = re.findall(r"This is `train.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 46

    def losses(code, folder):
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(code)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "train.py"]
        done = subprocess.run(
            words, cwd=folder, env=env, text=True, capture_output=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        first, second = ast.literal_eval(done.stdout)
        assert first == second, done.stdout
        return first

    whole = losses(code, tmp_path / "whole")
    assert len(whole) == 8 and all(abs(loss - math.log(256)) < 0.3 for loss in whole), whole
    began = losses(code.replace("epochs=2", "epochs=1"), tmp_path / "resumed")
    assert began + losses(code, tmp_path / "resumed") == whole
    within = re.sub(
        r"n % 4 == 0(.*?)\n    return",
        r"n % 3 == 0\1\n            if n == 6: break\n    return",
        code,
        flags=re.S,
    )
    began = losses(within, tmp_path / "within")
    assert began + losses(code, tmp_path / "within") == whole and len(began) == 6


# ---- the text -----------------------------------------------------------------------------------


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 1200
    assert [line for line in README.read_text().split("\n") if len(line) > 120] == []
    ratios = re.search(r"<!-- ratios .*?<!-- /ratios -->", README.read_text(), re.DOTALL)[0]
    assert 5 <= ratios.count("\n| ") - 1 <= 10


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_lines_are_short(path):
    lines = [line for line in path.read_text().split("\n") if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


def without_code(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """GitHub's names of a page's headings."""
    found = re.findall(r"^#+ (.*)$", without_code(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", without_code(path))
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    links = [link for link in links if not link.startswith("https://")]
    for link in links:
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{name_of(path)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(path)} links to {link}"


def test_every_notebook_is_linked_from_the_readme():
    text = README.read_text()
    notebooks = [name_of(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    assert [name for name in notebooks if f"({name})" not in text] == []


def test_every_page_can_be_reached_from_the_readme():
    """By the links of pages."""
    reached, new = set(), {README}
    while new:
        reached |= new
        links = {path: re.findall(r"\]\(([^)#:]+\.md)", path.read_text()) for path in new}
        new = {(path.parent / link).resolve() for path in links for link in links[path]} - reached
    assert [name_of(path) for path in PAGES if path not in reached] == []


# ---- the pictures -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PICTURES, ids=name_of)
def test_a_picture_is_one_that_a_page_can_show(path):
    """An <img> runs no script and loads nothing; there is no path of a machine in it."""
    text = path.read_text()
    tags = {element.tag.split("}")[1] for element in xml.fromstring(text).iter()}
    assert tags <= {"svg", "g", "text", "line", "rect", "path", "circle", "polyline", "title"}
    assert not re.search(r"href|url\(|/(home|root|tmp|usr|opt)/", text) and len(text) < 200_000
    assert name_of(path) in README.read_text()


@pytest.mark.skipif(find_compiler()[0] is None, reason=NO_COMPILER)
def test_the_picture_of_show_is_what_show_draws(tmp_path):
    pictures = load(ROOT / "docs" / "pictures.py")
    assert pictures.EVERY_SECOND.strip() in "".join(blocks(README)), (
        "the README shows another kernel"
    )
    pictures.write("show", pictures.show(), tmp_path)
    for path in sorted(tmp_path.iterdir()):
        drawn = ROOT / "docs" / "pictures" / path.name
        assert drawn.read_text() == path.read_text(), "run python docs/pictures.py"


def test_pictures_are_not_coloured_by_chance():
    pictures = load(ROOT / "docs" / "pictures.py")
    assert pictures.coloured("<a fill='#123456'/>", {"#123456": "#ffffff"}) == "<a fill='#ffffff'/>"
    with pytest.raises(ValueError, match="#123456"):
        pictures.coloured("<a/>", {"#123456": "#ffffff"})
