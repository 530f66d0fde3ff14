"""Connections that are open at the end of the program are closed by it.

Their threads must be out of a client's C++ before the interpreter ends. Imported before anything
that ends a run at exit is registered: what is registered later goes first.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from keyshard.errors import BrokerError


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Close it. Idempotent."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(connection: Closable) -> None:
    """Close a connection at the end of the program, if it is not closed by then."""
    _open.add(connection)


@atexit.register
def _close() -> None:
    for connection in list(_open):
        try:
            connection.close()
        except BrokerError:  # noqa: PERF203 - nobody is left to be told, and the rest is closed
            continue
