"""A status that notebooks show as tables."""

from __future__ import annotations

from typing import Any

from keyshard.notebook import table
from keyshard.observe.status_types import PartitionStatus

_CALM = ("running", "idle")


class ShownStatus(dict[str, Any]):
    """The JSON object of a status; a notebook shows it as tables."""

    def _repr_html_(self) -> str:
        lag, rates, newest = self["lag"], self["rates"], self["newestError"]
        facts = [
            ("state", f"{self['state']}, {self['kind']}, pid {self['pid']} on {self['host']}"),
            ("topics", self["topicsPattern"] or ", ".join(self["topics"])),
            ("cluster", self["serviceUrl"]),
            ("lag", f"{_value(lag['seconds'])} s, {_value(lag['rows'])} rows, {lag['trend']}"),
            ("received/s", rates["received"]),
            ("completed/s", rates["completed"]),
            ("parked keys", self["parkedKeys"]),
            ("newest error", newest and newest["error"]),
        ]
        # Ranges in trouble come first, because a table shows only some.
        ranges = sorted(self["ranges"], key=lambda one: one["state"] in _CALM)
        partitions = sorted(
            self["partitions"], key=lambda one: one["covered"] and one["stalled"] is None
        )
        return (
            table(f"{self['name']}: status", facts)
            + table(
                "ranges",
                (
                    (one["index"], one["state"], one["waiting"], one["inFlight"], one["reason"])
                    for one in ranges
                ),
                ("range", "state", "waiting", "in flight", "blocked by"),
            )
            + table(
                "topic partitions",
                (
                    (
                        one["topic"],
                        str(one["partition"]),
                        one["lag"]["rows"],
                        _trouble_of(one),
                    )
                    for one in partitions
                ),
                ("topic", "partition", "lag in rows", "error"),
            )
        )


def _trouble_of(partition: PartitionStatus) -> str:
    stalled = "" if partition["stalled"] is None else partition["stalled"]["reason"]
    uncovered = "" if partition["covered"] else "slots without a consumer"
    return partition["error"] or uncovered or stalled


def _value(number: float | None) -> str:
    return "-" if number is None else f"{number:,}"
