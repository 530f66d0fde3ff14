"""Reads consecutive entries of a closed ledger from its bookies, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.protocol import (
    BATCH_BYTES,
    NOT_ADMITTED,
    REASONS,
    TOO_MANY_REQUESTS,
    answer_of,
    right_at,
    stored_at,
)
from keyshard.broker.framing import ProtocolError
from keyshard.broker.wire.entries import RawEntry
from keyshard.core.position.entry import entry_id_of
from keyshard.core.position.replicas import LedgerReplicas

AHEAD_MIN, AHEAD_MAX = 10, 500
"""Fewest and most entries that are requested ahead. By default, a bookie refuses more than 2,500
reads that wait on a thread, which tasks and brokers share."""
GATHER_S = 0.02
"""Longest wait for more entries if the next ones have arrived, seconds."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.01, 0.5
"""First and longest pause if bookies have too many requests, seconds."""
BUSY_S = 10.0
"""Time without an entry after which bookies with too many requests are not asked again, seconds."""
SPREAD = 250
"""Consecutive entries that are requested of one bookie, before the next one gets requests."""
BATCH_MAX = 125
"""Most entries of a batch read."""
STEP_BYTES = 1024 * 1024
"""Size of the next entries from which on more are not waited for, bytes. Bookies return others
while these are decoded."""

_log = logging.getLogger(__name__)


class EntryNotReadError(Exception):
    """No bookie returned an entry. The text says why."""


