"""Types of the Python code in README.md and docs: ``python -m tests.page_types``.

Each block is checked by itself, as strictly as the product.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from mypy import api

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LENIENT = ("name-defined", "used-before-def", "has-type")
"""A block may use names of the text before it; other tests run whole programs."""


def programs() -> Iterator[tuple[str, str]]:
    """Name and code of each block; the name has its page and line."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            yield f"{page.stem.replace('-', '_')}_line_{line}", dedent(block[2])


def main() -> int:
    """Check all blocks; return 1 if one is wrong."""
    with TemporaryDirectory() as folder:
        paths = []
        for name, code in programs():
            path = Path(folder) / f"{name}.py"
            path.write_text(code)
            paths.append(str(path))
        assert paths, "the pages have blocks"
        config = str(ROOT / "pyproject.toml")
        found, errors, status = api.run(
            ["--config-file", config, *(f"--disable-error-code={one}" for one in LENIENT), *paths]
        )
    if status:
        print(found.replace(f"{folder}/", ""), errors, sep="", end="")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
