"""Brokers that answer from the model, and break as the seed says."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from keyshard.broker.wire.frames import api
from keyshard.core.ring.hash_range import HashRange
from tests.support.frame_broker import (
    CONFLICT,
    NOT_READY,
    STORAGE_FAILS,
    FrameServer,
    SocketSession,
)
from tests.wire_simulation.model import LATE, LEDGER, Member, Model, message

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


class Session(SocketSession):
    """One connection: a thread that reads and one that writes."""

    def __init__(self, broker: ServedBroker, stream: socket.socket) -> None:
        super().__init__(stream)
        self.broker, self.model = broker, broker.model
        self._troubles = broker.troubles
        self._changed = threading.Condition()
        self._unsent: deque[bytes] = deque()
        self._late: list[Any] = []
        self._cut = False
        troubles = self._troubles
        self._cut_out_at = troubles.number(3_000) if troubles.strike(0.3) else -1
        self._cut_in_at = troubles.number(1_500) if troubles.strike(0.3) else -1
        self._rest_at = troubles.number(2_000) if troubles.strike(0.2) else -1
        self._mute_at = troubles.number(1_000) if troubles.strike(0.03) else -1
        self._piece = troubles.number(3) + 1 if troubles.strike(0.2) else 1 << 20
        self._read = self._written = 0

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._write, name="served", daemon=True).start()

    def put(self, data: bytes) -> None:
        with self._changed:
            self._unsent.append(data)
            self._changed.notify()

    def cut(self) -> None:
        # Shut down first: a closed socket stays open while a thread receives from it.
        super().cut()
        with self._changed:
            self._cut = True
            self._changed.notify()
        with self.model.lock:
            self.model.leave(self)

    def _write(self) -> None:
        with suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._unsent or self._cut)
                    if self._cut:
                        break
                    data = self._unsent.popleft()
                while data:
                    stops = [self._piece, *(
                        at - self._written
                        for at in (self._cut_out_at, self._rest_at, self._mute_at)
                        if at > self._written
                    )]  # fmt: skip
                    piece, data = data[: min(stops)], data[min(stops) :]
                    self.stream.sendall(piece)
                    self._written += len(piece)
                    if self._written == self._cut_out_at:
                        self.cut()
                    elif self._written == self._rest_at:
                        time.sleep(RESTED_MAX_S)
                    elif self._written == self._mute_at:
                        # Longer than any client waits.
                        with self._changed:
                            self._changed.wait_for(lambda: self._cut, 5.0)
        self.stream.close()

    def read(self) -> bytes:
        most = 1 << 16
        if self._cut_in_at >= 0:
            most = min(most, self._cut_in_at - self._read)
        piece = self.stream.recv(most) if most > 0 else b""
        self._read += len(piece)
        return piece

    def handle(self, name: str, command: Any) -> None:
        with self.model.lock:
            super().handle(name, command)

    def ended(self) -> None:
        self.cut()

    # -- one command each, with the lock of the model held ---------------------------------------

    def _connect(self, asked: Any) -> None:
        if self._troubles.strike(0.05):
            content = api.Error(request_id=2**64 - 1, error=NOT_READY, message=b"starting")
            self.send("error", content)
        else:
            super()._connect(asked)

    def _lookup(self, asked: Any) -> None:
        if self._refused(asked):
            return
        owner = self.broker.brokers[self.model.owner[asked.topic.decode()]]
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
        name = asked.topic.decode()
        reads = asked.HasField("start_message_id")
        where = None if reads else asked.key_shared.hash_ranges[0]
        member = Member(
            self, asked.consumer_id, name, self.send,
            None if where is None else HashRange(where.start, where.end),
            0 if not reads or asked.start_message_id.ledger < LEDGER
            else asked.start_message_id.entry,
        )  # fmt: skip
        if self.broker.brokers[self.model.owner[name]] is not self.broker:
            self.refuse(asked, NOT_READY)
        elif not self.model.subscribe(member):
            self.refuse(asked, CONFLICT)
        elif not self._troubles.strike(0.02):
            self.succeed(asked)

    def _flow(self, given: Any) -> None:
        self.model.flow(self, given.consumer_id, given.permits)

    def _ack(self, given: Any) -> None:
        member = self.model.members.get((self, given.consumer_id))
        if member is not None and self._troubles.strike(0.05):
            self.model.done[member.topic].difference_update(one.entry for one in given.message_id)
            self.send("ack_response", api.AckResponse(
                consumer_id=given.consumer_id, request_id=given.request_id,
                error=STORAGE_FAILS, message=b"no bookie",
            ))  # fmt: skip
            return
        numbers = [one.entry for one in given.message_id]
        if self.model.acknowledge(self, given.consumer_id, numbers):
            self.confirm(given)

    def _get_last_message_id(self, asked: Any) -> None:
        member = self.model.members.get((self, asked.consumer_id))
        if member is None:
            self.refuse(asked, NOT_READY)
            return
        log = self.model.logs[member.topic]
        self.name_last(asked, LEDGER, len(log) - 1)

    def _close_consumer(self, asked: Any) -> None:
        self.model.leave(self, asked.consumer_id)
        self.succeed(asked)
        late, self._late = self._late, []
        for one in late:
            self._subscribe(one)

    def end(self, consumer_id: int, *, twice: bool) -> None:
        """Tell a consumer that it has ended; later entries for it are late ones."""
        for _ in range(1 + twice):
            closing = api.CloseConsumer(consumer_id=consumer_id, request_id=0)
            self.send("close_consumer", closing)
            self.send("message", message(consumer_id, LATE), b"\0\0\0\0late")

    def _refused(self, asked: Any) -> bool:
        struck = self._troubles.strike(0.1)
        if struck:
            code = PASSING_ERRORS[self._troubles.number(len(PASSING_ERRORS))]
            self.refuse(asked, code)
        return struck


class ServedBroker(FrameServer):
    """One of the brokers of a cluster."""

    def __init__(self, model: Model, troubles: Troubles, brokers: list[ServedBroker]) -> None:
        self.model, self.troubles, self.brokers = model, troubles, brokers
        brokers.append(self)
        super().__init__()

    def session(self, stream: socket.socket) -> Session:
        return Session(self, stream)
