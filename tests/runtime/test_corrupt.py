"""Entries that cannot be read: the source ends before one, or skips it by the user's choice."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers import commit, config, keys_of, received, rows_of, running, wait_until
from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.memory.log import StoredEntry
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter.letters import LetterKind
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letter.writer import DeadLetterWriter
from keyshard.errors import BrokerError, ConfigError, CorruptEntryError
from keyshard.worker.continuity import Continuity
from parking_place import Place

KEYS = keys_of(4)


class Bench:
    """A topic without partitions, whose entries tell their number."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=30)
        self.topic = self.cluster.create_topic("orders")
        (self.where,) = self.cluster.partitions(self.topic)
        self.ids: list[EntryId] = []

    def publish(self, count: int) -> None:
        for number in range(len(self.ids), len(self.ids) + count):
            message = Message(b"%d" % number, key=KEYS[number % 4])
            ((_, entry_id),) = self.cluster.publish(self.where, message)
            self.ids.append(entry_id)

    def corrupt(self, *numbers: int) -> None:
        self.cluster.corrupt(self.where, *(self.ids[number] for number in numbers))

    def source(self, **changes: Any) -> SourceConfig:
        return config(self.topic, **({"on_corrupt": "skip", "transport": "wire"} | changes))

    @property
    def backlog(self) -> int:
        return self.cluster.backlog(self.where, "unit")


def numbers(coordinator: Coordinator, end: Checkpoint) -> list[int]:
    return sorted(int(row["value"]) for part in rows_of(coordinator, end).values() for row in part)


def test_skipped_entries_are_acknowledged_counted_named_and_no_hole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.publish(20)
    bench.corrupt(0, 7, 8, 19)
    with caplog.at_level(logging.WARNING), running(bench.cluster, bench.source()) as coordinator:
        received(coordinator, 16)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 4)
        wait_until(lambda: bench.backlog == 16)  # before anything is committed
        end = commit(coordinator)
        wait_until(lambda: bench.backlog == 0)
        assert coordinator.status()["ackHoles"] == 0
    assert end.partitions[bench.where].delivered.run_count == 1
    (said,) = [one.getMessage() for one in caplog.records if "on_corrupt" in one.getMessage()]
    assert "its checksum is wrong" in said


def test_without_a_word_a_source_ends_before_one_and_acknowledges_nothing() -> None:
    bench = Bench()
    bench.publish(4)
    bench.corrupt(3)
    with running(bench.cluster, bench.source(on_corrupt="fail")) as coordinator:

        def ended() -> bool:
            coordinator.batches.cut()
            assert not coordinator.status()["corruptSkipped"]
            return False

        with pytest.raises(CorruptEntryError, match=r"Entry \d+:3 .*on_corrupt=skip"):
            wait_until(ended)
        assert bench.backlog == 4


@pytest.mark.parametrize("with_admin", [False, True])
def test_a_bounded_run_ends_behind_them(with_admin: bool) -> None:
    bench = Bench()
    bench.publish(40)
    bench.corrupt(0, 5, 29, 30, 38, 39)
    admin = MemoryAdmin(bench.cluster) if with_admin else None
    source = bench.source(available_now_timeout_ms=20_000, available_now_quiet_ms=3_600_000)
    coordinator = Coordinator(source, lambda: MemoryBroker(bench.cluster), admin)
    coordinator.start(None, available_now=True)
    got: list[int] = []
    while (end := coordinator.batches.cut_available(7)) is not None:
        got += numbers(coordinator, end)
        coordinator.batches.release(end)
    coordinator.stop()
    assert sorted(got) == sorted(set(range(40)) - {0, 5, 29, 30, 38, 39})


@pytest.mark.parametrize("on_corrupt", ["skip", "fail"])
@pytest.mark.parametrize("with_admin", [False, True])
def test_a_batch_among_them_is_read_again_as_it_was(on_corrupt: str, with_admin: bool) -> None:
    """Whatever is chosen by then."""
    bench = Bench()
    bench.publish(20)
    bench.corrupt(4, 12)
    admin = MemoryAdmin(bench.cluster) if with_admin else None
    with running(bench.cluster, bench.source(), admin=admin) as coordinator:
        received(coordinator, 18)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 2)
        end = coordinator.batches.cut()
        assert end is not None
        before = numbers(coordinator, end)
        wait_until(lambda: bench.backlog == 18)
    source = bench.source(on_corrupt=on_corrupt)
    with running(bench.cluster, source, end, planned=True, admin=admin) as coordinator:
        assert numbers(coordinator, end) == before
        coordinator.batches.release(end)
        wait_until(lambda: bench.backlog == 0)


