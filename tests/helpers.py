"""Small builders and fakes that several tests share."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from keyshard.broker.admin.port import Admin
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import Broker
from keyshard.columns.content import entry_block, gather
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.subscription_state import CursorState
from tests.support.deadlines import deadline, in_time

DEADLINE_S = deadline(float(os.environ.get("KEYSHARD_TEST_DEADLINE_S", "30")))
"""After this a wait has failed, seconds."""
_LISTENING = "0A"

Value = TypeVar("Value")

P0 = TopicPartition("persistent://public/default/t", 0)
P1 = TopicPartition("persistent://public/default/t", 1)
P2 = TopicPartition("persistent://public/default/t", 2)
COMMITTED = dict.fromkeys((P0, P1, P2), PartitionCheckpoint(floor=EntryId(10**6, 0)))
"""Topic partitions of a checkpoint that has everything."""


def block(
    ledger: int,
    entry: int,
    *keys: str | None,
    of: int | None = None,
    first: int = 0,
    indices: Sequence[int] | None = None,
    publish_ms: int = 1_000,
    event_ms: int = 0,
    values: Sequence[bytes] | None = None,
    ordering_key: str | None = None,
    properties: dict[str, str] | None = None,
    schema_version: int | None = None,
) -> EntryBlock:
    """Messages of one entry, one for each key; by default all there are, with key ``"k"``.

    Args:
        of: Messages of the whole entry, when the block holds a part only.
        first: Index of the first message, when ``indices`` are not given.
        values: Payloads; by default ``ledger:entry:index``.
    """
    keys = keys or ("k",)
    numbers = list(range(first, first + len(keys)) if indices is None else indices)
    payloads = list(values or [b"%d:%d:%d" % (ledger, entry, index) for index in numbers])
    batch_size = len(keys) if of is None else of
    return entry_block(
        EntryId(ledger, entry),
        batch_size=batch_size,
        batched=batch_size > 1,
        indices=numbers,
        values=payloads,
        partition_keys=list(keys),
        ordering_keys=[ordering_key] * len(keys),
        publish_ms=publish_ms,
        event_ms=[event_ms] * len(keys),
        properties=[dict(properties or {}) for _ in keys],
        schema_version=schema_version,
    )


def part(entry: int, *indices: int, of: int) -> EntryBlock:
    """Some messages of an entry of ledger 1 that has ``of`` messages."""
    return block(1, entry, *("k" for _ in indices), of=of, indices=indices)


def event_ms(blocks: Sequence[EntryBlock]) -> list[int | None]:
    """Event time of each message of some blocks, milliseconds; ``None`` when unset."""
    times = gather(blocks, ["__eventTime"])["__eventTime"].cast(pa.int64()).to_pylist()
    return [None if time is None else time // 1_000 for time in times]


def ids(blocks: Sequence[EntryBlock]) -> list[tuple[int, int]]:
    """(ledger, entry) of each block."""
    return [tuple(block.id) for block in blocks]  # type: ignore[misc]


def key_in(hash_range: HashRange, number: int = 0) -> str:
    """A key whose slot lies in ``hash_range``; different numbers give different keys."""
    found = (key for i in range(10**6) if key_slot(key := f"key-{i}") in hash_range)
    return next(key for i, key in enumerate(found) if i == number)


def keys_of(ranges: int) -> list[str]:
    """One key for each range of ``split_ring(ranges)``."""
    return [key_in(hash_range) for hash_range in split_ring(ranges)]


def present(value: Value | None) -> Value:
    """Return a value that a test expects to be set; fails on ``None``."""
    assert value is not None
    return value


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until ``condition`` holds; fails at the deadline."""
    end = time.monotonic() + deadline_s
    never = threading.Event()
    while not condition():
        in_time(end, "the condition did not come true before the deadline")
        never.wait(0.002)


