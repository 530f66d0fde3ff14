"""One seed: a cluster, its clients, faults, and promises."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar
from unittest.mock import patch

from keyshard.broker import retry
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.retry import retry_until
from keyshard.broker.unreadable_entries import entry_of
from keyshard.broker.wire import (
    ack_grouping,
    connection,
    keep_alive,
    receiver_queue,
    reconnect,
    subscription,
)
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import consumer as consuming
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.consumer import CONFIRM_S, WireConsumer
from keyshard.broker.wire.permits import LENT_MAX
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.errors import BrokerError, BrokerUnavailableError, UnreadableEntryError
from keyshard.reading import scan as scanning
from keyshard.reading.scan import Scan
from tests.proofs.runner import Options, Outcome, Outcomes, Proof
from tests.support.deadlines import deadline
from tests.support.frame_broker.topics import LEDGER
from tests.wire_simulation.broker import ServedBroker, Session, Troubles
from tests.wire_simulation.model import LATE, JudgedMember, Model

OPERATION_MS = 1_000
RUN_S = deadline(25)
"""Longest time until everything is acknowledged, seconds."""
SLACK_S = deadline(8)
"""Tolerance for the time of a call on a busy machine, seconds."""
CLOSE_S = OPERATION_MS / 1000 + CONFIRM_S
SUBSCRIPTION = "s"
T = TypeVar("T")


class BrokenPromiseError(AssertionError):
    """A broken promise."""


def run(seed: int) -> Outcome:
    """Run a seed; never raises."""
    before = threads()
    draw = random.Random(seed)
    with hurried(draw):
        try:
            world = World(seed, draw)
            try:
                world.work()
                world.end()
            finally:
                world.close()
            until(lambda: not threads() - before, "threads are left")
        except (BrokenPromiseError, BrokerError) as exc:
            return Outcome(seed, f"{type(exc).__name__}: {exc}")
    counts = {
        "entries": world.entries, "connections and answers broken": world.troubles.met,
        "subscriptions lost": world.losses,
    }  # fmt: skip
    return Outcome(seed, counts=Counter(counts))


@contextmanager
def hurried(draw: random.Random) -> Iterator[None]:
    """Waits that are short, and reads of few bytes or many."""
    changes = [
        (retry, "FIRST_WAIT_S", 0.005),
        (retry, "LONGEST_WAIT_S", 0.05),
        (reconnect, "RETRY_S", 0.01),
        (subscription, "RETRY_S", 0.01),
        (ack_grouping, "SEND_AGAIN_S", 0.02),
        # Threads and time are real: an absence may take long because the machine is busy.
        (ack_grouping, "SENT_AGAIN_WITHIN_S", RUN_S),
        (scanning, "READ_WAIT_MS", 20),
        (consuming, "QUIET_S", 0.02),
        (brokering, "NUDGE_LONGEST_WAIT_S", 0.1),
        (receiver_queue, "EXCESS_BYTES_MAX", 2_000),
        (keep_alive, "KEEP_ALIVE_S", draw.choice([1.0, 30.0])),
        (connection, "READ_BYTES", draw.choice([1, 7, 100, 1 << 18])),
    ]
    with ExitStack() as patches:
        for change in changes:
            patches.enter_context(patch.object(*change))
        yield


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("keyshard-wire")}


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + RUN_S
    while not condition():
        if time.monotonic() > end_s:
            raise BrokenPromiseError(what)
        time.sleep(0.002)


def in_time(call: Callable[[], T], limit_s: float, what: str) -> T:
    """Call something; it may fail, but not exceed its time."""
    began = time.monotonic()
    try:
        return call()
    finally:
        took_s = time.monotonic() - began
        if took_s > limit_s + SLACK_S:
            raise BrokenPromiseError(f"{what} took {took_s:.1f} s")


class World:
    """A cluster of two brokers and a client of them."""

    def __init__(self, seed: int, draw: random.Random) -> None:
        self.draw = draw
        self.topics = [TopicPartition("persistent://public/default/t", n) for n in range(2)]
        self.topics = self.topics[: draw.randrange(1, 3)]
        self.model = Model(random.Random(seed + 1), self.topics)
        self.troubles = Troubles(
            random.Random(seed + 2), draw.choice([0, 2, 6, 12]), 0, threading.Lock()
        )
        self.brokers: list[ServedBroker] = []
        for _ in range(2):
            ServedBroker(self.model, self.troubles, self.brokers)
        urls = ",".join(one.url.removeprefix("pulsar://") for one in self.brokers)
        self.client = WireBroker(Connection(f"pulsar://{urls}", operation_timeout_ms=OPERATION_MS))
        self.consumers: list[WireConsumer] = []
        self.ranges = draw.choice([1, 2, 4])
        self.queue = self.model.queue_max = draw.choice([1, 2, 10, 1_000])
        # So few bytes that the queue overflows again and again, or enough for all.
        self.queue_bytes = random.Random(f"{seed}:bytes").choice([None, 1, 2_000, 1 << 20])
        self.events = draw.randrange(6)
        self.model.parks = random.Random(f"{seed}:parks").choice([0.0, 0.0, 0.1, 0.5])
        self.entries = self.losses = 0
        self.firsts: dict[WireConsumer, int] = {}
        """The newest entry that came for the first time."""
        self.latest: dict[WireConsumer, tuple[int, int]] = {}
        """How often it was lost, and the newest entry since."""
        self.held: dict[WireConsumer, list[int]] = {}
        """Received entries that are not acknowledged yet."""
        for where in self.topics:
            self._publish(where, draw.randrange(40))

    def work(self) -> None:
        self.consumers = [
            self._subscribed(where, hash_range)
            for where in self.topics
            for hash_range in split_ring(self.ranges)
        ]
        slow = {number for number in range(len(self.consumers)) if not self.draw.randrange(4)}
        end_s = time.monotonic() + RUN_S
        while self._to_come() or self.events:
            if time.monotonic() > end_s:
                raise BrokenPromiseError(f"lost or stuck: {self._to_come()}")
            for number, consumer in enumerate(self.consumers):
                if number not in slow or not self.draw.randrange(5):
                    self._receive(consumer)
            if self.events and not self.draw.randrange(4):
                self.events -= 1
                self._happen()
            self._check()

    def end(self) -> None:
        """Acknowledge everything and close; check the receipts, the permits and the end."""
        self.troubles.left = 0
        for consumer in self.consumers:
            self._acknowledge(consumer)
            until(lambda: not consumer.unconfirmed(0.1), "receipts do not come")  # noqa: B023
        with self.model.lock:
            lacking = self.model.handed_out - self.model.taken
            if lacking:
                raise BrokenPromiseError(f"confirmed, and the broker has not got {lacking}")
        # Newer entries, or those that a restart forgot, are taken meanwhile.
        until(
            lambda: not sum(map(self._receive, self.consumers)) and self._permits_are_back(),
            "permits are lost",
        )
        self._check()
        self.losses = sum(one.losses for one in self.consumers)
        in_time(self.client.close, 8.0, "closing")
        until(lambda: not self.model.members, "a consumer was not given back")

    def close(self) -> None:
        self.client.close()
        for broker in self.brokers:
            broker.close()

    # -- inside ------------------------------------------------------------------------------------

    def _subscribed(self, where: TopicPartition, hash_range: HashRange) -> WireConsumer:
        def subscribe() -> WireConsumer:
            return self.client.subscribe(
                SubscriptionSpec(
                    where,
                    SUBSCRIPTION,
                    hash_range,
                    consumer_name="c",
                    receiver_queue_size=self.queue,
                    receiver_queue_bytes=self.queue_bytes,
                ),
                StartPosition.EARLIEST,
            )

        return retry_until(subscribe, RUN_S)

    def _reopen(self) -> None:
        """Replace a consumer; the new one acknowledges the entries of the old one."""
        number = self.draw.randrange(len(self.consumers))
        old = self.consumers[number]
        another = bool(self.draw.randrange(2))
        # A broker that does not answer is no reason to wait for longer.
        with suppress(BrokerUnavailableError):
            in_time(lambda: old.close(for_another=another), CLOSE_S, "closing a consumer")
        with self.model.lock:
            # Its own acknowledgements may have found no connection until it ended.
            self.model.done[old.topic_partition.name].clear()
        new = self.consumers[number] = self._subscribed(old.topic_partition, old.hash_range)
        self.firsts[new] = self.firsts.get(old, -1)
        self.held[new] = self.held.pop(old, [])

    def _publish(self, where: TopicPartition, count: int) -> None:
        self.entries += count
        with self.model.lock:
            for _ in range(count):
                self.model.publish(where.name)

    def _to_come(self) -> dict[str, set[int]]:
        with self.model.lock:
            left = {where.name: self.model.to_come(where.name) for where in self.topics}
        return {name: numbers for name, numbers in left.items() if numbers}

    def _permits_are_back(self) -> bool:
        with self.model.lock:
            members = list(self.model.members.values())
            # A queue that follows the size of messages holds one at least.
            least = self.queue - (self.queue - 1) // 2 if self.queue_bytes is None else 1
            return len(members) == len(self.consumers) and all(
                least <= one.permits <= self.queue + LENT_MAX + one.excess
                for one in members
                if isinstance(one, JudgedMember) and one.hash_range is not None
            )

    def _receive(self, consumer: WireConsumer) -> int:
        losses, numbers = consumer.losses, []
        try:
            blocks = in_time(lambda: consumer.receive(self.draw.choice([0, 11])), 0.02, "receiving")
            numbers = [block.id.entry for block in blocks]
        except UnreadableEntryError as exc:
            numbers = [entry_of(exc).entry]
        if LATE in numbers:
            raise BrokenPromiseError("what was sent to a consumer that is gone is handed out")
        self._check_order(consumer, losses, numbers)
        self.held.setdefault(consumer, []).extend(numbers)
        if self.draw.randrange(3):
            self._acknowledge(consumer)
        return len(numbers)

    def _check_order(self, consumer: WireConsumer, losses: int, numbers: list[int]) -> None:
        name = consumer.topic_partition.name
        before, newest = self.latest.get(consumer, (losses, -1))
        if before != losses:
            newest = -1
        with self.model.lock:
            for number in numbers:
                if losses == consumer.losses and number <= newest:
                    raise BrokenPromiseError(f"{number} came after {newest}")
                newest = number
                if (name, number) in self.model.handed_out:
                    continue
                if number <= self.firsts.get(consumer, -1):
                    raise BrokenPromiseError(f"{number} came first behind a later one")
                self.firsts[consumer] = number
                self.model.handed_out.add((name, number))
        self.latest[consumer] = losses, newest

    def _acknowledge(self, consumer: WireConsumer) -> None:
        held = self.held.pop(consumer, [])
        if held:
            consumer.acknowledge([EntryId(LEDGER, number) for number in held])
            with self.model.lock:
                self.model.done[consumer.topic_partition.name].update(held)

    def _happen(self) -> None:
        where = self.draw.choice(self.topics)
        kind = self.draw.choice(["publish", "unload", "crash", "cut", "read", "last", "reopen"])
        if kind == "publish":
            self._publish(where, self.draw.randrange(20))
        elif kind == "unload":
            with self.model.lock:
                for member in self.model.unload(where.name):
                    assert isinstance(member.session, Session)
                    end = member.session.end
                    how = {"twice": not self.draw.randrange(2)}
                    if self.draw.randrange(2):
                        end(member.consumer_id, **how)
                    else:
                        threading.Timer(0.01, end, (member.consumer_id,), how).start()
        elif kind in ("cut", "crash"):
            with self.model.lock:
                if kind == "crash":
                    self.model.crash()
            for broker in self.brokers if kind == "crash" else self.brokers[:1]:
                broker.cut_all()
        elif kind == "read":
            self._read(where)
        elif kind == "reopen":
            self._reopen()
        else:
            self._ask_last(self.draw.choice(self.consumers))

    def _read(self, where: TopicPartition) -> None:
        with self.model.lock:
            log = list(self.model.logs[where.name])
        first = self.draw.randrange(len(log) + 1)
        found: set[int] = set()
        unreadable: dict[EntryId, UnreadableEntryError] = {}
        end_s = time.monotonic() + RUN_S
        last = EntryId(LEDGER, len(log) - 1)
        start = EntryId(LEDGER, first)
        with Scan(self.client, where, start, last, unreadable=unreadable) as scan:
            while log and first < len(log) and not scan.done:
                blocks = retry_until(scan.read, max(0.0, end_s - time.monotonic()))
                found |= {block.id.entry for block in blocks}
        found |= {entry_id.entry for entry_id in unreadable}
        wanted = {one.number for one in log[first:]}
        if not wanted <= found or LATE in found:
            raise BrokenPromiseError(f"a Reader from {first} lacks {wanted - found}")

    def _ask_last(self, consumer: WireConsumer) -> None:
        with self.model.lock:
            count = len(self.model.logs[consumer.topic_partition.name])
        ask = consumer.last_entry
        try:
            last = in_time(ask, OPERATION_MS / 1000, "asking for the last entry")
        except BrokerError as exc:
            if not exc.retriable:
                raise
            return
        if last != (EntryId(LEDGER, count - 1) if count else None):
            raise BrokenPromiseError(f"the last entry is {last} of {count}")

    def _check(self) -> None:
        with self.model.lock:
            if self.model.broken:
                raise BrokenPromiseError("; ".join(self.model.broken))


def _outcomes(_: Options, seeds: range) -> Outcomes:
    logging.getLogger("keyshard").setLevel(logging.ERROR)
    yield from map(run, seeds)


PROOF = Proof(_outcomes, seeds=200, seed_start=0)
