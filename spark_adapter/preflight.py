"""Checks the interpreter of Spark's Python workers before Spark does.

A wrong ``PYSPARK_PYTHON`` otherwise only says that a worker failed to connect back, after 10 s.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from keyshard.errors import WorkerEnvironmentError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = ("pyarrow", "pulsar", "keyshard", "spark_adapter")
"""Modules that a worker, or the stream process, imports."""
TIMEOUT_S = 60.0
"""Longest time the interpreter may take to answer, seconds."""

_PROGRAM = (
    "import importlib.util, sys;"
    "print(','.join(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)


def check_workers(spark: SparkSession) -> None:
    """Check that the workers' interpreter has what keyshard needs.

    Raises:
        WorkerEnvironmentError: It does not start, or lacks a module; names both and the remedy.
    """
    context = getattr(spark, "_sc", None)
    if context is None:  # Spark Connect: the workers belong to the server
        return
    check_interpreter(context.pythonExec)


def check_interpreter(python: str) -> None:
    """As :func:`check_workers`, for an interpreter's path or command name."""
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
            f"PYSPARK_PYTHON is {python!r}, which does not run: {exc}. {remedy}", python=python
        ) from exc
    if answer:
        raise WorkerEnvironmentError(
            f"PYSPARK_PYTHON is {python!r}, which lacks {answer}. Install keyshard[spark] there, "
            f"or: {remedy}",
            python=python,
            missing=answer,
        )
