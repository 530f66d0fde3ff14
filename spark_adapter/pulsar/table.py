"""The options of the JVM connector, and how keyshard treats each.

The table has the read options of streamnative/pulsar-spark, and the settings of Pulsar's Java
client that it passes on by prefix. ``docs/migrating.md`` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from spark_adapter.pulsar import values


class Treatment(str, Enum):
    """How keyshard treats an option, compared with the JVM connector."""

    EQUAL = "equal"
    BETTER = "better"
    DIFFERENT = "different"
    NOT_NEEDED = "not needed"
    """Accepted without effect: keyshard has nothing that the option could change."""
    REFUSED = "refused"
    """An error with the meaning as its text."""


Convert = Callable[[str, str], tuple[str, str | None]]
"""Converts the name and the text of an option; see :mod:`spark_adapter.pulsar.values`."""


class JvmOption(NamedTuple):
    """One option of the JVM connector."""

    name: str
    treatment: Treatment
    meaning: str
    """Sentences: the meaning in keyshard; for a refused option, the alternative."""
    harmless: str = ""
    """A value of a refused option that is accepted, because it requests nothing."""
    of_streams: bool = False
    """Whether batch reads ignore the option, in both."""
    convert: Convert | None = None
    """Converts the option; ``None``: name and value are those of keyshard."""


def _alike(
    prefix: str, names: Iterable[str], treatment: Treatment, meaning: str, harmless: str = ""
) -> Iterator[JvmOption]:
    return (JvmOption(prefix + name, treatment, meaning, harmless) for name in names)


CLIENT, ADMIN, READER, PRODUCER = "pulsar.client.", "pulsar.admin.", "pulsar.reader.", (
    "pulsar.producer."
)  # fmt: skip
_GENERAL = (
    JvmOption("service.url", Treatment.EQUAL, "URL of the broker."),
    JvmOption(
        "admin.url",
        Treatment.DIFFERENT,
        "keyshard needs it for batch reads, for `topicsPattern`, and to start a stream at "
        "positions or a time. The JVM connector needs it for `maxBytesPerTrigger` only.",
    ),
    JvmOption("topic", Treatment.EQUAL, "One topic, or one partition of it."),
    JvmOption("topics", Treatment.EQUAL, "Several topics, separated by commas."),
    JvmOption(
        "topicsPattern",
        Treatment.DIFFERENT,
        "Both match the whole name. keyshard reads a Python regular expression, with tenant and "
        "namespace as plain names. System topics, dead-letter topics and non-persistent topics "
        "never match. With `topic://`, it matches scalable topics instead of persistent ones.",
    ),
    JvmOption(
        "startingOffsets",
        Treatment.DIFFERENT,
        "`earliest`, `latest`, or JSON with byte arrays of `JsonUtils.topicOffsets`. Both "
        "connectors start with the named message, or with the whole producer batch that contains "
        "it. keyshard requires a position for every topic partition; the JVM connector uses the "
        "default for missing ones. An existing subscription takes precedence in keyshard; the JVM "
        "connector moves it at each start.",
        convert=values.starting,
    ),
    JvmOption(
        "endingOffsets",
        Treatment.EQUAL,
        "`latest`, or JSON with byte arrays. The entry of the named message is read. If you write "
        "a position in keyshard's own form, `\"7:120\"`, the read ends before it.",
        convert=values.ending,
    ),
    JvmOption(
        "startingTime",
        Treatment.DIFFERENT,
        "A publish time: milliseconds, or ISO 8601 with a zone. JSON with a time for each topic "
        "is an error. A batch read starts exactly at this time; the JVM connector starts at the "
        "entry that the broker finds.",
        convert=values.time,
    ),
    JvmOption(
        "endingTime",
        Treatment.DIFFERENT,
        "The same forms. The end is exclusive; the JVM connector reads one more entry.",
        convert=values.time,
    ),
    JvmOption(
        "predefinedSubscription",
        Treatment.BETTER,
        "Subscription of the stream. keyshard consumes and acknowledges on it, so its backlog is "
        "the unprocessed rest. The JVM connector only moves its cursor.",
        of_streams=True,
    ),
    JvmOption(
        "subscriptionPrefix",
        Treatment.DIFFERENT,
        "Without `predefinedSubscription`, the name of the subscription, the same at every start. "
        "The JVM connector appends a topic name, and deletes the subscription when the query "
        "stops.",
        of_streams=True,
    ),
    JvmOption(
        "maxBytesPerTrigger",
        Treatment.BETTER,
        "Most payload bytes of a micro-batch, measured over all topics. The JVM connector "
        "estimates them and divides them equally among topic partitions. 0 means no limit. Batch "
        "reads ignore the option.",
        of_streams=True,
        convert=values.limit,
    ),
    JvmOption(
        "failOnDataLoss",
        Treatment.BETTER,
        "Default `true`; the JVM connector's default is `false`. If data is missing, the query "
        "ends with an error that names the case; the JVM connector logs a line.",
    ),
    JvmOption(
        "allowDifferentTopicSchemas",
        Treatment.EQUAL,
        "`true` means `valueFormat=raw`: `value` is the bytes. With `false`, topics with "
        "different columns are an error.",
        convert=values.schemas,
    ),
    JvmOption(
        "pollTimeoutMs",
        Treatment.NOT_NEEDED,
        "The JVM connector counts a message as lost after this time. keyshard waits until it is "
        "proved that a message is missing.",
    ),
    JvmOption(
        "waitingForNonExistedTopic",
        Treatment.REFUSED,
        "keyshard does not wait for a missing topic. Create the topic before the query starts.",
        harmless="false",
    ),
    JvmOption(
        "topic.schema.class", Treatment.NOT_NEEDED, "The JVM connector does not use it either."
    ),
)  # fmt: skip
_CONNECTION = (
    *_alike(
        CLIENT,
        ("authPluginClassName", "authParams", "tlsTrustCertsFilePath", "tlsCertificateFilePath",
         "tlsKeyFilePath", "listenerName", "operationTimeoutMs", "connectionTimeoutMs"),
        Treatment.EQUAL,
        "See [connections](options.md#connections).",
    ),
    JvmOption(
        CLIENT + "tlsHostnameVerificationEnable",
        Treatment.BETTER,
        "Default `true`; the JVM connector's default is `false`, which accepts the certificate of "
        "any host.",
    ),
    *_alike(CLIENT, ("serviceUrl",), Treatment.EQUAL, "Give either this or `service.url`."),
    *_alike(
        CLIENT,
        ("useTls",),
        Treatment.REFUSED,
        "The URL decides: use `pulsar+ssl://` in `service.url`.",
        harmless="false",
    ),
    *_alike(
        CLIENT,
        ("tlsAllowInsecureConnection",),
        Treatment.REFUSED,
        "Name the authority of the certificate in `pulsar.client.tlsTrustCertsFilePath`.",
        harmless="false",
    ),
    *_alike(
        CLIENT,
        ("useKeyStoreTls",),
        Treatment.REFUSED,
        "keyshard reads PEM files: use `tlsTrustCertsFilePath`, `tlsCertificateFilePath` and "
        "`tlsKeyFilePath`.",
        harmless="false",
    ),
    *_alike(
        CLIENT,
        ("tlsKeyStorePath", "tlsKeyStorePassword", "tlsTrustStorePath", "tlsTrustStorePassword"),
        Treatment.REFUSED,
        "keyshard reads PEM files: use `tlsTrustCertsFilePath`, `tlsCertificateFilePath` and "
        "`tlsKeyFilePath`.",
    ),
    *_alike(
        CLIENT,
        ("proxyServiceUrl", "proxyProtocol"),
        Treatment.REFUSED,
        "keyshard does not connect through SNI proxies. Use the URL of a Pulsar proxy or broker.",
    ),
    *_alike(
        CLIENT,
        ("memoryLimitBytes",),
        Treatment.REFUSED,
        "Use `windowMaxBytes`, which limits the received messages.",
    ),
    *_alike(
        CLIENT,
        ("tlsKeyStoreType", "tlsTrustStoreType", "statsIntervalSeconds", "numIoThreads",
         "numListenerThreads", "connectionsPerBroker", "connectionMaxIdleSeconds", "useTcpNoDelay",
         "concurrentLookupRequest", "maxLookupRequest", "maxLookupRedirects",
         "maxNumberOfRejectedRequestPerConnection", "keepAliveIntervalSeconds",
         "autoCertRefreshSeconds", "initialBackoffIntervalNanos", "maxBackoffIntervalNanos",
         "enableBusyWait", "enableTransaction", "description"),
        Treatment.NOT_NEEDED,
        "Tunes the Java client, which keyshard does not use. The rows are the same.",
    ),
    *_alike(
        CLIENT,
        ("lookupTimeoutMs", "requestTimeoutMs", "readTimeoutMs"),
        Treatment.REFUSED,
        "Use `operationTimeoutMillis`, which limits every request.",
    ),
    *_alike(CLIENT, ("authParamMap",), Treatment.REFUSED, "Use `pulsar.client.authParams`."),
    *_alike(
        CLIENT,
        ("tlsCiphers", "tlsProtocols", "sslProvider", "sslFactoryPlugin", "sslFactoryPluginParams"),
        Treatment.REFUSED,
        "Ciphers and protocols come from the system OpenSSL. Configure them there.",
    ),
    *_alike(
        CLIENT,
        ("dnsLookupBindAddress", "dnsLookupBindPort", "dnsServerAddresses", "socks5ProxyAddress",
         "socks5ProxyUsername", "socks5ProxyPassword"),
        Treatment.REFUSED,
        "keyshard uses the network settings of the machine. Configure DNS and proxies there.",
    ),
    *_alike(
        CLIENT,
        ("originalPrincipal", "lookupProperties"),
        Treatment.REFUSED,
        "keyshard sends no such property to brokers. Remove the option.",
    ),
)  # fmt: skip
_READERS = (
    *_alike(
        READER,
        ("receiverQueueSize", "readerName", "subscriptionName", "subscriptionRolePrefix",
         "poolMessages", "autoUpdatePartitions", "autoUpdatePartitionsIntervalSeconds"),
        Treatment.NOT_NEEDED,
        "Tunes the Readers of the Java client, which keyshard does not use. The rows are the same.",
    ),
    *_alike(
        READER,
        ("topicNames", "startMessageId", "startMessageFromRollbackDurationInSec",
         "subscriptionInitialPosition"),
        Treatment.REFUSED,
        "Use `topic`, `startingOffsets` or `startingTime`.",
    ),
    JvmOption(
        READER + "resetIncludeHead",
        Treatment.REFUSED,
        "The message that `startingOffsets` names is read. To exclude it, name the next one.",
        harmless="true",
    ),
    *_alike(
        READER,
        ("subscriptionMode",),
        Treatment.REFUSED,
        "A batch read leaves no cursor, and a stream has a durable subscription. Remove the "
        "option.",
    ),
    *_alike(
        READER,
        ("readCompacted",),
        Treatment.REFUSED,
        "keyshard reads every message. Select the newest message of each `__key` in the query.",
        harmless="false",
    ),
    *_alike(
        READER,
        ("keyHashRanges",),
        Treatment.REFUSED,
        "Filter the rows, or use the option `keys` of a batch read.",
    ),
    *_alike(
        READER,
        ("readerListener", "readerInterceptorList"),
        Treatment.REFUSED,
        "keyshard runs no Java callbacks. Do the same in the query.",
    ),
    *_alike(
        READER,
        ("cryptoKeyReader", "cryptoFailureAction", "messageCrypto"),
        Treatment.REFUSED,
        "keyshard does not decrypt messages. Read such topics with another client.",
    ),
    *_alike(
        READER,
        ("maxPendingChunkedMessage", "autoAckOldestChunkedMessageOnQueueFull",
         "expireTimeOfIncompleteChunkedMessageMillis"),
        Treatment.REFUSED,
        "keyshard does not read chunked messages. Read such topics with another client.",
    ),
)  # fmt: skip
PRODUCER_OPTIONS = (
    JvmOption(PRODUCER + "producerName", Treatment.DIFFERENT,
              "The option `sinkId`: the first part of the names of producers.",
              convert=values.as_option("sinkId")),
    JvmOption(PRODUCER + "sendTimeoutMs", Treatment.EQUAL, "The option `sendTimeoutMillis`.",
              convert=values.as_option("sendTimeoutMillis")),
    JvmOption(PRODUCER + "compressionType", Treatment.EQUAL,
              "The option `compression`. keyshard's default is `LZ4`, the JVM connector's `NONE`.",
              convert=values.as_option("compression", lower=True)),
    JvmOption(PRODUCER + "batchingMaxMessages", Treatment.BETTER,
              "The option `entryMaxMessages`. The JVM connector ignores it.",
              convert=values.as_option("entryMaxMessages")),
    JvmOption(PRODUCER + "batchingMaxBytes", Treatment.EQUAL, "The option `entryMaxBytes`.",
              convert=values.as_option("entryMaxBytes")),
    JvmOption(PRODUCER + "batchingEnabled", Treatment.EQUAL,
              "`false`: an entry for each message.", convert=values.batching),
    JvmOption(PRODUCER + "hashingScheme", Treatment.EQUAL,
              "`JavaStringHash` or `Murmur3_32Hash`: the option `hashingScheme`.",
              convert=values.hashing),
    *_alike(PRODUCER, ("accessMode",), Treatment.REFUSED,
            "Several tasks publish to a topic. Remove the option.", harmless="shared"),
    *_alike(PRODUCER, ("chunkingEnabled",), Treatment.REFUSED,
            "keyshard refuses messages that are too large. Make them smaller.", harmless="false"),
    *_alike(PRODUCER, ("topicName",), Treatment.REFUSED, "Use `topic`, or the column `__topic`."),
    *_alike(PRODUCER, ("initialSequenceId",), Treatment.REFUSED,
            "keyshard numbers the rows, to store each once. Remove the option."),
    *_alike(PRODUCER, ("properties", "initialSubscriptionName"), Treatment.REFUSED,
            "keyshard sets no such property of a producer. Remove the option."),
    *_alike(PRODUCER, ("messageRoutingMode", "customMessageRouter"), Treatment.REFUSED,
            "Keys choose the topic partition; rows without a key are spread. Remove the option.",
            harmless="roundrobinpartition"),
    *_alike(PRODUCER, ("encryptionKeys", "cryptoKeyReader", "cryptoFailureAction", "messageCrypto"),
            Treatment.REFUSED,
            "keyshard does not encrypt messages. Write such topics with another client."),
    *_alike(PRODUCER,
            ("blockIfQueueFull", "maxPendingMessages", "maxPendingMessagesAcrossPartitions",
             "batchingMaxPublishDelayMicros", "batchingPartitionSwitchFrequencyByPublishDelay",
             "batcherBuilder", "chunkMaxMessageSize", "multiSchema", "autoUpdatePartitions",
             "autoUpdatePartitionsIntervalSeconds", "lazyStartPartitionedProducers",
             "isNonPartitionedTopicExpected"),
            Treatment.NOT_NEEDED,
            "Tunes the producers of the Java client, which keyshard does not use. Use "
            "`maxPendingBytes` for the memory of a task."),
)  # fmt: skip
"""Options of a write. Reads ignore them."""
JVM_OPTIONS = (*_GENERAL, *_CONNECTION, *_READERS)
PREFIXES = (
    JvmOption(
        ADMIN + "*",
        Treatment.DIFFERENT,
        "keyshard has one connection for the broker and its admin interface. Give each such "
        "option as `pulsar.client.*` as well, with the same value.",
    ),
    JvmOption(
        PRODUCER + "*", Treatment.NOT_NEEDED, "For writing; both connectors ignore it in reads."
    ),
)


def jvm_options_table() -> str:
    """Return the table of reads in ``docs/migrating.md``, in Markdown."""
    return _table((*JVM_OPTIONS, *PREFIXES))


def jvm_producer_table() -> str:
    """Return the table of writes in ``docs/migrating.md``, in Markdown."""
    return _table(PRODUCER_OPTIONS)


def _table(options: Iterable[JvmOption]) -> str:
    """Return a table in Markdown. Options with the same description share a row."""
    rows: dict[tuple[Treatment, str, str], list[str]] = {}
    for option in options:
        row = (option.treatment, option.meaning, option.harmless)
        rows.setdefault(row, []).append(f"`{option.name}`")
    lines = ["| option | in keyshard | meaning |", "|---|---|---|"]
    for (treatment, meaning, harmless), names in rows.items():
        accepted = f", except `{harmless}`" if harmless else ""
        lines.append(f"| {', '.join(names)} | {treatment.value}{accepted} | {meaning} |")
    return "\n".join(lines)
