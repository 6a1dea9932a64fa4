"""The glossary and the index of the notebooks: words, links, and the ladder as it is drawn."""

import pathlib
import re

import pytest

from gpuaccel.learn.figures import ladder_figure

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


def test_the_ladder_names_every_notebook_and_is_drawn_from_what_is_there():
    assert {path.stem for path in NOTEBOOKS} <= {rung.stem for rung in ladder_figure.RUNGS}
    rungs = ladder_figure.present(FOLDER)
    command = "run python -m gpuaccel.learn.figures.ladder_figure notebooks"
    drawn = ladder_figure.ladder(rungs).drawn
    assert (FOLDER / "ladder.svg").read_text() == drawn + "\n", command
    assert ladder_figure.with_table(INDEX, rungs) == INDEX, command
    for rung in rungs:
        assert f"({rung.stem}.ipynb)" in INDEX and f">{rung.number}<" in drawn
        assert {*rung.before} <= {other.number for other in ladder_figure.RUNGS}


def test_the_shelf_branches_off_at_01_and_nothing_is_built_on_it():
    shelf = [rung for rung in ladder_figure.RUNGS if rung.on_shelf]
    assert [rung.before for rung in shelf] == [("01",)] * len(shelf)
    main = [rung.stem[:2] for rung in ladder_figure.RUNGS if not rung.on_shelf]
    assert main == [f"{k:02d}" for k in range(len(main))]
    assert all("shelf" not in rung.before for rung in ladder_figure.RUNGS)
    assert ladder_figure.ladder().drawn.count("<polyline") == len(shelf)


def test_words_of_the_ladder_fit_beside_each_other():
    """Words do not run into the minutes at the right edge."""
    for rungs in (ladder_figure.RUNGS, ladder_figure.RUNGS[:2]):
        texts = re.findall(
            r'<text x="([\d.]+)" y="([\d.]+)" font-size="([\d.]+)" '
            r'text-anchor="start"[^>]*>([^<]*)',
            ladder_figure.ladder(rungs).drawn,
        )
        assert len(texts) >= 2 * len(rungs)
        for x, _, size, words in texts:
            width = 0.92 * ladder_figure.text_width(words, float(size))
            assert float(x) + width < ladder_figure.WIDTH - 24, words
