"""Gives ranges new consumers in the background.

A range needs a new consumer in three cases:

1. All unacknowledged entries must come again.
2. The client takes long to reconnect. It increases the wait between its attempts up to a minute,
   even if the broker has long been back, and no option shortens that. So a consumer without a
   connection is replaced after a while, as soon as the broker answers. The new one is subscribed
   before the old one is closed. If that fails, nothing changes and the client's own attempts
   continue.
3. The consumer is connected, but the broker's statistics do not list it. If they are wrong, the
   broker refuses the new consumer, and the old one stays.

Entries that the old consumer had not acknowledged come again. They are in the window, so they are
dropped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from keyshard.broker.port import Broker, Consumer
from keyshard.broker.retry import Retrier, Steps
from keyshard.config.source import SourceConfig
from keyshard.consumers.identity_check import IdentityCheck
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.receive_state import Link, ReceiveState, link_of
from keyshard.consumers.receiver import RangeConsumer, close_quietly
from keyshard.consumers.subscribe import subscribe_once
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly
from keyshard.core.refusal_timer import without_numbers
from keyshard.errors import BrokerError, KeyShardError, LimitReachedError, RangeConflictError
from keyshard.threads import begin

LOOK_S = 1.0
"""Time between two checks of the connections, seconds."""
AWAY_S = (5.0, 10.0)
"""Time without a connection before a consumer is replaced, and before the next attempt, seconds. It
is drawn from this interval for each consumer. A client without problems reconnects in a second or
two."""
REOPEN_WAIT_S = 1.0
"""Longest wait between two attempts to subscribe a range again, seconds."""

_log = logging.getLogger(__name__)


class Reconnector:
    """One daemon thread that checks connections, and the threads of a retrier that subscribe.

    No replacement begins while another thread opens or closes consumers. That thread does not wait
    for one that runs: its consumer is closed if the range was dropped meanwhile.

    Args:
        broker: Connection to subscribe through.
        range_consumers: The consumers to check.
        config: The source.
        changing: Held by a thread that opens or closes consumers.
        identity_check: Checks the connections, too.
        fail: Called with a refusal that ends the source.
    """

    def __init__(
        self, broker: Broker, range_consumers: RangeConsumers, config: SourceConfig,
        changing: threading.Lock, *, identity_check: IdentityCheck,
        fail: Callable[[KeyShardError], None],
    ) -> None:  # fmt: skip
        self._broker = broker
        self._range_consumers = range_consumers
        self._config = config
        self._changing = changing
        self._identity_check = identity_check
        self._fail = fail
        self._problems = ConnectionProblems()
        self._replacing = False
        """Whether the retrier is replacing consumers."""
        self._retrier = Retrier(REOPEN_WAIT_S, name="keyshard-reopen")
        self._stopping = threading.Event()
        self._thread = begin("keyshard-reconnect", self._run)

    def stop(self) -> None:
        """Stop replacing consumers; returns without waiting."""
        self._stopping.set()
        self._retrier.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads' end, at most ``timeout_s`` seconds."""
        end_s = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._retrier.join(max(0.0, end_s - time.monotonic()))

    def reopen(self, range_consumer: RangeConsumer) -> bool:
        """Give a range consumer a new consumer, so that all unacknowledged entries come again.

        If there is a successor, it is used. Otherwise the retrier closes the consumer, subscribes a
        new one as soon as the broker answers, and wakes the range consumer. Handlers keep running,
        as they do while a connection is lost, because the range keeps its owner.

        Returns:
            Whether there is a new consumer now.
        """
        successor, range_consumer.successor = range_consumer.successor, None
        range_consumer.assembly = EntryAssembly(doubted=range_consumer.assembly.doubted)
        if successor is not None:
            close_quietly(range_consumer.consumer, for_another=True)
            range_consumer.consumer, range_consumer.lacking = successor, False
            return True
        range_consumer.lacking = True
        attempt = partial(self._reopened, range_consumer, range_consumer.consumer, time.monotonic())
        self._retrier.until_true(attempt)
        return False

    def _reopened(self, one: RangeConsumer, old: Consumer, began_s: float) -> Steps:
        """Try once to subscribe a range consumer again.

        If the thread that replaces consumers was faster, its consumer stays open and nothing is
        left to do.
        """
        yield one.owned_range.topic_partition
        close_quietly(old, for_another=True)
        if one.dropped or not one.lacking or one.successor or self._stopping.is_set():
            return True
        try:
            made = subscribe_once(self._broker, self._config, one.owned_range, one.queue)
        except KeyShardError as exc:
            _log.debug("%s is not subscribed again yet: %s", one.owned_range, exc.summary)
            waited_s = time.monotonic() - began_s
            taken = isinstance(exc, RangeConflictError | LimitReachedError) and (
                waited_s > self._config.subscribe_timeout_ms / 1000
            )
            if one.refusals.failed(exc, time.monotonic()) or taken:
                self._fail(exc)
                return True
            return False
        if not one.succeeded_by(made):
            close_quietly(made)
            return True
        one.refusals.succeeded()
        one.wake()
        return True

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._identity_check.check_connections()
        long_away = self._long_away()
        self._problems.look(time.monotonic(), self._range_consumers.problems())
        if long_away and not self._replacing:
            self._replacing = True
            self._retrier.until_true(partial(self._replaced_all, long_away))

    def _long_away(self) -> list[RangeConsumer]:
        """Return the consumers to replace, those that have waited longest for an attempt first.

        So one that cannot be subscribed delays others by one attempt at most.
        """
        now_s = time.monotonic()
        long: list[RangeConsumer] = []
        for where in self._range_consumers.consumed:
            for one in self._range_consumers.by_partition.get(where, ()):
                link = _link(one, now_s)
                if one.lacking:
                    continue
                if link is Link.CONNECTED:
                    one.replace_at_s = 0.0
                    one.refusals.succeeded()
                elif link is Link.AWAY and not one.replace_at_s:
                    one.replace_at_s = now_s + random.uniform(*AWAY_S)
                elif link is Link.DUE and one.reception.state is not ReceiveState.RESTING:
                    long.append(one)
        return sorted(long, key=lambda one: one.replace_at_s)

    def _replaced_all(self, long_away: Sequence[RangeConsumer]) -> Steps:
        """Try once to replace the consumers; the next check starts another attempt."""
        yield self
        try:
            self._replace(long_away)
        finally:
            self._replacing = False
        return True

    def _replace(self, long_away: Sequence[RangeConsumer]) -> None:
        """Replace disconnected consumers until an attempt fails."""
        if not long_away:
            return
        replaced, tried = 0, long_away
        try:
            self._broker.missing(())
            for one in long_away:
                if self._stopping.is_set() or self._changing.locked():
                    break
                tried = (one,)
                replaced += self._replaced(one)
        except BrokerError as exc:
            _log.debug("no consumer was replaced: %s", exc.summary)
            of = {one.owned_range.topic_partition for one in tried}
            self._note([one for one in long_away if one.owned_range.topic_partition in of], exc)
        finally:
            if replaced:
                _log.warning(
                    "the broker answers again; subscribed again %d of %d consumers that were "
                    "disconnected for more than %.0f s",
                    replaced, len(long_away), AWAY_S[0],
                )  # fmt: skip

    def _note(self, failed: Sequence[RangeConsumer], error: BrokerError) -> None:
        """Note why consumers were not replaced; a lasting refusal ends the source."""
        now_s = time.monotonic()
        ends = [one.refusals.failed(error, now_s) for one in failed if not one.lacking]
        if any(ends):
            self._fail(error)

    def _replaced(self, one: RangeConsumer) -> bool:
        """Subscribe a successor for one consumer, unless it is connected again."""
        owned = self._range_consumers.owns(one.owned_range)
        if not owned or one.lacking or _link(one, time.monotonic()) is not Link.DUE:
            return False
        one.replace_at_s = time.monotonic() + random.uniform(*AWAY_S)
        was_forgotten = one.consumer.is_connected()
        try:
            made = subscribe_once(self._broker, self._config, one.owned_range, one.queue)
        except (RangeConflictError, LimitReachedError):
            if not was_forgotten and not one.dropped:
                raise
            # The broker has this consumer after all, and counts it; or a new range has its place.
            one.forgotten = None
            return False
        if not one.succeeded_by(made):
            close_quietly(made)
            return False
        if was_forgotten:
            _log.warning(
                "the broker had no consumer for range %s of %s, although the connection was "
                "open; subscribed it again",
                one.owned_range.hash_range, one.owned_range.topic_partition,
            )  # fmt: skip
        one.wake()
        return not was_forgotten


