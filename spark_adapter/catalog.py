"""Topics as tables: a namespace becomes a database, a topic a table ``USING keyshard``.

::

    from spark_adapter import catalog

    catalog.sync(spark, ["public"], options={"service.url": ..., "admin.url": ...})
    spark.sql("SELECT * FROM `public/default`.orders")
    spark.readStream.option("subscription", "billing").table("`public/default`.orders")

A table has the columns that its topic had at the last sync. The next sync finds new, changed and
deleted topics. The table of a scalable topic is named ``topic://orders``.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import PySparkTypeError

from keyshard import KeyShardSource
from keyshard.base_error import one_line
from keyshard.broker.admin.port import Admin
from keyshard.broker.schemas import asked_first
from keyshard.config.connection import Connection
from keyshard.core.position.entry import is_system_topic
from keyshard.errors import ConfigError, SchemaError
from keyshard.redaction import Secret, shown
from spark_adapter.error_text import as_spark_error
from spark_adapter.option_parsing import parse_bounded, parse_options
from spark_adapter.query_columns import plan_of, schema_of
from spark_adapter.session_catalog import (
    SessionCatalog,
    TableName,
    columns_alike,
    named,
    steps,
    table_of,
)
from spark_adapter.table_options import (
    check_takes_no_filters,
    of_batches,
    of_streams,
    with_options,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)
_TOPICS = {"topic", "topics", "topicspattern"}
_one_at_a_time = threading.Lock()
"""Runs one sync at a time. This process is the only driver of its JVM, so a lock is enough."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of a sync. Tables are named as in SQL."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Tables whose columns or options have changed."""
    dropped: tuple[str, ...] = ()
    raw: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Reasons by table whose ``value`` is bytes, because its schema cannot become columns."""
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Reasons by topic or namespace that has no table."""


def sync(
    spark: SparkSession,
    tenants: Sequence[str] = ("public",),
    namespaces: Sequence[str] | None = None,
    *,
    options: Mapping[str, str] | None = None,
) -> Synced:
    """Create, change and drop tables so that the session's catalog matches the topics.

    The sync reads every topic before it changes a table. It changes and drops only tables that a
    sync with the same ``service.url`` made. System topics (``__...``) get no table. The names of
    tables of scalable topics begin with ``topic://`` (ADR 59).

    Args:
        spark: A session. All sessions of its application share the catalog.
        tenants: Tenants whose namespaces become databases ``tenant/namespace``.
        namespaces: Only these namespaces, as ``tenant/namespace``, instead of ``tenants``.
        options: Options of the tables, as for ``format("keyshard")``; ``admin.url`` is required.
            Streams ignore options of batch reads, and batch reads ignore options of streams.
            Options of a query override those of its table. The options are visible in the schema
            of the tables.

    Raises:
        ConfigError: An option or a name is wrong, an option contains a secret, or the session's
            catalog cannot have such tables.
        BrokerError: The admin interface does not answer, or refuses. Nothing has changed.
    """
    with as_spark_error():
        if getattr(spark, "_jvm", None) is None:
            raise ConfigError(
                "catalog.sync() needs the process of the SparkContext, but this session uses "
                "Spark Connect.",
                "Run it on the server, or read topics with format('keyshard').",
            )
        given = {str(name): str(text) for name, text in (options or {}).items()}
        source = _checked(given)
        catalog = SessionCatalog(spark, source.service_url)
        scope = _Namespaces.of(tenants, namespaces)
        with _one_at_a_time:
            topics = _topics(source.how_to_connect(), scope)
            return _Sync(catalog, source, given).run(scope, topics)


@dataclass(frozen=True)
class _Namespaces:
    """The databases of a sync."""

    tenants: Sequence[str]
    namespaces: Sequence[str] | None

    @classmethod
    def of(cls, tenants: Sequence[str], namespaces: Sequence[str] | None) -> _Namespaces:
        scope = cls(_several(tenants), None if namespaces is None else _several(namespaces))
        for tenant in scope.tenants:
            if not tenant or "/" in tenant:
                raise ConfigError(
                    f"tenants contains {shown(tenant)}, which is not the name of a tenant.",
                    "Correct it.",
                )
        for one in scope.namespaces or ():
            if one.count("/") != 1 or not all(one.split("/")):
                raise ConfigError(f"namespaces contains {shown(one)}.", "Write 'tenant/namespace'.")
        return scope

    def has(self, namespace: str | None) -> bool:
        """Whether the sync covers a namespace, even if the namespace no longer exists."""
        if namespace is None:
            return False
        if self.namespaces is not None:
            return namespace in self.namespaces
        return namespace.partition("/")[0] in self.tenants


def _several(names: Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def _checked(options: Mapping[str, str]) -> KeyShardSource:
    """Check the options of the tables with a topic name that stands for all topics."""
    for name in options:
        if name.lower() in _TOPICS:
            raise ConfigError(
                f"Option {name!r} cannot be set for all tables, because each table has its own "
                "topic.",
                "Remove it.",
            )
    check_takes_no_filters(
        parse_bounded({"topic": "any"} | {n: text for n, text in options.items() if of_batches(n)})
    )
    source = parse_options(
        {"topic": "any", **_subscribed(options)}
        | {name: text for name, text in options.items() if of_streams(name)}
    )
    connection = source.how_to_connect()
    if connection.admin_url is None:
        raise ConfigError(
            "catalog.sync() needs the admin interface, which lists the topics.",
            "Set admin_url in options.",
        )
    said = connection.authentication
    values = [getattr(said, one.name) for one in dataclasses.fields(said)] if said else []
    if any(isinstance(value, Secret) for value in values) or "@" in connection.admin_url:
        raise ConfigError(
            "options contains a secret, which would be visible in the tables and in files that "
            "are written from them.",
            "Use a file or an environment variable instead: authParams 'file:///path', "
            "'env:NAME', or oauth2 with privateKey.",
        )
    return source


def _subscribed(options: Mapping[str, str]) -> dict[str, str]:
    has = any(name.lower() == "subscription" for name in options)
    return {} if has else {"subscription": "any"}


def _topics(connection: Connection, scope: _Namespaces) -> dict[str, list[str]]:
    """List full topic names by namespace; any failed request fails the sync."""

    def listed(admin: Admin) -> dict[str, list[str]]:
        names = scope.namespaces
        if names is None:
            names = [f"{one}/{of}" for one in scope.tenants for of in admin.namespaces(one)]
        return {one: topics_of(admin, *one.split("/")) for one in sorted(names)}

    return asked_first(connection, listed)


def topics_of(admin: Admin, tenant: str, namespace: str) -> list[str]:
    """Return the full names of all topics of a namespace, ascending."""
    scalable = admin.scalable_topics(tenant, namespace) or set()
    return sorted(admin.topics(tenant, namespace) | scalable)


class _Sync:
    def __init__(
        self, catalog: SessionCatalog, source: KeyShardSource, options: Mapping[str, str]
    ) -> None:
        self._catalog = catalog
        self._source = source
        self._options = options
        self._schemas: dict[TableName, StructType] = {}
        self._raw: dict[str, str] = {}
        self._left: dict[str, str] = {}

    def run(self, scope: _Namespaces, topics: Mapping[str, Sequence[str]]) -> Synced:
        before = self._catalog.databases()
        databases = self._named(topics)
        for database, namespace in tuple(databases.items()):
            if before.get(database, namespace) != namespace:
                self._left[namespace] = self._taken(f"database `{database}`")
                del databases[database]
        for database, namespace in databases.items():
            self._look(database, topics[namespace])
        gone = [
            name for name, of in before.items() if scope.has(of) and databases.get(name) is None
        ]
        there = {
            name: table
            for database in [*(databases.keys() & before.keys()), *gone]
            for name, table in self._catalog.tables(database).items()
        }
        todo = steps({name: one.jsonValue() for name, one in self._schemas.items()}, there)
        for name in todo.taken:
            self._left[str(name)] = self._taken(f"table {name}")
        for database in sorted(databases.keys() - before.keys()):
            self._catalog.create_database(database, databases[database])
        for name in todo.create:
            self._catalog.create(name, self._schemas[name])
        for name in todo.change:
            self._catalog.change(name, self._schemas[name])
        for name in todo.drop:
            self._catalog.drop(name)
        for database in gone:
            if not self._catalog.tables(database):
                self._catalog.drop_database(database)
        _log.info(
            "catalog: %d tables created, %d changed, %d dropped; %d topics or namespaces left out",
            len(todo.create), len(todo.change), len(todo.drop), len(self._left),
        )  # fmt: skip
        created, changed, dropped = (
            tuple(map(str, some)) for some in (todo.create, todo.change, todo.drop)
        )
        return Synced(created, changed, dropped, self._raw, self._left)

    def _taken(self, what: str) -> str:
        return (
            f"a {what} exists that no sync with {self._source.service_url} created. Drop it, or "
            "rename it"
        )

    def _named(self, originals: Iterable[str]) -> dict[str, str]:
        """Return originals by their name in the catalog; note those without a name."""
        found, left = named(originals, case_sensitive=self._catalog.case_sensitive)
        for one in left:
            self._left[one] = (
                "another name differs only in case, and Spark ignores case. Set "
                "spark.sql.caseSensitive to true"
            )
        return found

    def _look(self, database: str, topics: Sequence[str]) -> None:
        """Work out the tables of a database."""
        _log.info("catalog: %s has %d topics", database, len(topics))
        by_name = {table_of(full): full for full in topics if not is_system_topic(full)}
        for table, own in self._named(by_name).items():
            name = TableName(database, table)
            options = {**self._options, "topic": by_name[own]}
            try:
                source = dataclasses.replace(self._source, topics=[by_name[own]])
            except ConfigError as exc:  # one bad topic name must not fail the sync
                self._left[by_name[own]] = exc.message
                continue
            columns, why = self._columns(source)
            if why:
                options = {n: one for n, one in options.items() if n.lower() != "valueformat"}
                options["valueFormat"] = "raw"
                self._raw[str(name)] = why
            self._schemas[name] = with_options(columns, options)

    def _columns(self, source: KeyShardSource) -> tuple[StructType, str]:
        """Return the columns of a topic and, if its schema cannot be columns, the reason."""
        try:
            columns = schema_of(plan_of(source), source.metadata_columns)
        except (SchemaError, PySparkTypeError) as exc:
            return schema_of(None, source.metadata_columns), one_line(exc)
        twice = columns_alike(columns.names, case_sensitive=self._catalog.case_sensitive)
        if twice is not None:
            raw = schema_of(None, source.metadata_columns)
            return raw, f"column {twice!r} differs from another column only in case"
        return columns, ""
