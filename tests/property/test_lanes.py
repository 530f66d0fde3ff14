"""Lanes: always one message of a key at a time, in order, and every entry once."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timezone

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from keyshard.core.lanes.key_queue import KeyQueue, Work
from keyshard.core.lanes.lanes import KEYS_READY_MIN, Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, range_index
from keyshard.core.ring.key_slot import key_slot
from tests.helpers import present

WHERE = TopicPartition("persistent://public/default/orders", 0)
KEYS = [f"key-{i}" for i in range(6)]
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def message(entry: int, index: int, key: str | None) -> Message:
    slot = None if key is None else key_slot(key)
    return Message(
        b"",
        key,
        None,
        MessageId(1, entry, index),
        WHERE.topic,
        0,
        NOW,
        None,
        {},
        slot,
        redelivered=False,
    )


class LanesMachine(RuleBasedStateMachine):
    """Lanes against a list of messages per key."""

    @initialize(ranges=st.integers(1, 5), lanes=st.integers(1, 4), serialise_keyless=st.booleans())
    def begin(self, ranges: int, lanes: int, serialise_keyless: bool) -> None:
        self.ranges = ranges
        self.serialise = serialise_keyless
        self.lanes = Lanes(ranges, lanes, self.owner, serialise_keyless=serialise_keyless)
        self.entries = 0
        self.sizes: dict[EntryId, int] = {}
        self.wanted: dict[str, list[MessageId]] = defaultdict(list)
        self.done: dict[str, list[MessageId]] = defaultdict(list)
        self.undone: set[MessageId] = set()
        self.completed: list[EntryId] = []
        self.running: list[Work] = []
        self.held: list[HashRange] = []
        self.moved = False
        self.now_s = 0.0

    def owner(self, slot: int) -> int:
        return range_index(slot, self.ranges)

    @rule(keys=st.lists(st.sampled_from([*KEYS, None]), min_size=1, max_size=4))
    def add(self, keys: list[str | None]) -> None:
        entry_id = EntryId(1, self.entries)
        self.entries += 1
        messages = [message(entry_id.entry, i, key) for i, key in enumerate(keys)]
        slot = messages[0].slot
        self.lanes.add(WHERE, 0 if slot is None else self.owner(slot), entry_id, messages)
        self.sizes[entry_id] = len(keys)
        for one in messages:
            self.undone.add(one.message_id)
            if one.key is not None:
                self.wanted[one.key].append(one.message_id)

    @rule()
    def start(self) -> None:
        work = self.lanes.next(self.now_s)
        if work is None:
            return
        slot = work.message.slot
        assert slot is None or not any(slot in held for held in self.held), "a held key started"
        assert work.queue.not_before_s <= self.now_s, "a key started before its time"
        self.running.append(work)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def start_one_of(self, keys: list[str]) -> None:
        work = self.lanes.next_of(keys, self.now_s)
        if work is not None:
            assert work.message.key in keys
            assert work.queue.first_failed_s is None
            slot = present(work.message.slot)
            assert not any(slot in held for held in self.held), "a held key started"
            assert work.queue.not_before_s <= self.now_s, "a key started before its time"
            self.running.append(work)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 100))
    def complete(self, at: int) -> None:
        work = self.running.pop(at % len(self.running))
        self.lanes.completed(work)
        self.undone.remove(work.message.message_id)
        if work.message.key is not None:
            self.done[work.message.key].append(work.message.message_id)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 100), after_s=st.integers(0, 5))
    def fail(self, at: int, after_s: int) -> None:
        work = self.running.pop(at % len(self.running))
        attempts = work.queue.attempts
        work.queue.first_failed_s = self.now_s
        self.lanes.again(work, self.now_s + after_s, "broken")
        assert work.queue.attempts == attempts + 1
        assert work.queue.work[0] is work, "a failed message is no longer the head of its key"

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def collect(self) -> None:
        for ids in self.lanes.pop_completed().values():
            self.completed += ids

    @rule(start=st.integers(0, 65_535), size=st.integers(1, 40_000))
    def hold(self, start: int, size: int) -> None:
        self.held.append(HashRange(start, min(65_535, start + size)))
        self.lanes.hold(self.held[-1:])

    @rule()
    def resume(self) -> None:
        self.held = []
        self.lanes.resume()

    @rule()
    def drain(self) -> None:
        """End all lanes; the machine checks them and starts again."""
        started = {present(work.entry).id for work in self.running}
        started |= {
            entry.id
            for q in self.lanes.queues()
            for work in q.work
            if (entry := present(work.entry)).started
        }
        self.lanes.drain()
        while (work := self.lanes.next(self.now_s)) is not None:
            assert present(work.entry).id in started, "an entry begins while the lanes drain"
            self.running.append(work)
        self.lanes._draining = False
        self.resume()

    @rule(ranges=st.integers(1, 7))
    def reassign(self, ranges: int) -> None:
        self.ranges = ranges
        self.lanes.reassign(ranges, self.owner)
        self.moved = True

    @invariant()
    def one_message_of_a_key_at_a_time_and_no_more_than_the_lanes(self) -> None:
        self.lanes.validate()
        keys = [work.message.key for work in self.running if work.message.key is not None]
        assert len(set(keys)) == len(keys)
        if not self.moved:
            per_range: dict[int, int] = defaultdict(int)
            for work in self.running:
                per_range[work.queue.owner] += 1
            assert all(count <= self.lanes.lanes for count in per_range.values())

    @invariant()
    def done_in_order(self) -> None:
        for key, done in self.done.items():
            assert done == self.wanted[key][: len(done)]

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        self.resume()
        limit = 10 * sum(self.sizes.values()) + 100
        while self.undone:
            limit -= 1
            assert limit, "a message never starts"
            self.start()
            if self.running:
                self.complete(0)
            else:
                self.now_s += 1
        self.collect()
        assert sorted(self.completed) == sorted(self.sizes), "an entry is not completed once"
        assert self.done == {key: ids for key, ids in self.wanted.items() if ids}
        assert not self.lanes.waiting
        assert not list(self.lanes.queues())


LanesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLanes = LanesMachine.TestCase


def test_ready_keys_take_turns() -> None:
    lanes = Lanes(1, 1, lambda _: 0)
    for entry in range(3):
        for at, key in enumerate(KEYS[:3]):
            lanes.add(WHERE, 0, EntryId(1, entry * 3 + at), [message(entry * 3 + at, 0, key)])
    order = []
    while work := lanes.next(0.0):
        order.append(work.message.key)
        lanes.completed(work)
    assert order == KEYS[:3] * 3


def test_a_key_with_many_messages_keeps_up_with_the_others() -> None:
    hot, lanes = KEYS[0], Lanes(1, 1, lambda _: 0)
    keys = [hot, KEYS[1], hot, hot, KEYS[2], hot]
    for entry, key in enumerate(keys):
        lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, key)])
    order = []
    while work := lanes.next(0.0):
        order.append(work.message.key)
        lanes.completed(work)
    assert order == keys, "the oldest message is next, not the key that waited longest"


def test_a_range_is_hungry_while_its_lanes_could_run_dry() -> None:
    lanes = Lanes(1, 2, lambda _: 0)
    for entry in range(2 * KEYS_READY_MIN):
        assert lanes.hungry
        lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, None)])
    assert not lanes.hungry
    assert lanes.next(0.0)
    assert lanes.hungry


def test_a_range_starves_while_a_lane_has_nothing_to_do() -> None:
    lanes = Lanes(1, 2, lambda _: 0)
    assert lanes.starving
    for entry in range(2):
        lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, KEYS[0])])
    assert not lanes.starving
    first = lanes.next(0.0)
    assert first
    assert lanes.starving, "the other lane may not work on the same key"
    lanes.add(WHERE, 0, EntryId(1, 2), [message(2, 0, KEYS[1])])
    assert lanes.next(0.0)
    assert not lanes.starving
    lanes.completed(first)
    assert not lanes.starving, "the first key goes on"


def test_keys_that_failed_hide_no_key_that_did_not() -> None:
    lanes = Lanes(1, 1, lambda _: 0)
    for entry, key in enumerate(KEYS[:2]):
        lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, key)])
    for _ in range(2):
        work = lanes.next(0.0)
        assert work
        lanes.again(work, 0.0, "no", counted=False)
    again = lanes.next(0.0)
    assert again
    lanes.again(again, 0.0, "no", counted=False)
    assert lanes.starving
    assert lanes.runnable == 1
    lanes.add(WHERE, 0, EntryId(1, 2), [message(2, 0, KEYS[2])])
    assert not lanes.starving
    lanes.validate()
    last = lanes.next(0.0, untried_first=True)
    assert last
    assert last.message.key == KEYS[2], "though the others lined up before it"
    lanes.completed(last)
    assert lanes.next(0.0, untried_first=True), "and then they come"


def test_a_free_lane_of_one_range_is_not_used_by_another() -> None:
    lanes = Lanes(2, 1, lambda slot: range_index(slot, 2))
    low = [key for key in map(str, range(50)) if key_slot(key) < 32_768][:3]
    for entry, key in enumerate(low):
        lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, key)])
    assert lanes.next(0.0) is not None
    assert lanes.next(0.0) is None
    assert lanes.waiting == 2


def test_keyless_messages_are_spread_or_in_order() -> None:
    for serialise, at_once in ((False, 3), (True, 1)):
        lanes = Lanes(1, 4, lambda _: 0, serialise_keyless=serialise)
        for entry in range(3):
            lanes.add(WHERE, 0, EntryId(1, entry), [message(entry, 0, None)])
        started: list[KeyQueue] = []
        while work := lanes.next(0.0):
            started.append(work.queue)
        assert len(started) == at_once


def test_entries_set_aside_by_a_stop_go_to_an_existing_range() -> None:
    lanes = Lanes(4, 1, lambda slot: range_index(slot, 4))
    lanes.add(WHERE, 3, EntryId(1, 0), [message(0, 0, None)])
    lanes.drain()
    assert lanes.next(0.0) is None
    lanes.reassign(2, lambda slot: range_index(slot, 2))
    lanes.resume()
    lanes.validate()
    assert [queue.owner for queue in lanes.queues()] == [1]
