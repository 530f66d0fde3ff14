"""The subscription of a source was deleted while the source was down, and perhaps made anew.

On the in-memory broker, for each way to consume with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.admin.port import ID_PROPERTY
from keyshard.broker.memory import Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition
from keyshard.core.position.checkpoint import Checkpoint, SubscriptionId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    AdminError,
    AuthenticationError,
    BrokerError,
    BrokerUnavailableError,
    DataLossAckedElsewhereError,
    DataLossTrimmedError,
)
from tests.helpers import commit, config, key_in, received, rows_of, running, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import NumberedTopic, Run

pytestmark = pytest.mark.simulated(seeds=1)

KEYS = [key_in(hash_range) for hash_range in split_ring(4)]
NAME = "keyshard"


class Deleting(NumberedTopic):
    """A topic of one partition, numbered messages, and subscriptions that come and go."""

    def __init__(self) -> None:
        super().__init__(partitions=1)
        self.admin = MemoryAdmin(self.cluster)

    def source(self, **changes: Any) -> KeyShardSource:
        return super().source(**{"admin_url": self.url} | changes)

    def trim(self) -> None:
        """Close the ledger, and delete all that is stored."""
        self.cluster.roll_ledger(self.at)
        self.cluster.trim(self.at, EntryId(self.cluster.log(self.at).last_written.ledger + 1, 0))

    def make(self, start: StartPosition) -> None:
        with self.cluster.lock:
            self.cluster.open_subscription(self.at, NAME, start)

    def id(self) -> str | None:
        return self.cluster.subscription(self.at, NAME).properties.get(ID_PROPERTY)


class Consumer:
    """One way to consume with a checkpoint that lasts from one run to the next."""

    def __init__(self, topic: Deleting, folder: Path) -> None:
        self.topic = topic
        self.path = folder / "checkpoint.json"
        self.lost: int | None = 0

    def consume(self, count: int, **changes: Any) -> list[int]:
        """Run until this many messages came and are acknowledged; return their numbers."""
        raise NotImplementedError


def lost_by(source: KeyShardSource) -> int | None:
    window = source.status()["window"]
    assert window is not None
    return window["entriesLost"]


class Handling(Consumer):
    def consume(self, count: int, **changes: Any) -> list[int]:
        got: list[int] = []
        source = self.topic.source(**changes)
        with Run(source, lambda one: got.append(int(one.value)), {"checkpoint": self.path}) as run:
            wait_until(lambda: run.error or (len(got) >= count and self.topic.backlog() == 0))
            if run.error is None:
                self.lost = lost_by(source)
        if run.error is not None:
            raise run.error
        return got


class Batches(Consumer):
    def consume(self, count: int, **changes: Any) -> list[int]:
        got: list[int] = []
        source = self.topic.source(**changes)
        for batch in source.batches(max_wait_s=0.05, checkpoint=self.path):
            got += map(int, batch.records.column("value").to_pylist())
            batch.ack()
            self.lost = lost_by(source)
            if len(got) >= count:
                break
        return got


class Stream(Consumer):
    def consume(self, count: int, **changes: Any) -> list[int]:
        got: list[int] = []
        before = self.path.read_text() if self.path.exists() else None
        with self.topic.source(**changes).open(before) as stream:
            while len(got) < count:
                batch = stream.next_batch(timeout_s=deadline(10))
                assert batch is not None
                for rows in batch:
                    got += map(int, rows.column("value").to_pylist())
                self.path.write_text(batch.checkpoint)
                stream.commit(batch)
            self.lost = stream.status()["entriesLost"]
            wait_until(lambda: self.topic.backlog() == 0)
        return got


@pytest.fixture
def topic() -> Deleting:
    return Deleting()


@pytest.fixture(params=[Handling, Batches, Stream])
def consumer(request: pytest.FixtureRequest, topic: Deleting, tmp_path: Path) -> Consumer:
    """A consumer that has the first twenty messages in its checkpoint."""
    made: Consumer = request.param(topic, tmp_path)
    topic.publish(20)
    assert sorted(made.consume(20)) == list(range(20))
    wait_until(lambda: topic.backlog() == 0)
    return made


def deleted(topic: Deleting, *, again: bool = False) -> None:
    topic.cluster.delete_subscription(topic.at, NAME)
    if again:
        topic.make(StartPosition.EARLIEST)
    topic.publish(30)
    topic.trim()
    topic.publish(10)


def made_anew(topic: Deleting) -> None:
    deleted(topic)
    topic.make(StartPosition.EARLIEST)


def made_anew_before(topic: Deleting) -> None:
    """The new subscription saw all messages, and let them expire."""
    deleted(topic, again=True)


def made_by_another_source(topic: Deleting) -> None:
    made_anew(topic)
    topic.admin.set_property(topic.at, NAME, ID_PROPERTY, "another")


CHANGES = [deleted, made_anew, made_anew_before, made_by_another_source]


@pytest.mark.parametrize("change", CHANGES)
def test_messages_trimmed_without_a_subscription_are_a_named_loss(
    topic: Deleting, consumer: Consumer, change: Callable[[Deleting], None]
) -> None:
    """Ten messages came, thirty were lost, and nothing said so."""
    change(topic)
    before = topic.backlog()
    for _ in range(2):
        with pytest.raises(DataLossTrimmedError, match="between 1:19, where the checkpoint ends"):
            consumer.consume(10)
        assert topic.backlog() == before, "nothing is subscribed or acknowledged"
    assert sorted(consumer.consume(10, fail_on_data_loss=False)) == list(range(50, 60))
    assert consumer.lost == 1
    topic.publish(5)
    assert sorted(consumer.consume(5)) == list(range(60, 65))
    assert consumer.lost == 0, "it is the subscription of the checkpoint now"


@pytest.mark.parametrize("again", [None, StartPosition.EARLIEST])
def test_a_deleted_subscription_costs_nothing_while_all_is_stored(
    topic: Deleting, consumer: Consumer, again: StartPosition | None
) -> None:
    topic.cluster.delete_subscription(topic.at, NAME)
    topic.cluster.roll_ledger(topic.at)
    topic.publish(30)
    if again is not None:
        topic.make(again)
    assert sorted(consumer.consume(30)) == list(range(20, 50))
    assert consumer.lost == 0


def test_a_subscription_made_anew_at_the_end_is_a_named_loss(
    topic: Deleting, consumer: Consumer
) -> None:
    topic.cluster.delete_subscription(topic.at, NAME)
    topic.publish(30)
    topic.make(StartPosition.LATEST)
    topic.publish(10)
    with pytest.raises(DataLossAckedElsewhereError, match="30 entries"):
        consumer.consume(10)
    assert sorted(consumer.consume(10, fail_on_data_loss=False)) == list(range(50, 60))
    assert consumer.lost == 30


def test_trimmed_ledgers_that_were_read_are_no_loss(topic: Deleting, consumer: Consumer) -> None:
    """The broker deletes what the subscription acknowledged, and the next messages follow."""
    topic.trim()
    topic.cluster.crash()
    topic.publish(10)
    assert sorted(consumer.consume(10)) == list(range(20, 30))
    assert consumer.lost == 0


def checkpoint_of(consumer: Consumer) -> Checkpoint:
    return Checkpoint.from_json(consumer.path.read_text())


def id_in(consumer: Consumer) -> str | None:
    """The id of the subscription, if no topic partition of the checkpoint lacks it."""
    found = checkpoint_of(consumer).subscription_id
    return None if found is None or found.without else found.text


def test_a_checkpoint_of_an_older_release_gets_the_id(topic: Deleting, consumer: Consumer) -> None:
    """Such a checkpoint has no id, and its subscription no property."""
    assert id_in(consumer) == topic.id() is not None
    consumer.path.write_text(replace(checkpoint_of(consumer), subscription_id=None).to_json())
    topic.admin.set_property(topic.at, NAME, ID_PROPERTY, None)
    topic.trim()
    topic.publish(10)
    assert sorted(consumer.consume(10)) == list(range(20, 30))
    assert id_in(consumer) == topic.id() is not None
    deleted(topic)
    with pytest.raises(DataLossTrimmedError):
        consumer.consume(10)


def test_an_older_checkpoint_still_names_a_subscription_that_is_missing(
    topic: Deleting, consumer: Consumer
) -> None:
    consumer.path.write_text(replace(checkpoint_of(consumer), subscription_id=None).to_json())
    deleted(topic)
    with pytest.raises(DataLossTrimmedError):
        consumer.consume(10)


ERRORS = [AdminError, AuthenticationError, BrokerUnavailableError]


@pytest.mark.parametrize("error", ERRORS)
def test_a_source_whose_id_cannot_be_set_consumes_and_warns(
    error: type[BrokerError], topic: Deleting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*_: object) -> bool:
        raise error("this role may not change a subscription")

    monkeypatch.setattr(MemoryAdmin, "set_property", refuse)
    consumer = Handling(topic, tmp_path)
    topic.publish(20)
    assert sorted(consumer.consume(20, operation_timeout_ms=1_000)) == list(range(20))
    (warning,) = (one.getMessage() for one in caplog.records if ID_PROPERTY in one.getMessage())
    assert "the next start may not notice it" in warning
    assert "this role may not change" in warning
    assert checkpoint_of(consumer).subscription_id is None
    monkeypatch.undo()
    topic.trim()
    topic.publish(10)
    assert sorted(consumer.consume(10)) == list(range(20, 30))
    assert id_in(consumer) == topic.id() is not None


def test_an_accepted_loss_counts_once_even_if_the_id_cannot_be_set(
    topic: Deleting, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise AdminError("not now")

    deleted(topic)
    monkeypatch.setattr(MemoryAdmin, "set_property", refuse)
    assert sorted(consumer.consume(10, fail_on_data_loss=False)) == list(range(50, 60))
    assert consumer.lost == 1
    topic.trim()
    topic.publish(5)
    assert sorted(consumer.consume(5)) == list(range(60, 65))
    assert consumer.lost == 0


def test_a_run_without_admin_url_keeps_the_id(topic: Deleting, consumer: Consumer) -> None:
    known = id_in(consumer)
    topic.publish(5)
    assert sorted(consumer.consume(5, admin_url=None)) == list(range(20, 25))
    assert id_in(consumer) == known is not None
    deleted(topic, again=True)
    with pytest.raises(DataLossTrimmedError):
        consumer.consume(10)


def test_a_deleted_ledger_is_no_loss_if_nothing_followed(
    topic: Deleting, consumer: Consumer
) -> None:
    """The topic was closed and trimmed, and the broker still knows its last entry."""
    topic.cluster.delete_subscription(topic.at, NAME)
    topic.trim()
    assert topic.admin.last_written(topic.at) == EntryId(1, 19)
    with topic.source().open(consumer.path.read_text()) as stream:
        assert stream.status()["entriesLost"] == 0


def test_the_end_of_an_older_ledger_is_no_loss(topic: Deleting, consumer: Consumer) -> None:
    """The checkpoint may not know yet that an older ledger was read to its end."""
    topic.cluster.roll_ledger(topic.at)
    topic.publish(1)
    assert consumer.consume(1) == [20]
    newest = topic.cluster.log(topic.at).last_written
    topic.cluster.delete_subscription(topic.at, NAME)
    topic.cluster.trim(topic.at, EntryId(newest.ledger, 0))
    topic.publish(5)
    assert sorted(consumer.consume(5)) == list(range(21, 26))
    assert consumer.lost == 0


def refuse_in(monkeypatch: pytest.MonkeyPatch, partition: int) -> None:
    """Let the admin interface refuse the property of one partition."""
    set_property = MemoryAdmin.set_property

    def sometimes(admin: MemoryAdmin, where: TopicPartition, *given: Any) -> bool:
        if where.partition == partition:
            raise AdminError("429 Too Many Requests")
        return set_property(admin, where, *given)

    monkeypatch.setattr(MemoryAdmin, "set_property", sometimes)


def at(topic: Deleting, where: TopicPartition) -> Mapping[str, str]:
    return topic.cluster.subscription(where, "unit").properties


def test_a_partition_whose_id_was_not_set_is_no_loss_and_the_others_are_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The admin interface refuses the property of one partition that is found later."""
    topic = Deleting()
    source = config(topic.topic, discovery_interval_ms=20)
    refuse_in(monkeypatch, 1)
    topic.publish(4)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        received(coordinator, 4)
        topic.cluster.grow_topic(topic.topic, 3)
        refused, later = topic.cluster.partitions(topic.topic)[1:]
        wait_until(lambda: coordinator.discovery.discovered == 2)
        for where in (refused, later):
            topic.cluster.publish(where, Message(b"1", KEYS[0]))
        received(coordinator, 6)
        wait_until(lambda: ID_PROPERTY in at(topic, later))
        expected = SubscriptionId(at(topic, later)[ID_PROPERTY], frozenset([refused]))
        wait_until(lambda: coordinator.newest.subscription_id == expected)
        end = commit(coordinator)
        assert end.subscription_id == expected
        assert end.partitions.keys() == {topic.at, refused, later}
        wait_until(lambda: topic.cluster.backlog(refused, "unit") == 0)
    for where in (topic.at, refused, later):
        topic.cluster.roll_ledger(where)
        newest = topic.cluster.log(where).last_written
        topic.cluster.trim(where, EntryId(newest.ledger + 1, 0))
        topic.cluster.publish(where, Message(b"2", KEYS[0]))
    with running(topic.cluster, source, end, admin=topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 0
        received(coordinator, 3)
        monkeypatch.undo()
        wait_until(lambda: at(topic, refused).get(ID_PROPERTY) == expected.text)


def test_one_refused_partition_leaves_the_others_of_a_start_their_ids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Deleting()
    topic.cluster.grow_topic(topic.topic, 30)
    refuse_in(monkeypatch, 0)
    source = config(topic.topic, discovery_interval_ms=3_600_000)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        found = coordinator.newest.subscription_id
        assert found is not None
        assert found.without == {topic.at}
    assert sum(ID_PROPERTY in one.getMessage() for one in caplog.records) == 1


def test_a_topic_created_again_is_named_only_with_its_new_property(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Deleting()
    source = config(topic.topic, discovery_interval_ms=20)
    topic.publish(4)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        received(coordinator, 4)
        monkeypatch.setattr(MemoryAdmin, "set_property", lambda *_: False)
        topic.cluster.delete_topic(topic.topic)
        wait_until(lambda: coordinator.discovery.gone == 1)
        topic.cluster.create_topic(topic.topic, 1)
        wait_until(lambda: coordinator.discovery.discovered == 1)
        wait_until(lambda: topic.cluster.subscriptions(topic.at))
        found = coordinator.newest.subscription_id
        assert found is None or topic.at in found.without


def test_a_source_leaves_the_ids_of_other_sources() -> None:
    """Two jobs share a name on different topics, and a third one reads both."""
    topic = Deleting()
    second = topic.cluster.create_topic("payments", 1)
    (other,) = topic.cluster.partitions(second)
    ends = []
    for name, where in ((topic.topic, topic.at), (second, other)):
        topic.cluster.publish(where, Message(b"1", KEYS[0]))
        with running(topic.cluster, config(name), admin=topic.admin) as coordinator:
            received(coordinator, 1)
            ends.append(commit(coordinator))
            wait_until(lambda where=where: topic.cluster.backlog(where, "unit") == 0)  # type: ignore[misc]
    before = [at(topic, where)[ID_PROPERTY] for where in (topic.at, other)]
    both = replace(config(topic.topic), topics=(topic.topic, second))
    for where in (topic.at, other):
        topic.cluster.roll_ledger(where)
        newest = topic.cluster.log(where).last_written
        topic.cluster.trim(where, EntryId(newest.ledger + 1, 0))
        topic.cluster.publish(where, Message(b"2", KEYS[0]))
    with running(topic.cluster, both, admin=topic.admin) as coordinator:
        found = coordinator.newest.subscription_id
        assert found is not None
        assert len(found.without) == 1
    assert [at(topic, where)[ID_PROPERTY] for where in (topic.at, other)] == before
    for name, end in zip((topic.topic, second), ends, strict=True):
        with running(topic.cluster, config(name), end, admin=topic.admin) as coordinator:
            assert coordinator.status()["entriesLost"] == 0
            received(coordinator, 1)


def test_a_topic_that_was_set_aside_before_it_had_an_id_is_no_loss() -> None:
    topic = Deleting()
    second = topic.cluster.create_topic("payments", 1)
    (other,) = topic.cluster.partitions(second)
    both = replace(config(topic.topic), topics=(topic.topic, second))
    for where in (topic.at, other):
        topic.cluster.publish(where, Message(b"1", KEYS[0]))
    with running(topic.cluster, both, admin=topic.admin) as coordinator:
        received(coordinator, 2)
        end = replace(commit(coordinator), subscription_id=None)
        for where in (topic.at, other):
            wait_until(lambda where=where: topic.cluster.backlog(where, "unit") == 0)  # type: ignore[misc]
    topic.admin.set_property(other, "unit", ID_PROPERTY, None)
    topic.cluster.publish(topic.at, Message(b"2", KEYS[0]))
    with running(topic.cluster, config(topic.topic), end, admin=topic.admin) as coordinator:
        received(coordinator, 1)
        end = commit(coordinator)
        assert end.subscription_id is not None
        assert end.subscription_id.without == {other}
    topic.cluster.roll_ledger(other)
    topic.cluster.trim(other, EntryId(topic.cluster.log(other).last_written.ledger + 1, 0))
    topic.cluster.publish(other, Message(b"2", KEYS[0]))
    with running(topic.cluster, both, end, admin=topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 0
        received(coordinator, 1)
        found = coordinator.newest.subscription_id
        assert found is not None
        assert not found.without


def test_properties_that_are_not_strings_are_refused() -> None:
    topic = Deleting()
    topic.make(StartPosition.EARLIEST)
    topic.cluster.subscription(topic.at, NAME).properties = {ID_PROPERTY: 5}  # type: ignore[dict-item]
    with pytest.raises(AdminError, match="properties of the subscription in"):
        topic.source().open(None)


def test_missing_entries_of_deleted_ledgers_are_counted_one_by_one() -> None:
    """Late entries of a slow range, and delayed messages, lie below the newest delivered entry."""
    topic = Deleting()
    source = config(topic.topic, discovery_interval_ms=3_600_000)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        topic.publish(4)
        received(coordinator, 4)
        commit(coordinator)
        due_ms = topic.cluster.now_ms() + 3_600_000
        delayed = [Message(b"later", KEYS[n], deliver_at_ms=due_ms) for n in range(3)]
        topic.cluster.publish(topic.at, *delayed)
        topic.publish(4)
        topic.cluster.roll_ledger(topic.at)
        topic.publish(4)
        received(coordinator, 12)
        end = commit(coordinator)
    topic.cluster.delete_subscription(topic.at, "unit")
    first = min(topic.cluster.log(topic.at).ledger_sizes)
    topic.cluster.trim(topic.at, EntryId(first + 1, 0))
    topic.publish(2)
    with (
        pytest.raises(DataLossTrimmedError, match=rf"3 entries .* first {first}:4-6") as caught,
        running(topic.cluster, source, end, admin=topic.admin),
    ):
        pass
    assert caught.value.facts["count"] == 3
    accepting = replace(source, fail_on_data_loss=False)
    with running(topic.cluster, accepting, end, admin=topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 3
        received(coordinator, 2)
        state = commit(coordinator).partitions[topic.at]
        assert all(state.covers(EntryId(first, entry)) for entry in range(11))


def test_new_and_recreated_subscriptions_get_the_id_while_the_source_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = Deleting()
    source = config(topic.topic, discovery_interval_ms=20)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:

        def marked() -> set[object]:
            return {
                one.get("subscriptionProperties", {}).get(ID_PROPERTY)
                for where in topic.cluster.partitions(topic.topic)
                for one in [topic.admin.subscription(where, "unit") or {}]
            }

        found = coordinator.newest.subscription_id
        assert found is not None
        expected = {found.text}
        topic.cluster.grow_topic(topic.topic, 3)
        wait_until(lambda: marked() == expected)
        assert "deleted while it was consumed" not in caplog.text
        topic.cluster.delete_subscription(topic.at, "unit")
        wait_until(lambda: "deleted while it was consumed" in caplog.text)
        wait_until(lambda: marked() == expected)
        topic.cluster.delete_topic(topic.topic)
        topic.cluster.create_topic(topic.topic, 2)
        wait_until(lambda: marked() == expected)
        wait_until(lambda: coordinator.newest.subscription_id == found)


def test_a_planned_batch_whose_subscription_was_deleted_is_read_again_and_nothing_is_lost() -> None:
    topic = Deleting()
    source = config(topic.topic)
    topic.publish(20)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        received(coordinator, 20)
        end = coordinator.batches.cut()
        assert end is not None
        rows = rows_of(coordinator, end)
    topic.cluster.delete_subscription(topic.at, "unit")
    topic.publish(10)
    with running(topic.cluster, source, end, planned=True, admin=topic.admin) as coordinator:
        assert rows_of(coordinator, end) == rows
        coordinator.batches.release(end)
        received(coordinator, 10)
        commit(coordinator)
        wait_until(lambda: topic.cluster.backlog(topic.at, "unit") == 0)


@pytest.mark.parametrize("start", ["latest", "position"])
def test_messages_before_the_start_stay_away_after_a_deletion(topic: Deleting, start: str) -> None:
    """The subscription is created again at the earliest message, which lies before the start."""
    topic.publish(20)
    at = topic.cluster.log(topic.at).last_written
    if start == "position":
        start = f'{{"{topic.at.name}": "{at.ledger}:{at.entry + 1}"}}'
    source = config(
        topic.topic, starting_position=start, service_url=topic.url, admin_url=topic.url
    )
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        topic.publish(20)
        received(coordinator, 20)
        end = commit(coordinator)
    topic.cluster.delete_subscription(topic.at, "unit")
    topic.publish(4)
    with running(topic.cluster, source, end, admin=topic.admin) as coordinator:
        received(coordinator, 4)
        batch = coordinator.batches.cut()
        assert batch is not None
        rows = rows_of(coordinator, batch)
        values = sorted(int(row["value"]) for part in rows.values() for row in part)
        assert values == list(range(40, 44))
        coordinator.batches.release(batch)
        wait_until(lambda: topic.cluster.backlog(topic.at, "unit") == 0)
