"""Every contract case runs on the in-memory broker, on it behind workers, and on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_harness import BreakableHarness, Harness
from hosted_harness import HostedHarness
from memory_harness import MemoryHarness
from pulsar_harness import BreakablePulsarHarness, PulsarHarness

from keyshard.testing.devbroker import DevBroker

BOTH = ["memory", "hosted", pytest.param("pulsar", marks=pytest.mark.broker)]


@pytest.fixture(params=BOTH)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A cluster with its topics; the real broker is started once for the session."""
    made: Harness
    if request.param == "memory":
        made = MemoryHarness()
    elif request.param == "hosted":
        made = HostedHarness()
    else:
        dev_broker = request.getfixturevalue("dev_broker")
        made = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    yield made
    made.close()


@pytest.fixture(params=BOTH)
def breakable(request: pytest.FixtureRequest) -> Iterator[BreakableHarness]:
    """A cluster that may be broken; the real broker is another one than that of ``harness``."""
    made: BreakableHarness
    if request.param == "memory":
        made = MemoryHarness()
    elif request.param == "hosted":
        made = HostedHarness()
    else:
        made = BreakablePulsarHarness(request.getfixturevalue("breakable_broker"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def breakable_broker() -> Iterator[DevBroker]:
    """A real broker with what is off by default: batch index acks, and transactions."""
    settings = {
        "acknowledgmentAtBatchIndexLevelEnabled": "true",
        "transactionCoordinatorEnabled": "true",
        # Cursors are written at once and then as good as never: what an acknowledgement finds
        # written does not depend on how fast the test runs.
        "managedLedgerDefaultMarkDeleteRateLimit": "0.001",
        "managedLedgerCursorPositionFlushSeconds": "3600",
        # How long a holder of a range may take to show that it lives.
        "connectionLivenessCheckTimeoutMillis": "1000",
    }
    with DevBroker(settings=settings) as broker:
        yield broker
