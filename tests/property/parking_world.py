"""A model of a source that parks keys: its topic, its dead-letter topic, and steps of its lanes.

Every step is atomic, and a crash may lie between any two. The topic delivers again what is not
acknowledged; the dead-letter topic keeps what was stored, from wherever it was trimmed to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from helpers import P0
from keyshard.core.entry import EntryId
from keyshard.core.message import MessageId
from keyshard.core.parking import Parked, Parking, State

LEDGER = 3
"""Entries of the dead-letter topic in one ledger."""


@dataclass
class Stored:
    """One entry of the dead-letter topic."""

    key: str
    seq: int | None
    """Of a letter."""
    up_to: EntryId | None = None
    """Of a marker."""
    finished: bool = False
    """Whether it is acknowledged."""


@dataclass
class Lane:
    """What one key is at."""

    waiting: deque[int] = field(default_factory=deque)
    replaying: deque[EntryId] = field(default_factory=deque)
    sending: EntryId | None = None
    """A letter or marker that is stored and not yet folded."""


class World:
    """Messages of some keys; the n-th of a key has sequence number n."""

    def __init__(self, keys: str, messages: int) -> None:
        self.messages = messages
        self.acked: dict[str, set[int]] = {key: set() for key in keys}
        self.acked_durably: dict[str, set[int]] = {key: set() for key in keys}
        self.completed: dict[str, set[int]] = {key: set() for key in keys}
        self.handled: dict[str, list[int]] = {key: [] for key in keys}
        self.letters: list[Stored] = []
        self.first = 0
        self.saved: list[dict[str, Any]] = []
        self.crashes = 0
        self.start(None)

    @staticmethod
    def position(index: int) -> EntryId:
        return EntryId(7 + index // LEDGER, index % LEDGER)

    def stored(self, position: EntryId) -> Stored:
        return self.letters[(position.ledger - 7) * LEDGER + position.entry]

    @staticmethod
    def message_id(key: str, seq: int) -> MessageId:
        # Keys lie in one topic partition; every third message of a key is in a producer batch.
        return MessageId(ord(key), seq // 3, seq % 3)

    # -- the process ------------------------------------------------------------------------------

    def start(self, checkpoint: dict[str, Any] | None) -> None:
        """Fold what is stored, and receive what is not acknowledged."""
        parked = Parked() if checkpoint is None else Parked.from_dict(checkpoint)
        if checkpoint is not None:
            end = len(self.letters)
            parked.trimmed(self.position(self.first) if self.first < end else None)
        folded = parked.folded
        for index in range(self.first, len(self.letters)):
            if folded is None or self.position(index) > folded:
                self.fold(parked, self.position(index))
        self.parking = Parking(parked)
        self.completed = {key: set() for key in self.acked}
        self.lanes = {
            key: Lane(deque(seq for seq in range(self.messages) if seq not in acked))
            for key, acked in self.acked.items()
        }

    def fold(self, parked: Parked, position: EntryId) -> None:
        one = self.stored(position)
        if one.seq is not None:
            parked.letter(position, one.key, P0, self.message_id(one.key, one.seq))
        else:
            assert one.up_to is not None
            parked.replayed(position, one.key, one.up_to)

    def crash(self, *, forget: bool, checkpoint: dict[str, Any] | None = None) -> None:
        """Kill the process, and start it again.

        Args:
            forget: Whether the broker dies too, with the acknowledgements that it did not write.
            checkpoint: Where the next one begins; ``None``: with all that is stored.
        """
        self.crashes += 1
        if forget:
            self.acked = {key: set(durable) for key, durable in self.acked_durably.items()}
        else:
            self.write()
        self.start(checkpoint)

    # -- steps of a lane --------------------------------------------------------------------------

    def idle(self, key: str) -> bool:
        lane = self.lanes[key]
        return not (lane.waiting or lane.replaying or lane.sending)

    def step(self, key: str, *, succeeds: bool, twice: bool = False) -> None:
        """The next thing that happens in the lane of a key.

        Args:
            succeeds: How a handler ends that runs in this step.
            twice: Whether something that is sent is stored twice.
        """
        lane, parking = self.lanes[key], self.parking
        state = parking.state(key)
        if lane.sending is not None:
            self.confirm(key)
        elif state is State.DRAINING:
            lane.replaying.extend(parking.drained(key))
        elif state is State.REPLAYING:
            self.replay(key, succeeds=succeeds, twice=twice)
        elif lane.waiting:
            seq = lane.waiting[0]
            message_id = self.message_id(key, seq)
            parked = parking.parked.keys.get(key)
            known = parked is not None and parked.knows(P0, message_id)
            if known or parking.parked.is_replayed(key, P0, message_id):
                self.complete(key)
            elif state is State.PARKED:
                self.send(key, Stored(key, seq), twice=twice)
            elif succeeds:
                self.handled[key].append(seq)
                self.complete(key)
            else:
                parking.park(key)

    def replay(self, key: str, *, succeeds: bool, twice: bool) -> None:
        lane, parking = self.lanes[key], self.parking
        letter = lane.replaying[0]
        seq = self.stored(letter).seq
        assert seq is not None
        if succeeds:
            self.handled[key].append(seq)
            marker = Stored(key, None, parking.up_to(key, letter))
            self.send(key, marker, twice=twice)
        else:
            parking.failed_again(key)
            lane.replaying.clear()

    def send(self, key: str, one: Stored, *, twice: bool) -> None:
        self.parking.parked.sending(key)
        for _ in range(1 + twice):
            self.letters.append(one)
        self.lanes[key].sending = self.position(len(self.letters) - 1)

    def confirm(self, key: str) -> None:
        lane, parking = self.lanes[key], self.parking
        position, lane.sending = lane.sending, None
        assert position is not None
        one = self.stored(position)
        if one.seq is not None:
            self.fold(parking.parked, position)
            self.complete(key)
        else:
            assert one.up_to is not None
            parking.replayed(position, key, one.up_to)
            lane.replaying.popleft()
            one.finished = True
            for stored in self.letters:
                if stored.key == key and stored.seq is not None:
                    at = self.position(self.letters.index(stored))
                    stored.finished |= at <= one.up_to
        parking.parked.sent(key)

    def complete(self, key: str) -> None:
        self.completed[key].add(self.lanes[key].waiting.popleft())

    # -- the world around it ----------------------------------------------------------------------

    def acknowledge(self) -> None:
        for key, completed in self.completed.items():
            self.acked[key] |= completed

    def write(self) -> None:
        """The broker writes its cursors."""
        self.acked_durably = {key: set(acked) for key, acked in self.acked.items()}

    def trim(self) -> None:
        """Whole ledgers go when everything up to their end is acknowledged."""
        done = 0
        while done < len(self.letters) and self.letters[done].finished:
            done += 1
        self.first = max(self.first, done // LEDGER * LEDGER)

    # -- what must hold ---------------------------------------------------------------------------

    def resting(self, parked: Parked) -> dict[str, list[int | None]]:
        return {
            key: [self.stored(one).seq for one in found.resting]
            for key, found in parked.keys.items()
        }

    def validate(self) -> None:
        self.parking.validate()
        for key, acked in self.acked.items():
            parked = self.parking.parked.keys.get(key)
            rest = {self.stored(one).seq for one in parked.resting} if parked else set()
            lost = acked - set(self.handled[key]) - rest
            assert not lost, f"{lost} of {key} are acknowledged and neither handled nor resting"
            firsts = list(dict.fromkeys(self.handled[key]))
            assert firsts == sorted(firsts), f"order of {key} is broken: {self.handled[key]}"
            if not self.crashes:
                assert firsts == self.handled[key], "a message was handled twice without a crash"
        if not any(lane.sending for lane in self.lanes.values()):
            again = Parked()
            for index in range(self.first, len(self.letters)):
                self.fold(again, self.position(index))
            assert self.resting(again) == self.resting(self.parking.parked)
