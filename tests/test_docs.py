"""The site of docs/: built as `make docs` does, its links lead somewhere, a browser shows it and
asks no other host."""

import ast
import functools
import http.server
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from helpers import FLAGS, find_chromium

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE_SCRIPTS = ROOT / "docs" / "site"
NEEDS = ("sphinx", "myst_nb", "furo", "sphinx_copybutton")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]

needs_sphinx = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} is not installed: pip install -e '.[docs]'"
)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site. The build itself fails on a warning and on a broken link."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, str(SITE_SCRIPTS / "build.py"), str(folder)],
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def scripts(name):
    spec = importlib.util.spec_from_file_location(name, SITE_SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check_site():
    return scripts("check_site")


def text_of(page: pathlib.Path) -> str:
    """What a reader sees of a page, its tags left out."""
    import html

    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


# ---- what is checked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page, words",
    [
        ('<a href="b.html">b</a>', "b.html leads to a file"),
        ('<a href="#there">b</a>', "#there leads to an anchor"),
        ('<a href="other.html#there">b</a>', "leads to an anchor"),
        ('<img src="a.png">', "a.png leads to a file"),
        ('<script src="https://cdn.example/a.js"></script>', "loads https://cdn.example/a.js"),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', "loads //cdn.example/a.css"),
        ("<style>a{background:url(https://cdn.example/a.png)}</style>", "loads https://cdn"),
        ("<script>fetch('https://example.org/x')</script>", "loads https://example.org/x"),
        ('<p style="background:url(//cdn.example/a.png)">', "loads //cdn.example/a.png"),
    ],
)
def test_the_check_finds_what_is_wrong(tmp_path, check_site, page, words):
    (tmp_path / "index.html").write_text(f'<p id="here">{page}</p>')
    (tmp_path / "other.html").write_text("<p></p>")
    (found,) = check_site.problems(tmp_path)
    assert words in found


def test_the_check_accepts_what_is_right(tmp_path, check_site):
    (tmp_path / "index.html").write_text(
        '<p id="here"><a href="#here">a</a><a href="other.html">b</a><a href="./">c</a>'
        '<a href="https://example.org">elsewhere</a><img src="data:image/gif;base64,AA">'
        '<svg xmlns="http://www.w3.org/2000/svg"></svg></p>'
    )
    (tmp_path / "other.html").write_text('<a href="index.html#here">a</a>')
    assert check_site.problems(tmp_path) == []


# ---- the built site -----------------------------------------------------------------------------


@needs_sphinx
@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_comes_from_another_host(site, check_site):
    assert check_site.problems(site) == []


