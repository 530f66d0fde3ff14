"""Brokers that answer from the model, and break as the seed says."""

from __future__ import annotations

import random
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from tests.support.frame_broker.server import READ_BYTES, FrameServer, QueuedSession
from tests.support.frame_broker.session import NOT_READY, STORAGE_FAILS
from tests.support.frame_broker.topics import LEDGER, TopicSession
from tests.wire_simulation.model import LATE, JudgedMember, Model

PASSING_ERRORS = (0, 1, 2, 6, 14)
RESTED_MAX_S = 0.05
"""Longest rest in the middle of a frame, and delay of late frames, seconds."""


@dataclass(slots=True)
class Troubles:
    """Faults, drawn from the seed; their number is limited."""

    draw: random.Random
    left: int
    """Connections and answers that may still be broken."""
    met: int
    lock: threading.Lock

    def strike(self, chance: float) -> bool:
        with self.lock:
            if self.left <= 0 or self.draw.random() >= chance:
                return False
            self.left -= 1
            self.met += 1
            return True

    def number(self, most: int) -> int:
        with self.lock:
            return self.draw.randrange(most)


class Session(TopicSession, QueuedSession):
    """One connection."""

    broker: ServedBroker
    member_class = JudgedMember

    def __init__(self, broker: ServedBroker, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self._late: list[Any] = []
        self._troubles = troubles = broker.troubles
        self._cut_out_at = troubles.number(3_000) if troubles.strike(0.3) else -1
        self._cut_in_at = troubles.number(1_500) if troubles.strike(0.3) else -1
        self._rest_at = troubles.number(2_000) if troubles.strike(0.2) else -1
        self._mute_at = troubles.number(1_000) if troubles.strike(0.03) else -1
        self._piece = troubles.number(3) + 1 if troubles.strike(0.2) else 1 << 20
        self._read = self._written = 0

    def write(self, data: bytes) -> None:
        while data:
            stops = [self._piece, *(
                at - self._written
                for at in (self._cut_out_at, self._rest_at, self._mute_at)
                if at > self._written
            )]  # fmt: skip
            piece, data = data[: min(stops)], data[min(stops) :]
            super().write(piece)
            self._written += len(piece)
            if self._written == self._cut_out_at:
                self.cut()
            elif self._written == self._rest_at:
                time.sleep(RESTED_MAX_S)
            elif self._written == self._mute_at:
                # Longer than any client waits.
                with self.changed:
                    self.changed.wait_for(lambda: self.over, 5.0)

    def read(self) -> bytes:
        most = READ_BYTES
        if self._cut_in_at >= 0:
            most = min(most, self._cut_in_at - self._read)
        piece = self.stream.recv(most) if most > 0 else b""
        self._read += len(piece)
        return piece

    # -- one command each, with the lock of the topics held --------------------------------------

    def _connect(self, asked: Any) -> None:
        if self._troubles.strike(0.05):
            self.refuse(asked, NOT_READY)
        else:
            super()._connect(asked)

    def _lookup(self, asked: Any) -> None:
        if self._refused(asked):
            return
        owner = self._owner(asked)
        # A broker that is not the owner redirects, or names the owner.
        astray = owner is not self.broker and not self._troubles.number(2)
        self.lead_to(asked, owner.url, redirect=astray)

    def _subscribe(self, asked: Any) -> None:
        if self._refused(asked):
            return
        if self._troubles.strike(0.02):
            # As a broker that is frozen: a request to close the consumer is executed first.
            self._late.append(asked)
            return
        if self._owner(asked) is not self.broker:
            self.refuse(asked, NOT_READY)
        elif self.joins(asked) and not self._troubles.strike(0.02):
            self.succeed(asked)

    def _ack(self, given: Any) -> None:
        member = self.topics.members.get((self, given.consumer_id))
        if member is not None and self._troubles.strike(0.05):
            done = self.broker.topics.done[member.topic]
            done.difference_update(one.entry for one in given.message_id)
            self.confirm(given, error=STORAGE_FAILS, message=b"no bookie")
        else:
            super()._ack(given)

    def _close_consumer(self, asked: Any) -> None:
        super()._close_consumer(asked)
        late, self._late = self._late, []
        for one in late:
            self._subscribe(one)

    def end(self, consumer_id: int, *, twice: bool) -> None:
        """Tell a consumer that it has ended; later entries for it are late ones."""
        for _ in range(1 + twice):
            self.end_consumer(consumer_id)
            self.deliver(consumer_id, LEDGER, LATE, b"\0\0\0\0late")

    def _owner(self, asked: Any) -> ServedBroker:
        return self.broker.brokers[self.broker.topics.owner[asked.topic.decode()]]

    def _refused(self, asked: Any) -> bool:
        struck = self._troubles.strike(0.1)
        if struck:
            code = PASSING_ERRORS[self._troubles.number(len(PASSING_ERRORS))]
            self.refuse(asked, code)
        return struck


class ServedBroker(FrameServer):
    """One of the brokers of a cluster."""

    session = Session

    def __init__(self, topics: Model, troubles: Troubles, brokers: list[ServedBroker]) -> None:
        self.topics, self.troubles, self.brokers = topics, troubles, brokers
        brokers.append(self)
        super().__init__()
