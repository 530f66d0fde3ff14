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


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """A broken link, a page outside the contents, or a malformed docstring is a warning."""
    site = tmp_path / "site"
    made = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going",
         "-c", "docs", "-d", tmp_path / "doctrees", ".", site],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    pages = sorted(site.rglob("*.html"))
    assert site / "docs/tutorials/spark.html" in pages
    assert [page for page in pages if FETCHED.search(page.read_text())] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_are_valid(page: Path) -> None:
    """Not every block can be run: some need a database, or a program around them."""
    for block in re.findall(
        r"^ *```python\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        compile(textwrap.dedent(block), str(page), "exec")
