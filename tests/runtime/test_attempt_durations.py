"""The duration of an attempt is that of its handler; waits for the lanes' lock do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from keyshard.core.lanes.key_queue import KeyQueue, Work
from keyshard.core.lanes.retry_policy import Decision, FailedAttempt
from keyshard.core.message import Message, Produce
from keyshard.errors import KeyShardError
from keyshard.handlers import async_executor, executors
from keyshard.handlers.async_executor import AsyncExecutor
from keyshard.handlers.executors import ThreadExecutor
from tests.support.deadlines import deadline

LOCK_S, HANDLER_S = 100.0, 7.0


class SlowLock(threading.Condition):
    """A condition with a clock that advances by ``LOCK_S`` whenever it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self.now_s += LOCK_S
        return entered


class OneMessage:
    """A source of work that has one message."""

    def __init__(self) -> None:
        self.changed = SlowLock()
        self.closed = False
        self.seconds: list[float] = []
        self.ended = threading.Event()
        self._work: Work | None = Work(
            Message.for_test(b"1", key="k"), None, KeyQueue("k", slot=1, owner=0)
        )

    def next(self) -> Work | None:
        work, self._work = self._work, None
        if work is not None:
            work.started_s = self.changed.now_s
        return work

    def next_bulk(self) -> None:
        return None

    def judge(self, _work: Work, _error: BaseException) -> FailedAttempt:
        return FailedAttempt(None, Decision(None, None))  # type: ignore[arg-type]

    def finish(
        self,
        _work: Work,
        seconds: float,
        _setback: FailedAttempt | None,
        _produced: Sequence[Produce] = (),
    ) -> None:
        self.seconds.append(seconds)
        self.ended.set()

    def wake(self) -> None:
        """Do nothing: there is one message."""

    def fail(self, error: KeyShardError) -> None:
        raise error


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("form", ["function", "coroutine"])
def test_a_wait_for_the_lock_is_no_time_of_the_handler(
    monkeypatch: pytest.MonkeyPatch, form: str, fails: bool
) -> None:
    source: Any = OneMessage()
    clock = SimpleNamespace(monotonic=lambda: source.changed.now_s)

    def handle(_message: Message) -> None:
        source.changed.now_s += HANDLER_S
        if fails:
            raise ValueError("it is broken")

    async def call(message: Message) -> None:
        handle(message)

    make: dict[str, Callable[[], Any]] = {
        "function": lambda: ThreadExecutor(source, 1, lambda: handle),
        "coroutine": lambda: AsyncExecutor(source, call, None),
    }
    with monkeypatch.context() as patched:
        patched.setattr(executors, "time", clock)
        patched.setattr(async_executor, "time", clock)
        executor = make[form]()
        with source.changed:
            executor.wake(1)
        assert source.ended.wait(deadline(20))
        source.closed = True
    assert executor.close(deadline(20))
    assert source.seconds == [HANDLER_S]
