"""Reads the resting letters of one key again, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from keyshard.broker.retry import retry_until
from keyshard.core.dead_letter.letters import Resting
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.reading import position_of, read
from keyshard.reading.replay import stretches

if TYPE_CHECKING:
    from keyshard.dead_letter.dead_letters import DeadLetters

ASCENDING_MAX = 5_000
"""Most of the next letters that are looked at, to read some of them."""


class Replay:
    """Resting letters of one key, in order; made by :meth:`DeadLetters.replay`."""

    def __init__(self, letters: DeadLetters, key: str, positions: Sequence[EntryId]) -> None:
        self._letters = letters
        self._key = key
        self._positions = deque(positions)
        self._read: deque[Resting] = deque()

    def next(self) -> Resting | None:
        """The next letter; ``None`` after the last.

        Raises:
            DataLossTrimmedError: It is not stored any more; by ``fail_on_data_loss``.
            ReplayTimeoutError: It could not be read before ``replay_timeout_ms``.
        """
        timeout_s = self._letters.replay_timeout_s
        while not self._read and self._positions:
            self._read.extend(retry_until(lambda: self._fill(timeout_s), timeout_s))
        return self._read.popleft() if self._read else None

    def _fill(self, timeout_s: float) -> list[Resting]:
        """Read some of the next letters."""
        kept = self._letters.kept(self._positions)
        if kept:
            for _ in kept:
                self._positions.popleft()
            return kept
        stretch = next(stretches(EntrySet.of(self._ascending())))
        wanted = list(stretch)
        found: list[Resting] = []
        with self._letters.scan(wanted[0], wanted[-1]) as scan:
            where = self._letters.topic_partition
            for message in read(scan, where, timeout_s, lambda: bool(found)):
                position = position_of(message)
                if position not in stretch:
                    self._letters.came_by(position, message)
                elif (letter := self._letters.whole(message)) is not None:
                    found.append(Resting(position, letter))
        have = {one.position: one for one in found}
        ready = [have[one] for one in takewhile(have.__contains__, wanted)]
        if not ready:
            until = found[0].position if found else None
            missing = [one for one in wanted if until is None or one < until]
            self._letters.lost(self._key, missing)
        for _ in ready or missing:
            self._positions.popleft()
        return ready

    def _ascending(self) -> Iterator[EntryId]:
        """The next positions, up to one that lies before the one that it follows."""
        before: EntryId | None = None
        for position in islice(self._positions, ASCENDING_MAX):
            if before is not None and position < before:
                return
            yield position
            before = position
