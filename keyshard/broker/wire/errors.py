"""Translates error answers of a broker into keyshard's errors."""

from __future__ import annotations

import re

from keyshard.broker.auth.errors import lacks, not_accepted
from keyshard.broker.unconfirmed import AcceptedLostError, MaybeStoredError
from keyshard.core.creation import create_or_correct
from keyshard.core.position.entry import TopicPartition, namespace_of
from keyshard.core.publishing import ForgottenError, OtherWriterError, UnfitError, UnsureError
from keyshard.core.refused_limits import limit_of, limit_refused
from keyshard.core.releases import denies_partition
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeduplicationError,
    KeyShardError,
    ProducerBusyError,
    ProducerFencedError,
    QuotaExceededError,
    RangeConflictError,
    SchemaError,
    SubscriptionNotFoundError,
    TopicMigratedError,
    TopicNotFoundError,
)
from keyshard.redaction import redacted

NOT_AUTHENTICATED, _NOT_AUTHORIZED, TOPIC_NOT_FOUND, _NOT_ALLOWED = 3, 4, 11, 22
_SUBSCRIPTION_NOT_FOUND = 12
_CONFLICTS = {5, 19}
_QUOTA = (
    "the backlog quota is exceeded",
    "Let the subscriptions catch up, or raise the quota.",
)
_QUOTAS = {7, 8}
_PRODUCER_BUSY, _INCOMPATIBLE_SCHEMA, _PRODUCER_FENCED = 16, 18, 25
_PASSING = {
    0: "it had an internal error",
    1: "its metadata store fails",
    2: "its storage fails",
    6: "it does not serve the topic at the moment",
    13: "it does not know the consumer",
    14: "it has too many concurrent requests",
}
"""Transient errors, and errors that an action at the broker resolves."""
_NAMED = {
    7: (f"ProducerBlockedQuotaExceededError: {_QUOTA[0]}", _QUOTA[1]),
    8: (f"ProducerBlockedQuotaExceededException: {_QUOTA[0]}", _QUOTA[1]),
    9: ("ChecksumError: the request was damaged on the way", "Check the network."),
    10: (
        "UnsupportedVersionError: the broker is too old for this request",
        "Use a newer broker, or set transport to client.",
    ),
    12: (
        "SubscriptionNotFound: the subscription does not exist, and the broker does not create it",
        "Create it, or set allowAutoSubscriptionCreation.",
    ),
    15: ("TopicTerminatedError: the topic is terminated", "Use another topic."),
    16: ("ProducerBusy: another producer has this name", ""),
    17: ("InvalidTopicName: the topic name is not valid", "Correct it."),
    18: ("IncompatibleSchema: the topic has another schema", ""),
    20: ("TransactionCoordinatorNotFound: the broker has transactions disabled", ""),
    21: ("InvalidTxnStatus: the transaction has ended", ""),
    _NOT_ALLOWED: (
        "NotAllowedError: the broker or a policy forbids it",
        "Check the policies of the topic and its namespace, such as enabled subscription types.",
    ),
    23: ("TransactionConflict: another transaction holds it", ""),
    24: ("TransactionNotFound: the transaction does not exist", ""),
    25: ("ProducerFenced: another producer replaced this one", ""),
}
"""Other errors by their names in Pulsar: their meaning, and the remedy."""

_SCHEMA_POLICIES = {
    "auto updating is disabled": (
        "the namespace admits no new schemas",
        (
            "Write with a schema of the topic, or admit others: pulsar-admin namespaces "
            "set-is-allow-auto-update-schema --enable"
        ),
    ),
    "without a schema": (
        "the namespace admits no messages without a schema",
        (
            "Write columns in the value format 'auto', or admit such messages: pulsar-admin "
            "namespaces set-schema-validation-enforce --disable"
        ),
    ),
}
"""Policies of a namespace by words of the refusal: their meaning, and the remedy."""
_COMPATIBLE = (
    "Write with a schema of the topic, or change the compatibility strategy of the namespace."
)
_JAVA_CLASS = re.compile(r"^(?:\w+\.)+\w+: ")


