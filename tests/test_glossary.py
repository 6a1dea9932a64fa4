"""The glossary and the index of the notebooks: words, links, and its table and picture."""

import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat")
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
GLOSSARY = (FOLDER / "glossary.md").read_text()
INDEX = (FOLDER / "README.md").read_text()
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
WORDS = """thread block grid warp lane shared-memory bank sector coalesced register spill atomic
barrier race stream occupancy bandwidth kernel launch host device synchronise bf16 micro-batch
arena chunk segment capture replay rank collective bucket""".split()
# heading -> its text, until the next one
ENTRIES = dict(re.findall(r"^### (.+)\n+((?:(?!#)[^\n]*\n)+)", GLOSSARY + "\n", re.M))
ANCHORS = {word.replace(" ", "-") for word in ENTRIES}


def text_of(path):
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)


def test_the_glossary_has_an_entry_for_every_word():
    assert set(WORDS) <= ANCHORS
    # one spelling of an anchor, for GitHub and for JupyterLab
    assert all(word == word.lower() for word in ENTRIES)
    linked = re.findall(r"\]\(#([^)]+)\)", GLOSSARY)
    assert set(linked) == ANCHORS


@pytest.mark.parametrize("word", ENTRIES)
def test_an_entry_is_short_and_a_notebook_that_it_links_to_has_the_word(word):
    entry = ENTRIES[word]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`[^`]*`", r"\1", entry)
    assert 2 <= len(re.findall(r"[.:?](?:\s|$)", plain)) <= 7, plain
    linked = re.findall(r"\]\((\w+\.ipynb)\)", entry)
    for name in linked:
        # "capture" is also found in "captured"
        assert word.rstrip("e") in text_of(FOLDER / name).lower(), f"{name}: no {word}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_link_of_a_notebook_to_the_glossary_leads_to_an_entry(path):
    anchors = re.findall(r"\]\(glossary\.md#([^)]+)\)", text_of(path))
    assert set(anchors) <= ANCHORS, set(anchors) - ANCHORS


def test_links_between_the_index_and_the_glossary_go_both_ways():
    assert "(glossary.md)" in INDEX and "(README.md)" in GLOSSARY


ROW = re.compile(r"^\| (\w+) \| \[(.+)\]\((\w+)\.ipynb\) \| .+ \| ([\d, ]*) \| (\d+) \|$", re.M)


def test_the_table_and_the_ladder_of_the_index_have_every_notebook():
    rows = ROW.findall(INDEX)
    assert sorted(stem for _, _, stem, _, _ in rows) == [path.stem for path in NOTEBOOKS]
    picture = (FOLDER / "ladder.svg").read_text()
    numbers = []
    for number, title, stem, before, minutes in rows:
        assert number == stem.split("_")[0]
        heading = text_of(FOLDER / f"{stem}.ipynb").partition("\n")[0]
        assert heading.lower().endswith(title.lower()), heading
        for words in (number, title, minutes):
            assert f">{words}</text>" in picture, (stem, words)
        # what is read before stands above; nothing is built on the shelf
        assert set(filter(None, before.split(", "))) <= set(numbers) - {"shelf"}
        assert before == "01" or number != "shelf"
        numbers.append(number)
