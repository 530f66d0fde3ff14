"""What pulsar-client raises, as keyshard's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import contextmanager
from typing import Any

import _pulsar
import pulsar

from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    MessageTooLargeError,
    RangeConflictError,
    TopicNotFoundError,
)

_UNAVAILABLE = (
    pulsar.Timeout,
    pulsar.ConnectError,
    pulsar.LookupError,
    pulsar.ServiceUnitNotReady,
    pulsar.BrokerPersistenceError,
    pulsar.BrokerMetadataError,
    pulsar.TooManyLookupRequestException,
    pulsar.UnknownError,
    pulsar.NotConnected,
)


ANSWER_S = 4_000.0
"""Longest wait for the client's answer, seconds; its own timeout, an hour at most, comes first."""


def answer_of(ask: Callable[[Callable[[pulsar.Result, Any], None]], None]) -> Any:
    """What the client answers to a request.

    Its own waiting calls give a value of no meaning instead of an error when the connection is lost
    meanwhile (``ResultDisconnected``): a Reader is then at the end, and a topic is empty.

    Args:
        ask: The request's form with a callback.

    Raises:
        pulsar.PulsarException: The request failed; ``NotConnected`` when the connection was lost.
    """
    answered: Future[tuple[pulsar.Result, Any]] = Future()
    ask(lambda result, value: answered.set_result((result, value)))
    try:
        result, value = answered.result(ANSWER_S)
    except NoAnswerError as exc:
        raise pulsar.Timeout("the client did not answer") from exc
    if result == pulsar.Result.Ok:
        return value
    name = result.name if result.name in pulsar.Result.__members__ else "NotConnected"
    raise getattr(_pulsar, name, pulsar.UnknownError)(f"Pulsar error: {name}")


@contextmanager
def translated(action: str, what: object) -> Iterator[None]:
    """Turn the client's exceptions into keyshard's."""
    try:
        yield
    except (pulsar.ConsumerAssignError, pulsar.ConsumerBusy) as exc:
        raise RangeConflictError(
            f"Could not {action} {what}: another consumer holds the range or the subscription "
            f"({exc}). Stop it, or use another subscription name."
        ) from exc
    except pulsar.TopicNotFound as exc:
        raise TopicNotFoundError(
            f"Could not {action} {what}: the topic does not exist. Create it or correct its name."
        ) from exc
    except pulsar.MessageTooBig as exc:
        raise MessageTooLargeError(
            f"Could not {action} {what}: the message is larger than the broker takes. Raise its "
            "maxMessageSize."
        ) from exc
    except _UNAVAILABLE as exc:
        raise BrokerUnavailableError(
            f"Could not {action} {what}: {exc}. Check service_url and that the broker is running."
        ) from exc
    except pulsar.PulsarException as exc:
        raise BrokerError(f"Could not {action} {what}: {exc}.") from exc
