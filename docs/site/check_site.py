"""What is wrong with a built site:  python docs/site/check_site.py build/site

Links and anchors that lead nowhere, and whatever a browser would ask another host for.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

# Attributes that a browser loads by itself; a link is loaded when somebody follows it.
LOADED = {
    "src",
    "srcset",
    "data",
    "poster",
    "background",
    "xlink:href",
}
OF_ELEMENT = {"link": {"href"}, "use": {"href"}, "image": {"href"}}
# A link that names something, for machines; nothing is loaded.
NAMES = {"canonical", "license", "author", "alternate"}
CSS_LOADS = re.compile(r"""(?:url\(|@import\s+)\s*["']?((?:https?:)?//[^"')\s]+)""")
JS_LOADS = re.compile(
    r"""(?:fetch|import|importScripts|open|Worker|getScript|src\s*=)\s*\(?\s*["'`]((?:https?:)?//[^"'`]+)"""
)


class Page(html.parser.HTMLParser):
    """The links, loads and anchors of one page."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.inline = ""
        self._inside = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = {name: value or "" for name, value in attributes}
        self._inside = tag if tag in ("style", "script") else ""
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.inline += f"\n{values.get('style', '')}\n"
        if tag == "link" and values.get("rel") in NAMES:
            return
        for name, value in values.items():
            if name in LOADED or name in OF_ELEMENT.get(tag, ()):
                pieces = value.split(",") if name == "srcset" else [value]
                self.loads += [piece.split()[0] for piece in pieces if piece.split()]
            elif name == "href":
                self.links.append(value)

    def handle_data(self, text):
        if self._inside:
            self.inline += text

    def handle_endtag(self, tag):
        self._inside = ""


def is_remote(link: str) -> bool:
    return bool(re.match(r"(https?:|wss?:|ftp:)?//", link))


def problems(site: pathlib.Path) -> list[str]:
    """Each thing that is wrong, in words."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no page"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in page.loads:
            if is_remote(link):
                found.append(f"{name}: loads {link} from another host")
        for link in CSS_LOADS.findall(page.inline) + JS_LOADS.findall(page.inline):
            found.append(f"{name}: loads {link} from another host")
        for link in page.links + page.loads:
            if not re.match(r"[a-z]+:|//", link):
                found += [f"{name}: {words}" for words in broken(link, path, pages)]
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.js"), *site.rglob("*.svg")]):
        text = path.read_text()
        for link in CSS_LOADS.findall(text) + JS_LOADS.findall(text):
            found.append(f"{path.relative_to(site)}: loads {link} from another host")
    return list(dict.fromkeys(found))


def broken(link: str, path: pathlib.Path, pages) -> list[str]:
    """Why a link to a file of the site leads nowhere."""
    parts = urllib.parse.urlsplit(link)
    target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return [f"{link} leads to a file that is not there"]
    anchor = urllib.parse.unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return [f"{link} leads to an anchor that is not there"]
    return []


if __name__ == "__main__":
    words = problems(pathlib.Path(sys.argv[1]))
    print("\n".join(words) or "no broken link, nothing from another host")
    sys.exit(bool(words))
