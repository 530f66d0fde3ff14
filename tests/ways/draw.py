"""Topics and readings, drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.streams.cluster import Broker
from tests.streams.draw import Topic
from tests.streams.values import AVRO, BAD, INLINE, SEPARATED, TEXT, Sent
from tests.ways import facts
from tests.ways.kinds import KINDS, OF_JAVA
from tests.ways.produce import JAVA, RAW, Draft, Facts, JavaProducers, raw_entries

MODES = ("FAILFAST", "PERMISSIVE", "DROPMALFORMED")
ALL, SOME, METADATA, BYTES = "all", "some", "metadata", "bytes"
"""Columns that a reading asks for; ``bytes`` are the values as they are stored."""
WIRE, CLIENT = "wire", "client"
_KEYS: tuple[str | bytes | None, ...] = ("k1", "k2", "ключ", "", b"\x00\xff", b"k1", None)
_TEXT_KEYS = ("k1", "k2", "ключ")
_ORDERING_KEYS = (None, None, None, "o1", "é")
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
    producer: str
    sent: list[Sent] = field(default_factory=list)
    facts: dict[int, Facts] = field(default_factory=dict)
    """Known columns of messages, by their numbers."""
    encrypted: set[int] = field(default_factory=set)
    """Numbers of messages."""
    chunked: set[int] = field(default_factory=set)
    """Messages in several entries."""
    soon: set[int] = field(default_factory=set)
    """Messages that are due while they are read, or before."""
    later: set[int] = field(default_factory=set)
    """Messages that are not due while they are read."""

    @property
    def kind(self) -> str:
        """The name of the kind of its values."""
        return self.topic.kind

    def expected(self, how: Reading) -> int:
        """Return the number of messages that a consumer gets, or that end it by an error."""
        skipped = self.encrypted if how.skips_encrypted else set()
        return len({one.number for one in self.sent} - skipped - self.later)

    def skipped(self, how: Reading) -> int:
        """Number of entries that a consumer leaves out, and counts, because they are encrypted."""
        locked = self.encrypted - self.later if how.skips_encrypted else set()
        return len({self.facts[number]["id"][:2] for number in locked})

    def text(self) -> str:
        """Facts that a report shows."""
        bad = sorted(one.number for one in self.sent if one.may_be_malformed)
        return (
            f"{self.read_as}: {self.kind} by {self.producer}, {self.topic.partitions} partitions, "
            f"versions {sorted(self.topic.versions)}, {len(self.sent)} messages, malformed {bad}, "
            f"encrypted {sorted(self.encrypted)}, chunked {sorted(self.chunked)}, due soon "
            f"{sorted(self.soon)}, later {sorted(self.later)}"
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
    ends: bool
    """Whether a query has ``availableNow``."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many messages of a topic are special."""

    corrupt: float
    encrypted: float
    chunked: float
    delayed: float


@dataclass(frozen=True, slots=True)
class Publisher:
    """Publishes drawn messages."""

    drawn: random.Random
    broker: Broker
    java: JavaProducers

    def published(self, name: str, kind: str | None = None) -> Published:
        """Make a topic with messages of one kind, in two versions where it has them.

        Args:
            name: Name of the topic.
            kind: Kind of its values; ``None``: it is drawn.

        Raises:
            TimeoutError: The broker refused it.
        """
        drawn = self.drawn
        any_kind = drawn.choice(tuple(KINDS))
        kind = any_kind if kind is None else kind
        topic = Topic(name, kind, drawn.choice((0, 0, 1, 2, 3)))
        self.broker.create(name, topic.partitions)
        # Java's client has no producer for the schema of a class that it lacks.
        producer = drawn.choice((RAW, RAW, JAVA)) if kind != OF_JAVA else RAW
        made = Published(topic, name, producer)
        shares = Shares(
            drawn.choice((0.0, 0.0, 0.05)), drawn.choice((0.0, 0.0, 0.15)),
            drawn.choice((0.0, 0.0, 0.0, 0.0, 0.1)), drawn.choice((0.0, 0.0, 0.3)),
        )  # fmt: skip
        if producer == JAVA:  # it makes no such messages
            shares = replace(shares, corrupt=0.0, encrypted=0.0, chunked=0.0)
        if topic.partitions and drawn.random() < 0.3:
            made.read_as = drawn.choice(topic.names())
        steps = [0, 1] if KINDS[kind].versions and drawn.random() < 0.6 else [0]
        if kind == AVRO and drawn.random() < 0.2:
            steps.append(BAD)
        for version in steps:
            schema = KINDS[kind].schema(version)
            if schema is not None:
                topic.versions[version] = self.broker.register(name, schema)
            for one in topic.names():
                if made.read_as in {one, name}:
                    self._publish(made, one, version, shares)
        return made

    def _publish(self, made: Published, name: str, version: int, shares: Shares) -> None:
        """Publish entries in a topic partition."""
        drawn, number = self.drawn, made.topic.versions.get(version)
        entries = [_drafts(drawn, made, version, shares) for _ in range(drawn.randint(1, 8))]
        drafts = [one for entry in entries for one in entry]
        if made.producer == JAVA:
            known = self.java.publish(drawn, made.kind, name, drafts, number)
        else:
            known = raw_entries(drawn, self.broker, name, entries, number)
        partition = int(name.rpartition("-")[2]) if made.topic.partitions else -1
        for one in drafts:
            of_draft = facts.of_draft(one, made.topic.name, partition)
            made.facts[one.number] = of_draft | known[one.number]


