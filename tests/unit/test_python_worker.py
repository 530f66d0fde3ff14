"""A Python worker of Spark does not collect garbage over imported modules after each task."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from spark_adapter import python_worker
from spark_adapter.python_worker import FREEZES_MAX, exempt_imports


@pytest.fixture
def frozen_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A process that has exempted nothing, with the list of its module counts."""
    found: list[int] = []
    monkeypatch.setattr(python_worker, "_frozen_at", found)
    yield found
    gc.unfreeze()


@pytest.fixture
def task() -> Iterator[None]:
    TaskContext._setTaskContext(TaskContext())
    yield
    TaskContext._setTaskContext(None)


def test_nothing_is_exempted_outside_a_task(frozen_at: list[int]) -> None:
    before = gc.get_freeze_count()
    exempt_imports()
    # Frozen objects may have ended meanwhile.
    assert gc.get_freeze_count() <= before
    assert not frozen_at


@pytest.mark.usefixtures("task")
def test_imports_are_exempted_once_and_again_after_more_imports(
    frozen_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exempt_imports()
    assert gc.get_freeze_count() > 10_000
    assert frozen_at == [len(sys.modules)]
    exempt_imports()
    assert len(frozen_at) == 1
    for number in range(2 * FREEZES_MAX):
        monkeypatch.setitem(sys.modules, f"imported_{number}", types.ModuleType("imported"))
        exempt_imports()
    assert len(frozen_at) == FREEZES_MAX
