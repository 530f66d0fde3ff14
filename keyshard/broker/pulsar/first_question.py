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

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.refusals import lacks, no_host_answers, not_accepted
from keyshard.broker.pulsar.tls import tls_context, tls_error
from keyshard.config.connection import Connection
from keyshard.core.protobuf import Value, fields_of, message
from keyshard.errors import (
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
)

ANSWER_S = 3.0
"""Longest time to reach a broker, and for each of its answers, seconds."""
FRAME_BYTES_MAX = 1 << 20
"""Longest answer; what says it is longer does not speak Pulsar's protocol."""

_CONNECT, _CONNECTED, _ERROR, _PING, _PONG = 2, 3, 14, 18, 19
_METADATA, _METADATA_RESPONSE = 21, 22
_PROTOCOL_VERSION = 21
_SUPPORTS_NO_CREATION = 5
"""Number of the broker's feature to answer without creating; older ones would create."""
_NOT_AUTHENTICATED, _NOT_AUTHORIZED, _TOPIC_NOT_FOUND = 3, 4, 11
_PASSING = {0, 1, 2, 6, 14}
"""Numbers of errors that pass by themselves: a broker that starts is not ready."""
_TLS_ALERT = b"\x15\x03"
"""How what speaks TLS begins its answer to who does not."""
_HINT = "Check service_url and that the broker is running"


def missing_topics(
    connection: Connection, credentials: Credentials, topics: Sequence[str]
) -> frozenset[str]:
    """Topics that do not exist; creates nothing. None where an old broker cannot tell.

    Args:
        connection: Of its service URL one host after the other is asked.
        credentials: Those of the connection.
        topics: Full names; without any, only whether the broker lets this connection in is asked.

    Raises:
        BrokerUnavailableError: No host of the URL answers as a broker; says why.
        TlsError: The two sides do not trust each other.
        AuthenticationError: It does not accept who this is.
        AuthorizationError: Who this is may not look a topic up.
        BrokerError: It refuses the connection.
    """
    failed: list[tuple[str, KeyShardError]] = []
    for host in connection.hosts:
        try:
            with _connected(host, connection, credentials) as asked:
                return asked.missing(topics)
        except AuthorizationError:  # noqa: PERF203 - the next host may answer
            raise
        except BrokerError as exc:
            failed.append((host, exc))
    raise no_host_answers(connection.service_url, failed)


class _Asking:
    def __init__(self, stream: socket.socket, host: str, credentials: Credentials) -> None:
        self._stream = stream
        self._host = host
        self._credentials = credentials
        self._deadline = 0.0
        shown = credentials.show()
        connect: dict[int, Value] = {1: b"keyshard", 4: _PROTOCOL_VERSION}
        if shown.method != "none":
            connect |= {3: shown.data.encode(), 5: shown.method.encode()}
        connected = self._ask(_CONNECT, connect, _CONNECTED)
        flags = connected.get(4, b"")
        features = fields_of(flags) if isinstance(flags, bytes) else {}
        self._tells_missing = bool(features.get(_SUPPORTS_NO_CREATION))

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        if not self._tells_missing:
            return frozenset()
        found: set[str] = set()
        for number, topic in enumerate(topics):
            asked: dict[int, Value] = {1: topic.encode(), 2: number, 6: 0}
            error = self._ask(_METADATA, asked, _METADATA_RESPONSE).get(4)
            if error == _TOPIC_NOT_FOUND:
                found.add(topic)
            if error == _NOT_AUTHORIZED:
                raise lacks(self._credentials.who(), "consume", topic)
        return frozenset(found)

    def _ask(self, kind: int, fields: dict[int, Value], answer: int) -> dict[int, Value]:
        self._deadline = time.monotonic() + ANSWER_S
        self._send(kind, fields)
        while True:
            head = self._exactly(4)
            if head.startswith(_TLS_ALERT):
                raise ConnectionResetError("it speaks TLS")
            (size,) = struct.unpack(">I", head)
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
                raise self._refused(told)
            if got == _PING:
                self._send(_PONG, {})

    def _refused(self, told: dict[int, Value]) -> BrokerError:
        text = told.get(3, b"")
        said = text.decode(errors="replace") if isinstance(text, bytes) else text
        if told.get(2) in (_NOT_AUTHENTICATED, _NOT_AUTHORIZED):
            return not_accepted(self._host, self._credentials.who(), str(said))
        error = BrokerUnavailableError if told.get(2, 0) in _PASSING else BrokerError
        return error(f"The broker at {self._host} refuses the connection: {said}.")

    def _send(self, kind: int, fields: dict[int, Value]) -> None:
        command = message({1: kind, kind: message(fields)})
        self._stream.sendall(struct.pack(">II", 4 + len(command), len(command)) + command)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._stream.settimeout(left_s)
            part = self._stream.recv(size - len(data))
            if not part:
                raise ConnectionResetError("it closed the connection")
            data += part
        return data


@contextmanager
def _connected(host: str, connection: Connection, credentials: Credentials) -> Iterator[_Asking]:
    """A connection to one host; everything that goes wrong is one sentence."""

    def failed(why: str, hint: str = _HINT) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"No broker answers at {connection.service_url}: {why}. {hint}."
        )

    parts = urlsplit(f"//{host}")
    where = parts.hostname or "", parts.port or (6651 if connection.tls else 6650)
    context = tls_context(connection) if connection.tls else None
    try:
        stream = socket.create_connection(where, timeout=ANSWER_S)
    except socket.gaierror:
        raise failed(f"the host name {where[0]!r} is unknown") from None
    except TimeoutError:
        raise failed(f"{host} does not answer within {ANSWER_S:g} s") from None
    except OSError as exc:
        raise failed(f"{host} says {exc.strerror or exc}") from None
    try:
        with (
            stream,
            context.wrap_socket(stream, server_hostname=where[0]) if context else stream as used,
        ):
            yield _Asking(used, host, credentials)
    except ssl.SSLError as exc:
        error = tls_error(exc, f"The broker at {host}", connection)
        raise error or failed(
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
