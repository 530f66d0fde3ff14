"""``format("keyshard")``: the data source that Spark looks up by name."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyshard.errors import ConfigError
from spark_adapter.batch_reader import KeyShardBatchReader
from spark_adapter.bounded_options import is_of_streams, parse_bounded
from spark_adapter.options import parse_options
from spark_adapter.stream_reader import KeyShardStreamReader

COLUMNS: dict[str, DataType] = {
    "value": BinaryType(),
    "__key": StringType(),
    "__topic": StringType(),
    "__partition": IntegerType(),
    "__messageId": StringType(),
    "__publishTime": TimestampType(),
    "__eventTime": TimestampType(),
    "__properties": MapType(StringType(), StringType()),
    "__slot": IntegerType(),
    "__schemaVersion": LongType(),
}
"""Column names and Spark types; what they hold stands in :mod:`keyshard.arrow.columns`."""


class KeyShardDataSource(DataSource):
    """Pulsar topics: as a stream over hash ranges, or what they hold as a batch."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format(...)``."""
        return "keyshard"

    def schema(self) -> StructType:
        """All columns; wrong options are refused here, when the query is built.

        Spark does not tell of what: a stream has options that no batch read has, one at least.
        """
        if any(is_of_streams(name) for name in self.options):
            parse_options(self.options)
        else:
            parse_bounded(self.options)
        return StructType([StructField(name, kind) for name, kind in COLUMNS.items()])

    def reader(self, schema: StructType) -> KeyShardBatchReader:
        """The reader of one batch; plans when Spark asks for partitions."""
        return KeyShardBatchReader(parse_bounded(self.options), _selected(schema))

    def streamReader(self, schema: StructType) -> KeyShardStreamReader:  # noqa: N802 - Spark's name
        """The reader of one query; connects when Spark asks for the first offset."""
        return KeyShardStreamReader(parse_options(self.options), _selected(schema))


def _selected(schema: StructType) -> Sequence[str]:
    for field in schema.fields:
        if COLUMNS.get(field.name) != field.dataType:
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in COLUMNS.items())
            raise ConfigError(
                f"Column {field.name!r} of type {field.dataType.simpleString()} is not one of "
                f"keyshard's. A schema selects some of: {known}."
            )
    return [field.name for field in schema.fields]
