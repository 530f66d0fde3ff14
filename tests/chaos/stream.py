"""An embedded stream in a separate process that can be killed at every step of a batch.

It keeps the state of a host engine in one file that is replaced as a whole: the checkpoint of the
newest batch, and whether the batch is committed. Each line on its standard input names a step at
which it kills itself; the end of the input asks it to stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker
from keyshard.config.connection import AUTO
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import (
    KeyShardError,
    ReplayTimeoutError,
    SubscriptionInUseError,
    WorkerUnreachableError,
)
from keyshard.source_stream import SourceBatch
from keyshard.testing.verify.history import Event, HistoryWriter
from keyshard.testing.verify.recorder import Recorder
from keyshard.workers.backends import start_of
from keyshard.workers.broker import RemoteBroker

WORKER = "program"
"""Its name in the history."""
TRY_AGAIN = 75
"""Exit status when the broker could not be reached or still knew the one before."""

_WAIT_S = 0.2
CLIENT_TIMEOUT_S = 15


class Step(Enum):
    """The step of a batch."""

    PLANNED = "planned, nothing is read"
    READING = "some rows are read"
    READ = "all rows are read, nothing is durable"
    DURABLE = "the checkpoint is durable, nothing is acknowledged"
    RELEASED = "acknowledgements are on their way"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the process, as JSON."""

    topic: str
    subscription: str
    service_url: str
    admin_url: str
    ranges: int
    directory: str
    """Folder of its files."""
    number: int = 0
    """Number of this start."""
    checkpoint: bool = True
    """Whether handlers keep one; a stream always does."""
    workers: str = "embedded"
    """Where the consumers run."""
    transport: str = AUTO
    """Client that consumes and reads."""

    @property
    def state(self) -> Path:
        """The durable state: the newest checkpoint, and whether its batch is committed."""
        return Path(self.directory) / "checkpoint.json"

    @property
    def status(self) -> Path:
        """The counts of this start, see :class:`Status`."""
        return Path(self.directory) / f"status-{self.number}.json"

    @property
    def healed(self) -> Path:
        """When it exists, no handler fails any more, and every parked key comes out."""
        return Path(self.directory) / "healed"

    @property
    def history(self) -> Path:
        """The events."""
        return Path(self.directory) / "history.jsonl"

    def fields(self) -> dict[str, Any]:
        """Return the fields of a source with batches of about 0.25 s and quick discovery."""
        return {
            "topics": self.topic,
            "subscription": self.subscription,
            "service_url": self.service_url,
            "admin_url": self.admin_url,
            "parallelism": self.ranges,
            "workers": self.workers,
            "transport": self.transport,
            "starting_position": "earliest",
            "batch_tasks": self.ranges,
            "batch_rows_min": 50,
            "batch_rows_max": 500,
            "batch_delay_max_ms": 250,
            "discovery_interval_ms": 1_000,
            "operation_timeout_ms": CLIENT_TIMEOUT_S * 1_000,
        }


@dataclass(slots=True)
class Status:
    """Counts since the start of the process."""

    running: bool = False
    batches: int = 0
    """Number of commits of handlers."""
    acknowledged: int = 0
    duplicates_dropped: int = 0
    misrouted: int = 0
    parked: int = 0
    """Keys that are parked now."""
    unparked: int = 0
    rescales: int = 0
    segments_waiting: int = 0
    """Highest number of segments that waited for their parents."""

    def saw_waiting(self, segments: int) -> None:
        """Note how many segments wait for their parents now."""
        self.segments_waiting = max(self.segments_waiting, segments)


