"""Makes ``format("pulsar")`` known to Spark; see :mod:`pyspark_keyshard`.

If the jar of the JVM connector is on the class path, Spark takes that one.
"""

from __future__ import annotations

import warnings

try:
    from spark_adapter import PulsarDataSource as DefaultSource  # noqa: F401 - Spark's name
except ImportError as exc:
    warnings.warn(f'Spark does not find format("pulsar") automatically: {exc}', stacklevel=1)
