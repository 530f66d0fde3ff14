"""The options of ``format("keyshard")``: one table, from which ``docs/options.md`` is made."""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option: its Spark name, the field of KeyShardSource behind it, and what it means."""

    name: str
    field: str
    meaning: str


OPTIONS = (
    Option("service.url", "service_url", "Where the broker is."),
    Option(
        "admin.url",
        "admin_url",
        "Admin REST interface, `http://host:port`. Optional; with it keyshard checks that topics "
        "exist, names the cluster in the checkpoint and the other side of a conflict in errors.",
    ),
    Option(
        "topic",
        "topics",
        "One topic. Exactly one of `topic`, `topics` and `topicsPattern` is needed.",
    ),
    Option("topics", "topics", "Several topics, separated by commas."),
    Option(
        "topicsPattern",
        "topics_pattern",
        "Topics whose whole name matches: `regex` (in `public/default`), `tenant/namespace/regex` "
        "or `persistent://tenant/namespace/regex`, as Python's `re` reads it. Partition suffixes "
        "are no part of the name; system topics (`__...`) never match. Needs `admin.url`.",
    ),
    Option(
        "partitionDiscoveryIntervalMillis",
        "discovery_interval_ms",
        "Time between two looks for new topics and topic partitions. What is found while the query "
        "runs is read from its beginning.",
    ),
    Option(
        "subscription",
        "subscription",
        "Subscription that holds the backlog. **Required.** One query at a time may use it.",
    ),
    Option(
        "transport",
        "transport",
        "What consumes and reads: `wire`, keyshard itself by Pulsar's binary protocol, which takes "
        "whole entries and costs less; `client`, pulsar-client; or `auto`, which is `wire`.",
    ),
    Option(
        "parallelism",
        "parallelism",
        "Number of hash ranges, and so of Spark tasks with data, whatever the number of topic "
        "partitions. May change between runs.",
    ),
    Option(
        "startingOffsets",
        "starting_position",
        "Where a subscription begins that does not exist at the first start: `earliest`, `latest`, "
        "or, with `admin.url`, JSON with a position for each topic partition: "
        '`{"orders-partition-0": "7:120"}`. A checkpoint, then an existing subscription, come '
        "before it. Of a batch read: see below.",
    ),
    Option(
        "startingTime",
        "starting_position",
        "Instead of `startingOffsets`, with `admin.url`: a publish time, ISO 8601 with its zone "
        "(`2026-11-21T08:00:00+01:00`) or milliseconds since 1970. The stream begins at the entry "
        "that the broker finds for it: the one before is earlier, if times are in order.",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "batch_rows_max",
        "Most rows of one micro-batch, split over topic partitions by what they have. Unset: half "
        "of `windowMaxRows`.",
    ),
    Option(
        "maxBytesPerTrigger",
        "batch_bytes_max",
        "Most payload of one micro-batch, bytes; a single larger entry is taken alone.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "batch_rows_min",
        "Fewest rows of one micro-batch: less waits, until `maxTriggerDelay` or a full window.",
    ),
    Option(
        "maxTriggerDelay",
        "batch_delay_max_ms",
        "Longest wait for `minOffsetsPerTrigger`: a number with a unit (`500ms`, `30s`, `15m`, "
        "`1h`), or milliseconds.",
    ),
    Option(
        "onMisrouted",
        "on_misrouted",
        "`warn` or `fail` when a message is outside the range that received it: its producer "
        "batches by default instead of by key, and order per key is lost.",
    ),
    Option(
        "onCorrupt",
        "on_corrupt",
        "`fail` or `skip` when an entry cannot be read: the query ends before it, or acknowledges "
        "it, counts it in `corruptSkipped` and leaves it out. `skip` is refused with `transport` "
        "`client`: pulsar-client skips them without a notice.",
    ),
    Option(
        "onEncrypted",
        "on_encrypted",
        "`fail` or `skip` when a message is encrypted: the query ends before it with "
        "`KEYSHARD_ENCRYPTED_MESSAGE`, or acknowledges its entry, counts it in `encryptedSkipped` "
        "and leaves it out. `skip` is refused with `transport` `client`, whose consumers stall "
        "behind encrypted batches.",
    ),
    Option(
        "valueFormat",
        "value_format",
        "`auto`: the fields of the topic's schema are columns, a primitive is the column `value`; "
        "without a schema, `value` is the bytes. `raw`: it always is. See "
        "[Structured values](#structured-values).",
    ),
    Option(
        "mode",
        "malformed",
        "Handling of values that do not fit the schema: `FAILFAST` ends the query and names "
        "topic, message, field and reason; `PERMISSIVE` gives nulls, and the bytes in column "
        "`_corrupt_record`; `DROPMALFORMED` leaves the row out, whichever columns are selected; "
        "for that, it decodes every value. The payload (`valueFormat` `raw`, or `value binary` "
        "where the schema declares no such column) fits always.",
    ),
    Option(
        "metadataColumns",
        "metadata_columns",
        "Columns beside the default ones, separated by commas: `__orderingKey`, `__keyBytes`, "
        "`__sequenceId`, `__producer`, `__brokerPublishTime`, `__messageIdBytes`. They cost "
        "something only where they are named, here or in `.schema(...)`. See [Columns](#columns).",
    ),
    Option(
        "windowMaxRows",
        "window_rows_max",
        "Most rows held, received and not yet committed, over all ranges. Keep it below what the "
        "broker leaves unacknowledged: 200,000 per topic partition by default.",
    ),
    Option("windowMaxBytes", "window_bytes_max", "Most memory of those rows, bytes."),
    Option(
        "workers",
        "workers",
        "What has the consumers: `embedded`, the query's process on the driver; `processes:4`, so "
        "many processes beside it, each a core for receiving; `spark:4`, processes on executors, "
        "which `spark_adapter.start_workers(spark, 4)` hosts, and which tasks get rows from; "
        "`ray:4`, so many actors of a Ray cluster (`ray:4?num_cpus=1`); or another place that is "
        "installed.",
    ),
    Option(
        "workerHost",
        "worker_host",
        "Address of the driver's machine under which executors reach it. Loopback serves local "
        "mode only.",
    ),
    Option(
        "subscribeTimeoutMillis",
        "subscribe_timeout_ms",
        "Longest wait for ranges that somebody else still holds, such as a crashed run.",
    ),
    Option(
        "operationTimeoutMillis",
        "operation_timeout_ms",
        "Longest time of one request to the broker, and of reaching it when a query goes on from "
        "its checkpoint; whole seconds. A first start gives up within 5 s.",
    ),
    Option(
        "availableNowTimeoutMillis",
        "available_now_timeout_ms",
        "`trigger(availableNow=True)`: longest wait for a row, or for proof that no more comes.",
    ),
    Option(
        "settleAfterMillis",
        "settle_after_ms",
        "How long the broker must call an entry acknowledged that this query never got before it "
        "counts as settled. Needs `admin.url`.",
    ),
    Option(
        "maxCheckpointBytes",
        "checkpoint_bytes_max",
        "Size of a checkpoint at which the fast ranges of a topic partition wait for slow ones.",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        "Whether the query fails when a planned batch is no longer stored, or entries were "
        "acknowledged that no batch holds. `false` warns, counts them in `entriesLost`, goes on.",
    ),
)

OF_BATCHES_TOO = frozenset({
    "service.url", "admin.url", "topic", "topics", "topicsPattern", "transport",
    "startingOffsets", "startingTime", "operationTimeoutMillis", "failOnDataLoss", "valueFormat",
    "mode", "metadataColumns",
})  # fmt: skip
"""Names of the options above that a batch read has, beside :data:`CONNECTION_OPTIONS`."""
_OFFSETS = (
    "`earliest`, `latest`, or JSON with a position for each topic partition: "
    '`{"orders-partition-0": "7:120", "orders-partition-1": "8:3:17"}`, as `ledger:entry` or '
    "`ledger:entry:index`, or one of the two words. "
)
BATCH_OPTIONS = (
    Option("startingOffsets", "start", f"First message: {_OFFSETS}Default `earliest`."),
    Option(
        "endingOffsets",
        "end",
        f"Message that is not read any more: {_OFFSETS}Default `latest`: behind what is stored "
        "when the read is planned, which is once for each `load()`.",
    ),
    Option(
        "startingTime",
        "start",
        "Instead of `startingOffsets`: first publish time, ISO 8601 with its zone "
        "(`2026-11-21T08:00:00+01:00`) or milliseconds since 1970.",
    ),
    Option(
        "endingTime",
        "end",
        "Instead of `endingOffsets`: publish time that is not read any more.",
    ),
    Option(
        "maxTimeDisorder",
        "disorder_max_s",
        "How far publish times go back in a topic partition at most, such as `1h`. Then only what "
        "may lie between the times is read; without it all that is stored is looked at, because "
        "times are not in the order of entries. What is off by more than you said may be missed.",
    ),
    Option(
        "minPartitions",
        "partitions_min",
        "Fewest Spark partitions, whatever the number of topic partitions: they are cut between "
        "entries, about equal in bytes. Unset: one for each 32 MiB, and for each topic partition.",
    ),
    Option(
        "maxRowsPerPartition",
        "rows_max",
        "Most rows of a Spark partition, estimated as entries: a producer batch counts as one.",
    ),
    Option(
        "keys",
        "keys",
        'Only messages with one of these keys, a JSON list: `["k1", "k2"]`. The others are '
        "dropped before columns are made of them.",
    ),
    Option(
        "pushFilters",
        "pushes_filters",
        "Whether filters of the query on `__topic`, `__partition`, `__key` (`=`, `IN`) and "
        "`__publishTime` choose what is read. Default `false`. **For one query for each "
        "`load()`**, and with `spark.sql.python.filterPushdown.enabled`; see below.",
    ),
)
"""What only a batch read has, and where it starts."""

CLIENT = "pulsar.client."
"""Beginning of the options that Pulsar's Java client has, too."""
CONNECTION_OPTIONS = (
    Option(
        "authPluginClassName",
        "authentication",
        "How the query shows who it is: `token`, `tls`, `oauth2` or `basic`, or the Java class.",
    ),
    Option(
        "authParams",
        "authentication",
        "Its parameters. token: `file:///path` (read again at every connection, so it may be "
        "renewed), `env:NAME` or `token:...`. oauth2: JSON with `issuerUrl`, `privateKey` (a file "
        "with `client_id` and `client_secret`), `audience`, `scope`. basic: JSON with `userId`, "
        "`password`. tls: `tlsCertFile:/path,tlsKeyFile:/path`.",
    ),
    Option(
        "tlsTrustCertsFilePath",
        "tls_trust_certs_file_path",
        "PEM file of the authorities that are trusted. Unset: those of the package certifi.",
    ),
    Option(
        "tlsCertificateFilePath",
        "tls_certificate_file_path",
        "PEM file of the query's own certificate. Without other authentication it is who the query "
        "is.",
    ),
    Option("tlsKeyFilePath", "tls_key_file_path", "Its key, PEM, without a passphrase."),
    Option(
        "tlsHostnameVerificationEnable",
        "tls_hostname_verification",
        "Whether the certificate has to be that of the host in the URL. The Java client's default "
        "is `false`.",
    ),
    Option(
        "listenerName",
        "listener_name",
        "Which of the addresses that brokers advertise is used (`advertisedListeners`).",
    ),
    Option(
        "connectionTimeoutMs",
        "connection_timeout_ms",
        "Longest time until a connection of the client is there.",
    ),
)
"""Each is an option under its name after :data:`CLIENT`."""
