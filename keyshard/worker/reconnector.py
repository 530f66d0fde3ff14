"""Gives ranges new consumers in the background: where everything is to come again, and where a
client takes long to reconnect.

A client waits longer and longer between its attempts, at last a minute, also when the broker has
long been back; no option shortens that. So whose consumer has been away for a while gets another
one, as soon as the broker answers. That is subscribed before the old one is closed: if it fails,
all is as it was, and the client's own attempts go on.

So does one whose connection stands, and whom the broker does not know: it forgot it in silence, as
its statistics tell. If they are wrong, the broker refuses the new one, and the old one stays.

What the old consumer had not acknowledged comes again and is in the window: it is dropped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from keyshard.broker.port import Broker, Consumer
from keyshard.broker.retrier import Retrier, Steps
from keyshard.config.source import SourceConfig
from keyshard.core.position.assembly import EntryAssembly
from keyshard.core.reception import Link, State, link_of
from keyshard.errors import BrokerError, KeyShardError, RangeConflictError
from keyshard.threads import begin
from keyshard.worker.continuity import Continuity
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import RangeConsumer, close_quietly
from keyshard.worker.subscribe import subscribe_once
from keyshard.worker.troubles import Troubles

LOOK_S = 1.0
"""Time between two looks at who is connected, seconds."""
AWAY_S = (5.0, 10.0)
"""How long a consumer is away before it is replaced, and before the next attempt, drawn for each:
a client that reconnects without trouble does it in a second or two; seconds."""
REOPEN_WAIT_S = 1.0
"""Longest wait between two attempts to subscribe a range anew, seconds."""

_log = logging.getLogger(__name__)


class Reconnector:
    """One daemon thread that looks, and those of a retrier that subscribe.

    A consumer whose client takes long is replaced only while no others come and go.

    Args:
        broker: Connection to subscribe through.
        range_consumers: Whose consumers are looked after.
        config: The source.
        changing: Held while consumers come and go.
        continuity: Looks at the connections, too.
        fail: Told a refusal that ends the source.
    """

    def __init__(
        self, broker: Broker, range_consumers: RangeConsumers, config: SourceConfig,
        changing: threading.Lock, *, continuity: Continuity, fail: Callable[[KeyShardError], None],
    ) -> None:  # fmt: skip
        self._broker = broker
        self._range_consumers = range_consumers
        self._config = config
        self._changing = changing
        self._continuity = continuity
        self._fail = fail
        self._troubles = Troubles()
        self._replacing = False
        """Whether the retrier replaces consumers now."""
        self._retrier = Retrier(REOPEN_WAIT_S, name="keyshard-reopen")
        self._stopping = threading.Event()
        self._thread = begin("keyshard-reconnect", self._run)

    def stop(self) -> None:
        """Replace nothing more; returns without waiting."""
        self._stopping.set()
        self._retrier.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads' end, at most ``timeout_s`` seconds."""
        end_s = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._retrier.join(max(0.0, end_s - time.monotonic()))

    def reopen(self, range_consumer: RangeConsumer) -> bool:
        """Give a range consumer a new consumer: everything unacknowledged comes again.

        A successor that is there takes the place. Else the retrier closes the consumer and
        subscribes one, for as long as the broker is away, and rings. Handlers go on meanwhile, as
        they do while a connection is lost: the range has its owner.

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
        """An attempt to subscribe a range consumer anew.

        If the thread that replaces consumers has been faster, nothing is left to do: the consumer
        that it subscribed stays open.
        """
        yield one.owned_range.topic_partition
        close_quietly(old, for_another=True)
        if one.dropped or not one.lacking or one.successor or self._stopping.is_set():
            return True
        try:
            made = subscribe_once(self._broker, self._config, one.owned_range, one.queue)
        except KeyShardError as exc:
            _log.debug("%s is not subscribed anew yet: %s", one.owned_range, exc)
            waited_s = time.monotonic() - began_s
            taken = isinstance(exc, RangeConflictError) and (
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
        one.ring()
        return True

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._continuity.look()
        long_away = self._long_away()
        self._troubles.look(time.monotonic(), self._range_consumers.troubles())
        if long_away and not self._replacing:
            self._replacing = True
            self._retrier.until_true(partial(self._replaced_all, long_away))

    def _long_away(self) -> list[RangeConsumer]:
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
                elif link is Link.DUE and one.reception.state is not State.RESTING:
                    long.append(one)
        return long

    def _replaced_all(self, long_away: Sequence[RangeConsumer]) -> Steps:
        """One attempt; the next look begins another one."""
        yield self
        try:
            self._replace(long_away)
        except BrokerError as exc:
            _log.debug("no consumer was replaced: %s", exc)
            now_s = time.monotonic()
            ends = [one.refusals.failed(exc, now_s) for one in long_away if not one.lacking]
            if any(ends):
                self._fail(exc)
        finally:
            self._replacing = False
        return True

    def _replace(self, long_away: Sequence[RangeConsumer]) -> None:
        """Subscribe for those who are away, until an attempt fails.

        Raises:
            BrokerError: The broker is away, too, or refuses.
        """
        if not long_away:
            return
        self._broker.missing(())
        replaced = 0
        try:
            for one in long_away:
                if self._stopping.is_set() or not self._changing.acquire(blocking=False):
                    break
                try:
                    replaced += self._replaced(one)
                finally:
                    self._changing.release()
        finally:
            if replaced:
                _log.warning(
                    "%d of %d consumers that had lost their connection for over %.0f s were "
                    "subscribed anew: the broker answers again",
                    replaced, len(long_away), AWAY_S[0],
                )  # fmt: skip

    def _replaced(self, one: RangeConsumer) -> bool:
        """Subscribe for one of them, unless it is no longer away."""
        owned = self._range_consumers.owns(one.owned_range)
        if not owned or one.lacking or _link(one, time.monotonic()) is not Link.DUE:
            return False
        one.replace_at_s = time.monotonic() + random.uniform(*AWAY_S)
        was_forgotten = one.consumer.is_connected()
        try:
            one.successor = subscribe_once(self._broker, self._config, one.owned_range, one.queue)
        except RangeConflictError:
            if not was_forgotten:
                raise
            # The broker knows it after all.
            one.forgotten = None
            return False
        if was_forgotten:
            _log.warning(
                "the broker had no consumer for range %s of %s, though its connection stands: it "
                "was subscribed anew",
                one.owned_range.hash_range, one.owned_range.topic_partition,
            )  # fmt: skip
        one.ring()
        return not was_forgotten


def _link(one: RangeConsumer, now_s: float) -> Link:
    return link_of(
        now_s, connected=one.consumer is not one.forgotten and one.consumer.is_connected(),
        successor=one.successor is not None, due_s=one.replace_at_s,
    )  # fmt: skip
