"""Runs the body of a test under the scheduler of the simulation.

The threads of the test, of keyshard and of the helpers are simulated: one runs at a time, the seed
decides which, and waits take no time. The same seed gives the same course. Fixtures of the runtime
tests run in the simulation too, so that the threads, locks and events that they make are simulated.
The scheduler ends all threads with the body.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from inspect import isgenerator
from random import Random
from types import MappingProxyType
from typing import Any

from tests.simulation.install import installed, without_outside
from tests.simulation.scheduler import Scheduler

OF_TESTS = ("tests.helpers", "tests.support.", "tests.runtime.", "keyshard.testing.verify.")
"""Modules of tests whose threads and time are simulated, beside that of the test."""
REAL = "tests.support.preemption"
"""Stops threads for a while, in real time, if ``--preempt`` asks for it."""


class LaterFixture:
    """A fixture that the simulation makes, and ends, with the body of the test.

    Args:
        function: The function of the fixture; a generator function yields its value once.
        arguments: Other fixtures by name.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._made: list[Any] = []

    def value(self, until: ExitStack) -> Any:
        """Return what the fixture returns or yields; it is made once.

        Args:
            until: Ends the fixture.
        """
        if not self._made:
            made = self._function(**values(self._arguments, until))
            if isgenerator(made):
                until.callback(_end, made)
                made = next(made)
            self._made.append(made)
        return self._made[0]


def values(arguments: Mapping[str, Any], until: ExitStack) -> dict[str, Any]:
    """Return the arguments; of each :class:`LaterFixture`, what it makes."""
    return {
        name: one.value(until) if isinstance(one, LaterFixture) else one
        for name, one in arguments.items()
    }


def _end(fixture: Iterator[Any]) -> None:
    for _ in fixture:
        raise AssertionError("a fixture yields once")


def run_simulated(
    test: Callable[..., None],
    arguments: Mapping[str, Any],
    seed: int,
    fixtures: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Call a test under the scheduler; the threads that it leaves are ended.

    Args:
        test: The function of the test.
        arguments: Its arguments by name; a :class:`LaterFixture` is made before the call.
        seed: Decides the order of the threads.
        fixtures: All fixtures of the test, which are made first, in this order.
    """
    random = Random(seed)
    scheduler = Scheduler(random)

    def body() -> None:
        with ExitStack() as until:
            values(fixtures, until)
            test(**values(arguments, until))

    helpers = {name for name in sys.modules if name.startswith(OF_TESTS)} - {REAL}
    with installed(scheduler, random, helpers | {test.__module__}), without_outside():
        scheduler.run(scheduler.process("test"), body)
