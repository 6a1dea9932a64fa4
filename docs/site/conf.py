"""Sphinx's settings for the site of docs/site/build.py."""

import pathlib
import sys

from pygments.lexer import Lexer
from pygments.lexers import CudaLexer
from pygments.token import Comment

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

import pages  # noqa: E402

import gpuaccel  # noqa: E402

project = "gpuaccel"
author = "gpuaccel contributors"
copyright = author
version = release = gpuaccel.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

root_doc = "README"
# autosummary looks beside the source.
templates_path = [str(ROOT / "docs" / "site" / "templates")]

# Notebooks show their stored outputs; nothing is executed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}
# Anchors of headings as a forge makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# torch has docstrings for nn.Module.forward and the like, which say nothing about ours.
autodoc_inherit_docstrings = False
autodoc_default_options = {
    "members": True,
    "special-members": "__call__, __getitem__",
    "undoc-members": False,
    "no-value": True,
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
default_role = "literal"
# A block without a language is a command or an output.
highlight_language = "none"
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True

# A notebook may leave out a level.
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = f"gpuaccel {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_last_updated_fmt = None
html_theme_options = {"navigation_with_keys": False}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"


class CellLexer(Lexer):
    """A notebook's cell: Python, and below a line %%cuda CUDA C."""

    name = "gpuaccel-cell"

    def get_tokens_unprocessed(self, text):
        from IPython.lib.lexers import IPython3Lexer

        first, line_end, rest = text.partition("\n")
        if not first.startswith("%%cuda"):
            yield from IPython3Lexer().get_tokens_unprocessed(text)
            return
        yield 0, Comment.Preproc, first + line_end
        start = len(first + line_end)
        for index, kind, value in CudaLexer().get_tokens_unprocessed(rest):
            yield start + index, kind, value


def setup(app):
    app.add_lexer("gpuaccel-cell", CellLexer)
    pages.setup(app)
