"""Feeds received entries to the handlers of a run: as many as they need, in small steps.

Handlers wait for the interpreter while entries are taken and decoded. So a turn takes no more than
the lanes need, and lets waiting threads run between two steps. While handlers return at once, a
turn takes more: then only one thread handles messages, and it has enough for several turns.
"""

from __future__ import annotations

import time
from itertools import islice

from keyshard.columns.messages import messages_of_each
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.lanes.key_queue import Arrival
from keyshard.core.position.outputs import Handled
from keyshard.handlers.dispatcher import Dispatcher

ROWS_AT_ONCE = 200
"""Most rows taken at once."""
BULK_ROWS_AT_ONCE = 1_000
"""Most rows taken at once while handlers return at once; also the rows at which they wait."""
ROWS_PER_DONE = 2
"""Rows taken for each completed message, while every lane has work."""
ENTRIES_AT_ONCE = 5
"""Entries added to the lanes while their lock is held."""
BUSY_WAIT_S = 0.01
"""Longest wait for rows while handlers run, seconds."""
IDLE_WAIT_S = 0.1
"""Longest wait for rows while no handler runs, seconds."""
AHEAD_ROWS_MAX = 2_000
"""Received rows, not taken yet, at which receiving pauses: more would be redelivered when a range
moves."""
FED_WAIT_S = 0.005
"""Pause while every lane has work, seconds."""


class LaneFeeder:
    """Feeds the lanes of one run; its owner calls it from one thread.

    Args:
        coordinator: Source of entries.
        dispatcher: Takes their messages.
    """

    def __init__(self, coordinator: Coordinator, dispatcher: Dispatcher) -> None:
        coordinator.ahead_rows_max = AHEAD_ROWS_MAX
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self._changed = dispatcher.changed
        self._done_before = 0
        self.handled: Handled = {}
        """Messages whose outputs an earlier run has in the checkpoint: no handler gets them."""

    def turn(self) -> bool:
        """Feed the lanes as many rows as they need now; wait briefly if they need or get none.

        Returns:
            Whether nothing more can be received, because the share of a topic partition is full.

        Raises:
            KeyShardError: The error that ended the source.
        """
        lanes, arrivals = self._dispatcher.lanes, self._dispatcher.arrivals
        with self._changed:
            in_bulk = self._dispatcher.in_bulk(time.monotonic())
            busy = not lanes.empty or arrivals or lanes.completed_entries
            starving, hungry = lanes.starving, lanes.hungry
            done, self._done_before = lanes.done - self._done_before, lanes.done
            if in_bulk:
                starving = hungry = arrivals.rows < BULK_ROWS_AT_ONCE
        at_once = BULK_ROWS_AT_ONCE if in_bulk else ROWS_AT_ONCE
        rows = at_once if starving else min(at_once, ROWS_PER_DONE * done)
        fed = False
        if hungry and rows:
            fed = self._feed(BUSY_WAIT_S if busy else IDLE_WAIT_S, rows, in_bulk=in_bulk)
        else:
            self._coordinator.check()
        if not starving:
            time.sleep(FED_WAIT_S)
        return not fed and self._coordinator.in_flight.full

    def _feed(self, wait_s: float, rows: int, *, in_bulk: bool) -> bool:
        taken = self._coordinator.in_flight.take(wait_s, rows)
        if not taken:
            return False
        made = messages_of_each([(where, block) for where, _, block in taken])
        at_once = len(taken) if in_bulk else ENTRIES_AT_ONCE
        arrivals = (
            Arrival(where, index, block.id, messages)
            for (where, index, block), messages in zip(taken, made, strict=True)
        )
        while portion := list(islice(arrivals, at_once)):
            with self._changed:
                # Meanwhile, a handler may have taken long.
                in_bulk = in_bulk and self._dispatcher.in_bulk(time.monotonic())
                for arrival in portion:
                    self._add(arrival, in_bulk=in_bulk)
                self._dispatcher.wake()
            time.sleep(0)
        return True

    def _add(self, arrival: Arrival, *, in_bulk: bool) -> None:
        where, _, entry, messages = arrival
        handled = self.handled.get(where, {}).get(entry)
        if handled:
            messages = [one for one in messages if one.message_id.batch_index not in handled]
            if not messages:
                self._dispatcher.lanes.put_back({where: [entry]})
                return
            arrival = arrival._replace(messages=messages)
        self._dispatcher.add(arrival, in_bulk=in_bulk)
