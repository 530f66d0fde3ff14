"""The session of a case from outside: started, ordered, killed, and its output."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.streams.draw import Query
from tests.streams.session import kill_with_children

ROOT = Path(__file__).parents[2]
_POLL_S = 0.1
_RETRIES = 12


class Running:
    """Queries that run in one session after the other.

    Args:
        drawn: Decides what is drawn meanwhile.
        directory: For files.
        say: Called with a line about each event.
    """

    def __init__(self, drawn: random.Random, directory: Path, say: Callable[[str], None]) -> None:
        self.drawn = drawn
        self.directory = directory
        self.say = say
        self.queries: list[Query] = []
        self.started: set[str] = set()
        """Queries of this session that were started."""
        self.may_end = False
        """Whether the session is to die."""
        self.problems: list[str] = []
        self.errors: list[str] = []
        """Errors of queries."""
        self.process: subprocess.Popen[bytes] | None = None
        self._told = 0
        self._sessions = 0

    def session(self) -> None:
        """Start a session, and the queries in it."""
        self._sessions += 1
        self.started.clear()
        with (self.directory / f"session-{self._sessions}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.streams.session", str(self.directory)],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
                stdout=log, stderr=subprocess.STDOUT, bufsize=0,
            )  # fmt: skip
        for query in self.queries:
            if not query.over:
                self.order(start=query.spec)

    def order(self, **order: Any) -> None:
        """Give the session an order."""
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(order) + "\n").encode())

    def kill(self) -> None:
        """Kill the session and all that it started."""
        if self.process is None:
            return
        kill_with_children(self.process.pid)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def tend(self) -> None:
        """Read what happened; start again what failed."""
        path = self.directory / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [one for one in lines if one.endswith("\n")]
        for line in lines[self._told :]:
            event = json.loads(line)
            self._told += 1
            name = event.get("query", "")
            if event["what"] == "differs":
                self.problems.append(f"{name}: batch {event['batch']} ran again with other rows: "
                                     f"{str(event)[:1500]}")  # fmt: skip
            elif event["what"] == "started":
                self.started.add(name)
            elif event["what"] == "failed":
                self._failed(name, event["text"])
        assert self.process is not None
        if self.process.poll() is not None and not self.may_end:
            self.problems.append("the session ended by itself")
            self.session()

    def _failed(self, name: str, text: str) -> None:
        result = sentence_of(text)
        self.errors.append(f"{name}: {result}")
        self.say(f"    {name} failed: {result[:300]}")
        said = {line.partition("[KEYSHARD_")[2].rstrip() for line in text.splitlines()} - {""}
        if len(said) > 1:
            self.problems.append(f"{name} failed with more than one sentence: {said}")
        if "[KEYSHARD_" not in result:
            self.problems.append(f"{name} failed without a word of keyshard: {text[-1500:]}")
        query = next((one for one in self.queries if one.name == name), None)
        if query is None or query.over:
            return
        query.failures += 1
        if "MALFORMED" in result and query.mode == "FAILFAST":
            query.spec["options"]["mode"] = self.drawn.choice(("PERMISSIVE", "DROPMALFORMED"))
        if query.failures > _RETRIES:
            self.problems.append(f"{name} failed {query.failures} times: {result}")
            query.over = True
            return
        self.order(start=query.spec)

    def until(self, condition: Callable[[], object], limit_s: float, what: str) -> bool:
        """Wait, at most so long, and say so where it was in vain."""
        end = time.monotonic() + limit_s
        while not condition():
            self.tend()
            if time.monotonic() > end:
                self.problems.append(f"not within {limit_s:.0f} s: {what}")
                return False
            time.sleep(_POLL_S)
        return True

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tend()
            time.sleep(_POLL_S)


def sentence_of(text: str) -> str:
    """The sentence of keyshard in what Spark tells; else its beginning."""
    lines = [line for line in text.splitlines() if "[KEYSHARD_" in line]
    return lines[-1].strip() if lines else text[:400]
