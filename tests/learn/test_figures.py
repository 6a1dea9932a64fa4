"""Pictures can be read on light and on dark pages."""

import pathlib
import re
import sys
import xml.etree.ElementTree as xml

import pytest
from pictures import contrast, rgb

from gpuaccel.learn.figures import drawing

NOTEBOOKS = pathlib.Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.parametrize(
    "colours, page",
    [(drawing.LIGHT, "#ffffff"), (drawing.DARK, "#111111"), (drawing.DARK, "#212121")],
)
def test_labels_of_a_picture_of_its_own_have_enough_contrast(colours, page):
    """4.5 on the page that the browser prefers, and readable on the other one."""
    other = "#111111" if page == "#ffffff" else "#ffffff"
    for name, colour in zip(("strong", "soft"), colours):
        assert contrast(rgb(colour), rgb(page)) >= 4.5, (name, page)
        assert contrast(rgb(colour), rgb(other)) >= 3, (name, other)


@pytest.mark.parametrize("theme, page", [("light", (255, 255, 255)), ("dark", (17, 17, 17))])
def test_labels_in_the_theme_s_colours_have_enough_contrast(theme, page):
    """What JupyterLab's own theme files make of the variables that pictures and tables use."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    folder = pathlib.Path(sys.prefix, "share/jupyter/lab/themes/@jupyterlab")
    css = (folder / f"theme-{theme}-extension" / "index.css").read_text()
    background = re.search(r"--jp-layout-color0: ?([^;]+)", css)[1].replace("white", "#ffffff")
    assert rgb(background) == page
    used = set(re.findall(r"var\(--(jp-ui-font-color\d)", drawing.PAGE_STYLE))
    assert used == {"jp-ui-font-color1", "jp-ui-font-color2"}
    for name in used:
        *grey, opacity = re.search(rf"--{name}: ?rgba\(([^)]+)\)", css)[1].split(",")
        words = [
            float(opacity) * int(value) + (1 - float(opacity)) * behind
            for value, behind in zip(grey, page)
        ]
        assert contrast(words, page) >= 4.5, (name, theme)


def test_a_picture_is_part_of_the_page_or_an_image_and_shrinks_in_both():
    ink = drawing.Ink()
    ink.text(0, 14, "words", colour=None)
    ink.line(0, 20, 10, 20)
    shown = drawing.bundle(ink.svg(30, "a line"), "a line")
    page, image = shown["text/html"], shown["image/svg+xml"]
    assert "var(--jp-" in page and "var(--jp-" not in image
    for svg in (page, image):
        assert "max-width:100%;height:auto" in svg and 'viewBox="0 0 800' in svg
        # every variable that is used is defined
        used = set(re.findall(r"var\((--ink-\w+)", svg))
        assert used and used <= set(re.findall(r"(--ink-\w+):", svg))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_drawn_picture_of_a_notebook_is_shown_with_a_text_and_readable_on_both_pages(path):
    svg = path.read_text()
    ink = [shape.get("fill") for shape in xml.fromstring(svg).iter() if shape.get("font-size")]
    assert ink and "<style" not in svg
    for colour in set(ink) - {"#ffffff"}:
        assert all(contrast(rgb(colour), page) >= 2.4 for page in ((255,) * 3, (17,) * 3)), colour
    pages = [page.read_text() for page in (*NOTEBOOKS.glob("*.ipynb"), NOTEBOOKS / "README.md")]
    assert any(re.search(rf"!\[[^\]]{{20,}}\]\({path.name}\)", page) for page in pages)
