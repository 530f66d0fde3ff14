"""What a source has received and not acknowledged, field by field; see ``docs/options.md``."""

from __future__ import annotations

from typing import TypedDict


class WindowProgress(TypedDict):
    """What the window holds and has counted."""

    topicPartitions: int
    rowsReceived: int
    windowRows: int
    windowFill: float
    keepsUpTriggerMillis: int | None
    oldestUnacknowledgedMillis: int | None
    duplicatesDropped: int
    misrouted: int
    keyless: int
    unreadable: int
    corruptSkipped: int
    encryptedSkipped: int
    ackHoles: int
    holesSettled: int
    entriesLost: int
    plannedBatches: int


class DiscoveryProgress(TypedDict):
    """What came and went while it ran."""

    partitionsDiscovered: int
    partitionsGone: int
    discoveryError: str
    backlogEntries: int | None


class SourceWorker(TypedDict):
    """What has consumers of the source outside its process; ``pid`` and ``host`` are ``None`` while
    it is gone."""

    kind: str
    pid: int | None
    host: str | None
    consumers: int
    forSeconds: float
    restarts: int


class Progress(WindowProgress, DiscoveryProgress):
    """All of it, of one source; counts are since its start."""

    ranges: int
    rangesPaused: int
    connectionError: str
    settlingError: str
    entriesAcknowledged: int
    entriesToAcknowledge: int
    sourceWorkers: list[SourceWorker]
