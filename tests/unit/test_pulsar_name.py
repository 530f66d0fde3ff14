"""Options of format("pulsar"): those of the JVM connector, translated, refused, and in the docs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from keyshard.config.connection_names import NAMES
from keyshard.core.position.serialized_id import SerializedId
from keyshard.errors import ConfigError, KeyShardError
from spark_adapter.option_parsing import parse_bounded, parse_options
from spark_adapter.pulsar.options import seems_stream, translated
from spark_adapter.pulsar.source import PulsarDataSource
from spark_adapter.pulsar.table import (
    JVM_OPTIONS,
    PREFIXES,
    PRODUCER_OPTIONS,
    Treatment,
    jvm_options_table,
    jvm_producer_table,
)
from spark_adapter.pulsar.writing import columns_of, translated_write, write_of

BASE = {"service.url": "pulsar://broker:6650", "admin.url": "http://broker:8080", "topic": "t"}
VALUE_COLUMN = StructType([StructField("value", BinaryType())])
FIRST = "persistent://public/default/t-partition-0"


def words(text: str) -> list[str]:
    return text.split()


README = words("""
    service.url admin.url maxBytesPerTrigger predefinedSubscription subscriptionPrefix topic
    topics topicsPattern pollTimeoutMs waitingForNonExistedTopic startingOffsets endingOffsets
    startingTime endingTime failOnDataLoss allowDifferentTopicSchemas pulsar.admin.*
    pulsar.producer.*
""")
"""Options of the connector's README (59066fc), and public names of its code."""
CLIENT_FIELDS = words("""
    serviceUrl authPluginClassName authParams authParamMap originalPrincipal operationTimeoutMs
    lookupTimeoutMs statsIntervalSeconds numIoThreads numListenerThreads connectionsPerBroker
    connectionMaxIdleSeconds useTcpNoDelay useTls tlsKeyFilePath tlsCertificateFilePath
    tlsTrustCertsFilePath tlsAllowInsecureConnection tlsHostnameVerificationEnable
    sslFactoryPlugin sslFactoryPluginParams concurrentLookupRequest maxLookupRequest
    maxLookupRedirects maxNumberOfRejectedRequestPerConnection keepAliveIntervalSeconds
    connectionTimeoutMs requestTimeoutMs readTimeoutMs autoCertRefreshSeconds
    initialBackoffIntervalNanos maxBackoffIntervalNanos enableBusyWait listenerName
    useKeyStoreTls sslProvider tlsKeyStoreType tlsKeyStorePath tlsKeyStorePassword
    tlsTrustStoreType tlsTrustStorePath tlsTrustStorePassword tlsCiphers tlsProtocols
    memoryLimitBytes proxyServiceUrl proxyProtocol enableTransaction dnsLookupBindAddress
    dnsLookupBindPort dnsServerAddresses socks5ProxyAddress socks5ProxyUsername
    socks5ProxyPassword description lookupProperties
""")
"""ClientConfigurationData of Java client 4.0.8, without @JsonIgnore fields."""
READER_FIELDS = words("""
    topicNames startMessageId startMessageFromRollbackDurationInSec receiverQueueSize
    readerListener readerName subscriptionRolePrefix subscriptionName cryptoKeyReader
    cryptoFailureAction messageCrypto readCompacted resetIncludeHead keyHashRanges poolMessages
    autoUpdatePartitions autoUpdatePartitionsIntervalSeconds readerInterceptorList
    maxPendingChunkedMessage autoAckOldestChunkedMessageOnQueueFull
    expireTimeOfIncompleteChunkedMessageMillis subscriptionMode subscriptionInitialPosition
""")
"""ReaderConfigurationData of the same."""


def stream(**options: str) -> dict[str, str]:
    return translated(
        {**BASE, "predefinedSubscription": "s", **_dotted(options)}, stream=True
    ).options


def batch(**options: str) -> dict[str, str]:
    return translated({**BASE, **_dotted(options)}, stream=False).options


def write_options(options: dict[str, str]) -> dict[str, str]:
    return translated_write(options).options


def _dotted(options: dict[str, str]) -> dict[str, str]:
    return {name.replace("__", "."): text for name, text in options.items()}


