"""Reads dead letters back: stretches of the topic, and whole dead letters from their parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile

from keyshard.base_error import one_line
from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.core.dead_letter import DeadLetter, StoredDeadLetter, parts_of, unpacked
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letters.parking import ParkedKeys, ParkingState
from keyshard.dead_letters.topic_scan import dead_letter_of, position_of, read
from keyshard.errors import MalformedMessageError
from keyshard.reading.replay import stretches
from keyshard.reading.scan import Scan

NEAR_BYTES_MAX = 16 * 1024 * 1024
"""Maximum memory of cached dead letters, which scans for other keys read, bytes."""
NEAR_ENTRIES = 1_000
"""About how many entries a scan reads before it finds the first wanted one."""
DEAD_LETTER_BYTES = 1_000
"""Approximate memory of a dead letter besides its value, bytes."""


class DeadLetterReader:
    """Reads the dead-letter topic, and keeps dead letters of other keys that a scan reads.

    Args:
        broker: Connection to read through.
        where: The dead-letter topic.
        keys: State of the parked keys.
        timeout_s: Longest time without anything read, seconds.
    """

    def __init__(
        self, broker: Broker, where: TopicPartition, keys: ParkedKeys, timeout_s: float
    ) -> None:
        self.where = where
        self.timeout_s = timeout_s
        """Longest time to read the next dead letters of a replay, seconds."""
        self._broker = broker
        self._keys = keys
        self._scanned: list[EntryId] = []
        """First entries of the running scans."""
        self._near: dict[EntryId, DeadLetter] = {}
        self._near_bytes = 0

    def scan(self, start: EntryId, last: EntryId) -> Scan:
        """Make a scan of a stretch of the topic that skips unreadable entries."""
        return Scan(self._broker, self.where, start, last, unreadable={})

    def whole(self, message: Message) -> DeadLetter | None:
        """Return the dead letter of a message; ``None``: it has none, or its parts are gone.

        Raises:
            ReplayTimeoutError: Its parts could not be read within ``replay_timeout_ms``.
            MalformedMessageError: Its parts are not those of a dead letter.
        """
        dead_letter = dead_letter_of(message)
        parts = EntrySet() if dead_letter is None else parts_of(message)
        if dead_letter is None or not parts:
            return dead_letter
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
            return unpacked(dead_letter, message, b"".join(found[one] for one in parts))
        except (ValueError, AttributeError, RecursionError) as exc:
            raise MalformedMessageError(
                f"The dead letter {message.message_id} of key {dead_letter.key!r} in {self.where} "
                f"cannot be assembled from its parts: {one_line(exc)}. The key stays parked.",
                "Restore the parts, or discard the dead letters of the key with keyshard "
                "dead-letters discard.",
                key=dead_letter.key,
            ) from exc

    @contextmanager
    def reading(self, start: EntryId) -> Iterator[None]:
        """Register a scan from a position for the block. First wait for a scan that reads there.

        After such a wait, the block finds the dead letters that the other scan read in
        :meth:`cached`.
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
        """Keep a dead letter that was read for another key, if its own key is being unparked."""
        with self._keys.lock:
            key = message.routing_key
            if key is None or self._keys.parking.state(key) in (None, ParkingState.PARKED):
                return
            parked = self._keys.parking.parked.keys.get(key)
            found = dead_letter_of(message)
            if parked is None or position in self._near or found is None or parts_of(message):
                return
            if parked.position(found.topic_partition, found.message.message_id) != position:
                return
            self._near[position] = found
            self._near_bytes += _bytes(found)
            while self._near_bytes > NEAR_BYTES_MAX:
                self._near_bytes -= _bytes(self._near.pop(next(iter(self._near))))

    def cached(self, positions: Iterable[EntryId]) -> list[StoredDeadLetter]:
        """Return the cached dead letters of a replay, up to the first one that is not cached."""
        found: list[StoredDeadLetter] = []
        with self._keys.lock:
            for position in positions:
                dead_letter = self._near.pop(position, None)
                if dead_letter is None:
                    break
                self._near_bytes -= _bytes(dead_letter)
                found.append(StoredDeadLetter(position, dead_letter))
        return found


def _bytes(dead_letter: DeadLetter) -> int:
    return len(dead_letter.message.value or b"") + DEAD_LETTER_BYTES


# -- Replays the resting dead letters of one key, in order -----------------------------------------

ASCENDING_MAX = 5_000
"""Maximum number of the next positions that are examined for one scan."""


class Replay:
    """Resting dead letters of one key, in order.

    Args:
        reader: Reads them.
        positions: Their positions.
        lost: Called with positions that are no longer stored; raises if that is not accepted.
    """

    def __init__(
        self,
        reader: DeadLetterReader,
        positions: Sequence[EntryId],
        lost: Callable[[Sequence[EntryId]], None],
    ) -> None:
        self._reader = reader
        self._lost = lost
        self._positions = deque(positions)
        self._read: deque[StoredDeadLetter] = deque()

    def next(self) -> StoredDeadLetter | None:
        """Return the next dead letter; ``None`` after the last.

        Raises:
            DataLossTrimmedError: It is no longer stored, and ``fail_on_data_loss`` is true.
            ReplayTimeoutError: It could not be read within ``replay_timeout_ms``.
        """
        timeout_s = self._reader.timeout_s
        while not self._read and self._positions:
            self._read.extend(retry_until(lambda: self._fill(timeout_s), timeout_s))
        return self._read.popleft() if self._read else None

    def _fill(self, timeout_s: float) -> list[StoredDeadLetter]:
        """Return some of the next dead letters: cached by another scan, or else read now."""
        cached = self._cached()
        if cached:
            return cached
        with self._reader.reading(self._positions[0]):
            return self._cached() or self._scan(timeout_s)

    def _cached(self) -> list[StoredDeadLetter]:
        cached = self._reader.cached(self._positions)
        for _ in cached:
            self._positions.popleft()
        return cached

    def _scan(self, timeout_s: float) -> list[StoredDeadLetter]:
        stretch = next(stretches(EntrySet.of(self._ascending())))
        wanted = list(stretch)
        found: list[StoredDeadLetter] = []
        with self._reader.scan(wanted[0], wanted[-1]) as scan:
            where = self._reader.where
            for message in read(scan, where, timeout_s, lambda: bool(found)):
                position = position_of(message)
                if position not in stretch:
                    self._reader.came_by(position, message)
                elif (dead_letter := self._reader.whole(message)) is not None:
                    found.append(StoredDeadLetter(position, dead_letter))
        have = {one.position: one for one in found}
        ready = [have[one] for one in takewhile(have.__contains__, wanted)]
        if not ready:
            until = found[0].position if found else None
            missing = [one for one in wanted if until is None or one < until]
            self._lost(missing)
        for _ in ready or missing:
            self._positions.popleft()
        return ready

    def _ascending(self) -> Iterator[EntryId]:
        """Yield the next positions while they ascend."""
        before: EntryId | None = None
        for position in islice(self._positions, ASCENDING_MAX):
            if before is not None and position < before:
                return
            yield position
            before = position
