"""Reads the resting letters of one key again, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from keyshard.broker.retry import retry_until
from keyshard.core.dead_letter.letters import Resting
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.letter_reader import LetterReader
from keyshard.dead_letter.reading import position_of, read
from keyshard.reading.replay import stretches

ASCENDING_MAX = 5_000
"""Most of the next letters that are looked at, to read some of them."""


class Replay:
    """Resting letters of one key, in order.

    Args:
        reader: Reads them.
        positions: Where they lie.
        lost: Told of those that are not stored any more; raises where that is not accepted.
    """

    def __init__(
        self,
        reader: LetterReader,
        positions: Sequence[EntryId],
        lost: Callable[[Sequence[EntryId]], None],
    ) -> None:
        self._reader = reader
        self._lost = lost
        self._positions = deque(positions)
        self._read: deque[Resting] = deque()

    def next(self) -> Resting | None:
        """The next letter; ``None`` after the last.

        Raises:
            DataLossTrimmedError: It is not stored any more; by ``fail_on_data_loss``.
            ReplayTimeoutError: It could not be read before ``replay_timeout_ms``.
        """
        timeout_s = self._reader.timeout_s
        while not self._read and self._positions:
            self._read.extend(retry_until(lambda: self._fill(timeout_s), timeout_s))
        return self._read.popleft() if self._read else None

    def _fill(self, timeout_s: float) -> list[Resting]:
        """Some of the next letters: those that another key's scan brought, else read now."""
        kept = self._kept()
        if kept:
            return kept
        with self._reader.reading(self._positions[0]):
            return self._kept() or self._scan(timeout_s)

    def _kept(self) -> list[Resting]:
        kept = self._reader.kept(self._positions)
        for _ in kept:
            self._positions.popleft()
        return kept

    def _scan(self, timeout_s: float) -> list[Resting]:
        stretch = next(stretches(EntrySet.of(self._ascending())))
        wanted = list(stretch)
        found: list[Resting] = []
        with self._reader.scan(wanted[0], wanted[-1]) as scan:
            where = self._reader.where
            for message in read(scan, where, timeout_s, lambda: bool(found)):
                position = position_of(message)
                if position not in stretch:
                    self._reader.came_by(position, message)
                elif (letter := self._reader.whole(message)) is not None:
                    found.append(Resting(position, letter))
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
        """The next positions, up to one that lies before the one that it follows."""
        before: EntryId | None = None
        for position in islice(self._positions, ASCENDING_MAX):
            if before is not None and position < before:
                return
            yield position
            before = position
