"""Build the site:  make docs,  or  python docs/site/build.py [folder]

The folder (build/site) then holds the README as the home page, the notebooks with their stored
outputs, the guides, the reference from docstrings and the benchmarks. Nothing is executed, and no
page asks another host for anything: it can be opened as files or served from anywhere.

Sphinx reads a copy of the repository's pages (build/site-source) in which each file of a link has a
page: source files as highlighted text, folders as lists. A warning, and a link or anchor that leads
nowhere, is an error.
"""

import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import check_site

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
LANGUAGES = {
    ".cu": "cuda",
    ".cuh": "cuda",
    ".py": "python",
    ".json": "json",
    ".toml": "toml",
    ".txt": "text",
    "": "text",
}
# The guides in the order of the menu; a page that is not named here stands behind them.
GUIDES = (
    "install",
    "your-model",
    "trainer",
    "checkpoints",
    "graphs",
    "several-gpus",
    "kernels",
    "logging",
    "troubleshooting",
)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HREF = re.compile(r"""(?<=href=")(\.\.?/[^"]+)(?=")""")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


class Source:
    """The folder that Sphinx reads."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        # Files and folders of the repository that pages link to, and that have no page yet.
        self.linked: "set[pathlib.Path]" = set()
        self.written: "set[pathlib.Path]" = set()

    def write(self, name: str, text: str):
        """A page; one that has not changed is not touched, so that Sphinx does not read it."""
        path = self.folder / name
        self.written.add(path)
        if path.exists() and path.read_text() == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def copy(self, name: str):
        path = self.folder / name
        self.written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path)

    def remove_others(self):
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.written:
                path.unlink()

    # ---- pages of the repository ----

    def page(self, name: str, more: str = "", to: "str | None" = None):
        """A Markdown page with its links led to pages."""
        folder = (ROOT / name).parent
        text = self.linked_text(pictures((ROOT / name).read_text()), folder)
        self.write(to or name, drawings(text, folder) + more)

    def linked_text(self, text: str, folder: pathlib.Path) -> str:
        parts = CODE.split(text)
        parts[::2] = [
            LINK.sub(lambda found: self.target(found[0], folder), part) for part in parts[::2]
        ]
        # A link's words may be code: [`a.cu`](a.cu). Then its target begins the next part.
        return re.sub(
            r"(?<=`\]\()([^)\s]+)(?=\))",
            lambda found: self.target(found[0], folder),
            "".join(parts),
        )

    def target(self, link: str, folder: pathlib.Path, suffix: str = ".md") -> str:
        """Where a link of a page in `folder` leads to in the site."""
        file, _, anchor = link.partition("#")
        if not file or ":" in file or link.endswith((".md.md", "/index.md")):
            return link
        path = (folder / file).resolve()
        if path == ROOT / "README.md":
            return os.path.relpath(ROOT / "index.md", folder)
        if not path.is_relative_to(ROOT) or path.suffix in (".md", ".ipynb", ".svg"):
            return link
        if not path.exists():
            raise SystemExit(
                f"{folder.relative_to(ROOT)}: a page links to {link}, which is not there"
            )
        self.linked.add(path)
        return file.rstrip("/") + (f"/index{suffix}" if path.is_dir() else suffix)

    def notebook(self, path: pathlib.Path):
        """A notebook as Sphinx takes it: pictures as a part of the page, links to pages."""
        book = json.loads(path.read_text())
        book["metadata"]["language_info"]["pygments_lexer"] = "gpuaccel-cell"
        for cell in book["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked_text("".join(cell["source"]), path.parent)
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if "image/svg+xml" in data:
                    svg = "".join(data.pop("image/svg+xml"))
                    data["text/html"] = f'<div class="scrolls">{page_svg(svg)}</div>'
                elif "text/html" in data:
                    html = "".join(data["text/html"])
                    html = HREF.sub(lambda m: self.target(m[0], path.parent, ".html"), html)
                    data["text/html"] = f'<div class="scrolls">{html}</div>'
        self.write(f"notebooks/{path.name}", json.dumps(book, sort_keys=True))

    def sources(self):
        """Pages for the files and folders that pages link to."""
        done: "set[pathlib.Path]" = set()
        while todo := self.linked - done:
            for path in sorted(todo):
                self.directory(path) if path.is_dir() else self.source_file(path)
                done.add(path)

    def source_file(self, path: pathlib.Path):
        name = path.relative_to(ROOT).as_posix()
        language = LANGUAGES.get(path.suffix, "text")
        text = path.read_text()
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
        # What is read for its own sake can be found; the rest has the reference.
        search = "" if path.suffix in (".cu", ".cuh") else "nosearch: true\n"
        options = ":lineno-start: 1\n" if path.suffix != ".json" else ""
        self.write(
            f"{name}.md",
            f"---\norphan: true\n{search}---\n\n# {name}\n\n"
            f"{fence}{{code-block}} {language}\n{options}\n{text}\n{fence}\n",
        )

    def directory(self, path: pathlib.Path):
        name = path.relative_to(ROOT).as_posix()
        files = [file for file in tracked(name) if file.parent == path]
        self.linked |= set(files)
        lines = [f"* [{file.name}]({file.name}.md){first_words(file)}" for file in files]
        orphan = "" if name == "kernels_cu" else "---\norphan: true\n---\n\n"
        self.write(f"{name}/index.md", f"{orphan}# {name}/\n\n" + "\n".join(lines) + "\n")


def tracked(folder: str) -> "list[pathlib.Path]":
    """The files of a folder, without what a tool left there."""
    return sorted(
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in LANGUAGES
    )


def first_words(path: pathlib.Path) -> str:
    """The first sentence of a file's header, to stand behind its name."""
    text = path.read_text()
    if path.suffix == ".py":
        found = re.match(r'(?:#.*\n)*"""(.+?)(?:\.\s|"""|\n\n)', text, re.DOTALL)
    else:
        found = re.match(r"(?://|/\*)\s*(.+?)(?:\.\s|\n//\s*\n|\n\n)", text, re.DOTALL)
    if not found or path.suffix == ".json":
        return ""
    words = " ".join(re.sub(r"\n(//|\s\*)?", " ", found[1]).split())
    return ": " + re.sub(r"([\\`*_<>\[\]])", r"\\\1", words)


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


