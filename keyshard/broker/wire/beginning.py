"""Moves the cursor of a subscription that nobody consumes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.reconnect import ReconnectingHandle, Shared, first_answer
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerError, BrokerUnavailableError, KeyShardError

_EXCLUSIVE, _EARLIEST = 0, 1
_WORD = 64


class WireBeginning(ReconnectingHandle):
    """A consumer that moves the cursor of its subscription, and receives nothing.

    It grants no permits. As an exclusive consumer, it is refused while others are connected. The
    broker disconnects it to move the cursor, so it subscribes a second time to ask for the result.

    Args:
        shared: State that all handles share.
        topic_partition: The topic partition.
        subscription: The subscription; the broker creates a missing one.
    """

    request_name = "subscribe"
    action = "subscribe to"
    rest_s = 0.0

    def __init__(self, shared: Shared, topic_partition: TopicPartition, subscription: str) -> None:
        super().__init__(shared, topic_partition)
        self._subscription = subscription

    def move(self, start: MessageId | int, batch_size: int) -> EntryId:
        """Move the cursor, and return the position after the mark-delete.

        Args:
            start: First message, or publish time, milliseconds since the epoch.
            batch_size: Number of messages of the entry of ``start``.

        Raises:
            RangeConflictError: Another consumer is connected (retriable).
            BrokerUnavailableError: No answer in time (retriable).
            BrokerError: The broker refuses.
        """

        # The broker writes its cursor before it notes the parts of the entry, which are thus
        # written with the second move.
        moves = 2 if isinstance(start, MessageId) and start.batch_index else 1

        def attempt(left_s: float) -> EntryId:
            for _ in range(moves):
                self._ask("seek", _seek(start, batch_size), left_s)
            ends = self._ask("get_last_message_id", api.GetLastMessageId(), left_s)
            marked = ends.consumer_mark_delete_position
            return EntryId(marked.ledger, (marked.entry + 1) % (1 << 64))

        return first_answer(attempt, self._may_pass, self._shared.timeout_s)

    def _ask(self, name: str, content: Any, timeout_s: float) -> Any:
        """Subscribe, make a request about the subscription, and close."""
        for _ in self._open(timeout_s):
            pass
        at, consumer_id = self._at, self._id
        assert at is not None
        content.consumer_id = consumer_id
        try:
            return at.ask(name, content, timeout_s)
        except (RefusedError, BrokerUnavailableError) as exc:
            raise self._error("move a subscription of", exc) from exc
        finally:
            close = api.CloseConsumer(consumer_id=consumer_id, request_id=0)
            # The broker may have closed it, or lost it with the connection.
            with suppress(RefusedError, BrokerUnavailableError):
                at.ask("close_consumer", close, timeout_s)
            at.unregister(consumer_id)

    def lost(self, handle_id: int, *, ended: bool) -> None:
        """Do nothing: the pending request fails, or was answered."""

    def _may_pass(self, error: KeyShardError) -> bool:
        return isinstance(error, BrokerUnavailableError)

    def _request(self, handle_id: int) -> Any:
        return api.Subscribe(
            topic=self.topic_partition.name.encode(),
            subscription=self._subscription.encode(),
            sub_type=_EXCLUSIVE,
            consumer_id=handle_id,
            request_id=0,
            initial_position=_EARLIEST,
        )

    def _opened(self, at: WireConnection, handle_id: int, answer: Any) -> None:  # noqa: ARG002
        self._at, self._id = at, handle_id

    def _end(self, error: KeyShardError) -> None:
        """Do nothing: it is not opened again by itself."""

    def _forget(self, at: WireConnection, handle_id: int) -> None:
        with suppress(BrokerUnavailableError):
            at.send("close_consumer", api.CloseConsumer(consumer_id=handle_id, request_id=0))

    def _refusal(self, action: str, refused: RefusedError) -> BrokerError:
        where = self.topic_partition
        return error_of(refused, action, where, where.topic, self._shared.credentials.who())


def _seek(start: MessageId | int, batch_size: int) -> Any:
    content = api.Seek(consumer_id=0, request_id=0)
    if isinstance(start, int):
        content.message_publish_time = start
        return content
    content.message_id.ledger, content.message_id.entry = start.ledger, start.entry
    if start.batch_index:
        content.message_id.ack_set.extend(_unacknowledged(start.batch_index, batch_size))
    return content


def _unacknowledged(first: int, stop: int) -> Sequence[int]:
    """Return the words of a bit set of the messages from ``first`` on, signed as Java has them."""
    bits = (1 << stop) - (1 << first)
    words = [bits >> shift & ((1 << _WORD) - 1) for shift in range(0, stop, _WORD)]
    return [word - (1 << _WORD) if word >> (_WORD - 1) else word for word in words]
