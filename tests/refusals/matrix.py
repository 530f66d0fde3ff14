"""Every refusal x every request x every moment: a run goes on, or ends by name, or says why not.

A cell is a request, a moment, and an answer: a number of ``ServerError``, or a way to stand still.
After the refusal the broker is well again; a run that has not ended has to go on then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

from keyshard import KeyShardSource
from keyshard.broker import retrier
from keyshard.broker.pulsar import first_question
from keyshard.broker.wire import cluster as clusters
from keyshard.broker.wire import keep_alive, receipts, subscribed
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core import refusals
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import KeyShardError
from keyshard.worker import reconnector
from tests.refusals.broker import SAID, Cluster, ScriptedBroker, Session

NAMED_S = 10.0
"""Longest time until a refusal ends a run or is in its status, seconds."""
GOES_ON_S = 20.0
"""Longest time until a run goes on once the broker is well, seconds."""
CODES = tuple(range(26))
"""All numbers of ``ServerError``."""
PASSING = {0, 1, 2, 5, 6, 11, 13, 14, 19}
"""Those that pass by themselves, or by what somebody else does."""
SILENT, FROZEN, HALF, LISTENS, ASTRAY = "silent", "frozen", "half a frame", "listens", "astray"
"""No answer to the request; to none; a part of one; to no connection; a look-up of a dead broker.
"""
TOPIC = "persistent://public/default/t"
WORKERS = 6
"""Cells that run at the same time."""


class Cell(NamedTuple):
    """One way to be refused."""

    moment: str
    request: str
    answer: int | str

    def __str__(self) -> str:
        return f"{self.request} at {self.moment}: {self.answer}"


def _cells() -> Iterator[Cell]:
    sources = {
        "first": ("connect", "partitioned_metadata", "lookup", "subscribe"),
        "return": ("connect", "lookup", "subscribe"),
        "reopen": ("lookup", "subscribe"),
        "rescale": ("lookup", "subscribe"),
        "running": ("ack",),
    }
    handles = {"reader": ("lookup", "subscribe", "get_last_message_id"),
               "producer": ("producer",)}  # fmt: skip
    for moment, requests in (sources | handles).items():
        # An acknowledgement without any answer stays in the status until the connection ends.
        silent = () if moment == "running" else (SILENT,)
        yield from (Cell(moment, *one) for one in product(requests, (*CODES, *silent)))
    for moment in ("first", "return"):
        yield from (Cell(moment, "connect", how) for how in (LISTENS, FROZEN))
        yield Cell(moment, "lookup", ASTRAY)
    yield from (Cell("running", "ping", how) for how in (FROZEN, HALF))


CELLS = tuple(_cells())


@contextmanager
def hurried() -> Iterator[None]:
    """Waits that are short."""
    changes: list[tuple[Any, str, Any]] = [
        (refusals, "REFUSED_S", 0.4), (refusals, "UNAUTHENTICATED_S", 0.8),
        (retrier, "LONGEST_WAIT_S", 0.2), (keep_alive, "PING_AFTER_S", 0.2),
        (keep_alive, "UNRESPONSIVE_S", 0.5), (subscribed, "WAITS_S", 1.0),
        (reconnector, "LOOK_S", 0.1), (reconnector, "AWAY_S", (0.3, 0.6)),
        (receipts, "UNCONFIRMED_S", 1.0), (clusters, "RETIRE_AGE_S", 0.5),
        (first_question, "ANSWER_S", 1.0),
    ]  # fmt: skip
    with ExitStack() as patches:
        for change in changes:
            patches.enter_context(patch.object(*change))
        yield


def run_cells(cells: tuple[Cell, ...]) -> Iterator[tuple[Cell, str, str]]:
    """Run cells side by side: each, what became of it, and what is wrong with that."""
    with hurried(), ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(_outcome, cells)


def _outcome(cell: Cell) -> tuple[Cell, str, str]:
    cluster = Cluster()
    broker = cluster.broker()
    try:
        if cell.moment in ("reader", "producer"):
            return cell, _of_handle(cell, broker), ""
        return cell, _of_source(cell, cluster, broker), ""
    except AssertionError as exc:
        return cell, "", str(exc)
    finally:
        cluster.close()


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"{what} within {timeout_s:.0f} s"
        time.sleep(0.01)


def _spoil(cell: Cell, broker: ScriptedBroker) -> None:
    """Begin to refuse."""
    if isinstance(cell.answer, int):
        broker.refuses(cell.request, cell.answer)
    elif cell.answer == SILENT:
        broker.script = lambda _, name, __: name == cell.request
    elif cell.answer == LISTENS:
        broker.accepts = False
    elif cell.answer == ASTRAY:
        broker.script = _astray
    else:
        if cell.answer == HALF:
            broker.half_a_frame()
        broker.freeze()


def _astray(session: Session, name: str, command: Any) -> bool:
    """Name a port that nobody listens at as the owner of a topic."""
    if name != "lookup":
        return False
    session.lead_to(command, "pulsar://127.0.0.1:1")
    return True


# -- sources --------------------------------------------------------------------------------------


class Run:
    """A source that acknowledges what comes, in a thread."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.source = KeyShardSource(
            TOPIC, subscription="s", parallelism=2, starting_position="earliest",
            subscribe_timeout_ms=1_500,
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
            for batch in self.source.batches(max_rows=100, max_wait_s=0.01):
                self.rows += batch.records.num_rows
                batch.ack()
        except BaseException as exc:  # noqa: BLE001 - judged by the cell
            self.error = exc
        self.ended = True

    def told(self) -> str:
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
        assert not self._thread.is_alive(), "it does not stop"


