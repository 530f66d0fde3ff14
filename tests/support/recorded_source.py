"""A source on a broker that records a history, and the judgement of a history."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keyshard import KeyShardSource
from keyshard.broker.connect import connect_admin
from keyshard.broker.port import Broker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import Recorder


def held(events: Iterable[Event]) -> set[str]:
    """Let every checker judge a history; return the names of those that had something to judge."""
    verdicts = check(list(events))
    broken = [str(verdict) for verdict in verdicts if not verdict.holds]
    assert not broken, broken
    return {verdict.name for verdict in verdicts if verdict.checked}


class RecordedSource(KeyShardSource):
    """A source whose broker writes a history."""

    def record(self, connect: Callable[[], Broker], recorder: Recorder, epoch: int) -> None:
        """Write to a recorder; ``epoch``: where the epochs of this run begin in its history."""
        object.__setattr__(self, "_recorded", (connect, recorder, epoch))

    def coordinator(self) -> Coordinator:
        connect, recorder, epoch = self.__dict__["_recorded"]
        made = Coordinator(
            self,
            lambda: recorder.broker(connect(), lambda: epoch + made.epoch, self.subscription),
            connect_admin(self.how_to_connect()) if self.is_scalable else None,
        )
        object.__setattr__(self, "_made", made)
        return made
