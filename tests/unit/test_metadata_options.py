"""Metadata columns as options of the Spark data source, without a session."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from keyshard.columns.record_batches import COLUMNS as IN_ARROW
from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.errors import ConfigError
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.pulsar.source import PulsarDataSource
from spark_adapter.query_columns import COLUMNS, SELECTABLE

STREAM, BATCH = {"topic": "t", "subscription": "s"}, {"topic": "t", "admin.url": "http://a:1"}
TYPES = (
    BinaryType(), StringType(), BinaryType(), LongType(), StringType(), TimestampType(),
    StringType(), TimestampType(),
)  # fmt: skip


def table(options: dict[str, str]) -> KeyShardDataSource:
    return KeyShardDataSource({"valueFormat": "raw", **options})  # no schema is asked for


@pytest.mark.parametrize("options", [STREAM, BATCH])
def test_metadata_columns_are_absent_by_default_and_named_ones_come_last(
    options: dict[str, str],
) -> None:
    assert table(options).schema().fieldNames() == list(COLUMNS)
    named = table({**options, "metadataColumns": "__producer , __keyBytes"}).schema()
    assert named.fieldNames() == [*COLUMNS, "__producer", "__keyBytes"]
    assert [SELECTABLE[name] for name in METADATA_COLUMNS] == list(TYPES)
    assert list(SELECTABLE) == IN_ARROW.names


def test_only_the_columns_of_the_rows_are_decoded() -> None:
    wanted = StructType().add("__producer", StringType()).add("value", BinaryType())
    named = {"metadataColumns": ",".join(METADATA_COLUMNS)}
    stream = table({**STREAM, **named}).streamReader(wanted)
    batch = table({**BATCH, **named}).reader(wanted)
    for source in (stream._source, batch._read.source):
        assert source.metadata_columns == ("__producer",)
    plain = StructType().add("value", BinaryType())
    assert table({**STREAM, **named}).streamReader(plain)._source.metadata_columns == ()


def test_the_format_pulsar_has_metadata_columns_last_under_its_own_names() -> None:
    options = {"service.url": "pulsar://a:1", "valueFormat": "raw", **BATCH}
    source = PulsarDataSource({**options, "metadataColumns": "__producer"})
    schema = source.schema()
    assert schema.fieldNames()[-2:] == ["__messageProperties", "__producer"]
    assert source.reader(schema)._read.source.metadata_columns == (
        "__messageIdBytes", "__keyBytes", "__producer",
    )  # fmt: skip
    plain = PulsarDataSource(options).reader(StructType().add("__key", BinaryType()))
    assert plain._read.source.metadata_columns == ("__keyBytes",)


@pytest.mark.parametrize(
    ("name", "kind", "options", "sentence"),
    [
        ("__redeliveryCount", IntegerType(), {}, "a replayed batch must have the same rows"),
        ("__range", StringType(), {}, "the range of a key changes"),
        ("__sequenceId", StringType(), {"valueFormat": "raw"}, "of type string does not exist"),
        ("id", IntegerType(), {"valueFormat": "raw"}, "schema, or valueFormat is raw"),
        ("__keyBytes", BinaryType(), {"transport": "client"}, "does not provide it"),
    ],
)
@pytest.mark.parametrize("own", [STREAM, BATCH])
def test_an_unavailable_column_is_refused_when_selected(
    name: str, kind: DataType, options: dict[str, str], own: dict[str, str], sentence: str
) -> None:
    schema = StructType().add("value", BinaryType()).add(name, kind)
    source = table({**own, **options})
    with pytest.raises(ConfigError, match=sentence):
        source.streamReader(schema) if own is STREAM else source.reader(schema)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("__topic", "metadataColumns contains '__topic', which is not a metadata column"),
        ("__range", "Column __range does not exist"),
        ("__producer,__producer", "has a column twice"),
    ],
)
@pytest.mark.parametrize("own", [STREAM, BATCH])
def test_an_option_that_is_wrong_is_one_sentence(
    own: dict[str, str], given: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        table({**own, "metadataColumns": given}).schema()
