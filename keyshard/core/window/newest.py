"""The newest checkpoint, in parts: a cut changes those of the topic partitions that it touches."""

from __future__ import annotations

from dataclasses import replace

from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.window.checkpoint_size import PARTITION_BYTES


class NewestCheckpoint:
    """What the next cut continues, and its size.

    Args:
        checkpoint: The first one, whose topic partitions are still to be recorded.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._whole: Checkpoint | None = checkpoint
        self._frame = replace(checkpoint, partitions={})
        self._states: dict[TopicPartition, PartitionCheckpoint] = {}
        self.bytes = 0
        """About the size of its text."""

    def __contains__(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._states

    @property
    def whole(self) -> Checkpoint:
        """All of it."""
        if self._whole is None:
            self._whole = replace(self._frame, partitions=dict(self._states))
        return self._whole

    def record(self, topic_partition: TopicPartition, state: PartitionCheckpoint | None) -> None:
        """What it says of a topic partition; ``None``: nothing any more."""
        before = self._states.pop(topic_partition, None)
        if before is not None:
            self.bytes -= _text_bytes(topic_partition, before)
        if state is not None:
            self._states[topic_partition] = state
            self.bytes += _text_bytes(topic_partition, state)

    def advance(self, ranges: int, merged: int) -> None:
        """It is another one, with as many ranges, whose batch has ``merged`` partitions."""
        self._frame = replace(
            self._frame, ranges=ranges, merged=None if merged == ranges else merged
        )
        self._whole = None

    def room(self, topic_partition: TopicPartition, others: int, bytes_max: int) -> int:
        """Size that a topic partition may have in the next one: its own, and a share of what all
        leave over.

        Args:
            topic_partition: Which one.
            others: Number of topic partitions that share.
            bytes_max: Most for all of them.
        """
        left = max(0, bytes_max - self.bytes) // others
        state = self._states.get(topic_partition)
        if state is None:
            return left
        return PARTITION_BYTES + state.delivered.text_bytes + state.batch.text_bytes + left

    def validate(self) -> None:
        """Assert that its size is counted right."""
        sizes = (_text_bytes(where, state) for where, state in self._states.items())
        assert self.bytes == sum(sizes), "the checkpoint's size is counted wrong"


def _text_bytes(topic_partition: TopicPartition, state: PartitionCheckpoint) -> int:
    return len(topic_partition.name) + state.json_bytes + 4
