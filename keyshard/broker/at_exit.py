"""Closes the connections that are still open when the program ends.

Their threads must leave the client's C++ code before the interpreter ends. Exit functions run in
reverse order of registration. This module is therefore imported before any module that registers
one to end a run.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from keyshard.errors import BrokerError


class Closable(Protocol):
    """A connection that can be closed."""

    def close(self) -> None:
        """Close it. Idempotent."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(connection: Closable) -> None:
    """Close a connection at the end of the program, unless it was closed before."""
    _open.add(connection)


@atexit.register
def _close() -> None:
    for connection in list(_open):
        try:
            connection.close()
        except BrokerError:  # noqa: PERF203 - close the others nevertheless
            continue
