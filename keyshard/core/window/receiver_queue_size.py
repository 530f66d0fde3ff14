"""Size of a consumer's client queue, in messages. The window does not count this memory.

:class:`ReceiverQueueSize` is for clients whose queue has a fixed size. :class:`PrefetchSize` is for
the client that implements the protocol itself and changes the size with every grant of permits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MESSAGE_BYTES_GUESS = 10_000
"""Assumed size of a message before one was received, bytes."""
FIRST_MIN = 20
"""Smallest initial queue, in messages, if that many empty messages fit. With two or three, the
broker waits for the client after every entry."""
POLLED_MAX = 30
"""Largest queue that is received message by message. The client's batch receive waits while the
queue is not full, and with queues this small there are many other consumers."""
MESSAGE_OVERHEAD_BYTES = 1_024
"""Memory of a message in the client beside its payload, bytes."""
SHRINK_MIN = 1.5
"""Shrink factor that justifies a new subscription."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest delivery in the average size."""
SMALLER_WEIGHT = 0.125
"""Weight of a delivery with smaller messages, which lets the queue grow. Low, because large
messages may come again."""
RAW_ENTRY_BYTES = 300
"""Memory of an entry before decoding, beside its bytes."""


@dataclass(slots=True)
class ReceiverQueueSize:
    """Size of one consumer's queue, from its share of a budget and the messages it receives.

    The size begins with a guess and shrinks if messages are larger. It never grows: that would need
    a new subscription, and redelivery of everything, at every start.
    """

    bytes_max: int
    """Most memory of the queue, bytes."""
    messages_max: int
    """Most messages in the queue, however small."""
    adapts: bool = False
    """Whether the client sizes its own queue; then ``size`` is constant."""
    size: int = field(init=False)
    """Messages that the client may prefetch."""
    _message_bytes: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.adapts:
            self.size = self.messages_max
        else:
            self.size = max(self._fitting(MESSAGE_BYTES_GUESS), min(FIRST_MIN, self._fitting(0)))

    @property
    def polled(self) -> bool:
        """Whether messages are received one by one; then a reconnect may happen between any two."""
        return self.size <= POLLED_MAX

    def suits(self, messages: int, size_bytes: int) -> bool:
        """Count a delivery, and return whether ``size`` stays. If not, the caller must resubscribe.

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
class PrefetchSize:
    """Number of messages that a broker may send ahead within a share of memory.

    The number begins small, because the size of messages is unknown, and at most doubles with each
    delivery. Larger messages reduce it at once; smaller ones raise it gradually.
    """

    messages_max: int
    """Most messages to send ahead, however small."""
    bytes_max: int
    """Most memory of these messages, bytes; a single message may exceed it."""
    size: int = 1
    """Messages that the broker may send ahead now."""
    _message_bytes: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.size = max(1, min(self.size, self.messages_max))

    def measure(self, messages: int, size_bytes: int) -> int:
        """Count a delivery, and return the new size.

        Args:
            messages: Messages of the delivery, at least 1.
            size_bytes: Memory of the messages before decoding, bytes.
        """
        newest, before = size_bytes / messages, self._message_bytes
        self._message_bytes += (newest - before) * (1.0 if newest > before else SMALLER_WEIGHT)
        fitting = min(self.messages_max, int(self.bytes_max / max(1.0, self._message_bytes)))
        self.size = max(1, min(fitting, 2 * max(self.size, messages)))
        return self.size
