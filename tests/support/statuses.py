"""Statuses of a running source, for tests of the commands that show one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from keyshard.coordinator.progress import Progress
from keyshard.core.lanes.circuit_breaker import CircuitBreaker
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.recent_history import History
from keyshard.handlers.executors import shared_slots
from keyshard.observe.metrics import METRICS, Metric
from keyshard.observe.metrics_server import StatusCollector
from keyshard.observe.sink_status import SinkStatus
from keyshard.observe.status_types import Status
from keyshard.workers.status import WorkerStatus


def lag(**changes: Any) -> dict[str, Any]:
    """A lag of which nothing is known."""
    names = ("entries", "rows", "seconds", "brokerSeconds", "trend")
    return dict.fromkeys(names) | changes


def range_status(index: int, **changes: Any) -> dict[str, Any]:
    """One range that has nothing to do."""
    return {
        "index": index,
        "hashRanges": [],
        "owner": "here:1",
        "state": "idle",
        "waiting": 0,
        "inFlight": 0,
        "handled": 0,
        "oldestUnacknowledgedMillis": None,
        "blockedBy": None,
        "stalled": None,
        "reason": "",
        "shares": None,
    } | changes


def partition_status(partition: int, **changes: Any) -> dict[str, Any]:
    """A topic partition without facts from the broker."""
    return {
        "topic": "persistent://public/default/t",
        "partition": partition,
        "lag": lag(),
        "backlog": None,
        "covered": True,
        "gaps": [],
        "error": "",
        "stalled": None,
        "ackGaps": None,
        "ackGapsMax": None,
        "replay": None,
        "replayMax": None,
        "unknown": "no admin_url",
        "limitsAssumed": None,
    } | changes


def handler_slots(index: int, **changes: Any) -> dict[str, Any]:
    """A process of handlers that is free."""
    return {
        "index": index,
        "pid": 1,
        "host": "here",
        "hashRange": None,
        "state": "free",
        "total": 1,
        "used": 0,
        "waiting": None,
        "inFlight": 0,
        "runningSeconds": None,
        "handled": 0,
        "restarts": 0,
        "untakenCalls": None,
        "stalled": None,
    } | changes


def progress() -> Progress:
    """A window that has received nothing."""
    return {
        "ranges": 2,
        "topicPartitions": 1,
        "rowsReceived": 0,
        "entriesReceived": 0,
        "windowRows": 0,
        "windowFill": 0.0,
        "keepsUpTriggerMillis": None,
        "oldestUnacknowledgedMillis": None,
        "duplicatesDropped": 0,
        "misrouted": 0,
        "keyless": 0,
        "unreadable": 0,
        "corruptSkipped": 0,
        "encryptedSkipped": 0,
        "ackGaps": 0,
        "ackGapsResolved": 0,
        "entriesNotDue": 0,
        "entriesLost": 0,
        "rangesPaused": 0,
        "checkpointBytes": 0,
        "partitionsWithoutRoom": 0,
        "withoutRoomMillis": 0,
        "connectionError": "",
        "gapResolverError": "",
        "plannedBatches": 0,
        "entriesAcknowledged": 0,
        "entriesToAcknowledge": 0,
        "partitionsDiscovered": 0,
        "partitionsGone": 0,
        "segmentsWaiting": 0,
        "discoveryError": "",
        "backlogEntries": None,
        "sourceWorkers": [],
    }


def status(**changes: Any) -> Status:
    """Two ranges over one topic partition."""
    plain = {
        "version": 1,
        "kind": "handlers",
        "name": "s",
        "state": "running",
        "uptimeSeconds": 3.0,
        "newestError": None,
        "lag": lag(),
        "rates": {"received": None, "completed": None, "failedAttempts": None},
        "subscription": "s",
        "topics": ["persistent://public/default/t"],
        "topicsPattern": None,
        "serviceUrl": "pulsar://127.0.0.1:6650",
        "transport": "wire",
        "decoder": "compiled",
        "pid": 1,
        "host": "here",
        "epoch": 0,
        "lanes": 16,
        "workers": 4,
        "workersMax": 4,
        "executor": "threads",
        "handlerSlots": shared_slots(4, 0),
        "ranges": [
            range_status(0, hashRanges=["0-32767"]),
            range_status(1, hashRanges=["32768-65535"]),
        ],
        "partitions": [partition_status(0)],
        "parkedKeys": 0,
        "parked": [],
        "malformedDeadLetters": 0,
        "counters": {
            "completed": 0,
            "failedAttempts": 0,
            "parked": 0,
            "rejected": 0,
            "deadLettered": 0,
            "observerErrors": 0,
            "outputsPublished": 0,
            "outputsConfirmed": 0,
            "outputsFailed": 0,
        },
        "circuit": CircuitBreaker().status(0.0),
        "handlerSeconds": LatencyHistogram().status(),
        "rateLimit": None,
        "window": progress(),
        "hotKeys": [],
        "history": History().status(0.0),
        "brokerError": "",
    }
    return cast("Status", plain | changes)


def sink_status(**changes: Any) -> SinkStatus:
    """A sink that has sent nothing."""
    made = {
        "version": 1,
        "kind": "sink",
        "name": "bills",
        "state": "running",
        "uptimeSeconds": 3.0,
        "newestError": None,
        "sinkId": "bills",
        "topic": "persistent://public/default/t",
        "topics": [],
        "serviceUrl": "pulsar://127.0.0.1:6650",
        "transport": "wire",
        "deliveryGuarantee": "exactly-once",
        "pid": 1,
        "host": "here",
        "rates": {"published": None, "confirmed": None, "bytes": None},
        "counters": {
            "published": 0, "confirmed": 0, "failed": 0, "alreadyStored": 0, "entries": 0,
            "bytes": 0, "batches": 0,
        },
        "unconfirmed": {"messages": 0, "entries": 0, "bytes": 0, "oldestSeconds": None},
    } | changes  # fmt: skip
    return cast("SinkStatus", made)


def worker_status(**changes: Any) -> WorkerStatus:
    """A worker with one consumer that has received nothing."""
    made = {
        "version": 1,
        "kind": "worker",
        "name": "billing",
        "subscription": "billing",
        "state": "running",
        "uptimeSeconds": 3.0,
        "newestError": None,
        "serviceUrl": "pulsar://127.0.0.1:6650",
        "pid": 1,
        "host": "here",
        "source": {"pid": 2, "host": "there"},
        "consumers": [consumer_status("0-65535")],
        "waiting": {"entries": 0, "messages": 0, "bytes": 0},
        "kept": {"messages": 0, "bytes": 0},
    } | changes
    return cast("WorkerStatus", made)


def consumer_status(hash_range: str, **changes: Any) -> dict[str, Any]:
    """A consumer of a worker that has received nothing."""
    return {
        "topic": "persistent://public/default/t",
        "partition": 0,
        "hashRange": hash_range,
        "connected": True,
        "problem": "",
        "messages": 0,
        "bytes": 0,
    } | changes


def metrics_of(status: Mapping[str, Any], table: Sequence[Metric] = METRICS) -> str:
    """The answer of ``/metrics`` for a status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(lambda: status, table))
    return generate_latest(registry).decode()
