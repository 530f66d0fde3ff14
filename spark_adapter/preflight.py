"""Check the version of PySpark, and the interpreter of its Python workers, before Spark uses it.

With a wrong ``PYSPARK_PYTHON``, Spark only says after 10 s that a worker failed to connect back.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from keyshard.errors import ConfigError, WorkerEnvironmentError
from keyshard.version import check_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = ("pyarrow", "pulsar", "keyshard", "spark_adapter")
"""Modules that a Python worker or the stream process imports."""
TIMEOUT_S = 60.0
"""Longest wait for the interpreter's answer, seconds."""

_PROGRAM = (
    "import importlib.util, sys;"
    "print(','.join(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)


def is_remote(given: object) -> bool:
    """Return whether a DataFrame or a query uses Spark Connect; its plan is then on the server."""
    # ``hasattr`` cannot tell: a DataFrame of Spark Connect returns a column for almost any name.
    return type(given).__module__.startswith("pyspark.sql.connect")


def is_true(setting: str | None) -> bool:
    """Return whether a setting of Spark is on. Spark reads ``true`` in any case."""
    return (setting or "").strip().lower() == "true"


def check_workers(spark: SparkSession) -> None:
    """Check that the interpreter of the Python workers has the modules that keyshard needs.

    Raises:
        WorkerEnvironmentError: It does not start, or lacks a module. The error says what to do.
    """
    context = getattr(spark, "_sc", None)
    if context is None:  # Spark Connect: the Python workers belong to the server
        return
    check_interpreter(context.pythonExec)


def check_interpreter(python: str) -> None:
    """Check one interpreter, given by path or command name; as :func:`check_workers`."""
    remedy = f"Set PYSPARK_PYTHON to an interpreter that has keyshard, such as {sys.executable!r}."
    try:
        answer = subprocess.run(
            [python, "-c", _PROGRAM, *NEEDED],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as exc:
        raise WorkerEnvironmentError(
            f"PYSPARK_PYTHON is {python!r}, which does not run: {exc}.", remedy, python=python
        ) from exc
    if answer:
        raise WorkerEnvironmentError(
            f"PYSPARK_PYTHON is {python!r}, which lacks {answer}.",
            f"Install keyshard[spark] there, or use another interpreter. {remedy}",
            python=python,
            missing=answer,
        )


# -- The version of PySpark ------------------------------------------------------------------------


class Feature(NamedTuple):
    """A part of the adapter that older versions of PySpark cannot have; see docs/adr/0039."""

    name: str
    since: tuple[int, int]
    """First version of PySpark that can have it."""
    instead: str
    """How to do without it."""


STREAMS = Feature(
    "streams", (4, 2), "Use batch reads (spark.read), or KeyShardSource without Spark."
)
STREAM_WRITES = Feature(
    "format('keyshard') in writeStream", (4, 1), "Use spark_adapter.write_batch in foreachBatch."
)
FILTERS = Feature("pushFilters", (4, 1), "Leave the option out: Spark then filters the rows.")
REPORTS = Feature(
    "ReadReports and WriteReports", (4, 1),
    "Use spark_adapter.read_plan, or the log lines of tasks and commits.",
)  # fmt: skip
_FEATURES = (STREAMS, STREAM_WRITES, FILTERS, REPORTS)


def check_pyspark() -> None:
    """Check the installed version of PySpark. The first one with Python data sources is 4.0.

    Raises:
        ImportError: PySpark is too old or missing.
    """
    check_version("PySpark", _installed(), (4, 0), "pyspark>=4.0,<5")


def check_has(feature: Feature) -> None:
    """Check that the installed PySpark can have a feature.

    Raises:
        ConfigError: It is too old.
    """
    if is_before(*feature.since):
        raise ConfigError(
            f"PySpark {_installed()} cannot have {feature.name}.",
            f"Install PySpark {_text(feature.since)} or newer. {feature.instead}",
        )


def lacking() -> list[Feature]:
    """Return the features that the installed PySpark cannot have."""
    return [one for one in _FEATURES if is_before(*one.since)]


def is_before(*version: int) -> bool:
    """Return whether the installed PySpark is older than a version, given as major and minor."""
    return tuple(map(int, (_installed() or "0.0").split(".")[:2])) < version


def warning_of_lacking() -> str:
    """Return one sentence about the features that the installed PySpark cannot have, if any."""
    parts = [f"{one.name} ({_text(one.since)} or newer)" for one in lacking()]
    if not parts:
        return ""
    return (
        f"PySpark {_installed()} has batch reads, tables and batch writes of keyshard, but lacks "
        f"{', '.join(parts)}."
    )


def _installed() -> str | None:
    """Return the version of PySpark; ``None`` if it is missing."""
    try:
        import pyspark  # noqa: PLC0415 - it may be missing
    except ModuleNotFoundError:
        return None
    return str(pyspark.__version__)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
