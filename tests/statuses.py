"""A status of a running source, as tests of what shows it need one."""

from __future__ import annotations

from typing import Any

from keyshard.coordinator.progress import Progress
from keyshard.core.lanes.circuit import Circuit
from keyshard.core.lanes.timings import Timings


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
    } | changes


def partition_status(partition: int, **changes: Any) -> dict[str, Any]:
    """One topic partition of which the broker tells nothing."""
    return {
        "topic": "persistent://public/default/t",
        "partition": partition,
        "backlog": None,
        "covered": True,
        "gaps": [],
        "error": "",
        "ackHoles": None,
        "ackHolesMax": None,
        "replay": None,
        "replayMax": None,
    } | changes


def progress() -> Progress:
    """A window that has received nothing."""
    return {
        "ranges": 2,
        "topicPartitions": 1,
        "rowsReceived": 0,
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
        "ackHoles": 0,
        "holesSettled": 0,
        "entriesLost": 0,
        "rangesPaused": 0,
        "connectionError": "",
        "settlingError": "",
        "plannedBatches": 0,
        "entriesAcknowledged": 0,
        "entriesToAcknowledge": 0,
        "partitionsDiscovered": 0,
        "partitionsGone": 0,
        "discoveryError": "",
        "backlogEntries": None,
        "sourceWorkers": [],
    }


def status(**changes: Any) -> dict[str, Any]:
    """Two ranges over one topic partition."""
    return {
        "state": "running",
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
        "ranges": [
            range_status(0, hashRanges=["0-32767"]),
            range_status(1, hashRanges=["32768-65535"]),
        ],
        "partitions": [partition_status(0)],
        "parkedKeys": 0,
        "parked": [],
        "malformedLetters": 0,
        "counters": {
            "completed": 0,
            "failedAttempts": 0,
            "parked": 0,
            "rejected": 0,
            "deadLettered": 0,
            "observerErrors": 0,
        },
        "circuit": Circuit().status(0.0),
        "handlerSeconds": Timings().status(),
        "window": progress(),
        "brokerError": "",
    } | changes
