"""Acknowledges unneeded entries of the dead-letter topic, at once or after a checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import chain

from keyshard.broker.port import Consumer
from keyshard.columns.messages import messages_of
from keyshard.core.dead_letter import parts_of
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letters.parking import ParkedKeys
from keyshard.dead_letters.subscription import DeadLetterSubscription
from keyshard.dead_letters.topic_scan import is_finished, position_of
from keyshard.errors import BrokerError, KeyShardError, UnreadableEntryError
from keyshard.threads import begin

ACKNOWLEDGE_AT_ONCE_MAX = 1_000
"""Most entries acknowledged in one call."""

_log = logging.getLogger(__name__)


class AckTracker:
    """Acknowledges entries that no source needs any more. Any thread may call it.

    Args:
        keys: State of the parked keys.
        keeper: Holds the subscription, whose consumer acknowledges.
        subscription: Subscription of the source.
        checkpointed: Whether :meth:`saved` will be called.
        stored: Position in the dead-letter topic. The stored checkpoint contains the effect of all
            messages before it; ``None``: of no message.
        fail: Called with an unexpected error of the receiving thread, which ends the source.
    """

    def __init__(
        self,
        keys: ParkedKeys,
        keeper: DeadLetterSubscription,
        subscription: str,
        *,
        checkpointed: bool,
        stored: EntryId | None,
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self._keys = keys
        self._keeper = keeper
        self._subscription = subscription
        self._checkpointed = checkpointed
        self._waiting: list[EntryId] = []
        self._saving: list[EntryId] = []
        self._stored = stored
        self._fail = fail
        self._storing: EntryId | None = None
        self._redelivery: DeadLetterRedelivery | None = None
        if keeper.consumer is not None:
            self.receive(keeper.consumer)

    def receive(self, consumer: Consumer) -> None:
        """Begin to acknowledge redelivered messages that no source needs."""
        if self._redelivery is None:
            self._redelivery = DeadLetterRedelivery(consumer, self._redelivered, self._fail)

    def markers(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge markers, such as the message that says that a dead letter is done.

        A source with checkpoints acknowledges them after the next checkpoint, which contains their
        effect. Until then they prove that their dead letters are done, and not lost.
        """
        if not self._checkpointed:
            self.acknowledge(entries)
            return
        with self._keys.lock:
            self._waiting += entries

    def saving(self) -> None:
        """Note that the checkpoint being made contains the effect of all markers so far.

        Called with the keys' lock held.
        """
        self._saving += self._waiting
        self._waiting = []
        self._storing = self._keys.parking.parked.folded

    def saved(self) -> None:
        """Note that this checkpoint is durable, and acknowledge the markers before it."""
        with self._keys.lock:
            entries, self._saving = self._saving, []
            self._stored = self._storing
        self.acknowledge(entries)

    @property
    def unsaved(self) -> bool:
        """Whether entries wait for the next checkpoint before they are acknowledged."""
        return bool(self._waiting or self._saving)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge entries; after a failure, a later start does it."""
        for at in range(0, len(entries), ACKNOWLEDGE_AT_ONCE_MAX):
            self._acknowledge(entries[at : at + ACKNOWLEDGE_AT_ONCE_MAX])

    def close(self) -> None:
        """Stop receiving. Idempotent."""
        if self._redelivery is not None:
            self._redelivery.close()

    def _acknowledge(self, entries: Sequence[EntryId]) -> None:
        with self._keys.lock:
            known = self._keys.parking.parked.parts
            parts = [known.pop(one) for one in entries if one in known]
        # The parts of other dead letters are unknown here. When such a dead letter is redelivered,
        # its message names them.
        entries = [*chain.from_iterable(parts), *entries]
        consumer = self._keeper.consumer
        assert consumer is not None, "there are entries, so the topic is held"
        try:
            consumer.acknowledge(entries)
        except BrokerError as exc:
            # The next start reads them once more, and acknowledges them.
            _log.debug("%d dead letters stay unacknowledged: %s", len(entries), exc.summary)

    def _redelivered(self, message: Message) -> None:
        """Acknowledge a received message of the topic, if nothing needs it."""
        with self._keys.lock:
            parked = self._keys.parking.parked
            stored = self._stored if self._checkpointed else parked.folded
            if not is_finished(parked, message, self._subscription, stored):
                return
        position = position_of(message)
        try:
            parts = parts_of(message)
        except ValueError:
            parts = EntrySet()
        self.acknowledge([*(parts - parts.above(position)), position])


# -- Redelivered dead letters --------------------------------------------------------------------
# A broker that crashes forgets acknowledgements. A start does not read dead letters below its
# checkpoint, and a running source has finished others long ago. Such dead letters are received
# here, and acknowledged if nothing needs them. The cost is proportional to the unacknowledged ones.

JOIN_S = 2.0
"""Longest wait for the thread's end, seconds."""


class DeadLetterRedelivery:
    """Receives redelivered messages in one daemon thread.

    Args:
        consumer: Consumer of the subscription.
        take: Gets each message, and acknowledges it or leaves it.
        fail: Called with an unexpected error, which ends the source.
    """

    def __init__(
        self,
        consumer: Consumer,
        take: Callable[[Message], None],
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self._consumer = consumer
        self._take = take
        self._fail = fail
        self._closed = False
        self._ready = threading.Event()
        self._thread = begin("keyshard-dead-letter-redelivery", self._run, fail=self._unless_closed)

    def close(self) -> None:
        """Stop receiving; called before the consumer is closed. Idempotent."""
        self._closed = True
        self._ready.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._round()
        except KeyShardError as exc:
            if not self._closed:
                _log.warning(
                    "redeliveries of %s are not received any more, and stay unacknowledged "
                    "until the next start: %s",
                    self._consumer.topic_partition, exc.summary,
                )  # fmt: skip

    def _unless_closed(self, error: KeyShardError) -> None:
        if not self._closed:
            self._fail(error)

    def _round(self) -> None:
        try:
            blocks = self._consumer.receive(0)
        except UnreadableEntryError:
            return  # It stays unacknowledged; the next start reports it.
        for block in blocks:
            for message in messages_of(self._consumer.topic_partition, block):
                self._take(message)
        if not blocks:
            ready = self._ready = threading.Event()
            self._consumer.when_ready(ready.set)
            if not self._closed:
                ready.wait()
