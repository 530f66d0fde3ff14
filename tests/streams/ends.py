"""Faults at the end of a case, most of which end the query."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from tests.streams.cluster import entry_of
from tests.streams.draw import Query, Topic, new_sink, register
from tests.streams.values import AVRO, TEXT, other_schema, schema_of
from tests.support.deadlines import deadline

if TYPE_CHECKING:
    from tests.streams.run import Case

ENDS = (
    "same again", "another", "foreign", "schema deleted", "second query", "copied checkpoint", ""
)  # fmt: skip


def end(case: Case, query: Query) -> None:
    """Something that a query does not outlive, or only just."""
    how = case.drawn.choice(ENDS)
    if query.over or not how:
        return
    if how in ("same again", "another") and "admin.url" not in query.spec["options"]:
        return  # nothing tells such a query that a topic is gone
    broker, topic = case.broker, query.topics[0]
    case.say(f"  end of {query.name}: {how}")
    if how in ("same again", "another"):
        broker.delete(topic.name, topic.partitions)
        if case.drawn.random() < 0.5:
            case.pause(case.drawn.uniform(0.0, 4.0))
        broker.create(topic.name, topic.partitions)
        topic.versions.clear()
        if how == "same again" or topic.kind != AVRO:
            register(case.broker, topic, 0)
            case.publish(query, 20, topic)
            case.settle_one(query)
        else:
            _another(case, query, topic)
    elif how == "foreign" and "topicsPattern" in query.spec["options"]:
        _foreign(case, query)
    elif how == "schema deleted" and topic.versions:
        broker.ask("DELETE", f"schemas/public/default/{topic.name}/schema", missing=True)
        topic.versions = {0: topic.versions[0]}
        case.publish(query, 20, topic)
        case.pause(8.0)
        query.over = True
        case.order(stop=query.name)
    elif how == "second query" and query.spec["bounded"]:
        pass  # two of these take turns
    elif how in ("second query", "copied checkpoint"):
        _second(case, query, copied=how == "copied checkpoint")


def _another(case: Case, query: Query, topic: Topic) -> None:
    """A topic gets another schema with bytes that fit the first: none may be a row of the old
    schema."""
    topic.versions = {0: case.broker.register(topic.name, other_schema())}
    before = len(case.rows(query))
    numbers = case.number
    case.publish(query, 20, topic)
    case.pause(12.0)
    for _, number, row in case.rows(query)[before:]:
        if number > numbers and row.get("id") is not None:
            case.problems.append(f"{query.name}: read by the schema that it had: {row}")
    query.sent = [one for one in query.sent if one.number <= numbers]
    query.over = True
    case.order(stop=query.name)
    with closing(sqlite3.connect(query.spec["sink"])) as sink, sink:
        sink.execute("DELETE FROM rows WHERE n > ?", (numbers,))


def _foreign(case: Case, query: Query) -> None:
    """A topic that matches and has another schema; then it is left out by the pattern."""
    name = f"{query.name}-tx"
    case.broker.create(name, 0)
    schema = schema_of(TEXT, 0) if query.kind != TEXT else other_schema()
    assert schema is not None
    version = case.broker.register(name, schema)
    case.number += 1
    entry = entry_of([(case.number, b"foreign")], "k1", None, version, case.drawn)
    case.broker.publish(name, [entry])
    case.pause(10.0)
    query.failures = 0
    case.order(stop=query.name)
    query.spec["options"]["topicsPattern"] = f"{query.name}-t[0-9]"
    if query.mode == "FAILFAST":
        query.spec["options"]["mode"] = "DROPMALFORMED"
    case.order(start=query.spec)
    case.publish(query, 10)
    case.settle_one(query)
    with closing(sqlite3.connect(query.spec["sink"])) as sink, sink:
        sink.execute("DELETE FROM rows WHERE n = ?", (case.number - 10,))
    query.over = True
    case.order(stop=query.name)


def _second(case: Case, query: Query, *, copied: bool) -> None:
    """Another query on the subscription: with a new checkpoint, or with a copy of an older."""
    folder = case.directory / f"{query.name}-second"
    folder.mkdir()
    checkpoint = folder / "checkpoint"
    if copied:
        case.order(stop=query.name)
        case.pause(3.0)
        shutil.copytree(query.spec["checkpoint"], checkpoint)
        case.order(start=query.spec)
        case.publish(query, 30)
        case.settle_one(query)
        case.pause(3.0)
        case.order(stop=query.name)
        case.pause(2.0)
    spec = query.spec | {
        "name": f"{query.name}-second", "checkpoint": str(checkpoint), "sink": new_sink(folder),
        "options": query.spec["options"] | {"subscribeTimeoutMillis": "5000"},
    }  # fmt: skip
    before = len(case.errors)
    case.order(start=spec)
    case.until(
        lambda: any(one.startswith(spec["name"]) for one in case.errors[before:]),
        deadline(60), f"an error of the second query of {query.name}",
    )  # fmt: skip
    if copied:
        query.over = True
    else:
        case.publish(query, 10)
        case.settle_one(query)
