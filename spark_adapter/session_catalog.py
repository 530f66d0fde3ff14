"""Databases and tables in a Spark session's catalog, through its internal API.

``CREATE DATABASE`` and ``CREATE TABLE`` accept only letters, digits and ``_`` in names, but a query
reads tables of any name (docs/adr/0027). So this module calls the external catalog, which all
sessions of an application share.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from keyshard.core.topic_segments import SCALABLE, is_scalable
from keyshard.errors import ConfigError
from spark_adapter.preflight import is_before, is_true

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FORMAT = "keyshard"
MARK = "keyshard.service.url"
"""Property of databases and tables that a sync made; its value is the service URL."""
NAMESPACE = "keyshard.namespace"
"""Property of databases that a sync made; its value is the Pulsar namespace."""
_MISSING_OK, _STRICT = True, False
_KEEP_DATA, _NO_CASCADE = False, False
_PACKAGE = "org.apache.spark.sql.catalyst"


class SessionCatalog:
    """The catalog of a session.

    Args:
        spark: A session whose JVM belongs to this process.
        cluster: Service URL, with which created objects are marked.

    Raises:
        ConfigError: The session uses the Hive catalog, which refuses such names.
    """

    def __init__(self, spark: SparkSession, cluster: str) -> None:
        if spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "hive":
            raise ConfigError(
                "This session has a Hive catalog, whose names contain only letters, digits and "
                "_, so the database `tenant/namespace` cannot exist.",
                "Create tables in a session without Hive, or read topics with format('keyshard').",
            )
        spark_of: Any = spark
        self._jvm = spark_of._jvm
        self._catalog = spark_of._jsparkSession.sharedState().externalCatalog()
        self._warehouse = spark.conf.get("spark.sql.warehouse.dir")
        self._cluster = cluster
        self.case_sensitive = is_true(spark.conf.get("spark.sql.caseSensitive"))
        """Whether names that differ only in case are different names for Spark."""
        self._plain: Any = None

    def databases(self) -> dict[str, str | None]:
        """Return the namespace of each database; ``None`` if no sync with this cluster made it."""
        found: dict[str, str | None] = {}
        for name in _list(self._jvm, self._catalog.listDatabases()):
            database = self._catalog.getDatabase(name)
            ours = self._is_ours(database)
            found[name] = str(database.properties().apply(NAMESPACE)) if ours else None
        return found

    def tables(self, database: str) -> dict[TableName, Table]:
        """Return the tables of a database."""
        found = {}
        for name in _list(self._jvm, self._catalog.listTables(database)):
            table = self._catalog.getTable(database, name)
            ours = table.provider().contains(FORMAT) and self._is_ours(table)
            found[TableName(database, name)] = Table(ours, json.loads(table.schema().json()))
        return found

    def create_database(self, name: str, namespace: str) -> None:
        """Create the database of a namespace."""
        directory = self._jvm.org.apache.hadoop.fs.Path(
            self._warehouse, f"{quote(name, safe='')}.db"
        )
        database = self._class("catalog.CatalogDatabase")(
            name, "Topics of a namespace", directory.toUri(), self._marked(**{NAMESPACE: namespace})
        )
        self._catalog.createDatabase(database, _STRICT)

    def drop_database(self, name: str) -> None:
        """Drop an empty database."""
        self._catalog.dropDatabase(name, _MISSING_OK, _NO_CASCADE)

    def create(self, name: TableName, schema: StructType) -> None:
        """Create a table, which stores no data."""
        self._catalog.createTable(self._table(name, schema), _STRICT)

    def change(self, name: TableName, schema: StructType) -> None:
        """Change the columns of a table."""
        catalog = self._catalog
        # PySpark 4.0 has the older method, which is equal without partition columns.
        change = catalog.alterTableDataSchema if is_before(4, 1) else catalog.alterTableSchema
        change(name.database, name.table, self._columns(schema))

    def drop(self, name: TableName) -> None:
        """Drop a table."""
        self._catalog.dropTable(name.database, name.table, _MISSING_OK, _KEEP_DATA)

    def _table(self, name: TableName, schema: StructType) -> Any:
        some = self._jvm.scala.Some
        makes = self._class("catalog.CatalogTable")
        identifier = self._class("TableIdentifier")(name.table, some(name.database))
        if self._plain is None:
            # External: Spark creates no directory for it, and deletes none with it.
            external = self._class("catalog.CatalogTableType").EXTERNAL()
            storage = self._class("catalog.CatalogStorageFormat").empty()
            said = [identifier, external, storage, self._columns(schema), some(FORMAT)]
            made, *_ = self._jvm.java.lang.Class.forName(
                f"{_PACKAGE}.catalog.CatalogTable"
            ).getConstructors()
            last = made.getParameterCount()
            self._plain = makes(*said, *_defaults(makes, "apply", len(said) + 1, last))
        table = self._plain
        names = [table.productElementName(number) for number in range(table.productArity())]
        values = _defaults(table, "copy", 1, len(names))
        other = {
            "identifier": identifier,
            "schema": self._columns(schema),
            "properties": self._marked(),
        }
        return table.copy(*(other.get(*pair) for pair in zip(names, values, strict=True)))

    def _columns(self, schema: StructType) -> Any:
        return self._jvm.org.apache.spark.sql.types.DataType.fromJson(schema.json())

    def _class(self, name: str) -> Any:
        found = self._jvm
        for part in f"{_PACKAGE}.{name}".split("."):
            found = getattr(found, part)
        return found

    def _marked(self, **others: str) -> Any:
        properties = {MARK: self._cluster, **others}
        return self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(properties)

    def _is_ours(self, one: Any) -> bool:
        return bool(one.properties().get(MARK).contains(self._cluster))


def _defaults(of: Any, method: str, first: int, last: int) -> list[Any]:
    """Return the defaults of a Scala method's parameters, which differ between Spark versions."""
    return [getattr(of, f"{method}$default${number}")() for number in range(first, last + 1)]


