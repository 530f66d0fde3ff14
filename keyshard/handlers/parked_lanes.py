"""What lanes do with messages that no handler gets done: dead letters, parked keys, replays.

A message that becomes a letter keeps its lane until the letter is confirmed, so the letters of a
key are written one after the other, in its order. Letters that are replayed take the lane of their
key, each until its marker is confirmed, and newer messages wait behind them. The state of a key
changes only while the lock of the run is held, or while its lane is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from keyshard.config.handlers import HandlerConfig
from keyshard.core.dead_letter.letters import Letter, LetterKind, Resting
from keyshard.core.dead_letter.parking import Course, State
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.lanes.failure import Failure, FailureKind
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.lanes.queues import Work
from keyshard.core.lanes.tally import Tally
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.dead_letter.store import DeadLetterStore, InOrder
from keyshard.errors import KeyShardError
from keyshard.handlers.outcome_log import OutcomeLog
from keyshard.threads import Pool, unexpected

THREADS = 8
"""Letters and markers that wait for their confirmation at the same time."""
DISCARDED_AT_ONCE = 1_000
"""Keys whose letters are given up together."""
LET_OUT_AT_ONCE = 2 * THREADS
"""Keys that are let out at the same time; the others wait, so that keys that are not parked find
lanes and threads free."""
TOLD_AT_ONCE = 1_000
"""Keys that are told to come out while the lock of the run is held."""
NO_KEY = "it has no key, and null_keys is 'reject'"

_log = logging.getLogger(__name__)


class RunningLanes(Protocol):
    """The lanes of a handler run, as far as parking needs them; implemented by its desk."""

    changed: threading.Condition
    """Guards the lanes."""
    lanes: Lanes
    tally: Tally
    """Guarded too."""

    @property
    def pauses(self) -> bool:
        """Whether handlers pause; ``changed`` is held."""

    def wake(self) -> None:
        """Something may be runnable; ``changed`` is held."""

    def fail(self, error: KeyShardError) -> None:
        """End the source."""


class ParkedLanes:
    """Writes letters and replays them, in a few threads of its own.

    Args:
        run: Whose lanes they are.
        letters: Where they are kept.
        handling: The policies.
        subscription: Of the source.
        outcomes: Where they are logged.
        unreadable: Messages that are what is stored of an entry that cannot be read, and why.
    """

    def __init__(
        self,
        run: RunningLanes,
        letters: DeadLetterStore,
        handling: HandlerConfig,
        subscription: str,
        outcomes: OutcomeLog,
        *,
        unreadable: dict[tuple[TopicPartition, MessageId], str],
    ) -> None:
        self.letters = letters
        self.keys = letters.keys
        self._run = run
        self._outcomes = outcomes
        self._parks = handling.on_failure == "park"
        self._stops = handling.on_failure == "stop"
        self._rejects_keyless = handling.null_keys == "reject"
        self._subscription = subscription
        self._behind: dict[str, str] = {}
        self._first: dict[str, Resting] = {}
        self._preparing: set[str] = set()
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Draining keys that wait for their turn."""
        self._letting_out: set[str] = set()
        """Draining and replaying keys that have their turn."""
        self._unreadable = unreadable
        self._replays: dict[str, InOrder] = {}
        self._pool = Pool(THREADS, "keyshard-letters")
        self._under_way: set[Future[None]] = set()
        self._closed = False

    # -- called with the lock held ----------------------------------------------------------------

    def claims(self, work: Work) -> bool:
        """Whether a message that was handed out is not for the handler; then it is seen to."""
        if work.resting is not None:
            return False
        message, key = work.message, work.queue.key
        at = message.message_id
        if self._unreadable and (why := self._unreadable.get((_where(message), at))):
            self._outcomes.rejected(work, None, why)
            self._write(work, LetterKind.REJECTED, 0, why)
            return True
        if key is None:
            if self._rejects_keyless:
                self._outcomes.rejected(work, None, NO_KEY)
                self._write(work, LetterKind.REJECTED, 0, NO_KEY)
            return self._rejects_keyless
        if not self.keys.matter:
            return False
        where = _where(message)
        course = self.keys.begins(key, where, at)
        if course is Course.HANDLE:
            return False
        if course is Course.HANDLE_AGAIN:
            self._confirm(work, lambda: self._runs_again(work, key, where))
        elif course is Course.DONE:
            self._run.lanes.completed(work)
            self._go_on(key)
        else:
            behind = self._behind.get(key, "dead letters of a run before")
            self._write(work, LetterKind.PARKED, 0, f"its key is parked behind {behind}")
        return True

    def handled(self, work: Work) -> None:
        """A handler got a message done."""
        if work.resting is not None:
            self._confirm(work, lambda: self._advance(work))
            return
        self._run.lanes.completed(work)
        if work.queue.key is not None:
            self._go_on(work.queue.key)

    def give_up(self, work: Work, failure: Failure) -> bool:
        """A message will not be tried again; ``False`` when that must end the source."""
        rejected, reason = failure.kind is FailureKind.REJECTED, failure.reason
        if self._stops and not rejected:
            return False
        attempts, key = work.queue.attempts + 1, work.queue.key
        if rejected or not self._parks or key is None:
            told = self._outcomes.rejected if rejected else self._outcomes.dead_lettered
            told(work, failure.error, reason)
            self._write(
                work, LetterKind.REJECTED if rejected else LetterKind.DEAD_LETTER, attempts, reason
            )
            return True
        self._outcomes.parked(work, failure.error, reason)
        self._behind[key] = f"message {work.message.message_id}"
        if work.resting is None:
            self._write(work, LetterKind.PARKED, attempts, reason)
        else:
            self.keys.failed_again(key)
            del self._replays[key]
            self._run.lanes.completed(work)
            self._turn_is_over(key)
        return True

    def unpark(self, selection: Selection) -> int:
        """Let keys out, a few at a time; how many are on their way. Called without the lock."""
        keys = self.keys.selected(selection)
        for at in range(0, len(keys), TOLD_AT_ONCE):
            with self._run.changed:
                for key in keys[at : at + TOLD_AT_ONCE]:
                    if self.keys.unpark(key):
                        self._turns[key] = None
                self._take_turns()
        return len(keys)

    def discard(self, selection: Selection, *, rejected: bool, count_only: bool = False) -> int:
        """Give letters up; how many. Called without the lock.

        Args:
            selection: Which.
            rejected: Rejected ones, instead of those of parked keys.
            count_only: Only count them.
        """
        if rejected:
            return self.letters.discard_rejected(selection, count_only=count_only)
        count, selected = 0, self.keys.selected(selection)
        if count_only:
            return self.keys.resting(selected)
        for at in range(0, len(selected), DISCARDED_AT_ONCE):
            keys = selected[at : at + DISCARDED_AT_ONCE]
            count += self.letters.discard(keys)
            with self._run.changed:
                for key in keys:
                    queue = self._run.lanes.queue(key)
                    if queue is None or not (queue.running and queue.work[0].parking):
                        self.keys.emptied(key)
                self._run.wake()
        return count

    # -- life cycle -------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Begin nothing; wait for letters that are under way, at most ``timeout_s`` seconds."""
        with self._run.changed:
            self._closed = True
            waiting = list(self._under_way)
        wait(waiting, timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- in the threads ---------------------------------------------------------------------------

    def _write(self, work: Work, kind: LetterKind, attempts: int, error: str) -> None:
        letter = Letter(work.message, self._subscription, kind, attempts, error)
        self._confirm(work, lambda: self._written(work, letter))

    def _confirm(self, work: Work, action: Callable[[], None]) -> None:
        """Write a letter or marker while its message keeps the lane; no handler works on it."""
        work.parking, work.started_s = True, time.monotonic()
        self._submit(work, action)

    def _written(self, work: Work, letter: Letter) -> None:
        self.letters.send(letter)
        with self._run.changed:
            self._run.tally.letter(letter.kind)
            self._unreadable.pop((letter.topic_partition, letter.message.message_id), None)
        if work.resting is not None:
            self._advance(work)
            return
        with self._run.changed:
            self._run.lanes.completed(work)
            if work.queue.key is not None:
                self._go_on(work.queue.key)
                self._claim_next(work.queue.key)
            self._run.wake()

    def _claim_next(self, key: str) -> None:
        """While handlers pause, no worker asks for the next message of a parked key."""
        queue = self._run.lanes.queue(key) if self._run.pauses and not self._closed else None
        if queue is None or queue.running:
            return
        head = queue.work[0].message
        if self.keys.course(key, _where(head), head.message_id) in {Course.LETTER, Course.DONE}:
            work = self._run.lanes.next_of([key], time.monotonic())
            if work is not None:
                self.claims(work)

    def _runs_again(self, work: Work, key: str, where: TopicPartition) -> None:
        """Say that newer letters count as done no more, and then let an older message run."""
        self.letters.runs_again(key, where, work.message.message_id)
        with self._run.changed:
            work.parking = False
            self._run.lanes.again(
                work, time.monotonic(), "newer dead letters of its key are done", counted=False
            )
            self._run.wake()

    def _advance(self, work: Work) -> None:
        """A letter of a replay is done: mark it, and go on with the next one."""
        key, resting = work.queue.key, work.resting
        assert key is not None
        assert resting is not None
        self.letters.done(key, resting)
        following = self._replays[key].next()
        with self._run.changed:
            if following is not None:
                self._run.lanes.replace(work, following)
            else:
                del self._replays[key]
                self._behind.pop(key, None)
                self._run.lanes.completed(work)
                self._turn_is_over(key)
                _log.info("key %r is no longer parked", key)
            self._run.wake()

    def _take_turns(self) -> None:
        """Let out as many keys as may be at the same time; called with the lock held."""
        while self._turns and len(self._letting_out) < LET_OUT_AT_ONCE:
            key, _ = self._turns.popitem(last=False)
            if self.keys.state(key) is State.DRAINING:
                self._letting_out.add(key)
                self._prepare(key)

    def _turn_is_over(self, key: str) -> None:
        """A key is out, or cannot go on now; called with the lock held."""
        self._letting_out.discard(key)
        self._take_turns()

    def _prepare(self, key: str) -> None:
        """Read the first letter of a draining key; meanwhile newer messages become letters.

        Called with the lock held.
        """
        if key not in self._preparing:
            self._preparing.add(key)
            self._submit(None, lambda: self._prepared(key))

    def _prepared(self, key: str) -> None:
        first = self.letters.first(key)
        with self._run.changed:
            self._preparing.discard(key)
            if first is not None:
                self._first[key] = first
                self._go_on(key)
            elif not self._is_busy(key):
                # All letters were lost, and that is accepted.
                self.keys.released(key)
            if key not in self._replays and key not in self._preparing:
                self._turn_is_over(key)
            self._run.wake()

    def _go_on(self, key: str) -> None:
        """Replay a draining key, if nothing of it runs and it is its turn; called with the lock
        held."""
        if self.keys.state(key) is not State.DRAINING or self._is_busy(key):
            return
        if key not in self._letting_out:
            self._turns[key] = None
            self._take_turns()
            return
        first = self._first.pop(key, None)
        if first is None or not self.keys.is_first(key, first.position):
            self._prepare(key)
            return
        self._replays[key] = self.letters.replay(key, first)
        self._run.lanes.insert(first)

    def _is_busy(self, key: str) -> bool:
        """Whether something of a key runs, or goes before its letters."""
        queue = self._run.lanes.queue(key)
        if self._closed or queue is None:
            return self._closed
        head = queue.work[0].message
        where = _where(head)
        course = self.keys.course(key, where, head.message_id)
        return queue.running or bool(queue.attempts) or course is Course.HANDLE

    def _submit(self, work: Work | None, action: Callable[[], None]) -> None:
        """Do something in a thread; called with the lock held, or by one of the threads."""

        def task() -> None:
            try:
                action()
            except BaseException as exc:  # noqa: BLE001 - it ends the source by name
                self._failed(work, unexpected("Writing dead letters", exc))

        if self._closed:
            return
        future = self._pool.submit(task)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _failed(self, work: Work | None, error: KeyShardError) -> None:
        with self._run.changed:
            if work is not None:
                self._run.lanes.again(work, time.monotonic(), str(error))
            if not self._closed:
                self._run.fail(error)


def _where(message: Message) -> TopicPartition:
    return TopicPartition(message.topic, message.partition)
