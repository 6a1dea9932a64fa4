"""What all pictures are drawn with: SVG shapes and text, colours, axes, number formats.

    ink = Ink()
    ink.text(0, 14, "a bar")
    ink.rect(0, 20, 120, 16, GREY)
    bundle(ink.svg(40, "a bar"), "a bar")    # a notebook's output: SVG, and words

A picture is WIDTH wide, and shrinks where there is less room. Coordinates are in pixels, y grows
downwards.
"""

import math
import re
from html import escape

# Colours that stay apart for colour-blind eyes (after Okabe and Ito) and are readable on white and
# on black.
RUN_COLOURS = (
    "#2f86d1",
    "#e08214",
    "#1b9e77",
    "#c5629f",
    "#d95f3b",
    "#8a7fd0",
    "#a08a2c",
    "#5aa9c9",
)
GREY = "#8d949e"
RED = "#e5484d"
WHITE = "#ffffff"
WIDTH = 800
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

# The colours of words and lines in a picture that is an image of its own: (words, labels, lines)
# for a light and for a dark page. An image cannot see which page it is in, only what the browser
# prefers, so that each of them is readable on the other page as well.
LIGHT = ("#666d77", "#6f757e", "#8c929b")
DARK = ("#8b919b", "#848a94", "#8c929b")
# The same in a notebook's page, where the theme's variables are known.
PAGE = (
    "var(--jp-ui-font-color1,{})",
    "var(--jp-ui-font-color2,{})",
    "var(--jp-border-color2,{})",
)


def _style(patterns) -> str:
    """A style element that defines the colours of class gpuaccel-ink."""

    def variables(colours):
        return "".join(
            f"--ink-{name}:{pattern.format(colour)};"
            for name, pattern, colour in zip(("strong", "soft", "hair"), patterns, colours)
        )

    return (
        f"<style>.gpuaccel-ink{{{variables(LIGHT)}}}@media(prefers-color-scheme:dark)"
        f"{{.gpuaccel-ink{{{variables(DARK)}}}}}</style>"
    )


IMAGE_STYLE = _style(("{}", "{}", "{}"))
PAGE_STYLE = _style(PAGE)


# ---- numbers in words


def number(value, unit="") -> str:
    """Three significant digits and a unit: 12.3K tok/s, 1.24M, 987."""
    suffix = ""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale * 0.9995:
            value, suffix = value / scale, letter
            break
    if abs(value) >= 99.95 or (not suffix and value == int(value)):
        decimals = 0
    else:
        decimals = 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}{suffix}{' ' + unit if unit else ''}"


def axis_number(value) -> str:
    """The same without zeros that end its decimals: 1.00K is 1K, and 1.05K stays."""
    return re.sub(r"\.0+(?!\d)", "", number(value))


def milliseconds(ms) -> str:
    """A duration given in milliseconds, in words: 0.41 ms, 12.4 ms, 141 ms, 1.2 s."""
    if ms >= 999.5:
        return f"{ms / 1e3:.1f} s"
    if ms >= 99.5:
        return f"{ms:.0f} ms"
    return f"{ms:.1f} ms" if ms >= 0.95 else f"{ms:.2f} ms"


def plural(count, noun) -> str:
    """A count and its noun: "1 block", "1,024 blocks", "2 accesses"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


# ---- shapes and text


class Ink:
    """The shapes of one picture, in order; `svg` joins them."""

    strong, soft, hair = "var(--ink-strong)", "var(--ink-soft)", "var(--ink-hair)"

    def __init__(self):
        self.out = []

    def paint(self, **colours):
        """Colours as attributes. Variables work in a style only."""
        if any(value.startswith("var(") for value in colours.values()):
            return 'style="' + ";".join(f"{k}:{v}" for k, v in colours.items()) + '"'
        return " ".join(f'{k}="{v}"' for k, v in colours.items())

    def shape(self, tag, title=None, **attributes):
        """Add one SVG element.

        Args:
            attributes: an underscore stands for a hyphen; those that are None are left out.
            title: what the mouse shows over it.
        """
        text = ""
        variables = {}
        for name, value in attributes.items():
            name = name.replace("_", "-")
            if str(value).startswith("var("):
                variables[name] = value
            elif value is not None:
                text += f' {name}="{_attribute(value)}"'
        if variables:
            text += " " + self.paint(**variables)
        content = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
        self.out.append(f"<{tag}{text}{content}")

    def rect(self, x, y, width, height, fill, rx=None, title=None):
        """A rectangle. rx: radius of its corners."""
        self.shape("rect", title, x=x, y=y, width=width, height=height, rx=rx, fill=fill)

    def path(self, d, fill="none", **look):
        """A path in SVG's own language."""
        self.shape("path", d=d, fill=fill, **look)

    def polyline(self, points, stroke, width, opacity=None):
        """A line through points: (x, y) pairs."""
        self.shape(
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            fill="none",
            stroke=stroke,
            stroke_width=width,
            opacity=opacity,
            stroke_linejoin="round",
            stroke_linecap="round",
        )

    def text(self, x, y, words, size=12, colour=None, anchor="start", weight=400):
        """Words at (x, y). anchor: "start", "middle" or "end": which end of them stands at x."""
        self.out.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" {self.paint(fill=colour or self.strong)}>'
            f"{escape(str(words))}</text>"
        )

    def line(self, x1, y1, x2, y2, opacity=1.0):
        """A thin line in the theme's colour: an axis, a grid."""
        self.shape("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=self.hair, opacity=0.6 * opacity)

    def dot(self, x, y, radius, fill, **look):
        """A circle."""
        self.shape("circle", cx=x, cy=y, r=radius, fill=fill, **look)

    def svg(self, height, label):
        """The whole picture. label: what a screen reader says."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" class="gpuaccel-ink" role="img" '
            f'aria-label="{escape(label, quote=True)}" '
            'style="display:block;max-width:100%;height:auto;font-variant-numeric:tabular-nums" '
            f'font-family="{FONT}">{IMAGE_STYLE}{"".join(self.out)}</svg>'
        )


def _attribute(value):
    """An attribute's value: floats with two decimals at most."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value), quote=True)


# ---- where things stand


def text_width(words, size=12):
    """About how wide these words are, in pixels."""
    return sum(0.3 if c in "il.,:'| " else 0.92 if c in "mwMW" else 0.63 for c in str(words)) * size


def shorten(words, most):
    """The words, cut to `most` letters."""
    return words if len(words) <= most else words[: most - 1] + "…"


def nice_ticks(low, high, count=4):
    """Round values that cover [low, high]: 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


# ---- what a notebook displays


def in_page(svg: str) -> str:
    """A picture as a part of a page, in the colours of JupyterLab's theme."""
    page = svg.replace(IMAGE_STYLE, PAGE_STYLE)
    return f'<div style="max-width:{WIDTH}px">{page}</div>'


def bundle(svg: str, words: str) -> dict[str, str]:
    """A picture as a notebook's output.

    In a page that trusts it, it is part of the page: it shows its titles to the mouse, and shrinks
    with the window. As an image of its own it stays in pages that show no HTML of others, such as
    GitHub's."""
    return {"text/html": in_page(svg), "image/svg+xml": svg, "text/plain": words}


def live_bundle(widget, words: str) -> dict[str, object]:
    """A widget as a notebook's output; a saved notebook keeps the words in its place."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view, "text/plain": words}
