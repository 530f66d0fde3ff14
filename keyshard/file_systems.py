"""Finds the file systems of fsspec URLs, without showing the credentials in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import fsspec

from keyshard.errors import ConfigError
from keyshard.redaction import Secret, redacted, scrubbed, shown

_CREDENTIALS = re.compile(r"://([^/:@]+):(.+)@")


@dataclass(frozen=True)
class Location:
    """A file or folder on a file system."""

    files: Any
    """The file system of fsspec."""
    path: str
    """Path on the file system."""
    url: str
    """The URL without its credentials, for texts."""
    secrets: tuple[Secret, ...] = field(repr=False)
    """Kept, so that errors and paths of the file system do not show them either."""


def location(option: str, url: str, advice: str) -> Location:
    """Find the file system of a path or fsspec URL.

    Args:
        option: The option, for the error.
        url: The path or URL.
        advice: Advice for the error: a kind of URL with an example.

    Raises:
        ConfigError: The URL names no known file system, or its driver is missing.
    """
    secrets = tuple(Secret(text, user) for user, text in _CREDENTIALS.findall(url))
    try:
        files, path = fsspec.core.url_to_fs(url)
    except Exception as exc:  # noqa: BLE001 - whatever a file system raises
        raise ConfigError(
            f"{option} is {shown(url)}: {scrubbed(exc)}.", f"Write an fsspec URL of {advice}."
        ) from None
    return Location(files, path, redacted(url), secrets)
