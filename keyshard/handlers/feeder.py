"""Hands received entries to lanes: as fast as they need them, in small steps.

Handlers wait for the interpreter while entries are taken and made messages. So no more of that is
done at once than lanes need, and who waits is let in between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice

from keyshard.arrow.messages import messages_of_each
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.lanes.lanes import Lanes

ROWS_AT_ONCE = 200
"""Rows that are taken at once."""
ROWS_PER_DONE = 2
"""Rows that are taken for each message that is done, while every lane has work."""
ENTRIES_AT_ONCE = 5
"""Entries that go to the lanes while their lock is held."""
BUSY_WAIT_S = 0.01
"""Longest wait for rows while handlers run, seconds."""
IDLE_WAIT_S = 0.1
"""Longest wait for rows while none runs, seconds."""
AHEAD_ROWS_MAX = 2_000
"""Rows received and not yet taken at which receiving pauses: more would come again when a range
moves."""
FED_WAIT_S = 0.005
"""Pause while every lane has work, seconds."""


class Feeder:
    """Feeds the lanes of one run; its owner calls it from one thread.

    Args:
        coordinator: Where entries come from.
        lanes: Where their messages go.
        changed: The lock of the lanes.
        wake: Lets workers start what came; called with ``changed`` held.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lanes: Lanes,
        changed: threading.Condition,
        wake: Callable[[], None],
    ) -> None:
        coordinator.ahead_rows_max = AHEAD_ROWS_MAX
        self._coordinator = coordinator
        self._lanes = lanes
        self._changed = changed
        self._wake = wake
        self._done_before = 0

    def turn(self) -> bool:
        """Feed what is needed now; waits a moment when that is nothing, or nothing came.

        Returns:
            Whether nothing more can be received, because the share of a topic partition is full.

        Raises:
            KeyShardError: What ended the source.
        """
        lanes = self._lanes
        with self._changed:
            busy = lanes.running or lanes.waiting or lanes.completed_entries
            starving, hungry = lanes.starving, lanes.hungry
            done, self._done_before = lanes.done - self._done_before, lanes.done
        rows = ROWS_AT_ONCE if starving else min(ROWS_AT_ONCE, ROWS_PER_DONE * done)
        fed = False
        if hungry and rows:
            fed = self._feed(BUSY_WAIT_S if busy else IDLE_WAIT_S, rows)
        else:
            self._coordinator.check()
        if not starving:
            time.sleep(FED_WAIT_S)
        return not fed and self._coordinator.handed_out.full

    def _feed(self, wait_s: float, rows: int) -> bool:
        taken = self._coordinator.handed_out.take(wait_s, rows)
        if not taken:
            return False
        made = messages_of_each([(where, block) for where, _, block in taken])
        entries = zip(taken, made, strict=True)
        while portion := list(islice(entries, ENTRIES_AT_ONCE)):
            with self._changed:
                for (topic_partition, index, block), messages in portion:
                    self._lanes.add(topic_partition, index, block.id, messages)
                self._wake()
            time.sleep(0)
        return True
