"""The verdict on a scalable topic: the order of a key holds from a segment to its successor."""

from __future__ import annotations

from keyshard.testing.verify.checkers import key_order
from keyshard.testing.verify.history import Event
from tests.chaos.scalable import longest_pause_s, of_one_topic

TOPIC = "topic://public/default/orders"
PARENT, CHILD = (f"segment://public/default/orders/0000-ffff-{number}" for number in range(2))


def sent(t: float, seq: int) -> Event:
    return Event(t, "sent", topic=TOPIC, key="a", seq=seq)


def started(t: float, segment: str, seq: int) -> Event:
    return Event(
        t, "started", topic=segment, partition=-1, ledger=1, entry=seq, index=0, key="a", seq=seq,
        worker="program",
    )  # fmt: skip


def test_a_message_of_a_successor_before_one_of_its_parent_is_out_of_order() -> None:
    early = [started(1.0, PARENT, 0), started(2.0, CHILD, 2), started(3.0, PARENT, 1)]
    assert not key_order(list(of_one_topic(early))).holds
    in_order = sorted(early, key=lambda event: event.seq or 0)
    assert key_order(list(of_one_topic(in_order))).holds


def test_events_of_ranges_are_no_events_of_the_topic() -> None:
    gained = Event(0.0, "range_gained", topic=PARENT, partition=-1, range="0-65535", worker="w")
    assert list(of_one_topic([gained, sent(1.0, 0)])) == [sent(1.0, 0)]


def test_a_pause_lasts_until_the_first_message_of_a_key_in_a_segment_comes() -> None:
    events = [sent(1.0, 0), sent(1.0, 1), sent(2.0, 2), started(1.5, PARENT, 0)]
    assert longest_pause_s(events) == 0.5
    events += [started(9.0, PARENT, 1), started(9.0, CHILD, 2)]
    assert longest_pause_s(events) == 7.0
