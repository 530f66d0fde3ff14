"""A history: the events of one run of one subscription, one JSON line per event.

Any program can write one. ``docs/history.md`` names the fields of each kind of event, and the order
in which a program must write them. :mod:`keyshard.testing.verify.checkers` checks a history.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec

from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_segments import SEGMENT, scalable_topic_of
from keyshard.errors import ConfigError, HistoryError
from keyshard.redaction import shown

KINDS: dict[str, str] = {
    "sent": "the broker confirmed a message to its producer",
    "delivered": "a worker received a message; with batch: it is a row of that batch's run",
    "started": "a handler begins with a message; without a message: a run of a batch begins",
    "completed": "the handler has completed it; without a message: the run has delivered every row",
    "parked": "the message is stored as a dead letter, whether a handler had it or not",
    "failed": "the handler returned without completing the message, which is tried again",
    "acked": "a worker acknowledges an entry, or with index one of its messages",
    "range_gained": "a worker owns a hash range from now on",
    "range_lost": "a worker gives up a hash range",
    "checkpointed": "the checkpoint that ends with this batch is durable",
    "crashed": "a worker or the broker was killed; without a worker: everything was killed",
    "disconnected": "a connection was lost, so unacknowledged messages may be delivered again",
    "faults_stopped": "no fault is injected from now on",
}
"""Every kind of event, and its meaning."""

FAULTS = frozenset({"crashed", "disconnected"})
"""Kinds after which a message may be delivered once more."""

_MESSAGE_KINDS = frozenset({"sent", "delivered", "failed", "parked"})
_MESSAGE_OR_BATCH_KINDS = frozenset({"started", "completed"})
_RANGE_KINDS = frozenset({"range_gained", "range_lost"})

Name = tuple[object, ...]
"""Identity of a message, equal in all its events."""


_TIME_MAX = 1e15
"""Upper bound of all times, seconds: up to it, a float is exact to a tenth."""
_INTEGER_MAX = 2**63 - 1
Seconds = Annotated[float, msgspec.Meta(gt=-_TIME_MAX, lt=_TIME_MAX)]
Integer = Annotated[int, msgspec.Meta(ge=-_INTEGER_MAX, le=_INTEGER_MAX)]


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One line of a history.

    A message is named by its topic, key and ``seq``; without ``seq`` by its message id.

    Raises:
        HistoryError: The kind is unknown, or a required field is missing.
    """

    t: Seconds
    """Time of the event, seconds, of any clock that all writers share."""
    kind: str
    """One of :data:`KINDS`."""
    topic: str | None = None
    """Topic without the partition suffix, written the same way everywhere."""
    partition: Integer | None = None
    """Topic partition; -1 when the topic is not partitioned."""
    ledger: Integer | None = None
    entry: Integer | None = None
    index: Integer | None = None
    """Index in the entry; 0 if the entry is no producer batch."""
    key: str | None = None
    """Routing key: ordering key, or else partition key; none if keyless."""
    seq: Integer | None = None
    """Sequence number, ascending in publish order per topic and key."""
    range: str | None = None
    """Hash range ``start-end``, both inclusive."""
    epoch: Integer | None = None
    """Number of the assignment."""
    worker: str | None = None
    """Name of the process, thread or host of the event."""
    batch: str | None = None
    """Name of the batch; the same if the batch runs again."""
    part: Integer | None = None
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
            raise HistoryError(
                f"{shown(kind)} is not a kind of event.", f"The kinds are: {', '.join(KINDS)}."
            )
        if missing:
            raise HistoryError(f"An event of kind {kind!r} needs {missing}.")
        if self.range is not None:
            parse_range(self.range)
        for name in _TEXTS:
            text = getattr(self, name)
            if text is not None:
                _set(self, name, sys.intern(text))

    @property
    def has_message(self) -> bool:
        """Whether the event is about one message."""
        return self.topic is not None and (
            self.seq is not None or (self.entry_name is not None and self.index is not None)
        )

    @property
    def message(self) -> Name:
        """Name of the message: (topic, key, seq), or its message id if it has no ``seq``."""
        if self.seq is not None:
            return (self.topic, self.key, self.seq)
        return (self.topic, self.partition, self.ledger, self.entry, self.index)

    @property
    def stored(self) -> Name:
        """Name of the message as the broker stored it: its message id, or else :attr:`message`.

        They differ if a producer sent a message again and the broker stored it twice.
        """
        if self.ledger is not None:
            return (self.topic, self.partition, self.ledger, self.entry, self.index)
        return (self.topic, self.key, self.seq)

    @property
    def entry_name(self) -> Name | None:
        """Name of the entry; ``None`` if the event does not contain it."""
        if self.topic is None or self.partition is None:
            return None
        if self.ledger is None or self.entry is None:
            return None
        return (self.topic, self.partition, self.ledger, self.entry)

    @property
    def routing_name(self) -> Name:
        """Topic partition and key: messages with the same ones must stay in order.

        For a segment with ``seq``, the scalable topic and the key: its parents and children have
        messages of the key, too.
        """
        if self.seq is not None and self.topic is not None and self.topic.startswith(SEGMENT):
            return (scalable_topic_of(self.topic), self.partition, self.key)
        return (self.topic, self.partition, self.key)

    def to_json(self) -> str:
        """Return the event as a line of JSON without a newline; unset fields are left out."""
        return _ENCODER.encode(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """Return the set fields, by name."""
        named = zip(_NAMES, _values(self), strict=True)
        return {name: value for name, value in named if value is not None}

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Read the form of :meth:`to_json`.

        Raises:
            HistoryError: It is no JSON object, or a field is unknown, missing or of a wrong type.
        """
        try:
            return _FAST.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # The slower decoder raises a more exact error, or reads a line that msgspec refuses.
            return cls._from_json(line)

    @classmethod
    def _from_json(cls, line: str | bytes) -> Event:
        try:
            data = _DECODER.decode(line if isinstance(line, str) else line.decode())
        except (ValueError, RecursionError) as exc:  # ValueError includes UnicodeDecodeError.
            raise HistoryError(f"The line is not JSON: {exc}.") from exc
        if type(data) is not dict:
            raise HistoryError("The line is not a JSON object.")
        return cls(**_checked(data))


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_NAMES = Event.__struct_fields__
_values = attrgetter(*_NAMES)
_TYPES: dict[str, type] = {
    name: int if "Integer" in kind else float if name == "t" else str
    for name, kind in Event.__annotations__.items()
}
_TEXTS = tuple(name for name, kind in _TYPES.items() if kind is str)
_set = msgspec.structs.force_setattr
_FAST = msgspec.json.Decoder(Event)


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event, each of its type; repeated texts are shared."""
    for name, value in data.items():
        kind = _TYPES.get(name)
        if kind is None:
            raise HistoryError(
                f"{shown(name)} is not a field.", f"The fields are: {', '.join(_NAMES)}."
            )
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
    """Parse the form of ``str(HashRange)``.

    Raises:
        HistoryError: It is no hash range.
    """
    start, _, end = text.partition("-")
    try:
        return HashRange(int(start), int(end))
    except (ValueError, ConfigError) as exc:
        raise HistoryError(
            f"{shown(text)} is not a hash range.",
            "Write start-end, from 0 to 65535, both inclusive.",
        ) from exc


def read_history(path: Path | str, *, torn_end: bool = False) -> Iterator[Event]:
    """Read a file of events, line by line; blank lines are skipped.

    Args:
        path: A file of JSON lines.
        torn_end: Leave out an incomplete last line, which a killed writer leaves.

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
        raise HistoryError(
            f"The history {path} cannot be read: {exc.strerror}.", "Check its path and permissions."
        ) from exc


def _event(line: bytes, where: str) -> Event:
    try:
        return Event.from_json(line)
    except HistoryError as exc:
        raise HistoryError(f"{where} is not an event. {exc.problem}", exc.remedy) from exc


class HistoryWriter:
    """Appends events to a file; a context manager, safe to use from several threads.

    Events of one call are written with one system call. So several processes may append to one
    file, and a killed process leaves whole lines. An incomplete last line is cut off on opening.

    Args:
        path: A file of JSON lines; a missing one is created.

    Raises:
        HistoryError: The file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        try:
            self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - open until close()
            _cut_torn_end(self._file.fileno())
        except OSError as exc:
            raise HistoryError(
                f"The history {path} cannot be written: {exc.strerror}.", "Use another file."
            ) from exc

    def write(self, *events: Event) -> None:
        """Append events; they have reached the operating system when this returns."""
        self.write_all(events)

    def write_all(self, events: Iterable[Event]) -> None:
        """Append many events in their order, without events of other threads between them."""
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
