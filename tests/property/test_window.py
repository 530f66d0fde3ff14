"""Deliveries, faults, cuts and restarts in any order: each message in one batch, in key order.

The machine plays the broker, the consumers' assemblies, the host and its checkpoint storage:

- The broker delivers unacknowledged entries in parts, in the order of each slot. It delivers them
  again at a reconnect.
- The broker may forget acknowledgements.
- Another client may acknowledge single indices or whole entries.
- Markers take ids.

Evidence of these entries comes at any time, about any stretch.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import range_index
from keyshard.core.window.admission import Budget
from keyshard.core.window.layout import lay_out
from keyshard.core.window.partition_window import ReceiveResult
from keyshard.core.window.window import Window
from tests.helpers import P0, P1
from tests.property.window_model import Lane, Planned, Stored, known_at_the_end, shown_by_a_reader

KEYS = ["a", "b", "c", "d", "e", "f"]
ENTRIES_PER_LEDGER = 5
ENTRIES = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 4)), min_size=1, max_size=6)
"""Keys and numbers of messages of entries."""
BUDGET = Budget(rows_max=24, bytes_max=10**6)


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        ranges=st.integers(1, 5),
        seed=st.integers(0, 1_000),
        checkpoint_bytes=st.sampled_from([650, 700, 10**6]),
    )
    def begin(self, ranges: int, seed: int, checkpoint_bytes: int) -> None:
        self.random = random.Random(seed)
        self.budget = Budget(BUDGET.rows_max, BUDGET.bytes_max, checkpoint_bytes)
        self.logs: dict[TopicPartition, list[Stored]] = {P0: [], P1: []}
        self.committed: list[Planned] = []
        """Batches whose checkpoint is in the host's commit log."""
        self.planned: list[Planned] = []
        """Batches whose checkpoint is in the host's offset log only."""
        self.restart_with(Checkpoint("c", "s", ranges), ranges)

    def restart_with(self, base: Checkpoint, ranges: int) -> None:
        self.ranges = ranges
        self.left_out: set[tuple[TopicPartition, int]] = set()
        """Topic partitions and ranges that had data and no part in the newest cut."""
        self.window = Window(base, ranges, self.budget)
        for topic_partition in self.logs:
            self.window.add_partition(topic_partition)
        self.lanes = {(tp, i): Lane() for tp in self.logs for i in range(ranges)}
        for tp, i in self.lanes:
            self.deliver_again(tp, i)

    # -- the broker ---------------------------------------------------------------------------

    def deliver_again(self, tp: TopicPartition, index: int) -> None:
        """Queue all that is unacknowledged, in order of each slot and any order between them."""
        by_slot: dict[int, list[Stored]] = {}
        for stored in self.logs[tp]:
            slot = stored.part([0]).slot
            assert slot is not None
            if stored.open_indices and range_index(slot, self.ranges) == index:
                by_slot.setdefault(slot, []).append(stored)
        lane = self.lanes[tp, index]
        lane.queue = []
        while by_slot:
            slot = self.random.choice(list(by_slot))
            stored = by_slot[slot].pop(0)
            lane.queue.extend((stored, i) for i in stored.open_indices)
            if not by_slot[slot]:
                del by_slot[slot]

    @rule(tp=st.sampled_from([P0, P1]), entries=ENTRIES)
    def publish(self, tp: TopicPartition, entries: list[tuple[str, int]]) -> None:
        for key, size in entries:
            stored = Stored(self.next_id(tp), key, size)
            self.logs[tp].append(stored)
            slot = stored.part([0]).slot
            assert slot is not None
            lane = self.lanes[tp, range_index(slot, self.ranges)]
            lane.queue.extend((stored, i) for i in range(size))

    def next_id(self, tp: TopicPartition) -> EntryId:
        number = len(self.logs[tp])
        return EntryId(1 + number // ENTRIES_PER_LEDGER, number % ENTRIES_PER_LEDGER)

    @rule(tp=st.sampled_from([P0, P1]), count=st.integers(1, 3))
    def mark(self, tp: TopicPartition, count: int) -> None:
        """A transaction leaves markers that no client sees."""
        for _ in range(count):
            self.logs[tp].append(Stored(self.next_id(tp), "marker", 1, marker=True))

    @rule(tp=st.sampled_from([P0, P1]), start=st.integers(0, 40), count=st.integers(1, 12))
    def read_over_holes(self, tp: TopicPartition, start: int, count: int) -> None:
        """A Reader over a stretch: it shows all but markers, and where ledgers end."""
        log = self.logs[tp]
        proofs = shown_by_a_reader(log[start : start + count], from_the_beginning=start == 0)
        self.window.prove(tp, proofs)

    @rule(tp=st.sampled_from([P0, P1]))
    def another_client_acknowledges_all_and_time_passes(self, tp: TopicPartition) -> None:
        """Another client acknowledged all entries long ago; received ones are still delivered."""
        log = self.logs[tp]
        open_entries = [stored for stored in log if stored.open_indices]
        if not open_entries:
            return
        lost = self.random.choice(open_entries)
        lost.foreign |= set(range(lost.size))
        # As the gap resolver does: an entry published up to the time of the evidence is old.
        now_ms = log[-1].publish_ms
        self.window.prove(tp, GapEvidence(resolved=EntrySet.of([lost.id]), published_ms=now_ms))

    @rule(at=st.integers(0, 99), messages=st.integers(1, 8))
    def receive(self, at: int, messages: int) -> None:
        tp, index = list(self.lanes)[at % len(self.lanes)]
        lane = self.lanes[tp, index]
        taken, lane.queue = lane.queue[:messages], lane.queue[messages:]
        parts: list[tuple[Stored, list[int]]] = []
        for stored, i in taken:
            if not parts or parts[-1][0] is not stored or i <= parts[-1][1][-1]:
                parts.append((stored, []))
            parts[-1][1].append(i)
        for at_once, (stored, indices) in enumerate(parts):
            if not self.feed(tp, index, stored.part(indices), after_gap=not at_once):
                return
            lane.sent.append(stored)

    @rule(messages=st.integers(1, 8))
    def receive_everywhere(self, messages: int) -> None:
        for at in range(len(self.lanes)):
            self.receive(at, messages)

    def feed(
        self,
        tp: TopicPartition,
        index: int,
        part: EntryBlock | None,
        *,
        after_gap: bool = False,
    ) -> bool:
        """Give a part, or silence, to the assembly; False when the consumer was re-opened.

        As the receiver does: a reconnect may lie before the first part of each receive.
        """
        assembly = self.lanes[tp, index].assembly
        try:
            if part is None:
                entries = [assembly.end_early()]
            else:
                entries = assembly.add(part, after_gap=after_gap)
        except RedeliveryNeeded:
            self.lanes[tp, index].assembly = EntryAssembly(doubted=assembly.doubted)
            self.deliver_again(tp, index)
            return False
        for entry in entries:
            if self.window.receive(tp, index, [entry]) == [ReceiveResult.COMMITTED]:
                stored = next(stored for stored in self.logs[tp] if stored.id == entry.id)
                assert len(stored.foreign) == stored.size or any(
                    entry.id in done.end.partitions[tp].batch
                    for done in self.committed
                    if tp in done.end.partitions
                ), "an entry would be acknowledged before its batch is committed"
                self.acknowledge(tp, [entry.id])
        return True

    @rule(at=st.integers(0, 99), which=st.integers(0, 99))
    def duplicate(self, at: int, which: int) -> None:
        """The broker delivers an entry twice without any fault."""
        tp, index = list(self.lanes)[at % len(self.lanes)]
        lane = self.lanes[tp, index]
        if lane.sent:
            stored = lane.sent[which % len(lane.sent)]
            if stored.open_indices:
                self.feed(tp, index, stored.part(stored.open_indices), after_gap=True)

    @rule(at=st.integers(0, 99))
    def reconnect(self, at: int) -> None:
        """Clears the client's queue, maybe inside an entry; the assembly does not notice."""
        where = list(self.lanes)[at % len(self.lanes)]
        if not self.lanes[where].ends_as_before():
            self.deliver_again(*where)

    @precondition(lambda self: self.half_received())
    @rule(at=st.integers(0, 99), messages=st.integers(1, 4))
    def reconnect_inside_an_entry(self, at: int, messages: int) -> None:
        """The entry starts again, and comes in other parts than before."""
        inside = self.half_received()
        where = inside[at % len(inside)]
        self.deliver_again(*where)
        self.receive(list(self.lanes).index(where), messages)

    def half_received(self) -> list[tuple[TopicPartition, int]]:
        return [
            where
            for where, lane in self.lanes.items()
            if lane.assembly.open is not None and not lane.ends_as_before()
        ]

    @rule(tp=st.sampled_from([P0, P1]), gone=st.booleans())
    def drop_and_own_again(self, tp: TopicPartition, gone: bool) -> None:
        """Do as discovery does with a topic partition that it took for another one."""
        self.window.drop_partition(tp, gone=gone)
        self.left_out = {where for where in self.left_out if where[0] != tp}
        self.window.validate()
        self.window.add_partition(tp)
        for index in range(self.ranges):
            self.lanes[tp, index] = Lane()
            self.deliver_again(tp, index)

    @rule(at=st.integers(0, 99))
    def quiet(self, at: int) -> None:
        tp, index = list(self.lanes)[at % len(self.lanes)]
        lane = self.lanes[tp, index]
        if not lane.queue and lane.assembly.open is not None:
            self.feed(tp, index, None)

    @rule(tp=st.sampled_from([P0, P1]), at=st.integers(0, 99), index=st.integers(0, 3))
    def another_client_acknowledges_an_index(self, tp: TopicPartition, at: int, index: int) -> None:
        if self.logs[tp]:
            stored = self.logs[tp][at % len(self.logs[tp])]
            if index < stored.size and stored.size > 1 and not stored.marker:
                stored.foreign.add(index)

    @rule(tp=st.sampled_from([P0, P1]), count=st.integers(1, 5))
    def forget_acknowledgements(self, tp: TopicPartition, count: int) -> None:
        """A broker that crashes loses the newest ones; every consumer reconnects."""
        for stored in [stored for stored in self.logs[tp] if stored.acked][-count:]:
            stored.acked = False
        for where, index in self.lanes:
            if where == tp and not self.lanes[where, index].ends_as_before():
                self.deliver_again(tp, index)

    def acknowledge(self, tp: TopicPartition, entries: list[EntryId]) -> None:
        done = set(entries)
        for stored in self.logs[tp]:
            if stored.id in done:
                stored.acked = True

    # -- the host -----------------------------------------------------------------------------

    @rule(rows_max=st.integers(1, 12))
    def cut(self, rows_max: int) -> None:
        before, start = self.window.received_rows, self.window.newest
        had_data = self.with_data()
        end = self.window.cut(rows_max)
        if self.budget.checkpoint_bytes_max == 10**6:
            assert (end is None) == (before == 0)
        else:
            assert before or end is None
        if end is not None:
            batch = self.window.batches[end.batch_id]
            entries = [entry for blocks in batch.entries.values() for entry in blocks]
            largest = max(entry.rows for entry in entries)
            extra = len(self.lanes) * 4
            assert batch.rows <= max(min(rows_max, BUDGET.rows_max // 2), largest) + extra
            named = {tp: set(state.batch) for tp, state in end.partitions.items() if state.batch}
            held = {tp: {entry.id for entry in blocks} for tp, blocks in batch.entries.items()}
            assert named == held, "the checkpoint names other entries than its batch has"
            served = {
                (tp, self.range_of(entry))
                for tp, blocks in batch.entries.items()
                for entry in blocks
            }
            if self.budget.checkpoint_bytes_max == 10**6:
                again = self.left_out & had_data - served
                assert not again, "a range with data is left out of two cuts in a row"
            self.left_out = had_data - served
            self.planned.append(Planned(start, end, self.layout(end)))

    @rule(entries=ENTRIES, rows_max=st.integers(1, 3))
    def burst(self, entries: list[tuple[str, int]], rows_max: int) -> None:
        """More comes everywhere than two cuts take: some ranges have a part in one of them only."""
        for tp in self.logs:
            self.publish(tp, entries)
        self.receive_everywhere(8)
        self.cut(rows_max)
        self.cut(rows_max)

    def with_data(self) -> set[tuple[TopicPartition, int]]:
        """Topic partitions and ranges of which something is received and not cut."""
        return {
            (tp, block.received_by)
            for tp, window in self.window.known.items()
            for block in window.received
        }

    def range_of(self, entry: EntryBlock) -> int:
        assert entry.slot is not None
        return range_index(entry.slot, self.ranges)

    def layout(
        self, end: Checkpoint
    ) -> dict[int, list[tuple[TopicPartition, EntryId, tuple[int, ...]]]]:
        located = lay_out(self.window.batches[end.batch_id].entries, end.ranges, end.merged)
        return {
            index: [(tp, entry.id, tuple(entry.indices)) for tp, entry in entries]
            for index, entries in located.items()
        }

    @precondition(lambda self: self.planned)
    @rule(at=st.integers(0, 3))
    def commit(self, at: int) -> None:
        """The host's commit log has these batches; then it tells the window."""
        count = at % len(self.planned) + 1
        self.committed += self.planned[:count]
        del self.planned[:count]
        released = self.window.release(self.committed[-1].end)
        assert released
        for tp, entries in released.items():
            self.acknowledge(tp, entries)
        assert self.window.release(self.committed[-1].end) == {}

    @rule(ranges=st.integers(1, 5), committed=st.integers(0, 2), run_again=st.booleans())
    def crash(self, ranges: int, committed: int, run_again: bool) -> None:
        """Some planned batches are committed and unreleased, the next may have to run again."""
        self.committed += self.planned[:committed]
        del self.planned[:committed]
        again = self.planned[0] if self.planned and run_again else None
        self.planned = []
        base = again.end if again else self.committed[-1].end if self.committed else None
        window_base = Checkpoint("c", "s", ranges, base.partitions if base else {})
        self.restart_with(window_base, ranges)
        if again is None:
            return
        self.window.expect(again.end)
        for at in range(4):  # redeliveries may come before the batch is read again
            self.window.validate()
            self.receive(at, 3)
        self.window.plan(again.end, self.read_again(again.end))
        self.planned = [again]
        assert self.layout(again.end) == again.layout, "a batch that ran again is another one"

    def read_again(self, end: Checkpoint) -> dict[TopicPartition, list[EntryBlock]]:
        return {
            tp: [
                stored.part(sorted(state.partial.get(stored.id, range(stored.size))))
                for stored in self.logs[tp]
                if stored.id in state.batch
            ]
            for tp, state in end.partitions.items()
            if state.batch
        }

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def the_window_is_valid(self) -> None:
        if hasattr(self, "window"):
            self.window.validate()

    @invariant()
    def a_checkpoint_covers_its_start_and_its_batch(self) -> None:
        """A checkpoint forgets no delivered entry, so the next start drops its redelivery."""
        if not hasattr(self, "window"):
            return
        for batch in self.committed[-3:] + self.planned:
            for tp, log in self.logs.items():
                start = batch.start.partitions.get(tp, NONE)
                end = batch.end.partitions.get(tp, NONE)
                before = {stored.id for stored in log if start.covers(stored.id)}
                after = {stored.id for stored in log if end.covers(stored.id)}
                assert before >= set(start.delivered)
                assert after >= before | set(end.batch), "a checkpoint forgets what is delivered"
                assert not before & set(end.batch), "a batch holds what was delivered before"

    @invariant()
    def nothing_is_acknowledged_before_its_batch_is_committed(self) -> None:
        if not hasattr(self, "window"):
            return
        for tp, log in self.logs.items():
            committed = self.delivered_by_commits(tp)
            for stored in log:
                ours = stored.acked and len(stored.foreign) < stored.size
                assert not ours or stored.id in committed, "acknowledged before its commit"

    def delivered_by_commits(self, tp: TopicPartition) -> set[EntryId]:
        return {e for done in self.committed for e in done.end.partitions.get(tp, NONE).batch}

    @invariant()
    def each_entry_is_in_one_batch_and_in_order_of_its_slot(self) -> None:
        if not hasattr(self, "window"):
            return
        seen: set[tuple[TopicPartition, EntryId]] = set()
        last: dict[tuple[TopicPartition, str], EntryId] = {}
        for batch in (*self.committed, *self.planned):
            for located in batch.layout.values():
                for tp, entry_id, indices in located:
                    assert (tp, entry_id) not in seen, "an entry is in two batches"
                    seen.add((tp, entry_id))
                    stored = next(s for s in self.logs[tp] if s.id == entry_id)
                    missing = set(range(stored.size)) - set(indices)
                    assert missing <= stored.foreign, "a batch is not whole"
                    assert entry_id > last.get((tp, stored.key), EntryId(0, 0)), "out of order"
                    last[tp, stored.key] = entry_id

    def teardown(self) -> None:
        """Nothing is lost: when all is received, cut and released, nothing is left anywhere."""
        if not hasattr(self, "window"):
            return
        for _ in range(400):
            self.prove_all()
            for at, (tp, index) in enumerate(self.lanes):
                lane = self.lanes[tp, index]
                if lane.queue:
                    self.receive(at, 1_000)
                elif lane.assembly.open is not None:
                    self.feed(tp, index, None)
            self.cut(12)
            while self.planned:
                self.commit(3)
            self.the_window_is_valid()
            self.each_entry_is_in_one_batch_and_in_order_of_its_slot()
            if not self.unfinished():
                break
        assert not self.unfinished(), "something is never delivered"
        assert self.window.rows == self.window.received_rows == 0
        for tp, log in self.logs.items():
            assert all(stored.acked or not stored.open_indices for stored in log)
            never = {stored.id for stored in log if not stored.marker} - self.delivered_by_commits(
                tp
            )
            assert all(len(s.foreign) == s.size for s in log if s.id in never), "an entry is lost"

    def prove_all(self) -> None:
        for tp, log in self.logs.items():
            self.window.prove(tp, known_at_the_end(log))

    def unfinished(self) -> bool:
        return bool(self.window.received_rows) or any(
            lane.queue or lane.assembly.open is not None for lane in self.lanes.values()
        )


NONE = PartitionCheckpoint()

TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_entry_is_whole_after_two_breaks_at_the_same_message() -> None:
    """Both times another entry is the first that comes after the reconnect.

    1. One message of ``long`` comes, then the connection breaks, and ``short`` comes first.
    2. The consumer is opened again; ``long`` comes first, and is cut off after the same message.
    """
    machine = WindowMachine()
    machine.begin(ranges=1, seed=0, checkpoint_bytes=10**6)
    machine.publish(P0, [("a", 3), ("b", 1)])
    long, short = machine.logs[P0]
    lane = machine.lanes[P0, 0]
    for _ in range(2):
        lane.queue = [(long, 0), (long, 1), (long, 2), (short, 0)]
        machine.receive(0, 1)
        machine.reconnect(0)
        lane.queue = [(short, 0), (long, 0), (long, 1), (long, 2)]
        machine.receive(0, 1)
    machine.cut(12)
    machine.each_entry_is_in_one_batch_and_in_order_of_its_slot()
    machine.teardown()
