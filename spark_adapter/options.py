"""The options of ``format("keyshard")``. ``docs/options.md`` is generated from this table."""

from __future__ import annotations

from typing import NamedTuple

from keyshard.core.metadata_columns import METADATA_COLUMNS

_METADATA = ", ".join(f"`{name}`" for name in METADATA_COLUMNS)


class Option(NamedTuple):
    """One option: its Spark name, its field of KeyShardSource, and its meaning."""

    name: str
    field: str
    meaning: str


OPTIONS = (
    Option(
        "service.url",
        "service_url",
        "URL of the broker. It may name several hosts: `pulsar://a:6650,b:6650`.",
    ),
    Option(
        "admin.url",
        "admin_url",
        "URL of the admin REST interface, `http://host:port`. Optional. With it, keyshard checks "
        "that topics exist, stores the cluster name in the checkpoint, reads the limits of the "
        "broker, and names the other client in a conflict.",
    ),
    Option(
        "topic",
        "topics",
        "One topic. Give exactly one of `topic`, `topics` and `topicsPattern`.",
    ),
    Option("topics", "topics", "Topics, separated by commas; `topic://` names scalable ones."),
    Option(
        "topicsPattern",
        "topics_pattern",
        "Topics whose whole name matches a Python regular expression: `regex` (in "
        "`public/default`), `tenant/namespace/regex` or `persistent://tenant/namespace/regex`; "
        "of scalable topics, `topic://tenant/namespace/regex`. The name excludes the partition "
        "suffix. System topics (`__...`) never match. Needs `admin.url`.",
    ),
    Option(
        "partitionDiscoveryIntervalMillis",
        "discovery_interval_ms",
        "Interval of the discovery of topics and topic partitions, milliseconds. With the "
        "transport `wire`, Pulsar reports new topics and topic partitions, which are then found "
        "within about a second. Topics found while the query runs are read from their beginning.",
    ),
    Option(
        "subscription",
        "subscription",
        "Subscription of the query; it holds the backlog. **Required.** Only one query at a time "
        "may use it.",
    ),
    Option(
        "queryName",
        "name",
        "Name of the query in `keyshard status` and its other commands. Default: the "
        "subscription. Spark does not pass on the `queryName` of `writeStream`.",
    ),
    Option(
        "transport",
        "transport",
        "`wire`: keyshard's own implementation of Pulsar's protocol. `client`: pulsar-client, with "
        "[fewer guarantees](semantics.md#with-transportclient). `auto`: `wire`.",
    ),
    Option(
        "parallelism",
        "parallelism",
        "Number of hash ranges, and so the largest number of Spark tasks of a batch. It does not "
        "depend on the number of topic partitions. You may change it between runs.",
    ),
    Option(
        "startingOffsets",
        "starting_position",
        "Start of a subscription that does not exist yet: `earliest`, `latest`, or, with "
        '`admin.url`, JSON with a position for each topic partition: `{"orders-partition-0": '
        '"7:120"}`. A checkpoint takes precedence, then an existing subscription. For batch '
        "reads, see below.",
    ),
    Option(
        "startingTime",
        "starting_position",
        "Alternative to `startingOffsets`, with `admin.url`: a publish time, ISO 8601 with its "
        "zone (`2026-11-21T08:00:00+01:00`) or milliseconds since 1970. The stream begins at the "
        "entry that the broker finds for this time.",
    ),
    Option(
        "maxOffsetsPerTrigger",
        "batch_rows_max",
        "Largest number of rows of a micro-batch. They are divided among topic partitions by their "
        "available rows. Default: all received rows, up to half of the window.",
    ),
    Option(
        "maxBytesPerTrigger",
        "batch_bytes_max",
        "Largest payload of a micro-batch, bytes. A single larger entry forms a batch alone.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "batch_rows_min",
        "Fewest rows of a micro-batch. With fewer rows, the query waits until `maxTriggerDelay` "
        "or until the window is full. A query with `availableNow` does not wait.",
    ),
    Option(
        "maxTriggerDelay",
        "batch_delay_max_ms",
        "Longest wait for `minOffsetsPerTrigger`: a number with a unit (`500ms`, `30s`, `15m`, "
        "`1h`), or milliseconds.",
    ),
    Option(
        "tasksPerBatch",
        "batch_tasks",
        "Number of tasks of each micro-batch, at most `parallelism`. Default: few tasks for few "
        "rows. The first batch has one task for 50,000 rows or 8 MiB; later ones follow the time "
        "that the previous batch took. If the trigger interval is a second or longer, the wait for "
        "the next trigger is not part of this time.",
    ),
    Option(
        "onMisrouted",
        "on_misrouted",
        "`warn` or `fail`, if a message is outside the range that received it. Such a message "
        "means that its producer batches by default instead of by key, so the order per key is "
        "lost.",
    ),
    Option(
        "onCorrupt",
        "on_corrupt",
        "Action if an entry cannot be read. `fail`: the query ends before the entry. `skip`: "
        "keyshard acknowledges the entry, leaves it out and counts it in `corruptSkipped`. "
        "`transport` `client` refuses `skip`, because pulsar-client skips such entries silently.",
    ),
    Option(
        "onEncrypted",
        "on_encrypted",
        "Action if a message is encrypted. `fail`: the query ends before it with "
        "`KEYSHARD_ENCRYPTED_MESSAGE`. `skip`: keyshard acknowledges its entry, leaves it out and "
        "counts it in `encryptedSkipped`. `transport` `client` refuses `skip`, because its "
        "consumers stall behind encrypted batches.",
    ),
    Option(
        "valueFormat",
        "value_format",
        "`auto`: the fields of the topic's schema are columns; a primitive type is the column "
        "`value`; without a schema, `value` is the bytes. `raw`: `value` is always the bytes. See "
        "[Structured values](#structured-values).",
    ),
    Option(
        "mode",
        "malformed",
        "Action if a value does not fit the schema. `FAILFAST`: the query ends, and the error "
        "names topic, message, field and reason. `PERMISSIVE`: fields that cannot be read are null "
        "(for a JSON object only these fields, otherwise all columns), and column "
        "`_corrupt_record` has the bytes. `DROPMALFORMED`: the row is left out; to find such rows, "
        "keyshard decodes every value. With `valueFormat` `raw`, every value fits.",
    ),
    Option(
        "metadataColumns",
        "metadata_columns",
        f"Further columns, separated by commas: {_METADATA}. They cost nothing unless "
        "you name them, here or in `.schema(...)`. See [Columns](#columns).",
    ),
    Option(
        "windowMaxRows",
        "window_rows_max",
        "Largest number of rows that are received and not committed, over all ranges. By default, "
        "`windowMaxBytes` and the broker's limits on unacknowledged messages are reached first: "
        "keyshard holds at most nine tenths of the broker's 200,000 for each topic partition.",
    ),
    Option("windowMaxBytes", "window_bytes_max", "Largest memory of these rows, bytes."),
    Option(
        "workers",
        "workers",
        "Processes that host the consumers. `embedded`: the driver process of the query. "
        "`processes:4`: four processes on the driver's machine. `spark:4`: four executors, started "
        "with `spark_adapter.start_workers(spark, 4)`; tasks fetch rows from them. `ray:4` or "
        "`ray:4?num_cpus=1`: four actors of a Ray cluster. Packages may add other backends.",
    ),
    Option(
        "workerHost",
        "worker_host",
        "Address of the driver's machine that executors can reach. The default serves local mode "
        "only.",
    ),
    Option(
        "metrics.port",
        "metrics_port",
        "Port on the driver that serves [metrics](metrics.md) of the query for Prometheus, with "
        "`/livez` and `/readyz`. 0 takes a free one, which a warning in the log of the driver "
        "(standard error) names. Default: no server.",
    ),
    Option(
        "metrics.host",
        "metrics_host",
        "Address that this server binds. `0.0.0.0` if other machines must reach it.",
    ),
    Option(
        "ui.port",
        "ui_port",
        "Port on the driver that serves the [page](page.md) of the query. 0 takes a free one, "
        "which a warning in the log of the driver (standard error) names. Needs `keyshard[ui]` on "
        "the driver. Default: no page.",
    ),
    Option(
        "ui.host",
        "ui_host",
        "Address that the page binds. If other machines can reach it, `ui.token` is required.",
    ),
    Option("ui.token", "ui_token", "Token that a browser has to give, at least 16 characters."),
    Option(
        "telemetry",
        "telemetry",
        "Whether each micro-batch is a [span of OpenTelemetry](operating.md#traces-with-"
        "opentelemetry), made in the stream process on the driver. Needs `keyshard[otel]` there.",
    ),
    Option(
        "subscribeTimeoutMillis",
        "subscribe_timeout_ms",
        "Longest wait for ranges that another client still holds, such as a crashed run.",
    ),
    Option(
        "operationTimeoutMillis",
        "operation_timeout_ms",
        "Longest time of a request, and of connecting at a restart. A first start gives up in 5 s.",
    ),
    Option("replayTimeoutMillis", "replay_timeout_ms", "Longest time to replay a planned batch."),
    Option(
        "availableNowTimeoutMillis",
        "available_now_timeout_ms",
        "With `trigger(availableNow=True)`: longest wait for a row, or for the proof that no more "
        "rows come.",
    ),
    Option(
        "settleAfterMillis",
        "settle_after_ms",
        "If the broker reports an entry as acknowledged that this query never received: the time "
        "after which keyshard resolves this ack gap. Needs `admin.url`.",
    ),
    Option(
        "maxCheckpointBytes",
        "checkpoint_bytes_max",
        "Size of a checkpoint, bytes, at which entries after ack gaps wait until missing ones "
        "come. Slow ranges and delayed messages make gaps: about one bit for each entry from the "
        "first gap to the last.",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        "`true`: the query fails if entries of a planned batch are no longer stored, if entries "
        "were deleted after the subscription was deleted, or if another client acknowledged "
        "entries that no batch contains. `false`: it logs a warning, counts them in `entriesLost`, "
        "and continues.",
    ),
)

