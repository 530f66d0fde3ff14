"""The options of a catalog table, stored in the metadata of its columns.

Spark stores the options of a table of a Python data source, but does not pass them to the reader
(docs/adr/0027). A reader gets only the columns with their metadata. Data written from such a column
may keep the metadata, so the options must not contain secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

from keyshard.errors import ConfigError
from spark_adapter.option_parsing import BoundedRead, is_of_streams
from spark_adapter.options import BATCH_OPTIONS, OPTIONS

_KEY = "keyshard"
_TOPICS = {"topics", "topics_pattern"}
_STREAM = {option.name.lower(): option.field for option in OPTIONS}
_BATCH = {option.name.lower(): option.field for option in BATCH_OPTIONS}


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return the columns of a table, with its options in the last column's metadata."""
    *others, last = schema.fields
    said = {_KEY: json.dumps(dict(options), sort_keys=True)}
    return StructType([*others, StructField(last.name, last.dataType, last.nullable, said)])


def options_of(
    schema: StructType, given: Mapping[str, str], *, stream: bool = False
) -> Mapping[str, str]:
    """Return the options of a query, merged with those of its table; the query's own win.

    Args:
        schema: Columns of the query.
        given: Options of the query. If they name topics, the query reads no table.
        stream: Whether the query is a stream; options of the other kind are dropped.
    """
    if not is_table(schema, given):
        return given
    said = next(one.metadata[_KEY] for one in schema.fields if _KEY in one.metadata)
    fields = _STREAM if stream else _STREAM | _BATCH
    own = {fields.get(name.lower(), name.lower()) for name in given}
    fits = of_streams if stream else of_batches
    of_table = {
        name: text
        for name, text in json.loads(said).items()
        if fits(name) and fields.get(name.lower(), name.lower()) not in own
    }
    return {**of_table, **given}


def is_table(schema: StructType, given: Mapping[str, str]) -> bool:
    """Whether a query reads a table: its columns carry options, and it names no topics."""
    own = {_STREAM.get(name.lower()) for name in given}
    return not own & _TOPICS and any(_KEY in one.metadata for one in schema.fields)


def check_takes_no_filters(read: BoundedRead) -> None:
    """Refuse the option ``pushFilters`` for a table.

    A statement may use a table several times. Spark plans all uses once, with the filters of one of
    them (docs/adr/0030).

    Raises:
        ConfigError: The option is set.
    """
    if read.pushes_filters:
        raise ConfigError(
            "Option 'pushFilters' is not supported for tables. A statement that uses a table "
            "twice, such as a union or a self-join, would lose rows.",
            "Remove it, and limit the read by topic, positions, times or keys. Or use "
            "spark.read.format('keyshard').load() once for each query.",
        )


def of_streams(name: str) -> bool:
    """Whether a stream accepts the option; true also for unknown options."""
    return name.lower() in _STREAM or name.lower() not in _BATCH


def of_batches(name: str) -> bool:
    """Whether a batch read accepts the option; true also for unknown options."""
    return not is_of_streams(name)
