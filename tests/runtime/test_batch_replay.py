"""A batch with a partition per range, read again after a restart, is the same batch."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import MemoryCluster, Message
from tests.helpers import config, received, rows_of, running

pytestmark = pytest.mark.simulated(seeds=1)

RANGES = 4
ROWS = 440


@pytest.mark.parametrize("parallelism", [1, 3, 10])
@pytest.mark.parametrize("keyed", [True, False])
def test_a_replayed_batch_has_the_same_partitions_under_another_parallelism(
    parallelism: int, keyed: bool
) -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("orders", partitions=2)
    keys = [f"k{i % 97}" if keyed else None for i in range(ROWS)]
    cluster.publish(topic, *(Message(b"%d" % i, key=key) for i, key in enumerate(keys)))
    with running(cluster, config(topic, parallelism=RANGES, batch_tasks=RANGES)) as first:
        received(first, ROWS)
        end = first.batches.cut()
        assert end is not None
        assert end.merged is None, "the batch is too small for a partition per range"
        rows = rows_of(first, end)
        assert len(rows) == RANGES
    with running(cluster, config(topic, parallelism=parallelism), end, planned=True) as again:
        assert rows_of(again, end) == rows
