"""Reports of read tasks: numbers of entries that came from bookies, stores and the broker."""

from __future__ import annotations

import logging

import ray
from ray.exceptions import RayError

from keyshard.reading.read_report import ReadReport, SpansByStart
from ray_adapter import cluster

TIMEOUT_S = 30.0
"""Longest wait for the actor that keeps the reports, seconds."""

_log = logging.getLogger(__name__)


class ReadReports:
    """Collects the reports of read tasks.

    ::

        reports = ray_adapter.ReadReports()
        rows = ray_adapter.read(source, segments=Segments("auto"), reports=reports)
        rows.write_parquet("visits/history")
        print(reports.total().by_bookies, reports.total().reasons)

    A task reports a split when it has read all its entries. A repeated task replaces its report.
    The reports are in an actor, which lives as long as this object or a dataset that uses it.

    Raises:
        ClusterError: Ray cannot be reached.
    """

    def __init__(self) -> None:
        cluster.connect()
        self._actor = ray.remote(_Kept).options(num_cpus=0).remote()

    def total(self) -> ReadReport:
        """Return the report of all tasks that have ended.

        Raises:
            ray.exceptions.RayError: The actor does not answer.
        """
        found: ReadReport = ray.get(self._actor.total.remote(), timeout=TIMEOUT_S)
        return found

    def note(self, report: ReadReport) -> None:
        """Add a report, from a task; a failure is logged."""
        try:
            ray.get(self._actor.note.remote(report), timeout=TIMEOUT_S)
        except RayError as exc:
            _log.warning("A read could not report where its entries came from: %s", exc)


class _Kept:
    """Actor that stores the reports."""

    def __init__(self) -> None:
        self._spans: SpansByStart = {}

    def note(self, report: ReadReport) -> None:
        self._spans.update(report.by_start())

    def total(self) -> ReadReport:
        return ReadReport.of(self._spans)
