"""A handler that fails by rules, for threads, coroutines and processes; its state is in files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from keyshard import Message, Reject
from tests.support.process_handlers import text_of

POLL_S = 0.005


class FailingHandler:
    """Some messages fail once, a key fails until it is healed, some are rejected, one hangs.

    Args:
        folder: Where it keeps what it knows; shared by all processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, message: Message) -> None:
        while self.hangs(message):
            time.sleep(POLL_S)

    def heal(self) -> None:
        """End the failures of the key ``poison``."""
        (self.folder / "healed").touch()

    def let_go(self) -> None:
        """Continue the handler that hangs."""
        (self.folder / "let go").touch()

    def hung(self) -> bool:
        """Whether one hangs, or did."""
        return (self.folder / "hung").exists()

    def hangs(self, message: Message) -> bool:
        """Apply the rules to a message. Return whether to wait and call this again."""
        key, number, *_ = text_of(message).split(":")
        seq = int(number)
        if key == "poison" and not (self.folder / "healed").exists():
            raise ValueError("it fails until it is healed")
        if key.startswith("flaky") and seq % 3 == 0:
            self._fail_once(f"{key}:{seq}")
        if key == "wrong" and seq % 2:
            raise Reject("it is wrong")
        if key == "stuck" and seq == 1 and not (self.folder / "let go").exists():
            # The last attempt hangs: a stop that counted it as failed would park the key.
            if not self.hung():
                self._fail_once("stuck")
            (self.folder / "hung").touch()
            return True
        return False

    def _fail_once(self, name: str) -> None:
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return
        raise ValueError("it fails at the first time")


class AsyncFailingHandler(FailingHandler):
    """The same as a coroutine."""

    async def __call__(self, message: Message) -> None:  # type: ignore[override]
        while self.hangs(message):  # noqa: ASYNC110 - it waits for a file
            await asyncio.sleep(POLL_S)
