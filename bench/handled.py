"""A topic through ``source.run`` with a handler that waits, in a separate process."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import uuid
from array import array
from collections.abc import Callable
from typing import Any

from bench.loads import handler_s
from keyshard import KeyShardSource
from keyshard.handlers import run as _loaded_before_the_clock_starts  # noqa: F401

DEADLINE_S = 240.0


class Meter:
    """Handlers that wait as long as their message says, and the times of their calls."""

    def __init__(self, messages: int, low_ms: float, high_ms: float) -> None:
        self._messages = messages
        self._low_ms, self._high_ms = low_ms, high_ms
        # The collector would look at each number of a list again and again.
        self.starts, self.ends = array("d"), array("d")
        self.done = threading.Event()

    def threads(self, message: Any) -> None:
        """Sleep in a plain function."""
        self.starts.append(time.perf_counter())
        time.sleep(handler_s(message.value, self._low_ms, self._high_ms))
        self._ended()

    async def coroutine(self, message: Any) -> None:
        """Sleep in a coroutine."""
        self.starts.append(time.perf_counter())
        await asyncio.sleep(handler_s(message.value, self._low_ms, self._high_ms))
        self._ended()

    def nothing(self, _message: Any) -> None:
        """Do nothing, in a plain function."""
        self.starts.append(time.perf_counter())
        self._ended()

    async def nothing_async(self, _message: Any) -> None:
        """Do nothing, in a coroutine."""
        self.starts.append(time.perf_counter())
        self._ended()

    def _ended(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) >= self._messages:
            self.done.set()


def run(
    service_url: str,
    topic: str,
    messages: int,
    *,
    parallelism: int,
    lanes: int,
    handler: str,
    low_ms: float = 0.0,
    high_ms: float = 0.0,
) -> dict[str, float]:
    """Handle everything, and stop.

    Args:
        handler: Name of a method of :class:`Meter`.

    Returns:
        ``seconds`` from the first handler's start to the last one's end, ``total_s`` from the call
        of ``run`` to that end, which includes connecting, ``cpu_s`` of this process, and
        ``handled``.
    """
    meter = Meter(messages, low_ms, high_ms)
    handle: Callable[[Any], Any] = getattr(meter, handler)
    source = KeyShardSource(
        topic,
        service_url=service_url,
        subscription=f"handled-{uuid.uuid4().hex[:8]}",
        parallelism=parallelism,
        starting_position="earliest",
    )
    in_time: list[bool] = []

    def stop_at_the_end() -> None:
        in_time.append(meter.done.wait(DEADLINE_S))
        source.stop()

    watcher = threading.Thread(target=stop_at_the_end, daemon=True)
    watcher.start()
    began, cpu = time.perf_counter(), time.process_time()
    source.run(handle, lanes=lanes)
    watcher.join()
    if not in_time[0]:
        sys.exit(
            f"received only {len(meter.ends)} of {messages} messages within {DEADLINE_S:.0f} s"
        )
    return {
        "seconds": max(meter.ends) - min(meter.starts),
        "total_s": max(meter.ends) - began,
        "cpu_s": time.process_time() - cpu,
        "handled": float(len(meter.ends)),
    }


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
