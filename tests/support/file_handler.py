"""A handler for processes that writes its messages to files."""

from __future__ import annotations

import json
from pathlib import Path

import keyshard


def write(folder: str, message: keyshard.Message) -> None:
    """Write the decoded value into a file that is called like the key."""
    file = Path(folder, f"{message.key}.part")
    file.write_text(json.dumps(message.data))
    file.rename(file.with_suffix(".json"))
