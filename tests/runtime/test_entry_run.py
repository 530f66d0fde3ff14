"""An ``EntryRun`` commits single messages of unfinished entries with their output messages."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from keyshard import KeyShardSink
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.columns.messages import messages_of
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.entry_run import Committer, EntryRun
from tests.helpers import received, wait_until
from tests.support.memory_scalable_topic import TOPIC, ScalableTopic, source_of
from tests.support.memory_topic import MemoryTopic


def taken(run: EntryRun, messages: int) -> list[tuple[TopicPartition, EntryBlock]]:
    found: list[tuple[TopicPartition, EntryBlock]] = []

    def complete() -> bool:
        found.extend(run.take(0.05))
        return sum(block.rows for _, block in found) >= messages

    wait_until(complete)
    return found


def test_messages_whose_rows_are_in_the_checkpoint_do_not_come_again(tmp_path: Path) -> None:
    topic = MemoryTopic(partitions=1)
    out = topic.cluster.create_topic("out")
    topic.cluster.deduplicate(out)
    sink = KeyShardSink(out, sink_id="s", service_url=topic.url)
    messages = [Message(b"%d" % number, key="k") for number in range(3)]
    for _ in range(2):
        topic.cluster.publish(topic.topic, *messages, batching=Batching.MIXED)

    def run() -> EntryRun:
        source = topic.source(parallelism=1)
        checkpoint = tmp_path / "c.json"
        return EntryRun(source.coordinator(), source, checkpoint, executor="test", sink=sink)

    first = run()
    with first.started():
        (where, whole), (_, part) = taken(first, 6)
        rows = [Outgoing.of([OutgoingMessage(b"out", "k")])]
        handled = [(where, whole.id, index) for index in range(3)]
        handled.append((where, part.id, 1))
        first.commit({}, {out: rows}, handled)
        assert handled == []
    second = run()
    with second.started():
        ((_, rest),) = taken(second, 2)
        assert (rest.id, list(rest.indices)) == (part.id, [0, 2])
        assert [one.value for one in messages_of(where, rest)] == [b"0", b"2"]
        wait_until(lambda: topic.backlog() <= 3)
        second.commit({where: [rest.id]})
        wait_until(lambda: topic.backlog() == 0)
    reader = MemoryBroker(topic.cluster).reader(TopicPartition(out), EntryId(0, 0))
    assert [block.rows for block in reader.read(0)] == [1]


def test_handled_messages_of_an_unfinished_entry_do_not_come_again(tmp_path: Path) -> None:
    """Actors of a Ray job share an entry of several keys; one of them may be done long before."""
    topic = MemoryTopic(partitions=1)
    for _ in range(2):
        topic.cluster.publish(
            topic.topic, *[Message(b"", key=key) for key in "abc"], batching=Batching.MIXED
        )

    def run() -> EntryRun:
        source = topic.source(parallelism=1)
        return EntryRun(source.coordinator(), source, tmp_path / "c.json", executor="test")

    first = run()
    with first.started():
        (where, half), (_, whole) = taken(first, 6)
        first.commit({}, handled=[(where, half.id, 1)])
        first.commit({where: [whole.id]}, handled=[(where, whole.id, 0)])
    second = run()
    with second.started():
        ((_, rest),) = taken(second, 2)
        assert (rest.id, list(rest.indices)) == (half.id, [0, 2])
        second.commit({}, handled=[(where, half.id, 0)])
    third = run()
    with third.started():
        ((_, rest),) = taken(third, 1)
        assert list(rest.indices) == [2], "what the first run handled is still known"
        third.commit({where: [rest.id]})
    with closing(CheckpointStore(tmp_path / "c.json")) as store:
        stored = store.open()
    assert stored is not None
    assert stored.handled == {}, "whole entries are delivered"
    assert topic.backlog() == 0


def test_handled_messages_of_entries_that_never_come_again_are_forgotten(tmp_path: Path) -> None:
    topic = MemoryTopic(partitions=1)
    for _ in range(2):
        topic.cluster.publish(
            topic.topic, *[Message(b"", key=key) for key in "ab"], batching=Batching.MIXED
        )
    source = topic.source(parallelism=1, discovery_interval_ms=50)
    run = EntryRun(source.coordinator(), source, tmp_path / "c.json", executor="test")
    with run.started():
        (where, half), (_, whole) = taken(run, 4)
        run.commit({where: [whole.id]}, handled=[(where, half.id, 1)])
        topic.cluster.delete_topic(topic.topic)
        wait_until(lambda: where not in run.coordinator.in_flight.positions)
        run.commit({}, handled=[(where, half.id, 0)])
    with closing(CheckpointStore(tmp_path / "c.json")) as store:
        stored = store.open()
    assert stored is not None
    assert stored.handled == {}


def test_a_checkpoint_has_no_handled_messages_where_nothing_is_delivered(tmp_path: Path) -> None:
    """Everything comes again there, in order. If the cluster was wiped, other entries have the same
    ids, and only a delivered one shows that."""
    topic = MemoryTopic(partitions=1)
    keys = [Message(b"", key=key) for key in "ab"]
    topic.cluster.publish(topic.topic, *keys, batching=Batching.MIXED)
    source = topic.source(parallelism=1)
    run = EntryRun(source.coordinator(), source, tmp_path / "c.json", executor="test")
    with run.started():
        ((where, half),) = taken(run, 2)
        run.commit({}, handled=[(where, half.id, 1)])
    with closing(CheckpointStore(tmp_path / "c.json")) as store:
        stored = store.open()
    assert stored is None or stored.handled == {}


def test_handled_messages_of_a_segment_stay_out_of_a_checkpoint_without_room_for_its_parent(
    tmp_path: Path,
) -> None:
    """A restart repeats the entries of the parent, so newer messages of their keys come again."""
    topic, path = ScalableTopic(), tmp_path / "c.json"
    (parent,) = topic.cluster.scalable.graph(TOPIC).partitions
    topic.publish(400)
    store = CheckpointStore(path)
    with closing(store), topic.running(source_of(), store.open()) as coordinator:
        received(coordinator, 400)
        topic.split(0)
        topic.publish_mixed(40)
        received(coordinator, 440)
        found: dict[TopicPartition, list[EntryId]] = {}
        while taken := coordinator.in_flight.take(0.0):
            for where, _, block in taken:
                found.setdefault(where, []).append(block.id)
        child = next(where for where in found if where != parent)
        committer = Committer(coordinator, store, None)
        assert not committer.plan({parent: found[parent][:1], child: found[child][:1]})
        committer.store()
        window = coordinator.consumers.shared.window
        window.budget = replace(window.budget, checkpoint_bytes_max=window.checkpoint_bytes)
        left = committer.plan({parent: found[parent][2::2]})
        assert left[parent]
        committer.note([(child, found[child][1], 0)])
        committer.store()
        assert not Checkpoint.from_json(path.read_text()).handled
        assert not committer.plan(left, last=True)
        committer.store()
        assert Checkpoint.from_json(path.read_text()).handled == {child: {found[child][1]: {0}}}