@needs_sphinx
@pytest.mark.slow
def test_every_page_notebook_and_public_name_is_there(site):
    from gpuaccel import public

    pages = {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    expected = {f"docs/{p.stem}.html" for p in (ROOT / "docs").glob("*.md")}
    expected |= {f"notebooks/{p.stem}.html" for p in (ROOT / "notebooks").glob("*.ipynb")}
    expected |= {f"kernels_cu/{p.name}.html" for p in (ROOT / "kernels_cu").glob("*.cu*")}
    expected |= {"index.html", "search.html", "CHANGELOG.html", "CONTRIBUTING.html"}
    expected |= {"notebooks/glossary.html", "notebooks/README.html"}
    assert expected - pages == set()
    reference = "".join(p.read_text() for p in (site / "api").glob("*.html"))
    signatures = set(re.findall(r'<dt class="sig[^>]*id="gpuaccel\.(\w+)"', reference))
    assert set(public.__all__) - signatures == set()
    assert {f"api/gpuaccel.{name}.html" for name in public.__all__} - pages == set()
    tables = (site / "api" / "index.html").read_text().partition("autosummary")[2]
    assert re.search(r'title="(gpuaccel[\w.]+)"', tables)[1] == "gpuaccel.TrainStep"


@needs_sphinx
@pytest.mark.slow
def test_calls_are_in_the_reference_and_internal_members_are_not(site, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    import pages

    import gpuaccel as ga

    reference = "".join(p.read_text() for p in (site / "api").glob("*.html"))
    members = set(re.findall(r'<dt class="sig[^>]*id="gpuaccel[\w.]*?\.(\w+\.\w+)"', reference))
    calls = {"TrainStep.__call__", "GraphedStep.__call__", "Launch.__call__", "Kernel.__getitem__"}
    assert calls - members == set()
    classes = {c.__name__: c for c in (ga.Arena, ga.GraphedStep, ga.Kernel)}
    classes |= {c.__name__: c for c in (ga.compiler.Launch, ga.compiler.Module)}
    for owner, names in pages.INTERNAL.items():
        assert [name for name in names if not hasattr(classes[owner], name)] == []
        assert {f"{owner}.{name}" for name in names} & members == set()


@needs_sphinx
@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_shows_all_its_stored_outputs(site, path):
    """As many pictures as are stored, and the text of each stream."""
    page = site / "notebooks" / f"{path.stem}.html"
    shown = " ".join(text_of(page).split())
    drawn = page.read_text()
    stored, drawings, charts = [], 0, 0
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            drawings += "image/svg+xml" in output.get("data", {})
            charts += "image/png" in output.get("data", {})
            if output["output_type"] == "stream":
                lines = "".join(output["text"]).split("\n")
                stored += [line for line in lines if "\x1b" not in line]
    assert [line for line in stored if " ".join(line.split()) not in shown] == []
    assert drawn.count('class="gpuaccel-ink"') >= drawings
    assert drawn.count('src="../_images/') >= charts


# ---- in a browser -------------------------------------------------------------------------------

# A page of each kind.
KINDS = (
    "index.html",
    "notebooks/README.html",
    "notebooks/01_accumulate.html",
    "notebooks/glossary.html",
    "docs/your-model.html",
    "docs/benchmarks.html",
    "api/index.html",
    "api/gpuaccel.TrainStep.html",
    "kernels_cu/accumulate.cu.html",
    "CHANGELOG.html",
)


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = find_chromium() or pytest.skip("no chromium or chrome on this machine")
    with playwright.sync_playwright() as manager:
        browser = manager.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def served(site):
    """The site's address on this machine."""
    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def open_page(context, address, wait_for=None):
    """A page, what it asked for, and what went wrong in it."""
    page, requests, errors = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)
    page.goto(address)
    if wait_for:
        page.wait_for_selector(wait_for)
    return page, requests, errors


@needs_sphinx
@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_each_kind_of_page(chromium, served, width, scheme):
    """Nothing comes from another host, no page is wider than the window, words can be read."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for kind in KINDS:
        page, requests, errors = open_page(context, f"{served}/{kind}", "article h1")
        assert [url for url in requests if not url.startswith((served, "data:"))] == []
        assert errors == [], kind
        assert page.evaluate("document.documentElement.scrollWidth") <= width, kind
        assert page.evaluate(CONTRAST) == [], f"{kind}: words on {scheme} that cannot be read"
        page.close()
    context.close()


# Words whose contrast with the page is less than 3, as [contrast, words]. Code is on a background
# of its own.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true })
    const light = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1)
        const part = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
        const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data
        return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b)
    }
    const page = light(getComputedStyle(document.body).backgroundColor)
    const words = document.querySelectorAll(
        "article p, article h1, article h2, article td, article a, .gpuaccel-ink text")
    return [...words].map(word => {
        const style = getComputedStyle(word)
        const text = light(word.tagName == "text" ? style.fill : style.color)
        const contrast = (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05)
        // Words of a picture in another colour than the theme's may stand in a coloured box.
        const own = word.tagName == "text" && !word.style.fill.startsWith("var(")
        return [contrast, word.textContent.slice(0, 40), own]
    }).filter(([contrast, words, own]) => contrast < 3 && words.trim() && !own).slice(0, 5)
}"""


@needs_sphinx
@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("files", [True, False], ids=["opened as files", "served"])
def test_search_works_without_a_network(chromium, site, request, files):
    base = site.as_uri() if files else request.getfixturevalue("served")
    context = chromium.new_context()
    results = "#search-results ul.search li a"
    page, requests, _ = open_page(context, f"{base}/search.html?q=clip_grad_norm_", results)
    targets = [link.get_attribute("href") for link in page.query_selector_all(results)]
    assert any(
        "api/gpuaccel.clip_grad_norm_.html#gpuaccel.clip_grad_norm_" in target for target in targets
    ), targets
    page.fill("input[name=q]", "bandwidth")
    page.press("input[name=q]", "Enter")
    page.wait_for_selector(results)
    targets = [link.get_attribute("href") for link in page.query_selector_all(results)]
    assert any("glossary.html" in target for target in targets), targets
    assert [url for url in requests if not url.startswith(base)] == []
    context.close()


# ---- troubleshooting ----------------------------------------------------------------------------


def text_in(node) -> str:
    """The text of a string in the source; … where it has a value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_in(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_in(node.left) + text_in(node.right)
    return "…"


def source_texts():
    for path in sorted((ROOT / "gpuaccel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                yield text_in(node)


def quotes():
    """The quoted parts of messages."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = re.findall(r"^Message: (.*)$", page, re.MULTILINE)
    return [quote for line in lines for quote in re.findall(r"`([^`]+)`", line)]


def is_in(quote, text):
    """Whether a text has the parts of a quote, in order."""
    place = 0
    for part in filter(None, quote.split("…")):
        place = text.find(part.strip(), place)
        if place < 0:
            return False
    return True


def test_each_quoted_message_is_one_of_the_package():
    texts = set(source_texts())
    assert len(quotes()) > 20
    assert [quote for quote in quotes() if not any(is_in(quote, text) for text in texts)] == []
