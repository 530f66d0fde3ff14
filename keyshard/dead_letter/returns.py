"""Receives what a broker still has, or has again, for the subscription that keeps the letters.

A broker that dies forgets acknowledgements. What a start does not read, since its checkpoint begins
behind it, and what a running source has done long ago is found here: it is received, and
acknowledged when nothing needs it. The cost is that of what is not acknowledged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from keyshard.arrow.messages import messages_of
from keyshard.broker.port import Consumer
from keyshard.core.message import Message
from keyshard.errors import KeyShardError, UnreadableEntryError
from keyshard.threads import begin

JOIN_S = 2.0
"""Longest wait for the thread's end, seconds."""

_log = logging.getLogger(__name__)


class LetterReturns:
    """One daemon thread that receives.

    Args:
        consumer: Holds the subscription.
        take: Gets each message; acknowledges it, or leaves it.
        fail: Told of an error that nobody expects, which ends the source.
    """

    def __init__(
        self,
        consumer: Consumer,
        take: Callable[[Message], None],
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self._consumer = consumer
        self._take = take
        self._fail = fail
        self._closed = False
        self._ready = threading.Event()
        self._thread = begin("keyshard-letter-returns", self._run, fail=self._unless_closed)

    def close(self) -> None:
        """Receive nothing more; called before the consumer is closed. Idempotent."""
        self._closed = True
        self._ready.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._round()
        except KeyShardError as exc:
            if not self._closed:
                _log.warning(
                    "what the broker has again of %s is not received any more, and stays "
                    "unacknowledged until the next start: %s",
                    self._consumer.topic_partition, exc,
                )  # fmt: skip

    def _unless_closed(self, error: KeyShardError) -> None:
        if not self._closed:
            self._fail(error)

    def _round(self) -> None:
        try:
            blocks = self._consumer.receive(0)
        except UnreadableEntryError:
            return  # It stays unacknowledged; a start names it.
        for block in blocks:
            for message in messages_of(self._consumer.topic_partition, block):
                self._take(message)
        if not blocks:
            ready = self._ready = threading.Event()
            self._consumer.when_ready(ready.set)
            if not self._closed:
                ready.wait()
