"""``format("keyshard")``: the data source that Spark finds by its name.

Spark pickles it into every task, which only asks for its name. So a method imports what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter
from pyspark.sql.types import StructType

from keyshard.base_error import placed
from keyshard.errors import ConfigError
from spark_adapter.error_text import as_spark_error, concise_errors
from spark_adapter.preflight import FILTERS, STREAM_WRITES, STREAMS, check_has

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter

    from keyshard import KeyShardSource
    from keyshard.reading.decoding_plan import Decoding
    from spark_adapter.batch_reader import KeyShardBatchReader
    from spark_adapter.stream_reader import KeyShardStreamReader
    from spark_adapter.task_rows import Rows
    from spark_adapter.topic_writer import TopicWrite


class KeyShardDataSource(DataSource):
    """Pulsar topics as a stream over hash ranges or as a bounded batch, and a topic to write to."""

    _plan: Decoding | None = None
    """Result of :meth:`schema`. Spark pickles this object to the processes that make readers."""
    _planned = False
    """Whether ``_plan`` is set."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format(...)``."""
        return "keyshard"

    def schema(self) -> StructType:
        """Return the columns of a query that names none, and refuse wrong options at once."""
        from spark_adapter.query_columns import schema_of  # noqa: PLC0415 - see above

        with concise_errors():
            source = _source_of(self.options)
        with as_spark_error(), placed(source.place):
            return schema_of(self._planned_for(source), source.metadata_columns)

    def reader(self, schema: StructType) -> KeyShardBatchReader:
        """Return the reader of a batch. It plans when Spark asks for partitions."""
        from spark_adapter import batch_reader  # noqa: PLC0415 - see above
        from spark_adapter.option_parsing import parse_bounded  # noqa: PLC0415
        from spark_adapter.table_options import (  # noqa: PLC0415
            check_takes_no_filters,
            is_table,
            options_of,
        )

        with concise_errors():
            read = parse_bounded(options_of(schema, self.options))
            if read.pushes_filters:
                check_has(FILTERS)
            if is_table(schema, self.options):
                check_takes_no_filters(read)
        rows = self._rows(read.source, schema)
        filtering = read.pushes_filters
        kind = batch_reader.FilteringBatchReader if filtering else batch_reader.KeyShardBatchReader
        return kind(replace(read, source=rows.source_of(read.source)), rows)

    def streamReader(self, schema: StructType) -> KeyShardStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream. It connects when Spark asks for the first offset."""
        from spark_adapter.option_parsing import parse_options  # noqa: PLC0415 - see above
        from spark_adapter.table_options import options_of  # noqa: PLC0415
        from spark_adapter.watched_process import watch_this_process  # noqa: PLC0415

        with concise_errors():
            check_has(STREAMS)
            source = parse_options(options_of(schema, self.options, stream=True))
        ended_at = watch_this_process(source.worker_host)
        from spark_adapter.stream_reader import KeyShardStreamReader  # noqa: PLC0415 - see above

        rows = self._rows(source, schema)
        return KeyShardStreamReader(rows.source_of(source), rows, ended_at)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of a DataFrame. Its tasks connect."""
        from spark_adapter.topic_writer import KeyShardBatchWriter  # noqa: PLC0415 - for writes

        with as_spark_error():
            if overwrite:
                raise ConfigError(
                    "keyshard cannot write with mode('overwrite'), because it does not delete "
                    "messages of a topic.",
                    "Use mode('append').",
                )
            write = self._write(schema)
            write.check_reading()
            return KeyShardBatchWriter(write)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Return the writer of a micro-batch. Its tasks connect."""
        with as_spark_error():
            check_has(STREAM_WRITES)
            from spark_adapter.stream_writer import KeyShardStreamWriter  # noqa: PLC0415 - see above

            if overwrite:
                raise ConfigError(
                    "keyshard cannot write with outputMode('complete'), because it does not "
                    "delete messages of a topic.",
                    "Use outputMode('append') or 'update'.",
                )
            return KeyShardStreamWriter(self._write(schema))

    def _write(self, schema: StructType) -> TopicWrite:
        """Parse the options of a write."""
        from spark_adapter.topic_writer import TopicWrite  # noqa: PLC0415 - for writes
        from spark_adapter.write_options import parse_write  # noqa: PLC0415

        return TopicWrite(parse_write(self.options, schema))

    def _rows(self, source: KeyShardSource, schema: StructType) -> Rows:
        """Return the conversion of rows to the columns of a query."""
        from spark_adapter.query_columns import needs_no_schema, rows_of  # noqa: PLC0415 - see above

        with as_spark_error(), placed(source.place):
            if needs_no_schema(schema, source.malformed):
                return rows_of(schema, None)
            return rows_of(schema, self._planned_for(source))

    def _planned_for(self, source: KeyShardSource) -> Decoding | None:
        """Return the decoding plan for the declared schemas; the first call asks the broker."""
        if not self._planned:
            from spark_adapter.query_columns import plan_of  # noqa: PLC0415 - see above

            self._plan, self._planned = plan_of(source), True
        return self._plan


def _source_of(options: Mapping[str, str]) -> KeyShardSource:
    """Parse options to a source. Spark does not say whether the query is a stream.

    Options that only a stream has mark a stream.
    """
    from spark_adapter.option_parsing import (  # noqa: PLC0415 - see above
        is_of_streams,
        parse_bounded,
        parse_options,
    )

    if {"owner", "provider"} <= {name.lower() for name in options}:
        raise ConfigError(
            "CREATE TABLE ... USING keyshard is not supported, because Spark hides the options "
            "of a table from its data source.",
            "Create tables with spark_adapter.catalog.sync.",
        )
    of_streams = [name for name in options if is_of_streams(name)]
    if of_streams and "subscription" not in {name.lower() for name in options}:
        raise ConfigError(
            f"Option 'subscription' is missing, but option {of_streams[0]!r} belongs to streams "
            "(spark.readStream). A stream needs the subscription that holds its backlog; a batch "
            "read has neither option.",
            "Set 'subscription', or remove the options of streams.",
        )
    if of_streams:
        check_has(STREAMS)
        return parse_options(options)
    return parse_bounded(options).source
