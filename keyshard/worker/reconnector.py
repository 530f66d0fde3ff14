"""Gives a range a new consumer when its client takes long to reconnect.

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
from collections.abc import Sequence

from keyshard.broker.port import Broker
from keyshard.config.source import SourceConfig
from keyshard.core.reception import Link, State, link_of
from keyshard.errors import BrokerError, RangeConflictError
from keyshard.worker.continuity import Continuity
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import RangeConsumer
from keyshard.worker.subscribe import subscribe_once

LOOK_S = 1.0
"""Time between two looks at who is connected, seconds."""
AWAY_S = (5.0, 10.0)
"""How long a consumer is away before it is replaced, and before the next attempt, drawn for each:
a client that reconnects without trouble does it in a second or two; seconds."""

_log = logging.getLogger(__name__)


class Reconnector:
    """One daemon thread. It opens no consumer while others come and go.

    Args:
        broker: Connection to subscribe through.
        range_consumers: Whose consumers are looked after.
        config: The source.
        changing: Held while consumers come and go.
        continuity: Looks at the connections, too.
    """

    def __init__(
        self, broker: Broker, range_consumers: RangeConsumers, config: SourceConfig,
        changing: threading.Lock, continuity: Continuity,
    ) -> None:  # fmt: skip
        self._broker = broker
        self._range_consumers = range_consumers
        self._config = config
        self._changing = changing
        self._continuity = continuity
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keyshard-reconnect", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Replace nothing more; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            self._continuity.look()
            self._replace(self._long_away())
        except BrokerError as exc:
            _log.debug("no consumer was replaced: %s", exc)
        except Exception:  # noqa: BLE001
            # Nothing is worse than it was: the clients go on trying.
            _log.exception("looking after lost connections failed unexpectedly")

    def _long_away(self) -> list[RangeConsumer]:
        now_s = time.monotonic()
        long: list[RangeConsumer] = []
        for where in self._range_consumers.consumed:
            for one in self._range_consumers.by_partition.get(where, ()):
                link = _link(one, now_s)
                if link is Link.CONNECTED:
                    one.replace_at_s = 0.0
                elif link is Link.AWAY and not one.replace_at_s:
                    one.replace_at_s = now_s + random.uniform(*AWAY_S)
                elif link is Link.DUE and one.reception.state is not State.RESTING:
                    long.append(one)
        return long

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
        if not owned or _link(one, time.monotonic()) is not Link.DUE:
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
