"""Size of a consumer's client queue, in messages: memory that no window counts.

:class:`ClientQueue` sizes a queue that keeps the size it was made with. :class:`SentAhead` sizes
one that changes with every grant, because its client speaks the protocol itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MESSAGE_BYTES_GUESS = 10_000
"""Size of a message as long as none was seen, bytes."""
FIRST_MIN = 20
"""Messages that a queue begins with although so many of the guessed size do not fit, if so many
empty ones do: of two or three the broker waits for the client after every entry."""
POLLED_MAX = 30
"""Messages up to which a queue is taken message by message. A round of the client's batch receive
waits for more while the queue is not full, and so small a queue has many consumers beside it."""
MESSAGE_OVERHEAD_BYTES = 1_024
"""Memory that a message takes in the client beside its payload, bytes."""
SHRINK_MIN = 1.5
"""Factor from which a smaller queue is worth a new subscription."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest delivery in the average size."""
SMALLER_WEIGHT = 0.125
"""The same where it is smaller, and the queue is to grow: large messages may come again."""
RAW_ENTRY_BYTES = 300
"""Memory of an entry that is not decoded yet, beside its bytes."""


@dataclass(slots=True)
class ClientQueue:
    """Size of one consumer's queue, from its share of a budget and the messages it receives.

    It begins with a guess, and larger messages make it smaller. It never grows: that would take a
    new subscription, with everything delivered again, at every start.
    """

    bytes_max: int
    """Memory that the queue may take, bytes."""
    messages_max: int
    """Messages that the queue may hold, however small they are."""
    adapts: bool = False
    """Whether the client sizes its queue by itself: then nothing is decided here."""
    size: int = field(init=False)
    """Messages that the client may ask for ahead."""
    _message_bytes: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.adapts:
            self.size = self.messages_max
        else:
            self.size = max(self._fitting(MESSAGE_BYTES_GUESS), min(FIRST_MIN, self._fitting(0)))

    @property
    def polled(self) -> bool:
        """Whether messages are taken one by one: then a reconnect may lie between any two."""
        return self.size <= POLLED_MAX

    def suits(self, messages: int, size_bytes: int) -> bool:
        """Take a delivery into account; whether ``size`` stays. Otherwise subscribe anew.

        Args:
            messages: Messages of the delivery, at least 1.
            size_bytes: Memory of their values, keys and properties, bytes.
        """
        if self.adapts:
            return True
        newest = size_bytes / messages
        before = self._message_bytes or newest
        self._message_bytes = before + (newest - before) * NEWEST_WEIGHT
        size = self._fitting(self._message_bytes)
        if size * SHRINK_MIN > self.size:
            return True
        self.size = size
        return False

    def _fitting(self, message_bytes: float) -> int:
        fitting = int(self.bytes_max / (message_bytes + MESSAGE_OVERHEAD_BYTES))
        return max(1, min(self.messages_max, fitting))


@dataclass(slots=True)
class SentAhead:
    """Number of messages that a broker may send ahead within a share of memory.

    It begins small, and at most doubles with each delivery: before, nobody knows how large messages
    are. A larger message counts at once, a smaller one little by little.
    """

    messages_max: int
    """Messages that may be sent ahead, however small they are."""
    bytes_max: int
    """Memory that they may take, bytes; one message may take more."""
    size: int = 1
    """Messages that may be sent ahead now."""
    _message_bytes: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.size = max(1, min(self.size, self.messages_max))

    def measure(self, messages: int, size_bytes: int) -> int:
        """Take a delivery into account; the size from now on.

        Args:
            messages: Messages of the delivery, at least 1.
            size_bytes: Memory that they took before they were decoded.
        """
        newest, before = size_bytes / messages, self._message_bytes
        self._message_bytes += (newest - before) * (1.0 if newest > before else SMALLER_WEIGHT)
        fitting = min(self.messages_max, int(self.bytes_max / max(1.0, self._message_bytes)))
        self.size = max(1, min(fitting, 2 * max(self.size, messages)))
        return self.size
