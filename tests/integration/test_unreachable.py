"""A broker that is not there: a named error within the operation timeout."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from keyshard import KeyShardSource
from keyshard.errors import BrokerUnavailableError

TIMEOUT_MS = 1_000
MARGIN_S = 4.0
"""What one request that is under way at the deadline may add, on a busy machine, seconds."""


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is taken, and on which nobody listens."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("field", ["service_url", "admin_url"])
def test_nothing_answers(port: int, field: str) -> None:
    url = f"{'http' if field == 'admin_url' else 'pulsar'}://127.0.0.1:{port}"
    source = KeyShardSource(
        "orders", subscription="billing", operation_timeout_ms=TIMEOUT_MS, **{field: url}
    )
    began = time.monotonic()
    with pytest.raises(BrokerUnavailableError) as caught:
        source.open()
    took = time.monotonic() - began
    assert str(caught.value).startswith("[KEYSHARD_BROKER_UNAVAILABLE]")
    assert url in str(caught.value)
    assert f"Check {field.replace('_', '.')}" in str(caught.value)
    assert took < TIMEOUT_MS / 1000 + MARGIN_S, f"only after {took:.1f} s"