OF_BATCHES_TOO = frozenset({
    "service.url", "admin.url", "topic", "topics", "topicsPattern", "transport",
    "startingOffsets", "startingTime", "operationTimeoutMillis", "failOnDataLoss", "valueFormat",
    "mode", "metadataColumns",
})  # fmt: skip
"""Options above that a batch read also has, besides :data:`CONNECTION_OPTIONS`."""
_OFFSETS = (
    "`earliest`, `latest`, or JSON with a position for each topic partition: "
    '`{"orders-partition-0": "7:120", "orders-partition-1": "8:3:17"}`. A position is '
    "`ledger:entry`, `ledger:entry:index`, or one of the two words. "
)
BATCH_OPTIONS = (
    Option(
        "startingOffsets",
        "start",
        f"First message that is read: {_OFFSETS}Default `earliest`.",
    ),
    Option(
        "endingOffsets",
        "end",
        f"First message that is not read any more: {_OFFSETS}"
        "Default `latest`: after the messages that are stored when the read is planned, once for "
        "each `load()`.",
    ),
    Option(
        "startingTime",
        "start",
        "Alternative to `startingOffsets`: first publish time, ISO 8601 with its zone "
        "(`2026-11-21T08:00:00+01:00`) or milliseconds since 1970.",
    ),
    Option(
        "endingTime",
        "end",
        "Alternative to `endingOffsets`: first publish time that is not read any more.",
    ),
    Option(
        "maxTimeDisorder",
        "disorder_max_s",
        "How far publish times go back within a topic partition at most, such as `1h`. With it, "
        "keyshard reads only entries that may match the times. Without it, keyshard scans all "
        "stored entries, because publish times are not in the order of entries. If the real "
        "disorder is larger, rows are missing.",
    ),
    Option(
        "minPartitions",
        "partitions_min",
        "Fewest Spark partitions, for any number of topic partitions. They are cut between "
        "entries, with about equal bytes. Default: one for each 32 MiB, and at least one for each "
        "topic partition.",
    ),
    Option(
        "maxRowsPerPartition",
        "rows_max",
        "Largest number of entries of a Spark partition. A producer batch is one entry, so it "
        "counts once.",
    ),
    Option(
        "keys",
        "keys",
        'Only messages with one of these keys, a JSON list: `["k1", "k2"]`. Others are dropped '
        "before columns are built.",
    ),
    Option(
        "ledgerIndex",
        "ledger_index",
        "fsspec URL of a folder, such as `s3://bucket/index`, for an index of closed ledgers. The "
        "first read of a ledger writes the bounds of its times and the hashes of its keys. Later "
        "reads leave out what cannot match their times, `keys`, and pushed filters. See below.",
    ),
    Option(
        "maxBytesInFlight",
        "bytes_in_flight_max",
        "Largest size of the entries that a task receives ahead, 1 MiB to 1 GiB, in bytes. Raise "
        "it for bookies or stores that are far away. Default 33554432 (32 MiB).",
    ),
    Option(
        "segments",
        "segments",
        "Where closed ledgers are read. `broker`: by the broker, the default. `auto`: straight "
        "from bookies, and by the broker what bookies cannot return. `bookies`: as `auto`, but "
        "the read fails if no bookie returns an entry. See below.",
    ),
    Option(
        "offloads",
        "offloads",
        "fsspec URL of the store to which the brokers offload ledgers, such as `s3://bucket`. "
        "Tasks read offloaded ledgers from there, whatever `segments` is. See below.",
    ),
    Option(
        "bookies.map",
        "bookies_map",
        'Addresses of bookies that are not reached under their names, JSON: `{"bookie-0:3181": '
        '"10.0.0.1:3181"}`.',
    ),
    Option(
        "bookies.trustCertsFilePath",
        "bookies_trust_certs_file_path",
        "PEM file of the authorities of bookies. With it, bookies are read over TLS.",
    ),
    Option(
        "bookies.certificateFilePath",
        "bookies_certificate_file_path",
        "PEM file of the client certificate for bookies.",
    ),
    Option(
        "bookies.keyFilePath",
        "bookies_key_file_path",
        "PEM file of its key, without a passphrase.",
    ),
    Option(
        "bookies.hostnameVerification",
        "bookies_hostname_verification",
        "Whether the certificate of a bookie must name the host of its address. Default `true`.",
    ),
    Option(
        "readReports",
        "report_to",
        "Id of a `spark_adapter.ReadReports`, which collects what tasks got from bookies and what "
        "from the broker. See below.",
    ),
    Option(
        "pushFilters",
        "pushes_filters",
        "Whether filters of the query on `__topic`, `__partition`, `__key` (`=`, `IN`) and "
        "`__publishTime` reduce the read. Default `false`. **Use each `load()` for one query "
        "only.** Needs `spark.sql.python.filterPushdown.enabled`; see below.",
    ),
)
"""Options of batch reads: those that only a batch read has, and where it starts."""

