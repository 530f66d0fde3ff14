"""What is asked of a broker before pulsar-client connects: whether it is there, and which topics.

The client takes a topic that does not exist for one without partitions, creates it by subscribing,
and says of every mistake in the URL, after its own timeout, that the connection failed. So the
first question goes over three frames of our own: ``CONNECT``, and for each topic
``PARTITIONED_METADATA`` without auto-creation. Field numbers are those of ``PulsarApi.proto``.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import certifi

from keyshard.broker.protobuf import Value, fields_of, message
from keyshard.errors import BrokerError, BrokerUnavailableError

ANSWER_S = 3.0
"""Longest time to reach a broker, and for each of its answers, seconds."""
FRAME_BYTES_MAX = 1 << 20
"""Longest answer; what says it is longer does not speak Pulsar's protocol."""

_CONNECT, _CONNECTED, _ERROR, _PING, _PONG = 2, 3, 14, 18, 19
_METADATA, _METADATA_RESPONSE = 21, 22
_PROTOCOL_VERSION = 21
_SUPPORTS_NO_CREATION = 5
"""Number of the broker's feature to answer without creating; older ones would create."""
_TOPIC_NOT_FOUND = 11
_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_HINT = "Check service_url and that the broker is running"


def missing_topics(service_url: str, topics: Sequence[str]) -> frozenset[str]:
    """Topics that do not exist; creates nothing. None where an old broker cannot tell.

    Args:
        service_url: ``pulsar://host:port,host:port`` or ``pulsar+ssl://...``.
        topics: Full names; without any, only whether the broker is there is asked.

    Raises:
        BrokerUnavailableError: No host of the URL answers as a broker; says why.
        BrokerError: It refuses the connection.
    """
    return _ask_one_of(service_url.partition("://")[2].rstrip("/").split(","), service_url, topics)


def _ask_one_of(hosts: Sequence[str], service_url: str, topics: Sequence[str]) -> frozenset[str]:
    try:
        with _connected(hosts[0], service_url) as connection:
            return connection.missing(topics)
    except BrokerUnavailableError:
        if len(hosts) == 1:
            raise
    return _ask_one_of(hosts[1:], service_url, topics)


class _Connection:
    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._deadline = 0.0
        connected = self._ask(_CONNECT, {1: b"keyshard", 4: _PROTOCOL_VERSION}, _CONNECTED)
        flags = connected.get(4, b"")
        features = fields_of(flags) if isinstance(flags, bytes) else {}
        self._tells_missing = bool(features.get(_SUPPORTS_NO_CREATION))

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        if not self._tells_missing:
            return frozenset()
        found: set[str] = set()
        for number, topic in enumerate(topics):
            asked: dict[int, Value] = {1: topic.encode(), 2: number, 6: 0}
            if self._ask(_METADATA, asked, _METADATA_RESPONSE).get(4) == _TOPIC_NOT_FOUND:
                found.add(topic)
        return frozenset(found)

    def _ask(self, kind: int, fields: dict[int, Value], answer: int) -> dict[int, Value]:
        self._deadline = time.monotonic() + ANSWER_S
        self._send(kind, fields)
        while True:
            (size,) = struct.unpack(">I", self._exactly(4))
            if not 4 <= size <= FRAME_BYTES_MAX:
                raise ValueError("not a frame")
            frame = self._exactly(size)
            (length,) = struct.unpack_from(">I", frame)
            command = fields_of(frame[4 : 4 + length])
            got = command.get(1)
            content = command.get(got, b"") if isinstance(got, int) else b""
            told = fields_of(content) if isinstance(content, bytes) else {}
            if got == answer:
                return told
            if got == _ERROR:
                text = told.get(3, b"")
                raise BrokerError(
                    "The broker refuses the connection: "
                    f"{text.decode(errors='replace') if isinstance(text, bytes) else text}."
                )
            if got == _PING:
                self._send(_PONG, {})

    def _send(self, kind: int, fields: dict[int, Value]) -> None:
        command = message({1: kind, kind: message(fields)})
        self._stream.sendall(struct.pack(">II", 4 + len(command), len(command)) + command)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._stream.settimeout(max(0.001, self._deadline - time.monotonic()))
            part = self._stream.recv(size - len(data))
            if not part:
                raise ConnectionResetError("it closed the connection")
            data += part
        return data


@contextmanager
def _connected(host: str, service_url: str) -> Iterator[_Connection]:
    """A connection to one host; everything that goes wrong is one sentence."""

    def failed(why: str, hint: str = _HINT) -> BrokerUnavailableError:
        return BrokerUnavailableError(f"No broker answers at {service_url}: {why}. {hint}.")

    scheme = service_url.partition("://")[0]
    parts = urlsplit(f"//{host}")
    where = parts.hostname or "", parts.port or _PORTS[scheme]
    try:
        stream = socket.create_connection(where, timeout=ANSWER_S)
    except socket.gaierror:
        raise failed(f"the host name {where[0]!r} is unknown") from None
    except TimeoutError:
        raise failed(f"{host} does not answer within {ANSWER_S:g} s") from None
    except OSError as exc:
        raise failed(f"{host} says {exc.strerror or exc}") from None
    try:
        with stream, _secured(stream, where[0]) if scheme == "pulsar+ssl" else stream as used:
            yield _Connection(used)
    except ssl.SSLError as exc:
        raise failed(
            f"{host} does not speak TLS as expected ({exc.reason or exc})",
            "Check service_url: without TLS it begins with pulsar://",
        ) from None
    except TimeoutError:
        raise failed(
            f"{host} takes a connection and does not answer within {ANSWER_S:g} s"
        ) from None
    except OSError:
        raise failed(
            f"{host} closes the connection",
            "Check service_url: with TLS it begins with pulsar+ssl://",
        ) from None
    except (ValueError, IndexError, struct.error):
        raise failed(
            f"what listens at {host} does not speak Pulsar's protocol",
            "Check the port in service_url: a broker's is 6650 by default, and 8080 that of its "
            "admin interface",
        ) from None


def _secured(stream: socket.socket, host: str) -> ssl.SSLSocket:
    """TLS as pulsar-client does it: a known authority signs, the host's name is not compared."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.check_hostname = False
    return context.wrap_socket(stream, server_hostname=host)
