"""Build the site:  make docs,  or  python docs/site/build.py [folder]

The folder (build/site) then holds the README as the home page, the notebooks with their stored
outputs, the guides, the reference from docstrings and the benchmarks. Nothing is executed, and no
page asks another host for anything: it can be opened as files or served from anywhere.

Sphinx reads a copy of the pages (build/site-source), because autosummary writes the pages of the
reference beside them. A warning, and a link or anchor that leads nowhere, is an error.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import check_site

ROOT = pathlib.Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
# What Sphinx reads, and the files that pages link to.
COPIED = (
    "*.md",
    "docs/*.md",
    "docs/*.json",
    "docs/*/*.svg",
    "notebooks/*.md",
    "notebooks/*.svg",
    "notebooks/*.ipynb",
    "kernels_cu/*.cu*",
    "benchmarks/*.py",
    "gpuaccel/*/*.py",
)


def write_source(folder: pathlib.Path):
    """Copy the pages that Sphinx reads."""
    for path in (path for pattern in COPIED for path in ROOT.glob(pattern)):
        copied = folder / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    (folder / "api").mkdir(exist_ok=True)
    shutil.copy(ROOT / "docs" / "site" / "reference.rst", folder / "api" / "index.rst")
    kernels = sorted(path.name for path in (folder / "kernels_cu").glob("*.cu*"))
    for name in kernels:
        (folder / "kernels_cu" / f"{name}.md").write_text(
            f"# {name}\n\n```{{literalinclude}} {name}\n:language: cuda\n:lineno-start: 1\n```\n"
        )
    lines = "\n".join(f"kernels_cu/{name}" for name in kernels)
    (folder / "kernels_cu.md").write_text(f"# Kernels\n\n```{{toctree}}\n{lines}\n```\n")


def build(site: pathlib.Path):
    """Write the source, run Sphinx, check the result. SystemExit says what is wrong."""
    folder = site.parent / f"{site.name}-source"
    for old in (folder, site):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    write_source(folder)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", str(ROOT / "docs" / "site")]
    # All anew, because the tables of the reference do not know when a docstring has changed.
    command += ["-E", "-W", "--keep-going", "-q", "-d", f"{folder}-doctrees"]
    environment = {**os.environ, "GPUACCEL_GPU": "off"}
    done = subprocess.run([*command, str(folder), str(site)], env=environment)
    if done.returncode:
        raise SystemExit("the site has errors, see above")
    shutil.copy(site / "README.html", site / "index.html")
    problems = check_site.problems(site)
    if problems:
        raise SystemExit("\n".join([*problems, "the site has errors, see above"]))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    target = pathlib.Path(sys.argv[1]).resolve() if sys.argv[1:] else SITE
    build(target)
    print(f"the site is in {os.path.relpath(target)}: open index.html, or")
    print(f"  python -m http.server --directory {os.path.relpath(target)}")
