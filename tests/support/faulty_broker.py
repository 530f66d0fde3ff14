"""Calls of brokers, their handles and admin interfaces that fail by the script of a test."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Fault = Callable[..., Any]
"""Runs in the place of a method: gets the method, then the arguments of the call."""


class ScriptedCall:
    """A fault that notes the calls of a method, and makes some of them fail.

    Args:
        errors: The errors of the first calls, in turn.
        raises: The error of all later calls, or a function that returns it for some arguments.
        answer_lost: Whether calls that fail are made nevertheless.
    """

    def __init__(
        self,
        *errors: BaseException,
        raises: BaseException | Callable[..., BaseException | None] | None = None,
        answer_lost: bool = False,
    ) -> None:
        self.errors = deque(errors)
        self.raises = raises
        self.asked: list[tuple[Any, ...]] = []
        """The positional arguments of each call."""
        self.raised = 0
        self._answer_lost = answer_lost

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.asked.append(args)
        error = self.errors.popleft() if self.errors else self.raises
        if callable(error):
            error = error(*args)
        if error is None:
            return call(*args, **options)
        if self._answer_lost:
            call(*args, **options)
        self.raised += 1
        raise error


def faulty(made: T, **faults: Fault) -> T:
    """Put faults in the place of methods of an object, and return the object."""
    for name, fault in faults.items():
        setattr(made, name, partial(fault, getattr(made, name)))
    return made


def giving(**faults: Fault) -> Fault:
    """Return a fault that puts faults into the object that a method returns."""
    return lambda call, *args, **options: faulty(call(*args, **options), **faults)


def answering(answer: Any) -> Fault:
    """Return a fault that always gives one answer."""
    return lambda _call, *_args, **_options: answer


def after(action: Callable[[], object]) -> Fault:
    """Return a fault that does something before each call of a method."""

    def act(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        action()
        return call(*args, **options)

    return act
