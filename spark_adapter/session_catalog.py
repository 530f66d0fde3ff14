"""Tables and databases of a Spark session's catalog, below the SQL that only takes plain names.

``CREATE DATABASE`` and ``CREATE TABLE`` take letters, digits and ``_``; what reads a table takes
any name (docs/adr/0027). So this asks the external catalog, which all sessions of an application
share.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from keyshard.errors import ConfigError
from spark_adapter.catalog_plan import Table, TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

FORMAT = "keyshard"
MARK = "keyshard.service.url"
"""Property of databases and tables that a sync made: with which cluster."""
NAMESPACE = "keyshard.namespace"
"""Property of such a database: what it is of, as the cluster writes it."""
_MISSING_OK, _STRICT = True, False
_KEEP_DATA, _NO_CASCADE = False, False
_PACKAGE = "org.apache.spark.sql.catalyst"


class SessionCatalog:
    """The catalog of a session.

    Args:
        spark: It runs in this process' JVM.
        cluster: Service URL; marks what is made.

    Raises:
        ConfigError: Its catalog cannot have such names.
    """

    def __init__(self, spark: SparkSession, cluster: str) -> None:
        if spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "hive":
            raise ConfigError(
                "This session has the catalog of Hive, where a name has letters, digits and _ "
                "only: there is no database `tenant/namespace`. Make tables in a session without "
                "Hive, or read topics with format('keyshard')."
            )
        spark_of: Any = spark
        self._jvm = spark_of._jvm
        self._catalog = spark_of._jsparkSession.sharedState().externalCatalog()
        self._warehouse = spark.conf.get("spark.sql.warehouse.dir")
        self._cluster = cluster
        self.case_sensitive = spark.conf.get("spark.sql.caseSensitive") == "true"
        """Whether names that differ in case only are several."""
        self._plain: Any = None

    def databases(self) -> dict[str, str | None]:
        """Names, and of which namespace a sync with this cluster made them; ``None`` for none."""
        found: dict[str, str | None] = {}
        for name in _list(self._jvm, self._catalog.listDatabases()):
            database = self._catalog.getDatabase(name)
            ours = self._is_ours(database)
            found[name] = str(database.properties().apply(NAMESPACE)) if ours else None
        return found

    def tables(self, database: str) -> dict[TableName, Table]:
        """What is in a database."""
        found = {}
        for name in _list(self._jvm, self._catalog.listTables(database)):
            table = self._catalog.getTable(database, name)
            ours = table.provider().contains(FORMAT) and self._is_ours(table)
            found[TableName(database, name)] = Table(ours, json.loads(table.schema().json()))
        return found

    def create_database(self, name: str, namespace: str) -> None:
        """Make a database of a namespace."""
        directory = self._jvm.org.apache.hadoop.fs.Path(
            self._warehouse, f"{quote(name, safe='')}.db"
        )
        database = self._class("catalog.CatalogDatabase")(
            name, "Topics of a namespace", directory.toUri(), self._marked(**{NAMESPACE: namespace})
        )
        self._catalog.createDatabase(database, _STRICT)

    def drop_database(self, name: str) -> None:
        """Remove a database that is empty."""
        self._catalog.dropDatabase(name, _MISSING_OK, _NO_CASCADE)

    def create(self, name: TableName, schema: StructType) -> None:
        """Make a table; nothing of it is stored."""
        self._catalog.createTable(self._table(name, schema), _STRICT)

    def change(self, name: TableName, schema: StructType) -> None:
        """Give a table other columns."""
        self._catalog.alterTableSchema(name.database, name.table, self._columns(schema))

    def drop(self, name: TableName) -> None:
        """Remove a table."""
        self._catalog.dropTable(name.database, name.table, _MISSING_OK, _KEEP_DATA)

    def _table(self, name: TableName, schema: StructType) -> Any:
        some = self._jvm.scala.Some
        makes = self._class("catalog.CatalogTable")
        identifier = self._class("TableIdentifier")(name.table, some(name.database))
        if self._plain is None:
            # External: no directory is made for it, or deleted with it.
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
    """What Scala fills in where nothing is said, which differs between versions of Spark."""
    return [getattr(of, f"{method}$default${number}")() for number in range(first, last + 1)]


def _list(jvm: Any, names: Any) -> list[str]:
    return list(jvm.scala.jdk.javaapi.CollectionConverters.asJava(names))
