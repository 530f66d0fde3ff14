"""Options of a batch read: their meaning, and one sentence for each invalid one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.config.segments import Segments
from keyshard.core.message import MessageId
from keyshard.core.position.read_bounds import Edge
from keyshard.errors import ConfigError
from keyshard.reading.split_planner import plan_read
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.option_parsing import (
    PARTITIONS_MAX,
    BoundedRead,
    batch_options_table,
    parse_bounded,
    parse_options,
)
from spark_adapter.options import BATCH_OPTIONS, OF_BATCHES_TOO, OPTIONS

MINIMAL = {"topic": "orders", "admin.url": "http://broker:8080"}
DOCS = Path(__file__).parents[2] / "docs" / "options.md"


def refused(**options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_bounded(MINIMAL | options)
    return caught.value.message


def test_a_topic_is_read_from_its_beginning_to_its_end() -> None:
    read = parse_bounded(MINIMAL)
    assert (read.start, read.end) == (Edge.EARLIEST, Edge.LATEST)
    assert read.source == KeyShardSource("orders", admin_url="http://broker:8080")
    assert (read.partitions_min, read.rows_max, read.keys) == (1, None, None)


def test_every_option_reaches_its_field_in_any_case() -> None:
    options = {
        "startingoffsets": ' {"orders-partition-0": "7:120", "orders-partition-1": "earliest"}',
        "ENDINGTIME": "2026-11-21T01:00:00+01:00",
        "maxTimeDisorder": "1h",
        "minPartitions": "13",
        "maxRowsPerPartition": "100000",
        "maxBytesInFlight": "1048576",
        "keys": '["a", "b,c"]',
        "failOnDataLoss": "false",
        "pulsar.client.listenerName": "outside",
    }
    read = parse_bounded(MINIMAL | options)
    assert read.start == {"orders-partition-0": MessageId(7, 120, 0),
                          "orders-partition-1": Edge.EARLIEST}  # fmt: skip
    assert read.end == "2026-11-21T00:00:00+00:00"
    assert read.disorder_max_s == 3600
    assert (read.partitions_min, read.rows_max) == (13, 100_000)
    assert read.bytes_in_flight_max == 1024 * 1024
    assert read.keys == {"a", "b,c"}
    assert not read.source.fail_on_data_loss
    assert read.source.how_to_connect().listener_name == "outside"
    assert dict(read.names)["start"] == "startingOffsets"
    assert dict(read.names)["end"] == "endingTime"
    assert pickle.loads(pickle.dumps(read)) == read


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"startingOffsets": "soon"}, "startingOffsets is 'soon'. Write 'earliest', 'latest'"),
        ({"startingOffsets": ""}, "startingOffsets is ''. Write 'earliest'"),
        ({"startingOffsets": "then"}, "'ledger:entry' or 'ledger:entry:index'."),  # and no time
        ({"startingOffsets": "2026-11-21"}, "startingOffsets is '2026-11-21'. Write 'earliest'"),
        ({"endingOffsets": "7:3"}, "a position belongs to one topic partition. Write JSON"),
        ({"endingOffsets": '{"orders": 7}'}, "endingOffsets of 'orders' is 7. Write"),
        ({"endingOffsets": '{"orders": "7:"}'}, "endingOffsets of 'orders' is '7:'. Write"),
        ({"endingOffsets": '{"orders": "2026-11-21"}'}, "endingOffsets of 'orders' is '2026-1"),
        ({"endingOffsets": '{"orders": "7:1", "orders": "7:2"}'}, "names 'orders' twice"),
        ({"endingOffsets": '{"orders": "7:1"'}, "which is not JSON: Expecting ',' delimiter"),
        ({"endingOffsets": '["7:1"]'}, "endingOffsets is '[\"7:1\"]'. Write 'earliest'"),
        ({"startingTime": "2026-11-21T08:00"}, "which has no time zone. Add 'Z' for UTC"),
        ({"startingTime": "earliest"}, "startingTime is 'earliest', which is not a time"),
        ({"startingTime": "1795219200"}, "If it is in seconds, multiply it by 1000"),
        ({"startingTime": "-5"}, "startingTime is '-5', which is not a time"),
        ({"startingTime": "9" * 18}, "which is not a time"),
        ({"endingTime": "2026-02-30T00:00Z"}, "endingTime is '2026-02-30T00:00Z', which is not a "),
        ({"startingTime": "0", "startingOffsets": "earliest"},
         "'startingTime' and 'startingOffsets' are both given."),
        ({"minPartitions": "0"}, "minPartitions is 0; it must be an integer from 1 to 100000"),
        ({"minPartitions": "many"}, "minPartitions is 'many'; it must be an integer"),
        ({"minPartitions": str(PARTITIONS_MAX + 1)}, "minPartitions is 100001; it must be"),
        ({"maxBytesInFlight": "1048575"}, "maxBytesInFlight is 1048575; it must be an integer"),
        ({"maxBytesInFlight": "32m"}, "maxBytesInFlight is '32m'; it must be an integer"),
        ({"maxRowsPerPartition": "-1"}, "maxRowsPerPartition is '-1'; it must be an integer"),
        ({"maxRowsPerPartition": "²"}, "maxRowsPerPartition is '²'; it must be an integer"),
        ({"maxTimeDisorder": "soon"}, "'maxTimeDisorder' is 'soon'. Write a time with a unit"),
        ({"keys": "a,b"}, "keys is 'a,b'. Write a JSON list of keys"),
        ({"keys": "[]"}, "Write a JSON list of keys"),
        ({"keys": "[1]"}, "Write a JSON list of keys"),
        ({"keys": r'["\ud800"]'}, "Write a JSON list of keys"),
        ({"subscription": "s"}, "Option 'subscription' belongs to streams (spark.readStream), "),
        ({"WINDOWMAXROWS": "5"}, "Option 'windowMaxRows' belongs to streams"),
        ({"minPartition": "5"}, "Option 'minPartition' is unknown. Did you mean 'minPartitions'?"),
    ],
)  # fmt: skip
def test_an_empty_option_is_refused_in_one_sentence(options: dict[str, str], sentence: str) -> None:
    message = refused(**options)
    assert sentence in message
    assert message.endswith(".")


def test_a_stream_refuses_options_of_batch_reads() -> None:
    for option in BATCH_OPTIONS:
        if option.name in OF_BATCHES_TOO:
            continue
        with pytest.raises(ConfigError) as caught:
            parse_options({"topic": "orders", "subscription": "s", option.name: "1"})
        assert "belongs to batch reads (spark.read), not to streams" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"topic": "t"}, True),
        ({"topic": "t", "subscription": "s"}, True),
        ({"topic": "t", "startingTime": "0"}, True),
        ({"topic": "t", "startingTime": "0", "subscription": "s"}, False),  # no admin.url
        ({"topic": "t", "endingTime": "0", "subscription": "s"}, False),
        ({"topic": "t", "parallelism": "4"}, False),
        ({"subscription": "s"}, False),
        ({}, False),
    ],
)
def test_options_are_checked_when_a_table_is_loaded(options: dict[str, str], right: bool) -> None:
    source = KeyShardDataSource({**options, "valueFormat": "raw"})  # no schema is asked for
    if right:
        assert source.schema().fieldNames()[0] == "value"
    else:
        with pytest.raises(ConfigError):
            source.schema()


def test_the_docs_contain_the_table_as_it_is_now() -> None:
    assert batch_options_table() in DOCS.read_text()
    fields = {"source", *BoundedRead.__dataclass_fields__, *Segments.__dataclass_fields__}
    assert {option.field for option in BATCH_OPTIONS} <= fields
    assert {option.name for option in OPTIONS} >= OF_BATCHES_TOO
    assert all(option.meaning.endswith(".") for option in BATCH_OPTIONS)


@pytest.mark.parametrize(
    "value",
    [
        "",
        '{"a": ' + "1" * 5_000 + "}",
        "1" * 5_000,
        "x" * 10_000,
        "\x00",
        "[" * 100_000,
        "{" * 10_000,
    ],
)
@pytest.mark.parametrize("name", [option.name for option in BATCH_OPTIONS])
def test_hostile_values_are_refused(name: str, value: str) -> None:
    assert len(refused(**{name: value})) < 1_000


def test_earliest_and_latest_are_accepted_in_any_case() -> None:
    read = parse_bounded(MINIMAL | {"startingOffsets": " Earliest ", "endingOffsets": "LATEST"})
    assert (read.start, read.end) == (Edge.EARLIEST, Edge.LATEST)
    of_partitions = '{"orders-partition-0": "Latest"}'
    assert parse_bounded(MINIMAL | {"startingOffsets": of_partitions}).start == {
        "orders-partition-0": Edge.LATEST
    }
    source = parse_options({"topic": "t", "subscription": "s", "startingOffsets": "EARLIEST"})
    assert source.starting_position == "earliest"


def test_an_option_of_streams_in_a_batch_read_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match=r"option 'Parallelism' belongs to streams .* a batch"):
        KeyShardDataSource({"topic": "t", "Parallelism": "3"}).schema()


def test_tls_options_of_bookies_are_parsed_or_refused(tmp_path: Path) -> None:
    ca, certificate, key = (str(tmp_path / name) for name in ("ca", "certificate", "key"))
    for path in (ca, certificate, key):
        Path(path).touch()
    options = {
        "segments": "auto",
        "bookies.trustCertsFilePath": ca,
        "bookies.certificateFilePath": certificate,
        "bookies.keyFilePath": key,
        "bookies.hostnameVerification": "false",
    }
    found = parse_bounded(MINIMAL | options).segments
    assert found == Segments("auto", {}, ca, certificate, key, False)  # noqa: FBT003
    assert pickle.loads(pickle.dumps(found)) == found
    del options["bookies.keyFilePath"]
    assert "bookies_key_file_path is missing" in refused(**options)
    del options["bookies.certificateFilePath"]
    assert "segments is 'broker'" in refused(**options | {"segments": "broker"})
    options["bookies.trustCertsFilePath"] = "/nowhere/ca.pem"
    assert "cannot be read" in refused(**options)
    with pytest.raises(ConfigError, match="bookies_trust_certs_file_path is not"):
        Segments("auto", bookies_certificate_file_path=ca, bookies_key_file_path=key)
    for source in ("auto", "broker"):
        with pytest.raises(ConfigError, match="bookies_trust_certs_file_path is not"):
            Segments(source, bookies_hostname_verification=False)


@pytest.mark.parametrize("segments", ["broker", "auto", "bookies"])
def test_a_store_of_offloads_needs_no_other_option(segments: Any) -> None:
    found = parse_bounded(MINIMAL | {"segments": segments, "offloads": "s3://bucket"}).segments
    assert found == Segments(segments, offloads="s3://bucket")
    assert not found.by_broker_only
    assert "offloads is ''" in refused(offloads="")


def test_a_file_without_certificates_of_bookies_is_refused_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    segments = Segments("auto", bookies_trust_certs_file_path=tmp_path / "ca.pem")
    source = KeyShardSource("orders", admin_url="http://broker:8080")
    with pytest.raises(ConfigError, match=r"bookies_trust_certs_file_path .* contains no PEM"):
        plan_read(source, segments=segments)
