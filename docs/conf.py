"""Configuration of the documentation site, for Sphinx; ``make docs`` builds it.

The source folder is the root of the project. So README, ARCHITECTURE and CHANGELOG are pages, and
links between files are the same on the site and in the repository.

The builder ``html`` writes the site. The builder ``markdown`` then writes each page again as
Markdown beside it, and ``llms.txt`` as their index (https://llmstxt.org).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from keyshard.version import VERSION

ROOT = Path(__file__).parents[1]

project = "keyshard"
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_markdown_builder"]
root_doc = "docs/index"
include_patterns = ["*.md", "bench/*.md", "docs/**"]
exclude_patterns = [".*", "build"]
myst_heading_anchors = 4

autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

# The theme brings its own files. Nothing is fetched when the site is built or read.
html_theme = "furo"
html_title = "keyshard"
html_show_sphinx = False
html_copy_source = False


def _contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add what a page has on the site only: contents, from its lists of links; help of commands."""
    if page == "docs/index":
        for section in source[0].split("\n## ")[1:]:
            links = re.findall(r"^- \[[^]]*\]\((.*?)\.md\)", section, re.MULTILINE)
            source[0] += _TOCTREE.format(caption=section.partition("\n")[0], pages="\n".join(links))
    elif page == "docs/adr/README":
        source[0] += _TOCTREE.format(caption="Records", pages="0*")
    elif page == "docs/cli":
        made = subprocess.run(
            [sys.executable, "-m", "typer", "keyshard.cli", "utils", "docs", "--name", "keyshard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        source[0] += made.partition("\n")[2]  # without its title


_TOCTREE = """
```{{toctree}}
:hidden:
:glob:
:caption: {caption}

{pages}
```
"""


def _sections(
    _app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Turn Google sections into fields.

    The extension napoleon itself would take a colon in the text of an attribute for its type.
    """
    lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False)).lines()


def _link_markdown(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    """Name the Markdown of a page in its head."""
    own = page.rpartition("/")[2]
    if page in app.env.found_docs:
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{own}.md">'


def _plain_signatures(app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Keep the ``*`` of a signature, which the builder ``markdown`` does not know as a node."""
    if app.builder.name == "markdown":
        for one in list(doctree.findall(nodes.abbreviation)):
            one.replace_self(nodes.Text(one.astext()))


def _index_markdown(app: Sphinx, failed: Exception | None) -> None:
    """Write ``llms.txt``: the start page of the documentation, with links to Markdown."""
    if app.builder.name != "markdown" or failed is not None:
        return
    title, _, text = (ROOT / "docs/index.md").read_text().partition("\n\n")
    about, _, sections = text.partition("\n\n")
    about = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", about).split())
    sections = sections.replace("](../", "](/").replace("](", "](docs/").replace("](docs//", "](")
    Path(app.outdir, "llms.txt").write_text(f"{title}\n\n> {about}\n\n{sections}")


def setup(app: Sphinx) -> None:
    """Connect the steps of this file to the build."""
    app.connect("html-page-context", _link_markdown)
    app.connect("doctree-resolved", _plain_signatures)
    app.connect("build-finished", _index_markdown)
    app.connect("source-read", _contents)
    app.connect("autodoc-process-docstring", _sections)
