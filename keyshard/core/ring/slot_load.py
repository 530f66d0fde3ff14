"""Which slots and which keys the messages of a source have: the load, in bounded memory.

Slots are counted one by one: there are 65,536. Of keys only the frequent ones are kept. When there
is no room for another, all counts become smaller by their median, and half of the keys leave; a key
that makes more than 1/``KEYS_MAX`` of the messages never does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.key_slot import possible_slots

KEYS_MAX = 1_024
"""Keys that are kept for sure, if they are frequent enough; twice as many are counted."""
MESSAGES_MAX = 4_000_000
"""Messages after which every count is halved, so that the load is that of the recent past."""


class SlotLoad:
    """Counts messages by slot, and those of the frequent keys. Not thread-safe."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * RING_SIZE))
        self._keys: dict[str, int] = {}
        self.messages = 0
        """Messages that are counted, those of the recent past."""

    @property
    def slots(self) -> Sequence[int]:
        """Messages of each slot."""
        return self._slots

    def add(self, slot: int, messages: int = 1, key: str | None = None) -> None:
        """Count messages of one slot.

        Args:
            slot: Where they lie on the ring.
            messages: How many.
            key: Their routing key, where it is known.
        """
        self._slots[slot] += messages
        self.messages += messages
        if key is not None:
            self._keys[key] = self._keys.get(key, 0) + messages
            if len(self._keys) > 2 * KEYS_MAX:
                self._drop_rare()
        if self.messages > MESSAGES_MAX:
            self._halve()

    def hottest_keys(self) -> list[tuple[str, int]]:
        """The most frequent keys that are known, and how many messages each has at least."""
        return sorted(self._keys.items(), key=lambda item: (-item[1], item[0]))

    def keys_in(self, slot: int) -> list[str]:
        """Frequent keys of one slot, the most frequent first."""
        return [key for key, _ in self.hottest_keys() if slot in possible_slots(key)]

    def copy(self) -> SlotLoad:
        """The load as it is now; it does not change with this one."""
        copied = SlotLoad()
        copied._slots = self._slots[:]
        copied._keys = dict(self._keys)
        copied.messages = self.messages
        return copied

    def _drop_rare(self) -> None:
        median = sorted(self._keys.values())[len(self._keys) // 2]
        self._keys = {key: count - median for key, count in self._keys.items() if count > median}

    def _halve(self) -> None:
        self._slots = array("Q", [count // 2 for count in self._slots])
        self._keys = {key: count // 2 for key, count in self._keys.items() if count > 1}
        self.messages = sum(self._slots)
