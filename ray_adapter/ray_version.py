"""Whether there is a Ray that the adapter can work with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_NEEDED = (2, 50)


def installed() -> str | None:
    """Version of Ray here; ``None`` without one."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def check(found: str | None) -> None:
    """Check a version of Ray.

    Raises:
        ImportError: It is too old, or there is none.
    """
    if found is not None and tuple(map(int, found.split(".")[:2])) >= _NEEDED:
        return
    has = "has none" if found is None else f"has {found}"
    raise ImportError(
        f"keyshard's Ray adapter needs Ray 2.50 or newer, and this environment {has}. Install it "
        "with pip install 'keyshard[ray]'."
    )
