"""Polls the status of what runs once a second while pages are open."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keyshard.control import ASKED_MAX, SINK, RunningSource
from keyshard.errors import ControlError, KeyShardError
from keyshard.threads import Pool, begin

LOOK_S = 1.0
"""Interval of polls, seconds."""
STATUS_S = 3.0
"""Longest wait for the status of a source, sink or worker, seconds."""
SHOWN_MAX = 100
"""Maximum number of sources, sinks and workers that are shown."""
OTHER_BYTES_MAX = 4 * 1024 * 1024
"""Longest status of a sink or worker, bytes of JSON; room for 20,000 consumers."""
GROUPS = {"source": "sources", "sink": "sinks", "worker": "workers"}
"""Names of the lists in answers, in the order in which they are shown."""
SUMMARIES = {
    "source": (
        "version", "kind", "name", "state", "subscription", "topics", "topicsPattern",
        "serviceUrl", "pid", "host", "uptimeSeconds", "newestError", "lag", "rates", "executor",
        "parkedKeys",
    ),
    "sink": (
        "version", "kind", "name", "state", "topic", "serviceUrl", "pid", "host",
        "uptimeSeconds", "newestError", "rates", "unconfirmed",
    ),
    "worker": (
        "version", "kind", "name", "state", "subscription", "serviceUrl", "pid", "host",
        "uptimeSeconds", "newestError", "source", "waiting", "kept",
    ),
}  # fmt: skip
"""Fields of a status that the lists in events have."""

Sources = Callable[[], tuple[list[RunningSource], list[str]]]
"""Returns the sources, sinks and workers that a page shows, and the errors of those that hang."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a source, sink or worker."""

    of: RunningSource
    status: str = ""
    """The whole status as JSON; empty if there is none."""
    summary: dict[str, Any] | None = None
    """The fields of the status that lists have; ``None`` if there is no status."""
    error: str = ""
    """Why there is no status."""

    @property
    def id(self) -> str:
        """Its id in requests."""
        return self.of.path.name

    def facts(self) -> dict[str, Any]:
        """Return what is known without a status."""
        one = self.of
        return {
            "id": self.id, "pid": one.pid, "kind": one.kind, "name": one.name,
            "subscription": None if one.kind == SINK else one.subscription, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one poll, as JSON texts."""

    number: int
    summaries: str
    """The lists of sources, sinks and workers, as members of an object."""
    details: dict[str, str]
    """The whole status of each, by its id; sources come first."""
    error: str
    """Why the lists may be incomplete; empty if they are not."""

    def event(self, wanted: str | None) -> bytes:
        """Return the event for a page that shows one source, sink or worker.

        Args:
            wanted: Its id; ``None`` or an unknown one: the first.
        """
        chosen = wanted if wanted in self.details else next(iter(self.details), None)
        detail = "null" if chosen is None else self.details[chosen]
        text = (
            f'{{"number": {self.number}, "error": {json.dumps(self.error)}, '
            f'{self.summaries}, "chosen": {json.dumps(chosen)}, "status": {detail}}}'
        )
        return f"data: {text}\n\n".encode()


class StatusWatcher:
    """Polls the status of what runs in its own thread while pages are open.

    Args:
        sources: Returns the sources, sinks and workers, and the errors of those that hang.
        told: Called with the result of each poll, in that thread.
    """

    def __init__(self, sources: Sources, told: Callable[[Look], None]) -> None:
        self._sources = sources
        self._told = told
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._number = 0
        self._pool = Pool(ASKED_MAX, "keyshard-page-status")
        self._thread = begin("keyshard-page-look", self._run)

    def watched(self, *, by: int) -> None:
        """Set the number of pages that are open."""
        if by:
            self._wanted.set()
        else:
            self._wanted.clear()

    def answers(self) -> tuple[list[Answer], list[str]]:
        """Ask each source, sink and worker; return their answers, and why some may be missing.

        Sources come first, then sinks, then workers.
        """
        found, errors = self._sources()
        order = list(GROUPS)
        found = sorted(found, key=lambda one: order.index(one.kind_word))
        answers = list(self._pool.map(answer_of, found[:SHOWN_MAX]))
        if len(found) > SHOWN_MAX:
            more = len(found) - SHOWN_MAX
            errors = [*errors, f"{more} more sources, sinks and workers are not shown."]
        return [one for one in answers if one is not None], errors

    def look(self) -> Look:
        """Ask each source, sink and worker for its status."""
        answers, errors = self.answers()
        lists: dict[str, list[dict[str, Any]]] = {group: [] for group in GROUPS.values()}
        for one in answers:
            lists[GROUPS[one.of.kind_word]].append(one.facts() | (one.summary or {}))
        self._number += 1
        return Look(
            self._number,
            json.dumps(lists)[1:-1],
            {one.id: one.status for one in answers if one.status},
            " ".join(errors),
        )

    def close(self) -> None:
        """Stop the polls. Idempotent."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join(1.0)
        self._pool.shutdown(wait=False)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._wanted.wait(LOOK_S) or self._stopping.is_set():
                continue
            began_s = time.monotonic()
            try:
                look = self.look()
            except ControlError as exc:
                look = Look(self._number, json.dumps(_NONE)[1:-1], {}, exc.message)
            self._told(look)
            self._stopping.wait(max(0.0, LOOK_S - (time.monotonic() - began_s)))


_NONE: dict[str, list[Any]] = {group: [] for group in GROUPS.values()}


def answer_of(one: RunningSource) -> Answer | None:
    """Ask a source, sink or worker for its status; return ``None`` if it has ended."""
    try:
        status = one.ask("status", timeout_s=STATUS_S)
        with one.read():
            # A browser cannot read NaN, which Python writes and reads.
            text = json.dumps(status, separators=(",", ":"), allow_nan=False)
            summary = {name: status[name] for name in SUMMARIES[one.kind_word]}
    except KeyShardError as exc:
        return Answer(one, error=exc.message) if one.path.exists() else None
    if one.kind_word != "source" and len(text) > OTHER_BYTES_MAX:
        return Answer(
            one,
            error=f"The status has {len(text):,} bytes; the page shows at most "
            f"{OTHER_BYTES_MAX:,}. keyshard status --pid {one.pid} shows it.",
        )
    return Answer(one, text, summary)
