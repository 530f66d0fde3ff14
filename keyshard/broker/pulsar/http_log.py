"""Requests to the admin interface are no news: httpx logs each at INFO, and they come all the time.

What others in the process ask by httpx is logged as they like it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Quiet(threading.local):
    requests = 0
    """Requests of keyshard that this thread is in."""


_quiet = _Quiet()


@contextmanager
def unlogged() -> Iterator[None]:
    """What this thread asks by httpx inside is not logged by httpx."""
    _quiet.requests += 1
    try:
        yield
    finally:
        _quiet.requests -= 1


logging.getLogger("httpx").addFilter(lambda _record: not _quiet.requests)
