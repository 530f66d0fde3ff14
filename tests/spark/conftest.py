"""One Spark session for the tests that share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from examples.parquet_query import session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session that knows format("keyshard")."""
    spark = session()
    # Each stream process is told to end; what the test before left must not disturb the next.
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield spark
    spark.stop()
