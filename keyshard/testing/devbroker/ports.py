"""Loopback ports of a development broker."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path

from keyshard.errors import DevBrokerError

LOOPBACK = "127.0.0.1"
"""The only address a development broker listens on."""

_FIRST, _LAST = 20_000, 32_000
_TRIES_MAX = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_is_free(port: int) -> bool:
    """Whether a server can listen on a loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(taken: Collection[int] = ()) -> int:
    """A free loopback port outside the range the kernel takes for outgoing connections.

    A client that reconnects to a dead broker would otherwise sooner or later be given the broker's
    own port for its end, connect to itself, and keep the broker from starting again.

    Args:
        taken: Ports not to choose.

    Raises:
        DevBrokerError: None was found.
    """
    last = min(_LAST, _ephemeral_start() - 1)
    first = _FIRST if last - _FIRST > _TRIES_MAX else 1_100
    chooser = random.SystemRandom()
    for _ in range(_TRIES_MAX):
        port = chooser.randint(first, last)
        if port not in taken and port_is_free(port):
            return port
    raise DevBrokerError(f"No free port was found between {first} and {last}. Name one.")


def loopback_interface() -> str:
    """Name of the network interface with the loopback address, such as ``lo``."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _ephemeral_start() -> int:
    try:
        start = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1
    return start if start > _FIRST else _LAST + 1
