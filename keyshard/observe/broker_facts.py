"""What the broker says of the topic partitions of a running source, asked in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from keyshard.broker.port import Admin
from keyshard.core.position.entry import TopicPartition
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState
from keyshard.errors import KeyShardError
from keyshard.threads import begin

ROUND_S = 2.0
"""Time between two rounds of questions, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Backlog, and counts against the broker's limits."""

    backlog: int
    ack_holes: int
    ack_holes_max: int
    replay: int
    replay_max: int


class BrokerFacts:
    """One daemon thread; what it found last is there at once, without asking the broker.

    Args:
        admin: Makes the admin interface, which this object closes.
        subscription: Whose facts.
        partitions: The topic partitions of the source now.
    """

    def __init__(
        self,
        admin: Callable[[], Admin],
        subscription: str,
        partitions: Callable[[], Collection[TopicPartition]],
    ) -> None:
        self._admin = admin
        self._subscription = subscription
        self._partitions = partitions
        self._stopping = threading.Event()
        self.known: dict[TopicPartition, PartitionFacts] = {}
        """Replaced as a whole after each round."""
        self.error = ""
        """What went wrong in the newest round; empty when nothing did."""
        begin("keyshard-broker-facts", self._run)

    def close(self) -> None:
        """Ask nothing more; returns without waiting for an answer that is under way."""
        self._stopping.set()

    def _run(self) -> None:
        admin = self._admin()
        limits: BrokerLimits | None = None
        try:
            while not self._stopping.is_set():
                try:
                    limits = limits or BrokerLimits.from_settings(admin.settings())
                    self._round(admin, limits)
                    self.error = ""
                except (KeyShardError, ValueError) as exc:
                    self.error = str(exc)
                    _log.info("the broker is asked again: %s", exc)
                self._stopping.wait(ROUND_S)
        finally:
            admin.close()

    def _round(self, admin: Admin, limits: BrokerLimits) -> None:
        known: dict[TopicPartition, PartitionFacts] = {}
        for where in self._partitions():
            if self._stopping.is_set():
                return
            stats = admin.subscription(where, self._subscription)
            if stats is None:
                continue
            state = SubscriptionState.from_stats(stats)
            known[where] = PartitionFacts(
                state.backlog,
                state.ack_holes,
                limits.ack_holes,
                state.in_replay,
                limits.replay(len(state.consumers)),
            )
        self.known = known
