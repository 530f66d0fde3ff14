"""What a broker answers instead of what was asked, as keyshard's errors."""

from __future__ import annotations

from keyshard.broker.pulsar.refusals import lacks, not_accepted
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    RangeConflictError,
    TopicNotFoundError,
)

_NOT_AUTHENTICATED, _NOT_AUTHORIZED, _TOPIC_NOT_FOUND = 3, 4, 11
_CONFLICTS = {5, 19}
_PASSING = {
    0: "unknown error",
    1: "its metadata store fails",
    2: "its storage fails",
    6: "it does not serve the topic at the moment",
    14: "too many requests",
}
"""Errors that go away by themselves, or by what is done at the broker."""
_NAMED = {
    7: "the backlog quota is exceeded",
    8: "the backlog quota is exceeded",
    10: "it is too old for what was asked",
    12: "the subscription does not exist",
    15: "the topic is terminated",
    17: "the name of the topic is none",
}


class RefusedError(Exception):
    """The broker refuses a request.

    Args:
        code: Number of ``ServerError``.
        said: What the broker says.
    """

    def __init__(self, code: int, said: bytes) -> None:
        self.code = code
        self.said = said.decode(errors="replace").splitlines()[0][:300] if said else ""
        super().__init__(code, self.said)


def error_of(refused: RefusedError, action: str, what: object, topic: str, who: str) -> BrokerError:
    """The error that a refusal is.

    Args:
        refused: What the broker answered.
        action: What could not be done, ``subscribe to``.
        what: With what.
        topic: Of which topic.
        who: Who asked, for a sentence.
    """
    code, said = refused.code, refused.said.rstrip(".")
    if code in _CONFLICTS:
        return RangeConflictError(
            f"Could not {action} {what}: another consumer holds the range or the subscription "
            f"({said}). Stop it, or use another subscription name."
        )
    if code == _TOPIC_NOT_FOUND:
        return TopicNotFoundError(
            f"Could not {action} {what}: the topic does not exist. Create it or correct its name."
        )
    if code == _NOT_AUTHORIZED:
        return lacks(who, "consume", topic)
    if code == _NOT_AUTHENTICATED:
        return not_accepted("The broker", who, said)
    if code in _PASSING:
        return BrokerUnavailableError(
            f"Could not {action} {what}: the broker says that {_PASSING[code]} ({said}). Check "
            "that it is well."
        )
    named = _NAMED.get(code, f"error {code}")
    return BrokerError(f"Could not {action} {what}: {named} ({said}).")
