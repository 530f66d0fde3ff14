"""The plan of decoding: the schema of each topic, the columns, and the mode of a query.

A plan is fixed when a query is built. :func:`check_same` and :class:`Ledgers` tell when a topic was
created anew meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from keyshard.arrow.columns import COLUMNS, SCHEMA
from keyshard.broker.schemas import schema_of
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, SchemaError
from keyshard.redaction import shown
from keyshard.schemas.codecs import codec_of, same
from keyshard.schemas.projection import check_told, columns_of

FAILFAST, PERMISSIVE, DROPMALFORMED = MODES = ("FAILFAST", "PERMISSIVE", "DROPMALFORMED")
"""Handling of a value that cannot be decoded: an error, nulls beside its bytes, no row."""
CORRUPT = "_corrupt_record"
"""Column of the bytes that could not be decoded; null in other rows."""
RAW = TopicSchema("BYTES")
"""The schema of a topic that has none."""
WITHOUT_SCHEMA = (RAW.type, "NONE")
"""Types that say of values only that they are bytes."""

METADATA = frozenset(COLUMNS.names) - {"value"}
"""Columns that are keyshard's own."""
SEEN_MAX = 100
"""Ledgers of a topic partition that are remembered, the newest."""


@dataclass(frozen=True)
class Decoding:
    """The plan of a query; picklable."""

    connection: Connection
    schemas: Mapping[str, TopicSchema]
    """Schema that the values of each topic are decoded to, by its full name as rows have it:
    without the number of a partition."""
    mode: str = FAILFAST
    metadata: Sequence[str] = ()
    """Columns beside the default ones."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def columns(self) -> pa.Schema:
        """All columns there are, the decoded ones first.

        Raises:
            SchemaError: Topics differ in them, one is called like one of keyshard's, or a schema
                does not tell enough of one.
        """
        return self._columns(None)

    def _columns(self, names: Sequence[str] | None) -> pa.Schema:
        """The same, where some of them are wanted, or all."""
        found: dict[str, pa.DataType] | None = None
        first = ""
        for topic, schema in self.schemas.items():
            codec = codec_of(schema, topic)
            check_told(codec.untold, topic, names)
            columns = columns_of(codec.type)
            taken = sorted(columns.keys() & (METADATA | {CORRUPT}))
            if taken:
                raise SchemaError(
                    f"The schema of {topic} has a field {taken[0]!r}, which is a column of "
                    "keyshard's own. Set valueFormat=raw to get the bytes.",
                    topic=topic,
                )
            if found is None:
                found, first = columns, topic
            elif found != columns:
                raise SchemaError(
                    f"Topics {first} and {topic} have different schemas: {_listed(found)}; "
                    f"{_listed(columns)}. Give the columns that both have with schema(...), or set "
                    "valueFormat=raw to get the bytes.",
                    topic=topic,
                )
        decoded = {"value": pa.binary()} if found is None else found
        own = [COLUMNS.field(name) for name in (*SCHEMA.names[1:], *self.metadata)]
        corrupt = [pa.field(CORRUPT, pa.binary())] if self.mode == PERMISSIVE else []
        return pa.schema([*(pa.field(*one) for one in decoded.items()), *own, *corrupt])

    def only(self, names: Sequence[str]) -> pa.Schema:
        """Some of the columns, in the order they are named.

        Raises:
            ConfigError: One of them is not there.
            SchemaError: A schema does not tell enough of one.
        """
        columns = self._columns(names)
        for name in names:
            if name not in columns.names:
                raise ConfigError(
                    f"Column {shown(name)} is not there. There are: {', '.join(columns.names)}."
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
    """Ask for the schemas of topics, as they are now.

    Args:
        connection: Of the cluster.
        topics: Full names of topics, as rows have them.
        mode: One of :data:`MODES`.
        metadata: Columns beside the default ones.
        tries_s: As of :func:`keyshard.broker.schemas.schema_of`.

    Raises:
        BrokerUnavailableError: Neither interface answers.
        BrokerError: The broker refuses.
    """
    schemas = {topic: schema_of(connection, topic, tries_s=tries_s) or RAW for topic in topics}
    return Decoding(connection, schemas, mode, metadata)


def check_same(plan: Decoding, topics: Iterable[str] | None = None) -> None:
    """Check that a plan's versions are what they were: a topic that is created anew counts anew.

    One that was deleted is no error: what is read was fixed in the plan.

    Args:
        plan: Of the query.
        topics: Those of its topics that are asked for; ``None``: all.

    Raises:
        SchemaError: One is another schema now, by which the plan's values would be others.
        BrokerUnavailableError: Nobody answers.
        BrokerError: Who answers refuses.
    """
    for topic in plan.schemas if topics is None else topics:
        schema = plan.schemas.get(topic, RAW)
        if schema.type in WITHOUT_SCHEMA:
            continue
        now = schema_of(plan.connection, topic, schema.version)
        if now is None:
            # What is registered behind a deleted version has a higher number.
            newest = schema_of(plan.connection, topic)
            other = newest is not None and newest.version < schema.version
        else:
            other = not same(now, schema, topic)
        if other:
            raise SchemaError(
                f"{topic} was created anew since the query was built: version {schema.version} of "
                "its schema is not what it was, and values would be read wrong. Build the "
                "query again.",
                topic=topic,
            )


class Ledgers:
    """The ledgers that entries of a stream came from.

    A topic that is deleted and created again has other ledgers. Consumers may find it before a look
    for topics does, and what they get is not to be read by the schemas that it had.
    """

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, set[int]] = {}
        self.followed = 0
        """Ledgers that were not the first of their topic partition."""

    def new(self, batch: Mapping[TopicPartition, EntrySet]) -> set[str]:
        """Topics of which a batch has an entry in a ledger that none before had.

        Args:
            batch: Its entries.
        """
        found: set[str] = set()
        for where, entries in batch.items():
            seen = self._seen.setdefault(where, set())
            came = {ledger for ledger, _, _ in entries.runs()} - seen
            if came:
                found.add(where.topic)
                self.followed += bool(seen)
                seen |= came
                seen.difference_update(sorted(seen)[:-SEEN_MAX])
        return found
