"""`gpuaccel compare`: runs from their files, on a page that needs nothing else."""

import html.parser
import json
import re

import pytest

from gpuaccel.cli import main
from gpuaccel.training import RunLog


def write(path, rate=100.0, steps=8, loss=4.0, norm=None):
    """A run's file, as train(log=...) writes it."""
    log = RunLog([path])
    for step in range(1, steps + 1):
        row = {"step": step, "loss": loss - 0.1 * step, "lr": 0.1, "tokens": 10 * step}
        row.update(tokens_per_s=rate, seconds=step / 4, step_ms=250.0, norm=norm)
        log.add({**row, "val_loss": 3.5 if step == steps else None})
    log.close()


def run_folder(folder, name, lr, **numbers):
    out = folder / name
    out.mkdir()
    write(out / "metrics.jsonl", **numbers)
    config = {"T": 16}
    (out / "run.json").write_text(json.dumps({"lr": lr, "seed": 0, "config": config}))
    return out


class Page(html.parser.HTMLParser):
    """The words of each table row, and every attribute that could load something."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.loads, self.open, self.words = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        self.words += data
        if self.rows and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


def test_three_runs_on_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path, "slow", 0.1)
    run_folder(tmp_path, "fast", 0.2, rate=250.0, loss=3.0)
    write(tmp_path / "loose.csv", rate=50.0)
    assert main(["compare", "slow", "fast", "loose.csv"]) == 0
    said = capsys.readouterr().out
    assert "fast runs at 2.50 times the speed of slow" in said and "compare.html" in said
    text = (tmp_path / "compare.html").read_text()
    page = Page(text)
    assert page.loads == [] and "@import" not in text and "url(" not in text
    assert "color-scheme" in text and "<script" not in text
    head, *rows = page.rows
    table = {row[0]: dict(zip(head, row)) for row in rows}
    assert list(table) == ["slow", "fast", "loose"]
    assert table["fast"]["tokens per second"] == "250" and table["fast"]["× slow"] == "2.50"
    assert table["fast"]["loss"] == "2.200" and table["slow"]["held-out loss"] == "3.500"
    assert [table[name]["lr"] for name in table] == ["0.1", "0.2", ""]
    assert "seed" not in head and "config" not in head, "what does not differ is left out"
    assert "Tokens per second" in page.words and "Loss" in page.words
    assert text.count("<polyline") + text.count("<path") >= 6


def test_a_norm_gets_a_panel_and_names_are_text(tmp_path):
    a, b = tmp_path / "<b>.csv", tmp_path / "deep" / "<b>.csv"
    write(a, norm=2.0)
    write(b, norm=1.0)
    out = tmp_path / "page.html"
    assert main(["compare", str(a), str(b), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert "Gradient norm" in page.words and "b" not in page.open
    names = [row[0] for row in page.rows[1:]]
    assert len(set(names)) == 2 and all("<b>" in name for name in names)


def test_a_resumed_runs_time_goes_on(tmp_path):
    path = tmp_path / "run.csv"
    write(path, steps=8)
    log = RunLog([path], resumed_step=8)
    log.add({"step": 9, "loss": 1.0, "tokens": 90, "tokens_per_s": 100.0, "seconds": 0.5})
    log.close()
    out = tmp_path / "page.html"
    assert main(["compare", str(path), "--out", str(out)]) == 0
    head, row = Page(out.read_text()).rows
    assert dict(zip(head, row))["seconds"] == "2.5" and dict(zip(head, row))["steps"] == "9"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("nowhere", "nowhere does not exist; expected a folder of `gpuaccel train`, or a .jsonl"),
        ("folder", "folder holds no metrics.jsonl; expected"),
        ("text.txt", "text.txt has another ending; expected"),
        ("empty.csv", "empty.csv holds no step"),
        ("bytes.jsonl", "bytes.jsonl cannot be read"),
    ],
)
def test_what_is_no_run_is_named(name, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    write(tmp_path / "run.csv")
    assert main(["compare", "run.csv", name]) == 1
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


@pytest.mark.slow
def test_what_train_writes_can_be_compared(tmp_path, capsys):
    (tmp_path / "text").write_text("0123456789" * 100)
    words = ["--text", tmp_path / "text", "--steps", 4, "--seq", 8, "--batch", 2, "--no-progress"]
    for lr in ("0.1", "0.2"):
        more = ["--lr", lr, "--out", tmp_path / lr, "--device", "cpu"]
        assert main(["train", *map(str, [*words, *more])]) == 0
    out = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "0.1"), str(tmp_path / "0.2"), "--out", str(out)]) == 0
    assert re.search(r"0.2: .*tok/s, loss", capsys.readouterr().out)
    head, *rows = Page(out.read_text()).rows
    assert [dict(zip(head, row))["lr"] for row in rows] == ["0.1", "0.2"]
