"""Starts the parts that expose a run: watchdog, broker facts, control socket, metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from keyshard.broker.connect import connect_admin
from keyshard.control import ControlServer, Handler
from keyshard.core.option_checks import check_bool, check_names
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import RescaleDryRun
from keyshard.core.ring.key_slot import broker_text
from keyshard.errors import ConfigError, ControlError, NotRunningError
from keyshard.observe.broker_poll import BrokerPoll, name_stalls
from keyshard.observe.observed_run import ObservedRun
from keyshard.observe.status import StatusView
from keyshard.threads import begin

if TYPE_CHECKING:
    from keyshard.observe.metrics_server import MetricsServer
    from keyshard.observe.page.options import PageOptions
    from keyshard.observe.page.server import PageServer

LOOK_S = 1.0
"""Interval of the watchdog, seconds."""
RUNS_MAX = 200
"""Most messages in the answer to ``runs``."""

_log = logging.getLogger(__name__)


class Monitor:
    """Exposes one run, from before its start until :meth:`close`.

    Args:
        subject: The run.
        metrics: Address and port for Prometheus and probes; ``None``: those of the source.
        page: The page to serve; ``None``: that of the source.

    Raises:
        ConfigError: A port cannot be used, or the page needs a package or a control socket.
        ThreadStartError: A thread cannot be started.
    """

    def __init__(
        self,
        subject: ObservedRun,
        metrics: tuple[str, int] | None = None,
        page: PageOptions | None = None,
    ) -> None:
        self._subject = subject
        self._stopping = threading.Event()
        config = subject.config
        self._metrics: MetricsServer | None = None
        self._broker_facts: BrokerPoll | None = None
        self._control: ControlServer | None = None
        self._page: PageServer | None = None
        if config.admin_url is not None:
            connection = config.how_to_connect()
            self._broker_facts = BrokerPoll(
                lambda: connect_admin(connection),
                config.subscription,
                self._asked,
                self._holding,
            )
        self.view = StatusView(subject, self._broker_facts)
        if metrics is None and config.metrics_port is not None:
            metrics = config.metrics_host, config.metrics_port
        if page is None and config.ui_port is not None:
            from keyshard.observe.page.options import PageOptions  # noqa: PLC0415 - few runs have one

            page = PageOptions(config.ui_host, config.ui_port, config.ui_token)
        try:
            self._start(metrics, page)
        except BaseException:
            self.close()
            raise

    def _start(self, metrics: tuple[str, int] | None, page: PageOptions | None) -> None:
        subject, config = self._subject, self._subject.config
        if metrics is not None:
            from keyshard.observe.metrics_server import MetricsServer  # noqa: PLC0415 - few runs

            self._metrics = MetricsServer(
                *metrics, self.view.status, self.view.not_live, self.view.not_ready
            )
            _log.info("metrics are served on %s, port %d", metrics[0], self._metrics.port)
        handlers: dict[str, Handler] = {
            "status": self._status,
            "explain": self._explain,
            "runs": self._runs,
            "stack": self._stack,
            "rescale": self._rescale,
            "pause": self._pause,
            "resume": self._resume,
        }
        if subject.dead_letters is not None:
            from keyshard.observe.dead_letter_requests import DeadLetterRequests  # noqa: PLC0415

            handlers |= DeadLetterRequests(subject.dead_letters, config.how_to_connect()).handlers()
        topics = config.topics_pattern or ", ".join(config.topics)
        try:
            self._control = ControlServer(
                config.subscription, config.service_url, topics, handlers,
                kind=subject.kind, name=config.name or config.subscription,
            )  # fmt: skip
        except ControlError as exc:
            # Handlers run without a control socket too.
            _log.warning("the keyshard commands cannot reach this source: %s", exc.summary)
        if page is not None:
            self._page = self._serve(page)
        begin("keyshard-watchdog", self._watch)

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics; ``None`` if they are not served."""
        return None if self._metrics is None else self._metrics.port

    def _serve(self, page: PageOptions) -> PageServer:
        if self._control is None:
            raise ConfigError(
                "The page needs the control socket, which could not be created. The log has the "
                "reason.",
                "Correct it, or leave ui_port out.",
            )
        from keyshard.observe.page.options import serve_page  # noqa: PLC0415 - few runs have one

        own = self._control.path
        served = serve_page(page, lambda: [own])
        _log.info("the page of this source is at %s", served.url)
        return served

    @property
    def page_port(self) -> int | None:
        """Port of the page; ``None`` if it is not served."""
        return None if self._page is None else self._page.port

    def close(self) -> None:
        """Stop all parts. Idempotent."""
        self._stopping.set()
        for part in (self._page, self._control, self._metrics, self._broker_facts):
            if part is not None:
                part.close()

    def _asked(self) -> Mapping[TopicPartition, bool]:
        coordinator = self._subject.coordinator
        return coordinator.consumers.asked() if coordinator.started else {}

    def _holding(self) -> Collection[TopicPartition]:
        coordinator = self._subject.coordinator
        return coordinator.oldest_ms() if coordinator.started else ()

    def _status(self, _request: Mapping[str, Any]) -> Any:
        return self.view.status()

    def _explain(self, request: Mapping[str, Any]) -> Any:
        return self.view.explain(_key_of(request))

    def _runs(self, _request: Mapping[str, Any]) -> Any:
        handling = self._subject.handling
        return {"runs": handling.runs(time.monotonic(), RUNS_MAX)}

    def _stack(self, request: Mapping[str, Any]) -> Any:
        from keyshard.observe.dead_letter_requests import message_of  # noqa: PLC0415 - asked rarely

        topic, partition, message_id = message_of(request)
        found = self._subject.handling.stack(topic, partition, message_id)
        if found is None:
            raise ConfigError(
                f"No handler runs message {message_id} now: it has returned or not begun.",
                "The request runs lists those that run.",
            )
        return found

    def _rescale(self, request: Mapping[str, Any]) -> Any:
        rescaler, ranges = self._subject.rescaler(), request.get("ranges")
        if self._subject.fixed:
            raise ConfigError(
                "The ranges of this source are fixed while it runs.",
                "Stop it, and start it again with another parallelism.",
            )
        if rescaler is None:
            raise NotRunningError("The source is still starting.", "Try again later.")
        check_names("The request rescale", request, ("do", "ranges", "balance", "dry_run"))
        dry_run = request.get("dry_run", False)
        check_bool("dry_run", dry_run)
        if dry_run:
            return self._plan(ranges)
        if request.get("balance") is True and ranges is None:
            return rescaler.balance().to_dict()
        if type(ranges) is not int or request.get("balance"):
            raise ConfigError(
                "A rescale needs the number of ranges or balance.", "Give one of them."
            )
        return rescaler.rescale(ranges).to_dict()

    def _pause(self, _request: Mapping[str, Any]) -> Any:
        self._subject.coordinator.pause()
        return {"paused": True}

    def _resume(self, _request: Mapping[str, Any]) -> Any:
        self._subject.coordinator.resume()
        return {"paused": False}

    def _plan(self, ranges: object) -> Any:
        """Return what a rescale to a number of ranges would move."""
        if type(ranges) is not int:
            raise ConfigError(
                "dry_run needs the number of ranges. The moves of a balance depend on the load at "
                "that moment, so they cannot be shown before.",
                "Give the number.",
            )
        assignment = self._subject.coordinator.consumers.range_consumers.assignment
        plan = RescaleDryRun.make(assignment, ranges)
        return {
            "before": len(plan.before),
            "after": len(plan.after),
            "movedFraction": plan.moved_fraction,
            "moves": len(plan.moves),
        }

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            name_stalls(self.view.watch(), "ranges")


def _key_of(request: Mapping[str, Any]) -> str:
    key = request.get("key")
    if not isinstance(key, str):
        raise ConfigError(f"The key is {key!r}; it must be a text.")
    return broker_text(key)
