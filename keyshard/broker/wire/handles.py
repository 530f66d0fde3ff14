"""The consumers, readers and producers of one connection, by the ids that the broker uses.

Producers are asked for frames whenever the socket takes more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from keyshard.broker.wire.entries import RawEntry


class Handle(Protocol):
    """A consumer, reader or producer, as its connection sees it.

    All methods must return at once. The reading thread calls all except :meth:`next_frames`.
    """

    def arrived(self, handle_id: int, entries: Sequence[RawEntry]) -> None:
        """Accept entries."""

    def next_frames(self) -> bytes | bytearray:
        """Return the frames to send next; empty if there are none now.

        Any thread may call it, under the lock of the connection. It must not call the connection.
        """

    def receipts(self, commands: Sequence[Any]) -> None:
        """Accept send receipts: the broker has stored published entries."""

    def refused(self, command: Any) -> None:
        """Note that the broker refuses a published entry."""

    def lost(self, handle_id: int, *, ended: bool) -> None:
        """Note that the connection was lost, or that the broker ended the handle."""

    def migrated(self, handle_id: int, url: str) -> None:
        """Note that the topic moved to another cluster."""


class Handles:
    """Handles by id. Call every method under the lock of the connection, except :meth:`get`."""

    def __init__(self) -> None:
        self._known: dict[int, Handle] = {}
        self._ready: deque[int] = deque()
        """Ids of the handles that may have frames, the next one first."""

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def ready(self) -> bool:
        """Whether a handle may have frames."""
        return bool(self._ready)

    def add(self, handle_id: int, handle: Handle) -> None:
        """Register a handle."""
        self._known[handle_id] = handle

    def get(self, handle_id: int) -> Handle | None:
        """Return a registered handle."""
        return self._known.get(handle_id)

    def take_off(self, handle_id: int) -> Handle | None:
        """Remove and return a handle."""
        return self._known.pop(handle_id, None)

    def has_frames(self, handle_id: int) -> None:
        """Ask a handle for frames soon."""
        if handle_id in self._known and handle_id not in self._ready:
            self._ready.append(handle_id)

    def next_frames(self) -> bytes | bytearray:
        """Return the next frames; the handles take turns."""
        while self._ready:
            handle_id = self._ready.popleft()
            handle = self._known.get(handle_id)
            frames = handle.next_frames() if handle is not None else b""
            if frames:
                self._ready.append(handle_id)
                return frames
        return b""

    def clear(self) -> list[tuple[int, Handle]]:
        """Remove and return all handles."""
        known = list(self._known.items())
        self._known.clear()
        self._ready.clear()
        return known
