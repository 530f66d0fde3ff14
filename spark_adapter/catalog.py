"""Topics as tables: of a namespace a database, of a topic a table ``USING keyshard``.

::

    from spark_adapter import catalog

    catalog.sync(spark, ["public"], options={"service.url": ..., "admin.url": ...})
    spark.sql("SELECT * FROM `public/default`.orders")
    spark.readStream.option("subscription", "billing").table("`public/default`.orders")

Tables have the columns that their topics have at the sync; what is new, changed or gone since is
seen at the next one.
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
from keyshard.broker.port import Admin
from keyshard.broker.schemas import asked_first
from keyshard.config.connection import Connection
from keyshard.core.position.entry import is_system_topic
from keyshard.errors import ConfigError, SchemaError
from keyshard.redaction import Secret, shown
from spark_adapter.bounded_options import parse_bounded
from spark_adapter.catalog_plan import TableName, columns_alike, named, steps
from spark_adapter.options import parse_options
from spark_adapter.session_catalog import SessionCatalog
from spark_adapter.structure import plan_of, schema_of
from spark_adapter.table_options import (
    check_takes_no_filters,
    of_batches,
    of_streams,
    with_options,
)
from spark_adapter.wording import told_to_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_log = logging.getLogger(__name__)
_TOPICS = {"topic", "topics", "topicspattern"}
_one_at_a_time = threading.Lock()
"""Of this process, which has the only driver of its JVM: what one sync makes another would, too."""


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync did. Tables are named as SQL does."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Other columns or options than before."""
    dropped: tuple[str, ...] = ()
    raw: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tables of bytes, because the schema of their topic cannot be columns: and why."""
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Topics and namespaces that have no table: and why."""


def sync(
    spark: SparkSession,
    tenants: Sequence[str] = ("public",),
    namespaces: Sequence[str] | None = None,
    *,
    options: Mapping[str, str] | None = None,
) -> Synced:
    """Make the tables of a session's catalog those of the topics there are now.

    Every topic is looked at before a table is touched. Tables that a sync with the same
    ``service.url`` did not make are left alone. System topics (``__...``) have none.

    Args:
        spark: A session; all of its application have the same catalog.
        tenants: Whose namespaces, each a database ``tenant/namespace``.
        namespaces: Instead of all: these, as ``tenant/namespace``.
        options: How tables are read, as ``format("keyshard")`` has them: ``admin.url``, which is
            needed, and others; those of streams count for streams, those of batch reads for batch
            reads, and both before what a query says itself. Columns of tables show them.

    Raises:
        ConfigError: An option or a name is wrong, an option is a secret itself, or the session's
            catalog cannot have such tables.
        BrokerError: The admin interface does not answer, or refuses: nothing was changed.
    """
    with told_to_spark():
        if getattr(spark, "_jvm", None) is None:
            raise ConfigError(
                "catalog.sync() needs the process that has the SparkContext; this session is one "
                "of Spark Connect. Run it on the server, or read topics with format('keyshard')."
            )
        given = {str(name): str(text) for name, text in (options or {}).items()}
        source = _checked(given)
        catalog = SessionCatalog(spark, source.service_url)
        scope = _Scope.of(tenants, namespaces)
        with _one_at_a_time:
            topics = _topics(source.how_to_connect(), scope)
            return _Sync(catalog, source, given).run(scope, topics)


@dataclass(frozen=True)
class _Scope:
    """Which databases a sync is about."""

    tenants: Sequence[str]
    namespaces: Sequence[str] | None

    @classmethod
    def of(cls, tenants: Sequence[str], namespaces: Sequence[str] | None) -> _Scope:
        scope = cls(_several(tenants), None if namespaces is None else _several(namespaces))
        for tenant in scope.tenants:
            if not tenant or "/" in tenant:
                raise ConfigError(f"tenants has {shown(tenant)}, which is no name of a tenant.")
        for one in scope.namespaces or ():
            if one.count("/") != 1 or not all(one.split("/")):
                raise ConfigError(f"namespaces has {shown(one)}. Write 'tenant/namespace'.")
        return scope

    def has(self, namespace: str | None) -> bool:
        """Whether it is about a namespace, also one that is gone."""
        if namespace is None:
            return False
        if self.namespaces is not None:
            return namespace in self.namespaces
        return namespace.partition("/")[0] in self.tenants


