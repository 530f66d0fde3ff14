"""One Ray for all tests of this folder, with more room for actors than this machine has cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

CPUS = 8
"""Of the cluster of these tests; what actors ask for only decides whether they are placed."""


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray on this machine; no dashboard, and nothing on this process's output."""
    ray.init(
        address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False,
        object_store_memory=256 * 1024 * 1024,
    )  # fmt: skip
    yield
    ray.shutdown()
