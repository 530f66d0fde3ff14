"""Where Spark finds ``format("keyshard")`` by itself: installed at the top level, by this name.

Spark's first look for a Python data source imports every top-level module called ``pyspark_*``, in
a process of its own, and takes its ``DefaultSource``. An error here would take the others away
from every session of this environment, so it is told instead.
"""

from __future__ import annotations

import warnings

try:
    from spark_adapter import KeyShardDataSource as DefaultSource  # noqa: F401 - Spark's name
except ImportError as exc:
    warnings.warn(f'Spark does not find format("keyshard") by itself: {exc}', stacklevel=1)
