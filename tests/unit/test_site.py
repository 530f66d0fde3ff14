"""The documentation site builds without a warning, and needs no other server."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(?:https?:)?//", re.ASCII)


BUILD = """
import gc, sys
from sphinx.cmd.build import main
gc.set_threshold(100_000)
*arguments, builders = sys.argv[1:]
sys.exit(any(main([*arguments, "-b", builder]) for builder in builders.split(",")))
"""
"""All builders in one process, which loads them once. Its garbage is collected less often, because
that takes a sixth of the time."""
PAGES_OF_SPHINX = {"genindex", "search", "py-modindex"}


def build(folder: Path, *builders: str) -> Path:
    """Build the site in a folder; return its place. A warning is an error."""
    site = folder / "site"
    made = subprocess.run(
        [sys.executable, "-c", BUILD, "--quiet", "--fail-on-warning", "--keep-going",
         "-c", "docs", "-d", folder / "doctrees", ".", site, ",".join(builders)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return site


def test_the_pages_are_written_as_markdown_without_a_warning(tmp_path: Path) -> None:
    """A broken link, a page outside the contents, or a malformed docstring is a warning.

    ``llms.txt`` lists pages that exist.
    """
    site = build(tmp_path, "markdown")
    assert (site / "docs/tutorials/spark.md").is_file()
    links = re.findall(r"\]\(([^)]*)\)", (site / "llms.txt").read_text())
    assert {"docs/tutorials/spark.md", "README.md", "bench/README.md"} <= set(links)
    assert [link for link in links if not (site / link).is_file()] == []


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """Each page names its Markdown, which the other builder writes to the same folder."""
    site = build(tmp_path, "html", "markdown")
    pages = sorted(site.rglob("*.html"))
    assert site / "docs/tutorials/spark.html" in pages
    assert [page for page in pages if FETCHED.search(page.read_text())] == []
    written = [page for page in pages if page.stem not in PAGES_OF_SPHINX]
    assert [page for page in written if not page.with_suffix(".md").is_file()] == []
    assert (
        '<link rel="alternate" type="text/markdown" href="spark.md">'
        in (site / "docs/tutorials/spark.html").read_text()
    )


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_are_valid(page: Path) -> None:
    """Not every block can be run: some need a database, or a program around them."""
    for block in re.findall(
        r"^ *```python\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        compile(textwrap.dedent(block), str(page), "exec")