class Stream:
    """Runs batches until a stop."""

    def __init__(self, settings: Settings, history: HistoryWriter) -> None:
        self._settings = settings
        self._state = settings.state
        self._recorder = Recorder(history, WORKER)
        self._history = history
        self._status = Status()
        self._stopping = threading.Event()
        self._die_at: Step | None = None
        config = SourceConfig(**settings.fields())
        connection = config.how_to_connect()
        self._coordinator = Coordinator(
            config,
            lambda: self._recorder.broker(with_workers(connect(connection), config)),
            PulsarAdmin(connection),
        )

    def listen(self) -> None:
        """Take orders from standard input until its end."""
        for line in sys.stdin:
            self._die_at = Step[line.strip()]
        self._stopping.set()

    def run(self) -> None:
        """Continue from the stored checkpoint; a batch that was only planned runs again first."""
        end, committed = self._load()
        if end is not None and committed:
            # The process before may have died after it stored the file and before it recorded this.
            self._history.write(
                Event(time.time(), "checkpointed", batch=end.batch_id, worker=WORKER)
            )
        self._coordinator.start(end, planned=not committed)
        try:
            self._tell(running=True)
            if end is not None and not committed:
                self._batch(end)
            while not self._stopping.is_set():
                end = (
                    self._coordinator.batches.cut()
                    if self._coordinator.batches.wait_for_rows(_WAIT_S)
                    else None
                )
                if end is None:
                    self._stopping.wait(0.01)
                else:
                    self._store(end, committed=False)
                    self._batch(end)
                self._tell(running=True)
        finally:
            self._tell(running=False)
            self._coordinator.stop()

    def _batch(self, end: Checkpoint) -> None:
        self._at(Step.PLANNED)
        batch = SourceBatch(self._coordinator, end)
        for _ in self._recorder.rows(batch):
            self._at(Step.READING)
        self._at(Step.READ)
        self._store(end, committed=True)
        self._at(Step.DURABLE)
        self._recorder.checkpointed(batch)
        self._coordinator.batches.release(end)
        self._status.batches += 1
        self._at(Step.RELEASED)

    def _at(self, step: Step) -> None:
        if self._die_at is step:
            os.kill(os.getpid(), signal.SIGKILL)

    def _load(self) -> tuple[Checkpoint | None, bool]:
        if not self._state.exists():
            return None, True
        state = json.loads(self._state.read_text())
        return Checkpoint.from_json(state["checkpoint"]), state["committed"]

    def _store(self, end: Checkpoint, *, committed: bool) -> None:
        text = json.dumps({"checkpoint": end.to_json(), "committed": committed})
        replace_file(self._state, text, durable=True)

    def _tell(self, *, running: bool) -> None:
        counts = self._coordinator.status()
        self._status.running = running
        self._status.acknowledged = counts["entriesAcknowledged"]
        self._status.duplicates_dropped = counts["duplicatesDropped"]
        self._status.misrouted = counts["misrouted"]
        self._status.saw_waiting(counts["segmentsWaiting"])
        replace_file(self._settings.status, json.dumps(asdict(self._status)), durable=False)


def with_workers(local: Broker, config: SourceConfig) -> Broker:
    """Return a connection whose consumers are in the workers of the source."""
    workers, connection = config.parsed_workers(), config.how_to_connect()
    if workers is None:
        return local
    start = start_of(connection, workers)
    return RemoteBroker(local, start, workers.count, connection.operation_timeout_ms / 1_000)


def replace_file(path: Path, text: str, *, durable: bool) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)
    if durable:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def given_up(error: KeyShardError) -> bool:
    """Return whether a fault explains the error that ended a program.

    If a program is stopped while its workers start, their leases end before it continues.
    """
    others = (SubscriptionInUseError, ReplayTimeoutError, WorkerUnreachableError)
    return error.retriable or isinstance(error, others)


def main(arguments: Sequence[str]) -> int:
    """Run with :class:`Settings` as JSON; returns the exit status."""
    settings = Settings(**json.loads(arguments[0]))
    with HistoryWriter(settings.history) as history:
        stream = Stream(settings, history)
        threading.Thread(target=stream.listen, name="orders", daemon=True).start()
        try:
            stream.run()
        except KeyShardError as exc:
            if not given_up(exc):
                raise
            print(exc, file=sys.stderr)
            return TRY_AGAIN
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
