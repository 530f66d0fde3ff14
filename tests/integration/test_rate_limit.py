"""``rate_limit`` on a real broker, wherever the consumers run."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from keyshard import KeyShardSource, Message
from keyshard.testing import run_until_idle
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.helpers import present

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("workers", ["embedded", "processes:2"])
def test_the_limit_holds_over_all_workers(
    dev_broker: DevBroker, topic_name: str, workers: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    produce(Workload(300, keys=30, entry_messages=3), dev_broker.service_url, topic_name)
    source = KeyShardSource(
        topic_name, subscription="limited", service_url=dev_broker.service_url,
        admin_url=dev_broker.admin_url, starting_position="earliest", workers=workers,
    )  # fmt: skip
    next_of: Counter[str] = Counter()
    times: list[float] = []

    def handle(message: Message) -> None:
        times.append(time.monotonic())
        key, seq = parse_value(present(message.value))
        assert seq == next_of[key]
        next_of[key] += 1

    run_until_idle(source, handle, rate_limit=150, rate_burst=15)
    assert next_of.total() == 300
    assert times[-1] - times[0] >= 0.9 * (300 - 15) / 150
