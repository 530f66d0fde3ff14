"""The topic that a query writes to: its brokers, their faults, and the rows it must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from random import Random
from typing import Any, NamedTuple

from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.entry_producer import MemoryEntryProducer
from keyshard.broker.port import EntryProducer, PublishOptions
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import NOTHING
from tests.simulation.network import RECONNECT_S, Client, Network
from tests.simulation.pipeline.faults import Trouble
from tests.simulation.primitives import EPOCH_S
from tests.simulation.record import Record
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.shape import version_of

TOPIC = "out"
TROUBLE_S = 0.7
"""Mean time between two faults, seconds."""
TOO_FEW = 0.3
"""Probability that a broker before Pulsar 5.0 recovers too few ids of a name."""
AWAY_S = (0.05, 3.0)
"""Time that a killed broker is away, seconds."""
LASTING_S = (0.01, 2.0)
"""Time that writes are slow, or the quota is exceeded, seconds."""


class Place(NamedTuple):
    """Where Spark has a row."""

    batch: int
    partition: int
    """Number of the Spark partition."""
    row: int
    """Its number there."""


class Output:
    """The cluster of the written topic.

    Args:
        scheduler: Runs everything.
        seed: Decides all random draws.
        record: Gets lines for people.
        frames: Makes clients that speak frames; ``None`` for others.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        seed: str,
        record: Record,
        frames: Callable[[Network, Process], OutputClient] | None,
    ) -> None:
        self._scheduler = scheduler
        self._random = Random(f"{seed}:output")
        self._record = record
        self._frames = frames
        self.cluster = MemoryCluster(
            version=version_of(seed),
            entries_per_ledger=self._random.choice((7, 1_000)),
            now_ms=lambda: int((EPOCH_S + scheduler.now_s) * 1000),
        )
        topic = self.cluster.create_topic(TOPIC, self._random.choice((0, 1, 2, 3)))
        self.cluster.deduplicate(topic)
        self.where = self.cluster.partitions(topic)
        self.topic = topic
        self.network = Network(
            scheduler, Random(f"{seed}:output network"), Random(f"{seed}:output cuts"),
            self.cluster, record,
        )  # fmt: skip
        self.reached: Counter[Any] = Counter()
        self.used: Callable[[], Collection[str]] = tuple
        """Names that a running attempt uses: a broker forgets a name long after its last use."""
        self.places: dict[bytes, Place] = {}
        """Where Spark has each row that a task was given."""

    def client(self, process: Process) -> OutputClient:
        """The connection of an attempt."""
        if self._frames is not None:
            return self._frames(self.network, process)
        return MemoryOutputClient(self.network, process)

    def given(self, batch: int, partition: int, values: Sequence[bytes]) -> list[str]:
        """A task is given rows; the problems with that."""
        found = []
        for row, value in enumerate(values):
            place = Place(batch, partition, row)
            if self.places.setdefault(value, place) != place:
                found.append(f"{value!r} was {self.places[value]}, and is {place} when it repeats")
        return found

    def problems(self, committed: Mapping[int, Mapping[int, Sequence[bytes]]]) -> list[str]:
        """Problems of the stored rows, where Spark has committed some batches."""
        stored: Counter[bytes] = Counter()
        found: list[str] = []
        for where in self.where:
            last: dict[tuple[str | None, int], Place] = {}
            newest: dict[str | None, int] = {}
            log = self.cluster.log(where)
            for ordinal in range(log.first, len(log)):
                entry = log.get(ordinal)
                assert entry is not None
                if len({one.routing_key for one in entry.messages}) > 1:
                    found.append(f"entry {entry.id} has several keys")
                for message in entry.messages:
                    assert message.value is not None
                    stored[message.value] += 1
                    place = self.places.get(message.value)
                    if place is None:
                        found.append(f"{message.value!r} was given to no task")
                        continue
                    of_task = message.key, place.partition
                    if message.key is not None and (
                        last.get(of_task, place) > place
                        or newest.get(message.key, place.batch) > place.batch
                    ):
                        found.append(f"{message.value!r}, {place}, comes after a later row")
                    last[of_task] = place
                    newest[message.key] = place.batch
        found += [f"{value!r} is stored {n} times" for value, n in stored.items() if n > 1]
        for batch, partitions in committed.items():
            for values in partitions.values():
                found += [
                    f"{value!r} of batch {batch} is lost" for value in values if not stored[value]
                ]
        return found

    # -- faults ----------------------------------------------------------------------------------

    def trouble(self, enabled: Callable[[], bool]) -> None:
        """Inject faults at random times while `enabled` returns true."""
        while enabled():
            self._scheduler.sleep(self._random.expovariate(1 / TROUBLE_S))
            if enabled():
                self._strike()

    def heal(self) -> None:
        """End faults that last."""
        with self.cluster.lock:
            for where in self.where:
                self.cluster.release_writes(where)
            self.cluster.exceed_quota(self.topic, exceeded=False)

    def _strike(self) -> None:
        random, cluster, network = self._random, self.cluster, self.network
        where = random.choice(self.where)
        what = random.choice(
            (
                Trouble.CRASH, Trouble.UNLOAD, Trouble.CUT, Trouble.LATE, Trouble.LOST,
                Trouble.QUOTA, Trouble.FORGETS,
            )
        )  # fmt: skip
        if what is Trouble.CRASH:
            if not network.up:
                return
            network.up = False
            cluster.crash()
            self._recover_too_few(self.where)
            self._later(AWAY_S, self._up)
        elif what is Trouble.UNLOAD:
            cluster.unload(where)
            self._recover_too_few([where])
        elif what is Trouble.CUT:
            clients: list[OutputClient] = [
                one for one in network.clients if isinstance(one, OutputClient) and one.producers
            ]
            if not clients:
                return
            random.choice(clients).cut()
        elif what is Trouble.FORGETS:
            if not self._forget(where):
                return
        elif what is Trouble.LATE:
            cluster.hold_writes(where)
            self._later(LASTING_S, partial(cluster.release_writes, where))
        elif what is Trouble.LOST:
            cluster.hold_writes(where)
            self._later(LASTING_S, partial(self._lose, where))
            return
        else:
            cluster.exceed_quota(self.topic, exceeded=True)
            self._later(LASTING_S, partial(cluster.exceed_quota, self.topic, exceeded=False))
        self.note(what)

    def note(self, what: Trouble, about: str = "") -> None:
        """Count a fault."""
        self._record.note(f"FAULT {what.value} {about}".rstrip())
        self.reached[what, None] += 1

    def _forget(self, where: TopicPartition) -> bool:
        """Forget all names that nothing uses. Return whether there were any."""
        with self.cluster.lock:
            publishing = self.cluster.publishing
            if publishing._held.get(where):
                return False
            used = self.used()
            names = [
                name
                for name in publishing._ids(where)._stored
                if name not in used and (where, name) not in publishing._open
            ]
            for name in names:
                publishing.forget(where, name, NOTHING)
        return bool(names)

    def _recover_too_few(self, loaded: Iterable[TopicPartition]) -> None:
        """Let a broker know too few ids of some names, if its release may do so."""
        cluster, random = self.cluster, self._random
        if cluster.release.knows_every_id:
            return
        for where in loaded:
            stored = dict(cluster.publishing._ids(where)._stored)
            for name, last in sorted(stored.items()):
                if random.random() < TOO_FEW:
                    behind = max(NOTHING, last - random.choice((1, 3, 1 << 24, 1 << 62)))
                    cluster.forget_producer(where, name, behind)
                    self.note(Trouble.TOO_FEW, f"{name}: {behind} of {last}")

    def _lose(self, where: TopicPartition) -> None:
        if self.cluster.publishing._held.get(where):
            self.note(Trouble.LOST)
            self.cluster.fail_writes(where)
        else:
            self.cluster.release_writes(where)

    def _up(self) -> None:
        self.network.up = True

    def _later(self, after_s: tuple[float, float], action: Callable[[], None]) -> None:
        def run() -> None:
            self._scheduler.sleep(self._random.uniform(*after_s))
            action()

        self._scheduler.spawn(self.network.world, "later", run)


