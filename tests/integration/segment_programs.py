"""Random programs that fill one topic: all kinds of entries, transactions, unloads and deletions.

A seed is a program. Each step draws its details from a seed of its own, so that a program from
which steps are removed still does the same in the others.
"""

from __future__ import annotations

import random
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import httpx
import pulsar

from keyshard.broker.memory import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.protobuf import Value, message
from keyshard.errors import BrokerUnavailableError
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness, to_pulsar
from tests.contract.raw_protocol import (
    ABORT,
    ADD_PARTITION,
    COMMIT,
    NEW_TXN,
    PRODUCER,
    PRODUCER_SUCCESS,
    RECEIPT,
    SEND,
    RawConnection,
    RawEntry,
    entry_of,
)
from tests.helpers import wait_until
from tests.support.deadlines import deadline

COORDINATOR = "/lookup/v2/topic/persistent/pulsar/system/transaction_coordinator_assign-partition-0"
OPEN_MS = 3_600_000
"""Time after which the broker aborts a transaction, milliseconds: later than any program ends."""
STEPS_MAX = 16
KINDS = {
    "client": 30, "raw": 18, "unload": 18, "begin": 8, "more": 6, "commit": 6, "abort": 6,
    "marker": 4, "plan": 4, "truncate": 2,
}  # fmt: skip
"""Weight of each kind of step. ``plan`` plans a read whose splits are read at the end."""
POISON = ("chunked", "chunk", "encrypted", "encrypted batch", "corrupt")
"""Steps that store an entry which cannot be read."""
POISONED = 0.25
"""Share of programs with such a step."""
MARKERS = (10, 11, 13)
"""Types of markers of replicated subscriptions."""
LOOKALIKES = (b"\xa0\x01", b"\xb0\x01\x07", b"\xb8\x01\x00", b"\x0e\x01", b"\x0e\x02", b"plain")
"""Bytes that look like tags of transactions and markers, or like magic numbers."""
COMPRESSIONS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
T_BACK_MS = 10_000
"""Most that drawn publish times go back, milliseconds."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program."""

    kind: str
    partition: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} in {self.partition} by {self.seed}"


@dataclass(frozen=True, slots=True)
class Program:
    """The steps for a topic with some partitions; 0: it is not partitioned."""

    partitions: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"{self.partitions} partitions; " + "; ".join(map(str, self.steps))


def program(seed: int) -> Program:
    """Draw a program."""
    chance = random.Random(seed)
    partitions = chance.choice((0, 1, 1, 2))
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randint(4, STEPS_MAX))
    if chance.random() < POISONED:
        kinds.insert(chance.randint(0, len(kinds)), chance.choice(POISON))
    if chance.random() < 0.6:
        kinds += ["unload"] * max(1, partitions)
    # An entry first: an empty topic has nothing to compare.
    steps = [
        Step(kind, chance.randrange(max(1, partitions)), chance.randrange(10_000))
        for kind in ("client", *kinds)
    ]
    return Program(partitions, tuple(steps))


def offloading(made: Program, seed: int) -> Program:
    """Return a program that also offloads, at some steps and at the end."""
    chance = random.Random(f"offloads of {seed}")
    steps = list(made.steps)
    for _ in range(chance.choice((0, 1, 2, 4))):
        at = chance.randint(1, len(steps))
        steps.insert(at, Step("offload", chance.randrange(max(1, made.partitions)), 0))
    steps += [Step("offload", number, 0) for number in range(max(1, made.partitions))]
    return replace(made, steps=tuple(steps))


def messages(chance: random.Random) -> list[Message]:
    """Draw the messages of a step."""
    count = chance.choice((1, 1, 2, 3, 5, 12, 40))
    return [_message(chance) for _ in range(count)]


def _message(chance: random.Random) -> Message:
    sizes = (0, 1, 8, 30, 30, 300, 3_000) if chance.random() < 0.97 else (200_000, 700_000)
    value = None if chance.random() < 0.1 else chance.randbytes(chance.choice(sizes))
    if chance.random() < 0.1:
        value = chance.choice(LOOKALIKES)
    named = {f"p{i}": chance.choice(("", "v", "ü\u0120\u0130\u0138")) for i in range(3)}
    return Message(
        value,
        key=chance.choice((None, "", "a", "b", "ключ", "long" * 40)),
        ordering_key=chance.choice((None, None, None, "", "o")),
        properties=dict(chance.sample(sorted(named.items()), chance.choice((0, 0, 1, 3)))),
        event_ms=chance.choice((0, 0, 1, 1_700_000_000_000)),
        deliver_at_ms=time.time_ns() // 1_000_000 + 3_600_000 if chance.random() < 0.05 else None,
    )


def entries(chance: random.Random) -> list[RawEntry]:
    """Draw entries as other clients store them."""
    return [_entry(chance) for _ in range(chance.choice((1, 1, 2, 4, 30)))]


