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
    │   ├── SubscriptionNotFoundError  KEYSHARD_SUBSCRIPTION_NOT_FOUND
    │   ├── TopicMigratedError         KEYSHARD_TOPIC_MIGRATED
    │   ├── ProducerBusyError          KEYSHARD_PRODUCER_BUSY        (retriable)
    │   ├── ProducerFencedError        KEYSHARD_PRODUCER_FENCED
    │   ├── QuotaExceededError         KEYSHARD_QUOTA_EXCEEDED       (retriable)
    │   ├── LimitReachedError          KEYSHARD_LIMIT_REACHED        (retriable)
    │   ├── DeduplicationError         KEYSHARD_DEDUPLICATION
    │   └── AdminError                 KEYSHARD_ADMIN
    ├── SubscriptionInUseError         KEYSHARD_SUBSCRIPTION_IN_USE
    ├── SinkIdInUseError               KEYSHARD_SINK_ID_IN_USE
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
    ├── BookieReadError                KEYSHARD_BOOKIES_UNAVAILABLE
    ├── AcknowledgeError               KEYSHARD_ACKNOWLEDGE_FAILED
    ├── RuntimeStoppedError            KEYSHARD_STOPPED
    ├── DrainTimeoutError              KEYSHARD_DRAIN_TIMEOUT
    ├── RescaleError                   KEYSHARD_RESCALE_FAILED
    ├── BatchReleasedError             KEYSHARD_BATCH_RELEASED
    ├── BatchUnknownError              KEYSHARD_BATCH_UNKNOWN
    ├── BatchMismatchError             KEYSHARD_BATCH_MISMATCH
    ├── StagingError                   KEYSHARD_STAGING
    ├── WorkerUnreachableError         KEYSHARD_WORKER_UNREACHABLE
    ├── StreamProcessError             KEYSHARD_STREAM_PROCESS
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

All have the form of :class:`~keyshard.base_error.KeyShardError`, and can be pickled.
"""

from __future__ import annotations

from keyshard.base_error import KeyShardError as KeyShardError  # noqa: PLC0414 - its public home


class ConfigError(KeyShardError, ValueError):
    """An option is unknown, missing, of the wrong type or outside its limits."""

    code = "KEYSHARD_BAD_OPTION"


class UnfitHandlerError(ConfigError):
    """A handler cannot be run: it returns a generator, or a handler process cannot load it."""

    code = "KEYSHARD_HANDLER_UNFIT"


class PositionAheadError(ConfigError):
    """A start or end position lies after all stored entries."""

    code = "KEYSHARD_POSITION_AHEAD"


class BrokerError(KeyShardError):
    """The broker refused a request."""

    code = "KEYSHARD_BROKER"


class MessageTooLargeError(BrokerError):
    """A message exceeds the broker's size limit."""

    code = "KEYSHARD_MESSAGE_TOO_LARGE"


class BrokerUnavailableError(BrokerError):
    """The broker cannot be reached, did not answer in time, or cannot answer now."""

    code = "KEYSHARD_BROKER_UNAVAILABLE"
    retriable = True


class TlsError(BrokerError):
    """A certificate is not trusted, or the two sides cannot agree on TLS."""

    code = "KEYSHARD_TLS"


class AuthenticationError(BrokerError):
    """The broker refuses the credentials: a token is wrong, expired or missing."""

    code = "KEYSHARD_AUTHENTICATION"


class AuthorizationError(BrokerError):
    """A role lacks a permission. The message names the role, the permission, and the resource."""

    code = "KEYSHARD_AUTHORIZATION"


class RangeConflictError(BrokerError):
    """Another consumer holds a part of the hash range, or uses the subscription in another mode."""

    code = "KEYSHARD_RANGE_CONFLICT"
    retriable = True


class TopicMigratedError(BrokerError):
    """The topic was moved to another cluster, where its entries have other ids."""

    code = "KEYSHARD_TOPIC_MIGRATED"


class TopicNotFoundError(BrokerError):
    """The topic does not exist."""

    code = "KEYSHARD_TOPIC_NOT_FOUND"


class SubscriptionNotFoundError(BrokerError):
    """A subscription does not exist, and the broker does not create it."""

    code = "KEYSHARD_SUBSCRIPTION_NOT_FOUND"