# ---- the menu, and the reference ----------------------------------------------------------------


def toctree(caption: str, names) -> str:
    lines = "\n".join(names)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def reference(source: Source):
    """A page per room: the names that people type, and the others that the room offers."""
    import gpuaccel as ga
    from gpuaccel import public

    rooms = {name: getattr(ga, name) for name in ga.ROOMS}
    typed = {
        room: {f"gpuaccel.{n}": v for n in public.__all__ if is_from(v := getattr(ga, n), module)}
        for room, module in rooms.items()
    }
    others = {
        room: {
            f"{module.__name__}.{name}": value
            for name in sorted(getattr(module, "__all__", dir(module)), key=str.lower)
            if documented(value := getattr(module, name), module)
            and value not in typed[room].values()
        }
        for room, module in rooms.items()
    }
    shown = [
        value for part in (typed, others) for names in part.values() for value in names.values()
    ]
    for value in shown:
        for kind in classes_of(value):
            if kind not in shown:
                shown.append(kind)
                room = kind.__module__.split(".")[1]
                others[room][f"{kind.__module__}.{kind.__qualname__}"] = kind
    for room, module in rooms.items():
        out = [f"{room}\n{'=' * len(room)}\n", *docstring_of(module)]
        for words, names in (
            ("Public names", typed[room]),
            ("Further names of this room", others[room]),
        ):
            if names:
                out.append(f"{words}\n{'-' * len(words)}\n")
                out += [directive(name, value) for name, value in names.items()]
        source.write(f"api/{room}.rst", "\n".join(out) + "\n")
    placed = {name: room for room, names in typed.items() for name in names}
    if missing := {f"gpuaccel.{name}" for name in public.__all__} - set(placed):
        raise SystemExit(f"the reference has no page for {', '.join(sorted(missing))}")
    # The links [source] lead to them.
    source.linked |= {path for path in tracked("gpuaccel") if path.suffix == ".py"}
    menu = "\n".join(f"   {room}" for room in rooms)
    out = [
        "Reference\n=========\n",
        "Each name that people type, as ``ga.<name>`` after ``import gpuaccel as ga``. The pages "
        "are the package's rooms, which are its folders; they also have each room's further names.",
    ]
    for room, names in typed.items():
        if names:
            out += [f":doc:`{room}`\n{'-' * (len(room) + 7)}\n"]
            out += [".. list-table::\n   :widths: 30 70\n"]
            out += [
                f"   * - :py:obj:`ga.{name.split('.')[1]} <{name}>`\n     - {first_sentence(value)}"
                for name, value in names.items()
            ]
            out += [""]
    source.write("api/index.rst", "\n".join([*out, f"\n.. toctree::\n   :hidden:\n\n{menu}\n"]))


