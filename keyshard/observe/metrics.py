"""Every metric of a source and of a sink, in two tables; ``docs/metrics.md`` is made from them.

Write the document again with ``python -m keyshard.observe.metrics > docs/metrics.md``. Values are
read from the ``status()`` of the source or sink when Prometheus asks;
:mod:`keyshard.observe.metrics_server` publishes them.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from keyshard.coordinator.progress import SourceWorker
from keyshard.core.lanes.lane_status import HandlerSlots
from keyshard.core.range_watchdog import RangeState
from keyshard.core.rescale_history import RescaleEnd
from keyshard.observe.status_types import PartitionStatus, RangeStatus, Status
from keyshard.version import VERSION

SUBSCRIPTION = "subscription"
"""Label of every metric of a source. It has one subscription, so it adds no time series."""
OF_SINK = "sink"
"""Label of every metric of a sink."""
OWNER_FIELDS = {SUBSCRIPTION: "subscription", OF_SINK: "name"}
"""Field of the status that such a label has."""
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
    """Beside :attr:`owner`."""
    help: str
    read: Callable[[Any], Iterable[Sample]]
    """Returns the samples of a status; none if the value is unknown. A histogram has none: its
    status is ``handlerSeconds``."""
    owner: str = SUBSCRIPTION
    """Label of every metric of its table."""


def _one(*path: str) -> Callable[[Any], Iterable[Sample]]:
    """Return a function that reads the value at a path of the status: one sample or none."""

    def read(status: Any) -> Iterable[Sample]:
        value: Any = status
        for name in path:
            value = value.get(name) if value is not None else None
        return [] if value is None else [((), float(value))]

    return read


def _rescales(status: Any) -> Iterable[Sample]:
    history = status["history"]
    if history is not None:
        summary = history["rescaleSummary"]
        yield from (((end.value,), float(summary[end.value])) for end in RescaleEnd)


def _ranges(value_of: Callable[[RangeStatus], float | None]) -> Any:
    """Return a function that reads a value of each range from the status."""
    return _indexed("ranges", value_of)


def _processes(value_of: Callable[[HandlerSlots], float | None]) -> Any:
    """Return a function that reads a value of each process or actor of handlers."""
    return _indexed("handlerSlots", value_of)


def _indexed(field: str, value_of: Callable[[Any], float | None]) -> Any:
    def read(status: Any) -> Iterable[Sample]:
        for each in status[field]:
            value = value_of(each)
            if value is not None:
                yield (str(each["index"]),), float(value)

    return read


def _stalled_actors(status: Status) -> Iterable[Sample]:
    for each in status["handlerSlots"]:
        stalled = each["stalled"]
        if stalled is not None:
            yield (str(each["index"]), stalled["kind"]), stalled["forSeconds"]


def _up(slots: HandlerSlots) -> float | None:
    """Return whether a process or actor runs; ``None`` for threads and coroutines."""
    return None if slots["restarts"] is None else float(slots["state"] != "starting")


def _circuit_open(status: Status) -> Iterable[Sample]:
    circuit = status["circuit"]
    if circuit is not None:
        yield (), float(circuit["state"] != "closed")


def _states(status: Status) -> Iterable[Sample]:
    for each in status["ranges"]:
        for state in RangeState:
            yield (str(each["index"]), state.value), float(each["state"] == state.value)


def _stalled(status: Status) -> Iterable[Sample]:
    for each in status["ranges"]:
        stalled = each["stalled"]
        if stalled is not None:
            yield (str(each["index"]), stalled["kind"]), stalled["forSeconds"]


def _stalled_partitions(status: Status) -> Iterable[Sample]:
    for each in status["partitions"]:
        stalled = each["stalled"]
        if stalled is not None:
            where = each["topic"], str(each["partition"])
            yield (*where, stalled["kind"]), stalled["forSeconds"]


def _workers(value_of: Callable[[SourceWorker], float]) -> Any:
    """Return a function that reads a value of each worker from the status."""

    def read(status: Status) -> Iterable[Sample]:
        window = status["window"]
        for number, each in enumerate(() if window is None else window["sourceWorkers"]):
            yield (str(number), each["kind"]), float(value_of(each))

    return read


def _build(status: Status) -> Iterable[Sample]:
    decoder = status["decoder"] or "none"
    python, transport = platform.python_version(), status["transport"]
    yield (VERSION, python, status["kind"], transport, decoder), 1.0


def _partitions(value_of: Callable[[PartitionStatus], float | None]) -> Any:
    """Return a function that reads a value of each topic partition from the status."""

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
_WORKER = ("worker", "kind")
_PROCESS = ("process",)
_GAUGE, _COUNTER = MetricKind.GAUGE, MetricKind.COUNTER

METRICS: tuple[Metric, ...] = (
    Metric("keyshard_build_info", _GAUGE, "", ("version", "python", "kind", "transport", "decoder"),
           "1; the labels name the versions, what runs (as in the status), and how entries are "
           "received and decoded.", _build),
    Metric("keyshard_uptime_seconds", _GAUGE, "seconds", (), "Time since the start.",
           _one("uptimeSeconds")),
    Metric("keyshard_paused", _GAUGE, "", (), "1 while the source is paused, else 0.",
           lambda status: [((), float(status["state"] == "paused"))]),
    Metric("keyshard_ranges", _GAUGE, "ranges", (), "Number of hash ranges.",
           lambda status: [] if status["window"] is None else [((), float(len(status["ranges"])))]),
    Metric("keyshard_lanes", _GAUGE, "lanes", (), "Keys handled at the same time in a range.",
           _one("lanes")),
    Metric("keyshard_workers", _GAUGE, "workers", (), "Handlers that may run at the same time.",
           _one("workers")),
    Metric("keyshard_epoch", _GAUGE, "", (), "Number of the assignment; a rescale adds 1.",
           _one("epoch")),
    Metric("keyshard_rescales_total", _COUNTER, "rescales", ("end",),
           "Rescales and balances by their end: moved, unchanged (as asked already), kept (failed, "
           "the old assignment holds) or lost (failed, the source ends).", _rescales),
    Metric("keyshard_range_state", _GAUGE, "", ("range", "state"),
           "1 for the state that a range is in, 0 for the others.", _states),
    Metric("keyshard_range_waiting_messages", _GAUGE, "messages", _RANGE,
           "Messages that wait for a handler.",
           _ranges(lambda each: each["waiting"])),
    Metric("keyshard_range_in_flight_messages", _GAUGE, "messages", _RANGE,
           "Messages in handlers.", _ranges(lambda each: each["inFlight"])),
    Metric("keyshard_range_oldest_unacknowledged_seconds", _GAUGE, "seconds", _RANGE,
           "Age of the oldest unacknowledged message; missing without one.",
           _ranges(lambda each: _seconds(each["oldestUnacknowledgedMillis"]))),
    Metric("keyshard_range_stalled_seconds", _GAUGE, "seconds", ("range", "kind"),
           "Time for which the range has been stalled, by the kind of the reason; "
           "missing while it is not.", _stalled),
    Metric("keyshard_lag_seconds", _GAUGE, "seconds", (),
           "Age of the oldest message that was received and is not acknowledged; without one, of "
           "the oldest entry at the broker; missing while that is unknown.",
           _one("lag", "seconds")),
    Metric("keyshard_partition_lag_seconds", _GAUGE, "seconds", _PARTITION,
           "The same for each topic partition.",
           _partitions(lambda each: each["lag"]["seconds"])),
    Metric("keyshard_partition_broker_lag_seconds", _GAUGE, "seconds", _PARTITION,
           "Age of the backlog as the broker measured it at its newest check of quotas; missing "
           "unless it does (exposeSubscriptionBacklogAgeInPrometheus); needs admin_url.",
           _partitions(lambda each: each["lag"]["brokerSeconds"])),
    Metric("keyshard_window_messages", _GAUGE, "messages", (),
           "Messages received and not acknowledged yet.", _one("window", "windowRows")),
    Metric("keyshard_window_fill_ratio", _GAUGE, "ratio", (),
           "Fill of the fullest topic partition's share of the window, 0 to 1.",
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
    Metric("keyshard_partition_stalled_seconds", _GAUGE, "seconds", (*_PARTITION, "kind"),
           "Time for which the broker has delivered nothing of the topic partition, by the kind of "
           "the reason; missing while it is not stalled; needs admin_url.", _stalled_partitions),
    Metric("keyshard_partition_ack_gaps", _GAUGE, "gaps", _PARTITION,
           "Gaps between the acknowledged entries at the broker; needs admin_url.",
           _partitions(lambda each: each["ackGaps"])),
    Metric("keyshard_partition_ack_gaps_limit", _GAUGE, "gaps", _PARTITION,
           "Most such gaps that the broker stores; needs admin_url.",
           _partitions(lambda each: each["ackGapsMax"])),
    Metric("keyshard_partition_replay_entries", _GAUGE, "entries", _PARTITION,
           "Entries that wait at the broker for their range; needs admin_url.",
           _partitions(lambda each: each["replay"])),
    Metric("keyshard_partition_replay_entries_limit", _GAUGE, "entries", _PARTITION,
           "Number of such entries at which the broker stops all ranges; needs admin_url.",
           _partitions(lambda each: each["replayMax"])),
    Metric("keyshard_worker_up", _GAUGE, "", _WORKER,
           "1 while a worker that hosts consumers runs, 0 while it is replaced.",
           _workers(lambda each: each["pid"] is not None)),
    Metric("keyshard_worker_consumers", _GAUGE, "consumers", _WORKER,
           "Consumers that a worker hosts.", _workers(lambda each: each["consumers"])),
    Metric("keyshard_worker_restarts_total", _COUNTER, "restarts", _WORKER,
           "Times that a worker was replaced.", _workers(lambda each: each["restarts"])),
    Metric("keyshard_handler_slots", _GAUGE, "handlers", _PROCESS,
           "Handlers that may run at the same time in a process or actor; threads or coroutines "
           "share process 0. Missing if only lanes limit.",
           _processes(lambda each: each["total"])),
    Metric("keyshard_handler_slots_used", _GAUGE, "handlers", _PROCESS,
           "Handlers that run in a process or actor.", _processes(lambda each: each["used"])),
    Metric("keyshard_handler_up", _GAUGE, "", _PROCESS,
           "1 while a process or actor runs or waits for its first message, 0 while it starts, "
           "also after its end; missing for threads and coroutines.", _processes(_up)),
    Metric("keyshard_handler_restarts_total", _COUNTER, "restarts", _PROCESS,
           "Times that a process or actor was replaced; missing for threads and coroutines.",
           _processes(lambda each: each["restarts"])),
    Metric("keyshard_handler_messages_total", _COUNTER, "messages", _PROCESS,
           "Messages that a process or actor handled; missing for threads and coroutines.",
           _processes(lambda each: each["handled"])),
    Metric("keyshard_handler_waiting_messages", _GAUGE, "messages", _PROCESS,
           "Messages that wait for an actor; missing elsewhere.",
           _processes(lambda each: each["waiting"])),
    Metric("keyshard_handler_in_flight_messages", _GAUGE, "messages", _PROCESS,
           "Messages that handlers of a process or actor work on.",
           _processes(lambda each: each["inFlight"])),
    Metric("keyshard_handler_running_seconds", _GAUGE, "seconds", _PROCESS,
           "Time for which a process or actor has worked on its messages; missing if it is free, "
           "and for threads and coroutines.", _processes(lambda each: each["runningSeconds"])),
    Metric("keyshard_handler_untaken_calls", _GAUGE, "calls", _PROCESS,
           "Calls of an actor whose results the program has not taken. At 2, the actor gets no "
           "more messages. Missing elsewhere.", _processes(lambda each: each["untakenCalls"])),
    Metric("keyshard_handler_stalled_seconds", _GAUGE, "seconds", ("process", "kind"),
           "Time for which an actor has been stalled, by the kind of the reason; missing while it "
           "is not, and elsewhere.", _stalled_actors),
    Metric("keyshard_messages_received_total", _COUNTER, "messages", (),
           "Messages received, without redelivered ones that were dropped.",
           _one("window", "rowsReceived")),
    Metric("keyshard_batches_planned", _GAUGE, "batches", (),
           "Batches that are planned and not committed, of a query or a program.",
           _one("window", "plannedBatches")),
    Metric("keyshard_entries_acknowledged_total", _COUNTER, "entries", (),
           "Entries that were acknowledged.", _one("window", "entriesAcknowledged")),
    Metric("keyshard_entries_to_acknowledge", _GAUGE, "entries", (),
           "Entries that are committed and not acknowledged yet.",
           _one("window", "entriesToAcknowledge")),
    Metric("keyshard_entries_not_due_total", _COUNTER, "entries", (),
           "Delayed entries that a bounded run left, because their time had not come; missing for "
           "pulsar-client without admin_url.",
           _one("window", "entriesNotDue")),
    Metric("keyshard_checkpoint_bytes", _GAUGE, "bytes", (),
           "Approximate size of the newest checkpoint.", _one("window", "checkpointBytes")),
    Metric("keyshard_partitions_without_room", _GAUGE, "topic partitions", (),
           "Topic partitions with entries for which the checkpoint has no room.",
           _one("window", "partitionsWithoutRoom")),
    Metric("keyshard_without_room_milliseconds", _GAUGE, "milliseconds", (),
           "Time for which a topic partition has had no room in the checkpoint; 0 with room.",
           _one("window", "withoutRoomMillis")),
    Metric("keyshard_entries_lost_total", _COUNTER, "entries", (),
           "Entries that somebody else acknowledged, or that are no longer stored; with "
           "fail_on_data_loss, the source ends. "
           "Without admin_url, only entries that a planned batch lost; missing if there are none.",
           _one("window", "entriesLost")),
    Metric("keyshard_parked_keys", _GAUGE, "keys", (),
           "Keys whose messages go to the dead-letter topic until they are unparked; missing "
           "during the start.", _one("parkedKeys")),
    Metric("keyshard_circuit_open", _GAUGE, "", (),
           "1 while most keys fail at once and handlers pause, else 0.",
           _circuit_open),
    Metric("keyshard_circuit_openings_total", _COUNTER, "openings", (),
           "Times that handlers paused because most keys failed at once.",
           _one("circuit", "openings")),
    Metric("keyshard_handler_seconds", MetricKind.HISTOGRAM, "seconds", (),
           "Duration of an attempt of the handler.", lambda _status: ()),
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
           "Messages written to the dead-letter topic, for any reason.",
           _one("counters", "deadLettered")),
    Metric("keyshard_observer_errors_total", _COUNTER, "calls", (),
           "Calls of observers that raised; the messages are not affected.",
           _one("counters", "observerErrors")),
    Metric("keyshard_outputs_published_total", _COUNTER, "messages", (),
           "Messages that handlers gave to the sink, those of repeated attempts included.",
           _one("counters", "outputsPublished")),
    Metric("keyshard_outputs_confirmed_total", _COUNTER, "messages", (),
           "Messages of handlers that the broker confirmed.",
           _one("counters", "outputsConfirmed")),
    Metric("keyshard_outputs_failed_total", _COUNTER, "messages", (),
           "Messages of handlers that the broker refused, or did not confirm in time.",
           _one("counters", "outputsFailed")),
    Metric("keyshard_redeliveries_dropped_total", _COUNTER, "messages", (),
           "Redelivered messages that were dropped.",
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
           "Unreadable entries that were acknowledged; only with on_corrupt skip.",
           _one("window", "corruptSkipped")),
    Metric("keyshard_entries_encrypted_skipped_total", _COUNTER, "entries", (),
           "Encrypted entries that were acknowledged; only with on_encrypted skip.",
           _one("window", "encryptedSkipped")),
)  # fmt: skip
"""In the order of the document."""


def _sink_build(status: Any) -> Iterable[Sample]:
    yield (VERSION, platform.python_version(), status["transport"]), 1.0


def _of_sink(name: str, kind: MetricKind, unit: str, text: str, *path: str) -> Metric:
    """Return a metric of a sink, whose value is at a path of its status."""
    return Metric(f"keyshard_sink_{name}", kind, unit, (), text, _one(*path), OF_SINK)


SINK_METRICS: tuple[Metric, ...] = (
    Metric("keyshard_sink_build_info", _GAUGE, "", ("version", "python", "transport"),
           "1; the labels name the versions, and how messages are published.", _sink_build,
           OF_SINK),
    _of_sink("uptime_seconds", _GAUGE, "seconds", "Time since the sink connected.",
             "uptimeSeconds"),
    _of_sink("messages_published_total", _COUNTER, "messages",
             "Messages given to a producer, those of repeated attempts included.",
             "counters", "published"),
    _of_sink("messages_confirmed_total", _COUNTER, "messages",
             "Messages that the broker confirmed.", "counters", "confirmed"),
    _of_sink("messages_failed_total", _COUNTER, "messages",
             "Messages that the broker refused, or did not confirm in time.",
             "counters", "failed"),
    _of_sink("messages_already_stored_total", _COUNTER, "messages",
             "Rows of `write_batch` that an earlier attempt had stored.",
             "counters", "alreadyStored"),
    _of_sink("entries_published_total", _COUNTER, "entries", "Entries given to a producer.",
             "counters", "entries"),
    _of_sink("published_bytes_total", _COUNTER, "bytes",
             "Bytes of published messages before compression, with keys and metadata.",
             "counters", "bytes"),
    _of_sink("batches_total", _COUNTER, "batches", "Calls of `write_batch` that returned.",
             "counters", "batches"),
    _of_sink("unconfirmed_messages", _GAUGE, "messages",
             "Messages that are not confirmed, and those that wait for others in an entry.",
             "unconfirmed", "messages"),
    _of_sink("unconfirmed_bytes", _GAUGE, "bytes", "Bytes of these messages.",
             "unconfirmed", "bytes"),
    _of_sink("oldest_unconfirmed_seconds", _GAUGE, "seconds",
             "Age of the oldest unconfirmed entry; missing without one.",
             "unconfirmed", "oldestSeconds"),
)  # fmt: skip
"""In the order of the document."""


def document() -> str:
    """Return the text of ``docs/metrics.md``."""
    return _HEAD + _rows(METRICS) + _SINK_HEAD + _rows(SINK_METRICS)


def _rows(table: Iterable[Metric]) -> str:
    return "".join(
        f"| `{metric.name}` | {metric.kind.value} | {metric.unit or '-'} | "
        f"{', '.join(f'`{label}`' for label in metric.labels) or '-'} | {metric.help} |\n"
        for metric in table
    )


_HEAD = """# Metrics

