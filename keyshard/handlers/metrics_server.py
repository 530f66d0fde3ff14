"""Publishes the status of a running source for Prometheus, on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector

from keyshard.errors import ConfigError
from keyshard.metrics import METRICS, Kind
from keyshard.metrics import Metric as Row

HOST = "127.0.0.1"
_JOIN_S = 2.0


class StatusCollector(Collector):
    """Makes prometheus-client's objects from a status, each time it is asked.

    Args:
        status: The status of the source; called at every scrape.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """One family for each row of the table, also for those without a value now."""
        status = self._status()
        return [_family(row, status) for row in METRICS]

    def describe(self) -> Iterable[Metric]:
        """Nothing: else the registry would ask for the status before the source runs."""
        return []


class MetricsServer:
    """Serves ``/metrics`` from a registry of its own until :meth:`close`.

    Args:
        port: Port on loopback; 0 for a free one, which is then :attr:`port`.
        status: The status of the source.

    Raises:
        ConfigError: The port cannot be had.
    """

    def __init__(self, port: int, status: Callable[[], Mapping[str, Any]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusCollector(status))
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except (OSError, OverflowError) as exc:
            raise ConfigError(
                f"Metrics cannot be served on {HOST}:{port}: {exc}. Give another metrics_port."
            ) from exc
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


def _family(row: Row, status: Mapping[str, Any]) -> Metric:
    if row.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(row.name, row.help)
        seconds = status["handlerSeconds"]
        buckets = [(str(bound), count) for bound, count in seconds["buckets"]]
        histogram.add_metric([], [*buckets, ("+Inf", seconds["count"])], seconds["sum"])
        return histogram
    if row.kind is Kind.COUNTER:
        family: Metric = CounterMetricFamily(row.name, row.help, labels=row.labels)
    else:
        family = GaugeMetricFamily(row.name, row.help, labels=row.labels)
    for labels, value in row.read(status):
        family.add_metric(labels, value)  # type: ignore[attr-defined]
    return family
