"""Tables that a sync creates, changes and drops; names of topics, and options of tables.

These decisions need no Spark session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from keyshard.broker.connect import connect_admin
from keyshard.broker.memory import MemoryCluster
from keyshard.config.connection import Connection
from keyshard.errors import ConfigError
from spark_adapter import catalog
from spark_adapter.session_catalog import (
    Steps,
    Table,
    TableName,
    columns_alike,
    named,
    steps,
    table_of,
)
from spark_adapter.table_options import options_of, with_options

COLUMNS = StructType([StructField("value", BinaryType())])
OPTIONS = {
    "service.url": "pulsar://b:6650", "topic": "orders", "subscription": "mine",
    "startingOffsets": "earliest", "endingOffsets": "latest", "pulsar.client.listenerName": "in",
}  # fmt: skip


def name(table: str) -> TableName:
    return TableName("public/default", table)


def test_only_own_tables_are_changed_and_dropped() -> None:
    there = {
        name("same"): Table(ours=True, columns=1),
        name("other"): Table(ours=True, columns=1),
        name("gone"): Table(ours=True, columns=1),
        name("taken"): Table(ours=False, columns=1),
        name("foreign"): Table(ours=False, columns=1),
    }
    wanted = dict.fromkeys(map(name, ("same", "taken", "new")), 1) | {name("other"): 2}
    found = steps(wanted, there)
    assert found == Steps([name("new")], [name("other")], [name("gone")], [name("taken")])


def test_a_name_with_any_character_is_quoted() -> None:
    assert str(TableName("a/b", "c`d.e")) == "`a/b`.`c``d.e`"


@pytest.mark.parametrize(
    ("topics", "chosen", "left"),
    [
        (["A", "b"], {"a": "A", "b": "b"}, []),
        (["a", "A"], {"a": "a"}, ["A"]),
        (["Aa", "aA"], {}, ["Aa", "aA"]),
    ],
)
def test_the_lower_case_topic_gets_the_name_if_topics_differ_only_in_case(
    topics: list[str], chosen: dict[str, str], left: list[str]
) -> None:
    assert named(topics, case_sensitive=False) == (chosen, left)
    assert named(topics, case_sensitive=True) == ({one: one for one in topics}, [])


def test_scalable_and_persistent_topics_of_one_name_have_tables_of_their_own() -> None:
    cluster = MemoryCluster.named("catalog")
    cluster.create_topic("orders")
    cluster.create_topic("a/b/orders")
    names = ("public/default/Orders", "public/default/orders", "a/c/orders")
    for one in names:
        cluster.scalable.create(f"topic://{one}", 2)
    connection = Connection("memory://catalog", "memory://catalog")
    with closing(connect_admin(connection)) as admin:
        found = catalog.topics_of(admin, "public", "default")
    assert found == [
        "persistent://public/default/orders",
        "topic://public/default/Orders",
        "topic://public/default/orders",
    ]
    tables, left = named(map(table_of, found), case_sensitive=False)
    assert list(tables) == ["orders", "topic://orders"]
    assert left == ["topic://Orders"]


def test_columns_that_spark_cannot_distinguish_are_refused() -> None:
    assert columns_alike(["id", "ID"], case_sensitive=False) == "ID"
    assert columns_alike(["id", "ID"], case_sensitive=True) is None
    assert columns_alike(["id", "name"], case_sensitive=False) is None


def test_query_options_win_and_table_options_of_the_other_kind_are_dropped() -> None:
    columns = with_options(COLUMNS, OPTIONS)
    assert columns[0].dataType == BinaryType()
    batch = {name: text for name, text in OPTIONS.items() if name != "subscription"}
    assert options_of(columns, {}) == batch
    stream = {name: text for name, text in OPTIONS.items() if name != "endingOffsets"}
    assert options_of(columns, {}, stream=True) == stream
    assert options_of(columns, {"ENDINGOFFSETS": "earliest"})["ENDINGOFFSETS"] == "earliest"
    assert "endingOffsets" not in options_of(columns, {"endingTime": "0"}), "it says the same"
    assert "startingOffsets" not in options_of(columns, {"startingtime": "0"}, stream=True)


def test_a_read_with_a_topic_needs_no_table() -> None:
    given = {"topicsPattern": "o.*"}
    assert options_of(with_options(COLUMNS, OPTIONS), given) == given
    assert options_of(COLUMNS, {}) == {}


def test_the_catalog_of_hive_is_refused_by_name() -> None:
    def get(name: str, default: str = "") -> str:
        return "hive" if name == "spark.sql.catalogImplementation" else default

    session: Any = SimpleNamespace(_jvm=object(), conf=SimpleNamespace(get=get))
    with pytest.raises(ConfigError, match="Hive catalog"):
        catalog.sync(session, options={"admin.url": "http://127.0.0.1:1"})


def test_the_modules_that_spark_looks_for_give_sources_and_never_fail(tmp_path: Path) -> None:
    """A module that fails takes the data sources of all other packages away."""
    found = Path(__file__).parents[2] / "spark_adapter" / "discovered"
    old = tmp_path / "pyspark"
    old.mkdir()
    (old / "__init__.py").write_text("__version__ = '3.5.0'")
    program = """
import importlib, json, warnings
with warnings.catch_warnings(record=True) as said:
    names = ("pyspark_keyshard", "pyspark_keyshard_pulsar")
    modules = [importlib.import_module(name) for name in names]
sources = [getattr(one, "DefaultSource", None) for one in modules]
print(json.dumps([[one and one.name() for one in sources], [str(one.message) for one in said]]))
"""

    def looked_up(*first: Path) -> list[list[str]]:
        path = os.pathsep.join(map(str, (*first, found, found.parents[1])))
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        answer: list[list[str]] = json.loads(done.stdout)
        return answer

    assert looked_up()[0] == ["keyshard", "pulsar"]
    sources, said = looked_up(tmp_path)
    assert sources == [None, None]
    assert all("has 3.5.0" in one for one in said)
    assert len(said) == 2