def run_coroutine(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; fail if it takes too long."""
    asyncio.run(asyncio.wait_for(main, DEADLINE_S))


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Do the same as :func:`wait_until` in an event loop."""
    end = time.monotonic() + deadline_s
    while not condition():
        in_time(end, "the condition did not come true before the deadline")
        await asyncio.sleep(0.005)


def exactly(stream: socket.socket, size: int) -> bytes:
    """That many bytes of a connection; raises ``ConnectionError`` if it ends before."""
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


def listening(pid: int) -> set[tuple[str, int]]:
    """Address (as the kernel writes it) and port of each socket a process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # Closed meanwhile.
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


class FakeConsumer:
    """A consumer that delivers what the test put in, and remembers what was acknowledged."""

    def __init__(
        self,
        topic_partition: TopicPartition = P0,
        hash_range: HashRange | None = None,
        script: Sequence[Sequence[EntryBlock] | BaseException] = (),
    ) -> None:
        self.topic_partition = topic_partition
        self.hash_range = hash_range or split_ring(1)[0]
        self.script: deque[Sequence[EntryBlock] | BaseException] = deque(script)
        self.received = 0
        self.acknowledged: list[EntryId] = []
        self.errors: deque[BaseException] = deque()
        self.connected = True
        self.closed = False
        self.bell: Callable[[], None] | None = None
        self.bell_lock = threading.Lock()
        self.asked_connected = 0
        self.refused = ""

    def give(self, step: Sequence[EntryBlock] | BaseException) -> None:
        """Let something arrive now; call back if :meth:`when_ready` asked for it."""
        with self.bell_lock:
            self.script.append(step)
            bell, self.bell = self.bell, None
        if bell is not None:
            bell()

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self.bell_lock:
            assert self.bell is None, "asked to ring twice"
            if not self.script:
                self.bell = callback
                return
        callback()

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        assert self.bell is None, "received from though it was asked to ring"
        self.received += 1
        if not self.script:
            threading.Event().wait(min(timeout_ms, 2) / 1000)
            return []
        step = self.script.popleft()
        if isinstance(step, BaseException):
            raise step
        return list(step)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        if self.errors:
            raise self.errors.popleft()
        self.acknowledged.extend(entries)

    def last_entry(self) -> EntryId | None:
        return None

    def is_connected(self) -> bool:
        self.asked_connected += 1
        return self.connected

    def has_given_all(self) -> bool:
        return self.is_connected()

    def problem(self) -> str:
        return self.refused

    def close(self, *, for_another: bool = False) -> None:  # noqa: ARG002
        self.closed = True
        self.connected = False


class FakeAdmin(MemoryAdmin):
    """The admin interface; the test answers the requests of the runtime's start."""

    def __init__(self, cluster: str = "standalone", topics: Sequence[str] | None = None) -> None:
        super().__init__(MemoryCluster(), cluster)
        self.known = topics
        self.stats: dict[str, Any] | None = None
        self.state: CursorState | None = None
        self.closed = False

    def partition_count(self, topic: str) -> int | None:
        return 2 if self.known is None or topic in self.known else None

    def topics(self, *_: object) -> set[str]:
        return set(self.known or ())

    def created(self, *_: object) -> str:
        return "once"

    def remove_leftover(self, *_: object) -> bool:
        return True

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:  # noqa: ARG002
        return 50_000, 200_000

    def deduplicates(self, topic: str) -> bool:  # noqa: ARG002
        return False

    def deduplicates_by_topic(self, topic: str) -> bool:  # noqa: ARG002
        return False

    def subscription(self, *_: object, oldest: bool = False) -> dict[str, Any] | None:  # noqa: ARG002
        return self.stats

    def broker_state(self, *_: object) -> CursorState | None:
        return self.state

    def close(self) -> None:
        self.closed = True


def config(topic: str | list[str], **changes: Any) -> SourceConfig:
    """A source of topics, from their beginning, with four ranges."""
    fields: dict[str, Any] = {
        "subscription": "unit",
        "parallelism": 4,
        "starting_position": "earliest",
        "receive_threads": 2,
    }
    return SourceConfig(topic, **(fields | changes))


@contextmanager
def started(
    coordinator: Coordinator,
    checkpoint: Checkpoint | None = None,
    *,
    planned: bool = False,
    available_now: bool = False,
) -> Iterator[Coordinator]:
    """Start a coordinator; stop it at the end of the block, without a release."""
    coordinator.start(checkpoint, planned=planned, available_now=available_now)
    try:
        yield coordinator
    finally:
        coordinator.stop()


def running(
    cluster: MemoryCluster,
    source: SourceConfig,
    checkpoint: Checkpoint | None = None,
    *,
    admin: Admin | None = None,
    connect: Callable[[], Broker] | None = None,
    **how: bool,
) -> AbstractContextManager[Coordinator]:
    """A coordinator on the in-memory broker; see :func:`started`."""
    coordinator = Coordinator(source, connect or (lambda: MemoryBroker(cluster)), admin)
    return started(coordinator, checkpoint, **how)


def keyshard_threads() -> set[threading.Thread]:
    """Return keyshard's threads; some threads of earlier tests live as long as the process."""
    return {one for one in threading.enumerate() if one.name.startswith("keyshard-")}


def received(coordinator: Coordinator, rows: int) -> None:
    """Wait until this many rows were accepted since the start."""
    wait_until(lambda: coordinator.status()["rowsReceived"] >= rows)


def rows_of(coordinator: Coordinator, end: Checkpoint) -> dict[int, list[dict[str, Any]]]:
    """All rows of a batch, by layout partition."""
    return {
        index: [
            row
            for part in coordinator.batches.read(end.batch_id, index)
            for row in part.to_pylist()
        ]
        for index in coordinator.batches.plan(end)
    }


def commit(coordinator: Coordinator) -> Checkpoint:
    """Cut, read and release one batch."""
    end = coordinator.batches.cut()
    assert end is not None
    rows_of(coordinator, end)
    coordinator.batches.release(end)
    return end
