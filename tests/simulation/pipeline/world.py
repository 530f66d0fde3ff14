"""A query that reads a topic and writes each batch to another, whatever dies.

The reading side is that of the first world. Each attempt of a task is a process of its own that
runs the real writer of Spark; several may run at once, and some are left behind.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from keyshard import KeyShardSink
from keyshard.broker import connect as connecting
from keyshard.broker.unconfirmed import BeginAgainError
from keyshard.errors import (
    BrokerUnavailableError,
    DeduplicationError,
    KeyShardError,
    ProducerBusyError,
    ProducerFencedError,
    QuotaExceededError,
)
from keyshard.observe import sink_status
from spark_adapter.topic_writer import TopicWrite
from spark_adapter.write_options import WriteOptions
from tests.simulation.frames.client import Frames
from tests.simulation.frames.output import FramedOutputClient
from tests.simulation.network import UNNOTICED_S
from tests.simulation.pipeline.faults import Trouble
from tests.simulation.pipeline.output import TOPIC, Output, OutputClient
from tests.simulation.record import parse_value
from tests.simulation.scheduler import Process, Task
from tests.simulation.spark import TASK_ATTEMPTS, NoMonitor, UserError
from tests.simulation.world import TRACE_MAX, BrokenPromiseError, Outcome, World

LOOK_S = 0.02
"""Time between two looks whether an attempt has ended, seconds."""
STEPS_MAX = (6, 25, 80)
"""Most steps of an attempt before it is killed."""
BEHIND_S = 4.0
"""Longest time that an attempt is left behind, seconds."""
QUERY = str(uuid.UUID(int=1))
"""Id of the query, which its checkpoint has."""
SLOWER = 10.0
"""Time until all is committed if every attempt reads the end of the topic, relative to others."""
PASSING = (BrokerUnavailableError, ProducerBusyError, QuotaExceededError)
"""Errors that a fault explains."""


@dataclass(eq=False)
class Attempt:
    """An attempt of a task."""

    name: str
    batch: int
    process: Process
    producer: str
    """Name of its producers."""
    task: Task | None = None
    done: bool = False
    left_behind: bool = False
    """Whether nobody waits for it any more."""
    error: KeyShardError | None = None

    @property
    def ended(self) -> bool:
        """Whether it does nothing any more."""
        return self.process.dead or (self.task is not None and self.task.done)


class PipelineWorld(World):
    """One run.

    Args:
        seed: Decides all random draws.
        trace_max: Lines of the trace that are kept; ``None``: all.
    """

    def __init__(self, seed: int, *, trace_max: int | None = TRACE_MAX) -> None:
        super().__init__(seed, trace_max=trace_max)
        self._draw = Random(f"{seed}:attempts")
        self._attempts: list[Attempt] = []
        self._made = 0
        self._kills = self._draw.choice((0.0, 0.3, 0.7))
        """Share of the attempts that are killed."""
        self._lasts_s = self._draw.uniform(1.0, 8.0)
        """How long faults begin at least, seconds."""
        self._frames: Frames | None = None
        self._newest = -1
        """The newest batch that tasks were given."""

    def run(self) -> Outcome:
        with self._connected():
            outcome = super().run()
        outcome.reached.update(self.output.reached)
        return outcome

    @contextmanager
    def _connected(self) -> Iterator[None]:
        before, monitor = connecting.connect, sink_status.SinkMonitor
        connecting.connect = lambda _: self._client()  # type: ignore[assignment]
        # A control socket would wait in real time.
        sink_status.SinkMonitor = lambda *_: NoMonitor()  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            connecting.connect, sink_status.SinkMonitor = before, monitor  # type: ignore[misc]

    def _client(self) -> OutputClient:
        assert self.scheduler.current is not None
        process = self.scheduler.current.process
        client = self.output.client(process)
        attempt = next(one for one in self._attempts if one.process is process)
        if self.injector.enabled and self._draw.random() < self._kills:
            self._dies(attempt, client)
        return client

    def _main(self) -> None:
        frames = None if self._frames is None else self._framed
        self.output = Output(self.scheduler, str(self.seed), self.record, frames)
        self.output.used = lambda: {one.producer for one in self._attempts if not one.ended}
        self.scheduler.spawn(
            self.process, "trouble", lambda: self.output.trouble(lambda: self.injector.enabled)
        )
        super()._main()

    def _framed(self, network: Any, process: Process) -> OutputClient:
        network.frames = self._frames
        return FramedOutputClient(network, process)

    @property
    def _counts(self) -> bool:
        """Whether a repeated batch has the same rows: not after an accepted loss."""
        return self.wiped is None and not self.debts.accepted

    def _all_happened(self) -> bool:
        return super()._all_happened() and self.scheduler.now_s >= self._lasts_s

    # -- tasks -----------------------------------------------------------------------------------

    def write(self, batch: int, partition: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of a Spark partition, as a task with its attempts does.

        Raises:
            UserError: Too many attempts failed.
        """
        if not self._counts:
            return
        table = outgoing(rows)
        problems = self.output.given(batch, partition, table.column("value").to_pylist())
        if problems:
            raise BrokenPromiseError(f"a repeated batch has other rows: {problems[0]}")
        self._newest = max(self._newest, batch)
        for number in range(1, TASK_ATTEMPTS + 1):
            running = [self._begin(table, batch, partition)]
            if self._draw.random() < 0.25:
                self.scheduler.sleep(self._draw.random() * 0.1)
                running.append(self._begin(table, batch, partition))
                self.output.note(Trouble.SECOND)
            if self._stored(running):
                return
            self.record.note(f"task {batch}.{partition} fails, attempt {number}")
        raise UserError(f"the task {batch}.{partition} failed")

    def _stored(self, running: list[Attempt]) -> bool:
        """Wait for the first attempt that succeeds, or for the end of all."""
        try:
            while not any(one.done for one in running):
                if all(one.ended for one in running):
                    return False
                self.scheduler.sleep(LOOK_S)
            return True
        finally:
            for one in running:
                if not one.ended:
                    self._leave_behind(one)

    def _begin(self, table: pa.Table, batch: int, partition: int) -> Attempt:
        self._made += 1
        name = f"task-{batch}.{partition}.{self._made}"
        attempt = Attempt(name, batch, self.scheduler.process(name), f"sink-{QUERY}-{partition}")
        self._attempts.append(attempt)
        sink = KeyShardSink(
            TOPIC, sink_id="sink", send_timeout_ms=self._draw.choice((2_000, 30_000)),
            entry_messages_max=self._draw.choice((1, 2, 3, 1_000)),
            compression=self._draw.choice(("none", "lz4")),
        )  # fmt: skip
        rows = reordered(table, self._draw)
        options = WriteOptions(sink, (), tuple(rows.column_names), exclusive=True)
        write = TopicWrite(options)

        def body() -> None:
            try:
                mine, claim = write.rows_of(iter(rows.to_batches())), options.claim(QUERY)
                report = write.store(mine, QUERY, batch, partition, claim=claim)
            except KeyShardError as exc:
                self._failed(attempt, exc)
            else:
                attempt.done = True
                self.record.note(f"{name}: {report}")

        attempt.task = self.scheduler.spawn(attempt.process, "writer", body)
        return attempt

    def _failed(self, attempt: Attempt, error: KeyShardError) -> None:
        self.record.note(f"{attempt.name} fails: {error}")
        attempt.error = error
        if "has lost messages" in error.message and not isinstance(error, BeginAgainError):
            raise BrokenPromiseError("a call waited for rows that the broker has lost")
        # An attempt that was left behind may find a later batch, or rows of another attempt.
        late = isinstance(error, ProducerFencedError) and (
            attempt.batch < self._newest or attempt.left_behind
        )
        # A broker that recovered too few ids cannot prove that it knows the first one.
        unproved = isinstance(error, DeduplicationError)
        may_pass = unproved and not self.output.cluster.release.knows_every_id
        if not late and not may_pass and not isinstance(error, PASSING):
            raise error

    def _dies(self, attempt: Attempt, client: OutputClient) -> None:
        """Let an attempt be killed after some steps of its connection."""
        left = self._draw.randint(1, self._draw.choice(STEPS_MAX))

        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                client.step = lambda: None  # type: ignore[method-assign]
                self.scheduler.spawn(self.process, "fault", lambda: self._kill(attempt))

        client.step = step  # type: ignore[method-assign]

    def _kill(self, attempt: Attempt) -> None:
        if attempt.ended:
            return
        unnoticed = self._draw.random() < 0.3
        self.output.note(Trouble.UNNOTICED if unnoticed else Trouble.KILLED, attempt.name)
        self._end_attempt(attempt, self._draw.random() * UNNOTICED_S if unnoticed else 0.0)

    def _end_attempt(self, attempt: Attempt, unnoticed_s: float = 0.0) -> None:
        network = self.output.network
        for client in [one for one in network.clients if one.process is attempt.process]:
            network.lose_client(client, unnoticed_s)
        self.scheduler.kill(attempt.process)

    def _leave_behind(self, attempt: Attempt) -> None:
        attempt.left_behind = True
        self.output.note(Trouble.LEFT_BEHIND, attempt.name)

        def end() -> None:
            self.scheduler.sleep(self._draw.random() * BEHIND_S)
            if not attempt.ended:
                self._end_attempt(attempt)

        self.scheduler.spawn(self.process, "behind", end)

    def end(self, process: Process) -> None:
        for attempt in self._attempts:
            if not attempt.ended:
                self._leave_behind(attempt)
        super().end(process)

    @property
    def settle_s(self) -> float:
        # Before Pulsar 5.0, every attempt reads the end of the topic, over connections that break.
        knows = self.output.cluster.release.knows_every_id
        return super().settle_s if knows else SLOWER * super().settle_s

    # -- the verdict -----------------------------------------------------------------------------

    def _judge(self) -> None:
        super()._judge()
        if not self._counts:
            return
        self.output.heal()
        committed = {
            batch: {
                index: outgoing(rows).column("value").to_pylist()
                for index, rows in self.storage.sink[batch].items()
            }
            for batch in self.storage.commits
        }
        if problems := self.output.problems(committed):
            raise BrokenPromiseError(f"{len(problems)} problems, the first: {problems[0]}")


class FramedPipelineWorld(PipelineWorld):
    """The same, over frames."""

    def run(self) -> Outcome:
        self._frames = Frames(str(self.seed), self.scheduler)
        with self._frames.installed():
            return super().run()


def outgoing(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The rows of a task, as it writes them: each value is unique."""
    values, keys = [], []
    for row in rows:
        key, _ = parse_value(row["value"])
        place = f"{row['__topic']}-{row['__partition']}/{row['__messageId']}/"
        values.append(place.encode() + row["value"])
        keys.append(key)
    return pa.table({"value": pa.array(values, pa.binary()), "__key": pa.array(keys, pa.string())})


def reordered(table: pa.Table, random: Random) -> pa.Table:
    """The same rows with their keys in another order; those of a key keep theirs."""
    keys = table.column("__key").to_pylist()
    by_key: dict[str | None, list[int]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append(row)
    turns = list(keys)
    random.shuffle(turns)
    ways = {key: iter(rows) for key, rows in by_key.items()}
    return table.take([next(ways[key]) for key in turns])
