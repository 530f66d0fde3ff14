"""Bulks, which are entries that one thread handles together, beside lanes.

The order of every key is kept, one message of a key runs at a time, and an entry completes once.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keyshard.core.lanes.bulk import COUNTED_MIN, FAST_S, REST_MAX_S, REST_S, Arrivals, Bulk, Pace
from keyshard.core.lanes.circuit_breaker import KEYS_MAX, KNOWN_MAX, CircuitBreaker
from keyshard.core.lanes.key_queue import Arrival, Work
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId
from keyshard.core.ring.hash_range import range_index
from tests.property.test_lanes import KEYS, WHERE, message

RANGES = 3


class BulkMachine(RuleBasedStateMachine):
    """A thread with a bulk, which others take apart, and threads with lanes."""

    @initialize(serialise_keyless=st.booleans())
    def begin(self, serialise_keyless: bool) -> None:
        self.lanes = Lanes(
            RANGES, 2, lambda slot: range_index(slot, RANGES), serialise_keyless=serialise_keyless
        )
        self.arrivals = Arrivals(self.lanes)
        self.entries = 0
        self.messages = 0
        self.wanted: dict[str, list[MessageId]] = defaultdict(list)
        self.done: dict[str, list[MessageId]] = defaultdict(list)
        self.completed: list[EntryId] = []
        self.bulk: Bulk | None = None
        self.current: Message | None = None
        """The message that the thread with the bulk handles."""
        self.rests = False
        """Whether that message has ended, and the next one starts later."""
        self.running: list[Work] = []
        self.counted = 0
        self.handled = 0
        self.now_s = 0.0

    @rule(keys=st.lists(st.sampled_from([*KEYS, None]), min_size=1, max_size=4))
    def arrive(self, keys: list[str | None]) -> None:
        entry_id = EntryId(1, self.entries)
        self.entries += 1
        messages = [message(entry_id.entry, i, key) for i, key in enumerate(keys)]
        slot = messages[0].slot
        owner = 0 if slot is None else self.lanes.owner_of(slot)
        self.arrivals.add(Arrival(WHERE, owner, entry_id, messages))
        self.messages += len(messages)
        for one in messages:
            if one.key is not None:
                self.wanted[one.key].append(one.message_id)

    @precondition(lambda self: self.bulk is None)
    @rule()
    def start_bulk(self) -> None:
        self.bulk = self.arrivals.start(self.now_s)
        assert self.bulk is None or not self.running, "a bulk begins beside a lane"

    @precondition(lambda self: self.bulk is not None)
    @rule(failed=st.booleans())
    def step(self, failed: bool) -> None:
        """The thread goes on with its bulk, as the executor does."""
        bulk = self.bulk
        assert bulk is not None
        failed = failed and not self.rests
        if self.current is not None and not failed:
            if self.rests:
                bulk.go_on(self.now_s)
            else:
                bulk.ends.append(self.now_s)
            if not bulk.apart:
                self._handled(self.current)
        self.rests = False
        if self.current is None or not failed:
            self.current = bulk.todo.popleft() if bulk.todo else None
            if self.current is not None:
                return
        self.bulk = self.current = None
        if not (failed or bulk.apart):
            self.arrivals.finish(bulk)
            self.counted += len(bulk.messages)
            return
        self.distribute()
        if bulk.work is not None:
            self.running.append(bulk.work)

    @precondition(lambda self: self.current is not None and not self.rests)
    @rule()
    def rest(self) -> None:
        """The task lets other tasks run after a message."""
        assert self.bulk is not None
        self.bulk.ends.append(self.now_s)
        self.bulk.rest()
        self.rests = True
        assert self.bulk.running_since_s() > self.now_s, "no message runs"

    @rule()
    def distribute(self) -> None:
        bulk = self.arrivals.distribute()
        if bulk is not None:
            self.counted += len(bulk.messages)
            assert len(bulk.durations()) == len(bulk.messages)
        assert not self.arrivals
        assert not self.arrivals.rows

    @rule()
    def start(self) -> None:
        work = self.lanes.next(self.now_s)
        if work is not None:
            self.running.append(work)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 100), fails=st.booleans())
    def end(self, at: int, fails: bool) -> None:
        work = self.running.pop(at % len(self.running))
        if fails:
            self.lanes.again(work, self.now_s, "broken")
            return
        self.lanes.completed(work)
        self._handled(work.message)
        self.counted += 1

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    def _handled(self, one: Message) -> None:
        self.handled += 1
        if one.key is not None:
            self.done[one.key].append(one.message_id)

    @invariant()
    def one_message_of_a_key_at_a_time_in_order(self) -> None:
        self.lanes.validate()
        bulk = self.bulk
        apart = bulk is not None and bulk.apart
        keys = [work.message.key for work in self.lanes.running.values()]
        if self.current is not None and not apart:
            assert not keys, "lanes run beside a bulk"
        if apart and self.current is not None:
            assert bulk is not None
            assert bulk.work is not None
            assert bulk.work.message is self.current
            assert bulk.work in self.lanes.running.values()
        named = [key for key in keys if key is not None]
        assert len(set(named)) == len(named)
        for key, done in self.done.items():
            assert done == self.wanted[key][: len(done)]

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        limit = 10 * self.messages + 100
        while self.arrivals or not self.lanes.empty or self.bulk is not None:
            limit -= 1
            assert limit, "a message never ends"
            self.wait(1)
            if self.bulk is not None:
                self.step(failed=False)
            elif self.running:
                self.end(0, fails=False)
            else:
                self.start_bulk()
                self.start()
        for ids in self.lanes.pop_completed().values():
            self.completed += ids
        assert sorted(self.completed) == [EntryId(1, n) for n in range(self.entries)]
        assert self.done == {key: ids for key, ids in self.wanted.items() if ids}
        assert self.handled == self.messages == self.counted == self.lanes.done


BulkMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBulk = BulkMachine.TestCase


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_rest_does_not_count_as_time_of_a_message(done: int) -> None:
    _, arrivals = with_entries(2)
    bulk = arrivals.start(0.0)
    assert bulk is not None
    for number in range(done):
        bulk.todo.popleft()
        bulk.ends.append(10.0 * number + 1)
        bulk.rest()
        bulk.go_on(10.0 * (number + 1))
    bulk.todo.popleft()
    assert bulk.running_since_s() == 10.0 * done
    assert arrivals.distribute() is bulk
    assert bulk.durations() == [1.0] * done
    assert bulk.work is not None
    assert bulk.work.started_s == 10.0 * done


def with_entries(count: int) -> tuple[Lanes, Arrivals]:
    """Arrivals of entries with two messages each, all of one key."""
    lanes = Lanes(1, 1, lambda _: 0)
    arrivals = Arrivals(lanes)
    for entry in range(count):
        arrivals.add(
            Arrival(WHERE, 0, EntryId(1, entry), [message(entry, i, KEYS[0]) for i in range(2)])
        )
    return lanes, arrivals


def test_a_bulk_that_is_taken_apart_completes_only_done_entries() -> None:
    lanes, arrivals = with_entries(2)
    bulk = arrivals.start(0.0)
    assert bulk is not None
    for ended_s in (1.0, 2.0):
        bulk.todo.popleft()
        bulk.ends.append(ended_s)
    runs = bulk.todo.popleft()
    assert arrivals.distribute() is bulk
    assert len(bulk.messages) == 2
    assert lanes.pop_completed() == {WHERE: [EntryId(1, 0)]}
    assert bulk.work is not None
    assert bulk.work.message is runs
    assert lanes.next(3.0) is None, "the last message has the same key"
    lanes.completed(bulk.work)
    last = lanes.next(3.0)
    assert last is not None
    lanes.completed(last)
    assert lanes.pop_completed() == {WHERE: [EntryId(1, 1)]}


def test_messages_that_a_bulk_handled_count_if_it_is_taken_apart_within_their_entry() -> None:
    lanes, arrivals = with_entries(1)
    bulk = arrivals.start(0.0)
    assert bulk is not None
    bulk.todo.popleft()
    bulk.ends.append(1.0)
    bulk.todo.popleft()
    arrivals.distribute()
    assert bulk.work is not None
    assert (lanes.done, lanes.counts(0).done) == (1, 1)
    lanes.completed(bulk.work)
    assert (lanes.done, lanes.counts(0).done) == (2, 2)


def test_no_bulk_starts_while_a_message_is_in_a_lane() -> None:
    lanes, arrivals = with_entries(2)
    lanes.add(WHERE, 0, EntryId(1, 9), [message(9, 0, KEYS[0])])
    assert arrivals.start(0.0) is None
    work = lanes.next(0.0)
    assert work is not None
    assert arrivals.start(0.0) is None, "the message runs"
    lanes.completed(work)
    assert arrivals.start(0.0) is not None


@pytest.mark.parametrize("count", [1, 30, KEYS_MAX + 5, KNOWN_MAX + 50])
def test_successes_of_a_bulk_count_for_the_circuit_as_single_ones(count: int) -> None:
    keys = [f"key-{(7 * at) % (count // 2 + 1)}" for at in range(count)]
    keys += [f"other-{at}" for at in range(count)]
    one, all_of = CircuitBreaker(), CircuitBreaker()
    for circuit in (one, all_of):
        circuit.succeeded("first", 1.0, 1.0)
        circuit.failed("first", 1.5, "broken")
        circuit.succeeded("key-0", 2.0, 2.0)
    assert all_of.calm
    for key in keys:
        one.succeeded(key, 3.0, 3.0)
    all_of.succeeded_each(keys, 3.0, 3.0)
    all_of.validate()
    assert vars(one) == vars(all_of)
    assert [*one._known] == [*all_of._known]
    assert [*one._latest] == [*all_of._latest]


def test_durations_of_a_bulk_count_as_single_ones() -> None:
    durations = [0.0001, 0.0005, 0.02, 0.0003, 40.0]
    one, all_of = LatencyHistogram(), LatencyHistogram()
    for seconds in durations:
        one.add(seconds)
    all_of.add_each(durations)
    assert one.status()["buckets"] == all_of.status()["buckets"]
    assert one.status()["sum"] == pytest.approx(all_of.status()["sum"])
    assert (one.count, one.longest_s) == (all_of.count, all_of.longest_s)
    all_of.add_each([])
    assert all_of.count == len(durations)


def test_handlers_are_fast_only_when_nearly_all_return_at_once() -> None:
    pace = Pace()
    assert not pace.fast(0.0), "nothing is known yet"
    pace.add([FAST_S / 10] * COUNTED_MIN)
    assert pace.fast(0.0)
    pace.add([0.001])
    assert not pace.fast(0.0), "one of few takes long"
    pace.add([0.0] * 1_000)
    assert pace.fast(0.0)
    pace.add([0.001] * 200)
    assert not pace.fast(0.0)


def test_a_handler_that_takes_long_ends_bulks_for_a_time_that_grows() -> None:
    pace = Pace()
    pace.add([0.0] * COUNTED_MIN)
    now_s, rest_s = 100.0, REST_S
    for _ in range(15):
        pace.hung(now_s)
        assert not pace.fast(now_s + 0.99 * rest_s)
        assert pace.fast(now_s + 1.01 * rest_s)
        now_s += 1.01 * rest_s
        rest_s = min(REST_MAX_S, 2 * rest_s)
    assert rest_s == REST_MAX_S
    pace.hung(now_s + 2 * REST_MAX_S)
    assert pace.fast(now_s + 2 * REST_MAX_S + 2 * REST_S), "it was calm for long"
