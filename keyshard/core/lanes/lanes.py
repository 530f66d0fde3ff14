"""Lanes: choose the next message for a handler, so that each key is in one lane at a time.

Life of a message::

    waiting --next--> running --completed--> done; its entry is completed with its last message
      ^                 |
      +----- again -----+  (the key waits until a time, the other keys continue)

Lanes are not thread-safe: the owner calls them under one lock. Time is an argument, in seconds of
any clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from keyshard.core.dead_letter import StoredDeadLetter
from keyshard.core.lanes.key_queue import (
    Arrival,
    Entry,
    HeldSlots,
    KeyQueue,
    LaneRange,
    RangeCounts,
    Work,
    without,
)
from keyshard.core.lanes.retry_policy import DueKeys
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange

KEYS_READY_MIN = 8
"""Keys that should be ready in a range, for each of its lanes."""


class Lanes:
    """All keys of a source, distributed over its ranges.

    Args:
        ranges: Number of ranges.
        lanes: Lanes of each range: at most this many messages, of different keys, run at a time.
        owner_of: Returns the index of the range that owns a slot.
        serialise_keyless: Whether messages without a key form one key per range. If not, each is a
            key of its own.
    """

    def __init__(
        self,
        ranges: int,
        lanes: int,
        owner_of: Callable[[int], int],
        *,
        serialise_keyless: bool = False,
    ) -> None:
        self.lanes = lanes
        self.owner_of = owner_of
        """Returns the index of the range that owns a slot."""
        self._serialise_keyless = serialise_keyless
        self._ranges = [LaneRange() for _ in range(ranges)]
        self._look_at: deque[LaneRange] = deque()
        self._keys: dict[str, KeyQueue] = {}
        self._keyless: dict[int, KeyQueue] = {}
        self._later = DueKeys()
        self._received = 0
        self._readied = 0
        self._draining = False
        self._aside: list[KeyQueue] = []
        self.held = HeldSlots()
        """No message of these slots starts; see :meth:`hold`."""
        self.running: dict[KeyQueue, Work] = {}
        """Running messages, by queue."""
        self.waiting = 0
        """Number of messages that are not done and do not run."""
        self.completed_entries: dict[TopicPartition, list[EntryId]] = {}
        """Entries all of whose messages are done, each once."""
        self.done_apart: list[tuple[TopicPartition, EntryId, int]] = []
        """Done messages of uncompleted entries of several keys. The owner empties it."""
        self.done = 0
        """Number of messages that are done."""

    # -- Messages ---------------------------------------------------------------------------------

    def add(
        self,
        topic_partition: TopicPartition,
        range_index: int,
        entry_id: EntryId,
        messages: Sequence[Message],
    ) -> Entry:
        """Append the messages of a received entry, at least one, to the queues of their keys."""
        entry = Entry(topic_partition, entry_id, len(messages), messages[0].publish_time)
        self.waiting += len(messages)
        first = None
        for message in messages:
            queue = self._queue_of(message, range_index)
            first = first or queue
            entry.has_keys |= queue is not first
            self._ranges[queue.owner].waiting += 1
            self._received += 1
            work = Work(message, entry, queue, self._received)
            queue.work.append(work)
            if len(queue.work) == 1:
                self._make_ready(queue)
        entry.owner = queue.owner
        self._ranges[entry.owner].entries[entry] = None
        return entry

    def passed(self, arrival: Arrival) -> None:
        """Complete an entry whose messages were handled without queues."""
        self.done += len(arrival.messages)
        self._ranges[arrival.range_index % len(self._ranges)].done += len(arrival.messages)
        self.completed_entries.setdefault(arrival.topic_partition, []).append(arrival.entry_id)

    def adopt(
        self, arrival: Arrival, running_since_s: float | None, *, done: int, started: bool
    ) -> None:
        """Append an entry whose first ``done`` messages were handled without queues.

        If ``running_since_s`` is given, the first message of the rest becomes a running one.
        """
        was_empty = self.empty
        rest = arrival.messages[done:]
        entry = self.add(*arrival._replace(messages=rest))
        entry.started = started
        for message in arrival.messages[:done]:
            self._keep(entry, message)
        self.done += done
        self._ranges[entry.owner].done += done
        if running_since_s is not None:
            assert was_empty, "a message that runs is older than all others"
            head = rest[0]
            queue = next(one for one in self._ready() if one.work[0].message is head)
            without(self._ranges[queue.owner].ready, queue)
            self._start(queue, running_since_s)

    def next(self, now_s: float, *, untried_first: bool = False) -> Work | None:
        """Start the next message; ``None`` if every lane is busy or has no work.

        Args:
            now_s: The time.
            untried_first: Whether a range prefers keys whose head did not fail.
        """
        self._make_due_ready(now_s)
        look_at, lanes = self._look_at, self.lanes
        while look_at:
            owner = look_at.popleft()
            owner.listed = False
            ready, failed = owner.ready, owner.failed
            if owner.running >= lanes or not (ready or failed):
                continue
            if not failed or (ready and (untried_first or ready[0] < failed[0])):
                queue = heapq.heappop(ready)[2]
            else:
                queue = heapq.heappop(failed)[2]
            work = queue.work[0]
            if (self.held.ranges and work.message.slot in self.held) or (
                self._draining and not (work.entry and work.entry.started)
            ):
                self._aside.append(queue)
                self._list(owner)
                continue
            return self._start(queue, now_s)
        return None

    def next_of(self, keys: Iterable[Hashable], now_s: float) -> Work | None:
        """Start the head of the first of these keys that may start now.

        Keys that are held, or whose head has failed, are skipped. Linear in the keys of one range.
        """
        for key in keys:
            queue = self._keys.get(key) if isinstance(key, str) else None
            if queue is None or queue.running or queue.reason is not None:
                continue
            owner, entry = self._ranges[queue.owner], queue.work[0].entry
            started = entry is not None and entry.started
            if owner.running >= self.lanes or queue.slot in self.held or self._draining > started:
                continue
            if without(owner.ready, queue):
                return self._start(queue, now_s)
        return None

    def next_failed(self, queues: Iterable[KeyQueue], now_s: float) -> Work | None:
        """Start the head of the first of these keys that may start now; each head has failed."""
        for queue in queues:
            owner = self._ranges[queue.owner]
            may_start = owner.running < self.lanes and not self._draining
            if may_start and queue.slot not in self.held and without(owner.failed, queue):
                return self._start(queue, now_s)
        return None

    def oldest_failed(self, count: int, now_s: float) -> list[KeyQueue]:
        """Return the startable keys with the oldest failed heads."""
        self._make_due_ready(now_s)
        failed = (queue for owner in self._ranges for _, _, queue in owner.failed)
        return heapq.nsmallest(count, failed, key=lambda queue: queue.work[0].number)

    def completed(self, work: Work) -> None:
        """Mark a message as done: handled, rejected, or parked."""
        queue = work.queue
        self._end(queue)
        queue.work.popleft()
        queue.attempts, queue.reason, queue.first_failed_s, queue.behind = 0, None, None, 0
        if queue.work:
            self._make_ready(queue)
        elif queue.key is not None:
            del self._keys[queue.key]
        elif self._keyless.get(queue.owner) is queue:
            del self._keyless[queue.owner]
        entry = work.entry
        self.done += 1
        self._ranges[queue.owner].done += 1
        if entry is None:
            self._ranges[queue.owner].replays -= 1
            return
        entry.waiting -= 1
        if not entry.waiting:
            del self._ranges[entry.owner].entries[entry]
            self.completed_entries.setdefault(entry.topic_partition, []).append(entry.id)
        elif entry.has_keys:
            self._keep(entry, work.message)

    def again(self, work: Work, not_before_s: float, reason: str, *, counted: bool = True) -> None:
        """Put a failed message back at the head of its key. The key waits until ``not_before_s``.

        The key then queues after all waiting keys, so that retries delay no other key.
        """
        queue = work.queue
        self._end(queue)
        self.waiting += 1
        self._ranges[queue.owner].waiting += 1
        if counted:
            if not queue.attempts:
                queue.failing_since_s = work.started_s
            queue.attempts += 1
        queue.behind = self._received
        queue.reason = reason
        queue.not_before_s = not_before_s
        stays = self._draining and work.entry is None
        (self._aside.append if stays else self._later.push)(queue)

    def insert(self, resting: StoredDeadLetter) -> None:
        """Put a dead letter at the head of its key, to replay it. The key must not be running.

        The key queues after all waiting keys, so that a replay delays no other key.
        """
        queue = self._queue_of(resting.dead_letter.message, 0)
        assert queue.key is not None, "a message without key is never parked"
        assert not queue.running
        assert not queue.attempts, "a parked key is not tried again"
        queue.work.appendleft(Work(resting.dead_letter.message, None, queue, resting=resting))
        self.waiting += 1
        self._ranges[queue.owner].waiting += 1
        self._ranges[queue.owner].replays += 1
        queue.behind = self._received
        if len(queue.work) == 1:
            self._make_ready(queue)

    def replace(self, work: Work, resting: StoredDeadLetter) -> None:
        """Mark a replayed dead letter as done, and put the next one at the head of its key."""
        queue = work.queue
        self._end(queue)
        queue.work[0] = Work(resting.dead_letter.message, None, queue, resting=resting)
        self.waiting += 1
        self._ranges[queue.owner].waiting += 1
        self.done += 1
        self._ranges[queue.owner].done += 1
        queue.attempts, queue.reason, queue.first_failed_s = 0, None, None
        queue.behind = self._received
        self._make_ready(queue)

    def next_due_s(self) -> float | None:
        """Return the time at which the next waiting key may continue; ``None`` if none waits."""
        return self._later.due_s

    def pop_completed(self) -> dict[TopicPartition, list[EntryId]]:
        """Return the completed entries, and forget them."""
        completed, self.completed_entries = self.completed_entries, {}
        return completed

    def put_back(self, completed: Mapping[TopicPartition, Sequence[EntryId]]) -> None:
        """Put back entries that did not fit a checkpoint; :meth:`pop_completed` returns them."""
        for topic_partition, entries in completed.items():
            self.completed_entries.setdefault(topic_partition, []).extend(entries)

    def drain(self) -> None:
        """Start no further entry; finish only those that have started, so that they are complete.

        Dead letters whose replay waits for a retry, now or later, stay in the dead-letter topic.
        """
        if self._draining:
            return
        self._draining = True
        self._aside += self._later.pop_dead_letters()

    def unfinished(self, until_s: float, *, held: bool) -> bool:
        """While draining: return whether a started entry may still be completed by ``until_s``.

        ``False`` if all missing messages of started entries wait after entries that did not start.

        Args:
            until_s: The time.
            held: Whether held keys may continue until then.
        """
        due_s = self._later.due_s
        if self.running or (due_s is not None and due_s <= until_s):
            return True
        heads = (queue.work[0].entry for queue in self._startable(held=held))
        return any(entry is not None and entry.started for entry in heads)

    # -- Moves of ranges --------------------------------------------------------------------------

    def hold(self, slots: Sequence[HashRange]) -> None:
        """Start no message of keys in these slots until :meth:`resume`."""
        self.held.add(slots)

    def blocking(self) -> list[Work]:
        """Return the running messages of held keys; empty when they are idle."""
        return [work for work in self.running.values() if work.message.slot in self.held]

    def resume(self) -> None:
        """Continue all held keys."""
        self.held = HeldSlots()
        aside, self._aside = self._aside, []
        for queue in aside:
            self._make_ready(queue)

    def reassign(self, ranges: int, owner_of: Callable[[int], int]) -> None:
        """Change the number or borders of ranges; queues move with their keys.

        Keyless messages stay in the range that received them, if it still exists.
        """
        self.owner_of = owner_of
        queues, keyless = list(self.queues()), self._keyless.values()
        ready = list(self._ready())
        entries = [entry for owner in self._ranges for entry in owner.entries]
        self._ranges = [LaneRange() for _ in range(ranges)]
        self._look_at.clear()
        for queue in queues:
            queue.owner = queue.owner % ranges if queue.slot is None else owner_of(queue.slot)
            self._ranges[queue.owner].waiting += len(queue.work) - queue.running
            self._ranges[queue.owner].replays += queue.work[0].entry is None
            for work in queue.work:
                if work.entry is not None:
                    work.entry.owner = queue.owner
        for entry in entries:
            self._ranges[entry.owner].entries[entry] = None
        self._keyless = {}
        for queue in (*keyless, *queues):
            if queue.key is None and self._serialise_keyless:
                self._keyless.setdefault(queue.owner, queue)
        for queue in self.running:
            self._ranges[queue.owner].running += 1
        for queue in ready:
            self._make_ready(queue)

    # -- Status -----------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether no message waits or runs."""
        return not self.waiting and not self.running

    @property
    def ranges(self) -> int:
        return len(self._ranges)

    @property
    def hungry(self) -> bool:
        """Whether a range has few ready keys, so that more messages may fill its lanes.

        Failed keys do not count: while the circuit breaker is open, only a key that succeeds closes
        it, so others must come. Nor do replayed keys: an unpark of many keys delays no other key.
        """
        enough = KEYS_READY_MIN * self.lanes
        return any(len(owner.ready) - owner.replays < enough for owner in self._ranges)

    @property
    def starving(self) -> bool:
        """Whether a range has a free lane and no key for it, except failed ones."""
        return any(not owner.ready and owner.running < self.lanes for owner in self._ranges)

    @property
    def all_failed(self) -> bool:
        """Whether keys wait for a lane or a time, and the heads of all have failed."""
        return self.waiting > 0 and not any(owner.ready for owner in self._ranges)

    @property
    def runnable(self) -> int:
        """Estimate of the messages that :meth:`next` could start now; held keys count, too."""
        return sum(
            min(owner.startable, self.lanes - owner.running)
            for owner in self._look_at
            if owner.running < self.lanes
        )

    def counts(self, index: int) -> RangeCounts:
        """Return the present counts of a range."""
        return self._ranges[index].counts()

    def retrying(self, count_max: int) -> Iterator[KeyQueue]:
        """Yield at most ``count_max`` keys that wait for a retry, which may have become due."""
        return islice(self._later, count_max)

    def queue(self, key: str) -> KeyQueue | None:
        """Return the queue of a key; ``None`` if all its messages are done."""
        return self._keys.get(key)

    def queues(self) -> Iterator[KeyQueue]:
        """Yield every queue that has a message, running or not."""
        every = chain(self._keys.values(), self._ready(), self._aside, self.running, self._later)
        return iter(dict.fromkeys(every))

    def validate(self) -> None:
        """Assert the invariants; tests and simulations call it after every step."""
        for index, owner in enumerate(self._ranges):
            running = [queue for queue in self.running if queue.owner == index]
            assert owner.running == len(running), "a lane is counted wrong"
        for queue in self.queues():
            assert queue.work, "a queue without a message is kept"
            assert queue.running == (queue in self.running), "a key is counted wrong"
            if queue.slot is not None:
                assert queue.owner == self.owner_of(queue.slot), "a key is in the wrong range"
        waiting = sum(len(queue.work) - queue.running for queue in self.queues())
        assert self.waiting == waiting, "waiting messages are counted wrong"
        assert waiting == sum(owner.waiting for owner in self._ranges), "or per range"
        replays = sum(queue.work[0].entry is None for queue in self.queues())
        assert replays == sum(owner.replays for owner in self._ranges), "replays are counted wrong"
        entries = {work.entry for queue in self.queues() for work in queue.work} - {None}
        known = [entry for owner in self._ranges for entry in owner.entries]
        assert entries == set(known), "an entry is forgotten, or kept for ever"
        assert len(known) == len(entries), "an entry counts for two ranges"

    # -- Helpers ----------------------------------------------------------------------------------

    def _queue_of(self, message: Message, range_index: int) -> KeyQueue:
        key = message.routing_key
        if key is None or message.slot is None:
            index = range_index % len(self._ranges)
            if not self._serialise_keyless:
                return KeyQueue(None, None, index)
            keyless = self._keyless.get(index)
            if keyless is None:
                keyless = self._keyless[index] = KeyQueue(None, None, index)
            return keyless
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = KeyQueue(key, message.slot, self.owner_of(message.slot))
        return queue

    def _keep(self, entry: Entry, done: Message) -> None:
        self.done_apart.append((entry.topic_partition, entry.id, done.message_id.batch_index))

    def _ready(self) -> Iterator[KeyQueue]:
        """Yield the keys that wait for a lane."""
        return (queue for owner in self._ranges for _, _, queue in (*owner.ready, *owner.failed))

    def _startable(self, *, held: bool) -> Iterator[KeyQueue]:
        """Yield keys that wait for a lane; with ``held``, those of held slots as well."""
        yield from (queue for queue in self._ready() if held or queue.slot not in self.held)
        if held:
            yield from (queue for queue in self._aside if queue.slot in self.held)

    def _start(self, queue: KeyQueue, now_s: float) -> Work:
        """Start the head of a key. The caller has removed the key from the ready ones."""
        owner, work = self._ranges[queue.owner], queue.work[0]
        if work.entry is not None:
            work.entry.started = True
        queue.running = True
        owner.running += 1
        owner.waiting -= 1
        self.waiting -= 1
        work.started_s = now_s
        work.publishing = False
        self.running[queue] = work
        self._list(owner)
        return work

    def _make_ready(self, queue: KeyQueue) -> None:
        owner = self._ranges[queue.owner]
        self._readied += 1
        number = max(queue.work[0].number, queue.behind)
        ready = owner.ready if queue.reason is None else owner.failed
        heapq.heappush(ready, (number, self._readied, queue))
        self._list(owner)

    def _make_due_ready(self, now_s: float) -> None:
        """Move keys with a due retry to the ready ones."""
        while self._later.heap and (due := self._later.pop(now_s)) is not None:
            self._make_ready(due)

    def _list(self, owner: LaneRange) -> None:
        if not owner.listed and owner.startable and owner.running < self.lanes:
            owner.listed = True
            self._look_at.append(owner)

    def _end(self, queue: KeyQueue) -> None:
        del self.running[queue]
        queue.running = False
        owner = self._ranges[queue.owner]
        owner.running -= 1
        self._list(owner)
