"""Divides rows by the topic that each of them names."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import compute

from keyshard.columns.outgoing import TOPIC
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import ConfigError

TOPICS_MAX = 1_000
"""Most topics of a batch. Each topic partition with rows has a producer of its own."""


def by_topic(
    batch: pa.RecordBatch | pa.Table, default: str
) -> dict[str, pa.RecordBatch | pa.Table]:
    """Divide rows by column ``__topic``, and remove it. The rows of a topic keep their order.

    Args:
        batch: Rows, with or without the column.
        default: Full name of the topic of rows without the column.

    Returns:
        Rows by full topic name, ascending; without rows, only the default.

    Raises:
        ConfigError: The rows are not Arrow rows, the column is not text, a row has no topic, or a
            name is not valid.
    """
    if not isinstance(batch, pa.RecordBatch | pa.Table):
        raise ConfigError(
            f"The rows are a {type(batch).__name__}.",
            "Give a pyarrow.Table or RecordBatch, such as pyarrow.Table.from_pandas(rows).",
        )
    if TOPIC not in batch.schema.names:
        return {default: batch}
    column = batch.column(TOPIC)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ConfigError(f"Column {TOPIC} has the type {column.type}; it must be text.")
    rest = batch.drop_columns([TOPIC])
    if not len(column):
        return {default: rest}
    if column.null_count:
        row = compute.index(compute.is_null(column), value=True).as_py()
        raise ConfigError(
            f"Column {TOPIC} is null in {column.null_count} of {len(column)} rows, first in row "
            f"{row}.",
            "Give each row a topic, or remove such rows.",
        )
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    encoded = column.dictionary_encode()
    names = [full_topic_name(name.strip()) for name in encoded.dictionary.to_pylist()]
    topics = sorted(set(names))
    if len(topics) > TOPICS_MAX:
        raise ConfigError(
            f"Column {TOPIC} has {len(topics)} topics, more than the limit of {TOPICS_MAX} in a "
            "batch.",
            "Write fewer rows at a time.",
        )
    if len(topics) == 1:
        return {topics[0]: rest}
    places = {topic: place for place, topic in enumerate(topics)}
    codes = pa.array([places[name] for name in names], pa.int32()).take(encoded.indices)
    rest = rest.take(compute.sort_indices(codes))
    counts = {one["values"]: one["counts"] for one in compute.value_counts(codes).to_pylist()}
    found, start = {}, 0
    for place, topic in enumerate(topics):
        found[topic] = rest.slice(start, counts[place])
        start += counts[place]
    return found
