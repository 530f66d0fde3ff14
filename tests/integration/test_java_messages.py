"""Messages of the Java client, field by field (longer: ``python -m tests.proofs java``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.testing.devbroker import DevBroker
from tests.java_messages import BATCHING, COMPRESSIONS, hold, round_of
from tests.support.java_client import JavaClient

pytestmark = pytest.mark.broker

ROUNDS = [round_of(seed, messages=40) for seed in range(16)]


def test_both_decoders_read_messages_of_the_java_client(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    assert {made.compression for made in ROUNDS} == set(COMPRESSIONS)
    assert {made.batching for made in ROUNDS} == set(BATCHING)
    assert {made.pairs for made in ROUNDS} == {True, False}
    broker = WireBroker(Connection(dev_broker.service_url))
    java = JavaClient(dev_broker.service_url, tmp_path / "java.log")
    try:
        for made in ROUNDS:
            hold(java, broker, made)
    finally:
        broker.close()
        java.close()
