"""Entries that cannot be read: the source ends before one, or skips it by the user's choice."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.memory.log import StoredEntry
from keyshard.config.source import SourceConfig
from keyshard.consumers.identity_check import IdentityCheck
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter import DeadLetterKind
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letters.writer import DeadLetterWriter
from keyshard.errors import (
    BrokerError,
    ConfigError,
    CorruptEntryError,
    DataLossAckedElsewhereError,
)
from tests.helpers import commit, keys_of, present, received, rows_of, running, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import SUBSCRIPTION, NumberedTopic
from tests.support.parking_topic import ParkingTopic

KEYS = keys_of(4)


class CorruptTopic(NumberedTopic):
    """A topic without partitions, some of whose entries are corrupt."""

    def __init__(self) -> None:
        super().__init__(entries_per_ledger=30)

    def corrupt(self, *numbers: int) -> None:
        self.cluster.corrupt(self.at, *(self.ids[number] for number in numbers))

    def source(self, **changes: Any) -> KeyShardSource:
        return super().source(**{"on_corrupt": "skip"} | changes)


def numbers(coordinator: Coordinator, end: Checkpoint) -> list[int]:
    return sorted(int(row["value"]) for part in rows_of(coordinator, end).values() for row in part)


def test_skipped_entries_are_acknowledged_counted_named_and_no_ack_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = CorruptTopic()
    topic.publish(20)
    topic.corrupt(0, 7, 8, 19)
    with caplog.at_level(logging.WARNING), running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 16)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 4)
        wait_until(lambda: topic.backlog() == 16)  # before anything is committed
        end = commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)
        assert coordinator.status()["ackGaps"] == 0
    assert end.partitions[topic.at].delivered.run_count == 1
    (said,) = [one.getMessage() for one in caplog.records if "on_corrupt" in one.getMessage()]
    assert "its checksum is wrong" in said


def test_a_corrupt_entry_ends_the_source_by_default_and_is_not_acknowledged() -> None:
    topic = CorruptTopic()
    topic.publish(4)
    topic.corrupt(3)
    with running(topic.cluster, topic.source(on_corrupt="fail")) as coordinator:

        def ended() -> bool:
            coordinator.batches.cut()
            assert not coordinator.status()["corruptSkipped"]
            return False

        with pytest.raises(CorruptEntryError, match=r"(?s)Entry \d+:3 .*set on_corrupt to skip"):
            wait_until(ended)
        assert topic.backlog() == 4


@pytest.mark.parametrize("strict", [True, False])
def test_a_corrupt_entry_that_another_client_acknowledged_is_a_counted_loss(strict: bool) -> None:
    """1. A source ends at a corrupt entry. 2. An operator skips the entry at the broker."""
    topic = CorruptTopic()
    admin = MemoryAdmin(topic.cluster)
    topic.publish(4)
    source = topic.source(on_corrupt="fail", fail_on_data_loss=strict)
    with running(topic.cluster, source, admin=admin) as coordinator:
        received(coordinator, 4)
        end = commit(coordinator)
    topic.publish(1)
    topic.corrupt(4)
    topic.cluster.acknowledge(topic.at, SUBSCRIPTION, [topic.ids[4]])
    topic.publish(4)
    if strict:
        with (
            pytest.raises(DataLossAckedElsewhereError, match="1 entries of"),
            running(topic.cluster, source, end, admin=admin),
        ):
            pass
        return
    with running(topic.cluster, source, end, admin=admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 1
        received(coordinator, 4)


@pytest.mark.parametrize("with_admin", [False, True])
def test_a_bounded_run_ends_behind_skipped_corrupt_entries(with_admin: bool) -> None:
    topic = CorruptTopic()
    topic.publish(40)
    topic.corrupt(0, 5, 29, 30, 38, 39)
    admin = MemoryAdmin(topic.cluster) if with_admin else None
    source = topic.source(available_now_timeout_ms=20_000, available_now_quiet_ms=3_600_000)
    coordinator = Coordinator(source, lambda: MemoryBroker(topic.cluster), admin)
    coordinator.start(None, available_now=True)
    got: list[int] = []
    while (end := coordinator.batches.cut_available(7)) is not None:
        got += numbers(coordinator, end)
        coordinator.batches.release(end)
    coordinator.stop()
    assert sorted(got) == sorted(set(range(40)) - {0, 5, 29, 30, 38, 39})


@pytest.mark.parametrize("on_corrupt", ["skip", "fail"])
@pytest.mark.parametrize("with_admin", [False, True])
def test_a_batch_among_corrupt_entries_is_replayed_the_same(
    on_corrupt: str, with_admin: bool
) -> None:
    """The option may change at the restart."""
    topic = CorruptTopic()
    topic.publish(20)
    topic.corrupt(4, 12)
    admin = MemoryAdmin(topic.cluster) if with_admin else None
    with running(topic.cluster, topic.source(), admin=admin) as coordinator:
        received(coordinator, 18)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 2)
        end = coordinator.batches.cut()
        assert end is not None
        before = numbers(coordinator, end)
        wait_until(lambda: topic.backlog() == 18)
    source = topic.source(on_corrupt=on_corrupt)
    with running(topic.cluster, source, end, planned=True, admin=admin) as coordinator:
        assert numbers(coordinator, end) == before
        coordinator.batches.release(end)
        wait_until(lambda: topic.backlog() == 0)


def test_an_entry_of_a_batch_that_became_corrupt_is_named_and_not_left_out() -> None:
    topic = CorruptTopic()
    topic.publish(8)
    with running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 8)
        end = coordinator.batches.cut()
        assert end is not None
    topic.corrupt(5)
    with (
        running(topic.cluster, topic.source(), end, planned=True) as coordinator,
        pytest.raises(CorruptEntryError, match=r"Entry \d+:5 "),
    ):
        coordinator.batches.plan(end)
    assert topic.backlog() == 8


def test_an_entry_that_was_readable_is_not_acknowledged_before_its_batch() -> None:
    topic = CorruptTopic()
    topic.publish(8)
    with running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 8)
        topic.corrupt(5)
        assert topic.cluster.deliver_again(topic.at, SUBSCRIPTION, topic.ids[5]) == 1
        topic.publish(4)
        received(coordinator, 12)
        assert (topic.backlog(), coordinator.status()["corruptSkipped"]) == (12, 0)
        commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)


def test_a_forgotten_acknowledgement_is_sent_again() -> None:
    topic = CorruptTopic()
    topic.publish(8)
    topic.corrupt(3)
    with running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 7)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 1)
        commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)
        topic.cluster.crash()
        wait_until(lambda: topic.backlog() == 0)
        assert coordinator.status()["corruptSkipped"] == 1


def test_pulsar_client_is_refused_because_it_hides_skipped_entries() -> None:
    with pytest.raises(ConfigError, match="transport"):
        SourceConfig("t", on_corrupt="skip", transport="client")
    with pytest.raises(ConfigError, match="on_corrupt"):
        SourceConfig("t", on_corrupt="wait", transport="wire")  # type: ignore[arg-type]
    for transport in ("auto", "wire"):
        assert SourceConfig("t", on_corrupt="skip", transport=transport).skipped


def stored(parking: ParkingTopic) -> list[tuple[TopicPartition, StoredEntry]]:
    """The entries of a place, and where they lie."""
    logs = [
        (where, parking.cluster.log(where)) for where in parking.cluster.partitions(parking.topic)
    ]
    return [
        (where, entry)
        for where, log in logs
        for ordinal in range(log.first, len(log))
        if (entry := log.get(ordinal)) is not None
    ]


def test_an_unreadable_entry_becomes_a_dead_letter_before_it_is_acknowledged(
    parking: ParkingTopic,
) -> None:
    parking.publish(*"abc" * 5)
    found = stored(parking)
    wrong = [found[0], found[4], found[-1]]
    for where, entry in wrong:
        parking.cluster.corrupt(where, entry.id)
    with parking.run(on_corrupt="park") as run:
        wait_until(lambda: parking.backlog() == 0)
        status = run.source.status()
        assert status["counters"]["deadLettered"] == 3
    dead_letters = parking.dead_letters()
    assert {dead_letter.kind for dead_letter in dead_letters} == {DeadLetterKind.REJECTED}
    assert all("its checksum is wrong" in dead_letter.error for dead_letter in dead_letters)
    wanted = sorted(b"".join(one.value or b"" for one in entry.messages) for _, entry in wrong)
    assert sorted(dead_letter.message.value or b"" for dead_letter in dead_letters) == wanted
    assert sum(map(len, parking.handled.values())) == 15 - 3


def test_an_unreadable_entry_at_the_start_of_a_stream_becomes_a_dead_letter(
    parking: ParkingTopic,
) -> None:
    """The messages of the source in it are unknown."""
    messages = [Message(b"%d" % number, key="a") for number in range(3)]
    ((where, entry),) = parking.cluster.publish(parking.topic, *messages, batching=Batching.BY_KEY)
    parking.cluster.corrupt(where, entry)
    start = {one.name: "earliest" for one in parking.cluster.partitions(parking.topic)}
    start[where.name] = f"{entry.ledger}:{entry.entry}:1"
    options = {"admin_url": parking.url, "starting_position": json.dumps(start)}
    with parking.run(on_corrupt="park", **options):
        wait_until(lambda: parking.backlog() == 0)
    assert len(parking.dead_letters()) == 1


def test_unreadable_entries_have_the_metadata_columns_of_the_source(parking: ParkingTopic) -> None:
    parking.publish(*"abc" * 50)
    wrong = stored(parking)[::7]
    for where, entry in wrong:
        parking.cluster.corrupt(where, entry.id)
    with parking.run(on_corrupt="park", metadata_columns=["__keyBytes"]) as run:
        wait_until(lambda: run.error is not None or parking.backlog() == 0)
        assert run.error is None
    assert len(parking.dead_letters()) == len(wrong)


def test_a_failed_dead_letter_leaves_the_unreadable_entry_unacknowledged(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BrokerError("The disk is full.")

    monkeypatch.setattr(DeadLetterWriter, "dead_letter", refuse)
    parking.publish(*"abc")
    (where, first), *_ = stored(parking)
    parking.cluster.corrupt(where, first.id)
    with parking.run(on_corrupt="park") as run:
        wait_until(lambda: run.error is not None)
    assert "The disk is full" in str(run.error)
    assert parking.backlog() >= 1
    assert not parking.dead_letters()


@pytest.mark.parametrize("use", ["open", "batches"])
def test_dead_letters_are_for_handlers_only(parking: ParkingTopic, use: str) -> None:
    source = KeyShardSource(
        parking.topic, service_url=parking.url, subscription="s", on_corrupt="park", parallelism=2
    )
    with pytest.raises(ConfigError, match=r"which only source\.run\(\) supports"):
        source.open() if use == "open" else next(iter(source.batches()))


def heal(parking: ParkingTopic, where: TopicPartition, entry: StoredEntry) -> None:
    """Repair an entry, and deliver it again."""
    with parking.cluster.lock:
        parking.cluster.log(where).corrupt.discard(entry.id)
        parking.cluster.deliver_again(where, "keyshard", entry.id)


def test_an_entry_that_becomes_readable_is_no_new_topic(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it was damaged, or it was on its way."""
    go_on, write = threading.Event(), DeadLetterWriter.dead_letter

    def wait(*args: Any) -> Any:
        assert go_on.wait(deadline(30))
        return write(*args)

    monkeypatch.setattr(DeadLetterWriter, "dead_letter", wait)
    parking.publish(*"abc" * 5)
    (where, first), *_ = stored(parking)
    parking.cluster.corrupt(where, first.id)
    with parking.run(on_corrupt="park") as run:
        try:
            wait_until(lambda: parking.backlog() == 1)
            ages = [one["oldestUnacknowledgedMillis"] for one in run.source.status()["ranges"]]
            heal(parking, where, first)

            def came_twice() -> int:
                return present(run.source.status()["window"])["duplicatesDropped"]

            wait_until(lambda: run.error or came_twice())
        finally:
            go_on.set()
        wait_until(lambda: run.error or parking.backlog() == 0)
    assert run.error is None
    assert max(age for age in ages if age is not None) < 60_000
    assert [dead_letter.message.message_id[:2] for dead_letter in parking.dead_letters()] == [
        first.id
    ]


