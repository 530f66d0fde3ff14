"""A socket to a broker, with TLS where the connection says so, or the reason why there is none."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from keyshard.broker.pulsar.tls import tls_context, tls_error
from keyshard.config.connection import Connection
from keyshard.errors import BrokerError, BrokerUnavailableError


class Address(NamedTuple):
    """Where a broker is reached."""

    host: str
    port: int
    behind_proxy: str = ""
    """``host:port`` of the broker that a proxy is to connect to; empty without one."""

    @property
    def authority(self) -> str:
        """``host:port``, as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        proxy = f"{self.behind_proxy} through " if self.behind_proxy else ""
        return proxy + self.authority


def dialled(address: Address, connection: Connection, timeout_s: float) -> socket.socket:
    """A socket that is connected, with TLS where the connection says so."""
    context = tls_context(connection) if connection.tls else None
    with _explained(address, connection):
        timeout_s = max(0.001, min(timeout_s, connection.connection_timeout_ms / 1000))
        plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
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
    hint = "Check service_url and that the broker is running."
    try:
        yield
    except socket.gaierror as exc:
        raise BrokerUnavailableError(
            f"No broker answers at {address}: the host name is unknown. {hint}"
        ) from exc
    except ssl.SSLError as exc:
        error: BrokerError | None = tls_error(exc, f"The broker at {address}", connection)
        raise error or BrokerUnavailableError(
            f"The broker at {address} does not speak TLS as expected ({exc.reason or exc}). {hint}"
        ) from exc
    except TimeoutError as exc:
        raise BrokerUnavailableError(f"No broker answers at {address} in time. {hint}") from exc
    except OSError as exc:
        raise BrokerUnavailableError(
            f"No broker answers at {address}: {exc.strerror or exc}. {hint}"
        ) from exc
