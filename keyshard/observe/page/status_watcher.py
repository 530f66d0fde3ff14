"""Polls the status of what runs once a second while pages are open."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keyshard.control import (
    ASKED_MAX,
    WHO,
    RunningSource,
    found_among,
    found_at,
    has_ended,
    kind_at,
)
from keyshard.control_requests import Requests, ask
from keyshard.errors import ControlError, KeyShardError
from keyshard.threads import begin
from keyshard.version import VERSION

LOOK_S = 1.0
"""Interval of polls, seconds."""
STATUS_S = 2.0
"""Longest wait of a poll for all answers, and of a request for the status of one, seconds."""
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

Sockets = Callable[[], list[Path]]
"""Returns the control sockets of the sources, sinks and workers that a page shows."""


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
        return {"id": self.id, **self.of.facts, "release": self.of.release, "error": self.error}


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
            f'{{"release": "{VERSION}", "number": {self.number}, '
            f'"error": {json.dumps(self.error)}, '
            f'{self.summaries}, "chosen": {json.dumps(chosen)}, "status": {detail}}}'
        )
        return f"data: {text}\n\n".encode()


class StatusWatcher:
    """Polls the status of what runs in its own thread while pages are open.

    Args:
        sockets: Returns the control sockets.
        told: Called with the result of each poll, in that thread.
    """

    def __init__(self, sockets: Sockets, told: Callable[[Look], None]) -> None:
        self._sockets = sockets
        self._told = told
        self._requests = Requests()
        self._known: dict[Path, RunningSource] = {}
        """The source, sink or worker at each socket that has answered once."""
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._number = 0
        self._thread = begin("keyshard-page-look", self._run)

    def watched(self, *, by: int) -> None:
        """Set the number of pages that are open."""
        if by:
            self._wanted.set()
        else:
            self._wanted.clear()

    def answers(self) -> tuple[list[Answer], list[str]]:
        """Ask each source, sink and worker; return their answers, and why some may be missing.

        Sources come first, then sinks, then workers. All are asked at the same time, so those that
        hang delay no other one.
        """
        paths, known = _ordered(self._sockets()), self._known
        asked = paths[:ASKED_MAX]
        unknown = [path for path in asked if path not in known]
        requests = self._requests.ask(
            [(path, "status") for path in asked] + [(path, WHO) for path in unknown], STATUS_S
        )
        found, failed = found_among(requests[path, WHO] for path in unknown)
        found += [known[path] for path in asked if path in known]
        self._known = {one.path: one for one in found}
        errors = [error.message for error in failed]
        shown = sorted(found, key=lambda one: (_ORDER[one.kind_word], one.pid, one.path))
        more = len(paths) - len(asked) + max(0, len(shown) - SHOWN_MAX)
        if more:
            errors.append(f"{more} more sources, sinks and workers are not shown.")
        answers = [answer_of(one, requests[one.path, "status"].result) for one in shown[:SHOWN_MAX]]
        return [one for one in answers if one is not None], list(dict.fromkeys(errors))

    def found(self, wanted: str) -> RunningSource | None:
        """Return what runs with an id; ``None`` if nothing does.

        Raises:
            ControlError: Its process does not answer.
        """
        path = next((one for one in self._sockets() if one.name == wanted), None)
        if path is None:
            return None
        who, known = partial(ask, path, {"do": WHO}, STATUS_S), self._known.get(path)
        if known is None:
            return found_at(path, who)
        try:
            known.answer(who)  # a request that may take long is sent to no process that hangs
        except ControlError as exc:
            if has_ended(path, exc.__cause__):
                return None
            raise
        return known

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
        self._requests.close()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._wanted.wait(LOOK_S) or self._stopping.is_set():
                continue
            began_s = time.monotonic()
            self._told(self.look())
            self._stopping.wait(max(0.0, LOOK_S - (time.monotonic() - began_s)))


_ORDER = {kind: at for at, kind in enumerate(GROUPS)}


def _ordered(paths: list[Path]) -> list[Path]:
    """Return sockets of sources, then of sinks, then of workers."""
    return sorted(paths, key=lambda path: (_ORDER.get(kind_at(path), len(_ORDER)), path))


def answer_of(one: RunningSource, result: Callable[[], Any]) -> Answer | None:
    """Return the answer of a source, sink or worker; ``None`` if it has ended.

    Args:
        one: The source, sink or worker.
        result: Returns the result of the request for its status.
    """
    try:
        status = one.answer(result)
        with one.read():
            # A browser cannot read NaN, which Python writes and reads.
            text = json.dumps(status, separators=(",", ":"), allow_nan=False)
            summary = {name: status[name] for name in SUMMARIES[one.kind_word]}
    except KeyShardError as exc:
        return None if has_ended(one.path, exc.__cause__) else Answer(one, error=exc.message)
    if one.kind_word != "source" and len(text) > OTHER_BYTES_MAX:
        return Answer(
            one,
            error=f"The status has {len(text):,} bytes; the page shows at most "
            f"{OTHER_BYTES_MAX:,}. keyshard status --pid {one.pid} shows it.",
        )
    return Answer(one, text, summary)
