"""Configuration: completion, defaults, and refusals that name the field."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from keyshard import Connection, HandlerConfig, KeyShardSource, Token
from keyshard.config.source import MIB, SourceConfig
from keyshard.errors import ConfigError, NonPersistentTopicError
from spark_adapter.option_parsing import parse_options, to_options


def config(topics: Any = "t", **fields: Any) -> SourceConfig:
    return SourceConfig(topics, **({"subscription": "s"} | fields))


def test_names_are_completed_and_repeats_dropped_in_order() -> None:
    found = config([" b ", "a", "persistent://public/default/b", "x/y/z"])
    assert found.topics == (
        "persistent://public/default/b",
        "persistent://public/default/a",
        "persistent://x/y/z",
    )


def test_a_single_string_is_one_topic() -> None:
    assert config("orders").topics == ("persistent://public/default/orders",)


def test_options_that_acknowledge_need_a_subscription() -> None:
    """Sources without the option shared the subscription ``keyshard``, and so one backlog."""
    source = KeyShardSource("t", service_url="memory://nowhere", admin_url="memory://nowhere")
    spark = KeyShardSource("t", service_url="pulsar://nowhere:1")
    for start in (
        lambda: source.run(print),
        source.batches,
        source.open,
        source.coordinator,
        lambda: parse_options(to_options(spark)),
    ):
        with pytest.raises(ConfigError, match="subscription"):
            start()


def test_defaults_are_valid_and_bounded() -> None:
    found = config()
    assert found.parallelism == 10
    assert found.starting_position == "latest"
    assert found.window_rows_max == 10_000_000
    assert all(
        getattr(found, field.name) > 0
        for field in dataclasses.fields(found)
        if field.name.endswith(("_max", "_ms", "_size"))
        and field.name not in ("batch_rows_max", "batch_bytes_max")
    )


def test_a_config_is_frozen_comparable_and_picklable() -> None:
    found = config(parallelism=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.parallelism = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(found)) == found == config(["t"], parallelism=3)
    assert hash(found) == hash(config(["t"], parallelism=3))


@pytest.mark.parametrize("topics", [[], ()])
def test_no_topic_is_refused(topics: list[str]) -> None:
    with pytest.raises(ConfigError, match="No topic is given"):
        config(topics)


def test_a_non_persistent_topic_is_refused() -> None:
    with pytest.raises(NonPersistentTopicError):
        config(["a", "non-persistent://a/b/c"])


LIMITS = {
    "parallelism": (1, 65_536),
    "batch_rows_max": (1, 10**9),
    "metrics_port": (0, 65_535),
    "ui_port": (0, 65_535),
    "batch_bytes_max": (1, 2**50),
    "batch_rows_min": (1, 10**9),
    "batch_delay_max_ms": (0, 86_400_000),
    "batch_tasks": (1, 65_536),
    "window_rows_max": (2, 10**9),
    "window_bytes_max": (MIB, 2**50),
    "discovery_interval_ms": (10, 86_400_000),
    "subscribe_timeout_ms": (1, 3_600_000),
    "operation_timeout_ms": (1_000, 3_600_000),
    "replay_timeout_ms": (1, 3_600_000),
    "receiver_queue_size": (1, 100_000),
    "receive_threads": (1, 256),
    "acknowledge_timeout_ms": (1_000, 86_400_000),
    "settle_after_ms": (1, 86_400_000),
    "checkpoint_bytes_max": (4_096, 2**30),
    "available_now_timeout_ms": (1, 86_400_000),
    "available_now_quiet_ms": (1, 3_600_000),
}


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_are_kept_within_their_limits(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high):
        assert getattr(config(**{name: value}), name) == value
    for refused in (low - 1, high + 1, -1, 2.5, "5", True, [3]):
        with pytest.raises(ConfigError) as caught:
            config(**{name: refused})
        assert caught.value.message == (
            f"{name} is {refused!r}; it must be an integer from {low} to {high}."
        )


def test_every_number_has_limits() -> None:
    assert set(LIMITS) == {
        field.name for field in dataclasses.fields(SourceConfig) if "int" in str(field.type)
    }


def test_only_the_batch_limit_may_be_unset() -> None:
    assert config(batch_rows_max=None).batch_rows_max is None
    with pytest.raises(ConfigError, match="parallelism is None"):
        config(parallelism=None)


@pytest.mark.parametrize(
    "url",
    ["pulsar://localhost:6650", "pulsar+ssl://a:6651/", "pulsar://a:1,b:2", "pulsar://[::1]:6650"],
)
def test_valid_service_urls_are_kept_as_given(url: str) -> None:
    assert config(service_url=url).service_url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6650",
        "http://a:8080",
        "pulsar://",
        "pulsar://a b",
        "pulsar://a,,b",
        "pulsar://h:1\n",
        "memory://",
        "memory://a/b",
    ],
)
def test_a_wrong_service_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="service_url is") as caught:
        config(service_url=url)
    assert repr(url) in caught.value.message


@pytest.mark.parametrize("url", ["", "localhost:8080", "pulsar://a:1", "http://", "http://a/admin"])
def test_a_wrong_admin_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="admin_url is"):
        config(admin_url=url)


def test_an_in_memory_cluster_has_its_admin_interface_at_its_own_url() -> None:
    assert config(service_url="memory://a").in_memory
    assert config(service_url="memory://a", admin_url="memory://a").in_memory
    assert not config().in_memory
    for service_url, admin_url in (
        ("memory://a", "memory://b"),
        ("memory://a", "http://a:8080"),
        ("pulsar://a:6650", "memory://a"),
    ):
        with pytest.raises(ConfigError, match="admin_url is"):
            config(service_url=service_url, admin_url=admin_url)


@pytest.mark.parametrize("url", ["http://a:8080", "https://a:8443/"])
def test_valid_admin_urls_are_kept_as_given(url: str) -> None:
    assert config(admin_url=url).admin_url == url


@pytest.mark.parametrize("name", ["", " s", "s\n"])
def test_a_wrong_subscription_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="subscription is"):
        config(subscription=name)


@pytest.mark.parametrize("position", ["Earliest", "", "0", "beginning"])
def test_a_wrong_starting_position_is_refused(position: str) -> None:
    with pytest.raises(
        ConfigError, match=r"starting_position is .*.\nRemedy: Write 'earliest' or 'latest'"
    ):
        config(starting_position=position)


def test_an_empty_worker_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker_host is ''"):
        config(worker_host="")


@pytest.mark.parametrize(
    ("fields", "topic"),
    [
        ({"topics": ["a", "b"]}, "persistent://public/default/a-s-DLQ"),
        ({"topics": "t/n/a", "subscription": "a b/c+d"}, "persistent://t/n/a-a-b-c-d-DLQ"),
        (
            {"topics_pattern": "persistent://t/n/o.*", "admin_url": "http://h:1"},
            "persistent://t/n/s-DLQ",
        ),
    ],
)
def test_dead_letters_have_a_topic_of_their_own_by_default(
    fields: dict[str, Any], topic: str
) -> None:
    assert SourceConfig(**({"subscription": "s"} | fields)).default_dead_letter_topics[0] == topic


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["__offset"],
            "'__offset', which is not a metadata column. Choose from __messageIdBytes, ",
        ),
        (["__publishTime"], "The default columns need no option."),
        (["__producer", "__producer"], "has a column twice"),
        ("__redeliveryCount", "Column __redeliveryCount does not exist: a replayed batch"),
        ("__range", "Column __range does not exist: the range of a key"),
        (5, "metadata_columns is 5. Write a list of __messageIdBytes"),
        ([None], "Write a list of __messageIdBytes"),
        (b"__producer", "Write a list of __messageIdBytes"),
    ],
)
def test_an_unknown_column_is_refused_with_its_reason(given: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(metadata_columns=given)
    assert sentence in caught.value.message
    assert caught.value.message.endswith(".")


def test_metadata_columns_are_given_as_one_name_or_as_a_list() -> None:
    assert config().metadata_columns == ()
    found = config(metadata_columns="__producer")
    assert found.metadata_columns == ("__producer",)
    again = dataclasses.replace(found, metadata_columns=["__sequenceId", "__producer"])
    assert again.metadata_columns == ("__sequenceId", "__producer")
    assert hash(pickle.loads(pickle.dumps(again))) == hash(again)


@pytest.mark.parametrize(
    "name",
    ["__keyBytes", "__sequenceId", "__brokerPublishTime", "__replicatedFrom", "__deliverAt"],
)
def test_columns_that_pulsar_client_lacks_are_refused_with_it(name: str) -> None:
    assert config(metadata_columns=name, transport="wire").metadata_columns == (name,)
    with pytest.raises(ConfigError, match=f"Column {name} does not exist with transport 'client'"):
        config(metadata_columns=name, transport="client")
    both = ["__producer", "__orderingKey"]
    assert config(metadata_columns=both, transport="client").metadata_columns == tuple(both)


def test_a_description_shows_the_given_values_and_no_secret() -> None:
    source = KeyShardSource("orders", subscription="billing", service_url="pulsar://h:1")
    assert repr(source) == (
        "KeyShardSource(topics=('persistent://public/default/orders',), subscription='billing', "
        "service_url='pulsar://h:1')"
    )
    connection = Connection("pulsar+ssl://h:1", authentication=Token("very-secret"))
    source = KeyShardSource("orders", subscription="billing", connection=connection)
    assert "very-secret" not in repr(source)
    assert repr(source).count("pulsar+ssl://h:1") == 1
    many = KeyShardSource([f"orders-{number}" for number in range(1_000)], subscription="billing")
    assert len(repr(many)) < 500
    assert repr(HandlerConfig()) == "HandlerConfig()"
    assert repr(HandlerConfig(lanes=2, on_failure="stop")) == (
        "HandlerConfig(lanes=2, on_failure='stop')"
    )
