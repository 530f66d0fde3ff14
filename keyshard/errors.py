"""Every error that keyshard raises.

::

    KeyShardError                      KEYSHARD_ERROR
    ├── ConfigError                    KEYSHARD_BAD_OPTION
    │   ├── UnfitHandlerError          KEYSHARD_HANDLER_UNFIT
    │   └── PositionAheadError         KEYSHARD_POSITION_AHEAD
    ├── BrokerError                    KEYSHARD_BROKER
    │   ├── MessageTooLargeError       KEYSHARD_MESSAGE_TOO_LARGE
    │   ├── BrokerUnavailableError     KEYSHARD_BROKER_UNAVAILABLE   (retriable)
    │   ├── TlsError                   KEYSHARD_TLS
    │   ├── AuthenticationError        KEYSHARD_AUTHENTICATION
    │   ├── AuthorizationError         KEYSHARD_AUTHORIZATION
    │   ├── RangeConflictError         KEYSHARD_RANGE_CONFLICT       (retriable)
    │   ├── TopicNotFoundError         KEYSHARD_TOPIC_NOT_FOUND
    │   ├── TopicMigratedError         KEYSHARD_TOPIC_MIGRATED
    │   └── AdminError                 KEYSHARD_ADMIN
    ├── SubscriptionInUseError         KEYSHARD_SUBSCRIPTION_IN_USE
    ├── NonPersistentTopicError        KEYSHARD_NON_PERSISTENT_TOPIC
    ├── ChunkedMessageError            KEYSHARD_CHUNKED_MESSAGE
    ├── UnreadableEntryError           KEYSHARD_UNREADABLE_ENTRY
    │   ├── CorruptEntryError          KEYSHARD_CORRUPT_ENTRY
    │   └── EncryptedMessageError      KEYSHARD_ENCRYPTED_MESSAGE
    ├── SchemaError                    KEYSHARD_SCHEMA
    ├── MalformedMessageError          KEYSHARD_MALFORMED_MESSAGE
    ├── CheckpointError                KEYSHARD_CHECKPOINT_INVALID
    ├── CheckpointInUseError           KEYSHARD_CHECKPOINT_IN_USE
    ├── CheckpointMismatchError        KEYSHARD_CHECKPOINT_MISMATCH
    ├── MisroutedError                 KEYSHARD_MISROUTED
    ├── TopicRecreatedError            KEYSHARD_TOPIC_RECREATED
    ├── DataLossTrimmedError           KEYSHARD_DATA_LOSS_TRIMMED
    ├── DataLossAckedElsewhereError    KEYSHARD_DATA_LOSS_ACKED_ELSEWHERE
    ├── ReplayTimeoutError             KEYSHARD_REPLAY_TIMEOUT       (retriable)
    ├── AcknowledgeError               KEYSHARD_ACKNOWLEDGE_FAILED
    ├── RuntimeStoppedError            KEYSHARD_STOPPED
    ├── DrainTimeoutError              KEYSHARD_DRAIN_TIMEOUT
    ├── RescaleError                   KEYSHARD_RESCALE_FAILED
    ├── BatchReleasedError             KEYSHARD_BATCH_RELEASED
    ├── BatchUnknownError              KEYSHARD_BATCH_UNKNOWN
    ├── WorkerUnreachableError         KEYSHARD_WORKER_UNREACHABLE
    ├── UnsupportedTriggerError        KEYSHARD_UNSUPPORTED_TRIGGER
    ├── AsyncProgressError             KEYSHARD_ASYNC_PROGRESS
    ├── AvailableNowTimeoutError       KEYSHARD_AVAILABLE_NOW_TIMEOUT
    ├── WorkerEnvironmentError         KEYSHARD_WORKER_ENVIRONMENT
    ├── ClusterError                   KEYSHARD_CLUSTER
    ├── ControlError                   KEYSHARD_CONTROL
    ├── HistoryError                   KEYSHARD_HISTORY_INVALID
    ├── HandlerFailedError             KEYSHARD_HANDLER_FAILED
    ├── HandlerProcessError            KEYSHARD_HANDLER_PROCESS
    ├── WindowFullError                KEYSHARD_WINDOW_FULL
    ├── NotRunningError                KEYSHARD_NOT_RUNNING
    ├── ThreadStartError               KEYSHARD_THREAD_START
    ├── UnexpectedError                KEYSHARD_UNEXPECTED
    └── DevBrokerError                 KEYSHARD_DEVBROKER

Each message starts with its code in brackets, says what happened and where, and what to do.
All are picklable, so they cross process borders unchanged.
"""

from __future__ import annotations

from typing import ClassVar

from keyshard.redaction import redacted, sentence


