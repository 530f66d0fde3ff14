"""The feeder of lanes takes no more rows than they need, and as many as they need."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from keyshard.core.lanes.bulk import Arrivals
from keyshard.core.lanes.lanes import KEYS_READY_MIN, Lanes
from keyshard.core.position.entry import EntryId
from keyshard.handlers.lane_feeder import BULK_ROWS_AT_ONCE, ROWS_AT_ONCE, ROWS_PER_DONE, LaneFeeder
from tests.helpers import present
from tests.unit.test_lanes import WHERE, message

if TYPE_CHECKING:
    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.handlers.dispatcher import Dispatcher

LANES = 2


@dataclass
class Fed:
    """Lanes of one range, their feeder, and the rows that it asked for; none ever come."""

    lanes: Lanes = field(default_factory=lambda: Lanes(1, LANES, lambda _: 0))
    asked: list[int] = field(default_factory=list)
    bulk: bool = False

    def __post_init__(self) -> None:
        in_flight = SimpleNamespace(full=False, take=lambda _, rows: self.asked.append(rows))
        coordinator = SimpleNamespace(in_flight=in_flight, check=lambda: None)
        dispatcher = SimpleNamespace(
            lanes=self.lanes, arrivals=Arrivals(self.lanes), changed=threading.Condition(),
            in_bulk=lambda _: self.bulk,
        )  # fmt: skip
        self.feeder = LaneFeeder(cast("Coordinator", coordinator), cast("Dispatcher", dispatcher))

    def add(self, keys: int) -> None:
        """Receive one message of each of several new keys."""
        for number in range(self.lanes.waiting, self.lanes.waiting + keys):
            entry = EntryId(1, number)
            self.lanes.add(WHERE, 0, entry, [message(number, f"key-{number}")])

    def turn(self) -> list[int]:
        """Rows that one turn asks for."""
        self.asked.clear()
        self.feeder.turn()
        return self.asked


def test_a_turn_takes_many_rows_while_a_lane_has_nothing_to_do() -> None:
    fed = Fed()
    assert fed.turn() == [ROWS_AT_ONCE]
    fed.add(1)
    present(fed.lanes.next(0.0))
    assert fed.turn() == [ROWS_AT_ONCE], "the other lane has nothing to do"


def test_while_every_lane_has_work_a_turn_takes_rows_for_the_completed_messages() -> None:
    fed = Fed()
    fed.add(LANES + 4)
    assert fed.turn() == [], "no message is completed"
    for _ in range(3):
        fed.lanes.completed(present(fed.lanes.next(0.0)))
    assert fed.turn() == [ROWS_PER_DONE * 3]
    assert fed.turn() == [], "they count once"


def test_a_turn_takes_no_rows_while_many_keys_are_ready() -> None:
    fed = Fed()
    fed.add(KEYS_READY_MIN * LANES + 1)
    fed.lanes.completed(present(fed.lanes.next(0.0)))
    assert fed.turn() == []
    fed.lanes.completed(present(fed.lanes.next(0.0)))
    assert fed.turn() == [ROWS_PER_DONE]


def test_while_handlers_return_at_once_a_turn_takes_rows_beside_running_messages() -> None:
    fed = Fed(bulk=True)
    fed.add(KEYS_READY_MIN * LANES)
    assert fed.turn() == [BULK_ROWS_AT_ONCE]
