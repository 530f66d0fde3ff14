"""Every metric of a running source, in one table; ``docs/metrics.md`` is made from it.

Write the document again with ``python -m keyshard.observe.metrics > docs/metrics.md``. Values are
read from :meth:`keyshard.KeyShardSource.status` when Prometheus asks;
:mod:`keyshard.observe.metrics_server` publishes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from keyshard.core.health import RangeState
from keyshard.observe.status_types import PartitionStatus, RangeStatus, Status

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""


class MetricKind(str, Enum):
    """How Prometheus treats a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """As Prometheus shows it, unit and ``_total`` included."""
    kind: MetricKind
    unit: str
    labels: tuple[str, ...]
    help: str
    read: Callable[[Status], Iterable[Sample]]
    """Samples of a status; none for what is not known. A histogram gives none: its status is
    ``handlerSeconds``."""


def _one(*path: str) -> Callable[[Status], Iterable[Sample]]:
    """The single value at a path of the status."""

    def read(status: Status) -> Iterable[Sample]:
        value: Any = status
        for name in path:
            value = value.get(name) if value is not None else None
        return [] if value is None else [((), float(value))]

    return read


def _ranges(value_of: Callable[[RangeStatus], float | None]) -> Any:
    """A value of each range."""

    def read(status: Status) -> Iterable[Sample]:
        for each in status["ranges"]:
            value = value_of(each)
            if value is not None:
                yield (str(each["index"]),), float(value)

    return read


def _states(status: Status) -> Iterable[Sample]:
    for each in status["ranges"]:
        for state in RangeState:
            yield (str(each["index"]), state.value), float(each["state"] == state.value)


def _partitions(value_of: Callable[[PartitionStatus], float | None]) -> Any:
    """A value of each topic partition."""

    def read(status: Status) -> Iterable[Sample]:
        for each in status["partitions"]:
            value = value_of(each)
            if value is not None:
                yield (each["topic"], str(each["partition"])), float(value)

    return read


def _seconds(millis: float | None) -> float | None:
    return None if millis is None else millis / 1000


_RANGE = ("range",)
_PARTITION = ("topic", "partition")
_GAUGE, _COUNTER = MetricKind.GAUGE, MetricKind.COUNTER

