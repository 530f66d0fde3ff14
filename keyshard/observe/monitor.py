"""Everything that shows a run to others: watchdog, broker facts, control socket, metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from typing import Any

from keyshard.broker.connect import connect_admin
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.health import Stall
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.key_slot import broker_text
from keyshard.errors import ConfigError, ControlError, NotRunningError
from keyshard.observe.broker_facts import BrokerFacts
from keyshard.observe.control import ControlServer, Handler
from keyshard.observe.metrics_server import MetricsServer
from keyshard.observe.status import StatusView, Subject
from keyshard.threads import begin

LOOK_S = 1.0
"""Time between two looks of the watchdog, seconds."""
NAMED_MAX = 5
"""Stalls that are named one by one; of more at once the rest is counted."""

_log = logging.getLogger(__name__)


class Monitor:
    """Shows one run, from before it starts until :meth:`close`.

    Args:
        subject: The run.
        metrics: Address and port for Prometheus and probes; ``None``: none.

    Raises:
        ConfigError: The port for metrics cannot be had.
    """

    def __init__(self, subject: Subject, metrics: tuple[str, int] | None = None) -> None:
        self._subject = subject
        self._stopping = threading.Event()
        config = subject.config
        self._metrics: MetricsServer | None = None
        self._broker_facts: BrokerFacts | None = None
        self._control: ControlServer | None = None
        if config.admin_url is not None:
            connection = config.how_to_connect()
            self._broker_facts = BrokerFacts(
                lambda: connect_admin(connection), config.subscription, self._partitions
            )
        self.view = StatusView(subject, self._broker_facts)
        if metrics is not None:
            try:
                self._metrics = MetricsServer(
                    *metrics, self.view.status, self.view.not_live, self.view.not_ready
                )
            except BaseException:
                self.close()
                raise
        handlers: dict[str, Handler] = {
            "status": self._status,
            "explain": self._explain,
            "rescale": self._rescale,
        }
        if subject.unpark is not None:
            handlers["unpark"] = self._unpark
            handlers["discard"] = self._discard
            handlers["count_letters"] = self._count_letters
        topics = config.topics_pattern or ", ".join(config.topics)
        try:
            self._control = ControlServer(config.subscription, config.service_url, topics, handlers)
        except ControlError as exc:
            # Its handlers can do without being looked at from outside.
            _log.warning("keyshard status and its like do not reach this source: %s", exc)
        begin("keyshard-watchdog", self._watch)

    @property
    def metrics_port(self) -> int | None:
        """Where metrics are served."""
        return None if self._metrics is None else self._metrics.port

    def close(self) -> None:
        """End everything it started. Idempotent."""
        self._stopping.set()
        for part in (self._control, self._metrics, self._broker_facts):
            if part is not None:
                part.close()

    def _partitions(self) -> Collection[TopicPartition]:
        coordinator = self._subject.coordinator
        owned_ranges = coordinator.worker.owned_ranges() if coordinator.started else []
        return {owned_range.topic_partition for owned_range, _, _ in owned_ranges}

    def _status(self, _request: Mapping[str, Any]) -> Any:
        return self.view.status()

    def _explain(self, request: Mapping[str, Any]) -> Any:
        return self.view.explain(_key_of(request))

    def _unpark(self, request: Mapping[str, Any]) -> Any:
        assert self._subject.unpark is not None
        keys = self._subject.unpark(_selection_of(request))
        return {"parked": keys > 0, "keys": keys}

    def _discard(self, request: Mapping[str, Any]) -> Any:
        assert self._subject.discard is not None
        selection, rejected = _discarded(request)
        return {"letters": self._subject.discard(selection, rejected=rejected)}

    def _count_letters(self, request: Mapping[str, Any]) -> Any:
        """Count the dead letters that a discard gives up. An older source refuses this request."""
        assert self._subject.discard is not None
        selection, rejected = _discarded(request)
        return {"letters": self._subject.discard(selection, rejected=rejected, count_only=True)}

    def _rescale(self, request: Mapping[str, Any]) -> Any:
        rescaler, ranges = self._subject.rescaler(), request.get("ranges")
        if rescaler is None:
            raise NotRunningError("The source is still starting. Try again in a moment.")
        if request.get("balance") is True and ranges is None:
            return rescaler.balance().to_dict()
        if type(ranges) is not int or request.get("balance"):
            raise ConfigError("Give either a number of ranges or balance.")
        return rescaler.rescale(ranges).to_dict()

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_S):
            _name(self.view.watch())


def _selection_of(request: Mapping[str, Any]) -> Selection:
    return Selection(*_selected(request))


def _discarded(request: Mapping[str, Any]) -> tuple[Selection, bool]:
    """The selection of a request, and whether it is of rejected dead letters."""
    rejected = request.get("rejected") is True
    return Selection.for_discard(*_selected(request), rejected=rejected), rejected


def _selected(request: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Arguments of a selection; the key as the broker reads it."""
    key = request.get("key")
    return (
        broker_text(key) if isinstance(key, str) else key,
        request.get("all", False),
        request.get("topic"),
        request.get("older_than_s"),
    )


def _key_of(request: Mapping[str, Any]) -> str:
    key = request.get("key")
    if not isinstance(key, str):
        raise ConfigError(f"The key is {key!r}; give a text.")
    return broker_text(key)


def _name(stalls: list[Stall]) -> None:
    for stall in stalls[:NAMED_MAX]:
        _log.warning("range %d stalls: %s", stall.index, stall.reason)
    if len(stalls) > NAMED_MAX:
        _log.warning("%d more ranges stall; see keyshard status", len(stalls) - NAMED_MAX)
