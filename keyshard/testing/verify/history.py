"""A history: what happened in one run of one subscription, one event per line of JSON.

Any program can write one; ``docs/history.md`` says which kind of event needs which fields, and in
which order a program has to write them. :mod:`keyshard.testing.verify.checkers` judges a history.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import ConfigError, HistoryError
from keyshard.redaction import shown

KINDS: dict[str, str] = {
    "sent": "the broker confirmed a message to its producer",
    "delivered": "a worker received a message; with batch: it is a row of that batch's run",
    "started": "a handler begins with a message; without a message: a run of a batch begins",
    "completed": "the handler is done with it; without a message: the run has handed out every row",
    "failed": "the handler ended without completing the message, which will be tried again",
    "acked": "a worker acknowledges an entry, or one message of it when index is given",
    "range_gained": "a worker owns a hash range from now on",
    "range_lost": "a worker gives a hash range up",
    "checkpointed": "the checkpoint that ends with this batch is durable",
    "crashed": "a worker, the broker, or with no worker named everything, was killed",
    "disconnected": "a connection to the broker broke: what is unacknowledged may come again",
    "faults_stopped": "no fault is injected from now on",
}
"""Every kind of event, and what it says."""

FAULTS = frozenset({"crashed", "disconnected"})
"""Kinds after which a message may be delivered once more."""

_MESSAGE_KINDS = frozenset({"sent", "delivered", "failed"})
_MESSAGE_OR_BATCH_KINDS = frozenset({"started", "completed"})
_RANGE_KINDS = frozenset({"range_gained", "range_lost"})

Name = tuple[object, ...]
"""What two events of one message have in common."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history.

    A message is named by its topic, key and ``seq``; without ``seq`` by its position.

    Raises:
        HistoryError: The kind is unknown, or lacks a field that it needs.
    """

    t: float
    """When, in seconds of any clock that all writers share."""
    kind: str
    """One of :data:`KINDS`."""
    topic: str | None = None
    """Topic without the partition suffix, written the same way everywhere."""
    partition: int | None = None
    """Topic partition; -1 when the topic is not partitioned."""
    ledger: int | None = None
    entry: int | None = None
    index: int | None = None
    """Index in the entry; 0 when it is no producer batch."""
    key: str | None = None
    """Routing key: ordering key, else partition key; none when keyless."""
    seq: int | None = None
    """Sequence number, ascending in publish order per topic and key."""
    range: str | None = None
    """Hash range ``start-end``, both inclusive."""
    epoch: int | None = None
    """Number of the assignment generation."""
    worker: str | None = None
    """Name of the process, thread or host that did it."""
    batch: str | None = None
    """Name of the batch; the same when the batch runs again."""
    part: int | None = None
    """Number of the host's partition that holds the row of a batch."""

    def __post_init__(self) -> None:
        kind = self.kind
        if kind in _MESSAGE_KINDS:
            missing = None if self.has_message else "topic and seq, or topic and position"
        elif kind in _MESSAGE_OR_BATCH_KINDS:
            missing = None if self.has_message or self.batch else "a message or a batch"
        elif kind == "acked":
            missing = None if self.entry_name else "topic, partition, ledger and entry"
        elif kind in _RANGE_KINDS:
            missing = None if self.range and self.worker else "range and worker"
        elif kind == "checkpointed":
            missing = None if self.batch else "batch"
        elif kind in KINDS:
            missing = None
        else:
            raise HistoryError(f"{shown(kind)} is no kind of event. Known: {', '.join(KINDS)}.")
        if missing:
            raise HistoryError(f"An event of kind {kind!r} needs {missing}.")
        if self.range is not None:
            parse_range(self.range)

    @property
    def has_message(self) -> bool:
        """Whether the event is about one message."""
        return self.topic is not None and (
            self.seq is not None or (self.entry_name is not None and self.index is not None)
        )

    @property
    def message(self) -> Name:
        """Name of the message: (topic, key, seq), or its position when it has no ``seq``."""
        if self.seq is not None:
            return (self.topic, self.key, self.seq)
        return (self.topic, self.partition, self.ledger, self.entry, self.index)

    @property
    def stored(self) -> Name:
        """Name of the message as the broker stored it: its position, else :attr:`message`.

        They differ when a producer sent a message again and the broker stored it twice.
        """
        if self.ledger is not None:
            return (self.topic, self.partition, self.ledger, self.entry, self.index)
        return (self.topic, self.key, self.seq)

    @property
    def entry_name(self) -> Name | None:
        """Name of the entry; ``None`` when the event does not say which."""
        if self.topic is None or self.partition is None:
            return None
        if self.ledger is None or self.entry is None:
            return None
        return (self.topic, self.partition, self.ledger, self.entry)

    @property
    def routing_name(self) -> Name:
        """Where order is promised: topic partition and key."""
        return (self.topic, self.partition, self.key)

    def to_json(self) -> str:
        """One line without its end; fields that are not set are left out."""
        return _ENCODER.encode(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """The fields that are set, by name."""
        named = zip(_NAMES, _values(self), strict=True)
        return {name: value for name, value in named if value is not None}

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Read what :meth:`to_json` wrote.

        Raises:
            HistoryError: It is no JSON object, or a field is unknown, missing or of a wrong type.
        """
        try:
            data = _DECODER.decode(line if isinstance(line, str) else line.decode())
        except (ValueError, RecursionError) as exc:  # Also a broken encoding.
            raise HistoryError(f"It is no JSON: {exc}.") from exc
        if type(data) is not dict:
            raise HistoryError("It is no JSON object.")
        return cls(**_checked(data))


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


_TIME_MAX = 1e15
"""All times are less, seconds: a float holds them to a tenth."""
_INTEGER_MAX = 2**63 - 1
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_NAMES = tuple(field.name for field in fields(Event))
_values = attrgetter(*_NAMES)
_TYPES: dict[str, type] = {
    field.name: int if "int" in str(field.type) else float if field.name == "t" else str
    for field in fields(Event)
}


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event, each of its type; texts that come again and again are shared."""
    for name, value in data.items():
        kind = _TYPES.get(name)
        if kind is None:
            raise HistoryError(f"{shown(name)} is no field. Known: {', '.join(_NAMES)}.")
        given = type(value)
        if given is str and kind is str:
            data[name] = sys.intern(value)
        elif given is int and kind is float and abs(value) < _TIME_MAX:
            data[name] = float(value)
        elif given is not kind and value is not None:
            raise HistoryError(f"{name} is {shown(value)}; it must be of type {kind.__name__}.")
        elif given is int and abs(value) > _INTEGER_MAX:
            raise HistoryError(f"{name} is {shown(value)}; it must fit into 64 bits.")
    for name in ("t", "kind"):
        if data.get(name) is None:
            raise HistoryError(f"{name} is missing.")
    if not abs(data["t"]) < _TIME_MAX:
        raise HistoryError(f"t is {shown(data['t'])}; it must be less than {_TIME_MAX:g} seconds.")
    return data


@lru_cache(maxsize=100_000)
def parse_range(text: str) -> HashRange:
    """The hash range that ``str(HashRange)`` wrote.

    Raises:
        HistoryError: It is none.
    """
    start, _, end = text.partition("-")
    try:
        return HashRange(int(start), int(end))
    except (ValueError, ConfigError) as exc:
        raise HistoryError(
            f"{shown(text)} is no hash range; write start-end, 0 to 65535, both inclusive."
        ) from exc


def read_history(path: Path | str, *, torn_end: bool = False) -> Iterator[Event]:
    """Read a file of events, line by line; blank lines are skipped.

    Args:
        path: A file of JSON lines.
        torn_end: Leave out a last line that has no end, as a writer leaves it that was killed.

    Raises:
        HistoryError: The file cannot be read, or a line is no event; it names the line.
    """
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if torn_end and not line.endswith(b"\n"):
                    return
                if not line.isspace():
                    yield _event(line, f"Line {number} of {path}")
    except OSError as exc:
        raise HistoryError(f"The history {path} cannot be read: {exc.strerror}.") from exc


def _event(line: bytes, where: str) -> Event:
    try:
        return Event.from_json(line)
    except HistoryError as exc:
        raise HistoryError(f"{where} is no event. {exc.message}") from exc


class HistoryWriter:
    """Appends events to a file; a context manager, safe to use from several threads.

    Events given together are written with one system call, so several processes may append to one
    file, and one that is killed leaves whole lines. A torn last line is cut off on opening.

    Args:
        path: A file of JSON lines; it is created when it is missing.

    Raises:
        HistoryError: The file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        try:
            self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - open until close()
            _cut_torn_end(self._file.fileno())
        except OSError as exc:
            raise HistoryError(f"The history {path} cannot be written: {exc.strerror}.") from exc

    def write(self, *events: Event) -> None:
        """Append events; they are with the operating system when this returns."""
        self.write_all(events)

    def write_all(self, events: Iterable[Event]) -> None:
        """Append many events, in their order and with nobody else's between them."""
        lines = "".join(f"{event.to_json()}\n" for event in events).encode()
        with self._lock:
            while lines:
                lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> HistoryWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_TAIL_BYTES = 64 * 1024


def _cut_torn_end(file: int) -> None:
    end = os.fstat(file).st_size
    if not end or os.pread(file, 1, end - 1) == b"\n":
        return
    while end:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    os.ftruncate(file, end)
