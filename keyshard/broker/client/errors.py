"""Translates exceptions of pulsar-client into keyshard's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pulsar

from keyshard.base_error import UNREACHABLE
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    MessageTooLargeError,
    RangeConflictError,
    TopicNotFoundError,
)

UNAVAILABLE = (
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
"""Transient exceptions, and exceptions that an action at the broker resolves."""


@contextmanager
def translated(action: str, what: object) -> Iterator[None]:
    """Translate the client's exceptions into keyshard's."""
    try:
        yield
    except (pulsar.ConsumerAssignError, pulsar.ConsumerBusy) as exc:
        # The broker also answers ConsumerBusy for a limit; the client drops the broker's text.
        or_limit = isinstance(exc, pulsar.ConsumerBusy)
        other = ", or a limit of consumers is reached" if or_limit else ""
        raise RangeConflictError(
            f"Could not {action} {what}: another consumer holds the range or the "
            f"subscription{other} ({exc}).",
            "Stop that consumer, or use another subscription.",
            or_limit=or_limit,
        ) from exc
    except (pulsar.NotAllowedError, pulsar.ProducerBusy) as exc:
        raise BrokerError(
            f"Could not {action} {what}: a policy of the broker forbids it, or a limit of "
            f"producers, subscriptions or topics is reached ({exc}). The broker's log names the "
            "limit, and so does transport wire."
        ) from exc
    except pulsar.TopicNotFound as exc:
        raise TopicNotFoundError(
            f"Could not {action} {what}: the topic does not exist.",
            "Create the topic, or correct its name.",
        ) from exc
    except pulsar.MessageTooBig as exc:
        raise MessageTooLargeError(
            f"Could not {action} {what}: the message exceeds the broker's size limit.",
            "Raise the broker's maxMessageSize.",
        ) from exc
    except UNAVAILABLE as exc:
        raise BrokerUnavailableError(
            f"Could not {action} {what}: {exc}.",
            UNREACHABLE,
        ) from exc
    except pulsar.PulsarException as exc:
        raise BrokerError(f"Could not {action} {what}: {exc}.", "See the broker's log.") from exc
