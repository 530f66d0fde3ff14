"""Reads the dead letters that match a filter: page by page, one by one, or only their positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keyshard.broker.admin.port import Admin
from keyshard.broker.topics import PARKED
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, parts_of
from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId
from keyshard.core.subscription_state import CursorState
from keyshard.dead_letters.parking import ParkedKeys
from keyshard.dead_letters.replay import DeadLetterReader
from keyshard.dead_letters.topic_scan import FIRST, dead_letter_of, position_of, read
from keyshard.errors import ConfigError

PAGE_BYTES_MAX = 8 * 1024 * 1024
"""Approximate maximum size of the values and keys of a page, bytes."""
PAGE_S = 2.0
"""Time after which a page ends, seconds, so that progress shows."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A dead letter, as the topic stores it."""

    position: EntryId
    """Its position in the dead-letter topic."""
    dead_letter: DeadLetter
    """Without content and properties of the original if they are in parts."""
    parts: tuple[EntryId, ...]
    """Positions of its parts."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some matching dead letters, in the order of the topic."""

    dead_letters: list[Stored]
    examined: int
    """Number of messages of the topic that were read."""
    next: EntryId | None
    """Where the next page begins; ``None``: this is the last page."""


class DeadLetterBrowser:
    """Reads dead letters, and changes nothing. Any thread may call it.

    Args:
        reader: Reads the dead-letter topic.
        keys: State of the parked keys.
        subscription: Subscription of the source.
        last: Returns the last stored position; ``None``: nothing is stored. A read ends there. A
            Reader that returns nothing proves no end of the topic.
        admin: Knows which rejected dead letters are discarded; ``None``: those are listed too,
            while they are stored.
    """

    def __init__(
        self,
        reader: DeadLetterReader,
        keys: ParkedKeys,
        subscription: str,
        last: Callable[[], EntryId | None],
        admin: Admin | None,
    ) -> None:
        self._reader = reader
        self._keys = keys
        self._subscription = subscription
        self._last = last
        self._admin = admin

    def page(
        self, wanted: DeadLetterFilter, start: EntryId | None = None, limit: int | None = None
    ) -> Page:
        """Read some matching dead letters.

        Args:
            wanted: The filter.
            start: Position to begin at; ``None``: the first page.
            limit: Maximum number of dead letters of the page; ``None``: no maximum.

        Raises:
            ReplayTimeoutError: Nothing came for ``replay_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        found: list[Stored] = []
        size = examined = 0
        until_s, before = 0.0, None
        for message, one in self._examined(wanted, start):
            position = position_of(message)
            until_s = until_s or time.monotonic() + PAGE_S
            is_full = len(found) == limit or size > PAGE_BYTES_MAX or time.monotonic() > until_s
            if is_full and before not in (None, position):
                return Page(found, examined, position)
            before = position
            examined += 1
            if one is not None:
                found.append(one)
                size += len(message.value or b"") + len(one.dead_letter.key or "")
        return Page(found, examined, None)

    def all(self, wanted: DeadLetterFilter) -> Iterator[DeadLetter]:
        """Yield matching dead letters, whole. While the caller takes them, no Reader is open.

        Raises:
            KeyShardError: As for :meth:`page` and :meth:`DeadLetterReader.whole`.
        """
        start: EntryId | None = None
        while True:
            page = self.page(wanted, start)
            for one in page.dead_letters:
                whole = self._whole(one)
                if whole is not None:
                    yield whole
            if page.next is None:
                return
            start = page.next

    def one(
        self, message_id: MessageId, topic: str | None = None, partition: int | None = None
    ) -> DeadLetter:
        """Read the dead letter of an original, whole.

        Args:
            message_id: Id of the original.
            topic: Topic of the original, to tell apart equal ids.
            partition: Topic partition of the original, likewise.

        Raises:
            ConfigError: There is none, or there are several.
            KeyShardError: As for :meth:`page` and :meth:`DeadLetterReader.whole`.
        """
        place = DeadLetterFilter(topic=topic)

        def is_wanted(one: Stored | None) -> bool:
            return (
                one is not None
                and one.dead_letter.message.message_id == message_id
                and place.matches_place(one.dead_letter.key, one.dead_letter.message.topic)
                and partition in (None, one.dead_letter.message.partition)
            )

        at = self._keys.positions_of(message_id)
        parked = (one for position in at for _, one in self._stretch(position, position, None))
        found = [one for one in parked if one is not None and is_wanted(one)]
        if not found:
            rejected = (one for _, one in self._examined(DeadLetterFilter(rejected=True)))
            found = [one for one in rejected if one is not None and is_wanted(one)]
        if len({one.dead_letter.topic_partition for one in found}) > 1:
            places = ", ".join(str(one.dead_letter.topic_partition) for one in found)
            raise ConfigError(
                f"Messages of several topic partitions have the id {message_id}: {places}.",
                "Name the topic and the partition.",
            )
        whole = self._whole(found[-1]) if found else None
        if whole is None:
            raise ConfigError(
                f"No dead letter of a message with the id {message_id} is stored.",
                "List the dead letters to see their ids.",
            )
        return whole

    def matching(self, wanted: DeadLetterFilter) -> dict[str, list[EntryId]]:
        """Return the positions of matching dead letters, by parked key; raises as :meth:`page`."""
        if not wanted.reads:
            return self._keys.matching(wanted)
        found: dict[str, list[EntryId]] = {}
        for _, one in self._examined(wanted):
            if one is not None and one.dead_letter.key is not None:
                found.setdefault(one.dead_letter.key, []).append(one.position)
        return found

    def rejected(self, wanted: DeadLetterFilter) -> list[Stored]:
        """Return matching rejected dead letters, without content; raises as :meth:`page`."""
        assert wanted.rejected
        return [
            Stored(one.position, one.dead_letter.without_content(), one.parts)
            for _, one in self._examined(wanted)
            if one is not None
        ]

    # -- reading ----------------------------------------------------------------------------------

    def _examined(
        self, wanted: DeadLetterFilter, start: EntryId | None = None
    ) -> Iterator[tuple[Message, Stored | None]]:
        """Yield the messages of the topic, each with its dead letter if that matches."""
        last = self._last()
        span = (FIRST, None) if wanted.rejected else self._keys.span(wanted.key)
        if last is None or span is None:
            return
        first, until = span
        begin, end = max(first, start or first), min(last, until or last)
        if begin <= end:
            yield from self._stretch(begin, end, wanted)

    def _stretch(
        self, first: EntryId, last: EntryId, wanted: DeadLetterFilter | None
    ) -> Iterator[tuple[Message, Stored | None]]:
        cursor = self._cursor() if wanted is not None and wanted.rejected else None
        now_ms = round(time.time() * 1000)
        newest: MessageId | None = None
        with self._reader.scan(first, last) as scan:
            for message in read(scan, self._reader.where, self._reader.timeout_s):
                position = position_of(message)
                if position > last:
                    return
                if newest is None or message.message_id > newest:  # a message may come twice
                    newest = message.message_id
                    one = self._stored(message, position, cursor)
                    age_ms = now_ms - round(message.publish_time.timestamp() * 1000)
                    if wanted is not None and one and not wanted.matches(one.dead_letter, age_ms):
                        one = None
                    yield message, one

    def _stored(
        self, message: Message, position: EntryId, cursor: CursorState | None
    ) -> Stored | None:
        """Return the dead letter of a message, if this source wrote it and it is not done."""
        found = dead_letter_of(message)
        if found is None or found.subscription != self._subscription:
            return None
        if found.kind is DeadLetterKind.PARKED:
            at = found.message.message_id
            if found.key is None:
                return None
            if self._keys.position(found.key, found.topic_partition, at) != position:
                return None
        elif cursor is not None and cursor.is_acknowledged(position):
            return None
        return Stored(position, found, tuple(parts_of(message)))

    def _cursor(self) -> CursorState | None:
        if self._admin is None:
            return None
        return self._admin.broker_state(self._reader.where, f"{self._subscription}{PARKED}")

    def _whole(self, one: Stored) -> DeadLetter | None:
        """Return a dead letter with its content; ``None`` if its parts are gone."""
        if not one.parts:
            return one.dead_letter
        for message, _ in self._stretch(one.position, one.position, None):
            return self._reader.whole(message)
        return None