def _link(one: RangeConsumer, now_s: float) -> Link:
    return link_of(
        now_s, connected=one.consumer is not one.forgotten and one.consumer.is_connected(),
        successor=one.successor is not None, due_s=one.replace_at_s,
    )  # fmt: skip


# -- The log of refusals and of brokers that do not answer ----------------------------------------

NAMED_AFTER_S = 2.0
"""Time after which a problem is logged, seconds; most end within it."""
REMIND_S = 60.0
"""Time after which it is logged again, seconds."""


@dataclass(slots=True)
class _Problem:
    since_s: float
    words: str
    named_s: float | None = None


class ConnectionProblems:
    """Logs the problems of one source. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[TopicPartition, _Problem] = {}

    def look(self, now_s: float, problems: Mapping[TopicPartition, str]) -> None:
        """Log changes since the last call. Call it every second."""
        for where in [where for where in self._known if where not in problems]:
            if self._known.pop(where).named_s is not None:
                _log.warning("the broker serves %s again", where)
        due: dict[str, list[TopicPartition]] = {}
        for where, text in sorted(problems.items()):
            words = without_numbers(text)
            known = self._known.setdefault(where, _Problem(now_s, words))
            if known.words != words and known.named_s is not None:
                known.named_s = None
            known.words = words
            waits = now_s - known.since_s < NAMED_AFTER_S
            if not waits and (known.named_s is None or now_s - known.named_s >= REMIND_S):
                known.named_s = now_s
                due.setdefault(words.replace(str(where), ""), []).append(where)
        for found in due.values():
            more = f" and {len(found) - 1} more topic partitions" if len(found) > 1 else ""
            _log.warning("%s%s receives nothing: %s", found[0], more, problems[found[0]])
