"""Encrypted messages: the source ends before one, or skips or parks it by the user's choice."""

from __future__ import annotations

import logging
from typing import Literal

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, Message, UnackedLimits
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter import DeadLetterKind
from keyshard.errors import ConfigError, EncryptedMessageError
from tests.helpers import commit, present, received, rows_of, running, wait_until
from tests.support.memory_topic import NumberedTopic
from tests.support.parking_topic import ParkingTopic


@pytest.mark.parametrize("transport", ["wire", "client"])
def test_an_encrypted_entry_ends_the_source_by_default_and_is_not_acknowledged(
    transport: str,
) -> None:
    topic = NumberedTopic()
    topic.publish(3)
    topic.publish(1, encrypted=True)
    topic.publish(3)
    source = topic.source(service_url="pulsar://unused", transport=transport)
    with running(topic.cluster, source) as coordinator:

        def ended() -> bool:
            coordinator.batches.cut()
            return False

        with pytest.raises(EncryptedMessageError, match=r"(?s)\d+:3 of .*set on_encrypted to skip"):
            wait_until(ended)
        assert topic.backlog() == 7


def test_skipped_encrypted_entries_are_acknowledged_counted_named_and_no_ack_gap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = NumberedTopic()
    for _ in range(4):
        topic.publish(4)
        topic.publish(2, encrypted=True)
    source = topic.source(on_encrypted="skip")
    with caplog.at_level(logging.WARNING), running(topic.cluster, source) as coordinator:
        received(coordinator, 16)
        wait_until(lambda: coordinator.status()["encryptedSkipped"] == 8)
        wait_until(lambda: topic.backlog() == 16)  # before anything is committed
        end = commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)
        status = coordinator.status()
        assert (status["ackGaps"], status["corruptSkipped"]) == (0, 0)
    assert end.partitions[topic.at].delivered.run_count == 1
    (said,) = [one.getMessage() for one in caplog.records if "on_encrypted" in one.getMessage()]
    assert "is encrypted" in said


def test_many_encrypted_entries_hold_up_no_other_range() -> None:
    topic = NumberedTopic(unacked_limits=UnackedLimits(per_consumer=5, per_subscription=10))
    topic.publish(20, encrypted=True)
    topic.publish(4)
    with running(topic.cluster, topic.source(on_encrypted="skip")) as coordinator:
        received(coordinator, 4)


@pytest.mark.parametrize("with_admin", [False, True])
@pytest.mark.parametrize("choice", ["skip", "fail"])
def test_a_bounded_run_counts_encrypted_entries_or_ends_with_an_error(
    choice: str, with_admin: bool
) -> None:
    topic = NumberedTopic()
    topic.publish(10)
    topic.publish(3, encrypted=True)
    source = topic.source(
        on_encrypted=choice, available_now_timeout_ms=20_000, available_now_quiet_ms=3_600_000
    )
    admin = MemoryAdmin(topic.cluster) if with_admin else None
    coordinator = Coordinator(source, lambda: MemoryBroker(topic.cluster), admin)
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
            assert topic.backlog() == 0
    finally:
        coordinator.stop()


@pytest.mark.parametrize("choice", ["skip", "fail"])
def test_entries_behind_the_targets_are_left_to_the_next_bounded_run(choice: str) -> None:
    """Issue: one that was published after the start ended the run, or was acknowledged by it."""
    topic = NumberedTopic()
    topic.publish(10)
    source = topic.source(on_encrypted=choice, available_now_quiet_ms=3_600_000)
    coordinator = Coordinator(source, lambda: MemoryBroker(topic.cluster))
    coordinator.start(None, available_now=True)
    topic.publish(3, encrypted=True)
    topic.publish(3)
    rows = 0
    try:
        while (end := coordinator.batches.cut_available(7)) is not None:
            rows += sum(map(len, rows_of(coordinator, end).values()))
            coordinator.batches.release(end)
        assert (rows, coordinator.status()["encryptedSkipped"]) == (10, 0)
        assert topic.backlog() == 6
    finally:
        coordinator.stop()


def test_parked_encrypted_entries_become_dead_letters_before_they_are_acknowledged(
    parking: ParkingTopic,
) -> None:
    parking.publish(*"abc" * 3)
    secret = [Message(b"secret", key="a")] * 3
    parking.cluster.publish(parking.topic, *secret, batching=Batching.BY_KEY, encrypted=True)
    parking.publish(*"abc" * 3)
    with parking.run(on_encrypted="park") as run:
        wait_until(lambda: parking.backlog() == 0)
        assert run.source.status()["counters"]["deadLettered"] == 1
    (dead_letter,) = parking.dead_letters()
    assert dead_letter.kind is DeadLetterKind.REJECTED
    assert "is encrypted" in dead_letter.error
    assert dead_letter.message.value == b"secret" * 3
    assert sum(map(len, parking.handled.values())) == 18


def test_a_source_with_handlers_counts_skipped_encrypted_entries(parking: ParkingTopic) -> None:
    parking.publish(*"abc")
    parking.cluster.publish(parking.topic, Message(b"secret", key="a"), encrypted=True)
    with parking.run(on_encrypted="skip") as run:
        wait_until(lambda: parking.backlog() == 0)
        assert present(run.source.status()["window"])["encryptedSkipped"] == 1
    assert not parking.dead_letters()


@pytest.mark.parametrize("use", ["open", "batches"])
def test_dead_letters_are_for_handlers_only(parking: ParkingTopic, use: str) -> None:
    source = KeyShardSource(
        parking.topic, service_url=parking.url, subscription="s", on_encrypted="park", parallelism=2
    )
    with pytest.raises(ConfigError, match=r"on_encrypted is 'park', which only source\.run"):
        source.open() if use == "open" else next(iter(source.batches()))


@pytest.mark.parametrize("choice", ["skip", "park"])
def test_pulsar_client_is_refused_because_encrypted_batches_use_up_its_permits(
    choice: Literal["skip", "park"],
) -> None:
    with pytest.raises(ConfigError, match=r"on_encrypted is .*permit"):
        SourceConfig("t", on_encrypted=choice, transport="client")
    with pytest.raises(ConfigError, match="on_encrypted"):
        SourceConfig("t", on_encrypted="wait")  # type: ignore[arg-type]
    assert SourceConfig("t", on_encrypted=choice, transport="wire")
