"""Another assignment of the ring, while a source runs: the drain protocol.

::

    1. intent     consumers whose hash range or owner changes receive nothing more
    2. drain      nothing is begun of keys that get another owner, and what is worked on of them
                  ends; then the same for the other keys of those consumers, which go on until
                  then; at the deadline all stays as it was
    3. close      the receive threads close those consumers, which hands over acknowledgements
    4. epoch + 1
    5. subscribe  the new hash ranges, for as long as the broker says conflict or does not answer
    6. adopt      window and lanes follow, receiving and handlers go on

What follows on each step, when it is done and when it fails, says :data:`TRANSITIONS`.

Consumers whose hash range and owner stay are not touched, and their keys go on. No handler works on
a key whose slot has no consumer here: somebody else could have it in that moment. What is received
and not done stays with its key, and the new consumer's deliveries of it are dropped: nothing comes
twice.

What a restart begins with is in the checkpoint, where handlers or ``batches()`` have one; else it
is the ``parallelism`` that is configured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, Protocol

from keyshard.broker.port import Admin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.budget import window_budget
from keyshard.core.ring.assignment import (
    Assignment,
    fewest_moved,
    joined,
    moved_ranges,
    moved_slots,
    reassign,
)
from keyshard.core.ring.balance import Balance, balance
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.errors import DrainTimeoutError, KeyShardError, RescaleError
from keyshard.threads import owned_by
from keyshard.worker.receiver import OwnedRange, RangeConsumer
from keyshard.worker.worker import Worker


class Step(Enum):
    """Where a rescale is."""

    DRAIN = auto()
    """1 and 2: nothing has changed hands."""
    EXCHANGE = auto()
    """3 to 5."""
    ADOPT = auto()
    """6."""
    RESTORE = auto()
    """The hash ranges of the old assignment that have no consumer are subscribed again."""
    MOVED = auto()
    """The end: the new assignment."""
    KEPT = auto()
    """The end: the old assignment."""
    LOST = auto()
    """The end: parts of the ring have no consumer, or the window does not fit them. The source
    ends."""


class Follows(NamedTuple):
    """What follows on a step."""

    done: Step
    failed: Step


TRANSITIONS: Mapping[Step, Follows] = {
    Step.DRAIN: Follows(done=Step.EXCHANGE, failed=Step.KEPT),
    Step.EXCHANGE: Follows(done=Step.ADOPT, failed=Step.RESTORE),
    Step.ADOPT: Follows(done=Step.MOVED, failed=Step.LOST),
    Step.RESTORE: Follows(done=Step.KEPT, failed=Step.LOST),
}
"""Steps that are not here are ends."""

DRAIN_LOOK_S = 0.1
"""Longest time until a drain notices that the source has ended, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocking:
    """What a drain waits for: a message that a handler has not returned from."""

    key: str | None
    message_id: str
    running_s: float


class Drainable(Protocol):
    """What works on keys; called by the thread that rescales."""

    def hold(self, slots: Sequence[HashRange]) -> None:
        """Begin nothing more of keys that lie there, beside those that are held already."""

    def wait_idle(self, timeout_s: float) -> Blocking | None:
        """Wait until nothing of held keys is worked on; else the longest that still is."""

    def reassign(self, owners: Sequence[int]) -> None:
        """Take the owner of each slot; what waits goes with its key."""

    def resume(self) -> None:
        """Begin everything again."""


@dataclass(frozen=True, slots=True)
class Pause:
    """How long nothing was received for one hash range of the new assignment."""

    range_index: int
    hash_range: HashRange
    pause_ms: float
    """From the intent until it was subscribed in every topic partition, milliseconds."""


@dataclass(frozen=True, slots=True)
class RescaleReport:
    """What a rescale did."""

    epoch: int
    """Generation of the assignment; as before when nothing had to change."""
    ranges_before: int
    ranges_after: int
    moved_slots: int
    """Slots of the ring that have another owner now."""
    moved_fraction: float
    """The same as a part of the ring."""
    optimum_fraction: float | None
    """The smallest part that could have moved; ``None`` for a balance, which moves load."""
    consumers: int
    """Hash ranges, each with a consumer in every topic partition."""
    pauses: tuple[Pause, ...]
    """Of each hash range that was subscribed anew."""
    duration_ms: float
    """All of it, milliseconds: the broker's limits are asked for first, then the ranges move."""
    balance: Balance | None = None
    """What a balance found; ``None`` for a number of ranges."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the assignment of a balance."""
        result = asdict(self)
        result["pauses"] = [asdict(pause) | {"hash_range": str(pause.hash_range)}
                            for pause in self.pauses]  # fmt: skip
        if self.balance is not None:
            del result["balance"]["assignment"]
        return result


