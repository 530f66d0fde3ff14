"""Checks, before pulsar-client connects, that a broker is reachable and that topics exist.

The client treats a missing topic as one without partitions, and creates it by subscribing. For
every mistake in the URL it reports a failed connection, after its own timeout. This check
therefore sends its own frames: ``CONNECT``, and for each topic ``PARTITIONED_METADATA`` without
auto-creation. Field numbers are those of ``PulsarApi.proto``.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from keyshard.base_error import UNREACHABLE
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import lacks, no_host_answers, no_ip_answers, not_accepted
from keyshard.broker.auth.tls import tls_context, tls_error
from keyshard.broker.framing import FrameReader, ProtocolError, command_of, framed
from keyshard.broker.hosts import HostQuestions, ip_addresses
from keyshard.config.connection import Connection, host_and_port
from keyshard.core.protobuf import Value, fields_of, message
from keyshard.errors import (
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
)

ANSWER_S = 3.0
"""Longest time to reach a broker, and for each of its answers, seconds."""
GREETING_S = 3 * ANSWER_S
"""Longest time to connect, for TLS, and for the answer to the greeting, seconds."""
FRAME_BYTES_MAX = 1 << 20
"""Longest answer, bytes. A peer that announces more does not speak Pulsar's protocol."""
READ_BYTES = 4096
"""Maximum bytes of one read."""

_CONNECT, _CONNECTED, _ERROR, _PING, _PONG = 2, 3, 14, 18, 19
_METADATA, _METADATA_RESPONSE = 21, 22
_PROTOCOL_VERSION = 21
_SUPPORTS_NO_CREATION = 5
"""Feature flag of brokers that answer without creating a topic; older brokers create it."""
_NOT_AUTHENTICATED, _NOT_AUTHORIZED, _TOPIC_NOT_FOUND = 3, 4, 11
_PASSING = {0, 1, 2, 6, 14}
"""Numbers of transient errors, such as those of a broker that is starting."""
_TLS_ALERT = b"\x15\x03"
"""First bytes of the alert with which a TLS server answers a plain-text client."""


def missing_topics(
    connection: Connection, credentials: Credentials, topics: Sequence[str]
) -> frozenset[str]:
    """Return the topics that do not exist. Creates none. Empty if an old broker cannot tell.

    Args:
        connection: The hosts of its service URL are asked until one answers, each a second after
            the previous one.
        credentials: Those of the connection.
        topics: Full names. If empty, only the connection itself is checked.

    Raises:
        BrokerUnavailableError: No host of the URL answers as a broker; the text says why.
        TlsError: One side does not trust the other.
        AuthenticationError: The broker rejects the credentials.
        AuthorizationError: The credentials do not permit a topic look-up.
        ConfigError: The issuer of tokens cannot be asked through the proxy of the environment.
        BrokerError: The broker refuses the connection.
    """
    hosts = list(dict.fromkeys(connection.hosts))
    failed: dict[str, KeyShardError] = {}
    while left := [host for host in hosts if host not in failed]:
        asking = HostQuestions(partial(_asked, connection, credentials), discard=_Asking.close)
        asked = asking.first(left, GREETING_S)
        failed |= dict(asking.failed)
        if asked is None:
            break
        try:
            with closing(asked), _explained(asked.host, connection):
                return asked.missing(topics)
        except AuthorizationError:
            raise
        except BrokerError as exc:
            failed[asked.host] = exc
    raise no_host_answers(connection.service_url, [(host, failed[host]) for host in hosts])