class KeyShardError(Exception):
    """Root of every keyshard error.

    Args:
        message: What happened, where, and what to do, without the code. Secrets in URLs are left
            out of it, as of facts, and so is the middle of what is too long to read.
        **facts: Values a program may want to look at, kept as :attr:`facts`.
    """

    code: ClassVar[str] = "KEYSHARD_ERROR"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **facts: object) -> None:
        self.message = sentence(message)
        super().__init__(f"[{self.code}] {self.message}")
        self.facts = {
            name: redacted(fact) if isinstance(fact, str) else fact for name, fact in facts.items()
        }

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[KeyShardError], message: str, facts: dict[str, object]) -> KeyShardError:
    return cls(message, **facts)


class ConfigError(KeyShardError, ValueError):
    """An option is unknown, missing, of the wrong type or outside its limits."""

    code = "KEYSHARD_BAD_OPTION"


class UnfitHandlerError(ConfigError):
    """A handler cannot be run: it makes generators, or a worker process cannot load it."""

    code = "KEYSHARD_HANDLER_UNFIT"


class PositionAheadError(ConfigError):
    """A position to start or end at lies behind all that is stored."""

    code = "KEYSHARD_POSITION_AHEAD"


class BrokerError(KeyShardError):
    """The broker refused a request."""

    code = "KEYSHARD_BROKER"


class MessageTooLargeError(BrokerError):
    """A message is larger than the broker takes."""

    code = "KEYSHARD_MESSAGE_TOO_LARGE"


class BrokerUnavailableError(BrokerError):
    """The broker cannot be reached, did not answer in time, or says that it cannot answer now."""

    code = "KEYSHARD_BROKER_UNAVAILABLE"
    retriable = True


class TlsError(BrokerError):
    """The two sides do not trust each other's certificates, or cannot agree on TLS."""

    code = "KEYSHARD_TLS"


class AuthenticationError(BrokerError):
    """The broker does not accept who this is: a token that is wrong or has expired, or none."""

    code = "KEYSHARD_AUTHENTICATION"


class AuthorizationError(BrokerError):
    """A role lacks a permission; the message names the role, the permission, and on what."""

    code = "KEYSHARD_AUTHORIZATION"


class RangeConflictError(BrokerError):
    """Another consumer holds a part of the hash range, or the subscription in another mode."""

    code = "KEYSHARD_RANGE_CONFLICT"
    retriable = True


class TopicMigratedError(BrokerError):
    """The topic was moved to another cluster, where its entries have other ids."""

    code = "KEYSHARD_TOPIC_MIGRATED"


class TopicNotFoundError(BrokerError):
    """The topic does not exist."""

    code = "KEYSHARD_TOPIC_NOT_FOUND"


class AdminError(BrokerError):
    """The admin REST interface cannot be reached or refused a request."""

    code = "KEYSHARD_ADMIN"


class SubscriptionInUseError(KeyShardError):
    """The ranges of the subscription stayed with somebody else until the deadline."""

    code = "KEYSHARD_SUBSCRIPTION_IN_USE"


class NonPersistentTopicError(KeyShardError, ValueError):
    """Messages of a non-persistent topic have no position, so nothing can be promised."""

    code = "KEYSHARD_NON_PERSISTENT_TOPIC"


class ChunkedMessageError(KeyShardError):
    """A chunked message was received; its id names only the last of its entries."""

    code = "KEYSHARD_CHUNKED_MESSAGE"


class UnreadableEntryError(KeyShardError):
    """An entry is stored and keyshard cannot read it."""

    code = "KEYSHARD_UNREADABLE_ENTRY"
    stored: bytes = b""
    """Its stored bytes, where they are at hand. A pickled error loses them."""


class CorruptEntryError(UnreadableEntryError):
    """An entry cannot be read: its checksum, compression or structure is wrong, or its size."""

    code = "KEYSHARD_CORRUPT_ENTRY"


class EncryptedMessageError(UnreadableEntryError):
    """A message is encrypted, and keyshard has no keys to read it."""

    code = "KEYSHARD_ENCRYPTED_MESSAGE"


class SchemaError(KeyShardError):
    """The schema of a topic cannot be used as it should, or is not there."""

    code = "KEYSHARD_SCHEMA"


class MalformedMessageError(KeyShardError):
    """A value cannot be decoded by the schema of its topic, or a dead letter by its properties."""

    code = "KEYSHARD_MALFORMED_MESSAGE"


class MisroutedError(KeyShardError):
    """A message came to a range that its key does not hash into; by ``on_misrouted = fail``."""

    code = "KEYSHARD_MISROUTED"


class CheckpointError(KeyShardError, ValueError):
    """A checkpoint text cannot be read."""

    code = "KEYSHARD_CHECKPOINT_INVALID"


