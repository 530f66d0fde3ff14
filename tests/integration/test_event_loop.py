"""``async for``, ``arun`` and ``run_until_idle`` on a real broker."""

from __future__ import annotations

import asyncio
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
from tests.support.observed import backlog

pytestmark = pytest.mark.broker

COUNT, KEYS = 2_000, 40


@pytest.fixture
def source(dev_broker: DevBroker, topic_name: str) -> KeyShardSource:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    produce(Workload(COUNT, keys=KEYS, entry_messages=3), dev_broker.service_url, topic_name)
    return KeyShardSource(
        topic_name, subscription="loops", service_url=dev_broker.service_url,
        admin_url=dev_broker.admin_url, starting_position="earliest",
    )  # fmt: skip


def test_messages_come_once_and_in_order_across_all_ways(
    dev_broker: DevBroker, source: KeyShardSource
) -> None:
    next_of: Counter[str] = Counter()

    def note(message: Message) -> None:
        key, seq = parse_value(present(message.value))
        # The rest of an entry comes again with the entry.
        assert seq <= next_of[key]
        next_of[key] = max(next_of[key], seq + 1)

    async def iterate(count: int) -> None:
        async with source.messages() as messages:
            async for message in messages:
                note(message)
                await message.done()
                if next_of.total() >= count:
                    break

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        note(message)
        if next_of.total() >= 1_300:
            source.stop()

    async def main() -> None:
        await iterate(300)
        await iterate(800)
        await source.arun(handle)

    asyncio.run(asyncio.wait_for(main(), 120))
    assert next_of.total() < COUNT
    run_until_idle(source, note)
    assert next_of.total() == COUNT
    assert backlog(dev_broker, source.topics[0], "loops", 3) == 0
