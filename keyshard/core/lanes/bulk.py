"""Bulks: if handlers return at once, one thread or task handles the messages of several entries.

In a lane, a message is queued by its key, handed to a thread, and its result is taken. This costs
several times as much as a handler that does nothing. While no message is in a lane and no handler
takes long, received entries are not queued. One thread or task gets the messages of several entries
as a *bulk*, handles them in the order of receipt, and completes the entries together. So the order
of every key is kept.

A bulk can be taken apart between any two of its messages: those that have not started, and the one
that runs, go to the lanes, as do all entries after them. The thread of the bulk takes messages from
the left of a deque, and the thread that takes the bulk apart takes them from the right. Both are
atomic, so no lock is needed between two messages. A coroutine that waits takes its bulk apart.

Arrivals are not thread-safe otherwise: their owner calls them under the lock of the lanes. Time is
an argument, in seconds of any clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub

from keyshard.core.lanes.key_queue import Arrival, Work
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message

BULK_ROWS = 256
"""Messages at which a bulk gets no further entry."""
FAST_S = 50e-6
"""Duration of a handler that returns at once, and longest mean for bulks, seconds. A handler that
waits longer runs sooner in lanes, where others run meanwhile."""
SLOW_SHARE_MAX = 0.02
"""Largest share of longer durations. Some handlers wait for the interpreter."""
COUNTED_MIN = 32
"""Fewest attempts that show how long handlers take."""
COUNTED_MAX = 1_024
"""Number of attempts at which older ones lose half of their weight."""
HANGS_S = 0.01
"""Duration of a running handler at which its bulk is taken apart, seconds."""
REST_S = 0.1
"""Time without bulks after one was taken apart because a handler took long, seconds. It doubles
each time, up to ``REST_MAX_S``, unless as long a time without such a handler follows."""
REST_MAX_S = 60.0


@dataclass(slots=True, eq=False)
class Bulk:
    """Messages of some entries, which one thread or task handles one after the other."""

    entries: list[Arrival]
    todo: deque[Message]
    """Messages that have not started; the thread takes them from the left."""
    began_s: float
    """Time at which the first message started."""
    messages: list[Message] = field(default_factory=list)
    """All messages; after the bulk is taken apart, those that are done."""
    ends: list[float] = field(default_factory=list)
    """Times at which handlers returned."""
    late: dict[int, float] = field(default_factory=dict)
    """Starts of messages that did not start when the handler of the previous one returned."""
    apart: bool = False
    """Whether it was taken apart: the rest of its messages is in lanes."""
    work: Work | None = None
    """The message that ran when it was taken apart; ``None`` if none did."""

    def rest(self) -> None:
        """Record that no message runs until :meth:`go_on`."""
        self.late[len(self.ends)] = math.inf

    def go_on(self, now_s: float) -> None:
        """Record that the next message starts now, after :meth:`rest`."""
        self.late[len(self.ends)] = now_s

    def start_of(self, number: int) -> float:
        """Return the start of a message; infinity if it is the next one during a rest."""
        before_s = self.ends[number - 1] if number else self.began_s
        return self.late.get(number, before_s)

    def running_since_s(self) -> float:
        """Return the start of the message that runs."""
        return self.start_of(len(self.ends))

    def durations(self) -> list[float]:
        """Return the durations of the messages that are done, seconds."""
        ends = self.ends[: len(self.messages)]
        durations = list(map(sub, ends, [self.began_s, *ends]))
        # If the bulk was just taken apart, its task may add to ``late`` meanwhile: copy it.
        for number, start_s in list(self.late.items()):
            if number < len(ends):
                durations[number] = ends[number] - start_s
        return durations


class Arrivals:
    """Received entries that are not in lanes yet, and the bulk that a thread handles now.

    All their messages are newer than those in lanes.

    Args:
        lanes: Gets their messages when they are distributed.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._entries: deque[Arrival] = deque()
        self.rows = 0
        """Messages of entries that are in no bulk."""
        self.bulk: Bulk | None = None
        """The bulk that is handled now; at most one."""

    def __bool__(self) -> bool:
        return bool(self._entries) or self.bulk is not None

    def add(self, arrival: Arrival) -> None:
        """Append a received entry."""
        self._entries.append(arrival)
        self.rows += len(arrival.messages)

    def start(self, now_s: float) -> Bulk | None:
        """Start a bulk of the oldest entries.

        Returns:
            The bulk; ``None`` if a message is in a lane or in another bulk, or no entry waits.
        """
        if self.bulk is not None or not self._entries or not self._lanes.empty:
            return None
        bulk = Bulk([], deque(), now_s)
        while self._entries and len(bulk.messages) < BULK_ROWS:
            arrival = self._entries.popleft()
            bulk.entries.append(arrival)
            bulk.messages += arrival.messages
        bulk.todo.extend(bulk.messages)
        self.rows -= len(bulk.messages)
        self.bulk = bulk
        return bulk

    def finish(self, bulk: Bulk) -> None:
        """Complete all entries of a bulk that was not taken apart."""
        assert bulk is self.bulk, "a bulk ends once"
        self.bulk = None
        for arrival in bulk.entries:
            self._lanes.passed(arrival)

    def distribute(self) -> Bulk | None:
        """Queue every message by its key, and take a bulk apart; return that bulk.

        Afterwards its ``messages`` are those that are done, and ``work`` is the one that runs.
        """
        bulk, self.bulk = self.bulk, None
        if bulk is not None:
            self._take_apart(bulk)
        while self._entries:
            self._lanes.add(*self._entries.popleft())
        self.rows = 0
        return bulk

    def _take_apart(self, bulk: Bulk) -> None:
        left = 0
        try:
            while True:
                bulk.todo.pop()
                left += 1
        except IndexError:
            pass
        bulk.apart = True
        begun = len(bulk.messages) - left
        # A message starts after the one before it ended, so only the last one may run.
        done = max(0, begun - 1)
        del bulk.messages[done:]
        since_s = bulk.start_of(done)
        for arrival in bulk.entries:
            rows = len(arrival.messages)
            if done >= rows:
                self._lanes.passed(arrival)
            else:
                since = since_s if 0 <= done < begun else None
                self._lanes.adopt(arrival, since, done=max(0, done), started=begun > 0)
            done, begun = done - rows, begun - rows
        bulk.work = next(iter(self._lanes.running.values()), None)


