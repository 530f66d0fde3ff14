"""Encrypted messages: the source ends before one, or skips or parks it by the user's choice."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from helpers import commit, config, keys_of, received, rows_of, running, wait_until
from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message, UnackedLimits
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter.letters import LetterKind
from keyshard.errors import ConfigError, EncryptedMessageError
from parking_place import Place

KEYS = keys_of(4)


class Bench:
    """A topic without partitions, some of whose entries are encrypted."""

    def __init__(self, **cluster: Any) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=30, **cluster)
        self.topic = self.cluster.create_topic("orders")
        (self.where,) = self.cluster.partitions(self.topic)
        self.sent = 0

    def publish(self, count: int, *, encrypted: bool = False) -> None:
        for _ in range(count):
            message = Message(b"%d" % self.sent, key=KEYS[self.sent % 4])
            self.cluster.publish(self.where, message, encrypted=encrypted)
            self.sent += 1

    def source(self, **changes: Any) -> SourceConfig:
        return config(self.topic, **changes)

    @property
    def backlog(self) -> int:
        return self.cluster.backlog(self.where, "unit")


@pytest.mark.parametrize("transport", ["wire", "client"])
def test_by_default_a_source_ends_before_one_and_acknowledges_nothing(transport: str) -> None:
    bench = Bench()
    bench.publish(3)
    bench.publish(1, encrypted=True)
    bench.publish(3)
    with running(bench.cluster, bench.source(transport=transport)) as coordinator:

        def ended() -> bool:
            coordinator.batches.cut()
            return False

        with pytest.raises(EncryptedMessageError, match=r"\d+:3 of .*on_encrypted=skip"):
            wait_until(ended)
        assert bench.backlog == 7


def test_skipped_ones_are_acknowledged_counted_named_and_no_hole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    for _ in range(4):
        bench.publish(4)
        bench.publish(2, encrypted=True)
    source = bench.source(on_encrypted="skip")
    with caplog.at_level(logging.WARNING), running(bench.cluster, source) as coordinator:
        received(coordinator, 16)
        wait_until(lambda: coordinator.status()["encryptedSkipped"] == 8)
        wait_until(lambda: bench.backlog == 16)  # before anything is committed
        end = commit(coordinator)
        wait_until(lambda: bench.backlog == 0)
        status = coordinator.status()
        assert (status["ackHoles"], status["corruptSkipped"]) == (0, 0)
    assert end.partitions[bench.where].delivered.run_count == 1
    (said,) = [one.getMessage() for one in caplog.records if "on_encrypted" in one.getMessage()]
    assert "is encrypted" in said


def test_more_of_them_than_a_consumer_may_hold_unacknowledged_hold_up_nobody() -> None:
    bench = Bench(unacked_limits=UnackedLimits(per_consumer=5, per_subscription=10))
    bench.publish(20, encrypted=True)
    bench.publish(4)
    with running(bench.cluster, bench.source(on_encrypted="skip")) as coordinator:
        received(coordinator, 4)


@pytest.mark.parametrize("with_admin", [False, True])
@pytest.mark.parametrize("choice", ["skip", "fail"])
def test_a_bounded_run_counts_them_or_ends_with_an_error(choice: str, with_admin: bool) -> None:
    bench = Bench()
    bench.publish(10)
    bench.publish(3, encrypted=True)
    source = bench.source(
        on_encrypted=choice, available_now_timeout_ms=20_000, available_now_quiet_ms=3_600_000
    )
    admin = MemoryAdmin(bench.cluster) if with_admin else None
    coordinator = Coordinator(source, lambda: MemoryBroker(bench.cluster), admin)
    coordinator.start(None, available_now=True)
    rows = 0

    def run() -> None:
        nonlocal rows
        while (end := coordinator.batches.cut_available(7)) is not None:
            rows += sum(map(len, rows_of(coordinator, end).values()))
            coordinator.batches.release(end)

    try:
        if choice == "fail":
            with pytest.raises(EncryptedMessageError):
                run()
        else:
            run()
            assert (rows, coordinator.status()["encryptedSkipped"]) == (10, 3)
            assert bench.backlog == 0
    finally:
        coordinator.stop()


@pytest.mark.parametrize("choice", ["skip", "fail"])
def test_those_behind_the_targets_of_a_bounded_run_are_left_to_the_next(choice: str) -> None:
    """Issue: one that was published after the start ended the run, or was acknowledged by it."""
    bench = Bench()
    bench.publish(10)
    source = bench.source(on_encrypted=choice, available_now_quiet_ms=3_600_000)
    coordinator = Coordinator(source, lambda: MemoryBroker(bench.cluster))
    coordinator.start(None, available_now=True)
    bench.publish(3, encrypted=True)
    bench.publish(3)
    rows = 0
    try:
        while (end := coordinator.batches.cut_available(7)) is not None:
            rows += sum(map(len, rows_of(coordinator, end).values()))
            coordinator.batches.release(end)
        assert (rows, coordinator.status()["encryptedSkipped"]) == (10, 0)
        assert bench.backlog == 6
    finally:
        coordinator.stop()


def test_parked_ones_become_dead_letters_and_are_acknowledged_after_that() -> None:
    place = Place("encrypted-park")
    place.publish(*"abc" * 3)
    secret = [Message(b"secret", key="a")] * 3
    place.cluster.publish(place.topic, *secret, batching=Batching.BY_KEY, encrypted=True)
    place.publish(*"abc" * 3)
    with place.run(on_encrypted="park") as run:
        wait_until(lambda: place.backlog() == 0)
        assert run.source.status()["counters"]["deadLettered"] == 1
    (letter,) = place.letters()
    assert letter.kind is LetterKind.REJECTED
    assert "is encrypted" in letter.error
    assert letter.message.value == b"secret" * 3
    assert sum(map(len, place.handled.values())) == 18


def test_handlers_count_skipped_ones() -> None:
    place = Place("encrypted-skip")
    place.publish(*"abc")
    place.cluster.publish(place.topic, Message(b"secret", key="a"), encrypted=True)
    with place.run(on_encrypted="skip") as run:
        wait_until(lambda: place.backlog() == 0)
        assert run.source.status()["window"]["encryptedSkipped"] == 1
    assert not place.letters()


@pytest.mark.parametrize("use", ["open", "batches"])
def test_dead_letters_are_for_handlers_only(use: str) -> None:
    place = Place(f"encrypted-park-{use}")
    source = KeyShardSource(
        place.topic, service_url=place.url, subscription="s", on_encrypted="park", parallelism=2
    )
    with pytest.raises(ConfigError, match=r"on_encrypted is 'park', and only source\.run"):
        source.open() if use == "open" else next(iter(source.batches()))


@pytest.mark.parametrize("choice", ["skip", "park"])
def test_pulsar_client_comes_to_a_stand_behind_batches_and_is_refused(choice: str) -> None:
    with pytest.raises(ConfigError, match=r"on_encrypted is .*permit"):
        SourceConfig("t", on_encrypted=choice, transport="client")
    with pytest.raises(ConfigError, match="on_encrypted"):
        SourceConfig("t", on_encrypted="wait")
    assert SourceConfig("t", on_encrypted=choice, transport="wire")
