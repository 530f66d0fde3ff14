"""Metrics over HTTP of sources that hand out batches."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Message
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic
from tests.support.scraped import get, samples, serves

pytestmark = pytest.mark.usefixtures("control_folder")

ROWS = 100


@contextmanager
def handed_out(source: KeyShardSource) -> Iterator[None]:
    """Consume with ``source.batches()``: all rows are handed out and acknowledged."""
    batches = source.batches()
    try:
        rows = 0
        while rows < ROWS:
            batch = next(batches)
            rows += batch.records.num_rows
            batch.ack()
        yield
    finally:
        batches.close()


@contextmanager
def opened(source: KeyShardSource) -> Iterator[None]:
    """Consume with ``source.open()``: all rows are cut and committed."""
    with source.open() as stream:
        rows = 0
        while rows < ROWS:
            batch = present(stream.next_batch(deadline(30)))
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
        yield


@pytest.mark.parametrize("consume", [handed_out, opened])
def test_metrics_of_batches_are_served_until_their_end(
    consume: Callable[[KeyShardSource], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "keyshard.observe.monitor")
    topic = MemoryTopic()
    topic.cluster.publish(
        topic.topic, *(Message(b"v", key=f"k{number % 9}") for number in range(ROWS))
    )
    with consume(topic.source(metrics_port=0)):
        (port,) = map(int, re.findall(r"metrics are served on 127.0.0.1, port (\d+)", caplog.text))
        wait_until(lambda: samples(port)["keyshard_entries_acknowledged_total"] == [ROWS])
        found = samples(port)
        assert found["keyshard_messages_received_total"] == [ROWS]
        assert found["keyshard_ranges"] == [4]
        assert found["keyshard_range_state"].count(1) == 4
        for probe in ("/livez", "/readyz"):
            assert (get(port, probe).status_code, get(port, probe).text) == (200, "ok\n")
        assert get(port, "/other").status_code == 404
    assert not serves(port)
