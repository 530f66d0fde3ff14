"""A source says when one entry for each of its consumers is more than its window."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import Message
from tests.helpers import wait_until
from tests.support.memory_topic import MemoryTopic, Run

SAID = "Each of 8 consumers may hold one beside the window"


@pytest.mark.parametrize(("value_bytes", "told"), [(200_000, True), (100_000, False)])
def test_entries_that_fill_more_than_the_window_are_named(
    value_bytes: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    orders = MemoryTopic(partitions=2)
    source = orders.source(parallelism=4, window_bytes_max=1 << 20)
    for number in range(6):
        orders.cluster.publish(orders.topic, Message(bytes(value_bytes), key=f"k{number}"))
    handled: list[object] = []
    with Run(source, handled.append, {}) as run:
        wait_until(lambda: len(handled) == 6 or run.error is not None)
    assert run.error is None
    assert (SAID in caplog.text) is told
