"""The pictures of the notebooks: SVG in colours that suit light and dark pages, and a line of text.

    figures.source("accumulate", "accumulate_v1")
    figures.arena(arena)
    figures.timeline({"item": timeline.tail(run)})

Here are the pictures that several notebooks use. Those of one subject are in `clip_figures`,
`graph_figures`, `layer_figures`, `rank_figures` and `token_figures`."""

from .arena_figure import arena
from .charts import bars, curves, norms
from .drawing import Figure, Table
from .kernel_figures import Source, bits, source, threads, tree_sum, warp_sum
from .timelines import timeline

__all__ = [
    "Figure",
    "Source",
    "Table",
    "arena",
    "bars",
    "bits",
    "curves",
    "norms",
    "source",
    "threads",
    "timeline",
    "tree_sum",
    "warp_sum",
]
