"""Every contract case runs on the in-memory broker and on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_harness import Harness, MemoryHarness, PulsarHarness


@pytest.fixture(params=["memory", pytest.param("pulsar", marks=pytest.mark.broker)])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A cluster with its topics; the real broker is started once for the session."""
    made: Harness
    if request.param == "memory":
        made = MemoryHarness()
    else:
        dev_broker = request.getfixturevalue("dev_broker")
        made = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    yield made
    made.close()
