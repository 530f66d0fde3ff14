"""Who owns which hash range at any time of a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.testing.verify.history import Event, parse_range

Problem = tuple[str, tuple[Event, ...]]
"""What is wrong, a sentence without its full stop, and the events that show it."""

_RING = split_ring(1)[0]


class Owners:
    """The owners of every topic partition, or of all together where the events name none."""

    def __init__(self) -> None:
        self._scopes: defaultdict[tuple[str | None, int | None], _Scope] = defaultdict(_Scope)

    @property
    def known(self) -> bool:
        """Whether anybody gained a range yet."""
        return bool(self._scopes)

    def follow(self, event: Event) -> list[Problem]:
        """Take the next event; says what is wrong with a gain. Others than of ranges pass by."""
        if event.kind == "range_gained":
            return list(self._scopes[event.topic, event.partition].gain(event))
        if event.kind == "range_lost":
            self._scopes[event.topic, event.partition].lose(event)
        elif event.kind == "crashed":
            for scope in self._scopes.values():
                scope.crash(event)
        return []

    def gaps(self) -> list[Problem]:
        """What has no owner at the end, and should have one."""
        return [problem for scope in self._scopes.values() for problem in scope.gaps()]

    def own(self, event: Event, slot: int) -> bool:
        """Whether the event's worker owns the slot; true where nothing says who owns it."""
        names = ((event.topic, event.partition), (event.topic, None), (None, None))
        scopes = [self._scopes[name] for name in names if name in self._scopes]
        return not scopes or any(scope.owns(event, slot) for scope in scopes)


@dataclass(slots=True)
class _Scope:
    held: dict[tuple[str | None, str | None], Event] = field(default_factory=dict)
    """The gain of each (worker, range) that is held now."""
    gains: list[Event] = field(default_factory=list)
    epochs: list[tuple[int, int, Event]] = field(default_factory=list)
    """First slot, last slot and their last gain; disjoint."""
    crashed: list[tuple[Event, int]] = field(default_factory=list)
    """Gains that a crash ended, with the number of gains until then."""
    settled: bool = False
    """Whether ``gap`` is that of the last gain."""
    gap: HashRange | None = None
    """What had no owner after the last gain before something was lost."""

    def gain(self, event: Event) -> Iterator[Problem]:
        gained = _range(event)
        for name, other in self.held.items():
            if name != (event.worker, event.range) and _overlap(gained, _range(other)):
                yield (
                    f"{event.worker} gained {gained} while {other.worker} held {other.range}",
                    (other, event),
                )
        yield from self._fence(event, gained)
        self.held[event.worker, event.range] = event
        self.gains.append(event)
        self.settled = False

    def _fence(self, event: Event, gained: HashRange) -> Iterator[Problem]:
        rest: list[tuple[int, int, Event]] = []
        for first, last, before in self.epochs:
            if last < gained.start or first > gained.end:
                rest.append((first, last, before))
                continue
            if _stale(event, before):
                then = f"{before.worker} gained {before.range} in epoch {before.epoch}"
                yield (
                    f"{event.worker} gained {gained} in epoch {event.epoch} after {then}",
                    (before, event),
                )
            if first < gained.start:
                rest.append((first, gained.start - 1, before))
            if last > gained.end:
                rest.append((gained.end + 1, last, before))
        self.epochs = [*rest, (gained.start, gained.end, event)]

    def lose(self, event: Event) -> None:
        self._settle()
        self.held.pop((event.worker, event.range), None)

    def crash(self, event: Event) -> None:
        self._settle()
        for name in [name for name in self.held if event.worker in {None, name[0]}]:
            self.crashed.append((self.held.pop(name), len(self.gains)))

    def _settle(self) -> None:
        if not self.settled:
            self.gap = _gap(self.held.values(), _RING)
            self.settled = True

    def gaps(self) -> Iterator[Problem]:
        self._settle()
        if self.gap is not None and self.gains:
            last = self.gains[-1]
            change = f"{last.worker} gained {last.range}"
            yield f"{self.gap} had no owner after the last change, when {change}", (last,)
        for lost, gains in self.crashed:
            gap = _gap(self.gains[gains:], _range(lost))
            if gap is not None:
                yield f"{gap} had no owner after {lost.worker} crashed", (lost,)

    def owns(self, event: Event, slot: int) -> bool:
        if (event.worker, event.range) in self.held:
            return True
        return any(
            name[0] == event.worker and slot in _range(gain) for name, gain in self.held.items()
        )


def _range(event: Event) -> HashRange:
    return parse_range(event.range or "")


def _overlap(one: HashRange, other: HashRange) -> bool:
    return one.start <= other.end and other.start <= one.end


def _stale(event: Event, before: Event) -> bool:
    """Whether a range is gained in an epoch that came to an end with another gain."""
    if event.epoch is None or before.epoch is None:
        return False
    other = event.worker != before.worker
    return event.epoch < before.epoch or (other and event.epoch == before.epoch)


def _gap(gains: Iterable[Event], whole: HashRange) -> HashRange | None:
    """The first part of a range that lies in no gained range."""
    at = whole.start
    for one in sorted(_range(event) for event in gains):
        if one.start > at:
            break
        at = max(at, one.end + 1)
    if at > whole.end:
        return None
    starts = [one.start - 1 for one in map(_range, gains) if one.start > at]
    return HashRange(at, min([whole.end, *starts]))
