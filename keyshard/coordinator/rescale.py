"""Changes the assignment of a running source: the drain protocol.

::

    1. intent     consumers whose hash range or owner changes stop receiving
    2. drain      keys that get another owner begin no new message, and their running handlers
                  end; then the same for the other keys of those consumers, which run until
                  then; at the deadline the old assignment stays
    3. close      the receive threads close those consumers, which hands over acknowledgements
    4. subscribe  the new hash ranges in epoch + 1; retried while the broker reports a conflict or
                  is silent; those of a deleted topic when it is created again
    5. adopt      window and lanes follow; receiving and handlers continue

:data:`TRANSITIONS` names the step that follows each step on success and on failure.

If the hash range and the owner of a consumer stay, it is not touched and its keys continue. No
handler works on a key whose slot has no consumer here, because another process could own it then.
Messages that were received and are not done stay with their key. The new consumer's deliveries of
them are dropped, so that no message comes twice.

After a restart, the assignment comes from the checkpoint of handlers or ``batches()``. Without one,
it comes from the configured ``parallelism``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, Protocol

from keyshard.broker.admin.port import Admin
from keyshard.config.source import SourceConfig
from keyshard.consumers.consumers import Consumers
from keyshard.consumers.receiver import OwnedRange, RangeConsumer
from keyshard.coordinator.consumer_limits import check_consumer_limits
from keyshard.coordinator.recorded_rescale import Outcome, RecordedRescale
from keyshard.coordinator.startup import window_budget
from keyshard.core.position.entry import TopicPartition
from keyshard.core.rescale_history import DrainedMessage, Rescale, RescaleEnd
from keyshard.core.ring.assignment import (
    Assignment,
    fewest_moved,
    joined,
    moved_ranges,
    moved_slots,
    reassign,
)
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.core.ring.load_balance import Balance, balance
from keyshard.core.topic_segments import consumers_each
from keyshard.errors import DrainTimeoutError, KeyShardError, RescaleError
from keyshard.notebook import table
from keyshard.threads import owned_by


class Step(Enum):
    """Steps of a rescale."""

    DRAIN = auto()
    """1 and 2: no range has another owner yet."""
    CLOSE = auto()
    """3."""
    SUBSCRIBE = auto()
    """4."""
    ADOPT = auto()
    """5."""
    RESTORE = auto()
    """Hash ranges of the old assignment that have no consumer are subscribed again."""
    MOVED = auto()
    """End: the new assignment holds."""
    KEPT = auto()
    """End: the old assignment holds."""
    LOST = auto()
    """End: parts of the ring have no consumer, or the window does not fit them. The source ends."""


class Follows(NamedTuple):
    """The step that follows on success, and the one on failure."""

    done: Step
    failed: Step


TRANSITIONS: Mapping[Step, Follows] = {
    Step.DRAIN: Follows(done=Step.CLOSE, failed=Step.KEPT),
    Step.CLOSE: Follows(done=Step.SUBSCRIBE, failed=Step.RESTORE),
    Step.SUBSCRIBE: Follows(done=Step.ADOPT, failed=Step.RESTORE),
    Step.ADOPT: Follows(done=Step.MOVED, failed=Step.LOST),
    Step.RESTORE: Follows(done=Step.KEPT, failed=Step.LOST),
}
"""A step without a row is an end."""

DRAIN_LOOK_S = 0.1
"""Longest time until a drain notices that the source has ended, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocking:
    """A message whose handler a drain waits for."""

    key: str | None
    message_id: str
    running_s: float

    def status(self) -> DrainedMessage:
        """Return JSON values."""
        return {
            "key": self.key, "messageId": self.message_id,
            "runningSeconds": round(self.running_s, 1),
        }  # fmt: skip


