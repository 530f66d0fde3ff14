"""``format("pulsar")``: the same source with the names of the JVM connector.

It translates the options. Tasks make its columns from those of keyshard. Everything else comes from
:mod:`spark_adapter.data_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyarrow import compute
from pyspark.errors import AnalysisException
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyshard.base_error import placed
from keyshard.columns.buffers import numbers, texts
from keyshard.core.metadata_columns import KEY_BYTES, MESSAGE_ID_BYTES
from keyshard.errors import ConfigError, SchemaError
from keyshard.reading.decoding_plan import CORRUPT
from spark_adapter.batch_reader import KeyShardBatchReader
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.error_text import as_spark_error, concise_errors
from spark_adapter.option_parsing import BoundedRead, parse_bounded, parse_options
from spark_adapter.preflight import STREAMS, check_has
from spark_adapter.pulsar.options import seems_stream, translated
from spark_adapter.query_columns import COLUMNS, SELECTABLE, schema_of, strict_of
from spark_adapter.task_rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_adapter.pulsar.stream import PulsarStreamReader
    from spark_adapter.topic_writer import TopicWrite


class _Made(NamedTuple):
    """A column of the JVM connector."""

    kind: DataType
    of: tuple[str, ...]
    """Columns of keyshard that it is made from."""
    make: Callable[..., pa.Array]
    """Makes the column from the arrays of ``of``."""


def _as_it_is(column: pa.Array) -> pa.Array:
    return column


def _partition_name(topics: pa.Array, partitions: pa.Array) -> pa.Array:
    """Return full names of topic partitions, as in the broker."""
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
"""Metadata columns of the JVM connector, in the order in which they follow the value's."""


@dataclass(frozen=True)
class PulsarRows(Rows):
    """Rows with the names and types of the JVM connector's metadata columns."""

    names: Sequence[str] = field(kw_only=True)
    """Columns of the query."""

    def _made(
        self, raw: Iterable[pa.RecordBatch], report: Callable[[int], None] | None
    ) -> Iterator[pa.RecordBatch]:
        for batch in super()._made(raw, report):
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
        """Return all columns, and refuse wrong options when the query is built."""
        stream = seems_stream(self.options)
        with concise_errors():
            if stream:
                check_has(STREAMS)
            options, names, _ = translated(self.options, stream=stream)
        with as_spark_error(**names):
            source = parse_options(options) if stream else _bounded(options).source
            with placed(source.place):
                return _renamed(schema_of(self._planned_for(source), source.metadata_columns))

    def reader(self, schema: StructType) -> KeyShardBatchReader:
        """Return the reader of a batch. It plans when Spark asks for partitions."""
        with concise_errors():
            options, names, _ = translated(self.options, stream=False)
        with as_spark_error(**names):
            read = _bounded(options)
            rows = self._rows(read.source, _own(schema))
            read = replace(read, source=rows.source_of(read.source))
        return KeyShardBatchReader(read, _rows(schema, rows))

    def streamReader(self, schema: StructType) -> PulsarStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream. It connects when Spark asks for the first offset."""
        from spark_adapter.watched_process import watch_this_process  # noqa: PLC0415 - for streams

        with concise_errors():
            check_has(STREAMS)
            options, names, made_up = translated(self.options, stream=True)
        with as_spark_error(**names):
            source = parse_options(options)
        # Reading the schemas starts threads, which the fork would not copy.
        ended_at = watch_this_process(source.worker_host)
        from spark_adapter.pulsar.stream import PulsarStreamReader  # noqa: PLC0415 - see above

        with as_spark_error(**names):
            rows = self._rows(source, _own(schema))
            source = rows.source_of(source)
        return PulsarStreamReader(source, _rows(schema, rows), ended_at, made_up=made_up)

    def _write(self, schema: StructType) -> TopicWrite:
        from spark_adapter.pulsar.writing import write_of  # noqa: PLC0415 - for writes

        return write_of(self.options, schema)


def register_pulsar(spark: SparkSession) -> bool:
    """Register ``format("pulsar")``.

    Returns:
        ``False`` if the JVM connector is on the class path, and keeps the name.
    """
    try:
        spark.dataSource.register(PulsarDataSource)
    except AnalysisException as exc:
        if exc.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        return False
    return True


def _bounded(options: Mapping[str, str]) -> BoundedRead:
    """Parse the options of a batch read.

    Raises:
        ConfigError: An option is wrong, or asks for filters. Those would name the columns of this
            format, and its reader takes none.
    """
    read = parse_bounded(options)
    if read.pushes_filters:
        raise ConfigError(
            "Option 'pushFilters' is not supported by format('pulsar').",
            "Remove it, and limit the read by topic, positions, times or keys. Or use "
            "format('keyshard').",
        )
    return read


def _rows(schema: StructType, rows: Rows) -> PulsarRows:
    strict = strict_of(schema)
    return PulsarRows(rows.columns, rows.output, rows.plan, strict, names=schema.names)


def _renamed(own: StructType) -> StructType:
    """Rename keyshard's columns to those of the JVM connector.

    Raises:
        SchemaError: A field of the value has the name of a metadata column.
    """
    values = [one for one in own.fields if one.name == "value" or one.name not in COLUMNS]
    last = [one for one in values if one.name in SELECTABLE and one.name != "value"]
    last += [one for one in values if one.name == CORRUPT]
    values = [one for one in values if one not in last]
    for one in values:
        if one.name in METADATA:
            raise SchemaError(
                f"The schema of the topic has a field {one.name!r}, which is the name of a "
                "metadata column of format('pulsar').",
                "Use format('keyshard'), or set valueFormat=raw.",
            )
    metadata = [StructField(name, made.kind) for name, made in METADATA.items()]
    return StructType([*values, *metadata, *last])


def _own(schema: StructType) -> StructType:
    """Return the columns of keyshard that a query's columns are made from.

    Raises:
        ConfigError: A column has the wrong type.
    """
    found: dict[str, StructField] = {}
    for one in schema.toNullable().fields:
        made = METADATA.get(one.name)
        if made is None:
            found[one.name] = one
            continue
        if one.dataType != made.kind:
            raise ConfigError(
                f"Column {one.name!r} has type {one.dataType.simpleString()}, but "
                f"format('pulsar') has it as {made.kind.simpleString()}.",
                "Correct the type in schema(...).",
            )
        found |= {name: StructField(name, SELECTABLE[name]) for name in made.of}
    return StructType(list(found.values()))
