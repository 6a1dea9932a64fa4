"""What the pages need beyond Sphinx's settings: pictures in the colours of the site's theme, and
notebook outputs that may be wider than the page."""

import json
import pathlib
import re

# The menu: the order of the guides is that of a reader who has a model to train.
MENU = (pathlib.Path(__file__).parent / "menu.md").read_text()
# A link of a notebook's output to a kernel, which has a page.
KERNEL_LINK = re.compile(r'href="(\.\./kernels_cu/[^"#]+)"')


def page_svg(svg: str) -> str:
    """A picture as a part of a page: without its own colours for words and lines."""
    return re.sub(r"<style>\.gpuaccel-ink.*?</style>", "", svg)


def pictures(text: str) -> str:
    """<picture> of a README as two images, one for each of the site's colour schemes; no badges."""

    def two(found):
        dark, light = (
            re.search(r'srcset="([^"]+)"', found[0]),
            re.search(r'src="([^"]+)"', found[0]),
        )
        alt = re.search(r'alt="([^"]*)"', found[0])
        return "\n".join(
            f":::{{image}} {source[1]}\n:class: only-{scheme}\n:alt: {alt[1] if alt else ''}\n:::\n"
            for scheme, source in (("light", light), ("dark", dark))
        )

    text = re.sub(r"<picture>.*?</picture>", two, text, flags=re.DOTALL)
    return re.sub(r"^\[?!\[[^]]*\]\(https?:.*\n", "", text, flags=re.MULTILINE)


def drawings(text: str, folder: pathlib.Path) -> str:
    """Images that the package has drawn, as a part of the page: in the colours of its theme."""

    def inline(found):
        path = folder / found[1]
        svg = path.read_text() if path.exists() else ""
        if 'class="gpuaccel-ink"' not in svg:
            return found[0]
        return f'<div class="scrolls">{page_svg(svg.strip())}</div>\n'

    return re.sub(r"^!\[[^]]*\]\(([^)]+\.svg)\)$", inline, text, flags=re.MULTILINE)


def notebook(text: str, folder: pathlib.Path) -> str:
    """A notebook whose pictures and outputs are a part of the page."""
    book = json.loads(text)
    book["metadata"]["language_info"]["pygments_lexer"] = "gpuaccel-cell"
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = drawings("".join(cell["source"]), folder)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            html = "".join(data.pop("image/svg+xml", data.get("text/html", "")))
            if html:
                html = KERNEL_LINK.sub(r'href="\1.html"', page_svg(html))
                data["text/html"] = f'<div class="scrolls">{html}</div>'
    return json.dumps(book)


def convert(app, docname, source):
    path = pathlib.Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        source[0] = notebook(source[0], path.parent)
    elif path.suffix == ".md":
        source[0] = drawings(pictures(source[0]), path.parent)
    if docname == "README":
        source[0] += MENU


def without_back_links(app, pagename, template, context, doctree):
    """viewcode leads back to `gpuaccel.AdamW`, but not to `gpuaccel.optim.Lion`."""
    if pagename.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


# Members without an underscore that the package's own modules call, and its users do not.
INTERNAL = {
    "Arena": {
        "all",
        "check",
        "move",
        "number_of",
        "step",
        "weights_current",
        "weights_written",
    },
    "GraphedStep": {"split"},
    "Kernel": {"__call__", "candidate", "from_source", "load", "loaded_on_cpu", "text_with"},
    "Launch": {"on_cpu"},
    "Module": {"unnamed"},
}


def is_internal(app, what, name, thing, skip, options):
    """True for members that are not on the page of their class; None leaves it to Sphinx."""
    function = thing.fget if isinstance(thing, property) else thing
    owner, _, member = getattr(function, "__qualname__", "").rpartition(".")
    internal = member == "extra_repr" or member in INTERNAL.get(owner, ())
    return True if internal else None


def setup(app):
    app.connect("autodoc-skip-member", is_internal)
    app.connect("source-read", convert)
    app.connect("html-page-context", without_back_links)