def test_an_entry_of_a_batch_that_became_corrupt_is_named_and_not_left_out() -> None:
    bench = Bench()
    bench.publish(8)
    with running(bench.cluster, bench.source()) as coordinator:
        received(coordinator, 8)
        end = coordinator.batches.cut()
        assert end is not None
    bench.corrupt(5)
    with (
        running(bench.cluster, bench.source(), end, planned=True) as coordinator,
        pytest.raises(CorruptEntryError, match=r"Entry \d+:5 "),
    ):
        coordinator.batches.plan(end)
    assert bench.backlog == 8


def test_what_could_be_read_once_is_not_acknowledged_before_its_batch() -> None:
    bench = Bench()
    bench.publish(8)
    with running(bench.cluster, bench.source()) as coordinator:
        received(coordinator, 8)
        bench.corrupt(5)
        assert bench.cluster.deliver_again(bench.where, "unit", bench.ids[5]) == 1
        bench.publish(4)
        received(coordinator, 12)
        assert (bench.backlog, coordinator.status()["corruptSkipped"]) == (12, 0)
        commit(coordinator)
        wait_until(lambda: bench.backlog == 0)


def test_a_broker_that_forgets_that_it_was_acknowledged_is_told_again() -> None:
    bench = Bench()
    bench.publish(8)
    bench.corrupt(3)
    with running(bench.cluster, bench.source()) as coordinator:
        received(coordinator, 7)
        wait_until(lambda: coordinator.status()["corruptSkipped"] == 1)
        commit(coordinator)
        wait_until(lambda: bench.backlog == 0)
        bench.cluster.crash()
        wait_until(lambda: bench.backlog == 0)
        assert coordinator.status()["corruptSkipped"] == 1


def test_pulsar_client_is_not_asked_to_count_what_it_hides() -> None:
    with pytest.raises(ConfigError, match="transport"):
        SourceConfig("t", on_corrupt="skip", transport="client")
    with pytest.raises(ConfigError, match="on_corrupt"):
        SourceConfig("t", on_corrupt="wait", transport="wire")
    for transport in ("auto", "wire"):
        assert SourceConfig("t", on_corrupt="skip", transport=transport).skipped


def stored(place: Place) -> list[tuple[TopicPartition, StoredEntry]]:
    """The entries of a place, and where they lie."""
    logs = [(where, place.cluster.log(where)) for where in place.cluster.partitions(place.topic)]
    return [
        (where, entry)
        for where, log in logs
        for ordinal in range(log.first, len(log))
        if (entry := log.get(ordinal)) is not None
    ]


def test_what_cannot_be_read_becomes_a_dead_letter_and_is_acknowledged_after_that() -> None:
    place = Place("corrupt-park")
    place.publish(*"abc" * 5)
    found = stored(place)
    wrong = [found[0], found[4], found[-1]]
    for where, entry in wrong:
        place.cluster.corrupt(where, entry.id)
    with place.run(on_corrupt="park") as run:
        wait_until(lambda: place.backlog() == 0)
        status = run.source.status()
        assert status["counters"]["deadLettered"] == 3
    letters = place.letters()
    assert {letter.kind for letter in letters} == {LetterKind.REJECTED}
    assert all("its checksum is wrong" in letter.error for letter in letters)
    wanted = sorted(b"".join(one.value or b"" for one in entry.messages) for _, entry in wrong)
    assert sorted(letter.message.value or b"" for letter in letters) == wanted
    assert sum(map(len, place.handled.values())) == 15 - 3


def test_where_a_stream_begins_inside_what_cannot_be_read_it_becomes_a_dead_letter() -> None:
    """Nobody knows which messages of it are its own."""
    place = Place("corrupt-park-begin")
    messages = [Message(b"%d" % number, key="a") for number in range(3)]
    ((where, entry),) = place.cluster.publish(place.topic, *messages, batching=Batching.BY_KEY)
    place.cluster.corrupt(where, entry)
    start = {one.name: "earliest" for one in place.cluster.partitions(place.topic)}
    start[where.name] = f"{entry.ledger}:{entry.entry}:1"
    options = {"admin_url": place.url, "starting_position": json.dumps(start)}
    with place.run(on_corrupt="park", **options):
        wait_until(lambda: place.backlog() == 0)
    assert len(place.letters()) == 1


