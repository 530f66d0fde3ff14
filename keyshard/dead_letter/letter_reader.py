"""Reads dead letters back: a stretch of the topic, and whole letters from their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from keyshard.broker.port import Broker
from keyshard.core.dead_letter.letters import Letter, Resting, parts_of, unpacked
from keyshard.core.dead_letter.parking import State
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.parked_keys import ParkedKeys
from keyshard.dead_letter.reading import letter_of, position_of, read
from keyshard.errors import MalformedMessageError
from keyshard.reading.replay import stretches
from keyshard.reading.scan import Scan

NEAR_BYTES_MAX = 16 * 1024 * 1024
"""Most memory of letters that were read beside those of another key, bytes."""
NEAR_ENTRIES = 1_000
"""About how many entries a scan reads until it has the first that is asked for."""
LETTER_BYTES = 1_000
"""About what a letter takes beside its value, bytes."""


class LetterReader:
    """Readers of the dead-letter topic, and what they brought beside what was asked for.

    Args:
        broker: Connection to read through.
        where: The dead-letter topic.
        keys: Which letters rest.
        timeout_s: Longest time without anything read, seconds.
    """

    def __init__(
        self, broker: Broker, where: TopicPartition, keys: ParkedKeys, timeout_s: float
    ) -> None:
        self.where = where
        self.timeout_s = timeout_s
        """Longest time to read the next letters of a replay, seconds."""
        self._broker = broker
        self._keys = keys
        self._scanned: list[EntryId] = []
        """First entries of the scans that run now."""
        self._near: dict[EntryId, Letter] = {}
        self._near_bytes = 0

    def scan(self, start: EntryId, last: EntryId) -> Scan:
        """Reads a stretch of the dead-letter topic; what cannot be read is no letter."""
        return Scan(self._broker, self.where, start, last, unreadable={})

    def whole(self, message: Message) -> Letter | None:
        """The letter that a message of the topic is; ``None`` when it is none, or parts are gone.

        Raises:
            ReplayTimeoutError: Its parts could not be read before ``replay_timeout_ms``.
            MalformedMessageError: Its parts are not those of a letter.
        """
        letter = letter_of(message)
        parts = EntrySet() if letter is None else parts_of(message)
        if letter is None or not parts:
            return letter
        found: dict[EntryId, bytes] = {}
        for stretch in stretches(parts):
            first, last = stretch.first, stretch.last
            assert first is not None
            assert last is not None
            with self.scan(first, last) as scan:
                for one in read(scan, self.where, self.timeout_s):
                    found[position_of(one)] = one.value or b""
        if any(one not in found for one in parts):
            return None
        try:
            return unpacked(letter, message, b"".join(found[one] for one in parts))
        except (ValueError, AttributeError, RecursionError) as exc:
            raise MalformedMessageError(
                f"The dead letter {message.message_id} of key {letter.key!r} in {self.where} "
                f"cannot be put together from its parts: {exc}. The key stays parked. Restore the "
                "parts, or give its letters up with keyshard discard.",
                key=letter.key,
            ) from exc

    @contextmanager
    def reading(self, start: EntryId) -> Iterator[None]:
        """Read from a position on; first waits for a scan that reads there, too, for another key.

        :meth:`kept` has the letters of that scan afterwards.
        """

        def is_read() -> bool:
            return any(
                one.ledger == start.ledger and 0 <= start.entry - one.entry < NEAR_ENTRIES
                for one in self._scanned
            )

        with self._keys.lock:
            self._keys.lock.wait_for(lambda: not is_read(), self.timeout_s)
            self._scanned.append(start)
        try:
            yield
        finally:
            with self._keys.lock:
                self._scanned.remove(start)
                self._keys.lock.notify_all()

    def came_by(self, position: EntryId, message: Message) -> None:
        """Keep a letter that was read for another key, if its own key is on its way out, too."""
        with self._keys.lock:
            key = message.routing_key
            if key is None or self._keys.parking.state(key) in (None, State.PARKED):
                return
            parked = self._keys.parking.parked.keys.get(key)
            found = letter_of(message)
            if parked is None or position in self._near or found is None or parts_of(message):
                return
            if parked.position(found.topic_partition, found.message.message_id) != position:
                return
            self._near[position] = found
            self._near_bytes += _bytes(found)
            while self._near_bytes > NEAR_BYTES_MAX:
                self._near_bytes -= _bytes(self._near.pop(next(iter(self._near))))

    def kept(self, positions: Iterable[EntryId]) -> list[Resting]:
        """What was kept of the next letters of a replay, without a gap."""
        found: list[Resting] = []
        with self._keys.lock:
            for position in positions:
                letter = self._near.pop(position, None)
                if letter is None:
                    break
                self._near_bytes -= _bytes(letter)
                found.append(Resting(position, letter))
        return found


def _bytes(letter: Letter) -> int:
    return len(letter.message.value or b"") + LETTER_BYTES
