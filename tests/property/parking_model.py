"""A model of a source that parks keys: its topic, its dead-letter topic, and steps of its lanes.

Every step is atomic, and a crash may lie between any two. The topic delivers again what is not
acknowledged; the dead-letter topic keeps what was stored, from wherever it was trimmed to. Some
messages of a key are bad and fail until they are healed, the others succeed. Messages of a key lie
in two topic partitions, and only within one do they have an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letters.parking import Action, Parking, ParkingState
from keyshard.dead_letters.topic_state import TopicState
from tests.helpers import COMMITTED, P0, P1

LEDGER = 3
"""Entries of the dead-letter topic in one ledger."""
WHERE = (P0, P1)


@dataclass
class Stored:
    """One entry of the dead-letter topic."""

    key: str
    seq: int
    """Id of the original message of the dead letter or marker."""
    marks: bool = False
    """Whether it is a marker."""
    claims: EntryId | None = None
    """A dead letter that rested when it was written."""
    finished: bool = False
    """Whether it is acknowledged."""


@dataclass
class Lane:
    """The state of one key."""

    waiting: deque[int] = field(default_factory=deque)
    coming: deque[int] = field(default_factory=deque)
    """Undelivered messages of one topic partition."""
    replaying: deque[EntryId] = field(default_factory=deque)
    sending: EntryId | None = None
    """A dead letter or marker that is stored and not yet folded."""


class ParkingModel:
    """Messages of some keys; the n-th of a key has sequence number n.

    Args:
        keys: The keys.
        messages: How many each has.
        bad: (key, sequence number) of messages that fail.
    """

    def __init__(
        self, keys: str, messages: int, bad: Collection[tuple[str, int]] = frozenset()
    ) -> None:
        self.messages = messages
        self.bad = set(bad)
        self.acked: dict[str, set[int]] = {key: set() for key in keys}
        self.acked_durably: dict[str, set[int]] = {key: set() for key in keys}
        self.completed: dict[str, set[int]] = {key: set() for key in keys}
        self.handled: dict[str, list[int]] = {key: [] for key in keys}
        self.dead_letters: list[Stored] = []
        self.first = 0
        self.saved: list[dict[str, Any]] = []
        self.crashes = 0
        self.start(None)

    @staticmethod
    def position(index: int) -> EntryId:
        return EntryId(7 + index // LEDGER, index % LEDGER)

    @staticmethod
    def index(position: EntryId) -> int:
        return (position.ledger - 7) * LEDGER + position.entry

    def stored(self, position: EntryId) -> Stored:
        return self.dead_letters[self.index(position)]

    @staticmethod
    def original(key: str, seq: int) -> tuple[TopicPartition, MessageId]:
        # Every third message of a key is in a producer batch with its neighbours.
        return WHERE[seq % 2], MessageId(ord(key), seq // 6, seq // 2 % 3)

    # -- the process ------------------------------------------------------------------------------

    def start(self, checkpoint: dict[str, Any] | None, late: int | None = None) -> None:
        """Rebuild the parked keys from the dead letters, and receive unacknowledged messages.

        Args:
            checkpoint: The state to continue from; ``None``: read all stored dead letters.
            late: The topic partition that delivers only at :meth:`arrive`.
        """
        parked = TopicState() if checkpoint is None else TopicState.from_dict(checkpoint)
        self.fold_all(parked)
        self.parking = Parking(parked)
        self.completed = {key: set() for key in self.acked}
        self.ran: dict[str, list[int]] = {key: [] for key in self.acked}
        self.lanes = {
            key: Lane(
                deque(seq for seq in range(self.messages) if seq not in acked and seq % 2 != late),
                deque(seq for seq in range(self.messages) if seq not in acked and seq % 2 == late),
            )
            for key, acked in self.acked.items()
        }

    def arrive(self, key: str) -> None:
        """The late messages of a key come, behind what waits."""
        lane = self.lanes[key]
        lane.waiting += lane.coming
        lane.coming.clear()

    def fold_all(self, parked: TopicState) -> None:
        begin = parked.begin
        found = [
            position
            for position in map(self.position, range(self.first, len(self.dead_letters)))
            if begin is None or position >= begin
        ]
        for position in found:
            self.fold(parked, position)
            parked.claim(self.stored(position).claims)
        claimed = parked.claimed
        lost = claimed is not None and (not found or found[0] > claimed)
        assert not lost, "what was done seems to be lost"

    def fold(self, parked: TopicState, position: EntryId) -> None:
        one = self.stored(position)
        what = parked.replayed if one.marks else parked.dead_letter
        what(position, one.key, *self.original(one.key, one.seq))

    def crash(
        self,
        *,
        forget: bool,
        checkpoint: dict[str, Any] | None = None,
        late: int | None = None,
    ) -> None:
        """Kill the process, or stop it in an orderly way, and start it again.

        Args:
            forget: Whether the broker dies too, with the acknowledgements that it did not write.
            checkpoint: Where the next one begins; ``None``: with all that is stored.
            late: Which topic partition delivers late to it.
        """
        self.crashes += 1
        if forget:
            self.acked = {key: set(durable) for key, durable in self.acked_durably.items()}
        else:
            self.write()
        self.start(checkpoint, late)

    def stop(self) -> None:
        """Finish what is under way and acknowledge everything that is completed."""
        for key, lane in self.lanes.items():
            if lane.sending is not None:
                self.confirm(key)
        self.acknowledge()

    # -- steps of a lane --------------------------------------------------------------------------

    def idle(self, key: str) -> bool:
        lane = self.lanes[key]
        return not (lane.waiting or lane.coming or lane.replaying or lane.sending)

    def step(self, key: str, *, twice: bool = False) -> None:
        """The next thing that happens in the lane of a key.

        Args:
            key: The key.
            twice: Whether something that is sent is stored twice.
        """
        lane, parking = self.lanes[key], self.parking
        state = parking.state(key)
        head = lane.waiting[0] if lane.waiting else None
        action = None if head is None else parking.action(key, *self.original(key, head))
        if lane.sending is not None:
            self.confirm(key)
        elif state is ParkingState.REPLAYING:
            self.replay(key, twice=twice)
        elif state is ParkingState.DRAINING and action is not Action.HANDLE:
            lane.replaying.extend(parking.drained(key))
        elif action is Action.DONE:
            self.complete(key)
        elif action is Action.DEAD_LETTER:
            assert head is not None
            self.send(key, Stored(key, head), twice=twice)
        elif head is not None and (key, head) not in self.bad:
            parking.parked.done.runs(key, *self.original(key, head))
            self.run(key, head)
            self.complete(key)
        elif head is not None:
            parking.parked.done.runs(key, *self.original(key, head))
            parking.park(key)
            self.send(key, Stored(key, head), twice=twice)

    def run(self, key: str, seq: int) -> None:
        """Record that a message is handled: a second time only if an older one has run since."""
        ran = self.ran[key]
        if seq in ran:
            since = ran[len(ran) - ran[::-1].index(seq) :]
            older = [one for one in since if one < seq and one % 2 == seq % 2]
            assert older, f"{seq} of {key} ran again for no reason: {ran}"
        ran.append(seq)
        self.handled[key].append(seq)

    def replay(self, key: str, *, twice: bool) -> None:
        lane, parking = self.lanes[key], self.parking
        seq = self.stored(lane.replaying[0]).seq
        if (key, seq) in self.bad:
            parking.failed_again(key)
            lane.replaying.clear()
            return
        dead_letter = lane.replaying[0]
        if parking.parked.claims([dead_letter]):
            return
        self.run(key, seq)
        parking.parked.marking([dead_letter])
        self.send(key, Stored(key, seq, marks=True), twice=twice)

    def send(self, key: str, one: Stored, *, twice: bool) -> None:
        one.claims = self.parking.parked.sending(key)
        for _ in range(1 + twice):
            self.dead_letters.append(one)
        self.lanes[key].sending = self.position(len(self.dead_letters) - 1)

    def confirm(self, key: str) -> None:
        lane, parking = self.lanes[key], self.parking
        position, lane.sending = lane.sending, None
        assert position is not None
        one = self.stored(position)
        if one.marks:
            parking.replayed(position, key, *self.original(key, one.seq))
            one.finished = True
            parking.parked.sent(key, [lane.replaying.popleft()])
            for stored in self.dead_letters[: self.index(position)]:
                stored.finished |= (stored.key, stored.seq) == (key, one.seq)
        else:
            self.fold(parking.parked, position)
            self.complete(key)
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

    def save(self) -> None:
        """A checkpoint is stored; markers before it are acknowledged only then."""
        self.saved.append(self.parking.parked.to_dict(COMMITTED))

    def trim(self) -> None:
        """Whole ledgers go when everything up to their end is acknowledged."""
        done = 0
        while done < len(self.dead_letters) and self.dead_letters[done].finished:
            done += 1
        self.first = max(self.first, done // LEDGER * LEDGER)

    # -- what must hold ---------------------------------------------------------------------------

    def resting(self, parked: TopicState) -> dict[str, set[int]]:
        return {
            key: {self.stored(position).seq for _, _, position in found.dead_letters()}
            for key, found in parked.keys.items()
        }

    def validate(self) -> None:
        self.parking.validate()
        resting = self.resting(self.parking.parked)
        for key, acked in self.acked.items():
            lost = acked - set(self.handled[key]) - resting.get(key, set())
            assert not lost, f"{lost} of {key} are acknowledged and neither handled nor resting"
            for which in range(len(WHERE)):
                handled = [seq for seq in self.handled[key] if seq % 2 == which]
                firsts = list(dict.fromkeys(handled))
                assert firsts == sorted(firsts), f"order of {key} is broken: {handled}"
                if not self.crashes:
                    assert firsts == handled, "a message was handled twice without a crash"
        if not any(lane.sending for lane in self.lanes.values()):
            again = TopicState()
            self.fold_all(again)
            assert self.resting(again) == resting

    def validate_end(self) -> None:
        """Check that all messages are handled, and no repeated one ends behind newer ones."""
        for key, handled in self.handled.items():
            assert set(handled) == set(range(self.messages)), f"{key} lacks something: {handled}"
            for which in range(len(WHERE)):
                own = [seq for seq in handled if seq % 2 == which]
                lasts = list(dict.fromkeys(reversed(own)))
                assert lasts == sorted(lasts, reverse=True), f"{key} ends out of order: {own}"