def refused(*, to_batch: bool = False, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        (batch if to_batch else stream)(**options)
    return caught.value.message


def java(ledger: int, entry: int, *more: int) -> list[int]:
    """Signed bytes, as JSON has them."""
    return [
        one - 256 if one > 127 else one for one in SerializedId(ledger, entry, *more).to_bytes()
    ]


def test_every_option_of_the_jvm_connector_is_taken_or_refused_by_name() -> None:
    names = [option.name for option in (*JVM_OPTIONS, *PREFIXES)]
    wanted = [*README, "topic.schema.class"]
    wanted += [f"pulsar.client.{name}" for name in CLIENT_FIELDS]
    wanted += [f"pulsar.reader.{name}" for name in READER_FIELDS]
    assert sorted(names) == sorted(wanted)
    for option in JVM_OPTIONS:
        plain = translated({**BASE, "predefinedSubscription": "s"}, stream=True).options
        if option.treatment is Treatment.REFUSED:
            sentence = refused(to_batch=False, **{option.name: "17"})
            assert f"'{option.name}' is not supported. " in sentence
            assert option.meaning in sentence
            if option.harmless:
                assert stream(**{option.name: option.harmless}) == plain
        elif option.treatment is Treatment.NOT_NEEDED:
            assert stream(**{option.name: "17"}) == plain
            assert batch(**{option.name.lower(): "17"}) == BASE
        elif option.name.startswith("pulsar.client."):
            assert stream(**{option.name: "17"})[option.name] == "17"


def test_the_docs_contain_the_table_as_it_is_now() -> None:
    docs = Path(__file__).parents[2] / "docs" / "migrating.md"
    assert jvm_options_table() in docs.read_text()
    assert jvm_producer_table() in docs.read_text()


def test_an_existing_stream_becomes_one_of_keyshard() -> None:
    source = parse_options(
        stream(
            topic="t", startingOffsets="Earliest", maxBytesPerTrigger="1000", pollTimeoutMs="6000",
            failOnDataLoss="true", allowDifferentTopicSchemas="true", parallelism="7",
            pulsar__client__authPluginClassName="org.apache.pulsar.client.impl.auth.AuthenticationToken",
            pulsar__client__authParams="token:a.b.c", pulsar__reader__receiverQueueSize="5",
            pulsar__admin__authParams="token:a.b.c", pulsar__producer__blockIfQueueFull="true",
        )
    )  # fmt: skip
    assert source.topics == ("persistent://public/default/t",)
    assert (source.subscription, source.parallelism) == ("s", 7)
    assert (source.starting_position, source.batch_bytes_max) == ("earliest", 1000)
    assert source.value_format == "raw"
    assert source.fail_on_data_loss
    assert NAMES["authParams"] == "authentication"
    assert source.how_to_connect().authentication is not None
    assert parse_options(stream(maxBytesPerTrigger="0")).batch_bytes_max is None


def test_a_batch_read_accepts_options_of_streams_like_the_jvm_connector() -> None:
    shared = {"predefinedSubscription": "s", "subscriptionPrefix": "p", "maxBytesPerTrigger": "5"}
    assert batch(**shared) == BASE
    assert not seems_stream(shared)
    assert seems_stream({"PARALLELISM": "3"})


@pytest.mark.parametrize(
    "call", [lambda source: source.schema(), lambda source: source.reader(VALUE_COLUMN)]
)
def test_filters_that_would_not_be_pushed_are_refused(
    call: Callable[[PulsarDataSource], object],
) -> None:
    """Issue: pushFilters was accepted, and Spark still filtered every row."""
    options = {**BASE, "valueFormat": "raw"}
    with pytest.raises(ConfigError, match="'pushFilters' is not supported by format"):
        call(PulsarDataSource({**options, "pushfilters": "true"}))
    call(PulsarDataSource({**options, "pushFilters": "false"}))


def test_the_subscription_is_named_by_its_user() -> None:
    def name(**options: str) -> str:
        return translated({**BASE, **options}, stream=True).options["subscription"]

    assert name(subscriptionPrefix="p") == "p"
    assert name(subscriptionPrefix="p", predefinedSubscription="s") == "s"
    assert name(subscriptionPrefix="p", predefinedSubscription="") == "p"
    assert name(subscription="own") == "own"
    with pytest.raises(ConfigError, match="Option 'predefinedSubscription' is empty"):
        name(predefinedSubscription="")
    assert not translated({**BASE, "subscriptionPrefix": "p"}, stream=True).made_up
    assert not translated(BASE, stream=False).made_up
    one, other = (translated(BASE, stream=True) for _ in range(2))
    assert one.made_up
    assert one.options["subscription"] != other.options["subscription"]
    with pytest.raises(ConfigError, match="'subscription' and 'subscriptionPrefix' are both given"):
        name(subscription="own", subscriptionPrefix="p")


def test_byte_arrays_are_positions_inclusive_at_both_ends() -> None:
    text = json.dumps({
        FIRST: java(7, 120, 0, 3, 10), "t-partition-1": java(300, 70_000, 1),
        "u": java(-1, -1), "v": java(2**63 - 1, 2**63 - 1), "w": "8:3:17", "x": java(9, -1),
    })  # fmt: skip
    starts = json.loads(stream(startingOffsets=text)["startingOffsets"])
    assert starts == {
        FIRST: "7:120", "t-partition-1": "300:70000", "u": "earliest", "v": "latest",
        "w": "8:3:17", "x": "9:0",
    }  # fmt: skip
    ends = json.loads(batch(endingOffsets=text)["endingOffsets"])
    assert [ends[FIRST], ends["t-partition-1"], ends["x"]] == ["7:121", "300:70001", "9:0"]
    assert ends["w"] == "8:3:17", "keyshard's own form stays what it is"
    assert parse_bounded(batch(startingOffsets=text, endingOffsets=text)).end == (
        parse_bounded(BASE | {"endingOffsets": json.dumps(ends)}).end
    )
    readme = '{"topic-1":[8,11,16,101,24,1,32,1],"topic-5":[8,15,16,105,24,5,32,5]}'
    assert "is the id of a message in partition 1" in refused(startingOffsets=readme)
    readme = readme.replace("topic-1", "t-partition-1").replace("topic-5", "t-partition-5")
    assert json.loads(stream(startingOffsets=readme)["startingOffsets"]) == {
        "t-partition-1": "11:101", "t-partition-5": "15:105",
    }  # fmt: skip


@pytest.mark.parametrize(
    "bytes_of_id",
    [[], [8], [8, 1], [300], [1.5], [True, True], ["8"], [-129], [128] * 40, [8] * 5000, {}, [[8]],
     java(-2, 5), java(5, -2), [*java(1, 2), 58, 0]],
)  # fmt: skip
@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_an_invalid_message_id_is_refused_by_name(name: str, bytes_of_id: object) -> None:
    sentence = refused(to_batch=True, **{name: json.dumps({FIRST: bytes_of_id})})
    assert sentence.startswith(f"{name} of '{FIRST}' is ")
    assert "JsonUtils.topicOffsets" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingTime": '{"t": 1709254800000}'}, "Write one time for all topics"),
        ({"startingOffsets": "7:120"}, "a position belongs to one topic partition"),
        ({"startingOffsets": '{"t": [8, 1, 16'}, "which is not JSON"),
        ({"startingOffsets": f'{{"t": {java(7, 1)}, "t": {java(7, 2)}}}'}, "names 't' twice"),
        ({"allowDifferentTopicSchemas": "yes"}, "must be true or false"),
        ({"allowDifferentTopicSchemas": "true", "valueformat": "auto"}, "Give only one of"),
        (
            {"pulsar__reader__reciverQueueSize": "1"},
            "Did you mean 'pulsar.reader.receiverQueueSize'",
        ),
        ({"pulsar__client__numIoThread": "1"}, "is not an option of a connection"),
        ({"pulsar__client__tlsAllowInsecureConnection": "true"}, "tlsTrustCertsFilePath"),
        (
            {"pulsar__admin__authParams": "token:secret"},
            "one connection for the broker and its admin",
        ),
        ({"pulsar__admin__readTimeoutMs": "5"}, "'pulsar.admin.readTimeoutMs' is not supported"),
        ({"endingOffsets": "latest"}, "belongs to batch reads"),
        ({"startingOfsets": "latest"}, "Did you mean 'startingOffsets'"),
        ({"failOnDataLoss": "maybe"}, "must be true or false"),
    ],
)
def test_an_error_is_one_sentence(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(stream(**options))
    assert sentence in caught.value.message
    assert "secret" not in caught.value.message


JAVA = {
    SerializedId(11, 101, 1): "080b106518013000",
    SerializedId(11, 0): "080b10003000",
    SerializedId(300, 70_000, 0): "08ac0210f0a20418003000",
    SerializedId(11, 101, 1, 0, 1): "080b1065180120003001",
    SerializedId(11, 101, 1, 200, 1000): "080b1065180120c80130e807",
    SerializedId(11, 101, -1, 3, 10): "080b10652003300a",
}
"""Results of ``toByteArray()`` of Java client 4.0.8."""


@pytest.mark.parametrize("known", JAVA)
def test_the_bytes_are_those_of_the_java_client(known: SerializedId) -> None:
    assert known.to_bytes().hex() == JAVA[known]


_LONG = st.integers(0, 2**63 - 1)


@given(_LONG, _LONG, st.integers(-1, 2**31 - 1), st.integers(-1, 10**6), st.integers(0, 10**6))
def test_ids_come_back_from_their_bytes_and_pulsar_client_reads_them(
    ledger: int, entry: int, partition: int, index: int, size: int
) -> None:
    known = SerializedId(ledger, entry, partition, index, size)
    assert SerializedId.from_bytes(known.to_bytes()) == known
    theirs = pulsar.MessageId.deserialize(known.to_bytes())
    assert (theirs.ledger_id(), theirs.entry_id()) == (ledger, entry)
    assert (theirs.partition(), theirs.batch_index()) == (partition, index)
    assert SerializedId.from_bytes(theirs.serialize()) == known


NAMED = [option.name for option in JVM_OPTIONS]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-300, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
).map(json.dumps)


