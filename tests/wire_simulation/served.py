"""Brokers that speak frames: they listen, answer from the model, and break as they are told."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from keyshard.broker.wire.frames import NAMES, api, frame_of
from keyshard.core.ring.hash_range import HashRange
from tests.wire_simulation.model import CONFLICT, LATE, LEDGER, NOT_READY, Member, Model, message

PASSING_ERRORS = (0, 1, 2, 6, 14)
RESTED_MAX_S = 0.05
"""Longest rest in the middle of a frame, seconds; and of what a broker sends late."""


@dataclass(slots=True)
class Troubles:
    """What goes wrong, drawn from the seed; at some time nothing does any more."""

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


class Session:
    """One connection that came: a thread that reads and one that writes."""

    def __init__(self, broker: ServedBroker, stream: socket.socket) -> None:
        self.broker, self.model, self.stream = broker, broker.model, stream
        self._troubles = broker.troubles
        self._changed = threading.Condition()
        self._unsent: deque[bytes] = deque()
        self._cut = False
        troubles = self._troubles
        self._cut_out_at = troubles.number(3_000) if troubles.strike(0.3) else -1
        self._cut_in_at = troubles.number(1_500) if troubles.strike(0.3) else -1
        self._rest_at = troubles.number(2_000) if troubles.strike(0.2) else -1
        self._mute_at = troubles.number(1_000) if troubles.strike(0.03) else -1
        self._piece = troubles.number(3) + 1 if troubles.strike(0.2) else 1 << 20
        self._read = self._written = 0
        for work in (self._serve, self._write):
            threading.Thread(target=work, name="served", daemon=True).start()

    def send(self, name: str, content: Any, stored: bytes = b"") -> None:
        frame = frame_of(name, content)
        if stored:
            frame = struct.pack(">I", len(frame) - 4 + len(stored)) + frame[4:] + stored
        with self._changed:
            self._unsent.append(frame)
            self._changed.notify()

    def cut(self) -> None:
        # In this order: closed first, it would stay open for as long as it is read.
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
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
                        # For longer than anybody waits.
                        with self._changed:
                            self._changed.wait_for(lambda: self._cut, 5.0)
        self.stream.close()

    def _serve(self) -> None:
        with suppress(OSError, ConnectionError):
            while True:
                (size,) = struct.unpack(">I", self._exactly(4))
                frame = self._exactly(size)
                (length,) = struct.unpack_from(">I", frame)
                command = api.BaseCommand.FromString(frame[4 : 4 + length])
                name = NAMES[command.type]
                answer = getattr(self, f"_{name}", None)
                if answer is not None:
                    with self.model.lock:
                        answer(getattr(command, name))
        self.cut()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            most = size - len(data)
            if self._cut_in_at >= 0:
                most = min(most, self._cut_in_at - self._read)
            more = self.stream.recv(most) if most > 0 else b""
            if not more:
                raise ConnectionError
            self._read += len(more)
            data += more
        return data

    # -- one command each, with the lock of the model held ---------------------------------------

    def _connect(self, _: Any) -> None:
        if self._troubles.strike(0.05):
            content = api.Error(request_id=2**64 - 1, error=NOT_READY, message=b"starting")
            self.send("error", content)
            return
        told = api.Connected(server_version=b"served", max_message_size=1 << 20)
        self.send("connected", told)

    def _ping(self, _: Any) -> None:
        self.send("pong", api.Nothing())

    def _lookup(self, asked: Any) -> None:
        if self._refused(asked):
            return
        owner = self.broker.brokers[self.model.owner[asked.topic.decode()]]
        # Who does not know sends on to the other one, which does; sometimes both do not.
        astray = owner is not self.broker and not self._troubles.number(2)
        self.send("lookup_response", api.LookupResponse(
            request_id=asked.request_id, response=0 if astray else 1, authoritative=True,
            broker_url=owner.url.encode(),
        ))  # fmt: skip

    def _subscribe(self, asked: Any) -> None:
        if self._refused(asked):
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
            self._refuse(asked, NOT_READY)
        elif not self.model.subscribe(member):
            self._refuse(asked, CONFLICT)
        elif not self._troubles.strike(0.02):
            self.send("success", api.Success(request_id=asked.request_id))

    def _flow(self, given: Any) -> None:
        self.model.flow(self, given.consumer_id, given.permits)

    def _ack(self, given: Any) -> None:
        said: dict[str, Any] = {"consumer_id": given.consumer_id, "request_id": given.request_id}
        member = self.model.members.get((self, given.consumer_id))
        if member is not None and self._troubles.strike(0.05):
            self.model.done[member.topic].difference_update(one.entry for one in given.message_id)
            self.send("ack_response", api.AckResponse(error=2, message=b"no bookie", **said))
            return
        numbers = [one.entry for one in given.message_id]
        if self.model.acknowledge(self, given.consumer_id, numbers):
            self.send("ack_response", api.AckResponse(**said))

    def _get_last_message_id(self, asked: Any) -> None:
        member = self.model.members.get((self, asked.consumer_id))
        if member is None:
            self._refuse(asked, NOT_READY)
            return
        log = self.model.logs[member.topic]
        last = api.MessageId(ledger=LEDGER, entry=(len(log) - 1) % 2**64)
        self.send("get_last_message_id_response", api.GetLastMessageIdResponse(
            last_message_id=last, request_id=asked.request_id
        ))  # fmt: skip

    def _close_consumer(self, asked: Any) -> None:
        self.model.leave(self, asked.consumer_id)
        self.send("success", api.Success(request_id=asked.request_id))

    def end(self, consumer_id: int, *, twice: bool) -> None:
        """Tell a consumer that it has ended; what comes for it afterwards is for nobody."""
        for _ in range(1 + twice):
            closing = api.CloseConsumer(consumer_id=consumer_id, request_id=0)
            self.send("close_consumer", closing)
            self.send("message", message(consumer_id, LATE), b"\0\0\0\0late")

    def _refused(self, asked: Any) -> bool:
        struck = self._troubles.strike(0.1)
        if struck:
            code = PASSING_ERRORS[self._troubles.number(len(PASSING_ERRORS))]
            self._refuse(asked, code)
        return struck

    def _refuse(self, asked: Any, code: int) -> None:
        self.send("error", api.Error(request_id=asked.request_id, error=code, message=b"refused"))


class ServedBroker:
    """One of the brokers of a cluster."""

    def __init__(self, model: Model, troubles: Troubles, brokers: list[ServedBroker]) -> None:
        self.model, self.troubles, self.brokers = model, troubles, brokers
        brokers.append(self)
        self._sessions: list[Session] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"pulsar://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._listen, name="served", daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listening.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sessions.append(Session(self, stream))

    def cut_all(self) -> None:
        for session in list(self._sessions):
            session.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut_all()
