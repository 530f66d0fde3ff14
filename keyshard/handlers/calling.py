"""Calls handlers and judges their results.

A returned awaitable is awaited. A returned exception counts as raised. A generator is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from keyshard.core.lanes.failure import text_of
from keyshard.core.message import READ_DATA, Message
from keyshard.errors import ConfigError, UnfitHandlerError
from keyshard.handlers.event_loop import EventLoop

Handle = Callable[[Message], Any]
"""A handler: a function, or a coroutine function."""


def check_fits(handle: object) -> None:
    """Refuse what can be seen to be no handler, before anything starts.

    Raises:
        ConfigError: It is no function of one message, or makes generators.
    """
    if not callable(handle):
        raise ConfigError(
            f"The handler is {text_of(handle)}; give a function that takes a message."
        )
    if _any_form(handle, inspect.isgeneratorfunction) or _any_form(
        handle, inspect.isasyncgenfunction
    ):
        raise _makes_generators(handle)
    try:
        signature = inspect.signature(handle)
    except Exception:  # noqa: BLE001 - some built-in functions and odd classes tell nothing
        return
    try:
        signature.bind(object())
    except TypeError as exc:
        raise ConfigError(
            f"The handler {text_of(handle)} cannot be called with a message: {exc}. Give a "
            "function that takes one argument, the message."
        ) from exc


def is_async(handle: Handle) -> bool:
    """Whether it is a coroutine function, or an object that is called like one."""
    return _any_form(handle, inspect.iscoroutinefunction)


class Calling:
    """Calls a plain function; what it returns to be awaited runs in an event loop.

    Args:
        handle: The function.
        read_data: What decodes the messages that it is given.
    """

    def __init__(self, handle: Handle, read_data: Handle | None = None) -> None:
        self._handle = handle
        self._read_data = read_data
        self._loop: EventLoop | None = None

    def __call__(self, given: Any) -> Any:
        """Call the function with a message, or with another argument that it takes.

        Raises:
            BaseException: The function raised or returned it.
        """
        READ_DATA.set(self._read_data)
        result = self._handle(given)
        while result is not None and (more := _to_await(self._handle, result)) is not None:
            result = self._in_loop(more)
        return result

    def close(self) -> None:
        """Cancel what still runs in the event loop, if there is one."""
        if self._loop is not None:
            self._loop.close()

    def _in_loop(self, awaitable: Awaitable[Any]) -> Any:
        loop = self._loop
        if loop is None:
            # Two threads may make one each, the first time; then one of them is not used again.
            loop = self._loop = EventLoop("keyshard-work-awaits")
        return loop.wait_for(awaitable)


def calling_async(
    handle: Handle, read_data: Handle | None = None
) -> Callable[[Message], Awaitable[None]]:
    """The same of a coroutine function, for who has an event loop."""

    async def call(message: Message) -> None:
        READ_DATA.set(read_data)
        result = await handle(message)
        while result is not None and (more := _to_await(handle, result)) is not None:
            result = await more

    return call


def _to_await(handle: Handle, result: object) -> Awaitable[Any] | None:
    """The result if it must be awaited; raises it if it is an exception."""
    # isinstance would ask the result for its class, and a class of the user's may lie.
    kind = result if issubclass(type(result), type) else type(result)
    if issubclass(kind, BaseException):  # type: ignore[arg-type]
        raise result  # type: ignore[misc]
    if inspect.isawaitable(result):
        return result
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise _makes_generators(handle)
    return None


def _makes_generators(handle: object) -> UnfitHandlerError:
    return UnfitHandlerError(
        f"The handler {text_of(handle)} makes a generator, whose code is never run, so nothing "
        "would be done for its messages. Take the yield out, or give a function that runs the "
        "generator to its end."
    )


def _any_form(handle: object, test: Callable[[object], bool]) -> bool:
    """Whether it holds for a function, a partial of one, or an object that is called like one."""
    while isinstance(handle, partial):
        handle = handle.func
    return test(handle) or test(getattr(handle, "__call__", None))  # noqa: B004