@given(st.dictionaries(st.sampled_from(NAMED), st.text(max_size=20) | _JSON, max_size=4), st.data())
def test_any_options_make_a_source_or_one_error(
    options: dict[str, str], data: st.DataObject
) -> None:
    base = {"subscription": "s"} if data.draw(st.booleans()) else {}
    for stream in (True, False):
        with suppress(KeyShardError):
            found, names, _ = translated({**base, **options}, stream=stream)
            assert names.keys() <= found.keys()
            if stream:
                parse_options(found)
            else:
                parse_bounded(found)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_id_or_refused(data: bytes) -> None:
    with suppress(ValueError):
        found = SerializedId.from_bytes(data)
        assert -(2**63) <= found.ledger < 2**63


# -- Writes ----------------------------------------------------------------------------------------

_PRODUCER = {
    "producerName": ("sinkId", "orders"), "sendTimeoutMs": ("sendTimeoutMillis", "5000"),
    "compressionType": ("compression", "zstd"), "batchingMaxMessages": ("entryMaxMessages", "7"),
    "batchingMaxBytes": ("entryMaxBytes", "2048"), "hashingScheme": ("hashingScheme", "murmur3"),
    "batchingEnabled": ("entryMaxMessages", "1"),
}  # fmt: skip
_GIVEN = {
    "producerName": "orders", "sendTimeoutMs": "5000", "compressionType": "ZSTD",
    "batchingMaxMessages": "7", "batchingMaxBytes": "2048", "hashingScheme": "Murmur3_32Hash",
    "batchingEnabled": "false",
}  # fmt: skip


