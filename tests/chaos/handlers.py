"""The program under test with handlers: a process of its own, ``python -m tests.chaos.handlers``.

Some keys fail and succeed later, some park. A line of its input names a step at which it kills
itself, or is an order: ``RESCALE 5``, ``UNPARK``; the end of the input asks it to stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from zlib import crc32

import tenacity

from keyshard import Message, RetryPolicy
from keyshard.broker.connect import connect
from keyshard.broker.port import DEFAULT_READ_OPTIONS, Broker, Reader, ReadOptions
from keyshard.columns.messages import messages_of
from keyshard.core.dead_letter import DeadLetter, parse
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import KeyShardError, NotRunningError
from keyshard.testing.verify.history import Event, HistoryWriter
from keyshard.testing.verify.recorder import Recorder
from keyshard.testing.verify.recording_broker import message_name
from keyshard.testing.verify.workloads import parse_value
from tests.chaos.stream import (
    TRY_AGAIN,
    WORKER,
    Settings,
    Status,
    given_up,
    replace_file,
    with_workers,
)
from tests.helpers import present
from tests.support.recorded_source import RecordedSource

_LOOK_S = 0.2
_ATTEMPTS = 3
_EPOCHS = 10_000
"""More than one start ever has."""


class Step(Enum):
    """The position of a message."""

    HANDLING = "a handler has begun"
    HANDLED = "a handler is done, nothing is durable"
    FAILED = "a handler failed"
    PARKED = "a dead letter is stored, nobody noted it"
    DURABLE = "the checkpoint is durable, nothing is acknowledged"


class DyingHistory:
    """A history; its process may end after any line.

    Args:
        history: The file of events.
        steps: The step that a kind of event stands for.
    """

    def __init__(self, history: HistoryWriter, steps: Mapping[str, Step]) -> None:
        self._history = history
        self._steps = steps
        self.die_at: Step | None = None
        self.seen: Counter[str] = Counter()
        """Calls with events of a kind."""

    def write_all(self, events: Iterable[Event]) -> None:
        written = list(events)
        self._history.write_all(written)
        kinds = {event.kind for event in written}
        self.seen.update(kinds)
        if self.die_at is not None and any(self._steps.get(kind) is self.die_at for kind in kinds):
            os.kill(os.getpid(), signal.SIGKILL)


def telling(broker: Broker, history: HistoryWriter) -> Broker:
    """Return the broker with Readers that record the dead letters which they read back.

    A process may die after it stores a dead letter and before it records it.
    """
    open_reader = broker.reader

    def reader(
        topic_partition: TopicPartition, start: EntryId, how: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> Reader:
        reader = open_reader(topic_partition, start, how)
        read = reader.read

        def read_and_tell(timeout_ms: int) -> list[EntryBlock]:
            blocks = read(timeout_ms)
            history.write_all(dead_letter_events(topic_partition, blocks))
            return blocks

        if topic_partition.topic.endswith("-DLQ"):
            reader.read = read_and_tell  # type: ignore[method-assign]
        return reader

    broker.reader = reader  # type: ignore[method-assign]
    return broker


def dead_letter_events(where: TopicPartition, blocks: Sequence[EntryBlock]) -> Iterator[Event]:
    """Record each original of stored dead letters as parked."""
    for block in blocks:
        for found in map(parse, messages_of(where, block)):
            if isinstance(found, DeadLetter):
                original = found.message
                ledger, entry, index = original.message_id
                key, seq = message_name(original.value, original.routing_key)
                yield Event(
                    time.time(), "parked", topic=original.topic, partition=original.partition,
                    ledger=ledger, entry=entry, index=index, key=key, seq=seq, worker=WORKER,
                )  # fmt: skip


class Trouble:
    """A handler. Key, number and the healed keys decide whether a message fails."""

    def __init__(self, healed: Path) -> None:
        self._healed_all = healed
        self._failures: Counter[tuple[str, int]] = Counter()
        self._poison: dict[str, int] = {}
        self._healed: dict[str, int] = {}

    def __call__(self, message: Message) -> None:
        key, seq = parse_value(present(message.value))
        kind = crc32(key.encode()) % 10
        if kind == 0 and seq % 25 == 9 and self._is_poison(key, seq):
            raise ValueError(f"{key}:{seq} fails until it is healed")
        if kind == 1 and seq % 7 == 3 and self._failures[key, seq] < 1 + seq % 2:
            self._failures[key, seq] += 1
            raise ValueError(f"{key}:{seq} fails some times")
        if kind == 2:
            time.sleep(0.01)

    def heal(self, key: str) -> None:
        """From now on, failed messages of a key succeed; later ones may fail."""
        if key in self._poison:
            self._healed[key] = self._poison[key]

    def _is_poison(self, key: str, seq: int) -> bool:
        if self._healed_all.exists() or seq <= self._healed.get(key, -1):
            return False
        self._poison[key] = seq
        return True


class Handlers:
    """Handlers that run until a stop."""

    def __init__(self, settings: Settings, history: HistoryWriter) -> None:
        self._settings = settings
        self._status = Status()
        self._ended = threading.Event()
        self._handle = Trouble(settings.healed)
        self._passing = DyingHistory(history, {"parked": Step.PARKED, "acked": Step.DURABLE})
        self._handling = DyingHistory(
            history,
            {"started": Step.HANDLING, "completed": Step.HANDLED, "failed": Step.FAILED},
        )
        self._source = RecordedSource(**settings.fields())
        connection = self._source.how_to_connect()
        self._source.record(
            lambda: with_workers(telling(connect(connection), history), self._source),
            Recorder(self._passing, WORKER),
            settings.number * _EPOCHS,
        )

    def listen(self) -> None:
        """Take orders from standard input until its end."""
        for line in sys.stdin:
            order, *values = line.split()
            if order == "RESCALE":
                threading.Thread(target=self._rescale, args=[int(values[0])], daemon=True).start()
            elif order == "UNPARK":
                self._unpark()
            else:
                self._handling.die_at = self._passing.die_at = Step[order]
        while not self._ended.is_set():
            with suppress(NotRunningError):
                self._source.stop()
                return
            self._ended.wait(_LOOK_S)

    def run(self) -> None:
        """Handle messages until the input ends."""
        telling = threading.Thread(target=self._keep_telling, name="status", daemon=True)
        telling.start()
        retry = RetryPolicy(
            wait=tenacity.wait_fixed(0.02), stop=tenacity.stop_after_attempt(_ATTEMPTS)
        )
        checkpoint = Path(self._settings.directory) / "handlers.json"
        try:
            self._source.run(
                self._handle,
                observers=[Recorder(self._handling, WORKER)],
                lanes=4,
                retry=retry,
                checkpoint=checkpoint if self._settings.checkpoint else None,
                drain_timeout_s=10.0,
            )
        finally:
            self._ended.set()
            telling.join()

    def _rescale(self, ranges: int) -> None:
        try:
            self._source.rescale(ranges)
        except KeyShardError as exc:  # As when the broker is away; the ranges stay as they were.
            print(f"rescale to {ranges}: {exc}", file=sys.stderr, flush=True)
        else:
            self._status.rescales += 1

    def _unpark(self) -> None:
        with suppress(NotRunningError):
            for parked in self._source.status()["parked"]:
                self._handle.heal(parked["key"])
                if self._source.unpark(parked["key"]):
                    self._status.unparked += 1

    def _keep_telling(self) -> None:
        while not self._ended.is_set():
            if self._settings.healed.exists():
                self._unpark()
            self._tell(running=True)
            self._ended.wait(_LOOK_S)
        self._tell(running=False)

    def _tell(self, *, running: bool) -> None:
        output = self._status
        with suppress(NotRunningError):
            status = self._source.status()
            output.parked = status["parkedKeys"] or 0
            if (window := status["window"]) is not None:
                output.acknowledged = window["entriesAcknowledged"]
                output.duplicates_dropped = window["duplicatesDropped"]
                output.misrouted = window["misrouted"]
                output.saw_waiting(window["segmentsWaiting"])
        output.running = running
        output.batches = self._passing.seen["acked"]
        replace_file(self._settings.status, json.dumps(asdict(output)), durable=False)


def main(arguments: Sequence[str]) -> int:
    """Run with :class:`Settings` as JSON; returns the exit status."""
    settings = Settings(**json.loads(arguments[0]))
    with HistoryWriter(settings.history) as history:
        handlers = Handlers(settings, history)
        threading.Thread(target=handlers.listen, name="orders", daemon=True).start()
        try:
            handlers.run()
        except KeyShardError as exc:
            if not given_up(exc):
                raise
            print(exc, file=sys.stderr)
            return TRY_AGAIN
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
