"""The options of a table of the catalog, which are kept beside its columns.

Spark keeps the options of a table of a Python data source, and shows them to nobody who reads it
(docs/adr/0027): its columns with their metadata are all that a reader is given. Whatever is written
from such a column may keep its metadata, so no secret may be among the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

from keyshard.errors import ConfigError
from spark_adapter.bounded_options import BoundedRead, is_of_streams
from spark_adapter.option_table import BATCH_OPTIONS, OPTIONS

_KEY = "keyshard"
_TOPICS = {"topics", "topics_pattern"}
_STREAM = {option.name.lower(): option.field for option in OPTIONS}
_BATCH = {option.name.lower(): option.field for option in BATCH_OPTIONS}


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The columns of a table that is read with options."""
    *others, last = schema.fields
    said = {_KEY: json.dumps(dict(options), sort_keys=True)}
    return StructType([*others, StructField(last.name, last.dataType, last.nullable, said)])


def options_of(
    schema: StructType, given: Mapping[str, str], *, stream: bool = False
) -> Mapping[str, str]:
    """The options of a query: its own, before those of the table whose columns it has.

    Args:
        schema: Columns of the query.
        given: Its own options. Where they name topics, it reads no table.
        stream: Whether it is one; each kind has options that the other does not take.
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
    """Whether a query reads a table: it has the columns of one, and names no topics itself."""
    own = {_STREAM.get(name.lower()) for name in given}
    return not own & _TOPICS and any(_KEY in one.metadata for one in schema.fields)


def check_takes_no_filters(read: BoundedRead) -> None:
    """Check that a table keeps its filters with Spark.

    A statement may use a table several times, and Spark plans such uses once, by the filters of one
    of them (docs/adr/0030).

    Raises:
        ConfigError: It does not.
    """
    if read.pushes_filters:
        raise ConfigError(
            "Option 'pushFilters' is not one of tables: a statement that uses a table twice, as a "
            "union, a join with itself or a subquery does, would lack rows. Remove it, and choose "
            "what is read by topic, positions, times or keys; or use "
            "spark.read.format('keyshard').load() once for each query."
        )


def of_streams(name: str) -> bool:
    """Whether an option is not one of batch reads alone."""
    return name.lower() in _STREAM or name.lower() not in _BATCH


def of_batches(name: str) -> bool:
    """Whether an option is not one of streams alone."""
    return not is_of_streams(name)
