"""What lives in a task of :func:`spark_adapter.start_workers`: starts worker processes on demand.

The task outlives queries and knows no broker. The stream process of a query asks its door for a
worker: a process beside the task, which is on the lease of the one that asks, and ends with it and
with the task.
"""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

from pyarrow import flight

from keyshard.broker.hosted.process import at
from keyshard.broker.hosted.questions import INTRODUCE, Verifier
from keyshard.broker.hosted.wire import told
from keyshard.broker.hosted.worker import end_process, started
from keyshard.errors import BrokerError, KeyShardError
from keyshard.threads import begin

CHILDREN_MAX = 64
"""Worker processes behind one door; a query has one behind each that it uses."""


class Door(flight.FlightServerBase):  # type: ignore[misc]
    """Answers questions that have the token.

    Args:
        token: Of the application.
        address: Where to listen, and where its workers do.
    """

    def __init__(self, token: str, address: str) -> None:
        super().__init__(at(address, 0))
        self.endpoint = at(address, self.port)
        self._verifier = Verifier(token, self.endpoint)
        self._address = address
        self._lock = threading.Lock()
        self._starting = 0
        self._children: list[subprocess.Popen[bytes]] = []
        begin("keyshard-door", self.serve)

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        if action.type == INTRODUCE:
            return [self._verifier.introduce(action.body)]
        asked, proof = self._verifier.read(action.body, action.type)
        answer: dict[str, Any] = {"proof": proof}
        try:
            answer["result"] = self._start(**asked["arguments"])
        except KeyShardError as exc:
            answer["error"] = told(exc)
        return [json.dumps(answer).encode()]

    def _start(self, *, version: str, packed: str) -> str:
        """Start a worker process; what it says when it begins."""
        with self._lock:
            for child in [one for one in self._children if one.poll() is not None]:
                self._children.remove(child)
                end_process(child)
            if len(self._children) + self._starting >= CHILDREN_MAX:
                raise BrokerError(f"{CHILDREN_MAX} worker processes live behind one task already.")
            self._starting += 1
        try:
            child, hello = started((version, packed), address=self._address)
            with self._lock:
                self._children.append(child)
        finally:
            with self._lock:
                self._starting -= 1
        return hello.decode()

    def close(self) -> None:
        """Answer nothing more, and end the worker processes."""
        self.shutdown()
        with self._lock:
            while self._children:
                end_process(self._children.pop())
