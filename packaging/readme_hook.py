"""Makes the README readable where its folder is not: on the page of a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_WHERE = "What this page names lies in `share/doc/keyshard` of the environment that has it.\n"
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")
"""A link to a file beside the README, or to a heading: an index page has neither."""


class ReadmeHook(MetadataHookInterface):
    """Gives the README as the description of the package, without links that lead nowhere."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": f"{_LINK.sub(lambda link: link[1], text)}\n{_WHERE}",
        }