class CheckpointInUseError(KeyShardError):
    """Another running source keeps its checkpoint in the same file."""

    code = "KEYSHARD_CHECKPOINT_IN_USE"


class CheckpointMismatchError(KeyShardError):
    """A checkpoint belongs to another subscription or cluster."""

    code = "KEYSHARD_CHECKPOINT_MISMATCH"


class TopicRecreatedError(KeyShardError):
    """The broker has other data under ids of a checkpoint, a plan or a position."""

    code = "KEYSHARD_TOPIC_RECREATED"


class DataLossTrimmedError(KeyShardError):
    """Entries of a planned batch are no longer stored at the broker."""

    code = "KEYSHARD_DATA_LOSS_TRIMMED"


class DataLossAckedElsewhereError(KeyShardError):
    """Entries were acknowledged at the broker that no committed or planned batch holds."""

    code = "KEYSHARD_DATA_LOSS_ACKED_ELSEWHERE"


class ReplayTimeoutError(KeyShardError):
    """What is stored could not be read before the deadline; that says nothing of what is gone."""

    code = "KEYSHARD_REPLAY_TIMEOUT"
    retriable = True


class AcknowledgeError(KeyShardError):
    """Acknowledging in the background failed past its limit."""

    code = "KEYSHARD_ACKNOWLEDGE_FAILED"


class RuntimeStoppedError(KeyShardError):
    """The runtime was stopped, or was asked for work before it was started."""

    code = "KEYSHARD_STOPPED"


class DrainTimeoutError(KeyShardError):
    """A handler did not end in time, so no range changed hands; everything is as it was."""

    code = "KEYSHARD_DRAIN_TIMEOUT"


class RescaleError(KeyShardError):
    """The broker did not let ranges change hands, or not all of them."""

    code = "KEYSHARD_RESCALE_FAILED"


class BatchReleasedError(KeyShardError):
    """A batch was read after its checkpoint became durable."""

    code = "KEYSHARD_BATCH_RELEASED"


class BatchUnknownError(KeyShardError):
    """A batch was asked for that this runtime never planned."""

    code = "KEYSHARD_BATCH_UNKNOWN"


class WorkerUnreachableError(KeyShardError):
    """A reading process cannot reach the endpoint that serves a batch."""

    code = "KEYSHARD_WORKER_UNREACHABLE"


class UnsupportedTriggerError(KeyShardError):
    """The trigger of the Spark query cannot be served."""

    code = "KEYSHARD_UNSUPPORTED_TRIGGER"


class AsyncProgressError(KeyShardError):
    """The host plans a batch before it told that the one before is committed."""

    code = "KEYSHARD_ASYNC_PROGRESS"


class AvailableNowTimeoutError(KeyShardError):
    """A bounded run did not get everything up to its targets before its deadline."""

    code = "KEYSHARD_AVAILABLE_NOW_TIMEOUT"


class WorkerEnvironmentError(KeyShardError):
    """Spark's Python workers, or actors of Ray, lack something keyshard needs."""

    code = "KEYSHARD_WORKER_ENVIRONMENT"


class ClusterError(KeyShardError):
    """A cluster is not there, or has no place for what was asked of it."""

    code = "KEYSHARD_CLUSTER"


class ControlError(KeyShardError):
    """A running source cannot be found, or does not answer."""

    code = "KEYSHARD_CONTROL"


class HistoryError(KeyShardError, ValueError):
    """A history of events cannot be read or written, or holds nothing that can be checked."""

    code = "KEYSHARD_HISTORY_INVALID"


class DevBrokerError(KeyShardError):
    """The development broker cannot be fetched, started or stopped."""

    code = "KEYSHARD_DEVBROKER"


class HandlerFailedError(KeyShardError):
    """A message failed at its last attempt, and that ends the source."""

    code = "KEYSHARD_HANDLER_FAILED"


class HandlerProcessError(KeyShardError):
    """A worker process ended while it handled a message."""

    code = "KEYSHARD_HANDLER_PROCESS"


class WindowFullError(KeyShardError):
    """Batches that nobody acknowledges fill the window."""

    code = "KEYSHARD_WINDOW_FULL"


class NotRunningError(KeyShardError):
    """What was asked for needs a running source."""

    code = "KEYSHARD_NOT_RUNNING"


class ThreadStartError(KeyShardError):
    """The system starts no thread: too many run, or the main thread of the program has ended."""

    code = "KEYSHARD_THREAD_START"


class UnexpectedError(KeyShardError):
    """A thread of the source raised an unexpected error, which ends the source."""

    code = "KEYSHARD_UNEXPECTED"


BY_CODE = {
    value.code: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, KeyShardError)
}
"""Every error by its code, which is what crosses process borders as text."""
