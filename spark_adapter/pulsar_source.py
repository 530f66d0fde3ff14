"""``format("pulsar")``: the same source under the names of the JVM connector.

Its options are translated, and its columns are made of those of keyshard: in tasks, of the rows
that they read. All else is the source of :mod:`spark_adapter.data_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa
from pyarrow import compute
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyshard.arrow.buffers import numbers, texts
from keyshard.core.metadata_columns import KEY_BYTES, MESSAGE_ID_BYTES
from keyshard.errors import ConfigError, SchemaError
from keyshard.reading.decoding_plan import CORRUPT
from spark_adapter.batch_reader import KeyShardBatchReader
from spark_adapter.bounded_options import parse_bounded
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.options import parse_options
from spark_adapter.pulsar_options import seems_stream, translated
from spark_adapter.pulsar_stream import PulsarStreamReader
from spark_adapter.structure import COLUMNS, SELECTABLE, Rows, schema_of, strict_of
from spark_adapter.wording import told_in_short, told_to_spark


class _Made(NamedTuple):
    """A column of the JVM connector."""

    kind: DataType
    of: tuple[str, ...]
    """Columns of keyshard."""
    make: Callable[..., pa.Array]
    """Makes it of them."""


def _as_it_is(column: pa.Array) -> pa.Array:
    return column


def _partition_name(topics: pa.Array, partitions: pa.Array) -> pa.Array:
    """Names of topic partitions, as the broker has them."""
    named = compute.binary_join_element_wise(
        topics, partitions.cast(pa.string()), texts(["-partition-"])[0]
    )
    return compute.if_else(
        compute.less(partitions, numbers([0], pa.int32())[0]), topics, named
    )  # fmt: skip


METADATA = {
    "__key": _Made(BinaryType(), (KEY_BYTES,), _as_it_is),
    "__topic": _Made(StringType(), ("__topic", "__partition"), _partition_name),
    "__messageId": _Made(BinaryType(), (MESSAGE_ID_BYTES,), _as_it_is),
    "__publishTime": _Made(TimestampType(), ("__publishTime",), _as_it_is),
    "__eventTime": _Made(TimestampType(), ("__eventTime",), _as_it_is),
    "__messageProperties": _Made(
        MapType(StringType(), StringType()), ("__properties",), _as_it_is
    ),
}  # fmt: skip
"""Its columns behind those of the value, in their order."""


@dataclass(frozen=True)
class PulsarRows(Rows):
    """Rows whose metadata has the names and types of the JVM connector."""

    names: Sequence[str] = field(kw_only=True)
    """Columns of the query."""

    def _made(
        self, raw: Iterable[pa.RecordBatch], tell: Callable[[int], None] | None
    ) -> Iterator[pa.RecordBatch]:
        for batch in super()._made(raw, tell):
            arrays = [
                METADATA[name].make(*map(batch.column, METADATA[name].of))
                if name in METADATA
                else batch.column(name)
                for name in self.names
            ]
            made = pa.schema(
                [
                    batch.schema.field(name) if name not in METADATA else pa.field(name, array.type)
                    for name, array in zip(self.names, arrays, strict=True)
                ]
            )
            yield pa.RecordBatch.from_arrays(arrays, schema=made)


class PulsarDataSource(KeyShardDataSource):
    """Pulsar topics for pipelines that were written for the JVM connector."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format(...)``."""
        return "pulsar"

    def schema(self) -> StructType:
        """All columns; wrong options are refused here, when the query is built."""
        stream = seems_stream(self.options)
        with told_in_short():
            options, names, _ = translated(self.options, stream=stream)
        with told_to_spark(**names):
            source = parse_options(options) if stream else parse_bounded(options).source
            return _renamed(schema_of(self._planned_for(source), source.metadata_columns))

    def reader(self, schema: StructType) -> KeyShardBatchReader:
        """The reader of one batch; plans when Spark asks for partitions."""
        with told_in_short():
            options, names, _ = translated(self.options, stream=False)
        with told_to_spark(**names):
            read = parse_bounded(options)
            rows = self._rows(read.source, _own(schema))
            read = replace(read, source=rows.source_of(read.source))
        return KeyShardBatchReader(read, _rows(schema, rows))

    def streamReader(self, schema: StructType) -> PulsarStreamReader:  # noqa: N802 - Spark's name
        """The reader of one query; connects when Spark asks for the first offset."""
        with told_in_short():
            options, names, made_up = translated(self.options, stream=True)
        with told_to_spark(**names):
            source = parse_options(options)
            rows = self._rows(source, _own(schema))
            source = rows.source_of(source)
        return PulsarStreamReader(source, _rows(schema, rows), made_up=made_up)


def _rows(schema: StructType, rows: Rows) -> PulsarRows:
    strict = strict_of(schema)
    return PulsarRows(rows.columns, rows.wanted, rows.plan, strict, names=schema.names)


def _renamed(own: StructType) -> StructType:
    """All columns that a query can have, of those with keyshard's names.

    Raises:
        SchemaError: A field of the value is called like one of the others.
    """
    values = [one for one in own.fields if one.name == "value" or one.name not in COLUMNS]
    last = [one for one in values if one.name in SELECTABLE and one.name != "value"]
    last += [one for one in values if one.name == CORRUPT]
    values = [one for one in values if one not in last]
    for one in values:
        if one.name in METADATA:
            raise SchemaError(
                f"The schema of the topic has a field {one.name!r}, which is a column of "
                "format('pulsar'). Use format('keyshard'), or set valueFormat=raw."
            )
    metadata = [StructField(name, made.kind) for name, made in METADATA.items()]
    return StructType([*values, *metadata, *last])


def _own(schema: StructType) -> StructType:
    """The columns of keyshard that a query's are made of.

    Raises:
        ConfigError: A column has another type than there is.
    """
    found: dict[str, StructField] = {}
    for one in schema.toNullable().fields:
        made = METADATA.get(one.name)
        if made is None:
            found[one.name] = one
            continue
        if one.dataType != made.kind:
            raise ConfigError(
                f"Column {one.name!r} of type {one.dataType.simpleString()} is not one of "
                f"format('pulsar'), where it is {made.kind.simpleString()}."
            )
        found |= {name: StructField(name, SELECTABLE[name]) for name in made.of}
    return StructType(list(found.values()))
