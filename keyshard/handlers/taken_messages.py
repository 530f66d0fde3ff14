"""Messages of a source for ``async for``: the body of the loop takes the place of a handler."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from keyshard.config.handlers import HandlerConfig
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerSlots
from keyshard.core.message import HandlerContext, Message, TakenMessage
from keyshard.errors import ConfigError, KeyShardError, RuntimeStoppedError, UnfitHandlerError
from keyshard.handlers.executors import Executor, WorkSource, shared_slots
from keyshard.handlers.handler_call import CallersLoop
from keyshard.handlers.outcomes import Observers
from keyshard.handlers.run import HandlerRun
from keyshard.handlers.stacks import Call


class Attempt:
    """The :class:`~keyshard.core.message.Attempt` of a message that an event loop took."""

    __slots__ = ("_began_s", "_taken", "_work", "ended")

    def __init__(self, taken: TakenMessages, work: Work) -> None:
        self._taken = taken
        self._work = work
        self._began_s = time.monotonic()
        self.ended = False
        """Whether its outcome is known; guarded by the dispatcher's lock."""

    @property
    def context(self) -> HandlerContext:
        return self._taken.context

    def end(self, error: BaseException | None) -> None:
        self._taken.end(self, self._work, time.monotonic() - self._began_s, error)

    def __del__(self) -> None:
        if not self.ended:
            # The garbage collector runs while any lock may be held. So the thread of the run
            # reports the message.
            self._taken.dropped.append(self._work)


