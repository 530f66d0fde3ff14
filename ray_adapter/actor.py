"""What runs in an actor: one handler, called with one message or one batch after the other.

Actors import this module; the handler comes as cloudpickle writes it: by module and name where it
can be imported, by value from ``__main__``, notebooks and closures.
"""

from __future__ import annotations

import inspect
import os
import pickle
import time
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

import keyshard
from keyshard.core.lanes.failure import text_of
from keyshard.errors import ConfigError
from keyshard.handlers.calling import Calling, check_fits
from keyshard.handlers.processes import Reply
from keyshard.reading.message_data import MessageData
from ray_adapter.wire import MessageRows, messages

SLICE_S = 1.0
"""Time after which an actor returns what it has done, at the end of an entry, seconds."""


class Loaded(NamedTuple):
    """How an actor tells that it has the handler."""

    pid: int
    missing: Reply | None = None
    """Why the handler cannot be had: it cannot be imported."""
    broken: Reply | None = None
    """Why it cannot begin: its class raised."""


class Outcome(NamedTuple):
    """What became of some rows."""

    done: int
    """Rows that the handler has returned for, from the first on."""
    results: list[Any]
    """What it returned: for each of these rows that were handled in this call; or one for all."""
    failed: Reply | None = None
    """What it raised for the row after these."""


class HandlerActor:
    """One handler; Ray calls one method at a time, in the order of the calls.

    Args:
        handler: The handler, pickled.
        read_data: What decodes the messages that it is given.
    """

    def __init__(self, handler: bytes, read_data: MessageData) -> None:
        self._pickled = handler
        self._read_data = read_data
        self._handle: Calling | None = None
        self._results: list[Any] = []

    def version(self) -> str:
        """Version of keyshard here."""
        return keyshard.__version__

    def load(self) -> Loaded:
        """Have the handler; once it is there, nothing is done again."""
        if self._handle is not None:
            return Loaded(os.getpid())
        try:
            handler = pickle.loads(self._pickled)
        except BaseException as exc:  # noqa: BLE001 - importing runs the user's code
            return Loaded(os.getpid(), missing=Reply.of(exc))
        try:
            if is_class(handler):
                handler = handler()
                check_fits(handler)
            self._handle = Calling(handler, self._read_data)
        except BaseException as exc:  # noqa: BLE001 - the user's code
            return Loaded(os.getpid(), broken=Reply.of(exc))
        return Loaded(os.getpid())

    def handle_messages(self, rows: MessageRows, start: int) -> Outcome:
        """Call the handler with each message from row ``start`` on, for about a second."""
        assert self._handle is not None
        handle = self._handle
        results: list[Any] = []
        self._results = results
        deadline_s = time.monotonic() + SLICE_S
        row = 0
        for entry in messages(rows):
            if row > start and time.monotonic() > deadline_s:
                break
            for message in entry:
                if row >= start:
                    try:
                        results.append(handle(message))
                    except BaseException as exc:  # noqa: BLE001 - whatever a handler raises
                        return Outcome(row, results, Reply.of(exc))
                row += 1
        return Outcome(row, results)

    def handle_arrow(self, rows: pa.RecordBatch, start: int) -> Outcome:
        """Call the handler with all rows."""
        assert self._handle is not None
        assert start == 0
        self._results = []
        try:
            self._results.append(self._handle(rows))
        except BaseException as exc:  # noqa: BLE001 - whatever a handler raises
            return Outcome(0, [], Reply.of(exc))
        return Outcome(rows.num_rows, self._results)

    def unsendable(self) -> tuple[int, str] | None:
        """Index of the last results that cannot be sent, and why; ``None`` when all can be."""
        from ray import cloudpickle  # noqa: PLC0415 - the process that judges handlers needs no ray

        for index, result in enumerate(self._results):
            try:
                cloudpickle.dumps(result)
            except BaseException as exc:  # noqa: BLE001, PERF203 - a class of the user's
                return index, text_of(exc)
        return None


def is_class(handler: object) -> bool:
    """Whether it is a class, or a partial of one, that makes the handler in each actor."""
    return inspect.isclass(handler.func if isinstance(handler, partial) else handler)


def check_handler(handler: object) -> None:
    """Refuse what can be seen to be no handler, before anything starts.

    Raises:
        ConfigError: It is no function of one argument, no class of such, or makes generators.
    """
    if not is_class(handler):
        check_fits(handler)
        return
    made: Any = handler.func if isinstance(handler, partial) else handler
    call = next((vars(kind)["__call__"] for kind in made.__mro__ if "__call__" in vars(kind)), None)
    if call is None:
        raise ConfigError(
            f"The handler {made.__qualname__} is a class whose objects cannot be called. Give it a "
            "method __call__(self, message)."
        )
    check_fits(partial(call, None))
    given = handler if isinstance(handler, partial) else partial(made)
    try:
        inspect.signature(made).bind(*given.args, **given.keywords)
    except TypeError as exc:
        raise ConfigError(
            f"The handler {made.__qualname__} cannot be made: {exc}. Give its arguments with "
            f"functools.partial({made.__qualname__}, ...)."
        ) from exc
    except ValueError:
        return  # some classes tell nothing