class RefusedError(Exception):
    """The broker refuses a request.

    Args:
        code: Number of ``ServerError``.
        said: The broker's text.
    """

    def __init__(self, code: int, said: bytes) -> None:
        self.code = code
        # Redact before the cut: the truncated rest of a secret would not be recognised.
        self.said = redacted(said.decode(errors="replace")).splitlines()[0][:300] if said else ""
        super().__init__(code, self.said)


def error_of(
    refused: RefusedError, action: str, what: object, topic: str, who: str,
    *, permission: str = "consume",
) -> BrokerError:  # fmt: skip
    """Create the error for a refusal.

    Args:
        refused: The broker's answer.
        action: The failed action, such as ``subscribe to``.
        what: Its object.
        topic: The topic.
        who: The identity of this client, for the text.
        permission: The permission that the action needs.
    """
    code, said = refused.code, refused.said.rstrip(".")
    if limit := limit_of(code, said):
        return limit_refused(limit, f"Could not {action} {what}", topic, said)
    if code in _CONFLICTS:
        return RangeConflictError(
            f"Could not {action} {what}: another consumer holds the range or the subscription "
            f"({said}).",
            "Stop that consumer, or use another subscription.",
        )
    if code == TOPIC_NOT_FOUND or (code == _NOT_ALLOWED and denies_partition(said)):
        return TopicNotFoundError(
            f"Could not {action} {what}: the topic does not exist.", create_or_correct(topic)
        )
    if code in (_NOT_AUTHORIZED, NOT_AUTHENTICATED):
        return _denied(code, said, topic, who, permission)
    if code in _PASSING:
        return BrokerUnavailableError(
            f"Could not {action} {what}: the broker reports that {_PASSING[code]} ({said}).",
            "Check the health of the broker.",
        )
    named, remedy = _NAMED.get(code, (f"the broker refuses with error {code}", ""))
    error = SubscriptionNotFoundError if code == _SUBSCRIPTION_NOT_FOUND else BrokerError
    return error(f"Could not {action} {what}: {named} (the broker says: {said}).", remedy)


def _denied(code: int, said: str, topic: str, who: str, permission: str) -> BrokerError:
    if code == _NOT_AUTHORIZED:
        return lacks(who, permission, topic, said)
    return not_accepted("The broker", who, said)


def producing_error(
    refused: RefusedError, action: str, what: TopicPartition, who: str
) -> KeyShardError:
    """Create the error for a refusal of a producer or of a message.

    Args:
        refused: The broker's answer.
        action: The failed action, such as ``publish to``.
        what: The topic partition.
        who: The identity of this client, for the text.
    """
    code, said = refused.code, refused.said.rstrip(".")
    failed = f"Could not {action} {what}"
    if code in _QUOTAS:
        cause, remedy = _QUOTA
        return QuotaExceededError(f"{failed}: {cause} (the broker says: {said}).", remedy)
    if code == _PRODUCER_BUSY and limit_of(code, said) is None:
        return ProducerBusyError(
            f"{failed}: another connection publishes under this name ({said}).",
            "Stop that program, or use another sink id.",
        )
    if code == _PRODUCER_FENCED:
        return ProducerFencedError(
            f"{failed}: another producer replaced this one ({said}).", "Stop it."
        )
    if code == _INCOMPATIBLE_SCHEMA:
        return _schema_refused(failed, what, said)
    if code == _NOT_AUTHORIZED:
        return lacks(who, "produce", what.topic, said)
    return error_of(refused, action, what, what.name, who)


