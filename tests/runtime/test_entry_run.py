"""An ``EntryRun`` commits single messages of unfinished entries with their output messages."""

from __future__ import annotations

from pathlib import Path

from keyshard import KeyShardSink
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.columns.messages import messages_of
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.handlers.entry_run import EntryRun
from tests.helpers import wait_until
from tests.support.memory_topic import MemoryTopic


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

    def taken(run: EntryRun, messages: int) -> list[tuple[TopicPartition, EntryBlock]]:
        found: list[tuple[TopicPartition, EntryBlock]] = []

        def complete() -> bool:
            found.extend(run.take(0.05))
            return sum(block.rows for _, block in found) >= messages

        wait_until(complete)
        return found

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
