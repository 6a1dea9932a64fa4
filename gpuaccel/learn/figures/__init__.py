"""The pictures of the notebooks: SVG in colours that suit light and dark pages, and a line of text.

    figures.threads(n=21, block=8)

Here are the pictures that several notebooks use. Those of one subject are in `rank_figures`
and `token_figures`."""

from .drawing import Figure
from .kernel_figures import threads, tree_sum

__all__ = [
    "Figure",
    "threads",
    "tree_sum",
]
