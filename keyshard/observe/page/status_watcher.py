"""Polls the status of the running sources once a second while pages are open."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keyshard.control import RunningSource
from keyshard.errors import ControlError, KeyShardError
from keyshard.threads import begin

LOOK_S = 1.0
"""Interval of polls, seconds."""
ASK_S = 3.0
"""Longest wait for the status of a source, seconds."""
SOURCES_MAX = 100
"""Maximum number of sources that are shown."""
SUMMARY = (
    "version", "kind", "name", "state", "subscription", "topics", "topicsPattern", "serviceUrl",
    "pid", "host", "uptimeSeconds", "newestError", "lag", "rates", "executor", "parkedKeys",
)  # fmt: skip
"""Fields of a status that the list of sources has."""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one poll: the status of the running sources, as JSON texts."""

    number: int
    sources: str
    """The list of sources: their summaries."""
    details: dict[str, str]
    """The whole status of each source, by its id."""
    error: str
    """Why sources may be missing from the list; empty if none is."""

    def event(self, wanted: str | None) -> bytes:
        """Return the event for a page that shows one source.

        Args:
            wanted: Id of the source; ``None`` or an unknown one: the first.
        """
        chosen = wanted if wanted in self.details else next(iter(self.details), None)
        detail = "null" if chosen is None else self.details[chosen]
        text = (
            f'{{"number": {self.number}, "error": {json.dumps(self.error)}, '
            f'"sources": {self.sources}, "chosen": {json.dumps(chosen)}, "status": {detail}}}'
        )
        return f"data: {text}\n\n".encode()


class StatusWatcher:
    """Polls the status of the running sources in its own thread while pages are open.

    Args:
        sources: Returns the running sources, and the errors of those that do not answer.
        told: Called with the result of each poll, in that thread.
    """

    def __init__(
        self,
        sources: Callable[[], tuple[list[RunningSource], list[str]]],
        told: Callable[[Look], None],
    ) -> None:
        self._sources = sources
        self._told = told
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._number = 0
        self._thread = begin("keyshard-page-look", self._run)

    def watched(self, *, by: int) -> None:
        """Set the number of pages that are open."""
        if by:
            self._wanted.set()
        else:
            self._wanted.clear()

    def look(self) -> Look:
        """Ask every source for its status."""
        summaries: list[dict[str, Any]] = []
        details: dict[str, str] = {}
        sources, errors = self._sources()
        for one in sources[:SOURCES_MAX]:
            summary: dict[str, Any] = {
                "id": one.path.name, "kind": one.kind, "name": one.name, "pid": one.pid,
                "subscription": one.subscription, "error": "",
            }  # fmt: skip
            try:
                status = one.ask("status", timeout_s=ASK_S)
                with one.read():
                    summary |= {name: status[name] for name in SUMMARY}
                details[one.path.name] = json.dumps(status, separators=(",", ":"))
            except KeyShardError as exc:
                if not one.path.exists():
                    continue
                summary["error"] = exc.message
            summaries.append(summary)
        if len(sources) > SOURCES_MAX:
            errors.append(f"{len(sources) - SOURCES_MAX} more sources are not shown.")
        self._number += 1
        return Look(self._number, json.dumps(summaries), details, " ".join(errors))

    def close(self) -> None:
        """Stop the polls. Idempotent."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._wanted.wait(LOOK_S) or self._stopping.is_set():
                continue
            began_s = time.monotonic()
            try:
                look = self.look()
            except ControlError as exc:
                look = Look(self._number, "[]", {}, exc.message)
            self._told(look)
            self._stopping.wait(max(0.0, LOOK_S - (time.monotonic() - began_s)))