def test_each_option_of_a_producer_is_translated_or_refused_by_name() -> None:
    plain = write_options({"topic": "t"})
    assert plain == {"topic": "t", "registerSchema": "true"}
    for option in PRODUCER_OPTIONS:
        name = option.name.removeprefix("pulsar.producer.")
        if option.treatment is Treatment.REFUSED:
            with pytest.raises(ConfigError, match=f"'{option.name}' is not supported"):
                write_options({option.name: "17"})
            if option.harmless:
                assert write_options({"topic": "t", option.name: option.harmless.upper()}) == plain
        elif option.treatment is Treatment.NOT_NEEDED:
            assert write_options({"topic": "t", option.name: "17"}) == plain
        else:
            new, value = _PRODUCER[name]
            found = write_options({"topic": "t", option.name.lower(): _GIVEN[name]})
            assert found == {**plain, new: value}
    for wrong, text in [
        ({"pulsar.producer.compresionType": "LZ4"}, "Did you mean 'pulsar.producer.compression"),
        ({"pulsar.producer.batchingEnabled": "maybe"}, "must be true or false"),
        ({"pulsar.producer.hashingScheme": "crc"}, "JavaStringHash or Murmur3_32Hash"),
        ({"pulsar.reader.readerName": "r"}, "belongs to reads"),
    ]:
        with pytest.raises(ConfigError, match=text):
            write_options(wrong)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pulsar.producer.producerName", "sinkId"),
        ("pulsar.producer.sendTimeoutMs", "sendTimeoutMillis"),
        ("pulsar.producer.compressionType", "compression"),
        ("pulsar.producer.batchingEnabled", "pulsar.producer.batchingMaxMessages"),
    ],
)
def test_two_options_of_one_setting_of_a_write_are_refused(one: str, other: str) -> None:
    """Issue: the option that Spark listed last was used."""
    options = [(one, "false" if one.endswith("batchingEnabled") else "5"), (other, "5")]
    for both in (options, options[::-1]):
        names = f"{both[0][0]!r} and {both[1][0]!r}"
        with pytest.raises(ConfigError, match=f"Options {names} are both given"):
            write_options({"topic": "t", **dict(both)})