class Rescaler:
    """Moves ranges between owners; one change at a time, and none while discovery opens consumers.

    Args:
        worker: Hosts the ranges.
        config: The source.
        admin: Admin REST interface, where there is one.
        work: What works on keys.
        drain_timeout_s: Longest wait for handlers that work on keys that move, seconds.
    """

    def __init__(
        self, worker: Worker, config: SourceConfig, admin: Admin | None, *, work: Drainable,
        drain_timeout_s: float,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._range_consumers = worker.range_consumers
        self._config = config
        self._admin = admin
        self._work = work
        self._drain_timeout_s = drain_timeout_s

    def rescale(self, count: int) -> RescaleReport:
        """Spread the ring over another number of ranges; as little as possible changes hands.

        Raises:
            ConfigError: ``count`` is not 1 to 65,536.
            DrainTimeoutError: A handler did not end in time; everything is as it was.
            RescaleError: The broker did not let the ranges change hands; the old owners have them,
                or the source ends with this error.
        """
        return self._change(lambda now: (reassign(now, count), fewest_moved(now, count), None))

    def balance(self) -> RescaleReport:
        """Give the ranges equal loads, as measured since the source runs.

        Raises:
            DrainTimeoutError, RescaleError: As for :meth:`rescale`.
        """
        load = self._worker.load()

        def balanced(now: Assignment) -> tuple[Assignment, None, Balance]:
            found = balance(now, load)
            return found.assignment, None, found

        return self._change(balanced)

    def _change(
        self,
        decide: Callable[[Assignment], tuple[Assignment, int | None, Balance | None]],
    ) -> RescaleReport:
        with self._worker.changing, owned_by(self._worker.shared.fail):
            began_s = time.monotonic()
            self._worker.shared.check()
            now = self._range_consumers.assignment
            new, fewest, balanced = decide(now)
            pauses = self._move(new) if new != now else ()
            moved = moved_slots(now, new)
            report = RescaleReport(
                self._range_consumers.epoch, len(now), len(new), moved, moved / RING_SIZE,
                None if fewest is None else fewest / RING_SIZE, sum(map(len, new)), pauses,
                round(1_000 * (time.monotonic() - began_s), 3), balanced,
            )  # fmt: skip
        _log.info(
            "%d ranges -> %d in epoch %d: %.1f %% of the ring moved, longest pause %.0f ms",
            report.ranges_before, report.ranges_after, report.epoch, 100 * report.moved_fraction,
            max((pause.pause_ms for pause in pauses), default=0.0),
        )  # fmt: skip
        return report

    def _move(self, new: Assignment) -> tuple[Pause, ...]:
        consumers, work = self._range_consumers, self._work
        budget = window_budget(self._config, self._admin, consumers.consumed, sum(map(len, new)))
        consumers.queue_max = budget.queue_max
        stays = {(owner, part) for owner, ranges in enumerate(new) for part in ranges}
        leaving = {
            owned_range
            for owned_range in consumers.owned
            if (owned_range.range_index, owned_range.hash_range) not in stays
        }
        moving = moved_ranges(consumers.assignment, new)
        began_s = time.monotonic()
        opened: list[RangeConsumer] = []

        def drain() -> None:
            for slots in moving, joined({owned_range.hash_range for owned_range in leaving}):
                work.hold(slots)
                self._drain(began_s)

        def exchange() -> None:
            consumers.close(leaving)
            consumers.epoch += 1
            opened.extend(consumers.subscribe(self._missing(new)))

        def adopt() -> None:
            consumers.assignment = new
            work.reassign(self._worker.adopt(new, budget))
            consumers.serve(opened)

        actions = {
            Step.DRAIN: drain,
            Step.EXCHANGE: exchange,
            Step.ADOPT: adopt,
            Step.RESTORE: self._restore,
        }
        consumers.suspend(leaving)
        try:
            end, errors = _walk(actions)
            if end is not Step.MOVED:
                self._raise(end, errors)
        finally:
            consumers.suspend(())
            work.resume()
        return _pauses(opened, began_s)

    def _drain(self, began_s: float) -> None:
        deadline_s = began_s + self._drain_timeout_s
        while True:
            self._worker.shared.check()
            left_s = deadline_s - time.monotonic()
            blocking = self._work.wait_idle(max(0.0, min(DRAIN_LOOK_S, left_s)))
            if blocking is None:
                return
            if left_s <= 0:
                raise DrainTimeoutError(
                    f"No range changed hands: the handler of key {blocking.key!r} has worked on "
                    f"message {blocking.message_id} for {blocking.running_s:.1f} s and did not end "
                    f"within {self._drain_timeout_s:g} s. Everything goes on as before. Make the "
                    "handler end, or raise drain_timeout_s.",
                    key=blocking.key,
                    message_id=blocking.message_id,
                    running_s=blocking.running_s,
                )

    def _restore(self) -> None:
        """Subscribe what the assignment of before lacks."""
        consumers = self._range_consumers
        consumers.epoch += 1
        consumers.serve(consumers.subscribe(self._missing(consumers.assignment)))

    def _raise(self, end: Step, errors: Mapping[Step, BaseException]) -> NoReturn:
        """Tell who rescales why the ranges are as before, or why the source ends.

        Args:
            end: How it ended.
            errors: What failed, by step.
        """
        *_, newest = errors.values()
        why = errors.get(Step.EXCHANGE, newest)
        if end is Step.LOST:
            if Step.ADOPT in errors:
                what = f"The ranges changed hands, and the window did not follow: {_text(newest)}"
            else:
                what = (
                    f"The ranges did not change hands ({_text(why)}), and the previous "
                    f"owners could not take them back: {_text(newest)}. Parts of the ring have no "
                    "consumer"
                )
            error = RescaleError(f"{what}, so the source ends. Nothing is lost; start it again.")
            if not isinstance(newest, KeyShardError):
                _log.error("a rescale failed unexpectedly", exc_info=newest)
            self._worker.shared.fail(error)
            raise error from newest
        if Step.DRAIN in errors or not isinstance(why, KeyShardError):
            raise why
        raise RescaleError(
            f"The ranges did not change hands: {why.message} The owners of before have them "
            "again. Check the broker, then rescale once more."
        ) from why

    def _missing(self, assignment: Assignment) -> list[OwnedRange]:
        consumers = self._range_consumers
        owned = {(one.topic_partition, one.range_index, one.hash_range) for one in consumers.owned}
        return [
            owned_range
            for owned_range in consumers.owned_ranges(consumers.consumed, assignment)
            if (owned_range.topic_partition, owned_range.range_index, owned_range.hash_range)
            not in owned
        ]


def _text(error: BaseException) -> str:
    """An error as a part of a sentence."""
    if isinstance(error, KeyShardError):
        return error.message.rstrip(".")
    return f"unexpectedly, {error!r}"


def _pauses(opened: Sequence[RangeConsumer], began_s: float) -> tuple[Pause, ...]:
    """The pause of each hash range: it ends with its last topic partition."""
    ends: dict[tuple[int, HashRange], float] = {}
    for one in opened:
        name = one.owned_range.range_index, one.owned_range.hash_range
        ends[name] = max(ends.get(name, 0.0), one.subscribed_s)
    return tuple(
        Pause(*name, round(1_000 * (end_s - began_s), 3)) for name, end_s in sorted(ends.items())
    )


def _walk(
    actions: Mapping[Step, Callable[[], None]],
) -> tuple[Step, dict[Step, BaseException]]:
    """Go from step to step until an end; which, and what failed on the way."""
    step, errors = Step.DRAIN, dict[Step, BaseException]()
    while step in TRANSITIONS:
        follows = TRANSITIONS[step]
        try:
            actions[step]()
        except BaseException as exc:  # noqa: BLE001 - told when the walk has ended
            errors[step] = exc
            step = follows.failed
        else:
            step = follows.done
    return step, errors
