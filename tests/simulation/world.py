"""One run: a cluster, a producer, a query that is started again whenever it dies, and faults."""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any, ClassVar

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryCluster, Message
from keyshard.broker.port import Broker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossAckedElsewhereError,
    DataLossTrimmedError,
    HistoryError,
    KeyShardError,
    TopicNotFoundError,
)
from keyshard.testing.verify.checkers import check
from tests.simulation.delays import Delays, small_checkpoints
from tests.simulation.deletions import Deletions, shows
from tests.simulation.faults import CELLS, TOPICS, Cell, Fault, Kind
from tests.simulation.injector import Injector
from tests.simulation.install import installed
from tests.simulation.network import ACK_GROUP_S, UNNOTICED_S, Admin, Client, Network
from tests.simulation.owed import Debts
from tests.simulation.primitives import EPOCH_S
from tests.simulation.record import Record, value_of
from tests.simulation.refused_entries import Refused
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.segments import Segments
from tests.simulation.shape import SUBSCRIPTION, Shape, version_of
from tests.simulation.spark import Query, Step, Storage, UserError, without_processes
from tests.simulation.starts import Starts
from tests.simulation.topics import PATTERN, Topics
from tests.simulation.wipe import Wiped

TRACE_MAX = 60
"""Lines of the trace that are kept for people."""
FAULTS_S = 30.0
"""Time after which no fault begins any more, seconds."""
HEALING_S = 8.0
"""Time that a fault lasts at most, seconds."""
SETTLE_S = 60.0
"""Time after the faults in which everything must be committed and acknowledged, seconds. It begins
again with each row that is committed."""
SLOW_WORLD = 5
"""How often as long a world may take in all that always commits rows."""
WIPED_MESSAGES_MIN = 30
"""Messages that come after a cluster was wiped, at least."""
BATCH_MESSAGES_MAX = 3
"""Messages of one producer batch at most."""


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    shape: Any
    faults: Sequence[object]
    reached: Counter[Any]
    """How often each fault hit each step."""
    trace: list[str]
    """The end of the trace."""
    now_s: float
    """Virtual time that it took, seconds."""
    lives: int
    """Processes that ran the query."""
    rows: int
    """Rows committed."""
    error: str
    """The broken promise; empty if none."""
    details: str
    """More about the error."""


def broken_by(scheduler: Scheduler, process: Process, main: Callable[[], None]) -> tuple[str, str]:
    """Run a world; return the broken promise and its details, both empty if none."""
    try:
        scheduler.run(process, main)
    except Exception as exc:  # noqa: BLE001 - whatever it is, it fails the run with its seed
        where = f" in {scheduler.failed_in}" if scheduler.failed_in else ""
        what = str(exc) if isinstance(exc, BrokenPromiseError) else repr(exc)
        error = f"{what}{where} at {scheduler.now_s:.3f} s"
        return error, "".join(traceback.format_tb(exc.__traceback__))
    return "", ""


