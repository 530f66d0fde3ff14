"""What a broker answers instead of what was asked, as keyshard's errors."""

from __future__ import annotations

from keyshard.broker.pulsar.refusals import lacks, not_accepted
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    RangeConflictError,
    TopicMigratedError,
    TopicNotFoundError,
)
from keyshard.redaction import redacted

NOT_AUTHENTICATED, _NOT_AUTHORIZED, _TOPIC_NOT_FOUND = 3, 4, 11
_CONFLICTS = {5, 19}
_QUOTA = "the backlog quota is exceeded. Let the subscriptions catch up, or raise it"
_PASSING = {
    0: "an error happened there",
    1: "its metadata store fails",
    2: "its storage fails",
    6: "it does not serve the topic at the moment",
    13: "it does not know the consumer",
    14: "it has too many requests at once",
}
"""Errors that go away by themselves, or by what is done at the broker."""
_NAMED = {
    7: f"ProducerBlockedQuotaExceededError: {_QUOTA}",
    8: f"ProducerBlockedQuotaExceededException: {_QUOTA}",
    9: "ChecksumError: what was sent came damaged. Check the network",
    10: "UnsupportedVersionError: the broker is too old for what was asked. Use a newer one, or "
    "transport=client",
    12: "SubscriptionNotFound: the subscription does not exist, and the broker makes none. Create "
    "it, or set allowAutoSubscriptionCreation",
    15: "TopicTerminatedError: the topic is terminated. Name another one",
    16: "ProducerBusy: a producer has this name already",
    17: "InvalidTopicName: the broker takes no such name. Correct it",
    18: "IncompatibleSchema: the schema of the topic is another one",
    20: "TransactionCoordinatorNotFound: the broker has no transactions",
    21: "InvalidTxnStatus: the transaction has ended",
    22: "NotAllowedError: the broker or a policy does not allow it. Check the policies of topic "
    "and namespace, among them which subscription types are enabled",
    23: "TransactionConflict: another transaction has it",
    24: "TransactionNotFound: there is no such transaction",
    25: "ProducerFenced: another producer took over",
}
"""Other errors, by their names in Pulsar, what they mean and what to do."""


class RefusedError(Exception):
    """The broker refuses a request.

    Args:
        code: Number of ``ServerError``.
        said: What the broker says.
    """

    def __init__(self, code: int, said: bytes) -> None:
        self.code = code
        # Before it is cut: the rest of a secret would not be recognised.
        self.said = redacted(said.decode(errors="replace")).splitlines()[0][:300] if said else ""
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
        return lacks(who, "consume", topic, said)
    if code == NOT_AUTHENTICATED:
        return not_accepted("The broker", who, said)
    if code in _PASSING:
        return BrokerUnavailableError(
            f"Could not {action} {what}: the broker says that {_PASSING[code]} ({said}). Check "
            "that it is well."
        )
    named = _NAMED.get(code, f"the broker refuses with error {code}")
    return BrokerError(f"Could not {action} {what}: {named} (the broker says: {said}).")


def migrated(where: TopicPartition, url: str) -> TopicMigratedError:
    """The error that a topic is which was moved to another cluster."""
    return TopicMigratedError(
        f"{where} was moved to another cluster, which is reached at {url or 'an unknown URL'}. It "
        "has other ids for the same entries, so no checkpoint of this one holds there. Read it "
        "with that service_url and admin_url and a new checkpoint; its subscription there goes on "
        "where it stands.",
        topic_partition=where.name,
        service_url=url,
    )
