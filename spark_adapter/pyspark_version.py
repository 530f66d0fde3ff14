"""Whether there is a PySpark that the adapter can work with."""

from __future__ import annotations

_NEEDED = (4, 2)
"""The first version whose streaming data sources know admission control."""


def installed() -> str | None:
    """Version of PySpark here; ``None`` without one."""
    try:
        import pyspark  # noqa: PLC0415 - it may be missing
    except ModuleNotFoundError:
        return None
    return str(pyspark.__version__)


def check(found: str | None) -> None:
    """Check a version of PySpark.

    Raises:
        ImportError: It is too old, or there is none.
    """
    if found is not None and tuple(map(int, found.split(".")[:2])) >= _NEEDED:
        return
    has = "has none" if found is None else f"has {found}"
    raise ImportError(
        f"keyshard's Spark adapter needs PySpark 4.2 or newer, and this environment {has}. Install "
        "it with pip install 'pyspark>=4.2,<5'."
    )
