"""The ways to read a topic in Python."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pyarrow as pa
import tenacity

import keyshard
from keyshard import KeyShardSource, RetryPolicy
from keyshard.errors import KeyShardError, NotRunningError
from tests.ways.draw import Published, Reading
from tests.ways.outcome import (
    DEADLINE_S,
    QUIET_S,
    Outcome,
    Place,
    columns_of,
    raw_rows,
    row_of,
    row_of_message,
    source_of,
)


def opened(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``open``, and decode at the end."""
    source = source_of(place, made, how)
    raw: list[pa.RecordBatch] = []
    expected, end = made.expected(how), time.monotonic() + DEADLINE_S
    with source.open() as stream:
        try:
            while sum(one.num_rows for one in raw) < expected:
                if time.monotonic() >= end:
                    out.is_late = True
                    break
                batch = stream.next_batch(timeout_s=1.0)
                if batch is not None:
                    raw += batch
                    stream.commit(batch)
            raw += stream.next_batch(timeout_s=QUIET_S) or []
        finally:
            out.counts["encryptedSkipped"] = stream.status()["encryptedSkipped"]
            out.rows += raw_rows(raw)
    out.rows[:] = _decoded(source, raw)


def bounded(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read what is stored with ``read``, and decode it."""
    source = source_of(place, made, how)
    with source.read(columns=columns_of(source)) as rows:
        raw = list(rows)
    out.rows += raw_rows(raw)
    out.rows[:] = _decoded(source, raw)


def _decoded(source: KeyShardSource, raw: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return decoded rows beside their bytes."""
    decoded = [row for one in source.decoder().decoded(raw) for row in one.to_pylist()]
    return [
        row_of(row) | {"raw": of_raw["raw"]}
        for row, of_raw in zip(decoded, raw_rows(raw), strict=True)
    ]


def batches(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``batches``."""
    source = source_of(place, made, how)
    ended = False
    with _stopped_in_time(source, out) as over:
        for batch in source.batches(max_wait_s=0.2):
            out.rows += raw_rows([batch.records])
            batch.ack()
            if not ended and len(out.rows) >= made.expected(how):
                ended = True
                over()


def handlers(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``run``."""
    source = source_of(place, made, how)
    with _stopped_in_time(source, out) as over:
        source.run(_handler(made, how, out, over))


def coroutines(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``arun`` and a coroutine."""
    source = source_of(place, made, how)
    with _stopped_in_time(source, out) as over:
        take = _handler(made, how, out, over)

        async def handle(message: keyshard.Message) -> None:
            await asyncio.sleep(0)
            take(message)

        asyncio.run(source.arun(handle))


def taken(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``async for``."""
    source = source_of(place, made, how)

    async def read() -> None:
        async for message in source:
            take(message)
            await message.done()

    with _stopped_in_time(source, out) as over:
        take = _handler(made, how, out, over)
        asyncio.run(read())


def parked(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Let the first messages of some keys fail; unpark the keys when the others came."""
    source = source_of(place, made, how)
    keyed = {
        number: one["ordering_key"] if one["ordering_key"] is not None else one["key"]
        for number, one in made.facts.items()
    }
    failing = {key for number, key in keyed.items() if number % 4 == 0 and key is not None}
    healed = threading.Event()
    take = _handler(made, how, out, lambda: None)

    def handle(message: keyshard.Message) -> None:
        if message.routing_key in failing and not healed.is_set():
            raise ValueError("not yet")
        take(message)

    gone = made.later | (made.encrypted if how.skips_encrypted else set())
    free = {one for one, key in keyed.items() if key not in failing} - gone
    retry = RetryPolicy(stop=tenacity.stop_after_attempt(1))
    with source.running(handle, retry=retry, on_failure="park"), suppress(NotRunningError):
        _polled(source, out, lambda: len(out.rows) >= len(free))
        out.problems += [
            f"{row['n']} was handled while its key was parked"
            for row in out.rows
            if row["n"] not in free
        ]
        healed.set()
        # Messages of a key that come late are parked meanwhile.
        _polled(source, out, lambda: len(out.rows) >= made.expected(how), source.unpark)
        threading.Event().wait(QUIET_S)
        out.count(source.status())


def _polled(
    source: KeyShardSource, out: Outcome, over: Callable[[], bool],
    step: Callable[..., object] | None = None,
) -> None:  # fmt: skip
    """Wait until all came, at most to the deadline.

    Raises:
        NotRunningError: The source ended.
    """
    end, never = time.monotonic() + DEADLINE_S, threading.Event()
    while not over():
        if time.monotonic() >= end:
            out.is_late = True
            break
        source.status()
        if step is not None:
            step(all=True)
        never.wait(0.2)


Over = Callable[[], None]


def _handler(
    made: Published, how: Reading, out: Outcome, over: Over
) -> Callable[[keyshard.Message], None]:
    lock = threading.Lock()

    def handle(message: keyshard.Message) -> None:
        row = row_of_message(made.kind, message)
        with lock:
            out.malformed.update({row["n"]} if row.pop("malformed", False) else ())
            out.rows.append(row)
            is_last = len(out.rows) == made.expected(how)
        if is_last:
            over()

    return handle


@contextmanager
def _stopped_in_time(source: KeyShardSource, out: Outcome) -> Iterator[Over]:
    """Stop a source at the deadline; yields what stops it after its last row."""
    timers: list[threading.Timer] = []

    def stop_in(delay_s: float, *, is_late: bool = False) -> None:
        for timer in timers:
            timer.cancel()
        timers.append(threading.Timer(delay_s, _stop, [source, out, is_late]))
        timers[-1].start()

    stop_in(DEADLINE_S, is_late=True)
    try:
        yield partial(stop_in, QUIET_S)
    finally:
        for timer in timers:
            timer.cancel()


def _stop(source: KeyShardSource, out: Outcome, is_late: bool) -> None:
    """Stop a source, after its counts were taken."""
    out.is_late = out.is_late or is_late
    with suppress(KeyShardError):
        out.count(source.status())
        source.stop()
