"""The unconfirmed entries of a producer, and the entries to send next.

Every broker with entry producers uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from keyshard.broker.light_future import LightFuture
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import EntryId
from keyshard.core.publishing import (
    NOTHING,
    ForgottenError,
    RolledBackError,
    UnsureError,
    resume,
)
from keyshard.errors import BrokerUnavailableError, KeyShardError

ENTRY_MEMORY = 512
"""Memory of an unconfirmed entry beside its encoded bytes: its objects and its future, bytes."""


class BeginAgainError(BrokerUnavailableError):
    """Only another attempt, which looks for its messages in the topic, can continue."""


class AcceptedLostError(BeginAgainError):
    """The broker has lost messages of an earlier attempt that it had accepted."""


class MaybeStoredError(BeginAgainError):
    """The broker has loaded the topic again, and may know fewer messages than it stores."""


@dataclass(slots=True, eq=False)
class Pending:
    """An entry without a confirmation."""

    rows: Sequence[OutgoingMessage]
    first: int
    """Sequence id of its first message."""
    data: bytes
    """The encoded entry."""
    deadline_s: float = 0.0
    done: Future[EntryId | None] = field(default_factory=LightFuture)
    number: int = 0
    """Number of entries that were added before it."""

    @property
    def last(self) -> int:
        """Sequence id of its last message."""
        return self.first + len(self.rows) - 1

    @property
    def size(self) -> int:
        """Memory that it takes, bytes."""
        return len(self.data) + ENTRY_MEMORY


def failed_entry(error: KeyShardError) -> Future[EntryId | None]:
    """Return the future of an entry that was not published."""
    done = LightFuture[EntryId | None]()
    done.set_exception(error)
    return done


class Unconfirmed:
    """Entries in the order of their sequence ids. The owner calls every method under its lock.

    Args:
        named: Whether the broker has to find duplicates. Then the first entry of an unknown name is
            sent alone, until deduplication is proved by opening the producer again.
        encode: Encodes messages as an entry whose first message has a sequence id.
    """

    def __init__(
        self, *, named: bool, encode: Callable[[Sequence[OutgoingMessage], int], bytes]
    ) -> None:
        self._named = named
        self._encode = encode
        self._entries: deque[Pending] = deque()
        self._sent = 0
        """Entries that were sent to the current producer."""
        self._sent_last = NOTHING
        """Last sequence id that was sent to any producer."""
        self._probe: Pending | None = None
        """A single message that shows whether all earlier ones are stored; it is sent alone."""
        self._probe_sent = False
        self._last = self._confirmed = NOTHING
        """Last sequence ids: known to the broker when the producer was opened; confirmed."""
        self._seen = NOTHING
        """Highest id that the broker knew before the first entry was added."""
        self._relied_on: int | None = None
        """Id that the caller takes for known, with all earlier ones; ``None`` if it is surely
        stored, or the caller relies on none."""
        self._begun = False
        self._was_opened = False
        self._unsure = False
        """Whether others may have published under the name since the caller read the topic."""
        self.messages = self.bytes = 0
        self.added = 0
        """Entries so far."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last_sequence_id(self) -> int:
        """Last sequence id that the broker knows."""
        return max(self._last, self._confirmed)

    @property
    def deadline_s(self) -> float | None:
        """Deadline of the oldest entry, monotonic seconds; ``None`` without entries."""
        return self._entries[0].deadline_s if self._entries else None

    def holds(self, below: int) -> bool:
        """Return whether one of the first ``below`` entries so far is unconfirmed."""
        return bool(self._entries) and self._entries[0].number < below

    @property
    def proved(self) -> bool:
        """Whether deduplication is known to work, or is not needed."""
        return not self._named or self._last != NOTHING

    @property
    def to_prove(self) -> bool:
        """Whether opening the producer again would show that deduplication works."""
        return not self.proved and self._confirmed != NOTHING

    def add(self, entry: Pending) -> None:
        """Append an entry.

        Raises:
            UnsureError: The broker may have stored it without knowing its ids.
            OtherWriterError: The broker knows later ids of the name.
            RolledBackError: It has lost ids that the caller takes for known.
        """
        if self._unsure:
            raise UnsureError
        if not self._begun:
            self._begun = True
            self._relied_on = entry.first if self._named and entry.first <= self._seen else None
        self._check_relied_on(self._last)
        entry.number, self.added = self.added, self.added + 1
        self._entries.append(entry)
        self._count(entry, 1)
        if entry.first <= self._last and self._probe is None:
            self._plan()

    def opened(self, last: int, *, knows_every_id: bool = True) -> None:
        """Begin again at a new producer.

        Args:
            last: Last sequence id that the broker knows.
            knows_every_id: Whether it surely knows the ids that it has stored.

        Raises:
            UnsureError: It may have stored entries whose ids it does not know.
            OtherWriterError: It knows ids that no entry has.
            ForgottenError: It does not know ids that it confirmed.
            RolledBackError: It has lost ids that the caller takes for known.
        """
        if not self._begun:
            self._seen = max(self._seen, last)
        self._check_relied_on(last)
        again, self._was_opened = self._was_opened, True
        if again and self._named and not knows_every_id and not self.to_prove:
            # Another attempt may have had the name meanwhile, and have stored these entries.
            if self._entries or last < self._sent_last:
                raise UnsureError
            self._unsure = True
        self._sent, self._probe = 0, None
        if last < self._confirmed and not self._named:
            last = self._confirmed
        self._last = last
        self._plan()

    def _check_relied_on(self, last: int) -> None:
        if self._relied_on is not None and last < self._relied_on:
            raise RolledBackError

    def _plan(self) -> None:
        spans = [(one.first, one.last) for one in self._entries]
        found = resume(self._last, self._confirmed, spans)
        if found.probe is None:
            return
        holder = self._entries[found.covered if found.split else found.covered - 1]
        row = found.probe - holder.first
        rows = holder.rows[row : row + 1]
        self._probe = Pending(rows, found.probe, self._encode(rows, found.probe))
        self._probe_sent = False

    def next(self, bytes_max: int) -> list[Pending]:
        """Return the entries to send now, and count them as sent.

        Args:
            bytes_max: Size of the result, bytes; one entry may exceed it.
        """
        if self._probe is not None:
            sent, self._probe_sent = self._probe_sent, True
            self._sent_last = max(self._sent_last, self._probe.last)
            return [] if sent else [self._probe]
        limit = len(self._entries) if self.proved else min(1, len(self._entries))
        found: list[Pending] = []
        size = 0
        while self._sent < limit and size < bytes_max:
            found.append(self._entries[self._sent])
            size += len(found[-1].data)
            self._sent += 1
        if found:
            self._sent_last = max(self._sent_last, found[-1].last)
        return found

    @property
    def has_next(self) -> bool:
        """Whether :meth:`next` would return entries."""
        if self._probe is not None:
            return not self._probe_sent
        return self._sent < (len(self._entries) if self.proved else min(1, len(self._entries)))

    @property
    def probing(self) -> bool:
        """Whether a probe is sent first: one message that shows whether earlier ones are stored."""
        return self._probe is not None

    def probe_again(self) -> None:
        """Send the probe once more."""
        self._probe_sent = False

    def confirm(self, sequence_id: int, *, duplicate: bool) -> list[Pending]:
        """Accept a confirmation. Return the entries that are stored now.

        Args:
            sequence_id: First id of the confirmed entry.
            duplicate: Whether it was stored before.

        Raises:
            ForgottenError: The probe was stored, and was no duplicate.
        """
        if self._probe is not None and self._probe.first == sequence_id:
            if not duplicate:
                raise ForgottenError
            return self._probed(sequence_id)
        for place in range(self._sent):
            entry = self._entries[place]
            if entry.first == sequence_id:
                self._confirmed = max(self._confirmed, entry.last)
                return [self._removed(place)]
        return []

    def _probed(self, sequence_id: int) -> list[Pending]:
        self._probe = self._relied_on = None
        self._confirmed = sequence_id
        done: list[Pending] = []
        while self._entries and self._entries[0].last <= sequence_id:
            done.append(self._removed(0))
        if self._entries and self._entries[0].first <= sequence_id:
            head = self._entries[0]
            self._count(head, -1)
            head.rows = head.rows[sequence_id + 1 - head.first :]
            head.first = sequence_id + 1
            head.data = self._encode(head.rows, head.first)
            self._count(head, 1)
        return done

    def drop(self, sequence_id: int) -> list[Pending]:
        """Remove and return the entry that begins with an id, or those that a probe asks about."""
        if self._probe is not None and self._probe.first == sequence_id:
            self._probe = None
            asked = [one for one in self._entries if one.first <= sequence_id]
            return [self._removed(0) for _ in asked]
        for place, entry in enumerate(self._entries):
            if entry.first == sequence_id:
                return [self._removed(place)]
        return []

    def drop_late(self, now_s: float) -> list[Pending]:
        """Remove and return the entries whose deadline has passed."""
        late: list[Pending] = []
        while self._entries and self._entries[0].deadline_s <= now_s:
            late.append(self._removed(0))
        return late

    def clear(self) -> list[Pending]:
        """Remove and return all entries."""
        found = list(self._entries)
        self._entries.clear()
        self._sent = self.messages = self.bytes = 0
        self._probe = None
        return found

    def _removed(self, place: int) -> Pending:
        entry = self._entries[place]
        del self._entries[place]
        self._count(entry, -1)
        if place < self._sent:
            self._sent -= 1
        return entry

    def _count(self, entry: Pending, sign: int) -> None:
        self.messages += sign * len(entry.rows)
        self.bytes += sign * entry.size
