"""The parts of Pulsar's binary protocol that the Python client lacks.

Transactions, keys set as bytes as the Java client sends them, and invalid metadata.

Frames and field numbers are those of ``PulsarApi.proto``; a command's type is also the number of
its field in ``BaseCommand``.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from keyshard.broker.memory import Message
from keyshard.core.position.entry import EntryId
from keyshard.core.protobuf import Value, fields_of, message
from tests.helpers import exactly
from tests.support.deadlines import deadline
from tests.support.frame_broker.session import command_fields, framed_fields

CONNECT, CONNECTED, PRODUCER, SEND, RECEIPT, PRODUCER_SUCCESS = 2, 3, 5, 6, 7, 17
CLOSE_PRODUCER = 15
PING, PONG = 18, 19
NEW_TXN, ADD_PARTITION, END_TXN, COORDINATOR_CONNECT = 50, 52, 56, 62
COMMIT, ABORT = 0, 1
TIMEOUT_S = deadline(20)


RawEntry = tuple[dict[int, Value], bytes]
"""Fields of ``MessageMetadata``, and the payload."""


class RawConnection:
    """A connection that can produce, also in one transaction of the first coordinator."""

    def __init__(self, host: str, port: int) -> None:
        self.stored: list[EntryId] = []
        """Entries that were published, as the broker confirmed them."""
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._request(CONNECT, CONNECTED, {1: b"contract", 4: 19})

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def publish(self, topic: str, entries: Sequence[RawEntry]) -> None:
        """Publish entries and wait until all are stored.

        Metadata may replace producer name (1), sequence id (2) and publish time (3).
        """
        self._request(PRODUCER, PRODUCER_SUCCESS, {1: topic.encode(), 2: 1, 3: 4})
        for number, (metadata, payload) in enumerate(entries):
            now_ms = time.time_ns() // 1_000_000
            own: dict[int, int | bytes] = {1: b"raw", 2: number, 3: now_ms}
            data = message(own | metadata)
            framed = struct.pack(">I", len(data)) + data + payload
            self._request(SEND, RECEIPT, {1: 1, 2: number, 3: metadata.get(11, 1)}, framed)

    def abort(self, topic: str, keys: Sequence[str]) -> None:
        """Publish one message for each key in a transaction, and abort it."""
        self.end(self.begin(topic, keys), ABORT)

    def end(self, transaction: tuple[Value, Value], how: int) -> None:
        """End a transaction."""
        least, most = transaction
        self._request(END_TXN, END_TXN + 1, {1: 5, 2: least, 3: most, 4: how})

    def coordinate(self) -> None:
        """Connect to the first coordinator, to end a transaction of another connection."""
        self._request(COORDINATOR_CONNECT, COORDINATOR_CONNECT + 1, {1: 1, 2: 0})

    def begin(self, topic: str, keys: Sequence[str]) -> tuple[Value, Value]:
        """Publish one message for each key in a transaction that stays open; its id."""
        self.coordinate()
        begun = self._request(NEW_TXN, NEW_TXN + 1, {1: 2, 2: 60_000, 3: 0})
        least, most = begun.get(2, 0), begun.get(3, 0)
        added = {1: 3, 2: least, 3: most, 4: topic.encode()}
        self._request(ADD_PARTITION, ADD_PARTITION + 1, added)
        self._request(PRODUCER, PRODUCER_SUCCESS, {1: topic.encode(), 2: 0, 3: 4, 12: 1})
        for number, key in enumerate(keys):
            metadata = message(
                {
                    1: b"transaction",
                    2: number,
                    3: time.time_ns() // 1_000_000,
                    6: key.encode(),
                    22: least,
                    23: most,
                }
            )
            payload = struct.pack(">I", len(metadata)) + metadata + b"value"
            self._request(SEND, RECEIPT, {1: 0, 2: number, 4: least, 5: most}, payload)
        return least, most

    def _request(
        self, kind: int, answer: int, fields: dict[int, Value], payload: bytes = b""
    ) -> dict[int, Value]:
        self._send(kind, fields, payload)
        while True:
            got, content = self._receive()
            if got == PING:
                self._send(PONG, {})
            elif got == answer:
                if got == RECEIPT:
                    self._keep(content[3])
                assert not (got > NEW_TXN and 4 in content), f"refused: {content}"
                return content
            else:
                # Producers of a topic that is unloaded are closed without being asked.
                assert got in (PONG, CLOSE_PRODUCER), f"{got} instead of {answer}: {content}"

    def _keep(self, message_id: Value) -> None:
        assert isinstance(message_id, bytes)
        ledger, entry = (fields_of(message_id).get(number, 0) for number in (1, 2))
        assert isinstance(ledger, int)
        assert isinstance(entry, int)
        self.stored.append(EntryId(ledger, entry))

    def _send(self, kind: int, fields: dict[int, Value], payload: bytes = b"") -> None:
        self._socket.sendall(framed_fields(kind, fields, payload))

    def _receive(self) -> tuple[int, dict[int, Value]]:
        (size,) = struct.unpack(">I", exactly(self._socket, 4))
        frame = exactly(self._socket, size)
        (length,) = struct.unpack_from(">I", frame)
        return command_fields(frame[4 : 4 + length])


def entry_of(messages: Sequence[Message], *, batched: bool) -> RawEntry:
    """One entry of messages as the Java client sends them, with the flags of their keys."""
    metadata = _fields(messages[0], key=6, is_base64=17, ordering_key=18, event_ms=12)
    if not batched:
        return metadata | ({25: 1} if messages[0].value is None else {}), messages[0].value or b""
    payload = b""
    for one in messages:
        fields = _fields(one, key=2, is_base64=6, ordering_key=7, event_ms=5)
        if one.value is None:
            fields[9] = 1
        value = one.value or b""
        single = message(fields | {3: len(value)})
        payload += struct.pack(">I", len(single)) + single + value
    return metadata | {11: len(messages)}, payload


def _fields(
    one: Message, *, key: int, is_base64: int, ordering_key: int, event_ms: int
) -> dict[int, Value]:
    found: dict[int, Value] = {}
    if one.key is not None:
        found |= {key: one.key.encode(), is_base64: int(one.key_is_base64)}
    if one.ordering_key is not None:
        found[ordering_key] = one.ordering_key.encode()
    if one.event_ms:
        found[event_ms] = one.event_ms
    return found