def test_an_untaken_entry_that_becomes_readable_is_handled(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    parking.publish(*"abc" * 5)
    (where, first), *_ = stored(parking)
    parking.cluster.corrupt(where, first.id)
    may_receive = IdentityCheck.may_receive

    def refuse_corrupt(self: IdentityCheck, at: TopicPartition, entries: Iterable[EntryId]) -> bool:
        entries = list(entries)
        if at == where and first.id in entries and first.id in parking.cluster.log(where).corrupt:
            heal(parking, where, first)
            return False
        return may_receive(self, at, entries)

    monkeypatch.setattr(IdentityCheck, "may_receive", refuse_corrupt)
    with parking.run(on_corrupt="park"):
        wait_until(lambda: parking.backlog() == 0)
    assert not parking.dead_letters()
    assert sum(map(len, parking.handled.values())) == 15


@pytest.mark.parametrize("later", ["readable", "corrupt"])
def test_entries_behind_unreadable_ones_are_taken_after_a_restart(
    parking: ParkingTopic, later: str, tmp_path: Path
) -> None:
    """Unreadable entries cannot show that the topic is the same; higher ids behind them can."""
    options = {"on_corrupt": "park", "checkpoint": str(tmp_path / "checkpoint")}
    parking.publish(*"abcdefgh")
    for where, entry in stored(parking):
        parking.cluster.corrupt(where, entry.id)
    with parking.run(**options):
        wait_until(lambda: parking.backlog() == 0)
    parking.publish(*"abcdefgh")
    if later == "corrupt":
        for where, entry in stored(parking):
            parking.cluster.corrupt(where, entry.id)
    with parking.run(**options) as run:
        wait_until(lambda: run.error or parking.backlog() == 0)
    assert run.error is None
    assert len(parking.dead_letters()) == (16 if later == "corrupt" else 8)
    assert sum(map(len, parking.handled.values())) == (0 if later == "corrupt" else 8)


def test_unreadable_entries_alone_are_acknowledged_after_a_restart(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    """1. All entries are unreadable, and parked. 2. Their subscription is created again while the
    program is down. 3. Nothing readable is stored that would show that the topic is the same."""
    options = {"on_corrupt": "park", "checkpoint": str(tmp_path / "checkpoint")}
    parking.publish(*"abcdefgh")
    for where, entry in stored(parking):
        parking.cluster.corrupt(where, entry.id)
    with parking.run(**options):
        wait_until(lambda: parking.backlog() == 0)
    for where in {where for where, _ in stored(parking)}:
        parking.cluster.delete_subscription(where, "keyshard")
    with parking.run(**options) as run:
        wait_until(lambda: run.error or parking.backlog() == 0)
    assert run.error is None
    assert len(parking.dead_letters()) == 8
