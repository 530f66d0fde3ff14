"""Facts of the broker's statistics, asked for in the background."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from keyshard.base_error import one_line
from keyshard.broker.admin.port import Admin
from keyshard.core.partition_watchdog import PartitionStall, PartitionWatchdog
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import (
    Stall,
)
from keyshard.core.releases import release_of
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState
from keyshard.errors import KeyShardError
from keyshard.threads import begin

FACTS_ROUND_S = 2.0
"""Shortest time between two rounds of requests, seconds."""
REST_TIMES = 4.0
"""Time between two rounds, at least this many times the duration of a round, without the time of
failed requests."""
FAILURES_MAX = 3
"""Failed requests after which a round ends."""
KEPT_S = 60.0
"""Age of facts from which they are forgotten at the end of a round, seconds."""
NAMED_MAX = 5
"""Maximum number of stalls that are logged one by one."""
LIMITS_S = 60.0
"""Age of the broker's limits from which they are asked for again, seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Backlog of a topic partition, and counts with the broker's limits for them.

    A count is ``None`` if the broker does not report it.
    """

    backlog: int
    ack_gaps: int | None
    ack_gaps_max: int
    replay: int | None
    replay_max: int
    limits_assumed: bool
    """Whether the limits are the defaults of the broker's release."""
    oldest_ms: int | None
    """Time at which the first entry of the backlog was published, milliseconds since the epoch;
    ``None`` if it is unknown."""
    age_s: int | None
    """Age of the backlog as the broker measured it, seconds; ``None`` if it does not."""
    known_s: float
    """Time at which the facts were fetched, monotonic seconds."""


class BrokerPoll:
    """Fetches facts in one daemon thread; the newest ones are available without a request.

    Args:
        admin: Makes the admin interface, which this object closes.
        subscription: Subscription of the source.
        asked: Returns the current topic partitions of the source. The value tells whether a range
            has a connected consumer there that is not paused, and no rows in the window.
        holding: Returns the topic partitions of which the source holds rows.
    """

    def __init__(
        self,
        admin: Callable[[], Admin],
        subscription: str,
        asked: Callable[[], Mapping[TopicPartition, bool]],
        holding: Callable[[], Collection[TopicPartition]],
    ) -> None:
        self._admin = admin
        self._subscription = subscription
        self._asked = asked
        self._holding = holding
        self._stopping = threading.Event()
        self.known: dict[TopicPartition, PartitionFacts] = {}
        """Replaced as a whole after each round."""
        self._deliveries = PartitionWatchdog()
        self._limits: BrokerLimits | None = None
        self._limits_s = -math.inf
        """Time at which the limits were fetched, monotonic seconds."""
        self._last: TopicPartition | None = None
        """The topic partition with which the last round ended early."""
        self.error = ""
        """Error of the newest round; empty if it succeeded."""
        begin("keyshard-broker-facts", self._run)

    @property
    def stalls(self) -> Mapping[TopicPartition, PartitionStall]:
        """Topic partitions of which the broker delivers nothing; none while it is unknown."""
        return self._deliveries.stalls

    def close(self) -> None:
        """Send no more requests; returns without waiting for a request in progress."""
        self._stopping.set()

    def _run(self) -> None:
        admin = self._admin()
        try:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                failed: list[Exception] = []
                failed_s = 0.0
                try:
                    failed_s = self._round(admin, failed)
                except (KeyShardError, ValueError) as exc:
                    failed.append(exc)
                self.error = one_line(failed[0]) if failed else ""
                if failed:
                    _log.info("broker facts are unknown, asking again: %s", one_line(failed[0]))
                took_s = time.monotonic() - began_s - failed_s
                self._stopping.wait(max(FACTS_ROUND_S, REST_TIMES * took_s))
        finally:
            admin.close()

    def _current_limits(self, admin: Admin, failed: list[Exception]) -> BrokerLimits | None:
        """Return the limits of the broker; ``None`` until it has returned them once."""
        now_s = time.monotonic()
        if now_s - self._limits_s >= LIMITS_S:
            try:
                self._limits, self._limits_s = _limits_of(admin), now_s
            except (KeyShardError, ValueError) as exc:
                failed.append(exc)
        return self._limits

    def _round(self, admin: Admin, failed: list[Exception]) -> float:
        """Take the facts of each topic partition; return the time of failed requests, seconds.

        Topic partitions without an answer keep their old facts for a while. They are not stalled,
        since the time without an answer proves nothing. After too many failures, the next round
        begins where this one ended.

        Args:
            admin: The admin interface.
            failed: Gets the errors.
        """
        began_s = time.monotonic()
        limits = self._current_limits(admin, failed)
        failed_s = time.monotonic() - began_s if failed else 0.0
        if limits is None:
            return failed_s
        asked = self._asked()
        partitions = sorted(asked)
        first = 0 if self._last is None else bisect_right(partitions, self._last)
        partitions = partitions[first:] + partitions[:first]
        holding, old = self._holding(), self.known
        answers: dict[TopicPartition, SubscriptionState | None] = {}
        self._last = None
        for where in partitions:
            if self._stopping.is_set():
                return 0.0
            asked_s = time.monotonic()
            try:
                known = old.get(where)
                oldest = known is not None and known.backlog > 0 and where not in holding
                stats = admin.subscription(where, self._subscription, oldest=oldest)
                answers[where] = None if stats is None else SubscriptionState.from_stats(stats)
            except (KeyShardError, ValueError) as exc:
                failed.append(exc)
                failed_s += time.monotonic() - asked_s
                if len(failed) == FAILURES_MAX:
                    self._last = where
                    break
        now_s = time.monotonic()
        states = {where: state for where, state in answers.items() if state is not None}
        unknown = [where for where in partitions if where not in answers]
        self.known = {
            where: old[where]
            for where in unknown
            if where in old and now_s - old[where].known_s < KEPT_S
        } | {
            where: PartitionFacts(
                state.backlog,
                state.ack_gaps,
                limits.ack_gaps,
                state.in_replay,
                limits.replay(len(state.consumers)),
                limits.assumed,
                # An entry that waits for its time is not late.
                None if state.delayed else state.oldest_ms,
                state.age_s,
                now_s,
            )
            for where, state in states.items()
        }
        asking = {where for where, asks in asked.items() if asks}
        due = self._deliveries.look(now_s, states, limits, asking, unknown)
        name_stalls(due, "topic partitions")
        return failed_s


def name_stalls(stalls: Sequence[Stall] | Sequence[PartitionStall], several: str) -> None:
    """Log stalls as warnings, further ones as a number.

    Args:
        stalls: The stalls.
        several: Word for what is stalled, in the plural.
    """
    for stall in stalls[:NAMED_MAX]:
        _log.warning("%s is stalled: %s (%s)", stall.name, stall.reason, stall.kind.runbook)
    if len(stalls) > NAMED_MAX:
        _log.warning(
            "%d more %s are stalled; keyshard status shows them", len(stalls) - NAMED_MAX, several
        )


def _limits_of(admin: Admin) -> BrokerLimits:
    return release_of(admin.version()).limits.with_settings(admin.settings())