class TakenMessages:
    """An :class:`~keyshard.handlers.executors.Executor` whose messages an event loop takes.

    Args:
        dispatcher: Source of work.
        loop: The event loop.
        running_max: Maximum number of taken, undone messages; ``None``: one for each lane.
        observers: Called for each message.
        context: The run, for its messages.
    """

    takes_bulks = False

    def __init__(
        self,
        dispatcher: WorkSource,
        loop: asyncio.AbstractEventLoop,
        running_max: int | None,
        observers: Observers,
        context: HandlerContext,
    ) -> None:
        self.count = 1
        self.context = context
        self.dropped: deque[Work] = deque()
        """Messages that the program dropped without an outcome."""
        self.waiter: asyncio.Future[None] | None = None
        """Ends when there may be a message, after :meth:`take` returned none."""
        self._dispatcher = dispatcher
        self._loop = CallersLoop(loop)
        self._running_max = math.inf if running_max is None else running_max
        self._observers = observers
        self._running = 0
        self._awake = False
        self._closed = False
        self.abandoned = False
        """Whether messages that are not done may be dropped: the program has left the loop."""

    # -- called in the event loop ------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop.loop

    def take(self) -> TakenMessage | None:
        """Return the next message; ``None`` if there is none before :attr:`waiter` ends."""
        with self._dispatcher.changed:
            self._awake = False
            work = self._dispatcher.next() if self._running < self._running_max else None
            if work is None:
                self.waiter = self.loop.create_future()
                return None
            self._running += 1
        message = TakenMessage(*work.message)
        message.attempt = Attempt(self, work)
        self._observers.notify("started", message)
        return message

    def end(
        self, attempt: Attempt, work: Work, seconds: float, error: BaseException | None
    ) -> None:
        """Report the outcome of a message; the first one counts."""
        with self._dispatcher.changed:
            if attempt.ended:
                return
            attempt.ended = True
            self._check_open(work)
        setback = None if error is None else self._dispatcher.judge(work, error)
        if error is None:
            self._observers.notify("completed", work.message, seconds)
        else:
            self._observers.notify("failed", work.message, seconds, error)
        with self._dispatcher.changed:
            self._check_open(work)
            self._running -= 1
            self._dispatcher.finish(work, seconds, setback)
            self._dispatcher.wake()

    def _check_open(self, work: Work) -> None:
        if self._closed:
            raise RuntimeStoppedError(
                f"The source ended before message {work.message.message_id} was done. It is not "
                "acknowledged, and is delivered again."
            )

    def awake(self) -> None:
        """Let the waiting task look for a message, or for the end of the run; from any thread."""
        self._loop.call(self._continue)

    def _continue(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    # -- called by the run, as an executor ---------------------------------------------------------

    @property
    def resting(self) -> bool:
        return self.waiter is not None and not self.waiter.done() and not self._awake

    def wake(self, messages: int) -> None:
        if messages and self._running < self._running_max:
            self._awake = True
            self.awake()

    def look(self) -> bool:
        while self.dropped and not self.abandoned:
            work = self.dropped.popleft()
            error = UnfitHandlerError(
                f"Message {work.message.message_id} of {work.message.topic}, key "
                f"{work.queue.key!r}, was dropped without done(). It is not acknowledged, and is "
                "delivered again.",
                "Await message.done() or message.failed(error) for each message.",
            )
            setback = self._dispatcher.judge(work, error)
            seconds = time.monotonic() - work.started_s
            with self._dispatcher.changed:
                self._running -= 1
                self._dispatcher.finish(work, seconds, setback)
        return not self.loop.is_closed()

    def calls(self, work: Work) -> list[Call]:  # noqa: ARG002
        raise ConfigError(
            "The body of an async for is the handler of this source. It runs in a task of the "
            "program, whose stack the source does not know.",
            "Print the stacks of the tasks in the program.",
        )

    def grow(self, count: int) -> None:
        """Do nothing: the program decides how many messages it takes."""

    def slots(self, now_s: float) -> list[HandlerSlots]:  # noqa: ARG002
        return shared_slots(self._running_max, self._running)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline and self.look():
            time.sleep(0.005)
        with self._dispatcher.changed:
            self._closed = True
        self.awake()
        return not self._running


class TakenRun(HandlerRun):
    """A run whose messages an event loop takes.

    Args:
        coordinator: Coordinator of the source, not started.
        config: Options of the source.
        handling: Options, as for a handler.
        loop: The event loop.
        observers: Called for each message.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        handling: HandlerConfig,
        loop: asyncio.AbstractEventLoop,
        observers: Any = (),
    ) -> None:
        super().__init__(coordinator, config, handling, _body, observers, loop=loop)
        self.taken = TakenMessages(
            self._dispatcher, loop, handling.workers, self._observers, self._context
        )
        self.outcome: Future[None] | None = None
        """The end of the run, once it was begun."""

    def abandon(self) -> None:
        self.taken.abandoned = True
        super().abandon()

    @property
    def error(self) -> KeyShardError | None:
        """The error that ends the source; ``None``: none. Taken messages may still become done."""
        return self._dispatcher.error

    def _make_executor(self) -> Executor:
        return self.taken

    def _drain(self) -> None:
        self.taken.awake()
        super()._drain()


async def _body(_message: Message) -> None:
    """Placeholder for the handler of a run. The body of the loop handles the messages."""


class TakenIterator:
    """The messages of a source, for ``async for``; see :meth:`keyshard.KeyShardSource.messages`.

    Args:
        begin: Begins a run whose messages an event loop takes.
        ending: Returns an abandoned run of the source that has not ended yet.
    """

    def __init__(
        self,
        begin: Callable[[asyncio.AbstractEventLoop], TakenRun],
        ending: Callable[[], Future[None] | None],
    ) -> None:
        self._begin = begin
        self._ending = ending
        self._run: TakenRun | None = None
        self._told = False
        """Whether the iteration has reported the end of the run."""
        self._pid = os.getpid()

    def __aiter__(self) -> TakenIterator:
        return self

    async def __anext__(self) -> TakenMessage:
        """Return the next message. A cancellation loses none; the iteration may then continue.

        Raises:
            StopAsyncIteration: The source was stopped.
            KeyShardError: The error that ended the source.
        """
        try:
            # Here other tasks run and a cancellation arrives, before a message is taken.
            await asyncio.sleep(0)
            run = self._run
            if run is None:
                while (before := self._ending()) is not None:
                    await _error_of(before)
                run = self._run = self._begin(asyncio.get_running_loop())
            taken, outcome = run.taken, run.outcome
            assert outcome is not None, "the run was begun"
            if taken.loop is not asyncio.get_running_loop():
                raise ConfigError(
                    "This iteration belongs to another event loop.",
                    "Iterate over the source in one event loop.",
                )
            while not outcome.done() and run.error is None:
                if (message := taken.take()) is not None:
                    return message
                assert taken.waiter is not None, "there is no message"
                await taken.waiter
            if not self._told:
                self._told = True
                if run.error is not None:
                    raise run.error
                outcome.result()
            raise StopAsyncIteration
        except BaseException:
            # The traceback must not keep an abandoned iterator alive.
            del self
            raise

    async def aclose(self) -> None:
        """End the source: messages that are done are acknowledged, all others are redelivered.

        Raises:
            KeyShardError: The error that ended the source, if the iteration did not raise it.
        """
        run = self._run
        if run is None or run.outcome is None:
            return
        run.abandon()
        error = await _error_of(run.outcome)
        if error is not None and not self._told:
            self._told = True
            raise error

    async def __aenter__(self) -> TakenIterator:
        return self

    async def __aexit__(self, _type: object, exc: BaseException | None, _trace: object) -> None:
        try:
            await self.aclose()
        except Exception:
            if exc is None:
                raise

    def __del__(self) -> None:
        """Abandon the run. A forked child holds only a copy of the iterator."""
        run = self._run
        if run is not None and self._pid == os.getpid() and not sys.is_finalizing():
            run.abandon()


async def _error_of(outcome: Future[None]) -> BaseException | None:
    """Wait for the end of a run; return its error."""
    ended = asyncio.wrap_future(outcome)
    await asyncio.wait([ended])
    return ended.exception()
