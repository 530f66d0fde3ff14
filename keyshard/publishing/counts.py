"""Counts of the messages that a sink has published, and of those without a confirmation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from keyshard.core.position.entry import TopicPartition
from keyshard.errors import KeyShardError

TOPICS_MAX = 100
"""Most topics that are named, in the order of their first message."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt to write a batch."""

    repeated: bool | None = None
    """Whether another attempt publishes the same rows, so that the failures of this one do not
    count; ``None`` while this one runs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries that were given to a producer at once."""

    at_s: float
    """Monotonic time, seconds."""
    ends: Sequence[int]
    """End of each entry, exclusive, in messages of the piece."""
    bytes: int
    sent: Sequence[Future[Any]]
    attempt: Attempt | None
    """``None`` for single messages."""


@dataclass(slots=True)
class Totals:
    """Counts since the sink connected, repeated attempts included."""

    published: int = 0
    """Messages."""
    confirmed: int = 0
    failed: int = 0
    already_stored: int = 0
    """Rows that an earlier attempt had stored."""
    entries: int = 0
    bytes: int = 0
    """Bytes of published messages, before compression."""
    batches: int = 0
    """Calls of ``write_batch`` that returned."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Messages without a confirmation."""

    messages: int = 0
    bytes: int = 0
    entries: int = 0
    """Entries that were published; messages that ``send`` collects are in none yet."""
    since_s: float | None = None
    """Monotonic time since when the oldest waits, seconds; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class Counts:
    """All counts at one moment."""

    totals: Totals
    pending: Pending
    topics: tuple[str, ...]
    newest_error: tuple[str, float] | None
    """Text and monotonic time, seconds."""


class SinkCounts:
    """Counts of one sink. Any thread may call its methods.

    A confirmation calls no method. :meth:`add` and :meth:`look` find the confirmed pieces, so an
    entry costs no call and no lock of its own.
    """

    def __init__(self) -> None:
        self.collected: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns messages and bytes that ``send`` collects."""
        self._lock = threading.Lock()
        self._totals = Totals()
        self._pieces: dict[TopicPartition, deque[Piece]] = {}
        """Pieces that may have unconfirmed entries. A producer has its confirmations in order."""
        self._topics: dict[str, None] = {}
        self._newest_error: tuple[str, float] | None = None

    def add(
        self,
        where: TopicPartition,
        ends: Sequence[int],
        size: int,
        sent: Sequence[Future[Any]],
        attempt: Attempt | None = None,
    ) -> None:
        """Count a piece that was published.

        Args:
            where: Its topic partition.
            ends: End of each entry, exclusive, in messages of the piece.
            size: Bytes of its messages.
            sent: The entries, in the same order.
            attempt: The attempt that published it; ``None`` for single messages.
        """
        piece = Piece(time.monotonic(), ends, size, sent, attempt)
        with self._lock:
            pieces = self._pieces.get(where)
            if pieces is None:
                pieces = self._pieces[where] = deque()
                if len(self._topics) < TOPICS_MAX:
                    self._topics[where.topic] = None
            self._settle(pieces)
            pieces.append(piece)
            totals = self._totals
            totals.published += ends[-1]
            totals.entries += len(sent)
            totals.bytes += size

    def note_batch(self, already_stored: int) -> None:
        """Count a batch that was written."""
        with self._lock:
            self._totals.batches += 1
            self._totals.already_stored += already_stored

    def note_error(self, error: KeyShardError) -> None:
        """Remember an error as the newest one."""
        found = error.message, time.monotonic()
        with self._lock:
            self._newest_error = found

    def look(self) -> Counts:
        """Return all counts."""
        messages, size = self.collected()
        entries, since_s = 0, None
        with self._lock:
            for where, pieces in [*self._pieces.items()]:
                self._settle(pieces)
                if not pieces:
                    # A sink may write to any number of topics.
                    del self._pieces[where]
                for piece in pieces:
                    entries += len(piece.sent)
                    messages += piece.ends[-1]
                    size += piece.bytes
                    since_s = piece.at_s if since_s is None else min(since_s, piece.at_s)
            totals = replace(self._totals)
            newest_error, topics = self._newest_error, tuple(self._topics)
        return Counts(totals, Pending(messages, size, entries, since_s), topics, newest_error)

    def _settle(self, pieces: deque[Piece]) -> None:
        """Count the pieces that are wholly confirmed or failed, and forget them.

        A failure waits until it is known whether its rows are published again.
        """
        while pieces and all(map(_is_done, pieces[0].sent)):
            piece = pieces[0]
            failed = sum(
                end - start
                for (start, end), one in zip(pairwise((0, *piece.ends)), piece.sent, strict=True)
                if one.exception() is not None
            )
            repeated = piece.attempt.repeated if piece.attempt is not None else False
            if failed and repeated is None:
                return
            pieces.popleft()
            self._totals.failed += 0 if repeated else failed
            self._totals.confirmed += piece.ends[-1] - failed


def _is_done(one: Future[Any]) -> bool:
    return one.done()