def _several(names: Sequence[str]) -> Sequence[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def _checked(options: Mapping[str, str]) -> KeyShardSource:
    """What the options of tables say, of a topic that stands for all."""
    for name in options:
        if name.lower() in _TOPICS:
            raise ConfigError(f"Option {name!r} is not one of all tables: each has its topic.")
    check_takes_no_filters(
        parse_bounded({"topic": "any"} | {n: text for n, text in options.items() if of_batches(n)})
    )
    source = parse_options(
        {"topic": "any", **_subscribed(options)}
        | {name: text for name, text in options.items() if of_streams(name)}
    )
    connection = source.how_to_connect()
    if connection.admin_url is None:
        raise ConfigError("The admin interface lists the topics. Set admin_url in options.")
    said = connection.authentication
    values = [getattr(said, one.name) for one in dataclasses.fields(said)] if said else []
    if any(isinstance(value, Secret) for value in values) or "@" in connection.admin_url:
        raise ConfigError(
            "options has a secret itself, which the columns of tables would show, and files that "
            "are written from them. Name a file or an environment variable: authParams "
            "'file:///path', 'env:NAME', or oauth2 with privateKey."
        )
    return source


def _subscribed(options: Mapping[str, str]) -> dict[str, str]:
    has = any(name.lower() == "subscription" for name in options)
    return {} if has else {"subscription": "any"}


def _topics(connection: Connection, scope: _Scope) -> dict[str, list[str]]:
    """Full names of topics by namespace; no change of the catalog is based on half of them."""

    def listed(admin: Admin) -> dict[str, list[str]]:
        names = scope.namespaces
        if names is None:
            names = [f"{one}/{of}" for one in scope.tenants for of in admin.namespaces(one)]
        return {one: sorted(admin.topics(*one.split("/"))) for one in sorted(names)}

    return asked_first(connection, listed)


class _Sync:
    """One run."""

    def __init__(
        self, catalog: SessionCatalog, source: KeyShardSource, options: Mapping[str, str]
    ) -> None:
        self._catalog = catalog
        self._source = source
        self._options = options
        self._schemas: dict[TableName, StructType] = {}
        self._raw: dict[str, str] = {}
        self._left: dict[str, str] = {}

    def run(self, scope: _Scope, topics: Mapping[str, Sequence[str]]) -> Synced:
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
            f"a {what} is there that no sync with {self._source.service_url} made of it. Drop it, "
            "or give it another name"
        )

    def _named(self, originals: Iterable[str]) -> dict[str, str]:
        """Originals by the name they have; those without one are noted."""
        found, left = named(originals, case_sensitive=self._catalog.case_sensitive)
        for one in left:
            self._left[one] = (
                "another one differs from it in case only, which Spark does not tell apart. Set "
                "spark.sql.caseSensitive to true"
            )
        return found

    def _look(self, database: str, topics: Sequence[str]) -> None:
        """Work out the tables of a database."""
        _log.info("catalog: %s has %d topics", database, len(topics))
        by_name = {_local(full): full for full in topics if not is_system_topic(full)}
        for table, own in self._named(by_name).items():
            name = TableName(database, table)
            options = {**self._options, "topic": by_name[own]}
            try:
                source = dataclasses.replace(self._source, topics=[by_name[own]])
            except ConfigError as exc:  # one that Pulsar takes must not cost all others
                self._left[by_name[own]] = exc.message
                continue
            columns, why = self._columns(source)
            if why:
                options = {n: one for n, one in options.items() if n.lower() != "valueformat"}
                options["valueFormat"] = "raw"
                self._raw[str(name)] = why
            self._schemas[name] = with_options(columns, options)

    def _columns(self, source: KeyShardSource) -> tuple[StructType, str]:
        """The columns of a topic, and why they are its bytes where it has a schema."""
        try:
            columns = schema_of(plan_of(source), source.metadata_columns)
        except (SchemaError, PySparkTypeError) as exc:
            return schema_of(None, source.metadata_columns), str(exc)
        twice = columns_alike(columns.names, case_sensitive=self._catalog.case_sensitive)
        if twice is not None:
            raw = schema_of(None, source.metadata_columns)
            return raw, f"column {twice!r} differs from another one in case only"
        return columns, ""


def _local(topic: str) -> str:
    return topic.rpartition("/")[2]
