"""Entries that sinks cut: their encoded size keeps to the limit of the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from keyshard.broker.wire.encoding import EntryHead, encoded
from keyshard.columns.canonical import canonical
from keyshard.columns.outgoing import Outgoing, OutgoingMessage, outgoing_from
from keyshard.config.sink import SinkConfig
from keyshard.core.position.entry import TopicPartition
from keyshard.publishing.batch_part import Part
from keyshard.publishing.counts import Attempt
from keyshard.publishing.message_writer import _PartitionQueue

MESSAGES = [OutgoingMessage(b"v" * 100, "k" * 3_000, "o" * 500) for _ in range(100)]
CONFIG = SinkConfig("out", service_url="memory://sizes")


class Producer:
    """Notes the entries that it is to publish."""

    def __init__(self, limit: int) -> None:
        self.message_bytes_max = limit
        self.ends: Sequence[int] = ()

    def publish_all(self, rows: Outgoing, ends: Sequence[int], first: int) -> list[Future[None]]:
        assert (len(rows), first) == (len(MESSAGES), 0)
        self.ends = ends
        return [Future() for _ in ends]


def cut_of_rows(producer: Any) -> Sequence[int]:
    (plan,) = canonical(outgoing_from(MESSAGES), 1, keyless_from=0, scheme="java")
    where = TopicPartition.parse("persistent://public/default/out")
    return Part(where, plan, producer, Attempt()).entry_ends(CONFIG)


def cut_of_messages(producer: Any) -> Sequence[int]:
    queue = _PartitionQueue(producer, CONFIG, 2**30, lambda error: pytest.fail(str(error)))
    for one in MESSAGES:
        queue.add(one, one.size(), Future())
    queue.publish()
    return producer.ends


@pytest.mark.parametrize("cut", [cut_of_rows, cut_of_messages])
def test_entries_with_long_keys_keep_to_the_limit_of_the_broker(
    cut: Callable[[Any], Sequence[int]],
) -> None:
    for limit in range(60_000, 63_600, 100):
        ends = cut(Producer(limit))
        assert len(ends) > 1
        for start, stop in pairwise([0, *ends]):
            entry = encoded(MESSAGES[start:stop], EntryHead(b"n" * 100, 1), 0)
            assert len(entry) <= limit
