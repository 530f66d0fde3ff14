"""Options of format("keyshard"): parsing, refusals, the way back, and the table of the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from keyshard import KeyShardSource
from keyshard.errors import ConfigError, NonPersistentTopicError
from spark_adapter.option_parsing import options_table, parse_options, to_options
from spark_adapter.options import CLIENT, CONNECTION_OPTIONS, OPTIONS
from spark_adapter.pulsar.writing import write_of
from spark_adapter.write_options import parse_write

MINIMAL = {"topic": "orders", "subscription": "billing"}

EVERYTHING = {
    "service.url": "pulsar://broker:6650",
    "admin.url": "http://broker:8080",
    "topics": "orders, acme/shop/returns",
    "subscription": "billing",
    "queryName": "invoices",
    "transport": "wire",
    "parallelism": "7",
    "startingOffsets": "earliest",
    "maxOffsetsPerTrigger": "500",
    "maxBytesPerTrigger": "1000000",
    "minOffsetsPerTrigger": "50",
    "maxTriggerDelay": "2m",
    "tasksPerBatch": "4",
    "onMisrouted": "fail",
    "onCorrupt": "skip",
    "onEncrypted": "skip",
    "valueFormat": "raw",
    "mode": "permissive",
    "metadataColumns": "__producer, __orderingKey",
    "windowMaxRows": "3000",
    "windowMaxBytes": "2097152",
    "workers": "processes:3",
    "workerHost": "10.0.0.1",
    "metrics.port": "9464",
    "metrics.host": "10.0.0.2",
    "ui.port": "8650",
    "ui.host": "10.0.0.3",
    "ui.token": "0123456789abcdef",
    "telemetry": "true",
    "subscribeTimeoutMillis": "1234",
    "settleAfterMillis": "5000",
    "maxCheckpointBytes": "10000",
    "failOnDataLoss": "false",
    "operationTimeoutMillis": "5678",
    "replayTimeoutMillis": "6789",
    "availableNowTimeoutMillis": "90123",
    "partitionDiscoveryIntervalMillis": "2345",
}


def refused(options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    return caught.value.message


@pytest.mark.parametrize("text", ["yes", "", "1"])
def test_a_wrong_boolean_is_refused_by_name(text: str) -> None:
    assert refused({**MINIMAL, "failOnDataLoss": text}) == (
        f"Option 'failOnDataLoss' is {text!r}; it must be true or false."
    )


def test_topic_and_subscription_are_enough() -> None:
    assert parse_options(MINIMAL) == KeyShardSource("orders", subscription="billing")


def test_every_option_reaches_its_field() -> None:
    assert parse_options(EVERYTHING) == KeyShardSource(
        ["orders", "acme/shop/returns"],
        subscription="billing",
        name="invoices",
        service_url="pulsar://broker:6650",
        admin_url="http://broker:8080",
        transport="wire",
        parallelism=7,
        starting_position="earliest",
        batch_rows_max=500,
        batch_bytes_max=1_000_000,
        batch_rows_min=50,
        batch_delay_max_ms=120_000,
        batch_tasks=4,
        on_misrouted="fail",
        on_corrupt="skip",
        on_encrypted="skip",
        value_format="raw",
        malformed="PERMISSIVE",
        metadata_columns=["__producer", "__orderingKey"],
        window_rows_max=3_000,
        window_bytes_max=2_097_152,
        workers="processes:3",
        worker_host="10.0.0.1",
        metrics_port=9464,
        metrics_host="10.0.0.2",
        ui_port=8650,
        ui_host="10.0.0.3",
        ui_token="0123456789abcdef",
        telemetry=True,
        subscribe_timeout_ms=1_234,
        settle_after_ms=5_000,
        checkpoint_bytes_max=10_000,
        fail_on_data_loss=False,
        operation_timeout_ms=5_678,
        replay_timeout_ms=6_789,
        available_now_timeout_ms=90_123,
        discovery_interval_ms=2_345,
    )
    assert {option.name for option in OPTIONS} == {
        *EVERYTHING, "topic", "topicsPattern", "startingTime",
    }  # fmt: skip


PATTERN = {
    "topicsPattern": "acme/shop/order-\\d+,?",
    "subscription": "billing",
    "admin.url": "http://broker:8080",
}


def test_a_pattern_stands_for_topics_and_is_completed() -> None:
    source = parse_options(PATTERN)
    assert source.topics == ()
    assert source.topics_pattern == "persistent://acme/shop/order-\\d+,?"


@pytest.mark.parametrize("other", ["topic", "topics"])
def test_only_one_of_topics_and_pattern_may_be_given(other: str) -> None:
    assert refused({**PATTERN, other: "t"}) == (
        f"{other!r} and 'topicsPattern' are both given. Give only one of them."
    )


def test_a_pattern_needs_admin() -> None:
    without = {name: value for name, value in PATTERN.items() if name != "admin.url"}
    message = refused(without)
    assert message.startswith("topicsPattern needs the admin interface")


@pytest.mark.parametrize("pattern", ["(", "a/b", "persistent://a/b", "a/b/", "a*/b/c", ""])
def test_a_bad_pattern_is_refused_by_its_name(pattern: str) -> None:
    assert refused({**PATTERN, "topicsPattern": pattern}).startswith("topicsPattern ")


def test_a_non_persistent_pattern_keeps_its_own_error() -> None:
    with pytest.raises(NonPersistentTopicError):
        parse_options({**PATTERN, "topicsPattern": "non-persistent://a/b/c"})


def test_names_are_case_insensitive_as_in_spark() -> None:
    upper = {name.upper(): value for name, value in EVERYTHING.items()}
    lower = {name.lower(): value for name, value in EVERYTHING.items()}
    assert parse_options(upper) == parse_options(lower) == parse_options(EVERYTHING)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("subscriptionName", "subscription"),
        ("parallelsim", "parallelism"),
        ("startingOffset", "startingOffsets"),
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"),
        ("serviceUrl", "service.url"),
        ("WINDOWMAXROW", "windowMaxRows"),
    ],
)
def test_an_unknown_option_names_the_nearest(wrong: str, meant: str) -> None:
    message = refused({**MINIMAL, wrong: "1"})
    assert message.startswith(f"Option {wrong!r} is unknown. Did you mean {meant!r}?")


def test_an_option_like_no_other_is_refused_too() -> None:
    assert "is unknown" in refused({**MINIMAL, "": "1"})
    assert refused({**MINIMAL, "path": "x"}) == ("Option 'path' is unknown. See docs/options.md.")


@pytest.mark.parametrize("first", ["topic", "topics"])
def test_topic_and_topics_together_are_refused(first: str) -> None:
    second = {"topic": "topics", "topics": "topic"}[first]
    message = refused({first: "a", second: "b", "subscription": "s"})
    assert message == f"{first!r} and {second!r} are both given. Give only one of them."


@pytest.mark.parametrize(
    ("own", "java", "text"),
    [
        ("service.url", "serviceUrl", "pulsar://a:6650"),
        ("admin.url", "webServiceUrl", "http://a:8080"),
    ],
)
def test_a_write_refuses_two_brokers_as_a_read_does(own: str, java: str, text: str) -> None:
    """Issue: a write used service.url and ignored pulsar.client.serviceUrl."""
    options = {"topic": "t", own: text, f"pulsar.client.{java}": text.replace("a:", "b:")}
    sentence = f"{own} and pulsar.client.{java} have different values. Give only one of them."
    assert refused({**options, "subscription": "s"}) == sentence
    columns = StructType([StructField("value", BinaryType())])
    for write in (parse_write, write_of):
        with pytest.raises(ConfigError) as caught:
            write(options, columns)
        assert caught.value.message == sentence


def test_missing_topic_and_missing_subscription_are_refused() -> None:
    assert refused({"subscription": "s"}).startswith("No topic is given. Set option 'topic'")
    assert refused({"topic": "t"}).startswith("Option 'subscription' is missing.")


@pytest.mark.parametrize("text", ["", " , ", ","])
def test_an_empty_list_of_topics_is_refused(text: str) -> None:
    assert refused({"topics": text, "subscription": "s"}).startswith("No topic is given.")


@pytest.mark.parametrize(
    "name",
    ["parallelism", "maxOffsetsPerTrigger", "windowMaxRows", "windowMaxBytes",
     "subscribeTimeoutMillis", "settleAfterMillis", "maxCheckpointBytes"],
)  # fmt: skip
@pytest.mark.parametrize("text", ["ten", "", "1.5", "1e3", "0x10"])
def test_a_wrong_integer_is_refused_by_name(name: str, text: str) -> None:
    assert (
        refused({**MINIMAL, name: text}) == f"Option {name!r} is {text!r}; it must be an integer."
    )


@pytest.mark.parametrize(
    ("name", "value", "start"),
    [
        ("parallelism", "0", "parallelism is 0; it must be an integer from 1 to 65536."),
        ("maxOffsetsPerTrigger", "0", "maxOffsetsPerTrigger is 0; it must be"),
        ("windowMaxRows", "1", "windowMaxRows is 1; it must be"),
        ("windowMaxBytes", "-1", "windowMaxBytes is -1; it must be"),
        ("subscribeTimeoutMillis", "0", "subscribeTimeoutMillis is 0; it must be"),
        ("service.url", "broker:6650", "service.url is 'broker:6650'. Write pulsar://host:port"),
        ("service.url", "memory://a", "service.url is 'memory://a', an in-memory cluster"),
        ("admin.url", "broker:8080", "admin.url is 'broker:8080'. Write http://host:port."),
        ("startingOffsets", "first", "startingOffsets is 'first'. Write"),
        ("workerHost", "", "workerHost is ''."),
    ],
)
def test_a_refusal_calls_the_option_by_the_name_the_user_wrote(
    name: str, value: str, start: str
) -> None:
    assert refused({**MINIMAL, name: value}).startswith(start)


@pytest.mark.parametrize("topic", ["acme/topics", "my topics", "worker_host is", "a/parallelism"])
@pytest.mark.parametrize("name", ["topic", "topics"])
def test_a_refusal_shows_the_users_value_as_it_is(name: str, topic: str) -> None:
    message = refused({name: topic, "subscription": "s"})
    assert message.startswith(f"{topic!r} is not a topic name.")


def test_a_non_persistent_topic_keeps_its_own_error() -> None:
    with pytest.raises(NonPersistentTopicError):
        parse_options({**MINIMAL, "topic": "non-persistent://a/b/c"})


@pytest.mark.parametrize("options", [MINIMAL, EVERYTHING, PATTERN])
def test_options_of_a_source_make_the_same_source(options: dict[str, str]) -> None:
    source = parse_options(options)
    assert parse_options(to_options(source)) == source


def test_defaults_are_not_written_into_options() -> None:
    assert set(to_options(parse_options(MINIMAL))) <= {"topic", "topics", "subscription"}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("startingTime", "2026-11-21T08:00:00+00:00"),
        ("startingOffsets", '{"orders-partition-0": "7:120:3", "orders-partition-1": "latest"}'),
    ],
)
def test_a_start_at_a_time_and_at_positions_goes_both_ways(name: str, start: str) -> None:
    options = {**MINIMAL, "admin.url": "http://broker:8080", name: start}
    source = parse_options(options)
    assert source.starting_position == start
    assert to_options(source)[name] == start
    assert parse_options(to_options(source)) == source


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingTime": "soon"}, "startingTime is 'soon', which is not a time"),
        ({"startingOffsets": "2026-11-21T08:00Z"}, "startingOffsets is '2026-11-21T08:00Z'. Write"),
        (
            {"startingOffsets": '{"orders": "7:1:-2"}'},
            "startingOffsets of 'orders' is '7:1:-2'. Write",
        ),
        (
            {"startingTime": "0", "startingOffsets": "latest"},
            "'startingTime' and 'startingOffsets' are both",
        ),
    ],
)
def test_a_wrong_start_is_refused_in_the_words_of_its_option(
    options: dict[str, str], sentence: str
) -> None:
    assert sentence in refused({**MINIMAL, "admin.url": "http://broker:8080", **options})


def test_a_topic_with_a_comma_in_its_name_stays_one_topic() -> None:
    source = KeyShardSource("a,b", subscription="s")
    assert parse_options(to_options(source)) == source


def test_several_topics_with_a_comma_in_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="comma"):
        to_options(KeyShardSource(["a,b", "c"], subscription="s"))


def test_a_setting_without_an_option_is_refused_when_it_is_not_the_default() -> None:
    source = KeyShardSource("t", subscription="s", receive_threads=9)
    with pytest.raises(ConfigError, match="receive_threads cannot be set for Spark"):
        to_options(source)


def test_every_option_has_a_field_and_a_meaning() -> None:
    fields = {field.name for field in dataclasses.fields(KeyShardSource)}
    for option in OPTIONS:
        assert option.field in fields
        assert option.meaning.endswith(".")


def test_the_table_of_the_docs_lists_every_option_with_its_default() -> None:
    rows = dict(line.split(" | ", 1) for line in options_table().splitlines()[2:])
    names = [option.name for option in OPTIONS]
    names += [CLIENT + option.name for option in CONNECTION_OPTIONS]
    assert list(rows) == [f"| `{name}`" for name in names]
    assert rows["| `parallelism`"].startswith("`10` | ")
    assert rows["| `subscription`"].startswith(" | ")
    assert rows["| `maxOffsetsPerTrigger`"].startswith(" | ")
    assert rows["| `startingOffsets`"].startswith("`latest` | ")


DOCS = Path(__file__).parents[2] / "docs" / "options.md"


@pytest.mark.skipif(not DOCS.exists(), reason="docs/options.md is not written yet")
def test_the_docs_contain_the_table_as_it_is_now() -> None:
    assert options_table() in DOCS.read_text()


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("250", 250),
        ("500ms", 500),
        ("30s", 30_000),
        ("15m", 900_000),
        ("15 min", 900_000),
        ("1H", 3_600_000),
    ],
)
def test_a_delay_has_a_unit(text: str, milliseconds: int) -> None:
    assert parse_options(MINIMAL | {"maxTriggerDelay": text}).batch_delay_max_ms == milliseconds


@pytest.mark.parametrize("text", ["", "soon", "15 days", "-1s", "1.5m"])
def test_a_wrong_delay_is_refused_with_an_example(text: str) -> None:
    assert "such as '30s'" in refused(MINIMAL | {"maxTriggerDelay": text})
