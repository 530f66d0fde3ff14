"""A stream to a topic whose tasks run twice at once, and lose an executor while they write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_process import SparkProcess, eventually
from tests.spark.speculation_query import BATCHES, KEYS, ROWS, noted
from tests.spark.test_write_batch import stored, target
from tests.support.deadlines import deadline

__all__ = ["target"]
pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]
WAIT_S = deadline(240)
LONG = "KEYSHARD_SPECULATION"
"""Variable that selects the test."""


def executor_of(task: int) -> psutil.Process:
    """The executor of a Python worker."""
    parents = psutil.Process(task).parents()
    return next(one for one in parents if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))


@pytest.mark.skipif(not os.environ.get(LONG), reason=f"starts three JVMs; set {LONG}=1")
def test_attempts_at_once_and_a_killed_executor_store_every_row_once_in_order(
    dev_broker: DevBroker, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("KEYSHARD_TEST_NOTES", str(notes))

    def those(what: str, batch: int) -> list[dict[str, Any]]:
        return [one for one in noted() if what in one and one["batch"] == batch]

    def waited_for(what: str, attempts: int) -> bool:
        run.must_run()
        return len(those(what, 1)) >= attempts

    options = {"topic": target, "service.url": dev_broker.service_url}
    run = SparkProcess(options, tmp_path, module="tests.spark.speculation_query")
    try:
        eventually(lambda: waited_for("stalls", 1), WAIT_S, "an attempt stops while it writes")
        eventually(lambda: waited_for("began", 2), WAIT_S, "Spark starts a second attempt")
        assert not those("stored", 1)
        executor_of(those("stalls", 1)[0]["pid"]).kill()
        eventually(lambda: not run.alive(), WAIT_S, "both batches are committed")
        assert run.committed() == BATCHES, run.tail()
    finally:
        output = run.tail()
        run.stop()
    print(f"\n{notes.read_text()}")
    overtook, completed = those("stored", 0)[0], those("stored", 1)[0]
    assert overtook["attempt"] > 0, output
    assert completed["attempt"] > 0, output
    assert 0 < completed["before"] < completed["stored"], "no row of the killed attempt was found"
    assert stored(dev_broker, target) == {
        f"key-{key}": [f"key-{key}:{number}" for number in range(key, BATCHES * ROWS, KEYS)]
        for key in range(KEYS)
    }