def is_from(value, module) -> bool:
    """Whether a value was made in this room."""
    name = getattr(value, "__module__", None) or ""
    return f"{name}.".startswith(module.__name__ + ".")


def documented(value, module) -> bool:
    return (
        (inspect.isclass(value) or inspect.isroutine(value))
        and bool(value.__doc__)
        and is_from(value, module)
        and not value.__name__.startswith("_")
    )


def classes_of(value) -> "list[type]":
    """The package's public classes that the annotations of a function or a class name."""
    parts = [value]
    if inspect.isclass(value):
        parts += [
            part for name, part in vars(value).items() if name[0] != "_" or name == "__init__"
        ]
    words = ""
    for part in parts:
        part = getattr(part, "fget", None) or getattr(part, "__func__", None) or part
        words += " ".join(map(str, getattr(part, "__annotations__", {}).values())) + " "
    space = vars(sys.modules[value.__module__])
    kinds = [space.get(word) for word in re.findall(r"\w+", words)]
    # As in nvrtc.Resources.
    kinds += [
        getattr(space.get(module), name, None)
        for module, name in re.findall(r"\b(\w+)\.(\w+)", words)
    ]
    return [
        kind
        for kind in kinds
        if inspect.isclass(kind)
        and kind.__module__.startswith("gpuaccel.")
        and not kind.__name__.startswith("_")
    ]


def directive(name: str, value) -> str:
    kind = "function"
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
    return f".. auto{kind}:: {name}\n"


def docstring_of(module) -> "list[str]":
    import docstrings

    return docstrings.restructured(inspect.cleandoc(module.__doc__ or "").split("\n"))


def first_sentence(value) -> str:
    import docstrings

    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return docstrings.inline(re.split(r"(?<=[.;:]) ", text)[0].rstrip(".;:"))


# ---- all of it ----------------------------------------------------------------------------------


def write_source(folder: pathlib.Path):
    """The pages that Sphinx reads."""
    source = Source(folder)
    source.linked.add(ROOT / "kernels_cu")
    docs = {path.stem: path for path in (ROOT / "docs").glob("*.md")}
    guides = [name for name in GUIDES if name in docs]
    guides += sorted(set(docs) - {*guides, "benchmarks"})
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    source.page(
        "README.md",
        toctree(
            "Notebooks",
            ["notebooks/README", *(f"notebooks/{p.stem}" for p in notebooks), "notebooks/glossary"],
        )
        + toctree("Guides", [f"docs/{name}" for name in guides])
        + toctree("Reference", ["api/index", "kernels_cu/index", "docs/benchmarks"])
        + toctree("Project", ["CHANGELOG", "CONTRIBUTING"]),
        to="index.md",
    )
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "notebooks/README.md", "notebooks/glossary.md"):
        source.page(name)
    for path in docs.values():
        source.page(f"docs/{path.name}")
    for path in notebooks:
        source.notebook(path)
    for path in [*ROOT.glob("docs/*/*.svg"), *ROOT.glob("notebooks/*.svg")]:
        source.copy(path.relative_to(ROOT).as_posix())
    reference(source)
    source.sources()
    source.remove_others()


def build(site: pathlib.Path):
    """Write the source, run Sphinx, check the result. SystemExit says what is wrong."""
    folder = site.parent / f"{site.name}-source"
    folder.mkdir(parents=True, exist_ok=True)
    write_source(folder)
    if (site / "searchindex.js").exists():
        # Sphinx leaves pages that are no more.
        shutil.rmtree(site)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", str(ROOT / "docs" / "site")]
    command += ["-W", "--keep-going", "-q", "-d", str(site.parent / f"{site.name}-doctrees")]
    done = subprocess.run(
        [*command, str(folder), str(site)],
        env={**os.environ, "GPUACCEL_SITE_ROOT": str(ROOT), "GPUACCEL_GPU": "off"},
    )
    if done.returncode:
        raise SystemExit("the site has errors, see above")
    problems = check_site.problems(site)
    if problems:
        raise SystemExit("\n".join([*problems, "the site has errors, see above"]))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    target = pathlib.Path(sys.argv[1]).resolve() if sys.argv[1:] else SITE
    build(target)
    print(f"the site is in {os.path.relpath(target)}: open index.html, or")
    print(f"  python -m http.server --directory {os.path.relpath(target)}")