# -- Whether handlers return at once ---------------------------------------------------------------


class Pace:
    """Durations of recent attempts. Not thread-safe: the owner calls it under one lock."""

    def __init__(self) -> None:
        self._count = 0.0
        self._slow = 0.0
        self._sum_s = 0.0
        self._rest_s = REST_S
        self._rests_until_s = float("-inf")

    def add(self, durations_s: Sequence[float]) -> None:
        """Count the durations of some attempts, seconds."""
        self._count += len(durations_s)
        self._slow += sum([one > FAST_S for one in durations_s])
        self._sum_s += sum(durations_s)
        if self._count > COUNTED_MAX:
            self._count, self._slow, self._sum_s = self._count / 2, self._slow / 2, self._sum_s / 2

    def hung(self, now_s: float) -> None:
        """Note that a handler took long in a bulk: there are no bulks for a time."""
        calm = now_s - self._rests_until_s > self._rest_s
        self._rest_s = REST_S if calm else min(REST_MAX_S, 2 * self._rest_s)
        self._rests_until_s = now_s + self._rest_s

    def fast(self, now_s: float) -> bool:
        """Whether handlers return at once, so that bulks save time."""
        return (
            self._count >= COUNTED_MIN
            and now_s >= self._rests_until_s
            and self._slow <= SLOW_SHARE_MAX * self._count
            and self._sum_s <= FAST_S * self._count
        )
