"""A program with handlers, through all its lives: it is started again however it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from keyshard import KeyShardSource, Message
from keyshard.broker.memory import MemoryCluster
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter import DeadLetter, DoneMarker, DoneUpToMarker, RunsAgainNote
from keyshard.core.message import MessageId
from keyshard.errors import (
    BrokerError,
    CheckpointError,
    DrainTimeoutError,
    HandlerFailedError,
    KeyShardError,
    NotRunningError,
    RescaleError,
    RuntimeStoppedError,
    TopicNotFoundError,
    UnreadableEntryError,
)
from keyshard.handlers.batches import Batch
from keyshard.handlers.checkpoint_store import COPY
from tests.simulation.handling.faults import Step
from tests.simulation.handling.messages import Fates
from tests.simulation.handling.network import HandlerClient, HandlerNetwork, HandlerRecord
from tests.simulation.handling.promises import Name, Promises
from tests.simulation.handling.storage import PROTOCOL
from tests.simulation.record import parse_value
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.handling.world import HandlerWorld

_Row = tuple[Name, str | None, int]
"""Name, key and sequence number of a message."""
RANGES_MAX = 8
"""Most ranges after a rescale."""
DRAIN_TIMEOUT_S = 20.0
"""Longest wait of a stop for handlers; none of the world takes that long."""
DISCARDS = 0.5
"""Share of the operated programs whose operator discards dead letters."""
STOP_S = DRAIN_TIMEOUT_S + 20.0
"""Longest time from the request to end to the end of a run, seconds."""


class Program:
    """One source and its user code.

    Args:
        world: The run.
        name: Its subscription.
        trace_max: Lines of its trace that are kept.
    """

    _earliest_s = 0.0
    """Time at which the next attempt may begin, but for the burst of the rate limit."""

    def __init__(self, world: HandlerWorld, name: str, trace_max: int | None) -> None:
        self.world = world
        self.name = name
        self.record = HandlerRecord(
            world.scheduler, trace_max,
            lambda where, entry_id: world.anomalies.acked(self, Name.of(where, entry_id)),
        )  # fmt: skip
        self.promises = Promises(self._discarded, commits_in_order=not world.shape.batches)
        self.fates = Fates(f"{world.seed}:{name}", world.shape)
        self.files: dict[str, bytes] = {}
        self.unsaved = False
        """Whether storing the next checkpoint fails."""
        self.forgets = False
        """Whether the broker is killed before the next start."""
        self.lives = 0
        self.malformed = 0
        """Malformed dead letters of it in its dead-letter topic."""
        self.is_new = True
        """Whether nothing was handled or stored yet, in any of its lives."""
        self.process: Process | None = None
        """The process that runs it now."""
        self._random = Random(f"{world.seed}:{name}:program")
        self._discarding = Random(f"{world.seed}:{name}:discards")
        self._discards = self._discarding.random() < DISCARDS
        """Whether the operator gives some keys up."""
        self._source: KeyShardSource | None = None
        self._excuses = 0
        self._in_hand: dict[Batch, list[_Row]] = {}
        """Batches of the process that lives which are not acknowledged, with their rows."""

    def connect(self, cluster: MemoryCluster) -> None:
        """Get a network of its own to the cluster that all share."""
        self.network = HandlerNetwork(
            f"{self.world.seed}:{self.name}", self.world.scheduler, cluster, self.record,
            self.disturbed,
        )  # fmt: skip

    @property
    def client(self) -> HandlerClient | None:
        """The connection of the process that lives."""
        for one in self.network.clients:
            if one.process is self.process:
                assert isinstance(one, HandlerClient)
                return one
        return None

    def at(self, step: Step) -> None:
        """Begin a step; a fault may end the process."""
        self.world.scheduler.point()
        self.world.injector.at(self, step)

    def disturbed(self) -> None:
        """Excuse repetitions of messages after a disturbance."""
        self.promises.disturbed()
        self._excuses += 1

    # -- life after life -------------------------------------------------------------------------

    def supervise(self) -> None:
        """Start the program again until the world ends."""
        scheduler = self.world.scheduler
        while not self.world.done:
            if self.forgets:
                self.forgets = False
                self.world.forget()
            self.world.starts.between_lives(self)
            self.world.anomalies.between_lives(self)
            self.world.deletions.between_lives(self)
            self.lives += 1
            self.promises.life_begins()
            process = self.process = scheduler.process(f"{self.name}-{self.lives}")
            life = scheduler.spawn(process, "run", partial(self._live, process))
            scheduler.join(life)
            if not process.dead:
                if self._in_hand:
                    self.record.add("disconnected", worker=process.name)
                if self.world.trial.hangs(self):
                    # Its handler is left behind, and the message comes again.
                    self.record.add("crashed", worker=process.name)
                    self.disturbed()
                self.end(process, killed=False)
            self._leave_batches()
            self.process = self._source = None
            scheduler.sleep(self._random.random() * 0.3)

    def end(self, process: Process, *, killed: bool) -> None:
        """End a process in any way; its connection ends with it."""
        for client in [one for one in self.network.clients if one.process is process]:
            unnoticed = killed and self._random.random() < 0.3
            self.network.lose_client(client, self._random.random() * 3.0 if unnoticed else 0.0)
        if killed:
            self.record.add("crashed", worker=process.name)
            self.disturbed()
        self.world.scheduler.kill(process)

    def _leave_batches(self) -> None:
        """Record that the unacknowledged messages of an ended process come again."""
        for rows in self._in_hand.values():
            self.promises.left(name for name, _, _ in rows)
        self._in_hand.clear()

    def _live(self, process: Process) -> None:
        excuses = self._excuses if self.network.up else -1
        self.record.note(f"life {self.lives}")
        self.at(Step.STARTING)
        source = self._source = self._make_source(process)
        self.world.scheduler.spawn(process, "operator", self._operate)
        try:
            if self.world.shape.batches:
                self._consume_batches(source)
            else:
                self._run(source)
        except KeyShardError as exc:
            self.record.note(f"the run ends: {exc!r}")
            if self._is_rightful(exc):
                pass
            elif not isinstance(exc, (CheckpointError, HandlerFailedError)):
                if excuses == self._excuses:
                    raise
            elif isinstance(exc, CheckpointError) and "[Errno 28]" not in str(exc):
                raise
            # A run that ends with an error may leave work unfinished, so it counts as a crash.
            self.record.add("crashed", worker=process.name)
            self.disturbed()
        else:
            self.record.note("the run has ended in order")
            if self.client is not None and self.client.loses_acks:
                # It ended before its connection was cut: messages with lost acks come again.
                self.record.add("disconnected", worker=process.name)

    def _is_rightful(self, error: KeyShardError) -> bool:
        """Whether an error names what happened."""
        world = self.world
        missing = isinstance(error, TopicNotFoundError) and not world.all_topics_exist()
        return missing or world.anomalies.ends(self, error) or world.deletions.names(error)

    def _run(self, source: KeyShardSource) -> None:
        shape = self.world.shape
        rate, burst = shape.rate or (None, None)
        self._earliest_s = 0.0
        source.run(
            self._handle, observers=[self], lanes=shape.lanes, workers=shape.workers,
            retry=shape.retry, on_failure=shape.on_failure, null_keys=shape.null_keys,
            checkpoint=self._checkpoint, drain_timeout_s=DRAIN_TIMEOUT_S,
            rate_limit=rate, rate_burst=burst,
        )  # fmt: skip

    @property
    def _checkpoint(self) -> str | None:
        return f"{PROTOCOL}://{self.name}/checkpoint.json" if self.world.shape.checkpoint else None

    def _make_source(self, process: Process) -> KeyShardSource:
        world, program = self.world, self

        class Source(KeyShardSource):
            """A source whose runtime connects to the simulated broker."""

            def coordinator(self) -> Coordinator:
                admin = world.admin(program)
                return Coordinator(self, lambda: world.connection(program, process), admin)

        url = f"memory://{self.name}"
        return Source(
            subscription=self.name, service_url=url, parallelism=world.shape.ranges,
            **({"starting_position": "earliest"} | world.selection(url) | world.shape.options
               | world.starts.options() | world.anomalies.options(self) | world.delays.options
               | world.deletions.options()),
        )  # fmt: skip

    # -- user code -------------------------------------------------------------------------------

    def _handle(self, message: Message) -> BaseException | None:
        key, seq = parse_value(message.value)
        fate = self.fates.of(message.topic, message.partition, key, seq)
        self.at(Step.REPLAYING if self.promises.rests(_name(message), key) else Step.HANDLING)
        if self.world.trial.attempt(self, key):
            raise ValueError("poison")
        if fate.seconds:
            self.world.scheduler.sleep(fate.seconds)
        if fate.rejected or fate.fails:
            self.at(Step.FAILING)
            fate.fails = max(0, fate.fails - 1)
            error = fate.error()
            if not fate.returns:
                raise error
            return error
        return None

    def _consume_batches(self, source: KeyShardSource) -> None:
        scheduler, random = self.world.scheduler, self._random
        batches = source.batches(
            random.choice((1, 5, 50)), random.choice((0.0, 0.3)), checkpoint=self._checkpoint
        )
        process = self.process
        assert process is not None
        try:
            for batch in batches:
                rows = self._in_hand[batch] = [_row(row) for row in batch.records.to_pylist()]
                for row in rows:
                    self._note("started", *row)
                self.at(Step.HANDLING)
                action = self._acknowledging(batch, rows, random.choice((0.0, 0.0, 0.2, 0.5)))
                for _ in range(random.choice((1, 1, 2))):
                    scheduler.spawn(process, "acknowledge", action)
                if random.random() < 0.5:
                    action()
        finally:
            batches.close()

    def _acknowledging(self, batch: Batch, rows: list[_Row], wait_s: float) -> Callable[[], None]:
        def action() -> None:
            self.world.scheduler.sleep(wait_s * self._random.random())
            for row in rows:
                if row[0] not in self.promises.finished:
                    self._note("completed", *row)
            while not self._acknowledged(batch):
                self.world.scheduler.sleep(0.05)

        return action

    def _acknowledged(self, batch: Batch) -> bool:
        """Acknowledge a batch. Return false if the caller must try again."""
        try:
            batch.ack()
        except CheckpointError as exc:
            self.record.note(f"ack again: {exc}")
            return False
        except (RuntimeStoppedError, BrokerError, UnreadableEntryError) as exc:
            self.record.note(f"no ack: {exc}")
        else:
            self._in_hand.pop(batch, None)
        return True

    # -- an observer, a disk, and events of dead letters
    # -------------------------------------

    def started(self, message: Message) -> None:
        """An attempt begins."""
        if self.world.shape.rate is not None:
            self._check_rate(*self.world.shape.rate)
        self._note("started", _name(message), *parse_value(message.value))

    def _check_rate(self, per_s: float, burst: int) -> None:
        """Check that attempts begin no faster than the rate limit lets them."""
        now_s = self.world.scheduler.now_s
        self._earliest_s = max(now_s, self._earliest_s) + 1 / per_s
        # A thread of each lane may rest between its token and its handler.
        burst += RANGES_MAX * self.world.shape.lanes
        if self._earliest_s - now_s > burst / per_s + 1e-6:
            self.promises.broken = f"handlers begin faster than {per_s:g} per second"

    def completed(self, message: Message, _seconds: float) -> None:
        """The handler returned."""
        self._note("completed", _name(message), *parse_value(message.value))

    def failed(self, message: Message, _seconds: float, _error: BaseException) -> None:
        """The handler raised."""
        self._note("failed", _name(message), *parse_value(message.value))

    def _note(self, kind: str, name: Name, key: str | None, seq: int) -> None:
        task = self.world.scheduler.current
        assert task is not None
        if task.process.dead:
            return
        if kind == "started":
            self.is_new = False
            if self.world.starts.lies_before(name):
                self.promises.broken = f"{key}:{seq} lies before the start, and was handed out"
            self.promises.started(name, key, seq)
        elif kind == "completed":
            self.promises.completed(name)
        self._write(kind, name, key, seq, self._worker)

    def _discarded(self, name: Name, key: str, seq: int) -> None:
        """For its order, a discarded message counts as handled now: it may come again later."""
        for kind in ("started", "completed"):
            self._write(kind, name, key, seq, None)

    @property
    def _worker(self) -> str | None:
        return None if self.process is None else self.process.name

    def _write(self, kind: str, name: Name, key: str | None, seq: int, worker: str | None) -> None:
        ledger, entry, index = name.id
        self.record.note(f"{kind} {key}:{seq} at {name.partition}/{ledger}:{entry}:{index}")
        self.record.add(
            kind, topic=name.topic, partition=name.partition, ledger=ledger, entry=entry,
            index=index, key=key, seq=seq, worker=worker,
        )  # fmt: skip

    def stored(
        self, found: DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker, seq: int
    ) -> None:
        """Record a message stored in the dead-letter topic."""
        if not isinstance(found, DeadLetter):
            self.record.note(f"marker of {found.key}: {found}")
            return
        self.record.note(f"letter, {found.kind.value}")
        name = _name(found.message)
        if not self.world.anomalies.is_refused(name):
            self._write("parked", name, found.key, seq, self._worker)

    def save(self, path: str, data: bytes) -> None:
        """Store a checkpoint, or the copy that is written before it."""
        self.at(Step.SAVING)
        self.is_new = False
        if self.unsaved:
            self.unsaved = False
            raise OSError(28, "No space left on the simulated disk")
        self.world.scheduler.sleep(self._random.random() * 0.01)
        self.files[path] = data
        if not path.endswith(COPY):  # a whole checkpoint counts, also if its copy is newer
            self.promises.saved(data.decode())
        self.at(Step.SAVED)

    # -- an operator, in another thread of the process --------------------------------------------

    def stop(self) -> bool:
        """Ask the source to stop, and return whether it was running."""
        world, source, process = self.world, self._source, self.process
        if source is None or process is None or process.dead:
            return False
        try:
            source.stop()
        except NotRunningError:
            return False
        self.record.note("stop")

        def wait() -> None:
            end = world.scheduler.now_s + STOP_S
            while not process.dead and world.scheduler.now_s < end:
                world.scheduler.sleep(0.1)
            if not process.dead:
                self.promises.broken = f"{process.name} did not end {STOP_S:.0f} s after its stop"

        world.scheduler.spawn(world.process, "patience", wait)
        self.at(Step.STOPPING)
        return True

    def parked(self) -> list[str]:
        """Keys with resting dead letters, if a process runs."""
        return [] if self._source is None else self.promises.unfinished()

    def unpark(self, *keys: str) -> None:
        """Unpark keys, if the source runs."""
        source = self._source
        if source is None:
            return
        with suppress(NotRunningError):
            for key in keys:
                source.unpark(key)
                self.record.note(f"unpark {key}")

    def discard(self, key: str) -> None:
        """Discard the dead letters of a parked key, if the source runs."""
        source = self._source
        if source is None:
            return
        discarding = self.promises.discarding
        begun = key in discarding
        discarding.add(key)
        try:
            self.record.note(f"{source.discard(key)} dead letters of {key} are discarded")
        except NotRunningError as exc:
            self.record.note(f"no discard: {exc}")
            # It sent no marker; an earlier one may have sent some.
            if not begun:
                discarding.discard(key)
        except BrokerError as exc:
            self.record.note(f"no discard: {exc}")
        else:
            discarding.discard(key)

    def rescale(self, ranges: int | None) -> None:
        """Move ranges; ``None``: to equal loads."""
        self.at(Step.MOVING)
        excuses, source = self._excuses, self._source
        if source is None:
            return
        try:
            report = source.rescale(ranges, balance=ranges is None)
            self.record.note(f"{report.ranges_before} ranges -> {report.ranges_after}")
        except (NotRunningError, RuntimeStoppedError, DrainTimeoutError) as exc:
            self.record.note(f"no rescale: {exc}")
        except RescaleError as exc:
            self.record.note(f"no rescale: {exc}")
            if excuses == self._excuses and self.process not in self.world.injector.stopping:
                raise
        except KeyShardError as exc:
            self.record.note(f"no rescale: {exc!r}")
            if excuses == self._excuses and not self.world.anomalies.ends(self, exc):
                raise

    def _operate(self) -> None:
        """Validate the state and run random operator commands, until the process ends."""
        scheduler, random, world = self.world.scheduler, self._random, self.world
        while True:
            scheduler.sleep(random.random() * 0.6)
            self._validate()
            if not world.shape.operated or not world.injector.enabled:
                continue
            roll = random.random()
            if roll < 0.3 and not world.shape.batches:
                self.unpark(*random.sample(keys, 1) if (keys := self.parked()) else ["k0"])
            elif roll < 0.4:
                self.rescale(random.choice((None, 1, 2, 3, 6)))
            elif self._discards and self._discarding.random() < 0.3 and (keys := self.parked()):
                self.discard(self._discarding.choice(keys))

    @property
    def has_started(self) -> bool:
        """Whether handlers run; batches have none."""
        run = self._running()
        return self.world.shape.batches or (run is not None and run._parked is not None)

    @property
    def needlessly_parked(self) -> list[str]:
        """Keys that are parked in this life, though none of their dead letters rests."""
        run = self._running()
        if self.world.shape.batches or run is None or run._parked is None:
            return []
        return sorted(run._parked.keys.parking.states().keys() - self.promises.unfinished())

    @property
    def openings(self) -> int:
        """Openings of the circuit breaker in this life."""
        run = self._running()
        return 0 if run is None else int(run._dispatcher.circuit.openings)

    def _running(self) -> Any:
        return None if self._source is None else self._source.__dict__.get("_running")

    def _validate(self) -> None:
        run = self._running()
        if run is None or self.world.shape.batches:
            return
        with run.changed:
            run.lanes.validate()
        if run._parked is not None:
            with run._parked.keys.lock:
                run._parked.keys.parking.validate()


def _name(message: Message) -> Name:
    return Name(message.topic, message.partition, message.message_id)


def _row(row: dict[str, Any]) -> _Row:
    position = MessageId(*map(int, row["__messageId"].split(":")))
    return (Name(row["__topic"], row["__partition"], position), *parse_value(row["value"]))
