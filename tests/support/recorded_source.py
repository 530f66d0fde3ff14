"""A source on a broker that records a history."""

from __future__ import annotations

from collections.abc import Callable

from keyshard import KeyShardSource
from keyshard.broker.port import Broker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.testing.verify.recorder import Recorder


class RecordedSource(KeyShardSource):
    """A source whose broker writes a history."""

    def record(self, connect: Callable[[], Broker], recorder: Recorder, epoch: int) -> None:
        """Write to a recorder; ``epoch``: where the epochs of this run begin in its history."""
        object.__setattr__(self, "_recorded", (connect, recorder, epoch))

    def coordinator(self) -> Coordinator:
        connect, recorder, epoch = self.__dict__["_recorded"]
        made = Coordinator(
            self, lambda: recorder.broker(connect(), lambda: epoch + made.epoch, self.subscription)
        )
        object.__setattr__(self, "_made", made)
        return made
