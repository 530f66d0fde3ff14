"""``format("keyshard")``: the data source that Spark looks up by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from keyshard import KeyShardSource
from keyshard.errors import ConfigError
from keyshard.reading.decoding_plan import Decoding
from spark_adapter.batch_reader import FilteringBatchReader, KeyShardBatchReader
from spark_adapter.bounded_options import is_of_streams, parse_bounded
from spark_adapter.options import parse_options
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.structure import Rows, needs_no_schema, plan_of, rows_of, schema_of
from spark_adapter.table_options import check_takes_no_filters, is_table, options_of
from spark_adapter.wording import told_in_short, told_to_spark


class KeyShardDataSource(DataSource):
    """Pulsar topics: as a stream over hash ranges, or what they hold as a batch."""

    _plan: Decoding | None = None
    """What :meth:`schema` found: Spark takes this object along to where readers are made."""
    _planned = False
    """Whether the schemas of the topics were asked for."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format(...)``."""
        return "keyshard"

    def schema(self) -> StructType:
        """What a query has that names no columns; wrong options are refused at once."""
        with told_in_short():
            source = _source_of(self.options)
        with told_to_spark():
            return schema_of(self._planned_for(source), source.metadata_columns)

    def reader(self, schema: StructType) -> KeyShardBatchReader:
        """The reader of one batch; plans when Spark asks for partitions."""
        with told_in_short():
            read = parse_bounded(options_of(schema, self.options))
            if is_table(schema, self.options):
                check_takes_no_filters(read)
        rows = self._rows(read.source, schema)
        kind = FilteringBatchReader if read.pushes_filters else KeyShardBatchReader
        return kind(replace(read, source=rows.source_of(read.source)), rows)

    def streamReader(self, schema: StructType) -> KeyShardStreamReader:  # noqa: N802 - Spark's name
        """The reader of one query; connects when Spark asks for the first offset."""
        with told_in_short():
            source = parse_options(options_of(schema, self.options, stream=True))
        rows = self._rows(source, schema)
        return KeyShardStreamReader(rows.source_of(source), rows)

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: ARG002
        """Refuses to write."""
        raise self._reads_only()

    def streamWriter(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: ARG002, N802
        """Refuses to write."""
        raise self._reads_only()

    def _reads_only(self) -> ConfigError:
        return ConfigError(
            f"format({self.name()!r}) of keyshard is a source for reading only; no save mode or "
            "option makes it write. To write to a topic, send the rows with a producer of "
            "pulsar-client: of a DataFrame in foreachPartition, of a stream in foreachBatch."
        )

    def _rows(self, source: KeyShardSource, schema: StructType) -> Rows:
        """The conversion of rows to the columns of a query."""
        with told_to_spark():
            if needs_no_schema(schema, source.malformed):
                return rows_of(schema, None)
            return rows_of(schema, self._planned_for(source))

    def _planned_for(self, source: KeyShardSource) -> Decoding | None:
        """The plan of a query, by the schemas that its topics declare; they are asked for once."""
        if not self._planned:
            self._plan, self._planned = plan_of(source), True
        return self._plan


def _source_of(options: Mapping[str, str]) -> KeyShardSource:
    """What is read. Spark does not tell how: a stream has options that no batch read has."""
    if {"owner", "provider"} <= {name.lower() for name in options}:
        raise ConfigError(
            "Spark gives the options of a table to nobody who reads it: CREATE TABLE ... USING "
            "keyshard cannot work. Let spark_adapter.catalog.sync make tables."
        )
    of_streams = [name for name in options if is_of_streams(name)]
    if of_streams and "subscription" not in {name.lower() for name in options}:
        raise ConfigError(
            f"Option 'subscription' is missing: option {of_streams[0]!r} is one of a stream "
            "(spark.readStream), which has to name the Pulsar subscription that holds its backlog. "
            "A batch read has neither of them. Add 'subscription', or remove what is of streams."
        )
    if of_streams:
        return parse_options(options)
    return parse_bounded(options).source