class _Asking:
    """A connection to a host that has answered the greeting."""

    def __init__(self, stream: socket.socket, host: str, credentials: Credentials) -> None:
        self.host = host
        self._stream = stream
        self._credentials = credentials
        self._deadline = 0.0
        self._first = b""
        """The first bytes of the host."""
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._frames: deque[bytes] = deque()
        shown = credentials.show()
        connect: dict[int, Value] = {1: b"keyshard", 4: _PROTOCOL_VERSION}
        if shown.method != "none":
            connect |= {3: shown.data.encode(), 5: shown.method.encode()}
        connected = self._ask(_CONNECT, connect, _CONNECTED)
        flags = connected.get(4, b"")
        features = fields_of(flags) if isinstance(flags, bytes) else {}
        self._tells_missing = bool(features.get(_SUPPORTS_NO_CREATION))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._stream.close()

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        """Return the topics that do not exist, as :func:`missing_topics` does."""
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
            command = fields_of(command_of(self._frame()))
            got = command.get(1)
            content = command.get(got, b"") if isinstance(got, int) else b""
            response = fields_of(content) if isinstance(content, bytes) else {}
            if got == answer:
                return response
            if got == _ERROR:
                raise self._refused(response)
            if got == _PING:
                self._send(_PONG, {})

    def _refused(self, response: dict[int, Value]) -> BrokerError:
        text = response.get(3, b"")
        said = text.decode(errors="replace") if isinstance(text, bytes) else text
        if response.get(2) in (_NOT_AUTHENTICATED, _NOT_AUTHORIZED):
            return not_accepted(self.host, self._credentials.who(), str(said))
        error = BrokerUnavailableError if response.get(2, 0) in _PASSING else BrokerError
        return error(
            f"The broker at {self.host} refuses the connection: {said}.", "See the broker's log."
        )

    def _send(self, kind: int, fields: dict[int, Value]) -> None:
        self._stream.sendall(framed(message({1: kind, kind: message(fields)})))

    def _frame(self) -> bytes:
        """Receive the next frame."""
        while not self._frames:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._stream.settimeout(left_s)
            data = self._stream.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._first = (self._first + data)[: len(_TLS_ALERT)]
            if self._first == _TLS_ALERT:
                raise ConnectionResetError("it speaks TLS")
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()


def _asked(connection: Connection, credentials: Credentials, host: str) -> _Asking:
    """Connect to one host, by the IP address that answers first."""
    name, port = host_and_port(host, tls=connection.tls)
    context = tls_context(connection) if connection.tls else None

    def connect(ip: str) -> _Asking:
        try:
            stream = socket.create_connection((ip, port), timeout=ANSWER_S)
        except TimeoutError:
            raise _failed(connection, f"{host} does not answer within {ANSWER_S:g} s") from None
        except OSError as exc:
            raise _failed(connection, f"{host}: {exc.strerror or exc}") from None
        try:
            with _explained(host, connection):
                if context is not None:
                    stream = context.wrap_socket(stream, server_hostname=name)
                return _Asking(stream, host, credentials)
        except BaseException:
            stream.close()
            raise

    try:
        ips = ip_addresses(name, port)
    except socket.gaierror:
        raise _failed(connection, f"the host name {name!r} is unknown") from None
    except OSError as exc:
        raise _failed(connection, f"{host}: {exc.strerror or exc}") from None
    asking = HostQuestions(connect, discard=_Asking.close)
    made = asking.first(ips, GREETING_S)
    if made is not None:
        return made
    raise no_ip_answers(host, asking.failed)


@contextmanager
def _explained(host: str, connection: Connection) -> Iterator[None]:
    """Translate every failure on an open TCP connection into an error that names its cause."""
    failed = partial(_failed, connection)
    try:
        yield
    except ssl.SSLError as exc:
        error = tls_error(exc, f"The broker at {host}", connection)
        raise error or failed(
            f"the TLS handshake with {host} failed ({exc.reason or exc})",
            "Check service_url: without TLS, it begins with pulsar://.",
        ) from None
    except TimeoutError:
        raise failed(
            f"{host} accepts the connection, but does not answer within {ANSWER_S:g} s"
        ) from None
    except OSError:
        raise failed(
            f"{host} closes the connection",
            "Check service_url: with TLS, it begins with pulsar+ssl://.",
        ) from None
    except ConfigError:
        # It is about the credentials and not about the answer, although it is a ValueError.
        raise
    except (ProtocolError, ValueError, IndexError):
        raise failed(
            f"the program at {host} does not speak Pulsar's protocol",
            "Check the port in service_url. The default port of a broker is 6650; 8080 is the "
            "port of the admin interface.",
        ) from None


def _failed(connection: Connection, why: str, remedy: str = UNREACHABLE) -> BrokerUnavailableError:
    return BrokerUnavailableError(f"No broker answers at {connection.service_url}: {why}.", remedy)
