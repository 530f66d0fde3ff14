"""How many messages a consumer's client queue may hold: memory that no window counts."""

from __future__ import annotations

from dataclasses import dataclass, field

MESSAGE_BYTES_GUESS = 100_000
"""Size of a message as long as none was seen, bytes."""
MESSAGE_OVERHEAD_BYTES = 1_024
"""Memory that a message takes in the client beside its payload, bytes."""
GROWTH_MIN = 4
"""Factor from which a larger queue is worth a new subscription."""
SHRINK_MIN = 1.5
"""Factor from which a smaller queue is."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest delivery in the average size."""


@dataclass(slots=True)
class ClientQueue:
    """Size of one consumer's queue, from its share of a budget and the messages it receives.

    It begins small. The first delivery may make it larger, once; larger messages make it smaller
    at any time. So it never goes to and fro.
    """

    bytes_max: int
    """Memory that the queue may take, bytes."""
    messages_max: int
    """Messages that the queue may hold, however small they are."""
    size: int = field(init=False)
    """Messages that the client may ask for ahead."""
    _message_bytes: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.size = self._fitting(MESSAGE_BYTES_GUESS)

    def suits(self, messages: int, payload_bytes: int) -> bool:
        """Take a delivery into account; whether ``size`` stays. Otherwise subscribe anew.

        Args:
            messages: Messages of the delivery, at least 1.
            payload_bytes: Their payload, bytes.
        """
        newest = payload_bytes / messages
        first = self._message_bytes is None
        if self._message_bytes is None:
            self._message_bytes = newest
        self._message_bytes += (newest - self._message_bytes) * NEWEST_WEIGHT
        size = self._fitting(self._message_bytes)
        if (first and size >= self.size * GROWTH_MIN) or size * SHRINK_MIN <= self.size:
            self.size = size
            return False
        return True

    def _fitting(self, message_bytes: float) -> int:
        fitting = int(self.bytes_max / (message_bytes + MESSAGE_OVERHEAD_BYTES))
        return max(1, min(self.messages_max, fitting))
