"""Simulated parts of ``socket``, ``select``, ``os`` and futures, for the wire transport."""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from random import Random
from typing import Any, Protocol

from tests.simulation.primitives import Event
from tests.simulation.scheduler import Process, Scheduler, Task

FULL_S = 0.02
"""Longest time that a socket takes nothing more, seconds."""
FULL_SHARE = 0.05
"""Share of the sends of which a socket takes a part only."""


class Network(Protocol):
    """The network of frames."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def up(self) -> bool: ...

    def travel(self) -> None: ...


class Way:
    """One direction of a connection: bytes arrive in order, in pieces, after a while.

    Args:
        network: Carries the bytes.
        random: Where pieces end.
        process: Owner of the threads that carry them.
        arrive: Takes a piece.
    """

    def __init__(
        self, network: Network, random: Random, process: Process, arrive: Callable[[bytes], None]
    ) -> None:
        self._network = network
        self._random = random
        self._process = process
        self._arrive = arrive
        self._under_way = bytearray()
        self._carried = self._cut = False
        self._at_end: Callable[[], None] | None = None

    def put(self, data: bytes) -> None:
        """Send something; no scheduling point."""
        if not self._cut:
            self._under_way += data
            self._carry()

    def finish(self, at_end: Callable[[], None]) -> None:
        """Call something behind all that was sent."""
        self._at_end = at_end
        self._carry()

    def cut(self) -> bytes:
        """Stop the arrival; return the first bytes in flight. These still arrive."""
        self._cut = True
        kept = self._under_way[: self._random.randint(0, len(self._under_way))]
        self._under_way.clear()
        return bytes(kept)

    def _carry(self) -> None:
        if not self._carried:
            self._carried = True
            self._network.scheduler.spawn(self._process, "way", self._run)

    def _run(self) -> None:
        while not self._cut and (self._under_way or self._at_end is not None):
            self._network.travel()
            while not self._network.up and not self._cut:
                self._network.scheduler.sleep(0.05)
            if self._under_way:
                size = len(self._under_way)
                if self._random.random() < 0.3:
                    size = self._random.randint(1, size)
                piece = bytes(self._under_way[:size])
                del self._under_way[:size]
                self._arrive(piece)
            elif self._at_end is not None and not self._cut:
                at_end, self._at_end = self._at_end, None
                at_end()
        self._carried = False


class Source:
    """A source of events for a poll."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.scheduler = scheduler
        self.number = number
        self.waiting: list[Task] = []

    def fileno(self) -> int:
        return self.number

    def ready(self) -> int:
        """The events that are ready now, as flags of a poll."""
        raise NotImplementedError

    def changed(self) -> None:
        """Wake the waiting tasks."""
        for task in self.waiting:
            self.scheduler.wake(task)
        self.waiting.clear()


class Socket(Source):
    """The client's end of a connection; never blocks.

    Args:
        scheduler: Owns the time.
        number: Its file descriptor.
        random: Decides how much it takes and gives at once.
        process: Owner of the threads that make room in it.
    """

    out: Way
    """To the broker."""

    def __init__(self, scheduler: Scheduler, number: int, random: Random, process: Process) -> None:
        super().__init__(scheduler, number)
        self._random = random
        self._process = process
        self._came = bytearray()
        self._ended = self._full = False
        self.closed: Callable[[], None] = lambda: None
        """Called when the client closes it."""

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s == 0, "only a socket that never blocks is simulated"

    def ready(self) -> int:
        readable = bool(self._came or self._ended)
        return (select.POLLIN if readable else 0) | (0 if self._full else select.POLLOUT)

    def came(self, data: bytes) -> None:
        self._came += data
        self.changed()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self.changed()

    def recv(self, size: int) -> bytes:
        if not self._came and not self._ended:
            raise BlockingIOError
        if self._came and self._random.random() < 0.2:
            size = min(size, self._random.randint(1, len(self._came)))
        data = bytes(self._came[:size])
        del self._came[:size]
        return data

    def send(self, data: bytes | bytearray) -> int:
        if self._full:
            raise BlockingIOError
        if self._ended:
            raise BrokenPipeError
        size = len(data)
        if self._random.random() < FULL_SHARE:
            size = self._random.randint(0, size)
            self._full = True
            self.scheduler.spawn(self._process, "room", self._make_room)
        self.out.put(bytes(data[:size]))
        return size

    def _make_room(self) -> None:
        self.scheduler.sleep(self._random.random() * FULL_S)
        self._full = False
        self.changed()

    def shutdown(self, how: int) -> None:
        """No effect; :meth:`close` closes this end."""

    def close(self) -> None:
        self.closed()


