"""One Ray for all tests of this folder, with more room for actors than this machine has cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.ray.ray_topic import RayTopic

CPUS = 8
"""CPUs of the cluster of these tests; requests of actors only decide their placement."""


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray on this machine; no dashboard, and nothing on this process's output."""
    ray.init(
        address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False,
        object_store_memory=256 * 1024 * 1024,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def orders(tmp_path: Path) -> RayTopic:
    return RayTopic(tmp_path)


@pytest.fixture
def quiet_data() -> Iterator[None]:
    """Ray Data shows no progress bars."""
    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = before
