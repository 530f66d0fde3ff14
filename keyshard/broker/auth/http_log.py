"""Suppresses httpx's log of keyshard's requests.

httpx logs every request at INFO, and keyshard polls the admin interface. The log of other users of
httpx in the process is unchanged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Quiet(threading.local):
    requests = 0
    """Number of nested keyshard requests in this thread."""


_quiet = _Quiet()


@contextmanager
def unlogged() -> Iterator[None]:
    """Suppress httpx's log of the requests that this thread sends in the block."""
    _quiet.requests += 1
    try:
        yield
    finally:
        _quiet.requests -= 1


logging.getLogger("httpx").addFilter(lambda _record: not _quiet.requests)