class _Pipe(Source):
    """A pipe that wakes a polling thread."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        super().__init__(scheduler, number)
        self.bytes = 0

    def ready(self) -> int:
        return select.POLLIN if self.bytes else 0


class Descriptors:
    """Replaces the modules ``os`` and ``select`` for polls of sockets and pipes."""

    POLLIN, POLLOUT = select.POLLIN, select.POLLOUT

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count(1_000_000)
        self._pipes: dict[int, _Pipe] = {}

    def new(self) -> int:
        """A number that nothing has."""
        return next(self._numbers)

    def pipe(self) -> tuple[int, int]:
        ends = self.new(), self.new()
        made = _Pipe(self._scheduler, ends[0])
        self._pipes.update(dict.fromkeys(ends, made))
        return ends

    def set_blocking(self, end: int, blocking: bool) -> None:
        assert not blocking, f"only pipes that never block are simulated, {end}"

    def write(self, end: int, data: bytes) -> int:
        self._pipes[end].bytes += len(data)
        self._pipes[end].changed()
        return len(data)

    def read(self, end: int, size: int) -> bytes:
        pipe = self._pipes[end]
        if not pipe.bytes:
            raise BlockingIOError
        found = min(size, pipe.bytes)
        pipe.bytes -= found
        return b"\0" * found

    def close(self, end: int) -> None:
        del self._pipes[end]

    def poll(self) -> Poll:
        return Poll(self._scheduler, self._pipes)


class Poll:
    """Replaces ``select.poll``."""

    def __init__(self, scheduler: Scheduler, pipes: dict[int, _Pipe]) -> None:
        self._scheduler = scheduler
        self._pipes = pipes
        self._wanted: dict[int, tuple[Source, int]] = {}

    def register(self, what: Source | int, wanted: int) -> None:
        source = self._pipes[what] if isinstance(what, int) else what
        self._wanted[source.number] = source, wanted

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        scheduler = self._scheduler
        end = scheduler.now_s + timeout_ms / 1000
        scheduler.point()
        while not (found := self._ready()) and scheduler.now_s < end:
            assert scheduler.current is not None
            for source, _ in self._wanted.values():
                source.waiting.append(scheduler.current)
            scheduler.block(end - scheduler.now_s)
        return found

    def _ready(self) -> list[tuple[int, int]]:
        states = [(one.number, one.ready() & wanted) for one, wanted in self._wanted.values()]
        return [state for state in states if state[1]]


def answers(scheduler: Scheduler) -> type:
    """Replaces the class ``Future`` for requests that wait for an answer."""

    class Answer:
        def __init__(self) -> None:
            self._came = Event(scheduler)
            self._result: Any = None
            self._error: BaseException | None = None
            self._callbacks: list[Callable[[Any], object]] = []

        def __class_getitem__(cls, _: Any) -> type:
            return cls

        def done(self) -> bool:
            return self._came.is_set()

        def set_result(self, result: Any) -> None:
            self._end(result, None)

        def set_exception(self, error: BaseException) -> None:
            self._end(None, error)

        def _end(self, result: Any, error: BaseException | None) -> None:
            if self._came.is_set():
                raise InvalidStateError
            self._result, self._error = result, error
            self._came.set()
            for callback in self._callbacks:
                callback(self)

        def add_done_callback(self, callback: Callable[[Any], object]) -> None:
            if self._came.is_set():
                callback(self)
            else:
                self._callbacks.append(callback)

        def exception(self) -> BaseException | None:
            assert self._came.is_set(), "nobody asks for this before it is there"
            return self._error

        def result(self, timeout: float | None = None) -> Any:
            if not self._came.wait(timeout):
                raise TimeoutError
            if self._error is not None:
                raise self._error
            return self._result

    return Answer
