"""Consumers and Readers that hand out whole entries."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from keyshard.broker.port import HowToRead
from keyshard.broker.refused_entries import entry_of
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import Decoded, RawEntry
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.subscribed import Shared, Subscribed, ids_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerUnavailableError, CorruptEntryError, KeyShardError

ACKNOWLEDGED_AT_ONCE = 10_000
"""Entries that one command acknowledges at most."""
GLANCE_MS = 10
"""Time to receive up to which nothing is waited for, milliseconds: whoever has others to serve is
called when something came."""
UNSENT_MAX = 100_000
"""Acknowledgements that wait for a connection at most."""
_EXCLUSIVE, _KEY_SHARED = 0, 3
_STICKY = 1
_LATEST, _EARLIEST = 0, 1
_INDIVIDUAL = 0

_log = logging.getLogger(__name__)


class WireConsumer(Subscribed):
    """One hash range of one topic partition.

    Args: those of :class:`~keyshard.broker.wire.subscribed.Subscribed`, and
        hash_range: The range.
        subscription: Its name.
        consumer_name: Shown in the broker's statistics.
        latest: Whether a subscription that does not exist yet begins at the end.
    """

    def __init__(
        self,
        shared: Shared,
        topic_partition: TopicPartition,
        queue: int,
        *,
        hash_range: HashRange,
        subscription: str,
        consumer_name: str,
        latest: bool,
    ) -> None:
        super().__init__(shared, topic_partition, queue, self._key_shared)
        self.hash_range = hash_range
        self._subscription = subscription
        self._consumer_name = consumer_name
        self._latest = latest
        self._refused: KeyShardError | None = None
        self._unsent: list[EntryId] = []
        self._acknowledging = threading.Lock()
        self._told = False

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        if self._refused is not None:
            raise self._refusal()
        entries = self.take(timeout_ms / 1000 if timeout_ms > GLANCE_MS else 0)
        if not entries:
            return []
        decoded = decode(entries, self.topic_partition)
        self.used(decoded.messages)
        if decoded.left_out is not None and not self._told:
            self._told = True
            ledger, entry = decoded.left_out
            _log.warning(
                "entry %d:%d of %s is encrypted and left out, as all that are encrypted there",
                ledger, entry, self.topic_partition,
            )  # fmt: skip
        self._refused = decoded.refused
        if self._refused is not None:
            self.put_back(entries[decoded.seen :])
            if not decoded.blocks:
                raise self._refusal()
        return decoded.blocks

    def _refusal(self) -> KeyShardError:
        """What is refused; what is behind an entry that cannot be read comes next."""
        self._check_open()
        assert self._refused is not None
        refused = self._refused
        if isinstance(refused, CorruptEntryError):
            self._refused = None
        return refused

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        with self._acknowledging:
            self._unsent.extend(entries)
            if not self._send_acknowledgements() and len(self._unsent) > UNSENT_MAX:
                del self._unsent[len(self._unsent) - len(entries) :]
                raise BrokerUnavailableError(
                    f"Could not acknowledge in {self.topic_partition}: there is no connection, and "
                    f"{UNSENT_MAX} acknowledgements wait for one."
                )

    def close(self, timeout_s: float | None = None, *, for_another: bool = False) -> None:  # noqa: ARG002 - the broker cannot know
        super().close(timeout_s)

    def subscribed_again(self, at: WireConnection, consumer_id: int) -> None:
        """Acknowledge what waited, so that it does not come again."""
        self._latest = False
        with self._acknowledging:
            while self._unsent:
                some = self._unsent[:ACKNOWLEDGED_AT_ONCE]
                at.send("ack", _acknowledgement(some, consumer_id))
                del self._unsent[: len(some)]

    def _send_acknowledgements(self) -> bool:
        while self._unsent:
            some = self._unsent[:ACKNOWLEDGED_AT_ONCE]
            if not self.send("ack", _acknowledgement(some, 0)):
                return False
            del self._unsent[: len(some)]
        self._check_open()
        return True

    def _key_shared(self) -> Any:
        where = self.hash_range
        return api.Subscribe(
            topic=self.topic_partition.name.encode(),
            subscription=self._subscription.encode(),
            sub_type=_KEY_SHARED,
            consumer_id=0,
            request_id=0,
            consumer_name=self._consumer_name.encode(),
            initial_position=_LATEST if self._latest else _EARLIEST,
            key_shared=api.KeySharedMeta(
                mode=_STICKY, hash_ranges=[api.IntRange(start=where.start, end=where.end)]
            ),
        )


def _acknowledgement(entries: Sequence[EntryId], consumer_id: int) -> Any:
    return api.Ack(consumer_id=consumer_id, ack_type=_INDIVIDUAL, message_id=ids_of(entries))


class WireReader(Subscribed):
    """Reads a topic partition from a position on.

    Args:
        shared: What it has in common with the others.
        topic_partition: What is read.
        start: First entry that is read.
        how: What may be left out.
    """

    def __init__(
        self, shared: Shared, topic_partition: TopicPartition, start: EntryId, how: HowToRead
    ) -> None:
        super().__init__(shared, topic_partition, how.receiver_queue_size, self._from_here)
        self._start = start
        self._passed: EntryId | None = None
        """The last entry that was handed out, or left out."""
        self._how = how
        self._refused: KeyShardError | None = None
        self._name = f"reader-{uuid.uuid4().hex[:16]}".encode()

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        if self._refused is not None:
            raise self._refusal()
        entries = self.take(timeout_ms / 1000)
        if not entries:
            return []
        decoded = self._decode(entries)
        self.used(decoded.messages)
        self._refused = decoded.refused
        if self._refused is not None:
            self.put_back(entries[decoded.seen :])
            if not decoded.blocks:
                raise self._refusal()
        return decoded.blocks

    def _refusal(self) -> KeyShardError:
        """What is refused; an entry that cannot be read is passed then."""
        self._check_open()
        assert self._refused is not None
        refused = self._refused
        if isinstance(refused, CorruptEntryError):
            self._passed, self._refused = entry_of(refused), None
        return refused

    def _decode(self, entries: Sequence[RawEntry]) -> Decoded:
        decoded = decode(
            entries,
            self.topic_partition,
            self._how.columns,
            encrypted_too=self._how.encrypted_too,
        )
        if decoded.refused is None:
            self._passed = entries[-1].id
        elif decoded.blocks:
            self._passed = decoded.blocks[-1].id
        return decoded

    def at_end(self) -> bool:
        last = self.last_entry()
        if last is None:
            return True
        return last < self._start if self._passed is None else last <= self._passed

    def stayed_connected(self) -> bool:
        return not self.losses and self.is_connected()

    def _from_here(self) -> Any:
        ledger, entry = self._start
        if self._passed is not None:
            ledger, entry = self._passed.ledger, self._passed.entry + 1
        mask = (1 << 64) - 1
        # With an index of a batch, the broker begins with this very entry.
        start = api.MessageId(ledger=ledger & mask, entry=entry & mask, batch_index=0)
        return api.Subscribe(
            topic=self.topic_partition.name.encode(),
            subscription=self._name,
            sub_type=_EXCLUSIVE,
            consumer_id=0,
            request_id=0,
            durable=False,
            start_message_id=start,
            initial_position=_EARLIEST,
        )
