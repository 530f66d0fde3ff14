"""Owners of slots in a run without lanes, and the observation of such a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.lanes.lane_status import (
    HandlerCounters,
    HandlerSlots,
    OutputsStatus,
    RunStatus,
)
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.message import MessageId
from keyshard.core.range_watchdog import Pause, RangeFacts
from keyshard.core.ring.assignment import Assignment, assign, slot_owners
from keyshard.core.ring.hash_range import HashRange, overlap
from keyshard.observe.handler_view import KeyState, Ownership, Totals
from keyshard.observe.monitor import Monitor
from keyshard.observe.observed_run import ObservedRun

if TYPE_CHECKING:
    from keyshard.handlers.output_log import OutputLog


class Actors(Protocol):
    """Actors that handle what a run receives. Any thread may call it; times are monotonic
    seconds."""

    def slots(self, now_s: float) -> list[HandlerSlots]:
        """Return the slots of each actor."""

    def rate_limit(self, now_s: float) -> RateLimitStatus | None:
        """Return the rate limit of the handlers; ``None`` without one."""

    def totals(self) -> Totals:
        """Return the outcomes of messages since the start, without those of outputs."""


class RangeOwners:
    """Owners of slots. Nothing is handled here, so a rescale never waits.

    The rescaling thread changes it, and any thread may read it.

    Args:
        log: Log of the outputs; ``None``: there are none.
        actors: Actors that handle what the run receives; ``None``: there are none.
    """

    lanes = 1

    def __init__(self, log: OutputLog | None = None, actors: Actors | None = None) -> None:
        self._log = log
        self._actors = actors
        self._owners: Sequence[int] = ()
        self._held: tuple[HashRange, ...] = ()

    def begin(self, assignment: Assignment) -> None:
        """Take the assignment of the start; called before any read."""
        self.reassign(slot_owners(assignment))

    # -- as keyshard.coordinator.rescale.Drainable ------------------------------------------------

    def hold(self, slots: Sequence[HashRange]) -> None:
        self._held += tuple(slots)

    def wait_idle(self, timeout_s: float) -> None:  # noqa: ARG002
        return None

    def reassign(self, owners: Sequence[int]) -> None:
        self._owners = owners

    def resume(self) -> None:
        self._held = ()

    # -- as keyshard.observe.handler_view.HandlerView ----------------------------------------------

    def ranges(self, now_s: float, owned: Ownership) -> list[RangeFacts]:
        """Return the facts of ranges; those of messages if an actor has the same slots."""
        held = self._held
        actors = {one["hashRange"]: one for one in self.handler_slots(now_s)}
        facts = []
        for index in range(max(self._owners) + 1):
            parts = owned.owned.get(index, ())
            actor = actors.get(str(parts[0])) if len(parts) == 1 else None
            waiting = (actor["waiting"] or 0) if actor else 0
            facts.append(
                RangeFacts(
                    index,
                    counted=actor is not None,
                    waiting=waiting,
                    ready=waiting,
                    in_flight=actor["inFlight"] if actor else 0,
                    handled=(actor["handled"] or 0) if actor else 0,
                    paused=index in owned.paused,
                    draining=overlap(parts, held),
                    disconnected=tuple(owned.disconnected.get(index, ())),
                )
            )
        return facts

    def pace(self) -> tuple[float, Pause | None]:
        """Return infinity: an actor may take any time for the rows of a call."""
        return math.inf, None

    def totals(self, now_s: float) -> Totals:  # noqa: ARG002
        if self._actors is None:
            counters = HandlerCounters().counters(handlers=False, sink=False)
            totals = Totals(counters, None, None)
        else:
            totals = self._actors.totals()
        if self._log is not None:
            totals.counters["outputsPublished"] = self._log.published
            totals.counters["outputsConfirmed"] = self._log.confirmed
            totals.counters["outputsFailed"] = self._log.failed
        return totals

    def rate_limit(self, now_s: float) -> RateLimitStatus | None:
        return None if self._actors is None else self._actors.rate_limit(now_s)

    def handler_slots(self, now_s: float) -> list[HandlerSlots]:
        return [] if self._actors is None else self._actors.slots(now_s)

    def outputs(self) -> OutputsStatus | None:
        return None if self._log is None else self._log.status()

    def runs(self, now_s: float, count_max: int) -> list[RunStatus]:  # noqa: ARG002
        return []

    def stack(
        self,
        topic: str | None,
        partition: int | None,
        message_id: MessageId,
    ) -> None:
        """Return ``None``: no handler runs."""

    def key_state(self, key: str, slots: Sequence[int], now_s: float) -> KeyState:  # noqa: ARG002
        return KeyState([self._owners[slot] for slot in slots], None, None)


def observe_stream(coordinator: Coordinator, config: SourceConfig, kind: str) -> Monitor:
    """Start to observe a source that hands out batches. Call it before the source starts.

    Args:
        coordinator: Coordinator of the source. Its ranges never change.
        config: Its options.
        kind: ``stream`` or ``spark``.
    """
    owners = RangeOwners()
    owners.begin(assign(config.parallelism))
    subject = ObservedRun(
        config, coordinator, owners,
        executor="batches", workers=lambda: 1, workers_max=None,
        stopping=lambda: coordinator.stopping, rescaler=lambda: None, kind=kind, fixed=True,
    )  # fmt: skip
    return Monitor(subject)
