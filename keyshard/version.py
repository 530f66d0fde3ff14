"""The version of keyshard, and the check of the versions that its adapters need."""

from __future__ import annotations

VERSION = "0.1.0"
"""Processes on several machines compare it."""


def check_version(product: str, found: str | None, needed: tuple[int, int], install: str) -> None:
    """Check the installed version of a host engine.

    Args:
        product: Name of the engine.
        found: Its installed version; ``None`` if it is missing.
        needed: The first version that the adapter supports.
        install: Requirement for pip that installs a supported version.

    Raises:
        ImportError: The engine is too old or missing.
    """
    if found is not None and tuple(map(int, found.split(".")[:2])) >= needed:
        return
    has = "has none" if found is None else f"has {found}"
    raise ImportError(
        f"keyshard's adapter needs {product} {needed[0]}.{needed[1]} or newer, and this "
        f"environment {has}. Install it with pip install {install!r}."
    )
