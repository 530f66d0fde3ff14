"""A topic on the in-memory broker of this process, and handlers that actors import."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyshard import Message
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.entry import full_topic_name
from keyshard.testing.verify.history import HistoryWriter, read_history
from keyshard.testing.verify.recorder import Recorder
from keyshard.testing.verify.workloads import parse_value
from tests.helpers import present
from tests.support.memory_topic import MemoryTopic
from tests.support.recorded_source import held

Result = tuple[str, int]
"""Key and sequence number of a message."""


class RayTopic(MemoryTopic):
    """A topic with three partitions, and the results taken from it.

    Args:
        folder: Holds the history.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(partitions=3)
        self.history = folder / "history.jsonl"
        self.sent: dict[str, int] = defaultdict(int)
        self.taken: list[Result] = []

    def publish(self, keys: int, per_key: int) -> int:
        """Publish messages of ``keys`` keys in turn; return their number."""
        messages = []
        for _ in range(per_key):
            for key in (f"k{number}" for number in range(keys)):
                messages.append(Stored(f"{key}:{self.sent[key]}:".encode(), key=key))
                self.sent[key] += 1
        self.cluster.publish(self.topic, *messages)
        return len(messages)

    def take(self, results: Iterable[Result], job: Any, count: int | None = None) -> None:
        """Take results until there are ``count`` more, by default all; then drain."""
        left = sum(self.sent.values()) - len(self.taken) if count is None else count
        for result in results:
            self.taken.append(result)
            left -= 1
            if not left:
                job.drain()

    def check_taken(self) -> None:
        """Check that everything was taken once, in order per key."""
        seen: dict[str, list[int]] = defaultdict(list)
        for key, seq in self.taken:
            seen[key].append(seq)
        assert seen == {key: list(range(count)) for key, count in self.sent.items()}

    def check_history(self) -> None:
        """The checkers judge what the handlers of :class:`Recorded` wrote."""
        with HistoryWriter(self.history) as writer:
            Recorder(writer, "test").sent(full_topic_name(self.topic), self.sent)
        held(sorted(read_history(self.history), key=lambda event: event.t))


def key_and_seq(message: Message) -> Result:
    """The value of a message of :class:`RayTopic`."""
    return parse_value(present(message.value))


def data_and_version(message: Message) -> tuple[Any, int | None]:
    return message.data, message.schema_version


def version(message: Message) -> tuple[int | None]:
    return (message.schema_version,)


async def soon(message: Message) -> Result:
    return key_and_seq(message)


def slowly(message: Message) -> Result:
    time.sleep(0.01)
    return key_and_seq(message)


def even_only(message: Message) -> Result | None:
    result = key_and_seq(message)
    return result if result[1] % 2 == 0 else None


class CountsFrom:
    """A handler class that counts its calls from a first number, in steps."""

    def __init__(self, first: int, *, step: int = 1) -> None:
        self.next, self.step = first, step

    def __call__(self, _message: Message) -> tuple[int, int]:
        self.next += self.step
        return os.getpid(), self.next


def rows_and_keys(rows: pa.RecordBatch) -> pa.Table:
    """Return values, keys and slots of an Arrow batch."""
    return pa.Table.from_batches([rows]).select(["value", "__key", "__slot"])


class Recorded:
    """Writes what it does to a history; ends its own process in the middle of one message.

    Args:
        history: The file.
        dies_at: Value of the message at which it ends, once.
        how: ``kill``, ``exit`` or ``terminate``.
        seconds: How long each message takes.
    """

    def __init__(
        self, history: str, *, dies_at: str = "", how: str = "kill", seconds: float = 0.0
    ) -> None:
        self.dies_at, self.how, self.seconds = dies_at.encode(), how, seconds
        self.died = Path(f"{history}.died")
        self.recorder = Recorder(HistoryWriter(history), f"actor {os.getpid()}")

    def __call__(self, message: Message) -> Result:
        self.recorder.started(message)
        time.sleep(self.seconds)
        if message.value == self.dies_at and not self.died.exists():
            self.died.touch()
            self.recorder.crashed()
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGTERM if self.how == "terminate" else signal.SIGKILL)
        self.recorder.completed(message, 0.0)
        return key_and_seq(message)


class Fails:
    """Fails with one message: the first ``times`` of each actor, or always.

    With ``returns``, it returns the error instead of raising it.
    """

    def __init__(
        self, value: str, times: int = sys.maxsize, error: type = ValueError, *,
        returns: bool = False,
    ) -> None:  # fmt: skip
        self.value, self.times, self.error = value.encode(), times, error
        self.returns = returns

    def __call__(self, message: Message) -> Result | Exception:
        if message.value == self.value and self.times:
            self.times -= 1
            error = self.error(f"no {self.value.decode()}")
            if self.returns:
                return error
            raise error
        return key_and_seq(message)


class Unpicklable(Exception):  # noqa: N818
    """Its content cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def gives_a_lock(message: Message) -> Any:
    return threading.Lock() if message.value == b"k1:1:" else None


def gives_a_generator(message: Message) -> Any:
    return (number for number in range(3))


def gives_much(message: Message) -> bytes:
    return bytes(10_000_000)


def ends_its_process(message: Message) -> None:
    if message.value == b"k1:1:":
        os._exit(7)


def terminates_its_process(message: Message) -> None:
    if message.value == b"k1:1:":
        os.kill(os.getpid(), signal.SIGTERM)


def exits(message: Message) -> None:
    sys.exit("enough")


class DoesNotBegin:
    def __init__(self) -> None:
        raise FileNotFoundError("model.bin")

    def __call__(self, message: Message) -> None: ...


class BeginsForEver:
    def __init__(self) -> None:
        time.sleep(3_600)

    def __call__(self, message: Message) -> None: ...


class DiesEarly:
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, message: Message) -> None: ...


class NoCall:
    """Its objects cannot be called."""
