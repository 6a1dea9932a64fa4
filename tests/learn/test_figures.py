"""Pictures are well-formed and say in text what they show."""

import pathlib
import re
import sys

import pytest
from pictures import contrast, rgb, text_of

from gpuaccel.learn import figures
from gpuaccel.learn.figures import drawing


@pytest.mark.parametrize(
    "n, block, per_thread, spare", [(21, 8, 1, 3), (16, 8, 1, 0), (21, 4, 4, 2), (1, 1, 1, 0)]
)
def test_threads_counts_the_spare_ones(n, block, per_thread, spare):
    words = text_of(figures.threads(n, block, per_thread))
    assert f"{n} elements" in words and (f"{spare} to spare" in words) == (spare > 0)


def test_a_tree_of_eight_has_three_rounds_and_three_barriers():
    figure = figures.tree_sum(8)
    assert "3 rounds" in text_of(figure) and "sum of 8" in repr(figure)
    assert figure.drawn.count(">barrier<") == 3
    assert [f">half = {half}<" in figure.drawn for half in (8, 4, 2, 1)] == [
        False,
        True,
        True,
        True,
    ]


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
    shown = figures.threads(21, 8)._repr_mimebundle_()
    page, image = shown["text/html"], shown["image/svg+xml"]
    assert "var(--jp-" in page and "var(--jp-" not in image
    for svg in (page, image):
        assert "max-width:100%;height:auto" in svg and 'viewBox="0 0 800' in svg
        # every variable that is used is defined
        used = set(re.findall(r"var\((--ink-\w+)", svg))
        assert used and used <= set(re.findall(r"(--ink-\w+):", svg))
