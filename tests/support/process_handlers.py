"""Handlers that tests run in processes.

A process imports this module and nothing else of the tests, so it starts in a third of the time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any, NoReturn

from keyshard import Message, Produce, Reject, RetryLater

LEFT: list[threading.Thread] = []
"""A thread of a child that outlives its handler."""


def text_of(message: Message) -> str:
    """The value of a message, a text."""
    assert message.value is not None
    return message.value.decode()


class OwnReject(Reject):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, account: str, code: int) -> None:
        super().__init__(f"no account {account}, code {code}")


class OwnLater(RetryLater):
    """Another one."""

    def __init__(self, account: str, code: int) -> None:
        super().__init__(0.05, f"{account} is locked, code {code}")


class SecretError(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise SystemExit("not for you")

    def __str__(self) -> str:
        raise KeyError("no text")


class OtherError(Exception):
    """An error that becomes an ``int`` when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("7",)


async def coroutine() -> None:
    """Reject the message."""
    raise OwnReject("x", 3)


def raises(message: Message) -> Any:
    """Fail as the value says, else make a file in the folder that it names."""
    if message.value == b"reject":
        raise OwnReject("x", 3)
    if message.value == b"secret":
        raise SecretError
    if message.value == b"other":
        raise OtherError("other")
    if message.value == b"exit":
        raise SystemExit(3)
    if message.value == b"interrupt":
        raise KeyboardInterrupt
    if message.value == b"awaited":
        return coroutine()
    if message.value == b"returned":
        return OwnReject("x", 3)
    folder, name = Path(text_of(message)), message.key or ""
    if name == "later" and not (folder / name).exists():
        (folder / name).touch()
        raise OwnLater("x", 3)
    (folder / f"done-{name}").touch()
    return None


def its_pid(message: Message) -> None:
    """Write the id of the process to the path in the message."""
    Path(text_of(message)).write_text(str(os.getpid()))


def waits_for_file(message: Message) -> None:
    """Write the id of the process to the path in the message, and wait for that with ``.go``."""
    path = Path(text_of(message))
    path.write_text(str(os.getpid()))
    until_s = time.monotonic() + 600
    while not path.with_suffix(".go").exists() and time.monotonic() < until_s:
        time.sleep(0.01)


def has_arrow(message: Message) -> None:
    """Write to the path in the message whether the process has imported Arrow."""
    Path(text_of(message)).write_text(str("pyarrow" in sys.modules))


def kills_itself(_: Message) -> None:
    """End the process by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def generates(_: Message) -> Any:
    """Return a generator of something else than messages."""
    return (n for n in range(3))


def copy(message: Message) -> Iterator[Produce]:
    """Publish the message twice."""
    yield Produce(message.value, key=message.key)
    yield Produce(message.value, key=message.key)


def notes_many_steps(message: Message) -> None:
    """Set 2,000 notes, and go on."""
    for step in range(1, 2_001):
        message.note(f"step {step} of 2,000")
    time.sleep(60)  # The end of the run kills the process.


def leaves_a_thread_behind(message: Message) -> None:
    """Fail once, and leave a thread that goes on setting notes; then go on."""
    if LEFT:
        time.sleep(60)  # The end of the run kills the process.

    def go_on_noting() -> None:
        while True:
            message.note("of the first attempt")

    LEFT.append(threading.Thread(target=copy_context().run, args=[go_on_noting], daemon=True))
    LEFT[0].start()
    raise ValueError("once")


def to_file(message: Message) -> None:
    """Append the number in the message and the id of the process to a file named like the key.

    It waits until two processes have begun.
    """
    folder, number = text_of(message).split("|")
    Path(folder, f"process-{os.getpid()}").touch()
    until_s = time.monotonic() + 600
    while len(list(Path(folder).glob("process-*"))) < 2 and time.monotonic() < until_s:
        time.sleep(0.002)
    with Path(folder, message.key or "").open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