def _entry(chance: random.Random) -> RawEntry:
    drawn = messages(chance)
    if chance.random() < 0.3:
        drawn = [Message(one.value, key="YQ==", key_is_base64=True) for one in drawn]
    batched = len(drawn) > 1 or chance.random() < 0.3
    fields, payload = entry_of(drawn if batched else drawn[:1], batched=batched)
    now_ms = time.time_ns() // 1_000_000
    more: dict[int, tuple[Value, ...]] = {
        1: (chance.choice(LOOKALIKES[-1:]), b"other"),
        3: (now_ms - chance.randrange(T_BACK_MS), 0),
        # A property, whose name and value are texts.
        4: (message({1: b"name", 2: "\u0120\u0130\u0138".encode()}),),
        5: (b"elsewhere",),
        12: (1, 2**63 + 5),
        16: (struct.pack(">q", 3), b"\xa0\x01"),
        19: (now_ms + 3_600_000, 1),
        24: (2**63,),
        30: (chance.choice(LOOKALIKES),),
        99: (chance.choice(LOOKALIKES), 1),
    }
    for number, values in more.items():
        if chance.random() < 0.12:
            fields[number] = chance.choice(values)
    return fields, payload


class Coordinator(RawConnection):
    """A connection that ends transactions, or publishes in them."""

    def new(self) -> tuple[Value, Value]:
        """Begin a transaction."""
        begun = self._request(NEW_TXN, NEW_TXN + 1, {1: 2, 2: OPEN_MS, 3: 0})
        return begun.get(2, 0), begun.get(3, 0)

    def publish_marker(self, topic: str, kind: int) -> None:
        """Publish a marker, as a replicator does."""
        self._request(PRODUCER, PRODUCER_SUCCESS, {1: topic.encode(), 2: 0, 3: 4})
        data = message({1: b"marker", 2: 0, 3: time.time_ns() // 1_000_000, 20: kind})
        framed = struct.pack(">I", len(data)) + data + b"\x08\x01"
        self._request(SEND, RECEIPT, {1: 0, 2: 0, 3: 1, 8: 1}, framed)

    def publish_in(
        self, transaction: tuple[Value, Value], topic: str, stored: Sequence[RawEntry]
    ) -> None:
        """Publish entries in a transaction."""
        least, most = transaction
        name = topic.encode()
        self._request(ADD_PARTITION, ADD_PARTITION + 1, {1: 3, 2: least, 3: most, 4: name})
        self._request(PRODUCER, PRODUCER_SUCCESS, {1: name, 2: 0, 3: 4, 12: 1})
        for number, (fields, payload) in enumerate(stored):
            now_ms = time.time_ns() // 1_000_000
            own: dict[int, Value] = {1: b"transaction", 2: number, 3: now_ms}
            data = message(own | fields | {22: least, 23: most})
            framed = struct.pack(">I", len(data)) + data + payload
            sent = {1: 0, 2: number, 3: fields.get(11, 1), 4: least, 5: most}
            self._request(SEND, RECEIPT, sent, framed)


@dataclass
class Transaction:
    """A transaction of one topic partition."""

    id: tuple[Value, Value]
    where: TopicPartition
    first: EntryId
    is_open: bool = True


@dataclass
class Filled:
    """A topic in which a program runs."""

    broker: DevBroker
    harness: PulsarHarness
    client: pulsar.Client
    made: Program
    namespace: str = "public/default"
    offload: Callable[[TopicPartition], None] | None = None
    """Offloads the closed ledgers of a topic partition."""
    name: str = field(init=False)
    transactions: list[Transaction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"persistent://{self.namespace}/segments-{uuid.uuid4().hex[:10]}"
        path, count = f"/admin/v2/{self.name.replace('://', '/')}", self.made.partitions
        if count:
            self.ask("PUT", f"{path}/partitions", json=count)
        else:
            self.ask("PUT", path)

    def ask(self, method: str, path: str, **content: Any) -> None:
        """Send an admin request, until it succeeds."""

        def succeeds() -> bool:
            url = f"{self.broker.admin_url}{path}"
            answer = httpx.request(
                method, url, timeout=deadline(20), follow_redirects=True, **content
            )
            return answer.is_success

        wait_until(succeeds)

    @property
    def partitions(self) -> list[TopicPartition]:
        """All topic partitions."""
        count = self.made.partitions
        return [TopicPartition(self.name, i) for i in range(count)] or [TopicPartition(self.name)]

    def run(self, step: Step) -> None:
        """Do one step, all but ``plan``."""
        where, chance = self.partitions[step.partition], random.Random(step.seed)
        path = f"/admin/v2/{where.name.replace('://', '/')}"
        if step.kind == "client":
            self._publish(where, chance)
        elif step.kind == "raw":
            self._publish_raw(where, entries(chance))
        elif step.kind == "marker":
            with self._connected(where) as connection:
                connection.publish_marker(where.name, chance.choice(MARKERS))
        elif step.kind == "offload":
            assert self.offload is not None, "only some brokers offload"
            self.offload(where)
        elif step.kind == "unload":
            self.ask("PUT", f"{path}/unload")
        elif step.kind == "truncate" and not self._open(where):
            # An open transaction whose entries are deleted has no state to wait for.
            self.ask("DELETE", f"{path}/truncate")
        elif step.kind in ("begin", "more"):
            self._publish_in_transaction(where, chance, new=step.kind == "begin")
        elif step.kind in ("commit", "abort"):
            self._end_transaction(where, chance, COMMIT if step.kind == "commit" else ABORT)
        elif step.kind in POISON:
            self._poison(where, step.kind)

    def _publish(self, where: TopicPartition, chance: random.Random) -> None:
        batched = chance.random() < 0.6
        by_key = batched and chance.random() < 0.4
        kind = pulsar.BatchingType.KeyBased if by_key else pulsar.BatchingType.Default
        producer = self.client.create_producer(
            where.name,
            schema=pulsar.schema.StringSchema()
            if chance.random() < 0.15
            else pulsar.schema.BytesSchema(),
            compression_type=getattr(pulsar.CompressionType, chance.choice(COMPRESSIONS)),
            batching_enabled=batched,
            batching_type=kind,
            batching_max_messages=chance.choice((2, 7, 1_000)),
            batching_max_publish_delay_ms=5_000,
        )
        failures: list[Any] = []

        def sent(result: Any, _message_id: Any) -> None:
            if result != pulsar.Result.Ok:
                failures.append(result)

        for one in messages(chance):
            # The wrapper drops an empty key, so the extension's own builder is used.
            producer._producer.send_async(to_pulsar(one), sent)
        producer.flush()
        producer.close()
        assert not failures

    @contextmanager
    def _connected(self, where: TopicPartition) -> Iterator[Coordinator]:
        # A coordinator starts after the first look-up, and a topic has an owner after it.
        for path in (COORDINATOR, f"/lookup/v2/topic/{where.name.replace('://', '/')}"):
            self.ask("GET", path)
        wait_until(lambda: self._held(where))
        connection = Coordinator("127.0.0.1", self.broker.port)
        with connection:
            yield connection

    def _publish_raw(self, where: TopicPartition, stored: Sequence[RawEntry]) -> None:
        with self._connected(where) as connection:
            connection.publish(where.name, stored)

    def _open(self, where: TopicPartition) -> list[Transaction]:
        return [one for one in self.transactions if one.is_open and one.where == where]

    def _publish_in_transaction(
        self, where: TopicPartition, chance: random.Random, *, new: bool
    ) -> None:
        known = self._open(where)
        chosen = None if new or not known else chance.choice(known)
        # Short, and without fields that replace those of transactions.
        stored = entries(chance)[:5]
        with self._connected(where) as connection:
            connection.coordinate()
            number = connection.new() if chosen is None else chosen.id
            connection.publish_in(number, where.name, stored)
            if chosen is None:
                self.transactions.append(Transaction(number, where, connection.stored[0]))

    def _end_transaction(self, where: TopicPartition, chance: random.Random, how: int) -> None:
        known = self._open(where)
        if not known:
            return
        chosen = chance.choice(known)
        with self._connected(where) as connection:
            connection.coordinate()
            connection.end(chosen.id, how)
        chosen.is_open = False
        self.settle()

    def settle(self) -> None:
        """Wait until the broker knows, for each topic partition, what open transactions hide."""
        for where in self.partitions:
            wait_until(lambda where=where: self._is_settled(where))  # type: ignore[misc]

    def _held(self, where: TopicPartition) -> tuple[EntryId | None] | None:
        """Return the last entry before an open transaction; ``None`` while the topic is loaded."""
        admin = self.harness.admin()
        try:
            admin.ledgers(where)
            return (admin.held_back_behind(where),)
        except BrokerUnavailableError:
            return None

    def _is_settled(self, where: TopicPartition) -> bool:
        known = self._held(where)
        if known is None:
            return False
        (held,) = known
        opened = min((one.first for one in self._open(where)), default=None)
        if opened is None or held is None:
            return opened is held
        ended = (one.first for one in self.transactions if not one.is_open and one.where == where)
        return held < opened and not any(held < one < opened for one in ended)

    def _poison(self, where: TopicPartition, kind: str) -> None:
        if kind == "chunked":
            self.harness.publish_chunked(where.name, "k")
        elif kind == "chunk":
            whole: dict[int, Value] = {6: b"k", 26: b"u", 27: 2, 28: 10}
            parts = [(whole | {29: number}, b"x" * 5) for number in range(2)]
            self._publish_raw(where, parts)
        elif kind == "corrupt":
            self.harness.publish_corrupt(where.name)
        else:
            self.harness.publish_encrypted(where.name, "k", 3 if kind == "encrypted batch" else 1)


Clients: TypeAlias = tuple[PulsarHarness, pulsar.Client]


@contextmanager
def fillers(broker: DevBroker) -> Iterator[Clients]:
    """The clients that programs share."""
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    with closing(PulsarHarness(broker.service_url, broker.admin_url)) as harness, closing(client):
        yield harness, client
