"""Loopback ports of a development broker."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Collection
from pathlib import Path

from keyshard.errors import DevBrokerError

LOOPBACK = "127.0.0.1"
"""The only address a development broker listens on."""

_FIRST, _LAST = 20_000, 32_000
_TRIES_MAX = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: dict[int, socket.socket] = {}


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

    On Linux nobody else is given the port until :func:`give_back`, or this process ends: many
    brokers start side by side, seconds lie between the choice and the listening, and one that is
    dead comes back to its port.

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
        if port not in taken and _hold(port):
            return port
    raise DevBrokerError(f"No free port was found between {first} and {last}. Name one.")


def give_back(port: int) -> None:
    """Let others be given a port; does nothing where it is not held."""
    if port in _held:
        _held.pop(port).close()


def _hold(port: int) -> bool:
    """Keep a port that is free, bound without listening; whether it was free.

    Linux lets a server listen beside a socket that only is bound, where both may share the address
    (``SO_REUSEADDR``, as servers usually do). Whoever binds without sharing is refused: so holders
    see one another.
    """
    if sys.platform != "linux":
        return port_is_free(port)
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind((LOOPBACK, port))
    except OSError:
        holder.close()
        return False
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held[port] = holder
    return True


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
