"""How many messages a consumer's client queue may hold: memory that no window counts."""

from __future__ import annotations

from dataclasses import dataclass, field

MESSAGE_BYTES_GUESS = 10_000
"""Size of a message as long as none was seen, bytes."""
LARGE_BYTES_GUESS = 100_000
"""The same where the queue can grow: of many consumers that begin with too much, all have it at
once, before the first of them has seen a message."""
FIRST_MIN = 20
"""Messages that a queue begins with although so many of the guessed size do not fit, if so many
empty ones do: of two or three the broker waits for the client after every entry."""
POLLED_MAX = 30
"""Messages up to which a queue is taken message by message. A round of the client's batch receive
waits for more while the queue is not full, and so small a queue has many consumers beside it."""
MESSAGE_OVERHEAD_BYTES = 1_024
"""Memory that a message takes in the client beside its payload, bytes."""
SHRINK_MIN = 1.5
"""Factor from which a smaller queue is worth a new subscription; and a larger one worth asking."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest delivery in the average size."""


@dataclass(slots=True)
class ClientQueue:
    """Size of one consumer's queue, from its share of a budget and the messages it receives.

    It begins with a guess, and larger messages make it smaller. It grows only where a client can
    ask for more: else that would take a new subscription, with everything delivered again, at every
    start. Where it can, it begins smaller.
    """

    bytes_max: int
    """Memory that the queue may take, bytes."""
    messages_max: int
    """Messages that the queue may hold, however small they are."""
    grows: bool = False
    """Whether the client can ask for more."""
    size: int = field(init=False)
    """Messages that the client may ask for ahead."""
    _message_bytes: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.grows:
            self.size = self._fitting(LARGE_BYTES_GUESS)
        else:
            self.size = max(self._fitting(MESSAGE_BYTES_GUESS), min(FIRST_MIN, self._fitting(0)))

    @property
    def polled(self) -> bool:
        """Whether messages are taken one by one: then a reconnect may lie between any two."""
        return self.size <= POLLED_MAX

    def suits(self, messages: int, payload_bytes: int) -> bool:
        """Take a delivery into account; whether ``size`` stays. Otherwise subscribe anew.

        Args:
            messages: Messages of the delivery, at least 1.
            payload_bytes: Their payload, bytes.
        """
        newest = payload_bytes / messages
        before = self._message_bytes or newest
        self._message_bytes = before + (newest - before) * NEWEST_WEIGHT
        size = self._fitting(self._message_bytes)
        if size * SHRINK_MIN > self.size:
            return True
        self.size = size
        return False

    def larger(self) -> int:
        """What the queue may grow to by now: at most twice its size; ``size`` where it may not."""
        size = self._fitting(self._message_bytes)
        return min(size, 2 * self.size) if size >= self.size * SHRINK_MIN else self.size

    def _fitting(self, message_bytes: float) -> int:
        fitting = int(self.bytes_max / (message_bytes + MESSAGE_OVERHEAD_BYTES))
        return max(1, min(self.messages_max, fitting))