SINK_OPTIONS = (
    Option("topic", "topic", "The topic to write to, unless column `__topic` names it."),
    Option(
        "service.url",
        "service_url",
        "URL of the broker. The options `pulsar.client.*` are those of a read.",
    ),
    Option(
        "admin.url",
        "admin_url",
        "URL of the admin REST interface. With it, keyshard checks before the first row that the "
        "broker deduplicates the topic.",
    ),
    Option(
        "valueFormat",
        "value_format",
        "`auto`, `raw`, `json`, `avro` or `protobuf`: encoding of the columns of the value.",
    ),
    Option(
        "registerSchema",
        "register_schema",
        "Whether a schema, made of the columns, is registered for a topic without one.",
    ),
    Option("deliveryGuarantee", "delivery_guarantee", "`exactly-once` or `at-least-once`."),
    Option(
        "sinkId",
        "sink_id",
        "First part of the producer names; the ids of the query (or of the write) and of the Spark "
        "partition follow. A value that you give belongs to one streaming query of a topic.",
    ),
    Option(
        "orderBy",
        "order_by",
        "Columns, separated by commas, that order the rows of each key. Those that are neither "
        "message columns nor fields of the schema are not written.",
    ),
    Option("compression", "compression", "`none`, `lz4`, `zlib`, `zstd` or `snappy`."),
    Option("entryMaxMessages", "entry_messages_max", "Largest number of messages of an entry."),
    Option("entryMaxBytes", "entry_bytes_max", "Largest entry before compression, bytes."),
    Option(
        "maxPendingBytes",
        "pending_bytes_max",
        "Largest size of the unconfirmed messages of a task, bytes.",
    ),
    Option(
        "sendTimeoutMillis",
        "send_timeout_ms",
        "Longest time until a message is confirmed, milliseconds.",
    ),
    Option("hashingScheme", "hashing_scheme", "Choice of the topic partition of a key."),
    Option(
        "staging",
        "staging",
        "fsspec URL of a folder where the rows of a batch are kept before they are published, so "
        "that a repeated batch may have other rows.",
    ),
    Option(
        "writeReports",
        "report_to",
        "Id of a `spark_adapter.WriteReports`, which collects the counts of each batch.",
    ),
)
"""Options of a write, besides :data:`CONNECTION_OPTIONS`."""

