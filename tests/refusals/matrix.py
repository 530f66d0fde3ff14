"""Every refusal x every request x every moment: a run continues, names an error, or its trouble.

A cell is a request, a moment, and an answer: a number of ``ServerError``, or a way to stand still.
After the refusal the broker is well again; a run that has not ended has to go on then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from keyshard.broker.schemas import first_tries_s, schema_of
from keyshard.broker.wire import ack_grouping, keep_alive
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core import refusal_timer
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import KeyShardError
from tests.proofs.runner import ENDLESS, Options, Outcome, Outcomes, Proof, failed
from tests.refusals.broker import SAID, Cluster, ScriptedBroker, Session
from tests.refusals.run import GOES_ON_S, TOPIC, LetterRun, Run, hurried, unhurried, until
from tests.support.deadlines import DeadlineError, deadline
from tests.support.machine import Since

NAMED_S = deadline(10)
"""Longest time until a refusal ends a run or is in its status, seconds."""
CODES = tuple(range(26))
"""All numbers of ``ServerError``."""
PASSING = {0, 1, 2, 5, 6, 11, 13, 14, 19}
"""Refusals that pass by themselves, or by an action of another client."""
UNTOLD = {10, 12, 17, 20, 21, 23, 24}
"""Those that pulsar-client takes for passing when it opens a producer; no broker answers so."""
OF_PRODUCERS = {7, 8, 16}
"""Those that a producer waits for: a quota that is exceeded, and another producer of its name."""
AUTHENTICATION, AUTHORIZATION = 3, 4
TOPIC_NOT_FOUND = 11
"""Named by keyshard's own words."""
SILENT, FROZEN, HALF, LISTENS, ASTRAY = "silent", "frozen", "half a frame", "listens", "astray"
"""No answer to the request; to none; a part of one; to no connection; a look-up of a dead broker.
"""
ANSWERS: tuple[int | str, ...] = (*CODES, SILENT)
ANOTHER = "another worker"
IN_WORKER = " in a worker"
"""How moments end that consumers see which a worker has."""
ATTEMPTS = 3
"""Attempts to begin a cell: on a machine with much else to do the short waits may be too short."""
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
        "first in a worker": ("lookup", "subscribe"),
        "return in a worker": ("connect", "lookup", "subscribe"),
        "reopen in a worker": ("lookup", "subscribe"),
        "replace in a worker": ("lookup", "subscribe"),
        ANOTHER: ("connect", "lookup", "subscribe"),
        "rescale in a worker": ("subscribe",),
        "running in a worker": ("ack",),
    }
    dead_letters = {
        "first dead letter": ("lookup", "producer", "send"),  # the start asks for its partitions
        "next dead letter": ("send",),
        "producer's return": ("connect", "lookup", "producer", "send"),
    }
    handles = {"reader": ("lookup", "subscribe", "get_last_message_id"),
               "producer": ("producer",),
               "first schema": ("connect", "get_schema"), "schema": ("get_schema",)}  # fmt: skip
    for moment, requests in (sources | dead_letters | handles).items():
        yield from (Cell(moment, *one) for one in product(requests, ANSWERS))
    for moment in ("first", "return"):
        yield from (Cell(moment, "connect", how) for how in (LISTENS, FROZEN))
        yield Cell(moment, "lookup", ASTRAY)
    yield from (Cell("running", "ping", how) for how in (FROZEN, HALF))


CELLS = tuple(_cells())
HANDLES = ("reader", "producer", "first schema", "schema")
DEAD_LETTER_MOMENTS = ("first dead letter", "next dead letter", "producer's return")


REAL_TIME = (
    *(Cell("return", "subscribe", code) for code in (3, 4, 6, 7, 16, 22)),
    *(Cell("reopen", "subscribe", code) for code in (3, 4)),
    *(Cell("return", "connect", how) for how in (3, 4, LISTENS, FROZEN)),
    Cell("return", "lookup", 4), Cell("return", "lookup", ASTRAY),
    Cell("first", "subscribe", 4), Cell("first", "connect", 3), Cell("first", "lookup", SILENT),
    Cell("running", "ack", 4), Cell("running", "ack", SILENT), Cell("running", "ping", HALF),
    Cell("producer's return", "producer", 4), Cell("next dead letter", "send", 2),
    Cell("first schema", "connect", 3), Cell("first schema", "get_schema", 4),
    Cell("schema", "get_schema", 6), Cell("schema", "get_schema", SILENT),
)  # fmt: skip
"""Cells that also run with the waits of the product, 5 to 60 s each."""


def run_cells(
    cells: tuple[Cell, ...], *, real_time: bool = False
) -> Iterator[tuple[Cell, str, AssertionError | None]]:
    """Run cells concurrently; yields each cell, its outcome, and its error.

    Args:
        cells: The cells.
        real_time: Whether the waits of the product stay as they are.
    """
    waits = unhurried() if real_time else hurried()
    with waits, ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(_outcome, cells)


