"""Serves metrics for Prometheus and health probes of a running source or an open sink."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from keyshard.errors import ConfigError, ThreadStartError
from keyshard.observe.metrics import METRICS, OWNER_FIELDS, MetricKind
from keyshard.observe.metrics import Metric as Row
from keyshard.threads import begin

REQUEST_S = 10.0
"""Longest time to receive a request or to send an answer, seconds."""
REQUESTS_MAX = 16
"""Most requests answered at the same time; further connections are closed."""
_JOIN_S = 2.0

_log = logging.getLogger(__name__)


class StatusCollector(Collector):
    """Converts the status into objects of prometheus-client at every scrape.

    Args:
        status: Returns the status of the source or sink.
        table: Its metrics.
    """

    def __init__(
        self, status: Callable[[], Mapping[str, Any]], table: Sequence[Row] = METRICS
    ) -> None:
        self._status = status
        self._table = table

    def collect(self) -> Iterable[Metric]:
        """Return one family for each row of the table, also for rows without a value now."""
        status = self._status()
        return [_family(row, status) for row in self._table]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise the registry would read the status before the source runs."""
        return []


class MetricsServer:
    """Serves ``/metrics``, ``/livez`` and ``/readyz`` until :meth:`close`; other paths are 404.

    Args:
        host: Address to listen on.
        port: Port; 0 for a free one, which is then :attr:`port`.
        status: Returns the status of the source or sink.
        live: Returns an error that only a restart of the process can fix, or ``""``.
        ready: Returns why the source does not take messages, or ``""``.
        table: Its metrics.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], Mapping[str, Any]],
        live: Callable[[], str],
        ready: Callable[[], str],
        *,
        table: Sequence[Row] = METRICS,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatusCollector(status, table))
        handler = _Handler.factory(registry)
        handler.probes = {"/livez": live, "/readyz": ready}  # type: ignore[attr-defined]
        try:
            self._server = _server(host, port, handler)
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(
                f"Metrics cannot be served on {host}, port {port}: {exc}.",
                "Set another metrics_port or metrics_host.",
            ) from exc
        self.port: int = self._server.server_address[1]
        self._pid = os.getpid()
        try:
            self._thread = begin("keyshard-metrics", self._server.serve_forever, 0.1)
        except BaseException:
            self._server.server_close()
            raise

    def close(self) -> None:
        """Stop serving and free the port. Idempotent.

        A forked child only closes its copy of the socket: its parent serves.
        """
        if self._pid != os.getpid():
            self._server.socket.close()
            return
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
            self._say(HTTPStatus.NOT_FOUND, f"This path does not exist. The paths are {known}.")

    def _say(self, status: HTTPStatus, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _MetricsServer(ThreadingTCPServer):
    # Not http.server's class: it looks up its own host name, which may take seconds.
    allow_reuse_address = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.Semaphore(REQUESTS_MAX)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            begin("keyshard-metrics-answer", self._answer, request, client_address)
        except ThreadStartError as exc:
            self._free.release()
            _log.warning("a request of %s got no answer: %s", client_address, exc.summary)
            self.shutdown_request(request)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # OSError: the client has disconnected
            _log.error("a request of %s failed", client_address, exc_info=error)


def _server(host: str, port: int, handler: Any) -> _MetricsServer:
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    kind = type("_Server", (_MetricsServer,), {"address_family": family})
    made: _MetricsServer = kind(address, handler)
    return made


def _family(row: Row, status: Mapping[str, Any]) -> Metric:
    owner = status[OWNER_FIELDS[row.owner]]
    names = (row.owner, *row.labels)
    if row.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(row.name, row.help, labels=[row.owner])
        seconds = status["handlerSeconds"]
        if seconds is not None:
            buckets = [(str(bound), count) for bound, count in seconds["buckets"]]
            histogram.add_metric([owner], [*buckets, ("+Inf", seconds["count"])], seconds["sum"])
        return histogram
    if row.kind is MetricKind.COUNTER:
        family: Metric = CounterMetricFamily(row.name, row.help, labels=names)
    else:
        family = GaugeMetricFamily(row.name, row.help, labels=names)
    for labels, value in row.read(status):
        family.add_metric((owner, *labels), value)  # type: ignore[attr-defined]
    return family
