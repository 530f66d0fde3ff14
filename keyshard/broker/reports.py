"""Reports of a connection beside messages: its workers, topics, and segments of topics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from keyshard.core.topic_segments import SegmentGraph


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker that has consumers of a connection."""

    kind: str
    """Kind of worker, such as ``worker process``."""
    pid: int | None
    """Process id; ``None`` while there is no process."""
    host: str | None
    """Host of the process."""
    consumers: int
    since_s: float
    """Monotonic time since when the worker has been present or absent, in seconds."""
    restarts: int
    """Number of workers that were started in its place before."""
    keeps_content: bool
    """Whether it keeps the content of messages, with their keys."""


class TopicWatch(Protocol):
    """A standing request to report topics."""

    @property
    def is_open(self) -> bool:
        """Return whether it still reports. Once false, it stays false."""

    def close(self) -> None:
        """End it. Idempotent."""


class SegmentWatch(Protocol):
    """A standing request to report the segments of a scalable topic."""

    @property
    def is_open(self) -> bool:
        """Return whether it still reports. Once false, it stays false."""

    @property
    def graph(self) -> SegmentGraph:
        """The newest reported segments."""

    def close(self) -> None:
        """End it. Idempotent."""