class NotBegunError(AssertionError):
    """The moment of a cell did not come: nothing was refused yet."""


def _check_started(run: Run) -> None:
    if run.ended:
        raise NotBegunError(f"it does not begin: {run.error}")


def _outcome(cell: Cell, attempts: int = ATTEMPTS) -> tuple[Cell, str, AssertionError | None]:
    cluster = Cluster()
    broker = cluster.broker()
    try:
        if cell.moment in HANDLES:
            return cell, _of_handle(cell, broker), None
        of = _of_dead_letters if cell.moment in DEAD_LETTER_MOMENTS else _of_source
        return cell, of(cell, cluster, broker), None
    except AssertionError as exc:
        if not isinstance(exc, NotBegunError) or attempts == 1:
            return cell, "", exc
    finally:
        cluster.close()
    return _outcome(cell, attempts - 1)


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
    """Name a port without a listener as the owner of a topic."""
    if name != "lookup":
        return False
    session.lead_to(command, "pulsar://127.0.0.1:1")
    return True


# -- sources --------------------------------------------------------------------------------------


def _of_source(cell: Cell, cluster: Cluster, broker: ScriptedBroker) -> str:
    workers = "processes:1" if IN_WORKER in cell.moment or cell.moment == ANOTHER else "embedded"
    moment = cell.moment.removesuffix(IN_WORKER)
    if moment == "first":
        _spoil(cell, broker)
        run = Run(broker, workers)
        try:
            until(
                lambda: run.ended or run.trouble() or _has_no_partitions(cell), NAMED_S,
                "no error by name",
            )  # fmt: skip
            return _went_on(cell, run, cluster, broker)
        finally:
            broker.is_well()
            run.close()
    run = Run(broker, workers)
    try:
        cluster.publish(6)
        until(lambda: run.rows == 6 or run.ended, GOES_ON_S, "it does not begin")
        _check_started(run)
        _spoil(cell, broker)
        moved = _disturb("ack" if cell.request == "ack" else moment, run, cluster, broker)
        within_s = NAMED_S + _silence_s(cell)
        until(lambda: run.ended or _is_named(cell, run) or moved(), within_s, "not named")
        if _ends(cell):
            until(lambda: run.ended, NAMED_S + _patience_s(cell), "it does not end")
        return _went_on(cell, run, cluster, broker)
    finally:
        broker.is_well()
        run.close()


def _has_no_partitions(cell: Cell) -> bool:
    """Whether a source takes the answer for a topic without partitions, and goes on."""
    return (cell.request, cell.answer) == ("partitioned_metadata", TOPIC_NOT_FOUND)


def _is_named(cell: Cell, run: Run) -> bool:
    """Whether its status shows the error of the broker."""
    trouble = run.trouble()
    if not isinstance(cell.answer, int) or cell.answer == TOPIC_NOT_FOUND:
        return bool(trouble)
    return SAID.decode() in trouble


def _silence_s(cell: Cell) -> float:
    """Longest time until a source calls a silent connection dead, seconds."""
    if cell.request == "ping" or cell.answer == FROZEN:
        return keep_alive.PING_AFTER_S + keep_alive.UNRESPONSIVE_S
    return ack_grouping.UNCONFIRMED_S if (cell.request, cell.answer) == ("ack", SILENT) else 0.0


def _patience_s(cell: Cell) -> float:
    """Time for which a running source repeats a refused request, seconds."""
    # A connection that may not be opened is one with wrong credentials.
    of_connect = cell.request == "connect" and cell.answer == AUTHORIZATION
    unauthenticated = of_connect or cell.answer == AUTHENTICATION
    return refusal_timer.UNAUTHENTICATED_S if unauthenticated else refusal_timer.REFUSED_S


def _ends(cell: Cell) -> bool:
    """Whether a permanent refusal ends a running source."""
    if cell.moment.startswith("rescale") or not isinstance(cell.answer, int):
        return False
    return cell.answer in (3, 4) if cell.request == "connect" else cell.answer not in PASSING


def _disturb(
    moment: str, run: Run, cluster: Cluster, broker: ScriptedBroker
) -> Callable[[], object]:
    """Bring about a moment; return a function that tells whether the moment is over."""
    if moment == "return":
        broker.cut_all()
    elif moment == "ack":
        cluster.publish(2)
    elif moment == ANOTHER:
        for one in run.source.__dict__["_running"].coordinator.broker._workers:
            one._worker.kill()
    elif moment == "replace":
        for one in run.source.__dict__["_running"].coordinator.broker._workers:
            host = one._worker.host
            for hosted in [*host._hosted.values()]:
                hosted.lacking = True
                host._retrier.until_true(partial(host._replace, hosted))
    elif moment == "reopen":
        worker = run.source.__dict__["_running"].coordinator.consumers
        (one, *_) = worker.range_consumers.by_partition[TopicPartition(TOPIC)]
        worker._reconnector.reopen(one)
    elif moment == "rescale":
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