def _schema_refused(failed: str, where: TopicPartition, said: str) -> SchemaError:
    for sign, (cause, remedy) in _SCHEMA_POLICIES.items():
        if sign in said:
            return SchemaError(f"{failed}: {cause}.", f"{remedy} {namespace_of(where.topic)}.")
    plain = _JAVA_CLASS.sub("", said).partition(" caused by ")[0]
    return SchemaError(
        f"{failed}: the schema of the messages is not compatible ({plain}).", _COMPATIBLE
    )


def forgotten(where: TopicPartition, name: bytes) -> DeduplicationError:
    """Create the error for a broker that does not remember the messages of a producer name."""
    return DeduplicationError(
        f"Deduplication is disabled for {where}: the broker does not know the stored messages of "
        f"producer {name.decode()!r}, so rows could be stored twice.",
        f"Enable it: pulsar-admin namespaces set-deduplication {namespace_of(where.topic)} "
        "--enable. If it is enabled, a broker before Pulsar 5.0 has just loaded the topic "
        "(apache/pulsar#25953): repeat the call.",
    )


def fenced(where: TopicPartition, name: bytes, last_sequence_id: int) -> ProducerFencedError:
    """Create the error for a producer name that another program uses."""
    return ProducerFencedError(
        f"Another program publishes to {where} as producer {name.decode()!r}: the broker already "
        f"has message {last_sequence_id} of this name.",
        "If that was another attempt to write the same batch, repeat the call. Otherwise stop "
        "that program, or use another sink id.",
    )


def accepted_lost(where: TopicPartition, name: bytes) -> AcceptedLostError:
    """Create the error for messages that the broker accepted and then failed to store."""
    return AcceptedLostError(
        f"{where} has lost messages of producer {name.decode()!r} that an earlier attempt had "
        "sent, because a write to its storage failed.",
        "Repeat the call.",
    )


def maybe_stored(where: TopicPartition, name: bytes) -> MaybeStoredError:
    """Create the error for messages that a broker may have stored without knowing it."""
    return MaybeStoredError(
        f"The connection of producer {name.decode()!r} to {where} was lost, and this broker may "
        "not know which of its messages are stored (apache/pulsar#25953, before Pulsar 5.0).",
        "Repeat the call: it looks for them in the topic.",
    )


def unfit(exc: UnfitError, where: TopicPartition, name: bytes, last: int) -> KeyShardError:
    """Return the error for sequence ids at the broker that do not fit the entries of a producer.

    Args:
        exc: How the ids differ.
        where: Topic partition of the producer.
        name: Name of the producer.
        last: The last sequence id that the broker knows.
    """
    if isinstance(exc, OtherWriterError):
        return fenced(where, name, last)
    if isinstance(exc, ForgottenError):
        return forgotten(where, name)
    if isinstance(exc, UnsureError):
        return maybe_stored(where, name)
    return accepted_lost(where, name)


def order_broken(where: TopicPartition, name: str | None, sequence_id: int) -> ProducerFencedError:
    """Create the error for a message that the broker stored before earlier ones of its name.

    Args:
        where: The topic partition.
        name: Producer name; ``None`` for single messages, whose producer is named by the broker.
        sequence_id: Id of the message.
    """
    of_name = "of a producer" if name is None else f"of producer {name!r}"
    return ProducerFencedError(
        f"{where} stored message {sequence_id} {of_name} before earlier ones, so the broker drops "
        "the earlier ones as duplicates.",
        "Send the messages that failed again, which may store some of them twice."
        if name is None
        else "Publish the batch with another sink id, and stop other programs with this sink id.",
    )


def migrated(where: TopicPartition, url: str) -> TopicMigratedError:
    """Create the error for a topic that was moved to another cluster."""
    return TopicMigratedError(
        f"{where} was moved to another cluster at {url or 'an unknown URL'}. Its entries have "
        "other ids there, so this checkpoint does not apply.",
        "Set service_url and admin_url to that cluster, and start with a new checkpoint. The "
        "subscription continues there at its position.",
        topic_partition=where.name,
        service_url=url,
    )
