"""A Grafana board with every metric of the table; ``docs/operations/grafana.json`` is this board.

Write it again: ``python -m keyshard.observe.grafana_board > docs/operations/grafana.json``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from keyshard.observe.metrics import METRICS, SINK_METRICS, SUBSCRIPTION, Metric, MetricKind

_BY_NAME = {metric.name: metric for metric in (*METRICS, *SINK_METRICS)}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS = {"seconds": "s", "ratio": "percentunit"}
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3
TOP = 10
"""Most ranges or topic partitions in a panel."""

ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "Is it well?": {
        "Lag": (
            "keyshard_lag_seconds", "keyshard_partition_lag_seconds",
            "keyshard_partition_broker_lag_seconds",
        ),
        "Ranges by state": ("keyshard_range_state",),
        "Stalled ranges": ("keyshard_range_stalled_seconds",),
        "Completed, failed, rejected": (
            "keyshard_messages_completed_total", "keyshard_attempts_failed_total",
            "keyshard_messages_rejected_total",
        ),
        "Duration of an attempt": ("keyshard_handler_seconds",),
        "Window": ("keyshard_window_fill_ratio",),
    },
    "Ranges": {
        "Oldest unacknowledged message": ("keyshard_range_oldest_unacknowledged_seconds",),
        "Messages that wait": ("keyshard_range_waiting_messages",),
        "Messages in handlers": ("keyshard_range_in_flight_messages",),
        "Messages in the window": ("keyshard_window_messages",),
        "Ranges, lanes, workers": ("keyshard_ranges", "keyshard_lanes", "keyshard_workers"),
        "Assignment": ("keyshard_epoch",),
        "Rescales": ("keyshard_rescales_total",),
        "Paused": ("keyshard_paused",),
        "Received": ("keyshard_messages_received_total", "keyshard_entries_acknowledged_total"),
        "Batches and acknowledgements": (
            "keyshard_batches_planned", "keyshard_entries_to_acknowledge",
            "keyshard_entries_not_due_total",
        ),
        "Size of the checkpoint": ("keyshard_checkpoint_bytes",),
        "Without room in the checkpoint": ("keyshard_partitions_without_room",),
        "Time without room": ("keyshard_without_room_milliseconds",),
        "Uptime": ("keyshard_uptime_seconds",),
    },
    "Workers": {
        "Workers that run": ("keyshard_worker_up",),
        "Consumers": ("keyshard_worker_consumers",),
        "Restarts": ("keyshard_worker_restarts_total",),
    },
    "Handlers": {
        "Handler slots": ("keyshard_handler_slots", "keyshard_handler_slots_used"),
        "Processes and actors that run": ("keyshard_handler_up",),
        "Restarts of processes and actors": ("keyshard_handler_restarts_total",),
        "Handled by processes and actors": ("keyshard_handler_messages_total",),
        "Messages of actors": (
            "keyshard_handler_waiting_messages", "keyshard_handler_in_flight_messages",
        ),
        "Time on these messages": ("keyshard_handler_running_seconds",),
        "Stalled actors": ("keyshard_handler_stalled_seconds",),
        "Untaken calls": ("keyshard_handler_untaken_calls",),
    },
    "Broker": {
        "Backlog": ("keyshard_partition_backlog_entries",),
        "Connection": ("keyshard_partition_covered", "keyshard_partition_broker_error"),
        "Stalled topic partitions": ("keyshard_partition_stalled_seconds",),
        "Ack gaps": ("keyshard_partition_ack_gaps", "keyshard_partition_ack_gaps_limit"),
        "Entries that wait for their range": (
            "keyshard_partition_replay_entries", "keyshard_partition_replay_entries_limit",
        ),
    },
    "Failures": {
        "Parked keys": ("keyshard_parked_keys",),
        "Circuit": ("keyshard_circuit_open", "keyshard_circuit_openings_total"),
        "Dead letters": (
            "keyshard_messages_dead_lettered_total", "keyshard_messages_parked_total",
        ),
        "Observers": ("keyshard_observer_errors_total",),
        "Dropped or unusual": (
            "keyshard_redeliveries_dropped_total", "keyshard_messages_misrouted_total",
            "keyshard_messages_keyless_total",
        ),
        "Unreadable": (
            "keyshard_messages_unreadable_total", "keyshard_entries_corrupt_skipped_total",
            "keyshard_entries_encrypted_skipped_total", "keyshard_entries_lost_total",
        ),
    },
    "Outputs and versions": {
        "Outputs": (
            "keyshard_outputs_published_total", "keyshard_outputs_confirmed_total",
            "keyshard_outputs_failed_total",
        ),
        "Versions": ("keyshard_build_info",),
    },
    "Sinks": {
        "Messages": (
            "keyshard_sink_messages_published_total", "keyshard_sink_messages_confirmed_total",
            "keyshard_sink_messages_failed_total", "keyshard_sink_messages_already_stored_total",
        ),
        "Entries and batches": (
            "keyshard_sink_entries_published_total", "keyshard_sink_batches_total",
        ),
        "Bytes": ("keyshard_sink_published_bytes_total",),
        "Unconfirmed messages": ("keyshard_sink_unconfirmed_messages",),
        "Unconfirmed bytes": ("keyshard_sink_unconfirmed_bytes",),
        "Oldest unconfirmed entry": ("keyshard_sink_oldest_unconfirmed_seconds",),
        "Uptime of sinks": ("keyshard_sink_uptime_seconds",),
        "Versions of sinks": ("keyshard_sink_build_info",),
    },
}  # fmt: skip
"""Panels by row: title and metrics, which share a unit."""


def expressions(metric: Metric) -> list[tuple[str, str]]:
    """Return the queries that show a metric, and the legend of each."""
    owner = metric.owner
    selected = f'{metric.name}{{subscription=~"$subscription"}}'
    if owner != SUBSCRIPTION:
        selected = metric.name
    if metric.kind is MetricKind.HISTOGRAM:
        buckets = selected.replace("{", "_bucket{", 1)
        by = f"sum by (subscription, le) (rate({buckets}[$__rate_interval]))"
        return [
            (f"histogram_quantile({share}, {by})", f"{{{{subscription}}}} {share:.0%}")
            for share in (0.5, 0.95, 0.99)
        ]
    label = metric.name.removeprefix("keyshard_").removesuffix("_total").replace("_", " ")
    if metric.kind is MetricKind.COUNTER:
        total = f"sum by ({owner}) (rate({selected}[$__rate_interval]))"
        return [(total, f"{{{{{owner}}}}} {label}")]
    if "state" in metric.labels:
        return [(f"sum by (subscription, state) ({selected})", "{{subscription}} {{state}}")]
    by = ", ".join((owner, *metric.labels))
    legend = " ".join(f"{{{{{name}}}}}" for name in by.split(", "))
    if metric.labels:
        return [(f"topk({TOP}, max by ({by}) ({selected}))", f"{legend} {label}")]
    return [(f"max by ({owner}) ({selected})", f"{legend} {label}")]


def board() -> dict[str, Any]:
    """Return the board as JSON values."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, titles in ROWS.items():
        panels.append(_placed({"type": "row", "title": row, "collapsed": False}, 0, y, 24, 1))
        for number, (title, names) in enumerate(titles.items()):
            line, column = divmod(number, _PER_ROW)
            panel = _panel(title, [_BY_NAME[name] for name in names])
            panels.append(_placed(panel, column * _WIDTH, y + 1 + line * _HEIGHT, _WIDTH, _HEIGHT))
        y += 1 + -(-len(titles) // _PER_ROW) * _HEIGHT
    return {
        "title": "keyshard",
        "uid": "keyshard",
        "tags": ["keyshard", "pulsar"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATASOURCE, _SUBSCRIPTION]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, start=1)],
    }


_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_SUBSCRIPTION = {
    "name": "subscription",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(keyshard_ranges, subscription)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
}


def _panel(title: str, metrics: list[Metric]) -> dict[str, Any]:
    queries = [each for metric in metrics for each in expressions(metric)]
    first = metrics[0]
    unit = "ops" if first.kind is MetricKind.COUNTER else _UNITS.get(first.unit, "short")
    return {
        "type": "timeseries",
        "title": title,
        "description": " ".join(f"{metric.name}: {metric.help}" for metric in metrics),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend,
             "datasource": _SOURCE}
            for number, (query, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return panel | {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def document() -> str:
    """Return the text of ``docs/operations/grafana.json``."""
    return json.dumps(board(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
