"""The plan of decoding: the schema of each topic, the columns, and the mode of a query.

A plan is fixed when a query is built. :func:`check_same` detects a topic that was created again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from keyshard.broker.schemas import schema_of
from keyshard.columns.codec import AS_BYTES
from keyshard.columns.codecs import codec_of, same
from keyshard.columns.projection import check_described, columns_of
from keyshard.columns.record_batches import COLUMNS, SCHEMA
from keyshard.config.connection import Connection
from keyshard.config.source import FAILFAST, PERMISSIVE
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import scalable_topic_of
from keyshard.errors import ConfigError, SchemaError
from keyshard.redaction import shown

CORRUPT = "_corrupt_record"
"""Column with the bytes that could not be decoded; null in other rows."""
RAW = TopicSchema("BYTES")
"""The schema of a topic without one."""
WITHOUT_SCHEMA = (RAW.type, "NONE")
"""Types whose values are plain bytes."""

METADATA = frozenset(COLUMNS.names) - {"value"}
"""keyshard's own columns."""


@dataclass(frozen=True)
class Decoding:
    """The plan of a query; picklable."""

    connection: Connection
    schemas: Mapping[str, TopicSchema]
    """Schema for the values of each topic. Keys are full topic names without partition number, as
    in rows."""
    mode: str = FAILFAST
    metadata: Sequence[str] = ()
    """Columns in addition to the default ones."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def columns(self) -> pa.Schema:
        """All columns, the decoded ones first.

        Raises:
            SchemaError: Topics have different columns, a column has the name of one of keyshard's,
                or a schema does not describe a column completely.
        """
        return self._columns(None)

    def _columns(self, names: Sequence[str] | None) -> pa.Schema:
        """Return all columns; check only those in ``names``, or all."""
        found: dict[str, pa.DataType] | None = None
        first = ""
        for topic, schema in self.schemas.items():
            codec = codec_of(schema, topic)
            check_described(codec.undescribed, topic, names)
            columns = columns_of(codec.type)
            taken = sorted(columns.keys() & (METADATA | {CORRUPT}))
            if taken:
                raise SchemaError(
                    f"The schema of {topic} has a field {taken[0]!r}, which is the name of a "
                    "metadata column.",
                    AS_BYTES,
                    topic=topic,
                )
            if found is None:
                found, first = columns, topic
            elif found != columns:
                raise SchemaError(
                    f"Topics {first} and {topic} have different schemas: {_listed(found)}; "
                    f"{_listed(columns)}.",
                    "Select the common columns with schema(...), or set valueFormat=raw to get "
                    "the bytes.",
                    topic=topic,
                )
        decoded = {"value": pa.binary()} if found is None else found
        own = [COLUMNS.field(name) for name in (*SCHEMA.names[1:], *self.metadata)]
        corrupt = [pa.field(CORRUPT, pa.binary())] if self.mode == PERMISSIVE else []
        return pa.schema([*(pa.field(*one) for one in decoded.items()), *own, *corrupt])

    def only(self, names: Sequence[str]) -> pa.Schema:
        """Return some of the columns, in the order of ``names``.

        Raises:
            ConfigError: A column does not exist.
            SchemaError: A schema does not describe a column completely.
        """
        columns = self._columns(names)
        for name in names:
            if name not in columns.names:
                raise ConfigError(
                    f"Column {shown(name)} does not exist.",
                    f"The columns are: {', '.join(columns.names)}.",
                )
        return pa.schema([columns.field(name) for name in names])


def _listed(columns: Mapping[str, pa.DataType]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def plan_decoding(
    connection: Connection,
    topics: Iterable[str],
    mode: str = FAILFAST,
    metadata: Sequence[str] = (),
    *,
    tries_s: float | None = None,
) -> Decoding:
    """Read the present schemas of topics, and make a plan.

    Args:
        connection: The cluster.
        topics: Full names of topics, as in rows.
        mode: One of :data:`keyshard.config.source.MODES`.
        metadata: Columns in addition to the default ones.
        tries_s: As in :func:`keyshard.broker.schemas.schema_of`.

    Raises:
        BrokerUnavailableError: No answer; see :func:`keyshard.broker.schemas.schema_of`.
        BrokerError: The broker refuses.
    """
    schemas = {topic: schema_of(connection, topic, tries_s=tries_s) or RAW for topic in topics}
    return Decoding(connection, schemas, mode, metadata)


def check_same(plan: Decoding, topics: Iterable[str] | None = None) -> None:
    """Check that the schema versions of a plan are unchanged.

    If a topic is created again, its versions start again. A deleted topic is no error, because the
    plan has its schema.

    Args:
        plan: The plan of the query.
        topics: Topics to check; ``None``: all.

    Raises:
        SchemaError: A version is another schema now, so values would be decoded wrongly.
        BrokerUnavailableError: No answer; see :func:`keyshard.broker.schemas.schema_of`.
        BrokerError: The broker refuses.
    """
    for topic in plan.schemas if topics is None else topics:
        schema = plan.schemas.get(scalable_topic_of(topic), RAW)
        if schema.type in WITHOUT_SCHEMA:
            continue
        now = schema_of(plan.connection, topic, schema.version)
        if now is None:
            # Version numbers go on after a deletion of the schema, but not of the topic.
            newest = schema_of(plan.connection, topic)
            other = newest is not None and newest.version < schema.version
        else:
            other = not same(now, schema, topic)
        if other:
            raise SchemaError(
                f"{topic} was created again after the query was built, and version "
                f"{schema.version} of its schema has changed.",
                "Build the query again.",
                topic=topic,
            )