@pytest.mark.parametrize(
    ("name", "text", "start"),
    [
        ("sendTimeoutMs", "soon", "Option '{}' is 'soon'; it must be an integer"),
        ("sendTimeoutMs", "0", "{} is 0; it must be"),
        ("compressionType", "rar", "{} is 'rar'. Write"),
        ("batchingMaxMessages", "", "Option '{}' is ''; it must be an integer"),
        ("batchingMaxBytes", "-1", "{} is -1; it must be"),
        ("producerName", "x" * 300, "{} has 300 characters"),
        ("producerName", "", "{} is ''."),
    ],
)
def test_an_error_of_a_write_names_the_option_of_the_user(name: str, text: str, start: str) -> None:
    """Issue: it named keyshard's option, which the user had not given."""
    option = f"pulsar.producer.{name}"
    with pytest.raises(ConfigError) as caught:
        write_of({"topic": "t", option.lower(): text}, VALUE_COLUMN)
    assert caught.value.message.startswith(start.format(option))


_TYPES: dict[str, DataType] = {
    "binary": BinaryType(), "string": StringType(), "bigint": LongType(), "int": IntegerType(),
    "map": MapType(StringType(), StringType()),
    "struct": StructType([StructField("a", LongType()), StructField("b", StringType())]),
}  # fmt: skip


def _written(columns: str, data: pa.Table, *, routed: bool = False) -> dict[str, list[Any]]:
    pairs = [one.split() for one in columns.split(",")]
    schema = StructType([StructField(name, _TYPES[kind]) for name, kind in pairs])
    found = columns_of(schema, routed=routed)
    return dict(pa.table({one.name: one.made(data) for one in found}).to_pydict())


def test_the_columns_of_the_jvm_connector_become_those_of_keyshard() -> None:
    data = pa.table(
        {
            "__key": [b"k", None],
            "__topic": ["a", "b"],
            "__eventTime": [1_000, 0],
            "__messageId": [b"", b""],
            "text": ["x", "y"],
            "__messageProperties": pa.array(
                [[("a", "b")], None], pa.map_(pa.string(), pa.string())
            ),
        }
    )
    columns = (
        "__key binary, __topic string, __eventTime bigint, __messageId binary, text string, "
        "__messageProperties map"
    )
    second = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    plain = {
        "__keyBytes": [b"k", None], "__eventTime": [second, None], "value": ["x", "y"],
        "__properties": [[("a", "b")], None],
    }  # fmt: skip
    assert _written(columns, data) == plain
    assert _written(columns, data, routed=True) == plain | {"__topic": ["a", "b"]}
    struct = pa.table({"__key": ["k"], "row": [{"a": 1, "b": "x"}]})
    found = _written("__key string, row struct", struct)
    assert found == {"__key": ["k"], "a": [1], "b": ["x"]}
    two = pa.table({"a": [1], "b": ["x"]})
    assert _written("a bigint, b string", two) == {"a": [1], "b": ["x"]}
    for wrong, text in [
        ("__key int, value string", "Column __key has the type int; it must be binary or string"),
        ("__eventTime string, value string", "it must be bigint or timestamp"),
        ("__key string", "no column of a value"),
    ]:
        with pytest.raises(ConfigError, match=text):
            _written(wrong, two)
