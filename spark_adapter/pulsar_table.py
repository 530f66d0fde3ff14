"""The options of the JVM connector, and what becomes of each: one table, also of the docs.

They are those of streamnative/pulsar-spark for reading, and the settings of Pulsar's Java client
that it passes on by their prefix. ``docs/migrating.md`` is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple


class Verdict(str, Enum):
    """How an option compares."""

    EQUAL = "equal"
    BETTER = "better"
    DIFFERENT = "different"
    NOT_NEEDED = "not needed"
    """Taken, and nothing comes of it: there is nothing here that it could change."""
    REFUSED = "refused"
    """An error, which says the meaning."""


class JvmOption(NamedTuple):
    """One option of the JVM connector."""

    name: str
    verdict: Verdict
    meaning: str
    """What becomes of it; of a refused one, what to do instead."""
    harmless: str = ""
    """A value of a refused one that asks for nothing."""
    of_streams: bool = False
    """Whether a batch read has no use for it, there as here."""


def _alike(
    prefix: str, names: Iterable[str], verdict: Verdict, meaning: str, harmless: str = ""
) -> Iterator[JvmOption]:
    return (JvmOption(prefix + name, verdict, meaning, harmless) for name in names)


CLIENT, ADMIN, READER, PRODUCER = "pulsar.client.", "pulsar.admin.", "pulsar.reader.", (
    "pulsar.producer."
)  # fmt: skip
_GENERAL = (
    JvmOption("service.url", Verdict.EQUAL, "Where the broker is."),
    JvmOption(
        "admin.url",
        Verdict.DIFFERENT,
        "There for `maxBytesPerTrigger` alone, which does without it here. Here needed for a batch "
        "read, `topicsPattern`, and a stream that begins at positions or a time.",
    ),
    JvmOption("topic", Verdict.EQUAL, "One topic, or one partition of it."),
    JvmOption("topics", Verdict.EQUAL, "Several topics, separated by commas."),
    JvmOption(
        "topicsPattern",
        Verdict.DIFFERENT,
        "The whole name, as there; but a Python regular expression, with tenant and namespace as "
        "plain names. System topics, dead-letter topics and non-persistent ones never match.",
    ),
    JvmOption(
        "startingOffsets",
        Verdict.DIFFERENT,
        "`earliest`, `latest` and JSON of `JsonUtils.topicOffsets` with byte arrays, for a stream "
        "and a batch read; the message that it names is the first, and of a producer batch all "
        "messages, as there. Every topic partition has to be named (there, those that are not "
        "begin at the default, without a word). A subscription that exists comes before it; there, "
        "each start moves it.",
    ),
    JvmOption(
        "endingOffsets",
        Verdict.EQUAL,
        "`latest` and JSON of byte arrays: the entry of the message that it names is read, as "
        "there. In keyshard's own form, `\"7:120\"`, a position is the first that is not read.",
    ),
    JvmOption(
        "startingTime",
        Verdict.DIFFERENT,
        "Milliseconds of the publish time, or ISO 8601 with a zone; not JSON with one for each "
        "topic. A batch read has exactly the messages from then on; there, the first entry that "
        "the broker finds begins it.",
    ),
    JvmOption(
        "endingTime",
        Verdict.DIFFERENT,
        "The same. A message of just this time is not read any more; there, one more entry is.",
    ),
    JvmOption(
        "predefinedSubscription",
        Verdict.BETTER,
        "The subscription of the stream. It is consumed from and acknowledged on, so its backlog "
        "is what is left to do; there, a cursor that each start resets and each batch seeks.",
        of_streams=True,
    ),
    JvmOption(
        "subscriptionPrefix",
        Verdict.DIFFERENT,
        "Without `predefinedSubscription` the name of the subscription, the same at every start. "
        "There, a topic's name is added, and the subscription is deleted when the query stops, and "
        "with it the claim to what comes meanwhile.",
        of_streams=True,
    ),
    JvmOption(
        "maxBytesPerTrigger",
        Verdict.BETTER,
        "Most payload of a micro-batch, measured as it came, for all topics together. There, an "
        "estimate by the admin interface, split equally over topic partitions. 0 is no limit. "
        "Of a batch read it has no meaning, as there.",
        of_streams=True,
    ),
    JvmOption(
        "failOnDataLoss",
        Verdict.BETTER,
        "`true` unless set, as the JVM connector's README says of its own; its code says `false`. "
        "Data that is gone ends the query with a named case, instead of one line in a log.",
    ),
    JvmOption(
        "allowDifferentTopicSchemas",
        Verdict.EQUAL,
        "`true` is `valueFormat=raw`: `value` is the bytes. Without it, topics whose columns "
        "differ are an error, as there.",
    ),
    JvmOption(
        "pollTimeoutMs",
        Verdict.NOT_NEEDED,
        "There, a message that does not come in time counts as lost. Here nothing is concluded "
        "from silence.",
    ),
    JvmOption(
        "waitingForNonExistedTopic",
        Verdict.REFUSED,
        "keyshard does not wait for a topic that is not there: create it before the query starts, "
        "or start the query again when it is there",
        harmless="false",
    ),
    JvmOption(
        "topic.schema.class", Verdict.NOT_NEEDED, "Nothing comes of it there either."
    ),
)  # fmt: skip
_CONNECTION = (
    *_alike(
        CLIENT,
        ("authPluginClassName", "authParams", "tlsTrustCertsFilePath", "tlsCertificateFilePath",
         "tlsKeyFilePath", "listenerName", "operationTimeoutMs", "connectionTimeoutMs"),
        Verdict.EQUAL,
        "See [connections](options.md#connections).",
    ),
    JvmOption(
        CLIENT + "tlsHostnameVerificationEnable",
        Verdict.BETTER,
        "`true` unless set; there `false`, which believes anybody with a certificate.",
    ),
    *_alike(
        CLIENT,
        ("serviceUrl", "useTls", "tlsAllowInsecureConnection", "useKeyStoreTls", "tlsKeyStorePath",
         "tlsKeyStorePassword", "tlsTrustStorePath", "tlsTrustStorePassword", "proxyServiceUrl",
         "proxyProtocol", "memoryLimitBytes"),
        Verdict.DIFFERENT,
        "An error that says what to write instead.",
        harmless="false",
    ),
    *_alike(
        CLIENT,
        ("tlsKeyStoreType", "tlsTrustStoreType", "statsIntervalSeconds", "numIoThreads",
         "numListenerThreads", "connectionsPerBroker", "connectionMaxIdleSeconds", "useTcpNoDelay",
         "concurrentLookupRequest", "maxLookupRequest", "maxLookupRedirects",
         "maxNumberOfRejectedRequestPerConnection", "keepAliveIntervalSeconds",
         "autoCertRefreshSeconds", "initialBackoffIntervalNanos", "maxBackoffIntervalNanos",
         "enableBusyWait", "enableTransaction", "description"),
        Verdict.NOT_NEEDED,
        "Tunes the Java client, of which there is none. Rows are the same.",
    ),
    *_alike(
        CLIENT,
        ("lookupTimeoutMs", "requestTimeoutMs", "readTimeoutMs"),
        Verdict.REFUSED,
        "one limit holds for all requests: use operationTimeoutMillis",
    ),
    *_alike(CLIENT, ("authParamMap",), Verdict.REFUSED, "use pulsar.client.authParams"),
    *_alike(
        CLIENT,
        ("tlsCiphers", "tlsProtocols", "sslProvider", "sslFactoryPlugin", "sslFactoryPluginParams"),
        Verdict.REFUSED,
        "what TLS is spoken with says the OpenSSL of the machine",
    ),
    *_alike(
        CLIENT,
        ("dnsLookupBindAddress", "dnsLookupBindPort", "dnsServerAddresses", "socks5ProxyAddress",
         "socks5ProxyUsername", "socks5ProxyPassword"),
        Verdict.REFUSED,
        "keyshard connects by the network of the machine: set it there",
    ),
    *_alike(
        CLIENT,
        ("originalPrincipal", "lookupProperties"),
        Verdict.REFUSED,
        "keyshard tells brokers nothing of the kind",
    ),
)  # fmt: skip
_READERS = (
    *_alike(
        READER,
        ("receiverQueueSize", "readerName", "subscriptionName", "subscriptionRolePrefix",
         "poolMessages", "autoUpdatePartitions", "autoUpdatePartitionsIntervalSeconds"),
        Verdict.NOT_NEEDED,
        "Names and tunes the Readers of the Java client, of which there are none. Rows are the "
        "same.",
    ),
    *_alike(
        READER,
        ("topicNames", "startMessageId", "startMessageFromRollbackDurationInSec",
         "subscriptionInitialPosition"),
        Verdict.REFUSED,
        "what is read say topic, startingOffsets and startingTime",
    ),
    JvmOption(
        READER + "resetIncludeHead",
        Verdict.REFUSED,
        "the message that startingOffsets names is read: name the one behind it",
        harmless="true",
    ),
    *_alike(
        READER,
        ("subscriptionMode",),
        Verdict.REFUSED,
        "a batch read leaves no cursor behind, and a stream has a subscription",
    ),
    *_alike(
        READER,
        ("readCompacted",),
        Verdict.REFUSED,
        "keyshard reads every message: keep the newest of each __key in the query",
        harmless="false",
    ),
    *_alike(
        READER,
        ("keyHashRanges",),
        Verdict.REFUSED,
        "filter the rows, or give a batch read the option keys",
    ),
    *_alike(
        READER,
        ("readerListener", "readerInterceptorList"),
        Verdict.REFUSED,
        "there is no Java here to call: do it in the query",
    ),
    *_alike(
        READER,
        ("cryptoKeyReader", "cryptoFailureAction", "messageCrypto"),
        Verdict.REFUSED,
        "keyshard reads no encrypted messages",
    ),
    *_alike(
        READER,
        ("maxPendingChunkedMessage", "autoAckOldestChunkedMessageOnQueueFull",
         "expireTimeOfIncompleteChunkedMessageMillis"),
        Verdict.REFUSED,
        "keyshard reads no chunked messages",
    ),
)  # fmt: skip
JVM_OPTIONS = (*_GENERAL, *_CONNECTION, *_READERS)
PREFIXES = (
    JvmOption(
        ADMIN + "*",
        Verdict.DIFFERENT,
        "One connection holds for the broker and its admin interface: what is given here has to be "
        "given as `pulsar.client.*` as well, with the same value.",
    ),
    JvmOption(
        PRODUCER + "*", Verdict.NOT_NEEDED, "Of writing; without meaning for a read, as there."
    ),
)


def jvm_options_table() -> str:
    """The table of ``docs/migrating.md``, in Markdown; what has one meaning is one row."""
    rows: dict[tuple[Verdict, str], list[str]] = {}
    for option in (*JVM_OPTIONS, *PREFIXES):
        name = f"`{option.name}`"
        if option.harmless:
            name += f" (other than `{option.harmless}`)"
        meaning = option.meaning
        if option.verdict is Verdict.REFUSED:
            meaning = f"{meaning[0].upper()}{meaning[1:]}."
        rows.setdefault((option.verdict, meaning), []).append(name)
    lines = ["| option | here | |", "|---|---|---|"]
    lines += [
        f"| {', '.join(names)} | {verdict.value} | {meaning} |"
        for (verdict, meaning), names in rows.items()
    ]
    return "\n".join(lines)
