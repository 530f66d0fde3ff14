"""The facts about lanes that the status and the watchdog take from a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from keyshard.core.lanes.lane_status import (
    HandlerSlots,
    OutputsStatus,
    RunStatus,
    lane_of,
    range_facts,
    runs_of,
)
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.message import MessageId
from keyshard.core.range_watchdog import Pause, RangeFacts, StallKind, shown_key
from keyshard.handlers.dispatcher import Dispatcher
from keyshard.handlers.stacks import lines_of
from keyshard.observe.handler_view import KeyState, Ownership, Totals
from keyshard.observe.status_types import StackStatus


class LaneFacts:
    """The :class:`~keyshard.observe.handler_view.HandlerView` of a handler run.

    Args:
        run: Owner of the lanes.
    """

    def __init__(self, run: Dispatcher) -> None:
        self._run = run
        self._changed = run.changed

    @property
    def lanes(self) -> int:
        return self._run.lanes.lanes

    def ranges(self, now_s: float, owned: Ownership) -> list[RangeFacts]:
        with self._changed:
            self._run.distribute()
            return range_facts(
                self._run.lanes, now_s, owned.owned, owned.disconnected, owned.paused
            )

    def pace(self) -> tuple[float, Pause | None]:
        with self._changed:
            circuit, outputs = self._run.circuit, self._run.outputs
            pause = None if circuit.closed else Pause(StallKind.CIRCUIT, str(circuit))
            if outputs is not None and outputs.full:
                error = outputs.status()["error"] or "no answer"
                pause = Pause(StallKind.OUTPUTS, f"outputs wait for the broker: {error}")
            return self._run.tally.timings.p99_s, pause

    def rate_limit(self, now_s: float) -> RateLimitStatus | None:
        with self._changed:
            rate = self._run.rate
            return None if rate is None else rate.status(now_s)

    def handler_slots(self, now_s: float) -> list[HandlerSlots]:
        with self._changed:
            return self._run.executor.slots(now_s)

    def outputs(self) -> OutputsStatus | None:
        with self._changed:
            outputs = self._run.outputs
            return None if outputs is None else outputs.status()

    def totals(self, now_s: float) -> Totals:
        with self._changed:
            self._run.distribute()
            tally, circuit = self._run.tally, self._run.circuit
            counters = tally.counters(handlers=True, sink=self._run.outputs is not None)
            timings = tally.timings.status()
            return Totals(counters, timings, circuit.status(now_s), tally.newest_error)

    def runs(self, now_s: float, count_max: int) -> list[RunStatus]:
        with self._changed:
            self._run.distribute()
            return runs_of(self._run.lanes, now_s, count_max, self._run.notes.of)

    def stack(
        self, topic: str | None, partition: int | None, message_id: MessageId
    ) -> StackStatus | None:
        with self._changed:
            self._run.distribute()
            work = next(
                (
                    one
                    for one in self._run.lanes.running.values()
                    if not one.parking
                    and not one.publishing
                    and one.message.message_id == message_id
                    and topic in (None, one.message.topic)
                    and partition in (None, one.message.partition)
                ),
                None,
            )
            if work is None:
                return None
            running_s = max(0.0, time.monotonic() - work.started_s)
            calls = self._run.executor.calls(work)
        return {
            "key": None if work.queue.key is None else shown_key(work.queue.key),
            "runningSeconds": round(running_s, 1),
            "stack": lines_of(calls),
        }

    def key_state(self, key: str, slots: Sequence[int], now_s: float) -> KeyState:
        with self._changed:
            self._run.distribute()
            queue = self._run.lanes.queue(key)
            return KeyState(
                list(map(self._run.lanes.owner_of, slots)),
                lane_of(queue, now_s),
                0 if queue is None else len(queue.work) - queue.running,
            )