class LedgerReader:
    """Reads entries of one ledger.

    Args:
        replicas: The ledger, and the bookies of its entries.
        first: First entry to read.
        last: Last entry to read, at most the last of the ledger.
        bookies: Connections; no other reader may wait for answers on them.
        bytes_max: Memory for entries that are requested ahead, bytes. If those that have arrived
            take more, the others wait in the sockets of their bookies.
    """

    def __init__(
        self, replicas: LedgerReplicas, first: int, last: int, bookies: Bookies, bytes_max: int
    ) -> None:
        self._replicas = replicas
        self._bookies = bookies
        self.last = min(last, replicas.last)
        """Last entry to read."""
        self._bytes_max = bytes_max
        self._ahead = AHEAD_MIN
        self._ahead_max = AHEAD_MAX
        self._batch = AHEAD_MIN
        """Most entries of a batch read: fewer than it returns by their average size, because an
        answer that leaves some out costs another turn."""
        self._pause_s = PAUSE_MIN_S
        self._arrival_s = time.monotonic()
        self._busy: set[int] = set()
        """Entries that a bookie with too many requests refused."""
        self._again: list[int] = []
        """Entries that are not requested now, because all their bookies have too many requests."""
        self._next = self._requested_to = self._whole_to = first
        # Entries before _requested_to are requested, and those before _whole_to have arrived.
        self._waiting: dict[int, int] = {}
        """Entries without an answer: how many of their bookies were asked."""
        self._arrived: dict[int, RawEntry] = {}
        self._arrived_bytes = 0
        self._whole_bytes = 0
        """Size of the arrived entries before ``_whole_to``."""
        self._refused: dict[int, str] = {}
        """Why a bookie did not return an entry that others are asked for."""
        self._unread: dict[int, str] = {}
        """Entries that no bookie returned, and why the last of them did not."""

    @property
    def done(self) -> bool:
        """Whether all entries were returned."""
        return self._next > self.last

    def read(self) -> list[RawEntry]:
        """Return the next entries, in order; at least one, until :attr:`done`.

        Raises:
            EntryNotReadError: No bookie returned the next entry. The next call raises it again.
        """
        if self.done:
            return []
        self._request_ahead()
        while not self._has_enough():
            if self._next in self._unread:
                raise EntryNotReadError(self._unread[self._next])
            if self._again:
                self._ask_again()
                continue
            wait_s = GATHER_S if self._whole_to > self._next else None
            for name, frames in self._bookies.receive(self._only(), wait_s):
                self._take(name, frames)
            if lost := self._bookies.lost():
                self._ask(lost)
        found = list(map(self._arrived.pop, range(self._next, self._whole_to)))
        self._next = self._whole_to
        size = max(1, self._whole_bytes // len(found))
        self._arrived_bytes -= self._whole_bytes
        self._whole_bytes = 0
        self._ahead_max = min(self._ahead_max + AHEAD_MIN, AHEAD_MAX)
        self._ahead = min(max(self._bytes_max // size, AHEAD_MIN), self._ahead_max)
        self._batch = min(max(BATCH_BYTES * 3 // 4 // size, 1), BATCH_MAX)
        return found

    def _has_enough(self) -> bool:
        """Return whether enough of the next entries have arrived, so that a step is worth it.

        That is half of those that are requested ahead: bookies return the others meanwhile. Fewer
        are enough if no more come at once, at the end, if one cannot be read yet, if they are
        large, or if all that have arrived take half of the memory.
        """
        before = end = self._whole_to
        while (one := self._arrived.get(end)) is not None:
            self._whole_bytes += len(one.data)
            end += 1
        self._whole_to = end
        if end == self._next:
            return False
        return (
            end == before
            or end - self._next >= self._ahead // 2
            or end == self._requested_to
            or bool(self._unread)
            or bool(self._again)
            or self._whole_bytes >= STEP_BYTES
            or 2 * self._arrived_bytes > self._bytes_max
        )

    def _only(self) -> str | None:
        """Return the bookie that owes the next entry, if there is no memory for those of others."""
        if self._arrived_bytes <= self._bytes_max:
            return None
        names, asked = self._replicas.bookies_of(self._next), self._waiting.get(self._next, 0)
        if not asked:
            return None
        return names[(self._next // SPREAD - self._next + asked - 1) % len(names)]

    def _request_ahead(self) -> None:
        """Request more entries, in groups that are spread over their bookies."""
        while self._requested_to <= min(self.last, self._next + self._ahead - 1):
            start = self._requested_to
            end = min(start - start % SPREAD + SPREAD, self._next + self._ahead, self.last + 1)
            self._requested_to = end
            self._ask_first(start, end)

    def _ask_first(self, start: int, end: int) -> None:
        """Request entries of one group for the first time; as :meth:`_ask`, but faster."""
        replicas, group = self._replicas, range(start, end)
        if len(replicas.ensembles) > 1 or self._bookies.failed:
            self._ask(group)
            return
        # The first bookie to ask repeats after so many entries.
        period = len(replicas.ensembles[0][1]) * replicas.write_quorum
        asked: dict[str, list[int]] = {}
        for first in group[:period]:
            names = replicas.bookies_of(first)
            name = names[(first // SPREAD - first) % len(names)]
            asked.setdefault(name, []).extend(range(first, end, period))
        self._waiting.update(dict.fromkeys(group, 1))
        for name, entries in asked.items():
            self._bookies.request(name, replicas.ledger, sorted(entries), self._batch)

    def _ask(self, entries: Iterable[int]) -> None:
        """Request entries of the next of their bookies that may be asked."""
        groups: dict[str, list[int]] = {}
        for entry in entries:
            names = self._replicas.bookies_of(entry)
            asked, turn = self._waiting.get(entry, 0), entry // SPREAD - entry
            while asked < len(names):
                name = names[(turn + asked) % len(names)]
                asked += 1
                if name not in self._bookies.failed:
                    groups.setdefault(name, []).append(entry)
                    self._waiting[entry] = asked
                    break
            else:
                self._waiting.pop(entry, None)
                if entry in self._busy:
                    self._busy.discard(entry)
                    self._again.append(entry)
                    continue
                failed = [f"{name}: {why}" for name, why in self._bookies.failed.items()]
                self._unread[entry] = self._refused.pop(entry, "") or "; ".join(failed)
        for name, group in groups.items():
            self._bookies.request(name, self._replicas.ledger, sorted(group), self._batch)

    def _ask_again(self) -> None:
        """Take more answers, or pause if none are due; then request some entries again."""
        if self._waiting:
            before = len(self._arrived)
            for name, frames in self._bookies.receive():
                self._take(name, frames)
            self._ask(self._bookies.lost())
            if len(self._arrived) == before:
                return
        elif time.monotonic() - self._arrival_s > BUSY_S:
            self._unread.update((one, self._refused.pop(one)) for one in self._again)
            self._again.clear()
        else:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        room = max(0, max(AHEAD_MIN, self._ahead_max // 2) - len(self._waiting))
        again = sorted(self._again)
        self._again = again[room:]
        self._ask(again[:room])

    def _take(self, name: str, frames: Sequence[bytes]) -> None:
        """Accept answers, and ask other bookies for refused or damaged entries.

        A bookie that breaks the protocol, or does not admit this client, is given up.
        """
        ledger, digest = self._replicas.ledger, self._replicas.digest
        slowed, is_fast, before = False, digest == "CRC32C", len(self._arrived)
        owed, arrived, waiting = self._bookies.owed(name), self._arrived, self._waiting
        for frame in frames:
            if is_fast and (right := right_at(frame, ledger)) and right[0] in owed:
                entry, position = right
                owed.remove(entry)
                del waiting[entry]
                self._arrived_bytes += len(frame)
                arrived[entry] = RawEntry(entry_id_of((ledger, entry)), frame, position)
                continue
            try:
                entry, code = answer_of(frame, ledger)
            except ProtocolError as exc:
                self._bookies.give_up(name, f"it sent {exc}")
                return
            if entry not in owed:
                self._bookies.give_up(name, "it sent an entry that was not requested")
                return
            if code == NOT_ADMITTED:
                self._bookies.give_up(name, REASONS[code])
                return
            owed.remove(entry)
            try:
                if code:
                    raise ProtocolError(REASONS.get(code, f"error {code}"))
                position = stored_at(frame, ledger, entry, digest)
            except ProtocolError as exc:
                level = logging.WARNING
                if code == TOO_MANY_REQUESTS:
                    self._busy.add(entry)
                    level = logging.DEBUG
                    if not slowed:
                        slowed, self._ahead_max = True, max(AHEAD_MIN, self._ahead_max // 2)
                _log.log(level, "Bookie %s gave no entry %d:%d: %s.", name, ledger, entry, exc)
                self._refused[entry] = f"{name}: {exc}"
                self._ask((entry,))
                owed = self._bookies.owed(name)  # empty if _ask() gave the bookie up
                continue
            del waiting[entry]
            self._arrived_bytes += len(frame)
            arrived[entry] = RawEntry(entry_id_of((ledger, entry)), frame, position)
        if len(arrived) > before:
            self._arrival_s, self._pause_s = time.monotonic(), PAUSE_MIN_S