def test_a_letter_that_cannot_be_written_leaves_what_cannot_be_read_unacknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise BrokerError("The disk is full.")

    monkeypatch.setattr(DeadLetterWriter, "letter", refuse)
    place = Place("corrupt-park-refused")
    place.publish(*"abc")
    (where, first), *_ = stored(place)
    place.cluster.corrupt(where, first.id)
    with place.run(on_corrupt="park") as run:
        wait_until(lambda: run.error is not None)
    assert "The disk is full" in str(run.error)
    assert place.backlog() >= 1
    assert not place.letters()


@pytest.mark.parametrize("use", ["open", "batches"])
def test_dead_letters_are_for_handlers_only(use: str) -> None:
    place = Place(f"corrupt-park-{use}")
    source = KeyShardSource(
        place.topic, service_url=place.url, subscription="s", on_corrupt="park", parallelism=2
    )
    with pytest.raises(ConfigError, match=r"only source\.run keeps dead letters"):
        source.open() if use == "open" else next(iter(source.batches()))


def heal(place: Place, where: TopicPartition, entry: StoredEntry) -> None:
    """From now on an entry can be read, and it is delivered once more."""
    with place.cluster.lock:
        place.cluster.log(where).corrupt.discard(entry.id)
        place.cluster.deliver_again(where, "keyshard", entry.id)


def test_what_can_be_read_when_it_comes_again_is_no_topic_created_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of it was damaged, or it was on its way."""
    go_on, write = threading.Event(), DeadLetterWriter.letter

    def wait(*args: Any) -> Any:
        assert go_on.wait(30)
        return write(*args)

    monkeypatch.setattr(DeadLetterWriter, "letter", wait)
    place = Place("corrupt-park-healed")
    place.publish(*"abc" * 5)
    (where, first), *_ = stored(place)
    place.cluster.corrupt(where, first.id)
    with place.run(on_corrupt="park") as run:
        try:
            wait_until(lambda: place.backlog() == 1)
            ages = [one["oldestUnacknowledgedMillis"] for one in run.source.status()["ranges"]]
            heal(place, where, first)
            wait_until(lambda: run.error or run.source.status()["window"]["duplicatesDropped"])
        finally:
            go_on.set()
        wait_until(lambda: run.error or place.backlog() == 0)
    assert run.error is None
    assert max(age for age in ages if age is not None) < 60_000
    assert [letter.message.message_id[:2] for letter in place.letters()] == [first.id]


def test_what_was_not_taken_and_can_be_read_when_it_comes_again_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("corrupt-park-not-taken")
    place.publish(*"abc" * 5)
    (where, first), *_ = stored(place)
    place.cluster.corrupt(where, first.id)
    may_receive = Continuity.may_receive

    def refuse_corrupt(self: Continuity, at: TopicPartition, entries: Iterable[EntryId]) -> bool:
        entries = list(entries)
        if at == where and first.id in entries and first.id in place.cluster.log(where).corrupt:
            heal(place, where, first)
            return False
        return may_receive(self, at, entries)

    monkeypatch.setattr(Continuity, "may_receive", refuse_corrupt)
    with place.run(on_corrupt="park"):
        wait_until(lambda: place.backlog() == 0)
    assert not place.letters()
    assert sum(map(len, place.handled.values())) == 15


@pytest.mark.parametrize("later", ["readable", "corrupt"])
def test_what_comes_behind_entries_none_of_which_can_be_read_is_taken_after_a_restart(
    later: str, tmp_path: Path
) -> None:
    """They cannot show that the topic is what it was, and the higher ids behind them do."""
    place = Place(f"corrupt-park-behind-{later}")
    options = {"on_corrupt": "park", "checkpoint": str(tmp_path / "checkpoint")}
    place.publish(*"abcdefgh")
    for where, entry in stored(place):
        place.cluster.corrupt(where, entry.id)
    with place.run(**options):
        wait_until(lambda: place.backlog() == 0)
    place.publish(*"abcdefgh")
    if later == "corrupt":
        for where, entry in stored(place):
            place.cluster.corrupt(where, entry.id)
    with place.run(**options) as run:
        wait_until(lambda: run.error or place.backlog() == 0)
    assert run.error is None
    assert len(place.letters()) == (16 if later == "corrupt" else 8)
    assert sum(map(len, place.handled.values())) == (0 if later == "corrupt" else 8)
