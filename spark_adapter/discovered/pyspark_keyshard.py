"""Makes ``format("keyshard")`` known to Spark; installed at the top level under this name.

At its first look for a Python data source, Spark imports every top-level module ``pyspark_*`` in a
separate process, and takes its ``DefaultSource``. An error here would remove all data sources from
every session of this environment, so this module warns instead.
"""

from __future__ import annotations

import warnings

try:
    from spark_adapter import KeyShardDataSource as DefaultSource  # noqa: F401 - Spark's name
except ImportError as exc:
    warnings.warn(f'Spark does not find format("keyshard") automatically: {exc}', stacklevel=1)