`KeyShardSource(..., metrics_port=9464)` serves metrics for Prometheus on
`http://127.0.0.1:9464/metrics` while something consumes the source: `run`, `batches`, `open`, or a
Ray job. A Spark query has the options `metrics.port` and `metrics.host`, and serves them on the
driver. `source.run(handle, metrics_port=...)` is the same for one run. With
`metrics_host="0.0.0.0"`, other machines can reach the port, as in a container. The port has no
password. With port 0, the log names the free port that was taken; the log of a Spark query is
that of the driver, on standard error.

Metrics of [workers](options.md) that host consumers are on the same port, with the labels `worker`
and `kind`: the source knows which worker is missing, and a worker has no port.
[status.md](status.md#workers) says what each holds. Without handlers, the metrics of handlers are
missing. A Ray job has those of its actors, of completed messages, and of failed attempts and their
duration; it has no circuit breaker and no dead letters. Without a sink, metrics of outputs are
missing.

keyshard reads the values from the [status](status.md) when Prometheus asks. It does not use the
default registry of the process. Metrics that need `admin_url` are missing without it.

Each metric of a source has the label `subscription`. The ranges and topic partitions of the source,
its workers, and the processes or actors of its handlers bound the number of time series: at most 11
for each range, 10 for each topic partition, 3 for each worker, 10 for each process or actor, and 60
others.

`process` is the number of a process or actor in [`handlerSlots`](status.md) of the status.

[Alert rules](operations/alerts.yml) and a [Grafana board](operations/grafana.json) are made from
these tables; [operating](operating.md#alerts-and-a-board) explains how to load them.

The same port serves probes, such as those of Kubernetes. Other paths are 404.

| path | 200 | 503, with the reason as text |
|---|---|---|
| `/livez` | the source runs; also while it starts or stops, and while the broker is away | \
the main loop of the run has not moved for 60 s; restart the program |
| `/readyz` | the source runs or is paused, and all its consumers are connected to brokers that \
answer | the source starts or stops; or a consumer is not connected or is refused; or its broker \
has not answered a ping for 5 s |

The tables are generated from `keyshard/observe/metrics.py`. To write this page again, run
`python -m keyshard.observe.metrics > docs/metrics.md`.

| name | kind | unit | labels | meaning |
|---|---|---|---|---|
"""
_SINK_HEAD = """
## Sinks

`KeyShardSink(..., metrics_port=9465)` serves the metrics of a sink from its first message until it
is closed, and the probes. `/livez` is always 200, `/readyz` is 503 while the sink closes. Each
metric has the label `sink`: the `sink_id`, or the topic without one. The metrics of the source
include the outputs of its handlers. A sink of Spark or Ray lives in a task for the time of its
write, so it serves no metrics; its [status](status.md#sinks) has the same values.

| name | kind | unit | labels | meaning |
|---|---|---|---|---|
"""

if __name__ == "__main__":
    sys.stdout.write(document())