def _went_on(cell: Cell, run: Run, cluster: Cluster, broker: ScriptedBroker) -> str:
    """Judge the end of a run, or its recovery with the broker; return the outcome."""
    broker.is_well()
    if (cell.request, cell.answer) == ("ack", SILENT):
        assert not run.ended, f"ended by {run.error!r}"
        # The status names the acknowledgement. It is sent again only on a new connection.
        broker.cut_all()
    if not run.ended:
        before = run.rows
        cluster.publish(6)
        until(lambda: run.ended or run.rows >= before + 6, GOES_ON_S, "it does not go on")
        everything = set(range(len(cluster.entries)))
        until(
            lambda: run.ended or everything <= cluster.acknowledged(), GOES_ON_S, "not acknowledged"
        )
        until(lambda: run.ended or not run.trouble(), GOES_ON_S, "still in the status")
    if not run.ended:
        return "went on"
    assert isinstance(run.error, KeyShardError), f"ended by {run.error!r}"
    return run.error.code


# -- dead letters ---------------------------------------------------------------------------------


def _of_dead_letters(cell: Cell, cluster: Cluster, broker: ScriptedBroker) -> str:
    """A source whose messages all become dead letters; the broker refuses them."""
    run = LetterRun(broker)
    try:
        if cell.moment != "first dead letter":
            cluster.publish(2)
            until(lambda: {0, 1} <= cluster.acknowledged() or run.ended, GOES_ON_S, "no letters")
        else:
            until(lambda: run.ended or len(cluster.members) > 2, GOES_ON_S, "it does not begin")
        _check_started(run)
        _spoil(cell, broker)
        if cell.moment == "producer's return":
            broker.cut_all()
        cluster.publish(2)
        until(lambda: run.ended or run.trouble(), NAMED_S, "not named")
        if _ends_dead_letters(cell):
            until(lambda: run.ended, NAMED_S + _patience_s(cell), "it does not end")
        outcome = _went_on(cell, run, cluster, broker)
        lost = cluster.acknowledged() - set(cluster.dead_letters)
        assert not lost, f"acknowledged and no letters: {lost}"
    finally:
        broker.is_well()
        run.close()
    return outcome


def _ends_dead_letters(cell: Cell) -> bool:
    # The client of a producer does not say why a message that it sends is not confirmed.
    if not isinstance(cell.answer, int) or cell.request == "send":
        return False
    if cell.moment == "producer's return" and cell.request in ("connect", "lookup"):
        return _ends(cell)  # the consumers come back first
    passing = PASSING | OF_PRODUCERS | UNTOLD | ({25} if cell.request != "producer" else set())
    return cell.answer not in passing


# -- handles --------------------------------------------------------------------------------------


def _of_handle(cell: Cell, broker: ScriptedBroker) -> str:
    """A Reader, a producer or a schema: it answers, or raises by name, in time."""
    connection = Connection(broker.url, operation_timeout_ms=1_000, connection_timeout_ms=500)
    made = WireBroker(connection)
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
        elif cell.request == "get_schema" or cell.moment == "first schema":
            _spoil(cell, broker)
            tries_s = first_tries_s(connection) if cell.moment == "first schema" else None
            schema_of(connection, TOPIC, tries_s=tries_s)
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
        if took_s >= NAMED_S:
            raise DeadlineError(f"it took {took_s:.1f} s")


# -- the command ----------------------------------------------------------------------------------


def _outcomes(given: Options, seeds: range) -> Outcomes:
    """A seed is the number of a cell."""
    logging.getLogger("keyshard").setLevel(logging.CRITICAL)
    cells = REAL_TIME if given.real_time else CELLS
    chosen = {
        number: cell
        for number, cell in enumerate(cells)
        if number in seeds and given.only in str(cell)
    }
    since = Since()
    found = run_cells(tuple(chosen.values()), real_time=given.real_time)
    for number, (cell, outcome, error) in zip(chosen, found, strict=True):
        counts = Counter({f"{cell.request} at {cell.moment}: {outcome or 'WRONG'}": 1})
        judged = failed(number, error, since) if error else Outcome(number)
        yield replace(judged, details=str(cell), counts=counts)


PROOF = Proof(
    _outcomes, seeds=ENDLESS, seed_start=0, keep_going=True,
    options={
        "--only": {"default": "", "help": "cells whose name has this in it"},
        "--real-time": {
            "action": "store_true",
            "help": "a share of the cells with the waits of the product, numbered from 0",
        },
    },
)  # fmt: skip
