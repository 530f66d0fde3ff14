"""Fixtures for all tests; the real broker is started once per session, when a test needs it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator

import pytest

from control_folder import own_control_folder
from keyshard.devbroker import DevBroker


@pytest.fixture(scope="session")
def dev_broker() -> Iterator[DevBroker]:
    """A real Pulsar broker of this session; tests that kill brokers start their own."""
    with DevBroker() as broker:
        yield broker


@pytest.fixture
def topic_name() -> str:
    """A short topic name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session", autouse=True)
def _control_folder() -> Iterator[None]:
    """Sources of tests are not found among those that somebody runs here."""
    with own_control_folder():
        yield


@pytest.fixture(scope="session", autouse=True)
def _spark_workers_interpreter() -> None:
    """Spark's Python workers run in this interpreter, on keyshard's Java."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