class ProducerBusyError(BrokerError):
    """Another connection publishes under the same producer name."""

    code = "KEYSHARD_PRODUCER_BUSY"
    retriable = True


class ProducerFencedError(BrokerError):
    """Another program took over the producer name, or published later messages under it."""

    code = "KEYSHARD_PRODUCER_FENCED"


class QuotaExceededError(BrokerError):
    """The backlog quota of the topic is exceeded, so that the broker takes no messages."""

    code = "KEYSHARD_QUOTA_EXCEEDED"
    retriable = True


class LimitReachedError(BrokerError):
    """A limit of the broker on consumers, producers, subscriptions or topics is reached."""

    code = "KEYSHARD_LIMIT_REACHED"
    retriable = True


class DeduplicationError(BrokerError):
    """The broker does not deduplicate the topic, or does not know stored messages any more."""

    code = "KEYSHARD_DEDUPLICATION"


class AdminError(BrokerError):
    """A request to the admin REST interface failed or was refused, or had another effect."""

    code = "KEYSHARD_ADMIN"


class SubscriptionInUseError(KeyShardError):
    """Another consumer held ranges of the subscription until the deadline."""

    code = "KEYSHARD_SUBSCRIPTION_IN_USE"


class SinkIdInUseError(KeyShardError):
    """Another query has stored rows in the topic with the same sink id."""

    code = "KEYSHARD_SINK_ID_IN_USE"


class NonPersistentTopicError(KeyShardError, ValueError):
    """The topic is non-persistent. Its messages have no position, so nothing can be guaranteed."""

    code = "KEYSHARD_NON_PERSISTENT_TOPIC"


class ChunkedMessageError(KeyShardError):
    """A chunked message was received. Its id names only one of its entries."""

    code = "KEYSHARD_CHUNKED_MESSAGE"


class UnreadableEntryError(KeyShardError):
    """A stored entry cannot be read."""

    code = "KEYSHARD_UNREADABLE_ENTRY"
    stored: bytes = b""
    """The stored bytes, if available. A pickled error loses them."""


class CorruptEntryError(UnreadableEntryError):
    """The checksum, compression, structure or size of an entry is wrong."""

    code = "KEYSHARD_CORRUPT_ENTRY"


class EncryptedMessageError(UnreadableEntryError):
    """A message is encrypted, and keyshard has no keys to decrypt it."""

    code = "KEYSHARD_ENCRYPTED_MESSAGE"


class SchemaError(KeyShardError):
    """The schema of a topic cannot be used, or is missing."""

    code = "KEYSHARD_SCHEMA"


class MalformedMessageError(KeyShardError):
    """A value does not fit the schema of its topic, or a dead letter has invalid properties."""

    code = "KEYSHARD_MALFORMED_MESSAGE"


class MisroutedError(KeyShardError):
    """A range received a message outside of it, and ``on_misrouted`` is ``fail``."""

    code = "KEYSHARD_MISROUTED"


class CheckpointError(KeyShardError, ValueError):
    """A checkpoint text cannot be read."""

    code = "KEYSHARD_CHECKPOINT_INVALID"


class CheckpointInUseError(KeyShardError):
    """Another running source keeps its checkpoint in the same file."""

    code = "KEYSHARD_CHECKPOINT_IN_USE"


class CheckpointMismatchError(KeyShardError):
    """A checkpoint belongs to another subscription, cluster or sink."""

    code = "KEYSHARD_CHECKPOINT_MISMATCH"


class TopicRecreatedError(KeyShardError):
    """The broker has different data under ids of a checkpoint, a plan or a position."""

    code = "KEYSHARD_TOPIC_RECREATED"


class DataLossTrimmedError(KeyShardError):
    """Entries that no committed batch holds are no longer stored at the broker."""

    code = "KEYSHARD_DATA_LOSS_TRIMMED"


class DataLossAckedElsewhereError(KeyShardError):
    """Entries that no committed or planned batch holds were acknowledged at the broker."""

    code = "KEYSHARD_DATA_LOSS_ACKED_ELSEWHERE"


class ReplayTimeoutError(KeyShardError):
    """Stored entries could not be read before the deadline. They may still be there."""

    code = "KEYSHARD_REPLAY_TIMEOUT"
    retriable = True


