"""The state that handles of the wire transport share, with one connection for all topics."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.retry import Retrier
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.reconnect import Shared


class OneBroker:
    """A pool with one connection."""

    def __init__(self, at: Any) -> None:
        self.at = at

    def path(self, *_: object) -> Generator[Any, None, tuple[Any, float]]:
        yield from ()
        return self.at, 1.0


def shared_at(at: Any, retrier: Retrier) -> Shared:
    """Return the state for a connection. One retrier also nudges silent brokers."""
    pool = cast("ConnectionPool", OneBroker(at))
    return Shared(pool, retrier, retrier, cast("Credentials", None), 5.0)
