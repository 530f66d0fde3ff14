"""Lanes stand still for keys whose range moves, and go on under its new owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from keyshard.coordinator.rescale import Blocking
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.ring.hash_range import HashRange

LOOK_S = 0.002
"""Time between two looks whether handlers have ended, seconds. Whoever waited for ``changed``
instead would take a wake-up call that is meant for a worker."""


class LaneMoves:
    """The :class:`~keyshard.coordinator.rescale.Work` of handlers; called by who rescales.

    Args:
        lanes: What is worked on.
        changed: Their lock.
        wake: Told, under the lock, that messages can be handled; the number of ranges may be
            another one.
    """

    def __init__(
        self, lanes: Lanes, changed: threading.Condition, wake: Callable[[], None]
    ) -> None:
        self._lanes = lanes
        self._changed = changed
        self._wake = wake

    def hold(self, slots: Sequence[HashRange]) -> None:
        with self._changed:
            self._lanes.hold(slots)

    def wait_idle(self, timeout_s: float) -> Blocking | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            with self._changed:
                oldest = min(self._lanes.blocking(), key=lambda work: work.started_s, default=None)
            if oldest is None:
                return None
            if now_s >= deadline_s:
                message = oldest.message
                return Blocking(
                    message.routing_key, str(message.message_id), now_s - oldest.started_s
                )
            time.sleep(min(LOOK_S, deadline_s - now_s))

    def reassign(self, owners: Sequence[int]) -> None:
        with self._changed:
            self._lanes.reassign(max(owners) + 1, owners.__getitem__)

    def resume(self) -> None:
        with self._changed:
            self._lanes.resume()
            self._wake()
