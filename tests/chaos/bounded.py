"""Chaos for bounded reads: topics, bounds and faults by seed, compared with the stored messages.

``python -m tests.proofs bounded`` starts a broker of its own. The round of a seed writes a topic
and keeps the id of every message that the broker confirmed; then it reads between drawn bounds,
while something happens to the broker, its admin interface, the connections or the topic. A
read has to give exactly what is stored between its start and the end that its plan tells, or to
fail by name, in time; and to leave nothing behind.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pulsar
import pyarrow as pa

from keyshard import KeyShardSource
from keyshard.config.segments import Segments
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.read_bounds import Bound, Edge
from keyshard.core.position.split import Split, cut
from keyshard.core.protobuf import Value
from keyshard.errors import (
    AdminError,
    BrokerUnavailableError,
    ChunkedMessageError,
    DataLossTrimmedError,
    KeyShardError,
    ReplayTimeoutError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from tests.chaos.admin_proxy import DRIPS, HANGS, AdminProxy
from tests.chaos.cluster import Cluster
from tests.contract.raw_protocol import ABORT, COMMIT, RawConnection
from tests.helpers import wait_until
from tests.proofs.runner import Options, Outcomes, Proof, outcome_of
from tests.support.deadlines import deadline, joined

TIMEOUT_MS = 6_000
"""``operation_timeout_ms`` of reads."""
DEADLINE_S = deadline(45)
"""A read that takes longer has no end: several waits of ``TIMEOUT_MS``, and a restart."""
ASK_S = deadline(60)
"""Longest time of a request of an administrator, with what the broker refuses meanwhile."""
CHAIN_END_S = deadline(180)
"""Most seconds until a chain of reads has all messages after the last one was published."""
COORDINATOR = "/lookup/v2/topic/persistent/pulsar/system/transaction_coordinator_assign-partition-0"
LATER_MS = 1 << 60
READS = 12
"""Reads of a round."""
COLUMNS = ["value", "__key", "__messageId", "__partition", "__publishTime"]
SEGMENTS: Sequence[Literal["broker", "auto"]] = ("broker", "auto")
SETTINGS = {
    "transactionCoordinatorEnabled": "true",
    "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    "managedLedgerMaxEntriesPerLedger": "15",
    "maxMessageSize": str(1 << 18),
}
PASSING = (
    "none", "none", "cut", "cut", "cut behind", "cut behind", "stall", "freeze", "unload", "unload",
    "admin", "admin", "grow", "publish", "kill", "hang", "drip",
)  # fmt: skip
"""Faults after which everything is there."""
LASTING = ("trim", "delete", "anew")
"""Faults that take away what was planned."""
UNAVAILABLE = (BrokerUnavailableError, ReplayTimeoutError)
_GARBAGE = ("admin", "hang", "drip")


@dataclass(frozen=True, order=True)
class Stored:
    """A message as it was confirmed."""

    partition: int
    id: MessageId
    number: int
    key: str | None


@dataclass
class Topic:
    """A topic and its confirmed messages."""

    name: str
    partitions: int
    stored: list[Stored] = field(default_factory=list)
    chunked: list[tuple[int, MessageId]] = field(default_factory=list)
    opened: list[tuple[int, MessageId, tuple[Value, Value], list[Stored]]] = field(
        default_factory=list
    )
    """Transactions that have not ended."""
    times: dict[tuple[int, MessageId], int] = field(default_factory=dict)

    def where(self) -> list[TopicPartition]:
        """Its topic partitions."""
        numbers = range(self.partitions) if self.partitions else [-1]
        return [TopicPartition(self.name, number) for number in numbers]

    def path(self, where: TopicPartition | None = None) -> str:
        """Return the admin path of the topic, or of one of its topic partitions."""
        return "/admin/v2/" + (where.name if where else self.name).replace("://", "/")


class Violation(Exception):  # noqa: N818 - what is looked for
    """A promise was broken."""


class World:
    """A broker and its faults."""

    def __init__(self, cluster: Cluster, admin: AdminProxy) -> None:
        self.cluster, self.admin = cluster, admin
        self.client = self._connected()
        self._numbers = 0

    def _connected(self) -> pulsar.Client:
        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        return pulsar.Client(self.cluster.direct_url, logger=quiet, operation_timeout_seconds=60)

    def close(self) -> None:
        """Close its connections."""
        self.client.close()

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        """One request, again while the broker is busy with a fault."""
        return self.cluster.ask(method, path, time.monotonic() + ASK_S, **content)

    def number(self) -> int:
        """Number of the next message."""
        self._numbers += 1
        return self._numbers

    def namespace(self, name: str, retention: int) -> str:
        self.ask("PUT", f"/admin/v2/namespaces/public/{name}")
        kept = {"retentionTimeInMinutes": retention, "retentionSizeInMB": retention}
        self.ask("POST", f"/admin/v2/namespaces/public/{name}/retention", json=kept)
        return f"public/{name}"

    def create(self, name: str, partitions: int) -> Topic:
        topic = Topic(f"persistent://{name}", partitions)
        if partitions:
            self.ask("PUT", f"{topic.path()}/partitions", json=partitions)
        else:
            self.ask("PUT", topic.path())
        return topic

    # -- what is written

    def publish(self, topic: Topic, chance: random.Random, count: int) -> None:
        """Publish messages to each topic partition, with one producer for each."""
        batching = chance.choice(["none", "default", "keyed"])
        kinds = pulsar.CompressionType
        compression = chance.choice([kinds.NONE, kinds.LZ4, kinds.ZLib, kinds.ZSTD, kinds.SNAPPY])
        size = chance.choice([0, 10, 3_000, 30_000])
        run = chance.randint(2, 12)
        for where in topic.where():
            by_key = batching == "keyed"
            producer = self.client.create_producer(
                where.name,
                batching_enabled=batching != "none",
                batching_type=(
                    pulsar.BatchingType.KeyBased if by_key else pulsar.BatchingType.Default
                ),
                batching_max_messages=run,
                batching_max_publish_delay_ms=5_000,
                compression_type=compression,
                block_if_queue_full=True,
                send_timeout_millis=0,
            )
            topic.stored.extend(self._sent(producer, where, chance, count, size))
            producer.close()

    def _sent(
        self, producer: Any, where: TopicPartition, chance: random.Random, count: int, size: int
    ) -> list[Stored]:
        sent: list[Stored] = []

        def send(number: int, key: str | None) -> None:
            def done(result: Any, at: Any) -> None:
                if result != pulsar.Result.Ok:
                    return
                one = MessageId(at.ledger_id(), at.entry_id(), max(0, at.batch_index()))
                sent.append(Stored(where.partition, one, number, key))

            value = b"%d|" % number + chance.randbytes(size)
            producer.send_async(value, done, partition_key=key)

        for _ in range(count):
            send(self.number(), chance.choice(["a", "b", "c", None]))
        producer.flush()
        assert len(sent) == count, "all are confirmed"
        return sent

    def publish_chunked(self, topic: Topic, chance: random.Random) -> None:
        where = chance.choice(topic.where())
        producer = self.client.create_producer(
            where.name, batching_enabled=False, chunking_enabled=True
        )
        at = producer.send(b"x" * (600 << 10), partition_key="a")
        producer.close()
        topic.chunked.append((where.partition, MessageId(at.ledger_id(), at.entry_id(), 0)))

    def transact(self, topic: Topic, chance: random.Random, how: int | None) -> None:
        """Publish in a transaction; end it by ``how`` (COMMIT, ABORT), or leave it open."""
        where = chance.choice(topic.where())
        self.ask("GET", COORDINATOR)
        self.ask("GET", f"/lookup/v2/topic/{where.name.replace('://', '/')}")
        keys = ["a"] * chance.randint(1, 4)
        with self.raw() as connection:
            transaction = connection.begin(where.name, keys)
            stored = [
                Stored(where.partition, MessageId(*one, 0), -1, "a") for one in connection.stored
            ]
            if how is None:
                topic.opened.append((where.partition, stored[0].id, transaction, stored))
                return
            connection.end(transaction, how)
        if how == COMMIT:
            topic.stored.extend(stored)

    def raw(self) -> RawConnection:
        return RawConnection("127.0.0.1", int(self.cluster.direct_url.rpartition(":")[2]))

    def end_transactions(self, topic: Topic, chance: random.Random) -> None:
        opened, topic.opened = topic.opened, []
        for _, _, transaction, stored in opened:
            how = chance.choice([COMMIT, ABORT])
            self._end(transaction, how)
            if how == COMMIT:
                topic.stored.extend(stored)

    def _end(self, transaction: tuple[Value, Value], how: int) -> None:
        """End a transaction. A broker that was started again needs a look-up of its coordinator."""
        self.ask("GET", COORDINATOR)

        def ended() -> bool:
            with self.raw() as connection:
                connection.coordinate()
                try:
                    connection.end(transaction, how)
                except AssertionError as exc:
                    if "coordinator" not in str(exc):
                        raise
                    return False
            return True

        wait_until(ended, ASK_S)

    def roll(self, topic: Topic) -> None:
        for where in topic.where():
            self.ask("PUT", f"{topic.path(where)}/unload")

    # -- what happens while it is read

    def fault(self, name: str, topic: Topic, chance: random.Random) -> None:
        """Inject a fault; the proxy injects those of the admin interface."""
        happens: dict[str, Callable[[Topic, random.Random], None]] = {
            "cut": self._cut, "cut behind": self._cut_behind, "stall": self._stall,
            "freeze": self._freeze, "kill": self._kill, "unload": self._unload,
            "grow": self._grow, "publish": self._publish, "trim": self._trim,
            "delete": self._delete, "anew": self._anew,
        }  # fmt: skip
        if name in happens:
            happens[name](topic, chance)

    def _cut(self, _: Topic, chance: random.Random) -> None:
        for _again in range(chance.randint(1, 6)):
            self.cluster.proxy.cut()
            time.sleep(chance.random() * 0.1)

    def _cut_behind(self, _: Topic, chance: random.Random) -> None:
        self.cluster.proxy.cut_behind(int(2 ** (chance.random() * 18)))

    def _stall(self, _: Topic, chance: random.Random) -> None:
        self.cluster.proxy.stall()
        time.sleep(chance.random() * 3)
        self.cluster.proxy.resume()

    def _freeze(self, _: Topic, chance: random.Random) -> None:
        self.cluster.freeze()
        time.sleep(chance.random() * 4)
        self.cluster.thaw()

    def _kill(self, *_: object) -> None:
        self.cluster.kill()
        self.cluster.start()
        # The client waits ever longer before it connects again.
        self.client.close()
        self.client = self._connected()

    def _unload(self, topic: Topic, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 3)):
            self.roll(topic)
            time.sleep(chance.random() * 0.2)

    def _grow(self, topic: Topic, _: random.Random) -> None:
        if topic.partitions:
            self.ask("POST", f"{topic.path()}/partitions", json=topic.partitions + 1)

    def _publish(self, topic: Topic, chance: random.Random) -> None:
        self.publish(topic, chance, chance.randint(1, 30))

    def _trim(self, topic: Topic, _: random.Random) -> None:
        self.roll(topic)
        for where in topic.where():
            # Refused where there is nothing to trim.
            httpx.post(
                f"{self.cluster.admin_url}{topic.path(where)}/trim", timeout=ASK_S, trust_env=False
            )

    def _delete(self, topic: Topic, _: random.Random) -> None:
        suffix = "/partitions" if topic.partitions else ""
        self.ask("DELETE", f"{topic.path()}{suffix}", params={"force": "true"})

    def _anew(self, topic: Topic, chance: random.Random) -> None:
        self._delete(topic, chance)
        self.create(topic.name.removeprefix("persistent://"), topic.partitions)
        self._publish(Topic(topic.name, topic.partitions), chance)


@dataclass
class Read:
    """One read: its bounds and its rows."""

    start: Any = Edge.EARLIEST
    end: Any = Edge.LATEST
    disorder_s: float | None = None
    parts: int = 1
    keys: frozenset[str] | None = None
    splits: tuple[Split, ...] = ()
    rows: list[tuple[int, MessageId, int, str | None, int]] = field(default_factory=list)
    error: BaseException | None = None
    took_s: float = 0.0

    def run(
        self, source: KeyShardSource, between: Callable[[], None], again: random.Random
    ) -> None:
        """Plan, call ``between``, and read each part as a separate task."""
        began_s = time.monotonic()
        try:
            self.splits = plan_read(
                source, self.start, self.end, disorder_max_s=self.disorder_s,
                segments=Segments("auto"),
            )  # fmt: skip
            between()
            for split in cut(self.splits, self.parts):
                segments = Segments(again.choice(SEGMENTS))
                if again.random() < 0.1:
                    self._abandoned(source, split, segments)
                for batch in self._batches(source, split, segments):
                    self.rows.extend(map(_row, batch.to_pylist()))
        except BaseException as exc:  # noqa: BLE001 - judged by its kind
            self.error = exc
        self.took_s = time.monotonic() - began_s

    def _batches(
        self, source: KeyShardSource, split: Split, segments: Segments
    ) -> Iterator[pa.RecordBatch]:
        connection = source.how_to_connect()
        return read_splits(connection, [split], COLUMNS, keys=self.keys, segments=segments)

    def _abandoned(self, source: KeyShardSource, split: Split, segments: Segments) -> None:
        """Begin a task, and end it in the middle."""
        batches = self._batches(source, split, segments)
        next(batches, None)
        batches.close()  # type: ignore[attr-defined]


def _row(one: dict[str, Any]) -> tuple[int, MessageId, int, str | None, int]:
    ledger, entry, index = map(int, one["__messageId"].split(":"))
    text = one["value"].partition(b"|")[0]
    number = int(text) if text.isdigit() else -1
    published = round(one["__publishTime"].timestamp() * 1000)
    return one["__partition"], MessageId(ledger, entry, index), number, one["__key"], published


def expected(topic: Topic, read: Read) -> list[tuple[int, MessageId, int, str | None]]:
    """Return the stored messages between the start of a read and the ends of its plan."""
    found = []
    ends = {one.topic_partition.partition: one.end for one in read.splits}
    for one in sorted(topic.stored):
        if one.partition not in ends or (read.keys is not None and one.key not in read.keys):
            continue
        start = _of(read.start, topic, one.partition)
        bounds = [_inside(start, one, topic, edge=False), _inside(
            ends[one.partition], one, topic, edge=True)]  # fmt: skip
        if all(bounds):
            found.append((one.partition, one.id, one.number, one.key))
    return found


def _of(bound: Any, topic: Topic, partition: int) -> Any:
    if not isinstance(bound, dict):
        return bound
    return bound[TopicPartition(topic.name, partition)]


def _inside(bound: Any, one: Stored, topic: Topic, *, edge: bool) -> bool:
    """Whether a message is before the end (``edge``), or not before the start."""
    if bound is Edge.LATEST or bound is Edge.EARLIEST:
        return (bound is Edge.LATEST) == edge
    at: Any = one.id
    if isinstance(bound, int):
        # A message that was published after the times were read is later than all of them.
        at = topic.times.get((one.partition, one.id), LATER_MS)
    before: bool = at < bound
    return before == edge


class Round:
    """One topic, and reads of it."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.counts: Counter[str] = Counter()
        chance = self.chance = random.Random(seed)
        self.loses = chance.random() < 0.25
        namespace = world.namespace(f"r{seed}", 0 if self.loses else -1)
        self.topic = world.create(f"{namespace}/t", chance.choice([0, 0, 1, 2, 4]))
        self.source = KeyShardSource(
            self.topic.name,
            service_url=world.cluster.proxied_url,
            admin_url=world.admin.url,
            operation_timeout_ms=TIMEOUT_MS,
        )

    def run(self) -> Counter[str]:
        """Write, read, and judge; return the outcomes of reads under each fault."""
        spoilt = self.world.admin.spoilt
        self._write()
        self._know()
        if self.loses:
            self._read(self.chance.choice(LASTING))
            return self.counts
        for _ in range(READS):
            self._read(self.chance.choice(PASSING))
            if self.topic.opened and self.chance.random() < 0.3:
                self.world.end_transactions(self.topic, self.chance)
        self._chain()
        self._left_nothing()
        self.counts["spoilt answers of the admin interface"] = self.world.admin.spoilt - spoilt
        return self.counts

    def _write(self) -> None:
        world, topic, chance = self.world, self.topic, self.chance
        for _ in range(chance.randint(1, 8)):
            kinds = ["publish"] * 5 + ["commit", "abort", "roll"]
            kind = chance.choice(kinds + ["chunked"] * (chance.random() < 0.2))
            if kind == "publish":
                world.publish(topic, chance, chance.randint(1, 60))
            elif kind == "roll":
                world.roll(topic)
            elif kind == "chunked":
                world.publish_chunked(topic, chance)
            else:
                world.transact(topic, chance, COMMIT if kind == "commit" else ABORT)
        if not self.loses and chance.random() < 0.4:
            world.transact(topic, chance, None)
            world.publish(topic, chance, chance.randint(1, 20))

    def _know(self) -> None:
        """Read everything without a fault. The rows also give the publish times."""
        if self.topic.chunked:
            return
        read = Read()
        read.run(self.source, lambda: None, random.Random(0))
        self._judge(read, "none")
        self.topic.times.update({(row[0], row[1]): row[4] for row in read.rows})

    def _read(self, fault: str) -> None:
        world, chance = self.world, self.chance
        read = self._drawn()
        inside = random.Random(chance.random())
        # Before the plan, between plan and read, or while it is read.
        when = chance.choice([0, 1, 2])
        by_partition = isinstance(read.start, dict) or isinstance(read.end, dict)
        if fault in LASTING or (fault == "grow" and by_partition):
            # Bounds of topic partitions name all that there are when a read is planned.
            when = 1
        rate = chance.choice([0.1, 0.4])
        with self._spoilt(fault, rate):
            happens = threading.Thread(
                target=self._later, args=(fault, inside, chance.random() * 0.15), name="fault"
            )
            if when == 0:
                happens.start()

            def between() -> None:
                if when == 1:
                    world.fault(fault, self.topic, inside)
                elif when == 2:
                    happens.start()

            read.run(self.source, between, random.Random(chance.random()))
            if happens.ident is not None:
                joined(happens, 120)
        world.cluster.proxy.cut_behind(1 << 60)
        if fault == "grow" and self.topic.partitions:
            found = world.ask("GET", f"{self.topic.path()}/partitions").json()["partitions"]
            self.topic.partitions = found
        self._judge(read, fault)

    def _later(self, fault: str, chance: random.Random, wait_s: float) -> None:
        time.sleep(wait_s)
        try:
            self.world.fault(fault, self.topic, chance)
        except Exception:  # noqa: BLE001 - a thread's end
            traceback.print_exc()

    @contextmanager
    def _spoilt(self, fault: str, rate: float) -> Iterator[None]:
        kinds = {"hang": (HANGS,), "drip": (DRIPS,)}
        if fault in _GARBAGE:
            seed = f"{self.seed} {rate}"
            self.world.admin.spoil(seed, rate, *([kinds[fault]] if fault in kinds else []))
        try:
            yield
        finally:
            self.world.admin.spoil(0, 0.0)

    def _drawn(self) -> Read:
        chance, topic = self.chance, self.topic
        read = Read(parts=chance.choice([1, 1, 2, 5, 40]))
        if chance.random() < 0.2:
            read.keys = frozenset(chance.sample(["a", "b", "c"], 2))
        times = sorted(set(topic.times.values()))
        kind = chance.choice(["all", "positions", "positions", "times"])
        if kind == "times" and times and not topic.chunked and not topic.opened:
            known = {(one.partition, one.id) for one in topic.stored} <= topic.times.keys()
            if known:
                read.start, read.end = sorted(chance.choice(times) for _ in range(2))
                read.disorder_s = chance.choice([None, 600.0])
        elif kind == "positions":
            starts: dict[TopicPartition, Bound] = {}
            ends: dict[TopicPartition, Bound] = {}
            for where in topic.where():
                ids = sorted(one.id for one in topic.stored if one.partition == where.partition)
                held = [at for number, at, *_ in topic.opened if number == where.partition]
                ids = [one for one in ids if not held or one < min(held)]
                starts[where], ends[where] = Edge.EARLIEST, Edge.LATEST
                if ids:
                    first, last = sorted(chance.choice(ids) for _ in range(2))
                    bounds: list[Bound] = [first, first, Edge.EARLIEST]
                    starts[where] = chance.choice(bounds)
                    bounds = [last, last, Edge.LATEST]
                    ends[where] = chance.choice(bounds)
            read.start, read.end = starts, ends
        return read

    def _judge(self, read: Read, fault: str) -> None:
        topic = self.topic
        outcome = "rows" if read.error is None else type(read.error).__name__
        self.counts[f"{fault}: {outcome}"] += 1
        what = f"{fault}, {read.start} to {read.end}, {read.parts} parts"
        if read.took_s > DEADLINE_S:
            raise Violation(f"{what}: took {read.took_s:.0f} s, {outcome}")
        if read.error is not None:
            self._judge_error(read, fault, what)
            return
        got = [row[:4] for row in read.rows]
        wanted = expected(topic, read)
        if got != wanted:
            missing = [one for one in wanted if one not in set(got)]
            more = [one for one in got if one not in set(wanted)]
            raise Violation(
                f"{what}: {len(got)} rows instead of {len(wanted)}; missing {missing[:5]}, "
                f"unexpected {more[:5]}; ends {[one.end for one in read.splits]}"
            )
        self._judge_ends(read, what)

    def _judge_ends(self, read: Read, what: str) -> None:
        """A read to the latest reaches all that was confirmed, up to an open transaction."""
        for split in read.splits:
            number = split.topic_partition.partition
            if _of(read.end, self.topic, number) is not Edge.LATEST:
                continue
            held = [at for where, at, *_ in self.topic.opened if where == number]
            last = max(
                (one.id for one in self.topic.stored
                 if one.partition == number and (not held or one.id < min(held))), default=None,
            )  # fmt: skip
            behind = isinstance(split.end, MessageId) and (last is None or last < split.end)
            if last is not None and not behind and "publish" not in what:
                raise Violation(f"{what}: ends at {split.end} before {last}")
            if held and isinstance(split.end, MessageId) and split.end > min(held):
                raise Violation(f"{what}: ends at {split.end} behind what is held back at {held}")

    def _judge_error(self, read: Read, fault: str, what: str) -> None:
        error = read.error
        if not isinstance(error, KeyShardError):
            assert error is not None
            traceback.print_exception(error)
            raise Violation(f"{what}: {error!r}, which says nothing to a user")
        allowed: tuple[type[BaseException], ...] = ()
        if fault in LASTING:
            allowed = (DataLossTrimmedError, TopicRecreatedError, TopicNotFoundError)
        elif fault not in ("none", "grow", "publish"):
            allowed = UNAVAILABLE
        if fault in _GARBAGE:
            allowed = (*allowed, AdminError)
        if self.topic.chunked:
            allowed = (*allowed, ChunkedMessageError)
        if not isinstance(error, allowed):
            raise Violation(f"{what}: {error}")

    def _chain(self) -> None:
        """Read stretch by stretch while messages are published; check that all are read."""
        if self.topic.chunked or self.topic.opened:
            return
        world, topic = self.world, self.topic
        chance, stop = random.Random(self.chance.random()), threading.Event()

        def publish() -> None:
            while not stop.is_set():
                world.publish(topic, chance, 25)

        writer = threading.Thread(target=publish, name="writer")
        writer.start()
        starts: Any = Edge.EARLIEST
        rows: list[Any] = []
        end_s = time.monotonic() + 4
        error: BaseException | None = None
        while True:
            if time.monotonic() > end_s:
                stop.set()
                writer.join(60)
            if time.monotonic() > end_s + CHAIN_END_S:
                alive = "the writer still runs" if writer.is_alive() else "no read succeeds"
                raise Violation(f"chain: {alive}, last error {error!r}")
            is_last = not writer.is_alive()
            if self.chance.random() < 0.2:
                world.roll(topic)
            read = Read(starts, Edge.LATEST)
            read.run(self.source, lambda: None, random.Random(0))
            error = read.error
            if error is not None:
                if isinstance(error, UNAVAILABLE):
                    continue
                stop.set()
                raise Violation(f"chain: {error!r}")
            rows.extend(read.rows)
            starts = {one.topic_partition: one.end for one in read.splits}
            self.counts["chained"] += 1
            if is_last:
                break
        # What was sent again after an unload is confirmed without its id.
        got, wanted = (sorted(numbers) for numbers in (
            [row[2] for row in rows], [one.number for one in topic.stored]
        ))  # fmt: skip
        if got != wanted:
            missing, more = Counter(wanted) - Counter(got), Counter(got) - Counter(wanted)
            raise Violation(f"chain: missing {missing}, twice {more}")

    def _left_nothing(self) -> None:
        end_s = time.monotonic() + 30
        for where in self.topic.where():
            while True:
                path = f"{self.topic.path(where)}/internalStats"
                cursors = self.world.ask("GET", path).json()["cursors"].keys() - {"pulsar.dedup"}
                if not cursors:
                    break
                if time.monotonic() > end_s:
                    raise Violation(f"left {sorted(cursors)}")
                time.sleep(0.2)


def _outcomes(_: Options, seeds: range) -> Outcomes:
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="keyshard-bounded-"))
        cluster = opened.enter_context(Cluster(Path(folder), SETTINGS))
        admin = opened.enter_context(AdminProxy(cluster.admin_url))
        world = opened.enter_context(closing(World(cluster, admin)))
        for seed in seeds:
            yield outcome_of(seed, lambda seed: Round(world, seed).run())


PROOF = Proof(_outcomes, seeds=20, minutes=10.0)
