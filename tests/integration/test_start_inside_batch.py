"""A read that ends inside a producer batch, and the stream that begins there, on a real broker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keyshard import Checkpoint, KeyShardSource
from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness
from tests.helpers import received, rows_of, started, wait_until

pytestmark = [pytest.mark.broker]


@pytest.mark.parametrize(
    "how",
    [{"transport": "wire"}, {"transport": "client"}, {"workers": "processes:1"}],
    ids=["wire", "client", "worker"],
)
def test_every_message_comes_once_and_the_first_batch_runs_again_the_same(
    dev_broker: DevBroker, harness: PulsarHarness, how: dict[str, Any]
) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"%d" % i, key="k") for i in range(10)], Batching.BY_KEY)
    harness.publish(where.name, [Message(b"10", key="k")])

    def source(starting_position: str) -> KeyShardSource:
        return KeyShardSource(
            where.topic, subscription="s", service_url=dev_broker.service_url,
            admin_url=dev_broker.admin_url, parallelism=2, starting_position=starting_position,
            **how,
        )  # fmt: skip

    (stored,) = plan_read(source("earliest"))
    end = f"{stored.first.ledger}:{stored.first.entry}:7"
    split = plan_read(source("earliest"), end=end)
    batches = read_splits(source("earliest").how_to_connect(), split, ["value"])
    values = [value for one in batches for value in one.column(0).to_pylist()]
    assert values == [b"%d" % i for i in range(7)]

    def had(start: str, checkpoint: Checkpoint | None = None) -> tuple[Checkpoint, Any]:
        """Return the first batch of a run; without a checkpoint, the run ends before the commit."""
        coordinator = source(start).coordinator()
        with started(coordinator, checkpoint, planned=checkpoint is not None):
            if checkpoint is None:
                received(coordinator, 4)
            cut = checkpoint or coordinator.batches.cut()
            assert cut is not None
            rows = rows_of(coordinator, cut)
            if checkpoint is not None:
                coordinator.batches.release(cut)
                wait_until(lambda: harness.backlog(where, "s") == 0)
            return cut, rows

    _, first = had(json.dumps({where.name: end}))
    assert [row["value"] for part in first.values() for row in part] == [b"7", b"8", b"9", b"10"]
    # The subscription exists, so the option has no effect any more.
    planned, again = had("earliest")
    assert again == first
    _, replayed = had("earliest", planned)
    assert replayed == first
