"""Consumers and Readers that hand out whole entries."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from keyshard.broker.port import HowToRead
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import Decoded, RawEntry
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.receipts import Receipts
from keyshard.broker.wire.subscribed import Shared, Subscribed
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.client_queue import SentAhead

CONFIRM_S = 2.0
"""Longest wait at the end for the broker to say that it took what was acknowledged, seconds."""
QUIET_S = 2.0
"""Silence after which a broker is nudged, seconds; half as long to twice as long."""
_EXCLUSIVE, _KEY_SHARED = 0, 3
_STICKY = 1
_LATEST, _EARLIEST = 0, 1

_log = logging.getLogger(__name__)


class WireConsumer(Subscribed):
    """One hash range of one topic partition.

    Args: those of :class:`~keyshard.broker.wire.subscribed.Subscribed`, and
        hash_range: The range.
        subscription: Its name.
        consumer_name: Shown in the broker's statistics.
        latest: Whether a subscription that does not exist yet begins at the end.
        columns: As those of :class:`~keyshard.broker.port.HowToRead`.
        hand_on: Told what is not acknowledged when it is closed: others may have received it, and
            then it does not come again.
    """

    def __init__(
        self,
        shared: Shared,
        topic_partition: TopicPartition,
        queue: SentAhead,
        *,
        hash_range: HashRange,
        subscription: str,
        consumer_name: str,
        latest: bool,
        columns: Collection[str] | None = None,
        hand_on: Callable[[WireConsumer, Sequence[EntryId]], None] = lambda *_: None,
    ) -> None:
        super().__init__(shared, topic_partition, queue, self._key_shared)
        self._hand_on = hand_on
        self.hash_range = hash_range
        self._subscription = subscription
        self._consumer_name = consumer_name
        self._latest = latest
        self._columns = columns
        self._receipts = Receipts(
            topic_partition, self.standing, shared.reconnects.until_true,
            partial(self._error, "acknowledge in"), self._end,
        )  # fmt: skip
        self._watched = False
        """Whether silence of the broker is waited for."""
        self._stirred = False
        """Whether something was taken since that was looked at last."""

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        self.raise_refused()
        entries = self.take(timeout_ms / 1000)
        if not entries:
            return []
        decoded = decode(
            entries, self.topic_partition, self._columns, at_once_bytes=self.at_once_bytes
        )
        self.used(decoded.messages, entries[: decoded.seen])
        return self.handed_out(decoded, entries)

    def used(
        self, messages: int, entries: Sequence[RawEntry], ahead_max: int | None = None
    ) -> None:
        super().used(messages, entries, ahead_max)
        self._watch()

    def _watch(self) -> None:
        """From now on the broker has permits, and may send something or be silent."""
        with self._changed:
            if self._watched:
                self._stirred = True
                return
            self._watched = True
        self._shared.nudges.until_true(self._nudge, QUIET_S)

    def _nudge(self) -> bool:
        """Grant a silent broker a little; whether its silence is waited for no more.

        A Key_Shared dispatcher may leave what is to be sent again until something happens to its
        subscription (apache/pulsar#23845): a grant does. Each is later than the one before, and
        they end until something is taken again.
        """
        with self._changed:
            at, consumer_id = self._at, self._id
            stirred, self._stirred = self._stirred, False
            silent = at is not None and not self._entries
            permits = self._permits.nudge() if silent and not stirred else 0
            self._watched = silent and (stirred or permits > 0)
        if at is not None:
            self._permit(at, consumer_id, permits)
        if silent and stirred:
            # The waits begin anew.
            self._shared.nudges.until_true(self._nudge, QUIET_S)
        return not permits

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self._check_open()
        self._receipts.add(entries)

    def trouble(self) -> str:
        return super().trouble() or ("" if self._closed else self._receipts.refused())

    def unconfirmed(self, timeout_s: float) -> int:
        return 0 if self._closed else self._receipts.wait(timeout_s)

    def close(self, timeout_s: float | None = None, *, for_another: bool = False) -> None:
        if not for_another and timeout_s is None and (left := self.unconfirmed(CONFIRM_S)):
            warn_of_unconfirmed(left, str(self.topic_partition))
        if unsent := self._receipts.close():
            self._hand_on(self, unsent)
        super().close(timeout_s)
        if for_another and (unheard := self._receipts.unheard()):
            # A broker that forgot this consumer in silence has taken none of it.
            self._hand_on(self, unheard)

    def stands_in_for(self, other: WireConsumer) -> bool:
        """Whether it can acknowledge what another one did not get acknowledged."""
        at, _ = self.standing()
        same = (self.topic_partition, self._subscription) == (
            other.topic_partition, other._subscription,
        )  # fmt: skip
        return same and at is not None and at.stands and other._receipts.may_be_sent(at)

    def lost(self, consumer_id: int, *, ended: bool) -> None:
        self._receipts.lost(consumer_id)
        super().lost(consumer_id, ended=ended)

    def subscribed_again(self, at: WireConnection, consumer_id: int) -> None:
        """Acknowledge what waited, so that it does not come again."""
        self._latest = False
        self._receipts.subscribed(at, consumer_id)
        self._watch()

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


def warn_of_unconfirmed(entries: int, where: str) -> None:
    """Say what is not known at the end."""
    _log.warning(
        "The broker has not confirmed that %d entries of %s are acknowledged. Where they are not, "
        "they come again to the next run, which knows them by its checkpoint and drops them.",
        entries, where,
    )  # fmt: skip


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
        self._start = start
        self._passed: EntryId | None = None
        """The last entry that was handed out, or left out."""
        self._how = how
        queue = SentAhead(how.receiver_queue_size, how.receiver_queue_bytes, how.first)
        super().__init__(
            shared, topic_partition, queue, self._from_here, ahead_max=self._ahead_max()
        )
        self._name = f"reader-{uuid.uuid4().hex[:16]}".encode()

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        self.raise_refused()
        entries = self.take(timeout_ms / 1000)
        if not entries:
            return []
        decoded = self._decode(entries)
        self.used(decoded.messages, entries[: decoded.seen], self._ahead_max())
        return self.handed_out(decoded, entries)

    def passed(self, entry_id: EntryId) -> None:
        self._passed = entry_id

    def _ahead_max(self) -> int:
        """Most messages to ask for ahead: an entry has at least one, none behind the last counts.

        For as many messages the broker reads as many entries, and sends them whole.
        """
        most, last = self._how.receiver_queue_size, self._how.last
        ledger, entry = self._start if self._passed is None else self._passed
        if last is None or ledger != last.ledger:
            return most
        left = last.entry - entry + (self._passed is None)
        return max(1, min(most, left))

    def _decode(self, entries: Sequence[RawEntry]) -> Decoded:
        decoded = decode(
            entries, self.topic_partition, self._how.columns, at_once_bytes=self.at_once_bytes
        )
        if decoded.refused is None:
            self._passed = entries[decoded.seen - 1].id
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