class Drainable(Protocol):
    """Runs handlers on keys. The thread that rescales calls these methods."""

    def hold(self, slots: Sequence[HashRange]) -> None:
        """Begin no more messages of keys in ``slots``, nor in the slots of earlier calls."""

    def wait_idle(self, timeout_s: float) -> Blocking | None:
        """Wait at most ``timeout_s`` seconds until no handler works on a key in the held slots.

        Returns:
            ``None``, or the message whose handler has run longest.
        """

    def reassign(self, owners: Sequence[int]) -> None:
        """Take the new owner of each slot; waiting messages move with their key."""

    def resume(self) -> None:
        """Begin messages of all keys again."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Time for which a hash range of the new assignment received nothing."""

    range_index: int
    hash_range: HashRange
    pause_ms: float
    """From the intent until it was subscribed in every existing topic partition, milliseconds."""


@dataclass(frozen=True, slots=True)
class RescaleReport:
    """The result of a rescale."""

    epoch: int
    """Number of the assignment; unchanged if nothing had to change."""
    ranges_before: int
    ranges_after: int
    moved_slots: int
    """Slots of the ring that have another owner now."""
    moved_fraction: float
    """``moved_slots`` as a fraction of the ring."""
    optimum_fraction: float | None
    """The smallest fraction that could have moved; ``None`` for a balance, which moves load."""
    consumers: int
    """Number of hash ranges; each has a consumer in every topic partition."""
    pauses: tuple[Pause, ...]
    """One for each hash range that was subscribed again."""
    duration_ms: float
    """Total time, milliseconds, with the request for the broker's limits."""
    balance: Balance | None = None
    """Result of a balance; ``None`` for a rescale to a number of ranges."""

    def _repr_html_(self) -> str:
        least = self.optimum_fraction
        return table(
            "Rescale" if self.balance is None else "Balance",
            (
                ("ranges", f"{self.ranges_before:,} to {self.ranges_after:,}"),
                ("epoch", self.epoch),
                ("moved", f"{self.moved_fraction:.1%} of the ring"),
                ("least possible", None if least is None else f"{least:.1%} of the ring"),
                ("load", None if self.balance is None else self.balance),
                (
                    "longest pause",
                    f"{_longest_ms(self.pauses):.0f} ms",
                ),
                ("duration", f"{self.duration_ms:.0f} ms"),
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values. ``balance`` has no field ``assignment`` in them."""
        result = asdict(self)
        result["pauses"] = [asdict(pause) | {"hash_range": str(pause.hash_range)}
                            for pause in self.pauses]  # fmt: skip
        if self.balance is not None:
            del result["balance"]["assignment"]
        return result


class Rescaler:
    """Moves ranges between owners.

    Only one change runs at a time, and none while discovery opens consumers.

    Args:
        consumers: Hosts the ranges.
        config: The source.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        work: Runs the handlers.
        drain_timeout_s: Longest wait for handlers of keys that move, seconds.
    """

    def __init__(
        self, consumers: Consumers, config: SourceConfig, admin: Admin | None, *, work: Drainable,
        drain_timeout_s: float,
    ) -> None:  # fmt: skip
        self._consumers = consumers
        self._range_consumers = consumers.range_consumers
        self._config = config
        self._admin = admin
        self._work = work
        self._drain_timeout_s = drain_timeout_s
        consumers.shared.history.rescales.drain_timeout_s = drain_timeout_s
        self._lost = False
        """Whether parts of the ring have no consumer after the newest change."""

    def rescale(self, count: int) -> RescaleReport:
        """Spread the ring over ``count`` ranges, and move as few slots as possible.

        Raises:
            ConfigError: ``count`` is not 1 to 65,536.
            DrainTimeoutError: A handler did not end in time. The old assignment holds.
            RescaleError: The broker refused the new consumers. The old assignment holds, or the
                source ends with this error.
        """
        return self._change(
            {"ranges": count}, lambda now: (reassign(now, count), fewest_moved(now, count), None)
        )

    def balance(self) -> RescaleReport:
        """Give the ranges equal loads, as measured since the start.

        Raises:
            DrainTimeoutError, RescaleError: As for :meth:`rescale`.
        """
        load = self._consumers.load()

        def balanced(now: Assignment) -> tuple[Assignment, None, Balance]:
            found = balance(now, load)
            return found.assignment, None, found

        return self._change({"balance": True}, balanced)

    def _change(
        self,
        asked: Mapping[str, int | bool],
        decide: Callable[[Assignment], tuple[Assignment, int | None, Balance | None]],
    ) -> RescaleReport:
        with self._consumers.changing, owned_by(self._consumers.shared.fail):
            began_s = time.monotonic()
            self._consumers.shared.check()
            now = self._range_consumers.assignment
            new, fewest, balanced = decide(now)
            moved, pauses = moved_slots(now, new), tuple[Pause, ...]()

            def outcome(error: BaseException | None) -> Outcome:
                epoch = self._range_consumers.epoch
                if self._lost:
                    return Outcome(RescaleEnd.LOST, epoch)
                if error is not None and (new == now or self._range_consumers.assignment != new):
                    return Outcome(RescaleEnd.KEPT, epoch)
                end = RescaleEnd.UNCHANGED if new == now else RescaleEnd.MOVED
                pause_ms = _longest_ms(pauses) if error is None else None
                return Outcome(end, epoch, moved / RING_SIZE, pause_ms)

            with RecordedRescale(
                self._consumers.shared,
                Rescale(asked, len(now), len(new), began_s, self._drain_timeout_s),
                outcome,
            ) as self._recorded:
                if new != now:
                    pauses = self._move(new)
            report = RescaleReport(
                self._range_consumers.epoch, len(now), len(new), moved, moved / RING_SIZE,
                None if fewest is None else fewest / RING_SIZE, sum(map(len, new)), pauses,
                round(1_000 * (time.monotonic() - began_s), 3), balanced,
            )  # fmt: skip
        _log.info(
            "%d ranges -> %d in epoch %d: %.1f %% of the ring moved, longest pause %.0f ms",
            report.ranges_before, report.ranges_after, report.epoch, 100 * report.moved_fraction,
            _longest_ms(pauses),
        )  # fmt: skip
        return report

    def _move(self, new: Assignment) -> tuple[Pause, ...]:
        consumers, work = self._range_consumers, self._work
        count = consumers_each(consumers.consumed, new)
        timeout_s = self._config.operation_timeout_ms / 1000
        self._recorded.phase("check")
        check_consumer_limits(self._admin, consumers.consumed, count, timeout_s)
        budget = window_budget(self._config, self._admin, consumers.consumed, count)
        stays = set(map(_place, consumers.owned_ranges(consumers.consumed, new)))
        leaving = {one for one in consumers.owned if _place(one) not in stays}
        moving = moved_ranges(consumers.assignment, new)
        began_s = time.monotonic()
        opened: list[RangeConsumer] = []

        def drain() -> None:
            for slots in moving, joined({owned_range.hash_range for owned_range in leaving}):
                work.hold(slots)
                self._drain(began_s)

        def subscribe() -> None:
            consumers.queue_max = budget.queue_max
            consumers.epoch += 1
            opened.extend(consumers.subscribe(self._missing(new), absent_too=True))

        def adopt() -> None:
            consumers.assignment = new
            work.reassign(self._consumers.adopt(new, budget))
            consumers.serve(opened)

        actions = {
            Step.DRAIN: drain,
            Step.CLOSE: lambda: consumers.close(leaving),
            Step.SUBSCRIBE: subscribe,
            Step.ADOPT: adopt,
            Step.RESTORE: self._restore,
        }
        consumers.suspend(leaving)
        try:
            end, errors = _walk(actions, lambda step: self._recorded.phase(step.name.lower()))
            if end is not Step.MOVED:
                self._raise(end, errors)
        finally:
            consumers.suspend(())
            work.resume()
        return _pauses(opened, began_s)

    def _drain(self, began_s: float) -> None:
        deadline_s = began_s + self._drain_timeout_s
        while True:
            self._consumers.shared.check()
            left_s = deadline_s - time.monotonic()
            blocking = self._work.wait_idle(max(0.0, min(DRAIN_LOOK_S, left_s)))
            self._recorded.waits_for(None if blocking is None else blocking.status())
            if blocking is None:
                return
            if left_s <= 0:
                raise DrainTimeoutError(
                    f"No range moved: the handler of key {blocking.key!r} has worked on message "
                    f"{blocking.message_id} for {blocking.running_s:.1f} s, and did not return "
                    f"within {self._drain_timeout_s:g} s. The source continues as before.",
                    "Raise drain_timeout_s, or make the handler faster.",
                    key=blocking.key,
                    message_id=blocking.message_id,
                    running_s=blocking.running_s,
                )

    def _restore(self) -> None:
        """Subscribe the missing hash ranges of the old assignment."""
        consumers = self._range_consumers
        consumers.queue_max = self._consumers.shared.window.budget.queue_max
        consumers.epoch += 1
        missing = self._missing(consumers.assignment)
        consumers.serve(consumers.subscribe(missing, absent_too=True))

    def _raise(self, end: Step, errors: Mapping[Step, BaseException]) -> NoReturn:
        """Raise the reason why the old assignment holds, or why the source ends.

        Args:
            end: The last step of the rescale.
            errors: The errors, by step.
        """
        *_, newest = errors.values()
        why = errors.get(Step.CLOSE, errors.get(Step.SUBSCRIBE, newest))
        if end is Step.LOST:
            self._lost = True
            if Step.ADOPT in errors:
                what = f"The ranges moved, but the window does not match them: {_text(newest)}"
            else:
                what = (
                    f"The ranges did not move ({_text(why)}), and the previous owners could not "
                    f"subscribe again: {_text(newest)}. Parts of the ring have no consumer"
                )
            error = RescaleError(
                f"{what}, so the source ends. Nothing is lost.", "Start the source again."
            )
            if not isinstance(newest, KeyShardError):
                _log.error("a rescale failed unexpectedly", exc_info=newest)
            self._consumers.shared.fail(error)
            raise error from newest
        if Step.DRAIN in errors or not isinstance(why, KeyShardError):
            raise why
        raise RescaleError(
            f"The ranges did not move: {why.problem} Their previous owners hold them again.",
            "Check the broker, then rescale again.",
        ) from why

    def _missing(self, assignment: Assignment) -> list[OwnedRange]:
        consumers = self._range_consumers
        owned = set(map(_place, consumers.owned))
        wanted = consumers.owned_ranges(consumers.consumed, assignment)
        return [one for one in wanted if _place(one) not in owned]


def _place(one: OwnedRange) -> tuple[TopicPartition, int, HashRange]:
    """Return what an owned range is in every epoch."""
    return one.topic_partition, one.range_index, one.hash_range


def _text(error: BaseException) -> str:
    """Format an error as a part of a sentence."""
    if isinstance(error, KeyShardError):
        return error.problem.rstrip(".")
    return f"unexpectedly, {error!r}"


def _longest_ms(pauses: Sequence[Pause]) -> float:
    return max((pause.pause_ms for pause in pauses), default=0.0)


def _pauses(opened: Sequence[RangeConsumer], began_s: float) -> tuple[Pause, ...]:
    """Return the pause of each hash range; it ends with its last topic partition."""
    ends: dict[tuple[int, HashRange], float] = {}
    for one in opened:
        name = one.owned_range.range_index, one.owned_range.hash_range
        if one.subscribed_s is not None:
            ends[name] = max(ends.get(name, 0.0), one.subscribed_s)
    return tuple(
        Pause(*name, round(1_000 * (end_s - began_s), 3)) for name, end_s in sorted(ends.items())
    )


def _walk(
    actions: Mapping[Step, Callable[[], None]], begin: Callable[[Step], None]
) -> tuple[Step, dict[Step, BaseException]]:
    """Run the actions of a rescale, step by step, until a step without an action is reached.

    Args:
        actions: The action of each step.
        begin: Called before the action of a step.

    Returns:
        That last step, and the errors by step.
    """
    step, errors = Step.DRAIN, dict[Step, BaseException]()
    while step in TRANSITIONS:
        follows = TRANSITIONS[step]
        begin(step)
        try:
            actions[step]()
        except BaseException as exc:  # noqa: BLE001 - raised when the walk has ended
            errors[step] = exc
            step = follows.failed
        else:
            step = follows.done
    return step, errors
