"""Cause and remedy of every error, in one table; ``docs/errors.md`` is made from it.

Write the document again with ``python -m keyshard.error_reference > docs/errors.md``.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

from keyshard import errors
from keyshard.errors import KeyShardError


@dataclass(frozen=True, slots=True)
class Reference:
    """One row of the table. The meaning is the docstring of the class."""

    error: type[KeyShardError]
    cause: str
    """Cause of the error; one or more sentences."""
    remedy: str
    """Remedy for it; one or more sentences."""


REFERENCES = (
    Reference(
        errors.KeyShardError,
        "The base class of all errors. keyshard raises it itself if no other class fits, for "
        "example if rows do not fit into one record batch.",
        "Follow the message.",
    ),
    Reference(
        errors.ConfigError,
        "A constructor, a function, an option of Spark or an option of a command has a wrong "
        "value. keyshard checks most options before it connects.",
        "Correct the value that the error names.",
    ),
    Reference(
        errors.UnfitHandlerError,
        "The handler cannot be pickled or imported, or failed to start. Or it yields, or returns "
        "messages to publish, without a sink. Or it needs data that the source does not provide. "
        "Or the body of an `async for` lost a message without `done()`.",
        "Define the handler at the top level of a module that workers can import. Give the run a "
        "sink, or remove the `yield`. In an `async for`, await `done()` or `failed()` of each "
        "message.",
    ),
    Reference(
        errors.PositionAheadError,
        "The position belongs to another topic, or to a topic that was deleted and created again.",
        "Correct the position. To read the stored entries, set `fail_on_data_loss` to false.",
    ),
    Reference(
        errors.BrokerError,
        "The broker answers a request with an error that no other class covers. The message "
        "contains the text of the broker.",
        "If the broker reports a reason, correct it. Its log has the details.",
    ),
    Reference(
        errors.MessageTooLargeError,
        "A dead letter or a published message exceeds `maxMessageSize`, or 128 MiB uncompressed.",
        "Raise `maxMessageSize` at the broker, or publish smaller messages.",
    ),
    Reference(
        errors.BrokerUnavailableError,
        "The broker or the admin interface is down, overloaded or not reachable. Or the service "
        "URL names another host or port.",
        "Check that the broker is running, and check `service_url` and `admin_url`. keyshard "
        "retries in a running source, and reports the state in its status.",
    ),
    Reference(
        errors.TlsError,
        "The authority of a certificate is unknown, a certificate names another host, or the "
        "other side rejects the client certificate.",
        "Set `tls_trust_certs_file_path` to the file of the right authority. Use the host name "
        "of the certificate in the URL. Check the client certificate.",
    ),
    Reference(
        errors.AuthenticationError,
        "The token is wrong, expired or signed for another cluster, or its file cannot be read. "
        "Or the OAuth 2.0 issuer rejects the client.",
        "Renew the token, or correct the authentication of the connection. A token file is read "
        "again at each connection.",
    ),
    Reference(
        errors.AuthorizationError,
        "The role of the client has no permission `consume` or `produce` on the topic, or none "
        "on the subscription or the namespace.",
        "Grant the permission: `pulsar-admin topics grant-permission TOPIC --role ROLE --actions "
        "consume`.",
    ),
    Reference(
        errors.RangeConflictError,
        "Another source, or an earlier process of this one, still holds the ranges. keyshard "
        "retries until `subscribe_timeout_ms`.",
        "Stop the other consumer, or use another subscription.",
    ),
    Reference(
        errors.TopicNotFoundError,
        "The name is wrong, the topic was not created yet, or the broker deleted an inactive "
        "partition.",
        "Create the topic, or correct its name. To create missing partitions, use `pulsar-admin "
        "topics create-missed-partitions TOPIC`.",
    ),
    Reference(
        errors.SubscriptionNotFoundError,
        "Auto-creation of subscriptions is off (`allowAutoSubscriptionCreation`, of the broker or "
        "of the namespace).",
        "Run the commands of the message, or admit auto-creation: `pulsar-admin namespaces "
        "set-auto-subscription-creation NAMESPACE --enable`.",
    ),
    Reference(
        errors.TopicMigratedError,
        "The cluster was migrated. Ids of entries differ in the new cluster, so the checkpoint "
        "does not apply there.",
        "Set `service_url` and `admin_url` to the new cluster, and start with a new checkpoint.",
    ),
    Reference(
        errors.ProducerBusyError,
        "Another program publishes under the same producer name. Or a crashed process keeps the "
        "name until the broker notices.",
        "Stop the other program, or use another sink id.",
    ),
    Reference(
        errors.ProducerFencedError,
        "Two programs publish with the same sink id. This one stops, because the broker would "
        "drop its messages as duplicates.",
        "If the other program was another attempt to write the same batch, repeat the call. "
        "Otherwise stop that program, or use another sink id.",
    ),
    Reference(
        errors.QuotaExceededError,
        "Subscriptions of the topic have a backlog above the backlog quota of the namespace.",
        "Let the subscriptions catch up, or raise the backlog quota.",
    ),
    Reference(
        errors.LimitReachedError,
        "The broker, the namespace or the topic limits the number of consumers, producers, "
        "subscriptions or topics, and `parallelism` or other applications reach the limit. A start "
        "retries for 5 s, because a program that just ended may still count. A running source "
        "names the limit in status and log, and retries: until there is room for a lost consumer, "
        "and for `subscribe_timeout_ms` if it gives a range to a new consumer.",
        "Use fewer of them, or raise the limit with the command that the message names.",
    ),
    Reference(
        errors.DeduplicationError,
        "Deduplication is disabled at the broker, or its state of the producer has expired. "
        "Without it, rows may be stored twice.",
        "Enable deduplication: `pulsar-admin namespaces set-deduplication NAMESPACE --enable`.",
    ),
    Reference(
        errors.AdminError,
        "`admin_url` is wrong, another program answers there, or the admin interface rejects the "
        "request.",
        "Correct `admin_url`. Without `admin_url`, keyshard leaves out the checks that need it.",
    ),
    Reference(
        errors.SubscriptionInUseError,
        "Another query, source or client uses the subscription, or another source parks keys in "
        "its dead-letter topic. A crashed process keeps its ranges until the broker notices.",
        "Stop the other consumer, or give this source its own subscription.",
    ),
    Reference(
        errors.SinkIdInUseError,
        "Two streaming queries of Spark write to a topic with one `sinkId`, or a query with a new "
        "checkpoint replaces an older one. The end of the topic has rows of the other query.",
        "Give each query, and each new checkpoint, its own `sinkId`.",
    ),
    Reference(
        errors.NonPersistentTopicError,
        "The topic name or the pattern begins with `non-persistent://`.",
        "Use a persistent topic.",
    ),
    Reference(
        errors.ChunkedMessageError,
        "The producer has chunking enabled, and sent a message that exceeds `maxMessageSize`.",
        "Disable chunking at the producer, or raise `maxMessageSize` at the broker. Then move "
        "past the message with a new start position.",
    ),
    Reference(
        errors.UnreadableEntryError,
        "The base class of the two errors below. keyshard does not raise it itself.",
        "Catch it to handle both errors.",
    ),
    Reference(
        errors.CorruptEntryError,
        "A producer wrote invalid data, or the data was damaged at the broker or on the network.",
        "Correct the producer. To acknowledge, count and skip such entries, set `on_corrupt` to "
        "`skip`. With handlers, `park` writes them to the dead-letter topic.",
    ),
    Reference(
        errors.EncryptedMessageError,
        "The producer encrypts messages end to end.",
        "Consume the topic with a client that has the keys. To acknowledge, count and skip such "
        "messages, set `on_encrypted` to `skip`. With handlers, `park` writes them to the "
        "dead-letter topic.",
    ),
    Reference(
        errors.SchemaError,
        "A schema has a type that columns cannot represent, topics of one query differ, a "
        "version was deleted, or a package is missing.",
        "Select other columns, register the schema again, or set `valueFormat` to `raw`.",
    ),
    Reference(
        errors.MalformedMessageError,
        "A producer wrote a value without its schema, or with another one. Or the parts of a "
        "dead letter are incomplete.",
        "Correct the producer. In Spark, set `mode` to `PERMISSIVE` or `DROPMALFORMED`; in "
        "Python, set `malformed`. A handler reads the bytes from `message.value`.",
    ),
    Reference(
        errors.CheckpointError,
        "The text of a checkpoint is damaged, has another version, or belongs to another "
        "connector. Or its file cannot be read or written.",
        "Restore the checkpoint, or use the release that wrote it. Check the location and its "
        "permissions. Otherwise start with a new checkpoint.",
    ),
    Reference(
        errors.CheckpointInUseError,
        "Two sources were started with the same checkpoint file.",
        "Stop the other source, or give this one its own checkpoint.",
    ),
    Reference(
        errors.CheckpointMismatchError,
        "The option `subscription`, the cluster or the sink was changed, and the checkpoint kept.",
        "Restore it, or start with a new checkpoint. That loses outputs that are not published.",
    ),
    Reference(
        errors.MisroutedError,
        "A producer uses default batching, which mixes keys. The broker routes a batch by its "
        "first key.",
        "Enable batching by key at the producer (`BatchingType.KeyBased`), or disable batching. "
        "To receive such messages anyway, set `on_misrouted` to `warn`.",
    ),
    Reference(
        errors.TopicRecreatedError,
        "The topic was deleted and created again, or the storage of the cluster was wiped. The "
        "broker reuses ids then.",
        "Start with a new checkpoint. For a position, correct it.",
    ),
    Reference(
        errors.DataLossTrimmedError,
        "Retention, TTL or the deletion of a topic removed entries before they were committed or "
        "read. Or the subscription expired or was deleted while the source was down.",
        "Restore the topic, and raise retention, TTL and the expiration time of subscriptions. To "
        "accept the loss, set `fail_on_data_loss` to false.",
    ),
    Reference(
        errors.DataLossAckedElsewhereError,
        "Another client acknowledged, skipped or expired entries on the subscription. Or the "
        "checkpoint is an older copy.",
        "Restore the newest checkpoint, and give the source its own subscription. To accept the "
        "loss, set `fail_on_data_loss` to false.",
    ),
    Reference(
        errors.ReplayTimeoutError,
        "The broker is slow or unavailable while keyshard reads entries again after a restart, or "
        "in a bounded read.",
        "Check the load of the broker, or raise `replay_timeout_ms` (bounded reads: "
        "`operation_timeout_ms`). Then start again.",
    ),
    Reference(
        errors.BookieReadError,
        "The option `segments` is `bookies`, and no bookie of a closed ledger, or not the store "
        "`offloads` of an offloaded one, could be reached or returned an entry.",
        "Check that the addresses of the bookies, or the store, can be reached from where the read "
        "runs. Set `bookies.map` if bookies have others there, and `bookies.trustCertsFilePath` if "
        "they require TLS. With `segments` `auto`, the broker is asked.",
    ),
    Reference(
        errors.AcknowledgeError,
        "The broker was unavailable for longer than `acknowledge_timeout_ms`, or too many entries "
        "wait for their acknowledgement.",
        "Check that the broker answers, then start again. Nothing is lost: the entries are "
        "delivered again. A source with a checkpoint drops them.",
    ),
    Reference(
        errors.RuntimeStoppedError,
        "The program uses a source, or one of its batches, after the source was stopped.",
        "Start the source again. During a stop, ignore this error.",
    ),
    Reference(
        errors.DrainTimeoutError,
        "A rescale waits for running handlers, and one of them takes longer than "
        "`drain_timeout_s`. The message names its key.",
        "Raise `drain_timeout_s`, or make the handler faster. The source continues unchanged.",
    ),
    Reference(
        errors.RescaleError,
        "The broker became unavailable during a rescale, or another consumer took a range.",
        "Check the broker. If the previous owners hold the ranges, rescale again. If the source "
        "has ended, start it again; nothing is lost.",
    ),
    Reference(
        errors.BatchReleasedError,
        "A program uses a DataFrame of `foreachBatch` after its batch was committed.",
        "Read the DataFrame inside `foreachBatch`, or cache it there.",
    ),
    Reference(
        errors.BatchUnknownError,
        "A task belongs to an earlier run of the query.",
        "Ignore this error: Spark plans the batch again.",
    ),
    Reference(
        errors.BatchMismatchError,
        "A query computes other rows when a batch runs again, or in other Spark partitions. Or the "
        "hashing scheme or the number of topic partitions has changed since the first attempt.",
        "Make the query deterministic, and restore the scheme. With another sink id, all rows of "
        "the batch are stored again.",
    ),
    Reference(
        errors.StagingError,
        "The URL of option `staging` cannot be read or written, or a file there was removed.",
        "Check the URL, its credentials and permissions, and restore missing files. Keep the "
        "folder as long as the checkpoint of the query.",
    ),
    Reference(
        errors.WorkerUnreachableError,
        "A task cannot connect to the driver, the driver cannot connect to a worker, a worker "
        "ended, or a firewall blocks the port.",
        "Set `worker_host` to an address of the driver that executors can reach. Allow "
        "connections between all machines. Look for a crash or the memory limit of the worker.",
    ),
    Reference(
        errors.StreamProcessError,
        "The process on the driver that reads the stream of a Spark query was killed, crashed, or "
        "was ended by code that it ran. The message has its exit status and the end of its log.",
        "After SIGKILL, raise the memory limit of the driver's container or machine, or lower "
        "`windowMaxBytes`. After a crash, report the stack in the log of the driver. Then start "
        "the query again from its checkpoint.",
    ),
    Reference(
        errors.UnsupportedTriggerError,
        "The query uses `trigger(once=True)`, which never commits its only batch at the source.",
        "Use `trigger(availableNow=True)`.",
    ),
    Reference(
        errors.AsyncProgressError,
        "The query sets `asyncProgressTrackingEnabled`. Spark then does not report durable "
        "batches, so keyshard could not acknowledge safely.",
        "Remove the option `asyncProgressTrackingEnabled`.",
    ),
    Reference(
        errors.AvailableNowTimeoutError,
        "A run with `trigger(availableNow=True)` planned no batch for `available_now_timeout_ms`. "
        "The message names the missing entries.",
        "Check the broker, or raise `availableNowTimeoutMillis`. A restart continues after the "
        "committed rows.",
    ),
    Reference(
        errors.WorkerEnvironmentError,
        "The Python of executors or actors lacks keyshard, or has another version of it.",
        "Install the same version of keyshard on every machine, with the extra of the engine.",
    ),
    Reference(
        errors.ClusterError,
        "The Ray cluster cannot be reached, has too few resources, or was shut down. Or Spark has "
        "too few free slots for its workers.",
        "Start the cluster. If resources are missing, request fewer, or add nodes or executors.",
    ),
    Reference(
        errors.ControlError,
        "No source, sink or worker runs on this machine as this user, several match, or the "
        "process hangs.",
        "Give the name or the process id of a running source or sink. Use the same release of "
        "keyshard for the command and the source.",
    ),
    Reference(
        errors.HistoryError,
        "A history file for `keyshard check` does not follow its format, or contains no events.",
        "Correct the file. The page docs/history.md describes the format.",
    ),
    Reference(
        errors.HandlerFailedError,
        "A handler raised until its retries were exhausted, and `on_failure` is `stop`. Or the "
        "handler of a Ray job failed.",
        "Correct the handler, and start the source again. The message is not acknowledged, and "
        "is delivered again.",
    ),
    Reference(
        errors.HandlerProcessError,
        "The handler crashed its process or actor, or the system ended it for its memory use.",
        "Look for a crash, or for the memory limit. The message counts as failed, and is retried.",
    ),
    Reference(
        errors.WindowFullError,
        "Batches that got no `ack()` filled the window for `operation_timeout_ms`.",
        "Call `ack()` on each batch. To hold more of them, raise `window_bytes_max`, "
        "`window_rows_max` and the broker's limits on unacknowledged messages.",
    ),
    Reference(
        errors.NotRunningError,
        "A method or a command needs a running source, but the source is starting, has ended, or "
        "does not have the feature.",
        "Call `run()` or `batches()` first. If the source is starting, try again later.",
    ),
    Reference(
        errors.ThreadStartError,
        "The process or container has reached its thread limit, or the interpreter is shutting "
        "down.",
        "Raise the thread limit. Keep the main thread alive while the source runs.",
    ),
    Reference(
        errors.UnexpectedError,
        "keyshard has a defect, or a library raised an error that keyshard does not know.",
        "Start the source again, and report the traceback in the log.",
    ),
    Reference(
        errors.DevBrokerError,
        "`keyshard broker` cannot download Pulsar, finds no Java, or cannot use its port or data "
        "directory.",
        "Follow the message. The log of the broker has the details: `keyshard broker logs`.",
    ),
)
"""In the order of the document, which is that of the hierarchy in :mod:`keyshard.errors`."""
BY_ERROR = {one.error: one for one in REFERENCES}


def remedy_of(error: type[KeyShardError]) -> str:
    """Return the remedy of a class, or of its nearest base, without Markdown markup."""
    return next(BY_ERROR[one].remedy for one in error.__mro__ if one in BY_ERROR).replace("`", "")


def document() -> str:
    """Return the text of ``docs/errors.md``."""
    return _HEAD + "\n".join(map(section, REFERENCES))


def meaning(error: type[KeyShardError]) -> str:
    """Return the first paragraph of the docstring of an error, on one line."""
    return " ".join(inspect.getdoc(error).partition("\n\n")[0].split())  # type: ignore[union-attr]


def section(one: Reference) -> str:
    """Return the section of the document about an error, in Markdown."""
    error = one.error
    parents = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    return (
        f"## {error.code}\n\n"
        f"{meaning(error)}\n\n"
        f"- Class: `{error.__name__}`, a subclass of {parents}\n"
        f"- Retriable: {'yes' if error.retriable else 'no'}\n"
        f"- Cause: {one.cause}\n"
        f"- Remedy: {one.remedy}\n"
    )


_HEAD = """# Errors

