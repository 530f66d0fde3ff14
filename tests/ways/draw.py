"""Topics and readings, drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.streams.cluster import Broker, entry_of
from tests.streams.draw import Topic, register
from tests.streams.values import (
    BAD,
    INLINE,
    KINDS,
    NONE,
    RECORDS,
    SEPARATED,
    TEXT,
    Sent,
    encoded,
    malformed,
)

MODES = ("FAILFAST", "PERMISSIVE", "DROPMALFORMED")
ALL, SOME, METADATA = "all", "some", "metadata"
"""Columns that a reading asks for."""
_KEYS: tuple[str | bytes | None, ...] = ("k1", "k2", "ключ", "", b"\x00\xff", b"k1", None)
_ENCRYPTION_KEYS, _DELIVER_AT_TIME = 13, 19
"""Fields of ``MessageMetadata``."""
_ENCRYPTION_KEY = b"\n\x01k\x12\x01v"
"""``EncryptionKeys`` with a name and a value."""
_SOON_S = 3.0
"""Longest delay of a message that a reading sees, seconds."""
_LATER_S = 3 * 3_600
"""Delay of a message that no reading sees, seconds."""


@dataclass(slots=True)
class Published:
    """A topic, and every message in it."""

    topic: Topic
    read_as: str
    """The topic's name, or that of one of its partitions."""
    sent: list[Sent] = field(default_factory=list)
    encrypted: set[int] = field(default_factory=set)
    """Numbers of messages."""
    soon: set[int] = field(default_factory=set)
    """Messages that are due while they are read, or before."""
    later: set[int] = field(default_factory=set)
    """Messages that are not due while they are read."""

    @property
    def kind(self) -> str:
        """The schema type of its values."""
        return self.topic.kind

    @property
    def expected(self) -> int:
        """Number of messages that a consumer can get."""
        return len({one.number for one in self.sent} - self.encrypted - self.later)

    def text(self) -> str:
        """Facts that a report shows."""
        bad = sorted(one.number for one in self.sent if one.may_be_malformed)
        return (
            f"{self.read_as}: {self.kind}, {self.topic.partitions} partitions, versions "
            f"{sorted(self.topic.versions)}, {len(self.sent)} messages, malformed {bad}, "
            f"encrypted {sorted(self.encrypted)}, due soon {sorted(self.soon)}, later "
            f"{sorted(self.later)}"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to read a topic."""

    way: str
    mode: str
    columns: str
    by_pulsar_name: bool
    """Whether Spark reads it with ``format("pulsar")``."""
    skips_encrypted: bool
    transport: str
    workers: str

    @property
    def ends(self) -> bool:
        """Whether it is a query with ``availableNow``.

        Spark asks for counts before it runs a batch, so no progress has those of the last one.
        A query that counts rows therefore runs until it has counted them.
        """
        counts = self.skips_encrypted or self.mode == "DROPMALFORMED"
        return self.way in STREAMS and not counts


def published(drawn: random.Random, broker: Broker, name: str) -> Published:
    """Make a topic with messages of one kind, in two versions where it has them.

    Raises:
        TimeoutError: The broker refused it.
    """
    kind = drawn.choice(KINDS)
    topic = Topic(name, kind, drawn.choice((0, 0, 1, 2, 3)))
    broker.create(name, topic.partitions)
    register(broker, topic, 0)
    made = Published(topic, name)
    corrupt = drawn.choice((0.0, 0.0, 0.05)) if kind != NONE else 0.0
    encrypted = drawn.choice((0.0, 0.0, 0.15))
    if topic.partitions and drawn.random() < 0.3:
        made.read_as = drawn.choice(topic.names())
    # An own generator: the other draws of a seed stay.
    delays = random.Random(f"{name}:delays")
    delayed = delays.choice((0.0, 0.0, 0.3))
    steps = [0, 1] if kind in RECORDS and drawn.random() < 0.6 else [0]
    if kind in RECORDS[:1] and drawn.random() < 0.2:
        steps.append(BAD)
    for version in steps:
        if version not in topic.versions:
            register(broker, topic, version)
        for one in topic.names():
            if made.read_as in {one, name}:
                _publish(
                    drawn, broker, made, one, version, corrupt=corrupt, encrypted=encrypted,
                    delays=delays, delayed=delayed,
                )  # fmt: skip
    return made


def _publish(
    drawn: random.Random, broker: Broker, made: Published, name: str, version: int, *,
    corrupt: float, encrypted: float, delays: random.Random, delayed: float,
) -> None:  # fmt: skip
    entries = []
    for entry in range(drawn.randint(1, 8)):
        key = drawn.choice(_KEYS)
        if made.kind in (TEXT, INLINE, SEPARATED) and not isinstance(key, str):
            key = "k1"
        locked = drawn.random() < encrypted
        numbers = range(len(made.sent), len(made.sent) + drawn.choice((1, 1, 3, 10)))
        values: list[tuple[int, bytes | None]] = []
        for number in numbers:
            bad = drawn.random() < corrupt
            tombstone = not bad and made.kind != INLINE and drawn.random() < 0.1
            one = Sent(
                number, made.topic.name, 0, entry, key, None, made.kind, version, tombstone, bad,
                None, confirmed=True,
            )  # fmt: skip
            payload = (
                None if tombstone
                else malformed(made.kind, number) if bad
                else encoded(made.kind, version, number, one.name, key)
            )  # fmt: skip
            values.append((number, payload))
            made.sent.append(
                Sent(
                    number, made.topic.name, 0, entry, key, None, made.kind, version, tombstone,
                    bad, payload, confirmed=True,
                )
            )  # fmt: skip
            if locked:
                made.encrypted.add(number)
        number_of_version = made.topic.versions.get(version)
        metadata, content = entry_of(values, key, None, number_of_version, drawn)
        if locked:
            metadata |= {_ENCRYPTION_KEYS: _ENCRYPTION_KEY}
        if delays.random() < delayed:
            # A reading without an end does not wait for rows that it leaves out.
            soon = not locked and delays.random() < 0.6
            (made.soon if soon else made.later).update(numbers)
            delay_s = delays.uniform(0.0, _SOON_S) if soon else _LATER_S
            metadata |= {_DELIVER_AT_TIME: int((time.time() + delay_s) * 1000)}
        entries.append((metadata, content))
    done = broker.publish(name, entries)
    assert done == len(entries), f"{done} of {len(entries)} entries of {name} were confirmed"


def readings(drawn: random.Random, ways: Sequence[str], kind: str, count: int) -> list[Reading]:
    """Some ways in, each with options of its own."""
    made = []
    for way in drawn.sample(ways, min(count, len(ways))):
        spark = way in SPARK
        made.append(
            Reading(
                way,
                drawn.choice(MODES) if spark else "",
                drawn.choice((ALL, ALL, SOME, METADATA)) if spark else ALL,
                way in NAMED and drawn.random() < 0.4,
                way in SKIPPING and drawn.random() < 0.5,
                "wire",
                drawn.choice(("embedded", "embedded", "processes:1"))
                if way in LIVE
                else "embedded",
            )
        )
    return made


SPARK: Mapping[str, str] = {
    "spark batch": "spark.read",
    "spark stream": "spark.readStream, availableNow",
    "table": "a table of the catalog",
    "table stream": "a stream of a table",
}
"""Ways in of Spark."""
NAMED = ("spark batch", "spark stream")
"""Ways in that name a format."""
STREAMS = ("spark stream", "table stream")
"""Ways in that are queries."""
LIVE = ("spark stream", "embedded", "handlers", "batches")
"""Ways in that consume, and may have workers."""
SKIPPING = (*LIVE, "table stream")
"""Ways in that have ``onEncrypted``."""
PLANS = ("spark batch", "table", "ray")
"""Ways in that read storage, without a subscription: messages that are not due as well."""
WAYS = (*SPARK, "embedded", "handlers", "batches", "ray")
