"""Acknowledges what is finished with in the dead-letter topic: at once, or behind a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain

from keyshard.broker.port import Consumer
from keyshard.core.dead_letter.letters import parts_of
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.keeper import LetterKeeper
from keyshard.dead_letter.parked_keys import ParkedKeys
from keyshard.dead_letter.reading import is_finished, position_of
from keyshard.dead_letter.returns import LetterReturns
from keyshard.errors import BrokerError, KeyShardError

ACKNOWLEDGE_AT_ONCE_MAX = 1_000
"""Entries acknowledged in one call while the topic is read at the start."""

_log = logging.getLogger(__name__)


class FinishedWith:
    """Entries that nothing needs any more. Any thread may call it.

    Args:
        keys: What is known.
        keeper: Holds the subscription, by its consumer they are acknowledged.
        subscription: Of the source.
        checkpointed: Whether :meth:`saved` will be called.
        stored: Everything before it is folded in the checkpoint that is stored.
        fail: Told of an unexpected error of the thread that receives, which ends the source.
    """

    def __init__(
        self,
        keys: ParkedKeys,
        keeper: LetterKeeper,
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
        self._returns: LetterReturns | None = None
        if keeper.consumer is not None:
            self.receive(keeper.consumer)

    def receive(self, consumer: Consumer) -> None:
        """From now on, also acknowledge what comes again though it is finished with."""
        if self._returns is None:
            self._returns = LetterReturns(consumer, self._came_again, self._fail)

    def markers(self, entries: Sequence[EntryId]) -> None:
        """Markers are finished with once a checkpoint, where there is one, begins behind them.

        Until then they prove that their letters are done, and not lost.
        """
        if not self._checkpointed:
            self.acknowledge(entries)
            return
        with self._keys.lock:
            self._waiting += entries

    def saving(self) -> None:
        """A checkpoint begins behind what is folded; called with the lock of the keys held."""
        self._saving += self._waiting
        self._waiting = []
        self._storing = self._keys.parking.parked.folded

    def saved(self) -> None:
        """That checkpoint is durable: markers before it have nothing more to prove."""
        with self._keys.lock:
            entries, self._saving = self._saving, []
            self._stored = self._storing
        self.acknowledge(entries)

    @property
    def unsaved(self) -> bool:
        """Whether something is acknowledged only when another checkpoint is stored."""
        return bool(self._waiting or self._saving)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        """Entries are finished with; a failure is made good later."""
        for at in range(0, len(entries), ACKNOWLEDGE_AT_ONCE_MAX):
            self._acknowledge(entries[at : at + ACKNOWLEDGE_AT_ONCE_MAX])

    def close(self) -> None:
        """Receive nothing more. Idempotent."""
        if self._returns is not None:
            self._returns.close()

    def _acknowledge(self, entries: Sequence[EntryId]) -> None:
        with self._keys.lock:
            known = self._keys.parking.parked.parts
            parts = [known.pop(one) for one in entries if one in known]
        # Where only some of them are remembered, a letter that comes again names its parts.
        entries = [*chain.from_iterable(parts), *entries]
        consumer = self._keeper.consumer
        assert consumer is not None, "there are entries, so the topic is held"
        try:
            consumer.acknowledge(entries)
        except BrokerError as exc:
            # They are read once more at the next start, and found to be finished with.
            _log.debug("%d dead letters stay unacknowledged: %s", len(entries), exc)

    def _came_again(self, message: Message) -> None:
        """Acknowledge what was received of the topic, if it is finished with."""
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
