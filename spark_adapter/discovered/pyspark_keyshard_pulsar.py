"""Where Spark finds ``format("pulsar")`` by itself; see :mod:`pyspark_keyshard`.

Where the jar of the JVM connector is on the class path, Spark takes that one.
"""

from __future__ import annotations

import warnings

try:
    from spark_adapter import PulsarDataSource as DefaultSource  # noqa: F401 - Spark's name
except ImportError as exc:
    warnings.warn(f'Spark does not find format("pulsar") by itself: {exc}', stacklevel=1)