CLIENT = "pulsar.client."
"""Prefix of the options that Pulsar's Java client also has."""
CONNECTION_OPTIONS = (
    Option(
        "authPluginClassName",
        "authentication",
        "Authentication: `token`, `tls`, `oauth2` or `basic`, or the Java class name.",
    ),
    Option(
        "authParams",
        "authentication",
        "Parameters of the authentication. token: `file:///path` (read again at every connection, "
        "so you can renew it), `env:NAME` or `token:...`. oauth2: JSON with `issuerUrl`, "
        "`privateKey` (a file with `client_id` and `client_secret`), `audience`, `scope`. basic: "
        "JSON with `userId`, `password`. tls: `tlsCertFile:/path,tlsKeyFile:/path`.",
    ),
    Option(
        "tlsTrustCertsFilePath",
        "tls_trust_certs_file_path",
        "PEM file of the trusted authorities. Default: those of the package certifi.",
    ),
    Option(
        "tlsCertificateFilePath",
        "tls_certificate_file_path",
        "PEM file of the client certificate. Without other authentication, the certificate "
        "identifies the query.",
    ),
    Option("tlsKeyFilePath", "tls_key_file_path", "PEM file of its key, without a passphrase."),
    Option(
        "tlsHostnameVerificationEnable",
        "tls_hostname_verification",
        "Whether the certificate must match the host in the URL. The Java client's default is "
        "`false`.",
    ),
    Option(
        "listenerName",
        "listener_name",
        "Name of the advertised listener to use (`advertisedListeners` of the broker).",
    ),
    Option(
        "connectionTimeoutMs",
        "connection_timeout_ms",
        "Longest time to establish a connection, milliseconds.",
    ),
)
"""Options of the connection; each name follows the prefix :data:`CLIENT`."""
