"""The status of an open sink, exposed by the control socket and metrics."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, TypedDict

from keyshard.broker.connect import transport_of
from keyshard.config.sink import SinkConfig
from keyshard.control import SINK, ControlServer
from keyshard.core.rates import Pace
from keyshard.errors import ControlError
from keyshard.publishing.counts import Counts, SinkCounts
from keyshard.redaction import redacted
from keyshard.threads import begin

if TYPE_CHECKING:
    from keyshard.observe.metrics_server import MetricsServer
    from keyshard.observe.status_types import NewestErrorStatus

VERSION = 1
"""Version of the status. A field that is renamed, removed or changes its meaning raises it."""
LOOK_S = 1.0
"""Interval between two samples, seconds."""

_log = logging.getLogger(__name__)


class SinkRates(TypedDict):
    """Messages and bytes per second; ``None`` while they are unknown."""

    published: float | None
    confirmed: float | None
    bytes: float | None


class SinkCounters(TypedDict):
    """Counts since the sink connected."""

    published: int
    confirmed: int
    failed: int
    alreadyStored: int
    entries: int
    bytes: int
    batches: int


class UnconfirmedStatus(TypedDict):
    """Messages without a confirmation."""

    messages: int
    entries: int
    bytes: int
    oldestSeconds: float | None
    """``None`` without an unconfirmed entry."""


class SinkStatus(TypedDict):
    """Status of an open sink; ``docs/status.md`` describes every field."""

    version: int
    kind: str
    name: str
    state: str
    uptimeSeconds: float
    newestError: NewestErrorStatus | None
    sinkId: str | None
    topic: str
    topics: list[str]
    serviceUrl: str
    transport: str
    deliveryGuarantee: str
    pid: int
    host: str
    rates: SinkRates
    counters: SinkCounters
    unconfirmed: UnconfirmedStatus


class SinkMonitor:
    """Exposes the status of an open sink until :meth:`close`.

    Args:
        config: Options of the sink.
        counts: Its counts.

    Raises:
        ConfigError: The port of the metrics cannot be used.
        ThreadStartError: A thread cannot be started.
    """

    def __init__(self, config: SinkConfig, counts: SinkCounts) -> None:
        self._config = config
        self._counts = counts
        self._name = config.sink_id or config.topic
        self._pace, self._lock = Pace(), threading.Lock()
        self._began_s = time.monotonic()
        self._stopping, self._closed = threading.Event(), threading.Event()
        self._control: ControlServer | None = None
        self._metrics: MetricsServer | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config = self._config
        if config.metrics_port is not None:
            from keyshard.observe.metrics import SINK_METRICS  # noqa: PLC0415
            from keyshard.observe.metrics_server import MetricsServer  # noqa: PLC0415

            self._metrics = MetricsServer(
                config.metrics_host, config.metrics_port, self.status, lambda: "",
                self._not_ready, table=SINK_METRICS,
            )  # fmt: skip
            _log.info(
                "metrics of sink %s are served on %s, port %d",
                self._name, config.metrics_host, self._metrics.port,
            )  # fmt: skip
        try:
            self._control = ControlServer(
                self._name, config.service_url, config.topic,
                {"status": lambda _request: self.status()}, kind=SINK, name=self._name,
            )  # fmt: skip
        except ControlError as exc:
            # A sink publishes without a control socket too.
            _log.warning("the keyshard commands cannot reach this sink: %s", exc.summary)
        begin("keyshard-sink-watch", self._watch)

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; ``None`` if they are not served."""
        return None if self._metrics is None else self._metrics.port

    def stopping(self) -> None:
        """Show the sink as stopping: it waits for confirmations."""
        self._stopping.set()

    def close(self) -> None:
        """Stop all parts. Idempotent."""
        self._stopping.set()
        self._closed.set()
        for part in (self._control, self._metrics):
            if part is not None:
                part.close()

    def status(self) -> SinkStatus:
        """Return the whole status; see ``docs/status.md``."""
        config, counts, now_s = self._config, self._counts.look(), time.monotonic()
        with self._lock:
            rates: SinkRates = {
                "published": _rounded(self._pace.rate("published")),
                "confirmed": _rounded(self._pace.rate("confirmed")),
                "bytes": _rounded(self._pace.rate("bytes")),
            }
        totals, pending = counts.totals, counts.pending
        oldest_s = None if pending.since_s is None else max(0.0, now_s - pending.since_s)
        return {
            "version": VERSION,
            "kind": SINK,
            "name": self._name,
            "state": "stopping" if self._stopping.is_set() else "running",
            "uptimeSeconds": round(now_s - self._began_s, 1),
            "newestError": _newest_error(counts, now_s),
            "sinkId": config.sink_id,
            "topic": config.topic,
            "topics": list(counts.topics),
            "serviceUrl": redacted(config.service_url),
            "transport": transport_of(config.how_to_connect()),
            "deliveryGuarantee": config.delivery_guarantee,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rates": rates,
            "counters": {
                "published": totals.published,
                "confirmed": totals.confirmed,
                "failed": totals.failed,
                "alreadyStored": totals.already_stored,
                "entries": totals.entries,
                "bytes": totals.bytes,
                "batches": totals.batches,
            },
            "unconfirmed": {
                "messages": pending.messages,
                "entries": pending.entries,
                "bytes": pending.bytes,
                "oldestSeconds": None if oldest_s is None else round(oldest_s, 3),
            },
        }

    def _not_ready(self) -> str:
        return "The sink is stopping." if self._stopping.is_set() else ""

    def _watch(self) -> None:
        while True:
            totals = self._counts.look().totals
            values: dict[Hashable, float | None] = {
                "published": totals.published,
                "confirmed": totals.confirmed,
                "bytes": totals.bytes,
            }
            with self._lock:
                self._pace.look(time.monotonic(), values)
            if self._closed.wait(LOOK_S):
                return


def _newest_error(counts: Counts, now_s: float) -> NewestErrorStatus | None:
    if counts.newest_error is None:
        return None
    text, at_s = counts.newest_error
    return {"error": text, "secondsAgo": round(max(0.0, now_s - at_s), 1)}


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)