Every error of keyshard is a subclass of `keyshard.errors.KeyShardError`, and has a code. Its text
has a line for the problem, one for the place if it is known, one for the remedy, and one for the
section of this page:

```text
[KEYSHARD_TOPIC_NOT_FOUND] Topic persistent://public/default/orders does not exist.
Place: source of persistent://public/default/orders, subscription 'billing'
Remedy: Create the topic, or correct its name.
More: docs/errors.md#keyshard_topic_not_found, or run: keyshard error KEYSHARD_TOPIC_NOT_FOUND
```

Logs and the status have the code, the problem and the remedy in one line.

| attribute | value |
|---|---|
| `code` | the code |
| `problem`, `place`, `remedy` | the text of the lines; empty if there is none |
| `message`, `summary` | problem and remedy in one line, without and with the code |
| `facts` | values for programs, such as the topic |
| `retriable` | true if the error may disappear without a change |

Texts contain no secrets. All errors can be pickled.

A running source retries a retriable error until a timeout. After that, start the source again.

## Errors in Spark

Spark nests an error of a Python data source in its own errors. Search the text for `[KEYSHARD_`.

| error condition of Spark | error of |
|---|---|
| `PYTHON_DATA_SOURCE_ERROR` | the planning of a query, such as a wrong option |
| `STREAM_FAILED`, with `PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR` | a stream, on the driver |
| `STREAM_FAILED` or a failed job, with `PYTHON_EXCEPTION` | a task, on an executor |

Messages use the names of Spark options instead of Python fields, such as `admin.url`.

## Errors of commands

A command prints an error to standard error. Its exit status is 2 for `ConfigError` and its
subclasses, 1 for every other error, and 130 after Ctrl-C. `keyshard check` has its own statuses;
see `keyshard check --help`.

This page is made from the table in `keyshard/error_reference.py`. To write it again, run
`python -m keyshard.error_reference > docs/errors.md`.

"""

if __name__ == "__main__":
    sys.stdout.write(document())
