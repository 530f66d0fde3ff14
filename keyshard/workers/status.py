"""The status of a worker as plain JSON values; ``docs/status.md`` describes every field."""

from __future__ import annotations

from typing import TypedDict


class ConsumerStatus(TypedDict):
    """One consumer of a worker."""

    topic: str
    partition: int
    hashRange: str
    connected: bool
    problem: str
    messages: int
    bytes: int


class WaitingDeliveriesStatus(TypedDict):
    """Deliveries that the source has not asked for yet."""

    entries: int
    messages: int
    bytes: int


class KeptContentStatus(TypedDict):
    """Content that stays in the worker until tasks have fetched it."""

    messages: int
    bytes: int


class WorkerError(TypedDict):
    """The newest error; ``secondsAgo`` is ``None`` while the error persists."""

    error: str
    secondsAgo: float | None


class HostStatus(TypedDict):
    """The part of a worker's status that its ``ConsumerHost`` knows."""

    subscription: str
    consumers: list[ConsumerStatus]
    waiting: WaitingDeliveriesStatus
    kept: KeptContentStatus
    newestError: WorkerError | None


class SourceProcess(TypedDict):
    """The process of the source."""

    pid: int
    host: str


class WorkerStatus(HostStatus):
    """A worker that runs."""

    version: int
    kind: str
    name: str
    state: str
    uptimeSeconds: float
    serviceUrl: str
    pid: int
    host: str
    source: SourceProcess
