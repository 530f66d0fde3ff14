"""Retries of broker requests, each with an end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from keyshard.errors import KeyShardError

FIRST_TRIES_S = 1.5
"""Time for which a first start retries a broker that is away, seconds; one try may take three
more."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def _is_retriable(exc: BaseException) -> bool:
    return isinstance(exc, KeyShardError) and exc.retriable


def retry_until(
    action: Callable[[], T], timeout_s: float, *, stop: threading.Event | None = None
) -> T:
    """Run ``action`` until it succeeds, fails for good, or time is up.

    Args:
        action: May raise; a :class:`KeyShardError` that is ``retriable`` is tried again after a
            random wait that grows from 50 ms to 1 s.
        timeout_s: Time after which the last error is raised, seconds.
        stop: Ends the retries early when it is set.

    Raises:
        KeyShardError: The last error, with the traceback of this call and no cause: its sentence
            says what both would.
    """
    limit: tenacity.stop.stop_base = tenacity.stop_after_delay(timeout_s)
    sleep: Callable[[float], object] = tenacity.nap.sleep
    if stop is not None:
        limit = limit | tenacity.stop_when_event_set(stop)
        sleep = stop.wait
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_retriable),
        stop=limit,
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        sleep=sleep,  # type: ignore[arg-type]
        before_sleep=tenacity.before_sleep_log(_log, logging.DEBUG),
        reraise=True,
    )
    try:
        return retrying(action)
    except KeyShardError as exc:
        raise exc.with_traceback(None) from None