METRICS: tuple[Metric, ...] = (
    Metric("keyshard_ranges", _GAUGE, "ranges", (), "Hash ranges that the ring is cut into.",
           lambda status: [((), float(len(status["ranges"])))]),
    Metric("keyshard_lanes", _GAUGE, "lanes", (), "Keys worked on at the same time in a range.",
           _one("lanes")),
    Metric("keyshard_workers", _GAUGE, "workers", (), "Handlers that may run at the same time.",
           _one("workers")),
    Metric("keyshard_epoch", _GAUGE, "", (), "Number of the assignment; a rescale adds 1.",
           _one("epoch")),
    Metric("keyshard_range_state", _GAUGE, "", ("range", "state"),
           "1 for the state that a range is in, 0 for the others.", _states),
    Metric("keyshard_range_waiting_messages", _GAUGE, "messages", _RANGE,
           "Messages received and not handed to a handler yet.",
           _ranges(lambda each: each["waiting"])),
    Metric("keyshard_range_in_flight_messages", _GAUGE, "messages", _RANGE,
           "Messages that handlers work on.", _ranges(lambda each: each["inFlight"])),
    Metric("keyshard_range_oldest_unacknowledged_seconds", _GAUGE, "seconds", _RANGE,
           "Age of the oldest message held; missing without one.",
           _ranges(lambda each: _seconds(each["oldestUnacknowledgedMillis"]))),
    Metric("keyshard_window_messages", _GAUGE, "messages", (),
           "Messages received and not acknowledged yet.", _one("window", "windowRows")),
    Metric("keyshard_window_fill_ratio", _GAUGE, "ratio", (),
           "How full the fullest topic partition's share of the window is, 0 to 1.",
           _one("window", "windowFill")),
    Metric("keyshard_partition_backlog_entries", _GAUGE, "entries", _PARTITION,
           "Entries that the broker holds unacknowledged; needs admin_url.",
           _partitions(lambda each: each["backlog"])),
    Metric("keyshard_partition_covered", _GAUGE, "", _PARTITION,
           "1 while every slot of the ring has a connected consumer, else 0.",
           _partitions(lambda each: float(each["covered"]))),
    Metric("keyshard_partition_broker_error", _GAUGE, "", _PARTITION,
           "1 while the broker refuses a consumer or does not answer it, else 0.",
           _partitions(lambda each: float(bool(each["error"])))),
    Metric("keyshard_partition_ack_holes", _GAUGE, "holes", _PARTITION,
           "Gaps in what the broker has as acknowledged; needs admin_url.",
           _partitions(lambda each: each["ackHoles"])),
    Metric("keyshard_partition_ack_holes_limit", _GAUGE, "holes", _PARTITION,
           "Gaps that survive a restart of the broker; needs admin_url.",
           _partitions(lambda each: each["ackHolesMax"])),
    Metric("keyshard_partition_replay_entries", _GAUGE, "entries", _PARTITION,
           "Entries that wait at the broker for their range; needs admin_url.",
           _partitions(lambda each: each["replay"])),
    Metric("keyshard_partition_replay_entries_limit", _GAUGE, "entries", _PARTITION,
           "Such entries at which the broker stops all ranges; needs admin_url.",
           _partitions(lambda each: each["replayMax"])),
    Metric("keyshard_parked_keys", _GAUGE, "keys", (),
           "Keys whose messages go to the dead-letter topic until they are unparked.",
           _one("parkedKeys")),
    Metric("keyshard_circuit_open", _GAUGE, "", (),
           "1 while most keys fail at once and handlers pause, else 0.",
           lambda status: [((), float(status["circuit"]["state"] != "closed"))]),
    Metric("keyshard_circuit_openings_total", _COUNTER, "openings", (),
           "How often handlers paused because most keys failed at once.",
           _one("circuit", "openings")),
    Metric("keyshard_handler_seconds", MetricKind.HISTOGRAM, "seconds", (),
           "Time of one attempt of the handler.", lambda _status: ()),
    Metric("keyshard_messages_completed_total", _COUNTER, "messages", (),
           "Messages whose handler returned.", _one("counters", "completed")),
    Metric("keyshard_attempts_failed_total", _COUNTER, "attempts", (),
           "Attempts that raised, RetryLater included.", _one("counters", "failedAttempts")),
    Metric("keyshard_messages_parked_total", _COUNTER, "messages", (),
           "Messages of parked keys that went to the dead-letter topic.",
           _one("counters", "parked")),
    Metric("keyshard_messages_rejected_total", _COUNTER, "messages", (),
           "Messages that a handler or null_keys rejected.", _one("counters", "rejected")),
    Metric("keyshard_messages_dead_lettered_total", _COUNTER, "messages", (),
           "Messages written to the dead-letter topic, for whatever reason.",
           _one("counters", "deadLettered")),
    Metric("keyshard_observer_errors_total", _COUNTER, "calls", (),
           "Calls of observers that raised; the messages are not affected.",
           _one("counters", "observerErrors")),
    Metric("keyshard_redeliveries_dropped_total", _COUNTER, "messages", (),
           "Messages that the broker delivered again and that were dropped.",
           _one("window", "duplicatesDropped")),
    Metric("keyshard_messages_misrouted_total", _COUNTER, "messages", (),
           "Messages outside the range that received them: their producer batches by default.",
           _one("window", "misrouted")),
    Metric("keyshard_messages_keyless_total", _COUNTER, "messages", (),
           "Messages without a key.", _one("window", "keyless")),
    Metric("keyshard_messages_unreadable_total", _COUNTER, "messages", (),
           "Messages with a time, key or property that cannot be read.",
           _one("window", "unreadable")),
    Metric("keyshard_entries_corrupt_skipped_total", _COUNTER, "entries", (),
           "Entries that cannot be read and were acknowledged: on_corrupt is skip.",
           _one("window", "corruptSkipped")),
    Metric("keyshard_entries_encrypted_skipped_total", _COUNTER, "entries", (),
           "Encrypted entries that were acknowledged: on_encrypted is skip.",
           _one("window", "encryptedSkipped")),
)  # fmt: skip
"""In the order of the document."""


def document() -> str:
    """Text of ``docs/metrics.md``."""
    rows = "\n".join(
        f"| `{metric.name}` | {metric.kind.value} | {metric.unit or '-'} | "
        f"{', '.join(f'`{label}`' for label in metric.labels) or '-'} | {metric.help} |"
        for metric in METRICS
    )
    return _HEAD + rows + "\n"


_HEAD = """# Metrics

`source.run(handle, metrics_port=9464)` serves them on `http://127.0.0.1:9464/metrics` from its
call to its return. They are read from the status of the source when Prometheus asks; the default
registry of the process is not touched. What only the admin interface knows is missing without
`admin_url`.
`metrics_host="0.0.0.0"` lets others reach the port, as in a container; it has no password.

Beside them, for probes such as those of Kubernetes:

| path | 200 | 503, with the reason as text |
|---|---|---|
| `/livez` | also while it starts or stops, and while the broker is away | the run's own \
loop has not gone round for 60 s, which only a restart may mend |
| `/readyz` | it runs, and each of its consumers is connected to a broker that answers | it starts \
or stops, or a consumer is not connected, is refused, or has a broker that has left a ping without \
an answer for 5 s |

Every other path is 404.

This page is made from the table in `keyshard/observe/metrics.py`:
`python -m keyshard.observe.metrics > docs/metrics.md` writes it again.

| name | kind | unit | labels | |
|---|---|---|---|---|
"""

if __name__ == "__main__":
    sys.stdout.write(document())
