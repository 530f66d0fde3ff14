"""Opens a socket to a broker, with TLS if configured, explains failures, and greets the broker."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import contextmanager
from typing import Any, NamedTuple

from keyshard.base_error import UNREACHABLE
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import not_accepted
from keyshard.broker.auth.tls import tls_context, tls_error
from keyshard.broker.hosts import ip_addresses
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection
from keyshard.errors import BrokerError, BrokerUnavailableError

_CLIENT = b"keyshard"
_PROTOCOL_VERSION = 21


class Address(NamedTuple):
    """The address of a broker."""

    host: str
    port: int
    behind_proxy: str = ""
    """``host:port`` of the broker behind a proxy; empty without a proxy."""
    ip: str = ""
    """An IP address of the host; empty if its name is not resolved yet."""

    @property
    def authority(self) -> str:
        """``host:port``, as in a URL. If the port is 0, the host alone, as a label."""
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        proxy = f"{self.behind_proxy} through " if self.behind_proxy else ""
        return proxy + self.authority


def resolved(address: Address, connection: Connection) -> Sequence[Address]:
    """Return a copy of an address for each IP address of its host name, with ``ip`` set.

    Raises:
        BrokerUnavailableError: The name is unknown (retriable).
    """
    with _explained(address, connection):
        ips = ip_addresses(address.host, address.port)
    return [address._replace(ip=ip) for ip in ips]


def open_socket(address: Address, connection: Connection, timeout_s: float) -> socket.socket:
    """Open a connected socket, with TLS if the connection uses it.

    Raises:
        BrokerUnavailableError: Nothing answers at the address (retriable).
        TlsError: One side does not trust the other.
    """
    context = tls_context(connection) if connection.tls else None
    with _explained(address, connection):
        timeout_s = max(0.001, min(timeout_s, connection.connection_timeout_ms / 1000))
        plain = socket.create_connection(
            (address.ip or address.host, address.port), timeout=timeout_s
        )
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if context is None:
                return plain
            return context.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise


@contextmanager
def _explained(address: Address, connection: Connection) -> Iterator[None]:
    try:
        yield
    except socket.gaierror as exc:
        raise BrokerUnavailableError(
            f"No broker answers at {address}: the host name is unknown.", UNREACHABLE
        ) from exc
    except ssl.SSLError as exc:
        error: BrokerError | None = tls_error(exc, f"The broker at {address}", connection)
        raise error or BrokerUnavailableError(
            f"The TLS handshake with the broker at {address} failed ({exc.reason or exc}).",
            UNREACHABLE,
        ) from exc
    except TimeoutError as exc:
        raise BrokerUnavailableError(
            f"The broker at {address} does not answer in time.", UNREACHABLE
        ) from exc
    except OSError as exc:
        raise BrokerUnavailableError(
            f"No broker answers at {address}: {exc.strerror or exc}.", UNREACHABLE
        ) from exc


def greeting(address: Address, method: str, data: str, *, watches: bool) -> Any:
    """Return the first command of a connection.

    Args:
        address: Address of the broker.
        method: Name of the authentication method; ``none`` for none.
        data: The credentials.
        watches: Whether the connection watches topics.
    """
    hello = api.Connect(
        client_version=_CLIENT,
        protocol_version=_PROTOCOL_VERSION,
        feature_flags=api.FeatureFlags(
            supports_auth_refresh=True,
            supports_broker_entry_metadata=True,
            supports_topic_watchers=watches or None,
        ),
    )
    if method != "none":
        hello.auth_method_name, hello.auth_data = method.encode(), data.encode()
    if address.behind_proxy:
        hello.proxy_to_broker_url = address.behind_proxy.encode()
    return hello


def greeted(
    answer: Future[Any], address: Address, credentials: Credentials, timeout_s: float
) -> Any:
    """Wait for the answer to the greeting, and return it.

    Raises:
        BrokerUnavailableError: No answer in time, or a passing refusal (retriable).
        AuthenticationError: The broker rejects the credentials.
    """
    try:
        return answer.result(timeout_s)
    except NoAnswerError as exc:
        raise BrokerUnavailableError(
            f"The broker at {address} accepts the connection, but does not answer within "
            f"{timeout_s:.1f} s.",
            UNREACHABLE,
        ) from exc
    except RefusedError as exc:
        if exc.code in (3, 4):
            raise not_accepted(f"The broker at {address}", credentials.who(), exc.said) from exc
        raise BrokerUnavailableError(
            f"The broker at {address} refuses the connection: {exc.said}.", "See the broker's log."
        ) from exc


def proof(method: str, data: str) -> Any:
    """Return the answer to a broker that asks for new credentials."""
    given = api.AuthData(auth_method_name=method.encode(), auth_data=data.encode())
    return api.AuthResponse(
        client_version=_CLIENT, response=given, protocol_version=_PROTOCOL_VERSION
    )
