"""What the threads of a job share: rows that wait, results that wait, and how the job ends.

Every method may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keyshard.core.window.layout import Located
from keyshard.errors import DrainTimeoutError, NotRunningError
from ray_adapter.portions import Entries, Piece, Waiting, entries_done

UNTAKEN_MAX = 2
"""Calls of an actor whose results the caller has not taken, with the one that runs."""
BYTES_MAX = 64 * 1024 * 1024
"""Content of one call of an actor, unless one entry has more, bytes."""
CALLS_SHARE = 4
"""All calls at a time copy at most the window divided by this, for each copy that they make."""
LOOK_S = 0.2
"""Longest sleep between two looks at what is waited for, seconds."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Seat:
    """The place of one actor: its part of the ring, and what it does."""

    index: int
    actor: Any
    pieces: Sequence[Piece] = ()
    """What the actor works on."""
    since_s: float = 0.0
    """When it got that."""
    untaken: int = 0
    """Calls whose results the caller has not taken, with the one that runs."""
    deaths: int = 0
    rows: int = 0
    """Rows handled."""
    retired: bool = False
    """Nothing more is given to it, after a rescale."""


@dataclass(eq=False)
class Done:
    """Results of a call, and the entries that are done when they are taken."""

    seat: Seat
    pieces: Sequence[Piece]
    results: Sequence[Any]
    """In order: one for each row, or one for all rows."""


class Exchange:
    """Rows wait here for actors, and results for the caller.

    Args:
        seats: One for each actor.
        max_rows: Most rows of a call.
        max_wait_s: Longest wait of an idle actor for more rows after the first, seconds.
        window_bytes_max: What the window of the source holds, bytes.
    """

    def __init__(
        self, seats: Sequence[Seat], max_rows: int, max_wait_s: float, window_bytes_max: int
    ) -> None:
        self.changed = threading.Condition()
        self.seats = list(seats)
        self.waiting = Waiting(len(seats))
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._window_bytes_max = window_bytes_max
        self._done: deque[Done] = deque()
        self._to_commit: Entries = {}
        self._held = False
        self.stopping = False
        self.drain_until_s: float | None = None
        self.error: BaseException | None = None
        self._told = False

    # -- how it ends -------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether no more rows are given to actors."""
        return self.stopping or self.drain_until_s is not None or self.error is not None

    def stop(self) -> None:
        """Whoever waits here ends."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Actors end what they work on, and are given nothing more."""
        with self.changed:
            if self.drain_until_s is None:
                self.drain_until_s = time.monotonic() + timeout_s
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Something ends the job; the first counts."""
        with self.changed:
            if self.error is None:
                self.error = error
            else:
                _log.error("this happened after the job had failed: %s", error)
            self.changed.notify_all()

    def tell(self) -> None:
        """Raise what ended the job, to the first who asks."""
        with self.changed:
            error = None if self._told else self.error
            self._told = True
        if error is not None:
            raise error

    # -- rows --------------------------------------------------------------------------------------

    def push(self, located: Sequence[Located]) -> None:
        """Entries were received."""
        with self.changed:
            self.waiting.push(located, time.monotonic())
            self.changed.notify_all()

    def next_rows(self, seat: Seat) -> Sequence[Piece]:
        """Rows for an actor, which works on them from now on; none at the end of its time."""
        with self.changed:
            while not (self.ending or seat.retired):
                wait_s = self._until_rows_s(seat)
                if wait_s <= 0:
                    seat.pieces = self.waiting.pop(seat.index, self._max_rows, self._bytes_max)
                    seat.since_s = time.monotonic()
                    seat.untaken += 1
                    return seat.pieces
                self.changed.wait(wait_s)
            return ()

    @property
    def _bytes_max(self) -> int:
        """Content of a call: a call copies what remains in the window."""
        return min(BYTES_MAX, self._window_bytes_max // (CALLS_SHARE * len(self.seats)))

    def _until_rows_s(self, seat: Seat) -> float:
        rows = self.waiting.rows[seat.index]
        if self._held or not rows or seat.untaken >= UNTAKEN_MAX:
            return LOOK_S
        if rows >= self._max_rows:
            return 0.0
        left_s = self.waiting.since_s[seat.index] + self._max_wait_s - time.monotonic()
        return min(LOOK_S, left_s)

    def interrupted(self) -> bool:
        """Whether an actor that is between two calls leaves the rest of its rows."""
        return self._held or self.ending

    def pause(self, seconds: float) -> None:
        """Wait, unless :meth:`interrupted`."""
        with self.changed:
            self.changed.wait_for(self.interrupted, seconds)

    def deliver(self, seat: Seat, done: Done, rest: Sequence[Piece]) -> None:
        """The results of some rows are there; the others wait again, before all others."""
        with self.changed:
            if done.pieces:
                self._done.append(done)
                seat.rows += sum(piece.block.rows for piece in done.pieces)
            else:
                seat.untaken -= 1
            self.waiting.give_back(seat.index, rest)
            seat.pieces = ()
            self.changed.notify_all()

    def hold(self, timeout_s: float) -> None:
        """Give actors nothing until :meth:`go_on`, and wait until they end what they have.

        Raises:
            DrainTimeoutError: They did not in time; everything goes on as before.
            NotRunningError: The job ends.
        """
        with self.changed:
            self._held = True
            self.changed.notify_all()
            idle = self.changed.wait_for(lambda: self.ending or not self.working, timeout_s)
            if idle and not self.ending:
                return
            self._held = False
            self.changed.notify_all()
            if self.ending:
                raise NotRunningError("The job ends, so it is not rescaled.")
            raise DrainTimeoutError(
                f"{self.working} actors did not end what they work on within {timeout_s:g} s, so "
                "nothing has changed."
            )

    def go_on(self, seats: Sequence[Seat]) -> None:
        """After :meth:`hold`: these share the ring from now on."""
        with self.changed:
            for seat in set(self.seats) - set(seats):
                seat.retired = True
            self.seats = list(seats)
            self.waiting = self.waiting.split_anew(len(seats), time.monotonic())
            self._held = False
            self.changed.notify_all()

    @property
    def working(self) -> int:
        """Actors that have rows."""
        return sum(1 for seat in self.seats if seat.pieces)

    # -- results -----------------------------------------------------------------------------------

    def next_done(self) -> Done | None:
        """Results that came first; ``None`` when there will be no more.

        Raises:
            DrainTimeoutError: Actors did not end what they work on before the deadline of a drain.
        """
        with self.changed:
            while not self.stopping:
                if self._done:
                    return self._done.popleft()
                if self.error is not None:
                    return None
                if self.drain_until_s is not None:
                    if not self.working:
                        return None
                    if time.monotonic() > self.drain_until_s:
                        raise DrainTimeoutError(
                            f"{self.working} actors did not end what they work on before the "
                            "deadline of the drain. It is not acknowledged, and comes again."
                        )
                self.changed.wait(LOOK_S)
            return None

    def taken(self, done: Done, pieces: Sequence[Piece]) -> None:
        """The caller took the results of a call, or of its first rows and will take no others."""
        with self.changed:
            done.seat.untaken -= 1
            for where, ids in entries_done(pieces).items():
                self._to_commit.setdefault(where, []).extend(ids)
            self.changed.notify_all()

    def next_to_commit(self) -> Entries:
        """Entries whose results were taken; none when the job stops and there are no more."""
        with self.changed:
            while not (self._to_commit or self.stopping):
                self.changed.wait(LOOK_S)
            entries, self._to_commit = self._to_commit, {}
            return entries
