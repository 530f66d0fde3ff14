"""Reads the access token of the live page (``keyshard ui`` or ``ui_port``) from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyshard.errors import ConfigError

TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="File with the token of the page."),
]


def read_token(file: Path) -> str:
    """Return the token in a file, without the end of its line.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as exc:
        raise ConfigError(
            f"The token cannot be read from {file}: {exc}.", "Correct --token-file."
        ) from exc
