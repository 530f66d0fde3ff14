"""Handles messages that exhausted their retries: dead letters, parked keys, replays.

A message that becomes a dead letter keeps its lane until the dead letter is confirmed. So the dead
letters of a key are written one after the other, in its order. A replayed dead letter takes the
lane of its key until its marker is confirmed, and newer messages wait for that. The state of a key
changes only while the lock of the run is held, or while its lane is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Protocol

from keyshard.config.handlers import HandlerConfig
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, StoredDeadLetter
from keyshard.core.dead_letter_filter import DeadLetterFilter, KeyPlan, Plan, plan_of, replay_of
from keyshard.core.lanes.failure import Failure, FailureKind
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerCounters
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.dead_letters.parking import Action, ParkingState
from keyshard.dead_letters.replay import Replay
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import BrokerUnavailableError, ConfigError, KeyShardError
from keyshard.handlers.outcomes import FailureLog
from keyshard.threads import Pool, unexpected

THREADS = 8
"""Dead letters and markers that wait for their confirmation at the same time."""
DISCARDED_AT_ONCE = 1_000
"""Keys whose dead letters are discarded together."""
DISCARD_S = 60.0
"""Longest wait for another discard, seconds."""
UNPARKED_AT_ONCE = 2 * THREADS
"""Keys that are unparked at the same time. The others wait, so that lanes and threads stay free for
keys that are not parked."""
KEYS_AT_ONCE = 1_000
"""Keys marked for unparking while the lock of the run is held."""
ENDED_S = 30 * 86_400.0
"""Time beyond every drain, seconds."""
NO_KEY = "it has no key, and null_keys is 'reject'"

_log = logging.getLogger(__name__)


class RunningLanes(Protocol):
    """The lanes of a handler run, as parking needs them; implemented by the dispatcher."""

    changed: threading.Condition
    """Guards the lanes."""
    lanes: Lanes
    tally: HandlerCounters
    """Guarded by :attr:`changed` too."""

    @property
    def pauses(self) -> bool:
        """Whether the circuit breaker pauses handlers; ``changed`` is held."""

    def distribute(self) -> None:
        """Put every received message into a lane; ``changed`` is held."""

    def wake(self) -> None:
        """Let executors start runnable messages; ``changed`` is held."""

    def fail(self, error: KeyShardError) -> None:
        """End the source."""


class FailedMessages:
    """Writes dead letters and replays them, in a few threads of its own.

    Args:
        run: Owner of the lanes.
        dead_letters: Store of dead letters.
        handling: Retry and failure policies.
        subscription: Subscription of the source.
        outcomes: Log of failures.
        unreadable: Messages that stand for entries that cannot be read, and the reason of each.
    """

    def __init__(
        self,
        run: RunningLanes,
        dead_letters: DeadLetterStore,
        handling: HandlerConfig,
        subscription: str,
        outcomes: FailureLog,
        *,
        unreadable: dict[tuple[TopicPartition, MessageId], str],
    ) -> None:
        self.dead_letters = dead_letters
        self.keys = dead_letters.keys
        self._run = run
        self._outcomes = outcomes
        self._parks = handling.on_failure == "park"
        self._stops = handling.on_failure == "stop"
        self._rejects_keyless = handling.null_keys == "reject"
        self._subscription = subscription
        self._behind: dict[str, str] = {}
        self._first: dict[str, StoredDeadLetter] = {}
        self._preparing: set[str] = set()
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Draining keys that wait for their turn."""
        self._unparking: set[str] = set()
        """Draining and replaying keys that have their turn."""
        self._discarding = threading.Lock()
        """Held while dead letters are discarded. No key is marked for unparking meanwhile."""
        self._unreadable = unreadable
        self._replays: dict[str, Replay] = {}
        self._pool = Pool(THREADS, "keyshard-dead-letters")
        self._under_way: set[Future[None]] = set()
        self._closed = False

    # -- called with the lock held ----------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether :meth:`claims` takes no message that has a key."""
        return not (self._unreadable or self.keys.matter)

    def claims(self, work: Work) -> bool:
        """Whether parking takes a message that was handed out; then the handler must not get it."""
        if work.resting is not None:
            return False
        message, key = work.message, work.queue.key
        at = message.message_id
        if self._unreadable and (why := self._unreadable.get((_where(message), at))):
            self._outcomes.rejected(work, None, why)
            self._write(work, DeadLetterKind.REJECTED, 0, why)
            return True
        if key is None:
            if self._rejects_keyless:
                self._outcomes.rejected(work, None, NO_KEY)
                self._write(work, DeadLetterKind.REJECTED, 0, NO_KEY)
            return self._rejects_keyless
        if not self.keys.matter:
            return False
        where = _where(message)
        action = self.keys.start(key, where, at)
        if action is Action.HANDLE:
            return False
        if action is Action.HANDLE_AGAIN:
            self._confirm(work, lambda: self._runs_again(work, key, where))
        elif action is Action.DONE:
            self._run.lanes.completed(work)
            self._continue_replay(key)
        else:
            behind = self._behind.get(key, "dead letters of an earlier run")
            self._write(work, DeadLetterKind.PARKED, 0, f"its key is parked behind {behind}")
        return True

    def handled(self, work: Work) -> None:
        """Note that a handler completed a message."""
        if work.resting is not None:
            self._confirm(work, lambda: self._advance(work))
            return
        self._run.lanes.completed(work)
        if work.queue.key is not None:
            self._continue_replay(work.queue.key)

    def give_up(self, work: Work, failure: Failure) -> bool:
        """Make a message a dead letter after its last attempt; ``False``: the source must end."""
        rejected, reason = failure.kind is FailureKind.REJECTED, failure.reason
        if self._stops and not rejected:
            return False
        attempts, key = work.queue.attempts + 1, work.queue.key
        if rejected or not self._parks or key is None:
            log = self._outcomes.rejected if rejected else self._outcomes.dead_lettered
            log(work, failure.error, reason)
            self._write(
                work,
                DeadLetterKind.REJECTED if rejected else DeadLetterKind.DEAD_LETTER,
                attempts,
                reason,
            )
            return True
        self._outcomes.parked(work, failure.error, reason)
        self._behind[key] = f"message {work.message.message_id}"
        if work.resting is None:
            self._write(work, DeadLetterKind.PARKED, attempts, reason)
        else:
            self.keys.failed_again(key)
            del self._replays[key]
            self._run.lanes.completed(work)
            self._end_turn(key)
        return True

    def unpark(self, wanted: DeadLetterFilter, *, dry_run: bool = False) -> Plan:
        """Unpark keys with matching dead letters, a few at a time. Called without the lock.

        Args:
            wanted: The filter. If a key is its only condition, the key is unparked even if no dead
                letter of it is confirmed yet.
            dry_run: Unpark nothing.

        Raises:
            ConfigError: The filter means rejected dead letters.
            KeyShardError: As for :meth:`DeadLetterBrowser.matching`.
        """
        if wanted.rejected:
            raise ConfigError(
                "Rejected dead letters are not replayed: their keys went on without them.",
                "Publish the messages again, or discard their dead letters.",
            )
        key = wanted.key
        matching = self.dead_letters.browser.matching(wanted)
        plans = replay_of(matching, self.keys.counts(matching))
        if key is not None and wanted.is_of_a_key and not plans and self.keys.state(key):
            plans = [KeyPlan(key, 0, 0)]  # its dead letters are being written or replayed
        for at in range(0, 0 if dry_run else len(plans), KEYS_AT_ONCE):
            with self._alone(), self._run.changed:
                for one in plans[at : at + KEYS_AT_ONCE]:
                    if one.key is not None and self.keys.unpark(one.key):
                        self._turns[one.key] = None
                self._take_turns()
        return plan_of(plans)

    def discard(self, wanted: DeadLetterFilter, *, dry_run: bool = False) -> Plan:
        """Discard matching dead letters. Called without the lock.

        Args:
            wanted: The filter.
            dry_run: Discard nothing.

        Raises:
            KeyShardError: As for :meth:`DeadLetterBrowser.matching`.
        """
        if wanted.rejected:
            count = self.dead_letters.discard_rejected(wanted, dry_run=dry_run)
            return Plan(0, count, count, ())
        matching = self.dead_letters.browser.matching(wanted)
        if dry_run:
            parked = self.keys.counts(matching)
            return plan_of([
                KeyPlan(key, len(found), len(found))
                for key, found in matching.items()
                if key in parked
            ])  # fmt: skip
        done: list[KeyPlan] = []
        every = list(matching)
        for at in range(0, len(every), DISCARDED_AT_ONCE):
            keys = every[at : at + DISCARDED_AT_ONCE]
            with self._alone():
                done += self.dead_letters.discard({key: matching[key] for key in keys})
                with self._run.changed:
                    for key in keys:
                        queue = self._run.lanes.queue(key)
                        if queue is None or not (queue.running and queue.work[0].parking):
                            self._emptied(key)
                    self._run.wake()
        return plan_of(done)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the block while no other thread discards dead letters or marks keys for unparking.

        Otherwise a replay could begin with dead letters that a discard removes, and newer messages
        of the key would run at the same time.

        Raises:
            BrokerUnavailableError: Another discard has not ended after :data:`DISCARD_S`.
        """
        if not self._discarding.acquire(timeout=DISCARD_S):
            raise BrokerUnavailableError(
                f"Dead letters are still being discarded after {DISCARD_S:g} s.",
                "Check the health of the broker, and try again.",
            )
        try:
            yield
        finally:
            self._discarding.release()

    # -- life cycle -------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Begin nothing new; wait at most ``timeout_s`` seconds for dead letters in flight."""
        with self._run.changed:
            self._closed = True
            waiting = list(self._under_way)
        wait(waiting, timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- in the threads ---------------------------------------------------------------------------

    def _write(self, work: Work, kind: DeadLetterKind, attempts: int, error: str) -> None:
        dead_letter = DeadLetter(work.message, self._subscription, kind, attempts, error)
        self._confirm(work, lambda: self._written(work, dead_letter))

    def _confirm(self, work: Work, action: Callable[[], None]) -> None:
        """Write a dead letter or marker in the pool. Meanwhile its message keeps the lane."""
        work.parking, work.started_s = True, time.monotonic()
        self._submit(work, action)

    def _written(self, work: Work, dead_letter: DeadLetter) -> None:
        self.dead_letters.send(dead_letter)
        with self._run.changed:
            self._run.tally.dead_letter(dead_letter.kind)
            self._unreadable.pop(
                (dead_letter.topic_partition, dead_letter.message.message_id), None
            )
        if work.resting is not None:
            self._advance(work)
            return
        with self._run.changed:
            self._run.lanes.completed(work)
            if work.queue.key is not None:
                # Its dead letter may have been discarded since its confirmation.
                self._emptied(work.queue.key)
                self._continue_replay(work.queue.key)
                self._claim_next(work.queue.key)
            self._run.wake()

    def _emptied(self, key: str) -> None:
        """Release a parked key if no dead letter of it rests; called with the lock held."""
        self.keys.emptied(key)
        if self.keys.state(key) is None:
            self._behind.pop(key, None)

    def _claim_next(self, key: str) -> None:
        """Claim the next message of a parked key: while handlers pause, no executor asks for it."""
        queue = self._run.lanes.queue(key) if self._run.pauses and not self._closed else None
        if queue is None or queue.running:
            return
        head = queue.work[0].message
        if self.keys.action(key, _where(head), head.message_id) in {
            Action.DEAD_LETTER,
            Action.DONE,
        }:
            work = self._run.lanes.next_of([key], time.monotonic())
            if work is not None:
                self.claims(work)

    def _runs_again(self, work: Work, key: str, where: TopicPartition) -> None:
        """Write that newer dead letters no longer count as done, then let an older message run."""
        self.dead_letters.runs_again(key, where, work.message.message_id)
        with self._run.changed:
            work.parking = False
            self._run.lanes.again(
                work, time.monotonic(), "newer dead letters of its key are done", counted=False
            )
            self._run.wake()

    def _advance(self, work: Work) -> None:
        """Mark a replayed dead letter as done, and go on with the next one."""
        key, resting = work.queue.key, work.resting
        assert key is not None
        assert resting is not None
        self.dead_letters.done(key, resting)
        following = self._replays[key].next()
        with self._run.changed:
            if following is not None:
                self._run.lanes.replace(work, following)
            else:
                del self._replays[key]
                self._behind.pop(key, None)
                self._run.lanes.completed(work)
                self._end_turn(key)
                _log.info("key %r is no longer parked", key)
            self._run.wake()

    def _take_turns(self) -> None:
        """Start to unpark as many keys as may be unparked at once; called with the lock held."""
        while self._turns and len(self._unparking) < UNPARKED_AT_ONCE:
            key, _ = self._turns.popitem(last=False)
            if self.keys.state(key) is ParkingState.DRAINING:
                self._unparking.add(key)
                self._prepare(key)

    def _end_turn(self, key: str) -> None:
        """End the turn of a key that is unparked or cannot continue; called with the lock held."""
        self._unparking.discard(key)
        self._take_turns()

    def _prepare(self, key: str) -> None:
        """Read the first dead letter of a draining key; called with the lock held.

        Meanwhile newer messages of the key become dead letters.
        """
        if key not in self._preparing:
            self._preparing.add(key)
            self._submit(None, lambda: self._prepared(key))

    def _prepared(self, key: str) -> None:
        first = self.dead_letters.first(key)
        with self._run.changed:
            self._preparing.discard(key)
            if first is not None:
                self._first[key] = first
                self._continue_replay(key)
            elif not self._is_busy(key):
                # All dead letters of the key were lost, and fail_on_data_loss is false.
                self.keys.released(key)
            if key not in self._replays and key not in self._preparing:
                self._end_turn(key)
            self._run.wake()

    def _continue_replay(self, key: str) -> None:
        """Replay a draining key that is idle and has its turn; called with the lock held."""
        if self.keys.state(key) is not ParkingState.DRAINING:
            return
        self._run.distribute()
        if self._is_busy(key):
            return
        if key not in self._unparking:
            self._turns[key] = None
            self._take_turns()
            return
        first = self._first.pop(key, None)
        if first is None or not self.keys.is_first(key, first.position):
            self._prepare(key)
            return
        self._replays[key] = self.dead_letters.replay(key, first)
        self._run.lanes.insert(first)

    def _is_busy(self, key: str) -> bool:
        """Whether a message of a key runs, or must run before its dead letters."""
        queue = self._run.lanes.queue(key)
        if self._closed or queue is None:
            return self._closed
        head = queue.work[0].message
        where = _where(head)
        action = self.keys.action(key, where, head.message_id)
        return queue.running or bool(queue.attempts) or action is Action.HANDLE

    def _submit(self, work: Work | None, action: Callable[[], None]) -> None:
        """Run an action in the pool; called with the lock held, or by one of its threads."""

        def task() -> None:
            try:
                action()
            except BaseException as exc:  # noqa: BLE001 - the error ends the source
                self._failed(work, unexpected("Writing dead letters", exc))

        if self._closed:
            return
        future = self._pool.submit(task)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _failed(self, work: Work | None, error: KeyShardError) -> None:
        with self._run.changed:
            if work is not None:
                # The error ends the run, whose drain must not handle the message again.
                self._run.lanes.again(work, time.monotonic() + ENDED_S, error.summary)
            if not self._closed:
                self._run.fail(error)


def _where(message: Message) -> TopicPartition:
    return TopicPartition(message.topic, message.partition)
