"""The topics and options of a query, drawn from a seed, and their changes at its next start."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.streams.cluster import Broker
from tests.streams.values import BAD, INLINE, KINDS, NONE, SEPARATED, Sent, schema_of


@dataclass(slots=True)
class Topic:
    """A topic and its messages."""

    name: str
    kind: str
    partitions: int
    versions: dict[int, int] = field(default_factory=dict)
    """Numbers at the broker of the registered versions."""

    def names(self) -> list[str]:
        """Return the names of its topic partitions, or its own if it has none."""
        return [f"{self.name}-partition-{one}" for one in range(self.partitions)] or [self.name]


@dataclass(slots=True)
class Query:
    """A query, as it is started next."""

    name: str
    topics: list[Topic]
    spec: dict[str, Any]
    subscription: str
    sent: list[Sent] = field(default_factory=list)
    failures: int = 0
    over: bool = False
    """Whether it is not to be started again."""
    by_client: bool = False
    """Whether one of its starts used pulsar-client. It keeps no order of the empty key."""

    def text(self) -> str:
        """Describe it."""
        options = {k: v for k, v in self.spec["options"].items() if k != "service.url"}
        return (
            f"{self.name}: {self.kind}, {[topic.partitions for topic in self.topics]} partitions, "
            f"{self.spec['format']} {'bounded ' * self.spec['bounded']}{options} "
            f"{self.spec['schema']}"
        )

    @property
    def mode(self) -> str:
        """The mode for malformed values."""
        return str(self.spec["options"]["mode"])

    @property
    def has_bad(self) -> bool:
        """Whether a start may use version BAD, whose columns do not fit values of the others."""
        return any(BAD in topic.versions for topic in self.topics)

    @property
    def kind(self) -> str:
        """The schema type of its values."""
        return self.topics[0].kind


def query_of(
    drawn: random.Random, name: str, broker: Broker, admin_url: str, directory: Path
) -> Query:
    """Create a query and its topics.

    Args:
        drawn: The random source.
        name: Name of the query, and prefix of the names of its topics.
        broker: The broker of the topics.
        admin_url: URL of the admin interface for the query.
        directory: For its checkpoint and its sink.
    """
    kind = drawn.choice(KINDS)
    pattern = drawn.random() < 0.4
    topics = []
    for one in range(drawn.choice((1, 1, 2))):
        topic = Topic(f"{name}-t{one}", kind, drawn.choice((0, 1, 2, 3)))
        broker.create(topic.name, topic.partitions)
        register(broker, topic, 0)
        topics.append(topic)
    pulsar = drawn.random() < 0.3
    subscription = f"sub-{name}"
    options = {
        "service.url": broker.service_url,
        "admin.url": admin_url,
        "predefinedSubscription" if pulsar else "subscription": subscription,
        "startingOffsets": "earliest",
        "parallelism": str(drawn.randint(1, 4)),
        "mode": drawn.choice(("FAILFAST", "PERMISSIVE", "DROPMALFORMED")),
        "partitionDiscoveryIntervalMillis": drawn.choice(("500", "3000")),
        "operationTimeoutMillis": "30000",
    }
    if drawn.random() < 0.3:
        options["startingTime"] = "2020-01-01T00:00:00Z"
        del options["startingOffsets"]
    if drawn.random() < 0.6:
        options["maxBytesPerTrigger"] = drawn.choice(("500", "5000", "1000000"))
    if drawn.random() < 0.6:
        options["maxOffsetsPerTrigger"] = drawn.choice(("5", "9", "50", "1000"))
    if drawn.random() < 0.3 and "maxOffsetsPerTrigger" not in options:
        options |= {"minOffsetsPerTrigger": "20", "maxTriggerDelay": "2s"}
    if drawn.random() < 0.2 and kind != SEPARATED and not pulsar:
        options["transport"] = "client"
    elif drawn.random() < 0.4 and not pulsar:
        options["metadataColumns"] = "__keyBytes,__sequenceId,__producer,__orderingKey"
    if not pattern and "startingOffsets" in options and drawn.random() < 0.3:
        del options["admin.url"]
    if pattern:
        options["topicsPattern"] = f"{name}-t.*"
    else:
        options["topics"] = ",".join(topic.name for topic in topics)
    folder = directory / name
    folder.mkdir()
    spec = {
        "name": name,
        "format": "pulsar" if pulsar else "keyshard",
        "options": options,
        "schema": "",
        "bounded": drawn.random() < 0.3,
        "checkpoint": str(folder / "checkpoint"),
        "sink": new_sink(folder),
    }
    query = Query(name, topics, spec, subscription, by_client="transport" in options)
    if drawn.random() < 0.4:
        project(drawn, query)
    return query


def new_sink(folder: Path) -> str:
    """Create the database of a sink, and return the path of its file."""
    path = folder / "sink.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE rows (batch INTEGER, place INTEGER, n INTEGER, columns TEXT)")
        made.execute("CREATE TABLE batches (id INTEGER PRIMARY KEY, tag TEXT, digest TEXT)")
    return str(path)


def register(broker: Broker, topic: Topic, version: int) -> None:
    """Register a version of the schema of a topic, where its kind has any."""
    schema = schema_of(topic.kind, version)
    if schema is not None:
        topic.versions[version] = broker.register(topic.name, schema)


def project(drawn: random.Random, query: Query) -> None:
    """Ask for some columns."""
    pulsar = query.spec["format"] == "pulsar"
    values = {
        NONE: ["value binary"], "STRING": ["value string"],
        INLINE: ["key string", "value string"], SEPARATED: ["key string", "value string"],
    }.get(query.kind, ["id bigint", "name string"])  # fmt: skip
    properties = f"{'__messageProperties' if pulsar else '__properties'} map<string,string>"
    others = ["__key binary"] if pulsar else ["__key string", "__slot int", "__eventTime timestamp"]
    if query.kind != NONE:
        others.append("_corrupt_record binary")
    columns = [*values, *(one for one in others if drawn.random() < 0.5), properties]
    drawn.shuffle(columns)
    query.spec["schema"] = ", ".join(columns)


def change(drawn: random.Random, query: Query) -> None:
    """Some options are others at the next start."""
    options = query.spec["options"]
    if drawn.random() < 0.5:
        options["parallelism"] = str(drawn.randint(1, 5))
    if drawn.random() < 0.3:
        options["maxOffsetsPerTrigger"] = drawn.choice(("5", "13", "500"))
        options.pop("minOffsetsPerTrigger", None)
    if drawn.random() < 0.3 and query.mode != "FAILFAST":
        options["mode"] = drawn.choice(("PERMISSIVE", "DROPMALFORMED"))
    if drawn.random() < 0.3 and query.kind != SEPARATED and query.spec["format"] == "keyshard":
        options["transport"] = drawn.choice(("wire", "client"))
        if options["transport"] == "client":
            query.by_client = True
            options.pop("metadataColumns", None)
    if drawn.random() < 0.3:
        if BAD not in {one for topic in query.topics for one in topic.versions}:
            project(drawn, query)
    elif drawn.random() < 0.3:
        query.spec["schema"] = ""
    if drawn.random() < 0.2:
        query.spec["bounded"] = not query.spec["bounded"]
