"""A lasting refusal ends a start that is still reading a long dead-letter topic."""

from __future__ import annotations

import threading
import time

import pytest

from keyshard.broker.memory import MemoryReader
from keyshard.broker.memory.client import MemoryConsumer
from keyshard.core.position.entry import EntryBlock
from keyshard.errors import AuthorizationError, BrokerUnavailableError, LimitReachedError
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.parking_topic import ParkingTopic

pytestmark = pytest.mark.simulated(seeds=1)

ENDS_WITHIN_S = 10
"""Far less than ``replay_timeout_ms``, 120 s, for which a silent dead-letter topic is read."""


class LongTopic:
    """Readers of the dead-letter topic never come to its end; consumers can be refused."""

    def __init__(self, parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_read = threading.Event()
        self.refusal: Exception | None = None
        """Raised by consumers of the source."""
        self.reading: Exception | None = None
        """Raised by Readers of the dead-letter topic; else they have nothing yet."""
        receive, read, at_end = MemoryConsumer.receive, MemoryReader.read, MemoryReader.at_end

        def receives(consumer: MemoryConsumer, timeout_ms: int) -> list[EntryBlock]:
            if self.refusal is not None and consumer.topic_partition in parking.where:
                raise self.refusal
            return receive(consumer, timeout_ms)

        def reads(reader: MemoryReader, timeout_ms: int) -> list[EntryBlock]:
            if reader.topic_partition != parking.dead_letter_partition:
                return read(reader, timeout_ms)
            self.is_read.set()
            if self.reading is not None:
                raise self.reading
            threading.Event().wait(timeout_ms / 1000)
            return []

        def ends(reader: MemoryReader) -> bool:
            return reader.topic_partition != parking.dead_letter_partition and at_end(reader)

        monkeypatch.setattr(MemoryConsumer, "receive", receives)
        monkeypatch.setattr(MemoryReader, "read", reads)
        monkeypatch.setattr(MemoryReader, "at_end", ends)


@pytest.fixture
def long(parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch) -> LongTopic:
    parking.broken = {"b"}
    parking.publish(*"b" * 3)
    with parking.run():
        wait_until(lambda: len(parking.dead_letters()) == 3 and parking.backlog() == 0)
    return LongTopic(parking, monkeypatch)


NOTHING_YET, NO_READER = None, BrokerUnavailableError("No Reader.")


@pytest.mark.parametrize("reading", [NOTHING_YET, NO_READER], ids=["silent", "no reader"])
@pytest.mark.parametrize(
    "refusal",
    [AuthorizationError("The role lacks consume."), LimitReachedError("Too many consumers.")],
    ids=["lasting", "retriable"],
)
def test_a_refusal_of_consumers_ends_a_start_that_reads_dead_letters(
    parking: ParkingTopic, long: LongTopic, refusal: Exception, reading: Exception | None
) -> None:
    # The dead-letter topic is read after the ranges are subscribed, and they receive meanwhile.
    long.reading = reading
    began_s = time.monotonic()
    run = parking.run()
    run.thread.start()
    try:
        assert long.is_read.wait(deadline(20))
        long.refusal = refusal
        parking.publish("a")
        wait_until(lambda: run.error is not None, deadline(ENDS_WITHIN_S))
        assert run.error is refusal
        assert time.monotonic() - began_s < deadline(ENDS_WITHIN_S)
    finally:
        run.end()


def test_a_refusal_of_the_reader_ends_a_start_that_reads_dead_letters(
    parking: ParkingTopic, long: LongTopic
) -> None:
    run = parking.run()
    run.thread.start()
    try:
        assert long.is_read.wait(deadline(20))
        long.reading = refusal = AuthorizationError("The role lacks consume.")
        wait_until(lambda: run.error is not None, deadline(ENDS_WITHIN_S))
        assert run.error is refusal
    finally:
        run.end()
