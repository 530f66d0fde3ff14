"""Publishes the status of a running source: metrics for Prometheus, and whether it lives."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from keyshard.errors import ConfigError
from keyshard.observe.metrics import METRICS, MetricKind
from keyshard.observe.metrics import Metric as Row
from keyshard.observe.status_types import Status
from keyshard.threads import begin

REQUEST_S = 10.0
"""Longest wait for a request to arrive or for an answer to be taken, seconds."""
REQUESTS_MAX = 16
"""Requests answered at the same time; connections beyond that are closed."""
_JOIN_S = 2.0

_log = logging.getLogger(__name__)


class StatusCollector(Collector):
    """Makes prometheus-client's objects from a status, each time it is asked.

    Args:
        status: The status of the source; called at every scrape.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """One family for each row of the table, also for those without a value now."""
        status = self._status()
        return [_family(row, status) for row in METRICS]

    def describe(self) -> Iterable[Metric]:
        """Nothing: else the registry would ask for the status before the source runs."""
        return []


class MetricsServer:
    """Serves ``/metrics``, ``/livez`` and ``/readyz`` until :meth:`close`; other paths are 404.

    Args:
        host: Address to listen on.
        port: Port; 0 for a free one, which is then :attr:`port`.
        status: The status of the source.
        live: What only a restart of the process would mend; empty when nothing is.
        ready: Why the source does not take messages; empty when it does.

    Raises:
        ConfigError: The address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], Status],
        live: Callable[[], str],
        ready: Callable[[], str],
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusCollector(status))
        handler = _Handler.factory(registry)
        handler.probes = {"/livez": live, "/readyz": ready}  # type: ignore[attr-defined]
        try:
            self._server = _server(host, port, handler)
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(
                f"Metrics cannot be served on {host}, port {port}: {exc}. Give another "
                "metrics_port or metrics_host."
            ) from exc
        self.port: int = self._server.server_address[1]
        self._thread = begin("keyshard-metrics", self._server.serve_forever, 0.1)

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


class _Handler(MetricsHandler):
    timeout = REQUEST_S
    probes: Mapping[str, Callable[[], str]]

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        path = self.path.partition("?")[0]
        if path == "/metrics":
            super().do_GET()
        elif path in self.probes:
            wrong = self.probes[path]()
            if wrong:
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, wrong)
            else:
                self._say(HTTPStatus.OK, "ok")
        else:
            known = ", ".join(("/metrics", *self.probes))
            self._say(HTTPStatus.NOT_FOUND, f"There is nothing here; there is {known}.")

    def _say(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingTCPServer):
    # Not http.server's: that one asks the name service who it is, which may take seconds.
    allow_reuse_address = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.Semaphore(REQUESTS_MAX)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            begin("keyshard-metrics-answer", self._answer, request, client_address)
        else:
            self.shutdown_request(request)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # that is a client which went away
            _log.error("a request of %s failed", client_address, exc_info=error)


def _server(host: str, port: int, handler: Any) -> _Server:
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    kind = type("_Server", (_Server,), {"address_family": family})
    made: _Server = kind(address, handler)
    return made


def _family(row: Row, status: Status) -> Metric:
    if row.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(row.name, row.help)
        seconds = status["handlerSeconds"]
        buckets = [(str(bound), count) for bound, count in seconds["buckets"]]
        histogram.add_metric([], [*buckets, ("+Inf", seconds["count"])], seconds["sum"])
        return histogram
    if row.kind is MetricKind.COUNTER:
        family: Metric = CounterMetricFamily(row.name, row.help, labels=row.labels)
    else:
        family = GaugeMetricFamily(row.name, row.help, labels=row.labels)
    for labels, value in row.read(status):
        family.add_metric(labels, value)  # type: ignore[attr-defined]
    return family
