"""What the process of a Ray job holds beside the window of its source."""

from __future__ import annotations

import threading
import weakref
from typing import Any, cast

import pytest

from helpers import block, wait_until
from keyshard.core.position.entry import TopicPartition
from keyshard.handlers.outcome_log import OutcomeLog
from ray_adapter.actor import Outcome
from ray_adapter.crew import Crew
from ray_adapter.exchange import CALLS_SHARE, Exchange, Seat
from ray_adapter.feeding import Feeder
from ray_adapter.options import JobOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

WHERE = TopicPartition("persistent://public/default/t")
MB = 1_000_000


class Slow:
    """An actor that ends no call after the first before it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.goes_on = threading.Event()

    def call(self, _actor: Any, rows: Any, _start: int) -> Outcome:
        self.calls += 1
        if self.calls > 1:
            self.goes_on.wait(10)
        count = rows.content.num_rows
        return Outcome(count, [None] * count)


def test_rows_that_were_taken_are_held_no_more_while_the_actor_has_others() -> None:
    """They had left the window, and their content stayed until the end of the next call."""
    exchange = Exchange([Seat(0, None)], 1, 0.0, 256 * MB)
    actor = Slow()
    feeder = Feeder(
        exchange, exchange.seats[0], cast("Crew", actor), JobOptions(parallelism=1), OutcomeLog()
    )
    thread = threading.Thread(target=feeder.run)
    thread.start()
    exchange.push([(WHERE, block(1, 0, "a"))])
    done = exchange.next_done()
    assert done is not None
    content = weakref.ref(done.pieces[0].block.content)
    exchange.push([(WHERE, block(1, 1, "a"))])
    wait_until(lambda: actor.calls == 2)
    exchange.taken(done, done.pieces)
    done = None
    held = content()
    exchange.stop()
    actor.goes_on.set()
    thread.join()
    assert held is None


@pytest.mark.parametrize("actors", [1, 2, 8])
def test_all_calls_together_copy_a_part_of_the_window(actors: int) -> None:
    """Each had up to 64 MiB, however small the window and however many the actors."""
    exchange = Exchange([Seat(index, None) for index in range(actors)], 10**6, 0.0, 16 * MB)
    value = b"x" * 100_000
    exchange.push([(WHERE, block(1, n, "a", values=[value])) for n in range(150)])
    size = 0
    for seat in exchange.seats:
        if exchange.waiting.rows[seat.index]:
            one = sum(piece.block.column_bytes for piece in exchange.next_rows(seat))
            assert one <= 16 * MB // CALLS_SHARE // actors
            size += one
    assert 0 < size <= 16 * MB // CALLS_SHARE
