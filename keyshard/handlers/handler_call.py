"""Calls handlers and judges their results.

A returned awaitable is awaited. A returned exception counts as raised. A generator is refused,
unless the run has a sink: then it yields messages to publish.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from keyshard.core.lanes.failure import name_of, text_of
from keyshard.core.message import CONTEXT, NO_CONTEXT, HandlerContext, Message, Produce
from keyshard.errors import ConfigError, UnfitHandlerError
from keyshard.redaction import shown
from keyshard.threads import begin

Handle = Callable[[Message], Any]
"""A handler: a function, or a coroutine function."""
Take = Callable[[object, Any], Any]
"""Checks or converts the result of a handler; gets the handler and the result."""


def as_returned(handle: object, result: Any) -> Any:
    """Take the result as it is; refuse a generator."""
    if inspect.isgenerator(result):
        raise _makes_generators(handle)
    return result


def unpublished(handle: object, result: Any) -> None:
    """Ignore the result of a handler of a run without a sink.

    Raises:
        UnfitHandlerError: The result is a message to publish, a list of such, or a generator.
    """
    if result is None:
        return
    first = result[0] if _is_list(result) and result else result
    if type(first) is Produce:
        raise UnfitHandlerError(
            f"The handler {text_of(handle)} returns messages to publish, but the run has no sink.",
            "Give one, such as source.run(handle, sink=KeyShardSink(...)).",
        )
    as_returned(handle, result)


def published(handle: object, result: Any) -> Sequence[Produce]:
    """Return the messages to publish; run a generator."""
    if result is None:
        return ()
    if type(result) is Produce:
        return (result,)
    if not (_is_list(result) or inspect.isgenerator(result)):
        raise _returns_others(handle, result)
    found: list[Produce] = []
    for one in result:
        _raise_exception(one)
        if type(one) is not Produce:
            raise _returns_others(handle, one)
        found.append(one)
    return found


def check_fits(handle: object, take: Take = as_returned) -> None:
    """Refuse an object that is recognisably no handler, before anything starts.

    Raises:
        ConfigError: It is no function of one message, or makes generators that nothing runs.
    """
    if not callable(handle):
        raise ConfigError(
            f"The handler is {text_of(handle)}; it must be a function that takes a message."
        )
    if take is not published and (
        _any_form(handle, inspect.isgeneratorfunction)
        or _any_form(handle, inspect.isasyncgenfunction)
    ):
        raise _makes_generators(handle)
    try:
        signature = inspect.signature(handle)
    except Exception:  # noqa: BLE001 - some built-in functions and some classes have no signature
        return
    try:
        signature.bind(object())
    except TypeError as exc:
        raise ConfigError(
            f"The handler {text_of(handle)} cannot be called with a message: {exc}.",
            "Use a function with one argument, the message.",
        ) from exc


def is_async(handle: Handle) -> bool:
    """Whether a handler is a coroutine function, or an object with an async ``__call__``."""
    return _any_form(handle, inspect.iscoroutinefunction) or _any_form(
        handle, inspect.isasyncgenfunction
    )


def executor_of(handle: Handle, executor: str, take: Take) -> str:
    """Return the executor of a handler: ``threads``, ``async`` or ``processes``.

    Raises:
        ConfigError: The handler does not fit the executor, or is no handler.
    """
    check_fits(handle, take)
    coroutines = is_async(handle)
    if executor == "auto":
        return "async" if coroutines else "threads"
    if coroutines != (executor == "async"):
        kind = "an async function" if coroutines else "a plain function"
        raise ConfigError(
            f"The handler {text_of(handle)} is {kind}, but executor is {executor!r}.",
            "Leave executor out, or use a matching handler.",
        )
    return executor


class HandlerCall:
    """Calls a plain function; awaitables that it returns run in an event loop.

    Args:
        handle: The function.
        context: The run of the function, for its messages.
        take: Checks or converts the result of the function, such as :func:`published`.
    """

    def __init__(
        self, handle: Handle, context: HandlerContext = NO_CONTEXT, take: Take = as_returned
    ) -> None:
        self._handle = handle
        self._context = context
        self._take = take
        self._loop: EventLoop | None = None

    def __call__(self, given: Any) -> Any:
        """Call the function with a message, or with another argument that it takes.

        Raises:
            BaseException: The function raised or returned it.
        """
        CONTEXT.set(self._context)
        result = self._handle(given)
        while result is not None and (more := self._to_await(result)) is not None:
            result = self._in_loop(more)
        return self._take(self._handle, result)

    def close(self) -> None:
        """Cancel the tasks that still run in the event loop, if there is one."""
        if self._loop is not None:
            self._loop.close()

    def _to_await(self, result: object) -> Awaitable[Any] | None:
        return _to_await(self._handle, result, self._take)

    def _in_loop(self, awaitable: Awaitable[Any]) -> Any:
        loop = self._loop
        if loop is None:
            # At first, two threads may make a loop each; one of them is then never used again.
            loop = self._loop = EventLoop("keyshard-work-awaits")
        return loop.wait_for(awaitable)


def calling_async(
    handle: Handle, context: HandlerContext = NO_CONTEXT, take: Take = as_returned
) -> Callable[[Message], Coroutine[Any, Any, Any]]:
    """Wrap a coroutine function as :class:`HandlerCall` does, for the event loop of the caller."""

    async def call(message: Message) -> Any:
        CONTEXT.set(context)
        result = handle(message)
        while result is not None and (more := _to_await(handle, result, take)) is not None:
            result = await more
        return take(handle, result)

    return call


def _to_await(handle: Handle, result: object, take: Take) -> Awaitable[Any] | None:
    """Return the result if it must be awaited; raise it if it is an exception."""
    _raise_exception(result)
    if inspect.isawaitable(result):
        return result
    if inspect.isasyncgen(result):
        if take is published:
            return _all_of(result)
        raise _makes_generators(handle)
    return None


async def _all_of(results: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in results]


def _raise_exception(result: Any) -> None:
    """Raise a result that is an exception."""
    # isinstance asks the result for its class, and a user-defined class may return another.
    kind = result if issubclass(type(result), type) else type(result)
    if issubclass(kind, BaseException):
        raise result


def _makes_generators(handle: object) -> UnfitHandlerError:
    return UnfitHandlerError(
        f"The handler {text_of(handle)} returns a generator, whose code never runs.",
        "Remove the yield, or consume the generator in the handler. To publish what it yields, "
        "give a sink, such as source.run(handle, sink=KeyShardSink(...)).",
    )


def _is_list(result: object) -> bool:
    return type(result) is list or type(result) is tuple


def _returns_others(handle: object, result: object) -> UnfitHandlerError:
    return UnfitHandlerError(
        f"The handler {text_of(handle)} returns {shown(result)}, which is no message to publish.",
        "With a sink, return None, a keyshard.Produce or a list of them, or yield them.",
    )


def _any_form(handle: object, test: Callable[[object], bool]) -> bool:
    """Whether a test holds for a function, a partial of one, or the ``__call__`` of an object."""
    while isinstance(handle, partial):
        handle = handle.func
    return test(handle) or test(getattr(handle, "__call__", None))  # noqa: B004


# -- An event loop in a daemon thread, which survives exceptions of the tasks of handlers ----------

CANCEL_S = 1.0
"""Longest wait for cancelled tasks, seconds."""

_log = logging.getLogger(__name__)


class EventLoop:
    """An event loop that runs until :meth:`close`; other threads may call its methods.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = begin(name, self._run)

    def call(self, callback: Callable[[], object]) -> None:
        """Schedule a callback in the loop; do nothing if the loop is closing."""
        with self._lock:
            if not self._closing:
                self.loop.call_soon_threadsafe(callback)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        """Run an awaitable in the loop, and return its result or raise its exception."""

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
        """Cancel all tasks, and end the loop after them. Idempotent."""
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
            # A task of a handler can raise, for example SystemExit, and that ends run_forever.
            except BaseException as exc:  # noqa: BLE001, PERF203
                _log.warning(
                    "a task that a handler created raised %s: %s; the event loop continues",
                    name_of(exc), text_of(exc),
                )  # fmt: skip
        try:
            if self.loop.run_until_complete(self._cancel()):
                self.loop.close()
        except BaseException as exc:  # noqa: BLE001 - as above, at the end
            _log.warning("the event loop did not end cleanly: %s: %s", name_of(exc), text_of(exc))

    async def _cancel(self) -> bool:
        """Cancel all tasks. Return whether they have ended; if not, the loop must stay open."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        await asyncio.wait_for(self.loop.shutdown_asyncgens(), CANCEL_S)
        return all(task.done() for task in tasks)


class CallersLoop:
    """The event loop of a program, which runs and closes it; other threads may call it.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def call(self, callback: Callable[[], object]) -> None:
        """Schedule a callback in the loop; do nothing if the loop is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Do nothing: the loop belongs to the program."""