def _drafts(drawn: random.Random, made: Published, version: int, shares: Shares) -> list[Draft]:
    """Draw the messages of an entry, which have one key."""
    kind = KINDS[made.kind]
    keys = _TEXT_KEYS if made.kind in (TEXT, INLINE, SEPARATED) else _KEYS
    key, ordering_key = drawn.choice(keys), drawn.choice(_ORDERING_KEYS)
    chunked = drawn.random() < shares.chunked
    locked = not chunked and drawn.random() < shares.encrypted
    deliver_ms = None
    # A reading without an end does not wait for encrypted messages that it leaves out.
    soon = not locked and drawn.random() < 0.6
    if not chunked and drawn.random() < shares.delayed:
        delay_s = drawn.uniform(0.0, _SOON_S) if soon else _LATER_S
        deliver_ms = int((time.time() + delay_s) * 1_000)
    found = []
    for _ in range(1 if chunked else drawn.choice((1, 1, 3, 10))):
        number = len(made.sent)
        bad = kind.malformed(number) if drawn.random() < shares.corrupt else None
        tombstone = bad is None and kind.tombstones and drawn.random() < 0.1
        value = bad if bad is not None or tombstone else kind.encoded(version, number, key)
        made.sent.append(
            Sent(
                number, made.topic.name, 0, 0, key, ordering_key, made.kind, version, tombstone,
                bad is not None, value, confirmed=True,
            )
        )  # fmt: skip
        # Java's client stores the key of such a pair as bytes.
        as_bytes = made.kind == SEPARATED and made.producer == JAVA and key is not None
        found.append(
            Draft(
                number, value, str(key).encode() if as_bytes else key, ordering_key,
                number + 1,
                {"n": str(number)}, deliver_ms, locked, chunked,
            )
        )  # fmt: skip
    numbers = {one.number for one in found}
    made.encrypted |= numbers if locked else set()
    made.chunked |= numbers if chunked else set()
    if deliver_ms is not None:
        (made.soon if soon else made.later).update(numbers)
    return found


def readings(
    drawn: random.Random, ways: Sequence[str], made: Published, count: int
) -> list[Reading]:
    """Return some ways to read a topic, each with its own options."""
    found = []
    for way in drawn.sample(ways, min(count, len(ways))):
        spark = way in SPARK
        how = Reading(
            way,
            drawn.choice(MODES) if spark else "",
            drawn.choice((ALL, ALL, SOME, METADATA, BYTES)) if spark else ALL,
            way in NAMED and drawn.random() < 0.4,
            way in SKIPPING and drawn.random() < 0.5,
            drawn.choice((WIRE, WIRE, CLIENT)) if way in BY_CLIENT else WIRE,
            drawn.choice(("embedded", "embedded", "processes:1")) if way in LIVE else "embedded",
            way in STREAMS and drawn.random() < 0.7,
        )
        if how.by_pulsar_name or made.kind == SEPARATED or made.chunked or made.encrypted:
            how = replace(how, transport=WIRE)
        if how.transport == CLIENT:
            how = replace(how, skips_encrypted=False)
        found.append(how)
    return found


SPARK = ("spark batch", "spark stream", "table", "table stream")
"""Ways to read with Spark."""
NAMED = ("spark batch", "spark stream")
"""Ways to read that name a format."""
STREAMS = ("spark stream", "table stream")
"""Ways to read that are streaming queries."""
HANDLERS = ("handlers", "coroutines", "taken", "park", "ray job")
"""Ways to read that give messages, not rows."""
LIVE = ("spark stream", "embedded", "batches", *HANDLERS)
"""Ways to read that consume, and may have workers."""
SKIPPING = (*LIVE, "table stream")
"""Ways to read that have ``onEncrypted``."""
PLANS = ("spark batch", "table", "read", "ray")
"""Ways to read storage without a subscription. They also read messages that are not due."""
BY_CLIENT = (*(way for way in LIVE if way != "park"), *PLANS)
"""Ways to read that are also read with pulsar-client."""
WAYS = (*SPARK, "embedded", "batches", *HANDLERS, "read", "ray")
