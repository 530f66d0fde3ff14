"""An event loop in a daemon thread, which goes on whatever the tasks of handlers do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from keyshard.core.lanes.failure import name_of, text_of
from keyshard.threads import begin

CANCEL_S = 1.0
"""Longest wait for tasks that were cancelled, seconds."""

_log = logging.getLogger(__name__)


class EventLoop:
    """Runs until :meth:`close`; methods may be called from any other thread.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = begin(name, self._run)

    def call(self, callback: Callable[[], object]) -> None:
        """Call something in the loop soon; nothing when the loop is closing."""
        with self._lock:
            if not self._closing:
                self.loop.call_soon_threadsafe(callback)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """What an awaitable gives, when it has run in the loop; raises what it raises."""

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                return await awaitable, None
            except BaseException as exc:  # noqa: BLE001 - an exit would end the loop
                return None, exc

        result, error = asyncio.run_coroutine_threadsafe(outcome(), self.loop).result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Cancel all tasks, and end the loop when they have ended. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2 * CANCEL_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            try:
                self.loop.run_forever()
            # What a task that a handler began raised, such as an exit.
            except BaseException as exc:  # noqa: BLE001, PERF203
                _log.warning(
                    "a task that a handler began raised %s: %s; the event loop goes on",
                    name_of(exc), text_of(exc),
                )  # fmt: skip
        try:
            if self.loop.run_until_complete(self._cancel()):
                self.loop.close()
        except BaseException as exc:  # noqa: BLE001 - as above, at the end
            _log.warning("the event loop did not end in order: %s: %s", name_of(exc), text_of(exc))

    async def _cancel(self) -> bool:
        """Cancel all tasks; whether they have ended. One that has not would miss its loop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        await asyncio.wait_for(self.loop.shutdown_asyncgens(), CANCEL_S)
        return all(task.done() for task in tasks)