class World:
    """One run.

    Args:
        seed: Decides all random draws.
        trace_max: Lines of the trace that are kept; ``None``: all.
    """

    cells: ClassVar[Sequence[Cell]] = CELLS
    """Faults that may happen, with their steps."""
    version: ClassVar[str] = ""
    """The release of Pulsar that the broker behaves like; empty: the seed draws it."""

    def __init__(self, seed: int, *, trace_max: int | None = TRACE_MAX) -> None:
        self.seed = seed
        self.scheduler = Scheduler(Random(f"{seed}:order"))
        self.record = Record(self.scheduler, trace_max)
        self.process = self.scheduler.process("world")
        self.storage = Storage()
        self.segments: Segments | None = None
        """The scalable topics, in a world that has some."""
        self.injector = Injector(self, Random(f"{seed}:faults"))
        self._random = Random(f"{seed}:world")
        small = any(fault.kind is Kind.MEMORY for fault in self.injector.faults)
        may_end = all(fault.step is not Step.IDLE for fault in self.injector.faults)
        brief = any(fault.kind in TOPICS for fault in self.injector.faults)
        forgets = any(fault.kind is Kind.FORGETS for fault in self.injector.faults)
        drawn = Shape.of(
            self._random, small_window=small, may_end=may_end, brief=brief, forgets=forgets
        )
        self.shape = self.shaped(drawn)
        self.debts = Debts()
        self.starts = Starts(self)
        self.refused = Refused(self)
        # Without an admin interface, an entry that another client acknowledges stays an ack gap.
        foreign = any(fault.kind is Kind.FOREIGN for fault in self.injector.faults)
        self.delays = Delays(seed, self.scheduler, lasting_gaps=foreign)
        self.deletions = Deletions(seed)
        self.query: Query | None = None
        """The query while it lives."""
        self.wiped: Wiped | None = None
        """The state of the cluster after it was wiped."""
        self._next_seq: dict[tuple[str, str], int] = {}
        self._paid: set[int] = set()
        self.lives = 0
        """Processes that ran the query."""
        self._returns = 0
        """Returns of the lasting topic before this life."""
        self._done = False

    def run(self) -> Outcome:
        """Run it to its end, or to the first broken promise."""
        with (
            installed(self.scheduler, Random(f"{self.seed}:waits")),
            small_checkpoints(),
            without_processes(rows_per_partition_min=self.shape.rows_per_partition_min),
        ):
            error, details = broken_by(self.scheduler, self.process, self._main)
        return Outcome(
            self.seed, self.shape, self.injector.faults, self.injector.reached,
            list(self.record.trace), self.scheduler.now_s, self.lives,
            self.storage.rows_committed, error, details,
        )  # fmt: skip

    @property
    def messages(self) -> int:
        """Messages published."""
        return sum(self._next_seq.values())

    def course(self) -> str:
        """Names the whole course of events: equal runs have the same."""
        digest = hashlib.sha256(self.record.history().encode())
        digest.update("\n".join([*self.record.trace, str(self.scheduler.points)]).encode())
        return digest.hexdigest()[:16]

    def connection(self, process: Process) -> Broker:
        """The connection of a process."""
        return Client(self.network, process)

    def processes_of(self, process: Process) -> list[Process]:
        """A process that runs the query, and those that have its consumers."""
        return [process]

    def end(self, process: Process) -> None:
        """End a process in any way; its connection ends with it."""
        for client in [one for one in self.network.clients if one.process is process]:
            unnoticed = self._random.random() < 0.3
            self.network.lose_client(
                client, self._random.random() * UNNOTICED_S if unnoticed else 0.0
            )
        self.record.add("crashed", worker=process.name)
        self.query = None
        self.scheduler.kill(process)

    def write(self, batch: int, partition: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store the rows of a Spark partition outside of Spark."""

    # -- what other worlds replace ---------------------------------------------------------------

    def shaped(self, drawn: Shape) -> Shape:
        """Return the shape of this world."""
        return drawn

    def more_faults(self) -> list[Fault]:
        """Return faults beside those that are planned from the cells."""
        return []

    def make_topics(self) -> Topics:
        """Return the topics of the run; none exists yet."""
        return Topics(self.cluster, self.record, self.debts, Random(f"{self.seed}:topics"))

    def admin(self) -> Admin | None:
        """Return the admin interface for the next life of the query."""
        return Admin(self.network) if self.shape.admin else None

    def options(self) -> dict[str, Any]:
        """Return the options of the source of the next life."""
        topics: dict[str, Any] = {"topics": self.topics.lasting}
        if self.shape.brief:
            topics = {"topics_pattern": PATTERN, "admin_url": "http://simulated:8080"}
        options = {"starting_position": "earliest", **self.shape.options, **self.starts.options()}
        return topics | options | self.refused.options() | self.delays.options

    # -- the run ---------------------------------------------------------------------------------

    def _main(self) -> None:
        scheduler, shape = self.scheduler, self.shape
        self.cluster = MemoryCluster(
            version=self.version or version_of(self.seed),
            entries_per_ledger=shape.entries_per_ledger,
            look_ahead=shape.look_ahead,
            unacked_limits=shape.unacked_limits,
            cursor_write_ms=shape.cursor_write_ms,
            ack_group_ms=int(ACK_GROUP_S * 1000),
            now_ms=lambda: int((EPOCH_S + scheduler.now_s) * 1000),
        )
        self.topics = self.make_topics()
        self.topics.create(shape.partitions, shape.brief)
        self.network = Network(
            scheduler, Random(f"{self.seed}:network"), Random(f"{self.seed}:readers"), self.cluster,
            self.record,
        )  # fmt: skip
        self.starts.prepare()
        scheduler.spawn(self.process, "producer", self._produce)
        if self.delays.share:
            scheduler.spawn(self.process, "delays", self._pass_time)
        scheduler.spawn(self.process, "supervisor", self._supervise)
        while scheduler.now_s < FAULTS_S and not self._all_happened():
            scheduler.sleep(0.1)
        self.injector.enabled = False
        scheduler.sleep(HEALING_S)
        while not self.network.up:
            scheduler.sleep(0.1)
        self.injector.heal()
        self.record.add("faults_stopped")
        settle_s, fewest = self.settle_s, len(self.debts.owed)
        end = scheduler.now_s + settle_s
        last_end = scheduler.now_s + SLOW_WORLD * settle_s
        tells_s = scheduler.now_s + settle_s / 2
        while not self._settled():
            if self.wiped is not None and scheduler.now_s > tells_s:
                # Publish times of entries sent soon after the wipe may be explained by different
                # clocks of producers. Only later entries prove that ids are assigned again.
                tells_s = inf
                for topic in sorted({one.topic for one in self.topics.partitions()}):
                    self.publish(topic, [f"k{i}" for i in range(shape.keys)])
            if len(self.debts.owed) < fewest:
                fewest = len(self.debts.owed)
                end = min(scheduler.now_s + settle_s, last_end)
            if scheduler.now_s > end:
                self._judge()
                raise BrokenPromiseError(
                    f"{len(self.debts.owed)} of {self.messages} rows are not committed and the "
                    f"backlog is {self._backlog()}, {settle_s:.0f} s after the last progress"
                )
            scheduler.sleep(0.1)
        self._done = True
        while self.query is not None:
            self.query.stopping = True
            scheduler.sleep(0.05)
        self.cluster.validate()
        self._judge()
        if self.wiped is None:
            self._check_named()

    @property
    def settle_s(self) -> float:
        """Longest time after the last fault in which no row is committed, seconds."""
        return SETTLE_S

    def wipe(self) -> None:
        """The cluster loses everything, and has the same topics again, without a message."""
        self._owed()
        sizes = self.topics.sizes
        self.debts.forgive(self.topics.partitions())
        self.wiped = Wiped(len(self.record.events), self.debts, self.storage)
        self.debts = Debts()
        self.cluster.wipe()
        self.topics.create_again(sizes)

    def is_known(self, where: TopicPartition, entry_id: EntryId) -> bool:
        """Whether an entry lies among those that the newest checkpoint speaks of, or above."""
        if not self.shape.admin or not self.storage.offsets:
            return False
        newest = Checkpoint.from_json(self.storage.offsets[max(self.storage.offsets)])
        state = newest.partitions.get(where)
        if state is None:
            return False
        first = state.floor or state.delivered.first
        return first is not None and entry_id > first

    def _check_named(self) -> None:
        """Entries that are acknowledged or deleted, and in no batch, must be named eventually."""
        silent = self.debts.silent
        if not silent:
            return
        process = self.scheduler.process("next life")
        named: list[KeyShardError] = []

        def start() -> None:
            coordinator = self._source(process, self.shape.ranges[0]).coordinator()
            newest = self.storage.offsets[max(self.storage.commits)]
            try:
                coordinator.start(Checkpoint.from_json(newest))
            except (DataLossAckedElsewhereError, DataLossTrimmedError) as exc:
                named.append(exc)
            coordinator.stop()

        self.scheduler.join(self.scheduler.spawn(process, "audit", start))
        if not named:
            raise BrokenPromiseError(
                f"{len(silent)} entries were acknowledged by somebody else, or deleted, are in no "
                f"batch, and no error names them, first {silent[0]}"
            )

    def _settled(self) -> bool:
        if self.wiped is not None:
            return self.wiped.settled()
        return not self._owed() and not self._backlog()

    def _all_happened(self) -> bool:
        if self.wiped is not None and len(self.wiped.sent) < WIPED_MESSAGES_MIN:
            return False
        return self.messages >= self.shape.messages_min and self.injector.all_begun

    def _owed(self) -> bool:
        for batch in self.storage.commits - self._paid:
            for rows in self.storage.sink[batch].values():
                self.debts.paid(rows)
                self.starts.check(rows)
            self._paid.add(batch)
        return bool(self.debts.owed)

    def _backlog(self) -> int:
        return sum(
            self.cluster.backlog(where, SUBSCRIPTION)
            for where in self.topics.partitions()
            if SUBSCRIPTION in self.cluster.subscriptions(where)
        )

    def _judge(self) -> None:
        wiped = self.wiped
        if wiped is None:
            self._owed()
        elif problems := wiped.problems(self.cluster, self.topics.partitions()):
            raise BrokenPromiseError(f"{len(problems)} problems, the first: {problems[0]}")
        events = self.record.judged(
            self.debts if wiped is None else wiped.debts,
            self.topics.partitions() if wiped is None else (),
            None if wiped is None else wiped.events,
        )
        try:
            verdicts = check(events, liveness_s=self.settle_s)
        except HistoryError:
            if wiped is None:
                raise
            return  # the cluster was wiped before anything of a batch was done
        for verdict in verdicts:
            if not verdict.holds:
                offending = "".join(f"\n    {event.to_json()}" for event in verdict.offending)
                raise BrokenPromiseError(f"{verdict.name}: {verdict.message}{offending}\n ")

    def _produce(self) -> None:
        random = Random(f"{self.seed}:producer")
        keys = [f"k{i}" for i in range(self.shape.keys)]
        while self.injector.enabled:
            if self.network.up and self.topics.partitions():
                for _ in range(random.randint(1, 3)):
                    self.publish(
                        self.topics.some(),
                        [
                            "" if random.random() < self.shape.keyless else random.choice(keys)
                            for _ in range(random.randint(1, 5))
                        ],
                    )
                where = random.choice(self.topics.open_ones())
                if random.random() < 0.1:
                    self.topics.revive(where.topic)
                    self.publish_aborted(where)
                self.refused.among()
                self.delays.among(self._publish_late)
            self.scheduler.sleep(random.expovariate(5))

    def _publish_late(self, key: str, delay_s: float) -> None:
        self.publish(self.topics.some(), [key], Batching.NONE, delay_s=delay_s)

    def _pass_time(self) -> None:
        self.delays.pass_time(self.cluster.send_due, lambda: self._done)

    def publish_aborted(self, where: TopicPartition) -> None:
        """Publish in a transaction that is aborted: its messages are never delivered."""
        aborted = Message(b"aborted", key="k0")
        self.debts.hidden(where, self.cluster.publish_aborted(where, aborted))

    def publish(
        self, topic: str, keys: list[str], batching: Batching | None = None, *, delay_s: float = 0.0
    ) -> None:
        messages = []
        due_ms = self.cluster.now_ms() + int(delay_s * 1000) if delay_s else None
        for key in keys:
            seq = self._next_seq.get((topic, key), 0)
            self._next_seq[topic, key] = seq + 1
            message = self._message(key, value_of(key, seq))
            messages.append(dataclasses.replace(message, deliver_at_ms=due_ms))
        self.topics.revive(topic)
        published = self.cluster.publish(
            topic, *messages, batching=batching or self.shape.batching,
            batch_messages_max=BATCH_MESSAGES_MAX,
        )  # fmt: skip
        for where, entry_id in published:
            log = self.cluster.log(where)
            ordinal = log.ordinal(entry_id)
            assert ordinal is not None
            entry = log.get(ordinal)
            assert entry is not None
            if self.wiped is not None:
                self.wiped.publish(where, entry.messages)
            self.debts.sent(where, entry_id, len(entry.messages))
            self.starts.sent(where, entry)
            self.record.sent(where, entry_id, entry.messages)

    def _message(self, key: str, value: bytes) -> Message:
        if key and self.shape.bytes_keys:
            return Message(value, key=b64encode(key.encode()).decode(), key_is_base64=True)
        return Message(value, key=key or None)

    # -- the query, life after life --------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._done:
            self.starts.between_lives()
            self._delete_subscriptions()
            self.lives += 1
            process = self.scheduler.process(f"driver-{self.lives}")
            self.scheduler.join(
                self.scheduler.spawn(process, "query", partial(self._live, process))
            )
            if not process.dead:
                self.end(process)
            if not self._done:
                self.scheduler.sleep(self._random.random() * 0.5)

    def _delete_subscriptions(self) -> None:
        """Perhaps delete subscriptions that the newest checkpoint knows."""
        storage, debts = self.storage, self.debts
        if not storage.offsets or self.wiped is not None:
            return
        newest = max(storage.offsets)
        known = Checkpoint.from_json(storage.offsets[newest]).partitions
        may_trim = newest in storage.commits and self.shape.admin
        for where, trimmed in self.deletions.between_lives(
            self.cluster, SUBSCRIPTION, known, may_trim=may_trim
        ):
            self.record.note(
                f"FAULT the subscription of {where} is deleted, and {len(trimmed)} entries"
            )
            debts.delete_subscription(where, known[where])
            for entry in trimmed:
                named = self.is_known(where, entry.id) and shows(known[where], entry.id)
                debts.skipped.setdefault((where, entry.id), named)
                debts.skip(where, entry.id, range(len(entry.messages)))

    def _live(self, process: Process) -> None:
        outages, crashes = self.network.outages, self.injector.broker_crashes
        excused = not self.network.up
        self._returns = self.topics.returns
        ranges = self.shape.ranges[self.injector.changes % len(self.shape.ranges)]
        self.record.note(f"life {self.lives} with {ranges} ranges")
        source = self._source(process, ranges)
        self.query = query = Query(
            scheduler=self.scheduler,
            random=Random(f"{self.seed}:query:{self.lives}"),
            process=process,
            source=source,
            storage=self.storage,
            record=self.record,
            at=self.injector.at,
            poisoned=self.injector.poisoned,
            check=self._check,
            bounded=self.shape.bounded,
            metadata=source.metadata_columns,
            write=self.write,
        )
        try:
            query.run()
        except UserError as exc:
            self.record.note(f"the query failed: {exc}")
        except KeyShardError as exc:
            self.record.note(f"the query ends: {exc}")
            if process in self.injector.stopping:
                self.scheduler.block()
            # A first start tries only briefly, so that a wrong URL is reported soon.
            brief = isinstance(exc, BrokerUnavailableError) and not self.storage.offsets
            excused = excused or (brief and self.injector.broker_crashes > crashes)
            # A bounded run asks for its targets first, and the client alone decides when a consumer
            # that lost its connection has one again.
            late = self.shape.bounded and self.scheduler.now_s < self.network.late_until_s
            excused = excused or (isinstance(exc, BrokerUnavailableError) and late)
            excused = excused or self._rightful(exc) or self.starts.is_rightful(exc)
            if not excused and self.network.outages == outages:
                raise
        query.stop()

    def _rightful(self, error: KeyShardError) -> bool:
        """Whether an error names what happened; then the loss is accepted from now on."""
        if self.wiped is not None:
            return self.wiped.is_named_by(error)
        if isinstance(error, TopicNotFoundError):
            # A topic that exists again may have been missing when this life asked for it.
            return not self.topics.partitions() or self.topics.returns > self._returns
        if self.debts.accepted:
            return False
        if isinstance(error, DataLossTrimmedError):
            where = TopicPartition.parse(str(error.facts["topic_partition"]))
            deleted = where.topic in self.topics.deleted or where in self.deletions.trimmed
            self.debts.accepted = deleted
        elif isinstance(error, DataLossAckedElsewhereError):
            where = TopicPartition.parse(str(error.facts["topic_partition"]))
            self.debts.accepted = any(place == where for place, _ in self.debts.skipped)
        return self.debts.accepted

    def _check(self, coordinator: Coordinator) -> None:
        """The window's invariants, and its bound."""
        coordinator.consumers.shared.window.validate()
        options = self.shape.options
        # Each thread may receive once more from a topic partition that is just becoming full.
        receives = options["receive_threads"] * len(coordinator.consumers.shared.window.partitions)
        at_once = receives * (options["receiver_queue_size"] + BATCH_MESSAGES_MAX)
        # A batch that is read again comes on top: it was in the window of another process.
        rows_max = options["window_rows_max"] * 3 // 2 + at_once
        if coordinator.consumers.shared.window.counters.misrouted:
            raise BrokenPromiseError("messages count as misrouted that came where they belong")
        rows = coordinator.consumers.shared.window.rows
        if rows > rows_max:
            raise BrokenPromiseError(f"the window holds {rows} rows, where {rows_max} may be")

    def _source(self, process: Process, ranges: int) -> KeyShardSource:
        world = self

        class Source(KeyShardSource):
            """A source whose runtime connects to the simulated broker."""

            def coordinator(self) -> Coordinator:
                return Coordinator(self, lambda: world.connection(process), world.admin())

        return Source(
            subscription=SUBSCRIPTION, parallelism=ranges,
            fail_on_data_loss=not self.debts.accepted, **self.options(),
        )  # fmt: skip


class BrokenPromiseError(AssertionError):
    """A promise of keyshard does not hold."""
