"""Waiting until a broker serves requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from enum import Enum
from pathlib import Path

from keyshard.broker.pulsar.admin_http import AdminHttp
from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.first_question import missing_topics
from keyshard.config.connection import Connection
from keyshard.errors import BrokerError

_POLL_S = 0.1
_NAMESPACE = "public/default"
_PROBE = f"/lookup/v2/topic/persistent/{_NAMESPACE}/keyshard-probe"
_STUCK = re.compile(rb"Lock on resource /ledgers/available/\S+ was invalidated\. state Valid")
_STUCK_LINES = 3
_IN_USE = b"Address already in use"


class Outcome(Enum):
    """How a start went, in words for a person."""

    READY = "it is ready"
    DIED = "its process ended"
    TAKEN = "another process listens on one of its ports"
    LATE = "it was not ready in time"
    STUCK = "its storage keeps losing its registration"


class LogWatch:
    """Looks in a broker's log for a start that will never be good.

    A bookie that was killed leaves its registration behind. The next start deletes it and registers
    anew, and the notice of that deletion often comes late enough to be taken for a loss of the new
    registration, which is then deleted and made again, several hundred times a second and for ever:
    the values compared have no ``equals`` (apache/pulsar#17759). Reads time out meanwhile. It
    shows within two seconds, before the broker serves anybody, and goes when started again.
    """

    def __init__(self, path: Path, start: int) -> None:
        """Watch what is written to ``path`` after its first ``start`` bytes."""
        self._path = path
        self._start = start
        self._next = start
        self._rest = b""
        self._found = 0

    def has(self, text: bytes) -> bool:
        """Whether a text was written."""
        with self._path.open("rb") as log:
            log.seek(self._start)
            return text in log.read()

    def stuck(self) -> bool:
        """Whether the storage is in that loop."""
        with self._path.open("rb") as log:
            log.seek(self._next)
            new = log.read()
        self._next += len(new)
        lines, newline, rest = (self._rest + new).rpartition(b"\n")
        self._rest = rest
        self._found += len(_STUCK.findall(lines)) if newline else 0
        return self._found >= _STUCK_LINES


def wait_until_ready(
    connection: Connection,
    *,
    returncode: Callable[[], int | None],
    log: LogWatch,
    deadline: float,
) -> Outcome:
    """Wait until the broker has its namespace, finds the owner of a topic, and takes connections.

    Args:
        connection: How it is reached.
        returncode: Exit status of its process, ``None`` while it runs.
        log: Its log.
        deadline: When to give up, on the monotonic clock in seconds.
    """
    with closing(AdminHttp(connection)) as admin:
        while True:
            if returncode() is not None:
                return Outcome.TAKEN if log.has(_IN_USE) else Outcome.DIED
            if log.stuck():
                return Outcome.STUCK
            if _serves(connection, admin):
                return Outcome.READY
            if time.monotonic() >= deadline:
                return Outcome.LATE
            time.sleep(_POLL_S)


def _serves(connection: Connection, admin: AdminHttp) -> bool:
    try:
        namespaces = admin.request("GET", "/admin/v2/namespaces/public")
        if namespaces.status_code != 200 or _NAMESPACE not in namespaces.json():
            return False
        if admin.request("GET", _PROBE).status_code != 200:
            return False
        missing_topics(connection, Credentials(connection), ())
    except (BrokerError, ValueError):
        return False
    return True
