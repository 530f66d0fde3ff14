"""One run: a cluster, a producer, one program or two with handlers, and faults."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar, NoReturn

from keyshard.broker.memory import Batching, MemoryCluster, Message
from keyshard.config.connection import Connection
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.handlers import batches, run
from keyshard.observe import monitor
from keyshard.testing.verify.checkers import check
from tests.simulation.delays import Delays, small_checkpoints
from tests.simulation.handling.anomalies import Anomalies
from tests.simulation.handling.deletions import HandlerDeletions
from tests.simulation.handling.faults import CELLS, Cell, Fault
from tests.simulation.handling.injector import Injector
from tests.simulation.handling.network import HandlerClient, is_dead_letters
from tests.simulation.handling.program import Program
from tests.simulation.handling.promises import Name
from tests.simulation.handling.shape import Shape
from tests.simulation.handling.starts import Starts
from tests.simulation.handling.storage import simulated_files
from tests.simulation.handling.trials import Trial
from tests.simulation.install import installed, replaced, without_outside
from tests.simulation.network import ACK_GROUP_S, Admin
from tests.simulation.primitives import EPOCH_S
from tests.simulation.record import value_of
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.segments import Segments
from tests.simulation.shape import version_of
from tests.simulation.world import (
    BATCH_MESSAGES_MAX,
    TRACE_MAX,
    BrokenPromiseError,
    Outcome,
    broken_by,
)

SIMULATED = (run, batches)
"""Modules of this world only; imported here, and so simulated."""
NOT_OF_BATCHES = {"one handler per key", "routed by key"}
"""An iteration over batches has several messages of a key in flight, also while its range moves."""
FAULTS_S = 8.0
"""Time after which no fault begins any more, seconds."""
HEALING_S = 2.5
"""Time that a fault lasts at most, seconds."""
SETTLE_S = 60.0
"""Time after the faults in which everything must be done and acknowledged, seconds, besides that
of a rate limit."""

FORGETS = 0.7
"""Share of the runs at whose end the broker is killed once more: it forgets acknowledgements."""


class HandlerWorld:
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
        self.process = self.scheduler.process("world")
        self.segments: Segments | None = None
        """The scalable topics, in a world that has some."""
        self.injector = Injector(self, Random(f"{seed}:faults"))
        self._random = Random(f"{seed}:world")
        steps = {fault.step for fault in self.injector.faults}
        # Rates have their own generator, so that the other draws of a seed stay the same.
        self.shape = self.shaped(Shape.of(self._random, steps, Random(f"{seed}:rates")))
        names = ("billing", "audit") if self.shape.neighbour else ("billing",)
        self.programs = [Program(self, name, trace_max) for name in names]
        self.starts = Starts(self)
        self.trial = Trial(self)
        self.anomalies = Anomalies(self)
        self.deletions = HandlerDeletions(self)
        # Without a checkpoint, a later life does not know what earlier ones acknowledged. Only the
        # admin interface tells soon that an entry of an aborted transaction does not come.
        fills = not self.shape.checkpoint or self.anomalies.refuses
        self.delays = Delays(seed, self.scheduler, lasting_gaps=fills and not self.shape.admin)
        self.done = False
        """Whether no life begins any more."""
        self._started_again = False
        self._sent: set[Name] = set()
        self._next_seq: dict[tuple[str, str], int] = {}

    def run(self) -> Outcome:
        """Run it to its end, or to the first broken promise."""
        disks: dict[str, Any] = {program.name: program for program in self.programs}
        with (
            without_outside(),
            replaced((monitor, "connect_admin", self._admin)),
            installed(self.scheduler, Random(f"{self.seed}:waits")),
            small_checkpoints(),
            simulated_files(disks),
        ):
            error, details = broken_by(self.scheduler, self.process, self._main)
        return Outcome(
            self.seed, self.shape, self.injector.faults, self.injector.reached, self._trace(),
            self.scheduler.now_s, sum(program.lives for program in self.programs),
            len(self._sent), error, details,
        )  # fmt: skip

    def course(self) -> str:
        """Names the whole course of events: equal runs have the same."""
        digest = hashlib.sha256(str(self.scheduler.points).encode())
        for program in self.programs:
            digest.update(program.record.history().encode())
        digest.update("\n".join(self._trace()).encode())
        return digest.hexdigest()[:16]

    def connection(self, program: Program, process: Process) -> HandlerClient:
        """The connection of a process of a program."""
        return HandlerClient(program, process)

    def topic_partitions(self) -> list[TopicPartition]:
        """Return the topic partitions that are consumed."""
        return [where for topic in self.topics for where in self.partitions(topic)]

    def crash_broker(self, away_s: float) -> bool:
        """Kill the broker for a while. Return whether it was up."""
        networks = [program.network for program in self.programs]
        if not all(network.up for network in networks):
            return False
        for program in self.programs:
            program.record.add("crashed", worker="broker")
            program.network.up = False
            clients = program.network.clients
            program.network.lose([one for client in clients for one in client.consumers])
            program.network.lose_readers()
        self.cluster.crash()

        def back() -> None:
            self.scheduler.sleep(away_s)
            for program in self.programs:
                program.disturbed()
                program.network.up = True

        self.scheduler.spawn(self.process, "fault", back)
        return True

    def forget(self) -> None:
        """Kill the broker; it is back at once, but has forgotten acknowledgements."""
        for program in self.programs:
            program.record.note("the broker forgets acknowledgements")
            program.record.add("crashed", worker="broker")
            program.disturbed()
        self.cluster.crash()

    # -- what other worlds replace ---------------------------------------------------------------

    def shaped(self, drawn: Shape) -> Shape:
        """Return the shape of this world."""
        return drawn

    def more_faults(self) -> list[Fault]:
        """Return faults beside those that are planned from the cells."""
        return []

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic that is created again; return whether it existed."""
        raise NotImplementedError(f"{topic} is never deleted.")

    def create_topics(self) -> list[str]:
        """Create the topics of the run."""
        return [
            self.cluster.create_topic(f"orders-{number}", partitions=partitions)
            for number, partitions in enumerate(self.shape.topics)
        ]

    def all_topics_exist(self) -> bool:
        """Whether no topic is deleted now."""
        return True

    def partitions(self, topic: str) -> Sequence[TopicPartition]:
        """Return the topic partitions of a topic."""
        return self.cluster.partitions(topic)

    def open_ones(self, topic: str) -> Sequence[TopicPartition]:
        """Return those to which something may be published."""
        return self.partitions(topic)

    def admin(self, program: Program) -> Admin | None:
        """Return the admin interface for the next life of a program."""
        return Admin(program.network) if self.shape.admin else None

    def selection(self, url: str) -> dict[str, Any]:
        """Return the options of a source that select topics.

        Args:
            url: URL of the brokers and of their admin interface.
        """
        if self.shape.neighbour:
            return {"topics_pattern": "persistent://public/default/.*", "admin_url": url}
        return {"topics": self.topics}

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
        self.topics = self.create_topics()
        for program in self.programs:
            program.connect(self.cluster)
        self.starts.prepare()
        scheduler.spawn(self.process, "producer", self._produce)
        if self.delays.share:
            scheduler.spawn(self.process, "delays", self._pass_time)
        for program in self.programs:
            scheduler.spawn(self.process, "supervisor", program.supervise)
        while scheduler.now_s < FAULTS_S and not self._all_happened():
            self.look()
        self.injector.enabled = False
        end = scheduler.now_s + HEALING_S
        while scheduler.now_s < end or not self.programs[0].network.up:
            self.look()
        for program in self.programs:
            program.fates.heal()
            program.network.cut_share = 0.0
            program.record.add("faults_stopped")
        self._settle()
        if self.trial.drawn:
            self.trial.run()
        self.anomalies.publish()
        self._settle()
        self._start_again()
        self._settle()
        self.done = True
        for program in self.programs:
            program.stop()
        while any(program.process is not None for program in self.programs):
            self.look()
        self.cluster.validate()
        self._judge()

    def look(self) -> None:
        """Wait a little; a promise that is broken meanwhile ends the run."""
        self.scheduler.sleep(0.1)
        for program in self.programs:
            if program.promises.broken:
                raise BrokenPromiseError(f"{program.name}: {program.promises.broken}")

    def breaks(self, text: str) -> NoReturn:
        """End the run: a promise does not hold."""
        raise BrokenPromiseError(text)

    def note(self, text: str) -> None:
        """A line for people."""
        for program in self.programs:
            program.record.note(text)

    def _all_happened(self) -> bool:
        return len(self._sent) >= self.shape.messages_min and self.injector.all_begun

    @property
    def settle_s(self) -> float:
        """Time after the faults in which everything must be done and acknowledged, seconds."""
        per_s = math.inf if self.shape.rate is None else self.shape.rate[0]
        return SETTLE_S + len(self._sent) * self.shape.attempts / per_s

    def _settle(self) -> None:
        end = self.scheduler.now_s + self.settle_s
        while unsettled := [text for one in self.programs if (text := self._unsettled(one))]:
            if self.scheduler.now_s > end:
                self._judge()
                raise BrokenPromiseError(
                    f"{unsettled[0]}, {self.settle_s:.0f} s after the last fault"
                )
            for program in self.programs:
                if keys := program.parked():
                    program.unpark(*keys)
            self.look()

    def _start_again(self) -> None:
        """Start every program again: it acknowledges forgotten dead letters."""
        for program in self.programs:
            lives, program.forgets = program.lives, self._random.random() < FORGETS
            while not program.stop():
                self.look()
            while program.lives == lives:
                self.look()
        self._started_again = True

    def _unsettled(self, program: Program) -> str:
        if self._started_again and not program.has_started:
            return f"{program.name} is starting"
        left = self._sent - program.promises.finished
        left = {name for name in left if self.starts.is_owed(name)}
        if left:
            return f"{program.name}: {len(left)} messages are not done, first {min(left)}"
        resting, parked = program.promises.unfinished(), program.needlessly_parked
        if resting or parked:
            return f"{program.name}: letters of {resting} rest, and {parked} are parked without one"
        backlog = sum(
            self.cluster.backlog(where, program.name)
            for where in self.topic_partitions()
            if program.name in self.cluster.subscriptions(where)
        )
        if backlog:
            return f"{program.name}: the backlog is {backlog}"
        stored, kept = self._resting_dead_letters(program), self._kept(program)
        # From its limit on a broker sends a consumer nothing more until half of that is left.
        all_come = kept < self.shape.unacked_limits.per_consumer // 2
        if self._started_again and all_come and stored > kept:
            return f"{program.name}: {stored} letters and markers rest, and {kept} should"
        return ""

    def _judge(self) -> None:
        for program in self.programs:
            for verdict in check(self.starts.judged(program), liveness_s=self.settle_s):
                if verdict.holds or (self.shape.batches and verdict.name in NOT_OF_BATCHES):
                    continue
                offending = "".join(f"\n    {event.to_json()}" for event in verdict.offending)
                raise BrokenPromiseError(
                    f"{program.name}: {verdict.name}: {verdict.message}{offending}\n "
                )
            self._judge_dead_letters(program)

    def _judge_dead_letters(self, program: Program) -> None:
        """Unreplayed dead letters rest until another client acknowledges them."""
        resting, kept = self._resting_dead_letters(program), self._kept(program)
        if resting < kept:
            raise BrokenPromiseError(f"{program.name}: {resting} letters rest of {kept}")
        if self._started_again and (broken := self.anomalies.broken(program)):
            raise BrokenPromiseError(broken)
        if self._started_again and (broken := self.deletions.broken):
            raise BrokenPromiseError(broken)

    def _kept(self, program: Program) -> int:
        """Messages of its dead-letter topic that only an operator acknowledges."""
        return len(program.promises.kept) + program.malformed

    def _resting_dead_letters(self, program: Program) -> int:
        """The backlog of its subscription of the dead-letter topic."""
        subscription = f"{program.name}-parked"
        return sum(
            self.cluster.backlog(where, subscription)
            for topic, parts in self.cluster.topics().items()
            for where in parts
            if is_dead_letters(where) and subscription in self.cluster.subscriptions(where)
        )

    def _produce(self) -> None:
        random = Random(f"{self.seed}:producer")
        keys = [f"k{i}" for i in range(self.shape.keys)]
        while self.injector.enabled:
            if self.programs[0].network.up and self.all_topics_exist():
                self.anomalies.among()
                for _ in range(random.randint(1, 2)):
                    topic = random.choice(self.topics)
                    self.publish(
                        topic,
                        [
                            "" if random.random() < self.shape.keyless else random.choice(keys)
                            for _ in range(random.randint(1, 5))
                        ],
                    )
                self.delays.among(self._publish_late)
            self.scheduler.sleep(random.expovariate(5))

    def _publish_late(self, key: str, delay_s: float) -> None:
        topic = self.topics[len(self._sent) % len(self.topics)]
        self.publish(topic, [key], Batching.NONE, delay_s=delay_s)

    def _pass_time(self) -> None:
        self.delays.pass_time(self.cluster.send_due, lambda: self.done)

    def publish(
        self, topic: str, keys: list[str], batching: Batching | None = None, *, delay_s: float = 0.0
    ) -> list[tuple[Name, str]]:
        """Publish a message of each key. Return their names with their keys."""
        names: list[tuple[Name, str]] = []
        due_ms = self.cluster.now_ms() + int(delay_s * 1000) if delay_s else None
        messages = []
        for key in keys:
            seq = self._next_seq.get((topic, key), 0)
            self._next_seq[topic, key] = seq + 1
            messages.append(Message(value_of(key, seq), key=key or None, deliver_at_ms=due_ms))
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
            for index, message in enumerate(entry.messages):
                position = MessageId(entry_id.ledger, entry_id.entry, index)
                name = Name(where.topic, where.partition, position)
                names.append((name, message.key or ""))
            self._sent.update(name for name, _ in names)
            for program in self.programs:
                program.record.sent(where, entry_id, entry.messages)
        return names

    def _trace(self) -> list[str]:
        lines = [line for program in self.programs for line in program.record.trace]
        return sorted(lines, key=lambda line: float(line.split(maxsplit=1)[0]))

    def _admin(self, connection: Connection) -> Admin:
        (network,) = [
            one.network for one in self.programs if connection.admin_url == f"memory://{one.name}"
        ]
        return Admin(network)
