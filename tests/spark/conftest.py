"""One Spark session for the tests that share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from examples.parquet_query import session
from keyshard.testing.devbroker import DevBroker
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from spark_adapter.preflight import is_before
from tests.spark.spark_tenant import Tenant


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session that knows format("keyshard")."""
    spark = session()
    # Each stream process is asked to end, so that no test disturbs the next.
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield spark
    spark.stop()


@pytest.fixture
def tenant(
    spark: SparkSession, dev_broker: DevBroker, request: pytest.FixtureRequest
) -> Iterator[Tenant]:
    name = f"catalog-{abs(hash(request.node.name))}"
    yield Tenant(dev_broker, spark, name)
    spark.sql(f"DROP DATABASE IF EXISTS `{name}/default` CASCADE")


@pytest.fixture
def fixed(spark: SparkSession) -> Iterator[None]:
    """Spark partitions of streams that adaptive execution leaves alone."""
    spark.conf.set(ADAPTIVE_STREAMS, "false")
    yield
    spark.conf.unset(ADAPTIVE_STREAMS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what an older PySpark cannot have; ``make oldest`` runs the rest there."""
    mark = item.get_closest_marker("pyspark")
    if mark and is_before(*mark.args):
        pytest.skip("it needs PySpark {}.{}".format(*mark.args))