def _of_source(cell: Cell, cluster: Cluster, broker: ScriptedBroker) -> str:
    if cell.moment == "first":
        _spoil(cell, broker)
        run = Run(broker)
        try:
            until(lambda: run.ended or run.told(), NAMED_S, "no error by name")
            return _went_on(run, cluster, broker)
        finally:
            broker.is_well()
            run.close()
    run = Run(broker)
    try:
        cluster.publish(6)
        until(lambda: run.rows == 6 or run.ended, GOES_ON_S, "it does not begin")
        assert not run.ended, f"it does not begin: {run.error}"
        _spoil(cell, broker)
        moved = _disturb(cell, run, cluster, broker)
        until(lambda: run.ended or run.told() or moved(), NAMED_S, "not named")
        told = run.told()
        if isinstance(cell.answer, int) and told and cell.answer != 11:
            assert SAID.decode() in told, f"not in the broker's words: {told}"
        if _ends(cell):
            until(lambda: run.ended, NAMED_S, "it does not end")
        return _went_on(run, cluster, broker)
    finally:
        broker.is_well()
        run.close()


def _ends(cell: Cell) -> bool:
    """Whether a refusal that stays ends a run that has begun."""
    if cell.moment == "rescale" or not isinstance(cell.answer, int):
        return False
    return cell.answer in (3, 4) if cell.request == "connect" else cell.answer not in PASSING


def _disturb(
    cell: Cell, run: Run, cluster: Cluster, broker: ScriptedBroker
) -> Callable[[], object]:
    """Bring about the moment; tells whether that is over, where it has an end of its own."""
    if cell.moment == "return":
        broker.cut_all()
    elif cell.moment == "running" and cell.request == "ack":
        cluster.publish(2)
    elif cell.moment == "reopen":
        worker = run.source.__dict__["_running"]._coordinator.worker
        (one, *_) = worker.range_consumers.by_partition[TopicPartition(TOPIC)]
        worker._reconnector.reopen(one)
    elif cell.moment == "rescale":
        ends: list[KeyShardError | None] = []

        def rescale() -> None:
            try:
                run.source.rescale(3)
                ends.append(None)
            except KeyShardError as exc:
                ends.append(exc)

        threading.Thread(target=rescale, name="rescale", daemon=True).start()
        return lambda: ends
    return lambda: False


def _went_on(run: Run, cluster: Cluster, broker: ScriptedBroker) -> str:
    """How it ended, or that it goes on once the broker is well."""
    broker.is_well()
    if not run.ended:
        before = run.rows
        cluster.publish(6)
        until(lambda: run.ended or run.rows >= before + 6, GOES_ON_S, "it does not go on")
        everything = set(range(len(cluster.keys)))
        until(lambda: run.ended or everything <= cluster.acked, GOES_ON_S, "not acknowledged")
        until(lambda: run.ended or not run.told(), GOES_ON_S, "still in the status")
    if not run.ended:
        return "went on"
    assert isinstance(run.error, KeyShardError), f"ended by {run.error!r}"
    return run.error.code


# -- handles --------------------------------------------------------------------------------------


def _of_handle(cell: Cell, broker: ScriptedBroker) -> str:
    """A Reader or a producer: it answers, or raises by name, in time."""
    made = WireBroker(Connection(broker.url, operation_timeout_ms=1_000, connection_timeout_ms=500))
    where, began_s = TopicPartition(TOPIC), time.monotonic()
    try:
        if cell.moment == "reader":
            if cell.request == "get_last_message_id":
                reader = made.reader(where, EntryId(7, 0))
                _spoil(cell, broker)
                reader.at_end()
            else:
                _spoil(cell, broker)
                made.reader(where, EntryId(7, 0))
        else:
            _spoil(cell, broker)
            made.producer(where, send_timeout_ms=1_000)
    except KeyShardError as exc:
        return exc.code
    else:
        return "went on"
    finally:
        took_s = time.monotonic() - began_s
        broker.is_well()
        made.close()
        assert took_s < NAMED_S, f"it took {took_s:.1f} s"
