"""Sources that consume from a scripted broker in threads, with waits that are short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from keyshard import KeyShardSource, Message, Reject
from keyshard.broker import preflight, retry
from keyshard.broker.wire import ack_grouping, connection_pool, keep_alive
from keyshard.broker.wire import subscription as subscribed
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.config.workers import WorkersOption
from keyshard.consumers import reconnector
from keyshard.core import range_watchdog, refusal_timer
from keyshard.errors import KeyShardError
from keyshard.workers import backends, host, supervisor
from tests.refusals.broker import ScriptedBroker
from tests.support.deadlines import deadline, in_time, joined
from tests.support.worker_servers import LocalWorker

GOES_ON_S = deadline(20)
"""Longest time until a run continues after the broker recovered, seconds."""
LEASE_S = 60.0
"""Longest time without a question to a worker, seconds: many cells share the processor."""
TOPIC = "persistent://public/default/t"


@contextmanager
def unhurried() -> Iterator[None]:
    """Waits of the product, and worker processes that are threads of this one."""
    with patch.object(backends, "start_of", _in_threads):
        yield


@contextmanager
def hurried() -> Iterator[None]:
    """Waits that are short, and worker processes that are threads of this one."""
    changes: list[tuple[Any, str, Any]] = [
        (refusal_timer, "REFUSED_S", 0.4), (refusal_timer, "UNAUTHENTICATED_S", 0.8),
        (retry, "LONGEST_WAIT_S", 0.2), (keep_alive, "PING_AFTER_S", 0.2),
        (keep_alive, "UNRESPONSIVE_S", 0.5), (subscribed, "WAITS_S", 1.0),
        (reconnector, "LOOK_S", 0.1), (reconnector, "AWAY_S", (0.3, 0.6)),
        (ack_grouping, "UNCONFIRMED_S", 1.0), (connection_pool, "RETIRE_AGE_S", 0.5),
        (preflight, "ANSWER_S", 1.0), (supervisor, "START_AGAIN_S", 0.1),
        (host, "REOPEN_WAIT_S", 0.2),
        (range_watchdog, "STALL_S", 1.0),
    ]  # fmt: skip
    with ExitStack() as patches:
        patches.enter_context(unhurried())
        for change in changes:
            patches.enter_context(patch.object(*change))
        yield


def _in_threads(connection: Connection, _: WorkersOption) -> backends.StartWorker:
    return lambda _stop: LocalWorker(WireBroker(connection), lease_s=LEASE_S)


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        in_time(end_s, f"{what} within {timeout_s:.0f} s")
        time.sleep(0.01)


class Run:
    """A source in a thread that acknowledges its batches."""

    def __init__(self, broker: ScriptedBroker, workers: str = "embedded") -> None:
        self.source = KeyShardSource(
            TOPIC, subscription="s", parallelism=2, starting_position="earliest",
            subscribe_timeout_ms=1_500, workers=workers,
            connection=Connection(
                broker.url, operation_timeout_ms=1_000, connection_timeout_ms=500
            ),
        )  # fmt: skip
        self.rows = 0
        self.error: BaseException | None = None
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="refused", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._consume()
        except BaseException as exc:  # noqa: BLE001 - judged by the cell
            self.error = exc
        self.ended = True

    def _consume(self) -> None:
        for batch in self.source.batches(max_rows=100, max_wait_s=0.01):
            self.rows += batch.records.num_rows
            batch.ack()

    def trouble(self) -> str:
        """Text on the broker in its status; empty also while it starts or has ended."""
        try:
            window = self.source.status()["window"]
        except KeyShardError:
            return ""
        return window["connectionError"] if window else ""

    def close(self) -> None:
        end_s = time.monotonic() + GOES_ON_S
        while self._thread.is_alive() and time.monotonic() < end_s:
            try:
                self.source.stop()
            except KeyShardError:
                time.sleep(0.01)
            self._thread.join(0.2)
        joined(self._thread, 0)


class LetterRun(Run):
    """A source that rejects every message: each becomes a dead letter."""

    def _consume(self) -> None:
        self.source.run(self._reject, drain_timeout_s=0.5)

    def _reject(self, _: Message) -> None:
        self.rows += 1
        raise Reject("it never succeeds")

    def trouble(self) -> str:
        """Text on the broker, or on a range that stalls."""
        try:
            stalled = [one["stalled"] for one in self.source.status()["ranges"]]
        except KeyShardError:
            return ""
        return super().trouble() or next((one["reason"] for one in stalled if one), "")
