"""The load of slots and keys, in bounded memory.

Each of the 65,536 slots has a counter. Of the keys, only frequent ones are kept. If there is no
room for another key, all counts are reduced by their median, and half of the keys leave. A key with
more than 1/``KEYS_MAX`` of the messages never leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.key_slot import possible_slots

KEYS_MAX = 1_024
"""Number of frequent keys that are certain to be kept; twice as many are counted."""
MESSAGES_MAX = 4_000_000
"""Number of messages after which all counts are halved, so that recent messages dominate."""


class SlotLoad:
    """Counts messages by slot, and by frequent key. Not thread-safe.

    Args:
        messages_max: Messages after which all counts are halved; ``None``: ``MESSAGES_MAX``.
    """

    def __init__(self, messages_max: int | None = None) -> None:
        self._messages_max = messages_max or MESSAGES_MAX
        self._slots = array("Q", bytes(8 * RING_SIZE))
        self._keys: dict[str, int] = {}
        self.messages = 0
        """Number of counted messages, after halving."""

    @property
    def slots(self) -> Sequence[int]:
        """Messages of each slot."""
        return self._slots

    def add(self, slot: int, messages: int = 1, key: str | None = None) -> None:
        """Count messages of one slot.

        Args:
            slot: Slot of the messages.
            messages: Number of messages.
            key: Their routing key, if known.
        """
        self._slots[slot] += messages
        self.messages += messages
        if key is not None:
            self._keys[key] = self._keys.get(key, 0) + messages
            if len(self._keys) > 2 * KEYS_MAX:
                self._drop_rare()
        if self.messages > self._messages_max:
            self.halve()

    def hottest_keys(self) -> list[tuple[str, int]]:
        """Return the known most frequent keys, and a lower bound of the messages of each."""
        return sorted(self._keys.items(), key=lambda item: (-item[1], item[0]))

    def hot_keys(self, count_max: int, share_min: float) -> list[tuple[str, float]]:
        """Return the most frequent keys, and a lower bound of the share of each.

        Args:
            count_max: Maximum number of keys.
            share_min: Smallest share of the messages.
        """
        least = max(1.0, share_min * self.messages)
        known = ((key, count) for key, count in self._keys.items() if count >= least)
        hottest = nlargest(count_max, known, key=itemgetter(1))
        return [(key, count / self.messages) for key, count in hottest]

    def keys_in(self, slot: int) -> list[str]:
        """Return frequent keys of one slot, the most frequent first."""
        return [key for key, _ in self.hottest_keys() if slot in possible_slots(key)]

    def copy(self) -> SlotLoad:
        """Return an independent copy."""
        copied = SlotLoad(self._messages_max)
        copied._slots = self._slots[:]
        copied._keys = dict(self._keys)
        copied.messages = self.messages
        return copied

    def _drop_rare(self) -> None:
        median = sorted(self._keys.values())[len(self._keys) // 2]
        self._keys = {key: count - median for key, count in self._keys.items() if count > median}

    def halve(self) -> None:
        """Halve all counts, so that later messages count more than those so far."""
        self._slots = array("Q", [count // 2 for count in self._slots])
        self._keys = {key: count // 2 for key, count in self._keys.items() if count > 1}
        self.messages = sum(self._slots)
