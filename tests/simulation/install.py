"""Puts the simulated primitives where keyshard and tenacity look for the real ones.

Production code uses ``threading`` and ``time`` and knows nothing of this. For one run every module
global of keyshard that *is* one of those objects is replaced, whatever its name, so a module that
is added later is covered without being listed.
"""

from __future__ import annotations

import concurrent.futures
import random as real_random
import secrets
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from random import Random
from types import ModuleType
from typing import Any

from keyshard.handlers import run
from keyshard.observe import monitor
from keyshard.threads import Pool as RealPool
from keyshard.threads import wait_for
from tests.simulation.primitives import Pool, RandomModule, SecretsModule, Threading, Time, wait
from tests.simulation.scheduler import Scheduler

BROKER_SIDE = "keyshard.broker.memory"
"""Modules that act atomically: a request to the broker is not interleaved."""
_SIMULATED = ("keyshard.", "tenacity")
_REAL = ("keyshard.broker.client", "keyshard.cli", "keyshard.testing")
"""Modules that do not run in a simulation, or judge it from outside."""


@contextmanager
def replaced(*stand_ins: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes, each of a holder and a name, until the block ends."""
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in stand_ins]
    try:
        for holder, name, value in stand_ins:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


class _Control:
    """Replaces the control socket."""

    def __init__(self, *_: object, **_named: object) -> None:
        """Ignore the arguments, and serve no requests."""

    def close(self) -> None:
        """Nothing is open."""


def without_outside() -> AbstractContextManager[None]:
    """Let handlers run without a control socket, and without a watch of the real main thread."""
    return replaced(
        (monitor, "ControlServer", _Control),
        (run, "stopping_with_program", lambda *_: nullcontext()),
    )


@contextmanager
def installed(scheduler: Scheduler, random: Random, also: Collection[str] = ()) -> Iterator[None]:
    """Simulated threads, time and randomness in keyshard, until the block ends.

    Args:
        scheduler: Runs the threads.
        random: Where tenacity's waits come from.
        also: Names of other modules that run in the simulation.
    """
    undo: list[tuple[Any, str, Any]] = []
    # From a stream of their own, so that other draws of a seed stay the same.
    ids = SecretsModule(Random("ids"))
    try:
        for module in _modules(also):
            quiet = module.__name__.startswith(BROKER_SIDE)
            stand_ins = [*_stand_ins(scheduler, random, quiet=quiet), (secrets, ids)]
            for holder, name, _, value in list(_held(module)):
                for real, simulated in stand_ins:
                    if value is real:
                        undo.append((holder, name, value))
                        setattr(holder, name, simulated)
        yield
    finally:
        for holder, name, value in undo:
            setattr(holder, name, value)


def real_ones() -> list[tuple[str, str]]:
    """(module, name) of every real primitive that a simulated module holds now."""
    real = [threading, time, real_random, secrets, RealPool, wait_for]
    real += [threading.Thread, threading.Event, threading.Lock, threading.RLock]
    real += [threading.Condition, time.sleep, time.monotonic, time.time, concurrent.futures.wait]
    return [
        (module.__name__, name)
        for module in _modules()
        for _, _, name, value in _held(module)
        if any(value is one for one in real)
    ]


def _held(module: ModuleType) -> Iterator[tuple[Any, str, str, Any]]:
    """Content of a module: (holder, attribute, readable name, value)."""
    for name, value in vars(module).items():
        yield module, name, name, value
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__:
            made: Any = value.__init__
            if made.__closure__:
                for held, cell in zip(made.__code__.co_freevars, made.__closure__, strict=True):
                    yield cell, "cell_contents", f"{name}.{held}", cell.cell_contents


def _modules(also: Collection[str] = ()) -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if (name.startswith(_SIMULATED) and not name.startswith(_REAL)) or name in also
    ]


def _stand_ins(scheduler: Scheduler, random: Random, *, quiet: bool) -> list[tuple[Any, Any]]:
    threads, clock = Threading(scheduler, quiet=quiet), Time(scheduler)

    def pool(threads_max: int, name: str) -> Pool:
        return Pool(scheduler, threads_max, name)

    return [
        (threading, threads),
        (threading.Event, threads.Event),
        (threading.Lock, threads.Lock),
        (time, clock),
        (time.monotonic, clock.monotonic),
        (real_random, RandomModule(random)),
        (RealPool, pool),
        (concurrent.futures.wait, wait),
        (wait_for, wait),
    ]
