"""Which range owns a slot, in a run without lanes: what its status and a rescale need of it."""

from __future__ import annotations

from collections.abc import Sequence

from keyshard.core.health import RangeFacts
from keyshard.core.lanes.circuit import Circuit
from keyshard.core.lanes.facts import lane_of
from keyshard.core.lanes.tally import Tally
from keyshard.core.ring.assignment import Assignment, slot_owners
from keyshard.core.ring.hash_range import HashRange, overlap
from keyshard.observe.handling import KeyPlace, Owned, Totals


class RangeOwners:
    """Nothing is worked on here, so nothing is counted, and a rescale waits for nobody.

    Who rescales changes it, and any thread may read it.
    """

    lanes = 1

    def __init__(self) -> None:
        self._owners: Sequence[int] = ()
        self._held: tuple[HashRange, ...] = ()

    def begin(self, assignment: Assignment) -> None:
        """Take the assignment of the start; nobody asks before."""
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

    # -- as keyshard.observe.handling.Handling ----------------------------------------------------

    def ranges(self, now_s: float, owned: Owned) -> list[RangeFacts]:  # noqa: ARG002
        held = self._held
        return [
            RangeFacts(
                index,
                paused=index in owned.paused,
                draining=overlap(owned.owned.get(index, ()), held),
                disconnected=tuple(owned.disconnected.get(index, ())),
            )
            for index in range(max(self._owners) + 1)
        ]

    def pace(self) -> tuple[float, str]:
        return 0.0, ""

    def totals(self, now_s: float) -> Totals:
        tally = Tally()
        return Totals(tally.counters(), tally.timings.status(), Circuit().status(now_s))

    def place(self, key: str, slots: Sequence[int], now_s: float) -> KeyPlace:  # noqa: ARG002
        return KeyPlace([self._owners[slot] for slot in slots], lane_of(None, now_s), 0)
