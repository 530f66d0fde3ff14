"""The port: what handlers need of a place that keeps dead letters, markers and notes.

:class:`keyshard.dead_letter.dead_letters.DeadLetters` is the dead-letter topic behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keyshard.core.dead_letter.letters import Letter, Resting
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.dead_letter.parked_keys import ParkedKeys


class InOrder(Protocol):
    """Dead letters of one key."""

    def next(self) -> Resting | None:
        """The next letter; ``None`` after the last.

        Raises:
            DataLossTrimmedError: It is not stored any more; by ``fail_on_data_loss``.
            ReplayTimeoutError: It could not be read before ``replay_timeout_ms``.
        """


class DeadLetterStore(Protocol):
    """Keeps dead letters of one source. Any thread may call it; every wait has a deadline.

    What returns is confirmed. What raises ``BrokerError`` may be stored all the same.
    """

    @property
    def keys(self) -> ParkedKeys:
        """What is confirmed of parked keys."""

    def send(self, letter: Letter) -> None:
        """Keep a letter; its message counts as completed then. A parked one parks its key."""

    def done(self, key: str, resting: Resting) -> None:
        """A handler got a letter of a replay done; the last one releases the key."""

    def runs_again(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """A message is about to run that is older than done letters of its key."""

    def discard(self, keys: Sequence[str]) -> int:
        """Give up the letters of parked keys; how many."""

    def discard_rejected(self, selection: Selection, *, count_only: bool = False) -> int:
        """Give up rejected letters, and those that went without their key, or only count them."""

    def peek(self, key: str, timeout_s: float) -> Letter | None:
        """Read the first letter of a key, which rests on; without its parts."""

    def first(self, key: str) -> Resting | None:
        """Read the first letter of a key; ``None`` while none is confirmed."""

    def replay(self, key: str, first: Resting) -> InOrder:
        """The letters of a draining key behind its first one; the key is replaying now."""

    def checkpoint(
        self, partitions: Mapping[TopicPartition, PartitionCheckpoint]
    ) -> Mapping[str, Any]:
        """Where they are, for a checkpoint that has this of each topic partition not gone."""

    def saved(self) -> None:
        """What :meth:`checkpoint` gave is durable."""

    @property
    def unsaved(self) -> bool:
        """Whether something waits for :meth:`saved`."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""