class BookieReadError(KeyShardError):
    """Neither bookies nor the store of offloads returned an entry, and the broker is not asked."""

    code = "KEYSHARD_BOOKIES_UNAVAILABLE"


class AcknowledgeError(KeyShardError):
    """Acknowledgements in the background failed beyond the time limit."""

    code = "KEYSHARD_ACKNOWLEDGE_FAILED"


class RuntimeStoppedError(KeyShardError):
    """The runtime was stopped, or was not started yet."""

    code = "KEYSHARD_STOPPED"


class DrainTimeoutError(KeyShardError):
    """A handler did not end in time. No range has moved."""

    code = "KEYSHARD_DRAIN_TIMEOUT"


class RescaleError(KeyShardError):
    """The broker refused the change of some or all ranges."""

    code = "KEYSHARD_RESCALE_FAILED"


class BatchReleasedError(KeyShardError):
    """A batch was read after its checkpoint became durable."""

    code = "KEYSHARD_BATCH_RELEASED"


class BatchUnknownError(KeyShardError):
    """The requested batch was never planned by this runtime."""

    code = "KEYSHARD_BATCH_UNKNOWN"


class BatchMismatchError(KeyShardError):
    """A repeated batch has other rows than an earlier attempt, or distributes them differently."""

    code = "KEYSHARD_BATCH_MISMATCH"


class StagingError(KeyShardError):
    """Rows of a batch cannot be staged, or staged rows are missing."""

    code = "KEYSHARD_STAGING"


class WorkerUnreachableError(KeyShardError):
    """A reading process cannot reach the endpoint that serves a batch."""

    code = "KEYSHARD_WORKER_UNREACHABLE"


class StreamProcessError(KeyShardError):
    """The stream process of a Spark query ended unexpectedly."""

    code = "KEYSHARD_STREAM_PROCESS"


class UnsupportedTriggerError(KeyShardError):
    """The trigger of the Spark query cannot be served."""

    code = "KEYSHARD_UNSUPPORTED_TRIGGER"


class AsyncProgressError(KeyShardError):
    """Spark planned a batch before it reported the commit of the previous one."""

    code = "KEYSHARD_ASYNC_PROGRESS"


class AvailableNowTimeoutError(KeyShardError):
    """A bounded run did not reach its targets before its deadline."""

    code = "KEYSHARD_AVAILABLE_NOW_TIMEOUT"


class WorkerEnvironmentError(KeyShardError):
    """A worker process, Spark's Python workers, or actors of Ray lack something keyshard needs."""

    code = "KEYSHARD_WORKER_ENVIRONMENT"


class ClusterError(KeyShardError):
    """A cluster does not exist, or has no room for the request."""

    code = "KEYSHARD_CLUSTER"


class ControlError(KeyShardError):
    """A running source cannot be found, or does not answer."""

    code = "KEYSHARD_CONTROL"


class HistoryError(KeyShardError, ValueError):
    """A history of events cannot be read or written, or contains nothing to check."""

    code = "KEYSHARD_HISTORY_INVALID"


class DevBrokerError(KeyShardError):
    """The development broker cannot be fetched, started or stopped."""

    code = "KEYSHARD_DEVBROKER"


class HandlerFailedError(KeyShardError):
    """A message exhausted its retries, and this ends the source."""

    code = "KEYSHARD_HANDLER_FAILED"


class HandlerProcessError(KeyShardError):
    """A process or an actor ended while it handled a message."""

    code = "KEYSHARD_HANDLER_PROCESS"


class WindowFullError(KeyShardError):
    """The window is full of batches that were not acknowledged."""

    code = "KEYSHARD_WINDOW_FULL"


class NotRunningError(KeyShardError):
    """The request needs a running source."""

    code = "KEYSHARD_NOT_RUNNING"


class ThreadStartError(KeyShardError):
    """The system cannot start a thread: too many run, or the program's main thread has ended."""

    code = "KEYSHARD_THREAD_START"


class UnexpectedError(KeyShardError):
    """A thread of the source raised an unexpected error, which ends the source."""

    code = "KEYSHARD_UNEXPECTED"


BY_CODE = {
    value.code: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, KeyShardError)
}
"""Every error by its code. Processes exchange the code as text."""
