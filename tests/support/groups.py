"""Groups of tests, and the processes that run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LONG = frozenset({"spark", "ray", "mutants", "simulation", "chaos", "ways"})
"""Folders whose tests last longest."""
FILE_BY_FILE = ("tests/unit/", "tests/property/")
"""Folders of many quick tests. A process gets a file at once, so that few messages are sent, and
what a file shares is made once."""
TOGETHER = {
    "tests/ray": "one Ray",
    "tests/spark/test_bad_input.py": "one Spark session",
    "tests/spark/test_connect.py": "the port of Spark Connect",
    "tests/spark/test_declarative_pipeline.py": "the port of Spark Connect",
    "tests/spark/test_exactly_once.py": "one Spark cluster",
    "tests/spark/test_executors.py": "one Spark cluster",
    "tests/spark/test_secure.py": "one Spark session",
    "tests/spark/test_triggers.py": "one Spark session",
    "tests/contract/test_crash.py": "one broker that breaks",
    "tests/contract/test_undelivered.py": "one broker that breaks",
    "tests/contract/test_producer.py": "one broker that breaks",
    "tests/contract/test_lost_connection.py": "one cut broker",
    "tests/integration/test_reader_disconnects.py": "one cut broker of readers",
    "tests/integration/test_data_loss.py": "one broker that loses data",
    "tests/integration/test_cluster.py": "one cluster",
    "tests/integration/test_failing_bookie.py": "one cluster whose bookie fails",
    "tests/integration/test_stopped_writers.py": "one broker of stopped writers",
    "tests/integration/test_readme.py": "one page",
    "tests/integration/test_status.py": "one source",
    "tests/mutants/test_mutants.py": "one copy of the code",
}
"""Files and folders whose tests share something expensive, or an order: one process runs them."""


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process the next test, or all tests of one group.

    A process always has a test that waits behind the running one. A long test never waits behind
    another long one, because another process may be idle meanwhile. Half of the processes begin
    with long tests, and so have a Spark session; the others run the rest as long as there is any.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._at_length: set[Any] = set()
        """Processes that run, or have run, long tests."""
        self._left = {True, False}
        """Whether tests that wait last long; both until the first search that finds none."""

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget a group that ended: each test makes xdist go through all that it remembers."""
        super().mark_test_complete(node, item_index, duration)
        units = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(units[scope].values()):
            del units[scope]

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(FILE_BY_FILE):
            return file
        return TOGETHER.get(file) or TOGETHER.get(file.rpartition("/")[0], nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        busy = any(map(goes_on, self.assigned_work[node].values()))
        has_room = node in self._at_length or 2 * len(self._at_length) < len(self.assigned_work)
        scope = self._next(long=has_room and not busy)
        if lasts(self.workqueue[scope]):
            self._at_length.add(node)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _next(self, *, long: bool) -> str:
        """Return the first group of tests that last long, or not; the first of all if none does."""
        if long in self._left:
            for scope, unit in self.workqueue.items():
                if lasts(unit) == long:
                    return scope
            self._left.remove(long)
        return next(iter(self.workqueue))


def goes_on(unit: Mapping[str, bool]) -> bool:
    """Whether these tests last long, and not all of them have run."""
    return lasts(unit) and not all(unit.values())


def lasts(unit: Iterable[str]) -> bool:
    """Whether these tests last long: those of some folders, or many that go together."""
    file = next(iter(unit)).partition("::")[0]
    return file.split("/")[1] in LONG or file in TOGETHER