def _list(jvm: Any, names: Any) -> list[str]:
    return list(jvm.scala.jdk.javaapi.CollectionConverters.asJava(names))


# -- Differences between the topics and the catalog ------------------------------------------------


def table_of(topic: str) -> str:
    """Return the name of the table of a topic, by its full name.

    A scalable and a persistent topic may have the same name (ADR 59).
    """
    name = topic.rpartition("/")[2]
    return SCALABLE + name if is_scalable(topic) else name


class TableName(NamedTuple):
    """A table and its database."""

    database: str
    table: str

    def __str__(self) -> str:
        return ".".join("`" + part.replace("`", "``") + "`" for part in self)


@dataclass(frozen=True)
class Table:
    """An existing table."""

    ours: bool
    """Whether a sync with this cluster made it."""
    columns: object
    """Columns as parsed JSON."""


@dataclass(frozen=True)
class Steps:
    """The changes that a sync makes."""

    create: list[TableName] = field(default_factory=list)
    change: list[TableName] = field(default_factory=list)
    drop: list[TableName] = field(default_factory=list)
    taken: list[TableName] = field(default_factory=list)
    """Wanted names that belong to tables of somebody else."""


def steps(wanted: Mapping[TableName, object], there: Mapping[TableName, Table]) -> Steps:
    """Compute the changes; only tables that a sync made are changed or dropped.

    Args:
        wanted: Columns as parsed JSON, by table.
        there: Existing tables.
    """
    found = Steps()
    for name, columns in sorted(wanted.items()):
        table = there.get(name)
        if table is None:
            found.create.append(name)
        elif not table.ours:
            found.taken.append(name)
        elif table.columns != columns:
            found.change.append(name)
    found.drop.extend(sorted(name for name in there.keys() - wanted.keys() if there[name].ours))
    return found


def named(originals: Iterable[str], *, case_sensitive: bool) -> tuple[dict[str, str], list[str]]:
    """Map catalog names to originals, and list the originals that get no name.

    If Spark ignores case, originals collide when they differ only in case. The original in lower
    case gets the name. If there is none, no original gets the name, so that the choice does not
    depend on the others.
    """
    if case_sensitive:
        return {one: one for one in originals}, []
    alike: dict[str, list[str]] = {}
    for one in originals:
        alike.setdefault(one.lower(), []).append(one)
    chosen = {
        name: name if name in some else some[0]
        for name, some in alike.items()
        if len(some) == 1 or name in some
    }
    return chosen, sorted(
        one for name, some in alike.items() for one in some if chosen.get(name) != one
    )


def columns_alike(names: Iterable[Any], *, case_sensitive: bool) -> str | None:
    """Return a column whose name equals an earlier one for Spark, or ``None``."""
    seen: set[str] = set()
    for name in names:
        looked_for = name if case_sensitive else name.lower()
        if looked_for in seen:
            return str(name)
        seen.add(looked_for)
    return None
