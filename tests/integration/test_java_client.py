"""The Java client of tests, without a broker."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest

from tests.support.java_client import JavaClient

pytestmark = pytest.mark.broker


def test_handles_that_outlive_the_java_process_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    java = JavaClient("pulsar://127.0.0.1:1", tmp_path / "log")
    handles = [java.api.PulsarClient.builder() for _ in range(100)]
    caplog.set_level(logging.INFO)
    java.close()
    del handles
    gc.collect()
    assert caplog.messages == []
