"""The publisher of the chaos runs that speaks Java, without a broker."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest

from tests.chaos.java_publisher import JavaPublisher

pytestmark = pytest.mark.broker


def test_handles_that_outlive_the_process_of_java_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = JavaPublisher(
        "pulsar://127.0.0.1:1", "t", {}, ["k"], rate_per_s=1, seed=0, log=tmp_path / "log"
    )
    publisher.launch()
    handles = [publisher.api.PulsarClient.builder() for _ in range(100)]
    caplog.set_level(logging.INFO)
    publisher.close()
    del handles
    gc.collect()
    assert caplog.messages == []