class OutputClient(Client):
    """The connection of an attempt."""

    producers: int = 0
    """Producers that were opened."""

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> EntryProducer:
        raise NotImplementedError

    def cut(self) -> None:
        """Lose the connection for a while."""
        raise NotImplementedError


class MemoryOutputClient(OutputClient):
    """A connection without frames."""

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> _Producer:
        self.step()
        inner = self.network.request(lambda: self._inner.entry_producer(topic_partition, how))
        self.producers += 1
        self.step()
        return _Producer(self, inner)

    def cut(self) -> None:
        dropped = self._inner.drop()

        def back() -> None:
            self.network.scheduler.sleep(self.network.random.uniform(*RECONNECT_S))
            while not self.network.up:
                self.network.scheduler.sleep(0.05)
            self._inner.reconnect(dropped)

        self.network.scheduler.spawn(self.process, "client", back)


class _Producer:
    """Implements the ``EntryProducer`` port; each entry takes time."""

    def __init__(self, client: MemoryOutputClient, inner: MemoryEntryProducer) -> None:
        self._client = client
        self._network = client.network
        self._inner = inner
        self.last_sequence_id = inner.last_sequence_id
        self.knows_every_id = inner.knows_every_id
        self.message_bytes_max = inner.message_bytes_max
        self.has_ended = inner.has_ended
        self.check = inner.check
        self.topic_partition = inner.topic_partition
        self.last_entry = inner.last_entry

    def publish(self, rows: Sequence[OutgoingMessage], sequence_id: int) -> Future[EntryId | None]:
        self._client.step()
        found = self._network.request(lambda: self._inner.publish(rows, sequence_id))
        self._client.step()
        return found

    def publish_all(
        self, columns: Outgoing, ends: Sequence[int], sequence_id: int
    ) -> list[Future[EntryId | None]]:
        found, start = [], 0
        for stop in ends:
            found.append(self.publish(columns.messages(start, stop), sequence_id + start))
            start = stop
        return found

    def flush(self) -> None:
        self._client.step()
        self._inner.flush()

    def close(self, timeout_s: float | None = None) -> None:
        self._client.step()
        self._network.travel()
        self._inner.close(timeout_s)
        self._client.step()
