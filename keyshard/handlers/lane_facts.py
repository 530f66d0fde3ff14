"""What the lanes of a handler run tell the status, under their lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from keyshard.core.health import RangeFacts
from keyshard.core.lanes.circuit import Circuit
from keyshard.core.lanes.facts import lane_of, range_facts
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.lanes.tally import Tally
from keyshard.observe.handling import KeyPlace, Owned, Totals


class LaneFacts:
    """The :class:`~keyshard.observe.handling.Handling` of a handler run.

    Args:
        lanes: What waits and runs.
        tally: What became of messages.
        circuit: Whether most keys fail at once.
        changed: Guards all of them.
    """

    def __init__(
        self, lanes: Lanes, tally: Tally, circuit: Circuit, changed: threading.Condition
    ) -> None:
        self._lanes = lanes
        self._tally = tally
        self._circuit = circuit
        self._changed = changed

    @property
    def lanes(self) -> int:
        return self._lanes.lanes

    def ranges(self, now_s: float, owned: Owned) -> list[RangeFacts]:
        with self._changed:
            return range_facts(self._lanes, now_s, owned.owned, owned.disconnected, owned.paused)

    def pace(self) -> tuple[float, str]:
        with self._changed:
            circuit = self._circuit
            return self._tally.timings.p99_s, "" if circuit.closed else str(circuit)

    def totals(self, now_s: float) -> Totals:
        with self._changed:
            tally = self._tally
            return Totals(tally.counters(), tally.timings.status(), self._circuit.status(now_s))

    def place(self, key: str, slots: Sequence[int], now_s: float) -> KeyPlace:
        with self._changed:
            queue = self._lanes.queue(key)
            return KeyPlace(
                list(map(self._lanes.owner_of, slots)),
                lane_of(queue, now_s),
                0 if queue is None else len(queue.work) - queue.running,
            )
