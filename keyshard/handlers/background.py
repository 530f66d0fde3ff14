"""Starts a run in its own thread, and lets a program or an event loop wait for its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import Protocol

from keyshard.base_error import one_line
from keyshard.errors import DrainTimeoutError, NotRunningError
from keyshard.handlers.run import START_S, STOP_S, HandlerRun
from keyshard.threads import begin

LOOK_S = 0.01
"""Interval at which a wait asks whether a source is ready, seconds."""

_log = logging.getLogger(__name__)


class Readying(Protocol):
    """A run that becomes ready."""

    def not_ready(self) -> str:
        """Return why it does not take messages; empty if it does."""


def in_background(run: HandlerRun, held: AbstractContextManager[None]) -> Future[None]:
    """Start a run in a thread of its own, in the context of the caller.

    Args:
        run: The run.
        held: Entered now, and left when the run has ended.

    Returns:
        The end of the run, or its error.
    """
    outcome: Future[None] = Future()
    outcome.set_running_or_notify_cancel()
    context, holding = copy_context(), ExitStack()
    holding.enter_context(held)

    def run_it() -> None:
        try:
            with holding:
                context.run(run.run)
        except BaseException as exc:  # noqa: BLE001 - it belongs to the owner of the outcome
            if run.abandoned:
                _log.warning("an abandoned source ended with an error: %s", one_line(exc))
            outcome.set_exception(exc)
        else:
            outcome.set_result(None)

    try:
        begin("keyshard-run", run_it)
    except BaseException:
        holding.close()
        raise
    return outcome


async def until_end(run: HandlerRun, outcome: Future[None]) -> None:
    """Wait for a run. A cancellation stops it and waits for its end; a second one abandons it."""
    ended = asyncio.wrap_future(outcome)
    try:
        try:
            with _stopping_on_sigterm(run.stop):
                await asyncio.shield(ended)
        except asyncio.CancelledError:
            run.stop()
            await asyncio.shield(ended)
            raise
    finally:
        if not outcome.done():
            run.abandon()


@contextmanager
def until_left(run: HandlerRun, outcome: Future[None], ready_s: float) -> Iterator[None]:
    """Wait until a run is ready, and stop it at the end of the block.

    Raises:
        NotRunningError: The run is not ready in time.
        KeyShardError: The error that ended the run, unless the block raises.
    """

    def running() -> HandlerRun:
        if outcome.done():
            outcome.result()
            raise NotRunningError("The source was stopped before it was ready.", "Run it again.")
        return run

    try:
        wait_ready(running, ready_s)
        yield
    except BaseException as exc:
        failed = _stopped(run, outcome)
        if failed is None or failed is exc:
            raise
        if isinstance(exc, NotRunningError):
            raise failed from exc
        _log.warning("the source ended with an error: %s", one_line(failed))
        raise
    if (failed := _stopped(run, outcome)) is not None:
        raise failed


def wait_ready(running: Callable[[], Readying | None], timeout_s: float) -> None:
    """Wait until ``running`` returns a run that is ready.

    Raises:
        NotRunningError: It returned none within ``timeout_s``, seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        run = running()
        why = "The source is not running." if run is None else run.not_ready()
        if not why:
            return
        if time.monotonic() >= deadline_s:
            raise NotRunningError(
                f"The source was not ready within {timeout_s:g} s. {why}",
                "Correct that, or give it more time.",
            )
        time.sleep(LOOK_S)


def _stopped(run: HandlerRun, outcome: Future[None]) -> BaseException | None:
    """Stop a run, wait for its end, and return its error."""
    run.stop()
    timeout_s = START_S + run.drain_timeout_s + STOP_S
    try:
        return outcome.exception(timeout_s)
    except FutureTimeoutError:
        return DrainTimeoutError(
            f"The source did not end within {timeout_s:g} s after its stop. Its thread continues "
            "to end it.",
            "Lower drain_timeout_s, or make the handlers faster.",
        )


@contextmanager
def _stopping_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM, in the main thread and unless the program handles it already."""
    loop = asyncio.get_running_loop()
    free = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not free:
        yield
        return
    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
